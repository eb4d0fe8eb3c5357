"""Every key that `--show` prints has a meaning, read from beside its field."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from mmjax.config import BatchConfig, Config, PackGrouping, QuestionsSource
from mmjax.config.codec import field_hints, union_members
from mmjax.config.loading import (
    default_config,
    describe,
    describe_with_meanings,
    load,
    shipped_configs,
)
from mmjax.config.meanings import field_comments, first_line


def sections(hint: object) -> Iterator[type]:
    """Every dataclass that a config can hold."""
    for member in union_members(hint):
        if dataclasses.is_dataclass(member):
            yield member
            for inner in field_hints(member).values():
                yield from sections(inner)
        else:
            for inner in get_args(member):
                yield from sections(inner) if not isinstance(inner, str) else ()


def has_own_line(hint: object) -> bool:
    """Whether a field has a comment to be shown: of a section, its own fields have; of a kind, its docstring is."""
    return not any(dataclasses.is_dataclass(member) for member in union_members(hint))


def test_every_key_of_every_section_has_a_meaning() -> None:
    found = set(sections(Config))
    assert len(found) > 40
    without = [
        f"{cls.__name__}.{name}"
        for cls in found
        for name, hint in field_hints(cls).items()
        if has_own_line(hint) and not field_comments(cls).get(name)
    ]
    assert without == []
    assert all(cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}(") for cls in found)


def test_a_meaning_is_the_comment_behind_a_field_or_right_above_it() -> None:
    comments = field_comments(PackGrouping)
    assert (
        comments["chunk_steps"]
        == "steps that are planned together and drained; resuming replays one chunk"
    )
    assert (
        field_comments(BatchConfig)["balance"]
        == "where samples run; which ones a step has is the same"
    )
    # of its base
    assert field_comments(QuestionsSource)["outside"] == "references that lead out of its folders"
    assert "size" not in field_comments(BatchConfig)


def test_values_stand_as_without_meanings_and_a_kind_says_what_it_is() -> None:
    config = load(default_config())
    lines = describe_with_meanings(config).splitlines()
    assert [line.partition("  # ")[0].rstrip() for line in lines] == describe(config).splitlines()
    assert all(re.search(r"  # \S", line) for line in lines)
    (size,) = [line for line in lines if line.startswith("batch.size ")]
    assert size.endswith("  # A batch of a fixed mean number of samples per update.")


def test_every_shipped_config_says_in_its_first_line_what_it_is(tmp_path: Path) -> None:
    assert len(shipped_configs()) >= 12
    assert all(about.endswith(".") for about in shipped_configs().values())
    (tmp_path / "bad.py").write_text("def (")
    assert first_line(tmp_path / "bad.py") == ""
