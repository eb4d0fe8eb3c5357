"""Evaluation while training: losses of held-out samples, the best checkpoint, early stopping, unreadable samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY, TINY_MEDIA, run
from llava_folder import save_checkpoint, save_questions

from mmjax import evaluate, train
from mmjax.config import EmbeddedSource, MeshConfig, TrainingConfig
from mmjax.config.loading import default_config, load
from mmjax.data.sample import BadSample, Question, Source
from mmjax.data.sources.opening import open_sources
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.errors import BadMedia, UserError
from mmjax.inference.evaluation import Evaluator, evaluation_sources
from mmjax.inference.prompt_rows import BatchLimits
from mmjax.inference.prompts import select_usable
from mmjax.inference.scores import exact_match_by_group
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint_commit import Retention, saved_steps
from mmjax.training.evaluation import BestMetric

CONFIG = load(default_config())


class Torn(EmbeddedDataset):
    """Twenty questions; one has no file, and the images of another are cut off, which only decoding tells."""

    def __init__(self, split: str = "validation") -> None:
        super().__init__(EmbeddedSource(), split, 0)
        self.torn = next(i for i in range(9, 20) if super(Torn, self).facts(i).items)

    def __len__(self) -> int:
        return 20

    def facts(self, index: int):
        if index == 4:
            raise BadSample("its file is missing")
        return super().facts(index)

    def question(self, index: int) -> Question:
        """The last ten have no family, as those of conversations."""
        question = super().question(index)
        return replace(question, family="", task="") if index >= 10 else question

    def item(self, index: int, number: int) -> np.ndarray:
        if index == self.torn:
            raise BadMedia("image file is truncated")
        return super().item(index, number)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.build(CONFIG.model, jnp.float32)


@pytest.fixture(scope="module")
def params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), model.abstract)


def evaluator(model: Model, source, config=CONFIG, **options) -> Evaluator:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    sources = {"validation/torn": source}
    options = {"loss_chunks": 1, "batch_limits": BatchLimits(rows=8), "one_shape": True} | options
    return Evaluator(model, mesh, ShardingRules(), sources, config, **options)


def test_samples_that_cannot_be_read_are_left_out_of_scores_and_loss_and_named(model, params):
    source = Torn()
    torn = f"validation/torn[{source.torn}]"
    evaluation = evaluator(model, source)
    assert evaluation.left_out == {"validation/torn[4]": "its file is missing"}
    (replies,) = evaluation.answer(params, "validation").values()
    assert [a.sample for a in replies.answered] == [
        i for i in range(20) if i not in (4, source.torn)
    ]
    assert evaluation.left_out[torn].endswith("image file is truncated")
    assert set(replies.left_out) == {4, source.torn}
    scores = exact_match_by_group(replies.answered)
    assert {f"validation/{name}" for name in scores if name.startswith("exact")} <= set(
        evaluation.metrics("validation")
    )
    # of all questions without a family, which are those of a source
    assert "exact_match_torn" in scores
    clean = [i for i in range(20) if i not in (4, source.torn)]
    alone = evaluator(model, source, samples={"validation/torn": clean})
    assert evaluation.loss(params)["loss"] == pytest.approx(alone.loss(params)["loss"], rel=1e-5)


def test_only_as_many_samples_are_looked_at_as_are_used(model):
    evaluation = evaluator(model, Torn(), limits={"validation": 3})
    assert evaluation.questions("validation") == 3
    assert evaluation.left_out == {}


def test_where_bad_samples_are_fatal_one_that_cannot_be_read_is(model):
    fatal = replace(CONFIG, data=replace(CONFIG.data, on_bad_sample="raise"))
    with pytest.raises(
        UserError, match=r"validation/torn\[4\] cannot be asked: its file is missing; mend it"
    ):
        evaluator(model, Torn(), fatal)


def test_the_loss_of_a_split_is_that_of_the_training_step_without_dropout(model, params):
    """By the mean of all tokens that have a weight, not of samples: as a step of the same samples has it."""
    source = Torn()
    clean = [i for i in range(8) if i != 4]
    evaluation = evaluator(model, source, samples={"validation/torn": clean})
    total = weight = 0.0
    for sample in clean:
        alone = evaluator(model, source, samples={"validation/torn": [sample]})
        tokens = len(source.question(sample).answer) + 1
        total, weight = total + alone.loss(params)["loss"] * tokens, weight + tokens
    assert evaluation.loss(params)["loss"] == pytest.approx(total / weight, rel=1e-5)


@pytest.mark.parametrize(
    ("metric", "values", "exhausted"),
    [
        ("validation/loss", (3.0, 2.0, 2.5, 2.0), True),
        ("validation/exact_match_image", (0.1, 0.4, 0.2), False),
    ],
)
def test_the_best_value_is_the_lowest_of_a_loss_and_the_highest_of_a_match(
    metric, values, exhausted
):
    tracked = BestMetric(metric, patience=2)
    for step, value in enumerate(values, start=1):
        tracked.update(step, {metric: value})
    assert (tracked.step, tracked.exhausted) == (2, exhausted)


def test_a_loss_that_is_not_finite_is_never_the_best():
    tracked = BestMetric("validation/loss", patience=1)
    assert not tracked.update(1, {"validation/loss": float("nan")})
    assert tracked.exhausted


def test_the_best_checkpoint_outlives_newer_ones():
    assert Retention(2, best=10).steps_to_remove([5, 10, 15, 20, 25]) == [5, 15]


def test_training_keeps_the_best_checkpoint_and_ends_when_nothing_improves(folder, capsys):
    """With a learning rate of 0 every evaluation equals the first, which stays the best."""
    words = (
        TINY, f"run={folder}", "training.steps=40", "training.evaluate_every=2", "training.keep=1",
        "training.keep_best=validation/loss", "training.patience=2", "training.evaluate_samples=4",
        "optimizer.learning_rate=0", "optimizer.weight_decay=0", "schedule.warmup=0",
    )  # fmt: skip
    out = run(capsys, train.main, *words).out
    assert "validation/loss has not improved for 2 evaluations, the last after step 6" in out
    assert "best   validation/loss" in out
    assert saved_steps(folder / "checkpoints") == [2, 6]
    assert json.loads((folder / "test.json").read_text())["step"] == 6
    first, last = (
        json.loads(run(capsys, evaluate.main, folder, "--json", f"--step={step}").out)
        for step in (2, 6)
    )
    assert (first.pop("step"), last.pop("step")) == (2, 6)
    assert first == pytest.approx(last, rel=1e-5)
    again = run(capsys, train.main, "--resume", folder).out
    assert "to go on, resume with a larger training.patience" in again
    training = TrainingConfig(steps=40, keep_best="validation/loss")
    assert BestMetric.resume(training, folder / "metrics.jsonl", 6).step == 2


def test_a_metric_that_no_evaluation_gives_is_refused_with_those_there_are(tmp_path, capsys):
    words = (f"run={tmp_path / 'run'}", "training.evaluate_every=2", "training.keep_best=loss")
    ended = run(capsys, train.main, TINY_MEDIA, *words)
    assert ended.code == 2
    assert (
        "training.keep_best=loss: evaluations of this run give validation/exact_match_" in ended.err
    )


def test_media_are_looked_up_again_and_in_the_folder_of_their_own_run(tmp_path, monkeypatch):
    """The records of both folders are the same bytes, and name their images relative to where the run starts."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        save_questions(folder, 4)
    words = [
        f"checkpoint={checkpoint}",
        "data=data.json",
        "images=images",
        f"data.cache={tmp_path / 'cache'}",
    ]
    config = load("llava_style", [*words, "data.sources.chat.test=data.json"])

    def unreadable(
        folder: Path, opened: Callable[..., dict[str, Source]] = evaluation_sources
    ) -> list[int]:
        monkeypatch.chdir(folder)
        (source,) = opened(config, "test" if opened is open_sources else ("test",), folder).values()
        return list(select_usable(range(4), source.facts, 4)[1])

    photo = folders[0] / "images" / "2.jpg"
    photo.rename(tmp_path / "away.jpg")
    assert [unreadable(folder) for folder in folders] == [[2], []]
    # as it was looked up there, though the other came later
    assert unreadable(folders[0], open_sources) == [2]
    (tmp_path / "away.jpg").rename(photo)
    assert [unreadable(folder) for folder in folders] == [[], []]
