"""Whisper's encoder and Qwen2-Audio compute what transformers computes, clips of many lengths in one row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from parity import loaded, logits_there, random_model, same_gradients, saved_gradients
from parity_samples import Theirs, check_samples, is_text
from safetensors.torch import load_file, save_file

from mmjax.batch import ItemBatch
from mmjax.config import (
    AudioConfig,
    ConnectorConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    WhisperMel,
)
from mmjax.cost.table import parameters
from mmjax.data.media.patches import item_input, item_size
from mmjax.errors import UserError
from mmjax.hf.families import encoder_from_hf, from_hf, layout_of
from mmjax.hf.folder import HfFolder
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

AUDIO_TOKEN = 5
RATE, HOP = 16_000, 160
TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TOWER = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 80,
    "max_source_positions": 50,
}


def clip(samples: int) -> np.ndarray:
    """Noise that swells, so that no frame is like another."""
    rng = np.random.default_rng(samples)
    return (0.2 * rng.standard_normal(samples) * np.sin(np.linspace(0.2, 3, samples))).astype(
        np.float32
    )


def words(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(6, 97, count)


def qwen2_audio(
    folder: Path, tower: dict[str, Any] | None = None, text: dict[str, Any] | None = None
):
    config = transformers.Qwen2AudioConfig(
        audio_config=TOWER | (tower or {}),
        text_config=TEXT | (text or {}),
        audio_token_index=AUDIO_TOKEN,
    )
    for part in (config, config.audio_config, config.text_config):
        part._attn_implementation = "eager"
    model = random_model(config, transformers.Qwen2AudioForConditionalGeneration)
    model.save_pretrained(folder)
    return model


def whisper(folder: Path, kind: type = transformers.WhisperForConditionalGeneration, **own: Any):
    tokens = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1
    )
    decoder = {
        "decoder_layers": 1,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 24,
        "vocab_size": 40,
    }
    model = random_model(transformers.WhisperConfig(**TOWER | decoder | tokens | own), kind)
    model.save_pretrained(folder)
    return model


def extractor_of(encoder: AudioConfig) -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(encoder.mels, chunk_length=encoder.clips.seconds)


def features_there(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """What the extractor of transformers gives its model: every clip padded to the window."""
    made = extractor_of(encoder)(
        list(clips), sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
    )
    return {
        "input_features": made["input_features"],
        "feature_attention_mask": made["attention_mask"],
    }


def packed_clips(
    encoder: AudioConfig, clips: Sequence[np.ndarray], spare: int = 3
) -> tuple[ItemBatch, list[range]]:
    """One row of clips one after the other with padding behind, and the places of each clip's tokens in the output."""
    group = encoder.positions_per_token
    sizes = [item_size(encoder, wave.shape) for wave in clips]
    length = sum(size.positions for size in sizes) + spare * group
    item, owner = np.full((1, length), -1, np.int32), np.full((1, length), -1, np.int32)
    values, coordinates = (
        np.zeros((1, length, encoder.mels), np.float32),
        np.zeros((1, length, 3), np.int32),
    )
    at, places = 0, []
    for number, (wave, size) in enumerate(zip(clips, sizes, strict=True)):
        here, made = slice(at, at + size.positions), item_input(encoder, wave)
        values[0, here], coordinates[0, here], owner[0, here] = (
            made.values,
            made.coordinates,
            number,
        )
        item[0, here] = np.where(made.valid, number, -1)
        places.append(range(at // group, at // group + size.tokens))
        at += size.positions
    return ItemBatch(values, item, coordinates, owner, np.zeros_like(item)), places


def theirs(encoder: AudioConfig) -> Theirs:
    """Logits of one sample in transformers, its clips prepared by the extractor there."""

    def logits(model: torch.nn.Module, sample: Sequence[np.ndarray]) -> torch.Tensor:
        clips = [part for part in sample if not is_text(part)]
        inputs = features_there(encoder, clips) if clips else {}
        counts = (
            [(int(n) - 1) // 2 + 1 for n in inputs["feature_attention_mask"].sum(-1)]
            if clips
            else []
        )
        left = iter([AUDIO_TOKEN] * ((n - 2) // 2 + 1) for n in counts)
        tokens = np.concatenate([part if is_text(part) else next(left) for part in sample])
        return logits_there(
            model, tokens, attention_mask=torch.ones(1, len(tokens), dtype=torch.long), **inputs
        )

    return logits


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(12))
def test_qwen2_audio_is_what_transformers_makes_of_it_clips_of_all_lengths_in_one_row(
    seed, tmp_path
):
    rng = np.random.default_rng(seed)
    tower = drawn.audio_tower(rng)
    model = qwen2_audio(tmp_path, tower, drawn.any_decoder(rng).to_dict())
    window = tower["max_source_positions"] * 2 * HOP
    samples = [
        [words(0, 3), clip(9_000), words(1, 4)],
        [words(2, 6)],
        [clip(17 * HOP), words(3, 2), clip(window), words(4, 3)],
        [words(5, 2), clip(4 * HOP - 3), clip(7_777), words(6, 5)],
        [
            words(7, 1),
            clip(3 * HOP),
            words(8, 2),
            clip(window - HOP),
            clip(window - 2 * HOP - 1),
            words(9, 1),
        ],
    ]
    check_samples(model, tmp_path, samples, theirs(from_hf(tmp_path).encoders["audio"]))


@pytest.mark.exhaustive
def test_a_clip_of_any_number_of_frames_gives_the_tokens_that_it_gives_alone(tmp_path):
    model = qwen2_audio(tmp_path, {"encoder_layers": 1})
    ours, params, config = loaded(tmp_path)
    encoder = config.encoders["audio"]
    clips = [clip(frames * HOP) for frames in range(3, 101)]
    batch, places = packed_clips(encoder, clips)
    found = np.asarray(
        jax.jit(ours.encode)(params, {"audio": jax.tree.map(jnp.asarray, batch)})["audio"]
    )[0]
    for frames, wave, place in zip(range(3, 101), clips, places, strict=True):
        wanted = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        features = features_there(encoder, [wave])
        assert int(features["feature_attention_mask"].sum()) == frames
        assert len(place) == wanted == item_size(encoder, wave.shape).tokens
        ids = np.array([7, *[AUDIO_TOKEN] * wanted, 8])
        hidden: list[torch.Tensor] = []
        hook = model.model.multi_modal_projector.register_forward_hook(
            lambda *of, into=hidden: into.append(of[-1])
        )
        logits_there(
            model, ids, attention_mask=torch.ones(1, len(ids), dtype=torch.long), **features
        )
        hook.remove()
        theirs = hidden[0][0, :wanted].detach().numpy()
        np.testing.assert_allclose(
            found[place.start : place.stop], theirs, atol=1e-4, err_msg=f"{frames} frames"
        )


@pytest.mark.default_cases("WhisperModel-0", "WhisperForConditionalGeneration-1")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["WhisperForConditionalGeneration", "WhisperModel"])
def test_whispers_encoder_is_what_transformers_makes_of_it_over_the_whole_window(
    kind, seed, tmp_path
):
    model = whisper(
        tmp_path, getattr(transformers, kind), **drawn.audio_tower(np.random.default_rng(seed))
    )
    encoder = encoder_from_hf(tmp_path)
    encoder = replace(encoder, connector=ConnectorConfig(merge=1))
    llm = DecoderConfig(1, 16, 2, 1, 8, 16, vocab=9)
    ours = Model.build(ModelConfig(llm, {"audio": encoder}), jnp.float32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = load_pretrained(ours, parameter_shardings(ours, mesh, ShardingRules()))
    assert set(params) == {"encoders"}

    clips = [clip(n) for n in (5000, 1, 16_000, 12_345)]
    batch, places = packed_clips(encoder, clips)
    positions = encoder.positions.positions
    assert [len(place) for place in places] == [positions] * 4
    weights = np.random.default_rng(0).normal(size=(4, positions, encoder.width)).astype(np.float32)

    def outputs(params, items):
        tower = ours.module(params).encoders["audio"]
        x = tower.finished(tower.layers(tower.embedded(items), tower.context(items)))[0]
        return jnp.stack([x[place.start : place.stop] for place in places])

    items = jax.tree.map(jnp.asarray, batch)
    theirs = model.get_encoder()(features_there(encoder, clips)["input_features"]).last_hidden_state
    np.testing.assert_allclose(jax.jit(outputs)(params, items), theirs.detach().numpy(), atol=1e-4)
    (theirs * torch.tensor(weights)).sum().backward()
    gradients = jax.jit(jax.grad(lambda p: (outputs(p, items) * weights).sum()))(params)
    same_gradients(
        gradients, layout_of(HfFolder.open(tmp_path), ours.config), saved_gradients(model)
    )


def test_old_and_new_names_of_tensors_are_the_same_model(tmp_path):
    qwen2_audio(tmp_path)
    _, old, _ = loaded(tmp_path)
    renamed = {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.language_model.",
        "audio_tower.": "model.audio_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }

    def new(tensors):
        for key in list(tensors):
            prefix = next(p for p in renamed if key.startswith(p))
            tensors[renamed[prefix] + key.removeprefix(prefix)] = tensors.pop(key)

    edit_tensors(tmp_path, new)
    jax.tree.map(np.testing.assert_array_equal, old, loaded(tmp_path)[1])


def test_what_lies_on_a_mesh_is_what_lies_on_one_device(tmp_path):
    qwen2_audio(tmp_path)
    _, whole, config = loaded(tmp_path)
    model = Model.build(config, jnp.float32)
    made = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2), jax.devices())
    params = load_pretrained(model, parameter_shardings(model, made, ShardingRules()))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(whole))


def test_one_folder_gives_its_encoder_alone_or_all_of_it(tmp_path):
    qwen2_audio(tmp_path)
    whole = from_hf(tmp_path, freeze=["audio", "llm"])
    assert (
        whole.encoders["audio"].frozen,
        whole.llm.frozen,
        whole.encoders["audio"].connector.frozen,
    ) == (1, 1, 0)
    alone = encoder_from_hf(tmp_path)
    assert replace(alone, connector=whole.encoders["audio"].connector) == replace(
        whole.encoders["audio"], frozen=False
    )
    assert alone.connector == ConnectorConfig()
    model = Model.build(ModelConfig(replace(whole.llm, weights=""), {"ears": alone}), jnp.float32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = load_pretrained(model, parameter_shardings(model, mesh, ShardingRules()))
    assert {kind: set(of) for kind, of in params.items()} == {"encoders": {"ears"}}


def test_parameters_are_counted_exactly(tmp_path):
    qwen2_audio(tmp_path)
    _, params, config = loaded(tmp_path)
    held = {
        "llm": params["llm"],
        "audio": params["encoders"]["audio"],
        "audio.connector": params["connectors"]["audio"],
    }
    assert parameters(config) == {
        name: sum(x.size for x in jax.tree.leaves(of)) for name, of in held.items()
    }


def test_fields_that_qwen2_audio_leaves_out_are_its_defaults(tmp_path):
    qwen2_audio(tmp_path)
    edit_config(
        tmp_path,
        lambda config: config.update(text_config={"vocab_size": 156032}, audio_config=None),
    )
    model = from_hf(tmp_path)
    there = transformers.Qwen2AudioConfig(text_config={"vocab_size": 156032})
    text, tower = there.text_config, there.audio_config
    llm, audio = model.llm, model.encoders["audio"]
    assert (llm.layers, llm.width, llm.heads) == (
        text.num_hidden_layers,
        text.hidden_size,
        text.num_attention_heads,
    )
    assert (llm.kv_heads, llm.mlp_width, llm.vocab) == (
        text.num_key_value_heads,
        text.intermediate_size,
        156032,
    )
    assert (audio.layers, audio.width, audio.heads) == (
        tower.encoder_layers,
        tower.d_model,
        tower.encoder_attention_heads,
    )
    assert (audio.mlp_width, audio.mels, audio.clips.seconds) == (
        tower.encoder_ffn_dim,
        tower.num_mel_bins,
        30,
    )


def test_an_old_tied_checkpoint_has_no_output_table(tmp_path):
    qwen2_audio(tmp_path, text={"tie_word_embeddings": True})
    assert not from_hf(tmp_path).llm.tied  # transformers ties none since it keeps them apart
    edit_tensors(tmp_path, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    _, params, config = loaded(tmp_path)
    assert config.llm.tied
    assert "table" not in params["llm"]["head"]


def test_clips_are_prepared_as_the_folder_says(tmp_path):
    model = whisper(tmp_path, transformers.WhisperModel)
    transformers.WhisperFeatureExtractor(80, chunk_length=1, hop_length=200).save_pretrained(
        tmp_path
    )
    assert encoder_from_hf(tmp_path).clips == WhisperMel(hop=200, seconds=1, attended="window")
    transformers.WhisperFeatureExtractor(128).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"makes 128 bins \(feature_size\), its config.json says num_mel_bins=80"
    ):
        encoder_from_hf(tmp_path)
    model.encoder.save_pretrained(tmp_path / "alone")
    assert encoder_from_hf(tmp_path / "alone").clips == WhisperMel(seconds=1, attended="window")


def test_a_folder_without_a_decoder_or_without_an_encoder_says_so(tmp_path):
    whisper(tmp_path / "whisper")
    with pytest.raises(
        UserError, match="has an encoder, and no decoder that can be read; see encoder_from_hf"
    ):
        from_hf(tmp_path / "whisper")
    random_model(transformers.Qwen2Config(**TEXT)).save_pretrained(tmp_path / "qwen2")
    with pytest.raises(
        UserError, match=r"no encoder that can be read alone; known are .*qwen2_audio"
    ):
        encoder_from_hf(tmp_path / "qwen2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("audio_tower.embed_positions.weight"),
            r"has no tensor audio_tower\.embed_positions",
        ),
        (lambda t: t.pop("audio_tower.conv1.weight"), r"has no audio encoder"),
        (
            lambda t: t.pop("multi_modal_projector.linear.weight"),
            r"has no tensor multi_modal_projector.linear.weight",
        ),
        (
            lambda t: t.update({"audio_tower.layers.0.self_attn.k_proj.bias": torch.ones(24)}),
            r"1 tensors that this model lacks, such as audio_tower.layers.0.self_attn.k_proj.bias",
        ),
        (
            lambda t: t.update({"audio_adapter.weight": torch.ones(2)}),
            r"lacks, such as audio_adapter.weight",
        ),
        (
            lambda t: t.update({"audio_tower.conv2.weight": torch.ones(24, 24, 5)}),
            r"conv2.weight has shape",
        ),
    ],
)
def test_tensors_that_do_not_go_with_the_config_are_named(tmp_path, change, message):
    qwen2_audio(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["audio_config"].update(activation_function="mish"),
            r"audio_config: activation_function='mish'",
        ),
        (
            lambda c: c["audio_config"].update(model_type="wav2vec2"),
            r"model_type='wav2vec2' is no audio encoder; known",
        ),
        (
            lambda c: c["audio_config"].update(d_model="big"),
            r"audio_config: d_model='big' is no int",
        ),
        (lambda c: c.update(audio_config=[1]), r"audio_config=\[1\] is no dict"),
        (
            lambda c: c["text_config"].update(model_type="bert"),
            r"text_config: model_type='bert' is no decoder",
        ),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_field(tmp_path, change, message):
    qwen2_audio(tmp_path)
    edit_config(tmp_path, change)
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
