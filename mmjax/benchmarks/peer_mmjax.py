"""Run mmjax's side of `peer`: ``python -m mmjax.benchmarks.peer_mmjax TASK.json``, started by the command.

It is the training that `python -m mmjax.train` runs, with a gate before every step.
"""

from __future__ import annotations

if __name__ == "__main__":  # as `mmjax.train` begins
    from mmjax.startup import use_huge_pages

    use_huge_pages()

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax

from mmjax.benchmarks.peer_data import IMAGES, RECORDS
from mmjax.benchmarks.peer_process import Gate, Task
from mmjax.config.loading import find_config, load
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.errors import exit_process, run_command
from mmjax.runtime.devices import peak_memory_used
from mmjax.training.loop import Trainer, train


class GatedTrainer(Trainer):
    """A trainer whose steps wait for their batch until they are requested."""

    def __init__(self, gate: Gate, *args: Any, **kwargs: Any) -> None:
        self._gate = gate
        super().__init__(*args, **kwargs)

    def start_workers(self) -> None:
        """Start the data workers, and put the gate before their steps."""
        super().start_workers()
        self.batches = self._gated(self.batches)

    def _gated(self, batches: Any) -> Iterator[LoadedStep]:
        rows = self.loader.layout.topology.ranks * self.loader.layout.rows[0]
        with closing(batches):
            while True:
                self._gate.before_step(self._describe_last)
                loaded = next(batches, None)
                if loaded is None:
                    return
                tokens, positions = (
                    loaded.useful[:, 0, :rows].sum(),
                    rows * loaded.lengths[:, 0].sum(),
                )
                self._gate.count(len(loaded.samples), tokens, positions)
                yield loaded

    def _describe_last(self) -> dict[str, Any]:
        """Wait for the step that runs; return its loss and its samples' numbers."""
        if self.running is None:
            return {}
        _, loaded, _, report = self.running
        report = jax.device_get(report)
        return {
            "loss": report.mean_loss,
            "numbers": loaded.samples.tolist(),
            "GB": (peak_memory_used(self.executor.mesh) or 0) / 1e9,
        }


def words(task: Task) -> tuple[str, list[str]]:
    """Return the config and the changes to it that a user would name on the command line."""
    data = Path(task.data)
    changes = [
        f"checkpoint={task.checkpoint}",
        f"data={data / RECORDS}",
        f"images={data / IMAGES}",
        "data.sources.chat=sharegpt",
        f"data.cache={Path(task.folder).parent / 'data_cache'}",
        f"run={Path(task.folder) / 'run'}",
        f"seed={task.seed}",
        f"batch.size.count={task.batch}",
        "batch.rows.llm=1",
        "batch.rows.vision=1",
        f"training.steps={task.steps}",
        f"training.precision={task.precision}",
        "training.evaluate_every=0",
        "training.checkpoint_every=0",
        f"optimizer.learning_rate={task.learning_rate}",
        f"optimizer.weight_decay={task.weight_decay}",
        f"optimizer.b2={task.b2}",
        "schedule.warmup=0",
        "schedule.final=1.0",
        *task.changes,
    ]
    if task.tune == "full":
        return "llava_style", [*changes, "model.encoders.vision.frozen=false"]
    adapters = [f"model.lora.llm.rank={task.rank}", f"model.lora.llm.alpha={task.alpha}"]
    return "llava_lora", [*changes, *adapters, "model.encoders.vision.connector.frozen=true"]


def main() -> None:
    """Run the command line."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    name, changes = words(task)
    path = find_config(name)
    gate = Gate()
    if task.requests:
        gate.plan(task.requests)
    train(load(path, changes), path, make=partial(GatedTrainer, gate))


if __name__ == "__main__":
    exit_process(run_command(main))
