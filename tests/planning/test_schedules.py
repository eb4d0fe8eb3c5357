"""Schedules of pipelines and their simulation: textbook figures, and random graphs that must never deadlock."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.planning.schedules import Action, Schedule, ScheduleName, StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, Timeline, simulate, total_order

MODALITIES = StageGraph(
    ((0, 2), (1, 2), (2, 3), (3, 4)), (0, 1, 2, 3, 4)
)  # two encoders beside each other, three LLM stages


def chain(stages: int, workers: int | None = None) -> StageGraph:
    """Stages in a row; with fewer workers, each runs several in turn."""
    return StageGraph(
        tuple((i, i + 1) for i in range(stages - 1)),
        tuple(i % (workers or stages) for i in range(stages)),
    )


def run(
    name: ScheduleName, graph: StageGraph, microbatches: int, forward=2.0, backward=4.0, **transfer
) -> Timeline:
    shape = (len(graph.workers), microbatches)
    times = StageTimes(np.full(shape, forward), np.full(shape, backward), **transfer)
    return simulate(make_schedule(name, graph, microbatches), times)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager"])
def test_equal_stages_take_the_closed_form_of_their_schedule(name):
    timeline = run(name, chain(4), 8)
    assert timeline.makespan == (8 + 4 - 1) * (2 + 4)
    assert timeline.bubble == pytest.approx(3 / 11)
    ahead = {"gpipe": [8, 8, 8, 1], "1f1b": [4, 3, 2, 1], "eager": [7, 5, 3, 1]}
    assert timeline.in_flight.tolist() == ahead[name]


def test_interleaving_divides_the_bubble_by_the_chunks():
    timeline = run("interleaved", chain(8, workers=4), 8, forward=1.0, backward=2.0)
    assert timeline.makespan == (8 + (4 - 1) / 2) * (2 + 4)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_every_stage_behind_the_llm_adds_one_pass_to_a_step(name):
    for behind in range(4):
        chunks = 4 if name == "1f1b" else 8
        edges = tuple((i, i + 1) for i in range(chunks + behind - 1))
        graph = StageGraph(edges, (*(i % 4 for i in range(chunks)), *range(4, 4 + behind)))
        seconds = {"1f1b": 12 + 3, "interleaved": 2 * 12 + 3}[name] * 3
        assert run(name, graph, 12, forward=1.0, backward=2.0).makespan == seconds + 3 * behind


def test_encoders_side_by_side_are_faster_than_one_after_the_other():
    assert (run("1f1b", MODALITIES, 16).makespan, run("1f1b", chain(5), 16).makespan) == (114, 120)


def test_transfers_cost_1f1b_their_time_twice_over_and_eager_little():
    for delay, plain, eager in ((0.5, 128, 117), (1.0, 142, 120)):
        assert run("1f1b", MODALITIES, 16, transfer=delay).makespan == plain
        assert run("eager", MODALITIES, 16, transfer=delay).makespan == eager
        assert run("1f1b", MODALITIES, 16, transfer=delay, blocking=True).makespan > plain


def random_graph(rng: np.random.Generator) -> StageGraph:
    """Up to six stages, each linked to an earlier or a later one; every fifth that could ends the graph."""
    stages = int(rng.integers(1, 7))
    edges = {(a, b) for a in range(stages) for b in range(a + 1, stages) if rng.random() < 0.25}
    for a in range(stages - 1):
        if a not in {b for _, b in edges} or rng.random() < 0.8:
            edges.add((a, int(rng.integers(a + 1, stages))))
    edges |= {(stages - 2, stages - 1)} - {(-1, 0)}
    return StageGraph(tuple(sorted(edges)), tuple(range(stages)))


def test_a_thousand_random_graphs_run_in_one_order_without_deadlock_and_within_their_bound():
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        graph, microbatches = random_graph(rng), int(rng.integers(1, 13))
        for name, bound in (("1f1b", lambda d: d + 1), ("eager", lambda d: 2 * d + 1)):
            schedule = make_schedule(name, graph, microbatches)
            order = total_order(schedule)
            assert len(order) == 2 * microbatches * len(graph.workers)
            assert_runs_in_order(graph, order)
            for stage, depth in enumerate(graph.depths):
                assert schedule.in_flight_bound(stage) <= bound(depth)
        assert_runs_in_order(graph, total_order(make_schedule("gpipe", graph, microbatches)))


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("encoders", [1, 2])
def test_encoders_before_interleaved_chunks_never_deadlock(encoders, chunks):
    workers = 3
    llm = range(encoders, encoders + workers * chunks)
    edges = [*((e, encoders) for e in range(encoders)), *((s, s + 1) for s in llm[:-1])]
    graph = StageGraph(
        tuple(edges), (*range(encoders), *(encoders + i % workers for i in range(workers * chunks)))
    )
    whole = make_schedule("interleaved", graph, 12)
    for microbatches in range(1, 13):
        schedule = make_schedule("interleaved", graph, microbatches)
        order = total_order(schedule)
        assert len(order) == 2 * microbatches * len(graph.workers)
        assert_runs_in_order(graph, order)
        for stage in range(len(graph.workers)):
            assert schedule.in_flight_bound(stage) <= whole.in_flight_bound(stage)


BEHIND = {  # edges and workers of generators behind the LLM's stages 1 and 2, which an encoder comes before
    "a unit each": (((2, 3), (2, 4)), (3, 4)),
    "stages of their own": (((2, 3), (3, 4), (2, 5)), (3, 4, 5)),
    "one beside the llm": (((2, 3), (2, 4)), (2, 3)),
    "one beside the llm, one in stages": (((2, 3), (2, 4), (4, 5)), (2, 3, 4)),
    "both beside the llm": (((2, 3), (2, 4)), (2, 2)),
    "one unit": (((2, 3), (2, 4)), (3, 3)),
    "three": (((2, 3), (2, 4), (2, 5)), (3, 2, 4)),
}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager"])
@pytest.mark.parametrize("behind", BEHIND)
def test_several_generators_never_deadlock_and_each_runs_backward_with_its_forward_pass(
    behind, name
):
    edges, workers = BEHIND[behind]
    graph = StageGraph(((0, 1), (1, 2), *edges), (0, 1, 2, *workers))
    for microbatches in range(1, 9):
        schedule = make_schedule(name, graph, microbatches)
        order = total_order(schedule)
        assert len(order) == 2 * microbatches * len(graph.workers)
        assert_runs_in_order(graph, order)
        for stage, depth in enumerate(graph.depths):
            bound = {
                "gpipe": microbatches if depth else 1,
                "1f1b": depth + 1,
                "eager": 2 * depth + 1,
            }[name]
            assert schedule.in_flight_bound(stage) <= bound


@pytest.mark.parametrize("encoders", [(2, 3), (2, 2)], ids=["encoders apart", "encoders together"])
@pytest.mark.parametrize(
    "generators", [((5, 6), (5, 7)), ((5, 6), (6, 7), (5, 8))], ids=["a stage each", "in stages"]
)
def test_several_generators_behind_interleaved_chunks_never_deadlock(encoders, generators):
    chunks = ((2, 3), (3, 4), (4, 5))
    first = 1 + max(encoders)
    workers = (*encoders, 0, 1, 0, 1, *range(first, first + len(generators)))
    graph = StageGraph(((0, 2), (1, 2), *chunks, *generators), workers)
    for microbatches in range(1, 9):
        order = total_order(make_schedule("interleaved", graph, microbatches))
        assert len(order) == 2 * microbatches * len(graph.workers)
        assert_runs_in_order(graph, order)


def assert_runs_in_order(graph: StageGraph, order: tuple[Action, ...]) -> None:
    """Every action comes after those that it needs."""
    done: set[Action] = set()
    for action in order:
        kind, stage, i = action
        linked = (graph.producers if kind == "forward" else graph.consumers)[stage]
        needs = [Action(kind, s, i) for s in linked if graph.runs(s, i)]
        needs += [Action("forward", stage, i)] if kind == "backward" else []
        assert done.issuperset(needs), (action, needs)
        done.add(action)


def test_no_schedule_ends_before_its_longest_stage_or_path_could():
    rng = np.random.default_rng(3)
    for _ in range(50):
        graph, m = random_graph(rng), int(rng.integers(1, 9))
        times = StageTimes(
            rng.exponential(size=(len(graph.workers), m)),
            rng.exponential(size=(len(graph.workers), m)),
        )
        timeline = simulate(make_schedule("1f1b", graph, m), times)
        total = times.forward + times.backward
        path = np.zeros(m)
        longest = [path] * len(graph.workers)
        for stage in graph.topological:
            before = [longest[p] for p in graph.producers[stage]]
            longest[stage] = total[stage] + (np.max(before, axis=0) if before else 0)
        assert (
            timeline.makespan
            >= max(total.sum(1).max(), max(longest[sink].max() for sink in graph.sinks)) - 1e-9
        )


def test_orders_in_which_workers_wait_for_each_other_are_refused():
    graph = chain(2)
    wrong = (
        (Action("backward", 0, 0), Action("forward", 0, 0)),
        (Action("forward", 1, 0), Action("backward", 1, 0)),
    )
    with pytest.raises(
        ValueError, match=r"wait for each other in a circle: backward of stage 0, microbatch 0"
    ):
        total_order(Schedule(graph, 1, wrong))


@pytest.mark.parametrize(
    ("edges", "workers", "message"),
    [
        (((0, 1), (1, 0)), (0, 1), "in a circle"),
        (((0, 2),), (0, 1, 2), r"the stages \[1\] are linked to no other"),
        (((0, 3),), (0, 1), "leads to no stage"),
    ],
)
def test_graphs_that_are_no_pipeline_are_refused(edges, workers, message):
    with pytest.raises(ValueError, match=message):
        StageGraph(edges, workers)


def test_schedules_that_do_not_fit_the_workers_are_refused():
    with pytest.raises(ValueError, match="use interleaved"):
        make_schedule("1f1b", chain(4, workers=2), 4)
    with pytest.raises(ValueError, match="equally many chunks"):
        make_schedule("interleaved", chain(3, workers=2), 2)


def test_stages_that_share_devices_run_as_one():
    together = StageGraph(((0, 2), (1, 2), (2, 3)), (0, 0, 1, 2))  # both encoders on one worker
    assert (
        run("1f1b", together, 8).makespan == 8 * (2 * 6) + 4
    )  # the encoders' worker waits once, for the first gradient
    # and together with the LLM's first layers
    before = StageGraph(((0, 2), (1, 2), (2, 3)), (0, 0, 0, 1))
    assert make_schedule("1f1b", before, 4).in_flight_bound(0) == 2


def test_stages_side_by_side_count_once_among_those_that_a_microbatch_passes():
    encoders_before_llm = StageGraph(((0, 2), (1, 2), (2, 3), (3, 4)), (0, 1, 2, 3, 4))
    assert encoders_before_llm.workers_in_turn == 4
    # With virtual stages a worker is passed twice, and is one.
    assert StageGraph(((0, 1), (1, 2), (2, 3)), (0, 1, 0, 1)).workers_in_turn == 2


# Device milliseconds of one microbatch's forward and backward pass in omni_10b's towers, as
# docs/pipelines.md has them.
VISION, AUDIO = np.array([35.7, 78.9]) * 6, np.array([14.5, 26.9]) * 2
LLM = 2 * np.array([122.4, 258.3])


def with_copies(
    stages: int, chunks: int = 1, encoders: int = 2, times=((1, 2), (1, 2)), llm_times=(1, 2)
) -> StageGraph:
    """An LLM in stages, and on the devices of each a copy of encoders; the first of them is cut into chunks."""
    edges, workers, copies, seconds = [], [*range(stages)], [(0, 1)] * stages, [llm_times] * stages
    edges += [(s, s + 1) for s in range(stages - 1)]
    for copy in range(stages):
        for encoder in range(encoders):
            parts = chunks if encoder == 0 else 1
            numbers = range(len(workers), len(workers) + parts)
            edges += [*((a, a + 1) for a in numbers[:-1]), (numbers[-1], 0)]
            workers += [copy] * parts
            copies += [(copy, stages)] * parts
            seconds += [times[encoder]] * parts
    return StageGraph(tuple(edges), tuple(workers), tuple(copies), tuple(seconds))


def omni_with_copies(stages: int, chunks: int) -> StageGraph:
    """omni_10b_units' work on 16 devices, in units of a microsecond."""
    devices = 16 // stages
    vision, audio, llm = (
        tuple(np.rint(1000 * work / devices).astype(int).tolist())
        for work in (VISION / chunks, AUDIO, LLM / stages)
    )
    return with_copies(stages, chunks, 2, (vision, audio), llm)


