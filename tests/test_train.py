"""`python -m mmjax.train` as a user runs it: what is seen, what is written, and going on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import LATE, MEDIA_WORDS, TINY, TINY_MEDIA, files, media_run, run
from restarts import last
from started import begin, environment, finish, start, wait_until, without_activities

from mmjax import __version__, train
from mmjax.config.loading import default_config, describe_with_meanings, load, shipped_configs
from mmjax.disk import verify_checksum, with_checksum
from mmjax.distributed.watchdog import Watchdog
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder, claim, run_folder_of
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings
from mmjax.training.announce import loader_verdict
from mmjax.training.loop import Trainer
from mmjax.training.signals import StopFlags

STEPS = 6


@pytest.fixture(scope="module")
def trained(runs) -> tuple[Path, str]:
    """A whole run, and what it printed."""
    return media_run(runs)


@pytest.fixture
def stopped(trained) -> Iterator[Path]:
    """The same run, stopped after checkpoint 2: as it was when step 5 was written down and checkpoint 4 not whole."""
    folder = shutil.copytree(trained[0], trained[0].with_name("stopped"))
    shutil.rmtree(folder / "checkpoints" / "4")
    shutil.rmtree(folder / "checkpoints" / "6")
    (folder / "test.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    torn = [line for line in lines if json.loads(line)["step"] <= 5] + [lines[-1][:20]]
    (folder / "metrics.jsonl").write_text("\n".join(torn))
    yield folder
    shutil.rmtree(folder)


def records(folder: Path) -> list[dict]:
    """What metrics.jsonl holds."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The loss after every number of updates."""
    return {r["step"]: r["loss"] for r in records(folder) if "loss" in r}


@pytest.mark.exhaustive
def test_a_run_in_little_memory_computes_again_and_learns_the_same(trained, capsys, tmp_path):
    words = ("mesh.memory=0.0017", f"run={tmp_path / 'run'}")
    ended = run(capsys, train.main, TINY_MEDIA, *MEDIA_WORDS, *words)
    assert ended.code == 0, ended.err
    assert "of 1.7 MB a device: " in ended.out
    assert "remat of llm: " in ended.out
    found, wanted = losses(tmp_path / "run"), losses(trained[0])
    assert list(found) == list(wanted)
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-4)


@pytest.mark.exhaustive
def test_with_profile_layers_are_timed_and_the_compiler_says_what_fits(capsys, tmp_path):
    words = ("training.steps=4", "training.evaluate_every=0", "training.checkpoint_every=0")
    wanted = run(capsys, train.main, TINY, f"run={tmp_path / 'as it is'}", *words)
    ended = run(
        capsys,
        train.main,
        TINY,
        f"run={tmp_path / 'run'}",
        *words,
        "--profile",
        "mesh.memory=0.0025",
    )
    assert (wanted.code, ended.code) == (0, 0), ended.err
    assert "profile: timing layers of llm" in ended.err
    found = re.search(r"predicted of 2\.5 MB a device.*\n +(\d\.\d) MB by the compiler", ended.out)
    assert float(found[1]) <= 2.5
    of_runs = (losses(tmp_path / name) for name in ("run", "as it is"))
    np.testing.assert_allclose(*(list(of.values()) for of in of_runs), rtol=1e-4)


# ----------------------------------------------------------------------------------------------
# what is to be seen


def test_the_first_lines_say_what_will_run(trained):
    _, out = trained
    for text in (
        f"mmjax {__version__}  tiny_media: ",
        "vision.connector",
        "on     8 x cpu (data 8)",
        "a step has about",
        "the run has 6 steps",
    ):
        assert text in out
    table = out[out.index("module ") :].splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["llm", "vision", "audio"]
    assert "programs in" in out


def test_each_evaluation_shows_scores_and_one_answered_sample(trained):
    _, out = trained
    at = out.index("step 3  validation")
    scores, answer = out[at:].splitlines()[:2]
    assert any(family in scores for family in ("image", "audio", "mixed", "text"))
    assert "  ->  '" in answer


def test_a_step_is_settled_and_written_down_before_the_evaluation_after_it(trained):
    """Else its seconds, and so tokens per second and MFU, would be those of the evaluation's end."""
    kinds = [
        (r["step"], "loss" if "loss" in r else "validation")
        for r in records(trained[0])
        if r["step"] == 3
    ]
    assert kinds == [(3, "loss"), (3, "validation")]


