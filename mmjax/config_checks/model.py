"""What must hold in a config's model."""

from __future__ import annotations

from dataclasses import replace

from mmjax.adapters import linear_layers, matching
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
from mmjax.config_checks.media import check_audio, check_images
from mmjax.config_checks.rules import (
    above_zero,
    at_least,
    at_most,
    check,
    divides,
    listed,
)
from mmjax.config_values import did_you_mean

MOST_LAYERS = 10_000  # each is planned by itself
MOST_MERGED = 1024  # a side: its square is a length


def check_model(model: ModelConfig) -> None:
    _check_decoder(model.llm)
    for name, encoder in model.encoders.items():
        where = f"model.encoders.{name}"
        check(name != "llm", f"{where}: 'llm' is the decoder's name; call this encoder something else")
        check(name.isidentifier(), f"{where}: an encoder's name must be a plain word: letters, digits and '_'")
        at_least(1, where, encoder, ("layers", "width", "heads", "mlp_width"))
        at_most(MOST_LAYERS, where, encoder, ("layers",))
        above_zero(where, encoder, ("norm_eps",))
        divides(where, encoder.width, "width", encoder.heads, "heads")
        _check_remat(where, encoder)
        _check_dropout(where, encoder)
        at_least(1, f"{where}.connector", encoder.connector, ("merge",))
        at_most(MOST_MERGED, f"{where}.connector", encoder.connector, ("merge",))
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
    calls, own = encoder.callbacks, f"{where}.callbacks"
    if isinstance(encoder, AudioConfig):
        for name in ("before_encoder", "before_llm"):
            given = getattr(calls, name)
            check(
                not given, f"{own}.{name}={given}: it is called for images, and this encoder takes clips; leave it out"
            )
        return
    prepared = f"{where}.images={encoder.images.kind}"
    check(
        not calls.before_encoder or isinstance(encoder.images, AsIs),
        f"{own}.before_encoder prepares images, and so does {prepared}; leave one of them out",
    )
    check(
        not calls.before_llm or not isinstance(encoder.images, AnyRes) or encoder.images.order == "tiles",
        f"{own}.before_llm says in what order tokens stand, and so does {prepared}; choose order=tiles",
    )


def _check_lora(model: ModelConfig) -> None:
    names, owner = linear_layers(model), dict[str, str]()
    for name, lora in model.lora.items():
        where = f"model.lora.{name}"
        at_least(1, where, lora, ("rank",))
        above_zero(where, lora, ("alpha",))
        check(
            bool(lora.layers), f"{where}.layers is empty; give patterns of linear layers, such as {next(iter(names))}"
        )
        for pattern in lora.layers:
            found = matching(replace(lora, layers=(pattern,)), names)
            check(
                bool(found),
                f"{where}.layers: {pattern!r} matches no linear layer (all layers of a tower have the same adapters: "
                f"write * for their number){did_you_mean(pattern, names)}",
            )
        for layer in matching(lora, names):
            check(layer not in owner, f"{where}.layers: {layer} has model.lora.{owner.get(layer)} already; keep one")
            owner[layer] = name
            least = min(names[layer])
            check(
                lora.rank <= least, f"{where}.rank={lora.rank}: {layer} has but {least} channels; choose at most that"
            )


def _check_decoder(llm: DecoderConfig) -> None:
    where = "model.llm"
    at_least(1, where, llm, ("layers", "width", "heads", "kv_heads", "head_width", "mlp_width"))
    at_most(MOST_LAYERS, where, llm, ("layers",))
    above_zero(where, llm, ("rope_theta", "norm_eps"))
    divides(where, llm.heads, "heads", llm.kv_heads, "kv_heads")
    check(llm.head_width % 2 == 0, f"{where}.head_width={llm.head_width}: RoPE turns pairs; make it even")
    _check_rope(where, llm)
    at_least(0, where, llm, ("attention_scale", "attention_cap", "logit_cap", "window"))
    _check_windows(where, llm)
    check(llm.vocab >= 3, f"{where}.vocab={llm.vocab}: padding, end of answer and one character need at least 3")
    _check_remat(where, llm)
    _check_dropout(where, llm)


