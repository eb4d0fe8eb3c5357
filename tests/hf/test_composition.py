"""Any encoder with any decoder: towers and LLMs that were trained apart, loaded from their own folders."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from evaclip import EvaClipVisionConfig, EvaClipVisionModel
from parity import random_model
from parity_samples import packed

from mmjax.config import MeshConfig
from mmjax.errors import UserError
from mmjax.hf.families import compose, encoder_from_hf, from_hf
from mmjax.models.model import Model, merge, modules_of
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODERS = {
    "llama": transformers.LlamaConfig(**TEXT),
    "gemma2": transformers.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=8),
}
ENCODERS = {
    "clip": (
        transformers.CLIPConfig(
            vision_config=TOWER,
            text_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
        ),
        transformers.CLIPModel,
    ),
    "evaclip": (EvaClipVisionConfig(**TOWER, k_bias=False), EvaClipVisionModel),
    "siglip": (transformers.SiglipVisionConfig(**TOWER), transformers.SiglipVisionModel),
    "pixtral": (
        transformers.PixtralVisionConfig(**TOWER | {"hidden_size": 30}),
        transformers.PixtralVisionModel,
    ),
    "internvl": (transformers.InternVLVisionConfig(**TOWER), transformers.InternVLVisionModel),
}


def saved(folder, config, kind=None):
    model = random_model(config, kind)
    model.save_pretrained(folder)
    return model


def with_new_connectors_of(name: str, model: Model) -> dict:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    read = load_pretrained(model, parameter_shardings(model, mesh, ShardingRules()))
    assert modules_of(read) == {"llm", name}
    return merge(model.init(jax.random.key(0)), read)


@pytest.mark.covering(1)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_tower_and_a_decoder_of_two_folders_give_one_model(encoder, decoder, tmp_path):
    config, kind = ENCODERS[encoder]
    theirs = saved(tmp_path / "tower", config, kind)
    saved(tmp_path / "llm", DECODERS[decoder])
    composed = compose(
        {"eyes": encoder_from_hf(tmp_path / "tower")},
        from_hf(tmp_path / "llm"),
        freeze=["eyes", "llm"],
    )
    assert composed.encoders["eyes"].connector.mlp_width == 32
    model = Model.build(composed, jnp.float32)
    params = with_new_connectors_of("eyes", model)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    batch = jax.tree.map(jnp.asarray, packed(composed, [[np.arange(1, 5), image, np.arange(5, 9)]]))
    logits = jax.jit(model.logits)(params, batch)
    assert np.isfinite(np.asarray(logits)).all()
    # The tower's own output is transformers', up to the layer that the connector reads.
    module = model.module(params)
    items = batch.items["eyes"]
    tower = module.encoders["eyes"]
    out = tower.layers(tower.embedded(items), module.context("eyes", items, None))
    pixels = torch.tensor((image / 255 - 0.5) / 0.5, dtype=torch.float32).permute(2, 0, 1)[None]
    vision = theirs.vision_model if encoder == "clip" else theirs
    layer = -1 if encoder in ("internvl", "pixtral") else -2
    if encoder == "evaclip":
        states = theirs.hidden_states(pixels)
    else:
        states = vision(pixel_values=pixels, output_hidden_states=True).hidden_states
    wanted = states[layer][0].detach().numpy()
    order = np.asarray(items.coordinates[0, :16, 1] * 4 + items.coordinates[0, :16, 2])
    np.testing.assert_allclose(np.asarray(out)[0, :16], wanted[-16:][order], atol=1e-4)


def test_what_cannot_be_had_alone_is_said(tmp_path):
    saved(tmp_path, DECODERS["llama"])
    with pytest.raises(
        UserError, match=r"has no encoder that can be read alone; known are those of .*clip"
    ):
        encoder_from_hf(tmp_path)
    saved(tmp_path / "tower", *ENCODERS["siglip"])
    with pytest.raises(UserError, match="no decoder that can be read; see encoder_from_hf"):
        from_hf(tmp_path / "tower")
    with pytest.raises(UserError, match="freeze: there is no module 'visoin'"):
        from_hf(tmp_path, freeze=["visoin"])
