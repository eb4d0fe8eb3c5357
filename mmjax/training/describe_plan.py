"""Describe what a run is forecast to do, for people and programs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from mmjax.autotune.compile_run import Programs
from mmjax.autotune.forecast import Forecast, RunForecast, describe_links
from mmjax.autotune.memory_plan import describe_shortage
from mmjax.config import ExpertsConfig, UnetConfig
from mmjax.config.training import unit_devices
from mmjax.console import count, duration, size, table
from mmjax.cost.table import active_parameters, parameters
from mmjax.parallel.sharding import AXES
from mmjax.planning.hardware import USABLE
from mmjax.planning.measured_file import layers_record
from mmjax.planning.memory import ACTIVATION, GB, LOADED, saved_bytes, snapshot_bytes
from mmjax.planning.remat import RunPlan
from mmjax.planning.schedules import schedule_name
from mmjax.planning.unet import unet_blocks, unets
from mmjax.runtime.compiler_options import GPU
from mmjax.training.announce import describe_memory_plan, describe_stages, replication_warning

# Compile time of a gradient program for H100 on one core, JAX 0.10.2, and of each stack of layers
# in it; fitted to 7 programs of 1 to 7 stacks, the longest of which took 28 s (docs/planning.md).
PROGRAM_SECONDS = 4.0
STACK_SECONDS = 3.5

Compiled = Mapping[str, Programs]  # by stage, as `compile_run` returns them


def describe_plan(
    forecast: RunForecast,
    source: str,
    price: float | None = None,
    compiled: Compiled | None = None,
    compared: Sequence[Forecast | None] = (),
) -> list[str]:
    """Format the plan of a run for a person.

    source: describes the lengths. compared: the best of one mesh, None where none fits, and of
    units.
    """
    chosen = forecast.chosen
    config, plan = chosen.config, chosen.plan
    counts = parameters(config.model)
    total, active = sum(counts.values()), active_parameters(config.model)
    of_token = f" ({count(active)} of them for a token)" if active < total else ""
    is_pipeline = len(plan.stages) > 1
    lines = [
        f"plan   {config.name}: {count(total)} parameters{of_token}, {config.training.precision}, on "
        f"{_describe_devices(chosen)}",
        f"data   {source}; {chosen.samples:,.0f} samples and {count(chosen.tokens)} LLM tokens a step",
        *table(_module_rows(chosen)),
    ]
    if not plan.fits:
        reasons = (describe_shortage(plan), forecast.longest, forecast.remedy)
        lines.append(f"DOES NOT FIT: {'; '.join(filter(None, reasons))}")
    if is_pipeline:
        measured = bool(chosen.speed.measured)
        schedule = schedule_name(config)
        lines += describe_stages(config, plan.stages, schedule, chosen.run_time.bubble, measured)
    lines += describe_memory_plan(plan)
    if compiled is not None:
        lines += _describe_compiled(plan, compiled)
    parts = ", ".join(
        f"{name} {duration(seconds)}" for name, seconds in asdict(chosen.time).items() if seconds
    )
    lines += [
        f"step   {duration(chosen.seconds)}, MFU {chosen.mfu:.1%} ({chosen.basis}): {parts}",
        *_describe_encoding(chosen),
        *describe_links(chosen.cluster),
        *expert_lines(config.model.llm.experts, _experts(chosen)),
        *table(_balance_rows(forecast)),
        *([f"choice {compare(compared)}"] if compared else ()),
        f"start  about {_one_digit(compile_seconds(chosen)):,.0f} s of compiling, measured for H100 on one CPU core: "
        f"{len(chosen.layout.shapes)} shape(s), {layer_stacks(plan)} run(s) of layers",
        *_describe_whole_run(forecast, price),
        *(f"limits {line}" for line in limits(forecast)),
    ]
    return lines + [f"assume {line}" for line in _assumptions(chosen)]


def _describe_encoding(forecast: Forecast) -> Iterator[str]:
    """Say what is stored of encoders that encode once, and how long steps take until it is, and from then on."""
    for name, encoding in forecast.encoding.items():
        yield (
            f"       {name} encodes once: {encoding.items:,} items, {size(encoding.size)} on disk, "
            f"{duration(encoding.seconds)} a step until each was encoded"
        )
    if forecast.encoding:
        yield (
            f"       {duration(forecast.first_seconds)} a step in epoch 1, {duration(forecast.seconds)} from epoch 2 on"
        )
        needed = sum(encoding.size for encoding in forecast.encoding.values())
        space = forecast.config.data.encoded_space
        if needed > space * GB:
            yield (
                f"       NOT ALL OF IT IS STORED in data.encoded_space={space:g} GB: {1 - space * GB / needed:.0%} is "
                f"encoded in every epoch; set data.encoded_space={math.ceil(needed / GB)}"
            )


def _describe_devices(forecast: Forecast) -> str:
    """Name a forecast's devices, and their mesh where there is one."""
    config, cluster = forecast.config, forecast.cluster
    if config.units:
        used = sum(map(unit_devices, config.units.values()))
        idle = (
            f" ({cluster.devices - used} idle: start it on {used})"
            if used < cluster.devices
            else ""
        )
        return f"{used} of {cluster.devices} x {cluster.device.name}{idle}"
    axes = " x ".join(f"{axis} {n}" for axis, n in forecast.mesh.items() if n > 1) or "one device"
    if config.mesh.sequence_parallel != "off":
        axes += f", mesh.sequence_parallel={config.mesh.sequence_parallel}"
    return f"{cluster.devices} x {cluster.device.name} ({axes})"


