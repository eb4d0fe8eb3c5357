"""OPT and GPT-2: decoders with learned positions, LayerNorm and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Callable

from mmjax.config import Biased, DecoderConfig
from mmjax.errors import UserError
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import (
    LeafTensors,
    TensorNames,
    TensorSlice,
    fused_columns,
    fused_parts,
    linear,
    linears,
    norm,
    table,
)
from mmjax.hf.names import ACTIVATIONS, ATTENTION, PROJECTIONS, QKV

BIASES: tuple[Biased, ...] = (*QKV, "output", "up", "down")
OPT_OFFSET = 2  # entries of its table of positions before that of the first token


def _opt(fields: Fields) -> DecoderConfig:
    # The layout of OPT-350m alone: norms behind each sum, and narrower embeddings.
    fields.allow_only("do_layer_norm_before", True)
    width = fields.size("hidden_size")
    fields.allow_only("word_embed_proj_dim", width)
    fields.allow_only("layer_norm_elementwise_affine", True)
    fields.allow_only("_remove_final_layer_norm", False)
    heads = fields.size("num_attention_heads")
    return DecoderConfig(
        attention="auto",
        layers=fields.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=fields.size("ffn_dim"),
        vocab=fields.size("vocab_size"),
        norm="layer",
        norm_eps=1e-5,
        activation=fields.choice("activation_function", ACTIVATIONS),
        gated=False,
        biases=BIASES if fields.get("enable_bias", bool) else (),
        learned_positions=fields.size("max_position_embeddings") + OPT_OFFSET,
        first_position=OPT_OFFSET,
        tied=fields.get("tie_word_embeddings", bool),
    )


def _gpt2(fields: Fields) -> DecoderConfig:
    fields.allow_only("scale_attn_by_inverse_layer_idx", False)
    fields.allow_only("add_cross_attention", False)
    width = fields.size("n_embd")
    heads = fields.size("n_head")
    return DecoderConfig(
        attention="auto",
        layers=fields.size("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=fields.get("n_inner", int, 4 * width),
        vocab=fields.size("vocab_size"),
        norm="layer",
        norm_eps=fields.get("layer_norm_epsilon", float),
        activation=fields.choice("activation_function", ACTIVATIONS),
        gated=False,
        biases=BIASES,
        attention_scale=0.0 if fields.get("scale_attn_weights", bool) else 1.0,
        learned_positions=fields.size("n_positions"),
        tied=fields.get("tie_word_embeddings", bool),
    )


FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {"opt": _opt, "gpt2": _gpt2}


def read(fields: Fields) -> DecoderConfig:
    """The decoder that a config of one of `FAMILIES` says. Raises UserError for what is not supported."""
    llm = FAMILIES[fields.get("model_type", str)](fields)
    if llm.width % llm.heads:
        raise UserError(
            f"{fields.where}: a width of {llm.width} does not divide into {llm.heads} heads"
        )
    return llm


def gpt_parts(config: DecoderConfig, folder: HfFolder, body: str, output: str) -> TensorNames:
    """Locate the parameters of a decoder of one of `FAMILIES`, whose tensors begin with `body`."""
    if f"{body}wte.weight" in folder.tensors:
        return TensorNames(_gpt2_parts(config, body, output))
    layer = f"{body}layers.*."
    return TensorNames(
        {
            "embed": table(f"{body}embed_tokens"),
            "positions": table(f"{body}embed_positions"),
            "layers.*.attention_norm": norm(f"{layer}self_attn_layer_norm"),
            **linears(ATTENTION, f"{layer}self_attn", **PROJECTIONS, output="out_proj"),
            "layers.*.mlp_norm": norm(f"{layer}final_layer_norm"),
            "layers.*.mlp.up": linear(f"{layer}fc1"),
            "layers.*.mlp.down": linear(f"{layer}fc2"),
            "head.norm": norm(f"{body}final_layer_norm"),
            "head.table": table(output),
        }
    )


def _gpt2_parts(config: DecoderConfig, body: str, output: str) -> dict[str, LeafTensors]:
    """Locate GPT-2's parameters. Its matrices are stored [in, out], those of attention side by side in one."""
    layer = f"{body}h.*."

    def matrix(key: str) -> LeafTensors:
        return {"weight": TensorSlice(f"{key}.weight"), "bias": TensorSlice(f"{key}.bias")}

    fused = matrix(f"{layer}attn.c_attn")
    widths = dict.fromkeys(QKV, config.width)
    weights = fused_columns({"weight": fused["weight"]}, **widths)
    biases = fused_parts({"bias": fused["bias"]}, **widths)
    return {
        "embed": table(f"{body}wte"),
        "positions": table(f"{body}wpe"),
        "layers.*.attention_norm": norm(f"{layer}ln_1"),
        **{f"layers.*.attention.{name}": {**weights[name], **biases[name]} for name in QKV},
        "layers.*.attention.output": matrix(f"{layer}attn.c_proj"),
        "layers.*.mlp_norm": norm(f"{layer}ln_2"),
        "layers.*.mlp.up": matrix(f"{layer}mlp.c_fc"),
        "layers.*.mlp.down": matrix(f"{layer}mlp.c_proj"),
        "head.norm": norm(f"{body}ln_f"),
        "head.table": table(output),
    }
