"""The log of a run goes on where its checkpoint is, whatever a killed process or bad storage has left in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmjax.errors import UserError
from mmjax.training.metrics_log import MetricsLog

ODD = ["half a li", "[1]", '{"step": "x"}', '{"step": ' + "9" * 400 + "}", "[" * 100_000, '{"step": NaN}', "\xff"]


@pytest.mark.parametrize("line", ODD)
def test_what_is_no_record_is_dropped_and_steps_before_the_checkpoint_stay(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    path.write_text("\n".join([*records[:2], line, records[2], ""]), "latin-1")
    log = MetricsLog(path, 2)
    log.write(3, {"loss": 2.0})
    log.close()
    assert [json.loads(kept)["step"] for kept in path.read_text().splitlines()] == [1, 2, 3]


def test_a_folder_in_the_place_of_the_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl is a folder.*remove it"):
        MetricsLog(tmp_path / "metrics.jsonl", 0)
