"""What is whole in a file of JSON lines is read, whatever stands beside it."""

from __future__ import annotations

from pathlib import Path

from mmjax.runtime.run_dir import read_json_lines


def test_objects_are_read_and_lines_that_are_none_left_out(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    assert list(read_json_lines(path)) == []
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\n5\n' + b"[" * 100_000 + b'\n{"a": 2}\n{"a": 3, "b')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]
