"""Validate a config: single values, the model, and what its sections must agree on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from mmjax.config import (
    Adafactor,
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
    MeshConfig,
    ModelConfig,
    Muon,
    NoVideo,
    ParquetSource,
    Qwen2Video,
    SmartResize,
    StoredTable,
    StretchedGrid,
    UniformVideo,
    Unit,
    VideoPreparation,
    VisionConfig,
    WhisperMel,
)
from mmjax.config.codec import did_you_mean
from mmjax.config.model import adapted_modules, linear_layers, matching_layers, module_names
from mmjax.config.training import cut_tower, unit_cuts, unit_modules
from mmjax.errors import UserError

MAX_DIVISOR = 4096  # larger ones are not suggested


def check(condition: bool, message: str) -> None:
    """Raise the message as a UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


def at_least(minimum: float, where: str, section: Any, names: Sequence[str]) -> None:
    """Check that these values of a section are at least the minimum."""
    for name in names:
        value = getattr(section, name)
        check(value >= minimum, f"{where}.{name}={value}: must be at least {minimum}")


def at_most(maximum: float, where: str, section: Any, names: Sequence[str]) -> None:
    """Check that these values of a section are at most the maximum."""
    for name in names:
        value = getattr(section, name)
        check(value <= maximum, f"{where}.{name}={value}: must be at most {maximum}")


def above_zero(where: str, section: Any, names: Sequence[str]) -> None:
    """Check that these values of a section are more than 0."""
    for name in names:
        value = getattr(section, name)
        check(value > 0, f"{where}.{name}={value}: must be more than 0")


def ordered(where: str, section: Any, low: str, high: str) -> None:
    """Check that the field `low` of a section is no more than its field `high`."""
    minimum = getattr(section, low)
    maximum = getattr(section, high)
    check(minimum <= maximum, f"{where}.{high}={maximum}: must be at least {low}={minimum}")


def modules_of_model(where: str, names: Iterable[str], modules: Sequence[str]) -> None:
    """Check that these are names of modules."""
    for name in names:
        check(name in modules, f"{where}.{name}: there is no module {name!r}{did_you_mean(name, modules)}")


def divides(where: str, number: int, number_name: str, divisor: int, divisor_name: str) -> None:
    """Check that one value is a multiple of another."""
    if number % divisor:
        divisors = ", ".join(str(d) for d in range(1, min(number, MAX_DIVISOR) + 1) if number % d == 0)
        raise UserError(
            f"{where}: {number_name}={number} does not divide by {divisor_name}={divisor}; choose {divisor_name} from "
            f"{divisors}"
        )


def is_size(sides: Sequence[int]) -> bool:
    """Return whether the values are a height and a width."""
    return len(sides) == 2 and min(sides) > 0


def listed(values: Sequence[int]) -> str:
    """Format values as in an override."""
    return ",".join(map(str, values)) or "()"


def check_images(where: str, how: ImagePreparation) -> None:
    """Raises UserError, naming the key under `where`, for settings that no image can be preprocessed with."""
    if isinstance(how, FixedSize):
        _check_color(f"{where}.square", how.square)
        setting = f"{where}.resize={listed(how.resize)}"
        check(len(how.resize) <= 2, f"{setting}: give the shortest edge, or height and width, or nothing")
        check(min(how.resize, default=1) > 0, f"{setting}: must be more than 0")
        check(not how.crop or is_size(how.crop), f"{where}.crop={listed(how.crop)}: give height and width, or nothing")
    elif isinstance(how, SmartResize):
        at_least(1, where, how, ("patch", "merge", "min_pixels"))
        ordered(where, how, "min_pixels", "max_pixels")
    elif isinstance(how, DynamicTiles):
        check(is_size(how.tile), f"{where}.tile={listed(how.tile)}: give height and width")
        at_least(1, where, how, ("min_tiles",))
        ordered(where, how, "min_tiles", "max_tiles")
    elif isinstance(how, AnyRes):
        at_least(1, where, how, ("tile",))
        at_least(0, where, how, ("most_tiles",))
        by_rows = how.order == "rows" or not how.most_tiles
        check(by_rows, f"{where}.most_tiles={how.most_tiles}: it is rows that are interpolated; choose order=rows")
        _check_color(f"{where}.background", how.background)
        check(bool(how.pinpoints), f"{where}.pinpoints is empty; name some, such as {2 * how.tile}x{how.tile}")
        for pinpoint in how.pinpoints:
            sides = [int(side) for side in pinpoint.split("x") if re.fullmatch("[0-9]+", side)]
            fits = is_size(sides) and not any(side % how.tile for side in sides) and pinpoint.count("x") == 1
            check(fits, f"{where}.pinpoints: {pinpoint!r} is no HEIGHTxWIDTH in multiples of tile={how.tile}")


