"""`python -m mmjax.chat` over a pipe and on a terminal: several turns, each answered as `mmjax.generate` answers it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import sys

import numpy as np
import pytest
from commands import media_run, run
from llava_folder import save_checkpoint
from PIL import Image
from started import start

from mmjax import chat, generate
from mmjax.data.sample import Conversation, Message, Text
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.loaded_model import user_prompts
from mmjax.inference.prompts import UserPrompt, make_prompt

TURNS = ("What colour is the upper half?", "And <image>?")


def talked(capsys, monkeypatch, lines: list[str], *words: object) -> list[dict]:
    """What a chat over a pipe prints with `--json`."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    ended = run(capsys, chat.main, *words, "--json", "--max-tokens", 5)
    assert (ended.code, ended.err) == (0, "")
    return [json.loads(line) for line in ended.out.splitlines()]


def test_each_turn_is_answered_as_generate_answers_the_conversation_that_training_would_see(
    tmp_path, capsys, monkeypatch
):
    # Of seeds, one whose second answer is another where the first is left out of its prompt.
    folder = save_checkpoint(tmp_path / "llava", seed=5)
    rng = np.random.default_rng(0)
    for name, size in {"tall": (50, 21), "wide": (16, 80)}.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / f"{name}.png")
    tall, wide = ((tmp_path / f"{name}.png").read_bytes() for name in ("tall", "wide"))
    (tmp_path / "cut.png").write_bytes(wide[: len(wide) // 2])
    lines = [
        f"/image {tmp_path / 'tall.png'}",
        TURNS[0],
        *(f"/image {tmp_path / name}" for name in ("none.png", "cut.png")),
        "Is it broken?",
        "/imaeg x",
        f'/image "{tmp_path / "wide.png"}"',
        TURNS[1],
        "/reset",
        f"/image {tmp_path / 'tall.png'}",
        TURNS[0],
        "/exit",
        "never asked",
    ]
    first, missing, cut, unknown, second, again = talked(
        capsys, monkeypatch, lines, folder, "--system", "Be brief."
    )
    assert "none.png: No such file" in missing["error"]
    assert cut["error"].endswith("truncated PNG")
    assert unknown["error"] == "there is no command '/imaeg': did you mean '/image'?"
    assert again["tokens"] == first["tokens"]

    served = CheckpointModel.open(folder)
    said, said_then = (
        UserPrompt(Conversation((Message("assistant", (turn["answer"],)),)))
        for turn in (first, second)
    )
    asked = make_prompt(TURNS[0], {"image": [tall]}, "Be brief.").followed_by(said)
    asked = asked.followed_by(make_prompt(TURNS[1], {"image": [wide]}))
    answer, _ = generate.generate(served, asked, max_tokens=5)
    assert (second["answer"], second["tokens"]) == (answer.text, list(answer.tokens))
    # What training sees of the whole conversation begins with what was asked.
    whole = asked.followed_by(said_then).conversation
    trained = served.chat().sample(whole, [["vision"]] * 2).segments
    prompt = user_prompts(served, asked).sample(0).segments
    for seen, given in zip(trained, prompt, strict=True):
        if isinstance(given, Text):
            assert seen.tokens[: len(given.tokens)].tolist() == given.tokens.tolist()
        else:
            assert seen == given
    assert seen.weights[len(given.tokens) :].all()


@pytest.mark.exhaustive
def test_a_run_in_an_alphabet_answers_every_question_alone(runs, capsys, monkeypatch):
    folder, _ = media_run(runs)
    monkeypatch.setattr(sys, "stdin", io.StringIO("read a?\n\nread a?\n"))
    ended = run(capsys, chat.main, folder, "--json", "--max-tokens", 3)
    assert ended.err == "this run has no chat format: every question is answered alone\n"
    first, second = map(json.loads, ended.out.splitlines())
    assert first["tokens"] == second["tokens"]


@pytest.mark.exhaustive
def test_on_a_terminal_ctrl_c_stops_an_answer_and_not_the_conversation_which_ctrl_d_ends(tmp_path):
    folder = save_checkpoint(tmp_path / "llava", seed=3)
    ours, theirs = pty.openpty()
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    words = ("--max-tokens", 1500, "--temperature", 9.0, "device=cpu")
    process = start("mmjax.chat", folder, *words, cwd=tmp_path, **pipes)
    os.close(theirs)

    def read_until(pattern: bytes) -> re.Match[bytes]:
        screen = b""
        while not (match := re.search(pattern, screen)):
            screen += os.read(ours, 1 << 16)  # an error where the process has ended
        return match

    read_until(rb"> $")
    os.write(ours, b"What?\n")
    read_until(rb"What\?\r\n.{20}")  # the answer grows
    process.send_signal(signal.SIGINT)
    assert int(read_until(rb"(?s)stopped after (\d+) tokens.*> $")[1]) < 1500
    process.send_signal(signal.SIGINT)
    read_until(rb"(?s)Ctrl-D ends\).*> $")
    os.write(ours, b"\x04")
    assert process.wait(120) == 0
