"""An export describes itself on a model card, and is pushed to the Hugging Face Hub with it."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from commands import run
from fine_tuning import LORA, moved, save_checkpoint
from huggingface_hub import ModelCard, constants

from mmjax import export
from mmjax.config import LlavaSource
from mmjax.hub import dataset_name, repository_name
from mmjax.reporting.model_card import model_card
from mmjax.reporting.run import read_runs

SOMEONE = "hf_someones"  # a token


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for a push, of a Hub that keeps what it gets in memory."""

    repositories: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {SOMEONE}"
        self._answer({"name": "someone", "type": "user"} if known else None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        place = self.path.partition("?")[0]
        if place == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif place == "/api/repos/create":
            asked = json.loads(content)
            self.repositories[f"someone/{asked['name']}"] = {
                "private": "private" in (asked.get("visibility"), *asked)
            }
            self._answer({"url": f"{constants.ENDPOINT}/someone/{asked['name']}"})
        elif "/preupload/" in place:
            files = [
                {"path": f["path"], "uploadMode": "regular"} for f in json.loads(content)["files"]
            ]
            self._answer({"files": [file | {"shouldIgnore": False, "oid": None} for file in files]})
        else:
            name = place.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            url = f"{constants.ENDPOINT}/{name}/commit/1"
            self._answer({"success": True, "commitOid": "1", "commitUrl": url})

    def _answer(self, tree: object) -> None:
        content = json.dumps(tree).encode()
        self.send_response(401 if tree is None else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch):
    """Repositories of a Hub on this machine, by their names."""
    handler = type("OfOneTest", (Hub,), {"repositories": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", SOMEONE)
    yield handler.repositories
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    source = tmp_path_factory.mktemp("source") / "tiny-base"
    save_checkpoint(source)
    return moved(source, tmp_path_factory.mktemp("runs") / "tuned", lora=LORA)


def test_a_pushed_export_is_what_is_in_the_folder_with_its_card(tuned, tmp_path, hub, capsys):
    out = tmp_path / "out"
    words = (str(tuned), str(out), "--push", "someone/tuned", "--private")
    ended = run(capsys, export.main, *words)
    assert ended.code == 0, ended.err
    assert "pushed to http://127.0.0.1" in ended.out
    assert f"serve it: transformers serve {out} --port 8000" in ended.out
    pushed = hub["someone/tuned"]
    assert pushed.pop("private") is True
    files = [path for path in out.rglob("*") if path.is_file()]
    there = {path.relative_to(out).as_posix(): path.read_bytes() for path in files}
    assert pushed == there
    card = ModelCard(there["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["mmjax"]
    assert "# tuned" in card.text
    assert "tiny-base, trained for 3 steps with mmjax" in card.text
    assert "LoRA of rank" in card.text
    assert str(tuned.parent) not in card.text


def test_who_is_not_logged_in_is_told_before_anything_is_written(
    tuned, tmp_path, hub, capsys, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    out = tmp_path / "out"
    ended = run(capsys, export.main, str(tuned), str(out), "--push", "someone/tuned")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "--push someone/tuned: " in ended.err
    assert "log in with hf auth login, or set HF_TOKEN" in ended.err
    assert not out.exists()
    for words, message in (
        (("--push", "tuned"), "name a repository of the Hugging Face Hub, owner/name"),
        (("--private",), "--private is for --push OWNER/NAME"),
    ):
        ended = run(capsys, export.main, str(tuned), str(out), *words)
        assert (ended.code, out.exists()) == (2, False)
        assert message in ended.err
    assert not hub


def test_a_card_names_repositories_and_tells_no_password_and_no_folder(tuned, tmp_path):
    """Folders of the cache and URLs of data as their names on the Hub; other paths by their last part."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123"
    (described,) = read_runs([tuned])
    config = described.config
    sources = {
        "hub": LlavaSource("hf://datasets/owner/photos/a.json"),
        "named": LlavaSource("owner/pages"),
        "here": LlavaSource("/home/someone/secret/b.json", images="s3://user:pass@bucket/x?key=1"),
    }
    model = replace(config.model, llm=replace(config.model.llm, weights=str(snapshot)))
    config = replace(config, model=model, data=replace(config.data, sources=sources))
    card = ModelCard(model_card(replace(described, config=config), "new", 3, "peft"))
    assert repository_name(snapshot) == "owner/name"
    assert repository_name(tuned) == ""
    assert dataset_name("hf://datasets/owner/photos/a.json") == "owner/photos"
    assert card.data.base_model == ["owner/name"]
    assert card.data.base_model_relation == "adapter"
    assert card.data.datasets == ["owner/pages", "owner/photos"]
    assert card.data.library_name == "peft"
    assert '"path": "b.json"' in card.text
    assert "s3://bucket/x" in card.text
    for secret in ("/home", "pass@", "key=1", str(tmp_path)):
        assert secret not in card.text
