from dataclasses import replace

import jax
import numpy as np
import pytest
from packed import build, pack, random_sample, tiny

from mmjax.config import StretchedGrid
from mmjax.models.vision_encoder import interpolate_positions


@pytest.fixture(scope="module")
def encode():
    model, params = build(tiny(encoders=("vision",)))
    run = jax.jit(lambda items: model.encode(params, items)["vision"][0])
    return lambda rows: np.asarray(
        run(pack(rows, {"llm": 32, "vision": 48}, encoders=("vision",)).items)
    )


def test_an_images_place_in_the_row_does_not_matter(encode):
    rng = np.random.default_rng(0)
    first, second = random_sample(rng, [(3, 4)]), random_sample(rng, [(1, 7)])
    a, b = encode([[first, second]]), encode([[second, first]])
    np.testing.assert_allclose(a[:4], b[4:8], atol=1e-5)
    np.testing.assert_allclose(a[4:8], b[:4], atol=1e-5)


def test_rows_and_columns_of_an_image_are_told_apart(encode):
    wide = random_sample(np.random.default_rng(0), [(2, 6)])
    tall = [type(wide[0])("vision", wide[0].content.swapaxes(0, 1))]
    assert np.abs(encode([[wide]])[:3] - encode([[tall]])[:3]).max() > 0.1


def test_every_patch_of_an_image_is_seen_from_every_other(encode):
    sample = random_sample(np.random.default_rng(0), [(4, 4)])
    changed = sample[0].content.copy()
    changed[3, 3] += 1
    difference = np.abs(encode([[sample]]) - encode([[[type(sample[0])("vision", changed)]]]))
    assert (difference[:4].max(-1) > 1e-4).all()


def test_values_in_padded_patches_count_for_nothing():
    model, params = build(tiny(encoders=("vision",)))
    sample = random_sample(np.random.default_rng(0), [(3, 3)])
    items = pack([[sample]], {"llm": 8, "vision": 24}, encoders=("vision",)).items["vision"]
    padding = np.asarray(items.item) < 0
    noisy = items._replace(values=jax.numpy.where(padding[..., None], 99.0, items.values))
    run = jax.jit(lambda items: model.encode(params, {"vision": items})["vision"][0, :4])
    np.testing.assert_array_equal(run(items), run(noisy))


def with_vision(**changes):
    config = tiny(encoders=("vision",), vision_layers=3, layers=4)
    return replace(config, encoders={"vision": replace(config.encoders["vision"], **changes)})


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"window": 2, "windowed": (0, 1)},
        {"positions": StretchedGrid(3), "deepstack": (0, 2)},
        {"frames": 2, "window": 4, "windowed": (0, 1, 2), "deepstack": (1,)},
    ],
)
@pytest.mark.parametrize("backend", ["dense", "blockwise", "flash"])
def test_images_of_other_towers_are_alone_in_their_rows_too(changes, backend):
    model, params = build(with_vision(attention=backend, **changes))
    rng = np.random.default_rng(0)
    samples = [
        random_sample(rng, layout)
        for layout in ([2, (5, 7), 3], [(1, 3), 2, (4, 4), 1], [3], [1, (6, 2), 1])
    ]
    run = jax.jit(lambda batch: model.logits(params, batch))
    together = pack([samples], {"llm": 48, "vision": 112}, encoders=("vision",))
    logits = run(together)[0]
    for number, sample in enumerate(samples):
        mine = np.asarray(together.text.sample[0]) == number
        alone = run(pack([[sample]], {"llm": 48, "vision": 112}, encoders=("vision",)))[0]
        np.testing.assert_allclose(logits[mine], alone[: mine.sum()], atol=1e-5)


def test_windowed_layers_alone_see_nothing_beyond_their_squares():
    model, params = build(with_vision(window=4, windowed=(0, 1, 2)))
    sample = random_sample(np.random.default_rng(0), [(6, 6)])
    changed = sample[0].content.copy()
    changed[4:, 4:] += 1  # the last of four squares, cut by the image's edges
    run = jax.jit(lambda items: model.encode(params, items)["vision"][0, :9])
    batches = (pack([[[type(sample[0])("vision", c)]]], {"llm": 9, "vision": 36}, encoders=("vision",))
               for c in (sample[0].content, changed))  # fmt: skip
    before, after = (np.asarray(run(batch.items)) for batch in batches)
    np.testing.assert_array_equal(before[:8], after[:8])
    assert np.abs(before[8] - after[8]).max() > 1e-3


def test_both_backends_attend_within_squares_alike():
    rng = np.random.default_rng(0)
    sample = random_sample(rng, [1, (26, 24), 2])  # more patches than a block has
    batch = pack([[sample]], {"llm": 160, "vision": 640}, encoders=("vision",))
    found = []
    for backend in ("dense", "blockwise"):
        model, params = build(with_vision(attention=backend, window=4, windowed=(0, 2)))
        found.append(jax.jit(lambda batch, m=model, p=params: m.logits(p, batch))(batch)[0, :159])
    np.testing.assert_allclose(*found, atol=1e-5)


def test_a_grid_is_stretched_from_corner_to_corner():
    model, params = build(with_vision(positions=StretchedGrid(3)))
    table = np.asarray(params["encoders"]["vision"]["embed"]["positions"]["weight"]).reshape(
        3, 3, -1
    )
    module = model.module(params).encoders["vision"].embed
    items = pack(
        [[random_sample(np.random.default_rng(0), [(5, 2)])]],
        {"llm": 3, "vision": 16},
        encoders=("vision",),
    )
    got = np.asarray(
        interpolate_positions(module.positions, StretchedGrid(3), items.items["vision"])
    )[0]
    row, column = np.asarray(items.items["vision"].coordinates[0, :, 1:]).T
    valid = np.asarray(items.items["vision"].item[0]) >= 0
    for y, x, vector in zip(row[valid], column[valid], got[valid], strict=True):
        below, part = min(y // 2 + 1, 2), (y % 2) / 2
        wanted = (1 - part) * table[y // 2, 2 * x] + part * table[below, 2 * x]
        np.testing.assert_allclose(vector, wanted, atol=1e-6)
