"""Config of a model: the LLM, its encoders, generators, connectors and adapters (LoRA).

A linear layer is named like `llm.layers.*.attention.query`, `vision.layers.*.mlp.up` or
`vision.connector.mlp.down`: by its module and its path there, with `*` for the layer number, since
all layers of a module have the same adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from mmjax.config.checks import check
from mmjax.config.codec import did_you_mean
from mmjax.config.decoder import DecoderConfig
from mmjax.config.encoders import AudioConfig, Encoder, VisionConfig
from mmjax.config.generators import (
    DiffusionTransformerConfig,
    Generator,
    Tower,
    UnetConfig,
    VaeConfig,
)
from mmjax.config.ranges import PositiveFloat, PositiveInt
from mmjax.config.towers import ConnectorConfig, Dropout, Quantization
from mmjax.errors import UserError


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: matrices a and b beside linear layers, which add `scale * (x @ a) @ b`; b is initialised to 0."""

    # patterns of names, `*` for anything: llm.*, *.attention.query, vision.connector.mlp.up
    layers: tuple[str, ...]
    rank: PositiveInt = 16  # columns of a, rows of b
    alpha: PositiveFloat = 32.0  # numerator of the scale
    # scale = alpha / rank, or alpha / sqrt(rank) (rsLoRA)
    scaling: Literal["rank", "sqrt_rank"] = "rank"
    base: Literal["frozen", "trained"] = "frozen"  # the base weights of a module that has adapters
    # DoRA: the lengths of the columns of a weight are trained, and the adapter turns them alone
    dora: bool = False
    dropout: Dropout = 0.0  # rate, in training, for the inputs of the adapters alone

    def check(self, where: str) -> None:
        check(
            not self.dora or self.base == "frozen",
            f"{where}.dora=true: lengths are beside those of frozen weights; use {where}.base=frozen",
        )
        check(
            not self.dora or not self.dropout,
            f"{where}.dropout={self.dropout}: dora=true turns what the weights themselves give; leave one of them out",
        )


@dataclass(frozen=True)
class ModelConfig:
    """An LLM, the encoders that feed it and the generators that make images of its hidden states, by name."""

    llm: DecoderConfig
    # by a name of your own
    encoders: dict[str, VisionConfig | AudioConfig] = field(default_factory=dict)
    lora: dict[str, LoraConfig] = field(default_factory=dict)  # by a name of your own
    # by a name of your own
    generators: dict[str, DiffusionTransformerConfig | UnetConfig] = field(default_factory=dict)

    @property
    def towers(self) -> dict[str, Tower]:
        """Return the LLM, the encoders and the generators."""
        return {"llm": self.llm, **self.encoders, **self.generators}

    def towers_behind(self, name: str) -> tuple[str, ...]:
        """Name the towers that take a tower's outputs: the LLM behind encoders, generators behind the LLM."""
        if name == "llm":
            return tuple(self.generators)
        return () if name in self.generators else ("llm",)

    @property
    def makes_images(self) -> bool:
        """Return whether there are generators, for which the LLM's end waits."""
        return bool(self.generators)

    @property
    def item_modules(self) -> dict[str, Encoder | Generator]:
        """Return the modules whose rows hold items: the encoders, then the generators."""
        return {**self.encoders, **self.generators}

    def check(self, where: str) -> None:
        for name in self.item_modules:
            kind, article = ("encoder", "an") if name in self.encoders else ("generator", "a")
            key = f"{where}.{kind}s.{name}"
            check(
                name != "llm",
                f"{key}: 'llm' is the decoder's name; call this {kind} something else",
            )
            check(
                name.isidentifier(),
                f"{key}: {article} {kind}'s name must be a plain word: letters, digits and '_'",
            )
        for name in self.generators:
            check(
                name not in self.encoders,
                f"{where}.generators.{name}: an encoder has this name; call this generator something else",
            )
        clips = [
            name
            for name, c in self.encoders.items()
            if c.modality == "audio" and c.clips.shown == "all"
        ]
        has_time = bool(self.llm.rope_sections)
        for name, encoder in self.encoders.items():
            if encoder.modality == "image":
                videos = f"{where}.encoders.{name}.videos"
                encoder.videos.check_sound(videos, encoder.frames, clips, has_time)
                check(
                    not (encoder.takes_videos and self.llm.canvas_markers),
                    f"{videos}: model.llm.canvas_markers has places for images alone; leave videos out",
                )
        check(
            bool(self.lora) or not set(module_names(self)) <= frozen_modules(self),
            f"{where}: every module is frozen; set frozen=false on one, such as {where}.llm",
        )
        _check_adapters(f"{where}.lora", self)
        for name in encoded_once(self):
            check(
                name not in adapted_modules(self),
                f"{where}.encoders.{name}.encode=once: its adapters (model.lora) are trained, and change its outputs; "
                "leave them out, or use encode=step",
            )
        _check_quantized(where, self)


