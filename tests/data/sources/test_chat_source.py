"""Conversations in files become samples: what the index promises is what is read, and what is bad is named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from files_made import clip, lines, write
from llava_folder import save_checkpoint, save_questions
from PIL import Image

from mmjax.config import (
    AsIs,
    AudioConfig,
    BatchConfig,
    ChatFormat,
    Config,
    ConnectorConfig,
    DataConfig,
    LlavaSource,
    ManifestSource,
    PanAndScan,
    ParquetSource,
    Placeholder,
    Samples,
    StoredTable,
    TrainingConfig,
    WebDatasetSource,
    WhisperMel,
)
from mmjax.config.data import FileSource
from mmjax.config.loading import apply_overrides, from_json, to_json
from mmjax.data.loading.feature_lookup import FeatureLookup
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import StepLoader, reader_of
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.media.decode_clips import decode_clip
from mmjax.data.plan.attended_pairs import MaskRules, runs_of
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import build_index, cached_index
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import BadSample, Item, Text, with_place
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.sources.opening import check_records, look_again, open_sources, records_of
from mmjax.data.storage.feature_store import FeatureLayout, FeatureReader, write_shard
from mmjax.errors import BadMedia, UserError
from mmjax.hf.families import from_hf

COUNT = 24
SHARD = 20_480  # bytes
SPACE = 7 * SHARD


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def config_of(checkpoint, folder, **data) -> Config:
    model = from_hf(checkpoint)
    source = LlavaSource(str(folder / "data.json"), images=str(folder / "images"))
    return Config(
        "chat",
        DataConfig(
            {"chat": source}, chat=ChatFormat(str(checkpoint)), cache=str(folder / "cache"), **data
        ),
        BatchConfig(Samples(8), {"llm": 2, "vision": 2}),
        model,
        TrainingConfig(100),
    )


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    save_questions(folder, COUNT)
    config = config_of(checkpoint, folder)
    return config, open_sources(config, "train", folder)


def test_the_index_promises_what_is_read(made):
    config, sources = made
    index, source = build_index(sources, config.model.encoders), sources["chat"]
    assert len(index) == COUNT
    assert not len(index.bad)
    for i in range(COUNT):
        segments = source.sample(i).segments
        text = sum(len(s.tokens) for s in segments if isinstance(s, Text))
        assert index.text_tokens[i] == text
        assert [s for s in segments if isinstance(s, Item)] == [Item("vision", 0)]
        assert source.item(i, 0).shape == (16, 16, 3)
        assert index.llm_tokens[i] == text + 16


@pytest.mark.parametrize("items", ["prefix", "isolated"])
def test_an_outline_attends_as_its_sample_and_tokenizes_nothing(items, made):
    config, sources = made
    source = sources["chat"]
    rules = MaskRules(("vision",), (), items)

    def together(runs):
        """Neighbouring runs that attend alike, as one."""
        tokens = [np.repeat([run[1:]], run.tokens, axis=0) for run in runs]
        return np.concatenate(tokens).tolist()

    expected = [together(runs_of(source.sample(i), [16], rules)) for i in range(COUNT)]
    tokenizer = replace(source.chat, tokenizer=None)
    alone = open_sources(config, "train", Path())["chat"]
    alone.chat = tokenizer
    alone._text = source._text
    assert [together(runs_of(alone.outline(i), [16], rules)) for i in range(COUNT)] == expected


def test_the_text_between_an_images_crops_is_counted_and_not_trained_on(checkpoint, tmp_path):
    save_questions(tmp_path, 6)
    config = config_of(checkpoint, tmp_path)
    eyes = replace(
        config.model.encoders["vision"], images=PanAndScan((16, 16), min_crop=12, min_ratio=1.0)
    )
    config = replace(config, model=replace(config.model, encoders={"vision": eyes}))
    source = open_sources(config, "train", tmp_path)["chat"]
    index = build_index({"chat": source}, config.model.encoders)
    counts = set()
    for i in range(6):
        segments = source.sample(i).segments
        texts, items = ([s for s in segments if isinstance(s, kind)] for kind in (Text, Item))
        assert index.text_tokens[i] == sum(len(s.tokens) for s in texts)
        assert [source.item(i, item.number).shape for item in items] == [(16, 16, 3)] * len(items)
        written = source.chat.tokenizer.decode(np.concatenate([s.tokens for s in texts]))
        assert ("here are some crops" in written) == (len(items) > 1)
        assert not any(s.weights.any() for s in texts[:-1])
        counts.add(len(items))
    assert counts == {1, 3}


def test_only_the_answer_and_its_end_train(made):
    config, sources = made
    index, source = build_index(sources, config.model.encoders), sources["chat"]
    planner, _ = make_planner(index, config, [1.0])
    (plan,) = planner.placer.place(Group(np.arange(6), None))
    text = pack_microbatch(plan, BatchLayout.of(config.model), reader_of(sources, index)).text
    for i in range(6):
        mine = (text.owner == i) & (text.weight > 0)
        trained = text.target[mine].tolist()
        assert source.decode(trained) == source.question(i).answer
        assert trained[-1] in source.chat.tokenizer.ends


def test_an_image_whose_output_is_stored_is_read_and_not_decoded(checkpoint, tmp_path):
    """One that was replaced is decoded again."""
    save_questions(tmp_path, 4)
    config = config_of(checkpoint, tmp_path)
    eyes = replace(
        config.model.encoders["vision"], images=PanAndScan((16, 16), min_crop=12, min_ratio=1.0)
    )
    config = replace(config, model=replace(config.model, encoders={"vision": eyes}))
    layout = FeatureLayout(eyes.output_width, np.dtype(np.float32))

    def load():
        """The rows of all samples, what is not stored of them, and how many images were decoded."""
        sources = open_sources(config, "train", tmp_path)
        index = build_index(sources, config.model.encoders)
        planner, _ = make_planner(index, config, [1.0])
        (plan,) = planner.placer.place(Group(np.arange(4), None))
        stored = FeatureLookup(
            config.model.encoders, {"vision": FeatureReader(tmp_path / "stored", layout)}, 0
        )
        batch = pack_microbatch(
            plan, BatchLayout.of(config.model), reader_of(sources, index), stored=stored
        )
        return batch.items["vision"], stored.missing, sources["chat"]._media._decoded.cache_info()

    first, missing, decoded = load()
    images = sorted((tmp_path / "images").iterdir())
    assert decoded.misses == len(images)
    assert len({item.key for item in missing}) == len(missing) > len(images)  # crops
    stride = eyes.output_stride
    outputs = {
        item.key: np.full((len(item.item.values) // stride, layout.width), k + 1, np.float32)
        for k, item in enumerate(missing)
    }
    write_shard(tmp_path / "stored" / "shard", outputs)
    again, missing_again, decoded = load()
    assert (missing_again, decoded.misses) == ([], 0)
    for old, new in zip(first[1:], again[1:], strict=True):
        np.testing.assert_array_equal(old, new)
    for item in missing:
        span = slice(item.start, item.start + len(outputs[item.key]))
        np.testing.assert_array_equal(again.values[item.row, span], outputs[item.key])

    with Image.open(images[0]) as image:
        other = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    other.save(images[0])
    _, missing, decoded = load()
    assert decoded.misses == 1
    assert missing
    assert not {item.key for item in missing} & outputs.keys()


def test_a_question_is_its_sample_up_to_the_answer(made):
    source = made[1]["chat"]
    question, sample = source.question(3), source.sample(3)
    tokens = lambda s: np.concatenate(  # noqa: E731
        [part.tokens for part in s.segments if isinstance(part, Text)]
    )
    asked, whole = tokens(question.prompt), tokens(sample)
    np.testing.assert_array_equal(whole[: len(asked)], asked)
    assert source.answer_tokens(3) == len(whole) - len(asked) > 1


def test_the_config_of_a_checkpoint_is_rebuilt_from_its_json(made):
    assert from_json(to_json(made[0])) == made[0]


def spoiled(folder):
    """Records that cannot be used, by what is said of them."""
    save_questions(folder, COUNT)
    records = json.loads((folder / "data.json").read_text())
    (folder / "images" / "0.jpg").unlink()
    (folder / "images" / "1.png").write_bytes(b"no image")
    records[2]["conversations"][0]["value"] = "What colour?"
    records[3]["conversations"][0]["value"] = "<image><image> What colour?"
    records[4]["conversations"][1]["value"] = ""
    records[5]["image"] = "../data.json"
    (folder / "data.json").write_text(json.dumps(records))
    return {
        0: "no such file|cannot be read|No such",
        1: "bad image",
        2: "",
        3: "",
        4: "empty",
        5: "outside",
    }


def test_bad_samples_are_named_and_never_drawn(checkpoint, tmp_path):
    reasons = spoiled(tmp_path)
    config = config_of(checkpoint, tmp_path, max_bad_share=0.5)
    sources = open_sources(config, "train", tmp_path)
    look_again(sources)
    index = build_index(sources, config.model.encoders)
    assert index.bad.tolist() == list(reasons)
    assert all(str(reason) for reason in index.reason)
    assert "bad image" in index.reason[1]
    assert "empty" in index.reason[4]
    planner, _ = make_planner(index, config, [1.0])
    drawn = np.concatenate([planner.plan(step).samples() for step in range(9)])
    assert set(drawn.tolist()) == set(range(6, COUNT))
    with pytest.raises(BadSample, match="bad image"):
        sources["chat"].facts(1)


def test_a_source_with_nothing_but_bad_samples_is_refused_with_the_first_reason(
    checkpoint, tmp_path
):
    save_questions(tmp_path, 3)
    for image in (tmp_path / "images").iterdir():
        image.write_bytes(b"")
    config = config_of(checkpoint, tmp_path)
    index = build_index(open_sources(config, "train", tmp_path), config.model.encoders)
    with pytest.raises(UserError, match=r"none of its 3 samples can be used; the first: .*image"):
        make_planner(index, config, [1.0])


def test_conversations_without_a_template_are_refused(checkpoint, tmp_path):
    save_questions(tmp_path, 3)
    config = apply_overrides(config_of(checkpoint, tmp_path), ["data.chat=none"])
    with pytest.raises(UserError, match=r"data\.chat does not say how they become tokens"):
        open_sources(config, "train", tmp_path)
    assert apply_overrides(config, [f"data.chat.folder={checkpoint}"]).data.chat == ChatFormat(
        str(checkpoint)
    )


SECONDS = [0.4, 1.0, 2.3, 3.0]


@pytest.fixture(params=["split", "refuse"])
def clips(request, checkpoint, tmp_path):
    """Clips for an encoder whose window is a second."""
    write(tmp_path, {f"{k}.wav": clip(int(8_000 * n)) for k, n in enumerate(SECONDS)})
    lines(
        tmp_path / "clips.jsonl",
        [{"audio_filepath": f"{k}.wav", "text": "said"} for k in range(len(SECONDS))],
    )
    how = WhisperMel(seconds=1, longer=request.param)
    encoder = AudioConfig(1, 16, 2, 16, how, StoredTable(50), connector=ConnectorConfig(merge=1))
    template = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{{ eos_token }}{% else %}"
    template += "{% for p in m['content'] %}{{ '<pad>' if p['type'] == 'audio' else p['text'] }}{% endfor %}"
    template += "{{ eos_token if m['role'] == 'assistant' }}{% endif %}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    form = ChatFormat(
        str(checkpoint),
        str(tmp_path / "template.jinja"),
        placeholders={"audio": Placeholder("<pad>")},
    )
    source = ManifestSource(str(tmp_path / "clips.jsonl"), audio=str(tmp_path))
    base = config_of(checkpoint, tmp_path)
    config = replace(
        base,
        data=DataConfig({"speech": source}, chat=form, cache=str(tmp_path / "cache")),
        model=replace(base.model, encoders={"audio": encoder}),
        batch=replace(base.batch, rows={"llm": 2, "audio": 2}),
    )
    return how.longer, config, open_sources(config, "train", tmp_path)


def test_a_clip_beyond_the_encoders_window_is_several_items_in_turn_or_bad(clips):
    longer, config, sources = clips
    index, source = build_index(sources, config.model.encoders), sources["speech"]
    if longer == "refuse":
        assert index.bad.tolist() == [2, 3]
        assert (
            "a clip of 2.3 s is longer than the encoder's 1 s, and longer clips are refused"
            in index.reason[0]
        )
        return
    assert not len(index.bad)
    assert np.diff(index.item_start).tolist() == [1, 1, 3, 3]
    whole = [source.item(2, k) for k in range(3)]
    assert [len(piece) for piece in whole] == [16_000, 16_000, 4_800]
    np.testing.assert_array_equal(
        np.concatenate(whole), decode_clip(source.conversations.media(2)[0].read(), 16_000)
    )
    assert [s for s in source.sample(2).segments if isinstance(s, Item)] == [
        Item("audio", k) for k in range(3)
    ]
    planner, _ = make_planner(index, config, [1.0])
    (plan,) = planner.placer.place(Group(np.arange(4), None))
    text = pack_microbatch(plan, BatchLayout.of(config.model), reader_of(sources, index)).text
    for i in range(4):
        assert (text.slots["audio"][text.owner == i] >= 0).sum() == index.item_tokens[
            index.item_start[i] : index.item_start[i + 1]
        ].sum()


@pytest.mark.parametrize("clips", ["split"], indirect=True)
@pytest.mark.parametrize(
    ("longer", "shown", "items", "tokens"),
    [
        ("split", "clip", [1, 1, 3, 3], [4, 10, 23, 30]),
        ("split", "all", [1, 1, 3, 3], [10, 10, 30, 30]),
        ("whole", "all", [1, 1, 1, 1], [10, 10, 30, 30]),
    ],
)
def test_windows_of_a_clip_are_items_or_one_and_all_of_their_tokens_are_seen_or_the_clips(
    clips, longer, shown, items, tokens, tmp_path
):
    _, config, _ = clips
    ears = config.model.encoders["audio"]
    how = replace(ears.clips, attended="window", longer=longer, shown=shown)
    chunk = 100 if longer == "whole" else 0
    ears = replace(ears, clips=how, chunk=chunk, connector=ConnectorConfig(merge=5))
    config = replace(config, model=replace(config.model, encoders={"audio": ears}))
    sources = open_sources(config, "train", tmp_path)
    index, source = build_index(sources, config.model.encoders), sources["speech"]
    assert np.diff(index.item_start).tolist() == items
    pieces = [len(source.item(2, k)) for k in range(items[2])]
    assert pieces == ([16_000, 16_000, 4_800] if longer == "split" else [36_800])
    planner, _ = make_planner(index, config, [1.0])
    (plan,) = planner.placer.place(Group(np.arange(4), None))
    text = pack_microbatch(plan, BatchLayout.of(config.model), reader_of(sources, index)).text
    slots = [text.slots["audio"][text.owner == i] for i in range(4)]
    assert [int((slot >= 0).sum()) for slot in slots] == tokens


def edit(path: Path, old: bytes, new: bytes, keep_time: bool = True) -> None:
    """Replace bytes by as many others, wherever they stand, and put the file's time back."""
    assert len(old) == len(new)
    status, whole = path.stat(), path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new))
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def stored_questions(kind: str, folder: Path) -> tuple[FileSource, Path]:
    """Six questions about photos as a source of some kind, and the file that has their texts."""
    records = json.loads(save_questions(folder, 6).read_text())
    if kind == "json":
        return LlavaSource(
            str(folder / "data.json"), images=str(folder / "images")
        ), folder / "data.json"
    if kind == "parquet":
        rows = [
            {
                "messages": [
                    {"role": t["from"], "content": t["value"]} for t in r["conversations"]
                ],
                "images": [r["image"]],
            }
            for r in records
        ]
        path = folder / "images" / "data.parquet"
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
        return ParquetSource(str(path), messages="messages", images="images"), path
    with tarfile.open(folder / "data.tar", "w") as archive:
        for record in records:
            image = folder / "images" / record["image"]
            (folder / "record.json").write_text(
                json.dumps({"conversations": record["conversations"]})
            )
            archive.add(folder / "record.json", f"{record['id']}.json")
            archive.add(image, f"{record['id']}{image.suffix}")
    return WebDatasetSource(str(folder / "data.tar")), folder / "data.tar"


