"""DPO on packed pairs of a tiny LLaVA is what TRL's own trainer does; runs where there is TRL (`pip install trl`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from preferences import Theirs, run_config, save_log_probs, save_pairs
from test_preferences import our_steps, samples_of, started
from tiny_run import load_steps

from mmjax.config.losses import Dpo
from mmjax.runtime.state import hyperparameters

pytestmark = pytest.mark.exhaustive

STEPS = 10


def mean_of(report: Any, name: str) -> float:
    """What a step reports by the name that TRL has for it."""
    if name == "grad_norm":
        return float(report.gradient_norm)
    return float(
        (report.losses.loss if name == "loss" else report.losses.measures[name]).sum() / report.losses.weight.sum()
    )


@pytest.mark.parametrize(
    "loss", [Dpo(0.3, "sigmoid", "stored"), Dpo(2.0, "sigmoid_norm", "stored")], ids=lambda loss: loss.loss_type
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
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": one.question}]}],
            "chosen": [{"role": "assistant", "content": one.chosen}],
            "rejected": [{"role": "assistant", "content": one.rejected}],
        }
        for one in asked
    ]
    numbers = [samples_of(batches) for batches in steps]
    (count,) = {len(step) for step in numbers}
    # TRL tokenizes what a template writes without special tokens; transformers' processors put one before LLaVA's.
    processor = theirs.processor
    processor.chat_template = processor.tokenizer.bos_token + processor.chat_template
    model = theirs.model
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices], "weight_decay": 0.1 * matrices}
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, 1.0, betas=(0.9, 0.95), eps=1e-8)
    rates = [float(hyperparameters(config, step)["learning_rate/llm"]) for step in range(STEPS)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, STEPS - 1)])
    arguments = trl.DPOConfig(
        str(tmp_path / "trl"),
        beta=loss.beta,
        loss_type=[loss.loss_type],
        per_device_train_batch_size=count,
        train_sampling_strategy="sequential",
        max_steps=STEPS,
        max_length=None,
        max_grad_norm=config.training.clip,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([pairs[number] for step in numbers for number in step]),
        processing_class=processor,
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    told = [record for record in trainer.state.log_history if "loss" in record]
    for name in ("loss", "logps/chosen", "logps/rejected", "rewards/margins", "grad_norm"):
        found, wanted = [mean_of(report, name) for report in ours], [record[name] for record in told]
        # Rewards are differences of sums, and AdamW makes of their rounding other updates.
        alike = STEPS if name[0] == "l" else STEPS // 2
        np.testing.assert_allclose(found[:alike], wanted[:alike], rtol=2e-3, atol=1e-5, err_msg=name)
