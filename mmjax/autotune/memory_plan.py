"""Fit a run to the devices at hand before compiling: their memory, a resumed run's policies, what else would fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.autotune.compile_run import RunPrograms
from mmjax.autotune.layer_profile import Shapes, layer_times
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import device_microbatch, on_one_mesh
from mmjax.config import Config, MeshConfig, Remat, Samples
from mmjax.config.loading import apply_overrides
from mmjax.config.model import stacked_towers, tower_key
from mmjax.console import size
from mmjax.data.plan.step_plan import RankLayout
from mmjax.disk import read_sealed, write_sealed
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.planning.hardware import Rates
from mmjax.planning.memory import GB
from mmjax.planning.remat import (
    MemoryLimit,
    Option,
    Policies,
    RunPlan,
    choose_policies,
    with_policies,
)
from mmjax.planning.speed import LayerTimes, Speed
from mmjax.runtime.devices import device_description, ram_per_device


@dataclass(frozen=True)
class MemoryDecision:
    """The policies and loss chunks of a run. measured: bytes per device in all, where the compiler measured them."""

    policies: Policies
    loss_chunks: int
    measured: float | None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Restore a decision from the record that `read_memory_plan` returned."""
        policies = {name: tuple(layers) for name, layers in record["policies"].items()}
        return cls(policies, record["loss_chunks"], record["measured"])


