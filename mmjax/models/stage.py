"""Stages of a multimodal model for pipelines, as pure functions of their own parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import UnetConfig, VisionConfig
from mmjax.config.model import layers_of
from mmjax.models.decoder import logits_of
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
from mmjax.models.layers import Noise
from mmjax.models.model import Model, accumulate_in_scans
from mmjax.models.multimodal import MultimodalModel
from mmjax.parallel.sharding import encoding

# Of a stage, by name, as it takes and makes them.
Activations = dict[str, Float[Array, "_ _ _"]]


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers `start` to `stop` of one tower as a pure function: `stage(stage.select(params), inputs, batch)`.

    Takes and returns dicts of arrays by name, each made by one stage and taken by one: "vision.2" and "llm.2" are the
    activations `[R, L, D]` that enter layer 2, "vision" is an encoder's tokens, which its last stage makes and the
    LLM's first takes. Of a deepstack, "vision.deeper.1" goes from the stage with the layer that is taken out to the
    LLM's stage with layer 1, to whose output it is added. The LLM's last stage returns float32 "logits", or makes the
    hidden states that generators take, by the generator's name. What all layers of a generator take of the images
    beside their activations, "picture.2.images" and "picture.2.condition", goes from stage to stage with these; its
    last stage returns the "picture.error" `[R, L, 1]` of every patch. `batch` is the tower's: a TextBatch or an
    ItemBatch.
    """

    model: Model
    tower: str
    start: int
    stop: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == layers_of(self.model.config, self.tower)

    @property
    def generates(self) -> bool:
        """Return whether the stage is a generator's."""
        return self.tower in self.model.config.generators

    @property
    def makes_loss(self) -> bool:
        """Return whether a loss is made of the stage's output: the LLM's, or a generator's."""
        return self.last and (self.tower == "llm" or self.generates)

    @property
    def layers_output(self) -> str:
        """Name what the stage's last layer makes, where another stage goes on from it."""
        return f"{self.tower}.{self.stop}"

    def passed(self, layer: int) -> tuple[str, ...]:
        """Name what a generator's layer takes of the stage before it."""
        return tuple(f"{self.tower}.{layer}{part}" for part in ("", ".images", ".condition"))

    @property
    def inputs(self) -> tuple[str, ...]:
        if self.generates:
            return (self.tower,) if self.first else self.passed(self.start)
        incoming = () if self.first else (f"{self.tower}.{self.start}",)
        return (*incoming, *(name for encoder in self.encoders for name in self._tokens(encoder)))

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.tower == "llm":
            return self.sends_states or (("logits",) if self.last else (self.layers_output,))
        if self.generates:
            return (f"{self.tower}.error",) if self.last else self.passed(self.stop)
        outgoing = () if self.last else (self.layers_output,)
        return (*outgoing, *self._tokens(self.tower))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Name the encoders whose tokens the stage takes."""
        return tuple(name for name in self.model.config.encoders if self.tower == "llm" and self._tokens(name))

    @property
    def embeds_queries(self) -> tuple[str, ...]:
        """Name the generators whose learned queries the stage embeds."""
        return tuple(self.model.config.generators) if self.tower == "llm" and self.first else ()

    @property
    def sends_states(self) -> tuple[str, ...]:
        """Name the generators that take the stage's hidden states."""
        return tuple(self.model.config.generators) if self.tower == "llm" and self.last else ()

    def _tokens(self, encoder: str) -> list[str]:
        """Name the tokens of an encoder that the stage makes or, in the LLM, takes."""
        embedding = self.first if self.tower == "llm" else self.last
        return [encoder] * embedding + [f"{encoder}.deeper.{n}" for n in self._deeper(encoder)]

    def _deeper(self, encoder: str) -> list[int]:
        """Number an encoder's `deepstack` layers whose outputs the stage takes out or, in the LLM, adds."""
        config = self.model.config.encoders[encoder]
        layers = config.deepstack if isinstance(config, VisionConfig) else ()
        if self.tower != "llm":
            return [n for n, layer in enumerate(layers) if self.start <= layer < self.stop]
        # Those for which there is no layer end in the last stage, which adds them to nothing.
        return [n for n in range(len(layers)) if self.start <= n and (n < self.stop or self.last)]

    def select(self, params: Params) -> Params:
        """Select the stage's parameters. Tied embeddings are in the LLM's first and last stage: add their gradients."""
        if self.generates:
            return self._select_generator(params)
        tower = params["llm"] if self.tower == "llm" else params["encoders"][self.tower]
        tied = self.tower == "llm" and self.model.config.llm.tied
        stacks = [run for run in self.model.runs[self.tower] if self.start <= run.start < self.stop]
        runs = {name for run in stacks for name in run.parts}
        # The same nesting as the full parameters, so that `Model.module` can merge it.
        part = {"layers": {"runs": {name: tower["layers"]["runs"][name] for name in sorted(runs)}}}
        if self.first or (self.last and tied):
            part["embed"] = tower["embed"]
        if self.first and "positions" in tower:
            part["positions"] = tower["positions"]
        if self.last and "head" in tower:
            part["head"] = tower["head"]
        if self.tower == "llm":
            queries = {name: {"queries": params["connectors"][name]["queries"]} for name in self.embeds_queries}
            return {"llm": part} | ({"connectors": queries} if queries else {})
        connector = params["connectors"][self.tower]
        selected = {name: value for name, value in connector.items() if self.last and name != "deeper"}
        if deeper := {str(n): connector["deeper"][str(n)] for n in self._deeper(self.tower)}:
            selected["deeper"] = deeper
        return {"encoders": {self.tower: part}} | ({"connectors": {self.tower: selected}} if selected else {})

    def _select_generator(self, params: Params) -> Params:
        """Select a generator's layers; what stands before them and behind them; in the first stage its connector."""
        tower = params["generators"][self.tower]
        part = dict(tower)
        if "layers" in tower:
            stacks = [run for run in self.model.runs[self.tower] if self.start <= run.start < self.stop]
            runs = {name: tower["layers"]["runs"][name] for run in stacks for name in run.parts}
            ends = {name for name in tower if name != "layers" and (self.last if name == "head" else self.first)}
            part = {"layers": {"runs": runs}} | {name: tower[name] for name in sorted(ends)}
        selected = {"generators": {self.tower: part}}
        if self.first:
            connector = params["connectors"][self.tower]
            selected["connectors"] = {self.tower: {k: v for k, v in connector.items() if k != "queries"}}
        return selected

    def __call__(
        self,
        params: Params,
        inputs: Activations,
        batch: TextBatch | ItemBatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
    ) -> Activations:
        """Compute the stage's outputs. `noise` as in `Model.logits`, `accumulators` as in `Model.outputs`."""
        module = self.model.module(params)
        seed = accumulate_in_scans(module, accumulators)
        if self.generates:
            with encoding():
                return dict(zip(self.outputs, self._generate(module, seed, inputs, batch, noise), strict=True))
        if self.tower == "llm":
            x = seed(self._llm_layers(module, inputs, batch, noise))
            if not self.last:
                return {self.layers_output: x}
            hidden, table = module.llm.hidden_and_table(x)
            if self.sends_states:
                return self.query_states(hidden, batch)
            return {"logits": logits_of(hidden, table, self.model.config.llm.logit_cap)}
        tower = module.encoders[self.tower]
        numbers = self._deeper(self.tower)
        with encoding():
            x = tower.embedded(batch) if self.first else inputs[self.inputs[0]]
            context = module.context(self.tower, batch, noise)
            layers = [module.connectors[self.tower].deepstack[n] for n in numbers]
            *deeper, x = tower.layers.outputs(x, context, layers, self.start, self.stop)
            x = seed(x)
            arrays = [] if self.last else [x]
            if names := self._tokens(self.tower):
                deeper = dict(zip(numbers, deeper, strict=True))
                tokens = module.connected(self.tower, x if self.last else None, deeper, batch)
                arrays += jnp.split(tokens, len(names), axis=-1) if names[1:] else [tokens]
        return dict(zip(self.outputs, arrays, strict=True))

    def hidden_and_table(
        self,
        params: Params,
        inputs: Activations,
        text: TextBatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "*p v d"]]:
        """Return what the LLM's last stage makes the logits of, as `Model.outputs`."""
        module = self.model.module(params)
        seed = accumulate_in_scans(module, accumulators)
        return module.llm.hidden_and_table(seed(self._llm_layers(module, inputs, text, noise)))

    def query_states(self, hidden: Float[Array, "b t d"], text: TextBatch) -> Activations:
        """Bring the hidden states of generators' queries to the rows of these, by name."""
        return {name: query_states(hidden, text, name) for name in self.sends_states}

    def _generate(
        self,
        module: MultimodalModel,
        seed: Callable[[Array], Array],
        inputs: Activations,
        items: ItemBatch,
        noise: Noise | None,
    ) -> tuple[Array, ...]:
        """Run a generator's stage; return its `outputs`."""
        generator = module.generators[self.tower]
        config = generator.config
        draws = draw(np.zeros(2, np.uint32) if noise is None else noise, self.tower, config, items)
        clean = latents_of(config, items)
        if self.first:
            condition = condition_of(module.connectors[self.tower], inputs[self.tower], items, draws.dropped)
        if isinstance(config, UnetConfig):
            return (velocity_errors(generator, items, clean, condition, draws)[..., None],)
        if self.first:
            x = generator.embedded(noised_latents(clean, items, draws), items)
            context = generator.context(items, draws.time, condition)
        else:
            x, *images = (inputs[name] for name in self.inputs)
            context = generator.resumed_context(items, *images)
        x = seed(generator.layers(x, context, self.start, self.stop))
        if not self.last:
            return (x, *generator.passed_on(context))
        return (flow_errors(clean, items, draws, generator.finished(x, items, context))[..., None],)

    def _llm_layers(self, module: MultimodalModel, inputs: Activations, text: TextBatch, noise: Noise | None) -> Array:
        features = {}
        for encoder in self.encoders:
            tokens = [inputs[name] for name in self._tokens(encoder)]
            # One exchange for all of an encoder's tokens.
            features[encoder] = jnp.concatenate(tokens, axis=-1) if tokens[1:] else tokens[0]
        if self.first:
            x, add = module.embedded(text, features)
        else:
            x = inputs[self.inputs[0]]
            add = module.additions(text, features)
        return module.llm.layers(x, module.context("llm", text, noise), self.start, self.stop, add)


def cut_in_stages(model: Model, tower: str, cuts: tuple[int, ...]) -> list[Stage]:
    """Cut a tower before the layers in `cuts`, which must be borders of its stacks."""
    borders = {run.start for run in model.runs[tower]}
    # Layer 0 is a border, but a cut before it would leave an empty stage.
    if wrong := set(cuts) - borders | {cut for cut in cuts if cut == 0}:
        raise ValueError(f"{tower} cannot be cut before layer {min(wrong)}: its runs begin at {sorted(borders)}")
    ends = [0, *sorted(cuts), layers_of(model.config, tower)]
    return [Stage(model, tower, start, stop) for start, stop in pairwise(ends)]
