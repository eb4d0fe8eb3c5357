"""Packed arrays against a slow reference, token by token; and what is wrong with a sample is said with its name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made import (
    AUDIO,
    VISION,
    VOCAB,
    Made,
    clip,
    config,
    image,
    index_of,
    load,
    plan_of,
    random_samples,
    text,
)
from planned import BALANCE_KINDS, BALANCES

from mmjax.batch import TOKEN_FIELDS, ItemBatch, MaskSpec, Microbatch, TextBatch, allowed
from mmjax.config import NoGrouping, Samples
from mmjax.data.loading.packing import (
    pack_microbatch,
    plan_condition_exchange,
    plan_token_exchange,
)
from mmjax.data.loading.step_loader import reader_of
from mmjax.data.loading.text_rows import FIRST_BRANCH_BIT, MAX_BRANCHES, MAX_MODULES, BatchLayout
from mmjax.data.media.patches import item_input
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.sample import Item, SampleLengths, Text
from mmjax.errors import UserError

ENCODERS = {"vision": VISION, "audio": AUDIO}
GROUP = {"vision": 4, "audio": 6}  # positions of the encoder for one token of the LLM


# --------------------------------------------------------------------------------------------------
# reference


def tokens_of(source: Made, sample: int) -> list[dict[str, Any]]:
    """One record per token of a sample, in order."""
    tokens: list[dict[str, Any]] = []
    after = {0: 0}
    for segment in source.samples[sample][0]:
        if isinstance(segment, Text):
            branch, pieces = (
                segment.branch,
                [
                    {"token": t, "weight": w}
                    for t, w in zip(segment.tokens, segment.weights, strict=True)
                ],
            )
        else:
            array = source.samples[sample][1][segment.number]
            count = (
                len(item_input(ENCODERS[segment.encoder], array).values) // GROUP[segment.encoder]
            )
            branch, pieces = (
                0,
                [
                    {"item": segment.number, "encoder": segment.encoder, "nth": n}
                    for n in range(count)
                ],
            )
        position = after.get(branch, after[0]) if segment.start is None else segment.start
        for piece in pieces:
            tokens.append(piece | {"branch": branch, "position": position})
            position += 1
        after[branch] = position
    for i, token in enumerate(tokens):
        before = [j for j in range(i) if tokens[j]["branch"] == token["branch"]]
        if before and "token" in token:
            tokens[before[-1]] |= {"target": token["token"], "target_weight": token["weight"]}
    return tokens


def seen_in(text: TextBatch, row: int) -> np.ndarray:
    """Which keys each query of a row attends, [query, key]."""
    mask = MaskSpec._make(x if x is None else x[row] for x in text.mask)
    return allowed(mask, mask)


def may_see(items: str, query: dict[str, Any], key: dict[str, Any], later: bool) -> bool:
    """What the model's config says, for two tokens of one sample."""
    same_item = "item" in query and query.get("item") == key.get("item")
    if same_item and items != "causal":
        return True
    if "item" in query and items == "isolated":
        return False
    return not later and key["branch"] in (0, query["branch"])


def steps_of(
    source: Made, items: str, folder, **changes: Any
) -> list[tuple[MicrobatchPlan, Microbatch]]:
    loader = load(source, folder, items=items, **changes)
    plans = [m for step in range(8) for m in loader.plan(step).microbatches]
    return [(m, pack_microbatch(m, loader.batch_layout, loader.reader)) for m in plans]


@pytest.mark.parametrize("items", ["causal", "bidirectional", "isolated"])
def test_every_token_stands_as_the_slow_reference_says(items, tmp_path):
    source = random_samples(60, seed=1)
    samples_in_a_row = 0
    for plan, batch in steps_of(source, items, tmp_path):
        text, used = batch.text, np.zeros(batch.text.token.shape, bool)
        count = np.zeros(len(used), int)
        for i, sample in enumerate(plan.samples):
            llm = plan.part_start[i]
            row, begin = plan.row[llm], plan.offset[llm]
            tokens = tokens_of(source, sample)
            at = slice(begin, begin + len(tokens))
            assert not used[row, at].any()
            used[row, at] = True
            assert text.token[row, at].tolist() == [t.get("token", 0) for t in tokens]
            assert text.target[row, at].tolist() == [t.get("target", 0) for t in tokens]
            assert text.weight[row, at].tolist() == [t.get("target_weight", 0) for t in tokens]
            assert text.position[row, at].tolist() == [t["position"] for t in tokens]
            assert text.sample[row, at].tolist() == [count[row]] * len(tokens)
            assert text.source[row, at].tolist() == [0] * len(tokens)
            expected = [
                [may_see(items, q, k, b > a) for b, k in enumerate(tokens)]
                for a, q in enumerate(tokens)
            ]
            np.testing.assert_array_equal(seen_in(text, row)[at, at], expected)
            count[row] += 1
        samples_in_a_row = max(samples_in_a_row, count.max())
        outside = seen_in(text, 0)[~used[0]]
        assert not outside.any()
        assert np.all(text.sample[~used] == -1)
        assert np.all(text.source[~used] == -1)
        assert not text.weight[~used].any()
        assert all(np.all(slots[~used] == -1) for slots in text.slots.values())
        assert all(text.pos[row].tolist() == list(range(used.shape[1])) for row in range(len(used)))
        assert all(
            a.dtype == np.int32
            for name, a in text._asdict().items()
            if name in TOKEN_FIELDS and name != "weight"
        )
    assert samples_in_a_row >= 3


