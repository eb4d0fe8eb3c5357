"""Preferences and rewards of answers that share a prompt and an image, against transformers, every answer apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from commands import run
from llava_folder import PATCH, SIDE
from parity import compare_gradients
from preferences import (
    Asked,
    Theirs,
    run_config,
    save_judged,
    save_log_probs,
    save_pairs,
    torch_steps,
    write_lines,
)
from tiny_run import MESHES, gradients, load_steps, make_executor, paths, worst_leaf

from mmjax import evaluate
from mmjax.batch import Microbatch, TextBatch
from mmjax.config import Config, LoraConfig, MeshConfig
from mmjax.config.loading import find_config, load
from mmjax.config.losses import Dpo, Grpo, Kto, Orpo
from mmjax.config.model import module_names
from mmjax.config.validation import validate
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.answer_records import REFERENCE
from mmjax.data.sources.opening import open_sources
from mmjax.hf.families import frozen as with_frozen
from mmjax.losses.dpo import CHOSEN, REJECTED
from mmjax.losses.objective import mean_measures
from mmjax.parallel.sharding import activations_on
from mmjax.planning.flops import model_flops
from mmjax.planning.work import useful_work
from mmjax.runtime.devices import mesh_topology
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import hyperparameters, parameter_shardings
from mmjax.runtime.weights import load_pretrained
from mmjax.train import train

ONE = MeshConfig(1)
BETA = 0.3


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, list[Asked]]:
    return save_place(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> tuple[Path, list[Asked]]:
    """The same with an LLM whose tokens see 23 before them, so that no answer's last token sees all of its prompt."""
    return save_place(tmp_path_factory.mktemp("windowed"), window=24)


def save_place(folder: Path, window: int = 0) -> tuple[Path, list[Asked]]:
    """The checkpoint and its pairs, and the same with the checkpoint's own log-probabilities of every answer."""
    asked = save_pairs(folder, window=window)
    lines = save_log_probs(folder, asked, "exact.jsonl")
    for line in lines:  # off the policy's own, so that the first loss is not that of equal models
        line |= {key: line[key] + shift for key, shift in zip(REFERENCE, (0.5, -0.7), strict=True)}
    write_lines(folder / "stored.jsonl", lines)
    return folder, asked


def started(
    config: Config, mesh: MeshConfig = ONE, accumulates: bool = True
) -> tuple[Executor, Any]:
    """The programs of a config and the state of step 0."""
    executor = make_executor(config, mesh, accumulates)
    given = load_pretrained(
        executor.model, parameter_shardings(executor.model, executor.mesh, executor.rules)
    )
    return executor, executor.init(jax.random.key(0), given)


def our_steps(
    config: Config, executor: Executor, state: Any, steps: Sequence[Sequence[Microbatch]]
) -> list[Any]:
    """The reports of one update per step, on the host. `state` is donated."""
    accumulated = executor.zeros()
    reports = []
    for step, batches in enumerate(steps):
        hyper = hyperparameters(config, step)
        put = [executor.put(batch) for batch in batches]
        state, accumulated, report = executor.step(state, accumulated, put, hyper)
        reports.append(jax.device_get(report))
    return reports


def samples_of(batches: Sequence[Microbatch]) -> list[int]:
    return sorted(
        {int(owner) for batch in batches for owner in np.unique(batch.text.owner) if owner >= 0}
    )


def odds_ratio_loss(better: torch.Tensor, worse: torch.Tensor, beta: float) -> torch.Tensor:
    """The loss of a pair as the ORPO paper has it, of the mean log-probabilities of its answers."""
    odds = [x.exp() / (1 - x.exp()) for x in (better, worse)]
    return -better - beta * torch.nn.functional.logsigmoid(torch.log(odds[0] / odds[1]))


