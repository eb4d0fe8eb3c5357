"""Configs of training: length, precision, optimizer, schedule, mesh and watchdog."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from mmjax.config.checks import check
from mmjax.config.ranges import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    above_zero,
    at_least,
    at_most,
)

Exchange = Literal["padded", "ragged"]
ContextAttention = Literal["auto", "gather", "heads"]
SequenceParallel = Literal["auto", "off", "on", "overlap"]
AXES = ("data", "fsdp", "expert", "context", "tensor")
MAX_WAIT = 1e9  # seconds; operating systems refuse to wait much longer


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a mesh's axes, and what lies on them: of the one mesh, or of each stage of a unit."""

    data: int = 1  # replicas of the parameters, each with samples of its own
    fsdp: int = 1  # shards of the parameters, each with samples of its own
    # devices that share the experts of a layer and other parameters, each with samples of its own
    expert: int = 1
    # devices that share the tokens of a row of the LLM; items of encoders are whole
    context: int = 1
    tensor: int = 1  # devices that share the heads and widths of layers
    # Whether tensor-parallel devices divide the tokens between layers; overlap: and exchange them
    # behind products.
    sequence_parallel: SequenceParallel = "auto"
    # Keys and values are gathered piece by piece, or heads exchanged for tokens; auto: what sends
    # fewer bytes, in units what the mesh has.
    context_attention: ContextAttention = "auto"
    exchange: Exchange = "padded"  # ragged sends no padding; GPU and TPU only
    # the tensor axis shards their layers too, or splits their rows
    encoders: Literal["tensor", "data"] = "tensor"

    @property
    def ranks(self) -> int:
        """Count the ranks over which the rows of the LLM lie."""
        return self.data * self.fsdp * self.expert

    @property
    def encoder_ranks(self) -> int:
        """Count the ranks over which the rows of encoders lie."""
        return self.ranks * self.context * (self.tensor if self.encoders == "data" else 1)


@dataclass(frozen=True)
class MeshConfig(Layout):
    """Number of devices along each axis; -1: all that the other axes leave."""

    data: int = -1  # replicas of the parameters, each with samples of its own
    _: KW_ONLY
    ranks_per_node: int = 0  # ranks that exchange encoder outputs; 0: those of a host
    memory: NonNegativeFloat = 0.0  # GB of a device that may be used; 0: all that it has
    host_memory: NonNegativeFloat = 0.0  # GB of host memory per device for offloaded activations


def context_form(
    form: ContextAttention, heads: tuple[int, int], context: int, tensor: int
) -> ContextAttention:
    """Choose how queries meet the keys of other devices, gather or heads. heads: of queries, and of keys, in all."""
    # Of queries, keys, values and outputs a device sends its part; keys and values alone, it gets
    # from all others.
    fewer_bytes = heads[0] + heads[1] < heads[1] * context
    divide = not any(count % (context * tensor) for count in heads)
    return form if form != "auto" else "heads" if divide and fewer_bytes else "gather"


@dataclass(frozen=True)
class Unit(Layout):
    """Devices of their own for some modules: data x fsdp x expert x context x tensor x pipeline of them."""

    # llm and encoders, connectors with their encoder; empty: the one of the unit's name
    modules: tuple[str, ...] = ()
    _: KW_ONLY
    pipeline: PositiveInt = 1  # stages, one after the other, each with as many devices
    # Parts of the layers that each stage's devices have; more than 1 is for schedule=interleaved,
    # or with `beside`.
    virtual: PositiveInt = 1
    # Layers before which stages begin, as "vision.16"; numbers: of the LLM, or the one module.
    # Empty: balanced.
    cuts: tuple[int | str, ...] = ()
    # The LLM's unit: encoders have a copy on the devices of each of its stages, which takes
    # microbatches in turn.
    beside: str = ""

    def check(self, where: str) -> None:
        for axis in AXES:
            at_least(1).check(f"{where}.{axis}", getattr(self, axis))


