"""The examples that docstrings draw are what the code computes."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "mmjax.balance.exchange",
    "mmjax.balance.level",
    "mmjax.balance.pack_columns",
    "mmjax.balance.parts",
    "mmjax.balance.token_blocks",
    "mmjax.balance.vector_lpt",
    "mmjax.data.plan.placement",
    "mmjax.data.plan.placer",
]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_docstrings_are_what_they_compute(module):
    ended = doctest.testmod(
        importlib.import_module(module), extraglobs={"np": importlib.import_module("numpy")}
    )
    assert ended.attempted > 0
    assert ended.failed == 0
