"""Planned steps rehearsed on one device: the rows and programs of every rank, and what is made of their seconds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_run import tiny_config

from mmjax.autotune.compile_run import (
    BatchShape,
    RunPrograms,
    accumulates,
    build_model,
    make_executor,
)
from mmjax.autotune.forecast import forecast_run
from mmjax.autotune.rehearsal import RankAlone, rehearse
from mmjax.config import BatchConfig, DataConfig, MeshConfig, NoBalance, NoGrouping, Samples, Unit
from mmjax.data.loading.made_samples import made_samples
from mmjax.data.plan.length_files import index_of_lengths, omni_corpus
from mmjax.errors import UserError
from mmjax.planning.hardware import Cluster, parse_cluster
from mmjax.runtime.placement import place_stages

RANKS = 4


def made_run(microbatches=1, shorter=6, **changes):
    """A forecast run of samples of unequal lengths, which attend in blocks, and the samples' contents."""
    base = tiny_config()
    vision = replace(base.model.encoders["vision"], attention="blockwise")
    llm = replace(base.model.llm, attention="blockwise")
    model = replace(base.model, llm=llm, encoders={"vision": vision})
    batch = BatchConfig(
        Samples(2 * RANKS * microbatches),
        dict.fromkeys(model.towers, RANKS),
        microbatches=microbatches,
        balance=NoBalance(),
        grouping=NoGrouping(),
        shapes=1,
    )
    config = replace(base, model=model, data=DataConfig(), batch=batch, **changes)
    lengths = {name: -(-count // shorter) for name, count in omni_corpus(200, 0).items()}
    index = index_of_lengths(lengths, model.item_modules, model.llm)
    cluster = Cluster(parse_cluster("a100").device, RANKS, 1)
    return forecast_run(config, cluster, index, [1.0]).chosen, made_samples(index, model)


@pytest.fixture(scope="module")
def on_one_mesh():
    """A forecast run on four devices of one mesh, and the contents of its samples."""
    return made_run(mesh=MeshConfig(fsdp=RANKS))


def ticking():
    """A clock by which everything between two looks takes a second."""
    return itertools.count(0.0).__next__


def test_every_pass_of_a_microbatch_counts_once_in_a_step(on_one_mesh):
    forecast, reader = on_one_mesh
    rehearsal = rehearse(forecast, reader, jax.devices()[0], 1, None, ticking())
    microbatches = len(forecast.steps[0].microbatches)
    # An encoder has two passes; those of the LLM, which makes the loss, are one program.
    assert rehearsal.run_time.step.compute == microbatches * (2 + 1)
    assert rehearsal.run_time.step.update == rehearsal.planned.step.update
    assert rehearsal.planned.step.compute < 1
    assert rehearsal.ran == dict.fromkeys(("vision", "llm"), RANKS)
    np.testing.assert_array_equal(rehearsal.of_all, microbatches * 3.0)
    assert rehearsal.wait == 0


def test_ranks_that_do_not_run_lie_between_those_that_do():
    forecast, reader = made_run(shorter=1, mesh=MeshConfig(fsdp=RANKS))
    alone = RankAlone(forecast, reader, jax.devices()[0])
    microbatch = forecast.steps[0].microbatches[0]
    (llm,) = (piece for piece in alone.pieces if piece.tower == "llm")
    visited = alone.visited(llm, microbatch)
    ranks = alone.choose(llm, microbatch, 2)
    assert len(set(visited)) > 2
    assert [visited[r] for r in ranks] == [visited.min(), visited.max()]
    seconds = np.stack([visited, 1 + 3 * visited])
    found = alone.interpolate(llm, microbatch, ranks, seconds[:, ranks])
    np.testing.assert_allclose(found, seconds, rtol=1e-12)
    assert len(alone.choose(llm, microbatch, None)) == RANKS


@pytest.mark.exhaustive
def test_units_with_several_encoder_ranks_for_one_of_the_llm_run_alone():
    units = {"llm": Unit(data=1, pipeline=2), "vision": Unit(data=2)}
    forecast, reader = made_run(microbatches=2, units=units)
    rehearsal = rehearse(forecast, reader, jax.devices()[0], 1, None, ticking())
    assert {tower: len(s) for tower, s in rehearsal.by_rank.items()} == {"llm": 1, "vision": 2}
    assert rehearsal.of_all is None
    count = len(forecast.steps[0].microbatches)
    # The first half of the LLM has two passes, the second makes the loss in one.
    assert rehearsal.by_rank["llm"].tolist() == [count * 3.0]
    assert rehearsal.run_time.step.idle > 0


def test_a_piece_too_large_for_the_device_is_cut_into_layers(on_one_mesh):
    forecast, reader = on_one_mesh
    alone = RankAlone(forecast, reader, jax.devices()[0], room=1.0)
    layers = [piece for piece in alone.pieces if piece.tower == "llm"]
    assert [(start, stop) for _, start, stop in layers] == [(0, 1), (1, 2)]
    microbatches = forecast.steps[0].microbatches[:1]
    seconds = [
        alone.time_passes(n, microbatches, [[0]], ticking())[0].tolist()
        for n, piece in enumerate(alone.pieces)
        if piece.tower == "llm"
    ]
    assert seconds == [[[1.0], [1.0]], [[0.0], [1.0]]]


@pytest.mark.exhaustive
def test_pieces_of_a_rank_compute_what_its_device_does(on_one_mesh):
    forecast, reader = on_one_mesh
    alone = RankAlone(forecast, reader, jax.devices()[0])
    shape = forecast.steps[0].microbatches[0].shape

    def flops(compiled):
        return compiled.cost_analysis()["flops"]

    pieces = 0.0
    for number in range(len(alone.pieces)):
        programs = RunPrograms(alone.config, alone.executor, alone.shape_of(number, shape))
        pieces += sum(map(flops, programs.compile_passes(number)[0].values()))
    model = build_model(alone.config)
    stages = place_stages(alone.config, model, jax.devices()[:RANKS])
    executor = make_executor(alone.config, model, stages, accumulates(alone.config))
    batch = BatchShape.of(alone.config, forecast.layout, shape)
    whole = flops(RunPrograms(alone.config, executor, batch).lower_first(0).compile())
    assert pieces == pytest.approx(whole, rel=0.05)


def test_a_rank_of_several_devices_is_refused_by_name():
    forecast, reader = made_run(mesh=MeshConfig(fsdp=RANKS // 2, tensor=2))
    with pytest.raises(
        UserError, match=r"mesh\.tensor=2: one device rehearses ranks of one device"
    ):
        RankAlone(forecast, reader, jax.devices()[0])
