"""Batches of other trainers: good ones raise no alarm, and each planted fault is named, and nothing else."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from batches_made import (
    CHATML_TURN,
    FAMILIES,
    Arrays,
    Made,
    flattened,
    labels_of,
    packed,
    padded,
    rope_of,
    words_of,
    write_talks,
)
from commands import run
from llava_folder import save_checkpoint, save_questions
from PIL import Image
from safetensors.numpy import save_file
from test_docs import write_examples
from test_video import There, conversations, folder_of

from mmjax import verify
from mmjax.config.loading import config_of_words, load
from mmjax.data.sources.opening import open_sources
from mmjax.verification.dumped_batch import DumpedBatch
from mmjax.verification.faults import Finding
from mmjax.verification.references import References
from mmjax.verification.verify_batches import verify_batch

IGNORED = -100


class Data:
    """Conversations of a family's checkpoint, and the batches that transformers makes of them."""

    def __init__(self, family: str, seed: int, folder: Path, *changes: str) -> None:
        rng = np.random.default_rng(seed)
        self.made: Made = FAMILIES[family](folder, rng)
        write_talks(self.made, rng)
        config = load(*config_of_words([*words_of(self.made), *changes]))
        self.known = References(config, open_sources(config, "train", folder))

    def batch(self, kind: str) -> Arrays:
        if kind == "packed":
            return packed(self.made, [8, 2, 0, 11, 1, 4])
        return padded(self.made, [3, 4, 2, 1] if kind == "left" else [6, 7, 10, 5], kind)

    def findings(self, arrays: Arrays) -> list[Finding]:
        return findings_of(self.known, arrays)


def findings_of(known: References, arrays: Arrays) -> list[Finding]:
    return verify_batch(DumpedBatch("a.npz", arrays), known)[1]


