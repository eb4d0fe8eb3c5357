"""Send metrics to experiment trackers: Weights & Biases, MLflow and SwanLab.

Each has a thread of its own, for which the training never waits: steps that a tracker does not take
are kept, up to a limit, and sent again later.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mmjax.config import Config
from mmjax.config.codec import encode, leaves
from mmjax.console import print_lines
from mmjax.errors import UserError, bounded_line

MAX_WAITING = 1000  # steps that are kept for a tracker
SEND_SECONDS = 1.0  # between two sendings
RETRY_SECONDS = 30.0  # after one that failed
CLOSE_SECONDS = 60.0  # until the end of a run waits no longer


class Record(NamedTuple):
    """The numbers of one step."""

    step: int
    time: float  # seconds since 1970
    numbers: Mapping[str, float]


class Tracker(Protocol):
    """The interface of an experiment tracker. What fails raises whatever its library raises."""

    remedy: str  # where it has no login

    def check_login(self) -> None:
        """Raise where there is no login, without asking a server."""

    def begin(self, project: str, folder: Path, run_id: str | None, config: Config) -> str:
        """Begin a run, or go on with the one of this id; return its id. folder: of the run here."""

    def send(self, records: Sequence[Record]) -> None: ...

    def finish(self) -> None: ...


class WeightsAndBiases:
    """Weights & Biases, whose own process sends what it is given."""

    remedy = (
        "run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline to send the numbers later"
    )

    def check_login(self) -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online":
            wandb.login(verify=False)

    def begin(self, project: str, folder: Path, run_id: str | None, config: Config) -> str:
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=encode(Config, config, ""),
        )
        return self._run.id

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(dict(record.numbers), step=record.step)

    def finish(self) -> None:
        self._run.finish()


class SwanLab(WeightsAndBiases):
    """SwanLab, which has the interface of Weights & Biases; what a run prints stays here."""

    remedy = "run `swanlab login`, or set SWANLAB_API_KEY, or SWANLAB_MODE=offline to send the numbers later"

    def check_login(self) -> None:
        import swanlab

        settings = swanlab.Settings()
        if settings.mode == "online" and settings.api_key is None:
            raise ValueError("no API key configured")

    def begin(self, project: str, folder: Path, run_id: str | None, config: Config) -> str:
        import swanlab

        self._run = swanlab.init(
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            log_dir=str(folder / "swanlog"),
            config=encode(Config, config, ""),
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        return self._run.id


class MLflow:
    """MLflow, on the server or in the store that MLFLOW_TRACKING_URI names; an experiment is a project."""

    remedy = "set MLFLOW_TRACKING_URI"
    METRICS, PARAMETERS = 1000, 100  # of one request, at most

    def check_login(self) -> None:
        """Accept all: only the server knows."""

    def begin(self, project: str, folder: Path, run_id: str | None, config: Config) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # a line at each retry otherwise
        self._metric = Metric
        self._client = client = MlflowClient()
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        experiment = client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else client.create_experiment(project)
        self._run_id = client.create_run(number, run_name=folder.name).info.run_id
        settings = leaves(Config, encode(Config, config, ""))
        parameters = [Param(self._name(key), text) for key, text in settings if text]
        for first in range(0, len(parameters), self.PARAMETERS):
            client.log_batch(self._run_id, params=parameters[first : first + self.PARAMETERS])
        return self._run_id

    def send(self, records: Sequence[Record]) -> None:
        metrics = [
            self._metric(self._name(key), number, round(1000 * record.time), record.step)
            for record in records
            for key, number in record.numbers.items()
        ]
        for first in range(0, len(metrics), self.METRICS):
            self._client.log_batch(self._run_id, metrics[first : first + self.METRICS])

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    @staticmethod
    def _name(key: str) -> str:
        """Replace what MLflow takes in no name."""
        return re.sub(r"[^\w\-. :/]", "_", key)


# by the name of their package, extra and key of `training`
TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def check_logins(projects: Mapping[str, str]) -> None:
    """Raise UserError where a tracker has no package, or would refuse a run for want of a login; asks no server."""
    for name, project in projects.items():
        tracker = _tracker(name, project)
        try:
            tracker.check_login()
        except Exception as error:  # each library has its own
            reason = str(error).partition("\n")[0].rstrip(".")
            raise UserError(f"training.{name}={project}: {reason}; {tracker.remedy}") from None


def _tracker(name: str, project: str) -> Tracker:
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f'training.{name}={project}: {name} is not installed; pip install "mmjax[{name}]"'
        )
    return TRACKERS[name]()


class TrackerThread:
    """A thread that sends the records of a run to one tracker, into the run there that the folder names."""

    def __init__(self, name: str, folder: Path, config: Config) -> None:
        """Raise UserError where its package is missing, or the name of the run there is damaged."""
        self._name = name
        self._project = config.training.trackers[name]
        self._tracker = _tracker(name, self._project)
        self._folder = folder
        self._config = config
        self._path = folder / f"{name}.json"
        try:
            self._run_id: str | None = (
                json.loads(self._path.read_text())["id"] if self._path.is_file() else None
            )
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self._path} is not what was written; remove it to begin a new run there"
            ) from None
        self._waiting: list[Record] = []  # only this thread removes from it, only log() adds to it
        self._dropped = 0  # steps
        self._failure = ""  # of the last sending, until it is printed
        self.closing = threading.Event()  # what waits is sent, and the thread ends
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Leave the numbers of a step to the thread, and print what has failed meanwhile."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(Record(step, time.time(), numbers))
        else:
            self._dropped += 1
        self._print_failure()

    def _print_failure(self) -> None:
        failure, self._failure = self._failure, ""
        if failure:
            print_lines(f"WARNING training.{self._name}={self._project}: {failure}")

    def _work(self) -> None:
        pause, began, failed, closing = 0.0, False, False, False
        while not closing:
            closing = self.closing.wait(pause)
            records = self._waiting[:]
            try:
                if not began:
                    run_id = self._tracker.begin(
                        self._project, self._folder, self._run_id, self._config
                    )
                    self._path.write_text(json.dumps({"id": run_id}))
                    began = True
                self._tracker.send(records)
                if closing:
                    self._tracker.finish()
            except Exception as error:  # whatever it is, the training goes on
                if not failed:
                    self._failure = bounded_line(
                        f"{error}; up to {MAX_WAITING} steps wait until it takes them"
                    )
                pause, failed = RETRY_SECONDS, True
            else:
                del self._waiting[: len(records)]
                pause, failed = SEND_SECONDS, False

    def close(self, seconds: float) -> None:
        """Wait for the thread that long after `closing`, and print what was not sent."""
        self._thread.join(seconds)
        self._print_failure()
        if missing := self._dropped + len(self._waiting):
            self._failure = f"{missing} steps were not sent; metrics.jsonl has them all"
        self._print_failure()


def close_trackers(threads: Sequence[TrackerThread]) -> None:
    """Let all send what waits, and wait for them for `CLOSE_SECONDS` at most."""
    for thread in threads:
        thread.closing.set()
    end = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.close(max(0.0, end - time.monotonic()))
