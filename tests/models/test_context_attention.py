"""Attention over rows whose tokens lie on several devices, in any order, against one device with all scores at once."""

import re
from dataclasses import replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import random_case

from mmjax.balance.mask_work import block_work
from mmjax.balance.token_blocks import block_samples, distribute_samples, token_order
from mmjax.batch import MaskSpec
from mmjax.benchmarks.baselines.token_blocks import KINDS, visible_keys
from mmjax.config import MeshConfig
from mmjax.models.attention import attention, plan_attention
from mmjax.models.blockwise_attention import DEFAULT_SCORING, Scoring
from mmjax.models.context_attention import MAX_PIECES, pieces
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh

RULES = replace(ShardingRules(), context_attention="gather")
RAGGED = replace(RULES, exchange="ragged")


def gradients(backend, scoring):
    def loss(q, k, v, sinks, mask, weight):
        plan = plan_attention(mask, backend, q.shape[3], (q.shape[2], k.shape[2]), q.dtype)
        out = attention(q, k, v, mask, backend, scoring, plan, sinks=sinks)
        return (out * weight).sum(), out

    return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))


def shuffled(case, seed, block):
    """The same rows with their blocks of tokens in a random order."""
    q = case[0]
    blocks = np.random.default_rng(seed).permutation(q.shape[1] // block)
    order = (blocks[:, None] * block + np.arange(block)).ravel()
    return jax.tree.map(lambda x: x[:, order], case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("backend", ["dense", "blockwise", "flash"])
@pytest.mark.parametrize("form", ["gather", "heads"])
@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(context=2, data=1),
        MeshConfig(context=4, data=2),
        MeshConfig(context=8, data=1),
        MeshConfig(data=1, fsdp=2, context=2, tensor=2),
    ],
    ids=["2", "data 2 x 4", "8", "fsdp 2 x 2 x tensor 2"],
)
def test_rows_over_several_devices_attend_as_on_one(mesh, form, backend, window, has_sinks):
    devices = prod(max(1, getattr(mesh, axis)) for axis in ("data", "fsdp", "context", "tensor"))
    heads, kv_heads = (8, 8) if form == "heads" else (4, 2)
    *arrays, mask = shuffled(random_case(devices + window, 64, heads, kv_heads), 7, 4)
    if window:
        # Half slide with their query, half are chunks.
        chunks = mask.pos % window + 1
        mask = mask._replace(reach=jnp.where(mask.pos % 32 < 16, window, chunks))
    arrays.append(jnp.asarray(np.random.default_rng(3).normal(size=arrays[0].shape), jnp.float32))
    q, k, v, weight = arrays
    scoring = Scoring(0.4, 3.0) if window else DEFAULT_SCORING
    sinks = jnp.asarray(np.random.default_rng(4).normal(size=heads)) if has_sinks else None
    wanted = gradients("dense", scoring)(q, k, v, sinks, mask, weight)
    rules = replace(ShardingRules(), context_attention=form)
    with activations_on(make_mesh(mesh, jax.devices()[:devices]), rules):
        found = gradients(backend, scoring)(q, k, v, sinks, mask, weight)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Do on CPUs, which have no such collective, what JAX documents of it; NaN where the sizes of two do not agree."""
    per_device = len(send_sizes) // jax.lax.axis_size(axis_name)
    of_me = partial(
        jax.lax.dynamic_slice_in_dim, start_index=jax.lax.axis_index(axis_name) * per_device
    )
    agreed = (jax.lax.all_to_all(recv_sizes, axis_name, 0, 0, tiled=True) == send_sizes).all()
    place = jnp.arange(len(output))
    sent = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    for of_device, *slices in zip(*sent, strict=True):
        begin, size, to = (of_me(x, slice_size=per_device)[:, None] for x in slices)
        arrives = (place >= to) & (place < to + size)  # [slice, token]
        origin = jnp.where(arrives, place - to + begin, 0).sum(0)
        output = jnp.where(arrives.any(0)[:, None], of_device[origin], output)
    return jnp.where(agreed, output, jnp.nan)


@pytest.mark.default_cases("2")
@pytest.mark.parametrize(
    ("mesh", "backend", "window"),
    [(MeshConfig(context=2, data=1), "flash", 20), (MeshConfig(context=4, data=2), "blockwise", 0)],
    ids=["2", "data 2 x 4"],
)
def test_keys_that_no_query_of_a_device_may_attend_are_not_needed_there(
    monkeypatch, mesh, backend, window
):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    devices = mesh.context * max(1, mesh.data)
    *arrays, mask = shuffled(random_case(devices + window, 64, 4, 2), 5, 8)
    if window:
        # Half slide with their query, half are chunks.
        chunks = mask.pos % window + 1
        mask = mask._replace(reach=jnp.where(mask.pos % 32 < 16, window, chunks))
    arrays.append(jnp.asarray(np.random.default_rng(3).normal(size=arrays[0].shape), jnp.float32))
    q, k, v, weight = arrays
    wanted = gradients("dense", DEFAULT_SCORING)(q, k, v, None, mask, weight)
    with activations_on(make_mesh(mesh, jax.devices()[:devices]), RAGGED):
        found = gradients(backend, DEFAULT_SCORING)(q, k, v, None, mask, weight)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_device_is_sent_hardly_more_than_its_queries_may_attend():
    length, devices, block = 1 << 14, 4, 128
    mask = KINDS["MP"](length, np.random.default_rng(0))
    rank = distribute_samples(block_work(mask, block), block_samples(mask, block), devices)
    order = token_order(rank, length, block)[0]
    of_row = MaskSpec(*(jnp.asarray(field[order][None]) for field in mask))
    with activations_on(
        make_mesh(MeshConfig(context=devices, data=1), jax.devices()[:devices]), RAGGED
    ):
        plan = jax.jit(
            lambda mask: plan_attention(mask, "blockwise", 8, (4, 2), jnp.dtype("float32"))
        )(of_row)
    owner = np.repeat(rank, block)
    attended = visible_keys(mask, owner, devices) & (owner != np.arange(devices)[:, None])
    assert attended.sum() <= plan.needed.size.sum() <= 1.05 * attended.sum()
    assert plan.sent.size.sum() == plan.needed.size.sum()


def test_a_ragged_exchange_is_compiled_for_gpus_and_returns_gradients_in_float32():
    """Each piece of keys and of values arrives in forward and in backward, and its gradients return once."""
    devices = 4
    q, k, v, mask = random_case(0, 64, 4, 2, jnp.bfloat16, rows=1)
    with activations_on(
        make_mesh(MeshConfig(context=devices, data=1), jax.devices()[:devices]), RAGGED
    ):
        program = gradients("blockwise", DEFAULT_SCORING).trace(
            q, k, v, None, mask, jnp.ones(q.shape)
        )
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    sent = re.findall(r"@ragged_all_to_all.*-> tensor<[\dx]+x(\w+)>", text)
    assert sorted(sent) == ["bf16"] * 4 * (devices - 1) + ["f32"] * 2 * (devices - 1)
    permuted = re.findall(r"collective_permute.*-> tensor<[\dx]+x(\w+)>", text)
    assert set(permuted) == {"i32"}  # masks, and which slices are needed


@pytest.mark.parametrize("devices", [2, 3, 8, 9, 64])
def test_keys_of_every_device_arrive_once_in_few_pieces(devices):
    found = pieces(devices)
    assert [hop for piece in found for hop in piece] == list(range(devices))
    assert len(found) <= MAX_PIECES
    assert found[0] == range(1)


def test_only_keys_and_values_travel_and_their_gradients_return_in_float32():
    rows, length, heads, kv_heads, devices = 1, 64, 4, 2, 4
    q, k, v, mask = random_case(0, length, heads, kv_heads, jnp.bfloat16, rows=rows)
    with activations_on(
        make_mesh(MeshConfig(context=devices, data=1), jax.devices()[:devices]), ShardingRules()
    ):
        lowered = gradients("blockwise", DEFAULT_SCORING).lower(
            q, k, v, None, mask, jnp.ones(q.shape)
        )
    text = lowered.as_text()
    sent = re.findall(r"collective_permute.*-> tensor<([\dx]+)x(\w+)>", text)
    assert not re.search(r"all_gather|all_to_all|reduce_scatter", text)
    sizes = {
        kind: sum(prod(map(int, shape.split("x"))) for shape, of in sent if of == kind)
        for _, kind in sent
    }
    of_others = (devices - 1) * rows * length // devices
    channels = 2 * kv_heads * q.shape[3]
    # Forward and backward each bring keys and values; their gradients go back once.
    assert sizes["bf16"] == 2 * of_others * channels
    assert sizes["f32"] == of_others * channels
    assert sizes["i32"] == of_others * 5  # the five fields of a mask
