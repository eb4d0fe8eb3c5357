"""A VAE computes what diffusers computes, in both directions; its folder is read, written and read again."""

from __future__ import annotations

import json
import shutil

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.numpy import load_file, save_file
from vae_folder import write_vae

from mmjax.config import VaeLatents
from mmjax.errors import UserError
from mmjax.hf.vae import open_vae, read_vae, vae_fingerprint, vae_latents
from mmjax.hub import DIFFUSERS_SINGLE
from mmjax.models.vae import VaeModel
from mmjax.runtime.vae import load_parameters, load_vae


def random_vae(fields: drawn.Fields, seed: int = 0) -> AutoencoderKL:
    """A VAE whose every parameter is random: norms and biases too, or they would prove nothing."""
    torch.manual_seed(seed)
    model = AutoencoderKL(**fields).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.normal_(
                centre, 0.2 if parameter.ndim < 2 else 1.3 / parameter[0].numel() ** 0.5
            )
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny VAE, `vae` in the folder of a whole pipeline."""
    path = tmp_path_factory.mktemp("pipeline")
    fields = drawn.vae(np.random.default_rng(1)) | {
        "mid_block_add_attention": True,
        "in_channels": 3,
        "out_channels": 3,
    }
    random_vae(fields).save_pretrained(path / "vae")
    (path / "model_index.json").write_text("{}")
    return path


def to_nhwc(x: torch.Tensor) -> np.ndarray:
    return x.detach().permute(0, 2, 3, 1).numpy()


def same(ours: jax.Array, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(
        np.asarray(ours), theirs, rtol=0, atol=1e-4 * max(1.0, np.abs(theirs).max())
    )


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("seed", range(16))
def test_means_log_variances_and_pictures_are_those_of_diffusers_and_the_export_is_read_back(
    seed, tmp_path
):
    rng = np.random.default_rng(seed)
    fields = drawn.vae(rng)
    theirs = random_vae(fields, seed)
    theirs.save_pretrained(tmp_path / "there")
    folder = open_vae(tmp_path / "there")
    config = read_vae(folder)
    model = VaeModel.build(config)
    params = load_parameters(folder, model)
    encode, decode = jax.jit(model.encode), jax.jit(model.decode)
    for _ in range(2):
        height, width = (config.factor * drawn.between(rng, 1, 9) for _ in range(2))
        image = rng.uniform(-1, 1, (2, height, width, config.image_channels)).astype(np.float32)
        latents = theirs.encode(torch.tensor(image).permute(0, 3, 1, 2)).latent_dist
        mean, log_variance = encode(params, jnp.asarray(image))
        same(mean, to_nhwc(latents.mean))
        same(log_variance, to_nhwc(latents.logvar))
        same(decode(params, mean), to_nhwc(theirs.decode(latents.mean).sample))

    by_path = {
        tuple(key.key for key in path): np.asarray(x)
        for path, x in jax.tree.leaves_with_path(params)
    }
    write_vae(tmp_path / "here", config, by_path)
    written, source = (load_file(tmp_path / name / DIFFUSERS_SINGLE) for name in ("here", "there"))
    assert written.keys() == source.keys()
    for name in written:
        np.testing.assert_array_equal(written[name], source[name], err_msg=name)
    assert read_vae(open_vae(tmp_path / "here")) == config
    again = AutoencoderKL.from_pretrained(tmp_path / "here")
    assert {k: again.config[k] for k in fields if k != "act_fn"} == {
        k: theirs.config[k] for k in fields if k != "act_fn"
    }


def test_the_attention_of_old_checkpoints_is_read_by_its_old_names(folder, tmp_path):
    shutil.copytree(folder / "vae", tmp_path / "old")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(tmp_path / "old" / DIFFUSERS_SINGLE)
    renamed = {}
    for name, tensor in tensors.items():
        for new, before in old.items():
            name = name.replace(f".{new}.", f".{before}.")
        renamed[name] = tensor
    save_file(renamed, tmp_path / "old" / DIFFUSERS_SINGLE)
    assert renamed.keys() != tensors.keys()
    ours = [
        load_parameters(f, VaeModel.build(read_vae(f)))
        for f in (open_vae(folder), open_vae(tmp_path / "old"))
    ]
    jax.tree.map(np.testing.assert_array_equal, *ours)


def test_latents_are_described_by_the_folder_and_a_config_that_says_otherwise_is_refused(folder):
    latents = vae_latents(folder)
    assert load_vae(latents, "model.generators.draw.latents").config == read_vae(
        open_vae(folder / "vae")
    )
    with pytest.raises(
        UserError, match=r"draw.latents.scale=9.0, but .*vae says .*; use .*draw.latents.scale="
    ):
        load_vae(
            VaeLatents(str(folder), latents.channels, latents.factor, 9.0, latents.shift),
            "draw.latents",
        )
    with pytest.raises(
        UserError, match=r"latents.weights is empty; name the diffusers folder of the VAE"
    ):
        load_vae(VaeLatents(), "draw.latents")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("act_fn", "relu", r"act_fn='relu' is not supported; known: 'silu', 'swish'"),
        ("down_block_types", ["AttnDownEncoderBlock2D"], r"down_block_types=.* is not supported"),
        ("up_block_types", ["AttnUpDecoderBlock2D"], r"up_block_types=.* is not supported"),
        ("latents_mean", [0.0], r"latents_mean=\[0.0\] is not supported; known: to leave it out"),
        ("out_channels", 4, r"out_channels=4 is not supported"),
        ("norm_num_groups", 7, r"norm_num_groups=7 does not divide block_out_channels="),
        ("block_out_channels", [], r"block_out_channels=\[\] are no widths"),
        (
            "_class_name",
            "AutoencoderTiny",
            r"_class_name='AutoencoderTiny' is not supported; known: 'AutoencoderKL'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field, value, message, folder, tmp_path):
    config = json.loads((folder / "vae/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=message):
        read_vae(open_vae(tmp_path))


def test_a_folder_that_does_not_hold_its_vae_is_refused(folder, tmp_path):
    with pytest.raises(
        UserError, match=r"is no diffusers folder: neither config.json nor vae/config.json is there"
    ):
        open_vae(tmp_path)
    shutil.copytree(folder / "vae", tmp_path / "vae")
    opened = open_vae(tmp_path)
    model = VaeModel.build(read_vae(opened))
    tensors = load_file(opened.path / DIFFUSERS_SINGLE)
    for change, message in (
        (
            {"more.weight": np.zeros(3, np.float32)},
            r"has 1 tensors that its VAE lacks, such as more.weight",
        ),
        (
            {"encoder.conv_in.bias": np.zeros(99, np.float32)},
            r"encoder.conv_in.bias has shape \[99\]",
        ),
    ):
        save_file(tensors | change, opened.path / DIFFUSERS_SINGLE)
        with pytest.raises(UserError, match=message):
            load_parameters(open_vae(tmp_path), model)
    del tensors["decoder.conv_out.weight"]
    save_file(tensors, opened.path / DIFFUSERS_SINGLE)
    with pytest.raises(UserError, match=r"has no tensor decoder.conv_out.weight"):
        load_parameters(open_vae(tmp_path), model)


def test_the_fingerprint_is_of_the_config_and_the_weights(folder, tmp_path):
    shutil.copytree(folder / "vae", tmp_path / "vae")
    assert vae_fingerprint(tmp_path) == vae_fingerprint(folder)
    tensors = load_file(tmp_path / "vae" / DIFFUSERS_SINGLE)
    save_file(
        tensors | {"encoder.conv_in.bias": tensors["encoder.conv_in.bias"] + 1},
        tmp_path / "vae" / DIFFUSERS_SINGLE,
    )
    assert vae_fingerprint(tmp_path) != vae_fingerprint(folder)
