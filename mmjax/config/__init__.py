"""Configs as frozen dataclasses, which compute nothing.

A config is a Python file with ``def config() -> Config``. A choice between several settings is a
union of dataclasses, discriminated by ``kind``. ``mmjax.config.loading`` loads, edits and stores
configs.
"""

# ruff: noqa: F401

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmjax.config.clips import AudioPreparation, LogMel, WhisperMel
from mmjax.config.data import (
    ArrayRecordSource,
    BatchConfig,
    ChatFormat,
    ConversationFiles,
    CsvSource,
    DataConfig,
    DatasetInfoSource,
    EmbeddedSource,
    FileSource,
    FunctionSource,
    IsfGrouping,
    LlavaSource,
    LlmBalance,
    ManifestSource,
    MediaLimits,
    MessagesSource,
    NoBalance,
    NoGrouping,
    Outside,
    PackGrouping,
    ParquetSource,
    Placeholder,
    PostBalance,
    PreferenceSource,
    QuestionsSource,
    RolloutsSource,
    Samples,
    ShareGptSource,
    Tokens,
    WebDatasetSource,
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
    DynamicTiles,
    FixedSize,
    ImagePreparation,
    PanAndScan,
    PixtralResize,
    SmartResize,
    SplitTiles,
)
from mmjax.config.losses import CrossEntropy, LossConfig
from mmjax.config.model import LoraConfig, ModelConfig
from mmjax.config.processor_fields import Filter
from mmjax.config.towers import (
    Activation,
    AlternatingGrid,
    AudioConfig,
    Biased,
    Callbacks,
    ConnectorConfig,
    DecoderConfig,
    DeltaNetConfig,
    DynamicRope,
    Encoder,
    ExpertsConfig,
    FractionalGrid,
    LearnedGrid,
    LinearRope,
    Llama3Rope,
    LongRope,
    PlainRope,
    Remat,
    RopeScaling,
    RotaryGrid,
    Sinusoids,
    StoredTable,
    StretchedGrid,
    TowerRemat,
    VisionConfig,
    YarnRope,
)
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
    NoVideo,
    Qwen2Video,
    Qwen3Video,
    UniformVideo,
    VideoPreparation,
)


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
    seed: int = 0  # of initial weights, the order of samples, dropout and embedded data
    # kind of devices; auto: the fastest available
    device: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    # XLA's options beside mmjax's, by name
    compiler: dict[str, bool | int | float | str] = field(default_factory=dict)
    run: str = ""  # the run's folder; empty: runs/<name>
    init_from: str = ""  # a run whose parameters (and nothing else) this one starts from
    # of text: cross-entropy, or one of several answers to a prompt
    loss: LossConfig = CrossEntropy()
