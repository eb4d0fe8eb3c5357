"""Several processes as one run: start and end together, and exchange small values beside the collectives.

Everything goes through JAX's coordination service on process 0; with one process there is none and
nothing waits. The environment names the processes, as `launch/` sets it, or `mmjax.startup` for
srun and mpirun: MMJAX_COORDINATOR (host:port), MMJAX_PROCESSES, MMJAX_PROCESS.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import jax

# remove when jax.distributed gives the service's client a public name
from jax._src import distributed

from mmjax.distributed.peer_links import PeerLinks, host_and_port, own_address
from mmjax.distributed.peer_monitor import HEARTBEAT_SECONDS, PeerMonitor, StuckReport
from mmjax.errors import StoppedBySignal, UserError, exit_at_once, explain_runtime_errors

_START_SECONDS = 300  # until all processes have connected
_JAX_SECONDS = 60  # that JAX waits longer: it would end this process with a stack in C++
_EXIT_SECONDS = 1.0  # for the others to exit after their last message
# the longest that the others wait for work of process 0: indexing a large dataset
_WAIT_SECONDS = 3600

_peer_monitor: PeerMonitor | None = None
_broadcasts = 0  # of `run_on_leader` so far; in step on all processes, which makes the keys unique
_comparisons = 0  # of `all_equal`, likewise


def index() -> int:
    """Return the index of this process."""
    return _number("MMJAX_PROCESS", "0")


def count() -> int:
    """Return the number of processes of the run."""
    return _number("MMJAX_PROCESSES", "1")


def is_leader() -> bool:
    """Return whether this process is the leader, which writes the run's files and prints for all."""
    return index() == 0


def peer_monitor() -> PeerMonitor | None:
    """Return the monitor of the other processes; None when this process is alone."""
    return _peer_monitor


