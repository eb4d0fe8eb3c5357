"""Compute a step's metrics: loss, speed, balance and waits of ranks, memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from mmjax.balance.parts import LLM, dist_ratio, pad_ratio, sp_ratio
from mmjax.balance.waits import Prices, padding_share, rank_seconds, wait_share
from mmjax.config import Config
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.budget import prices_of
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.step_plan import RankLayout
from mmjax.distributed import coordination
from mmjax.losses.objective import mean_measures
from mmjax.losses.step_losses import ExpertSums
from mmjax.planning.measured_file import Probed
from mmjax.runtime.devices import CompileCounter, open_files, peak_memory_used, resident_memory
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import Hyperparameters
from mmjax.runtime.step_report import StepReport
from mmjax.training.metrics_log import MetricValue

Scalars = dict[str, float]


def rank_prices(prices: Prices, layout: RankLayout) -> Prices:
    """Return the prices of a rank's part of each module: all its encoder ranks share its part of the LLM."""
    share = np.where(
        np.arange(len(prices.position)) == LLM, 1 / layout.topology.encoders_per_rank, 1.0
    )
    return prices.times(share, share)


def rank_room(lengths: np.ndarray, layout: RankLayout) -> np.ndarray:
    """Count the positions of a rank's rows of these lengths, float64 `[..., M]`; of an encoder, those of one of its."""
    parts = np.where(np.arange(len(layout.rows)) == LLM, 1, layout.topology.encoders_per_rank)
    return lengths * (np.array(layout.rows) / parts)


def balance_scalars(
    loaded: LoadedStep,
    modules: Sequence[str],
    layout: RankLayout,
    prices: Prices,
    measured: Prices | None = None,
) -> Scalars:
    """Measure the fill of a step's rows and the balance of its ranks, whichever process holds them.

    By module: fill, pad ratio (OmniBal eq. 1), dist ratio over ranks (eq. 2) and the fullest rank
    over the mean one, in positions and in pairs of attention; the positions' also as they would be
    with balance `none`. sp_ratio: over the devices that share a rank's rows, of encoders (OmniBal,
    appendix A.8). straggler_wait: the share of the step in which a rank waits, on average, for the
    one with most attention, in each phase of each microbatch: rows of one length take equally long,
    whatever they hold. padding: the share of the rows' time for positions that hold nothing.
    straggler_wait_before: what both would come to with balance `none`, in rows that its fullest
    rank needs. prices: of the modules, as steps are planned by. measured: those that count instead,
    where they are known; straggler_wait_sheet is then the wait by the others.
    """
    ranks = layout.topology.ranks
    scalars = Scalars()
    room = rank_room(loaded.lengths, layout)
    if measured is not None:
        scalars["straggler_wait_sheet"] = wait_share(
            rank_seconds(rank_prices(prices, layout), room, loaded.pairs)
        )
        prices = measured
    shared = rank_prices(prices, layout)
    scalars["straggler_wait"] = wait_share(rank_seconds(shared, room, loaded.pairs))
    scalars["padding"] = padding_share(
        prices, loaded.useful.sum(-1), loaded.lengths * ranks * np.array(layout.rows)
    )
    fullest = rank_seconds(shared, loaded.unbalanced.max(-1), loaded.unbalanced_pairs).max(-1).sum()
    needed = (
        rank_seconds(shared, loaded.unbalanced.mean(-1), loaded.unbalanced_pairs).mean(-1).sum()
    )
    scalars["straggler_wait_before"] = float(1 - needed / max(fullest, np.finfo(float).tiny))
    useful = budget = 0
    for k, module in enumerate(modules):
        rows = ranks * layout.rows[k]
        used = loaded.useful[:, k, :rows]  # useful positions of each row, by microbatch
        positions = rows * int(loaded.lengths[:, k].sum())
        module_useful = int(used.sum())
        scalars[f"fill/{module}"] = module_useful / positions
        scalars[f"pad_ratio/{module}"] = float(
            np.mean([pad_ratio(u) if u.any() else 0.0 for u in used])
        )
        useful += module_useful
        budget += positions
    for suffix, work in (("", loaded.balanced), ("_before", loaded.unbalanced)):
        by_rank = work.sum(0)
        for k, module in enumerate(modules):
            any_work = by_rank[k].any()
            scalars[f"dist_ratio{suffix}/{module}"] = (
                float(dist_ratio(by_rank[k])) if any_work else 0.0
            )
            maximum_over_mean = by_rank[k].max() / by_rank[k].mean() if any_work else 1.0
            scalars[f"max_over_mean{suffix}/{module}"] = float(maximum_over_mean)
    for module, pairs in zip(modules, loaded.pairs.sum(0), strict=True):
        scalars[f"max_pairs_over_mean/{module}"] = (
            float(pairs.max() / pairs.mean()) if pairs.any() else 1.0
        )
    if (context := layout.topology.context) > 1:
        for module, totals in zip(modules[1:], loaded.balanced.sum(0)[1:], strict=True):
            of_devices = totals.reshape(ranks, context, -1).sum(-1)
            scalars[f"sp_ratio/{module}"] = float(sp_ratio(of_devices)) if totals.any() else 0.0
    return scalars | {"useful/budget": useful / budget}


