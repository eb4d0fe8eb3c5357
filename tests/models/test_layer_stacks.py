import time
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from packed import assert_trees_close, build, model_outputs, pack, random_sample, tiny, token_losses

from mmjax.config import Remat
from mmjax.models.layer_stacks import plan_stacks, split_scanned, stack_layers, unstack_layers
from mmjax.models.model import Model
from mmjax.models.stack_scan import LayerStack


def test_runs_break_where_the_policy_changes_and_where_they_are_cut():
    assert plan_stacks(4, "none") == (LayerStack(0, 4, "none"),)
    assert plan_stacks(4, ("none", "none", "full", "full")) == (
        LayerStack(0, 2, "none"),
        LayerStack(2, 4, "full"),
    )
    assert plan_stacks(4, "full", cuts=(1, 3)) == (
        LayerStack(0, 1, "full"),
        LayerStack(1, 3, "full"),
        LayerStack(3, 4, "full"),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, ("none",)), "names 1 layers, the tower has 3"),
        ((3, "some"), "unknown remat policy 'some'"),
        ((3, "none", (3,)), "before layer 3 does not divide 3 layers"),
    ],
)
def test_runs_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_stacks(*arguments)


def initial(layers, cuts):
    model = Model.build(tiny(layers=layers, encoders=()), jnp.float32, cuts)
    return model, jax.jit(model.init)(jax.random.key(3))


def test_initial_values_do_not_depend_on_run_borders():
    whole, cut = initial(3, {})[1], initial(3, {"llm": (1,)})[1]
    assert set(cut["llm"]["layers"]["runs"]) == {"0", "1:3"}
    assert_trees_close(unstack_layers(cut), unstack_layers(whole), 1e-6)


def test_layers_one_by_one_names_every_layer_and_into_runs_is_its_inverse():
    model, params = build(tiny(layers=5, encoders=("vision",)), {"llm": (1, 3)})
    single = unstack_layers(params)
    assert set(single["llm"]["layers"]) == {"0", "1", "2", "3", "4"}
    stacked = params["llm"]["layers"]["runs"]["1:3"]["mlp"]["up"]["weight"]
    np.testing.assert_array_equal(single["llm"]["layers"]["2"]["mlp"]["up"]["weight"], stacked[1])
    back = stack_layers(single, model.runs)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert jax.tree.structure(back) == jax.tree.structure(params)


def test_layers_keep_their_values_through_another_set_of_run_borders():
    config = tiny(layers=5, encoders=("vision",))
    one, params = build(config, {"llm": (1, 3)})
    other = Model.build(config, jnp.float32, {"llm": (2,), "vision": (1,)})
    moved = stack_layers(unstack_layers(params), other.runs)
    assert set(moved["llm"]["layers"]["runs"]) == {"0:2", "2:5"}
    rng = np.random.default_rng(0)
    batch = pack(
        [[random_sample(rng, [2, (2, 3), 4])]], {"llm": 12, "vision": 16}, encoders=("vision",)
    )
    expected = jax.jit(one.logits)(params, batch)
    np.testing.assert_allclose(jax.jit(other.logits)(moved, batch), expected, atol=1e-5, rtol=1e-5)


def test_one_by_one_and_back_work_on_shapes_and_inside_optimizer_states():
    model, params = build(tiny(layers=3, encoders=()), {"llm": (1,)})

    def take(leaf, i):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)

    def stack(leaves):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)

    single = unstack_layers(model.abstract, take)
    assert single["llm"]["layers"]["2"]["mlp"]["up"]["weight"].shape == (32, 48)
    assert stack_layers(single, model.runs, stack) == model.abstract
    state = optax.adamw(1e-3).init({"llm": params["llm"]})
    single = unstack_layers(state)
    assert set(single[0].mu["llm"]["layers"]) == {"0", "1", "2"}
    back = stack_layers(single, model.runs)
    assert jax.tree.structure(back) == jax.tree.structure(state)


MIXES = (
    *((policy,) * 3 for policy in get_args(Remat)),
    ("offload", "offload", "attention"),
    ("full", "products", "none"),
)


@pytest.mark.default_cases("dense")
@pytest.mark.parametrize("backend", ["dense", "blockwise"])
def test_every_mix_of_remat_policies_gives_equal_gradients(backend):
    """Exactly, but for what LLVM makes of sums in programs that differ, which depends on the processor: up to 4e-6."""
    rng = np.random.default_rng(0)
    encoders = ("vision",) if backend == "dense" else ()
    samples = [random_sample(rng, [9, *[(2, 3)] * len(encoders), 4]), random_sample(rng, [7])]
    batch = pack([samples], {"llm": 40, "vision": 16}, encoders=encoders)
    gradients = []
    for mix in MIXES:
        model, params = build(
            tiny(backend, layers=3, vision_layers=3, remat=mix, encoders=encoders)
        )
        gradient = jax.jit(jax.grad(lambda p, m=model: token_losses(m, p, batch).sum()))(params)
        gradients.append(unstack_layers(gradient))
    for found in gradients[1:]:
        assert_trees_close(found, gradients[0], 4e-6)


def squares(model, batch):
    """A loss by parameters and gradient accumulators."""
    return lambda params, sums: jnp.square(model_outputs(model, params, batch, sums).hidden).sum()


