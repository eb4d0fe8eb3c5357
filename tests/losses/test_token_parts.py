"""A loss in parts of the tokens is that of the whole logits, and makes its gradients with logits that it makes once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mmjax.batch import TextBatch
from mmjax.config import CrossEntropy
from mmjax.config.losses import Dpo
from mmjax.losses.cross_entropy import (
    losses_in_chunks,
    mean_loss,
    mean_loss_in_chunks,
    token_losses,
)
from mmjax.models.decoder import logits_of
from mmjax.parallel.sharding import AXES, loss_parts_are_of_tokens

ROWS, LENGTH, VOCAB, WIDTH = 3, 17, 40, 8
TOTAL = np.float32(70)


@pytest.fixture(scope="module")
def text() -> TextBatch:
    """A third of the 51 tokens have no weight."""
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    weight = rng.uniform(0.5, 2, shape) * (rng.random(shape) < 0.66)
    zeros = np.zeros(shape, np.int32)
    target = rng.integers(0, VOCAB, shape).astype(np.int32)
    return TextBatch(zeros, target, weight.astype(np.float32), *[zeros] * 9, {}, {})


@pytest.fixture(scope="module")
def factors() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    hidden = 2 * rng.standard_normal((ROWS, LENGTH, WIDTH), np.float32)
    return jnp.asarray(hidden), jnp.asarray(rng.standard_normal((VOCAB, WIDTH), np.float32))


def whole(hidden, table, text, cap=0.0):
    losses = token_losses(logits_of(hidden, table, cap), text)
    return mean_loss(losses, TOTAL), losses


def in_parts(hidden, table, text, parts, cap=0.0):
    return mean_loss_in_chunks(hidden, table, text, TOTAL, parts, cap)


def assert_close(found, wanted, tolerance=1e-6):
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def products(function, *of) -> list[tuple[int, ...]]:
    """The shapes that the products in a program have, those of a scan's body once."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield equation.outvars[0].aval.shape
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*of).jaxpr))


@pytest.mark.parametrize("cap", [0.0, 5.0], ids=["plain", "capped"])
@pytest.mark.parametrize("parts", [2, 3, 7, VOCAB, 60])  # of 26, 17, 8, 2 and 1 tokens
def test_losses_and_gradients_are_those_of_the_whole_logits(parts, cap, factors, text):
    run = jax.jit(
        jax.value_and_grad(lambda *of: in_parts(*of, text, parts, cap), (0, 1), has_aux=True)
    )
    (loss, losses), gradients = run(*factors)
    (whole_loss, whole_losses), wanted = jax.value_and_grad(
        lambda *of: whole(*of, text, cap), (0, 1), has_aux=True
    )(*factors)
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-6)
    assert_close(losses, whole_losses)
    assert not np.asarray(losses)[text.weight == 0].any()
    for gradient, of_whole in zip(gradients, wanted, strict=True):
        assert_close(gradient, of_whole)
    assert not np.asarray(gradients[0])[text.weight == 0].any()


def test_the_gradient_is_that_of_any_function_of_the_loss(factors, text):
    found, wanted = (
        jax.grad(lambda *of, f=f: jnp.square(3 * f(*of)[0]), (0, 1))(*factors)
        for f in (lambda *of: in_parts(*of, text, 3), lambda *of: whole(*of, text))
    )
    for gradient, of_whole in zip(found, wanted, strict=True):
        assert_close(gradient, of_whole)


def test_the_losses_beside_it_have_no_gradient_however_they_are_made(factors, text):
    for parts in (1, 3):
        gradient = jax.grad(lambda *of, n=parts: in_parts(*of, text, n)[1].sum())(*factors)
        assert not np.asarray(gradient).any()


