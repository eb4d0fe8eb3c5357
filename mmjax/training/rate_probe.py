"""Probe what positions and pairs take on these devices, by two rows: one sample, and the same tokens as many samples.

Everything but attention computes whole rows, and attention what the mask allows, so that two masks
tell both prices. Masks are data: the run's own gradient program runs on them, without an update,
and nothing compiles. What is learnt is shown and stored for plans. No step is planned by it, for
samples would then be placed by what a clock said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mmjax.balance.mask_work import Mask, allowed_keys
from mmjax.balance.parts import LLM
from mmjax.batch import PADDING, TEXT_KIND, Microbatch, TextBatch
from mmjax.config import Config, DecoderConfig
from mmjax.config.model import frozen_modules
from mmjax.console import print_lines
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.attended_pairs import pairs_by_length
from mmjax.data.plan.budget import prices_of
from mmjax.disk import atomic_write
from mmjax.distributed import coordination
from mmjax.parallel.sharding import loss_parts_are_of_tokens
from mmjax.planning.flops import Flops, executed
from mmjax.planning.hardware import Device
from mmjax.planning.measured_file import Probed, probed_text, read_probed
from mmjax.planning.work import resolve_attention
from mmjax.runtime.devices import device_description
from mmjax.runtime.executor import Executor
from mmjax.runtime.run_dir import path_words
from mmjax.runtime.stage_program import Sums
from mmjax.training.metrics import rank_prices, rank_room

# Steps of a start before rows are probed: a card that was idle has a higher clock for about 16
# seconds.
STEPS = 16
SAMPLES = 64  # that a row has in the second probe
CALLS = 3  # of each probe; the first is not counted
DISAGREES = 1.5  # times as long as assumed, or as short, is worth a line
Shares = dict[str, float]  # of a device's peak, by `measured_file.SHARES`


class ProbedRow(NamedTuple):
    """A microbatch whose rows are cut into samples, as it was timed."""

    seconds: float  # of forward and backward
    pairs: float  # of the LLM, on the rank that has most


def cut_rows(text: TextBatch, samples: int) -> TextBatch:
    """Make what each row holds so many samples of causal text, as long as each other; padding stays. NumPy arrays."""
    filled = text.sample >= 0
    # Context parallelism has moved tokens: `pos` is their order.
    column = np.where(filled, text.pos, text.pos.max(initial=0) + 1)
    place = column.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    number = place * samples // np.maximum(1, filled.sum(1, keepdims=True))
    return with_samples(text, np.where(filled, number, PADDING))


def with_samples(text: TextBatch, sample: np.ndarray) -> TextBatch:
    """Give every token another sample, int `[R, T]`, -1 = padding, of causal text and nothing else."""
    ones = np.full_like(text.kind, TEXT_KIND)
    return text._replace(
        sample=sample.astype(text.sample.dtype), span=np.zeros_like(text.span), kind=ones, sees=ones
    )


def fullest_pairs(llm: DecoderConfig, text: TextBatch, ranks: int, context: int) -> float:
    """Count the pairs of causal text on the rank that has most of them, whose rows are these of `ranks`.

    context: devices that share a row. They wait for the one of them with most, so that all count as
    much.
    """
    rows = []
    for mask in map(
        Mask._make, zip(*(getattr(text, field) for field in Mask._fields), strict=True)
    ):
        lengths = np.bincount(mask.sample[mask.sample >= 0])
        of_devices = allowed_keys(mask).reshape(context, -1).sum(1) if context > 1 else np.ones(1)
        uneven = of_devices.max() / max(of_devices.mean(), 1)
        rows.append(float(pairs_by_length(llm, lengths).sum()) * uneven)
    return float(np.reshape(rows, (ranks, -1)).sum(1).max(initial=0))


def time_gradients(
    executor: Executor,
    state: Any,
    accumulated: list[Sums | None],
    batch: Microbatch,
    noise: np.ndarray | None,
    name: str = "",
) -> tuple[list[float], list[Sums | None]]:
    """Time the gradient program on a microbatch, in the counted calls; also return the sums, which it adds to.

    batch: this process's rows. name: unique to this microbatch, by which processes wait for each
    other.
    """
    (put,), weights, *_ = executor.weigh_batches([executor.put(batch)])
    seconds = []
    for call in range(CALLS):
        jax.block_until_ready((state, accumulated, put, weights))
        coordination.wait_for_all(f"probe {name} {call}")
        began = time.perf_counter()
        sums = executor.gradients(state, accumulated, [put], weights, noise).sums
        jax.block_until_ready(sums)
        seconds.append(time.perf_counter() - began)
        accumulated = sums if executor.accumulates else executor.zeros()
        del sums  # gradients that no sum takes over have their memory once
    return seconds[1:], accumulated


def fit_rates(
    rows: float, items: float, pair: float, one: ProbedRow, many: ProbedRow
) -> Probed | None:
    """Solve for what positions and pairs take, over what is assumed; None where the two rows do not tell.

    rows, items: seconds that are assumed of all rows, and of the attention of encoders and
    generators, which attend by the same kernel. pair: seconds assumed of one pair of the LLM.
    """
    attention = pair * (one.pairs - many.pairs)
    if attention <= 0 or one.seconds <= many.seconds:
        return None
    pairs = (one.seconds - many.seconds) / attention
    position = (many.seconds - pairs * (pair * many.pairs + items)) / rows
    return Probed(position, pairs) if position > 0 else None


def total_of(flops: Mapping[str, Flops]) -> Flops:
    """Add up the FLOPs of all modules, at the rate of products in the computation's precision."""
    return Flops._make(map(sum, zip(*(f.at_one_rate for f in flops.values()), strict=True)))


