"""OmniBal's partitions of nine models, at their depth and a toy width: the gradients of one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from test_executor import assert_gradients_of_one_mesh, make_pipeline
from tiny_run import load_steps, tiny_config

from mmjax.benchmarks.papers_omnibal import OMNIBAL_MODELS, omnibal_partition
from mmjax.config import Config, EmbeddedSource, Unit


def partitioned(name: str, layers: Sequence[int]) -> Config:
    """A model as deep as this one on stages of so many layers, whichever towers these are of."""
    row = OMNIBAL_MODELS[name]
    cuts = [
        f"vision.{layer}" if layer < row.vision.layers else f"llm.{layer - row.vision.layers}"
        for layer in tuple(accumulate(layers))[:-1]
    ]
    unit = Unit(modules=("vision", "llm"), pipeline=len(layers), cuts=tuple(cuts))
    config = tiny_config(units={"all": unit})
    model = replace(
        config.model,
        llm=replace(config.model.llm, layers=row.llm.layers),
        encoders={"vision": replace(config.model.encoders["vision"], layers=row.vision.layers)},
    )
    data = replace(
        config.data, sources={"embedded": EmbeddedSource(samples=100, modalities=("image",))}
    )
    rows = {"llm": 2, "vision": 1}
    return replace(
        config,
        model=model,
        data=data,
        batch=replace(config.batch, rows=rows, microbatches=2, shapes=1),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OMNIBAL_MODELS)
@pytest.mark.parametrize("whose", ["paper", "ours"])
def test_partitions_of_omnibal_have_the_gradients_of_one_mesh(name, whose, tmp_path):
    row = OMNIBAL_MODELS[name]
    layers = row.layers if whose == "paper" else omnibal_partition(row)
    config = partitioned(name, layers)
    pipeline = make_pipeline(config)
    assert [
        sum(p.stop - p.start for p in placed.stage.pieces) for placed in pipeline.stages
    ] == list(layers)
    batches = load_steps(config, tmp_path, 1)[0]
    assert_gradients_of_one_mesh(config, pipeline, batches, batches)
