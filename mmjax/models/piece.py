"""Pieces of a multimodal model: consecutive layers of one tower, with what stands before and behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.batch import Microbatch, TextBatch
from mmjax.config import ModelConfig
from mmjax.models.dropout import Noise
from mmjax.models.expert_routing import pack, unpack
from mmjax.models.generation import (
    condition_of,
    draw,
    flow_errors,
    latents_of,
    noised_latents,
    query_states,
    velocity_errors,
)
from mmjax.models.layer_stacks import Params
from mmjax.models.multimodal import MultimodalModel
from mmjax.models.stack_scan import LayerStack
from mmjax.parallel.sharding import constrain, encoding

# Of a stage, by name, as it takes and makes them.
Activations = dict[str, Float[Array, "_ _ _"]]

Values = dict[str, Any]  # activations, and what losses are made of

HIDDEN, TABLE, ROUTING = "llm.hidden", "llm.table", "llm.routing"  # values, as in `Outputs`


@dataclass(frozen=True)
class Piece:
    """Layers `start` to `stop` of one tower, with what stands before its first and behind its last layer.

    Takes and makes arrays by name, each made by one piece and taken by one: "vision.2" and "llm.2"
    are the activations `[R, L, D]` that enter layer 2, "vision" is an encoder's tokens, which its
    last piece makes and the LLM's first takes. Of a deepstack, "vision.deeper.1" goes from the
    piece with the layer that is taken out to the LLM's with layer 1, to whose output it is added.
    "llm.routing.2" are the sums of how experts were chosen in the layers before layer 2. The LLM's
    last piece makes the hidden states that generators take, by the generator's name. What all
    layers of a generator take of the images beside their activations, "picture.2.images" and
    "picture.2.condition", goes from piece to piece with these; "picture.clean", latents that a VAE
    makes in the step, from its first piece to its last.
    """

    # Of an encoder with a deepstack of its layer 1, and an LLM, both cut before layer 2:
    #
    #   vision[0:2] --vision.2--> vision[2:4] --vision--> llm[0:2] --llm.2--> llm[2:4]
    #        `----------------vision.deeper.0---------------^
    config: ModelConfig
    tower: str
    start: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.config.towers[self.tower].layers

    @property
    def generates(self) -> bool:
        """Return whether the tower is a generator."""
        return self.config.towers[self.tower].is_generator

    @property
    def makes_loss(self) -> bool:
        """Return whether a loss is made of the output: the LLM's, or a generator's."""
        return self.last and (self.tower == "llm" or self.generates)

    @property
    def layers_output(self) -> str:
        """Name what the last layer makes, where another piece goes on from it."""
        return f"{self.tower}.{self.stop}"

    def passed(self, layer: int) -> tuple[str, ...]:
        """Name what a generator's layer takes of the piece before it."""
        return tuple(f"{self.tower}.{layer}{part}" for part in ("", ".images", ".condition"))

    @property
    def _clean(self) -> tuple[str, ...]:
        """Name the latents of a generator whose images are encoded in the step: the loss is made of them too."""
        return (f"{self.tower}.clean",) if self.config.towers[self.tower].step_vae else ()

    @property
    def inputs(self) -> tuple[str, ...]:
        if self.generates:
            return (
                (self.tower,)
                if self.first
                else (*self.passed(self.start), *(self._clean if self.last else ()))
            )
        incoming = () if self.first else (f"{self.tower}.{self.start}", *self._routing(self.start))
        return (*incoming, *(name for encoder in self.encoders for name in self._tokens(encoder)))

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.tower == "llm":
            return (
                self.sends_states if self.last else (self.layers_output, *self._routing(self.stop))
            )
        if self.generates:
            return (
                () if self.last else (*self.passed(self.stop), *(self._clean if self.first else ()))
            )
        outgoing = () if self.last else (self.layers_output,)
        return (*outgoing, *self._tokens(self.tower))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Name the encoders whose tokens the piece takes."""
        return tuple(
            name
            for name in sorted(self.config.encoders)
            if self.tower == "llm" and self._tokens(name)
        )

    @property
    def embeds_queries(self) -> tuple[str, ...]:
        """Name the generators whose learned queries the piece embeds."""
        return self.config.towers_behind("llm") if self.tower == "llm" and self.first else ()

    @property
    def sends_states(self) -> tuple[str, ...]:
        """Name the generators that take hidden states of the piece."""
        return self.config.towers_behind("llm") if self.tower == "llm" and self.last else ()

    def _routing(self, layer: int) -> list[str]:
        """Name the sums of the experts' layers before a layer, where there are such layers."""
        return [f"{ROUTING}.{layer}"] if any(self.config.llm.expert_layers[:layer]) else []

    def _tokens(self, encoder: str) -> list[str]:
        """Name the tokens of an encoder that the piece makes or, in the LLM, takes."""
        embedding = self.first if self.tower == "llm" else self.last
        return [encoder] * embedding + [f"{encoder}.deeper.{n}" for n in self._deeper(encoder)]

    def _deeper(self, encoder: str) -> list[int]:
        """Number an encoder's `deepstack` layers whose outputs the piece takes out or, in the LLM, adds."""
        layers = self.config.encoders[encoder].deepstack
        if self.tower != "llm":
            return [n for n, layer in enumerate(layers) if self.start <= layer < self.stop]
        # Those for which there is no layer end in the last piece, which adds them to nothing.
        return [n for n in range(len(layers)) if self.start <= n and (n < self.stop or self.last)]

    def select(self, params: Params, stacks: tuple[LayerStack, ...]) -> Params:
        """Select the parameters; tied embeddings are in the LLM's first and last piece. stacks: of the tower."""
        runs = {name for run in stacks if self.start <= run.start < self.stop for name in run.parts}
        if self.generates:
            return self._select_generator(params, runs)
        # An encoder may have no parameters of its own, and is not among them then.
        tower = params["llm"] if self.tower == "llm" else params["encoders"].get(self.tower, {})
        tied = self.tower == "llm" and self.config.llm.tied
        # The same nesting as the full parameters, so that `Model.module` can merge it.
        part = {}
        if "layers" in tower:
            part["layers"] = {
                "runs": {name: tower["layers"]["runs"][name] for name in sorted(runs)}
            }
        if "embed" in tower and (self.first or (self.last and tied)):
            part["embed"] = tower["embed"]
        if self.first:
            part |= {name: tower[name] for name in ("positions", "token_inputs") if name in tower}
        if self.last and "head" in tower:
            part["head"] = tower["head"]
        if self.tower == "llm":
            queries = {
                name: {"queries": params["connectors"][name]["queries"]}
                for name in self.embeds_queries
            }
            return {"llm": part} | ({"connectors": queries} if queries else {})
        connector = params["connectors"][self.tower]
        selected = {
            name: value for name, value in connector.items() if self.last and name != "deeper"
        }
        if deeper := {str(n): connector["deeper"][str(n)] for n in self._deeper(self.tower)}:
            selected["deeper"] = deeper
        return {"encoders": {self.tower: part}} | (
            {"connectors": {self.tower: selected}} if selected else {}
        )

    def _select_generator(self, params: Params, runs: set[str]) -> Params:
        """Select a generator's layers and what stands before and behind them; its connector and VAE with the first."""
        tower = params["generators"][self.tower]
        part = dict(tower)
        if "layers" in tower:
            ends = {
                name
                for name in tower
                if name != "layers" and (self.last if name == "head" else self.first)
            }
            part = {
                "layers": {"runs": {name: tower["layers"]["runs"][name] for name in sorted(runs)}}
            }
            part |= {name: tower[name] for name in sorted(ends)}
        selected = {"generators": {self.tower: part}}
        if self.first:
            connector = params["connectors"][self.tower]
            selected["connectors"] = {
                self.tower: {k: v for k, v in connector.items() if k != "queries"}
            }
            if self.tower in params.get("vaes", {}):
                selected["vaes"] = {self.tower: params["vaes"][self.tower]}
        return selected

    def run(
        self, module: MultimodalModel, values: Values, batch: Microbatch, noise: Noise | None
    ) -> Values:
        """Compute what the piece makes of the values so far. `noise` as in `Model.logits`."""
        with jax.named_scope(self.tower):
            if self.tower == "llm":
                return self._decode(module, values, batch.text, noise)
            run = self._generate if self.generates else self._encode
            return run(module, values, batch, noise)

    def _decode(
        self, module: MultimodalModel, values: Values, text: TextBatch, noise: Noise | None
    ) -> Values:
        encoded = [encoder for encoder in self.encoders if self._tokens(encoder)[0] in values]
        features = {encoder: self._features(values, encoder) for encoder in encoded}
        if self.first:
            x, add = module.embedded(text, features, noise)
        else:
            x = values[self.inputs[0]]
            add = module.additions(text, features)
        layers = module.llm.layers
        x = layers(x, module.text_context(x, text, noise), self.start, self.stop, add)
        for name in [] if self.first else self._routing(self.start):
            layers.routings.insert(0, unpack(values[name]))
        if not self.last:
            return {self.layers_output: x} | {
                name: pack(layers.routing) for name in self._routing(self.stop)
            }
        return dict(zip((HIDDEN, TABLE), module.llm.hidden_and_table(x), strict=True)) | {
            ROUTING: layers.routing
        }

    def _features(self, values: Values, encoder: str) -> Array:
        """Return all of an encoder's tokens that the piece takes as one array, for one exchange."""
        tokens = [values[name] for name in self._tokens(encoder)]
        joined = values.get(joined_name(encoder))
        if joined is not None and joined.shape[-1] == sum(x.shape[-1] for x in tokens):
            return joined
        return jnp.concatenate(tokens, axis=-1) if tokens[1:] else tokens[0]

    def _encode(
        self, module: MultimodalModel, values: Values, batch: Microbatch, noise: Noise | None
    ) -> Values:
        tower = module.encoders[self.tower]
        items = batch.items[self.tower]
        numbers = self._deeper(self.tower)
        names = self._tokens(self.tower)
        results: Values = {}
        # Encoders may be sharded over other axes than the LLM (`mesh.encoders`).
        with encoding():
            if self.first and self.last:
                finished, *of_layers = module.tower_outputs(self.tower, items, noise)
            else:
                x = tower.embedded(items) if self.first else values[self.inputs[0]]
                context = module.context(self.tower, items, noise)
                outputs = module.layer_outputs(self.tower, x, context, self.layers)
                if not self.last:
                    results[self.layers_output] = outputs[self.stop - 1]
                finished = module.finished(self.tower, outputs, items) if self.last else None
                deepstack = module.connectors[self.tower].deepstack
                of_layers = [tower.restored(outputs[deepstack[n]], items) for n in numbers]
            if names:
                deeper = dict(zip(numbers, of_layers, strict=True))
                tokens = module.connected(self.tower, finished, deeper, items)
        if names:
            tokens = constrain(tokens, "token_rows", None, "width")
            if self.first and self.last:
                results[joined_name(self.tower)] = tokens
            results |= zip(
                names,
                jnp.split(tokens, len(names), axis=-1) if names[1:] else [tokens],
                strict=True,
            )
        return results

    def _generate(
        self, module: MultimodalModel, values: Values, batch: Microbatch, noise: Noise | None
    ) -> Values:
        generator = module.generators[self.tower]
        items = batch.items[self.tower]
        config = generator.config
        with encoding():
            draws = draw(
                np.zeros(2, np.uint32) if noise is None else noise, self.tower, config, items
            )
        states = states_of(values, batch, self.tower) if self.first else None
        with encoding():
            if not self._clean:
                clean = latents_of(config, items)
            elif self.first:
                clean = module.vaes[self.tower](items, draws.posterior)
            elif self.last:
                clean = values[self._clean[0]]
            if self.first:
                condition = condition_of(
                    module.connectors[self.tower], states, items, draws.dropped
                )
            if self.first and self.last:
                return {
                    error_name(self.tower): velocity_errors(
                        generator, items, clean, condition, draws
                    )
                }
            if self.first:
                x = generator.embedded(noised_latents(clean, items, draws), items)
                context = generator.context(items, draws.time, condition)
            else:
                x, *images = (values[name] for name in self.passed(self.start))
                context = generator.resumed_context(items, *images)
            x = generator.layers(x, context, self.start, self.stop)
            if not self.last:
                outgoing = dict(
                    zip(self.passed(self.stop), (x, *generator.passed_on(context)), strict=True)
                )
                return outgoing | (dict.fromkeys(self._clean, clean) if self.first else {})
            return {
                error_name(self.tower): flow_errors(
                    clean, items, draws, generator.finished(x, items, context)
                )
            }


def joined_name(encoder: str) -> str:
    """Name all tokens of an encoder as one array, which its pieces do not cut."""
    return f"{encoder}.joined"


def error_name(generator: str) -> str:
    """Name the errors `[R, L]` of a generator's patches."""
    return f"{generator}.error"


def states_of(values: Values, batch: Microbatch, generator: str) -> Array:
    """Return the hidden states that a generator takes, of another stage or of this stage's LLM."""
    return (
        values[generator]
        if generator in values
        else query_states(values[HIDDEN], batch.text, generator)
    )