def check_videos(where: str, how: VideoPreparation) -> None:
    """Raises UserError, naming the key under `where`, for settings that no video can be sampled or resized with."""
    if isinstance(how, NoVideo):
        return
    if isinstance(how, UniformVideo):
        at_least(1, where, how, ("frames",))
        check(not how.size or is_size(how.size), f"{where}.size={listed(how.size)}: give height and width, or nothing")
        return
    above_zero(where, how, ("fps",))
    at_least(1, where, how, ("min_frames", "min_pixels"))
    ordered(where, how, "min_frames", "max_frames")
    ordered(where, how, "min_pixels", "max_pixels")
    more = ("total_pixels", "tokens_per_second") if isinstance(how, Qwen2Video) else ("frame_pixels",)
    at_least(0, where, how, more)


def check_audio(where: str, how: AudioPreparation) -> None:
    """Raises UserError, naming the key under `where`, for settings that no clip can be preprocessed with."""
    at_least(1, where, how, ("mels", "sample_rate", "hop"))
    if not isinstance(how, LogMel):
        at_least(1, where, how, ("seconds",))
        check(how.window >= 2 and how.window % 2 == 0, f"{where}.window={how.window}: must be even, and at least 2")
        return
    at_least(2, where, how, ("window",))
    check(
        how.hop <= how.window,
        f"{where}.hop={how.hop} is longer than window={how.window}: samples would be skipped; make hop smaller",
    )
    bins = how.window // 2 + 1  # of a real FFT
    check(
        how.mels <= bins,
        f"{where}.mels={how.mels}: window={how.window} has only {bins} frequencies; make mels at most that",
    )


def check_limits(where: str, limits: MediaLimits) -> None:
    """Raises UserError, naming the key under `where`, for limits that no image or clip can be within."""
    at_least(1, where, limits, ("pixels", "min_side", "aspect"))
    above_zero(where, limits, ("seconds",))
    ordered(where, limits, "min_side", "max_side")


def _check_color(where: str, color: Sequence[int]) -> None:
    valid = len(color) in (0, 3) and all(0 <= part <= 255 for part in color)
    check(valid, f"{where}={listed(color)}: give red, green and blue, each 0 to 255")


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
    turned = llm.rotary_width
    check(
        turned % 2 == 0 and 0 <= turned <= llm.head_width,
        f"{where}.rotary_width={turned}: RoPE turns pairs of channels; use an even number up to "
        f"head_width={llm.head_width}",
    )
    _check_rope(where, llm)
    _check_delta_net(llm)
    at_least(0, where, llm, ("attention_scale", "attention_cap", "logit_cap", "window", "window_rope_theta"))
    _check_windows(where, llm)
    check(llm.vocab >= 3, f"{where}.vocab={llm.vocab}: padding, end of answer and one character need at least 3")


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
    check(
        llm.items == "causal",
        f"model.llm.items={llm.items}: a gated delta net reads a sample's tokens in order; use model.llm.items=causal",
    )


def _check_rope(where: str, llm: DecoderConfig) -> None:
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
    check_videos(f"{where}.videos", encoder.videos)
    at_least(0, where, encoder, ("window",))
    _check_windows(where, encoder)
    check(
        not encoder.windowed or encoder.window % encoder.connector.merge == 0,
        f"{where}.window={encoder.window}: a window holds whole tokens; use a multiple of "
        f"connector.merge={encoder.connector.merge}",
    )
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


EMBEDDED_RATE = 4000  # Hz, of the embedded dataset's clips
MAX_EMBEDDED = 10_000_000  # samples; each is generated once before training, to compute its length
EMBEDDED_NEEDS = {"image": ("vision",), "audio": ("audio",), "mixed": ("vision", "audio"), "text": ()}


