"""Pipelines compute what the one-program step computes: gradients, updates, reports, whatever the units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import (
    load_steps,
    make_executor,
    one_shape,
    state_with,
    tiny_config,
    weight,
    weights,
    with_answers,
    worst_leaf,
)

from mmjax.batch import FIRST_BRANCH_BIT, Microbatch
from mmjax.config import (
    AdamW,
    Config,
    ConvolutionConfig,
    CrossEntropy,
    DeltaNetConfig,
    ExpertsConfig,
    FractionalGrid,
    LatentAttentionConfig,
    LearnedGrid,
    LoraConfig,
    LossConfig,
    MeshConfig,
    Muon,
    QueryLayers,
    Rates,
    TokenInputsConfig,
    Unit,
)
from mmjax.config.losses import Dpo, Grpo, Kto, Orpo
from mmjax.config.training import unit_devices
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.models.layer_stacks import unstack_layers
from mmjax.models.model import Model, merge
from mmjax.planning.schedules import schedule_name, stage_cuts, stage_times
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.devices import CompileCounter, enable_compilation_cache
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.placement import place_stages
from mmjax.runtime.state import hyperparameters, make_optimizer
from mmjax.runtime.transfer import Transfer
from mmjax.runtime.units import units_topology

BY_MODULE = {"vision": Unit(data=2), "audio": Unit(fsdp=2), "llm": Unit(pipeline=2, tensor=2)}
UNITS = {
    "by module": BY_MODULE,
    "encoders together": {"encoders": Unit(modules=("vision", "audio")), "llm": Unit(pipeline=3)},
    "all in stages": {"all": Unit(modules=("llm", "vision", "audio"), pipeline=4)},
    "tensor parallel": {
        "encoders": Unit(modules=("audio", "vision")),
        "llm": Unit(pipeline=2, tensor=2),
    },
    "one stage": {
        "encoders": Unit(modules=("vision", "audio")),
        "llm": Unit(fsdp=2, tensor=2, sequence_parallel="overlap"),
    },
    "unequal ranks": {"vision": Unit(data=3), "audio": Unit(), "llm": Unit(data=2, pipeline=2)},
    "interleaved": {"vision": Unit(), "audio": Unit(), "llm": Unit(pipeline=2, virtual=2)},
    "context": {"vision": Unit(data=3), "audio": Unit(), "llm": Unit(pipeline=2, context=2)},
    "context of four": {"vision": Unit(fsdp=2), "audio": Unit(), "llm": Unit(context=4)},
    "context, several ranks": {
        "encoders": Unit(modules=("vision", "audio")),
        "llm": Unit(data=2, context=2),
    },
    "context with the encoders": {
        "all": Unit(modules=("llm", "vision", "audio"), pipeline=2, context=2, tensor=2)
    },
    "context, interleaved": {
        "vision": Unit(),
        "audio": Unit(),
        "llm": Unit(pipeline=2, context=2, virtual=2),
    },
    "experts": {
        "vision": Unit(data=2),
        "audio": Unit(context=2),
        "llm": Unit(expert=2, pipeline=2),
    },
    "experts, all axes": {
        "all": Unit(
            modules=("llm", "vision", "audio"),
            expert=2,
            tensor=2,
            pipeline=2,
            sequence_parallel="on",
            encoders="data",
        )
    },
    "tokens divided": {
        "vision": Unit(tensor=2, encoders="data"),
        "audio": Unit(context=2),
        "llm": Unit(tensor=2, pipeline=2, sequence_parallel="overlap"),
    },
    "tokens of encoders divided": {
        "encoders": Unit(
            modules=("vision", "audio"), tensor=2, context=2, sequence_parallel="overlap"
        ),
        "llm": Unit(fsdp=2, context=2, context_attention="heads"),
    },
    "beside": {"vision": Unit(beside="llm"), "audio": Unit(beside="llm"), "llm": Unit(pipeline=4)},
    "beside two": {
        "vision": Unit(beside="llm"),
        "audio": Unit(beside="llm"),
        "llm": Unit(pipeline=2),
    },
    "one beside": {"vision": Unit(beside="llm"), "audio": Unit(), "llm": Unit(pipeline=3)},
    "beside, in parts": {
        "encoders": Unit(modules=("vision", "audio"), virtual=2, beside="llm"),
        "llm": Unit(pipeline=2, data=2, tensor=2),
    },
    "beside, data": {
        "vision": Unit(beside="llm"),
        "audio": Unit(beside="llm"),
        "llm": Unit(pipeline=3, data=2),
    },
    # Cut inside a deepstack, as `deepstack_config_of` makes it.
    "deep": {"vision": Unit(pipeline=2), "audio": Unit(), "llm": Unit(pipeline=2, cuts=(1,))},
    "deeper": {"vision": Unit(pipeline=3), "audio": Unit(), "llm": Unit(pipeline=4)},
    "deep, unequal ranks": {
        "vision": Unit(pipeline=2, data=2),
        "audio": Unit(data=2),
        "llm": Unit(pipeline=2),
    },
    "deep, one encoder stage": {
        "vision": Unit(data=2),
        "audio": Unit(),
        "llm": Unit(pipeline=2, data=2, cuts=(1,)),
    },
    "deep, with the llm": {
        "vision": Unit(pipeline=3),
        "llm": Unit(modules=("llm", "audio"), pipeline=3),
    },
    "deep, interleaved": {
        "vision": Unit(pipeline=2),
        "audio": Unit(),
        "llm": Unit(pipeline=2, virtual=2),
    },
}


def config_of(
    units: str, frozen: Sequence[str] = (), tied: bool = True, dropout: float = 0.0, **changes: Any
) -> Config:
    """The tiny model with four LLM layers on these units."""
    config = tiny_config(units=UNITS[units])
    llm = replace(config.model.llm, layers=4, tied=tied, dropout=dropout, frozen="llm" in frozen)
    encoders = {
        name: replace(
            encoder,
            frozen=name in frozen,
            dropout=dropout,
            connector=replace(encoder.connector, frozen=f"{name}.connector" in frozen),
        )
        for name, encoder in config.model.encoders.items()
    }
    remat = changes.pop("remat", "none")
    llm = replace(llm, remat=remat)
    encoders = {name: replace(encoder, remat=remat) for name, encoder in encoders.items()}
    return replace(config, model=replace(config.model, llm=llm, encoders=encoders), **changes)


def with_experts(config: Config, layers: Sequence[int] = (0, 1, 3)) -> Config:
    """The same with experts in these of the LLM's four layers, and losses that balance them."""
    losses = {"balance_loss": 0.3, "z_loss": 0.05}
    experts = ExpertsConfig(
        layers=tuple(layers), count=4, per_token=2, width=24, shared_width=16, **losses
    )
    llm = replace(config.model.llm, experts=experts)
    # Rows that sequence parallelism divides.
    batch = replace(config.batch, alignment=16)
    return replace(config, batch=batch, model=replace(config.model, llm=llm))


