"""`mmjax.families`: what is read of a folder, and the same prompt here and in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import run
from llava_folder import save_checkpoint
from safetensors.numpy import load_file, save_file

from mmjax import families
from mmjax.hf.families import CHECKPOINTS
from mmjax.inference.transformers_process import Computed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("families") / "llava")


def test_a_prompt_with_an_image_is_computed_as_in_transformers(folder, capsys):
    ended = run(capsys, families.main, folder, "--try")
    assert (ended.code, ended.err) == (0, "")
    lines = dict(line.strip().split(": ", 1) for line in ended.out.splitlines() if ": " in line)
    assert lines[str(folder)] == "llava"
    assert lines["tensors"] == f"{len(load_file(folder / 'model.safetensors'))} in the folder"
    # the begin, "USER:", 16 patches, the question
    assert lines["prompt"] == "33 tokens"
    assert float(lines["logits"].split()[2]) <= 1e-4
    assert lines["answer"] == "8 tokens"


@pytest.mark.exhaustive
def test_a_folder_without_a_tokenizer_is_asked_random_tokens(folder, capsys, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    ended = run(capsys, families.main, tmp_path, "--try", "--max-tokens", 3)
    assert (ended.code, ended.err) == (0, "")
    assert "chat: none, so random tokens are compared" in ended.out
    assert "prompt: 24 tokens" in ended.out
    assert "answer: 3 tokens" in ended.out


def test_every_tensor_that_does_not_fit_is_named(folder, capsys, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    missing, short, *_ = sorted(name for name in tensors if "layers.1" in name)
    extra = {"language_model.model.layers.1.sinks": np.zeros(3, np.float32)}
    changed = {name: x for name, x in tensors.items() if name != missing}
    save_file(changed | {short: tensors[short][:-1]} | extra, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    ended = run(capsys, families.main, tmp_path, "--try")
    assert (ended.code, ended.err) == (1, "")
    assert "prompt" not in ended.out  # nothing is computed with them
    wrong = [line for line in ended.out.splitlines() if "tensor WRONG" in line]
    assert [any(name in line for line in wrong) for name in (missing, short, *extra)] == [True] * 3


def test_what_differs_from_transformers_is_said():
    rng = np.random.default_rng(0)
    there = Computed(np.arange(5), rng.normal(0, 1, (5, 9)), [1, 2, 3], "5")
    here = there._replace(ids=np.array([0, 1, -1, 3, 4]))  # -1: an image's
    right = lambda here: {c.name: c.right for c in families.compare(here, there, 1e-4)}  # noqa: E731
    assert right(here) == {"prompt": True, "logits": True, "answer": True}
    assert right(here._replace(answer=[1, 2])) == {"prompt": True, "logits": True, "answer": False}
    assert right(here._replace(logits=there.logits + 1e-3))["logits"] is False
    assert right(here._replace(logits=there.logits * np.nan))["logits"] is False
    for ids in (np.arange(4), np.array([0, 1, -1, 3, 5])):
        assert right(here._replace(ids=ids)) == {"prompt": False}


def test_without_a_folder_all_families_are_listed(capsys):
    ended = run(capsys, families.main)
    read, _, *unread = ended.out.splitlines()
    assert read.split()[1:] == list(CHECKPOINTS)
    assert any("kosmos-2.5" in line for line in unread)


def test_a_folder_that_is_not_read_is_one_line(folder, capsys, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "kosmos-2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = run(capsys, families.main, tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert "model_type='kosmos-2' cannot be read" in ended.err