def _check_adapters(where: str, model: ModelConfig) -> None:
    """Check that patterns match linear layers, each of which has one adapter of a rank that it can have."""
    sizes = linear_layers(model)
    adapter_of: dict[str, str] = {}
    for name, lora in model.lora.items():
        check(
            bool(lora.layers),
            f"{where}.{name}.layers is empty; give patterns of linear layers, such as {next(iter(sizes))}",
        )
        for pattern in lora.layers:
            check(
                bool(matching_layers(replace(lora, layers=(pattern,)), sizes)),
                f"{where}.{name}.layers: {pattern!r} matches no linear layer (all layers of a tower have the same "
                f"adapters: write * for their number){did_you_mean(pattern, sizes)}",
            )
        for layer in matching_layers(lora, sizes):
            first = adapter_of.setdefault(layer, name)
            check(
                first == name,
                f"{where}.{name}.layers: {layer} has {where}.{first} already; keep one",
            )
            of_tokens = module_of_layer(layer) in {"llm", *model.encoders}
            of_tokens &= not layer.endswith(DISTANCE_KEY)
            check(
                of_tokens or not lora.dropout,
                f"{where}.{name}.dropout={lora.dropout}: it is for layers of the LLM and of encoders that read tokens; "
                f"give the adapters of {layer} an entry of their own, with dropout=0",
            )
            limit = min(sizes[layer])
            check(
                lora.rank <= limit,
                f"{where}.{name}.rank={lora.rank}: {layer} has only {limit} channels; choose at most that",
            )


def _check_quantized(where: str, model: ModelConfig) -> None:
    """Check that quantised weights are frozen, and divide into blocks that share a scale."""
    adapted = frozen_by_adapters(model)
    for name, tower in {"llm": model.llm, **model.encoders}.items():
        key = f"{where}.llm" if name == "llm" else f"{where}.encoders.{name}"
        check(
            tower.quantize == "none" or tower.frozen or name in adapted,
            f"{key}.quantize={tower.quantize}: quantised weights are not trained; set {key}.frozen=true, or give "
            "it adapters whose base is frozen (model.lora)",
        )
    sizes = linear_layers(model)
    for layer, how in quantized_layers(model).items():
        inputs, _ = sizes[layer]
        check(
            how != "nf4" or inputs % NF4_BLOCK == 0,
            f"quantize=nf4: {layer} has {inputs} inputs, and {NF4_BLOCK} share a scale; use quantize=int8",
        )


def encoded_once(model: ModelConfig) -> dict[str, Encoder]:
    """Return the encoders that encode each item once, by name."""
    return {name: c for name, c in model.encoders.items() if c.encode == "once"}


def step_vaes(model: ModelConfig) -> dict[str, VaeConfig]:
    """Return the VAEs that encode images to be made in every step, by their generator; each is always frozen."""
    return {name: vae for name, c in model.generators.items() if (vae := c.step_vae)}


def random_settings(model: ModelConfig) -> list[str]:
    """List the keys of what training draws at random in the LLM and the encoders: dropout, and noise of embeddings."""
    parts = {"llm": model.llm} | {f"encoders.{name}": c for name, c in model.encoders.items()}
    parts |= {f"lora.{name}": lora for name, lora in model.lora.items()}
    keys = [f"model.{name}.dropout" for name, part in parts.items() if part.dropout]
    return [*keys, *(["model.llm.neftune_alpha"] if model.llm.neftune_alpha else [])]


