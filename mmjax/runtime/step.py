"""The SPMD executor: compiled programs that accumulate gradients microbatch by microbatch and update once.

One gradient program per shape and one update program. Microbatches are a Python loop over donated buffers, so the
microbatches of a step may differ in shape and their number compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.batch import PADDING, Microbatch
from mmjax.config import Exchange
from mmjax.config.model import adapted_modules, module_names
from mmjax.models.model import Model, Params, merge, modules_of, partition
from mmjax.parallel.sharding import ShardingRules, activations_on, local_ranks, replicated, row_ranks, rows_sharding
from mmjax.runtime.losses import LossReport, Worst, losses_in_chunks, no_samples, step_loss, worse_of, worst_samples
from mmjax.runtime.state import Hyperparameters, Optimizer, TrainState, split, state_from, state_shardings

MOST_SPOILED = 32  # samples of a step that may be left out: where more cannot be read, it is not the samples


class Spoiled(NamedTuple):
    """The samples of a step that some process could not read: they weigh nothing."""

    samples: jax.Array  # int32 [MOST_SPOILED]: ids in the length index, -1 = none
    count: jax.Array  # int32 []: where it is more than MOST_SPOILED nothing is updated


class Said(NamedTuple):
    """Report one process's part of a step to all processes, with the update."""

    digest: int = 0  # of the step's plan, which must be the same everywhere; 63 bits
    content: int = 0  # sum of the hashes of its rows, 64 bits; a row that several processes hold counts once
    needed_flops: float = 0.0  # of its ranks
    busy: float = 0.0  # seconds that it kept the others waiting in the step before, at most
    stop: bool = False  # whether it was asked to stop


class Accumulated(NamedTuple):
    """Accumulate over microbatches: gradients in float32, the loss report, and the worst samples so far."""

    gradients: Params
    report: LossReport
    worst: Worst


class StepReport(NamedTuple):
    """Report one update, the same on every process."""

    report: LossReport
    worst: Worst
    gradient_norm: jax.Array
    agreed: jax.Array  # bool []: every process had planned the same step; where not, nothing was updated
    finite: jax.Array  # bool []: loss and gradient are; where not, nothing was updated
    stop: jax.Array  # bool []: some process was asked to stop
    content: jax.Array  # uint32 [2]: the hash of all rows, its lower half first
    needed_flops: jax.Array  # float32 []: of all processes' rows
    busy: jax.Array  # float32 [devices]: of each device's process
    spoiled: Spoiled | None = None


