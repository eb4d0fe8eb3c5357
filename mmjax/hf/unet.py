"""Stable Diffusion's UNets (UNet2DConditionModel) from diffusers folders and back: config and parameters."""

from __future__ import annotations

from pathlib import Path

from mmjax.config import UnetConfig, VaeLatents
from mmjax.config.generators import UNET_MLP_FACTOR
from mmjax.errors import UserError
from mmjax.hf.diffusers_folder import open_part
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import LeafTensors, TensorNames, convolution, fused_parts, linear, norm

CLASS = "UNet2DConditionModel"
PART = "unet"
ATTENDING = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
ATTENDING_UP = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
# The values for which the computation here is right; all others, and fields without any, are
# refused.
KNOWN = {
    "center_input_sample": (False,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "only_cross_attention": (False,),
    "downsample_padding": (1,),
    "mid_block_scale_factor": (1,),
    "dropout": (0,),
    "act_fn": ("silu", "swish"),
    "norm_eps": (1e-5,),
    "transformer_layers_per_block": (1,),
    "reverse_transformer_layers_per_block": (),
    "encoder_hid_dim": (),
    "encoder_hid_dim_type": (),
    "num_attention_heads": (),
    "dual_cross_attention": (False,),
    "class_embed_type": (),
    "addition_embed_type": (),
    "num_class_embeds": (),
    "resnet_time_scale_shift": ("default",),
    "resnet_skip_time_act": (False,),
    "resnet_out_scale_factor": (1,),
    "time_embedding_type": ("positional",),
    "time_embedding_dim": (),
    "time_embedding_act_fn": (),
    "timestep_post_act": (),
    "time_cond_proj_dim": (),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "attention_type": ("default",),
    "class_embeddings_concat": (False,),
    "mid_block_only_cross_attention": (False,),
    "cross_attention_norm": (),
}
KERNEL = (2, 3, 1, 0)  # from [out, in, row, column]; ours: row, column, in, out
PRODUCT = (1, 0, 2, 3)  # of a convolution over single positions, which is a product over channels


def open_unet(path: str | Path) -> HfFolder:
    """Open the UNet of a diffusers folder, or its own folder. Raises UserError where there is none."""
    return open_part(path, PART, CLASS)


def read(folder: HfFolder) -> UnetConfig:
    """Read the config of a UNet. Raises UserError for a field that is not supported, naming it."""
    fields = folder.fields
    for name, known in KNOWN.items():
        fields.allow_only(name, *known)
    channels = fields.get("in_channels", int)
    fields.allow_only("out_channels", channels)
    widths = _numbers(fields, "block_out_channels")
    attending = _attending(fields)
    if len(attending) != len(widths):
        raise UserError(
            f"{fields.where}: down_block_types are {len(attending)}, block_out_channels {len(widths)}"
        )
    heads = fields.get("attention_head_dim", (int, list))  # called so by mistake, for good
    heads = (
        _numbers(fields, "attention_head_dim")
        if isinstance(heads, list)
        else (heads,) * len(widths)
    )
    size = fields.get("sample_size", (int, list))
    return UnetConfig(
        condition_width=fields.get("cross_attention_dim", int),
        widths=widths,
        heads=heads,
        attending=attending,
        blocks=fields.get("layers_per_block", int),
        groups=fields.get("norm_num_groups", int),
        size=_numbers(fields, "sample_size") if isinstance(size, list) else (size, size),
        linear_projections=fields.get("use_linear_projection", bool),
        latents=VaeLatents(channels=channels),
        weights=str(folder.path) if folder.has_weights else "",
        attention="auto",
    )


def _numbers(fields: Fields, name: str) -> tuple[int, ...]:
    numbers = fields.get(name, list)
    if not numbers or any(not isinstance(n, int) or n < 1 for n in numbers):
        raise UserError(f"{fields.where}: {name}={numbers} must be whole numbers from 1")
    return tuple(numbers)


def _attending(fields: Fields) -> tuple[bool, ...]:
    """Read which levels have attention, the same on the way down and up."""
    down, up = fields.get("down_block_types", list[str]), fields.get("up_block_types", list[str])
    for name, kinds, known in (
        ("down_block_types", down, ATTENDING),
        ("up_block_types", up, ATTENDING_UP),
    ):
        if unknown := [kind for kind in kinds if kind not in known]:
            raise UserError(
                f"{fields.where}: {name} has {unknown[0]!r}, which is not supported; known: {', '.join(known)}"
            )
    attending = tuple(ATTENDING[kind] for kind in down)
    if attending != tuple(ATTENDING_UP[kind] for kind in reversed(up)):
        raise UserError(
            f"{fields.where}: up_block_types={up} do not mirror down_block_types, which is not supported"
        )
    return attending


def parts(config: UnetConfig) -> TensorNames:
    """Locate the parameters of a UNet."""
    located: dict[str, LeafTensors] = {
        "time.mlp.up": linear("time_embedding.linear_1"),
        "time.mlp.down": linear("time_embedding.linear_2"),
        "first": convolution("conv_in", KERNEL),
        "norm": norm("conv_norm_out"),
        "last": convolution("conv_out", KERNEL),
        **_level("middle", "mid_block", config, config.widths[-1], 2),
    }
    for i, width in enumerate(config.widths):
        j = len(config.widths) - 1 - i
        located |= _level(f"down.level{i}", f"down_blocks.{i}", config, width, config.blocks)
        located |= _level(f"up.level{j}", f"up_blocks.{j}", config, width, config.blocks + 1)
        located[f"down.level{i}.resample"] = convolution(
            f"down_blocks.{i}.downsamplers.0.conv", KERNEL
        )
        located[f"up.level{j}.resample"] = convolution(f"up_blocks.{j}.upsamplers.0.conv", KERNEL)
    return TensorNames(located)


def _level(
    path: str, key: str, config: UnetConfig, width: int, blocks: int
) -> dict[str, LeafTensors]:
    """Locate a level's blocks, all of which may have attention."""
    located = {}
    for i in range(blocks):
        located |= _residual_block(f"{path}.residual.block{i}", f"{key}.resnets.{i}")
        located |= _attention_block(
            f"{path}.attention.block{i}", f"{key}.attentions.{i}", config, width
        )
    return located


def _residual_block(path: str, key: str) -> dict[str, LeafTensors]:
    return {
        f"{path}.norm1": norm(f"{key}.norm1"),
        f"{path}.conv1": convolution(f"{key}.conv1", KERNEL),
        f"{path}.time": linear(f"{key}.time_emb_proj"),
        f"{path}.norm2": norm(f"{key}.norm2"),
        f"{path}.conv2": convolution(f"{key}.conv2", KERNEL),
        f"{path}.shortcut": convolution(f"{key}.conv_shortcut", PRODUCT),
    }


def _attention_block(path: str, key: str, config: UnetConfig, width: int) -> dict[str, LeafTensors]:
    block = f"{key}.transformer_blocks.0"
    projections = {"enter": f"{key}.proj_in", "leave": f"{key}.proj_out"}
    located = {f"{path}.norm": norm(f"{key}.norm")}
    for ours, name in projections.items():
        located[f"{path}.{ours}"] = (
            linear(name) if config.linear_projections else convolution(name, PRODUCT)
        )
    products = {"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out.0"}
    for ours, name in (("self_attention", "attn1"), ("cross_attention", "attn2")):
        located |= {
            f"{path}.{ours}.{product}": linear(f"{block}.{name}.{to}")
            for product, to in products.items()
        }
    hidden = UNET_MLP_FACTOR * width
    # GEGLU: what is gated, and behind it the gate.
    gated = fused_parts(linear(f"{block}.ff.net.0.proj"), up=hidden, gate=hidden)
    return located | {
        f"{path}.self_norm": norm(f"{block}.norm1"),
        f"{path}.cross_norm": norm(f"{block}.norm2"),
        f"{path}.mlp_norm": norm(f"{block}.norm3"),
        **{f"{path}.mlp.{name}": leaves for name, leaves in gated.items()},
        f"{path}.mlp.down": linear(f"{block}.ff.net.2"),
    }
