"""Samples and questions that a run leaves out since they cannot be read: every process agrees, process 0 names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmjax.batch import PADDING
from mmjax.data.loader import LoadedStep
from mmjax.data.quarantine import Bad, Quarantine
from mmjax.errors import UserError
from mmjax.parallel import processes
from mmjax.training.console import say
from mmjax.training.step import MOST_SPOILED, Spoiled


class LeftOut:
    """What a run has left out so far. name: of a sample by its id in the length index."""

    def __init__(self, quarantine: Quarantine, name: Callable[[int], str]) -> None:
        self._quarantine, self._name = quarantine, name
        self._reasons: dict[int, str] = {}  # of the samples that this process could not read
        self._questions: set[str] = set()

    def of_step(self, loaded: LoadedStep) -> list[int]:
        """The samples of a step that this process could not read; process 0 can ask why."""
        for found in loaded.spoiled:
            self._reasons[found.sample] = found.reason
            processes.tell(f"spoiled/{found.sample}", found.reason)
        return [found.sample for found in loaded.spoiled]

    def settle(self, step: int, spoiled: Spoiled) -> None:
        """List the samples of a step that some process could not read. Raises UserError where that is fatal."""
        ids = [int(sample) for sample in spoiled.samples if sample != PADDING]
        if (count := int(spoiled.count)) > MOST_SPOILED:
            raise UserError(
                f"{count} or more samples of step {step + 1} could not be read, so nothing was updated; the first, "
                f"{self._name(ids[0])}: {self._reason(ids[0])}. See whether their files can be reached, then go on "
                "with --resume",
                everywhere=True,
            )
        try:
            new = self._quarantine.add([Bad(self._name(sample), self._reason(sample)) for sample in ids])
        except UserError as error:
            raise UserError(str(error), everywhere=True) from error
        for found in new:
            say(f"step {step + 1}: left out {found.sample}, which cannot be used: {found.reason}")

    def say_questions(self, left_out: Mapping[str, str]) -> None:
        """Name the questions that cannot be asked, each once."""
        for name, reason in left_out.items():
            if name not in self._questions:
                self._questions.add(name)
                say(f"{name} is not asked: {reason}")

    def _reason(self, sample: int) -> str:
        """Why a sample could not be read; only process 0 asks the others."""
        if sample in self._reasons or not processes.leads():
            return self._reasons.get(sample, "another process could not read it")
        return processes.told(f"spoiled/{sample}")
