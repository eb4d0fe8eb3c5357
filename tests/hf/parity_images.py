"""Whole models with images: samples packed into one row here, by the loader's own packing, against one by one there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from parity import compare_gradients, loaded

from mmjax.batch import Microbatch
from mmjax.config import ModelConfig
from mmjax.data.index import build_index
from mmjax.data.packing import Arrays, pack_microbatch
from mmjax.data.pipeline import reader_of
from mmjax.data.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.sample import Facts, Item, Sample, Text
from mmjax.training.loss import step_loss, token_losses

Part = np.ndarray  # int [n]: tokens; uint8 [h, w, 3]: an image
Losses = Callable[[torch.nn.Module, Sequence[Part]], tuple[torch.Tensor, np.ndarray]]


@dataclass(frozen=True)
class Parts:
    """A source of samples given as texts and images in their order. Every token of text but a sample's first trains."""

    samples: Sequence[Sequence[Part]]
    encoder: str = "vision"

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> str:
        return "parts"

    def _images(self, index: int) -> list[np.ndarray]:
        return [part for part in self.samples[index] if part.ndim == 3]

    def facts(self, index: int) -> Facts:
        text = sum(len(part) for part in self.samples[index] if part.ndim == 1)
        return Facts(text, tuple((self.encoder, image.shape[:2]) for image in self._images(index)))

    def sample(self, index: int) -> Sample:
        segments: list[Text | Item] = []
        number = 0
        for part in self.samples[index]:
            if part.ndim == 3:
                segments.append(Item(self.encoder, number))
                number += 1
            else:
                weights = np.ones(len(part), np.float32)
                weights[:1] = bool(segments)
                segments.append(Text(part.astype(np.int32), weights))
        return Sample(tuple(segments))

    def item(self, index: int, number: int) -> np.ndarray:
        return self._images(index)[number]


def packed(config: ModelConfig, samples: Sequence[Sequence[Part]], spare: int = 3) -> Microbatch:
    """All samples in one row of the LLM, all images in one row of the encoder, with some padding behind."""
    source, arrays = {"parts": Parts(samples, *config.encoders)}, Arrays.of(config)
    index = build_index(source, config.encoders)
    parts, modules = index.parts(), 1 + len(config.encoders)
    before = np.zeros((modules, len(parts.module)), np.int64)
    for k in range(modules):
        own = np.where(parts.module == k, parts.length, 0)
        before[k] = np.cumsum(own) - own
    totals = parts.totals(modules).sum(0)
    per_token = [1, *index.positions_per_token.tolist()]
    lengths = tuple(int(total + spare * group) for total, group in zip(totals, per_token, strict=True))
    plan = MicrobatchPlan(
        np.arange(len(index)),
        parts.sample_start,
        parts.module,
        np.zeros(len(parts.module), np.int32),
        before[parts.module, np.arange(len(parts.module))],
        parts.length,
        Shape(lengths, (0,) * (modules - 1)),
        (1,) * modules,
        Topology(),
        np.zeros((modules, 1), np.int64),
    )
    return pack_microbatch(plan, arrays, reader_of(source, index))


def check_images(
    model: torch.nn.Module,
    folder: Path,
    samples: Sequence[Sequence[Part]],
    inputs: Callable[[Sequence[Part]], dict[str, Any]],
) -> Microbatch:
    """Logits of every text token to 1e-4, and the gradient of the mean loss over all samples. Gives what was packed.

    inputs: what transformers takes for a sample: `input_ids` [1, n] with as many tokens for each image as here, -
    which are not compared -, pixels, and what else.
    """
    ours, params, config = loaded(folder)
    batch = packed(config, samples)
    count = float(batch.text.weight.sum())

    def loss(params: Any, batch: Microbatch) -> tuple[jax.Array, jax.Array]:
        logits = ours.logits(params, batch)
        return step_loss(token_losses(logits, batch.text), batch.text, count, 1)[0], logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params, jax.tree.map(jnp.asarray, batch))
    logits, losses = np.asarray(logits), []
    for number, parts in enumerate(samples):
        given = inputs(parts)
        theirs = model(**given, use_cache=False).logits[0]
        at = batch.text.sample[0] == number
        text, target, weight = (x[0][at] for x in (batch.text.kind == 1, batch.text.target, batch.text.weight))
        np.testing.assert_array_equal(given["input_ids"][0].numpy()[text], batch.text.token[0][at][text])
        np.testing.assert_allclose(logits[0][at], theirs.detach().numpy(), atol=1e-4, err_msg=f"sample {number}")
        each = torch.nn.functional.cross_entropy(theirs, torch.tensor(target).long(), reduction="none")
        losses.append((each * torch.tensor(weight)).sum())
    (sum(losses) / count).backward()
    compare_gradients(ours, gradients, model)
    return batch
