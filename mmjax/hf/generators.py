"""Read a generator's config from a diffusers folder, and locate its tensors."""

from __future__ import annotations

from pathlib import Path

from mmjax.config import DiffusionTransformerConfig, ModelConfig
from mmjax.hf import pixart
from mmjax.hf.folder import HfFolder
from mmjax.hf.layout import Layout


def generator_from_hf(folder: str | Path) -> DiffusionTransformerConfig:
    """The generator of a diffusers folder, whose weights it will start from, with a connector that starts at random.

    folder: the whole one, or the transformer's own. Raises UserError for a folder or field that cannot be read.
    """
    return pixart.read(pixart.open_transformer(Path(folder).absolute()))


def generator_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the generators that a model takes from a folder."""
    taken = {name: c for name, c in model.generators.items() if c.weights and Path(c.weights) == folder.path}
    return Layout({name: pixart.parts(c) for name, c in taken.items()}, dict.fromkeys(taken, ("",)), pixart.UNUSED)
