"""Cornstarch's tables of pipelines, as they stand there, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mmjax.benchmarks.baselines.partition import BASELINES, cut_evenly
from mmjax.benchmarks.papers_row import Row, read_table
from mmjax.config import DecoderConfig, ModelConfig, VisionConfig
from mmjax.config.model import frozen_modules
from mmjax.planning.flops import executed
from mmjax.planning.partition import Chain, fastest_partition, iteration_seconds


class FrozenRow(NamedTuple):
    """A row of Cornstarch's tables 3, 10 and 11 with its stages from table 9: milliseconds of one stage."""

    llm_stages: int
    encoder_stages: int
    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float
    throughput: float

    @classmethod
    def read(cls, figures: Sequence[str]) -> FrozenRow:
        """Read a row of the table."""
        return cls(*map(int, figures[:2]), *map(float, figures[2:]))


LLM_LAYERS = {"S": 16, "M": 32, "L": 64}  # Cornstarch table 1
ENCODER_LAYERS = {"VLM-S": 40, "VLM-M": 32, "VLM-L": 48, "ALM-S": 32, "ALM-M": 40, "ALM-L": 48}
CORNSTARCH_MICROBATCHES = 24
# LLM: Llama S, M, L; model: with a vision (VLM) or audio (ALM) encoder S, M, L; then the fields of
# two `FrozenRow`, first of the frozen-aware partition.
FROZEN_TABLE = """
M VLM-S  6 1  49.06  27.46 0.12  43.03  6.47  3 1  26.49  28.13 0.16  51.32  5.30
M VLM-M  5 2  75.04  28.15 0.27  51.30  5.15  4 3  45.90  45.26 0.16  84.89  3.73
M VLM-L  5 4 101.02  34.67 0.20  63.77  3.17  3 5  70.42  67.03 0.15 127.34  2.06
M ALM-S  6 1  57.25  81.73 0.38 157.12  1.94  5 1  57.79  81.94 0.38 157.14  1.94
M ALM-M  6 1 176.80  82.19 0.64 157.51  1.96  4 4  93.39  98.25 0.34 189.11  1.70
M ALM-L  4 2 308.16 100.20 0.73 188.50  1.98  5 5 145.97 121.21 0.33 235.23  1.69
L VLM-S  5 1  52.54  88.58 0.10 171.72  2.39  3 5  85.83 106.26 0.10 171.38  2.10
L VLM-M  5 1 249.38  88.95 0.49 171.68  2.29  5 1 132.16 113.64 0.26 213.58  1.85
L VLM-L  4 1 481.44 106.53 0.74 215.06  1.76  4 2 246.22 146.62 0.38 287.14  1.81
L ALM-S  5 1  76.84 286.16 0.24 596.40  0.72  5 1  78.80 285.07 0.24 594.31  0.73
L ALM-M  5 1 197.21 287.37 0.45 597.47  0.72  3 1 101.97 359.27 0.24 743.91  0.62
L ALM-L  5 1 319.31 286.31 0.50 596.50  0.71  4 2 177.29 356.06 0.27 742.80  0.61
S VLM-S  4 2  25.57  15.51 0.05  15.09 12.64  4 4  32.80  18.80 0.06  20.09 13.79
S VLM-M  2 4  75.67  17.31 0.15  20.08  7.85  1 4  45.25  17.61 0.09  20.33  7.63
S VLM-L  1 4  98.27  26.22 0.11  30.50  4.81  1 5 122.50  47.39 0.13  60.31  6.05
S ALM-S  5 1  57.52  42.73 0.20  70.21  7.13  3 2  30.14  42.30 0.10  70.22  5.34
S ALM-M  4 2  92.19  32.54 0.17  52.63  4.85  2 3  59.18  72.90 0.12 105.22  4.09
S ALM-L  4 3  97.77  33.27 0.12  52.88  4.29  2 4  76.81  62.01 0.09 105.22  3.59
"""
CORNSTARCH_FROZEN = {
    (llm, model): (FrozenRow.read(figures[:7]), FrozenRow.read(figures[7:]))
    for llm, model, *figures in read_table(FROZEN_TABLE)
}

