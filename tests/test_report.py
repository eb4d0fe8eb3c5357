"""The report: one page of a run or several, whatever state they are in and whatever their samples say."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest
from browser import CHROMIUM, HEADLESS, QUIET
from commands import files, media_run, run
from llava_folder import save_checkpoint, save_questions
from PIL import Image
from started import Ended

from mmjax.balance.parts import dist_ratio
from mmjax.batch import allowed
from mmjax.config.loading import load
from mmjax.data.loading.replay import PackedRow
from mmjax.disk import verify_checksum, with_checksum, write_sealed
from mmjax.inspect import replay, write
from mmjax.models.model import Model
from mmjax.parallel.sharding import make_mesh
from mmjax.report import main, report
from mmjax.reporting.run import plan_again, read_runs
from mmjax.runtime.run_dir import NO_CHANGES, RunFolder
from mmjax.training.run_data import append_launch, open_data

# nothing is left out
SECTIONS = ("training", "lengths", "balance", "time", "row", "worst", "history", "config")


@pytest.fixture(scope="module")
def trained(runs: Path) -> Path:
    """A whole run with images and clips on eight ranks."""
    return media_run(runs)[0]


@pytest.fixture(scope="module")
def page(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its report."""
    return report([trained], tmp_path_factory.mktemp("report") / "report.html")


class Page(HTMLParser):
    """What a page is made of. Raises where a tag is not closed, or another one is."""

    VOID = ("meta", "img", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def pictures(self) -> list[str | None]:
        """What the pictures that have a name are of."""
        return [svg["aria-label"] for svg in self.all("svg") if svg.get("aria-label")]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def copied(run: Path, name: str) -> Path:
    """The same run without its checkpoints."""
    folder = run.with_name(f"reported_{name}")
    return shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))


def test_a_report_has_every_section_in_one_small_file_that_loads_nothing(page: Path) -> None:
    found = Page(page)
    assert [section["id"] for section in found.all("section")] == list(SECTIONS)
    assert {f"#{name}" for name in SECTIONS} == {link["href"] for link in found.all("a")}
    assert "script" not in [tag for tag, _ in found.tags]
    assert all(image["src"].startswith("data:image/") for image in found.all("img"))
    assert not re.search(r"https?://|url\(|@import", page.read_text())
    assert page.stat().st_size < 1_000_000


def test_a_report_shows_what_was_trained_and_how_rows_and_ranks_were(page: Path) -> None:
    found = Page(page)
    for said in (
        "6 of 6", "Loss: from", "Gradient norm", "Tokens a second", "Open files", "Validation, exact match",
        "Before: samples have", "After: rows of vision are", "audio: the fullest rank has", "A worker loads a step in",
        "Step 6, microbatch", "loss", "few[", "8 x cpu", "training.steps", "few 100%",
    ):  # fmt: skip
        assert said in found.text, said
    assert found.all("mark")
    kinds = [image.get("alt") for image in found.all("img")]
    assert "log-mel frames" in kinds
    assert "image" in kinds
    assert "Work of every rank in every step" in found.pictures()
    assert [image["class"] for image in found.all("image") if "class" in image] == ["mask"]


def test_what_is_shown_of_rows_and_ranks_is_what_was_logged(trained: Path) -> None:
    (of,) = read_runs([trained])
    planned = plan_again(of)
    assert (planned.first, len(planned.plans)) == (0, 6)
    work, unbalanced = planned.work(True), planned.work(False)
    for k, module in enumerate(of.modules):
        logged = {
            key: of.metrics.curves[f"{key}/{module}"].mean
            for key in ("fill", "dist_ratio", "dist_ratio_before")
        }
        assert np.allclose(planned.fills(k).reshape(6, -1).mean(1), logged["fill"])
        assert np.allclose(dist_ratio(work[k]), logged["dist_ratio"])
        assert np.allclose(dist_ratio(unbalanced[k]), logged["dist_ratio_before"])


def test_runs_are_compared_in_the_same_charts_and_the_first_keeps_the_page(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copied(trained, "other")
    before = files(trained)
    ended = run(capsys, main, other, trained)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"report {other / 'report.html'} (")
    assert files(trained) == before
    found = Page(other / "report.html")
    assert "2 runs compared" in found.text
    legends = re.findall(r'<p class="legend">(.*?)</p>', (other / "report.html").read_text())
    assert sum("other" in text and "media" in text for text in legends) > 8


