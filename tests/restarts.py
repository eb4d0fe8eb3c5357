"""What a run's folder tells while it may be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
    """The loss of every step, of which none stands there twice."""
    found = records(run)
    assert len({r["step"] for r in found}) == len(found)
    return {r["step"]: r["loss"] for r in found}


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """What is logged of each step so far."""
    return {record["step"]: record for record in records(run)}


def checkpoints(run: Path) -> list[str]:
    """Everything that lies among them, by name."""
    return sorted(p.name for p in (run / "checkpoints").iterdir())
