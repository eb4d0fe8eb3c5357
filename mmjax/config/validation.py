"""Validate a config: every value by itself, and what its sections must agree on."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from mmjax.config import (
    AudioConfig,
    Config,
    ContextAttention,
    DecoderConfig,
    EmbeddedSource,
    Layout,
    ModelConfig,
    VisionConfig,
)
from mmjax.config.checks import check, modules_of_model
from mmjax.config.compatibility import Features, check_conflicts
from mmjax.config.losses import loss_of_source, takes_answers
from mmjax.config.model import (
    adapted_modules,
    frozen_modules,
    module_names,
    rated_modules,
    stacked_towers,
)
from mmjax.config.ranges import check_section
from mmjax.config.sources import EMBEDDED_NEEDS
from mmjax.config.training import rates_of, unit_layout
from mmjax.config.unit_validation import check_units, towers_on

EMBEDDED_RATE = 4000  # Hz, of the embedded dataset's clips


def check_embedded(where: str, source: EmbeddedSource, config: Config) -> None:
    """Raises UserError where the model lacks an encoder for the embedded samples, or has one of another input."""
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
        if encoder.modality == "image" and name == "vision":
            setting = f"model.encoders.vision.channels={encoder.channels}"
            check(encoder.channels == 1, f"{setting}: the images of {where} are grey; set it to 1")
        if encoder.modality == "audio" and name == "audio":
            rate = encoder.sample_rate
            setting = f"model.encoders.audio.clips.sample_rate={rate}"
            check(
                rate == EMBEDDED_RATE,
                f"{setting}: the clips of {where} have {EMBEDDED_RATE} Hz; set that",
            )


def validate(config: Config) -> None:
    """Validate a config. Raises UserError, naming key and remedy, for the first value that conflicts with others."""
    check(
        bool(re.fullmatch(r"[\w.\-]+", config.name)),
        f"name={config.name!r}: use letters, digits, '_', '-' and '.'",
    )
    check_conflicts(Features(config.model))
    check_section(config, "")
    for name, source in config.data.sources.items():
        if isinstance(source, EmbeddedSource):
            check_embedded(f"data.sources.{name}", source, config)
    _check_rows(config)
    _check_float8(config.model.llm)
    _check_vocabulary(config)
    _check_schedule(config)
    check(
        config.training.evaluated == "trained" or config.optimizer.ema > 0,
        "training.evaluated=average: no average is kept; set optimizer.ema=0.999, or training.evaluated=trained",
    )
    _check_rates(config)
    check_loss(config)
    if not config.units:
        check_layout("mesh", config.mesh, config.model, alignment=config.batch.alignment)
        return
    check_units(config)
    for name, unit in config.units.items():
        layout = unit_layout(unit, config.mesh)
        towers = towers_on(config.units, name)
        check_layout(f"units.{name}", layout, config.model, towers, config.batch.alignment)


def _check_rates(config: Config) -> None:
    """Check that rates are of modules, or of parameters under another name, and that these have layers and adapters."""
    modules = rated_modules(config.model)
    of_modules = {name: r for name, r in config.optimizer.modules.items() if not r.parameters}
    modules_of_model("optimizer.modules", of_modules, modules)
    for name in config.optimizer.modules.keys() - of_modules.keys():
        check(
            name not in modules,
            f"optimizer.modules.{name}.parameters: {name} is a module; give these parameters another name",
        )
    for name, rates in of_modules.items():
        check(
            rates.layer_decay == 1 or name.removesuffix(".lora") in stacked_towers(config.model),
            f"optimizer.modules.{name}.layer_decay={rates.layer_decay}: {name} is no stack of layers; leave it out",
        )
        check(
            rates.b_ratio == 1 or f"{name.removesuffix('.lora')}.lora" in modules,
            f"optimizer.modules.{name}.b_ratio={rates.b_ratio}: {name} has no adapters (model.lora); leave it out",
        )
    _check_freezing(config)


def _check_freezing(config: Config) -> None:
    """Check that steps freeze only what is trained otherwise, and never everything at once."""
    rates, steps = config.optimizer.modules, config.training.steps
    frozen = frozen_modules(config.model)
    trained = [module for module in rated_modules(config.model) if module not in frozen]
    for name, r in rates.items():
        where = f"optimizer.modules.{name}"
        check(
            not r.is_scheduled or r.parameters or {name, f"{name}.lora"} & set(trained),
            f"{where}: {name} is frozen in every step (model), so none freezes or trains it; leave out frozen_until "
            "and frozen_from",
        )
        check(
            not r.frozen_from or r.frozen_until < r.frozen_from,
            f"{where}.frozen_from={r.frozen_from}: it is frozen until step {r.frozen_until} already; give more than "
            "that, or 0 to train it to the end",
        )
        check(
            not steps or r.frozen_until < steps,
            f"{where}.frozen_until={r.frozen_until} takes all of training.steps={steps}; give less, or freeze it in "
            "the model",
        )
    borders = {0, *(step for r in rates.values() for step in (r.frozen_until, r.frozen_from))}
    named = any(r.parameters for r in rates.values())
    for step in sorted(borders):
        check(
            named
            or step >= steps > 0
            or any(rates_of(rates, module).trains(step) for module in trained),
            f"optimizer.modules: everything is frozen after {step} steps (frozen_until, frozen_from); leave something "
            "to train",
        )


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
    check_conflicts(Features(model, loss))
    if loss.repeats_forward:
        trained = [module for module in module_names(model) if module not in frozen_modules(model)]
        check(
            bool(adapted_modules(model)) and not trained,
            f"loss.reference=adapters_off: the reference is the model without its adapters, but "
            f"{(trained or ['nothing'])[0]} is trained {'itself' if trained else 'by adapters'}; freeze it and give it "
            "or another module adapters (model.lora), or use loss.reference=stored or none",
        )


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
    for key in ("heads", "kv_heads", "full_kv_heads"):
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
    check(
        llm.convolution is None or llm.width % tensor == 0,
        f"{where}.tensor={tensor} does not divide model.llm.width={llm.width}, the channels of convolutions; use a "
        "divisor of it",
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
        if name in towers and tower.is_stack and tower.attends:
            kind = "encoders" if name in model.encoders else "generators"
            for key, count in (("heads", tower.heads), ("kv_heads", tower.key_heads)):
                check(
                    count % tensor == 0,
                    f"{where}.tensor={tensor} does not divide model.{kind}.{name}.{key}={count}; use a divisor of "
                    f"it, or {where}.encoders=data, which cuts no encoder",
                )


def _check_float8(llm: DecoderConfig) -> None:
    """Check that there is a layer that has products in FP8."""
    check(
        llm.fp8 == "off" or any(llm.float8_layers),
        f"model.llm.fp8={llm.fp8}: the first and the last layer have no products in FP8, and model.llm.layers="
        f"{llm.layers} leaves none; use model.llm.fp8=off",
    )


def _check_rows(config: Config) -> None:
    """Check that every module has rows."""
    rows = config.batch.rows
    modules = ["llm", *config.model.item_modules]
    modules_of_model("batch.rows", rows, modules)
    for name in modules:
        check(
            name in rows,
            f"batch.rows has no {name!r}; say how many packed rows it gets: batch.rows.{name}=2",
        )


def _check_vocabulary(config: Config) -> None:
    """Check that the LLM has a token for every character."""
    vocab = config.model.llm.vocab
    tokens = len(config.data.alphabet) + 2  # and padding and end of answer
    check(
        vocab >= tokens,
        f"model.llm.vocab={vocab}: data.alphabet needs {tokens} (its characters, padding and end of answer); "
        f"set model.llm.vocab={tokens} or more",
    )


def _check_schedule(config: Config) -> None:
    """Check that warm-up and decay fit, if the length of training is known before the data is opened."""
    warmup, decay = config.schedule.warmup, config.schedule.decay
    steps = config.training.steps
    check(
        warmup < steps or config.training.epochs > 0,
        f"schedule.warmup={warmup} takes all of training.steps={steps}; set schedule.warmup={steps // 10}",
    )
    check(
        warmup + decay < steps or config.training.epochs > 0,
        f"schedule.decay={decay} behind schedule.warmup={warmup} does not fit training.steps={steps}; set "
        f"schedule.decay={(steps - warmup) // 5}",
    )
