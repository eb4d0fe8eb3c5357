"""All costs that are known, by what they depend on; others are read from the user's cache, or traced.

A process that has them from another one (`adopt`), as workers of data have, traces nothing and
needs no JAX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import mmjax
from mmjax.config import ModelConfig, Remat
from mmjax.config.model import with_changes
from mmjax.cost.rates import Cost, Ends, ModuleParameters, SameModel, TowerTrace
from mmjax.disk import read_sealed, user_cache, write_sealed

# files and folders of mmjax that traces depend on: a change in one makes the user's cache void
SOURCES = "batch.py", "config", "cost", "kernels", "models", "parallel"
_known: dict[str, Any] = {}


def ends(tower: TowerTrace) -> Ends:
    """Return the costs around a tower's layers, and the layers' kinds."""
    return _cost(f"ends {tower.text}", lambda trace: trace.ends(tower))


def layer(tower: TowerTrace, number: int, policy: Remat, unscanned: bool = False) -> Cost:
    """Return the costs of a layer of a tower.

    unscanned: of the first layer by itself, whose input needs no gradient where nothing before it
    is trained; in a scan all layers compute one.
    """
    return _cost(
        f"layer {number} {policy} {unscanned} {tower.text}",
        lambda trace: trace.layer(tower, number, policy, unscanned),
    )


def parameters(model: ModelConfig) -> dict[str, int]:
    """Count the parameters of every module exactly; those of adapters are separate, as `<module>.lora`."""
    return {module: counts.total for module, counts in module_parameters(model).items()}


def active_parameters(model: ModelConfig) -> int:
    """Count a token's active parameters: all but those of experts that it is not routed to."""
    total = sum(parameters(model).values())
    if (experts := model.llm.experts) is None:
        return total
    of_experts = module_parameters(model)["llm"].experts
    return total - of_experts + of_experts * experts.per_token // experts.count


def module_parameters(model: ModelConfig) -> dict[str, ModuleParameters]:
    """Count every module's parameters, and of these in layers, matrices and experts; adapters as `<module>.lora`."""
    return _module_parameters(SameModel(model))


@lru_cache(256)
def _module_parameters(same: SameModel) -> dict[str, ModuleParameters]:
    plain = {"remat": "none", "attention": "dense", "frozen": False}
    model = with_changes(same.model, dict.fromkeys(("llm", *same.model.item_modules), plain))
    model = with_changes(model, {name: {"quantize": "none"} for name in ("llm", *model.encoders)})
    return _cost(f"modules {model}", lambda trace: trace.module_parameters(model))


def encoding(model: ModelConfig, generator: str) -> Cost:
    """Return the costs, per position, of encoding a generator's images by its VAE in the step."""
    return _cost(f"encoding {generator} {model}", lambda trace: trace.encoding(model, generator))


def adopt(known: Mapping[str, Any]) -> None:
    """Take over costs that another process knows."""
    _known.update(known)


def recorded(compute: Callable[[], Any]) -> dict[str, Any]:
    """Call `compute` and return all costs that it looks up, for `adopt` in a process that will compute the same."""
    recordings.append({})
    try:
        compute()
        return recordings[-1]
    finally:
        recordings.pop()


recordings: list[dict[str, Any]] = []  # by each `recorded` that runs


def _cost(key: str, trace: Callable[[Any], Any]) -> Any:
    if key not in _known:
        _known[key] = _read_or_trace(key, trace)
    for costs in recordings:
        costs[key] = _known[key]
    return _known[key]


def _read_or_trace(key: str, trace: Callable[[Any], Any]) -> Any:
    """Read costs from the user's cache; else trace them and write them there."""
    file = (
        user_cache()
        / "costs"
        / f"{hashlib.sha256(f'{key} {_environment()}'.encode()).hexdigest()[:32]}.json"
    )
    if (stored := read_sealed(file)) is not None:
        return _unpacked(stored)
    from mmjax.cost import trace as tracing  # imports JAX

    value = trace(tracing)
    with suppress(OSError):  # a cache only saves time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(file, _packed(value))
    return value


@cache
def _environment() -> str:
    """Describe what traces depend on beside their key: versions of libraries, and mmjax's own source."""
    folder = Path(mmjax.__file__).parent
    sources = hashlib.sha256()
    for name in SOURCES:
        for file in sorted((folder / name).rglob("*.py")) or [folder / name]:
            sources.update(file.read_bytes())
    return f"{version('jax')} {version('flax')} {sources.hexdigest()}"


def _packed(value: Cost | Ends | dict[str, ModuleParameters]) -> dict[str, Any]:
    """Convert traced costs to JSON."""
    if isinstance(value, Cost):
        return {"rates": value.rates.tolist()}
    if isinstance(value, Ends):
        return {"ends": [part.rates.tolist() for part in value[:3]], "kinds": value.kinds}
    return {"modules": value}


def _unpacked(stored: Mapping[str, Any]) -> Cost | Ends | dict[str, ModuleParameters]:
    if "rates" in stored:
        return Cost(np.array(stored["rates"]))
    if "ends" in stored:
        costs = [Cost(np.array(rates)) for rates in stored["ends"]]
        return Ends._make([*costs, tuple(stored["kinds"])])
    return {module: ModuleParameters._make(counts) for module, counts in stored["modules"].items()}
