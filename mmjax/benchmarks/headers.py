"""Measure how fast image headers are read: local ones against decoding, those of a late server against one by one."""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.config import LlavaSource
from mmjax.data.media.decode import decode_image
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.processors import PROBES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--images", type=int, default=2000, help="of 640 x 480, JPEG")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds after which the server answers")
    parser.add_argument("--repeats", type=int, default=3)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure images per second, the best of the repeats, and how many times as many as by the plainer way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "images", args.images)
        records = [{"image": f"{i}.jpg", "conversations": _CONVERSATION} for i in range(args.images)]
        (folder / "d.json").write_text(json.dumps(records))
        decoded = _rate(lambda k: [decode_image(p.read_bytes()) for p in (folder / "images").iterdir()], args)
        local = _rate(partial(_read, folder, str(folder / "images")), args)
        with _serve_late(folder / "images", args.delay) as url:
            late = _rate(partial(_read, folder, url), args)
    return [
        {"headers": "local", "images_per_second": local, "ratio": local / decoded},
        {"headers": f"after {args.delay:g} s", "images_per_second": late, "ratio": late * args.delay},
    ]


_CONVERSATION = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "yes"}]


def _write(folder: Path, count: int) -> None:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (120, 160, 3), np.uint8)
    Image.fromarray(pixels).resize((640, 480)).save(folder / "0.jpg", quality=90)
    for i in range(1, count):
        (folder / f"{i}.jpg").write_bytes((folder / "0.jpg").read_bytes())


def _read(folder: Path, images: str, repeat: int) -> None:
    cache = Path(tempfile.mkdtemp(dir=folder))
    conversations = open_conversations(LlavaSource(str(folder / "d.json"), images=images), "train", cache, "images")
    read_facts(conversations, PROBES, cache)


def _rate(work: Callable[[int], object], args: argparse.Namespace) -> float:
    """Time the work; return images per second of the fastest repeat."""
    seconds = []
    for repeat in range(args.repeats):
        began = time.perf_counter()
        work(repeat)
        seconds.append(time.perf_counter() - began)
    return args.images / min(seconds)


class _Late(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, *args: Any, delay: float, **kwargs: Any) -> None:
        self._delay = delay
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        self._send_late()

    def do_HEAD(self) -> None:
        self._send_late()

    def _send_late(self) -> None:
        """Send the whole file, or the range of bytes that the request names."""
        time.sleep(self._delay)
        content = Path(self.translate_path(self.path)).read_bytes()
        byte_range = self.headers.get("Range", "").removeprefix("bytes=").split("-")
        begin, end = (int(byte_range[0]), int(byte_range[1]) + 1) if len(byte_range) == 2 else (0, len(content))
        self.send_response(206 if len(byte_range) == 2 else 200)
        for key, value in (("Content-Length", len(content[begin:end])), ("Accept-Ranges", "bytes"), ("ETag", '"1"')):
            self.send_header(key, str(value))
        if len(byte_range) == 2:
            self.send_header("Content-Range", f"bytes {begin}-{min(end, len(content)) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[begin:end])
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serve_late(folder: Path, delay: float) -> Iterator[str]:
    """Serve a folder at the yielded URL, answering late."""
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Late, directory=str(folder), delay=delay))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
