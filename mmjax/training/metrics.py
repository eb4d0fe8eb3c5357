"""Compute a step's metrics, and log them: JSON lines, TensorBoard scalars and, where asked for, Weights & Biases.

A full disk does not stop the run: lines that could not be written are kept, and written when there is room.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.balance.parts import LLM, dist_ratio, pad_ratio, sp_ratio
from mmjax.balance.waits import Prices, padding_share, rank_seconds, wait_share
from mmjax.config import Config
from mmjax.console import print_lines
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.budget import prices_of
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.step_plan import RankLayout
from mmjax.disk import atomic_write, json_lines, read_json_lines
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.planning.measured_file import Probed
from mmjax.runtime.devices import CompileCounter, open_files, peak_memory_used, resident_memory
from mmjax.runtime.executor import Executor
from mmjax.runtime.losses import ExpertSums
from mmjax.runtime.state import Hyperparameters
from mmjax.runtime.step_report import StepReport

Scalars = dict[str, float]


def rank_prices(prices: Prices, layout: RankLayout) -> Prices:
    """Return the prices of a rank's part of each module: all its encoder ranks share its part of the LLM."""
    share = np.where(np.arange(len(prices.position)) == LLM, 1 / layout.topology.encoders_per_rank, 1.0)
    return prices.times(share, share)


def rank_room(lengths: np.ndarray, layout: RankLayout) -> np.ndarray:
    """Count the positions of a rank's rows of these lengths, float64 `[..., M]`; of an encoder, those of one of its."""
    parts = np.where(np.arange(len(layout.rows)) == LLM, 1, layout.topology.encoders_per_rank)
    return lengths * (np.array(layout.rows) / parts)


def balance_scalars(
    loaded: LoadedStep, modules: Sequence[str], layout: RankLayout, prices: Prices, measured: Prices | None = None
) -> Scalars:
    """Measure the fill of a step's rows and the balance of its ranks, whichever process holds them.

    By module: fill, pad ratio (OmniBal eq. 1), dist ratio over ranks (eq. 2) and the fullest rank over the mean one, in
    positions and in pairs of attention; the positions' also as they would be with balance `none`. sp_ratio: over the
    devices that share a rank's rows, of encoders (OmniBal, appendix A.8). straggler_wait: the share of the step in
    which a rank waits, on average, for the one with most attention, in each phase of each microbatch: rows of one
    length take equally long, whatever they hold. padding: the share of the rows' time for positions that hold nothing.
    straggler_wait_before: what both would come to with balance `none`, in rows that its fullest rank needs. prices: of
    the modules, as steps are planned by. measured: those that count instead, where they are known; straggler_wait_sheet
    is then the wait by the others.
    """
    ranks = layout.topology.ranks
    scalars = Scalars()
    room = rank_room(loaded.lengths, layout)
    if measured is not None:
        scalars["straggler_wait_sheet"] = wait_share(rank_seconds(rank_prices(prices, layout), room, loaded.pairs))
        prices = measured
    shared = rank_prices(prices, layout)
    scalars["straggler_wait"] = wait_share(rank_seconds(shared, room, loaded.pairs))
    scalars["padding"] = padding_share(prices, loaded.useful.sum(-1), loaded.lengths * ranks * np.array(layout.rows))
    fullest = rank_seconds(shared, loaded.unbalanced.max(-1), loaded.unbalanced_pairs).max(-1).sum()
    needed = rank_seconds(shared, loaded.unbalanced.mean(-1), loaded.unbalanced_pairs).mean(-1).sum()
    scalars["straggler_wait_before"] = float(1 - needed / max(fullest, np.finfo(float).tiny))
    useful = budget = 0
    for k, module in enumerate(modules):
        rows = ranks * layout.rows[k]
        used = loaded.useful[:, k, :rows]  # useful positions of each row, by microbatch
        positions = rows * int(loaded.lengths[:, k].sum())
        module_useful = int(used.sum())
        scalars[f"fill/{module}"] = module_useful / positions
        scalars[f"pad_ratio/{module}"] = float(np.mean([pad_ratio(u) if u.any() else 0.0 for u in used]))
        useful += module_useful
        budget += positions
    for suffix, work in (("", loaded.balanced), ("_before", loaded.unbalanced)):
        by_rank = work.sum(0)
        for k, module in enumerate(modules):
            any_work = by_rank[k].any()
            scalars[f"dist_ratio{suffix}/{module}"] = float(dist_ratio(by_rank[k])) if any_work else 0.0
            maximum_over_mean = by_rank[k].max() / by_rank[k].mean() if any_work else 1.0
            scalars[f"max_over_mean{suffix}/{module}"] = float(maximum_over_mean)
    for module, pairs in zip(modules, loaded.pairs.sum(0), strict=True):
        scalars[f"max_pairs_over_mean/{module}"] = float(pairs.max() / pairs.mean()) if pairs.any() else 1.0
    if (context := layout.topology.context) > 1:
        for module, totals in zip(modules[1:], loaded.balanced.sum(0)[1:], strict=True):
            of_devices = totals.reshape(ranks, context, -1).sum(-1)
            scalars[f"sp_ratio/{module}"] = float(sp_ratio(of_devices)) if totals.any() else 0.0
    return scalars | {"useful/budget": useful / budget}


