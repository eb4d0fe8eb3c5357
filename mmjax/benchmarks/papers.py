"""Predict the pipeline tables of Cornstarch, OmniBal and MMScale with one simulator and one set of constants."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from mmjax.benchmarks import papers_tables as tables
from mmjax.benchmarks.baselines.partition import BASELINES, cut_evenly
from mmjax.benchmarks.harness import Measurement, Options, option
from mmjax.benchmarks.papers_tables import FrozenRow, OmniBalRow
from mmjax.config import ModelConfig
from mmjax.cost.table import module_parameters
from mmjax.planning.flops import executed, frozen_modules, model_flops
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.partition import Chain, fastest_partition, iteration_seconds, partition
from mmjax.planning.reorder import reorder
from mmjax.planning.schedules import ScheduleName, StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, simulate
from mmjax.planning.work import Work, merged_positions

# For every row alike, where the papers give no figure.
ENCODER_RATE = 0.68  # of the LLM's FLOP/s: a layer of InternViT-6B then takes 1.03 times one of InternLM2-20B
NETWORK = 12.5e9  # bytes per second of one GPU: 4 x 200 Gbit/s for 8 (OmniBal appendix A.9)
OMNIBAL_MICROBATCHES = 56  # InternVL-Chat-1.5's batch of 1,024 over DP 4, with 4.6 samples in each
REORDER_SIGMA = 0.6  # of the logarithm of an encoder's times

SAME_LAYERS = 1.5  # by which factor two totals of the same layers may differ
# Other values of SAME_LAYERS and ENCODER_RATE, to see what the share of right directions owes to these.
SENSITIVITY = (
    (SAME_LAYERS, ENCODER_RATE),
    *((factor, ENCODER_RATE) for factor in (1.8, 2.0, np.inf)),
    *((SAME_LAYERS, rate) for rate in (0.72, 0.75, 1.0)),
)
TABLE_6 = "OmniBal table 6"
MIB = 2**20
NEAR = 0.05  # up to this distance a reported ratio says that both sides are about equal


@dataclass(frozen=True)
class Row:
    """A figure of a paper, what is predicted for it, and what our own partition gains."""

    source: str
    case: str
    reported: float | None = None
    predicted: float | None = None
    neutral: float | None = 1.0  # where neither of two sides is better; None where there are no two
    ours: Mapping[str, float] = field(default_factory=dict)  # speed-up of our partition over others, by name
    contradiction: str = ""  # why the figure cannot follow from what the paper says elsewhere
    same_layers: float = 1.0  # by which factor two totals of the same layers differ in the paper
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.reported is None else abs(self.predicted / self.reported - 1)

    @property
    def direction(self) -> bool | None:
        """True where the better side is predicted; None where the paper reports none."""
        if self.reported is None or self.neutral is None or abs(self.reported - self.neutral) <= NEAR:
            return None
        return (self.predicted > self.neutral) == (self.reported > self.neutral)

    def conflict(self, same_layers: float = SAME_LAYERS) -> str:
        """Say what contradicts the figure, if anything does. same_layers: the most by which their totals may differ."""
        layers = f"the same layers take {self.same_layers:.2f} times as long"
        return self.contradiction or (layers if self.same_layers > same_layers else "")

    def counts(self, same_layers: float = SAME_LAYERS) -> bool:
        """Return whether there is a figure, and nothing that contradicts it."""
        return self.reported is not None and not self.conflict(same_layers)


# ---------------------------------------------------------------------------------------------------------- Cornstarch

FROZEN_TABLES = {"M": 3, "S": 10, "L": 11}  # numbers of the tables, by LLM
MODALITY_TABLES = {"M": 2, "S": 7, "L": 8}


def _even(forward: float, backward: float, parts: int) -> np.ndarray:
    """Divide a module's milliseconds into equal parts, seconds `[2, parts]`."""
    return np.tile([[forward / parts], [backward / parts]], parts) / 1e3


def _chain(*modules: np.ndarray) -> Chain:
    """Join modules, each `[2, parts]`, to a chain of stages or layers between which nothing is sent."""
    forward, backward = np.concatenate(modules, axis=1)
    towers = (0, *accumulate(module.shape[1] for module in modules[:-1]))
    unused = np.zeros(len(forward) + 1)
    return Chain(unused[1:], forward, backward, unused, towers, tables.CORNSTARCH_MICROBATCHES)


