import jax
import numpy as np
import pytest
from packed import build, pack, random_sample, tiny


@pytest.fixture(scope="module")
def encode():
    model, params = build(tiny(encoders=("vision",)))
    run = jax.jit(lambda items: model.encode(params, items)["vision"][0])
    return lambda rows: np.asarray(run(pack(rows, {"llm": 32, "vision": 48}, encoders=("vision",)).items))


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
