"""What `mmjax.bench allocation` compares."""

from __future__ import annotations

import json

import pytest

from mmjax import bench


@pytest.mark.exhaustive
def test_chosen_units_are_never_slower_than_the_papers_allocations(capsys):
    bench.main(["allocation", "--config", "internvl_26b", "--cluster", "h100x8x8", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert 0 < row["simulated"] <= min(row["mmscale"], row["by_flops"])
    assert row["never_slower"]
    assert row[row["chosen"]] == min(row["units"], row["one_mesh"]) > 0
    assert min(row["loosely"], row["colocated"], row["replicated"]) > 0
