"""The live page of a run: who gets it, what moves, who answers; and in a real browser."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from commands import MEDIA_WORDS, TINY_MEDIA, files, media_run, run
from PIL import Image
from restarts import last
from started import Ended, finish, start, wait_until

from mmjax import generate, studio, train
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.prompts import make_prompt
from mmjax.runtime.run_dir import lock_run
from mmjax.studio import HOST, Studio, StudioServer, main

MODEST = {"max_tokens": 10, "temperature": 0.0}


@pytest.fixture(scope="module")
def trained(runs: Path) -> Path:
    """A whole run with images and clips."""
    return media_run(runs)[0]


@pytest.fixture
def server(trained: Path, tmp_path: Path) -> Iterator[StudioServer]:
    """The page of a copy of it, served on a free port."""
    folder = shutil.copytree(
        trained, trained.with_name(tmp_path.name), ignore=shutil.ignore_patterns("tensorboard")
    )
    server = StudioServer(0, Studio(folder, "cpu"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def request(
    url: str, path: str = "", body: object = None, **headers: str
) -> tuple[HTTPResponse, bytes]:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname, address.port, timeout=120)
    sent = None if body is None else json.dumps(body)
    connection.request("GET" if sent is None else "POST", address.path + path, sent, headers)
    response = connection.getresponse()
    return response, response.read()


def state(server: StudioServer, live: int = 0, asked: int = 0) -> dict:
    return json.loads(request(server.url, f"state?live={live}&asked={asked}")[1])


def sections(server: StudioServer) -> dict[str, str]:
    """All sections of the page, once those that take longer are there."""
    wait_until(lambda: "config" in state(server)["live"]["parts"], seconds=120)
    return state(server)["live"]["parts"]


def refusal(server: StudioServer, **question: object) -> str:
    return json.loads(request(server.url, "ask", MODEST | question)[1])["error"]


def answered(server: StudioServer) -> str:
    """The newest question's part of the page once nothing more comes."""
    deadline = time.monotonic() + 240
    while (
        "waiting"
        in (html := state(server)["asked"]["parts"]["asked"].split('<div class="sample">')[1])
        or " ..." in html
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return html


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on a port, as /proc writes them."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        line[1].split(":")[0]
        for line in lines
        if line[3] == "0A" and int(line[1].split(":")[1], 16) == port
    }


def test_who_does_not_know_the_token_or_comes_by_another_name_gets_nothing(
    server: StudioServer,
) -> None:
    root = server.url.removesuffix(f"{server.token}/")
    wrong = server.token[:-1] + ("A" if server.token[-1] != "A" else "B")
    for path in (
        "",
        "state",
        "report",
        f"{wrong}/",
        f"{wrong}/state",
        f"{server.token}x/",
        f"x/{server.token}/",
    ):
        response, body = request(root, path)
        assert (response.status, body) == (403, b""), path
    for path in (f"{wrong}/ask", "ask"):
        response, body = request(root, path, MODEST | {"question": "a"})
        assert (response.status, body) == (403, b""), path
    for host in (
        "evil.example",
        f"evil.example:{server.server_port}",
        "127.0.0.1.evil.example",
        "",
    ):
        response, body = request(server.url, "state", Host=host)
        assert (response.status, body) == (403, b""), host
    # A tunnel has a port of its own.
    assert request(server.url, Host="localhost:7")[0].status == request(server.url)[0].status == 200
    assert request(server.url, "none")[0].status == 404
    assert len(server.token) >= 43
    assert "asked" not in state(server)


