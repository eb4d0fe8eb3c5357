"""Workers bring the same steps in order, end with their parent, and what goes wrong in them is said."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from kept_loader import assert_same, run_folder
from started import wait_until

from mmjax.batch import TextBatch
from mmjax.data.loading import workers as data_workers
from mmjax.data.loading.workers import LoadingFailed
from mmjax.errors import UserError


def worker_processes() -> list[int]:
    return [p.pid for p in multiprocessing.active_children() if p.name.startswith("grain")]


def blocks() -> list[Path]:
    """Memory that workers share with this process."""
    return list(Path("/dev/shm").glob(f"mm{os.getpid():x}-*"))


def assert_no_workers_are_left() -> None:
    wait_until(lambda: not worker_processes())


@pytest.fixture
def steps():
    """Open generators of steps that are closed with the test: one left open by a failure keeps pytest from ending."""
    with contextlib.ExitStack() as opened:
        yield lambda *args, **options: opened.enter_context(
            contextlib.closing(data_workers.steps(*args, **options))
        )


def test_workers_bring_the_same_steps_bit_for_bit_in_order_from_any_first_step(tmp_path, steps):
    first, last = 5, 12
    loader = run_folder(tmp_path)
    here = list(steps(loader, first, last, workers=0, prefetch=2))
    there = list(steps(loader, first, last, workers=2, prefetch=2))
    assert [int(x.step) for x in here] == [int(x.step) for x in there] == list(range(first, last))
    for step, a, b in zip(range(first, last), here, there, strict=True):
        assert_same(a, b)
        assert_same(a, loader(step))
    assert type(there[0].microbatches[0].text) is TextBatch
    assert {type(leaf) for leaf in jax.tree.leaves(there[0].microbatches)} == {np.ndarray}
    assert_no_workers_are_left()


def blocks_held_open() -> int:
    held = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            held += str(file.readlink()).startswith(f"/dev/shm/mm{os.getpid():x}-")
    return held


@pytest.mark.exhaustive
def test_a_step_waits_in_one_block_of_shared_memory_whatever_the_number_of_its_arrays(
    tmp_path, steps
):
    """Each block takes two open files, and a process often may have but 1,024."""
    loader, workers, prefetch = run_folder(tmp_path), 2, 4
    assert len(jax.tree.leaves(loader(0).microbatches)) > 8
    loaded = steps(loader, 0, 100, workers, prefetch)
    for _ in itertools.islice(loaded, 4):
        wait_until(lambda: blocks_held_open() >= 2 * workers * prefetch)
        assert blocks_held_open() <= 2 * workers * (prefetch + 2)
    loaded.close()
    assert_no_workers_are_left()


def test_no_steps_start_no_workers(tmp_path):
    assert list(data_workers.steps(run_folder(tmp_path), 5, 5, workers=2, prefetch=2)) == []
    assert not worker_processes()


@pytest.mark.parametrize(
    ("fault", "workers", "error", "message"),
    [
        ("bug", 0, KeyError, "caption"),
        ("bug", 1, LoadingFailed, "KeyError: 'caption'\nwhile reading sample made[{}]"),
        ("exit", 1, LoadingFailed, "SystemExit: 0"),
        ("stop", 0, RuntimeError, "StopIteration"),
    ],
)
def test_an_error_while_loading_is_raised_at_its_step(
    fault, workers, error, message, tmp_path, steps
):
    loader = run_folder(tmp_path)
    of_step = [set(loader.plan(step).samples().tolist()) for step in range(7)]
    bad = next(
        s for s in of_step[4] - set.union(*of_step[2:4]) if loader.sources["made"].samples[s][1]
    )
    loaded = steps(run_folder(tmp_path, fault=fault, index=bad), 2, 7, workers, prefetch=2)
    assert [int(next(loaded).step) for _ in range(2)] == [2, 3]
    with pytest.raises(error) as raised:
        next(loaded)
    assert message.format(bad) in str(raised.value)
    assert_no_workers_are_left()


def test_signals_to_all_processes_leave_workers_alone_also_while_these_start(
    tmp_path, capfd, steps
):
    loaded = steps(run_folder(tmp_path), 0, 40, workers=2, prefetch=1)
    wait_until(lambda: len(worker_processes()) == 2)

    def to_all(*signals: signal.Signals) -> None:
        for worker, sent in itertools.product(worker_processes(), signals):
            os.kill(worker, sent)

    everything = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT
    to_all(*everything)
    assert int(next(loaded).step) == 0
    assert int(next(loaded).step) == 1
    to_all(*everything)
    assert [int(x.step) for x in loaded] == list(range(2, 40))
    assert "most recent call first" in capfd.readouterr().err  # SIGQUIT shows where they stand
    assert_no_workers_are_left()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_decoded_is_noted_in_its_steps_and_the_others_come_as_ever(
    workers, tmp_path, steps
):
    whole = run_folder(tmp_path)
    bad = next(s for s in whole.plan(4).samples().tolist() if whole.sources["made"].samples[s][1])
    loaded = steps(run_folder(tmp_path, fault="torn", index=bad), 2, 7, workers, prefetch=2)
    for found, step in zip(loaded, range(2, 7), strict=True):
        wanted, drawn = whole(step), bad in whole.plan(step).samples()
        reasons = {sample: reason.split(": ")[-1] for sample, reason in found.unreadable.items()}
        assert reasons == ({bad: "image file is truncated"} if drawn else {})
        for ours, theirs in zip(found.microbatches, wanted.microbatches, strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours.text, theirs.text)
            for name, items in theirs.items.items():
                others = items.owner != bad
                np.testing.assert_array_equal(ours.items[name].values[others], items.values[others])
                assert not ours.items[name].values[~others].any() or not drawn
    assert_no_workers_are_left()


def test_a_killed_worker_ends_the_run_with_its_exit_code(tmp_path, steps):
    loaded = steps(run_folder(tmp_path), 0, 10_000, workers=2, prefetch=2)
    next(loaded)
    killed = worker_processes()
    assert len(killed) == 2
    os.kill(killed[1], signal.SIGKILL)
    with pytest.raises(
        UserError, match=r"a data worker was killed before step \d+: .*exit code -9.*data\.workers"
    ):
        for _ in loaded:
            pass
    assert_no_workers_are_left()


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("asked", [0, 1])
def test_workers_end_when_they_are_closed(asked, tmp_path, steps):
    loaded = steps(run_folder(tmp_path), 0, 10_000, workers=1, prefetch=2)
    for _ in range(asked):
        next(loaded)
    loaded.close()
    assert_no_workers_are_left()
    wait_until(lambda: not blocks())  # which Python would call leaked


@pytest.mark.exhaustive
def test_workers_that_are_killed_leave_no_shared_memory(tmp_path, steps):
    loaded = steps(run_folder(tmp_path), 0, 10_000, workers=1, prefetch=2)
    next(loaded)
    wait_until(blocks)  # of the steps that come next
    data_workers.kill_workers()
    assert not worker_processes()
    assert not blocks()
