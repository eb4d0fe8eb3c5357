from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch
from peft import get_peft_model
from peft.optimizers import create_loraplus_optimizer
from tiny_run import paths, tiny_config
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import get_scheduler

from mmjax.config import Adafactor, AdamW, Muon, Rates, Schedule
from mmjax.errors import UserError
from mmjax.models.layer_stacks import key_names
from mmjax.runtime.state import hyperparameters, make_optimizer, schedule_factor

AXES = {
    "llm": {"embed": ("vocab", "embed"), "query": ("embed", "heads"), "norm": (None,)},
    "encoders": {"vision": {"embed": (None, "embed"), "up": ("embed", "mlp"), "bias": ("mlp",)}},
    "connectors": {"vision": {"up": ("embed", "mlp")}},
}
SHAPES = {
    "llm": {"embed": (11, 8), "query": (3, 8, 12), "norm": (3, 8)},  # a stack of three layers
    "encoders": {"vision": {"embed": (5, 8), "up": (8, 16), "bias": (16,)}},
    "connectors": {"vision": {"up": (8, 6)}},
}
MODULES = ("llm", "vision", "vision.connector")
NESTED = {"llm": {"layers": {"runs": {"0:3": {"up": ("embed", "mlp")}}}}}


AXES_AS_ARRAYS = jax.tree.map(
    lambda axes: np.zeros((1,) * len(axes)), AXES, is_leaf=lambda x: isinstance(x, tuple)
)


def leaf_of(tree, path: tuple[str, ...]):
    for name in path:
        tree = tree[name]
    return tree


def stacked_up(x: np.ndarray) -> dict:
    return {"llm": {"layers": {"runs": {"0:3": {"up": x}}}}}


def hyper_of(rate: float) -> dict[str, np.float32]:
    return {
        "clip": np.float32(1e9),
        "learning_rate/llm": np.float32(rate),
        "weight_decay/llm": np.float32(0),
    }


def normal(seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    draw = lambda shape: scale * rng.standard_normal(shape, np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def norm_of(tree) -> float:
    return math.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in jax.tree.leaves(tree)))


def hyper(optimizer, rate=0.1, decay=0.0, clip=1e9, **own) -> dict[str, np.float32]:
    """The same rates for every group but those in `own` (`vision_connector` for `vision.connector`)."""
    groups = {optimizer.group_of(tuple(name.split("."))) for name in paths(normal(0))}
    rates = {g: own.get(g.replace(".", "_"), (rate, decay)) for g in groups}
    return {
        "clip": np.float32(clip),
        **{f"learning_rate/{group}": np.float32(rate) for group, (rate, _) in rates.items()},
        **{f"weight_decay/{group}": np.float32(decay) for group, (_, decay) in rates.items()},
    }


