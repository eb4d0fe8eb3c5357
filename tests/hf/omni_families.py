"""What differs between the thinkers of Qwen2.5-Omni and Qwen3-Omni in transformers, and models of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import drawn
import numpy as np
import torch
import transformers
from checkpoints import QWEN2_VL
from parity import random_model
from test_audio_towers import RATE, extractor_of, features_there
from transformers import Qwen2_5OmniProcessor, Qwen3OmniMoeProcessor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from mmjax.config import AudioConfig

IMAGE, VIDEO, AUDIO, VISION_START, AUDIO_START, AUDIO_END = 90, 91, 92, 93, 94, 95


@dataclass(frozen=True)
class Family:
    """What differs between the families."""

    draw: Callable[..., transformers.PreTrainedConfig]
    thinker: type
    whole: tuple[type, type]  # model and config
    processor: type
    token_field: str
    image: str  # token
    video: str
    audio: str
    marks: tuple[str, str, str, str]  # around what is seen, and what is heard
    features: Callable[[AudioConfig, list[np.ndarray]], dict[str, torch.Tensor]]
    audio_tokens: Callable[[int, int], int]  # of so many frames, and half a chunk

    @property
    def names(self) -> dict[str, str]:
        return {"image": self.image, "video": self.video, "audio": self.audio}


def features_alone(encoder: AudioConfig, clips: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """What Qwen3-Omni's processor gives its model of each clip by itself; of several it pads all but the longest."""
    made = [
        extractor_of(encoder)(
            wave,
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        for wave in clips
    ]
    longest = max(m["attention_mask"].shape[1] for m in made)
    pad = lambda x: torch.nn.functional.pad(x, (0, longest - x.shape[-1]))  # noqa: E731
    names = {"input_features": "input_features", "feature_attention_mask": "attention_mask"}
    return {name: torch.cat([pad(m[key]) for m in made]) for name, key in names.items()}


class EachClipAlone(Qwen3OmniMoeAudioEncoder):
    """The tower of Qwen3-Omni, which there pads the last chunks of all clips to the longest, and changes them so."""

    def forward(
        self, input_features: torch.Tensor, feature_lens: torch.Tensor, **kwargs: Any
    ) -> Any:
        pairs = zip(input_features.split(feature_lens.tolist(), dim=1), feature_lens, strict=True)
        outputs = [super(EachClipAlone, self).forward(x, feature_lens=n[None]) for x, n in pairs]
        return BaseModelOutputWithPooling(
            last_hidden_state=torch.cat([o.last_hidden_state for o in outputs])
        )


FAMILIES = {
    "qwen2_5_omni": Family(
        draw=drawn.qwen2_5_omni,
        thinker=transformers.Qwen2_5OmniThinkerForConditionalGeneration,
        whole=(transformers.Qwen2_5OmniForConditionalGeneration, transformers.Qwen2_5OmniConfig),
        processor=Qwen2_5OmniProcessor,
        token_field="{}_token_index",
        image="<|IMAGE|>",
        video="<|VIDEO|>",
        audio="<|AUDIO|>",
        marks=("<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
        features=features_there,
        audio_tokens=lambda frames, half: ((frames - 1) // 2 + 1 - 2) // 2 + 1,
    ),
    "qwen3_omni_moe": Family(
        draw=drawn.qwen3_omni_moe,
        thinker=transformers.Qwen3OmniMoeThinkerForConditionalGeneration,
        whole=(transformers.Qwen3OmniMoeForConditionalGeneration, transformers.Qwen3OmniMoeConfig),
        processor=Qwen3OmniMoeProcessor,
        token_field="{}_token_id",
        image="<|image_pad|>",
        video="<|video_pad|>",
        audio="<|audio_pad|>",
        marks=("<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
        features=features_alone,
        audio_tokens=modeling_qwen3_omni_moe._get_feat_extract_output_lengths,
    ),
}


def thinker(
    rng: np.random.Generator, family: str, vocab: int = 97, **tokens: int
) -> torch.nn.Module:
    tokens = tokens or {
        "image": IMAGE,
        "video": VIDEO,
        "audio": AUDIO,
        "see": VISION_START,
        "hear": AUDIO_START,
    }
    given = {
        FAMILIES[family].token_field.format(kind): tokens[kind]
        for kind in ("image", "video", "audio")
    }
    marks = {"vision_start_token_id": tokens["see"], "audio_start_token_id": tokens["hear"]}
    config = FAMILIES[family].draw(rng, vocab, **given, **marks)
    config.text_config.max_position_embeddings = max(
        config.text_config.max_position_embeddings, 4 * vocab
    )
    for part in (config.text_config, config.vision_config, config.audio_config):
        part._attn_implementation = "eager"
    model = random_model(config, FAMILIES[family].thinker)
    if family == "qwen3_omni_moe":
        model.model.audio_tower.__class__ = EachClipAlone
    return model


def rope_index(model: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Of Qwen2.5-Omni it is the thinker's, of Qwen3-Omni that of the model inside."""
    return getattr(model, "get_rope_index", None) or model.model.get_rope_index


def template_of(family: Family) -> str:
    """Qwen2-VL's template, with clips, by the family's tokens."""
    hear = "".join((family.marks[2], family.audio, family.marks[3]))
    template = QWEN2_VL.replace(
        "{% elif 'text' in content %}",
        f"{{% elif content['type'] == 'audio' %}}{hear}{{% elif 'text' in content %}}",
    )
    old = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    for token, new in zip(old, (*family.marks[:2], family.image, family.video), strict=True):
        template = template.replace(token, new)
    return template


def rate_of(config: transformers.PreTrainedConfig) -> float:
    """Frames per second; of Qwen3-Omni a temporal patch takes whole positions then."""
    if config.model_type == "qwen2_5_omni_thinker":
        return 3.0
    return 1.0 + (
        config.position_id_per_seconds * config.vision_config.temporal_patch_size % 2 == 0
    )
