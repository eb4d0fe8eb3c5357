"""A decoder that takes encoders' outputs among its tokens, and generators behind it: whole rows, or token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import (
    PADDING,
    TEXT_KIND,
    EncodedItems,
    ItemBatch,
    MaskSpec,
    TextBatch,
    WeightedSlots,
)
from mmjax.config import ModelConfig
from mmjax.config.model import dropping_towers, step_vaes
from mmjax.models.audio_encoder import AudioEncoder
from mmjax.models.connector import Connector
from mmjax.models.decoder import Decoder, logits_of
from mmjax.models.diffusion_transformer import DiffusionTransformer
from mmjax.models.dropout import Noise, disturb, tower_dropout
from mmjax.models.generation import (
    Conditioner,
    LatentEncoder,
    condition_of,
    draw,
    euler,
    latents_of,
    query_states,
    velocity_errors,
)
from mmjax.models.kv_cache import KVCacheView
from mmjax.models.layers import Context
from mmjax.models.stack_scan import KVCache, LayerStack
from mmjax.models.unet import Unet
from mmjax.models.vision_encoder import VisionEncoder
from mmjax.parallel.encoder_exchange import dispatch
from mmjax.parallel.sharding import active, constrain, encoding

Functions = Mapping[str, Callable[..., Any]]  # callbacks by the names that configs give them


# Of each kind of encoder and generator, by its config, plan of layers, dtype and random keys.
MODULES: Mapping[str, Callable[..., nnx.Module]] = {
    "vision": VisionEncoder,
    "audio": AudioEncoder,
    "diffusion_transformer": DiffusionTransformer,
    "unet": lambda config, _, dtype, rngs: Unet(config, dtype, rngs),
}


class MultimodalModel(nnx.Module):
    """`llm`, and by name `encoders`, `generators`, the `connectors` of both, and `vaes` of images to be made."""

    def __init__(
        self,
        config: ModelConfig,
        plans: dict[str, tuple[LayerStack, ...]],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        functions: Functions,
    ):
        self.dropping = dropping_towers(config)
        self.llm = Decoder(config.llm, plans["llm"], dtype, rngs)
        encoders = {}
        connectors = {}
        for name, c in config.encoders.items():
            encoders[name] = MODULES[c.kind](c, plans[name], dtype, rngs)
            connectors[name] = Connector(
                config=c.connector,
                inputs=c.feature_width,
                outputs=config.llm.width,
                axes=(1, 2) if c.modality == "image" else (0,),
                eps=c.norm_eps,
                rngs=rngs,
                deepstack=c.deepstack,
            )
        generators = {}
        for name, c in config.generators.items():
            generators[name] = MODULES[c.kind](c, plans[name], dtype, rngs)
            connectors[name] = Conditioner(c, config.llm.width, rngs)
        vaes = {
            name: LatentEncoder(config.generators[name], dtype, rngs) for name in step_vaes(config)
        }
        self.encoders = nnx.Dict(encoders)
        self.generators = nnx.Dict(generators)
        self.connectors = nnx.Dict(connectors)
        self.vaes = nnx.Dict(vaes)
        callbacks = {name: c.callbacks for name, c in config.encoders.items()}
        self.after_encoder = {
            name: _callback(functions, c.after_encoder) for name, c in callbacks.items()
        }
        self.after_connector = {
            name: _callback(functions, c.after_connector) for name, c in callbacks.items()
        }

    def tower(self, name: str) -> nnx.Module:
        """Return the LLM, an encoder or a generator by its name."""
        return self.llm if name == "llm" else {**self.encoders, **self.generators}[name]

    def context(self, name: str, batch: TextBatch | ItemBatch, noise: Noise | None) -> Context:
        """Build the layer inputs of a tower ("llm", or an encoder), with dropout if it drops and noise is given.

        A frozen tower drops too: freezing stops its updates, not its training mode, as in PyTorch.
        """
        tower = self.tower(name)
        context = tower.context(batch)
        if noise is None or name not in self.dropping:
            return context
        return context._replace(
            dropout=tower_dropout(noise, name, tower.dropout, *tower.origin(batch))
        )

    def encode(
        self, items: dict[str, ItemBatch], noise: Noise | None = None
    ) -> dict[str, Float[Array, "r m e"]]:
        """Encode every encoder's items as tokens of the LLM's width.

        With `deepstack`, the tokens that are added after the LLM's first layers are concatenated
        along the width.
        """
        features = {}
        for name, batch in items.items():
            if name in self.generators:
                continue
            # Encoders may be sharded over other axes than the LLM (`mesh.encoders`).
            with encoding(), jax.named_scope(name):
                outputs = self.tower_outputs(name, batch, noise)
                x = self.connected(name, outputs[0], dict(enumerate(outputs[1:])), batch)
            features[name] = constrain(x, "token_rows", None, "width")
        return features

    def tower_outputs(
        self, name: str, batch: ItemBatch, noise: Noise | None = None
    ) -> list[Float[Array, "r m f"]]:
        """Compute what an encoder's connector reads: of the last layers, then of each layer of its deepstack."""
        encoder = self.encoders[name]
        if isinstance(batch, EncodedItems):
            deepstack = len(self.connectors[name].deepstack)
            width = encoder.config.feature_width
            borders = [width + n * encoder.config.width for n in range(deepstack)]
            return jnp.split(batch.values.astype(encoder.dtype), borders, axis=-1)
        context = self.context(name, batch, noise)
        outputs = self.layer_outputs(
            name, encoder.embedded(batch), context, range(encoder.config.layers)
        )
        deeper = [
            encoder.restored(outputs[layer], batch) for layer in self.connectors[name].deepstack
        ]
        return [self.finished(name, outputs, batch), *deeper]

    def layer_outputs(
        self, name: str, x: Float[Array, "r l w"], context: Context, layers: range
    ) -> dict[int, Float[Array, "r m _"]]:
        """Apply layers of an encoder; return, by number, the outputs that connectors read, and that of the last one."""
        tower = self.encoders[name]
        read = {*self.connectors[name].deepstack, *tower.config.feature_layers} & {*layers}
        numbers = sorted(read)
        *outputs, x = tower.layers.outputs(x, context, numbers, layers.start, layers.stop)
        return {**dict(zip(numbers, outputs, strict=True)), layers.stop - 1: x}

    def finished(
        self, name: str, outputs: Mapping[int, Float[Array, "r l w"]], batch: ItemBatch
    ) -> Float[Array, "r m f"]:
        """Join what an encoder's connector reads of the outputs of its layers, by number, and apply its head."""
        encoder = self.encoders[name]
        config = encoder.config
        if not config.feature_layers:
            x = outputs[config.layers - 1]
        else:
            joined = jnp.concatenate([outputs[layer] for layer in config.feature_layers], axis=-1)
            x = constrain(joined, "rows", "sequence", "width")
        return encoder.finished(encoder.restored(x, batch))

    def connected(
        self,
        name: str,
        x: Float[Array, "r l w"] | None,
        deeper: Mapping[int, Float[Array, "r l w"]],
        batch: ItemBatch,
    ) -> Float[Array, "r m e"]:
        """Apply an encoder's connector to its output, and `deeper` connectors to outputs of other layers.

        x: None in a pipeline stage before the last. deeper: outputs of `deepstack` layers by
        number, in the order of the row.
        """
        connector = self.connectors[name]
        places = self.encoders[name].places(batch)
        tokens = [connector.deeper[str(n)](y, *places) for n, y in deeper.items()]
        if x is not None:
            tokens.insert(0, connector(self.after_encoder[name](x, batch), *places))
        joined = (
            constrain(jnp.concatenate(tokens, axis=-1), "rows", "length", "width")
            if tokens[1:]
            else tokens[0]
        )
        return connector.with_newline(
            self.after_connector[name](joined, batch), deeper_only=x is None
        )

    def decode(
        self,
        text: TextBatch,
        features: dict[str, Float[Array, "r m e"]],
        noise: Noise | None = None,
    ) -> Float[Array, "b t v"]:
        """Compute float32 logits of the next token at every position."""
        return logits_of(*self.hidden_and_table(text, features, noise), self.llm.config.logit_cap)

    def hidden_and_table(
        self,
        text: TextBatch,
        features: dict[str, Float[Array, "r m e"]],
        noise: Noise | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "*p v d"]]:
        """Return final activations and output table, for losses computed in chunks."""
        with jax.named_scope("llm"):
            x, add = self.embedded(text, features, noise)
            context = self.text_context(x, text, noise)
            return self.llm.hidden_and_table(self.llm.layers(x, context, add=add))

    def text_context(
        self, x: Float[Array, "b t d"], text: TextBatch, noise: Noise | None = None
    ) -> Context:
        """Build the layer inputs of the LLM. x: its embedded text, with the tokens of images and clips in place."""
        return self.llm.with_token_inputs(self.context("llm", text, noise), x, text.token)

    def embedded(
        self,
        text: TextBatch,
        features: dict[str, Float[Array, "r m e"]],
        noise: Noise | None = None,
    ) -> tuple[Float[Array, "b t d"], list[Float[Array, "b t d"]]]:
        """Embed tokens and place encoder tokens; also return the additions to the outputs of the LLM's first layers."""
        x = self.llm.embedded(text.token)
        if noise is not None and (alpha := self.llm.config.neftune_alpha):
            x = disturb(x, noise, alpha, text)
        for name in self.generators:
            query = text.slots[name]
            x = jnp.where(
                (query >= 0)[..., None],
                self.connectors[name].queries(jnp.maximum(query, 0), x.dtype),
                x,
            )
        # [B, T, D * (1 + deepstack)]: the embedding, then one addition per deepstack layer.
        placed = self._placed(text, features)
        for name, (embedding, *_) in placed.items():
            # With weights a position counts as an item's where any of its corners is one.
            slots = text.slots[name]
            is_item = (
                jnp.any(slots.slot >= 0, axis=-1)
                if isinstance(slots, WeightedSlots)
                else slots >= 0
            )
            x = jnp.where(is_item[..., None], embedding, x)
        x = self.llm.positioned(x, text.position)
        return constrain(x, "rows", "sequence", "width"), _add_up(
            [deeper for _, *deeper in placed.values()]
        )

    def additions(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]]
    ) -> list[Float[Array, "b t d"]]:
        """Place encoder tokens that are added to the outputs of layers of the LLM, from one on; no embeddings."""
        return _add_up(list(self._placed(text, features).values()))

    def generator_errors(
        self,
        hidden: Float[Array, "b t d"],
        text: TextBatch,
        items: dict[str, ItemBatch],
        noise: Noise | None,
    ) -> dict[str, Float[Array, "r l"]]:
        """Compute the error of every generator's patches from the LLM's final hidden states; noise None: of step 0."""
        errors = {}
        for name, generator in self.generators.items():
            if name not in items:  # prompts without images to make
                continue
            config = generator.config
            batch = items[name]
            with encoding():
                draws = draw(
                    np.zeros(2, np.uint32) if noise is None else noise, name, config, batch
                )
            states = query_states(hidden, text, name)
            with encoding(), jax.named_scope(name):
                vae = self.vaes.get(name)
                clean = latents_of(config, batch) if vae is None else vae(batch, draws.posterior)
                condition = condition_of(self.connectors[name], states, batch, draws.dropped)
                errors[name] = velocity_errors(generator, batch, clean, condition, draws)
        return errors

    def sample_images(
        self,
        text: TextBatch,
        items: dict[str, ItemBatch],
        noise: Noise,
        steps: int,
        guidance: float | Array,
    ) -> dict[str, Float[Array, "r l f"]]:
        """Sample latents of every generator's images, whose values in `items` are not read; 0 at padding."""
        hidden, _ = self.hidden_and_table(text, self.encode(items))
        latents = {}
        for name, generator in self.generators.items():
            if name not in items:
                continue
            batch = items[name]
            with encoding():
                start = draw(noise, name, generator.config, batch)
            states = query_states(hidden, text, name)
            with encoding():
                conditions = tuple(
                    condition_of(
                        self.connectors[name], states, batch, jnp.full_like(start.dropped, dropped)
                    )
                    for dropped in (False, True)
                )
                x = euler(generator, batch, start.noise, conditions, steps, guidance)
                latents[name] = jnp.where((batch.item >= 0)[..., None], x, 0)
        return latents

    def _placed(
        self, text: TextBatch, features: dict[str, Float[Array, "r m e"]]
    ) -> dict[str, list[Float[Array, "b t d"]]]:
        """Place every encoder's tokens, which lie side by side in the width, and split them to the LLM's width."""
        placed = {}
        for name, feature in features.items():
            # A batch without rows of this encoder has features of size 0.
            if feature.size and name in text.slots:
                tokens = _place_tokens(feature, text, name).astype(self.llm.dtype)
                placed[name] = jnp.split(tokens, tokens.shape[-1] // self.llm.config.width, axis=-1)
        return placed


def _add_up(additions: Sequence[Sequence[Float[Array, "b t d"]]]) -> list[Float[Array, "b t d"]]:
    """Add up the encoders' additions to each layer; their deepstacks may have different depths."""
    return [sum(arrays) for arrays in zip_longest(*additions, fillvalue=0)]


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


def _place_tokens(
    feature: Float[Array, "r m e"], text: TextBatch, encoder: str
) -> Float[Array, "b t e"]:
    """Exchange an encoder's tokens and place them at the text's positions, zeros elsewhere; sum `WeightedSlots`."""
    slots = text.slots[encoder]
    indices = slots.slot if isinstance(slots, WeightedSlots) else slots
    on = active()
    mesh, exchange = (None, "padded") if on is None else (on.mesh, on.rules.exchange)
    placed = dispatch(
        feature, text.send[encoder], indices, mesh, exchange, text.spread.get(encoder)
    )
    return (
        jnp.sum(placed * slots.share[..., None], axis=2)
        if isinstance(slots, WeightedSlots)
        else placed
    )


class Cache(NamedTuple):
    """Decoding state of `B` rows in `C` columns: the prompts', then one for each token to be generated."""

    layers: KVCache  # of the LLM, in the activations' dtype; states of delta nets in float32
    mask: MaskSpec  # [B, C], of the columns still to be written as well
    position: Array  # int32 [B]: RoPE position of the next token
    column: Array  # int32 []: of the next token


def prefill(
    model: MultimodalModel, text: TextBatch, features: dict[str, Float[Array, "r m e"]], room: int
) -> tuple[Float[Array, "b v"], Cache]:
    """Run the prompts; return float32 logits of each row's next token, and a cache with `room` more columns.

    text: one prompt per row, from its first column on; a row without one is padding. features: as
    `encode` gives them.
    """
    prompt = text.sample >= 0
    length = prompt.sum(1, dtype=jnp.int32)
    x, add = model.embedded(text, features)
    x, layers = model.llm.layers.forward_with_kv(x, model.text_context(x, text), add)
    # Each row's last token; a row without a prompt takes its first column, and nobody reads the
    # result.
    last_column = jnp.maximum(length - 1, 0)
    last = jnp.take_along_axis(x, last_column[:, None, None], axis=1)
    grown = {name: layer.grown(room) for name, layer in layers.items()}
    # The next token follows the last one, as in training: the times of a video before it may be
    # larger. With (t, y, x) positions it follows the largest of the three.
    rope_position = text.position if text.position.ndim == 2 else text.position.max(-1)
    next_position = 1 + jnp.take_along_axis(rope_position, last_column[:, None], axis=1)[:, 0]
    cache = Cache(
        grown,
        _cache_mask(text, prompt, length, room),
        next_position,
        jnp.int32(text.token.shape[1]),
    )
    return _logits(model, last), cache


def step(
    model: MultimodalModel, token: Int[Array, " b"], cache: Cache
) -> tuple[Float[Array, "b v"], Cache]:
    """Write one token per row into the cache and return float32 logits of the next."""
    # The cache's mask describes columns that are still to be written, so the new token's is a slice
    # of it.
    query_mask = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, cache.column, 1, axis=1), cache.mask
    )
    position = cache.position[:, None]
    if sections := model.llm.config.rope_sections:
        position = jnp.broadcast_to(position[..., None], (*position.shape, len(sections)))
    x = model.llm.positioned(model.llm.embedded(token[:, None]), position)
    context = model.llm.context_of(query_mask, position)
    context = model.llm.with_token_inputs(context, x, token[:, None])
    past = KVCacheView(cache.layers, cache.mask, cache.column)
    x, layers = model.llm.layers.forward_with_kv(x, context, past=past)
    return _logits(model, x), Cache(layers, cache.mask, cache.position + 1, cache.column + 1)


