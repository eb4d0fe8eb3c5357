"""Write checkpoints: safetensors tensor by tensor, folders with other values in the same places, LoRA adapters."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from mmjax.config import LoraConfig
from mmjax.errors import UserError
from mmjax.hf.folder import CHUNK, DTYPES, HfFolder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What checkpoints of vision- and audio-language models call their parts, and where these stand in
# the model now. Longer prefixes come first, for the first one that fits is taken.
MOVED = {
    "language_model.lm_head": "lm_head",
    "lm_head": "lm_head",
    "model.language_model.model.": "model.language_model.",
    "language_model.model.": "model.language_model.",
    "model.language_model.": "model.language_model.",
    "model.visual.": "model.visual.",
    "model.vision_tower.": "model.vision_tower.",
    "model.image_tower.": "model.image_tower.",
    "model.multi_modal_projector.": "model.multi_modal_projector.",
    "model.audio_tower.": "model.audio_tower.",
    "model.vision_model.": "model.vision_model.",
    "model.vision_projector": "model.projector",
    "model.projector.layers": "model.multi_modal_projector",  # of DeepSeek-OCR 2, as its parts below
    "model.projector": "model.projector",
    "model.sam_model.blocks.": "model.vision_tower.sam_encoder.layers.",
    "model.qwen2_model.model.model.": "model.vision_tower.vision_encoder.",
    **{
        f"model.{theirs}": f"model.vision_tower.{now}"
        for theirs, now in {
            "qwen2_model.query_768": "query_768_resolution",
            "qwen2_model.query_1024": "query_1024_resolution",
            "sam_model.patch_embed.proj": "sam_encoder.patch_embed.projection",
            "sam_model.neck.0": "sam_encoder.neck.conv1",
            "sam_model.neck.1": "sam_encoder.neck.layer_norm1",
            "sam_model.neck.2": "sam_encoder.neck.conv2",
            "sam_model.neck.3": "sam_encoder.neck.layer_norm2",
            "sam_model.net_2": "sam_encoder.proj.conv1",
            "sam_model.net_3": "sam_encoder.proj.conv2",
        }.items()
    },
    "model.mm_projector.": "model.mm_projector.",
    "mlp_AR.": "model.projector.",  # PaddleOCR-VL's
    "model.": "model.language_model.",
    # Cosmos 3's
    **{name: f"model.language_model.{name}" for name in ("layers.", "embed_tokens", "norm.")},
    **{name: f"model.visual.{name}" for name in ("blocks.", "merger.", "patch_embed.")},
    "deepstack_merger_list.": "model.visual.deepstack_merger_list.",
}


RENAMED = {  # the projections of DINOv2's towers, and of Cosmos 3
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "self_attn.to_q": "self_attn.q_proj",
    "self_attn.to_k": "self_attn.k_proj",
    "self_attn.to_v": "self_attn.v_proj",
    "self_attn.to_out": "self_attn.o_proj",
}
UNIFIED = {  # of Gemma 4 without towers alone
    "vision_embedder.": "embed_vision.",
    "embed_vision.": "embed_vision.multimodal_embedder.",
}
MOON = "vision_tower.encoder.blocks."  # of Kimi K2.5's tower, whose modules have other names now
MOON_MODULES = {
    "norm0": "norm1",
    "norm1": "norm2",
    "wo": "attn.proj",
    "mlp.fc0": "mlp.fc1",
    "mlp.fc1": "mlp.fc2",
}
MOON_BESIDE = {  # its layers
    "vision_tower.encoder.patch_embed.proj": "model.vision_tower.patch_embed.proj",
    "vision_tower.encoder.final_layernorm": "model.vision_tower.final_layernorm",
    "mm_projector.proj.0": "model.mm_projector.in_proj",
    "mm_projector.proj.2": "model.mm_projector.out_proj",
}
# that transformers makes other tensors of: experts, and the matrices and positions of Kimi's tower
NO_MODULES = ("*.experts.*", "vision_tower.*.wqkv", "vision_tower.*.pos_emb")
WHOLE = "thinker."  # what the tensors of a thinker begin with inside a whole checkpoint
ModuleNames = Literal[
    "decoder", "named", "unified", "wrapped"
]  # see `Checkpoints`; a decoder's are named too


def module_path(key: str, names: ModuleNames) -> str:
    """The module whose weight this tensor is, in the class that transformers or diffusers loads the checkpoint with."""
    path = key.removesuffix(".weight")
    renamed = UNIFIED if names == "unified" else RENAMED
    path = next((path.replace(old, new) for old, new in renamed.items() if old in path), path)
    if names != "wrapped":
        return path
    if path.startswith(WHOLE):
        return WHOLE + module_path(path.removeprefix(WHOLE), names)
    if path.startswith(MOON):
        number, _, module = path.removeprefix(MOON).partition(".")
        return f"model.vision_tower.layers.{number}.{MOON_MODULES.get(module, module)}"
    path = path.replace("language_model.model.blocks.", "language_model.model.layers.")
    # as CLIP and SigLIP were wrapped once
    path = path.replace("vision_tower.vision_model.", "vision_tower.")
    return MOON_BESIDE.get(path) or next(
        (new + path.removeprefix(old) for old, new in MOVED.items() if path.startswith(old)),
        f"model.{path}",
    )


def has_module(key: str) -> bool:
    """Tell whether this tensor is the weight or bias of a module where transformers loads the checkpoint."""
    path, _, last = key.rpartition(".")
    return last in ("weight", "bias") and not any(fnmatchcase(path, x) for x in NO_MODULES)


def tensor_names(path: str) -> tuple[str, str]:
    """Return PEFT's names of the a `[rank, in]` and b `[out, rank]` of a module."""
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def magnitude_name(path: str) -> str:
    """Return PEFT's name of the lengths `[out]` that DoRA trains of a module."""
    return f"base_model.model.{path}.lora_magnitude_vector"


