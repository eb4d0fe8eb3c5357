"""A tiny Qwen2-Audio checkpoint with its tokenizer, template and extractor, and clips with questions for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    TokenizersBackend,
    WhisperFeatureExtractor,
)

RATE, SECONDS = 16_000, 1
TONES = {"low": 220.0, "high": 1760.0}
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_bos|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}{{ '<|audio_bos|><|AUDIO|><|audio_eos|>\n' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_checkpoint(folder: Path) -> Path:
    """A Qwen2-Audio of a few thousand parameters, as `transformers` saves it, with all that serves it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [f"user assistant Is the tone low or high? {tone}" for tone in TONES] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer = TokenizersBackend(
        tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tower = {
        "d_model": 24,
        "encoder_layers": 1,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
    }
    torch.manual_seed(0)
    config = Qwen2AudioConfig(
        audio_config={**tower, "num_mel_bins": 80, "max_source_positions": 50 * SECONDS},
        text_config={**text, "num_key_value_heads": 2, "vocab_size": len(tokenizer)},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(80, chunk_length=SECONDS).save_pretrained(folder)
    return folder


def save_clips(folder: Path, count: int) -> dict[str, Path]:
    """Clips of a low or a high tone, and two files that ask for it: a manifest, and LLaVA-style records."""
    (folder / "clips").mkdir(parents=True)
    rng, lines, records = np.random.default_rng(0), [], []
    for i in range(count):
        tone = list(TONES)[i % 2]
        time = np.arange(int(rng.integers(RATE // 4, RATE * SECONDS))) / RATE
        soundfile.write(
            folder / "clips" / f"{i}.wav", 0.3 * np.sin(2 * np.pi * TONES[tone] * time), RATE
        )
        lines.append(
            {"audio_filepath": f"{i}.wav", "text": tone, "prompt": "Is the tone low or high?"}
        )
        turns = [
            {"from": "human", "value": "<audio>\nIs the tone low or high?"},
            {"from": "gpt", "value": tone},
        ]
        records.append({"audio": f"{i}.wav", "conversations": turns})
    files = {"manifest": folder / "manifest.jsonl", "llava": folder / "llava.json"}
    files["manifest"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    files["llava"].write_text(json.dumps(records))
    return files
