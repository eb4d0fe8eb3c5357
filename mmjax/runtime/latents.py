"""Make the latents of a source's images with a frozen VAE, batched by size, and store them in shards."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Array

from mmjax.config import Config, Generator, ModelConfig
from mmjax.config.model import tower_key
from mmjax.console import ProgressLine, print_lines, print_note, size
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.sample import BadSample, Source
from mmjax.data.sources.chat_source import BadSampleEntry
from mmjax.data.sources.opening import SPLITS, cache_folder, open_sources, part_name
from mmjax.data.storage.files import Unreadable
from mmjax.data.storage.latent_store import (
    VALUES,
    BadImages,
    Contents,
    LatentStore,
    MadeOf,
    Moments,
)
from mmjax.errors import BadMedia, UserError
from mmjax.hf.vae import vae_fingerprint
from mmjax.runtime.vae import Vae, load_vae

SHARD_BYTES = 2**28
SHARD_SECONDS = 60.0  # the work that a killed command loses, about
AHEAD = 16  # samples that each thread reads before they are needed
MAX_THREADS = 32
IN_FLIGHT = 2  # batches that devices compute while the next is gathered

# Returns a sample's images that the generator is to make, uint8 [H, W, C]. Raises BadSample and
# BadMedia.
ReadImages = Callable[[int], list[np.ndarray]]


def vae_generators(model: ModelConfig) -> dict[str, Generator]:
    """Select the generators whose latents a VAE makes before training."""
    return {name: g for name, g in model.generators.items() if g.latents.encode == "once"}


def read_images(source: Source, generator: str, sample: int) -> list[np.ndarray]:
    """Decode a sample's images that a generator is to make, as the config prepares them."""
    modules = [module for module, _ in source.facts(sample).items]
    return [
        source.item(sample, number) for number, module in enumerate(modules) if module == generator
    ]


def describe(source: Source, name: str, generator: str, config: Generator) -> MadeOf:
    """Describe what the latents of a source for a generator are made of.

    name: of the source and its split. Hashes the VAE's weights.
    """
    # Of a source of conversations only its records and media count, not how the LLM and encoders
    # take them.
    fingerprint = getattr(source, "media_fingerprint", source.fingerprint)
    return MadeOf(
        source=name,
        generator=generator,
        records=fingerprint(),
        images=repr(config.images),
        vae=vae_fingerprint(config.latents.weights),
    )


def latent_folders(
    config: Config, sources: Mapping[str, Source], index: LengthIndex
) -> dict[tuple[str, str], Path]:
    """Return the folders of the latents that training needs, by source and generator.

    sources: of the split train, that the index is of. Latents may be missing there.
    """
    cache = cache_folder(config.data)
    folders = {}
    for generator, generator_config in vae_generators(config.model).items():
        module = list(config.model.item_modules).index(generator)
        for k, (name, source) in enumerate(sources.items()):
            first, last = index.item_start[index.source_start[k : k + 2]]
            if (index.item_encoder[first:last] == module).any():
                folders[name, generator] = describe(
                    source, name, generator, generator_config
                ).folder(cache)
    return folders


