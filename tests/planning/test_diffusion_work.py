"""Work of a diffusion transformer: needed FLOPs are an exact count, executed ones XLA's."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from image_rows import rows_of_images
from test_flops import make_model, make_text

from mmjax.config import DiffusionTransformerConfig, ModelConfig, Remat
from mmjax.config.model import linear_layers
from mmjax.models.diffusion_transformer import DiffusionTransformer
from mmjax.models.layer_stacks import plan_stacks
from mmjax.models.linear import Linear
from mmjax.planning.flops import executed, layer_policies, model_flops, stage_flops
from mmjax.planning.work import length_work, useful_work

TINY = DiffusionTransformerConfig(
    2, 24, 2, 40, condition_width=7, min_patches=6, queries=2, text_tokens=1
)
ROWS = [[(2, 4), (3, 3), (1, 6), (5, 7)], [(4, 2), (2, 3)]]
SHAPE = {"llm": (1, 8), "image": (2, 128)}
WIDE = replace(
    TINY,
    width=240,
    heads=4,
    mlp_width=960,
    condition_width=100,
    min_patches=16,
    queries=9,
    text_tokens=3,
)


def model_with(config: DiffusionTransformerConfig) -> ModelConfig:
    """An LLM and a generator, and no encoder."""
    return replace(make_model(), encoders={}, generators={"image": config})


def module_of(config: DiffusionTransformerConfig, scanned: bool = False) -> Any:
    """The module with abstract parameters, every layer by itself or all in one scan."""
    plan = plan_stacks(
        config.layers, layer_policies(config), () if scanned else tuple(range(1, config.layers))
    )
    return nnx.eval_shape(
        lambda: DiffusionTransformer(config, plan, jnp.dtype(jnp.float32), nnx.Rngs(0))
    )


KINDS = [
    {},
    {"micro_conditions": True, "learned_variance": True, "biases": ("output", "up", "down")},
    {"condition_mlp": False, "patch": 3, "biases": ()},
]


def count_multiply_adds(
    config: DiffusionTransformerConfig, item: np.ndarray, trainable: bool, upstream: bool
) -> tuple[int, int]:
    """(forward, backward): a walk over the module's matrices, and over all pairs of positions and condition tokens."""
    images = sum(len(set(row[row >= 0])) for row in item)
    positions = int((item >= 0).sum())
    forward = backward = 0
    for path, leaf in nnx.traversals.flatten_mapping(
        nnx.to_pure_dict(nnx.state(module_of(config)))
    ).items():
        if path[-1] != "weight" or "table" in path or "variance" in path:
            continue
        of_time = path[0] in ("image_embedding", "modulation")
        of_condition = path[0] == "condition_mlp" or path[-3:-1] in (
            ("cross_attention", "key"),
            ("cross_attention", "value"),
        )
        sides = 2 if "side" in path else 1
        times = (
            images * sides
            if of_time
            else images * config.condition_tokens
            if of_condition
            else positions
        )
        first = path[0] == "patches" or (path[0] == "image_embedding" and "up" in path)
        first |= (
            of_condition
            and not upstream
            and (path[0] == "layers" if not config.condition_mlp else "up" in path)
        )
        # Where nothing in the transformer is trained, gradients begin at its condition: not before
        # the first layer's.
        before = of_time or (path[:3] == ("layers", "runs", "0") and "attention" in path)
        before |= path[:5] == ("layers", "runs", "0", "cross_attention", "query")
        products = leaf.size * times
        forward += products
        backward += products * trainable
        reached = trainable or (upstream and not before)
        backward += products * (reached and not first)
    for layer in range(config.layers):
        begins = layer == 0 and not trainable
        for row in item:
            for q in row[row >= 0]:
                own = int((row == q).sum())
                forward += 2 * config.width * (own + config.condition_tokens)
                if trainable or upstream:
                    backward += 0 if begins else 4 * config.width * own
                    backward += (3 if begins else 4) * config.width * config.condition_tokens
    return forward, backward


