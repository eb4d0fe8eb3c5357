"""Pairs and rollouts through gated delta nets: ten steps of Qwen3.5 are those of transformers, each answer apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llava_folder import save_tokenizer
from preferences import write_lines
from test_preferences import our_steps, samples_of, started
from tiny_run import load_steps

from mmjax.batch import Microbatch
from mmjax.config import (
    AdamW,
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    LossConfig,
    PreferenceSource,
    RolloutsSource,
    Samples,
    Schedule,
    TrainingConfig,
)
from mmjax.config.losses import Dpo, Grpo
from mmjax.hf.families import from_hf
from mmjax.runtime.state import hyperparameters

SUBJECTS = ("Birds", "Trees near a river", "Ships", "A letter to my oldest friend", "Bread")
Loss = Callable[[torch.nn.Module], torch.Tensor]


def save_model(folder: Path) -> None:
    """Write a Qwen3.5 of three delta nets and one attention layer, whose norms enlarge rounding little."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        **heads,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rms_norm_eps=1e-2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)


class Theirs:
    """The checkpoint in transformers, which reads every answer with the whole prompt before it."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.Qwen3_5ForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def log_probs(self, question: str, answer: str | Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of an answer's tokens, its end among them."""
        turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
        ids = partial(self.tokenizer.apply_chat_template, return_dict=False)
        prompt = ids(turns, add_generation_prompt=True)
        if isinstance(answer, str):
            whole = ids([*turns, {"role": "assistant", "content": answer}])
        else:
            whole = [*prompt, *answer]
        assert whole[: len(prompt)] == prompt
        tokens = torch.tensor([whole])
        logits = self.model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        begin = len(prompt)
        return logits[begin - 1 : -1].gather(-1, tokens[0, begin:, None])[:, 0]


def run_config(folder: Path, loss: LossConfig, records: list[dict[str, Any]]) -> Config:
    kind = RolloutsSource if loss.kind == "grpo" else PreferenceSource
    path = write_lines(folder / f"{loss.kind}.jsonl", records)
    return Config(
        name="delta_preferences",
        data=DataConfig(
            {"answers": kind(str(path))},
            cache=str(folder / "cache"),
            chat=ChatFormat(str(folder)),
            workers=0,
        ),
        batch=BatchConfig(Samples(len(records)), {"llm": 2}, 2),
        model=from_hf(folder),
        training=TrainingConfig(10),
        optimizer=AdamW(3e-3, 0.1, 0.9, 0.95, 1e-8),
        schedule=Schedule(3, 0.1),
        loss=loss,
    )


def torch_steps(
    theirs: Theirs, losses: Sequence[Loss], config: Config
) -> list[tuple[float, float]]:
    """Return losses and gradient norms of as many updates there; decay falls on matrices alone."""
    model = theirs.model
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) == matrices],
            "weight_decay": 0.1 * matrices,
        }
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    told = []
    for step, loss_of in enumerate(losses):
        optimizer.zero_grad()
        loss = loss_of(theirs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
        for group in optimizer.param_groups:
            group["lr"] = float(hyperparameters(config, step)["learning_rate/llm"])
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told


def pair_loss(theirs: Theirs, records: list[dict[str, Any]], batches: Sequence[Microbatch]):
    """Compute formula 7 of the DPO paper with a reference of zero."""
    numbers = samples_of(batches)
    total = torch.zeros(())
    for record in (records[n] for n in numbers):
        better, worse = (
            theirs.log_probs(record["prompt"], record[key]).sum() for key in ("chosen", "rejected")
        )
        total = total - torch.nn.functional.logsigmoid(0.3 * (better - worse))
    return total / len(numbers)


def rollout_loss(theirs: Theirs, records: list[dict[str, Any]], batches: Sequence[Microbatch]):
    """Compute GRPO's loss of answers by tokens, with ratios cut at 0.8 and 1.2."""
    total, tokens = torch.zeros(()), 0
    for record in (records[n] for n in samples_of(batches)):
        for ids, old, advantage in zip(
            record["completion_ids"], record["logprobs"], record["advantages"], strict=True
        ):
            ratio = (theirs.log_probs(record["prompt"], ids) - torch.tensor(old)).exp()
            kept = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total, tokens = total - kept.sum(), tokens + len(ids)
    return total / tokens


def compare(folder: Path, config: Config, loss: Callable[..., torch.Tensor], records) -> None:
    steps = load_steps(config, folder, 10)
    executor, state = started(config)
    losses = [partial(loss, records=records, batches=batches) for batches in steps]
    told = torch_steps(Theirs(folder), losses, config)
    reports = our_steps(config, executor, state, steps)
    ours = [(r.losses.loss.sum() / r.losses.weight.sum(), r.gradient_norm) for r in reports]
    np.testing.assert_allclose(ours, told, atol=1e-3, rtol=1e-3)
    assert told[-1][0] < told[0][0]


@pytest.mark.exhaustive
def test_ten_steps_on_packed_pairs_are_those_of_answers_apart(tmp_path):
    save_model(tmp_path)
    records = [
        {
            "prompt": f"Write about {subject}, {number + 1} lines.",
            "chosen": " ".join([f"{subject} are what I know well."] * (1 + number % 3)),
            "rejected": "No." if number % 2 else f"I will not write about {subject} today, sorry.",
        }
        for number, subject in enumerate(SUBJECTS * 2)
    ]
    config = run_config(tmp_path, Dpo(0.3, reference="none"), records)
    compare(tmp_path, config, pair_loss, records)


@pytest.mark.exhaustive
def test_ten_steps_on_packed_rollouts_are_those_of_answers_apart(tmp_path):
    save_model(tmp_path)
    theirs = Theirs(tmp_path)
    rng = np.random.default_rng(0)
    records = []
    for number, subject in enumerate(SUBJECTS * 2):
        prompt = f"Write about {subject}, {number + 1} lines."
        answers = [rng.integers(0, 250, rng.integers(3, 40)).tolist() for _ in range(4)]
        with torch.no_grad():
            old = [(theirs.log_probs(prompt, ids) + 0.1).tolist() for ids in answers]
        advantages = rng.normal(size=4)
        advantages -= advantages.mean()
        records.append(
            {
                "prompt": prompt,
                "completion_ids": answers,
                "logprobs": old,
                "advantages": advantages.tolist(),
            }
        )
    config = run_config(tmp_path, Grpo(), records)
    compare(tmp_path, config, rollout_loss, records)
