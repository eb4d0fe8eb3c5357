"""An LLM and the encoders that feed it: the batch's slots place encoder tokens in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.batch import ItemBatch, TextBatch, WeightedSlots
from mmjax.config import ModelConfig, VisionConfig
from mmjax.models.audio import AudioEncoder
from mmjax.models.connector import Connector
from mmjax.models.decoder import Decoder, logits_of
from mmjax.models.dropout import Noise, tower_dropout
from mmjax.models.layer_stacks import LayerStack
from mmjax.models.layers import Context
from mmjax.models.vision import VisionEncoder
from mmjax.parallel.encoder_exchange import dispatch
from mmjax.parallel.sharding import active, constrain, encoding

Functions = Mapping[str, Callable[..., Any]]  # callbacks by the names that configs give them


class MultimodalModel(nnx.Module):
    """`llm`, and by name `encoders` and their `connectors`."""

    def __init__(
        self,
        config: ModelConfig,
        plans: dict[str, tuple[LayerStack, ...]],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        functions: Functions,
    ):
        self.llm = Decoder(config.llm, plans["llm"], dtype, rngs)
        encoders = {}
        connectors = {}
        for name, c in config.encoders.items():
            vision = isinstance(c, VisionConfig)
            encoders[name] = (VisionEncoder if vision else AudioEncoder)(c, plans[name], dtype, rngs)
            connectors[name] = Connector(
                config=c.connector,
                inputs=c.width,
                outputs=config.llm.width,
                axes=(1, 2) if vision else (0,),
                eps=c.norm_eps,
                rngs=rngs,
                deepstack=c.deepstack if vision else (),
            )
        self.encoders = nnx.Dict(encoders)
        self.connectors = nnx.Dict(connectors)
        callbacks = {name: c.callbacks for name, c in config.encoders.items()}
        self.after_encoder = {name: _callback(functions, c.after_encoder) for name, c in callbacks.items()}
        self.after_connector = {name: _callback(functions, c.after_connector) for name, c in callbacks.items()}

    def context(self, name: str, batch: TextBatch | ItemBatch, noise: Noise | None) -> Context:
        """Build the layer inputs of a tower ("llm", or an encoder), with dropout if it has a rate and noise is given.

        A frozen tower drops too: freezing stops its updates, not its training mode, as in PyTorch.
        """
        tower = self.llm if name == "llm" else self.encoders[name]
        context = tower.context(batch)
        if noise is None or not tower.dropout:
            return context
        return context._replace(dropout=tower_dropout(noise, name, tower.dropout, *tower.origin(batch)))

    def encode(self, items: dict[str, ItemBatch], noise: Noise | None = None) -> dict[str, Float[Array, "r m e"]]:
        """Encode every encoder's items as tokens of the LLM's width.

        With `deepstack`, the tokens that are added after the LLM's first layers are concatenated along the width.
        """
        features = {}
        for name, batch in items.items():
            encoder = self.encoders[name]
            # Encoders may be sharded over other axes than the LLM (`mesh.encoders`).
            with encoding():
                x = encoder.embedded(batch)
                context = self.context(name, batch, noise)
                outputs = encoder.layers.outputs(x, context, self.connectors[name].deepstack)
                x = self.connected(name, outputs, batch)
            features[name] = constrain(x, "rows", "length", "width")
        return features

    def connected(self, name: str, outputs: Sequence[Float[Array, "r l w"]], batch: ItemBatch) -> Float[Array, "r m e"]:
        """Apply an encoder's head and connector to the outputs of its `deepstack` layers and of its last."""
        *deeper, x = outputs
        encoder = self.encoders[name]
        connector = self.connectors[name]
        x = self.after_encoder[name](encoder.finished(x), batch)
        x = connector(x, *encoder.places(batch), deeper)
        return connector.with_newline(self.after_connector[name](x, batch))

    def decode(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]], noise: Noise | None = None
    ) -> Float[Array, "b t v"]:
        """Compute float32 logits of the next token at every position."""
        return logits_of(*self.hidden_and_table(text, features, noise), self.llm.config.logit_cap)

    def hidden_and_table(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]], noise: Noise | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "v d"]]:
        """Return final activations and output table, for losses computed in chunks."""
        x, add = self.embedded(text, features)
        return self.llm.hidden_and_table(self.llm.layers(x, self.context("llm", text, noise), add=add))

    def embedded(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]]
    ) -> tuple[Float[Array, "b t d"], list[Float[Array, "b t d"]]]:
        """Embed tokens and place encoder tokens; also return what is added to the outputs of the LLM's first layers."""
        x = self.llm.embedded(text.token)
        add = []
        for name, feature in features.items():
            # A batch without rows of this encoder has features of size 0.
            if feature.size and name in text.slots:
                tokens = _place_tokens(feature, text, name).astype(x.dtype)
                # [B, T, D * (1 + deepstack)]: the embedding, then one addition per deepstack layer.
                embedding, *deeper = jnp.split(tokens, tokens.shape[-1] // x.shape[-1], axis=-1)
                slots = text.slots[name]
                is_item = jnp.any(slots.slot >= 0, axis=-1) if isinstance(slots, WeightedSlots) else slots >= 0
                x = jnp.where(is_item[..., None], embedding, x)
                add = [a + b for a, b in zip_longest(add, deeper, fillvalue=0)]
        return constrain(x, "rows", "length", "width"), add


def _callback(functions: Functions, name: str) -> Callable[[Array, ItemBatch], Array]:
    """Wrap the callback of this name, which must keep the shape of its input; without a name, the identity."""

    def call(x: Array, batch: ItemBatch) -> Array:
        if not name:
            return x
        # Checked on call, not when built: planning builds models without their callbacks.
        if name not in functions:
            raise ValueError(f"the config names {name}, but Model.build was not given it")
        y = functions[name](x, batch)
        if y.shape != x.shape:
            raise ValueError(f"{name} made {y.shape} of {x.shape}; it must keep the shape")
        return y.astype(x.dtype)

    return call


def _place_tokens(feature: Float[Array, "r m e"], text: TextBatch, encoder: str) -> Float[Array, "b t e"]:
    """Exchange an encoder's tokens and place them at the text's positions, zeros elsewhere; sum `WeightedSlots`."""
    send = text.send[encoder]
    slots = text.slots[encoder]
    indices = slots.slot if isinstance(slots, WeightedSlots) else slots
    rules = active()
    mesh, exchange = (None, "padded") if rules is None else (rules.mesh, rules.exchange)
    # One leading entry per rank, as `dispatch` wants: a rank's rows of tokens and of text are joined.
    tokens = feature.reshape(len(send), -1, feature.shape[-1])
    placed = dispatch(tokens, send, indices.reshape(len(send), -1), mesh, exchange).reshape(*indices.shape, -1)
    return jnp.sum(placed * slots.share[..., None], axis=2) if isinstance(slots, WeightedSlots) else placed
