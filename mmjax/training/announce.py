"""Print what a run will train, on what and in which shapes, and whether its data keeps up."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from mmjax import __version__
from mmjax.balance.parts import LLM
from mmjax.config import Config, Samples
from mmjax.config.model import quantized_layers
from mmjax.console import count, print_lines, size, table
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.budget import prices_of
from mmjax.data.plan.fit_budget import long_samples
from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.step_plan import RankLayout
from mmjax.data.plan.wait_advice import ranks_without_rows, waiting_advice
from mmjax.data.sample import Source
from mmjax.data.sources.chat_files import ChatFiles
from mmjax.data.sources.chat_source import ChatSource
from mmjax.models.attention import chosen_backend, describe_kernel
from mmjax.models.gated_delta_net import describe_delta_rule
from mmjax.models.layers import encoder_layer_config
from mmjax.models.model import Model, parameter_group
from mmjax.models.quantization import parameter_shapes
from mmjax.planning.remat import RunPlan, StagePlan
from mmjax.planning.schedules import ScheduleName, unit_graph
from mmjax.runtime.compiler_options import CompilerOptions, describe_compiler_options
from mmjax.runtime.state import hyperparameters
from mmjax.training.metrics import balance_scalars

# warn where a device stores more than so many times its share of a module's parameters
REPLICATED = 1.5


def print_run_summary(
    config: Config,
    model: Model,
    mesh: jax.sharding.Mesh,
    loader: StepLoader,
    first: LoadedStep,
    options: CompilerOptions,
) -> None:
    """Print parameters, mesh, compiler options, budgets, shapes, tokens per step, steps per epoch and first batch."""
    layout = loader.layout
    modules = ("llm", *config.model.item_modules)
    # parameters of each module, and of its adapters as `<module>.lora`
    sizes: Counter[str] = Counter()
    for path, shape in parameter_shapes(model.abstract).items():
        sizes[parameter_group(path)] += math.prod(shape)
    print_lines(
        f"mmjax {__version__}  {config.name}: {count(sizes.total())} parameters, {config.training.precision}"
    )
    quantized = {
        layer.split(".")[0]: f"frozen, {how}"
        for layer, how in quantized_layers(config.model).items()
    }
    remarks = dict.fromkeys(model.frozen, "frozen") | quantized
    if float8 := sum(config.model.llm.float8_layers):
        products = f"products of {float8} of {config.model.llm.layers} layers in FP8"
        remarks["llm"] = ", ".join(filter(None, (remarks.get("llm"), products)))
    print_lines(*table([(m, count(n), remarks.get(m, "")) for m, n in sizes.items()]))
    device = mesh.devices.flat[0]
    axes = " x ".join(f"{a} {n}" for a, n in mesh.shape.items() if n > 1) or "one device"
    # the mesh is of all devices, for what the whole step agrees on
    axes = "by units" if config.units else axes
    print_lines(f"on     {mesh.size} x {device.device_kind} ({axes}), JAX {jax.__version__}")
    if config.mesh.sequence_parallel in ("on", "overlap"):
        print_lines(f"       mesh.sequence_parallel={config.mesh.sequence_parallel}")
    if options:
        print_lines(f"xla    {describe_compiler_options(options)}")
    if device.platform in ("gpu", "cuda"):
        print_lines(f"attn   {describe_attention(config, layout)}")
    grouper = loader.planner.grouper
    per_step = grouper.samples_per_step
    index = loader.index
    usable = np.setdiff1d(
        np.arange(len(index)), np.union1d(grouper.oversize, index.bad), assume_unique=True
    )
    tokens = per_step * float(np.mean(index.llm_tokens[usable]))
    epoch_steps = math.ceil(grouper.epoch_samples / per_step)
    print_lines(
        f"data   {grouper.epoch_samples:,} samples; a step has about {per_step:.4g} samples with {count(tokens)} LLM "
        f"tokens, an epoch {epoch_steps:,} steps; the run has {config.training.steps:,} steps"
    )
    samples = config.batch.size
    if isinstance(samples, Samples) and per_step > 1.1 * samples.count:
        print_lines(
            f"       batch.size.count={samples.count} sizes the rows, and packing fills them; batch.grouping=none "
            f"takes {samples.count} samples a step"
        )
    max_tokens = config.data.max_tokens or np.inf
    capped = int((index.llm_tokens[grouper.oversize] > max_tokens).sum())
    if capped:
        print_lines(
            f"       {capped} samples are longer than data.max_tokens={max_tokens}: left out, see oversize.jsonl"
        )
    if oversize := len(grouper.oversize) - capped:
        print_lines(
            f"       {oversize} samples fit no budget and are skipped; they are listed in oversize.jsonl"
        )
    for name, source in loader.sources.items() if config.model.encoders else ():
        for what, column in getattr(getattr(source, "conversations", None), "unread", {}).items():
            print_lines(
                f"       {name} has a column {column} that is not read: data.sources.{name}.{what}={column}"
            )
    for line in _describe_sources(config, grouper):
        print_lines(line)
    for note in (
        *loader.budget.notes,
        *_describe_long_samples(config, loader),
        *grouper.epoch_notes(),
    ):
        print_lines(f"       {note}")
    print_lines(
        f"rows   of each module, grouping {config.batch.grouping.kind}, {config.batch.microbatches} microbatch(es), "
        f"{len(layout.shapes)} shape(s)"
    )
    fills = balance_scalars(first, modules, layout, prices_of(config, loader.budget))
    lines = [("module", "rows", "lengths", "first batch", "fill")]
    for k, module in enumerate(modules):
        lengths = sorted({shape.lengths[k] for shape in layout.shapes})
        batch = first.microbatches[0]
        array = batch.text.token if module == "llm" else batch.items[module].values
        shape = "x".join(map(str, array.shape))
        rows = layout.topology.ranks * layout.rows[k]
        lines.append(
            (
                module,
                str(rows),
                "/".join(map(str, lengths)),
                shape,
                f"{fills[f'fill/{module}']:.2f}",
            )
        )
    print_lines(*table(lines))
    if layout.topology.ranks * layout.topology.encoders_per_rank > 1:
        print_lines(*_describe_ranks(config, layout))
    for line in describe_waits(grouper, config, layout):
        print_lines(f"       {line}")


def describe_waits(grouper: StepGrouper, config: Config, layout: RankLayout) -> list[str]:
    """Describe what makes ranks wait that no placing helps against, and what would help."""
    names = ("llm", *config.model.item_modules)
    topology = layout.topology
    prices = prices_of(config, grouper.budget)
    lines = ranks_without_rows(grouper, topology.ranks, names)
    if advice := waiting_advice(grouper, prices, topology.ranks, names, topology.context):
        lines.append(advice)
    if grouper.budget.prices is None:
        lines.append(
            "rows are filled as this run began, by positions alone; those of a new run level attention too"
        )
    return lines


def describe_attention(config: Config, layout: RankLayout) -> str:
    """Name the backend of each tower's attention and of delta nets, or the kernel that runs on this GPU."""
    towers = config.model.towers
    longest = np.max([shape.lengths for shape in layout.shapes], axis=0).tolist()
    dtype = np.dtype(config.training.precision)
    backends = []
    for (name, tower), length in zip(towers.items(), longest, strict=True):
        if tower.is_generator:
            continue
        is_encoder = name in config.model.encoders
        window = encoder_layer_config(tower).window if is_encoder else 0
        heads = (tower.heads, tower.key_heads)
        kernel = describe_kernel(tower.head_width, length, heads, dtype, window)
        backends.append(
            f"{name}: {kernel if chosen_backend(tower.attention) == 'flash' else tower.attention}"
        )
        if net := getattr(tower, "delta_net", None):
            backends.append(f"{name}'s delta nets: {describe_delta_rule(length, net, dtype)}")
    return "; ".join(backends)


