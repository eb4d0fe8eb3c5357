"""`python -m mmjax.generate` as a user runs it: checkpoints, runs, exported folders, and what is said of bad input."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
import torch
from commands import TINY, media_run, run
from fine_tuning import moved_run
from llava_folder import save_checkpoint, save_questions
from PIL import Image
from started import finish, start
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmjax import export, generate
from mmjax.config import MeshConfig
from mmjax.config.loading import load
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.data.toy.digits import Strip
from mmjax.data.toy.tones import Clip
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.evaluation import evaluation_sources
from mmjax.inference.generator import Generator
from mmjax.inference.prompts import QuestionPrompts
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.run_dir import RunFolder

QUESTION = "What colour is the upper half?"
SMALL = (
    "training.precision=float32",
    "batch.rows.llm=2",
    "batch.rows.vision=2",
    "device=cpu",
    "data.workers=0",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A checkpoint, a run with adapters that began from it, and pictures of several sizes."""
    place = tmp_path_factory.mktemp("asked")
    save_checkpoint(place / "llava", seed=3)
    data = save_questions(place / "data", 4)
    given = [f"checkpoint={place / 'llava'}", f"data={data}", f"images={place / 'data' / 'images'}"]
    config = load("llava_lora", [*given, *SMALL, "model.lora.llm.rank=4", f"run={place / 'run'}"])
    moved_run(config, 0.2)
    rng = np.random.default_rng(0)
    for name, size in {"small": (9, 14), "tall": (50, 21), "wide": (16, 80)}.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(place / f"{name}.png")
    soundfile.write(place / "x.wav", rng.normal(0, 0.1, 800), 8000)
    return place


def asked(capsys, *words: object) -> dict:
    """The object of `--json`."""
    ended = run(capsys, generate.main, *words, "--json", "--max-tokens", 10)
    assert (ended.code, ended.err) == (0, "")
    return json.loads(ended.out)


def asked_there(folder: Path, images: list[Path], text: str, system: str = "") -> list[int]:
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    messages = [{"role": "system", "content": [{"type": "text", "text": system}]}] if system else []
    prompt = processor.apply_chat_template(
        [*messages, {"role": "user", "content": content}], add_generation_prompt=True
    )
    pictures = {"images": [Image.open(path) for path in images]} if images else {}
    inputs = processor(text=prompt, return_tensors="pt", **pictures)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=10)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.default_cases("images0-", "images2-Be brief.")
@pytest.mark.parametrize(
    ("images", "system"),
    [((), ""), (("tall",), ""), (("wide", "small"), "Be brief."), (("small", "small", "tall"), "")],
)
def test_a_checkpoint_answers_what_it_answers_in_transformers(place, capsys, images, system):
    paths = [place / f"{name}.png" for name in images]
    words = [word for path in paths for word in ("--image", path)]
    said = asked(capsys, place / "llava", *words, QUESTION, "--system", system)
    assert said["tokens"] == asked_there(place / "llava", paths, QUESTION, system)
    assert said["seconds"] > 0


def test_a_run_answers_what_its_exported_folder_answers_here_and_there(place, capsys):
    export.main([str(place / "run"), str(place / "served")])
    words = ["--image", place / "tall.png", QUESTION]
    here = asked(capsys, place / "run", *words)
    assert here["tokens"] == asked(capsys, place / "served", *words)["tokens"]
    assert here["tokens"] == asked_there(place / "served", [place / "tall.png"], QUESTION)
    assert here["tokens"] != asked(capsys, place / "llava", *words)["tokens"]


def test_a_seed_draws_the_same_answer_again(place, capsys):
    draw = [place / "llava", QUESTION, "--temperature", 2.0, "--top-p", 0.95, "--seed"]
    first = asked(capsys, *draw, 1)["tokens"]
    assert first == asked(capsys, *draw, 1)["tokens"]
    assert first != asked(capsys, *draw, 2)["tokens"]


def test_a_terminal_sees_the_answer_grow_to_what_a_pipe_gets(place, capsys, monkeypatch):
    words = [place / "llava", QUESTION, "--max-tokens", 10]
    piped = run(capsys, generate.main, *words)
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda _: True, raising=False)
    shown = run(capsys, generate.main, *words)
    assert shown.out == piped.out
    assert "stopped after 10 tokens" in shown.err


@pytest.mark.exhaustive
def test_a_run_of_the_embedded_data_answers_what_its_evaluation_has_it_say(runs, capsys, tmp_path):
    """The README's first run, smaller: no chat format, but an alphabet, and the embedded data's positions."""
    folder, _ = media_run(runs)
    served = CheckpointModel.open(folder)
    (source,) = evaluation_sources(served.config, ("test",), folder).values()
    # of each combination of media, a sample with words between them
    chosen: dict[tuple[type, ...], int] = {}
    for number in range(len(source)):
        recipe = source.recipe(number)
        if any(recipe.words):
            chosen.setdefault(tuple(map(type, recipe.media)), number)
    numbers = [*chosen.values()][:4]
    assert {type(item) for number in numbers for item in source.recipe(number).media} == {
        Strip,
        Clip,
    }
    mesh, rules = make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    model, params = served.load(mesh, rules)
    form = served.prompt_format
    generator = Generator(model, mesh, rules, form.ends, form.decode_answer, max_tokens=10)
    for number, wanted in zip(
        numbers, generator.answers(params, QuestionPrompts(source), numbers), strict=True
    ):
        found = asked(capsys, folder, *asked_of(source, number, tmp_path))
        assert (found["tokens"], found["answer"]) == (list(wanted.tokens), wanted.text)