def test_only_one_host_header_that_is_this_machine_by_name_and_a_path_of_its_own_pass(
    server: StudioServer,
) -> None:
    port, root = server.server_port, f"/{server.token}/state"
    for host in ("127.0.0.1", "localhost", f"127.0.0.1:{port}", "localhost:7", "LocalHost"):
        assert status_of(port, root, f"Host: {host}") == 200, host
    for host in (
        "", ":80", "127.0.0.1:80.evil.com", "127.0.0.1:80:80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:123456",
        "127.0.0.1.", "localhost.", "127.0.0.1@evil.com", "evil.com@127.0.0.1", "a:b@localhost", "localhost/evil",
        "localhost evil.com", "evil.com, localhost", "[::1]", "::1", f"[::1]:{port}", "[127.0.0.1]", "127.1",
        "0.0.0.0", "2130706433", "0x7f.0.0.1", "localhost\r\n .evil.com", "127.0.0.1:\xb2", "http://localhost",
    ):  # fmt: skip
        assert status_of(port, root, f"Host: {host}") == 403, host
    assert status_of(port, root) == 403
    for second in ("localhost", "evil.com", ""):
        assert status_of(port, root, "Host: localhost", f"hOsT: {second}") == 403, second
    for target in (
        f"http://localhost{root}",
        f"http://evil.com{root}",
        f"http://{HOST}:{port}{root}",
        "*",
        root[1:],
    ):
        assert status_of(port, target, "Host: localhost") in (400, 403), target


def status_of(port: int, target: str, *headers: str) -> int:
    """Send a request as it stands, and return the status of the reply."""
    with socket.create_connection((HOST, port), 60) as connection:
        lines = [f"GET {target} HTTP/1.1", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        return int(connection.makefile("rb").readline().split()[1])


def test_two_hundred_requests_at_once_are_all_answered(trained: Path) -> None:
    server = StudioServer(0, Studio(trained, "cpu"))
    waiting = []
    try:
        for _ in range(200):  # before the first is accepted
            waiting.append(socket.create_connection((HOST, server.server_port), 5))
            waiting[-1].sendall(
                f"GET /{server.token}/state HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for connection in waiting:
            connection.settimeout(120)
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
            assert head.split()[1] == b"200"
            assert json.loads(body)["error"] == ""
        server.shutdown()
    finally:
        server.server_close()
        for connection in waiting:
            connection.close()


def test_nothing_listens_beyond_this_machine_and_the_page_loads_nothing(
    server: StudioServer,
) -> None:
    assert listening(server.server_port) == {"0100007F"}
    response, page = request(server.url)
    assert not re.search(rb"https?://|url\(|@import", page)
    policy = response.headers["Content-Security-Policy"]
    nonce = re.search("script-src 'nonce-([^']+)'", policy)[1]
    assert f'<script nonce="{nonce}">'.encode() in page
    assert "default-src 'none'" in policy
    assert nonce not in request(server.url)[0].headers["Content-Security-Policy"]


def test_a_run_that_has_stopped_or_is_finished_is_said_to(server: StudioServer) -> None:
    folder = server.studio.run.folder
    assert state(server)["age"].endswith(" ago; the run is finished")
    folder.scores.unlink()
    new = time.time() + 3600  # by a clock ahead of this one
    os.utime(folder.metrics, (new, new))
    assert state(server)["age"] == "last step 0:00:00 ago"  # it may be about to go on
    old = time.time() - 600
    os.utime(folder.metrics, (old, old))
    assert "; the run has stopped: python -m mmjax.train --resume " in state(server)["age"]
    with lock_run(folder.path):
        assert state(server)["age"].endswith(" ago")
    lock = folder.path.with_name(f".{folder.path.name}.lock")
    # killed: beyond the largest number of a process
    lock.write_text("process 4194304 on " + socket.gethostname())
    assert "; the run has stopped" in state(server)["age"]
    lock.write_text("process 1 on elsewhere")
    assert state(server)["age"].endswith(" ago")


def test_a_run_on_one_rank_has_no_charts_of_balance(server: StudioServer) -> None:
    metrics = server.studio.run.folder.metrics
    assert "without balancing" in sections(server)["balance"]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in records:
        record.update({key: 1.0 for key in record if key.startswith("max_over_mean")})
    metrics.with_suffix(".new").write_text("".join(json.dumps(record) + "\n" for record in records))
    metrics.with_suffix(".new").replace(metrics)
    anew = StudioServer(0, Studio(server.studio.run.folder.path, "cpu"))
    threading.Thread(target=anew.serve_forever, daemon=True).start()
    assert "without balancing" not in sections(anew)["balance"].split("</table>")[-1]
    anew.shutdown()
    anew.server_close()


def test_what_a_run_appends_comes_with_the_next_request_and_only_then(server: StudioServer) -> None:
    metrics = server.studio.run.folder.metrics
    sections(server)
    first = state(server)
    assert "6 of 6" in first["live"]["parts"]["progress"]
    assert first["live"]["parts"]["training"].count("<figure") > 8
    known = first["live"]["version"]
    assert "live" not in state(server, known)
    line = json.dumps(json.loads(metrics.read_text().splitlines()[-1]) | {"step": 7, "loss": 0.5})
    with metrics.open("a") as file:
        file.write(line[:40])
        file.flush()
        assert "live" not in state(server, known)
        file.write(line[40:] + "\n")
    second = state(server, known)["live"]
    assert "7 of 6" in second["parts"]["progress"]
    assert set(second["parts"]) <= {"progress", "training", "time"}
    # A resumed run drops the steps behind its checkpoint.
    kept = metrics.with_suffix(".new")
    kept.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    kept.replace(metrics)
    assert re.search(r"[1-4] of 6", state(server, second["version"])["live"]["parts"]["progress"])
    folder = server.studio.run.folder
    folder.config.rename(folder.path / "elsewhere")
    folder.metrics.unlink()
    assert "holds no run" in state(server)["error"]


def test_questions_are_answered_as_the_command_answers_them_and_nothing_is_written(
    server: StudioServer,
) -> None:
    folder = server.studio.run.folder.path
    before = files(folder)
    png = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 14), np.uint8)).save(png, "PNG")
    medium = {
        "kind": "image",
        "name": "<b>x</b>.png",
        "data": base64.b64encode(png.getvalue()).decode(),
    }
    assert refusal(server, question="max?", media=[medium]) == ""
    assert "is being answered" in refusal(server, question="last?")
    html = answered(server)
    assert "checkpoint of step 6; &lt;b&gt;x&lt;/b&gt;.png" in html
    served = CheckpointModel.open(folder, ["device=cpu"])
    expected, _ = generate.generate(
        served, make_prompt("max?", {"image": [png.getvalue()]}), max_tokens=10
    )
    assert f'<div class="text answer"><mark>{expected.text}</mark></div>' in html
    samples = request(server.url, "samples")[1].decode()
    names = re.findall(r'data-sample="([^"]+)"', samples)
    assert names[0] == "test/few[0]"
    assert 'alt="image"' in samples
    assert refusal(server, sample=names[0]) == ""
    html = answered(server)
    right = server.studio._sources["test/few"].question(0).answer
    assert f"It is: {right}<" in html
    assert f"It is: {right}<" in samples
    assert files(folder) == before


