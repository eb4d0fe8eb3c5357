"""Compile the programs of one stage: forward, backward, and both in one where nothing goes on to other stages.

On one mesh the model is one stage. Of a pipeline's stages forward returns what backward needs as
residuals, without what backward is given again: parameters and batch. So a microbatch in flight
costs its activations, as the remat policies of the stage's layers leave them, and no copy of a
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from mmjax.batch import Microbatch
from mmjax.losses.objective import TextObjective, measures_of
from mmjax.losses.step_losses import (
    Losses,
    add_losses,
    expert_loss,
    expert_sums,
    image_loss,
    sum_by_source,
    worst_samples,
    zero_losses,
)
from mmjax.models.layer_stacks import Params, key_names, split_scanned
from mmjax.models.model import Outputs, merge, modules_of, partition
from mmjax.models.piece import ROUTING, Activations
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import (
    ShardingRules,
    activations_on,
    partition_spec,
    replicated,
    rows_sharding,
    tokens_sharding,
    tree_shardings,
)
from mmjax.runtime.device_batch import weigh, weigh_images
from mmjax.runtime.program_cache import CachedProgram

LOSS = "loss"  # of a stage, beside what it makes for others


class Sums(NamedTuple):
    """Accumulate the gradients and losses of a step's microbatches on a stage."""

    gradients: Params  # float32; of one microbatch, as in `StageProgram.zero_sums`
    losses: Losses | None  # None: of a stage that makes none


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves"],
    meta_fields=["structure", "operands"],
)
@dataclass(frozen=True)
class Residuals:
    """Values of a microbatch's forward pass that its backward pass needs, without those that it is given again."""

    leaves: list[jax.Array]  # those leaves of the VJP function that are no operands of backward
    structure: Any  # of that function
    operands: tuple[int | None, ...]  # number of each leaf among the operands; None: in `leaves`

    @classmethod
    def of(cls, vjp: Any, operands: Any) -> Residuals:
        """Take the residuals out of a VJP function that was traced with these operands."""
        leaves, structure = jax.tree.flatten(vjp)
        # While tracing, an operand that is a residual is the same tracer.
        numbers = {id(operand): number for number, operand in enumerate(jax.tree.leaves(operands))}
        sources = tuple(numbers.get(id(leaf)) for leaf in leaves)
        return cls(
            [leaf for leaf, number in zip(leaves, sources, strict=True) if number is None],
            structure,
            sources,
        )

    def vjp(self, operands: Any) -> Any:
        """Return the VJP function, its other leaves from the same operands again."""
        values, stored = jax.tree.leaves(operands), iter(self.leaves)
        leaves = [next(stored) if number is None else values[number] for number in self.operands]
        return jax.tree.unflatten(self.structure, leaves)