def loss_there(
    model: torch.nn.Module,
    place: tuple[Path, list[Asked]],
    batches: Sequence[Microbatch],
    loss: Dpo | Orpo,
) -> torch.Tensor:
    """Formula 7 of the DPO paper, or 6 of the ORPO paper, over the pairs of these microbatches.

    Each answer has a prompt of its own.
    """
    folder, asked = place
    theirs, samples = Theirs(folder / "checkpoint", model), samples_of(batches)
    lines = [json.loads(line) for line in (folder / "stored.jsonl").read_text().splitlines()]
    total = torch.zeros(())
    for number in samples:
        ratios = []
        for answer in ("chosen", "rejected"):
            said = theirs.log_probs(
                asked[number].image, asked[number].question, getattr(asked[number], answer)
            )
            if loss.kind == "orpo":
                ratios.append(said.mean())
                continue
            reference = lines[number][f"ref_{answer}_logps"] if loss.reference == "stored" else 0.0
            ratio = said.sum() - reference
            ratios.append(ratio / len(said) if loss.loss_type == "sigmoid_norm" else ratio)
        if loss.kind == "orpo":
            total = total + odds_ratio_loss(*ratios, loss.beta)
        else:
            total = total - torch.nn.functional.logsigmoid(loss.beta * (ratios[0] - ratios[1]))
    return total / len(samples)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("where", "loss"),
    [
        ("place", Dpo(BETA, reference="stored")),
        ("place", Dpo(BETA, reference="none")),
        ("place", Dpo(2.0, "sigmoid_norm", "stored")),
        ("windowed", Dpo(BETA, reference="stored")),
        ("place", Orpo(0.5)),
    ],
)
def test_ten_steps_on_packed_pairs_are_those_of_answers_apart(where, request, tmp_path, loss):
    place = request.getfixturevalue(where)
    config = run_config(place[0], loss, "stored.jsonl")
    steps = load_steps(config, tmp_path, 10)
    assert all(len(batches) == 2 for batches in steps)
    executor, state = started(config)
    first = gradients(executor, state, steps[0])
    theirs = Theirs(place[0] / "checkpoint")
    loss_there(theirs.model, place, steps[0], loss).backward()
    compare_gradients(
        executor.model,
        first.gradients,
        theirs.model,
        lambda model: loss_there(model, place, steps[0], loss),
    )
    told = torch_steps(
        Theirs(place[0] / "checkpoint").model,
        [partial(loss_there, place=place, batches=b, loss=loss) for b in steps],
        config,
    )
    reports = our_steps(config, executor, state, steps)
    ours = [(r.losses.loss.sum() / r.losses.weight.sum(), r.gradient_norm) for r in reports]
    np.testing.assert_allclose(ours, told, atol=1e-3, rtol=1e-3)
    assert told[-1][0] < 0.9 * told[0][0]
    margins = [float(r.losses.measures["rewards/margins"] / r.losses.weight.sum()) for r in reports]
    assert margins[-1] > margins[0]


def losses_of(config: Config, batches: Sequence[Microbatch], mesh: MeshConfig = ONE) -> list[Any]:
    """Every token's loss and the measures of each of these batches of one shape, without gradients."""
    executor, state = started(config, mesh)

    def compute(params: Any, batch: Microbatch) -> Any:
        with activations_on(executor.mesh, executor.rules):
            return executor.objective(params, batch)[1:]

    program = jax.jit(compute)
    return [
        jax.device_get(program(executor.parameters(state), *executor.put(batch)))
        for batch in batches
    ]


def test_no_answer_of_a_pair_sees_the_other_and_a_planted_leak_is_noticed(place, tmp_path):
    config = run_config(place[0], Dpo(BETA, reference="none"))
    batch = load_steps(config, tmp_path, 1)[0][0]
    text = batch.text
    leaking = text._replace(sees=np.where(text.kind == REJECTED, text.sees | CHOSEN, text.sees))

    def changed(text: TextBatch, answer: int) -> Microbatch:
        """The batch with another token in the middle of one answer."""
        token = text.token.copy()
        here = tuple(np.argwhere(text.kind == answer)[3])
        token[here] = (token[here] + 1) % 250
        return batch._replace(text=text._replace(token=token))

    batches = [batch, changed(text, CHOSEN), changed(text, REJECTED), batch._replace(text=leaking)]
    whole, other_chosen, other_rejected, leaks, leaked = losses_of(
        config, [*batches, changed(leaking, CHOSEN)]
    )
    chosen, rejected = (lambda of: of[1]["logps/chosen"]), (lambda of: of[1]["logps/rejected"])
    assert np.array_equal(rejected(other_chosen), rejected(whole))
    assert not np.array_equal(chosen(other_chosen), chosen(whole))
    assert np.array_equal(chosen(other_rejected), chosen(whole))
    assert not np.array_equal(rejected(other_rejected), rejected(whole))
    assert not np.array_equal(rejected(leaked), rejected(leaks))


