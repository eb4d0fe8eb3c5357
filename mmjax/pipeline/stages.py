"""Compile the programs of one pipeline stage: forward, backward, and both in one where the pipeline ends.

Forward returns what backward needs as residuals, without what backward is given again: parameters and batch. So a
microbatch in flight costs its activations, as the remat policies of the stage's layers leave them, and no copy of a
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import CrossEntropy, Exchange, LossConfig
from mmjax.models.layer_stacks import Params, key_names, split_scanned
from mmjax.models.model import Outputs, merge, modules_of, partition
from mmjax.models.stage import Activations, Stage
from mmjax.parallel.sharding import (
    ShardingRules,
    activations_on,
    replicated,
    rows_sharding,
    sharding,
    tokens_sharding,
)
from mmjax.runtime.losses import image_loss, step_loss, worst_samples
from mmjax.runtime.objectives import TextObjective, measures_of

LOSS = "llm.loss"  # of the LLM's last stage, beside what it sends on to a generator


class LossSums(NamedTuple):
    """One microbatch's part of a step's report, as in `runtime.step.Accumulated`."""

    loss: jax.Array  # float32 [sources]
    weight: jax.Array  # float32 [sources]
    worst_samples: jax.Array  # int32 [MAX_WORST]
    worst_losses: jax.Array  # float32 [MAX_WORST]
    not_finite: jax.Array  # int32 []
    measures: dict[str, jax.Array]  # float32 [] by name


# Of a stage's loss: of the LLM's, or a generator's as `image_sums` makes it; None where a stage makes no loss.
Report = LossSums | jax.Array | None


@jax.tree_util.register_pytree_node_class
class Residuals:
    """Values of a microbatch's forward pass that its backward pass needs, without those that it is given again."""

    def __init__(self, leaves: list[jax.Array], structure: Any, operands: tuple[int | None, ...]) -> None:
        """operands: number of each leaf of the VJP function among backward's operands; None: it is in `leaves`."""
        self.leaves = leaves
        self.structure = structure
        self.operands = operands

    @classmethod
    def of(cls, vjp: Any, operands: Any) -> Residuals:
        """Take the residuals out of a VJP function that was traced with these operands."""
        leaves, structure = jax.tree.flatten(vjp)
        # While tracing, an operand that is a residual is the same tracer.
        numbers = {id(operand): number for number, operand in enumerate(jax.tree.leaves(operands))}
        sources = tuple(numbers.get(id(leaf)) for leaf in leaves)
        return cls([leaf for leaf, number in zip(leaves, sources, strict=True) if number is None], structure, sources)

    def vjp(self, operands: Any) -> Any:
        """Return the VJP function, its other leaves from the same operands again."""
        values, stored = jax.tree.leaves(operands), iter(self.leaves)
        leaves = [next(stored) if number is None else values[number] for number in self.operands]
        return jax.tree.unflatten(self.structure, leaves)

    def tree_flatten(self) -> tuple[tuple[list[jax.Array]], tuple[Any, tuple[int | None, ...]]]:
        return (self.leaves,), (self.structure, self.operands)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, tuple[int | None, ...]], children: tuple[list[jax.Array]]) -> Residuals:
        return cls(children[0], *aux)