def with_delta_nets(config: Config) -> Config:
    """The same with delta nets in three of the LLM's four layers; its samples have several questions each."""
    net = DeltaNetConfig((0, 1, 3), key_heads=2, value_heads=4, key_width=8, value_width=8)
    # With this epsilon norms enlarge rounding little.
    llm = replace(config.model.llm, delta_net=net, norm_eps=1e-2)
    return replace(config, model=replace(config.model, llm=llm))


def with_latent_attention(config: Config) -> Config:
    """The same with latent attention, and rows that sequence parallelism divides."""
    llm = config.model.llm
    latent = LatentAttentionConfig(key_rank=12, value_width=6, query_rank=10)
    llm = replace(llm, latent=latent, kv_heads=llm.heads, rotary_width=4)
    batch = replace(config.batch, alignment=16)
    return replace(config, batch=batch, model=replace(config.model, llm=llm))


def deepstack_config_of(units: str, **changes: Any) -> Config:
    """The model with four vision layers, of which three are taken out, the first stage's last and the last among them.

    With two or three stages, the first has two of these or one.
    """
    config = config_of(units, **changes)
    vision = replace(config.model.encoders["vision"], layers=4, deepstack=(0, 1, 3))
    return replace(
        config, model=replace(config.model, encoders=config.model.encoders | {"vision": vision})
    )


def make_pipeline(config: Config, schedule: str = "auto") -> Executor:
    config = replace(config, pipeline=replace(config.pipeline, schedule=schedule))
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
    devices = sum(map(unit_devices, config.units.values()))
    return Executor(
        model,
        make_optimizer(config.optimizer, model.axes),
        place_stages(config, model, jax.devices()[:devices]),
        sources=len(config.data.sources),
        schedule=schedule_name(config),
        stage_times=stage_times(config),
        loss=config.loss,
        loss_chunks=config.training.loss_chunks or 1,
    )


