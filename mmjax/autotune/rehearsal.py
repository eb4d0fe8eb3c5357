"""Rehearse planned steps of a cluster on one device: run each rank's programs with its own rows, rank after rank.

A rank's programs are those of its pieces, the layers of one tower in one stage, which other ranks
run as well, on other rows of the same shape. What ranks would send to each other lies on the device
already, in arrays of the right shape; the time of collectives is planned, from the cluster's links.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.autotune.compile_run import (
    BatchShape,
    RunPrograms,
    accumulates,
    build_model,
    make_executor,
)
from mmjax.autotune.forecast import Forecast
from mmjax.autotune.memory_plan import apply_memory_plan, in_units
from mmjax.autotune.run_time import Computed, RunTime, time_run, visited_by_rank
from mmjax.autotune.sharded_stages import ShardedStage, rows_on_device, shard_stages
from mmjax.batch import EncodedItems, Microbatch
from mmjax.config import Config, MeshConfig
from mmjax.config.unit_stages import LayerRange
from mmjax.data.loading.packing import Reader, pack_microbatch
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.placement import MicrobatchPlan, Shape
from mmjax.errors import UserError
from mmjax.models.model import merge
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import make_mesh, row_ranks
from mmjax.planning.schedules import list_stages
from mmjax.planning.work import resolve_attention
from mmjax.runtime.devices import host_ram
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.placement import select_tables

SCALE = 0.02  # of random parameters and activations
DRAWN = 1_000_003  # numbers, after which they repeat
SHARE_OF_PARAMETERS = 0.6  # of the device's memory, at most; the rest is for activations
BYTES = 8  # of a parameter and its gradient
ROUNDS = 5  # repeats of every pass, the fastest of which counts
Clock = Callable[[], float]  # seconds
Seconds = np.ndarray  # float64 [microbatches, 2, ranks]: of forward and backward


@dataclass(frozen=True)
class Rehearsal:
    """Hold what rehearsed steps take. seconds: by piece, of the microbatches of all steps."""

    forecast: Forecast
    steps: int
    seconds: Mapping[LayerRange, Seconds]
    ran: Mapping[str, int]  # by tower: ranks that ran in each microbatch; others lie between them
    run_time: RunTime  # with what passes computed
    planned: RunTime  # the same steps as the plan has them

    @cached_property
    def by_rank(self) -> dict[str, np.ndarray]:
        """Return the seconds that each rank computes of each tower, `[ranks]`."""
        by_tower: dict[str, np.ndarray] = {}
        for (tower, *_), seconds in self.seconds.items():
            by_tower[tower] = by_tower.get(tower, 0.0) + seconds.sum((0, 1))
        return by_tower

    @property
    def of_all(self) -> np.ndarray | None:
        """Return the seconds that each rank computes of all towers, `[ranks]`; None in units, which share none."""
        return None if self.forecast.config.units else sum(self.by_rank.values())

    @property
    def waits(self) -> dict[str, float]:
        """Return the seconds that a rank waits for the slowest one, on average, by tower."""
        waits: dict[str, float] = {}
        for (tower, *_), seconds in self.seconds.items():
            wait = float((seconds.max(-1) - seconds.mean(-1)).sum())
            waits[tower] = waits.get(tower, 0.0) + wait
        return waits

    @property
    def wait(self) -> float:
        """Return the share of the time of passes in which a rank waits for others, on average."""
        slowest = sum(float(seconds.max(-1).sum()) for seconds in self.seconds.values())
        return sum(self.waits.values()) / slowest


def rehearse(
    forecast: Forecast,
    reader: Reader,
    device: jax.Device,
    steps: int,
    ranks: int | None = 2,
    clock: Clock = time.perf_counter,
) -> Rehearsal:
    """Rehearse the first steps of a forecast run on a device.

    ranks: how many run in each microbatch, from that whose rows attend least to that whose attend
    most; seconds of others are interpolated by what they attend. None: all run.

    Raises UserError for a layout whose ranks are several devices.
    """
    rank_alone = RankAlone(forecast, reader, device)
    microbatches = [m for step in forecast.steps[:steps] for m in step.microbatches]
    seconds: dict[LayerRange, Seconds] = {}
    ran: dict[str, int] = {}
    for number, piece in enumerate(rank_alone.pieces):
        chosen = [rank_alone.choose(piece, m, ranks) for m in microbatches]
        ran[piece[0]] = max(map(len, chosen))
        timed = rank_alone.time_passes(number, microbatches, chosen, clock)
        of_piece = [
            rank_alone.interpolate(piece, m, of_ranks, values)
            for m, of_ranks, values in zip(microbatches, chosen, timed, strict=True)
        ]
        owner = rank_alone.owners[number]
        seconds[owner] = seconds.get(owner, 0.0) + np.stack(of_piece)
    return Rehearsal(
        forecast,
        steps,
        seconds,
        ran,
        run_time=rank_alone.time_steps(steps, seconds),
        planned=rank_alone.time_steps(steps),
    )


class RankAlone:
    """Hold the pieces of a run's stages on one device, and pack any rank's rows for them."""

    def __init__(
        self, forecast: Forecast, reader: Reader, device: jax.Device, room: float | None = None
    ) -> None:
        """room: bytes of a piece's parameters and gradients, by which it is cut; None: of the device's memory."""
        plan = forecast.plan
        config = apply_memory_plan(forecast.config, plan.policies, plan.loss_chunks)
        self.forecast = forecast
        self.reader = reader
        self.config = in_units(config, forecast.mesh)
        _check_layout(self.config)
        self.model = resolve_attention(
            config.model, forecast.speed.rates, forecast.layout.topology.context
        )
        self.sharded = shard_stages(self.config)
        self.batch_layout = BatchLayout.of_config(config)
        if room is None:
            limit = (device.memory_stats() or {}).get("bytes_limit") or host_ram()
            room = SHARE_OF_PARAMETERS * limit
        of_stages = dict.fromkeys(
            piece for stage in list_stages(self.config) for piece in stage.pieces
        )
        cut = [(part, piece) for piece in of_stages for part in self._cut(piece, room)]
        self.pieces = [part for part, _ in cut]
        self.owners = [piece for _, piece in cut]  # of every piece, that which a stage runs
        starts: dict[str, tuple[int, ...]] = {}
        for tower, start, _ in self.pieces:
            starts[tower] = starts.get(tower, ()) + (start,) * (start > 0)
        model = build_model(self.config, starts)
        mesh = make_mesh(MeshConfig(), [device])
        stages = [
            PlacedStage(f"{tower}[{start}:{stop}]", Stage.of_layers(model, [piece]), mesh)
            for piece in self.pieces
            for tower, start, stop in [piece]
        ]
        self.executor = make_executor(
            self.config, model, stages, accumulates=accumulates(self.config)
        )

    def _cut(self, piece: LayerRange, room: float) -> list[LayerRange]:
        """Cut a piece into parts of layers of so many bytes."""
        tower, start, stop = piece
        of_stage = next(
            part
            for stage in self.sharded
            for part in stage.pieces
            if (part.piece.tower, part.piece.start) == (tower, start)
        )
        parts = min(math.ceil(BYTES * of_stage.parameters / room), max(1, stop - start))
        bounds = np.linspace(start, stop, parts + 1).round().astype(int).tolist()
        return [LayerRange(tower, *bound) for bound in pairwise(bounds)]

    def stage_of(self, tower: str) -> ShardedStage:
        """Return the first stage with layers of a tower."""
        return next(
            stage for stage in self.sharded if any(p.piece.tower == tower for p in stage.pieces)
        )

    def ranks_of(self, tower: str) -> int:
        """Count the ranks over which a tower's rows lie."""
        stage = self.stage_of(tower)
        axes = stage.rules.rows if tower == "llm" else stage.rules.item_rows
        return row_ranks(stage.mesh, axes)

    def visited(self, piece: LayerRange, microbatch: MicrobatchPlan) -> np.ndarray:
        """Count the pairs that each rank's attention visits, `[ranks]`; zeros where all compute the same."""
        tower = piece[0]
        ranks = {name: self.ranks_of(name) for name in self.model.towers}
        visited = visited_by_rank(self.model, self.forecast.layout, microbatch, ranks)
        return visited.get(tower, np.zeros(ranks[tower]))

    def choose(self, piece: LayerRange, microbatch: MicrobatchPlan, count: int | None) -> list[int]:
        """Choose ranks to run, in the order of what they attend."""
        visited = self.visited(piece, microbatch)
        if count is None:
            return list(range(len(visited)))
        # of ranks that attend as much one is enough
        different = np.unique(visited, return_index=True)[1]
        places = np.linspace(0, len(different) - 1, min(count, len(different)))
        return different[places.round().astype(int)].tolist()

    def interpolate(
        self,
        piece: LayerRange,
        microbatch: MicrobatchPlan,
        ranks: Sequence[int],
        seconds: np.ndarray,
    ) -> np.ndarray:
        """Return the seconds of both passes of all ranks, `[2, ranks]`, from those that ran, `[2, n]`."""
        visited = self.visited(piece, microbatch)
        order = np.argsort(visited[ranks], kind="stable")
        known = visited[ranks][order]
        every = np.stack([np.interp(visited, known, of_pass[order]) for of_pass in seconds])
        every[:, ranks] = seconds
        return every

    # ----------------------------------------------------------------------------------------------
    # running

    def time_passes(
        self,
        number: int,
        microbatches: Sequence[MicrobatchPlan],
        ranks: Sequence[Sequence[int]],
        clock: Clock,
    ) -> list[np.ndarray]:
        """Time a piece's passes of each microbatch on these ranks: float64 `[2, ranks]` each."""
        seconds: dict[tuple[int, int], tuple[float, float]] = {}
        for shape in dict.fromkeys(m.shape for m in microbatches):
            of_shape = {
                (n, rank): m
                for n, m in enumerate(microbatches)
                if m.shape == shape
                for rank in ranks[n]
            }
            seconds |= self._time_shape(number, shape, of_shape, clock)
        return [
            np.array([seconds[n, rank] for rank in of_ranks]).T for n, of_ranks in enumerate(ranks)
        ]

    def _time_shape(
        self,
        number: int,
        shape: Shape,
        microbatches: Mapping[tuple[int, int], MicrobatchPlan],
        clock: Clock,
    ) -> dict[tuple[int, int], tuple[float, float]]:
        """Time a piece's passes of microbatches of one shape, by number and rank."""
        passes = PiecePasses(
            RunPrograms(self.config, self.executor, self.shape_of(number, shape)), number
        )
        batches = {
            (n, rank): passes.put(self._rows(number, m, rank))
            for (n, rank), m in microbatches.items()
        }
        return passes.time(batches, clock)

    def shape_of(self, number: int, shape: Shape) -> BatchShape:
        """Return the shape of a microbatch on one device of a piece."""
        layout = self.forecast.layout
        tower = self.pieces[number][0]
        receiver = self.stage_of("llm") if tower == "llm" else None
        rows = rows_on_device(self.config, layout, self.sharded, receiver)
        towers = dict(zip(rows, zip(rows.values(), shape.lengths, strict=True), strict=True))
        # What arrives of all peers is one chunk.
        peers = layout.topology.peers
        names = list(self.config.model.item_modules)
        widths = {name: peers * width for name, width in zip(names, shape.widths, strict=True)}
        return BatchShape(towers, widths, 1)

    def _rows(self, number: int, microbatch: MicrobatchPlan, rank: int) -> Microbatch:
        """Pack a rank's rows of a piece's tower."""
        tower = self.pieces[number][0]
        topology = microbatch.topology
        share = dict.fromkeys(self.config.model.item_modules, range(0))
        ranks = range(0)
        if tower == "llm":
            ranks = range(rank, rank + 1)
        else:
            per_rank = topology.ranks * topology.encoders_per_rank // self.ranks_of(tower)
            share[tower] = range(rank * per_rank, (rank + 1) * per_rank)
        # What cannot be read keeps its place, as in a run.
        batch = pack_microbatch(microbatch, self.batch_layout, self.reader, ranks, share, {})
        stage = self.executor.stages[number].stage
        text = None
        if stage.text:
            send = {name: table.reshape(1, 1, -1) for name, table in batch.text.send.items()}
            text = select_tables(batch.text._replace(send=send), stage)
        return Microbatch(text, {name: batch.items[name] for name in stage.towers if name != "llm"})

    def time_steps(
        self, steps: int, seconds: Mapping[LayerRange, Seconds] | None = None
    ) -> RunTime:
        """Time the first steps on the cluster, with what passes computed or as planned."""
        forecast = self.forecast
        microbatches = [step.microbatches for step in forecast.steps[:steps]]
        computed: list[list[Computed]] | None = None
        if seconds is not None:
            numbers = iter(range(sum(map(len, microbatches))))
            computed = [
                [
                    {
                        (tower, start): tuple(of_piece[n].max(-1).tolist())
                        for (tower, start, _), of_piece in seconds.items()
                    }
                    for _, n in zip(of_step, numbers, strict=False)
                ]
                for of_step in microbatches
            ]
        return time_run(
            self.config,
            forecast.layout,
            forecast.plan,
            forecast.cluster,
            forecast.speed,
            microbatches,
            computed,
        )


