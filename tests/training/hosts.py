"""Train with N processes as on hosts of their own: python hosts.py N WORDS; it ends as launch/local.sh does."""

import os
import signal
import subprocess
import sys
import time

from started import free_port

SECONDS = 5  # that the others have to end by themselves

count, words = int(sys.argv[1]), sys.argv[2:]
together = {"MMJAX_PROCESSES": str(count), "MMJAX_COORDINATOR": f"127.0.0.1:{free_port()}"}
processes = [
    subprocess.Popen(
        [sys.executable, "-m", "mmjax.train", *words],
        env=os.environ | together | {"MMJAX_PROCESS": str(k), "MMJAX_HOST": f"host{k}"},
    )
    for k in range(count)
]


def end(number: int, frame: object) -> None:
    for process in processes:
        process.kill()
    sys.exit(128 + number)


signal.signal(signal.SIGTERM, end)  # also where the supervisor is killed
code, deadline = 0, float("inf")
while any(process.poll() is None for process in processes):
    codes = [process.poll() for process in processes]
    if not code and any(codes):
        code = next(filter(None, codes))
        deadline = time.monotonic() + SECONDS
    if time.monotonic() > deadline:
        for process in processes:
            process.kill()
    time.sleep(0.02)
code = code or next(filter(None, (process.poll() for process in processes)), 0)
sys.exit(code if code >= 0 else 128 - code)