def steps_of(config: Config, folder: Path, count: int) -> list[tuple[Microbatch, ...]]:
    return load_steps(config, folder, count, units_topology(config.units))


def fill_adapters(state: Any) -> Any:
    """A state whose adapters pass on something: they begin with b = 0, under which a has no gradient."""

    def fill(path: tuple[Any, ...], p: jax.Array) -> jax.Array:
        if "['lora']['b']" not in jax.tree_util.keystr(path):
            return p
        # The same in every layer, and not in every channel: that a norm takes away.
        return p + 0.05 * jnp.cos(jnp.arange(math.prod(p.shape[-2:]), dtype=p.dtype)).reshape(
            p.shape[-2:]
        )

    return jax.tree.map_with_path(fill, state)


def assert_same_gradients(
    config: Config,
    folder: Path,
    schedule: str = "auto",
    loss: LossConfig = CrossEntropy(),
    tolerance: float = 1e-5,
) -> Executor:
    """The pipeline's gradients and losses are those of one device."""
    batches, plain = (
        with_answers(*steps, loss)
        for steps in (steps_of(config, folder, 1), load_steps(config, folder, 1))
    )
    config = replace(config, loss=loss)
    pipeline = make_pipeline(config, schedule)
    assert_gradients_of_one_mesh(config, pipeline, batches, plain, tolerance)
    return pipeline


def assert_gradients_of_one_mesh(
    config: Config,
    pipeline: Executor,
    batches: Sequence[Microbatch],
    plain: Sequence[Microbatch],
    tolerance: float = 1e-5,
) -> None:
    """Its gradients, losses and norm are one device's. plain: the microbatches as packed for one device."""
    one = make_executor(config, MeshConfig(1))
    noise = np.array([0, 0], np.uint32) if one.model.is_random else None
    state = fill_adapters(one.init(jax.random.key(0)))
    put = [one.put(batch) for batch in plain]
    expected = jax.device_get(one.gradients(state, one.zeros(), put, weights(plain), noise).sums[0])

    # Drawn once: that stages draw what one mesh does, the losses of runs show.
    staged = state_with(pipeline, *jax.device_get((state.trainable, state.frozen)))
    put = [pipeline.put(batch, number) for number, batch in enumerate(batches)]
    weighed = pipeline.weigh_batches(put)
    run = pipeline.gradients(staged, pipeline.zeros(), weighed.batches, weighed.weights, noise)
    gradients = reduce(merge, (unstack_layers(jax.device_get(sums.gradients)) for sums in run.sums))
    difference, leaf = worst_leaf(gradients, unstack_layers(expected.gradients))
    assert difference <= tolerance, leaf
    norm = pipeline.settle(run, weighed, hyperparameters(config, 0))[0].gradient_norm
    np.testing.assert_allclose(norm, optax.tree.norm(expected.gradients), rtol=tolerance)
    losses = {
        tower: run.sums[n].losses
        for n, placed in enumerate(pipeline.stages)
        for tower in placed.stage.losses
    }
    np.testing.assert_allclose(losses["llm"].loss, expected.losses.loss, rtol=tolerance)
    assert np.array_equal(losses["llm"].worst_samples[:8], expected.losses.worst_samples[:8])
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4),
        losses["llm"].experts,
        expected.losses.experts,
    )
    for name, total in expected.losses.measures.items():
        np.testing.assert_allclose(losses["llm"].measures[name], total, rtol=1e-4)
    for name, images in expected.losses.images.items():
        np.testing.assert_allclose(losses[name].images[name], images, rtol=1e-5)
    assert not run.residuals
    assert not run.inputs
    assert not run.output_gradients
    for stage, depth in enumerate(pipeline.graph.depths):
        if pipeline.schedule in ("1f1b", "eager"):
            assert run.in_flight[stage] <= depth * (2 if pipeline.schedule == "eager" else 1) + 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "units", ["unequal ranks", "context with the encoders", "experts", "experts, all axes"]
)
def test_gradients_of_an_llm_with_experts_are_those_of_one_program(units, tmp_path):
    assert_same_gradients(with_experts(config_of(units)), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["tensor parallel", "context, interleaved"])
def test_gradients_of_an_llm_with_convolutions_are_those_of_one_program(units, tmp_path):
    config = config_of(units)
    llm = replace(config.model.llm, convolution=ConvolutionConfig((0, 1, 3), biased=True))
    assert_same_gradients(replace(config, model=replace(config.model, llm=llm)), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["experts, all axes", "context", "tensor parallel"])
