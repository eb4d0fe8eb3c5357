"""Predict the memory of a run before anything is compiled: trace what layers keep, for `planning.fit`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from mmjax.config import Config, MeshConfig, Remat, Samples
from mmjax.config_files import edit
from mmjax.data.layout import RankLayout
from mmjax.data.placement import Shape
from mmjax.errors import UserError
from mmjax.models.model import Model, group_of
from mmjax.parallel import processes
from mmjax.parallel.mesh import loss_choices
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.activations import Kept
from mmjax.planning.clusters import Rates
from mmjax.planning.cost import frozen_modules, wanted_gradients
from mmjax.planning.fit import Fit, Policies, Room, fit, with_policies
from mmjax.planning.layer_times import LayerTimes, Speed
from mmjax.planning.memory import OnDevice, Spread
from mmjax.training.compiled_memory import compiled_bytes
from mmjax.training.console import size
from mmjax.training.kept_fit import Decision
from mmjax.training.layer_profile import layer_times
from mmjax.training.measured_fit import measured_fit
from mmjax.training.optimizer import key_names
from mmjax.training.profile import described, ram_of_device
from mmjax.training.residuals import kept_per_layer
from mmjax.training.state import parameter_shardings

GB = 1e9
LINEAR = 4096  # positions of a row: long enough that no block of attention is half empty
ALLOCATED = 0.97  # of what an allocator may give out: the rest is lost between the pieces
NEAR_RAM = 0.8  # of a CPU's RAM: a run that needs more of it is told so, since other programs need some too
MOST_HALVINGS = 4  # of a microbatch, in search of a run that fits
ACTIVATION = {"float32": 4, "bfloat16": 2}  # bytes


Layouts = Callable[[Config], RankLayout]  # of a config with other microbatches


@dataclass
class Tracer:
    """Trace what a model keeps on devices, once: activations of its layers, and its parameters."""

    config: Config
    _traced: dict[tuple[str, int, int], Mapping[Remat, Kept]] = field(default_factory=dict)
    _model: Model | None = None

    def kept(self, tower: str, rows: int, lengths: Sequence[int]) -> list[Mapping[Remat, Kept]]:
        """Return the activations that a layer keeps by policy, for rows of each of these lengths.

        That of a row is linear in its length, but for the scores of dense attention, which are quadratic: lengths
        between the shortest and the longest are not traced, and with blockwise attention one is enough.
        """
        part = self.config.model.llm if tower == "llm" else self.config.model.encoders[tower]
        short, long = (LINEAR, LINEAR) if part.attention == "blockwise" else (min(lengths), max(lengths))
        found = {n: self._at(tower, rows, n) for n in {short, long}}

        def at(policy: Remat, length: int) -> Kept:
            a, b = (np.array(found[n][policy]) / n for n in (short, long))
            per_position = a if short == long else a + (b - a) * (length - short) / (long - short)
            return Kept(*(per_position * length).tolist())

        return [{policy: at(policy, n) for policy in found[short]} for n in lengths]

    def held(self, mesh: Mapping[str, int]) -> dict[str, float]:
        """By module, the part of its parameters that lies on each device of a mesh whose axes have these sizes."""
        if self._model is None:
            self._model = Model.build(self.config.model, jnp.dtype(self.config.training.precision))
        whole, part = Counter[str](), Counter[str]()
        shardings = parameter_shardings(
            self._model, AbstractMesh(tuple(mesh.values()), tuple(mesh)), ShardingRules.of(self.config.mesh)
        )
        leaves = jax.tree.leaves_with_path(self._model.abstract)
        for (path, leaf), own in zip(leaves, jax.tree.leaves(shardings), strict=True):
            module = group_of(key_names(path))
            whole[module] += math.prod(leaf.shape)
            part[module] += math.prod(own.shard_shape(leaf.shape))
        return {module: part[module] / n for module, n in whole.items()}

    def _at(self, tower: str, rows: int, length: int) -> Mapping[Remat, Kept]:
        model, key = self.config.model, (tower, rows, length)
        if key not in self._traced:
            wanted = wanted_gradients(tower, model, frozen_modules(model))
            self._traced[key] = kept_per_layer(model, tower, (rows, length), self.config.training.precision, wanted)
        return self._traced[key]


def fit_on_mesh(
    config: Config,
    mesh: Mesh,
    layouts: Layouts,
    profile: bool = False,
    before: Decision | None = None,
    longest: str = "",
) -> Fit:
    """The fit of a run on these devices; the same in every process.

    before: what the run decided when it began, which stays where it still fits. profile: measure how long layers take
    that never were measured, and where memory is limited what they keep: by the compiler, with OmniBal's four steps.
    longest: what to say of a sample that is much longer than the others (`LengthIndex.longest`).

    Raises UserError where no choice of remat policies makes it fit, with the nearest run that does. A CPU, whose
    allocator has no limit, has its RAM as its room where a run would take most of that.
    """
    device, sizes = mesh.devices.flat[0], dict(mesh.shape)
    layout = layouts(config)
    limit, ram = processes.led(lambda: [room_of(config.mesh, device), ram_of_device(device)])
    room = Room(np.inf if limit is None else limit, config.mesh.host_memory * GB)
    speed = speed_of(config, [layout], device, profile)
    tracer = Tracer(config)
    if before:
        stays = fit_of(planned(config, before.policies, before.loss_chunks), sizes, layout, speed, room, tracer)
        stays = in_ram(replace(stays, measured=before.measured), ram)
        if stays.fits:
            return stays
    fitted = in_ram(fit_of(config, sizes, layout, speed, room, tracer), ram)
    if not fitted.fits and fitted.room.ram:  # with nothing computed again
        room = fitted.room
        fitted = fit_of(config, sizes, layout, speed, room, tracer)
    if profile and limit is not None:
        found = _measured(config, layout, fitted, list(mesh.devices.flat))
        best = planned(config, found.policies, found.loss_chunks)
        fitted = replace(fit_of(best, sizes, layout, speed, room, tracer), measured=found.measured)
    if not fitted.fits:
        smaller = nearest(config, sizes, layouts, speed, room, tracer)
        raise UserError("; ".join(filter(None, (too_large(fitted), longest, smaller))), everywhere=True)
    return fitted


def in_ram(fitted: Fit, ram: float | None) -> Fit:
    """The fit with a CPU's RAM as its room, where devices have no limit and it takes most of that."""
    if ram is None or np.isfinite(fitted.room.device) or fitted.device <= NEAR_RAM * ram:
        return fitted
    return replace(fitted, room=replace(fitted.room, device=ram, ram=True))