def opened_source(checkpoint: Path, source: FileSource, folder: Path) -> ChatSource:
    """The source as a run opens it: all of it looked at."""
    config = config_of(checkpoint, folder)
    config = replace(config, data=replace(config.data, sources={"chat": source}))
    sources = open_sources(config, "train", folder)
    look_again(sources)
    check_records(sources, records_of(sources))
    return sources["chat"]


@pytest.mark.parametrize("kind", ["json", "parquet", "tar"])
def test_a_text_replaced_by_one_of_the_same_length_and_time_in_mid_run_ends_it_with_its_place(
    kind, checkpoint, tmp_path
):
    source, path = stored_questions(kind, tmp_path)
    chat = opened_source(checkpoint, source, tmp_path)
    facts = [chat.facts(index) for index in range(len(chat))]
    before = [chat.sample(index) for index in range(len(chat))]
    edit(path, b"What colour", b"Whet colour")
    fresh = pickle.loads(pickle.dumps(chat._reopen))()  # as a data worker that has cached nothing
    chat = ChatSource(lambda: fresh, chat.chat, chat._processors.encoders, tmp_path / "cache")
    assert [chat.facts(index) for index in range(len(chat))] == facts
    for index in range(len(chat)):
        with pytest.raises(
            UserError,
            match=f"^{re.escape(chat.place(index))} has changed since it was indexed; rest",
        ):
            chat.sample(index)
    edit(path, b"Whet colour", b"What colour")
    again = opened_source(checkpoint, source, tmp_path)
    assert repr([again.sample(index) for index in range(len(again))]) == repr(before)


