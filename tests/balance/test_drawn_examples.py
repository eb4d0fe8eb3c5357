"""The examples that docstrings draw are what the code computes."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    f"mmjax.balance.{name}" for name in ("exchange", "level", "parts", "token_blocks", "vector_lpt")
]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_docstrings_are_what_they_compute(module):
    ended = doctest.testmod(
        importlib.import_module(module), extraglobs={"np": importlib.import_module("numpy")}
    )
    assert ended.attempted > 0
    assert ended.failed == 0
