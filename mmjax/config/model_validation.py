"""Validate the model of a config: its towers, connectors and adapters, and how media are prepared."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    AlternatingGrid,
    AsIs,
    AudioConfig,
    DecoderConfig,
    FractionalGrid,
    LearnedGrid,
    Llama3Rope,
    LongRope,
    MediaLimits,
    ModelConfig,
    Sinusoids,
    StoredTable,
    StretchedGrid,
    VisionConfig,
)
from mmjax.config.checks import (
    above_zero,
    at_least,
    at_most,
    check,
    divides,
    listed,
    ordered,
)
from mmjax.config.codec import did_you_mean
from mmjax.config.compatibility import Features, check_conflicts
from mmjax.config.generator_validation import check_generators
from mmjax.config.model import (
    NF4_BLOCK,
    frozen_by_adapters,
    linear_layers,
    matching_layers,
    quantized_layers,
)


def check_limits(where: str, limits: MediaLimits) -> None:
    """Raises UserError, naming the key under `where`, for limits that no image or clip can be within."""
    at_least(1, where, limits, ("pixels", "min_side", "aspect"))
    above_zero(where, limits, ("seconds",))
    ordered(where, limits, "min_side", "max_side")


MAX_LAYERS = 10_000  # the remat policy of each layer is planned by itself
MAX_MERGE = 1024  # neighbours per axis; an image's token merges their square


def check_model(model: ModelConfig) -> None:
    """Raises UserError for an LLM, encoders, connectors or adapters that cannot be built or work together."""
    _check_decoder(model.llm)
    for name, encoder in model.encoders.items():
        where = f"model.encoders.{name}"
        check(
            name != "llm", f"{where}: 'llm' is the decoder's name; call this encoder something else"
        )
        check(
            name.isidentifier(),
            f"{where}: an encoder's name must be a plain word: letters, digits and '_'",
        )
        _check_tower(where, encoder)
        divides(where, encoder.width, "width", encoder.heads, "heads")
        at_least(1, f"{where}.connector", encoder.connector, ("merge",))
        at_most(MAX_MERGE, f"{where}.connector", encoder.connector, ("merge",))
        at_least(
            0,
            f"{where}.connector",
            encoder.connector,
            ("mlp_width", "position_grid", "merger_width"),
        )
        _check_callbacks(where, encoder)
        if isinstance(encoder, VisionConfig):
            _check_vision(where, encoder)
            clips = [name for name, e in model.encoders.items() if isinstance(e, AudioConfig)]
            encoder.videos.check_sound(
                f"{where}.videos", encoder.frames, clips, bool(model.llm.rope_sections)
            )
        else:
            _check_audio(where, encoder)
    check_generators(model)
    check_conflicts(Features(model))
    modules = model.item_modules.values()
    parts = [model.llm, *modules, *(module.connector for module in modules)]
    check(
        bool(model.lora) or not all(p.frozen for p in parts),
        "model: every module is frozen; set frozen=false on one, such as model.llm",
    )
    _check_lora(model)
    _check_quantized(model)


def _check_callbacks(where: str, encoder: VisionConfig | AudioConfig) -> None:
    callbacks = encoder.callbacks
    where_calls = f"{where}.callbacks"
    if isinstance(encoder, AudioConfig):
        for name in ("before_encoder", "before_llm"):
            key = f"{where_calls}.{name}={getattr(callbacks, name)}"
            unset = not getattr(callbacks, name)
            check(
                unset, f"{key}: it is called for images, and this encoder takes clips; leave it out"
            )
        return
    images = f"{where}.images={encoder.images.kind}"
    check(
        not callbacks.before_encoder or isinstance(encoder.images, AsIs),
        f"{where_calls}.before_encoder prepares images, and so does {images}; leave one of them out",
    )
    check(
        not callbacks.before_llm or not encoder.images.arranges_tokens,
        f"{where_calls}.before_llm says in what order tokens stand, and so does {images}; choose order=tiles",
    )


def _check_lora(model: ModelConfig) -> None:
    names = linear_layers(model)
    adapter_of: dict[str, str] = {}
    for name, lora in model.lora.items():
        where = f"model.lora.{name}"
        at_least(1, where, lora, ("rank",))
        above_zero(where, lora, ("alpha",))
        example = next(iter(names))
        check(
            bool(lora.layers),
            f"{where}.layers is empty; give patterns of linear layers, such as {example}",
        )
        for pattern in lora.layers:
            check(
                bool(matching_layers(replace(lora, layers=(pattern,)), names)),
                f"{where}.layers: {pattern!r} matches no linear layer (all layers of a tower have the same adapters: "
                f"write * for their number){did_you_mean(pattern, names)}",
            )
        for layer in matching_layers(lora, names):
            first = adapter_of.setdefault(layer, name)
            check(
                first == name, f"{where}.layers: {layer} has model.lora.{first} already; keep one"
            )
            limit = min(names[layer])
            check(
                lora.rank <= limit,
                f"{where}.rank={lora.rank}: {layer} has only {limit} channels; choose at most that",
            )


def _check_quantized(model: ModelConfig) -> None:
    adapted = frozen_by_adapters(model)
    for name, tower in {"llm": model.llm, **model.encoders}.items():
        if tower.quantize == "none":
            continue
        where = "model.llm" if name == "llm" else f"model.encoders.{name}"
        check(
            tower.frozen or name in adapted,
            f"{where}.quantize={tower.quantize}: quantised weights are not trained; set {where}.frozen=true, or give "
            "it adapters whose base is frozen (model.lora)",
        )
    sizes = linear_layers(model)
    for layer, how in quantized_layers(model).items():
        check(
            how != "nf4" or sizes[layer][0] % NF4_BLOCK == 0,
            f"quantize=nf4: {layer} has {sizes[layer][0]} inputs, and {NF4_BLOCK} share a scale; use quantize=int8",
        )


def _check_decoder(llm: DecoderConfig) -> None:
    where = "model.llm"
    _check_tower(where, llm)
    at_least(1, where, llm, ("kv_heads", "head_width"))
    divides(where, llm.heads, "heads", llm.kv_heads, "kv_heads")
    if llm.learned_positions:
        _check_learned_positions(where, llm)
    else:
        _check_rope(where, llm)
    _check_delta_net(llm)
    _check_experts(llm)
    at_least(
        0,
        where,
        llm,
        ("attention_scale", "attention_cap", "logit_cap", "window", "window_rope_theta"),
    )
    _check_windows(where, llm)
    check(
        llm.vocab >= 3,
        f"{where}.vocab={llm.vocab}: padding, end of answer and one character need at least 3",
    )


def _check_learned_positions(where: str, llm: DecoderConfig) -> None:
    at_least(0, where, llm, ("learned_positions", "first_position"))
    positions, first = llm.learned_positions, llm.first_position
    check(
        first < positions,
        f"{where}.first_position={first}: learned_positions={positions} has no such entry",
    )
    sections = llm.rope_sections
    check(
        not sections,
        f"{where}.rope_sections={listed(sections)}: learned positions take RoPE's place; leave the sections out",
    )


def _check_delta_net(llm: DecoderConfig) -> None:
    if (delta_net := llm.delta_net) is None:
        return
    where = "model.llm.delta_net"
    outside = [i for i in delta_net.layers if not 0 <= i < llm.layers]
    check(not outside, f"{where}.layers names layer {outside[:1]}, there are 0 to {llm.layers - 1}")
    check(
        bool(delta_net.layers),
        f"{where}.layers is empty; name the layers that have it, or use model.llm.delta_net=none",
    )
    at_least(1, where, delta_net, ("key_heads", "value_heads", "key_width", "value_width", "taps"))
    divides(where, delta_net.value_heads, "value_heads", delta_net.key_heads, "key_heads")


def _check_experts(llm: DecoderConfig) -> None:
    if (experts := llm.experts) is None:
        return
    where = "model.llm.experts"
    outside = [i for i in experts.layers if not 0 <= i < llm.layers]
    check(not outside, f"{where}.layers names layer {outside[:1]}, there are 0 to {llm.layers - 1}")
    check(
        bool(experts.layers),
        f"{where}.layers is empty; name the layers that have it, or use {where}=none",
    )
    at_least(1, where, experts, ("count", "per_token", "width"))
    at_least(0, where, experts, ("shared_width", "balance_loss", "z_loss"))
    check(
        experts.per_token <= experts.count,
        f"{where}.per_token={experts.per_token} is more than count={experts.count}; choose at most that",
    )
    biased = [name for name in llm.biases if name in ("gate", "up", "down")]
    check(
        not biased or not all(llm.expert_layers),
        f"model.llm.biases has {listed(biased)}, and all layers have experts, whose matrices have none; leave it out",
    )


def _check_rope(where: str, llm: DecoderConfig) -> None:
    above_zero(where, llm, ("rope_theta",))
    check(
        llm.head_width % 2 == 0,
        f"{where}.head_width={llm.head_width}: RoPE turns pairs; make it even",
    )
    turned = llm.rotary_width
    check(
        turned % 2 == 0 and 0 <= turned <= llm.head_width,
        f"{where}.rotary_width={turned}: RoPE turns pairs of channels; use an even number up to "
        f"head_width={llm.head_width}",
    )
    pairs = llm.rotary_pairs
    scaling = llm.rope_scaling
    sections = sum(llm.rope_sections)
    check(
        not sections or sections == pairs,
        f"{where}.rope_sections has {sections} channel pairs, RoPE turns {pairs}",
    )
    check(
        not sections or len(llm.rope_sections) == 3,
        f"{where}.rope_sections has {len(llm.rope_sections)} sections; there are three: t, y and x",
    )
    for name in ("factor", "positions"):
        value = getattr(scaling, name, 1)
        check(value > 0, f"{where}.rope_scaling.{name}={value}: must be more than 0")
    if isinstance(scaling, LongRope):
        for name in ("short", "long"):
            factors = len(getattr(scaling, name))
            message = f"{where}.rope_scaling.{name} has {factors} factors, a head has {pairs} channel pairs"
            check(factors == pairs, message)
    if isinstance(scaling, Llama3Rope):
        check(
            scaling.low < scaling.high,
            f"{where}.rope_scaling: low={scaling.low} must be below high={scaling.high}",
        )


def _check_windows(where: str, section: DecoderConfig | VisionConfig) -> None:
    _check_layers(where, "windowed", section)
    complete = bool(section.window) or not section.windowed
    check(complete, f"{where}.windowed names layers, but window=0; say how many they see")


def _check_layers(where: str, name: str, section: DecoderConfig | VisionConfig) -> None:
    layers = [i for i in getattr(section, name) if not 0 <= i < section.layers]
    check(
        not layers, f"{where}.{name} names layer {layers[:1]}, there are 0 to {section.layers - 1}"
    )


def _check_vision(where: str, encoder: VisionConfig) -> None:
    at_least(1, where, encoder, ("patch", "channels", "frames"))
    encoder.images.check(f"{where}.images")
    encoder.videos.check(f"{where}.videos")
    at_least(0, where, encoder, ("window", "registers"))
    check(
        encoder.class_token or not encoder.registers,
        f"{where}.registers={encoder.registers}: they stand beside a class token; use class_token=true",
    )
    check(
        encoder.norm_place == "before" or not encoder.layer_scale,
        f"{where}.layer_scale=true: what norm_place=after norms is scaled by the norms; use layer_scale=false",
    )
    _check_windows(where, encoder)
    check(
        not encoder.windowed or encoder.window % encoder.connector.merge == 0,
        f"{where}.window={encoder.window}: a window holds whole tokens; use a multiple of "
        f"connector.merge={encoder.connector.merge}",
    )
    _check_layers(where, "deepstack", encoder)
    layers = encoder.deepstack
    check(
        list(layers) == sorted(set(layers)),
        f"{where}.deepstack={listed(layers)}: name layers in order, each once",
    )
    for name in ("mean", "std"):
        length = len(getattr(encoder, name))
        check(
            length in (1, encoder.channels),
            f"{where}.{name} has {length} numbers; give one for each of channels={encoder.channels}, or one for all",
        )
    check(all(x > 0 for x in encoder.std), f"{where}.std={encoder.std}: must be more than 0")
    positions = encoder.positions
    if isinstance(positions, LearnedGrid):
        at_least(1, f"{where}.positions", positions, ("rows", "columns"))
        check(
            positions.interpolation == "none" or positions.rows == positions.columns,
            f"{where}.positions: {positions.rows} x {positions.columns} are no square, which alone is interpolated",
        )
        return
    if isinstance(positions, StretchedGrid | FractionalGrid):
        at_least(1, f"{where}.positions", positions, ("side",))
    if isinstance(positions, FractionalGrid):
        return
    above_zero(f"{where}.positions", positions, ("theta",))
    head_width = encoder.width // encoder.heads
    unit = 2 if isinstance(positions, AlternatingGrid) else 4
    check(
        head_width % unit == 0,
        f"{where}: width={encoder.width} over heads={encoder.heads} is {head_width} per head; 2D RoPE turns "
        f"pairs along two axes, so make width a multiple of {unit * encoder.heads}",
    )


def _check_audio(where: str, encoder: AudioConfig) -> None:
    how = encoder.clips
    positions = encoder.positions
    at_least(1, where, encoder, ("pool", "attended_chunks"))
    at_least(0, where, encoder, ("chunk", "stem_width"))
    if not encoder.chunk:
        check(
            encoder.attended_chunks == 1,
            f"{where}.attended_chunks={encoder.attended_chunks}: set chunk, or leave it out",
        )
        check(
            not encoder.stem_width,
            f"{where}.stem_width={encoder.stem_width}: positions are those of chunks; set chunk",
        )
        check(
            not how.mirrored,
            f"{where}.clips.end=mirror: convolutions over whole clips read silence; set chunk",
        )
    if encoder.stem_width:
        check(
            isinstance(positions, Sinusoids),
            f"{where}.positions: with stem_width they are sinusoids",
        )
    how.check(f"{where}.clips")
    check(
        encoder.width % 2 == 0,
        f"{where}.width={encoder.width}: sinusoidal positions come in pairs; make it even",
    )
    if isinstance(positions, StoredTable):
        at_least(1, f"{where}.positions", positions, ("positions",))
        longest = encoder.stride * positions.positions
        check(
            how.fixed_frames <= longest,
            f"{where}.clips: a window of {how.fixed_frames} frames is longer than the {longest} of which "
            f"positions.positions={positions.positions} has any; make seconds smaller",
        )


def _check_tower(where: str, section: DecoderConfig | VisionConfig | AudioConfig) -> None:
    """Check the settings that the LLM and all encoders have."""
    at_least(1, where, section, ("layers", "width", "heads", "mlp_width"))
    at_most(MAX_LAYERS, where, section, ("layers",))
    above_zero(where, section, ("norm_eps",))
    rate = section.dropout
    check(
        0 <= rate < 1,
        f"{where}.dropout={rate}: choose at least 0 (nothing is dropped) and less than 1",
    )
    if isinstance(section.remat, tuple):
        policies = len(section.remat)
        check(
            policies == section.layers,
            f"{where}.remat gives {policies} policies for layers={section.layers}; give one for each, or one for all",
        )