def reached_shares(
    rows: Flops, attending: Flops, seconds: float, attention: float, peak: float
) -> Shares:
    """Compute the shares of a peak, FLOP/s, that products reach, and the attention kernel where it runs.

    rows, attending: of a microbatch that took so many seconds, without what attends and with it.
    attention: of these seconds, those for what attends.
    """
    if not attending.attention:  # blocks attend by products
        return {"products": attending.total / peak / seconds}
    products = rows.total / peak / (seconds - attention)
    # elementwise operations on pairs
    beside = (attending.total - attending.attention - rows.total) / peak / products
    return {"products": products, "attention": attending.attention / peak / (attention - beside)}


@dataclass(frozen=True)
class RateProbe:
    """Rates of a run on one mesh, measured once and stored in its folder."""

    config: Config
    executor: Executor
    loader: StepLoader
    path: Path  # of the measured-rates file
    loss_chunks: int

    @property
    def tells(self) -> bool:
        """Return whether ranks wait for each other's attention at all: several do, unless it computes whole rows."""
        prices = prices_of(self.config, self.loader.budget)
        return self.loader.layout.topology.ranks > 1 and prices.pair[LLM] > 0

    @property
    def device(self) -> jax.Device:
        """Return the mesh's first device."""
        return self.executor.mesh.devices.flat[0]

    def read(self) -> Probed | None:
        """Read what an earlier start has measured on such devices; the same on all processes."""
        stored = coordination.run_on_leader(
            lambda: _tree(read_probed(self.path, self.device.device_kind))
        )
        return stored and Probed(**stored)

    def measure(
        self,
        state: Any,
        accumulated: list[Sums | None],
        loaded: LoadedStep,
        noise: np.ndarray | None,
        beat: Callable[[], None],
    ) -> tuple[Probed | None, list[Sums | None]]:
        """Time both rows of a step's first microbatch and store what they tell. Returns it, and gradient sums of 0.

        All processes take part. beat: called between the two. What counts is the slowest process,
        for which the others wait in every step, and process 0 solves for all.
        """
        batch = loaded.microbatches[0]
        topology = self.loader.layout.topology
        ranks = len(batch.text.sample) // self.loader.layout.rows[LLM]
        figures = []
        for samples in (1, SAMPLES):
            text = cut_rows(batch.text, samples)
            pairs = fullest_pairs(self.config.model.llm, text, ranks, topology.context)
            seconds, accumulated = time_gradients(
                self.executor, state, accumulated, batch._replace(text=text), noise, str(samples)
            )
            figures.append([*seconds, pairs])
            beat()
        del accumulated  # before the sums that take its place
        gathered = np.array(
            [json.loads(text) for text in coordination.gather("probe", json.dumps(figures))]
        )
        slowest = gathered.max(0)  # [probes, figures]
        one, many = (ProbedRow(float(row[:-1].min()), float(row[-1])) for row in slowest)
        probed = coordination.run_on_leader(lambda: _tree(self._store(loaded, one, many)))
        return probed and Probed(**probed), self.executor.zeros()

    def _store(self, loaded: LoadedStep, one: ProbedRow, many: ProbedRow) -> Probed | None:
        """Solve for the rates, store them, and say where they are not those that are assumed."""
        layout = self.loader.layout
        device = device_description(self.executor.mesh.local_devices[0])
        # Devices that share an encoder rank by tensor parallelism share its work.
        devices = self.executor.mesh.size // layout.topology.ranks
        peak = device.peak(self.config.training.precision)
        scale = layout.topology.encoders_per_rank / devices / peak
        prices = rank_prices(prices_of(self.config, self.loader.budget), layout).times(scale, scale)
        rows = float((prices.position * rank_room(loaded.lengths[0], layout)).sum())
        items = float((prices.pair * loaded.pairs[0].max(-1))[LLM + 1 :].sum())
        probed = fit_rates(rows, items, float(prices.pair[LLM]), one, many)
        if probed is None:
            print_lines(
                f"rates  two rows tell none: as one sample {one.seconds:.4g} s, as {SAMPLES} {many.seconds:.4g} s; "
                "waits are by those that are assumed"
            )
            return None
        attention = probed.pair * (float(prices.pair[LLM]) * one.pairs + items)
        shares = self._shares(loaded, one, attention, device, devices)
        try:
            with atomic_write(self.path) as partial:
                partial.write_text(probed_text(self.device.device_kind, probed, shares))
        except OSError as error:  # the disk is full
            print_lines(
                f"WARNING {self.path} cannot be written: {error.strerror}; a later start probes again"
            )
        ratio = probed.pair / probed.position
        if not 1 / DISAGREES <= ratio <= DISAGREES:
            print_lines(
                f"rates  beside a position a pair that attends takes {ratio:.2g} times as long as assumed; waits "
                f"are by what was measured, and plans with --measured {path_words(self.path)}"
            )
        return probed

    def _shares(
        self, loaded: LoadedStep, one: ProbedRow, attention: float, device: Device, devices: int
    ) -> Shares:
        """Compute the shares of the peak of a rank's devices. attention: its seconds in the row of one sample."""
        layout = self.loader.layout
        precision = self.config.training.precision
        model = resolve_attention(
            self.executor.model.config, device.rates(precision), layout.topology.context
        )
        names = ("llm", *model.item_modules)
        lengths = zip(layout.rows, loaded.lengths[0].tolist(), strict=True)
        shape = dict(zip(names, lengths, strict=True))
        items = loaded.pairs[0].max(-1) * layout.topology.encoders_per_rank
        pairs = dict(zip(names, items.tolist(), strict=True)) | {"llm": one.pairs}
        reference = self.config.loss.repeats_forward
        frozen = frozen_modules(model)
        of_tokens = loss_parts_are_of_tokens(self.executor.mesh.shape, self.config.loss)
        again = self.loss_chunks > 1 and not of_tokens
        rows, attending = (
            total_of(executed(model, shape, frozen, again, attended, reference))
            for attended in (dict.fromkeys(names, 0.0), pairs)
        )
        return reached_shares(
            rows, attending, one.seconds, attention, devices * device.peak(precision)
        )


def _tree(probed: Probed | None) -> dict[str, float] | None:
    return None if probed is None else asdict(probed)
