"""Samples that cannot be used: counted, named with their reason, skipped or fatal as the config says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mmjax.config import DataConfig
from mmjax.errors import UserError


@dataclass(frozen=True)
class Bad:
    """A sample by name, "source[index]", and why it cannot be used."""

    sample: str
    reason: str

    def line(self) -> str:
        """As it stands in the file."""
        return json.dumps({"sample": self.sample, "reason": self.reason})


@dataclass
class Quarantine:
    """The bad samples that a run has met since its start. Each has one line in `path`, also over restarts.

    total: samples of the run, of which `max_bad_share` may be bad. writes: whether this process keeps the file.
    """

    path: Path
    data: DataConfig
    total: int
    writes: bool = True
    _met: dict[str, Bad] = field(default_factory=dict, repr=False)  # by sample

    def __len__(self) -> int:
        return len(self._met)

    def add(self, bad: Iterable[Bad]) -> list[Bad]:
        """Write down samples that were not met yet, and return those.

        Raises UserError, after they are written down, where one is fatal or there are too many.
        """
        new = list({found.sample: found for found in bad if found.sample not in self._met}.values())
        self._met.update((found.sample, found) for found in new)
        if new and self.writes:
            self._write(new)
        if new:
            self._check()
        return new

    def _check(self) -> None:
        first = next(iter(self._met.values()))
        told = f"{len(self):,} of {self.total:,} samples cannot be used; the first, {first.sample}: {first.reason}"
        if self.data.on_bad_sample == "raise":
            raise UserError(f"{told}. All are in {self.path}; mend them, or skip them with data.on_bad_sample=skip")
        if len(self) > (share := self.data.max_bad_share) * self.total:
            raise UserError(f"{told}. That is more than data.max_bad_share={share:g} allows; all are in {self.path}")

    def _write(self, new: Iterable[Bad]) -> None:
        """A run that was killed may have left half a line, which gets its end."""
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder, and the bad samples are to be listed there; remove it")
        before = self.path.read_text(errors="replace") if self.path.exists() else ""
        there = set(before.splitlines())
        lines = [found.line() + "\n" for found in new if found.line() not in there]
        with self.path.open("a") as file:
            file.write(("\n" if before[-1:] not in ("", "\n") else "") + "".join(lines))
