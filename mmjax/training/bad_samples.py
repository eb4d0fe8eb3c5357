"""Handle bad samples: leave out those that cannot be read, and name those whose losses or gradients are not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from mmjax.batch import PADDING
from mmjax.config import TrainingConfig
from mmjax.console import print_lines
from mmjax.data.sources.chat_source import BadSampleEntry, Quarantine
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.losses.step_losses import MAX_WORST
from mmjax.runtime.device_batch import MAX_UNREADABLE
from mmjax.runtime.step_report import StepReport


class UnreadableSamples:
    """The unreadable samples and questions of a run so far: all processes leave out the same, process 0 names them.

    name: maps an id of the length index to a sample's name.
    """

    def __init__(self, quarantine: Quarantine, name: Callable[[int], str]) -> None:
        self._quarantine = quarantine
        self._name = name
        self._reasons: dict[int, str] = {}  # of the samples that this process could not read
        self._questions: set[str] = set()  # those that were printed

    def publish(self, reasons: Mapping[int, str]) -> list[int]:
        """Publish why this process could not read samples of a step, for process 0 to print; return their ids."""
        self._reasons |= reasons
        for sample, reason in reasons.items():
            coordination.kv_put(f"unreadable/{sample}", reason)
        return list(reasons)

    def quarantine(self, step: int, report: StepReport) -> None:
        """Quarantine the samples of a step that any process could not read. Raises UserError where that is fatal."""
        ids = report.unreadable[report.unreadable != PADDING].tolist()
        if (count := int(report.unreadable_count)) > MAX_UNREADABLE:
            raise UserError(
                f"{count} or more samples of step {step + 1} could not be read, so nothing was updated; the first, "
                f"{self._name(ids[0])}: {self._reason(ids[0])}. See whether their files can be reached, then go on "
                "with --resume",
                everywhere=True,
            )
        try:
            new = self._quarantine.add(
                [BadSampleEntry(self._name(sample), self._reason(sample)) for sample in ids]
            )
        except UserError as error:
            raise UserError(str(error), everywhere=True) from error
        for bad in new:
            print_lines(
                f"step {step + 1}: left out {bad.sample}, which cannot be used: {bad.reason}"
            )

    def print_questions(self, reasons: Mapping[str, str]) -> None:
        """Print the questions that cannot be asked, each once. reasons: by name."""
        for name, reason in reasons.items():
            if name not in self._questions:
                self._questions.add(name)
                print_lines(f"{name} is not asked: {reason}")

    def _reason(self, sample: int) -> str:
        """Return why a sample could not be read; only process 0 asks the others."""
        if sample in self._reasons or not coordination.is_leader():
            return self._reasons.get(sample, "another process could not read it")
        return coordination.kv_get(f"unreadable/{sample}")


LOGGED_WORST = 8  # samples of a step
NORM_WINDOW = 100  # recent steps whose median gradient norm is the usual one
MIN_NORMS = 20  # steps before there is a usual norm
MAX_SKIPPED = 10  # steps in a row without finite numbers that end the run


class NonFiniteWatch:
    """Watches the losses and gradients of a run. name: maps an id of the length index to a sample's name."""

    def __init__(self, training: TrainingConfig, name: Callable[[int], str]) -> None:
        self._training = training
        self._name = name
        self._norms: deque[float] = deque(maxlen=NORM_WINDOW)
        self._skipped = 0  # steps in a row

    def worst_losses(self, report: StepReport) -> dict[str, float]:
        """Return the highest losses of a step's samples, by name."""
        samples = report.losses.worst_samples[:LOGGED_WORST].tolist()
        losses = report.losses.worst_losses[:LOGGED_WORST].tolist()
        return {
            self._name(sample): loss
            for sample, loss in zip(samples, losses, strict=True)
            if loss > 0
        }

    def check(
        self,
        step: int,
        report: StepReport,
        find_samples: Callable[[], Sequence[int]],
        samples: Sequence[int],
    ) -> None:
        """Report what is wrong with the numbers of a step. Raises UserError where the run has to stop.

        find_samples: finds the samples in rows whose gradient is not finite. samples: all of the
        step.
        """
        if report.finite:
            self._skipped = 0
            self._report_spike(step, report)
            return
        self._skipped += 1
        message = (
            f"the loss or gradient of step {step + 1} is not a finite number, and nothing was updated. "
            f"{self._culprits(report, find_samples, samples)}"
        )
        if self._training.bad_numbers == "skip" and self._skipped < MAX_SKIPPED:
            print_lines(message)
            return
        many = (
            f" {MAX_SKIPPED} steps in a row were skipped." if self._skipped == MAX_SKIPPED else ""
        )
        raise UserError(
            f"{message}.{many} Look at them with python -m mmjax.inspect RUN --step {step + 1}; go on with --resume "
            "and a lower optimizer.learning_rate or training.clip, or skip such steps with training.bad_numbers=skip",
            everywhere=True,
        )

    def _culprits(
        self, report: StepReport, find_samples: Callable[[], Sequence[int]], samples: Sequence[int]
    ) -> str:
        if count := int(report.losses.not_finite):
            names = self._names(
                report.losses.worst_samples[: min(count, MAX_WORST)].tolist(), count
            )
            return f"The losses of {count} samples are not finite: {names}"
        try:
            culprits = find_samples()
        except (
            jax.errors.JaxRuntimeError
        ):  # out of memory: the search needs a second array of gradients
            culprits = []
        if culprits:
            names = self._names(culprits, len(culprits))
            return f"Every loss is finite, the gradients of the rows of {len(culprits)} samples are not: {names}"
        return f"Every loss is finite, and no rows alone give it; its samples are {self._names(samples, len(samples))}"

    def _report_spike(self, step: int, report: StepReport) -> None:
        norm = float(report.gradient_norm)
        # The median before this step's norm joins: a spike is not compared with itself.
        usual = float(np.median(self._norms)) if len(self._norms) >= MIN_NORMS else np.inf
        self._norms.append(norm)
        if (limit := self._training.spike) and norm > limit * usual:
            losses = ", ".join(
                f"{name} {loss:.3g}" for name, loss in self.worst_losses(report).items()
            )
            print_lines(
                f"step {step + 1}: the gradient norm is {norm:.3g}, usually {usual:.3g}; worst losses: {losses}"
            )

    def _names(self, samples: Sequence[int], count: int) -> str:
        names = [self._name(sample) for sample in samples[:MAX_WORST]]
        return ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
