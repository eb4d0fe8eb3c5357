"""Configs as frozen dataclasses, which compute nothing.

A config is a Python file with ``def config() -> Config``. A choice between several settings is a
union of dataclasses, discriminated by ``kind``. ``mmjax.config.loading`` loads, edits and stores
configs.
"""

# ruff: noqa: F401

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mmjax.config.clips import AudioPreparation, LogMel, UsmMel, Waveform, WhisperMel
from mmjax.config.data import (
    BatchConfig,
    ChatFormat,
    DataConfig,
    IsfGrouping,
    LlmBalance,
    MediaLimits,
    NoBalance,
    NoGrouping,
    PackGrouping,
    Placeholder,
    PostBalance,
    Samples,
    Tokens,
)
from mmjax.config.decoder import (
    ConvolutionConfig,
    DecoderConfig,
    DeltaNetConfig,
    DynamicRope,
    ExpertsConfig,
    LatentAttentionConfig,
    LinearRope,
    Llama3Rope,
    LongRope,
    PlainRope,
    ProportionalRope,
    RopeScaling,
    TokenInputsConfig,
    YarnRope,
)
from mmjax.config.encoders import (
    AlternatingGrid,
    AudioConfig,
    AxisTables,
    Callbacks,
    ConformerConfig,
    Encoder,
    FractionalGrid,
    LearnedGrid,
    QueryLayers,
    RotaryGrid,
    RotaryTime,
    Sinusoids,
    StoredTable,
    StretchedGrid,
    VisionConfig,
)
from mmjax.config.generators import (
    DiffusionTransformerConfig,
    FlowMatching,
    Generator,
    PixelLatents,
    Tower,
    UnetConfig,
    VaeConfig,
    VaeLatents,
)
from mmjax.config.images import (
    AnyRes,
    AsIs,
    CanvasTiles,
    CappedGrid,
    DynamicTiles,
    FixedSize,
    ImagePreparation,
    PaddedResize,
    PanAndScan,
    PatchBudget,
    PixtralResize,
    ResizeOrTiles,
    Slices,
    SmartResize,
    SplitTiles,
    TilesAndSquare,
)
from mmjax.config.losses import CrossEntropy, LossConfig
from mmjax.config.model import LoraConfig, ModelConfig
from mmjax.config.processor_fields import Filter
from mmjax.config.ranges import Limit
from mmjax.config.sources import (
    ArrayRecordSource,
    ConversationFiles,
    CsvSource,
    DatasetInfoSource,
    EmbeddedSource,
    FileSource,
    FunctionSource,
    LlavaSource,
    ManifestSource,
    MessagesSource,
    Outside,
    ParquetSource,
    PreferenceSource,
    QuestionsSource,
    RolloutsSource,
    ShareGptSource,
    WebDatasetSource,
)
from mmjax.config.towers import Activation, Biased, ConnectorConfig, Remat, TowerRemat
from mmjax.config.training import (
    Adafactor,
    AdamW,
    ContextAttention,
    Exchange,
    Layout,
    MeshConfig,
    Moments,
    Muon,
    OptimizerConfig,
    PipelineConfig,
    Rates,
    Schedule,
    SequenceParallel,
    TrainingConfig,
    Unit,
    WatchConfig,
    context_form,
)
from mmjax.config.videos import (
    Glm4Video,
    MuseVideo,
    NoVideo,
    Qwen2Video,
    Qwen3Video,
    UniformVideo,
    VideoPreparation,
)

Seed = Annotated[int, Limit(lambda seed: 0 <= seed < 2**31, f"choose 0 to {2**31 - 1}")]


@dataclass(frozen=True)
class Config:
    """One experiment. With mmjax's version, it determines everything about a run but the machine."""

    name: str  # of the experiment
    data: DataConfig
    batch: BatchConfig
    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = AdamW()
    schedule: Schedule = Schedule()
    mesh: MeshConfig = MeshConfig()
    # devices by module instead of one mesh for all; empty: mesh
    units: dict[str, Unit] = field(default_factory=dict)
    pipeline: PipelineConfig = PipelineConfig()
    # of initial weights, the order of samples, dropout and embedded data
    seed: Seed = 0
    # kind of devices; auto: the fastest available
    device: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    # XLA's options beside mmjax's, by name
    compiler: dict[str, bool | int | float | str] = field(default_factory=dict)
    run: str = ""  # the run's folder; empty: runs/<name>
    init_from: str = ""  # a run whose parameters (and nothing else) this one starts from
    # of text: cross-entropy, or one of several answers to a prompt
    loss: LossConfig = CrossEntropy()
