"""Multimodal checkpoints: several samples with images and clips in one packed row, against one by one there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from parity import (
    Params,
    adamw_there,
    compare_gradients,
    forget_longer_texts,
    loaded,
    logits_and_gradients,
    same_gradients,
    same_logits,
    saved_gradients,
)

from mmjax.batch import Microbatch
from mmjax.config import (
    AdamW,
    AnyRes,
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    NoGrouping,
    Samples,
    Schedule,
    TrainingConfig,
    VisionConfig,
)
from mmjax.cost.table import parameters
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import reader_of
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.media.image_transforms import prepare_image
from mmjax.data.media.patches import split_clip
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import Item, Sample, SampleLengths, Source, Text
from mmjax.data.sources.processors import ImageProcessor, clip_items, place_media
from mmjax.hf.families import encoder_from_hf, layout_of
from mmjax.hf.folder import HfFolder
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import hyperparameters, make_optimizer, parameter_shardings
from mmjax.runtime.weights import load_pretrained

Part = np.ndarray  # int [n]: tokens; uint8 [h, w, 3]: an image; float [n]: a clip


@dataclass(frozen=True)
class Given:
    """A source of samples given whole: stretches of tokens, images (uint8 [h, w, 3]) and clips (float [n])."""

    samples: Sequence[Sequence[Part]]
    vision: str = "vision"  # the encoder of images
    trained: Literal["all", "last", "none"] = "all"  # stretches of tokens

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> str:
        return "given"

    def items(self, index: int) -> list[Part]:
        return [part for part in self.samples[index] if not is_text(part)]

    def facts(self, index: int) -> SampleLengths:
        text = sum(len(part) for part in self.samples[index] if is_text(part))
        return SampleLengths(
            text, tuple((self.encoder(part), part.shape[:2]) for part in self.items(index))
        )

    def sample(self, index: int) -> Sample:
        segments, number = [], 0
        for at, part in enumerate(self.samples[index]):
            if is_text(part):
                last = at == len(self.samples[index]) - 1
                weights = np.full(
                    len(part),
                    self.trained == "all" or (self.trained == "last" and last),
                    np.float32,
                )
                weights[0] *= at > 0
                segments.append(Text(part.astype(np.int32), weights))
            else:
                segments.append(Item(self.encoder(part), number))
                number += 1
        return Sample(tuple(segments))

    def encoder(self, part: Part) -> str:
        return self.vision if part.ndim == 3 else "audio"

    def item(self, index: int, number: int) -> np.ndarray:
        return self.items(index)[number]


@dataclass(frozen=True)
class GivenWhole(Given):
    """The same of images that are not prepared yet: they are as files would be."""

    eyes: ImageProcessor = None
    # of the texts around an image's parts
    tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def media(self, index: int) -> list:
        images = self.items(index)
        return [self.eyes.items(image.shape[:2], len(images)) for image in images]

    def facts(self, index: int) -> SampleLengths:
        media = self.media(index)
        tokens = sum(medium.count({self.vision: self.eyes.encoder}) for medium in media)
        sizes = tuple((self.vision, size) for medium in media for size in medium.sizes)
        written = sum(len(self.tokens[text]) for medium in media for text in medium.texts if text)
        return SampleLengths(super().facts(index).text_tokens + written, sizes, tokens)

    def sample(self, index: int) -> Sample:
        segments, media, number = [], iter(self.media(index)), 0
        for segment in super().sample(index).segments:
            if not isinstance(segment, Item):
                segments.append(segment)
                continue
            medium = next(media)
            texts = medium.texts or ("",) * (len(medium.parts) + 1)
            for part, text in enumerate(texts):
                segments += [Item(self.vision, number + part - 1)] if part else []
                written = np.array(self.tokens[text] if text else [], np.int32)
                segments += [Text(written, np.zeros(len(written), np.float32))] if text else []
            number += len(medium.parts)
        return place_media(
            Sample(tuple(segments)), self.media(index), {self.vision: self.eyes.encoder}
        )

    def item(self, index: int, number: int) -> np.ndarray:
        images = self.items(index)
        made = [prepare_image(self.eyes.before_encoder, image, len(images)) for image in images]
        return [tile for tiles in made for tile in tiles][number]


@dataclass(frozen=True)
class GivenClips(Given):
    """The same of clips that are cut into windows, of whose tokens the LLM sees some."""

    ears: AudioConfig = None

    def media(self, index: int) -> list:
        return [clip_items("audio", self.ears, len(wave)) for wave in self.items(index)]

    def facts(self, index: int) -> SampleLengths:
        media = self.media(index)
        sizes = tuple(item for medium in media for item in medium.items)
        tokens = sum(medium.count({"audio": self.ears}) for medium in media)
        return SampleLengths(super().facts(index).text_tokens, sizes, tokens)

    def sample(self, index: int) -> Sample:
        return place_media(super().sample(index), self.media(index), {"audio": self.ears})

    def item(self, index: int, number: int) -> np.ndarray:
        pieces = [
            wave[start:stop]
            for wave in self.items(index)
            for start, stop in split_clip(self.ears, len(wave))
        ]
        return pieces[number]


def is_text(part: Part) -> bool:
    return part.ndim == 1 and np.issubdtype(part.dtype, np.integer)


def given(
    model: ModelConfig,
    samples: Sequence[Sequence[Part]],
    tokens: Mapping[str, Sequence[int]] | None = None,
) -> Given:
    """The samples as a source for this model. tokens: of the texts that it writes between an image's tokens."""
    seeing = {
        name: encoder
        for name, encoder in model.encoders.items()
        if isinstance(encoder, VisionConfig)
    }
    ears = model.encoders.get("audio")
    if ears is not None and ears.clips.shown == "clip":
        return GivenClips(samples, ears=ears)
    name, eyes = next(iter(seeing.items()), ("vision", None))
    if eyes is not None and (tokens is not None or isinstance(eyes.images, AnyRes)):
        eyes = ImageProcessor.of(name, eyes, {})
        return GivenWhole(samples, name, eyes=eyes, tokens={} if tokens is None else tokens)
    return Given(samples, name)