def unit_modules(name: str, unit: Unit) -> tuple[str, ...]:
    """Name the towers of a unit."""
    return unit.modules or (name,)


def unit_devices(unit: Unit) -> int:
    """Count a unit's own devices."""
    return 0 if unit.beside else unit.ranks * unit.context * unit.tensor * unit.pipeline


def unit_layout(unit: Unit, mesh: MeshConfig) -> Unit:
    """Return a unit with the mesh's form of attention over `context` where it has none of its own."""
    if unit.context_attention != "auto":
        return unit
    return replace(unit, context_attention=mesh.context_attention)


Carrier = Literal["auto", "sockets", "device", "collective"]


@dataclass(frozen=True)
class PipelineConfig:
    """Order of forward and backward passes, where modules have units."""

    # auto: nested where a unit is beside another, interleaved where one has virtual stages, else
    # 1f1b. eager: twice as many microbatches ahead as 1f1b.
    schedule: Literal["auto", "1f1b", "eager", "gpipe", "interleaved", "nested"] = "auto"
    # Forward and backward time of every stage, by which a nested schedule is made. Empty: of FLOPs.
    stage_times: tuple[int, ...] = ()
    # Order a step's microbatches, where they differ in shape, so that stages are simulated to wait
    # least.
    reorder: bool = True
    # Between processes. auto: sockets between CPUs, else device, the runtime's own transfers;
    # collective: ppermute.
    carrier: Carrier = "auto"


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of a module, or of parameters by name, where they differ from the optimizer's."""

    learning_rate: NonNegativeFloat | None = None  # none: the optimizer's
    weight_decay: NonNegativeFloat | None = None  # none: the optimizer's
    # factor of the learning rate from a layer to the one before; embeddings count as a layer
    layer_decay: Annotated[float, above_zero(), at_most(1, "choose more than 0 and at most 1")] = (
        1.0
    )
    b_ratio: PositiveFloat = 1.0  # learning rate of adapters' b, as a multiple of a's (LoRA+)
    frozen_until: NonNegativeInt = 0  # number of first steps that leave these parameters unchanged
    # number of steps after which they do not change any more; 0: none
    frozen_from: NonNegativeInt = 0
    # Patterns of parameters, `*` for anything: *.norm*, llm.layers.*.attention.*. Where there are
    # any, the rates are of these, under a name of your own.
    parameters: tuple[str, ...] = ()

    @property
    def is_scheduled(self) -> bool:
        """Return whether steps, and not the model alone, decide if the parameters are frozen."""
        return self.frozen_until > 0 or self.frozen_from > 0

    def trains(self, step: int) -> bool:
        """Return whether update `step`, counted from 0, may change the parameters."""
        return self.frozen_until <= step < (self.frozen_from or math.inf)


def rates_of(modules: Mapping[str, Rates], group: str) -> Rates:
    """Return the rates of a module or of named parameters; adapters without any have their module's."""
    return modules.get(group) or modules.get(group.removesuffix(".lora")) or Rates()


# Of the optimizer's moments of matrices between updates; those of vectors are float32. Below 4
# bytes they are rounded at random, without bias.
Moments = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class AdamW:
    """AdamW on every parameter."""

    has_muon: ClassVar[bool] = False  # for matrices
    moments_per_parameter: ClassVar[int] = 2

    learning_rate: NonNegativeFloat = 1e-3  # at its peak
    weight_decay: NonNegativeFloat = 0.01  # multiplied by the learning rate
    b1: Fraction = 0.9  # decay of the mean of gradients
    b2: Fraction = 0.95  # decay of the mean of their squares
    eps: PositiveFloat = 1e-8  # added to the root of the squares
    moments: Moments = "float32"  # 4, 2 or 1 bytes for each of a matrix's two moments
    offload: bool = False  # keep moments in host memory between updates
    over_data: bool = False  # divide moments over `mesh.data` too (ZeRO-1)
    ema: Fraction = 0.0  # decay of a moving average of the parameters; 0: none is kept
    # by module: llm, vision.connector, llm.lora, ...; or by a name of your own, with `parameters`
    modules: dict[str, Rates] = field(default_factory=dict)
    kind: Literal["adamw"] = "adamw"


