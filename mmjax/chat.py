"""Talk with a model: ``python -m mmjax.chat RUN|HF_FOLDER``, or ``... < questions.txt``.

Every line is a question. `/image FILE`, `/audio FILE` and `/video FILE` give a file to the next one,
`/reset` begins anew, `/exit` or Ctrl-D ends, and Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import cast, get_args

from mmjax.config.codec import did_you_mean
from mmjax.config.other_names import parse_words
from mmjax.console import print_lines, print_note
from mmjax.data.sample import Conversation, Medium
from mmjax.data.text.chat import Chat
from mmjax.errors import (
    UserError,
    command_parser,
    exit_process,
    explain_runtime_errors,
    run_command,
)
from mmjax.generate import (
    EVERY,
    add_answer_options,
    open_model,
    print_answer,
    read_answer,
    read_medium,
    shows_answers,
)
from mmjax.inference.generator import Answer, Sampling
from mmjax.inference.loaded_model import LoadedModel, answer_room, user_prompts
from mmjax.inference.prompts import UserPrompt, make_prompt

COMMANDS = (*(f"/{kind}" for kind in get_args(Medium)), "/reset", "/exit")


class Talk:
    """A conversation with a model. What is refused leaves it as it was before that question."""

    def __init__(self, loaded: LoadedModel, sampling: Sampling, max_tokens: int, system: str = ""):
        self._loaded = loaded
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._system = system
        self._stopped: bool | None = None  # None: no answer is being written
        self.reset()

    def reset(self) -> None:
        """Forget what was said, and the files that were given."""
        self._earlier = UserPrompt(Conversation(()))
        self._files: dict[Medium, list[bytes]] = {}

    def give(self, kind: Medium, path: str) -> None:
        """Read a file for the next question. Raises UserError."""
        config = self._loaded.served.config
        encoded = read_medium(
            f"/{kind} {path}", kind, Path(path), config.model.encoders, config.data.limits
        )
        self._files.setdefault(kind, []).append(encoded)

    def ask(self, question: str, show: bool = False) -> Answer:
        """Answer a question after all that was said before. Raises UserError.

        show: print the answer while it grows.
        """
        files, self._files = self._files, {}
        first = not self._earlier.conversation.messages
        prompt = self._earlier.followed_by(make_prompt(question, files, self._system * first))
        served = self._loaded.served
        prompts = user_prompts(served, prompt)
        max_tokens = answer_room(served, prompts, self._max_tokens)
        answers = self._loaded.answers(prompts, self._sampling, max_tokens, every=EVERY)
        answer = read_answer(self._until_stopped(answers), show)
        if isinstance(served.prompt_format, Chat):
            message = served.prompt_format.answer_message(answer.text)
            if any(message.parts):  # else there is nothing to go on from
                self._earlier = prompt.followed_by(UserPrompt(Conversation((message,))))
        return answer

    def _until_stopped(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        self._stopped = False
        try:
            for answer in answers:
                yield answer
                if self._stopped:
                    return
        finally:
            self._stopped = None

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        """Let Ctrl-C stop an answer behind its next tokens; a second one, and one between answers, interrupts."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stopped is not False:
                raise KeyboardInterrupt
            self._stopped = True

        previous = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def read_lines() -> Iterator[str]:
    """Yield the lines of standard input, edited at a prompt where it is a terminal."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  edits what input() reads

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print_note("(/exit or Ctrl-D ends)")
        except EOFError:
            print_lines()
            return


def talk_over(lines: Iterator[str], talk: Talk, args: argparse.Namespace) -> None:
    """Do what every line says until they end; what is refused is a line, and the conversation goes on."""
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        try:
            if word == "/exit":
                return
            if word == "/reset":
                talk.reset()
            elif word in COMMANDS:
                talk.give(cast(Medium, word[1:]), rest.strip().strip("\"'"))
            elif word.startswith("/"):
                raise UserError(f"there is no command {word!r}{did_you_mean(word, COMMANDS)}")
            elif word:
                began = time.perf_counter()
                with explain_runtime_errors():
                    answer = talk.ask(line.strip(), shows_answers(args))
                print_answer(answer, time.perf_counter() - began, args)
        except UserError as error:
            if args.json:
                print_lines(json.dumps({"error": str(error)}))
            else:
                print_note(f"error: {error}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("chat", __doc__)
    add_answer_options(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=value",
        help="changes to the config, such as device=cpu",
    )
    args = parse_words(parser, argv)
    served, sampling = open_model(args)
    talk = Talk(LoadedModel(served), sampling, args.max_tokens, args.system)
    if not isinstance(served.prompt_format, Chat):
        print_note("this run has no chat format: every question is answered alone")
    if sys.stdin.isatty():
        print_note(
            f"a line is a question; {' FILE, '.join(COMMANDS[:-2])} FILE, {', '.join(COMMANDS[-2:])}"
        )
    with talk.stopped_by_ctrl_c():
        talk_over(read_lines(), talk, args)


if __name__ == "__main__":
    exit_process(run_command(main))
