"""Small real batches, packed by the contract of mmjax.batch: the shortest code that can, to hold the models against."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import TOKEN_FIELDS, ItemBatch, Microbatch, TextBatch
from mmjax.config import (
    AudioConfig,
    ConnectorConfig,
    DecoderConfig,
    LogMel,
    ModelConfig,
    VisionConfig,
)
from mmjax.config.unit_stages import LayerRange
from mmjax.models.decoder import logits_of
from mmjax.models.layer_stacks import stack_layers, unstack_layers
from mmjax.models.model import Model
from mmjax.models.piece import HIDDEN, TABLE
from mmjax.models.stage import Stage

KIND = {"text": 1, "vision": 2, "audio": 4}
VOCAB = 23


def tiny(
    attention="dense",
    *,
    layers=2,
    vision_layers=2,
    tied=True,
    remat="none",
    encoders=("vision", "audio"),
    vocab=VOCAB,
):
    """A model of every part at width 32, smaller than any that learns."""
    connector = ConnectorConfig(merge=2, mlp_width=24, position_grid=16)
    towers = {
        "vision": VisionConfig(
            layers=vision_layers, width=32, heads=2, mlp_width=48, patch=2, channels=3, connector=connector,
            attention=attention, remat=remat,
        ),
        "audio": AudioConfig(
            layers=2, width=32, heads=2, mlp_width=48, clips=LogMel(mels=5), connector=connector,
            attention=attention, remat=remat,
        ),
    }  # fmt: skip
    llm = DecoderConfig(
        layers=layers, width=32, heads=4, kv_heads=2, head_width=8, mlp_width=48, vocab=vocab, tied=tied,
        attention=attention, remat=remat,
    )  # fmt: skip
    return ModelConfig(llm, {name: towers[name] for name in encoders})


def build(config=None, cuts=None, seed=0):
    """A float32 model and random parameters, biases and scales too; the same for any run borders."""
    model = Model.build(tiny() if config is None else config, jnp.float32, cuts)
    shapes = unstack_layers(
        model.abstract, lambda leaf, _: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    )
    rng = np.random.default_rng(seed)

    def born(path, leaf):
        noise = rng.normal(size=leaf.shape)
        if len(leaf.shape) == 2:
            return (noise * leaf.shape[0] ** -0.5).astype(np.float32)
        return (0.1 * noise + (path[-1].key == "scale")).astype(np.float32)

    params = stack_layers(jax.tree_util.tree_map_with_path(born, shapes), model.runs)
    return model, jax.tree.map(jnp.asarray, params)


@dataclass(frozen=True)
class Segment:
    """Text (int [n]), an image (float [h, w, 12]: 2 x 2 x 3 pixels a patch) or a clip (float [frames, 5])."""

    kind: str
    content: np.ndarray


def random_sample(rng, layout):
    """A sample from its layout: an int is that many tokens of text, a pair an image's grid, ("audio", n) a clip."""
    segments = []
    for part in layout:
        if isinstance(part, int):
            segments.append(Segment("text", rng.integers(1, VOCAB, part)))
        elif part[0] == "audio":
            segments.append(Segment("audio", rng.normal(size=(part[1], 5)).astype(np.float32)))
        else:
            segments.append(Segment("vision", rng.normal(size=(*part, 12)).astype(np.float32)))
    return segments


