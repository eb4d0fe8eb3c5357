"""Work of a UNet: parameters are the module's, executed FLOPs XLA's, and saved bytes what JAX keeps for backward."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_flops import make_model

from mmjax.batch import ItemBatch
from mmjax.config import ModelConfig, UnetConfig
from mmjax.models.model import Model, module_of
from mmjax.models.unet import Unet
from mmjax.planning.flops import executed, frozen_modules, model_flops, relative_cost
from mmjax.planning.parameters import parameters
from mmjax.planning.unet import unet_executed, unet_flops, unet_parameters, unet_saved_bytes
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


@pytest.mark.parametrize(
    ("unet", "published"),
    [
        (UnetConfig(condition_width=1024), 865_910_724),
        (UnetConfig(condition_width=768, heads=(8,) * 4, linear_projections=False), 859_520_964),
        (TWO_LEVELS, None),
        (replace(TWO_LEVELS, blocks=3, attending=(False, True), groups=4), None),
    ],
    ids=["Stable Diffusion 2.1", "Stable Diffusion 1", "attention above", "attention below"],
)
def test_parameters_are_those_of_the_module(unet: UnetConfig, published: int | None) -> None:
    state = nnx.state(nnx.eval_shape(lambda: Unet(unet, jnp.dtype("float32"), nnx.Rngs(0))))
    assert unet_parameters(unet) == sum(leaf.size for leaf in jax.tree.leaves(state))
    assert published in (None, unet_parameters(unet))


def test_a_model_with_a_unet_has_the_parameters_that_are_counted() -> None:
    model = model_with(WIDE)
    counts: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(Model.build(model, jnp.float32).abstract):
        module = module_of(tuple(key.key for key in path))
        counts[module] = counts.get(module, 0) + leaf.size
    assert counts == parameters(model)


def gradient_program(unet: UnetConfig, trained: bool, rows: int = 1) -> tuple:
    """A function whose gradient by its first argument is the wanted one, and its abstract arguments."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Unet(unet, jnp.dtype("float32"), nnx.Rngs(0))))
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    length = unet.min_patches
    item = integers(rows, length)
    items = ItemBatch(floats(rows, length, unet.patch_values), item, integers(rows, length, 3), item, item)
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
def test_executed_is_within_two_percent_of_xlas_count(unet: UnetConfig, trained: bool) -> None:
    velocity, arguments = gradient_program(unet, trained)
    gradient = jax.jit(jax.grad(lambda *inputs: jnp.sum(jnp.square(velocity(*inputs)))))
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    counted = gradient.lower(*arguments).compile(compiler_options=quick).cost_analysis()["flops"]
    forward, backward, _ = unet_executed(unet, 1, trained, upstream=True)
    assert forward + backward == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("unet", [WIDE, TWO_LEVELS, replace(WIDE, remat="full"), replace(WIDE, attention="blockwise")])
def test_what_is_kept_for_backward_is_what_jax_keeps_or_a_little_more(unet: UnetConfig, trained: bool) -> None:
    velocity, arguments = gradient_program(unet, trained, IMAGES)
    kept = jax.eval_shape(lambda wanted, *others: jax.vjp(lambda w: velocity(w, *others), wanted)[1], *arguments)
    # Not the parameters, which are there anyway; these have no axis of images.
    arrays = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape[:1] == (IMAGES,)]
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
    counted, _ = unet_saved_bytes(unet, IMAGES, 4, trained)
    assert 0.75 * total < counted < 1.15 * total


def test_needed_flops_follow_what_is_frozen() -> None:
    trained, frozen = unet_flops(WIDE, 3, True, True), unet_flops(WIDE, 3, False, True)
    assert trained[0] == frozen[0]
    assert 0.6 * frozen[0] < frozen[1] < frozen[0] < 1.9 * trained[0] < trained[1] < 2 * trained[0]
    assert unet_flops(WIDE, 3, False, False)[1] == 0
    assert unet_executed(WIDE, 3, False, False)[1] == 0
    assert trained == tuple(3 * flops for flops in unet_flops(WIDE, 1, True, True))


def test_a_model_counts_its_unet_by_the_places_that_rows_have_for_images() -> None:
    shape = {"llm": (1, 32), "picture": (2, 3 * WIDE.min_patches + 7)}
    model = model_with(WIDE)
    assert row_work(model, shape)["picture"].tokens == 2 * 3 * WIDE.queries
    whole = executed(model, shape, frozen_modules(model))
    assert whole["picture"][:2] == unet_executed(WIDE, 6, True, True)[:2]
    frozen = model_with(WIDE, frozen=True)
    assert executed(frozen, shape, frozen_modules(frozen))["picture"][:2] == unet_executed(WIDE, 6, False, True)[:2]
    work = {"llm": Work(32, 100.0), "picture": Work(512, 0, 512, 2 * WIDE.queries)}
    assert model_flops(model, work, frozenset())["picture"][:2] == unet_flops(WIDE, 2, True, True)
    _, cost = relative_cost(model)
    connector = executed(model, {"llm": (1, 1), "picture": (1, WIDE.min_patches)}, frozenset())["picture.connector"]
    one = sum(unet_executed(WIDE, 1, True, True)[:2]) + connector.total
    np.testing.assert_allclose(cost, one / WIDE.min_patches, rtol=1e-6)
