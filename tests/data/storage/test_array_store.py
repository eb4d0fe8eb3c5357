"""Kept arrays come back as they were given, or not at all."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from mmjax.data.storage import array_store as kept_module
from mmjax.data.storage.array_store import Damaged, Missing, open_arrays, save_arrays
from mmjax.errors import UserError

ARRAYS = {
    "lengths": np.arange(1000),
    "names": np.array(["a", "bé"]),
    "none": np.empty((0, 2), np.int64),
    "one": np.array("x" * 32),
}


def test_arrays_come_back_memory_mapped_with_their_types_and_shapes(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a" / "kept", ARRAYS)
    found = open_arrays(tmp_path / "a" / "kept", ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert isinstance(found["lengths"], np.memmap)


def test_what_is_kept_anew_replaces_what_was_there_whatever_that_is(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.write_text("a file in the way")
    for value in (1, 2):
        save_arrays(folder, {"value": np.array([value])})
        assert open_arrays(folder, ["value"])["value"].tolist() == [value]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_nothing_there_is_told_from_something_damaged(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        open_arrays(tmp_path / "kept", ARRAYS)
    (tmp_path / "kept").mkdir()
    with pytest.raises(Damaged) as error:
        open_arrays(tmp_path / "kept", ARRAYS)
    assert not isinstance(error.value, Missing)


def test_every_byte_counts(tmp_path: Path) -> None:
    save_arrays(tmp_path / "kept", {"lengths": np.arange(20)})
    file = tmp_path / "kept" / "lengths.npy"
    whole = file.read_bytes()
    for at in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << at % 8
        file.write_bytes(spoiled)
        with pytest.raises(Damaged, match="kept"):
            open_arrays(tmp_path / "kept", ["lengths"])
    file.write_bytes(whole)
    assert open_arrays(tmp_path / "kept", ["lengths"])["lengths"].tolist() == list(range(20))


def lengths_in_a_worker(folder: Path, answers) -> None:
    kept_module._sum = None  # nothing may be hashed here
    answers.put(open_arrays(folder, ["lengths"])["lengths"].sum())


def test_a_process_hashes_once_and_its_workers_never(tmp_path: Path, monkeypatch) -> None:
    save_arrays(tmp_path / "kept", {"lengths": np.arange(20)})
    open_arrays(tmp_path / "kept", ["lengths"])
    monkeypatch.setattr(kept_module, "_sha256", None)
    open_arrays(tmp_path / "kept", ["lengths"])
    spawned = multiprocessing.get_context("spawn")
    answers = spawned.Queue()
    worker = spawned.Process(target=lengths_in_a_worker, args=(tmp_path / "kept", answers))
    worker.start()
    assert answers.get(timeout=480) == 190
    worker.join()


@pytest.mark.parametrize("name", ["a.npy", "sums.json"])
def test_a_device_in_the_place_of_a_file_is_not_read(tmp_path: Path, name: str) -> None:
    save_arrays(tmp_path / "saved", {"a": np.zeros(3)})
    (tmp_path / "saved" / name).unlink()
    (tmp_path / "saved" / name).symlink_to("/dev/zero")
    with pytest.raises(Damaged, match=f"{name} is no regular file"):
        open_arrays(tmp_path / "saved", ["a"])


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"file/folder cannot be written: Not a directory; make room there"
    ):
        save_arrays(tmp_path / "file" / "folder", {"a": np.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
