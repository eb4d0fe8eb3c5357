"""Pairs and rollouts through gated delta nets: ten steps of Qwen3.5 are those of transformers, answer by answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import QWEN2_VL, QWEN_VL, byte_level, save
from llava_folder import save_questions, save_tokenizer
from PIL import Image
from preferences import run_config, torch_steps, write_lines
from test_preferences import our_steps, samples_of, started
from tiny_run import load_steps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.batch import Microbatch
from mmjax.config.losses import Dpo, Grpo, LossConfig
from mmjax.planning.flops import model_flops
from mmjax.planning.work import useful_work

SUBJECTS = ("Birds", "Trees near a river", "Ships", "A letter to my oldest friend", "Bread")


SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-2,  # so that norms enlarge rounding little
}
IMAGE = "<|image_pad|>"
PREPARATION = {
    "image_mean": [0.5] * 3,
    "image_std": [0.25] * 3,
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}


def save_model(folder: Path, layer_types: list[str] | None = None) -> None:
    """Write a Qwen3.5, by default of three delta nets and one attention layer."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        layer_types=layer_types,
        **SIZES,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)


def save_vision_model(folder: Path) -> None:
    """Write the same with a tower for images."""
    backend = byte_level(QWEN_VL)
    token = backend.token_to_id
    sections = {
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    text = SIZES | {
        "vocab_size": backend.get_vocab_size(),
        "eos_token_id": token("<|im_end|>"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | sections,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_heads": 4,
        "patch_size": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 36,
    }
    ids = {f"{name}_token_id": token(f"<|{name}_pad|>") for name in ("image", "video")}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    save(folder, backend, QWEN2_VL, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind | PREPARATION))


def read_model(folder: Path) -> torch.nn.Module:
    whole = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = (
        transformers.Qwen3_5ForConditionalGeneration if whole else transformers.Qwen3_5ForCausalLM
    )
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def log_probs(
    model: torch.nn.Module, folder: Path, record: dict[str, Any], answer: str | Sequence[int]
) -> torch.Tensor:
    """Return the log-probabilities of an answer's tokens, its end among them, behind its own prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs: dict[str, torch.Tensor] = {}
    image_tokens = 0
    if "images" in record:
        (path,) = record["images"]
        image = Image.open(folder.parent / "data" / "images" / path)
        inputs = dict(Qwen2VLImageProcessorPil(**PREPARATION)([image], return_tensors="pt"))
        image_tokens = int(inputs["image_grid_thw"].prod()) // PREPARATION["merge_size"] ** 2

    def ids(turns: list[dict[str, Any]], **options: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **options)
        text = text.replace(IMAGE, IMAGE * image_tokens)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    question = [{"type": "image"}] * bool(inputs) + [{"type": "text", "text": record["prompt"]}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
    prompt = ids(turns, add_generation_prompt=True)
    answered = [*turns, {"role": "assistant", "content": answer}]
    if isinstance(answer, str):
        whole = ids(answered)
        # A template may write a line break behind an answer's end, which is not trained.
        while whole[-1] != tokenizer.eos_token_id:
            whole.pop()
    else:
        whole = [*prompt, *answer]
    assert whole[: len(prompt)] == prompt
    tokens = torch.tensor([whole])
    if inputs:
        inputs["mm_token_type_ids"] = (tokens == tokenizer.convert_tokens_to_ids(IMAGE)).int()
    logits = model(input_ids=tokens, **inputs, use_cache=False).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(-1, tokens[0, len(prompt) :, None])[:, 0]


Records = list[dict[str, Any]]


def pair_loss(
    model: torch.nn.Module, folder: Path, records: Records, batches: Sequence[Microbatch]
) -> torch.Tensor:
    """Compute formula 7 of the DPO paper with a reference of zero."""
    numbers = samples_of(batches)
    total = torch.zeros(())
    for record in (records[n] for n in numbers):
        better, worse = (
            log_probs(model, folder, record, record[key]).sum() for key in ("chosen", "rejected")
        )
        total = total - torch.nn.functional.logsigmoid(0.3 * (better - worse))
    return total / len(numbers)


def rollout_loss(
    model: torch.nn.Module, folder: Path, records: Records, batches: Sequence[Microbatch]
) -> torch.Tensor:
    """Compute GRPO's loss of answers by tokens, with ratios cut at 0.8 and 1.2."""
    total, tokens = torch.zeros(()), 0
    for record in (records[n] for n in samples_of(batches)):
        for ids, old, advantage in zip(
            record["completion_ids"], record["logprobs"], record["advantages"], strict=True
        ):
            difference = log_probs(model, folder, record, ids) - torch.tensor(old)
            ratio = difference.exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total, tokens = total - surrogate.sum(), tokens + len(ids)
    return total / tokens


def compare(
    place: Path, loss: LossConfig, loss_there: Callable[..., torch.Tensor], records: Records
) -> None:
    write_lines(place / "answers.jsonl", records)
    config = run_config(place, loss, "answers.jsonl")
    steps = load_steps(config, place, 10)
    executor, state = started(config)
    folder = place / "checkpoint"
    losses = [
        partial(loss_there, folder=folder, records=records, batches=batches) for batches in steps
    ]
    told = torch_steps(read_model(folder), losses, config)
    reports = our_steps(config, executor, state, steps)
    ours = [(r.losses.loss.sum() / r.losses.weight.sum(), r.gradient_norm) for r in reports]
    np.testing.assert_allclose(ours, told, atol=1e-3, rtol=1e-3)
    assert told[-1][0] < told[0][0]


def prompts_of(place: Path, images: bool) -> Records:
    """Write a checkpoint, of a model that sees or one that does not, and return ten prompts for it."""
    prompts: Records = [
        {"prompt": f"Write about {subject}, {number + 1} lines."}
        for number, subject in enumerate(SUBJECTS * 2)
    ]
    if not images:
        save_model(place / "checkpoint")
        return prompts
    save_vision_model(place / "checkpoint")
    questions = json.loads(save_questions(place / "data", len(prompts)).read_text())
    return [
        prompt | {"images": [question["image"]]}
        for prompt, question in zip(prompts, questions, strict=True)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_ten_steps_on_packed_pairs_are_those_of_answers_apart(images, tmp_path):
    records = [
        prompt
        | {
            "chosen": " ".join([f"{subject} are what I know well."] * (1 + number % 3)),
            "rejected": "No." if number % 2 else f"I will not write about {subject} today, sorry.",
        }
        for number, (prompt, subject) in enumerate(
            zip(prompts_of(tmp_path, images), SUBJECTS * 2, strict=True)
        )
    ]
    compare(tmp_path, Dpo(0.3, reference="none"), pair_loss, records)


@pytest.mark.exhaustive
def test_a_pair_takes_the_work_of_one_prompt_and_two_answers(tmp_path):
    per_token = []
    for sentences in (1, 9):
        place = tmp_path / str(sentences)
        # Of delta nets alone, whose work is by token.
        save_model(place / "checkpoint", ["linear_attention"] * 4)
        prompt = " ".join(["Write about ships."] * sentences)
        record = {"prompt": prompt, "chosen": "They sail.", "rejected": "No."}
        write_lines(place / "answers.jsonl", [record] * 2)
        config = run_config(place, Dpo(0.3, reference="none"), "answers.jsonl")
        flops = tokens = 0
        for batch in load_steps(config, place, 1)[0]:
            work = useful_work(config.model, batch.text, batch.items)
            flops += model_flops(config.model, work, frozenset())["llm"].forward
            tokens += int((batch.text.sample >= 0).sum())
        prompts, answers = lengths_of(place / "checkpoint", record)
        # The prompt's last token, which predicts the first of an answer, begins both.
        assert tokens == 2 * (prompts + 1 + answers)
        per_token.append(flops / tokens)
    np.testing.assert_allclose(*per_token, rtol=1e-12)


def lengths_of(folder: Path, record: dict[str, str]) -> tuple[int, int]:
    """Count the tokens of the prompt of a pair, and of both answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = partial(tokenizer.apply_chat_template, return_dict=False)
    turns = [{"role": "user", "content": record["prompt"]}]
    prompt = len(ids(turns, add_generation_prompt=True))
    answered = (
        [*turns, {"role": "assistant", "content": record[key]}] for key in ("chosen", "rejected")
    )
    return prompt, sum(len(ids(turns)) - prompt for turns in answered)


@pytest.mark.exhaustive
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_ten_steps_on_packed_rollouts_are_those_of_answers_apart(images, tmp_path):
    prompts = prompts_of(tmp_path, images)
    folder = tmp_path / "checkpoint"
    model = read_model(folder)
    rng = np.random.default_rng(0)
    records = []
    for prompt in prompts:
        answers = [rng.integers(0, 250, rng.integers(3, 40)).tolist() for _ in range(4)]
        with torch.no_grad():
            old = [(log_probs(model, folder, prompt, ids) + 0.1).tolist() for ids in answers]
        advantages = rng.normal(size=4)
        advantages -= advantages.mean()
        rollouts = {
            "completion_ids": answers,
            "logprobs": old,
            "advantages": advantages.tolist(),
        }
        records.append(prompt | rollouts)
    compare(tmp_path, Grpo(), rollout_loss, records)
