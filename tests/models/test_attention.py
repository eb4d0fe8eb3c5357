import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.batch import MaskSpec, allowed
from mmjax.config import MeshConfig
from mmjax.models.attention import attention
from mmjax.models.blockwise_attention import (
    DEFAULT_SCORING,
    Scoring,
    _live_blocks,
    _mask_blocks,
    blockwise_attention,
    dense_attention,
)
from mmjax.parallel.sharding import ShardingRules, activations_on, encoding, make_mesh


def as_mask(rows):
    """Rows of (sample, span, kind, sees) per token as a MaskSpec."""
    table = np.array(rows, np.int32)
    pos = np.broadcast_to(np.arange(table.shape[1], dtype=np.int32), table.shape[:2])
    return MaskSpec(
        *map(jnp.asarray, (table[..., 0], pos, table[..., 1], table[..., 2], table[..., 3]))
    )


def by_hand(mask):
    reach = np.full_like(mask.pos, 1000) if mask.reach is None else np.asarray(mask.reach)
    sample, pos, span, kind, sees = (np.asarray(x) for x in mask[:5])
    rows, length = sample.shape
    ok = np.zeros((rows, length, length), bool)
    for r in range(rows):
        for q in range(length):
            for k in range(length):
                if sample[r, q] < 0 or sample[r, q] != sample[r, k]:
                    continue
                inside = span[r, q] != 0 and span[r, q] == span[r, k]
                before = (
                    0 <= pos[r, q] - pos[r, k] < reach[r, q]
                    and (int(sees[r, q]) & int(kind[r, k])) != 0
                )
                ok[r, q, k] = inside or before
    return ok


