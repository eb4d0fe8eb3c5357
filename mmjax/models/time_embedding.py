"""The embedding of the time of flow matching, on which every block of a generator depends."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.models.layers import MLP

STEPS = 1000.0  # of the diffusion that checkpoints were trained with: time 1 is their step 1000
MAX_PERIOD = 10_000.0


def time_features(time: Float[Array, "*b"], width: int) -> Float[Array, "*b d"]:
    """Compute cosines, then sines, of times 0 to 1 at `width / 2` frequencies; float32."""
    return cosines_and_sines(STEPS * time.astype(jnp.float32), width)


def cosines_and_sines(x: Float[Array, "*b"], width: int) -> Float[Array, "*b d"]:
    """Compute cosines, then sines, of float32 numbers at `width / 2` frequencies."""
    # Rounded as diffusers does: the last bit turns an angle of 1000 by 1e-4.
    exponent = (
        np.float32(-np.log(MAX_PERIOD))
        * np.arange(width // 2, dtype=np.float32)
        / np.float32(width // 2)
    )
    angles = x[..., None] * np.exp(exponent)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class TimeEmbedding(nnx.Module):
    """`down(silu(up(features)))` of times 0 to 1."""

    def __init__(self, features: int, width: int, rngs: nnx.Rngs):
        self.mlp = MLP(features, width, width, "silu", rngs, biases=("up", "down"))
        self.features = features

    def __call__(self, time: Float[Array, "*b"], dtype: jnp.dtype) -> Float[Array, "*b d"]:
        return self.mlp(time_features(time, self.features).astype(dtype))
