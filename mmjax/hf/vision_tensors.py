"""Name the tensors of vision towers as their checkpoints do."""

from __future__ import annotations

from mmjax.config import VisionConfig
from mmjax.hf.layout import (
    LeafTensors,
    TensorNames,
    TensorSlice,
    array,
    below,
    convolution,
    fused_parts,
    linear,
    linears,
    norm,
)
from mmjax.hf.names import ATTENTION, GATED_MLP, PROJECTIONS, QKV

# A convolution of stride = kernel is a product over the pixels of a patch.
PATCHES = (2, 3, 1, 0)  # from [width, channel, row, column]; ours: row, column, channel

BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of Gemma 4's linear layers


def clip_parts(config: VisionConfig, prefix: str, output: str = "out_proj") -> TensorNames:
    """Name the tensors of towers named as CLIP. output: what their matrix behind attention is called."""
    layer = f"{prefix}encoder.layers.*."
    place = "norm" if config.norm_place == "before" else "after"
    return TensorNames(
        {
            "embed.patches": convolution(f"{prefix}embeddings.patch_embedding", PATCHES),
            # Stored `[width]`, ours is a table of one row: an order with a reshape turns one into
            # the other.
            "embed.class_token": array(f"{prefix}embeddings.class_embedding", (0,)),
            "embed.positions": array(f"{prefix}embeddings.position_embedding.weight"),
            "embed.norm": norm(f"{prefix}pre_layrnorm"),
            f"layers.*.attention_{place}": norm(f"{layer}layer_norm1"),
            **linears(ATTENTION, f"{layer}self_attn", **PROJECTIONS, output=output),
            f"layers.*.mlp_{place}": norm(f"{layer}layer_norm2"),
            "layers.*.mlp.up": linear(f"{layer}mlp.fc1"),
            "layers.*.mlp.down": linear(f"{layer}mlp.fc2"),
            "head": norm(f"{prefix}post_layernorm"),
        }
    )


def siglip2_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of SigLIP 2, which projects patches by a matrix."""
    patches = linear(f"{prefix}embeddings.patch_embedding")
    return TensorNames({**clip_parts(config, prefix).by_module, "embed.patches": patches})


def minicpm_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of MiniCPM-V's towers, whose merger stands behind one of the layers."""
    ours, merger = "layers.*.merger", f"{prefix}vit_merger"
    parts = {
        f"{ours}.attention_norm": norm(f"{merger}.layer_norm1"),
        **linears(f"{ours}.attention", f"{merger}.self_attn", **PROJECTIONS, output="out_proj"),
        f"{ours}.mlp_norm": norm(f"{merger}.pre_norm"),
        **linears(f"{ours}.mlp", merger, up="linear_1", down="linear_2"),
    }
    return TensorNames({**clip_parts(config, prefix).by_module, **parts})


def pixtral_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of Pixtral."""
    layer = f"{prefix}transformer.layers.*."
    return TensorNames(
        {
            "embed.patches": convolution(f"{prefix}patch_conv", PATCHES),
            "embed.norm": norm(f"{prefix}ln_pre"),
            "layers.*.attention_norm": norm(f"{layer}attention_norm"),
            **linears(ATTENTION, f"{layer}attention", **PROJECTIONS, output="o_proj"),
            "layers.*.mlp_norm": norm(f"{layer}ffn_norm"),
            **linears("layers.*.mlp", f"{layer}feed_forward", **GATED_MLP),
        }
    )


def intern_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of InternViT as transformers has it."""
    layer = f"{prefix}encoder.layer.*."
    return TensorNames(
        {
            "embed.patches": convolution(
                f"{prefix}embeddings.patch_embeddings.projection", PATCHES
            ),
            "embed.class_token": array(f"{prefix}embeddings.cls_token", (0, 1, 2)),
            "embed.positions": array(f"{prefix}embeddings.position_embeddings", (0, 1, 2)),
            "layers.*.attention_norm": norm(f"{layer}layernorm_before"),
            **linears(ATTENTION, f"{layer}attention", **PROJECTIONS, output="projection_layer"),
            "layers.*.attention.query_norm": norm(f"{layer}attention.q_norm"),
            "layers.*.attention.key_norm": norm(f"{layer}attention.k_norm"),
            "layers.*.attention_after": {"scale": TensorSlice(f"{layer}lambda_1")},
            "layers.*.mlp_norm": norm(f"{layer}layernorm_after"),
            "layers.*.mlp.up": linear(f"{layer}mlp.fc1"),
            "layers.*.mlp.down": linear(f"{layer}mlp.fc2"),
            "layers.*.mlp_after": {"scale": TensorSlice(f"{layer}lambda_2")},
            "head": norm(f"{prefix}layernorm"),
        }
    )