def test_what_cannot_be_asked_is_one_line_on_the_page(
    server: StudioServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the question is empty" in refusal(server, question=" ")
    assert "no image, audio or video" in refusal(
        server, question="a", media=[{"kind": "text", "name": "x", "data": ""}]
    )
    for odd in (
        {"max_tokens": "many"},
        {"max_tokens": float("inf")},
        {"media": 3},
        {"media": [{"kind": "image"}]},
    ):
        assert "load the page again" in refusal(server, question="a", **odd)
    monkeypatch.setattr(studio, "MAX_BODY", 1 << 20)
    assert "more than 1 MiB" in refusal(server, question="a" * (3 << 20))
    assert "1 to 4096" in refusal(server, question="a", max_tokens=0)
    for question, line in (
        ({"question": "A?"}, "the question cannot be asked"),
        (
            {"question": "a?", "media": [{"kind": "image", "name": "x.png", "data": "aaaa"}]},
            "x.png: ",
        ),
        ({"sample": "test/few[99]"}, "the run has no sample &#39;test/few[99]&#39;"),
        ({"question": "a?", "temperature": -1}, "choose 0"),
    ):
        assert refusal(server, **question) == ""
        assert line in answered(server)
    shutil.rmtree(server.studio.run.folder.checkpoints)
    assert refusal(server, question="a?") == ""
    assert "holds no checkpoint yet" in answered(server)


@pytest.mark.parametrize("reset", [False, True])
def test_a_page_that_goes_away_in_mid_question_leaves_no_traceback_and_no_thread(
    server: StudioServer, capsys: pytest.CaptureFixture[str], reset: bool
) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        length = 1000 if reset else 10**15  # of a body that is read whole, or dropped
        connection.sendall(
            f"POST {address.path}ask HTTP/1.0\r\nHost: {address.netloc}\r\nContent-Length: {length}\r\n\r\n{{".encode()
        )
        wait_until(requests_under_way)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not requests_under_way(), seconds=60)
    assert capsys.readouterr().err == ""
    assert request(server.url)[0].status == 200


