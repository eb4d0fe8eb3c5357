"""Config of an experiment: the root of all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmjax.config.batch import BatchConfig
from mmjax.config.data import DataConfig
from mmjax.config.model import ModelConfig
from mmjax.config.training import AdamW, MeshConfig, Muon, Schedule, TrainingConfig


@dataclass(frozen=True)
class Config:
    """One experiment. With mmjax's version, it determines everything about a run but the machine."""

    name: str  # of the experiment
    data: DataConfig
    batch: BatchConfig
    model: ModelConfig
    training: TrainingConfig
    optimizer: AdamW | Muon = AdamW()
    schedule: Schedule = Schedule()
    mesh: MeshConfig = MeshConfig()
    seed: int = 0  # of initial weights, the order of samples, dropout and embedded data
    device: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # kind of devices; auto: the fastest available
    run: str = ""  # the run's folder; empty: runs/<name>
    init_from: str = ""  # a run whose parameters (and nothing else) this one starts from
