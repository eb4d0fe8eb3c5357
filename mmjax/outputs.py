"""Check the files that a command will write, before it does any work for them."""

from __future__ import annotations

import os
from pathlib import Path

from mmjax.errors import UserError

PLOT_SUFFIXES = (".png", ".svg")


def check_output(option: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise UserError where the file of an option cannot be written, or has none of these suffixes."""
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{option} {path}: name a file that ends in {' or '.join(suffixes)}")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option} {path}: name a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path}: permission denied; name a file that you may write")
