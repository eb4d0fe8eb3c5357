"""Preferences and rewards of answers that share a prompt and an image, against transformers, every answer apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from parity import compare_gradients
from preferences import Asked, Theirs, run_config, save_pairs, write_lines
from tiny_run import gradients, load_steps, make_executor

from mmjax.batch import Microbatch
from mmjax.config import Config, Dpo, MeshConfig
from mmjax.runtime.state import hyperparameters, parameter_shardings
from mmjax.runtime.step import Executor
from mmjax.runtime.weights import load_pretrained

ONE = MeshConfig(1)
BETA = 0.3

Loss = Callable[[torch.nn.Module], torch.Tensor]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, list[Asked]]:
    """The checkpoint and its pairs, and the same with the checkpoint's own log-probabilities of every answer."""
    folder = tmp_path_factory.mktemp("preferences")
    asked = save_pairs(folder)
    theirs = Theirs(folder / "checkpoint")
    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    with torch.no_grad():
        for line, one in zip(lines, asked, strict=True):
            for answer in ("chosen", "rejected"):
                said = theirs.log_probs(one.image, one.question, getattr(one, answer))
                # Off the policy's own, so that the first loss is not that of equal models.
                line[f"ref_{answer}_logps"] = said.sum().item() + (0.5 if answer == "chosen" else -0.7)
    write_lines(folder / "stored.jsonl", lines)
    return folder, asked


def started(config: Config, mesh: MeshConfig = ONE, accumulates: bool = True) -> tuple[Executor, Any]:
    """The programs of a config and the state of step 0."""
    executor = make_executor(config, mesh, accumulates)
    given = load_pretrained(executor.model, parameter_shardings(executor.model, executor.mesh, executor.rules))
    return executor, executor.init(jax.random.key(0), given)


def torch_steps(place: Path, losses: Sequence[Loss], config: Config) -> list[tuple[float, float]]:
    """Losses and gradient norms of as many updates there; decay falls on matrices alone."""
    model = Theirs(place / "checkpoint").model
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices], "weight_decay": 0.1 * matrices}
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    told = []
    for step, loss_of in enumerate(losses):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
        for group in optimizer.param_groups:
            group["lr"] = float(hyperparameters(config, ["llm"], step)["learning_rate/llm"])
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told


def our_steps(config: Config, executor: Executor, state: Any, steps: Sequence[Sequence[Microbatch]]) -> list[Any]:
    """The reports of one update per step, on the host. `state` is donated."""
    accumulated = executor.zeros()
    reports = []
    for step, batches in enumerate(steps):
        hyper = hyperparameters(config, executor.modules, step)
        put = [executor.put(batch) for batch in batches]
        state, accumulated, report = executor.step(state, accumulated, put, hyper)
        reports.append(jax.device_get(report))
    return reports


def samples_of(batches: Sequence[Microbatch]) -> list[int]:
    return sorted({int(owner) for batch in batches for owner in np.unique(batch.text.owner) if owner >= 0})


def loss_there(
    model: torch.nn.Module, place: tuple[Path, list[Asked]], batches: Sequence[Microbatch], loss: Dpo
) -> torch.Tensor:
    """Formula 7 of the DPO paper over the pairs of these microbatches, each answer with a prompt of its own."""
    folder, asked = place
    theirs, samples = Theirs(folder / "checkpoint", model), samples_of(batches)
    lines = [json.loads(line) for line in (folder / "stored.jsonl").read_text().splitlines()]
    total = torch.zeros(())
    for number in samples:
        ratios = []
        for answer in ("chosen", "rejected"):
            said = theirs.log_probs(asked[number].image, asked[number].question, getattr(asked[number], answer))
            reference = lines[number][f"ref_{answer}_logps"] if loss.reference == "stored" else 0.0
            ratio = said.sum() - reference
            ratios.append(ratio / len(said) if loss.loss_type == "sigmoid_norm" else ratio)
        total = total - torch.nn.functional.logsigmoid(loss.beta * (ratios[0] - ratios[1]))
    return total / len(samples)


@pytest.mark.parametrize(
    "loss",
    [
        Dpo(BETA, reference="stored"),
        pytest.param(Dpo(BETA, reference="none"), marks=pytest.mark.exhaustive),
        pytest.param(Dpo(2.0, "sigmoid_norm", "stored"), marks=pytest.mark.exhaustive),
    ],
    ids=lambda loss: f"{loss.loss_type}, reference {loss.reference}",
)
def test_ten_steps_on_packed_pairs_are_those_of_answers_apart(place, tmp_path, loss):
    config = run_config(place[0], loss, "stored.jsonl")
    steps = load_steps(config, tmp_path, 10)
    assert all(len(batches) == 2 for batches in steps)
    executor, state = started(config)
    first = gradients(executor, state, steps[0])
    theirs = Theirs(place[0] / "checkpoint")
    loss_there(theirs.model, place, steps[0], loss).backward()
    compare_gradients(
        executor.model, first.gradients, theirs.model, lambda model: loss_there(model, place, steps[0], loss)
    )
    told = torch_steps(place[0], [partial(loss_there, place=place, batches=b, loss=loss) for b in steps], config)
    reports = our_steps(config, executor, state, steps)
    ours = [(r.loss.sum() / r.weight.sum(), r.gradient_norm) for r in reports]
    np.testing.assert_allclose(ours, told, atol=1e-3, rtol=1e-3)
    assert told[-1][0] < 0.9 * told[0][0]
    margins = [float(r.measures["rewards/margins"] / r.weight.sum()) for r in reports]
    assert margins[-1] > margins[0]
