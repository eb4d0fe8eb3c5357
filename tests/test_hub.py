"""Names on the Hugging Face Hub stand for folders of its local cache, and nobody needs a network for these."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from commands import run
from llava_folder import save_checkpoint

from mmjax import generate
from mmjax.config import ChatFormat
from mmjax.config_files import load
from mmjax.data.chat import load_chat
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.hub import cache_folder, checkpoint_folder

NAME, COMMIT = "someone/Tiny-llava.1", "0123abcd"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> None:
    """A cache of its own, and no network."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def into_cache(checkpoint: Path, *left_out: str) -> Path:
    """Lay a checkpoint into the cache as huggingface_hub does, files as links to blobs; return its snapshot."""
    stored = cache_folder() / f"models--{NAME.replace('/', '--')}"
    snapshot, blobs = stored / "snapshots" / COMMIT, stored / "blobs"
    for folder in (snapshot, blobs, stored / "refs"):
        folder.mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    for path in checkpoint.iterdir():
        if path.name not in left_out:
            shutil.copy(path, blobs / path.name)
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def test_what_huggingface_hub_finds_in_its_cache_is_found(checkpoint):
    snapshot = into_cache(checkpoint)
    there = huggingface_hub.snapshot_download(NAME, cache_dir=cache_folder(), local_files_only=True)
    assert checkpoint_folder(NAME) == Path(there) == snapshot


def test_a_name_does_wherever_a_folder_does(checkpoint, capsys):
    snapshot = into_cache(checkpoint)
    config = load("llava_style", [f"checkpoint={NAME}", "data=none.json"])
    assert config.model.llm.weights == config.model.encoders["vision"].weights == str(snapshot)
    assert from_hf(NAME) == from_hf(snapshot)
    named, there = load_chat(ChatFormat(NAME)), load_chat(ChatFormat(str(checkpoint)))
    assert named.tokenizer.fingerprint() == there.tokenizer.fingerprint()
    assert named.template.source == there.template.source
    ended = run(capsys, generate.main, NAME, "What?", "--max-tokens", "2", "device=cpu")
    assert ended.code == 0, ended.err


def test_a_folder_that_exists_wins_and_a_path_is_no_name(checkpoint, tmp_path):
    into_cache(checkpoint)
    shutil.copytree(checkpoint, tmp_path / NAME)
    assert checkpoint_folder(NAME) == Path(NAME)
    for path in ("someone/mistyped", "nothing", "/no/where", "a/b/c"):
        assert checkpoint_folder(path) == Path(path)


@pytest.mark.parametrize("missing", ["model.safetensors", "everything"])
def test_offline_one_line_says_what_to_do(missing, checkpoint, capsys):
    if missing != "everything":
        into_cache(checkpoint, missing)
    ended = run(capsys, generate.main, NAME, "What?")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"error: {NAME} is no folder here, and the Hugging Face cache" in ended.err
    assert f"hf download {NAME}" in ended.err


def test_where_there_is_a_network_it_is_downloaded(checkpoint, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked = []

    def download(name: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        asked.append((name, cache_dir))
        return str(into_cache(checkpoint))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = checkpoint_folder(NAME)
    assert checkpoint_folder(NAME) == found
    assert asked == [(NAME, cache_folder())]


def test_a_download_that_fails_is_one_line_with_its_reason(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def download(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"cannot be downloaded \(no route to host\): fetch it where") as error:
        checkpoint_folder(NAME)
    assert "\n" not in str(error.value)
