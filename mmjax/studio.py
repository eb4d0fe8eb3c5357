"""Watch a run as a live page and question its model: ``python -m mmjax.studio RUN [--port N]``.

Prints an address to open in a browser of this machine. The page is the report of `mmjax.report`,
which grows with the run; questions there are answered by the newest checkpoint, on the CPU unless
``--device`` says otherwise, so that a training keeps its GPU's memory. Only who knows the address
gets an answer, nothing listens beyond this machine, and nothing is written into the run. With
``--control`` the page also plans the run, goes on with it, starts others from its config and stops
them.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs, urlsplit

import jax

from mmjax.console import print_lines, print_note
from mmjax.data.loading.replay import spoken
from mmjax.data.sample import Medium, Question, Source, Text
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.generate import check_medium
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.evaluation import evaluation_sources
from mmjax.inference.generator import DEFAULT_MAX_TOKENS, Sampling
from mmjax.inference.loaded_model import LoadedModel, answer_room, user_prompts
from mmjax.inference.prompts import (
    QuestionPrompts,
    QuestionSource,
    Selection,
    make_prompt,
    select_usable,
)
from mmjax.reporting.live import LiveReport, sibling_runs
from mmjax.reporting.page import page_of, render_macro
from mmjax.reporting.rows import ShownItem, ShownPiece, ShownSample, shown_item
from mmjax.reporting.run import Run, read_runs
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_trust import HELP as TRUST_HELP
from mmjax.training.run_process import Action, RunProcess

HOST = "127.0.0.1"
# Any other Host header is another site's name for this machine. A tunnel has a port of its own.
OUR_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
PORT = 8765
MAX_BODY = 64 << 20  # bytes of a question with its media
CHUNK = 1 << 20  # bytes of a body that is too large, read and dropped at a time
REMEMBERED = 20  # questions
EVERY = 4  # tokens between updates of an answer
SAMPLES = 8  # listed of each source
SAMPLE_SIDE = 1024  # largest side of their images in pixels


@dataclass
class Asked:
    """A question and how far its answer is."""

    question: str
    sample: str = ""  # of the run's data, as `split/source[index]`; empty: the user's own question
    media: str = ""  # names of the files that came with it
    right: Sequence[str] = ()  # answers, where the sample has them
    step: int = 0  # of the checkpoint that answers
    answer: str = ""
    status: str = "waiting"
    error: str = ""


class Studio:
    """A run's page, and the questions that were asked there. Its methods may be called from any thread."""

    def __init__(
        self, folder: Path, device: str, trust: bool = False, control: bool = False
    ) -> None:
        """Raise UserError where the folder is no run, or another's whose config would be executed, without trust."""
        (run,) = read_runs([folder], with_metrics=False, trust=trust)
        run.folder.read_config()
        self.live = LiveReport(run)
        self.control = RunProcess(run.folder) if control else None
        self._overrides = (f"device={device}",)
        self._asking = threading.Lock()  # held while a question is answered
        self._asked: deque[Asked] = deque(maxlen=REMEMBERED)
        self._asked_version = 0
        self._loaded: LoadedModel | None = None  # of the checkpoint that answered last

    @property
    def run(self) -> Run:
        """The run as it was read last."""
        return self.live.run

    def report(self, sibling: str = "") -> str:
        """Render the run's whole report, beside another run. Raises UserError where there is no such run any more."""
        folder = self.run.folder.path
        if sibling and sibling not in sibling_runs(folder):
            raise UserError(f"there is no run {sibling!r} beside this one")
        paths = [folder, *([folder.with_name(sibling)] if sibling else [])]
        return page_of(read_runs(paths, trust=self.run.folder.trusted))

    def act(self, request: Mapping[str, Any]) -> None:
        """Plan, start or stop a run as the page says. Raises UserError where it may not, or cannot be."""
        words = [request.get(key) for key in ("action", "changes", "name")]
        if self.control is None:
            raise UserError("this page starts nothing; open it with --control")
        if not all(isinstance(word, str) for word in words) or words[0] not in get_args(Action):
            raise UserError("the command is not what the page sends; load the page again")
        self.control.act(*words)

    def changes(self, live_version: int, asked_version: int) -> dict[str, Any]:
        """Return the parts of the page that are newer than these versions, and what cannot be read."""
        newer = self.live.changes(live_version)
        if (number := self._asked_version) != asked_version:
            html = render_macro("asked", list(self._asked)[::-1])
            newer["asked"] = {"version": number, "parts": {"asked": html}}
        if self.control is not None:
            newer["output"] = self.control.text()
        return newer

    def samples(self) -> str:
        """Render samples of the run's held-out data with their questions."""
        return render_macro("questions", [self._shown(name) for name in self._names])

    @cached_property
    def _sources(self) -> Mapping[str, QuestionSource]:
        """Open the sources with questions, those of the test split first."""
        opened = evaluation_sources(self.run.config, ("test", "validation"), self.run.folder.path)
        return {name: source for name, source in opened.items() if hasattr(source, "question")}

    @cached_property
    def _names(self) -> Sequence[str]:
        names = []
        for name, source in self._sources.items():
            usable, _ = select_usable(
                range(len(source)),
                lambda n, source=source: (source.facts(n), source.question(n)),
                SAMPLES,
            )
            names += [f"{name}[{number}]" for number in usable]
        return names

    def _sample(self, name: str) -> tuple[QuestionSource, int]:
        source, _, number = name.removesuffix("]").rpartition("[")
        if (
            source not in self._sources
            or not number.isdecimal()
            or int(number) >= len(self._sources[source])
        ):
            raise UserError(f"the run has no sample {name!r}")
        return self._sources[source], int(number)

    def _shown(self, name: str) -> ShownSample:
        source, number = self._sample(name)
        question = source.question(number)
        items = []
        for k, (encoder, _) in enumerate(source.facts(number).items):
            try:
                config = self.run.config.model.item_modules[encoder]
                items.append(shown_item(config, source.item(number, k), encoder, SAMPLE_SIDE))
            except (OSError, ValueError, TypeError) as error:
                items.append(ShownItem(f"{encoder}: cannot be shown: {error}"))
        pieces = (ShownPiece(items=tuple(items)), ShownPiece(_text(source, question)))
        return ShownSample(
            name, f"It is: {' or '.join(_right_answers(question))}", pieces if items else pieces[1:]
        )

    # ----------------------------------------------------------------------------------------------
    # questions

    def ask(self, request: Mapping[str, Any]) -> None:
        """Start to answer a question. Raises UserError where it cannot be asked, or another is being answered."""
        question = Request.parse(request)
        if not self._asking.acquire(blocking=False):
            raise UserError("a question is being answered; ask again when that is done")
        media = ", ".join(name for _, name, _ in question.media)
        entry = Asked(question.text or "(its own question)", question.sample, media)
        self._asked.append(entry)
        self._changed()
        threading.Thread(
            target=self._answer_and_release, args=(question, entry), daemon=True
        ).start()

    def _changed(self) -> None:
        self._asked_version += 1

    def _answer_and_release(self, question: Request, entry: Asked) -> None:
        try:
            self._answer(question, entry)
        except UserError as error:
            entry.error = str(error)
        except Exception as error:  # a line on the page, whatever it is: the page goes on
            entry.error = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            self._asking.release()
            self._changed()

    def _answer(self, question: Request, entry: Asked) -> None:
        served = CheckpointModel.open(
            self.run.folder.path, self._overrides, trust=self.run.folder.trusted
        )
        prompts = self._prompts(question, served, entry)
        sampling = Sampling(question.temperature)
        max_tokens = answer_room(served, prompts, question.max_tokens)
        loaded = self._load_newest(served, entry)
        entry.status = "answering ..."
        self._changed()
        began = time.monotonic()
        for answer in loaded.answers(prompts, sampling, max_tokens, every=EVERY):
            entry.answer = answer.text
            self._changed()
        ended = "" if answer.ended else ", before its end"
        entry.status = f"{len(answer.tokens)} tokens in {time.monotonic() - began:.1f} s{ended}"

    def _load_newest(self, served: CheckpointModel, entry: Asked) -> LoadedModel:
        """Return the newest checkpoint's model, loaded where it is not yet."""
        folder = self.run.folder.checkpoints
        while True:
            entry.step = checkpoint_step(folder)
            if self._loaded is not None and self._loaded.served.step == entry.step:
                return self._loaded
            entry.status = "loading the checkpoint ..."
            self._changed()
            self._loaded = None  # two at a time may not fit
            try:
                self._loaded = LoadedModel(replace(served, step=entry.step))
            except UserError:
                if checkpoint_step(folder) == entry.step:
                    raise
                # The run has deleted it meanwhile, and so there is a newer one.

    def _prompts(self, question: Request, served: CheckpointModel, entry: Asked) -> Source:
        """Return a source with the question as its only sample."""
        if question.sample:
            source, number = self._sample(question.sample)
            entry.question = _text(source, source.question(number))
            entry.right = _right_answers(source.question(number))
            return Selection([(QuestionPrompts(source), number)])
        media: dict[Medium, list[bytes]] = {}
        for kind, name, encoded in question.media:
            check_medium(
                name, kind, encoded, served.config.model.encoders, served.config.data.limits
            )
            media.setdefault(kind, []).append(encoded)
        return user_prompts(served, make_prompt(question.text, media))