def test_logits_are_made_once_where_parts_of_the_vocabulary_make_them_twice(factors, text):
    part = 17 * VOCAB

    def logits(function) -> int:
        sizes = [int(np.prod(shape)) for shape in products(jax.grad(function, (0, 1)), *factors)]
        return sizes.count(part)

    assert logits(lambda *of: in_parts(*of, text, 3)[0]) == 1
    cut = 4
    of_vocabulary = jax.grad(lambda *of: mean_loss(losses_in_chunks(*of, text, cut), TOTAL), (0, 1))
    sizes = [int(np.prod(shape)) for shape in products(of_vocabulary, *factors)]
    assert sizes.count(ROWS * LENGTH * VOCAB // cut) == 2


def test_a_smoothed_loss_is_torchs_whole_and_in_parts_of_tokens_or_of_the_vocabulary(factors, text):
    theirs = [torch.tensor(np.asarray(x), requires_grad=True) for x in factors]
    logits = (theirs[0] @ theirs[1].T).reshape(-1, VOCAB)
    target = torch.tensor(text.target).long().reshape(-1)
    losses = torch.nn.functional.cross_entropy(
        logits, target, reduction="none", label_smoothing=0.1
    )
    weighted = losses * torch.tensor(text.weight).reshape(-1)
    (weighted.sum() / float(TOTAL)).backward()
    for parts, run in ((1, mean_loss_in_chunks), (3, mean_loss_in_chunks), (4, losses_in_chunks)):

        def mean(*of, parts=parts, run=run):
            if run is mean_loss_in_chunks:
                return run(*of, text, TOTAL, parts, 0.0, 0.1)
            losses = run(*of, text, parts, 0.0, 0.1)
            return mean_loss(losses, TOTAL), losses

        (_, found), gradients = jax.value_and_grad(mean, (0, 1), has_aux=True)(*factors)
        assert_close(found, weighted.detach().reshape(found.shape))
        for gradient, wanted in zip(gradients, theirs, strict=True):
            assert_close(gradient, wanted.grad)


def test_without_gradients_only_logits_are_made(factors, text):
    assert len(products(lambda *of: in_parts(*of, text, 3), *factors)) == 1


@pytest.mark.parametrize(
    ("number", "frozen"), [(0, (VOCAB, WIDTH)), (1, (17, WIDTH))], ids=["table", "activations"]
)
def test_what_is_frozen_gets_no_product(number, frozen, factors, text):
    def gradient(x):
        of = (x, factors[1]) if number == 0 else (factors[0], x)
        return in_parts(*of, text, 3)[0]

    shapes = products(jax.grad(gradient), factors[number])
    assert len(shapes) == 2
    assert tuple(sorted(frozen)) not in {tuple(sorted(shape)) for shape in shapes}
    wanted = jax.grad(lambda *of: whole(*of, text)[0], number)(*factors)
    assert_close(jax.jit(jax.grad(gradient))(factors[number]), wanted)


def test_in_bfloat16_the_tables_gradient_is_rounded_once_in_however_many_parts(text):
    """All tokens alike, of which 51 parts in bfloat16 would lose the last bits of each addition."""
    hidden = jnp.ones((ROWS, LENGTH, WIDTH), jnp.bfloat16)
    table = jnp.zeros((VOCAB, WIDTH), jnp.float32)
    text = text._replace(weight=np.ones_like(text.weight), target=np.zeros_like(text.target))
    one, many = (
        jax.jit(jax.grad(lambda t, n=n: in_parts(hidden, t, text, n)[0]))(table) for n in (1, 51)
    )
    assert many.dtype == jnp.float32
    np.testing.assert_array_equal(many, one)


def test_parts_are_of_the_tokens_where_no_axis_cuts_the_tables_width_and_tokens_stand_alone():
    alone = dict.fromkeys(AXES, 1)
    for axis in AXES:
        cut = alone | {axis: 2}
        assert loss_parts_are_of_tokens(cut, CrossEntropy()) == (axis in ("data", "tensor"))
    assert loss_parts_are_of_tokens(alone, CrossEntropy())
    assert not loss_parts_are_of_tokens(alone, Dpo())