def _experts(forecast: Forecast) -> int:
    """Count the devices that share a layer's experts, at most."""
    return max(
        forecast.mesh["expert"], *(unit.expert for unit in forecast.config.units.values()), 1
    )


def expert_lines(experts: ExpertsConfig | None, devices: int) -> list[str]:
    """Say how tokens reach the devices that share a layer's experts."""
    if experts is None or devices == 1:
        return []
    share = experts.sent_at_once(10_000, devices) / 10_000
    if share == 1:
        return [
            f"       experts: the tokens of {devices} devices are gathered, for an even router sends each nearly all"
        ]
    return [
        f"       experts: an all-to-all sends each of {devices} devices up to {share:.0%} of a device's tokens at once"
    ]


def _describe_compiled(plan: RunPlan, compiled: Compiled) -> Iterator[str]:
    """Set what the compiler says of every stage's programs beside what is planned, with a remedy for what it does."""
    if len(plan.stages) == 1:
        (programs,) = compiled.values()
        peak = max(program.bytes for program in programs.values())
        update = size(programs["update"].bytes)
        differs = f"what is predicted differs by {plan.predicted / peak - 1:+.1%}"
        yield f"       {size(peak)} by the compiler, {update} in the update; {differs}"
    else:
        rows = [("stage", "planned", "by the compiler", "differs by", "fullest program")]
        for stage in plan.stages:
            name, program = max(compiled[stage.name].items(), key=lambda item: item[1].bytes)
            differs = f"{stage.bytes / program.bytes - 1:+.1%}"
            rows.append(
                (
                    stage.name,
                    size(stage.bytes),
                    size(program.bytes),
                    differs,
                    name.replace("_", " and "),
                )
            )
        yield from table(rows)
    if again := sum(
        program.rematerialized for programs in compiled.values() for program in programs.values()
    ):
        yield (
            f"       XLA COMPUTES {again} INSTRUCTIONS AGAIN BY ITSELF to take less memory: lower "
            "mesh.memory, so that remat does it, or raise compiler.xla_gpu_memory_limit_slop_factor"
        )


def _module_rows(chosen: Forecast) -> list[tuple[str, ...]]:
    config = chosen.config
    rows = [("module", "parameters", "rows a rank", "lengths", "fill", "computed again")]
    counts = parameters(config.model)
    for k, name in enumerate(("llm", *config.model.item_modules)):
        lengths = sorted({shape.lengths[k] for shape in chosen.layout.shapes})
        policies = chosen.plan.policies.get(name) or _policies_of_blocks(unets(config.model)[name])
        recomputed = sum(policy != "none" for policy in policies)
        how = getattr(
            {"llm": config.model.llm, **config.model.encoders}.get(name), "quantize", "none"
        )
        float8 = sum(config.model.llm.float8_layers) if name == "llm" else 0
        rows.append(
            (
                name,
                count(counts[name])
                + (f" {how}" if how != "none" else "")
                + f", {float8} layers in FP8" * (float8 > 0),
                str(chosen.layout.rows[k]),
                "/".join(map(str, lengths)),
                f"{chosen.fill[name]:.2f}",
                f"in {recomputed} of {len(policies)} layers" if recomputed else "nothing",
            )
        )
    return rows


