"""Compute a prompt with transformers: ``python -m mmjax.inference.transformers_answer REQUEST.json``.

Started by `transformers_process`; writes its answer beside the request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from PIL import Image
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.utils import is_torchvision_available

from mmjax.errors import UserError, exit_process, run_command
from mmjax.inference.transformers_process import ANSWER, Request

SAFE = {"trust_remote_code": False, "local_files_only": True}  # executes and fetches nothing


def processor_of(folder: str) -> transformers.ProcessorMixin:
    """Load the processor of images and clips; torchvision, which its part for videos needs, may be missing."""
    if not is_torchvision_available():
        AutoVideoProcessor.from_pretrained = lambda *_, **__: None
        transformers.ProcessorMixin.check_argument_for_proper_class = lambda *_: None
    processor = transformers.AutoProcessor.from_pretrained(folder, **SAFE)
    if hasattr(processor, "image_processor"):
        # Some kernels of torchvision round otherwise than PIL, which prepares images in mmjax.
        images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **SAFE)
        processor.image_processor = images
    return processor


def inputs_of(request: Request) -> Mapping[str, Any]:
    """Prepare the model's inputs with the folder's own processor. Raises UserError for a clip of another rate."""
    if request.tokens:
        return {"input_ids": torch.tensor([request.tokens])}
    options: dict[str, Any] = {
        "add_generation_prompt": True,
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
    }
    if not request.media:
        message = {"role": "user", "content": request.question}
        tokenizer = transformers.AutoTokenizer.from_pretrained(request.folder, **SAFE)
        return tokenizer.apply_chat_template([message], **options)
    processor = processor_of(request.folder)
    content: list[dict[str, Any]] = []
    for kind, file in request.media.items():
        if kind == "image":
            content.append({"type": kind, kind: Image.open(file).convert("RGB")})
            continue
        samples, rate = soundfile.read(file, dtype="float32")
        if rate != (wanted := processor.feature_extractor.sampling_rate):
            raise UserError(f"--audio {file}: it has {rate} samples a second; give one of {wanted}")
        content.append({"type": kind, kind: samples})
    content.append({"type": "text", "text": request.question})
    return processor.apply_chat_template([{"role": "user", "content": content}], **options)


def main() -> None:
    """Answer the request that the command line names."""
    path = Path(sys.argv[1])
    request = Request(**json.loads(path.read_text()))
    inputs = inputs_of(request)
    dtype = getattr(torch, request.dtype)
    kind = getattr(transformers, request.class_name)
    options = {"dtype": dtype, "attn_implementation": "eager", "use_safetensors": True}
    loaded = kind.from_pretrained(request.folder, **options, **SAFE)
    model = getattr(loaded, "thinker", loaded).eval()  # of Qwen's Omni models
    given = {
        name: x.to(dtype) if torch.is_floating_point(x) else x
        for name, x in inputs.items()
        if isinstance(x, torch.Tensor)
    }
    with torch.no_grad():
        logits = model(**given, use_cache=False).logits[0]
        written = model.generate(
            **given,
            do_sample=False,
            max_new_tokens=request.max_tokens,
            eos_token_id=request.ends or None,
        )
    ids = given["input_ids"][0]
    np.savez(
        path.with_name(ANSWER),
        ids=ids.numpy(),
        logits=logits.float().numpy(),
        answer=written[0, len(ids) :].numpy(),
        version=transformers.__version__,
    )


if __name__ == "__main__":
    exit_process(run_command(main))
