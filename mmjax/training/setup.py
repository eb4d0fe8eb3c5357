"""Set a start of a run up: its mesh, data, memory plan and programs, before there is any state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from mmjax.autotune.memory_plan import (
    MemoryDecision,
    fit_run,
    plan_key,
    read_memory_plan,
    write_memory_plan,
)
from mmjax.autotune.run_time import simulate_stages, time_stages
from mmjax.autotune.sharded_stages import choose_sequence_parallel, resolve_units
from mmjax.batch import Microbatch
from mmjax.config import Config, MeshConfig
from mmjax.config.loading import resolve_callbacks
from mmjax.config.validation import check_layout
from mmjax.console import print_lines, size
from mmjax.data.loading.ray_pool import pool_steps
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.data.loading.workers import steps
from mmjax.data.sources.opening import cache_folder
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import make_mesh
from mmjax.planning.hardware import check_float8, find_device
from mmjax.planning.memory import GB
from mmjax.planning.remat import RunPlan
from mmjax.planning.schedules import schedule_name, stage_cuts, stage_times
from mmjax.runtime.compiler_options import CompilerOptions, compiler_options
from mmjax.runtime.device_batch import padding_microbatches
from mmjax.runtime.devices import (
    CompileCounter,
    enable_compilation_cache,
    local_cluster,
    peak_memory_used,
)
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.features import FeatureStage, open_feature_stage
from mmjax.runtime.placement import place_stages, tower_rows
from mmjax.runtime.run_dir import AllowedChanges, RunFolder
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import hyperparameters, make_optimizer
from mmjax.runtime.units import unit_ranks
from mmjax.startup import activity
from mmjax.training import announce
from mmjax.training.pass_times import write_planned
from mmjax.training.run_data import RunData, append_launch, open_data


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """Hold what a start of a run works with; its config is resolved, epochs are steps and `auto` is decided."""

    config: Config
    folder: RunFolder
    first_step: int
    mesh: jax.sharding.Mesh  # of all devices; units have meshes of their own
    data: RunData
    memory_plan: RunPlan
    profiled: bool  # whether the plan rests on measured times of layers
    executor: Executor
    compiler_options: CompilerOptions
    programs: CompileCounter
    features: FeatureStage | None = None  # of encoders that encode once

    def print_summary(self) -> Microbatch:
        """Print what will run and how it fits; return the first microbatch, as an example of all."""
        loader = self.data.loader
        with activity("planning the first step"):  # a first start compiles the planner
            example = loader(self.first_step)
        announce.print_run_summary(
            self.config, self.executor.model, self.mesh, loader, example, self.compiler_options
        )
        described = announce.describe_memory_plan(self.memory_plan)
        if self.config.units:
            stages = self.memory_plan.stages
            bubble = simulate_stages(self.config, stages).bubble
            schedule = self.executor.schedule
            described = (
                announce.describe_stages(self.config, stages, schedule, bubble, self.profiled)
                + described
            )
        print_lines(*described, *announce.describe_zero_rates(self.config))
        return example.microbatches[0]

    def with_features(self, state: State) -> Setup:
        """Return the setup with the frozen encoders that encode each item once, and what they have stored."""
        cache = cache_folder(self.config.data) / "features"
        features = open_feature_stage(
            self.executor, state, cache, self.config.data.encoded_space * GB
        )
        if features is None:
            return self
        loader = replace(self.data.loader, features=features.stores)
        return replace(self, features=features, data=replace(self.data, loader=loader))

    def start_workers(self, end_step: int) -> Iterator[LoadedStep]:
        """Start the data workers, which begin to load at once, and add this start to the run's history."""
        loaded = self._load_steps(end_step)
        return loaded if self.features is None else self.features.filled(loaded)

    def _load_steps(self, end_step: int) -> Iterator[LoadedStep]:
        if coordination.is_leader():
            append_launch(self.folder.history, self.data.launch)
            stages = self.memory_plan.stages if self.config.units else ()
            microbatches = self.config.batch.microbatches
            write_planned(self.folder.passes, self.executor, stages, microbatches, self.profiled)
        data = self.config.data
        if data.pool == "local":
            return steps(self.data.loader, self.first_step, end_step, data.workers, data.prefetch)
        return pool_steps(self.data.loader, self.first_step, end_step, data)

    def compile_step(self, state: State, example: Microbatch) -> list[Sums | None]:
        """Compile the programs of a step ahead: gradients of each shape, and the update. Returns zero gradients."""
        if self.features is not None:
            self.features.compile(self.data.index)
        # One microbatch is enough for the programs of all shapes: they differ only in the rows'
        # lengths.
        shapes = padding_microbatches(
            self.data.loader.layout.shapes,
            example,
            self.config.model.item_modules,
            self.executor.rows,
        )
        return self.executor.compile(state, shapes, hyperparameters(self.config, self.first_step))

    def describe_compiled(self, began: float) -> str:
        """Say how many programs were compiled since `began`, of `time.monotonic`."""
        stored = self.programs.from_cache
        return f"compiled {self.programs.compiled} programs in {time.monotonic() - began:.1f} s" + (
            f", {stored} came from the cache" if stored else ""
        )

    def describe_first_steps(self, loaded: LoadedStep, step_seconds: float) -> list[str]:
        """Say what memory was used and whether the data workers keep up, when step times are representative."""
        lines = []
        if (used := peak_memory_used(self.mesh)) is not None:
            planned = size(self.memory_plan.device)
            lines.append(f"memory {size(used)} of a device used so far, {planned} predicted")
        if self.config.data.pool == "local":
            pixels = announce.median_pixels(self.data.loader.sources.values())
            workers = self.config.data.workers
            load_seconds = float(loaded.load_seconds)
            lines.append(announce.loader_verdict(load_seconds, workers, step_seconds, pixels))
        return lines

    def write_decision(self) -> None:
        """Write what was decided by memory into the run folder, for resumed starts."""
        write_memory_plan(
            self.folder.memory_plan, plan_key(self.config, self.mesh), self.memory_plan
        )


