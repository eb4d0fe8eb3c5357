"""Files and folders appear whole or not at all, and whole JSON is read whatever stands beside it."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from started import ROOT

from mmjax.disk import (
    append_json_lines,
    atomic_folder,
    atomic_write,
    read_json_lines,
    read_sealed,
    user_cache,
    verify_checksum,
    with_checksum,
    write_sealed,
)

Replace = Callable[[Path], AbstractContextManager[Path]]


def fill(path: Path, text: str) -> None:
    """Write a text to a file, or into a folder."""
    (path / "a" if path.is_dir() else path).write_text(text)


def content(path: Path) -> str:
    return (path / "a" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("replace", [atomic_write, atomic_folder])
def test_what_is_written_replaces_what_was_there_once_it_is_whole(
    replace: Replace, tmp_path: Path
) -> None:
    path = tmp_path / "mine"
    for text in ("old", "new"):
        before = content(path) if path.exists() else None
        with replace(path) as partial:
            fill(partial, text)
            assert (content(path) if path.exists() else None) == before
        assert content(path) == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [atomic_write, atomic_folder])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_writer_that_fails_changes_nothing_and_leaves_nothing(
    replace: Replace, error, tmp_path: Path
) -> None:
    path = tmp_path / "mine"
    with replace(path) as partial:
        fill(partial, "old")

    def fail() -> None:
        with replace(path) as partial:
            fill(partial, "half of the n")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert content(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["atomic_write", "atomic_folder"])
def test_a_writer_that_is_killed_leaves_no_half_of_it_under_the_name(
    name: str, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from mmjax import disk\n"
        f"with disk.{name}(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'a' if partial.is_dir() else partial).write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "mine")], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "mine").exists()


def test_who_reads_a_file_that_is_replaced_reads_the_old_one_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("old")
    with (tmp_path / "mine").open() as reader:
        with atomic_write(tmp_path / "mine") as partial:
            partial.write_text("n")
        assert reader.read() == "old"


def test_two_writers_of_one_file_do_not_meet_and_the_last_to_end_stays(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "mine") as first:
        first.write_text("first")
        with atomic_write(tmp_path / "mine") as second:
            second.write_text("second")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]


def test_objects_are_read_and_lines_that_are_none_left_out(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    assert list(read_json_lines(path)) == []
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\n5\n' + b"[" * 100_000 + b'\n{"a": 2}\n{"a": 3, "b')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("before", ["", '{"a": 1}\n', '{"a": 1}\n{"a": 2, "b'])
def test_a_line_that_a_kill_cut_off_spoils_none_that_is_appended(
    before: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(before)
    append_json_lines(path, [{"a": 3}, {"a": "é"}])
    assert path.read_text().startswith(before)
    assert [record["a"] for record in read_json_lines(path)] == [*([1] if before else []), 3, "é"]


def test_an_object_under_its_checksum_comes_back_as_it_was_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "sealed.json"
    assert read_sealed(path) is None
    write_sealed(path, {"steps": (0, 128), "names": {"b": 1.5, "a": None}})
    assert read_sealed(path) == {"steps": [0, 128], "names": {"b": 1.5, "a": None}}
    whole = path.read_bytes().strip()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        assert read_sealed(path) is None
    path.write_bytes(b"[" * 100_000)
    assert read_sealed(path) is None


def test_a_checksum_does_not_depend_on_the_order_of_keys() -> None:
    sealed = with_checksum({"a": 1, "b": [2]})
    assert verify_checksum(dict(reversed(sealed.items()))) == {"a": 1, "b": [2]}
    with pytest.raises(ValueError, match="not what was written"):
        verify_checksum(sealed | {"a": 2})
    with pytest.raises(ValueError, match="not what was written"):
        verify_checksum(json.loads("[1]"))


def test_the_cache_is_in_the_folder_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert user_cache() == Path("/home/me/.cache/mmjax")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/mine")
    assert user_cache("other") == Path("/home/me/mine/other")
