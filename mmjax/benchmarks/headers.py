"""Measure how fast headers are read: of images against decoding and one by one, of videos against opening them."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.benchmarks.harness import Options, option, seconds_of
from mmjax.config import LlavaSource
from mmjax.data.media.decode_images import decode_image
from mmjax.data.media.video_header import import_pyav, open_container
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.processors import PROBES

OPTIONS: Options = {
    "--images": option(2000, "of 640 x 480, JPEG"),
    "--delay": option(0.05, "seconds after which the server answers"),
    "--videos": option(1000, "of 50 frames of 128 x 96; 0: none"),
    "--repeats": option(3),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure files per second, the best of the repeats, and how many times as many as by the plainer way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "images", args.images)
        _write_records(folder, "image", [f"{i}.jpg" for i in range(args.images)])
        images = LlavaSource(str(folder / "image.json"), images=str(folder / "images"))
        decoded = _rate(
            args.images,
            lambda: [decode_image(p.read_bytes()) for p in (folder / "images").iterdir()],
            args,
        )
        local = _rate(args.images, partial(_read, folder, images), args)
        with _serve_late(folder / "images", args.delay) as url:
            late = _rate(args.images, partial(_read, folder, replace(images, images=url)), args)
        return [
            _row("local", local, local / decoded),
            _row(f"after {args.delay:g} s", late, late * args.delay),
            *(_videos(folder, ending, args) for ending in CODECS if args.videos),
        ]


# of videos, by the ending of their files
CODECS = {"mp4": "mpeg4", "mkv": "mpeg4", "webm": "libvpx-vp9"}


def _videos(folder: Path, ending: str, args: Namespace) -> dict[str, Any]:
    """Measure the headers of videos of one kind, from disk, against opening each by FFmpeg."""
    (folder / ending).mkdir()
    paths = [folder / ending / f"{i}.{ending}" for i in range(args.videos)]
    _write_video(paths[0], CODECS[ending])
    for path in paths[1:]:
        path.write_bytes(paths[0].read_bytes())
    _write_records(folder, "video", [path.name for path in paths])

    def open_each() -> None:
        for path in paths:
            with path.open("rb") as file, open_container(file):
                pass

    videos = LlavaSource(str(folder / "video.json"), videos=str(folder / ending))
    local = _rate(args.videos, partial(_read, folder, videos), args)
    return _row(ending, local, local / _rate(args.videos, open_each, args))


def _row(headers: str, rate: float, ratio: float) -> dict[str, Any]:
    return {"headers": headers, "files_per_second": rate, "ratio": ratio}


def _write_video(path: Path, codec: str) -> None:
    av = import_pyav()
    pixels = np.random.default_rng(0).integers(0, 255, (50, 96, 128, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def _write_records(folder: Path, kind: str, names: list[str]) -> None:
    turns = [{"from": "human", "value": f"<{kind}>"}, {"from": "gpt", "value": "yes"}]
    (folder / f"{kind}.json").write_text(
        json.dumps([{kind: name, "conversations": turns} for name in names])
    )


def _write(folder: Path, count: int) -> None:
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (120, 160, 3), np.uint8)
    Image.fromarray(pixels).resize((640, 480)).save(folder / "0.jpg", quality=90)
    for i in range(1, count):
        (folder / f"{i}.jpg").write_bytes((folder / "0.jpg").read_bytes())


def _read(folder: Path, source: LlavaSource) -> None:
    cache = Path(tempfile.mkdtemp(dir=folder))
    conversations = open_conversations(source, "train", cache, "source")
    read_facts(conversations, PROBES, cache)


def _rate(files: int, work: Callable[[], object], args: Namespace) -> float:
    """Time the work; return files per second of the fastest repeat."""
    return files / min(seconds_of(work) for _ in range(args.repeats))


class _Late(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def __init__(self, *args: Any, delay: float, **kwargs: Any) -> None:
        self._delay = delay
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        """Send the whole file, or the range of bytes that the request names."""
        time.sleep(self._delay)
        content = Path(self.translate_path(self.path)).read_bytes()
        size = len(content)
        byte_range = self.headers.get("Range")
        headers = {"Accept-Ranges": "bytes", "ETag": '"1"'}
        if byte_range:
            begin, end = map(int, byte_range.removeprefix("bytes=").split("-"))
            content = content[begin : end + 1]
            headers["Content-Range"] = f"bytes {begin}-{begin + len(content) - 1}/{size}"
        self.send_response(206 if byte_range else 200)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        self.wfile.flush()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serve_late(folder: Path, delay: float) -> Iterator[str]:
    """Serve a folder at the yielded URL, answering late."""
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(_Late, directory=str(folder), delay=delay)
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
