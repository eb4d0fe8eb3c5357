"""The lives of a run: what every start of it was made of, so that any of its steps can be made again.

`history.jsonl` in the run's folder has a line for every start. A step was run by the last life that begins before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from mmjax.config import Config
from mmjax.config_files import from_json, to_json
from mmjax.data.budget import Budget
from mmjax.data.kept import sealed, unsealed
from mmjax.data.layout import RankLayout
from mmjax.data.placement import Shape, Topology
from mmjax.data.segments import Files, Segment
from mmjax.errors import UserError
from mmjax.training.json_lines import whole_lines


@dataclass(frozen=True)
class Life:
    """One start of a run. index: the folder of the length index, in the run's."""

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
        """One line."""
        plain = asdict(replace(self, config=None, segment=None))
        segment = asdict(self.segment) | {"due": self.segment.due and self.segment.due.name}
        whole = json.loads(json.dumps(plain | {"segment": segment, "config": json.loads(to_json(self.config))}))
        return json.dumps(sealed(whole)) + "\n"

    @classmethod
    def from_json(cls, line: str, folder: Path) -> Self:
        """What `to_json` wrote; due: is in `folder`. Raises ValueError, KeyError, TypeError or UserError."""
        told = unsealed(json.loads(line))
        layout, segment, budget = told["layout"], told["segment"], told["budget"]
        shapes = tuple(Shape(tuple(lengths), tuple(widths)) for lengths, widths in layout["shapes"])
        whole = {key: tuple(x) if isinstance(x, list) else x for key, x in budget.items()}
        return cls(
            **told
            | {
                "layout": RankLayout(Topology(**layout["topology"]), tuple(layout["rows"]), shapes),
                "segment": Segment(**segment | {"due": folder / segment["due"] if segment["due"] else None}),
                "budget": Budget(**whole),
                "files": {name: [(file, n) for file, n in files] for name, files in told["files"].items()},
                "config": from_json(json.dumps(told["config"])),
            }
        )


_WHOLE = re.compile(r'"sum": "[0-9a-f]{16}"}$')  # the end of a line; one without was cut off, before any step was run


def life_of(path: Path, step: int, due: Path) -> Life | None:
    """The life that ran step `step`, or will if it is the next; None where no line of `path` tells.

    due: the folder of what segments owe. Raises UserError where a line is not what was written, or that line is not
    readable by this version of mmjax.
    """
    found = None
    for number, line in enumerate(_lines(path), start=1):
        if not _WHOLE.search(line):
            continue
        try:
            told = unsealed(json.loads(line))
        except ValueError:
            raise UserError(f"{path}:{number}: is not what was written; restore that file") from None
        if told["first"] <= step:
            found = number, line
    if found is None:
        return None
    try:
        return Life.from_json(found[1], due)
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(
            f"{path}:{found[0]}: cannot be read by this version of mmjax ({error}); use the one that wrote it"
        ) from None


def all_lives(path: Path) -> list[dict[str, Any]]:
    """Every start as it stands there, for a person to look at."""
    return [life for life in whole_lines(path) if "first" in life]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").split("\n") if path.is_file() else []


def append_life(path: Path, life: Life) -> None:
    """Write a life down. A start that was killed may have left half a line, which gets its end."""
    whole = not path.is_file() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + life.to_json())
