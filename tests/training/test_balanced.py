"""Where samples run changes nothing but the time: every grouping and balance, on one device, on eight, in processes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from balanced import CASES, run

pytestmark = pytest.mark.usefixtures("quick_compilation")

Result = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def on(tmp_path_factory):
    """What a case gives on so many devices of this process."""
    folder = tmp_path_factory.mktemp("data")
    return cache(lambda case, devices: run(case, folder, jax.devices()[:devices]))


def assert_same(found: Result, wanted: Result) -> None:
    np.testing.assert_array_equal(found["samples"], wanted["samples"])
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    leaves = [key for key in wanted if key.startswith("gradient.")]
    assert len(leaves) > 50
    for key in leaves:
        assert np.abs(found[key] - wanted[key]).max() <= 1e-5 * np.abs(wanted[key]).max(), key
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-4)
    np.testing.assert_allclose(found["flops"], wanted["flops"], rtol=1e-6)


OF_PROCESSES = [case for case in CASES if not case.endswith("apart")] + ["none/apart"]
QUICK = ("none/post", "none/apart", "pack/post", "isf/post")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_loss_gradients_and_twenty_updates_with_dropout_are_those_of_one_device(on, case):
    grouping = case.split("/")[0]
    wanted = on(f"{grouping}/none", 1)
    assert_same(on(case, 8), wanted)
    assert not np.array_equal(wanted["losses"][1:], wanted["losses"][:-1])


def test_phases_planned_apart_send_most_encoder_tokens_and_others_few(on):
    moved = {case: int(on(case, 8)["moved"].sum()) for case in ("none/post", "none/apart")}
    assert moved["none/post"] < 0.5 * moved["none/apart"]
    assert on("none/apart", 8)["widths"].min() > 0


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cases"), [(2, ["pack/post", "none/apart"]), (4, OF_PROCESSES)])
def test_processes_give_the_losses_and_gradients_of_one_device_and_each_opens_its_part(on, tmp_path, count, cases):
    folder, out = tmp_path / "data", tmp_path / "out.npz"
    folder.mkdir()
    processes_found(folder, out, cases, count)
    with np.load(out) as file:
        found = {case: {k.split(":")[1]: file[k] for k in file.files if k.startswith(f"{case}:")} for case in cases}
    for case in cases:
        assert_same(found[case], on(f"{case.split('/')[0]}/none", 1))
    opened = [np.load(out.with_suffix(f".{p}.npz")) for p in range(count)]
    for case in cases:
        whole = on(f"{case.split('/')[0]}/none", 1)["opened"][0]
        each = [int(o[case][0]) for o in opened]
        assert sum(each) == whole
        assert max(each) < (1.5 / count if case.endswith("post") else 1) * whole


def processes_found(folder: Path, out: Path, cases: list[str], count: int) -> None:
    port = 23_000 + os.getpid() % 20_000
    program = Path(__file__).with_name("balanced.py")
    root = Path(__file__).parents[2]
    shared = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "JAX_NUM_CPU_DEVICES": str(8 // count)}
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(folder), str(out), *cases],
            env=shared
            | {
                "MMJAX_PROCESSES": str(count),
                "MMJAX_PROCESS": str(p),
                "MMJAX_COORDINATOR": f"127.0.0.1:{port}",
            },
        )
        for p in range(count)
    ]
    assert [p.wait(1200) for p in started] == [0] * count