def requests_under_way() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if "process_request_thread" in thread.name
    ]


def test_bad_input_is_one_line(
    server: StudioServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        ended: Ended = run(capsys, main, *words)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        return ended.err

    folder = server.studio.run.folder.path
    assert "holds no run" in refused(tmp_path)
    assert "choose another one, or --port 0" in refused(folder, "--port", server.server_port)
    assert "choose 0 to 65535" in refused(folder, "--port", 1 << 16)


@pytest.mark.exhaustive
def test_ctrl_c_ends_it_in_mid_answer_and_nothing_is_written(trained: Path) -> None:
    before = files(trained)
    process = start("mmjax.studio", trained, "--port", 0)
    url = process.stdout.readline().split()[1]
    request(url, "ask", MODEST | {"question": "last?"})
    wait_until(lambda: b"..." in request(url, "state")[1], process)
    assert b"<h2>A packed row" in request(url, "report")[1]
    request(url, "ask", MODEST | {"question": "first?"})
    process.send_signal(signal.SIGINT)
    ended = finish(process, 30)
    assert (ended.code, ended.err) == (130, "interrupted\n")
    assert files(trained) == before
    with pytest.raises(ConnectionRefusedError):
        request(url)


def test_nothing_is_started_that_was_not_allowed_and_is_no_change_of_a_run_here(
    server: StudioServer,
) -> None:
    def commanded(studio: Studio, **words: str) -> str:
        server.studio = studio
        command = {"action": "plan", "changes": "", "name": ""} | words
        return json.loads(request(server.url, "control", command)[1])["error"]

    folder, closed = server.studio.run.folder.path, server.studio
    assert 'id="control"' not in request(server.url)[1].decode()
    assert commanded(closed) == "this page starts nothing; open it with --control"
    opened = Studio(folder, "cpu", control=True)
    for words, message in (
        ({"action": "erase"}, "the command is not what the page sends"),
        ({"action": "stop"}, "nothing that was started here is running"),
        ({"changes": "--trust"}, "--trust: changes are words such as"),
        ({"changes": "training.steps"}, "training.steps: changes are words such as"),
        ({"changes": "'"}, "the changes are no words: No closing quotation"),
        ({"action": "new", "name": "../other"}, "name the new run, which is beside this one"),
        ({"action": "new", "name": folder.name}, "is there already; give the new run another name"),
    ):
        assert message in commanded(opened, **words)
    assert 'id="control"' in request(server.url)[1].decode()
    assert state(server)["output"] == ""


def test_a_run_is_compared_with_one_beside_it_and_with_nothing_else(
    server: StudioServer, trained: Path
) -> None:
    page = request(server.url)[1].decode()
    assert f'href="report?with={trained.name}"' in page
    both = request(server.url, f"report?with={trained.name}")[1].decode()
    assert f"<title>{server.studio.run.name}, {trained.name} - mmjax report" in both
    refused = request(server.url, "report?with=../" + trained.parent.name)[1].decode()
    assert "there is no run" in refused


@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")
def test_in_a_browser_a_run_is_planned_another_is_started_stopped_and_compared(
    runs: Path, tmp_path: Path
) -> None:
    folder = runs / "controlled"
    few = ("training.steps=2", "schedule.warmup=1", "training.evaluate_every=0", "device=cpu")
    train.main(["tiny_vlm", *few, f"run={folder}"])
    config = (folder / "config.json").read_text()
    process = start("mmjax.studio", folder, "--port", 0, "--control")
    url = process.stdout.readline().split()[1]
    browser = Browser(tmp_path / "profile")
    browser.call("Page.navigate", url=url)
    browser.wait("!!document.querySelector('#control')")
    output = "document.querySelector('#output').innerText"

    def press(action: str, **fields: str) -> None:
        for name, text in fields.items():
            browser.value(f"document.querySelector('#{name}').value = {json.dumps(text)}")
        browser.value(f"document.querySelector('[data-action={action}]').click()")

    press("plan", changes="training.stepz=3")
    browser.wait(f"/did you mean 'training.steps'[^]*ended with code 2/.test({output})")
    press("plan", changes="training.steps=2000 training.evaluate_every=0")
    browser.wait(f"/mmjax.plan[^]*ended with code 0/.test({output})")
    press("new", name="another")
    browser.wait(f"/mmjax.train/.test({output})")
    wait_until(lambda: last(runs / "another") >= 1, seconds=120)
    press("new", name="third")
    browser.wait("/is running/.test(document.querySelector('#control_refusal').innerText)")
    press("stop")
    browser.wait(f"/ended with code 0/.test({output})")
    assert list((runs / "another").glob("checkpoints/*/meta"))
    browser.call("Page.navigate", url=url)
    browser.wait("!!document.querySelector('a[href=\"report?with=another\"]')")
    assert not browser.complaints
    browser.close()
    assert (folder / "config.json").read_text() == config


@pytest.mark.exhaustive
@pytest.mark.skipif(not CHROMIUM, reason="there is no chromium")
def test_in_a_browser_curves_move_while_a_run_trains_and_a_question_is_answered(
    runs: Path, tmp_path: Path
) -> None:
    folder = runs / "watched"
    words = (
        *MEDIA_WORDS,
        "training.steps=100000",
        "training.checkpoint_every=50",
        "training.evaluate_every=0",
    )
    training = start(
        "mmjax.train", TINY_MEDIA, f"run={folder}", *words, devices=8, stdout=-3, stderr=-3
    )
    wait_until(lambda: list(folder.glob("checkpoints/*/meta")), training)
    url = start("mmjax.studio", folder, "--port", 0).stdout.readline().split()[1]
    browser = Browser(tmp_path / "profile")
    curve = "document.querySelector('#training path[stroke=\"var(--blue)\"]')?.getAttribute('d')"
    step = "Number(document.querySelector('#progress .tiles b')?.innerText.split(' ')[0].replace(',', ''))"
    browser.call("Page.navigate", url=url)
    first, begun = browser.wait(curve), browser.value(step)
    browser.wait(f"{curve} !== {json.dumps(first)} && {step} > {begun}")
    browser.value("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text="last?")
    browser.value("document.querySelector('form button').click()")
    browser.wait("/tokens in/.test(document.querySelector('#asked .note')?.innerText)")
    assert "checkpoint of step" in browser.value(
        "document.querySelector('#asked header').innerText"
    )
    assert browser.value("document.querySelector('#asked .text').innerText") == "last?"
    moved = browser.value(step)
    browser.wait(f"{step} > {moved}")
    # A sample's own question, and its image as the file of another.
    browser.value("document.querySelector('#samples').open = true")
    browser.wait("document.querySelectorAll('#samples button').length")
    browser.value("document.querySelector('#samples button').click()")
    notes = "[...document.querySelectorAll('#asked .note')].map(note => note.innerText)"
    browser.wait(f"{notes}[0].startsWith('It is: ') && {notes}[1].includes('tokens in')")
    browser.value("document.querySelector('#samples img[alt=image]').click()")
    browser.wait("document.forms[0].media.files.length === 1")
    browser.value("document.querySelector('form button').click()")
    browser.wait("/sample.png/.test(document.querySelector('#asked header').innerText)")
    assert not browser.complaints
    wrong = url.replace(url.split("/")[3], "A" * 43)
    assert training.poll() is None
    browser.call("Page.navigate", url=wrong)
    browser.wait("location.pathname.startsWith('/AAA') || location.protocol === 'chrome-error:'")
    assert not browser.value("document.querySelector('#training')")
    wait_until(lambda: browser.value("1") and " 403 " in "".join(browser.complaints))
    assert listening(int(url.split(":")[2].split("/")[0])) == {"0100007F"}
    browser.close()
