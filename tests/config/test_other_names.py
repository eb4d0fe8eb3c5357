"""Settings as users of other stacks write them are answered with mmjax's own spelling, in one line."""

from __future__ import annotations

import argparse
import json
import re

import pytest
from commands import TINY, run

from mmjax import generate, index, plan, train
from mmjax.config.codec import key_of
from mmjax.config.loading import load
from mmjax.config.other_names import OTHER_NAMES, SETTINGS, name_here, parse_words
from mmjax.errors import UserError

LLM = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 304,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
LLAVA = {
    "model_type": "llava",
    "text_config": LLM,
    "vision_config": TOWER,
    "image_token_index": 303,
}
# A value for what stands in place of one.
VALUES = {
    "N": "2",
    "F": "0.5",
    "R": "0.1",
    "W": "2.0",
    "KIND": "adamw",
    "PROJECT": "p",
    "FILE": "f",
    "PATTERNS": "llm.*",
}
TEXT = ("checkpoint", "data", "images", "validation", "init_from", "run", "name", "device")


def message(*words: str) -> str:
    with pytest.raises(UserError) as raised:
        load(*words[:1], words[1:])
    assert "\n" not in str(raised.value)
    return str(raised.value)


def said_of(words: list[str]) -> str:
    """What is wrong with these words of the config llava_lora, if anything."""
    try:
        load("llava_lora", words)
    except UserError as error:
        return str(error)
    return ""


def test_every_key_that_a_name_is_answered_with_is_there(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    for spelling in {spelling for spelling, _, _ in SETTINGS} - {""}:
        key, _, value = spelling.partition("=")
        given = {"checkpoint": tmp_path, "data": "questions.json"}
        if key not in given:
            text = (
                "true"
                if key.endswith(".frozen")
                else "cpu"
                if key in TEXT
                else VALUES.get(value, value)
            )
            given[key.replace("NAME", "chat")] = "1" if text == "{}" else text
        said = said_of([f"{key}={text}" for key, text in given.items()])
        # A value may not go with the rest of the config; the key must be there, and take such a
        # value.
        assert "unknown key" not in said or "say loss=dpo first" in said, spelling
        assert f"{key}: got" not in said, spelling


def test_a_name_of_another_stack_is_answered_alike_bare_and_in_any_section():
    for name, (spelling, about) in OTHER_NAMES.items():
        for key in (
            name,
            f"training.{name}",
            f"nothing.at_all.{name}",
            name.upper(),
            name.replace("_", "-"),
        ):
            assert (key_of(spelling) or about) in name_here(key, "7")
    assert message("tiny_omni", "gradient_accumulation_steps=4").startswith(
        "unknown key 'gradient_accumulation_steps': here it is batch.microbatches=4 ("
    )
    assert name_here("training.steps", "7") == name_here("no_such_thing", "7") == ""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("lr=1e-4",), "here it is optimizer.learning_rate=1e-4"),
        (("optimizer.lr=1e-4",), "here it is optimizer.learning_rate=1e-4"),
        (("optimizer.modules.llm.lr=1e-4",), "here it is optimizer.modules.llm.learning_rate=1e-4"),
        (("--learning_rate", "1e-4"), "here it is optimizer.learning_rate=1e-4"),
        (("--learning-rate=1e-4",), "here it is optimizer.learning_rate=1e-4"),
        (("--training.steps",), "has no value as a setting; write --training.steps=VALUE"),
        (("--training.steps", "seed=3"), "has no value as a setting; write --training.steps=VALUE"),
        (("--model.llm.frozen", "--seed", "3"), "write --model.llm.frozen=VALUE"),
        (("--training.stps", "10"), "unknown key 'training.stps': did you mean 'training.steps'?"),
        (("--init-from", "runs/a"), "unknown key 'init-from': did you mean 'init_from'?"),
        (("--optimizer.learning-rate=1e-4",), "here it is optimizer.learning_rate=1e-4"),
        (("--nonsense", "3"), "unknown key 'nonsense'"),
        (("--training.max_steps=10",), "here it is training.steps=10"),
        (("--bf16",), "here it is training.precision=bfloat16"),
        (("--bf16", "training.steps=3"), "here it is training.precision=bfloat16"),
        (
            ("--model_name_or_path", "Qwen/Qwen2.5-VL-3B-Instruct"),
            "here it is checkpoint=Qwen/Qwen2.5-VL-3B-Instruct",
        ),
        (("--per_device_train_batch_size", "4"), "here it is batch.size.count=N"),
        (("--report_to", "wandb"), "here it is training.wandb=PROJECT"),
        (("--freeze_vision_tower", "false"), "here it is model.encoders.vision.frozen=false"),
        (("--resum",), "did you mean --resume?"),
        (("--nonsense",), "is none of the command's options"),
        (("-nonsense",), "-nonsense is no option; there are --"),
        (("-lr", "3"), "here it is optimizer.learning_rate=3"),
    ],
)
def test_a_command_answers_other_stacks_options_in_one_line(words, answer, capsys):
    for main in (train.main, plan.main, index.main)[: 3 if "resum" not in words[0] else 1]:
        ended = run(capsys, main, TINY, *words)
        assert ended.code == 2
        assert re.fullmatch(r"error: .*\n", ended.err), ended.err
        assert answer in ended.err