def test_gradients_added_to_sums_inside_the_scan_are_those_of_autodiff():
    config = tiny(
        layers=3, vision_layers=3, remat=("full", "full", "products"), encoders=("vision",)
    )
    model, params = build(config)
    batch = pack(
        [[random_sample(np.random.default_rng(0), [9, (2, 3), 4])]],
        {"llm": 24, "vision": 16},
        encoders=("vision",),
    )
    scanned, _ = split_scanned(params)
    assert set(scanned["llm"]["layers"]["runs"]) == {"0:2"}
    wanted = jax.jit(jax.grad(squares(model, batch)))(params, {})
    # As where a part is frozen, one of the parameters has no sum.
    sums = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), scanned)
    del sums["llm"]["layers"]["runs"]["0:2"]["mlp"]["up"]
    gradients, found = jax.jit(jax.grad(squares(model, batch), (0, 1)))(params, sums)
    expected, others = split_scanned(wanted)
    up = expected["llm"]["layers"]["runs"]["0:2"]["mlp"].pop("up")
    assert_trees_close(found, jax.tree.map(lambda g: 0.5 + g, expected), 1e-6)
    zeros, rest = split_scanned(gradients)
    assert_trees_close(zeros["llm"]["layers"]["runs"]["0:2"]["mlp"].pop("up"), up, 1e-6)
    assert not any(x.any() for x in jax.tree.leaves(zeros))
    assert_trees_close(rest, others, 1e-6)
    # A stack that sees nothing leaves its sums as they were.
    kept = jax.jit(jax.grad(squares(model, batch._replace(items={})), 1))(params, sums)
    assert_trees_close(kept["encoders"], sums["encoders"], 0)


def test_gradients_added_inside_the_scan_need_no_second_tree_of_them():
    config = tiny(layers=12, remat="full", encoders=())
    config = replace(config, llm=replace(config.llm, width=128, head_width=32, mlp_width=512))
    model = Model.build(config, jnp.float32)
    batch = pack([[random_sample(np.random.default_rng(0), [8])]], {"llm": 8}, encoders=())
    sums, _ = split_scanned(model.abstract)
    program = (
        jax.jit(jax.grad(squares(model, batch), 1), donate_argnums=1)
        .lower(model.abstract, sums)
        .compile()
    )
    size = sum(4 * x.size for x in jax.tree.leaves(sums))
    assert program.memory_analysis().alias_size_in_bytes >= size
    assert program.memory_analysis().temp_size_in_bytes < size / 4


def residual_bytes(remat, backend="dense"):
    model, params = build(tiny(backend, layers=3, remat=remat, encoders=()))
    batch = pack([[random_sample(np.random.default_rng(0), [256])]], {"llm": 256}, encoders=())
    back = jax.eval_shape(lambda p: jax.vjp(lambda p: token_losses(model, p, batch), p)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(back))


def test_remat_keeps_less_the_more_it_computes_again():
    kept = [
        residual_bytes(remat)
        for remat in ("none", "products", "attention_mlp", "attention", "full")
    ]
    scores = 3 * 4 * 256 * 256 * 4  # layers, heads, queries, keys, bytes
    assert kept[0] - kept[1] > scores
    assert kept == sorted(set(kept), reverse=True)


def scan_equations(jaxpr, inside=False):
    """Yield the equations in bodies of scans, the kernels' own left out, and the scans."""
    for equation in jaxpr.eqns:
        if inside or equation.primitive.name == "scan":
            yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from scan_equations(inner, inside or equation.primitive.name == "scan")


COMPARISONS = {
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "select_n",
    "sort",
    "cumsum",
    "reduce_or",
    "reduce_and",
}


def mask_work(backend, remat):
    """Names of what scans over layers with and without windows do to integers of many tokens, and keep of them."""
    config = tiny(backend, layers=3, vision_layers=3, remat=remat, encoders=("vision",))
    vision = replace(config.encoders["vision"], window=4, windowed=(0, 2))
    config = replace(
        config, llm=replace(config.llm, window=5, windowed=(1,)), encoders={"vision": vision}
    )
    model, params = build(config)
    sample = random_sample(np.random.default_rng(0), [9, (6, 6), 4])
    batch = pack([[sample]], {"llm": 24, "vision": 36}, encoders=("vision",))
    found = set()
    for equation in scan_equations(
        jax.make_jaxpr(jax.grad(lambda p: token_losses(model, p, batch).sum()))(params).jaxpr
    ):
        name = equation.primitive.name
        values = (
            equation.invars if name in COMPARISONS else equation.outvars if name == "scan" else ()
        )
        if any(v.aval.size >= 24 and v.aval.dtype.kind in "ib" for v in values):
            found.add(name)
    return found


@pytest.mark.default_cases("none")
@pytest.mark.parametrize("remat", ["none", "full"])
def test_scans_over_windowed_and_other_layers_do_no_mask_work(remat):
    assert mask_work("flash", remat) == set()


def test_mask_work_in_a_scan_is_found():
    assert {"eq", "select_n"} <= mask_work("blockwise", "none")


def gradient_compile_seconds(layers):
    model, params = build(tiny(layers=layers, encoders=()))
    batch = pack([[random_sample(np.random.default_rng(0), [8])]], {"llm": 8}, encoders=())
    lowered = jax.jit(jax.grad(lambda p: token_losses(model, p, batch).sum())).lower(params)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


@pytest.mark.exhaustive
def test_compiling_48_equal_layers_takes_at_most_twice_as_long_as_6():
    # Measured again once: something else may have run meanwhile.
    assert any(gradient_compile_seconds(48) <= 2 * gradient_compile_seconds(6) for _ in range(2))


def test_layers_that_do_not_end_at_a_border_are_refused():
    model, params = build(tiny(layers=3, encoders=()))
    llm = model.module(params).llm
    batch = pack([[random_sample(np.random.default_rng(0), [8])]], {"llm": 8}, encoders=())
    with pytest.raises(ValueError, match="layers 0 to 1 do not begin and end at borders"):
        llm.layers(jnp.zeros((1, 8, 32)), llm.context(batch.text), 0, 1)
