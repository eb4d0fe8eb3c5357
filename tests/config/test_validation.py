from __future__ import annotations

import dataclasses

import pytest

from mmjax.config.loading import load
from mmjax.config.validation import EMBEDDED_RATE, validate
from mmjax.data.toy.tones import SAMPLE_RATE
from mmjax.errors import UserError


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load("tiny_omni", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            "model.llm.kv_heads=3",
            "model.llm: heads=4 does not divide by kv_heads=3; choose kv_heads from 1, 2, 4",
        ),
        ("model.llm.head_width=31", "model.llm.head_width=31: RoPE turns pairs; make it even"),
        ("model.llm.vocab=10", "set model.llm.vocab="),
        ("model.llm.remat=full,none", "model.llm.remat gives 2 policies for layers=3"),
        (
            "model.encoders.vision.remat=full,none,none",
            "model.encoders.vision.remat gives 3 policies for layers=2",
        ),
        (
            "model.llm.dropout=1",
            "model.llm.dropout=1.0: choose at least 0 (nothing is dropped) and less than 1",
        ),
        (
            "model.encoders.vision.dropout=-0.1",
            "model.encoders.vision.dropout=-0.1: choose at least 0",
        ),
        ("model.encoders.audio.dropout=1.5", "model.encoders.audio.dropout=1.5: choose at least 0"),
        (
            "model.llm.fp8=linears model.llm.layers=2",
            "model.llm.layers=2 leaves none; use model.llm.fp8=off",
        ),
        (
            "model.llm.fp8=linears mesh.tensor=2",
            "mesh.tensor=2 would cut its products; use mesh.tensor=1 and a larger",
        ),
        ("model.llm.fp8=all", "model.llm.fp8: got 'all'; expected one of off, linears"),
        ("model.encoders.vision.width=72", "make width a multiple of 16"),
        ("model.encoders.audio.heads=5", "does not divide by heads=5; choose heads from"),
        ("model.encoders.vision.channels=3", "are grey; set it to 1"),
        ("model.encoders.audio.clips.sample_rate=8000", "have 4000 Hz; set that"),
        ("model.encoders.audio.clips.hop=129", "make hop smaller"),
        ("model.encoders.audio.clips.mels=66", "only 65 frequencies"),
        ("model.encoders.audio.clips.window=1", "must be at least 2"),
        ("model.encoders.audio.pool=0", "model.encoders.audio.pool=0: must be at least 1"),
        ("model.encoders.audio.connector.mlp_width=-1", "mlp_width=-1: must be at least 0"),
        (
            "model.encoders.vision.connector.merge=0",
            "model.encoders.vision.connector.merge=0: must be at least 1",
        ),
        (
            "model.encoders.vision.connector.position_grid=-1",
            "position_grid=-1: must be at least 0",
        ),
        (
            "model.encoders.vision.window=3 model.encoders.vision.windowed=0",
            "model.encoders.vision.window=3: a window holds whole tokens; use a multiple of connector.merge=2",
        ),
        ("model.encoders.vision.patch=0", "model.encoders.vision.patch=0: must be at least 1"),
        (
            "data.max_bad_share=1.5",
            "data.max_bad_share=1.5: it is a part of the samples; choose 0 to 1",
        ),
        (
            "data.sources.embedded.weight=-1",
            "data.sources.embedded.weight=-1.0: must be at least 0",
        ),
        ("data.sources.embedded.weight=0", "data.sources.embedded.weight sum to zero"),
        ("data.sources.embedded.modalities=()", "modalities is empty"),
        ("data.sources.embedded.modalities=text,text", "name each once"),
        ("data.alphabet=", "data.alphabet is empty"),
        ("data.alphabet=abca", "data.alphabet holds 'a' more than once"),
        ("data.workers=-1", "data.workers=-1: must be at least 0"),
        ("model.llm.layers=1000000000", "model.llm.layers=1000000000: must be at most 10000"),
        (
            "model.encoders.vision.connector.merge=1000000000",
            "connector.merge=1000000000: must be at most 1024",
        ),
        (
            "model.llm.width=2147483647 model.llm.heads=4 model.llm.kv_heads=3",
            "choose kv_heads from 1, 2, 4",
        ),
        ("model.encoders.vision.width=2147483647", "choose heads from 1"),
        (
            "data.sources.embedded.samples=1000000000",
            "samples=1000000000: must be at most 10000000",
        ),
        ("batch.rows.llm=0", "batch.rows.llm=0: must be at least 1"),
        ("batch.rows.visin=2", "there is no module 'visin': did you mean 'vision'?"),
        (
            "batch.rows={} batch.rows.llm=8",
            "batch.rows has no 'vision'; say how many packed rows it gets",
        ),
        ("batch.microbatches=0", "batch.microbatches=0: must be at least 1"),
        ("batch.alignment=0", "batch.alignment=0: must be at least 1"),
        ("batch.size.count=0", "batch.size.count=0: must be at least 1"),
        (
            "batch.grouping=isf batch.grouping.iterations=0",
            "batch.grouping.iterations=0: must be at least 1",
        ),
        ("training.watch.others=1e10", "training.watch.others=1e+10: give at most 1e+09"),
        ("training.steps=0", "training.steps=0: must be at least 1"),
        ("training.clip=0", "training.clip=0.0: must be more than 0"),
        ("training.watch.times=-1", "training.watch.times=-1.0: must be at least 0"),
        (
            "training.steps=50",
            "schedule.warmup=50 takes all of training.steps=50; set schedule.warmup=5",
        ),
        ("schedule.final=2", "schedule.final=2.0: it is a part of the peak; choose 0 to 1"),
        ("optimizer.b1=1", "optimizer.b1=1.0: choose at least 0 and less than 1"),
        ("optimizer=adafactor optimizer.clip=0", "optimizer.clip=0.0: must be more than 0"),
        ("optimizer.moments=float16", "expected one of float32, bfloat16, int8"),
        (
            "optimizer.adam_learning_rate=-1",
            "optimizer.adam_learning_rate=-1.0: must be at least 0",
        ),
        (
            "optimizer.modules.visin.learning_rate=1",
            "there is no module 'visin': did you mean 'vision'?",
        ),
        (
            "optimizer.modules.llm.weight_decay=-1",
            "optimizer.modules.llm.weight_decay=-1.0: must be at least 0",
        ),
        ("seed=-1", "seed=-1: choose 0 to 2147483647"),
        ("name=a/b", "name='a/b': use letters"),
        (
            "model.llm.frozen=true model.encoders.vision.frozen=true model.encoders.audio.frozen=true "
            "model.encoders.vision.connector.frozen=true model.encoders.audio.connector.frozen=true",
            "every module is frozen",
        ),
    ],
)
def test_values_that_cannot_work_together_are_refused_with_the_remedy(
    overrides: str, error: str
) -> None:
    assert error in message(*overrides.split())


