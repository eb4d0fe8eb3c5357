"""Which linear layers a pattern names, and what is said of one that cannot be meant."""

from __future__ import annotations

from commands import TINY_MEDIA

from mmjax.config import LoraConfig
from mmjax.config.loading import load
from mmjax.config.model import (
    adapted_modules,
    adapters_by_layer,
    frozen_by_adapters,
    linear_layers,
    lora_scale,
    quantized_layers,
)
from mmjax.cost.table import parameters

FROZEN = ["model.lora.a.layers=llm.*"]


def with_lora(*words: str):
    return load(TINY_MEDIA, words).model


def test_patterns_name_linear_layers_of_towers_and_connectors():
    model = with_lora(
        "model.lora.a.layers=llm.*.query,vision.connector.*",
        "model.lora.b.layers=vision.layers.*.up",
    )
    assert {name: lora.layers[0] for name, lora in adapters_by_layer(model).items()} == {
        "llm.layers.*.attention.query": "llm.*.query",
        "vision.connector.mlp.up": "llm.*.query",
        "vision.connector.mlp.down": "llm.*.query",
        "vision.layers.*.mlp.up": "vision.layers.*.up",
    }
    assert adapted_modules(model) == ["llm", "vision.connector", "vision"]
    assert adapters_by_layer(with_lora()) == {}


def test_a_module_with_adapters_is_frozen_unless_its_base_is_trained():
    model = with_lora(
        "model.lora.a.layers=llm.*",
        "model.lora.a.base=trained",
        "model.lora.b.layers=vision.layers.*",
    )
    assert frozen_by_adapters(model) == {"vision"}


def test_adapters_are_as_large_as_their_rank_and_layers_say():
    model = with_lora(
        "model.lora.a.layers=llm.*.query,vision.connector.mlp.up", "model.lora.a.rank=3"
    )
    names = linear_layers(model)
    assert {module: n for module, n in parameters(model).items() if module.endswith(".lora")} == {
        "llm.lora": model.llm.layers * 3 * sum(names["llm.layers.*.attention.query"]),
        "vision.connector.lora": 3 * sum(names["vision.connector.mlp.up"]),
    }


def test_the_scale_is_alpha_over_the_rank_or_its_root():
    assert lora_scale(LoraConfig(("*",), 16, 8.0)) == 0.5
    assert lora_scale(LoraConfig(("*",), 16, 8.0, "sqrt_rank")) == 2.0


def test_all_matrices_of_a_towers_layers_are_quantised_and_no_others():
    model = with_lora(*FROZEN, "model.llm.quantize=int8")
    assert set(quantized_layers(model).values()) == {"int8"}
    assert set(quantized_layers(model)) == {
        name for name in linear_layers(model) if name.startswith("llm.")
    }


def test_a_module_and_its_adapters_have_rates_of_their_own():
    rates = ["optimizer.modules.llm.learning_rate=1", "optimizer.modules.llm.lora.learning_rate=2"]
    config = load(TINY_MEDIA, ["model.lora.a.layers=llm.*", *rates])
    assert {name: own.learning_rate for name, own in config.optimizer.modules.items()} == {
        "llm": 1.0,
        "llm.lora": 2.0,
    }