def exchange_scalars(
    loaded: LoadedStep, encoders: Sequence[str], topology: Topology, token_bytes: int
) -> Scalars:
    """Count the bytes that the all-to-alls of a step's forward pass send between ranks, with and without padding.

    The backward pass sends as much. token_bytes: of one encoder token.
    """
    ranks = topology.ranks
    peers = topology.peers
    # Every rank sends `widths` tokens to each of its other peers, filled or not.
    sent = loaded.widths.sum(0) * ranks * (peers - 1) * token_bytes
    useful = loaded.moved.sum(0) * token_bytes
    scalars = {f"all_to_all_bytes/{e}": float(n) for e, n in zip(encoders, sent, strict=True)}
    scalars |= {
        f"all_to_all_useful_bytes/{e}": float(n) for e, n in zip(encoders, useful, strict=True)
    }
    # Share of a rank's other peers that are on other nodes.
    away = max(0, peers - topology.ranks_per_node) / max(1, peers - 1)
    return scalars | {"inter_node_share": away if sent.any() else 0.0}


def expert_scalars(sums: ExpertSums | None) -> Scalars:
    """Return the losses of a step's experts, unweighted, the tokens of the fullest expert over the mean, and turns.

    The imbalance is that of the most uneven layer: 1 where all experts of every layer have the
    same. Turns are those that tokens took to the devices of their experts beyond one a layer and
    microbatch.
    """
    if sums is None:
        return {}
    means = np.maximum(sums.tokens.mean(-1), 1e-9)
    return {
        "experts/balance_loss": float(sums.balance),
        "experts/z_loss": float(sums.z),
        "experts/imbalance": float((sums.tokens.max(-1) / means).max()),
        "experts/extra_turns": float(sums.extra_turns),
    }


