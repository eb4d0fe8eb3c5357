"""See what a run will do, without its hardware: ``python -m mmjax.plan CONFIG cluster=h100x8x8 [a.b=value ...]``.

``cluster=here`` is this machine; with ``--profile``, the layers' times are measured on it. ``units=auto`` looks for the
fastest units, devices for each module, and compares them with the best single mesh. ``--measured FILE`` states rates
that were measured on such a cluster, in place of those that plans assume.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import CompiledProgram, compile_run
from mmjax.autotune.forecast import (
    BalanceForecast,
    MeshForecast,
    RunForecast,
    compile_forecast,
    describe_links,
    forecast_best_mesh,
    forecast_run,
)
from mmjax.autotune.layer_profile import MeasureSpeed, Shapes
from mmjax.autotune.memory_plan import apply_memory_plan, describe_shortage, device_speed
from mmjax.config import Config, ExpertsConfig, UnetConfig
from mmjax.config.codec import key_of
from mmjax.config.loading import config_parameters, copy_config, default_config, find_config, load
from mmjax.config.other_names import parse_words
from mmjax.console import count, duration, print_lines, size, table
from mmjax.cost.table import active_parameters, parameters
from mmjax.data.plan.length_index import (
    LengthIndex,
    build_index,
    index_of_lengths,
    interleaved_corpus,
    omni_corpus,
    read_lengths,
)
from mmjax.data.plan.sampler import mixture_weights
from mmjax.data.sources.opening import open_sources
from mmjax.errors import PLOT_SUFFIXES, CommandParser, UserError, check_output, exit_process, run_command
from mmjax.parallel.sharding import mesh_sizes
from mmjax.pipeline.choose_units import choose_units
from mmjax.pipeline.forecast import PipelineForecast, forecast_pipeline
from mmjax.planning.hardware import USABLE, Cluster, check_float8, parse_cluster
from mmjax.planning.measured_file import layers_record, read_measured
from mmjax.planning.memory import ACTIVATION, LOADED, saved_bytes
from mmjax.planning.plan_file import plan_text
from mmjax.planning.schedules import schedule_name
from mmjax.planning.step_time import LayerTimes, Speed
from mmjax.planning.unet import unet_blocks
from mmjax.runtime.compiler_options import GPU
from mmjax.runtime.devices import local_cluster
from mmjax.runtime.run_trust import sign_text
from mmjax.training.announce import describe_memory_plan, replication_warning
from mmjax.training.pipeline_report import (
    pipeline_numbers,
    report_pipeline,
)

SYNTHETIC_SAMPLES = 200_000  # lengths drawn from a seed where a config names no data
# Compile time of a gradient program for H100 on one core, JAX 0.10.2, and of each stack of layers in it; fitted to 7
# programs of 1 to 7 stacks, the longest of which took 28 s (docs/planning.md).
PROGRAM_SECONDS = 4.0
STACK_SECONDS = 3.5
HERE = "here"  # in place of a cluster's name
AUTO = "units=auto"  # in place of a config's units: those of the fastest allocation
COMMAND_KEYS = ("cluster", "price")  # words that are the command's, not the config's


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_words(_parser(), argv)
    if args.out is not None:
        check_output("--out", args.out)
    if args.picture is not None:
        check_output("--picture", args.picture, PLOT_SUFFIXES)
    options = {key: value for key, _, value in (w.partition("=") for w in args.words) if key in COMMAND_KEYS}
    words = [word for word in args.words if word.partition("=")[0] not in COMMAND_KEYS]
    named = next((word for word in words if "=" not in word), "")
    path = find_config(named) if named else default_config()
    chooses = AUTO in words
    overrides = [word for word in words if word not in (named, AUTO)]
    config = load(path, overrides)
    if not options.get("cluster"):
        raise UserError("say on which cluster: cluster=h100x8x8 is 8 nodes of 8 H100, cluster=here this machine")
    on_this_machine = options["cluster"] == HERE
    price = _parse_price(options.get("price"))
    if args.profile and not on_this_machine:
        raise UserError(f"--profile times layers on this machine: say cluster={HERE}, not cluster={options['cluster']}")
    cluster = local_cluster() if on_this_machine else parse_cluster(options["cluster"])
    check_float8(config.model.llm.fp8, cluster.device)
    layers: dict[str, LayerTimes] = {}
    if args.measured is not None:
        cluster, layers = read_measured(args.measured, cluster, config)
    devices = aot_devices(cluster) if args.compile else None
    index, weights, source = _open_lengths(config, path, args.lengths)
    measure_speed = _speed_by(config, cluster, layers, on_this_machine, args.profile)
    lengths = index, weights, source
    if config.units or chooses:
        planned = _plan_units(
            args, config, cluster, lengths, chooses=chooses, measure_speed=measure_speed, devices=devices
        )
    else:
        planned = _plan_mesh(args, config, cluster, lengths, price, measure_speed=measure_speed, devices=devices)
    if args.out is not None:
        _write_plan(args.out, path, config, overrides, cluster, planned)


class Planned(NamedTuple):
    """The planned run, for a plan file: the config, None where it does not fit, and the expected results."""

    config: Config | None
    expected: dict[str, float]


Lengths = tuple[LengthIndex, list[float], str]  # index, weight of each source, and a description for the report


def _plan_mesh(
    args: argparse.Namespace,
    config: Config,
    cluster: Cluster,
    lengths: Lengths,
    price: float | None,
    *,
    measure_speed: MeasureSpeed,
    devices: Sequence[jax.Device] | None,
) -> Planned:
    """Forecast a run on one mesh, and report and draw it as the command line says."""
    index, weights, source = lengths
    forecast = forecast_run(config, cluster, index, weights, measure_speed)
    compiled = None if devices is None else compile_forecast(forecast, devices)
    if args.json:
        print_lines(json.dumps(as_numbers(forecast, price, compiled)))
    else:
        print_lines(*report(forecast, price, source, compiled))
    if args.picture is not None:
        from mmjax.reporting.plan_plot import plot_plan  # matplotlib looks for fonts when it is first imported

        plot_plan(args.picture, forecast)
    return _planned_mesh(forecast)


def _speed_by(
    config: Config, cluster: Cluster, layers: Mapping[str, LayerTimes], on_this_machine: bool, profile: bool
) -> MeasureSpeed:
    """Return the function that measures the devices' speed: layer times as stated, else as timed on this machine."""

    def measure(shapes: Shapes) -> Speed:
        rates = cluster.device.rates(config.training.precision)
        unstated = {tower: shape for tower, shape in shapes.items() if tower not in layers}
        timed = device_speed(config, unstated, jax.devices()[0], profile).measured if on_this_machine else {}
        return Speed(rates, {**timed, **layers})

    return measure


