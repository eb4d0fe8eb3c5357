"""Read the rotary embedding that a decoder's config says, in the forms of several versions of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmjax.config import (
    DecoderConfig,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    PlainRope,
    ProportionalRope,
    RopeScaling,
    YarnRope,
)
from mmjax.errors import UserError
from mmjax.hf.folder import Fields, note

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
    "longrope": (
        "factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "attention_factor",
    ),
    "proportional": ("factor",),
}

ROPE_ALWAYS = {
    "rope_type",
    "type",
    "rope_theta",
    "mrope_section",
    "mrope_interleaved",
    "partial_rotary_factor",
}

ROPE_GROWING = {
    "llama_4_scaling_beta",
    "original_max_position_embeddings",
    "max_position_embeddings",
}

LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Family:
    """A kind of decoder, and what sets it apart."""

    adapt: Callable[[Fields, DecoderConfig], DecoderConfig]  # adds what only this family has
    activation: str = "hidden_act"  # the field that names it; empty: it is SiLU
    norm_eps: str = "rms_norm_eps"  # the field that says it
    partial_rope: bool = False  # configs may say that RoPE turns a part of a head's channels
    local_rope: bool = False  # layers with windows have a RoPE of their own
    growing: bool = False  # queries grow with the position
    # what `use_bidirectional_attention` may say, which of text alone changes nothing
    bidirectional: tuple[str, ...] = ()
    # latent attention, and the channels of a head that `head_dim` counts: those that RoPE turns, or all
    latent: Literal["", "rotary", "whole"] = ""


class Rope(NamedTuple):
    """The rotary embedding of a config."""

    theta: float
    scaling: RopeScaling
    share: float  # partial_rotary_factor
    sections: tuple[int, ...]  # mrope_section
    interleaved: bool  # whether the sections take turns
    window_theta: float  # base of the layers with windows, unscaled; 0: as the others
    growth: float  # of queries
    span: int  # tokens after which they grow
    score_scale: float  # of the scores of latent attention


def rope_of(fields: Fields, family: Family) -> Rope:
    """Read `rope_parameters`, or `rope_scaling` beside `rope_theta`, as older versions write it.

    transformers reads `rope_scaling` alone where a config has both. Raises UserError where the two
    differ.
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
    values = {
        name: value for name, value in fields.get(place, dict, {}).items() if value is not None
    }
    near = values.get("sliding_attention") or {}
    if (
        family.local_rope
        and place == "rope_parameters"
        and values
        and not set(values) & LAYER_TYPES
    ):
        raise UserError(
            f"{fields.where}: {place} must say full_attention and sliding_attention; transformers ignores the rest"
        )
    if family.local_rope and set(values) & LAYER_TYPES:
        values = values.get("full_attention") or {}
    rope = Fields(
        {"rope_theta": fields.values.get("rope_theta"), **values}, f"{fields.where}: {place}"
    )
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in ROPE or (kind == "proportional" and not family.local_rope):
        raise UserError(
            f"{rope.where}: rope_type={kind!r} is not supported; known: {', '.join(ROPE)}"
        )
    if nested := sorted(set(values) & LAYER_TYPES):
        raise UserError(f"{rope.where}: {nested[0]}: RoPE by the type of a layer is not supported")
    # Not an error: transformers ignores them, and published checkpoints have some.
    known = ROPE_ALWAYS | (ROPE_GROWING if family.growing else set())
    if unread := sorted(set(values) - set(ROPE[kind]) - known):
        note(
            f"{rope.where}: {', '.join(unread)}: not read for rope_type={kind!r}, as in transformers"
        )
    share = 1.0
    if family.latent == "whole":
        rotary = fields.size("qk_rope_head_dim")
        width = fields.size("qk_nope_head_dim") + rotary
        # Its class sets it so where RoPE's fields leave it out.
        rope.allow_only("partial_rotary_factor", rotary / width)
    elif family.partial_rope:
        share = rope.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float))
    else:
        for where in (rope, fields)[kind == "proportional" :]:
            where.allow_only("partial_rotary_factor", 1, 1.0)
    return Rope(
        theta=rope.get("rope_theta", float),
        share=share,
        scaling=_scaling(kind, rope, fields),
        sections=tuple(rope.get("mrope_section", list[int], [])),
        interleaved=rope.get("mrope_interleaved", bool, False),
        window_theta=_window_theta(
            fields, Fields(near, f"{fields.where}: {place}: sliding_attention"), family
        ),
        growth=rope.get("llama_4_scaling_beta", float) if family.growing else 0.0,
        span=rope.get("original_max_position_embeddings", int) if family.growing else 1,
        score_scale=_score_scale(kind, rope) if family.latent else 1.0,
    )


def _window_theta(fields: Fields, rope: Fields, family: Family) -> float:
    """Read the base of the layers with windows; older versions write `rope_local_base_freq`."""
    rope.allow_only("rope_type", "default")
    return (
        rope.get("rope_theta", float, fields.get("rope_local_base_freq", float))
        if family.local_rope
        else 0.0
    )


def _scaling(kind: str, rope: Fields, fields: Fields) -> RopeScaling:
    max_positions = fields.size("max_position_embeddings")
    # The field beside RoPE's own, as Phi-3 has it, wins in transformers.
    name = "original_max_position_embeddings"
    trained_positions = fields.get(name, int, rope.get(name, int, max_positions))
    match kind:
        case "linear":
            return LinearRope(rope.get("factor", float))
        case "dynamic":
            return DynamicRope(rope.get("factor", float), max_positions)
        case "proportional":
            share = rope.get("partial_rotary_factor", float, 1.0)
            return ProportionalRope(share, rope.get("factor", float, 1.0))
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
            grown = (
                math.sqrt(1 + math.log(factor) / math.log(trained_positions)) if factor > 1 else 1.0
            )
            short, long = (
                tuple(map(float, rope.get(f"{regime}_factor", list[float])))
                for regime in ("short", "long")
            )
            return LongRope(
                short, long, trained_positions, rope.get("attention_factor", float, grown)
            )
    return PlainRope()


def _yarn_attention(rope: Fields, factor: float) -> float:
    over = rope.get("mscale", float, 0.0)
    under = rope.get("mscale_all_dim", float, 0.0)
    if not over or not under:
        return _grown(factor, 1.0)
    return _grown(factor, over) / _grown(factor, under)


def _score_scale(kind: str, rope: Fields) -> float:
    """Read by how much DeepSeek's scores grow beside cosines and sines."""
    under = rope.get("mscale_all_dim", float, 0.0)
    if kind == "default" or not under:
        return 1.0
    return _grown(rope.get("factor", float), under) ** 2


def _grown(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
