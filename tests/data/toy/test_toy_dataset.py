"""The embedded dataset: the same from the same seed, held out by image, uneven, and not to be answered blindly."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from mmjax.config import AudioConfig, EmbeddedSource, LogMel, VisionConfig
from mmjax.data.media.patches import item_size
from mmjax.data.sample import Item, Text
from mmjax.data.toy import digits, tones
from mmjax.data.toy.dataset import (
    ALPHABET,
    BEFORE_ITEM,
    END,
    FAMILIES,
    PASSAGE,
    QUESTION,
    STRIDE,
    EmbeddedDataset,
    SwappedItems,
    decode_characters,
    encode_characters,
)
from mmjax.data.toy.digits import Strip
from mmjax.data.toy.tones import Clip

ENCODERS = {
    "vision": VisionConfig(1, 16, 2, 16, patch=4, channels=1),
    "audio": AudioConfig(
        1, 16, 2, 16, LogMel(mels=20, sample_rate=tones.SAMPLE_RATE, window=128, hop=64)
    ),
}
SPLITS = ("train", "validation", "test")


def dataset(split: str = "train", seed: int = 0, **source: object) -> EmbeddedDataset:
    return EmbeddedDataset(EmbeddedSource(**source), split, seed)


def same(a: Text | Item, b: Text | Item) -> bool:
    if isinstance(a, Item) or isinstance(b, Item):
        return a == b
    arrays = np.array_equal(a.tokens, b.tokens) and np.array_equal(a.weights, b.weights)
    return arrays and (a.branch, a.start) == (b.branch, b.start)


@pytest.mark.parametrize("split", SPLITS)
def test_a_sample_depends_on_seed_split_and_index_alone(split):
    one, other = dataset(split), dataset(split, samples=100)
    for index in (70, 3, 41):
        assert all(map(same, one.sample(index).segments, other.sample(index).segments))
        for number in range(len(one.facts(index).items)):
            np.testing.assert_array_equal(one.item(index, number), other.item(index, number))
    recipes = [dataset(split).recipe(i) for i in range(20)]
    assert recipes != [dataset(split, seed=1).recipe(i) for i in range(20)]
    assert recipes != [
        dataset("test" if split == "train" else "train").recipe(i) for i in range(20)
    ]


def test_the_fingerprint_changes_with_whatever_changes_samples():
    prints = [dataset().fingerprint(), dataset("test").fingerprint(), dataset(seed=1).fingerprint()]
    prints += [dataset(questions=2).fingerprint(), dataset(modalities=("image",)).fingerprint()]
    assert len(set(prints)) == len(prints)
    assert dataset().fingerprint() == dataset(weight=2.0).fingerprint()


def test_splits_share_no_digit_image():
    images = digits.digit_table()[0]
    contents = [
        {images[row].tobytes() for of in digits.digits_by_label(split) for row in of}
        for split in SPLITS
    ]
    assert sum(map(len, contents)) == len(set.union(*contents)) == 1797
    for split in SPLITS:
        allowed = {row for of in digits.digits_by_label(split) for row in of}
        recipes = [dataset(split, seed=5).recipe(i) for i in range(500)]
        drawn = {
            row
            for r in recipes
            for item in r.media
            if isinstance(item, Strip)
            for row in item.digits
        }
        assert drawn <= allowed
        assert all(len(of) >= 8 for of in digits.digits_by_label(split))


@pytest.mark.parametrize("split", SPLITS)
def test_facts_say_what_text_and_rendering_give(split):
    data = dataset(split)
    for index in range(300):
        facts, segments = data.facts(index), data.sample(index).segments
        assert facts.text_tokens == sum(len(s.tokens) for s in segments if isinstance(s, Text))
        assert [s.encoder for s in segments if isinstance(s, Item)] == [
            encoder for encoder, _ in facts.items
        ]
        assert [s.number for s in segments if isinstance(s, Item)] == list(range(len(facts.items)))
        for number, (encoder, size) in enumerate(facts.items):
            array = data.item(index, number)
            if encoder == "vision":
                assert array.dtype == np.uint8
                assert array.shape == (*size, 1)
            else:
                assert array.dtype == np.float32
                assert array.shape == size
                assert np.abs(array).max() <= 1


def test_images_show_the_digits_that_their_labels_say():
    images, labels = digits.digit_table()
    data = dataset("test", modalities=("image",))
    for index in range(100):
        for number, strip in enumerate(data.recipe(index).media):
            image = data.item(index, number)[..., 0]
            assert "".join(str(labels[row]) for row in strip.digits) == strip.text
            for place, row in enumerate(strip.digits):
                y, x = divmod(place, strip.columns)
                y, x = strip.top + 8 * y, strip.left + 8 * x
                np.testing.assert_array_equal(image[y : y + 8, x : x + 8], images[row])
                image[y : y + 8, x : x + 8] = 0
            assert not image.any()


def test_augmented_digits_stay_near_their_own():
    data = dataset(modalities=("image",))
    correlations = []
    for index in range(100):
        strip, image = data.recipe(index).media[0], data.item(index, 0)[..., 0]
        plain = digits.render_strip(strip, None)[..., 0]
        assert not np.array_equal(image, plain)
        correlations.append(np.corrcoef(image.ravel(), plain.ravel())[0, 1])
    assert min(correlations) > 0.4
    assert np.mean(correlations) > 0.8


def test_clips_sound_the_keys_that_their_text_says():
    data = dataset("test", modalities=("audio",))
    low, high = sorted(set(tones.LOW.values())), sorted(set(tones.HIGH.values()))
    key_of = {(tones.LOW[key], tones.HIGH[key]): key for key in tones.KEYS}
    for index in range(60):
        clip, wave = data.recipe(index).media[0], data.item(index, 0)
        at, heard = clip.lead, ""
        for length, gap in zip(clip.tones, clip.gaps, strict=True):
            turns = np.exp(
                -2j * np.pi / tones.SAMPLE_RATE * np.outer(low + high, np.arange(length))
            )
            power = abs(turns @ wave[at : at + length])
            heard += key_of[low[power[:4].argmax()], high[power[4:].argmax()]]
            at += length + gap
        assert heard == clip.text
        assert at <= len(wave)


def test_the_loss_is_on_answers_and_their_end_alone():
    for split in SPLITS:
        data = dataset(split)
        for index in range(300):
            texts = [s for s in data.sample(index).segments if isinstance(s, Text)]
            asks = data.recipe(index).asks
            assert not any(s.weights.any() for s in texts if s.branch == 0)
            branches = [s for s in texts if s.branch]
            assert [s.branch for s in branches] == list(range(1, len(asks) + 1))
            for text, ask in zip(branches, asks, strict=True):
                assert decode_characters(text.tokens[text.weights == 0]) == ask.text
                assert decode_characters(text.tokens[text.weights == 1]) == ask.answer
                assert text.tokens[-1] == END


def test_training_asks_up_to_the_configured_questions_and_held_out_splits_one():
    asked = Counter(len(dataset(questions=4).recipe(i).asks) for i in range(600))
    assert set(asked) == {1, 2, 3, 4}
    assert all(len(dataset(questions=1).recipe(i).asks) == 1 for i in range(100))
    for split in ("validation", "test"):
        assert all(len(dataset(split).recipe(i).asks) == 1 for i in range(300))
    for index in range(300):
        asks = dataset().recipe(index).asks
        assert len({ask.text for ask in asks}) == len(asks)


def test_no_text_of_a_prompt_shows_an_answer():
    data = dataset("test")
    for index in range(1000):
        question = data.question(index)
        assert question.answer
        assert set(question.answer) <= {*tones.KEYS, " "}
        for text in question.prompt.segments:
            if isinstance(text, Text) and text.start != PASSAGE:
                assert not set(decode_characters(text.tokens)) & set(tones.KEYS)
        last = question.prompt.segments[-1]
        whole = data.sample(index).segments[-1]
        np.testing.assert_array_equal(whole.tokens[: len(last.tokens)], last.tokens)
        assert decode_characters(whole.tokens[len(last.tokens) :]) == question.answer
        assert all(map(same, question.prompt.segments[:-1], data.sample(index).segments[:-1]))


def test_a_blind_guesser_scores_at_most_fifteen_percent_in_every_family():
    """The best constant answer for a task, its question and how much there is to see, learned from other samples."""
    train, test = dataset("test", seed=1), dataset("test")
    best, hits = defaultdict(Counter), defaultdict(list)

    def visible(recipe):
        return (
            recipe.asks[0].task,
            recipe.asks[0].text,
            tuple(len(m.text) for m in recipe.media),
            len(recipe.passage),
        )

    for recipe in map(train.recipe, range(12_000)):
        best[visible(recipe)][recipe.asks[0].answer] += 1
    for recipe in map(test.recipe, range(2_000)):
        guess = best[visible(recipe)].most_common(1)
        hits[recipe.family].append(bool(guess) and guess[0][0] == recipe.asks[0].answer)
    chance = {family: np.mean(hit) for family, hit in hits.items()}
    assert set(chance) == set(FAMILIES)
    assert max(chance.values()) <= 0.15, chance


def test_segments_keep_to_their_strides_before_the_question():
    for split in SPLITS:
        data = dataset(split)
        for index in range(1500):
            facts, end = data.facts(index), 0
            for segment in data.question(index).prompt.segments:
                assert segment.start >= end
                if isinstance(segment, Item):
                    assert segment.start == segment.number * STRIDE + BEFORE_ITEM
                    encoder, size = facts.items[segment.number]
                    end = segment.start + item_size(ENCODERS[encoder], size).tokens
                    assert end <= (segment.number + 1) * STRIDE
                else:
                    end = segment.start + len(segment.tokens)
            assert segment.start == QUESTION


def test_lengths_are_as_uneven_as_real_corpora():
    data = dataset()
    facts = [data.facts(index) for index in range(4000)]
    totals = {
        name: np.array(
            [
                sum(item_size(encoder, size).positions for e, size in f.items if e == name)
                for f in facts
            ]
        )
        for name, encoder in ENCODERS.items()
    }
    for total in totals.values():
        having = total[total > 0]
        assert having.std() / having.mean() >= 0.6
        assert having.max() >= 3 * having.mean()
    assert np.mean([not f.items for f in facts]) > 0.05
    orders = Counter("".join(encoder[0] for encoder, _ in f.items) for f in facts)
    assert set(orders) >= {
        "",
        "v",
        "vv",
        "vvv",
        "vvvv",
        "a",
        "aa",
        "aaa",
        "av",
        "va",
        "vav",
        "ava",
        "aavv",
        "vvva",
    }
    sizes = {size for f in facts for encoder, size in f.items if encoder == "vision"}
    assert len(sizes) >= 150
    assert any(height % 4 for height, _ in sizes)
    assert any(width % 8 in (1, 2, 3, 4) for _, width in sizes)
    assert max(width / height for height, width in sizes) > 6


def test_families_come_in_their_shares_and_a_restriction_keeps_their_proportions():
    drawn = Counter(dataset().recipe(i).family for i in range(4000))
    assert {family: drawn[family] / 4000 for family in drawn} == pytest.approx(FAMILIES, abs=0.03)
    some = Counter(dataset(modalities=("image", "text")).recipe(i).family for i in range(1000))
    assert set(some) == {"image", "text"}
    assert some["image"] / 1000 == pytest.approx(0.34 / 0.44, abs=0.05)
    with pytest.raises(ValueError, match="modality"):
        dataset(modalities=())


def test_swapped_items_come_from_another_sample_and_the_text_stays():
    data = dataset("test")
    for encoders in (("vision",), ("audio",), ("vision", "audio")):
        swapped, disagree = SwappedItems(data, encoders), []
        for index in range(200):
            question, facts = swapped.question(index), swapped.facts(index)
            assert question.answer == data.question(index).answer
            assert facts.text_tokens == data.facts(index).text_tokens
            for number, (encoder, size) in enumerate(facts.items):
                item, own = swapped.item(index, number), data.item(index, number)
                assert encoder == data.facts(index).items[number][0]
                assert item.shape[: len(size)] == size
                if encoder in encoders:
                    disagree.append(not np.array_equal(item, own))
                else:
                    np.testing.assert_array_equal(item, own)
        assert all(disagree)
        assert disagree


def test_questions_name_the_encoders_that_their_answers_need():
    for index in range(1000):
        question, recipe = dataset("test").question(index), dataset("test").recipe(index)
        there = {"vision" if isinstance(item, Strip) else "audio" for item in recipe.media}
        assert set(question.needs) <= there
        assert bool(question.needs) == (question.family != "text")
        assert question.task.startswith(question.family + ".")
        if question.task == "mixed.both":
            clip = next(item for item in recipe.media if isinstance(item, Clip))
            strip = next(item for item in recipe.media if isinstance(item, Strip))
            assert question.answer == f"{clip.text} {strip.text}"


def test_every_text_of_the_dataset_has_tokens_that_decode_to_it():
    tokens = encode_characters(ALPHABET)
    assert tokens.tolist() == list(range(2, 2 + len(ALPHABET)))
    assert decode_characters(tokens) == ALPHABET
    assert decode_characters([0, *encode_characters("4 7"), END, *encode_characters("9")]) == "4 7"
    for index in range(300):
        assert all(
            (s.tokens > 0).all() for s in dataset().sample(index).segments if isinstance(s, Text)
        )
