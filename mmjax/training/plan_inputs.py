"""Open what a plan is made from: the words of a command, a cluster, lengths of samples, and measured rates."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax

from mmjax.autotune.compile_run import Programs, compile_run
from mmjax.autotune.forecast import Forecast
from mmjax.autotune.layer_profile import MeasureSpeed, Shapes
from mmjax.autotune.memory_plan import apply_memory_plan, device_speed, in_units
from mmjax.config import Config
from mmjax.config.loading import config_of_words, copy_config, load
from mmjax.data.loading.made_samples import made_samples
from mmjax.data.loading.packing import Reader
from mmjax.data.loading.step_loader import reader_of
from mmjax.data.plan.length_files import (
    index_of_lengths,
    interleaved_corpus,
    omni_corpus,
    read_lengths,
)
from mmjax.data.plan.length_index import LengthIndex, build_index
from mmjax.data.plan.sampler import mixture_weights
from mmjax.data.sources.opening import open_sources
from mmjax.errors import CommandParser, UserError
from mmjax.planning.hardware import Cluster, check_float8, parse_cluster
from mmjax.planning.measured_file import read_measured
from mmjax.planning.speed import LayerTimes, Speed
from mmjax.runtime.devices import device_description, local_cluster

SYNTHETIC_SAMPLES = 200_000  # lengths drawn from a seed where a config names no data
HERE = "here"  # in place of a cluster's name, or of its device's
COMMAND_KEYS = ("cluster", "price")  # words that are the command's, not the config's


class Lengths(NamedTuple):
    """Hold the samples of a plan."""

    index: LengthIndex
    weights: list[float]  # of each source
    source: str  # for the report
    reader: Reader  # of contents, which are made where only lengths are known


@dataclass(frozen=True)
class PlanInputs:
    """Hold what a plan is made from. options: the command's own words, by key."""

    path: Path
    config: Config
    overrides: list[str]
    options: Mapping[str, str]
    cluster: Cluster
    files: Sequence[Path]  # of lengths in place of the config's data
    measure_speed: MeasureSpeed

    @cached_property
    def lengths(self) -> Lengths:
        """Open the samples. Raises UserError where they cannot be opened."""
        return _open_lengths(self.config, self.path, self.files)

    @property
    def is_here(self) -> bool:
        """Return whether the cluster is this machine."""
        return self.options["cluster"] == HERE


def add_plan_options(parser: CommandParser) -> None:
    """Add the options of every command that plans."""
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=Path,
        default=[],
        metavar="F.npz",
        help="of samples, in place of the config's data",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE.json",
        help="rates measured on such a cluster, in place of assumed ones",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the step for the cluster's GPUs, none of which need be here",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def open_plan_inputs(
    words: Sequence[str],
    lengths: Sequence[Path] = (),
    measured: Path | None = None,
    profile: bool = False,
) -> PlanInputs:
    """Open what the words of a command name.

    lengths: files in place of the config's data. measured: a file of rates. profile: time layers on
    this machine. Raises UserError where the words name no cluster.
    """
    parts = [word.partition("=") for word in words]
    options = {key: value for key, _, value in parts if key in COMMAND_KEYS}
    others = [w for w, (key, *_) in zip(words, parts, strict=True) if key not in COMMAND_KEYS]
    path, overrides = config_of_words(others)
    config = load(path, overrides)
    if not options.get("cluster"):
        raise UserError(
            "say on which cluster: cluster=h100x8x8 is 8 nodes of 8 H100, cluster=here this machine"
        )
    name = options["cluster"]
    if profile and name != HERE:
        raise UserError(
            f"--profile times layers on this machine: say cluster={HERE}, not cluster={name}"
        )
    cluster = _open_cluster(name)
    check_float8(config.model.llm.fp8, cluster.device)
    layers: dict[str, LayerTimes] = {}
    if measured is not None:
        cluster, layers = read_measured(measured, cluster, config)
    return PlanInputs(
        path,
        config,
        overrides,
        options,
        cluster,
        lengths,
        _speed_by(config, cluster, layers, name == HERE, profile),
    )


def _open_cluster(name: str) -> Cluster:
    """Open a cluster by its name: `here`, this machine; `herexNODESxCOUNT`, of devices like this one's; or others."""
    if name == HERE:
        return local_cluster()
    if name.startswith(f"{HERE}x"):
        return parse_cluster(name, {HERE: device_description(jax.devices()[0])})
    return parse_cluster(name)


def _speed_by(
    config: Config,
    cluster: Cluster,
    layers: Mapping[str, LayerTimes],
    on_this_machine: bool,
    profile: bool,
) -> MeasureSpeed:
    """Return the function that measures the devices' speed: layer times as stated, else as timed on this machine."""

    def measure(shapes: Shapes) -> Speed:
        rates = cluster.device.rates(config.training.precision)
        unstated = {tower: shape for tower, shape in shapes.items() if tower not in layers}
        timed = (
            device_speed(config, unstated, jax.devices()[0], profile).measured
            if on_this_machine
            else {}
        )
        return Speed(rates, {**timed, **layers})

    return measure


def _open_lengths(config: Config, path: Path, files: Sequence[Path]) -> Lengths:
    """Open a run's length index: from the config's data, from files, or drawn from a seed where there is neither."""
    modules = config.model.item_modules
    if config.data.sources and not files:
        with tempfile.TemporaryDirectory() as folder:
            # a FunctionSource looks its function up in a run folder's copy of the config
            copy_config(path, Path(folder))
            sources = open_sources(config, "train", Path(folder))
            index = build_index(sources, modules, config.model.llm)
        weights = mixture_weights(config.data, index)
        return Lengths(index, weights, f"{len(index):,} samples", reader_of(sources, index))

    def of(index: LengthIndex, source: str) -> Lengths:
        return Lengths(index, [1.0], source, made_samples(index, config.model))

    keys = ("llm_tokens", *modules)
    if files:
        index = index_of_lengths(read_lengths(files, keys), modules, config.model.llm)
        return of(index, f"lengths of {', '.join(map(str, files))}")
    if config.model.makes_images:
        lengths = interleaved_corpus(SYNTHETIC_SAMPLES, config.seed, modules)
    else:
        lengths = omni_corpus(SYNTHETIC_SAMPLES, config.seed)
    if missing := [key for key in keys if key not in lengths]:
        raise UserError(
            f"the config names no data and there are no made lengths for {missing[0]!r}; give your own with --lengths"
        )
    index = index_of_lengths(lengths, modules, config.model.llm)
    return of(index, "the config names no data: lengths made from a seed")


def compile_forecast(forecast: Forecast, devices: Sequence[jax.Device]) -> dict[str, Programs]:
    """Compile the programs of a forecast run, by stage and name."""
    plan = forecast.plan
    config = apply_memory_plan(forecast.config, plan.policies, plan.loss_chunks)
    return compile_run(in_units(config, forecast.mesh), forecast.layout, plan, devices)