def _measured(config: Config, layout: RankLayout, fitted: Fit, devices: list[jax.Device]) -> Fit:
    """The fit by what the compiler says that steps of the fullest shape take. All processes compile together."""
    batch = on_device(config, layout, layout.shapes[fitted.fullest])
    towers = {"llm": config.model.llm, **config.model.encoders}

    def measure(policies: Policies) -> float | None:
        try:
            found = compiled_bytes(planned(config, policies, fitted.loss_chunks), batch, devices)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = None
        return processes.led(lambda: found)

    return measured_fit(fitted, {name: c.layers for name, c in towers.items() if c.remat == "auto"}, measure)


def planned(config: Config, policies: Policies, loss_chunks: int) -> Config:
    """The config with what a fit decides: the layers' policies and the parts of the loss."""
    training = replace(config.training, loss_chunks=loss_chunks)
    return replace(config, model=with_policies(config.model, policies), training=training)


def speed_of(config: Config, layouts: Sequence[RankLayout], device: jax.Device, profile: bool) -> Speed:
    """Return the speed of a device like this one with the shapes of these layouts; the same in every process.

    Process 0 reads what was measured, or measures it now.
    """

    def find() -> list[Any]:
        shapes = [on_device(config, layout, shape).shape for layout in layouts for shape in layout.shapes]
        rows = {name: (n, [shape[name][1] for shape in shapes]) for name, (n, _) in shapes[0].items()}
        return [described(device).rates(config.training.precision), layer_times(config, rows, device, profile)]

    rates, measured = processes.led(find)
    # What was told to other processes went through JSON, where keys are words.
    times = {
        tower: LayerTimes(rows, {int(n): of for n, of in seconds.items()})
        for tower, (rows, seconds) in measured.items()
    }
    return Speed(Rates(*rates), times)


def fit_of(
    config: Config, mesh: Mapping[str, int], layout: RankLayout, speed: Speed, room: Room, tracer: Tracer
) -> Fit:
    """The fit of a run whose mesh axes have these sizes. The tracer is of the same model."""
    shapes = [on_device(config, layout, shape) for shape in layout.shapes]
    kept: list[dict[str, Mapping[Remat, Kept]]] = [{} for _ in shapes]
    for name in ("llm", *config.model.encoders):
        rows, lengths = shapes[0].shape[name][0], [shape.shape[name][1] for shape in shapes]
        for of, own in zip(kept, tracer.kept(name, rows, lengths), strict=True):
            of[name] = own
    spread = replace(spread_of(config.mesh, mesh), held=tracer.held(mesh))
    activation = ACTIVATION[config.training.precision]
    choices = loss_choices(mesh, config.training.loss_chunks, config.model)
    return fit(config.model, shapes, kept, spread, activation, config.optimizer, speed, room, choices)


