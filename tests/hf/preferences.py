"""A tiny LLaVA, pairs and rollouts of answers about its images, and each answer's log-probabilities in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llava_folder import COLOURS, save_checkpoint, save_questions
from parity import adamw_there
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor

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
from mmjax.hf.families import from_hf
from mmjax.runtime.state import hyperparameters

ANSWERS = {colour: f"It is {colour}{', quite so' * (len(colour) % 2)}." for colour in COLOURS}


@dataclass(frozen=True)
class Asked:
    """A question about an image, with the right answer and a wrong one."""

    image: str
    question: str
    chosen: str
    rejected: str


def save_pairs(place: Path, count: int = 12, window: int = 0) -> list[Asked]:
    """A checkpoint, images, and `pairs.jsonl` in TRL's format: half of them conversational, half plain."""
    save_checkpoint(place / "checkpoint", window=window)
    records = json.loads(save_questions(place / "data", count).read_text())
    rng = np.random.default_rng(1)
    asked, lines = [], []
    for number, record in enumerate(records):
        right = record["conversations"][1]["value"]
        wrong = rng.choice([colour for colour in COLOURS if colour != right])
        question = record["conversations"][0]["value"].removeprefix("<image>\n")
        one = Asked(
            str(place / "data" / "images" / record["image"]),
            question,
            ANSWERS[right],
            ANSWERS[wrong],
        )
        pair: dict[str, Any] = {"prompt": question, "chosen": one.chosen, "rejected": one.rejected}
        if number % 2:
            pair = {"prompt": [{"role": "user", "content": question}]} | {
                key: [{"role": "assistant", "content": pair[key]}] for key in ("chosen", "rejected")
            }
        asked.append(one)
        lines.append(pair | {"images": [record["image"]]})
    write_lines(place / "pairs.jsonl", lines)
    return asked


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_config(place: Path, loss: LossConfig, name: str = "pairs.jsonl", **model: Any) -> Config:
    """Ten steps of all samples in two microbatches."""
    kind = RolloutsSource if loss.kind == "grpo" else PreferenceSource
    images = place / "data" / "images"
    source = kind(str(place / name), images=str(images) if images.exists() else "")
    count = len((place / name).read_text().splitlines())
    chat = ChatFormat(str(place / "checkpoint"))
    data = DataConfig({"pairs": source}, cache=str(place / "cache"), chat=chat, workers=0)
    read = from_hf(place / "checkpoint", **model)
    return Config(
        name="preferences",
        data=data,
        batch=BatchConfig(Samples(count), dict.fromkeys(read.towers, 2), 2),
        model=read,
        training=TrainingConfig(10),
        optimizer=AdamW(3e-3, 0.1, 0.9, 0.95, 1e-8),
        schedule=Schedule(3, 0.1),
        loss=loss,
    )


def torch_steps(
    model: torch.nn.Module,
    losses: Sequence[Callable[[torch.nn.Module], torch.Tensor]],
    config: Config,
) -> list[tuple[float, float]]:
    """Losses and gradient norms of as many updates there; decay falls on matrices alone."""
    optimizer = adamw_there(model)
    told = []
    for step, loss_of in enumerate(losses):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
        for group in optimizer.param_groups:
            group["lr"] = float(hyperparameters(config, step)["learning_rate/llm"])
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told


def save_judged(place: Path, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Write `judged.jsonl`: of every question one of its answers, and whether it is right; return the records."""
    lines = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    judged = []
    for number, (line, one) in enumerate(zip(lines, asked, strict=True)):
        good = number % 3 != 1
        answer = one.chosen if good else one.rejected
        judged.append(
            {"prompt": one.question, "completion": answer, "label": good, "images": line["images"]}
        )
    write_lines(place / "judged.jsonl", judged)
    return judged


class Theirs:
    """The checkpoint in transformers, which reads every answer with the whole prompt before it."""

    def __init__(self, folder: Path, model: torch.nn.Module | None = None) -> None:
        """model: these weights instead of the checkpoint's."""
        self.model = (
            model
            or LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        )
        self.processor = LlavaProcessor.from_pretrained(folder)

    def log_probs(self, image: str, question: str, answer: str | Sequence[int]) -> torch.Tensor:
        """Log-probabilities of an answer's tokens, its end among them; an answer is a text, or its tokens."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        prompt = self._inputs(image, turns, add_generation_prompt=True)
        if isinstance(answer, str):
            whole = self._inputs(image, [*turns, {"role": "assistant", "content": answer}])
        else:
            ids = torch.cat([prompt["input_ids"], torch.tensor([list(answer)])], dim=1)
            whole = prompt | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        begin = prompt["input_ids"].shape[1]
        ids = whole["input_ids"][0]
        assert ids[:begin].tolist() == prompt["input_ids"][0].tolist()
        dtype = next(self.model.parameters()).dtype
        whole["pixel_values"] = whole["pixel_values"].to(dtype)
        logits = self.model(**whole, use_cache=False).logits[0].log_softmax(-1)
        return logits[begin - 1 : -1].gather(-1, ids[begin:, None])[:, 0]

    def _inputs(self, image: str, turns: Sequence[Any], **options: Any) -> dict[str, torch.Tensor]:
        text = self.processor.apply_chat_template(list(turns), **options)
        return dict(self.processor(images=Image.open(image), text=text, return_tensors="pt"))


def save_log_probs(place: Path, asked: Sequence[Asked], name: str) -> list[dict[str, Any]]:
    """Write the pairs with the checkpoint's own log-probabilities of both answers; return what was written."""
    theirs = Theirs(place / "checkpoint")
    lines = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
    with torch.no_grad():
        for line, one in zip(lines, asked, strict=True):
            for answer in ("chosen", "rejected"):
                said = theirs.log_probs(one.image, one.question, getattr(one, answer))
                line[f"ref_{answer}_logps"] = said.sum().item()
    write_lines(place / name, lines)
    return lines
