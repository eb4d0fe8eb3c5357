"""Images that a frozen VAE encodes in the step train a generator as latents of the same draw would that were stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run
from tiny_run import MESHES, gradients, load_steps, make_executor, paths, worst_leaf
from vae_folder import TINY, drawing_words, save_vae

from mmjax import generate, train
from mmjax.batch import Microbatch
from mmjax.config import Config, FixedSize, VaeConfig
from mmjax.config.loading import apply_overrides, find_config, load
from mmjax.config.model import with_changes
from mmjax.cost import table
from mmjax.cost.table import parameters
from mmjax.cost.trace import tower_batch
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.errors import UserError
from mmjax.hf.vae import open_vae
from mmjax.models.generation import draw
from mmjax.models.model import Model, module_of
from mmjax.models.vae import VaeModel
from mmjax.planning.flops import executed, model_flops, stage_flops
from mmjax.planning.work import row_work
from mmjax.runtime.executor import State
from mmjax.runtime.vae import load_parameters
from mmjax.runtime.weights import load_pretrained

GENERATOR = "model.generators.picture"
KINDS = {
    # a key's has a gradient of rounding alone
    "transformer": (f"{GENERATOR}.biases=query,value,output,up,down",),
    "unet": (
        f"{GENERATOR}=unet",
        *(
            f"{GENERATOR}.{key}={value}"
            for key, value in (("widths", "4,8"), ("heads", "2,2"), ("size", "4,6"))
        ),
        f"{GENERATOR}.attending=true,false",
        *(
            f"{GENERATOR}.{key}={value}"
            for key, value in (("blocks", 1), ("groups", 2), ("queries", 4))
        ),
        f"{GENERATOR}.condition_width=16",
        f"{GENERATOR}.latents=vae",
        f"{GENERATOR}.latents.factor=2",
    ),
}


def encoding_words(folder: Path, kind: str) -> list[str]:
    """Edits of tiny_text: images of 8 x 12 pixels to draw, one of them broken, encoded in the step."""
    words = drawing_words(folder)[1:]
    if kind == "unet":
        words = [word for word in words if not word.startswith(GENERATOR)]
    return [
        *words,
        *KINDS[kind],
        f"{GENERATOR}.latents.weights={folder}/model",
        f"{GENERATOR}.latents.encode=step",
        *(
            f"{GENERATOR}.latents.vae.{key}={value}"
            for key, value in (("widths", "4,8"), ("blocks", 1), ("groups", 2))
        ),
        f"{GENERATOR}.images=fixed_size",
        f"{GENERATOR}.images.resize=8,12",
        f"{GENERATOR}.images.crop=8,12",
        *("batch.size.count=8", "batch.shapes=1", "data.workers=0", "data.sources.drawings.test="),
    ]


def encoding_config(folder: Path, kind: str) -> Config:
    return load(find_config("tiny_text"), encoding_words(folder, kind))


def stored(config: Config, batch: Microbatch) -> Microbatch:
    """The batch with latents in place of pixels, each image encoded by itself."""
    generator, items = config.model.generators["picture"], batch.items["picture"]
    on_device = jax.tree.map(jnp.asarray, items)
    posterior = np.asarray(draw(np.zeros(2, np.uint32), "picture", generator, on_device).posterior)
    patch, side = generator.patch, generator.patch * generator.latents.factor
    rows, columns = (n // patch for n in generator.image_size)
    values = np.zeros((*items.item.shape, generator.patch_values), np.float32)
    model = VaeModel.build(generator.latents.vae)
    params, encode = (
        load_parameters(open_vae(generator.latents.weights), model),
        jax.jit(model.encode),
    )
    for row, owned in enumerate(items.item):
        for image in np.unique(owned[owned >= 0]):  # an unreadable one leaves a gap
            at = owned == image
            pixels = items.values[row, at].reshape(rows, columns, side, side, 3).swapaxes(1, 2)
            pixels = pixels.reshape(rows * side, columns * side, 3)
            mean, log_variance = (
                np.asarray(x)[0]
                .reshape(rows, patch, columns, patch, -1)
                .swapaxes(1, 2)
                .reshape(rows * columns, -1)
                for x in encode(params, jnp.asarray(pixels[None], jnp.float32) / 127.5 - 1)
            )
            values[row, at] = (
                mean + np.exp(0.5 * log_variance) * posterior[row, at]
            ) * generator.latents.scale
    return batch._replace(items=batch.items | {"picture": items._replace(values=values)})


@pytest.mark.default_cases("transformer")
@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_and_gradients_are_those_of_stored_latents_and_the_vae_gets_none(kind, tmp_path):
    config = encoding_config(tmp_path, kind)
    (batches,) = load_steps(config, tmp_path, 1)
    assert all(batch.items["picture"].values.dtype == np.uint8 for batch in batches)
    executor = make_executor(config, MESHES["one device"])
    state = executor.init(
        jax.random.key(0), load_pretrained(executor.model, executor.parameter_shardings)
    )
    assert {module_of(tuple(name.split("."))) for name in paths(state.frozen)} == {"picture.vae"}
    found = gradients(executor, state, batches)
    assert found.losses.images["picture"][1] > 0

    latents = replace(config.model.generators["picture"].latents, encode="once")
    once = replace(config, model=with_changes(config.model, {"picture": {"latents": latents}}))
    other = make_executor(once, MESHES["one device"])
    state = State((state.stages[0]._replace(frozen={}),))
    wanted = gradients(other, state, [stored(config, batch) for batch in batches])
    np.testing.assert_allclose(found.losses.loss, wanted.losses.loss, rtol=1e-4)
    np.testing.assert_allclose(
        found.losses.images["picture"], wanted.losses.images["picture"], rtol=1e-4
    )
    assert worst_leaf(found.gradients, wanted.gradients) < (1e-4, "")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_encoded_on_every_mesh_as_on_one_device(kind, tmp_path):
    config = encoding_config(tmp_path, kind)
    config = replace(
        config, batch=replace(config.batch, rows=config.batch.rows | {"llm": 4, "picture": 4})
    )
    sums = {}
    for mesh, topology in (
        ("one device", ONE_RANK),
        ("data=2 x fsdp=2 x tensor=2", Topology(4, 4, 4)),
    ):
        (batches,) = load_steps(config, tmp_path, 1, topology)
        executor = make_executor(config, MESHES[mesh])
        state = executor.init(
            jax.random.key(0), load_pretrained(executor.model, executor.parameter_shardings)
        )
        sums[mesh] = gradients(executor, state, batches)
    one, many = sums.values()
    np.testing.assert_allclose(
        many.losses.images["picture"], one.losses.images["picture"], rtol=1e-5
    )
    assert worst_leaf(many.gradients, one.gradients) < (1e-4, "")


@pytest.mark.exhaustive  # it compiles the programs of a whole run
def test_a_run_encodes_in_its_steps_and_draws(capsys, tmp_path):
    short = [
        "training.steps=2",
        "schedule.warmup=0",
        "data.max_bad_share=0.5",
        f"run={tmp_path}/run",
    ]
    words = [word for word in encoding_words(tmp_path, "transformer") if not word.endswith("test=")]
    ended = run(capsys, train.main, "tiny_text", *words, *short)
    assert ended.code == 0, ended.err
    ended = run(
        capsys, generate.main, tmp_path / "run", "draw 1", "--size=8x12", f"--out={tmp_path}/1.png"
    )
    assert ended.code == 0, ended.err


def test_what_encodes_is_planned(tmp_path):
    config = encoding_config(tmp_path, "transformer")
    model = Model.build(config.model, jnp.float32)
    assert parameters(config.model)["picture.vae"] == sum(
        x.size for x in jax.tree.leaves(model.abstract["vaes"])
    )
    assert config.model.generators["picture"].input_values == 4 * 4 * 3
    pixels = tower_batch(config.model, "picture", (2, 18)).values
    assert (pixels.shape, pixels.dtype) == ((2, 18, 4 * 4 * 3), np.uint8)
    latents = replace(config.model.generators["picture"].latents, encode="once")
    once = with_changes(config.model, {"picture": {"latents": latents}})
    shape = {"llm": (1, 64), "picture": (2, 18)}  # three images of 6 patches in a row
    work = row_work(config.model, shape)
    cost = table.encoding(config.model, "picture")  # of one of the six patches of an image
    for count, rates in (
        (lambda m: model_flops(m, work, set()), cost.needed_forward),
        (lambda m: executed(m, shape, set()), cost.forward + cost.beside_forward),
        (
            lambda m: {"picture": stage_flops(m, "picture", range(1), ("none",), shape)},
            cost.forward + cost.beside_forward,
        ),
    ):
        more = count(config.model)["picture"].forward - count(once)["picture"].forward
        assert more == pytest.approx(6 * 6 * rates.sum())


@pytest.mark.parametrize("widths", [(32, 64), (32, 64, 64)])
def test_flops_of_encoding_are_xlas(widths, tmp_path):
    vae = VaeConfig(widths=widths, blocks=1, groups=8)
    planned = encoding_config(tmp_path, "transformer").model
    generator = planned.generators["picture"]
    latents = replace(generator.latents, vae=vae, factor=vae.factor)
    images = FixedSize(crop=(16 * vae.factor, 24 * vae.factor))
    planned = with_changes(planned, {"picture": {"latents": latents, "images": images}})
    model = VaeModel.build(vae)
    image = jax.ShapeDtypeStruct((1, 16 * vae.factor, 24 * vae.factor, 3), jnp.float32)
    found = jax.jit(model.encode).lower(model.abstract, image).compile().cost_analysis()["flops"]
    cost = table.encoding(planned, "picture")
    patches = 16 * 24 / generator.patch**2
    assert patches * (cost.forward + cost.beside_forward).sum() == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (["images=as_is"], "images of one size are encoded in a step, and these have any"),
        (["images.crop=8,10"], "no whole patches of 4 x 4 pixels"),
        (
            ["latents.vae.widths=4,8,8"],
            "its vae says 4; use model.generators.picture.latents.factor=4",
        ),
        (["latents.vae.scale=2.0"], "its vae says 2.0"),
    ],
)
def test_what_cannot_be_encoded_in_a_step_is_refused(edits, message, tmp_path):
    config = encoding_config(tmp_path, "transformer")
    with pytest.raises(UserError, match=message):
        apply_overrides(config, [f"{GENERATOR}.{edit}" for edit in edits])


def test_a_folder_of_another_vae_or_none_is_refused(tmp_path):
    config = encoding_config(tmp_path, "transformer")
    executor = make_executor(config, MESHES["one device"])
    save_vae(tmp_path / "model" / "vae", replace(TINY, blocks=2))
    with pytest.raises(UserError, match="is another VAE than that of"):
        load_pretrained(executor.model, executor.parameter_shardings)
    latents = replace(config.model.generators["picture"].latents, weights="")
    model = with_changes(config.model, {"picture": {"latents": latents}})
    with pytest.raises(UserError, match=r"latents.weights is empty"):
        load_pretrained(Model.build(model, jnp.float32), executor.parameter_shardings)
