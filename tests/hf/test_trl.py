"""DPO, KTO and ORPO on packed answers of a tiny LLaVA are those of TRL; runs where there is TRL (`pip install trl`)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from preferences import (
    Asked,
    Theirs,
    run_config,
    save_judged,
    save_log_probs,
    save_pairs,
    write_lines,
)
from test_preferences import our_steps, samples_of, started
from tiny_run import load_steps

from mmjax.batch import TextBatch
from mmjax.config import BatchConfig, Config, Samples
from mmjax.config.losses import Dpo, Kto, Orpo
from mmjax.losses import orpo
from mmjax.losses.dpo import CHOSEN, REJECTED
from mmjax.losses.objective import mean_measures
from mmjax.runtime.state import hyperparameters

pytestmark = pytest.mark.exhaustive

STEPS = 10


def mean_of(report: Any, name: str) -> float:
    """What a step reports by the name that TRL has for it."""
    if name == "grad_norm":
        return float(report.gradient_norm)
    return float(
        (report.losses.loss if name == "loss" else report.losses.measures[name]).sum()
        / report.losses.weight.sum()
    )


def there(theirs: Theirs, config: Config) -> tuple[Any, Any, tuple[Any, Any]]:
    """The processor and model as TRL takes them, and the optimizer of a config with its schedule."""
    # TRL tokenizes what a template writes without special tokens; transformers' processors put one
    # before LLaVA's.
    processor = theirs.processor
    processor.chat_template = processor.tokenizer.bos_token + processor.chat_template
    model = theirs.model
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) == matrices],
            "weight_decay": 0.1 * matrices,
        }
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, 1.0, betas=(0.9, 0.95), eps=1e-8)
    rates = [float(hyperparameters(config, step)["learning_rate/llm"]) for step in range(STEPS)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rates[min(step, STEPS - 1)]
    )
    return processor, model, (optimizer, schedule)


def options(config: Config, count: int) -> dict[str, Any]:
    """What TRL's trainers are told for steps of `count` samples, one after the other."""
    return {
        "per_device_train_batch_size": count,
        "train_sampling_strategy": "sequential",
        "max_steps": STEPS,
        "max_grad_norm": config.training.clip,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }


@pytest.mark.parametrize(
    "loss",
    [Dpo(0.3, "sigmoid", "stored"), Dpo(2.0, "sigmoid_norm", "stored")],
    ids=lambda loss: loss.loss_type,
)
def test_ten_steps_of_dpo_are_those_of_trl(tmp_path: Path, loss: Dpo) -> None:
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    asked = save_pairs(tmp_path)
    theirs = Theirs(tmp_path / "checkpoint")
    save_log_probs(tmp_path, asked, "stored.jsonl")
    config = run_config(tmp_path, loss, "stored.jsonl")
    steps = load_steps(config, tmp_path, STEPS)
    executor, state = started(config)
    ours = our_steps(config, executor, state, steps)

    pairs = [
        {
            "images": [Image.open(one.image)],
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": one.question}],
                }
            ],
            "chosen": [{"role": "assistant", "content": one.chosen}],
            "rejected": [{"role": "assistant", "content": one.rejected}],
        }
        for one in asked
    ]
    numbers = [samples_of(batches) for batches in steps]
    (count,) = {len(step) for step in numbers}
    processor, model, optimizers = there(theirs, config)
    arguments = trl.DPOConfig(
        str(tmp_path / "trl"),
        beta=loss.beta,
        loss_type=[loss.loss_type],
        max_length=None,
        **options(config, count),
    )
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(
            [pairs[number] for step in numbers for number in step]
        ),
        processing_class=processor,
        optimizers=optimizers,
    )
    trainer.train()
    told = [record for record in trainer.state.log_history if "loss" in record]
    for name in ("loss", "logps/chosen", "logps/rejected", "rewards/margins", "grad_norm"):
        found, wanted = (
            [mean_of(report, name) for report in ours],
            [record[name] for record in told],
        )
        # Rewards are differences of sums, and AdamW makes of their rounding other updates.
        alike = STEPS if name[0] == "l" else STEPS // 2
        np.testing.assert_allclose(
            found[:alike], wanted[:alike], rtol=2e-3, atol=1e-5, err_msg=name
        )