def _check_layout(config: Config) -> None:
    """Raise UserError where a rank is several devices, each of which computes a part of its rows' layers."""
    for name, unit in config.units.items():
        for axis in ("tensor", "context", "expert"):
            if getattr(unit, axis) > 1:
                where = "mesh" if name == "all" else f"units.{name}"
                raise UserError(
                    f"{where}.{axis}={getattr(unit, axis)}: one device rehearses ranks of one device; "
                    f"set {where}.{axis}=1, or look at the plan"
                )


class PiecePasses:
    """Compile a piece's passes, and run them with random parameters and activations."""

    def __init__(self, programs: RunPrograms, number: int) -> None:
        executor = programs.executor
        self.program = executor.programs[number]
        self.compiled, self.residuals = programs.compile_passes(number)
        self.batch = programs.batch(number)
        self.parameters = draw(programs.parameters(number))
        self.inputs = draw(programs.inputs(number))
        self.losses = draw(self.program.sums.losses)
        adds = executor.accumulates or not self.program.is_sink
        self.sums = draw(programs.sums(number)) if adds else None
        model = executor.model
        self.noise = np.zeros(2, np.uint32) if model.is_random else None
        self.weights = dict.fromkeys(self.program.stage.losses, jnp.float32(1))

    def put(self, batch: Microbatch) -> Microbatch:
        """Bring a rank's rows to the device. Raises ValueError where they have other shapes than the programs."""
        items = {
            name: EncodedItems(draw(self.batch.items[name].values), *of_tower[1:])
            if isinstance(self.batch.items[name], EncodedItems)
            else of_tower
            for name, of_tower in batch.items.items()
        }
        batch = batch._replace(items=items)

        def place(x: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
            if (x.shape, x.dtype) != (struct.shape, struct.dtype):
                raise ValueError(f"rows of {x.dtype} {x.shape}, programs of {struct}")
            return jax.device_put(x, struct.sharding)

        return jax.tree.map(place, batch, self.batch)

    def time(
        self, batches: Mapping[Any, Microbatch], clock: Clock
    ) -> dict[Any, tuple[float, float]]:
        """Time both passes of each batch. They take turns, so that a slow moment of the machine hits all."""
        times: dict[Any, list[tuple[float, float]]] = {key: [] for key in batches}
        for round_number in range(ROUNDS + 1):
            for key, batch in batches.items():
                seconds = self._run(batch, clock)
                if round_number:  # the first one warms up
                    times[key].append(seconds)
        return {key: tuple(np.min(seconds, axis=0).tolist()) for key, seconds in times.items()}

    def _run(self, batch: Microbatch, clock: Clock) -> tuple[float, float]:
        """Run forward and backward; return the seconds of each. Both passes of a sink are one program."""
        if self.program.is_sink:
            begin = clock()
            sums, gradients = self.compiled["forward_backward"](
                *self.parameters, self.sums, batch, self.weights, self.noise, self.inputs
            )
            jax.block_until_ready((sums, gradients))
            end = clock()
            self.sums = sums if self.sums is not None else None
            return 0.0, end - begin
        operands = (self.inputs, batch, self.noise, self.weights, self.losses)
        if not self.program.has_backward:
            begin = clock()
            jax.block_until_ready(self.compiled["forward"](merge(*self.parameters), *operands))
            return clock() - begin, 0.0
        begin = clock()
        outputs, residuals, _ = self.compiled["forward"](*self.parameters, *operands)
        jax.block_until_ready((outputs, residuals))
        middle = clock()
        trained = {name: outputs[name] for name in self.program.trained & set(outputs)}
        gradients, inputs = self.compiled["backward"](
            *self.parameters, self.sums.gradients, batch, residuals, trained
        )
        jax.block_until_ready((gradients, inputs))
        end = clock()
        self.sums = self.sums._replace(gradients=gradients)
        return middle - begin, end - middle


def draw(structs: Any) -> Any:
    """Fill arrays of these shapes with the same random numbers over and over; integers with zeros."""
    numbers = SCALE * np.random.default_rng(0).standard_normal(DRAWN, np.float32)

    def fill(struct: jax.ShapeDtypeStruct) -> jax.Array:
        floating = jnp.issubdtype(struct.dtype, jnp.floating)
        values = numbers.astype(struct.dtype) if floating else np.zeros(1, struct.dtype)
        return jax.device_put(np.resize(values, struct.shape), struct.sharding)

    return jax.tree.map(fill, structs)
