"""Stable Diffusion's UNet computes what diffusers computes, several images in a row, and goes back to its folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from flax import nnx
from parity import randomize, stored_parameter

from mmjax.batch import ItemBatch
from mmjax.config import UnetConfig
from mmjax.errors import UserError
from mmjax.hf.diffusers_folder import write_part
from mmjax.hf.generators import generator_from_hf
from mmjax.hf.unet import ATTENDING, ATTENDING_UP, CLASS, open_unet, parts
from mmjax.models.unet import Unet

Params = dict[tuple[str, ...], np.ndarray]


def to_fields(config: UnetConfig) -> dict[str, Any]:
    """Return the fields of a UNet's `config.json`."""
    c = config
    names = {attending: name for name, attending in ATTENDING.items()}
    names_up = {attending: name for name, attending in ATTENDING_UP.items()}
    return {
        "_class_name": CLASS,
        "in_channels": c.latents.channels,
        "out_channels": c.latents.channels,
        "sample_size": c.size[0] if c.size[0] == c.size[1] else list(c.size),
        "block_out_channels": list(c.widths),
        "down_block_types": [names[attending] for attending in c.attending],
        "up_block_types": [names_up[attending] for attending in reversed(c.attending)],
        "layers_per_block": c.blocks,
        "norm_num_groups": c.groups,
        "cross_attention_dim": c.condition_width,
        "attention_head_dim": list(c.heads),
        "use_linear_projection": c.linear_projections,
    }


def saved(folder: Path, fields: dict[str, Any], seed: int = 0) -> UNet2DConditionModel:
    """A random UNet of diffusers, and its folder."""
    torch.manual_seed(seed)
    model = UNet2DConditionModel(**fields).eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


def parameters(folder: Path, config: UnetConfig) -> tuple[nnx.GraphDef, Params]:
    """The graph of our module, and its parameters as a folder has them."""
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Unet(config, jnp.dtype("float32"), nnx.Rngs(0)))
    )
    source, names = open_unet(folder), parts(config)
    flat = nnx.traversals.flatten_mapping(nnx.to_pure_dict(state))
    return graph, {
        path: stored_parameter(source, names.find(path), leaf.shape) for path, leaf in flat.items()
    }


def predict(graph: nnx.GraphDef, params: Params, *inputs: Any) -> jax.Array:
    return nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(params)))(
        *jax.tree.map(jnp.asarray, inputs)
    )


def rows_of(present: np.ndarray, config: UnetConfig) -> ItemBatch:
    """Rows of images, of which some places hold none `[R, I]`."""
    item = (
        np.where(present, np.arange(present.shape[1]), -1)
        .repeat(config.min_patches, axis=1)
        .astype(np.int32)
    )
    zeros = np.zeros_like(item)
    return ItemBatch(zeros[..., None], item, np.zeros((*item.shape, 3), item.dtype), zeros, zeros)


@pytest.mark.default_cases("12")
@pytest.mark.parametrize("seed", range(16))
def test_a_unet_is_what_diffusers_makes_of_it_with_several_images_in_a_row(seed, tmp_path):
    rng = np.random.default_rng(seed)
    fields = drawn.unet(rng)
    theirs = saved(tmp_path, fields)
    config = generator_from_hf(tmp_path)
    graph, params = parameters(tmp_path, config)
    assert set(open_unet(tmp_path).tensors) == set(theirs.state_dict())
    assert sum(value.size for value in params.values()) == sum(
        p.numel() for p in theirs.parameters()
    )
    present = np.array([[True, True], [True, False]])
    channels = config.latents.channels
    queries = config.queries
    latents = rng.normal(size=(2, 2 * config.min_patches, channels)).astype(np.float32)
    time = rng.uniform(size=(2, 2)).astype(np.float32)
    condition = rng.normal(size=(2, 2 * queries, config.condition_width)).astype(np.float32)
    factors = rng.normal(size=latents.shape).astype(np.float32)
    items = rows_of(present, config)

    def loss(params, condition, latents):
        velocity = predict(graph, params, latents, items, time, condition)
        return (velocity * factors).sum(), velocity

    compute = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    (gradients, of_condition, of_latents), found = compute(params, condition, latents)
    places = np.argwhere(present)
    images = lambda x: x.reshape(2, 2, *config.size, channels)  # noqa: E731
    of_places = lambda x: np.stack([images(x)[row, place] for row, place in places])  # noqa: E731
    tokens = condition.reshape(2, 2, queries, -1)
    given = of_places(latents), time[present], tokens[present], of_places(factors)
    rounded = reference(theirs, tmp_path / "rounded", config, *given)
    exact = reference(theirs.double(), tmp_path / "exact", config, *given)
    np.testing.assert_allclose(
        of_places(found), exact["velocity"], rtol=0, atol=1e-4 * np.abs(exact["velocity"]).max()
    )
    ours = {".".join(path): np.asarray(gradient) for path, gradient in gradients.items()}
    ours |= {
        "latents": of_places(of_latents),
        "condition": of_condition.reshape(tokens.shape)[present],
    }
    for name, gradient in ours.items():
        # Norms of few values enlarge rounding: ours may be four times as far from float64 as theirs
        # are.
        limit = max(2e-4 * np.abs(exact[name]).max(), 4 * np.abs(rounded[name] - exact[name]).max())
        np.testing.assert_allclose(gradient, exact[name], rtol=0, atol=limit, err_msg=name)
    # Where there is no image nothing comes out, and nothing goes back.
    assert not np.any(images(found)[~present])
    assert not np.any(images(of_latents)[~present])
    assert not np.any(of_condition.reshape(tokens.shape)[~present])


