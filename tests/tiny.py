"""The smallest run there is, as a config file for the commands: a text model that compiles in seconds."""

from dataclasses import replace

from mmjax.config import (
    AdamW,
    BatchConfig,
    Config,
    EmbeddedSource,
    FunctionSource,
    Samples,
    Schedule,
    TrainingConfig,
)
from mmjax.config.loading import sibling
from mmjax.data.toy.dataset import EmbeddedDataset

omni = sibling(__file__, "tiny_omni")


class Few(EmbeddedDataset):
    """Embedded samples, two dozen to a held-out split."""

    def __len__(self) -> int:
        return self.source.samples if self.split == "train" else 24


def few(split, modalities, samples=96, seed=2) -> Few:
    """The source that the config names."""
    return Few(
        EmbeddedSource(modalities=tuple(modalities.split()), samples=samples, questions=2),
        split,
        seed,
    )


def config() -> Config:
    base = omni.config()
    source = FunctionSource("config:few", {"modalities": "text"})
    return replace(
        base,
        name="tiny",
        data=replace(base.data, sources={"few": source}, workers=0),
        batch=BatchConfig(size=Samples(8), rows={"llm": 4}, shapes=2),
        model=replace(
            base.model,
            llm=replace(base.model.llm, layers=2, width=32, head_width=8, mlp_width=48),
            encoders={},
        ),
        training=TrainingConfig(steps=6, checkpoint_every=2, evaluate_every=3, evaluate_samples=4),
        optimizer=AdamW(),
        schedule=Schedule(warmup=1),
    )