def test_a_pair_takes_the_work_of_one_image_and_one_prompt_and_of_both_answers(place, tmp_path):
    config = run_config(place[0], Dpo(BETA, reference="none"))
    batches = load_steps(config, tmp_path, 1)[0]
    model, frozen = config.model, frozenset(module_names(config.model)) - {"llm"}
    config = replace(config, model=with_frozen(model, sorted(frozen)))
    image = (SIDE // PATCH) ** 2 + 1  # with its class token
    positions = pairs = samples = 0
    for batch in batches:
        text = batch.text
        for owner in samples_of([batch]):
            answers = [
                int(((text.owner == owner) & (text.kind == bit)).sum())
                for bit in (CHOSEN, REJECTED)
            ]
            prompt = int((text.owner == owner).sum()) - sum(answers)
            positions += prompt + sum(answers)
            pairs += prompt * (prompt + 1) // 2 + sum(
                n * prompt + n * (n + 1) // 2 for n in answers
            )
            samples += 1
    work = [useful_work(model, batch.text, batch.items) for batch in batches]
    assert sum(w["vision"].inputs for w in work) == samples * image
    assert sum(w["llm"].positions for w in work) == positions
    assert sum(w["llm"].pairs for w in work) == pairs
    # The reference runs the LLM again, and no encoder that has no adapters.
    adapted = replace(
        with_frozen(model, module_names(model)), lora={"all": LoraConfig(("llm.*",), 4)}
    )
    once, twice = (
        model_flops(adapted, work[0], frozenset(module_names(model)), again)
        for again in (False, True)
    )
    plain = model_flops(model, work[0], frozenset())["llm"]
    assert twice["vision"] == once["vision"]
    assert twice["llm"].forward == once["llm"].forward + plain.forward
    loss = {True: Dpo(), False: Dpo(reference="none")}
    needed = {
        again: load_needed(replace(config, model=adapted, loss=of), tmp_path)
        for again, of in loss.items()
    }
    assert needed[True] - needed[False] == sum(
        model_flops(model, w, frozenset())["llm"].forward for w in work
    )


def load_needed(config: Config, folder: Path) -> float:
    """FLOPs that the loader says the first step needs."""
    index = build_index(open_sources(config, "train", folder), config.model.item_modules)
    planner, layout = make_planner(index, config, [1.0])
    index.save(folder / "needed")
    loader = StepLoader(config, planner.grouper.budget, layout, folder / "needed", folder, range(1))
    return float(loader(0).needed_flops)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layers", [("llm.*",), ("llm.*attention*", "vision.layers.*")], ids=["llm", "llm and vision"]
)
def test_without_adapters_the_model_is_the_reference_whose_log_probabilities_are_stored(
    place, tmp_path, layers
):
    base = run_config(place[0], Dpo(BETA, reference="stored"), "exact.jsonl")
    model = replace(
        with_frozen(base.model, module_names(base.model)), lora={"all": LoraConfig(layers, 4)}
    )
    base = replace(base, model=model, optimizer=replace(base.optimizer, learning_rate=0.02))
    losses = []
    for loss in (base.loss, replace(base.loss, reference="adapters_off")):
        config = replace(base, loss=loss)
        validate(config)
        folder = tmp_path / loss.reference
        folder.mkdir()
        executor, state = started(config)
        reports = our_steps(config, executor, state, load_steps(config, folder, 5))
        losses.append([float(r.losses.loss.sum() / r.losses.weight.sum()) for r in reports])
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-3)
    np.testing.assert_allclose(losses[1][0], np.log(2), atol=1e-6)
    assert losses[1][-1] < 0.97 * np.log(2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("where", "mesh"),
    [
        ("place", "data=2 x fsdp=2 x tensor=2"),
        ("place", "fsdp=4 x context=2, heads"),
        ("windowed", "fsdp=4 x context=2, heads"),
    ],
)
def test_losses_and_gradients_of_pairs_are_the_same_on_every_mesh(where, request, tmp_path, mesh):
    place = request.getfixturevalue(where)
    config = run_config(place[0], Dpo(BETA, reference="stored"), "stored.jsonl")
    assert_same_on(config, mesh, tmp_path)


