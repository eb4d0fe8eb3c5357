"""Facts from headers: right, read once, quick where files come late, and kept when a run is killed."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from files_made import asked, audio_length, clip, image_size, lines, picture, served, write
from PIL import Image

from mmjax.config import ArrayRecordSource, LlavaSource, ManifestSource, ParquetSource
from mmjax.data.sample import Conversation
from mmjax.data.sources.array_record_writing import write_array_records
from mmjax.data.sources.array_records import FACTS
from mmjax.data.sources.media_sizes import open_facts, read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.storage import files
from mmjax.data.storage.files import Conversations
from mmjax.errors import UserError


class Counted:
    """Probes that count how often they were asked."""

    def __init__(self) -> None:
        self.count = 0
        self.probes = {"image": self._counting(image_size), "audio": self._counting(audio_length)}

    def _counting(self, probe: Callable) -> Callable:
        def counted(file):
            self.count += 1
            return probe(file)

        return counted


def opened(source, tmp_path: Path):
    return open_conversations(source, "train", tmp_path / "cache", "data.sources.mine")


def photos(folder: Path, count: int) -> LlavaSource:
    """Images of sizes (1 + i, 2 + i), one in each record; every fifth has text alone."""
    write(folder, {f"{i}.png": picture(1 + i % 50, 2 + i % 50) for i in range(count)})
    records = [
        asked("text?") if i % 5 == 0 else asked("<image>", image=f"{i}.png") for i in range(count)
    ]
    return LlavaSource(lines(folder / "d.jsonl", records))


def test_sizes_of_images_and_clips_are_those_of_their_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.png": picture(3, 5),
            "b.jpg": picture(70, 40, kind="JPEG"),
            "c.flac": clip(900, 16000, "FLAC"),
        },
    )
    records = [
        asked("<image><audio><image>", image=["b.jpg", "a.png"], audio="c.flac"),
        asked("four", "chars"),
    ]
    got = opened(LlavaSource(lines(tmp_path / "d.jsonl", records)), tmp_path)
    facts = read_facts(got, Counted().probes, tmp_path / "cache")
    assert facts.start.tolist() == [0, 3, 3]
    assert facts.kind.tolist() == [0, 1, 0]
    assert facts.size.tolist() == [[70, 40], [900, 16000], [3, 5]]
    assert facts.characters.tolist() == [3, 9]
    assert facts.of("audio").tolist() == [[900, 16000]]
    assert facts.good().tolist() == [0, 1]


def test_bad_media_and_records_have_their_reason_and_no_media(tmp_path: Path) -> None:
    whole = picture(30, 30)
    bad = {
        "cut.png": whole[:20],
        "text.png": b"hello",
        "empty.png": b"",
        "noise.wav": b"RIFF\0\0\0\0WAVE",
    }
    write(tmp_path, {"a.png": whole, **bad})
    names = ["a.png", "cut.png", "text.png", "gone.png", "empty.png", "../a.png"]
    records = [asked("<image>", image=name) for name in names]
    records += [
        asked("<audio>", audio="noise.wav"),
        asked("<image><image>", image="a.png"),
        asked("fine"),
    ]
    got = opened(LlavaSource(lines(tmp_path / "d.jsonl", records)), tmp_path)
    for _ in range(2):
        facts = read_facts(got, Counted().probes, tmp_path / "cache")
        assert facts.bad.tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert facts.start.tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        told = dict(zip(facts.bad.tolist(), facts.reason.tolist(), strict=True))
        for index, words in (
            (1, "cut.png"),
            (2, "text.png is a bad image file"),
            (3, "gone.png is missing"),
            (5, "points outside"),
        ):
            assert words in told[index]
        assert "is a bad audio file" in told[6]
        assert "2 places" in told[7]


def test_a_file_is_probed_once_until_it_changes(tmp_path: Path) -> None:
    source, cache, counted = photos(tmp_path, 40), tmp_path / "cache", Counted()
    first = read_facts(opened(source, tmp_path), counted.probes, cache)
    assert counted.count == 32
    again = read_facts(opened(source, tmp_path), counted.probes, cache)
    assert counted.count == 32
    assert np.array_equal(first.size, again.size)
    write(tmp_path, {"7.png": picture(99, 88), "8.png": b"broken"})
    changed = read_facts(opened(source, tmp_path), counted.probes, cache)
    assert counted.count == 34
    assert changed.size[changed.start[7]].tolist() == [99, 88]
    assert changed.bad.tolist() == [8]
    read_facts(opened(source, tmp_path), counted.probes, cache)
    assert counted.count == 34, "a bad file is not probed again either"


def test_another_data_set_of_the_same_files_probes_none(tmp_path: Path) -> None:
    photos(tmp_path, 20)
    counted = Counted()
    read_facts(
        opened(LlavaSource(str(tmp_path / "d.jsonl")), tmp_path), counted.probes, tmp_path / "cache"
    )
    path = lines(
        tmp_path / "other.jsonl",
        [asked("<image>!", image="3.png"), asked("<image>", image="4.png")],
    )
    before = counted.count
    facts = read_facts(opened(LlavaSource(path), tmp_path), counted.probes, tmp_path / "cache")
    assert facts.size.tolist() == [[4, 5], [5, 6]]
    assert counted.count == before


def test_what_was_found_is_opened_without_looking_at_any_file(tmp_path: Path) -> None:
    source, cache = photos(tmp_path, 10), tmp_path / "cache"
    got = opened(source, tmp_path)
    assert open_facts(got, cache) is None
    facts = read_facts(got, Counted().probes, cache)
    for image in tmp_path.glob("*.png"):
        image.unlink()
    kept = open_facts(opened(source, tmp_path), cache)
    assert kept.size.tolist() == facts.size.tolist()
    assert isinstance(kept.size, np.memmap)


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY\1\0", None], ids=["empty", "cut", "folder"])
def test_what_cannot_be_read_of_the_known_files_is_probed_again(
    damage: bytes | None, tmp_path: Path
) -> None:
    source, cache, counted = photos(tmp_path, 10), tmp_path / "cache", Counted()
    wanted = read_facts(opened(source, tmp_path), counted.probes, cache).size.tolist()
    known = cache / "media" / "all.npy"
    known.unlink()
    known.mkdir() if damage is None else known.write_bytes(damage)
    assert read_facts(opened(source, tmp_path), counted.probes, cache).size.tolist() == wanted
    assert counted.count == 16
    read_facts(opened(source, tmp_path), counted.probes, cache)
    assert counted.count == 16, "what was probed is known once more"


def test_a_size_that_storage_has_changed_is_not_believed(tmp_path: Path) -> None:
    source, cache, counted = photos(tmp_path, 10), tmp_path / "cache", Counted()
    wanted = read_facts(opened(source, tmp_path), counted.probes, cache).size.tolist()
    rows = np.load(cache / "media" / "all.npy")
    rows["size"][3, 0] += 4
    np.save(cache / "media" / "all.npy", rows)
    assert read_facts(opened(source, tmp_path), counted.probes, cache).size.tolist() == wanted
    assert counted.count == 8 + 1


@pytest.mark.parametrize(
    "line", [b"5", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"key": [1], "stamp": 2, "reason": 3}']
)
def test_what_is_no_line_of_the_bad_files_is_passed_over(line: bytes, tmp_path: Path) -> None:
    write(tmp_path, {"a.png": b"broken"})
    got = opened(
        LlavaSource(lines(tmp_path / "d.jsonl", [asked("<image>", image="a.png")])), tmp_path
    )
    counted = Counted()
    for _ in range(2):
        assert read_facts(got, counted.probes, tmp_path / "cache").bad.tolist() == [0]
        path = tmp_path / "cache" / "media" / "unreadable.jsonl"
        path.write_bytes(line + b"\n" + path.read_bytes())
    assert counted.count == 1


def test_kept_facts_that_storage_has_changed_are_not_opened(tmp_path: Path, capsys) -> None:
    source, cache = photos(tmp_path, 10), tmp_path / "cache"
    read_facts(opened(source, tmp_path), Counted().probes, cache)
    (folder,) = cache.glob("facts-*")
    kept = bytearray((folder / "size.npy").read_bytes())
    kept[-8] ^= 1
    (folder / "size.npy").write_bytes(kept)
    assert open_facts(opened(source, tmp_path), cache) is None
    assert f"note   {folder}/size.npy is not what was written" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_written_facts_that_are_not_whole_are_refused_with_what_to_do(
    damage: str, tmp_path: Path
) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "records"
    got = opened(photos(tmp_path, 10), tmp_path)
    facts = read_facts(got, Counted().probes, cache)
    write_array_records(got, facts, folder, lambda done: None)
    written = opened(ArrayRecordSource(str(folder)), tmp_path)
    assert open_facts(written, cache).size.tolist() == facts.size.tolist()
    size = folder / FACTS / "size.npy"
    kept = bytearray(size.read_bytes())
    kept[-8] ^= 1
    size.write_bytes(kept) if damage == "changed" else size.unlink()
    with pytest.raises(
        UserError, match=f"size.npy.*; remove {folder}/{FACTS}, so that headers are read again"
    ):
        open_facts(written, cache)
    shutil.rmtree(folder / FACTS)
    assert read_facts(written, Counted().probes, cache).size.tolist() == facts.size.tolist()


def test_cuts_of_a_clip_read_its_header_once_and_have_their_own_lengths(tmp_path: Path) -> None:
    write(tmp_path, {"a.wav": clip(8000, 8000)})
    parts = [
        {"audio_filepath": "a.wav", "offset": k / 4, "duration": 0.25, "text": "x"}
        for k in range(5)
    ]
    counted = Counted()
    got = opened(ManifestSource(lines(tmp_path / "m.jsonl", parts)), tmp_path)
    facts = read_facts(got, counted.probes, tmp_path / "cache")
    assert facts.size.tolist() == [[2000, 8000]] * 4
    assert facts.bad.tolist() == [4]
    assert counted.count == 1


def test_media_in_parquet_have_facts_by_row(tmp_path: Path) -> None:
    rows = [{"bytes": picture(2 + i, 3), "path": None} for i in range(9)] + [
        {"bytes": b"broken", "path": None}
    ]
    table = pyarrow.table({"q": ["?"] * 10, "a": ["!"] * 10, "image": rows})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=4)
    source = ParquetSource(str(tmp_path / "d.parquet"), question="q", answer="a", images="image")
    counted = Counted()
    for _ in range(2):
        facts = read_facts(opened(source, tmp_path), counted.probes, tmp_path / "cache")
        assert facts.size[:, 0].tolist() == list(range(2, 11))
        assert facts.bad.tolist() == [9]
        assert counted.count == 10


def test_taking_records_takes_their_media(tmp_path: Path) -> None:
    facts = read_facts(opened(photos(tmp_path, 20), tmp_path), Counted().probes, tmp_path / "cache")
    some = facts.take(np.array([7, 0, 3]))
    assert some.start.tolist() == [0, 1, 1, 2]
    assert some.size.tolist() == [[8, 9], [4, 5]]


KILLED = """
import sys, time
from pathlib import Path
from typing import Any
sys.path[:0] = {path!r}
from files_made import image_size
from mmjax.config import LlavaSource
from mmjax.data.sources import known_files, media_sizes
from mmjax.data.sources.opening import open_conversations

