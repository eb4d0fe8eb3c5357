"""Names on the Hugging Face Hub stand for what its local cache has of them, and nobody needs a network for these."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from commands import run
from llava_folder import save_checkpoint
from PIL import Image
from started import begin, environment, finish
from vae_folder import save_vae

from mmjax import generate, index
from mmjax.config import (
    ChatFormat,
    DiffusionTransformerConfig,
    LlavaSource,
    ParquetSource,
    VaeLatents,
)
from mmjax.config.loading import load
from mmjax.data.sample import BadSample, Split
from mmjax.data.sources.opening import open_conversations
from mmjax.data.storage.files import Conversations
from mmjax.data.text.load_chat import load_chat
from mmjax.errors import UserError
from mmjax.hf import pixart
from mmjax.hf.diffusers_folder import write_part
from mmjax.hf.families import from_hf
from mmjax.hf.generators import generator_from_hf
from mmjax.hf.layout import TensorNames
from mmjax.hub import DIFFUSERS_SINGLE, cache_folder, checkpoint_folder

PICTURE = DiffusionTransformerConfig(
    1, 24, 2, mlp_width=96, condition_width=16, latents=VaeLatents()
)
NAME, COMMIT = "someone/Tiny-llava.1", "0123abcd" * 5


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


def into_cache(repository: Path, *left_out: str, kind: str = "models") -> Path:
    """Lay a repository into the cache as huggingface_hub does, files as links to blobs; return its snapshot."""
    stored = cache_folder() / f"{kind}--{NAME.replace('/', '--')}"
    snapshot, blobs = stored / "snapshots" / COMMIT, stored / "blobs"
    for folder in (snapshot, blobs, stored / "refs"):
        folder.mkdir(parents=True)
    (stored / "refs" / "main").write_text(COMMIT)
    for path in repository.rglob("*"):
        if path.is_file() and path.name not in left_out:
            link, blob = (
                snapshot / path.relative_to(repository),
                blobs / f"{len(list(blobs.iterdir())):040x}",
            )
            shutil.copy(path, blob)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(
                Path(
                    *[".."] * (2 + len(link.parent.relative_to(snapshot).parts)), "blobs", blob.name
                )
            )
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


def test_a_generator_is_read_by_a_name_too_and_its_text_encoder_is_not_missed(tmp_path):
    folder = tmp_path / "made"
    save_vae(folder / "vae")
    write_part(folder / "transformer", pixart.to_fields(PICTURE), TensorNames({}), {})
    (folder / "model_index.json").write_text("{}")
    snapshot = into_cache(folder)
    generator = generator_from_hf(NAME)
    assert generator == generator_from_hf(snapshot)
    assert generator.weights == str(snapshot / "transformer")
    assert generator.latents.weights == str(snapshot)
    (snapshot / "vae" / DIFFUSERS_SINGLE).unlink()
    with pytest.raises(
        UserError,
        match=rf"^{NAME} is no folder here, and the Hugging Face cache .*hf download {NAME}",
    ):
        generator_from_hf(NAME)


def test_where_there_is_a_network_it_is_downloaded(checkpoint, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked = []

    def download(name: str, repo_type: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        asked.append((name, repo_type, cache_dir))
        return str(into_cache(checkpoint))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = checkpoint_folder(NAME)
    assert checkpoint_folder(NAME) == found
    assert asked == [(NAME, "model", cache_folder())]


def test_a_download_that_fails_is_one_line_with_its_reason(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")

    def download(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        UserError, match=r"cannot be downloaded \(no route to host\): fetch it where"
    ) as error:
        checkpoint_folder(NAME)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# data sets

QUESTIONS = {"question": "question", "answer": "answer", "images": "image"}


def image_bytes(number: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((6 + number, 8, 3), number, np.uint8)).save(content, "png")
    return content.getvalue()


def write_parquet(path: Path, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        "question": [f"Which is number {n}?" for n in numbers],
        "answer": [str(n) for n in numbers],
        "image": [{"bytes": image_bytes(n), "path": None} for n in numbers],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), path)


@pytest.fixture
def tables(tmp_path) -> Path:
    """A repository of Parquet: training's in two shards, validation's in one."""
    repository = tmp_path / "tables"
    for shard in range(2):
        write_parquet(
            repository / f"data/train-{shard:05d}-of-00002.parquet", range(3 * shard, 3 * shard + 3)
        )
    write_parquet(repository / "data/validation-00000-of-00001.parquet", range(6, 8))
    (repository / "README.md").write_text("# Numbers")
    return repository


@pytest.fixture
def pages(tmp_path) -> Path:
    """A repository of JSON lines with images beside them, none of which says a split."""
    repository = tmp_path / "pages"
    (repository / "photos").mkdir(parents=True)
    for number in range(3):
        (repository / "photos" / f"{number}.png").write_bytes(image_bytes(number))
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A number."}]
    records = [{"image": f"photos/{number}.png", "conversations": turns} for number in range(3)]
    (repository / "questions.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    (repository / "dataset_infos.json").write_text("{}")
    return repository


def opened(path: str, tmp_path: Path, split: Split = "train", **own: str) -> Conversations:
    source = ParquetSource(path, **QUESTIONS | own)
    return open_conversations(source, split, tmp_path / "learned", "data.sources.x")


def contents(conversations: Conversations) -> list:
    """The turns and the bytes of the media of all records."""
    records = range(len(conversations))
    return [
        (conversations.conversation(i), [m.read() for m in conversations.media(i)]) for i in records
    ]


def test_a_data_set_in_the_cache_is_what_its_files_are_split_by_split(tables, tmp_path):
    snapshot = into_cache(tables, kind="datasets")
    there = huggingface_hub.snapshot_download(
        NAME, repo_type="dataset", cache_dir=cache_folder(), local_files_only=True
    )
    assert Path(there) == snapshot
    (stored,) = huggingface_hub.scan_cache_dir(cache_folder()).repos
    assert (stored.repo_id, stored.repo_type, stored.nb_files) == (NAME, "dataset", 4)
    for split, count in (("train", 6), ("validation", 2)):
        named = opened(NAME, tmp_path, split, validation=NAME)
        files = f"{tables}/data/{split}-*.parquet"
        assert len(named) == count
        assert contents(named) == contents(opened(files, tmp_path, split, validation=files))
        by_url = f"hf://datasets/{NAME}/data/{split}-*.parquet"
        assert contents(named) == contents(opened(by_url, tmp_path, split, validation=by_url))
    with pytest.raises(
        UserError, match=f"x.test={NAME} is no file here, and the Hugging Face cache"
    ):
        opened(NAME, tmp_path, "test", test=NAME)


def test_files_beside_records_are_read_through_the_cache_s_links_and_no_others(pages, tmp_path):
    snapshot = into_cache(pages, kind="datasets")
    conversations = open_conversations(
        LlavaSource(NAME), "train", tmp_path / "learned", "data.sources.x"
    )
    assert [images for _, images in contents(conversations)] == [
        [image_bytes(number)] for number in range(3)
    ]
    (snapshot / "photos" / "1.png").unlink()
    (snapshot / "photos" / "1.png").symlink_to(pages / "photos" / "1.png")
    with pytest.raises(BadSample, match="is a link that leads outside"):
        conversations.media(1)


def test_a_command_takes_a_data_set_s_name_as_it_takes_files(tables, capsys):
    into_cache(tables, kind="datasets")
    columns = [f"data.sources.numbers.{name}={column}" for name, column in QUESTIONS.items()]
    words = [
        "tiny_vlm",
        "data.sources.numbers=parquet",
        f"data.sources.numbers.path={NAME}",
        *columns,
    ]
    ended = run(capsys, index.main, *words)
    assert ended.code == 0, ended.err
    assert "record 6/6  numbers train" in ended.out


@pytest.mark.parametrize("missing", ["train-00001-of-00002.parquet", "everything"])
def test_offline_one_line_says_how_a_data_set_gets_here(missing, tables, tmp_path):
    if missing != "everything":
        into_cache(tables, missing, kind="datasets")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids to download it") as caught:
        opened(NAME, tmp_path)
    assert "\n" not in str(caught.value)
    assert f"data.sources.x.path={NAME} is no file here" in str(caught.value)
    assert f"hf download --repo-type dataset {NAME}" in str(caught.value)


def test_where_there_is_a_network_a_data_set_is_downloaded_once(tables, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    asked = []

    def download(name: str, repo_type: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        asked.append((name, repo_type, cache_dir, allow_patterns))
        return str(into_cache(tables, kind="datasets"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert len(opened(NAME, tmp_path)) == len(opened(NAME, tmp_path)) == 6
    assert asked == [(NAME, "dataset", cache_folder(), ["*.parquet"])]


class Hub(BaseHTTPRequestHandler):
    """What the Hugging Face Hub answers about one data set, to huggingface_hub's own requests."""

    def do_GET(self) -> None:
        folder, path = self.server.folder, urllib.parse.urlsplit(self.path).path
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        entries = [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for name, content in files.items()
        ]
        named = path.removeprefix(f"/datasets/{NAME}/resolve/{COMMIT}/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if named in files and asked:
            self.server.fetched.append(self.path)
            self.answer(206, files[named][int(asked[1]) : int(asked[2]) + 1])
        elif path == f"/api/datasets/{NAME}" or path == f"/api/datasets/{NAME}/revision/{COMMIT}":
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT}).encode())
        elif path.startswith(f"/api/datasets/{NAME}/tree/{COMMIT}"):
            self.answer(200, json.dumps(entries).encode())
        else:
            self.answer(404, b"{}")

    def answer(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_window_streams_the_newest_commit_of_a_data_set_and_downloads_no_file(
    tables, tmp_path, monkeypatch
):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder, server.fetched = tables, []
        Thread(target=server.serve_forever, daemon=True).start()
        variables = environment(1) | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        columns = [f"data.sources.numbers.{name}={column}" for name, column in QUESTIONS.items()]
        words = [
            "tiny_vlm",
            "data.sources.numbers=parquet",
            f"data.sources.numbers.path={NAME}",
            *columns,
        ]
        words += ["data.sources.numbers.window=2", f"data.cache={tmp_path / 'learned'}"]
        ended = finish(
            begin([sys.executable, "-m", "mmjax.index", *words], variables, cwd=tmp_path)
        )
        assert ended.code == 0, ended.err
        assert "record 6/6  numbers train" in ended.out
        shards = {url.partition("/data/")[2] for url in server.fetched}
        assert shards == {f"train-{shard:05d}-of-00002.parquet" for shard in range(2)}
        # What would tell that a file was replaced by another of its size.
        url = f"hf://datasets/{NAME}@{COMMIT}/data/train-00000-of-00002.parquet"
        code = f"from mmjax.data.storage.files import file_at; print(file_at({url!r}).stamp())"
        stamp = finish(begin([sys.executable, "-c", code], variables, cwd=tmp_path)).out
        assert (
            hashlib.sha1((tables / "data/train-00000-of-00002.parquet").read_bytes()).hexdigest()
            in stamp
        )
        server.shutdown()
    assert not list(cache_folder().rglob("*.parquet"))


def test_which_of_several_folders_is_meant_has_to_be_said(tables, tmp_path):
    write_parquet(tables / "more/train-00000-of-00001.parquet", range(9, 12))
    into_cache(tables, kind="datasets")
    with pytest.raises(
        UserError, match=r"has train files in 2 folders \(data, more\); name those that are meant"
    ) as caught:
        opened(NAME, tmp_path)
    url = str(caught.value).rpartition(" ")[2]
    assert len(opened(url.replace("/data/", "/more/"), tmp_path)) == 3
    folder = tmp_path / NAME
    write_parquet(folder, range(2))  # a file that exists wins
    assert len(opened(str(Path(NAME)), tmp_path)) == 2
