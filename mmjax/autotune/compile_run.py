"""Measure the memory of a run's programs by the compiler: the real ones are compiled, nothing runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import EncodedItems, ItemBatch, Microbatch, TextBatch, WeightedSlots
from mmjax.config import Callbacks, Config, Encoder, Generator
from mmjax.cost.trace import tower_batch
from mmjax.data.loading.context import tokens_on_device
from mmjax.data.plan.placement import Shape
from mmjax.data.plan.step_plan import RankLayout
from mmjax.data.sample import CORNERS
from mmjax.models.model import Model, merge
from mmjax.models.quantization import cast_frozen
from mmjax.parallel.sharding import (
    AXES,
    CONTEXT,
    ShardingRules,
    replicated,
    row_ranks,
    rows_sharding,
)
from mmjax.planning.memory import LOADED, DeviceBatch
from mmjax.planning.remat import RunPlan
from mmjax.planning.schedules import list_stages, schedule_name, stage_cuts, stage_times
from mmjax.runtime.compiler_options import compiler_options
from mmjax.runtime.device_batch import MAX_UNREADABLE, ProcessReport, batch_shardings
from mmjax.runtime.executor import Executor
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.placement import place_stages, select_tables
from mmjax.runtime.stage_program import StageProgram, Sums
from mmjax.runtime.state import hyperparameters, make_optimizer
from mmjax.runtime.step_report import loss_weights


class BatchShape(NamedTuple):
    """Shape of a microbatch over all devices."""

    towers: Mapping[str, tuple[int, int]]  # (rows, row length)
    widths: Mapping[str, int]  # of every encoder: tokens that each of the LLM's ranks sends to each
    peers: int  # ranks that send to each other

    @classmethod
    def of(cls, config: Config, layout: RankLayout, shape: Shape) -> Self:
        """Return one of the compiled shapes of a layout."""
        towers = ("llm", *config.model.item_modules)
        rows = (layout.topology.ranks * n for n in layout.rows)
        return cls(
            towers=dict(zip(towers, zip(rows, shape.lengths, strict=True), strict=True)),
            widths=dict(zip(towers[1:], shape.widths, strict=True)),
            peers=layout.topology.peers,
        )


class CompiledProgram(NamedTuple):
    """A program of a stage, as the compiler made it for each device."""

    bytes: int  # peak, with what lies beside the program
    rematerialized: int  # instructions that XLA computes again by itself, to take less memory
    synchronous: int  # collectives that nothing is computed beside
    text: str  # HLO in the order of execution


NAMES = re.compile(r'jax\.result_info = "[^"]*"')  # of outputs, with numbers of layers
Programs = dict[str, CompiledProgram]


def compile_run(
    config: Config, layout: RankLayout, plan: RunPlan, devices: Sequence[jax.Device]
) -> dict[str, Programs]:
    """Compile a planned run's programs, each stage in the shape that needs most memory; by stage and name.

    config: with the plan's policies. Stages of equal programs are compiled once.
    """
    used = 1 + max(number for stage in plan.stages for number in stage.devices)
    executor = _executor(config, devices[:used], layout.topology.context)
    compiled: dict[tuple[Any, ...], tuple[Programs, Any]] = {}
    by_stage = {}
    for number, stage in enumerate(plan.stages):
        shape = BatchShape.of(config, layout, layout.shapes[stage.largest_shape])
        programs = RunPrograms(config, executor, shape)
        key = programs.texts(number)
        if key not in compiled:
            compiled[key] = programs.compile(number)
        by_stage[stage.name] = programs.with_all_bytes(
            number, *compiled[key], in_flight=stage.in_flight
        )
    return by_stage


def _executor(config: Config, devices: Sequence[jax.Device], context: int) -> Executor:
    """Make the executor of a run on absent devices or others."""
    model = build_model(config)
    stages = place_stages(config, model, devices)
    return make_executor(config, model, stages, accumulates(config), context)


def accumulates(config: Config) -> bool:
    """Tell whether gradients are kept between the microbatches of a step."""
    return len(list_stages(config)) > 1 or config.batch.microbatches > 1


def build_model(config: Config, cuts: Mapping[str, tuple[int, ...]] | None = None) -> Model:
    """Build a run's model, without callbacks. cuts: as of `stage_cuts`, whose result is the default."""
    encoders = {
        name: replace(encoder, callbacks=Callbacks())
        for name, encoder in config.model.encoders.items()
    }
    model = replace(config.model, encoders=encoders)
    return Model.build(model, jnp.dtype(config.training.precision), cuts or stage_cuts(config))