known_files._SECONDS, media_sizes._CHUNK = 0.0, 20
folder = Path({folder!r})

def slow(file):
    time.sleep(0.002)
    return image_size(file)

def told(done):
    print(done, flush=True)

got = open_conversations(LlavaSource(str(folder / "d.jsonl")), "train", folder / "cache", "mine")
media_sizes.read_facts(got, {{"image": slow}}, folder / "cache", told)
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    source, counted = photos(tmp_path, 2000), Counted()
    script = KILLED.format(path=[str(Path(__file__).parents[1]), os.getcwd()], folder=str(tmp_path))
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    done = next(int(line) for line in run.stdout if int(line) >= 200)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert open_facts(opened(source, tmp_path), tmp_path / "cache") is None
    facts = read_facts(opened(source, tmp_path), counted.probes, tmp_path / "cache")
    assert len(facts.size) == 1600
    assert counted.count <= 1600 - done * 4 // 5


def test_headers_behind_a_server_are_read_many_at_a_time(tmp_path: Path) -> None:
    count = 200
    noise = np.random.default_rng(0).bytes(100_000)  # behind the image: never read
    site = write(
        tmp_path / "site", {f"{i}.png": picture(1 + i % 50, 9) + noise for i in range(count)}
    )
    path = lines(tmp_path / "d.jsonl", [asked("<image>", image=f"{i}.png") for i in range(count)])
    with served(site, together=33) as server:
        got = opened(LlavaSource(path, images=server.url), tmp_path)
        facts = read_facts(got, Counted().probes, tmp_path / "cache")
        assert facts.size[:, 0].tolist() == [1 + i % 50 for i in range(count)]
        assert server.given < count * 10_000
        counted = Counted()
        read_facts(got, counted.probes, tmp_path / "cache")
        assert counted.count == 0


