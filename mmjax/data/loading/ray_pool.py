"""Load steps in tasks of a Ray cluster of CPUs, which may lose processes and nodes, or grow, in mid-run.

A step is a pure function of its number and the loader, so that whatever computes it brings the same
bytes, and a task that was lost is computed again elsewhere. The connection to the cluster lives in
a process of its own: Ray ends the process that is connected when the cluster's control plane dies.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mmjax.config import DataConfig
from mmjax.console import print_lines, size
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.loading.workers import (
    Block,
    LoadingFailed,
    WorkerEnded,
    end_workers,
    load_block,
    read_steps,
    start_workers,
    steps,
)
from mmjax.errors import UserError

TASK_RETRIES = 5  # by Ray, of a task whose process or node was lost
POLL_SECONDS = 5.0
PATIENCE = 300.0  # seconds without the step that is waited for, after which the pool counts as lost
# Where steps wait on this host, beside the tasks: the one that was fetched, and those in Grain's
# buffer.
FETCHED = 3


class PoolLost(Exception):
    """The cluster is gone, or brings no steps."""


class CheckedBlock(NamedTuple):
    """A step on its way from the pool, with the hash of its bytes."""

    block: Block
    digest: bytes


def pool_steps(loader: StepLoader, first: int, last: int, data: DataConfig) -> Iterator[LoadedStep]:
    """Load steps `first` to `last` - 1 in order in the pool `data.pool`; where it is lost, in workers of this host.

    Returns when the pool has answered. Raises UserError where it cannot be reached or has another
    mmjax.
    """
    if first >= last:
        return iter(())
    client = PoolClient(loader, data.pool, last, data.pool_steps, int(data.pool_memory * 1e9))
    # The step before the first is the greeting.
    iterator = start_workers(client, first - 1, last, workers=1, prefetch=1)
    try:
        greeting = next(iterator)
    except BaseException as error:
        threading.Thread(target=end_workers, args=(iterator, False)).start()
        if isinstance(error, PoolLost | RuntimeError):
            raise UserError(f"data.pool={data.pool}: {error}") from error
        raise
    print_lines(greeting)
    loaded = _steps_of_both(read_steps(iterator, first, last), loader, first, last, data)
    next(loaded)  # as `read_steps`
    return loaded


def _steps_of_both(
    brought: Iterator[LoadedStep], loader: StepLoader, first: int, last: int, data: DataConfig
) -> Iterator[LoadedStep]:
    """Yield None at first, then the pool's steps, and from where it is lost on those of local workers."""
    step = first
    next(brought)
    try:
        yield None
        try:
            for loaded in brought:
                yield loaded
                step += 1
            return
        except PoolLost as lost:
            reason = str(lost)
        except WorkerEnded:
            reason = "the connection to it has ended"
    finally:
        brought.close()
    print_lines(
        f"data.pool={data.pool}: {reason}; from step {step + 1} on {max(1, data.workers)} local "
        "workers load; resume to use the pool again"
    )
    yield from steps(loader, step, last, data.workers, data.prefetch)


