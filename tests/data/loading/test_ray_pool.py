"""A Ray cluster brings the same steps as local workers, whatever of it dies, and what it lacks is said at once."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from kept_loader import assert_same, run_folder
from ray_cluster import ROOT, RayCluster, tasks
from started import free_port, wait_until

from mmjax.config import DataConfig
from mmjax.data.loading.ray_pool import PoolClient, pool_steps
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.errors import UserError


@pytest.fixture
def cluster() -> Iterator[Callable[..., RayCluster]]:
    with contextlib.ExitStack() as opened:
        yield lambda *args: opened.enter_context(contextlib.closing(RayCluster(*args)))


@pytest.fixture
def pool() -> Iterator[Callable[..., Iterator[LoadedStep]]]:
    with contextlib.ExitStack() as opened:

        def steps(
            loader: StepLoader, first: int, last: int, address: str, **options
        ) -> Iterator[LoadedStep]:
            data = replace(DataConfig(pool=address, workers=1, prefetch=2), **options)
            return opened.enter_context(contextlib.closing(pool_steps(loader, first, last, data)))

        yield steps


def kill_one(rng: random.Random) -> None:
    running: list[int] = []  # Ray ends and starts them as it likes
    wait_until(lambda: running.extend(tasks()) or running)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(running), signal.SIGKILL)


def assert_steps(loaded: Iterator[LoadedStep], loader: StepLoader, first: int, last: int) -> None:
    for number in range(first, last):
        assert_same(next(loaded), loader(number))


def test_a_pool_that_loses_processes_a_node_and_its_head_costs_no_step_and_changes_no_byte(
    cluster, pool, tmp_path, capfd, monkeypatch
):
    # seconds until a lost head is given up, else 60
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    loader, made = run_folder(tmp_path), cluster([1, 1])
    loaded = pool(loader, 3, 60, made.address, pool_steps=8)
    assert "2 node(s), 2 CPU(s); at most 8 steps and 4.0 GB in flight" in capfd.readouterr().out
    assert_steps(loaded, loader, 3, 10)
    kill_one(random.Random(0))
    assert_steps(loaded, loader, 10, 25)
    made.tell("lose", 1)
    assert_steps(loaded, loader, 25, 40)
    made.tell("lose", 0)
    made.tell("head")
    assert_steps(loaded, loader, 40, 60)
    assert next(loaded, None) is None
    assert re.search(
        rf"(?m)^data.pool={made.address}: .*; from step \d+ on 1 local workers load; resume to use the pool again\Z",
        capfd.readouterr().out.rstrip(),
    )


def test_an_address_where_nothing_listens_is_named_before_anything_starts(pool, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        UserError, match=f"data.pool={address}: no Ray cluster .* or set data.pool=local"
    ):
        pool(run_folder(tmp_path), 0, 5, address)


def test_steps_in_flight_are_bounded_by_their_bytes():
    client = PoolClient(None, "auto", last=100, max_steps=64, max_bytes=1_000)
    assert client.window() == 1  # nothing is known of their size
    client.largest = 100
    assert client.window() == 7  # and 3 that were fetched
    client.largest = 2_000
    assert client.window() == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("cpus", [[1], [2], [4, 4]])
def test_20_random_kills_in_300_steps_change_no_byte(cpus, cluster, pool, tmp_path):
    loader, rng = run_folder(tmp_path), random.Random(sum(cpus))
    loaded = pool(loader, 0, 300, cluster(cpus).address, pool_steps=16)
    kills = {rng.randrange(5, 300) for _ in range(24)}
    assert len(kills) >= 20
    for number in range(300):
        if number in kills:
            kill_one(rng)
        assert_same(next(loaded), loader(number))


@pytest.mark.exhaustive
def test_a_pool_that_grows_is_used_and_one_whose_nodes_are_gone_is_left(
    cluster, pool, tmp_path, capfd
):
    loader, made = run_folder(tmp_path), cluster([1])
    loaded = pool(loader, 0, 60, made.address, pool_steps=8)
    assert_steps(loaded, loader, 0, 10)
    made.tell("add", 1)
    made.tell("lose", 0)
    assert_steps(loaded, loader, 10, 30)
    made.tell("lose", 1)
    assert_steps(loaded, loader, 30, 60)
    assert "none of its nodes is left; from step" in capfd.readouterr().out


@pytest.mark.exhaustive
def test_a_pool_with_other_code_is_refused(cluster, pool, tmp_path, monkeypatch):
    # Ray's processes look for modules in the folder of the process that they serve
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "mmjax", tmp_path / "other" / "mmjax")
    with (tmp_path / "other" / "mmjax" / "disk.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(
        UserError, match=r"the code of mmjax on a node \(\w+\) is not this process's"
    ):
        pool(run_folder(tmp_path), 0, 5, cluster([1], tmp_path / "other").address)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "message"), [("bug", "KeyError: 'caption'"), ("exit", "SystemExit: 0")]
)
def test_an_error_while_loading_is_raised_at_its_step(fault, message, cluster, pool, tmp_path):
    loader = run_folder(tmp_path)
    of_step = [set(loader.plan(step).samples().tolist()) for step in range(7)]
    bad = next(
        s for s in of_step[4] - set.union(*of_step[2:4]) if loader.sources["made"].samples[s][1]
    )
    loaded = pool(run_folder(tmp_path, fault=fault, index=bad), 2, 7, cluster([2]).address)
    assert [int(next(loaded).step) for _ in range(2)] == [2, 3]
    with pytest.raises(Exception, match=message):
        next(loaded)