def test_gradients_of_sinks_and_biased_experts_are_those_of_one_program(units, tmp_path):
    config = with_experts(config_of(units))
    llm = config.model.llm
    experts = replace(llm.experts, shared_width=0, biases=True, limit=0.5, slope=1.7)
    llm = replace(llm, sinks=True, attention="auto", experts=experts)
    assert_same_gradients(replace(config, model=replace(config.model, llm=llm)), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "units", ["unequal ranks", "tensor parallel", "context", "context, interleaved"]
)
def test_gradients_of_an_llm_with_delta_nets_are_those_of_one_program(units, tmp_path):
    config = with_delta_nets(config_of(units))
    batch = load_steps(config, tmp_path, 1)[0][0]
    assert (batch.text.kind >> FIRST_BRANCH_BIT).max() > 1  # a second question
    assert_same_gradients(config, tmp_path)


@pytest.mark.default_cases("tensor parallel")
@pytest.mark.parametrize("units", ["unequal ranks", "tensor parallel", "context", "tokens divided"])
def test_gradients_of_an_llm_with_latent_attention_are_those_of_one_program(units, tmp_path):
    assert_same_gradients(with_latent_attention(config_of(units)), tmp_path)


@pytest.mark.default_cases("by module-auto-True-none-1-0.1")
@pytest.mark.parametrize(
    ("units", "schedule", "tied", "remat", "chunks", "dropout"),
    [
        ("by module", "auto", True, "none", 1, 0.1),
        ("by module", "eager", False, "products", 2, 0.0),
        ("encoders together", "gpipe", True, "full", 2, 0.1),
        ("encoders together", "auto", False, "none", 1, 0.0),
        ("all in stages", "eager", True, "none", 1, 0.1),
        ("all in stages", "gpipe", False, "products", 1, 0.1),
        ("tensor parallel", "auto", True, "products", 1, 0.0),
        ("unequal ranks", "auto", True, "full", 1, 0.0),
        ("unequal ranks", "eager", False, "none", 2, 0.1),
        ("interleaved", "auto", True, "none", 2, 0.1),
        ("context", "auto", True, "none", 1, 0.1),
        ("context", "eager", False, "full", 2, 0.0),
        ("context of four", "auto", False, "products", 1, 0.1),
        ("context of four", "gpipe", True, "none", 2, 0.0),
        ("context, several ranks", "auto", True, "full", 1, 0.1),
        ("context with the encoders", "auto", True, "none", 1, 0.1),
        ("context with the encoders", "gpipe", False, "full", 2, 0.0),
        ("context, interleaved", "auto", True, "products", 1, 0.1),
        ("tokens divided", "auto", True, "none", 1, 0.1),
        ("tokens of encoders divided", "auto", False, "full", 2, 0.1),
    ],
)
def test_gradients_are_those_of_one_program(
    units, schedule, tied, remat, chunks, dropout, tmp_path
):
    config = config_of(units, tied=tied, remat=remat, dropout=dropout)
    config = replace(config, training=replace(config.training, loss_chunks=chunks))
    assert_same_gradients(config, tmp_path, schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("units", "loss"),
    [
        ("context", Dpo(0.5, "sigmoid_norm", "stored")),
        ("unequal ranks", Dpo(0.5, "sigmoid", "none")),
        ("context", Kto(0.5, reference="stored")),
        ("unequal ranks", Orpo(0.5)),
        ("all in stages", Grpo(beta=0.1, reference="stored")),
    ],
)
def test_losses_of_answers_have_the_gradients_of_one_program(units, loss, tmp_path):
    assert_same_gradients(one_shape(config_of(units, dropout=0.1)), tmp_path, loss=loss)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("units", "tied"), [("all in stages", True), ("context", False), ("tensor parallel", True)]
)
def test_learned_positions_belong_to_the_first_stage(units, tied, tmp_path):
    config = config_of(units, tied=tied)
    learned = {
        "learned_positions": 500,
        "first_position": 2,
        "norm": "layer",
        "gated": False,
        "rope_sections": (),
    }
    llm = replace(config.model.llm, **learned, biases=("query", "up", "down"))
    assert_same_gradients(replace(config, model=replace(config.model, llm=llm)), tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "units", ["tensor parallel", "tokens divided", "context of four", "context, interleaved"]
)
def test_parallel_mlps_and_layers_without_rope_have_the_gradients_of_one_program(units, tmp_path):
    config = config_of(units)
    parallel = {"parallel_mlp": True, "norm": "layer_without_bias", "logit_scale": 0.3}
    llm = replace(config.model.llm, unrotated=(1, 2), **parallel)
    assert_same_gradients(replace(config, model=replace(config.model, llm=llm)), tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["one stage", "context of four", "context, several ranks"])
