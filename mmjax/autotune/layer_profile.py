"""Time every layer type on this device, forward and backward, and cache the results for later runs.

A profile is one JSON file for each tower, in ~/.cache/mmjax/layer_times (or under XDG_CACHE_HOME),
named by a hash of what its times depend on: the device, JAX's version, the precision, the layer,
and the gradients that are computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import Config, DecoderConfig, ModelConfig, Remat
from mmjax.config.decoder import LayerKind
from mmjax.config.model import frozen_modules, stacked_towers, with_one_item_module
from mmjax.console import print_note
from mmjax.cost.trace import tower_batch
from mmjax.disk import read_sealed, user_cache, write_sealed
from mmjax.distributed import coordination
from mmjax.models.generation import latents_of
from mmjax.models.layers import Context
from mmjax.models.model import ADAPTER_ATTRIBUTE, Model
from mmjax.planning.flops import needed_gradients
from mmjax.planning.speed import FORWARD, LayerTimes, Speed, profile_lengths

VOCAB = 8  # of an isolated LLM, whose embedding and output should cost nothing


def kinds_of_layers(config: DecoderConfig) -> list[tuple[DecoderConfig, float]]:
    """Return, for each kind of layer of an LLM, the LLM with that kind alone and the kind's share of the layers."""
    if len(set(config.layer_kinds)) < 2:
        return [(config, 1)]
    layers = tuple(range(config.layers))

    def with_kind(kind: LayerKind) -> DecoderConfig:
        return replace(
            config,
            delta_net=replace(config.delta_net, layers=layers) if kind.has_delta_net else None,
            experts=replace(config.experts, layers=layers) if kind.has_experts else None,
            unrotated=() if kind.has_rope else layers,
            # Layers that share keys are timed with their own, which takes longer.
            shared_layers=0,
            shared_mlp_width=0,
            mlp_width=(kind.shares_keys and config.shared_mlp_width) or config.mlp_width,
            windowed=(() if kind.is_full else layers) if config.splits_windows else config.windowed,
            convolution=replace(config.convolution, layers=layers)
            if kind.has_convolution
            else None,
        )

    return [
        (with_kind(kind), count / config.layers)
        for kind, count in Counter(config.layer_kinds).items()
    ]


def isolate_tower(config: ModelConfig, tower: str, layers: int, remat: Remat) -> ModelConfig:
    """Reduce a model to `layers` layers of one tower, by its name, under one policy, and little besides.

    An LLM has layers of one kind (`kinds_of_layers`): with a gated delta net, a convolution or
    experts all have them.
    """
    llm = replace(config.llm, vocab=VOCAB)
    if tower == "llm":
        sections = {name: getattr(llm, name) for name in ("delta_net", "experts", "convolution")}
        kinds = {
            name: replace(c, layers=tuple(range(layers)))
            for name, c in sections.items()
            if c is not None
        }
        unrotated = tuple(range(layers)) if llm.unrotated else ()
        llm = replace(llm, unrotated=unrotated, **kinds)
        return ModelConfig(replace(llm, layers=layers, remat=remat), lora=config.lora)
    # Layers that feed the LLM (deepstack) would split the stack into several scans, and a frozen
    # generator's first layer would be a stack of its own.
    part = config.towers[tower]
    changes = {"deepstack": ()} if part.deepstack else {}
    changes |= {"feature_layers": ()} if part.feature_layers else {}
    changes |= {"frozen": False} if part.is_generator else {}
    part = replace(part, layers=layers, remat=remat, **changes)
    return with_one_item_module(replace(llm, layers=1), tower, part, config.lora)


def tower_inputs(
    model: Model, tower: str, params: Any, batch: TextBatch | ItemBatch
) -> tuple[Any, Any, Context]:
    """Return the weights of a tower's layers, the input of the first one, and the context that all of them share."""
    module = model.module(params)
    part = module.tower(tower)
    if tower in module.generators:
        # Of the time and the condition only the shapes matter, and that these are no constants.
        config = part.config
        time = jnp.zeros((len(batch.item), config.max_images(batch.item.shape[1])))
        tokens = jnp.repeat(batch.item[:, : time.shape[1]], config.condition_tokens, axis=1).astype(
            model.dtype
        )
        condition = jnp.broadcast_to(tokens[..., None], (*tokens.shape, config.condition_width))
        x = part.embedded(latents_of(config, batch), batch)
        return nnx.split(part.layers)[1], x, part.context(batch, time, condition)
    if isinstance(batch, TextBatch):
        x = part.embedded(batch.token)
        return nnx.split(part.layers)[1], x, module.text_context(x, batch)
    return nnx.split(part.layers)[1], part.embedded(batch), module.context(tower, batch, None)