def check_data(data: DataConfig) -> None:
    """Raises UserError for sources, weights or an alphabet that cannot work."""
    for name, source in data.sources.items():
        at_least(0, f"data.sources.{name}", source, ("weight",))
        if isinstance(source, FileSource):
            _check_files(f"data.sources.{name}", source)
    weights = {f"data.sources.{name}.weight": source.weight for name, source in data.sources.items()}
    check(
        not weights or sum(weights.values()) > 0,
        f"{', '.join(weights)} sum to zero: nothing could be drawn; give one a weight above 0",
    )
    repeated = ", ".join(sorted({repr(c) for c in data.alphabet if data.alphabet.count(c) > 1}))
    check(not repeated, f"data.alphabet holds {repeated} more than once; each character is one token")
    at_least(0, "data", data, ("workers",))
    at_least(1, "data", data, ("prefetch",))
    share = data.max_bad_share
    check(0 <= share <= 1, f"data.max_bad_share={share}: it is a part of the samples; choose 0 to 1")
    check_limits("data.limits", data.limits)


def _check_files(where: str, source: FileSource) -> None:
    check(bool(source.path), f"{where}.path is empty; name a file, a folder or a URL")
    if isinstance(source, ParquetSource):
        paired = bool(source.question) and bool(source.answer)
        check(
            paired != bool(source.messages) and bool(source.question) == bool(source.answer),
            f"{where}: name the columns that hold the text, either {where}.messages=messages or both "
            f"{where}.question=question and {where}.answer=answer",
        )


def check_embedded(where: str, source: EmbeddedSource, config: Config) -> None:
    """Raises UserError where the model lacks an encoder for the embedded samples, or has one of another input."""
    at_least(1, where, source, ("samples", "questions"))
    at_most(MAX_EMBEDDED, where, source, ("samples",))
    check(bool(source.modalities), f"{where}.modalities is empty; name some of {', '.join(EMBEDDED_NEEDS)}")
    check(len(set(source.modalities)) == len(source.modalities), f"{where}.modalities names one twice; name each once")
    check(bool(config.data.alphabet), "data.alphabet is empty; set it to ALPHABET of mmjax.data.toy.dataset")
    for modality in source.modalities:
        for encoder, cls in (("vision", VisionConfig), ("audio", AudioConfig)):
            if encoder in EMBEDDED_NEEDS[modality]:
                check(
                    isinstance(config.model.encoders.get(encoder), cls),
                    f"{where}.modalities has {modality!r}, which needs model.encoders.{encoder} of kind {encoder!r}; "
                    f"add it, or leave {modality!r} out",
                )
    for name, encoder in config.model.encoders.items():
        if isinstance(encoder, VisionConfig) and name == "vision":
            setting = f"model.encoders.vision.channels={encoder.channels}"
            check(encoder.channels == 1, f"{setting}: the images of {where} are grey; set it to 1")
        if isinstance(encoder, AudioConfig) and name == "audio":
            rate = encoder.sample_rate
            setting = f"model.encoders.audio.clips.sample_rate={rate}"
            check(rate == EMBEDDED_RATE, f"{setting}: the clips of {where} have {EMBEDDED_RATE} Hz; set that")


MAX_WAIT = 1e9  # seconds; operating systems refuse to wait much longer


def validate(config: Config) -> None:
    """Validate a config. Raises UserError, naming key and remedy, for the first value that conflicts with others."""
    check(bool(re.fullmatch(r"[\w.\-]+", config.name)), f"name={config.name!r}: use letters, digits, '_', '-' and '.'")
    check(0 <= config.seed < 2**31, f"seed={config.seed}: choose 0 to {2**31 - 1}")
    check_model(config.model)
    check_data(config.data)
    for name, source in config.data.sources.items():
        if isinstance(source, EmbeddedSource):
            check_embedded(f"data.sources.{name}", source, config)
    _check_batch(config.batch, config.model)
    at_least(0, "mesh", config.mesh, ("memory", "host_memory"))
    _check_sequence_parallel(config.mesh, config.batch.alignment)
    _check_training(config)
    if config.units:
        _check_units(config)


def _check_sequence_parallel(mesh: MeshConfig, alignment: int) -> None:
    """Check that tensor-parallel devices can divide the tokens of every row where a config says so."""
    unit = math.lcm(alignment, max(mesh.tensor, 1))
    check(
        mesh.sequence_parallel in ("auto", "off") or unit == alignment,
        f"mesh.sequence_parallel={mesh.sequence_parallel}: mesh.tensor={mesh.tensor} does not divide rows of "
        f"batch.alignment={alignment}; use batch.alignment={unit}",
    )