def test_adamw_is_optaxs_with_decay_on_the_matrices_alone():
    config = AdamW(b1=0.8, b2=0.9, eps=1e-6)
    optimizer = make_optimizer(config, AXES)
    is_matrix = jax.tree.map(
        lambda axes: len(axes) > 1, AXES, is_leaf=lambda x: isinstance(x, tuple)
    )
    theirs = optax.chain(
        optax.clip_by_global_norm(2.0),
        optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, mask=is_matrix),
    )
    ours, wanted = normal(0), normal(0)
    state, their_state = jax.jit(optimizer.init)(ours), jax.jit(theirs.init)(wanted)
    update, their_update = jax.jit(optimizer.update), jax.jit(theirs.update)
    for step in range(4):
        gradients = normal(step + 1, scale=0.1 * step + 0.05)  # below and above the clip
        ours, state, norm = update(gradients, state, ours, hyper(optimizer, 0.1, 0.3, 2.0))
        updates, their_state = their_update(gradients, their_state, wanted)
        wanted = jax.tree.map(lambda p, u: p + np.asarray(u), wanted, updates)
        assert norm == pytest.approx(norm_of(gradients), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, wanted)


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_clipping_by_the_global_norm_is_optaxs(size):
    # without momentum the first moment is the clipped gradient
    optimizer = make_optimizer(AdamW(b1=0.0), AXES)
    gradients, params = normal(1, size), normal(0)
    _, state, _ = jax.jit(optimizer.update)(
        gradients, jax.jit(optimizer.init)(params), params, hyper(optimizer, clip=1.5)
    )
    clip = optax.clip_by_global_norm(1.5)
    wanted, _ = jax.jit(clip.update)(gradients, clip.init(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.mu, wanted)


def test_elements_of_a_gradient_are_clipped_as_torch_does():
    optimizer = make_optimizer(AdamW(b1=0.0), AXES)
    gradients, params = normal(1), normal(0)
    rates = hyper(optimizer) | {"clip_value": np.float32(0.3)}
    _, state, norm = jax.jit(optimizer.update)(gradients, optimizer.init(params), params, rates)
    assert norm == pytest.approx(norm_of(gradients), rel=1e-6)
    for found, gradient in zip(jax.tree.leaves(state.mu), jax.tree.leaves(gradients), strict=True):
        theirs = torch.nn.Parameter(torch.zeros(gradient.shape))
        theirs.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_value_([theirs], 0.3)
        np.testing.assert_array_equal(found, theirs.grad.numpy())


@pytest.mark.parametrize("config", [AdamW(ema=0.8), Muon(ema=0.8)], ids=["adamw", "muon"])
def test_the_average_of_the_parameters_is_torchs_beside_the_same_updates(config):
    averaged, plain = make_optimizer(config, AXES), make_optimizer(replace(config, ema=0.0), AXES)
    params = others = normal(0)
    states = [jax.jit(o.init)(params) for o in (averaged, plain)]
    theirs = [torch.tensor(x) for x in jax.tree.leaves(params)]
    average = get_ema_multi_avg_fn(0.8)
    updates = [jax.jit(o.update) for o in (averaged, plain)]
    for step in range(4):
        of_step = normal(step + 1), hyper(averaged, 0.1)
        params, states[0], _ = updates[0](of_step[0], states[0], params, of_step[1])
        others, states[1], _ = updates[1](of_step[0], states[1], others, of_step[1])
        average(theirs, [torch.tensor(np.asarray(x)) for x in jax.tree.leaves(params)], None)
    jax.tree.map(np.testing.assert_array_equal, params, others)
    for found, wanted in zip(jax.tree.leaves(averaged.average(states[0])), theirs, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_each_module_follows_its_own_learning_rate_and_weight_decay():
    optimizer = make_optimizer(AdamW(), AXES)
    params, nothing = normal(0), jax.tree.map(np.zeros_like, normal(0))
    rates = hyper(optimizer, 0.1, 0.2, vision=(0.05, 0.4), vision_connector=(0.0, 0.5))
    after, _, _ = jax.jit(optimizer.update)(nothing, jax.jit(optimizer.init)(params), params, rates)
    np.testing.assert_allclose(
        after["llm"]["query"], params["llm"]["query"] * (1 - 0.1 * 0.2), rtol=1e-6
    )
    np.testing.assert_allclose(after["llm"]["norm"], params["llm"]["norm"])
    vision, before = after["encoders"]["vision"], params["encoders"]["vision"]
    np.testing.assert_allclose(vision["up"], before["up"] * (1 - 0.05 * 0.4), rtol=1e-6)
    np.testing.assert_allclose(vision["bias"], before["bias"])
    np.testing.assert_allclose(
        after["connectors"]["vision"]["up"], params["connectors"]["vision"]["up"]
    )


DEEP = {  # a vision tower of five layers, in two stacks and one alone
    "encoders": {
        "vision": {
            "embed": {"patches": (None, "embed")},
            "layers": {
                "runs": {
                    "0:3:2": {"up": ("embed", "mlp")},
                    "1:4:2": {"up": ("embed", "mlp")},
                    "4": {"up": ("embed", "mlp")},
                }
            },
            "head": {"scale": ("embed",)},
        }
    }
}


def moves(config, axes, shapes):
    """How far a unit gradient moves every parameter by one of Adam's first steps, by name."""
    optimizer = make_optimizer(config, axes)
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    ones = jax.tree.map(np.ones_like, params)
    groups = {optimizer.group_of(tuple(name.split("."))) for name in paths(params)}
    rates = {f"learning_rate/{g}": np.float32(0.5 if g == "slow" else 1) for g in groups}
    rates |= {f"weight_decay/{g}": np.float32(0) for g in groups} | {"clip": np.float32(1e9)}
    after, _, _ = jax.jit(optimizer.update)(ones, optimizer.init(params), params, rates)
    return paths(jax.tree.map(lambda x: -np.asarray(x).reshape(len(x), -1)[:, 0], after))


def test_learning_rates_decay_from_layer_to_layer_as_in_beit():
    def layer_id(name: str) -> int:
        """As `get_num_layer_for_vit` of BEiT numbers the parameters of a tower of five layers."""
        return 0 if name == "embed" else 6 if name == "head" else int(name) + 1

    wanted = {name: 0.7 ** (6 - layer_id(name)) for name in ("embed", "head", *map(str, range(5)))}
    shapes = jax.tree.map(
        lambda axes: (3,) * len(axes), DEEP, is_leaf=lambda x: isinstance(x, tuple)
    )
    runs = shapes["encoders"]["vision"]["layers"]["runs"]
    for stack in ("0:3:2", "1:4:2"):
        runs[stack] = {"up": (2, 3, 3)}
    config = AdamW(modules={"vision": Rates(layer_decay=0.7)})
    found = {
        name.removeprefix("encoders.vision."): x for name, x in moves(config, DEEP, shapes).items()
    }
    for stack, layers in {"0:3:2": (0, 2), "1:4:2": (1, 3)}.items():
        expected = [wanted[str(i)] for i in layers]
        np.testing.assert_allclose(found[f"layers.runs.{stack}.up"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["layers.runs.4.up"], wanted["4"], rtol=1e-5)
    np.testing.assert_allclose(found["embed.patches"], wanted["embed"], rtol=1e-5)
    np.testing.assert_allclose(found["head.scale"], wanted["head"], rtol=1e-5)


@pytest.mark.parametrize("make", [AdamW, Muon])
def test_parameters_that_patterns_name_have_rates_of_their_own(make):
    slow = Rates(parameters=("vision.layers.*.up", "*.head.scale"))
    optimizer = make_optimizer(make(modules={"slow": slow}), DEEP)
    leaves = jax.tree.leaves_with_path(DEEP, is_leaf=lambda x: isinstance(x, tuple))
    groups = {path: optimizer.group_of(path) for path in (key_names(path) for path, _ in leaves)}
    assert {path for path, group in groups.items() if group.startswith("slow")} == {
        path for path in groups if "layers" in path or "head" in path
    }
    config = tiny_config(
        optimizer=make(learning_rate=0.2, modules={"slow": replace(slow, learning_rate=0.1)})
    )
    rates = hyperparameters(replace(config, schedule=Schedule(warmup=0)), 0)
    group = "slow/matrix" if make is Muon else "slow"
    assert rates[f"learning_rate/{group}"] == pytest.approx(0.1)
    with pytest.raises(
        UserError, match=r"parameters: '\*.foot' matches no parameter .* known: vision"
    ):
        make_optimizer(make(modules={"slow": Rates(parameters=("*.foot",))}), DEEP)


def test_adapters_b_learns_faster_than_a_as_in_pefts_lora_plus():
    layer = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(6, 4)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    theirs = create_loraplus_optimizer(
        layer, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16, loraplus_weight_decay=0.1
    )
    trained = {"a": layer.base_model.model[0].lora_A, "b": layer.base_model.model[0].lora_B}
    matrices = {name: x.default.weight for name, x in trained.items()}
    axes = {"llm": {"up": {"lora": {"a": ("embed", None), "b": (None, "mlp")}}}}
    config = AdamW(b1=0.9, b2=0.999, modules={"llm.lora": Rates(b_ratio=16.0)})
    optimizer = make_optimizer(config, axes)
    params = {
        "llm": {"up": {"lora": {n: x.detach().numpy().T.copy() for n, x in matrices.items()}}}
    }
    state, rng = optimizer.init(params), np.random.default_rng(0)
    rates = {"learning_rate/llm.lora": 0.01, "weight_decay/llm.lora": 0.1, "clip": 1e9}
    for _ in range(4):
        gradients = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
        for name, x in matrices.items():
            x.grad = torch.tensor(gradients["llm"]["up"]["lora"][name].T.copy())
        theirs.step()
        params, state, _ = optimizer.update(gradients, state, params, rates)
    for name, x in matrices.items():
        found = np.asarray(params["llm"]["up"]["lora"][name]).T
        np.testing.assert_allclose(found, x.detach().numpy(), rtol=1e-5, atol=1e-6)


SCHEDULED = {
    "vision": Rates(frozen_until=5, frozen_from=12),
    "llm": Rates(frozen_from=9),
    "biases": Rates(parameters=("*.bias",), frozen_until=3),
}


def is_trained(path: tuple[str, ...], step: int) -> bool:
    if path[-1] == "bias":
        return step >= 3
    return {"encoders": 5 <= step < 12, "llm": step < 9, "connectors": True}[path[0]]


def scheduled_hyper(config, step: int) -> dict:
    whole = tiny_config(optimizer=config, schedule=Schedule(warmup=0, final=1.0))
    return hyperparameters(whole, step)


def test_parameters_that_steps_freeze_are_updated_as_torch_does_where_their_gradient_is_none():
    config = AdamW(learning_rate=0.1, weight_decay=0.3, modules=SCHEDULED)
    optimizer = make_optimizer(config, AXES)
    params = jax.tree.map(jnp.asarray, normal(0))
    names = {key_names(path): x.ndim for path, x in jax.tree.leaves_with_path(AXES_AS_ARRAYS)}
    theirs = {
        key_names(path): torch.nn.Parameter(torch.tensor(x))
        for path, x in jax.tree.leaves_with_path(params)
    }
    decayed = [x for path, x in theirs.items() if names[path] > 1]
    others = [x for path, x in theirs.items() if names[path] == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=0.1,
        betas=(config.b1, config.b2),
        eps=config.eps,
        weight_decay=0.3,
    )
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for step in range(20):
        gradients = normal(step + 1, scale=0.1)
        for path, gradient in jax.tree.leaves_with_path(gradients):
            name = key_names(path)
            theirs[name].grad = torch.tensor(gradient) if is_trained(name, step) else None
        total = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
        params, state, norm = update(gradients, state, params, scheduled_hyper(config, step))
        np.testing.assert_allclose(norm, total.item(), rtol=1e-6)
    assert update._cache_size() == 1
    for path, found in jax.tree.leaves_with_path(params):
        wanted = theirs[key_names(path)].detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        AdamW(moments="int8", ema=0.9, modules=SCHEDULED),
        Muon(moments="bfloat16", modules=SCHEDULED),
        Adafactor(modules=SCHEDULED),
    ],
    ids=["adamw", "muon", "adafactor"],
)
def test_steps_that_freeze_a_parameter_leave_it_and_its_moments_as_they_are(config):
    optimizer = make_optimizer(config, AXES)
    params = normal(0)
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for step in range(13):
        # What is not finite has no part in it either.
        gradients = jax.tree_util.tree_map_with_path(
            lambda path, g, step=step: g if is_trained(key_names(path), step) else g * np.nan,
            normal(step + 1),
        )
        before, after = params, update(gradients, state, params, scheduled_hyper(config, step))
        params, new, norm = after
        assert np.isfinite(norm)
        for path, found in jax.tree.leaves_with_path(params):
            unchanged = np.array_equal(found, leaf_of(before, key_names(path)))
            assert unchanged != is_trained(key_names(path), step), (path, step)
        if step >= 9:
            for (path, found), (_, old) in zip(
                jax.tree.leaves_with_path(new), jax.tree.leaves_with_path(state), strict=True
            ):
                if "llm" in {getattr(key, "key", "") for key in path} and "average" not in str(
                    path
                ):
                    np.testing.assert_array_equal(found, old)
        state = new


def test_muon_makes_every_layers_matrix_orthogonal_and_gives_adam_the_rest():
    config = Muon()
    optimizer = make_optimizer(config, AXES)
    params, gradients = normal(0), normal(1)
    rates = hyper(optimizer, 1.0)
    groups = {name.partition("/")[2] for name in rates if name.startswith("learning_rate/")}
    assert groups == {f"{m}/{kind}" for m in MODULES for kind in ("matrix", "other")} - {
        "vision.connector/other"
    }
    after, _, _ = jax.jit(optimizer.update)(
        gradients, jax.jit(optimizer.init)(params), params, rates
    )
    moved = jax.tree.map(lambda a, b: b - np.asarray(a), after, params)
    matrices = [
        *moved["llm"]["query"],
        moved["encoders"]["vision"]["up"],
        moved["connectors"]["vision"]["up"],
    ]
    for matrix in matrices:
        scale = math.sqrt(max(1.0, matrix.shape[1] / matrix.shape[0]))
        values = np.linalg.svd(matrix, compute_uv=False) / scale
        assert values.min() > 0.6
        assert values.max() < 1.3
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    wanted, _ = jax.jit(lambda g: adam.update(g, adam.init(g)))(gradients)
    for name in ("llm.embed", "llm.norm", "encoders.vision.embed", "encoders.vision.bias"):
        np.testing.assert_allclose(
            paths(moved)[name], paths(wanted)[name], rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_muon_treats_a_layer_in_a_stack_as_it_does_one_alone():
    optimizer = make_optimizer(Muon(), AXES)
    stacked, gradients = ({"llm": {"query": normal(seed)["llm"]["query"]}} for seed in (0, 1))
    layer = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
    rates = hyper(optimizer, 1.0)
    update = jax.jit(optimizer.update)
    together, _, _ = update(gradients, optimizer.init(stacked), stacked, rates)
    for i in range(3):
        alone, _, _ = update(
            layer(gradients, i), optimizer.init(layer(stacked, i)), layer(stacked, i), rates
        )
        np.testing.assert_allclose(together["llm"]["query"][i], alone["llm"]["query"], atol=1e-4)


def test_adafactor_is_optaxs_with_momentum_on_every_layer_alone():
    optimizer = make_optimizer(Adafactor(b1=0.5, b2=0.7, moments="float32"), NESTED)
    decay = lambda step, _: jnp.minimum(0.7, 1 - (step + 1.0) ** -0.8)  # noqa: E731
    theirs = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=32, decay_rate_fn=decay),
        optax.clip_by_block_rms(1.0),
        optax.ema(0.5, debias=False),
    )
    rng = np.random.default_rng(0)
    layers = lambda: (  # noqa: E731
        rng.normal(size=(3, 40, 48)).astype(np.float32) * np.float32([[[1]], [[10]], [[100]]])
    )
    params = stacked_up(np.zeros((3, 40, 48), np.float32))
    state = jax.jit(optimizer.init)(params)
    alone = [theirs.init(np.zeros((40, 48), np.float32)) for _ in range(3)]
    update, their_update = jax.jit(optimizer.update), jax.jit(theirs.update)
    # its momentum, and factors of the squares
    assert sum(x.size for x in jax.tree.leaves(state)) < 1.1 * 3 * 40 * 48
    for _ in range(4):
        gradients = layers()
        moved, state, _ = update(stacked_up(gradients), state, params, hyper_of(1.0))
        found = -np.asarray(moved["llm"]["layers"]["runs"]["0:3"]["up"])
        for i in range(3):
            wanted, alone[i] = their_update(gradients[i], alone[i], np.zeros((40, 48), np.float32))
            np.testing.assert_allclose(found[i], wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "config", [AdamW(), Muon(), Adafactor()], ids=["adamw", "muon", "adafactor"]
)
def test_a_fixed_table_stays_as_it_is(config):
    params = {
        "encoders": {"audio": {"table": normal(0)["llm"]["embed"], "up": normal(1)["llm"]["embed"]}}
    }
    optimizer = make_optimizer(
        config, {"encoders": {"audio": {"table": ("fixed", "embed"), "up": ("embed", "mlp")}}}
    )
    groups = {optimizer.group_of(("encoders", "audio", name)) for name in ("table", "up")}
    rates = {f"learning_rate/{group}": np.float32(0.1) for group in groups}
    rates |= {f"weight_decay/{group}": np.float32(0.5) for group in groups} | {
        "clip": np.float32(1)
    }
    moved, _, _ = optimizer.update(
        jax.tree.map(np.zeros_like, params), optimizer.init(params), params, rates
    )
    before, after = params["encoders"]["audio"], moved["encoders"]["audio"]
    np.testing.assert_array_equal(after["table"], before["table"])
    np.testing.assert_allclose(after["up"], 0.95 * before["up"], rtol=1e-5)


