"""Start, plan and stop a run from another process, in a process of its own that outlives this one."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Literal

from mmjax.errors import UserError
from mmjax.runtime.run_dir import RunFolder

Action = Literal["plan", "resume", "new", "stop"]
TAIL = 1 << 14  # bytes of the output that are shown


class RunProcess:
    """A command about a run, and what it prints. Any thread may call its methods."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._scratch = Path(tempfile.mkdtemp(prefix="mmjax-studio-"))
        self._output = self._scratch / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = ""
        self._lock = threading.Lock()

    def act(self, action: Action, changes: str, name: str) -> None:
        """Plan the run, go on with it, start another from its config, or stop what was started here.

        changes: words `a.b=value`, which the command checks. name: of another run, beside this one.
        Raises UserError where that cannot be.
        """
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            if action == "stop":
                if not running:
                    raise UserError("nothing that was started here is running")
                # A training saves a checkpoint and ends.
                self._process.send_signal(signal.SIGTERM)
                return
            if running:
                raise UserError("a command is running; stop it first, or wait until it has ended")
            self._start(self._words(action, changes, name))

    def text(self) -> str:
        """Return the command, the end of what it has printed, and its exit code where it has ended."""
        with self._lock:
            if self._process is None:
                return ""
            code = self._process.poll()
            with self._output.open("rb") as file:
                file.seek(max(0, self._output.stat().st_size - TAIL))
                lines = file.read().decode(errors="replace").replace("\r", "\n")
        return f"{self._command}\n{lines}" + ("" if code is None else f"\nended with code {code}")

    def _words(self, action: Action, changes: str, name: str) -> list[str]:
        try:
            words = shlex.split(changes)
        except ValueError as error:
            raise UserError(f"the changes are no words: {error}") from None
        if wrong := [word for word in words if word.startswith("-") or "=" not in word]:
            raise UserError(f"{wrong[0]}: changes are words such as training.steps=100")
        trust = ["--trust"] * self._folder.trusted
        if action == "resume":
            return ["mmjax.train", "--resume", str(self._folder.path), *trust, *words]
        config = self._scratch / f"{self._folder.path.name}.json"
        config.write_text(self._folder.config.read_text())
        if action == "plan":
            here = [] if any(word.startswith("cluster=") for word in words) else ["cluster=here"]
            return ["mmjax.plan", str(config), *here, *words]
        if not name or Path(name).name != name or name.startswith("."):
            raise UserError(f"{name!r}: name the new run, which is beside this one, by one word")
        run = self._folder.path.with_name(name)
        if run.exists():
            raise UserError(f"{run} is there already; give the new run another name")
        return ["mmjax.train", str(config), *words, f"run={run}"]

    def _start(self, words: list[str]) -> None:
        self._command = shlex.join(["python", "-m", *words])
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the page alone
            )
