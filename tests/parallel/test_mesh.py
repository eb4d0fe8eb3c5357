from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import PartitionSpec

from mmjax.config import DecoderConfig, MeshConfig, ModelConfig, VisionConfig
from mmjax.config.validation import check_layout
from mmjax.errors import UserError
from mmjax.parallel.sharding import (
    RANKS,
    encoder_axes,
    loss_choices,
    make_mesh,
    replicated,
    row_ranks,
    rows_sharding,
)

LLM = DecoderConfig(layers=1, width=32, heads=8, kv_heads=2, head_width=4, mlp_width=48, vocab=9)
VISION = VisionConfig(layers=1, width=32, heads=4, mlp_width=48, patch=4)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (8, 1, 1, 1, 1)),
        (MeshConfig(2, fsdp=-1), (2, 4, 1, 1, 1)),
        (MeshConfig(1, fsdp=4, tensor=-1), (1, 4, 1, 1, 2)),
        (MeshConfig(2, context=2, tensor=2), (2, 1, 1, 2, 2)),
        (MeshConfig(1, expert=-1, tensor=2), (1, 1, 4, 1, 2)),
    ],
)
def test_a_mesh_takes_all_devices_and_minus_one_what_the_others_leave(config, shape):
    mesh = make_mesh(config, jax.devices())
    assert tuple(mesh.shape.values()) == shape
    assert tuple(mesh.shape) == ("data", "fsdp", "expert", "context", "tensor")
    assert mesh.devices.flatten().tolist() == jax.devices()


@pytest.mark.parametrize(
    ("config", "wrong", "remedy"),
    [
        (MeshConfig(-1, fsdp=-1), "mesh.data and mesh.fsdp are both -1", "give all but one a size"),
        (
            MeshConfig(-1, fsdp=3),
            "3 .* does not divide the 8 devices",
            "use sizes whose product does",
        ),
        (MeshConfig(4, tensor=4), "needs 16 devices and there are 8", "set one axis to -1"),
        (MeshConfig(2, fsdp=2), "needs 4 devices and there are 8", "set one axis to -1"),
        (MeshConfig(0), "data=0", "at least 1, or -1"),
        (
            MeshConfig(exchange="ragged"),
            "mesh.exchange=ragged: a CPU has no such",
            "use mesh.exchange=padded",
        ),
        (MeshConfig(-2), "data=-2", "at least 1, or -1"),
        (
            MeshConfig(-1, context=3),
            "3 .* does not divide the 8 devices",
            "use sizes whose product does",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused_with_the_remedy(config, wrong, remedy):
    with pytest.raises(UserError, match=wrong) as raised:
        make_mesh(config, jax.devices())
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("llm", "vision", "key"),
    [
        (LLM, VISION, None),
        (replace(LLM, kv_heads=1), VISION, "model.llm.kv_heads=1"),
        (replace(LLM, heads=3, kv_heads=2), VISION, "model.llm.heads=3"),
        (LLM, replace(VISION, heads=1), "model.encoders.eyes.heads=1"),
    ],
)
def test_tensor_parallelism_that_cuts_a_head_is_refused_with_the_key(llm, vision, key):
    mesh = MeshConfig(tensor=2)
    model = ModelConfig(llm, {"eyes": vision})
    if key is None:
        check_layout("mesh", mesh, model)
        return
    with pytest.raises(UserError, match=r"mesh\.tensor=2 does not divide") as raised:
        check_layout("mesh", mesh, model)
    assert key in str(raised.value)
    assert "use a divisor" in str(raised.value)


def test_heads_that_cannot_be_exchanged_for_tokens_are_refused_with_the_key():
    mesh = MeshConfig(context=2, tensor=2)
    model = ModelConfig(LLM)
    check_layout("mesh", replace(mesh, context_attention="gather"), model)
    with pytest.raises(
        UserError, match=r"model\.llm\.kv_heads=2, as .*; use mesh\.context_attention=gather"
    ):
        check_layout("mesh", replace(mesh, context_attention="heads"), model)


def test_encoders_whose_rows_lie_on_the_tensor_axis_may_have_any_number_of_heads():
    mesh = MeshConfig(tensor=2)
    model = ModelConfig(LLM, {"eyes": replace(VISION, heads=1)})
    check_layout("mesh", replace(mesh, encoders="data"), model)
    with pytest.raises(UserError, match=r"heads=1; use a divisor of it, or mesh\.encoders=data"):
        check_layout("mesh", mesh, model)


@pytest.mark.parametrize(
    ("vocab", "tensor", "chunks", "remedy"),
    [
        (24, 1, 8, None),
        (24, 2, 6, None),
        (9, 2, 3, None),  # which tensor=2 does not divide: whole on every device
        (
            24,
            1,
            7,
            "vocab=24; use the nearest that does, training.loss_chunks=6, or a vocabulary .* multiple of 7",
        ),
        (
            24,
            2,
            8,
            "vocab=24, which mesh.tensor=2 cuts into 12; .* training.loss_chunks=6, or .* multiple of 16",
        ),
        (23, 1, 4, "training.loss_chunks=1, or a vocabulary that is a multiple of 4"),
    ],
)
def test_parts_of_the_vocabulary_that_would_be_unequal_are_refused_with_the_nearest(
    vocab, tensor, chunks, remedy
):
    model = ModelConfig(replace(LLM, vocab=vocab))
    if remedy is None:
        assert loss_choices({"tensor": tensor}, chunks, model) == (chunks,)
        return
    with pytest.raises(UserError, match=remedy):
        loss_choices({"tensor": tensor}, chunks, model)


def test_where_memory_decides_a_loss_may_have_any_power_of_two_of_equal_parts():
    model = ModelConfig(replace(LLM, vocab=24))
    assert loss_choices({"tensor": 1}, 0, model) == (1, 2, 4, 8)
    assert loss_choices({"tensor": 2}, 0, model) == (1, 2, 4)


def test_rows_are_spread_over_data_and_fsdp_and_whole_over_tensor():
    mesh = make_mesh(MeshConfig(2, fsdp=2, tensor=2), jax.devices())
    assert row_ranks(mesh) == 4
    assert rows_sharding(mesh).shard_shape((8, 5)) == (2, 5)
    axes = encoder_axes(MeshConfig(encoders="data"))
    assert row_ranks(mesh, axes) == 8
    assert rows_sharding(mesh, axes).shard_shape((8, 5)) == (1, 5)
    assert encoder_axes(MeshConfig()) == (*RANKS, "context")
    assert replicated(mesh).spec == PartitionSpec()
    assert replicated(mesh).shard_shape((8, 5)) == (8, 5)
