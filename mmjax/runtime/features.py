"""Encode items that frozen encoders encode once, ahead of the step that takes them, and store what comes out.

Every item is computed alone in a row of its own, in a batch whose shape depends on its length
alone. So its output is the same to the bit, whichever step, rank, run or number of devices it
comes in, and a store that lost a part of what it held changes nothing but the time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import PADDING, ItemBatch
from mmjax.config import Encoder
from mmjax.config.model import encoded_once
from mmjax.data.loading.feature_lookup import MissingItem
from mmjax.data.loading.step_loader import LoadedStep
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.storage.feature_store import FeatureLayout, FeatureWriter
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.parallel.sharding import replicated
from mmjax.planning.item_encoding import batch_rows, row_length
from mmjax.runtime.executor import Executor, State


class ItemEncoder:
    """A frozen encoder on each device of this process by itself."""

    def __init__(self, model: Model, name: str, params: Params) -> None:
        """params: of the encoder, replicated on the devices of its stage."""
        self.model = model
        self.name = name
        self.config: Encoder = model.config.encoders[name]
        devices = sorted(
            jax.tree.leaves(params)[0].sharding.addressable_devices, key=lambda d: d.id
        )
        # each device's own copy
        self.params = {
            device: jax.tree.map(partial(_copy_on, device), params) for device in devices
        }

    @property
    def layout(self) -> FeatureLayout:
        """Return what a position of its outputs has."""
        return FeatureLayout(self.config.output_width, self.model.dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Hash all that outputs depend on beside their items: weights, config, precision, and what computes them."""
        device, params = next(iter(self.params.items()))
        names, arrays = zip(*jax.tree.leaves_with_path(params), strict=True)

        def digest(array: jax.Array) -> bytes:
            values = np.ascontiguousarray(array)
            return hashlib.blake2b(values.view(np.uint8).reshape(-1), digest_size=32).digest()

        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(digest, arrays))
        whole = hashlib.blake2b(digest_size=16)
        described = (self.config, self.layout, jax.__version__, device.device_kind)
        whole.update(repr((*described, [jax.tree_util.keystr(name) for name in names])).encode())
        for part in digests:
            whole.update(part)
        return whole.hexdigest()

    def encode(self, items: Sequence[MissingItem]) -> dict[bytes, np.ndarray]:
        """Compute the outputs of items by their keys, `[m, width]` each; every key is computed once."""
        by_length: dict[int, list[MissingItem]] = defaultdict(list)
        for item in {item.key: item for item in items}.values():
            by_length[row_length(self.config, len(item.item.values))].append(item)
        computing = []
        for length, of_length in by_length.items():
            rows = batch_rows(length)
            for first in range(0, len(of_length), rows):
                batch = of_length[first : first + rows]
                computing.append((batch, self._dispatch(batch, rows, length, len(computing))))
        stride = self.config.output_stride
        return {
            item.key: features[: len(item.item.values) // stride]
            for batch, outputs in computing
            for item, features in zip(batch, np.asarray(outputs), strict=False)
        }

    def compile(self, lengths: Iterable[int]) -> None:
        """Compile the programs for rows of these lengths, on every device."""
        for length in lengths:
            for number in range(len(self.params)):
                self._dispatch([], batch_rows(length), length, number)

    def _dispatch(
        self, batch: Sequence[MissingItem], rows: int, length: int, number: int
    ) -> jax.Array:
        """Start to compute a batch on one of the devices, in turn."""
        device, params = list(self.params.items())[number % len(self.params)]
        inputs = self._rows(batch, rows, length)
        return self.encode_rows(params, jax.device_put(inputs, device))

    def _rows(self, batch: Sequence[MissingItem], rows: int, length: int) -> ItemBatch:
        """Lay items out in rows of their own."""
        dtype = np.uint8 if self.config.takes_pixels else np.float32
        values = np.zeros((rows, length, self.config.input_values), dtype)
        item = np.full((rows, length), PADDING, np.int32)
        coordinates = np.zeros((rows, length, 3), np.int32)
        for row, missing in enumerate(batch):
            count = len(missing.item.values)
            values[row, :count] = missing.item.values
            coordinates[row, :count] = missing.item.coordinates
            item[row, :count] = np.where(missing.item.valid, 0, PADDING)
        offset = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        return ItemBatch(values, item, coordinates, item, offset)

    @cached_property
    def encode_rows(self) -> jax.stages.Wrapped:
        """Return the program that computes the outputs of rows of items from the parameters on their device."""

        def encode(params: Params, items: ItemBatch) -> jax.Array:
            module = self.model.module({"encoders": {self.name: params}})
            return jnp.concatenate(module.tower_outputs(self.name, items), axis=-1)

        return jax.jit(encode)


def _copy_on(device: jax.Device, x: jax.Array) -> jax.Array:
    """Return a replicated array's copy on a device."""
    return next(shard.data for shard in x.addressable_shards if shard.device == device)


class FeatureStage:
    """Encodes what the data workers did not find stored, between them and the training loop."""

    def __init__(
        self, model: Model, encoders: Mapping[str, ItemEncoder], cache: Path, space: float
    ) -> None:
        """encoders: those on devices of this process. cache: folder of all stores. space: bytes for them."""
        self.encoders = encoders
        self.writers = {
            name: FeatureWriter(cache / encoder.fingerprint, encoder.layout, int(space))
            for name, encoder in encoders.items()
        }
        # Of encoders elsewhere no rows are loaded here, but what these would be is known.
        self.stores: dict[str, tuple[Path, FeatureLayout]] = {
            name: (cache / "elsewhere", FeatureLayout(config.output_width, model.dtype))
            for name, config in encoded_once(model.config).items()
        }
        self.stores |= {name: (w.folder, w.layout) for name, w in self.writers.items()}

    def fill(self, loaded: LoadedStep) -> LoadedStep:
        """Encode a step's missing items, write their outputs into its rows, and store them."""
        encoded = {}
        for name, encoder in self.encoders.items():
            writer = self.writers[name]
            items = [item for item in loaded.missing if item.encoder == name]
            unwritten = {item.key: writer.pending(item.key) for item in items}
            outputs = {key: features for key, features in unwritten.items() if features is not None}
            fresh = encoder.encode([item for item in items if item.key not in outputs])
            outputs |= fresh
            for item in items:
                values = loaded.microbatches[item.microbatch].items[name].values
                features = outputs[item.key]
                values[item.row, item.start : item.start + len(features)] = features
            for key, features in fresh.items():
                writer.add(key, features)
            encoded[name] = len(fresh)
        return loaded._replace(missing=(), encoded=encoded)

    def compile(self, index: LengthIndex) -> None:
        """Compile the programs for all items of an index."""
        for name, encoder in self.encoders.items():
            number = list(encoder.model.config.item_modules).index(name)
            positions = np.unique(index.item_positions[index.item_encoder == number]).tolist()
            encoder.compile(sorted({row_length(encoder.config, n) for n in positions}))

    def filled(self, batches: Iterator[LoadedStep]) -> Iterator[LoadedStep]:
        """Fill steps in a thread, one ahead of the one that is taken."""
        with closing(batches), ThreadPoolExecutor(1, "encode") as pool:

            def fill_next() -> LoadedStep | None:
                loaded = next(batches, None)
                return None if loaded is None else self.fill(loaded)

            ahead = pool.submit(fill_next)
            while (loaded := ahead.result()) is not None:
                ahead = pool.submit(fill_next)
                yield loaded

    def close(self) -> None:
        """Write what was encoded and is not on disk yet."""
        for writer in self.writers.values():
            writer.flush()


def open_feature_stage(
    executor: Executor, state: State, cache: Path, space: float
) -> FeatureStage | None:
    """Take the encoders that encode once out of a run's state, on the devices of this process; None without any.

    cache: the folder for the outputs of all frozen encoders. space: bytes that they may take.
    """
    names = encoded_once(executor.model.config)
    if not names:
        return None
    encoders: dict[str, ItemEncoder] = {}
    for name in names:
        for number, placed in enumerate(executor.stages):
            if executor.local[number] and name in placed.stage.towers and name not in encoders:
                params = state.stages[number].frozen["encoders"][name]
                # Each device computes by itself: nothing that a step's collectives could wait for.
                whole = jax.jit(lambda x: x, out_shardings=replicated(placed.mesh))(params)
                encoders[name] = ItemEncoder(executor.model, name, jax.block_until_ready(whole))
    return FeatureStage(executor.model, encoders, cache, space)