@dataclass(frozen=True)
class Muon:
    """Muon on the matrices of the layers and connectors, AdamW on the rest."""

    has_muon: ClassVar[bool] = True
    moments_per_parameter: ClassVar[int] = 2  # one of the matrices

    learning_rate: NonNegativeFloat = 0.02  # of the matrices
    weight_decay: NonNegativeFloat = 0.01  # multiplied by the learning rate
    adam_learning_rate: NonNegativeFloat = 3e-3  # of the rest: embeddings, norms, biases
    momentum: Fraction = 0.95  # of the matrices
    b1: Fraction = 0.9  # of AdamW: decay of the mean of gradients
    b2: Fraction = 0.98  # of AdamW: decay of the mean of their squares
    eps: PositiveFloat = 1e-8  # of AdamW: added to the root of the squares
    # 4, 2 or 1 bytes for the momentum, and for each of AdamW's two moments
    moments: Moments = "float32"
    offload: bool = False  # keep moments in host memory between updates
    over_data: bool = False  # divide moments over `mesh.data` too (ZeRO-1)
    ema: Fraction = 0.0  # decay of a moving average of the parameters; 0: none is kept
    # by module: llm, vision.connector, llm.lora, ...; or by a name of your own, with `parameters`
    modules: dict[str, Rates] = field(default_factory=dict)
    kind: Literal["muon"] = "muon"


@dataclass(frozen=True)
class Adafactor:
    """Adafactor without relative steps: mean squares by row and column of a matrix, with momentum."""

    has_muon: ClassVar[bool] = False

    learning_rate: NonNegativeFloat = 1e-3  # at its peak
    weight_decay: NonNegativeFloat = 0.01  # multiplied by the learning rate
    b1: Fraction = 0.9  # decay of the mean of directions; 0: no momentum, and none is stored
    b2: Fraction = 0.95  # that the decay of the mean of squares rises to
    clip: PositiveFloat = 1.0  # RMS of a parameter's direction
    moments: Moments = "bfloat16"  # 4, 2 or 1 bytes for the momentum
    offload: bool = False  # keep the momentum in host memory between updates
    over_data: bool = False  # divide the momentum over `mesh.data` too (ZeRO-1)
    ema: Fraction = 0.0  # decay of a moving average of the parameters; 0: none is kept
    # by module: llm, vision.connector, llm.lora, ...; or by a name of your own, with `parameters`
    modules: dict[str, Rates] = field(default_factory=dict)
    kind: Literal["adafactor"] = "adafactor"

    @property
    def moments_per_parameter(self) -> int:
        """Return how many moments a parameter has, factors of rows and columns aside."""
        return int(self.b1 > 0)


