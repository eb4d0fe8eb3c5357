"""Record the samples that cannot be used, with their reasons, and skip them or stop as the config says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mmjax.config import DataConfig
from mmjax.errors import UserError


@dataclass(frozen=True)
class BadSampleEntry:
    """A sample that cannot be used, by its name "source[index]", and why."""

    sample: str
    reason: str

    def line(self) -> str:
        """Return its line of the file."""
        return json.dumps({"sample": self.sample, "reason": self.reason})


@dataclass
class Quarantine:
    """The bad samples that a run has met since its start. Each has one line in `path`, also over restarts.

    total: samples of the run, of which `max_bad_share` may be bad. writes: whether this process writes the file.
    """

    path: Path
    data: DataConfig
    total: int
    writes: bool = True
    _met: dict[str, BadSampleEntry] = field(default_factory=dict, repr=False)  # by sample

    def __len__(self) -> int:
        return len(self._met)

    def add(self, bad: Iterable[BadSampleEntry]) -> list[BadSampleEntry]:
        """Record samples that were not met before, and return those.

        Raises UserError, after recording them, where a bad sample is fatal or there are too many.
        """
        new = {entry.sample: entry for entry in bad if entry.sample not in self._met}
        self._met |= new
        if new and self.writes:
            self._write(new.values())
        if not new:
            return []
        first = next(iter(self._met.values()))
        message = f"{len(self):,} of {self.total:,} samples cannot be used; the first, {first.sample}: {first.reason}"
        if self.data.on_bad_sample == "raise":
            raise UserError(f"{message}. All are in {self.path}; mend them, or skip them with data.on_bad_sample=skip")
        if len(self) > (share := self.data.max_bad_share) * self.total:
            raise UserError(f"{message}. That is more than data.max_bad_share={share:g} allows; all are in {self.path}")
        return list(new.values())

    def _write(self, new: Iterable[BadSampleEntry]) -> None:
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder, and the bad samples are to be listed there; remove it")
        written = self.path.read_text(errors="replace") if self.path.exists() else ""
        written_lines = set(written.splitlines())
        lines = [entry.line() + "\n" for entry in new if entry.line() not in written_lines]
        # A killed run may have left half a line: end it, so that the next one stays whole.
        line_end = "\n" if written and not written.endswith("\n") else ""
        with self.path.open("a") as file:
            file.write(line_end + "".join(lines))
