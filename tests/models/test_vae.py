"""A VAE computes images of any size that its factor divides, one by one or together, and whole pictures in batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from vae_folder import random_parameters

from mmjax.config import VaeConfig
from mmjax.models import vae as module
from mmjax.models.vae import VaeModel
from mmjax.runtime.vae import Vae, decode_pictures

CONFIG = VaeConfig(widths=(4, 8, 8), blocks=1, groups=2, scale=0.5, shift=0.25)


@pytest.fixture(scope="module")
def model() -> VaeModel:
    return VaeModel.build(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return random_parameters(model)


def test_images_are_computed_alone_as_together(model, params):
    image = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (3, 8, 20, 3)), jnp.float32)
    together = jax.jit(model.encode)(params, image)
    assert together[0].shape == together[1].shape == (3, 2, 5, CONFIG.channels)
    alone = [jax.jit(model.encode)(params, image[k : k + 1]) for k in range(3)]
    for number, part in enumerate(together):
        np.testing.assert_allclose(part, np.concatenate([one[number] for one in alone]), atol=1e-5)
    assert jax.jit(model.decode)(params, together[0]).shape == image.shape


def test_sides_that_the_factor_does_not_divide_are_refused(model, params):
    with pytest.raises(ValueError, match="8 x 22 pixels are no multiples of 4"):
        model.encode(params, jnp.zeros((1, 8, 22, 3)))


def test_attention_of_large_images_by_blocks_is_that_with_all_scores_at_once(
    model, params, monkeypatch
):
    image = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (1, 72, 80, 3)), jnp.float32)
    once = jax.jit(model.encode)(params, image)
    monkeypatch.setattr(module, "DENSE", 100)
    blocks = jax.jit(VaeModel.build(CONFIG).encode)(params, image)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), once, blocks)


def test_activations_are_of_the_images_precision_and_latents_of_float32(model, params):
    image = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3)), jnp.bfloat16)
    mean, log_variance = jax.jit(model.encode)(params, image)
    assert mean.dtype == log_variance.dtype == jnp.float32
    exact, _ = jax.jit(model.encode)(params, image.astype(jnp.float32))
    assert 0 < np.abs(np.asarray(mean) - exact).max() < 0.1 * np.abs(exact).max()
    assert jax.jit(model.decode)(params, mean.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_pictures_are_decoded_in_batches_over_all_devices(model, params, monkeypatch):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("images",))
    vae = Vae(model, jax.device_put(params, NamedSharding(mesh, PartitionSpec())), mesh)
    monkeypatch.setattr("mmjax.runtime.vae.CPU_PIXELS", 2 * 8 * 12)
    assert vae.batch(8, 12) == 4
    latents = np.random.default_rng(0).normal(size=(7, 2, 3, CONFIG.channels)).astype(np.float32)
    pictures = decode_pictures(latents, vae)
    assert pictures.shape == (7, 8, 12, 3)
    assert pictures.dtype == np.uint8
    plain = latents / CONFIG.scale + CONFIG.shift
    exact = np.asarray(jax.jit(model.decode)(params, jnp.asarray(plain)))
    np.testing.assert_allclose(pictures, np.clip((exact + 1) * 127.5, 0, 255), atol=0.51)
    assert decode_pictures(latents[:0], vae).shape == (0, 8, 12, 3)