def reference(
    model: UNet2DConditionModel,
    folder: Path,
    config: UnetConfig,
    latents: np.ndarray,
    time: np.ndarray,
    tokens: np.ndarray,
    factors: np.ndarray,
) -> dict[str, np.ndarray]:
    """The velocity of images, each by itself, and the gradients of its weighted sum, by our parameters' paths.

    folder: for the gradients as a checkpoint.
    """
    model = copy.deepcopy(model)
    exact = lambda x: torch.tensor(x).to(model.dtype)  # noqa: E731
    samples, tokens = exact(latents).requires_grad_(), exact(tokens).requires_grad_()
    total = torch.zeros((), dtype=model.dtype)
    velocities = []
    for sample, t, condition, weights in zip(samples, time, tokens, exact(factors), strict=True):
        velocity = model(
            sample.permute(2, 0, 1)[None], 1000 * torch.tensor(t), condition[None]
        ).sample[0]
        velocities.append(velocity.permute(1, 2, 0))
        total = total + (velocities[-1] * weights).sum()
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    _, gradients = parameters(folder, config)
    inputs = {"latents": samples.grad.numpy(), "condition": tokens.grad.numpy()}
    velocity = torch.stack(velocities).detach().numpy()
    return (
        {".".join(path): value for path, value in gradients.items()}
        | inputs
        | {"velocity": velocity}
    )


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_what_diffusers_reads(seed, tmp_path):
    fields = drawn.unet(np.random.default_rng(seed))
    theirs = saved(tmp_path / "unet", fields)
    config = generator_from_hf(tmp_path)  # the whole folder, which has the UNet in one of its own
    _, params = parameters(tmp_path, config)
    write_part(tmp_path / "out", to_fields(config), parts(config), params)
    again = UNet2DConditionModel.from_pretrained(tmp_path / "out")
    wanted, found = theirs.state_dict(), again.state_dict()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name].numpy(), tensor.numpy(), err_msg=name)
    assert to_fields(generator_from_hf(tmp_path / "out")) == to_fields(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resnet_time_scale_shift", "scale_shift"),
        ("addition_embed_type", "text_time"),
        ("transformer_layers_per_block", [1, 2, 10]),
        ("norm_eps", 1e-6),
        ("out_channels", 8),
        ("mid_block_type", "UNetMidBlock2D"),
        ("up_block_types", ["UpBlock2D"] * 4),
        ("down_block_types", ["AttnDownBlock2D"] * 4),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(field, value, tmp_path):
    fields = {"_class_name": "UNet2DConditionModel", "sample_size": 64, field: value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=field):
        generator_from_hf(tmp_path)


def test_stable_diffusion_2_1_is_read_as_it_is(tmp_path):
    fields = {
        "attention_head_dim": [5, 10, 20, 20],
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
    }
    fields |= {
        "_class_name": "UNet2DConditionModel",
        "sample_size": 96,
        "upcast_attention": True,
        "norm_eps": 1e-05,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert generator_from_hf(tmp_path) == UnetConfig(
        condition_width=1024, size=(96, 96), attention="auto"
    )
