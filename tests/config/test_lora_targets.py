"""Which linear layers a pattern names, and what is said of one that cannot be meant."""

from __future__ import annotations

import pytest
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
from mmjax.errors import UserError

FROZEN = ["model.lora.a.layers=llm.*"]
TRAINED = [*FROZEN, "model.lora.a.base=trained"]
EXPERTS = [f"model.llm.experts.{key}" for key in ("layers=0", "count=4", "per_token=2", "width=64")]


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.lora.a.rank=4"], "missing key 'model.lora.a.layers'"),
        (["model.lora.a.layers=()"], "model.lora.a.layers is empty; give patterns"),
        (
            ["model.lora.a.layers=llm.layers.3.*"],
            r"matches no linear layer .* write \* for their number",
        ),
        (
            ["model.lora.a.layers=llm.*", "model.lora.b.layers=*.query"],
            "query has model.lora.a already; keep one",
        ),
        (
            ["model.lora.a.layers=llm.*", "model.lora.a.rank=999"],
            "model.lora.a.rank=999: .* channels",
        ),
        (
            ["model.lora.a.layers=llm.*", "model.lora.a.rank=0"],
            "model.lora.a.rank=0: must be at least 1",
        ),
        (
            ["model.lora.a.layers=llm.*", "model.lora.a.alpha=0"],
            "model.lora.a.alpha=0.0: must be more than 0",
        ),
        (["optimizer.modules.llm.lora.learning_rate=1"], "there is no module 'llm.lora'"),
    ],
)
def test_adapters_that_cannot_be_meant_are_refused_by_key(words, message):
    with pytest.raises(UserError, match=message):
        load(TINY_MEDIA, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.llm.quantize=int8"],
            r"model\.llm\.quantize=int8: .* not trained; set model\.llm\.frozen=true, or give",
        ),
        (
            ["model.llm.quantize=int8", *TRAINED],
            r"model\.llm\.quantize=int8: quantised weights are not trained",
        ),
        (["model.encoders.vision.quantize=nf4"], r"set model\.encoders\.vision\.frozen=true"),
        (
            ["model.llm.quantize=fp4"],
            r"model\.llm\.quantize: got .fp4.; expected one of none, int8, nf4",
        ),
        (
            [*FROZEN, "model.llm.quantize=nf4"],
            r"nf4: llm\S+query has 32 inputs, and 64 share a scale; use quantize=int8",
        ),
        ([*FROZEN, "model.llm.quantize=nf4", *EXPERTS], r"quantize=nf4: the matrices of experts"),
    ],
)
def test_weights_that_cannot_be_quantised_are_refused_by_key(words, message):
    with pytest.raises(UserError, match=message):
        load(TINY_MEDIA, words)


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