def test_the_schedule_warms_up_linearly_and_ends_at_its_final_share():
    schedule = Schedule(warmup=4, final=0.1)
    found = [schedule_factor(schedule, step, 15) for step in range(15)]
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4] == 1.0
    assert found[9] == pytest.approx(0.55)  # the middle of the cosine
    assert found[-1] == pytest.approx(0.1)
    assert sorted(found[4:], reverse=True) == found[4:]


STEPS, WARMUP, DECAY = 41, 6, 12


@pytest.mark.parametrize(
    ("name", "specific", "schedule"),
    [
        ("constant_with_warmup", {}, Schedule(WARMUP, final=1.0)),
        ("linear", {}, Schedule(WARMUP, final=0.0, shape="linear")),
        ("cosine", {}, Schedule(WARMUP, final=0.0)),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, Schedule(WARMUP, final=0.1)),
        ("cosine_with_restarts", {"num_cycles": 3}, Schedule(WARMUP, final=0.0, cycles=3)),
        *(
            (
                "warmup_stable_decay",
                {"num_decay_steps": DECAY, "decay_type": theirs, "min_lr_ratio": 0.1},
                Schedule(WARMUP, final=0.1, shape=shape, decay=DECAY),
            )
            for theirs, shape in (("cosine", "cosine"), ("linear", "linear"), ("1-sqrt", "sqrt"))
        ),
    ],
)
def test_schedules_are_transformers(name, specific, schedule):
    # Transformers' rate of step 0 is 0, and that behind the last step is the final one: an update's
    # is one step later in its warm-up, and ends one step earlier.
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = get_scheduler(
        name,
        torch.optim.SGD([parameter], 1.0),
        num_warmup_steps=WARMUP,
        num_training_steps=STEPS - 1,
        scheduler_specific_kwargs=specific,
    ).lr_lambdas[0]
    # Where the decay is given, theirs warms up from the final rate and not from 0.
    first = WARMUP if schedule.decay else 0
    wanted = [theirs(step + (step < WARMUP)) for step in range(first, STEPS)]
    found = [schedule_factor(schedule, step, STEPS) for step in range(first, STEPS)]
    np.testing.assert_allclose(found, wanted, atol=1e-9)


