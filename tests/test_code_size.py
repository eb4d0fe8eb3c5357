"""How much code each folder of the package holds, in tokens: lines would be answered with denser ones.

`code_tokens.txt` has a ceiling for each. `python tests/test_code_size.py --write` lowers those that
are too high and adds new folders; it raises one only with `--because "what the code is for"`, which
is written beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("code_tokens.txt")
HEAD = "# Thousands of tokens that the code of a folder may have (tests/test_code_size.py), and why they were raised.\n"
STEP = 500
SLACK = 1500  # below its ceiling, a folder lowers it

# By one expression, a fifth of the time of `tokenize`, which also counts f-strings differently
# since Python 3.12.
TOKEN = re.compile(
    r"""
    (?P<aside> \#[^\n]* | ^[ ]*r?\"{3}.*?\"{3} | \\\n )  # comments, docstrings, line ends that are none
    | [rbfuRBFU]{0,2} (?: \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3} )
    | [rbfuRBFU]{0,2} (?: "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | \.?\d [\w.]* (?: (?<=[eE]) [-+] \d+ )?
    | \w+
    | \*\*=? | //=? | >>=? | <<=? | -> | := | \.{3} | [-+*/%&|^@=<>!]=? | [^\s\w]
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


class Ceiling(NamedTuple):
    """Of a folder: thousands of tokens, and why it was raised."""

    thousands: float
    reason: str = ""


def count_tokens(source: str) -> int:
    """Count the names, operators, numbers and strings of a module, docstrings and comments aside."""
    return sum(token.lastgroup is None for token in TOKEN.finditer(source))


def measured() -> dict[str, int]:
    """Count the tokens of every folder of the package."""
    tokens: Counter[str] = Counter()
    for path in sorted((ROOT / "mmjax").rglob("*.py")):
        tokens[path.parent.relative_to(ROOT).as_posix()] += count_tokens(path.read_text())
    return dict(sorted(tokens.items()))


def ceilings() -> dict[str, Ceiling]:
    """Read the table."""
    lines = [
        line.split(maxsplit=2)
        for line in TABLE.read_text().splitlines()
        if not line.startswith("#")
    ]
    return {folder: Ceiling(float(thousands), *reason) for folder, thousands, *reason in lines}


def lowest_ceiling(tokens: int) -> float:
    """Round up to the next step, in thousands."""
    return -(-tokens // STEP) * STEP / 1000


def breaches(tokens: dict[str, int], table: dict[str, Ceiling]) -> list[str]:
    """List the folders that are above their ceiling, far below it, without one or gone."""
    found = [f"{folder} has no ceiling" for folder in tokens.keys() - table.keys()]
    found += [f"{folder} is gone" for folder in table.keys() - tokens.keys()]
    for folder in tokens.keys() & table.keys():
        ceiling = int(1000 * table[folder].thousands)
        if tokens[folder] > ceiling:
            found.append(
                f"{folder} has {tokens[folder]} tokens, {tokens[folder] - ceiling} above its ceiling"
            )
        elif tokens[folder] < ceiling - SLACK:
            found.append(
                f"{folder} has {tokens[folder]} tokens, its ceiling of {ceiling} comes down"
            )
    return sorted(found)


def test_no_folder_outgrows_its_ceiling_and_what_is_removed_stays_away() -> None:
    assert breaches(measured(), ceilings()) == [], (
        "python tests/test_code_size.py --write renews the table"
    )


def test_growth_removal_and_new_and_absent_folders_are_named() -> None:
    table = {name: Ceiling(2) for name in ("high", "low", "right", "gone")}
    assert breaches({"high": 2001, "low": 499, "right": 500, "new": 1}, table) == [
        "gone is gone",
        "high has 2001 tokens, 1 above its ceiling",
        "low has 499 tokens, its ceiling of 2000 comes down",
        "new has no ceiling",
    ]


def test_tokens_are_names_operators_numbers_and_strings_of_code() -> None:
    source = '''"""A docstring's "words"."""
x = f(1.5e-3, "a # b", r'\\'')  # 10 tokens and a comment
def g(a: int = 2) -> str:  # 12
    """Another."""
    return \\
        a ** 2 // 0x1F >= """three # lines
    of text"""  # 8
'''
    assert count_tokens(source) == 10 + 12 + 8


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--because", default="", metavar="REASON", help="why ceilings are raised")
    args = parser.parse_args()
    table = ceilings() if TABLE.exists() else {}
    lines = []
    for folder, tokens in measured().items():
        lowest, old = lowest_ceiling(tokens), table.get(folder)
        if old is None or lowest < old.thousands:
            lines.append(f"{folder} {lowest}")
        elif lowest == old.thousands:
            lines.append(f"{folder} {lowest} {old.reason}".rstrip())
        elif args.because:
            lines.append(f"{folder} {lowest} {args.because}")
        else:
            sys.exit(
                f"{folder} has {tokens} tokens, above {old.thousands} thousand: say --because what for"
            )
    print(*lines, sep="\n")
    if args.write:
        TABLE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
