"""Train and sample generators: the conditions of their images, noised latents, and the error of predicted velocities.

An image's time, noise and dropped condition depend on the step, its sample and its place in it
alone, so they are the same wherever the image is packed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import PADDING, ItemBatch, TextBatch
from mmjax.config import Generator, PixelLatents
from mmjax.models.connector import Connector
from mmjax.models.dropout import Noise, named_key, position_keys
from mmjax.models.layers import PositionTable
from mmjax.models.vae import Encoder as VaeEncoder
from mmjax.models.vae import moments_of
from mmjax.parallel.encoder_exchange import dispatch
from mmjax.parallel.sharding import CONTEXT, active, constrain, encoding


class Conditioner(nnx.Module):
    """The learned queries of a generator's images in the LLM, and the connector of their hidden states.

    `unconditional` are the tokens of an image whose condition is dropped.
    """

    def __init__(self, config: Generator, llm_width: int, rngs: nnx.Rngs):
        width = config.condition_width
        self.text_tokens = config.text_tokens
        self.queries = PositionTable(config.queries, llm_width, rngs)
        self.projector = Connector(
            config=config.connector, inputs=llm_width, outputs=width, axes=(0,), eps=1e-6, rngs=rngs
        )
        self.unconditional = PositionTable(config.queries, width, rngs)

    @jax.named_scope("connector")
    def tokens(
        self,
        states: Float[Array, "r c d"],
        present: Bool[Array, "r i"],
        dropped: Bool[Array, "r i"],
    ) -> Float[Array, "r c e"]:
        """Project the hidden states of an image's text and queries; `unconditional` where its condition is dropped.

        0 where no image is, or no text: there the states are 0, which those of a token, behind a
        norm, never are.
        """
        rows, columns, _ = states.shape
        # An image has `text_tokens` columns of text, then its queries, whose numbers are 0, 1, ...:
        # with 2 and 3 of them -2 -1 0 1 2.
        count = columns // max(dropped.shape[1], 1)
        number = jnp.arange(columns, dtype=jnp.int32) % max(count, 1) - self.text_tokens
        number = jnp.broadcast_to(number, (rows, columns))
        of_image = jnp.repeat(dropped, count, axis=1)
        valid = jnp.repeat(present, count, axis=1)
        if self.text_tokens:
            valid &= (number >= 0) | (~of_image & (states != 0).any(-1))
        item = jnp.where(valid, 0, PADDING)
        projected = self.projector(states, item, jnp.zeros((rows, columns, 3), jnp.int32))
        without = self.unconditional(jnp.maximum(number, 0), projected.dtype)
        tokens = jnp.where(of_image[..., None], without, projected)
        return jnp.where(valid[..., None], tokens, 0)


class Draws(NamedTuple):
    """The random numbers of a generator's rows in one step."""

    time: Float[Array, "r i"]  # of each image, 0 to 1
    dropped: Bool[Array, "r i"]  # whether it is trained without its condition
    noise: Float[Array, "r l f"]
    # noise of the latents that a VAE makes of images in the step
    posterior: Float[Array, "r l f"] | None = None


def draw(noise: Noise, name: str, config: Generator, items: ItemBatch) -> Draws:
    """Draw times, dropped conditions and noise of a generator's rows."""
    key = named_key(noise, f"{name}.flow")
    length = items.item.shape[1]
    features = config.patch_values
    # Of each image of a row, its first patch: (sample, index among the sample's patches) is its
    # alone.
    images = jnp.arange(config.max_images(length))
    first = jnp.argmax(items.item[:, None] == images[:, None], axis=-1)
    keys = position_keys(
        key, *(jnp.take_along_axis(x, first, 1) for x in (items.owner, items.offset))
    )
    flow = config.flow

    def image(key: Array) -> tuple[Array, Array]:
        of_time, of_drop = jax.random.split(jax.random.fold_in(key, 0))
        logit = flow.time_mean + flow.time_std * jax.random.normal(of_time)
        return jax.nn.sigmoid(logit), jax.random.uniform(of_drop) < flow.condition_dropout

    time, dropped = jax.vmap(jax.vmap(image))(keys)
    patch_keys = position_keys(key, items.owner, items.offset)

    def of_patches(purpose: int) -> Array:
        def patch(key: Array) -> Array:
            return jax.random.normal(jax.random.fold_in(key, purpose), (features,))

        return constrain(jax.vmap(jax.vmap(patch))(patch_keys), "rows", "length", None)

    return Draws(time, dropped, of_patches(1), of_patches(2) if config.step_vae else None)


def latents_of(config: Generator, items: ItemBatch) -> Float[Array, "r l f"]:
    """Return the float32 latents of a generator's rows: pixels normalised, or as they are stored; 0 at padding."""
    latents = config.latents
    values = items.values.astype(jnp.float32)
    if latents.kind == "pixels":
        pixels = values.reshape(*values.shape[:2], -1, latents.channels)
        scale = (1 / (255 * np.array(latents.std))).astype(np.float32)
        shift = (np.array(latents.mean) / np.array(latents.std)).astype(np.float32)
        values = (pixels * scale - shift).reshape(values.shape)
    return jnp.where((items.item >= 0)[..., None], values, 0)


