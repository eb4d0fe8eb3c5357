"""A user's own functions around an encoder: LLaVA-NeXT's AnyRes, as the documentation writes it, is our own."""

from __future__ import annotations

import filecmp
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from any_res_folder import image_of, save_next, save_onevision, save_questions
from safetensors.torch import load_file
from test_docs import write_examples
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmjax import export, train
from mmjax.config import AnyRes, Callbacks, MeshConfig
from mmjax.config.loading import apply_overrides, find_config, load, resolve_callbacks
from mmjax.data.loading.packing import pack_microbatch
from mmjax.data.loading.step_loader import reader_of
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.grouping import Group
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

SMALL = (
    "training.steps=3",
    "training.precision=float32",
    "training.evaluate_every=0",
    "training.checkpoint_every=0",
    "optimizer.learning_rate=1e-2",
    "schedule.warmup=1",
    "batch.size.count=8",
    "batch.shapes=2",
    "batch.rows.llm=4",
    "batch.rows.vision=4",
    "device=cpu",
    "data.workers=0",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A LLaVA-NeXT, questions about images of many shapes, and the documentation's own AnyRes."""
    folder = tmp_path_factory.mktemp("any_res")
    save_next(folder / "checkpoint")
    save_questions(folder / "data")
    write_examples("docs/models.md", folder)
    (folder / "config.py").write_text((folder / "any_res.py").read_text())
    return folder


def words(place: Path, checkpoint: str = "checkpoint") -> list[str]:
    data = place / "data"
    given = [
        f"checkpoint={place / checkpoint}",
        f"data={data / 'data.json'}",
        f"images={data / 'images'}",
    ]
    return [*given, f"data.cache={place / 'cache'}"]


def whole_batch(config, folder):
    """All samples in one microbatch."""
    sources = open_sources(config, "train", folder)
    index = build_index(sources, config.model.encoders)
    planner, _ = make_planner(index, config, [1.0])
    (plan,) = planner.placer.place(Group(np.arange(len(index)), None))
    return pack_microbatch(plan, BatchLayout.of(config.model), reader_of(sources, index))


def loaded(config, folder):
    model = Model.build(
        config.model, jnp.float32, functions=resolve_callbacks(config.model, folder)
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return model, load_pretrained(model, parameter_shardings(model, mesh, ShardingRules()))


@pytest.mark.exhaustive
def test_any_res_written_as_callbacks_gives_the_items_places_and_logits_of_our_own(place):
    small = [*SMALL, "batch.size.count=10", "batch.grouping=none"]
    theirs = load(place / "any_res.py", [*words(place), *small])
    ours = load("llava_style", [*words(place), *small])
    assert isinstance(ours.model.encoders["vision"].images, AnyRes)
    mine, own = whole_batch(theirs, place), whole_batch(ours, place)
    slots, of_theirs = own.text.slots["vision"], mine.text.slots["vision"]
    np.testing.assert_array_equal(of_theirs.slot[..., 0], slots)
    assert (of_theirs.slot[..., 1:] == -1).all()
    plain = mine._replace(text=mine.text._replace(slots={"vision": slots}))
    jax.tree.map(np.testing.assert_array_equal, plain, own)
    logits = []
    for config, batch in ((theirs, mine), (ours, own)):
        model, params = loaded(config, place)
        logits.append(np.asarray(jax.jit(model.logits)(params, batch)))
    np.testing.assert_allclose(*logits, atol=1e-6)


@pytest.mark.exhaustive
def test_what_was_trained_with_them_is_exported_as_it_was_read(place):
    config = load(place / "any_res.py", [*words(place), *SMALL, f"run={place / 'run'}"])
    train.train(config, find_config(place / "any_res.py"), devices=jax.devices()[:1])
    export.main([str(place / "run"), str(place / "served")])
    before, after = (load_file(place / of / "model.safetensors") for of in ("checkpoint", "served"))
    assert {k: (v.shape, v.dtype) for k, v in after.items()} == {
        k: (v.shape, v.dtype) for k, v in before.items()
    }
    changed = {k for k, v in before.items() if not torch.equal(v, after[k])}
    assert {"image_newline", "model.image_newline"} & changed
    assert not any("vision_tower" in key for key in changed)
    others = sorted(p.name for p in (place / "checkpoint").iterdir() if p.suffix != ".safetensors")
    assert (
        filecmp.cmpfiles(place / "checkpoint", place / "served", others, shallow=False)[0] == others
    )
    check_answers_there(place)


def check_answers_there(place: Path) -> None:
    """Logits of the served folder in transformers are those of the run's own functions and weights here."""
    config = load(place / "any_res.py", [*words(place, "served"), *SMALL, "batch.size.count=10"])
    batch = whole_batch(apply_overrides(config, ["batch.grouping=none"]), place)
    model, params = loaded(config, place)
    ours = np.asarray(jax.jit(model.logits)(params, batch))
    processor = AutoProcessor.from_pretrained(place / "served")
    there = AutoModelForImageTextToText.from_pretrained(
        place / "served", dtype=torch.float32
    ).eval()
    for n, record in enumerate(json.loads((place / "data" / "data.json").read_text())):
        asked, answered = (turn["value"] for turn in record["conversations"])
        content = [
            *[{"type": "image"}] * len(record["image"]),
            {"type": "text", "text": asked.replace("<image>", "")},
        ]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answered}]
        images = [image_of(place / "data", name) for name in record["image"]]
        inputs = processor(
            images=images, text=[processor.apply_chat_template(turns)], return_tensors="pt"
        )
        with torch.no_grad():
            wanted = there(**inputs).logits[0].numpy()
        np.testing.assert_allclose(ours[batch.text.owner == n], wanted, atol=1e-4)