def test_schedules_are_optaxs():
    rest = STEPS - 1 - WARMUP
    behind = {
        Schedule(WARMUP, 0.1): optax.cosine_decay_schedule(1.0, rest, 0.1),
        Schedule(WARMUP, 0.1, "linear"): optax.linear_schedule(1.0, 0.1, rest),
        Schedule(WARMUP, 0.1, "linear", DECAY): optax.linear_schedule(
            1.0, 0.1, DECAY, rest - DECAY
        ),
        # each restart at its peak, and the last step at the end of the last cycle
        Schedule(WARMUP, 0.1, cycles=2): optax.join_schedules(
            [optax.cosine_decay_schedule(1.0, rest / 2, 0.1)] * 2, [rest // 2]
        ),
    }
    for schedule, theirs in behind.items():
        found = [schedule_factor(schedule, WARMUP + n, STEPS) for n in range(rest + 1)]
        np.testing.assert_allclose(found, [theirs(n) for n in range(rest + 1)], atol=1e-6)


def test_a_run_no_longer_than_its_warm_up_never_exceeds_the_peak():
    assert [schedule_factor(Schedule(warmup=5), step, 3) for step in range(3)] == [0.2, 0.4, 0.6]
    assert schedule_factor(Schedule(warmup=0, final=0.5), 0, 1) == 1.0


def test_rates_of_a_config_are_scheduled_and_given_by_module():
    own = {"vision": Rates(learning_rate=0.5), "llm": Rates(weight_decay=0.7)}
    adamw = AdamW(learning_rate=0.2, weight_decay=0.1, modules=own)
    config = tiny_config(optimizer=adamw, schedule=Schedule(warmup=4))
    rates = hyperparameters(config, 0)
    wanted = {
        "learning_rate/llm": 0.05,
        "learning_rate/vision": 0.125,
        "learning_rate/vision.connector": 0.05,
    }
    wanted |= {
        "weight_decay/llm": 0.7,
        "weight_decay/vision": 0.1,
        "weight_decay/vision.connector": 0.1,
    }
    wanted |= {f"learning_rate/{module}": 0.05 for module in ("audio", "audio.connector")}
    wanted |= {f"weight_decay/{module}": 0.1 for module in ("audio", "audio.connector")}
    assert rates == pytest.approx(wanted | {"clip": config.training.clip})

    muon = Muon(learning_rate=0.2, adam_learning_rate=0.02, weight_decay=0.1, modules=own)
    rates = hyperparameters(replace(config, optimizer=muon), 3)
    for group, pair in {
        "vision/matrix": (0.5, 0.1),
        "vision/other": (0.05, 0.1),
        "llm/other": (0.02, 0.7),
    }.items():
        assert (rates[f"learning_rate/{group}"], rates[f"weight_decay/{group}"]) == pytest.approx(
            pair
        )
