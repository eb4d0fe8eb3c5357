"""Read JSON Lines files, in which a killed process may have left half a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of every line; a missing file has none, and incomplete lines are skipped."""
    if not path.is_file():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record