def make_executor(
    config: Config, model: Model, stages: Sequence[PlacedStage], accumulates: bool, context: int = 1
) -> Executor:
    """Make the executor of these stages of a run's model."""
    return Executor(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        stages,
        sources=1,
        schedule=schedule_name(config),
        stage_times=stage_times(config),
        loss=config.loss,
        loss_chunks=config.training.loss_chunks or 1,
        accumulates=accumulates,
        compiler_options=compiler_options(config.compiler, stages[0].mesh.devices.flat[0], context),
    )


@dataclass(frozen=True)
class RunPrograms:
    """The programs of a run's stages, and the shapes of their arguments in microbatches of one shape."""

    config: Config
    executor: Executor
    shape: BatchShape

    @classmethod
    def on_one_mesh(cls, config: Config, batch: DeviceBatch, devices: Sequence[jax.Device]) -> Self:
        """Describe the programs of a step on one mesh of which each device gets `batch`."""
        batch_config = replace(config.batch, microbatches=batch.microbatches)
        config = replace(config, batch=batch_config)
        executor = _executor(config, devices, batch.context)
        mesh = executor.mesh
        rules = executor.rules
        towers = {}
        for name, (rows, length) in batch.shape.items():
            axes, parts = (
                (rules.rows, mesh.shape[CONTEXT]) if name == "llm" else (rules.item_rows, 1)
            )
            # From each device's part to the whole array: the LLM's rows are cut along their length
            # by `context`, those of encoders lie on its devices.
            towers[name] = row_ranks(mesh, axes) * rows, parts * length
        return cls(config, executor, BatchShape(towers, batch.widths, batch.peers))

    def parameters(self, number: int) -> tuple[Any, Any]:
        """Return the shapes of a stage's trainable and frozen parameters, with its copy of a tied embedding."""
        program = self.executor.programs[number]
        trainable, frozen = program.abstract
        frozen = jax.eval_shape(partial(cast_frozen, dtype=self.executor.model.dtype), frozen)
        return put_shapes(trainable, program.shardings[0]), put_shapes(frozen, program.shardings[1])

    def sums(self, number: int) -> Sums:
        """Return the shapes of a stage's gradients, on one mesh of the dtypes that its update takes."""
        return (
            self.executor.sums
            if self.executor.is_one_stage
            else self.executor.programs[number].sums
        )

    def batch(self, number: int) -> Microbatch:
        """Return the shapes of a stage's microbatch."""
        _, stage, mesh, rules, _ = self.executor.stages[number]
        config = self.executor.model.config
        shape = self.shape

        def put(batch: TextBatch | ItemBatch) -> TextBatch | ItemBatch:
            return put_shapes(batch, batch_shardings(batch, mesh, rules))

        text = None
        if stage.text:
            text = tower_batch(config, "llm", shape.towers["llm"])
            modules = config.item_modules
            devices = row_ranks(mesh, rules.token_rows)
            rows = {
                name: (shape.towers[name][0] // devices, shape.towers[name][1]) for name in modules
            }
            tables = table_structs(
                modules, text.token, mesh, rules, rows, shape.widths, shape.peers
            )
            inputs = dict.fromkeys(self.executor.objective.loss.inputs, text.weight)
            text = put(select_tables(text._replace(**tables, loss_inputs=inputs), stage))
        towers = [tower for tower in stage.towers if tower != "llm"]
        return Microbatch(
            text,
            {tower: put(self._items(tower, shape.towers[tower])) for tower in towers},
        )

    def _items(self, tower: str, shape: tuple[int, int]) -> ItemBatch:
        """Return the shapes of a tower's items, or of what it has made of them before the step."""
        config = self.executor.model.config
        items = tower_batch(config, tower, shape)
        module = config.item_modules[tower]
        if module.encode != "once":
            return items
        rows, length = shape
        values = rows, length // module.output_stride, module.output_width
        dtype = self.executor.model.dtype
        return EncodedItems(jax.ShapeDtypeStruct(values, dtype), *items[1:])

    def inputs(self, number: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the activations that a stage receives from earlier stages."""
        executor = self.executor
        inputs = {}
        for producer in executor.graph.producers[number]:
            program = executor.programs[producer]
            operands = (
                self.inputs(producer),
                self.batch(producer),
                *_scalars(program),
                program.sums.losses,
            )
            output, _ = jax.eval_shape(
                program.forward_only, merge(*self.parameters(producer)), *operands
            )
            taken = {
                name: x for name, x in output.items() if number in executor.passes.consumers[name]
            }
            layouts = executor.programs[number].layouts
            inputs |= put_shapes(taken, {name: layouts[name] for name in taken})
        return inputs

    def lower_first(self, number: int) -> jax.stages.Lowered:
        """Lower the first program that a stage runs of a microbatch: forward, or both passes where the loss is."""
        program = self.executor.programs[number]
        mesh = self.executor.stages[number].mesh
        params = self.parameters(number)
        inputs = self.inputs(number)
        batch = self.batch(number)
        noise, weights = _scalars(program)
        # Newer JAX asks the mesh in use which GPU a kernel is lowered for.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if program.is_sink:
                sums = self.sums(number) if self.executor.accumulates else None
                return program.forward_backward.lower(*params, sums, batch, weights, noise, inputs)
            operands = inputs, batch, noise, weights, program.sums.losses
            if program.has_backward:
                return program.forward.lower(*params, *operands)
            return program.forward_only.lower(merge(*params), *operands)

    def lower_update(self, number: int) -> jax.stages.Lowered:
        """Lower the optimizer's update of a stage."""
        executor = self.executor
        state = self.executor.states[number].shardings
        hyper = hyperparameters(self.config, 0)
        part = put_shapes(executor.states[number].abstract, state)
        on_all = replicated(executor.stages[number].mesh)
        if executor.is_one_stage:
            weight = jax.ShapeDtypeStruct((), np.float32, sharding=on_all)
            weights = loss_weights(executor.model.config, weight)
            reports = self._reports()
            unreadable = put_shapes(
                jax.eval_shape(executor.merge_unreadable, reports.unreadable), on_all
            )
            with jax.sharding.use_abstract_mesh(executor.mesh.abstract_mesh):
                return executor.update_whole.lower(
                    part, executor.sums, hyper, weights, reports, unreadable
                )
        # Of several stages each is updated by itself, from the norm of all gradients (float32) and
        # whether all agree to the update (bool).
        sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), part.trainable)
        scalars = (
            jax.ShapeDtypeStruct((), dtype, sharding=on_all) for dtype in (jnp.float32, jnp.bool)
        )
        return executor.updates[number].lower(
            part, put_shapes(sums, state.trainable), hyper, *scalars
        )

    def _reports(self) -> ProcessReport:
        """Return the shapes of the processes' reports, as `put_report` puts them on devices."""
        mesh = self.executor.mesh
        per_device = rows_sharding(mesh, AXES)

        def report(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((mesh.size, *shape), dtype, sharding=per_device)

        return ProcessReport(
            digest=report(2, dtype=np.uint32),
            content=report(2, dtype=np.uint32),
            needed_flops=report(dtype=np.float32),
            batch_seconds=report(dtype=np.float32),
            stop=report(dtype=np.bool_),
            unreadable=report(MAX_UNREADABLE + 1, dtype=np.int32),
        )

    def texts(self, number: int) -> tuple[Any, ...]:
        """Return a stage's first program and its update in StableHLO: stages that share both have equal programs."""
        program = self.executor.programs[number]
        texts = (
            NAMES.sub("", lowered.as_text())
            for lowered in (self.lower_first(number), self.lower_update(number))
        )
        return (len(program.gradient_inputs), program.has_backward, *texts)

    def compile_passes(self, number: int) -> tuple[dict[str, jax.stages.Compiled], Any]:
        """Compile the passes of a microbatch through a stage; return them and the shapes of its residuals."""
        program = self.executor.programs[number]
        mesh = self.executor.stages[number].mesh
        first = self.lower_first(number).compile()
        residuals: Any = None
        programs = {"forward_backward" if program.is_sink else "forward": first}
        # A sink has both passes in one program. Else backward takes the residuals as forward leaves
        # them, and gradients of the outputs that something trained has part in.
        if program.has_backward and not program.is_sink:
            inputs = self.inputs(number)
            batch = self.batch(number)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                operands = inputs, batch, *_scalars(program), program.sums.losses
                outputs, residuals, _ = jax.eval_shape(
                    program.forward, *self.parameters(number), *operands
                )
                residuals = put_shapes(residuals, first.output_shardings[1])
                trained = program.trained & set(outputs)
                gradients = put_shapes(
                    *({name: x[name] for name in trained} for x in (outputs, program.layouts))
                )
                operands = (
                    *self.parameters(number),
                    program.sums.gradients,
                    batch,
                    residuals,
                    gradients,
                )
                programs["backward"] = program.backward.lower(*operands).compile()
        return programs, residuals

    def compile(self, number: int) -> tuple[Programs, Any]:
        """Compile the programs that a step runs of a stage; return them and the shapes of a microbatch's residuals."""
        programs, residuals = self.compile_passes(number)
        programs["update"] = self.lower_update(number).compile()
        if (program := self.executor.programs[number]).sums_by_rank:
            programs["reduce"] = program.reduce.lower(program.sums.gradients).compile()
        return {name: _describe(compiled) for name, compiled in programs.items()}, residuals

    def compile_gradients(self) -> CompiledProgram:
        """Compile the program that accumulates gradients on one mesh; bytes include state and batches beside it."""
        programs = {"forward_backward": _describe(self.lower_first(0).compile())}
        return self.with_all_bytes(0, programs)["forward_backward"]

    def compile_update(self) -> CompiledProgram:
        """Compile the optimizer's update on one mesh; bytes include state and batches beside it."""
        programs = {"update": _describe(self.lower_update(0).compile())}
        return self.with_all_bytes(0, programs)["update"]

    def with_all_bytes(
        self, number: int, compiled: Programs, residuals: Any = None, in_flight: int = 1
    ) -> Programs:
        """Add to programs' own bytes those of state, loaded batches and microbatches in flight.

        residuals: shapes of those of a microbatch.
        """
        executor = self.executor
        # Also what a program is not given because it does not use it: parameters and sums lie there
        # all the same.
        moments = (
            0
            if executor.optimizer.offloads
            else _on_device(executor.states[number].abstract.optimizer)
        )
        sums = _on_device(self.sums(number)) if executor.accumulates else 0
        loaded = LOADED * self.config.batch.microbatches * _on_device(self.batch(number))
        beside = _on_device(self.parameters(number)) + sums + moments + loaded
        residual_bytes = _on_device(residuals)
        passing = _on_device(self.inputs(number)) + in_flight * residual_bytes
        programs = {}
        for name, program in compiled.items():
            total = program.bytes + beside
            if name in ("forward", "backward", "forward_backward"):
                total += passing
            if name == "forward":
                total -= residual_bytes  # one microbatch's are among what it makes
            # Without accumulation the gradients are the output of one program and the input of the
            # other: they lie there while the update runs.
            if name == "update" and not executor.accumulates:
                total += _on_device(self.sums(number))
            programs[name] = program._replace(bytes=total)
        return programs


def compiled_bytes(config: Config, batch: DeviceBatch, devices: Sequence[jax.Device]) -> int:
    """Return the peak bytes of a step on each device of one mesh: of the fuller of its programs."""
    step = RunPrograms.on_one_mesh(config, batch, devices)
    return max(step.compile_gradients().bytes, step.compile_update().bytes)


def _describe(program: jax.stages.Compiled) -> CompiledProgram:
    """Describe a program; its bytes are temporaries and outputs, arguments left out."""
    memory = program.memory_analysis()
    text = program.as_text()
    # Donated arguments are written in place: such outputs take no memory of their own.
    return CompiledProgram(
        bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        rematerialized=len(re.findall(r"^\s+(?:ROOT )?%\S+\.remat[\d.]* = ", text, re.MULTILINE)),
        synchronous=text.count('"is_sync":true'),
        text=text,
    )


def _scalars(program: StageProgram) -> tuple[np.ndarray | None, dict[str, jax.ShapeDtypeStruct]]:
    """Return the noise and the loss weights that a stage takes."""
    weight = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(program.mesh))
    noise = np.zeros(2, np.uint32) if program.stage.model.is_random else None
    return noise, dict.fromkeys(program.stage.losses, weight)