def _plot_step(path: Path, forecast: PipelineForecast) -> None:
    from mmjax.reporting.timeline_plot import plot_timelines  # as above

    name = schedule_name(forecast.config)
    headings = {f"planned: {name}, {forecast.config.batch.microbatches} microbatches": forecast.timeline}
    subtitle = f"one step on {forecast.cluster}, transfers included"
    plot_timelines(path, forecast.config.name, subtitle, headings, [stage.name for stage in forecast.stages])


def _planned_mesh(forecast: RunForecast) -> Planned:
    """Return the config with the mesh and the memory plan of a forecast."""
    chosen = forecast.chosen
    memory = chosen.memory_plan
    expected = {"seconds": chosen.time.total, "mfu": forecast.mfu(chosen), "memory": memory.device}
    if not memory.fits:
        return Planned(None, expected)
    # What the tokens between layers do is chosen for tensor-parallel devices alone.
    config = forecast.config
    sequence_parallel = config.mesh.sequence_parallel if forecast.mesh["tensor"] > 1 else "auto"
    mesh = replace(config.mesh, **forecast.mesh, sequence_parallel=sequence_parallel)
    return Planned(apply_memory_plan(replace(config, mesh=mesh), memory.policies, memory.loss_chunks), expected)


def _planned_units(forecast: PipelineForecast) -> Planned:
    config = forecast.config
    plan = forecast.plan
    expected = {"seconds": forecast.seconds, "mfu": forecast.mfu, "memory": plan.predicted}
    return Planned(apply_memory_plan(config, plan.policies, plan.loss_chunks), expected)