def _step(chain: Chain, *, side_by_side: bool = False) -> float:
    """Simulate a step in which every part of the chain is a stage."""
    return iteration_seconds(chain, range(1, len(chain.forward)), side_by_side=side_by_side)


def _encoder(row: FrozenRow, parts: int) -> np.ndarray:
    return _even(row.encoder_forward * row.encoder_stages, row.encoder_backward * row.encoder_stages, parts)


def _llm(row: FrozenRow, parts: int) -> np.ndarray:
    return _even(row.llm_forward * row.llm_stages, row.llm_backward * row.llm_stages, parts)


def _stages(row: FrozenRow) -> Chain:
    return _chain(_encoder(row, row.encoder_stages), _llm(row, row.llm_stages))


def _contradiction(aware: Chain, unaware: Chain, reported: float) -> str:
    """Say why a reported speed-up cannot follow from the longest stages, if it cannot.

    Under 1F1B a step takes at least what its longest stage takes for all microbatches, and at most that for all but
    one, and one microbatch through all stages.
    """
    seconds = [chain.forward + chain.backward for chain in (aware, unaware)]
    m = aware.microbatches
    least = [m * stages.max() for stages in seconds]
    most = [(m - 1) * stages.max() + stages.sum() for stages in seconds]
    if not least[1] / most[0] <= reported <= most[1] / least[0]:
        return f"its stage times allow {least[1] / most[0]:.2f} to {most[1] / least[0]:.2f}"
    return ""


def _same_layers(aware: Chain, unaware: Chain) -> float:
    """Return by which factor the totals of the same layers differ."""
    totals = sorted(float((chain.forward + chain.backward).sum()) for chain in (aware, unaware))
    return totals[1] / totals[0]


def _frozen_contradiction(llm: str, model: str) -> tuple[str, float]:
    """Return what contradicts the speed-up of one row, and the factor between totals of its layers."""
    aware, unaware = tables.CORNSTARCH_FROZEN[llm, model]
    chains = _stages(aware), _stages(unaware)
    return _contradiction(*chains, aware.throughput / unaware.throughput), _same_layers(*chains)


def frozen_rows() -> list[Row]:
    """Predict what frozen-aware partitions gain over unaware ones, from the stage times of each."""
    rows = []
    for (llm, model), pair in tables.CORNSTARCH_FROZEN.items():
        ours = {}
        for name, row in zip(("aware", "unaware"), pair, strict=True):
            encoder_layers = tables.ENCODER_LAYERS[model]
            llm_layers = tables.LLM_LAYERS[llm]
            layers = _chain(_encoder(row, encoder_layers), _llm(row, llm_layers))
            llm_cuts = (encoder_layers + cut for cut in (0, *cut_evenly(llm_layers, row.llm_stages)))
            cuts = (*cut_evenly(encoder_layers, row.encoder_stages), *llm_cuts)
            seconds = iteration_seconds(layers, fastest_partition(layers, len(cuts) + 1))
            ours[name] = iteration_seconds(layers, cuts) / seconds
            algorithm_1 = BASELINES["cornstarch"](layers, len(cuts) + 1)
            ours[f"algorithm 1 {name}"] = iteration_seconds(layers, algorithm_1, side_by_side=True) / seconds
        aware, unaware = pair
        contradiction, same_layers = _frozen_contradiction(llm, model)
        rows.append(
            Row(
                source=f"Cornstarch table {FROZEN_TABLES[llm]}",
                case=f"LLM-{llm} {model}: frozen-aware, throughput",
                reported=aware.throughput / unaware.throughput,
                predicted=_step(_stages(unaware)) / _step(_stages(aware)),
                ours=ours,
                contradiction=contradiction,
                same_layers=same_layers,
            )
        )
    return rows


