"""Outputs of encoders are read as they were written, by others too, within a bound, or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mmjax.data.storage import feature_store
from mmjax.data.storage.feature_store import (
    FeatureLayout,
    FeatureReader,
    FeatureWriter,
    shard_names,
    write_shard,
)
from mmjax.disk import atomic_folder

LAYOUT = FeatureLayout(6, np.dtype(ml_dtypes.bfloat16))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(feature_store, "LISTED_SECONDS", 0.0)


def key(number: int) -> bytes:
    return bytes([number]) * feature_store.KEY_BYTES


def features(number: int, length: int = 5) -> np.ndarray:
    values = np.random.default_rng(number).standard_normal((length, LAYOUT.width))
    return values.astype(LAYOUT.dtype)


def store(folder: Path, numbers: range, space: int = 2**30) -> FeatureWriter:
    writer = FeatureWriter(folder, LAYOUT, space)
    for number in numbers:
        writer.add(key(number), features(number, 3 + number % 4))
    writer.flush()
    return writer


def total_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_what_several_writers_stored_is_read_to_the_bit_and_nothing_else(tmp_path):
    folder = tmp_path / "weights"
    reader = FeatureReader(folder, LAYOUT)
    assert reader.read(key(0)) is None  # there is not even a folder
    store(folder, range(10))
    store(folder, range(8, 20))  # some of them twice
    for number in range(20):
        np.testing.assert_array_equal(reader.read(key(number)), features(number, 3 + number % 4))
    assert reader.read(key(20)) is None


@pytest.mark.parametrize("damage", ["flipped", "cut", "items", "length", "gone"])
def test_a_damaged_shard_is_as_if_it_had_not_been_written(tmp_path, damage):
    folder = tmp_path / "weights"
    store(folder, range(4))
    (shard,) = (folder / name for name in shard_names(folder))
    values, items = shard / "values.bin", shard / "items.npy"
    reader = FeatureReader(folder, LAYOUT)
    if damage == "flipped":
        data = bytearray(values.read_bytes())
        data[len(data) - 3] ^= 1
        values.write_bytes(data)
    elif damage == "cut":
        values.write_bytes(values.read_bytes()[:-1])
    elif damage == "items":
        items.write_bytes(items.read_bytes()[:-5])
    elif damage == "length":
        table = np.load(items)
        table["length"] = 2**50
        np.save(items, table)
    else:
        assert reader.read(key(3)) is not None
        values.unlink()
    assert reader.read(key(3)) is None
    store(folder, range(4))  # encoded again
    np.testing.assert_array_equal(reader.read(key(3)), features(3, 6))


def test_what_a_killed_process_began_is_not_read_and_is_removed_later(tmp_path):
    folder = tmp_path / "weights"
    store(folder, range(2))
    begun = folder / f"{'0' * 32}.aaaaaaaaaaaa.partial"
    with atomic_folder(tmp_path / "elsewhere") as partial:
        write_shard(partial / "shard", {key(7): features(7)})
        (partial / "shard").rename(begun)
    assert FeatureReader(folder, LAYOUT).read(key(7)) is None
    store(folder, range(2, 4))
    assert begun.exists()  # another process may be writing it
    os.utime(begun, (0, 0))
    store(folder, range(4, 6))
    assert not begun.exists()


def test_the_bound_holds_over_encoders_and_what_was_not_used_for_longest_goes_first(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for numbers in (range(8), range(8, 16)):
        store(old, numbers)
    shards = [old / name for name in shard_names(old)]
    by_key = {int(np.load(shard / "items.npy")["key"][0].tobytes()[0]): shard for shard in shards}
    for n, shard in enumerate((by_key[0], by_key[8])):
        os.utime(shard, (1000 + n, 1000 + n))
    reader = FeatureReader(old, LAYOUT)
    assert reader.read(key(0)) is not None  # which is now the one that was used last
    space = total_bytes(tmp_path)
    store(new, range(4), space)
    assert total_bytes(tmp_path) <= space
    assert not by_key[8].exists()
    assert by_key[0].exists()
    assert FeatureReader(new, LAYOUT).read(key(1)) is not None


def test_a_run_evicts_nothing_that_it_has_written_and_leaves_out_what_finds_no_room(tmp_path):
    folder = tmp_path / "weights"
    space = 40_000
    writer = FeatureWriter(folder, LAYOUT, space)
    time.sleep(0.01)
    for number in range(200):
        writer.add(key(number), features(number, 60))
    writer.flush()
    assert total_bytes(tmp_path) <= space
    reader = FeatureReader(folder, LAYOUT)
    stored = [n for n in range(200) if reader.read(key(n)) is not None]
    assert stored == list(range(len(stored)))  # the first ones
    assert space / 2 < total_bytes(tmp_path)


def test_where_nothing_can_be_written_training_goes_on(tmp_path, capsys):
    (tmp_path / "weights").write_text("no folder")
    writer = store(tmp_path / "weights", range(3))
    assert "not stored from here on" in capsys.readouterr().err
    writer.add(key(4), features(4))
    writer.flush()
    assert capsys.readouterr().err == ""
