"""Files of a run that have a JSON object in every line; a process that was killed may have left half a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file's lines, none where it is not there; lines that are not whole are left out."""
    if not path.is_file():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                told = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(told, dict):
                yield told
