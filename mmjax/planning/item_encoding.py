"""Plan what encoders that encode each item once compute ahead of the steps, and what is stored of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mmjax.config import Encoder, ModelConfig
from mmjax.config.model import frozen_modules, with_changes
from mmjax.planning.flops import attention_flops, executed, model_flops
from mmjax.planning.memory import MASTER, parameter_bytes
from mmjax.planning.speed import Speed
from mmjax.planning.stage_time import FORWARD_KERNELS
from mmjax.planning.work import length_work, row_work

LENGTH_UNIT = 64  # inputs; rows are padded to multiples of it
MAX_ROWS = 8  # items of a batch
MAX_INPUTS = 8192  # of a batch, but for an item that is longer alone


class PlannedEncoding(NamedTuple):
    """Time and disk of an encoder that encodes once."""

    items: int  # of all data
    size: int  # bytes of their outputs on disk
    seconds: float  # of a step whose items all come for the first time


def row_length(config: Encoder, inputs: int) -> int:
    """Return the length of the row that an item of so many inputs is computed in, alone."""
    return padded_length(inputs, math.lcm(LENGTH_UNIT, config.positions_per_token))


def padded_length(inputs: int, unit: int) -> int:
    """Round up to one of a few lengths, at most an eighth longer from 8 units on.

    With unit 64, up to 1,024 to multiples of 64, up to 2,048 to multiples of 128, and so on.
    """
    step = unit * 2 ** max(0, (inputs // (8 * unit)).bit_length() - 1)
    return -(-inputs // step) * step


def batch_rows(length: int) -> int:
    """Return how many items of rows this long are computed at a time."""
    return max(1, min(MAX_ROWS, MAX_INPUTS // length))


def output_bytes(config: Encoder, positions: np.ndarray, activation: int) -> int:
    """Count the bytes of outputs. positions: of each item in the encoder's row."""
    return (
        int(positions.astype(np.int64).sum())
        // config.output_stride
        * config.output_width
        * activation
    )


def encoding_seconds(
    config: Encoder,
    positions: Iterable[int],
    batch_seconds: Callable[[int], float],
    devices: int,
    processes: int,
) -> float:
    """Estimate the seconds in which devices encode a step's items, of so many positions each.

    Each process has its own batches, the last of which is not full, for each length.
    batch_seconds: of one on one device, by the length of its rows.
    """
    lengths = Counter(row_length(config, n) for n in positions)
    seconds = sum(
        math.ceil(count / processes / batch_rows(length)) * batch_seconds(length)
        for length, count in lengths.items()
    )
    return seconds * processes / devices


def batch_seconds(model: ModelConfig, tower: str, speed: Speed, length: int) -> float:
    """Estimate the seconds in which one device encodes a batch of rows of this length."""
    model = with_changes(model, {tower: {"encode": "step"}})
    config = model.towers[tower]
    shape = {tower: (batch_rows(length), length)}
    if measured := speed.layer(tower, shape[tower]):
        return config.layers * measured["forward"]
    flops = executed(model, shape, frozen_modules(model))[tower]
    attention = 0.0
    if config.attention in ("flash", "auto"):
        attention = config.layers * attention_flops(model, tower, row_work(model, shape)[tower])
    computing = speed.rates.seconds(flops.forward, attention, flops.float8_forward)
    return computing + config.layers * FORWARD_KERNELS * speed.rates.launch


def encoding_flops(model: ModelConfig, tower: str, inputs: np.ndarray) -> float:
    """Count the needed FLOPs of encoding items. inputs: int `[n]`, of each those that hold data."""
    in_steps = with_changes(model, {tower: {"encode": "step"}})
    number = np.full(len(inputs), list(model.encoders).index(tower))
    none = np.zeros(0, np.int64)
    work = length_work(in_steps, none, number, inputs, np.zeros_like(number))
    return model_flops(in_steps, {tower: work[tower]}, frozen_modules(model))[tower].forward


def encoding_bytes(model: ModelConfig, tower: str, activation: int) -> float:
    """Count the bytes that encoding takes on each device: the whole encoder, and a batch of items."""
    module = model.towers[tower]
    weights = parameter_bytes(model, frozen_modules(model), activation)[tower]
    # Of one layer at a time: the residual stream, queries, keys, values, and the MLP's channels in
    # float32; of all of them what the connector reads.
    of_layer = 4 * module.width * activation + MASTER * (1 + module.gated) * module.mlp_width
    outputs = module.output_width * activation / module.output_stride
    return weights + MAX_INPUTS * (module.input_values + of_layer + outputs)