def assert_same_on(config: Config, mesh: str, tmp_path: Path) -> None:
    """One step's loss, measures and gradients are those of one device."""
    found = {}
    for name in ("one device", mesh):
        executor, state = started(replace(config, mesh=MESHES[name]), MESHES[name])
        topology = mesh_topology(executor.mesh, MESHES[name])
        (tmp_path / name).mkdir()
        batches = load_steps(config, tmp_path / name, 1, topology)[0]
        found[name] = gradients(executor, state, batches)
    one, many = found.values()
    np.testing.assert_allclose(
        many.losses.loss / many.losses.weight, one.losses.loss / one.losses.weight, rtol=1e-5
    )
    for name, total in one.losses.measures.items():
        np.testing.assert_allclose(many.losses.measures[name], total, rtol=1e-4, atol=1e-4)
    # A bias of keys moves all scores of a query alike: its gradient is rounding alone.
    many_leaves, one_leaves = (
        {name: x for name, x in paths(sums.gradients).items() if not name.endswith("key.bias")}
        for sums in (many, one)
    )
    assert worst_leaf(many_leaves, one_leaves)[0] < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["data=2 x fsdp=2 x tensor=2", "data=2 x context=2 x tensor=2"])
def test_a_divergence_is_of_all_judged_answers_of_a_microbatch_on_every_mesh(place, tmp_path, mesh):
    folder, asked = place
    save_judged(folder, asked)
    config = run_config(folder, Kto(BETA, reference="none"), "judged.jsonl")
    assert_same_on(replace(config, batch=replace(config.batch, microbatches=1)), mesh, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_ten_steps_on_judged_answers_are_those_of_answers_apart(place, tmp_path, capsys, kind):
    folder, asked = place
    records = save_judged(folder, asked)
    stored = folder / "judged-stored.jsonl"
    options = ["--data", str(folder / "judged.jsonl"), "--images", str(folder / "data/images")]
    given = [*options, "--log-probs", stored, "device=cpu", f"data.cache={tmp_path}"]
    ended = run(capsys, evaluate.main, folder / "checkpoint", *given)
    assert "12 answers and as many of other records" in ended.out, ended
    lines = [json.loads(line) for line in stored.read_text().splitlines()]
    assert [line["kl_completion"] for line in lines] == [
        records[n - 1]["completion"] for n in range(len(records))
    ]
    theirs = Theirs(folder / "checkpoint")
    with torch.no_grad():
        for line, one in zip(lines, asked, strict=True):
            for answer, key in (("completion", "ref_logps"), ("kl_completion", "ref_KL_logps")):
                said = theirs.log_probs(one.image, one.question, line[answer]).sum().item()
                assert line[key] == pytest.approx(said, abs=2e-4)
            line["ref_KL_logps"] -= 2.0  # so that the divergence is above 0
    write_lines(stored, lines)
    loss = Kto(BETA, kind, 1.0, 1.7, "stored")
    config = run_config(folder, loss, stored.name)

    def judged_there(model: torch.nn.Module, batches: Sequence[Microbatch]) -> torch.Tensor:
        there, losses = Theirs(folder / "checkpoint", model), []
        for batch in batches:
            ratios: dict[str, list[torch.Tensor]] = {"completion": [], "kl_completion": []}
            signs = []
            for number in samples_of([batch]):
                line, one = lines[number], asked[number]
                for answer, key in (("completion", "ref_logps"), ("kl_completion", "ref_KL_logps")):
                    said = there.log_probs(one.image, one.question, line[answer]).sum()
                    ratios[answer].append(said - line[key])
                signs.append(1.0 if line["label"] else -1.0)
            divergence = (
                torch.stack(ratios["kl_completion"]).mean().detach().clamp(min=0)
                if kind == "kto"
                else 0.0
            )
            sign = torch.tensor(signs)
            weight = torch.where(sign > 0, 1.0, 1.7)
            own = torch.stack(ratios["completion"])
            losses.append(weight * (1 - torch.sigmoid(BETA * sign * (own - divergence))))
        return torch.cat(losses).mean()

    steps = load_steps(config, tmp_path, 10)
    executor, state = started(config)
    first = gradients(executor, state, steps[0])
    judged_there(theirs.model, steps[0]).backward()
    compare_gradients(
        executor.model, first.gradients, theirs.model, lambda model: judged_there(model, steps[0])
    )
    told = torch_steps(
        Theirs(folder / "checkpoint").model,
        [partial(judged_there, batches=b) for b in steps],
        config,
    )
    reports = our_steps(config, executor, state, steps)
    ours = [(r.losses.loss.sum() / r.losses.weight.sum(), r.gradient_norm) for r in reports]
    np.testing.assert_allclose([x[0] for x in ours], [x[0] for x in told], atol=1e-3, rtol=1e-3)
    # AdamW makes of the rounding of small gradients other updates, which the norm shows first.
    np.testing.assert_allclose(ours[:5], told[:5], atol=1e-3, rtol=1e-3)
    assert told[-1][0] < told[0][0]
    if kind == "kto":
        assert (
            mean_measures(loss, reports[0].losses.measures, reports[0].losses.weight.sum())["kl"]
            > 0.5
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_ten_steps_on_rollouts_are_those_of_answers_apart(place, tmp_path, kind):
    folder, asked = place
    rng = np.random.default_rng(3)
    theirs, lines = Theirs(folder / "checkpoint"), []
    for line, one in zip((folder / "pairs.jsonl").read_text().splitlines(), asked, strict=True):
        drawn = [
            rng.integers(0, 250, rng.integers(1, 6)).tolist() for _ in range(rng.integers(2, 5))
        ]
        with torch.no_grad():
            said = [theirs.log_probs(one.image, one.question, tokens).numpy() for tokens in drawn]
        old = [(x + 0.3 * rng.standard_normal(len(x))).tolist() for x in said]
        advantages = rng.standard_normal(len(drawn)).tolist()
        answers = {"completion_ids": drawn, "logprobs": old, "advantages": advantages}
        lines.append({"prompt": one.question, "images": json.loads(line)["images"]} | answers)
    write_lines(folder / f"{kind}.jsonl", lines)
    loss = Grpo(0.2, 0.28, loss_type=kind)
    config = run_config(folder, loss, f"{kind}.jsonl")

    def rollouts_there(model: torch.nn.Module, batches: Sequence[Microbatch]) -> torch.Tensor:
        there, terms = Theirs(folder / "checkpoint", model), []
        for number in samples_of(batches):
            columns = (lines[number][key] for key in ("completion_ids", "logprobs", "advantages"))
            for tokens, old, advantage in zip(*columns, strict=True):
                log_probs = there.log_probs(asked[number].image, asked[number].question, tokens)
                ratio = torch.exp(log_probs - torch.tensor(old))
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
        return (
            torch.cat(terms).mean()
            if kind == "dapo"
            else torch.stack([t.mean() for t in terms]).mean()
        )

    steps = load_steps(config, tmp_path, 10)
    told = torch_steps(
        Theirs(folder / "checkpoint").model,
        [partial(rollouts_there, batches=b) for b in steps],
        config,
    )
    reports = our_steps(config, *started(config), steps)
    ours = [(r.losses.loss.sum() / r.losses.weight.sum(), r.gradient_norm) for r in reports]
    np.testing.assert_allclose(ours, told, atol=1e-3, rtol=1e-3)
    assert told[-1][0] < told[0][0]


@pytest.mark.exhaustive
def test_log_probabilities_that_evaluate_writes_are_those_of_transformers(place, tmp_path, capsys):
    folder = place[0]
    bad = json.dumps({"prompt": "What?", "chosen": "This."})
    pairs = (folder / "pairs.jsonl").read_text()
    (folder / "with_bad.jsonl").write_text(4 * (bad + "\n") + pairs)
    out = tmp_path / "stored.jsonl"
    given = [
        "--data",
        folder / "with_bad.jsonl",
        "--images",
        folder / "data" / "images",
        "--log-probs",
        out,
    ]
    ended = run(
        capsys, evaluate.main, folder / "checkpoint", *given, "device=cpu", f"data.cache={tmp_path}"
    )
    assert "12 pairs" in ended.out, ended
    assert (
        f"left out asked[2]: {folder}/with_bad.jsonl:3: has no rejected answer\nleft out 1 more"
        in ended.out
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    first, written = records[:4], records[4:]
    assert first == 4 * [json.loads(bad)]
    exact = [json.loads(line) for line in (folder / "exact.jsonl").read_text().splitlines()]
    for line, wanted in zip(written, exact, strict=True):
        assert line.keys() == wanted.keys()
        for key in REFERENCE:
            assert line.pop(key) == pytest.approx(wanted.pop(key), abs=1e-3)
        assert line == wanted


@pytest.mark.exhaustive
def test_a_tiny_vlm_learns_which_of_two_answers_is_right(tmp_path):
    config = load(
        "tiny_dpo",
        [f"run={tmp_path / 'run'}", "data.workers=0", "device=cpu", "training.evaluate_every=0"],
    )
    train(config, find_config("tiny_dpo"), devices=jax.devices()[:1])
    scores = json.loads((tmp_path / "run" / "test.json").read_text())
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0.2 < first["rewards/accuracies"] < 0.8
    assert scores["rewards/accuracies"] >= 0.9


@pytest.mark.exhaustive
def test_the_recipe_trains_adapters_against_the_checkpoint_and_leaves_out_a_pair_without_a_rejected_answer(
    place,
):
    folder = place[0]
    (folder / "some_bad.jsonl").write_text(
        '{"prompt": "What?", "chosen": "This."}\n' + (folder / "pairs.jsonl").read_text()
    )
    given = [
        f"checkpoint={folder / 'checkpoint'}",
        f"images={folder / 'data' / 'images'}",
        "data.max_bad_share=0.1",
    ]
    given += [f"{key}={folder / 'some_bad.jsonl'}" for key in ("data", "validation")]
    small = [
        "batch.size.count=4",
        "batch.rows.llm=2",
        "batch.rows.vision=2",
        "model.lora.llm.rank=2",
        "data.workers=0",
    ]
    length = [
        "training.steps=4",
        "schedule.warmup=1",
        "optimizer.learning_rate=0.01",
        f"data.cache={folder / 'cache'}",
    ]
    length += [
        "training.evaluate_every=3",
        "training.checkpoint_every=0",
        "mesh.fsdp=1",
        "device=cpu",
    ]
    config = load(
        "llava_dpo",
        [*given, *small, *length, "training.precision=float32", f"run={folder / 'run'}"],
    )
    train(config, find_config("llava_dpo"), devices=jax.devices()[:1])
    records = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    margins = [record["rewards/margins"] for record in records if "rewards/margins" in record]
    assert len(margins) == 4
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert abs(margins[-1]) > 1e-3
    assert any("validation/rewards/accuracies" in record for record in records)
    assert "has no rejected answer" in (folder / "run" / "quarantine.jsonl").read_text()
