"""Command A Vision's image processor with Pillow, made of its own code, whose module wants torchvision."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2


@functools.cache
def canvas_of_cohere2() -> Callable[..., tuple[int, int]]:
    """Its choice of the columns and rows of an image's tiles."""
    path = Path(transformers.__file__).parent / "models/cohere2_vision"
    tree = ast.parse((path / "image_processing_cohere2_vision.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {"np": np, "lru_cache": functools.lru_cache}
    exec(compile(tree, str(path), "exec"), names)
    return names["get_optimal_tiled_canvas"]


class Cohere2VisionImageProcessor(got_ocr2.GotOcr2ImageProcessorPil):
    """The processor of GOT-OCR but for the choice of tiles."""

    crop_to_patches = True
    size = {"height": 512, "width": 512}  # noqa: RUF012

    def crop_image_to_patches(self, *arguments: Any, **options: Any) -> list[np.ndarray]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(got_ocr2, "get_optimal_tiled_canvas", canvas_of_cohere2())
            return super().crop_image_to_patches(*arguments, **options)