def _check_rope(where: str, llm: DecoderConfig) -> None:
    pairs, scaling = llm.head_width // 2, llm.rope_scaling
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
            given = len(getattr(scaling, name))
            check(given == pairs, f"{where}.rope_scaling.{name} has {given} factors, a head has {pairs} channel pairs")
    if isinstance(scaling, Llama3Rope):
        check(scaling.low < scaling.high, f"{where}.rope_scaling: low={scaling.low} must be below high={scaling.high}")


def _check_windows(where: str, section: DecoderConfig | VisionConfig) -> None:
    _check_layers(where, "windowed", section)
    stated = bool(section.window) or not section.windowed
    check(stated, f"{where}.windowed names layers, but window=0; say how many they see")


def _check_layers(where: str, name: str, section: DecoderConfig | VisionConfig) -> None:
    layers = [i for i in getattr(section, name) if not 0 <= i < section.layers]
    check(not layers, f"{where}.{name} names layer {layers[:1]}, there are 0 to {section.layers - 1}")


def _check_vision(where: str, encoder: VisionConfig) -> None:
    at_least(1, where, encoder, ("patch", "channels", "frames"))
    check_images(f"{where}.images", encoder.images)
    at_least(0, where, encoder, ("window",))
    _check_windows(where, encoder)
    _check_layers(where, "deepstack", encoder)
    deep = encoder.deepstack
    check(list(deep) == sorted(set(deep)), f"{where}.deepstack={listed(deep)}: name layers in order, each once")
    head_width, positions = encoder.width // encoder.heads, encoder.positions
    for name in ("mean", "std"):
        given = len(getattr(encoder, name))
        check(
            given in (1, encoder.channels),
            f"{where}.{name} has {given} numbers; give one for each of channels={encoder.channels}, or one for all",
        )
    check(all(x > 0 for x in encoder.std), f"{where}.std={encoder.std}: must be more than 0")
    if isinstance(positions, LearnedGrid):
        at_least(1, f"{where}.positions", positions, ("rows", "columns"))
        return
    if isinstance(positions, StretchedGrid):
        at_least(1, f"{where}.positions", positions, ("side",))
    above_zero(f"{where}.positions", positions, ("theta",))
    check(
        head_width % 4 == 0,
        f"{where}: width={encoder.width} over heads={encoder.heads} is {head_width} per head; 2D RoPE turns "
        f"pairs along two axes, so make width a multiple of {4 * encoder.heads}",
    )


def _check_audio(where: str, encoder: AudioConfig) -> None:
    how, positions = encoder.clips, encoder.positions
    at_least(1, where, encoder, ("pool",))
    check_audio(f"{where}.clips", how)
    if isinstance(positions, StoredTable):
        at_least(1, f"{where}.positions", positions, ("positions",))
    check(encoder.width % 2 == 0, f"{where}.width={encoder.width}: sinusoidal positions come in pairs; make it even")
    if isinstance(how, WhisperMel) and how.attended == "window" and isinstance(positions, StoredTable):
        frames = how.seconds * how.sample_rate // how.hop
        check(
            frames <= 2 * positions.positions,
            f"{where}.clips: a window of {frames} frames is longer than the {2 * positions.positions} of which "
            f"positions.positions={positions.positions} has any; make seconds smaller",
        )


def _check_remat(where: str, section: DecoderConfig | VisionConfig | AudioConfig) -> None:
    if isinstance(section.remat, tuple):
        given, layers = len(section.remat), section.layers
        check(
            given == layers,
            f"{where}.remat gives {given} policies for layers={layers}; give one for each, or one for all",
        )


def _check_dropout(where: str, section: DecoderConfig | VisionConfig | AudioConfig) -> None:
    rate = section.dropout
    check(0 <= rate < 1, f"{where}.dropout={rate}: choose at least 0 (nothing is dropped) and less than 1")
