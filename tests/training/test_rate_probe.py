"""Two rows tell what positions and pairs take, for what is shown and for plans; a run trains as if nothing had been."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TINY, TINY_DRAWING, run
from restarts import saved_state, steps_of
from started import finish, launch
from test_flops import make_model

from mmjax import plan, train
from mmjax.balance.mask_work import Mask, allowed_keys
from mmjax.batch import TextBatch
from mmjax.config import DecoderConfig
from mmjax.config.model import with_changes
from mmjax.planning.flops import executed
from mmjax.planning.hardware import ATTENTION_EFFICIENCY, COMPUTE_EFFICIENCY
from mmjax.planning.measured_file import Probed, read_probed
from mmjax.planning.prices import pair_costs
from mmjax.planning.work import allowed_pairs, pairs_beyond_window
from mmjax.training import loop, rate_probe
from mmjax.training.rate_probe import (
    ProbedRow,
    cut_rows,
    fit_rates,
    fullest_pairs,
    reached_shares,
    total_of,
)

WORDS = (
    "model.llm.attention=blockwise", "batch.microbatches=2", "batch.shapes=1", "training.steps=6",
    "training.evaluate_every=0", "training.keep=3",
)  # fmt: skip
AFTER = 3  # steps, in place of more


def text(sample: Any, **others: Any) -> TextBatch:
    """Rows of these samples, -1 = padding, whose tokens are in order and see each other both ways."""
    sample = np.array(sample, np.int32)
    order = np.broadcast_to(np.arange(sample.shape[1], dtype=np.int32), sample.shape)
    fields = dict.fromkeys(TextBatch._fields, sample) | {
        "pos": order,
        "span": 0 * sample + 1,
        "kind": 0 * sample + 2,
    }
    return TextBatch(**fields | {"sees": 0 * sample, "slots": {}, "send": {}} | others)


def llm(**changes: Any) -> DecoderConfig:
    shape = {
        "layers": 2,
        "width": 8,
        "heads": 1,
        "kv_heads": 1,
        "head_width": 8,
        "mlp_width": 8,
        "vocab": 8,
    }
    return DecoderConfig(**shape | changes)


# --------------------------------------------------------------------------------------------------
# two rows


def test_rows_are_cut_into_samples_as_long_as_each_other_and_padding_stays():
    rows = text([[0, 0, 1, -1, 2, 2, 2], [5, 5, -1, -1, -1, -1, -1]])
    assert cut_rows(rows, 1).sample.tolist() == [[0, 0, 0, -1, 0, 0, 0], [0, 0, -1, -1, -1, -1, -1]]
    assert cut_rows(rows, 3).sample.tolist() == [[0, 0, 1, -1, 1, 2, 2], [0, 1, -1, -1, -1, -1, -1]]
    moved = rows._replace(pos=rows.pos[:, ::-1])  # by context parallelism
    assert cut_rows(moved, 3).sample[0].tolist() == [2, 2, 1, -1, 1, 0, 0]
    empty = text([[-1, -1]])
    assert cut_rows(empty, 64).sample.tolist() == [[-1, -1]]


@pytest.mark.parametrize("samples", [1, 3, 64])
def test_pairs_of_cut_rows_are_those_that_their_mask_allows(samples):
    rows = cut_rows(
        text([[0] * 90, [1] * 60 + [-1] * 30, [0] * 10 + [-1] * 80, [-1] * 90]), samples
    )
    allowed = allowed_pairs(rows)
    assert fullest_pairs(llm(), rows, 4, 1) == allowed.max()
    assert fullest_pairs(llm(), rows, 2, 1) == allowed[:2].sum()
    window = 8
    mean = allowed - pairs_beyond_window(rows, window) / 2  # one of two layers has it
    windowed = llm(windowed=(0,), window=window)
    # of a sample whole pairs
    assert fullest_pairs(windowed, rows, 1, 1) == pytest.approx(mean.sum(), rel=2e-3)


def test_devices_that_share_a_row_count_by_the_one_with_most():
    rows = cut_rows(text([[0] * 8]), 1)
    keys = allowed_keys(Mask._make(getattr(rows, field)[0] for field in Mask._fields))
    assert keys.tolist() == list(range(1, 9))
    assert fullest_pairs(llm(), rows, 1, 2) == 2 * keys[4:].sum()


def test_rates_solve_both_rows_and_rows_that_tell_nothing_give_none():
    wanted = Probed(position=1.25, pair=0.8)
    rows, items, pair = 0.3, 0.02, 1e-9
    one, many = (ProbedRow(1.25 * rows + 0.8 * (items + pair * n), n) for n in (1e8, 2e6))
    probed = fit_rates(rows, items, pair, one, many)
    assert (probed.position, probed.pair) == pytest.approx((wanted.position, wanted.pair))
    assert fit_rates(rows, items, pair, one._replace(seconds=many.seconds), many) is None
    assert fit_rates(rows, items, pair, one._replace(pairs=many.pairs), many) is None
    # positions would take less than 0
    assert fit_rates(rows, items, pair, one._replace(seconds=100.0), many) is None


@pytest.mark.parametrize("backend", ["auto", "blockwise"])
def test_where_all_takes_twice_as_long_as_assumed_the_shares_are_half_of_those_assumed(backend):
    towers = ("llm", "vision", "audio")
    model = with_changes(make_model(), {name: {"attention": backend} for name in towers})
    prices, peak = pair_costs(model), 1e15
    pairs, positions = (
        {"llm": 3e7, "vision": 2e6, "audio": 1e6},
        {"llm": 8192, "vision": 4096, "audio": 3000},
    )
    rows = float(prices.position @ list(positions.values())) / peak
    llm, *others = prices.pair * list(pairs.values()) / peak
    one, many = (ProbedRow(2 * (rows + sum(others) + llm / n), pairs["llm"] / n) for n in (1, 64))
    probed = fit_rates(rows, sum(others), llm / pairs["llm"], one, many)
    assert (probed.position, probed.pair) == pytest.approx((2, 2))
    shape = {name: (1, n) for name, n in positions.items()}
    flops = [
        total_of(executed(model, shape, frozenset(), pairs=n))
        for n in (dict.fromkeys(towers, 0.0), pairs)
    ]
    shares = reached_shares(*flops, one.seconds, probed.pair * (llm + sum(others)), peak)
    assumed = {"products": COMPUTE_EFFICIENCY, "attention": ATTENTION_EFFICIENCY}
    assert shares == pytest.approx({key: assumed[key] / 2 for key in shares}, rel=1e-3)
    assert ("attention" in shares) == (backend == "auto")


# --------------------------------------------------------------------------------------------------
# a run


class Probes:
    """Probes that run as they do, and then took seconds that go by their pairs."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int = AFTER) -> None:
        self.pairs: list[float] = []
        self.count, self.time = rate_probe.fullest_pairs, rate_probe.time_gradients
        patch.setattr(rate_probe, "fullest_pairs", self.counted)
        patch.setattr(rate_probe, "time_gradients", self.timed)
        patch.setattr(loop, "PROBED_AFTER", after)

    def counted(self, *args: Any) -> float:
        self.pairs.append(self.count(*args))
        return self.pairs[-1]

    def timed(self, *args: Any) -> tuple[list[float], Any]:
        seconds, sums = self.time(*args)
        assert len(seconds) == 2
        assert min(seconds) > 0
        return [99.0, 1.0 + 0.01 * self.pairs[-1]], sums


