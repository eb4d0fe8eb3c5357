"""Several processes as one run: how they meet, tell each other small things, and notice that one is gone.

Everything here goes through the coordination service that process 0 runs, beside the collectives; with one process
there is none and nothing waits. Which processes there are is in the environment, where `launch/` puts it:
MMJAX_COORDINATOR (host:port), MMJAX_PROCESSES and MMJAX_PROCESS.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name

from mmjax.errors import UserError
from mmjax.parallel.lookout import HEARTBEAT_SECONDS, Lookout

_START_SECONDS = 300  # until all processes are there
_PART_SECONDS = 1.0  # for the others to end when they have said goodbye
_TELL_SECONDS = 3600  # the longest that process 0 may take for what others wait for: indexing a large dataset

_lookout: Lookout | None = None
_told = 0  # how many things process 0 has told so far; the same number on every process


def index() -> int:
    """The number of this process."""
    return int(os.environ.get("MMJAX_PROCESS", 0))


def count() -> int:
    """How many processes the run has."""
    return int(os.environ.get("MMJAX_PROCESSES", 1))


def leads() -> bool:
    """Whether this process writes the run's files and speaks for all."""
    return index() == 0


def lookout() -> Lookout | None:
    """What this process knows of the others while it is one of several."""
    return _lookout


@contextmanager
def joined() -> Iterator[None]:
    """Run the body as one process of those that the environment names; leave together.

    Where one ends early, by an error or a signal, the others end too, within a minute, and say which one it was: exit
    code 2 for a mistake of the user's, 1 otherwise. With one process the body just runs.
    """
    if count() == 1:
        yield
        return
    global _lookout
    _meet()
    _lookout = Lookout(distributed.global_state.client, os.environ["MMJAX_COORDINATOR"], index(), count())
    _lookout.start()
    try:
        yield
        wait_for_all("end")
    except UserError as error:
        if leads() or not error.everywhere:
            print(f"error: process {index()}: {error}", file=sys.stderr, flush=True)
        if error.everywhere:
            _lookout.await_leavers(range(count()))
        _leave(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _leave(130)
    except BaseException:
        # A collective that fails is mostly another process that is gone: the lookout says which, and ends this one.
        time.sleep(HEARTBEAT_SECONDS + 6)
        print(f"process {index()} of {count()}:", file=sys.stderr)
        traceback.print_exc()
        _leave(1)
    _lookout.finish()
    _part()


def led(work: Callable[[], Any]) -> Any:
    """What `work` returns on process 0, where alone it runs; JSON can hold it. Its UserError is raised everywhere."""
    global _told
    if count() == 1:
        return work()
    key = f"mmjax/told/{_told}"
    _told += 1
    client = distributed.global_state.client
    if not leads():
        said = json.loads(client.blocking_key_value_get(key, _TELL_SECONDS * 1000))
        if "error" in said:
            raise UserError(said["error"], everywhere=True)
        return said["result"]
    try:
        result = work()
    except UserError as error:
        client.key_value_set(key, json.dumps({"error": str(error)}))
        raise UserError(str(error), everywhere=True) from error
    client.key_value_set(key, json.dumps({"result": result}))
    return result


def gather(key: str, text: str) -> list[str]:
    """What every process says under this key, which serves once; in their order, the same for all. From any thread."""
    if count() == 1:
        return [text]
    client, milliseconds = distributed.global_state.client, _TELL_SECONDS * 1000
    client.key_value_set(f"mmjax/gather/{key}/{index()}", text)
    if leads():
        texts = [client.blocking_key_value_get(f"mmjax/gather/{key}/{p}", milliseconds) for p in range(count())]
        client.key_value_delete(f"mmjax/gather/{key}/")
        client.key_value_set(f"mmjax/gathered/{key}", json.dumps(texts))
        return texts
    return json.loads(client.blocking_key_value_get(f"mmjax/gathered/{key}", milliseconds))


def tell(key: str, text: str) -> None:
    """Leave a text for who asks `told` for it; nobody waits."""
    if count() > 1:
        distributed.global_state.client.key_value_set(f"mmjax/{key}", text, allow_overwrite=True)


def told(key: str) -> str:
    """The text that some process has left there with `tell`."""
    return distributed.global_state.client.blocking_key_value_get(f"mmjax/{key}", HEARTBEAT_SECONDS * 1000)


def wait_for_all(where: str) -> None:
    """Return when every process has come here."""
    if count() > 1:
        distributed.global_state.client.wait_at_barrier(f"mmjax/{where}", _TELL_SECONDS * 1000)


@cache
def hosts() -> list[str]:
    """The name of each process's host."""
    return gather("hosts", socket.gethostname())


def per_host() -> int:
    """How many neighbouring processes share a host, where that is the same everywhere; else 1."""
    together = [len(list(run)) for _, run in itertools.groupby(hosts())]
    return together[0] if len(set(together)) == 1 else 1


def _meet() -> None:
    try:
        coordinator = os.environ["MMJAX_COORDINATOR"]
    except KeyError:
        raise UserError(
            "MMJAX_PROCESSES is set and MMJAX_COORDINATOR is not; start with launch/local.sh or launch/slurm.sbatch"
        ) from None
    jax.config.update("jax_enable_recoverability", True)  # else JAX aborts before it can be said who is gone
    jax.config.update("jax_enable_preemption_service", False)  # else JAX takes TERM for itself
    try:
        jax.distributed.initialize(
            coordinator,
            count(),
            index(),
            cluster_detection_method="deactivate",  # it would give each process one GPU
            initialization_timeout=_START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(f"process {index()} of {count()} cannot reach the others at {coordinator}: {reason}") from error


def _part() -> None:
    """Leave in order: process 0 last, since the others cannot be without its service, not even to say goodbye to it."""
    client = distributed.global_state.client
    if not leads():
        client.key_value_set(f"mmjax/left/{index()}", "")
        _leave(0)
    for other in range(1, count()):
        client.blocking_key_value_get(f"mmjax/left/{other}", _TELL_SECONDS * 1000)
    time.sleep(_PART_SECONDS)
    jax.distributed.shutdown()


def _leave(code: int) -> None:
    """End at once: an orderly end would wait for processes that are not there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
