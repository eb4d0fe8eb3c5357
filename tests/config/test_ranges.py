"""Ranges in the types of fields are checked wherever a dataclass of a config is, before its own check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from mmjax.config.checks import check
from mmjax.config.codec import decode, encode
from mmjax.config.ranges import (
    Color,
    NonNegativeFloat,
    PositiveInt,
    at_least,
    at_most,
    check_section,
)
from mmjax.errors import UserError


@dataclass(frozen=True)
class Leaf:
    count: PositiveInt = 1
    parts: Annotated[int, at_least(1), at_most(4, "there are only four")] | None = None
    color: Color = ()

    def check(self, where: str) -> None:
        check(12 % self.count == 0, f"{where}.count={self.count}: must divide 12")


@dataclass(frozen=True)
class Tree:
    leaf: Leaf | None = Leaf()
    by_name: dict[str, Leaf] = field(default_factory=dict)
    rates: dict[str, NonNegativeFloat] = field(default_factory=dict)
    sizes: tuple[PositiveInt, ...] = ()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree(Leaf(count=0)), "root.leaf.count=0: must be at least 1"),
        (Tree(Leaf(count=5)), "root.leaf.count=5: must divide 12"),
        (Tree(Leaf(parts=5)), "root.leaf.parts=5: there are only four"),
        (Tree(Leaf(color=(1, 2))), "root.leaf.color=1,2: give red, green and blue, each 0 to 255"),
        (Tree(by_name={"a.b": Leaf(0)}), "root.by_name.a.b.count=0: must be at least 1"),
        (Tree(rates={"one": 0.0, "two": -0.5}), "root.rates.two=-0.5: must be at least 0"),
        (Tree(sizes=(1, 0)), "root.sizes[1]=0: must be at least 1"),
    ],
)
def test_a_value_beyond_its_range_is_named_by_its_whole_key(tree: Tree, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_section(tree, "root")
    assert str(caught.value) == message


@pytest.mark.parametrize("tree", [Tree(), Tree(None), Tree(Leaf(12, 4, (0, 255, 7)), sizes=(1,))])
def test_values_within_their_ranges_pass_and_are_stored_as_if_they_had_none(tree: Tree) -> None:
    check_section(tree, "")
    assert decode(Tree, encode(Tree, tree, ""), "") == tree