def plan_key(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the cache key of a memory plan, as JSON: the devices, and what the config fixes or leaves open."""
    towers = stacked_towers(config.model)
    key = {
        # Whatever the plan depends on and a resumed run may change.
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "sequence_parallel": config.mesh.sequence_parallel,
        "memory": config.mesh.memory,
        "host_memory": config.mesh.host_memory,
        "remat": {name: tower.remat for name, tower in towers.items()},
        "loss_chunks": config.training.loss_chunks,
    }
    if config.units:
        key["units"] = {name: asdict(unit) for name, unit in config.units.items()}
    return json.loads(json.dumps(key))


def read_memory_plan(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Read the record of the plan with this key; None where the file has another one, is missing or is damaged."""
    record = read_sealed(path) or {}
    return record if record.get("asked") == key else None


def write_memory_plan(path: Path, key: dict[str, Any], fitted: RunPlan) -> None:
    """Write the plan under this key, atomically."""
    decision = {
        "policies": fitted.policies,
        "loss_chunks": fitted.loss_chunks,
        "measured": fitted.measured,
    }
    write_sealed(path, {"asked": key, **decision})


# bytes of the fullest device under these policies; None: out of memory
Measure = Callable[[Policies], float | None]

LEANEST: Remat = "full"
TRIES = 8
# smallest reduction of the budget, as a share of the memory, after a try that did not fit
BACK_OFF = 0.02


def choose_by_measurement(fitted: RunPlan, free: Mapping[str, int], measure: Measure) -> RunPlan:
    """Choose the fastest policies that a measurement, and not only the memory model, shows to fit.

    free: layers of the towers whose policies may be chosen; the others keep theirs. First
    everything is recomputed; then, tower by tower and policy by policy, half of a tower's layers
    get that policy: the difference is what a layer saves. The policies chosen by these are tried,
    with a smaller budget after each try that does not fit. If none of TRIES fits, or not even
    recomputing everything does, everything is recomputed.
    """
    lean = {**fitted.policies, **{tower: (LEANEST,) * layers for tower, layers in free.items()}}
    base = measure(lean)
    leanest = fitted.with_policies(lean, np.inf if base is None else base)
    if not (free and leanest.fits):
        return leanest
    options = {tower: _options(fitted, lean, tower, base, measure) for tower in free}
    available = budget = fitted.limit.device
    # Measured differences are not quite additive, so a choice may use more than its options add up
    # to. The budget then shrinks by that excess, by a fixed share where the excess is unknown.
    for _ in range(TRIES):
        chosen = choose_policies(free, options, budget - base)
        if chosen is None:
            break
        policies = lean | chosen
        used = measure(policies)
        if used is not None and used <= available:
            return fitted.with_policies(policies, used)
        budget -= max(BACK_OFF * available, 0.0 if used is None else used - available)
    return leanest


def _options(
    fitted: RunPlan, lean: dict[str, tuple[Remat, ...]], tower: str, base: float, measure: Measure
) -> dict[Remat, Option]:
    """Measure the bytes that a layer saves beyond LEANEST under each policy; policies out of memory are left out."""
    layers = len(lean[tower])
    half = max(1, layers // 2)
    seconds_of = fitted.fullest.recompute[tower]
    options = {LEANEST: Option(0.0, 0.0, seconds_of[LEANEST])}
    for policy, seconds in seconds_of.items():
        if policy in (LEANEST, "offload"):
            continue
        used = measure(lean | {tower: (LEANEST,) * (layers - half) + (policy,) * half})
        if used is not None:
            options[policy] = Option(max(0.0, (used - base) / half), 0.0, seconds)
    return options


# usable share of what an allocator may give out; the rest is lost to fragmentation
ALLOCATED = 0.97
# share of a CPU's RAM above which a run is warned, since other programs need some too
NEAR_RAM = 0.8
MAX_HALVINGS = 4  # of a microbatch, in search of a run that fits


Layouts = Callable[[Config], RankLayout]  # row layout of the config with other microbatches


def fit_run(
    config: Config,
    mesh: Mesh,
    layout: RankLayout,
    layouts: Layouts,
    profile: bool = False,
    earlier: MemoryDecision | None = None,
    longest: str = "",
) -> tuple[RunPlan, Speed]:
    """Choose the remat policies and loss chunks with which a run fits the devices of a mesh, or of its units on it.

    earlier: the run's own decision from its first start, reused while it still fits. profile: time
    layers that no profile has yet and, on one mesh where memory is limited, have the compiler
    measure what they save (OmniBal's four steps). longest: description of a sample that is much
    longer than the others (`LengthIndex.longest`), for the error. Returns the speed of the devices
    too, by which it was chosen.

    Raises UserError where no choice of remat policies makes it fit, with the nearest run that does.
    A CPU, whose allocator has no limit, is limited by its RAM where a run would take most of that.
    """
    device = mesh.devices.flat[0]
    sizes = dict(mesh.shape)
    # Process 0's limits hold for all processes, which must compile the same programs.
    available, ram = coordination.run_on_leader(
        lambda: [memory_limit(config.mesh, device).device, ram_per_device(device)]
    )
    limit = MemoryLimit(available, config.mesh.host_memory * GB)
    speed = device_speed(config, profiled_shapes(config, [layout]), device, profile)

    def plan(config: Config, limit: MemoryLimit) -> RunPlan:
        return plan_run(in_units(config, sizes), layout, speed, limit)

    if earlier:
        fitted = plan(apply_memory_plan(config, earlier.policies, earlier.loss_chunks), limit)
        fitted = _limit_to_ram(replace(fitted, measured=earlier.measured), ram)
        if fitted.fits:
            return fitted, speed
    fitted = _limit_to_ram(plan(config, limit), ram)
    # the first choice recomputed nothing, as if memory had no limit
    if not fitted.fits and fitted.limit.ram:
        limit = fitted.limit
        fitted = plan(config, limit)
    if profile and np.isfinite(available) and not config.units:
        # The memory model is run once more with the measured policies, for the bytes by kind that
        # are printed.
        measured = _fit_by_compiler(config, layout, fitted, list(mesh.devices.flat))
        decided = apply_memory_plan(config, measured.policies, measured.loss_chunks)
        fitted = replace(plan(decided, limit), measured=measured.measured)
    if not fitted.fits:
        remedy = suggest_settings(config, sizes, layouts, speed, limit)
        raise UserError(
            "; ".join(filter(None, (describe_shortage(fitted), longest, remedy))), everywhere=True
        )
    return fitted, speed


def in_units(config: Config, mesh: Mapping[str, int]) -> Config:
    """Return the config with its units, or with all modules in one of a mesh whose axes have these sizes."""
    return config if config.units else on_one_mesh(config, mesh)


def _limit_to_ram(fitted: RunPlan, ram: float | None) -> RunPlan:
    """Limit the device's memory to a CPU's RAM where devices have no limit and the run would take most of that."""
    if ram is None or np.isfinite(fitted.limit.device) or fitted.device <= NEAR_RAM * ram:
        return fitted
    return replace(fitted, limit=replace(fitted.limit, device=ram, ram=True))


def _fit_by_compiler(
    config: Config, layout: RankLayout, fitted: RunPlan, devices: list[jax.Device]
) -> RunPlan:
    """Choose policies by compiling a step of the fullest shape with each; all processes compile together."""
    batch = device_microbatch(config, layout, layout.shapes[fitted.fullest.largest_shape])
    towers = stacked_towers(config.model)

    def programs(policies: Policies) -> RunPrograms:
        return RunPrograms.on_one_mesh(
            apply_memory_plan(config, policies, fitted.loss_chunks), batch, devices
        )

    @cache
    def update_bytes() -> int:
        return programs(fitted.policies).compile_update().bytes  # the same under all policies

    def measure(policies: Policies) -> float | None:
        try:
            # Running out of memory in the compiler is an answer, not an error.
            compiled = max(programs(policies).compile_gradients().bytes, update_bytes())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            compiled = None
        return coordination.run_on_leader(lambda: compiled)

    return choose_by_measurement(
        fitted, {name: c.layers for name, c in towers.items() if c.remat == "auto"}, measure
    )


def apply_memory_plan(config: Config, policies: Policies, loss_chunks: int) -> Config:
    """Return the config with these remat policies and number of loss chunks."""
    training = replace(config.training, loss_chunks=loss_chunks)
    return replace(config, model=with_policies(config.model, policies), training=training)


def profiled_shapes(config: Config, layouts: Sequence[RankLayout]) -> Shapes:
    """Return the rows of each tower on a device in the shapes of these layouts, by which its layers are timed."""
    shapes = [
        device_microbatch(config, layout, shape).shape
        for layout in layouts
        for shape in layout.shapes
    ]
    return {
        name: (shapes[0][name][0], [shape[name][1] for shape in shapes])
        for name in stacked_towers(config.model)
    }


def device_speed(config: Config, shapes: Shapes, device: jax.Device, profile: bool) -> Speed:
    """Return the speed of a device like this one with rows of these shapes; the same in every process.

    Process 0 reads the profile of layer times and, with `profile`, times what is missing.
    """

    def measure() -> list[Any]:
        rates = device_description(device).rates(config.training.precision)
        return [rates, layer_times(config, shapes, device, profile)]

    rates, measured = coordination.run_on_leader(measure)
    # `run_on_leader` sends its result as JSON, which turns integer keys into strings.
    times = {
        tower: LayerTimes(rows, {int(length): by_policy for length, by_policy in seconds.items()})
        for tower, (rows, seconds, _) in measured.items()
    }
    return Speed(Rates._make(rates), times)


def memory_limit(config: MeshConfig, device: jax.Device) -> MemoryLimit:
    """Return what a run may use: of a device `mesh.memory`, else what its allocator gives, without limit on a CPU."""
    allocator_bytes = (device.memory_stats() or {}).get("bytes_limit", np.inf)
    return MemoryLimit(config.memory * GB or ALLOCATED * allocator_bytes, config.host_memory * GB)


def describe_shortage(fitted: RunPlan) -> str:
    """Describe in numbers that a run does not fit."""
    stage = fitted.fullest
    kinds = sorted(
        (stage.fixed | {f"activations of {t}": n for t, n in stage.activations.items()}).items()
    )
    largest = sorted(kinds, key=lambda pair: -pair[1])[:4]
    parts = ", ".join(f"{kind} {size(n)}" for kind, n in largest)
    needs = (
        size(fitted.device)
        if np.isfinite(fitted.device)
        else f"more than {size(fitted.limit.device)}"
    )
    available = size(fitted.limit.device)
    if fitted.limit.ram:
        available += " of RAM for it (mesh.memory sets another limit)"
    where = "" if len(fitted.stages) == 1 else f"stage {stage.name}: "
    return (
        f"{where}the run needs {needs} of each device and there are {available}, with as much computed again as can be "
        f"({parts})"
    )


UNIT_REMEDIES = "give its unit more devices by fsdp, tensor or pipeline, or move layers by its cuts"


def suggest_settings(
    config: Config, mesh: Mapping[str, int], layouts: Layouts, speed: Speed, limit: MemoryLimit
) -> str:
    """Describe the smallest change of settings that makes a run fit; never the settings it has.

    Tried in order: on one mesh, parameters sharded over more devices, or over fewer; more
    microbatches; blockwise attention; moments in host memory.
    """
    ranks = mesh["data"] * mesh["fsdp"]  # for each device of `expert`
    # Fewer shards too: a number that divides the widths replicates less than a larger one that does
    # not.
    shards = (
        [n for n in range(1, ranks + 1) if ranks % n == 0] if not config.units else [mesh["fsdp"]]
    )
    shards.sort(key=lambda n: (n < mesh["fsdp"], abs(n - mesh["fsdp"])))
    current = config.batch.microbatches
    max_microbatches = np.inf
    if isinstance(config.batch.size, Samples):
        # Every rank needs a sample in each microbatch.
        rows = layouts(config).topology.ranks
        max_microbatches = max(current, config.batch.size.count // rows)
    candidates = [
        n for n in (current * 2**k for k in range(MAX_HALVINGS + 1)) if n <= max_microbatches
    ]
    # Microbatches in the outer loop: every sharding is tried before their number changes.
    for microbatches in candidates:
        changed = replace(config, batch=replace(config.batch, microbatches=microbatches))
        layout = layouts(changed)
        for fsdp in shards:
            if (microbatches, fsdp) == (current, mesh["fsdp"]):
                continue
            on = in_units(changed, {**mesh, "fsdp": fsdp, "data": ranks // fsdp})
            fitted = plan_run(on, layout, speed, limit)
            if fitted.fits:
                settings = (
                    [f"mesh.fsdp={fsdp} mesh.data={ranks // fsdp}"] if fsdp != mesh["fsdp"] else []
                )
                if microbatches != current:
                    settings.append(f"batch.microbatches={microbatches}")
                return f"{' '.join(settings)} fits, with {size(fitted.device)}"
    blockwise = [
        f"{tower_key(config.model, name)}.attention=blockwise"
        for name, tower in config.model.towers.items()
        if tower.attention == "dense"
    ]
    # The memory of a CPU is that of its host.
    offload = [] if config.optimizer.offload or limit.ram else ["optimizer.offload=true"]
    for settings in filter(None, (blockwise, offload)):
        changed = apply_overrides(config, settings)
        fitted = plan_run(in_units(changed, mesh), layouts(changed), speed, limit)
        if fitted.fits:
            return f"{' '.join(settings)} fits, with {size(fitted.device)}"
    if config.units:
        return f"batch.microbatches={candidates[-1]} does not make it fit; {UNIT_REMEDIES}"
    return (
        f"mesh.fsdp={ranks} and batch.microbatches={candidates[-1]} do not make it fit; "
        "use more devices, mesh.tensor, or a smaller model"
    )