def positions(segment, merge=2):
    """(values [n, F], valid [n], coordinates [n, 3]) of an item as its encoder takes it, padded to whole groups."""
    content = segment.content
    if segment.kind == "audio":
        frames = -(-len(content) // (2 * merge)) * 2 * merge
        time = np.arange(frames)
        values = np.zeros((frames, content.shape[1]), np.float32)
        values[: len(content)] = content
        return values, time < len(content), np.stack([time, 0 * time, 0 * time], -1)
    height, width = content.shape[:2]
    values, valid, coordinates = [], [], []
    for top in range(0, height, merge):
        for left in range(0, width, merge):
            for y in range(top, top + merge):
                for x in range(left, left + merge):
                    inside = y < height and x < width
                    pixels = (
                        np.float32(127.5) * (content[y, x] + 1) if inside else 0 * content[0, 0]
                    )
                    values.append(pixels)  # of 0..255, so that the encoder sees the content
                    valid.append(inside)
                    coordinates.append((0, y, x))
    return np.array(values), np.array(valid), np.array(coordinates)


def pack(rows, lengths, items="causal", encoders=("vision", "audio"), merge=2, owners=None):
    """A microbatch of rows of samples. `lengths`: of a row of the LLM and of each encoder, with as many rows.

    `owners`: the samples' ids, in rows as they are; by default they are counted.
    """
    count = itertools.count()
    owners = [[next(count) for _ in row] for row in rows] if owners is None else owners
    taken = {name: _pack_items(name, rows, owners, lengths[name], merge) for name in encoders}
    slot = {name: iter(slots) for name, (_, slots) in taken.items()}
    shape = (len(rows), lengths["llm"])
    field = {name: np.zeros(shape, np.int32) for name in TOKEN_FIELDS if name != "weight"}
    field["sample"] -= 1
    field["source"] -= 1
    field["owner"] -= 1
    weight = np.zeros(shape, np.float32)
    slots = {name: np.full(shape, -1, np.int32) for name in encoders}
    for r, row in enumerate(rows):
        t, span = 0, 0
        for number, sample in enumerate(row):
            start = t
            for segment in sample:
                text = segment.kind == "text"
                size = (
                    len(segment.content)
                    if text
                    else len(positions(segment)[1]) // _group(segment.kind, merge)
                )
                here = slice(t, t + size)
                span += not text
                if text:
                    field["token"][r, here] = segment.content
                    field["target"][r, here] = np.roll(segment.content, -1)
                    weight[r, here] = 1
                else:
                    slots[segment.kind][r, here] = next(slot[segment.kind])
                field["sample"][r, here] = number
                field["source"][r, here] = 0
                field["kind"][r, here] = KIND[segment.kind]
                field["sees"][r, here] = 0 if items == "isolated" and not text else 7
                field["span"][r, here] = 0 if text or items == "causal" else span
                t += size
            field["position"][r, start:t] = field["offset"][r, start:t] = np.arange(t - start)
            field["owner"][r, start:t] = owners[r][number]
        assert t <= shape[1], f"row {r} needs {t} tokens"
        field["pos"][r] = np.arange(shape[1])
    text = TextBatch(**{k: jnp.asarray(v) for k, v in field.items()}, weight=jnp.asarray(weight),
                     slots={k: jnp.asarray(v) for k, v in slots.items()},
                     send={k: jnp.zeros((1, 1, 0), jnp.int32) for k in slots})  # fmt: skip
    return Microbatch(text, {name: batch for name, (batch, _) in taken.items()})


def _group(kind, merge):
    return merge**2 if kind == "vision" else 2 * merge


def _pack_items(name, rows, owners, length, merge):
    """The items of one encoder in order, in rows of `length`, and for each the flat indices of its merged tokens."""
    width = 12 if name == "vision" else 5
    ids = [np.full(length, -1) for _ in range(3)]
    empty = (np.zeros((length, width), np.float32), *ids, np.zeros((length, 3), int))
    packed, slots, used = [], [], length
    for sample, owner in zip(itertools.chain(*rows), itertools.chain(*owners), strict=True):
        before = 0
        for segment in (s for s in sample if s.kind == name):
            values, valid, coordinates = positions(segment, merge)
            if used + len(values) > length:
                packed.append(tuple(x.copy() for x in empty))
                used, count = 0, 0
            here = slice(used, used + len(values))
            item = np.where(valid, count, -1)
            offset = before + np.arange(len(values))
            for array, content in zip(
                packed[-1], (values, item, owner, offset, coordinates), strict=True
            ):
                array[here] = content
            group = _group(name, merge)
            first = ((len(packed) - 1) * length + used) // group
            slots.append(np.arange(first, first + len(values) // group))
            used, count, before = used + len(values), count + 1, before + len(values)
    assert len(packed) <= len(rows), f"{name} needs {len(packed)} rows of {length}"
    packed += [empty] * (len(rows) - len(packed))
    values, item, owner, offset, coordinates = (
        jnp.asarray(np.stack(x)) for x in zip(*packed, strict=True)
    )
    ints = (x.astype(jnp.int32) for x in (item, coordinates, owner, offset))
    batch = ItemBatch(values, *ints)
    return batch, slots


def token_losses(model, params, microbatch, noise=None):
    """Weighted cross-entropy per token [R, T]."""
    return losses_of_logits(model.logits(params, microbatch, noise), microbatch.text)


def model_outputs(model, params, microbatch, sums=None):
    """What the losses of the whole model are made of. sums: of scanned stacks' gradients."""
    stage = Stage.whole(model)
    return stage.operands(*stage.run(params, {}, microbatch, None, sums))


def stage_outputs(stage, params, inputs, microbatch, noise=None):
    """What a stage makes for others; of the LLM's last, the logits."""
    values, _ = stage.run(params, inputs, microbatch, noise)
    logits = {"logits": logits_of(values[HIDDEN], values[TABLE])} if stage.losses else {}
    return {name: values[name] for name in stage.outputs} | logits


def losses_of_logits(logits, text):
    chosen = jnp.take_along_axis(logits, text.target[..., None], -1)[..., 0]
    return text.weight * (jax.nn.logsumexp(logits, -1) - chosen)


def assert_trees_close(got, expected, tolerance=1e-5):
    """Every leaf to `tolerance` of its largest absolute value."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        error, scale = np.abs(a - b).max(), np.abs(b).max()
        assert error <= tolerance * max(scale, 1e-6), (
            f"{jax.tree_util.keystr(path)}: {error} of {scale}"
        )


def cut_tower(model, tower, cuts):
    """A stage of its own for the layers between two cuts of a tower."""
    ends = (0, *cuts, model.config.towers[tower].layers)
    return [
        Stage.of_layers(model, [LayerRange(tower, *layers)]) for layers in itertools.pairwise(ends)
    ]
