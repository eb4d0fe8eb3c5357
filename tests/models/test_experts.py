"""Mixtures of experts: every token gets its experts, whatever lies beside it, is recomputed, or is on which device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed import assert_trees_close, build, model_outputs, pack, random_sample, tiny, token_losses

from mmjax.config import ExpertsConfig
from mmjax.models.expert_routing import Routing, balance_loss, z_loss
from mmjax.models.experts import Experts
from mmjax.models.layer_stacks import unstack_layers

EXPERTS = ExpertsConfig(layers=(0, 1, 2), count=6, per_token=2, width=24, shared_width=12)
WIDTH = 16
ROWS = [[9, 5], [12], [3, 4, 6]]  # tokens of the samples of each row


def layer(config: ExpertsConfig) -> Experts:
    return Experts(config, WIDTH, "silu", nnx.Rngs(0))


def sparse(layers=(0, 1, 2), **changes):
    """A tiny LLM of three layers, in some of which there are experts."""
    config = tiny(layers=3, encoders=())
    return replace(
        config, llm=replace(config.llm, experts=replace(EXPERTS, layers=layers), **changes)
    )


def rows_of(seed=0, length=20):
    rng = np.random.default_rng(seed)
    samples = [[random_sample(rng, [n]) for n in row] for row in ROWS]
    return pack(samples, {"llm": length}, encoders=())


def silu(x):
    return x / (1 + np.exp(-x))


def by_token(module: Experts, x: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each token gets, by a loop over tokens and their experts in float64; and the tokens of each expert."""
    config = module.config
    weight = lambda m: np.asarray(m.weight[...], np.float64)  # noqa: E731
    router, gate, up, down = map(weight, (module.router, module.gate, module.up, module.down))
    out, counts = np.zeros(x.shape), np.zeros(config.count)
    for place in np.ndindex(valid.shape):
        token = x[place].astype(np.float64)
        if valid[place]:
            logits = token @ router
            probability = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            chosen = np.argsort(-probability)[: config.per_token]
            shares = probability[chosen] / (probability[chosen].sum() if config.normalized else 1)
            for expert, share in zip(chosen, shares, strict=True):
                out[place] += (
                    share * (silu(token @ gate[expert]) * (token @ up[expert])) @ down[expert]
                )
                counts[expert] += 1
        if module.shared is not None:
            shared = [weight(m) for m in (module.shared.gate, module.shared.up, module.shared.down)]
            hidden = silu(token @ shared[0]) * (token @ shared[1])
            out[place] += hidden @ shared[2] / (1 + np.exp(-(token @ weight(module.shared_gate))))
    return out, counts


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, 6])
def test_a_token_gets_its_experts_outputs_by_their_weights_and_padding_gets_none(
    per_token, normalized
):
    module = layer(
        replace(EXPERTS, per_token=per_token, normalized=normalized, shared_width=12 * normalized)
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 11, WIDTH)).astype(np.float32)
    valid = rng.random((2, 11)) < 0.7
    out, routing = jax.jit(lambda x, valid: module(x, valid))(x, valid)
    wanted, counts = by_token(module, x, valid)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    np.testing.assert_array_equal(routing.tokens, counts)
    assert float(routing.count) == valid.sum()


def test_all_tokens_may_take_one_expert():
    """There is no capacity."""
    module = layer(replace(EXPERTS, per_token=1, shared_width=0))
    router = np.zeros((WIDTH, EXPERTS.count), np.float32)
    router[:, 4] = 1
    module.router.weight[...] = jnp.asarray(router)
    x = np.abs(np.random.default_rng(0).standard_normal((1, 50, WIDTH))).astype(np.float32)
    out, routing = jax.jit(lambda x, valid: module(x, valid))(x, np.ones((1, 50), bool))
    np.testing.assert_array_equal(routing.tokens, 50.0 * (np.arange(6) == 4))
    np.testing.assert_allclose(out, by_token(module, x, np.ones((1, 50), bool))[0], atol=2e-6)


