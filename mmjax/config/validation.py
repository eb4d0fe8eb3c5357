"""Validate a whole config, its batch and its training."""

from __future__ import annotations

import re

from mmjax.config import (
    AdamW,
    AudioConfig,
    BatchConfig,
    Config,
    DataConfig,
    EmbeddedSource,
    FileSource,
    ModelConfig,
    ParquetSource,
    VisionConfig,
)
from mmjax.config.lora_targets import adapted_modules
from mmjax.config.validation_model import check_model
from mmjax.config.validation_rules import above_zero, at_least, at_most, check, modules_of_model

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
    _check_training(config)


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
    rates = ["learning_rate", "weight_decay"] + ([] if isinstance(optimizer, AdamW) else ["adam_learning_rate"])
    at_least(0, "optimizer", optimizer, rates)
    above_zero("optimizer", optimizer, ("eps",))
    for name in ("b1", "b2", "momentum"):
        value = getattr(optimizer, name, 0.0)
        check(0 <= value < 1, f"optimizer.{name}={value}: choose at least 0 and less than 1")
    modules = [part for name in model.encoders for part in (name, f"{name}.connector")]
    adapters = [f"{module}.lora" for module in adapted_modules(model)]
    modules_of_model("optimizer.modules", optimizer.modules, ["llm", *modules, *adapters])
    for name, module_rates in optimizer.modules.items():
        for key in ("learning_rate", "weight_decay"):
            value = getattr(module_rates, key)
            check(value is None or value >= 0, f"optimizer.modules.{name}.{key}={value}: must be at least 0")
