"""A model of every part at width 32, real batches of the embedded dataset for it, and updates on any mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import PADDING, ItemBatch, Microbatch, TextBatch
from mmjax.config import (
    AdamW,
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    EmbeddedSource,
    MeshConfig,
    ModelConfig,
    PackGrouping,
    Samples,
    Schedule,
    TrainingConfig,
    VisionConfig,
)
from mmjax.data.embedded import ALPHABET
from mmjax.data.index import build_index
from mmjax.data.pipeline import LoadedStep, StepLoader
from mmjax.data.plan import make_budget
from mmjax.data.sources import open_sources
from mmjax.models.model import Model
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.training.optimizer import hyperparameters, make_optimizer
from mmjax.training.state import TrainState
from mmjax.training.step import Accumulated, Executor

MESHES = {
    "one device": MeshConfig(1),
    "data=8": MeshConfig(8),
    "fsdp=8": MeshConfig(1, fsdp=8),
    "fsdp=4 x tensor=2": MeshConfig(1, fsdp=4, tensor=2),
    "data=2 x fsdp=2 x tensor=2": MeshConfig(2, fsdp=2, tensor=2),
}


def tiny_config(**changes: Any) -> Config:
    """Three modalities, two layers of everything; `changes` replace fields of the config."""
    tower = {"layers": 2, "width": 32, "heads": 2, "mlp_width": 48}
    connector = ConnectorConfig(mlp_width=48, position_grid=16)
    config = Config(
        name="tiny",
        data=DataConfig({"embedded": EmbeddedSource(samples=300)}, ALPHABET, workers=0),
        batch=BatchConfig(Samples(12), {"llm": 4, "vision": 3, "audio": 2}, grouping=PackGrouping(chunk_steps=16)),
        model=ModelConfig(
            DecoderConfig(**tower | {"heads": 4}, kv_heads=2, head_width=8, vocab=len(ALPHABET) + 2, rope_theta=1e3),
            {
                "vision": VisionConfig(**tower, patch=4, channels=1, connector=connector),
                "audio": AudioConfig(
                    **tower,
                    mels=20,
                    sample_rate=4000,
                    window=128,
                    hop=64,
                    connector=replace(connector, position_grid=64),
                ),
            },
        ),
        training=TrainingConfig(steps=10),
        optimizer=AdamW(learning_rate=3e-3),
        schedule=Schedule(warmup=2),
    )
    return replace(config, **changes)


def load_steps(config: Config, folder: Path, steps: int) -> list[LoadedStep]:
    """The first steps of the config's data, by its own planner and loader."""
    index = build_index(open_sources(config, "train", folder), config.model.encoders)
    index.save(folder / "index")
    budget = make_budget(index, config.batch, ("llm", *config.model.encoders), [1.0], config.seed)
    loader = StepLoader(config, budget, folder / "index", folder)
    return [loader(step) for step in range(steps)]


def make_executor(config: Config, mesh: MeshConfig) -> Executor:
    """The programs of this config on as many devices as the mesh wants."""
    count = mesh.data * mesh.fsdp * mesh.tensor
    model = Model.build(config.model, jnp.dtype(config.training.precision))
    optimizer = make_optimizer(config.optimizer, model.axes)
    return Executor(model, optimizer, make_mesh(mesh, jax.devices()[:count]), ShardingRules(), len(config.data.sources))


def gradients(executor: Executor, state: TrainState, batches: Sequence[Microbatch], weight: float) -> Accumulated:
    """Gradients and report over the microbatches, on the host."""
    accumulated = executor.zeros()
    for batch in batches:
        put = executor.put(batch)
        accumulated = executor.accumulate(state.trainable, state.frozen, accumulated, put, np.float32(weight))
    return jax.device_get(accumulated)


@dataclass
class Trained:
    """A state after some updates, and what each of them told."""

    state: TrainState
    losses: np.ndarray
    gradient_norms: np.ndarray


def train(config: Config, executor: Executor, state: TrainState, steps: Sequence[LoadedStep]) -> Trained:
    """One update per loaded step. `state` is donated."""
    accumulated = executor.zeros()
    losses, norms = [], []
    for n, loaded in enumerate(steps):
        batches = [executor.put(b) for b in loaded.microbatches]
        hyper = hyperparameters(config, executor.modules, n)
        state, accumulated, told = executor.step(state, accumulated, batches, float(loaded.weight), hyper)
        losses.append(float(told.report.loss.sum() / told.report.weight.sum()))
        norms.append(float(told.gradient_norm))
    return Trained(state, np.array(losses), np.array(norms))


def merged(batches: Sequence[Microbatch], merges: dict[str, int]) -> Microbatch:
    """Microbatches of one shape as one: rows one below the other, slots shifted to where the items went.

    `merges` are the encoder positions per LLM token.
    """

    def shifted(encoder: str, m: int) -> np.ndarray:
        slots, item = batches[m].text.slots[encoder], batches[m].items[encoder].item
        return np.where(slots >= 0, slots + m * item.size // merges[encoder], PADDING)

    stack = lambda *arrays: np.concatenate(arrays)  # noqa: E731
    text = jax.tree.map(stack, *(b.text._replace(slots={}) for b in batches))
    slots = {e: np.concatenate([shifted(e, m) for m in range(len(batches))]) for e in merges}
    return Microbatch(text._replace(slots=slots), jax.tree.map(stack, *(b.items for b in batches)))


def without(batch: Microbatch, encoders: Sequence[str]) -> Microbatch:
    """The batch without the items of some encoders and without the samples that hold them; shapes stay."""
    text = batch.text
    held = np.zeros(text.sample.shape, bool)
    for encoder in encoders:
        for row, samples in enumerate(text.sample):
            held[row] |= np.isin(samples, samples[text.slots[encoder][row] >= 0])
    fill = {"sample": PADDING, "source": PADDING}
    fields = {
        f: np.where(held, fill.get(f, 0), x).astype(x.dtype) for f, x in text._asdict().items() if f not in ("slots", "pos")
    }
    slots = {e: np.where(held, PADDING, s).astype(s.dtype) for e, s in text.slots.items()}
    empty = {
        e: ItemBatch(np.zeros_like(b.values), np.full_like(b.item, PADDING), np.zeros_like(b.coordinates))
        for e, b in batch.items.items()
        if e in encoders
    }
    return Microbatch(TextBatch(**fields, pos=text.pos, slots=slots), batch.items | empty)


def paths(tree: Any) -> dict[str, Any]:
    """Leaves by their dotted path."""
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(tree)}


def worst_leaf(gradients: Any, reference: Any) -> tuple[float, str]:
    """The largest difference in any leaf, over that leaf's largest absolute value, and whose it is."""
    found, wanted = paths(gradients), paths(reference)
    assert found.keys() == wanted.keys()

    def off(name: str) -> float:
        difference, size = np.abs(found[name] - wanted[name]).max(), np.abs(wanted[name]).max()
        return float(difference / size) if size else float(difference)

    return max((off(name), name) for name in wanted)