def modality_rows() -> list[Row]:
    """Predict throughput per GPU of encoders side by side, over that of encoders colocated in the same stages.

    The paper gives no times for two encoders: each module takes what it takes in the frozen-aware rows of tables 3, 10
    and 11, and the LLM what it takes behind the audio encoder, whose tokens are more than an image's.
    """
    rows = []
    for llm, cases in tables.CORNSTARCH_MODALITIES.items():
        for encoders, colocated, colocated_throughput, parallel, parallel_throughput in cases:
            models = [f"VLM-{encoders[0]}", f"ALM-{encoders[1]}"]
            vision, audio = (tables.CORNSTARCH_FROZEN[llm, model][0] for model in models)
            llm_stages, encoder_stages = colocated
            both = _encoder(vision, encoder_stages) + _encoder(audio, encoder_stages)
            together = _step(_chain(both, _llm(audio, llm_stages))) * sum(colocated)
            llm_stages, vision_stages, audio_stages = parallel
            modules = _encoder(vision, vision_stages), _encoder(audio, audio_stages), _llm(audio, llm_stages)
            apart = _step(_chain(*modules), side_by_side=True) * sum(parallel)
            found = {model: _frozen_contradiction(llm, model) for model in models}
            tainted = [model for model, (contradiction, _) in found.items() if contradiction]
            rows.append(
                Row(
                    source=f"Cornstarch table {MODALITY_TABLES[llm]}",
                    case=f"LLM-{llm} VALM-{encoders}: modality parallelism, throughput per GPU",
                    reported=parallel_throughput / colocated_throughput,
                    predicted=together / apart,
                    contradiction=f"the rows of {' and '.join(tainted)} do" if tainted else "",
                    same_layers=max(factor for _, factor in found.values()),
                )
            )
    return rows


def end_to_end_rows() -> list[Row]:
    """Predict the two comparisons of section 6.2 whose stage times are in the text, in milliseconds."""
    # VALM-MM: forward passes of 79 to 99, with backward passes 79 to 230; in other stages 124 to 174.
    colocated, parallel = _chain(_even(4 * 79, 0, 4), _even(3 * 99, 3 * 131, 3)), _even(3 * 99, 3 * 131, 4)
    parallel = _chain(_even(124, 0, 1), _even(174, 0, 1), parallel)
    # VLM-S: 50 to 131 with backward passes, and 51 to 88; of an LLM's stage 3/8 are the forward pass (table 3).
    unaware = _chain(_even(50, 0, 1), _even(3 * 131 * 3 / 8, 3 * 131 * 5 / 8, 3))
    aware = _chain(_even(51, 0, 1), _even(5 * 88 * 3 / 8, 5 * 88 * 5 / 8, 5))
    return [
        Row(
            source="Cornstarch section 6.2.2",
            case="LLM-M VALM-MM: (4, 1, 1) stages over colocated (3, 4), throughput per GPU",
            reported=1.44,
            predicted=_step(colocated) * 7 / (_step(parallel, side_by_side=True) * 6),
        ),
        Row(
            source="Cornstarch section 6.2.1",
            case="LLM-M VLM-S: (5, 1) stages over (3, 1), iteration",
            reported=1.13,
            predicted=_step(unaware) / _step(aware),
            contradiction=_contradiction(aware, unaware, 1.13),
            same_layers=_same_layers(aware, unaware),
        ),
    ]


def backward_rows() -> list[Row]:
    """Predict forward and backward pass over the forward pass, by the FLOPs that are executed with recomputation."""
    rows = []
    for case, (forward, backward) in tables.CORNSTARCH_BACKWARD.items():
        tower = "llm" if case.startswith("LLM") else "vision"
        frozen = "frozen" in case
        model = ModelConfig(
            llm=replace(tables.MISTRAL_7B, frozen=frozen),
            encoders={"vision": replace(tables.CLIP_L, frozen=frozen)},
        )
        flops = executed(model, {"llm": (2, 1024), "vision": (2, 576)}, frozen_modules(model))[tower]
        # Section 4.2: 0, 1 or 2 forward passes, and one more to recompute where there is any gradient.
        rule = (0 if tower == "vision" else 2) if frozen else 3
        rows.append(
            Row(
                source="Cornstarch figure 3b",
                case=f"{case}: forward and backward, of forward",
                reported=1 + backward / forward,
                predicted=1 + flops.backward / flops.forward,
                neutral=None,
                note=f"section 4.2's rule: {1 + rule}",
            )
        )
    return rows


# ------------------------------------------------------------------------------------------------------------- OmniBal


