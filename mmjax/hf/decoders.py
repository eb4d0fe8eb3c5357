"""Text decoders with RoPE: Qwen, Llama, Mistral, Mixtral, InternLM2, Phi-3, Gemma, GLM-4: what their configs say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mmjax.config import (
    Biased,
    DecoderConfig,
    DeltaNetConfig,
    DynamicRope,
    ExpertsConfig,
    LinearRope,
    Llama3Rope,
    LongRope,
    PlainRope,
    RopeScaling,
    YarnRope,
)
from mmjax.errors import UserError
from mmjax.hf import gpt
from mmjax.hf.folder import Fields, note
from mmjax.hf.names import ACTIVATIONS, QKV

ROPE = {  # what a config may say of RoPE beside its base
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"),
}
ROPE_ALWAYS = {"rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor"}
LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Family:
    """A kind of decoder: its documented defaults, and what sets it apart."""

    adapt: Callable[[Fields, DecoderConfig], DecoderConfig]  # adds what only this family has
    width: int = 4096
    layers: int = 32
    heads: int = 32
    mlp_width: int = 22_016
    vocab: int = 151_936
    theta: float = 10_000.0
    window_theta: float = 0.0  # of the layers with windows; 0: they have no base of their own
    positions: int = 32_768  # max_position_embeddings
    norm_eps: float = 1e-6
    tied: bool = False
    activation: str = "hidden_act"  # the field that names it
    default_activation: str = "silu"
    head_width: int | None = None  # None: width / heads
    kv_heads: int | None = 32  # None: as many as heads
    rotary_share: float | None = None  # of a head's channels, where configs may say another; None: RoPE turns all


def decoder_of(fields: Fields, tied: bool | None = None) -> DecoderConfig:
    """The decoder that a text config says. tied: what a config around it says of its tables; None: its own.

    Raises UserError for an unknown family, a field that is missing and has no documented default, and one that changes
    the computation in a way that is not supported.
    """
    kind = fields.get("model_type", str)
    if kind in gpt.FAMILIES:
        llm = gpt.read(fields)
        return llm if tied is None else replace(llm, tied=tied)
    if kind not in FAMILIES:
        known = ", ".join((*FAMILIES, *gpt.FAMILIES))
        raise UserError(f"{fields.where}: model_type={kind!r} is no decoder that can be read; known: {known}")
    family = FAMILIES[kind]
    width = fields.get("hidden_size", int, family.width)
    heads = fields.get("num_attention_heads", int, family.heads)
    # null says as many as heads, and a field that is missing the family's default.
    kv_heads = heads if "num_key_value_heads" in fields.values else family.kv_heads or heads
    head_width = fields.get("head_dim", int, family.head_width or width // heads)
    rope = rope_of(fields, family)
    own_tied = fields.get("tie_word_embeddings", bool, family.tied)
    plain = DecoderConfig(
        attention="auto",
        layers=fields.get("num_hidden_layers", int, family.layers),
        width=width,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", int, kv_heads),
        head_width=head_width,
        mlp_width=fields.get("intermediate_size", int, family.mlp_width),
        vocab=fields.get("vocab_size", int, family.vocab),
        rotary_width=0 if rope.share == 1 else int(head_width * rope.share),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rope_sections=rope.sections,
        rope_interleaved=rope.interleaved,
        window_rope_theta=rope.window_theta,
        norm_eps=fields.get("rms_norm_eps", float, family.norm_eps),
        activation=fields.choice(family.activation, ACTIVATIONS, family.default_activation),
        tied=own_tied if tied is None else tied,
    )
    fields.refuse("use_bidirectional_attention", False)
    return family.adapt(fields, plain)


def _qwen2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return _late_windows(fields, replace(plain, biases=QKV))


def _qwen3(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = (*QKV, "output") if fields.get("attention_bias", bool, False) else ()
    return _late_windows(fields, replace(plain, biases=biases, qk_norm="head"))


def _qwen3_5(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = (*QKV, "output") if fields.get("attention_bias", bool, False) else ()
    # What published configs say beside the fields that transformers reads.
    fields.refuse("attn_output_gate", True)
    fields.refuse("output_gate_type", "swish", "silu")
    fields.refuse("mamba_ssm_dtype", "float32")
    interval = fields.get("full_attention_interval", int, 4)
    default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(plain.layers)]
    types = _layer_types(fields, default, {"linear_attention", "full_attention"})
    delta_net = DeltaNetConfig(
        layers=tuple(i for i, kind in enumerate(types) if kind == "linear_attention"),
        key_heads=fields.get("linear_num_key_heads", int, 16),
        value_heads=fields.get("linear_num_value_heads", int, 32),
        key_width=fields.get("linear_key_head_dim", int, 128),
        value_width=fields.get("linear_value_head_dim", int, 128),
        taps=fields.get("linear_conv_kernel_dim", int, 4),
    )
    if delta_net.value_heads % delta_net.key_heads:
        raise UserError(
            f"{fields.where}: linear_num_value_heads={delta_net.value_heads} is no multiple of "
            f"linear_num_key_heads={delta_net.key_heads}"
        )
    delta_net = delta_net if delta_net.layers else None
    return replace(plain, biases=biases, qk_norm="head", norm_offset=1.0, attention_gate=True, delta_net=delta_net)


def _qwen3_moe(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = (*QKV, "output") if fields.get("attention_bias", bool, False) else ()
    step = fields.get("decoder_sparse_step", int, 1)
    dense = fields.get("mlp_only_layers", list, [])
    experts = _experts(
        fields,
        layers=tuple(i for i in range(plain.layers) if i not in dense and (i + 1) % step == 0),
        width=fields.get("moe_intermediate_size", int, 768),
        normalized=fields.get("norm_topk_prob", bool, False),
    )
    # Unlike the dense ones, all layers have the window or none.
    windowed = fields.get("use_sliding_window", bool, False)
    plain = _everywhere(fields, plain, 4096) if windowed else plain
    return replace(plain, biases=biases, qk_norm="head", experts=experts)


def _qwen3_5_moe(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    experts = _experts(
        fields,
        count=256,
        layers=tuple(range(plain.layers)),
        width=fields.get("moe_intermediate_size", int, 512),
        shared_width=fields.get("shared_expert_intermediate_size", int, 512),
    )
    return replace(_qwen3_5(fields, plain), experts=experts)


def _mixtral(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    fields.refuse("router_jitter_noise", 0, 0.0)
    layers = tuple(range(plain.layers))
    experts = _experts(fields, count=8, per_token=2, layers=layers, width=plain.mlp_width)
    return replace(_everywhere(fields, plain, 0), experts=experts)


def _experts(
    fields: Fields,
    layers: tuple[int, ...],
    width: int,
    count: int = 128,
    per_token: int = 8,
    normalized: bool = True,
    shared_width: int = 0,
) -> ExpertsConfig | None:
    """Read what all mixtures of experts say alike; count, per_token: defaults. None where no layer has experts."""
    # Its old name wins, for defaults have the new one.
    count = fields.get("num_experts", int, fields.get("num_local_experts", int, count))
    # As there, the balance loss is a part of the loss only where the router's logits are asked for.
    balanced = fields.get("output_router_logits", bool, False)
    experts = ExpertsConfig(
        layers=layers,
        count=count,
        per_token=fields.get("num_experts_per_tok", int, per_token),
        width=width,
        normalized=normalized,
        shared_width=shared_width,
        balance_loss=fields.get("router_aux_loss_coef", float, 0.001) if balanced else 0.0,
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
    attention: tuple[Biased, ...] = (*QKV, "output") if fields.get("attention_bias", bool, False) else ()
    mlp: tuple[Biased, ...] = ("gate", "up", "down") if fields.get("mlp_bias", bool, False) else ()
    return replace(plain, biases=attention + mlp)


def _internlm2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return replace(plain, biases=(*QKV, "output") if fields.get("bias", bool, True) else ())


def _mistral(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    fields.refuse("layer_types")
    return _everywhere(fields, plain, 4096)


def _phi3(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return _everywhere(fields, plain, 0)


def _everywhere(fields: Fields, plain: DecoderConfig, default: int) -> DecoderConfig:
    """Add the window that all layers have: null is none, and a field that is missing is the family's default."""
    window = fields.get("sliding_window", int, 0 if "sliding_window" in fields.values else default)
    return replace(plain, window=window, windowed=tuple(range(plain.layers)) if window else ())


