"""Any encoder with any decoder, each from a folder of its own: two steps of training reach every parameter."""

from __future__ import annotations

from functools import partial

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from evaclip import EvaClipVisionConfig, EvaClipVisionModel
from parity import random_model
from parity_samples import packed

from mmjax.config import (
    AdamW,
    BatchConfig,
    Config,
    DataConfig,
    MeshConfig,
    Schedule,
    TrainingConfig,
    VisionConfig,
)
from mmjax.hf.families import compose, encoder_from_hf, from_hf
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import hyperparameters, make_optimizer, parameter_shardings
from mmjax.runtime.weights import load_pretrained

TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
TOWER |= {"image_size": 16, "patch_size": 4}
DINO = {name: size for name, size in TOWER.items() if name != "intermediate_size"}
WHISPER = {"d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 40}
WHISPER |= {"num_mel_bins": 80, "max_source_positions": 50}
SPEECH = WHISPER | {
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24,
    "vocab_size": 40,
}
SPEECH |= dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1
)
SEED = 1  # of what is drawn


def drawn_model(name: str) -> tuple:
    config = getattr(drawn, name)(np.random.default_rng(SEED))
    return config, getattr(
        transformers, type(config).__name__.replace("Config", "ForConditionalGeneration")
    )


ENCODERS = {
    "clip": lambda: (transformers.CLIPVisionConfig(**TOWER), transformers.CLIPVisionModel),
    "evaclip": lambda: (
        EvaClipVisionConfig(**TOWER, q_bias=False, k_bias=False, v_bias=False),
        EvaClipVisionModel,
    ),
    "siglip": lambda: (transformers.SiglipVisionConfig(**TOWER), transformers.SiglipVisionModel),
    "internvl": lambda: (
        transformers.InternVLVisionConfig(**TOWER),
        transformers.InternVLVisionModel,
    ),
    "dinov2": lambda: (transformers.Dinov2Config(**DINO), transformers.Dinov2Model),
    "dinov2_with_registers": lambda: (
        transformers.Dinov2WithRegistersConfig(**DINO),
        transformers.Dinov2WithRegistersModel,
    ),
    "qwen2_vl": partial(drawn_model, "qwen2_vl"),
    "qwen2_5_vl": partial(drawn_model, "qwen2_5_vl"),
    "qwen3_vl": partial(drawn_model, "qwen3_vl"),
    "whisper": lambda: (
        transformers.WhisperConfig(**SPEECH),
        transformers.WhisperForConditionalGeneration,
    ),
    "qwen2_audio": lambda: (
        transformers.Qwen2AudioEncoderConfig(**WHISPER),
        transformers.Qwen2AudioEncoder,
    ),
    **{name: partial(drawn_model, name) for name in ("voxtral", "glmasr")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Give the folder of an encoder or a decoder by its name, made when it is first wanted."""
    root = tmp_path_factory.mktemp("folders")

    def folder(name: str, make) -> str:
        if not (root / name).exists():
            config, kind = make()
            random_model(config, kind).save_pretrained(root / name)
        return root / name

    return folder


@pytest.mark.default_cases("opt-dinov2")
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("decoder", drawn.DECODERS)
def test_two_steps_of_a_new_pair_reach_every_parameter(encoder, decoder, folders):
    text = partial(drawn.decoder, np.random.default_rng(SEED), decoder, max_position_embeddings=64)
    llm = from_hf(folders(decoder, lambda: (text(), None)))
    senses = encoder_from_hf(folders(encoder, ENCODERS[encoder]))
    rng = np.random.default_rng(0)
    if isinstance(senses, VisionConfig):
        model = compose({"vision": senses}, llm)
        media = [rng.integers(0, 256, (16, 16, 3), np.uint8) for _ in range(2)]
    else:
        model = compose({"audio": senses}, llm)
        media = [rng.normal(size=4000).astype(np.float32) / 8 for _ in range(2)]
    samples = [
        [rng.integers(1, 97, 2), media[0], rng.integers(1, 97, 3)],
        [media[1], rng.integers(1, 97, 4)],
    ]
    made = packed(model, samples)
    built, mesh = Model.build(model, jnp.float32), make_mesh(MeshConfig(), jax.devices()[:1])
    recipe = AdamW(1e-2, 0.0)
    run = Config(
        "two",
        DataConfig(),
        BatchConfig(rows={}),
        model,
        TrainingConfig(2),
        recipe,
        Schedule(0, 1.0),
    )
    executor = Executor.on_mesh(
        built, make_optimizer(recipe, built.axes), mesh, ShardingRules(), sources=1
    )
    pretrained = load_pretrained(built, parameter_shardings(built, mesh, ShardingRules()))
    state, accumulated = executor.init(jax.random.key(0), pretrained), executor.zeros()
    before, losses = jax.device_get(state.trainable), []
    for step in range(2):
        hyper = hyperparameters(run, step)
        state, accumulated, report = executor.step(state, accumulated, [executor.put(made)], hyper)
        losses.append(report.mean_loss)
    assert np.isfinite(losses).all()
    assert losses[1] < losses[0]
    moved = jax.tree.map(
        lambda old, new: bool((old != new).any()), before, jax.device_get(state.trainable)
    )
    still = [
        ".".join(k.key for k in path)
        for path, moves in jax.tree.leaves_with_path(moved)
        if not moves
    ]
    # Whisper's table of positions and the scales of Gemma 4's layers are buffers, which are not
    # trained.
    still = [name for name in still if not name.endswith("output_scale.scale")]
    assert set(still) <= {"encoders.audio.embed.positions.weight"}
