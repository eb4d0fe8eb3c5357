"""A Ray cluster whose nodes are processes of this machine; run as a script it does what its standard input says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORE = 100 * 2**20  # bytes of each node's object store


class RayCluster:
    """A head without CPUs, as training's own hosts would have, and nodes with some."""

    def __init__(self, cpus: list[int], package: Path = ROOT) -> None:
        """cpus: of each node. package: whose mmjax its processes import."""
        paths = [package, ROOT / "tests", ROOT / "tests" / "data"]
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # A lost node is noticed in 8 seconds, a lost head in 10.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "8",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        }
        command = [sys.executable, __file__, *map(str, cpus)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=variables, process_group=0
        )
        self.address = self.process.stdout.readline().strip()

    def tell(self, *words: object) -> None:
        """lose NODE, add CPUS, or head, which ends the head; returns when it is done."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def tasks() -> list[int]:
    """Processes in which Ray has run our tasks or does so."""
    return [number for number, title in _titles() if title.startswith(("ray::load", "ray::IDLE"))]


def _titles() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(folder.name), (folder / "cmdline").read_text()


def main(cpus: list[int]) -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=n, object_store_memory=STORE) for n in cpus]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        what, *number = line.split()
        if what == "lose":
            cluster.remove_node(nodes[int(number[0])], allow_graceful=False)
        elif what == "add":
            nodes.append(cluster.add_node(num_cpus=int(number[0]), object_store_memory=STORE))
        elif what == "head":
            cluster.remove_node(cluster.head_node, allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]])
