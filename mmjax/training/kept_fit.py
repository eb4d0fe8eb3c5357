"""What a run decided of its memory, kept in its folder: gone on with, it computes the same programs, to the same bits.

    {"asked": {"device": "cpu", "mesh": {...}, "memory": 0.0, ..., "remat": {"llm": "auto", ...}, "loss_chunks": 0},
     "policies": {"llm": ["full", "products"], ...}, "loss_chunks": 1, "measured": null, "sum": "5b1c..."}

A profile that was made since, or a device that was busier at the start, would decide otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jax.sharding import Mesh

from mmjax.config import Config
from mmjax.data.kept import sealed, unsealed
from mmjax.planning.fit import Fit, Policies


@dataclass(frozen=True)
class Decision:
    """What was decided. measured: bytes in all, where the compiler was asked."""

    policies: Policies
    loss_chunks: int
    measured: float | None

    @classmethod
    def of(cls, kept: dict[str, Any]) -> Self:
        """As `read_fit` found it."""
        policies = {name: tuple(own) for name, own in kept["policies"].items()}
        return cls(policies, kept["loss_chunks"], kept["measured"])


def asked_of(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What is to be decided, as JSON has it: for which devices, and what the config leaves open."""
    towers = {"llm": config.model.llm, **config.model.encoders}
    asked = {
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "memory": config.mesh.memory,
        "host_memory": config.mesh.host_memory,
        "remat": {name: tower.remat for name, tower in towers.items()},
        "loss_chunks": config.training.loss_chunks,
    }
    return json.loads(json.dumps(asked))


def read_fit(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What was decided when the same was asked, as JSON has it; None where nothing was, or the file is not whole."""
    try:
        kept = unsealed(json.loads(path.read_text()))
        return kept if kept["asked"] == asked else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_fit(path: Path, asked: dict[str, Any], fitted: Fit) -> None:
    """Keep what was decided, in one piece."""
    decision = {"policies": fitted.policies, "loss_chunks": fitted.loss_chunks, "measured": fitted.measured}
    told = json.loads(json.dumps({"asked": asked, **decision}))
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(sealed(told)) + "\n")
    partial.rename(path)
