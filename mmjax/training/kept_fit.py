"""Cache of a run's memory plan (remat policies, loss chunks), so that a resumed run compiles identical programs.

    {"asked": {"device": "cpu", "mesh": {...}, "memory": 0.0, ..., "remat": {"llm": "auto", ...}, "loss_chunks": 0},
     "policies": {"llm": ["full", "products"], ...}, "loss_chunks": 1, "measured": null, "sum": "5b1c..."}

Planned afresh, a new layer profile, or a device that was busier at the start, could lead to another plan.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from mmjax.config import Config
from mmjax.data.kept import verify_checksum, with_checksum
from mmjax.planning.fit import MemoryPlan, Policies


@dataclass(frozen=True)
class MemoryDecision:
    """The policies and loss chunks of a run. measured: bytes per device in all, where the compiler measured them."""

    policies: Policies
    loss_chunks: int
    measured: float | None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Restore a decision from the record that `read_memory_plan` returned."""
        policies = {name: tuple(layers) for name, layers in record["policies"].items()}
        return cls(policies, record["loss_chunks"], record["measured"])


def plan_key(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the cache key of a memory plan, as JSON: the devices, and what the config fixes or leaves open."""
    towers = {"llm": config.model.llm, **config.model.encoders}
    key = {
        # Whatever the plan depends on and a resumed run may change.
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "memory": config.mesh.memory,
        "host_memory": config.mesh.host_memory,
        "remat": {name: tower.remat for name, tower in towers.items()},
        "loss_chunks": config.training.loss_chunks,
    }
    return json.loads(json.dumps(key))


def read_memory_plan(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Read the record of the plan with this key; None where the file has another one, is missing or is damaged."""
    try:
        record = verify_checksum(json.loads(path.read_text()))
        return record if record["asked"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_memory_plan(path: Path, key: dict[str, Any], fitted: MemoryPlan) -> None:
    """Write the plan under this key, atomically."""
    decision = {"policies": fitted.policies, "loss_chunks": fitted.loss_chunks, "measured": fitted.measured}
    partial = path.with_suffix(".partial")
    # Through JSON once, so that the checksum is of what reading gives: lists, not tuples.
    partial.write_text(json.dumps(with_checksum(json.loads(json.dumps({"asked": key, **decision})))) + "\n")
    partial.rename(path)
