"""What belongs to each tier, and that every guarantee, command, family and format has a test in the default one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import get_args

import pytest
from planted_faults import FAULTS, planted
from smoke import smoke
from started import ROOT
from tiers import covering_array

from mmjax.cli import COMMANDS
from mmjax.config import EmbeddedSource, FunctionSource
from mmjax.config.data import FileSource
from mmjax.hf.families import CHECKPOINTS


@pytest.mark.parametrize(
    ("sizes", "strength", "most"), [((3, 4, 6), 2, 24), ((7, 3), 1, 7), ((2, 2, 2, 2), 2, 6)]
)
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
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n{CONFTEST}"
    )
    (folder / "test_sample.py").write_text(SAMPLE.format(names=names))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *words,
    ]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "passed"),
    [(("-m", "not exhaustive"), 3 + 1 + 1), (("-m", "exhaustive"), 3 + 1 + 1), ((), 6 + 2 + 2)],
)
def test_each_case_is_in_one_tier(words, passed, tmp_path):
    ended = run_sample(tmp_path, '"x"', *words)
    assert re.search(rf"\b{passed} passed", ended.stdout), ended
    assert ended.returncode == 0


def test_a_default_case_that_is_none_of_the_tests_is_refused(tmp_path):
    ended = run_sample(tmp_path, '"x", "z"')
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_sample.py::test_named[x]: default_cases names 'z', no case of it" in ended.stderr


# -------------------------------------------------------------------------------------------
# docs/exactness.md

TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of docs/exactness.md, without its own head."""
    text = (ROOT / "docs/exactness.md").read_text()
    section = re.search(
        rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert section, heading
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def tiers_of(path: str) -> dict[str, set[str]]:
    """Which tiers each test function of a file has cases in, read from its source."""
    tree = ast.parse((ROOT / path).read_text())
    assigned = [
        ast.unparse(statement) for statement in tree.body if isinstance(statement, ast.Assign)
    ]
    whole_file = any(line.startswith("pytestmark = pytest.mark.exhaustive") for line in assigned)
    found = {}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            marks = [ast.unparse(decorator) for decorator in function.decorator_list]
            exhaustive = whole_file or "pytest.mark.exhaustive" in marks
            some = any(
                word in mark
                for mark in marks
                for word in ("covering(", "default_cases(", "mark.exhaustive")
            )
            found[function.name] = (
                {"exhaustive"} if exhaustive else {"default", "exhaustive"} if some else {"default"}
            )
    return found


def check_tier(cell: str, tier: str) -> int:
    """Count the tests and files that a cell names; each must have cases in this tier."""
    found = TEST.findall(cell)
    for path, name in found:
        tests = tiers_of(path)
        assert not name or name in tests, f"{path} has no {name}"
        assert any(tier in of for of in ([tests[name]] if name else tests.values())), (
            f"{path} {name} is not {tier}"
        )
    return len(found)


GUARANTEES = "What is guaranteed"
SUBJECTS = "Every command, family and format"


def test_every_guarantee_names_a_test_of_the_default_tier_and_its_exhaustive_ones():
    guarantees = rows_of(GUARANTEES)
    assert len(guarantees) >= 20
    for guarantee, default, exhaustive in guarantees:
        assert check_tier(default, "default"), guarantee
        check_tier(exhaustive, "exhaustive")


def test_every_command_family_and_source_has_a_test_of_the_default_tier():
    subjects: dict[str, set[str]] = {}
    for kind, names, tests in rows_of(SUBJECTS):
        assert check_tier(tests, "default"), names
        subjects.setdefault(kind, set()).update(re.findall(r"`([^`]+)`", names))
    assert subjects["command"] == set(COMMANDS)
    assert subjects["Hugging Face family"] == set(CHECKPOINTS)
    assert subjects["source"] == {
        source.kind for source in (EmbeddedSource, FunctionSource, *get_args(FileSource))
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_still_be_planted_and_names_default_tests(fault):
    source = (ROOT / "mmjax" / fault.file).read_text()
    ast.parse(planted(fault, source))
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert "default" in tiers_of(f"tests/{path}")[function]


def test_the_smoke_tier_names_default_tests_and_takes_those_of_planted_faults():
    for test in smoke().left_out | smoke().taken:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not function or "default" in tiers_of(path)[function], test
    assert smoke().taken <= {f"tests/{test}" for fault in FAULTS for test in fault.tests}
