"""LFM2-VL's image processor with Pillow, made of its own code, whose module wants torchvision."""

from __future__ import annotations
import __future__

import ast
import functools
import json
import math
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


class Pillows:
    """What the class is made on: resizing by Pillow, one image at a time."""

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

    def rescale_and_normalize(
        self, images: torch.Tensor, rescale: bool, factor: float, normalize: bool, *by: Any
    ) -> torch.Tensor:
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in by)
        images = images.float() * factor if rescale else images.float()
        return (images - mean) / std if normalize else images

    def __call__(self, images: Sequence[Image.Image]) -> BatchFeature:
        given = [torch.tensor(np.asarray(image)).permute(2, 0, 1) for image in images]
        fields = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        fields |= {"return_row_col_info": True, "return_tensors": "pt", "disable_grouping": None}
        return self._preprocess(given, **fields)

    def save(self, folder: Path) -> None:
        """Write what differs from the class, as a folder has it."""
        said = {"image_processor_type": "Lfm2VlImageProcessor", **vars(self)}
        (folder / "preprocessor_config.json").write_text(json.dumps(said))


def _made() -> type:
    path = Path(transformers.__file__).parent / "models/lfm2_vl/image_processing_lfm2_vl.py"
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.ClassDef) and node.name == "Lfm2VlImageProcessor")
    ]
    made = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    made.decorator_list = []
    # Its own sets what no image depends on.
    made.body = [node for node in made.body if getattr(node, "name", "") != "__init__"]
    names = vars(image_utils) | vars(image_transforms)
    names |= {"torch": torch, "math": math, "lru_cache": functools.lru_cache}
    names |= {"TorchvisionBackend": Pillows, "BatchFeature": BatchFeature}
    names |= {"logger": SimpleNamespace(debug=print), "Lfm2VlImageProcessorKwargs": None}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags), names)
    return names["Lfm2VlImageProcessor"]


Lfm2VlImageProcessor = _made()
