"""Unreadable samples and questions: all processes leave out the same ones, and process 0 names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmjax.batch import PADDING
from mmjax.console import print_lines
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.data.sources.chat_source import BadSampleEntry, Quarantine
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.runtime.step import MOST_SPOILED, Spoiled


class UnreadableSamples:
    """The unreadable samples and questions of a run so far. name: maps an id of the length index to a name."""

    def __init__(self, quarantine: Quarantine, name: Callable[[int], str]) -> None:
        self._quarantine = quarantine
        self._name = name
        self._reasons: dict[int, str] = {}  # of the samples that this process could not read
        self._questions: set[str] = set()

    def of_step(self, loaded: LoadedStep) -> list[int]:
        """Return the samples of a step that this process could not read, and publish the reasons for process 0."""
        for unreadable in loaded.spoiled:
            self._reasons[unreadable.sample] = unreadable.reason
            coordination.kv_put(f"spoiled/{unreadable.sample}", unreadable.reason)
        return [unreadable.sample for unreadable in loaded.spoiled]

    def settle(self, step: int, spoiled: Spoiled) -> None:
        """Quarantine the samples of a step that any process could not read. Raises UserError where that is fatal."""
        ids = [int(sample) for sample in spoiled.samples if sample != PADDING]
        if (count := int(spoiled.count)) > MOST_SPOILED:
            raise UserError(
                f"{count} or more samples of step {step + 1} could not be read, so nothing was updated; the first, "
                f"{self._name(ids[0])}: {self._reason(ids[0])}. See whether their files can be reached, then go on "
                "with --resume",
                everywhere=True,
            )
        try:
            new = self._quarantine.add([BadSampleEntry(self._name(sample), self._reason(sample)) for sample in ids])
        except UserError as error:
            raise UserError(str(error), everywhere=True) from error
        for bad in new:
            print_lines(f"step {step + 1}: left out {bad.sample}, which cannot be used: {bad.reason}")

    def say_questions(self, left_out: Mapping[str, str]) -> None:
        """Print the questions that cannot be asked, each once."""
        for name, reason in left_out.items():
            if name not in self._questions:
                self._questions.add(name)
                print_lines(f"{name} is not asked: {reason}")

    def _reason(self, sample: int) -> str:
        """Return why a sample could not be read; only process 0 asks the others."""
        if sample in self._reasons or not coordination.is_leader():
            return self._reasons.get(sample, "another process could not read it")
        return coordination.kv_get(f"spoiled/{sample}")
