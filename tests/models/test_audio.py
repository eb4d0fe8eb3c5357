import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import build, pack, random_sample, tiny

from mmjax.models.audio_encoder import taps
from mmjax.models.rope import sinusoids


def convolution(x, weight, stride):
    """XLA's own convolution of kernel 3 with one frame of zero padding on either side."""
    kernel = weight.reshape(3, x.shape[-1], -1)
    return jax.lax.conv_general_dilated(
        x[None], kernel, (stride,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )[0]


@pytest.mark.parametrize("stride", [1, 2])
def test_taps_of_packed_clips_are_each_clips_own_convolution(stride):
    rng = np.random.default_rng(0)
    lengths = [5, 8, 1, 3, 12, 2]
    starts = np.cumsum([0] + [-(-n // 4) * 4 for n in lengths])
    x, item = rng.normal(size=(1, 48, 6)).astype(np.float32), np.full((1, 48), -1, np.int32)
    for i, n in enumerate(lengths):
        item[0, starts[i] : starts[i] + n] = i
    weight = rng.normal(size=(18, 4)).astype(np.float32)
    packed = taps(jnp.asarray(x), jnp.asarray(item), stride)[0] @ weight
    for i, n in enumerate(lengths):
        alone = convolution(
            jnp.asarray(x[0, starts[i] : starts[i] + n]), jnp.asarray(weight), stride
        )
        first = starts[i] // stride
        np.testing.assert_allclose(packed[first : first + len(alone)], alone, atol=1e-5)
        assert (packed[first + len(alone) : starts[i + 1] // stride] == 0).all()


def test_sinusoids_are_whispers():
    table = np.asarray(sinusoids(jnp.arange(7)[None], 8))[0]
    scales = np.exp(-np.log(10000) / 3 * np.arange(4))
    angles = np.arange(7)[:, None] * scales
    np.testing.assert_allclose(
        table, np.concatenate([np.sin(angles), np.cos(angles)], 1), atol=1e-5
    )


def test_a_clips_place_in_the_row_does_not_matter_but_the_order_of_its_frames_does():
    model, params = build(tiny(encoders=("audio",)))
    rng = np.random.default_rng(1)
    first, second = random_sample(rng, [("audio", 9)]), random_sample(rng, [("audio", 6)])
    flipped = [type(first[0])("audio", first[0].content[::-1])]
    run = jax.jit(lambda items: model.encode(params, items)["audio"][0])
    a, b, c = (
        run(pack([row], {"llm": 16, "audio": 32}, encoders=("audio",)).items)
        for row in ([first, second], [second, first], [flipped, second])
    )
    np.testing.assert_allclose(a[:3], b[2:5], atol=1e-5)
    assert np.abs(a[:3] - c[:3]).max() > 0.1
