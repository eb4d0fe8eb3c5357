"""Tiny checkpoints as transformers saves them, and short runs that start from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from commands import TINY

from mmjax.config import Config, LoraConfig, MeshConfig, Rates
from mmjax.config.loading import load, to_json
from mmjax.hf.families import from_hf
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint import CheckpointStore
from mmjax.runtime.checkpoint_commit import Retention
from mmjax.runtime.checkpoint_metadata import DataState
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.state import make_optimizer, parameter_shardings
from mmjax.runtime.weights import load_pretrained
from mmjax.train import train

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
BESIDE = {  # what a checkpoint has beside its weights
    "chat_template.jinja": "{{ messages }}",
    "tokenizer.json": '{"model": {}}',
    "generation_config.json": '{ "do_sample":  true }\n',
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "README.md": "A model — and its card.\n",
}
LORA = {
    "attention": LoraConfig(("llm.*.attention.*",), 4),
    "mlp": LoraConfig(("*.down",), 3, 5.0, "sqrt_rank"),
}


def save_checkpoint(
    folder: Path,
    kind: type[transformers.PreTrainedConfig] = transformers.Qwen2Config,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
    **own: Any,
) -> torch.nn.Module:
    """A random model for the embedded data's tokens, every parameter off its zeros and ones."""
    vocab = load(TINY).model.llm.vocab
    torch.manual_seed(1)
    config = kind(**SIZES | {"vocab_size": vocab} | own)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return model


def tuning(source: Path, run: Path, precision: str = "float32", **changes: Any) -> Config:
    """The config of a short run from a checkpoint; `changes` are to its model."""
    base = load(TINY)
    training = replace(
        base.training, steps=3, checkpoint_every=1, evaluate_every=0, evaluate_samples=1, keep=5
    )
    training = replace(training, precision=precision)
    own = {"llm.lora": Rates(learning_rate=0.03)} if changes.get("lora") else {}
    optimizer = replace(base.optimizer, learning_rate=3e-3, modules=own)
    model = replace(from_hf(source), **changes)
    return replace(base, model=model, training=training, optimizer=optimizer, run=str(run))


def fine_tune(source: Path, run: Path, **changes: Any) -> Path:
    """A finished run from a checkpoint."""
    train(tuning(source, run, **changes), Path(TINY), devices=jax.devices()[:1])
    return run


def moved(source: Path, run: Path, amount: float = 0.05, **changes: Any) -> Path:
    """A run's folder whose checkpoints are not trained: what is trainable was moved at random, ever further."""
    return moved_run(tuning(source, run, **changes), amount)


def moved_run(config: Config, amount: float = 0.05) -> Path:
    """The folder of a run of this config, as `moved`."""
    folder = RunFolder(Path(config.run))
    folder.path.mkdir()
    folder.write_config(config)
    model = Model.build(config.model, jnp.dtype(config.training.precision))
    mesh, rules = make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    executor = Executor.on_mesh(
        model, make_optimizer(config.optimizer, model.axes), mesh, rules, sources=1
    )
    given = load_pretrained(model, parameter_shardings(model, mesh, rules))
    state = executor.init(jax.random.key(0), given)
    rng, checkpoints = (
        np.random.default_rng(0),
        CheckpointStore(folder.checkpoints, executor, Retention(3)),
    )
    for step in (1, 2, 3):
        trainable = jax.tree.map(
            lambda p: p + amount * rng.standard_normal(p.shape, np.float32), state.trainable
        )
        state = State((state.stages[0]._replace(trainable=trainable),))
        checkpoints.save(state, to_json(config), DataState(step, "an index", {}))
    checkpoints.wait()
    return folder.path


def losses(run: Path) -> dict[int, float]:
    """The loss after every number of updates."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["loss"] for r in records if "loss" in r}
