"""What layers keep between their passes: as their policies say, and as the arrays of a real forward pass weigh."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_run import tiny_config

from mmjax.batch import TOKEN_FIELDS, ItemBatch, TextBatch
from mmjax.config import ExpertsConfig
from mmjax.models.model import Model
from mmjax.planning.memory import SavedBytes, saved_bytes_per_layer

CONFIG = tiny_config().model
SHAPES = {"llm": (2, 64), "vision": (2, 48), "audio": (1, 96)}
POSITIONS = {"llm": 128, "vision": 96, "audio": 48}  # the audio encoder halves its frames
BOTH = frozenset({"weights", "inputs"})


def with_tower(tower, backend="dense", **changes):
    towers = {"llm": CONFIG.llm, **CONFIG.encoders}
    towers[tower] = replace(towers[tower], attention=backend, **changes)
    return replace(CONFIG, llm=towers.pop("llm"), encoders=towers)


@pytest.mark.covering
@pytest.mark.parametrize("tower", SHAPES)
@pytest.mark.parametrize("backend", ["dense", "blockwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_named_saves_are_the_values_that_they_name(tower, backend, dtype):
    config = CONFIG.llm if tower == "llm" else CONFIG.encoders[tower]
    found = saved_bytes_per_layer(with_tower(tower, backend), tower, SHAPES[tower], dtype)
    width, mlp, keys = config.width, config.mlp_width, 16 if tower == "llm" else config.width
    size = jnp.dtype(dtype).itemsize
    logsumexp = 4 * config.heads if backend == "blockwise" else 0
    attention = width * size + logsumexp
    products = (width + 2 * keys + width + (2 if tower == "llm" else 1) * mlp) * size
    inputs = width * size
    wanted = {
        "full": SavedBytes(inputs, 0),
        "attention": SavedBytes(inputs + attention, 0),
        "attention_mlp": SavedBytes(inputs + attention + inputs, 0),
        "products": SavedBytes(inputs + attention + products, 0),
        "offload": SavedBytes(inputs, attention + products),
    }
    of_all = {
        policy: SavedBytes(*(POSITIONS[tower] * b for b in per)) for policy, per in wanted.items()
    }
    assert {policy: found[policy] for policy in wanted} == of_all
    assert found["none"].device > found["products"].device


@pytest.mark.default_cases("llm", "gated vision")
@pytest.mark.parametrize(
    ("tower", "changes"),
    [
        (
            "llm",
            {"width": 3584, "heads": 28, "kv_heads": 4, "head_width": 128, "mlp_width": 18_944},
        ),
        ("vision", {"width": 1280, "heads": 16, "mlp_width": 5120}),
        ("vision", {"width": 1280, "heads": 16, "mlp_width": 3456, "norm": "rms", "gated": True}),
    ],
    ids=["llm", "vision", "gated vision"],
)
def test_without_remat_a_layer_keeps_its_products_and_the_inputs_of_its_norms_and_products_in_bfloat16(
    tower, changes
):
    config = with_tower(tower, "blockwise", **changes)
    part = config.llm if tower == "llm" else config.encoders[tower]
    keys = 512 if tower == "llm" else part.width
    mlps = 2 if tower == "llm" or part.gated else 1
    # The residual stream and a norm's output before attention and before the MLP; queries, keys,
    # values and the output of attention, which is kept by block, too.
    numbers = 2 * (2 * part.width) + part.width + 2 * keys + 2 * part.width + mlps * part.mlp_width
    found = saved_bytes_per_layer(config, tower, (1, 256), "bfloat16")["none"].device
    assert found == 256 * (2 * numbers + 4 * part.heads)


@pytest.mark.default_cases("trained-vision-blockwise", "frozen-llm-blockwise")
@pytest.mark.parametrize(("tower", "backend"), [*product(SHAPES, ("dense", "blockwise"))])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_tower_of_several_policies_keeps_what_its_layers_were_predicted_to(
    tower, backend, frozen
):
    if frozen and tower != "llm":
        pytest.skip("nothing stands before an encoder whose gradient a frozen one would pass on")
    wanted = frozenset({"inputs"}) if frozen else BOTH
    mix = (
        "full",
        "full",
        "attention",
        "attention_mlp",
        "attention_mlp",
        "products",
        "products",
        "products",
    )
    per_layer = saved_bytes_per_layer(
        with_tower(tower, backend, frozen=frozen), tower, SHAPES[tower], "float32"
    )
    predicted = sum(per_layer[policy].device for policy in mix)
    measured = weighed(
        Model.build(with_tower(tower, backend, layers=len(mix), remat=mix), jnp.float32),
        tower,
        wanted,
    )
    assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.default_cases("16")
@pytest.mark.parametrize("shared", [0, 16])
def test_layers_with_experts_keep_what_they_were_predicted_to(shared):
    experts = ExpertsConfig(
        layers=tuple(range(4)), count=8, per_token=2, width=24, shared_width=shared
    )

    def config(remat):
        return with_tower("llm", layers=4, remat=remat, experts=experts)

    predicted = saved_bytes_per_layer(config("none"), "llm", SHAPES["llm"], "float32")
    for policy in ("products", "full"):
        measured = weighed(Model.build(config(policy), jnp.float32), "llm", BOTH)
        assert measured == 4 * predicted[policy].device


def weighed(model, tower, wanted):
    """Bytes of the arrays that a real forward pass of a tower's layers gives to its backward pass."""
    params = model.init(jax.random.key(0))

    @jax.jit
    def forward(params, batch):
        module = model.module(params)
        part = module.llm if tower == "llm" else module.encoders[tower]
        x, context = (
            part.embedded(batch.token if tower == "llm" else batch),
            module.context(tower, batch, None),
        )
        graph, weights = nnx.split(part.layers)
        given = {"weights": weights, "inputs": x}
        differentiated = {name: given[name] for name in sorted(wanted)}
        _, backward = jax.vjp(
            lambda of: nnx.merge(graph, (given | of)["weights"])((given | of)["inputs"], context),
            differentiated,
        )
        known = {id(leaf) for leaf in jax.tree.leaves((weights, context))}
        return [leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in known]

    return sum(leaf.nbytes for leaf in forward(params, batch_of(tower)))


def batch_of(tower):
    zeros = np.zeros(SHAPES[tower], np.int32)
    if tower == "llm":
        fields = dict.fromkeys(TOKEN_FIELDS, zeros)
        return TextBatch(**fields | {"weight": zeros.astype(np.float32), "slots": {}, "send": {}})
    features = 16 if tower == "vision" else 20
    values = np.zeros((*zeros.shape, features), np.float32)
    return ItemBatch(values, zeros, np.zeros((*zeros.shape, 3), np.int32), zeros, zeros)


def test_layers_whose_gradients_nobody_wants_keep_nothing():
    found = saved_bytes_per_layer(
        with_tower("vision", frozen=True), "vision", SHAPES["vision"], "float32"
    )
    assert set(found.values()) == {SavedBytes(0, 0)}
