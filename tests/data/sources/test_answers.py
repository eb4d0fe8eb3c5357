"""Pairs and rollouts of answers, in TRL's and LLaMA-Factory's formats, and what is refused of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from files_made import picture

from mmjax.config import ChatFormat, LossConfig, ParquetSource, Placeholder
from mmjax.config.losses import Dpo, Grpo, Kto, Orpo, takes_answers
from mmjax.config.sources import DatasetInfoSource, PreferenceSource
from mmjax.data.plan.attended_pairs import MaskRules, runs_of
from mmjax.data.sample import BadSample, Conversation, MediaPlace, Message, Rollout, Text
from mmjax.data.sources.answer_records import parse_judged, parse_preference, parse_rollouts
from mmjax.data.sources.answers import with_loss
from mmjax.data.sources.array_records import from_header, to_header
from mmjax.data.sources.opening import open_conversations, source_of
from mmjax.data.text.chat import Chat
from mmjax.data.text.conversation_tokens import outlined_branches, outlined_sample
from mmjax.data.text.load_chat import load_chat

IMAGE = MediaPlace("image")
PAIR = {"prompt": "What is it?", "chosen": "A cat.", "rejected": "A dog.", "images": ["a.png"]}
SAID = Conversation(
    (Message("user", (IMAGE, "What is it?")), Message("assistant", ("A cat.",))),
    rejected=Message("assistant", ("A dog.",)),
)
DRAWN = {
    "prompt": "What is it?",
    "completion_ids": [[7, 8], [9]],
    "logprobs": [[-1.0, -2.0], [-0.5]],
}
DRAWN |= {"advantages": [1.0, -1.0]}


JUDGED = {"prompt": "What is it?", "completion": "A cat.", "label": True, "images": ["a.png"]}


def turn(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


CONVERSATIONAL = PAIR | {
    "prompt": [turn("user", "What is it?")],
    "chosen": [turn("assistant", "A cat.")],
    "rejected": [turn("assistant", "A dog.")],
}


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        CONVERSATIONAL,
        CONVERSATIONAL
        | {"prompt": [turn("user", [{"type": "image"}, {"type": "text", "text": "What is it?"}])]},
        CONVERSATIONAL | {"prompt": [turn("user", [{"type": "text", "text": "What is it?"}])]},
        {"images": ["a.png"]}
        | {
            key: [turn("user", "What is it?"), *CONVERSATIONAL[key]]
            for key in ("chosen", "rejected")
        },
        PAIR | {"prompt": "<image>\nWhat is it?"},
    ],
    ids=["plain", "messages", "typed parts", "no place", "no prompt", "marker"],
)
def test_pairs_as_trl_has_them_are_one_conversation(record):
    parsed = parse_preference(record)
    assert (parsed.conversation, parsed.references) == (SAID, ("a.png",))


def test_pairs_of_files_are_those_of_their_records(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    stored = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR | stored) + "\n")
    shared = {
        "instruction": "<image>What is it?",
        "chosen": "A cat.",
        "rejected": "A dog.",
        "images": ["a.png"],
    }
    (tmp_path / "alpaca.json").write_text(json.dumps([shared | stored]))
    turns = {
        "conversations": [{"from": "human", "value": "<image>What is it?"}],
        "images": ["a.png"],
    }
    turns |= {key: {"from": "gpt", "value": PAIR[key]} for key in ("chosen", "rejected")}
    (tmp_path / "sharegpt.json").write_text(json.dumps([turns | stored]))
    media = {"images": "images"}
    info = {
        "a": {"file_name": "alpaca.json", "ranking": True, "columns": media},
        "s": {
            "file_name": "sharegpt.json",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": media,
        },
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    columns = {key: [value] for key, value in (PAIR | stored).items()} | {
        "images": [[{"bytes": picture(), "path": ""}]]
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    assert isinstance(
        source_of(str(tmp_path / "pairs.jsonl"), "--data", tmp_path / "cache"), PreferenceSource
    )
    found = source_of(str(tmp_path / "pairs.parquet"), "--data", tmp_path / "cache")
    assert (found.answers, found.images) == ("pair", "images")
    sources = [
        PreferenceSource(str(tmp_path / "pairs.jsonl")),
        DatasetInfoSource(str(tmp_path), "a"),
        DatasetInfoSource(str(tmp_path), "s"),
        ParquetSource(str(tmp_path / "pairs.parquet"), images="images", answers="pair"),
    ]
    for source in sources:
        opened = open_conversations(source, "train", tmp_path / "cache", "data.sources.pairs")
        assert opened.conversation(0) == replace(SAID, reference=(-1.5, -2.5))
        assert opened.media(0)[0].read() == picture()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": None}, "has no rejected answer"),
        ({"rejected": ""}, "has no rejected answer"),
        ({"rejected": "A cat."}, "has the same chosen and rejected answer"),
        ({"rejected": [turn("user", "A dog.")]}, "has no message of the assistant"),
        (
            {"rejected": [turn("assistant", "A"), turn("user", "And?")]},
            "several messages in chosen or rejected",
        ),
        (
            {"rejected": "A <image>dog.", "images": ["a.png", "b.png"]},
            "has 3 places <image> for 2 image",
        ),
        ({"prompt": "", "chosen": [turn("assistant", "A.")]}, "has no prompt"),
        ({"ref_chosen_logps": "low"}, "has ref_chosen_logps='low', which is no number"),
        ({"prompt": [turn("user", 0.5)]}, "message 1"),
        ({"prompt": [{"role": "user"}]}, "message 1"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_bad_for_one_reason(change, reason):
    with pytest.raises(BadSample, match=reason):
        parse_preference(PAIR | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"completion_ids": None}, "has no completion_ids$"),
        ({"completion_ids": None, "completions": ["a", "b"]}, "text alone does not say them"),
        ({"advantages": [1.0]}, "has not as many logprobs and advantages as completion_ids"),
        ({"logprobs": [[-1.0], [-0.5]]}, "has not a log-probability of every token of answer 0"),
        (
            {"logprobs": [[-1.0, float("nan")], [-0.5]]},
            "has not a log-probability of every token of answer 0",
        ),
        ({"completion_ids": [[7, 8], []]}, "has no tokens, or no advantage, of answer 1"),
        ({"prompt": ""}, "has no prompt"),
    ],
)
def test_rollouts_whose_tokens_do_not_line_up_are_bad_for_one_reason(change, reason):
    with pytest.raises(BadSample, match=reason):
        parse_rollouts(DRAWN | change)


def test_array_records_hold_all_answers():
    rollouts = (Rollout((7, 8), (-1.0, -2.0), 1.0, (-1.0, -1.0)), Rollout((9,), (-0.5,), -1.0))
    for conversation in (
        replace(SAID, reference=(-1.5, -2.5)),
        replace(SAID, rejected=None, messages=SAID.messages[:1], rollouts=rollouts),
        replace(SAID, label=False, rejected=None),
        replace(SAID, label=True, reference=(-1.5, -2.5)),
        replace(SAID, label=True, rejected=None, reference=(-1.5,)),
    ):
        header = json.loads(json.dumps(to_header(conversation, [5])))
        assert from_header(header) == conversation
        assert from_header(header).label is conversation.label
    with pytest.raises(BadSample, match="a label 3"):
        from_header(header | {"label": 3})


@pytest.mark.parametrize(
    "record",
    [
        JUDGED,
        JUDGED
        | {
            key: [turn(role, JUDGED[key])]
            for key, role in (("prompt", "user"), ("completion", "assistant"))
        },
    ],
    ids=["plain", "messages"],
)
def test_a_judged_answer_is_read_as_trl_has_it(record):
    parsed = parse_judged(record | {"ref_logps": -1.0})
    assert parsed.references == ("a.png",)
    assert parsed.conversation == replace(SAID, rejected=None, label=True, reference=(-1.0,))
    other = parse_judged(record | {"label": False, "kl_completion": "A dog."}).conversation
    assert other == replace(SAID, label=False)


def test_judged_answers_are_read_of_json_and_parquet_and_known_by_their_keys(tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "judged.jsonl").write_text(json.dumps(JUDGED) + "\n")
    columns = {key: [value] for key, value in JUDGED.items()}
    columns["images"] = [[{"bytes": picture(), "path": ""}]]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "judged.parquet")
    for name in ("judged.jsonl", "judged.parquet"):
        source = source_of(str(tmp_path / name), "--data", tmp_path / "cache")
        assert takes_answers(Kto(), source)
        opened = open_conversations(source, "train", tmp_path / "cache", "data.sources.judged")
        assert opened.conversation(0) == replace(SAID, rejected=None, label=True)
        assert opened.media(0)[0].read() == picture()
    assert not takes_answers(Dpo(), source)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"label": None},
            "has label=None; expected true for a good answer, or false for a bad one",
        ),
        ({"label": "good"}, "has label='good'"),
        ({"completion": ""}, "has no completion answer"),
        (
            {"completion": [turn("assistant", "a"), turn("user", "b")]},
            "has several messages in completion",
        ),
        ({"completion": [turn("user", "a")]}, "the assistant"),
        ({"completion": "<image>"}, "medium|places <image>"),
        ({"prompt": ""}, "has no prompt"),
        ({"ref_logps": 3.0}, "has 3 in ref_logps"),
        ({"ref_KL_logps": -3.0}, "has ref_KL_logps and no ref_logps"),
        ({"KL_completion": "A dog."}, "did you mean kl_completion"),
    ],
)
def test_a_judged_answer_that_cannot_be_trained_on_is_bad_for_one_reason(change, reason):
    with pytest.raises(BadSample, match=reason):
        parse_judged(JUDGED | change)


class Listed:
    """Records in memory; None is one that cannot be read."""

    def __init__(self, records: list[dict[str, Any] | None]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def conversation(self, index: int) -> Conversation:
        if self.records[index] is None:
            raise BadSample("is no record")
        return parse_judged(self.records[index]).conversation


def test_a_judged_answer_stands_beside_that_of_the_record_before_it_which_can_be_read(chat):
    records = Listed(
        [JUDGED | {"completion": f"Answer {n}.", "label": n % 2 == 0} for n in range(4)]
    )
    records.records[1] = None
    judged = with_loss(chat, Kto(reference="none"))
    assert [judged.read(records, n).rejected.parts for n in (0, 2, 3)] == [
        ("Answer 3.",),
        ("Answer 0.",),
        ("Answer 2.",),
    ]
    with pytest.raises(BadSample, match="is no record"):
        judged.read(records, 1)
    conversation = judged.read(records, 3)
    sample = judged.sample(conversation, [["vision"]])
    own, other = (s for s in sample.segments if isinstance(s, Text) and s.branch)
    assert chat.decode_answer(own.tokens[1:].tolist()).startswith("Answer 3.")
    assert chat.decode_answer(other.tokens[1:].tolist()).startswith("Answer 2.")
    assert (
        set(own.loss_inputs["labels"].tolist())
        == set(other.loss_inputs["labels"].tolist())
        == {-1.0}
    )
    np.testing.assert_allclose(own.weights.sum() + other.weights.sum(), 1, rtol=1e-6)
    alone = with_loss(chat, Kto(loss_type="apo_zero_unpaired", reference="none"))
    assert alone.read(records, 3).rejected is None
    assert [
        s.branch
        for s in alone.sample(alone.read(records, 3), [["vision"]]).segments
        if isinstance(s, Text)
    ][-1] == 1
    with pytest.raises(
        BadSample, match="has no other record before it whose answer loss=kto could compare"
    ):
        judged.read(Listed([JUDGED]), 0)


def test_stored_log_probabilities_of_a_judged_answer_are_of_what_its_record_says(chat):
    stored = with_loss(chat, Kto(reference="stored"))
    whole = JUDGED | {"kl_completion": "A dog.", "ref_logps": -3.0, "ref_KL_logps": -4.0}
    records = Listed([JUDGED, whole])
    sample = stored.sample(stored.read(records, 1), [["vision"]])
    own, other = (s for s in sample.segments if isinstance(s, Text) and s.branch)
    sums = [s.loss_inputs["reference_log_probs"].sum() for s in (own, other)]
    assert sums == [-3.0, -4.0]
    with pytest.raises(BadSample, match="has no kl_completion, whose ref_KL_logps"):
        stored.sample(stored.read(records, 0), [["vision"]])


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Chat:
    folder = tmp_path_factory.mktemp("qwen")
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    checkpoints.save(
        folder, checkpoints.byte_level(checkpoints.QWEN_VL), checkpoints.QWEN2, **named
    )
    return load_chat(ChatFormat(str(folder), placeholders={"image": Placeholder("<|image_pad|>")}))


def tokens_of(segments: Any, branch: int) -> list[int]:
    return [
        t
        for part in segments
        if isinstance(part, Text) and part.branch == branch
        for t in part.tokens.tolist()
    ]


def test_a_pair_is_its_prompt_once_and_two_branches_that_read_as_each_answer_alone(chat):
    pair = with_loss(chat, Dpo(reference="none"))
    sample = pair.sample(SAID, [["vision"]])
    assert pair.text_tokens([SAID]) == [
        sum(len(s.tokens) for s in sample.segments if isinstance(s, Text))
    ]
    (outline,) = pair.outlines([SAID])
    rules = MaskRules(("vision",), (), "isolated")
    runs, outlined = (
        runs_of(s, [9], rules) for s in (sample, outlined_sample(outline, ["image"], [["vision"]]))
    )
    assert runs == outlined  # so that the index counts what each branch attends
    assert outlined_branches(outline) == tuple(
        len(tokens_of(sample.segments, branch)) for branch in (1, 2)
    )
    prompt = chat.prompt(Conversation(SAID.messages[:1]), [["vision"]])
    shared = tokens_of(sample.segments, 0)
    assert sum(not isinstance(s, Text) for s in sample.segments) == 1
    for branch, answer in enumerate((SAID.messages[1], SAID.rejected), start=1):
        alone = chat.sample(
            replace(SAID, messages=(SAID.messages[0], answer), rejected=None), [["vision"]]
        )
        (text,) = (s for s in sample.segments if isinstance(s, Text) and s.branch == branch)
        assert (
            shared + text.tokens.tolist()
            == tokens_of(alone.segments, 0)[: len(shared) + len(text.tokens)]
        )
        assert len(shared) + 1 == len(tokens_of(prompt.segments, 0))
        trained = np.concatenate([s.weights for s in alone.segments if isinstance(s, Text)])
        assert np.count_nonzero(text.weights) == len(text.tokens) - 1 == np.count_nonzero(trained)
    weights = [s.weights.sum() for s in sample.segments if isinstance(s, Text)]
    np.testing.assert_allclose(sum(weights), 1, rtol=1e-6)


def test_rollouts_are_a_branch_each_with_what_they_were_drawn_with(chat):
    drawn = parse_rollouts(DRAWN).conversation
    for kind, weight in (("dapo", 1.0), ("grpo", 0.5)):
        sample = with_loss(chat, Grpo(loss_type=kind)).sample(drawn)
        first, second = (s for s in sample.segments if isinstance(s, Text) and s.branch)
        assert first.tokens[1:].tolist() == [7, 8]
        assert second.tokens[1:].tolist() == [9]
        assert first.weights.tolist() == [0, weight, weight]
        assert second.weights.tolist() == [0, 1]
        assert first.loss_inputs["old_log_probs"].tolist() == [0, -1, -2]
        assert second.loss_inputs["advantages"].tolist() == [0, -1]


@pytest.mark.parametrize(
    ("loss", "conversation", "reason"),
    [
        (
            None,
            SAID,
            "several answers to one prompt, which loss=cross_entropy does not take: set loss=dpo",
        ),
        (Dpo(), replace(SAID, rejected=None), "has no rejected answer, which loss=dpo compares"),
        (Dpo(reference="stored"), SAID, "has no ref_chosen_logps and ref_rejected_logps"),
        (Orpo(), replace(SAID, rejected=None), "has no rejected answer, which loss=orpo compares"),
        (
            Orpo(),
            replace(SAID, label=True),
            "has an answer with a label, which loss=orpo does not read: set loss=kto",
        ),
        (Kto(), SAID, "has no label, which says for loss=kto whether its answer is good"),
        (Kto(reference="stored"), replace(SAID, label=True), "has no ref_logps and ref_KL_logps"),
        (None, replace(SAID, label=True), "loss=cross_entropy does not take: set loss=kto"),
        (Grpo(), SAID, "has no rollouts"),
        (
            Grpo(),
            replace(SAID, messages=SAID.messages[:1], rollouts=(Rollout((7,), (-1.0,), 1.0),) * 19),
            "has 19 answers, and a sample takes 18; divide it into several records",
        ),
        (
            Grpo(beta=0.1, reference="stored"),
            replace(SAID, messages=SAID.messages[:1], rollouts=(Rollout((7,), (-1.0,), 1.0),)),
            "has no ref_logprobs of every token",
        ),
    ],
)
def test_a_record_without_what_its_loss_reads_is_bad(
    chat, loss: LossConfig | None, conversation: Conversation, reason: str
) -> None:
    counting = with_loss(chat, loss) if loss else chat
    (bad,) = counting.text_tokens([conversation])
    assert isinstance(bad, BadSample)
    assert reason in str(bad)


def test_tokens_that_completion_mask_leaves_out_have_no_weight_also_from_array_records(chat):
    chat = with_loss(chat, Grpo(loss_type="grpo"))
    record = DRAWN | {"completion_mask": [[1, 0], [1]]}
    conversation = parse_rollouts(record).conversation
    assert from_header(json.loads(json.dumps(to_header(conversation, [])))) == conversation
    branches = [s for s in chat.sample(conversation).segments if isinstance(s, Text) and s.branch]
    assert [branch.weights.tolist() for branch in branches] == [[0, 1, 0], [0, 1]]
    record["completion_ids"] = [[7, len(chat.tokenizer)], [9]]
    with pytest.raises(BadSample, match="in an answer, and the tokenizer has"):
        chat.sample(parse_rollouts(record).conversation)
