"""What a person gets wrong: one line with the place and the remedy, exit code 2, and nothing of theirs lost."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import TINY, TINY_MEDIA, files, run
from started import finish, start

from mmjax import evaluate, inspect, train
from mmjax.data.plan import budget, fit_budget
from mmjax.errors import UserError
from mmjax.runtime.devices import choose_devices
from mmjax.runtime.run_dir import RunFolder
from mmjax.training import run_checkpoints, run_data
from mmjax.training.run_data import launch_of_step


@pytest.fixture(scope="module")
def finished(runs) -> Path:
    """A run of four steps with checkpoints at 2 and 4."""
    folder = runs / "finished"
    train.main([TINY, f"run={folder}", "training.steps=4", "training.evaluate_every=0"])
    return folder


@pytest.fixture
def a_run(finished) -> Iterator[Path]:
    """A copy to ruin."""
    copy = finished.with_name("a_run")
    yield Path(shutil.copytree(finished, copy))
    shutil.rmtree(copy)


def refused(capsys, main, *words) -> str:
    """The one line on stderr of a command that ends with code 2."""
    ended = run(capsys, main, *words)
    assert ended.code == 2, ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1, ended.err
    assert "Traceback" not in ended.err + ended.out
    return ended.err


FAULTS = {
    "a mistyped key": (["batch.row.llm=2"], "batch.row", "batch.rows"),
    "an unknown key": (["training.turbo=true"], "training.turbo", ""),
    "a mistyped key deep inside": (["model.llm.layer=2"], "model.llm.layer", "model.llm.layers"),
    "a wrong type": (["training.steps=many"], "training.steps", "expected int"),
    "a wrong choice": (["training.precision=float16"], "training.precision", "bfloat16"),
    "a wrong kind": (["optimizer=adam"], "optimizer", "adamw"),
    "no value": (["training.steps"], "training.steps", "="),
    "zero steps": (["training.steps=0"], "training.steps=0", "at least 1"),
    "a warm-up longer than the run": (
        ["training.steps=1"],
        "schedule.warmup",
        "set schedule.warmup=",
    ),
    "weights that sum to zero": (
        ["data.sources.few.weight=0"],
        "data.sources.few.weight",
        "above 0",
    ),
    "a mesh of more devices than there are": (["mesh.data=16"], "16 devices", "-1"),
    "a mesh that does not divide the devices": (["mesh.fsdp=3"], "mesh.data=-1", "8 devices"),
    "a mesh that cuts heads": (["mesh.tensor=4", "mesh.data=2"], "model.llm.kv_heads=2", "divisor"),
    "rows whose tokens the mesh does not divide": (
        ["mesh.tensor=2", "mesh.data=4", "mesh.sequence_parallel=on", "batch.alignment=3"],
        "mesh.tensor=2 does not divide rows of batch.alignment=3",
        "use batch.alignment=6",
    ),
    "chunks of the loss that do not divide": (
        ["training.loss_chunks=40"],
        "training.loss_chunks=40 does not divide model.llm.vocab=43;",
        "training.loss_chunks=43",
    ),
    "no chunks of the loss": (["training.loss_chunks=-1"], "training.loss_chunks=-1", "at least 0"),
    "two free mesh axes": (["mesh.fsdp=-1"], "mesh.fsdp", "all but one"),
    "heads that do not divide": (["model.llm.heads=3"], "heads=3", "choose kv_heads from"),
    "a budget smaller than every sample": (
        ["batch.size=tokens", "batch.size.count=1"],
        "data.sources.few",
        "batch.size",
    ),
    "a source that is not there": (
        ["data.sources.few.function=config:fwe"],
        "data.sources.few.function",
        "fwe",
    ),
    "a run to start from that is not there": (
        ["init_from=runs/nothing"],
        "init_from=runs/nothing",
        "no run",
    ),
    "a device with too little memory": (
        ["mesh.memory=0.0001"],
        "the run needs",
        "do not make it fit; use more devices",
    ),
    "a device with memory for more shards": (["mesh.memory=0.0006"], "the run needs", "fits, with"),
    "no option of the compiler": (
        ["compiler.xla_no=1"],
        "compiler: XLA of JAX",
        "'xla_no'; change or leave it out",
    ),
    "memory below zero": (["mesh.memory=-1"], "mesh.memory=-1.0", "at least 0"),
    "a device that is not there": (["device=tpu"], "device=tpu", "device=auto"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_config_is_named_with_its_remedy_and_leaves_no_folder(
    fault, capsys, tmp_path
):
    lines, *expected = FAULTS[fault]
    error = refused(capsys, train.main, TINY, *lines, f"run={tmp_path / 'run'}")
    assert all(text in error for text in expected), error
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_pool_that_is_not_there_is_named_with_its_remedy_and_leaves_no_folder(capsys, tmp_path):
    error = refused(capsys, train.main, TINY, "data.pool=127.0.0.1:1", f"run={tmp_path / 'run'}")
    assert "data.pool=127.0.0.1:1: no Ray cluster can be used there" in error
    assert "set data.pool=local" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "fault", ["a mesh that cuts heads", "a run to start from that is not there", "a wrong type"]
)
@pytest.mark.parametrize("mode", ["--resume", "--overwrite", "--resume=auto"])
def test_a_fault_in_the_config_leaves_the_run_in_the_folder_to_the_byte(fault, mode, capsys, a_run):
    before = files(a_run)
    refused(capsys, train.main, TINY, mode, *FAULTS[fault][0], f"run={a_run}", "training.steps=4")
    assert files(a_run) == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny_onmi", "tiny_omni"),
        ("missing/config.py", "missing/config.py"),
        (str(Path(__file__).parent), "def config()"),
    ],
)
def test_a_config_that_is_not_there_is_named(name, expected, capsys):
    assert expected in refused(capsys, train.main, name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def config(:\n", "config.py:1: "),
        ("x = 1\n", "def config() -> Config"),
        ("import nothing_of_this_name\ndef config(): ...\n", "nothing_of_this_name"),
        ("def config():\n    return 1 / 0\n", "config.py:2: ZeroDivisionError"),
        ("def config():\n    return {}\n", "expected mmjax.config.Config"),
    ],
)
def test_a_fault_of_the_config_file_is_told_with_its_line(text, expected, capsys, tmp_path):
    (tmp_path / "config.py").write_text(text)
    assert expected in refused(capsys, train.main, tmp_path / "config.py")


def test_a_source_that_returns_something_else_is_named(capsys, tmp_path):
    text = (
        Path(TINY).read_text().replace("def few(", "def unused(")
        + "\n\ndef few(split, modalities):\n    return [split]\n"
    )
    (tmp_path / "config.py").write_text(text)
    error = refused(capsys, train.main, tmp_path / "config.py", f"run={tmp_path / 'run'}")
    assert "data.sources.few: config:few returned list, which has no" in error


# --------------------------------------------------------------------------------------------------
# run folders


def test_an_existing_run_is_not_touched(capsys, a_run):
    before = files(a_run)
    error = refused(capsys, train.main, TINY, f"run={a_run}")
    assert "--resume" in error
    assert "--overwrite" in error
    assert files(a_run) == before


def test_a_folder_that_cannot_be_written_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    error = refused(capsys, train.main, TINY, f"run={tmp_path / 'file' / 'run'}")
    assert "cannot write the run folder" in error
    assert "run=FOLDER" in error
    assert "cannot write the run folder" in refused(capsys, train.main, TINY, "run=/proc/mmjax")


def test_nothing_to_resume_is_said(capsys, tmp_path):
    assert "--resume=auto" in refused(
        capsys, train.main, TINY, "--resume", f"run={tmp_path / 'run'}"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["model.llm.layers=3"], "model.llm.layers: 2 -> 3"),
        (["data.sources.few.arguments.samples=80"], "data.sources.few.arguments.samples"),
        (["seed=1"], "seed: 0 -> 1"),
        (["training.steps=2"], "has done 4 steps already"),
    ],
)
def test_resuming_with_another_model_data_or_length_tells_the_difference(
    lines, expected, capsys, a_run
):
    before = files(a_run)
    error = refused(
        capsys, train.main, TINY, "--resume", f"run={a_run}", "training.steps=4", *lines
    )
    assert expected in error
    assert files(a_run) == before


def test_resuming_a_run_that_another_planner_has_planned_is_refused(capsys, a_run, monkeypatch):
    monkeypatch.setattr(run_checkpoints, "PLANNER", 0)
    before = files(a_run)
    error = refused(capsys, train.main, TINY, "--resume", f"run={a_run}", "training.steps=8")
    assert "was planned by another version of mmjax" in error
    assert files(a_run) == before


@pytest.mark.exhaustive
def test_a_run_that_began_before_attention_was_levelled_goes_on_with_its_rows_and_that_is_said(
    capsys, runs
):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(fit_budget, "PLANNER", 10)
        older.setattr(run_checkpoints, "PLANNER", 10)
        prices = dict.fromkeys(budget.OF_START, ()) | {"planner": 10}
        older.setattr(
            run_data,
            "make_budget",
            lambda *given: replace(fit_budget.make_budget(*given), **prices),
        )
        words = ["training.steps=2", "training.evaluate_every=0", "schedule.warmup=0"]
        assert run(capsys, train.main, TINY, f"run={runs / 'older'}", *words).code == 0
    ended = run(capsys, train.main, "--resume", str(runs / "older"), "training.steps=3")
    assert ended.code == 0, ended
    assert "rows are filled as this run began, by positions alone" in ended.out
    launch = launch_of_step(
        RunFolder(runs / "older").history, 2, RunFolder(runs / "older").due_samples
    )
    assert (launch.first, launch.budget.prices, launch.budget.planner) == (2, None, 10)
    shutil.rmtree(runs / "older")


def test_resuming_on_data_that_changed_beneath_it_is_refused(capsys, a_run):
    kept = (a_run / "config.py").read_text()
    (a_run / "config.py").write_text(kept.replace("seed=2", "seed=1"))
    before = files(a_run)
    error = refused(
        capsys, train.main, TINY, "--resume", "--trust", f"run={a_run}", "training.steps=8"
    )
    assert "was trained on other data: its files have changed since" in error
    assert "--new-data" in error
    assert "init_from=" in error
    assert {name: text for name, text in files(a_run).items() if name in before} == before


# --------------------------------------------------------------------------------------------------
# checkpoints


def tear(checkpoint: Path) -> None:
    # Nearly all of it: in a file cut in half the parameters may still be whole, and scoring them
    # right.
    torn = [path for path in (checkpoint / "state").rglob("d/*") if path.is_file()]
    assert torn
    for path in torn:
        path.write_bytes(path.read_bytes()[:64])


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def foreign(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(checkpoint, {"weights": np.ones(3)})


@pytest.mark.parametrize("damage", [tear, empty, foreign])
def test_a_torn_or_foreign_checkpoint_is_named_with_the_one_before(damage, capsys, a_run):
    damage(a_run / "checkpoints" / "4")
    before = files(a_run)
    evaluated = refused(capsys, evaluate.main, a_run)
    begun = refused(capsys, train.main, TINY, f"run={a_run.parent / 'other'}", f"init_from={a_run}")
    for error in (evaluated, begun):
        assert f"checkpoint {a_run}/checkpoints/4 cannot be used" in error
        assert "to use step 2 instead, remove it" in error
    assert files(a_run) == before
    assert not (a_run.parent / "other").exists()


def test_without_its_newest_checkpoint_a_run_goes_on_from_the_one_before(capsys, a_run):
    shutil.rmtree(a_run / "checkpoints" / "4")
    ended = run(
        capsys,
        train.main,
        TINY,
        "--resume",
        f"run={a_run}",
        "training.steps=4",
        "training.evaluate_every=0",
    )
    assert ended.code == 0
    assert f"resumed {a_run} at step 2" in ended.out


def test_another_model_cannot_start_from_a_runs_parameters(capsys, finished, tmp_path):
    error = refused(
        capsys, train.main, TINY_MEDIA, f"init_from={finished}", f"run={tmp_path / 'run'}"
    )
    assert f"init_from={finished}" in error
    assert "no parameter" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_torn_checkpoints_alone_are_one_line_for_the_whole_process(a_run):
    for step in (2, 4):
        tear(a_run / "checkpoints" / str(step))
    ended = finish(start("mmjax.train", TINY, "--resume", f"run={a_run}", "training.steps=4"))
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended
    assert "nor can the 1 before it" in ended.err


def test_a_metrics_line_that_is_not_whole_keeps_no_step_from_being_looked_at(capsys, a_run):
    metrics = a_run / "metrics.jsonl"
    metrics.write_bytes(b'\xff\n5\n{"step": 3, "lo\n' + metrics.read_bytes())
    ended = run(capsys, inspect.main, a_run, "--step", 3, "--json")
    assert ended.code == 0, ended
    assert json.loads(ended.out)["step"] == 3


def test_a_history_with_any_letter_changed_is_never_believed(a_run):
    """Only where a line's end is gone does it count as cut off, as when its process was killed."""
    folder, rng = RunFolder(a_run), random.Random(0)
    written = folder.history.read_bytes()
    whole, end = (
        launch_of_step(folder.history, 2, folder.due_samples),
        len(written) - len('"sum": "0123456789abcdef"}\n'),
    )
    folder.history.write_bytes(written + written[:300])
    assert launch_of_step(folder.history, 2, folder.due_samples) == whole
    said = []
    for _ in range(100):
        wrong, at = bytearray(written), rng.randrange(len(written))
        wrong[at] ^= 1 << rng.randrange(8)
        folder.history.write_bytes(wrong)
        try:
            assert launch_of_step(folder.history, 2, folder.due_samples) is None
            assert at >= end
        except UserError as error:
            said.append(str(error))
    assert len(said) > 90
    assert all("is not what was written; restore that file" in line for line in said)


