#!/usr/bin/env bash
# Check pipelines between two hosts that share FOLDER: whatever carries arrays between them, losses are those of one mesh.
# On each of them, which has DEVICES devices, with MMJAX_PROCESS=0 on the first and 1 on the second:
#   MMJAX_COORDINATOR=first:20000 MMJAX_PROCESSES=2 MMJAX_PROCESS=0 launch/check_units.sh FOLDER DEVICES [CONFIG] [a.b=value ...]
#
# Encoders run on the first host, the LLM on the second. Ends with 1 where losses differ by more than 1e-4 of them.
set -u
if [[ $# -lt 2 || ! $2 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/check_units.sh FOLDER DEVICES [CONFIG] [a.b=value ...]" >&2
    exit 2
fi
folder=$1 devices=$2
shift 2
words=("${@:-tiny_omni}" training.steps=10 schedule.warmup=1 training.evaluate_every=0 training.checkpoint_every=0)
python -m mmjax.train "${words[@]}" mesh.data="$((2 * devices))" run="$folder/mesh" || exit
export MMJAX_CHECK_TRANSFERS=1 # every piece is compared where it arrives
# shellcheck disable=SC2054 # the comma is in a value
units=(units.encoders.modules=vision,audio units.encoders.data="$devices" units.llm.data="$devices")
for carrier in sockets device collective; do
    python -m mmjax.train "${words[@]}" "${units[@]}" pipeline.carrier="$carrier" run="$folder/$carrier" ||
        echo "$carrier: ended with code $?; it cannot be used here"
done
((MMJAX_PROCESS == 0)) || exit 0
python - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])


def losses(run: str) -> list[float]:
    log = folder / run / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [record["loss"] for record in records if "loss" in record]


wanted, wrong = losses("mesh"), False
for carrier in ("sockets", "device", "collective"):
    if found := losses(carrier):
        worst = max(abs(a - b) / b for a, b in zip(found, wanted))
        wrong |= len(found) != len(wanted) or not worst <= 1e-4
        print(f"{carrier}: {len(found)} of {len(wanted)} steps, losses within {worst:.1e} of those of one mesh")
sys.exit(wrong)
PYTHON
