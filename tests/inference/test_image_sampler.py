"""Images of prompts: many at once as each alone, guided or not, and laid out on one sheet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawing_config

from mmjax.config import MeshConfig
from mmjax.data.toy.drawing import drawings
from mmjax.errors import UserError
from mmjax.inference.image_sampler import ImageSampler, ImageSampling, contact_sheet
from mmjax.inference.prompt_rows import BatchLimits
from mmjax.inference.prompts import Selection
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh


@pytest.fixture(scope="module")
def model():
    return Model.build(drawing_config().model, jnp.float32)


@pytest.fixture(scope="module")
def params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), model.abstract)


def sampled(model, params, limits=None, mesh=None, **sampling):
    """The images of five prompts with one to three digits."""
    mesh = mesh or MeshConfig(data=1)
    devices = jax.devices()[: mesh.data * mesh.context * mesh.tensor]
    sampler = ImageSampler(
        model,
        make_mesh(mesh, devices),
        ShardingRules.of(mesh),
        ImageSampling(steps=3, **sampling),
        limits,
    )
    source = drawings("test")
    images = list(sampler.images(params, Selection([(source, n) for n in range(5)])))
    assert sorted(image.prompt for image in images) == list(range(5))
    for image in images:
        strip = source.strip(image.prompt)
        assert image.pixels.shape == (strip.height, strip.width, 1)
        assert (image.generator, image.number) == ("picture", 0)
    return {image.prompt: image.pixels.astype(int) for image in images}


@pytest.fixture(scope="module")
def together(model, params):
    return sampled(model, params)


def test_images_made_together_are_those_made_one_by_one(model, params, together):
    alone = sampled(model, params, BatchLimits(rows=1))
    assert all(np.abs(alone[n] - together[n]).max() <= 1 for n in together)


@pytest.mark.default_cases("tensor")
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=2, tensor=2, encoders="data"), MeshConfig(data=2, context=2, tensor=2)],
    ids=["tensor", "context"],
)
def test_images_made_on_several_devices_are_those_of_one(mesh, model, params, together):
    spread = sampled(model, params, mesh=mesh)
    assert all(np.abs(spread[n] - together[n]).max() <= 1 for n in together)


def test_another_seed_and_another_guidance_make_other_images(model, params, together):
    for changed in (sampled(model, params, seed=1), sampled(model, params, guidance=1.0)):
        assert any((changed[n] != together[n]).any() for n in together)


def test_a_sheet_holds_every_image_with_borders_between_them():
    images = [np.full((2, width, 1), 10 * width, np.uint8) for width in (1, 2, 3)]
    sheet = contact_sheet(images)
    assert sheet.shape == (2 * (2 + 2) + 2, 2 * (3 + 2) + 2, 3)
    assert [int((sheet == 10 * width).all(-1).sum()) for width in (1, 2, 3)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"steps": 0}, "steps=0"), ({"guidance": -1.0}, "guidance=-1"), ({"seed": -1}, "seed=-1")],
)
def test_impossible_settings_are_refused_by_name(wrong, said):
    with pytest.raises(UserError, match=said):
        ImageSampling(**wrong)