def test_of_local_images_little_more_than_the_header_is_read(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(0), 200
    noise = Image.fromarray(rng.integers(0, 255, (120, 160, 3), np.uint8)).resize((640, 480))
    file = io.BytesIO()
    noise.save(file, "JPEG", quality=90)
    assert 50_000 < len(file.getvalue()) < 300_000
    write(tmp_path, {f"{i}.jpg": file.getvalue() for i in range(count)})
    got = opened(
        LlavaSource(
            lines(tmp_path / "d.jsonl", [asked("<image>", image=f"{i}.jpg") for i in range(count)])
        ),
        tmp_path,
    )
    before = bytes_read()
    facts = read_facts(got, Counted().probes, tmp_path / "cache")
    assert bytes_read() - before < count * 20_000
    assert facts.size.tolist() == [[480, 640]] * count


def bytes_read() -> int:
    """By this process, of files and pipes."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_server_s_passing_fault_is_tried_again_and_a_lasting_one_is_no_fact(
    tmp_path: Path, monkeypatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    site = write(tmp_path / "site", {f"{i}.png": picture(2, 3) for i in range(3)})
    path = lines(tmp_path / "d.jsonl", [asked("<image>", image=f"{i}.png") for i in range(4)])
    with served(site) as server:
        server.broken.update({"/1.png": 2, "/2.png": 10**6})
        source = LlavaSource(path, images=server.url)
        facts = read_facts(opened(source, tmp_path), Counted().probes, tmp_path / "cache")
        assert facts.bad.tolist() == [2, 3]
        assert len(pauses) >= 2, "two passing faults, and those of the lasting one"
        assert "2.png cannot be read" in facts.reason[0]
        assert "3.png is missing" in facts.reason[1]
        server.broken.clear()
        assert read_facts(
            opened(source, tmp_path), Counted().probes, tmp_path / "cache"
        ).bad.tolist() == [3]


@pytest.mark.parametrize("extra", [0, 30_000])
def test_a_long_header_is_read_on_from_where_it_stops(tmp_path: Path, extra: int) -> None:
    image = picture(20, 30, kind="JPEG")
    comment = b"\xff\xfe" + (extra + 2).to_bytes(2, "big") + bytes(extra)
    site = write(tmp_path / "site", {"a.jpg": image[:2] + comment + image[2:] + bytes(500_000)})
    path = lines(tmp_path / "d.jsonl", [asked("<image>", image="a.jpg")])
    with served(site) as server:
        facts = read_facts(
            opened(LlavaSource(path, images=server.url), tmp_path),
            Counted().probes,
            tmp_path / "cache",
        )
        assert facts.size.tolist() == [[20, 30]]
        assert server.given < 4 * (extra + 10_000)


@pytest.mark.exhaustive  # whether there is waiting depends on what else runs
def test_records_that_take_long_to_parse_are_read_one_by_one(tmp_path: Path) -> None:
    """Only waiting makes it worth to have many in memory."""

    class Read:
        def __init__(self, records: Conversations, wait: Callable) -> None:
            self.records, self.wait, self.threads = records, wait, set[int]()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.records, name)

        def __len__(self) -> int:
            return len(self.records)

        def conversation(self, index: int) -> Conversation:
            self.threads.add(threading.get_ident())
            self.wait()
            return self.records.conversation(index)

    def parse() -> None:
        start = time.thread_time()
        while time.thread_time() < start + 0.004:
            pass

    threads = []
    for name, wait in (("parse", parse), ("wait", lambda: time.sleep(0.004))):
        got = Read(opened(photos(tmp_path / name, 12), tmp_path / name), wait)
        read_facts(got, Counted().probes, tmp_path / name / "cache")
        threads.append(len(got.threads))
    assert threads[0] == 1 < threads[1]
