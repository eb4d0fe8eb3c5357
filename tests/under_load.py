"""Run tests again and again beside busy loops: `python tests/under_load.py --times 10 [pytest arguments]`.

What passes here depends on neither time nor load. Without arguments it runs `CLOCKED`: every
default test file that has to do with processes, threads, signals, sockets or clocks. The others
only compute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLOCKED = (
    "tests/test_bench.py", "tests/test_errors.py", "tests/test_generate.py", "tests/distributed/test_hangs.py",
    "tests/test_index_command.py", "tests/test_launch.py", "tests/distributed/test_processes.py",
    "tests/training/test_restarts.py", "tests/test_supervise.py", "tests/data/sources/test_array_records.py",
    "tests/data/sources/test_chat_files.py", "tests/data/storage/test_array_store.py",
    "tests/data/sources/test_media_sizes.py", "tests/data/storage/test_archives.py",
    "tests/data/sources/test_parquet.py", "tests/data/sources/test_token_counts.py",
    "tests/data/loading/test_workers.py", "tests/runtime/test_late_ends.py", "tests/autotune/test_layer_profile.py",
    "tests/training/test_metrics_log.py", "tests/runtime/test_run_lock.py", "tests/distributed/test_watchdog.py",
    "tests/data/storage/test_spool.py", "tests/data/loading/test_ray_pool.py", "tests/runtime/test_latents.py",
    "tests/test_studio.py", "tests/test_startup.py", "tests/test_hub.py", "tests/test_doctor.py", "tests/test_disk.py",
    "tests/test_train.py", "tests/test_report.py", "tests/training/test_unit_runs.py",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10, help="how often the tests run")
    parser.add_argument("--busy", type=int, default=4, help="loops beside them")
    args, words = parser.parse_known_args()
    failed = 0
    with ExitStack() as beside:
        for _ in range(args.busy):
            loop = beside.enter_context(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
            )
            beside.callback(loop.kill)
        for number in range(1, args.times + 1):
            began = time.monotonic()
            ended = subprocess.run([sys.executable, "-m", "pytest", *(words or CLOCKED)], cwd=ROOT)
            failed += ended.returncode != 0
            print(
                f"=== {number} of {args.times}: exit {ended.returncode}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    print(f"=== {args.times - failed} of {args.times} passed beside {args.busy} busy loops")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
