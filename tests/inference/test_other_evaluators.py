"""Other evaluators score an export behind transformers' server as `mmjax.evaluate` does."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run
from llava_folder import COLOURS, save_checkpoint
from PIL import Image

from mmjax import evaluate

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        shutil.which("lmms-eval") is None,
        reason="lmms-eval is not on the PATH; install it in an environment of its own",
    ),
]

QUESTION = "What colour is the upper half?"
TASK = """
task: halves
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {table}}}}}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.chartqa_doc_to_visual
doc_to_text: !function utils.chartqa_doc_to_text
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 16, temperature: 0, do_sample: false}}
process_results: !function utils.chartqa_process_results
metric_list:
  - {{metric: relaxed_overall, aggregation: mean, higher_is_better: true}}
lmms_eval_specific_kwargs:
  default: {{pre_prompt: "", post_prompt: "\\nAnswer the question with a single word."}}
"""


def pictures(count: int) -> list[bytes]:
    """PNGs of two halves in different colours."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(count):
        halves = [list(COLOURS.values())[n] for n in rng.permutation(len(COLOURS))[:2]]
        pixels = np.repeat(np.array(halves, np.uint8)[:, None], 16, axis=1).repeat(8, axis=0)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())
    return files


def save_table(file: Path, answers: Sequence[str]) -> None:
    """A table of ChartQA's columns, as the Hub has it."""
    columns = {
        "image": [{"bytes": image, "path": ""} for image in pictures(len(answers))],
        "question": [QUESTION] * len(answers),
        "answer": answers,
        "type": ["human_test"] * len(answers),
    }
    strings = {name: {"dtype": "string", "_type": "Value"} for name in columns}
    features = {"info": {"features": strings | {"image": {"_type": "Image"}}}}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, file)


def scores_of_mmjax(table: Path, folder: Path, capsys) -> tuple[list[str], float]:
    """The answers to a table, and their score."""
    said = table.with_name("said.jsonl")
    words = [str(folder), "--benchmark", "chartqa", "--data", str(table), "--max-tokens", "16"]
    ended = run(capsys, evaluate.main, *words, "--out", str(said), "--json")
    assert ended.code == 0, ended.err
    (scores,) = json.loads(ended.out).values()
    answers = [json.loads(line)["said"] for line in said.read_text().splitlines()]
    return answers, scores["relaxed_accuracy"]


@pytest.fixture
def server(tmp_path):
    """The address of a server of a checkpoint, `tmp_path / "served"`."""
    save_checkpoint(tmp_path / "served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [program, "serve", tmp_path / "served", "--port", str(port)], stdout=log, stderr=log
        )
    address = f"http://localhost:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{address}/health")
            break
        except urllib.error.URLError:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()
            time.sleep(1)
    yield address
    process.terminate()
    process.wait()


def test_lmms_eval_gets_the_answers_and_scores_of_mmjax(server, tmp_path, capsys):
    table, task, out = tmp_path / "chart.parquet", tmp_path / "task", tmp_path / "out"
    save_table(table, ["red"] * 6)
    ours, _ = scores_of_mmjax(table, tmp_path / "served", capsys)
    save_table(table, [*ours[:2], *["red"] * 4])  # so that two of six are right
    ours, score = scores_of_mmjax(table, tmp_path / "served", capsys)
    assert score == pytest.approx(1 / 3)
    task.mkdir()
    (task / "halves.yaml").write_text(TASK.format(table=table))
    (task / "utils.py").write_text("from lmms_eval.tasks.chartqa.utils import *\n")
    model = f"model_version={tmp_path / 'served'},base_url={server}/v1,api_key=none"
    words = ["--model", "openai", "--model_args", model, "--include_path", task]
    words += ["--tasks", "halves", "--batch_size", "1", "--output_path", out, "--log_samples"]
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        ["lmms-eval", "eval", *words], env=outside, capture_output=True, text=True, check=False
    )
    files = list(out.rglob("*_samples_halves.jsonl"))
    assert len(files) == 1, ended.stdout + ended.stderr  # it ends with 0 after errors too
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    assert [line["filtered_resps"] for line in lines] == ours
    assert np.mean([line["relaxed_overall"] for line in lines]) == pytest.approx(score)
