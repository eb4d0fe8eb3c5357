"""Variational autoencoders (AutoencoderKL) from diffusers folders and back: config, and where each parameter lies."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mmjax.config import VaeConfig, VaeLatents
from mmjax.errors import UserError
from mmjax.hf.diffusers_folder import open_part
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import LeafTensors, TensorNames, convolution, linears, norm

CLASS = "AutoencoderKL"
PART = "vae"
KERNEL = (2, 3, 1, 0)  # from [out, in, row, column]; ours: row, column, in, out
PRODUCT = (1, 0, 2, 3)  # of a convolution over single pixels, which is a product over channels
NAMES = ({"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out.0"},
         {"query": "query", "key": "key", "value": "value", "output": "proj_attn"})  # fmt: skip


def open_vae(path: str | Path) -> HfFolder:
    """Open the VAE of a diffusers folder, or its own folder. Raises UserError where there is none."""
    if not str(path):
        raise UserError(
            "a generator's latents.weights is empty; name the diffusers folder of the VAE that makes them"
        )
    return open_part(path, PART, CLASS)


def read_vae(folder: HfFolder) -> VaeConfig:
    """Read the VAE that a config says. Raises UserError, by name, for what is not supported."""
    fields = folder.fields
    widths = _widths(fields)
    for name, block in (
        ("down_block_types", "DownEncoderBlock2D"),
        ("up_block_types", "UpDecoderBlock2D"),
    ):
        fields.allow_only(name, [block] * len(widths))
    fields.allow_only("act_fn", "silu", "swish")
    for name in ("latents_mean", "latents_std"):
        fields.allow_only(name)
    channels = fields.get("in_channels", int)
    fields.allow_only("out_channels", channels)
    groups = fields.get("norm_num_groups", int)
    if any(width % groups for width in widths):
        raise UserError(
            f"{fields.where}: norm_num_groups={groups} does not divide block_out_channels={widths}"
        )
    return VaeConfig(
        widths=tuple(widths),
        blocks=fields.get("layers_per_block", int),
        groups=groups,
        image_channels=channels,
        channels=fields.get("latent_channels", int),
        attention=fields.get("mid_block_add_attention", bool),
        encoder_product=fields.get("use_quant_conv", bool),
        decoder_product=fields.get("use_post_quant_conv", bool),
        scale=fields.get("scaling_factor", float),
        shift=fields.get("shift_factor", float, 0.0),
    )


def _widths(fields: Fields) -> list[int]:
    widths = fields.get("block_out_channels", list[int])
    if not widths or any(not isinstance(width, int) or width < 1 for width in widths):
        raise UserError(f"{fields.where}: block_out_channels={widths} are no widths of levels")
    return widths


def vae_latents(path: str | Path) -> VaeLatents:
    """Describe the latents that a folder's VAE makes, for a generator's config."""
    vae = read_vae(open_vae(path))
    return VaeLatents(
        str(path),
        channels=vae.channels,
        factor=vae.factor,
        scale=vae.scale,
        shift=vae.shift,
        vae=vae,
    )


def vae_fingerprint(weights: str | Path) -> str:
    """Hash everything that a VAE's latents depend on: its config and its weights."""
    folder = open_vae(weights)
    digest = hashlib.sha256(repr(read_vae(folder)).encode())
    for file in sorted({stored.file for stored in folder.tensors.values()}):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def vae_tensors(config: VaeConfig, folder: HfFolder | None = None) -> TensorNames:
    """Locate the parameters of a VAE, attention by the names that a folder has: old ones, or else today's."""
    parts: dict[str, LeafTensors] = {}
    levels = len(config.widths)
    for tower, blocks in (("encoder", config.blocks), ("decoder", config.blocks + 1)):
        sampler, down = ("downsamplers", "down") if tower == "encoder" else ("upsamplers", "up")
        parts[f"{tower}.enter"] = convolution(f"{tower}.conv_in", KERNEL)
        parts[f"{tower}.norm"] = norm(f"{tower}.conv_norm_out")
        parts[f"{tower}.leave"] = convolution(f"{tower}.conv_out", KERNEL)
        parts |= _block(f"{tower}.middle.before", f"{tower}.mid_block.resnets.0")
        parts |= _block(f"{tower}.middle.behind", f"{tower}.mid_block.resnets.1")
        parts |= _attention(f"{tower}.middle.attention", f"{tower}.mid_block.attentions.0", folder)
        for i in range(levels):
            level, key = f"{tower}.levels.level{i}", f"{tower}.{down}_blocks.{i}"
            for j in range(blocks):
                parts |= _block(f"{level}.blocks.block{j}", f"{key}.resnets.{j}")
            parts[f"{level}.resample"] = convolution(f"{key}.{sampler}.0.conv", KERNEL)
    parts["encoder.product"] = convolution("quant_conv", PRODUCT)
    parts["decoder.product"] = convolution("post_quant_conv", PRODUCT)
    return TensorNames(parts)


def _block(path: str, key: str) -> dict[str, LeafTensors]:
    return {
        f"{path}.norm1": norm(f"{key}.norm1"),
        f"{path}.conv1": convolution(f"{key}.conv1", KERNEL),
        f"{path}.norm2": norm(f"{key}.norm2"),
        f"{path}.conv2": convolution(f"{key}.conv2", KERNEL),
        f"{path}.shortcut": convolution(f"{key}.conv_shortcut", PRODUCT),
    }


def _attention(path: str, key: str, folder: HfFolder | None) -> dict[str, LeafTensors]:
    old = folder is not None and f"{key}.{NAMES[1]['query']}.weight" in folder.tensors
    return {f"{path}.norm": norm(f"{key}.group_norm"), **linears(path, key, **NAMES[old])}
