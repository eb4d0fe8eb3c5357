"""Plan files: settings that a person can read and edit, beside the expected results.

    {"config": "omni_84b", "cluster": "h100x320x8",
     "settings": {"mesh.fsdp": 256, "model.llm.remat": [[11, "full"], [69, "products"]], ...},
     "expected": {"seconds": 3.76, ...}}

Only `settings` is read back, as changes to the config: `mesh.*`, `units.*`, `remat`, `batch.balance`, `batch.rows`,
`batch.microbatches` and `training.loss_chunks`. A tower's remat is run-length encoded, [COUNT, POLICY] for consecutive
layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from mmjax.config import Config, PostBalance, Remat, Unit
from mmjax.config.codec import did_you_mean
from mmjax.errors import UserError

KEYS = ("config", "cluster", "settings", "expected")
SETTINGS = (
    r"mesh\.(data|fsdp|expert|context|tensor|sequence_parallel)|model\.(llm|encoders\.\w+)\.remat"
    r"|batch\.(balance|balance\.locality|microbatches)"
    r"|batch\.rows\.\w+|units|units\.\w+\.(data|fsdp|context|tensor|pipeline|virtual|cuts|modules)|training\.loss_chunks"
)


def plan_text(
    config: Config,
    cluster: str,
    mesh: Mapping[str, int],
    policies: Mapping[str, Sequence[Remat]],
    loss_chunks: int,
    expected: Mapping[str, Any],
) -> str:
    """Format the plan file for this mesh, or the config's units, with these policies."""
    settings: dict[str, Any] = {f"mesh.{axis}": mesh[axis] for axis in ("data", "fsdp", "context", "tensor")}
    if mesh["expert"] != 1:
        settings["mesh.expert"] = mesh["expert"]
    if mesh["tensor"] > 1:
        settings["mesh.sequence_parallel"] = config.mesh.sequence_parallel
    if not config.units:
        settings["units"] = "{}"
    for name, unit in config.units.items():
        defaults = Unit()
        changed = {
            f.name: getattr(unit, f.name) for f in fields(Unit) if getattr(unit, f.name) != getattr(defaults, f.name)
        }
        # Something must name the unit, if it has one device.
        settings |= {f"units.{name}.{key}": value for key, value in ({"data": unit.data} | changed).items()}
    settings |= {f"batch.rows.{tower}": rows for tower, rows in config.batch.rows.items()}
    settings["batch.microbatches"] = config.batch.microbatches
    settings["batch.balance"] = config.batch.balance.kind
    if isinstance(config.batch.balance, PostBalance):
        settings["batch.balance.locality"] = config.batch.balance.locality
    settings["training.loss_chunks"] = loss_chunks
    for tower, layers in policies.items():
        path = "llm" if tower == "llm" else f"encoders.{tower}"
        settings[f"model.{path}.remat"] = [[len(list(run)), policy] for policy, run in groupby(layers)]
    # One setting per line, for reading and for diffs.
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in settings.items()]
    head = f'{{"config": {json.dumps(config.name)}, "cluster": {json.dumps(cluster)},\n  "settings": {{\n'
    return head + ",\n".join(lines) + '\n  },\n  "expected": ' + json.dumps(dict(expected)) + "}\n"


def plan_changes(path: Path) -> tuple[str, list[str]]:
    """Read a plan file: the config's name, and its settings as changes `a.b=value`.

    Raises UserError, naming the file and the place, for a file that is no plan.
    """
    try:
        plan = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"plan={path}: no readable plan ({error}); make one with python -m mmjax.plan --out") from None
    if not isinstance(plan, dict) or not isinstance(plan.get("settings"), dict):
        raise UserError(
            f'plan={path}: a plan is a JSON object with "settings"; make one with python -m mmjax.plan --out'
        )
    if unknown := [key for key in plan if key not in KEYS]:
        raise UserError(f"plan={path}: {unknown[0]!r} is no part of a plan{did_you_mean(unknown[0], KEYS)}")
    return str(plan.get("config", "")), [_change(path, key, value) for key, value in plan["settings"].items()]


def _change(path: Path, key: str, value: Any) -> str:
    """Format a setting as a change to the config, after checking it."""
    if not re.fullmatch(SETTINGS, key):
        raise UserError(
            f"plan={path}: settings.{key} is not a plan's; it may set mesh.data, .fsdp, .expert, .context, "
            ".tensor, .sequence_parallel, units, a tower's remat, batch.balance, batch.rows, batch.microbatches and "
            "training.loss_chunks"
        )
    if key.endswith(".remat") and isinstance(value, list):
        return f"{key}=({','.join(_layers(path, key, value))})"
    if key.startswith("units.") and isinstance(value, list) and all(type(x) in (int, str) for x in value):
        return f"{key}=({''.join(f'{x},' for x in value)})"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"plan={path}: settings.{key} is {json.dumps(value)}; give a number or a word")
    return f"{key}={value}"


def _layers(path: Path, key: str, runs: list[Any]) -> list[str]:
    """Expand run-length encoded policies: [[2, "full"], [1, "none"]] is full, full, none."""
    layers: list[str] = []
    for run in runs:
        well_formed = isinstance(run, list) and len(run) == 2 and isinstance(run[0], int) and run[1] in get_args(Remat)
        if not well_formed or run[0] < 1:
            raise UserError(
                f"plan={path}: settings.{key} has {json.dumps(run)}; give runs of layers as [COUNT, POLICY], a policy "
                f"being one of {', '.join(get_args(Remat))}"
            )
        layers += [run[1]] * run[0]
    return layers
