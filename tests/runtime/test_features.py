"""An item that is encoded once has one output to the bit, wherever it comes, which is that of its encoder in a step."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.batch import PADDING, ItemBatch
from mmjax.config import AudioConfig, ConnectorConfig, LogMel, VisionConfig
from mmjax.config.encoders import StretchedGrid
from mmjax.config.loading import load
from mmjax.data.loading.feature_lookup import MissingItem, item_key
from mmjax.data.media.patches import item_input
from mmjax.models.model import Model
from mmjax.runtime.features import ItemEncoder

VISION = VisionConfig(
    layers=2,
    width=32,
    heads=2,
    mlp_width=48,
    patch=4,
    channels=1,
    connector=ConnectorConfig(merge=2),
    attention="blockwise",
    frozen=True,
    encode="once",
)
AUDIO = AudioConfig(
    layers=2,
    width=32,
    heads=2,
    mlp_width=48,
    clips=LogMel(mels=20, sample_rate=4000, window=128, hop=64),
    pool=2,
    connector=ConnectorConfig(merge=2),
    frozen=True,
    encode="once",
)
ENCODERS = {
    "plain": VISION,
    "deepstack": replace(
        VISION, layers=3, deepstack=(0, 1), window=4, windowed=(0, 2), positions=StretchedGrid(8)
    ),
    "features": replace(VISION, layers=3, feature_layers=(0, 2), head_norm=False, class_token=True),
    "audio": AUDIO,
}
SIZES = {"image": [(8, 8), (40, 24), (64, 64), (20, 96), (72, 56)], "audio": [640, 1500, 4000, 901]}


def item_encoder(name: str, devices: int = 1, dtype: str = "float32") -> ItemEncoder:
    model = Model.build(
        replace(load(TINY).model, encoders={"eye": ENCODERS[name]}), jnp.dtype(dtype)
    )
    params = jax.jit(model.init)(jax.random.key(0))["encoders"]["eye"]
    mesh = Mesh(np.array(jax.devices()[:devices]), "device")
    return ItemEncoder(model, "eye", jax.device_put(params, NamedSharding(mesh, PartitionSpec())))


def items(name: str) -> list[MissingItem]:
    config = ENCODERS[name]
    rng = np.random.default_rng(1)
    arrays = [
        rng.integers(0, 256, (*size, 1), np.uint8)
        if config.modality == "image"
        else rng.standard_normal(size).astype(np.float32)
        for size in SIZES[config.modality]
    ]
    inputs = [item_input(config, array) for array in arrays]
    return [MissingItem("eye", 0, 0, 0, item_key(item), item) for item in inputs]


@pytest.mark.default_cases("deepstack", "audio")
@pytest.mark.parametrize("name", ENCODERS)
def test_an_output_is_the_same_to_the_bit_alone_among_others_and_on_any_device(name):
    wanted = items(name)
    together = item_encoder(name).encode(wanted)
    other_order = item_encoder(name, devices=3).encode([*wanted[::-1], *wanted])
    one = item_encoder(name)
    for item in wanted:
        alone = one.encode([item])[item.key]
        np.testing.assert_array_equal(alone, together[item.key])
        np.testing.assert_array_equal(alone, other_order[item.key])


@pytest.mark.default_cases("features", "audio")
@pytest.mark.parametrize("name", ENCODERS)
def test_an_output_is_what_the_encoder_makes_of_packed_rows(name):
    wanted = items(name)
    encoder = item_encoder(name)
    outputs = encoder.encode(wanted)
    length = sum(len(item.item.values) for item in wanted) + 64
    length += -length % 64
    values = np.zeros((1, length, wanted[0].item.values.shape[1]), wanted[0].item.values.dtype)
    number = np.full((1, length), PADDING, np.int32)
    coordinates = np.zeros((1, length, 3), np.int32)
    starts, at = [], 32
    for n, item in enumerate(wanted):
        span = slice(at, at + len(item.item.values))
        values[0, span], coordinates[0, span] = item.item.values, item.item.coordinates
        number[0, span] = np.where(item.item.valid, n, PADDING)
        starts.append(at)
        at = span.stop
    batch = ItemBatch(values, number, coordinates, number, np.zeros_like(number))
    (params,) = encoder.params.values()
    packed = np.asarray(encoder.encode_rows(params, batch))[0]
    stride = encoder.config.output_stride
    for item, start in zip(wanted, starts, strict=True):
        # Too few positions at a clip's end to be pooled become no token.
        used = item.item.valid.reshape(-1, stride).all(1)
        ours = outputs[item.key]
        assert ours.shape == (len(item.item.values) // stride, encoder.layout.width)
        np.testing.assert_allclose(
            ours[used], packed[start // stride :][: len(ours)][used], rtol=0, atol=2e-5
        )


def test_other_weights_settings_and_precisions_have_stores_of_their_own():
    first = item_encoder("plain")
    assert first.fingerprint == item_encoder("plain", devices=2).fingerprint
    (params,) = first.params.values()
    leaves, structure = jax.tree.flatten(params)
    leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].add(1e-7)
    one_bit = ItemEncoder(first.model, "eye", jax.tree.unflatten(structure, leaves))
    others = [
        one_bit,
        item_encoder("plain", dtype="bfloat16"),
        item_encoder("deepstack"),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4
