"""What an experiment is: frozen dataclasses, and nothing that computes.

A config is a Python file with ``def config() -> Config``. Every choice is a dataclass; where there are several to
choose from, a union of dataclasses told apart by ``kind``. ``mmjax.config_files`` reads, edits and stores them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# What a layer keeps between its forward and its backward pass; the rest is computed again (`models.layer_runs`).
Remat = Literal["none", "products", "attention_mlp", "attention", "offload", "full"]
# Of a tower: one for all its layers, or what the memory allows, decided before step 0 (`planning.fit`).
TowerRemat = Literal["auto", "none", "products", "attention_mlp", "attention", "offload", "full"]
Exchange = Literal["padded", "ragged"]
Outside = Literal["refuse", "allow"]  # of references that lead out of a source's folder


# ------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class EmbeddedSource:
    """Handwritten digits and keypad tones with questions about them, made from a seed; nothing to download."""

    kind: Literal["embedded"] = "embedded"
    modalities: tuple[Literal["image", "audio", "mixed", "text"], ...] = ("image", "audio", "mixed", "text")
    samples: int = 24_000
    questions: int = 4  # at most this many questions about one sample's media, in training
    weight: float = 1.0


@dataclass(frozen=True)
class FunctionSource:
    """A source made by your own function, ``module:qualname``, in mmjax or in the config file itself."""

    function: str
    arguments: dict[str, int | float | str | bool] = field(default_factory=dict)
    kind: Literal["function"] = "function"
    weight: float = 1.0


# Of files: paths of this machine, or URLs that fsspec opens. `path` is what is trained on, with `*` for several files;
# `validation` and `test`, where given, are files of the same format. `images` and `audio` are the folder, URL, .zip or
# .tar that the records' paths are relative to; empty: the folder of the file itself. What leads out of them (absolute
# paths, URLs, `..`, links) is refused unless outside="allow".


@dataclass(frozen=True)
class LlavaSource:
    """LLaVA's JSON or JSON lines: {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>..."}]}."""

    path: str
    images: str = ""
    audio: str = ""
    validation: str = ""
    test: str = ""
    outside: Outside = "refuse"
    kind: Literal["llava"] = "llava"
    weight: float = 1.0


@dataclass(frozen=True)
class ShareGptSource:
    """ShareGPT's JSON or JSON lines: {"conversations": [{"from": "human", "value": "..."}]}, "images", "audios"."""

    path: str
    images: str = ""
    audio: str = ""
    validation: str = ""
    test: str = ""
    outside: Outside = "refuse"
    kind: Literal["sharegpt"] = "sharegpt"
    weight: float = 1.0


@dataclass(frozen=True)
class MessagesSource:
    """OpenAI-style JSON or JSON lines: {"messages": [{"role": "user", "content": "..." or typed parts}]}."""

    path: str
    images: str = ""
    audio: str = ""
    validation: str = ""
    test: str = ""
    outside: Outside = "refuse"
    kind: Literal["messages"] = "messages"
    weight: float = 1.0


@dataclass(frozen=True)
class ManifestSource:
    """NeMo's audio manifests, JSON lines: {"audio_filepath": "a.wav", "text": "...", "offset": 0, "duration": 2.5}."""

    path: str
    audio: str = ""
    prompt: str = "Transcribe the audio."  # after the clip, where a line has no prompt of its own
    validation: str = ""
    test: str = ""
    outside: Outside = "refuse"
    kind: Literal["manifest"] = "manifest"
    weight: float = 1.0


@dataclass(frozen=True)
class ParquetSource:
    """Parquet as Hugging Face's data sets have it: media are {"bytes", "path"} or bytes, or lists of them.

    The text is in one column of messages, or in two of questions and answers.
    """

    path: str
    messages: str = ""  # columns by name; empty: there is none
    question: str = ""
    answer: str = ""
    images: str = ""
    audio: str = ""
    validation: str = ""
    test: str = ""
    outside: Outside = "refuse"
    kind: Literal["parquet"] = "parquet"
    weight: float = 1.0