# --------------------------------------------------------------------------------------------------
# evaluation


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--swap=vision"], "names no encoder"),
        (["model.llm.layer=2"], "model.llm.layers"),
        (["model.llm.mlp_width=64"], "has shape"),
        (["device=tpu"], "device=auto"),
    ],
)
def test_a_fault_in_a_question_to_evaluate_is_named(words, expected, capsys, a_run):
    before = files(a_run)
    assert expected in refused(capsys, evaluate.main, a_run, *words)
    assert files(a_run) == before


def test_a_folder_without_a_run_or_with_a_torn_config_is_named(capsys, a_run, tmp_path):
    assert "is no folder; give a run's" in refused(capsys, evaluate.main, tmp_path / "nothing")
    assert "holds neither a run nor" in refused(capsys, evaluate.main, tmp_path)
    config = json.loads((a_run / "config.json").read_text())
    (a_run / "config.json").write_text(json.dumps(config | {"sed": 1}))
    assert f"{a_run}/config.json" in refused(capsys, evaluate.main, a_run)
    (a_run / "config.json").write_text('{"name": ')
    assert f"{a_run}/config.json" in refused(capsys, train.main, TINY, "--resume", f"run={a_run}")


# --------------------------------------------------------------------------------------------------
# devices


@pytest.fixture
def no_platform_said() -> Iterator[None]:
    """As on a machine where nobody set JAX_PLATFORMS."""
    said = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", said)


@pytest.mark.usefixtures("no_platform_said")
def test_a_gpu_that_jax_cannot_use_stops_with_the_install_line(tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module")
    with pytest.raises(UserError, match=r'pip install "mmjax\[cuda13\]".*device=cpu'):
        choose_devices("auto", driver)
    assert choose_devices("cpu", driver) == jax.devices("cpu")
    assert choose_devices("auto", tmp_path / "no driver") == jax.devices()


def test_saying_cpu_to_jax_is_to_mean_it(tmp_path):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module")
    assert jax.config.jax_platforms == "cpu"
    assert choose_devices("auto", driver) == jax.devices()