def _planned_best_mesh(forecast: MeshForecast, devices: int) -> Planned:
    memory = forecast.memory_plan
    mesh = replace(forecast.config.mesh, **mesh_sizes(forecast.config.mesh, devices))
    expected = {"seconds": forecast.time.total, "mfu": forecast.mfu, "memory": memory.device}
    config = apply_memory_plan(replace(forecast.config, mesh=mesh), memory.policies, memory.loss_chunks)
    return Planned(config, expected)


def _write_plan(
    out: Path, path: Path, config: Config, words: Sequence[str], cluster: Cluster, planned: Planned
) -> None:
    """Write the plan file of a config, loaded from `path` with these words."""
    if planned.config is None:
        raise UserError(f"--out {out}: nothing is written, for the run does not fit; see what limits it")
    parameters = config_parameters(path)
    arguments = [word for word in words if key_of(word) in parameters]
    overrides = [word for word in words if key_of(word) not in parameters]
    unnamed = [word for word in words if key_of(word) != "name" or word in arguments]
    name = config.name if unnamed == list(words) else load(path, unnamed).name
    text = plan_text(planned.config, config, name, arguments, overrides, str(cluster), planned.expected)
    out.write_text(sign_text(text))


def _parser() -> CommandParser:
    """Make the parser of the command line."""
    parser = CommandParser(prog="python -m mmjax.plan", description=__doc__, allow_abbrev=False)
    words = (
        "a config's file or name (default: tiny_omni); cluster=DEVICExNODESxCOUNT, or here: this machine; price=N, of "
        "a device for an hour"
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG | cluster=h100x8x8 | price=2.5 | a.b=value", help=words)
    parser.add_argument(
        "--lengths", nargs="+", type=Path, default=[], metavar="F.npz", help="of samples, in place of the config's data"
    )
    parser.add_argument(
        "--out", type=Path, metavar="plan.json", help="write a plan that mmjax.train takes as plan=plan.json"
    )
    parser.add_argument(
        "--profile", action="store_true", help="time layers on this machine (cluster=here); kept for the next time"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE.json", help="rates measured on such a cluster, in place of assumed ones"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="F.png|svg",
        help="draw memory, time and each rank's work; of units, a step's passes",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the step for the cluster's GPUs, none of which need be here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _plan_units(
    args: argparse.Namespace,
    config: Config,
    cluster: Cluster,
    lengths: Lengths,
    *,
    chooses: bool,
    measure_speed: MeasureSpeed,
    devices: Sequence[jax.Device] | None,
) -> Planned:
    """Forecast units, those of the config or chosen, beside one mesh, and report and draw them."""
    index, weights, source = lengths
    arguments = config, cluster, index, weights, measure_speed
    if chooses:
        pipelines, mesh = choose_units(*arguments)
    else:
        pipelines = [forecast_pipeline(*arguments)]
        mesh = forecast_best_mesh(config, cluster, index, weights, pipelines[0].speed)
    pipeline = next(iter(pipelines), None)
    if pipeline is None and mesh is None:
        raise UserError(f"neither one mesh nor any units fit {cluster}; use more devices, or a smaller model")
    programs = None
    if devices is not None and pipeline is not None:
        plan = pipeline.plan
        planned = apply_memory_plan(pipeline.config, plan.policies, plan.loss_chunks)
        programs = compile_run(planned, pipeline.layout, plan, devices)
    if args.json:
        print_lines(json.dumps(pipeline_numbers(pipeline, mesh, programs)))
    else:
        print_lines(*report_pipeline(config, cluster, pipelines, mesh, source, programs))
    if args.picture is not None and pipeline is not None:
        _plot_step(args.picture, pipeline)
    # Units that a person wrote are wanted; units=auto takes what is faster.
    units = pipeline is not None and (not chooses or mesh is None or pipeline.seconds < mesh.time.total)
    return _planned_units(pipeline) if units else _planned_best_mesh(mesh, cluster.devices)


def _parse_price(text: str | None) -> float | None:
    """Parse `price=`, the cost of a device for an hour. Raises UserError for anything but a number of 0 or more."""
    if text is None:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not price >= 0:  # "nan" parses, and is refused here
        raise UserError(f"price={text}: give what a device costs for an hour, as a number")
    return price


def _open_lengths(config: Config, path: Path, files: Sequence[Path]) -> Lengths:
    """Open a run's length index: from the config's data, from files, or drawn from a seed where there is neither."""
    modules = config.model.item_modules
    if config.data.sources and not files:
        with tempfile.TemporaryDirectory() as folder:
            copy_config(
                path, Path(folder)
            )  # a FunctionSource looks its function up in a run folder's copy of the config
            index = build_index(open_sources(config, "train", Path(folder)), modules, config.model.llm)
        return index, mixture_weights(config.data, index), f"{len(index):,} samples"
    keys = ("llm_tokens", *modules)
    if files:
        index = index_of_lengths(read_lengths(files, keys), modules, config.model.llm)
        return index, [1.0], f"lengths of {', '.join(map(str, files))}"
    if config.model.generators:
        lengths = interleaved_corpus(SYNTHETIC_SAMPLES, config.seed, modules)
    else:
        lengths = omni_corpus(SYNTHETIC_SAMPLES, config.seed)
    if missing := [key for key in keys if key not in lengths]:
        raise UserError(
            f"the config names no data and there are no made lengths for {missing[0]!r}; give your own with --lengths"
        )
    index = index_of_lengths(lengths, modules, config.model.llm)
    return index, [1.0], "the config names no data: lengths made from a seed"


# ----------------------------------------------------------------------------------------------------------- the report


Compiled = Mapping[str, CompiledProgram]  # by program, as `compile_forecast` returns them


def report(forecast: RunForecast, price: float | None, source: str, compiled: Compiled | None = None) -> list[str]:
    """Format the plan for a person. source: describes the lengths."""
    config = forecast.config
    chosen = forecast.chosen
    counts = parameters(config.model)
    axes = " x ".join(f"{axis} {n}" for axis, n in forecast.mesh.items() if n > 1) or "one device"
    if config.mesh.sequence_parallel != "off":
        axes += f", mesh.sequence_parallel={config.mesh.sequence_parallel}"
    total, active = sum(counts.values()), active_parameters(config.model)
    of_token = f" ({count(active)} of them for a token)" if active < total else ""
    lines = [
        f"plan   {config.name}: {count(total)} parameters{of_token}, {config.training.precision}, on "
        f"{forecast.cluster.devices} x {forecast.cluster.device.name} ({axes})",
        f"data   {source}; {forecast.samples:,.0f} samples and {count(forecast.tokens)} LLM tokens a step",
        *table(_module_rows(forecast)),
    ]
    if not chosen.memory_plan.fits:
        reasons = (describe_shortage(chosen.memory_plan), forecast.longest, forecast.nearest)
        lines.append(f"DOES NOT FIT: {'; '.join(filter(None, reasons))}")
    lines += describe_memory_plan(chosen.memory_plan)
    if compiled is not None:
        lines += _compiled_lines(chosen.memory_plan.predicted, compiled)
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in asdict(chosen.time).items() if seconds)
    lines += [
        f"step   {duration(chosen.time.total)}, MFU {forecast.mfu(chosen):.1%} ({forecast.basis}): {parts}",
        *describe_links(forecast.cluster),
        *expert_lines(config.model.llm.experts, forecast.mesh["expert"]),
        *table(_balance_rows(forecast)),
        f"start  about {_one_digit(compile_seconds(chosen)):,.0f} s of compiling, measured for H100 on one CPU core: "
        f"{len(chosen.layout.shapes)} shape(s), {layer_stacks(chosen)} run(s) of layers",
    ]
    return [*lines, *_whole_run(forecast, price), *(f"limits {line}" for line in limits(forecast))]


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


