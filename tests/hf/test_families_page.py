"""docs/families.md says what the code does."""

from __future__ import annotations

from families_page import PAGE, page_with, table


def test_the_table_of_families_is_what_the_code_reads():
    made = table()
    assert page_with(made) == PAGE.read_text(), "run: python tests/hf/families_page.py"