def exchange_scalars(loaded: LoadedStep, encoders: Sequence[str], topology: Topology, token_bytes: int) -> Scalars:
    """Count the bytes that the all-to-alls of a step's forward pass send between ranks, with and without padding.

    The backward pass sends as much. token_bytes: of one encoder token.
    """
    ranks = topology.ranks
    peers = topology.peers
    # Every rank sends `widths` tokens to each of its other peers, filled or not.
    sent = loaded.widths.sum(0) * ranks * (peers - 1) * token_bytes
    useful = loaded.moved.sum(0) * token_bytes
    scalars = {f"all_to_all_bytes/{e}": float(n) for e, n in zip(encoders, sent, strict=True)}
    scalars |= {f"all_to_all_useful_bytes/{e}": float(n) for e, n in zip(encoders, useful, strict=True)}
    # Share of a rank's other peers that are on other nodes.
    away = max(0, peers - topology.ranks_per_node) / max(1, peers - 1)
    return scalars | {"inter_node_share": away if sent.any() else 0.0}


def expert_scalars(sums: ExpertSums | None) -> Scalars:
    """Return the losses of a step's experts, unweighted, the tokens of the fullest expert over the mean, and turns.

    The imbalance is that of the most uneven layer: 1 where all experts of every layer have the same. Turns are those
    that tokens took to the devices of their experts beyond one a layer and microbatch.
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
        self, config: Config, executor: Executor, loader: StepLoader, programs: CompileCounter, peak_flops: float
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
        self._recent_seconds: deque[float] = deque(maxlen=100)  # of a step each, without waiting for data
        self.start()

    def use_probed(self, probed: Probed | None) -> None:
        """Measure waits from here on by what two rows took, where that is known."""
        self._measured = None if probed is None else self._prices.times(probed.position, probed.pair)

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

    def compute(self, loaded: LoadedStep, report: StepReport, hyper: Hyperparameters) -> dict[str, MetricValue]:
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
        by_source = zip(self._config.data.sources, report.losses.loss, report.losses.weight, strict=True)
        own_epochs = dict(zip(self._config.data.sources, loaded.source_epochs.tolist(), strict=True))
        memory = peak_memory_used(self._executor.mesh)
        weight = report.losses.weight.sum() or 1.0
        return {
            "loss": report.mean_loss,
            **{f"loss/{source}": float(loss / weight) for source, loss, weight in by_source if weight > 0},
            **expert_scalars(report.losses.experts),
            # Mean error of the step's patches.
            **{f"image_loss/{name}": float(sums[0] / max(sums[1], 1)) for name, sums in report.losses.images.items()},
            **{name: float(total / weight) for name, total in report.losses.measures.items()},
            "gradient_norm": float(report.gradient_norm),
            **{name: float(rate) for name, rate in hyper.items() if name.startswith("learning_rate/")},
            **balance_scalars(loaded, modules, layout, self._prices, self._measured),
            **exchange_scalars(loaded, modules[1:], layout.topology, token_bytes),
            "epoch": float(loaded.epoch),
            **({f"epoch/{name}": epochs for name, epochs in own_epochs.items()} if len(own_epochs) > 1 else {}),
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
        return {"slowest": self._processes[process], "seconds/slowest": float(batch_seconds[device])}


MetricValue = float | str | Mapping[str, float]  # a mapping is by sample name


class MetricsLog:
    """Writer of records to `metrics.jsonl`, TensorBoard and Weights & Biases; a record's step counts updates done.

    Opened after `done` updates, it drops later records of an earlier start, so that no step is logged twice. project:
    of Weights & Biases; empty = none. Raises UserError where wandb is not installed.
    """

    def __init__(self, path: Path, done: int, project: str = "", config: Mapping[str, Any] | None = None) -> None:
        self.path = path
        if path.is_dir():
            raise UserError(f"{path} is a folder, and the steps are to be written there; remove it")
        if path.exists():
            _drop_after(path, done)
        # Unbuffered, so that a failed write says how much of it was written.
        self._lines = path.open("ab", buffering=0)
        self._waiting = b""  # encoded lines, the first perhaps written in part
        self._warned = False
        self._board = _Board(path.parent / "tensorboard", done)
        self._project = _wandb_run(project, path.parent, config or {}) if project else None

    def write(self, step: int, scalars: Mapping[str, MetricValue]) -> None:
        """Log one record. NaN and Inf become strings, since JSON has no such numbers."""
        record = {"step": step, "time": round(time.time(), 3)}
        record |= {k: _plain(v) for k, v in scalars.items()}
        self._waiting += json.dumps(record).encode() + b"\n"
        # TensorBoard and Weights & Biases take numbers only; NaN and Inf are fine there.
        numbers = {k: float(v) for k, v in scalars.items() if isinstance(v, int | float)}
        try:
            self._flush()
            self._board.write(step, numbers)
        except OSError as error:
            if not self._warned:
                print_lines(
                    f"WARNING {self.path} cannot be written: {error.strerror}; its lines wait until there is room"
                )
            self._warned = True
        if self._project is not None:
            self._project.log(numbers, step=step)

    def _flush(self) -> None:
        """Write from where the last write stopped, even in the middle of a line."""
        while self._waiting:
            self._waiting = self._waiting[self._lines.write(self._waiting) :]
        self._warned = False

    def close(self) -> None:
        """Write what is left and close everything."""
        with contextlib.suppress(OSError):
            self._flush()
        self._lines.close()
        self._board.close()
        if self._project is not None:
            self._project.finish()


class _Board:
    """Writer of TensorBoard events without a thread: that of tensorboardX's own writer dies on a full disk."""

    def __init__(self, folder: Path, done: int) -> None:
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary

        self._event = Event
        self._summary = Summary
        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        # Makes TensorBoard drop events of later steps, which an earlier start wrote.
        begin = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=done + 1, session_log=begin))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write all numbers of a step. Raises OSError."""
        values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        summary = self._summary(value=values)
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from tensorboardX, which imports it if it can: two seconds and 200 MB, for nothing used here.

    Remove when tensorboardX imports it only where a tensor is given.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        yield
    finally:
        del sys.modules["torch"]


@contextlib.contextmanager
def _wandb(project: str) -> Iterator[Any]:
    """Import wandb. Raises UserError where it is not installed, and for what it refuses."""
    try:
        import wandb
    except ImportError:
        raise UserError(f'training.wandb={project}: wandb is not installed; pip install "mmjax[wandb]"') from None
    try:
        yield wandb
    except (wandb.Error, ValueError) as error:  # ValueError: an API key that cannot be one
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(
            f"training.wandb={project}: {reason}; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to "
            "send the numbers later"
        ) from None


def check_wandb_login(project: str) -> None:
    """Raise UserError where Weights & Biases would refuse a run of this project for want of a login; asks no server."""
    with _wandb(project) as wandb:
        if os.environ.get("WANDB_MODE", "online") == "online":
            wandb.login(verify=False)


def _wandb_run(project: str, folder: Path, config: Mapping[str, Any]) -> Any:
    """Start a Weights & Biases run, or resume the one of this folder."""
    path = folder / "wandb.json"
    try:
        run_id = json.loads(path.read_text())["id"] if path.is_file() else None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not what was written; remove it to begin a new run there") from None
    options = {"id": run_id, "resume": "allow", "dir": str(folder), "config": dict(config)}
    with _wandb(project) as wandb:
        run = wandb.init(project=project, name=folder.name, **options)
    path.write_text(json.dumps({"id": run.id}) + "\n")
    return run


def _drop_after(path: Path, done: int) -> None:
    """Rewrite the file atomically without records of steps after `done`."""
    with atomic_write(path) as partial, partial.open("w") as output:
        records = (record for record in read_json_lines(path) if isinstance(record.get("step"), int))
        output.writelines(json_lines([record]) for record in records if record["step"] <= done)


def _plain(value: MetricValue) -> Any:
    """Convert a value to JSON, numbers to nine digits, which tell all float32 apart."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, str):
        return value
    value = float(value)
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)
