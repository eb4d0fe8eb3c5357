"""Which cases of a parametrized test belong to the default tier: those that it names, or a covering array of them.

Most faults show as soon as two options meet. A covering array of strength two holds every pair of
values of any two parameters at least once: 24 of the 72 combinations of 3 groupings, 4 balances and
6 topologies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

import pytest

MARKERS = (
    "smoke: what compiles nothing and starts no process, and cheap tests of planted faults; a part of the default tier",
    "exhaustive: cross products, long runs, and what depends on time or load; not run by default",
    "default_cases(*ids): of this test's cases only these belong to the default tier, the others are exhaustive",
    "covering(strength=2): of this test's cases only a covering array of its parameters belongs to the default tier",
)


# Files whose few tests take long. Workers take files in this order and then as collected, so that
# they end together.
LONG_FILES = (
    "test_processes.py", "test_hangs.py", "test_restarts.py", "test_new_data.py", "test_balanced.py", "test_train.py",
    "test_exactness.py", "test_spoiled_samples.py", "test_export.py", "test_notebooks.py", "test_llava_style.py",
    "test_absent_devices.py", "test_stacked_vision.py", "test_mutations.py", "test_plan_command.py", "test_report.py",
    "test_workers.py", "test_generator.py", "test_recipes.py", "test_collectives.py", "test_layer_profile.py",
    "test_verify.py", "test_bench_gpu.py", "test_bench_balance_run.py", "test_measured_fit.py", "test_unit_runs.py",
    "test_executor.py", "test_qwen_vl.py", "test_ray_pool.py", "test_generated_text.py", "test_decoders.py",
    "test_step.py", "test_generator_units.py", "test_evaluation.py", "test_generators.py", "test_frozen_settings.py",
    "test_expert_meshes.py", "test_drawing_commands.py", "test_encoded_images.py", "test_checkpoint.py",
)  # fmt: skip


def long_files_first(items: list[pytest.Item]) -> None:
    """Reorder the tests of `LONG_FILES` to the front."""
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def assign_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark as exhaustive the cases that a test's `default_cases` or `covering` leaves out.

    Cases that were picked by their ids on the command line stay as they are, so that each can be
    run by itself. Raises pytest.UsageError for a default case that is none of the test's.
    """
    tests: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        sizes = [len(mark.args[1]) for mark in cases[0].iter_markers("parametrize")]
        if len(cases) != prod(sizes):
            continue
        if named := cases[0].get_closest_marker("default_cases"):
            ids = [case.callspec.id for case in cases]
            if unknown := set(named.args) - set(ids):
                raise pytest.UsageError(
                    f"{cases[0].nodeid}: default_cases names {min(unknown)!r}, no case of it"
                )
            chosen = {ids.index(name) for name in named.args}
        elif covering := cases[0].get_closest_marker("covering"):
            # pytest makes the cases in the order of `product`, the parameters in that of the marks.
            combined = {
                indices: number for number, indices in enumerate(product(*map(range, sizes)))
            }
            chosen = {combined[indices] for indices in covering_array(sizes, *covering.args)}
        else:
            continue
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.exhaustive)


def covering_array(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Choose combinations greedily until all values of any `strength` parameters have met; always the same ones.

    sizes: how many values each parameter has. Returns indices into them.
    """

    def meetings(case: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
        return combinations(enumerate(case), min(strength, len(sizes)))

    combined = list(product(*map(range, sizes)))
    missing = {meeting for case in combined for meeting in meetings(case)}
    chosen = []
    while missing:
        # Of equally good cases the one whose indices differ most: it walks the diagonals.
        best = max(
            combined, key=lambda case: (sum(m in missing for m in meetings(case)), len(set(case)))
        )
        chosen.append(best)
        missing.difference_update(meetings(best))
    return chosen
