"""A tiny LLaVA checkpoint and a LLaVA-style folder: fine-tuned, scored, exported, and asked in transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from commands import run
from decoding_reference import greedy_tokens
from llava_folder import save_checkpoint, save_questions
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmjax import evaluate, export, train
from mmjax.config import MeshConfig
from mmjax.config.loading import find_config, load
from mmjax.data.sources.opening import open_sources
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.generator import Generator
from mmjax.inference.prompts import UserPromptSource, make_prompt
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings

pytestmark = pytest.mark.exhaustive

COUNT = 200
RECIPE = (
    "training.steps=120",
    "training.precision=float32",
    "training.evaluate_every=0",
    "training.checkpoint_every=0",
    "optimizer.learning_rate=2e-3",
    "schedule.warmup=10",
    "batch.size.count=32",
    "batch.rows.llm=2",
    "batch.rows.vision=2",
    "mesh.fsdp=1",
    "device=cpu",
    "data.workers=0",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run's folder, the data's, and the exported folder."""
    place = tmp_path_factory.mktemp("llava")
    save_checkpoint(place / "checkpoint")
    data = save_questions(place / "data", COUNT)
    given = (
        f"checkpoint={place / 'checkpoint'}",
        f"data={data}",
        f"images={place / 'data' / 'images'}",
    )
    split = (
        f"validation={data}",
        f"data.sources.chat.test={data}",
        f"data.cache={place / 'cache'}",
    )
    config = load("llava_style", [*given, *split, *RECIPE, f"run={place / 'run'}"])
    train.train(config, find_config("llava_style"), devices=jax.devices()[:1])
    export.main([str(place / "run"), str(place / "served")])
    return place


def test_it_answers_at_least_nine_of_ten_of_its_own_questions(trained, capsys):
    ended = run(capsys, evaluate.main, trained / "run", "--max-tokens", "8", "--json")
    scores = json.loads(ended.out)["chat"]
    assert scores["asked"] == COUNT
    assert scores["exact_match"] >= 0.9


@pytest.fixture(scope="module")
def transformers_tokens(trained) -> dict[int, list[int]]:
    """What transformers' generation answers to each question with the exported folder, at most 8 tokens."""
    processor = AutoProcessor.from_pretrained(trained / "served")
    model = AutoModelForImageTextToText.from_pretrained(
        trained / "served", dtype=torch.float32
    ).eval()
    answers = {}
    for i, (image, question, _) in enumerate(questions(trained)):
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        inputs = processor(images=Image.open(image), text=text, return_tensors="pt")
        out = model.generate(**inputs, do_sample=False, max_new_tokens=8)
        answers[i] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return answers


def questions(trained) -> list[tuple[Path, str, str]]:
    """Image, question and answer of each training record."""
    records = json.loads((trained / "data" / "data.json").read_text())
    return [
        (
            trained / "data" / "images" / record["image"],
            record["conversations"][0]["value"].removeprefix("<image>\n"),
            record["conversations"][1]["value"],
        )
        for record in records
    ]


def test_transformers_gives_the_same_answers_token_by_token(trained, transformers_tokens):
    config = RunFolder(trained / "run").read_config()
    end = open_sources(config, "test", trained)["chat"].chat.tokenizer.ends[0]
    for i, tokens in answer_tokens(trained).items():
        there = transformers_tokens[i]
        both = min(len(tokens), len(there))
        assert there[:both] == tokens[:both]
        assert there[both - 1] == end or len(there) >= len(tokens)


def test_as_many_training_questions_are_answered_right_by_evaluate_generate_and_transformers(
    trained, transformers_tokens, capsys
):
    """The images' line break after `<image>`, the template's own and a byte-level tokenizer: one prompt everywhere."""
    wanted = questions(trained)
    evaluated = json.loads(
        run(capsys, evaluate.main, trained / "run", "--max-tokens", "8", "--json").out
    )
    served = CheckpointModel.open(trained / "served")
    chat, mesh, rules = served.chat(), make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    asked = [
        make_prompt(f"<image>\n{question}", {"image": [image.read_bytes()]})
        for image, question, _ in wanted
    ]
    model, params = served.load(mesh, rules)
    generator = Generator(model, mesh, rules, chat.tokenizer.ends, chat.decode_answer, max_tokens=8)
    prompts = UserPromptSource(asked, chat, served.config.model.encoders, served.functions())
    generated = [answer.text for answer in generator.answers(params, prompts)]
    there = [chat.decode_answer(transformers_tokens[i]) for i in range(COUNT)]
    right = [
        sum(said.strip() == answer for said, (*_, answer) in zip(of, wanted, strict=True)) / COUNT
        for of in (generated, there)
    ]
    assert evaluated["chat"]["exact_match"] == pytest.approx(right[0], abs=0.01)
    assert evaluated["chat"]["exact_match"] == pytest.approx(right[1], abs=0.01)
    assert right[0] > 0.9


def answer_tokens(trained) -> dict[int, list[int]]:
    """What the run answers to each question, in tokens, by a full forward pass for each."""
    folder = RunFolder(trained / "run")
    config = folder.read_config()
    source = open_sources(config, "test", trained)["chat"]
    model, mesh = Model.build(config.model, jnp.float32), make_mesh(MeshConfig(), jax.devices()[:1])
    shardings = parameter_shardings(model, mesh, ShardingRules())
    params = restore_parameters(
        folder.checkpoints, checkpoint_step(folder.checkpoints), model, shardings
    )
    room = max(source.answer_tokens(i) for i in range(COUNT))
    return greedy_tokens(model, params, source, range(COUNT), room)


def test_a_text_that_no_ram_holds_ends_the_run_in_a_line_that_names_it_and_what_would_fit(
    tmp_path, capsys
):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    answers = ["red"] * 20 + ["x7q " * 75_000]
    turns = [
        [{"from": "human", "value": "What?"}, {"from": "gpt", "value": answer}]
        for answer in answers
    ]
    (tmp_path / "data.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    words = [
        f"checkpoint={checkpoint}",
        f"data={tmp_path / 'data.json'}",
        f"data.cache={tmp_path / 'cache'}",
        *RECIPE,
    ]
    # All scores at once: terabytes. Blockwise attention needs 22 GB, which a machine may have.
    words += [
        "model.llm.attention=dense",
        "batch.rows.llm=1",
        "mesh.fsdp=8",
        f"run={tmp_path / 'run'}",
    ]
    ended = run(capsys, train.main, "llava_style", *words)
    assert ended.code == 2
    (line,) = (line for line in ended.err.splitlines() if line.startswith("error:"))
    assert " GB of RAM for it (mesh.memory sets another limit)" in line
    assert re.search(
        r"the longest sample, chat\[20\], has 300,\d{3} LLM tokens, the median \d\d; .* fits, with ",
        line,
    )
