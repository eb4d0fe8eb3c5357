"""The folder of one run: its paths, its metrics, and claiming it for a new or a resumed run without losing anything."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmjax.config import Config
from mmjax.config.codec import did_you_mean
from mmjax.config.loading import config_texts, copy_config, differences, from_json, keys_of, to_json
from mmjax.console import print_lines
from mmjax.disk import atomic_write, parse_object, user_cache
from mmjax.errors import UserError
from mmjax.runtime.run_trust import check_files, check_run, is_own, sign_run


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; the system releases it however the process ends.

    The lock is a file beside the folder, since the folder may be moved or deleted meanwhile. Raises
    UserError where another process holds it.
    """
    folder = folder.resolve()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        lock = _acquire_lock(path)
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by {_lock_owner(path)}: two trainings cannot write in one run; wait until it has "
            "ended, stop it, or choose another folder with run=FOLDER"
        ) from None
    except OSError:
        # The file system has no locks; or nothing can be written beside the folder; if not in it
        # either, `claim` fails.
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _acquire_lock(path: Path) -> int:
    """Open and lock the file, and write into it who holds it. Raises BlockingIOError where another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        # closed in programs that this process executes
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(file, path):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        # its last holder deleted it between our open and our lock: try again with a new file
        os.close(file)


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def path_words(run: Path) -> str:
    """Format a run's folder for a command line, relative to the working directory where that is shorter."""
    return shlex.quote(min(os.path.relpath(run), str(run), key=len))


