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
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name

from mmjax.errors import UserError

_START_SECONDS = 300  # until all processes are there
_HEARTBEAT_SECONDS = 15  # without a sign of life, after which a process counts as gone
_LOOK_SECONDS = 1.0
_TELL_SECONDS = 3600  # the longest that process 0 may take for what others wait for: indexing a large dataset

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


@contextmanager
def joined() -> Iterator[None]:
    """Run the body as one process of those that the environment names; leave together.

    Where one ends early, by an error or a signal, the others end too, within a minute, and say which one it was: exit
    code 2 for a mistake of the user's, 1 otherwise. With one process the body just runs.
    """
    if count() == 1:
        yield
        return
    _meet()
    finished = threading.Event()
    threading.Thread(target=_watch, args=(finished,), daemon=True).start()
    try:
        yield
        wait_for_all("end")
    except UserError as error:
        if leads() or not error.everywhere:
            print(f"error: process {index()}: {error}", file=sys.stderr, flush=True)
        _leave(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _leave(130)
    except BaseException:
        # A collective that fails is mostly another process that is gone: the watch then says which, and ends this one.
        time.sleep(2 * _HEARTBEAT_SECONDS)
        print(f"process {index()} of {count()}:", file=sys.stderr)
        traceback.print_exc()
        _leave(1)
    finished.set()
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
    return distributed.global_state.client.blocking_key_value_get(f"mmjax/{key}", _HEARTBEAT_SECONDS * 1000)


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
    try:
        jax.distributed.initialize(
            coordinator,
            count(),
            index(),
            cluster_detection_method="deactivate",  # it would give each process one GPU
            initialization_timeout=_START_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
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
    time.sleep(_LOOK_SECONDS)
    jax.distributed.shutdown()


def _watch(finished: threading.Event) -> None:
    """End this process when another one is gone. Asking who is alive takes all processes that are."""
    everyone = list(range(count()))
    while not finished.wait(_LOOK_SECONDS):
        try:
            alive = distributed.global_state.client.get_live_nodes(everyone)
        except Exception:
            if not finished.is_set():
                _end_without("process 0, which coordinates the others,")
            return
        if gone := sorted(set(everyone) - set(alive)):
            if not finished.is_set():
                _await_leavers(set(alive))
                _end_without(f"process {gone[0]}" if len(gone) == 1 else f"processes {', '.join(map(str, gone))}")
            return


def _await_leavers(alive: set[int]) -> None:
    """Process 0 leaves last here too: who asks it meanwhile would take it for the one that is gone."""
    client = distributed.global_state.client
    with suppress(Exception):  # another may end now, for any reason
        if not leads():
            client.key_value_set(f"mmjax/leaving/{index()}", "")
            return
        deadline = time.monotonic() + _HEARTBEAT_SECONDS
        for other in sorted(alive - {0}):
            left = max(1, round(1000 * (deadline - time.monotonic())))
            client.blocking_key_value_get(f"mmjax/leaving/{other}", left)


def _end_without(who: str) -> None:
    print(
        f"error: {who} of this run's {count()} ended or cannot be reached; process {index()} ends too. Its own last "
        "lines say why; go on with --resume",
        file=sys.stderr,
        flush=True,
    )
    _leave(1)


def _leave(code: int) -> None:
    """End at once: an orderly end would wait for processes that are not there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