def test_samples_of_a_row_do_not_see_each_other(tmp_path):
    for _, batch in steps_of(random_samples(60, seed=2), "bidirectional", tmp_path)[:3]:
        for row in range(len(batch.text.token)):
            sample = batch.text.sample[row]
            assert not seen_in(batch.text, row)[sample[:, None] != sample].any()


def test_slots_lead_every_item_token_to_its_patches_or_frames(tmp_path):
    source = random_samples(80, seed=3)
    items = 0
    for plan, batch in steps_of(source, "causal", tmp_path):
        for i, sample in enumerate(plan.samples):
            llm = plan.part_start[i]
            tokens = tokens_of(source, sample)
            for number, array in enumerate(source.samples[sample][1]):
                at = [plan.offset[llm] + n for n, t in enumerate(tokens) if t.get("item") == number]
                encoder = next(t["encoder"] for t in tokens if t.get("item") == number)
                group, prepared = GROUP[encoder], item_input(ENCODERS[encoder], array)
                slots = batch.text.slots[encoder][plan.row[llm], at]
                others = [s for e, s in batch.text.slots.items() if e != encoder]
                assert all(np.all(s[plan.row[llm], at] == -1) for s in others)
                got = batch.items[encoder]
                values = got.values.reshape(-1, group, got.values.shape[-1])[slots]
                item = got.item.reshape(-1, group)[slots].reshape(-1)
                coordinates = got.coordinates.reshape(-1, group, 3)[slots]
                np.testing.assert_array_equal(
                    values.reshape(prepared.values.shape), prepared.values
                )
                np.testing.assert_array_equal(coordinates.reshape(-1, 3), prepared.coordinates)
                assert len(set(item[prepared.valid])) == 1
                assert item[prepared.valid][0] >= 0
                assert np.all(item[~prepared.valid] == -1)
                items += 1
        for encoder, got in batch.items.items():
            expected = [
                (s, n)
                for s in plan.samples
                for n, (e, _) in enumerate(source.facts(s).items)
                if e == encoder
            ]
            together = sum(len(set(row[row >= 0])) for row in got.item)
            assert together == len(expected), (
                "two items of a row have one number, or one is missing"
            )
    assert items > 90


