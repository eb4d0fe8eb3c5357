"""The log of a run goes on where its checkpoint is, whatever a killed process or bad storage has left in it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, run
from started import ROOT, wait_until

from mmjax import train
from mmjax.config import Config
from mmjax.config.loading import load
from mmjax.errors import UserError
from mmjax.runtime.run_dir import logged_records
from mmjax.training import trackers
from mmjax.training.metrics_log import MetricsLog

ODD = [
    "half a li",
    "[1]",
    '{"step": "x"}',
    '{"step": ' + "9" * 400 + "}",
    "[" * 100_000,
    '{"step": NaN}',
    "\xff",
]


@pytest.mark.parametrize("line", ODD)
def test_what_is_no_record_is_dropped_and_steps_before_the_checkpoint_stay(
    line: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    path.write_text("\n".join([*records[:2], line, records[2], ""]), "latin-1")
    assert [record["step"] for record in logged_records(path)] == [1, 2, 3]
    log = MetricsLog(path, 2)
    log.write(3, {"loss": 2.0})
    log.close()
    assert [json.loads(kept)["step"] for kept in path.read_text().splitlines()] == [1, 2, 3]


def test_a_folder_in_the_place_of_the_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl is a folder.*remove it"):
        MetricsLog(tmp_path / "metrics.jsonl", 0)


def tracked(**projects: str) -> Config:
    """A config whose metrics go to trackers."""
    config = load(TINY)
    return replace(config, training=replace(config.training, **projects))


def log_twice(folder: Path, **projects: str) -> list[str]:
    """Log a step, resume and log the next; the id of the run at each tracker, of both starts."""
    ids = []
    for done in (0, 1):
        log = MetricsLog(folder / "metrics.jsonl", done, tracked(**projects))
        log.write(
            done + 1, {"loss": 2.5 - done, "slowest": "process 1 (a)", "worst": {"few[3]": 4.0}}
        )
        log.close()
        ids += [json.loads((folder / f"{name}.json").read_text())["id"] for name in projects]
    return ids


def test_numbers_go_to_weights_and_biases_where_asked_and_a_resumed_run_into_the_same_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "480")  # seconds until its process answers
    first, second = log_twice(tmp_path, wandb="a-project")
    assert first == second
    runs = sorted((tmp_path / "wandb").glob(f"offline-run-*-{first}/*.wandb"))
    assert runs
    assert all(run.stat().st_size > 0 for run in runs)


@pytest.mark.exhaustive
def test_numbers_go_to_mlflow_and_a_resumed_run_into_the_same_one(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    first, second = log_twice(tmp_path, mlflow="an experiment")
    assert first == second
    client = mlflow.MlflowClient()
    (logged,) = client.search_runs([client.get_experiment_by_name("an experiment").experiment_id])
    assert (logged.info.run_id, logged.info.run_name) == (first, tmp_path.name)
    assert logged.info.status == "FINISHED"
    assert logged.data.params["training.mlflow"] == "an experiment"
    history = client.get_metric_history(first, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.5), (2, 1.5)]
    log = MetricsLog(tmp_path / "metrics.jsonl", 2, tracked(mlflow="an experiment"))
    for step in range(3, 703):  # more numbers than one request may have
        log.write(step, {"memory/host": step, "loss of [x]": float("nan"), "more": 1.0})
    log.close()
    assert len(client.get_metric_history(first, "loss of _x_")) == 700


@pytest.mark.exhaustive
def test_numbers_go_to_swanlab_and_a_resumed_run_into_the_same_one(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    first, second = log_twice(tmp_path, swanlab="a-project")
    assert first == second
    logs = sorted((tmp_path / "swanlog").glob(f"run-*/run-{first}.swanlab"))
    assert len(logs) == 2
    assert all(b"loss" in log.read_bytes() for log in logs)


class Stuck(trackers.WeightsAndBiases):
    """A tracker that fails at first, and whose server then answers nothing until the test is over."""

    tries = 0
    over = threading.Event()

    def begin(self, *arguments: object) -> str:
        Stuck.tries += 1
        if Stuck.tries > 1:
            self.over.wait()
        raise ConnectionError("nobody\nlistens")


def test_a_tracker_that_fails_and_hangs_is_one_warning_and_the_log_goes_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Stuck)
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(trackers, "MAX_WAITING", 2)
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, tracked(wandb="p"))
    wait_until(lambda: Stuck.tries == 2)
    for step in (1, 2, 3):
        log.write(step, {"loss": 1.0})
    log.close()
    Stuck.over.set()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().out.splitlines() == [
        r"WARNING training.wandb=p: nobody\nlistens; up to 2 steps wait until it takes them",
        "WARNING training.wandb=p: 3 steps were not sent; metrics.jsonl has them all",
    ]


def test_a_damaged_name_of_the_run_there_is_said(tmp_path):
    (tmp_path / "wandb.json").write_text('{"id": "a')
    with pytest.raises(
        UserError, match=r"wandb\.json is not what was written; remove it to begin a new run there"
    ):
        MetricsLog(tmp_path / "metrics.jsonl", 0, tracked(wandb="p"))


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_tracker_that_is_not_installed_is_said_with_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    remedy = rf'training.{name}=p: {name} is not installed; pip install "mmjax\[{name}\]"'
    with pytest.raises(UserError, match=remedy):
        MetricsLog(tmp_path / "metrics.jsonl", 0, tracked(**{name: "p"}))


@pytest.mark.exhaustive
def test_swanlab_without_a_login_is_one_line(monkeypatch, tmp_path):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"swanlab=p: no API key configured; run `swanlab login`"):
        trackers.check_logins({"swanlab": "p"})


def test_without_a_login_a_run_ends_in_one_line_before_it_opens_its_data(
    tmp_path, monkeypatch, capsys
):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # which has read the environment of an earlier test
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, path in {"HOME": ".", "NETRC": "netrc", "WANDB_CONFIG_DIR": "."}.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    ended = run(
        capsys, train.main, TINY, f"run={tmp_path}/run", "training.wandb=p", "data.sources={}"
    )
    wandb.teardown()
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: training.wandb=p: No API key configured")
    assert line.endswith(
        "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to send the numbers later"
    )
    assert not (tmp_path / "run").exists()


def test_writing_it_imports_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = "import sys; MetricsLog(Path(sys.argv[1]), 0).close(); sys.exit('torch' in sys.modules)"
    code = f"from pathlib import Path; from mmjax.training.metrics_log import MetricsLog; {code}"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")], cwd=ROOT, check=True
    )
    assert list((tmp_path / "tensorboard").iterdir())
