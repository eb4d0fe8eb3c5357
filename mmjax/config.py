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
class ConversationFiles:
    """What sources of JSON or JSON lines say alike."""

    path: str
    images: str = ""
    audio: str = ""
    validation: str = ""
    test: str = ""
    outside: Outside = "refuse"
    weight: float = 1.0


@dataclass(frozen=True)
class LlavaSource(ConversationFiles):
    """LLaVA's: {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>..."}]}."""

    kind: Literal["llava"] = "llava"


@dataclass(frozen=True)
class ShareGptSource(ConversationFiles):
    """ShareGPT's: {"conversations": [{"from": "human", "value": "..."}]}, "images", "audios"."""

    kind: Literal["sharegpt"] = "sharegpt"


@dataclass(frozen=True)
class MessagesSource(ConversationFiles):
    """OpenAI's: {"messages": [{"role": "user", "content": "..." or typed parts}]}."""

    kind: Literal["messages"] = "messages"


@dataclass(frozen=True)
class QuestionsSource(ConversationFiles):
    """One question a record: {"image": "a.jpg", "question": "What?", "answer": "a cat"}, or "answers": [...]."""

    question: str = "question"  # the keys of both; `answer` with an s behind it does as well
    answer: str = "answer"
    kind: Literal["questions"] = "questions"


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


FileSource = (
    LlavaSource | ShareGptSource | MessagesSource | QuestionsSource | ManifestSource | ParquetSource | ArrayRecordSource
)


@dataclass(frozen=True)
class Placeholder:
    """How a medium stands in the text: what is written for it becomes `before`, its items' tokens and `after`."""

    written: str  # by the template, or for it where it takes nothing but strings
    token: str = ""  # one of the tokenizer's that stands for one position of an item; empty = what is written
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens: by the tokenizer and the chat template of a Hugging Face folder."""

    folder: str
    template: str = ""  # a Jinja file to use instead of the folder's template
    variables: dict[str, int | float | str | bool] = field(default_factory=dict)  # for the template: enable_thinking
    placeholders: dict[str, Placeholder] = field(default_factory=dict)  # of image, audio; empty = as the folder says
    train_on: Literal["assistant", "last_assistant"] = "assistant"  # every answer, or each conversation's last
    loss_reduction: Literal["token", "sample", "square"] = "token"  # n tokens of a sample weigh n, 1, sqrt(n)
    date: str = "2025-01-01"  # today, for templates that write it: a sample stays the same every day


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from, and how they are brought to the step."""

    sources: dict[str, EmbeddedSource | FunctionSource | FileSource] = field(default_factory=dict)
    cache: str = ""  # a folder for what is learned of the sources' files; empty: ~/.cache/mmjax/data
    on_bad_sample: Literal["skip", "raise"] = "skip"  # one that cannot be read: listed, then skipped or fatal
    max_bad_share: float = 0.01  # of the samples: more are fatal also where they are skipped
    chat: ChatFormat | None = None  # of the conversations in sources of files
    alphabet: str = ""  # one token per character; token 0 is padding, 1 ends an answer
    workers: int = 2  # processes that load, decode and pack; 0 does it in the training process
    prefetch: int = 4  # steps that each worker keeps ready
    on_oversize: Literal["skip", "raise"] = "skip"  # a sample that fits no budget: listed, then skipped or fatal


# ------------------------------------------------------------------------------------------- how images are prepared

Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # Pillow's


@dataclass(frozen=True)
class AsIs:
    """An image's own pixels, not resized: black fills it up to whole patches."""

    kind: Literal["as_is"] = "as_is"


@dataclass(frozen=True)
class FixedSize:
    """One item of one size, as for CLIP, SigLIP and LLaVA-1.5: padded to a square, then resized, then cropped."""

    square: tuple[int, ...] = ()  # red, green and blue of what first pads the image to a square; () = does not
    resize: tuple[int, ...] = (224,)  # to this shortest edge, or to (height, width); () = does not
    crop: tuple[int, ...] = (224, 224)  # height and width about the centre, black beyond the image; () = does not
    filter: Filter = "bicubic"
    kind: Literal["fixed_size"] = "fixed_size"


@dataclass(frozen=True)
class SmartResize:
    """One item near the image's own size and shape, of whole merge windows, as for Qwen-VL."""

    patch: int = 14
    merge: int = 2
    min_pixels: int = 56 * 56  # of the resized image
    max_pixels: int = 28 * 28 * 1280
    filter: Filter = "bicubic"
    kind: Literal["smart_resize"] = "smart_resize"


@dataclass(frozen=True)
class DynamicTiles:
    """The grid of tiles nearest to the image's shape, then the whole image as one more tile, as for InternVL."""

    tile: tuple[int, ...] = (448, 448)  # height and width
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True  # the whole image as the last tile, wherever there are several
    filter: Filter = "bicubic"
    kind: Literal["dynamic_tiles"] = "dynamic_tiles"


