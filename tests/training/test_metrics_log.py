"""The log of a run goes on where its checkpoint is, whatever a killed process or bad storage has left in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import TINY, run
from started import ROOT

from mmjax import train
from mmjax.errors import UserError
from mmjax.runtime.run_dir import logged_records
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


def test_numbers_go_to_weights_and_biases_where_asked_and_a_resumed_run_into_the_same_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "480")  # seconds until its process answers
    ids = []
    for done in (0, 1):
        log = MetricsLog(tmp_path / "metrics.jsonl", done, "a-project", {"seed": 3})
        log.write(
            done + 1, {"loss": 2.5 - done, "slowest": "process 1 (a)", "worst": {"few[3]": 4.0}}
        )
        log.close()
        ids.append(json.loads((tmp_path / "wandb.json").read_text())["id"])
    assert ids[0] == ids[1]
    runs = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}/*.wandb"))
    assert runs
    assert all(run.stat().st_size > 0 for run in runs)


def test_a_damaged_name_of_the_run_there_is_said(tmp_path):
    (tmp_path / "wandb.json").write_text('{"id": "a')
    with pytest.raises(
        UserError, match=r"wandb\.json is not what was written; remove it to begin a new run there"
    ):
        MetricsLog(tmp_path / "metrics.jsonl", 0, "p")


def test_without_wandb_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"training.wandb=p: wandb is not installed; pip install"):
        MetricsLog(tmp_path / "metrics.jsonl", 0, "p")


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