def _omnibal_chain(row: OmniBalRow, encoder_rate: float = ENCODER_RATE) -> Chain:
    """Time the layers of a model by their FLOPs; all are trained, so backward passes take twice as long."""
    vision = row.vision
    llm = row.llm
    patches = tables.OMNIBAL_TILES * tables.OMNIBAL_TILE
    tokens = patches // merged_positions(vision)
    work = {
        "vision": Work(patches, patches * tables.OMNIBAL_TILE, patches, tokens),
        "llm": Work(tables.OMNIBAL_TOKENS, tables.OMNIBAL_TOKENS**2 / 2),
    }
    model = ModelConfig(llm, encoders={"vision": vision})
    flops = model_flops(model, work, frozenset())
    modules = module_parameters(model)
    rate = row.tensor * parse_cluster("a100").device.rates("bfloat16").flops
    counts = vision.layers, llm.layers
    forward = np.repeat(
        [flops["vision"].forward / vision.layers / (encoder_rate * rate), flops["llm"].forward / llm.layers / rate],
        counts,
    )
    sizes = np.repeat([2 * patches * vision.width, 2 * tables.OMNIBAL_TOKENS * llm.width], counts)
    sizes[vision.layers] = 2 * tokens * llm.width  # behind the connector, which merges four patches
    return Chain(
        parameters=np.repeat([modules["vision"].layers / vision.layers, modules["llm"].layers / llm.layers], counts),
        forward=forward,
        backward=2 * forward,
        cut_bytes=np.append(sizes, 0),
        towers=(0, vision.layers),
        microbatches=OMNIBAL_MICROBATCHES,
        bandwidth=NETWORK,
    )


def _sizes(chain: Chain, cuts: Sequence[int]) -> list[int]:
    """Return the layers of each stage."""
    return np.diff([0, *cuts, len(chain.forward)]).tolist()


def omnibal_partition(row: OmniBalRow) -> list[int]:
    """Return the layers of each stage of our partition."""
    chain = _omnibal_chain(row)
    return _sizes(chain, fastest_partition(chain, len(row.layers)))


def omnibal_model_rows() -> list[Row]:
    """Compare our partition of nine models with the paper's and with the baselines."""
    rows = []
    for name, row in tables.OMNIBAL_MODELS.items():
        chain = _omnibal_chain(row)
        cuts = fastest_partition(chain, len(row.layers))
        others = {"paper": tuple(accumulate(row.layers))[:-1]}
        others |= {label: baseline(chain, len(row.layers)) for label, baseline in BASELINES.items()}
        seconds = iteration_seconds(chain, cuts)
        rows.append(
            Row(
                source="OmniBal appendix table 1",
                case=f"{name}: partition",
                ours={label: iteration_seconds(chain, other) / seconds for label, other in others.items()},
                contradiction=row.contradiction,
                note=f"paper {list(row.layers)}, ours {_sizes(chain, cuts)}",
            )
        )
    return rows


def omnibal_partition_rows(encoder_rate: float = ENCODER_RATE) -> list[Row]:
    """Predict table 6: GPU days of three partitions over the paper's own, and what each sends beside the first."""
    model = tables.OMNIBAL_MODELS["InternViT-6B, InternLM2-20B"]
    chain = _omnibal_chain(model, encoder_rate)
    stages = len(model.layers)
    kinds = {kind: BASELINES[kind](chain, stages) for kind in ("parameters", "layers", "profile")}
    kinds["BMP"] = tuple(accumulate(model.layers))[:-1]
    seconds = {kind: iteration_seconds(chain, cuts) for kind, cuts in kinds.items()}
    sent = {kind: float(chain.cut_bytes[list(cuts)].sum()) / MIB for kind, cuts in kinds.items()}
    fastest = iteration_seconds(chain, fastest_partition(chain, stages))
    rows = []
    for kind, (comm, days) in tables.OMNIBAL_PARTITIONS.items():
        layers = f"{kind} {_sizes(chain, kinds[kind])}"
        if kind != "BMP":
            reported = days / tables.OMNIBAL_PARTITIONS["BMP"][1]
            predicted = seconds[kind] / seconds["BMP"]
            ours = {kind: seconds[kind] / fastest}
            rows.append(Row(TABLE_6, f"{layers}: GPU days over BMP's", reported, predicted, ours=ours))
        if kind != "parameters":
            change = sent[kind] - sent["parameters"]
            # -21.0 MB is the connector's cut for one of the LLM's, without the encoder's in [22, 23, 24, 24].
            contradiction = f"cuts the encoder once: {change:.1f}" if kind == "BMP" else ""
            case = f"{layers}: MB sent, over parameters'"
            rows.append(Row(TABLE_6, case, comm, change, neutral=0.0, contradiction=contradiction))
    return rows


