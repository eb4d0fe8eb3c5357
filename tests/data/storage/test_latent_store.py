"""Stored latents come back as they were made, or not at all; shards cover the samples of a source without gaps."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from mmjax.config import FixedSize, VaeLatents
from mmjax.data.storage.latent_store import (
    BadImages,
    LatentStore,
    MadeOf,
    Moments,
    StoredLatents,
    shard_folder,
)
from mmjax.errors import BadMedia, UserError

MADE_OF = MadeOf("mine", "draw", "records", repr(FixedSize(8)), "vae")


def moments(rng: np.random.Generator) -> Moments:
    shape = (*rng.integers(1, 5, 2), 4)
    return Moments(
        rng.normal(size=shape).astype(np.float16), rng.normal(-9, 1, shape).astype(np.float16)
    )


@pytest.fixture
def made(tmp_path: Path) -> tuple[LatentStore, dict[tuple[int, int], Moments]]:
    """Three shards of 10 samples with up to three images each, of which sample 3 is bad and 5 could not be read."""
    rng = np.random.default_rng(0)
    store = LatentStore(tmp_path / "latents", 10)
    images = {
        (sample, int(n)): moments(rng)
        for sample in range(10)
        for n in rng.permutation(5)[: sample % 4]
    }
    images = {key: value for key, value in images.items() if key[0] not in (3, 5)}
    bad = {3: BadImages(3, "it is bad"), 5: BadImages(5, "it is missing", retry=True)}
    for samples in (range(4), range(4, 6), range(6, 10)):
        chosen = {key: value for key, value in images.items() if key[0] in samples}
        store.write(samples, chosen, [bad[sample] for sample in samples if sample in bad])
    return store, images


def test_every_image_comes_back_and_others_have_a_reason(made):
    store, images = made
    stored = StoredLatents(store.folder, 10, "mine")
    for key, moments in images.items():
        for found, value in zip(stored.moments(*key), moments, strict=True):
            assert found.dtype == np.float16
            np.testing.assert_array_equal(found, value)
    with pytest.raises(BadMedia, match="it is bad"):
        stored.moments(3, 0)
    with pytest.raises(BadMedia, match="there are no latents of its image 7"):
        stored.moments(2, 7)


def test_what_is_missing_damaged_or_could_not_be_read_is_made_again(made, capsys):
    store, _ = made
    assert store.remaining() == [range(4, 6)]  # which has an image that could not be read
    assert not shard_folder(store.folder, range(4, 6)).exists()
    values = shard_folder(store.folder, range(6, 10)) / "values.npy"
    values.write_bytes(values.read_bytes()[:-1] + b"?")
    (store.folder / "0000000004-0000000006.0123456789ab.partial").mkdir()
    assert store.remaining() == [range(4, 10)]
    assert "values.npy is not what was written; it is made again" in capsys.readouterr().err
    assert [path.name for path in store.folder.iterdir()] == ["0000000000-0000000004"]
    with pytest.raises(
        UserError,
        match=r"mine are missing for 6 of 10 samples \(in .*\); make them with .*--latents",
    ):
        StoredLatents(store.folder, 10, "mine")
    with pytest.raises(UserError, match="mine are missing for 3 of 3 samples"):
        StoredLatents(store.folder / "other", 3, "mine")


def test_every_byte_of_an_images_latents_counts(tmp_path):
    store = LatentStore(tmp_path, 2)
    rng = np.random.default_rng(0)
    images = {(k, 0): Moments(*rng.normal(size=(2, 1, 2, 1)).astype(np.float16)) for k in range(2)}
    store.write(range(2), images, [])
    for name in ("values", "items"):
        file = shard_folder(tmp_path, range(2)) / f"{name}.npy"
        sound = file.read_bytes()
        for at in range(len(sound) - np.load(file).nbytes, len(sound)):
            spoiled = bytearray(sound)
            spoiled[at] ^= 1 << at % 8
            file.write_bytes(spoiled)
            stored = StoredLatents(tmp_path, 2, "mine")
            bad = 0
            for key, value in images.items():
                try:
                    np.testing.assert_array_equal(stored.moments(*key), value)
                except BadMedia:
                    bad += 1
            assert bad, (name, at)
        file.write_bytes(sound)
    file.write_bytes(sound[:9])
    with pytest.raises(BadMedia, match=r"its latents in .* cannot be read: ValueError"):
        StoredLatents(tmp_path, 2, "mine").moments(0, 0)


def test_latents_are_drawn_around_their_mean_and_scaled():
    rng = np.random.default_rng(0)
    latents = VaeLatents(scale=0.5, shift=0.25)
    drawn = Moments(
        np.full((100, 100, 4), 2.25, np.float16), np.full((100, 100, 4), np.log(0.04), np.float16)
    )
    assert (drawn.draw(latents) == 1.0).all()
    values = drawn.draw(latents, rng)
    assert values.dtype == np.float32
    assert abs(values.mean() - 1) < 1e-3
    assert abs(values.std() - 0.5 * 0.2) < 1e-3
    np.testing.assert_array_equal(values, drawn.draw(latents, np.random.default_rng(0)))


def test_another_vae_preparation_or_source_has_another_folder_and_says_what_has_changed(tmp_path):
    with LatentStore(MADE_OF.folder(tmp_path), 3).being_made(MADE_OF):
        pass
    assert MADE_OF.others(tmp_path) == []
    for changed, what in (
        (MadeOf("mine", "draw", "records", MADE_OF.images, "another"), "the VAE"),
        (
            MadeOf("mine", "draw", "records", "another", "another"),
            "the preparation of images and the VAE",
        ),
        (MadeOf("mine", "draw", "another", MADE_OF.images, "vae"), "the data"),
    ):
        assert changed.folder(tmp_path) != MADE_OF.folder(tmp_path)
        assert changed.others(tmp_path) == [(what, MADE_OF.folder(tmp_path))]
    renamed = MadeOf("theirs", "paint", "records", MADE_OF.images, "vae")
    assert renamed.folder(tmp_path) == MADE_OF.folder(tmp_path)
    assert MadeOf("theirs", "draw", "records", "another", "another").others(tmp_path) == []


def test_one_process_at_a_time_makes_latents(tmp_path):
    store = LatentStore(tmp_path, 3)
    with (
        store.being_made(MADE_OF),
        pytest.raises(UserError, match="another process makes these latents"),
        store.being_made(MADE_OF),
    ):
        pass
    with store.being_made(MADE_OF):
        pass


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    images = {(0, 0): Moments(*np.zeros((2, 50, 50, 4), np.float16))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))  # bytes that a file may have
    try:
        with pytest.raises(
            UserError, match=r"0000000000-0000000001 cannot be written: .*; make room there"
        ):
            LatentStore(tmp_path, 1).write(range(1), images, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"file/latents cannot be written: Not a directory"),
        LatentStore(tmp_path / "file" / "latents", 3).being_made(MADE_OF),
    ):
        pass
