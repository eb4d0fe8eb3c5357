"""`mmjax.init`: a config from a few answers, which loads, is what was planned, and trains."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run
from llava_folder import save_checkpoint, save_questions

from mmjax import init, train
from mmjax.config import LlavaSource, MessagesSource
from mmjax.config.loading import load

ANSWERS = ("checkpoint=model", "data=data.json", "images=images", "length=4", "cluster=h100x2")
SETTINGS = ("--batch.size.count", "8", "optimizer.learning_rate=1e-3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers writes it, and questions about images in two formats."""
    folder = tmp_path_factory.mktemp("init")
    save_checkpoint(folder / "model")
    records = json.loads(save_questions(folder, 24).read_text())
    with (folder / "messages.jsonl").open("w") as file:
        for record in records:
            question, answer = (turn["value"] for turn in record["conversations"])
            image = {"type": "image", "image": f"images/{record['image']}"}
            text = {"type": "text", "text": question.removeprefix("<image>\n")}
            turns = [
                {"role": "user", "content": [image, text]},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_config_is_written_with_what_was_answered_set_and_planned(folder, capsys):
    ended = run(capsys, init.main, "a.yaml", *ANSWERS, *SETTINGS)
    assert (ended.code, ended.err) == (0, "")
    assert "plan   a: " in ended.out
    assert ended.out.splitlines()[-1].startswith("wrote  a.yaml")
    text = Path("a.yaml").read_text()
    assert "batch.size.count: 8                           # samples" in text
    config = load("a.yaml")
    assert config.data.sources == {"chat": LlavaSource("data.json", images="images")}
    assert (config.training.steps, config.schedule.warmup) == (4, 0)  # 3 % of them, as the recipe
    assert config.optimizer.learning_rate == 1e-3
    assert config.batch.rows["llm"] == config.mesh.data * config.mesh.fsdp
    assert [config.model.llm.frozen, config.model.encoders["vision"].frozen] == [False, True]


@pytest.mark.exhaustive
def test_the_python_that_is_written_is_the_yaml(folder, capsys):
    answers = ("checkpoint=model", "data=messages.jsonl", "train=lora", "length=2epochs")
    words = (*answers, "cluster=24GBx2", "model.lora.llm.rank=8", *SETTINGS)
    for name in ("b.yaml", "b.py"):
        assert run(capsys, init.main, name, *words).code == 0
    config = load("b.yaml")
    assert load("b.py") == config
    assert config.data.sources == {"chat": MessagesSource("messages.jsonl")}
    assert (config.training.epochs, config.training.steps) == (2.0, 0)
    assert (config.mesh.memory, config.mesh.data * config.mesh.fsdp) == (24, 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("there.yaml", *ANSWERS), "there.yaml is there already; name another file"),
        (("tiny_vlm.yaml", *ANSWERS), "a config of mmjax's has this name"),
        (("new.json", *ANSWERS), "name a file that ends in .yaml"),
        (("new.yaml", *ANSWERS[1:]), "say checkpoint=...: a Hugging Face folder"),
        (("new.yaml", "checkpoint=model"), "say data=...: conversations"),
        (("new.yaml", *ANSWERS, "train=some"), "train=some; known: llm, lora, connector, all"),
        (("new.yaml", *ANSWERS, "length=long"), "length=long: write updates, such as 1000"),
        (("new.yaml", "checkpoint=tiny_vlm", "train=lora"), "tiny_vlm says what it trains"),
        (("new.yaml", *ANSWERS, "seeed=3"), "unknown key 'seeed': did you mean 'seed'?"),
        pytest.param(
            ("new.yaml", *ANSWERS, "mesh.memory=0.0001"),
            "it does not fit h100x1x2",
            marks=pytest.mark.exhaustive,
        ),
        (("new.yaml", *ANSWERS[:-1], "cluster=h10"), "there is no device 'h10': did you mean"),
    ],
)
def test_an_answer_that_is_none_is_one_line_and_writes_nothing(words, expected, folder, capsys):
    Path("there.yaml").write_text("mine")
    ended = run(capsys, init.main, *words)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert expected in ended.err
    assert Path("there.yaml").read_text() == "mine"
    assert not list(folder.glob("new.*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", ["llm", "lora", "connector", "all"])
def test_what_is_written_trains(trained, folder, capsys):
    name = f"{trained}.yaml"
    words = [*ANSWERS, "cluster=here", f"train={trained}", *SETTINGS]
    words += ["model.lora.llm.rank=8"] * (trained == "lora")
    assert run(capsys, init.main, name, *words).code == 0
    assert run(capsys, train.main, name).code == 0
    logged = (folder / "runs" / trained / "metrics.jsonl").read_text()
    assert '"step": 4' in logged
    model = load(name).model
    frozen = (model.llm.frozen and not model.lora, model.encoders["vision"].frozen)
    assert frozen == (trained == "connector", trained != "all")


@pytest.mark.exhaustive
def test_five_questions_are_asked_on_a_terminal(folder):
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "mmjax.init", "asked.yaml", "images=images"]
    process = subprocess.Popen(command, stdin=follower, stdout=subprocess.PIPE, text=True)
    os.close(follower)
    # cluster, what to train and how long are as they are proposed
    os.write(leader, b"model\ndata.json\n\n\n\n")
    out, _ = process.communicate(timeout=300)
    os.close(leader)
    assert process.returncode == 0
    assert [out.count(f"{key}: ") for key in init.QUESTIONS] == [1] * 5
    assert load("asked.yaml").training.epochs == 1.0
