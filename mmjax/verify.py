"""Prove that packing and balancing change nothing: ``python -m mmjax.verify CONFIG [--samples N] [a.b=value ...]``.

Samples of a run's first steps are computed with the weights that it starts from: as the run packs
them, and each alone, with its images and clips in rows of their own. What differs by more than
rounding has leaked from another sample; the first layer in which it does is named, and the exit
code is 1. One process, on the devices at hand.

``--batches FILE`` compares instead what another trainer fed to its model, written down as
.safetensors or .npz, with what training feeds of the same samples.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mmjax.autotune.memory_plan import fit_run
from mmjax.batch import PADDING, Microbatch
from mmjax.config import Config, NoBalance
from mmjax.config.loading import config_of_words, copy_config, load, resolve_callbacks
from mmjax.config.model import stacked_towers, with_changes
from mmjax.config.other_names import parse_words
from mmjax.config.towers import Attention
from mmjax.config.validation import check_layout
from mmjax.console import print_lines, print_note, table
from mmjax.data.loading.context import spread_over_context
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import look_again, open_sources
from mmjax.disk import user_cache
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.inference.layer_states import (
    INPUTS,
    LOSSES,
    Differences,
    Place,
    States,
    compare_gradients,
    compare_states,
    input_states,
    layer_states,
)
from mmjax.models.layer_stacks import Params, stack_layers, unstack_layers
from mmjax.models.model import Model, parameter_group
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh
from mmjax.runtime.compiler_options import quick_compiler_options
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.devices import choose_devices, enable_compilation_cache, set_gpu_memory_fraction
from mmjax.runtime.executor import Executor
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import Optimizer
from mmjax.runtime.step_report import loss_weights
from mmjax.startup import activity
from mmjax.training.run_checkpoints import RunCheckpoints
from mmjax.training.run_data import open_data
from mmjax.verification.dumped_batch import read_batches
from mmjax.verification.references import References
from mmjax.verification.verify_batches import verify_batch

# Differences that are rounding, over the largest value of the sample at the place, or of the
# gradient's leaf. Sums of other lengths, in another order, differ in the last of float32's 24 bits,
# 1e-7 each; a model's layers add up to a hundred of them. Of bfloat16 it is the last of 8 bits, and
# errors that large do not add up as small ones do.
ROUNDING = {"float32": 1e-5, "bfloat16": 0.05}
# A gated delta net divides each head's outputs by their root mean square, also where this is small,
# and its chunks cut a sample elsewhere in another row.
DELTA_NET_ROUNDING = 1e-4
DENSE_ROW = 4096  # positions of a row: all scores of longer ones fill the memory
# positions of a row: with longer ones the kernel takes minutes where it is interpreted
INTERPRETED_ROW = 512
VIRTUAL_RANKS = 4  # that one device stands for, so that there is something to balance
STEPS = 2  # whose samples are taken by default


class Check(NamedTuple):
    """The result of comparing all places of a kind: at the first with a leak, or else where most differs."""

    kind: str
    backend: str
    difference: float
    tolerance: float
    place: Place
    sample: str

    @property
    def passed(self) -> bool:
        """Return whether nothing differs by more than rounding."""
        return self.difference <= self.tolerance


# --------------------------------------------------------------------------------------------------
# what is compared


def checks_of(differences: Differences, backend: str, rounding: float) -> Iterator[Check]:
    """Sum up the places of each kind; inputs must be equal to the bit."""
    for kind in dict.fromkeys(place.kind for place in differences):
        tolerance = 0.0 if kind == INPUTS else rounding
        places = [place for place in differences if place.kind == kind]
        leaks = (place for place in places if differences[place][0] > tolerance)
        place = next(leaks, max(places, key=lambda place: differences[place][0]))
        difference, sample = differences[place]
        yield Check(kind, backend, difference, tolerance=tolerance, place=place, sample=sample)


# --------------------------------------------------------------------------------------------------
# the run


def samples_of(batch: Microbatch) -> np.ndarray:
    """Return the ids of a microbatch's samples."""
    return np.unique(batch.text.owner[batch.text.owner != PADDING])