class StageProgram:
    """The programs of a stage on its own mesh. `is_sink`: it makes losses, and nothing for other stages."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        rules: ShardingRules,
        objective: TextObjective,
        *,
        trained: frozenset[str] = frozenset(),
        sources: int,
        reduces_once: bool = True,
        context: str | None = None,
        compiler_options: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        """trained: names of the activations whose gradients the stages that make them need.

        reduces_once: whether gradients are reduced over `data` once a step, and not with every
        microbatch. context: as of `CachedProgram`.
        """
        model = stage.model
        self.stage = stage
        self.mesh = mesh
        self.rules = rules
        self.objective = objective
        self.trained = trained
        self.gradient_inputs = trained & set(stage.inputs)
        self.sources = sources
        self.is_sink = bool(stage.losses) and not stage.outputs
        abstract = stage.select(model.abstract)
        axes = stage.select(model.axes)
        shardings = tree_shardings(mesh, rules, abstract, axes)
        frozen = frozenset(model.frozen) & modules_of(abstract)
        self.abstract = partition(abstract, frozen)  # trainable and frozen, as the next
        self.shardings = partition(shardings, frozen)
        by_path = jax.tree.leaves_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))
        # Inner matrices are used in the precision of the computation. Cast before, they are
        # operands of the VJP, which backward is given again; cast by the layers, a copy of each
        # would be a residual of every microbatch.
        self._cast = frozenset(
            key_names(path)
            for path, names in by_path
            if len(names) >= 2 and not {None, "vocab", "fixed"} & set(names)
        )
        # Of matrices each rank of `data` adds up gradients of its own, [data, in, out] with the
        # first axis over `data`, which are reduced once a step. Others are small, or those of
        # experts, whose products are computed on each rank by itself.
        self.sums_by_rank = reduces_once and mesh.shape["data"] > 1
        self._unreduced = frozenset(
            key_names(path)
            for path, names in by_path
            if self.sums_by_rank
            and len(names) == 2
            and (names == ("vocab", "embed") or key_names(path) in self._cast)
        )
        gradients = jax.tree_util.tree_map_with_path(
            self._sum_struct, self.abstract[0], self.shardings[0]
        )
        on_all = replicated(mesh)
        losses = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_all),
            jax.eval_shape(self._zero_losses),
        )
        self.sums = Sums(gradients, losses)  # shapes, dtypes and shardings
        self.sums_shardings = jax.tree.map(lambda x: x.sharding, self.sums)
        # A frozen encoder with a frozen connector has no backward pass. A frozen LLM behind
        # something trained has one: gradients pass through it.
        self.has_backward = bool(self.gradient_inputs or jax.tree.leaves(self.abstract[0]))
        of_text = tokens_sharding(mesh, rules)
        self.layouts = {name: self._layout(name) for name in (*stage.inputs, *stage.outputs)}
        outputs = {name: self.layouts[name] for name in stage.outputs}
        sums = self.sums_shardings
        self.zeros = jax.jit(lambda: zeros_like(self.sums), out_shardings=sums)
        self._weigh_text = jax.jit(weigh, out_shardings=(on_all, of_text))
        self._weigh_images = jax.jit(
            weigh_images, out_shardings=(on_all, rows_sharding(mesh, rules.item_rows))
        )
        self.reduce = jax.jit(self._reduce, out_shardings=self.shardings[0], donate_argnums=0)
        jit = partial(jax.jit, compiler_options=compiler_options or None)
        self.forward = jit(self._forward)
        self.forward_only = jit(self._forward_only, out_shardings=(outputs, sums.losses))
        # Gradients of inputs lie as the inputs do: the way back is the way there.
        inputs = {name: self.layouts[name] for name in sorted(self.gradient_inputs)}
        self.backward = jit(
            self._backward, donate_argnums=2, out_shardings=(sums.gradients, inputs)
        )
        cached = partial(CachedProgram, context, mesh, compiler_options=compiler_options or None)
        self.forward_backward = cached(
            self.add_gradients, donate_argnums=2, out_shardings=(sums, inputs)
        )

    def _layout(self, name: str) -> NamedSharding:
        """Return where an array lies that the stage takes or makes."""
        if name.startswith(ROUTING):
            return replicated(self.mesh)
        if name.startswith("llm."):
            return tokens_sharding(self.mesh, self.rules)
        # An encoder's tokens, or the states that a generator takes, lie on the ranks that exchange
        # them.
        exchanged = name in self.stage.model.config.item_modules or ".deeper." in name
        return rows_sharding(
            self.mesh, self.rules.token_rows if exchanged else self.rules.item_rows
        )

    def weigh(
        self,
        totals: Mapping[str, jax.Array],
        batch: Microbatch,
        unreadable: tuple[jax.Array, jax.Array],
    ) -> tuple[dict[str, jax.Array], Microbatch]:
        """Add a microbatch's weights of the losses that are made here to the totals by tower.

        Returns them and the microbatch, with weight 0 where a sample is unreadable. unreadable: ids
        and their number.
        """
        totals = dict(totals)
        text, items = batch
        for tower in self.stage.losses:
            if tower == "llm":
                totals[tower], weight = self._weigh_text(
                    totals[tower], text.weight, text.owner, *unreadable
                )
                text = text._replace(weight=weight)
            else:
                totals[tower], item = self._weigh_images(totals[tower], items[tower], *unreadable)
                items = items | {tower: items[tower]._replace(item=item)}
        return totals, Microbatch(text, items)

    def zero_sums(self, products: jnp.dtype = jnp.float32) -> Sums:
        """Make zeros to add a microbatch to. products: dtype of the gradients of scanned stacks' matrices."""
        scanned, rest = split_scanned(self.sums.gradients)
        scanned = jax.tree.map(
            lambda p: jnp.zeros(p.shape, products if p.ndim > 2 else jnp.float32), scanned
        )
        return Sums(merge(scanned, zeros_like(rest)), self._zero_losses())

    def _zero_losses(self) -> Losses | None:
        measures = measures_of(self.objective.loss)
        return zero_losses(self.stage.model.config, self.stage.losses, self.sources, measures)

    def add_gradients(
        self,
        trainable: Params,
        frozen: Params,
        sums: Sums | None,
        batch: Microbatch,
        weights: Mapping[str, jax.Array],
        noise: jax.Array | None = None,
        inputs: Activations | None = None,
    ) -> tuple[Sums, Activations]:
        """Run a microbatch forward and backward where the stage is a sink; return the new sums and inputs' gradients.

        weights: of the whole step's losses. sums: None for gradients of one microbatch alone.
        """
        if sums is None:
            # A matrix's gradient is a product in the precision of the computation: float32 would
            # hold no more of it.
            sums = jax.lax.with_sharding_constraint(
                self.zero_sums(self.stage.model.dtype), self.sums_shardings
            )
        trainable = self._copies(trainable)
        differentiated, constants = self._split(inputs or {})
        # Gradients of scanned stacks are added to their sums inside the scan; the others are few.
        scanned_sums, unscanned = split_scanned(sums.gradients)
        scanned, rest = split_scanned(trainable)

        def loss(
            rest: Params, scanned_sums: Params, differentiated: Activations
        ) -> tuple[jax.Array, Losses]:
            params = merge(merge(rest, scanned), frozen)
            values, losses = self._run(
                params, differentiated | constants, batch, noise, weights, scanned_sums
            )
            return values[LOSS], losses

        # Forward and backward are one program: nothing of a sink is in flight, and its loss needs
        # no residuals.
        with activations_on(self.mesh, self.rules):
            (gradients, scanned_sums, differentiated), losses = jax.grad(
                loss, (0, 1, 2), has_aux=True
            )(rest, scanned_sums, differentiated)
        losses = add_losses(sums.losses, losses)
        return Sums(merge(_add(unscanned, gradients), scanned_sums), losses), differentiated

    def _run(
        self,
        params: Params,
        inputs: Activations,
        batch: Microbatch,
        noise: jax.Array | None,
        weights: Mapping[str, jax.Array],
        sums: Params | None = None,
    ) -> tuple[Activations, Losses | None]:
        """Run the stage; return what it makes for others, with the loss, and the losses of the report.

        sums: of scanned stacks' gradients.
        """
        values, seed, reference = self.objective.run(self.stage, params, inputs, batch, noise, sums)
        outputs = {name: values[name] for name in self.stage.outputs}
        if not self.stage.losses:
            # Sums go the way back with any gradient.
            if seeded := next((name for name in self.stage.outputs if name in self.trained), None):
                outputs[seeded] = seed(outputs[seeded])
            return outputs, None
        # Logits are as large as nothing else: beside outputs they are made again in backward, and
        # not kept until then.
        compute = self._losses if self.is_sink else jax.checkpoint(self._losses)
        loss, losses = compute(self.stage.operands(values, seed), reference, batch, weights)
        return outputs | {LOSS: loss}, losses

    def _losses(
        self,
        operands: Outputs,
        reference: Outputs | None,
        batch: Microbatch,
        weights: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, Losses]:
        """Compute a microbatch's part of the loss that is trained on, and of a step's losses."""
        config = self.stage.model.config
        if "llm" not in self.stage.losses:
            loss, images = image_loss(operands.errors, batch.items, weights, config)
            return loss, Losses(images=images)
        loss, by_token, measures = self.objective.step_loss(
            operands, batch.text, weights["llm"], reference
        )
        by_source, weight = sum_by_source(by_token, batch.text, self.sources)
        experts = expert_sums(
            operands.routing, weight.sum() / jnp.where(weights["llm"] > 0, weights["llm"], 1)
        )
        of_images, images = image_loss(operands.errors, batch.items, weights, config)
        worst = worst_samples(by_token, batch.text)
        loss += expert_loss(experts, config.llm.experts) + of_images
        return loss, Losses(
            loss=by_source,
            weight=weight,
            worst_samples=worst[0],
            worst_losses=worst[1],
            not_finite=worst[2],
            experts=experts,
            images=images,
            measures={name: x.sum() for name, x in measures.items()},
        )

    def _forward_only(
        self,
        params: Params,
        inputs: Activations,
        batch: Microbatch,
        noise: jax.Array | None,
        weights: Mapping[str, jax.Array],
        losses: Losses | None,
    ) -> tuple[Activations, Losses | None]:
        with activations_on(self.mesh, self.rules):
            outputs, part = self._run(params, inputs, batch, noise, weights)
        return {name: x for name, x in outputs.items() if name != LOSS}, add_losses(losses, part)

    def _sum_struct(
        self, path: Any, p: jax.ShapeDtypeStruct, layout: NamedSharding
    ) -> jax.ShapeDtypeStruct:
        """Return shape and sharding of the sum of a parameter's gradients, with one for every rank of `data`."""
        shape, spec = list(p.shape), [*layout.spec, *(None,) * (p.ndim - len(layout.spec))]
        if key_names(path) in self._unreduced:
            shape.insert(-2, self.mesh.shape["data"])
            spec.insert(-2, "data")
        layout = NamedSharding(self.mesh, partition_spec(spec))
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=layout)

    def _copies(self, trainable: Params) -> Params:
        """Give each rank of `data` a copy of the parameters of which it sums gradients: the one that it has anyway."""

        def copy(p: jax.Array, total: jax.ShapeDtypeStruct) -> jax.Array:
            if p.ndim == total.ndim:
                return p
            copies = jnp.broadcast_to(jnp.expand_dims(p, -3), total.shape)
            return jax.lax.with_sharding_constraint(copies, total.sharding)

        return jax.tree.map(copy, trainable, self.sums.gradients)

    def _reduce(self, sums: Params) -> Params:
        """Add up the sums of the ranks of `data`."""
        return jax.tree.map(
            lambda x, p: x if x.ndim == len(p.shape) else x.sum(-3), sums, self.abstract[0]
        )

    def _operands(self, trainable: Params, frozen: Params) -> tuple[Params, Params]:
        """Cast the matrices to the precision of the computation, and copy what has gradients by rank of `data`."""
        dtype = self.stage.model.dtype

        def cast(path: Any, p: jax.Array) -> jax.Array:
            return p.astype(dtype) if key_names(path) in self._cast else p

        return self._copies(jax.tree_util.tree_map_with_path(cast, trainable)), frozen

    def _forward(
        self,
        trainable: Params,
        frozen: Params,
        inputs: Activations,
        batch: Microbatch,
        noise: jax.Array | None,
        weights: Mapping[str, jax.Array],
        losses: Losses | None,
    ) -> tuple[Activations, Residuals, Losses | None]:
        trainable, frozen = self._operands(trainable, frozen)
        differentiated, constants = self._split(inputs)
        scanned, rest = split_scanned(trainable)
        # They stand for the sums that backward is given, and are in no program.
        sums = zeros_like(split_scanned(self.sums.gradients)[0])

        def run(rest: Params, differentiated: Activations, sums: Params) -> tuple[Activations, Any]:
            params = merge(merge(rest, scanned), frozen)
            with activations_on(self.mesh, self.rules):
                outputs, part = self._run(
                    params, differentiated | constants, batch, noise, weights, sums
                )
            trained, untrained = self._split(outputs)
            return trained, (untrained, part)

        # What a frozen encoder's layers pass on has no gradient, though its connector's tokens may
        # have one.
        outputs, vjp, (kept_outputs, part) = jax.vjp(run, rest, differentiated, sums, has_aux=True)
        # Outputs lie as transfers are planned; residuals lie as the layers leave them.
        outputs = {name: x for name, x in (outputs | kept_outputs).items() if name != LOSS}
        outputs = jax.lax.with_sharding_constraint(
            outputs, {name: self.layouts[name] for name in outputs}
        )
        residuals = Residuals.of(vjp, (trainable, frozen, batch, sums))
        return outputs, residuals, add_losses(losses, part)

    def _backward(
        self,
        trainable: Params,
        frozen: Params,
        sums: Params,
        batch: Microbatch,
        residuals: Residuals,
        output_gradients: Activations,
    ) -> tuple[Params, Activations]:
        trainable, frozen = self._operands(trainable, frozen)
        # Gradients of scanned stacks are added to their sums inside the scan; the others are few.
        scanned, unscanned = split_scanned(sums)
        vjp = residuals.vjp((trainable, frozen, batch, scanned))
        if self.stage.losses:
            output_gradients = output_gradients | {LOSS: jnp.ones(())}
        gradients, differentiated, scanned = vjp(output_gradients)
        return merge(_add(unscanned, gradients), scanned), differentiated

    def _split(self, activations: Activations) -> tuple[Activations, Activations]:
        """Split activations into those whose gradient is needed and the others."""
        trained = self.trained | {LOSS}
        differentiated = {name: x for name, x in activations.items() if name in trained}
        return differentiated, {n: x for n, x in activations.items() if n not in trained}


def zeros_like(structs: Params) -> Params:
    """Make zeros of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)


def _add(sums: Params, gradients: Params) -> Params:
    return jax.tree.map(lambda total, new: total + new.astype(total.dtype), sums, gradients)