def test_shared_keys_and_vectors_of_tokens_have_the_gradients_of_one_program(units, tmp_path):
    config = config_of(units)
    llm = replace(config.model.llm, window=5, windowed=(0, 2), qk_norm="head")
    own = {"full_head_width": 2 * llm.head_width, "keys_as_values": True, "value_norm": True}
    own |= {"shared_layers": 2, "shared_mlp_width": 2 * llm.mlp_width, "output_scales": True}
    llm = replace(llm, **own, token_inputs=TokenInputsConfig(8, llm.vocab))
    assert_same_gradients(replace(config, model=replace(config.model, llm=llm)), tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "units", ["tensor parallel", "tokens of encoders divided", "all in stages"]
)
def test_norms_of_outputs_and_grouped_keys_of_encoders_have_the_gradients_of_one_program(
    units, tmp_path
):
    config = config_of(units)
    vision = config.model.encoders["vision"]
    grouped = replace(vision, heads=4, width=4 * vision.width, kv_heads=2)
    ending = {"output_width": 20, "output_activation": True}
    ending |= {"norm": "token_unscaled", "merging": "interleave"}
    grouped = replace(grouped, connector=replace(vision.connector, **ending))
    scaled = {"residual_scale": 0.3, "embedding_scale": 3.0, "scaled_items": True}
    gated = {"attention_gate": True, "separate_gate": True, "qk_norm": "unscaled"}
    normed = {"embedding_norm": True, "post_norm_eps": 1e-3, "norm_offset": 1.0}
    normed |= {"pre_norms": False, "post_norms": True, "plain_head_norm": True}
    llm = replace(config.model.llm, **scaled, **gated, **normed)
    encoders = config.model.encoders | {"vision": grouped}
    changed = replace(config.model, llm=llm, encoders=encoders)
    assert_same_gradients(replace(config, model=changed), tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "units",
    ["context of four", "context, several ranks", "tokens of encoders divided", "all in stages"],
)
def test_chunks_and_a_tower_with_rope_beside_vectors_have_the_gradients_of_one_program(
    units, tmp_path
):
    config = with_experts(config_of(units))
    llm, vision = config.model.llm, config.model.encoders["vision"]
    experts = replace(llm.experts, scores="sigmoid", normalized=False, weighted="inputs")
    growing = {"query_growth": 0.5, "query_span": 4, "growing": "unrotated", "unrotated": (2,)}
    chunks = {"window": 5, "windowed": (0, 1, 3), "chunked": True, "qk_norm": "rotated"}
    llm = replace(llm, experts=experts, rope_neighbours=True, **growing, **chunks)
    positions = LearnedGrid(16, 16, theta=100.0, class_last=True)
    connector = replace(vision.connector, output_width=20, output_activation=True)
    vision = replace(vision, positions=positions, class_token=True, connector=connector)
    encoders = config.model.encoders | {"vision": vision}
    changed = replace(config.model, llm=llm, encoders=encoders)
    assert_same_gradients(replace(config, model=changed), tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["all in stages", "tokens of encoders divided", "unequal ranks"])