def on_device(config: Config, layout: RankLayout, shape: Shape) -> OnDevice:
    """A microbatch of this shape on each device."""
    names, parts = ("llm", *config.model.encoders), layout.topology.encoders_per_rank
    rows = [n if name == "llm" else n // parts for name, n in zip(names, layout.rows, strict=True)]
    return OnDevice(
        {name: (rows[k], shape.lengths[k]) for k, name in enumerate(names)},
        dict(zip(config.model.encoders, shape.widths, strict=True)),
        layout.topology.peers,
        config.batch.microbatches,
    )


def spread_of(config: MeshConfig, mesh: Mapping[str, int]) -> Spread:
    """Return how a model's arrays are spread over a mesh whose axes have these sizes."""
    tensor = mesh["tensor"]
    return Spread(mesh["fsdp"] * tensor, tensor, 1 if config.encoders == "data" else tensor)


def room_of(config: MeshConfig, device: jax.Device) -> float | None:
    """Bytes that a device has for a run: what the config says, else what its allocator may give out; None: no limit."""
    if config.memory:
        return config.memory * GB
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else ALLOCATED * limit


def too_large(fitted: Fit) -> str:
    """Say in numbers that a run does not fit."""
    kinds = sorted((fitted.fixed | {f"activations of {t}": n for t, n in fitted.activations.items()}).items())
    largest = sorted(kinds, key=lambda pair: -pair[1])[:4]
    spelled = ", ".join(f"{kind} {size(n)}" for kind, n in largest)
    needs = size(fitted.device) if np.isfinite(fitted.device) else f"more than {size(fitted.room.device)}"
    there = size(fitted.room.device)
    if fitted.room.ram:
        there += " of RAM for it (mesh.memory sets another limit)"
    return (
        f"the run needs {needs} of each device and there are {there}, with as much computed again as can be ({spelled})"
    )


def nearest(config: Config, mesh: Mapping[str, int], layouts: Layouts, speed: Speed, room: Room, tracer: Tracer) -> str:
    """The settings that make a run fit and change it least; not those that it has.

    Parameters on more devices first, or on fewer, then more microbatches, then attention by blocks.
    """
    ranks = mesh["data"] * mesh["fsdp"]
    # Fewer shards too: a number that divides the widths leaves less whole than a larger one that does not.
    shards = sorted(
        (n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: (n < mesh["fsdp"], abs(n - mesh["fsdp"]))
    )
    given, update = config.batch.microbatches, config.batch.size
    most = (
        max(given, update.count // ranks) if isinstance(update, Samples) else np.inf
    )  # a rank has at least one sample
    tried = [n for n in (given * 2**k for k in range(MOST_HALVINGS + 1)) if n <= most]
    for microbatches in tried:
        changed = replace(config, batch=replace(config.batch, microbatches=microbatches))
        layout = layouts(changed)
        for fsdp in shards:
            if (microbatches, fsdp) == (given, mesh["fsdp"]):
                continue
            found = fit_of(changed, {**mesh, "fsdp": fsdp, "data": ranks // fsdp}, layout, speed, room, tracer)
            if found.fits:
                settings = [f"mesh.fsdp={fsdp} mesh.data={ranks // fsdp}"] if fsdp != mesh["fsdp"] else []
                if microbatches != given:
                    settings.append(f"batch.microbatches={microbatches}")
                return f"{' '.join(settings)} fits, with {size(found.device)}"
    if settings := _dense_towers(config):
        changed = edit(config, settings)
        found = fit_of(changed, mesh, layouts(changed), speed, room, Tracer(changed))
        if found.fits:
            return f"{' '.join(settings)} fits, with {size(found.device)}"
    return (
        f"mesh.fsdp={ranks} and batch.microbatches={tried[-1]} do not make it fit; "
        "use more devices, mesh.tensor, or a smaller model"
    )


def _dense_towers(config: Config) -> list[str]:
    """The settings that give every tower attention by blocks; none where all have it."""
    model = config.model
    towers = {"model.llm": model.llm, **{f"model.encoders.{name}": e for name, e in model.encoders.items()}}
    return [f"{key}.attention=blockwise" for key, tower in towers.items() if tower.attention == "dense"]
