"""Locate the parameters of text decoders in a checkpoint's tensors, by the names that its folder uses."""

from __future__ import annotations

from mmjax.config import DecoderConfig, DeltaNetConfig, ExpertsConfig, ModelConfig
from mmjax.errors import UserError
from mmjax.hf import gpt
from mmjax.hf.folder import HfFolder, note
from mmjax.hf.internlm2 import internlm2_parts
from mmjax.hf.layout import (
    TRANSPOSED,
    Layout,
    LeafTensors,
    TensorNames,
    TensorSlice,
    below,
    fused_parts,
    linear,
    linears,
    norm,
    table,
)
from mmjax.hf.lfm2 import lfm2_parts
from mmjax.hf.names import ATTENTION, GATED_MLP, PROJECTIONS

BODIES = (
    "model.language_model.",
    "model.language_model.model.",
    "model.text_model.",
    "language_model.model.",
    "model.",
    "language_model.",
    "language_model.model.decoder.",
    "model.decoder.",
    "decoder.",
    "transformer.",
    "",
    "thinker.model.language_model.",  # Qwen2.5-Omni, whole
    "thinker.model.",
)
EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings")
OUTPUTS = (
    "lm_head",
    "language_model.lm_head",
    "thinker.lm_head",
    "output",
    "language_model.output",
    "model.language_model.lm_head",
)
# of the outputs of attention and MLP
GLM_NORMS = ("post_self_attn_layernorm", "post_mlp_layernorm")
CLOVAX_NORMS = ("post_norm1", "post_norm2")
GEMMA_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
PREDICTION = "mtp."  # what the tensors of Qwen3.5's multi-token prediction begin with
PREDICTING = (
    "glm4_moe",
    "glm4v_moe",
    "glm_ocr",
    "deepseek_v3",
)  # have it as a layer behind the last


def find_decoder(folder: HfFolder) -> tuple[str, str]:
    """The prefix of a decoder's body in a checkpoint, and the name of its output table.

    Raises UserError where there is no decoder.
    """
    inner = next(
        (p for p in BODIES for e in EMBEDDINGS if f"{p}{e}.weight" in folder.tensors), None
    )
    if inner is None:
        raise UserError(
            f"{folder.path} has no decoder: no tensor is called [...]embed_tokens.weight"
        )
    return inner, next((p for p in OUTPUTS if f"{p}.weight" in folder.tensors), OUTPUTS[0])


def embedding_of(folder: HfFolder, inner: str) -> str:
    """Name the tensor of the table of embeddings in a decoder's body."""
    return next(
        f"{inner}{name}.weight" for name in EMBEDDINGS if f"{inner}{name}.weight" in folder.tensors
    )


def unused_in_decoder(folder: HfFolder, llm: DecoderConfig) -> tuple[str, ...]:
    """List patterns of the tensors of prediction several tokens ahead, which is not computed; say so where any are."""
    inner, _ = find_decoder(folder)
    patterns = [PREDICTION]
    if folder.config["model_type"] in PREDICTING:
        patterns.append(f"{inner}layers.{llm.layers}.")
    for pattern in patterns:
        if any(key.startswith(pattern) for key in folder.tensors):
            note(
                f"{folder.path}: {pattern}* (prediction several tokens ahead) is not read; an export copies it as it is"
            )
    return tuple(f"{pattern}*" for pattern in patterns)


