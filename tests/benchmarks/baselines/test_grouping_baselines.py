import numpy as np
import pytest

from mmjax.balance.parts import dist_ratio, pad_ratio
from mmjax.benchmarks.baselines.grouping import device_groups, length_groups, random_groups

RANKS, PER_ROW = 8, 4


def groups(name: str, lengths: np.ndarray, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if name == "random":
        return random_groups(len(lengths), PER_ROW, rng)
    return {"length": length_groups, "device": device_groups}[name](lengths, PER_ROW, RANKS, rng)


@pytest.mark.parametrize("name", ["random", "length", "device"])
@pytest.mark.parametrize("samples", [0, 3, 32, 1000])
def test_every_sample_is_in_one_row_of_at_most_four_and_the_seed_decides(name, samples):
    lengths = np.random.default_rng(1).integers(1, 100, (samples, 2))
    row = groups(name, lengths, 0)
    assert len(row) == samples
    assert np.bincount(row).max(initial=0) <= PER_ROW
    assert np.bincount(row)[:-RANKS].min(initial=PER_ROW) == PER_ROW
    assert np.array_equal(row, groups(name, lengths, 0))
    assert samples < 1000 or not np.array_equal(row, groups(name, lengths, 1))


def test_length_groups_pad_least_and_device_groups_wait_least_as_in_the_papers_table_5():
    rng = np.random.default_rng(2)
    tiles = rng.choice([1, 3, 5], 8000, p=[0.7, 0.1, 0.2])
    lengths = np.stack([256 * tiles + rng.lognormal(5.5, 0.8, 8000).astype(int), tiles], axis=1)
    pad, wait = {}, {}
    for name in ("random", "length", "device"):
        order = np.argsort(groups(name, lengths, 0), kind="stable")
        rows = lengths[order].reshape(-1, PER_ROW, 2)
        pad[name] = pad_ratio(rows[:, :, 0]).mean()
        wait[name] = dist_ratio(rows.sum(1).reshape(-1, RANKS, 2)[:, :, 0]).mean()
    assert pad["length"] < 0.7 * pad["random"] < pad["random"] < pad["device"]
    assert wait["device"] < 0.5 * min(wait["random"], wait["length"])
