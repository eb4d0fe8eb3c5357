"""Costs come from the program: of layers that nothing but the model knows, by the scopes that it names."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed import model_outputs
from test_flops import make_batch, make_model, make_text

from mmjax.config import ModelConfig, UnetConfig
from mmjax.cost.operations import list_operations
from mmjax.cost.table import module_parameters, parameters
from mmjax.models import decoder
from mmjax.models.layers import LayerOutput
from mmjax.models.linear import Linear
from mmjax.models.model import Model
from mmjax.planning.flops import executed, model_flops, recompute_flops, stage_flops
from mmjax.planning.memory import SavedBytes, saved_bytes_per_layer
from mmjax.planning.work import row_work, useful_work


class SquaredLayer(nnx.Module):
    """A layer of a kind that nothing but this test has: one hidden layer, whose activations are squared."""

    def __init__(self, _: object, rngs: nnx.Rngs):
        self.up = Linear(32, 96, ("embed", "mlp"), rngs)
        self.down = Linear(96, 32, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array, context: object, past: None = None) -> LayerOutput:
        return LayerOutput(x + self.down(jnp.square(self.up(x))), None, None)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setattr(decoder, "TransformerLayer", SquaredLayer)
    return ModelConfig(replace(make_model().llm, layers=5, vocab=31, rope_theta=12_345.0))


def test_a_layer_of_a_new_kind_is_planned_without_a_word_in_planning(unknown: ModelConfig) -> None:
    matrices, shape = 2 * 32 * 96, {"llm": (2, 64)}
    assert parameters(unknown) == {"llm": 5 * matrices + 32 + 31 * 32}
    assert module_parameters(unknown)["llm"].matrices == 5 * matrices
    text = make_text(np.array([[0] * 40 + [-1] * 24, [0] * 60 + [-1] * 4], np.int32))
    needed = model_flops(unknown, useful_work(unknown, text, {}), frozenset())["llm"]
    assert needed.forward == 2 * 100 * (5 * matrices + 31 * 32)
    assert needed.backward == 2 * needed.forward
    flops = executed(unknown, shape, frozenset())["llm"]
    assert needed.total < flops.total < 1.5 * 128 / 100 * needed.total
    work = row_work(unknown, shape)["llm"]
    products = 2 * 128 * 32 * 96  # of the first matrix; no gradient needs what the second makes
    assert products < recompute_flops(unknown, "llm", work, "full") < 1.1 * products
    stages = [
        stage_flops(unknown, "llm", layers, ("none",) * len(layers), shape)
        for layers in (range(2), range(2, 5))
    ]
    assert sum(stage.total for stage in stages) == pytest.approx(flops.total)
    saved = saved_bytes_per_layer(unknown, "llm", (2, 64), "bfloat16")
    assert saved["full"] == SavedBytes(128 * 2 * 32)
    assert saved["products"] == SavedBytes(128 * 2 * (32 + 96))
    assert saved["offload"] == SavedBytes(128 * 2 * 32, 128 * 2 * 96)
    assert saved["none"] == SavedBytes(128 * 2 * (32 + 2 * 96))


def test_a_convolution_counts_the_taps_that_lie_on_the_image() -> None:
    """Along a side of 4, taps of 3 meet 2, 3, 3 and 2 pixels; with a stride of 2 behind two zeros, 1, 3 and 2."""

    def operations(stride: int, padding: int) -> int:
        def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
            sides = [(padding, padding)] * 2
            return jax.lax.conv_general_dilated(image, kernel, (stride, stride), sides)

        program = jax.make_jaxpr(convolve)(jnp.zeros((5, 7, 4, 4)), jnp.zeros((11, 7, 3, 3)))
        return sum(x.count for x in list_operations(program.jaxpr))

    assert operations(1, 1) == 2 * 5 * 7 * 11 * (2 + 3 + 3 + 2) ** 2
    assert operations(2, 2) == 2 * 5 * 7 * 11 * (1 + 3 + 2) ** 2


def test_a_program_names_the_towers_and_connectors_that_its_products_belong_to_and_each_needs_its_own() -> (
    None
):
    config = make_model()
    towers = {"llm": config.llm, **config.encoders}
    model = Model.build(
        config, jnp.float32, {name: tuple(range(1, tower.layers)) for name, tower in towers.items()}
    )
    batch = make_batch(config, {"llm": (1, 12), "vision": (1, 8), "audio": (1, 12)})
    program = jax.make_jaxpr(lambda params, batch: model_outputs(model, params, batch).hidden)(
        model.abstract, batch
    ).jaxpr
    # of the logits, which no program of these makes
    found = {"llm": 2 * 12 * config.llm.width * config.llm.vocab}
    for operation in list_operations(program):
        if operation.is_product:
            tower, *inside = operation.scope.removeprefix("/").split("/")
            module = f"{tower}.connector" if "connector" in inside else tower
            found[module] = found.get(module, 0) + operation.count
    needed = model_flops(config, useful_work(config, batch.text, batch.items), frozenset())
    assert found == {module: flops.forward for module, flops in needed.items()}


def test_loops_count_as_often_as_they_run() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ x, None), x, None, 7)[0]

    (found,) = [
        x for x in list_operations(jax.make_jaxpr(loop)(jnp.zeros((3, 3))).jaxpr) if x.is_product
    ]
    assert found.count == 7 * 2 * 27


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("unet", "published"),
    [
        (UnetConfig(condition_width=1024), 865_910_724),
        (UnetConfig(condition_width=768, heads=(8,) * 4, linear_projections=False), 859_520_964),
    ],
    ids=["Stable Diffusion 2.1", "Stable Diffusion 1"],
)
def test_a_unet_has_the_published_parameters(unet: UnetConfig, published: int) -> None:
    model = replace(make_model(), encoders={}, generators={"picture": unet})
    assert parameters(model)["picture"] == published