@pytest.mark.exhaustive
def test_newlines_and_mixed_tokens_travel_between_ranks(tmp_path):
    save_onevision(tmp_path / "checkpoint")
    save_questions(tmp_path / "data")
    losses = []
    for devices in (1, 4):
        run = f"run={tmp_path / str(devices)}"
        split = ["batch.balance.locality=off", f"mesh.fsdp={devices}"]
        config = load("llava_style", [*words(tmp_path), *SMALL, *split, run])
        trainer = train.train(config, find_config("llava_style"), devices=jax.devices()[:devices])
        lines = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines if '"loss"' in line])
    assert len(losses[0]) >= 3
    np.testing.assert_allclose(*losses, rtol=1e-5)


def halved(x, batch):
    return x / 2


def shorter(x, batch):
    return x[:, 1:]


def test_functions_inside_the_step_see_what_the_encoder_and_the_connector_make(place):
    config = load(
        "llava_style", [*words(place), *SMALL, "batch.size.count=10", "batch.grouping=none"]
    )
    batch = jax.tree.map(jnp.asarray, whole_batch(config, place))
    model, params = loaded(config, place)
    plain = np.asarray(model.encode(params, batch.items)["vision"])
    down = jax.tree.map(lambda x: x, params)
    down["connectors"]["vision"]["mlp"]["up"]["weight"] = (
        params["connectors"]["vision"]["mlp"]["up"]["weight"] / 2
    )
    after = {
        "after_connector": np.concatenate([plain[:, :-1] / 2, plain[:, -1:]], axis=1),
        "after_encoder": np.asarray(model.encode(down, batch.items)["vision"]),
    }
    for name, wanted in after.items():
        eyes = replace(config.model.encoders["vision"], callbacks=Callbacks(**{name: "config:f"}))
        own = replace(config.model, encoders={"vision": eyes})
        called = Model.build(own, jnp.float32, functions={"config:f": halved})
        np.testing.assert_allclose(
            np.asarray(called.encode(params, batch.items)["vision"]), wanted, atol=1e-6
        )
        with pytest.raises(ValueError, match="the config names config:f, but Model"):
            Model.build(own, jnp.float32).encode(params, batch.items)
        with pytest.raises(ValueError, match="it must keep the shape"):
            Model.build(own, jnp.float32, functions={"config:f": shorter}).encode(
                params, batch.items
            )


def test_functions_that_are_not_there_or_cannot_be_meant_are_refused(place):
    given = [*words(place), *SMALL]
    own = "model.encoders.vision.callbacks"
    with pytest.raises(UserError, match=f"{own}.before_llm: no function 'row' in"):
        load(place / "any_res.py", [*given, f"{own}.before_llm=config:row"])
    with pytest.raises(
        UserError, match=f"{own}.before_encoder prepares images, and so does .*images=any_res"
    ):
        load(
            "llava_style",
            [*given, f"{own}.before_encoder=mmjax.data.media.image_transforms:any_res"],
        )
    with pytest.raises(UserError, match=f"{own}.before_llm says in what order tokens stand"):
        load("llava_style", [*given, f"{own}.before_llm=mmjax.data.media.token_layout:in_order"])
    tiles = [
        "model.encoders.vision.images.order=tiles",
        "model.encoders.vision.images.most_tiles=3",
    ]
    with pytest.raises(
        UserError, match="most_tiles=3: it is rows that are interpolated; choose order=rows"
    ):
        load("llava_style", [*given, *tiles])