def _glm4(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = QKV if fields.get("attention_bias", bool, True) else ()
    return replace(plain, biases=biases, post_norms=True, rope_neighbours=True)


def _gemma(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    biases = (*QKV, "output") if fields.get("attention_bias", bool, False) else ()
    return replace(plain, biases=biases, norm_offset=1.0, embedding_scale=plain.width**0.5)


def _gemma2(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    return replace(
        _local_gemma(fields, plain, period=2),
        attention_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    period = fields.get("sliding_window_pattern", int, 6)
    # transformers reads no cap of the scores here, whatever the config says.
    return replace(
        _local_gemma(fields, plain, period), qk_norm="head", logit_cap=_cap(fields, "final_logit_softcapping", 0.0)
    )


def _local_gemma(fields: Fields, plain: DecoderConfig, period: int) -> DecoderConfig:
    """Add windows, by default of all layers but every `period`-th, norms of the outputs and a scale of the scores."""
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(plain.layers)]
    return replace(
        _gemma(fields, plain),
        post_norms=True,
        # In place of 1 / sqrt(head width).
        attention_scale=fields.get("query_pre_attn_scalar", (int, float), 256) ** -0.5,
        window=fields.get("sliding_window", int, 4096),
        windowed=_windowed(fields, kinds),
    )


def _cap(fields: Fields, name: str, default: float) -> float:
    """A cap; null is none."""
    return fields.get(name, float, 0.0 if name in fields.values else default)


def _late_windows(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    """Qwen's windows: of the layers from `max_window_layers` on, where they are switched on."""
    if not fields.get("use_sliding_window", bool, False):
        fields.refuse("layer_types", ["full_attention"] * plain.layers)
        return plain
    window = fields.get("sliding_window", int, 0 if "sliding_window" in fields.values else 4096)
    first = fields.get("max_window_layers", int, 28)
    late = ["sliding_attention" if window and i >= first else "full_attention" for i in range(plain.layers)]
    windowed = _windowed(fields, late)
    return replace(plain, window=window if windowed else 0, windowed=windowed)


def _windowed(fields: Fields, default: list[str]) -> tuple[int, ...]:
    types = _layer_types(fields, default, LAYER_TYPES)
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")


def _layer_types(fields: Fields, default: list[str], known: set[str]) -> list[str]:
    """Read the kind of every layer. Raises UserError for another number of them than `default` has, or other kinds."""
    types = fields.get("layer_types", list, default)
    if len(types) != len(default) or set(types) - known:
        raise UserError(
            f"{fields.where}: layer_types must give each of {len(default)} layers one of {', '.join(sorted(known))}"
        )
    return types


class Rope(NamedTuple):
    """The rotary embedding of a config."""

    theta: float
    scaling: RopeScaling
    share: float  # partial_rotary_factor
    sections: tuple[int, ...]  # mrope_section
    interleaved: bool  # whether the sections take turns
    window_theta: float  # base of the layers with windows, unscaled; 0: as the others


def rope_of(fields: Fields, family: Family) -> Rope:
    """Read `rope_parameters`, or `rope_scaling` beside `rope_theta`, as older versions write it.

    transformers reads `rope_scaling` alone where a config has both. Raises UserError where the two differ.
    """
    places = [name for name in ("rope_scaling", "rope_parameters") if fields.get(name, dict, {})]
    ropes = [_rope_in(fields, name, family) for name in places or ["rope_parameters"]]
    # One or two places: with one, this compares it with itself.
    if ropes[0] != ropes[-1]:
        raise UserError(
            f"{fields.where}: rope_scaling and rope_parameters differ, and transformers reads rope_scaling alone, with "
            "the rope_theta beside it; remove the one that is not meant"
        )
    return ropes[0]


def _rope_in(fields: Fields, place: str, family: Family) -> Rope:
    values = {name: value for name, value in fields.get(place, dict, {}).items() if value is not None}
    near = values.get("sliding_attention") or {}
    if family.window_theta and set(values) & LAYER_TYPES:
        values = values.get("full_attention") or {}
    rope = Fields({"rope_theta": fields.values.get("rope_theta"), **values}, f"{fields.where}: {place}")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in ROPE:
        raise UserError(f"{rope.where}: rope_type={kind!r} is not supported; known: {', '.join(ROPE)}")
    if nested := sorted(set(values) & LAYER_TYPES):
        raise UserError(f"{rope.where}: {nested[0]}: RoPE by the type of a layer is not supported")
    # Not an error: transformers ignores them, and published checkpoints have some.
    if unread := sorted(set(values) - set(ROPE[kind]) - ROPE_ALWAYS):
        note(f"{rope.where}: {', '.join(unread)}: not read for rope_type={kind!r}, as in transformers")
    if family.rotary_share is None:
        for where in (rope, fields):
            where.refuse("partial_rotary_factor", 1, 1.0)
    share = fields.get("partial_rotary_factor", float, family.rotary_share or 1.0)
    return Rope(
        theta=rope.get("rope_theta", float, family.theta),
        share=rope.get("partial_rotary_factor", float, share),
        scaling=_scaling(kind, rope, fields, family),
        sections=tuple(rope.get("mrope_section", list, [])),
        interleaved=rope.get("mrope_interleaved", bool, False),
        window_theta=_window_theta(fields, Fields(near, f"{fields.where}: {place}: sliding_attention"), family),
    )


def _window_theta(fields: Fields, rope: Fields, family: Family) -> float:
    """Read the base of the layers with windows; older versions write `rope_local_base_freq`."""
    rope.refuse("rope_type", "default")
    default = fields.get("rope_local_base_freq", float, family.window_theta) if family.window_theta else 0.0
    return rope.get("rope_theta", float, default)


def _scaling(kind: str, rope: Fields, fields: Fields, family: Family) -> RopeScaling:
    max_positions = fields.get("max_position_embeddings", int, family.positions)
    # The field beside RoPE's own, as Phi-3 has it, wins in transformers.
    name = "original_max_position_embeddings"
    trained_positions = fields.get(name, int, rope.get(name, int, max_positions))
    match kind:
        case "linear":
            return LinearRope(rope.get("factor", float))
        case "dynamic":
            return DynamicRope(rope.get("factor", float), max_positions)
        case "llama3":
            low, high = rope.get("low_freq_factor", float), rope.get("high_freq_factor", float)
            return Llama3Rope(rope.get("factor", float), low, high, trained_positions)
        case "yarn":
            factor = rope.get("factor", float, max_positions / trained_positions)
            attention = rope.get("attention_factor", float, _yarn_attention(rope, factor))
            # As in the paper's code, 0 stands for its default too.
            fast = rope.get("beta_fast", float, 32.0) or 32.0
            slow = rope.get("beta_slow", float, 1.0) or 1.0
            truncate = rope.get("truncate", bool, True)
            return YarnRope(factor, trained_positions, attention, fast, slow, whole=truncate)
        case "longrope":
            factor = rope.get("factor", float, max_positions / trained_positions)
            # Phi-3's scale of attention for positions beyond the pretraining's.
            grown = math.sqrt(1 + math.log(factor) / math.log(trained_positions)) if factor > 1 else 1.0
            short, long = (tuple(map(float, rope.get(f"{regime}_factor", list))) for regime in ("short", "long"))
            return LongRope(short, long, trained_positions, rope.get("attention_factor", float, grown))
    return PlainRope()


def _yarn_attention(rope: Fields, factor: float) -> float:
    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    over = rope.get("mscale", float, 0.0)
    under = rope.get("mscale_all_dim", float, 0.0)
    return grown(over) / grown(under) if over and under else grown(1.0)


GEMMA2 = Family(
    _gemma2,
    width=2304,
    layers=26,
    heads=8,
    mlp_width=9216,
    vocab=256_000,
    positions=8192,
    tied=True,
    activation="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    head_width=256,
    kv_heads=4,
)
FAMILIES = {
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3, head_width=128),
    "qwen3_5_text": Family(
        _qwen3_5, heads=16, kv_heads=4, head_width=256, mlp_width=12_288, vocab=248_320, rotary_share=0.25
    ),
    "qwen3_moe": Family(_qwen3_moe, width=2048, layers=24, kv_heads=4, mlp_width=6144),
    "qwen3_5_moe_text": Family(
        _qwen3_5_moe,
        width=2048,
        layers=40,
        heads=16,
        kv_heads=2,
        head_width=256,
        mlp_width=512,
        vocab=248_320,
        rotary_share=0.25,
    ),
    "mixtral": Family(
        _mixtral, mlp_width=14_336, vocab=32_000, positions=4096 * 32, kv_heads=8, theta=1e6, norm_eps=1e-5
    ),
    "llama": Family(_llama, mlp_width=11_008, vocab=32_000, positions=2048, kv_heads=None),
    "mistral": Family(_mistral, mlp_width=14_336, vocab=32_000, positions=4096 * 32, kv_heads=8),
    "internlm2": Family(_internlm2, width=4096, mlp_width=11_008, vocab=103_168, positions=2048, kv_heads=None),
    "phi3": Family(
        _phi3,
        width=3072,
        mlp_width=8192,
        vocab=32_064,
        positions=4096,
        norm_eps=1e-5,
        kv_heads=None,
        rotary_share=1.0,
    ),
    "glm4": Family(
        _glm4,
        layers=40,
        mlp_width=13_696,
        vocab=151_552,
        positions=131_072,
        norm_eps=1.5625e-7,
        head_width=128,
        kv_heads=2,
        rotary_share=0.5,
    ),
    "gemma": Family(
        _gemma,
        width=3072,
        layers=28,
        heads=16,
        mlp_width=24_576,
        vocab=256_000,
        positions=8192,
        tied=True,
        default_activation="gelu_pytorch_tanh",
        head_width=256,
        kv_heads=16,
    ),
    "gemma2": GEMMA2,
    "gemma3_text": replace(GEMMA2, adapt=_gemma3, vocab=262_208, positions=131_072, theta=1e6, window_theta=1e4),
}
