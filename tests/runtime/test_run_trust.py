"""What a run's folder says is executed and fetched where this user has made the run, and else on request alone."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import tokenizers
from commands import TINY, TINY_MEDIA, run

from mmjax import evaluate, plan, train
from mmjax.cli import COMMANDS
from mmjax.config import ChatFormat, Config, FunctionSource, MessagesSource, WebDatasetSource
from mmjax.config.loading import from_json, load, to_json
from mmjax.config.model import module_names
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.data_change import Segment
from mmjax.data.plan.placement import Shape, Topology
from mmjax.data.plan.step_plan import RankLayout
from mmjax.disk import user_config
from mmjax.errors import UserError
from mmjax.runtime.run_dir import AllowedChanges, RunFolder, claim
from mmjax.runtime.run_trust import SIGNATURES, is_own, statements_of
from mmjax.training.run_data import Launch, append_launch

EVIL = "import pathlib\npathlib.Path({!r}).touch()\ndef few(split, **more): ...\ndef scale(*args): ...\n"
# A line per command that its folder of a run is given to: all others get it in their config's
# place.
WORDS: dict[str, list[list[str]]] = {
    "train": [["--resume"], ["--resume", "training.steps=9"]],
    "generate": [["What is it?"]],
    "evaluate": [[], ["--split=validation"], ["--step=1"]],
    "export": [["OUT"], ["OUT", "--adapter"]],
    "report": [["--out=OUT.html"]],
    "studio": [["--port=0"]],
    "inspect": [["--step=1"], ["--ids"]],
}
EXECUTING = (
    "train",
    "generate",
    "chat",
    "evaluate",
    "studio",
    "inspect",
)  # which say that they would


def made(folder: Path, source: str = TINY, **changes: object) -> Config:
    """A run that begins in a folder, of this user."""
    config = replace(load(source), run=str(folder))
    config = replace(config, data=replace(config.data, **changes)) if changes else config
    with claim(config, Path(source), "new"):
        pass
    return config


def served_by(command: str) -> dict[str, WebDatasetSource]:
    return {"shards": WebDatasetSource(command, validation=command, test=command, window=4)}


def of_others(folder: Path, marker: Path, name: str) -> None:
    """Make a run in a folder say what executes: as another user's would, that was unpacked here."""
    config = made(folder)
    (folder / SIGNATURES).unlink()
    (folder / "config.py").write_text(EVIL.format(str(marker)))
    if name == "pipe":
        chat = folder.parent / "chat"
        chat.mkdir(exist_ok=True)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")  # by characters
        tokenizer.save(str(chat / "tokenizer.json"))
        template = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        (chat / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        data = replace(
            config.data, sources=served_by(f"pipe:touch {marker}"), chat=ChatFormat(str(chat))
        )
        config = replace(config, data=data)
    if name == "callback":
        config = load(TINY_MEDIA)
        eyes = config.model.encoders["vision"]
        callbacks = replace(eyes.callbacks, after_connector="config:scale")
        encoders = {**config.model.encoders, "vision": replace(eyes, callbacks=callbacks)}
        config = replace(config, model=replace(config.model, encoders=encoders))
    config = replace(config, run=str(folder))
    (folder / "config.json").write_text(to_json(config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
    rows = (1,) * len(module_names(config.model))
    launch = Launch(
        first=0,
        began="2026-01-01T00:00:00+0000",
        version="0.1.0",
        processes=1,
        devices="1 x cpu",
        samples=1,
        index="index",
        fingerprint="",
        files={name: [] for name in config.data.sources},
        weights=[1.0] * len(config.data.sources),
        budget=Budget(rows, rows, 1.0, 1),
        layout=RankLayout(Topology(), rows, (Shape(rows, (0,) * (len(rows) - 1)),)),
        segment=Segment(),
        config=config,
    )
    append_launch(folder / "history.jsonl", launch)
    (folder / "index" / "index").mkdir(parents=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_executes_what_a_run_of_others_says(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def main(words: Sequence[str]) -> object:
        try:
            return import_module(f"mmjax.{command}").main(words)
        except SystemExit as ended:  # by argparse, where a folder has no place
            return ended.code

    marker = tmp_path / "PWNED"
    # which takes seconds
    for name in ("pipe", "function", "callback")[: 1 if command == "doctor" else 3]:
        folder = tmp_path / "runs" / name
        of_others(folder, marker, name)
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for words in WORDS.get(command, [[]]):
            first = (
                [words[0], folder, *words[1:]] if words[:1] == ["--resume"] else [folder, *words]
            )
            ended = run(
                capsys, main, *(str(w).replace("OUT", str(tmp_path / "out")) for w in first)
            )
            assert not marker.exists(), (name, words)
            if command in EXECUTING:
                assert ended.code == 2, ended
                assert f"{folder}: you did not make this run" in ended.err
                assert "say --trust to do as it says" in ended.err
                assert "Traceback" not in ended.err
            if command == "report":
                assert "you did not make this run" in (tmp_path / "out.html").read_text()
        assert before == {
            path.name: path.read_bytes() for path in folder.iterdir() if path.name in before
        }


@pytest.mark.parametrize("name", ["pipe", "function"])
def test_what_the_user_trusts_or_types_is_executed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "PWNED"
    of_others(tmp_path / "run", marker, name)
    run(capsys, evaluate.main, tmp_path / "run", "--trust")
    assert marker.exists()
    assert not (tmp_path / "run" / SIGNATURES).exists()
    if name == "pipe":
        marker.unlink()
        words = [
            f"data.sources.shards.{key}=pipe:touch {tmp_path}/typed"
            for key in ("path", "validation", "test")
        ]
        ended = run(capsys, evaluate.main, tmp_path / "run", *words[:2])
        assert "data.sources.shards.test='pipe:touch" in ended.err
        run(capsys, evaluate.main, tmp_path / "run", *words)
        assert (tmp_path / "typed").exists()
        assert not marker.exists()
    with pytest.raises(UserError, match="you did not make this run"):
        RunFolder(tmp_path / "run").read_config()


def test_a_run_is_this_users_by_its_key_wherever_it_lies_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = made(folder, TINY_MEDIA, pool="ray://here:1")
    assert any(isinstance(source, FunctionSource) for source in config.data.sources.values())
    assert RunFolder(folder).read_config() == config
    assert RunFolder(folder).programs == tmp_path / ".programs"
    assert (user_config() / "key").stat().st_mode & 0o77 == 0
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(folder, "unpacked")
    with tarfile.open(tmp_path / "run.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    folder.rename(tmp_path / "moved")
    for copy in ("unpacked", "moved"):
        assert RunFolder(tmp_path / copy).read_config() == config
    harmless = to_json(config).replace('"seed": 0', '"seed": 1')
    (tmp_path / "moved" / "config.json").write_text(harmless)
    assert RunFolder(tmp_path / "moved").read_config() == from_json(harmless)
    (tmp_path / "moved" / "tiny.py").write_text("# changed\n")
    with pytest.raises(UserError, match=r"its tiny\.py would be executed"):
        RunFolder(tmp_path / "moved").read_config()
    (tmp_path / "unpacked" / "config.json").write_text(
        to_json(config).replace("ray://here:1", "ray://there:1")
    )
    with pytest.raises(
        UserError, match=r"its config says data\.pool='ray://there:1', which would be executed"
    ):
        RunFolder(tmp_path / "unpacked").read_config()
    (tmp_path / "unpacked" / "config.json").write_text(to_json(config))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    for other in ("without a key", "with another"):
        with pytest.raises(UserError, match="you did not make this run"):
            RunFolder(tmp_path / "unpacked").read_config()
        assert not is_own(tmp_path / "unpacked")
        assert RunFolder(tmp_path / "unpacked").programs.parent != tmp_path
        made(tmp_path / other)
    assert RunFolder(tmp_path / other).read_config()


def test_where_the_home_cannot_be_written_runs_begin_and_ask_for_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    config = made(tmp_path / "run")
    with pytest.raises(UserError, match="you did not make this run"):
        RunFolder(tmp_path / "run").read_config()
    assert RunFolder(tmp_path / "run", trusted=True).read_config() == config


def test_a_run_goes_on_by_its_config_file_where_its_copy_is_the_same_and_else_with_trust(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    config = made(folder)
    (folder / SIGNATURES).unlink()  # as of a version before
    with claim(config, Path(TINY), "resume"):
        pass
    assert RunFolder(folder).read_config() == config
    (folder / SIGNATURES).unlink()
    (folder / "config.py").write_text("raise SystemExit\n")
    with (
        pytest.raises(UserError, match=r"its config\.py would be executed"),
        claim(config, Path(TINY), "resume"),
    ):
        pass
    assert not (folder / SIGNATURES).exists()
    with claim(config, Path(TINY), "resume", AllowedChanges(trust=True)):
        pass
    assert RunFolder(folder).read_config() == config


def test_whatever_a_config_would_execute_or_fetch_is_known(tmp_path: Path) -> None:
    config = load(TINY)
    known = {statement.key for statement in statements_of(config)}
    assert known == {"data.sources.digits.function"} or len(known) == 1

    def added(**changes: object) -> dict[str, str]:
        changed = replace(config, data=replace(config.data, **changes))
        return {
            s.key.removeprefix("data."): s.verb
            for s in statements_of(changed)
            if s.key not in known
        }

    here = tmp_path / "d.jsonl"
    here.touch()
    for path, verb in (
        ("pipe:cat x.tar", "executed"),
        ("pipe:cat x.tar\n", "executed"),
        ("http://127.0.0.1/d.jsonl", "fetched"),
        ("simplecache::s3://b/d.jsonl", "fetched"),
        ("hf://datasets/a/b/c.jsonl", "fetched"),
        ("someone/data", "fetched"),
    ):
        for field in ("path", "validation", "test"):
            source = MessagesSource(**{"path": str(here), field: path})
            assert added(sources={"a": source}) == {f"sources.a.{field}": verb}
    for field in ("images", "audio", "videos"):
        source = MessagesSource(str(here), **{field: "http://x/y"})
        assert added(sources={"a": source}) == {f"sources.a.{field}": "fetched"}
    assert added(sources={"a": MessagesSource(str(here), outside="allow")}) == {
        "sources.a.outside": "fetched"
    }
    assert added(sources={"a": MessagesSource(str(here))}) == {}
    assert added(chat=ChatFormat("someone/model")) == {"chat.folder": "fetched"}
    assert added(chat=ChatFormat(str(tmp_path))) == {}
    assert added(pool="10.0.0.1:6379") == {"pool": "executed"}
    compiled = replace(config, compiler={"xla_gpu_cuda_data_dir": "/evil"})
    assert {s.key for s in statements_of(compiled)} - known == {"compiler.xla_gpu_cuda_data_dir"}
    arguments = replace(
        config, data=replace(config.data, sources={"a": FunctionSource("config:few", {"n": 2})})
    )
    assert [(s.key, s.text) for s in statements_of(arguments)] == [
        ("data.sources.a.function", 'config:few {"n": 2}')
    ]


def test_a_plan_of_others_executes_nothing_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    assert (
        run(
            capsys, plan.main, TINY, "cluster=h100x1x1", "data.pool=ray://mine:1", f"--out={path}"
        ).code
        == 0
    )
    assert run(capsys, train.main, TINY, f"plan={path}", "--show").code == 0
    own = path.read_text()
    for text in (
        own.replace("ray://mine:1", "ray://others:1"),
        own.partition(',\n  "signature"')[0] + "}",
        own.replace('"settings": {', '"settings": {"seed": 1,'),
    ):
        path.write_text(text)
        ended = run(capsys, train.main, TINY, f"plan={path}", "--show")
        assert (
            f"plan={path}: you did not make this plan, or it was changed since: it says data.pool='ray:"
            in ended.err
        )
        assert run(capsys, train.main, TINY, f"plan={path}", "--show", "data.pool=local").code == 0
        assert run(capsys, train.main, TINY, f"plan={path}", "--show", "--trust").code == 0
    path.write_text(
        own.partition(',\n  "signature"')[0].replace('"data.pool": "ray://mine:1"', '"seed": 1')
        + "}"
    )
    assert run(capsys, train.main, TINY, f"plan={path}", "--show").code == 0