def put_shapes(tree: Any, shardings: Any) -> Any:
    """Return shapes that lie as `shardings` says, a tree or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _on_device(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def table_structs(
    modules: Mapping[str, Encoder | Generator],
    token: jax.ShapeDtypeStruct,
    mesh: Mesh,
    rules: ShardingRules,
    shape: Mapping[str, tuple[int, int]],
    widths: Mapping[str, int],
    peers: int,
) -> dict[str, dict[str, Any]]:
    """Return the shapes of a text's tables `slots`, `send`, `spread` and `condition`, by their names.

    token: as in the text. shape: rows of every module on a device, and their length. widths: slots
    that each device sends to each of its peers.
    """
    devices = row_ranks(mesh, rules.token_rows)
    by_device, by_rank = (rows_sharding(mesh, axes) for axes in (rules.token_rows, rules.rows))
    context = mesh.shape[CONTEXT]
    tables: dict[str, dict[str, Any]] = {"slots": {}, "send": {}, "spread": {}, "condition": {}}
    for name, module in modules.items():
        tables["slots"][name] = slot_structs(module, token)
        if module.is_generator:
            # What generators are sent goes from rank to rank.
            rows, length = shape[name]
            columns = module.max_images(length) * module.condition_tokens
            size = row_ranks(mesh, rules.rows), peers, widths[name]
            tables["send"][name] = jax.ShapeDtypeStruct(size, np.int32, sharding=by_rank)
            tables["condition"][name] = jax.ShapeDtypeStruct(
                (devices * rows, columns), np.int32, sharding=by_rank
            )
            continue
        tables["send"][name] = jax.ShapeDtypeStruct(
            (devices, peers, widths[name]), np.int32, sharding=by_device
        )
        if context > 1:
            width = tokens_on_device(module, *shape[name], peers, widths[name])
            tables["spread"][name] = jax.ShapeDtypeStruct(
                (devices, context, width), np.int32, sharding=by_device
            )
    return tables


def slot_structs(
    module: Encoder | Generator, token: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct | WeightedSlots:
    """Return the shapes of the table that places a module's tokens among those of the text."""
    if not module.interpolates_tokens:
        return token
    corners = jax.ShapeDtypeStruct((*token.shape, CORNERS), np.int32, sharding=token.sharding)
    return WeightedSlots(corners, corners.update(dtype=np.float32))