# Cornstarch tables 2, 7, 8: LLM, vision and audio encoder; stages of the LLM and of both encoders
# colocated, throughput of a GPU; stages of the LLM, vision and audio side by side, throughput of a
# GPU.
MODALITY_TABLE = """
M SS  6 1 3.09  6 1 1 2.68
M SM  6 2 2.64  6 1 1 2.73
M SL  6 2 2.57  6 1 2 2.25
M MS  6 2 2.57  6 2 1 2.29
M MM  6 3 2.21  6 1 1 2.22
M ML  6 4 1.91  6 2 2 2.05
M LS  6 4 1.95  6 3 1 1.92
M LM  6 4 1.88  6 3 1 1.97
M LL  6 5 1.74  6 3 2 1.82
S SS  3 4 6.31  3 1 1 8.82
S SM  1 3 5.20  3 1 4 4.99
S SL  1 4 4.31  3 1 5 4.61
S MS  2 4 5.18  3 3 1 5.24
S MM  1 4 3.93  3 2 3 4.66
S ML  1 5 3.40  3 2 4 3.78
S LS  1 4 3.82  3 5 1 3.96
S LM  1 6 2.96  2 4 3 3.42
S LL  1 6 2.76  2 3 3 3.25
L SS  5 1 1.57  5 1 1 1.33
L SM  5 2 1.37  5 1 1 1.36
L SL  5 2 1.33  5 1 1 1.37
L MS  4 1 1.57  5 1 1 1.37
L MM  4 2 1.32  5 1 1 1.37
L ML  6 1 1.04  5 1 1 0.93
L LS  4 2 1.31  5 1 1 1.36
L LM  4 3 1.10  5 1 1 1.33
L LL  4 3 1.09  5 1 1 1.36
"""

# Cornstarch figure 3b, CLIP and Mistral-7B on one A40 with checkpointing: forward and backward
# milliseconds.
CORNSTARCH_BACKWARD = {
    "encoder, frozen": (67.89, 0.01),
    "LLM, frozen behind a trained projector": (397.11, 530.67),
    "encoder, trained": (67.94, 205.09),
    "LLM, trained": (400.87, 1184.65),
}
MISTRAL_7B = DecoderConfig(32, 4096, 32, 8, 128, mlp_width=14_336, vocab=32_000, remat="full")
CLIP_L = VisionConfig(layers=24, width=1024, heads=16, mlp_width=4096, patch=14, remat="full")

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
    return Chain(unused[1:], forward, backward, unused, towers, CORNSTARCH_MICROBATCHES)


def _step(chain: Chain, *, side_by_side: bool = False) -> float:
    """Simulate a step in which every part of the chain is a stage."""
    return iteration_seconds(chain, range(1, len(chain.forward)), side_by_side=side_by_side)


def _encoder(row: FrozenRow, parts: int) -> np.ndarray:
    return _even(
        row.encoder_forward * row.encoder_stages, row.encoder_backward * row.encoder_stages, parts
    )


def _llm(row: FrozenRow, parts: int) -> np.ndarray:
    return _even(row.llm_forward * row.llm_stages, row.llm_backward * row.llm_stages, parts)


def _stages(row: FrozenRow) -> Chain:
    return _chain(_encoder(row, row.encoder_stages), _llm(row, row.llm_stages))


def _contradiction(aware: Chain, unaware: Chain, reported: float) -> str:
    """Say why a reported speed-up cannot follow from the longest stages, if it cannot.

    Under 1F1B a step takes at least what its longest stage takes for all microbatches, and at most
    that for all but one, and one microbatch through all stages.
    """
    seconds = [chain.forward + chain.backward for chain in (aware, unaware)]
    m = aware.microbatches
    shortest = [m * stages.max() for stages in seconds]
    longest = [(m - 1) * stages.max() + stages.sum() for stages in seconds]
    if not shortest[1] / longest[0] <= reported <= longest[1] / shortest[0]:
        return f"its stage times allow {shortest[1] / longest[0]:.2f} to {longest[1] / shortest[0]:.2f}"
    return ""


def _same_layers(aware: Chain, unaware: Chain) -> float:
    """Return by which factor the totals of the same layers differ."""
    totals = sorted(float((chain.forward + chain.backward).sum()) for chain in (aware, unaware))
    return totals[1] / totals[0]


def _frozen_contradiction(llm: str, model: str) -> tuple[str, float]:
    """Return what contradicts the speed-up of one row, and the factor between totals of its layers."""
    aware, unaware = CORNSTARCH_FROZEN[llm, model]
    chains = _stages(aware), _stages(unaware)
    return _contradiction(*chains, aware.throughput / unaware.throughput), _same_layers(*chains)


