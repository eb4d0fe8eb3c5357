"""Qwen3-ASR, Voxtral and GLM-ASR compute what transformers computes, clips of many lengths in one row."""

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
from parity import logits_there, random_model
from parity_samples import Part, Theirs, check_samples, is_text
from test_audio_towers import AUDIO_TOKEN, HOP, RATE, clip, words
from test_generated_text import check, token_ids
from transformers.models.qwen3_asr import modeling_qwen3_asr

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


def glm_windows(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> dict[str, Any]:
    """What GLM-ASR's processor makes of clips: windows of each, padded apart."""
    there = transformers.GlmAsrProcessor
    extractor = transformers.WhisperFeatureExtractor(
        encoder.mels, chunk_length=encoder.clips.seconds
    )
    processor = SimpleNamespace(
        feature_extractor=extractor,
        max_audio_len=655,
        _get_audio_token_length=partial(there._get_audio_token_length, None),
        replace_audio_token=lambda *_, **__: "",
    )
    made, _ = there._process_audio(
        processor, clips, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
    )
    return dict(made)


def glm_features(encoder: AudioConfig, clips: Sequence[np.ndarray]) -> Features:
    made = glm_windows(encoder, clips)
    return {name: made[name] for name in ("input_features", "input_features_mask")}


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
    "glmasr": Family(
        draw=drawn.glmasr,
        kind=transformers.GlmAsrForConditionalGeneration,
        features=glm_features,
        tokens=lambda *clips: glm_windows(*clips)["num_audio_tokens"].tolist(),
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
    if family == "glmasr":  # in windows of two seconds
        mels = config.audio_config.num_mel_bins
        transformers.WhisperFeatureExtractor(mels, chunk_length=2).save_pretrained(folder)
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


@pytest.mark.default_cases("qwen3_asr-0", "voxtral-0", "glmasr-0")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_what_transformers_makes_of_it_clips_of_all_lengths_in_one_row(
    family, seed, tmp_path
):
    model = saved(family, seed, tmp_path)
    encoder = from_hf(tmp_path).encoders["audio"]
    chunk = (encoder.chunk or encoder.clips.window_frames) * HOP
    samples = [
        # less than half a second, which silence completes in Qwen3-ASR; and more than the
        # extractor's chunk_length
        [words(0, 3), clip(3_000), words(1, 4)],
        [words(2, 6)],
        [clip(chunk), words(3, 2), clip(2 * SECOND + 333), clip(chunk + 2 * HOP), words(4, 3)],
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


@pytest.mark.parametrize("family", ["voxtral", "glmasr"])
def test_a_folder_gives_its_encoder_alone_too(family, tmp_path):
    saved(family, 3, tmp_path)
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
            "glmasr",
            {"audio_config": {"intermediate_size": 8}},
            "intermediate_size=8 is a token's width, which must be 4 times hidden_size",
        ),
        (
            "glmasr",
            {
                "audio_config": {
                    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}
                }
            },
            "rope_parameters: known is rope_type='default' over an even number of channels",
        ),
        (
            "glmasr",
            {"audio_config": {"num_key_value_heads": 7}},
            "num_key_value_heads=7 is not supported",
        ),
        ("glmasr", {"audio_config": {"head_dim": 99}}, "head_dim=99 is not supported"),
        (
            "voxtral",
            {"audio_config": {"intermediate_size": 99}},
            "intermediate_size=99 is a token's width, which must be a multiple of hidden_size",
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
