"""Losses of answers in packed rows are those of every pair and token alone, as torch computes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mmjax.batch import PADDING, TextBatch
from mmjax.config.losses import Dpo, Grpo, Kto, Orpo
from mmjax.losses import dpo, grpo, kto, orpo
from mmjax.losses.dpo import CHOSEN, REJECTED
from mmjax.losses.objective import mean_measures
from mmjax.models.sample_totals import sample_totals

ROWS, LENGTH = 2, 40
ANSWERS = CHOSEN, REJECTED


@pytest.fixture
def text() -> TextBatch:
    """Rows of three pairs, each behind a prompt, of answers of one to five trained tokens; row 1 ends in padding."""
    rng = np.random.default_rng(0)
    shape = ROWS, LENGTH
    sample, kind = np.full(shape, PADDING, np.int32), np.ones(shape, np.int32)
    weight = np.zeros(shape, np.float32)
    for row in range(ROWS):
        at = 0
        for number in range(3 - row):
            prompt, *answers = rng.integers(1, 6, 3)
            sample[row, at : at + prompt + sum(answers) + 1] = number
            at += prompt
            for bit, count in zip((CHOSEN, REJECTED), answers, strict=True):
                kind[row, at : at + count] = bit
                weight[row, at : at + count] = 1 / sum(answers)
                at += count
            at += 1  # a token behind the last trained one
    full = np.zeros(shape, np.int32)
    values = rng.standard_normal((3, *shape)).astype(np.float32)
    names = ("old_log_probs", "advantages", "reference_log_probs")
    return TextBatch(
        *(full, full, weight, full, sample, np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))),
        *(full, kind, full, full, full, full, {}, {}),
        loss_inputs={name: 0.3 * x * (weight > 0) for name, x in zip(names, values, strict=True)},
    )


def log_probs_of(text: TextBatch) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (0.3 * rng.standard_normal(text.weight.shape) * (text.weight > 0)).astype(np.float32)


def test_totals_are_of_every_sample_alone_at_all_of_its_tokens(text):
    values = np.random.default_rng(2).standard_normal(text.weight.shape).astype(np.float32)
    values[0, text.sample[0] == 1] = np.nan
    totals = np.asarray(
        sample_totals(
            [jnp.asarray(values), jnp.asarray(2 * values)], jax.tree.map(jnp.asarray, text)
        )
    )
    for row, number in ((0, 0), (0, 2), (1, 0), (1, 1)):
        here = text.sample[row] == number
        np.testing.assert_allclose(totals[0, row, here], values[row, here].sum(), atol=1e-5)
        assert len(set(totals[1, row, here].tolist())) == 1  # to the bit the same at all of them
    assert np.isnan(totals[0, 0, text.sample[0] == 1]).all()


@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm"])
def test_losses_of_pairs_and_their_gradients_are_those_of_torch(text, kind):
    config = Dpo(0.7, kind, "stored")
    reference, trained = text.loss_inputs["reference_log_probs"], text.weight > 0

    def ours(log_probs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, values = dpo.token_losses(
            log_probs, reference, jax.tree.map(jnp.asarray, text), config
        )
        return jnp.where(trained, text.weight * losses, 0).sum(), values

    (loss, values), gradient = jax.value_and_grad(ours, has_aux=True)(log_probs_of(text))
    there = torch.tensor(log_probs_of(text), requires_grad=True)
    total, right = torch.zeros(()), 0
    for row in range(ROWS):
        for number in range(3 - row):
            ratios = []
            for bit in (CHOSEN, REJECTED):
                here = torch.tensor(
                    (text.sample[row] == number) & (text.kind[row] == bit) & trained[row]
                )
                ratio = (there[row] - torch.tensor(reference[row]))[here]
                ratios.append(ratio.mean() if kind == "sigmoid_norm" else ratio.sum())
            total = total - torch.nn.functional.logsigmoid(config.beta * (ratios[0] - ratios[1]))
            if kind == "sigmoid":
                right += bool(ratios[0] > ratios[1])
    total.backward()
    np.testing.assert_allclose(loss, total.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, there.grad.numpy(), atol=1e-6)
    if kind == "sigmoid":
        assert round(float((values["rewards/accuracies"] * text.weight).sum())) == right


def test_losses_by_odds_of_pairs_and_their_gradients_are_those_of_torch(text):
    config, trained = Orpo(0.4), text.weight > 0
    log_probs = -np.abs(log_probs_of(text))

    def ours(log_probs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, values = orpo.token_losses(
            log_probs, jnp.zeros(()), jax.tree.map(jnp.asarray, text), config
        )
        return jnp.where(trained, text.weight * losses, 0).sum(), values

    (loss, values), gradient = jax.value_and_grad(ours, has_aux=True)(log_probs)
    there = torch.tensor(log_probs, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        for number in range(3 - row):
            of_answers = [
                (text.sample[row] == number) & (text.kind[row] == bit) & trained[row]
                for bit in ANSWERS
            ]
            better, worse = (there[row][here].double().mean() for here in of_answers)
            odds = [x.exp() / (1 - x.exp()) for x in (better, worse)]
            total = (
                total
                - better
                - config.beta * torch.nn.functional.logsigmoid(torch.log(odds[0] / odds[1]))
            )
    total.backward()
    np.testing.assert_allclose(loss, total.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, there.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert values.keys() == orpo.measures(config).keys()


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shift", [-1.0, 1.0], ids=["divergence below 0", "divergence above 0"])
def test_losses_of_judged_answers_and_their_gradients_are_those_of_torch(text, kind, shift):
    config = Kto(0.7, kind, desirable_weight=1.5, undesirable_weight=0.8, reference="stored")
    label = np.where((text.sample + np.arange(ROWS)[:, None]) % 2 == 0, 1.0, -1.0).astype(
        np.float32
    )
    text = text._replace(loss_inputs=text.loss_inputs | {"labels": label})
    trained, reference = text.weight > 0, text.loss_inputs["reference_log_probs"]
    log_probs = log_probs_of(text) + np.float32(shift) * ((text.kind == REJECTED) & trained)

    def ours(log_probs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, values = kto.token_losses(
            log_probs, reference, jax.tree.map(jnp.asarray, text), config
        )
        return jnp.where(trained, text.weight * losses, 0).sum(), values

    (loss, values), gradient = jax.value_and_grad(ours, has_aux=True)(log_probs)
    there = torch.tensor(log_probs, requires_grad=True)
    ratios: list[list[torch.Tensor]] = [[], []]
    labels = []
    for row in range(ROWS):
        for number in range(3 - row):
            for of_answer, bit in zip(ratios, ANSWERS, strict=True):
                here = torch.tensor(
                    (text.sample[row] == number) & (text.kind[row] == bit) & trained[row]
                )
                of_answer.append((there[row] - torch.tensor(reference[row]))[here].sum())
            labels.append(float(label[row][text.sample[row] == number][0]))
    own, others = map(torch.stack, ratios)
    divergence = others.mean().detach().clamp(min=0) if kind == "kto" else 0.0
    of_kind = torch.tensor([1.5 if value > 0 else 0.8 for value in labels])
    total = (
        of_kind * (1 - torch.sigmoid(config.beta * torch.tensor(labels) * (own - divergence)))
    ).sum()
    total.backward()
    np.testing.assert_allclose(loss, total.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, there.grad.numpy(), atol=1e-6)
    assert values.keys() == kto.measures(config).keys()
    sums = {name: float((text.weight * x).sum()) for name, x in values.items()}
    means = mean_measures(config, sums, float(text.weight.sum()))
    good = [ratio for ratio, value in zip(own.tolist(), labels, strict=True) if value > 0]
    assert means["rewards/chosen"] == pytest.approx(config.beta * np.mean(good), rel=1e-4)
    assert ("kl" in means) == (kind == "kto")


def test_means_over_answers_that_no_sample_of_a_step_has_are_left_out():
    sums = dict.fromkeys(kto.measures(Kto()), 0.0) | {"share/chosen": 2.0, "rewards/chosen": 1.0}
    means = mean_measures(Kto(), sums, 4.0)
    assert means["rewards/chosen"] == 0.5
    assert "rewards/rejected" not in means
    assert means["share/rejected"] == 0


def test_odds_of_an_answer_that_is_certain_are_finite(text):
    certain = jnp.zeros(text.weight.shape)
    here = jax.tree.map(jnp.asarray, text)

    def loss(log_probs: jax.Array) -> jax.Array:
        return jnp.where(
            text.weight > 0, orpo.token_losses(log_probs, certain, here, Orpo())[0], 0
        ).sum()

    value, gradient = jax.value_and_grad(loss)(certain)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_losses_of_rollouts_and_their_gradients_are_those_of_torch(text, beta):
    config = Grpo(0.2, 0.28, beta, reference="stored")
    inputs = {name: torch.tensor(x) for name, x in text.loss_inputs.items()}

    def ours(log_probs: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        losses, values = grpo.token_losses(
            log_probs, text.loss_inputs["reference_log_probs"], text, config
        )
        return (text.weight * losses).sum(), values

    (loss, values), gradient = jax.value_and_grad(ours, has_aux=True)(log_probs_of(text))
    there = torch.tensor(log_probs_of(text), requires_grad=True)
    ratio = torch.exp(there - inputs["old_log_probs"])
    bounded = torch.clamp(ratio, 0.8, 1.28)
    advantage = inputs["advantages"]
    losses = -torch.minimum(ratio * advantage, bounded * advantage)
    difference = inputs["reference_log_probs"] - there
    total = (
        torch.tensor(text.weight) * (losses + beta * (difference.exp() - difference - 1))
    ).sum()
    total.backward()
    np.testing.assert_allclose(loss, total.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, there.grad.numpy(), atol=1e-6)
    assert float((values["clip_ratio"] * text.weight).sum()) > 0
    assert ("kl" in values) == (beta > 0)