def check_that_probing_changes_nothing(
    config: str, words: tuple[str, ...], runs: Path, capsys: Any
) -> tuple[Path, str]:
    """Train with probes and without; return the run with them, and what it printed."""
    plain, probed = (runs / f"{name}_{Path(config).stem}" for name in ("plain", "probed"))
    assert run(capsys, train.main, config, *words, f"run={plain}").code == 0
    with pytest.MonkeyPatch.context() as patch:
        probes = Probes(patch)
        ended = run(capsys, train.main, config, *words, f"run={probed}")
    assert ended.code == 0, ended
    assert len(probes.pairs) == 2
    assert not (plain / "rates.json").exists()
    expected, found = steps_of(plain), steps_of(probed)
    assert list(found) == list(expected) == list(range(1, 7))
    # Seconds of a start have names too, such as "computing the test loss".
    losses = (key for key in expected[1] if "loss" in key and not key.startswith("seconds/"))
    same = ("batch", "samples", "gradient_norm", "worst", *losses)
    for step, record in expected.items():
        assert [found[step][key] for key in same] == [record[key] for key in same]
        assert found[step]["programs_compiled"] == 0
        sheet = found[step].get("straggler_wait_sheet")
        assert sheet == (record["straggler_wait"] if step > AFTER else None)
    wanted, state = saved_state(plain, 6), saved_state(probed, 6)
    assert list(state) == list(wanted)
    assert all(np.array_equal(state[name], wanted[name]) for name in wanted)
    return probed, ended.out


