"""An LLM and the encoders that feed it: encoder tokens stand in the text where the batch's slots say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.batch import ItemBatch, Mixed, TextBatch
from mmjax.config import ModelConfig, VisionConfig
from mmjax.models.audio import AudioEncoder
from mmjax.models.connector import Connector
from mmjax.models.decoder import Decoder, scores
from mmjax.models.dropout import Noise, tower_dropout
from mmjax.models.layer_runs import Run
from mmjax.models.layers import Context
from mmjax.models.vision import VisionEncoder
from mmjax.parallel.dispatch import dispatch
from mmjax.parallel.sharding import active, constrain, encoding

Functions = Mapping[str, Callable[..., Any]]  # by the names that configs have for them


class MultimodalModel(nnx.Module):
    """`llm`, and by name `encoders` and their `connectors`."""

    def __init__(
        self,
        config: ModelConfig,
        plans: dict[str, tuple[Run, ...]],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        functions: Functions,
    ):
        self.llm = Decoder(config.llm, plans["llm"], dtype, rngs)
        encoders, connectors = {}, {}
        for name, c in config.encoders.items():
            tower, axes = (VisionEncoder, (1, 2)) if isinstance(c, VisionConfig) else (AudioEncoder, (0,))
            deep = c.deepstack if isinstance(c, VisionConfig) else ()
            encoders[name] = tower(c, plans[name], dtype, rngs)
            connectors[name] = Connector(c.connector, c.width, config.llm.width, axes, c.norm_eps, rngs, deep)
        self.encoders = nnx.Dict(encoders)
        self.connectors = nnx.Dict(connectors)
        self.after_encoder = {name: _named(functions, c.callbacks.after_encoder) for name, c in config.encoders.items()}
        self.after_connector = {
            name: _named(functions, c.callbacks.after_connector) for name, c in config.encoders.items()
        }

    def context(self, name: str, batch: TextBatch | ItemBatch, noise: Noise | None) -> Context:
        """What the layers of a tower ("llm", or an encoder) read; with dropout where it has a rate and there is noise.

        A frozen tower drops too: freezing stops its updates, not its training mode, as in PyTorch.
        """
        tower = self.llm if name == "llm" else self.encoders[name]
        context = tower.context(batch)
        if noise is None or not tower.dropout:
            return context
        return context._replace(dropout=tower_dropout(noise, name, tower.dropout, *tower.origin(batch)))

    def encode(self, items: dict[str, ItemBatch], noise: Noise | None = None) -> dict[str, Float[Array, "r m e"]]:
        """Every encoder's items as tokens of the LLM's width; encoders without items are left out.

        Of an encoder with `deepstack`, what is added behind the LLM's first layers follows along the width.
        """
        features = {}
        for name, batch in items.items():
            encoder = self.encoders[name]
            with encoding():
                deep, context = self.connectors[name].deepstack, self.context(name, batch, noise)
                x = self.connected(name, encoder.layers.outputs(encoder.embedded(batch), context, deep), batch)
            features[name] = constrain(x, "rows", "length", "width")
        return features

    def connected(self, name: str, outputs: Sequence[Float[Array, "r l w"]], batch: ItemBatch) -> Float[Array, "r m e"]:
        """The head of an encoder and its connector, on what the connector's `deepstack` and the last layer give."""
        *deeper, x = outputs
        encoder, connector = self.encoders[name], self.connectors[name]
        x = self.after_encoder[name](encoder.finished(x), batch)
        x = connector(x, *encoder.places(batch), deeper)
        return connector.with_newline(self.after_connector[name](x, batch))

    def decode(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]], noise: Noise | None = None
    ) -> Float[Array, "b t v"]:
        """Float32 logits of the next token at every position."""
        return scores(*self.hidden_and_table(text, features, noise), self.llm.config.logit_cap)

    def hidden_and_table(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]], noise: Noise | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "v d"]]:
        """The activations and the output table whose `scores` are the logits, for who does not want all at once."""
        x, add = self.embedded(text, features)
        return self.llm.hidden_and_table(self.llm.layers(x, self.context("llm", text, noise), add=add))

    def embedded(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]]
    ) -> tuple[Float[Array, "b t d"], list[Float[Array, "b t d"]]]:
        """Token embeddings with encoder tokens in their places, and what is added behind each of the first layers."""
        x, add = self.llm.embedded(text.token), []
        for name, feature in features.items():
            if feature.size and name in text.slots:
                sent = _sent(feature, text, name).astype(x.dtype)
                first, *deeper = jnp.split(sent, sent.shape[-1] // x.shape[-1], axis=-1)
                slots = text.slots[name]
                here = jnp.any(slots.slot >= 0, axis=-1) if isinstance(slots, Mixed) else slots >= 0
                x = jnp.where(here[..., None], first, x)
                add = [a + b for a, b in zip_longest(add, deeper, fillvalue=0)]
        return constrain(x, "rows", "length", "width"), add


def _named(functions: Functions, name: str) -> Callable[[Array, ItemBatch], Array]:
    """The callback of this name, which must keep the shape of what it gets."""

    def call(x: Array, batch: ItemBatch) -> Array:
        if not name:
            return x
        if name not in functions:
            raise ValueError(f"the config names {name}, but Model.build was not given it")
        y = functions[name](x, batch)
        if y.shape != x.shape:
            raise ValueError(f"{name} made {y.shape} of {x.shape}; it must keep the shape")
        return y.astype(x.dtype)

    return call


def _sent(feature: Float[Array, "r m e"], text: TextBatch, encoder: str) -> Float[Array, "b t e"]:
    """An encoder's tokens where the text wants them, mixed by their shares where it wants several; else zeros."""
    send, on = text.send[encoder], active()
    slots, share = found if isinstance(found := text.slots[encoder], Mixed) else (found, None)
    mesh, exchange = (None, "padded") if on is None else (on.mesh, on.exchange)
    tokens, gather = feature.reshape(len(send), -1, feature.shape[-1]), slots.reshape(len(send), -1)
    sent = dispatch(tokens, send, gather, mesh, exchange).reshape(*slots.shape, -1)
    return sent if share is None else jnp.sum(sent * share[..., None], axis=2)