@pytest.mark.default_cases("qwen2_5_vl-0", "llava-0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_transformers_raise_no_alarm(family: str, seed: int, tmp_path: Path) -> None:
    data = Data(family, seed, tmp_path)
    samples = {"left": [3, 4, 2, 1], "right": [6, 7, 10, 5], "packed": [8, 2, 0, 11, 1, 4]}
    for kind, expected in samples.items():
        batch = DumpedBatch(kind, data.batch(kind))
        segments, findings, unchecked = verify_batch(batch, data.known)
        assert findings == []
        assert [segment.reference.sample for segment in segments] == expected
        assert unchecked == []
    for masked in other_masks(data.batch("packed")):
        assert data.findings(masked) == []


def other_masks(arrays: Arrays) -> list[Arrays]:
    """A packed batch with the other masks that trainers make of one: numbers of samples, and pairs of tokens."""
    ends = arrays["cu_seq_lens_q"]
    number = np.repeat(np.arange(1, len(ends)), np.diff(ends))
    same = (number[:, None] == number) & np.tri(len(number), dtype=bool)
    bare = {name: values for name, values in arrays.items() if "seq" not in name}
    longer = {
        name: np.pad(bare[name], [(0, 0)] * (bare[name].ndim - 1) + [(0, 3)], mode="edge")
        for name in ("input_ids", "position_ids")
    }
    longer["labels"] = np.pad(bare["labels"], ((0, 0), (0, 3)), constant_values=IGNORED)
    longer["attention_mask"] = np.pad(number, (0, 3))[None]
    return [
        bare,  # by positions that begin anew
        bare | longer,
        bare | {"attention_mask": same[None, None]},
        bare | {"attention_mask": np.where(same, 0, -np.inf)[None, None]},
    ]


# --------------------------------------------------------------------------------------------------
# planted faults


def places(data: Data, arrays: Arrays, row: int) -> np.ndarray:
    return np.flatnonzero(np.isin(arrays["input_ids"][row], data.made.placeholders))


def without(arrays: Arrays, row: int, tokens: np.ndarray) -> Arrays:
    """The batch with padding at the end instead of these tokens of a row; pixels and grids stay."""
    arrays = {name: values.copy() for name, values in arrays.items()}
    length = arrays["input_ids"].shape[1]
    keep = np.setdiff1d(np.arange(length), tokens)
    for name, pad in (
        ("input_ids", None),
        ("labels", IGNORED),
        ("attention_mask", 0),
        ("position_ids", 1),
    ):
        values = arrays[name]
        kept = values[..., row, keep]
        fill = kept[..., -1:] if pad is None else pad
        values[..., row, : len(keep)] = kept
        values[..., row, len(keep) :] = fill
    return arrays


def not_reset(data: Data, arrays: Arrays) -> Arrays:
    """The batch whose positions go on; its cu_seq_lens part the samples."""
    starts = arrays["cu_seq_lens_q"][:-1]
    shift = np.repeat(starts, np.diff(arrays["cu_seq_lens_q"]))
    return arrays | {"position_ids": arrays["position_ids"] + shift}


def without_borders(data: Data, arrays: Arrays) -> Arrays:
    arrays = {name: values for name, values in arrays.items() if "seq" not in name}
    return arrays | {"attention_mask": np.ones_like(arrays["input_ids"])}


def causal_over_the_row(data: Data, arrays: Arrays) -> Arrays:
    arrays = {name: values for name, values in arrays.items() if "seq" not in name}
    length = arrays["input_ids"].shape[1]
    seen = np.tril(np.ones((length, length), bool))[None, None]
    return arrays | {"attention_mask": np.where(seen, 0, np.finfo(np.float32).min)}


def one_number_for_two(data: Data, arrays: Arrays) -> Arrays:
    ends = arrays["cu_seq_lens_q"]
    arrays = {name: values for name, values in arrays.items() if "seq" not in name}
    number = np.repeat([1, 2, 3, 3, 4, 5], np.diff(ends))[None]
    return arrays | {"attention_mask": number}


def placeholder_labels(data: Data, arrays: Arrays) -> Arrays:
    labels = arrays["labels"].copy()
    at = places(data, arrays, 0)
    labels[0, at] = arrays["input_ids"][0, at]
    return arrays | {"labels": labels}


def last_turn_alone(data: Data, arrays: Arrays) -> Arrays:
    labels = arrays["labels"].copy()
    for row in labels:
        answers = np.flatnonzero(np.diff(row != IGNORED, prepend=False, append=False)).reshape(
            -1, 2
        )
        row[: answers[-1][0]] = IGNORED
    return arrays | {"labels": labels}


def text_behind_an_image(data: Data, arrays: Arrays) -> Arrays:
    """The batch whose positions behind row 0's last image begin one too late."""
    position = arrays["position_ids"].copy()
    position[..., 0, places(data, arrays, 0)[-1] + 1 :] += 1
    return arrays | {"position_ids": position}


def doubled_begin(data: Data, arrays: Arrays) -> Arrays:
    arrays = {name: values.copy() for name, values in arrays.items()}
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        values = arrays[name]
        end = values[..., -1:].copy()
        end[..., 0, :] = values[..., 0, -1:]
        longer = np.concatenate([values, end], axis=-1)
        longer[..., 0, 1:] = values[..., 0, :] + (name == "position_ids")
        arrays[name] = longer
    return arrays


def swapped(data: Data, arrays: Arrays) -> Arrays:
    """The batch with its first two images in each other's place."""
    return reordered(arrays, lambda count: [1, 0, *range(2, count)])


def without_an_image(data: Data, arrays: Arrays) -> Arrays:
    return reordered(arrays, lambda count: [0, *range(2, count)])


def image_twice(data: Data, arrays: Arrays) -> Arrays:
    return reordered(arrays, lambda count: [0, 0, *range(1, count)])


def reordered(arrays: Arrays, order: Callable[[int], list[int]]) -> Arrays:
    values = arrays["pixel_values"]
    if "image_grid_thw" not in arrays:
        return arrays | {"pixel_values": values[order(len(values))]}
    grids = arrays["image_grid_thw"]
    parts = np.split(values, np.cumsum(grids.prod(axis=1))[:-1])
    chosen = order(len(parts))
    return arrays | {
        "pixel_values": np.concatenate([parts[k] for k in chosen]),
        "image_grid_thw": grids[chosen],
    }


def another_image(data: Data, arrays: Arrays) -> Arrays:
    values = arrays["pixel_values"].copy()
    first = np.s_[0, 0] if values.ndim == 5 and values.shape[0] == len(arrays["input_ids"]) else 0
    values[first] = 1 - values[first]
    return arrays | {"pixel_values": values}


def fewer_placeholders(data: Data, arrays: Arrays) -> Arrays:
    return without(arrays, 0, places(data, arrays, 0)[-1:])


def padding_labels(data: Data, arrays: Arrays) -> Arrays:
    padding = arrays["attention_mask"] == 0
    return arrays | {"labels": np.where(padding, arrays["input_ids"], arrays["labels"])}


def shifted_labels(data: Data, arrays: Arrays) -> Arrays:
    labels = np.roll(arrays["labels"], -1, axis=1)
    labels[:, -1] = IGNORED
    return arrays | {"labels": labels}


def question_labels(data: Data, arrays: Arrays) -> Arrays:
    text = (arrays["attention_mask"] > 0) & ~np.isin(arrays["input_ids"], data.made.placeholders)
    return arrays | {"labels": np.where(text, arrays["input_ids"], IGNORED)}


def no_labels(data: Data, arrays: Arrays) -> Arrays:
    return arrays | {"labels": np.full_like(arrays["labels"], IGNORED)}


def another_text(data: Data, arrays: Arrays) -> Arrays:
    content = [{"type": "text", "text": "Où est la gare? 今天天气很好。"}]
    talk = [{"role": role, "content": content} for role in ("user", "assistant")]
    return padded(replace(data.made, talks=[talk]), [0], "right")


def cut_off(data: Data, arrays: Arrays) -> Arrays:
    end = int(arrays["attention_mask"][0].sum())
    return without(arrays, 0, np.arange(end - 3, end))


# fault: the batch that it is planted in, and how
FAULTS: list[tuple[str, str, Callable[[Data, Arrays], Arrays]]] = [
    ("positions not reset", "packed", not_reset),
    ("attends another sample", "packed", without_borders),
    ("attends another sample", "packed", causal_over_the_row),
    ("attends another sample", "packed", one_number_for_two),
    ("label on a placeholder", "right", placeholder_labels),
    ("label on a placeholder", "packed", placeholder_labels),
    ("only the last turn trained", "right", last_turn_alone),
    ("mRoPE positions", "right", text_behind_an_image),
    ("doubled begin token", "right", doubled_begin),
    ("images in another order", "right", swapped),
    ("images in another order", "packed", swapped),
    ("images in another order", "left", swapped),
    ("other image", "left", another_image),
    ("truncated image tokens", "right", fewer_placeholders),
    ("padding trained", "left", padding_labels),
    ("padding trained", "right", padding_labels),
    ("missing image", "right", without_an_image),
    ("missing image", "packed", without_an_image),
    ("doubled image", "right", image_twice),
    ("doubled image", "packed", image_twice),
    ("label is no answer", "right", question_labels),
    ("answer without label", "right", no_labels),
    ("labels shifted by one", "right", shifted_labels),
    ("unknown sample", "right", another_text),
    ("truncated sample", "right", cut_off),
]
CASES = {plant.__name__ + f"-{kind}": (fault, kind, plant) for fault, kind, plant in FAULTS}


@pytest.fixture(scope="module")
def data_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Data]:
    made: dict[str, Data] = {}

    def of(family: str) -> Data:
        if family not in made:
            made[family] = Data(family, 7, tmp_path_factory.mktemp(family))
        return made[family]

    return of


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_planted_fault_is_named_and_nothing_else(case: str, family: str, data_of) -> None:
    fault, kind, plant = CASES[case]
    data = data_of(family)
    arrays = data.batch(kind)
    if fault == "mRoPE positions" and arrays["position_ids"].ndim == 2:
        fault = "other positions"
    findings = data.findings(plant(data, arrays))
    assert {finding.fault for finding in findings} == {fault}, findings


