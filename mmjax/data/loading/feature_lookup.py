"""Fill rows of encoders that encode once with outputs that are stored, and list the items whose outputs are not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmjax.config import Encoder
from mmjax.data.media.patches import ItemInput
from mmjax.data.storage.feature_store import KEY_BYTES, FeatureReader


class MissingItem(NamedTuple):
    """An item whose output is not stored, and where it belongs."""

    encoder: str
    microbatch: int
    row: int  # of those that this process loads
    start: int  # of the output in the row
    key: bytes
    item: ItemInput


@dataclass
class FeatureLookup:
    """Looks up the outputs of a microbatch's items. readers: by encoder."""

    encoders: Mapping[str, Encoder]
    readers: Mapping[str, FeatureReader]
    microbatch: int
    missing: list[MissingItem] = field(default_factory=list)

    def empty(self, encoder: str, rows: int, length: int) -> np.ndarray:
        """Make the values of rows that are `length` inputs long."""
        layout = self.readers[encoder].layout
        positions = length // self.encoders[encoder].output_stride
        return np.zeros((rows, positions, layout.width), layout.dtype)

    def write(
        self,
        values: np.ndarray,
        encoder: str,
        row: int,
        start: int,
        key: bytes | None,
        prepare: Callable[[], ItemInput],
    ) -> ItemInput | None:
        """Write an item's output into the values of rows, or note that it is missing.

        start: of its inputs. key: a hash of what the item is prepared from, which is then only
        prepared where its output is missing; None: the key is a hash of the item. Returns the item
        where it was prepared.
        """
        start //= self.encoders[encoder].output_stride
        item = prepare() if key is None else None
        key = item_key(item) if key is None else key
        features = self.readers[encoder].read(key)
        if features is None:
            item = item or prepare()
            self.missing.append(MissingItem(encoder, self.microbatch, row, start, key, item))
        else:
            values[row, start : start + len(features)] = features
        return item


def item_key(item: ItemInput) -> bytes:
    """Hash an encoder's input of one item: its content as it was prepared."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for array in item:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.digest()