def test_gradients_are_those_of_all_experts_computed_of_all_tokens():
    config = replace(EXPERTS, shared_width=0)
    module = layer(config)
    graph, params = nnx.split(module)
    rng = np.random.default_rng(1)
    x, direction = (rng.standard_normal((1, 17, WIDTH)).astype(np.float32) for _ in range(2))
    valid = jnp.arange(17)[None] < 13

    def ours(params, x):
        return (nnx.merge(graph, params)(x, valid)[0] * direction).sum()

    def theirs(params, x):
        p = nnx.to_pure_dict(params)
        probability = jax.nn.softmax(x @ p["router"]["weight"])
        kept = jnp.where(probability >= jax.lax.top_k(probability, 2)[0][..., -1:], probability, 0)
        share = jnp.where(valid[..., None], kept / kept.sum(-1, keepdims=True), 0)
        into = lambda name: jnp.einsum("btd,edf->btef", x, p[name]["weight"])  # noqa: E731
        y = jnp.einsum(
            "btef,efd->bted", jax.nn.silu(into("gate")) * into("up"), p["down"]["weight"]
        )
        return (jnp.einsum("bted,bte->btd", y, share) * direction).sum()

    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(params, x) for f in (ours, theirs))
    assert_trees_close(found, wanted, 1e-5)
    np.testing.assert_array_equal(np.asarray(found[1])[~np.asarray(valid)], 0)


def test_a_packed_sample_gets_what_it_gets_alone_and_padding_is_not_routed():
    model, params = build(sparse())
    batch = rows_of()
    logits = np.asarray(jax.jit(model.logits)(params, batch))
    routing = jax.jit(partial(model_outputs, model))(params, batch).routing
    tokens = sum(map(sum, ROWS))
    np.testing.assert_array_equal(routing.count, [tokens] * 3)
    np.testing.assert_array_equal(np.asarray(routing.tokens).sum(-1), [2 * tokens] * 3)
    rng = np.random.default_rng(0)
    for r, row in enumerate(ROWS):
        start = 0
        for n in row:
            alone = pack([[random_sample(rng, [n])]], {"llm": n}, encoders=())
            wanted = jax.jit(model.logits)(params, alone)[0]
            np.testing.assert_allclose(logits[r, start : start + n], wanted, atol=1e-5)
            start += n


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [(1, 2), (0, 1, 2)])
def test_losses_and_gradients_are_the_same_under_any_remat_policy(layers):
    batch = rows_of()
    found = []
    for remat in ("none", "full", "products"):
        model, params = build(sparse(layers, remat=remat))

        def loss(params, model=model):
            routing = model_outputs(model, params, batch).routing
            return (
                token_losses(model, params, batch).mean()
                + balance_loss(routing)
                + 0.1 * z_loss(routing)
            )

        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        found.append((value, unstack_layers(gradient)))
    for other in found[1:]:
        assert_trees_close(other, found[0], 1e-5)


def test_tokens_decoded_one_by_one_have_the_logits_of_the_whole_row():
    model, params = build(sparse())
    rng = np.random.default_rng(3)
    sample = random_sample(rng, [12])
    whole = pack([[sample]], {"llm": 12}, encoders=())
    wanted = np.asarray(jax.jit(model.logits)(params, whole))[0]
    text = jax.tree.map(lambda x: x[:, :7] if x.ndim > 1 else x, whole.text)
    logits, cache = jax.jit(model.prefill, static_argnums=2)(params, whole._replace(text=text), 5)
    np.testing.assert_allclose(logits[0], wanted[6], atol=1e-5)
    step = jax.jit(model.step)
    for at in range(7, 12):
        logits, cache = step(params, whole.text.token[:, at], cache)
        np.testing.assert_allclose(logits[0], wanted[at], atol=1e-5)


def test_the_balance_loss_is_least_where_all_experts_get_the_same():
    full = lambda shape, value: jnp.full(shape, value, jnp.float32)  # noqa: E731
    even = Routing(full((2, 4), 6), full((2, 4), 3), full(2, 0), full(2, 12), full(2, 1))
    assert float(balance_loss(even)) == pytest.approx(2)  # experts of a token
    uneven = even._replace(
        tokens=jnp.array([[12.0, 12, 0, 0]] * 2), probability=jnp.array([[6.0, 6, 0, 0]] * 2)
    )
    assert float(balance_loss(uneven)) == pytest.approx(4)
