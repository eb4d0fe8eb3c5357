"""What a run's folder tells while it may be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


def records(run: Path) -> list[dict[str, Any]]:
    """What is logged of steps so far, while it may be written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [r for r in (json.loads(line) for line in lines if line.endswith("\n")) if "loss" in r]


def last(run: Path) -> int:
    """The newest step that is logged."""
    found = records(run)
    return found[-1]["step"] if found else 0


def losses(run: Path) -> dict[int, float]:
    """The loss of every step, of which none stands there twice; where images are made, theirs is added to it."""
    found = records(run)
    assert len({r["step"] for r in found}) == len(found)
    return {r["step"]: r["loss"] + r.get("image_loss/picture", 0.0) for r in found}


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """What is logged of each step so far."""
    return {record["step"]: record for record in records(run)}


def checkpoints(run: Path) -> list[str]:
    """Everything that lies among them, by name."""
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def first_moments(run: Path, step: int) -> dict[str, np.ndarray]:
    """Those in a checkpoint, by path; after one step they are its gradients, times a factor that all have in common."""
    return _arrays(_saved(run, step)["optimizer"]["mu"])


def saved_state(run: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, by path."""
    return _arrays(_saved(run, step))


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(name): x for name, x in jax.tree.leaves_with_path(tree)}


def _saved(run: Path, step: int) -> Any:
    handler = ocp.PyTreeCheckpointHandler()
    path = run / "checkpoints" / str(step) / "state"
    arrays = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree
    )
    return handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=arrays))
