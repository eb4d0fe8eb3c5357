"""Pictures of a generator with a VAE are decoded, and no image to be made is read to ask for it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vae_folder import drawing_words

from mmjax.config import MeshConfig
from mmjax.config.loading import find_config, load
from mmjax.data.plan.placement import Topology
from mmjax.data.sources.opening import open_sources
from mmjax.inference import image_sampler
from mmjax.inference.image_sampler import ImageSampler, ImageSampling
from mmjax.inference.prompt_rows import PromptRows
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh


@pytest.fixture
def drawing(tmp_path):
    """The config, and a source of two images of different sizes, whose files are gone."""
    config = load(find_config("tiny_text"), drawing_words(tmp_path)[1:])
    source = open_sources(config, "test", Path())["drawings"]
    source.read_headers()
    for path in tmp_path.glob("*.png"):
        path.unlink()
    return config, source


def test_images_to_be_made_are_not_read(drawing):
    config, source = drawing
    unreadable: dict[int, str] = {}
    batches = [
        batch
        for _, batch in PromptRows(source, config.model, Topology(), 0).batches(
            unreadable=unreadable
        )
    ]
    assert not unreadable
    values = [batch.items["picture"].values for batch in batches]
    assert all(value.dtype == np.float32 and not value.any() for value in values)
    assert (
        sum(int((batch.items["picture"].item >= 0).sum()) for batch in batches)
        == 8 * 12 // 16 + 16 * 8 // 16
    )


def test_sampled_latents_are_decoded_by_the_vae(drawing, monkeypatch):
    config, source = drawing
    model = Model.build(config.model, jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0))
    decoded = []
    decode = image_sampler.decode_pictures

    def watched(latents, vae):
        pictures = decode(latents, vae)
        decoded.extend(zip(latents, pictures, strict=True))
        return pictures

    monkeypatch.setattr(image_sampler, "decode_pictures", watched)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    sampler = ImageSampler(model, mesh, ShardingRules.of(MeshConfig()), ImageSampling(steps=2))
    images = sorted(sampler.images(params, source), key=lambda image: image.prompt)
    assert [image.pixels.shape for image in images] == [(8, 12, 3), (16, 8, 3)]
    for image in images:
        (latents,) = [
            latents for latents, picture in decoded if np.array_equal(picture, image.pixels)
        ]
        height, width, _ = image.pixels.shape
        assert latents.shape == (height // 2, width // 2, 4)
        assert latents.std() > 0.1
