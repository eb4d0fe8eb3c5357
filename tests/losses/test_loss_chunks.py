"""A loss made in parts trains as one made whole, on any mesh, and holds only one part's logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from compilation import optimized
from packed import model_outputs
from tiny_run import (
    MESHES,
    VOCAB,
    gradients,
    load_steps,
    make_executor,
    scattered,
    state_with,
    stderr_of,
    tiny_config,
    train,
    worst_leaf,
)

from mmjax.autotune.compile_run import put_shapes
from mmjax.batch import Microbatch, TextBatch
from mmjax.config import Config, CrossEntropy, MeshConfig, ModelConfig
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.models.model import Model
from mmjax.runtime.devices import mesh_topology
from mmjax.runtime.executor import Executor

ALONE, SHARED = MESHES["one device"], MESHES["data=2 x fsdp=2 x tensor=2"]
RANKS = MeshConfig(4, tensor=2)  # on which parts are of the tokens


def config(
    chunks: int, tied: bool = True, precision: str = "float32", encoders: bool = True
) -> Config:
    base = tiny_config()
    llm = replace(base.model.llm, tied=tied)
    model = replace(base.model, llm=llm) if encoders else ModelConfig(llm)
    return replace(
        base, model=model, training=replace(base.training, loss_chunks=chunks, precision=precision)
    )


def of_text(batch: Microbatch) -> Microbatch:
    """The same rows, with the embeddings of placeholders where items were."""
    return Microbatch(batch.text._replace(slots={}, send={}), {})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Callable[[Topology], list[tuple[Microbatch, ...]]]:
    """The first steps, as they are planned for these ranks."""
    return cache(
        lambda topology: load_steps(config(1), tmp_path_factory.mktemp("data"), 10, topology)
    )


@cache
def parameters(tied: bool, encoders: bool = True) -> Any:
    return scattered(make_executor(config(1, tied, encoders=encoders), ALONE))


@pytest.fixture(scope="module")
def first(loaded) -> Callable[..., tuple[float, Any]]:
    """The loss and the gradients of the first step's first microbatch on one device, of the LLM alone."""

    @cache
    def run(chunks: int, tied: bool = True, precision: str = "float32") -> tuple[float, Any]:
        executor = make_executor(config(chunks, tied, precision, encoders=False), ALONE)
        batch = of_text(loaded(ONE_RANK)[0][0])
        found = gradients(executor, state_with(executor, parameters(tied, encoders=False)), [batch])
        return found.losses.loss.sum(), found.gradients

    return run


@pytest.fixture(scope="module")
def rounding(loaded, first) -> Callable[[bool], float]:
    """By how much the whole logits' gradients differ from themselves, when LLVM may order their sums otherwise."""

    @cache
    def run(tied: bool) -> float:
        with optimized():
            executor, batch = (
                make_executor(config(1, tied, encoders=False), ALONE),
                of_text(loaded(ONE_RANK)[0][0]),
            )
            found = gradients(
                executor, state_with(executor, parameters(tied, encoders=False)), [batch]
            )
        return worst_leaf(found.gradients, first(1, tied)[1])[0]

    return run


@pytest.mark.default_cases("4-tied")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("chunks", [2, 4, VOCAB])
def test_loss_and_every_gradient_are_those_of_the_whole_logits_to_their_own_rounding(
    first, rounding, chunks, tied
):
    (found, gradient), (wanted, whole) = first(chunks, tied), first(1, tied)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert rounding(tied) < 3e-6
    assert worst_leaf(gradient, whole) <= (max(1e-6, rounding(tied)), "~")


@pytest.mark.exhaustive
def test_in_bfloat16_they_are_as_close_as_rounding_allows(first):
    """Parts are hardly further from float32 than the whole is: that is rounding, in which versions of XLA differ."""
    (found, gradient), (wanted, whole) = (first(chunks, precision="bfloat16") for chunks in (4, 1))
    exact = first(1)[1]
    assert found == pytest.approx(wanted, rel=1e-5)
    assert worst_leaf(gradient, exact)[0] < 1.1 * worst_leaf(whole, exact)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "mesh",
    [SHARED, RANKS, MESHES["data=8"], MESHES["context=4"]],
    ids=["2 x 2 x 2", "data=4 x tensor=2", "data=8", "context=4"],
)
def test_on_any_mesh_they_are_those_of_one_device_and_nothing_is_replicated(loaded, mesh, tied):
    # With smoothing, whose sums are over the whole vocabulary too.
    smoothed = replace(config(2, tied), loss=CrossEntropy(label_smoothing=0.1))
    alone, shared = make_executor(smoothed, ALONE), make_executor(smoothed, mesh)
    wanted = gradients(alone, state_with(alone, parameters(tied)), loaded(ONE_RANK)[0])
    with stderr_of() as written:
        planned = loaded(mesh_topology(shared.mesh, mesh))[0]
        found = gradients(shared, state_with(shared, parameters(tied)), planned)
    assert found.losses.loss.sum() == pytest.approx(wanted.losses.loss.sum(), rel=1e-5)
    assert worst_leaf(found.gradients, wanted.gradients) < (1e-5, "")
    assert "rematerialization" not in written[0]


