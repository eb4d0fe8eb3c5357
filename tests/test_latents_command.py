"""`python -m mmjax.index CONFIG --latents`: made once, gone on with, and made again where something has changed."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import run
from PIL import Image
from vae_folder import DRAWINGS, drawing_words, save_vae

sys.path.append(str(Path(__file__).parent / "data"))
from files_made import asked

from mmjax import generate, index, inspect, train
from mmjax.config import Generator
from mmjax.config.loading import find_config, load
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.placement import ONE_RANK
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import Source
from mmjax.data.sources.opening import open_sources
from mmjax.data.storage.latent_store import StoredLatents
from mmjax.errors import BadMedia
from mmjax.runtime.latents import latent_folders, read_images
from mmjax.runtime.vae import load_vae


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return drawing_words(tmp_path)


def made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str
) -> tuple[list[Path], str, str]:
    """The stores' folders that the command names, and its output."""
    ended = run(capsys, index.main, *words, "--latents", f"--out={tmp_path}/out")
    assert ended.code == 0, ended.err
    return (
        [Path(f) for f in re.findall(r"^latents of .* in (/.*)$", ended.out, re.M)],
        ended.out,
        ended.err,
    )


def opened(words: list[str]) -> tuple[StoredLatents, Source, Generator]:
    """The latents of the drawings, in the folder where training looks for them."""
    config = load(find_config("tiny_text"), words[1:])
    sources = open_sources(config, "train", Path())
    folders = latent_folders(config, sources, build_index(sources, config.model.item_modules))
    source = sources["drawings"]
    return (
        StoredLatents(folders["drawings", "picture"], len(source), "they"),
        source,
        config.model.generators["picture"],
    )


