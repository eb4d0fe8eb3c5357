"""Describe the forecast of a run on units, and of the same run on one mesh, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mmjax.autotune.compile_run import Programs
from mmjax.autotune.forecast import MeshForecast, describe_basis, describe_links
from mmjax.config import Config
from mmjax.config.training import unit_devices
from mmjax.console import count, duration, size, table
from mmjax.cost.table import parameters
from mmjax.parallel.sharding import AXES
from mmjax.pipeline.forecast import PipelineForecast
from mmjax.planning.hardware import Cluster
from mmjax.planning.measured_file import layers_record
from mmjax.planning.schedules import schedule_name
from mmjax.training.announce import describe_stages

CompiledStages = Mapping[str, Programs]  # by stage, as `compile_run` returns them


def report_pipeline(
    config: Config,
    cluster: Cluster,
    forecasts: Sequence[PipelineForecast],
    mesh: MeshForecast | None,
    source: str,
    compiled: CompiledStages | None = None,
) -> list[str]:
    """Format the plan of a run on units for a person: the first forecast, beside the others and one mesh."""
    head = (
        f"plan   {config.name}: {count(sum(parameters(config.model).values()))} parameters, {config.training.precision}"
    )
    if not forecasts:
        return [f"{head}, on {cluster.devices} x {cluster.device.name}", f"choice {compare((), mesh)}"]
    forecast = forecasts[0]
    used = sum(map(unit_devices, forecast.config.units.values()))
    idle = f" ({cluster.devices - used} idle: start it on {used})" if used < cluster.devices else ""
    parts = {"passes": forecast.passes - forecast.transfers, "transfers": forecast.transfers}
    parts |= {"reduction": forecast.reduction, "update": forecast.update}
    plan = forecast.plan
    measured = bool(forecast.speed.measured)
    basis = describe_basis(config, cluster, forecast.speed)
    return [
        f"{head}, on {used} of {cluster.devices} x {cluster.device.name}{idle}",
        f"data   {source}; {forecast.samples:,.0f} samples and {count(forecast.tokens)} LLM tokens a step; rows are "
        + ", ".join(f"{fill:.0%} full in {tower}" for tower, fill in forecast.fill.items()),
        *describe_stages(forecast.config, forecast.stages, schedule_name(forecast.config), forecast.bubble, measured),
        f"memory {size(plan.predicted)} of {size(plan.limit.device)} a device, in {plan.fullest.name}",
        *(table(_compiled_rows(forecast, compiled)) if compiled else ()),
        f"step   {duration(forecast.seconds)}, MFU {forecast.mfu:.1%} ({basis}): "
        + ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds),
        *describe_links(cluster),
        f"choice {compare(forecasts, mesh)}",
        *assumptions(forecast),
    ]


def _compiled_rows(forecast: PipelineForecast, compiled: CompiledStages) -> list[tuple[str, ...]]:
    """Set what the compiler says of each stage's fullest program beside what is planned."""
    rows = [("stage", "planned", "by the compiler", "differs by", "fullest program")]
    for stage in forecast.stages:
        program, bytes_ = max(compiled_bytes(compiled)[stage.name].items(), key=lambda item: item[1])
        differs = f"{stage.bytes / bytes_ - 1:+.1%}"
        rows.append((stage.name, size(stage.bytes), size(bytes_), differs, program.replace("_", " and ")))
    return rows


def compiled_bytes(compiled: CompiledStages) -> dict[str, dict[str, int]]:
    """Return the bytes of compiled programs by stage and name."""
    return {stage: {name: program.bytes for name, program in of.items()} for stage, of in compiled.items()}