def omnibal_exact() -> bool:
    """Return whether layer times in the ratio 1.00 to 1.05 give the partition [22, 23, 24, 24]."""
    chain = _omnibal_chain(tables.OMNIBAL_MODELS["InternViT-6B, InternLM2-20B"])
    encoder = np.arange(len(chain.forward)) < chain.towers[1]
    ratios = np.linspace(1.0, 1.05, 6)
    found = [partition(np.where(encoder, ratio, 1.0), 4, chain.cut_bytes) for ratio in ratios]
    return all(_sizes(chain, cuts) == [22, 23, 24, 24] for cuts in found)


# ------------------------------------------------------------------------------------------------------------- MMScale


def reordering_rows(draws: int = 12) -> list[Row]:
    """Predict what reordering gains where an encoder's times are lognormal, before three equal LLM stages."""
    graph = StageGraph(((0, 1), (1, 2), (2, 3)), (0, 1, 2, 3))
    schedule = make_schedule("1f1b", graph, 24)
    gains = []
    for seed in range(draws):
        forward = np.full((4, 24), 10**6)
        drawn = np.random.default_rng(seed).lognormal(0, REORDER_SIGMA, 24)
        forward[0] = 1e6 * drawn / drawn.mean()
        order = reorder("1f1b", graph, forward, 2 * forward)
        planned, reordered = (
            simulate(schedule, StageTimes(times, 2 * times)).makespan for times in (forward, forward[:, order])
        )
        gains.append(planned / reordered)
    return [
        Row(
            source="MMScale section 7.2.2",
            case="reordering microbatches: throughput",
            reported=1.07,
            predicted=statistics.mean(gains),
            note="1.03 to 1.11, which the paper calls percents",
        )
    ]


# ------------------------------------------------------------------------------------------------------ whole trainings


@dataclass(frozen=True)
class TextFigure:
    """A figure of a whole training, which `mmjax.plan` predicts for a shipped config like the paper's.

    over: kind of balance that the figure is a ratio to, of MFUs or of GPU days; empty: the MFU itself.
    """

    source: str
    reported: tuple[float, float]  # a range
    config: str
    cluster: str
    over: str = ""


TEXT_FIGURES = (
    TextFigure("OrchMLLM figure 8: MFU of 84B", (0.416, 0.416), "omni_84b", "h100x320x8"),
    TextFigure("OrchMLLM figure 8: MFU over that without balance", (1.5, 2.0), "omni_84b", "h100x320x8", over="none"),
    TextFigure("MMScale figure 15: MFU of 72B, there on 1,172 GPUs", (0.518, 0.547), "mllm_72b", "a800x120x8"),
    TextFigure(
        "OmniBal table 2: GPU days without balance", (38.9 / 25.3,) * 2, "internvl_26b", "a100x8x8", over="none"
    ),
)


def planned_figures() -> list[dict[str, Any]]:
    """Plan the configs of `TEXT_FIGURES`. The error: from the nearer end of the range."""

    @cache
    def plan(config: str, cluster: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "mmjax.plan", config, f"cluster={cluster}", "--json"]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    found = []
    for figure in TEXT_FIGURES:
        planned = plan(figure.config, figure.cluster)
        own = planned["ways"][planned["balance"]]["mfu"]
        predicted = own / planned["ways"][figure.over]["mfu"] if figure.over else own
        low, high = figure.reported
        found.append(
            {
                "source": figure.source,
                "reported": low if low == high else f"{low:.4g} to {high:.4g}",
                "predicted": predicted,
                "error": abs(predicted / min(max(predicted, low), high) - 1),
                "plan": f"{figure.config} cluster={figure.cluster}",
            }
        )
    return found


# ----------------------------------------------------------------------------------------------------------------- all

ROW_MAKERS: tuple[Callable[[], list[Row]], ...] = (
    frozen_rows,
    modality_rows,
    end_to_end_rows,
    backward_rows,
    omnibal_model_rows,
    omnibal_partition_rows,
    reordering_rows,
)

NOT_MODELLED = {
    "Cornstarch figures 9, 10, 13, 14, 15": "the values are pictures",
    "Cornstarch table 4": "times of attention kernels; `mmjax.bench context` has the balance of their work",
    "OmniBal tables 2, 3, 5, appendix 2 to 9": "data, model and memory balance together, over a partition not given",
    "OmniBal table 7": "free memory of a framework, without the model's states and buffers",
    "MMScale figures 15 to 17, 19 to 22": "the values are pictures, and no time of a module is given",
    "MMScale tables 2, 3": "run times on another machine",
    "OrchMLLM": "balance between ranks; `mmjax.bench postbalance`, `nodewise` and `phases`",
}


