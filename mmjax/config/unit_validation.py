"""Validate the units of a config: their modules, their stages and what their schedule asks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain

from mmjax.config import Config, MeshConfig, Unit
from mmjax.config.checks import check, listed
from mmjax.config.codec import did_you_mean
from mmjax.config.training import unit_modules
from mmjax.config.unit_stages import cut_unit

# of a mesh, that the LLM's unit may have
LLM_LAYOUT = ("expert", "context", "tensor", "sequence_parallel", "exchange")


def check_units(config: Config) -> None:
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
    for name, unit in config.units.items():
        _check_unit(config, name, unit)
    _check_schedule(config)
    missing = [tower for tower in towers if tower not in owners]
    check(
        not missing,
        f"units: {(missing or [''])[0]} has no devices; add units.{(missing or [''])[0]}.data=1, or name it in another "
        "unit's modules",
    )


def towers_on(units: Mapping[str, Unit], name: str) -> list[str]:
    """Name the towers on a unit's devices: its own, and those of units beside it."""
    return [
        tower
        for key, unit in units.items()
        if name in (key, unit.beside)
        for tower in unit_modules(key, unit)
    ]


def _check_unit(config: Config, name: str, unit: Unit) -> None:
    where = f"units.{name}"
    modules = unit_modules(name, unit)
    if unit.beside:
        _check_beside(config, where, unit, modules)
    if "llm" not in modules:
        _check_without_llm(where, unit)
    check(
        unit.encoders == "tensor" or towers_on(config.units, name) != ["llm"],
        f"{where}.encoders={unit.encoders}: this unit has no encoder; set it in the units of the encoders",
    )
    _check_stages(config, name, unit, modules)


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


def _check_stages(config: Config, name: str, unit: Unit, modules: Sequence[str]) -> None:
    """Check the stages that a unit's modules are cut into."""
    where = f"units.{name}"
    model = config.model
    stages = unit.pipeline * unit.virtual
    generators = model.towers_behind("llm")
    generator = next((module for module in modules if module in generators), "")
    check(
        not generator or "llm" in modules or set(modules) <= set(generators),
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
    llm = model.llm
    check(
        stages == 1 or "llm" not in modules or not (llm.shared_layers or llm.token_inputs),
        f"{setting}: model.llm.shared_layers={llm.shared_layers} and token_inputs give layers what is not passed "
        f"between stages; use {where}.pipeline=1",
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
    for tower, start, stop in chain.from_iterable(cut_unit(model, name, unit)):
        encoder = model.encoders.get(tower)
        if encoder is not None:
            check(
                encoder.encode == "step" or stop - start == encoder.layers,
                f"{where}: model.encoders.{tower}.encode=once leaves stages of a part of its layers nothing to "
                f"compute; set {where}.pipeline=1, or encode=step",
            )
        if encoder is not None and encoder.feature_layers and stop == encoder.layers:
            check(
                start <= min(encoder.feature_layers),
                f"{where}: model.encoders.{tower}.connector reads feature_layers={listed(encoder.feature_layers)} "
                f"together, and these lie in several stages; set {where}.pipeline=1, or name other {where}.cuts",
            )
        if encoder is not None and encoder.deepstack and encoder.callbacks.after_connector:
            check(
                start <= min(encoder.deepstack),
                f"{where}: model.encoders.{tower}.callbacks.after_connector takes the tokens of all deepstack layers "
                f"together, and these lie in several stages; set {where}.pipeline=1, name other {where}.cuts, or leave "
                "the callback empty",
            )
