"""Commands as a user runs them, in this process, and the runs that several tests look at."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from started import ROOT, Ended, without_activities

from mmjax import train
from mmjax.errors import run_command
from mmjax.training import setup

TINY = str(ROOT / "tests" / "tiny.py")
TINY_MEDIA = str(ROOT / "tests" / "tiny_media.py")
TINY_DRAWING = str(ROOT / "tests" / "tiny_drawing.py")
ASKING = {
    "llava_style",
    "llava_alignment",
    "llava_lora",
    "llava_dpo",
    "internvl",
}  # for a checkpoint and its data, or an LLM
SHIPPED = sorted({path.stem for path in (ROOT / "configs").glob("*.py")} - ASKING)
MEDIA_WORDS = ("training.steps=6", "training.keep=3", "batch.microbatches=2")


def run(
    capsys: pytest.CaptureFixture[str], main: Callable[[Sequence[str]], None], *words: object
) -> Ended:
    """Run a command's `main` in this process."""
    capsys.readouterr()
    code = run_command(lambda: main([str(word) for word in words]))
    out, err = capsys.readouterr()
    return Ended(code, out, without_activities(err))


LATE = 0.3  # seconds by which each second batch of `media_run` comes late


def late(steps: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The same batches, of which each second one is late and the next is there at once."""

    def delayed(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(steps(*args)):
            time.sleep(LATE * (number % 2))
            yield batch

    return delayed


def media_run(runs: Path) -> tuple[Path, str]:
    """A whole run with eyes and ears on eight devices, and what it printed; made once per test session, copied here.

    It has checkpoints at 2, 4 and 6, and its config file is gone.
    """
    made, printed = runs.parent / "media", runs.parent / "media.txt"
    with (runs.parent / "media.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another of pytest's workers may be making it
        if not printed.exists():
            sources = runs.parent / "sources"
            sources.mkdir(exist_ok=True)
            for name in (TINY, TINY_MEDIA):
                shutil.copy(name, sources)
            with (
                contextlib.redirect_stdout(io.StringIO()) as out,
                pytest.MonkeyPatch.context() as patch,
            ):
                patch.setattr(setup, "steps", late(setup.steps))
                train.main(
                    [
                        str(sources / Path(TINY_MEDIA).name),
                        f"run={made}",
                        "--overwrite",
                        *MEDIA_WORDS,
                    ]
                )
            shutil.rmtree(sources)
            printed.write_text(out.getvalue())
    copy = shutil.copytree(made, runs / "media")
    text = printed.read_text()
    for path in (str, os.path.relpath):  # whichever is shorter is printed
        text = text.replace(path(made), path(copy))
    return copy, text


def files(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, to the byte."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