@dataclass(frozen=True)
class AnyRes:
    """The whole image as one tile, then the tiles of the best of some resolutions, as for LLaVA-NeXT and -OneVision.

    The LLM sees the tokens of the tiles tile by tile, or by the rows of the image that they make up, without what is
    only padding, and `connector.newline` behind each.
    """

    tile: int = 336
    pinpoints: tuple[str, ...] = ("336x672", "672x336", "672x672", "1008x336", "336x1008")  # height x width
    several: Literal["tiles", "square"] = (
        "tiles"  # of a sample with several images: each as ever, or padded to a square
    )
    background: tuple[int, ...] = (122, 116, 104)  # red, green and blue of that padding
    filter: Filter = "bicubic"
    order: Literal["tiles", "rows"] = "tiles"
    most_tiles: int = 0  # rows with over 1.21 times as many tokens as these have are interpolated to as many; 0 = never
    kind: Literal["any_res"] = "any_res"


ImagePreparation = AsIs | FixedSize | SmartResize | DynamicTiles | AnyRes


# -------------------------------------------------------------------------------------------- how audio is prepared


@dataclass(frozen=True)
class LogMel:
    """Log-mel frames of a clip alone, of any length, laid out from its loudest bin."""

    mels: int = 80
    sample_rate: int = 16_000
    window: int = 400  # samples
    hop: int = 160  # samples
    kind: Literal["log_mel"] = "log_mel"


@dataclass(frozen=True)
class WhisperMel:
    """Log-mel frames as Whisper's extractor makes them of a window of `seconds`, silent after the clip's end."""

    mels: int = 80
    sample_rate: int = 16_000
    window: int = 400  # samples
    hop: int = 160  # samples
    seconds: int = 30
    longer: Literal["refuse", "split"] = "refuse"  # a clip beyond the window is bad, or several items in turn
    # What an encoder's layers see and make tokens of: the clip alone, as Qwen2-Audio, or the window with its silence.
    attended: Literal["clip", "window"] = "clip"
    kind: Literal["whisper_mel"] = "whisper_mel"


AudioPreparation = LogMel | WhisperMel


# ------------------------------------------------------------------------------------------------- what is bad media


@dataclass(frozen=True)
class MediaLimits:
    """What an image or a clip may measure; beyond, it counts as bad. Checked before anything is decoded."""

    pixels: int = 100_000_000  # of an image, also while it is prepared
    min_side: int = 1  # pixels
    max_side: int = 65_535  # pixels
    aspect: float = 200.0  # the longer side over the shorter one
    seconds: float = 3600.0  # of a clip


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
class PlainRope:
    """Rotary positions as they are."""

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by a factor."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicRope:
    """A base that grows with the sample, where that is longer than `positions` (dynamic NTK)."""

    factor: float
    positions: int
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnRope:
    """YaRN: slow channels divided by a factor, fast ones as they are; cosines and sines scaled."""

    factor: float
    positions: int  # of the training before
    attention: float  # by which cosines and sines are scaled
    fast: float = 32.0  # rotations over `positions` of the channels that stay
    slow: float = 1.0  # and of those that are divided
    whole: bool = True  # the borders between them lie on whole channels
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's: channels of long waves divided by a factor, those between blended."""

    factor: float
    low: float
    high: float
    positions: int  # of the training before
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: a factor for every channel pair, others for samples longer than `positions`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    positions: int
    attention: float  # by which cosines and sines are scaled
    kind: Literal["long"] = "long"


RopeScaling = PlainRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
Biased = Literal["query", "key", "value", "output", "gate", "up", "down"]