def _text(source: QuestionSource, question: Question) -> str:
    return "".join(
        spoken(source, s.tokens.tolist()) for s in question.prompt.segments if isinstance(s, Text)
    )


def _right_answers(question: Question) -> Sequence[str]:
    return question.answers or (question.answer,)


@dataclass(frozen=True)
class Request:
    """A question as the page sends it."""

    text: str = ""
    sample: str = ""
    media: Sequence[tuple[Medium, str, bytes]] = ()  # kind, name and contents of each file
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0

    @classmethod
    def parse(cls, request: Mapping[str, Any]) -> Request:
        """Check the fields of a request. Raises UserError."""
        try:
            media = [
                (f["kind"], str(f["name"]), base64.b64decode(f["data"], validate=True))
                for f in request.get("media", ())
            ]
            text, sample = str(request.get("question", "")), str(request.get("sample", ""))
            question = cls(
                text, sample, media, int(request["max_tokens"]), float(request["temperature"])
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            raise UserError(
                "the question's fields are not what the page sends; load the page again"
            ) from None
        for kind, name, _ in media:
            if kind not in get_args(Medium):
                raise UserError(f"{name} is no image, audio or video file")
        if not (question.sample or question.text.strip()):
            raise UserError("the question is empty; say what to ask")
        if not 1 <= question.max_tokens <= 4096:
            raise UserError("an answer has 1 to 4096 tokens")
        return question


class StudioServer(ThreadingHTTPServer):
    """Serves the page of one run on this machine, to those who know its token."""

    daemon_threads = True
    request_queue_size = 1024  # connections that wait to be accepted; the kernel drops further ones

    def __init__(self, port: int, studio: Studio) -> None:
        self.studio = studio
        self.token = secrets.token_urlsafe(32)
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay quiet where a page has gone away in mid-request: it was closed, or loaded again."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers one request below `/TOKEN/`. Everything else is refused with an empty reply."""

    server: StudioServer
    timeout = 60  # seconds for a request to arrive
    error_message_format = ""

    def version_string(self) -> str:
        """Name the server."""
        return "mmjax"

    def log_message(self, *_: object) -> None:
        """Log nothing: addresses hold the token."""

    def do_GET(self) -> None:
        """Answer with the page or a part of it."""
        if (path := self._permitted()) is None:
            return
        studio = self.server.studio
        address = urlsplit(path)
        try:
            if address.path == "":
                nonce = secrets.token_urlsafe()
                self._send(
                    studio.live.page(nonce, studio.control is not None),
                    "text/html",
                    script=f"'nonce-{nonce}'",
                )
            elif address.path == "state":
                known = {name: int(values[0]) for name, values in parse_qs(address.query).items()}
                self._send(
                    json.dumps(studio.changes(known.get("live", 0), known.get("asked", 0))),
                    "application/json",
                )
            elif address.path == "samples":
                self._send(studio.samples(), "text/html")
            elif address.path == "report":
                sibling = parse_qs(address.query).get("with", [""])[0]
                self._send(studio.report(sibling), "text/html")
            else:
                self._refuse(HTTPStatus.NOT_FOUND)
        except (UserError, OSError, ValueError) as error:
            self._send(f"<p>{escape(str(error))}</p>", "text/html")

    def do_POST(self) -> None:
        """Take a question, or a command about the run."""
        path = self._permitted()
        if path is None:
            return
        length = self.headers.get("Content-Length", "")
        take = {"ask": self.server.studio.ask, "control": self.server.studio.act}.get(path)
        if take is None or not length.isdecimal():
            self._refuse(HTTPStatus.NOT_FOUND if take is None else HTTPStatus.LENGTH_REQUIRED)
            return
        reply = {"error": ""}
        try:
            if int(length) > MAX_BODY:
                rest = int(length)
                # else the sender sees a broken connection
                while rest > 0 and self.rfile.read(min(rest, CHUNK)):
                    rest -= CHUNK
                raise UserError(f"the question and its files take more than {MAX_BODY >> 20} MiB")
            request = json.loads(self.rfile.read(int(length)))
            take(request if isinstance(request, dict) else {})
        except UserError as error:
            reply["error"] = str(error)
        except (ValueError, RecursionError):
            reply["error"] = "the question is no JSON"
        self._send(json.dumps(reply), "application/json")

    def _permitted(self) -> str | None:
        """Return the path behind the token; None, after a refusal, where the token or the host's name is wrong."""
        hosts = self.headers.get_all("Host", [])
        prefix, token, path = (*self.path.split("/", 2), "", "")[:3]
        known = not prefix and hmac.compare_digest(token.encode(), self.server.token.encode())
        if known and len(hosts) == 1 and OUR_HOST.fullmatch(hosts[0]):
            return path
        self._refuse(HTTPStatus.FORBIDDEN)
        return None

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, text: str, kind: str, script: str = "'none'") -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {script}; "
            "connect-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        self.end_headers()
        self.wfile.write(body)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("studio", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder that mmjax.train printed")
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="N",
        help=f"of this machine; 0: any free one ({PORT})",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu", "tpu", "auto"),
        default="cpu",
        help="which answers questions (cpu)",
    )
    parser.add_argument(
        "--control", action="store_true", help="the page may start, plan and stop trainings"
    )
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    args = parser.parse_args(argv)
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port}: choose 0 to 65535")
    if args.device == "cpu":
        # else JAX takes most of a GPU's memory with its first array
        jax.config.update("jax_platforms", "cpu")
    sys.dont_write_bytecode = True  # of the run's config file, beside it
    studio = Studio(args.run, args.device, args.trust, args.control)
    try:
        server = StudioServer(args.port, studio)
    except OSError as error:
        raise UserError(
            f"--port {args.port}: {error.strerror}; choose another one, or --port 0 for any that is free"
        ) from None
    print_lines(f"studio {server.url}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        # Nothing is written, so nothing needs tidying up; an answer under way would be waited for
        # otherwise.
        print_note("interrupted")
        os._exit(130)


if __name__ == "__main__":
    exit_process(run_command(main))
