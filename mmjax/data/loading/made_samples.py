"""Read samples of which only lengths are known: their contents are random."""

from __future__ import annotations

import math

import numpy as np

from mmjax.batch import TIME
from mmjax.config import Encoder, Generator, ModelConfig
from mmjax.data.loading.packing import Reader
from mmjax.data.media.patches import ItemInput, merge_order
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.sample import Item, Sample, SampleLengths, Text


def made_samples(index: LengthIndex, model: ModelConfig) -> Reader:
    """Give access to samples of the lengths of an index: items, and behind them text that is learned."""
    modules = model.item_modules
    names = list(modules)

    def items(sample: int) -> range:
        return range(*index.item_start[sample : sample + 2].tolist())

    def facts(sample: int) -> SampleLengths:
        of_items = [
            (names[index.item_encoder[i]], int(index.item_tokens[i])) for i in items(sample)
        ]
        sizes = tuple((name, _size_of(modules[name], tokens)) for name, tokens in of_items)
        return SampleLengths(int(index.text_tokens[sample]), sizes)

    def read(sample: int) -> Sample:
        placed = tuple(
            Item(names[index.item_encoder[i]], number) for number, i in enumerate(items(sample))
        )
        count = int(index.text_tokens[sample])
        tokens = np.random.default_rng(sample).integers(model.llm.vocab, size=count, dtype=np.int32)
        weights = np.ones(count, np.float32)
        weights[:1] = len(placed) > 0
        return Sample((*placed, Text(tokens, weights)))

    def item(sample: int, number: int) -> np.ndarray:
        i = items(sample)[number]
        module = modules[names[index.item_encoder[i]]]
        size = int(index.item_positions[i]), module.input_values
        rng = np.random.default_rng((sample, number))
        if module.takes_pixels:
            return rng.integers(256, size=size, dtype=np.uint8)
        return rng.standard_normal(size, np.float32)

    return Reader(
        sample=read,
        facts=facts,
        item=item,
        source_of=index.source_of,
        name=index.name,
        with_place=lambda sample, reason: str(reason),
        convert=_as_input,
    )


def _sides(count: int) -> tuple[int, int]:
    """Return the rows and columns of the grid of so many that is closest to a square."""
    rows = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)
    return rows, count // rows


def _size_of(module: Encoder | Generator, tokens: int) -> tuple[int, ...]:
    """Return a size of an item of so many tokens."""
    if module.is_generator or "image" not in module.media:
        return (tokens,)
    rows, columns = _sides(tokens)
    side = module.patch * module.token_side
    return rows * side, columns * side


def _as_input(module: Encoder | Generator, values: np.ndarray) -> ItemInput:
    """Place positions in time, or where they are patches in a grid."""
    count = len(values)
    valid = np.ones(count, bool)
    if not module.is_generator and "image" not in module.media:
        coordinates = np.zeros((count, 3), np.int32)
        coordinates[:, TIME] = np.arange(count)
        return ItemInput(values, coordinates, valid)
    merge = 1 if module.is_generator else module.token_side
    rows, columns = _sides(count // merge**2)
    return ItemInput(values, merge_order(rows * merge, columns * merge, merge)[0], valid)
