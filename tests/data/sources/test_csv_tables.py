"""CSV and TSV as spreadsheets write them, with media by their paths; what is no table is refused by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from files_made import picture, write

from mmjax.config import CsvSource, ParquetSource
from mmjax.data.sample import BadSample, MediaPlace
from mmjax.data.sources.opening import open_conversations, source_of
from mmjax.errors import UserError

IMAGE = MediaPlace("image")
ROWS = 'image,caption,note\r\na.png,"A cat, on a\nmat.",x\r\n\r\n,No image,\r\nb.png,"He said ""no""",\r\n'


def opened(folder: Path, table: bytes, name: str = "d.csv", **keys: str):
    (folder / name).write_bytes(table)
    source = CsvSource(
        str(folder / name), **{"answer": "caption", "prompt": "Describe.", "images": "image"} | keys
    )
    return open_conversations(source, "train", folder / "cache", "data.sources.mine")


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("d.csv", ROWS.encode()),
        ("d.csv", b"\xef\xbb\xbf" + ROWS.encode()),
        ("d.csv", ROWS.replace(",", ";").replace("A cat;", "A cat,").encode()),
        ("d.tsv", ROWS.replace(",", "\t").replace("A cat\t", "A cat,").encode()),
    ],
    ids=["csv", "byte order mark", "semicolons", "tabs"],
)
def test_a_spreadsheets_rows_are_captions_of_images_known_by_their_lines(
    tmp_path: Path, name, table
) -> None:
    write(tmp_path, {"a.png": picture(colour=1), "b.png": picture(colour=2)})
    got = opened(tmp_path, table, name)
    assert [got.conversation(k).messages[0].parts for k in range(3)] == [
        (IMAGE, "Describe."),
        ("Describe.",),
        (IMAGE, "Describe."),
    ]
    answers = [got.conversation(k).messages[1].parts[0] for k in range(3)]
    assert answers == ["A cat, on a\nmat.", "No image", 'He said "no"']
    assert [got.media(k)[0].read() for k in (0, 2)] == [picture(colour=1), picture(colour=2)]
    assert [got.place(k) for k in range(3)] == [f"{tmp_path}/{name}:{line}" for line in (2, 5, 6)]
    assert got.conversation(0).unread == ("note",)


def test_paths_are_those_of_the_folder_that_is_named_and_lead_nowhere_else(tmp_path: Path) -> None:
    write(tmp_path, {"photos/a.png": picture(), "secret.png": b"secret"})
    table = f"image,caption\na.png,one\n{tmp_path}/photos/a.png,two\n../secret.png,three\n".encode()
    got = opened(tmp_path, table, media=str(tmp_path / "photos"))
    assert [got.media(k)[0].read() for k in (0, 1)] == [picture()] * 2
    with pytest.raises(
        BadSample, match=r"points outside of .*data.sources.mine.outside=allow reads it"
    ):
        got.media(2)
    assert (
        opened(tmp_path, table, media=str(tmp_path / "photos")).fingerprint() == got.fingerprint()
    )


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            b"image,caption\na.png,A cat, on a mat.\n",
            "d.csv:2: has 3 fields, and the first line names 2 columns",
        ),
        (b"image,caption\na.png\n", "d.csv:2: has 1 fields"),
        (b'image,caption\na.png,"A cat.\n', "d.csv:2: is no CSV: unexpected end of data"),
        (b'image,caption\na.png,"A" cat\n', "d.csv:2: is no CSV"),
        (
            b"image,caption\nb.png,fine\na.png,B\xe4r\n",
            "d.csv:3: is not UTF-8; save it as CSV UTF-8",
        ),
        (
            "image,caption\na.png,x\n".encode("utf-16"),
            "is UTF-16, not CSV in UTF-8; save it as CSV UTF-8",
        ),
        (b"PK\x03\x04", "is a spreadsheet or a ZIP, not CSV"),
        (b"caption,caption\nx,y\n", "the column 'caption' has no name of its own"),
        (b"", "is empty"),
        (b"image,text\na.png,x\n", "data.sources.mine.answer=caption: "),
    ],
)
def test_what_is_no_table_is_refused_by_its_line(tmp_path: Path, table: bytes, told: str) -> None:
    with pytest.raises(UserError) as error:
        opened(tmp_path, table)
    assert told in str(error.value)


def test_a_file_of_the_other_kind_names_its_kind(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("image,caption\n")
    source = ParquetSource(str(tmp_path / "d.csv"), answer="caption", prompt="Describe.")
    with pytest.raises(UserError, match=r"is read by the kind csv: data.sources.mine=csv"):
        open_conversations(source, "train", tmp_path / "cache", "data.sources.mine")


@pytest.mark.parametrize(
    "column", ["start", "fps", "max_pixels", "history", "system_prompt", "weight"]
)
def test_a_column_that_other_stacks_obey_makes_its_rows_bad_and_another_is_counted(
    column, tmp_path: Path
) -> None:
    path = tmp_path / "d.csv"
    path.write_text(
        f"image,question,answer,{column},image_2,note\na.png,What?,red,1,b.png,x\na.png,Why?,so,,,\n"
    )
    source = CsvSource(str(path), question="question", answer="answer", images="image")
    got = open_conversations(source, "train", tmp_path / "cache", "data.sources.mine")
    with pytest.raises(BadSample, match=f"has {column}, which is not read here"):
        got.conversation(0)
    assert got.conversation(1).unread == ("image_2", "note")


def test_columns_of_a_table_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("image,question,answer\na.png,What?,a cat\n")
    found = source_of(str(tmp_path / "d.csv"), "--data", tmp_path / "cache", images="photos")
    assert found == CsvSource(
        str(tmp_path / "d.csv"),
        question="question",
        answer="answer",
        images="image",
        media="photos",
    )