class StageProgram:
    """The programs of a stage on its own mesh. `is_sink`: it is the pipeline's last."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        rules: ShardingRules,
        *,
        trained: frozenset[str],
        sources: int,
        exchange: Exchange = "padded",
        loss: LossConfig = CrossEntropy(),
        loss_chunks: int = 1,
        compiler_options: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        """trained: names of the activations whose gradients the stages that make them need."""
        model = stage.model
        self.stage = stage
        self.mesh = mesh
        self.rules = rules
        self.trained = trained
        self.gradient_inputs = trained & set(stage.inputs)
        self.sources = sources
        self.exchange = exchange
        self.text_objective = TextObjective(model, loss, loss_chunks)
        self.is_sink = stage.makes_loss and not stage.sends_states
        abstract = stage.select(model.abstract)
        axes = stage.select(model.axes)
        shardings = jax.tree.map(
            lambda names, leaf: sharding(mesh, rules, leaf.shape, names),
            axes,
            abstract,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        frozen = frozenset(model.frozen) & modules_of(abstract)
        self.abstract = partition(abstract, frozen)  # trainable and frozen, as the next
        self.shardings = partition(shardings, frozen)
        by_path = jax.tree.leaves_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))
        # Inner matrices are used in the precision of the computation. Cast before, they are operands of the VJP, which
        # backward is given again; cast by the layers, a copy of each would be a residual of every microbatch.
        self._cast = frozenset(
            key_names(path) for path, names in by_path if len(names) >= 2 and not {None, "vocab", "fixed"} & set(names)
        )
        # Of matrices each rank of `data` adds up gradients of its own, which are reduced once a step. Others are small,
        # or those of experts, whose products are computed on each rank by itself.
        self.sums_by_rank = mesh.shape["data"] > 1
        tables = [key_names(path) for path, names in by_path if names == ("vocab", "embed")]
        inner = [key_names(path) for path, names in by_path if len(names) == 2 and key_names(path) in self._cast]
        self._unreduced = frozenset([*tables, *inner]) if self.sums_by_rank else frozenset()
        self.sums = jax.tree_util.tree_map_with_path(
            self._sum_struct, *(part[0] for part in (self.abstract, self.shardings))
        )
        # A frozen encoder with a frozen connector has no backward pass. A frozen LLM behind something trained has one:
        # gradients pass through it.
        self.has_backward = bool(self.gradient_inputs or jax.tree.leaves(self.abstract[0]))
        # Of what the stage takes and makes. Tokens of encoders lie on the ranks that encode, or exchange them.
        encoded = rows_sharding(mesh, rules.token_rows)
        of_text = tokens_sharding(mesh, rules)
        names = (*stage.inputs, *stage.outputs)
        self.layouts = {name: of_text if name.startswith("llm.") else encoded for name in names}
        on_all = replicated(mesh)
        report = None
        if stage.makes_loss:
            measures = dict.fromkeys(measures_of(loss), on_all)
            report = on_all if stage.generates else LossSums(*[on_all] * 5, measures)
        outputs = {} if self.is_sink else {name: self.layouts[name] for name in stage.outputs}
        sums = jax.tree.map(lambda x: x.sharding, self.sums)
        self.zeros = jax.jit(lambda: zeros_like(self.sums), out_shardings=sums)
        self.reduce = jax.jit(self._reduce, out_shardings=self.shardings[0], donate_argnums=0)
        jit = partial(jax.jit, compiler_options=compiler_options or None)
        self.forward = jit(self._forward)
        self.forward_only = jit(self._forward_only, out_shardings=(outputs, report))
        # Gradients of inputs lie as the inputs do: the way back is the way there.
        inputs = {name: self.layouts[name] for name in sorted(self.gradient_inputs)}
        self.backward = jit(self._backward, donate_argnums=2, out_shardings=(sums, inputs))
        self.forward_backward = jit(self._forward_backward, donate_argnums=2, out_shardings=(sums, inputs, report))

    def _run(
        self,
        params: Params,
        inputs: Activations,
        batch: TextBatch | ItemBatch,
        noise: jax.Array | None,
        weight: jax.Array | None,
        sums: Params | None = None,
    ) -> tuple[Activations, Report]:
        """Run the stage; return what it makes, a loss among it, and the loss's report.

        weight: of the whole step's loss. sums: of scanned stacks' gradients.
        """
        operands = params, inputs, batch, noise, sums
        with activations_on(self.mesh, self.rules, self.exchange):
            if not self.stage.makes_loss:
                return self.stage(*operands), None
            if self.stage.generates:
                (error,) = self.stage(*operands).values()
                name = self.stage.tower
                loss, images = image_loss({name: error[..., 0]}, {name: batch}, {name: weight}, self.stage.model.config)
                return {LOSS: loss}, images[name]
            hidden, table = self.stage.hidden_and_table(*operands)
            if self.is_sink:
                loss, report = self._text_loss(hidden, table, batch, weight)
                return {LOSS: loss}, report
            # Logits are as large as nothing else: they are made again in backward, and not kept until then.
            loss, report = jax.checkpoint(self._text_loss)(hidden, table, batch, weight)
            return self.stage.query_states(hidden, batch) | {LOSS: loss}, report

    def _text_loss(
        self, hidden: jax.Array, table: jax.Array, batch: TextBatch, weight: jax.Array
    ) -> tuple[jax.Array, LossSums]:
        losses, measures = self.text_objective.token_losses(Outputs(hidden, table, None, {}), batch)
        total, by_source, weights = step_loss(losses, batch, weight, self.sources)
        worst = worst_samples(jax.lax.stop_gradient(losses), batch)
        return total, LossSums(by_source, weights, *worst, {name: x.sum() for name, x in measures.items()})

    def _forward_only(
        self, params: Params, inputs: Activations, batch: Any, noise: jax.Array | None, weight: jax.Array | None
    ) -> tuple[Activations, Report]:
        outputs, report = self._run(params, inputs, batch, noise, weight)
        return {name: x for name, x in outputs.items() if name != LOSS}, report

    def _sum_struct(self, path: Any, p: jax.ShapeDtypeStruct, layout: NamedSharding) -> jax.ShapeDtypeStruct:
        """Return shape and sharding of the sum of a parameter's gradients, with one for every rank of `data`."""
        shape, spec = list(p.shape), [*layout.spec, *(None,) * (p.ndim - len(layout.spec))]
        if key_names(path) in self._unreduced:
            shape.insert(-2, self.mesh.shape["data"])
            spec.insert(-2, "data")
        layout = NamedSharding(self.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=layout)

    def _copies(self, trainable: Params) -> Params:
        """Give each rank of `data` a copy of the parameters of which it sums gradients: the one that it has anyway."""

        def copy(p: jax.Array, total: jax.ShapeDtypeStruct) -> jax.Array:
            if p.ndim == total.ndim:
                return p
            copies = jnp.broadcast_to(jnp.expand_dims(p, -3), total.shape)
            return jax.lax.with_sharding_constraint(copies, total.sharding)

        return jax.tree.map(copy, trainable, self.sums)

    def _reduce(self, sums: Params) -> Params:
        """Add up the sums of the ranks of `data`."""
        return jax.tree.map(lambda x, p: x if x.ndim == len(p.shape) else x.sum(-3), sums, self.abstract[0])

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
        batch: Any,
        noise: jax.Array | None,
        weight: jax.Array | None,
    ) -> tuple[Activations, Residuals, Report]:
        trainable, frozen = self._operands(trainable, frozen)
        differentiated, constants = self._split(inputs)
        scanned, rest = split_scanned(trainable)
        # They stand for the sums that backward is given, and are in no program.
        sums = zeros_like(split_scanned(self.sums)[0])

        def run(rest: Params, differentiated: Activations, sums: Params) -> tuple[Activations, Any]:
            params = merge(merge(rest, scanned), frozen)
            outputs, report = self._run(params, differentiated | constants, batch, noise, weight, sums)
            trained, untrained = self._split(outputs)
            return trained, (untrained, report)

        # What a frozen encoder's layers pass on has no gradient, though its connector's tokens may have one.
        outputs, vjp, (kept_outputs, report) = jax.vjp(run, rest, differentiated, sums, has_aux=True)
        # Outputs lie as transfers are planned; residuals lie as the layers leave them.
        outputs = {name: x for name, x in (outputs | kept_outputs).items() if name != LOSS}
        outputs = jax.lax.with_sharding_constraint(outputs, {name: self.layouts[name] for name in outputs})
        return outputs, Residuals.of(vjp, (trainable, frozen, batch, sums)), report

    def _backward(
        self,
        trainable: Params,
        frozen: Params,
        sums: Params,
        batch: Any,
        residuals: Residuals,
        output_gradients: Activations,
    ) -> tuple[Params, Activations]:
        trainable, frozen = self._operands(trainable, frozen)
        # Gradients of scanned stacks are added to their sums inside the scan; the others are few.
        scanned, unscanned = split_scanned(sums)
        vjp = residuals.vjp((trainable, frozen, batch, scanned))
        if self.stage.makes_loss:
            output_gradients = output_gradients | {LOSS: jnp.ones(())}
        gradients, differentiated, scanned = vjp(output_gradients)
        return merge(_add(unscanned, gradients), scanned), differentiated

    def _forward_backward(
        self,
        trainable: Params,
        frozen: Params,
        sums: Params,
        inputs: Activations,
        batch: TextBatch | ItemBatch,
        noise: jax.Array | None,
        weight: jax.Array,
    ) -> tuple[Params, Activations, Report]:
        trainable = self._copies(trainable)
        differentiated, constants = self._split(inputs)
        scanned, rest = split_scanned(trainable)
        scanned_sums, unscanned = split_scanned(sums)

        def loss(rest: Params, differentiated: Activations, sums: Params) -> tuple[jax.Array, Report]:
            params = merge(merge(rest, scanned), frozen)
            outputs, report = self._run(params, differentiated | constants, batch, noise, weight, sums)
            return outputs[LOSS], report

        # Forward and backward are one program: nothing of the last stage is in flight, and its loss needs no residuals.
        (gradients, differentiated, scanned_sums), report = jax.grad(loss, (0, 1, 2), has_aux=True)(
            rest, differentiated, scanned_sums
        )
        return merge(_add(unscanned, gradients), scanned_sums), differentiated, report

    def _split(self, activations: Activations) -> tuple[Activations, Activations]:
        """Split activations into those whose gradient is needed and the others."""
        trained = self.trained | {LOSS}
        differentiated = {name: x for name, x in activations.items() if name in trained}
        return differentiated, {name: x for name, x in activations.items() if name not in trained}


def zeros_like(structs: Params) -> Params:
    """Make zeros of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)


def _add(sums: Params, gradients: Params) -> Params:
    return jax.tree.map(lambda total, gradient: total + gradient.astype(total.dtype), sums, gradients)