TEXT, IMAGE, ALL = 1, 2, 3
T = (0, 0, TEXT, ALL)  # sample, span, kind, sees
ROWS = {
    "plain causal": [[(s, 0, TEXT, ALL) for s in (0, 0, 0, 1, 1, 2, -1, -1)]],
    "bidirectional in an item": [
        [
            T,
            *[(0, 1, IMAGE, ALL)] * 2,
            *[(0, 2, IMAGE, ALL)] * 2,
            T,
            (1, 1, IMAGE, ALL),
            (-1, 0, 0, 0),
        ]
    ],
    "isolated items": [
        [
            T,
            *[(0, 1, IMAGE, 0)] * 2,
            (0, 2, IMAGE, 0),
            T,
            (0, 0, TEXT, TEXT),
            (1, 1, IMAGE, 0),
            (1, 0, TEXT, ALL),
        ]
    ],
    "question branches": [
        [T, *[(0, 1, IMAGE, ALL)] * 2, *[(0, 0, 4, ALL | 4)] * 2, *[(0, 0, 8, ALL | 8)] * 3]
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_mask_spec_allows_what_a_loop_over_its_definition_allows(name):
    mask = as_mask(ROWS[name])
    np.testing.assert_array_equal(allowed(mask, mask), by_hand(mask))


def test_the_papers_kinds_of_mask_look_as_they_should():
    causal, items, isolated, branches = (
        np.asarray(allowed(m, m)[0]) for m in map(as_mask, ROWS.values())
    )
    assert causal[:3, :3].tolist() == np.tri(3, dtype=bool).tolist()
    assert not causal[3:, :3].any()
    assert not causal[6:].any()
    assert items[1, 2]
    assert items[3, 2]  # a later image sees an earlier one
    assert not items[2, 3]
    assert isolated[1].tolist() == [False, True, True] + [False] * 5  # nothing but itself
    assert isolated[4, :5].all()
    assert not isolated[5, 1:4].any()  # sees text only
    assert not branches[5:, 3:5].any()  # one question sees no other
    assert branches[5:, :3].all()


@pytest.mark.parametrize("seed", range(5))
def test_random_mask_specs_allow_what_the_loop_allows_after_any_permutation(seed):
    rng = np.random.default_rng(seed)
    length = 17
    fields = [np.sort(rng.integers(-1, 4, length)), np.arange(length), rng.integers(0, 3, length)]
    fields += [
        1 << rng.integers(0, 3, length),
        rng.integers(0, 8, length),
        rng.integers(1, length, length),
    ]
    order = rng.permutation(length)
    mask = MaskSpec(*(jnp.asarray(f[order], jnp.int32)[None] for f in fields))
    np.testing.assert_array_equal(allowed(mask, mask), by_hand(mask))
    on_host = jax.tree.map(np.asarray, mask)
    assert isinstance(allowed(on_host, on_host), np.ndarray)
    np.testing.assert_array_equal(allowed(on_host, on_host), by_hand(mask))


def random_case(seed, length, heads, kv_heads, dtype=jnp.float32, rows=2):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(rows, length, n, 8)), dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    sample = np.sort(rng.integers(0, 4, (rows, length)), axis=1)
    sample[:, length - length // 8 :] = -1
    span = np.where(rng.random((rows, length)) < 0.5, 1 + np.arange(length) // 7, 0)
    pos = np.broadcast_to(np.arange(length), sample.shape)
    kind, sees = 1 << rng.integers(0, 3, sample.shape), rng.integers(0, 8, sample.shape)
    return q, k, v, MaskSpec(*(jnp.asarray(x, jnp.int32) for x in (sample, pos, span, kind, sees)))


@pytest.mark.parametrize(
    ("length", "block", "heads", "kv_heads", "window", "scoring"),
    [
        (48, 16, 4, 4, 0, DEFAULT_SCORING),
        (53, 16, 4, 2, 0, DEFAULT_SCORING),
        (37, 8, 6, 1, 5, DEFAULT_SCORING),
        (5, 16, 2, 2, 0, Scoring(0.3)),
        (53, 16, 4, 2, 9, Scoring(0.7, 1.5)),
    ],
)
def test_blockwise_equals_dense_in_values_and_gradients(
    length, block, heads, kv_heads, window, scoring
):
    q, k, v, mask = random_case(length, length, heads, kv_heads)
    if window:
        mask = mask._replace(reach=jnp.full_like(mask.pos, window))
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def run(backend, q, k, v):
        if backend == "dense":
            out = dense_attention(q, k, v, mask, mask, scoring)
        else:
            out = blockwise_attention(q, k, v, mask, mask, block, scoring)
        return jnp.sum(out * weight), out

    dense, blockwise = (
        jax.jit(jax.value_and_grad(lambda *x, b=b: run(b, *x), (0, 1, 2), has_aux=True))(q, k, v)
        for b in ("dense", "blockwise")
    )
    for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(blockwise), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5, rtol=1e-5)


def test_scores_are_scaled_and_bent():
    q, k, v, mask = random_case(1, 24, 2, 2, rows=1)
    scores = np.einsum("tnh,snh->nts", q[0], k[0]) * 0.5
    scores = np.where(allowed(mask, mask)[0], np.tanh(scores / 2) * 2, -np.inf)
    seen = np.isfinite(scores).any(-1, keepdims=True)
    weights = np.where(seen, np.exp(scores), 0)
    weights /= np.where(seen, weights.sum(-1, keepdims=True), 1)
    out = attention(q, k, v, mask, "dense", Scoring(0.5, 2.0))
    np.testing.assert_allclose(out[0], np.einsum("nts,snh->tnh", weights, v[0]), atol=1e-5)


@pytest.mark.parametrize("backend", ["dense", "blockwise", "flash"])
def test_a_sink_takes_its_part_of_the_softmax_and_gives_nothing(backend):
    q, k, v, mask = random_case(1, 24, 4, 2)
    rng = np.random.default_rng(2)
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
    factors = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def ours(q, k, v, sinks):
        return jnp.sum(attention(q, k, v, mask, backend, sinks=sinks) * factors)

    def by_hand(q, k, v, sinks):
        scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, 2)) / 8**0.5
        scores = jnp.where(allowed(mask, mask)[:, None], scores, -jnp.inf)
        sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, 2, 2)) * factors)

    found, wanted = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(q, k, v, sinks) for f in (ours, by_hand)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_blocks_beyond_every_window_are_not_visited():
    mask = random_case(2, 96, 2, 2, rows=1)[3]
    mask = mask._replace(sample=0 * mask.pos, span=0 * mask.pos, reach=0 * mask.pos + 8)
    live = _live_blocks(*(2 * [_mask_blocks(mask, 16)]))
    np.testing.assert_array_equal(live, np.tri(6, dtype=bool) & ~np.tri(6, k=-2, dtype=bool))


