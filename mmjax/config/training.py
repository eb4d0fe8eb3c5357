"""On which devices, by which rule and for how long it trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Exchange = Literal["padded", "ragged"]


@dataclass(frozen=True)
class MeshConfig:
    """How many devices along each axis; -1 takes what the others leave."""

    data: int = -1  # devices with samples of their own and whole parameters
    fsdp: int = 1  # devices with samples of their own and a part of the parameters
    tensor: int = 1  # devices that share the heads and widths of layers
    context: int = 1  # devices that share the tokens of a row
    ranks_per_node: int = 0  # that send encoder outputs to each other; 0 = those of one host
    exchange: Exchange = "padded"  # ragged sends no padding; GPU and TPU only
    encoders: Literal["tensor", "data"] = "tensor"  # the tensor axis cuts their layers too, or spreads their rows
    memory: float = 0.0  # GB of a device that may be used; 0 = what it has
    host_memory: float = 0.0  # GB of its host that a device may offload activations to


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of one module, where they differ from the optimizer's."""

    learning_rate: float | None = None  # none: the optimizer's
    weight_decay: float | None = None  # none: the optimizer's


@dataclass(frozen=True)
class AdamW:
    """AdamW on every parameter."""

    learning_rate: float = 1e-3  # at its peak
    weight_decay: float = 0.01  # per unit of the learning rate
    b1: float = 0.9  # decay of the mean of gradients
    b2: float = 0.95  # decay of the mean of their squares
    eps: float = 1e-8  # added to the root of the squares
    modules: dict[str, Rates] = field(default_factory=dict)  # by module: llm, vision.connector, llm.lora, ...
    kind: Literal["adamw"] = "adamw"


@dataclass(frozen=True)
class Muon:
    """Muon on the matrices of the layers and connectors, AdamW on the rest."""

    learning_rate: float = 0.02  # of the matrices
    weight_decay: float = 0.01  # per unit of the learning rate
    adam_learning_rate: float = 3e-3  # of the rest: embeddings, norms, biases
    momentum: float = 0.95  # of the matrices
    b1: float = 0.9  # of AdamW: decay of the mean of gradients
    b2: float = 0.98  # of AdamW: decay of the mean of their squares
    eps: float = 1e-8  # of AdamW: added to the root of the squares
    modules: dict[str, Rates] = field(default_factory=dict)  # by module: llm, vision.connector, llm.lora, ...
    kind: Literal["muon"] = "muon"


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine down to `final` of the peak at the last step."""

    warmup: int = 50  # steps
    final: float = 0.02  # share of the peak at the last step


@dataclass(frozen=True)
class WatchConfig:
    """When a process that does not get on counts as stuck: it writes where it stands, and ends with exit code 3."""

    seconds: float = 300.0  # that any step may take; 0 = no step is ever too long
    times: float = 20.0  # as many times the median of the last steps it may take, where that is more
    others: float = 3600.0  # seconds that opening, compiling, evaluating or saving may stand still; 0 = for ever


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, in what precision, and how often to look and to save."""

    steps: int = 0  # optimizer updates; give these or epochs
    epochs: float = 0.0  # times that as many samples are trained on as all sources have
    precision: Literal["float32", "bfloat16"] = "float32"  # of the computation; master weights are float32
    clip: float = 1.0  # global gradient norm
    loss_chunks: int = 0  # parts of the vocabulary whose logits are made one after the other; 0 = as memory needs
    evaluate_every: int = 0  # steps; 0 = only at the end
    evaluate_samples: int = 64  # of the validation split, while training
    checkpoint_every: int = 0  # steps; 0 = only at the end
    keep: int = 2  # checkpoints, the newest
    keep_every: int = 0  # and those after a multiple of so many steps; 0 = none
    keep_best: str = ""  # metric of an evaluation, such as validation/loss, whose best checkpoint is kept too
    patience: int = 0  # evaluations without a better keep_best after which training stops; 0 = never
    bad_numbers: Literal["stop", "skip"] = "stop"  # what a step does whose loss or gradient is NaN or Inf
    spike: float = 10.0  # a gradient norm of so many times the usual is told, with the worst samples; 0 = never
    wandb: str = ""  # a project of Weights & Biases to send the metrics to; needs the extra `wandb`
    watch: WatchConfig = field(default_factory=WatchConfig)
