"""LFM2: decoders with gated short convolutions in place of attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ConvolutionConfig, DecoderConfig
from mmjax.errors import UserError
from mmjax.hf.folder import Fields
from mmjax.hf.layout import (
    TensorNames,
    TensorSlice,
    below,
    fused_parts,
    linear,
    linears,
    norm,
    table,
)
from mmjax.hf.names import ATTENTION, PROJECTIONS

LAYER_TYPES = {"full_attention", "conv"}


def adapt(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    """Add the convolutions, the norms of heads and the width of the MLP."""
    attended = fields.get("full_attn_idxs", list[int], list(range(plain.layers)))
    default = ["full_attention" if i in attended else "conv" for i in range(plain.layers)]
    types = fields.get("layer_types", list[str], default)
    if len(types) != plain.layers or set(types) - LAYER_TYPES:
        raise UserError(
            f"{fields.where}: layer_types must give each of {plain.layers} layers one of "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    layers = tuple(i for i, kind in enumerate(types) if kind == "conv")
    taps, biased = fields.size("conv_L_cache"), fields.get("conv_bias", bool)
    return replace(
        plain,
        tied=fields.get("tie_embedding", bool, plain.tied),
        mlp_width=_mlp_width(fields, fields.get("block_ff_dim", int, plain.mlp_width)),
        qk_norm="head",
        convolution=ConvolutionConfig(layers, taps, biased) if layers else None,
    )


def _mlp_width(fields: Fields, width: int) -> int:
    if not fields.get("block_auto_adjust_ff_dim", bool):
        return width
    multiple = fields.size("block_multiple_of")
    width = int(fields.get("block_ffn_dim_multiplier", (int, float)) * int(2 * width / 3))
    return -(-width // multiple) * multiple


def lfm2_parts(config: DecoderConfig, inner: str, output: str) -> TensorNames:
    """Locate LFM2's parameters. A convolution's gate, gate of the output and value are rows of one matrix."""
    layer = f"{inner}layers.*."
    convolution = "layers.*.convolution"
    widths = dict.fromkeys(("gate", "output_gate", "value"), config.width)
    return TensorNames(
        {
            "embed": table(f"{inner}embed_tokens"),
            "layers.*.attention_norm": norm(f"{layer}operator_norm"),
            **linears(ATTENTION, f"{layer}self_attn", **PROJECTIONS, output="out_proj"),
            f"{ATTENTION}.query_norm": norm(f"{layer}self_attn.q_layernorm"),
            f"{ATTENTION}.key_norm": norm(f"{layer}self_attn.k_layernorm"),
            **below(convolution, fused_parts(linear(f"{layer}conv.in_proj"), **widths)),
            # Stored [channel, 1, tap]; ours: [tap, channel].
            f"{convolution}.filter": {"weight": TensorSlice(f"{layer}conv.conv.weight", (2, 1, 0))},
            convolution: {"filter_bias": TensorSlice(f"{layer}conv.conv.bias")},
            f"{convolution}.output": linear(f"{layer}conv.out_proj"),
            "layers.*.mlp_norm": norm(f"{layer}ffn_norm"),
            **linears("layers.*.mlp", f"{layer}feed_forward", gate="w1", up="w3", down="w2"),
            "head.norm": norm(f"{inner}embedding_norm"),
            "head.table": table(output),
        }
    )