NAMED = 3  # samples of several that are named
OFTEN = 4.0  # times as often as another: from there on it is said how all sources are read alike


def _describe_sources(config: Config, grouper: StepGrouper) -> list[str]:
    """Describe each source's share of the samples and its own epochs in this run, where there are several."""
    shares = grouper.source_shares(config.training.steps - grouper.first)
    if len(shares) < 2:
        return []
    lines = [("", "source", "samples", "share", "epochs in this run")]
    lines += [
        ("", name, f"{samples:,}", f"{share:.0%}", f"{epochs:.2f}")
        for name, samples, share, epochs in shares
    ]
    epochs = [epochs for *_, epochs in shares]
    if config.data.temperature or max(epochs) < OFTEN * min(epochs):
        return table(lines)
    remedy = "data.temperature=1 reads every source as often as the others, times data.sources.NAME.weight"
    return [*table(lines), f"       {remedy}"]


def _describe_long_samples(config: Config, loader: StepLoader) -> list[str]:
    """Name the few samples that make rows long, and say what leaving them out would save."""
    grouper = loader.planner.grouper
    outliers = long_samples(grouper.index, config, grouper.weights, loader.budget)
    if outliers is None:
        return []
    names = []
    for sample in outliers.samples[:NAMED].tolist():
        number = int(grouper.index.source_of(np.array(sample)))
        source = list(loader.sources.values())[number]
        place = (
            source.place(sample - int(grouper.index.source_start[number]))
            if hasattr(source, "place")
            else ""
        )
        names.append(place or grouper.index.name(sample))
    more_names = (
        f" and {len(outliers.samples) - NAMED:,} more" if len(outliers.samples) > NAMED else ""
    )
    (rows, length), (fewer_rows, shorter) = outliers.row, outliers.row_without
    verb, pronoun = ("sets", "it") if len(outliers.samples) == 1 else ("set", "them")
    key = f" (data.max_tokens={outliers.largest_other})" if outliers.module == "llm" else ""
    return [
        f"{', '.join(names)}{more_names} {verb} the rows of {outliers.module}: "
        f"{outliers.positions:,} positions, where no other sample takes more than {outliers.largest_other:,}. With "
        f"{pronoun} left out{key}, rows would be {fewer_rows} x {shorter:,} instead of {rows} x {length:,}: "
        f"{outliers.room_without:,.0f} instead of {outliers.room:,.0f} positions for a sample, and "
        f"{outliers.samples_per_step_without:.3g} instead of {outliers.samples_per_step:.3g} samples per step"
    ]


