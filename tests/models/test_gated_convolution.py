"""A gated convolution reads no other sample or branch, whoever has the tokens before, and goes on from its cache."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from packed import assert_trees_close, build, pack, random_sample, tiny, token_losses
from test_delta_branches import LENGTH, WIDTH, Row, alone, draw_row, packed
from test_delta_context import MESHES, on_mesh, random_batch

from mmjax.config import ConvolutionConfig
from mmjax.models.gated_convolution import GatedConvolution

CONVOLUTION = ConvolutionConfig((0, 2), taps=4, biased=True)


def convolving():
    """A tiny LLM with a convolution in two of three layers."""
    config = tiny(layers=3, encoders=())
    return replace(config, llm=replace(config.llm, convolution=CONVOLUTION))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_branch_gets_what_it_gets_alone_behind_its_prompt(devices):
    layer = GatedConvolution(CONVOLUTION, WIDTH, nnx.Rngs(0))
    x, weight = np.random.default_rng(0).normal(size=(2, 1, LENGTH, WIDTH)).astype(np.float32)
    sample, branch = draw_row(0)
    row = Row(*nnx.split(layer), x, weight * (sample >= 0)[:, None], sample, branch)
    (out, gradients), (wanted, expected) = packed(row, devices), alone(row)
    seen = sample >= 0
    np.testing.assert_allclose(out[:, seen], wanted[:, seen], atol=1e-5)
    assert_trees_close(gradients, expected, 1e-5)


@pytest.mark.default_cases("fsdp=2 x context=2 x tensor=2")
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_every_gradient_are_those_of_one_device(mesh):
    model, params = build(convolving())
    function = jax.value_and_grad(lambda p, batch: token_losses(model, p, batch).sum())
    batch = random_batch(0)
    expected = jax.jit(function)(params, batch)
    shared = on_mesh(function, model, params, batch, MESHES[mesh])
    np.testing.assert_allclose(shared[0], expected[0], rtol=1e-5)
    assert_trees_close(jax.device_get(shared[1]), jax.device_get(expected[1]), 1e-5)


def test_tokens_decoded_one_by_one_have_the_logits_of_the_whole_row():
    model, params = build(convolving())
    sample = random_sample(np.random.default_rng(3), [12])
    whole = pack([[sample]], {"llm": 12}, encoders=())
    wanted = np.asarray(jax.jit(model.logits)(params, whole))[0]
    for prompt in (2, 7):  # shorter than the filter, and longer
        text = jax.tree.map(lambda x, n=prompt: x[:, :n] if x.ndim > 1 else x, whole.text)
        first = whole._replace(text=text)
        logits, cache = jax.jit(model.prefill, static_argnums=2)(params, first, 12 - prompt)
        step = jax.jit(model.step)
        for at in range(prompt, 12):
            np.testing.assert_allclose(logits[0], wanted[at - 1], atol=1e-5)
            logits, cache = step(params, whole.text.token[:, at], cache)
