"""Read a generator's config from a diffusers folder, and locate its tensors."""

from __future__ import annotations

from pathlib import Path

from mmjax.config import Generator, ModelConfig, UnetConfig
from mmjax.disk import read_json
from mmjax.hf import pixart, unet
from mmjax.hf.folder import CLASS_NAME, HfFolder
from mmjax.hf.layout import Layout


def generator_from_hf(folder: str | Path) -> Generator:
    """The generator of a diffusers folder, whose weights it will start from, with a connector that starts at random.

    folder: the whole one, or that of its transformer or UNet. Raises UserError for a folder or field that cannot be
    read.
    """
    path = Path(folder).expanduser().absolute()
    config = path / "config.json"
    kind = read_json(config).get(CLASS_NAME) if config.is_file() else ""
    if kind == unet.CLASS or (not kind and (path / unet.PART).is_dir()):
        return unet.unet_from_hf(path)
    return pixart.read(pixart.open_transformer(path))


def generator_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the generators that a model takes from a folder."""
    taken = {name: c for name, c in model.generators.items() if c.weights and Path(c.weights) == folder.path}
    names = {name: unet.unet_tensors(c) if isinstance(c, UnetConfig) else pixart.parts(c) for name, c in taken.items()}
    return Layout(names, dict.fromkeys(taken, ("",)), pixart.UNUSED)