def set_up(
    config: Config,
    folder: RunFolder,
    devices: Sequence[jax.Device],
    first_step: int,
    permitted: AllowedChanges,
    profile: bool,
) -> Setup:
    """Make the mesh, open the data, decide what memory decides, and make the programs; nothing is compiled.

    first_step: the run continues from here. Other arguments are as of `train`.
    """
    # With units and without, processes meet at other places, and would wait for each other there.
    if not coordination.all_equal(repr(config.units)):
        raise UserError(
            "the processes have different units; start all with the same config", everywhere=True
        )
    # Units have meshes of their own; this one, of all devices, is for what they do together.
    mesh = make_mesh(MeshConfig(data=1, fsdp=-1) if config.units else config.mesh, devices)
    if not config.units:
        on_devices = replace(config.mesh, **mesh.shape)
        check_layout("mesh", on_devices, config.model, alignment=config.batch.alignment)
    device = find_device(mesh.devices.flat[0].device_kind)
    check_float8(config.model.llm.fp8, device)
    enable_compilation_cache(folder.programs)  # before anything is compiled
    context = max(mesh.shape["context"], *(unit.context for unit in config.units.values()), 1)
    options = compiler_options(config.compiler, mesh.local_devices[0], context)
    programs = CompileCounter()

    with activity("opening the data"):
        data = open_data(config, folder, first_step, permitted, mesh)
    layout = data.loader.layout
    config = data.launch.config  # in which training.epochs became training.steps
    if config.units:
        config = resolve_units(config, layout, device)
    else:
        config = choose_sequence_parallel(config, mesh.shape, layout, device)

    with activity("predicting memory"):
        stored = None
        if first_step and not profile:
            stored = _stored_decision(config, folder, mesh)
        layout_of = partial(data.layout_of, mesh=mesh)
        longest = data.index.longest(data.loader.budget.longest)
        plan, speed = fit_run(config, mesh, layout, layout_of, profile, stored, longest)
        if config.units:

            def times() -> list[list[float]]:
                # on devices like the first, which is process 0's
                timed = time_stages(config, layout, plan, local_cluster(), speed)
                return [[stage.forward, stage.backward] for stage in timed.stages]

            plan = plan.with_times(coordination.run_on_leader(times))
    return Setup(
        config=config,
        folder=folder,
        first_step=first_step,
        mesh=mesh,
        data=data,
        memory_plan=plan,
        profiled=bool(speed.measured),
        executor=_make_executor(config, folder, mesh, data, plan, options),
        compiler_options=options,
        programs=programs,
    )


def _stored_decision(
    config: Config, folder: RunFolder, mesh: jax.sharding.Mesh
) -> MemoryDecision | None:
    """Return what a resumed run was started with: other policies would be other programs, with other bits."""
    key = plan_key(config, mesh)
    stored = coordination.run_on_leader(lambda: read_memory_plan(folder.memory_plan, key))
    return MemoryDecision.of(stored) if stored else None


def _make_executor(
    config: Config,
    folder: RunFolder,
    mesh: jax.sharding.Mesh,
    data: RunData,
    plan: RunPlan,
    options: CompilerOptions,
) -> Executor:
    """Make the programs of a step, on one mesh or on those of units."""
    dtype = jnp.dtype(config.training.precision)
    functions = resolve_callbacks(config.model, folder.path)
    model = Model.build(plan.applied(config.model), dtype, stage_cuts(config), functions=functions)
    devices = list(mesh.devices.flat)
    stages = place_stages(config, model, devices)
    rows = None
    if config.units:
        rows = tower_rows(config, data.loader.layout, unit_ranks(config, devices))
    return Executor(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        stages,
        sources=data.sources,
        schedule=schedule_name(config),
        stage_times=stage_times(config),
        carrier=config.pipeline.carrier,
        loss=config.loss,
        loss_chunks=plan.loss_chunks,
        accumulates=len(stages) > 1 or config.batch.microbatches > 1,
        compiler_options=options,
        rows=rows,
    )
