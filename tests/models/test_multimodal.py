"""Packing is exact: a sample in a row with others computes what it computes alone, and leaks nothing into them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import assert_trees_close, build, pack, random_sample, tiny, token_losses

import mmjax.models.audio_encoder
from mmjax.models.model import Model

GRIDS = [
    (1, 1),
    (1, 5),
    (5, 1),
    (2, 2),
    (2, 3),
    (3, 2),
    (3, 3),
    (4, 2),
    (1, 8),
    (3, 5),
    (2, 7),
    (5, 4),
]
CLIPS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 17, 22]
LENGTHS = {"llm": 96, "vision": 160, "audio": 128}


def many_samples(seed=0):
    """Twelve samples that together hold every grid and every clip length, some of each kind alone, some together."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, (grid, clip) in enumerate(zip(GRIDS, CLIPS, strict=True)):
        layout = [2, grid, 3, ("audio", clip), 4] if i % 3 == 0 else [1, ("audio", clip), grid, 5]
        samples.append(random_sample(rng, layout))
    samples.append(random_sample(rng, [9]))
    samples.append(random_sample(rng, [("audio", 6), ("audio", 7), 2]))
    samples.append(random_sample(rng, [(2, 2), (1, 3), (3, 3), 4]))
    return samples


def in_rows(samples, rows=2):
    return [samples[r::rows] for r in range(rows)]


@pytest.mark.default_cases("isolated-blockwise")
@pytest.mark.parametrize(("items", "backend"), [("causal", "dense"), ("isolated", "blockwise")])
def test_a_packed_row_gives_each_sample_what_it_gets_alone(items, backend):
    samples = many_samples()
    model, params = build(tiny(backend))
    together = pack(in_rows(samples), LENGTHS, items)
    assert max(np.asarray(together.items["vision"].item)[0]) >= 9  # at least ten grids in one row

    @jax.jit
    def run(params, batch):
        def loss(params):
            logits = model.logits(params, batch)
            chosen = jnp.take_along_axis(logits, batch.text.target[..., None], -1)[..., 0]
            return jnp.sum(batch.text.weight * (jax.nn.logsumexp(logits, -1) - chosen)), logits

        return jax.grad(loss, has_aux=True)(params)

    packed_gradients, packed_logits = run(params, together)
    alone_gradients = jax.tree.map(np.zeros_like, params)
    for r, row in enumerate(in_rows(samples)):
        for n, sample in enumerate(row):
            gradients, logits = run(params, pack([[sample], []], LENGTHS, items))
            mine = np.asarray(together.text.sample[r]) == n
            np.testing.assert_allclose(
                packed_logits[r][mine], logits[0][: mine.sum()], atol=1e-5, rtol=1e-5
            )
            alone_gradients = jax.tree.map(np.add, alone_gradients, gradients)
            if all(segment.kind == "text" for segment in sample):
                encoders = jax.tree.leaves([gradients["encoders"], gradients["connectors"]])
                assert all((np.asarray(g) == 0).all() for g in encoders)
    assert_trees_close(packed_gradients, alone_gradients)


def test_a_packed_row_gives_a_sample_what_it_gets_in_rows_of_its_own_length():
    samples = many_samples()
    model, params = build()
    together = pack([samples], {"llm": 192, "vision": 320, "audio": 192})
    run = jax.jit(model.logits)
    packed_logits = run(params, together)[0]
    mine = np.asarray(together.text.sample[0]) == 9
    alone = pack([[samples[9]]], {"llm": int(mine.sum()), "vision": 24, "audio": 16})
    np.testing.assert_allclose(packed_logits[mine], run(params, alone)[0], atol=1e-5, rtol=1e-5)


def replaced(samples, index):
    """The samples, one of them with other, much larger content of the same shape."""
    rng = np.random.default_rng(99)
    changed = []
    for segment in samples[index]:
        content = segment.content
        other = (
            rng.integers(1, 23, content.shape)
            if segment.kind == "text"
            else 50 * rng.normal(size=content.shape)
        )
        changed.append(type(segment)(segment.kind, other.astype(content.dtype)))
    return [*samples[:index], changed, *samples[index + 1 :]]


def losses(model, params):
    return jax.jit(lambda batch: token_losses(model, params, batch))


def others_that_changed(run, samples, index):
    """How many tokens of other samples have a loss that differs in any bit when sample `index` is replaced."""
    before = pack(in_rows(samples), LENGTHS)
    after = pack(in_rows(replaced(samples, index)), LENGTHS)
    row, number = index % 2, index // 2
    mine = np.zeros(before.text.sample.shape, bool)
    mine[row] = np.asarray(before.text.sample[row]) == number
    a, b = np.asarray(run(before)), np.asarray(run(after))
    assert (a[mine] != b[mine]).any()
    return int((a[~mine] != b[~mine]).sum())


@pytest.mark.parametrize("backend", ["dense", "blockwise", "flash"])
def test_replacing_one_samples_content_changes_no_other_samples_loss_by_one_bit(backend):
    run = losses(*build(tiny(backend)))
    assert others_that_changed(run, many_samples(), 3) == 0
    assert others_that_changed(run, many_samples(), 6) == 0


def test_a_convolution_that_reaches_into_the_next_clip_is_caught(monkeypatch):
    def leaking(x, item, stride):
        padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)), mode="edge")
        return jnp.concatenate(
            [padded[:, first : first + x.shape[1] : stride] for first in range(3)], axis=-1
        )

    monkeypatch.setattr(mmjax.models.audio_encoder, "taps", leaking)
    assert others_that_changed(losses(*build()), many_samples(), 6) > 0


def without_items(padding):
    """The batch with encoder rows of padding; with no encoder rows; with no encoders."""
    no_rows = {name: jax.tree.map(lambda x: x[:0], items) for name, items in padding.items.items()}
    absent = padding._replace(items={}, text=padding.text._replace(slots={}))
    return padding, padding._replace(items=no_rows), absent


@pytest.mark.parametrize(("backend", "encoder"), [("dense", "audio"), ("blockwise", "vision")])
def test_batches_with_padding_no_rows_or_no_encoder_at_all_give_the_same_loss(backend, encoder):
    model, params = build(tiny(backend, encoders=(encoder,)))
    rng = np.random.default_rng(0)
    padding = pack(
        [[random_sample(rng, [5]), random_sample(rng, [7])]],
        {"llm": 16, encoder: 16},
        encoders=(encoder,),
    )
    run = jax.jit(lambda batch: token_losses(model, params, batch))
    first, *others = (run(batch) for batch in without_items(padding))
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5)


def test_half_precision_activations_give_float32_logits_near_the_exact_ones():
    model, params = build(tiny(encoders=("vision",)))
    rng = np.random.default_rng(0)
    batch = pack(
        [[random_sample(rng, [2, (3, 3), 4, (2, 5), 3])]],
        {"llm": 24, "vision": 32},
        encoders=("vision",),
    )
    half = Model.build(model.config, jnp.bfloat16)
    logits = jax.jit(half.logits)(params, batch)
    assert logits.dtype == jnp.float32
    exact = jax.jit(model.logits)(params, batch)
    valid = np.asarray(batch.text.sample) >= 0
    assert 0 < np.abs(np.asarray(logits - exact))[valid].mean() < 0.05