@pytest.mark.parametrize(
    ("name", "error"), [("llm", "'llm' is the decoder's name"), ("my-eyes", "must be a plain word")]
)
def test_an_encoders_name_cannot_clash(name: str, error: str) -> None:
    config = load("tiny_omni")
    model = dataclasses.replace(config.model, encoders={name: config.model.encoders["vision"]})
    with pytest.raises(UserError, match=error):
        validate(dataclasses.replace(config, model=model))


def test_the_embedded_data_needs_the_encoders_of_its_modalities() -> None:
    with pytest.raises(
        UserError, match=r"has 'audio', which needs model\.encoders\.audio of kind 'audio'"
    ):
        load("tiny_vlm", ["data.sources.embedded.modalities=image,audio"])


@pytest.mark.parametrize(
    ("name", "overrides", "error"),
    [
        (
            "tiny_vlm",
            ["loss=dpo", "loss.reference=none"],
            r"data\.sources\.embedded \(embedded\) is for loss=cross_entropy",
        ),
        (
            "tiny_dpo",
            ["data.sources.more=preference", "data.sources.more.path=a", "loss=cross_entropy"],
            "for loss=dpo",
        ),
        (
            "tiny_dpo",
            ["loss.reference=adapters_off"],
            "but llm is trained itself; freeze it and give it or another",
        ),
        ("tiny_dpo", ["loss.beta=0"], r"loss\.beta=0\.0: must be more than 0"),
        ("tiny_dpo", ["model.llm.dropout=0.1"], r"loss=dpo does not work with model\.llm\.dropout"),
    ],
)
def test_a_loss_of_answers_needs_their_sources_and_a_model_that_takes_them_as_branches(
    name, overrides, error
):
    with pytest.raises(UserError, match=error):
        load(name, overrides)


def test_the_embedded_clips_have_the_rate_that_is_checked() -> None:
    assert EMBEDDED_RATE == SAMPLE_RATE


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["data.sources.own=llava"], "missing key 'data.sources.own.path'"),
        (["data.sources.own=lava"], "did you mean 'llava'?"),
        (["data.sources.own=messages", "data.sources.own.path="], "data.sources.own.path is empty"),
        (
            ["data.sources.own=manifest", "data.sources.own.path=a", "data.sources.own.weight=-1"],
            "must be at least 0",
        ),
        (
            [
                "data.sources.own=sharegpt",
                "data.sources.own.path=a",
                "data.sources.own.outside=ask",
            ],
            "refuse, allow",
        ),
        (
            ["data.sources.own=parquet", "data.sources.own.path=a"],
            "name the columns that hold the text",
        ),
        (
            ["data.sources.own=parquet", "data.sources.own.path=a", "data.sources.own.question=q"],
            "or both data.sources.own.question=question and data.sources.own.answer=answer",
        ),
    ],
)
def test_a_source_of_files_that_cannot_be_read_names_its_key(
    overrides: list[str], error: str
) -> None:
    assert error in message(*overrides)
