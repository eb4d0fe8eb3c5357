"""Describe what rehearsed steps take beside their plan, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import jax

from mmjax.autotune.forecast import describe_links
from mmjax.autotune.rehearsal import Rehearsal
from mmjax.console import duration, size, table
from mmjax.planning.hardware import find_device
from mmjax.training.describe_plan import Compiled, describe_compiled


def describe_rehearsals(
    rehearsals: Mapping[str, Rehearsal],
    balance: str,
    device: jax.Device,
    compiled: Compiled | None = None,
) -> list[str]:
    """Format rehearsals for a person.

    balance: the run's own, of which each module's ranks are listed. compiled: its programs.
    """
    own = rehearsals[balance]
    cluster = own.forecast.cluster
    first, *others = own.forecast.steps[: own.steps]
    steps = f"steps {first.step} to {others[-1].step}" if others else f"step {first.step}"
    lines = [
        f"run    {own.forecast.config.name}: {steps} of {cluster}, on one {device.device_kind}",
        *table(_balance_rows(rehearsals)),
        f"ranks  balance {balance}, seconds that they compute in these steps",
        *table(_module_rows(own)),
    ]
    for name, time in (("step", own.run_time.step), ("plan", own.planned.step)):
        parts = ", ".join(f"{cause} {duration(s)}" for cause, s in asdict(time).items() if s)
        lines.append(f"{name:6} {duration(time.total)}: {parts}")
    memory = own.forecast.plan
    lines.append(
        f"memory {size(memory.device)} of {size(memory.limit.device)} on every rank, as planned"
    )
    if compiled is not None:
        lines += describe_compiled(memory, compiled)
    return [*lines, *describe_links(cluster), *_notes(own, device)]


def _balance_rows(rehearsals: Mapping[str, Rehearsal]) -> list[tuple[str, ...]]:
    rows = [("balance", "step", "planned", "ranks wait", "planned", "padding")]
    for kind, rehearsal in rehearsals.items():
        waits = rehearsal.forecast.waits
        rows.append(
            (
                kind,
                duration(rehearsal.run_time.step.total),
                duration(rehearsal.planned.step.total),
                f"{rehearsal.wait:.1%}",
                f"{waits.wait:.1%}",
                f"{waits.padding:.1%}",
            )
        )
    return rows


def _module_rows(rehearsal: Rehearsal) -> list[tuple[str, ...]]:
    rows = [("module", "ran", "slowest rank", "its seconds", "mean", "ranks wait")]
    for tower, seconds in rehearsal.by_rank.items():
        rows.append(
            (
                tower,
                f"{rehearsal.ran[tower]} of {len(seconds)}",
                str(seconds.argmax()),
                duration(seconds.max()),
                duration(seconds.mean()),
                duration(rehearsal.waits[tower]),
            )
        )
    if rehearsal.of_all is not None:
        total = rehearsal.of_all
        mean = duration(total.mean())
        wait = duration(sum(rehearsal.waits.values()))
        rows.append(("all", "", str(total.argmax()), duration(total.max()), mean, wait))
    return rows


def _notes(rehearsal: Rehearsal, device: jax.Device) -> Iterator[str]:
    cluster = rehearsal.forecast.cluster
    known = find_device(device.device_kind)
    name = known.name if known else device.platform
    if name != cluster.device.name:
        yield (
            f"note   passes ran on {name}, not on {cluster.device.name}: compare ranks and balances with each other, "
            "not seconds with the plan's"
        )


def rehearsal_numbers(
    rehearsals: Mapping[str, Rehearsal], compiled: Compiled | None = None
) -> dict[str, Any]:
    """Return the numbers of rehearsals, by balance. compiled: programs of the run's own."""
    bytes_of = {
        stage: {name: program.bytes for name, program in programs.items()}
        for stage, programs in (compiled or {}).items()
    }
    return {
        kind: {
            "step_seconds": rehearsal.run_time.step.total,
            "planned_step_seconds": rehearsal.planned.step.total,
            "causes": asdict(rehearsal.run_time.step),
            "wait": rehearsal.wait,
            "planned_wait": rehearsal.forecast.waits.wait,
            "padding": rehearsal.forecast.waits.padding,
            "wait_seconds": rehearsal.waits,
            "ran": rehearsal.ran,
            "rank_seconds": {t: s.tolist() for t, s in rehearsal.by_rank.items()},
            "memory": rehearsal.forecast.plan.device,
        }
        for kind, rehearsal in rehearsals.items()
    } | ({"compiled": bytes_of} if compiled else {})