def saved_name(path: str, last: str) -> str:
    """Return PEFT's name of the weight or bias of a module in `modules_to_save`."""
    return f"base_model.model.{path}.{last}"


def adapter_config(
    adapters: Mapping[str, LoraConfig], source: str, decoder_only: bool, saved: Sequence[str] = ()
) -> str:
    """The adapter's config as JSON, from the adapter of every module by its path.

    source: the checkpoint's folder. saved: paths of modules that the adapter has whole.
    decoder_only: the checkpoint is a decoder's; modules then go by their last names, as they mostly
    do, for all layers have the same. The rank and alpha that most modules have are the config's
    own, others are named. Where some scale by the root of the rank and others do not, none does,
    with alphas that come to the same.
    """
    # PEFT has one switch for all modules, so mixed scalings are written as plain ones with other
    # alphas.
    stabilized = {lora.scaling == "sqrt_rank" for lora in adapters.values()} == {True}
    rank = {path: lora.rank for path, lora in adapters.items()}
    alpha = {
        path: lora.alpha if stabilized else _plain_alpha(lora) for path, lora in adapters.items()
    }
    common_rank = _most_common(list(rank.values()))
    common_alpha = _most_common(list(alpha.values()))
    config = {
        "base_model_name_or_path": source,
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "r": common_rank,
        "lora_alpha": common_alpha,
        "lora_dropout": max(lora.dropout for lora in adapters.values()),
        "bias": "none",
        "use_rslora": stabilized,
        "use_dora": all(lora.dora for lora in adapters.values()),
        "target_modules": sorted(
            {path.rpartition(".")[2] if decoder_only else path for path in adapters}
        ),
        "modules_to_save": list(saved) or None,
        "rank_pattern": {path: r for path, r in rank.items() if r != common_rank},
        "alpha_pattern": {path: a for path, a in alpha.items() if a != common_alpha},
    }
    return json.dumps(config, indent=2) + "\n"


def _plain_alpha(lora: LoraConfig) -> float:
    return lora.alpha * lora.rank**0.5 if lora.scaling == "sqrt_rank" else lora.alpha


def _most_common(values: list[float]) -> float:
    return max(values, key=lambda value: (values.count(value), value))


# Weights in other formats, or of others: nobody who reads the folder must find old ones.
WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
    "*.gguf",
)
ALIGNED = 8  # bytes: a header's length is a multiple, as of the library's own

# a tensor's new value by its name; None: it stays as it is
Changed = Callable[[str], np.ndarray | None]


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written, which is made when its turn comes."""

    dtype: str  # the format's name, such as BF16
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_tensors(path: Path, tensors: Mapping[str, NewTensor]) -> None:
    """A safetensors file, made tensor by tensor."""
    header = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # JSON may end in spaces, and tensors then begin at multiples of 8.
    text += b" " * (-len(text) % ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            _write(file, tensor.make(), tensor.dtype, tensor.shape)


def rewrite_tensors(folder: HfFolder, file: Path, out: Path, changed: Changed) -> int:
    """A file of a folder's tensors again: its header byte for byte, its tensors in their places, some changed.

    Tensors are asked for in the order in which they lie there. Returns how many were changed.
    """
    tensors = {name: stored for name, stored in folder.tensors.items() if stored.file == file}
    count = 0
    with file.open("rb") as source, out.open("wb") as target:
        for name, stored in sorted(tensors.items(), key=lambda pair: pair[1].begin):
            _copy(source, target, stored.begin)  # the header, or what lies between tensors
            value = changed(name)
            if value is None:
                _copy(source, target, stored.begin + stored.size)
            else:
                _write(target, value, stored.dtype, stored.shape)
                # Both files have the same layout, so where the target stands the source goes on.
                source.seek(target.tell())
                count += 1
        _copy(source, target, file.stat().st_size)
    return count


def copy_beside(folder: HfFolder, out: Path) -> list[str]:
    """Everything in a folder but weights, byte for byte, into another; the names of what was left out.

    Left out are hidden files, and weights, with their index, that the folder does not take its
    tensors from.
    """
    read = {stored.file for stored in folder.tensors.values()}
    skipped = []
    for path in sorted(folder.path.rglob("*")):
        name = path.relative_to(folder.path)
        if path.is_dir() or any(part.startswith(".") for part in name.parts) or path in read:
            continue
        if any(path.match(pattern) for pattern in WEIGHTS) or (
            path.name == folder.index and folder.path / folder.single in read
        ):
            skipped.append(str(name))
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / name)
    return skipped


def _copy(source: BinaryIO, target: BinaryIO, end: int) -> None:
    """Bytes up to `end`, from where both files stand."""
    while (remaining := end - source.tell()) > 0:
        if not (piece := source.read(min(CHUNK, remaining))):
            raise UserError(f"{source.name} ends too soon; copy the checkpoint again")
        target.write(piece)


def _write(file: BinaryIO, value: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"a tensor of shape {value.shape} does not go into one of shape {shape}")
    stored = (
        np.ascontiguousarray(value.astype(DTYPES[dtype], copy=False)).reshape(-1).view(np.uint8)
    )
    for begin in range(0, len(stored), CHUNK):
        file.write(memoryview(stored[begin : begin + CHUNK]))