def describe_zero_rates(config: Config) -> list[str]:
    """Describe which of the trained modules have a learning rate of 0, and so stay as they are."""
    schedules = config.optimizer.modules.values()
    starts = {config.schedule.warmup, *(rates.frozen_until for rates in schedules)}
    by_start = [hyperparameters(config, step) for step in sorted(starts)]
    peak = {key: max(hyper[key] for hyper in by_start) for key in by_start[0]}
    rates = {
        key.removeprefix("learning_rate/"): rate
        for key, rate in peak.items()
        if key.startswith("learning_rate/")
    }
    untrained = [name for name, rate in rates.items() if not rate]
    if len(untrained) == len(rates):
        return ["       NOTHING IS TRAINED: every learning rate is 0; set optimizer.learning_rate"]
    return (
        [f"       not trained, with a learning rate of 0: {', '.join(untrained)}"]
        if untrained
        else []
    )


def _describe_ranks(config: Config, layout: RankLayout) -> list[str]:
    """Describe how rows are spread over ranks, and what ranks may send to each other."""
    topology = layout.topology
    lines = [
        f"ranks  {topology.ranks} in nodes of {topology.ranks_per_node}, balance {config.batch.balance.kind}"
    ]
    if topology.encoders_per_rank > 1:
        lines[0] += f"; {topology.encoders_per_rank} encoder ranks each"
    for k, (name, module) in enumerate(config.model.item_modules.items()):
        widths = sorted({shape.widths[k] for shape in layout.shapes})
        if any(widths):
            moves = f"at most {'/'.join(map(str, widths))} tokens from a rank to another"
            lines[0] += f"; {name} {'gets' if module.is_generator else 'sends'} {moves}"
    for k, module in enumerate(("llm", *config.model.item_modules)):
        # Encoders' rows are divided among encoder ranks, the LLM's among ranks.
        ranks = topology.ranks * (1 if k == LLM else topology.encoders_per_rank)
        if config.batch.rows[module] % ranks:
            lines.append(
                f"       batch.rows.{module}={config.batch.rows[module]} does not divide by {ranks} ranks: "
                f"{topology.ranks * layout.rows[k]} rows are computed; a multiple of {ranks} fills them better"
            )
    return lines


def describe_memory_plan(memory_plan: RunPlan) -> list[str]:
    """Describe the predicted memory of the fullest device, and all remat policies."""
    kinds = memory_plan.fullest.memory
    # Kinds below 1 % are left out.
    parts = "  ".join(
        f"{kind} {size(n)}" for kind, n in kinds.items() if n >= 0.01 * memory_plan.predicted
    )
    limit = "" if math.isinf(memory_plan.limit.device) else f" of {size(memory_plan.limit.device)}"
    predicted = "" if memory_plan.measured is None else " predicted"
    stage = f", in {memory_plan.fullest.name}" if len(memory_plan.stages) > 1 else ""
    lines = [f"memory {size(memory_plan.predicted)}{predicted}{limit} a device{stage}: {parts}"]
    if memory_plan.measured is not None:
        lines.append(
            f"       {size(memory_plan.measured)} by the compiler, which decided what is computed again"
        )
    if memory_plan.limit.ram:
        lines.append(
            "       THAT IS NEARLY ALL THE RAM there is for a device; data workers and other programs use some too, "
            "and the system may kill the run: raise batch.microbatches, or take a smaller model"
        )
    if memory_plan.loss_chunks > 1:
        lines.append(f"       loss in {memory_plan.loss_chunks} parts")
    if warning := replication_warning(memory_plan):
        lines.append(f"       {warning}")
    for tower, policies in memory_plan.policies.items():
        if set(policies) != {"none"}:
            mix = ", ".join(f"{n} {policy}" for policy, n in Counter(policies).items())
            lines.append(f"       remat of {tower}: {mix}")
    return lines