def asked_of(source: EmbeddedDataset, number: int, folder: Path) -> list[object]:
    """What to say to `generate` for a sample's question, its media in files."""
    recipe = source.recipe(number)
    options, text = list[object](), ""
    for k, item in enumerate(recipe.media):
        medium, kind = source.item(number, k), "image" if isinstance(item, Strip) else "audio"
        path = folder / f"{number}-{k}.{'png' if kind == 'image' else 'wav'}"
        if kind == "image":
            Image.fromarray(medium[..., 0]).save(path)
        else:
            soundfile.write(path, medium, 4000, subtype="FLOAT")
        options += [f"--{kind}", path]
        text += f"{recipe.words[k]}<{kind}>"
    if recipe.passage:
        text = f"{recipe.words[0]}\n{recipe.passage}\n"
    return [text + recipe.asks[0].text, *options]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["What is it?"], "'W' cannot be said in this run's alphabet, ' abcdefg"),
        (["read a?", "--system", "be brief"], "knows no system messages; leave out --system"),
        (
            ["x" * 130 + "\nread a?"],
            "is longer than the 128 characters that samples of this run have there",
        ),
        (["what <image>", "--image", "{place}/small.png"], "no encoder for it (it has none)"),
    ],
)
def test_what_an_alphabet_cannot_say_is_one_line(words, message, place, capsys, tmp_path):
    (tmp_path / "config.py").write_text(Path(TINY).read_text())
    RunFolder(tmp_path).write_config(load(TINY))
    ended = run(capsys, generate.main, tmp_path, *(word.format(place=place) for word in words))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert message in ended.err


def without_template(place: Path, folder: Path) -> Path:
    shutil.copytree(place / "llava", folder)
    (folder / "chat_template.jinja").unlink()
    return folder


UNTRAINABLE = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}USER: {% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %} ASSISTANT:"
)


def test_dynamic_rope_answers_beyond_its_positions_by_a_template_that_only_asks(
    place, capsys, tmp_path
):
    """The template leaves out what the assistant says, so nothing can be trained with it."""
    folder = tmp_path / "dynamic"
    shutil.copytree(place / "llava", folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config["text_config"] |= {"max_position_embeddings": 24, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(UNTRAINABLE)
    there = asked_there(folder, [place / "tall.png"], QUESTION)
    here = asked(capsys, folder, "--image", place / "tall.png", QUESTION)["tokens"]
    assert here == there
    assert len(here) > 5


BAD = {
    "no such image": (
        ["{place}/llava", "--image", "{place}/no.png", "What?"],
        "no.png: No such file",
    ),
    "no image": (
        ["{place}/llava", "--image", "{place}/x.wav", "What?"],
        "x.wav: no image of a known format",
    ),
    "no clip": (
        ["{place}/llava", "--audio", "{place}/x.wav", "What?"],
        "no encoder for it (it has vision)",
    ),
    "an empty question": (["{place}/llava", "  "], "the question is empty"),
    "a picture and no question": (
        ["{place}/llava", "--image", "{place}/tall.png", "<image>"],
        "the question is empty",
    ),
    "a place without its image": (["{place}/llava", "<image>What?"], "1 places <image> for 0"),
    "an image too many": (
        ["{place}/llava", "--image", "{place}/tall.png", "<image><image>What?"],
        "2 places <image> for 1 file(s)",
    ),
    "no folder": (["{place}/nothing", "What?"], "is no folder"),
    "another folder": (["{place}/data", "What?"], "neither a run nor a Hugging Face checkpoint"),
    "no template": (["{bare}", "What?"], "has no chat template"),
    "too long": (["{place}/llava", "why " * 3000], "positions"),
    "a control token": (["{place}/llava", "What?</s>"], "which only the chat template may write"),
    "no tokens": (["{place}/llava", "What?", "--max-tokens", "0"], "--max-tokens=0"),
    "a mistyped change": (["{place}/llava", "What?", "trainin.precision=float32"], "training"),
    "no temperature": (["{place}/llava", "What?", "--top-k", "4"], "give a temperature"),
    "a run that knows no chats": (["{silent}", "What?"], "data.chat.folder=FOLDER"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_one_line_and_code_2(fault, place, capsys, tmp_path):
    words, message = BAD[fault]
    names = {"place": place}
    if "{bare}" in words:
        names["bare"] = without_template(place, tmp_path / "bare")
    if "{silent}" in words:
        names["silent"] = tmp_path
        RunFolder(tmp_path).write_config(load(TINY, ['data.alphabet=""']))
    ended = run(capsys, generate.main, *(word.format(**names) for word in words))
    assert ended.code == 2, ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert message in ended.err
    assert not ended.out


@pytest.mark.exhaustive
def test_a_process_of_its_own_prints_the_answer_alone(place, tmp_path, capsys):
    words = [place / "llava", "--image", place / "tall.png", QUESTION, "--max-tokens", "10"]
    ended = finish(start("mmjax.generate", *words, cwd=tmp_path))
    assert ended.code == 0
    assert ended.out == asked(capsys, *words[:4])["answer"] + "\n"