def idle(
    graph: StageGraph, microbatches: int, transfer: float = 0.0, noise: float = 0.0, seed: int = 0
) -> float:
    rng = np.random.default_rng(seed)
    seconds = np.array(graph.times, float).T[..., None] * rng.normal(
        1, noise, (2, len(graph.times), microbatches)
    )
    times = StageTimes(*seconds, transfer=transfer, blocking=True)
    return simulate(make_schedule("nested", graph, microbatches), times).bubble


def test_encoders_beside_random_pipelines_run_in_one_order_and_hold_a_bounded_number_of_microbatches():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(2, 5))
        graph = with_copies(
            stages,
            int(rng.integers(1, 4)),
            int(rng.integers(1, 3)),
            tuple(map(tuple, rng.integers(0, 30, (2, 2)).tolist())),
            tuple(rng.integers(1, 10, 2).tolist()),
        )
        microbatches = int(rng.integers(1, 17))
        schedule = make_schedule("nested", graph, microbatches)
        order = total_order(schedule)
        runs = [
            sum(graph.runs(s, m) for m in range(microbatches)) for s in range(len(graph.workers))
        ]
        assert len(order) == len(set(order)) == 2 * sum(runs)
        assert_runs_in_order(graph, order)
        plain = make_schedule("1f1b", chain(stages), microbatches)
        for stage in range(len(graph.workers)):
            bound = plain.in_flight_bound(stage) if stage < stages else 3
            assert schedule.in_flight_bound(stage) <= bound


