"""Tokens of a data set's texts: counted on all cores as one would alone, kept, and gone on with after a kill."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from files_made import asked, lines
from llava_folder import save_tokenizer

from mmjax.config import ChatFormat, LlavaSource, Placeholder
from mmjax.data.sample import BadSample
from mmjax.data.sources import token_counts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.token_counts import count_text, open_token_counts
from mmjax.data.text.load_chat import load_chat

COUNT = 300


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_chat(ChatFormat(str(folder), placeholders={"image": Placeholder("<image>")}))


@pytest.fixture
def reopen(tmp_path):
    records = [asked("What colour is it? " * (1 + i % 7)) for i in range(COUNT)]
    records[17] = asked("")
    records[250] = {"conversations": "none"}
    path = lines(tmp_path / "d.jsonl", records)
    return partial(open_conversations, LlavaSource(str(path)), "train", tmp_path / "cache", "x")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(token_counts, "_CHUNK", 64)


def test_each_record_has_the_tokens_that_its_conversation_has_or_its_reason(reopen, chat, tmp_path):
    found, opened = count_text(reopen(), reopen, chat, tmp_path), reopen()
    assert found.bad.tolist() == [17, 250]
    assert "(user) is empty" in found.reason[0]
    for i in (0, 6, 63, 64, 299):
        assert [found.tokens[i]] == chat.text_tokens([opened.conversation(i)])
    assert found.tokens[[17, 250]].tolist() == [0, 0]
    with pytest.raises(BadSample):
        opened.conversation(250)


def test_on_all_cores_it_is_what_one_counts_alone(reopen, chat, tmp_path, monkeypatch):
    alone = count_text(reopen(), reopen, chat, tmp_path / "alone")
    monkeypatch.setattr(token_counts, "_ALONE", 0)
    monkeypatch.setattr(token_counts.os, "sched_getaffinity", lambda pid: {0, 1})
    told = []
    shared = count_text(reopen(), reopen, chat, tmp_path / "shared", told.append)
    assert told == [64, 128, 192, 256, 300]
    for ours, theirs in zip(vars(shared).values(), vars(alone).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_what_was_counted_is_kept_and_a_killed_count_goes_on(reopen, chat, tmp_path, monkeypatch):
    assert open_token_counts(reopen(), chat, tmp_path) is None

    class Killed(BaseException):
        pass

    def killed(done: int) -> None:
        if done == 192:
            raise Killed

    with pytest.raises(Killed):
        count_text(reopen(), reopen, chat, tmp_path, killed)
    assert open_token_counts(reopen(), chat, tmp_path) is None
    told = []
    whole = count_text(reopen(), reopen, chat, tmp_path, told.append)
    assert told == [256, 300]
    kept = open_token_counts(reopen(), chat, tmp_path)
    np.testing.assert_array_equal(kept.tokens, whole.tokens)
    assert len(kept.tokens) == COUNT
    monkeypatch.setattr(token_counts, "_lengths", None)
    count_text(reopen(), reopen, chat, tmp_path)
    assert [p.suffix for p in tmp_path.iterdir() if p.name.startswith("text-")] == [""]


@pytest.mark.parametrize("name", ["tokens.npy", "reason.npy", "sums.json"])
def test_lengths_that_storage_has_changed_are_counted_again(name, reopen, chat, tmp_path, capsys):
    whole = count_text(reopen(), reopen, chat, tmp_path).tokens.tolist()
    (folder,) = tmp_path.glob("text-*")
    kept = bytearray((folder / name).read_bytes())
    kept[-2] ^= 1
    (folder / name).write_bytes(kept)
    assert open_token_counts(reopen(), chat, tmp_path) is None
    assert f"note   {folder}" in capsys.readouterr().err
    assert count_text(reopen(), reopen, chat, tmp_path).tokens.tolist() == whole