OptimizerConfig = AdamW | Muon | Adafactor


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, the peak, then a decay down to `final` of the peak at the last step."""

    warmup: NonNegativeInt = 50  # steps
    # share of the peak at the last step; 1: the rate stays constant
    final: Annotated[float, at_least(0), at_most(1, "it is a part of the peak; choose 0 to 1")] = (
        0.02
    )
    # of the decay: half a cosine, a line, or 1 - sqrt, which falls fastest at first
    shape: Literal["cosine", "linear", "sqrt"] = "cosine"
    decay: NonNegativeInt = 0  # last steps that decay (warmup-stable-decay); 0: all behind warm-up
    cycles: PositiveInt = 1  # times that the decay restarts from the peak, counting the first


@dataclass(frozen=True)
class WatchConfig:
    """Watchdog: a process without progress for too long writes its stacks and ends with exit code 3."""

    seconds: NonNegativeFloat = 300.0  # that any step may take; 0: no limit
    # multiple of the last steps' median that a step may take, where that is longer
    times: NonNegativeFloat = 20.0
    # seconds without progress in opening, compiling, evaluating or saving; 0: no limit
    others: NonNegativeFloat = 3600.0

    def check(self, where: str) -> None:
        for name in ("seconds", "times", "others"):
            value = getattr(self, name)
            check(value <= MAX_WAIT, f"{where}.{name}={value:g}: give at most {MAX_WAIT:g}")


@dataclass(frozen=True)
class TrainingConfig:
    """Length and precision of training, and how often to evaluate and save."""

    steps: int = 0  # optimizer updates; set these or epochs
    epochs: float = 0.0  # passes over as many samples as all sources have
    # of the computation; master weights are float32
    precision: Literal["float32", "bfloat16"] = "float32"
    clip: PositiveFloat = 1.0  # global gradient norm
    # largest absolute value of a gradient's element, after the norm is clipped; 0: no limit
    clip_value: NonNegativeFloat = 0.0
    # parts of the logits that are computed one after the other, of the tokens or of the vocabulary;
    # 0: as memory needs
    loss_chunks: NonNegativeInt = 0
    evaluate_every: NonNegativeInt = 0  # steps; 0: only at the end
    evaluate_samples: PositiveInt = 64  # of the validation split, while training
    checkpoint_every: NonNegativeInt = 0  # steps; 0: only at the end
    keep: PositiveInt = 2  # the newest checkpoints
    keep_every: NonNegativeInt = 0  # also keep those after a multiple of so many steps; 0: none
    # steps between snapshots in the memory of the hosts, from which `mmjax.supervise` goes on; 0: none
    memory_every: NonNegativeInt = 0
    memory_folder: str = "/dev/shm"  # of a memory file system of each host, for these
    keep_best: str = ""  # also keep the best by a metric of evaluations, such as validation/loss
    # evaluations without a better keep_best after which training stops; 0: never
    patience: NonNegativeInt = 0
    # reaction to a step whose loss or gradient is NaN or Inf
    bad_numbers: Literal["stop", "skip"] = "stop"
    # report a gradient norm of so many times the usual, with the worst samples; 0: never
    spike: NonNegativeFloat = 10.0
    # parameters that are evaluated, exported and answered with: as trained, or their moving average
    # (optimizer.ema)
    evaluated: Literal["trained", "average"] = "trained"
    wandb: str = ""  # a project of Weights & Biases to send the metrics to; needs the extra `wandb`
    mlflow: str = ""  # an experiment of MLflow to send the metrics to; needs the extra `mlflow`
    swanlab: str = ""  # a project of SwanLab to send the metrics to; needs the extra `swanlab`
    watch: WatchConfig = field(default_factory=WatchConfig)

    @property
    def trackers(self) -> dict[str, str]:
        """The project of each tracker that gets the metrics, by the tracker's name."""
        projects = {"wandb": self.wandb, "mlflow": self.mlflow, "swanlab": self.swanlab}
        return {name: project for name, project in projects.items() if project}

    def check(self, where: str) -> None:
        steps = self.steps
        epochs = self.epochs
        check(
            steps >= 1 or epochs > 0,
            f"{where}.steps={steps}: must be at least 1, or give {where}.epochs above 0",
        )
        check(
            not (steps and epochs),
            f"{where}.steps={steps} and {where}.epochs={epochs:g}: give one, and 0 as the other",
        )
        check(
            not self.keep_best or self.evaluate_every > 0,
            f"{where}.keep_best={self.keep_best}: nothing is evaluated while training; set {where}.evaluate_every",
        )
        check(
            not self.patience or bool(self.keep_best),
            f"{where}.patience={self.patience}: name the metric by {where}.keep_best, such as validation/loss",
        )
