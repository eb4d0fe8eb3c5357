"""Prompts one a row: each once, with its own items, in few shapes, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mmjax.config import ConnectorConfig, DecoderConfig, ModelConfig, VisionConfig
from mmjax.data.plan.placement import Topology
from mmjax.data.sample import Item, Sample, SampleLengths, Text
from mmjax.inference.prompt_rows import BatchLimits, PromptRows, round_up_to_step
from mmjax.inference.prompts import Selection

MODEL = ModelConfig(
    DecoderConfig(1, 16, 2, 1, 8, 16, vocab=500),
    {"vision": VisionConfig(1, 16, 2, 16, patch=2, connector=ConnectorConfig(merge=2))},
)


class Pictures:
    """Prompt i has i tokens, all i, and images of the colour i."""

    def __len__(self) -> int:
        return 40

    def fingerprint(self) -> str:
        return "pictures"

    def images(self, index: int) -> list[tuple[int, int]]:
        return [(4 + 2 * (index % 5), 4 * (k + 1)) for k in range(index % 3)]

    def facts(self, index: int) -> SampleLengths:
        return SampleLengths(index + 1, tuple(("vision", size) for size in self.images(index)))

    def sample(self, index: int) -> Sample:
        items = [Item("vision", k) for k in range(index % 3)]
        return Sample(
            (*items, Text(np.full(index + 1, index, np.int32), np.zeros(index + 1, np.float32)))
        )

    def item(self, index: int, number: int) -> np.ndarray:
        return np.full((*self.images(index)[number], 3), index, np.uint8)


@pytest.mark.parametrize(
    "topology", [Topology(), Topology(4), Topology(2, encoders_per_rank=2)], ids=str
)
def test_every_prompt_has_a_row_with_its_own_items(topology):
    rows, seen = PromptRows(Pictures(), MODEL, topology, 7, BatchLimits(rows=4)), []
    for lies, batch in rows.batches():
        text, count = batch.text, len(lies)
        assert count % topology.ranks == 0
        for row, prompt in enumerate(lies):
            valid = text.sample[row] == 0
            assert (text.sample[row][~valid] == -1).all()
            if prompt < 0:
                assert not valid.any()
                continue
            seen.append(int(prompt))
            where = text.slots["vision"][row]
            assert set(text.token[row][valid & (where < 0)]) == {prompt}
            tokens = sum(-(-h // 4) * (w // 4) for h, w in Pictures().images(prompt))
            assert (where >= 0).sum() == tokens
            assert valid[: valid.sum()].all()
            if tokens:
                items, rank = batch.items["vision"], row * topology.ranks // count
                per_rank = len(items.values) // topology.ranks
                own = items.values[rank * per_rank : (rank + 1) * per_rank].reshape(
                    -1, 4, items.values.shape[-1]
                )
                mine = own[where[where >= 0]]
                assert set(np.unique(mine)) <= {0, prompt}
        assert ("vision" in batch.items) == any(n % 3 for n in lies if n >= 0)
    assert sorted(seen) == list(range(40))


def test_rows_are_few_where_prompts_are_long():
    rows = PromptRows(Pictures(), MODEL, Topology(), 30, BatchLimits(rows=64, tokens=160))
    for lies, batch in rows.batches():
        assert len(lies) * (batch.text.token.shape[1] + 30) <= 160 or len(lies) == 1
    assert rows.longest == max(
        i + 1 + sum(-(-h // 4) * (w // 4) for h, w in Pictures().images(i)) for i in range(40)
    )


def test_some_prompts_are_asked_in_the_order_given():
    rows = PromptRows(Selection([(Pictures(), 31), (Pictures(), 2)]), MODEL, Topology(), 4)
    found = {
        int(n): int(batch.text.token[row].max())
        for lies, batch in rows.batches()
        for row, n in enumerate(lies)
    }
    assert found == {0: 31, 1: 2}


def test_lengths_come_in_few_steps():
    assert [round_up_to_step(n, 16) for n in (0, 1, 16, 17, 33, 49, 65, 97, 129, 193)] == [
        16,
        16,
        16,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
    ]
    assert all(n <= round_up_to_step(n, 8) < 1.6 * n + 16 for n in range(1, 3000))


def test_prompts_that_are_asked_together_have_one_shape_whatever_their_lengths():
    groups = [range(25), range(25, 40)]
    rows = PromptRows(Pictures(), MODEL, Topology(2), 7, BatchLimits(rows=4), groups)
    shapes, seen = set(), []
    for numbers in (*groups, [39], range(3)):
        for prompts, batch in rows.batches(numbers):
            shapes.add((batch.text.token.shape, batch.items["vision"].values.shape))
            seen += prompts[prompts >= 0].tolist()
    assert len(shapes) == 1
    assert sorted(seen) == sorted([*range(40), 39, *range(3)])
