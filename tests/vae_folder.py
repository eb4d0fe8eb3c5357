"""A tiny random VAE, as parameters and as a diffusers folder, and a config of a generator that draws its latents."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from llava_folder import save_tokenizer

sys.path.append(str(Path(__file__).parent / "data"))
from files_made import asked, lines, picture, write

from mmjax.config import VaeConfig
from mmjax.hf.diffusers_folder import write_part
from mmjax.hf.vae import CLASS, vae_tensors
from mmjax.models.vae import VaeModel

TINY = VaeConfig(widths=(4, 8), blocks=1, groups=2)
DRAWINGS = 6


def random_parameters(model: VaeModel, seed: int = 0) -> dict[str, Any]:
    """Every parameter random, norms' scales around 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.normal(len(x.shape) < 2, 0.3, x.shape).astype(np.float32), model.abstract
    )


def write_vae(
    folder: Path, config: VaeConfig, parameters: Mapping[tuple[str, ...], np.ndarray]
) -> None:
    """Write a VAE as a folder that diffusers reads, from its parameters by path."""
    write_part(folder, config_fields(config), vae_tensors(config), parameters)


def config_fields(config: VaeConfig) -> dict[str, Any]:
    """Return the fields of a VAE's `config.json`."""
    c = config
    return {
        "_class_name": CLASS,
        "in_channels": c.image_channels,
        "out_channels": c.image_channels,
        "down_block_types": ["DownEncoderBlock2D"] * len(c.widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(c.widths),
        "block_out_channels": list(c.widths),
        "layers_per_block": c.blocks,
        "latent_channels": c.channels,
        "norm_num_groups": c.groups,
        "mid_block_add_attention": c.attention,
        "use_quant_conv": c.encoder_product,
        "use_post_quant_conv": c.decoder_product,
        "scaling_factor": c.scale,
        "shift_factor": c.shift or None,
    }


def save_vae(folder: Path, config: VaeConfig = TINY, seed: int = 0) -> Path:
    """Write the folder of such a VAE."""
    parameters = random_parameters(VaeModel.build(config), seed)
    write_vae(
        folder,
        config,
        {tuple(key.key for key in path): x for path, x in jax.tree.leaves_with_path(parameters)},
    )
    return folder


def drawing_words(tmp_path: Path) -> list[str]:
    """A config's edits: images to draw of two sizes, one of them broken, and a record of text alone."""
    save_vae(tmp_path / "model" / "vae")
    save_tokenizer(tmp_path / "chat")
    sizes = [(8, 12), (16, 8)]
    write(tmp_path, {f"{i}.png": picture(*sizes[i % 2], colour=30 * i) for i in range(DRAWINGS)})
    whole = picture(8, 8)
    write(tmp_path, {"broken.png": whole[:-20]})  # its header is whole
    records = [asked(f"draw {i}", "<image>", image=f"{i}.png") for i in range(DRAWINGS)]
    records += [asked("draw", "<image>", image="broken.png"), asked("why?")]
    lines(tmp_path / "train.jsonl", records)
    lines(tmp_path / "test.jsonl", records[:2])
    generator = "model.generators.picture"
    return [
        "tiny_text",
        "model.llm.vocab=320",
        f"{generator}=diffusion_transformer",
        *(
            f"{generator}.{key}={n}"
            for key, n in (("layers", 1), ("width", 32), ("heads", 2), ("mlp_width", 32))
        ),
        f"{generator}.condition_width=16",
        f"{generator}.min_patches=4",
        f"{generator}.queries=4",
        f"{generator}.latents=vae",
        f"{generator}.latents.factor=2",
        f"{generator}.latents.weights={tmp_path}/model",
        "batch.rows.picture=1",
        f"data.chat.folder={tmp_path}/chat",
        "data.chat.placeholders.image.written=<image>",
        "data.sources={}",
        "data.sources.drawings=llava",
        f"data.sources.drawings.path={tmp_path}/train.jsonl",
        f"data.sources.drawings.test={tmp_path}/test.jsonl",
        f"data.cache={tmp_path}/cache",
    ]