def test_a_microbatch_without_samples_is_all_padding(tmp_path):
    loader = load(
        random_samples(20, seed=5), tmp_path, grouping=NoGrouping(), size=Samples(2), microbatches=8
    )
    batches = [
        pack_microbatch(m, loader.batch_layout, loader.reader) for m in loader.plan(0).microbatches
    ]
    assert len(batches) == 8
    empty = [b for b in batches if np.all(b.text.sample == -1)]
    assert len(empty) == 6
    for batch in empty:
        assert not batch.text.weight.any()
        assert all(
            np.all(items.item == -1) and not items.values.any() for items in batch.items.values()
        )
        assert all(np.all(slots == -1) for slots in batch.text.slots.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("topology", [Topology(4, 4, 4), Topology(4, 2, 2)], ids=["4", "4-by-2"])
@pytest.mark.parametrize("balance", BALANCES, ids=BALANCE_KINDS)
def test_processes_hold_the_rows_of_one_process_between_them(
    processes, topology, balance, tmp_path
):
    source = random_samples(40, seed=4)
    loader = load(
        source,
        tmp_path,
        topology,
        balance=balance,
        grouping=NoGrouping(chunk_steps=8),
        size=Samples(12),
    )
    each = topology.ranks // processes
    for plan in (m for step in range(3) for m in loader.plan(step).microbatches):
        whole = pack_microbatch(plan, loader.batch_layout, loader.reader)
        ranks = [range(p * each, (p + 1) * each) for p in range(processes)]
        shares = [pack_microbatch(plan, loader.batch_layout, loader.reader, r) for r in ranks]
        for field in TextBatch._fields:
            if field in TOKEN_FIELDS:
                joined = np.concatenate([getattr(s.text, field) for s in shares])
                np.testing.assert_array_equal(joined, getattr(whole.text, field), err_msg=field)
        for encoder in ENCODERS:
            for tables in ("slots", "send"):
                joined = np.concatenate([getattr(s.text, tables)[encoder] for s in shares])
                np.testing.assert_array_equal(joined, getattr(whole.text, tables)[encoder])
            for field in set(ItemBatch._fields) - {"condition"}:  # a generator's alone
                joined = np.concatenate([getattr(s.items[encoder], field) for s in shares])
                np.testing.assert_array_equal(
                    joined, getattr(whole.items[encoder], field), err_msg=field
                )


# --------------------------------------------------------------------------------------------------
# wrong samples


def packed(source: Made, honest: Made | None = None) -> Microbatch:
    """All samples in one row of each module, planned by the facts of `honest` (of the source itself)."""
    made = config()
    index = index_of(source if honest is None else honest, made)
    parts = index.parts()
    lengths = tuple((np.maximum(parts.totals(3).sum(0), 12) // 12 * 12 + 12).tolist())
    plan = plan_of(parts, np.zeros(len(parts.module), np.int32), lengths, np.arange(len(index)))
    return pack_microbatch(plan, BatchLayout.of(made.model), reader_of({"made": source}, index))


RNG = np.random.default_rng(0)
GOOD = ((text(RNG, 3, first=True), Item("vision", 0)), [image(RNG, 4, 4)])
LOUD = np.array([0.1, np.nan] + [0.0] * 20, np.float32)


def one_text(
    tokens: list[int], weights: list[float], branch: int = 0
) -> tuple[tuple[Text], list[np.ndarray]]:
    return (Text(np.array(tokens, np.int32), np.array(weights, np.float32), branch),), []


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (one_text([4, 5], [1, 1]), "first token of branch 0 has a loss weight"),
        (one_text([4, 5], [1, 1], branch=2), "first token of branch 2 has a loss weight"),
        (one_text([4, 5], [0, 1], branch=MAX_BRANCHES + 1), f"branch {MAX_BRANCHES + 1}"),
        (one_text([4, 5], [0, 1], branch=-1), "branch -1"),
        (one_text([4, VOCAB], [0, 1]), f"model.llm.vocab={VOCAB}"),
        (one_text([4, -1], [0, 1]), f"model.llm.vocab={VOCAB}"),
        (one_text([4, 5], [0, np.nan]), "NaN"),
        (one_text([4, 5], [0, -1]), "negative"),
        (one_text([4, 5], [0]), "2 tokens and 1 loss weights"),
        (((Item("vision", 0),), [image(RNG, 4, 4)[..., :0]]), "item 0 (vision) of sample made[1]"),
        (((Item("audio", 0),), [LOUD]), "item 0 (audio) of sample made[1]: it holds NaN or Inf"),
    ],
)
def test_a_sample_that_cannot_be_packed_is_named(sample, message):
    with pytest.raises(UserError) as error:
        packed(Made([GOOD, sample]))
    assert "made[1]" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("real", "promised", "message"),
    [
        (
            one_text([4, 5, 6], [0, 1, 1]),
            one_text([4, 5], [0, 1]),
            "3 tokens where its source's facts() promised 2",
        ),
        (
            one_text([4], [0]),
            one_text([4, 5], [0, 1]),
            "1 tokens where its source's facts() promised 2",
        ),
        (
            ((Item("vision", 0),), [image(RNG, 8, 4)]),
            ((Item("vision", 0),), [image(RNG, 4, 4)]),
            "8 positions where",
        ),
        (((*GOOD[0][:1], Item("vision", 1)), GOOD[1]), GOOD, "item 1 of 'vision' is not in"),
        (((*GOOD[0][:1], Item("audio", 0)), GOOD[1]), GOOD, "item 0 of 'audio' is not in"),
        ((GOOD[0][:1], GOOD[1]), GOOD, "places the items [], but its source's facts() have 1"),
        (((*GOOD[0], Item("vision", 0)), GOOD[1]), GOOD, "places the items [0, 0]"),
    ],
)
def test_a_sample_that_is_not_what_its_facts_promised_is_named(real, promised, message):
    with pytest.raises(UserError) as error:
        packed(Made([GOOD, real]), Made([GOOD, promised]))
    assert "made[1]" in str(error.value)
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_named():
    class Torn(Made):
        def item(self, index: int, number: int) -> np.ndarray:
            raise OSError("image file is truncated")

    with pytest.raises(
        UserError, match=r"item 0 \(vision\) of sample made\[0\]: image file is truncated"
    ):
        packed(Torn([GOOD]))


