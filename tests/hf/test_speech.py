"""Qwen3-ASR and Voxtral compute what transformers computes, clips of many lengths in one row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn
import numpy as np
import pytest
import torch
import transformers
from fine_tuning import moved
from parity import logits_there, random_model
from parity_samples import Part, Theirs, check_samples, is_text
from safetensors.torch import load_file
from test_audio_towers import AUDIO_TOKEN, HOP, RATE, clip, words
from test_export import check_beside
from test_generated_text import check, token_ids
from transformers.models.qwen3_asr import modeling_qwen3_asr

from mmjax import export
from mmjax.config import AudioConfig, ConnectorConfig
from mmjax.errors import UserError
from mmjax.hf.families import encoder_from_hf, from_hf

SECOND = 100 * HOP
Features = dict[str, torch.Tensor]


def qwen3_features(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> Features:
    """What the extractor of Qwen3-ASR makes of each clip by itself, as its processor asks for it."""
    half = encoder.chunk // 2
    extractor = transformers.Qwen3ASRFeatureExtractor(encoder.mels, n_window=half)
    extract = partial(extractor, sampling_rate=RATE, padding=True, return_attention_mask=True)
    made = [extract(wave) for wave in clips]
    longest = max(m["attention_mask"].shape[1] for m in made)
    pad = lambda x: torch.nn.functional.pad(x, (0, longest - x.shape[-1]))  # noqa: E731
    names = {"input_features": "input_features", "input_features_mask": "attention_mask"}
    return {name: torch.cat([pad(m[key]) for m in made]) for name, key in names.items()}


def qwen3_tokens(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> list[int]:
    """Count the tokens of clips there."""
    frames = qwen3_features(encoder, clips)["input_features_mask"].sum(-1)
    half = encoder.chunk // 2
    return modeling_qwen3_asr._get_feat_extract_output_lengths(frames, half).tolist()


def voxtral_features(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> Features:
    """What Voxtral's processor makes of clips: the windows of each, padded as a whole."""
    extractor = transformers.WhisperFeatureExtractor(encoder.mels)
    options = {"padding": True, "truncation": False, "pad_to_multiple_of": encoder.chunk * HOP}
    features = transformers.VoxtralProcessor._retrieve_input_features(
        SimpleNamespace(feature_extractor=extractor),
        clips,
        encoder.chunk,
        sampling_rate=RATE,
        return_tensors="pt",
        **options,
    )
    return {"input_features": features}


