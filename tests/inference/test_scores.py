"""Scores of answers, against figures worked out by hand from each measure's definition."""

from __future__ import annotations

import pytest

from mmjax.inference.scores import Scored, anls, exact_match, vqa_accuracy, word_error_rate


def one(measure, said: str, *right: str) -> float:
    return measure([Scored(said, right)])


def test_an_exact_match_is_one_of_the_right_answers_to_the_letter():
    assert one(exact_match, " red\n", "red") == 1
    assert one(exact_match, "Red", "red") == 0
    assert one(exact_match, "crimson", "red", "crimson") == 1
    assert exact_match([Scored("a", ("a",)), Scored("b", ("a",))]) == 0.5


@pytest.mark.parametrize(
    ("said", "right", "wanted"),
    [
        ("Kitten", ("kitten",), 1.0),
        ("sitting", ("kitten",), 1 - 3 / 7),
        ("dog", ("kitten",), 0.0),
        ("ab", ("ac",), 0.5),
        ("abc", ("axy",), 0.0),  # a third is below the threshold
        ("sitting", ("puppy", "kitten"), 1 - 3 / 7),
        ("", ("",), 1.0),
        ("the  cat", ("The cat",), 1.0),
    ],
)
def test_anls_is_the_similarity_to_the_nearest_right_answer_from_a_half_on(said, right, wanted):
    assert one(anls, said, *right) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("agreeing", "wanted"),
    [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)],
)
def test_vqa_accuracy_counts_the_people_who_agree_each_left_out_in_turn(agreeing, wanted):
    assert one(
        vqa_accuracy, "red", *["red"] * agreeing, *["blue"] * (10 - agreeing)
    ) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("The dog.", "dog"),
        ("Two", "2"),
        ("none", "0"),
        ("don't know", "dont know"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("black and white!", "black and white"),
        ("hot-dog", "hot dog"),
    ],
)
def test_vqa_accuracy_looks_past_articles_punctuation_and_number_words(said, right):
    assert one(vqa_accuracy, said, right) == 1
    assert one(vqa_accuracy, said, "something else") == 0


def test_3_5_is_not_35():
    assert one(vqa_accuracy, "35", "3.5") == 0


@pytest.mark.parametrize(
    ("said", "right", "wanted"),
    [
        ("the cat sat", ("The cat sat.",), 0.0),
        ("the cat", ("the cat sat",), 1 / 3),
        ("the big cat sat", ("the cat sat",), 1 / 3),
        ("a cat sat", ("the cat sat",), 1 / 3),
        ("", ("the cat sat",), 1.0),
        ("well it's so", ("it's so",), 1 / 2),
        ("two words", ("other", "two words"), 0.0),
    ],
)
def test_the_word_error_rate_counts_words_put_in_left_out_or_replaced(said, right, wanted):
    assert one(word_error_rate, said, *right) == pytest.approx(wanted)


def test_the_word_error_rate_is_of_all_words_together():
    answers = [Scored("a", ("a b c d",)), Scored("x", ("x",))]
    assert word_error_rate(answers) == pytest.approx(3 / 5)