def _compiled_lines(predicted: float, compiled: Compiled) -> list[str]:
    """Format what the compiler says of a step's programs, with a remedy for what it does by itself."""
    peak = max(program.bytes for program in compiled.values())
    update = size(compiled["update"].bytes)
    differs = f"what is predicted differs by {predicted / peak - 1:+.1%}"
    lines = [f"       {size(peak)} by the compiler, {update} in the update; {differs}"]
    if computed_again := sum(program.rematerialized for program in compiled.values()):
        lines.append(
            f"       XLA COMPUTES {computed_again} INSTRUCTIONS AGAIN BY ITSELF to take less memory: lower "
            "mesh.memory, so that remat does it, or raise compiler.xla_gpu_memory_limit_slop_factor"
        )
    return lines


def _module_rows(forecast: RunForecast) -> list[tuple[str, ...]]:
    chosen = forecast.chosen
    config = forecast.config
    rows = [("module", "parameters", "rows a rank", "lengths", "fill", "computed again")]
    counts = parameters(config.model)
    for k, name in enumerate(("llm", *config.model.item_modules)):
        lengths = sorted({shape.lengths[k] for shape in chosen.layout.shapes})
        policies = chosen.memory_plan.policies.get(name) or _policies_of_blocks(config.model.generators[name])
        recomputed = sum(policy != "none" for policy in policies)
        how = getattr({"llm": config.model.llm, **config.model.encoders}.get(name), "quantize", "none")
        float8 = sum(config.model.llm.float8_layers) if name == "llm" else 0
        rows.append(
            (
                name,
                count(counts[name]) + (f" {how}" if how != "none" else "") + f", {float8} layers in FP8" * (float8 > 0),
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
        figures = [*(f"{ratio:.3f}" for ratio in chosen.dist_ratio.values()), f"{chosen.fill['llm']:.2f}"]
        waits = [f"{chosen.waits.padding:.1%}", f"{chosen.waits.wait:.1%}"]
        rows.append((kind, *figures, *waits, duration(chosen.time.total), f"{forecast.mfu(chosen):.1%}"))
    return rows


def layer_stacks(chosen: BalanceForecast) -> int:
    """Count the stacks of all modules: consecutive layers of one remat policy, compiled once and scanned over."""
    return sum(len(list(groupby(policies))) for policies in chosen.memory_plan.policies.values())


def compile_seconds(chosen: BalanceForecast) -> float:
    """Estimate the seconds to compile every shape on a cold cache."""
    return len(chosen.layout.shapes) * (PROGRAM_SECONDS + STACK_SECONDS * layer_stacks(chosen))


def _one_digit(number: float) -> float:
    """Round to one significant digit, for estimates that are no better: 164 to 200, 7.4 to 7."""
    return float(f"{number:.1g}")


def _whole_run(forecast: RunForecast, price: float | None) -> list[str]:
    """Format the time and cost of the whole run, and the disk that its checkpoints take."""
    config = forecast.config
    device_hours = forecast.hours * forecast.cluster.devices
    cost = "" if price is None else f", {price * device_hours:,.0f} at {price:g} an hour"
    checkpoint = checkpoint_bytes(forecast)
    folder = Path(config.run or "runs").absolute()
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    keep = config.training.keep
    verdict = "" if keep * checkpoint < free else ": TOO LITTLE HERE"
    return [
        f"run    {forecast.steps:,} such steps take {_hours(forecast.hours)}, {device_hours:,.1f} device hours{cost}",
        f"saves  {size(checkpoint)} x {keep} kept; {size(free)} are free where this plan was made{verdict}",
    ]


def checkpoint_bytes(forecast: RunForecast) -> int:
    """Compute the bytes of one checkpoint."""
    config = forecast.config
    return saved_bytes(config.model, ACTIVATION[config.training.precision], config.optimizer)


def limits(forecast: RunForecast) -> list[str]:
    """List the bottlenecks of the run with a remedy for each."""
    chosen = forecast.chosen
    time = chosen.time
    remedies = []
    if not chosen.memory_plan.fits:
        remedies.append("memory: shard over more devices (mesh.fsdp), use more batch.microbatches, or a smaller model")
    if _rematerializes(forecast):
        remedies.append(
            "XLA would compute products again by itself, to take less memory: lower mesh.memory, or raise "
            "compiler.xla_gpu_memory_limit_slop_factor"
        )
    if uneven := replication_warning(chosen.memory_plan):
        remedies.append(uneven)
    if time.shards > time.compute + time.recompute:
        remedies.append("gathering parameters takes longer than computing: more samples a step, or a smaller mesh.fsdp")
    if time.recompute > 0.05 * time.total:
        remedies.append(
            f"{time.recompute / time.total:.0%} of the step is computing again: a larger mesh.fsdp leaves room"
        )
    remedies += forecast.waits
    worst = max(chosen.dist_ratio, key=lambda name: chosen.dist_ratio[name])
    if chosen.dist_ratio[worst] > 0.05:
        remedies.append(f"ranks are uneven in {worst} ({chosen.dist_ratio[worst]:.2f}): more samples a step")
    emptiest = min(chosen.fill, key=lambda name: chosen.fill[name])
    if chosen.fill[emptiest] < 0.85:
        ranks = chosen.layout.topology.ranks
        divides = forecast.config.batch.rows[emptiest] % ranks == 0
        remedy = "use more samples a step" if divides else f"make batch.rows.{emptiest} a multiple of {ranks}"
        remedies.append(f"rows of {emptiest} are {chosen.fill[emptiest]:.0%} full: {remedy}, or more batch.shapes")
    return remedies or ["nothing stands out: the devices compute most of the time"]


def _rematerializes(forecast: RunForecast) -> bool:
    """Predict whether the gradients' program takes more than XLA allows: a share of the memory less its arguments."""
    target = forecast.cluster.device.cuda
    if target is None:
        return False
    memory = forecast.chosen.memory_plan
    fixed = memory.fullest.fixed
    waiting = fixed["batch"] * (1 - 1 / (LOADED * forecast.config.batch.microbatches))
    arguments = fixed["parameters"] + fixed["gradients"] + fixed["batch"] - waiting
    temporary = memory.predicted - arguments - fixed["optimizer"] - waiting
    share = {**GPU, **forecast.config.compiler}["xla_gpu_memory_limit_slop_factor"]
    return temporary > float(share) / 100 * (USABLE * target.memory - arguments)


def _hours(hours: float) -> str:
    """Format 1.5 as 1.5 hours, 0.5 as 30.0 minutes and 0.001 as 3.6 seconds."""
    for length, unit in ((1.0, "hours"), (1 / 60, "minutes")):
        if hours >= length:
            return f"{hours / length:,.1f} {unit}"
    return f"{3600 * hours:,.1f} seconds"


def as_numbers(forecast: RunForecast, price: float | None, compiled: Compiled | None = None) -> dict[str, Any]:
    """Build the JSON object of `--json`: times in seconds, memory and checkpoints in bytes."""
    device_hours = forecast.hours * forecast.cluster.devices
    memory = forecast.chosen.memory_plan
    ways = {
        kind: {
            "dist_ratio": chosen.dist_ratio,
            "ranks_wait": chosen.waits.wait,
            "padding": chosen.waits.padding,
            "fill": chosen.fill,
            "seconds": asdict(chosen.time) | {"total": chosen.time.total},
            "mfu": forecast.mfu(chosen),
            "fits": chosen.memory_plan.fits,
            "memory": chosen.memory_plan.device,
        }
        for kind, chosen in forecast.by_balance.items()
    }
    return {
        "config": forecast.config.name,
        "cluster": str(forecast.cluster),
        "mesh": forecast.mesh,
        "parameters": parameters(forecast.config.model),
        "samples": forecast.samples,
        "tokens": forecast.tokens,
        "memory": memory.fullest.fixed | {"activations": memory.fullest.activations},
        "room": memory.limit.device,
        "compiled": None if compiled is None else max(program.bytes for program in compiled.values()),
        "programs": {
            name: {"bytes": p.bytes, "rematerialized": p.rematerialized, "synchronous": p.synchronous}
            for name, p in (compiled or {}).items()
        },
        "remat": memory.policies,
        "loss_chunks": memory.loss_chunks,
        "balance": forecast.config.batch.balance.kind,
        "ways": ways,
        "nearest": forecast.nearest,
        "basis": forecast.basis,
        "layers": layers_record(forecast.speed.measured),
        "compile": compile_seconds(forecast.chosen),
        "hours": forecast.hours,
        "device_hours": device_hours,
        "cost": None if price is None else price * device_hours,
        "checkpoint": checkpoint_bytes(forecast),
        "limits": limits(forecast),
    }


if __name__ == "__main__":
    exit_process(run_command(main))