def packed(model: ModelConfig, samples: Sequence[Sequence[Part]]) -> Microbatch:
    """All samples in one row of each module, by the real index, planner and packer."""
    return packed_source(model, given(model, samples))


def packed_source(model: ModelConfig, source: Source) -> Microbatch:
    """All samples of a source in one row of each module."""
    samples, modules = range(len(source)), ("llm", *model.encoders)
    batch = BatchConfig(Samples(len(samples)), dict.fromkeys(modules, 1), grouping=NoGrouping())
    config = Config("given", DataConfig(), batch, model, TrainingConfig(1))
    index = build_index({"given": source}, model.encoders)
    planner, _ = make_planner(index, config, [1.0])
    (plan,) = planner.placer.place(Group(np.arange(len(samples)), None))
    reader = reader_of({"given": source}, index)
    return pack_microbatch(plan, BatchLayout.of(model), reader)


# logits [t, v] of one sample, expanded
Theirs = Callable[[torch.nn.Module, Sequence[Part]], torch.Tensor]


def check_samples(
    model: torch.nn.Module,
    folder: Path,
    samples: Sequence[Sequence[Part]],
    theirs: Theirs,
    tokens: Mapping[str, Sequence[int]] | None = None,
) -> Microbatch:
    """Logits of packed samples to 1e-4, and every gradient of the mean loss over all of them. Gives what was packed.

    tokens: as in `given`.
    """
    ours, params, config = loaded(folder)
    made = packed_source(config, given(config, samples, tokens))
    return check_packed(model, ours, params, made, samples, theirs)


def check_packed(
    model: torch.nn.Module,
    ours: Model,
    params: Params,
    made: Microbatch,
    samples: Sequence[Any],
    theirs: Theirs,
) -> Microbatch:
    """The same of samples that are packed already, one of which `theirs` computes there."""
    batch = jax.tree.map(jnp.asarray, made)
    text = jax.device_get(batch.text)
    logits, gradients = logits_and_gradients(ours, params, batch)
    count = float(text.weight.sum())

    def loss_there(model: torch.nn.Module, compare: bool = False) -> torch.Tensor:
        total = torch.zeros(())
        for number, sample in enumerate(samples):
            row, at = np.argwhere(text.owner == number)[0]
            here = slice(at, at + int((text.owner[row] == number).sum()))
            forget_longer_texts(model)
            wanted = theirs(model, sample)
            if compare:
                assert len(wanted) == here.stop - here.start, (
                    f"{len(wanted)} tokens there, {here} here"
                )
                same_logits(
                    logits[row, here],
                    wanted,
                    number,
                    model,
                    lambda model, sample=sample: theirs(model, sample),
                )
            target, weight = (
                torch.tensor(getattr(text, f)[row, here]) for f in ("target", "weight")
            )
            total = (
                total
                + (
                    torch.nn.functional.cross_entropy(wanted, target.long(), reduction="none")
                    * weight
                ).sum()
            )
        return total / count

    loss_there(model, compare=True).backward()
    compare_gradients(ours, gradients, model, loss_there)
    return jax.device_get(batch)


