"""What adapters and the frozen weights under them cost is what the traced gradient computes and the model holds."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_flops import LATENT, gradient, make_batch, make_model, traced_products

from mmjax.config import AdamW, LoraConfig, ModelConfig, Muon
from mmjax.config.model import frozen_modules, linear_layers
from mmjax.models.linear import Linear
from mmjax.models.model import Model
from mmjax.planning.flops import executed, stage_flops, step_needed
from mmjax.planning.memory import moment_bytes
from mmjax.runtime.state import make_optimizer, split

SHAPE = {"llm": (2, 12), "vision": (1, 8), "audio": (2, 12)}
PATTERNS = [
    ("llm.*",),
    ("llm.*.query",),
    ("llm.*.key", "llm.*.gate"),
    ("llm.*.value",),
    ("llm.*.output",),
    ("llm.*.up",),
    ("llm.*.down",),
    ("vision.layers.*.query", "llm.*.down"),
    ("vision.connector.*",),
    ("*.connector.mlp.down", "llm.*.attention.*"),
    ("audio.*",),
    ("*",),
]
ALL_BUT_LLM = frozenset({"vision", "vision.connector", "audio", "audio.connector"})


def with_adapters(
    patterns: tuple[str, ...], base: str = "frozen", rank: int = 3, **llm
) -> ModelConfig:
    return replace(make_model(**llm), lora={"one": LoraConfig(patterns, rank, base=base)})


@pytest.mark.parametrize("llm", [{}, LATENT], ids=["plain", "latent attention"])
def test_linear_layers_are_those_of_the_built_model_with_their_sizes(llm):
    plain = make_model(**llm)
    model = replace(plain, encoders={n: replace(e, layers=2) for n, e in plain.encoders.items()})
    model = replace(
        model, encoders=model.encoders | {"vision": replace(model.encoders["vision"], gated=True)}
    )
    built = Model.build(model, jnp.float32)
    found = {}
    for path, module in nnx.iter_modules(built.module({})):
        if isinstance(module, Linear) and ("layers" in path or path[0] == "connectors"):
            kind, *rest = ["llm", *path[1:]] if path[0] == "llm" else [path[1], *path[2:]]
            inside = ["connector", *rest] if path[0] == "connectors" else ["layers", "*", *rest[3:]]
            found[".".join(map(str, [kind, *inside]))] = tuple(module.weight.shape[-2:])
    assert found == linear_layers(model)


@pytest.mark.default_cases(
    "llm.*-llm alone",
    "llm.*.value-all",
    "vision.layers.*.query,llm.*.down-none",
    "vision.connector.*-none",
    "audio.*-none",
    "*-none",
)
@pytest.mark.parametrize("trained", ["none", "llm alone", "all"])
@pytest.mark.parametrize("patterns", PATTERNS, ids=",".join)
def test_needed_is_every_matrix_product_of_the_traced_gradient(
    patterns: tuple[str, ...], trained: str
) -> None:
    check_needed(with_adapters(patterns, base="trained" if trained == "all" else "frozen"), trained)


@pytest.mark.exhaustive
@pytest.mark.parametrize("trained", ["none", "llm alone"])
@pytest.mark.parametrize("query_rank", [0, 5])
def test_needed_of_latent_attention_is_every_product_too(query_rank: int, trained: str) -> None:
    latent = LATENT | {"latent": replace(LATENT["latent"], query_rank=query_rank)}
    check_needed(with_adapters(("llm.*",), **latent), trained)


def check_needed(model: ModelConfig, trained: str) -> None:
    """Hold the needed FLOPs equal to those of the traced gradient. trained: modules beside adapters."""
    batch = make_batch(model, SHAPE)
    others = {"none": ALL_BUT_LLM | {"llm"}, "llm alone": ALL_BUT_LLM, "all": frozenset()}[trained]
    frozen = frozen_modules(model) | others
    function, params = gradient(model, frozen)
    assert step_needed(model, batch.text, batch.items, frozen) == 2 * traced_products(
        jax.make_jaxpr(function)(*params, batch).jaxpr
    )


def test_stages_execute_together_what_one_mesh_does_with_the_references_pass():
    model = with_adapters(("llm.*", "vision.layers.*.query"))
    model = replace(
        model, llm=replace(model.llm, layers=4), encoders={"vision": model.encoders["vision"]}
    )
    shape = {tower: SHAPE[tower] for tower in ("llm", "vision")}
    again, once = (
        executed(model, shape, frozen_modules(model), reference=on) for on in (True, False)
    )
    for tower, stages in (
        ("llm", (range(2), range(2, 4))),
        ("vision", (range(model.encoders["vision"].layers),)),
    ):
        for whole, reference in ((again, True), (once, False)):
            parts = [
                stage_flops(
                    model, tower, layers, ("none",) * len(layers), shape, reference=reference
                )
                for layers in stages
            ]
            modules = [flops for name, flops in whole.items() if name.partition(".")[0] == tower]
            assert sum(part.forward for part in parts) == pytest.approx(
                sum(flops.forward for flops in modules)
            )
            assert sum(part.backward for part in parts) == pytest.approx(
                sum(flops.backward for flops in modules)
            )
        assert again[tower].forward > 1.5 * once[tower].forward


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()])
def test_moments_are_those_of_the_built_model(optimizer: AdamW | Muon) -> None:
    config = with_adapters(("*.connector.mlp.down", "llm.*.attention.*"))
    model = Model.build(config, jnp.bfloat16)
    trainable, still = jax.eval_shape(
        lambda p: split(model, frozenset(model.frozen), p), model.abstract
    )
    assert {x.dtype for x in jax.tree.leaves(still)} == {jnp.dtype(jnp.bfloat16)}
    state = jax.eval_shape(make_optimizer(optimizer, model.axes).init, trainable)
    # Muon has coefficients
    held = sum(x.size for x in jax.tree.leaves(state) if x.ndim and x.shape != (3,))
    assert 4 * held == sum(moment_bytes(config, frozen_modules(config), optimizer).values())


def test_the_first_layer_in_a_scan_with_others_executes_what_they_do() -> None:
    pattern = ("llm.*.down",)
    frozen = frozen_modules(with_adapters(pattern)) | ALL_BUT_LLM

    def backward(layers: int) -> int:
        return executed(with_adapters(pattern, layers=layers), SHAPE, frozen)["llm"].backward

    # Alone, the first layer stops at its last product; the fourth has the cost of the third.
    assert backward(2) - backward(1) > backward(3) - backward(2) == backward(4) - backward(3)
