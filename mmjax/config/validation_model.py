"""Validate the model of a config."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    AnyRes,
    AsIs,
    AudioConfig,
    DecoderConfig,
    LearnedGrid,
    Llama3Rope,
    LongRope,
    ModelConfig,
    StoredTable,
    StretchedGrid,
    VisionConfig,
    WhisperMel,
)
from mmjax.config.codec import did_you_mean
from mmjax.config.lora_targets import linear_layers, matching_layers
from mmjax.config.validation_rules import (
    above_zero,
    at_least,
    at_most,
    check,
    check_audio,
    check_images,
    divides,
    listed,
)

MAX_LAYERS = 10_000  # the remat policy of each layer is planned by itself
MAX_MERGE = 1024  # neighbours per axis; an image's token merges their square


def check_model(model: ModelConfig) -> None:
    """Raises UserError for an LLM, encoders, connectors or adapters that cannot be built or work together."""
    _check_decoder(model.llm)
    for name, encoder in model.encoders.items():
        where = f"model.encoders.{name}"
        check(name != "llm", f"{where}: 'llm' is the decoder's name; call this encoder something else")
        check(name.isidentifier(), f"{where}: an encoder's name must be a plain word: letters, digits and '_'")
        _check_tower(where, encoder)
        divides(where, encoder.width, "width", encoder.heads, "heads")
        at_least(1, f"{where}.connector", encoder.connector, ("merge",))
        at_most(MAX_MERGE, f"{where}.connector", encoder.connector, ("merge",))
        at_least(0, f"{where}.connector", encoder.connector, ("mlp_width", "position_grid"))
        _check_callbacks(where, encoder)
        if isinstance(encoder, VisionConfig):
            _check_vision(where, encoder)
        else:
            _check_audio(where, encoder)
    parts = [model.llm, *model.encoders.values(), *(e.connector for e in model.encoders.values())]
    check(
        bool(model.lora) or not all(p.frozen for p in parts),
        "model: every module is frozen; set frozen=false on one, such as model.llm",
    )
    _check_lora(model)


def _check_callbacks(where: str, encoder: VisionConfig | AudioConfig) -> None:
    callbacks = encoder.callbacks
    where_calls = f"{where}.callbacks"
    if isinstance(encoder, AudioConfig):
        for name in ("before_encoder", "before_llm"):
            key = f"{where_calls}.{name}={getattr(callbacks, name)}"
            unset = not getattr(callbacks, name)
            check(unset, f"{key}: it is called for images, and this encoder takes clips; leave it out")
        return
    images = f"{where}.images={encoder.images.kind}"
    check(
        not callbacks.before_encoder or isinstance(encoder.images, AsIs),
        f"{where_calls}.before_encoder prepares images, and so does {images}; leave one of them out",
    )
    check(
        not callbacks.before_llm or not isinstance(encoder.images, AnyRes) or encoder.images.order == "tiles",
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
        check(bool(lora.layers), f"{where}.layers is empty; give patterns of linear layers, such as {example}")
        for pattern in lora.layers:
            check(
                bool(matching_layers(replace(lora, layers=(pattern,)), names)),
                f"{where}.layers: {pattern!r} matches no linear layer (all layers of a tower have the same adapters: "
                f"write * for their number){did_you_mean(pattern, names)}",
            )
        for layer in matching_layers(lora, names):
            first = adapter_of.setdefault(layer, name)
            check(first == name, f"{where}.layers: {layer} has model.lora.{first} already; keep one")
            limit = min(names[layer])
            check(
                lora.rank <= limit, f"{where}.rank={lora.rank}: {layer} has but {limit} channels; choose at most that"
            )


def _check_decoder(llm: DecoderConfig) -> None:
    where = "model.llm"
    _check_tower(where, llm)
    at_least(1, where, llm, ("kv_heads", "head_width"))
    above_zero(where, llm, ("rope_theta",))
    divides(where, llm.heads, "heads", llm.kv_heads, "kv_heads")
    check(llm.head_width % 2 == 0, f"{where}.head_width={llm.head_width}: RoPE turns pairs; make it even")
    _check_rope(where, llm)
    at_least(0, where, llm, ("attention_scale", "attention_cap", "logit_cap", "window"))
    _check_windows(where, llm)
    check(llm.vocab >= 3, f"{where}.vocab={llm.vocab}: padding, end of answer and one character need at least 3")


def _check_rope(where: str, llm: DecoderConfig) -> None:
    pairs = llm.head_width // 2
    scaling = llm.rope_scaling
    sections = sum(llm.rope_sections)
    check(
        not sections or sections == pairs,
        f"{where}.rope_sections has {sections} channel pairs, a head of head_width={llm.head_width} has {pairs}",
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
        check(scaling.low < scaling.high, f"{where}.rope_scaling: low={scaling.low} must be below high={scaling.high}")


def _check_windows(where: str, section: DecoderConfig | VisionConfig) -> None:
    _check_layers(where, "windowed", section)
    complete = bool(section.window) or not section.windowed
    check(complete, f"{where}.windowed names layers, but window=0; say how many they see")


def _check_layers(where: str, name: str, section: DecoderConfig | VisionConfig) -> None:
    layers = [i for i in getattr(section, name) if not 0 <= i < section.layers]
    check(not layers, f"{where}.{name} names layer {layers[:1]}, there are 0 to {section.layers - 1}")


def _check_vision(where: str, encoder: VisionConfig) -> None:
    at_least(1, where, encoder, ("patch", "channels", "frames"))
    check_images(f"{where}.images", encoder.images)
    at_least(0, where, encoder, ("window",))
    _check_windows(where, encoder)
    _check_layers(where, "deepstack", encoder)
    layers = encoder.deepstack
    check(list(layers) == sorted(set(layers)), f"{where}.deepstack={listed(layers)}: name layers in order, each once")
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
        return
    if isinstance(positions, StretchedGrid):
        at_least(1, f"{where}.positions", positions, ("side",))
    above_zero(f"{where}.positions", positions, ("theta",))
    head_width = encoder.width // encoder.heads
    check(
        head_width % 4 == 0,
        f"{where}: width={encoder.width} over heads={encoder.heads} is {head_width} per head; 2D RoPE turns "
        f"pairs along two axes, so make width a multiple of {4 * encoder.heads}",
    )


def _check_audio(where: str, encoder: AudioConfig) -> None:
    how = encoder.clips
    positions = encoder.positions
    at_least(1, where, encoder, ("pool",))
    check_audio(f"{where}.clips", how)
    if isinstance(positions, StoredTable):
        at_least(1, f"{where}.positions", positions, ("positions",))
    check(encoder.width % 2 == 0, f"{where}.width={encoder.width}: sinusoidal positions come in pairs; make it even")
    if isinstance(how, WhisperMel) and how.attended == "window" and isinstance(positions, StoredTable):
        frames = how.seconds * how.sample_rate // how.hop
        # The second convolution has stride 2: two frames for each position.
        check(
            frames <= 2 * positions.positions,
            f"{where}.clips: a window of {frames} frames is longer than the {2 * positions.positions} of which "
            f"positions.positions={positions.positions} has any; make seconds smaller",
        )


def _check_tower(where: str, section: DecoderConfig | VisionConfig | AudioConfig) -> None:
    """Check the settings that the LLM and all encoders have."""
    at_least(1, where, section, ("layers", "width", "heads", "mlp_width"))
    at_most(MAX_LAYERS, where, section, ("layers",))
    above_zero(where, section, ("norm_eps",))
    rate = section.dropout
    check(0 <= rate < 1, f"{where}.dropout={rate}: choose at least 0 (nothing is dropped) and less than 1")
    if isinstance(section.remat, tuple):
        policies = len(section.remat)
        check(
            policies == section.layers,
            f"{where}.remat gives {policies} policies for layers={section.layers}; give one for each, or one for all",
        )
