"""A frozen VAE with its weights, replicated on this process's devices: images to latents and back, in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from mmjax.config import VaeConfig, VaeLatents
from mmjax.errors import UserError
from mmjax.hf.folder import HfFolder
from mmjax.hf.vae import open_vae, read_vae, vae_tensors
from mmjax.models.layer_stacks import Params
from mmjax.models.vae import VaeModel
from mmjax.runtime.weights import check_fits

# Pixels that a device takes at a time: 8 images of 512 x 512, to encode which Stable Diffusion's
# VAE needs 3 GiB beside its weights, and 7 GiB to decode them.
PIXELS = 2**21
CPU_PIXELS = 2**18
MAX_IMAGES = 64  # of a device, however small they are


@dataclass(frozen=True, eq=False)
class Vae:
    """A frozen variational autoencoder, in float32: latents made once are to be as good as they can be."""

    model: VaeModel
    params: Params = field(repr=False)
    mesh: Mesh

    @property
    def config(self) -> VaeConfig:
        return self.model.config

    def batch(self, height: int, width: int) -> int:
        """Return how many images of this size, in pixels, are computed at a time, on all devices together."""
        devices = self.mesh.devices.flatten()
        pixels = CPU_PIXELS if devices[0].platform == "cpu" else PIXELS
        return len(devices) * min(max(1, pixels // (height * width)), MAX_IMAGES)

    def encode(self, images: np.ndarray) -> tuple[Array, Array]:
        """Compute the mean and log variance of up to a batch of images, uint8 `[B, H, W, C]`.

        They are float32 `[batch, h, w, c]`, with something behind the B images, not scaled, and may
        still be computed when this returns. There is one program for each size. Raises ValueError
        for sides that are no multiples of the factor.
        """
        return self._in_batch(self._encode, images, images.shape[1:3])

    def decode(self, latents: np.ndarray) -> Array:
        """Compute images uint8 `[batch, H, W, C]` of up to a batch of latents `[B, h, w, c]`, which are not scaled."""
        factor = self.config.factor
        return self._in_batch(
            self._decode, latents, (latents.shape[1] * factor, latents.shape[2] * factor)
        )

    def _in_batch(self, compute: Callable, arrays: np.ndarray, size: tuple[int, int]) -> Array:
        missing = self.batch(*size) - len(arrays)
        padded = np.pad(arrays, ((0, missing), (0, 0), (0, 0), (0, 0)))
        return compute(
            self.params, jax.device_put(padded, NamedSharding(self.mesh, PartitionSpec("images")))
        )

    @cached_property
    def _encode(self) -> Callable:
        def encode(params: Params, images: Array) -> tuple[Array, Array]:
            return self.model.encode(params, images.astype(jnp.float32) / 127.5 - 1)

        return jax.jit(encode)

    @cached_property
    def _decode(self) -> Callable:
        def decode(params: Params, latents: Array) -> Array:
            image = self.model.decode(params, latents.astype(jnp.float32))
            return jnp.clip(jnp.round((image + 1) * 127.5), 0, 255).astype(jnp.uint8)

        return jax.jit(decode)


def load_vae(latents: VaeLatents, key: str) -> Vae:
    """Load the VAE of a generator's latents.

    key: of the latents in the config, for messages. Raises UserError where the folder is no VAE, or
    makes other latents.
    """
    folder = open_vae(latents.weights)
    config = read_vae(folder)
    for name in ("channels", "factor", "scale", "shift"):
        if (value := getattr(config, name)) != (configured := getattr(latents, name)):
            raise UserError(
                f"{key}.{name}={configured}, but {folder.path} says {value}; use {key}.{name}={value}"
            )
    if config.image_channels != 3:
        raise UserError(
            f"{folder.path}: in_channels={config.image_channels} is not supported: images have 3 channels"
        )
    model = VaeModel.build(config)
    mesh = Mesh(np.asarray(jax.local_devices()), ("images",))
    return Vae(model, load_parameters(folder, model, NamedSharding(mesh, PartitionSpec())), mesh)


def load_parameters(
    folder: HfFolder, model: VaeModel, sharding: jax.sharding.Sharding | None = None
) -> Params:
    """Load a VAE's float32 parameters. Raises UserError for tensors that are missing, unexpected, or do not fit."""
    names = vae_tensors(model.config, folder)
    read = set()

    def load(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        part = names.find(tuple(key.key for key in path))
        check_fits(folder, part, leaf.shape)
        read.add(part.key)
        value = part.from_hf(folder.read(part.key), leaf.shape).astype(np.float32)
        return jax.device_put(value, sharding)

    params = jax.tree.map_with_path(load, model.abstract)
    if unexpected := sorted(set(folder.tensors) - read):
        raise UserError(
            f"{folder.path} has {len(unexpected)} tensors that its VAE lacks, such as {unexpected[0]}: its config.json "
            "does not describe its weights"
        )
    return params


def decode_pictures(latents: np.ndarray, vae: Vae) -> np.ndarray:
    """Decode latents `[B, h, w, c]`, scaled as generators see them, to pictures uint8 `[B, H, W, C]`.

    In batches, so that memory is bounded whatever B is.
    """
    c = vae.config
    plain = np.asarray(latents, np.float32) / c.scale + c.shift
    height, width = plain.shape[1] * c.factor, plain.shape[2] * c.factor
    pictures = np.empty((len(plain), height, width, c.image_channels), np.uint8)
    batch = vae.batch(height, width)
    for k in range(0, len(plain), batch):
        part = plain[k : k + batch]
        pictures[k : k + batch] = np.asarray(vae.decode(part))[: len(part)]
    return pictures
