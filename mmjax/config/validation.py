"""Validate a config: the model, and what its sections must agree on."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import fields, replace

from mmjax.config import (
    Adafactor,
    AudioConfig,
    BatchConfig,
    Config,
    ContextAttention,
    DataConfig,
    EmbeddedSource,
    FileSource,
    Layout,
    MeshConfig,
    ModelConfig,
    Muon,
    ParquetSource,
    Unit,
    VisionConfig,
    WebDatasetSource,
)
from mmjax.config.checks import (
    above_zero,
    at_least,
    at_most,
    check,
    modules_of_model,
)
from mmjax.config.codec import did_you_mean
from mmjax.config.compatibility import Features, check_conflicts
from mmjax.config.losses import loss_of_source, takes_answers
from mmjax.config.model import (
    adapted_modules,
    frozen_modules,
    module_names,
    rated_modules,
)
from mmjax.config.model_validation import check_limits, check_model
from mmjax.config.training import unit_layout, unit_modules
from mmjax.config.unit_stages import cut_unit

EMBEDDED_RATE = 4000  # Hz, of the embedded dataset's clips
MAX_EMBEDDED = 10_000_000  # samples; each is generated once before training, to compute its length
EMBEDDED_NEEDS = {
    "image": ("vision",),
    "audio": ("audio",),
    "mixed": ("vision", "audio"),
    "text": (),
}


def check_data(data: DataConfig) -> None:
    """Raises UserError for sources, weights or an alphabet that cannot work."""
    for name, source in data.sources.items():
        at_least(0, f"data.sources.{name}", source, ("weight",))
        if isinstance(source, FileSource):
            _check_files(f"data.sources.{name}", source)
        if isinstance(source, ParquetSource | WebDatasetSource):
            at_least(0, f"data.sources.{name}", source, ("window",))
    weights = {
        f"data.sources.{name}.weight": source.weight for name, source in data.sources.items()
    }
    check(
        not weights or sum(weights.values()) > 0,
        f"{', '.join(weights)} sum to zero: nothing could be drawn; give one a weight above 0",
    )
    check(
        data.temperature == 0 or data.temperature >= 0.1,
        f"data.temperature={data.temperature}: choose 0 (weights alone), 1 (weights are epochs) or more",
    )
    repeated = ", ".join(sorted({repr(c) for c in data.alphabet if data.alphabet.count(c) > 1}))
    check(
        not repeated, f"data.alphabet holds {repeated} more than once; each character is one token"
    )
    at_least(0, "data", data, ("workers",))
    at_least(1, "data", data, ("prefetch", "pool_steps"))
    check(
        data.pool in ("local", "auto") or bool(re.fullmatch(r"(ray://)?[\w.-]+:\d+", data.pool)),
        f"data.pool={data.pool}: give local, auto, or a Ray cluster's host:port or ray://host:port",
    )
    check(
        data.pool_memory > 0,
        f"data.pool_memory={data.pool_memory}: it is in GB, and must be above 0",
    )
    check(
        data.window_space > 0,
        f"data.window_space={data.window_space}: it is in GB, and must be above 0",
    )
    share = data.max_bad_share
    check(
        0 <= share <= 1, f"data.max_bad_share={share}: it is a part of the samples; choose 0 to 1"
    )
    check(
        data.max_bad is None or data.max_bad >= 0,
        f"data.max_bad={data.max_bad}: it counts samples; give 0 or more",
    )
    check(
        data.max_tokens is None or data.max_tokens > 0,
        f"data.max_tokens={data.max_tokens}: give 1 token or more",
    )
    check_limits("data.limits", data.limits)


def _check_files(where: str, source: FileSource) -> None:
    check(bool(source.path), f"{where}.path is empty; name a file, a folder or a URL")
    if isinstance(source, ParquetSource) and source.answers != "one":
        named = next(
            (key for key in ("messages", "question", "answer", "prompt") if getattr(source, key)),
            "",
        )
        check(
            not named,
            f"{where}.{named}: the columns of answers={source.answers} have TRL's names; leave it empty",
        )
    elif isinstance(source, ParquetSource):
        questions = [key for key in ("question", "prompt") if getattr(source, key)]
        named = (bool(source.messages), len(questions), bool(source.answer))
        check(
            named in ((True, 0, False), (False, 1, True)),
            f"{where}: name the columns that hold the text, either {where}.messages=messages or both "
            f"{where}.question=question and {where}.answer=answer; in place of a column of questions all rows may have "
            f'one: "{where}.prompt=Describe the image."',
        )


def check_embedded(where: str, source: EmbeddedSource, config: Config) -> None:
    """Raises UserError where the model lacks an encoder for the embedded samples, or has one of another input."""
    at_least(1, where, source, ("samples", "questions"))
    at_most(MAX_EMBEDDED, where, source, ("samples",))
    check(
        bool(source.modalities),
        f"{where}.modalities is empty; name some of {', '.join(EMBEDDED_NEEDS)}",
    )
    check(
        len(set(source.modalities)) == len(source.modalities),
        f"{where}.modalities names one twice; name each once",
    )
    check(
        bool(config.data.alphabet),
        "data.alphabet is empty; set it to ALPHABET of mmjax.data.toy.dataset",
    )
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
            check(
                rate == EMBEDDED_RATE,
                f"{setting}: the clips of {where} have {EMBEDDED_RATE} Hz; set that",
            )


MAX_WAIT = 1e9  # seconds; operating systems refuse to wait much longer


def validate(config: Config) -> None:
    """Validate a config. Raises UserError, naming key and remedy, for the first value that conflicts with others."""
    check(
        bool(re.fullmatch(r"[\w.\-]+", config.name)),
        f"name={config.name!r}: use letters, digits, '_', '-' and '.'",
    )
    check(0 <= config.seed < 2**31, f"seed={config.seed}: choose 0 to {2**31 - 1}")
    check_model(config.model)
    check_data(config.data)
    for name, source in config.data.sources.items():
        if isinstance(source, EmbeddedSource):
            check_embedded(f"data.sources.{name}", source, config)
    _check_batch(config.batch, config.model)
    at_least(0, "mesh", config.mesh, ("memory", "host_memory"))
    if not config.units:
        check_layout("mesh", config.mesh, config.model, alignment=config.batch.alignment)
    _check_float8(config)
    _check_training(config)
    check_loss(config)
    if config.units:
        _check_units(config)


def check_loss(config: Config) -> None:
    """Raises UserError where sources hold not what the loss is of, or the model cannot take answers as branches."""
    loss, model = config.loss, config.model
    for name, source in config.data.sources.items():
        check(
            takes_answers(loss, source),
            f"loss={loss.kind}: data.sources.{name} ({source.kind}) is for "
            f"loss={loss_of_source(source).kind}; set that, or drop it",
        )
    if not loss.is_branched:
        return
    at_least(0, "loss", loss, ("beta",))
    above_zero("loss", loss, loss.above_zero)
    check_conflicts(Features(model, loss))
    if loss.repeats_forward:
        trained = [module for module in module_names(model) if module not in frozen_modules(model)]
        check(
            bool(adapted_modules(model)) and not trained,
            f"loss.reference=adapters_off: the reference is the model without its adapters, but "
            f"{(trained or ['nothing'])[0]} is trained {'itself' if trained else 'by adapters'}; freeze it and give it "
            "or another module adapters (model.lora), or use loss.reference=stored or none",
        )


AXES = ("data", "fsdp", "expert", "context", "tensor")
# of a mesh, that the LLM's unit may have
LLM_LAYOUT = ("expert", "context", "tensor", "sequence_parallel", "exchange")


def check_layout(
    where: str,
    layout: Layout,
    model: ModelConfig,
    towers: Collection[str] | None = None,
    alignment: int | None = None,
) -> None:
    """Check that a mesh's or a unit's axes cut no head, expert, or row of a gated delta net, and all tokens equally.

    where: the layout's key. towers: that lie on it; None: all. alignment: of rows; None: they are
    not known. An axis of -1 counts as 1. Raises UserError.
    """
    expert, context, tensor = (
        max(1, getattr(layout, axis)) for axis in ("expert", "context", "tensor")
    )
    towers = ("llm", *model.item_modules) if towers is None else towers
    check_conflicts(Features(model, layouts={where: (layout, towers)}))
    if "llm" in towers:
        _check_llm_layout(where, layout.context_attention, model, expert, context, tensor)
    if layout.encoders == "tensor":
        _check_item_layout(where, model, towers, tensor)
    unit = math.lcm(alignment or tensor, tensor)
    check(
        layout.sequence_parallel in ("auto", "off") or alignment in (None, unit),
        f"{where}.sequence_parallel={layout.sequence_parallel}: {where}.tensor={tensor} does not divide rows of "
        f"batch.alignment={alignment}; use batch.alignment={unit}",
    )


def _check_llm_layout(
    where: str, form: ContextAttention, model: ModelConfig, expert: int, context: int, tensor: int
) -> None:
    llm = model.llm
    for key in ("heads", "kv_heads"):
        count = getattr(llm, key)
        check(
            count % tensor == 0,
            f"{where}.tensor={tensor} does not divide model.llm.{key}={count}; use a divisor of it",
        )
        check(
            form != "heads" or count % (tensor * context) == 0,
            f"{where}.context={context} x tensor={tensor} does not divide model.llm.{key}={count}, as "
            f"context_attention=heads needs; use {where}.context_attention=gather, which cuts no head",
        )
    if llm.delta_net:
        keys = llm.delta_net.key_heads
        check(
            keys % tensor == 0,
            f"{where}.tensor={tensor} does not divide model.llm.delta_net.key_heads={keys}; use a divisor of it",
        )
    if expert > 1:
        check(
            llm.experts is not None,
            f"{where}.expert={expert}: model.llm.experts is none; use {where}.fsdp, or {where}.expert=1",
        )
        check(
            llm.experts.count % expert == 0,
            f"{where}.expert={expert} does not divide model.llm.experts.count={llm.experts.count}; use a divisor of it",
        )


def _check_item_layout(
    where: str, model: ModelConfig, towers: Collection[str], tensor: int
) -> None:
    """Check what tensor parallelism cuts of encoders and generators."""
    for name, tower in model.item_modules.items():
        if name in towers and tower.is_stack:
            kind = "encoders" if name in model.encoders else "generators"
            check(
                tower.heads % tensor == 0,
                f"{where}.tensor={tensor} does not divide model.{kind}.{name}.heads={tower.heads}; use a divisor of "
                f"it, or {where}.encoders=data, which cuts no encoder",
            )


def _check_without_llm(where: str, unit: Unit) -> None:
    """Check that a unit without the LLM has nothing that is of the LLM alone."""
    check(
        unit.expert == 1,
        f"{where}.expert={unit.expert}: the LLM alone has experts; use {where}.fsdp={unit.fsdp * unit.expert}",
    )
    for key, default in (("context_attention", "auto"), ("exchange", "padded")):
        value = getattr(unit, key)
        check(
            value == default,
            f"{where}.{key}={value}: it is of the LLM's stages; set it in the unit of the LLM",
        )


def _check_float8(config: Config) -> None:
    """Check that there is a layer that has products in FP8."""
    llm = config.model.llm
    if llm.fp8 == "off":
        return
    check(
        any(llm.float8_layers),
        f"model.llm.fp8={llm.fp8}: the first and the last layer have no products in FP8, and model.llm.layers="
        f"{llm.layers} leaves none; use model.llm.fp8=off",
    )


def _check_units(config: Config) -> None:
    """Check that every module has devices, and that layers, heads and microbatches divide as the units ask."""
    towers = config.model.towers
    # What units leave to the mesh: its memory, and the form of attention of those that have none of
    # their own.
    machine = {
        key: getattr(config.mesh, key) for key in ("memory", "host_memory", "context_attention")
    }
    mesh = replace(MeshConfig(), **machine)
    changed = [
        f.name for f in fields(MeshConfig) if getattr(config.mesh, f.name) != getattr(mesh, f.name)
    ]
    in_units = [name for name in changed if name in LLM_LAYOUT]
    llm = next(
        (name for name, unit in config.units.items() if "llm" in unit_modules(name, unit)), "llm"
    )
    settings = " ".join(f"units.{llm}.{name}={getattr(config.mesh, name)}" for name in in_units)
    check(
        not changed,
        f"mesh.{(changed or [''])[0]}: modules with units have their devices from these; leave mesh as it is, or units "
        "empty" + (f", or set {settings}" if changed == in_units else ""),
    )
    owners: dict[str, str] = {}
    for name, unit in config.units.items():
        where = f"units.{name}"
        at_least(1, where, unit, (*AXES, "pipeline", "virtual"))
        for tower in unit_modules(name, unit):
            hint = did_you_mean(tower, towers)
            key = f"{where}.modules has {tower!r}" if unit.modules else where
            check(
                tower in towers, f"{key}, which is no module{hint}; there are {', '.join(towers)}"
            )
            check(
                tower not in owners,
                f"{key}, which units.{owners.get(tower)} has already; give every module one unit",
            )
            owners[tower] = name
        modules = unit_modules(name, unit)
        if unit.beside:
            _check_beside(config, where, unit, modules)
        towers_here = [
            tower
            for n, u in config.units.items()
            if name in (n, u.beside)
            for tower in unit_modules(n, u)
        ]
        check_layout(
            where, unit_layout(unit, config.mesh), config.model, towers_here, config.batch.alignment
        )
        if "llm" not in modules:
            _check_without_llm(where, unit)
        check(
            unit.encoders == "tensor" or any(tower != "llm" for tower in towers_here),
            f"{where}.encoders={unit.encoders}: this unit has no encoder; set it in the units of the encoders",
        )
        # After the modules are known to be there.
        _check_stages(config, where, unit, modules)
    _check_schedule(config)
    missing = [tower for tower in towers if tower not in owners]
    check(
        not missing,
        f"units: {(missing or [''])[0]} has no devices; add units.{(missing or [''])[0]}.data=1, or name it in another "
        "unit's modules",
    )


def _check_schedule(config: Config) -> None:
    """Check that the units are such as the schedule is for."""
    schedule = config.pipeline.schedule
    beside = next((name for name, unit in config.units.items() if unit.beside), "")
    check(
        schedule != "interleaved" or any(unit.virtual > 1 for unit in config.units.values()),
        "pipeline.schedule=interleaved: no unit has several parts of its layers on a stage; set units.llm.virtual=2",
    )
    check(
        schedule != "nested" or bool(beside),
        "pipeline.schedule=nested: no unit is beside another; set beside=llm in the units of encoders",
    )
    check(
        not beside or schedule in ("auto", "nested"),
        f"units.{beside}.beside is for pipeline.schedule=nested, not {schedule}; leave the schedule auto",
    )
    times = config.pipeline.stage_times
    stages = 0
    for unit in config.units.values():
        stages += unit.virtual * (
            config.units[unit.beside].pipeline if unit.beside else unit.pipeline
        )
    check(
        not times or (len(times) == 2 * stages and min(times) >= 0),
        f"pipeline.stage_times has {len(times)} numbers: {stages} stages need {2 * stages}, forward and backward of "
        "each in turn, none below 0; leave it empty for times by FLOPs",
    )


def _check_beside(config: Config, where: str, unit: Unit, modules: Sequence[str]) -> None:
    """Check a unit of encoders that has a copy on the devices of each stage of another."""
    beside = unit.beside
    setting = f"{where}.beside={beside}"
    hint = did_you_mean(beside, config.units)
    check(beside in config.units, f"{setting}, which is no unit{hint}")
    host = config.units[beside]
    has_llm = "llm" in unit_modules(beside, host)
    check(has_llm, f"{setting}: units.{beside} is without the LLM; name the unit that has it")
    decoder = next((tower for tower in modules if tower not in config.model.encoders), "")
    check(
        not decoder,
        f"{setting}: {decoder} is no encoder; give it a unit of its own, or name it in the LLM's",
    )
    check(
        host.pipeline > 1,
        f"{setting}: units.{beside} is one stage, where nothing waits; name {', '.join(modules)} in its modules",
    )
    check(
        host.virtual == 1,
        f"{setting}: units.{beside} has virtual={host.virtual}, and encoders are nested in 1f1b's order; leave it at 1",
    )
    for field in fields(Unit):
        value = getattr(unit, field.name)
        check(
            field.name in ("modules", "virtual", "cuts", "beside")
            or value == getattr(Unit(), field.name),
            f"{setting} and {where}.{field.name}={value}: a copy has the layout of units.{beside}; leave {field.name}",
        )


def _check_stages(config: Config, where: str, unit: Unit, modules: Sequence[str]) -> None:
    """Check the stages that a unit's modules are cut into."""
    model = config.model
    stages = unit.pipeline * unit.virtual
    behind = model.towers_behind("llm")
    generator = next((module for module in modules if module in behind), "")
    check(
        not generator or "llm" in modules or set(modules) <= set(behind),
        f"{where}.modules: the LLM stands between encoders and model.generators.{generator}; give {generator} a unit "
        "of its own, or name it in the LLM's",
    )
    layers = sum(model.towers[module].layers for module in modules)
    setting = f"{where}.pipeline={unit.pipeline}" + (
        f" x virtual={unit.virtual}" if unit.virtual > 1 else ""
    )
    check(
        stages <= layers,
        f"{setting} makes {stages} stages of {layers} layers; use at most {layers}",
    )
    check(
        unit.virtual == 1
        or bool(unit.beside)
        or config.pipeline.schedule in ("auto", "interleaved"),
        f"{where}.virtual={unit.virtual} is for pipeline.schedule=interleaved, not {config.pipeline.schedule}",
    )
    check(
        unit.virtual == 1 or bool(unit.beside) or (unit.pipeline > 1 and modules == ("llm",)),
        f"{where}.virtual={unit.virtual} divides the layers of an LLM that is alone in its unit, with pipeline above 1",
    )
    count = config.batch.microbatches
    nearest = max(1, round(count / unit.pipeline)) * unit.pipeline
    check(
        unit.virtual == 1 or bool(unit.beside) or count % unit.pipeline == 0,
        f"batch.microbatches={count} is no multiple of {where}.pipeline={unit.pipeline}, as interleaved stages need; "
        f"set batch.microbatches={nearest}",
    )
    pieces = [
        piece for stage in cut_unit(model, where.removeprefix("units."), unit) for piece in stage
    ]
    for tower, start, _ in pieces:
        encoder = model.encoders.get(tower)
        if (
            isinstance(encoder, VisionConfig)
            and encoder.deepstack
            and encoder.callbacks.after_connector
        ):
            check(
                start <= min(encoder.deepstack),
                f"{where}: model.encoders.{tower}.callbacks.after_connector takes the tokens of all deepstack layers "
                f"together, and these lie in several stages; set {where}.pipeline=1, name other {where}.cuts, or leave "
                "the callback empty",
            )