def test_it_says_whether_the_loader_keeps_up(trained):
    assert "loading a step takes" in trained[1]


def test_a_loader_that_large_photos_hold_up_is_told_to_shrink_them_once():
    assert "--shrink FOLDER" in loader_verdict(1.0, 2, 0.02, pixels=12e6)
    assert "half of the images have 12 megapixels or more" in loader_verdict(
        1.0, 2, 0.02, pixels=12e6
    )
    assert "--shrink" not in loader_verdict(1.0, 2, 0.02, pixels=4e5)
    assert "--shrink" not in loader_verdict(0.01, 2, 0.02, pixels=12e6)


def test_the_end_says_where_the_run_is_and_what_to_try_next(trained):
    folder, out = trained
    ending = out[out.index("exact match on 24 questions of the test split") :]
    assert f"run    {folder}" in ending
    assert (
        f"python -m mmjax.evaluate {min(os.path.relpath(folder), str(folder), key=len)}" in ending
    )
    assert "0 programs compiled after the start" in ending


def test_without_a_terminal_lines_are_plain(trained):
    _, out = trained
    assert "\x1b" not in out
    assert re.search(r"step 6/6  epoch \d\.\d\d  loss \d.* fill llm \S+ vision \S+ audio ", out)


def test_show_prints_every_key_and_stops(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run(capsys, train.main, "--show", "training.steps=70")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == describe_with_meanings(load(default_config(), ["training.steps=70"])) + "\n"
    assert not list(tmp_path.iterdir())


def test_help_lists_the_shipped_configs_with_what_each_is(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    out = capsys.readouterr().out
    for name, about in shipped_configs().items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", out, re.M)


def test_show_to_a_reader_that_leaves_is_quiet(tmp_path):
    process = start("mmjax.train", "--show", cwd=tmp_path)
    process.stdout.close()
    assert all("loading libraries" in line for line in process.stderr.read().splitlines())
    assert process.wait(480) == 128 + signal.SIGPIPE


# -------------------------------------------------------------------------------------------------
# what is written


def test_every_step_is_measured(trained):
    steps = [r for r in records(trained[0]) if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    names = {
        "loss",
        "loss/few",
        "gradient_norm",
        "samples/s",
        "tokens/s",
        "useful/budget",
        "mfu",
        "programs_compiled",
    }
    names |= {
        f"learning_rate/{m}"
        for m in ("llm", "vision", "vision.connector", "audio", "audio.connector")
    }
    names |= {f"tokens/s/{modality}" for modality in ("text", "vision", "audio")}
    phases = (
        "fill",
        "pad_ratio",
        "dist_ratio",
        "dist_ratio_before",
        "max_over_mean",
        "max_over_mean_before",
    )
    names |= {f"{what}/{m}" for what in phases for m in ("llm", "vision", "audio")}
    names |= {
        f"all_to_all{what}bytes/{m}" for what in ("_", "_useful_") for m in ("vision", "audio")
    }
    names |= {
        "straggler_wait",
        "straggler_wait_before",
        "inter_node_share",
        "plan_ms",
        "data_wait_share",
    }
    names |= {f"seconds/{part}" for part in ("step", "data_wait", "load")}
    for record in steps:
        assert names <= set(record)
        assert all(np.isfinite(record[name]) for name in names)
        assert record["seconds/data_wait"] <= record["seconds/step"]
    assert steps[0]["loss"] > steps[-1]["loss"]


def test_waits_for_late_batches_are_counted_whole(trained):
    waited = sum(r["seconds/data_wait"] for r in records(trained[0]) if "loss" in r)
    assert waited >= LATE * (STEPS // 2)


def test_nothing_is_compiled_after_the_start(trained):
    assert [r["programs_compiled"] for r in records(trained[0]) if "loss" in r] == [0] * STEPS


def test_tensorboard_has_the_same_numbers(trained):
    events = b"".join(p.read_bytes() for p in (trained[0] / "tensorboard").glob("events.*"))
    assert events.count(b"gradient_norm") == STEPS
    assert b"validation/exact_match" in events


def test_scores_of_the_test_split_are_kept(trained):
    folder, _ = trained
    scores = json.loads((folder / "test.json").read_text())
    last = records(folder)[-1]
    assert scores["step"] == last["step"] == STEPS
    assert {
        f"test/{k}": pytest.approx(v) for k, v in scores.items() if k != "step"
    }.items() <= last.items()


# ------------------------------------------------------------------------------------------
# stopping and going on


def test_a_stopped_run_goes_on_to_the_same_bits(trained, stopped, capsys):
    ended = run(capsys, train.main, TINY_MEDIA, "--resume", f"run={stopped}", *MEDIA_WORDS)
    assert ended.code == 0, ended
    assert f"resumed {stopped} at step 2" in ended.out
    assert losses(stopped) == losses(trained[0])
    counts = Counter((r["step"], "loss" in r, "test/samples" in r) for r in records(stopped))
    assert set(counts.values()) == {1}
    assert sum("validation/samples" in r for r in records(stopped)) == 1


@pytest.mark.exhaustive
def test_a_resumed_run_keeps_what_was_decided_of_its_memory_whatever_would_be_now(
    trained, stopped, capsys
):
    fit = stopped / "fit.json"
    kept = verify_checksum(json.loads(fit.read_text()))
    assert set(kept["policies"]["llm"]) == {"none"}
    fit.write_text(
        json.dumps(with_checksum(kept | {"policies": kept["policies"] | {"llm": ["full", "none"]}}))
    )
    ended = run(capsys, train.main, TINY_MEDIA, "--resume", f"run={stopped}", *MEDIA_WORDS)
    assert ended.code == 0, ended
    assert re.search(r"remat of llm: 1 full, 1 none\n", ended.out)
    np.testing.assert_allclose(
        list(losses(stopped).values()), list(losses(trained[0]).values()), rtol=1e-5
    )
    assert json.loads(fit.read_text())["policies"]["llm"] == ["full", "none"]


def test_numbers_that_are_not_finite_stop_the_run_before_they_are_saved(capsys, tmp_path):
    ended = run(
        capsys,
        train.main,
        TINY,
        f"run={tmp_path / 'run'}",
        "optimizer.learning_rate=1e30",
        "training.steps=6",
    )
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert "is not a finite number" in line
    assert "few[" in line
    saved = sorted((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    assert len(saved) <= 1, "only what was finite is kept"


@pytest.mark.exhaustive
def test_a_run_of_eight_devices_goes_on_with_four(runs):
    eight = runs / "eight"
    words = ("training.keep=3", "training.evaluate_every=0")
    wide = train.train(load(TINY, [f"run={eight}", *words]), Path(TINY))
    four = shutil.copytree(eight, eight.with_name("four"))
    for step in (4, 6):
        shutil.rmtree(four / "checkpoints" / str(step))
    config = load(TINY, [f"run={four}", *words, "batch.balance=none"])
    narrow = train.train(config, Path(TINY), "resume", jax.devices()[:4])
    assert (wide.mesh.size, narrow.mesh.size) == (8, 4)
    here, there = losses(four), losses(eight)
    assert here.keys() == there.keys()
    assert all(abs(here[step] - there[step]) <= 1e-4 * there[step] for step in there)
    for step in range(STEPS):
        assert (
            narrow.loader.plan(step).samples().tolist() == wide.loader.plan(step).samples().tolist()
        )


@pytest.mark.exhaustive
def test_auto_starts_and_then_resumes_and_a_finished_run_stays_as_it_is(trained, capsys):
    folder = trained[0].with_name("auto")
    words = (
        "--resume=auto",
        f"run={folder}",
        "training.steps=2",
        "training.evaluate_every=0",
        TINY,
    )
    assert run(capsys, train.main, *words).code == 0
    kept = {name: text for name, text in files(folder).items() if "tensorboard" not in name}
    for again in (
        words,
        ("--resume", folder),
        ("--resume", f"run={folder}"),
        ("--resume=auto", folder),
    ):
        ended = run(capsys, train.main, *again)
        assert ended.code == 0
        assert "all 2 steps are done" in ended.out
        assert {
            name: text for name, text in files(folder).items() if "tensorboard" not in name
        } == kept


# The config that a run goes on with is looked at by --show.


def shown(capsys, *words: object) -> dict[str, str]:
    """Key and value of what `--show` prints."""
    ended = run(capsys, train.main, "--show", *words)
    assert (ended.code, ended.err) == (0, "")
    return dict(re.findall(r"^(\S+) += (\S+)", ended.out, re.M))


def test_a_run_is_resumed_with_its_own_config_and_changes_on_top(capsys, tmp_path, monkeypatch):
    own = load(TINY, ["seed=5", "training.steps=40", "run=elsewhere"])
    (tmp_path / "mine").mkdir()
    RunFolder(tmp_path / "mine").write_config(own)
    monkeypatch.chdir(tmp_path)
    for words in (["--resume", "mine"], ["mine", "--resume=auto"], ["run=mine", "--resume"]):
        found = shown(capsys, *words, "training.steps=50")
        assert (found["name"], found["seed"], found["training.steps"]) == ("tiny", "5", "50")
        assert found["run"] == str(tmp_path / "mine")
    # a config that is named goes before the run's own
    found = shown(capsys, TINY, "--resume", "run=mine")
    assert (found["seed"], found["training.steps"]) == ("0", "6")
    assert shown(capsys, "--resume")["name"] == "tiny_omni"
    assert shown(capsys, "run=mine")["name"] == "tiny_omni"
    (tmp_path / "tiny_vlm").mkdir()
    # a shipped config's name stays one
    assert shown(capsys, "--resume", "tiny_vlm")["name"] == "tiny_vlm"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["mine"],
            "mine is a folder, not a config; to go on with the run in it, say --resume mine",
        ),
        (["--resume", "runs/frist"], "there is no run runs/frist: did you mean 'runs/first'?"),
        (
            ["--resume", "empty"],
            "holds no run (no config.json); give the folder that mmjax.train printed",
        ),
        (
            ["--resume", "mine", "run=other"],
            "--resume mine and run=other both name a run; leave one of them out",
        ),
        (
            ["--resume", "mine", "seed=6"],
            "seed: 5 -> 6. Say these values as they were, or leave out the config",
        ),
    ],
)
def test_a_run_that_cannot_be_resumed_so_is_one_line(words, message, capsys, tmp_path, monkeypatch):
    for name in ("mine", "empty", "runs/first"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("mine", "runs/first"):
        RunFolder(tmp_path / name).write_config(load(TINY, ["seed=5"]))
    monkeypatch.chdir(tmp_path)
    ended = run(capsys, train.main, *words)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert message in ended.err


def test_a_config_that_differs_in_much_is_told_in_few_words(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    RunFolder(tmp_path / "mine").write_config(load(TINY))
    ended = run(capsys, train.main, "tiny_omni", "--resume", f"run={tmp_path / 'mine'}")
    assert ended.code == 2
    listed, _, remedy = ended.err.partition(". Say these values")
    assert listed.count(" -> ") == 4
    assert re.search(r"; and \d\d more$", listed)
    assert f"--resume {tmp_path / 'mine'} goes on with its own" in remedy
    assert "--new-data --change batch --change model" in remedy


@pytest.mark.exhaustive
def test_a_finished_run_goes_on_where_more_steps_are_wanted(runs, capsys):
    words = (TINY, f"run={runs / 'longer'}", "training.evaluate_every=0")
    assert run(capsys, train.main, *words, "training.steps=2").code == 0
    assert run(capsys, train.main, "--resume", *words, "training.steps=3").code == 0
    assert sorted(losses(runs / "longer")) == [1, 2, 3]
    assert checkpoint_step(runs / "longer" / "checkpoints") == 3


@pytest.mark.exhaustive
def test_a_run_can_start_from_anothers_parameters_alone(trained, monkeypatch):
    source = trained[0]
    monkeypatch.chdir(source.parent)
    words = (
        f"run={source.with_name('begun')}",
        f"init_from={source.name}",
        "optimizer=muon",
        *MEDIA_WORDS,
    )
    config = load(TINY_MEDIA, words)
    folder = run_folder_of(config)
    with claim(config, Path(TINY_MEDIA), "new"):
        watchdog = Watchdog(config.training.watch, folder.stacks)
        trainer = Trainer(config, folder, jax.devices(), watchdog, StopFlags())
        state = trainer.init_state()
        trainer.close()
    assert trainer.first_step == int(state.stages[0].step) == 0
    executor = trainer.executor
    layouts = parameter_shardings(executor.model, trainer.mesh, executor.rules)
    saved = restore_parameters(RunFolder(source).checkpoints, STEPS, executor.model, layouts)
    jax.tree.map(np.testing.assert_array_equal, executor.parameters(state), saved)


# ------------------------------------------------------------------------------------------------
# whole processes


def living(leader: int) -> list[str]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(stat.parent.name)
    return found


LONG = (
    "training.steps=100000",
    "training.checkpoint_every=10",
    "training.evaluate_every=0",
    "data.workers=2",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stop", "code", "told"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGKILL, -9, "")]
)
def test_a_run_that_is_interrupted_or_killed_leaves_a_whole_checkpoint_and_no_workers(
    stop, code, told, trained, capsys
):
    folder = trained[0].with_name(stop.name)
    process = start("mmjax.train", TINY, f"run={folder}", *LONG)
    wait_until(lambda: last(folder) >= 25, process)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as Ctrl-C does: the workers get it too
    else:
        process.kill()
    ended = finish(process, 60)  # their end too: they hold its stderr
    assert ended.code == code
    assert not told or ended.err == told
    wait_until(lambda: living(process.pid) == [], seconds=10)
    step = checkpoint_step(folder / "checkpoints")
    assert step >= 10
    words = (f"training.steps={step + 2}", "training.evaluate_every=0", "schedule.warmup=1")
    resumed = run(capsys, train.main, TINY, "--resume", f"run={folder}", *words)
    assert resumed.code == 0, resumed
    assert sorted(losses(folder)) == list(range(1, step + 3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["loading libraries", "opening", "compiling"])
def test_five_interrupts_while_a_run_starts_end_it_in_a_line_and_leave_nothing(when, tmp_path):
    """Garbage collection runs a callback of JAX's, out of which Python cannot raise: the run used to go on."""
    for attempt in range(3):
        folder = tmp_path / f"run{attempt}"
        process = start("mmjax.train", TINY_MEDIA, f"run={folder}", *LONG)
        if when == "loading libraries":
            assert "loading" in process.stderr.readline()
        else:
            wait_until(lambda folder=folder: (folder / "config.json").exists(), process)
        if when == "compiling":
            assert process.stdout.readline()
        for _ in range(5):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05 * attempt)
        ended = finish(process, 120)
        assert ended.code == 130, ended
        lines = ended.err.splitlines()
        assert lines.pop(-1 if lines[-1] == "interrupted" else 0) == "interrupted"
        assert all(line.startswith("interrupted already") for line in lines), ended.err
        wait_until(lambda process=process: living(process.pid) == [], seconds=10)


SCRIPT = """
from pathlib import Path
from mmjax.config.loading import load
from mmjax.train import train
words = ["run={run}", "training.steps=2", "training.evaluate_every=0", "schedule.warmup=1", "data.workers=1"]
train(load(Path("{tiny}"), words), Path("{tiny}"))
"""


@pytest.mark.exhaustive
def test_a_script_that_trains_at_its_top_level_is_told_where_to_put_that(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(run=tmp_path / "run", tiny=TINY))
    ended = finish(begin([sys.executable, str(script)], environment(1)))
    assert ended.code == 1
    assert 'put train(..) there under if __name__ == "__main__":' in ended.err
    assert "UserError: a data worker ended before step 0: " in ended.err


@pytest.mark.exhaustive
def test_a_second_start_compiles_nothing_and_a_terminal_gets_a_bar(tmp_path):
    words = ("mmjax.train", TINY, "training.steps=8", "--overwrite", f"run={tmp_path / 'run'}")
    first = finish(start(*words))
    assert (first.code, first.err) == (0, "")
    assert "came from the cache" not in first.out
    assert "\x1b" not in first.out
    screen, terminal = pty.openpty()
    process = start(*words, stdout=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's other end is gone
        while data := os.read(screen, 1 << 16):
            shown += data
    assert process.wait(480) == 0
    assert without_activities(process.stderr.read()) == ""
    assert b"compiled 0 programs" in shown
    assert b"8/8 " in shown
    assert b"\x1b[?25h" in shown  # the cursor is back
