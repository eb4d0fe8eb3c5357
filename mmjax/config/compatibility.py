"""Features that do not work together: the table that configs are checked by, and that docs/unsupported.md shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from mmjax.config.checks import check
from mmjax.config.losses import CrossEntropy, LossConfig
from mmjax.config.model import ModelConfig, random_settings
from mmjax.config.training import Layout


class Features(NamedTuple):
    """The parts of a config in which conflicts are looked for."""

    model: ModelConfig
    loss: LossConfig = CrossEntropy()
    # by key of a mesh or unit: it, and the towers on it
    layouts: Mapping[str, tuple[Layout, Collection[str]]] = {}


class Conflict(NamedTuple):
    """Two features of which a config may have one."""

    feature: str
    other: str
    remedy: str
    # the error of a config that has both, naming key and remedy; "" where it has not
    find: Callable[[Features], str]


def check_conflicts(features: Features) -> None:
    """Raise UserError for the first conflict, naming key and remedy."""
    for conflict in CONFLICTS:
        message = conflict.find(features)
        check(not message, message)


def _of_answers(setting: Callable[[ModelConfig], str]) -> Callable[[Features], str]:
    """Find a setting of the model beside a loss of several answers."""

    def find(features: Features) -> str:
        found = setting(features.model)
        if not (features.loss.is_branched and found):
            return ""
        return f"loss={features.loss.kind} does not work with {found}; leave it out, or use loss=cross_entropy"

    return find


def _randomness(model: ModelConfig) -> str:
    return next(iter(random_settings(model)), "")


def _llm_layouts(features: Features) -> Iterator[tuple[str, Layout]]:
    return (
        (where, layout) for where, (layout, towers) in features.layouts.items() if "llm" in towers
    )


def _delta_net_beside_spans(features: Features) -> str:
    llm = features.model.llm
    if not llm.reads_in_order or llm.items == "causal":
        return ""
    layers = "a gated delta net" if llm.delta_net else "a convolution"
    return (
        f"model.llm.items={llm.items}: {layers} reads a sample's tokens in order; use "
        "model.llm.items=causal"
    )


def _float8_over_tensor(features: Features) -> str:
    fp8 = features.model.llm.fp8
    messages = (
        f"model.llm.fp8={fp8}: {where}.tensor={layout.tensor} would cut its products; use {where}.tensor=1 and a "
        "larger fsdp"
        for where, layout in _llm_layouts(features)
        if fp8 != "off" and layout.tensor > 1
    )
    return next(messages, "")


def _unet_over_tensor(features: Features) -> str:
    for where, (layout, towers) in features.layouts.items():
        unets = [name for name in towers if not features.model.towers[name].is_stack]
        if (
            layout.encoders == "tensor"
            and layout.tensor > 1
            and unets
            and len(unets) == len(towers)
        ):
            return (
                f"{where}.tensor={layout.tensor}: the blocks of a UNet, model.generators.{unets[0]}, are not cut; use "
                f"{where}.tensor=1 and a larger fsdp"
            )
    return ""


def _adapters_of_unet(features: Features) -> str:
    for name, lora in features.model.lora.items():
        for pattern in lora.layers:
            module = pattern.split(".")[0]
            if not getattr(features.model.towers.get(module), "is_stack", True):
                return (
                    f"model.lora.{name}.layers: {pattern!r}: model.generators.{module} is a UNet, whose blocks take no "
                    "adapters"
                )
    return ""


def _quantized_experts(features: Features) -> str:
    llm = features.model.llm
    if llm.quantize == "none" or llm.experts is None:
        return ""
    return (
        f"model.llm.quantize={llm.quantize}: the matrices of experts (model.llm.experts) are not quantised; use "
        "quantize=none"
    )


_ANSWERS = "losses of several answers (`loss=dpo`, `orpo`, `kto`, `grpo`)"
_CROSS_ENTROPY = "`loss=cross_entropy`"
_DELTA_NET = "a gated delta net (`model.llm.delta_net`) or a convolution (`model.llm.convolution`)"
CONFLICTS = (
    Conflict(
        _ANSWERS,
        "generators",
        _CROSS_ENTROPY,
        _of_answers(lambda model: "model.generators" if model.makes_images else ""),
    ),
    Conflict(
        _ANSWERS,
        "dropout in the LLM, an encoder or adapters, or noise (`model.llm.neftune_alpha`)",
        "none of them",
        _of_answers(_randomness),
    ),
    Conflict(
        _ANSWERS,
        "prompts that attend both ways (`model.llm.items=prefix`)",
        _CROSS_ENTROPY,
        _of_answers(lambda model: "model.llm.items=prefix" if model.llm.items == "prefix" else ""),
    ),
    Conflict(
        _DELTA_NET,
        "items that attend both ways (`model.llm.items`)",
        "`items=causal`",
        _delta_net_beside_spans,
    ),
    Conflict(
        "products in FP8 (`model.llm.fp8`)",
        "`tensor` above 1",
        "a larger `fsdp`",
        _float8_over_tensor,
    ),
    Conflict(
        "quantised frozen weights of the LLM", "experts", "`quantize=none`", _quantized_experts
    ),
    Conflict(
        "a UNet, alone on its devices", "`tensor` above 1", "a larger `fsdp`", _unet_over_tensor
    ),
    Conflict("a UNet", "adapters (`model.lora`)", "training its weights", _adapters_of_unet),
)