def dropping_towers(model: ModelConfig) -> frozenset[str]:
    """Name the LLM and the encoders that drop activations in training, or whose adapters drop inputs."""
    adapted = {module_of_layer(name) for name, c in adapters_by_layer(model).items() if c.dropout}
    towers = {"llm": model.llm, **model.encoders}
    return frozenset(name for name, c in towers.items() if c.dropout or name in adapted)


def tower_key(model: ModelConfig, name: str) -> str:
    """Return the key of a tower in a config: "model.llm", "model.encoders.vision" or "model.generators.picture"."""
    if name == "llm":
        return "model.llm"
    return f"model.{'generators' if model.towers[name].is_generator else 'encoders'}.{name}"


def stacked_towers(model: ModelConfig) -> dict[str, Tower]:
    """Return the towers that are stacks of layers, by name: "llm", encoders, diffusion transformers."""
    return {name: tower for name, tower in model.towers.items() if tower.is_stack}


def with_changes(model: ModelConfig, towers: Mapping[str, Mapping[str, Any]]) -> ModelConfig:
    """Return the model with these changes to the configs of the LLM, its encoders and generators, by name."""
    changed = {
        name: replace(config, **towers.get(name, {})) for name, config in model.towers.items()
    }
    encoders = {name: changed[name] for name in model.encoders}
    generators = {name: changed[name] for name in model.generators}
    return replace(model, llm=changed["llm"], encoders=encoders, generators=generators)


def with_one_item_module(
    llm: DecoderConfig, name: str, module: Encoder | Generator, lora: Mapping[str, LoraConfig]
) -> ModelConfig:
    """Return the model of an LLM and one encoder or generator."""
    kind = "generators" if module.is_generator else "encoders"
    return ModelConfig(llm=llm, lora=lora, **{kind: {name: module}})


# of frozen training, by what is trained (MMScale, 7.3.1)
SETTINGS = ("projectors", "encoder", "llm", "generator")


def train_only(model: ModelConfig, trained: str) -> ModelConfig:
    """Freeze all but connectors, queries and one kind of module, which `trained` names; "projectors": no other.

    Raises UserError for a name that is not in SETTINGS.
    """
    if trained not in SETTINGS:
        raise UserError(f"trained={trained}: choose one of {', '.join(SETTINGS)}")
    return replace(
        model,
        llm=replace(model.llm, frozen=trained != "llm"),
        encoders={
            name: replace(c, frozen=trained != "encoder") for name, c in model.encoders.items()
        },
        generators={
            name: replace(c, frozen=trained != "generator") for name, c in model.generators.items()
        },
    )


Sizes = dict[str, tuple[int, int]]  # (inputs, outputs) by name
DISTANCE_KEY = "distance_key"  # of a conformer's attention, which reads a table of distances