def _policies_of_blocks(unet: UnetConfig) -> list[str]:
    """List the remat policies of a UNet's blocks, all of which have one."""
    return [unet.remat] * len(unet_blocks(unet))


def _balance_rows(forecast: RunForecast) -> list[tuple[str, ...]]:
    ratios = [f"dist ratio {name}" for name in forecast.chosen.dist_ratio]
    rows = [("balance", *ratios, "fill LLM", "padding", "ranks wait", "step", "MFU")]
    for kind, chosen in forecast.by_balance.items():
        figures = [
            *(f"{ratio:.3f}" for ratio in chosen.dist_ratio.values()),
            f"{chosen.fill['llm']:.2f}",
        ]
        waits = [f"{chosen.waits.padding:.1%}", f"{chosen.waits.wait:.1%}"]
        rows.append((kind, *figures, *waits, duration(chosen.seconds), f"{chosen.mfu:.1%}"))
    return rows


def compare(forecasts: Sequence[Forecast | None]) -> str:
    """Say which of one mesh and units is faster, and why, in one line."""
    mesh, *units = forecasts
    ways = ["one mesh does not fit with any mesh.fsdp", *map(_describe_units, units)]
    if mesh is not None:
        axes = " x ".join(f"{axis} {n}" for axis, n in mesh.mesh.items() if n > 1)
        share = mesh.time.recompute / mesh.seconds  # measured, it may be below 0
        recompute = f", {share:.0%} recomputed" if share >= 0.005 else ""
        batches = mesh.config.batch.microbatches
        ways[0] = (
            f"one mesh ({axes or 'one device'}, {batches} microbatch(es)): {mesh.mfu:.1%}{recompute}"
        )
    described = "; ".join(ways if units else [*ways, "no units fit"])
    if mesh is None or not units:
        return described
    seconds = min(forecast.seconds for forecast in units)
    faster = "one mesh is faster" if mesh.seconds <= seconds else "units are faster"
    return f"{described}: {faster}, {max(mesh.seconds, seconds) / min(mesh.seconds, seconds):.2f} times"


def _describe_units(forecast: Forecast) -> str:
    shape = " + ".join(
        f"{name} beside {unit.beside}"
        if unit.beside
        else f"{name} {unit_devices(unit) // unit.pipeline}"
        + (f" x {unit.pipeline}" if unit.pipeline > 1 else "")
        for name, unit in forecast.config.units.items()
    )
    emptiest = min(forecast.fill, key=lambda tower: forecast.fill[tower])
    return (
        f"units {shape}: {forecast.mfu:.1%}, bubble {forecast.run_time.bubble:.0%}, rows of {emptiest} "
        f"{forecast.fill[emptiest]:.0%} full"
    )


def layer_stacks(plan: RunPlan) -> int:
    """Count the stacks of the stage with most: consecutive layers of one policy, compiled once and scanned."""
    return max(
        sum(len(list(groupby(stage.policies[tower]))) for tower in stage.activations)
        for stage in plan.stages
    )


def compile_seconds(forecast: Forecast) -> float:
    """Estimate the seconds to compile every shape on a cold cache, of the stage that takes longest."""
    return len(forecast.layout.shapes) * (
        PROGRAM_SECONDS + STACK_SECONDS * layer_stacks(forecast.plan)
    )


def _one_digit(number: float) -> float:
    """Round to one significant digit, for estimates that are no better: 164 to 200, 7.4 to 7."""
    return float(f"{number:.1g}")


def _describe_whole_run(forecast: RunForecast, price: float | None) -> list[str]:
    """Format the time and cost of the whole run, and the disk that its checkpoints take."""
    chosen = forecast.chosen
    config = chosen.config
    device_hours = forecast.hours * chosen.cluster.devices
    cost = "" if price is None else f", {price * device_hours:,.0f} at {price:g} an hour"
    checkpoint = checkpoint_bytes(chosen)
    folder = Path(config.run or "runs").absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    keep = config.training.keep
    verdict = "" if keep * checkpoint < free else ": TOO LITTLE HERE"
    return [
        f"run    {forecast.steps:,} such steps take {_hours(forecast.hours)}, {device_hours:,.1f} device hours{cost}",
        f"saves  {size(checkpoint)} x {keep} kept; {size(free)} are free where this plan was made{verdict}",
        *_describe_snapshots(chosen),
    ]


