"""A model with all that Qwen-VL's towers and a Conformer have learns the same on every mesh, and is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import (
    MESHES,
    gradients,
    load_steps,
    make_executor,
    scattered,
    state_with,
    stderr_of,
    tiny_config,
    worst_leaf,
)

from mmjax.autotune.layer_profile import time_layer
from mmjax.config import AxisTables, Config, ConformerConfig, StretchedGrid, UsmMel, Waveform
from mmjax.data.plan.placement import ONE_RANK
from mmjax.planning.memory import saved_bytes_per_layer
from mmjax.runtime.devices import mesh_topology

pytestmark = pytest.mark.exhaustive


def stacked_config() -> Config:
    made = tiny_config()
    tower = replace(
        made.model.encoders["vision"], layers=4, positions=StretchedGrid(3), window=4, windowed=(0, 2),
        deepstack=(0, 2), frames=2, norm="rms", gated=True,
        clipped_linears=True,
    )  # fmt: skip
    llm = replace(made.model.llm, layers=4, rope_sections=(2, 1, 1), rope_interleaved=True)
    model = replace(made.model, llm=llm, encoders={**made.model.encoders, "vision": tower})
    return replace(made, model=model, batch=replace(made.batch, microbatches=1))


def conformer_config() -> Config:
    made = stacked_config()
    ears = replace(
        made.model.encoders["audio"],
        clips=UsmMel(16, 4000, window=128, hop=64, high=2000.0),
        conformer=ConformerConfig(past=3, future=1, nearest=1, score_cap=2.0, stem_widths=(6, 4)),
        clipped_linears=True,
    )
    model = replace(made.model, encoders={**made.model.encoders, "audio": ears})
    return replace(made, model=model)


def towerless_config() -> Config:
    """Images and clips as Gemma 4 Unified has them: layers are norms alone, and clips' have no parameters."""
    made = tiny_config()
    of_images = {"patch_norm": True, "embed_norm": True, "embed_norm_first": True}
    encoders = {
        "vision": replace(
            made.model.encoders["vision"],
            layers=1,
            heads=1,
            mlp_width=0,
            positions=AxisTables(9),
            head_norm=False,
            **of_images,
        ),
        "audio": replace(
            made.model.encoders["audio"],
            layers=1,
            heads=1,
            mlp_width=0,
            width=64,
            clips=Waveform(64, 4000),
            pool=1,
        ),
    }
    model = replace(made.model, encoders=encoders)
    return replace(made, model=model, batch=replace(made.batch, microbatches=1))


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def test_a_mesh_gives_the_gradients_of_one_device(tmp_path):
    made = conformer_config()
    one = make_executor(made, MESHES["one device"])
    parameters = scattered(one)
    batches = load_steps(made, folder(tmp_path, "one"), 1, ONE_RANK)[0]
    assert batches[0].text.position.shape[-1] == 3
    wanted = gradients(one, state_with(one, parameters), batches)
    deeper = wanted.gradients["connectors"]["vision"]["deeper"]
    learning = [deeper, wanted.gradients["encoders"]["audio"]["layers"]]
    assert all(
        np.abs(g).max() > 0
        for path, g in jax.tree.leaves_with_path(learning)
        if "bounds" not in jax.tree_util.keystr(path)
    )
    mesh = "data=2 x fsdp=2 x tensor=2, encoders=data"
    executor = make_executor(made, MESHES[mesh])
    batches = load_steps(
        made, folder(tmp_path, "many"), 1, mesh_topology(executor.mesh, MESHES[mesh])
    )[0]
    with stderr_of() as written:
        found = gradients(executor, state_with(executor, parameters), batches)
    assert "rematerialization" not in "".join(written)
    off, name = worst_leaf(found.gradients, wanted.gradients)
    assert off < 1e-5, name


@pytest.mark.parametrize(
    "mesh", ["data=2 x fsdp=2 x tensor=2, encoders=data", "data=2 x fsdp=2 x tensor=2"]
)
def test_encoders_of_norms_alone_have_the_gradients_of_one_device_on_a_mesh(mesh, tmp_path):
    made = towerless_config()
    one = make_executor(made, MESHES["one device"])
    parameters = scattered(one)
    batches = load_steps(made, folder(tmp_path, "one"), 1, ONE_RANK)[0]
    wanted = gradients(one, state_with(one, parameters), batches)
    assert set(wanted.gradients["encoders"]) == {"vision"}
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(wanted.gradients["encoders"]))
    executor = make_executor(made, MESHES[mesh])
    batches = load_steps(
        made, folder(tmp_path, "many"), 1, mesh_topology(executor.mesh, MESHES[mesh])
    )[0]
    found = gradients(executor, state_with(executor, parameters), batches)
    off, name = worst_leaf(found.gradients, wanted.gradients)
    assert off < 1e-5, name


def test_its_layers_are_timed_and_weighed():
    made = conformer_config()
    for tower, shape in (("llm", (1, 16)), ("vision", (1, 16)), ("audio", (1, 64))):
        seconds = time_layer(made, tower, shape, jax.devices()[0], enough=0.0)
        assert min(seconds.values()) > 0
        kept = saved_bytes_per_layer(made.model, tower, shape, "float32")
        assert kept["none"].device > kept["full"].device