def linear_layers(model: ModelConfig) -> Sizes:
    """List the linear layers that may have an adapter: those of the transformer layers and of the connectors.

    Embeddings, output tables, an encoder's first convolutions, the mergers of a deepstack, the
    experts that a router chooses, connectors of generators and UNets may not.
    """
    llm = model.llm
    # Of layers that differ, those with a window.
    query_width = llm.heads * llm.head_width
    key_width = llm.kv_heads * llm.head_width
    sizes = _layer_sizes("llm", llm.width, query_width, key_width, llm.mlp_width, gated=llm.gated)
    if c := llm.latent:
        sizes = {name: size for name, size in sizes.items() if ".attention." not in name}
        rotary = 2 * llm.rotary_pairs
        of_heads = llm.head_width - rotary + c.value_width
        attention = {
            "query": (c.query_rank or llm.width, query_width),
            "latent": (llm.width, c.key_rank + rotary),
            "key_value": (c.key_rank, llm.heads * of_heads),
            "output": (llm.heads * c.value_width, llm.width),
        }
        attention |= {"query_down": (llm.width, c.query_rank)} if c.query_rank else {}
        sizes |= {f"llm.layers.*.attention.{name}": size for name, size in attention.items()}
    if llm.separate_gate:
        sizes["llm.layers.*.attention.gate"] = (llm.width, query_width)
    elif llm.attention_gate:
        sizes["llm.layers.*.attention.query"] = (llm.width, 2 * query_width)
    if llm.attention_layers == 0:
        sizes = {name: size for name, size in sizes.items() if ".attention." not in name}
    if all(llm.expert_layers) and not llm.experts.beside_mlp:
        sizes = {name: size for name, size in sizes.items() if ".mlp." not in name}
    if llm.experts and (hidden := llm.experts.shared_width):
        shared = {
            "gate": (llm.width, hidden),
            "up": (llm.width, hidden),
            "down": (hidden, llm.width),
        }
        sizes |= {f"llm.layers.*.experts.shared.{name}": size for name, size in shared.items()}
    if c := llm.token_inputs:
        sizes["llm.layers.*.token_input.gate"] = (llm.width, c.width)
        sizes["llm.layers.*.token_input.projection"] = (c.width, llm.width)
    if c := llm.delta_net:
        keys = c.key_heads * c.key_width
        values = c.value_heads * c.value_width
        outputs = {"query": keys, "key": keys, "value": values, "gate": values}
        outputs |= {"beta": c.value_heads, "decay": c.value_heads}
        sizes |= {
            f"llm.layers.*.delta_net.{name}": (llm.width, count) for name, count in outputs.items()
        }
        sizes["llm.layers.*.delta_net.output"] = (values, llm.width)
    if llm.convolution:
        parts = ("gate", "output_gate", "value", "output")
        sizes |= {f"llm.layers.*.convolution.{name}": (llm.width, llm.width) for name in parts}
    for name, encoder in model.encoders.items():
        width = encoder.width
        keys = encoder.key_heads * encoder.head_width
        if encoder.attends:
            sizes |= (
                _conformer_sizes(name, width, encoder.mlp_width)
                if encoder.conformer
                else _layer_sizes(name, width, width, keys, encoder.mlp_width, gated=encoder.gated)
            )
        connector = connector_sizes(encoder.connector, merged_width(encoder), llm.width)
        sizes |= {f"{name}.connector.{layer}": size for layer, size in connector.items()}
    for name, generator in model.generators.items():
        if generator.is_stack:
            width = generator.width
            tokens = width if generator.condition_mlp else generator.condition_width
            inputs = {"query": width, "key": tokens, "value": tokens, "output": width}
            sizes |= _layer_sizes(name, width, width, width, generator.mlp_width, gated=False)
            sizes |= {
                f"{name}.layers.*.cross_attention.{layer}": (n, width)
                for layer, n in inputs.items()
            }
    return sizes


def connector_sizes(connector: ConnectorConfig, merged: int, outputs: int) -> Sizes:
    """List the linear layers of a connector in the order of the computation. merged: features that it reads."""
    c = connector
    sizes = {"merger": (merged, c.merger_width)} if c.merger_width else {}
    inputs = c.merger_width or merged
    made = c.output_width or outputs
    last = {"output": (made, outputs)} if c.output_width else {}
    sizes |= {"projection": (inputs, inputs)} if c.projection else {}
    if not c.mlp_width:
        return sizes | {"linear": (inputs, made)} | last
    gate = {"mlp.gate": (inputs, c.mlp_width)} if c.gated else {}
    mlp = {"mlp.up": (inputs, c.mlp_width), "mlp.down": (c.mlp_width, made)}
    return sizes | gate | mlp | last


def merged_width(encoder: Encoder) -> int:
    """Return the features of a token that a connector has merged, before its MLP."""
    # Neighbours are merged along both axes of an image, or along a clip's one.
    concatenates = encoder.connector.merging != "mean"
    return encoder.feature_width * (encoder.merged_positions if concatenates else 1)


def _layer_sizes(
    module: str, width: int, query_width: int, key_width: int, mlp_width: int, gated: bool
) -> Sizes:
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