@contextmanager
def process_group() -> Iterator[None]:
    """Run the body as one process of the group that the environment names; all exit together.

    Where one ends early, by an error or a signal, the others end too, within a minute, and print
    which one it was: exit code 2 for a user's mistake, 1 otherwise. With one process the body just
    runs.
    """
    if count() == 1:
        yield
        return
    global _peer_monitor
    _connect()
    coordinator = os.environ["MMJAX_COORDINATOR"]
    _peer_monitor = PeerMonitor(
        distributed.global_state.client, coordinator, index(), count(), _open_links(coordinator)
    )
    _peer_monitor.start()
    try:
        hosts()  # by all together now, so that any may ask for them alone
        with explain_runtime_errors():
            yield
        wait_for_all("end")
    except UserError as error:
        if is_leader() or not error.everywhere:
            print(f"error: process {index()}: {error}", file=sys.stderr, flush=True)
        if error.everywhere:
            _peer_monitor.await_exits(range(count()))
        exit_at_once(error.code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        _peer_monitor.links.leave()
        exit_at_once(130)
    except StoppedBySignal:
        end_others(0)
        exit_at_once(0)
    except BaseException:
        # A failed collective mostly means that another process died: the monitor prints which and
        # ends this one, within JAX's heartbeat timeout. Only where it has not is the traceback
        # worth printing.
        time.sleep(HEARTBEAT_SECONDS + 6)
        print(f"process {index()} of {count()}:", file=sys.stderr)
        traceback.print_exc()
        exit_at_once(1)
    _peer_monitor.finish()
    _disconnect()


def _open_links(coordinator: str) -> PeerLinks:
    """Open this process's sockets to all others, which do so together."""
    links = PeerLinks(own_address(coordinator))
    token = run_on_leader(lambda: secrets.token_hex(16))
    links.open(token, gather("links", links.address))
    return links


def end_others(code: int) -> None:
    """End the other processes with this exit code, because this one was stopped before its first step."""
    if _peer_monitor is None:
        return
    line = f"process {index()} of {count()} was stopped before its first step, so that all end"
    _peer_monitor.publish_stuck(StuckReport(line, (), code))
    _peer_monitor.await_exits(range(count()))


def run_on_leader(work: Callable[[], Any]) -> Any:
    """Run `work` on process 0 alone and return its result, which JSON can hold, on all; likewise raise its UserError.

    All processes must call this in the same order.
    """
    global _broadcasts
    if count() == 1:
        return work()
    key = f"mmjax/broadcast/{_broadcasts}"
    _broadcasts += 1
    client = distributed.global_state.client
    if not is_leader():
        message = json.loads(client.blocking_key_value_get(key, _WAIT_SECONDS * 1000))
        if "error" in message:
            raise UserError(message["error"], everywhere=True)
        return message["result"]
    try:
        # The others wait for an answer: they must get it in the case of an error, too.
        result = work()
    except UserError as error:
        client.key_value_set(key, json.dumps({"error": str(error)}))
        raise UserError(str(error), everywhere=True) from error
    client.key_value_set(key, json.dumps({"result": result}))
    return result


@contextmanager
def enter_on_leader(context: AbstractContextManager[Any]) -> Iterator[Any]:
    """Enter a context on process 0 alone, and yield its value, which JSON can hold, on all."""
    with ExitStack() as stack:
        yield run_on_leader(lambda: stack.enter_context(context))


def gather(key: str, text: str) -> list[str]:
    """Gather a text of every process on all of them, in process order. A key serves once; any thread may call this."""
    if count() == 1:
        return [text]
    client = distributed.global_state.client
    milliseconds = _WAIT_SECONDS * 1000
    client.key_value_set(f"mmjax/gather/{key}/{index()}", text)
    if is_leader():
        # Process 0 collects and publishes all texts under one key: 2 n requests for n processes
        # instead of n^2.
        texts = [
            client.blocking_key_value_get(f"mmjax/gather/{key}/{p}", milliseconds)
            for p in range(count())
        ]
        client.key_value_delete(f"mmjax/gather/{key}/")
        client.key_value_set(f"mmjax/gathered/{key}", json.dumps(texts))
        return texts
    return json.loads(client.blocking_key_value_get(f"mmjax/gathered/{key}", milliseconds))


def all_equal(text: str) -> bool:
    """Return whether all processes call this with the same text; they must call it in the same order."""
    global _comparisons
    _comparisons += 1
    return len(set(gather(f"compared/{_comparisons}", text))) == 1


def kv_put(key: str, text: str) -> None:
    """Store a text that any process may read with `kv_get`; does not wait."""
    if count() > 1:
        distributed.global_state.client.key_value_set(f"mmjax/{key}", text, allow_overwrite=True)


def kv_get(key: str) -> str:
    """Read the text that some process has stored with `kv_put`, waiting for it."""
    return distributed.global_state.client.blocking_key_value_get(
        f"mmjax/{key}", HEARTBEAT_SECONDS * 1000
    )


def wait_for_all(where: str) -> None:
    """Wait until every process has reached this barrier."""
    if count() > 1:
        distributed.global_state.client.wait_at_barrier(f"mmjax/{where}", _WAIT_SECONDS * 1000)


@cache
def hosts() -> list[str]:
    """Return the host name of each process: MMJAX_HOST where it is set."""
    return gather("hosts", os.environ.get("MMJAX_HOST") or socket.gethostname())


def per_host() -> int:
    """Count the consecutive processes that share a host, where that is the same everywhere; else 1."""
    counts = [len(list(group)) for _, group in itertools.groupby(hosts())]
    return counts[0] if len(set(counts)) == 1 else 1


def _number(variable: str, default: str) -> int:
    """Read a number from the environment."""
    text = os.environ.get(variable, default)
    if not text.isdecimal():
        raise UserError(
            f"{variable}={text!r} is not a number; set it to one, or unset it to train with one process"
        )
    return int(text)


def _connect() -> None:
    """Join the coordination service."""
    coordinator = os.environ.get("MMJAX_COORDINATOR", "")
    if not coordinator:
        raise UserError(
            "MMJAX_PROCESSES is set and MMJAX_COORDINATOR is not; set it to HOST:PORT of process 0 on all of them, or "
            "start with launch/local.sh or launch/slurm.sbatch"
        )
    address = re.fullmatch(r"(.+):(\d{1,5})", coordinator)
    if not address or not 0 < int(address[2]) < 1 << 16:
        raise UserError(
            f"MMJAX_COORDINATOR={coordinator!r} is not HOST:PORT of process 0; set it so on all of them"
        )
    if "MMJAX_PROCESS" not in os.environ or not index() < count():
        number = os.environ.get("MMJAX_PROCESS", "")
        raise UserError(
            f"MMJAX_PROCESS={number!r} is not one of the {count()} processes of MMJAX_PROCESSES; number them from 0 to "
            f"{max(count() - 1, 0)}, each with its own number"
        )
    # else JAX aborts before we can print who died
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # else JAX handles SIGTERM itself
    if is_leader():
        with _reserved(coordinator, int(address[2])):
            _join(coordinator)
    else:
        _join(coordinator)


@contextmanager
def _reserved(coordinator: str, port: int) -> Iterator[None]:
    """Hold the port on which JAX listens in the body. Raises UserError where another program has it.

    JAX crashes where it cannot listen, and shares the port with another run that listens there by
    the same library.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as bound, socket.socket(socket.AF_UNIX) as exclusive:
        # Without SO_REUSEPORT, so that a port that others share counts as taken. JAX can still
        # listen beside this socket, which does not; nobody is given the port meanwhile.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # two runs that start at once: an abstract name belongs to one of them
            if sys.platform == "linux":
                exclusive.bind(f"\0mmjax-coordinator-{port}")
            bound.bind(("", port))
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at {coordinator}: {error.strerror}; choose another port in "
                "MMJAX_COORDINATOR, on all processes"
            ) from None
        yield


def _join(coordinator: str) -> None:
    """Join the coordination service; end this process where the others do not come in time, or a signal does.

    JAX waits for them in a thread: it aborts a process that has waited in vain, and heeds no signal
    meanwhile.
    """
    joined = threading.Event()
    errors: list[Exception] = []

    def join() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                count(),
                index(),
                cluster_detection_method="deactivate",  # it would give each process one GPU
                initialization_timeout=_START_SECONDS + _JAX_SECONDS,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            )
        except Exception as error:
            errors.append(error)
        joined.set()

    threading.Thread(target=join, name="joining", daemon=True).start()
    deadline = time.monotonic() + _START_SECONDS
    try:
        while not joined.wait(0.25) and time.monotonic() < deadline:
            pass
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        exit_at_once(130)
    except StoppedBySignal:
        exit_at_once(0)
    if joined.is_set() and not errors:
        return
    reason = (
        str(errors[0]).splitlines()[0][:200]
        if errors
        else f"not all have come in {_START_SECONDS} s"
    )
    remedy = "see that all of them run with the same MMJAX_COORDINATOR, and that its port is open between the hosts"
    try:
        if not is_leader():
            socket.create_connection(host_and_port(coordinator), 5).close()
    except OSError as error:
        reason = f"no connection in {_START_SECONDS} s ({error.strerror or error})"
        remedy = "see that process 0 runs, that this is its host, and that its port is open between the hosts"
    print(
        f"error: process {index()} of {count()} cannot reach the others at {coordinator}: {reason}; {remedy}",
        file=sys.stderr,
        flush=True,
    )
    exit_at_once(2)


def _disconnect() -> None:
    """Exit in order: process 0 last, because the others need its service even to announce that they exit."""
    client = distributed.global_state.client
    if not is_leader():
        client.key_value_set(f"mmjax/exited/{index()}", "")
        exit_at_once(0)
    for process in range(1, count()):
        client.blocking_key_value_get(f"mmjax/exited/{process}", _WAIT_SECONDS * 1000)
    time.sleep(_EXIT_SECONDS)
    jax.distributed.shutdown()
