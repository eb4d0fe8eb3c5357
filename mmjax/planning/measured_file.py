"""Measured-rates files: what a user measured on his cluster, in place of the rates that a plan would assume.

    {"products": 0.58, "attention": 0.35, "launch": 4e-6, "memory": 2.7e12, "host": 5e10,
     "link": 3.6e11, "network": 4.2e10, "layers": {"llm": {"rows": 1, "seconds": {"4096":
     {"forward": 0.011, "none": 0.034, "products": 0.036, ...}}}}}

Every key may be missing; units stand at `hardware.MeasuredRates`. `layers` has, by tower and row
length, the seconds of one layer on so many rows: of its forward pass, and of both passes with every
remat policy (`offload` only where `mesh.host_memory` is set).

A run's `rates.json` is such a file, with the `device` that it was measured on, of which alone a
plan takes it, and what the run itself goes on with (`Probed`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from mmjax.config import Config, Remat
from mmjax.config.codec import decode
from mmjax.config.model import stacked_towers
from mmjax.errors import UserError
from mmjax.planning.hardware import Cluster, Device, MeasuredRates, find_device
from mmjax.planning.speed import FORWARD, LayerTimes

RATES = tuple(f.name for f in fields(MeasuredRates))
SHARES = ("products", "attention")
LAYERS = "layers"
DEVICE = "device"
PROBED = "probed"
KEYS = (*RATES, LAYERS, DEVICE, PROBED)


@dataclass(frozen=True)
class Probed:
    """Ratios of the prices that a run has measured by two rows to those assumed: both 1 where these hold."""

    position: float  # seconds of a position, with all that a step computes again and does not hide
    pair: float  # seconds of a pair that attends


def read_probed(path: Path, device: str) -> Probed | None:
    """Read a run's measured price ratios for a device, by JAX's name; None where the file has none for it."""
    try:
        tree = json.loads(path.read_text())
        probed = decode(Probed, tree[PROBED], PROBED)
    except (
        OSError,
        ValueError,
        RecursionError,
        KeyError,
        TypeError,
        UserError,
    ):  # missing, or not what was written
        return None
    return probed if tree.get(DEVICE) == device and min(probed.position, probed.pair) > 0 else None


def probed_text(device: str, probed: Probed, shares: Mapping[str, float]) -> str:
    """Format a run's measured-rates file. shares: of the peak, by `SHARES`."""
    # A share above 1 says that the peak is not known.
    rates = {key: share for key, share in shares.items() if 0 < share <= 1}
    return json.dumps({DEVICE: device, **rates, PROBED: asdict(probed)}, indent=2) + "\n"


@dataclass(frozen=True)
class MeasuredLayers:
    """Seconds of one layer of a tower: `seconds[row length][pass or policy]`, of so many rows."""

    rows: int
    seconds: dict[str, dict[str, float]]


def read_measured(
    path: Path, cluster: Cluster, config: Config
) -> tuple[Cluster, dict[str, LayerTimes]]:
    """Read a measured-rates file: the cluster with these rates, and the towers' layer times.

    Raises UserError, naming the file, the key and the known ones, for a key that is unknown and a
    value that cannot be.
    """
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--measured {path}: no readable JSON ({error})") from None
    try:
        rates, layers = _decode(tree, cluster.device)
        times = {tower: _layer_times(tower, layers[tower], config, f"({path})") for tower in layers}
    except UserError as error:
        known = ", ".join(KEYS)
        raise UserError(
            f"--measured {path}: {error}; its keys are {known}, each of which may be missing"
        ) from None
    return replace(
        cluster, device=replace(cluster.device, measured=rates, measured_in=str(path))
    ), times


def layers_record(times: Mapping[str, LayerTimes]) -> dict[str, Any]:
    """Return layer times as a file's `layers` state them."""
    return {
        tower: {"rows": measured.rows, "seconds": measured.seconds}
        for tower, measured in times.items()
    }


def _decode(tree: Any, device: Device) -> tuple[MeasuredRates, dict[str, MeasuredLayers]]:
    if not isinstance(tree, dict):
        raise UserError("not a JSON object")
    if unknown := [key for key in tree if key not in KEYS]:
        raise UserError(f"unknown key {unknown[0]!r}")
    if DEVICE in tree:
        _check_device(decode(str, tree[DEVICE], DEVICE), device)
    if PROBED in tree:
        decode(Probed, tree[PROBED], PROBED)
    rates = {key: _decode_rate(key, tree[key]) for key in RATES if key in tree}
    if "attention" in rates and device.platform != "gpu":
        raise UserError(f"attention: there is no attention kernel on {device.name}")
    return MeasuredRates(**rates), decode(dict[str, MeasuredLayers], tree.get(LAYERS, {}), LAYERS)


def _check_device(measured_on: str, device: Device) -> None:
    """Raise UserError where rates are of another device than this one."""
    sheet = find_device(measured_on)
    if measured_on not in (device.name, device.kind) and (
        sheet is None or sheet.name != device.name
    ):
        raise UserError(
            f"{DEVICE}: these rates were measured on {measured_on}, and the plan is for {device.name}; "
            "remove the key to take them all the same"
        )


def _decode_rate(key: str, value: Any) -> float:
    rate: float = decode(float, value, key)
    if key in SHARES and not 0 < rate <= 1:
        raise UserError(
            f"{key}: got {rate:g}; give a share of the data sheet's peak, above 0 and at most 1"
        )
    if rate < 0 or (rate == 0 and key != "launch"):
        raise UserError(
            f"{key}: got {rate:g}; give {'seconds, 0 or more' if key == 'launch' else 'bytes/s, above 0'}"
        )
    return rate


def _layer_times(tower: str, layers: MeasuredLayers, config: Config, source: str) -> LayerTimes:
    """Check a tower's stated layer times, and keep the policies that a plan of this config may choose from."""
    towers = tuple(stacked_towers(config.model))
    where = f"{LAYERS}.{tower}"
    if tower not in towers:
        raise UserError(f"{where}: the model has no such tower, only {', '.join(towers)}")
    if layers.rows < 1 or not layers.seconds:
        raise UserError(f"{where}: give at least 1 row, and the seconds of at least one row length")
    known = (FORWARD, *get_args(Remat))
    # Policies that offload can be chosen only where the host has memory for it.
    needed = [name for name in known if name != "offload" or config.mesh.host_memory]
    times = {}
    for text, by_policy in layers.seconds.items():
        where = f"{LAYERS}.{tower}.seconds.{text}"
        if not (text.isascii() and text.isdecimal() and int(text) > 0):
            raise UserError(f"{where}: {text!r} is no row length")
        if unknown := [name for name in by_policy if name not in known]:
            raise UserError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
        if missing := [name for name in needed if name not in by_policy]:
            raise UserError(f"{where}: {missing[0]!r} is missing; give {', '.join(needed)}")
        if wrong := [name for name, seconds in by_policy.items() if seconds <= 0]:
            raise UserError(
                f"{where}.{wrong[0]}: got {by_policy[wrong[0]]:g}; give seconds, above 0"
            )
        times[int(text)] = {name: by_policy[name] for name in needed}
    return LayerTimes(layers.rows, times, source)
