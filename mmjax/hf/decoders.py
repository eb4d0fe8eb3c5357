"""Text decoders with RoPE, from Qwen, Llama and Mistral to Gemma, GLM-4, Cohere and ERNIE: what their configs say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmjax.config import (
    Biased,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    TokenInputsConfig,
)
from mmjax.errors import UserError
from mmjax.hf import gpt, lfm2
from mmjax.hf.class_defaults import class_rule
from mmjax.hf.folder import Fields
from mmjax.hf.names import ACTIVATIONS, QKV
from mmjax.hf.rope import LAYER_TYPES, Family, rope_of


def decoder_of(fields: Fields, tied: bool | None = None) -> DecoderConfig:
    """The decoder that a text config says. tied: what a config around it says of its tables; None: its own.

    Raises UserError for an unknown family, and for a field that changes the computation in a way
    that is not supported.
    """
    kind = fields.get("model_type", str)
    if not fields.values.get("is_causal", True):
        raise UserError(
            f"{fields.where}: is_causal={fields.values['is_causal']!r} is not supported; known: True"
        )
    if kind in gpt.FAMILIES:
        llm = gpt.read(fields)
        return llm if tied is None else replace(llm, tied=tied)
    if kind not in FAMILIES:
        known = ", ".join((*FAMILIES, *gpt.FAMILIES))
        raise UserError(
            f"{fields.where}: model_type={kind!r} is no decoder that can be read; known: {known}"
        )
    family = FAMILIES[kind]
    width = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    head_width = fields.size("qk_rope_head_dim" if family.latent else "head_dim", width // heads)
    rope = rope_of(fields, family)
    rotary_width = int(head_width * rope.share)
    if rotary_width % 2:
        raise UserError(
            f"{fields.where}: RoPE would turn {rotary_width} of {head_width} channels of a head "
            f"(partial_rotary_factor={rope.share}), an odd number, which is not supported"
        )
    plain = DecoderConfig(
        attention="auto",
        layers=fields.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_width=head_width,
        # There is none where all layers have experts.
        mlp_width=fields.get("intermediate_size", int, fields.get("moe_intermediate_size", int, 0)),
        vocab=fields.size("vocab_size"),
        rotary_width=0 if rope.share == 1 else rotary_width,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_sections=rope.sections,
        rope_interleaved=rope.interleaved,
        window_rope_theta=rope.window_theta,
        norm_eps=fields.get(family.norm_eps, float),
        activation=fields.choice(family.activation, ACTIVATIONS) if family.activation else "silu",
        tied=fields.get("tie_word_embeddings", bool) if tied is None else tied,
    )
    if rope.growth:
        plain = replace(plain, query_growth=rope.growth, query_span=rope.span)
    if family.latent:
        plain = _with_latent(fields, plain, family, rope.score_scale)
    fields.allow_only("use_bidirectional_attention", False, *family.bidirectional)
    return family.adapt(fields, plain)


def tables_are_tied(fields: Fields) -> bool:
    """Return whether a class around a text has one table: it says so, or takes over what its text says."""
    tied = fields.get("tie_word_embeddings", bool, False)
    forwards = class_rule(fields.get("model_type", str), "forwards_ties")
    return tied or (
        forwards and fields.inner("text_config").get("tie_word_embeddings", bool, False)
    )


def _attention_biases(fields: Fields, name: str = "attention_bias") -> tuple[Biased, ...]:
    """Name the layers of attention that have biases, all or none, as this field says."""
    return (*QKV, "output") if fields.get(name, bool) else ()


def _qwen2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return _late_windows(fields, replace(plain, biases=QKV))


def _qwen3(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = _attention_biases(fields)
    return _late_windows(fields, replace(plain, biases=biases, qk_norm="head"))


def _qwen3_5(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = _attention_biases(fields)
    # What published configs say beside the fields that transformers reads.
    fields.allow_only("attn_output_gate", True)
    fields.allow_only("output_gate_type", "swish", "silu")
    fields.allow_only("mamba_ssm_dtype", "float32")
    interval = fields.size("full_attention_interval", 4)
    default = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(plain.layers)
    ]
    types = layer_types(fields, default, {"linear_attention", "full_attention"})
    delta_net = DeltaNetConfig(
        layers=tuple(i for i, kind in enumerate(types) if kind == "linear_attention"),
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads"),
        key_width=fields.size("linear_key_head_dim"),
        value_width=fields.size("linear_value_head_dim"),
        taps=fields.size("linear_conv_kernel_dim"),
    )
    if delta_net.value_heads % delta_net.key_heads:
        raise UserError(
            f"{fields.where}: linear_num_value_heads={delta_net.value_heads} is no multiple of "
            f"linear_num_key_heads={delta_net.key_heads}"
        )
    return replace(
        plain,
        biases=biases,
        qk_norm="head",
        norm_offset=1.0,
        attention_gate=True,
        delta_net=delta_net if delta_net.layers else None,
    )


def _qwen3_moe(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = _attention_biases(fields)
    step = fields.size("decoder_sparse_step")
    dense = fields.get("mlp_only_layers", list[int], [])
    experts = _experts(
        fields,
        layers=tuple(i for i in range(plain.layers) if i not in dense and (i + 1) % step == 0),
        width=fields.size("moe_intermediate_size"),
        normalized=fields.get("norm_topk_prob", bool),
    )
    # Unlike the dense ones, all layers have the window or none.
    windowed = fields.get("use_sliding_window", bool)
    plain = _everywhere(fields, plain) if windowed else plain
    return replace(plain, biases=biases, qk_norm="head", experts=experts)


def _qwen3_5_moe(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    experts = _experts(
        fields,
        layers=tuple(range(plain.layers)),
        width=fields.size("moe_intermediate_size"),
        shared_width=fields.size("shared_expert_intermediate_size"),
    )
    return replace(_qwen3_5(fields, plain), experts=experts)


def _mixtral(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    fields.allow_only("router_jitter_noise", 0, 0.0)
    layers = tuple(range(plain.layers))
    experts = _experts(fields, layers=layers, width=plain.mlp_width)
    return replace(_everywhere(fields, plain), experts=experts)


def _llama4(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    layers = range(plain.layers)
    interval = fields.size("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers", list[int], []) or [
        int((i + 1) % interval != 0) for i in layers
    ]
    if len(rotated) < plain.layers:
        raise UserError(
            f"{fields.where}: no_rope_layers has {len(rotated)} numbers for {plain.layers} layers"
        )
    step = fields.size("interleave_moe_layer_step")
    routed = fields.get("moe_layers", list[int], list(range(step - 1, plain.layers, step)))
    chunk = fields.get("attention_chunk_size", int, 0)
    kinds = ["chunked_attention" if rotated[i] and chunk else "full_attention" for i in layers]
    types = layer_types(fields, kinds, {"chunked_attention", "full_attention"})
    windowed = tuple(i for i in layers if types[i] == "chunked_attention")
    tuned = fields.get("attn_temperature_tuning", bool)
    experts = _experts(
        fields,
        layers=tuple(i for i in layers if i in routed),
        width=plain.mlp_width,
        normalized=False,
        shared_width=plain.mlp_width,
        shared_gate=False,
        scores="sigmoid",
        weighted="inputs",
    )
    return replace(
        plain,
        mlp_width=fields.size("intermediate_size_mlp"),
        biases=_attention_biases(fields),
        rope_neighbours=True,
        unrotated=tuple(i for i in layers if not rotated[i]),
        qk_norm="rotated" if fields.get("use_qk_norm", bool) else "none",
        query_growth=fields.get("attn_scale", float) if tuned else 0.0,
        query_span=fields.size("floor_scale"),
        growing="unrotated",
        window=fields.size("attention_chunk_size") if windowed else 0,
        windowed=windowed,
        chunked=bool(windowed),
        experts=experts,
    )


def _gpt_oss(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    experts = _experts(
        fields,
        layers=tuple(range(plain.layers)),
        width=plain.mlp_width,
        biases=True,
        limit=fields.get("swiglu_limit", float),
        slope=fields.get("swiglu_alpha", float),
    )
    return replace(
        _all_but_every(fields, plain, period=2),
        activation="silu",  # whatever `hidden_act` says
        biases=_attention_biases(fields),
        sinks=True,
        experts=experts,
    )


def _with_latent(
    fields: Fields, plain: DecoderConfig, family: Family, score_scale: float
) -> DecoderConfig:
    """Add latent attention to a decoder whose heads are as wide as what RoPE turns of them."""
    rotary = plain.head_width
    width = fields.size("qk_nope_head_dim") + rotary
    fields.allow_only("head_dim", width if family.latent == "whole" else rotary)
    fields.allow_only("num_key_value_heads", plain.heads)
    values = fields.size("v_head_dim")
    if values > width:
        raise UserError(
            f"{fields.where}: v_head_dim={values} is more than qk_nope_head_dim + qk_rope_head_dim={width}, which is "
            "not supported"
        )
    query_rank = fields.get("q_lora_rank", int, 0)
    biases: tuple[Biased, ...] = ("query", "key", "output") if query_rank else ("key", "output")
    return replace(
        plain,
        head_width=width,
        rotary_width=rotary,
        rope_neighbours=fields.get("rope_interleave", bool, True),
        attention_scale=width**-0.5 * score_scale,
        biases=biases if fields.get("attention_bias", bool) else (),
        latent=LatentAttentionConfig(fields.size("kv_lora_rank"), values, query_rank),
    )


def _glm4_moe(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    experts = _grouped_experts(fields, plain, scores="sigmoid", correction=True)
    biases = QKV if fields.get("attention_bias", bool) else ()
    normed = fields.get("use_qk_norm", bool)
    return replace(plain, biases=biases, qk_norm="head" if normed else "none", experts=experts)


def _mistral4(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return replace(plain, experts=_grouped_experts(fields, plain))


def _deepseek_v3(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    # What published configs say beside the fields that transformers reads.
    fields.allow_only("scoring_func", "sigmoid")
    fields.allow_only("topk_method", "noaux_tc")
    fields.allow_only("moe_layer_freq", 1)
    experts = _grouped_experts(fields, plain, scores="sigmoid", correction=True)
    return replace(plain, experts=experts)


def _deepseek_v2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    fields.allow_only("scoring_func", "softmax")
    fields.allow_only("moe_layer_freq", 1)
    fields.allow_only("norm_topk_prob", False)
    return replace(plain, experts=greedy_experts(fields, plain))


def greedy_experts(fields: Fields, plain: DecoderConfig, **own: Any) -> ExpertsConfig | None:
    """Read the experts of DeepSeek-V2, perhaps chosen among those of the best groups."""
    fields.allow_only("mlp_bias", False)
    greedy = {"greedy": {"groups": 1, "chosen_groups": 1}, "group_limited_greedy": {}}
    own |= fields.choice("topk_method", greedy)
    return _grouped_experts(fields, plain, normalized=False, group_best=1, **own)


def _grouped_experts(fields: Fields, plain: DecoderConfig, **own: Any) -> ExpertsConfig | None:
    """Read DeepSeek's experts behind the first layers, chosen by groups, and one that all tokens see."""
    width = fields.size("moe_intermediate_size")
    if "groups" not in own:
        own |= {"groups": fields.size("n_group"), "chosen_groups": fields.size("topk_group")}
    if "normalized" not in own:
        own["normalized"] = fields.get("norm_topk_prob", bool)
    if "layers" not in own:
        own["layers"] = tuple(range(fields.get("first_k_dense_replace", int), plain.layers))
    return _experts(
        fields,
        width=width,
        shared_width=fields.get("n_shared_experts", int) * width,
        shared_gate=False,
        scale=fields.get("routed_scaling_factor", (int, float)),
        **own,
    )


