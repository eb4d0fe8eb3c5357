"""Pipelines of several processes: meshes that span them, random delays, and what is planted to go wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from commands import TINY_MEDIA
from restarts import first_moments, steps_of
from started import ROOT, begin, environment, finish, free_port, launch

WORDS = (TINY_MEDIA, "training.evaluate_every=0", "batch.microbatches=2")
SHORT = ("training.steps=3", "training.checkpoint_every=1", "training.keep=3")
ROLES = ("units.encoders.modules=vision,audio", "units.llm.data=1")  # of two processes
MODULES = (
    "units.vision.data=2",
    "units.audio.data=2",
    "units.llm.pipeline=2",
    "units.llm.tensor=2",
)
LAYOUTS = {
    "inside processes": (2, MODULES),  # both encoders in one, the LLM in the other
    "across processes": (4, MODULES),  # a stage in each
    # MMScale's example halved, but that stages of one LLM have equally many ranks: encoders of two
    # ranks before an LLM of three ranks with two devices each. Two of these are in the encoders'
    # process, four in the other.
    "spanning two": (
        2,
        (
            "units.encoders.modules=vision,audio",
            "units.encoders.data=2",
            "units.llm.data=3",
            "units.llm.tensor=2",
        ),
    ),
    # vision on device 0, LLM stages on 1-2 and 3-4, audio on 5-7; a process has two.
    "stages of several towers": (
        3,
        (
            "units.all.modules=(vision,audio,llm)",
            "units.all.pipeline=3",
            "units.all.data=2",
            "units.all.cuts=(audio.0,llm.1)",
        ),
    ),
    # Each copy of the encoders, and each stage, in two processes.
    "encoders beside the LLM": (
        4,
        (
            "units.encoders.modules=vision,audio",
            "units.encoders.beside=llm",
            "units.llm.pipeline=2",
            "units.llm.data=2",
            "units.llm.tensor=2",
        ),
    ),
    "carried by collectives": (4, (*MODULES, "pipeline.carrier=collective")),
    "spanning four": (
        4,
        ("units.vision.data=1", "units.llm.tensor=2", "units.llm.pipeline=2", "units.audio.fsdp=3"),
    ),
}


def begin_each(*commands: Sequence[object], **variables: str) -> list[subprocess.Popen]:
    """Start processes of one group, a device each, every one with its own command behind `python`."""
    variables |= {
        "MMJAX_PROCESSES": str(len(commands)),
        "MMJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    return [
        begin(
            [sys.executable, *map(str, command)], environment(1, MMJAX_PROCESS=str(p), **variables)
        )
        for p, command in enumerate(commands)
    ]


@pytest.fixture(scope="module")
def one_mesh(runs: Path) -> Path:
    """A run on one device, with a checkpoint after its first step."""
    ended = finish(launch(1, *WORDS, *SHORT, f"run={runs / 'one'}", devices=1))
    assert ended.code == 0, ended
    return runs / "one"


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_inside_across_and_spanning_processes_have_the_gradients_of_one_mesh(
    layout, one_mesh, folder, monkeypatch
):
    monkeypatch.setenv("MMJAX_CHECK_TRANSFERS", "1")
    processes, units = LAYOUTS[layout]
    ended = finish(
        launch(processes, *WORDS, *SHORT, *units, f"run={folder}", devices=8 // processes)
    )
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_same_gradients(folder, one_mesh)


RUNTIME = """
import sys
import jax
from mmjax import train
from mmjax.runtime import executor, transfer

