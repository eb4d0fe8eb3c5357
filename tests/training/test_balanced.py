"""Where samples run changes nothing but the time: every grouping and balance, on one device, on eight, in processes."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from balanced import CASES, run
from started import begin, environment, finish, free_port

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


@pytest.mark.default_cases("none/apart")
@pytest.mark.parametrize("case", [*CASES, "none/post/tensor as data", "pack/apart/tensor as data"])
def test_loss_gradients_and_twenty_updates_with_dropout_are_those_of_one_device(on, case):
    grouping = case.split("/")[0]
    wanted = on(f"{grouping}/none", 1)
    assert_same(on(case, 8), wanted)
    assert not np.array_equal(wanted["losses"][1:], wanted["losses"][:-1])


@pytest.mark.exhaustive
def test_phases_planned_apart_send_most_encoder_tokens_and_others_few(on):
    moved = {case: int(on(case, 8)["moved"].sum()) for case in ("none/post", "none/apart")}
    assert moved["none/post"] < 0.5 * moved["none/apart"]
    assert on("none/apart", 8)["widths"].min() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("count", "case"), [(2, "none/apart"), (4, "isf/post")])
def test_processes_give_the_losses_and_gradients_of_one_device_and_each_opens_its_part(
    on, tmp_path, count, case
):
    folder, out = tmp_path / "data", tmp_path / "out.npz"
    folder.mkdir()
    found, opened = processes_found(folder, out, [case], count, 8 // count)
    wanted = on(f"{case.split('/')[0]}/none", 1)
    assert_same(found[case], wanted)
    for what in ("opened", "opened_items"):
        each = [int(o[f"{case}:{what}"][0]) for o in opened]
        assert sum(each) == wanted[what][0]
        assert max(each) < (1.5 / count if case.endswith("post") else 1) * wanted[what][0]


@pytest.mark.exhaustive
def test_processes_that_share_a_rank_give_those_of_one_device_and_open_each_its_part_of_the_items(
    on, tmp_path
):
    """Two ranks of two devices, every device a process, with the tensor axis as data for encoders."""
    case, wanted = "none/post/tensor as data", on("none/none", 1)
    (tmp_path / "data").mkdir()
    found, opened = processes_found(tmp_path / "data", tmp_path / "out.npz", [case], 4, 1)
    assert_same(found[case], wanted)
    texts, items = (
        [int(o[f"{case}:{what}"][0]) for o in opened] for what in ("opened", "opened_items")
    )
    assert sum(texts) == 2 * wanted["opened"][0]
    assert sum(items) == wanted["opened_items"][0]
    assert max(items) < 1.5 / 4 * sum(items)


def processes_found(
    folder: Path, out: Path, cases: list[str], count: int, devices: int
) -> tuple[dict[str, Result], list[Result]]:
    """By case what all found together, and what each process opened."""
    program, together = Path(__file__).with_name("balanced.py"), f"127.0.0.1:{free_port()}"
    started = [
        begin(
            [sys.executable, str(program), str(folder), str(out), *cases],
            environment(
                devices,
                MMJAX_PROCESSES=str(count),
                MMJAX_PROCESS=str(p),
                MMJAX_COORDINATOR=together,
            ),
        )
        for p in range(count)
    ]
    ended = [finish(p, 1200) for p in started]
    assert [e.code for e in ended] == [0] * count, ended
    with np.load(out) as file:
        found = {
            case: {k.split(":")[1]: file[k] for k in file.files if k.startswith(f"{case}:")}
            for case in cases
        }
    return found, [dict(np.load(out.with_suffix(f".{p}.npz"))) for p in range(count)]
