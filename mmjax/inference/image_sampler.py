"""Images that a model's generators make of prompts, many at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from mmjax.batch import COLUMN, ROW, ItemBatch, Microbatch
from mmjax.config import Generator
from mmjax.config.model import tower_key
from mmjax.data.plan.placement import Topology
from mmjax.data.sample import Source
from mmjax.errors import UserError
from mmjax.inference.prompt_rows import BatchLimits, PromptRows
from mmjax.models.generation import pixels_of
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.parallel.sharding import CONTEXT, ShardingRules, activations_on, replicated, row_ranks
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.vae import Vae, decode_pictures, load_vae

MAX_STEPS = 1000
BORDER = 2  # pixels between the images of a contact sheet


@dataclass(frozen=True)
class ImageSampling:
    """Sample images with Euler's method and classifier-free guidance."""

    steps: int = 20
    guidance: float = 4.0  # 1: none
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise UserError(f"steps={self.steps}: choose 1 to {MAX_STEPS}")
        if not self.guidance >= 0:
            raise UserError(f"guidance={self.guidance}: choose 1 (no guidance) or more")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed}: choose 0 to {2**31 - 1}")


class SampledImage(NamedTuple):
    """An image made for a prompt."""

    prompt: int  # its number in the source
    number: int  # of the image among the prompt's images of this generator
    generator: str
    pixels: np.ndarray  # uint8 [H, W, C]


class ImageSampler:
    """Sample the images of prompts with a model on a mesh: one program for each shape that batches have."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rules: ShardingRules,
        sampling: ImageSampling | None = None,
        batch_limits: BatchLimits | None = None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._rules = rules
        self._sampling = sampling or ImageSampling()
        self._batch_limits = batch_limits
        encoders_per_rank = row_ranks(mesh, rules.item_rows) // row_ranks(mesh, rules.rows)
        context = mesh.shape[CONTEXT]
        self._topology = Topology(
            row_ranks(mesh, rules.rows), encoders_per_rank=encoders_per_rank, context=context
        )
        self._vaes: dict[str, Vae] = {}  # of generators, loaded when first needed
        self._sample = jax.jit(self._sampled, out_shardings=replicated(mesh))

    def images(
        self, params: Params, prompts: Source, unreadable: dict[int, str] | None = None
    ) -> Iterator[SampledImage]:
        """Yield the images of all prompts, a batch at a time.

        prompts: samples with places of images to be made. unreadable: gets prompts that cannot be
        read, and why; without it they are errors.
        """
        config = self._model.config
        rows = PromptRows(prompts, config, self._topology, 0, self._batch_limits)
        for _, batch in rows.batches(unreadable=unreadable):
            latents = jax.device_get(self._sample(params, put_rows(batch, self._mesh, self._rules)))
            for name, patches in latents.items():
                sampled = list(latents_of_images(config.towers[name], batch.items[name], patches))
                pixels = self._pixels(name, [image.latents for image in sampled])
                for image, picture in zip(sampled, pixels, strict=True):
                    yield SampledImage(image.prompt, image.number, name, picture)

    def _pixels(self, name: str, latents: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute the pixels uint8 `[H, W, C]` of images from their latents, with the generator's VAE if it has one."""
        model = self._model.config
        form = model.towers[name].latents
        if form.kind == "pixels":
            return [pixels_of(form, image) for image in latents]
        if name not in self._vaes:
            self._vaes[name] = load_vae(form, f"{tower_key(model, name)}.latents")
        pictures: dict[int, np.ndarray] = {}
        for shape in {image.shape for image in latents}:
            numbers = [k for k, image in enumerate(latents) if image.shape == shape]
            decoded = decode_pictures(np.stack([latents[k] for k in numbers]), self._vaes[name])
            pictures |= zip(numbers, decoded, strict=True)
        return [pictures[k] for k in range(len(latents))]

    def _sampled(self, params: Params, batch: Microbatch) -> dict[str, Any]:
        noise = np.array([self._sampling.seed, 0], np.uint32)
        with activations_on(self._mesh, self._rules):
            return self._model.sample_images(
                params, batch, noise, self._sampling.steps, self._sampling.guidance
            )


class SampledLatents(NamedTuple):
    """The latents of an image made for a prompt."""

    prompt: int  # its number in the source
    number: int  # of the image among the prompt's images of this generator
    latents: np.ndarray  # float32 [h, w, c]


def latents_of_images(
    generator: Generator, items: ItemBatch, patches: np.ndarray
) -> Iterator[SampledLatents]:
    """Cut the images' latents out of a generator's rows `[R, L, F]`, by prompt and number."""
    places = []
    for row in range(len(patches)):
        for number in range(int(items.item[row].max(initial=-1)) + 1):
            slots = np.flatnonzero(items.item[row] == number)
            places.append(
                (int(items.owner[row, slots[0]]), int(items.offset[row, slots[0]]), row, slots)
            )
    # A prompt's images follow each other by the offsets of their first patches in it.
    for prompt, images in groupby(
        sorted(places, key=lambda place: place[:2]), key=lambda place: place[0]
    ):
        for number, (_, _, row, slots) in enumerate(images):
            rows, columns = (items.coordinates[row, slots].max(0) + 1)[[ROW, COLUMN]]
            size = generator.patch
            latents = patches[row, slots].reshape(rows, columns, size, size, -1).swapaxes(1, 2)
            yield SampledLatents(prompt, number, latents.reshape(rows * size, columns * size, -1))


def contact_sheet(images: Sequence[np.ndarray], columns: int = 0) -> np.ndarray:
    """Lay out images uint8 `[H, W, C]` in rows with black borders: uint8 `[H', W', C]`. columns: 0: about a square."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    rows = -(-len(images) // columns)
    sheet = np.zeros(
        (rows * (height + BORDER) + BORDER, columns * (width + BORDER) + BORDER, 3), np.uint8
    )
    for number, image in enumerate(images):
        y, x = (
            BORDER + place * (side + BORDER)
            for place, side in zip(divmod(number, columns), (height, width), strict=True)
        )
        sheet[y : y + image.shape[0], x : x + image.shape[1]] = image
    return sheet


def write_image(image: np.ndarray, path: Path) -> None:
    """Write an image uint8 `[H, W, C]` in the format that the path's suffix names. Raises OSError and ValueError."""
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(path)