def tower_vjp(
    model: Model, tower: str, weights: Any, x: Any, context: Context, gradients: Set[str]
) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """Return the output of a tower's layers, and the function that takes its gradient back to those of `gradients`.

    gradients: any of "weights", "adapters" and "inputs".
    """
    module = model.module({})
    # The structure of the layers without their weights, which are arguments of the differentiated
    # function.
    graph = nnx.split(module.tower(tower).layers)[0]
    adapters, rest = nnx.split_state(weights, nnx.PathContains(ADAPTER_ATTRIBUTE), ...)
    values = {"weights": rest, "adapters": adapters, "inputs": x}

    def layers(differentiated: dict[str, Any]) -> Any:
        inputs = values | differentiated
        return nnx.merge(graph, inputs["weights"], inputs["adapters"])(inputs["inputs"], context)

    return jax.vjp(layers, {name: values[name] for name in sorted(gradients)})


STACK = 2  # layers that are timed together: the fewest that are scanned, as a tower's are
ROUNDS = 25  # repeats of every program
ENOUGH = 10.0  # seconds after which no further round begins
Name = TypeVar("Name", bound=Hashable)
Shapes = Mapping[str, tuple[int, Sequence[int]]]  # rows and row lengths of each tower
MeasureSpeed = Callable[[Shapes], Speed]  # of a device, with layers timed on rows of these shapes


def profile_folder() -> Path:
    """Return the folder of all profiles."""
    return user_cache() / "layer_times"


def layer_times(
    config: Config, shapes: Shapes, device: jax.Device, measure: bool
) -> dict[str, LayerTimes]:
    """Read each tower's layer times for rows of these shapes on a device; with `measure`, time those that are missing.

    Without it, towers whose profile lacks a length are left out. Devices of one CPU share its
    cores: their times are those with all of them at work.
    """
    times = {}
    sharing = jax.local_device_count() * coordination.per_host() if device.platform == "cpu" else 1
    for tower, (rows, lengths) in shapes.items():
        path, profile = _read(config, tower, device)
        grid = profile_lengths(lengths)
        missing = [n for n in grid if f"{rows}x{n}" not in profile["seconds"]]
        if missing and not measure:
            continue
        for n in missing:
            print_note(f"profile: timing layers of {tower} on {rows} row(s) of {n:,} positions")
            # Written after every length: timing takes minutes, and a killed run keeps what it has.
            profile["seconds"][f"{rows}x{n}"] = time_layer(config, tower, (rows, n), device)
            _write(path, profile)
        seconds = {n: profile["seconds"][f"{rows}x{n}"] for n in grid}
        times[tower] = LayerTimes(
            rows, {n: {k: sharing * s for k, s in row.items()} for n, row in seconds.items()}
        )
    return times


def time_layer(
    config: Config, tower: str, shape: tuple[int, int], device: jax.Device, enough: float = ENOUGH
) -> dict[str, float]:
    """Time one layer on (rows, row length): `forward` alone, then both passes with every remat policy; in seconds.

    Every row is one sample. Offloading is timed where the config sets `mesh.host_memory`.
    """
    if tower == "llm" and len(kinds := kinds_of_layers(config.model.llm)) > 1:
        # The mean over the layers.
        models = [(replace(config.model, llm=kind), share) for kind, share in kinds]
        timed = [
            (time_layer(replace(config, model=m), tower, shape, device, enough), share)
            for m, share in models
        ]
        return {
            name: sum(share * seconds[name] for seconds, share in timed) for name in timed[0][0]
        }
    programs = layer_programs(config, tower, shape, device)
    seconds = {name: stack / STACK for name, stack in typical_seconds(programs, enough).items()}
    # A layer without gradients has no backward pass: then every policy takes as long as the forward
    # pass.
    return dict.fromkeys((FORWARD, *_policies(config)), seconds[FORWARD]) | seconds