@pytest.mark.default_cases("qwen2_5_vl")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_wrong_positions_of_and_behind_images_are_named_with_both_places(family, data_of) -> None:
    data = data_of(family)
    arrays = data.batch("right")
    (found,) = data.findings(text_behind_an_image(data, arrays))
    at = int(places(data, arrays, 0)[-1]) + 1
    right = int(arrays["position_ids"][0, 0, at])
    assert (found.fault, found.token) == ("mRoPE positions", at)
    assert found.message == f"it stands at {right + 1}, and should at {right}"
    # positions that are those of text alone
    counted = np.broadcast_to(np.arange(arrays["input_ids"].shape[1]), arrays["input_ids"].shape)
    findings = data.findings(arrays | {"position_ids": counted})
    assert {finding.fault for finding in findings} == {"mRoPE positions"}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_all_turns_trained_where_the_last_alone_should_be_are_named(family, tmp_path) -> None:
    data = Data(family, 0, tmp_path, "data.chat.train_on=last_assistant")
    arrays = data.batch("right")
    assert {finding.fault for finding in data.findings(arrays)} == {"all turns trained"}
    assert data.findings(last_turn_alone(data, arrays)) == []


# --------------------------------------------------------------------------------------------------
# videos


class Videos:
    """Conversations with videos, and what transformers makes of each."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        rng = np.random.default_rng(seed)
        model = folder_of(kind, rng, folder)
        talks = conversations(rng, folder)
        if kind == "glm4v":  # there it takes no image beside a video
            talks[1][0]["content"].pop(2)
        lines = [json.dumps({"messages": talk}) for talk in talks]
        (folder / "talks.jsonl").write_text("\n".join(lines) + "\n")
        made = Made(folder, None, model.config, CHATML_TURN)
        config = load(*config_of_words(words_of(made)))
        sources = open_sources(config, "train", folder)
        self.known = References(config, sources)
        there = There(kind, folder, sources["chat"], model)
        made.processor = there
        self.made = made
        self.alone = []
        for index, talk in enumerate(talks):
            arrays = {name: values.numpy() for name, values in there.inputs(index, talk).items()}
            arrays["labels"] = labels_of(made, arrays["input_ids"])
            arrays["position_ids"] = rope_of(made, arrays)
            self.alone.append(arrays)

    def findings(self, arrays: Arrays) -> list[Finding]:
        return findings_of(self.known, arrays)


@pytest.mark.default_cases("qwen2_5_vl-0")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_batches_with_videos_raise_no_alarm_and_wrong_stamps_are_named(kind, seed, tmp_path):
    videos = Videos(kind, seed, tmp_path)
    for order in ((0, 1, 2, 3), (3, 2, 1)):
        assert videos.findings(flattened([videos.alone[k] for k in order])) == []
    for wrong in wrong_stamps(kind, videos):
        found = videos.findings(flattened([wrong, *videos.alone[2:]]))
        assert [finding.fault for finding in found] == ["video stamps"]


def wrong_stamps(kind: str, videos: Videos) -> list[Arrays]:
    """The first sample with other seconds: as told, in positions, or in its text."""
    first = videos.alone[0]
    if kind == "qwen2_5_vl":
        told = first | {"second_per_grid_ts": first["second_per_grid_ts"] * 3}
        return [told, first | {"position_ids": rope_of(videos.made, told)}]
    ids = first["input_ids"].copy()
    digits = [videos.made.tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
    (at,) = np.flatnonzero(np.isin(ids[0], digits))[-1:]
    ids[0, at] = digits[(digits.index(ids[0, at]) + 1) % 10]
    return [first | {"input_ids": ids}]


# --------------------------------------------------------------------------------------------------
# what differs and is no fault


def test_a_line_break_that_is_trained_on_or_left_out_behind_the_last_answer_is_no_fault(data_of):
    data = data_of("qwen2_5_vl")
    arrays = data.batch("right")
    ends = arrays["attention_mask"].sum(axis=1)
    rows = np.arange(len(ends))
    labels = arrays["labels"].copy()
    labels[rows, ends - 1] = arrays["input_ids"][rows, ends - 1]
    assert data.made.tokenizer.decode(labels[0, ends[0] - 1]) == "\n"
    assert data.findings(arrays | {"labels": labels}) == []
    mask = arrays["attention_mask"].copy()
    mask[rows, ends - 1] = 0
    assert data.findings(arrays | {"attention_mask": mask}) == []


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_padding_is_told_by_its_tokens_where_there_is_no_mask(family, kind, data_of):
    arrays = data_of(family).batch(kind)
    del arrays["attention_mask"]
    assert data_of(family).findings(arrays) == []


def test_what_cannot_be_compared_is_said(data_of) -> None:
    data = data_of("llava")
    alone = {"input_ids": data.batch("right")["input_ids"]}
    _, findings, unchecked = verify_batch(DumpedBatch("a.npz", alone), data.known)
    assert findings == []
    assert [line.partition(":")[0] for line in unchecked] == [
        "labels is absent",
        "position_ids is absent",
        "pixel_values is absent",
    ]
    other = alone | {"pixel_values": np.ones((4, 3, 10, 10), np.float32)}
    (line,) = verify_batch(DumpedBatch("a.npz", other), data.known)[2][2:]
    assert line.startswith(
        "pixel_values has the shape [4, 3, 10, 10] and no image_grid_thw, unlike the samples'"
    )


# --------------------------------------------------------------------------------------------------
# the command


def test_the_command_names_what_is_wrong_and_refuses_what_is_no_batch(data_of, tmp_path, capsys):
    data = data_of("llava")
    words = words_of(data.made)
    folder = tmp_path / "batches"
    folder.mkdir()
    arrays = data.batch("packed")
    save_file(
        {name: np.ascontiguousarray(values) for name, values in arrays.items()},
        folder / "0.safetensors",
    )
    np.savez(folder / "1.npz", **data.batch("left"))
    ended = run(capsys, verify.main, *words, "--batches", folder)
    assert (ended.code, ended.out) == (0, "samples: 10, faults: 0\n")

    np.savez(folder / "2.npz", **placeholder_labels(data, data.batch("right")))
    ended = run(capsys, verify.main, *words, "--batches", folder)
    line, total = ended.out.splitlines()
    name = f"chat[6] ({data.made.folder / 'talks.jsonl'}:7)"
    assert line.startswith(f"2.npz: label on a placeholder: {name}, token ")
    assert line.endswith(" '<image>': it should be -100")
    assert (ended.code, total) == (1, "samples: 14, faults: 1")
    ended = run(capsys, verify.main, *words, "--batches", folder, "--json")
    (found,) = json.loads(ended.out)
    assert (found["batch"], found["fault"], found["sample"]) == (
        "2.npz",
        "label on a placeholder",
        name,
    )

    ended = run(capsys, verify.main, "tiny_omni", "--batches", folder)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "batches are compared with conversations" in ended.err


GOOD = {"input_ids": np.ones((2, 5), int)}
BAD: dict[str, tuple[Arrays, str]] = {
    "no ids": ({"labels": np.ones((2, 5), int)}, "it has no input_ids, but labels"),
    "flat": ({"input_ids": np.ones(5, int)}, "input_ids has the shape [5], not [rows, tokens]"),
    "floats": ({"input_ids": np.ones((2, 5))}, "input_ids is of float64, not of integers"),
    "labels": (GOOD | {"labels": np.ones((2, 4), int)}, "labels has the shape [2, 4], not [2, 5]"),
    "axes": (GOOD | {"position_ids": np.ones((2, 2, 5), int)}, "position_ids has the shape [2, 2, 5], not"),
    "mask": (GOOD | {"attention_mask": np.ones((2, 5, 5), bool)}, "attention_mask has the shape [2, 5, 5], not"),
    "rows": (GOOD | {"cu_seq_lens_q": np.array([0, 5])}, "up to the 5 tokens of one row"),
    "grid": (GOOD | {"image_grid_thw": np.array([[1, 2]])}, "image_grid_thw has the shape [1, 2], not [1, 3]"),
    "negative grid": (GOOD | {"image_grid_thw": np.array([[1, -2, -2]])}, "image_grid_thw holds -2"),
    "text": (GOOD | {"pixel_values": np.array(["a"])}, "pixel_values is of <U1, which are no numbers"),
    "no token": ({"input_ids": np.array([[-200, 1]])}, "input_ids holds -200"),
    "objects": ({"input_ids": np.array([[1, None]])}, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_batch_is_refused_with_its_name(case, data_of, tmp_path, capsys) -> None:
    arrays, message = BAD[case]
    np.savez(tmp_path / "a.npz", **arrays)
    refused(data_of, capsys, tmp_path / "a.npz", message)


def refused(data_of, capsys, path: Path, message: str) -> None:
    ended = run(capsys, verify.main, *words_of(data_of("llava").made), "--batches", path)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert message in ended.err
    assert path.name in ended.err


def test_torn_and_foreign_files_are_refused_and_nothing_in_them_is_executed(
    data_of, tmp_path, capsys
):
    good = tmp_path / "good.npz"
    np.savez(good, **GOOD)
    spoiled = {
        "torn.npz": good.read_bytes()[:-40],
        "pickle.npz": pickle.dumps({"input_ids": 1}),
        "array.npz": b"\x93NUMPY",
        "torn.safetensors": b"\xff\x00\x00\x00\x00\x00\x00\x00{}",
        "empty.safetensors": b"",
    }
    for name, content in spoiled.items():
        (tmp_path / name).write_bytes(content)
        refused(data_of, capsys, tmp_path / name, "cannot be read")
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "a.npy").rename(tmp_path / "renamed.npz")
    refused(data_of, capsys, tmp_path / "renamed.npz", "cannot be read")
    refused(data_of, capsys, tmp_path / "absent.npz", "cannot be read")
    refused(data_of, capsys, tmp_path / "batch.pt", "it is, or holds, no .npz or .safetensors file")
    (tmp_path / "folder").mkdir()
    refused(data_of, capsys, tmp_path / "folder", "it is, or holds, no .npz or .safetensors file")


@pytest.mark.exhaustive
def test_batches_that_the_documented_callback_writes_of_a_trainer_are_right(
    tmp_path, monkeypatch, capsys
):
    """The command and the file of docs/batches.md."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_examples("docs/batches.md", tmp_path)
    dump = importlib.import_module("dump_batches")
    save_checkpoint(tmp_path / "llava-1.5-7b-hf")
    save_questions(tmp_path, 24).rename("llava.json")
    processor = transformers.AutoProcessor.from_pretrained("llava-1.5-7b-hf")
    model = transformers.LlavaForConditionalGeneration.from_pretrained("llava-1.5-7b-hf")

    def collate(records):
        texts, images = [], []
        for record in records:
            question, answer = (turn["value"] for turn in record["conversations"])
            content = [
                {"type": "image"},
                {"type": "text", "text": question.removeprefix("<image>\n")},
            ]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            texts.append(processor.apply_chat_template(turns))
            images.append(Image.open(Path("images") / record["image"]).convert("RGB"))
        batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
        begin, end = (
            processor.tokenizer(t, add_special_tokens=False)["input_ids"]
            for t in ("ASSISTANT:", "</s>")
        )
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, ids in zip(labels, batch["input_ids"].tolist(), strict=True):
            first = next(k for k in range(len(ids)) if ids[k : k + len(begin)] == begin) + len(
                begin
            )
            last = ids.index(end[0]) + 1
            row[first:last] = torch.tensor(ids[first:last])
        return batch | {"labels": labels}

    arguments = transformers.TrainingArguments(
        "out",
        max_steps=3,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
    )
    records = json.loads(Path("llava.json").read_text())
    callbacks = [dump.DumpBatches()]
    transformers.Trainer(
        model, arguments, collate, train_dataset=records, callbacks=callbacks
    ).train()
    dump.dumped(collate)(records[:5])
    words = ["llava_style", "checkpoint=llava-1.5-7b-hf", "data=llava.json", "images=images"]
    ended = run(capsys, verify.main, *words, "data.cache=cache", "--batches", "batches")
    assert (ended.code, ended.out) == (0, "samples: 17, faults: 0\n")
    assert {line.partition(": ")[2] for line in ended.err.splitlines()} == {
        "position_ids is absent: positions, which the model counts itself, are not compared"
    }