def pixels(picture: np.ndarray) -> torch.Tensor:
    """Prepare an image as a tower without a processor takes it."""
    return torch.tensor((picture / 255 - 0.5) / 0.5, dtype=torch.float32).permute(2, 0, 1)[None]


def check_tower(
    model: torch.nn.Module,
    folder: Path,
    theirs: Callable[[np.ndarray], torch.Tensor],
    pictures: Sequence[np.ndarray],
    rng: np.random.Generator,
    merge: int,
) -> None:
    """What a tower's folder makes of five images in a row to 1e-4, and the gradients of a weighted sum of it.

    theirs: features `[t, d]` of one image there: of the class token, registers, then patches row by
    row.
    """
    eyes = replace(encoder_from_hf(folder), connector=ConnectorConfig(merge=merge))
    config = ModelConfig(DecoderConfig(1, 16, 2, 1, 8, 16, vocab=9), {"eyes": eyes})
    ours = Model.build(config, jnp.float32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = load_pretrained(ours, parameter_shardings(ours, mesh, ShardingRules()))
    assert sum(x.size for x in jax.tree.leaves(params)) == parameters(config)["eyes"]
    made = packed(config, [[np.arange(1, 4), *pictures[:3]], [*pictures[3:], np.arange(1, 5)]])
    items = jax.tree.map(jnp.asarray, made.items["eyes"])

    def features(params: Params) -> jax.Array:
        tower = ours.module(params).encoders["eyes"]
        return tower.finished(tower.layers(tower.embedded(items), tower.context(items)))[0]

    found = np.asarray(jax.jit(features)(params))
    item, (_, row, column) = made.items["eyes"].item[0], made.items["eyes"].coordinates[0].T
    factors = rng.normal(size=found.shape).astype(np.float32)
    total = torch.zeros(())
    for number, picture in zip(dict.fromkeys(item[item >= 0]), pictures, strict=True):
        wanted = theirs(picture)
        across = picture.shape[1] // eyes.patch
        (here,) = np.nonzero(item == number)
        place = np.where(row < 0, -1 - column, eyes.own_tokens + row * across + column)[here]
        assert sorted(place) == list(range(len(wanted)))
        np.testing.assert_allclose(found[here], wanted.detach().numpy()[place], atol=1e-4)
        total = total + (wanted[torch.tensor(place)] * torch.tensor(factors[here])).sum()
    total.backward()
    counted = jnp.asarray(factors * (item >= 0)[:, None])
    gradients = jax.jit(jax.grad(lambda p: (features(p) * counted).sum()))(params)
    same_gradients(gradients, layout_of(HfFolder.open(folder), config), saved_gradients(model))


def check_ten_steps(
    model: torch.nn.Module, folder: Path, samples: Sequence[Sequence[Part]], theirs: Theirs
) -> None:
    """Losses of ten steps of AdamW to 1e-3: all samples in one packed row here, one by one there."""
    ours, params, config = loaded(folder)
    recipe = AdamW(3e-3, 0.1, 0.9, 0.95, 1e-8)
    run = Config(
        "ten",
        DataConfig(),
        BatchConfig(rows={}),
        config,
        TrainingConfig(10),
        recipe,
        Schedule(3, 0.1),
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    executor = Executor.on_mesh(
        ours, make_optimizer(recipe, ours.axes), mesh, ShardingRules(), sources=1
    )
    state = executor.init(jax.random.key(0), params)
    accumulated = executor.zeros()
    made = packed(config, samples)
    text = made.text
    batch = executor.put(made)
    optimizer = adamw_there(model)
    losses = []
    for step in range(10):
        hyper = hyperparameters(run, step)
        state, accumulated, report = executor.step(state, accumulated, [batch], hyper)
        loss = torch.zeros(())
        for number, sample in enumerate(samples):
            target, weight = (
                torch.tensor(x[text.owner == number]) for x in (text.target, text.weight)
            )
            each = torch.nn.functional.cross_entropy(
                theirs(model, sample), target.long(), reduction="none"
            )
            loss = loss + (each * weight).sum() / text.weight.sum()
        losses.append(loss.item())
        np.testing.assert_allclose(
            report.losses.loss.sum() / report.losses.weight.sum(), losses[-1], atol=1e-3
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.training.clip)
        for group in optimizer.param_groups:
            group["lr"] = float(hyper["learning_rate/llm"])
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
