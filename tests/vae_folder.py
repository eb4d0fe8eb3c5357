"""A tiny random VAE: as parameters, and as a diffusers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from mmjax.config import VaeConfig
from mmjax.hf.vae import write_vae
from mmjax.models.vae import VaeModel

TINY = VaeConfig(widths=(4, 8), blocks=1, groups=2)


def random_parameters(model: VaeModel, seed: int = 0) -> dict[str, Any]:
    """Every parameter random, norms' scales around 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(len(x.shape) < 2, 0.3, x.shape).astype(np.float32), model.abstract)


def save_vae(folder: Path, config: VaeConfig = TINY, seed: int = 0) -> Path:
    """Write the folder of such a VAE."""
    parameters = random_parameters(VaeModel.build(config), seed)
    write_vae(folder, config, {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(parameters)})
    return folder
