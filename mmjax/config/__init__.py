"""Configs as frozen dataclasses, which compute nothing.

A config is a Python file with ``def config() -> Config``. A choice between several settings is a union of dataclasses,
discriminated by ``kind``. ``mmjax.config.loading`` loads, edits and stores configs.
"""

# ruff: noqa: F401

from mmjax.config.batch import (
    BatchConfig,
    IsfGrouping,
    LlmBalance,
    NoBalance,
    NoGrouping,
    PackGrouping,
    PostBalance,
    Samples,
    Tokens,
)
from mmjax.config.data import (
    ArrayRecordSource,
    ChatFormat,
    ConversationFiles,
    DataConfig,
    EmbeddedSource,
    FileSource,
    FunctionSource,
    LlavaSource,
    ManifestSource,
    MessagesSource,
    Outside,
    ParquetSource,
    Placeholder,
    QuestionsSource,
    ShareGptSource,
)
from mmjax.config.experiment import Config
from mmjax.config.media import (
    AnyRes,
    AsIs,
    AudioPreparation,
    DynamicTiles,
    Filter,
    FixedSize,
    ImagePreparation,
    LogMel,
    MediaLimits,
    SmartResize,
    WhisperMel,
)
from mmjax.config.model import (
    Activation,
    AudioConfig,
    Biased,
    Callbacks,
    ConnectorConfig,
    DecoderConfig,
    DynamicRope,
    LearnedGrid,
    LinearRope,
    Llama3Rope,
    LongRope,
    LoraConfig,
    ModelConfig,
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
from mmjax.config.training import AdamW, Exchange, MeshConfig, Muon, Rates, Schedule, TrainingConfig, WatchConfig
