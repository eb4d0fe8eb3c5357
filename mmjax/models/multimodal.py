"""An LLM and the encoders that feed it: encoder tokens stand in the text where the batch's slots say."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import ModelConfig, VisionConfig
from mmjax.models.audio import AudioEncoder
from mmjax.models.connector import Connector
from mmjax.models.decoder import Decoder
from mmjax.models.layer_runs import Run
from mmjax.models.vision import VisionEncoder
from mmjax.parallel.sharding import constrain


class MultimodalModel(nnx.Module):
    """`llm`, and by name `encoders` and their `connectors`."""

    def __init__(self, config: ModelConfig, plans: dict[str, tuple[Run, ...]], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.llm = Decoder(config.llm, plans["llm"], dtype, rngs)
        encoders, connectors = {}, {}
        for name, c in config.encoders.items():
            tower, axes = (VisionEncoder, (1, 2)) if isinstance(c, VisionConfig) else (AudioEncoder, (0,))
            encoders[name] = tower(c, plans[name], dtype, rngs)
            connectors[name] = Connector(c.connector, c.width, config.llm.width, axes, c.norm_eps, rngs)
        self.encoders = nnx.Dict(encoders)
        self.connectors = nnx.Dict(connectors)

    def encode(self, items: dict[str, ItemBatch]) -> dict[str, Float[Array, "r m d"]]:
        """Every encoder's items as tokens of the LLM's width; encoders without items are left out."""
        features = {}
        for name, batch in items.items():
            encoder = self.encoders[name]
            x = encoder.layers(encoder.embedded(batch), encoder.context(batch))
            features[name] = self.connected(name, x, batch)
        return features

    def connected(self, name: str, x: Float[Array, "r l w"], batch: ItemBatch) -> Float[Array, "r m d"]:
        """The head of an encoder and its connector, on the output of the encoder's last layer."""
        encoder = self.encoders[name]
        return self.connectors[name](encoder.head(x), *encoder.places(batch))

    def decode(self, text: TextBatch, features: dict[str, Float[Array, "r m d"]]) -> Float[Array, "b t v"]:
        """Float32 logits of the next token at every position."""
        x = self.llm.layers(self.embedded(text, features), self.llm.context(text))
        return self.llm.logits(x)

    def embedded(self, text: TextBatch, features: dict[str, Float[Array, "r m d"]]) -> Float[Array, "b t d"]:
        """Token embeddings, with encoder tokens in their places."""
        x = self.llm.embedded(text.token)
        for name, feature in features.items():
            if feature.size and name in text.slots:
                slots = text.slots[name]
                # Any row's tokens may be wanted by any other's, so each device holds all of them while it picks.
                flat = constrain(feature.reshape(-1, feature.shape[-1]), None, None)
                x = jnp.where((slots >= 0)[..., None], flat[jnp.maximum(slots, 0)].astype(x.dtype), x)
        return constrain(x, "rows", "length", "width")
