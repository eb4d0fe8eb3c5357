"""Tokens that go to the devices of their experts and back: outputs and gradients of one device, wherever they go."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed import assert_trees_close

from mmjax.config import DecoderConfig, ExpertsConfig, MeshConfig
from mmjax.models.experts import Experts
from mmjax.models.remat import recomputed_layer
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh
from mmjax.planning.exchange_time import expert_bytes

WIDTH, ROWS, LENGTH, COUNT = 20, 8, 12, 16
EXPERTS = ExpertsConfig((0,), count=COUNT, per_token=2, width=8)
MESHES = {
    "expert=8": MeshConfig(1, expert=8),
    "data=2 x expert=4": MeshConfig(2, expert=4),
    "fsdp=2 x expert=4": MeshConfig(1, fsdp=2, expert=4),
    "expert=4 x context=2": MeshConfig(1, expert=4, context=2),
    "expert=4 x tensor=2": MeshConfig(1, expert=4, tensor=2),
    "expert=4 x tensor=2, tokens divided": MeshConfig(
        1, expert=4, tensor=2, sequence_parallel="on"
    ),
}
# The two experts of each token, by its row and its place there.
ROUTES = {
    "evenly": lambda row, place: ((5 * row + 3 * place) % COUNT, (5 * row + 3 * place + 7) % COUNT),
    "to two experts of one device": lambda row, place: (4, 5),
    "to two experts of two devices": lambda row, place: (3, 15),
    "unevenly": lambda row, place: (place % (row + 1), 15 - place % 3),
}


def tokens_of(routes: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that a router of ones on its diagonal sends so, and which of them are no padding."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    for row, place in np.ndindex(ROWS, LENGTH):
        first, second = ROUTES[routes](row, place)
        x[row, place, first] += 9
        x[row, place, second] += 8
    return x, rng.random((ROWS, LENGTH)) < 0.8


@cache
def parameters_and_program(mesh: str | None, recomputed: bool = False):
    """Compile a layer's output, its routing, and the gradients of its parameters and tokens."""
    module = Experts(EXPERTS, WIDTH, "silu", nnx.Rngs(0))
    module.router.weight[...] = jnp.eye(WIDTH, COUNT)
    graph, params = nnx.split(module)
    direction = np.random.default_rng(1).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)

    def loss(params, x, valid):
        layer = lambda params, x: nnx.merge(graph, params)(x, valid)  # noqa: E731
        with recomputed_layer(recomputed):
            out, routing = (jax.checkpoint(layer) if recomputed else layer)(params, x)
        return (out * direction).sum(), (out, routing)

    def run(params, x, valid):
        gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)
        if mesh is None:
            return gradients(params, x, valid)
        with activations_on(make_mesh(MESHES[mesh], jax.devices()), ShardingRules.of(MESHES[mesh])):
            return gradients(params, x, valid)

    return params, jax.jit(run).lower(params, *tokens_of("evenly")).compile()


def result(mesh: str | None, x: np.ndarray, valid: np.ndarray, recomputed: bool = False):
    """The layer's output and gradients, and its routing."""
    params, program = parameters_and_program(mesh, recomputed)
    (_, (out, routing)), gradients = program(params, x, valid)
    return (out, gradients), routing


def turns_of(routes: str, valid: np.ndarray) -> int:
    """The turns in which eight devices, each with a row, send their longest list of tokens, by a loop."""
    lists = np.zeros((ROWS, 8), int)
    for row, place in np.argwhere(valid):
        for device in {expert // 2 for expert in ROUTES[routes](row, place)}:
            lists[row, device] += 1
    return math.ceil(lists.max() / EXPERTS.sent_at_once(LENGTH, 8))


@pytest.mark.default_cases("expert=8", "expert=4 x tensor=2, tokens divided")
@pytest.mark.parametrize("mesh", MESHES)
def test_outputs_and_gradients_are_those_of_one_device_wherever_tokens_go(mesh):
    turns = []
    for routes in ROUTES:
        x, valid = tokens_of(routes)
        for some in (valid, valid & False):
            wanted, one = result(None, x, some)
            found, routing = result(mesh, x, some)
            assert_trees_close(found, wanted, 1e-5)
            np.testing.assert_array_equal(routing.tokens, one.tokens)
            assert routing.turns == turns_of(routes, some) or mesh != "expert=8"
            turns.append(float(routing.turns))
    assert max(turns) > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
def test_a_layer_that_is_recomputed_sends_nothing_twice(mesh):
    x, valid = tokens_of("unevenly")
    assert_trees_close(result(mesh, x, valid, recomputed=True)[0], result(None, x, valid)[0], 1e-5)
    sends = [
        parameters_and_program(mesh, again)[1].as_text().count(" all-to-all(")
        for again in (False, True)
    ]
    assert sends == [10, 10]


def test_tokens_are_sent_by_all_to_all_and_as_many_bytes_as_planned():
    """Once to every device, with room for 1.25 times what an even router sends it: 4 of 12 tokens."""
    text = parameters_and_program("expert=8")[1].as_text()
    assert " all-gather(" not in text
    assert EXPERTS.sent_at_once(LENGTH, 8) == 4
    sent = [
        re.findall(r"[fs]32\[([\d,]+)\]", line.split(" all-to-all(")[0])
        for line in text.splitlines()
        if " all-to-all(" in line
    ]
    elements = sum(math.prod(map(int, shape.split(","))) for shapes in sent for shape in shapes)
    llm = replace(DecoderConfig(1, WIDTH, 1, 1, WIDTH, 8, vocab=8), experts=EXPERTS)
    assert 4 * elements == expert_bytes(llm, LENGTH, 8, activation=4)