class Executor:
    """Runs a model on one mesh: init, gradient and update programs with explicit shardings."""

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        mesh: Mesh,
        rules: ShardingRules,
        sources: int,
        exchange: Exchange = "padded",
        loss_chunks: int = 1,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.rules = rules
        self.sources = sources
        self.exchange = exchange
        self.loss_chunks = loss_chunks
        self.frozen = frozenset(model.frozen)
        self.shardings = state_shardings(model, optimizer, self.frozen, mesh, rules)
        on_all = replicated(mesh)
        sums = LossReport(on_all, on_all)
        worst = Worst(on_all, on_all, on_all)
        accumulated = Accumulated(self.shardings.trainable, sums, worst)
        step_report = StepReport(
            report=sums,
            worst=worst,
            gradient_norm=on_all,
            agreed=on_all,
            finite=on_all,
            stop=on_all,
            content=on_all,
            needed_flops=on_all,
            busy=on_all,
        )
        self.per_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.abstract: TrainState = jax.eval_shape(partial(state_from, model, optimizer, self.frozen), model.abstract)
        self.born = cache(self._born)
        self.start = jax.jit(self._start, out_shardings=(self.shardings.step, self.shardings.optimizer))
        self.zeros = jax.jit(self._zeros, out_shardings=accumulated)
        self.accumulate = jax.jit(self._accumulate, out_shardings=accumulated, donate_argnums=2)
        self.agree = jax.jit(_all_spoiled, out_shardings=Spoiled(on_all, on_all))
        self.weigh = jax.jit(_weigh, out_shardings=(on_all, rows_sharding(mesh, rules.rows)))
        self.update = jax.jit(
            self._update, out_shardings=(self.shardings, accumulated, step_report), donate_argnums=(0, 1)
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules: the LLM, every encoder and its connector; then `<module>.lora` of adapters."""
        config = self.model.config
        return (*module_names(config), *(f"{module}.lora" for module in adapted_modules(config)))

    def init(self, key: jax.Array, pretrained: Params | None = None) -> TrainState:
        """A fresh state, every array born in its shards. pretrained: the parameters of some modules, in place."""
        # Two programs: random bits need as much memory as the parameters, and are gone when the moments come.
        pretrained = pretrained or {}
        modules = frozenset(modules_of(pretrained))
        drawn = self.born(modules)(key)
        read = partition(pretrained, self.frozen & modules)
        trainable, frozen = (merge(random, stored) for random, stored in zip(drawn, read, strict=True))
        step, moments = self.start(trainable)
        return TrainState(step, trainable, frozen, moments)

    def _born(self, without: frozenset[str] = frozenset()) -> Callable[[jax.Array], tuple[Params, Params]]:
        """The program that makes random parameters, trainable and frozen, in their shards.

        Of some modules none but the adapters.
        """

        def other(parts: tuple[Params, Params]) -> tuple[Params, Params]:
            return tuple(partition(part, without & modules_of(part))[0] for part in parts)

        def born(key: jax.Array) -> tuple[Params, Params]:
            return other(split(self.model, self.frozen, self.model.init(key)))

        return jax.jit(born, out_shardings=other((self.shardings.trainable, self.shardings.frozen)))

    def _start(self, trainable: Params) -> tuple[jax.Array, optax.OptState]:
        return jnp.zeros((), jnp.int32), self.optimizer.init(trainable)

    def _zeros(self) -> Accumulated:
        gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.abstract.trainable)
        return Accumulated(gradients, LossReport(jnp.zeros(self.sources), jnp.zeros(self.sources)), no_samples())

    def _accumulate(
        self,
        trainable: Params,
        frozen: Params,
        accumulated: Accumulated,
        batch: Microbatch,
        total_weight: jax.Array,
        noise: jax.Array | None = None,
    ) -> Accumulated:
        def loss(trainable: Params) -> tuple[jax.Array, tuple[LossReport, Worst]]:
            hidden, table = self.model.hidden_and_table(merge(trainable, frozen), batch, noise)
            cap = self.model.config.llm.logit_cap
            losses = losses_in_chunks(hidden, table, batch.text, self.loss_chunks, cap)
            total, report = step_loss(losses, batch.text, total_weight, self.sources)
            return total, (report, worst_samples(jax.lax.stop_gradient(losses), batch.text))

        with activations_on(self.mesh, self.rules, self.exchange):
            gradients, (report, worst) = jax.grad(loss, has_aux=True)(trainable)
        gradients, report = jax.tree.map(jnp.add, accumulated[:2], (gradients, report))
        return Accumulated(gradients, report, worse_of(accumulated.worst, worst))

    def _update(
        self,
        state: TrainState,
        accumulated: Accumulated,
        hyper: Hyperparameters,
        weight: jax.Array,
        words: jax.Array,
        numbers: jax.Array,
    ) -> tuple[TrainState, Accumulated, StepReport]:
        params, moments, norm = self.optimizer.update(accumulated.gradients, state.optimizer, state.trainable, hyper)
        # The columns of `words`: two halves of the digest, two of the content's hash, and the request to stop.
        digests = words[:, :2]
        content = words[:, 2:4].sum(0, dtype=jnp.uint32)
        stop = words[:, 4].any()
        agreed = jnp.all(digests.min(0) == digests.max(0))
        finite = jnp.isfinite(norm) & jnp.isfinite(accumulated.report.loss).all()
        # A selection, not a branch: it is part of the update's own pass over the parameters.
        valid = agreed & (weight > 0) & finite
        params, moments = jax.tree.map(
            lambda new, old: jnp.where(valid, new, old), (params, moments), (state.trainable, state.optimizer)
        )
        cleared = jax.tree.map(jnp.zeros_like, accumulated)
        step_report = StepReport(
            report=accumulated.report,
            worst=accumulated.worst,
            gradient_norm=norm,
            agreed=agreed,
            finite=finite,
            stop=stop,
            content=content,
            needed_flops=numbers[:, 0].sum(),
            busy=numbers[:, 1],
        )
        return TrainState(state.step + valid, params, state.frozen, moments), cleared, step_report

    def put(self, batch: Microbatch) -> Microbatch:
        """Bring a packed microbatch to the devices: the rows of this process's ranks, as many for each rank."""

        def put(x: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
            # 6 rows of this process's 2 ranks, of 8 ranks in all: 6 * 8 // 2 = 24 rows.
            ranks = row_ranks(self.mesh, axes)
            shape = (len(x) * ranks // len(local_ranks(self.mesh, axes)), *x.shape[1:])
            return jax.make_array_from_process_local_data(rows_sharding(self.mesh, axes), x, shape)

        return _put(batch, put, self.rules)

    def step(
        self,
        state: TrainState,
        accumulated: Accumulated,
        batches: Sequence[Microbatch],
        hyper: Hyperparameters,
        process_report: Said | None = None,
        noise: np.ndarray | None = None,
        spoiled: Sequence[int] = (),
    ) -> tuple[TrainState, Accumulated, StepReport]:
        """One optimizer update over microbatches that lie on the devices. `accumulated` is zero before and after.

        process_report: of this process, for the others. noise: uint32 (seed, step) of dropout; None: none is.
        spoiled: the samples that this process could not read. Nothing is updated, and the step does not count, where
        processes differ in the digest of its plan, where loss or gradient are not finite, where no token of the step
        has a loss weight, or where more samples are spoiled than may be left out.
        """
        weight, batches, left_out = self.weighed(batches, spoiled)
        for batch in batches:
            accumulated = self.accumulate(
                state.trainable, state.frozen, accumulated, batch, weight, noise if self.model.drops else None
            )
        words = self.put_said(process_report or Said())
        state, accumulated, report = self.update(state, accumulated, hyper, weight, *words)
        return state, accumulated, report._replace(spoiled=left_out)

    def weighed(
        self, batches: Sequence[Microbatch], spoiled: Sequence[int] = ()
    ) -> tuple[jax.Array, list[Microbatch], Spoiled]:
        """The loss weight of a step, its microbatches without weight where samples are spoiled, and which all are."""
        unreadable = np.full((len(self.mesh.local_devices), MOST_SPOILED + 1), PADDING, np.int32)
        ids = list(spoiled)[: MOST_SPOILED + 1]
        unreadable[0, : len(ids)] = ids
        left_out = self.agree(jax.make_array_from_process_local_data(self.per_device, unreadable))
        weight = np.float32(0)
        weighed = []
        for batch in batches:
            weight, own_weight = self.weigh(weight, batch.text.weight, batch.text.owner, left_out)
            weighed.append(batch._replace(text=batch.text._replace(weight=own_weight)))
        return weight, weighed, left_out

    def put_said(self, process_report: Said) -> tuple[jax.Array, jax.Array]:
        """Put this process's report on each of its devices: uint32 `[devices, 5]`, float32 `[devices, 2]`."""
        words = np.zeros((len(self.mesh.local_devices), 5), np.uint32)
        numbers = np.zeros((len(words), 2), np.float32)
        # 64-bit numbers take two words, the lower first: 0x1_0000_0002 is 2, 1.
        words[:, :2] = process_report.digest & 0xFFFFFFFF, process_report.digest >> 32
        words[0, 2:4] = process_report.content & 0xFFFFFFFF, process_report.content >> 32  # it is summed over devices
        words[:, 4] = process_report.stop
        numbers[:, 1] = process_report.busy
        # A rank's rows are counted once for each of the devices that share them.
        shared = len(local_ranks(self.mesh)) * self.mesh.size // row_ranks(self.mesh)
        numbers[:, 0] = process_report.needed_flops / shared
        put = partial(jax.make_array_from_process_local_data, self.per_device)
        return put(words), put(numbers)

    def compile(
        self, state: TrainState, accumulated: Accumulated, batches: Sequence[Microbatch], hyper: Hyperparameters
    ) -> None:
        """Compile the gradient program of each batch's shape and the update ahead of the first step, for training."""
        # A model that drops nothing takes no noise: there is then one program, whether a step is given any or not.
        noise = np.zeros(2, np.uint32) if self.model.drops else None
        for batch in batches:
            put = self.put(batch)
            weight, (put, _), _ = self.weighed([put, put])  # begun with a number, gone on with an array
            self.accumulate.lower(state.trainable, state.frozen, accumulated, put, weight, noise).compile()
        self.update.lower(state, accumulated, hyper, weight, *self.put_said(Said())).compile()


def _all_spoiled(samples: jax.Array) -> Spoiled:
    """Merge the samples that each device was given, every sample once."""
    ids = -jnp.sort(-samples.reshape(-1))
    # An id stays where it differs from the one before: 7, 7, 3, -1 becomes 7, -1, 3, -1.
    unique = jnp.where((ids >= 0) & (ids != jnp.pad(ids[:-1], (1, 0), constant_values=PADDING)), ids, PADDING)
    return Spoiled(jax.lax.top_k(unique, MOST_SPOILED)[0], (unique >= 0).sum())


def _weigh(total: jax.Array, weight: jax.Array, owner: jax.Array, spoiled: Spoiled) -> tuple[jax.Array, jax.Array]:
    """The total with a microbatch's loss weights `[R, T]` added, and those; 0 where their sample is spoiled."""
    out = (owner[..., None] == spoiled.samples).any(-1) | (spoiled.count > MOST_SPOILED)
    weight = jnp.where(out, 0.0, weight)
    return total + weight.sum(), weight


def put_rows(batch: Microbatch, mesh: Mesh, rules: ShardingRules) -> Microbatch:
    """A microbatch that every process has whole, made for the ranks of `mesh`, on its devices."""

    def put(x: np.ndarray, axes: tuple[str, ...]) -> jax.Array:
        return jax.make_array_from_callback(x.shape, rows_sharding(mesh, axes), x.__getitem__)

    return _put(batch, put, rules)


def _put(
    batch: Microbatch, put: Callable[[np.ndarray, tuple[str, ...]], jax.Array], rules: ShardingRules
) -> Microbatch:
    """Every array put on the axes that its rows are spread over."""
    text = jax.tree.map(lambda x: put(x, rules.rows), batch.text)
    return Microbatch(text, jax.tree.map(lambda x: put(x, rules.item_rows), batch.items))
