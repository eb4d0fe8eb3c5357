"""What must hold between a config's values, each with its remedy. `parallel.mesh` checks the devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mmjax.adapters import adapted_modules, linear_layers, matching
from mmjax.config import (
    AdamW,
    AnyRes,
    AsIs,
    AudioConfig,
    AudioPreparation,
    BatchConfig,
    Config,
    DataConfig,
    DecoderConfig,
    DynamicTiles,
    EmbeddedSource,
    FileSource,
    FixedSize,
    ImagePreparation,
    LearnedGrid,
    Llama3Rope,
    LogMel,
    LongRope,
    MediaLimits,
    ModelConfig,
    ParquetSource,
    SmartResize,
    StoredTable,
    StretchedGrid,
    VisionConfig,
    WhisperMel,
)
from mmjax.config_values import did_you_mean
from mmjax.errors import UserError

EMBEDDED_RATE = 4000  # Hz, of the embedded dataset's clips
EMBEDDED_NEEDS = {"image": ("vision",), "audio": ("audio",), "mixed": ("vision", "audio"), "text": ()}


def validate(config: Config) -> None:
    """Raises UserError, naming the key and the remedy, for the first value that cannot work with the others."""
    _check(bool(re.fullmatch(r"[\w.\-]+", config.name)), f"name={config.name!r}: use letters, digits, '_', '-' and '.'")
    _check(0 <= config.seed < 2**31, f"seed={config.seed}: choose 0 to {2**31 - 1}")
    _check_model(config.model)
    _check_data(config.data)
    for name, source in config.data.sources.items():
        if isinstance(source, EmbeddedSource):
            _check_embedded(f"data.sources.{name}", source, config)
    _check_batch(config.batch, config.model)
    _at_least(0, "mesh", config.mesh, ("memory", "host_memory"))
    _check_training(config)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def _at_least(minimum: float, where: str, section: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value >= minimum, f"{where}.{name}={value}: must be at least {minimum}")


def _above_zero(where: str, section: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value > 0, f"{where}.{name}={value}: must be more than 0")


def _known(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        _check(name in known, f"{where}.{name}: there is no module {name!r}{did_you_mean(name, known)}")


# ------------------------------------------------------------------------------------------------------------ model


def _check_model(model: ModelConfig) -> None:
    _check_decoder(model.llm)
    for name, encoder in model.encoders.items():
        where = f"model.encoders.{name}"
        _check(name != "llm", f"{where}: 'llm' is the decoder's name; call this encoder something else")
        _check(name.isidentifier(), f"{where}: an encoder's name must be a plain word: letters, digits and '_'")
        _at_least(1, where, encoder, ("layers", "width", "heads", "mlp_width"))
        _above_zero(where, encoder, ("norm_eps",))
        _divides(where, encoder.width, "width", encoder.heads, "heads")
        _check_remat(where, encoder)
        _check_dropout(where, encoder)
        _at_least(1, f"{where}.connector", encoder.connector, ("merge",))
        _at_least(0, f"{where}.connector", encoder.connector, ("mlp_width", "position_grid"))
        _check_callbacks(where, encoder)
        if isinstance(encoder, VisionConfig):
            _check_vision(where, encoder)
        else:
            _check_audio(where, encoder)
    parts = [model.llm, *model.encoders.values(), *(e.connector for e in model.encoders.values())]
    _check(
        bool(model.lora) or not all(p.frozen for p in parts),
        "model: every module is frozen; set frozen=false on one, such as model.llm",
    )
    _check_lora(model)


def _check_callbacks(where: str, encoder: VisionConfig | AudioConfig) -> None:
    calls, own = encoder.callbacks, f"{where}.callbacks"
    if isinstance(encoder, AudioConfig):
        for name in ("before_encoder", "before_llm"):
            given = getattr(calls, name)
            _check(
                not given, f"{own}.{name}={given}: it is called for images, and this encoder takes clips; leave it out"
            )
        return
    prepared = f"{where}.images={encoder.images.kind}"
    _check(
        not calls.before_encoder or isinstance(encoder.images, AsIs),
        f"{own}.before_encoder prepares images, and so does {prepared}; leave one of them out",
    )
    _check(
        not calls.before_llm or not isinstance(encoder.images, AnyRes) or encoder.images.order == "tiles",
        f"{own}.before_llm says in what order tokens stand, and so does {prepared}; choose order=tiles",
    )


def _check_lora(model: ModelConfig) -> None:
    names, owner = linear_layers(model), dict[str, str]()
    for name, lora in model.lora.items():
        where = f"model.lora.{name}"
        _at_least(1, where, lora, ("rank",))
        _above_zero(where, lora, ("alpha",))
        _check(
            bool(lora.layers), f"{where}.layers is empty; give patterns of linear layers, such as {next(iter(names))}"
        )
        for pattern in lora.layers:
            found = matching(replace(lora, layers=(pattern,)), names)
            _check(
                bool(found),
                f"{where}.layers: {pattern!r} matches no linear layer (all layers of a tower have the same adapters: "
                f"write * for their number){did_you_mean(pattern, names)}",
            )
        for layer in matching(lora, names):
            _check(layer not in owner, f"{where}.layers: {layer} has model.lora.{owner.get(layer)} already; keep one")
            owner[layer] = name
            least = min(names[layer])
            _check(
                lora.rank <= least, f"{where}.rank={lora.rank}: {layer} has but {least} channels; choose at most that"
            )


def _check_decoder(llm: DecoderConfig) -> None:
    where = "model.llm"
    _at_least(1, where, llm, ("layers", "width", "heads", "kv_heads", "head_width", "mlp_width"))
    _above_zero(where, llm, ("rope_theta", "norm_eps"))
    _divides(where, llm.heads, "heads", llm.kv_heads, "kv_heads")
    _check(llm.head_width % 2 == 0, f"{where}.head_width={llm.head_width}: RoPE turns pairs; make it even")
    _check_rope(where, llm)
    _at_least(0, where, llm, ("attention_scale", "attention_cap", "logit_cap", "window"))
    _check_windows(where, llm)
    _check(llm.vocab >= 3, f"{where}.vocab={llm.vocab}: padding, end of answer and one character need at least 3")
    _check_remat(where, llm)
    _check_dropout(where, llm)


def _check_rope(where: str, llm: DecoderConfig) -> None:
    pairs, scaling = llm.head_width // 2, llm.rope_scaling
    sections = sum(llm.rope_sections)
    _check(
        not sections or sections == pairs,
        f"{where}.rope_sections has {sections} channel pairs, a head of head_width={llm.head_width} has {pairs}",
    )
    _check(
        not sections or len(llm.rope_sections) == 3,
        f"{where}.rope_sections has {len(llm.rope_sections)} sections; there are three: t, y and x",
    )
    for name in ("factor", "positions"):
        value = getattr(scaling, name, 1)
        _check(value > 0, f"{where}.rope_scaling.{name}={value}: must be more than 0")
    if isinstance(scaling, LongRope):
        for name in ("short", "long"):
            given = len(getattr(scaling, name))
            _check(given == pairs, f"{where}.rope_scaling.{name} has {given} factors, a head has {pairs} channel pairs")
    if isinstance(scaling, Llama3Rope):
        _check(scaling.low < scaling.high, f"{where}.rope_scaling: low={scaling.low} must be below high={scaling.high}")


def _check_windows(where: str, section: DecoderConfig | VisionConfig) -> None:
    _check_layers(where, "windowed", section)
    stated = bool(section.window) or not section.windowed
    _check(stated, f"{where}.windowed names layers, but window=0; say how many they see")


def _check_layers(where: str, name: str, section: DecoderConfig | VisionConfig) -> None:
    layers = [i for i in getattr(section, name) if not 0 <= i < section.layers]
    _check(not layers, f"{where}.{name} names layer {layers[:1]}, there are 0 to {section.layers - 1}")


def _check_vision(where: str, encoder: VisionConfig) -> None:
    _at_least(1, where, encoder, ("patch", "channels", "frames"))
    check_images(f"{where}.images", encoder.images)
    _at_least(0, where, encoder, ("window",))
    _check_windows(where, encoder)
    _check_layers(where, "deepstack", encoder)
    deep = encoder.deepstack
    _check(list(deep) == sorted(set(deep)), f"{where}.deepstack={_listed(deep)}: name layers in order, each once")
    head_width, positions = encoder.width // encoder.heads, encoder.positions
    for name in ("mean", "std"):
        given = len(getattr(encoder, name))
        _check(
            given in (1, encoder.channels),
            f"{where}.{name} has {given} numbers; give one for each of channels={encoder.channels}, or one for all",
        )
    _check(all(x > 0 for x in encoder.std), f"{where}.std={encoder.std}: must be more than 0")
    if isinstance(positions, LearnedGrid):
        _at_least(1, f"{where}.positions", positions, ("rows", "columns"))
        return
    if isinstance(positions, StretchedGrid):
        _at_least(1, f"{where}.positions", positions, ("side",))
    _above_zero(f"{where}.positions", positions, ("theta",))
    _check(
        head_width % 4 == 0,
        f"{where}: width={encoder.width} over heads={encoder.heads} is {head_width} per head; 2D RoPE turns "
        f"pairs along two axes, so make width a multiple of {4 * encoder.heads}",
    )


def _check_audio(where: str, encoder: AudioConfig) -> None:
    how, positions = encoder.clips, encoder.positions
    _at_least(1, where, encoder, ("pool",))
    check_audio(f"{where}.clips", how)
    if isinstance(positions, StoredTable):
        _at_least(1, f"{where}.positions", positions, ("positions",))
    _check(encoder.width % 2 == 0, f"{where}.width={encoder.width}: sinusoidal positions come in pairs; make it even")
    if isinstance(how, WhisperMel) and how.attended == "window" and isinstance(positions, StoredTable):
        frames = how.seconds * how.sample_rate // how.hop
        _check(
            frames <= 2 * positions.positions,
            f"{where}.clips: a window of {frames} frames is longer than the {2 * positions.positions} of which "
            f"positions.positions={positions.positions} has any; make seconds smaller",
        )


def _check_remat(where: str, section: DecoderConfig | VisionConfig | AudioConfig) -> None:
    if isinstance(section.remat, tuple):
        given, layers = len(section.remat), section.layers
        _check(
            given == layers,
            f"{where}.remat gives {given} policies for layers={layers}; give one for each, or one for all",
        )


def _check_dropout(where: str, section: DecoderConfig | VisionConfig | AudioConfig) -> None:
    rate = section.dropout
    _check(0 <= rate < 1, f"{where}.dropout={rate}: choose at least 0 (nothing is dropped) and less than 1")


def _divides(where: str, whole: int, whole_name: str, part: int, part_name: str) -> None:
    divisors = ", ".join(str(d) for d in range(1, whole + 1) if whole % d == 0)
    _check(
        whole % part == 0,
        f"{where}: {whole_name}={whole} does not divide by {part_name}={part}; choose {part_name} from {divisors}",
    )


# ------------------------------------------------------------------------------------------------------------- data


def _check_data(data: DataConfig) -> None:
    for name, source in data.sources.items():
        _at_least(0, f"data.sources.{name}", source, ("weight",))
        if isinstance(source, FileSource):
            _check_files(f"data.sources.{name}", source)
    weights = {f"data.sources.{name}.weight": source.weight for name, source in data.sources.items()}
    _check(
        not weights or sum(weights.values()) > 0,
        f"{', '.join(weights)} sum to zero: nothing could be drawn; give one a weight above 0",
    )
    twice = sorted({c for c in data.alphabet if data.alphabet.count(c) > 1})
    _check(not twice, f"data.alphabet holds {', '.join(map(repr, twice))} more than once; each character is one token")
    _at_least(0, "data", data, ("workers",))
    _at_least(1, "data", data, ("prefetch",))
    share = data.max_bad_share
    _check(0 <= share <= 1, f"data.max_bad_share={share}: it is a part of the samples; choose 0 to 1")


def _check_files(where: str, source: FileSource) -> None:
    _check(bool(source.path), f"{where}.path is empty; name a file, a folder or a URL")
    if isinstance(source, ParquetSource):
        paired = bool(source.question) and bool(source.answer)
        _check(
            paired != bool(source.messages) and bool(source.question) == bool(source.answer),
            f"{where}: name the columns that hold the text, either {where}.messages=messages or both "
            f"{where}.question=question and {where}.answer=answer",
        )


def _check_embedded(where: str, source: EmbeddedSource, config: Config) -> None:
    _at_least(1, where, source, ("samples", "questions"))
    _check(bool(source.modalities), f"{where}.modalities is empty; name some of {', '.join(EMBEDDED_NEEDS)}")
    _check(len(set(source.modalities)) == len(source.modalities), f"{where}.modalities names one twice; name each once")
    _check(bool(config.data.alphabet), "data.alphabet is empty; set it to ALPHABET of mmjax.data.embedded")
    for modality in source.modalities:
        for encoder, cls in (("vision", VisionConfig), ("audio", AudioConfig)):
            if encoder in EMBEDDED_NEEDS[modality]:
                _check(
                    isinstance(config.model.encoders.get(encoder), cls),
                    f"{where}.modalities has {modality!r}, which needs model.encoders.{encoder} of kind {encoder!r}; "
                    f"add it, or leave {modality!r} out",
                )
    for name, encoder in config.model.encoders.items():
        if isinstance(encoder, VisionConfig) and name == "vision":
            given = f"model.encoders.vision.channels={encoder.channels}"
            _check(encoder.channels == 1, f"{given}: the images of {where} are grey; set it to 1")
        if isinstance(encoder, AudioConfig) and name == "audio":
            rate = encoder.sample_rate
            given = f"model.encoders.audio.clips.sample_rate={rate}"
            _check(rate == EMBEDDED_RATE, f"{given}: the clips of {where} have {EMBEDDED_RATE} Hz; set that")


def check_images(where: str, how: ImagePreparation) -> None:
    """Raises UserError, naming the key under `where`, for images that could not be prepared so."""
    if isinstance(how, FixedSize):
        _check_color(f"{where}.square", how.square)
        given = f"{where}.resize={_listed(how.resize)}"
        _check(len(how.resize) <= 2, f"{given}: give the shortest edge, or height and width, or nothing")
        _check(min(how.resize, default=1) > 0, f"{given}: must be more than 0")
        _check(
            not how.crop or _is_size(how.crop), f"{where}.crop={_listed(how.crop)}: give height and width, or nothing"
        )
    elif isinstance(how, SmartResize):
        _at_least(1, where, how, ("patch", "merge", "min_pixels"))
        _check(
            how.min_pixels <= how.max_pixels,
            f"{where}.max_pixels={how.max_pixels}: must be at least min_pixels={how.min_pixels}",
        )
    elif isinstance(how, DynamicTiles):
        _check(_is_size(how.tile), f"{where}.tile={_listed(how.tile)}: give height and width")
        _at_least(1, where, how, ("min_tiles",))
        _check(
            how.min_tiles <= how.max_tiles,
            f"{where}.max_tiles={how.max_tiles}: must be at least min_tiles={how.min_tiles}",
        )
    elif isinstance(how, AnyRes):
        _at_least(1, where, how, ("tile",))
        _at_least(0, where, how, ("most_tiles",))
        rows = how.order == "rows" or not how.most_tiles
        _check(rows, f"{where}.most_tiles={how.most_tiles}: it is rows that are interpolated; choose order=rows")
        _check_color(f"{where}.background", how.background)
        _check(bool(how.pinpoints), f"{where}.pinpoints is empty; name some, such as {2 * how.tile}x{how.tile}")
        for pinpoint in how.pinpoints:
            sides = [int(side) for side in pinpoint.split("x") if re.fullmatch("[0-9]+", side)]
            fits = _is_size(sides) and not any(side % how.tile for side in sides) and pinpoint.count("x") == 1
            _check(fits, f"{where}.pinpoints: {pinpoint!r} is no HEIGHTxWIDTH in multiples of tile={how.tile}")


def check_audio(where: str, how: AudioPreparation) -> None:
    """Raises UserError, naming the key under `where`, for clips that could not be prepared so."""
    _at_least(1, where, how, ("mels", "sample_rate", "hop"))
    if isinstance(how, LogMel):
        _check_log_mel(where, how)
        return
    _at_least(1, where, how, ("seconds",))
    _check(how.window >= 2 and how.window % 2 == 0, f"{where}.window={how.window}: must be even, and at least 2")


def _check_log_mel(where: str, how: LogMel) -> None:
    _at_least(2, where, how, ("window",))
    _check(
        how.hop <= how.window,
        f"{where}.hop={how.hop} is longer than window={how.window}: samples would be skipped; make hop smaller",
    )
    bins = how.window // 2 + 1
    _check(
        how.mels <= bins,
        f"{where}.mels={how.mels}: window={how.window} has only {bins} frequencies; make mels at most that",
    )


def check_limits(where: str, limits: MediaLimits) -> None:
    """Raises UserError, naming the key under `where`, for limits that nothing could keep."""
    _at_least(1, where, limits, ("pixels", "min_side", "aspect"))
    _above_zero(where, limits, ("seconds",))
    _check(
        limits.min_side <= limits.max_side,
        f"{where}.max_side={limits.max_side}: must be at least min_side={limits.min_side}",
    )


def _check_color(where: str, color: Sequence[int]) -> None:
    holds = len(color) in (0, 3) and all(0 <= part <= 255 for part in color)
    _check(holds, f"{where}={_listed(color)}: give red, green and blue, each 0 to 255")


def _is_size(sides: Sequence[int]) -> bool:
    return len(sides) == 2 and min(sides) > 0


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) or "()"


# ------------------------------------------------------------------------------------------------ batch and training


def _check_batch(batch: BatchConfig, model: ModelConfig) -> None:
    _at_least(1, "batch.size", batch.size, ("count",))
    _at_least(1, "batch", batch, ("microbatches", "alignment", "shapes"))
    _at_least(1, "batch.grouping", batch.grouping, ("chunk_steps",))
    for name in ("pool_steps", "iterations"):
        if hasattr(batch.grouping, name):
            _at_least(1, "batch.grouping", batch.grouping, (name,))
    modules = ["llm", *model.encoders]
    _known("batch.rows", batch.rows, modules)
    for name in modules:
        _check(name in batch.rows, f"batch.rows has no {name!r}; say how many packed rows it gets: batch.rows.{name}=2")
        _check(batch.rows[name] >= 1, f"batch.rows.{name}={batch.rows[name]}: must be at least 1")


def _check_training(config: Config) -> None:
    training, schedule, optimizer, model = config.training, config.schedule, config.optimizer, config.model
    tokens = len(config.data.alphabet) + 2
    _check(
        model.llm.vocab >= tokens,
        f"model.llm.vocab={model.llm.vocab}: data.alphabet needs {tokens} (its characters, padding and end of answer); "
        f"set model.llm.vocab={tokens} or more",
    )
    _at_least(1, "training", training, ("steps", "evaluate_samples", "keep"))
    _at_least(0, "training", training, ("loss_chunks", "evaluate_every", "checkpoint_every"))
    _above_zero("training", training, ("clip",))
    _at_least(0, "schedule", schedule, ("warmup", "final"))
    _check(schedule.final <= 1, f"schedule.final={schedule.final}: it is a part of the peak; choose 0 to 1")
    _check(
        schedule.warmup < training.steps,
        f"schedule.warmup={schedule.warmup} takes all of training.steps={training.steps}; "
        f"set schedule.warmup={training.steps // 10}",
    )
    rates = ["learning_rate", "weight_decay"] + ([] if isinstance(optimizer, AdamW) else ["adam_learning_rate"])
    _at_least(0, "optimizer", optimizer, rates)
    _above_zero("optimizer", optimizer, ("eps",))
    for name in ("b1", "b2", "momentum"):
        value = getattr(optimizer, name, 0.0)
        _check(0 <= value < 1, f"optimizer.{name}={value}: choose at least 0 and less than 1")
    modules = [part for name in model.encoders for part in (name, f"{name}.connector")]
    adapters = [f"{module}.lora" for module in adapted_modules(model)]
    _known("optimizer.modules", optimizer.modules, ["llm", *modules, *adapters])
    for name, own in optimizer.modules.items():
        for key in ("learning_rate", "weight_decay"):
            value = getattr(own, key)
            _check(value is None or value >= 0, f"optimizer.modules.{name}.{key}={value}: must be at least 0")
