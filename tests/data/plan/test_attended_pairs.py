"""Pairs of the length index are those that attention computes: branches, spans, unseen kinds, windows, every item."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from made import AUDIO, VISION, Made, clip, config, image, load, random_samples, text

from mmjax.balance.mask_work import Mask, allowed_keys
from mmjax.batch import ItemBatch
from mmjax.config import WhisperMel
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.text_rows import BatchLayout, empty_text
from mmjax.data.media.patches import item_input
from mmjax.data.plan.attended_pairs import item_pairs
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.placement import Topology
from mmjax.planning.work import useful_work

SAMPLES = 60
WINDOWED_VISION = replace(VISION, layers=4, windowed=(0, 2, 3), window=4, class_token=True)
CHUNKED_AUDIO = replace(
    AUDIO,
    clips=WhisperMel(mels=3, sample_rate=1000, window=8, hop=4, seconds=1, attended="clip"),
    chunk=9,
    attended_chunks=2,
)


def packed(made, source, tmp_path):
    """All samples in one microbatch: what a step would have, on one rank."""
    loader = load(source, tmp_path, Topology(), size=replace(made.batch.size, count=len(source)))
    loader = replace(loader, config=made)
    loader.__dict__["sources"] = {"made": source}
    (plan,) = loader.planner.placer.place(Group(np.arange(len(source)), None))
    return pack_microbatch(plan, loader.batch_layout, loader.reader)


@pytest.mark.parametrize(
    ("items", "windows"),
    [
        *product(
            ["causal", "bidirectional", "isolated", "prefix", "in_windows"], ["full", "windows"]
        ),
        ("causal", "chunks"),
    ],
)
def test_pairs_are_those_of_the_packed_rows(items, windows, tmp_path):
    source = random_samples(SAMPLES, seed=len(items))
    made = config(items)
    llm, vision = made.model.llm, VISION
    if windows != "full":
        llm, vision = (
            replace(llm, layers=5, windowed=(0, 1, 3), window=6, chunked=windows == "chunks"),
            replace(VISION, windowed=(0,), window=2),
        )
    model = replace(made.model, llm=llm, encoders={"vision": vision, "audio": AUDIO})
    index = build_index({"made": source}, model.encoders, llm)
    batch = packed(replace(made, model=model), source, tmp_path)
    work = useful_work(model, batch.text, batch.items)
    # pairs of a sample are whole numbers, means over layers are not
    rounding = SAMPLES / 2 if windows != "full" else 0
    assert index.pairs.sum() == pytest.approx(work["llm"].pairs, abs=rounding)
    for number, name in enumerate(model.encoders):
        assert index.item_pairs[index.item_encoder == number].sum() == pytest.approx(
            work[name].pairs, abs=rounding
        )
    if windows == "full":  # sample by sample, by the mask itself
        by_sample = np.zeros(SAMPLES, np.int64)
        seen = batch.text
        if items == "in_windows":  # which layers without a window do not see
            seen = seen._replace(span=np.zeros_like(seen.span))
        for row in zip(*(getattr(seen, field) for field in (*Mask._fields, "owner")), strict=True):
            *mask, owner = row
            np.add.at(by_sample, owner[owner >= 0], allowed_keys(Mask(*mask))[owner >= 0])
        np.testing.assert_array_equal(index.pairs, by_sample)


def test_sixteen_answers_attend_a_quarter_of_what_their_length_would():
    rng = np.random.default_rng(0)
    answers = [text(rng, 500, branch, first=True) for branch in range(1, 17)]
    source = Made([((text(rng, 1000, first=True), *answers), [])])
    llm = config().model.llm
    index = build_index({"made": source}, {}, llm)
    assert index.pairs.tolist() == [1000 * 1001 // 2 + 16 * (500 * 501 // 2 + 500 * 1000)]
    assert build_index({"made": source}, {}).pairs[0] > 3.8 * index.pairs[0]  # by length alone


@pytest.mark.parametrize(
    ("name", "encoder"), [("vision", WINDOWED_VISION), ("audio", CHUNKED_AUDIO)]
)
def test_items_attend_within_their_windows_and_chunks(name, encoder):
    rng = np.random.default_rng(1)
    model = replace(config().model, encoders={name: encoder})
    text_batch = empty_text((1, 1), BatchLayout.of(model), {})
    for number in range(20):
        made = (
            image(rng, *rng.integers(1, 40, 2))
            if name == "vision"
            else clip(rng, int(rng.integers(8, 900)))
        )
        values, place, valid = item_input(encoder, made)
        owner = np.zeros((1, len(valid)), np.int32)
        batch = ItemBatch(values[None], np.where(valid, 0, -1)[None], place[None], owner, owner)
        size = made.shape[:2] if name == "vision" else made.shape
        pairs = item_pairs(encoder, size, int(valid.sum()))
        assert pairs == pytest.approx(
            useful_work(model, text_batch, {name: batch})[name].pairs, abs=0.5
        ), number