def test_ten_steps_of_kto_are_those_of_trl(tmp_path: Path) -> None:
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    asked = save_pairs(tmp_path)
    records = save_judged(tmp_path, asked)
    theirs = Theirs(tmp_path / "checkpoint")
    config = run_config(tmp_path, Kto(0.3, reference="stored"), "judged.jsonl")
    # TRL takes the answer that stands before one in its batch, where mmjax takes the record before
    # it: tell each record what TRL will take. A step is one microbatch, as the divergence is of
    # each.
    config = replace(config, batch=BatchConfig(Samples(len(records)), {"llm": 4, "vision": 4}, 1))
    write_stored(tmp_path, records, asked, theirs, range(len(records)))
    order = samples_of(load_steps(config, tmp_path, 1)[0])
    assert order == list(range(len(records)))
    steps = load_steps(config, tmp_path, STEPS)
    assert all(len(batches) == 1 for batches in steps)
    executor, state = started(config)
    ours = our_steps(config, executor, state, steps)

    judged = [
        {
            "images": [Image.open(one.image)],
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": one.question}],
                }
            ],
            "completion": [{"role": "assistant", "content": record["completion"]}],
            "label": record["label"],
        }
        for one, record in zip(asked, records, strict=True)
    ]
    processor, model, optimizers = there(theirs, config)
    arguments = trl.KTOConfig(
        str(tmp_path / "trl"),
        beta=config.loss.beta,
        max_length=None,
        **options(config, len(records)),
    )
    trainer = trl.KTOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(judged * STEPS),
        processing_class=processor,
        optimizers=optimizers,
    )
    trainer.train()
    told = [record for record in trainer.state.log_history if "loss" in record]
    means = [
        mean_measures(config.loss, r.losses.measures, float(r.losses.weight.sum())) for r in ours
    ]
    names = ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
    found = {name: [mean[name] for mean in means] for name in names}
    found |= {name: [mean_of(report, name) for report in ours] for name in ("loss", "grad_norm")}
    for name, values in found.items():
        alike = STEPS if name[0] == "l" else STEPS // 2
        wanted = [record[name] for record in told]
        np.testing.assert_allclose(
            values[:alike], wanted[:alike], rtol=2e-3, atol=1e-4, err_msg=name
        )
    assert found["kl"][-1] > 0


def write_stored(
    place: Path,
    records: Sequence[dict[str, Any]],
    asked: Sequence[Asked],
    theirs: Theirs,
    order: Sequence[int],
) -> None:
    """Write `judged.jsonl` with log-probabilities of each answer, and of the one before it in this order."""
    with torch.no_grad():
        for before, number in zip([order[-1], *order[:-1]], order, strict=True):
            record, one = records[number], asked[number]
            record["kl_completion"] = records[before]["completion"]
            for answer, key in (("completion", "ref_logps"), ("kl_completion", "ref_KL_logps")):
                record[key] = theirs.log_probs(one.image, one.question, record[answer]).sum().item()
    write_lines(place / "judged.jsonl", records)


def test_losses_by_odds_are_those_of_trl() -> None:
    trainer = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    rng = np.random.default_rng(0)
    better, worse = -rng.uniform(0.01, 4, (2, 30)).astype(np.float32)
    itself = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    losses, rewards, _, _, log_odds = trainer.odds_ratio_loss(
        itself, torch.tensor(better), torch.tensor(worse)
    )
    ones = np.ones((30, 2), np.float32)
    text = TextBatch(*[None] * 14)._replace(
        weight=jnp.asarray(0.5 * ones),
        kind=jnp.asarray(np.tile([CHOSEN, REJECTED], (30, 1))),
        sample=jnp.zeros((30, 2), jnp.int32),
        pos=jnp.tile(jnp.arange(2), (30, 1)),
    )
    ours, measures = orpo.token_losses(
        jnp.stack([better, worse], axis=1), jnp.zeros(()), text, Orpo(0.3)
    )
    # Beside the odds' loss TRL has cross-entropy of the prompt, too, where the paper has that of
    # the answer alone.
    np.testing.assert_allclose(ours[:, 0] + better, -losses.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(measures["rewards/chosen"][:, 0], rewards.numpy(), rtol=1e-6)
    np.testing.assert_allclose(measures["log_odds_chosen"][:, 0].mean(), log_odds.item(), rtol=1e-5)
