"""PixArt-alpha's transformer, in diffusers' layout: as PixArtTransformer2DModel, or Transformer2DModel as it once was.

A caption's channels are the tokens that a generator's connector makes (`condition_width`):
`caption_projection`, which brings them to the width, is part of the transformer (`condition_mlp`).
Where a checkpoint has none, its keys and values read the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config import Activation, Biased, DiffusionTransformerConfig, VaeLatents
from mmjax.errors import UserError
from mmjax.hf.diffusers_folder import open_part, write_part
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import LeafTensors, TensorNames, TensorSlice, convolution, linear
from mmjax.hf.names import QKV
from mmjax.hf.vision_tensors import PATCHES

CLASS = "PixArtTransformer2DModel"
CLASSES = (CLASS, "Transformer2DModel")
ACTIVATIONS: dict[str, Activation] = {
    "gelu-approximate": "gelu_tanh",
    "gelu": "gelu",
    "linear-silu": "silu",
}
ALWAYS: tuple[Biased, ...] = ("output", "up", "down")  # biases that no option leaves out
UNUSED = ("pos_embed.pos_embed", "caption_projection.y_embedding")  # saved by old versions


def open_transformer(path: str | Path) -> HfFolder:
    """Open the transformer of a diffusers folder, or its own folder. Raises UserError where there is none."""
    return open_part(path, "transformer", *CLASSES)


def read(folder: HfFolder) -> DiffusionTransformerConfig:
    """Read the config of a transformer. Raises UserError for a field that is not supported, naming it."""
    fields = folder.fields
    _refuse(fields)
    heads, width = _widths(fields)
    channels = fields.get("in_channels", int)
    side, patch = fields.get("sample_size", int), fields.get("patch_size", int)
    outputs = fields.get("out_channels", int, channels)
    if outputs not in (channels, 2 * channels):
        raise UserError(
            f"{fields.where}: out_channels={outputs} is not supported; known: in_channels, {channels}, or twice as "
            "many, with variances"
        )
    captions = fields.get("caption_channels", int, 0)
    tokens = fields.get("cross_attention_dim", int)
    if captions and tokens != width:
        raise UserError(f"{fields.where}: cross_attention_dim={tokens} is not supported; with caption_channels it is "
                        f"the width, {width}")  # fmt: skip
    return DiffusionTransformerConfig(
        attention="auto",
        layers=fields.get("num_layers", int),
        width=width,
        heads=heads,
        mlp_width=4 * width,
        condition_width=captions or tokens,
        condition_mlp=bool(captions),
        patch=patch,
        latents=VaeLatents(channels=channels),
        grid=side // patch,
        # As diffusers: images of 1,024 pixels, 128 latents, have positions half as far apart as
        # those of 512.
        grid_scale=fields.get("interpolation_scale", float, float(max(side // 64, 1))),
        micro_conditions=fields.get("use_additional_conditions", bool, side == 128),
        learned_variance=outputs != channels,
        norm_eps=fields.get("norm_eps", float),
        activation=fields.choice("activation_fn", ACTIVATIONS),
        biases=(*QKV, *ALWAYS) if fields.get("attention_bias", bool) else ALWAYS,
        weights=str(folder.path) if folder.has_weights else "",
    )


def _refuse(fields: Fields) -> None:
    fields.allow_only("norm_type", "ada_norm_single")
    fields.allow_only("norm_elementwise_affine", False)
    fields.allow_only("dropout", 0, 0.0)
    fields.allow_only("attention_type", "default")
    fields.allow_only("double_self_attention", False)
    fields.allow_only("only_cross_attention", False)
    fields.allow_only("num_vector_embeds")


def _widths(fields: Fields) -> tuple[int, int]:
    """Return the number of heads, and the width."""
    heads = fields.get("num_attention_heads", int)
    return heads, heads * fields.get("attention_head_dim", int)


def to_fields(config: DiffusionTransformerConfig) -> dict[str, Any]:
    """Return the fields of the `config.json` of such a transformer. Raises UserError for what diffusers cannot say."""
    c = config
    if c.mlp_width != 4 * c.width:
        raise UserError(
            f"mlp_width={c.mlp_width}: diffusers' transformer has an MLP of 4 * width, {4 * c.width}"
        )
    if set(c.biases) not in (set(ALWAYS), {*QKV, *ALWAYS}):
        raise UserError(
            f"biases={c.biases}: diffusers' transformer has {ALWAYS}, and all or none of {QKV}"
        )
    if c.activation not in ACTIVATIONS.values():
        raise UserError(
            f"activation={c.activation!r}: diffusers' transformer has {', '.join(ACTIVATIONS.values())}"
        )
    channels = c.latents.channels
    return {
        "_class_name": CLASS,
        "num_attention_heads": c.heads,
        "attention_head_dim": c.width // c.heads,
        "in_channels": channels,
        "out_channels": channels * (1 + c.learned_variance),
        "num_layers": c.layers,
        "cross_attention_dim": c.width if c.condition_mlp else c.condition_width,
        "caption_channels": c.condition_width if c.condition_mlp else None,
        "attention_bias": "query" in c.biases,
        "sample_size": c.grid * c.patch,
        "patch_size": c.patch,
        "activation_fn": next(name for name, ours in ACTIVATIONS.items() if ours == c.activation),
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": c.norm_eps,
        "interpolation_scale": c.grid_scale,
        "use_additional_conditions": c.micro_conditions,
    }


def parts(config: DiffusionTransformerConfig) -> TensorNames:
    """Locate the parameters."""
    c = config
    layer = "transformer_blocks.*."
    embedder = "adaln_single.emb."
    attentions = {"attention": f"{layer}attn1", "cross_attention": f"{layer}attn2"}
    named = {"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out.0"}
    mlps = {
        "image_embedding.time.mlp": f"{embedder}timestep_embedder",
        "image_embedding.side": f"{embedder}resolution_embedder",
        "image_embedding.aspect": f"{embedder}aspect_ratio_embedder",
        "condition_mlp": "caption_projection",
    }
    return TensorNames(
        {
            "patches": convolution("pos_embed.proj", PATCHES),
            **{f"{ours}.up": linear(f"{theirs}.linear_1") for ours, theirs in mlps.items()},
            **{f"{ours}.down": linear(f"{theirs}.linear_2") for ours, theirs in mlps.items()},
            "modulation": linear("adaln_single.linear"),
            "layers.*.table": {"weight": TensorSlice(f"{layer}scale_shift_table")},
            **{
                f"layers.*.{module}.{ours}": linear(f"{prefix}.{theirs}")
                for module, prefix in attentions.items()
                for ours, theirs in named.items()
            },
            "layers.*.mlp.up": linear(f"{layer}ff.net.0.proj"),
            "layers.*.mlp.down": linear(f"{layer}ff.net.2"),
            "head.table": {"weight": TensorSlice("scale_shift_table")},
            **_outputs(c),
        }
    )


def _outputs(config: DiffusionTransformerConfig) -> dict[str, LeafTensors]:
    """Locate the last layer: of every pixel of a patch it makes the channels' values, then their variances."""
    if not config.learned_variance:
        return {"head.output": linear("proj_out")}
    channels = config.latents.channels

    def half(first: int) -> LeafTensors:
        groups = config.patch**2, first, first + channels
        weight = TensorSlice("proj_out.weight", (2, 0, 1), groups=groups)
        return {"weight": weight, "bias": TensorSlice("proj_out.bias", (0, 1), groups=groups)}

    return {"head.output": half(0), "head.variance": half(channels)}


def write(
    path: Path, config: DiffusionTransformerConfig, parameters: Mapping[tuple[str, ...], np.ndarray]
) -> None:
    """Write a transformer's folder, which diffusers reads, from its parameters by their paths, layers numbered."""
    c = config
    outputs = c.patch_values * (1 + c.learned_variance)
    shapes = {"pos_embed.proj.weight": (c.width, c.latents.channels, c.patch, c.patch)}
    shapes |= {"proj_out.weight": (outputs, c.width), "proj_out.bias": (outputs,)}
    write_part(path, to_fields(c), parts(c), parameters, shapes)