@dataclass(frozen=True)
class ArrayRecordSource:
    """A folder that `python -m mmjax.index --to arrayrecord` wrote: the format to train on at scale."""

    path: str
    validation: str = ""
    test: str = ""
    kind: Literal["arrayrecord"] = "arrayrecord"
    weight: float = 1.0


FileSource = LlavaSource | ShareGptSource | MessagesSource | ManifestSource | ParquetSource | ArrayRecordSource


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from, and how they are brought to the step."""

    sources: dict[str, EmbeddedSource | FunctionSource | FileSource] = field(default_factory=dict)
    cache: str = ""  # a folder for what is learned of the sources' files; empty: ~/.cache/mmjax/data
    on_bad_sample: Literal["skip", "raise"] = "skip"  # one that cannot be read: listed, then skipped or fatal
    max_bad_share: float = 0.01  # of the samples: more are fatal also where they are skipped
    alphabet: str = ""  # one token per character; token 0 is padding, 1 ends an answer
    workers: int = 2  # processes that load, decode and pack; 0 does it in the training process
    prefetch: int = 4  # steps that each worker keeps ready
    on_oversize: Literal["skip", "raise"] = "skip"  # a sample that fits no budget: listed, then skipped or fatal


# ------------------------------------------------------------------------------------------------------------ batch


@dataclass(frozen=True)
class Samples:
    """A batch of a fixed mean number of samples per update."""

    count: int
    kind: Literal["samples"] = "samples"


@dataclass(frozen=True)
class Tokens:
    """A batch of a fixed mean number of LLM tokens per update."""

    count: int
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class PackGrouping:
    """Samples that fill the rows of every module at once; none waits longer than its chunk."""

    kind: Literal["pack"] = "pack"
    chunk_steps: int = 128  # steps that are planned together and drained; resuming replays one chunk
    pool_steps: int = 4  # the packer chooses among this many steps' worth of waiting samples


@dataclass(frozen=True)
class IsfGrouping:
    """OmniBal's iterative sampling and filtering: one group fills one row of every module."""

    kind: Literal["isf"] = "isf"
    iterations: int = 10
    chunk_steps: int = 128


@dataclass(frozen=True)
class NoGrouping:
    """A fixed number of samples per step, in the order of the shuffle."""

    kind: Literal["none"] = "none"
    chunk_steps: int = 128


@dataclass(frozen=True)
class NoBalance:
    """Samples on the ranks to which grouping gives them, items with their sample: what balancing is measured by."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class LlmBalance:
    """Ranks equal in the LLM alone, items with their sample."""

    kind: Literal["llm"] = "llm"


@dataclass(frozen=True)
class PostBalance:
    """Ranks equal in every phase: samples are placed by all their costs at once, items move only where they must."""

    locality: Literal["on", "off"] = "on"  # off: every phase by itself, and most encoder outputs travel (OrchMLLM)
    kind: Literal["post"] = "post"


@dataclass(frozen=True)
class BatchConfig:
    """What one optimizer update sees, in numbers that do not depend on the devices."""

    size: Samples | Tokens = Samples(24)
    rows: dict[str, int] = field(default_factory=lambda: {"llm": 8})  # packed rows of each module per microbatch
    microbatches: int = 1
    grouping: PackGrouping | IsfGrouping | NoGrouping = PackGrouping()
    balance: PostBalance | LlmBalance | NoBalance = (
        PostBalance()
    )  # where samples run; which ones a step has is the same
    alignment: int = 8  # row lengths are multiples of this
    shapes: int = 8  # at most this many compiled shapes


# ------------------------------------------------------------------------------------------------------------ model


@dataclass(frozen=True)
class DecoderConfig:
    """A causal transformer: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied: bool = True
    items: Literal["causal", "bidirectional", "isolated"] = "causal"  # how the tokens of an image or clip attend
    attention: Literal["dense", "blockwise"] = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False


