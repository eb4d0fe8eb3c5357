"""`python -m mmjax.evaluate` on questions of files: what is asked, what is left out, and what the scores are of."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from commands import run
from llava_folder import save_checkpoint, save_questions

from mmjax import evaluate, generate
from mmjax.inference.benchmarks import chosen_option
from mmjax.inference.scores import MEASURES, Scored

COUNT = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A LLaVA-style file, and the same questions with several right answers, two of them without a readable image."""
    folder = tmp_path_factory.mktemp("data")
    save_questions(folder, COUNT)
    records = json.loads((folder / "data.json").read_text())
    asked = []
    for record in records:
        question, answer = (turn["value"] for turn in record["conversations"][:2])
        asked.append(
            {"image": record["image"], "question": question, "answers": [answer, "colour"]}
        )
    whole = (folder / "images" / asked[5]["image"]).read_bytes()
    (folder / "images" / f"cut_{asked[5]['image']}").write_bytes(whole[: len(whole) - 40])
    asked[5]["image"] = f"cut_{asked[5]['image']}"
    asked[7]["image"] = "gone.jpg"
    (folder / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    return folder


def told(capsys, *words: object) -> str:
    ended = run(capsys, evaluate.main, *words)
    assert ended.code == 0, ended.err
    return ended.out


def test_a_benchmarks_table_is_asked_and_scored_by_its_own_rules(
    checkpoint, data, capsys, tmp_path
):
    """What is counted right is what the answers that are written say."""
    images = sorted((data / "images").glob("[0-9]*"))[:3]
    lines = ["index\timage\tquestion\tA\tB\tanswer"]
    for n, path in enumerate(images):
        content = base64.b64encode(path.read_bytes()).decode()
        lines.append(f"{n}\t{content}\tWhich colour?\tred\tblue\tA")
    (tmp_path / "mmbench.tsv").write_text("\n".join(lines) + "\n")
    words = (checkpoint, "--data", tmp_path / "mmbench.tsv", "--benchmark", "mmbench")
    limits = ("--max-tokens", 4, "device=cpu", "--out", tmp_path / "said.jsonl")
    (scores,) = json.loads(told(capsys, *words, *limits, "--json")).values()
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    right = [chosen_option(s["said"], {"A": "red", "B": "blue"}) == "A" for s in said]
    assert scores == {
        "asked": 3,
        "left_out": 0,
        "accuracy": pytest.approx(sum(right) / 3),
        "accuracy_once": pytest.approx(sum(right) / 3),
    }
    ended = run(capsys, evaluate.main, checkpoint, "--benchmark", "mmbench")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "its table is named with --data" in ended.err


def test_a_checkpoint_is_asked_every_question_and_scored_on_what_it_said(
    checkpoint, data, capsys, tmp_path
):
    words = (
        checkpoint,
        "--data",
        data / "data.json",
        "--images",
        data / "images",
        "--max-tokens",
        "6",
    )
    scores = json.loads(told(capsys, *words, "--json", "--out", tmp_path / "said.jsonl"))["asked"]
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in said] == [f"asked[{i}]" for i in range(COUNT)]
    assert (scores["asked"], scores["left_out"]) == (COUNT, 0)
    answers = [Scored(line["said"], tuple(line["right"])) for line in said]
    for measure in ("exact_match", "anls", "vqa_accuracy"):
        assert scores[measure] == pytest.approx(MEASURES[measure](answers))
    records = json.loads((data / "data.json").read_text())
    for i in (0, 11):
        image = data / "images" / records[i]["image"]
        question = records[i]["conversations"][0]["value"]
        alone = run(
            capsys,
            generate.main,
            checkpoint,
            question,
            "--image",
            image,
            "--max-tokens",
            "6",
            "--json",
        )
        assert json.loads(alone.out)["answer"].strip() == said[i]["said"].strip()
        assert said[i]["right"] == [records[i]["conversations"][1]["value"]]


def test_what_cannot_be_read_is_left_out_and_named_before_and_after_decoding(
    checkpoint, data, capsys, tmp_path
):
    words = (
        checkpoint,
        "--data",
        data / "asked.jsonl",
        "--images",
        data / "images",
        "--max-tokens",
        "3",
    )
    out = told(capsys, *words, "--measures", "vqa_accuracy,wer", "--out", tmp_path / "said.jsonl")
    assert [line.split()[:3] for line in out.splitlines() if line.split()[:1] == ["asked"]] == [
        ["asked", "18", "2"]
    ]
    assert "vqa_accuracy" in out
    assert "exact_match" not in out
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    left = {line["sample"]: line["left_out"] for line in said if "left_out" in line}
    assert set(left) == {"asked[5]", "asked[7]"}
    assert "gone.jpg is missing" in left["asked[7]"]
    assert "trunc" in left["asked[5]"] or "cut" in left["asked[5]"]
    assert "left out asked[7]: " in out
    assert all(line["right"][1] == "colour" for line in said if "right" in line)


def test_parquet_and_a_limit(checkpoint, data, capsys, tmp_path):
    records = [json.loads(line) for line in (data / "asked.jsonl").read_text().splitlines()]
    images = [
        {"bytes": (data / "images" / r["image"]).read_bytes(), "path": None} for r in records[:5]
    ]
    columns = {
        "question": [r["question"].replace("<image>", "").strip() for r in records[:5]],
        "image": images,
    }
    table = pyarrow.table(columns | {"answers": [r["answers"] for r in records[:5]]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    words = (
        checkpoint,
        "--data",
        tmp_path / "d.parquet",
        "--max-tokens",
        "3",
        "--limit",
        "4",
        "--json",
    )
    scores = json.loads(told(capsys, *words))["asked"]
    assert (scores["asked"], scores["left_out"]) == (4, 0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--data", "gone.json"], "--data: gone.json is missing"),
        ([], "is a checkpoint, which has no data of its own; name questions with --data"),
        (
            ["--data", "other.jsonl"],
            "conversations, messages, audio_filepath, question; name what it is",
        ),
        (
            ["--data", "{data}", "--measures", "bleu"],
            "there is no 'bleu'; known are exact_match, anls",
        ),
        (
            ["--data", "{data}", "--swap", "vision"],
            "--swap goes with a run's embedded questions alone",
        ),
        (
            ["--data", "{data}", "--log-probs", "out.jsonl"],
            "first record has no chosen and rejected, and no completion and label, of which --log-probs",
        ),
        (["--data", "{data}", "--limit", "0"], "--max-tokens and --limit are 1 or more"),
        (
            ["--data", "open.jsonl"],
            "none of 1 records can be asked; the first, asked[0]: open.jsonl:1: it does not end",
        ),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    words, error, checkpoint, data, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("other.jsonl").write_text('{"prompt": "?"}\n')
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}] * 2
    Path("open.jsonl").write_text(json.dumps({"messages": turns[:3]}) + "\n")
    ended = run(
        capsys, evaluate.main, checkpoint, *(word.format(data=data / "data.json") for word in words)
    )
    assert ended.code == 2
    assert error in ended.err
    assert ended.err.count("\n") == 1