def is_trained(folder: Path) -> bool:
    """Tell whether a process trains in a run's folder, as far as its lock says; True where it is of another host."""
    folder = folder.resolve()
    owner = re.fullmatch(
        r"process (\d+) on (.+)", _lock_owner(folder.with_name(f".{folder.name}.lock"), "")
    )
    if owner is None or owner[2] != socket.gethostname():
        return owner is not None
    try:
        os.kill(int(owner[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _lock_owner(path: Path, unknown: str = "another process") -> str:
    try:
        return path.read_text() or unknown
    except OSError:
        return unknown


Mode = Literal["new", "resume", "auto", "overwrite"]


@dataclass(frozen=True)
class AllowedChanges:
    """Allow differences from the run that is resumed.

    keys: config keys, or prefixes of them, that may differ. trust: its files may be executed,
    whoever wrote them.
    """

    new_data: bool = False
    keys: tuple[str, ...] = ()
    trust: bool = False

    def allows(self, key: str) -> bool:
        """Return whether this key of the config may have another value."""
        listed = any(
            key == prefix or key.startswith((f"{prefix}.", f"{prefix}[")) for prefix in self.keys
        )
        return listed or (self.new_data and key.startswith("data.sources"))

    def allows_other_samples(self) -> bool:
        """Return whether the samples, or their grouping into steps, may change."""
        parts = ("data", "batch", "seed", "model")
        return self.new_data or any(key.split(".")[0] in parts for key in self.keys)


NO_CHANGES = AllowedChanges()
MAX_LISTED = 5  # differences between configs that are listed


def _path_in_run(name: str) -> property:
    return property(lambda folder: folder.path / name)


@dataclass(frozen=True)
class RunFolder:
    """Absolute paths of a run: Orbax accepts no relative ones."""

    path: Path
    trusted: bool = False  # what its config says may be executed and fetched, whoever wrote it

    # the resolved config; a folder is a run once it has this file
    config = _path_in_run("config.json")
    identity = _path_in_run("id")  # of the run, drawn at its start; stands in its checkpoints too
    # copy of the config file, for functions that the config names
    source = _path_in_run("config.py")
    checkpoints = _path_in_run("checkpoints")  # a folder per saved step
    metrics = _path_in_run("metrics.jsonl")  # a JSON object per step and per evaluation
    index = _path_in_run("index")  # length indices, by fingerprint
    # config, data and devices of every start of the run, a JSON object each
    history = _path_in_run("history.jsonl")
    due_samples = _path_in_run("due")  # samples that epochs still owed when the data changed
    traces = _path_in_run("traces")  # profiler traces of a few steps
    # of a pipeline: planned and measured times, a file for the plan and each process
    passes = _path_in_run("passes")
    memory_plan = _path_in_run("fit.json")  # the run's remat policies and loss chunks
    # measured by two rows of a step, for `mmjax.plan --measured`
    rates = _path_in_run("rates.json")
    oversize = _path_in_run("oversize.jsonl")  # samples that fit no budget, a JSON object each
    quarantine = _path_in_run("quarantine.jsonl")  # unusable samples and why, a JSON object each
    scores = _path_in_run("test.json")  # the test split's scores, once the run has ended
    # sheets of the images that generators made for the samples of a split
    pictures = _path_in_run("pictures")
    stacks = _path_in_run("stacks")  # the stack of each process when the run was found stuck

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.absolute())

    @property
    def programs(self) -> Path:
        """Return the cache of compiled programs: the one that the runs beside this one share, where it is the user's.

        Programs are executed, so that another's run, or folder of programs, leaves the user's own
        cache.
        """
        shared = self.path.parent / ".programs"
        if self.trusted or (
            is_own(self.path) and (not shared.exists() or shared.stat().st_uid == os.getuid())
        ):
            return shared
        return user_cache() / "programs"

    def scored_step(self) -> int | None:
        """Return the number of updates after which the test split was scored, if it was."""
        try:
            return int(json.loads(self.scores.read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete
            return None

    @property
    def replaced(self) -> Path:
        """Return the folder to which a run is moved until the one that replaces it has started."""
        return self.path.with_name(f".{self.path.name}.replaced")

    def read_identity(self) -> str:
        """Return the run's id; empty where it was begun by a version that drew none."""
        return self.identity.read_text().strip() if self.identity.is_file() else ""

    def read_config(self, typed: Sequence[str] = ()) -> Config:
        """Read the config of this run, to do what it says.

        typed: overrides that will be applied to it. Raises UserError where there is no run, and
        where another user's would be executed or fetched (`run_trust`), unless the folder is
        trusted.
        """
        config = self.stored_config()
        self.check(config, typed)
        return config

    def check(self, config: Config, typed: Sequence[str] = ()) -> None:
        """Raise UserError where this is another's run, and the config from its folder would execute or fetch."""
        if not self.trusted:
            check_run(self.path, config, typed)

    def stored_config(self) -> Config:
        """Read the config of this run, to show it: of what it says nothing may be executed or fetched.

        Raises UserError where there is no run.
        """
        if not self.config.is_file():
            raise UserError(
                f"{self.path} holds no run (no config.json); give the folder that mmjax.train printed"
            )
        try:
            return from_json(self.config.read_text())
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.config}: {error}; restore it, every checkpoint has a copy in "
                f"{self.checkpoints}/<step>/meta/metadata"
            ) from None

    def write_config(self, config: Config, as_own: bool = True) -> None:
        """Write the resolved config, atomically, and sign what it says: a folder with a config.json is a run.

        as_own: as of `sign_run`.
        """
        sign_run(self.path, config, as_own)
        with atomic_write(self.config) as partial:
            partial.write_text(to_json(config))


@contextmanager
def claim(
    config: Config, source: Path, mode: Mode, permitted: AllowedChanges = NO_CHANGES
) -> Iterator[bool]:
    """Claim the run's folder, and yield whether its run is resumed. The start belongs inside `with`.

    The config counts as this user's own, and so do from now on the run and the folder's copy of
    `source`.

    Where the body raises, everything is undone: a new folder is removed, and the run that was to be
    resumed or overwritten is untouched. Raises UserError where there is a run, but neither resume
    nor overwrite is requested; where there is no run to resume, or its config differs in more than
    is permitted; and where the folder cannot be written.
    """
    check_keys(permitted, config)
    folder = run_folder_of(config)
    exists = _check_claim(folder, config, mode)
    if exists and mode in ("resume", "auto"):
        changes = changes_of(folder, config, permitted)
        for line in shorten(
            [f"changed {line}" for line in changes if not line.startswith(LOCATION_KEYS)]
        ):
            print_lines(line)
        with _writing(folder):
            _check_writable(folder)
            if source.absolute().parent != folder.path and not permitted.trust:
                check_files(folder.path, config, partial(config_texts, source))
        yield True
        with _writing(folder):
            folder.write_config(config, as_own=permitted.trust)
        return
    # An overwritten run is set aside until the new one has started:
    #   runs/a -> runs/.a.replaced,   a new runs/a,   then .a.replaced is removed, or moved back.
    was_folder = folder.path.is_dir()
    if exists:
        with _writing(folder):
            if folder.replaced.exists():
                # An overwriting start was killed: its folder is removed, and the run it was to
                # replace stays set aside.
                shutil.rmtree(folder.path)
            else:
                folder.path.rename(folder.replaced)
    try:
        with _writing(folder):
            folder.path.mkdir(parents=True, exist_ok=True)
            _check_writable(folder)
            copy_config(source, folder.path)
            folder.identity.write_text(secrets.token_hex(8) + "\n")
            folder.write_config(config)
        yield False
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        if exists:
            folder.replaced.rename(folder.path)
        elif was_folder:
            folder.path.mkdir(exist_ok=True)
        raise
    if exists:
        shutil.rmtree(folder.replaced, ignore_errors=True)


def run_folder_of(config: Config) -> RunFolder:
    """Return the folder of a run of this config."""
    return RunFolder(Path(config.run or f"runs/{config.name}").resolve())


def _check_claim(folder: RunFolder, config: Config, mode: Mode) -> bool:
    """Return whether the folder has a run. Raises UserError where `mode` does not go with that."""
    exists = folder.config.is_file()
    if exists and mode == "new":
        raise UserError(
            f"{folder.path} already holds a run; continue it with --resume, replace it with --overwrite, "
            "or choose another folder with run=FOLDER"
        )
    if mode == "resume" and not exists:
        raise UserError(
            f"{folder.path} holds no run to resume; leave out --resume, or use --resume=auto for either"
        )
    if not exists and folder.path.is_dir() and any(folder.path.iterdir()):
        raise UserError(
            f"{folder.path} is not empty and not a run; choose another folder with run=FOLDER"
        )
    # A new run in the folder that it starts from would set its own checkpoints aside.
    starts_from = config.init_from and Path(config.init_from).resolve()
    if starts_from == folder.path and not (exists and mode in ("resume", "auto")):
        raise UserError(
            f"init_from={config.init_from} is this run's own folder; choose another one with run=FOLDER"
        )
    return exists


def _check_writable(folder: RunFolder) -> None:
    if not os.access(folder.path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no write permission")


@contextmanager
def _writing(folder: RunFolder) -> Iterator[None]:
    """Turn an OSError of the body into a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot write the run folder {folder.path}: {reason}; choose another with run=FOLDER"
        ) from error


LOCATION_KEYS = ("name:", "run:")
# Keys that may change freely when a run is resumed: where, how fast and how long it runs, how often
# it evaluates and saves.
MAY_CHANGE = (
    "name", "run", "device", "compiler", "mesh.", "units", "pipeline.", "batch.balance", "batch.shapes",
    "data.workers", "data.prefetch", "data.pool", "data.cache", "data.window_space", "data.encoded_space",
    "data.on_bad_sample", "data.max_bad",
    "training.steps", "training.epochs", "training.loss_chunks", "training.evaluate_", "training.checkpoint_every",
    "training.keep", "training.memory_", "training.bad_numbers", "training.spike", "training.wandb", "training.mlflow",
    "training.swanlab", "training.watch.", "training.evaluated",
    "optimizer.offload", "optimizer.over_data",
    "model.llm.remat", "model.llm.attention",
)  # fmt: skip


def changes_of(
    folder: RunFolder, config: Config, permitted: AllowedChanges = NO_CHANGES
) -> Sequence[str]:
    """List the differences from the config of the run in the folder. Raises UserError for those not permitted."""
    lines = differences(folder.stored_config(), config)
    by_key = {line.partition(":")[0]: line for line in lines}
    if fixed := [key for key in by_key if not (_may_change(key) or permitted.allows(key))]:
        data = [key for key in fixed if key.startswith("data.sources")]
        keys = [key for key in fixed if key not in data]
        if len(keys) > MAX_LISTED:
            # Many differences are named by their top-level keys, which --change accepts as
            # prefixes.
            keys = list(dict.fromkeys(key.partition(".")[0] for key in keys))
        options = " ".join(["--new-data"] * bool(data) + [f"--change {key}" for key in keys])
        raise UserError(
            f"{folder.path} is a run of another config: {'; '.join(shorten([by_key[key] for key in fixed]))}. Say "
            f"these values as they were, or leave out the config: --resume {folder.path} goes on with its own; or say "
            f"that they shall change: {options}; or start another run from its parameters: run=FOLDER "
            f"init_from={folder.path}"
        )
    return lines


def shorten(lines: Sequence[str]) -> list[str]:
    """Cut lines to at most `MAX_LISTED`, the last of which counts the rest."""
    return (
        list(lines)
        if len(lines) <= MAX_LISTED
        else [*lines[: MAX_LISTED - 1], f"and {len(lines) - MAX_LISTED + 1} more"]
    )


def check_keys(permitted: AllowedChanges, config: Config) -> None:
    """Raise UserError where a permitted key is no key of the config, nor a prefix of one."""
    keys = [key.split(".") for key in keys_of(config)]
    prefixes = dict.fromkeys(
        ".".join(parts[:n]) for parts in keys for n in range(1, len(parts) + 1)
    )
    for key in permitted.keys:
        if not any(AllowedChanges(keys=(key,)).allows(prefix) for prefix in prefixes):
            raise UserError(
                f"--change {key}: a config has no such key{did_you_mean(key, prefixes)}"
            )


def _may_change(key: str) -> bool:
    parts = key.split(".")  # model.encoders.NAME.remat
    of_tower = parts[:1] == ["model"] and parts[1:2] in (["encoders"], ["generators"])
    return key.startswith(MAY_CHANGE) or (of_tower and parts[3:] in (["remat"], ["attention"]))


def logged_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl without incomplete lines, and without values that no log can have."""
    if path.is_file():
        with path.open(errors="replace") as lines:
            yield from (record for record in map(parse_record, lines) if record is not None)


def parse_record(line: str) -> dict[str, Any] | None:
    """Parse a line of a metrics.jsonl as `logged_records` does; None for one that is incomplete or no record."""
    record = parse_object(line)
    # `type`, since True is an int too; integers up to 2**53 are exact as floats, which the report
    # computes with.
    if record is None or type(record.get("step")) is not int or not 0 <= record["step"] < 2**53:
        return None
    return {key: value for key, value in record.items() if _is_logged(key, value)}


def _is_logged(key: str, value: Any) -> bool:
    """Return whether a run may have logged this value: a person may have edited the file."""
    if key in ("batch", "slowest"):
        return isinstance(value, str)
    if key == "worst":
        return isinstance(value, dict) and all(_is_logged("loss", loss) for loss in value.values())
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return type(value) in (int, float) and abs(value) < 1e300