jax.config.update("jax_cross_host_transfer_socket_address", sys.argv.pop(1))
executor.open_carrier = lambda carrier, platform: setattr(transfer, "_carrier", "device")
train.main(sys.argv[1:])
"""


@pytest.mark.exhaustive
def test_transfers_of_the_runtime_have_the_gradients_of_one_mesh(one_mesh, folder):
    """CPUs have none; between two of their processes JAX stands in over sockets of its own."""
    script = folder.with_name("runtime.py")
    script.write_text(RUNTIME)
    words = (*WORDS, *SHORT, *ROLES, f"run={folder}")
    ended = [
        finish(process)
        for process in begin_each(
            *((script, f"127.0.0.1:{free_port()}", *words) for _ in range(2)),
            MMJAX_CHECK_TRANSFERS="1",
        )
    ]
    assert [e.code for e in ended] == [0, 0], ended
    assert_same_gradients(folder, one_mesh)


def assert_same_gradients(folder: Path, one_mesh: Path) -> None:
    found, wanted = steps_of(folder), steps_of(one_mesh)
    assert list(found) == list(wanted) == [1, 2, 3]
    for step, record in wanted.items():
        assert set(found[step]["worst"]) == set(record["worst"])  # the samples
        assert found[step]["loss"] == pytest.approx(record["loss"], rel=1e-5)
        assert found[step]["gradient_norm"] == pytest.approx(record["gradient_norm"], rel=1e-5)
    gradients, expected = (first_moments(run, 1) for run in (folder, one_mesh))
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        # What has no gradient but by rounding, a key's bias, is of this size.
        assert np.abs(gradients[name] - gradient).max() <= 1e-5 * np.abs(gradient).max() + 1e-10, (
            name
        )


def compare_delayed(folder: Path, steps: int, seeds: int, seconds: float) -> str:
    """What four processes print that train with random delays and without."""
    command = (Path(__file__).with_name("delayed.py"), folder, steps, seeds)
    path = f"{ROOT}:{ROOT / 'tests' / 'training'}"
    ended = [
        finish(p, seconds)
        for p in begin_each(*[command] * 4, PYTHONPATH=path, MMJAX_CHECK_TRANSFERS="1")
    ]
    assert [e.code for e in ended] == [0] * 4, ended
    return ended[0].out


@pytest.mark.exhaustive
def test_random_delays_before_passes_and_transfers_hang_nothing_and_change_no_bit(tmp_path):
    assert compare_delayed(tmp_path / "data", 20, 1, 300).count("to the bit") == 3


FAULTY = """
import os, signal, sys
from mmjax import train
from mmjax.errors import run_command
from mmjax.runtime.passes import Passes
from mmjax.runtime.transfer import Links

fault, calls = sys.argv.pop(1), 0
forward, send = Passes.forward, Links.send

def stop_in_forward(passes, run, action, *operands):
    global calls
    calls += passes.local[action.stage]
    if calls == 20:
        os.kill(os.getpid(), signal.SIGSTOP)
    forward(passes, run, action, *operands)

def lose(links, piece, number):
    global calls
    calls += 1
    if calls != 20:
        send(links, piece, number)

if fault == "stopped":
    Passes.forward = stop_in_forward
else:
    Links.send = lose
sys.exit(run_command(train.main))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["stopped", "lost"])
def test_a_stopped_stage_or_a_lost_message_is_named_with_the_transfer_that_is_waited_for(
    fault, folder
):
    """The LLM's process stops in its forward pass, or loses a gradient on its way to an encoder."""
    script = folder.with_name("faulty.py")
    script.write_text(FAULTY)
    soon = ("training.steps=100000", "training.watch.seconds=15", "training.watch.times=3")
    words = (*WORDS, *ROLES, *soon, f"run={folder}")
    encoders, llm = begin_each(("-m", "mmjax.train", *words), (script, fault, *words))
    ended = finish(encoders)
    assert ended.code in (1, 3), ended
    line = next(line for line in ended.err.splitlines() if line.startswith("error: "))
    assert re.search(r"waiting for the gradients of llm, microbatch \d, from process 1\b", line), (
        line
    )
    assert "in the backward pass of " in line
    if fault == "stopped":
        assert "process 1 (llm)" in line or "process 1 of this run's 2 (llm)" in line
        os.kill(llm.pid, signal.SIGKILL)
    else:
        assert "process 0 (audio + vision)" in line
        assert line in finish(llm).err.splitlines()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "message"),
    [((*ROLES, "pipeline.schedule=gpipe"), "different units, cuts or "), ((), "different units;")],
    ids=["another schedule", "no units"],
)
def test_processes_with_other_schedules_or_units_are_refused_before_they_wait_for_each_other(
    words, message, folder
):
    started = begin_each(
        *(("-m", "mmjax.train", *WORDS, *changes, f"run={folder}") for changes in (ROLES, words))
    )
    ended = [finish(p) for p in started]
    assert [e.code for e in ended] == [2, 2], ended
    assert (
        ended[0].err.splitlines()[-1].startswith(f"error: process 0: the processes have {message}")
    )
    assert steps_of(folder) == {}


if __name__ == "__main__":  # STEPS SEEDS
    with tempfile.TemporaryDirectory() as parent:
        print(
            compare_delayed(Path(parent) / "data", int(sys.argv[1]), int(sys.argv[2]), 7200), end=""
        )