def describe_stages(
    config: Config,
    stages: Sequence[StagePlan],
    schedule: ScheduleName,
    bubble: float,
    measured: bool,
) -> list[str]:
    """Describe the stages of units in a table, with the predicted bubble of their pipeline."""
    lines = [
        (
            "stage",
            "devices",
            "mesh",
            "layers",
            "parameters",
            "memory",
            "forward",
            "backward",
            "in flight",
        )
    ]
    for stage in stages:
        devices = f"{stage.devices[0]}" + (
            f"-{stage.devices[-1]}" if len(stage.devices) > 1 else ""
        )
        mesh = " x ".join(f"{axis} {n}" for axis, n in stage.mesh.items()) or "-"
        layers = " + ".join(f"{layers.start}-{layers.stop - 1}" for layers in stage.layers.values())
        times = [
            f"{1e3 * seconds:.3g} ms" if seconds else "-"
            for seconds in (stage.forward, stage.backward)
        ]
        memory = size(stage.bytes)
        lines.append(
            (
                stage.name,
                devices,
                mesh,
                layers,
                count(stage.parameters),
                memory,
                *times,
                str(stage.in_flight),
            )
        )
    basis = (
        "by measured layer times"
        if measured
        else "by assumed rates; mmjax.plan --profile measures layers"
    )
    microbatches = config.batch.microbatches
    described = [
        f"units  schedule {schedule}, {microbatches} microbatch(es)",
        *table(lines),
        f"       predicted bubble {bubble:.0%} ({basis})",
    ]
    for name, unit in config.units.items():
        if unit.sequence_parallel in ("on", "overlap"):
            described.append(f"       units.{name}.sequence_parallel={unit.sequence_parallel}")
    graph = unit_graph(config)
    in_turn = graph.workers_in_turn
    if microbatches < in_turn:
        described.append(
            f"       {microbatches} microbatch(es) cannot fill {in_turn} stages, one behind the other; raise "
            "batch.microbatches to several times as many"
        )
    if microbatches % (copies := max(copies for _, copies in graph.copies)):
        described.append(
            f"       {microbatches} microbatch(es) are no multiple of the {copies} copies of encoders, whose work is "
            f"unequal; set batch.microbatches={max(1, round(microbatches / copies)) * copies}"
        )
    return described


def replication_warning(memory_plan: RunPlan) -> str:
    """Warn of modules whose widths the mesh does not divide, so that each device stores all of them; else return ""."""
    sharding = memory_plan.fullest.sharding
    replicated = [
        module
        for module in sharding.shares
        if sharding.part_of(module) > REPLICATED / sharding.shards
    ]
    if not replicated:
        return ""
    return (
        f"the mesh (fsdp {sharding.shards // sharding.llm}, tensor {sharding.llm}) does not divide the widths of "
        f"{', '.join(replicated)}: their parameters lie whole on its devices; choose mesh.fsdp and mesh.tensor that do"
    )


WAITING = 0.1  # share of the time that a run may wait for data before it is told so at its start


LARGE_PHOTO = 2_000_000  # pixels of a photo that takes longer to decode than most models use of it


def median_pixels(sources: Iterable[Source]) -> float:
    """Return the pixels of the median image in files that records name by paths; 0 where there is none."""
    named = [
        s for s in sources if isinstance(s, ChatSource) and isinstance(s.conversations, ChatFiles)
    ]
    sizes = np.concatenate([np.empty((0, 2)), *(source.image_sizes() for source in named)])
    return float(np.median(sizes.prod(axis=1))) if len(sizes) else 0.0


def loader_verdict(
    load_seconds: float, workers: int, step_seconds: float, pixels: float = 0.0
) -> str:
    """Say in one line whether the workers can keep up.

    load_seconds: to load one step on one core. step_seconds: to run one, without waiting for data.
    pixels: of the median image, by `median_pixels`.
    """
    per_step = load_seconds / max(workers, 1)
    line = (
        f"data   loading a step takes {load_seconds * 1e3:.0f} ms of one core, {workers} workers; "
        f"a step takes {step_seconds * 1e3:.0f} ms"
    )
    if (1 - WAITING) * per_step <= step_seconds:
        return line
    # Rounded up and one to spare, since `load_seconds` is a mean.
    needed, cores = math.ceil(load_seconds / step_seconds) + 1, len(os.sched_getaffinity(0))
    remedy = f"use data.workers={needed}"
    if needed > cores:
        remedy = f"{needed} workers would keep up, and this machine has {cores} cores: data.pool takes those of others"
    if pixels >= LARGE_PHOTO:
        remedy = (
            f"half of the images have {pixels / 1e6:.2g} megapixels or more: make smaller copies once, with "
            "python -m mmjax.index CONFIG --shrink FOLDER"
        )
    waiting = 1 - step_seconds / per_step
    return f"{line}: THE LOADER CANNOT KEEP UP, about {waiting:.0%} of the time will be waiting; {remedy}"
