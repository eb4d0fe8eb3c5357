"""Times every layer type on this device, forward and backward, and keeps what it found for the next run.

A profile is one JSON file for each tower, in ~/.cache/mmjax/layer_times (or under XDG_CACHE_HOME), named by a hash of
what decides its times: the device, JAX's version, the precision, the layer, and the gradients that are wanted.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import Config, DecoderConfig, Remat
from mmjax.models.model import Model
from mmjax.parallel import processes
from mmjax.planning.cost import frozen_modules, wanted_gradients
from mmjax.planning.layer_times import FORWARD, LayerTimes, grid_of
from mmjax.planning.work import Encoder
from mmjax.training.console import note
from mmjax.training.layers_alone import backward_of, batch_of_tower, tower_alone, tower_inputs

STACK = 2  # layers that are timed together: the fewest that are scanned, as a tower's are
ROUNDS, ENOUGH = 25, 10.0  # repeats of every program, and seconds after which a round is the last
Name = TypeVar("Name", bound=Hashable)
Shapes = Mapping[str, tuple[int, Sequence[int]]]  # rows and row lengths of each tower


def profiles() -> Path:
    """The folder of all profiles."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "mmjax" / "layer_times"


def layer_times(config: Config, shapes: Shapes, device: jax.Device, measure: bool) -> dict[str, LayerTimes]:
    """Of each tower whose rows have these shapes on a device, what a profile holds; with `measure`, of all of them.

    Devices of one CPU share its cores: their times are those of all at work.
    """
    found = {}
    sharing = jax.local_device_count() * processes.per_host() if device.platform == "cpu" else 1
    for tower, (rows, lengths) in shapes.items():
        path, kept = _read(config, tower, device)
        grid = grid_of(lengths)
        missing = [n for n in grid if f"{rows}x{n}" not in kept["seconds"]]
        if missing and not measure:
            continue
        for n in missing:
            note(f"profile: timing layers of {tower} on {rows} row(s) of {n:,} positions")
            kept["seconds"][f"{rows}x{n}"] = time_layer(config, tower, (rows, n), device)
            _write(path, kept)
        seconds = {n: kept["seconds"][f"{rows}x{n}"] for n in grid}
        found[tower] = LayerTimes(rows, {n: {k: sharing * s for k, s in of.items()} for n, of in seconds.items()})
    return found


def time_layer(
    config: Config, tower: str, shape: tuple[int, int], device: jax.Device, enough: float = ENOUGH
) -> dict[str, float]:
    """Seconds of one layer on (rows, row length): `forward` alone, then both passes with every remat policy.

    Rows hold one sample each. Offloading is timed where the config has memory of the host for it.
    """
    programs = layer_programs(config, tower, shape, device)
    seconds = {name: of_stack / STACK for name, of_stack in typical_seconds(programs, enough).items()}
    return dict.fromkeys((FORWARD, *_policies(config)), seconds[FORWARD]) | seconds


def layer_programs(
    config: Config, tower: str, shape: tuple[int, int], device: jax.Device
) -> dict[str, Callable[[], Any]]:
    """What `time_layer` times, of STACK layers each; of layers without gradients the forward pass alone."""
    wanted = wanted_gradients(tower, config.model, frozen_modules(config.model))
    with jax.default_device(device):
        programs = {FORWARD: _program(config, tower, shape, "none", frozenset())}
        if wanted:
            programs |= {policy: _program(config, tower, shape, policy, wanted) for policy in _policies(config)}
    return programs


def _policies(config: Config) -> list[Remat]:
    return [p for p in get_args(Remat) if p != "offload" or config.mesh.host_memory]


def typical_seconds(programs: Mapping[Name, Callable[[], Any]], enough: float = ENOUGH) -> dict[Name, float]:
    """The median of each program; they take turns, so that what slows a while slows all."""
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[Name, list[float]] = {name: [] for name in programs}
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for name, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name].append(time.perf_counter() - started)
        if time.perf_counter() - began > enough:
            break
    return {name: float(np.median(of)) for name, of in seconds.items()}


def _program(config: Config, tower: str, shape: tuple[int, int], policy: Remat, wanted: Set[str]) -> Callable[[], Any]:
    """A few layers of a tower, compiled, with arrays to run them on."""
    model = Model.build(tower_alone(config.model, tower, STACK, policy), jnp.dtype(config.training.precision))
    batch = _one_sample(batch_of_tower(model.config, tower, shape))
    given = jax.jit(lambda key, batch: tower_inputs(model, tower, model.init(key), batch))(jax.random.key(0), batch)

    def run(weights: Any, x: jax.Array, context: Any) -> Any:
        out, backward = backward_of(model, tower, weights, x, context, wanted)
        return backward(out) if wanted else out

    compiled = jax.jit(run).lower(*given).compile()
    return lambda: compiled(*given)


def _one_sample(batch: TextBatch | ItemBatch) -> TextBatch | ItemBatch:
    """Rows that one sample or one item fills."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)
    if isinstance(zeros, ItemBatch):
        return zeros
    along = np.broadcast_to(np.arange(zeros.token.shape[1], dtype=np.int32), zeros.token.shape)
    position = np.zeros_like(zeros.position) + (along if zeros.position.ndim == 2 else along[..., None])
    return zeros._replace(pos=along, position=position, offset=along)


def _described(config: Config, tower: str, device: jax.Device) -> dict[str, Any]:
    """What decides how long a layer takes."""
    part: DecoderConfig | Encoder = config.model.llm if tower == "llm" else config.model.encoders[tower]
    layer = replace(part, layers=STACK, remat="none", frozen=False, dropout=0.0)
    wanted = wanted_gradients(tower, config.model, frozen_modules(config.model))
    return {f"lora.{name}": repr(lora) for name, lora in config.model.lora.items()} | {
        "device": device.device_kind,
        "cores": os.cpu_count() if device.platform == "cpu" else 0,
        "jax": jax.__version__,
        "precision": config.training.precision,
        "layer": repr(layer),
        "gradients": sorted(wanted),
        "offload": bool(config.mesh.host_memory),
    }


def _read(config: Config, tower: str, device: jax.Device) -> tuple[Path, dict[str, Any]]:
    """A tower's file, and what it holds; what cannot be read counts as empty."""
    of = _described(config, tower, device)
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    path = profiles() / f"{name}.json"
    try:
        kept = json.loads(path.read_text())
        names = {FORWARD, *_policies(config)}
        if kept["of"] == of and all(set(s) == names and min(s.values()) > 0 for s in kept["seconds"].values()):
            return path, kept
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return path, {"of": of, "seconds": {}}


def _write(path: Path, kept: Mapping[str, Any]) -> None:
    """Whole or not at all: another run may read it. Where it cannot be written, this run goes on with what it has."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(kept, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        note(f"profile: {path} cannot be written ({error.strerror}), so the next run measures again")
