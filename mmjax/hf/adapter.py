"""PEFT's adapter folders: what their config says, and what their tensors are called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mmjax.config import LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What checkpoints of vision- and audio-language models call their parts, and where these stand in the model now.
MOVED = {
    "language_model.model.": "model.language_model.",
    "model.language_model.": "model.language_model.",
    "model.visual.": "model.visual.",
    "model.vision_tower.": "model.vision_tower.",
    "model.multi_modal_projector.": "model.multi_modal_projector.",
    "model.audio_tower.": "model.audio_tower.",
    "model.": "model.language_model.",
}


def module_path(key: str, alone: bool) -> str:
    """The module whose weight this tensor is, in the class that transformers loads the checkpoint with.

    alone: the checkpoint is a decoder's, and its tensors are named like its modules.
    """
    path = key.removesuffix(".weight")
    if alone:
        return path
    path = path.replace("vision_tower.vision_model.", "vision_tower.")  # as CLIP and SigLIP were wrapped once
    return next((new + path.removeprefix(old) for old, new in MOVED.items() if path.startswith(old)), f"model.{path}")


def tensor_names(path: str) -> tuple[str, str]:
    """Return PEFT's names of the a `[rank, in]` and b `[out, rank]` of a module."""
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def saved_name(path: str, last: str) -> str:
    """Return PEFT's name of the weight or bias of a module in `modules_to_save`."""
    return f"base_model.model.{path}.{last}"


def adapter_config(adapters: Mapping[str, LoraConfig], source: str, alone: bool, saved: Sequence[str] = ()) -> str:
    """The adapter's config as JSON, from the adapter of every module by its path.

    source: the checkpoint's folder. saved: paths of modules that the adapter has whole. alone: as in `module_path`;
    modules then go by their last names, as they mostly do, for all layers have the same. The rank and alpha that most
    modules have are the config's own, others are named. Where some scale by the root of the rank and others do not,
    none does, with alphas that come to the same.
    """
    stabilized = {lora.scaling == "sqrt_rank" for lora in adapters.values()} == {True}
    rank = {path: lora.rank for path, lora in adapters.items()}
    alpha = {path: lora.alpha if stabilized else _plain_alpha(lora) for path, lora in adapters.items()}
    common_rank = _most(list(rank.values()))
    common_alpha = _most(list(alpha.values()))
    config = {
        "base_model_name_or_path": source,
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": stabilized,
        "target_modules": sorted({path.rpartition(".")[2] if alone else path for path in adapters}),
        "modules_to_save": list(saved) or None,
        "rank_pattern": {path: r for path, r in rank.items() if r != common_rank},
        "alpha_pattern": {path: a for path, a in alpha.items() if a != common_alpha},
    }
    return json.dumps(config, indent=2) + "\n"


def _plain_alpha(lora: LoraConfig) -> float:
    return lora.alpha * lora.rank**0.5 if lora.scaling == "sqrt_rank" else lora.alpha


def _most(values: list[float]) -> float:
    return max(values, key=lambda value: (values.count(value), value))