def _check_units(config: Config) -> None:
    """Check that every module has devices, and that layers, heads and microbatches divide as the units ask."""
    towers = {"llm": config.model.llm, **config.model.encoders}
    kept = {key: getattr(config.mesh, key) for key in ("memory", "host_memory", "context_attention")}
    mesh = replace(MeshConfig(), **kept)
    changed = [f.name for f in fields(MeshConfig) if getattr(config.mesh, f.name) != getattr(mesh, f.name)]
    check(
        not changed,
        f"mesh.{(changed or [''])[0]}: modules with units have their devices from these; leave mesh as it is, or units "
        "empty" + (f", or set units.llm.context={config.mesh.context}" if changed == ["context"] else ""),
    )
    check(
        config.pipeline.schedule != "interleaved" or any(unit.virtual > 1 for unit in config.units.values()),
        "pipeline.schedule=interleaved: no unit has several parts of its layers on a stage; set units.llm.virtual=2",
    )
    owners: dict[str, str] = {}
    for name, unit in config.units.items():
        where = f"units.{name}"
        at_least(1, where, unit, ("data", "fsdp", "context", "tensor", "pipeline", "virtual"))
        for tower in unit_modules(name, unit):
            hint = did_you_mean(tower, towers)
            key = f"{where}.modules has {tower!r}" if unit.modules else where
            check(tower in towers, f"{key}, which is no module{hint}; there are {', '.join(towers)}")
            check(
                tower not in owners,
                f"{key}, which units.{owners.get(tower)} has already; give every module one unit",
            )
            owners[tower] = name
            for heads in ("heads", "kv_heads"):
                count = getattr(towers[tower], heads, unit.tensor)
                path = "llm" if tower == "llm" else f"encoders.{tower}"
                check(
                    count % unit.tensor == 0,
                    f"{where}.tensor={unit.tensor} does not divide model.{path}.{heads}={count}; use a divisor of it",
                )
                parts = unit.context * unit.tensor
                check(
                    tower != "llm" or config.mesh.context_attention != "heads" or count % parts == 0,
                    f"mesh.context_attention=heads: {where}.context={unit.context} x tensor={unit.tensor} does not "
                    f"divide model.{path}.{heads}={count}; use mesh.context_attention=gather, which cuts no head",
                )
            if tower == "llm" and (delta_net := config.model.llm.delta_net):
                divides(where, delta_net.key_heads, "model.llm.delta_net.key_heads", unit.tensor, "tensor")
                check(
                    unit.context == 1,
                    f"{where}.context={unit.context}: a gated delta net (model.llm.delta_net) reads the tokens of a "
                    f"row in order, and context parallelism permutes them; use {where}.context=1",
                )
        check(
            unit.context == 1 or "llm" in unit_modules(name, unit),
            f"{where}.context={unit.context}: items of encoders are not cut, only rows of the LLM; use "
            f"{where}.data={unit.data * unit.context}",
        )
        # After the modules are known to be there.
        _check_stages(config, where, unit, unit_modules(name, unit))
    missing = [tower for tower in towers if tower not in owners]
    check(
        not missing,
        f"units: {(missing or [''])[0]} has no devices; add units.{(missing or [''])[0]}.data=1, or name it in another "
        "unit's modules",
    )


def _check_stages(config: Config, where: str, unit: Unit, modules: Sequence[str]) -> None:
    """Check the stages of a unit's tower."""
    tower = cut_tower(modules)
    layers = config.model.llm.layers if tower == "llm" else config.model.encoders[tower].layers
    stages = unit.pipeline * unit.virtual
    check(
        stages == 1 or len(modules) == 1 or tower == "llm",
        f"{where}.pipeline={unit.pipeline}: several encoders cannot be cut together; give each a unit of its own",
    )
    setting = f"{where}.pipeline={unit.pipeline}" + (f" x virtual={unit.virtual}" if unit.virtual > 1 else "")
    check(stages <= layers, f"{setting} makes {stages} stages of {layers} layers; use at most {layers}")
    check(
        unit.virtual == 1 or config.pipeline.schedule in ("auto", "interleaved"),
        f"{where}.virtual={unit.virtual} is for pipeline.schedule=interleaved, not {config.pipeline.schedule}",
    )
    check(
        unit.virtual == 1 or (unit.pipeline > 1 and modules == ("llm",)),
        f"{where}.virtual={unit.virtual} divides the layers of an LLM that is alone in its unit, with pipeline above 1",
    )
    count = config.batch.microbatches
    nearest = max(1, round(count / unit.pipeline)) * unit.pipeline
    check(
        unit.virtual == 1 or count % unit.pipeline == 0,
        f"batch.microbatches={count} is no multiple of {where}.pipeline={unit.pipeline}, as interleaved stages need; "
        f"set batch.microbatches={nearest}",
    )
    if unit.cuts:
        ascending = all(a < b for a, b in pairwise((0, *unit.cuts, layers)))
        check(
            ascending and len(unit.cuts) == stages - 1,
            f"{where}.cuts={','.join(map(str, unit.cuts))}: give {stages - 1} layers in ascending order, from 1 to "
            f"{layers - 1}",
        )
    encoder = config.model.encoders.get(tower)
    if isinstance(encoder, VisionConfig) and encoder.deepstack and encoder.callbacks.after_connector:
        check(
            max(unit_cuts(unit, layers), default=0) <= min(encoder.deepstack),
            f"{where}: model.encoders.{tower}.callbacks.after_connector takes the tokens of all deepstack layers "
            f"together, and these lie in several stages; set {where}.pipeline=1, or leave the callback empty",
        )


