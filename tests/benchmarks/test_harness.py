"""What a benchmark declares: options with the types of their defaults, and values that are refused in one line."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from mmjax.benchmarks.harness import add_options, best_seconds, check_options, option, ranks_of_node
from mmjax.errors import UserError

OPTIONS = {
    "--ranks": option(8, minimum=1),
    "--seconds": option(1.5, above=0),
    "--sizes": option([1, 4], minimum=1),
    "--lengths": option([], type=Path),
    "--seeds": option(None, type=int, minimum=1),
    "--tiny": option(False),
    "changes": option(None, nargs="*"),
}


def parsed(*words: str):
    parser = ArgumentParser()
    add_options(parser, OPTIONS)
    return parser.parse_args(words)


def test_options_have_the_types_of_their_defaults():
    args = parsed("--ranks=2", "--seconds=3", "--sizes", "5", "6", "--lengths", "a.npz", "--tiny")
    assert (args.ranks, args.seconds, args.sizes, args.lengths) == (2, 3.0, [5, 6], [Path("a.npz")])
    assert (args.tiny, parsed().tiny, parsed().seeds, parsed("a.b=1").changes) == (
        True,
        False,
        None,
        ["a.b=1"],
    )
    check_options(args, OPTIONS)
    check_options(parsed(), OPTIONS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks=0"], "--ranks 0: give at least 1"),
        (["--seconds=nan"], "--seconds nan: give more than 0"),
        (["--sizes", "4", "0"], "--sizes 0: give at least 1"),
        (["--seeds=0"], "--seeds 0: give at least 1"),
    ],
)
def test_a_value_that_an_option_may_not_have_is_refused(words, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        check_options(parsed(*words), OPTIONS)


def test_a_node_has_as_many_ranks_as_others():
    assert ranks_of_node(0, 16, 8) == 8
    assert ranks_of_node(4, 16, 8) == 4
    with pytest.raises(UserError, match="--ranks-per-node 3: choose a divisor of --ranks 16"):
        ranks_of_node(3, 16, 8)


def test_runs_are_timed_in_turns():
    order = []
    seconds = best_seconds({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b"]
    assert all(0 <= taken < 60 for taken in seconds.values())
