"""Parquet as Hugging Face's data sets have it, with media as structs, bytes and lists of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from files_made import clip, picture, served, write

from mmjax.config import ParquetSource
from mmjax.data.sample import BadSample, MediaPlace
from mmjax.data.sources import parquet_files as parquet_source
from mmjax.data.sources.chat_records import MAX_CHARACTERS
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.parquet_pages import measure_chunk
from mmjax.errors import UserError

IMAGE, AUDIO = MediaPlace("image"), MediaPlace("audio")


def opened(source, tmp_path: Path, space: float = 1.0):
    return open_conversations(source, "train", tmp_path / "cache", "data.sources.mine", space)


def parquet(path: Path, columns: dict, rows_a_group: int = 3) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_a_group)
    return str(path)


def struct(content: bytes | None, path: str | None = None) -> dict:
    return {"bytes": content, "path": path}


def said(content) -> list[dict]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]


def test_questions_with_one_image_each_over_many_files_and_row_groups(tmp_path: Path) -> None:
    for k in range(3):
        columns = {
            "id": list(range(5)),
            "question": [f"{k}.{i}?" for i in range(5)],
            "answers": [[f"a{i}", "other"] for i in range(5)],
            "image": [struct(picture(colour=10 * k + i), f"{i}.png") for i in range(5)],
        }
        parquet(tmp_path / f"part-{k}.parquet", columns, 2)
    source = ParquetSource(
        str(tmp_path / "part-*.parquet"), question="question", answer="answers", images="image"
    )
    got = opened(source, tmp_path)
    assert len(got) == 15
    for index in (14, 0, 7, 6, 9, 1):
        k, i = divmod(index, 5)
        user, assistant = got.conversation(index).messages
        assert user.parts == (IMAGE, f"{k}.{i}?")
        assert assistant.parts == (f"a{i}",)
        assert got.media(index)[0].read() == picture(colour=10 * k + i)
    assert got.unread == {}
    assert opened(replace(source, images=""), tmp_path).unread == {"images": "image"}


def test_messages_with_lists_of_images_and_clips(tmp_path: Path) -> None:
    columns = {
        "messages": [said("<image>and<image>"), said("<audio>?"), said("text"), said("<image>")],
        "images": [
            [struct(picture(colour=1)), struct(picture(colour=2))],
            [],
            None,
            [struct(picture())] * 2,
        ],
        "sounds": [None, struct(clip()), None, None],
    }
    path = parquet(tmp_path / "d.parquet", columns)
    got = opened(
        ParquetSource(path, messages="messages", images="images", audio="sounds"), tmp_path
    )
    assert got.conversation(0).messages[0].parts == (IMAGE, "and", IMAGE)
    assert [got.media(0)[k].read() for k in (0, 1)] == [picture(colour=1), picture(colour=2)]
    assert got.conversation(1).messages[0].parts == (AUDIO, "?")
    assert got.media(1)[0].read() == clip()
    assert got.media(2) == ()
    with pytest.raises(BadSample, match="has 1 places <image> for 2"):
        got.conversation(3)


def test_typed_parts_take_the_column_s_images_in_order(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "Compare"},
        {"type": "image", "text": None},
        {"type": "image", "text": None},
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "fine"}]}
    columns = {
        "messages": [[{"role": "user", "content": parts}, answer]],
        "images": [[picture(colour=1), picture(colour=2)]],
    }
    got = opened(
        ParquetSource(
            parquet(tmp_path / "d.parquet", columns), messages="messages", images="images"
        ),
        tmp_path,
    )
    assert got.conversation(0).messages[0].parts == ("Compare", IMAGE, IMAGE)
    assert [got.media(0)[k].read() for k in (0, 1)] == [picture(colour=1), picture(colour=2)]


def test_the_bytes_of_media_are_not_read_for_the_texts(tmp_path: Path) -> None:
    columns = {"q": ["?"] * 6, "a": ["!"] * 6, "image": [struct(picture(), "a.png")] * 6}
    path = parquet(tmp_path / "d.parquet", columns)
    got = opened(ParquetSource(path, question="q", answer="a", images="image"), tmp_path)
    for index in range(6):
        got.conversation(index)
    assert {leaf for _, _, leaf, _ in got._files[0]._cache._arrays} == {"q", "a", "image.path"}


def test_only_a_few_row_groups_of_all_files_stay_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(parquet_source, "MAX_CACHED", 1)
    for k in range(6):
        parquet(
            tmp_path / f"{k}.parquet",
            {"q": ["?"] * 9, "a": ["!"] * 9, "image": [struct(picture())] * 9},
        )
    got = opened(
        ParquetSource(str(tmp_path / "*.parquet"), question="q", answer="a", images="image"),
        tmp_path,
    )
    for index in range(len(got)):
        assert got.media(index)[0].read() == picture()
    assert len(got._files[0]._cache._arrays) == 1


def test_a_path_without_bytes_is_read_beside_the_file_and_nowhere_else(tmp_path: Path) -> None:
    write(tmp_path / "set", {"a.png": picture()})
    write(tmp_path, {"secret.png": b"secret"})
    rows = [struct(None, "a.png"), struct(None, "../secret.png"), struct(None, None), None]
    columns = {"q": ["?"] * 4, "a": ["!"] * 4, "image": rows}
    path = parquet(tmp_path / "set" / "d.parquet", columns)
    got = opened(ParquetSource(path, question="q", answer="a", images="image"), tmp_path)
    assert got.media(0)[0].read() == picture()
    with pytest.raises(BadSample, match="points outside"):
        got.media(1)[0].read()
    with pytest.raises(BadSample, match="neither bytes nor a path"):
        got.media(2)[0].read()
    assert got.conversation(3).messages[0].parts == ("?",)


def test_a_column_or_file_that_is_not_there_names_its_key(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", {"question": ["?"], "answer": ["!"]})
    write(tmp_path, {"broken.parquet": b"PAR1 no PAR1"})
    for source, told in (
        (
            ParquetSource(path, question="questoin", answer="answer"),
            "data.sources.mine.question=questoin",
        ),
        (
            ParquetSource(path, question="question", answer="answer", images="image"),
            "data.sources.mine.images=image",
        ),
        (
            ParquetSource(str(tmp_path / "broken.parquet"), messages="m"),
            "cannot be read as Parquet",
        ),
    ):
        with pytest.raises(UserError) as error:
            opened(source, tmp_path)
        assert told in str(error.value)
    with pytest.raises(UserError, match="did you mean 'question'"):
        opened(ParquetSource(path, question="questoin", answer="answer"), tmp_path)


def test_what_arrow_says_in_several_lines_is_said_in_one(tmp_path: Path) -> None:
    path = Path(
        parquet(tmp_path / "d.parquet", {"question": ["What?"] * 30, "answer": ["yes"] * 30}, 30)
    )
    whole, told = path.read_bytes(), set()
    for at in range(4, len(whole) - 8, 7):
        path.write_bytes(whole[:at] + whole[at + 3 :])
        try:
            opened(
                ParquetSource(str(path), question="question", answer="answer"), tmp_path
            ).conversation(0)
        except (UserError, BadSample) as error:
            told.add(str(error))
    assert told
    assert not [line for line in told if "\n" in line]


def test_parquet_behind_http_is_read_by_ranges(tmp_path: Path) -> None:
    noise = bytes(range(256)) * 400
    columns = {
        "q": [f"{i}?" for i in range(30)],
        "a": ["!"] * 30,
        "image": [struct(noise + bytes([i])) for i in range(30)],
    }
    parquet(tmp_path / "site" / "d.parquet", columns, 3)
    with served(tmp_path / "site") as server:
        source = ParquetSource(f"{server.url}/d.parquet", question="q", answer="a", images="image")
        got = opened(source, tmp_path)
        assert got.conversation(20).messages[0].parts == (IMAGE, "20?")
        assert got.media(20)[0].read()[-1] == 20


def test_a_file_that_changes_in_mid_run_ends_the_run(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", {"q": [f"{i}?" for i in range(6)], "a": ["yes"] * 6})
    got = opened(ParquetSource(path, question="q", answer="a"), tmp_path)
    assert got.conversation(0).messages[0].parts == ("0?",)
    assert got.place(4) == f"{path}[4]"
    parquet(tmp_path / "d.parquet", {"q": [f"{i}!" for i in range(6)], "a": ["yes"] * 6})
    with pytest.raises(
        UserError, match=r"d\.parquet has changed since it was opened; .*--new-data"
    ):
        got.conversation(4)


def test_with_a_window_a_row_group_is_fetched_once_and_its_copy_makes_room_for_others(
    tmp_path: Path,
) -> None:
    for k in range(2):
        columns = {
            "question": [f"{k}.{i}?" for i in range(6)],
            "answer": ["yes"] * 6,
            "image": [struct(picture(colour=10 * k + i), None) for i in range(6)],
        }
        parquet(tmp_path / "served" / f"{k}.parquet", columns)
    copies = tmp_path / "cache" / "window"
    with served(tmp_path / "served") as server:
        paths = [f"{server.url}/{k}.parquet" for k in range(2)]
        source = ParquetSource(
            paths[0], question="question", answer="answer", images="image", window=3
        )
        got = [opened(replace(source, path=path), tmp_path, space=6e-6) for path in paths]
        for k, i in [(0, 0), (0, 2), (0, 1), (0, 3), (1, 5), (1, 3), (1, 0), (0, 0)]:
            assert got[k].conversation(i).messages[0].parts == (IMAGE, f"{k}.{i}?")
            assert got[k].media(i)[0].read() == picture(colour=10 * k + i)
            assert sum(file.stat().st_size for file in copies.iterdir()) <= 6_000
        server.asked.clear()
        assert got[0].media(1)[0].read() == picture(colour=1)
        assert not server.asked["GET"]
        path = tmp_path / "served" / "0.parquet"
        os.utime(path, ns=(1, 1))
        with pytest.raises(
            UserError, match=r"0\.parquet has changed since it was opened; .*--new-data"
        ):
            got[0].media(4)[0].read()
    with pytest.raises(
        UserError, match=r"mine\.window=3: two windows take .* data\.window_space=1e-07"
    ):
        opened(replace(source, path=str(path)), tmp_path, space=1e-7)


def test_captions_alone_answer_one_prompt_and_unread_columns_are_named(tmp_path: Path) -> None:
    columns = {
        "image": [struct(picture(colour=k), f"{k}.png") for k in range(2)],
        "caption": ["one", "two"],
        "url": ["x", "y"],
        "id": [1, 2],
        "functions": [None, "[{}]"],
    }
    path = parquet(tmp_path / "d.parquet", columns)
    got = opened(
        ParquetSource(path, answer="caption", prompt="Describe it.", images="image"), tmp_path
    )
    assert [m.parts for m in got.conversation(0).messages] == [(IMAGE, "Describe it."), ("one",)]
    assert got.media(0)[0].read() == picture(colour=0)
    assert got.conversation(0).unread == ("url",)
    with pytest.raises(BadSample, match="has functions, which is not read here"):
        got.conversation(1)


def test_what_a_file_of_a_column_has_beside_bytes_and_path_is_refused_or_counted(
    tmp_path: Path,
) -> None:
    files = [struct(picture(), None) | {"fps": fps, "mood": "x"} for fps in (None, 2.0)]
    columns = {
        "image": files,
        "images": [[file] for file in files],
        "question": ["Why?"] * 2,
        "answer": ["so"] * 2,
    }
    path = parquet(tmp_path / "d.parquet", columns)
    for column in ("image", "images"):
        got = opened(
            ParquetSource(path, question="question", answer="answer", images=column), tmp_path
        )
        other = "image" if column == "images" else "images"
        assert got.conversation(0).unread == ("file.mood", other)
        with pytest.raises(BadSample, match="a file of it has fps, which is not read here"):
            got.conversation(1)


def repeated(text: str, count: int) -> pyarrow.DictionaryArray:
    """A column of one value, which Parquet stores once."""
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * count, "int32"), pyarrow.array([text])
    )


def test_a_dictionary_that_grows_a_million_fold_is_unpacked_in_stretches_and_a_list_of_it_refused(
    tmp_path,
) -> None:
    """100 GB of a file of 1 KB."""
    column = repeated("x" * 1_000_000, 100_000)
    path = parquet(tmp_path / "d.parquet", {"q": column, "a": column}, 100_000)
    got = opened(ParquetSource(path, question="q", answer="a"), tmp_path)
    for row in (0, 300, 99_999):
        assert len(got.conversation(row).messages[0].parts[0]) == 1_000_000
    arrays = got._files[0]._cache._arrays.values()
    assert max(array.nbytes for array in arrays) <= parquet_source.MAX_UNPACKED + 1_000_000
    listed = pyarrow.ListArray.from_arrays(pyarrow.array([0, 100_000], "int32"), column)
    path = parquet(tmp_path / "e.parquet", {"q": ["?"], "a": ["!"], "i": listed})
    got = opened(ParquetSource(path, question="q", answer="a", images="i"), tmp_path)
    with pytest.raises(
        BadSample, match=r"row group 0 of .*e\.parquet has 100,000,000,000 bytes of i, more than"
    ):
        got.media(0)[0].read()


def test_a_row_group_of_more_values_than_fit_is_refused_by_its_page_headers_whatever_the_footer_says(
    tmp_path,
) -> None:
    nulls = pyarrow.nulls(parquet_source.MAX_GROUP_VALUES + 1, "string")
    path = parquet(tmp_path / "d.parquet", {"q": nulls, "a": nulls}, 1 << 30)
    with pytest.raises(
        BadSample, match=r"d\.parquet has 16,777,217 values of q, more than 16,777,216"
    ):
        opened(ParquetSource(path, question="q", answer="a"), tmp_path).conversation(0)


def test_pages_are_measured_by_their_own_headers(tmp_path) -> None:
    for version in ("1.0", "2.0"):
        table = pyarrow.table(
            {"q": [f"text {k}" for k in range(50_000)], "a": repeated("y" * 5000, 50_000)}
        )
        pyarrow.parquet.write_table(
            table, tmp_path / "d.parquet", data_page_version=version, compression="zstd"
        )
        group = pyarrow.parquet.ParquetFile(tmp_path / "d.parquet").metadata.row_group(0)
        for number, dictionary in enumerate([0, 5004]):
            chunk = group.column(number)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            with (tmp_path / "d.parquet").open("rb") as file:
                measured = measure_chunk(file, start, chunk.total_compressed_size)
            assert measured.values == 50_000
            # The footer counts pages' headers too.
            assert 0 <= chunk.total_uncompressed_size - measured.size < 1000
            assert not dictionary or measured.dictionary == dictionary


def test_a_text_that_no_model_reads_is_refused_by_row_before_it_is_copied(tmp_path: Path) -> None:
    size = 4 * MAX_CHARACTERS
    path = parquet(tmp_path / "d.parquet", {"q": ["?", "q" * (size + 1)], "a": ["!"] * 2})
    for window in (0, 2):
        got = opened(ParquetSource(path, question="q", answer="a", window=window), tmp_path)
        assert got.conversation(0).messages[0].parts == ("?",)
        with pytest.raises(
            BadSample, match=rf"d\.parquet::q\[1\] has [\d,]+ bytes, more than the {size:,}"
        ):
            got.conversation(1)
