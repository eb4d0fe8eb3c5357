"""History of a run: the config, data and devices of every start, so that any of its steps can be reproduced.

`history.jsonl` in the run's folder has a line for every start. A step was run by the last start at or before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from mmjax.config import Config
from mmjax.config.loading import from_json, to_json
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.data_change import Segment
from mmjax.data.plan.placement import Shape, Topology
from mmjax.data.plan.row_shapes import RankLayout
from mmjax.data.sample import Files
from mmjax.data.storage.array_store import verify_checksum, with_checksum
from mmjax.errors import UserError
from mmjax.runtime.run_dir import read_json_lines


@dataclass(frozen=True)
class Launch:
    """One start of a run. index: name of the length index's folder, inside the run's `index` folder."""

    first: int  # its first step
    began: str  # date and time
    version: str  # of mmjax
    processes: int
    devices: str
    samples: int
    index: str
    fingerprint: str  # of the index
    files: Mapping[str, Files]  # of every source
    weights: Sequence[float]  # of the sources
    budget: Budget
    layout: RankLayout
    segment: Segment
    config: Config

    def to_json(self) -> str:
        """Format this start as one line of `history.jsonl`."""
        plain = asdict(replace(self, config=None, segment=None))
        segment = asdict(self.segment) | {"due": self.segment.due and self.segment.due.name}
        record = plain | {"segment": segment, "config": json.loads(to_json(self.config))}
        # Through JSON once, so that the checksum is of what reading gives: lists, not tuples.
        return json.dumps(with_checksum(json.loads(json.dumps(record)))) + "\n"

    @classmethod
    def from_json(cls, line: str, folder: Path) -> Self:
        """Parse a line of `to_json`; its file of due samples is in `folder`.

        Raises ValueError, KeyError, TypeError or UserError where the line is of another version, or damaged.
        """
        record = verify_checksum(json.loads(line))
        layout = record["layout"]
        shapes = tuple(Shape(tuple(lengths), tuple(widths)) for lengths, widths in layout["shapes"])
        due = record["segment"]["due"]
        budget = {key: tuple(x) if isinstance(x, list) else x for key, x in record["budget"].items()}
        record["layout"] = RankLayout(Topology(**layout["topology"]), tuple(layout["rows"]), shapes)
        record["segment"] = Segment(**record["segment"] | {"due": folder / due if due else None})
        record["budget"] = Budget(**budget)
        record["files"] = {name: [(file, n) for file, n in files] for name, files in record["files"].items()}
        record["config"] = from_json(json.dumps(record["config"]))
        return cls(**record)


# The end of a complete line. A line without it was cut off by a kill, before any step was run.
_COMPLETE = re.compile(r'"sum": "[0-9a-f]{16}"}$')


def launch_of_step(path: Path, step: int, due: Path) -> Launch | None:
    """Return the start that ran step `step`, or will if it is the next; None where no line of `path` has one.

    due: the folder of due samples. Raises UserError where a line is damaged, or is of another version of mmjax.
    """
    match = None
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not _COMPLETE.search(line):
            continue
        try:
            record = verify_checksum(json.loads(line))
        except ValueError:
            raise UserError(f"{path}:{number}: is not what was written; restore that file") from None
        # Later lines win: a resumed run may repeat steps that an earlier start had run.
        if record["first"] <= step:
            match = number, line
    if match is None:
        return None
    number, line = match
    try:
        return Launch.from_json(line, due)
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(
            f"{path}:{number}: cannot be read by this version of mmjax ({error}); use the one that wrote it"
        ) from None


def read_launches(path: Path) -> list[dict[str, Any]]:
    """Read every start as plain JSON, to show to a person."""
    return [life for life in read_json_lines(path) if "first" in life]


def append_launch(path: Path, life: Launch) -> None:
    """Append a start. One that was killed may have left half a line, which then gets its end first."""
    ended = not path.is_file() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write(("" if ended else "\n") + life.to_json())