def _describe_snapshots(forecast: Forecast) -> list[str]:
    """Format what snapshots in memory take of every host, and what the run survives by them."""
    config = forecast.config.training
    if not config.memory_every:
        return []
    if hosts := hosts_of_state(forecast) - 1:
        kept = f"with copies of a neighbour's, since {hosts + 1} hosts share the state; a lost host loses nothing"
    elif forecast.cluster.nodes > 1:
        kept = "without copies of others': every host has the whole state"
    else:
        kept = "of processes that are lost, not of this host"
    return [
        f"       snapshots after every {config.memory_every} steps take {size(host_snapshot_bytes(forecast))} of each "
        f"host's memory ({config.memory_folder}), {kept}"
    ]


def hosts_of_state(forecast: Forecast) -> int:
    """Count the hosts over which one copy of the state lies."""
    cluster = forecast.cluster
    if forecast.config.units or forecast.config.optimizer.over_data:
        return cluster.nodes
    shards = math.prod(count for axis, count in forecast.mesh.items() if axis != "data")
    return min(cluster.nodes, -(-shards // cluster.per_node))


def host_snapshot_bytes(forecast: Forecast) -> float:
    """Compute the bytes that snapshots take of a host's memory; 0 where none are taken."""
    if not forecast.config.training.memory_every:
        return 0.0
    return snapshot_bytes(checkpoint_bytes(forecast), hosts_of_state(forecast))


def checkpoint_bytes(forecast: Forecast) -> int:
    """Compute the bytes of one checkpoint."""
    config = forecast.config
    return saved_bytes(config.model, ACTIVATION[config.training.precision], config.optimizer)


def limits(forecast: RunForecast) -> list[str]:
    """List the bottlenecks of the run with a remedy for each."""
    chosen = forecast.chosen
    time, plan = chosen.time, chosen.plan
    remedies = []
    if not plan.fits:
        remedies.append(
            "memory: shard over more devices (fsdp), use more batch.microbatches, or a smaller model"
        )
    if _rematerializes(chosen):
        remedies.append(
            "XLA would compute products again by itself, to take less memory: lower mesh.memory, or raise "
            "compiler.xla_gpu_memory_limit_slop_factor"
        )
    if uneven := replication_warning(plan):
        remedies.append(uneven)
    if time.shards > 0.05 * time.total:
        remedies.append(
            f"{time.shards / time.total:.0%} of the step waits for parameters to be gathered: more samples a step, or "
            "a smaller fsdp"
        )
    if time.recompute > 0.05 * time.total:
        remedies.append(
            f"{time.recompute / time.total:.0%} of the step is computing again: a larger fsdp leaves room"
        )
    if time.idle > 0.1 * time.total:
        remedies.append(
            f"{time.idle / time.total:.0%} of the step stages wait for each other: more batch.microbatches, other cuts "
            "or devices for each unit; units=auto looks for them"
        )
    remedies += forecast.waits
    worst = max(chosen.dist_ratio, key=lambda name: chosen.dist_ratio[name])
    if chosen.dist_ratio[worst] > 0.05:
        remedies.append(
            f"ranks are uneven in {worst} ({chosen.dist_ratio[worst]:.2f}): more samples a step"
        )
    emptiest = min(chosen.fill, key=lambda name: chosen.fill[name])
    if chosen.fill[emptiest] < 0.85:
        ranks = chosen.layout.topology.ranks
        divides = chosen.config.batch.rows[emptiest] % ranks == 0
        remedy = (
            "use more samples a step"
            if divides
            else f"make batch.rows.{emptiest} a multiple of {ranks}"
        )
        remedies.append(
            f"rows of {emptiest} are {chosen.fill[emptiest]:.0%} full: {remedy}, or more batch.shapes"
        )
    return remedies or ["nothing stands out: the devices compute most of the time"]


def _rematerializes(forecast: Forecast) -> bool:
    """Predict whether one mesh's program of gradients takes more than XLA allows: a share of what arguments leave."""
    target = forecast.cluster.device.cuda
    if target is None or len(forecast.plan.stages) > 1:
        return False
    plan = forecast.plan
    fixed = plan.fullest.fixed
    waiting = fixed["batch"] * (1 - 1 / (LOADED * forecast.config.batch.microbatches))
    arguments = fixed["parameters"] + fixed["gradients"] + fixed["batch"] - waiting
    temporary = plan.predicted - arguments - fixed["optimizer"] - waiting
    share = {**GPU, **forecast.config.compiler}["xla_gpu_memory_limit_slop_factor"]
    return temporary > float(share) / 100 * (USABLE * target.memory - arguments)


def _hours(hours: float) -> str:
    """Format 1.5 as 1.5 hours, 0.5 as 30.0 minutes and 0.001 as 3.6 seconds."""
    for length, unit in ((1.0, "hours"), (1 / 60, "minutes")):
        if hours >= length:
            return f"{hours / length:,.1f} {unit}"
    return f"{3600 * hours:,.1f} seconds"


def _assumptions(forecast: Forecast) -> Iterator[str]:
    """List what the times of stages assume, and how to replace it."""
    if len(forecast.plan.stages) > 1:
        yield "that a stage waits until what it sends has arrived"
        if not forecast.speed.measured:
            yield "rates of layers: replace them by --measured FILE, or on such a device by cluster=here --profile"


def plan_numbers(
    forecast: RunForecast,
    price: float | None = None,
    compiled: Compiled | None = None,
    compared: Sequence[Forecast | None] = (),
) -> dict[str, Any]:
    """Build the JSON object of `--json`: times in seconds, memory and checkpoints in bytes. Arguments as above."""
    chosen = forecast.chosen
    config, plan = chosen.config, chosen.plan
    device_hours = forecast.hours * chosen.cluster.devices
    mesh = next(iter(compared), None)
    programs = {
        stage: {
            name: {
                "bytes": p.bytes,
                "rematerialized": p.rematerialized,
                "synchronous": p.synchronous,
            }
            for name, p in stage_programs.items()
        }
        for stage, stage_programs in (compiled or {}).items()
    }
    return {
        "config": config.name,
        "cluster": str(chosen.cluster),
        "mesh": None if config.units else chosen.mesh,
        "units": {name: asdict(unit) for name, unit in config.units.items()},
        "microbatches": config.batch.microbatches,
        "parameters": parameters(config.model),
        "samples": chosen.samples,
        "tokens": chosen.tokens,
        "stages": [
            {
                "name": stage.name,
                "devices": stage.devices,
                "mesh": stage.mesh,
                "layers": {
                    tower: [layers.start, layers.stop] for tower, layers in stage.layers.items()
                },
                "policies": stage.policies,
                "parameters": stage.parameters,
                "in_flight": stage.in_flight,
                "memory": stage.memory,
                "forward": stage.forward,
                "backward": stage.backward,
            }
            for stage in plan.stages
        ],
        "memory": plan.fullest.fixed | {"activations": plan.fullest.activations},
        "room": plan.limit.device,
        "compiled": max(
            (p["bytes"] for by_name in programs.values() for p in by_name.values()), default=None
        ),
        "programs": programs,
        "remat": plan.policies,
        "loss_chunks": plan.loss_chunks,
        "seconds": _seconds(chosen),
        "encoding": {name: encoding._asdict() for name, encoding in chosen.encoding.items()},
        "first_seconds": chosen.first_seconds,
        "bubble": chosen.run_time.bubble,
        "mfu": chosen.mfu,
        "fill": chosen.fill,
        "balance": config.batch.balance.kind,
        "ways": {
            kind: {
                "dist_ratio": balanced.dist_ratio,
                "ranks_wait": balanced.waits.wait,
                "padding": balanced.waits.padding,
                "fill": balanced.fill,
                "seconds": _seconds(balanced),
                "mfu": balanced.mfu,
                "fits": balanced.plan.fits,
                "memory": balanced.plan.device,
            }
            for kind, balanced in forecast.by_balance.items()
        },
        "one_mesh": mesh
        and {
            **{axis: mesh.mesh[axis] for axis in AXES},
            "microbatches": mesh.config.batch.microbatches,
            "seconds": mesh.seconds,
            "mfu": mesh.mfu,
        },
        "nearest": forecast.remedy,
        "basis": chosen.basis,
        "layers": layers_record(chosen.speed.measured),
        "compile": compile_seconds(chosen),
        "hours": forecast.hours,
        "device_hours": device_hours,
        "cost": None if price is None else price * device_hours,
        "checkpoint": checkpoint_bytes(chosen),
        "snapshots": host_snapshot_bytes(chosen),
        "limits": limits(forecast),
    }


def _seconds(forecast: Forecast) -> dict[str, float]:
    return asdict(forecast.time) | {"total": forecast.seconds}