def open_intern_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of InternViT as OpenGVLab's own code has it."""
    layer = f"{prefix}encoder.layers.*."
    thirds = fused_parts(linear(f"{layer}attn.qkv"), **dict.fromkeys(QKV, config.width))
    return TensorNames(
        {
            "embed.patches": convolution(f"{prefix}embeddings.patch_embedding", PATCHES),
            "embed.class_token": array(f"{prefix}embeddings.class_embedding", (0, 1, 2)),
            "embed.positions": array(f"{prefix}embeddings.position_embedding", (0, 1, 2)),
            "layers.*.attention_norm": norm(f"{layer}norm1"),
            **below(ATTENTION, thirds),
            "layers.*.attention.output": linear(f"{layer}attn.proj"),
            "layers.*.attention.query_norm": norm(f"{layer}attn.q_norm"),
            "layers.*.attention.key_norm": norm(f"{layer}attn.k_norm"),
            "layers.*.attention_after": {"scale": TensorSlice(f"{layer}ls1")},
            "layers.*.mlp_norm": norm(f"{layer}norm2"),
            "layers.*.mlp.up": linear(f"{layer}mlp.fc1"),
            "layers.*.mlp.down": linear(f"{layer}mlp.fc2"),
            "layers.*.mlp_after": {"scale": TensorSlice(f"{layer}ls2")},
        }
    )


def dinov2_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of DINOv2, with and without registers."""
    layer = f"{prefix}encoder.layer.*."
    named = {name: f"attention.{name}" for name in QKV}
    mlp = {"up": linear(f"{layer}mlp.fc1"), "down": linear(f"{layer}mlp.fc2")}
    if config.gated:
        mlp = fused_parts(
            linear(f"{layer}mlp.weights_in"), gate=config.mlp_width, up=config.mlp_width
        )
        mlp["down"] = linear(f"{layer}mlp.weights_out")
    return TensorNames(
        {
            "embed.patches": convolution(
                f"{prefix}embeddings.patch_embeddings.projection", PATCHES
            ),
            "embed.class_token": array(f"{prefix}embeddings.cls_token", (0, 1, 2)),
            "embed.registers": array(f"{prefix}embeddings.register_tokens", (0, 1, 2)),
            "embed.positions": array(f"{prefix}embeddings.position_embeddings", (0, 1, 2)),
            "layers.*.attention_norm": norm(f"{layer}norm1"),
            **linears(ATTENTION, f"{layer}attention", **named, output="output.dense"),
            "layers.*.attention_after": {"scale": TensorSlice(f"{layer}layer_scale1.lambda1")},
            "layers.*.mlp_norm": norm(f"{layer}norm2"),
            **below("layers.*.mlp", mlp),
            "layers.*.mlp_after": {"scale": TensorSlice(f"{layer}layer_scale2.lambda1")},
            "head": norm(f"{prefix}layernorm"),
        }
    )


def clippable_linears(path: str, key: str, /, **names: str) -> dict[str, LeafTensors]:
    """Locate linear layers of Gemma 4 as `linears`: a matrix below a name of its own, beside bounds."""
    parts = {}
    for ours, theirs in names.items():
        parts[ours] = linear(f"{key}.{theirs}.linear")
        parts[f"{ours}.bounds"] = {name: TensorSlice(f"{key}.{theirs}.{name}") for name in BOUNDS}
    return below(path, parts)


def gemma4_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of Gemma 4's towers."""
    layer = f"{prefix}encoder.layers.*."
    attention = {**PROJECTIONS, "output": "o_proj"}
    return TensorNames(
        {
            "embed.patches": linear(f"{prefix}patch_embedder.input_proj"),
            # Stored `[2, side, width]`: the table of columns, then that of rows.
            "embed.positions": array(f"{prefix}patch_embedder.position_embedding_table", (0, 1, 2)),
            "layers.*.attention_norm": norm(f"{layer}input_layernorm"),
            **clippable_linears(ATTENTION, f"{layer}self_attn", **attention),
            "layers.*.attention.query_norm": norm(f"{layer}self_attn.q_norm"),
            "layers.*.attention.key_norm": norm(f"{layer}self_attn.k_norm"),
            "layers.*.attention_after": norm(f"{layer}post_attention_layernorm"),
            "layers.*.mlp_norm": norm(f"{layer}pre_feedforward_layernorm"),
            **clippable_linears("layers.*.mlp", f"{layer}mlp", **GATED_MLP),
            "layers.*.mlp_after": norm(f"{layer}post_feedforward_layernorm"),
        }
    )


def llama4_parts(config: VisionConfig, prefix: str) -> TensorNames:
    """Name the tensors of Llama 4's towers."""
    layer = f"{prefix}model.layers.*."
    # Stored [width, channel x row x column].
    patches = TensorSlice(
        f"{prefix}patch_embedding.linear.weight",
        PATCHES,
        view=(config.width, config.channels, config.patch, config.patch),
    )
    return TensorNames(
        {
            "embed.patches": {"weight": patches},
            "embed.class_token": array(f"{prefix}class_embedding", (0,)),
            "embed.positions": array(f"{prefix}positional_embedding_vlm"),
            "embed.norm": norm(f"{prefix}layernorm_pre"),
            "layers.*.attention_norm": norm(f"{layer}input_layernorm"),
            **linears(ATTENTION, f"{layer}self_attn", **PROJECTIONS, output="o_proj"),
            "layers.*.mlp_norm": norm(f"{layer}post_attention_layernorm"),
            "layers.*.mlp.up": linear(f"{layer}mlp.fc1"),
            "layers.*.mlp.down": linear(f"{layer}mlp.fc2"),
            "head": norm(f"{prefix}layernorm_post"),
        }
    )


_POOLED = ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
POOLING_HEAD = (
    "head.probe",
    "head.attention.in_proj_weight",
    "head.attention.in_proj_bias",
    *(f"head.{module}.{kind}" for module in _POOLED for kind in ("weight", "bias")),
)
MASK_TOKEN = ("embeddings.mask_token",)  # of pretraining
