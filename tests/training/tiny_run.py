"""A model of every part at width 32, real batches of the embedded dataset for it, and updates on any mesh."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import PADDING, TOKEN_FIELDS, Microbatch, TextBatch
from mmjax.config import (
    AdamW,
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    EmbeddedSource,
    LogMel,
    LossConfig,
    MeshConfig,
    ModelConfig,
    PackGrouping,
    Samples,
    Schedule,
    TrainingConfig,
    VisionConfig,
)
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.data.toy.dataset import ALPHABET
from mmjax.models.layer_stacks import stack_layers, unstack_layers
from mmjax.models.model import Model, restrict
from mmjax.parallel.sharding import ShardingRules, make_mesh, replicated
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import TrainState, hyperparameters, make_optimizer

# encoder positions per LLM token: a square of patches; stride and merge
MERGE = {"vision": 2 * 2, "audio": 2 * 2}
VOCAB = len(ALPHABET) + 3  # one more than there are tokens, so that tensor=2 divides it

MESHES = {
    "one device": MeshConfig(1),
    "data=8": MeshConfig(8),
    "fsdp=8": MeshConfig(1, fsdp=8),
    "fsdp=4 x tensor=2": MeshConfig(1, fsdp=4, tensor=2),
    "data=2 x fsdp=2 x tensor=2": MeshConfig(2, fsdp=2, tensor=2),
    "fsdp=4 x tensor=2, encoders=data": MeshConfig(1, fsdp=4, tensor=2, encoders="data"),
    "data=2 x fsdp=2 x tensor=2, encoders=data": MeshConfig(2, fsdp=2, tensor=2, encoders="data"),
    "context=2": MeshConfig(1, context=2),
    "context=4": MeshConfig(1, context=4),
    "context=8": MeshConfig(1, context=8),
    "data=2 x context=2 x tensor=2": MeshConfig(2, context=2, tensor=2),
    "data=2 x context=2 x tensor=2, overlap": MeshConfig(
        2, context=2, tensor=2, sequence_parallel="overlap"
    ),
    "fsdp=4 x context=2, heads": MeshConfig(1, fsdp=4, context=2, context_attention="heads"),
    "fsdp=2 x context=2 x tensor=2, encoders=data": MeshConfig(
        1, fsdp=2, context=2, tensor=2, encoders="data"
    ),
}


def tiny_config(**changes: Any) -> Config:
    """Three modalities, two layers of everything, four microbatches; `changes` replace fields of the config."""
    tower = {"layers": 2, "width": 32, "heads": 2, "mlp_width": 48}
    connector = ConnectorConfig(mlp_width=48, position_grid=16)
    config = Config(
        name="tiny",
        data=DataConfig({"embedded": EmbeddedSource(samples=300)}, alphabet=ALPHABET, workers=0),
        batch=BatchConfig(
            Samples(48),
            {"llm": 3, "vision": 1, "audio": 1},
            4,
            PackGrouping(chunk_steps=12),
            shapes=2,
        ),
        model=ModelConfig(
            DecoderConfig(
                **tower | {"heads": 4}, kv_heads=2, head_width=8, vocab=VOCAB, rope_theta=1e3
            ),
            {
                "vision": VisionConfig(**tower, patch=4, channels=1, connector=connector),
                "audio": AudioConfig(
                    **tower,
                    clips=LogMel(mels=20, sample_rate=4000, window=128, hop=64),
                    connector=replace(connector, position_grid=64),
                ),
            },
        ),
        training=TrainingConfig(steps=10),
        optimizer=AdamW(learning_rate=3e-3, weight_decay=0.1),
        schedule=Schedule(warmup=2),
    )
    return replace(config, **changes)


def one_shape(config: Config) -> Config:
    """The same with microbatches of one shape, so that each program is compiled once."""
    return replace(config, batch=replace(config.batch, shapes=1))


def load_steps(
    config: Config, folder: Path, steps: int, topology: Topology = ONE_RANK
) -> list[tuple[Microbatch, ...]]:
    """The microbatches of the first steps of the config's data, for these ranks, by its own planner and loader."""
    index = build_index(open_sources(config, "train", folder), config.model.item_modules)
    index.save(folder / "index")
    planner, layout = make_planner(index, config, [1.0] * len(config.data.sources), topology)
    loader = StepLoader(
        config, planner.grouper.budget, layout, folder / "index", folder, range(topology.ranks)
    )
    return [loader(step).microbatches for step in range(steps)]


