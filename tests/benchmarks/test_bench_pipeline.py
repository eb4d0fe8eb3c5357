"""`python -m mmjax.bench pipeline`: what it compares steps of real processes with, and that it runs in small."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.pipeline import (
    RELATIVE,
    STAGES,
    Task,
    Variant,
    delayed,
    hidden_share,
    lengthened,
    simulated_seconds,
    step_seconds,
)
from mmjax.config.loading import find_config, load
from mmjax.planning.schedules import make_schedule, unit_graph
from mmjax.planning.simulate import StageTimes, simulate


def task(*delays: float) -> Task:
    variants = tuple(Variant(name, delay) for name in ("1f1b", "eager") for delay in delays)
    return Task(
        RELATIVE, tuple(2 * n for n in RELATIVE), microbatches=16, variants=variants, repeats=2
    )


def test_a_process_for_every_stage_is_simulated_as_the_schedule_and_fewer_run_their_stages_in_turn():
    graph = unit_graph(load(find_config("tiny_omni"), STAGES))
    assert graph.edges == ((0, 2), (1, 2), (2, 3))
    made = task(0.0, 0.5)
    times = [np.tile(np.array(t)[:, None], (1, 16)) for t in (made.forward, made.backward)]
    for variant in made.variants:
        alone = simulate(
            make_schedule(variant.schedule, graph, 16), StageTimes(*times, transfer=variant.delay)
        )
        assert simulated_seconds(graph, 4, made, variant) == alone.makespan
        # The LLM's process has 2 stages of 3 for each microbatch, and waits for nothing but the
        # first.
        halves = simulated_seconds(graph, 2, made, variant)
        assert 16 * 2 * 3 < halves < 16 * 2 * 3 + 8
        assert simulated_seconds(graph, 1, made, variant) == 16 * 3 * sum(RELATIVE)


def test_steps_last_from_the_first_begin_to_the_last_end_and_hide_what_does_not_lengthen_them():
    # Two repeats of four variants: plain and delayed of two schedules.
    starts = 100.0 * np.arange(8)
    took = np.array([10, 14, 12, 11, 12, 13, 10, 13.0])
    measured = [
        {"began": starts, "ended": starts + took - 1},
        {"began": starts + 2, "ended": starts + took},
    ]
    seconds = step_seconds(measured, 4)
    assert seconds.tolist() == [10, 13, 10, 11]
    # 32 transfers of half a second.
    assert hidden_share(seconds, task(0.0, 0.5)).tolist() == [1 - 3 / 16, 1 - 1 / 16]


def test_a_lengthened_program_gives_its_result_and_says_by_how_much_it_was_late():
    late: list[float] = []
    assert lengthened(lambda a, b: a + b, 0.01, late)(np.float32(1), np.float32(2)) == 3
    assert lengthened(lambda: 4, 0.0, late)() == 4
    assert late[1] > 0


def test_a_delayed_piece_is_sent_by_another_thread():
    sent, arrived = [], threading.Event()

    def send(piece, number):
        sent.append((piece, number, threading.current_thread()))
        arrived.set()

    assert delayed(send, 0.0) is send
    delayed(send, 0.01)("piece", 7)
    assert arrived.wait(120)
    assert sent[0][:2] == ("piece", 7)
    assert sent[0][2] is not threading.current_thread()


@pytest.mark.exhaustive
def test_the_command_measures_driving_steps_and_reordering(capsys):
    words = (
        "--steps=1",
        "--processes",
        "2",
        "--repeats=1",
        "--microbatches=4",
        "--milliseconds=5",
        "--transfer=5",
    )
    ended = run(capsys, bench.main, "pipeline", *words, "--json")
    assert ended.code == 0, ended.err
    figures = json.loads(ended.out)
    assert figures["forward_milliseconds"] > 0 < figures["backward_milliseconds"]
    ratios = figures["wall_over_simulated_2_processes"]
    assert list(ratios) == ["1f1b", "1f1b with transfers", "eager", "eager with transfers"]
    # Passes take as long as they are told at least, whatever the load.
    assert min(ratios.values()) > 0.99
    assert (
        figures["hidden_2_processes"].keys()
        == figures["simulated_hidden_2_processes"].keys()
        == {"1f1b", "eager"}
    )
    for microbatches in (8, 32):
        gains = figures[f"reorder_gain_{microbatches}_microbatches"]
        assert 1 < gains["0.3"] < gains["1.0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--processes", "3"],
            "--processes 3: four stages of one device run in 1, 2 or 4 processes",
        ),
        (["--repeats=0"], "--repeats 0: give more than 0"),
    ],
)
def test_pipeline_says_which_option_is_wrong(capsys, words, message):
    ended = run(capsys, bench.main, "pipeline", *words)
    assert ended.code == 2
    assert message in ended.err
