"""Cut the modules of units into stages that take equally long, where a config does not say where (OmniBal 4.2).

What stages take is also what a nested schedule is made by. Times are FLOPs in whole numbers, so
that every process cuts alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmjax.config import Config, Unit
from mmjax.config.training import unit_modules
from mmjax.config.unit_stages import chain_of
from mmjax.planning.flops import layer_flops
from mmjax.planning.memory import ACTIVATION
from mmjax.planning.partition import Chain, fastest_partition, partition
from mmjax.planning.reorder import time_stages
from mmjax.planning.schedules import schedule_name
from mmjax.planning.work import row_work

LONGEST = 2**30  # of a layer's passes, in units of time
LONGEST_PASS = 10**6  # of a stage, for a nested schedule


def with_balanced_cuts(
    config: Config,
    rows: Sequence[int],
    lengths: Sequence[Sequence[int]],
    resumed: Mapping[str, Unit] | None = None,
) -> Config:
    """Return the config with cuts of every unit of several stages that names none, and times for a nested schedule.

    rows: of each module on all ranks, the LLM first. lengths: of the rows, by shape and module.
    resumed: units with which the run went on so far; those that are as they were are cut as they
    were.
    """
    units = {}
    for name, unit in config.units.items():
        last_start = (resumed or {}).get(name)
        if unit.pipeline * unit.virtual == 1 or unit.cuts:
            units[name] = unit
        elif last_start is not None and replace(last_start, cuts=()) == unit:
            units[name] = last_start
        else:
            units[name] = replace(unit, cuts=_balance(config, name, unit, rows, lengths))
    return with_stage_times(replace(config, units=units), rows, lengths)


def with_stage_times(
    config: Config, rows: Sequence[int], lengths: Sequence[Sequence[int]]
) -> Config:
    """Return the config with the times of its stages where its schedule is nested and it states none."""
    if schedule_name(config) != "nested" or config.pipeline.stage_times:
        return config
    seconds = time_stages(config, rows, lengths, by_content=False)[0].mean(2)
    times = np.rint(seconds * (LONGEST_PASS / seconds.max())).astype(int)
    return replace(
        config, pipeline=replace(config.pipeline, stage_times=tuple(times.T.ravel().tolist()))
    )


def _balance(
    config: Config, name: str, unit: Unit, rows: Sequence[int], lengths: Sequence[Sequence[int]]
) -> tuple[int | str, ...]:
    """Return the cuts of a unit that make its stages take equally long."""
    model = config.model
    towers = chain_of(model, unit_modules(name, unit))
    names = ("llm", *model.item_modules)
    firsts: list[int] = []  # place of each tower's first layer
    flops: list[tuple[float, float]] = []  # of both passes of every layer
    sent: list[float] = []
    for tower in towers:
        number = names.index(tower)
        shapes = [
            {n: (1, length) for n, length in zip(names, shape, strict=True)} for shape in lengths
        ]
        by_shape = [
            layer_flops(model, tower, shape, config.loss.repeats_forward) for shape in shapes
        ]
        firsts.append(len(flops))
        for layer_by_shape in zip(*by_shape, strict=True):
            flops.append(
                tuple(
                    rows[number] * sum(f.at_one_rate[way] for f in layer_by_shape) for way in (0, 1)
                )
            )
        works = [row_work(model, shape)[tower] for shape in shapes]
        width = getattr(model.item_modules.get(tower, model.llm), "width", model.llm.width)
        activations = rows[number] * width * sum(work.positions for work in works)
        tokens = rows[number] * model.llm.width * sum(work.tokens for work in works)
        sent += [activations] * (len(by_shape[0]) - 1) + [tokens]
    # [layers, 2], scaled to whole numbers whose longest layer is LONGEST.
    times = np.array(flops)
    forward, backward = np.rint(times * (LONGEST / times.sum(1).max())).T
    stages = unit.pipeline * unit.virtual
    # Before layer n goes what layer n - 1 sends: activations, or an encoder's tokens at its end.
    cut_bytes = np.rint(ACTIVATION[config.training.precision] * np.array([0, *sent]))
    # The simulator of `fastest_partition` knows 1F1B alone.
    if unit.virtual > 1:
        cuts = partition(forward + backward, stages, cut_bytes)
    else:
        parameters = np.zeros(len(flops))
        chain = Chain(
            parameters=parameters,
            forward=forward,
            backward=backward,
            cut_bytes=cut_bytes,
            towers=tuple(firsts),
            microbatches=config.batch.microbatches,
        )
        cuts = fastest_partition(chain, stages)
    return name_cuts(config, name, cuts)


def name_cuts(config: Config, name: str, places: Sequence[int]) -> tuple[int | str, ...]:
    """Return the cuts of a unit before these layers of its chain, as a config states them."""
    towers = chain_of(config.model, unit_modules(name, config.units[name]))
    layers = [
        (tower, layer) for tower in towers for layer in range(config.model.towers[tower].layers)
    ]
    return tuple(
        layers[place][1] if len(towers) == 1 else "{}.{}".format(*layers[place]) for place in places
    )
