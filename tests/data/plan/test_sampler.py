"""The order of samples: epochs are permutations, mixtures keep their weights, and what is excluded never comes."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import config, index_of, random_texts

from mmjax.config import DataConfig, EmbeddedSource
from mmjax.data.plan.sampler import Pool, Stream, key_of, mixture_weights, pools_of
from mmjax.errors import UserError

NONE = np.zeros(0, np.int64)


def pools(*sizes: int) -> list[Pool]:
    stops = np.cumsum(sizes).tolist()
    return [Pool(stop - size, stop, NONE) for size, stop in zip(sizes, stops, strict=True)]


def stream(
    *sizes: int, weights: list[float] | None = None, size: int, seed: int = 0, multiple: int = 1
) -> Stream:
    return Stream(pools(*sizes), weights or [1.0] * len(sizes), size, seed, multiple)


@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 7), st.integers(0, 1000))
@settings(max_examples=25)
def test_chunks_end_where_epochs_do_and_every_epoch_holds_every_sample_once(
    samples, steps, multiple, seed
):
    made = stream(samples, size=steps * multiple, seed=seed, multiple=multiple)
    chunks = (made.chunk(c) for c in itertools.count())
    for _ in range(3):
        epoch: list[int] = []
        while len(epoch) < samples:
            assert len(epoch) % multiple == 0
            chunk = next(chunks).tolist()
            assert chunk
            epoch += chunk
        assert sorted(epoch) == list(range(samples))


def test_epochs_differ():
    epochs = [stream(1000, size=1000).chunk(chunk) for chunk in range(3)]
    assert all(sorted(epoch.tolist()) == list(range(1000)) for epoch in epochs)
    assert all(np.mean(a == b) < 0.02 for a, b in ((epochs[0], epochs[1]), (epochs[1], epochs[2])))


def test_a_chunk_is_a_pure_function_of_seed_and_number():
    def chunk(number: int, seed: int) -> np.ndarray:
        return stream(100, 50, weights=[1, 2], size=25, seed=seed).chunk(number)

    first = chunk(5, 7)
    np.testing.assert_array_equal(first, chunk(5, 7))
    assert not np.array_equal(first, chunk(5, 8))
    assert not np.array_equal(first, chunk(6, 7))


def test_shuffling_favours_no_sample():
    first = [int(stream(10, size=10, seed=seed).chunk(0)[0]) for seed in range(1000)]
    pairs = Counter(tuple(stream(3, size=3, seed=seed).chunk(0).tolist()) for seed in range(1500))
    counts = np.bincount(first, minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 33.7  # chi-square of 9 degrees, one in ten thousand
    assert len(pairs) == 6
    assert min(pairs.values()) > 190


def test_neighbours_in_a_large_source_are_spread():
    order = stream(10_000_000, size=4096).chunk(0)
    assert len(set(order.tolist())) == len(order) > 4000
    assert np.abs(np.bincount(order * 16 // 10_000_000, minlength=16) - 256).max() < 80


WEIGHTS = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from([0.0, 0.02, 0.3, 1.0, 7.0])),
    min_size=1,
    max_size=5,
)


@given(WEIGHTS, st.integers(1, 500))
@settings(max_examples=40)
def test_each_source_of_a_mixture_is_read_in_whole_epochs_at_its_weight(sources, size):
    sizes, weights = [n for n, _ in sources], [w for _, w in sources]
    if not sum(weights):
        weights[0] = 1.0
    made = stream(*sizes, weights=weights, size=size)
    at, shortest = [0] * len(sizes), min(n / w for n, w in zip(sizes, weights, strict=True) if w)
    chunks = 30 * math.ceil(shortest * sum(weights) / size)
    for chunk in range(chunks):
        for s, of in made.draws(chunk).items():
            assert of.begin == at[s] <= of.end <= of.last
            assert (of.first % sizes[s], of.last - of.first) == (0, sizes[s])
            at[s] = of.end
    for n, w, drawn in zip(sizes, weights, at, strict=True):
        # its last epoch may have begun half a chunk late or early
        assert abs(drawn - 30 * shortest * w) <= n / 2 + 1


def test_weights_hold_whatever_the_sizes_of_the_sources():
    made = stream(10, 1000, 40, weights=[3, 1, 0], size=200)
    chunks = [made.chunk(c) for c in range(300)]  # of 10 samples of the first each
    order = np.concatenate(chunks)
    source = np.searchsorted([10, 1010, 1050], order, side="right")
    np.testing.assert_array_equal(np.bincount(source, minlength=3), [3000, 1000, 0])
    assert set(Counter(order[source == 0].tolist()).values()) == {300}
    assert set(Counter(order[source == 1].tolist()).values()) == {1}
    assert all(len(set(chunk.tolist())) == len(chunk) for chunk in chunks)


def test_what_is_due_comes_before_the_first_epoch():
    due = np.array([3, 5, 6, 17, 18])
    made = Stream([Pool(0, 20, NONE, due)], [1.0], 4, 0)
    chunks = [made.chunk(c) for c in range(7)]
    assert [len(chunk) for chunk in chunks] == [3, 2, 4, 4, 4, 4, 4]
    assert sorted(np.concatenate(chunks[:2]).tolist()) == due.tolist()
    assert sorted(np.concatenate(chunks[2:]).tolist()) == list(range(20))


def test_by_temperature_shares_follow_the_usable_samples_and_at_1_weights_are_epochs():
    sizes, bad = [40, 1000], [0, 3, 7, 12, 41, 43, 45, 47]
    index = SimpleNamespace(source_start=np.cumsum([0, *sizes]), bad=np.array(bad))
    sources = {"few": EmbeddedSource(weight=3.0), "many": EmbeddedSource()}
    weights = {
        t: mixture_weights(DataConfig(sources=sources, temperature=t), index) for t in (0, 1, 2)
    }
    assert weights[0] == [3.0, 1.0]
    assert weights[1] == [3 * 36, 996]
    assert weights[2] == pytest.approx([3 * 36**0.5, 996**0.5])
    made = Stream(pools(36, 996), weights[1], 200, 0)
    order = np.concatenate([made.chunk(c) for c in range(60)])
    times = np.bincount(order, minlength=1032)
    few, many = times[:36].mean(), times[36:].mean()
    assert few / many == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [np.nan, 1], [np.inf, 1]])
def test_weights_that_make_no_mixture_are_refused(weights):
    with pytest.raises(UserError, match=r"the weights of data\.sources"):
        stream(5, 5, weights=weights, size=10).chunk(0)


def test_excluded_samples_are_never_drawn_and_all_others_are():
    excluded = np.array([100, 103, 104, 119])
    pool = Pool(100, 120, excluded)
    assert len(pool) == 16
    order = Stream([pool], [1], 16, 3).chunk(0)
    assert sorted(order.tolist()) == sorted(set(range(100, 120)) - set(excluded.tolist()))


def test_a_source_without_a_usable_sample_is_refused_by_name_unless_its_weight_is_zero():
    index = index_of(random_texts([5, 6]), config())
    every = np.arange(2)
    with pytest.raises(
        UserError,
        match=r"data\.sources\.made: none of its 2 samples .* the shortest has 5 LLM tokens",
    ):
        pools_of(index, [1.0], every)
    assert len(pools_of(index, [0.0], every)[0]) == 0


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), st.integers(1, 40), st.sets(st.integers(0, 99)),
    st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=15)
def test_with_a_window_an_epoch_has_every_sample_once_and_reads_one_file_after_another(
    counts, window, left_out, seed
):
    starts = 100 + np.concatenate([[0], np.cumsum(counts)])
    excluded = np.array(sorted(100 + k for k in left_out if k < sum(counts)), np.int64)
    pool = Pool(100, int(starts[-1]), excluded, window=window, files=starts[:-1])
    if not (size := len(pool)):
        return
    key = key_of(seed, 0)
    for epoch in range(2):
        ids = pool.draw(epoch * size, (epoch + 1) * size, key)
        assert sorted(ids.tolist()) == sorted(
            set(range(100, int(starts[-1]))) - set(excluded.tolist())
        )
        parts = [
            pool.draw(epoch * size + a, min(epoch * size + a + 7, (epoch + 1) * size), key)
            for a in range(0, size, 7)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), ids)
        file = np.searchsorted(starts, ids, side="right") - 1
        begins = [int(np.flatnonzero(file == f)[0]) // window for f in np.unique(file)]
        ends = [int(np.flatnonzero(file == f)[-1]) // window for f in np.unique(file)]
        # Files that share no window come one after the other: no file is needed again once a later
        # window is read.
        for f, begin, end in zip(np.unique(file), begins, ends, strict=True):
            assert (end - begin - 1) * window < np.count_nonzero(file == f)


def test_with_a_window_files_and_neighbours_come_in_another_order_in_each_epoch():
    pool = Pool(0, 1000, NONE, window=50, files=np.arange(0, 1000, 100))
    epochs = [pool.draw(1000 * e, 1000 * (e + 1), key_of(0, 0)) for e in range(3)]
    files = [tuple(dict.fromkeys((ids // 100).tolist())) for ids in epochs]
    assert len(set(files)) == 3
    assert all(np.mean(a == b) < 0.02 for a, b in itertools.combinations(epochs, 2))
    assert all(
        len(np.unique(ids[k : k + 50] // 100)) == 1 for ids in epochs for k in range(0, 1000, 50)
    )
    assert not np.array_equal(np.sort(epochs[0][:50]), epochs[0][:50])
