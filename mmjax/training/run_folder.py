"""The folder of one run: claiming it without losing anything, and what lies where in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmjax.config import Config
from mmjax.config_files import differences, from_json, keep, to_json
from mmjax.errors import UserError

Mode = Literal["new", "resume", "auto", "overwrite"]


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.json"

    @property
    def source(self) -> Path:
        """The config file as it was, for functions that the config names."""
        return self.path / "config.py"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def index(self) -> Path:
        """Length indices, by fingerprint."""
        return self.path / "index"

    @property
    def programs(self) -> Path:
        """Compiled programs, shared by the runs beside this one."""
        return self.path.parent / ".programs"

    @property
    def oversize(self) -> Path:
        """Samples that fit no budget, one JSON object each."""
        return self.path / "oversize.jsonl"

    def list_oversize(self, samples: Iterable[str], action: Literal["skip", "raise"]) -> None:
        """Write down the samples that fit no budget. Raises UserError where the config says that they are fatal."""
        names = list(samples)
        self.oversize.write_text("".join(json.dumps({"sample": name, "reason": "fits no budget"}) + "\n" for name in names))
        if names and action == "raise":
            raise UserError(
                f"{len(names)} samples fit no budget (data.on_oversize=raise), the first is {names[0]}; all are listed in "
                f"{self.oversize}. Raise batch.size, lower batch.rows, or skip them with data.on_oversize=skip"
            )

    def read_config(self) -> Config:
        """The config that this run was started with. Raises UserError where there is no run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} holds no run (no config.json); give the folder that mmjax.train printed")
        return from_json(self.config.read_text())


def claim(config: Config, source: Path, mode: Mode) -> tuple[RunFolder, bool]:
    """Make or take over the run's folder; whether it is resumed.

    Raises UserError where a run is there and neither resuming nor overwriting was said, where there is none to resume, or
    where the folder cannot be written. Nothing is deleted but by `overwrite`, and only what is a run.
    """
    folder = RunFolder(Path(config.run or f"runs/{config.name}").absolute())
    there = folder.config.is_file()
    resumed = there and mode in ("resume", "auto")
    if resumed:
        refuse_other_run(folder, config)
    if there and mode == "new":
        raise UserError(
            f"{folder.path} already holds a run; continue it with --resume, replace it with --overwrite, "
            "or choose another folder with run=FOLDER"
        )
    if mode == "resume" and not there:
        raise UserError(f"{folder.path} holds no run to resume; leave --resume away, or use --resume=auto for either")
    if not there and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(f"{folder.path} is not empty and not a run; choose another folder with run=FOLDER")
    try:
        if there and mode == "overwrite":
            shutil.rmtree(folder.path)
        folder.path.mkdir(parents=True, exist_ok=True)
        if not os.access(folder.path, os.W_OK | os.X_OK):
            raise PermissionError("no write permission")
        if not resumed:
            keep(source, folder.path)
        # The config goes last and in one piece: a folder with a config.json is a run.
        partial = folder.config.with_suffix(".partial")
        partial.write_text(to_json(config))
        partial.rename(folder.config)
    except OSError as error:
        raise UserError(f"cannot write the run folder {folder.path}: {error.strerror or error}") from error
    return folder, resumed


# What may change when a run goes on: where and how fast it runs, how long, how often it looks, its rates.
MAY_CHANGE = (
    "name", "run", "device", "mesh.", "data.workers", "data.prefetch", "training.steps", "training.clip",
    "training.evaluate_", "training.checkpoint_every", "training.keep", "optimizer.learning_rate",
    "optimizer.adam_learning_rate", "optimizer.weight_decay", "optimizer.modules.", "schedule.",
    "model.llm.remat", "model.llm.attention",
)  # fmt: skip


def refuse_other_run(folder: RunFolder, config: Config) -> None:
    """Raises UserError where `config` describes another model, data or batch than the run in the folder."""
    lines = differences(folder.read_config(), config)
    kept = [line for line in lines if not line.startswith(MAY_CHANGE) and not _encoder_may_change(line)]
    if kept:
        raise UserError(
            f"{folder.path} is a run of another config: {'; '.join(kept)}. Resume it with its own, or start another run "
            "from its parameters with init_from="
        )


def _encoder_may_change(line: str) -> bool:
    key = line.split(":")[0].split(".")
    return key[:2] == ["model", "encoders"] and key[3:] in (["remat"], ["attention"])
