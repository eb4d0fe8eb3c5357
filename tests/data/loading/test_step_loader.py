"""Loading: only what is needed is opened, once; a step tells what all rows hold."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections import Counter

import jax
import numpy as np
import pytest
from kept_loader import assert_same, run_folder
from made import config, load, random_samples
from planned import BALANCE_KINDS, BALANCES

from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import NoBalance, NoGrouping, PostBalance, Samples
from mmjax.config.loading import default_config
from mmjax.config.loading import load as load_config
from mmjax.data.loading.step_loader import COSTS, LoadedStep, StepLoader
from mmjax.data.plan.length_index import cached_index
from mmjax.data.plan.placement import Topology
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources

# --------------------------------------------------------------------------------------------------
# what is opened


@pytest.mark.parametrize(
    "grouping", [config().batch.grouping, NoGrouping(chunk_steps=8)], ids=["pack", "none"]
)
def test_a_step_reads_its_samples_and_opens_its_items_once_and_nothing_else(grouping, tmp_path):
    source = random_samples(60, seed=0)
    loader = load(source, tmp_path, grouping=grouping)
    for step in range(12):
        loader(step)
        samples = loader.plan(step).samples().tolist()
        items = [(s, n) for s in samples for n in range(len(source.samples[s][1]))]
        assert sorted(source.read) == sorted(samples)
        assert sorted(source.opened) == sorted(items)
        source.read.clear(), source.opened.clear()


def test_nothing_decoded_is_kept(tmp_path):
    source = random_samples(60, seed=0)
    loader = load(source, tmp_path)
    loader(3)
    once = Counter(source.opened)
    loader(3)
    assert once
    assert Counter(source.opened) == dict.fromkeys(once, 2)


@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_each_of_two_processes_opens_only_what_its_own_rows_hold(balance, tmp_path):
    sources = [random_samples(60, seed=0) for _ in range(2)]
    two = Topology(2, 2, 2)
    loaders = [
        load(source, tmp_path / str(p), two, range(p, p + 1), balance=balance)
        for p, source in enumerate(sources)
    ]
    whole = random_samples(60, seed=0)
    alone = load(whole, tmp_path / "alone", two, balance=balance)
    for step in range(8):
        loaded = [loader(step) for loader in loaders]
        assert {int(x.digest) for x in loaded} == {int(alone(step).digest)}
        (plan,) = loaders[0].plan(step).microbatches
        sample, number, rank = plan.samples[plan.sample_of()], np.arange(len(plan.row)), plan.rank()
        number = number - plan.part_start[plan.sample_of()] - 1
        for process, source in enumerate(sources):
            own = rank == process
            assert sorted(source.read) == sorted(sample[own & (plan.module == 0)].tolist())
            items = own & (plan.module > 0)
            assert sorted(source.opened) == sorted(
                zip(sample[items].tolist(), number[items].tolist(), strict=True)
            )
        assert sorted(sources[0].opened + sources[1].opened) == sorted(whole.opened)
        assert sorted(sources[0].read + sources[1].read) == sorted(whole.read)
        for source in (*sources, whole):
            source.read.clear(), source.opened.clear()


def test_processes_that_share_a_rank_open_each_the_items_of_its_own_encoder_rank(tmp_path):
    sources = [random_samples(60, seed=0) for _ in range(2)]
    shared, whole = Topology(1, 1, 1, 2), random_samples(60, seed=0)
    loaders = [
        load(source, tmp_path / str(p), shared, range(1), range(p, p + 1), size=Samples(16))
        for p, source in enumerate(sources)
    ]
    alone = load(whole, tmp_path / "alone", shared, size=Samples(16))
    for step in range(4):
        halves, all_of_it = [loader(step) for loader in loaders], alone(step)
        assert all(sorted(source.read) == sorted(whole.read) for source in sources)
        assert all(0 < len(source.opened) < len(whole.opened) for source in sources)
        assert sorted(sources[0].opened + sources[1].opened) == sorted(whole.opened)
        for a, b, both in zip(*(x.microbatches for x in (*halves, all_of_it)), strict=True):
            jax.tree.map(np.testing.assert_array_equal, a.text, both.text)
            joined = jax.tree.map(lambda x, y: np.concatenate([x, y]), a.items, b.items)
            jax.tree.map(np.testing.assert_array_equal, joined, both.items)
        # Each counts for the whole rank: together they are the rank twice.
        assert sum(half.needed_flops for half in halves) == pytest.approx(
            2 * all_of_it.needed_flops
        )
        for source in (*sources, whole):
            source.read.clear(), source.opened.clear()


# --------------------------------------------------------------------------------------------------
# what a loader is


def test_a_loader_is_small_to_send_and_opens_everything_where_it_arrives(tmp_path):
    loader = run_folder(tmp_path)
    here = loader(0)
    sent = pickle.dumps(loader)
    assert len(sent) < 10_000
    there = pickle.loads(sent)
    assert set(there.__dict__) == {*loader.__dataclass_fields__, COSTS}
    assert_same(here, there(0))


def test_a_worker_counts_flops_with_the_costs_that_came_with_its_loader_and_without_jax(tmp_path):
    loader = run_folder(tmp_path)
    here = loader(0).needed_flops
    (tmp_path / "loader").write_bytes(pickle.dumps(loader))
    code = (
        "import pickle, sys; sys.modules['jax'] = None; "
        "print(float(pickle.load(open(sys.argv[1], 'rb'))(0).needed_flops))"
    )
    nothing_stored = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code, str(tmp_path / "loader")]
    found = subprocess.run(command, capture_output=True, text=True, env=nothing_stored)
    assert found.stderr == ""
    assert float(found.stdout) == float(here) > 0


def test_batches_survive_pickling_as_what_they_are(tmp_path):
    loaded = run_folder(tmp_path)(0)
    again = pickle.loads(pickle.dumps(loaded))
    assert_same(loaded, again)
    assert type(again) is LoadedStep
    assert type(again.microbatches[0]) is Microbatch
    assert type(again.microbatches[0].text) is TextBatch
    assert {type(items) for items in again.microbatches[0].items.values()} == {ItemBatch}


def test_a_loaded_step_tells_what_all_rows_hold_whichever_of_them_are_loaded(tmp_path):
    changes = {"microbatches": 2, "size": Samples(12)}
    whole = load(random_samples(60, seed=0), tmp_path / "whole", **changes)(0)
    assert whole.needed_flops > 0
    assert_work_is_what_the_arrays_hold(whole)
    slots = [
        sum((b.text.slots[e] >= 0).sum() for b in whole.microbatches) for e in ("vision", "audio")
    ]
    together = sum((b.text.sample >= 0).sum() for b in whole.microbatches)
    assert whole.tokens.tolist() == [together - sum(slots), *slots]

    two = Topology(2, 2, 2)
    both = load(random_samples(60, seed=0), tmp_path / "both", two, **changes)(0)
    half = load(random_samples(60, seed=0), tmp_path / "half", two, range(1, 2), **changes)(0)
    assert_work_is_what_the_arrays_hold(both)
    assert half.tokens.tolist() == both.tokens.tolist() == whole.tokens.tolist()
    for name in ("useful", "lengths", "widths", "moved", "balanced", "unbalanced"):
        np.testing.assert_array_equal(getattr(half, name), getattr(both, name))


def assert_work_is_what_the_arrays_hold(loaded: LoadedStep) -> None:
    """Of a step of which all rows were loaded."""
    for m, batch in enumerate(loaded.microbatches):
        arrays = (batch.text.sample, *(items.item for items in batch.items.values()))
        assert [x.shape[1] for x in arrays] == loaded.lengths[m].tolist()
        for x, useful in zip(arrays, loaded.useful[m], strict=True):
            assert (x >= 0).sum(1).tolist() == useful[: len(x)].tolist()
            assert not useful[len(x) :].any()
        # With what aligns items: positions that have an owner.
        owners = (batch.text.owner, *(items.owner for items in batch.items.values()))
        sends = batch.text.send.values()
        ranks, encoder_ranks = len(next(iter(sends))), loaded.balanced.shape[2]
        for k, x in enumerate(owners):
            held = (x.reshape(encoder_ranks if k else ranks, -1) >= 0).sum(1)
            assert (
                held if k else np.repeat(held, encoder_ranks // ranks)
            ).tolist() == loaded.balanced[m, k].tolist()
            assert loaded.balanced[m, k].sum() == loaded.unbalanced[m, k].sum()
        assert [send.shape[2] for send in sends] == loaded.widths[m].tolist()
        assert [(send >= 0).sum() for send in sends] == loaded.moved[m].tolist()


@pytest.mark.parametrize(
    "topology", [Topology(4, 2, 2), Topology(2, 2, 2, 2)], ids=["4", "2-with-4-encoder-ranks"]
)
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_the_work_of_every_rank_is_told_as_the_arrays_show_it(balance, topology, tmp_path):
    changes = {"grouping": NoGrouping(chunk_steps=8), "size": Samples(16), "balance": balance}
    loader = load(random_samples(60, seed=0), tmp_path, topology, **changes)
    for step in range(4):
        assert_work_is_what_the_arrays_hold(loader(step))


def test_chunks_of_one_balance_are_known_to_all(tmp_path):
    source = random_samples(60, seed=0)
    first = load(source, tmp_path, balance=PostBalance())
    first.plan(100)
    other = load(source, tmp_path, Topology(2, 2, 2), balance=NoBalance())
    assert other.planner.grouper.first_steps == first.planner.grouper.first_steps != [0]


def test_where_chunks_start_is_kept_for_those_who_come_later(tmp_path):
    first = run_folder(tmp_path)
    digest = first.plan(100).digest()
    later = pickle.loads(pickle.dumps(first))
    assert later.planner.grouper.first_steps == first.planner.grouper.first_steps
    assert len(later.planner.grouper.first_steps) > 10
    assert later.plan(100).digest() == digest
    assert later.planner.grouper._chunk.cache_info().misses == 1
    other = StepLoader(
        config(microbatches=2), first.budget, first.layout, first.index_folder, tmp_path
    )
    assert other.planner.grouper.first_steps == [0]


def test_only_one_process_keeps_where_chunks_start(tmp_path):
    load(random_samples(60, seed=0), tmp_path, Topology(2, 2, 2), range(1, 2)).plan(100)
    assert not list((tmp_path / "index").glob("chunks-*"))


@pytest.mark.exhaustive
def test_loading_a_step_takes_less_than_five_times_what_reading_its_samples_and_items_takes(
    tmp_path,
):
    """Twice on an idle machine: planning and packing cost about as much as the reading."""
    made = load_config(default_config(), ["data.sources.embedded.samples=2000"])
    source = open_sources(made, "train", tmp_path)["embedded"]
    index, folder = cached_index({"embedded": source}, made.model.encoders, tmp_path)
    planner, layout = make_planner(index, made, [1.0])
    loader = StepLoader(made, planner.grouper.budget, layout, folder, tmp_path)

    def read(step: int) -> None:
        for i in loader.plan(step).samples().tolist():
            source.sample(i)
            for number in range(len(source.facts(i).items)):
                source.item(i, number)

    loader(0)
    loading = reading = 0.0
    for step in range(1, 21):
        began = time.process_time()
        loader(step)
        loaded = time.process_time()
        read(step)
        loading, reading = loading + loaded - began, reading + time.process_time() - loaded
    assert loading < 5 * reading