class StepMetrics:
    """Times a run's steps, and computes the numbers to log for each. peak_flops: FLOP/s of all devices together."""

    def __init__(
        self,
        config: Config,
        executor: Executor,
        loader: StepLoader,
        programs: CompileCounter,
        peak_flops: float,
    ) -> None:
        self._config = config
        self._executor = executor
        self._loader = loader
        self._programs = programs
        self._peak_flops = peak_flops
        self._prices = prices_of(config, loader.budget)
        self._measured: Prices | None = None
        self._processes = [f"process {p} ({host})" for p, host in enumerate(coordination.hosts())]
        self.steps = 0
        self.total_seconds = 0.0
        self.wait_seconds = 0.0  # of these, for data
        self._waited = 0.0  # the same since the last step ended, for whichever batch
        # of a step each, without waiting for data
        self._recent_seconds: deque[float] = deque(maxlen=100)
        self.start()

    def use_probed(self, probed: Probed | None) -> None:
        """Measure waits from here on by what two rows took, where that is known."""
        self._measured = (
            None if probed is None else self._prices.times(probed.position, probed.pair)
        )

    def start(self) -> None:
        """Mark the end of compiling: programs compiled from here on count as compiled after the start."""
        self._compiled_at_start = self._programs.requested
        self.restart_timer()

    def restart_timer(self) -> None:
        """Restart the step timer, so that what happened between steps is not charged to the next one."""
        self._previous_end = time.monotonic()

    @property
    def programs_compiled(self) -> int:
        """Return the number of programs that were compiled after the start."""
        return self._programs.requested - self._compiled_at_start

    def add_wait(self, seconds: float) -> None:
        """Count seconds of waiting for data. They are of the step that ends next, whose batch came earlier."""
        self._waited += seconds

    def typical_seconds(self) -> float:
        """Return the median seconds of a step without waiting for data."""
        return float(np.median(self._recent_seconds))

    def compute(
        self, loaded: LoadedStep, report: StepReport, hyper: Hyperparameters
    ) -> dict[str, MetricValue]:
        """Compute the numbers of the step that has just ended. report: on the host."""
        clock = time.monotonic()
        seconds = clock - self._previous_end
        self._previous_end = clock
        wait_seconds = self._waited
        self._waited = 0.0
        self.steps += 1
        self.total_seconds += seconds
        self.wait_seconds += wait_seconds
        self._recent_seconds.append(seconds - wait_seconds)
        modules = ("llm", *self._config.model.item_modules)
        layout = self._loader.layout
        token_bytes = self._config.model.llm.width * self._executor.model.dtype.itemsize
        tokens = dict(zip(("text", *modules[1:]), loaded.tokens.tolist(), strict=True))
        by_source = zip(
            self._config.data.sources, report.losses.loss, report.losses.weight, strict=True
        )
        own_epochs = dict(
            zip(self._config.data.sources, loaded.source_epochs.tolist(), strict=True)
        )
        memory = peak_memory_used(self._executor.mesh)
        weight = report.losses.weight.sum() or 1.0
        return {
            "loss": report.mean_loss,
            **{
                f"loss/{source}": float(loss / weight)
                for source, loss, weight in by_source
                if weight > 0
            },
            **expert_scalars(report.losses.experts),
            # Mean error of the step's patches.
            **{
                f"image_loss/{name}": float(sums[0] / max(sums[1], 1))
                for name, sums in report.losses.images.items()
            },
            **mean_measures(self._config.loss, report.losses.measures, weight),
            "gradient_norm": float(report.gradient_norm),
            **{
                name: float(rate)
                for name, rate in hyper.items()
                if name.startswith("learning_rate/")
            },
            **balance_scalars(loaded, modules, layout, self._prices, self._measured),
            **exchange_scalars(loaded, modules[1:], layout.topology, token_bytes),
            **{f"encoded/{name}": float(count) for name, count in loaded.encoded.items()},
            "epoch": float(loaded.epoch),
            **(
                {f"epoch/{name}": epochs for name, epochs in own_epochs.items()}
                if len(own_epochs) > 1
                else {}
            ),
            # Without those that could not be read.
            "samples": len(loaded.samples) - int(report.unreadable_count),
            "samples/s": len(loaded.samples) / seconds,
            "tokens/s": sum(tokens.values()) / seconds,
            **{f"tokens/s/{modality}": n / seconds for modality, n in tokens.items()},
            "mfu": float(report.needed_flops) / seconds / self._peak_flops,
            "programs_compiled": self.programs_compiled,
            "seconds/step": seconds,
            "seconds/data_wait": wait_seconds,
            "plan_ms": 1e3 * float(loaded.plan_seconds),
            "seconds/load": float(loaded.load_seconds),
            "data_wait_share": wait_seconds / seconds,
            **self._slowest(report.batch_seconds),
            "memory/host": resident_memory(),
            **({} if memory is None else {"memory/device": memory}),
            "open_files": open_files(),
        }

    def _slowest(self, batch_seconds: np.ndarray) -> dict[str, MetricValue]:
        """Name the process whose batch was on its devices last. batch_seconds: of each device's process."""
        if len(self._processes) == 1:
            return {}
        device = int(np.argmax(batch_seconds))
        process = self._executor.mesh.devices.flat[device].process_index
        return {
            "slowest": self._processes[process],
            "seconds/slowest": float(batch_seconds[device]),
        }