class PoolClient:
    """Ask the pool for step n and for those behind it ahead, within bounds; runs in a process of its own."""

    def __init__(
        self, loader: StepLoader, address: str, last: int, max_steps: int, max_bytes: int
    ) -> None:
        """last: one after the last step. max_steps, max_bytes: that are in flight, between tasks and training."""
        self.loader = loader
        self.address = address
        self.last = last
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.largest = 0  # bytes of a step so far
        self.in_flight: OrderedDict[int, Any] = OrderedDict()  # Ray's reference by step
        self.task: Any = None

    def __call__(self, step: int) -> Block | str:
        """Return a step; at the first call, connect and return a line that describes the pool."""
        if self.task is None:
            return self.connect()
        with _pool_errors():
            return self.fetch(int(step))

    def connect(self) -> str:
        """Connect to the cluster and compare its mmjax with this one. Raises UserError."""
        ray = _import_ray()
        try:
            if ":" in self.address:  # else Ray would try for minutes
                host, port = self.address.removeprefix("ray://").split(":")
                socket.create_connection((host, int(port)), timeout=POLL_SECONDS).close()
            ray.init(self.address, log_to_driver=False, logging_level="CRITICAL")
        except (OSError, ValueError, RuntimeError) as error:
            line = str(error).strip().split("\n")[0]
            raise UserError(
                f"data.pool={self.address}: no Ray cluster can be used there ({line}); start one by "
                "`ray start --head`, or set data.pool=local"
            ) from None
        # Ray prints every lost task and node, with pages of its logs. Remove when `log_to_driver`
        # governs these too.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        # Ray takes them; workers leave them to their parent
        for of_parent in (signal.SIGINT, signal.SIGTERM):
            signal.signal(of_parent, signal.SIG_IGN)
        with _pool_errors():
            nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            cpus = int(sum(node["Resources"]["CPU"] for node in nodes))
            if not cpus:
                raise UserError(f"data.pool={self.address}: no node of the cluster has CPUs")
            self._check_code(ray, [node["NodeID"] for node in nodes])
        module = __name__

        # by value, so that this comes before all imports
        def task(described: bytes, step: int) -> CheckedBlock:
            os.environ["JAX_PLATFORMS"] = "cpu"  # tasks must never touch an accelerator
            return importlib.import_module(module).load(described, step)

        self.task = ray.remote(num_cpus=1, max_retries=TASK_RETRIES)(task)
        self.loader_ref = ray.put(pickle.dumps((os.getcwd(), self.loader)))
        bound = f"{self.max_steps} steps and {size(self.max_bytes)}"
        return f"pool   {self.address}: {len(nodes)} node(s), {cpus} CPU(s); at most {bound} in flight for each process"

    def _check_code(self, ray: Any, nodes: list[str]) -> None:
        """Raise UserError where a node has other code of mmjax, or cannot see the data."""
        module = __name__
        folders = [os.getcwd(), str(self.loader.index_folder.absolute())]

        # travels by value, so that it runs where mmjax is another or none
        def check() -> tuple[str, list[str]]:
            try:
                return importlib.import_module(module).code_version(), [
                    folder for folder in folders if not os.path.isdir(folder)
                ]
            except ImportError as error:
                return str(error), []

        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        remote = ray.remote(num_cpus=0, max_retries=TASK_RETRIES)(check)
        answers = [
            remote.options(scheduling_strategy=where(node, soft=False)).remote() for node in nodes
        ]
        for version, missing in ray.get(answers, timeout=PATIENCE):
            if version != code_version():
                raise UserError(
                    f"data.pool={self.address}: the code of mmjax on a node ({version}) is not this process's "
                    f"({code_version()}); install the same version on all of them"
                )
            if missing:
                raise UserError(
                    f"data.pool={self.address}: a node does not have {missing[0]}; the run's folder and the data must "
                    "lie on storage that the pool shares"
                )

    def fetch(self, step: int) -> Block:
        """Wait for a step, whose tasks and those behind it are started before. Raises PoolLost."""
        for _ in range(2):
            self._ask_ahead(step)
            block, digest = self._wait(step)
            if digest_of(block) == digest:
                self.largest = max(self.largest, block.data.nbytes)
                return block
            del self.in_flight[step]
        raise PoolLost(f"what came of step {step + 1} was damaged on its way twice")

    def _ask_ahead(self, step: int) -> None:
        for old in [number for number in self.in_flight if number < step]:
            del self.in_flight[old]  # Ray frees what nobody refers to
        for number in range(step, min(step + self.window(), self.last)):
            if number not in self.in_flight:
                self.in_flight[number] = self.task.remote(self.loader_ref, number)

    def window(self) -> int:
        """Count the steps that may be asked for, by the largest so far; one until its size is known."""
        if not self.largest:
            return 1
        return max(1, min(self.max_steps, self.max_bytes // self.largest) - FETCHED)

    def _wait(self, step: int) -> CheckedBlock:
        """Wait for a step's task, which Ray computes again where it was lost."""
        import ray

        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return ray.get(self.in_flight[step], timeout=POLL_SECONDS)
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() > deadline:
                    raise PoolLost(
                        f"it has not brought step {step + 1} in {PATIENCE:.0f} s"
                    ) from None
                if not ray.cluster_resources().get("CPU"):
                    raise PoolLost("none of its nodes is left") from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"in_flight": OrderedDict(), "task": None}


@contextmanager
def _pool_errors() -> Iterator[None]:
    """Raise what a task raised as it was, and PoolLost for whatever else Ray raises."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError | LoadingFailed):
            raise type(cause)(*cause.args) from None
        raise PoolLost(str(cause).strip().split("\n")[-1]) from None
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        line = str(error).strip().split("\n")[0]
        raise PoolLost(f"{type(error).__name__}: {line}") from None


def load(described: bytes, step: int) -> CheckedBlock:
    """Load a step, in a process of the pool."""
    block = load_block(_opened(described), step)
    return CheckedBlock(block, digest_of(block))


def digest_of(block: Block) -> bytes:
    """Hash a block's bytes, to compare them behind their way."""
    digest = hashlib.blake2b(block.head, digest_size=16)
    digest.update(block.data)
    return digest.digest()


@lru_cache(maxsize=1)
def _opened(described: bytes) -> StepLoader:
    """Return the loader of this process, which serves one training process alone."""
    folder, loader = pickle.loads(described)
    os.chdir(folder)  # the config's paths may be relative
    return loader


@cache
def code_version() -> str:
    """Hash mmjax's code: what is loaded must be the same to the byte."""
    folder = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _import_ray() -> Any:
    """Import Ray. Raises UserError where it is missing."""
    # else it warns of what it does in version 3
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with suppress(ImportError):
        import ray
        import ray.util.scheduling_strategies

        return ray
    raise UserError('data.pool needs Ray: pip install "mmjax[pool]"')