def test_what_samples_and_files_say_is_shown_and_never_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    checkpoint, data = save_checkpoint(tmp_path / "llava"), save_questions(tmp_path / "data", 12)
    records = json.loads(data.read_text())
    for record in records:
        record["conversations"][0]["value"] = f"<image>\n{evil}"
        record["conversations"][1]["value"] = evil
    data.write_text(json.dumps(records))
    words = [
        f"checkpoint={checkpoint}",
        f"data={data}",
        f"images={data.parent / 'images'}",
        f"run={tmp_path / evil[:8]}",
    ]
    few = [
        "batch.size.count=4",
        "batch.rows.llm=1",
        "batch.rows.vision=1",
        "mesh.data=1",
        "mesh.fsdp=1",
        "data.workers=0",
    ]
    config = load("llava_style", [*words, *few])
    folder = RunFolder(tmp_path / evil[:8])
    folder.path.mkdir()
    folder.write_config(config)
    opened = open_data(config, folder, 0, NO_CHANGES, make_mesh(config.mesh, jax.devices()[:1]))
    append_launch(folder.history, opened.launch)
    (data.parent / "images" / "3.png").write_bytes(b"no longer an image")
    worst = {"chat[3]": 2.5, "chat[1]": 1.5, evil: 9.0}
    line = {
        "step": 1,
        "loss": 1.0,
        "gradient_norm": 1.0,
        "loss/" + evil: 1.0,
        "loss/b": 2.0,
        "worst": worst,
    }
    folder.metrics.write_text(json.dumps(line | {"slowest": evil, "seconds/slowest": 1.0, "seconds/step": 1.0,
                                                 "seconds/data_wait": 0.1}) + "\n")  # fmt: skip
    folder.quarantine.write_text(json.dumps({"sample": evil, "reason": evil}) + "\n")
    found = Page(report([folder.path]))
    assert {"script", "b-script"}.isdisjoint(tag for tag, _ in found.tags)
    assert not any("onerror" in attributes for _, attributes in found.tags)
    assert found.text.count(evil) >= 8
    assert "cannot be opened" in found.text
    assert any(
        image["src"].startswith("data:image/png")
        for image in found.all("img")
        if image["alt"] == "image"
    )


def test_a_run_that_has_just_begun_has_a_report(trained: Path) -> None:
    folder = copied(trained, "begun")
    for name in ("metrics.jsonl", "test.json"):
        (folder / name).unlink()
    found = Page(report([folder]))
    assert "No step was logged yet" in found.text
    assert "steps 1 to" in found.text
    (folder / "history.jsonl").unlink()
    assert "has not started yet" in Page(report([folder])).text


def test_a_pipelines_passes_are_shown_as_planned_where_none_was_measured(trained: Path) -> None:
    folder = copied(trained, "in_units")
    (folder / "history.jsonl").unlink()  # its steps are not planned again, which takes seconds
    (folder / "passes").mkdir()
    plan = {
        "schedule": "1f1b",
        "microbatches": 2,
        "edges": [[0, 1]],
        "workers": [0, 1],
        "profiled": True,
    }
    times = {"stages": ["vision", "llm"], "forward": [0.1, 0.2], "backward": [0.2, 0.4]}
    write_sealed(folder / "passes" / "planned.json", plan | times)
    found = Page(report([folder]))
    assert "#passes" in {link["href"] for link in found.all("a")}
    assert "Nothing was measured" in found.text
    assert found.pictures() == ["Passes of a step"]
    assert "planned, by measured layer times" in found.text
    # Two microbatches of .6 s in the LLM, after a forward pass of the encoder and before a backward
    # pass of it.
    assert "1.50 s, bubble 40.0%" in found.text


