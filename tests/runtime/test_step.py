"""Updates in bfloat16 with a frozen encoder, on eight devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import (
    MESHES,
    Trained,
    load_steps,
    make_executor,
    paths,
    tiny_config,
    train,
    weight,
    weights,
)

from mmjax.batch import Microbatch
from mmjax.config import (
    AdamW,
    BatchConfig,
    EmbeddedSource,
    PackGrouping,
    Rates,
    Samples,
    TrainingConfig,
)
from mmjax.data.plan.placement import Topology
from mmjax.runtime.device_batch import MAX_UNREADABLE, ProcessReport, put_report
from mmjax.runtime.devices import CompileCounter
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.state import TrainState, hyperparameters

STEPS = 12


def config():
    """Images and text; the encoder frozen, its connector and the LLM trained."""
    base = tiny_config(training=TrainingConfig(steps=STEPS, precision="bfloat16"))
    vision = replace(base.model.encoders["vision"], frozen=True)
    source = EmbeddedSource(modalities=("image", "text"), samples=200)
    return replace(
        base,
        data=replace(base.data, sources={"embedded": source}),
        batch=BatchConfig(
            Samples(8), {"llm": 2, "vision": 2}, grouping=PackGrouping(chunk_steps=STEPS), shapes=2
        ),
        model=replace(base.model, encoders={"vision": vision}),
    )


@dataclass
class Run:
    executor: Executor
    steps: list[tuple[Microbatch, ...]]
    before: State  # on the host
    trained: Trained
    compiled: int  # programs, while training


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    executor = make_executor(config(), MESHES["fsdp=8"])
    steps = load_steps(config(), tmp_path_factory.mktemp("data"), STEPS, Topology(8, 8, 8))
    state = executor.init(jax.random.key(0))
    before = jax.device_get(state)
    shapes = {str(jax.tree.map(np.shape, b)): b for batches in steps for b in batches}
    executor.compile(state, [*shapes.values()], hyperparameters(config(), 0))
    programs = CompileCounter()
    trained = train(config(), executor, state, steps)
    return Run(executor, steps, before, trained, programs.requested)


@pytest.mark.exhaustive
def test_bfloat16_with_float32_master_weights_learns(run):
    losses = run.trained.losses
    assert np.isfinite(losses).all()
    assert losses[-3:].mean() < 0.9 * losses[:2].mean()
    state = run.trained.state
    moments = state.stages[0].optimizer
    for part in (state.trainable, moments.mu, moments.nu, run.executor.zeros()[0].gradients):
        assert {x.dtype for x in jax.tree.leaves(part)} == {jnp.dtype(jnp.float32)}
    assert int(state.stages[0].step) == STEPS


def test_a_frozen_module_is_stored_in_the_precision_of_the_computation_and_never_changes(run):
    state = run.trained.state
    assert {name.split(".")[1] for name in paths(state.frozen)} == {"vision"}
    assert {x.dtype for x in jax.tree.leaves(state.frozen)} == {jnp.dtype(jnp.bfloat16)}
    for name, p in paths(run.before.frozen).items():
        assert np.asarray(paths(state.frozen)[name]).tobytes() == p.tobytes(), name


def test_a_frozen_module_has_no_gradient_and_no_optimizer_state(run):
    state = run.trained.state
    trained = set(paths(state.trainable))
    assert trained.isdisjoint(paths(state.frozen))
    assert (
        set(paths(state.stages[0].optimizer.mu))
        == set(paths(state.stages[0].optimizer.nu))
        == trained
    )
    assert set(paths(run.executor.zeros()[0].gradients)) == trained
    assert trained | set(paths(state.frozen)) == set(paths(run.executor.model.abstract))
    assert run.executor.parameters(state).keys() == run.executor.model.abstract.keys()


def test_what_is_not_frozen_around_it_learns(run):
    for name, p in paths(run.before.trainable).items():
        if name.startswith("connectors.vision.mlp") or name == "llm.embed.weight":
            assert np.abs(np.asarray(paths(run.trained.state.trainable)[name]) - p).max() > 1e-3, (
                name
            )


def test_another_learning_rate_decay_clip_or_seed_compiles_nothing(run):
    executor = run.executor
    state, accumulated = executor.init(jax.random.key(0)), executor.zeros()
    batches = [executor.put(b) for b in run.steps[0]]
    programs = CompileCounter()
    for n in range(3):
        own = {"vision.connector": Rates(0.1 * n, 0.01 * n)}
        changed = replace(
            config(),
            optimizer=AdamW(10.0**-n, 0.1 * n, modules=own),
            training=replace(config().training, clip=1.0 + n),
        )
        hyper = hyperparameters(changed, n)
        state, accumulated, _ = executor.step(state, accumulated, batches, hyper)
        state = executor.init(jax.random.key(n))
    assert programs.requested == 0
    jax.jit(lambda x: x + 1)(np.float32(1))
    assert programs.requested == 1


def test_programs_compiled_ahead_are_all_that_training_runs(run):
    assert run.compiled == 0


def test_a_step_leaves_the_accumulated_gradients_and_report_at_zero(run):
    executor = run.executor
    hyper = hyperparameters(config(), 0)
    batches = [executor.put(b) for b in run.steps[0]]
    state = executor.init(jax.random.key(0))
    _, accumulated, told = executor.step(state, executor.zeros(), batches, hyper)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(accumulated))
    assert float(told.losses.weight.sum()) == weight(run.steps[0])


@pytest.mark.parametrize("factor", [0.0, 3e38], ids=["no weight", "not finite"])
def test_a_step_without_weight_or_finite_numbers_updates_nothing_and_says_so(run, factor):
    executor = run.executor
    state, accumulated = executor.init(jax.random.key(0)), executor.zeros()
    before = jax.device_get(state)
    hyper = hyperparameters(config(), 0)
    batches = [executor.put(b) for b in run.steps[0]]
    weighed = [
        (b._replace(text=b.text._replace(weight=b.text.weight * factor)),) for (b,) in batches
    ]
    state, accumulated, report = executor.step(state, accumulated, weighed, hyper)
    assert (float(report.losses.weight.sum()) > 0) == (factor > 0)
    assert factor == 0 or not report.finite
    assert_unchanged(state, before)
    state, _, report = executor.step(state, accumulated, batches, hyper)
    assert report.finite
    assert int(state.stages[0].step) == 1


def test_a_sample_that_some_process_could_not_read_weighs_nothing_and_all_know_it(run):
    executor = run.executor
    batches = [executor.put(b) for b in run.steps[0]]
    hyper, owners = hyperparameters(config(), 0), np.asarray(batches[0][0].text.owner)
    bad = sorted(int(n) for n in np.unique(owners[owners >= 0])[:2])
    texts = [batch.text for (batch,) in batches]
    silenced = [jnp.where(jnp.isin(text.owner, jnp.array(bad)), 0.0, text.weight) for text in texts]
    silent = [
        (batch._replace(text=batch.text._replace(weight=new)),)
        for (batch,), new in zip(batches, silenced, strict=True)
    ]
    wanted, _, same = executor.step(
        executor.init(jax.random.key(0)), executor.zeros(), silent, hyper
    )
    state = executor.init(jax.random.key(0))
    state, _, told = executor.step(
        state, executor.zeros(), batches, hyper, ProcessReport(unreadable=bad)
    )
    assert sorted(int(n) for n in told.unreadable if n >= 0) == bad
    assert int(told.unreadable_count) == 2
    assert float(told.losses.weight.sum()) == float(same.losses.weight.sum()) < weight(run.steps[0])
    assert_unchanged(state, jax.device_get(wanted))


def test_the_same_sample_told_by_several_devices_counts_once(run):
    executor = run.executor
    told = np.full((executor.mesh.size, MAX_UNREADABLE + 1), -1, np.int32)
    told[:, 0], told[1, 1], told[2, 1] = 7, 0, 9
    samples, count = executor.merge_unreadable(told)
    assert int(count) == 3
    assert [int(n) for n in samples[:4]] == [9, 7, 0, -1]


def test_where_more_cannot_be_read_than_may_be_left_out_nothing_is_updated(run):
    executor = run.executor
    state = executor.init(jax.random.key(0))
    before = jax.device_get(state)
    batches = [executor.put(b) for b in run.steps[0]]
    hyper, many = hyperparameters(config(), 0), range(10_000, 10_000 + 5 * MAX_UNREADABLE)
    state, _, told = executor.step(
        state, executor.zeros(), batches, hyper, ProcessReport(unreadable=many)
    )
    assert int(told.unreadable_count) == MAX_UNREADABLE + 1
    assert_unchanged(state, before)


def test_one_microbatch_leaves_nothing_between_steps_and_updates_the_same(tmp_path):
    text = EmbeddedSource(modalities=("text",), samples=50)
    base = config()
    made = replace(
        base,
        data=replace(base.data, sources={"embedded": text}),
        batch=BatchConfig(Samples(4), {"llm": 2}, grouping=PackGrouping(chunk_steps=2)),
        model=replace(base.model, encoders={}),
    )
    summing = make_executor(made, MESHES["one device"])
    direct = make_executor(made, MESHES["one device"], accumulates=False)
    ((batch,), _) = steps = load_steps(made, tmp_path, 2)
    states = [executor.init(jax.random.key(0)) for executor in (summing, direct)]
    assert direct.zeros() == [None]
    hyper = hyperparameters(made, 0)
    direct.compile(states[1], [batch], hyper)

    def gradients(executor, sums):
        return executor.gradients(
            states[1], [sums], [executor.put(batch)], weights([batch]), None
        ).sums[0]

    # A bfloat16 product holds all of a matrix's gradient.
    wanted = gradients(summing, summing.zeros()[0]).gradients
    once = gradients(direct, None)
    matrices = [
        x
        for name, x in paths(once.gradients).items()
        if ".runs." in name and name.endswith("weight")
    ]
    assert {x.dtype for x in matrices} == {jnp.dtype(jnp.bfloat16)}
    twice = gradients(direct, jax.tree.map(jnp.copy, once))  # for it is donated
    for name, g in paths(wanted).items():
        x, y = (np.asarray(paths(found.gradients)[name], np.float32) for found in (once, twice))
        np.testing.assert_allclose(x, g, atol=1e-6 * np.abs(g).max(), err_msg=name)
        np.testing.assert_allclose(y, 2 * g, atol=1e-6 * np.abs(g).max(), err_msg=name)

    programs = CompileCounter()
    for batches in steps:
        put = [direct.put(b) for b in batches]
        states[1], kept, told = direct.step(states[1], [None], put, hyper)
        assert kept == [None]
    assert programs.requested == 0
    for batches in steps:
        states[0], _, same = summing.step(
            states[0], summing.zeros(), [summing.put(b) for b in batches], hyper
        )
    assert float(told.losses.loss.sum()) == pytest.approx(float(same.losses.loss.sum()), rel=1e-5)
    for name, p in paths(states[0].trainable).items():
        np.testing.assert_allclose(
            paths(states[1].trainable)[name], p, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_a_step_that_processes_planned_differently_updates_nothing_and_says_so(run):
    executor = run.executor
    state, accumulated = executor.init(jax.random.key(0)), executor.zeros()
    before = jax.device_get(state)
    hyper = hyperparameters(config(), 0)
    put = [executor.put(batch) for batch in run.steps[0]]
    (accumulated,) = executor.gradients(state, accumulated, put, {"llm": np.float32(1)}, None).sums
    part = state.stages[0]
    report = ProcessReport(
        digest=123 << 31 | 5, content=7 << 40 | 3, needed_flops=8.0, batch_seconds=0.5, stop=True
    )
    reports = put_report(report, executor.mesh)
    unreadable = executor.merge_unreadable(reports.unreadable)
    for half in range(2):
        digest = np.array(reports.digest)
        digest[3, half] += 1
        different = reports._replace(digest=digest)
        part, accumulated, told = executor.update_whole(
            part, accumulated, hyper, {"llm": np.float32(1)}, different, unreadable
        )
        assert not told.agreed
        assert_unchanged(part, before)
    _, _, told = executor.update_whole(
        part, accumulated, hyper, {"llm": np.float32(1)}, reports, unreadable
    )
    assert told.agreed
    assert told.stop
    assert float(told.needed_flops) == 8
    assert [int(half) for half in told.content] == [3, 7 << 8]
    assert np.asarray(told.batch_seconds).tolist() == [0.5] * 8


def assert_unchanged(state: TrainState | State, before: State) -> None:
    for x, y in zip(jax.tree.leaves(jax.device_get(state)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(x, y)
