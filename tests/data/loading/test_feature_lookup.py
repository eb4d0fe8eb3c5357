"""Keys of items are hashes of all that an encoder reads of them."""

from __future__ import annotations

import numpy as np

from mmjax.data.loading.feature_lookup import item_key
from mmjax.data.media.patches import ItemInput


def test_keys_tell_items_apart_by_content_shape_and_place():
    values = np.arange(24, dtype=np.uint8).reshape(6, 4)
    places = np.arange(18, dtype=np.int32).reshape(6, 3)
    item = ItemInput(values, places, np.ones(6, bool))
    assert item_key(item) == item_key(ItemInput(*(part.copy() for part in item)))
    others = [
        item._replace(values=values ^ (values == 7)),
        item._replace(values=values.reshape(4, 6)),
        item._replace(values=values.astype(np.int8)),
        item._replace(coordinates=places[::-1]),
        item._replace(valid=np.arange(6) < 5),
    ]
    assert len({item_key(item), *map(item_key, others)}) == 6
