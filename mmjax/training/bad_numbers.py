"""What is said of losses and gradients that are not finite, or far above the usual: the samples behind them by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from mmjax.config import TrainingConfig
from mmjax.errors import UserError
from mmjax.training.console import say
from mmjax.training.sample_losses import MOST_NAMED, Worst
from mmjax.training.step import StepReport

WORST = 8  # samples of a step that the log keeps
USUAL = 100  # steps whose gradient norms say what is usual, once there are enough
ENOUGH = 20
SKIPPED = 10  # steps in a row without finite numbers are too many


class BadNumbers:
    """Watches the numbers of one run's steps. name: of a sample by its id in the length index."""

    def __init__(self, training: TrainingConfig, name: Callable[[int], str]) -> None:
        self._training, self._name = training, name
        self._norms: deque[float] = deque(maxlen=USUAL)
        self._skipped = 0  # steps in a row

    def worst(self, worst: Worst) -> dict[str, float]:
        """The losses of the worst samples of a step, by name."""
        pairs = zip(worst.sample[:WORST].tolist(), worst.loss[:WORST].tolist(), strict=True)
        return {self._name(sample): loss for sample, loss in pairs if loss > 0}

    def settle(
        self, step: int, report: StepReport, behind: Callable[[], Sequence[int]], samples: Sequence[int]
    ) -> None:
        """Say what is wrong with the numbers of a step. Raises UserError where the run is to stop at it.

        behind: finds the samples in the rows whose gradient is not finite. samples: all of the step.
        """
        if report.finite:
            self._skipped = 0
            self._tell_spike(step, float(report.gradient_norm), self.worst(report.worst))
            return
        self._skipped += 1
        what = f"the loss or gradient of step {step + 1} is not a finite number, and nothing was updated"
        told = f"{what}. {self._told(report.worst, behind, samples)}"
        if self._training.bad_numbers == "skip" and self._skipped < SKIPPED:
            say(told)
            return
        many = f" {SKIPPED} steps in a row were skipped." if self._skipped == SKIPPED else ""
        raise UserError(
            f"{told}.{many} Look at them with python -m mmjax.inspect RUN --step {step + 1}; go on with --resume and a "
            "lower optimizer.learning_rate or training.clip, or skip such steps with training.bad_numbers=skip",
            everywhere=True,
        )

    def _told(self, worst: Worst, behind: Callable[[], Sequence[int]], samples: Sequence[int]) -> str:
        if count := int(worst.not_finite):
            named = self._names(worst.sample[: min(count, MOST_NAMED)].tolist(), count)
            return f"The losses of {count} samples are not finite: {named}"
        try:
            found = behind()
        except jax.errors.JaxRuntimeError:  # there is no memory for a second array of gradients
            found = []
        if found:
            named = self._names(found, len(found))
            return f"Every loss is finite, the gradients of the rows of {len(found)} samples are not: {named}"
        return f"Every loss is finite, and no rows alone give it; its samples are {self._names(samples, len(samples))}"

    def _tell_spike(self, step: int, norm: float, worst: Mapping[str, float]) -> None:
        usual = float(np.median(self._norms)) if len(self._norms) >= ENOUGH else np.inf
        self._norms.append(norm)
        if (limit := self._training.spike) and norm > limit * usual:
            named = ", ".join(f"{name} {loss:.3g}" for name, loss in worst.items())
            say(f"step {step + 1}: the gradient norm is {norm:.3g}, usually {usual:.3g}; worst losses: {named}")

    def _names(self, samples: Sequence[int], count: int) -> str:
        named = [self._name(sample) for sample in samples[:MOST_NAMED]]
        return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")
