"""Other data in mid-run: what epochs under way still owe comes once, what they have had does not come again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from made import Made, config, index_of, random_samples
from planned import GROUPINGS, KINDS, samples_of

from mmjax.config import Samples
from mmjax.data.plan.data_change import IndexedFiles, Segment, still_due, translate_due, write_due
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import StepGrouper

MADE = random_samples(260, seed=3).samples


def held(samples: int, name: str = "made.json") -> IndexedFiles:
    index = index_of(Made(MADE[:samples]), config())
    return IndexedFiles(index, {str(index.source_name[0]): [(name, samples)]})


def grouper(data: IndexedFiles, grouping, first: int = 0, due=()) -> StepGrouper:
    made = config(size=Samples(16), grouping=grouping)
    budget = make_budget(data.index, made, [1.0])
    return StepGrouper(data.index, made.batch, [1.0], 0, budget, first=first, due=due)


def ids(grouped: StepGrouper, steps: range) -> Counter:
    return Counter(
        np.concatenate(
            [samples_of(grouped.step(k)) for k in steps] or [np.zeros(0, np.int64)]
        ).tolist()
    )


@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
@pytest.mark.parametrize("step", [0, 1, 5, 12, 13, 30, 47])
def test_what_was_had_and_what_is_due_are_whole_epochs(grouping, step):
    grouped = grouper(held(200), grouping)
    (due,) = still_due(grouped, step)
    usable = set(range(200)) - set(grouped.oversize.tolist())
    had = ids(grouped, range(step)) + Counter(due.tolist())
    assert set(had) == (usable if step else set())
    assert len(set(had.values())) <= 1
    assert len(np.unique(due)) == len(due)


@pytest.mark.covering(1)
@pytest.mark.parametrize("grouping", GROUPINGS, ids=KINDS)
@pytest.mark.parametrize("steps", [(5, 9), (20, 23), (40, 70)])
def test_through_several_changes_of_the_data_every_sample_comes_once_an_epoch(
    grouping, steps, tmp_path
):
    """200 samples, then 230, then 260: old ones come as often as epochs were begun, new ones from where they came."""
    sizes, first, due, had = (200, 230, 260), 0, (), Counter()
    for number, size in enumerate(sizes):
        data = held(size)
        segment = Segment(first, write_due(tmp_path, first, due) if due else None)
        grouped = grouper(data, grouping, segment.first, segment.read_due())
        if number == len(steps):
            break
        had += ids(grouped, range(first, steps[number]))
        owed = still_due(grouped, steps[number])
        due = translate_due(owed, data, grouped.pools, held(sizes[number + 1]))
        first = steps[number]
    had += Counter(due[0].tolist())
    usable = [
        set(range(size)) - set(grouper(held(size), grouping).oversize.tolist()) for size in sizes
    ]
    old = {had[i] for i in usable[0] & usable[1] & usable[2]}
    assert len(old) == 1
    for i in usable[2] - usable[1]:  # they joined the epoch that was under way
        assert had[i] == (len(due[0]) > 0)
    epochs = old.pop()
    assert {had[i] for i in (usable[1] & usable[2]) - usable[0]} <= set(range(1, epochs + 1))


def test_the_segment_goes_on_with_what_is_due_before_a_new_epoch_begins():
    grouped = grouper(held(200), GROUPINGS[2])
    due = still_due(grouped, 7)
    after = grouper(held(200), GROUPINGS[2], 7, due)
    # 5 steps of 16: the 88 left are not over
    rest = np.concatenate([samples_of(after.step(k)) for k in range(7, 12)])
    assert len(rest) == len(set(rest.tolist()))
    assert set(rest.tolist()) <= set(due[0].tolist())
    assert after.pools[0].draw(0, len(due[0]), np.uint64(1)).tolist() != due[0].tolist()  # shuffled
    assert sorted(after.pools[0].draw(0, len(due[0]), np.uint64(1)).tolist()) == due[0].tolist()


def test_a_sample_is_known_by_its_file_wherever_that_stands_now():
    old = IndexedFiles(held(200).index, {"made": [("/a/x.json", 150), ("/a/y.json", 50)]})
    grouped = grouper(old, GROUPINGS[0])
    name = str(old.index.source_name[0])
    old = IndexedFiles(old.index, {name: old.files["made"]})
    moved = IndexedFiles(
        held(260).index, {name: [("/b/new.json", 30), ("/b/x.json", 150), ("/b/y.json", 80)]}
    )
    (owed,), (due,) = (
        still_due(grouped, 5),
        translate_due(still_due(grouped, 5), old, grouped.pools, moved),
    )
    had = set(ids(grouped, range(5)))
    assert set(due.tolist()) & {30 + i for i in had} == set()  # all of x and y stand 30 further on
    assert {30 + i for i in owed.tolist()} <= set(due.tolist())
    assert set(range(30)) | set(range(230, 260)) <= set(due.tolist())


def test_samples_that_are_gone_are_owed_no_longer():
    old, new = held(200), held(120)
    grouped = grouper(old, GROUPINGS[0])
    (due,) = translate_due(still_due(grouped, 5), old, grouped.pools, new)
    assert due.max() < 120


def test_a_source_that_is_new_begins_with_a_whole_epoch():
    old = held(200)
    grouped = grouper(old, GROUPINGS[0])
    index = index_of(Made(MADE[:100]), config())
    other = IndexedFiles(
        type(index)(**{**vars(index), "source_name": np.array(["other"])}), {"other": [("", 100)]}
    )
    assert [
        len(due) for due in translate_due(still_due(grouped, 5), old, grouped.pools, other)
    ] == [0]
