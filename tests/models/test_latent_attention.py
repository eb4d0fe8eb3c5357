"""Latent attention in rows, over devices and in a cache; `tests/hf` holds it equal to transformers' layers."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed import build, tiny
from test_attention import random_case
from test_context_attention import gradients

from mmjax.batch import Microbatch, TextBatch
from mmjax.config import LatentAttentionConfig, LoraConfig, MeshConfig
from mmjax.models.blockwise_attention import DEFAULT_SCORING
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh
from mmjax.planning.memory import ModelSharding, kv_cache_bytes

LATENT = LatentAttentionConfig(key_rank=10, value_width=5, query_rank=12)
MESHES = {
    "one device": (MeshConfig(data=1), "auto"),
    "tensor": (MeshConfig(data=1, tensor=2), "auto"),
    "keys arrive": (MeshConfig(data=1, context=4), "gather"),
    "heads are exchanged": (MeshConfig(data=1, context=2), "heads"),
}


def with_latent(model, latent=LATENT, **llm):
    llm = {"kv_heads": model.llm.heads, "rotary_width": 4} | llm
    return replace(model, llm=replace(model.llm, latent=latent, **llm))


@pytest.mark.default_cases("keys arrive-flash", "one device-blockwise")
@pytest.mark.parametrize("backend", ["dense", "blockwise", "flash"])
@pytest.mark.parametrize("where", MESHES)
def test_values_may_be_narrower_than_keys_in_every_backend(where, backend):
    mesh, form = MESHES[where]
    q, k, v, mask = random_case(1, 64, 4, 4)
    v = v[..., :5]
    weight = jnp.asarray(np.random.default_rng(3).normal(size=v.shape), jnp.float32)
    wanted = gradients("dense", DEFAULT_SCORING)(q, k, v, None, mask, weight)
    devices = prod(max(1, getattr(mesh, axis)) for axis in ("data", "context", "tensor"))
    rules = replace(ShardingRules(), context_attention=form)
    with activations_on(make_mesh(mesh, jax.devices()[:devices]), rules):
        found = gradients(backend, DEFAULT_SCORING)(q, k, v, None, mask, weight)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def rows_of_text(length):
    zeros = np.zeros((2, length), np.int32)
    place = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    token = np.random.default_rng(0).integers(3, 20, zeros.shape).astype(np.int32)
    masks = {"sample": zeros, "pos": place, "span": zeros, "kind": zeros + 1, "sees": zeros + 1}
    others = {"source": zeros, "owner": zeros, "offset": place, "slots": {}, "send": {}}
    return TextBatch(token, token, zeros.astype(np.float32), place, **masks, **others)


@pytest.mark.parametrize("query_rank", [0, 12])
def test_a_token_behind_a_cache_of_latents_has_the_logits_of_the_whole_row(query_rank):
    model = with_latent(tiny(encoders=()), replace(LATENT, query_rank=query_rank))
    model = replace(model, lora={"all": LoraConfig(("llm.*",), 2)})
    built, params = build(model)
    text = rows_of_text(9)
    last = Microbatch(text, {})
    before = Microbatch(jax.tree.map(lambda x: x[:, :8], text), {})
    wanted, _ = jax.jit(lambda p, b: built.prefill(p, b, 0))(params, last)
    _, cache = jax.jit(lambda p, b: built.prefill(p, b, 1))(params, before)
    found, _ = jax.jit(built.step)(params, text.token[:, 8], cache)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)
    # Of two rows and nine columns, in float32.
    held = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    assert held == 2 * 9 * kv_cache_bytes(model.llm, ModelSharding(1), 4)


def test_matrices_of_heads_are_cut_and_latents_are_not():
    built = Model.build(with_latent(tiny(encoders=())), jnp.float32)
    axes = nnx.traversals.flatten_mapping(built.axes)
    cut = {path[-2] for path, names in axes.items() if "attention" in path and "heads" in names}
    assert cut == {"query", "key_value", "output"}
