"""Follow a run, and render anew the sections of its page that have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmjax.errors import UserError
from mmjax.reporting.facts import clock
from mmjax.reporting.page import (
    MEDIA,
    SECTIONS,
    RunPart,
    part_of,
    render_macro,
    render_page,
    render_sections,
)
from mmjax.reporting.run import MetricsFollower, Run
from mmjax.runtime.run_dir import RunFolder, is_trained, path_words
from mmjax.training.run_data import read_launches

READ_SECONDS = 0.5  # spent on new metrics in one request; a page asks again at once for the rest
QUIET_SECONDS = 10.0  # without a step, before a run that no process trains is said to have stopped
OF_METRICS = ("training", "time")  # sections that are rendered with every step
# All others take seconds, of which they get a tenth: that is left to the run itself.
REST_SECONDS = 20.0
REST_SHARE = 0.1
SIBLINGS = 20


def sibling_runs(folder: Path) -> list[str]:
    """List the runs beside a run's folder by their names, those written last first."""
    beside = [RunFolder(path) for path in folder.parent.glob("[!.]*/") if path != folder]
    runs = [run for run in beside if run.config.is_file() and run.metrics.is_file()]
    runs.sort(key=lambda run: run.metrics.stat().st_mtime, reverse=True)
    return [run.path.name for run in runs[:SIBLINGS]]


class LiveReport:
    """The sections of a run's page, each with the version in which it has changed. Any thread may call its methods."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._follower = MetricsFollower(run.folder.metrics)
        self._lock = threading.Lock()
        self._state: tuple[object, ...] = ()  # of the files that were read last
        self._parts: dict[str, tuple[int, str]] = {}  # version and HTML, by id
        self._version = 0
        self._rest_state: tuple[object, ...] = ()  # when all sections were rendered last
        self._rest_due = 0.0  # by the monotonic clock

    def page(self, nonce: str, control: bool) -> str:
        """Render the page, which fetches its sections. control: whether it starts and stops the run."""
        live = {"control": control, "siblings": sibling_runs(self.run.folder.path)}
        return render_page([self.run], dict.fromkeys(SECTIONS, ""), nonce, **live)

    def changes(self, version: int) -> dict[str, Any]:
        """Return what is newer than this version, and what cannot be read."""
        newer: dict[str, Any] = {"error": "", "more": False, "age": ""}
        with self._lock:
            try:
                newer["more"] = not self._read()
                self._render_rest_if_due()
            except (UserError, OSError) as error:
                newer["error"] = str(error)
            parts = {name: html for name, (at, html) in self._parts.items() if at > version}
            if parts:
                newer["live"] = {"version": self._version, "parts": parts}
        with suppress(OSError):
            # clocks differ
            seconds = max(0.0, time.time() - self.run.folder.metrics.stat().st_mtime)
            newer["age"] = f"last step {clock(seconds)} ago{self._standstill(seconds)}"
        return newer

    def _standstill(self, seconds: float) -> str:
        """Say that the run has ended, or that nothing has trained it for so many seconds."""
        folder = self.run.folder
        if folder.scored_step() is not None and folder.scored_step() == self.run.metrics.steps:
            return "; the run is finished"
        # A start that has not made a step yet holds the run, but where nothing can be written
        # beside it.
        if seconds < QUIET_SECONDS or is_trained(folder.path):
            return ""
        return f"; the run has stopped: python -m mmjax.train --resume {path_words(folder.path)} goes on with it"

    def _read(self) -> bool:
        """Read what the run has written since the last time; return whether that was all."""
        complete = self._follower.update(READ_SECONDS)
        folder = self.run.folder
        files = [
            path.stat().st_mtime_ns if path.exists() else 0
            for path in (folder.config, folder.history, folder.scores)
        ]
        if (state := (*files, self._follower.offset)) != self._state:
            self.run = replace(
                self.run,
                config=folder.read_config(),
                launches=read_launches(folder.history),
                metrics=self._follower.metrics(),
            )
            self._state = state
            sections = render_sections([RunPart(self.run)], OF_METRICS)
            self._publish({"progress": render_macro("progress", self.run)} | sections)
        return complete

    def _render_rest_if_due(self) -> None:
        """Start to render all sections where there is something new, and the last time is long enough ago."""
        if self._state != self._rest_state and time.monotonic() >= self._rest_due:
            self._rest_state = self._state
            self._rest_due = float("inf")
            threading.Thread(target=self._render_rest, args=(self.run,), daemon=True).start()

    def _render_rest(self, run: Run) -> None:
        began = time.monotonic()
        sections: Mapping[str, str] = {}
        rest = [name for name in SECTIONS if name not in OF_METRICS]
        try:
            # Files may go while they are read; the next time shows what is there then.
            with suppress(UserError, OSError, ValueError):
                sections = dict.fromkeys(rest, "") | render_sections([part_of(run, MEDIA)], rest)
        finally:
            now = time.monotonic()
            with self._lock:
                self._publish(sections)
                self._rest_due = now + max(REST_SECONDS, (now - began) / REST_SHARE)

    def _publish(self, parts: Mapping[str, str]) -> None:
        """Note which of these parts of the page have changed, and the links to all sections."""
        shown = {name: html for name, (_, html) in self._parts.items()} | parts
        sections = {name: shown.get(name, "") for name in SECTIONS}
        changed = {**parts, "nav": render_macro("nav", sections)}
        self._version += 1
        for name, html in changed.items():
            if name not in self._parts or self._parts[name][1] != html:
                self._parts[name] = (self._version, html)
