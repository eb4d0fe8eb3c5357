"""Stages of a multimodal model: consecutive layers of one tower or several, as pure functions of their own parameters.

A model on one mesh is the stage of all layers. In a pipeline a stage takes activations of the
stages before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from jaxtyping import Array

from mmjax.batch import Microbatch
from mmjax.config.unit_stages import LayerRange
from mmjax.models.dropout import Noise
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, Outputs, accumulate_in_scans, merge
from mmjax.models.piece import HIDDEN, ROUTING, TABLE, Piece, Values, error_name, states_of

REFERENCE = ":reference"  # behind the name of what a frozen reference's pass makes


@dataclass(frozen=True, eq=False)
class Stage:
    """Pieces that run one after the other on one mesh.

    Of a microbatch it reads what its pieces take: the text, and the items of its encoders and
    generators. What towers in `repeated` send and take goes from stage to stage twice, the second
    time of a frozen reference's pass.
    """

    model: Model
    pieces: tuple[Piece, ...]  # each behind those whose arrays it takes
    repeated: frozenset[str] = frozenset()

    @classmethod
    def whole(cls, model: Model) -> Stage:
        """Return the stage of all layers of a model."""
        config = model.config
        towers = (*sorted(config.encoders), "llm", *config.towers_behind("llm"))
        return cls(
            model, tuple(Piece(config, tower, 0, config.towers[tower].layers) for tower in towers)
        )

    @classmethod
    def of_layers(cls, model: Model, layers: Iterable[LayerRange]) -> Stage:
        """Return the stage of these layers. Raises ValueError for a first layer within a stack of the model."""
        pieces = tuple(Piece(model.config, tower, start, stop) for tower, start, stop in layers)
        for piece in pieces:
            # of a UNet there are no stacks
            starts = sorted({0, *(stack.start for stack in model.runs[piece.tower])})
            if piece.start not in starts:
                raise ValueError(
                    f"{piece.tower} cannot be cut before layer {piece.start}: its runs begin at {starts}"
                )
        return cls(model, pieces)

    def of(self, model: Model) -> Stage:
        """Return the stage of another model of the same layers."""
        return Stage(model, tuple(replace(piece, config=model.config) for piece in self.pieces))

    def split(self, towers: Set[str]) -> tuple[Stage, Stage]:
        """Return the stage of the pieces of these towers, and that of the others."""
        parts = (
            [p for p in self.pieces if (p.tower in towers) == selected]
            for selected in (True, False)
        )
        first, second = (Stage(self.model, tuple(pieces)) for pieces in parts)
        return first, second

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Name what other stages make for this one."""
        produced = {name for piece in self.pieces for name in piece.outputs}
        return self._with_twins(
            [name for piece in self.pieces for name in piece.inputs if name not in produced]
        )

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Name what the stage makes for others."""
        taken = {name for piece in self.pieces for name in piece.inputs}
        return self._with_twins(
            [name for piece in self.pieces for name in piece.outputs if name not in taken]
        )

    def _with_twins(self, names: Sequence[str]) -> tuple[str, ...]:
        """Add the names of what the reference's pass sends beside these."""
        twins = (name + REFERENCE for name in names if name.partition(".")[0] in self.repeated)
        return (*names, *twins)

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """Name the towers whose loss is made here."""
        return tuple(piece.tower for piece in self.pieces if piece.makes_loss)

    @property
    def description(self) -> str:
        """Name the layers of every piece: "vision[2:4] + llm[0:1]"."""
        return " + ".join(f"{piece.tower}[{piece.start}:{piece.stop}]" for piece in self.pieces)

    @property
    def towers(self) -> tuple[str, ...]:
        """Name the towers of the pieces."""
        return tuple(piece.tower for piece in self.pieces)

    @cached_property
    def text(self) -> tuple[Piece, ...]:
        """Return the pieces of the LLM."""
        return tuple(piece for piece in self.pieces if piece.tower == "llm")

    @property
    def encoders(self) -> tuple[str, ...]:
        """Name the encoders whose tokens are exchanged here."""
        return tuple(sorted({encoder for piece in self.text for encoder in piece.encoders}))

    @property
    def embeds_queries(self) -> tuple[str, ...]:
        """Name the generators whose learned queries are embedded here."""
        return tuple(dict.fromkeys(name for piece in self.text for name in piece.embeds_queries))

    @property
    def exchanges_states(self) -> tuple[str, ...]:
        """Name the generators, here and in other stages, whose hidden states are exchanged here."""
        return tuple(name for piece in self.text for name in piece.sends_states)

    @property
    def sends_states(self) -> tuple[str, ...]:
        """Name the generators of other stages that take hidden states of this one."""
        return tuple(name for name in self.exchanges_states if name in self.outputs)

    def select(self, params: Params) -> Params:
        """Select the stage's parameters. Where tied embeddings are in two stages, add their gradients."""
        return reduce(
            merge, (piece.select(params, self.model.runs[piece.tower]) for piece in self.pieces)
        )

    def run(
        self,
        params: Params,
        inputs: Mapping[str, Array],
        batch: Microbatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
    ) -> tuple[Values, Callable[[Array], Array]]:
        """Compute what all pieces make, by name, and `outputs` among it.

        noise: as in `Model.logits`. accumulators: float32 sums of gradients of scanned stacks'
        parameters. The gradient with respect to them is the new sums, and these parameters get
        none, if the loss depends on what the function makes, which is also returned, of one of the
        values: the same value. Towers without items do not run.
        """
        module = self.model.module(params)
        seed = accumulate_in_scans(module, accumulators)
        values = dict(inputs)
        for piece in self.pieces:
            if piece.tower == "llm" or piece.tower in batch.items:
                values |= piece.run(module, values, batch, noise)
        if "llm" in self.losses:
            values |= {name: states_of(values, batch, name) for name in self.sends_states}
        return values, seed

    def operands(self, values: Values, seed: Callable[[Array], Array]) -> Outputs:
        """Return what the losses of the LLM and of generators here are made of."""
        errors = {
            name: values[error_name(name)] for name in self.losses if error_name(name) in values
        }
        if "llm" not in self.losses:
            # Once: with each error the sums would be added again.
            first = next(iter(errors), None)
            return Outputs(
                None, None, None, {n: seed(x) if n == first else x for n, x in errors.items()}
            )
        return Outputs(seed(values[HIDDEN]), values[TABLE], values[ROUTING], errors)