def test_a_nested_schedule_is_one_order_of_the_llms_passes_whatever_the_encoders_take():
    plain = make_schedule("1f1b", chain(4), 8).orders
    for vision in (1, 10, 100):
        schedule = make_schedule(
            "nested", with_copies(4, 2, 2, ((vision, vision), (3, 0)), (4, 8)), 8
        )
        assert [tuple(a for a in order if a.stage < 4) for order in schedule.orders] == list(plain)


@pytest.mark.parametrize("stages", [4, 8])
def test_nested_encoders_leave_less_idle_time_than_mixed_stages_that_take_equally_long(stages):
    for microbatches in (8, 16, 32, 64):
        chain_of_equals = (stages - 1) / (microbatches + stages - 1)
        for chunks in (1, 4):
            assert idle(omni_with_copies(stages, chunks), microbatches) < chain_of_equals


@pytest.mark.parametrize("stages", [4, 8])
def test_nested_encoders_in_four_parts_leave_8_percent_idle_with_slow_transfers_and_uneven_passes(
    stages,
):
    graph = omni_with_copies(stages, 4)
    assert idle(graph, 32) < 0.03
    assert np.mean([idle(graph, 32, 1000.0, 0.1, seed) for seed in range(10)]) <= 0.08
    held = [make_schedule("nested", graph, m).in_flight_bound(stages) for m in (32, 64, 96)]
    assert held == [3, 3, 3]
