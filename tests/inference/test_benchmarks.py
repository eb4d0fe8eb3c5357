"""Public benchmarks are scored as their published scorers do, and their tables are asked row by row."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from published_scores import COUNT, OPTIONS, PUBLISHED

from mmjax.errors import UserError
from mmjax.inference.benchmarks import (
    BENCHMARKS,
    QUESTIONS,
    Reply,
    chosen_option,
    last_option,
    relaxed_match,
    score_replies,
    write_questions,
)
from mmjax.inference.scores import Answered, Replies

LETTERS = {"chosen_option": chosen_option, "last_option": last_option}


@pytest.fixture(scope="module")
def published() -> dict[str, list]:
    """What lmms-eval makes of answers, by rule."""
    return json.loads(PUBLISHED.read_text())


@pytest.mark.parametrize("rule", LETTERS)
def test_an_answer_chooses_the_option_that_lmms_eval_takes_it_for(rule, published):
    rows = published[rule]
    assert len(rows) >= COUNT
    for text, letter in rows:
        assert LETTERS[rule](text, OPTIONS) == letter, text


def test_numbers_are_right_within_the_bounds_of_lmms_eval(published):
    assert len(published["relaxed_match"]) >= COUNT
    for prediction, answer, right in published["relaxed_match"]:
        assert relaxed_match(prediction, answer) is right, (prediction, answer)


def test_pairs_of_questions_have_the_points_of_lmms_eval(published):
    rows, scores = published["mme"]
    replies = [
        Reply({"category": category, "question_id": name, "answer": answer}, prediction)
        for category, name, answer, prediction in rows
    ]
    found = BENCHMARKS["mme"].score(replies)
    assert {name: found[name] for name in scores} == pytest.approx(scores, rel=1e-12)


def test_a_question_counts_when_it_is_right_however_its_options_are_rotated():
    options = {"A": "red", "B": "blue"}
    rows = [
        ({"index": 3, "answer": "A", **options}, "A"),
        ({"index": 1_000_003, "answer": "B", "A": "blue", "B": "red"}, "B."),
        ({"index": "4", "answer": "A", **options}, "red"),
        ({"index": "1000004", "answer": "B", "A": "blue", "B": "red"}, "A"),
    ]
    found = BENCHMARKS["mmbench"].score([Reply(*row) for row in rows])
    assert found == {"accuracy": 0.5, "accuracy_once": 0.75}


def test_scores_are_told_by_part_and_answers_may_be_lists():
    rows = [
        ({"answer": ["10"], "type": "human_test"}, "10.4"),
        ({"answer": "['ten']", "type": "augmented_test"}, "nine"),
    ]
    found = BENCHMARKS["chartqa"].score([Reply(*row) for row in rows])
    parts = {"relaxed_accuracy_augmented_test": 0.0, "relaxed_accuracy_human_test": 1.0}
    assert found == {"relaxed_accuracy": 0.5, **parts}
    document = Reply({"question": "q", "answers": ["Two words", "2"]}, "two word")
    assert BENCHMARKS["docvqa"].score([document])["anls"] == pytest.approx(1 - 1 / 9)
    numbered = {"options": "['x', 'y']", "answer": "1"}
    assert BENCHMARKS["mmmu"].score([Reply(numbered, "(B)")]) == {"accuracy": 1.0}
    assert BENCHMARKS["ai2d"].score([Reply({"answer": "Nine."}, "nine")]) == {"accuracy": 1.0}


def picture(number: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(content, "png")
    return content.getvalue()


def said(*predictions: str) -> Replies:
    """Answers to the first questions."""
    return Replies(
        tuple(
            Answered(n, "", "", "", "", text, (), (), True) for n, text in enumerate(predictions)
        ),
        {},
    )


def test_a_table_with_images_in_base64_is_asked_and_scored_row_by_row(tmp_path):
    images = [base64.b64encode(picture(n)).decode() for n in range(2)]
    lines = [
        ("index", "image", "hint", "question", "A", "B", "answer"),
        ("7", images[0], "Look.", "Which?", "red", "blue", "B"),
        ("9", "7", "", "Which is it?", "red", "blue", "A"),
    ]
    table = tmp_path / "mmbench.tsv"
    table.write_text("".join("\t".join(line) + "\n" for line in lines))
    folder = write_questions("mmbench", str(table), "--data", tmp_path)
    assert folder == write_questions("mmbench", str(table), "--data", tmp_path)
    records = [json.loads(line) for line in (folder / QUESTIONS).read_text().splitlines()]
    (image, text), answer = records[0]["messages"][0]["content"], records[0]["messages"][1]
    assert (folder / image["path"]).read_bytes() == picture(0)
    assert text["text"] == (
        "Look.\nWhich?\nA. red\nB. blue\nAnswer with the option's letter from the given choices directly."
    )
    assert answer == {"role": "assistant", "content": "B"}
    assert records[1]["messages"][0]["content"][0] == image  # that of row 7
    found = score_replies("mmbench", folder, said("B", "(B)"))
    assert found == {"accuracy": 0.5, "accuracy_once": 0.5}


def test_images_of_parquet_stand_where_the_text_names_them(tmp_path):
    row = {
        "question": "Is <image 2> as <image 1>?",
        "options": "['yes', 'no']",
        "answer": "A",
        "image_1": {"bytes": picture(1), "path": None},
        "image_2": {"bytes": picture(2), "path": None},
        "image_3": None,
    }
    table = tmp_path / "mmmu.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), table)
    folder = write_questions("mmmu", str(table), "--data", tmp_path)
    (record,) = map(json.loads, (folder / QUESTIONS).read_text().splitlines())
    kinds = [
        part.get("text") or picture(2) == (folder / part["path"]).read_bytes()
        for part in record["messages"][0]["content"]
    ]
    assert kinds[:4] == ["Is ", True, " as ", False]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["question\tanswer", "q\ta"], "has no column 'index', which this benchmark reads"),
        (["index\timage\tquestion\tanswer", "1\t5\tq\ta"], "row 1: its image is that of row '5'"),
        (["index\timage\tquestion\tanswer", f"1\t{'?' * 80}\tq\ta"], "row 1: "),
    ],
    ids=["column", "reference", "base64"],
)
def test_a_table_that_is_another_is_refused_with_its_row(lines, message, tmp_path):
    table = tmp_path / "table.tsv"
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError) as error:
        write_questions("mmbench", str(table), "--data", tmp_path)
    assert message in str(error.value)
    assert not list(tmp_path.glob("benchmark-*"))
