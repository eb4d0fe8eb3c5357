"""Files that a command will write, checked before it works for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmjax.errors import PLOT_SUFFIXES, UserError, check_output


def test_files_in_folders_that_exist_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.png").write_bytes(b"")
    for name in ("new.svg", "old.png", str(tmp_path / "new.png")):
        check_output("--picture", Path(name), PLOT_SUFFIXES)
    check_output("--out", Path("plan.json"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.pdf", "--picture a.pdf: name a file that ends in .png or .svg"),
        ("a", "--picture a: name a file that ends in .png or .svg"),
        ("no/a.svg", "--picture no/a.svg: name a file in a folder that exists"),
        ("folder.svg", "--picture folder.svg: name a file in a folder that exists"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UserError) as refused:
        check_output("--picture", Path(name), PLOT_SUFFIXES)
    assert str(refused.value) == said


def test_a_folder_that_may_not_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UserError, match="permission denied"):
        check_output("--out", tmp_path / "plan.json")
