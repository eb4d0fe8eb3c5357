"""Where one sample outweighs a rank's share of a step, a line says for how long ranks wait and what helps."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
from made_lengths import lengths_of

from mmjax.benchmarks import planning
from mmjax.benchmarks.corpora import index_of_samples
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.wait_advice import ranks_without_rows, waiting_advice

NAMES = ("llm", "vision")


def grouper_of(lengths: dict[str, np.ndarray], ranks: int, per_rank: int) -> StepGrouper:
    options = argparse.Namespace(
        ranks=ranks, per_rank=per_rank, grouping="none", balance="post", seed=0
    )
    config = planning._config(options, ("vision",))
    index = index_of_samples(
        lengths, ("vision_items",), len(lengths["llm_tokens"]), 1, config.model
    )
    return StepGrouper(index, config.batch, [1.0], 0, make_budget(index, config, [1.0]))


def advice(lengths: dict[str, np.ndarray], ranks: int, per_rank: int) -> str:
    grouper = grouper_of(lengths, ranks, per_rank)
    return waiting_advice(grouper, grouper.budget.prices, ranks, NAMES)


def test_one_long_sample_among_short_ones_is_named_with_three_remedies_that_keep_what_they_promise():
    lengths = lengths_of("chats", 8000)
    lengths["llm_tokens"][::100] = 32_000
    line = advice(lengths, 64, 16)
    assert line.startswith("one sample of 32,000 tokens outweighs a rank's share: ranks wait ")
    share = int(line.split("ranks wait ")[1].split("%")[0])
    assert 35 <= share <= 60
    for remedy in ("batch.microbatches=", "mesh.context=", " samples a rank: "):
        assert remedy in line
    per_rank = int(line.split(" samples a rank")[0].rsplit(" ", 1)[1])
    assert advice(lengths, 64, per_rank) == ""  # nothing is left to say


@pytest.mark.parametrize(
    ("kind", "ranks", "per_rank"), [("chats", 64, 16), ("documents", 8, 60), ("long", 1, 16)]
)
def test_where_ranks_hardly_wait_nothing_is_said(kind, ranks, per_rank):
    assert advice(lengths_of(kind, 8000), ranks, per_rank) == ""


def test_ranks_without_rows_are_counted_with_the_samples_that_would_fill_them():
    def grouper(per_rank: int) -> StepGrouper:
        options = argparse.Namespace(
            ranks=64, per_rank=per_rank, grouping="pack", balance="post", seed=0
        )
        config = planning._config(options, ("vision",))
        index = index_of_samples(
            lengths_of("long", 20_000), ("vision_items",), 20_000, 1, config.model
        )
        return StepGrouper(index, config.batch, [1.0], 0, make_budget(index, config, [1.0]))

    few = grouper(16)
    (line,) = ranks_without_rows(few, 64, NAMES)
    assert line.startswith(f"{64 - few.budget.rows[0]} of 64 ranks have no text; ")
    enough = int(line.split("; ")[1].split()[0])
    assert 16 < enough < 26
    assert ranks_without_rows(grouper(enough), 64, NAMES) == []
