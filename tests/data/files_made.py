"""Tiny data sets of real files: images, clips, annotations, and a server that gives them after a while."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image


def picture(height: int = 6, width: int = 9, colour: int = 100, kind: str = "PNG") -> bytes:
    """An encoded image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (colour % 256, colour // 256, 7)).save(file, kind)
    return file.getvalue()


def clip(frames: int = 800, rate: int = 8000, kind: str = "WAV") -> bytes:
    """An encoded clip that rises from -0.5 to 0.5."""
    file = io.BytesIO()
    soundfile.write(
        file, np.linspace(-0.5, 0.5, frames, dtype=np.float32), rate, "PCM_16", format=kind
    )
    return file.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Files by name; folders are made."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def lines(path: Path, records: Sequence[Any]) -> str:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def asked(question: str, answer: str = "yes", **beside: Any) -> dict[str, Any]:
    """A record of one question, as LLaVA has it."""
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **beside}


def image_size(file: Any) -> tuple[int, int]:
    """Height and width, by Pillow."""
    with Image.open(file) as image:
        return image.height, image.width


def audio_length(file: Any) -> tuple[int, int]:
    """Frames and rate, by libsndfile."""
    found = soundfile.info(file)
    return found.frames, found.samplerate


class Server(ThreadingHTTPServer):
    """Counts requests and the bytes it gave; `broken` paths fail so often.

    With `together`, `ALONE` requests are answered late, one by one if need be, and the next only
    once so many of them are there: a client that goes on asking for one thing at a time waits in
    vain.
    """

    ALONE = 16

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, together: int) -> None:
        self.asked, self.given, self.broken = Counter[str](), 0, Counter[str]()
        self.together, self.arrived, self.arrival = together, 0, threading.Condition()
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for_others(self) -> None:
        if not self.together:
            return
        with self.arrival:
            self.arrived += 1
            self.arrival.notify_all()
            alone = self.arrived <= self.ALONE
            if not alone:
                assert self.arrival.wait_for(
                    lambda: self.arrived >= self.ALONE + self.together, 480
                )
        if alone:
            time.sleep(0.02)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for a header and a short body
    server: Server

    def do_GET(self) -> None:
        self._give(self.command)

    do_HEAD = do_GET

    def _give(self, command: str) -> None:
        self.server.wait_for_others()
        self.server.asked[command] += 1
        path = Path(self.translate_path(self.path))
        if self.server.broken[self.path]:
            self.server.broken[self.path] -= 1
            return self._end(503, b"")
        if not path.is_file():
            return self._end(404, b"")
        content, found = path.read_bytes(), path.stat()
        tag = {"ETag": f'"{found.st_mtime_ns}-{found.st_size}"'}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            tag["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return self._end(206, content[start:stop], **tag)
        return self._end(200, content, **tag)

    def _end(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (
            headers | {"Content-Length": str(len(body)), "Accept-Ranges": "bytes"}
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.server.given += len(body)
            self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path, together: int = 0) -> Iterator[Server]:
    """A folder behind HTTP, with ranges and tags, that may want so many requests `together`."""
    server = Server(folder, together)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