def _check_batch(batch: BatchConfig, model: ModelConfig) -> None:
    at_least(1, "batch.size", batch.size, ("count",))
    at_least(1, "batch", batch, ("microbatches", "alignment", "shapes"))
    at_least(1, "batch.grouping", batch.grouping, ("chunk_steps",))
    for name in ("pool_steps", "iterations"):
        if hasattr(batch.grouping, name):
            at_least(1, "batch.grouping", batch.grouping, (name,))
    modules = ["llm", *model.encoders]
    modules_of_model("batch.rows", batch.rows, modules)
    for name in modules:
        check(name in batch.rows, f"batch.rows has no {name!r}; say how many packed rows it gets: batch.rows.{name}=2")
        check(batch.rows[name] >= 1, f"batch.rows.{name}={batch.rows[name]}: must be at least 1")


def _check_training(config: Config) -> None:
    training = config.training
    schedule = config.schedule
    optimizer = config.optimizer
    model = config.model
    tokens = len(config.data.alphabet) + 2  # and padding and end of answer
    check(
        model.llm.vocab >= tokens,
        f"model.llm.vocab={model.llm.vocab}: data.alphabet needs {tokens} (its characters, padding and end of answer); "
        f"set model.llm.vocab={tokens} or more",
    )
    steps = training.steps
    epochs = training.epochs
    check(steps >= 1 or epochs > 0, f"training.steps={steps}: must be at least 1, or give training.epochs above 0")
    both = bool(steps and epochs)
    check(not both, f"training.steps={steps} and training.epochs={epochs:g}: give one, and 0 as the other")
    at_least(1, "training", training, ("evaluate_samples", "keep"))
    counts = ("steps", "epochs", "loss_chunks", "evaluate_every", "checkpoint_every", "keep_every", "patience", "spike")
    at_least(0, "training", training, counts)
    check(
        not training.keep_best or training.evaluate_every > 0,
        f"training.keep_best={training.keep_best}: nothing is evaluated while training; set training.evaluate_every",
    )
    check(
        not training.patience or bool(training.keep_best),
        f"training.patience={training.patience}: name the metric by training.keep_best, such as validation/loss",
    )
    above_zero("training", training, ("clip",))
    at_least(0, "training.watch", training.watch, ("seconds", "times", "others"))
    for name in ("seconds", "times", "others"):
        value = getattr(training.watch, name)
        check(value <= MAX_WAIT, f"training.watch.{name}={value:g}: give at most {MAX_WAIT:g}")
    at_least(0, "schedule", schedule, ("warmup", "final"))
    check(schedule.final <= 1, f"schedule.final={schedule.final}: it is a part of the peak; choose 0 to 1")
    check(
        schedule.warmup < steps or epochs > 0,  # the length of epochs in steps is not known before the data is opened
        f"schedule.warmup={schedule.warmup} takes all of training.steps={steps}; set schedule.warmup={steps // 10}",
    )
    rates = ["learning_rate", "weight_decay"] + (["adam_learning_rate"] if isinstance(optimizer, Muon) else [])
    at_least(0, "optimizer", optimizer, rates)
    above_zero("optimizer", optimizer, ("clip",) if isinstance(optimizer, Adafactor) else ("eps",))
    for name in ("b1", "b2", "momentum"):
        value = getattr(optimizer, name, 0.0)
        check(0 <= value < 1, f"optimizer.{name}={value}: choose at least 0 and less than 1")
    adapters = [f"{module}.lora" for module in adapted_modules(model)]
    modules_of_model("optimizer.modules", optimizer.modules, [*module_names(model), *adapters])
    for name, module_rates in optimizer.modules.items():
        for key in ("learning_rate", "weight_decay"):
            value = getattr(module_rates, key)
            check(value is None or value >= 0, f"optimizer.modules.{name}.{key}={value}: must be at least 0")
