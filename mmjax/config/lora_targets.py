"""Resolve which linear layers of a model have low-rank adapters (LoRA, Hu et al. 2021), from the config alone.

A linear layer is named like `llm.layers.*.attention.query`, `vision.layers.*.mlp.up` or `vision.connector.mlp.down`: by
its module and its path there, with `*` for the layer number, since all layers of a module have the same adapters.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from mmjax.config import LoraConfig, ModelConfig, VisionConfig

Sizes = dict[str, tuple[int, int]]  # (inputs, outputs) by name


def linear_layers(model: ModelConfig) -> Sizes:
    """List the linear layers that may have an adapter: those of the transformer layers and of the connectors.

    Embeddings, output tables, an encoder's first convolutions and the mergers of a deepstack may not.
    """
    llm = model.llm
    query_width = llm.heads * llm.head_width
    key_width = llm.kv_heads * llm.head_width
    sizes = _layer_sizes("llm", llm.width, query_width, key_width, llm.mlp_width, gated=True)
    for name, encoder in model.encoders.items():
        width = encoder.width
        vision = isinstance(encoder, VisionConfig)
        sizes |= _layer_sizes(name, width, width, width, encoder.mlp_width, gated=vision and encoder.gated)
        # A connector merges `merge` neighbours along both axes of an image, or along a clip's one.
        merged = encoder.connector.merge ** (2 if vision else 1) * width
        if hidden := encoder.connector.mlp_width:
            sizes |= {f"{name}.connector.mlp.up": (merged, hidden), f"{name}.connector.mlp.down": (hidden, llm.width)}
        else:
            sizes[f"{name}.connector.linear"] = (merged, llm.width)
    return sizes


def _layer_sizes(module: str, width: int, query_width: int, key_width: int, mlp_width: int, gated: bool) -> Sizes:
    attention = f"{module}.layers.*.attention"
    mlp = f"{module}.layers.*.mlp"
    gate = {f"{mlp}.gate": (width, mlp_width)} if gated else {}
    return {
        f"{attention}.query": (width, query_width),
        f"{attention}.key": (width, key_width),
        f"{attention}.value": (width, key_width),
        f"{attention}.output": (query_width, width),
        **gate,
        f"{mlp}.up": (width, mlp_width),
        f"{mlp}.down": (mlp_width, width),
    }


def matching_layers(lora: LoraConfig, names: Sizes) -> list[str]:
    """List the linear layers that an adapter's patterns match."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in lora.layers)]


def adapters_by_layer(model: ModelConfig) -> dict[str, LoraConfig]:
    """Map each linear layer that has an adapter to the adapter's config."""
    if not model.lora:
        return {}
    names = linear_layers(model)
    return {name: lora for lora in model.lora.values() for name in matching_layers(lora, names)}


def module_of_layer(name: str) -> str:
    """Name the module that a linear layer belongs to: "llm", an encoder, or "<encoder>.connector"."""
    # "vision.connector.mlp.up" is of "vision.connector", "vision.layers.*.mlp.up" of "vision".
    module, place, *_ = name.split(".")
    return f"{module}.connector" if place == "connector" else module


def adapted_modules(model: ModelConfig) -> list[str]:
    """List the modules that have adapters."""
    return list(dict.fromkeys(module_of_layer(name) for name in adapters_by_layer(model)))


def frozen_by_adapters(model: ModelConfig) -> set[str]:
    """List the modules whose base weights are frozen because they have adapters."""
    return {module_of_layer(name) for name, lora in adapters_by_layer(model).items() if lora.base == "frozen"}


def lora_scale(lora: LoraConfig) -> float:
    """Compute the factor of an adapter's output: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
    return lora.alpha / (lora.rank**0.5 if lora.scaling == "sqrt_rank" else lora.rank)


def adapter_parameters(model: ModelConfig) -> dict[str, int]:
    """Count the parameters of each module's adapters, by `<module>.lora`."""
    names = linear_layers(model)
    counts: dict[str, int] = {}
    for name, lora in adapters_by_layer(model).items():
        group = f"{module_of_layer(name)}.lora"
        counts[group] = counts.get(group, 0) + lora.rank * sum(names[name]) * layer_count(model, name)
    return counts


def layer_count(model: ModelConfig, name: str) -> int:
    """Count the linear layers that a name stands for: one for each layer of its module."""
    module, place, *_ = name.split(".")
    config = model.llm if module == "llm" else model.encoders[module]
    return config.layers if place == "layers" else 1