def _cache_mask(
    text: TextBatch, prompt: Bool[Array, "b s"], length: Int[Array, " b"], room: int
) -> MaskSpec:
    """Build the mask of all columns: generated tokens are text, and see the kinds that the prompt's text sees."""

    def filled(value: Array | int) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (len(length), room))

    # A few integers of a token, on every device that shares its row: later columns are no one's
    # part of it.
    prompt, pos, span, kind, sees = (
        constrain(x, "rows", None) for x in (prompt, text.pos, text.span, text.kind, text.sees)
    )
    # All kinds that any of the prompt's tokens may see; tokens of items may see none, hence not the
    # last one's.
    visible = jnp.bitwise_or.reduce(jnp.where(prompt, sees, 0), axis=1)
    new = MaskSpec(
        sample=filled(0),
        pos=length[:, None] + jnp.arange(room, dtype=jnp.int32),
        span=filled(0),
        kind=filled(TEXT_KIND),
        sees=filled(visible[:, None]),
    )
    # A row holds one prompt, so it is sample 0 whatever its number was; what follows the prompt in
    # its columns is padding.
    old = MaskSpec(jnp.where(prompt, 0, PADDING), pos, span, kind, sees)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)


def _logits(model: MultimodalModel, x: Float[Array, "b 1 d"]) -> Float[Array, "b v"]:
    return logits_of(*model.llm.hidden_and_table(x), model.llm.config.logit_cap)[:, 0]