def test_a_run_that_probes_trains_to_the_same_bits_and_its_rates_are_for_plans_and_later_starts(
    runs, capsys
):
    folder, out = check_that_probing_changes_nothing(TINY, WORDS, runs, capsys)
    path = folder / "rates.json"
    (line,) = (line for line in out.splitlines() if line.startswith("rates"))
    assert (
        "times as long as assumed; waits are by what was measured, and plans with --measured"
        in line
    )
    assert " (sheet " in out
    stored = json.loads(path.read_text())
    assert list(stored) == ["device", "products", "probed"]  # blocks attend by products
    rates = read_probed(path, "cpu")
    assert rates is not None
    assert rates.pair > 1.5 * rates.position > 0

    words = [word for word in WORDS if not word.startswith("training.")]
    planned = run(capsys, plan.main, TINY, "cluster=here", "--measured", path, *words)
    assert planned.code == 0, planned
    assert f"measured ({path})" in planned.out
    refused = run(capsys, plan.main, TINY, "cluster=h100x8", "--measured", path, *words)
    assert refused.code == 2
    assert (
        "device: these rates were measured on cpu, and the plan is for h100; remove the key"
        in refused.err
    )

    # Gone on with, the run has its rates from its first step on; those of another device are
    # measured again.
    for device, probes_run in (("cpu", 0), ("NVIDIA H200", 2)):
        shutil.rmtree(folder / "checkpoints" / "6")
        (folder / "test.json").unlink()
        path.write_text(json.dumps(stored | {"device": device}))
        with pytest.MonkeyPatch.context() as patch:
            probes = Probes(patch, after=1)
            ended = run(capsys, train.main, TINY, *WORDS, f"run={folder}", "--resume")
        assert ended.code == 0, ended
        assert len(probes.pairs) == probes_run
        measured = {
            step: "straggler_wait_sheet" in record
            for step, record in steps_of(folder).items()
            if step > 4
        }
        assert measured == {5: device == "cpu", 6: True}


@pytest.mark.exhaustive
def test_dropout_experts_and_generators_are_as_if_nothing_had_been_probed(runs, capsys):
    """With one microbatch, whose gradients no sums take over."""
    words = tuple(word for word in WORDS if not word.startswith("batch.microbatches"))
    experts = ("layers=0", "count=4", "per_token=2", "width=8")
    words += ("model.llm.dropout=0.1", *(f"model.llm.experts.{word}" for word in experts))
    check_that_probing_changes_nothing(TINY_DRAWING, words, runs, capsys)


@pytest.mark.exhaustive
def test_two_processes_probe_together_and_train_on_to_the_losses_of_one(runs):
    words = (*WORDS, "training.steps=20", "training.checkpoint_every=0")
    one, two = runs / "one_process", runs / "two_processes"
    for folder, processes in ((one, 1), (two, 2)):
        ended = finish(launch(processes, TINY, *words, f"run={folder}", devices=8 // processes))
        assert ended.code == 0, ended
        assert "; 0 programs compiled after the start" in ended.out
        assert (folder / "rates.json").exists() or "rates  two rows tell none" in ended.out
    assert [r["loss"] for r in steps_of(two).values()] == pytest.approx(
        [r["loss"] for r in steps_of(one).values()], rel=1e-4
    )