SETTINGS_OF_ONE_RUN = (
    "seed=3 mesh.fsdp=-1 optimizer=adamw optimizer.b2=0.5 data.workers=0 name=mine"
)


@pytest.mark.parametrize("form", ["--{}={}", "--{} {}", "mixed"])
def test_a_setting_is_written_as_on_other_command_lines_in_any_place(form, capsys):
    pairs = [word.split("=") for word in SETTINGS_OF_ONE_RUN.split()]
    forms = ["{}={}", "--{} {}", "--{}={}"] * 2 if form == "mixed" else [form] * len(pairs)
    words = " ".join(text.format(*pair) for text, pair in zip(forms, pairs, strict=True)).split()
    expected = run(capsys, train.main, "tiny_vlm", *SETTINGS_OF_ONE_RUN.split(), "--show")
    assert "= mine" in expected.out
    for line in (["tiny_vlm", *words, "--show"], ["--show", *words, "tiny_vlm"]):
        assert run(capsys, train.main, *line).out == expected.out


def test_settings_end_the_values_of_an_option_and_take_none_of_its_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--lengths", nargs="+")
    parser.add_argument("--data")
    line = "--lengths a b --seed 3 x --data f --data.workers 0 --checkpoint c -- --d"
    args = parse_words(parser, line.split())
    assert args.lengths == ["a", "b"]
    assert args.words == ["seed=3", "x", "data.workers=0", "checkpoint=c", "--d"]
    assert args.data == "f"


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("units.llm.memory=40", "it is of all devices: mesh.memory"),
        ("units.llm.ranks_per_node=2", "units are placed in the order of the config; leave it out"),
        ("mesh.pipeline=2", "no key of the mesh; units have it: units.llm.pipeline"),
        ("mesh.virtual=2", "no key of the mesh; units have it: units.llm.virtual"),
    ],
)
def test_what_only_units_or_only_the_mesh_have_is_said_of_the_other(word, answer):
    assert message("tiny_omni", word).startswith(f"unknown key '{key_of(word)}': ")
    assert answer in message("tiny_omni", word)


@pytest.mark.parametrize("words", [("run",), ("run", ""), ("run", "device=cpu")])
def test_generate_without_a_question_asks_for_one_in_one_line(words, capsys):
    ended = run(capsys, generate.main, *words)
    assert ended.code == 2
    assert ended.err.startswith(
        'error: there is no question; put one behind the model: python -m mmjax.generate run "'
    )
    assert ended.err.count("\n") == 1