@dataclass(frozen=True)
class ConnectorConfig:
    """An MLP from an encoder's width to the LLM's, over `merge` neighbours (per axis for images)."""

    merge: int = 2
    mlp_width: int = 256
    position_grid: int = 0  # learned positions of merged tokens, up to this row/column/time; 0 = none
    frozen: bool = False


@dataclass(frozen=True)
class VisionConfig:
    """A ViT that takes images of any size as packed patches, with 2D RoPE."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    patch: int
    channels: int = 3
    rope_theta: float = 100.0
    norm_eps: float = 1e-6
    connector: ConnectorConfig = ConnectorConfig()
    attention: Literal["dense", "blockwise"] = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False
    kind: Literal["vision"] = "vision"


@dataclass(frozen=True)
class AudioConfig:
    """Whisper's encoder over packed log-mel frames: two convolutions (the second of stride 2), then a transformer."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    mels: int = 80
    sample_rate: int = 16_000
    window: int = 400  # samples
    hop: int = 160  # samples
    norm_eps: float = 1e-5
    connector: ConnectorConfig = ConnectorConfig()
    attention: Literal["dense", "blockwise"] = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False
    kind: Literal["audio"] = "audio"


@dataclass(frozen=True)
class ModelConfig:
    """An LLM and the encoders that feed it, by name."""

    llm: DecoderConfig
    encoders: dict[str, VisionConfig | AudioConfig] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class MeshConfig:
    """How many devices along each axis; -1 takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    ranks_per_node: int = 0  # that send encoder outputs to each other; 0 = those of one host
    exchange: Exchange = "padded"  # ragged sends no padding; GPU and TPU only
    encoders: Literal["tensor", "data"] = "tensor"  # the tensor axis cuts their layers too, or spreads their rows
    memory: float = 0.0  # GB of a device that may be used; 0 = what it has
    host_memory: float = 0.0  # GB of its host that a device may offload activations to


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay of one module, where they differ from the optimizer's."""

    learning_rate: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class AdamW:
    """AdamW on every parameter."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    modules: dict[str, Rates] = field(default_factory=dict)  # by module: llm, vision, vision.connector, ...
    kind: Literal["adamw"] = "adamw"


@dataclass(frozen=True)
class Muon:
    """Muon on the matrices of the layers and connectors, AdamW on the rest."""

    learning_rate: float = 0.02  # of the matrices
    weight_decay: float = 0.01
    adam_learning_rate: float = 3e-3  # of the rest: embeddings, norms, biases
    momentum: float = 0.95
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    modules: dict[str, Rates] = field(default_factory=dict)
    kind: Literal["muon"] = "muon"


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine down to `final` of the peak at the last step."""

    warmup: int = 50
    final: float = 0.02


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, in what precision, and how often to look and to save."""

    steps: int
    precision: Literal["float32", "bfloat16"] = "float32"  # of the computation; master weights are float32
    clip: float = 1.0  # global gradient norm
    loss_chunks: int = 0  # parts of the vocabulary whose logits are made one after the other; 0 = as memory needs
    evaluate_every: int = 0  # steps; 0 = only at the end
    evaluate_samples: int = 64  # of the validation split, while training
    checkpoint_every: int = 0  # steps; 0 = only at the end
    keep: int = 2  # checkpoints


@dataclass(frozen=True)
class Config:
    """One experiment, whole: with mmjax's version it says everything about a run but the machine."""

    name: str
    data: DataConfig
    batch: BatchConfig
    model: ModelConfig
    training: TrainingConfig
    optimizer: AdamW | Muon = AdamW()
    schedule: Schedule = Schedule()
    mesh: MeshConfig = MeshConfig()
    seed: int = 0
    device: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    run: str = ""  # the run's folder; empty = runs/<name>
    init_from: str = ""  # a run whose parameters (and nothing else) this one starts from
