"""Metadata of a checkpoint: its step and run, the config, the position in the data, and checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmjax.disk import verify_checksum, with_checksum
from mmjax.errors import UserError
from mmjax.runtime.bit_sums import Sums
from mmjax.runtime.checkpoint_commit import root_cause_line, saved_steps
from mmjax.runtime.run_dir import RunFolder

FORMAT = "mmjax-2"
# In a checkpoint's folder: the arrays, and a JSON object with format, run, config, data position
# and checksums.
STATE = "state"
META = "meta/metadata"


@dataclass(frozen=True)
class DataState:
    """Position in the data. The step number alone determines it; the rest proves that the data is still the same."""

    step: int  # the next to run
    index: str  # fingerprint of the length index
    budget: dict[str, Any]
    planner: int = 1  # version of the planning algorithm; checkpoints without one are of the first
    segment: int = 0  # the step from which on this data, mixture and batch are used


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint.

    step: of its folder's name. run: the id of the run that saved it; empty where that had none.
    """

    step: int
    config: str  # JSON
    data: DataState
    sums: Sums
    run: str = ""


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete or damaged. Raised on all processes together."""


def checkpoint_step(folder: Path, step: int | None = None) -> int:
    """Return a checkpoint's step, by default the newest's. Raises UserError where there is no such checkpoint."""
    if not (steps := saved_steps(folder)):
        raise UserError(
            f"{folder} holds no checkpoint yet; train further, or start afresh with --overwrite"
        )
    if step is not None and step not in steps:
        raise UserError(
            f"--step {step}: {folder.parent} has checkpoints of {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def write_metadata(checkpoint: Path, config: str, data: DataState, sums: Sums) -> None:
    """Write what a checkpoint's folder says of itself."""
    run = RunFolder(checkpoint.parent.parent).read_identity()
    meta = {"format": FORMAT, "run": run, "config": config, "data": asdict(data), "sums": sums}
    (checkpoint / META).parent.mkdir()
    (checkpoint / META).write_text(json.dumps(with_checksum(meta)))


def read_metadata(folder: Path, step: int) -> CheckpointMetadata:
    """Read the metadata of checkpoint `step`.

    Raises UserError where it is not one of mmjax's, is damaged, or is of another step or run than
    its place says.
    """
    saved = parse_metadata(folder, step)
    if misplaced := describe_misplaced(folder, saved):
        raise UserError(f"checkpoint {folder / str(step)} cannot be used: {misplaced}")
    return saved


def parse_metadata(folder: Path, step: int) -> CheckpointMetadata:
    """Read the metadata of checkpoint `step`, wherever it belongs; raises UserError as `read_metadata` does."""
    with reading(folder, step):
        meta = json.loads((folder / str(step) / META).read_text())
        stored_format = meta.get("format") if isinstance(meta, dict) else None
        if stored_format != FORMAT:
            raise UserError(
                f"its format is {stored_format!r}; this version of mmjax reads {FORMAT!r}"
            )
        meta = verify_checksum(meta)
        data = DataState(**meta["data"])
        return CheckpointMetadata(step, meta["config"], data, meta["sums"], meta.get("run", ""))


def describe_misplaced(folder: Path, saved: CheckpointMetadata) -> str:
    """Say of which step and run a checkpoint is that was put in the place of another; empty where it was not.

    Runs begun by versions that drew no id have none to compare: of their checkpoints only the step
    is compared.
    """
    of_other_run = RunFolder(folder.parent).read_identity() not in ("", saved.run)
    if saved.data.step == saved.step and not of_other_run:
        return ""
    state = "this run's state"
    if of_other_run:
        config = json.loads(saved.config)
        state = f"the state of run {config.get('run') or 'runs/' + str(config.get('name'))}"
    return (
        f"it is {state} after step {saved.data.step}, in the place of step {saved.step}; put back what was there, or "
        "remove it. To start from another run's parameters say init_from=RUN"
    )


@contextmanager
def user_error(message: str) -> Iterator[None]:
    """Turn any error of the body into one line."""
    try:
        yield
    except Exception as error:  # Orbax and its storage raise dozens of kinds for one broken file
        raise UserError(f"{message}: {root_cause_line(error)}") from error


@contextmanager
def reading(folder: Path, step: int) -> Iterator[None]:
    """Turn any error of reading a checkpoint into one line with the remedy."""
    try:
        with user_error(f"checkpoint {folder / str(step)} cannot be used"):
            yield
    except UserError as error:
        older = [s for s in saved_steps(folder) if s < step]
        remedy = (
            f"to use step {older[-1]} instead, remove it" if older else "there is no older one here"
        )
        raise UserError(f"{error}; {remedy}") from error.__cause__
