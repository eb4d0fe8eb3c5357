"""`python -m mmjax.bench papers`: what is predicted of the papers' tables, and where these contradict themselves."""

import json

import numpy as np
import pytest
from commands import run

from mmjax import bench
from mmjax.benchmarks import papers

# Rows of Cornstarch's tables 3 and 10 whose throughputs cannot follow from their stage times.
CONTRADICTORY = {
    "LLM-M VLM-S",
    *(f"LLM-S {kind}-{size}" for kind in ("VLM", "ALM") for size in "SML"),
}


def test_textbook_schedules_take_their_closed_forms():
    assert papers.anchors()
    for simulated, exact in papers.anchors().values():
        assert simulated == exact


def test_measured_layer_times_give_omnibals_partition_and_flops_another():
    assert papers.omnibal_exact()
    rows = papers.omnibal_partition_rows()
    sent = {row.case.split()[0]: row.predicted for row in rows if "MB sent" in row.case}
    # One cut in the encoder instead of the LLM: 9,225 x 3,200 for 4,096 x 6,144 values of two
    # bytes.
    assert sent["layers"] == pytest.approx(2 * (9225 * 3200 - 4096 * 6144) / 2**20)


def test_a_row_says_whether_the_better_side_is_predicted():
    assert papers.Row("", "", 1.2, 1.01).direction is True
    assert papers.Row("", "", 1.2, 0.99).direction is False
    assert papers.Row("", "", 0.9, 0.99).direction is True
    assert papers.Row("", "", 1.04, 2.0).direction is None
    assert papers.Row("", "", -21.0, -12.0, neutral=0.0).direction is True
    assert papers.Row("", "", 1.2, 1.5).error == pytest.approx(0.25)


def test_frozen_modules_have_the_backward_passes_that_were_measured_within_what_recomputing_takes():
    rows = {row.case.split(":")[0]: row for row in papers.backward_rows()}
    assert rows["encoder, frozen"].error < 0.001
    assert (
        max(row.error for case, row in rows.items() if "trained" in case and "frozen" not in case)
        < 0.1
    )
    # Of a frozen LLM behind a projector: gradients of the inputs, and what is recomputed.
    frozen = rows["LLM, frozen behind a trained projector"]
    assert 2 < frozen.reported < frozen.predicted < 3


def test_a_row_counts_where_nothing_contradicts_it_by_the_constant_that_says_what_does():
    assert papers.Row("", "", 1.2, 1.1).counts()
    assert not papers.Row("", "", None).counts()
    assert not papers.Row(
        "", "", 1.2, 1.1, contradiction="its stage times allow 1.3 to 1.4"
    ).counts(np.inf)
    differing = papers.Row("", "", 1.2, 1.1, same_layers=1.78)
    assert not differing.counts()
    assert differing.conflict() == "the same layers take 1.78 times as long"
    assert differing.counts(1.8)


@pytest.mark.exhaustive
def test_figures_of_whole_trainings_are_planned_with_the_configs_like_the_papers():
    found = papers.planned_figures()
    assert len(found) == len(papers.TEXT_FIGURES)
    for row in found:
        assert 0 < row["error"] < 0.6
        assert (row["predicted"] > 1) == ("without" in row["source"])


@pytest.mark.exhaustive
def test_the_papers_tables_are_predicted_and_our_partition_is_never_slower(capsys):
    ended = run(capsys, bench.main, "papers", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["direction_share"] >= 0.9
    assert found["all_rows"] == len(found["rows"])
    counts = [(row["direction_right"], row["direction_rows"]) for row in found["sensitivity"]]
    assert counts == [(20, 22), *[(22, 25)] * 3, *[(19, 22)] * 3]
    assert (found["text_figures"], found["planned"]) == (len(papers.TEXT_FIGURES), [])
    assert found["median_error"] <= 0.2
    assert found["anchors_exact"]
    assert found["omnibal_22_23_24_24"]
    assert found["omnibal_by_flops"] == [28, 25, 20, 20]
    assert found["ours_never_slower"]
    frozen = {r["case"].split(":")[0]: r for r in found["rows"] if "frozen-aware" in r["case"]}
    assert len(frozen) == 18
    assert {case for case, row in frozen.items() if row["contradiction"]} == CONTRADICTORY
    assert max(row["error"] for case, row in frozen.items() if case not in CONTRADICTORY) <= 0.15
    assert min(min(row["ours"].values()) for row in frozen.values()) >= 1 - 1e-9
    nine = [row for row in found["rows"] if row["source"] == "OmniBal appendix table 1"]
    assert len(nine) == 9
    assert all(
        {"paper", "parameters", "layers", "profile", "omnibal", "cornstarch"} == set(r["ours"])
        for r in nine
    )
