"""Copies in a folder of bounded size: made once for all processes, again after a kill, and never more than fit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from started import wait_until

from mmjax.data.storage.spool import Spool, locked
from mmjax.errors import UserError

SPACE, SIZE = 10_000, 2_900  # three copies fit

READER = """
import random, sys, time
from pathlib import Path
from mmjax.data.storage.spool import Spool

folder, number, names, last = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
spool, rng = Spool(folder / "copies", {space}), random.Random(number)

def write(name, file, reserve):
    reserve({size})
    for _ in range({size} // 290):
        file.write(name.encode() * 290)
        time.sleep(1e6 if name == last else 0.0002)
    with (folder / "made").open("a") as made:
        made.write(name)

for name in names:
    for _ in range(5):
        one = rng.choice([chr(max(ord("a"), ord(name) - 1)), name])
        with spool.open(one, lambda file, reserve: write(one, file, reserve)) as file:
            assert file.read() == one.encode() * {size}
"""


def reader(folder: Path, number: int, names: str, last: str = "") -> subprocess.Popen[str]:
    """Start a process that opens each name several times, the one before it among them, and never ends `last`."""
    script = READER.format(space=SPACE, size=SIZE)
    command = [sys.executable, "-c", script, str(folder), str(number), names, last]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def read_together(folder: Path, names: str) -> None:
    readers = [reader(folder, number, names) for number in (1, 2)]
    assert [process.communicate()[1] for process in readers] == ["", ""]


def used(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:  # it has just got its name
            continue
    return total


def test_processes_share_copies_that_never_take_more_than_their_space_though_one_is_killed(
    tmp_path: Path,
) -> None:
    (tmp_path / "copies").mkdir()
    most: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            with locked(tmp_path / "copies" / "lock"):
                most.append(used(tmp_path / "copies"))
            done.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = tmp_path / "made"
    try:
        killed = reader(tmp_path, 0, "abc", last="c")  # stops in the middle of that copy
        wait_until(lambda: made.exists() and "b" in made.read_text())
        wait_until(lambda: len(list((tmp_path / "copies").glob("*.partial"))) == 1)
        killed.kill()
        killed.wait()
        read_together(tmp_path, "abc")
        # they fit, so that nobody copies one again
        assert sorted(made.read_text()) == ["a", "b", "c"]
        read_together(tmp_path, "abcdefghij")
    finally:
        done.set()
        watcher.join()
    assert set(made.read_text()) == set("abcdefghij")
    assert SPACE - SIZE < max(most) <= SPACE
    assert not list((tmp_path / "copies").glob("*.partial"))


def test_a_copy_is_read_to_its_end_when_it_has_made_room_and_one_that_can_never_fit_is_named(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path, SPACE)

    def write(content: bytes):
        def copy(file, reserve):
            reserve(len(content))
            file.write(content)

        return copy

    first = spool.open("first", write(b"1" * 6000))
    with spool.open("second", write(b"2" * 6000)) as second:
        assert second.read() == b"2" * 6000
    assert first.read() == b"1" * 6000
    first.close()
    with pytest.raises(
        UserError, match=r"huge has 1\.1e-05 GB, and data\.window_space=1e-05 GB is all"
    ):
        spool.open("huge", write(b"3" * 11_000))

    def fails(file, reserve):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        spool.open("third", fails)
    assert used(tmp_path) == 6000
    rng = random.Random(0)
    for k in range(50):
        content = bytes([k]) * rng.randrange(0, 5000)
        with spool.open(f"{k}", write(content)) as file:
            assert file.read() == content
        assert used(tmp_path) <= SPACE
