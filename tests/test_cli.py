"""The console command `mmjax`, and `python -m mmjax`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import TINY, run
from started import ROOT, begin, environment, finish, without_activities

from mmjax import __version__, cli
from mmjax.config.loading import default_config, describe_with_meanings, load

SCRIPT = """import sys
from {module} import {function}
if __name__ == "__main__":
    sys.argv[0] = "mmjax"
    sys.exit({function}())
"""  # what pip writes for an entry of [project.scripts]


def entry_point() -> tuple[str, str]:
    """Module and function of the console script."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["mmjax"]
    module, _, function = target.partition(":")
    return module, function


def test_every_command_is_listed_with_what_it_does(capsys):
    ending = '__name__ == "__main__":\n    exit_process(run_command(main))\n'
    modules = {p.stem for p in (ROOT / "mmjax").glob("*.py") if p.read_text().endswith(ending)}
    assert set(cli.COMMANDS) == modules
    ended = run(capsys, cli.main, "--help")
    assert (ended.code, ended.err) == (0, "")
    listed = dict(re.findall(r"^  (\w+) +(\S.+)$", ended.out, re.M))
    assert tuple(listed) == cli.COMMANDS
    assert listed["train"] == "Train a multimodal LLM"
    assert run(capsys, cli.main).out == ended.out


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    ended = run(capsys, cli.main, "trian", TINY)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: there is no command 'trian': did you mean 'train'?\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "inspect run --step x",
            "argument --step: invalid int value: 'x' (all arguments: python -m mmjax.inspect --help)",
        ),
        ("export run", "the following arguments are required: out"),
        ("bench", "the following arguments are required: NAME"),
        ("bench fil", "argument NAME: invalid choice: 'fil'"),
        ("index --to arrayrecord", "argument --to: expected 2 arguments"),
        ("doctor --jsn", "unrecognized arguments: --jsn"),
        ("studio run --port x", "argument --port: invalid int value: 'x'"),
    ],
)
def test_an_argument_that_is_wrong_or_missing_is_one_line_with_code_2(words, message, capsys):
    ended = run(capsys, cli.main, *words.split())
    assert (ended.code, ended.out) == (2, "")
    [line] = [line for line in ended.err.splitlines() if "loading libraries" not in line]
    assert line.startswith(f"error: {message}")


def test_a_command_gets_the_words_behind_its_name_and_its_stdout_is_its_own(capsys, monkeypatch):
    started = []
    monkeypatch.setattr(cli, "start_clock", started.append)
    ended = run(capsys, cli.main, "train", "--show", "training.steps=70")
    assert (ended.code, ended.err, started) == (0, "", ["train"])
    assert ended.out == describe_with_meanings(load(default_config(), ["training.steps=70"])) + "\n"


@pytest.mark.parametrize(
    "words", [["train"], ["generate", "nothing", "What?", "--json"]], ids=["train", "generate"]
)
def test_the_first_line_is_there_before_anything_large_is_loaded_and_not_on_stdout(words):
    """No JAX can be imported here: the line must be there all the same."""
    code = f"import sys; from mmjax import cli; sys.modules['jax'] = None; cli.main({words!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.startswith(f"mmjax {__version__}  {words[0]}: loading libraries\n")
    assert without_activities(ended.stderr).startswith("Traceback")
    assert ended.stdout == ""
    large = "import sys; from mmjax import cli; print([m for m in ('jax', 'numpy', 'flax') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", large], capture_output=True, text=True).stdout
        == "[]\n"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("installed", [True, False], ids=["script", "module"])
def test_data_workers_start_from_the_console_script(installed, tmp_path):
    script = tmp_path / "mmjax"
    module, function = entry_point()
    script.write_text(SCRIPT.format(module=module, function=function))
    program = [str(script)] if installed else ["-m", "mmjax"]
    words = [
        "train",
        TINY,
        f"run={tmp_path / 'run'}",
        "training.steps=3",
        "training.evaluate_every=0",
    ]
    ended = finish(begin([sys.executable, *program, *words, "data.workers=2"], environment(1)))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert "3 steps" in ended.out
    assert Path(tmp_path / "run" / "checkpoints" / "3").is_dir()