class LatentEncoder(nnx.Module):
    """A frozen VAE that makes latents of a generator's images, all of one size, from their pixels in every step."""

    def __init__(self, config: Generator, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.encoder = VaeEncoder(config.latents.vae, rngs)
        self.config = config
        self.dtype = dtype

    def __call__(self, items: ItemBatch, noise: Float[Array, "r l f"]) -> Float[Array, "r l f"]:
        """Draw scaled float32 latents of the images' distributions; 0 at padding.

        items: patches of uint8 pixels. A row's images lie one behind the other from its start. They
        are encoded one of each row at a time, so that memory is bounded.
        """
        c = self.config
        height, width = (side // c.patch for side in c.image_size)  # in patches
        rows, length = items.item.shape
        count = length // (height * width)
        used = count * height * width
        side = c.patch * c.latents.factor
        # [R, L, F] -> [R, I, rows, columns, side, side, 3] -> [I, R, rows, side, columns, side, 3],
        # the order of axes in which those of a picture's height, and of its width, can be joined.
        patches = items.values[:, :used].reshape(rows, count, height, width, side, side, -1)
        images = jnp.moveaxis(patches, (1, 4), (0, 3)).reshape(
            count, rows, height * side, width * side, -1
        )
        # One mapped axis is of a row's images; the other, of rows, lies on the devices.
        mean, log_variance = jax.lax.map(
            self._moments, constrain(images, None, "rows", None, None, None)
        )
        mean, deviation = (self._patches(x, length) for x in (mean, jnp.exp(0.5 * log_variance)))
        latents = (mean + deviation * noise - c.latents.shift) * c.latents.scale
        return jax.lax.stop_gradient(jnp.where((items.item >= 0)[..., None], latents, 0))

    def _moments(self, images: Array) -> tuple[Array, Array]:
        images = constrain(images, "rows", None, None, None)
        return moments_of(self.encoder, (images.astype(jnp.float32) / 127.5 - 1).astype(self.dtype))

    def _patches(self, x: Float[Array, "i r y x m"], length: int) -> Float[Array, "r l f"]:
        """Cut latents into the patches of rows of this length."""
        count, rows, height, width, channels = x.shape
        p = self.config.patch
        x = x.reshape(count, rows, height // p, p, width // p, p, channels)
        x = jnp.moveaxis(x, (0, 3), (1, 4)).reshape(rows, -1, p * p * channels)
        return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0)))


def pixels_of(latents: PixelLatents, values: np.ndarray) -> np.ndarray:
    """Return the uint8 pixels of latents `[..., C]`: the inverse of what `latents_of` makes of them."""
    pixels = (values * np.array(latents.std) + np.array(latents.mean)) * 255
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def per_patch(values: Float[Array, "r i *n"], item: Int[Array, "r l"]) -> Float[Array, "r l *n"]:
    """Give every patch the value of its image."""
    index = jnp.maximum(item, 0).reshape(*item.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1)


def query_states(
    hidden: Float[Array, "b t d"], text: TextBatch, name: str
) -> Float[Array, "r c d"]:
    """Bring the hidden states of a generator's queries to its rows."""
    on = active()
    mesh, exchange = (None, "padded") if on is None else (on.mesh, on.rules.exchange)
    if mesh is not None and mesh.shape[CONTEXT] > 1:
        # Every device of a rank gets whole rows, in their own order.
        order = jnp.argsort(constrain(text.pos, "rows", None), axis=1)
        hidden = jnp.take_along_axis(
            constrain(hidden, "rows", None, "width"), order[..., None], axis=1
        )
    states = dispatch(hidden, text.send[name], text.condition[name], mesh, exchange, by_rank=True)
    with encoding():
        return constrain(states, "rows", "length", "width")


def condition_of(
    conditioner: Conditioner,
    states: Float[Array, "r c d"],
    items: ItemBatch,
    dropped: Bool[Array, "r i"],
) -> Float[Array, "r c e"]:
    """Make condition tokens of the hidden states of queries."""
    present = (items.item[:, None] == jnp.arange(dropped.shape[1])[:, None]).any(-1)
    return conditioner.tokens(states, present, dropped)


def euler(
    generator: nnx.Module,
    items: ItemBatch,
    noise: Float[Array, "r l f"],
    conditions: tuple[Float[Array, "r c e"], Float[Array, "r c e"]],
    steps: int,
    guidance: float | Array,
) -> Float[Array, "r l f"]:
    """Make latents of noise by Euler's method from time 1 to 0, guided away from the second condition (Ho 2022)."""
    images = conditions[0].shape[1] // generator.config.condition_tokens

    def step(number: Array, x: Array) -> Array:
        time = jnp.full((len(x), images), 1 - number / steps)
        with_condition, without = (
            generator(x, items, time, c).astype(jnp.float32) for c in conditions
        )
        return x - (without + guidance * (with_condition - without)) / steps

    return jax.lax.fori_loop(0, steps, step, noise)


def velocity_errors(
    generator: nnx.Module,
    items: ItemBatch,
    clean: Float[Array, "r l f"],
    condition: Float[Array, "r c e"],
    draws: Draws,
) -> Float[Array, "r l"]:
    """Compute the mean squared error of every patch's predicted velocity, float32; 0 at padding (Esser et al. 2024).

    clean: latents, float32, 0 at padding.
    """
    predicted = generator(noised_latents(clean, items, draws), items, draws.time, condition)
    return flow_errors(clean, items, draws, predicted)


def noised_latents(
    clean: Float[Array, "r l f"], items: ItemBatch, draws: Draws
) -> Float[Array, "r l f"]:
    """Mix the latents of a generator's rows with noise, as the time of each image says."""
    time = (
        per_patch(draws.time, items.item)[..., None]
        if draws.time.size
        else jnp.zeros((*items.item.shape, 1))
    )
    return (1 - time) * clean + time * draws.noise


def flow_errors(
    clean: Float[Array, "r l f"], items: ItemBatch, draws: Draws, predicted: Float[Array, "r l f"]
) -> Float[Array, "r l"]:
    """Compute the mean squared error of every patch's velocity, float32; 0 at padding."""
    velocity = draws.noise - clean
    error = jnp.square(predicted.astype(jnp.float32) - velocity).mean(-1)
    return jnp.where(items.item >= 0, error, 0)
