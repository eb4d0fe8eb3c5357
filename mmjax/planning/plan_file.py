"""Plan files: what a run was planned with and what planning chose, for a person to read and edit.

    {"version": 2, "config": "omni_84b", "cluster": "h100x320x8",
     "arguments": {}, "settings": {"batch.size.count": 20480, "mesh.fsdp": 256, "model.llm.remat":
     [[9, "full"], [71, "none"]], ...}, "expected": {"seconds": 3.76, ...}}

`arguments` are those of the config file's config(), `settings` changes to the config that it
returns: the overrides that the plan was made with, then what planning chose. Both are read back as
words of a command line. A tower's remat is run-length encoded, [COUNT, POLICY] for consecutive
layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from mmjax.config import Config, Remat, Unit
from mmjax.config.codec import did_you_mean, encode, key_of, leaves
from mmjax.config.model_validation import MAX_LAYERS
from mmjax.errors import UserError

VERSION = 2  # version 1 had what planning chose alone, without the overrides that it was chosen for
KEYS = ("version", "config", "cluster", "arguments", "settings", "expected", "signature")
REMAKE = "make one with python -m mmjax.plan --out"
# What every plan states, changed or not: sections and keys. Other keys are stated where they differ
# from the config's.
CHOSEN = (
    "mesh.data",
    "mesh.fsdp",
    "mesh.context",
    "mesh.tensor",
    "batch.rows",
    "batch.microbatches",
    "batch.balance",
)
CHOSEN = (*CHOSEN, "training.loss_chunks")


@dataclass(frozen=True)
class Plan:
    """A plan that was read. arguments, settings: words `key=text`, as on a command line."""

    path: Path
    config: str  # name of the config that it was made for
    arguments: list[str]
    settings: list[str]

    @property
    def words(self) -> list[str]:
        """Return all words of the plan."""
        return [*self.arguments, *self.settings]


def plan_text(
    planned: Config,
    config: Config,
    name: str,
    arguments: Sequence[str],
    overrides: Sequence[str],
    cluster: str,
    expected: Mapping[str, Any],
) -> str:
    """Format the plan file by which `config` becomes `planned`.

    config: as loaded with these arguments and overrides, words `key=text`. name: the config's
    without overrides.
    """
    settings = {key_of(word): _json_value(word.partition("=")[2].strip()) for word in overrides}
    old, new = (dict(leaves(Config, encode(Config, c, ""))) for c in (config, planned))
    if planned.units != config.units or not planned.units:
        # Units of the config, and what was set of them, make way for those that were chosen.
        settings = {key: value for key, value in settings.items() if key.split(".")[0] != "units"}
        settings["units"] = "{}"
    for key, text in new.items():
        section, _, rest = key.partition(".")
        if section == "units" and rest:
            unit, _, field = rest.rpartition(".")
            # Something must name the unit, if all of it is as by default.
            stated = field == "data" or getattr(planned.units[unit], field) != getattr(
                Unit(), field
            )
        else:
            stated = key.endswith(".remat") or any(
                key == k or key.startswith(f"{k}.") for k in CHOSEN
            )
        if stated or (section != "units" and old.get(key) != text):
            settings[key] = _runs(text) if key.endswith(".remat") else _json_value(text)
    # One setting per line, for reading and for diffs.
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in settings.items()]
    head = {"version": VERSION, "config": name, "cluster": cluster}
    values = {key_of(word): word.partition("=")[2] for word in arguments}
    return (
        f'{json.dumps(head)[:-1]},\n  "arguments": {json.dumps(values)},\n  "settings": {{\n'
        + ",\n".join(lines)
        + f'\n  }},\n  "expected": {json.dumps(dict(expected))}}}\n'
    )


def _json_value(text: str) -> Any:
    """Convert the text of an override to JSON: a number or true or false where JSON writes it alike, else a string."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and json.dumps(value) == text else text


def _runs(text: str) -> Any:
    """Run-length encode the policies of a tower's layers; one policy for all of them stays a word."""
    if "," not in text:
        return text
    return [[len(list(run)), policy] for policy, run in groupby(filter(None, text.split(",")))]


def read_plan(path: Path) -> Plan:
    """Read a plan file. Raises UserError, naming the file and the place, for a file that is no plan."""
    try:
        plan = json.loads(path.read_text(), object_pairs_hook=lambda pairs: _object(path, pairs))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"plan={path}: no readable plan ({error}); {REMAKE}") from None
    if not isinstance(plan, dict) or not isinstance(plan.get("settings"), dict):
        raise UserError(f'plan={path}: a plan is a JSON object with "settings"; {REMAKE}')
    if unknown := [key for key in plan if key not in KEYS]:
        raise UserError(
            f"plan={path}: {unknown[0]!r} is no part of a plan{did_you_mean(unknown[0], KEYS)}"
        )
    if (version := plan.get("version", 1)) != VERSION or isinstance(version, bool | float):
        raise UserError(
            f"plan={path}: it has version {json.dumps(version)} and this mmjax reads version {VERSION}; {REMAKE}"
        )
    arguments = plan.get("arguments", {})
    if not isinstance(arguments, dict):
        raise UserError(
            f"plan={path}: arguments is {json.dumps(arguments)}; give an object of names and texts"
        )
    if not isinstance(plan.get("config"), str):
        raise UserError(
            f"plan={path}: config is {json.dumps(plan.get('config'))}; name the config of the plan"
        )
    return Plan(
        path=path,
        config=plan["config"],
        arguments=[_word(path, "arguments", key, value) for key, value in arguments.items()],
        settings=[_word(path, "settings", key, value) for key, value in plan["settings"].items()],
    )


def _object(path: Path, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises UserError where it has a key twice, of which JSON would drop one."""
    built = dict(pairs)
    if len(built) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"plan={path}: {repeated!r} stands there twice; keep one of them")
    return built


def _word(path: Path, section: str, key: str, value: Any) -> str:
    """Format an entry of the file as a word of a command line."""
    if "=" in key or key != key.strip() or not key:
        raise UserError(f"plan={path}: {section} has {key!r}, which cannot be a key")
    if key.endswith(".remat") and isinstance(value, list):
        return f"{key}=({''.join(f'{layer},' for layer in _layers(path, key, value))})"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if not isinstance(value, int | float | str):
        raise UserError(
            f"plan={path}: {section}.{key} is {json.dumps(value)}; give a number, true, false or a text"
        )
    return f"{key}={value}"


def _layers(path: Path, key: str, runs: list[Any]) -> list[str]:
    """Expand run-length encoded policies: [[2, "full"], [1, "none"]] is full, full, none."""
    layers: list[str] = []
    for run in runs:
        well_formed = (
            isinstance(run, list)
            and len(run) == 2
            and type(run[0]) is int
            and run[1] in get_args(Remat)
        )
        if not well_formed or not 1 <= run[0] <= MAX_LAYERS:
            raise UserError(
                f"plan={path}: settings.{key} has {json.dumps(run)}; give runs of layers as [COUNT, POLICY], a policy "
                f"being one of {', '.join(get_args(Remat))}"
            )
        layers += [run[1]] * run[0]
    return layers
