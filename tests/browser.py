"""A headless Chromium, driven over its debugging pipe as its developer tools do."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from started import begin, kill

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    "",
)
QUIET = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
HEADLESS = ("--headless", "--no-sandbox", "--disable-gpu")


class Browser:
    """A browser with one tab. `complaints` are what its console showed."""

    def __init__(self, folder: Path) -> None:
        # It reads commands from file 3 and writes replies to file 4; ours are moved out of the way
        # of these.
        ends = [
            fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe
        ]
        read, self._write, self._read, write = ends
        words = [
            CHROMIUM,
            *HEADLESS,
            *QUIET,
            f"--user-data-dir={folder}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        shell = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *words]
        null = {"stdout": -3, "stderr": -3}
        self._process = begin(shell, dict(os.environ), pass_fds=(read, write), **null)
        os.close(read)
        os.close(write)
        self._number = itertools.count(1)
        self._received = b""
        self.complaints: list[str] = []
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for part in ("Page", "Runtime", "Log"):
            self.call(f"{part}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of one command; what else comes meanwhile are events."""
        number = next(self._number)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._received:
                more = os.read(self._read, 1 << 16)
                assert more, "the browser has ended"
                self._received += more
            line, _, self._received = self._received.partition(b"\0")
            reply = json.loads(line)
            if reply.get("method") in (
                "Runtime.exceptionThrown",
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
            ):
                self.complaints.append(json.dumps(reply["params"]))
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def wait(self, expression: str, seconds: float = 240) -> Any:
        """What it gives as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, (
                expression,
                self.value("document.body.innerText"),
                self.complaints,
            )
            time.sleep(0.1)
        return value

    def close(self) -> None:
        """End it and all its processes."""
        kill(self._process)
        os.close(self._read)
        os.close(self._write)