def test_connectors_that_read_several_layers_have_the_gradients_of_one_program(units, tmp_path):
    config = config_of(units)
    encoders = dict(config.model.encoders)
    vision = encoders["vision"]
    read = {"feature_layers": (1, 0, 1), "head_norm": False}
    encoders["vision"] = replace(vision, layers=2, **read)
    config = replace(config, model=replace(config.model, encoders=encoders))
    assert_same_gradients(config, tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "units", ["all in stages", "tokens of encoders divided", "unequal ranks", "tensor parallel"]
)
def test_a_merger_inside_a_tower_has_the_gradients_of_one_program(units, remat, tmp_path):
    config = config_of(units, dropout=0.2, remat=remat)
    encoders = dict(config.model.encoders)
    merger = {"merge_after": 1, "positions": FractionalGrid(3), "layers": 4}
    encoders["vision"] = replace(encoders["vision"], **merger)
    config = replace(config, model=replace(config.model, encoders=encoders))
    assert_same_gradients(config, tmp_path, "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "units", ["all in stages", "tokens of encoders divided", "unequal ranks", "tensor parallel"]
)
def test_queries_inside_a_tower_have_the_gradients_of_one_program(
    units, remat, tmp_path, monkeypatch
):
    facts, item = EmbeddedDataset.facts, EmbeddedDataset.item
    side = lambda index, number: 8 * (1 + (index + number) % 2)  # noqa: E731

    def squares(dataset, index):
        lengths = facts(dataset, index)
        sizes = [
            (name, (side(index, n),) * 2 if name == "vision" else size)
            for n, (name, size) in enumerate(lengths.items)
        ]
        return replace(lengths, items=tuple(sizes))

    def square(dataset, index, number):
        made = item(dataset, index, number)
        n = side(index, number)
        return made if made.ndim < 3 else np.resize(made, (n, n, 1))

    monkeypatch.setattr(EmbeddedDataset, "facts", squares)
    monkeypatch.setattr(EmbeddedDataset, "item", square)
    config = config_of(units, remat=remat)
    encoders = dict(config.model.encoders)
    vision = encoders["vision"]
    queries = QueryLayers(24, 2, 2, 20, sides=(1, 2), merger_widths=(8, 12))
    positions = LearnedGrid(5, 5, interpolation="antialiased")
    own = {"layers": 5, "merge_after": 3, "query_layers": queries, "relative_side": 8}
    own |= {"positions": positions, "window": 3, "windowed": (0, 2), "patch": 2}
    encoders["vision"] = replace(vision, **own, connector=replace(vision.connector, merge=1))
    config = replace(config, model=replace(config.model, encoders=encoders))
    assert_same_gradients(config, tmp_path, "auto")


def test_between_stages_with_context_everything_goes_once_and_each_device_gets_its_part():
    pipeline = make_pipeline(config_of("context"))
    shape = 12, 8, 4  # rows, tokens, width
    for name, (consumer,) in pipeline.passes.consumers.items():
        (producer,) = pipeline.passes.producers[name]
        source, target = (pipeline.programs[n].layouts[name] for n in (producer, consumer))
        arrived = Counter()
        for move in Transfer(shape, np.float32, source, target).moves:
            arrived[move.target] += math.prod(last - first for first, last in move.placed)
        assert set(arrived.values()) == {math.prod(shape) // 2}
        assert set(arrived) == {device.id for device in pipeline.stages[consumer].mesh.devices.flat}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("units", "schedule", "remat", "frozen"),
    [
        ("deep", "eager", "full", ("vision",)),
        ("deep", "gpipe", "none", ("vision.connector",)),
        ("deep", "auto", "none", ("vision", "vision.connector")),
        ("deeper", "auto", "full", ()),
        ("deep, unequal ranks", "auto", "full", ()),
        ("deep, one encoder stage", "eager", "none", ()),
        ("deep, with the llm", "auto", "none", ()),
        ("deep, interleaved", "auto", "full", ("vision",)),
    ],
)
def test_a_deepstack_is_cut_anywhere(units, schedule, remat, frozen, tmp_path):
    config = deepstack_config_of(units, remat=remat, frozen=frozen, dropout=0.1)
    pipeline = assert_same_gradients(config, tmp_path, schedule)
    programs = {
        stage.name: program
        for stage, program in zip(pipeline.stages, pipeline.programs, strict=True)
    }
    # Between a frozen encoder's layers no gradient passes, whatever its connectors send to the LLM.
    layers = "vision" not in frozen
    encoder = [program for name, program in programs.items() if name.startswith("vision")]
    assert [bool(program.gradient_inputs) for program in encoder] == [
        False,
        *[layers] * (len(encoder) - 1),
    ]
    skipped = {
        name for program in programs.values() for name in program.stage.inputs if "deeper" in name
    }
    assert skipped == {f"vision.deeper.{n}" for n in range(3)}
    assert (
        len(
            {
                (*pipeline.passes.producers[name], *pipeline.passes.consumers[name])
                for name in skipped
            }
        )
        > 1
    )


LORA = {"adapters": LoraConfig(("llm.*.attention.*",), 4)}
CONNECTORS = ("vision.connector", "audio.connector")