def test_another_error_of_a_source_keeps_its_traceback_and_names_the_sample():
    class Wrong(Made):
        def sample(self, index: int) -> None:
            raise KeyError("caption")

    with pytest.raises(KeyError) as error:
        packed(Wrong([GOOD]))
    assert error.value.__notes__ == ["while reading sample made[0]"]


def test_as_many_branches_as_the_mask_tells_apart_can_be_packed():
    branches = [text(RNG, 2, branch, first=True) for branch in range(1, MAX_BRANCHES + 1)]
    batch = packed(Made([((text(RNG, 3, first=True), *branches), [])]))
    kinds = set(batch.text.kind[0][batch.text.sample[0] >= 0].tolist())
    assert len(kinds) == 1 + MAX_BRANCHES
    assert min(kinds) == 1
    assert max(kinds) < 2**31
    assert all(kind == 1 or kind >= 1 << FIRST_BRANCH_BIT for kind in kinds)


def test_more_encoders_than_the_mask_tells_apart_are_refused():
    made = config()
    encoders = {f"eye{k}": VISION for k in range(MAX_MODULES + 1)}
    BatchLayout.of(replace(made.model, encoders=dict(list(encoders.items())[1:])))
    with pytest.raises(UserError, match=r"model has 12 encoders and generators"):
        BatchLayout.of(replace(made.model, encoders=encoders))


def test_an_empty_text_between_two_others_changes_nothing():
    a, b = text(RNG, 3, first=True), text(RNG, 2)
    with_empty = packed(Made([((a, text(RNG, 0), b), [])]))
    without = packed(Made([((a, b), [])]))
    for field in ("token", "target", "weight", "position", "kind", "sees"):
        np.testing.assert_array_equal(getattr(with_empty.text, field), getattr(without.text, field))


def test_facts_of_a_made_sample_count_its_text_and_items():
    assert Made([GOOD]).facts(0) == SampleLengths(3, (("vision", (4, 4)),))
    assert clip(RNG, 5).shape == (5,)


# ----------------------------------------------------------------------------------- positions with
# rows and columns