def decoder_layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the decoder of a checkpoint."""
    inner, output = find_decoder(folder)
    unused = (
        *unused_in_decoder(folder, model.llm),
        *((f"{output}.weight",) if model.llm.tied else ()),
    )
    return Layout({"llm": decoder_parts(model.llm, folder)}, {"llm": (inner, output)}, unused)


def decoder_parts(config: DecoderConfig, folder: HfFolder) -> TensorNames:
    """Locate a decoder's parameters. Raises UserError where there is no decoder."""
    inner, output = find_decoder(folder)
    if config.learned_positions:
        return gpt.gpt_parts(config, folder, inner, output)
    if f"{inner}tok_embeddings.weight" in folder.tensors:
        return internlm2_parts(config, inner, output)
    if f"{inner}embedding_norm.weight" in folder.tensors:
        return lfm2_parts(config, inner, output)
    # as transformers writes Kimi K2.5
    blocks = f"{inner}blocks.0.input_layernorm.weight" in folder.tensors
    layer = f"{inner}{'blocks' if blocks else 'layers'}.*."
    llama4 = any(key.startswith(f"{inner}layers.0.feed_forward.") for key in folder.tensors)
    mlp = f"{layer}feed_forward" if llama4 else f"{layer}mlp"
    # HF's `post_attention_layernorm` is the norm before the MLP, but in Gemma 2 and 3, where it
    # comes after attention.
    gemma = f"{inner}layers.0.pre_feedforward_layernorm.weight" in folder.tensors
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    post_norms = next(
        names
        for names in (GEMMA_NORMS, CLOVAX_NORMS, GLM_NORMS)
        if names is GLM_NORMS or f"{inner}layers.0.{names[1]}.weight" in folder.tensors
    )
    parts = {
        "embed": table(f"{inner}embed_tokens"),
        "layers.*.attention_norm": norm(f"{layer}input_layernorm"),
        **linears(ATTENTION, f"{layer}self_attn", **PROJECTIONS, output="o_proj", gate="gate_proj"),
        ATTENTION: {"sinks": TensorSlice(f"{layer}self_attn.sinks")},
        "layers.*.attention.query_norm": norm(f"{layer}self_attn.q_norm"),
        "layers.*.attention.key_norm": norm(f"{layer}self_attn.k_norm"),
        "layers.*.attention_after": norm(f"{layer}{post_norms[0]}"),
        "layers.*.mlp_norm": norm(f"{layer}{before_mlp}"),
        **linears("layers.*.mlp", mlp, **GATED_MLP),
        "layers.*.mlp_after": norm(f"{layer}{post_norms[1]}"),
        "layers.*.token_input.gate": linear(f"{layer}per_layer_input_gate"),
        "layers.*.token_input.projection": linear(f"{layer}per_layer_projection"),
        "layers.*.token_input.norm": norm(f"{layer}post_per_layer_input_norm"),
        "layers.*.output_scale": {"scale": TensorSlice(f"{layer}layer_scalar")},
        "token_inputs.table": table(f"{inner}embed_tokens_per_layer"),
        "token_inputs.projection": linear(f"{inner}per_layer_model_projection"),
        "token_inputs.norm": norm(f"{inner}per_layer_projection_norm"),
        "head.norm": norm(f"{inner}norm"),
        "head.table": table(output),
    }
    if f"{inner}layers.0.self_attn.qkv_proj.weight" in folder.tensors:  # Phi-3
        heads = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
        widths = {name: count * config.head_width for name, count in heads.items()}
        parts |= below(ATTENTION, fused_parts(linear(f"{layer}self_attn.qkv_proj"), **widths))
    if f"{inner}layers.0.mlp.gate_up_proj.weight" in folder.tensors:  # Phi-3 and GLM-4
        gates = fused_parts(
            linear(f"{layer}mlp.gate_up_proj"), gate=config.mlp_width, up=config.mlp_width
        )
        parts |= below("layers.*.mlp", gates)
    if config.latent:
        parts |= _latent_parts(config, layer)
    if config.delta_net:
        parts |= _delta_parts(config.delta_net, layer)
    if config.experts and config.experts.beside_mlp:
        parts |= _experts_beside_parts(config.experts, layer)
    elif config.experts:
        parts |= _expert_parts(config.experts, layer, folder)
    return TensorNames(parts)


def _latent_parts(config: DecoderConfig, layer: str) -> dict[str, LeafTensors]:
    """Locate the parameters of latent attention."""
    hf_layer = f"{layer}self_attn"
    ranked = bool(config.latent.query_rank)
    names = {"query": "q_b_proj" if ranked else "q_proj", "query_down": "q_a_proj"}
    names |= {"latent": "kv_a_proj_with_mqa", "key_value": "kv_b_proj", "output": "o_proj"}
    return {
        **linears(ATTENTION, hf_layer, **names),
        f"{ATTENTION}.query_latent_norm": norm(f"{hf_layer}.q_a_layernorm"),
        f"{ATTENTION}.latent_norm": norm(f"{hf_layer}.kv_a_layernorm"),
    }


def _delta_parts(config: DeltaNetConfig, layer: str) -> dict[str, LeafTensors]:
    """Locate the parameters of the gated delta nets. Queries, keys and values are rows of one matrix and one filter."""
    delta_net = "layers.*.delta_net"
    hf_layer = f"{layer}linear_attn"
    keys = config.key_heads * config.key_width
    values = config.value_heads * config.value_width
    matrix = linear(f"{hf_layer}.in_proj_qkv")
    # Stored [channel, 1, tap]; ours: [tap, channel].
    channel_filter = {"weight": TensorSlice(f"{hf_layer}.conv1d.weight", (2, 1, 0))}
    parts: dict[str, LeafTensors] = {
        delta_net: {
            "a_log": TensorSlice(f"{hf_layer}.A_log"),
            "dt_bias": TensorSlice(f"{hf_layer}.dt_bias"),
        },
        f"{delta_net}.norm": norm(f"{hf_layer}.norm"),
    }
    names = {"gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a", "output": "out_proj"}
    widths = {"query": keys, "key": keys, "value": values}
    parts |= linears(delta_net, hf_layer, **names)
    parts |= below(delta_net, fused_parts(matrix, **widths))
    parts |= {
        f"{delta_net}.{name}_filter": part
        for name, part in fused_parts(channel_filter, **widths).items()
    }
    return parts