def make_latents(
    store: LatentStore,
    read: ReadImages,
    vae: Vae,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Make the latents that a store lacks. A sample with an image that cannot be used is noted there as bad.

    progress: called with the number of samples done. Raises UserError where a shard can't be
    written.
    """
    remaining = store.remaining()
    done = store.samples - sum(map(len, remaining))
    progress(done)
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    pool = ThreadPoolExecutor(threads)
    try:
        for gap in remaining:
            shard = _Shard(vae)
            start = gap.start
            for sample, images in zip(
                gap, _read_ahead(pool, read, gap, AHEAD * threads), strict=True
            ):
                shard.add(sample, images)
                done += 1
                # A shard holds a range of samples without a hole: it ends when it is full, or where
                # samples follow that the store already has.
                if shard.full or sample + 1 == gap.stop:
                    latents = shard.finish()
                    store.write(range(start, sample + 1), latents, list(shard.bad.values()))
                    shard = _Shard(vae)
                    start = sample + 1
                progress(done)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(
    pool: ThreadPoolExecutor, read: ReadImages, samples: range, ahead: int
) -> Iterator[Future]:
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
    _waiting: dict[tuple[int, int], list[tuple[Key, np.ndarray]]] = field(
        default_factory=lambda: defaultdict(list)
    )
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
        # A program is compiled for each size, so images wait for others of their size, height and
        # width, until a batch is full, or the shard is.
        config = self.vae.config
        for number, image in enumerate(read):
            pixels = image.shape[:2]
            self._waiting[pixels].append(((sample, number), image))
            self._bytes += (
                2 * VALUES.itemsize * config.channels * math.prod(pixels) // config.factor**2
            )
            if len(self._waiting[pixels]) == self.vae.batch(*pixels):
                self._compute(pixels)

    def _check(self, image: np.ndarray) -> None:
        """Raise BadMedia where the VAE cannot take an image."""
        height, width, _ = image.shape
        factor = self.vae.config.factor
        if height % factor or width % factor:
            raise BadMedia(
                f"an image is prepared as {height} x {width} pixels, and the VAE takes multiples of {factor}"
            )

    def _compute(self, pixels: tuple[int, int]) -> None:
        waiting = self._waiting.pop(pixels)
        images = np.stack([image for _, image in waiting])
        self._computing.append(([key for key, _ in waiting], self.vae.encode(images)))
        if len(self._computing) > IN_FLIGHT:
            self._collect()

    def _collect(self) -> None:
        keys, moments = self._computing.popleft()
        with np.errstate(over="ignore"):  # infinite values are looked for
            means, log_variances = (np.asarray(part).astype(VALUES) for part in moments)
        # Behind the images of an incomplete batch there are others, which nobody asked for.
        self._latents |= {
            key: Moments._make(pair) for key, *pair in zip(keys, means, log_variances, strict=False)
        }

    def finish(self) -> dict[Key, Moments]:
        """Compute what is waiting; return the latents of all samples that are not bad: with any that are not finite."""
        for pixels in list(self._waiting):
            self._compute(pixels)
        while self._computing:
            self._collect()
        for (sample, image), moments in self._latents.items():
            if not np.isfinite(moments).all():
                self.bad[sample] = BadImages(
                    sample, f"the VAE's latents of its image {image} are not finite"
                )
        return {key: moments for key, moments in self._latents.items() if key[0] not in self.bad}


# --------------------------------------------------------------------------------------------------
# of a config


def make_all_latents(config: Config) -> Iterator[BadSampleEntry]:
    """Make the latents of every source for every generator with a VAE; yield the samples that have none.

    Raises UserError where there is no such generator.
    """
    generators = vae_generators(config.model)
    if not generators:
        raise UserError(
            "the model has no generator with a VAE that encodes once, so there are no latents to make: set one's "
            "latents=vae"
        )
    for generator, of_generator in generators.items():
        vae = load_vae(of_generator.latents, f"{tower_key(config.model, generator)}.latents")
        for split in SPLITS:
            for name, source in open_sources(config, split, Path()).items():
                part = part_name(name, split)
                made_of = describe(source, part, generator, of_generator)
                contents = _make_part(source, made_of, vae, cache_folder(config.data))
                yield from (
                    BadSampleEntry(f"{part}[{entry.sample}]", entry.reason)
                    for entry in contents.bad
                )


def _make_part(source: Source, made_of: MadeOf, vae: Vae, cache: Path) -> Contents:
    """Make the latents of one split of a source, with a progress line; print what there is then."""
    store = LatentStore(made_of.folder(cache), len(source))
    if not store.folder.exists():
        for what, old in made_of.others(cache):
            print_note(
                f"note   {made_of.source}: latents are made again, since {what} changed after those in {old}, which "
                "can be removed where no run needs them"
            )
    description = f"{made_of.source}: latents for {made_of.generator}"
    with store.being_made(made_of), ProgressLine(0, len(source), "record") as line:
        read = partial(read_images, source, made_of.generator)
        make_latents(store, read, vae, lambda done: line.show(done, lambda: description))
    contents = store.contents()
    print_lines(
        f"latents of {made_of.source} for {made_of.generator}: {contents.images:,} images, {size(contents.size)}, in "
        f"{store.folder}"
    )
    return contents