@pytest.mark.parametrize("place", ["folder", "zip", "tar"])
def test_a_photo_written_again_with_the_same_size_and_time_in_mid_run_ends_it_with_its_name(
    place, checkpoint, tmp_path
):
    source, _ = stored_questions("json", tmp_path)
    images = tmp_path / "images"
    if place != "folder":
        images = Path(shutil.make_archive(str(tmp_path / "photos"), place, images))
    chat = opened_source(checkpoint, replace(source, images=str(images)), tmp_path)
    photos = [chat.item(index, 0) for index in range(6)]
    edit(images / "1.png" if place == "folder" else images, b"", b"")
    with pytest.raises(
        UserError,
        match=r"1\.png has changed since the run was started; restore it, or train on what",
    ):
        chat.item(1, 0)
    # as the next start does: what the file has now counts, whoever has copied it
    look_again({"chat": chat})
    again = opened_source(checkpoint, replace(source, images=str(images)), tmp_path)
    assert again.fingerprint() == chat.fingerprint()
    assert all(np.array_equal(again.item(index, 0), photos[index]) for index in range(6))


def test_a_photo_that_is_found_damaged_while_training_is_named_by_its_file_and_the_line_of_its_record(
    checkpoint, tmp_path
):
    source, _ = stored_questions("json", tmp_path)
    photo = tmp_path / "images" / "2.jpg"
    photo.write_bytes(photo.read_bytes()[:-20])  # its header is whole
    chat = opened_source(checkpoint, source, tmp_path)
    with pytest.raises(BadMedia) as bad:
        chat.item(2, 0)
    reason = with_place(chat, 2, bad.value)
    assert re.search(r"/data\.json(:\d+|\[2\]): .*/images/2\.jpg: corrupt JPEG: ", reason)