def layer_programs(
    config: Config, tower: str, shape: tuple[int, int], device: jax.Device
) -> dict[str, Callable[[], Any]]:
    """Compile the programs that `time_layer` times, of STACK layers each; without gradients only the forward pass."""
    gradients = needed_gradients(tower, config.model, frozen_modules(config.model))
    with jax.default_device(device):
        programs = {FORWARD: _program(config, tower, shape, "none", frozenset())}
        if gradients:
            programs |= {
                policy: _program(config, tower, shape, policy, gradients)
                for policy in _policies(config)
            }
    return programs


def _policies(config: Config) -> list[Remat]:
    return [p for p in get_args(Remat) if p != "offload" or config.mesh.host_memory]


def typical_seconds(
    programs: Mapping[Name, Callable[[], Any]],
    enough: float = ENOUGH,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, float]:
    """Return the median seconds of each program. They take turns, so that a slow moment of the machine hits all."""
    for program in programs.values():
        jax.block_until_ready(program())
    seconds: dict[Name, list[float]] = {name: [] for name in programs}
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for name, program in programs.items():
            started = clock()
            jax.block_until_ready(program())
            seconds[name].append(clock() - started)
        if time.perf_counter() - began > enough:
            break
    return {name: float(np.median(samples)) for name, samples in seconds.items()}


def _program(
    config: Config, tower: str, shape: tuple[int, int], policy: Remat, gradients: Set[str]
) -> Callable[[], Any]:
    """Compile STACK layers of a tower, and bind them to random weights and one sample per row."""
    model = Model.build(
        isolate_tower(config.model, tower, STACK, policy), jnp.dtype(config.training.precision)
    )
    batch = _one_sample(tower_batch(model.config, tower, shape))
    inputs = jax.jit(lambda key, batch: tower_inputs(model, tower, model.init(key), batch))(
        jax.random.key(0), batch
    )

    def run(weights: Any, x: jax.Array, context: Any) -> Any:
        out, backward = tower_vjp(model, tower, weights, x, context, gradients)
        return backward(out) if gradients else out

    compiled = jax.jit(run).lower(*inputs).compile()
    return lambda: compiled(*inputs)


def _one_sample(batch: TextBatch | ItemBatch) -> TextBatch | ItemBatch:
    """Fill every row with one sample or one item."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)
    if isinstance(zeros, ItemBatch):
        return zeros
    index = np.broadcast_to(np.arange(zeros.token.shape[1], dtype=np.int32), zeros.token.shape)
    # Rotary positions are `[rows, length]`, or `[rows, length, 3]` for time, height and width; of
    # text all three agree.
    position = np.zeros_like(zeros.position) + (
        index if zeros.position.ndim == 2 else index[..., None]
    )
    return zeros._replace(pos=index, position=position, offset=index)


def _profile_key(config: Config, tower: str, device: jax.Device) -> dict[str, Any]:
    """Return everything that a layer's time depends on."""
    part = stacked_towers(config.model)[tower]
    layer = replace(part, layers=STACK, remat="none", frozen=False)
    if not part.is_generator:  # which drop nothing in their layers
        layer = replace(layer, dropout=0.0)
    gradients = needed_gradients(tower, config.model, frozen_modules(config.model))
    return {f"lora.{name}": repr(lora) for name, lora in config.model.lora.items()} | {
        "device": device.device_kind,
        "cores": os.cpu_count() if device.platform == "cpu" else 0,
        "jax": jax.__version__,
        "precision": config.training.precision,
        "layer": repr(layer),
        "gradients": sorted(gradients),
        "programs": [FORWARD, *_policies(config)],
    }


def _read(config: Config, tower: str, device: jax.Device) -> tuple[Path, dict[str, Any]]:
    """Return the path of a tower's profile and its contents; a file that is missing or damaged counts as empty."""
    key = _profile_key(config, tower, device)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = profile_folder() / f"{name}.json"
    profile = read_sealed(path)
    return path, profile if profile and profile["of"] == key else {"of": key, "seconds": {}}


def _write(path: Path, profile: Mapping[str, Any]) -> None:
    """Write a profile atomically, since another run may be reading it; a note says where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, profile)
    except OSError as error:
        print_note(
            f"profile: {path} cannot be written ({error.strerror}), so the next run measures again"
        )