def packed_with_axes(source: Made, honest: Made | None = None) -> Microbatch:
    """As `packed`, for an LLM with rotary sections."""
    made = config()
    made = replace(
        made, model=replace(made.model, llm=replace(made.model.llm, rope_sections=(2, 1, 1)))
    )
    index = index_of(source if honest is None else honest, made)
    parts = index.parts()
    lengths = tuple((np.maximum(parts.totals(3).sum(0), 12) // 12 * 12 + 12).tolist())
    plan = plan_of(parts, np.zeros(len(parts.module), np.int32), lengths, np.arange(len(index)))
    return pack_microbatch(plan, BatchLayout.of(made.model), reader_of({"made": source}, index))


def test_an_images_tokens_have_its_rows_and_columns_and_text_goes_on_behind_the_longer():
    first = (
        text(RNG, 2, first=True),
        Item("vision", 0),
        text(RNG, 1),
        Item("audio", 1),
        text(RNG, 1),
    )
    given = (
        text(RNG, 1, first=True),
        Item("vision", 0, start=10),
        text(RNG, 1),
        text(RNG, 2, 1, first=True),
    )
    wide, tall = image(RNG, 7, 12), image(RNG, 12, 8)  # 2 x 3 and 3 x 2 tokens
    batch = packed_with_axes(Made([(first, [wide, clip(RNG, 40)]), (given, [tall])])).text
    assert batch.position.dtype == np.int32
    sample, position = batch.sample[0], batch.position[0].tolist()
    clips = int((batch.kind[0] == 4).sum())
    image_of = [[2, 2 + y, 2 + x] for y in range(2) for x in range(3)]
    line = [[n] * 3 for n in range(5, 5 + 1 + clips + 1)]
    assert position[: (sample == 0).sum()] == [[0] * 3, [1] * 3, *image_of, *line]
    other = [[10, 10 + y, 10 + x] for y in range(3) for x in range(2)]
    here = [p for p, s in zip(position, sample, strict=True) if s == 1]
    assert here == [[0] * 3, *other, [13] * 3, [14] * 3, [15] * 3]
    assert all(p == [0] * 3 for p, s in zip(position, sample, strict=True) if s < 0)


def test_positions_of_one_number_are_the_first_of_three_where_there_is_no_image():
    source = Made(
        [s for s in random_samples(40, seed=6).samples if not any(a.ndim == 3 for a in s[1])]
    )
    assert len(source) > 5
    plain, axes = packed(source).text.position, packed_with_axes(source).text.position
    np.testing.assert_array_equal(axes, np.repeat(plain[..., None], 3, axis=-1))


def test_facts_that_changed_behind_the_index_are_named():
    class Changed(Made):
        def facts(self, index: int) -> SampleLengths:
            return replace(super().facts(index), items=(("vision", (4, 8)),))

    with pytest.raises(
        UserError,
        match=r"made\[0\]: its item 0 has 1 tokens, and by its source's facts\(\) the size",
    ):
        packed_with_axes(Changed([GOOD]), Made([GOOD]))


def test_text_may_stand_between_the_parts_of_an_items_tokens():
    rng = np.random.default_rng(0)
    words, between, picture = text(rng, 3, first=True), text(rng, 1), image(rng, 12, 8)
    whole = (words, Item("vision", 0), between), [picture]
    parts = (
        (words, Item("vision", 0, part=(0, 2)), between, Item("vision", 0, part=(2, 6))),
        [picture],
    )
    slots, divided = (
        packed(Made([sample]), Made([whole])).text.slots["vision"] for sample in (whole, parts)
    )
    assert (slots[slots >= 0] == divided[divided >= 0]).all()
    (row,) = {*np.nonzero(divided >= 0)[0].tolist()}
    assert (np.flatnonzero(divided[row] >= 0) - np.flatnonzero(slots[row] >= 0)).tolist() == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    lacking = (*parts[0][:3], Item("vision", 0, part=(2, 5))), [picture]
    with pytest.raises(
        UserError, match="it places the items \\[\\], but its source's facts\\(\\) have 1"
    ):
        packed(Made([lacking]), Made([whole]))


# --------------------------------------------------------------------------------------------------
# the drawn examples of docstrings


def two_ranks(module: list[int], row: list[int], offset: list[int], length: list[int], **changes):
    """A plan by hand of two ranks in one node, with a row of the LLM and two of a module on each."""
    starts = np.flatnonzero(np.array(module) == 0)
    return MicrobatchPlan(
        samples=np.arange(len(starts)),
        part_start=np.append(starts, len(module)),
        module=np.array(module, np.int32),
        row=np.array(row, np.int32),
        offset=np.array(offset),
        length=np.array(length),
        pairs=np.array(length) ** 2,
        rows=(1, 2),
        topology=Topology(2, 2, 2),
        unbalanced_row=np.array(row, np.int32),
        **changes,
    )


def test_slots_of_an_exchange_are_as_drawn():
    newline = replace(VISION, connector=replace(VISION.connector, newline=True))
    layout = BatchLayout({"vision": newline}, "causal", VOCAB)
    plan = two_ranks(
        module=[0, 1, 1, 1],
        row=[1, 0, 2, 2],  # the sample is on rank 1; a is encoded on rank 0, b and c on rank 1
        offset=[0, 0, 0, 4],
        length=[20, 8, 4, 4],
        shape=Shape((20, 8), (3,)),
    )
    sent = plan_token_exchange(plan, 1, layout, "vision", range(2))
    assert sent.send.tolist() == [[[-1, -1, -1], [0, 1, -1]], [[-1] * 3] * 2]
    assert sent.slot[1:].tolist() == [0, 6, 7]
    assert sent.newline == 8


def test_conditions_of_an_exchange_are_as_drawn():
    drawing = SimpleNamespace(text_tokens=2, condition_tokens=4, max_images=lambda length: 1)
    plan = two_ranks(
        module=[0, 1, 0, 1], row=[0, 2, 0, 3], offset=[0] * 4, length=[9, 8, 9, 8],
        shape=Shape((20, 8), (8,)),
    )  # fmt: skip
    queries = np.array([[0, 0], [5, 7], [0, 0], [11, 1]])
    layout = SimpleNamespace(modules={"drawing": drawing})
    send, condition = plan_condition_exchange(plan, 1, layout, "drawing", range(2), queries)
    assert send[0, 1].tolist() == [3, 4, 5, 6, -1, 10, 11, 12]
    assert condition.tolist() == [[-1] * 4, [-1] * 4, [0, 1, 2, 3], [4, 5, 6, 7]]
