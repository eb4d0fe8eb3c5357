from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthetic import rearrange

from mmjax.balance.exchange import Rearrangement, exchange_tables
from mmjax.balance.phases import largest_transfer
from mmjax.config import MeshConfig
from mmjax.parallel.encoder_exchange import dispatch
from mmjax.parallel.sharding import make_mesh, rows_sharding

RANKS, HIDDEN, LENGTH, CAPACITY, CHUNK = 8, 7, 64, 96, 24


def some_rearrangement(seed: int, peers: int = RANKS, share: float = 1.0) -> Rearrangement:
    """A dozen items, `share` of them on another rank of their node afterwards."""
    rng = np.random.default_rng(seed)
    length, source = rng.integers(0, 8, 40), rng.integers(0, RANKS, 40)
    away = source // peers * peers + rng.integers(0, peers, 40)
    return rearrange(length, source, np.where(rng.random(40) < share, away, source))


def tables_of(
    moved: Rearrangement, chunk: int, peers: int = RANKS
) -> tuple[np.ndarray, np.ndarray]:
    nodes = [range(k, k + peers) for k in range(0, RANKS, peers)]
    found = [exchange_tables(moved, chunk, CAPACITY, node, node) for node in nodes]
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def moved_by_hand(moved: Rearrangement, tokens: np.ndarray) -> np.ndarray:
    out = np.zeros((RANKS, CAPACITY, HIDDEN), np.float32)
    for i, n in enumerate(moved.length):
        a, b = moved.source_offset[i], moved.target_offset[i]
        out[moved.target[i], b : b + n] = tokens[moved.source[i], a : a + n]
    return out


MESH = make_mesh(MeshConfig(data=4, fsdp=2), jax.devices()[:RANKS])
TOKENS = np.random.default_rng(0).standard_normal((RANKS, LENGTH, HIDDEN)).astype(np.float32)


@pytest.mark.default_cases("8")
@pytest.mark.parametrize("peers", [RANKS, 4, 2, 1])
def test_every_token_arrives_where_the_rearrangement_wants_it_and_its_gradient_comes_back(peers):
    put = partial(jax.device_put, device=rows_sharding(MESH))
    for seed in range(4):
        moved = some_rearrangement(seed, peers)
        send, gather = map(put, tables_of(moved, CHUNK, peers))
        arrived, back = jax.vjp(lambda x, s=send, g=gather: dispatch(x, s, g, MESH), put(TOKENS))
        np.testing.assert_array_equal(arrived, moved_by_hand(moved, TOKENS))

        weight = np.random.default_rng(seed).standard_normal(arrived.shape).astype(np.float32)
        (gradient,) = back(put(weight))
        expected = np.zeros_like(TOKENS)
        for i, n in enumerate(moved.length):
            a, b = moved.source_offset[i], moved.target_offset[i]
            expected[moved.source[i], a : a + n] += weight[moved.target[i], b : b + n]
        np.testing.assert_array_equal(gradient, expected)


def collectives(send: np.ndarray, gather: np.ndarray) -> dict[str, int]:
    """Of a compiled forward and backward pass."""

    def loss(x: jax.Array, send: jax.Array, gather: jax.Array) -> jax.Array:
        return (jnp.tanh(dispatch(x, send, gather, MESH)) ** 2).sum()

    arrays = jax.device_put((TOKENS, send, gather), rows_sharding(MESH))
    text = jax.jit(jax.value_and_grad(loss)).lower(*arrays).compile().as_text()
    return {
        name: text.count(f" {name}(") for name in ("all-to-all", "all-gather", "collective-permute")
    }


def test_there_is_one_all_to_all_forward_and_one_backward_and_no_all_gather():
    found = collectives(*tables_of(some_rearrangement(0), CHUNK))
    assert found == {"all-to-all": 2, "all-gather": 0, "collective-permute": 0}


def test_where_nothing_moves_there_is_no_collective():
    moved = some_rearrangement(0, share=0.0)
    assert largest_transfer(moved.source, moved.target, moved.length, RANKS) == 0
    assert set(collectives(*tables_of(moved, 0)).values()) == {0}


def test_another_plan_compiles_nothing():
    program = jax.jit(lambda x, s, g: dispatch(x, s, g, MESH))
    for seed in range(5):
        program(
            *jax.device_put(
                (TOKENS, *tables_of(some_rearrangement(seed), CHUNK)), rows_sharding(MESH)
            )
        )
    assert program._cache_size() == 1


@pytest.mark.parametrize("peers", [RANKS, 4, 1])
def test_ranks_that_are_all_on_one_device_exchange_the_same(peers):
    for chunk, share in ((CHUNK, 1.0), (0, 0.0)):
        moved = some_rearrangement(3, peers, share)
        send, gather = tables_of(moved, chunk, peers)
        np.testing.assert_array_equal(
            dispatch(TOKENS, send, gather, None), moved_by_hand(moved, TOKENS)
        )


def test_a_ragged_exchange_is_compiled_for_gpus_with_the_sizes_that_the_tables_hold():
    """A CPU cannot run it: what XLA is given is read, forward and backward."""
    arrays = (TOKENS, *tables_of(some_rearrangement(0, 4), CHUNK, 4))
    put = jax.device_put(arrays, rows_sharding(MESH))
    program = jax.jit(jax.grad(lambda x, s, g: (dispatch(x, s, g, MESH, "ragged") ** 2).sum()))
    text = program.trace(*put).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @ragged_all_to_all") == 2
    assert f"tensor<{4 * CHUNK}x{HIDDEN}xf32>" in text  # all chunks, one after the other
    sizes = [line for line in text.splitlines() if '"stablehlo.all_to_all"' in line]
    assert sizes
    assert all("xi32>" in line for line in sizes)  # only counts travel padded


def test_a_mesh_of_another_number_of_ranks_is_refused():
    send, gather = np.zeros((4, 4, 1), np.int32), np.zeros((4, CAPACITY), np.int32)
    with pytest.raises(ValueError, match="a batch made for 4 ranks cannot run on a mesh of"):
        dispatch(TOKENS[:4], send, gather, MESH)


def test_peers_that_do_not_divide_the_ranks_are_refused():
    send, gather = np.zeros((RANKS, 3, 1), np.int32), np.zeros((RANKS, CAPACITY), np.int32)
    with pytest.raises(ValueError, match="3 ranks cannot exchange among themselves in a mesh of 8"):
        dispatch(TOKENS, send, gather, MESH)