def voxtral_tokens(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> list[int]:
    """Count the tokens of clips there: so many of every window."""
    per_window = encoder.chunk_positions // encoder.connector.merge
    return [per_window * -(-len(wave) // (encoder.chunk * HOP)) for wave in clips]


@dataclass(frozen=True)
class Family:
    """What differs between the families."""

    draw: Callable[..., transformers.PreTrainedConfig]
    kind: type
    features: Callable[[AudioConfig, Sequence[np.ndarray]], Features]
    tokens: Callable[[AudioConfig, Sequence[np.ndarray]], list[int]]
    seconds: int  # of the longest clip that is compared


FAMILIES = {
    "qwen3_asr": Family(
        draw=drawn.qwen3_asr,
        kind=transformers.Qwen3ASRForConditionalGeneration,
        features=qwen3_features,
        tokens=qwen3_tokens,
        seconds=31,
    ),
    "voxtral": Family(
        draw=drawn.voxtral,
        kind=transformers.VoxtralForConditionalGeneration,
        features=voxtral_features,
        tokens=voxtral_tokens,
        seconds=5,
    ),
}


def saved(family: str, seed: int, folder: Path) -> torch.nn.Module:
    """A model of drawn sizes."""
    config = FAMILIES[family].draw(np.random.default_rng(seed), audio_token_id=AUDIO_TOKEN)
    for part in (config, config.audio_config, config.text_config):
        part._attn_implementation = "eager"
    model = random_model(config, FAMILIES[family].kind)
    model.save_pretrained(folder)
    return model


def inputs_there(family: str, encoder: AudioConfig, sample: Sequence[Part]) -> dict[str, Any]:
    """The inputs of a sample in transformers, its clips prepared by the extractor there."""
    clips = [part for part in sample if not is_text(part)]
    counts = iter(FAMILIES[family].tokens(encoder, clips) if clips else [])
    parts = [part if is_text(part) else np.full(next(counts), AUDIO_TOKEN) for part in sample]
    return token_ids(parts) | (FAMILIES[family].features(encoder, clips) if clips else {})


def theirs(family: str, encoder: AudioConfig) -> Theirs:
    """Logits of one sample in transformers."""

    def logits(model: torch.nn.Module, sample: Sequence[Part]) -> torch.Tensor:
        inputs = inputs_there(family, encoder, sample)
        ids = inputs.pop("input_ids")
        return logits_there(model, ids[0].numpy(), attention_mask=torch.ones_like(ids), **inputs)

    return logits


@pytest.mark.default_cases("qwen3_asr-0", "voxtral-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_what_transformers_makes_of_it_clips_of_all_lengths_in_one_row(
    family, seed, tmp_path
):
    model = saved(family, seed, tmp_path)
    encoder = from_hf(tmp_path).encoders["audio"]
    chunk = encoder.chunk * HOP
    samples = [
        # less than half a second, which silence completes in Qwen3-ASR; and more than the
        # extractor's chunk_length
        [words(0, 3), clip(3_000), words(1, 4)],
        [words(2, 6)],
        [clip(chunk), words(3, 2), clip(2 * SECOND + 333), words(4, 3)],
        [words(5, 2), clip(8_001), words(6, 1), clip(3 * chunk + 7 * HOP)],
        [clip(FAMILIES[family].seconds * SECOND), words(7, 2)],
    ]
    check_samples(model, tmp_path, samples, theirs(family, encoder))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_writes_what_it_writes_there_after_clips_of_several_lengths(family, tmp_path):
    model = saved(family, 2, tmp_path)
    encoder = from_hf(tmp_path).encoders["audio"]
    prompts = [
        [words(0, 3), clip(9_000), words(1, 4)],
        [words(2, 6)],
        [clip(17 * HOP), words(3, 2), clip(3 * SECOND + 99), words(4, 3)],
        [words(5, 2), clip(7_777), words(6, 5)],
    ]
    check(model, tmp_path, prompts, partial(inputs_there, family, encoder))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_is_read_there_with_what_the_run_changed(family, tmp_path):
    saved(family, 1, tmp_path / "source")
    run = moved(tmp_path / "source", tmp_path / "run")
    export.export(run, tmp_path / "out")
    check_beside(tmp_path / "source", tmp_path / "out")
    source, written = (
        load_file(tmp_path / name / "model.safetensors") for name in ("source", "out")
    )
    same = {key for key in source if torch.equal(source[key], written[key])}
    assert all(key.endswith("embed_positions.weight") for key in same)
    FAMILIES[family].kind.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    for key, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, written[key]), key


def test_voxtrals_folder_gives_its_encoder_alone_too(tmp_path):
    saved("voxtral", 3, tmp_path)
    whole, alone = from_hf(tmp_path).encoders["audio"], encoder_from_hf(tmp_path)
    assert replace(alone, connector=whole.connector) == whole
    assert alone.connector == ConnectorConfig()


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_asr",
            {"architectures": ["Qwen3ASRForTokenClassification"]},
            r"architectures=Qwen3ASRForTokenClassification \(forced alignment\) is not supported",
        ),
        ("qwen3_asr", {"thinker_config": {}}, "thinker_config is of Qwen's own layout"),
        ("qwen3_asr", {"audio_config": {"output_dim": 7}}, "output_dim=7, but the text's"),
        ("qwen3_asr", {"audio_config": {"n_window": 48}}, "only chunks of 13 positions are known"),
        (
            "qwen3_asr",
            {"audio_config": {"max_position_embeddings": 12}},
            "max_position_embeddings=12, but a chunk has 13 positions",
        ),
        ("voxtral", {"projector_hidden_act": "mish"}, "projector_hidden_act='mish'"),
        (
            "voxtral",
            {"audio_config": {"intermediate_size": 99}},
            "intermediate_size=99 is a token's width, and max_source_positions=",
        ),
        (
            "voxtral",
            {"audio_config": {"max_source_positions": 51}},
            "max_source_positions=51 are 16320 samples, no whole seconds",
        ),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_field(family, change, message, tmp_path):
    config = FAMILIES[family].draw(np.random.default_rng(0)).to_dict()
    for name, value in change.items():
        config[name] = config[name] | value if isinstance(config.get(name), dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_an_extractor_of_another_class_is_refused(tmp_path):
    saved("qwen3_asr", 0, tmp_path)
    mels = from_hf(tmp_path).encoders["audio"].mels
    transformers.WhisperFeatureExtractor(mels).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="known is Qwen3ASRFeatureExtractor"):
        from_hf(tmp_path)
    transformers.Qwen3ASRFeatureExtractor(mels, min_length=99).save_pretrained(tmp_path)
    assert from_hf(tmp_path).encoders["audio"].clips.shortest == 99
