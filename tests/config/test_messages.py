"""Whole messages of a config's checks, each once.

In `messages.txt`, a config and overrides stand above the error that they are refused with.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mmjax.config.loading import find_config, load
from mmjax.config.validation import EMBEDDED_RATE
from mmjax.data.toy.tones import SAMPLE_RATE
from mmjax.errors import UserError

TABLE = Path(__file__).with_name("messages.txt")
ROWS = [row.splitlines() for row in TABLE.read_text().split("\n\n")]


@pytest.mark.parametrize(("change", "message"), ROWS, ids=[change for change, _ in ROWS])
def test_a_config_that_cannot_work_is_refused_with_key_and_remedy(
    change: str, message: str
) -> None:
    name, *overrides = shlex.split(change)
    with pytest.raises(UserError) as caught:
        load(find_config(name), overrides)
    assert str(caught.value) == message


def test_every_message_stands_once_and_in_order() -> None:
    messages = [message for _, message in ROWS]
    assert messages == sorted(set(messages))


def test_the_embedded_clips_have_the_rate_that_is_checked() -> None:
    assert EMBEDDED_RATE == SAMPLE_RATE
