"""`python -m mmjax.bench frozen`: how much faster the settings of frozen training are, beside the plan."""

from __future__ import annotations

import json

import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks.frozen import SETTINGS


@pytest.mark.exhaustive
def test_frozen_compares_each_setting_with_training_everything_and_with_its_plan(capsys):
    ended = run(capsys, bench.main, "frozen", "--width=64", "--seconds=0", "--json")
    assert ended.code == 0, ended.err
    whole, *others = json.loads(ended.out)
    assert [row["trained"] for row in (whole, *others)] == ["all", *SETTINGS]
    assert whole["faster"] == whole["planned"] == whole["flops"] == 1
    for row in others:
        assert row["faster"] == pytest.approx(whole["seconds"] / row["seconds"])
        assert row["off"] == pytest.approx(row["planned"] / row["faster"] - 1)
    executed = {row["trained"]: row["flops"] for row in others}
    assert min(executed["llm"], executed["encoder"], executed["generator"]) > 1
    assert max(executed, key=executed.get) == "projectors"


def test_frozen_says_which_option_is_wrong(capsys):
    ended = run(capsys, bench.main, "frozen", "--width=100")
    assert ended.code == 2
    assert "--width must be a multiple of 64" in ended.err
