"""Measure what a GPU can tell, in sections of about a minute each, into one JSON file and one Markdown table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmjax.benchmarks.gpu_kernels import (
    TINY,
    Sizes,
    delta_net,
    device,
    exactness,
    first_line,
    grouped_products,
    image_attention,
    text_attention,
)
from mmjax.benchmarks.gpu_peer import measure_race
from mmjax.benchmarks.gpu_steps import measure_products, measure_rank, measure_rows, measure_step
from mmjax.benchmarks.harness import Options, option
from mmjax.console import print_note
from mmjax.disk import user_cache
from mmjax.errors import UserError, check_output, exit_process, run_command
from mmjax.runtime.devices import INSTALL_CUDA, enable_compilation_cache, set_gpu_memory_fraction


class Section(NamedTuple):
    """A section: what measures it, the seconds that it takes at most, and the model of a step."""

    measure: Callable[..., dict[str, Any]]
    seconds: float
    model: str = ""


DEVICE = "device"  # the section that every run begins with
SECTIONS = {  # in this order
    "exactness": Section(exactness, 120),
    "products": Section(measure_products, 150),
    "text_attention": Section(text_attention, 120),
    "image_attention": Section(image_attention, 60),
    "step_7b": Section(measure_step, 180, "7b"),
    "step_3b": Section(measure_step, 120, "3b"),
    "lora_7b": Section(measure_step, 120, "lora_7b"),
    "decoder": Section(measure_step, 60, "decoder"),
    "rank_of_8": Section(measure_rank, 120, "decoder"),
    "rows": Section(measure_rows, 180),
    "peer_uneven": Section(measure_race, 180, "3b large-uneven full"),
    "peer_near_equal": Section(measure_race, 180, "3b large-near-equal full"),
    "peer_text": Section(measure_race, 180, "3b large-text full"),
    "peer_lora": Section(measure_race, 180, "7b large-uneven lora"),
    "grouped_products": Section(grouped_products, 60),
    "delta_net": Section(delta_net, 120),
}


KNOWN = ",".join(SECTIONS)
OPTIONS: Options = {
    "changes": option(None, "changes to the config of the steps", metavar="a.b=value", nargs="*"),
    "--results": option(
        Path("gpu.json"), "sections in it are not run again", metavar="F.json", type=Path
    ),
    "--sections": option(KNOWN, f"of {KNOWN}", metavar="A,B"),
    "--minutes": option(9.0, "after which the rest is left for the next run"),
    "--tiny": option(False, "small sizes for any device, with the kernel interpreted"),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Run the sections that the file of results lacks, each in a process of its own; return all figures.

    A section that fails has its error's line as its only figure, and is run again the next time.
    """
    sections = args.sections.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        raise UserError(f"--sections: there is no {unknown[0]!r}; known are {', '.join(SECTIONS)}")
    check_output("--results", args.results, (".json",))
    deadline = math.inf if args.tiny else time.monotonic() + 60 * args.minutes
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    described = _section(DEVICE, args, None if args.tiny else 300)
    if "error" in described:
        raise UserError(f"bench gpu: JAX cannot use a device here: {described['error']}")
    if described["platform"] not in ("gpu", "cuda") and not args.tiny:
        raise UserError(
            f"bench gpu: JAX finds no GPU here, only {described['device']}; install it with: {INSTALL_CUDA}  (--tiny "
            "runs all sections in small on a CPU)"
        )
    earlier = results.get(DEVICE, described)
    if any(earlier[key] != described[key] for key in ("device", "sizes")):
        raise UserError(
            f"--results {args.results} holds {earlier['sizes']} sizes on {earlier['device']}; name another file"
        )
    results[DEVICE] = described
    for name in sections:
        remaining = deadline - time.monotonic()
        if "error" not in results.get(name, {"error": ""}):
            continue
        if remaining < 10:
            print_note(f"{name}: left for the next run of the same command")
            continue
        limit = None if args.tiny else min(SECTIONS[name].seconds, remaining)
        print_note(f"{name}{f', up to {limit:.0f} s' if limit else ''}")
        results[name] = _section(name, args, limit)
        args.results.write_text(json.dumps(results, indent=2) + "\n")
        args.results.with_suffix(".md").write_text(markdown(results))
    return _rows(results)


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"section": name, "figure": figure, "value": value}
        for name, figures in results.items()
        for figure, value in figures.items()
    ]


def _section(name: str, args: Namespace, limit: float | None) -> dict[str, Any]:
    """Run a section in a process of its own: its memory is its own, and so is an error that a GPU does not recover."""
    options = ["--tiny"] if args.tiny else []
    command = [sys.executable, "-m", "mmjax.benchmarks.gpu", name, *options, *args.changes]
    began = time.monotonic()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit:.0f} s"}
    lines = ended.stdout.splitlines() or [""]
    if ended.returncode or not lines[-1].startswith("{"):
        messages = ended.stderr.strip().splitlines() or [""]
        return {"error": f"exit code {ended.returncode}: {messages[-1][:300]}"}
    return json.loads(lines[-1]) | {"section's seconds": time.monotonic() - began}


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format all figures as one Markdown table."""
    lines = ["| section | figure | value |", "|---|---|---|"]
    for name, figure, value in map(dict.values, _rows(results)):
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        lines.append(f"| {name} | {figure} | {text.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run one section in this process and print its figures as JSON."""
    name, *words = sys.argv[1:]
    set_gpu_memory_fraction()
    enable_compilation_cache(user_cache() / "programs")
    sizes = TINY if "--tiny" in words else Sizes()
    changes = [word for word in words if word != "--tiny"]
    try:
        if name == DEVICE:
            figures = device(sizes)
        else:
            measure, _, model = SECTIONS[name]
            figures = measure(sizes, model, changes) if model else measure(sizes)
    except Exception as error:
        figures = {"error": first_line(error)}
    print(json.dumps(figures))


if __name__ == "__main__":
    exit_process(run_command(main))