def compare(forecasts: Sequence[PipelineForecast], mesh: MeshForecast | None) -> str:
    """Say which of units, the fastest first, and one mesh is faster, and why, in one line."""
    ways = ["one mesh does not fit with any mesh.fsdp", *map(_describe_units, forecasts)]
    if mesh is not None:
        axes = " x ".join(f"{axis} {n}" for axis in AXES if (n := getattr(mesh.config.mesh, axis)) > 1)
        share = mesh.time.recompute / mesh.time.total  # measured, it may be below 0
        recompute = f", {share:.0%} recomputed" if share >= 0.005 else ""
        batches = mesh.config.batch.microbatches
        ways[0] = f"one mesh ({axes or 'one device'}, {batches} microbatch(es)): {mesh.mfu:.1%}{recompute}"
    described = "; ".join(ways if forecasts else [*ways, "no units fit"])
    if mesh is None or not forecasts:
        return described
    seconds = forecasts[0].seconds
    faster = "one mesh is faster" if mesh.time.total <= seconds else "units are faster"
    ratio = max(mesh.time.total, seconds) / min(mesh.time.total, seconds)
    return f"{described}: {faster}, {ratio:.2f} times"


def _describe_units(forecast: PipelineForecast) -> str:
    shape = " + ".join(
        f"{name} beside {unit.beside}"
        if unit.beside
        else f"{name} {unit_devices(unit) // unit.pipeline}" + (f" x {unit.pipeline}" if unit.pipeline > 1 else "")
        for name, unit in forecast.config.units.items()
    )
    emptiest = min(forecast.fill, key=lambda tower: forecast.fill[tower])
    return (
        f"units {shape}: {forecast.mfu:.1%}, bubble {forecast.bubble:.0%}, rows of {emptiest} "
        f"{forecast.fill[emptiest]:.0%} full"
    )


def assumptions(forecast: PipelineForecast) -> list[str]:
    """List what the passes' times assume, and how to replace it."""
    lines = ["assume that a stage waits until what it sends has arrived"]
    if not forecast.speed.measured:
        lines.append(
            "assume rates of layers: replace them by --measured FILE, or on such a device by cluster=here --profile"
        )
    return lines


def pipeline_numbers(
    forecast: PipelineForecast | None, mesh: MeshForecast | None, compiled: CompiledStages | None = None
) -> dict[str, Any]:
    """Build the JSON object of `--json` for a run on units: times in seconds, memory in bytes."""
    numbers: dict[str, Any] = {"one_mesh": None, "units": None}
    if mesh is not None:
        numbers["one_mesh"] = {
            **{axis: getattr(mesh.config.mesh, axis) for axis in AXES},
            "microbatches": mesh.config.batch.microbatches,
            "seconds": mesh.time.total,
            "mfu": mesh.mfu,
        }
    if forecast is None:
        return numbers
    seconds = {name: getattr(forecast, name) for name in ("passes", "transfers", "reduction", "update")}
    stages = [
        {
            "name": stage.name,
            "devices": stage.devices,
            "mesh": stage.mesh,
            "layers": {tower: [x.start, x.stop] for tower, x in stage.layers.items()},
            "policies": stage.policies,
            "parameters": stage.parameters,
            "in_flight": stage.in_flight,
            "memory": stage.memory,
            "forward": stage.forward,
            "backward": stage.backward,
        }
        for stage in forecast.stages
    ]
    return numbers | {
        "config": forecast.config.name,
        "cluster": str(forecast.cluster),
        "units": {name: asdict(unit) for name, unit in forecast.config.units.items()},
        "microbatches": forecast.config.batch.microbatches,
        "stages": stages,
        "room": forecast.plan.limit.device,
        "compiled": None if compiled is None else compiled_bytes(compiled),
        "seconds": seconds | {"total": forecast.seconds},
        "bubble": forecast.bubble,
        "fill": forecast.fill,
        "mfu": forecast.mfu,
        "samples": forecast.samples,
        "tokens": forecast.tokens,
        "basis": describe_basis(forecast.config, forecast.cluster, forecast.speed),
        "layers": layers_record(forecast.speed.measured),
    }
