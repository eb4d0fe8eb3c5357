"""docs/families.md says what the code does."""

from __future__ import annotations

from families_page import PAGE, page


def test_the_tables_of_families_are_what_the_code_reads():
    assert page() == PAGE.read_text(), "run: python tests/hf/families_page.py"
