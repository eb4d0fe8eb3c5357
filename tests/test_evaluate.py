"""`python -m mmjax.evaluate` as a user runs it, on a run whose config file is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import files, media_run, run
from started import finish, start

from mmjax import evaluate
from mmjax.errors import UserError
from mmjax.inference.scores import exact_match_by_group

FAMILIES = ("image", "audio", "mixed", "text")
TASKS = {f"exact_match_{name}" for name in ("image.read", "audio.write", "mixed.read", "text.read")}


@pytest.fixture(scope="module")
def trained(runs) -> Path:
    """A run whose config file was deleted when it ended."""
    return media_run(runs)[0]


def test_json_is_one_object_with_every_family_and_task(trained, capsys):
    before = files(trained)
    ended = run(capsys, evaluate.main, trained, "--json")
    assert (ended.code, ended.err) == (0, "")
    scores = json.loads(ended.out)
    assert {f"exact_match_{family}" for family in FAMILIES} | {"samples"} <= set(scores)
    assert TASKS & set(scores)
    assert all(0 <= value <= 1 for key, value in scores.items() if key.startswith("exact_match"))
    assert scores["samples"] == 24
    assert scores["step"] == 6
    assert files(trained) == before


def test_the_scores_are_those_that_training_ended_with(trained, capsys):
    scores = json.loads(run(capsys, evaluate.main, trained, "--json").out)
    assert scores == pytest.approx(json.loads((trained / "test.json").read_text()), rel=1e-5)


@pytest.mark.exhaustive
def test_answers_to_some_questions_are_those_that_the_scores_count(trained, capsys):
    answered = evaluate.ask(trained, range(24))
    scores = json.loads((trained / "test.json").read_text())
    assert {name: scores[name] for name in exact_match_by_group(answered)} == exact_match_by_group(
        answered
    )
    for found, number in zip(evaluate.ask(trained, [3, 1], source="few"), [3, 1], strict=True):
        # What never ends is cut after as many tokens as the longest of the questions' answers may
        # have.
        assert answered[number].prediction.startswith(found.prediction)
        assert replace(found, prediction="", ended=False) == replace(
            answered[number], prediction="", ended=False
        )
    with pytest.raises(UserError, match="test/other has no questions; those that have: test/few"):
        evaluate.ask(trained, [0], source="other")


def test_a_table_names_the_run_the_step_and_every_family(trained, capsys):
    out = run(capsys, evaluate.main, trained).out.splitlines()
    assert out[0] == f"{trained} after 6 steps"
    assert out[1] == "exact match on 24 questions of the test split"
    assert [line.split()[0] for line in out[2:]] == [*sorted(FAMILIES), "loss"]


def test_another_split_and_a_swapped_encoder_are_said(trained, capsys):
    out = run(
        capsys, evaluate.main, trained, "--split=validation", "--swap", "vision", "device=cpu"
    ).out
    assert "with the vision items of other samples" in out
    assert "of the validation split" in out


@pytest.mark.exhaustive
def test_a_process_of_its_own_prints_nothing_but_the_object(trained, tmp_path):
    ended = finish(start("mmjax.evaluate", trained, "--json", cwd=tmp_path))
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["samples"] == 24
