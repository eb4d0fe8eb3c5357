"""Opens the sources that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mmjax.config import Config, EmbeddedSource, FunctionSource
from mmjax.config_files import resolve
from mmjax.data.embedded import EmbeddedDataset
from mmjax.data.sample import Source
from mmjax.errors import UserError

Split = Literal["train", "validation", "test"]


def open_sources(config: Config, split: Split, config_folder: Path) -> dict[str, Source]:
    """The sources of one split, by name, in the config's order. A function source is called with its arguments and
    must return a `Source`; where it takes a `split`, it is passed."""
    return {name: _open(name, source, split, config, config_folder) for name, source in config.data.sources.items()}


def _open(
    name: str, source: EmbeddedSource | FunctionSource, split: Split, config: Config, config_folder: Path
) -> Source:
    match source:
        case EmbeddedSource():
            return EmbeddedDataset(source, split, config.seed)
        case FunctionSource(function=function, arguments=arguments):
            opened = resolve(function, config_folder)(split=split, **arguments)
            if missing := [m for m in ("__len__", "fingerprint", "facts", "sample", "item") if not hasattr(opened, m)]:
                raise UserError(f"data.sources.{name}: {function} returned {type(opened).__name__} without {missing[0]}()")
            return opened
