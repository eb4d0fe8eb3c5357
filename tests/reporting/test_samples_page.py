"""`python -m mmjax.index --show` shows samples as the model gets them, and no text of theirs is markup."""

from __future__ import annotations

import base64
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import run
from llava_folder import SIDE, save_checkpoint, save_questions
from PIL import Image

from mmjax import index
from mmjax.config.loading import load
from mmjax.data.sample import Text
from mmjax.data.sources.opening import open_sources

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """The elements of a page, and of each sample its listed tokens and images."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.samples: dict[str, list[tuple[int, bool]]] = {}
        self.images: list[str] = []
        self._stack: list[str] = []
        self._name = ""
        self._trained = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self._stack.append(tag)
        if tag == "img":
            self.images.append(dict(attributes)["src"] or "")
        if tag == "span":
            self._trained = False
        if tag == "mark":
            self._trained = True

    def handle_data(self, data: str) -> None:
        if self._stack and self._stack[-1] == "b":
            self._name = data
            self.samples[data] = []
        if self._stack and self._stack[-1] == "i" and data.strip():
            self.samples[self._name].append((int(data), self._trained))

    def handle_endtag(self, tag: str) -> None:
        while self._stack and self._stack.pop() != tag:
            pass


def shown(capsys: pytest.CaptureFixture[str], path: Path, *words: object) -> str:
    ended = run(capsys, index.main, *words, "--show", path)
    assert (ended.code, ended.err) == (0, "")
    assert f"page   {path}" in ended.out
    return path.read_text()


def test_a_page_has_the_tokens_and_images_that_the_model_gets_and_no_text_is_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    data = save_questions(tmp_path / "data", 6)
    records = json.loads(data.read_text())
    for record in records:
        record["conversations"][1]["value"] += EVIL
    data.write_text(json.dumps(records))
    rows = [f"batch.rows.{name}=2" for name in ("llm", "vision")]
    words = [
        "llava_style", f"checkpoint={checkpoint}", f"data={data}", f"images={tmp_path}/data/images",
        *rows, "batch.size.count=2", f"data.cache={tmp_path}/cache",
    ]  # fmt: skip
    text = shown(capsys, tmp_path / "page.html", *words, "--samples", 3)
    page = Page(text)
    assert "script" not in page.tags
    assert not {"onerror", "href"} & page.attributes
    assert "&lt;script&gt;alert(1)" in text

    source = open_sources(load(words[0], words[1:]), "train", Path())["chat"]
    assert len(page.samples) == len(page.images) == 3
    for name, tokens in page.samples.items():
        sample = source.sample(int(name.removeprefix("chat[").removesuffix("]")))
        expected = [
            (token, weight > 0)
            for segment in sample.segments
            if isinstance(segment, Text)
            for token, weight in zip(segment.tokens.tolist(), segment.weights.tolist(), strict=True)
        ]
        assert tokens == expected
    for uri in page.images:
        encoded = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
        assert Image.open(io.BytesIO(encoded)).size == (SIDE, SIDE)
    assert shown(capsys, tmp_path / "again.html", *words, "--samples", 3) == text
    other = Page(shown(capsys, tmp_path / "other.html", *words, "--samples", 3, "seed=7"))
    assert list(other.samples) != list(page.samples)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples=0"], "--samples 0: choose 1 to 500"),
        (["--show=page.txt"], "page.txt: name a file that ends in .html"),
        (["--json"], "leave --to, --latents, --video-tokens and --show out"),
    ],
)
def test_what_no_page_can_be_made_of_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(capsys, index.main, "tiny_omni", "--show", tmp_path / "page.html", *words)
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1
