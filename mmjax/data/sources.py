"""Opens the sources that a config names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Literal

from mmjax.config import Config, EmbeddedSource, FunctionSource
from mmjax.config_files import resolve
from mmjax.data.embedded import EmbeddedDataset
from mmjax.data.sample import Source
from mmjax.errors import UserError

Split = Literal["train", "validation", "test"]


REQUIRED = ("__len__", "fingerprint", "facts", "sample", "item")  # of a Source


def open_sources(config: Config, split: Split, config_folder: Path) -> dict[str, Source]:
    """The sources of one split, by name, in the config's order.

    A function source is called with its arguments and the split, and must return a `Source`. Raises UserError where it
    can't be called so, or returns something else, and where there are no sources.
    """
    if not config.data.sources:
        raise UserError("data.sources is empty; name at least one, such as data.sources.digits=embedded")
    return {name: _open(name, source, split, config, config_folder) for name, source in config.data.sources.items()}


def _open(
    name: str, source: EmbeddedSource | FunctionSource, split: Split, config: Config, config_folder: Path
) -> Source:
    if isinstance(source, EmbeddedSource):
        return EmbeddedDataset(source, split, config.seed)
    make, arguments = resolve(source.function, config_folder), {"split": split, **source.arguments}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise UserError(f"data.sources.{name}: {source.function} cannot be called with {given}: {error}") from None
    opened = make(**arguments)
    if missing := [method for method in REQUIRED if not hasattr(opened, method)]:
        made = type(opened).__name__
        raise UserError(f"data.sources.{name}: {source.function} returned {made}, which has no {missing[0]}()")
    return opened