def _check_batch(batch: BatchConfig, model: ModelConfig) -> None:
    at_least(1, "batch.size", batch.size, ("count",))
    at_least(1, "batch", batch, ("microbatches", "alignment", "shapes"))
    at_least(1, "batch.grouping", batch.grouping, ("chunk_steps",))
    for name in ("pool_steps", "iterations"):
        if hasattr(batch.grouping, name):
            at_least(1, "batch.grouping", batch.grouping, (name,))
    modules = ["llm", *model.item_modules]
    modules_of_model("batch.rows", batch.rows, modules)
    for name in modules:
        check(
            name in batch.rows,
            f"batch.rows has no {name!r}; say how many packed rows it gets: batch.rows.{name}=2",
        )
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
    check(
        steps >= 1 or epochs > 0,
        f"training.steps={steps}: must be at least 1, or give training.epochs above 0",
    )
    both = bool(steps and epochs)
    check(
        not both,
        f"training.steps={steps} and training.epochs={epochs:g}: give one, and 0 as the other",
    )
    at_least(1, "training", training, ("evaluate_samples", "keep"))
    counts = (
        "steps",
        "epochs",
        "loss_chunks",
        "evaluate_every",
        "checkpoint_every",
        "keep_every",
        "patience",
        "spike",
    )
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
    check(
        schedule.final <= 1,
        f"schedule.final={schedule.final}: it is a part of the peak; choose 0 to 1",
    )
    check(
        # the length of epochs in steps is not known before the data is opened
        schedule.warmup < steps or epochs > 0,
        f"schedule.warmup={schedule.warmup} takes all of training.steps={steps}; set schedule.warmup={steps // 10}",
    )
    rates = ["learning_rate", "weight_decay"] + (
        ["adam_learning_rate"] if isinstance(optimizer, Muon) else []
    )
    at_least(0, "optimizer", optimizer, rates)
    above_zero("optimizer", optimizer, ("clip",) if isinstance(optimizer, Adafactor) else ("eps",))
    for name in ("b1", "b2", "momentum"):
        value = getattr(optimizer, name, 0.0)
        check(0 <= value < 1, f"optimizer.{name}={value}: choose at least 0 and less than 1")
    modules_of_model("optimizer.modules", optimizer.modules, rated_modules(model))
    for name, module_rates in optimizer.modules.items():
        for key in ("learning_rate", "weight_decay"):
            value = getattr(module_rates, key)
            check(
                value is None or value >= 0,
                f"optimizer.modules.{name}.{key}={value}: must be at least 0",
            )
