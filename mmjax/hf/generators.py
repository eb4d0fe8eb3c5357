"""Read a generator's config from a diffusers folder, and locate its tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmjax.config import DiffusionTransformerConfig, Generator, ModelConfig, UnetConfig
from mmjax.config.model import step_vaes
from mmjax.disk import read_json
from mmjax.hf import pixart, unet, vae
from mmjax.hf.folder import CLASS_NAME, HfFolder
from mmjax.hf.layout import Layout, TensorNames
from mmjax.hub import generator_folder


def generator_from_hf(folder: str | Path) -> Generator:
    """The generator of a diffusers folder, whose weights it will start from, with a connector that starts at random.

    folder: the whole one, whose VAE then makes the latents, or the transformer's or UNet's own; or
    a name on the Hub (`mmjax.hub`). Raises UserError for a folder or field that cannot be read.
    """
    path = generator_folder(folder).absolute()
    generator = (
        unet.read(unet.open_unet(path))
        if _is_unet(path)
        else pixart.read(pixart.open_transformer(path))
    )
    return (
        replace(generator, latents=vae.vae_latents(path))
        if (path / vae.PART / "config.json").is_file()
        else generator
    )


def _is_unet(path: Path) -> bool:
    """Return whether a folder is a UNet's own, or has one."""
    if (path / unet.PART / "config.json").is_file():
        return True
    return (path / "config.json").is_file() and read_json(path / "config.json").get(
        "_class_name"
    ) == unet.CLASS


def generator_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the generators that a model takes from a folder, or the VAEs that encode their images in every step."""
    if folder.fields.get(CLASS_NAME, str) == vae.CLASS:
        names = [f"{name}.vae" for name in step_vaes(model)]
        decoder = ("decoder.*", "post_quant_conv.*")
        return Layout(
            {
                name: vae.vae_tensors(step_vaes(model)[name.removesuffix(".vae")], folder)
                for name in names
            },
            dict.fromkeys(names, ("",)),
            decoder,
        )
    taken = {
        name: c
        for name, c in model.generators.items()
        if c.weights and Path(c.weights) == folder.path
    }
    return Layout(
        {name: _parts(c) for name, c in taken.items()}, dict.fromkeys(taken, ("",)), pixart.UNUSED
    )


def _parts(config: DiffusionTransformerConfig | UnetConfig) -> TensorNames:
    return pixart.parts(config) if config.is_stack else unet.parts(config)
