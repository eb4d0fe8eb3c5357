"""Which test files a change reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
from affected import affected

FILES = {
    "mmjax/__init__.py": "",
    "mmjax/low.py": "",
    "mmjax/lonely.py": "",
    "mmjax/part/__init__.py": "from mmjax.part import deep",
    "mmjax/part/deep.py": "def f():\n    from mmjax import low",
    "mmjax/part/beside.py": '"""Ask `mmjax.command` first."""',
    "mmjax/command.py": "import mmjax.part.beside",
    "tests/conftest.py": "import harness",
    "tests/harness.py": "",
    "tests/helper.py": "LAUNCHER = 'local.sh'",
    "tests/test_low.py": "import mmjax.low",
    "tests/test_helper.py": "import helper",
    "tests/part/test_deep.py": "from mmjax.part.deep import f",
    "tests/part/test_beside.py": "import mmjax.part.beside",
    "tests/test_command.py": "start('mmjax.command', 'tiny')",
    "tests/test_pages.py": '(ROOT / "docs").glob("*.md")',
}
ALL = {name.rpartition("/")[2] for name in FILES if "test_" in name}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        # by lazy imports too
        ("mmjax/low.py", {"test_low.py", "test_deep.py", "test_beside.py", "test_command.py"}),
        # by the package's first lines
        ("mmjax/part/deep.py", {"test_deep.py", "test_beside.py", "test_command.py"}),
        ("mmjax/part/beside.py", {"test_beside.py", "test_command.py"}),
        ("mmjax/command.py", {"test_command.py"}),  # as a process
        ("mmjax/lonely.py", set()),
        ("tests/test_low.py", {"test_low.py"}),
        ("tests/helper.py", {"test_helper.py"}),
        ("launch/local.sh", {"test_helper.py"}),
        ("configs/tiny.py", {"test_command.py"}),
        ("docs/any.md", {"test_pages.py"}),
        ("tests/harness.py", ALL),
        ("pyproject.toml", ALL),
    ],
)
def test_a_change_reaches_the_tests_that_import_run_or_name_it(
    tmp_path: Path, changed: str, reached: set[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert {Path(test).name for test in affected([changed], tmp_path)} == reached


def test_a_module_of_this_package_reaches_the_file_of_its_tests_and_few_others() -> None:
    assert "tests/test_studio.py" in affected(["mmjax/studio.py"])
    assert "tests/balance/test_isf.py" not in affected(["mmjax/studio.py"])