def make_executor(config: Config, mesh: MeshConfig, accumulates: bool = True) -> Executor:
    """The programs of this config on as many devices as the mesh wants."""
    count = mesh.data * mesh.fsdp * mesh.expert * mesh.tensor * mesh.context
    model = Model.build(config.model, jnp.dtype(config.training.precision))
    optimizer = make_optimizer(config.optimizer, model.axes)
    on, rules = make_mesh(mesh, jax.devices()[:count]), ShardingRules.of(mesh)
    chunks = config.training.loss_chunks or 1
    sources = len(config.data.sources)
    return Executor.on_mesh(
        model,
        optimizer,
        on,
        rules,
        sources=sources,
        loss_chunks=chunks,
        loss=config.loss,
        accumulates=accumulates,
    )


def scattered(executor: Executor, seed: int = 0) -> Any:
    """Trainable parameters on the host, biases and scales off zero and one too, so that no mistake in them hides.

    Drawn here: the program that draws a run's own takes longer to compile than many that train.
    """
    rng = np.random.default_rng(seed)
    (state,) = executor.states

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = rng.standard_normal(leaf.shape, np.float32)
        if len(leaf.shape) > 1 and path[-1].key != "b":  # of an adapter, where it begins at zero
            return noise * np.float32(leaf.shape[-2] ** -0.5)
        if path[-2].key == "bounds":
            return np.full(leaf.shape, 1 if path[-1].key.endswith("max") else -1, np.float32)
        return 0.02 * noise + (path[-1].key == "scale")

    layers = unstack_layers(
        state.abstract.trainable, lambda leaf, _: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    )
    return stack_layers(jax.tree_util.tree_map_with_path(draw, layers), executor.model.runs)


def state_with(executor: Executor, trainable: Any, frozen: Any = None) -> State:
    """Step 0 with these parameters, where the executor wants them, and its layers as it stacks them."""
    given = [
        stack_layers(unstack_layers(part), executor.model.runs)
        for part in (trainable, frozen or {})
    ]
    parts = []
    for state in executor.states:
        owned = [
            restrict(part, like) for part, like in zip(given, state.abstract[1:3], strict=True)
        ]
        trainable, frozen = (
            jax.device_put(*pair) for pair in zip(owned, state.shardings[1:3], strict=True)
        )
        step, moments = state.init_optimizer(trainable)
        parts.append(TrainState(step, trainable, frozen, moments))
    return executor.from_parts(parts)


def gradients(executor: Executor, state: State, batches: Sequence[Microbatch]) -> Sums:
    """Gradients and report over the microbatches, on the host."""
    noise = np.array([0, 0], np.uint32) if executor.model.is_random else None
    # as in a step, so that both are one program
    total = jax.device_put(weights(batches), replicated(executor.mesh))
    put = [executor.put(batch) for batch in batches]
    return jax.device_get(executor.gradients(state, executor.zeros(), put, total, noise).sums[0])


@dataclass
class Trained:
    """A state after some updates, and what each of them told."""

    state: State
    losses: np.ndarray
    gradient_norms: np.ndarray


def train(
    config: Config, executor: Executor, state: State, steps: Sequence[Sequence[Microbatch]]
) -> Trained:
    """One update per step's microbatches. `state` is donated."""
    accumulated = executor.zeros()
    losses, norms = [], []
    for n, batches in enumerate(steps):
        put = [executor.put(b) for b in batches]
        hyper = hyperparameters(config, n)
        state, accumulated, told = executor.step(state, accumulated, put, hyper)
        told = jax.device_get(told)
        losses.append(told.losses.loss.sum() / told.losses.weight.sum())
        norms.append(told.gradient_norm)
    return Trained(state, np.array(losses), np.array(norms))


