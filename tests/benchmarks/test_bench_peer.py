"""`python -m mmjax.bench peer`: both sides train on the same tokens, pixels and weights, and take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import run
from started import ROOT, wait_until

from mmjax import bench
from mmjax.benchmarks import peer
from mmjax.benchmarks.peer_data import MERGED, PATCH, SIZES, write_records
from mmjax.benchmarks.peer_mmjax import words
from mmjax.benchmarks.peer_process import Side, Task
from mmjax.benchmarks.peer_trainer import IGNORED, Samples, prepare_samples, save_checkpoint
from mmjax.config.loading import find_config, load
from mmjax.data.sample import Text
from mmjax.data.sources.opening import open_sources
from mmjax.errors import UserError


def test_samples_of_both_sides_have_the_same_tokens_labels_and_images(tmp_path):
    write_records(tmp_path / "data", "tiny", 6, seed=0)
    save_checkpoint(tmp_path / "model", SIZES["tiny"], seed=0)
    prepare_samples(tmp_path / "model", tmp_path / "data")
    place = {
        "folder": str(tmp_path / "side"),
        "checkpoint": str(tmp_path / "model"),
        "data": str(tmp_path / "data"),
    }
    name, changes = words(Task(**place, tune="full", precision="float32", batch=2, seed=0))
    (source,) = open_sources(load(find_config(name), changes), "train", tmp_path).values()
    image = json.loads((tmp_path / "model" / "config.json").read_text())["image_token_id"]
    prepared = Samples(tmp_path / "data")
    assert len(source) == len(prepared) == 6
    images = 0
    for number, theirs in enumerate(prepared):
        sizes = [size for _, size in source.facts(number).items]
        grids = theirs.get("grids", np.zeros((0, 3), int))
        assert sizes == [(PATCH * height, PATCH * width) for _, height, width in grids]
        images += len(sizes)
        ids, learned = [], []
        for segment in source.sample(number).segments:
            is_text = isinstance(segment, Text)
            count = len(segment.tokens) if is_text else int(np.prod(sizes.pop(0))) // MERGED**2
            ids += segment.tokens.tolist() if is_text else count * [image]
            learned += (segment.weights > 0).tolist() if is_text else count * [False]
        assert ids == theirs["input_ids"].tolist()
        assert learned == (theirs["labels"] != IGNORED).tolist()
    assert images >= 3


def test_what_is_not_installed_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(peer, "LIBRARIES", ("torch", "a_library_that_nobody_has"))
    ended = run(capsys, bench.main, "peer")
    install = 'pip install "mmjax[peer]"'
    expected = f"error: bench peer needs a_library_that_nobody_has; install with: {install}\n"
    assert (ended.code, ended.err) == (2, expected)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--segments=0", "--segments 0: give at least 1"),
        ("--records=7", "--records 7: give at least 8"),
        ("--core=1000", "--core 1000: choose of "),
        ("--seed=-1", "--seed -1: give at least 0"),
        ("--picture=race.pdf", "--picture race.pdf: name a file that ends in .png or .svg"),
    ],
)
def test_an_option_that_is_wrong_is_one_line(capsys, word, message):
    ended = run(capsys, bench.main, "peer", word)
    assert ended.code == 2
    assert ended.err.startswith(f"error: {message}")
    assert ended.err.count("\n") == 1


COUNTING = """
from mmjax.benchmarks.peer_process import Gate
gate = Gate(lambda request: {"answered": request})
while True:
    gate.before_step(lambda: {})
    gate.count(samples=2, tokens=30, positions=40)
"""
ABANDONED = """
import os, sys, time
from pathlib import Path
from mmjax.benchmarks.peer_process import Side, Task
task = Task(sys.argv[1], "", "", tune="full", precision="float32", batch=2, seed=0)
side = Side("counting", task, os.sched_getaffinity(0), {"PYTHONPATH": os.environ["PYTHONPATH"]})
print(side.request(steps=3), side.request(other=1), sep="\\n", flush=True)
while Path(f"/proc/{side.process.pid}/stat").read_text().split()[2] != "T":
    time.sleep(0.01)
print(side.process.pid, flush=True)
os._exit(1)
"""


def test_a_side_takes_the_steps_requested_is_stopped_between_them_and_ends_with_a_command_that_is_killed(
    tmp_path,
):
    (tmp_path / "counting.py").write_text(COUNTING)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", ABANDONED, str(tmp_path / "side")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    steps, answer, pid = ended.stdout.splitlines()
    assert "'samples': 6, 'tokens': 90, 'positions': 120" in steps
    assert "'answered': {'other': 1}" in answer
    wait_until(lambda: not Path(f"/proc/{pid}/exe").exists())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words", [["--against", "padded", "grouped", "--start"], ["--tune=lora", "--dtypes=bfloat16"]]
)
def test_a_tiny_race_runs_in_turns_begins_with_the_same_loss_and_is_drawn(capsys, tmp_path, words):
    tiny = (
        "--tiny",
        "--segments=2",
        "--steps=1",
        "--records=24",
        f"--picture={tmp_path / 'race.svg'}",
    )
    ended = run(capsys, bench.main, "peer", "--json", *tiny, *words)
    assert ended.code == 0, ended.err
    assert "tokens a CPU second" in (tmp_path / "race.svg").read_text()
    rows = json.loads(ended.out)
    assert [row["Trainer"] for row in rows] == (
        ["padded", "grouped"] if "--start" in words else ["padded"]
    )
    for row in rows:
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert row["loss error"] <= (
            peer.TOLERANCE if row["dtype"] == "float32" else peer.TOLERANCE_BFLOAT16
        )
        figures = ["tokens/CPU s", "samples/s", "padding", "GB"]
        figures += ["cold start s", "warm start s"] if "--start" in words else []
        for figure in figures:
            assert all(value > 0 for value in row[figure].values()), figure


@pytest.mark.exhaustive
def test_a_side_that_cannot_start_says_why_in_its_own_line(tmp_path):
    side = {"folder": str(tmp_path / "side"), "checkpoint": "nowhere", "data": "nowhere"}
    task = Task(**side, tune="full", precision="float32", batch=2, seed=0)
    with pytest.raises(UserError, match="nowhere"):
        Side("mmjax.benchmarks.peer_mmjax", task, {0}, {})


def test_what_the_trainers_side_shares_with_mmjaxs_loads_no_jax():
    code = "import sys, mmjax.benchmarks.peer_data, mmjax.benchmarks.peer_process; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