@pytest.mark.parametrize("permuted", ["queries", "keys"])
def test_blockwise_equals_dense_when_queries_or_keys_lie_in_another_order(permuted):
    q, k, v, mask = random_case(3, 64, 4, 2)
    order = np.random.default_rng(0).permutation(64)
    other = jax.tree.map(lambda x: x[:, order], mask)
    masks = (other, mask) if permuted == "queries" else (mask, other)
    q, k, v = (q[:, order], k, v) if permuted == "queries" else (q, k[:, order], v[:, order])
    out = jax.jit(blockwise_attention, static_argnums=5)(q, k, v, *masks, 16)
    np.testing.assert_allclose(out, jax.jit(dense_attention)(q, k, v, *masks), atol=1e-5)


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(backend):
    q, k, v, mask = random_case(0, 40, 4, 2)
    blind = ~np.asarray(allowed(mask, mask)).any(-1)
    assert blind.any()

    @jax.jit
    def run(*qkv):
        out, back = jax.vjp(lambda *x: attention(*x, mask, backend), *qkv)
        return out, back(jnp.ones_like(out))

    out, gradients = run(q, k, v)
    assert (np.asarray(out)[blind] == 0).all()
    assert all(np.isfinite(x).all() for x in gradients)
    assert (np.asarray(gradients[0])[blind] == 0).all()


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_half_precision_stays_within_its_rounding_of_float32(backend):
    q, k, v, mask = random_case(4, 64, 4, 2, jnp.bfloat16)
    out = attention(q, k, v, mask, backend)
    exact = dense_attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask, mask)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_other_samples_change_not_one_bit(backend):
    q, k, v, mask = random_case(5, 600, 2, 1, rows=1)
    mine = np.asarray(mask.sample[0]) == 1
    loud = [jnp.where(mine[None, :, None, None], x, 1e4 * x + 3) for x in (q, k, v)]
    run = jax.jit(lambda q, k, v: attention(q, k, v, mask, backend))
    np.testing.assert_array_equal(run(q, k, v)[:, mine], run(*loud)[:, mine])


def test_blockwise_keeps_no_scores_for_the_backward_pass():
    q, k, v, mask = random_case(6, 512, 2, 2, rows=1)
    kept = jax.eval_shape(
        lambda q: jax.vjp(lambda q: blockwise_attention(q, k, v, mask, mask, 64), q)[1], q
    )
    assert max(x.size for x in jax.tree.leaves(kept)) <= q.size


def test_heads_that_do_not_divide_are_refused():
    q, k, v, mask = random_case(0, 16, 4, 3)
    with pytest.raises(ValueError, match="4 query heads are no multiple of 3"):
        attention(q, k, v, mask, "dense")


@pytest.mark.parametrize(
    ("backend", "encoders"), [("blockwise", "tensor"), ("flash", "tensor"), ("blockwise", "data")]
)
def test_on_a_mesh_each_device_visits_its_own_rows_and_heads_and_nothing_is_exchanged(
    backend, encoders
):
    config = MeshConfig(data=2, fsdp=2, tensor=2, encoders=encoders)
    mesh, rules = make_mesh(config, jax.devices()[:8]), ShardingRules.of(config)
    axes = ("data", "fsdp", "tensor") if encoders == "data" else ("data", "fsdp")
    q, k, v, mask = random_case(5, 40, 4, 2, rows=8)

    def loss(q, k, v, mask, backend):
        return jnp.square(attention(q, k, v, mask, backend)).sum()

    wanted = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=4)(q, k, v, mask, "dense")
    heads = NamedSharding(mesh, PartitionSpec(axes, None, None if encoders == "data" else "tensor"))
    rows = NamedSharding(mesh, PartitionSpec(axes))
    placed = (*(jax.device_put(x, heads) for x in (q, k, v)), jax.device_put(mask, rows))
    with activations_on(mesh, rules), encoding():
        program = (
            jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=4).lower(*placed, backend).compile()
        )
    for ours, theirs in zip(program(*placed), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert not re.search(r"all-(reduce|gather|to-all)", program.as_text())
