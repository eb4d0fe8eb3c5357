"""See what a run will do, without its hardware: ``python -m mmjax.plan CONFIG cluster=h100x8x8 [a.b=value ...]``.

``cluster=here`` is this machine; with ``--profile``, the layers' times are measured on it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

from mmjax.config import Config
from mmjax.config_files import default_config, find, keep, load
from mmjax.data.index import LengthIndex, build_index
from mmjax.data.layout import RankLayout
from mmjax.data.lengths import index_of_lengths, omni_corpus, read_lengths
from mmjax.data.sources import open_sources
from mmjax.errors import UserError, leave, run_command
from mmjax.outputs import PICTURES, check_output
from mmjax.planning.clusters import Cluster, cluster_of
from mmjax.planning.cost import parameters
from mmjax.planning.layer_times import Speed
from mmjax.planning.memory import saved_bytes
from mmjax.planning.plan_file import plan_text
from mmjax.training.absent_devices import absent_h100
from mmjax.training.announce import how_it_fits, lying_whole
from mmjax.training.console import count, duration, say, size, table
from mmjax.training.fitting import ACTIVATION, speed_of, too_large
from mmjax.training.outlook import Outlook, Way, compiled_way, look_ahead
from mmjax.training.profile import cluster_here

MADE = 200_000  # samples of the made lengths that stand in for data that a config does not name
# What XLA of JAX 0.10.2 takes on one core for a gradient program on H100, and for each run of layers in it; 7 programs
# of 1 to 7 runs were compiled, the longest in 28 s (docs/planning.md).
PROGRAM_SECONDS, RUN_SECONDS = 4.0, 3.5
COMPILED_FOR = ("h100", "h200")  # one chip, of more or less memory
HERE = "here"  # in place of a cluster's name
OWN = ("cluster", "price")  # words that are the command's, not the config's


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmjax.plan", description=__doc__, allow_abbrev=False)
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
    parser.add_argument("--picture", type=Path, metavar="F.png|svg", help="draw memory, time and each rank's work")
    parser.add_argument(
        "--compile", action="store_true", help="compile the step for the cluster's GPUs, none of which need be here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_intermixed_args(sys.argv[1:] if argv is None else argv)
    if args.out is not None:
        check_output("--out", args.out)
    if args.picture is not None:
        check_output("--picture", args.picture, PICTURES)
    own = dict(word.split("=", 1) for word in args.words if word.split("=", 1)[0] in OWN and "=" in word)
    given = [word for word in args.words if word.split("=", 1)[0] not in OWN]
    named = next((word for word in given if "=" not in word), "")
    path = find(named) if named else default_config()
    config = load(path, [word for word in given if word is not named])
    if "cluster" not in own:
        raise UserError("say on which cluster: cluster=h100x8x8 is 8 nodes of 8 H100, cluster=here this machine")
    here, price = own["cluster"] == HERE, _price(own.get("price"))
    if args.profile and not here:
        raise UserError(f"--profile times layers on this machine: say cluster={HERE}, not cluster={own['cluster']}")
    cluster = cluster_here() if here else cluster_of(own["cluster"])
    devices = _to_compile_for(cluster) if args.compile else None
    index, weights, told = _lengths(config, path, args.lengths)
    outlook = look_ahead(config, cluster, index, weights, _speed_here(config, args.profile) if here else None)
    compiled = None if devices is None else compiled_way(outlook, devices)
    say(*([json.dumps(as_numbers(outlook, price, compiled))] if args.json else report(outlook, price, told, compiled)))
    if args.picture is not None:
        from mmjax.pictures import draw_plan  # matplotlib looks for fonts when it is first imported

        draw_plan(args.picture, outlook)
    if args.out is not None:
        _write(outlook, args.out)


def _write(outlook: Outlook, path: Path) -> None:
    way = outlook.chosen
    if not way.fitted.fits:
        raise UserError(f"--out {path}: nothing is written, for the run does not fit; see what limits it")
    expected = {"seconds": way.time.total, "mfu": outlook.mfu(way), "memory": way.fitted.device}
    fitted = way.fitted
    text = plan_text(outlook.config, str(outlook.cluster), outlook.mesh, fitted.policies, fitted.loss_chunks, expected)
    path.write_text(text)


def _speed_here(config: Config, profile: bool) -> Callable[[Sequence[RankLayout]], Speed]:
    return lambda layouts: speed_of(config, layouts, jax.devices()[0], profile)


def _to_compile_for(cluster: Cluster) -> list[jax.Device]:
    if cluster.device.name not in COMPILED_FOR:
        raise UserError(
            f"--compile: there is no compiling for {cluster.device.name}, only for {', '.join(COMPILED_FOR)}"
        )
    return absent_h100(cluster.per_node, cluster.nodes)


def _price(word: str | None) -> float | None:
    if word is None:
        return None
    try:
        price = float(word)
    except ValueError:
        price = -1.0
    if not price >= 0:
        raise UserError(f"price={word}: give what a device costs for an hour, as a number")
    return price


def _lengths(config: Config, path: Path, files: Sequence[Path]) -> tuple[LengthIndex, list[float], str]:
    """The index of a run's samples, its sources' weights, and what is to be told of it."""
    encoders = config.model.encoders
    if config.data.sources and not files:
        with tempfile.TemporaryDirectory() as folder:
            keep(path, Path(folder))  # a source's own function is looked up beside a copy of its config
            index = build_index(open_sources(config, "train", Path(folder)), encoders)
        return index, [s.weight for s in config.data.sources.values()], f"{len(index):,} samples"
    keys = ("llm_tokens", *encoders)
    if files:
        return index_of_lengths(read_lengths(files, keys), encoders), [1.0], f"lengths of {', '.join(map(str, files))}"
    made = omni_corpus(MADE, config.seed)
    if missing := [key for key in keys if key not in made]:
        raise UserError(
            f"the config names no data and there are no made lengths for {missing[0]!r}; give your own with --lengths"
        )
    return index_of_lengths(made, encoders), [1.0], "the config names no data: lengths made from a seed"


# ----------------------------------------------------------------------------------------------------------- the report


def report(outlook: Outlook, price: float | None, told: str, compiled: int | None = None) -> list[str]:
    """Format the plan for a person."""
    config, way = outlook.config, outlook.chosen
    counts = parameters(config.model)
    axes = " x ".join(f"{axis} {n}" for axis, n in outlook.mesh.items() if n > 1) or "one device"
    lines = [
        f"plan   {config.name}: {count(sum(counts.values()))} parameters, {config.training.precision}, on "
        f"{outlook.cluster.devices} x {outlook.cluster.device.name} ({axes})",
        f"data   {told}; {outlook.samples:,.0f} samples and {count(outlook.tokens)} LLM tokens a step",
        *table(_modules(outlook)),
    ]
    if not way.fitted.fits:
        lines.append(
            f"DOES NOT FIT: {'; '.join(filter(None, (too_large(way.fitted), outlook.longest, outlook.nearest)))}"
        )
    lines += how_it_fits(way.fitted)
    if compiled is not None:
        off = way.fitted.predicted / compiled - 1
        lines.append(f"       {size(compiled)} by the compiler; what is predicted differs by {off:+.1%}")
    lines += [f"step   {duration(way.time.total)}, MFU {outlook.mfu(way):.1%}: {_parts(way)}"]
    lines += table(_balances(outlook))
    lines += [_start(outlook), *_to_the_end(outlook, price)]
    return lines + [f"limits {line}" for line in limits(outlook)]


def _modules(outlook: Outlook) -> list[tuple[str, ...]]:
    way, config = outlook.chosen, outlook.config
    rows = [("module", "parameters", "rows a rank", "lengths", "fill", "computed again")]
    counts = parameters(config.model)
    for k, name in enumerate(("llm", *config.model.encoders)):
        lengths = sorted({shape.lengths[k] for shape in way.layout.shapes})
        kept = sum(policy == "none" for policy in way.fitted.policies[name])
        layers = len(way.fitted.policies[name])
        again = f"in {layers - kept} of {layers} layers" if kept < layers else "nothing"
        numbers = count(counts[name]), str(way.layout.rows[k]), "/".join(map(str, lengths)), f"{way.fill[name]:.2f}"
        rows.append((name, *numbers, again))
    return rows


def _parts(way: Way) -> str:
    spelled = [f"{name} {duration(seconds)}" for name, seconds in asdict(way.time).items() if seconds]
    return ", ".join(spelled)


def _balances(outlook: Outlook) -> list[tuple[str, ...]]:
    rows = [("balance", *(f"dist ratio {name}" for name in outlook.chosen.dist_ratio), "fill LLM", "step", "MFU")]
    for kind, way in outlook.ways.items():
        ratios = [f"{ratio:.3f}" for ratio in way.dist_ratio.values()]
        rows.append((kind, *ratios, f"{way.fill['llm']:.2f}", duration(way.time.total), f"{outlook.mfu(way):.1%}"))
    return rows


def _start(outlook: Outlook) -> str:
    shapes, runs = len(outlook.chosen.layout.shapes), runs_of_layers(outlook.chosen)
    return (
        f"start  about {compile_seconds(outlook.chosen):.0f} s of compiling on one core of each host: "
        f"{shapes} shape(s), {runs} run(s) of layers"
    )


def runs_of_layers(way: Way) -> int:
    """Contiguous layers of one remat policy, of all towers: each is one body that is compiled and scanned."""
    return sum(len(list(groupby(own))) for own in way.fitted.policies.values())


def compile_seconds(way: Way) -> float:
    """Estimate the seconds that compiling all shapes takes on a first start; a second one has them in its cache."""
    return len(way.layout.shapes) * (PROGRAM_SECONDS + RUN_SECONDS * runs_of_layers(way))


def _to_the_end(outlook: Outlook, price: float | None) -> list[str]:
    config, hours = outlook.config, outlook.hours
    spent = hours * outlook.cluster.devices
    cost = "" if price is None else f", {price * spent:,.0f} at {price:g} an hour"
    saved = checkpoint_bytes(outlook)
    free = shutil.disk_usage(_existing(Path(config.run or "runs"))).free
    verdict = "" if config.training.keep * saved < free else ": TOO LITTLE HERE"
    return [
        f"run    {outlook.steps:,} steps take {_hours(hours)}, {spent:,.1f} device hours{cost}",
        f"saves  {size(saved)} x {config.training.keep} kept; {size(free)} are free where this plan was made{verdict}",
    ]


def checkpoint_bytes(outlook: Outlook) -> int:
    """Compute the bytes of one checkpoint."""
    config = outlook.config
    return saved_bytes(config.model, ACTIVATION[config.training.precision], config.optimizer)


def _existing(folder: Path) -> Path:
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def limits(outlook: Outlook) -> list[str]:
    """List the bottlenecks of the run with a remedy for each."""
    way, time = outlook.chosen, outlook.chosen.time
    found = []
    if not way.fitted.fits:
        found.append("memory: shard over more devices (mesh.fsdp), use more batch.microbatches, or a smaller model")
    if uneven := lying_whole(way.fitted):
        found.append(uneven)
    if time.shards > time.compute + time.recompute:
        found.append("gathering parameters takes longer than computing: more samples a step, or a smaller mesh.fsdp")
    if time.recompute > 0.05 * time.total:
        found.append(
            f"{time.recompute / time.total:.0%} of the step is computing again: a larger mesh.fsdp leaves room"
        )
    worst = max(way.dist_ratio, key=lambda name: way.dist_ratio[name])
    if way.dist_ratio[worst] > 0.05:
        found.append(f"ranks are uneven in {worst} ({way.dist_ratio[worst]:.2f}): more samples a step")
    emptiest = min(way.fill, key=lambda name: way.fill[name])
    if way.fill[emptiest] < 0.85:
        rows, ranks = outlook.config.batch.rows[emptiest], way.layout.topology.ranks
        remedy = "use more samples a step" if rows % ranks == 0 else f"make batch.rows.{emptiest} a multiple of {ranks}"
        found.append(f"rows of {emptiest} are {way.fill[emptiest]:.0%} full: {remedy}, or more batch.shapes")
    return found or ["nothing stands out: the devices compute most of the time"]


def _hours(hours: float) -> str:
    """1.5 as 1.5 hours, 0.5 as 30.0 minutes, 0.001 as 3.6 seconds."""
    for length, unit in ((1.0, "hours"), (1 / 60, "minutes")):
        if hours >= length:
            return f"{hours / length:,.1f} {unit}"
    return f"{3600 * hours:,.1f} seconds"


def as_numbers(outlook: Outlook, price: float | None, compiled: int | None = None) -> dict[str, Any]:
    """The same for programs."""
    spent = outlook.hours * outlook.cluster.devices
    ways = {
        kind: {
            "dist_ratio": way.dist_ratio,
            "fill": way.fill,
            "seconds": asdict(way.time) | {"total": way.time.total},
            "mfu": outlook.mfu(way),
            "fits": way.fitted.fits,
            "memory": way.fitted.device,
        }
        for kind, way in outlook.ways.items()
    }
    return {
        "config": outlook.config.name,
        "cluster": str(outlook.cluster),
        "mesh": outlook.mesh,
        "parameters": parameters(outlook.config.model),
        "samples": outlook.samples,
        "tokens": outlook.tokens,
        "memory": outlook.chosen.fitted.fixed | {"activations": outlook.chosen.fitted.activations},
        "room": outlook.chosen.fitted.room.device,
        "compiled": compiled,
        "remat": outlook.chosen.fitted.policies,
        "loss_chunks": outlook.chosen.fitted.loss_chunks,
        "balance": outlook.config.batch.balance.kind,
        "ways": ways,
        "nearest": outlook.nearest,
        "compile": compile_seconds(outlook.chosen),
        "hours": outlook.hours,
        "device_hours": spent,
        "cost": None if price is None else price * spent,
        "checkpoint": checkpoint_bytes(outlook),
        "limits": limits(outlook),
    }


if __name__ == "__main__":
    leave(run_command(main))