def anchors() -> dict[str, tuple[float, float]]:
    """Simulate textbook schedules, forward 2 and backward 4; return each with its closed form."""

    def step(name: ScheduleName, graph: StageGraph, microbatches: int, chunks: int = 1) -> float:
        forward = np.full((len(graph.workers), microbatches), 2 / chunks)
        return simulate(make_schedule(name, graph, microbatches), StageTimes(forward, 2 * forward)).makespan

    def chain(stages: int, workers: int) -> StageGraph:
        edges = tuple((stage, stage + 1) for stage in range(stages - 1))
        return StageGraph(edges, tuple(stage % workers for stage in range(stages)))

    modalities = StageGraph(((0, 2), (1, 2), (2, 3), (3, 4)), (0, 1, 2, 3, 4))
    return {
        "gpipe": (step("gpipe", chain(4, 4), 8), (8 + 4 - 1) * (2 + 4)),
        "1f1b": (step("1f1b", chain(4, 4), 8), (8 + 4 - 1) * (2 + 4)),
        "interleaved": (step("interleaved", chain(8, 4), 8, chunks=2), (8 + (4 - 1) / 2) * (2 + 4)),
        "encoders side by side": (step("1f1b", modalities, 16), (16 + 4 - 1) * (2 + 4)),
        "encoders in a chain": (step("1f1b", chain(5, 5), 16), (16 + 5 - 1) * (2 + 4)),
    }


def _directions(rows: Sequence[Row], same_layers: float = SAME_LAYERS) -> list[bool]:
    """Return of each row that counts and has a better side whether that is predicted."""
    return [row.direction for row in rows if row.counts(same_layers) and row.direction is not None]


def sensitivity(rows: Sequence[Row]) -> list[dict[str, float]]:
    """Count the directions that are right with other values of the two constants that they depend on."""
    others = [row for row in rows if row.source != TABLE_6]
    found = []
    for same_layers, encoder_rate in SENSITIVITY:
        directions = _directions([*others, *omnibal_partition_rows(encoder_rate)], same_layers)
        found.append(
            {
                "same_layers": same_layers if np.isfinite(same_layers) else None,  # any
                "encoder_rate": encoder_rate,
                "direction_right": sum(directions),
                "direction_rows": len(directions),
            }
        )
    return found


OPTIONS: Options = {
    "--plans": option(False, "plan whole trainings too, which takes minutes"),
}


def run(args: Namespace) -> Measurement:
    """Predict all rows."""
    rows = [row for make in ROW_MAKERS for row in make()]
    counted = [row for row in rows if row.counts()]
    directions = _directions(rows)
    contradictory = [row for row in rows if not row.counts() and row.direction is not None]
    model = tables.OMNIBAL_MODELS["InternViT-6B, InternLM2-20B"]
    by_flops = _omnibal_chain(model, encoder_rate=1.0)
    figures = {
        "all_rows": len(rows),
        "direction_share": sum(directions) / len(directions),
        "direction_rows": len(directions),
        "direction_share_of_contradictory": sum(row.direction for row in contradictory) / len(contradictory),
        "median_error": statistics.median(row.error for row in counted),
        "error_rows": len(counted),
        "anchors_exact": all(simulated == exact for simulated, exact in anchors().values()),
        "omnibal_22_23_24_24": omnibal_exact(),
        "omnibal_by_flops": _sizes(by_flops, partition(by_flops.forward, 4, by_flops.cut_bytes)),
        "ours_never_slower": all(speedup >= 1 - 1e-9 for row in rows for speedup in row.ours.values()),
        "sensitivity": sensitivity(rows),
        "text_figures": len(TEXT_FIGURES),
        "planned": planned_figures() if args.plans else [],
        "rows": [_to_dict(row) for row in rows],
        "not_modelled": [{"source": source, "reason": reason} for source, reason in NOT_MODELLED.items()],
    }
    arrays = {
        "reported": np.array([row.reported for row in counted]),
        "predicted": np.array([row.predicted for row in counted]),
    }
    return Measurement(figures, arrays)


def _to_dict(row: Row) -> dict[str, Any]:
    return {
        "source": row.source,
        "case": row.case,
        "reported": row.reported,
        "predicted": row.predicted,
        "error": row.error,
        "direction": row.direction,
        "ours": dict(row.ours),
        "contradiction": row.conflict(),
        "note": row.note,
    }
