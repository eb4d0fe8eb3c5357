"""The two tiers: what belongs to each, and that the table of guarantees names tests that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from tiers import covering_array


@pytest.mark.parametrize(("sizes", "strength", "most"), [((3, 4, 6), 2, 24), ((7, 3), 1, 7), ((2, 2, 2, 2), 2, 6)])
def test_a_covering_array_holds_every_meeting_of_values_in_few_combinations(sizes, strength, most):
    found = covering_array(sizes, strength)
    assert len(set(found)) == len(found) <= most
    for options in combinations(range(len(sizes)), strength):
        met = {tuple(case[option] for option in options) for case in found}
        assert met == set(product(*(range(sizes[option]) for option in options)))
    assert found == covering_array(sizes, strength)


SAMPLE = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (2, 2)])
def test_of_both(a, b, c):
    pass

@pytest.mark.default_cases({names})
@pytest.mark.parametrize("a", ["x", "y"])
def test_named(a):
    pass

@pytest.mark.exhaustive
def test_long():
    pass

def test_plain():
    pass
"""


CONFTEST = """
from tiers import MARKERS, assign_tiers

def pytest_configure(config):
    for line in MARKERS:
        config.addinivalue_line("markers", line)

def pytest_collection_modifyitems(items):
    assign_tiers(items)
"""


def run_sample(folder: Path, names: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on `SAMPLE`, which calls these cases of `test_named` default ones."""
    (folder / "conftest.py").write_text(f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n{CONFTEST}")
    (folder / "test_sample.py").write_text(SAMPLE.format(names=names))
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:xdist", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "passed"), [(("-m", "not exhaustive"), 3 + 1 + 1), (("-m", "exhaustive"), 3 + 1 + 1), ((), 6 + 2 + 2)]
)
def test_each_case_is_in_one_tier(words, passed, tmp_path):
    ended = run_sample(tmp_path, '"x"', *words)
    assert re.search(rf"\b{passed} passed", ended.stdout), ended
    assert ended.returncode == 0


def test_a_default_case_that_is_none_of_the_tests_is_refused(tmp_path):
    ended = run_sample(tmp_path, '"x", "z"')
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_sample.py::test_named[x]: default_cases names 'z', no case of it" in ended.stderr
