"""The programs of a step on one mesh, as plain functions: the specification that an executor's programs are held to.

Written once from the model's parts, without stages, pieces or whatever an executor is made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from step_args import StepArguments

from mmjax.batch import Microbatch
from mmjax.config.model import adapted_modules
from mmjax.losses.step_losses import (
    Losses,
    expert_loss,
    expert_sums,
    highest_losses,
    image_loss,
    sum_by_source,
    worst_samples,
)
from mmjax.models.layer_stacks import Params, split_scanned
from mmjax.models.model import Model, Outputs, accumulate_in_scans, merge, restrict
from mmjax.parallel.sharding import activations_on
from mmjax.runtime.executor import Executor
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.step_report import is_valid, report_step


def model_outputs(
    model: Model, params: Params, batch: Microbatch, noise: Any, sums: Any, features: Any
) -> Outputs:
    """Encoders, then the LLM, then generators."""
    module = model.module(params)
    seed = accumulate_in_scans(module, sums)
    features = {
        **features,
        **module.encode({n: x for n, x in batch.items.items() if n not in features}, noise),
    }
    hidden, table = module.hidden_and_table(batch.text, features, noise)
    errors = module.generator_errors(hidden, batch.text, batch.items, noise)
    return Outputs(seed(hidden), table, module.llm.layers.routing, errors)


def token_losses(
    executor: Executor, params: Params, batch: Microbatch, weight: Any, noise: Any, sums: Any
) -> Any:
    """Outputs, the loss, of a step of this weight, every token's, and measures.

    A frozen reference runs beside, behind encoders that both share.
    """
    objective, model = executor.objective, executor.model
    if objective.reference is None:
        outputs = model_outputs(model, params, batch, noise, sums, {})
        return outputs, *objective.step_loss(outputs, batch.text, weight)
    adapted = {module.partition(".")[0] for module in adapted_modules(model.config)}
    shared = {name: items for name, items in batch.items.items() if name not in adapted}
    frozen = restrict(params, objective.reference.abstract)
    features = objective.reference.module(frozen).encode(shared) if shared else {}
    outputs = model_outputs(model, params, batch, noise, sums, features)
    reference = model_outputs(objective.reference, frozen, batch, None, None, features)
    return outputs, *objective.step_loss(outputs, batch.text, weight, reference)


def gradient_program(executor: Executor) -> Any:
    """One microbatch's gradients and report, added to those before; or alone, in the computation's precision."""

    def program(
        trainable: Params,
        frozen: Params,
        accumulated: Sums | None,
        batch: Microbatch,
        weights: Mapping[str, jax.Array],
        noise: jax.Array | None = None,
    ) -> Sums:
        if accumulated is None:
            zeros = executor.programs[0].zero_sums(executor.model.dtype)
            accumulated = jax.lax.with_sharding_constraint(
                zeros, executor.programs[0].sums_shardings
            )
        sums, unscanned = split_scanned(accumulated.gradients)
        scanned, rest = split_scanned(trainable)

        def loss(rest: Params, sums: Params) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            params = merge(merge(rest, scanned), frozen)
            config = executor.model.config
            outputs, total, losses, measures = token_losses(
                executor, params, batch, weights["llm"], noise, sums
            )
            by_source, weight = sum_by_source(losses, batch.text, executor.programs[0].sources)
            experts = expert_sums(
                outputs.routing, weight.sum() / jnp.where(weights["llm"] > 0, weights["llm"], 1)
            )
            of_images, images = image_loss(outputs.errors, batch.items, weights, config)
            worst = worst_samples(jax.lax.stop_gradient(losses), batch.text)
            total += expert_loss(experts, config.llm.experts) + of_images
            return total, (
                by_source,
                weight,
                experts,
                images,
                {n: x.sum() for n, x in measures.items()},
                *worst,
            )

        with activations_on(executor.mesh, executor.rules):
            (gradients, sums), report = jax.grad(loss, (0, 1), has_aux=True)(rest, sums)
        by_source, weight, experts, images, measures, samples, losses, not_finite = report
        total = accumulated.losses
        worst = highest_losses(
            jnp.concatenate([total.worst_samples, samples]),
            jnp.concatenate([total.worst_losses, losses]),
        )
        new_losses = Losses(
            loss=total.loss + by_source,
            weight=total.weight + weight,
            worst_samples=worst[0],
            worst_losses=worst[1],
            not_finite=total.not_finite + not_finite,
            experts=jax.tree.map(jnp.add, total.experts, experts),
            images=jax.tree.map(jnp.add, dict(total.images), images),
            measures=jax.tree.map(jnp.add, dict(total.measures), measures),
        )
        return Sums(merge(jax.tree.map(jnp.add, unscanned, gradients), sums), new_losses)

    return jax.jit(program, out_shardings=executor.programs[0].sums_shardings, donate_argnums=2)


def update_program(executor: Executor) -> Any:
    """One update of all parameters, or none, with the gradient's norm and the step's report."""
    optimizer = executor.optimizer

    def program(
        state: Any, accumulated: Any, hyper: Any, weights: Any, reports: Any, unreadable: Any
    ) -> Any:
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), accumulated.gradients)
        stored = optimizer.load(state.optimizer)
        with activations_on(executor.mesh, executor.rules):
            params, moments, norm = optimizer.update(gradients, stored, state.trainable, hyper)
        report = report_step(accumulated.losses, norm, reports, unreadable)
        valid = is_valid(report, sum(weights.values()))
        old = state.trainable, stored
        params, moments = jax.tree.map(
            lambda new, old: jnp.where(valid, new, old), (params, moments), old
        )
        cleared = jax.tree.map(jnp.zeros_like, accumulated) if executor.accumulates else None
        new = state._replace(step=state.step + valid, trainable=params, optimizer=moments)
        return new, cleared, report

    cleared = executor.programs[0].sums_shardings if executor.accumulates else None
    on_all = executor.programs[0].sums_shardings.losses.loss
    donated = (0, 1) if executor.accumulates else 0
    return jax.jit(
        program,
        out_shardings=(executor.states[0].shardings, cleared, on_all),
        donate_argnums=donated,
    )


def lowered_text(program: Any, arguments: tuple[Any, ...]) -> str:
    """A program's StableHLO without what does not compute: its own name and those of its results."""
    text = program.lower(*arguments).as_text()
    return re.sub(r'module @\w+|jax\.result_info = "[^"]*"', "", text)


def assert_programs_are_those_of_one_mesh(executor: Executor, arguments: StepArguments) -> None:
    """Both programs' texts are the specification's, letter by letter."""
    for name, own, specified in (
        ("accumulate", executor.programs[0].forward_backward, gradient_program(executor)),
        ("update", executor.update_whole, update_program(executor)),
    ):
        given = getattr(arguments, name)
        ours, wanted = (
            lowered_text(own, given).splitlines(),
            lowered_text(specified, given).splitlines(),
        )
        differing = [(a, b) for a, b in zip(ours, wanted, strict=False) if a != b]
        assert not differing, f"{name}: the first of {len(differing)} lines: {differing[0]}"
        assert len(ours) == len(wanted)