@pytest.mark.default_cases("encoders")
@pytest.mark.parametrize(
    ("frozen", "lora", "backward", "edges"),
    [
        # With towers frozen, stages of encoders run backward for their connectors.
        (("vision", "audio"), {}, "vision audio llm[0:2] llm[2:4]", "vision audio llm.2"),
        (("vision", "audio", *CONNECTORS), {}, "llm[0:2] llm[2:4]", "llm.2"),
        (("llm",), {}, "vision audio llm[0:2] llm[2:4]", "vision audio llm.2"),
        (
            ("vision", "audio", "llm", "vision.connector"),
            {},
            "audio llm[0:2] llm[2:4]",
            "audio llm.2",
        ),
        (("vision", "audio", *CONNECTORS), LORA, "llm[0:2] llm[2:4]", "llm.2"),
        (("vision", "audio", *CONNECTORS, "llm"), {}, "", ""),
    ],
    ids=["towers", "encoders", "llm", "all but a connector", "lora", "all"],
)
def test_nothing_runs_backward_where_no_gradient_is_wanted(frozen, lora, backward, edges, tmp_path):
    config = one_shape(config_of("by module", frozen))
    config = replace(config, model=replace(config.model, lora=lora))
    pipeline = assert_same_gradients(config, tmp_path) if backward else make_pipeline(config)
    runs = [
        stage.name
        for stage, p in zip(pipeline.stages, pipeline.programs, strict=True)
        if p.has_backward
    ]
    assert runs == backward.split()
    assert sorted(name for p in pipeline.programs for name in p.gradient_inputs) == sorted(
        edges.split()
    )


@pytest.mark.exhaustive
def test_gradients_beside_quantised_weights_are_those_of_one_program(tmp_path):
    config = config_of("by module")
    llm = replace(config.model.llm, quantize="int8")
    config = replace(config, model=replace(config.model, llm=llm, lora=LORA))
    assert_same_gradients(config, tmp_path)


@pytest.mark.exhaustive
def test_products_in_float8_are_those_of_one_program(tmp_path):
    config = config_of("by module")
    llm = replace(config.model.llm, fp8="linears", layers=3)
    # A sum in another order rounds now and then to the other neighbour.
    assert_same_gradients(
        replace(config, model=replace(config.model, llm=llm)), tmp_path, tolerance=0.01
    )


SCHEDULED = {
    "llm": Rates(frozen_until=3, frozen_from=12),
    "vision": Rates(frozen_from=7),
    "norms": Rates(parameters=("*.norm*",), frozen_until=5),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(offload=True, over_data=True),
        Muon(),
        AdamW(modules=SCHEDULED),
        Muon(modules=SCHEDULED),
    ],
    ids=["adamw", "muon", "adamw, freezing", "muon, freezing"],
)
def test_updates_are_those_of_one_program(optimizer, tmp_path):
    config = config_of("by module", optimizer=optimizer)
    config = replace(config, training=replace(config.training, clip=0.05, steps=20))
    steps = steps_of(config, tmp_path, 20)
    assert_updates_of_one_mesh(config, make_pipeline(config), steps)


def assert_updates_of_one_mesh(
    config: Config, pipeline: Executor, steps: Sequence[Sequence[Microbatch]]
) -> State:
    """Its losses, norms and parameters are one device's, step by step; returns its last state."""
    optimizer = replace(config.optimizer, offload=False)
    one = make_executor(replace(config, optimizer=optimizer), MeshConfig(1))
    state, accumulated = one.init(jax.random.key(0)), one.zeros()
    staged, sums = pipeline.init(jax.random.key(0)), pipeline.zeros()
    for number, batches in enumerate(steps):
        hyper = hyperparameters(config, number)
        put = [one.put(batch) for batch in batches]
        state, accumulated, expected = one.step(state, accumulated, put, hyper)
        put = [pipeline.put(batch, n) for n, batch in enumerate(batches)]
        staged, sums, report = pipeline.step(staged, sums, put, hyper)
        np.testing.assert_allclose(report.losses.loss.sum(), expected.losses.loss.sum(), rtol=1e-4)
        np.testing.assert_allclose(
            report.gradient_norm, expected.gradient_norm, rtol=1e-4 if number else 1e-6
        )
        assert report.gradient_norm > config.training.clip
        assert np.array_equal(report.losses.weight, expected.losses.weight)
        assert bool(report.finite)
        assert bool(report.agreed)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(staged.stages[0].optimizer) if x.ndim}
    assert ("pinned_host" in kinds) == config.optimizer.offload
    (table,) = (
        s.trainable["llm"]["embed"]["weight"]
        for s in staged.stages
        if "embed" in s.trainable.get("llm", {})
    )
    assert np.array_equal(
        jax.device_get(table), jax.device_get(staged.copies[0]["llm"]["embed"]["weight"])
    )
    return staged


@pytest.fixture(scope="module")
def spoilable(tmp_path_factory):
    config = config_of("by module")
    return config, make_pipeline(config), steps_of(config, tmp_path_factory.mktemp("data"), 1)[0]


