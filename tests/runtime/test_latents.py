"""Latents are made once: in batches by size, a bad image is a bad sample, and a killed process goes on where it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from vae_folder import TINY, random_parameters

from mmjax.data.sample import BadSample
from mmjax.data.storage.files import Unreadable
from mmjax.data.storage.latent_store import BadImages, LatentStore, StoredLatents, shards
from mmjax.errors import BadMedia
from mmjax.models.vae import VaeModel
from mmjax.runtime import latents as module
from mmjax.runtime.latents import make_latents
from mmjax.runtime.vae import Vae

SAMPLES = 12
FAULTS = {
    4: BadSample("no image"),
    7: BadMedia("it is grey noise"),
    9: Unreadable("x.png is missing"),
}
SIZES = ((4, 4), (8, 6), (2, 10))


def tiny_vae(devices: int = 1) -> Vae:
    model = VaeModel.build(TINY)
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("images",))
    params = jax.device_put(random_parameters(model), NamedSharding(mesh, PartitionSpec()))
    return Vae(model, params, mesh)


def read(sample: int) -> list[np.ndarray]:
    """Sample k has k % 3 images, of several sizes."""
    rng = np.random.default_rng(sample)
    return [
        rng.integers(0, 256, (*SIZES[(sample + k) % len(SIZES)], 3), np.uint8)
        for k in range(sample % 3)
    ]


def check(folder: Path, vae: Vae) -> None:
    """Every image's latents are those of the image alone."""
    stored = StoredLatents(folder, SAMPLES, "mine")
    for sample in range(SAMPLES):
        for number, image in enumerate(read(sample)):
            mean, log_variance = (np.asarray(part)[0] for part in vae.encode(image[None]))
            found = stored.moments(sample, number)
            np.testing.assert_allclose(found.mean, mean, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(found.log_variance, log_variance, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("devices", "pixels"), [(1, 60), (3, 60)])
def test_latents_are_those_of_each_image_alone_whatever_the_batches(
    devices, pixels, tmp_path, monkeypatch
):
    monkeypatch.setattr("mmjax.runtime.vae.CPU_PIXELS", pixels)
    vae = tiny_vae(devices)
    counts = []
    store = LatentStore(tmp_path, SAMPLES)
    make_latents(store, read, vae, counts.append)
    assert counts == list(range(SAMPLES + 1))
    check(tmp_path, vae)
    make_latents(store, None, vae)  # nothing is read again
    assert store.contents().images == sum(len(read(sample)) for sample in range(SAMPLES))
    assert store.contents().bad == []


def test_a_bad_image_is_a_bad_sample_and_one_that_could_not_be_read_is_tried_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "SHARD_BYTES", 100)
    vae = tiny_vae()
    store = LatentStore(tmp_path, SAMPLES)

    def broken(sample: int) -> list[np.ndarray]:
        if sample in FAULTS:
            raise FAULTS[sample]
        return [np.zeros((5, 4, 3), np.uint8)] if sample == 1 else read(sample)

    reasons = {
        1: "an image is prepared as 5 x 4 pixels, and the VAE takes multiples of 2",
        **{sample: str(error) for sample, error in FAULTS.items()},
    }
    make_latents(store, broken, vae)
    assert store.contents().bad == [
        BadImages(sample, reason, retry=sample == 9) for sample, reason in sorted(reasons.items())
    ]
    assert len(shards(tmp_path)) > 2
    for sample, reason in reasons.items():
        with pytest.raises(BadMedia, match=reason):
            StoredLatents(tmp_path, SAMPLES, "mine").moments(sample, 0)
    seen = []

    def watched(sample: int) -> list[np.ndarray]:
        seen.append(sample)
        return read(sample)

    make_latents(store, watched, vae)
    assert {entry.sample for entry in store.contents().bad} == {1, 4, 7} - set(seen)
    assert 9 in seen
    assert len(seen) < 6
    for sample in {1, 4, 7} - set(seen):
        with pytest.raises(BadMedia, match=reasons[sample]):
            StoredLatents(tmp_path, SAMPLES, "mine").moments(sample, 0)


def test_latents_that_are_not_finite_make_a_bad_sample(tmp_path):
    vae = tiny_vae()
    product = vae.params["encoder"]["product"]
    product["bias"] = product["bias"].at[0].set(1e5)  # float16 ends at 65,504
    store = LatentStore(tmp_path, 3)
    make_latents(store, read, vae)
    assert store.contents().bad == [
        BadImages(k, f"the VAE's latents of its image {k - 1} are not finite") for k in (1, 2)
    ]


def test_a_killed_process_goes_on_where_it_was(tmp_path):
    vae = tiny_vae()
    make_latents(LatentStore(tmp_path / "source", SAMPLES), read, vae)
    # The system kills it in the middle of writing the sixth shard of one sample.
    child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)])
    assert child.returncode == -signal.SIGKILL
    folder = tmp_path / "latents"
    assert list(folder.glob("*.partial"))
    assert shards(folder) == [range(k, k + 1) for k in range(5)]
    counts = []
    make_latents(LatentStore(folder, SAMPLES), read, vae, counts.append)
    assert counts == list(range(5, SAMPLES + 1))
    assert not list(folder.glob("*.partial"))
    check(folder, vae)


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from mmjax.data.storage.latent_store import LatentStore, StoredLatents, NAMES

folder = Path(sys.argv[1])
source = StoredLatents(folder / "source", 12, "mine")
store = LatentStore(folder / "latents", 12)
save, written = np.save, []

def save_or_die(path, array):
    save(path, array)
    written.append(path)
    if len(written) == 5 * len(NAMES) + 2:
        os.kill(os.getpid(), signal.SIGKILL)

np.save = save_or_die
for k in range(12):
    store.write(range(k, k + 1), {(k, n): source.moments(k, n) for n in range(k % 3)}, [])
"""