def plan_alone(
    index: LengthIndex, samples: np.ndarray, rows: np.ndarray, lengths: Any, top: Topology
) -> MicrobatchPlan:
    """Plan a sample for each rank, in a row of its own, and each of its items too. rows, lengths: `[modules]`."""
    parts = index.parts(samples)
    # of an item among those of its sample and encoder
    number = np.zeros(len(parts.module), np.int64)
    for module in range(1, len(rows)):
        items = np.flatnonzero(parts.module == module)
        # Items of the samples 0 0 2 2 2 have the numbers 0 1 0 1 2.
        number[items] = np.concatenate(
            [np.arange(n) for n in np.bincount(parts.sample()[items], minlength=1)]
        )
    row = (rows[parts.module] * parts.sample() + number).astype(np.int32)
    return MicrobatchPlan(
        samples=samples,
        part_start=parts.sample_start,
        module=parts.module,
        row=row,
        offset=np.zeros(len(number), np.int64),
        length=parts.length,
        pairs=parts.pairs,
        shape=Shape(tuple(lengths.tolist()), (0,) * (len(rows) - 1)),
        rows=tuple(rows.tolist()),
        topology=replace(top, peers=1, ranks_per_node=1),
        unbalanced_row=row,
    )


class Verifier:
    """A run as it would begin: its data, weights and programs."""

    def __init__(
        self, config: Config, source: Path, path: Path, devices: Sequence[jax.Device] | None = None
    ) -> None:
        """Open the data and load the weights. source: the config's file; path: an empty folder; devices: default: all.

        Raises UserError where the run does not fit them.
        """
        # it makes no difference to a sample which devices have which layers
        config = replace(config, units={})
        copy_config(source, path)  # where a FunctionSource looks its function up
        folder = RunFolder(path)
        devices = choose_devices(config.device) if devices is None else devices
        self.mesh = make_mesh(config.mesh, devices)
        check_layout("mesh", replace(config.mesh, **self.mesh.shape), config.model)
        self.compiler_options = quick_compiler_options(config.compiler, self.mesh.local_devices[0])
        self.data = open_data(config, folder, 0, NO_CHANGES, self.mesh)
        self.loader = self.data.loader
        longest = self.data.index.longest(self.loader.budget.longest)
        layout_of = partial(self.data.layout_of, mesh=self.mesh)
        plan, _ = fit_run(config, self.mesh, self.loader.layout, layout_of, longest=longest)
        functions = resolve_callbacks(config.model, path)
        self.config = replace(config, model=plan.applied(config.model))
        self.model = Model.build(
            self.config.model, jnp.dtype(config.training.precision), functions=functions
        )
        self.loss_chunks = plan.loss_chunks
        executor = self.executor(self.model)
        self.state = RunCheckpoints(config, folder, self.data, executor).init_state()

    def executor(self, model: Model) -> Executor:
        """Return the run's own programs of a model, without an optimizer's state."""
        stateless = Optimizer(optax.identity(), parameter_group, frozenset())
        return Executor.on_mesh(
            model,
            stateless,
            self.mesh,
            ShardingRules.of(self.config.mesh),
            sources=self.data.sources,
            loss_chunks=self.loss_chunks,
            loss=self.config.loss,
            compiler_options=self.compiler_options,
        )

    def backends(self) -> list[Attention]:
        """List the attention backends that can compute rows as long as the run's on these devices."""
        longest = max(max(shape.lengths) for shape in self.loader.layout.shapes)
        usable: dict[Attention, bool] = {
            "dense": longest <= DENSE_ROW,
            "blockwise": True,
            "flash": longest <= INTERPRETED_ROW or self.mesh.devices.flat[0].platform == "gpu",
        }
        return [backend for backend, can in usable.items() if can]

    def load_steps(self, samples: int | None) -> list[tuple[Microbatch, ...]]:
        """Load the first steps, as many as have so many samples, or `STEPS`."""
        steps: list[LoadedStep] = []
        while (
            len(steps) < STEPS
            if samples is None
            else sum(len(step.samples) for step in steps) < samples
        ):
            steps.append(self.loader(len(steps)))
            for sample, reason in steps[-1].unreadable.items():
                raise UserError(
                    f"{self.data.index.name(sample)} cannot be read: {reason}; mend it, or take it out"
                )
        return [step.microbatches for step in steps]

    def pack(self, plan: MicrobatchPlan) -> Microbatch:
        """Read the samples of a microbatch and pack them."""
        batch = pack_microbatch(plan, self.loader.batch_layout, self.loader.reader)
        return spread_over_context(batch, plan, self.loader.batch_layout)

    def pack_alone(self, batches: Sequence[Microbatch]) -> list[list[Microbatch]]:
        """Pack the samples of each of these microbatches alone, all in one shape."""
        index, topology = self.data.index, self.loader.layout.topology
        samples = [samples_of(batch) for batch in batches]
        parts = index.parts(np.concatenate(samples))
        modules = 1 + len(self.config.model.item_modules)
        unit = math.lcm(self.config.batch.alignment, *index.positions_per_token.tolist())
        lengths = -(-np.maximum(parts.largest(modules), 1) // unit) * unit
        items = [
            np.bincount(parts.sample()[parts.module == k], minlength=1).max()
            for k in range(modules)
        ]
        # over which a rank's rows are spread
        ranks = np.array([1] + [topology.encoders_per_rank] * (modules - 1))
        rows = -(-np.maximum(items, 1) // ranks) * ranks
        return [
            [
                self.pack(plan_alone(index, ids[k : k + topology.ranks], rows, lengths, topology))
                for k in range(0, len(ids), topology.ranks)
            ]
            for ids in samples
        ]


class Programs:
    """The programs of one attention backend: the run's own, of gradients, and one that shows every layer's output."""

    def __init__(self, run: Verifier, backend: Attention) -> None:
        self.run = run
        config = run.model.config
        config = with_changes(
            config, {name: {"attention": backend} for name in ("llm", *config.item_modules)}
        )
        single = {
            name: tuple(range(1, tower.layers)) for name, tower in stacked_towers(config).items()
        }
        layered = Model.build(config, run.model.dtype, single, run.model.functions)
        self.executor = executor = run.executor(
            Model.build(config, run.model.dtype, functions=run.model.functions)
        )

        def states(params: Params, batch: Microbatch) -> States:
            with activations_on(executor.mesh, executor.rules):
                params = stack_layers(unstack_layers(params), layered.runs)
                return layer_states(layered, params, batch, executor.objective.chunks)

        self._layer_states = jax.jit(states, compiler_options=run.compiler_options or None)

    def states(self, batch: Microbatch) -> States:
        """Return what a microbatch's towers read and what every layer puts out, on the host."""
        put = put_rows(batch, self.executor.mesh, self.executor.rules)
        return input_states(batch) | jax.device_get(
            self._layer_states(self.executor.parameters(self.run.state), put)
        )

    def gradients(self, batches: Sequence[Microbatch]) -> Sums:
        """Return the gradients of all microbatches together, on the host."""
        executor, state = self.executor, self.run.state
        model = executor.model.config
        patches = {
            name: np.float32(sum((b.items[name].item >= 0).sum() for b in batches))
            for name in model.towers_behind("llm")
        }
        weights = loss_weights(
            model, np.float32(sum(batch.text.weight.sum() for batch in batches)), patches
        )
        accumulated = executor.zeros()
        for batch in batches:
            put = put_rows(batch, executor.mesh, executor.rules)
            accumulated = executor.gradients(state, accumulated, [(put,)], weights, None).sums
        return jax.device_get(accumulated[0])

    def packed_is_alone(
        self, packed: Sequence[Microbatch], apart: Sequence[Sequence[Microbatch]]
    ) -> Differences:
        """Compare all that is computed of the samples of each microbatch with what is computed of them alone."""
        differences: Differences = {}
        for batch, singles in zip(packed, apart, strict=True):
            compared = compare_states(
                [self.states(batch)], list(map(self.states, singles)), self.run.data.index
            )
            differences |= {
                place: max(differences.get(place, result), result)
                for place, result in compared.items()
            }
        return differences

    def balanced_is_unbalanced(self, steps: int) -> tuple[Differences, str]:
        """Compare the first steps under the run's balance and under none; also describe what differs between them."""
        run, loader = self.run, self.run.loader
        real = run.mesh.size > 1
        topology = (
            loader.layout.topology
            if real
            else Topology(VIRTUAL_RANKS, VIRTUAL_RANKS, VIRTUAL_RANKS)
        )
        losses, gradients, placed = [], [], []
        for balance in (run.config.batch.balance, NoBalance()):
            config = replace(run.config, batch=replace(run.config.batch, balance=balance))
            weights = run.data.launch.weights
            planner, _ = make_planner(
                run.data.index, config, weights, topology, loader.budget, max_steps=steps
            )
            plans = [plan for step in range(steps) for plan in planner.plan(step).microbatches]
            placed.append(
                {
                    k: r
                    for p in plans
                    for k, r in zip(p.samples, p.rank()[p.part_start[:-1]], strict=True)
                }
            )
            batches = list(map(run.pack, plans))
            states = map(self.states, batches)
            losses.append(
                [{place: x for place, x in s.items() if place.kind == LOSSES} for s in states]
            )
            gradients.append(self.gradients(batches))
        moved = sum(placed[0][sample] != rank for sample, rank in placed[1].items())
        about = f"{moved} samples placed elsewhere, {topology.ranks} {'ranks' if real else 'virtual ranks'}"
        return compare_states(*losses, run.data.index) | compare_gradients(*gradients), about


def verify(
    run: Verifier, samples: int | None = None, backends: Sequence[Attention] = ()
) -> Iterator[Check]:
    """Yield every check of a run as it is done, of so many samples and of these backends or all that can be used."""
    steps = run.load_steps(samples)
    batches = [batch for step in steps for batch in step]
    rounding = ROUNDING[run.config.training.precision]
    if run.config.model.llm.delta_net:
        rounding = max(rounding, DELTA_NET_ROUNDING)
    fullest = {
        name: int(max(b.items[name].item.max() for b in batches)) + 1
        for name in run.config.model.item_modules
    }
    fullest = {"samples": int(max(batch.text.sample.max() for batch in batches)) + 1} | fullest
    if fullest["samples"] < 2:
        raise UserError(
            "no row holds two samples, so nothing is packed: raise batch.size or lower batch.rows.llm"
        )
    print_note(
        f"{run.config.name}: {sum(len(samples_of(batch)) for batch in batches)} samples of {len(steps)} steps on "
        f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}, in {run.config.training.precision}; a row holds up "
        f"to {', '.join(f'{largest} {name}' for name, largest in fullest.items())}"
    )
    backends = backends or run.backends()
    apart = run.pack_alone(batches)
    first: Programs | None = None
    for backend in backends:
        with activity(f"comparing packed with alone, {backend}"):
            programs = Programs(run, backend)
            first = first or programs
            yield from checks_of(programs.packed_is_alone(batches, apart), backend, rounding)
            packed = programs.gradients(batches)
            single = programs.gradients([batch for singles in apart for batch in singles])
            yield from checks_of(compare_gradients(packed, single), backend, rounding)
    balance = run.config.batch.balance
    if first and balance.moves_samples:
        with activity("comparing balanced with unbalanced"):
            differences, about = first.balanced_is_unbalanced(len(steps))
            kind = f"balance {balance.kind}: {about}"
            differences = {p._replace(kind=kind): d for p, d in differences.items()}
            yield from checks_of(differences, backends[0], rounding)


def check_batches(config: Config, source: Path, path: Path, as_json: bool) -> int:
    """Print what is wrong with batches that were written down; return 1 where something is."""
    sources = open_sources(config, "train", source.parent)
    look_again(sources)
    with activity("tokenizing the data"):
        known = References(config, sources)
    faults: list[dict[str, Any]] = []
    samples = 0
    for batch in read_batches(path):
        segments, findings, unchecked = verify_batch(batch, known)
        samples += len(segments)
        faults += [{"batch": batch.name} | finding._asdict() for finding in findings]
        for line in unchecked:
            print_note(f"{batch.name}: {line}")
        for fault, sample, token, text, message in () if as_json else findings:
            print_lines(f"{batch.name}: {fault}: {sample}, token {token} {text!r}: {message}")
    if as_json:
        print_lines(json.dumps(faults))
    else:
        print_lines(f"samples: {samples}, faults: {len(faults)}")
    return int(bool(faults))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where something leaks, or is wrong with a batch."""
    parser = command_parser("verify", __doc__)
    words = "a config's file or name (default: tiny_omni), and changes to it; init_from=RUN takes a run's weights"
    parser.add_argument("words", nargs="*", metavar="CONFIG | a.b=value", help=words)
    about = f"at least so many, in whole steps (default: those of {STEPS} steps)"
    parser.add_argument("--samples", type=int, metavar="N", help=about)
    about = "of attention, may be repeated; default: all that can compute such rows here"
    parser.add_argument(
        "--backend", action="append", choices=("dense", "blockwise", "flash"), help=about
    )
    about = "of the computation, whatever the config says; bfloat16 hides leaks that are smaller than its rounding"
    parser.add_argument("--precision", choices=tuple(ROUNDING), default="float32", help=about)
    about = "a .safetensors or .npz file of another trainer, or a folder of them, to say what is wrong with"
    parser.add_argument("--batches", type=Path, metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    args = parse_words(parser, argv)
    if args.samples is not None and args.samples < 1:
        raise UserError(f"--samples {args.samples}: give 1 or more")
    path, overrides = config_of_words(args.words)
    config = load(path, overrides)
    if not config.data.sources:
        raise UserError(
            f"{config.name} names no data to compute: name yours in data.sources (docs/data.md)"
        )
    if args.batches:
        return check_batches(config, path, args.batches, args.json)
    config = replace(config, training=replace(config.training, precision=args.precision))
    set_gpu_memory_fraction()
    enable_compilation_cache(user_cache() / "programs")
    # By default a GPU multiplies float32 as TF32, which has three digits.
    products = "highest" if args.precision == "float32" else None
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision(products):
        checks = list(
            verify(Verifier(config, path, Path(folder)), args.samples, args.backend or ())
        )
    leaks = [check for check in checks if not check.passed]
    if args.json:
        print_lines(
            json.dumps([c._asdict() | {"place": c.place.name, "passed": c.passed} for c in checks])
        )
        return int(bool(leaks))
    rows = [
        (
            "" if c.passed else "LEAK",
            c.kind,
            c.backend,
            f"{c.difference:.1e}",
            f"{c.tolerance:.0e}",
            c.place.name,
            c.sample,
        )
        for c in checks
    ]
    head = ("", "check", "backend", "difference", "tolerance", "in", "of sample")
    print_lines(*table([head, *rows], indent=""))
    if not leaks:
        print_lines("nothing leaks: samples compute in the run's rows what they compute alone")
        return 0
    of_backend = [leak for leak in leaks if leak.backend == leaks[0].backend]
    first = min(of_backend, key=lambda leak: leak.place)
    into = f" into {first.sample}" if first.sample else ""
    print_lines(f"LEAK{into}, first in {first.place.name}, with {first.backend} attention")
    return 1


if __name__ == "__main__":
    exit_process(run_command(main))
