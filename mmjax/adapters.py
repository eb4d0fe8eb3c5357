"""Which linear layers of a model have low-rank adapters (LoRA, Hu et al. 2021) beside them, from the config alone.

A linear layer is called `llm.layers.*.attention.query`, `vision.layers.*.mlp.up` or `vision.connector.mlp.down`: its
module, its place there, and `*` for the number of a layer, since the layers of a tower have the same adapters.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from mmjax.config import ConnectorConfig, DecoderConfig, LoraConfig, ModelConfig, VisionConfig

Sizes = dict[str, tuple[int, int]]  # (inputs, outputs) by name


def linear_layers(model: ModelConfig) -> Sizes:
    """Every linear layer that may have an adapter: those of the towers' layers and those of connectors.

    Embeddings, output tables, the convolutions at an encoder's start and the mergers of a deepstack are none.
    """
    llm = model.llm
    queries, keys = llm.heads * llm.head_width, llm.kv_heads * llm.head_width
    found = _layer("llm", llm.width, queries, keys, llm.mlp_width, True)
    for name, encoder in model.encoders.items():
        vision = isinstance(encoder, VisionConfig)
        gated = vision and encoder.gated
        found |= _layer(name, encoder.width, encoder.width, encoder.width, encoder.mlp_width, gated)
        found |= _connector(name, encoder.connector, encoder.width, llm.width, 2 if vision else 1)
    return found


def _layer(tower: str, width: int, queries: int, keys: int, mlp: int, gated: bool) -> Sizes:
    attention, hidden = f"{tower}.layers.*.attention", f"{tower}.layers.*.mlp"
    gate = {f"{hidden}.gate": (width, mlp)} if gated else {}
    return {
        f"{attention}.query": (width, queries),
        f"{attention}.key": (width, keys),
        f"{attention}.value": (width, keys),
        f"{attention}.output": (queries, width),
        **gate,
        f"{hidden}.up": (width, mlp),
        f"{hidden}.down": (mlp, width),
    }


def _connector(encoder: str, connector: ConnectorConfig, inputs: int, outputs: int, axes: int) -> Sizes:
    merged, where = connector.merge**axes * inputs, f"{encoder}.connector.mlp"
    if not connector.mlp_width:
        return {f"{encoder}.connector.linear": (merged, outputs)}
    return {f"{where}.up": (merged, connector.mlp_width), f"{where}.down": (connector.mlp_width, outputs)}


def matching(lora: LoraConfig, names: Sizes) -> list[str]:
    """The linear layers that an adapter's patterns match."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in lora.layers)]


def adapted(model: ModelConfig) -> dict[str, LoraConfig]:
    """The adapter of each linear layer that has one, by the layer's name."""
    if not model.lora:
        return {}
    names = linear_layers(model)
    return {name: lora for lora in model.lora.values() for name in matching(lora, names)}


def module_with(name: str) -> str:
    """The module that a linear layer belongs to: "llm", an encoder's name, or "<encoder>.connector"."""
    module, place, *_ = name.split(".")
    return f"{module}.connector" if place == "connector" else module


def adapted_modules(model: ModelConfig) -> list[str]:
    """The modules that have adapters."""
    return list(dict.fromkeys(module_with(name) for name in adapted(model)))


def frozen_by_adapters(model: ModelConfig) -> set[str]:
    """The modules whose own weights are frozen because they have adapters."""
    return {module_with(name) for name, lora in adapted(model).items() if lora.base == "frozen"}


def scale(lora: LoraConfig) -> float:
    """What an adapter's product is multiplied by."""
    return lora.alpha / (lora.rank**0.5 if lora.scaling == "sqrt_rank" else lora.rank)


def adapter_sizes(model: ModelConfig) -> dict[str, int]:
    """Parameters of all adapters of each module that has some, as `<module>.lora`."""
    names, counts = linear_layers(model), dict[str, int]()
    for name, lora in adapted(model).items():
        group = f"{module_with(name)}.lora"
        counts[group] = counts.get(group, 0) + lora.rank * sum(names[name]) * copies(model, name)
    return counts


def copies(model: ModelConfig, name: str) -> int:
    """How many linear layers a name stands for."""
    tower, place, *_ = name.split(".")
    config: DecoderConfig | VisionConfig = model.llm if tower == "llm" else model.encoders[tower]
    return config.layers if place == "layers" else 1