def _expert_parts(config: ExpertsConfig, layer: str, folder: HfFolder) -> dict[str, LeafTensors]:
    """Locate the parameters of the mixtures of experts, whose matrices are stored one by one, or all of a layer fused.

    Fused, gate and up are one matrix, stored [out, in] like linear layers, or [in, out] as
    Qwen3-VL's publisher does, and Llama 4.
    """
    experts = "layers.*.experts"
    first = layer.replace("*", str(config.layers[0]))
    if f"{first}mlp.experts.gate_up_proj_blocks" in folder.tensors:
        raise UserError(
            f"{folder.path}: experts in MXFP4 ({first}mlp.experts.gate_up_proj_blocks) are not read; save it once in "
            "bfloat16 (transformers: `Mxfp4Config(dequantize=True)`)"
        )
    if f"{first}mlp.router.weight" in folder.tensors:
        return below(experts, _biased_expert_parts(config, f"{layer}mlp"))
    mixtral = f"{first}block_sparse_moe.gate.weight" in folder.tensors
    llama4 = f"{first}feed_forward.router.weight" in folder.tensors
    block = f"{layer}block_sparse_moe" if mixtral else f"{layer}mlp"
    block = f"{layer}feed_forward" if llama4 else block
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else GATED_MLP
    router = f"{block}.router" if llama4 else f"{block}.gate"
    correction = TensorSlice(f"{router}.e_score_correction_bias")
    parts: dict[str, LeafTensors] = {
        f"{experts}.router": {**linear(router), "correction": correction}
    }
    shared = (
        "shared_experts"
        if f"{first}mlp.shared_experts.up_proj.weight" in folder.tensors
        else "shared_expert"
    )
    parts |= linears(f"{experts}.shared", f"{block}.{shared}", **names)
    parts[f"{experts}.shared_gate"] = linear(f"{block}.shared_expert_gate")
    fused = folder.tensors.get(f"{block.replace(layer, first)}.experts.gate_up_proj")
    if fused is None:
        keys = {ours: f"{block}.experts.#.{name}.weight" for ours, name in names.items()}
        slices = {ours: TensorSlice(key, TRANSPOSED, experts=True) for ours, key in keys.items()}
    else:
        turned = not llama4 and fused.shape[1:2] == (2 * config.width,)
        slices = _fused_experts(config, f"{block}.experts", turned)
    return parts | {f"{experts}.{ours}": {"weight": part} for ours, part in slices.items()}


def _fused_experts(config: ExpertsConfig, key: str, turned: bool = True) -> dict[str, TensorSlice]:
    """Locate the matrices of experts of a layer whose gate and up are one; turned: [out, in]."""
    halves = {"gate": (0, config.width), "up": (config.width, 2 * config.width)}
    order = TRANSPOSED if turned else None
    slices = {"down": TensorSlice(f"{key}.down_proj[#]", order, experts=True)}
    for ours, half in halves.items():
        cut = {"rows": half} if turned else {"columns": half}
        slices[ours] = TensorSlice(f"{key}.gate_up_proj[#]", order, experts=True, **cut)
    return slices


def _experts_beside_parts(config: ExpertsConfig, layer: str) -> dict[str, LeafTensors]:
    """Locate the parameters of Gemma 4's experts, and of the norms around them and the MLP beside them."""
    experts = "layers.*.experts"
    slices = _fused_experts(config, f"{layer}experts")
    router = {
        "weight": TensorSlice(f"{layer}router.proj.weight", TRANSPOSED),
        "input_scale": TensorSlice(f"{layer}router.scale"),
        "share_scale": TensorSlice(f"{layer}router.per_expert_scale"),
        "expert_input_scale": TensorSlice(f"{layer}pre_feedforward_layernorm_2.weight"),
    }
    return {
        f"{experts}.router": router,
        **{f"{experts}.{ours}": {"weight": part} for ours, part in slices.items()},
        "layers.*.mlp_norm_after": norm(f"{layer}post_feedforward_layernorm_1"),
        "layers.*.experts_norm_after": norm(f"{layer}post_feedforward_layernorm_2"),
    }


def _biased_expert_parts(config: ExpertsConfig, block: str) -> dict[str, LeafTensors]:
    """Locate gpt-oss's experts: all of a layer fused, stored [in, out], columns of gate and up taking turns."""
    parts: dict[str, LeafTensors] = {"router": linear(f"{block}.router")}
    columns = {"gate": (0, 2 * config.width, 2), "up": (1, 2 * config.width, 2), "down": None}
    for ours, cut in columns.items():
        key = f"{block}.experts.{'gate_up_proj' if cut else 'down_proj'}"
        parts[ours] = {
            "weight": TensorSlice(f"{key}[#]", columns=cut, experts=True),
            "bias": TensorSlice(f"{key}_bias", columns=cut),
        }
    return parts
