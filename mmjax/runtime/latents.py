"""Make the latents of a source's images with a frozen VAE, batched by size, and store them in shards."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Array

from mmjax.config import Generator
from mmjax.data.sample import BadSample, Source
from mmjax.data.storage.files import Unreadable
from mmjax.data.storage.latent_store import VALUES, BadImages, LatentStore, MadeOf, Moments, StoredLatents
from mmjax.errors import BadMedia
from mmjax.hf.vae import vae_fingerprint
from mmjax.runtime.vae import Vae

SHARD_BYTES = 2**28
SHARD_SECONDS = 60.0  # the work that a killed command loses, about
AHEAD = 16  # samples that each thread reads before they are needed
MAX_THREADS = 32
IN_FLIGHT = 2  # batches that devices compute while the next is gathered

# Returns a sample's images that the generator is to make, uint8 [H, W, C]. Raises BadSample and BadMedia.
ReadImages = Callable[[int], list[np.ndarray]]


def read_images(source: Source, generator: str, sample: int) -> list[np.ndarray]:
    """Decode a sample's images that a generator is to make, as the config prepares them."""
    modules = [module for module, _ in source.facts(sample).items]
    return [source.item(sample, number) for number, module in enumerate(modules) if module == generator]


def describe(source: Source, name: str, generator: str, config: Generator) -> MadeOf:
    """Describe what the latents of a source for a generator are made of.

    name: of the source and its split. Hashes the VAE's weights.
    """
    # Of a source of conversations only its records and media count, not how the LLM and encoders take them.
    fingerprint = getattr(source, "media_fingerprint", source.fingerprint)
    return MadeOf(
        source=name,
        generator=generator,
        records=fingerprint(),
        images=repr(config.images),
        vae=vae_fingerprint(config.latents.weights),
    )


def open_latents(source: Source, name: str, generator: str, config: Generator, cache: Path) -> StoredLatents:
    """Open the stored latents of a source for a generator; arguments as of `describe`.

    Raises UserError where they are not all there, which says how to make them.
    """
    folder = describe(source, name, generator, config).folder(cache)
    return StoredLatents(folder, len(source), f"model.generators.{generator}: the latents of {name}")


def make_latents(
    store: LatentStore, read: ReadImages, vae: Vae, progress: Callable[[int], None] = lambda done: None
) -> list[BadImages]:
    """Make the latents that a store lacks; return the samples that have none, and why.

    progress: called with the number of samples done. Raises UserError where a shard can't be written.
    """
    remaining = store.remaining()
    done = store.samples - sum(map(len, remaining))
    bad = []
    progress(done)
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    pool = ThreadPoolExecutor(threads)
    try:
        for gap in remaining:
            shard = _Shard(vae)
            start = gap.start
            for sample, images in zip(gap, _read_ahead(pool, read, gap, AHEAD * threads), strict=True):
                shard.add(sample, images)
                done += 1
                if shard.full or sample + 1 == gap.stop:
                    latents = shard.finish()
                    store.write(range(start, sample + 1), latents, list(shard.bad.values()))
                    bad += shard.bad.values()
                    shard = _Shard(vae)
                    start = sample + 1
                progress(done)
    finally:
        pool.shutdown(cancel_futures=True)
    return bad


def _read_ahead(pool: ThreadPoolExecutor, read: ReadImages, samples: range, ahead: int) -> Iterator[Future]:
    """Read samples in threads, and yield them in order."""
    futures: deque[Future] = deque()
    for sample in samples:
        futures.append(pool.submit(read, sample))
        if len(futures) > ahead:
            yield futures.popleft()
    yield from futures


Key = tuple[int, int]  # sample, and image


@dataclass
class _Shard:
    """The latents of consecutive samples, as far as they are computed."""

    vae: Vae
    bad: dict[int, BadImages] = field(default_factory=dict)  # by sample
    _latents: dict[Key, Moments] = field(default_factory=dict)
    _waiting: dict[tuple[int, int], list[tuple[Key, np.ndarray]]] = field(default_factory=lambda: defaultdict(list))
    _computing: deque[tuple[list[Key], tuple[Array, Array]]] = field(default_factory=deque)
    _bytes: int = 0
    _start: float = field(default_factory=time.monotonic)

    @property
    def full(self) -> bool:
        """Return whether it is large or old enough to be written."""
        return self._bytes >= SHARD_BYTES or time.monotonic() - self._start > SHARD_SECONDS

    def add(self, sample: int, images: Future[list[np.ndarray]]) -> None:
        """Add a sample's images, and compute every batch that has come together."""
        try:
            read = images.result()
            for image in read:
                self._check(image)
        except (BadSample, BadMedia) as error:
            self.bad[sample] = BadImages(sample, str(error), retry=isinstance(error, Unreadable))
            return
        config = self.vae.config
        for number, image in enumerate(read):
            size = image.shape[:2]
            self._waiting[size].append(((sample, number), image))
            latents = size[0] * size[1] // config.factor**2
            self._bytes += 2 * VALUES.itemsize * config.channels * latents
            if len(self._waiting[size]) == self.vae.batch(*size):
                self._compute(size)

    def _check(self, image: np.ndarray) -> None:
        """Raise BadMedia where the VAE cannot take an image."""
        height, width, channels = image.shape
        config = self.vae.config
        if height % config.factor or width % config.factor:
            raise BadMedia(
                f"an image is prepared as {height} x {width} pixels, and the VAE takes multiples of {config.factor}"
            )
        if channels != config.image_channels:
            raise BadMedia(f"an image has {channels} channels, and the VAE takes {config.image_channels}")

    def _compute(self, size: tuple[int, int]) -> None:
        waiting = self._waiting.pop(size)
        images = np.stack([image for _, image in waiting])
        self._computing.append(([key for key, _ in waiting], self.vae.encode(images)))
        if len(self._computing) > IN_FLIGHT:
            self._collect()

    def _collect(self) -> None:
        keys, moments = self._computing.popleft()
        with np.errstate(over="ignore"):  # infinite values are looked for
            means, log_variances = (np.asarray(part).astype(VALUES) for part in moments)
        # Behind the images of an incomplete batch there are others, which nobody asked for.
        self._latents |= {key: Moments(*pair) for key, *pair in zip(keys, means, log_variances, strict=False)}

    def finish(self) -> dict[Key, Moments]:
        """Compute what is waiting; return the latents of all samples that are not bad: with any that are not finite."""
        for size in list(self._waiting):
            self._compute(size)
        while self._computing:
            self._collect()
        for (sample, image), moments in self._latents.items():
            if not np.isfinite(moments).all():
                self.bad[sample] = BadImages(sample, f"the VAE's latents of its image {image} are not finite")
        return {key: moments for key, moments in self._latents.items() if key[0] not in self.bad}
