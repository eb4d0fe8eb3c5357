"""Budgets come from the data that is drawn, and what can't be used is said before step 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made import VISION, Made, config, image, index_of, random_samples, random_texts
from planned import GROUPINGS, KINDS, grouper, samples_of, steps_of_chunks

from mmjax.config import ConnectorConfig, PackGrouping, Samples, Tokens
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.length_index import build_index
from mmjax.data.sample import Item
from mmjax.errors import UserError


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_rows_end_where_tokens_do(grouping):
    encoders = {"vision": replace(VISION, connector=ConnectorConfig(merge=3))}
    made = config(grouping=grouping)
    made = replace(
        made, model=replace(made.model, encoders=encoders), batch=replace(made.batch, alignment=8)
    )
    rng = np.random.default_rng(0)
    source = Made(
        [((Item("vision", 0),), [image(rng, *rng.integers(1, 40, 2))]) for _ in range(100)]
    )
    index = build_index({"made": source}, encoders)
    lengths = make_budget(index, made, [1.0]).lengths
    assert lengths[1] % 9 == 0
    assert all(length % 8 == 0 for length in lengths)


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_a_budget_does_not_depend_on_the_shapes_that_may_be_compiled(grouping):
    assert (
        grouper(grouping=grouping, shapes=8).budget == grouper(grouping=grouping, shapes=1).budget
    )


def test_a_budget_below_every_sample_names_the_source_and_the_shortest():
    index = index_of(random_texts([40, 50]), config())
    with pytest.raises(
        UserError,
        match=r"data\.sources\.made: none of its 2 samples .* shortest has 40 .*batch\.size",
    ):
        make_budget(index, config(size=Tokens(39)), [1.0])
    with pytest.raises(UserError, match="shortest has 40"):
        make_budget(index, config(size=Tokens(159), microbatches=4), [1.0])


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
def test_samples_longer_than_learned_positions_are_left_out(grouping):
    made = config(grouping=grouping)
    llm = replace(made.model.llm, learned_positions=42, first_position=2)
    index = index_of(random_texts([40, 41, 39, 12]), made)
    budget = make_budget(index, replace(made, model=replace(made.model, llm=llm)), [1.0])
    assert grouper(index, budget=budget, grouping=grouping).oversize.tolist() == [1]


def test_a_source_that_is_not_drawn_from_leaves_no_trace_in_the_budget():
    short, long = random_texts([10] * 50), random_texts([900] * 50)
    one = build_index({"short": short}, config().model.encoders)
    both = build_index({"short": short, "long": long}, config().model.encoders)
    alone, mixed = make_budget(one, config(), [1.0]), make_budget(both, config(), [1.0, 0.0])
    assert (alone.rows, alone.lengths) == (mixed.rows, mixed.lengths)
    grouped = grouper(both, budget=mixed, weights=(1.0, 0.0))
    assert max(np.concatenate([samples_of(grouped.step(step)) for step in range(20)])) < 50


def test_budgets_follow_the_weights_of_the_mixture_not_the_sizes_of_the_sources():
    texts, images = random_texts([20] * 1000), random_samples(30, seed=1)
    index = build_index({"texts": texts, "images": images}, config().model.encoders)
    even, rare = (make_budget(index, config(size=Samples(40)), w) for w in ([1.0, 1.0], [9.0, 1.0]))
    room = [b.rows[1] * b.lengths[1] / b.samples_per_step for b in (even, rare)]
    assert room[0] > 2 * room[1]


def test_tokens_per_update_are_the_mean_of_what_is_planned():
    grouped = grouper(size=Tokens(400), grouping=PackGrouping(chunk_steps=32))
    steps, _ = steps_of_chunks(grouped, 2)
    tokens = [grouped.index.llm_tokens[samples_of(step)].sum() for step in steps]
    assert np.mean(tokens) == pytest.approx(400, rel=0.08)