def _conformer_sizes(module: str, width: int, mlp_width: int) -> Sizes:
    attention = ("query", "key", "value", DISTANCE_KEY, "output")
    mlp = {"mlp.up": (width, mlp_width), "mlp.down": (mlp_width, width)}
    parts = {f"first.{name}": size for name, size in mlp.items()}
    parts |= {f"attention.{name}": (width, width) for name in attention}
    parts |= {"convolution.input": (width, 2 * width), "convolution.output": (width, width)}
    parts |= {f"second.{name}": size for name, size in mlp.items()}
    return {f"{module}.layers.*.{name}": size for name, size in parts.items()}


def matching_layers(lora: LoraConfig, names: Sizes) -> list[str]:
    """List the linear layers that an adapter's patterns match."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in lora.layers)]


def module_names(model: ModelConfig) -> list[str]:
    """List the modules: "llm", and every encoder and generator with its connector."""
    return [
        "llm",
        *(module for name in model.item_modules for module in (name, f"{name}.connector")),
    ]


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


def rated_modules(model: ModelConfig) -> list[str]:
    """List what may have a learning rate of its own: all modules, then `<module>.lora` of adapters."""
    return [*module_names(model), *(f"{module}.lora" for module in adapted_modules(model))]


def frozen_by_adapters(model: ModelConfig) -> set[str]:
    """List the modules whose base weights are frozen because they have adapters."""
    return {
        module_of_layer(name)
        for name, lora in adapters_by_layer(model).items()
        if lora.base == "frozen"
    }


def frozen_modules(model: ModelConfig) -> frozenset[str]:
    """Name the modules that the config freezes; their adapters are trained all the same."""
    parts = {"llm": model.llm.frozen}
    for name, tower in (*model.encoders.items(), *model.generators.items()):
        parts |= {name: tower.frozen, f"{name}.connector": tower.connector.frozen}
    parts |= {f"{name}.vae": True for name in step_vaes(model)}
    return frozenset(module for module, frozen in parts.items() if frozen) | frozen_by_adapters(
        model
    )


NF4_BLOCK = 64  # inputs that share a scale


def quantized_layers(model: ModelConfig) -> dict[str, Quantization]:
    """Map each linear layer whose weight is quantised to how it is: those of the layers of towers that say so."""
    towers = {"llm": model.llm, **model.encoders}
    how = {name: tower.quantize for name, tower in towers.items() if tower.quantize != "none"}
    if not how:
        return {}
    split = {layer: layer.split(".")[:2] for layer in linear_layers(model)}
    return {
        layer: how[tower]
        for layer, (tower, place) in split.items()
        if tower in how and place == "layers"
    }


def float8_linears(model: ModelConfig) -> tuple[str, ...]:
    """List the linear layers of the LLM whose products run in FP8 in the layers that have it.

    Delta nets' rates of decay and of writing, a number a head, do not.
    """
    if not any(model.llm.float8_layers):
        return ()
    names = [name for name in linear_layers(model) if name.startswith("llm.layers.")]
    return tuple(
        name for name in names if not name.endswith((".delta_net.beta", ".delta_net.decay"))
    )


def lora_scale(lora: LoraConfig) -> float:
    """Compute the factor of an adapter's output: alpha / rank, or alpha / sqrt(rank) (rsLoRA)."""
    return lora.alpha / (lora.rank**0.5 if lora.scaling == "sqrt_rank" else lora.rank)


def layer_count(model: ModelConfig, name: str) -> int:
    """Count the linear layers that a name stands for: one for each layer of its module that has it."""
    module, place, *path = name.split(".")
    if place != "layers":
        return 1
    if module != "llm":
        return model.towers[module].layers
    llm = model.llm
    layers = llm.layers
    sparse = sum(llm.expert_layers)
    own = [kind for kind in llm.layer_kinds if not kind.shares_keys]
    without_values = sum(llm.keys_as_values and kind.is_full for kind in own)
    shared = layers - len(own)
    absent = {"key": shared, "value": shared + without_values}
    return {
        "delta_net": sum(llm.delta_layers),
        "convolution": sum(llm.convolution_layers),
        "attention": llm.attention_layers - absent.get(path[-1], 0),
        "experts": sparse,
        "mlp": layers if sparse and llm.experts.beside_mlp else layers - sparse,
        "token_input": layers,
    }[path[1]]
