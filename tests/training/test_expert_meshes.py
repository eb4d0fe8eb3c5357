"""One batch gives one loss, one gradient and one routing of its experts, whatever devices these lie on."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from packed import pack, random_sample, tiny
from tiny_run import (
    gradients,
    make_executor,
    scattered,
    state_with,
    tiny_config,
    weight,
    worst_leaf,
)

from mmjax.config import ExpertsConfig, MeshConfig
from mmjax.config.validation import check_layout
from mmjax.errors import UserError
from mmjax.runtime.state import hyperparameters
from mmjax.training.metrics import expert_scalars

MESHES = {
    "expert=8": MeshConfig(1, expert=8),
    "data=2 x expert=4": MeshConfig(2, expert=4),
    "fsdp=2 x expert=2 x tensor=2": MeshConfig(1, fsdp=2, expert=2, tensor=2),
    "data=2 x expert=2 x tensor=2, tokens divided": MeshConfig(
        2, expert=2, tensor=2, sequence_parallel="on"
    ),
    "expert=2 x context=2 x tensor=2": MeshConfig(1, expert=2, context=2, tensor=2),
    "fsdp=2 x tensor=2": MeshConfig(1, fsdp=2, tensor=2),
}
EXPERTS = ExpertsConfig(
    (0, 1), count=8, per_token=3, width=24, shared_width=16, balance_loss=0.1, z_loss=0.05
)


def config_with(**changes):
    model = tiny(encoders=(), vocab=24)
    return tiny_config(model=replace(model, llm=replace(model.llm, experts=EXPERTS, **changes)))


def batch_of_rows(rows=8):
    rng = np.random.default_rng(0)
    lengths = [[5, 9], [16], [1, 2], [7, 3, 4]]
    samples = [[random_sample(rng, [n]) for n in lengths[r % 4]] for r in range(rows)]
    return jax.device_get(pack(samples, {"llm": 16}, encoders=()))


@pytest.mark.default_cases("fsdp=2 x expert=2 x tensor=2")
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_routing_and_every_gradient_are_those_of_one_device(mesh):
    config = config_with()
    one = make_executor(config, MeshConfig(1))
    params = scattered(one)
    wanted = gradients(one, state_with(one, params), [batch_of_rows()])
    executor = make_executor(config, MESHES[mesh])
    found = gradients(executor, state_with(executor, params), [batch_of_rows()])
    np.testing.assert_allclose(found.losses.loss, wanted.losses.loss, rtol=1e-5)
    np.testing.assert_array_equal(found.losses.experts.tokens, wanted.losses.experts.tokens)
    np.testing.assert_allclose(
        found.losses.experts.balance, wanted.losses.experts.balance, rtol=1e-5
    )
    np.testing.assert_allclose(found.losses.experts.z, wanted.losses.experts.z, rtol=1e-5)
    assert worst_leaf(found.gradients, wanted.gradients) < (1e-5, "")


def test_an_expert_axis_that_does_not_divide_the_experts_or_has_none_is_refused():
    model = config_with().model
    mesh = MeshConfig(1, expert=3)
    with pytest.raises(
        UserError, match=r"mesh\.expert=3 does not divide model\.llm\.experts\.count=8"
    ):
        check_layout("mesh", mesh, model)
    dense = replace(model, llm=replace(model.llm, experts=None))
    with pytest.raises(
        UserError, match=r"mesh\.expert=3: model\.llm\.experts is none; use mesh\.fsdp"
    ):
        check_layout("mesh", mesh, dense)


def test_a_step_reports_the_losses_and_the_imbalance_of_its_experts():
    config = config_with()
    executor = make_executor(config, MeshConfig(1))
    params = scattered(executor)
    batches = [batch_of_rows(2), batch_of_rows(4)]
    alone = [gradients(executor, state_with(executor, params), [batch]) for batch in batches]
    hyper = hyperparameters(config, 0)
    state = state_with(executor, params)
    executor.compile(state, batches, hyper)
    put = [executor.put(batch) for batch in batches]
    *_, report = executor.step(state, executor.zeros(), put, hyper)
    scalars = expert_scalars(jax.device_get(report.losses.experts))
    share = np.array([weight([batch]) for batch in batches]) / weight(batches)
    for name, field in (("experts/balance_loss", "balance"), ("experts/z_loss", "z")):
        assert scalars[name] == pytest.approx(
            share @ [getattr(sums.losses.experts, field) for sums in alone], rel=1e-5
        )
    tokens = sum(sums.losses.experts.tokens for sums in alone)
    assert (
        tokens.sum(-1).tolist()
        == [EXPERTS.per_token * sum((b.text.sample >= 0).sum() for b in batches)] * 2
    )
    assert scalars["experts/extra_turns"] == 0  # on one device there is one turn
    assert scalars["experts/imbalance"] == pytest.approx((tokens.max(-1) / tokens.mean(-1)).max())
    assert float(report.losses.loss.sum()) == pytest.approx(
        sum(float(sums.losses.loss.sum()) for sums in alone), rel=1e-5
    )