def weight(batches: Sequence[Microbatch]) -> float:
    """Loss weight of all microbatches together."""
    return float(sum(b.text.weight.sum() for b in batches))


def weights(batches: Sequence[Microbatch]) -> dict[str, np.float32]:
    """Weights of the losses of all microbatches together: of the LLM, and of generators by name."""
    patches = {
        name: np.float32(sum((b.items[name].item >= 0).sum() for b in batches))
        for name in batches[0].text.condition
    }
    return {"llm": np.float32(weight(batches))} | patches


def with_answers(batches: Sequence[Microbatch], loss: LossConfig) -> list[Microbatch]:
    """The microbatches with numbers of every token for a loss of answers, the same wherever the token stands."""

    def of(number: int, text: TextBatch) -> np.ndarray:
        return np.where(
            text.weight > 0, np.sin(3.0 * number + 7 * text.owner + text.offset), 0
        ).astype(np.float32)

    texts = [
        b.text._replace(loss_inputs={x: of(n, b.text) for n, x in enumerate(loss.inputs)})
        for b in batches
    ]
    return [batch._replace(text=text) for batch, text in zip(batches, texts, strict=True)]


def merged(batches: Sequence[Microbatch]) -> Microbatch:
    """Microbatches of one rank and shape as one: rows one below the other, slots shifted to where the items went."""

    def shifted(encoder: str, m: int) -> np.ndarray:
        slots, item = batches[m].text.slots[encoder], batches[m].items[encoder].item
        return np.where(slots >= 0, slots + m * item.size // MERGE[encoder], PADDING)

    stack = lambda *arrays: np.concatenate(arrays)  # noqa: E731
    text = jax.tree.map(stack, *(b.text._replace(slots={}, send={}) for b in batches))
    slots = {
        e: np.concatenate([shifted(e, m) for m in range(len(batches))]) for e in batches[0].items
    }
    text = text._replace(slots=slots, send=batches[0].text.send)
    return Microbatch(text, jax.tree.map(stack, *(b.items for b in batches)))


def without(batch: Microbatch, encoders: Sequence[str]) -> Microbatch:
    """The batch without the items of some encoders and without the samples that hold them; shapes stay."""
    text = batch.text
    held = np.zeros(text.sample.shape, bool)
    for encoder in encoders:
        for row, samples in enumerate(text.sample):
            held[row] |= np.isin(samples, samples[text.slots[encoder][row] >= 0])
    fill = {"sample": PADDING, "source": PADDING, "owner": PADDING}
    fields = {
        f: np.where(held, fill.get(f, 0), x).astype(x.dtype)
        for f, x in text._asdict().items()
        if f in TOKEN_FIELDS and f != "pos"
    }
    slots = {e: np.where(held, PADDING, s).astype(s.dtype) for e, s in text.slots.items()}
    empty = {
        e: b._replace(values=np.zeros_like(b.values), item=np.full_like(b.item, PADDING))
        for e, b in batch.items.items()
        if e in encoders
    }
    return Microbatch(
        TextBatch(**fields, pos=text.pos, slots=slots, send=text.send, spread=text.spread),
        batch.items | empty,
    )


def paths(tree: Any) -> dict[str, Any]:
    """Leaves by their dotted path."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="."): x
        for p, x in jax.tree.leaves_with_path(tree)
    }


def worst_leaf(gradients: Any, reference: Any) -> tuple[float, str]:
    """The largest difference in any leaf, over that leaf's largest absolute value, and whose it is."""
    found, wanted = paths(gradients), paths(reference)
    assert found.keys() == wanted.keys()

    def off(name: str) -> float:
        difference, size = np.abs(found[name] - wanted[name]).max(), np.abs(wanted[name]).max()
        return float(difference / size) if size else float(difference)

    return max((off(name), name) for name in wanted)


@contextlib.contextmanager
def stderr_of() -> Iterator[list[str]]:
    """Collects what is written to file descriptor 2 inside, where XLA writes its warnings; read it afterwards."""
    written: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield written
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            written.append(file.read().decode(errors="replace"))
