"""Measure what process 0 does for many processes, with a real client of JAX's coordination service for each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# remove when jax.distributed gives the service and its clients public names
from jax._src.lib import _jax

from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.processes import free_port, run_for_json
from mmjax.distributed.peer_monitor import HEARTBEAT_SECONDS, heartbeat_seconds, poll_seconds
from mmjax.runtime.devices import resident_memory

_TIMEOUT = 600  # seconds: the clients of thousands of processes share one machine here
_LISTEN_SECONDS = 20  # after which each process asks again for the report of a stuck run
_HOSTS = 250  # of 127.0.x.1 to 127.0.x.250: clients of one address would share a connection
_HEARTBEAT = (  # as `peer_monitor` writes it
    '{"step": 1000, "name": "waiting for data", "seconds": 1.5, "action": 0, "detail": "", '
    '"beat": 1, "host": "n"}'
)


OPTIONS: Options = {
    "--processes": option([64, 256], "numbers of clients, each a thread"),
    "--rounds": option(5, "requests of each kind by each client"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure each number of processes: requests a second, and the service's CPU time and memory for them."""
    rows = []
    for count in args.processes:
        code = f"from mmjax.benchmarks.coordination import measure; measure({count}, {args.rounds})"
        rows.append(run_for_json("-c", code))
    return rows


def serve(port: int, count: int) -> None:
    """Be process 0: for each line that is read, print the CPU seconds and the bytes that the service has taken."""
    start = time.process_time()
    resident = resident_memory()
    service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", count, heartbeat_timeout=_TIMEOUT, shutdown_timeout=1, recoverable=True
    )
    for _ in sys.stdin:
        print(json.dumps([time.process_time() - start, resident_memory() - resident]), flush=True)
    del service  # it lived until here
    os._exit(0)


def measure(count: int, rounds: int) -> None:
    """Be all clients, print the row, and exit at once: JAX aborts a client whose service is gone."""
    print(json.dumps(_measure(count, rounds)), flush=True)
    os._exit(0)


def _measure(count: int, rounds: int) -> dict[str, Any]:
    port = free_port()
    code = f"from mmjax.benchmarks.coordination import serve; serve({port}, {count})"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", code], **pipes)  # ends with its standard input
    threads = ThreadPoolExecutor(count)

    def taken() -> tuple[float, int]:
        server.stdin.write("\n")
        server.stdin.flush()
        return tuple(json.loads(server.stdout.readline()))

    def cpu_seconds(work: Callable[[int], object], repeats: int = rounds) -> float:
        """Have every client do it as often; return the service's CPU seconds for each time of each."""
        idle, _ = taken()
        for _ in range(repeats):
            list(threads.map(work, range(count)))
        return (taken()[0] - idle) / (repeats * count)

    taken()  # it is there
    began = time.monotonic()
    clients = [
        _jax.get_distributed_runtime_client(
            f"127.0.{k // _HOSTS}.{k % _HOSTS + 1}:{port}",
            k,
            init_timeout=_TIMEOUT,
            use_compression=True,
            heartbeat_timeout=_TIMEOUT,
        )
        for k in range(count)
    ]
    connect = cpu_seconds(lambda k: clients[k].connect(), 1)
    connected = time.monotonic() - began
    heartbeat = cpu_seconds(
        lambda k: clients[k].key_value_set(f"mmjax/phase/{k}", _HEARTBEAT, allow_overwrite=True)
    )
    everyone = list(range(count))
    poll = cpu_seconds(lambda k: clients[k].get_live_nodes(everyone))
    resident = taken()[1]
    beats = count / heartbeat_seconds(count)
    polls = count / poll_seconds(count)
    return {
        "processes": count,
        "connected_seconds": connected,
        "connect_cpu_us": 1e6 * connect,
        "heartbeat_cpu_us": 1e6 * heartbeat,
        "poll_cpu_us": 1e6 * poll,
        "requests_per_second": beats
        + polls
        + count / _LISTEN_SECONDS
        + count / (HEARTBEAT_SECONDS / 2),
        "cores": beats * heartbeat + polls * poll,
        "memory_mb": resident / 1e6,
    }
