"""Image processors of LFM2-VL, Llama 4 and Gemma 4 Unified with Pillow, of their own code, which wants torchvision."""

from __future__ import annotations
import __future__

import ast
import functools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import image_transforms, image_utils
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import SizeDict


class Pillows:
    """What the classes are made on: resizing by Pillow, one image at a time, and torchvision's arithmetic."""

    rescale_factor = 1 / 255

    def __init__(self, **fields: Any):
        for name, value in fields.items():
            setattr(self, name, value)

    def resize(self, images: torch.Tensor, size: Any, resample: int, **_: Any) -> torch.Tensor:
        to = (size.width, size.height)
        made = [
            np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).resize(to, resample))
            for image in images
        ]
        return torch.tensor(np.stack(made)).permute(0, 3, 1, 2)

    def normalize(self, images: torch.Tensor, *by: Any) -> torch.Tensor:
        mean, std = (torch.as_tensor(x, dtype=images.dtype)[:, None, None] for x in by)
        return images.sub(mean).div_(std)

    def rescale_and_normalize(
        self, images: torch.Tensor, rescale: bool, factor: float, normalize: bool, *by: Any
    ) -> torch.Tensor:
        images = images.float() * factor if rescale else images.float()
        return self.normalize(images, *by) if normalize else images

    def __call__(self, images: Sequence[Image.Image]) -> BatchFeature:
        given = [torch.tensor(np.asarray(image)).permute(2, 0, 1) for image in images]
        fields = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        fields |= {"return_row_col_info": True, "return_tensors": "pt", "disable_grouping": None}
        if isinstance(fields.get("size"), dict):
            fields["size"] = SizeDict(**fields["size"])
        return self._preprocess(given, **fields)

    def save(self, folder: Path) -> None:
        """Write what differs from the class, as a folder has it."""
        said = {"image_processor_type": type(self).__name__, **vars(self)}
        (folder / "preprocessor_config.json").write_text(json.dumps(said))


def pad(images: torch.Tensor, padding: Sequence[int], fill: Sequence[int]) -> torch.Tensor:
    """Pad as torchvision does, with one value for all channels."""
    left, top, right, bottom = padding
    (value,) = set(fill)
    return torch.nn.functional.pad(images, (left, right, top, bottom), value=value)


def resize(
    image: torch.Tensor, size: Sequence[int], interpolation: int, antialias: bool
) -> torch.Tensor:
    """Resize one image as torchvision does where it is told to be as Pillow."""
    assert antialias
    return Pillows().resize(image[None], SizeDict(*size), interpolation)[0]


def _made(model: str, name: str) -> type:
    path = Path(transformers.__file__).parent / f"models/{model}/image_processing_{model}.py"
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple))
        or (isinstance(node, ast.ClassDef) and node.name == name)
    ]
    made = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    made.decorator_list = []
    # Their own sets what no image depends on.
    made.body = [
        node for node in made.body if getattr(node, "name", "") not in ("__init__", "preprocess")
    ]
    names = vars(image_utils) | vars(image_transforms)
    names |= {"torch": torch, "math": math, "lru_cache": functools.lru_cache}
    names |= {"TorchvisionBackend": Pillows, "BatchFeature": BatchFeature}
    names |= {"defaultdict": defaultdict, "tvF": SimpleNamespace(pad=pad, resize=resize)}
    names |= {"logger": SimpleNamespace(debug=print), f"{name}Kwargs": None}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags), names)
    return names[name]


Lfm2VlImageProcessor = _made("lfm2_vl", "Lfm2VlImageProcessor")
Llama4ImageProcessor = _made("llama4", "Llama4ImageProcessor")
Gemma4UnifiedImageProcessor = _made("gemma4_unified", "Gemma4UnifiedImageProcessor")
