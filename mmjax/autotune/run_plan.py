"""Plan a run from its config, without its devices: remat policies, and the memory of every stage.

A run on one mesh is one stage of all modules. A stage's microbatches in flight must fit beside its
parameters. The same plan holds for a run and for a forecast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmjax.autotune.sharded_stages import ShardedStage, shard_stages, stage_batch
from mmjax.autotune.stage_memory import fixed_bytes
from mmjax.config import (
    Config,
    Remat,
)
from mmjax.config.model import frozen_modules, stacked_towers
from mmjax.data.plan.step_plan import RankLayout
from mmjax.parallel.sharding import loss_choices, loss_parts_are_of_tokens
from mmjax.planning.flops import executed_logits, layer_policies
from mmjax.planning.memory import (
    ACTIVATION,
    MASTER,
    divide_by_tensor_parallelism,
    saved_bytes_per_layer,
)
from mmjax.planning.remat import (
    IN_A_PASS,
    MemoryLimit,
    Option,
    RunPlan,
    StagePlan,
    choose_policies,
    layer_options,
    least_seconds,
    smallest_policy,
)
from mmjax.planning.schedules import list_stages, make_schedule, schedule_name, unit_graph
from mmjax.planning.speed import Speed
from mmjax.planning.work import resolve_attention, row_work


def plan_run(config: Config, layout: RankLayout, speed: Speed, limit: MemoryLimit) -> RunPlan:
    """Choose the remat policies of all layers and the loss's chunks: the least recomputation with which a run fits.

    config: of units, or `on_one_mesh`. Exact on the devices of each stage, for all compiled shapes
    at once; stages on the same devices share their memory. Where a run fits under no policies, it
    has those that save least.
    """
    config = replace(
        config, model=resolve_attention(config.model, speed.rates, layout.topology.context)
    )
    stages = shard_stages(config)
    schedule = make_schedule(schedule_name(config), unit_graph(config), config.batch.microbatches)
    by_devices: dict[range, list[int]] = {}
    for number, sharded in enumerate(stages):
        by_devices.setdefault(sharded.devices, []).append(number)
    # Stages with the same pieces are copies of one: they have the policies of the first, and each
    # as many microbatches in flight as that which has most.
    pieces = [listed.pieces for listed in list_stages(config)]
    bounds = [schedule.in_flight_bound(number) for number in range(len(stages))]
    in_flight = [
        max(bound for bound, copy in zip(bounds, pieces, strict=True) if copy == of_stage)
        for of_stage in pieces
    ]
    # Devices after devices, since only stages that share them compete for memory. What is chosen
    # for a stage is decided for its copies on the devices that follow.
    plans: list[RunPlan] = []
    chosen: dict[tuple[int, str], tuple[Remat, ...]] = {}
    for numbers in by_devices.values():
        decided = {
            (number, tower): policies
            for number in numbers
            for (first, tower), policies in chosen.items()
            if first == pieces.index(pieces[number])
        }
        plans.append(
            _plan_devices(config, stages, numbers, layout, speed, limit, in_flight, decided)
        )
        for number, stage in zip(numbers, plans[-1].stages, strict=True):
            chosen |= {(number, tower): stage.policies[tower] for tower in stage.activations}
    planned = {
        number: stage
        for numbers, plan in zip(by_devices.values(), plans, strict=True)
        for number, stage in zip(numbers, plan.stages, strict=True)
    }
    return RunPlan(
        stages=tuple(planned[number] for number in range(len(stages))),
        loss_chunks=max(plan.loss_chunks for plan in plans),
        limit=limit,
        seconds=sum(plan.seconds for plan in plans),
        lower_bound=sum(plan.lower_bound for plan in plans),
    )


def _plan_devices(
    config: Config,
    stages: Sequence[ShardedStage],
    numbers: Sequence[int],
    layout: RankLayout,
    speed: Speed,
    limit: MemoryLimit,
    in_flight: Sequence[int],
    decided: Mapping[tuple[int, str], tuple[Remat, ...]],
) -> RunPlan:
    """Plan the stages with these numbers, which share their devices.

    in_flight: microbatches, by stage. decided: policies of stages' towers that are chosen already.
    """
    # The stage of the LLM's loss, if it is on these devices; only there chunks make a difference.
    (head,) = [n for n in numbers if "llm" in stages[n].stage.losses] or [None]
    chunks_choices = (config.training.loss_chunks or 1,)
    if head is not None:
        chunks_choices = loss_choices(
            stages[head].mesh.shape, config.training.loss_chunks, config.model
        )
    options = {
        (number, tower): of_tower
        for number in numbers
        for tower, of_tower in _stage_options(
            config, stages, number, layout, speed, in_flight[number]
        )
    }

    def with_chunks(chunks: int) -> RunPlan:
        extra = 0.0
        if head is not None and chunks > 1:
            extra = _chunks_seconds(config, stages, head, layout, speed, chunks)
        return _choose(
            config, stages, numbers, layout, limit, in_flight, decided, options, chunks, extra
        )

    # The fastest plan that fits, or the smallest if none does; of equals the one with the fewest
    # chunks.
    return min(
        map(with_chunks, chunks_choices),
        key=lambda p: (not p.fits, p.seconds if p.fits else p.device, p.loss_chunks),
    )


def _chunks_seconds(
    config: Config,
    stages: Sequence[ShardedStage],
    head: int,
    layout: RankLayout,
    speed: Speed,
    chunks: int,
) -> float:
    """Compute the seconds that a loss in chunks takes more than one of the whole logits. head: its stage."""
    model = config.model
    parts = stages[head].sharding.llm
    if loss_parts_are_of_tokens(stages[head].mesh.shape, config.loss):
        # Each part reads and writes the float32 sum of the table's gradients.
        trained = "llm" not in frozen_modules(model)
        sums = trained * MASTER * model.llm.vocab * model.llm.width / parts
        return 2 * chunks * sums / speed.rates.memory
    batches = [stage_batch(config, layout, stages, head, shape) for shape in layout.shapes]
    works = [row_work(model, batch.shape)["llm"] for batch in batches]
    logits = float(np.mean([executed_logits(model, work) for work in works]))
    return logits / (parts * speed.rates.flops)


LayerOptions = Mapping[tuple[int, str], Mapping[Remat, Option]]  # of the layers of a stage's tower


def _choose(
    config: Config,
    stages: Sequence[ShardedStage],
    numbers: Sequence[int],
    layout: RankLayout,
    limit: MemoryLimit,
    in_flight: Sequence[int],
    decided: Mapping[tuple[int, str], tuple[Remat, ...]],
    options: LayerOptions,
    chunks: int,
    chunks_seconds: float,
) -> RunPlan:
    """Choose the policies of the towers whose `remat` is "auto"; the others keep theirs."""
    # Keys are (stage, tower). `stated` have their policies, `free` ones get them here. For each of
    # the compiled shapes, the limit less what no policy changes is what `free` layers may save.
    towers = stacked_towers(config.model)
    shapes = range(len(layout.shapes))
    layers = {
        (n, p.piece.tower): p.piece.layers
        for n in numbers
        for p in stages[n].pieces
        if p.piece.tower in towers
    }
    stated = {key: decided[key] for key in layers if key in decided} | {
        key: tuple(layer_policies(towers[key[1]])[span.start : span.stop])
        for key, span in layers.items()
        if towers[key[1]].remat != "auto"
    }
    free = {key: len(span) for key, span in layers.items() if key not in stated}
    unsaved = {key: by_policy["none"].device for key, by_policy in options.items()}
    fixed = {
        n: [fixed_bytes(config, stages, n, layout, s, in_flight, unsaved, chunks) for s in shapes]
        for n in numbers
    }

    def saved(
        policies: Mapping[tuple[int, str], Sequence[Remat]], s: int, memory: str = "device"
    ) -> float:
        return float(
            sum(
                getattr(options[key][p], memory)[s]
                for key, chosen in policies.items()
                for p in chosen
            )
        )

    def unchosen_bytes(s: int) -> float:
        """Add up what no policy changes, in bytes. Passes of stages that share devices run in turn."""
        passing = [sum(fixed[n][s][kind] for kind in IN_A_PASS) for n in numbers]
        return sum(sum(fixed[n][s].values()) for n in numbers) - sum(passing) + max(passing)

    of_free = {key: options[key] for key in free}
    device = [limit.device - unchosen_bytes(s) - saved(stated, s) for s in shapes]
    host = [limit.host - saved(stated, s, "host") for s in shapes]
    chosen = choose_policies(free, of_free, device, host)
    bound = least_seconds(free, of_free, device, host)
    if chosen is None:
        chosen = {key: (smallest_policy(options[key]),) * count for key, count in free.items()}
    policies = {**stated, **chosen}
    for s in shapes if config.optimizer.offload else ():
        # Moments in host memory are loaded when activations are gone.
        at_rest = sum(
            fixed[n][s][kind] for n in numbers for kind in ("parameters", "gradients", "batch")
        )
        total = unchosen_bytes(s) + saved(policies, s)
        for n in numbers:
            moments = sum(part.moments for part in stages[n].pieces)
            fixed[n][s]["transient"] += max(0.0, at_rest + moments - total)
    largest = int(np.argmax([unchosen_bytes(s) + saved(policies, s) for s in shapes]))
    plans = []
    for n in numbers:
        sharded = stages[n]
        layer_by_layer = {tower: policies[number, tower] for number, tower in layers if number == n}
        unets = {
            tower: (module.remat,)
            for tower, module in config.model.towers.items()
            if tower not in towers
        }
        plans.append(
            StagePlan(
                name=sharded.name,
                devices=tuple(sharded.devices),
                mesh={axis: size for axis, size in sharded.mesh.shape.items() if size > 1},
                layers={p.piece.tower: p.piece.layers for p in sharded.pieces},
                policies={
                    p.piece.tower: (layer_by_layer | unets)[p.piece.tower] for p in sharded.pieces
                },
                parameters=sum(part.parameters for part in sharded.pieces),
                in_flight=in_flight[n],
                fixed=fixed[n][largest],
                activations={
                    tower: saved({(n, tower): chosen}, largest)
                    for tower, chosen in layer_by_layer.items()
                },
                largest_shape=largest,
                recompute={
                    tower: {p: o.seconds for p, o in options[n, tower].items()}
                    for tower in layer_by_layer
                },
                sharding=sharded.sharding,
            )
        )

    def seconds(policies: Mapping[tuple[int, str], Sequence[Remat]]) -> float:
        return float(
            sum(options[key][p].seconds for key, chosen in policies.items() for p in chosen)
        )

    return RunPlan(
        stages=tuple(plans),
        loss_chunks=chunks,
        limit=limit,
        seconds=chunks_seconds + seconds(policies),
        lower_bound=chunks_seconds + seconds(stated) + (np.inf if bound is None else bound),
    )


def _stage_options(
    config: Config,
    stages: Sequence[ShardedStage],
    number: int,
    layout: RankLayout,
    speed: Speed,
    in_flight: int,
) -> Iterator[tuple[str, dict[Remat, Option]]]:
    """Compute what each policy costs a layer of each tower of a stage, for all microbatches in flight."""
    sharded = stages[number]
    model = config.model
    precision = config.training.precision
    activation = ACTIVATION[precision]
    towers = stacked_towers(model)
    for part in sharded.pieces:
        tower = part.piece.tower
        if tower not in towers:  # a UNet
            continue
        parts = sharded.sharding.parts(tower)
        by_sequence = sharded.sharding.sequence_parallel != "off"
        shapes = [
            stage_batch(config, layout, stages, number, shape).shape for shape in layout.shapes
        ]
        saved = [
            {
                policy: divide_by_tensor_parallelism(
                    bytes_,
                    towers[tower],
                    policy,
                    row_work(model, shape)[tower].positions,
                    activation,
                    parts,
                    by_sequence,
                )
                for policy, bytes_ in saved_bytes_per_layer(
                    model, tower, shape[tower], precision
                ).items()
            }
            for shape in shapes
        ]
        options = layer_options(model, tower, shapes, saved, speed, parts, activation)
        # Without a backward pass nothing is kept of a microbatch.
        microbatches = in_flight if part.has_backward else 0
        yield (
            tower,
            {
                policy: Option(
                    tuple(microbatches * n for n in o.device),
                    tuple(microbatches * n for n in o.host),
                    o.seconds,
                )
                for policy, o in options.items()
            },
        )
