"""Numbers that are not finite update nothing and name the samples behind them; far too large ones are told."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import MESHES, load_steps, make_executor, tiny_config

from mmjax.config import BatchConfig, PackGrouping, Samples, TrainingConfig
from mmjax.data.plan.placement import Topology
from mmjax.errors import UserError
from mmjax.losses.step_losses import MAX_WORST, Losses
from mmjax.runtime.device_batch import bisect_bad
from mmjax.runtime.executor import State
from mmjax.runtime.state import hyperparameters
from mmjax.training.bad_samples import MAX_SKIPPED, MIN_NORMS, NonFiniteWatch

TINY = tiny_config(
    batch=BatchConfig(
        Samples(24), {"llm": 8, "vision": 8, "audio": 8}, 2, PackGrouping(chunk_steps=4)
    )
)
# Not tied: else a token's row of the table would be in every position's logits.
CONFIG = replace(
    TINY, model=replace(TINY.model, llm=replace(TINY.model.llm, tied=False, norm_eps=1e-37))
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    executor = make_executor(CONFIG, MESHES["data=8"])
    (batches,) = load_steps(CONFIG, tmp_path_factory.mktemp("data"), 1, Topology(8, 8, 8))
    return executor, batches


def rarest(batches) -> int:
    """A token that stands in the fewest rows, and in one at least."""
    rows = [row for b in batches for row in np.where(b.text.kind != 0, b.text.token, 0)]
    counts = np.array(
        [sum(token in row for row in rows) for token in range(CONFIG.model.llm.vocab)]
    )
    counts[:2] = len(rows)
    return int(np.argmin(np.where(counts == 0, len(rows), counts)))


def with_token(batches, token: int) -> set[int]:
    """All samples of the rows in which it stands."""
    rows = (
        (owner, t) for b in batches for owner, t in zip(b.text.owner, b.text.token, strict=True)
    )
    return {int(sample) for owner, t in rows if token in t for sample in owner if sample >= 0}


def state_with_embedding(executor, token: int, value: float):
    state = executor.init(jax.random.key(0))
    table = state.trainable["llm"]["embed"]["weight"]
    changed = jax.device_put(jnp.asarray(table).at[token].set(value), table.sharding)
    llm = state.trainable["llm"] | {"embed": state.trainable["llm"]["embed"] | {"weight": changed}}
    steep = jax.tree.map_with_path(lambda path, x: x * (100 if "norm" in str(path) else 1), llm)
    return State((state.stages[0]._replace(trainable=state.trainable | {"llm": steep}),))


@pytest.mark.exhaustive
@pytest.mark.parametrize("value", [np.nan, 2e-19], ids=["loss", "gradient-alone"])
def test_a_step_without_finite_numbers_updates_nothing_and_its_rows_samples_are_found(run, value):
    """What is next to nothing a norm makes as large as anything else, and its gradient as steep: that overflows."""
    executor, batches = run
    token = rarest(batches)
    state = state_with_embedding(executor, token, value)
    before = jax.device_get(state)
    put = [executor.put(b) for b in batches]
    hyper = hyperparameters(CONFIG, 0)
    state, accumulated, told = executor.step(state, executor.zeros(), put, hyper)
    assert not told.finite
    assert told.agreed
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(accumulated))
    affected = with_token(batches, token)
    assert 0 < len(affected) < MAX_WORST
    count = int(told.losses.not_finite)
    if np.isnan(value):
        found = set(np.asarray(told.losses.worst_samples[:count]).tolist())
    else:
        assert count == 0
        assert np.isfinite(np.asarray(told.losses.loss)).all()
        found = set(executor.find_bad(state, put, hyper, None, ()))
    assert found <= affected
    weighted = {int(k) for b in batches for k in b.text.owner[b.text.weight > 0]}
    assert found >= affected & weighted


def test_halving_finds_every_bad_member_with_few_trials():
    for bad in ([], [3], [0, 1000], [5, 6, 700]):
        trials = []

        def is_bad(part, bad=bad, trials=trials):
            trials.append(part)
            return bool(set(part) & set(bad))

        assert bisect_bad(list(range(1024)), is_bad, 1000) == bad
        assert len(trials) <= 1 + 2 * 10 * max(1, len(bad))


def test_halving_that_takes_too_long_names_whole_parts():
    found = bisect_bad(list(range(1024)), lambda part: True, 20)
    assert set(found) <= set(range(1024))
    assert len(found) > 500


# -----------------------------------------------------------------------------------------------
# what is said of it


class Report:
    """Of a step, what `NonFiniteWatch` reads."""

    def __init__(self, finite=True, norm=1.0, losses=(), not_finite=0) -> None:
        self.finite, self.gradient_norm = finite, np.float32(norm)
        sample, loss = np.zeros(MAX_WORST, np.int32), np.zeros(MAX_WORST, np.float32)
        sample[: len(losses)], loss[: len(losses)] = np.arange(len(losses)) + 7, losses
        self.losses = Losses(
            worst_samples=sample, worst_losses=loss, not_finite=np.int32(not_finite)
        )


def watching(**changes) -> NonFiniteWatch:
    return NonFiniteWatch(TrainingConfig(steps=100, **changes), lambda sample: f"few[{sample}]")


def test_a_gradient_norm_far_above_the_usual_names_the_worst_samples(capsys):
    watch = watching()
    for step in range(MIN_NORMS):
        watch.check(step, Report(norm=1 + 0.1 * (step % 3)), list, [])
    watch.check(MIN_NORMS, Report(norm=9), list, [])
    assert capsys.readouterr().out == ""
    watch.check(MIN_NORMS + 1, Report(norm=14, losses=[5.5, 3.25]), list, [])
    out = capsys.readouterr().out
    assert (
        out
        == "step 22: the gradient norm is 14, usually 1.1; worst losses: few[7] 5.5, few[8] 3.25\n"
    )
    watching(spike=0).check(0, Report(norm=1e9), list, [])
    assert capsys.readouterr().out == ""


def test_the_log_gets_the_eight_worst_by_name():
    assert watching().worst_losses(Report(losses=np.arange(20, 0, -1))) == {
        f"few[{7 + k}]": 20.0 - k for k in range(8)
    }


def test_where_it_stops_it_names_the_samples_and_what_to_do():
    with pytest.raises(
        UserError,
        match=r"step 5 is not a finite number, and nothing was updated\. The losses of 2 sa",
    ):
        watching().check(4, Report(False, losses=[np.inf, np.inf], not_finite=2), list, [])
    with pytest.raises(
        UserError,
        match=r"the gradients of the rows of 2 samples are not: few\[3\], few\[4\]\. Look",
    ):
        watching().check(4, Report(False), lambda: [3, 4], [])
    with pytest.raises(
        UserError, match=r"no rows alone give it; its samples are few\[0\], .* and 8 more\. Look at"
    ):
        watching().check(4, Report(False), list, list(range(40)))


def test_where_it_skips_it_goes_on_but_not_for_ever(capsys):
    watch = watching(bad_numbers="skip")
    for step in range(MAX_SKIPPED - 1):
        watch.check(step, Report(False, not_finite=1, losses=[np.inf]), list, [])
    watch.check(MAX_SKIPPED, Report(), list, [])
    for step in range(MAX_SKIPPED - 1):
        watch.check(step, Report(False, not_finite=1, losses=[np.inf]), list, [])
    assert (
        capsys.readouterr().out.count(
            "nothing was updated. The losses of 1 samples are not finite: few[7]"
        )
        == 18
    )
    with pytest.raises(UserError, match="10 steps in a row were skipped"):
        watch.check(99, Report(False, not_finite=1, losses=[np.inf]), list, [])