SETTINGS = {
    "all trained": frozenset(),
    "frozen": frozenset({"image"}),
    "nothing before it": frozenset({"llm", "image.connector"}),
    "only its connector": frozenset({"llm", "image"}),
    "nothing": frozenset({"llm", "image", "image.connector"}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize("frozen", SETTINGS.values(), ids=SETTINGS)
def test_needed_is_exactly_a_count_of_every_multiply_add(
    frozen: frozenset[str], changes: dict
) -> None:
    config = replace(TINY, **changes)
    model = model_with(config)
    items = rows_of_images(ROWS, 64)
    work = useful_work(model, make_text(np.zeros((1, 4), np.int32)), {"image": items})
    found = model_flops(model, work, frozen)
    upstream = not {"llm", "image.connector"} <= frozen
    wanted = count_multiply_adds(config, items.item, "image" not in frozen, upstream)
    assert tuple(found["image"][:2]) == tuple(2 * n for n in wanted)
    connector = 6 * config.condition_tokens * model.llm.width * config.condition_width
    gradients = ("image.connector" not in frozen) + upstream
    assert tuple(found["image.connector"][:2]) == (2 * connector, 2 * connector * gradients)
    counts = [size[0] * size[1] for row in ROWS for size in row]
    lengths = np.array([4]), np.zeros(6, np.int64), np.array(counts), np.full(6, config.queries)
    assert length_work(model, *lengths)["image"] == work["image"]


def test_adapters_are_for_the_linear_layers_of_its_layers_alone() -> None:
    found = {}
    for path, module in nnx.iter_modules(module_of(TINY)):
        if isinstance(module, Linear) and "layers" in path:
            found[".".join(["image.layers.*", *map(str, path[3:])])] = tuple(
                module.weight.shape[-2:]
            )
    assert found == {
        name: size
        for name, size in linear_layers(model_with(TINY)).items()
        if name.startswith("image.")
    }


def xlas_count(config: DiffusionTransformerConfig, wanted: Set[str], scanned: bool) -> float:
    """FLOPs of the compiled gradient with respect to the "state" or the "condition"."""
    rows, length = SHAPE["image"]
    graph, state = nnx.split(module_of(config, scanned))
    items = rows_of_images([[(1, length)]] * rows, length)
    images = config.max_images(length)
    shapes = (
        (rows, length, config.patch_values),
        (rows, images),
        (rows, images * config.condition_tokens, config.condition_width),
    )
    latents, time, condition = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def loss(differentiated: Any, others: Any, latents: Any, items: Any, time: Any) -> jax.Array:
        given = differentiated | others
        return nnx.merge(graph, given["state"])(latents, items, time, given["condition"]).sum()

    given = {"state": state, "condition": condition}
    differentiated = {name: given.pop(name) for name in sorted(wanted)}
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    arrays = jax.tree.map(jnp.asarray, items)
    program = (
        jax.jit(jax.grad(loss))
        .lower(differentiated, given, latents, arrays, time)
        .compile(compiler_options=quick)
    )
    return program.cost_analysis()["flops"]


BOTH = frozenset({"state", "condition"})
CASES = {
    f"{policy}, {name}": (policy, name)
    for policy in get_args(Remat)
    for name in ("all trained", "frozen")
}


@pytest.mark.default_cases("full, frozen")
@pytest.mark.parametrize(("policy", "setting"), CASES.values(), ids=CASES)
def test_executed_is_within_two_percent_of_xlas_count(policy: Remat, setting: str) -> None:
    frozen = SETTINGS[setting]
    two, four = (
        executed(model_with(replace(WIDE, layers=layers, remat=policy)), SHAPE, frozen)[
            "image"
        ].total
        for layers in (2, 4)
    )
    found = xlas_count(
        replace(WIDE, remat=policy), BOTH if "image" not in frozen else {"condition"}, scanned=True
    )
    # XLA counts a scan's body once.
    assert two - (four - two) / 2 == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("setting", ["all trained", "frozen"])
def test_a_first_layer_by_itself_spares_what_no_gradient_needs(setting: str) -> None:
    frozen = SETTINGS[setting]
    config = replace(WIDE, remat=("none", "products"))
    found = executed(model_with(config), SHAPE, frozen)["image"].total
    wanted = xlas_count(config, BOTH if "image" not in frozen else {"condition"}, scanned=False)
    assert found == pytest.approx(wanted, rel=0.02)


def test_without_its_layers_which_were_timed_a_frozen_one_executes_the_rest() -> None:
    model = model_with(replace(WIDE, layers=1, frozen=True))
    rest, one = (
        stage_flops(model, "image", range(1), policies, SHAPE) for policies in ((), ("none",))
    )
    assert 0 < rest.forward < one.forward
    assert 0 < rest.backward < one.backward
