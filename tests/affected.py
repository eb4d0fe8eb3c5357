"""Print the test files that a change reaches: `pytest $(python tests/affected.py --since main)`.

A file reaches those that import it, wherever in them, and those that name it: a command's module
(`mmjax.train`), a data file or a document by its name, a folder's files by a glob of their suffix.
Whoever reaches a test helper reaches the tests that import it; `conftest.py`, what it imports, and
`pyproject.toml` reach all tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from import_graph import closure, imports_of, modules_of, modules_of_tests, with_packages

ROOT = Path(__file__).parent.parent


def affected(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """List the test files that changed files reach; all paths are relative to `root`."""
    modules = modules_of(root / "mmjax") | modules_of_tests(root / "tests")
    files = {name: path.relative_to(root).as_posix() for name, path in modules.items()}
    texts = {files[name]: path.read_text() for name, path in modules.items()}
    tests = {file for file in texts if re.match(r"tests/(.*/)?test_\w+\.py", file)}
    imports = {
        files[name]: {
            files[found] for found in with_packages(imports_of(name, path, modules)) & set(files)
        }
        for name, path in modules.items()
    }
    if {"pyproject.toml", *closure(["tests/conftest.py"], imports)} & set(changed):
        return sorted(tests)
    readers: dict[str, set[str]] = defaultdict(set)
    for file, imported in imports.items():
        commands = {files[name] for name in _commands_of(file, texts[file], modules)}
        for read in imported | commands:
            readers[read].add(file)
    for file in changed:
        readers[file] |= {
            reader for reader, text in texts.items() if _names(reader, text, Path(file))
        }
    return sorted(closure(changed, readers) & tests)


def _commands_of(file: str, text: str, modules: Iterable[str]) -> set[str]:
    """Modules that a file runs as commands: one that it names in quotes, any command where it fills the name in.

    Tests also name them in the words of a shell. The package's own messages do so as well, and run
    nothing.
    """
    is_test = file.startswith("tests/")
    if re.search(r"""f["']mmjax\.\{""", text):
        return {
            module for module in modules if module.count(".") == 1 and module.startswith("mmjax.")
        }
    return set(re.findall(r"\bmmjax\.\w+" if is_test else r"""["'](mmjax\.\w+)["']""", text)) & set(
        modules
    )


def _names(reader: str, text: str, file: Path) -> bool:
    """Whether a text names a file; of a test also, whether it globs the suffix below the file's folder at the top.

    A config is named without its suffix.
    """
    globs = (
        reader.startswith("tests/") and f"*{file.suffix}" in text and f'"{file.parts[0]}' in text
    )
    config = file.parts[0] == "configs" and re.search(rf"\b{re.escape(file.stem)}\b", text)
    return file.name in text or globs or bool(config)


def changed_since(revision: str) -> list[str]:
    """List what differs from the commit where this branch left a revision, files that git does not know included."""
    commands = (
        ("diff", "--name-only", "--merge-base", revision),
        ("ls-files", "--others", "--exclude-standard"),
    )
    listed = (
        subprocess.run(["git", *c], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
        for c in commands
    )
    return [line for ended in listed for line in ended.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="files that were changed")
    parser.add_argument(
        "--since", metavar="REV", help="what was changed since this branch left REV"
    )
    args = parser.parse_args()
    files = [path.resolve().relative_to(ROOT).as_posix() for path in args.files]
    tests = affected([*files, *(changed_since(args.since) if args.since else ())])
    print(*tests, sep="\n")
    if not tests:
        print("no test reads what was changed", file=sys.stderr)
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