@pytest.mark.exhaustive
def test_a_step_that_is_not_finite_updates_no_stage_and_its_rows_are_found(spoilable):
    config, pipeline, batches = spoilable
    row = int(np.flatnonzero((batches[0].items["audio"].item >= 0).any(1))[0])
    values = batches[0].items["audio"].values.copy()
    values[row] = np.nan
    audio = batches[0].items["audio"]._replace(values=values)
    bad = batches[0]._replace(items=batches[0].items | {"audio": audio})
    state = pipeline.init(jax.random.key(0))
    before = jax.device_get(state)
    put = [pipeline.put(batch) for batch in (bad, *batches[1:])]
    after, _, report = pipeline.step(state, pipeline.zeros(), put, hyperparameters(config, 0))
    assert not bool(report.finite)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(after))

    owners = np.unique(batches[0].items["audio"].owner[row])
    assert {*owners[owners >= 0].tolist()} <= {
        *pipeline.find_bad(after, put, hyperparameters(config, 0), None, [])
    }


@pytest.mark.exhaustive
def test_samples_that_a_process_could_not_read_have_no_weight(spoilable):
    config, pipeline, batches = spoilable
    sample = int(batches[0].text.owner.max())
    state = pipeline.init(jax.random.key(0))
    put = [pipeline.put(batch) for batch in batches]
    hyper = hyperparameters(config, 0)
    _, _, report = pipeline.step(
        state, pipeline.zeros(), put, hyper, ProcessReport(unreadable=[sample])
    )
    left_out = sum(float(b.text.weight[b.text.owner == sample].sum()) for b in batches)
    assert left_out > 0
    np.testing.assert_allclose(report.losses.weight.sum(), weight(batches) - left_out, rtol=1e-6)
    assert report.unreadable[0] == sample


@pytest.mark.exhaustive
def test_no_residual_has_the_shape_of_a_weight(tmp_path):
    config = config_of("by module", remat="none")
    # A width that no row has as its length.
    towers = {
        name: replace(encoder, mlp_width=52) for name, encoder in config.model.encoders.items()
    }
    llm = replace(config.model.llm, mlp_width=52)
    config = replace(config, model=replace(config.model, llm=llm, encoders=towers))
    config = replace(config, training=replace(config.training, precision="bfloat16"))
    pipeline = make_pipeline(config)
    (batches,) = steps_of(config, tmp_path, 1)
    state = pipeline.init(jax.random.key(0))
    matrices = {
        leaf.shape
        for leaf in jax.tree.leaves(pipeline.model.abstract)
        if leaf.ndim >= 2 and min(leaf.shape[-2:]) >= 16
    }
    put = pipeline.put(batches[0])
    made: dict[str, jax.Array] = {}
    for number in pipeline.graph.topological:
        program = pipeline.programs[number]
        if program.is_sink:
            continue
        inputs = {
            name: jax.device_put(made[name], program.layouts[name]) for name in program.stage.inputs
        }
        parameters = pipeline._parameters(state, number)
        outputs, residuals, _ = program.forward(*parameters, inputs, put[number], None, {}, None)
        made |= outputs
        assert not [leaf.shape for leaf in residuals.leaves if leaf.shape in matrices], (
            pipeline.stages[number].name
        )


@pytest.mark.exhaustive
def test_steps_of_any_number_of_microbatches_in_any_compiled_shape_compile_nothing(tmp_path):
    config = config_of("unequal ranks")
    microbatches = [batch for batches in steps_of(config, tmp_path, 6) for batch in batches]
    by_shape = {tuple(x.shape for x in jax.tree.leaves(batch)): batch for batch in microbatches}
    assert len(by_shape) > 1
    pipeline = make_pipeline(config)
    state, sums = pipeline.init(jax.random.key(0)), pipeline.zeros()
    # As in a run: the update is compiled ahead into the cache on disk.
    enable_compilation_cache(tmp_path / "programs")
    pipeline.compile(state, list(by_shape.values()), hyperparameters(config, 0))
    programs = CompileCounter()
    one_of_each = list(by_shape.values())
    for number, batches in enumerate(
        (microbatches[:4], one_of_each[:1], one_of_each * 3, microbatches[:1], one_of_each)
    ):
        hyper = hyperparameters(config, number)
        state, sums, report = pipeline.step(
            state, sums, [pipeline.put(batch) for batch in batches], hyper
        )
        assert bool(report.finite)
        assert programs.compiled == 0, number