@dataclass(frozen=True)
class DecoderConfig:
    """A causal transformer: rotary positions, RMSNorm, a gated MLP, grouped-query attention."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocab: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = PlainRope()
    rope_sections: tuple[int, ...] = ()  # channel pairs that turn with (t, y, x); empty: all with one position
    rope_interleaved: bool = False  # the sections' pairs take turns
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # that is added to the norms' scales
    activation: Activation = "silu"
    biases: tuple[Biased, ...] = ()  # the matrices of a layer that have one
    qk_norm: Literal["none", "head"] = "none"  # of queries and keys, before they turn
    post_norms: bool = False  # of what attention and the MLP add to the residual stream
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # of the scores; 0 = head_width ** -0.5
    attention_cap: float = 0.0  # scores are bent to stay below; 0 = not
    logit_cap: float = 0.0
    window: int = 0  # tokens that the layers in `windowed` see, their own included
    windowed: tuple[int, ...] = ()
    tied: bool = True
    items: Literal["causal", "bidirectional", "isolated"] = "causal"  # how the tokens of an image or clip attend
    attention: Literal["dense", "blockwise"] = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random


@dataclass(frozen=True)
class ConnectorConfig:
    """An MLP from an encoder's width to the LLM's, over `merge` neighbours (per axis for images)."""

    merge: int = 2
    mlp_width: int = 256  # 0 = no MLP but a single matrix, whose bias is "down"
    norm: Literal["none", "layer", "rms", "merged_layer"] = "layer"  # before neighbours are merged, or after
    norm_eps: float = 0.0  # 0 = the encoder's
    activation: Activation = "gelu_tanh"
    biases: tuple[Biased, ...] = ("up", "down")
    position_grid: int = 0  # learned positions of merged tokens, up to this row/column/time; 0 = none
    newline: bool = False  # a learned token behind every row of an image whose tokens the LLM sees by rows
    frozen: bool = False
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random


@dataclass(frozen=True)
class RotaryGrid:
    """Patches turn with their row and column; images of any size."""

    theta: float = 100.0
    kind: Literal["rotary"] = "rotary"


@dataclass(frozen=True)
class LearnedGrid:
    """A learned vector for every place of a grid; images have at most as many rows and columns of patches."""

    rows: int
    columns: int
    kind: Literal["learned"] = "learned"


@dataclass(frozen=True)
class StretchedGrid:
    """A learned vector for every place of a square grid that is stretched to each image; patches turn too."""

    side: int
    theta: float = 10_000.0
    kind: Literal["stretched"] = "stretched"


@dataclass(frozen=True)
class Callbacks:
    """Your own functions around an encoder (Cornstarch 5.1), `module:qualname` as of a FunctionSource; empty: none.

    In the order in which they are called. The first and the last are called where data is loaded, and know sizes; the
    others inside the step, on arrays, and keep their shapes.
    """

    before_encoder: str = ""  # (Picture, images of its sample) -> Pictures: the items of an image, instead of `images`
    after_encoder: str = ""  # (features [R, L, W], ItemBatch) -> what the connector reads
    after_connector: str = ""  # (tokens [R, M, E], ItemBatch) -> what is sent to the LLM
    before_llm: str = ""  # (size, grids of the items) -> Arrangement: which tokens of an image the LLM sees, and where


@dataclass(frozen=True)
class VisionConfig:
    """A ViT that takes images as packed patches."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    patch: int
    channels: int = 3
    frames: int = 1  # of a clip that make one patch; a still image is all of them
    mean: tuple[float, ...] = (0.5,)  # of each channel, or of all; pixels are (x / 255 - mean) / std
    std: tuple[float, ...] = (0.5,)
    images: ImagePreparation = AsIs()  # before they are cut into patches
    positions: RotaryGrid | LearnedGrid | StretchedGrid = RotaryGrid()
    window: int = 0  # rows and columns of patches in the squares within which the layers in `windowed` attend
    windowed: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()  # layers whose outputs are added to the LLM's: the n-th's behind its layer n
    class_token: bool = False  # a learned token beside the patches of every image; the LLM does not see it
    embed_bias: bool = True
    embed_norm: bool = False  # before the first layer
    head_norm: bool = True  # after the last layer
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    activation: Activation = "gelu_tanh"
    gated: bool = False  # the MLP has a gate
    biases: tuple[Biased, ...] = ("query", "value", "output", "up", "down")  # the matrices of a layer that have one
    qk_norm: Literal["none", "width"] = "none"  # of queries and keys, over all heads
    qk_norm_eps: float = 1e-6
    layer_scale: bool = False  # learned scales of what attention and the MLP add to the residual stream
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    attention: Literal["dense", "blockwise"] = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    kind: Literal["vision"] = "vision"


@dataclass(frozen=True)
class Sinusoids:
    """Whisper's formula, for clips of any length."""

    kind: Literal["sinusoids"] = "sinusoids"


@dataclass(frozen=True)
class StoredTable:
    """A vector for every position of a clip, as Whisper's checkpoints store them; training leaves them as they are."""

    positions: int = 1500
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True)
class AudioConfig:
    """Whisper's encoder over packed log-mel frames: two convolutions (the second of stride 2), then a transformer."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    clips: AudioPreparation = LogMel()
    positions: Sinusoids | StoredTable = Sinusoids()
    norm_eps: float = 1e-5
    activation: Activation = "gelu_tanh"
    stem_activation: Activation = "gelu_tanh"  # of the convolutions
    pool: int = 1  # so many positions become their mean before the last norm; those left over at the end are dropped
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    attention: Literal["dense", "blockwise"] = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    kind: Literal["audio"] = "audio"

    @property
    def mels(self) -> int:
        """Width of one frame."""
        return self.clips.mels

    @property
    def sample_rate(self) -> int:
        """Of the clips, in Hz."""
        return self.clips.sample_rate


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank matrices a and b beside linear layers, which then add `scale * (x @ a) @ b`; b is 0 at first."""

    layers: tuple[str, ...]  # patterns of names, `*` for anything: llm.*, *.attention.query, vision.connector.mlp.up
    rank: int = 16
    alpha: float = 32.0
    scaling: Literal["rank", "sqrt_rank"] = "rank"  # scale = alpha / rank, or alpha / sqrt(rank) (rsLoRA)
    base: Literal["frozen", "trained"] = "frozen"  # the other weights of a module that has adapters


@dataclass(frozen=True)
class ModelConfig:
    """An LLM and the encoders that feed it, by name."""

    llm: DecoderConfig
    encoders: dict[str, VisionConfig | AudioConfig] = field(default_factory=dict)
    lora: dict[str, LoraConfig] = field(default_factory=dict)  # by a name of your own


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
    modules: dict[str, Rates] = field(default_factory=dict)  # by module: llm, vision.connector, llm.lora, ...
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