@pytest.mark.exhaustive
def test_ten_updates_give_the_losses_of_the_whole_logits(loaded):
    def losses(chunks: int) -> np.ndarray:
        executor = make_executor(config(chunks), ALONE)
        return train(
            config(chunks), executor, state_with(executor, parameters(True)), loaded(ONE_RANK)
        ).losses

    np.testing.assert_allclose(losses(4), losses(1), rtol=1e-5)


# sizes that nothing else in the program has, on a device or whole
ROWS, LENGTH, LARGE = 8, 24, 1408


def wide_text() -> tuple[Config, Microbatch]:
    """A text model whose vocabulary is far larger than anything else, and a batch for it."""
    base = tiny_config()
    model = ModelConfig(replace(base.model.llm, vocab=LARGE, tied=False))
    row = np.zeros((ROWS, LENGTH), np.int32)
    text = TextBatch(row, row, row.astype(np.float32), *[row] * 9, {}, {})
    return replace(base, model=model), Microbatch(text, {})


def compiled(mesh: MeshConfig, chunks: int) -> tuple[Executor, str]:
    made, batch = wide_text()
    executor = make_executor(
        replace(made, training=replace(made.training, loss_chunks=chunks)), mesh
    )
    trainable = executor.states[0].abstract.trainable
    args = (
        put_shapes(trainable, executor.programs[0].shardings[0]),
        {},
        executor.sums,
        *executor.put(batch),
        {"llm": np.float32(1)},
    )
    return executor, executor.programs[0].forward_backward.lower(*args).compile().as_text()


def shapes(program: str) -> set[tuple[int, ...]]:
    """Of every float32 value, without dimensions of 1, in ascending order."""
    found = (map(int, dims.split(",")) for dims in re.findall(r"f32\[([\d,]+)\]", program))
    return {tuple(sorted(n for n in shape if n > 1)) for shape in found}


@pytest.mark.default_cases("2 x 2 x 2", "data=4 x tensor=2")
@pytest.mark.parametrize(
    "mesh",
    [ALONE, MESHES["fsdp=8"], SHARED, RANKS],
    ids=["one device", "fsdp=8", "2 x 2 x 2", "data=4 x tensor=2"],
)
def test_no_device_ever_holds_float32_logits_of_its_whole_vocabulary(mesh):
    for chunks in (1, 4):
        executor, program = compiled(mesh, chunks)
        ranks, tensor = mesh.data * mesh.fsdp, mesh.tensor
        positions, vocab = ROWS // ranks * LENGTH, LARGE // tensor
        rows = {(ROWS // ranks, LENGTH), (positions,)}
        # A part is of the tokens, or of the vocabulary where the table is gathered.
        of_tokens = mesh.fsdp == 1
        parts = {1: (rows, vocab), 4: ({(positions // 4,)} if of_tokens else rows, vocab)}
        if not of_tokens:
            parts[4] = rows, vocab // 4
        logits = {
            n: {tuple(sorted((*(r for r in of if r > 1), columns))) for of in shapes}
            for n, (shapes, columns) in parts.items()
        }
        assert bool(shapes(program) & logits[1]) == (chunks == 1)
        assert bool(shapes(program) & logits[4]) == (chunks == 4)
        assert executor.objective.chunks == chunks


@pytest.mark.parametrize("mesh", [RANKS, MESHES["data=8"]], ids=["data=4 x tensor=2", "data=8"])
def test_ranks_reduce_the_gradient_of_the_output_table_once_and_not_with_every_part(mesh):
    _, program = compiled(mesh, 4)
    width = wide_text()[0].model.llm.width
    sizes = [
        int(np.prod([int(n) for n in dims.split(",")]))
        for line in program.splitlines()
        if " all-reduce(" in line or " all-reduce-start(" in line or " reduce-scatter(" in line
        for dims in re.findall(r"f32\[([\d,]+)\]", line.split(" all-reduce")[0])
    ]
    # of the embedding, which is not tied, and of the output table
    assert sizes.count(LARGE // mesh.tensor * width) == 2
    loops = [body for name, body in bodies(program).items() if f"body=%{name}" in program]
    assert loops
    assert not any(
        f"f32[{LARGE // mesh.tensor},{width}]" in line.split(" all-reduce")[0]
        for body in loops
        for line in body.splitlines()
        if " all-reduce" in line
    )


def bodies(program: str) -> dict[str, str]:
    """The text of every computation of a program, by name."""
    return dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", program, re.M | re.S))


def test_under_fsdp_only_a_part_of_the_output_table_is_gathered():
    _, program = compiled(MESHES["fsdp=8"], 4)
    gathered = re.findall(r"= \(?f32\[([\d,]+)\][^=]* all-gather", program)
    width = wide_text()[0].model.llm.width
    sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in gathered]
    assert LARGE // 4 * width in sizes
    assert sizes.count(LARGE * width) <= 1  # the table of the tokens that come in


@pytest.mark.exhaustive
def test_the_factors_of_the_logits_have_them_as_their_scores(loaded):
    model = Model.build(config(1).model, np.float32)
    batch, params = loaded(ONE_RANK)[0][0], parameters(True)
    hidden, table, *_ = jax.jit(partial(model_outputs, model))(params, batch)
    logits = jax.jit(model.logits)(params, batch)
    np.testing.assert_allclose(np.einsum("rtd,vd->rtv", hidden, table), logits, atol=1e-5)
