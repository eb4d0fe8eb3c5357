"""Pictures of many shapes, with something in them that a wrong resize or crop would show."""

from __future__ import annotations

import numpy as np

# (height, width): square, landscape, portrait, exact fits, one off them, very long, one-pixel
# sides.
SHAPES = (
    (64, 64),
    (48, 64),
    (64, 48),
    (37, 91),
    (91, 37),
    (224, 224),
    (225, 223),
    (30, 300),
    (300, 31),
    (127, 250),
    (1, 1),
    (1, 40),
    (40, 1),
    (2, 3),
    (100, 125),
    (512, 640),
    (333, 500),
)


def picture(height: int, width: int) -> np.ndarray:
    """uint8 `[height, width, 3]`: waves of several lengths with noise on them."""
    rng = np.random.default_rng(height * 10_007 + width)
    y, x = np.mgrid[:height, :width]
    waves = [128 + 90 * np.sin(x / a + y / b) for a, b in ((3.0, 7.0), (11.0, 5.0), (2.0, 29.0))]
    noisy = np.stack(waves, axis=-1) + rng.normal(0, 25, (height, width, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)