def frozen_rows() -> list[Row]:
    """Predict what frozen-aware partitions gain over unaware ones, from the stage times of each."""
    rows = []
    for (llm, model), pair in CORNSTARCH_FROZEN.items():
        ours = {}
        for name, row in zip(("aware", "unaware"), pair, strict=True):
            encoder_layers = ENCODER_LAYERS[model]
            llm_layers = LLM_LAYERS[llm]
            layers = _chain(_encoder(row, encoder_layers), _llm(row, llm_layers))
            llm_cuts = (
                encoder_layers + cut for cut in (0, *cut_evenly(llm_layers, row.llm_stages))
            )
            cuts = (*cut_evenly(encoder_layers, row.encoder_stages), *llm_cuts)
            seconds = iteration_seconds(layers, fastest_partition(layers, len(cuts) + 1))
            ours[name] = iteration_seconds(layers, cuts) / seconds
            algorithm_1 = BASELINES["cornstarch"](layers, len(cuts) + 1)
            ours[f"algorithm 1 {name}"] = (
                iteration_seconds(layers, algorithm_1, side_by_side=True) / seconds
            )
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

    The paper gives no times for two encoders: each module takes what it takes in the frozen-aware
    rows of tables 3, 10 and 11, and the LLM what it takes behind the audio encoder, whose tokens
    are more than an image's.
    """
    rows = []
    for llm, encoders, *figures in read_table(MODALITY_TABLE):
        colocated_throughput, parallel_throughput = float(figures[2]), float(figures[6])
        colocated, parallel = (list(map(int, stages)) for stages in (figures[:2], figures[3:6]))
        models = [f"VLM-{encoders[0]}", f"ALM-{encoders[1]}"]
        vision, audio = (CORNSTARCH_FROZEN[llm, model][0] for model in models)
        both = _encoder(vision, colocated[1]) + _encoder(audio, colocated[1])
        colocated_seconds = _step(_chain(both, _llm(audio, colocated[0]))) * sum(colocated)
        llm_stages, vision_stages, audio_stages = parallel
        modules = (
            _encoder(vision, vision_stages),
            _encoder(audio, audio_stages),
            _llm(audio, llm_stages),
        )
        apart = _step(_chain(*modules), side_by_side=True) * sum(parallel)
        conflicts = {model: _frozen_contradiction(llm, model) for model in models}
        tainted = [model for model, (contradiction, _) in conflicts.items() if contradiction]
        rows.append(
            Row(
                source=f"Cornstarch table {MODALITY_TABLES[llm]}",
                case=f"LLM-{llm} VALM-{encoders}: modality parallelism, throughput per GPU",
                reported=parallel_throughput / colocated_throughput,
                predicted=colocated_seconds / apart,
                contradiction=f"the rows of {' and '.join(tainted)} do" if tainted else "",
                same_layers=max(factor for _, factor in conflicts.values()),
            )
        )
    return rows


def end_to_end_rows() -> list[Row]:
    """Predict the two comparisons of section 6.2 whose stage times are in the text, in milliseconds."""
    # VALM-MM: forward passes of 79 to 99, with backward passes 79 to 230; in other stages 124 to
    # 174.
    colocated, parallel = (
        _chain(_even(4 * 79, 0, 4), _even(3 * 99, 3 * 131, 3)),
        _even(3 * 99, 3 * 131, 4),
    )
    parallel = _chain(_even(124, 0, 1), _even(174, 0, 1), parallel)
    # VLM-S: 50 to 131 with backward passes, and 51 to 88; of an LLM's stage 3/8 are the forward
    # pass (table 3).
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
    for case, (forward, backward) in CORNSTARCH_BACKWARD.items():
        tower = "llm" if case.startswith("LLM") else "vision"
        frozen = "frozen" in case
        model = ModelConfig(
            llm=replace(MISTRAL_7B, frozen=frozen),
            encoders={"vision": replace(CLIP_L, frozen=frozen)},
        )
        flops = executed(model, {"llm": (2, 1024), "vision": (2, 576)}, frozen_modules(model))[
            tower
        ]
        # Section 4.2: 0, 1 or 2 forward passes, and one more to recompute where there is any
        # gradient.
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
