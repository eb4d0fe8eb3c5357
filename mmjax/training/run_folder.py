"""The folder of one run: claiming it without losing anything, and what lies where in it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmjax.config import Config
from mmjax.config_files import differences, from_json, keep, keys_of, to_json
from mmjax.config_values import did_you_mean
from mmjax.errors import UserError
from mmjax.training.console import say

Mode = Literal["new", "resume", "auto", "overwrite"]


@dataclass(frozen=True)
class Permitted:
    """The differences allowed from the run that is resumed. keys: of the config, or beginnings of such."""

    new_data: bool = False
    keys: tuple[str, ...] = ()

    def allows(self, key: str) -> bool:
        """Return whether this key of the config may have another value."""
        named = any(key == own or key.startswith((f"{own}.", f"{own}[")) for own in self.keys)
        return named or (self.new_data and key.startswith("data.sources"))

    def allows_other_samples(self) -> bool:
        """Return whether the samples may be others, or other ones may form a step."""
        parts = ("data", "batch", "seed", "model")
        return self.new_data or any(key.split(".")[0] in parts for key in self.keys)


NOTHING = Permitted()
FEW = 5  # differences between configs that are listed


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run; absolute, since checkpoints are read by no other."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.absolute())

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
    def history(self) -> Path:
        """The config, data and devices of every start of the run, a JSON object each."""
        return self.path / "history.jsonl"

    @property
    def due(self) -> Path:
        """The samples that were still due where other data was taken."""
        return self.path / "due"

    @property
    def traces(self) -> Path:
        """Profiler traces of a few steps."""
        return self.path / "traces"

    @property
    def fit(self) -> Path:
        """The remat policies that the run has chosen."""
        return self.path / "fit.json"

    @property
    def oversize(self) -> Path:
        """Samples that fit no budget, one JSON object each."""
        return self.path / "oversize.jsonl"

    @property
    def quarantine(self) -> Path:
        """Samples that cannot be used and why, one JSON object each."""
        return self.path / "quarantine.jsonl"

    def list_oversize(self, samples: Iterable[str], action: Literal["skip", "raise"]) -> None:
        """Write down the samples that fit no budget. Raises UserError where the config says that they are fatal."""
        names = list(samples)
        self.oversize.write_text(
            "".join(json.dumps({"sample": name, "reason": "fits no budget"}) + "\n" for name in names)
        )
        if names and action == "raise":
            raise UserError(
                f"{len(names)} samples fit no budget (data.on_oversize=raise), the first is {names[0]}; all are listed "
                f"in {self.oversize}. Raise batch.size, lower batch.rows, or skip them with data.on_oversize=skip"
            )

    @property
    def scores(self) -> Path:
        """The test split's scores, once the run has come to its end."""
        return self.path / "test.json"

    def scored_step(self) -> int | None:
        """The number of updates after which the test split was scored, if it was."""
        try:
            return int(json.loads(self.scores.read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
            return None

    @property
    def stacks(self) -> Path:
        """The stack of each process when the run was found stuck."""
        return self.path / "stacks"

    @property
    def replaced(self) -> Path:
        """The folder to which a run is moved until the one that replaces it has started."""
        return self.path.with_name(f".{self.path.name}.replaced")

    def read_config(self) -> Config:
        """The config that this run was started with. Raises UserError where there is no run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} holds no run (no config.json); give the folder that mmjax.train printed")
        try:
            return from_json(self.config.read_text())
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.config}: {error}; restore it, every checkpoint has a copy in "
                f"{self.checkpoints}/<step>/meta/metadata"
            ) from None

    def write_config(self, config: Config) -> None:
        """Write the resolved config, in one piece: a folder with a config.json is a run."""
        partial = self.config.with_suffix(".partial")
        partial.write_text(to_json(config))
        partial.rename(self.config)


@contextmanager
def claim(config: Config, source: Path, mode: Mode, permitted: Permitted = NOTHING) -> Iterator[tuple[RunFolder, bool]]:
    """The run's folder, and whether the run in it goes on. What can fail of the start happens inside `with`.

    Where it does, everything is as it was: a new folder is gone again, and the run that was to be resumed or
    overwritten is untouched. Raises UserError where a run is there and neither resuming nor overwriting was said, where
    there is none to resume or it is of another config in more than is permitted, or where the folder cannot be written.
    """
    check_keys(permitted, config)
    folder = run_folder(config)
    there = _check_claim(folder, config, mode)
    if there and mode in ("resume", "auto"):
        changes = changes_of(folder, config, permitted)
        for line in first_few([f"changed {line}" for line in changes if not line.startswith(WHERE)]):
            say(line)
        _write_or_user_error(folder, lambda: _check_writable(folder))
        yield folder, True
        _write_or_user_error(folder, lambda: folder.write_config(config))
        return
    existed = folder.path.is_dir()
    if there:
        _write_or_user_error(folder, lambda: _set_aside(folder))
    try:
        _write_or_user_error(folder, lambda: _begin(folder, config, source))
        yield folder, False
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        if there:
            folder.replaced.rename(folder.path)
        elif existed:
            folder.path.mkdir(exist_ok=True)
        raise
    if there:
        shutil.rmtree(folder.replaced, ignore_errors=True)


def run_folder(config: Config) -> RunFolder:
    """Return the folder of a run of this config."""
    return RunFolder(Path(config.run or f"runs/{config.name}").resolve())


def _check_claim(folder: RunFolder, config: Config, mode: Mode) -> bool:
    """Return whether there is a run. Raises UserError where `mode` does not go with what is there."""
    there = folder.config.is_file()
    if there and mode == "new":
        raise UserError(
            f"{folder.path} already holds a run; continue it with --resume, replace it with --overwrite, "
            "or choose another folder with run=FOLDER"
        )
    if mode == "resume" and not there:
        raise UserError(f"{folder.path} holds no run to resume; leave --resume away, or use --resume=auto for either")
    if not there and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(f"{folder.path} is not empty and not a run; choose another folder with run=FOLDER")
    starts_from = config.init_from and Path(config.init_from).resolve()
    if starts_from == folder.path and not (there and mode in ("resume", "auto")):
        raise UserError(f"init_from={config.init_from} is this run's own folder; choose another one with run=FOLDER")
    return there


def _set_aside(folder: RunFolder) -> None:
    if folder.replaced.exists():
        shutil.rmtree(folder.path)  # an overwriting start that was killed; the run it was to replace is still aside
    else:
        folder.path.rename(folder.replaced)


def _begin(folder: RunFolder, config: Config, source: Path) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    _check_writable(folder)
    keep(source, folder.path)
    folder.write_config(config)


def _check_writable(folder: RunFolder) -> None:
    if not os.access(folder.path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no write permission")


def _write_or_user_error(folder: RunFolder, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot write the run folder {folder.path}: {reason}; choose another with run=FOLDER"
        ) from error


WHERE = ("name:", "run:")
# What may change without a word when a run goes on: where and how fast it runs, how long, how often it looks and saves.
MAY_CHANGE = (
    "name", "run", "device", "mesh.", "batch.balance", "batch.shapes", "data.workers", "data.prefetch", "data.cache",
    "data.on_bad_sample", "data.max_bad_share",
    "training.steps", "training.epochs", "training.loss_chunks", "training.evaluate_", "training.checkpoint_every",
    "training.keep", "training.bad_numbers", "training.spike", "training.wandb", "training.watch.",
    "model.llm.remat", "model.llm.attention",
)  # fmt: skip


def changes_of(folder: RunFolder, config: Config, permitted: Permitted = NOTHING) -> Sequence[str]:
    """List the differences from the run in the folder. Raises UserError where that is more than is permitted."""
    lines = differences(folder.read_config(), config)
    others = {key: line for line in lines if not _may_change(key := line.partition(":")[0])}
    if kept := [key for key in others if not permitted.allows(key)]:
        data = [key for key in kept if key.startswith("data.sources")]
        named = [key for key in kept if key not in data]
        if len(named) > FEW:
            named = list(dict.fromkeys(key.partition(".")[0] for key in named))
        said = " ".join(["--new-data"] * bool(data) + [f"--change {key}" for key in named])
        raise UserError(
            f"{folder.path} is a run of another config: {'; '.join(first_few([others[key] for key in kept]))}. Say "
            f"these values as they were, or leave the config away: --resume {folder.path} goes on with its own; or say "
            f"that they shall change: {said}; or start another run from its parameters: run=FOLDER "
            f"init_from={folder.path}"
        )
    return lines


def first_few(lines: Sequence[str]) -> list[str]:
    """Cut lines to at most `FEW`, the last of which says how many more there are."""
    return list(lines) if len(lines) <= FEW else [*lines[: FEW - 1], f"and {len(lines) - FEW + 1} more"]


def check_keys(permitted: Permitted, config: Config) -> None:
    """Raises UserError where a key that may change is none of the config's."""
    keys = [key.split(".") for key in keys_of(config)]
    known = dict.fromkeys(".".join(parts[:n]) for parts in keys for n in range(1, len(parts) + 1))
    for own in permitted.keys:
        if not any(Permitted(keys=(own,)).allows(key) for key in known):
            raise UserError(f"--change {own}: a config has no such key{did_you_mean(own, known)}")


def _may_change(key: str) -> bool:
    parts = key.split(".")
    of_encoder = parts[:2] == ["model", "encoders"] and parts[3:] in (["remat"], ["attention"])
    return key.startswith(MAY_CHANGE) or of_encoder