def test_what_conversations_say_has_one_hash_wherever_their_files_lie(checkpoint, tmp_path):
    """By which a resumed run knows its data: copies of other times are the same, and another word is not."""
    hashes = {}
    for name in ("here", "there", "edited"):
        source, path = stored_questions("json", tmp_path / name)
        if name == "edited":
            edit(path, b"What colour", b"Whet colour", keep_time=False)
        os.utime(path, (0, len(hashes)))
        hashes[name] = opened_source(checkpoint, source, tmp_path / name).content()
    assert hashes["here"] == hashes["there"] != hashes["edited"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Twelve shards of six questions each."""
    folder = tmp_path_factory.mktemp("shards")
    records = json.loads(save_questions(folder / "made", 72).read_text())
    for number in range(12):
        with tarfile.open(
            folder / f"d-{number:02}.tar", "w", format=tarfile.USTAR_FORMAT
        ) as archive:
            for record in records[6 * number : 6 * number + 6]:
                image = folder / "made" / "images" / record["image"]
                (folder / "record.json").write_text(
                    json.dumps({"conversations": record["conversations"]})
                )
                archive.add(folder / "record.json", f"{record['id']}.json")
                archive.add(image, f"{record['id']}{image.suffix}")
        assert (folder / f"d-{number:02}.tar").stat().st_size == SHARD
    return folder


def loaders_of(checkpoint, path: str, folder, topology: Topology) -> list[StepLoader]:
    """Loaders of two samples a step, one for each rank, from shards of which three are shuffled together."""
    config = config_of(checkpoint, folder, window_space=SPACE / 1e9)
    data = replace(config.data, sources={"shards": WebDatasetSource(path, window=18)})
    config = replace(config, data=data, batch=BatchConfig(Samples(2), {"llm": 2, "vision": 2}))
    index, index_folder = cached_index(
        open_sources(config, "train", folder), config.model.item_modules, folder
    )
    planner, layout = make_planner(index, config, [1.0], topology)
    budget = planner.grouper.budget
    ranks = range(topology.ranks)
    return [
        StepLoader(config, budget, layout, index_folder, folder, range(rank, rank + 1))
        for rank in ranks
    ]


def test_a_worker_that_starts_when_the_files_have_changed_says_so(checkpoint, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "shards")
    (loader,) = loaders_of(
        checkpoint, f"{tmp_path}/shards/d-{{00..11}}.tar", tmp_path / "run", ONE_RANK
    )
    sent = pickle.dumps(replace(loader, records=records_of(loader.sources)))
    assert list(pickle.loads(sent).sources) == ["shards"]
    shutil.copy(shards / "d-01.tar", tmp_path / "shards" / "d-00.tar")
    with pytest.raises(
        UserError,
        match=r"^data.sources.shards: its files have changed since .* --resume --new-data$",
    ):
        list(pickle.loads(sent).sources)


def test_a_stream_gives_the_batches_of_local_shards_each_sample_once_an_epoch_from_any_step_on_any_number_of_processes(
    checkpoint, shards, tmp_path
):
    path = f"{shards}/d-{{00..11}}.tar"
    command = f"pipe:echo read >> {tmp_path}/reads; cat {path}"
    copies = tmp_path / "stream" / "cache" / "window"
    samples: dict[int, list[int]] = {}
    for topology in (ONE_RANK, Topology(2, 2, 2)):
        local = loaders_of(checkpoint, path, tmp_path / "local", topology)
        streamed = loaders_of(checkpoint, command, tmp_path / "stream", topology)
        reads = len((tmp_path / "reads").read_text().split())
        end = local[0].steps_for_epochs(1)
        for step in [*range(end), 2]:  # and back
            for one, other in zip(local, streamed, strict=True):
                wanted, found = one(step), other(step)
                assert found.content == wanted.content
                assert found.digest == wanted.digest
                assert not found.unreadable
                assert samples.setdefault(step, found.samples.tolist()) == found.samples.tolist()
                assert sum(file.stat().st_size for file in copies.iterdir()) <= SPACE
            if step == end // 2:  # everything anew, without copies
                streamed = loaders_of(checkpoint, command, tmp_path / "stream", topology)
                shutil.rmtree(copies)
        assert sorted(k for step in range(end) for k in samples[step]) == list(range(72))
        # Each shard once, and again what a resume, or a step far back, needs.
        assert len((tmp_path / "reads").read_text().split()) - reads <= 12 + 6 + 2


def test_a_file_that_took_anothers_place_unseen_names_the_headers_that_are_remembered(
    checkpoint, tmp_path
):
    save_questions(tmp_path, 1)
    config = config_of(checkpoint, tmp_path)
    eyes = replace(config.model.encoders["vision"], images=AsIs())
    config = replace(config, model=replace(config.model, encoders={"vision": eyes}))
    path = tmp_path / "images" / "0.jpg"

    def written(height: int, width: int) -> int:
        Image.new("RGB", (width, height), (200, 10, 10)).save(path, "BMP")
        os.utime(path, (1e9, 1e9))
        return path.stat().st_size

    assert written(8, 24) == written(24, 8)
    assert open_sources(config, "train", tmp_path)["chat"].item(0, 0).shape == (24, 8, 3)
    written(8, 24)
    with pytest.raises(BadMedia) as bad:
        open_sources(config, "train", tmp_path)["chat"].item(0, 0)
    remedy = f"remembered in {tmp_path / 'cache' / 'media'}: remove that, and go on with --resume --new-data"
    for told in ("data.json:1: a file of it is decoded to 8x24, and its header said 24x8", remedy):
        assert told in str(bad.value)