def test_every_image_to_be_made_has_the_latents_that_the_vae_makes_of_it(words, tmp_path, capsys):
    _, out, _ = made(capsys, tmp_path, *words)
    assert f"latents of drawings for picture: {DRAWINGS} images" in out
    assert "latents of drawings test for picture: 2 images" in out
    (bad,) = [
        json.loads(line) for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()
    ]
    assert bad["sample"] == f"drawings[{DRAWINGS}]"
    assert "truncated PNG" in bad["reason"]
    stored, source, generator = opened(words)
    vae = load_vae(generator.latents, "")
    for sample in range(DRAWINGS):
        (image,) = read_images(source, "picture", sample)
        for moment, exact in zip(stored.moments(sample, 0), vae.encode(image[None]), strict=True):
            np.testing.assert_allclose(moment, np.asarray(exact)[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(BadMedia, match="truncated PNG"):
        stored.moments(DRAWINGS, 0)
    with pytest.raises(BadMedia, match="there are no latents of its image 0"):
        stored.moments(DRAWINGS + 1, 0)  # of text alone


def test_latents_are_made_again_only_where_the_vae_the_images_or_the_data_has_changed(
    words, tmp_path, capsys
):
    first, _, err = made(capsys, tmp_path, *words)
    assert len(first) == 2
    assert err == ""
    # What the model does with them, and how its text is written, changes no latents.
    other_model = [
        "model.generators.picture.layers=2",
        "model.llm.vocab=330",
        "data.chat.placeholders.image.before=:",
    ]
    assert made(capsys, tmp_path, *words, *other_model)[0] == first

    prepared = ["images=fixed_size", "images.resize=8", "images.crop=8,8"]
    resized = [f"model.generators.picture.{edit}" for edit in prepared]
    second, _, err = made(capsys, tmp_path, *words, *resized)
    assert not set(first) & set(second)
    assert (
        f"drawings: latents are made again, since the preparation of images changed after those in {first[0]}"
        in err
    )

    save_vae(tmp_path / "model" / "vae", seed=1)
    third, _, err = made(capsys, tmp_path, *words)
    assert not set(first) & set(third)
    assert "since the VAE changed after" in err
    assert made(capsys, tmp_path, *words)[2] == ""

    record = json.dumps(asked("draw again", "<image>", image="0.png"))
    (tmp_path / "test.jsonl").write_text(record + "\n")
    fourth, _, err = made(capsys, tmp_path, *words)
    assert fourth[0] == third[0]
    assert "drawings test: latents are made again, since the data changed after" in err


def test_a_run_without_all_latents_says_how_to_make_them(words, tmp_path, capsys):
    words = [
        *words,
        f"run={tmp_path}/run",
        "training.steps=3",
        "schedule.warmup=0",
        "data.sources.drawings.test=",
    ]
    message = "model.generators.picture: the latents of data.sources.drawings are missing for 8 of 8 samples"
    ended = run(capsys, train.main, *words)
    assert ended.code == 2
    assert message in ended.err
    assert "--latents" in ended.err
    first, *_ = made(capsys, tmp_path, *words)
    (shard,) = first[0].glob("*-*")
    shard.rename(first[0] / "gone")
    assert message in run(capsys, train.main, *words).err


def test_training_sees_other_latents_of_an_image_in_every_step_and_the_same_again(
    words, tmp_path, capsys
):
    made(capsys, tmp_path, *words)
    config = load(
        find_config("tiny_text"), [*words[1:], "batch.size.count=4", "data.max_bad_share=0.5"]
    )
    sources = open_sources(config, "train", Path())
    index = build_index(sources, config.model.item_modules)
    index.save(tmp_path / "index")
    planner, layout = make_planner(index, config, [1.0], ONE_RANK)
    latents = latent_folders(config, sources, index)
    loader = StepLoader(
        config, planner.grouper.budget, layout, tmp_path / "index", tmp_path, latents=latents
    )
    stored, *_ = opened(words)
    drawn: dict[int, list[np.ndarray]] = {}
    bad: dict[int, str] = {}
    for step in range(6):
        loaded = pickle.loads(pickle.dumps(loader))(step)
        bad |= loaded.unreadable
        assert loaded.content == loader(step).content
        for batch in loaded.microbatches:
            items = batch.items["picture"]
            for sample in set(items.owner[items.item >= 0].tolist()) - {DRAWINGS}:
                drawn.setdefault(sample, []).append(items.values[items.owner == sample])
    assert set(bad) == {DRAWINGS}
    assert "truncated PNG" in bad[DRAWINGS]
    assert set(drawn) == set(range(DRAWINGS))
    for sample, values in drawn.items():
        assert len({value.tobytes() for value in values}) > 1
        moments = stored.moments(sample, 0)
        scale = config.model.generators["picture"].latents.scale
        # Patches are 2 x 2 latents; their order does not matter for means over all.
        spread = scale * np.exp(0.5 * moments.log_variance.astype(np.float32)).max()
        mean = scale * moments.mean.astype(np.float32).mean()
        assert abs(np.mean(values[0]) - mean) < 4 * spread


@pytest.mark.exhaustive  # it compiles the programs of a whole run
def test_a_run_trains_on_latents_is_replayed_and_draws(words, tmp_path, capsys):
    made(capsys, tmp_path, *words)
    short = [
        "training.steps=3",
        "schedule.warmup=0",
        "batch.size.count=4",
        "data.max_bad_share=0.5",
    ]
    ended = run(capsys, train.main, *words, *short, f"run={tmp_path}/run")
    assert ended.code == 0, ended.err
    assert f"left out drawings[{DRAWINGS}], which cannot be used: item 0 (picture): " in ended.out
    for step in (1, 2, 3):
        ended = run(
            capsys, inspect.main, tmp_path / "run", "--step", step, f"--out={tmp_path}/step{step}"
        )
        assert "as it was logged" in ended.out
    ended = run(
        capsys, generate.main, tmp_path / "run", "draw 3", f"--out={tmp_path}/3.png", "--size=16x8"
    )
    assert ended.code == 0, ended.err
    assert Image.open(tmp_path / "3.png").size == (8, 16)


def test_a_config_without_a_vae_is_refused(words, capsys):
    ended = run(capsys, index.main, "tiny_text", "--latents")
    assert ended.code == 2
    assert "the model has no generator with a VAE" in ended.err
    ended = run(
        capsys, index.main, *words, "model.generators.picture.latents.weights=", "--latents"
    )
    assert ended.code == 2
    assert "latents.weights is empty; name the diffusers folder" in ended.err
