"""What goes into a block comes out again, in arrays that are nobody else's."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mmjax.batch import TextBatch
from mmjax.data.loading.workers import from_block, to_block


def test_what_goes_in_comes_out_bit_for_bit_as_what_it_was():
    rng = np.random.default_rng(0)
    text = TextBatch(*(rng.integers(0, 9, (2, n + 1)) for n, _ in enumerate(TextBatch._fields)))
    value = {
        "text": text,
        "half": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.int32),
        "turned": np.asfortranarray(rng.normal(size=(4, 6))),
        "every other": np.arange(10)[::2],
        "number": np.float64(0.1),
        "reasons": (("torn", 3), None),
    }
    there = from_block(to_block(value))
    assert type(there["text"]) is TextBatch
    assert there.keys() == value.keys()
    for name in ("half", "empty", "turned", "every other", "number"):
        np.testing.assert_array_equal(there[name], value[name], strict=True)
    for a, b in zip(there["text"], text, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    assert there["reasons"] == value["reasons"]


def test_arrays_that_come_out_can_be_written_and_share_no_memory():
    block = to_block([np.zeros(1000), np.zeros(1000)])
    first, second = from_block(block)
    first[:] = 1
    assert not second.any()
    assert not block.data.any()