def _experts(
    fields: Fields,
    layers: tuple[int, ...],
    width: int,
    normalized: bool = True,
    shared_width: int = 0,
    **own: Any,
) -> ExpertsConfig | None:
    """Read what all mixtures of experts say alike. None where no layer has experts."""
    count = 0
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = fields.get(name, int, count)
    # As there, the balance loss is a part of the loss only where the router's logits are asked for.
    balanced = fields.get("output_router_logits", bool)
    experts = ExpertsConfig(
        layers=layers,
        count=count,
        per_token=fields.get("num_experts_per_tok", int),
        width=width,
        normalized=normalized,
        shared_width=shared_width,
        balance_loss=fields.get("router_aux_loss_coef", float, 0.0) if balanced else 0.0,
        **own,
    )
    if not layers or not count:
        return None
    if not 1 <= experts.per_token <= count:
        raise UserError(
            f"{fields.where}: num_experts_per_tok={experts.per_token} is not between 1 and the number of experts, "
            f"{count}"
        )
    return experts


def _llama(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    attention = _attention_biases(fields)
    mlp: tuple[Biased, ...] = ("gate", "up", "down") if fields.get("mlp_bias", bool) else ()
    return replace(plain, biases=attention + mlp)


def _ernie4_5(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biased = fields.get("use_bias", bool, False)
    biases = (*QKV, "output", "gate", "up", "down") if biased else ()
    return replace(plain, biases=biases, rope_neighbours=True)


def _granite(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    attention = fields.get("attention_multiplier", float, plain.head_width**-0.5)
    logits = fields.get("logits_scaling", float)
    if min(attention, logits) <= 0:
        raise UserError(
            f"{fields.where}: attention_multiplier={attention} and logits_scaling={logits} must be above 0"
        )
    return replace(
        _llama(fields, plain),
        embedding_scale=fields.get("embedding_multiplier", float),
        scaled_items=True,
        residual_scale=fields.get("residual_multiplier", float),
        attention_scale=attention,
        logit_scale=1 / logits,
    )


def _hyperclovax(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return replace(
        _granite(fields, plain),
        post_norms=fields.get("use_post_norm", bool),
        logit_scale=fields.get("logits_scaling", float),
    )


def _internlm2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return replace(plain, biases=_attention_biases(fields, "bias"))


def _mistral(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    fields.allow_only("layer_types")
    return _everywhere(fields, plain)


def _everywhere(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    """Add the window that all layers have; null is none."""
    window = fields.get("sliding_window", int, 0)
    return replace(plain, window=window, windowed=tuple(range(plain.layers)) if window else ())


def _glm4(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = QKV if fields.get("attention_bias", bool) else ()
    return replace(plain, biases=biases, post_norms=True, rope_neighbours=True)


def _gemma(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = _attention_biases(fields)
    return replace(plain, biases=biases, norm_offset=1.0, embedding_scale=plain.width**0.5)


def _gemma2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return replace(
        _local_gemma(fields, plain, period=2),
        attention_cap=fields.get("attn_logit_softcapping", float, 0.0),
        logit_cap=fields.get("final_logit_softcapping", float, 0.0),
    )


def _gemma3(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    period = fields.size("sliding_window_pattern", 6)
    # transformers reads no cap of the scores here, whatever the config says.
    return replace(
        _local_gemma(fields, plain, period),
        qk_norm="head",
        logit_cap=fields.get("final_logit_softcapping", float, 0.0),
    )


def _gemma4(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    layers = plain.layers
    default = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    types = layer_types(fields, default, LAYER_TYPES)
    types[-1] = "full_attention"  # whatever the config says, as in transformers
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    shared = fields.get("num_kv_shared_layers", int)
    if not 0 <= shared < layers or set(types[: layers - shared]) != set(types):
        raise UserError(
            f"{fields.where}: num_kv_shared_layers={shared} leaves no layer of each type whose keys the others share"
        )
    same = fields.get("attention_k_eq_v", bool)
    head_width, kv_heads = _full_heads(fields, full, same)
    width = fields.get("hidden_size_per_layer_input", int, 0)
    if width:
        fields.allow_only("pad_token_id", 0)
    doubled = shared and fields.get("use_double_wide_mlp", bool)
    experts = None
    if fields.get("enable_moe_block", bool, False):
        experts = ExpertsConfig(
            layers=tuple(range(layers)),
            count=fields.size("num_experts"),
            per_token=fields.size("top_k_experts"),
            width=fields.size("moe_intermediate_size"),
            beside_mlp=True,
        )
    return replace(
        plain,
        biases=_attention_biases(fields),
        qk_norm="head",
        value_norm=True,
        post_norms=True,
        attention_scale=1.0,
        embedding_scale=plain.width**0.5,
        logit_cap=fields.get("final_logit_softcapping", float, 0.0),
        window=fields.size("sliding_window"),
        windowed=tuple(i for i in range(layers) if i not in full),
        full_head_width=head_width,
        full_kv_heads=kv_heads,
        keys_as_values=same,
        shared_layers=shared,
        shared_mlp_width=2 * plain.mlp_width if doubled else 0,
        token_inputs=TokenInputsConfig(width, fields.size("vocab_size_per_layer_input"))
        if width
        else None,
        output_scales=True,
        experts=experts,
    )


def _full_heads(fields: Fields, full: list[int], same: bool) -> tuple[int, int]:
    """Read the head width and the heads of keys of Gemma 4's layers without windows.

    Configs that transformers has written say them of each layer. Raises UserError where that says more.
    """
    head_width = fields.size("head_dim")
    kv_heads = fields.size("num_key_value_heads")
    if fields.values.get("per_layer_config") is None:
        named = fields.get("num_global_key_value_heads", int, kv_heads)
        return fields.size("global_head_dim", 512), named if same else kv_heads
    layers = fields.get("per_layer_config", dict)
    known = {"head_dim": head_width, "num_key_value_heads": kv_heads}
    first = next(iter(layers.values()), {})
    # their numbers may have zeros in front
    alike = sorted(map(str.zfill, layers, [9] * len(layers))) == [f"{i:09}" for i in full]
    if layers and not (
        alike and set(first) <= set(known) and all(x == first for x in layers.values())
    ):
        raise UserError(
            f"{fields.where}: per_layer_config is supported where it gives all layers of full_attention, and no "
            f"others, the same {', '.join(known)}"
        )
    own = Fields({**known, **first}, f"{fields.where}: per_layer_config")
    return own.size("head_dim"), own.size("num_key_value_heads")


def _local_gemma(fields: Fields, plain: DecoderConfig, period: int) -> DecoderConfig:
    """Add windows of all layers but every `period`-th, norms of the outputs and a scale of the scores."""
    return replace(
        _gemma(fields, _all_but_every(fields, plain, period)),
        post_norms=True,
        # In place of 1 / sqrt(head width).
        attention_scale=fields.get("query_pre_attn_scalar", (int, float)) ** -0.5,
    )


def _all_but_every(fields: Fields, plain: DecoderConfig, period: int) -> DecoderConfig:
    """Add windows, by default of all layers but every `period`-th."""
    kinds = [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(plain.layers)
    ]
    window = fields.get("sliding_window", int)
    return replace(plain, window=window, windowed=_windowed(fields, kinds))


def _cohere(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    # A LayerNorm of its own for every head.
    fields.allow_only("use_qk_norm", False)
    return replace(
        plain,
        biases=_attention_biases(fields),
        norm="layer_without_bias",
        parallel_mlp=True,
        rope_neighbours=True,
        logit_scale=fields.get("logit_scale", float),
    )


def _cohere2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    period = fields.size("sliding_window_pattern", 4)
    return _without_rope(_cohere(fields, _all_but_every(fields, plain, period)))


def _exaone4(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    plain = replace(plain, qk_norm="head", pre_norms=False, post_norms=True)
    if fields.get("sliding_window", int, 0) == 0:
        fields.allow_only("layer_types", ["full_attention"] * plain.layers)
        return plain
    # Published configs say the pattern by letters, beside the types of the layers, which alone are read.
    named = bool(fields.get("layer_types", list[str], []))
    period = 1 if named else fields.size("sliding_window_pattern")
    return _without_rope(_all_but_every(fields, plain, period))


def _without_rope(plain: DecoderConfig) -> DecoderConfig:
    """Take RoPE from the layers without a window."""
    unrotated = tuple(i for i in range(plain.layers) if i not in plain.windowed)
    return replace(plain, unrotated=unrotated)


def _late_windows(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    """Qwen's windows: of the layers from `max_window_layers` on, where they are switched on."""
    if not fields.get("use_sliding_window", bool):
        fields.allow_only("layer_types", ["full_attention"] * plain.layers)
        return plain
    window = fields.get("sliding_window", int, 0)
    first = fields.get("max_window_layers", int)
    late = [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(plain.layers)
    ]
    windowed = _windowed(fields, late)
    return replace(plain, window=window if windowed else 0, windowed=windowed)


def _windowed(fields: Fields, default: list[str]) -> tuple[int, ...]:
    types = layer_types(fields, default, LAYER_TYPES)
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def layer_types(fields: Fields, default: list[str], known: set[str]) -> list[str]:
    """Read the kind of every layer. Raises UserError for another number of them than `default` has, or other kinds."""
    types = fields.get("layer_types", list[str], default)
    if len(types) != len(default) or set(types) - known:
        raise UserError(
            f"{fields.where}: layer_types must give each of {len(default)} layers one of {', '.join(sorted(known))}"
        )
    return types


FAMILIES = {
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "qwen3_5_text": Family(_qwen3_5, partial_rope=True),
    "qwen3_moe": Family(_qwen3_moe),
    "qwen3_5_moe_text": Family(_qwen3_5_moe, partial_rope=True),
    "glm4_moe": Family(_glm4_moe, partial_rope=True),
    "gpt_oss": Family(_gpt_oss),
    "llama4_text": Family(_llama4),
    "mixtral": Family(_mixtral),
    "mistral4": Family(_mistral4, growing=True, latent="whole"),
    "deepseek_v2": Family(_deepseek_v2, latent="rotary"),
    "deepseek_v3": Family(_deepseek_v3, latent="rotary"),
    "llama": Family(_llama),
    "granite": Family(_granite),
    "hyperclovax": Family(_hyperclovax),
    "lfm2": Family(lfm2.adapt, activation="", norm_eps="norm_eps"),
    "mistral": Family(_mistral),
    "ministral3": Family(_mistral, growing=True),
    "ernie4_5": Family(_ernie4_5),
    "internlm2": Family(_internlm2),
    "phi3": Family(_everywhere, partial_rope=True),
    "glm4": Family(_glm4, partial_rope=True),
    "cohere": Family(_cohere, norm_eps="layer_norm_eps"),
    "cohere2": Family(_cohere2, norm_eps="layer_norm_eps"),
    "exaone4": Family(_exaone4),
    "gemma": Family(_gemma),
    "gemma2": Family(_gemma2, activation="hidden_activation"),
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"),
        Family(
            _gemma4,
            activation="hidden_activation",
            local_rope=True,
            bidirectional=("vision",),
        ),
    ),
    "gemma3_text": Family(_gemma3, activation="hidden_activation", local_rope=True),
}