def test_torn_lines_and_starts_in_mid_run_are_no_obstacle(trained: Path) -> None:
    folder = copied(trained, "torn")
    launch = json.loads((folder / "history.jsonl").read_text())
    config = json.loads(json.dumps(launch["config"]))
    config["training"]["steps"] = 9
    later = with_checksum(
        verify_checksum(launch) | {"first": 4, "config": config, "devices": "8 x elsewhere"}
    )
    (folder / "history.jsonl").write_text(
        f'{{"fir\n{json.dumps(launch)}\n{json.dumps(later)}\n{{"first": 5, "be'
    )
    for name in ("metrics.jsonl", "quarantine.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 7, "lo')
    found = Page(report([folder]))
    assert "training.steps: 6 -> 9" in found.text
    assert "devices: 8 x cpu -> 8 x elsewhere" in found.text
    assert "steps 5 to 6" in found.text
    assert any("stroke-dasharray" in path for path in found.all("path"))


@pytest.mark.parametrize(("windowed", "chunked"), [([1], False), ([0, 1], False), ([1], True)])
def test_masks_are_drawn_as_attention_computes_them_and_show_which_layers_have_a_window(
    windowed: list[int], chunked: bool, trained: Path, tmp_path: Path
) -> None:
    folder = copied(trained, f"windowed_{len(windowed)}_{chunked}")
    launch = verify_checksum(json.loads((folder / "history.jsonl").read_text()))
    launch["config"]["model"]["llm"] |= {"window": 5, "windowed": windowed, "chunked": chunked}
    (folder / "history.jsonl").write_text(json.dumps(with_checksum(launch)) + "\n")
    replayed, of = replay(RunFolder(folder), 6)
    assert of.config.model.llm.layers == 2
    model = Model.build(of.config.model, np.float32)

    def shades(row: PackedRow) -> np.ndarray:
        text = jax.tree.map(lambda field: jax.numpy.asarray(field)[None], replayed.text_of(row))
        context = model.module(model.abstract).context("llm", text, None)
        near, whole = (
            np.asarray(allowed(mask, mask))[0] for mask in (context.window_mask, context.mask)
        )
        return near.astype(int) + (near | whole if len(windowed) < 2 else near)

    page = report([folder], tmp_path / "report.html")
    found, rows = Page(page), list(replayed.rows())
    microbatch, rank, number = map(
        int, re.search(r"microbatch (\d+), rank (\d+), row (\d+)", found.text).groups()
    )
    row = next(r for r in rows if (r.microbatch, r.rank, r.row) == (microbatch, rank, number))
    (drawn,) = (image for image in found.all("image") if image.get("class") == "mask")
    cells = Image.open(io.BytesIO(base64.b64decode(drawn["href"].partition(",")[2])))
    assert np.array_equal(np.asarray(cells), shades(row))
    assert ("Layers 1 of 0-1 have" if len(windowed) < 2 else "All layers have") in found.text
    assert f"{'chunks' if chunked else 'a sliding window'} of 5 tokens" in found.text
    write(replayed, rows[:2], tmp_path)
    for row in rows[:2]:
        cells = Image.open(
            tmp_path / f"microbatch{row.microbatch}-rank{row.rank}-row{row.row}-mask.png"
        )
        assert np.array_equal(np.asarray(cells), np.array([255, 160, 0])[shades(row)])


def test_what_is_gone_is_said_and_the_rest_is_shown(trained: Path) -> None:
    folder = copied(trained, "gone")
    shutil.rmtree(folder / "index")
    found = Page(report([folder]))
    assert "is gone: the length index" in found.text
    assert "Loss: from" in found.text


def test_sections_with_nothing_to_show_are_left_out_and_wide_charts_have_twins_for_a_phone(
    trained: Path,
) -> None:
    folder = copied(trained, "bare")
    for name in ("metrics.jsonl", "history.jsonl", "quarantine.jsonl", "oversize.jsonl"):
        (folder / name).unlink(missing_ok=True)
    found = Page(report([folder]))
    assert [section["id"] for section in found.all("section")] == [
        "training",
        "lengths",
        "row",
        "config",
    ]
    assert [link["href"] for link in found.all("a")] == ["#training", "#lengths", "#row", "#config"]
    line = {"sample": "few[3]", "reason": "torn"}
    (folder / "quarantine.jsonl").write_text(json.dumps(line) + "\n")
    assert "left-out" in [section["id"] for section in Page(report([folder])).all("section")]
    whole = Page(report([trained], folder / "whole.html"))
    wide, narrow = (
        [box for box in whole.all("div") if box.get("class") == name]
        for name in ("broad", "narrow")
    )
    assert len(wide) == len(narrow) == 2  # loss and time


def test_bad_input_is_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        ended: Ended = run(capsys, main, *words)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        return ended.err

    assert "holds no run" in refused(tmp_path)
    assert "holds no run" in refused(trained, tmp_path / "none")
    assert "is given twice" in refused(trained, trained)
    assert "name a file that ends in .html" in refused(trained, "--out", tmp_path / "report.pdf")
    assert "in a folder that exists" in refused(trained, "--out", tmp_path / "none" / "report.html")


@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")
def test_a_browser_shows_every_section_and_complains_of_nothing(page: Path, tmp_path: Path) -> None:
    headless = [*HEADLESS, *QUIET, f"--user-data-dir={tmp_path / 'profile'}"]
    said = ["--enable-logging=stderr", "--dump-dom"]

    def shown(path: Path) -> subprocess.CompletedProcess[str]:
        command = [CHROMIUM, *headless, *said, path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)

    ended = shown(page)
    assert "CONSOLE" not in ended.stderr
    assert re.findall(r'<section id="([\w-]+)">', ended.stdout) == list(SECTIONS)
    spoiled = tmp_path / "spoiled.html"
    spoiled.write_text(
        page.read_text().replace("<h2>", "<script>document.title = 'x'</script><h2>")
    )
    assert "CONSOLE" in shown(spoiled).stderr
