"""Work of a UNet: parameters are the module's, executed FLOPs XLA's, and saved bytes what JAX keeps for backward."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_flops import make_model

from mmjax.batch import ItemBatch
from mmjax.config import ModelConfig, UnetConfig
from mmjax.models.unet import Unet
from mmjax.planning.flops import Flops, executed, model_flops
from mmjax.planning.unet import unet_saved_bytes
from mmjax.planning.work import Work, row_work

WIDE = UnetConfig(
    condition_width=64,
    widths=(64,),
    heads=(2,),
    attending=(True,),
    blocks=1,
    groups=8,
    size=(16, 16),
    queries=9,
)
TWO_LEVELS = replace(WIDE, widths=(64, 128), heads=(2, 4), attending=(True, False))
IMAGES = 5  # a number that no other axis has


def model_with(unet: UnetConfig, **changes: bool) -> ModelConfig:
    """An LLM and a UNet, and no encoder."""
    return replace(make_model(), encoders={}, generators={"picture": replace(unet, **changes)})


def gradient_program(unet: UnetConfig, trained: bool, rows: int = 1) -> tuple:
    """A function whose gradient by its first argument is the wanted one, and its abstract arguments."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Unet(unet, jnp.dtype("float32"), nnx.Rngs(0))))
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    length = unet.min_patches
    item = integers(rows, length)
    items = ItemBatch(
        floats(rows, length, unet.patch_values), item, integers(rows, length, 3), item, item
    )
    condition = floats(rows, unet.queries, unet.condition_width)
    others = floats(rows, length, unet.patch_values), items, floats(rows, 1)

    def velocity(wanted, state, latents, items, time):
        state, condition = wanted if trained else (state, wanted)
        return nnx.merge(graph, state)(latents, items, time, condition)

    return velocity, ((state, condition) if trained else condition, state, *others)


CASES = [
    (WIDE, True),
    (replace(WIDE, remat="full"), False),
    (WIDE, False),
    (replace(WIDE, remat="full"), True),
    (TWO_LEVELS, True),
    (TWO_LEVELS, False),
    (replace(WIDE, attending=(False,), size=(16, 32)), True),
    (replace(WIDE, attending=(False,), queries=40), False),
]


@pytest.mark.default_cases("unet0-True")
@pytest.mark.parametrize(("unet", "trained"), CASES)
def test_executed_is_within_three_percent_of_xlas_count(unet: UnetConfig, trained: bool) -> None:
    velocity, arguments = gradient_program(unet, trained)
    gradient = jax.jit(jax.grad(lambda *inputs: jnp.sum(jnp.square(velocity(*inputs)))))
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    counted = gradient.lower(*arguments).compile(compiler_options=quick).cost_analysis()["flops"]
    # What draws images and compares them is no part of the program here, nor is the connector.
    shape = {"llm": (1, 8), "picture": (1, unet.min_patches)}
    found = executed(
        model_with(unet, frozen=not trained), shape, frozenset() if trained else {"picture"}
    )["picture"]
    assert found.total == pytest.approx(counted, rel=0.03)


@pytest.mark.covering(1)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "unet", [WIDE, TWO_LEVELS, replace(WIDE, remat="full"), replace(WIDE, attention="blockwise")]
)
def test_what_is_kept_for_backward_is_what_jax_keeps_or_a_little_more(
    unet: UnetConfig, trained: bool
) -> None:
    velocity, arguments = gradient_program(unet, trained, IMAGES)
    kept = jax.eval_shape(
        lambda wanted, *others: jax.vjp(lambda w: velocity(w, *others), wanted)[1], *arguments
    )
    # Not the parameters, which are there anyway; these have no axis of images.
    arrays = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape[:1] == (IMAGES,)]
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    counted, _ = unet_saved_bytes(unet, IMAGES, 4, trained)
    assert 0.75 * total < counted < 1.15 * total


def test_needed_flops_follow_what_is_frozen_and_the_places_that_rows_have_for_images() -> None:
    assert (
        row_work(model_with(WIDE), {"picture": (2, 3 * WIDE.min_patches + 7)})["picture"].tokens
        == 6 * WIDE.queries
    )
    model, work = model_with(WIDE), {"llm": Work(32, 100.0)}

    def needed(images: int, frozen: frozenset[str]) -> Flops:
        positions = images * WIDE.min_patches
        picture = Work(positions, positions * WIDE.min_patches, positions, images * WIDE.queries)
        return model_flops(model, work | {"picture": picture}, frozen)["picture"]

    trained, frozen = needed(3, frozenset()), needed(3, frozenset({"picture"}))
    assert trained.forward == frozen.forward
    assert (
        0.6 * frozen.forward
        < frozen.backward
        < frozen.forward
        < 1.9 * trained.forward
        < trained.backward
    )
    assert trained.backward < 2 * trained.forward
    assert needed(3, frozenset({"picture", "picture.connector", "llm"})).backward == 0
    assert trained == pytest.approx(tuple(3 * flops for flops in needed(1, frozenset())))
