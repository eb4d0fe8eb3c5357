"""Count the bytes of a stage on each of its devices, apart from the activations that layers save for backward.

A model of XLA's allocation, accurate to a few percent where it was compiled for a GPU
(docs/planning.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmjax.autotune.sharded_stages import (
    ShardedStage,
    device_batch,
    rows_on_device,
    stage_batch,
)
from mmjax.config import (
    Config,
)
from mmjax.config.model import frozen_modules, stacked_towers, step_vaes
from mmjax.data.plan.step_plan import RankLayout
from mmjax.parallel.sharding import loss_parts_are_of_tokens, row_ranks
from mmjax.planning.flops import runs_twice
from mmjax.planning.item_encoding import encoding_bytes
from mmjax.planning.memory import (
    ACTIVATION,
    LOADED,
    MASTER,
    batch_bytes,
    exchange_bytes,
    layer_backward_bytes,
    loss_bytes,
    muon_update_bytes,
    reordered_elements,
    saved_bytes_per_layer,
    sent_slots,
    stem_backward_bytes,
    token_bytes,
    unet_bytes,
    vae_bytes,
)
from mmjax.planning.unet import unet_saved_bytes
from mmjax.planning.work import row_work


def fixed_bytes(
    config: Config,
    stages: Sequence[ShardedStage],
    number: int,
    layout: RankLayout,
    shape: int,
    microbatches_in_flight: Sequence[int],
    unsaved: Mapping[tuple[int, str], Sequence[float]],
    chunks: int,
) -> dict[str, float]:
    """Count a stage's bytes on each device by kind, in one batch shape, without activations that layers save.

    microbatches_in_flight: by stage. unsaved: bytes that one layer of each stage's tower saves
    without remat, in every shape, of all microbatches in flight. chunks: of the vocabulary in the
    loss. `gradients`: float32; where a step has one microbatch and one stage, those of layers'
    matrices are in the precision of the computation. `copies`: weights cast for computation and
    their gradients until they are added to the others. In a program of the whole model, those of a
    layer and of what is outside the layers, else all. Where parameters are sharded, the matrices of
    all layers whose outputs are cut, once more: XLA reorders them for gathering before it scans.
    `tokens`: encoder outputs before and after the exchange, with what connectors save. `images`:
    what UNets keep for backward. `messages`: activations that arrive and leave. `transient`: the
    largest peak that no other kind covers: the loss, with float32 logits and their gradient; one
    layer's backward pass with its gathered weights, or that of 2D convolutions before an audio
    encoder's layers; images encoded by a VAE, one of each row at a time; Muon's update, where it
    takes more than `copies`. `encoding`: an encoder that encodes once, whole, and a batch of items.
    With one microbatch, less what the embedding's gradient has room for:
    it is made last, and XLA uses its buffer until then. `optimizer`: moments, unless they are in
    host memory.
    """
    sharded = stages[number]
    sharding = stages[number].sharding
    model = config.model
    activation = ACTIVATION[config.training.precision]
    frozen = frozen_modules(model)
    in_flight = microbatches_in_flight[number]
    is_whole = sharded.is_whole
    accumulates = config.batch.microbatches > 1 or not is_whole
    cast = 0 if activation == MASTER else activation  # computing in float32 needs no cast copy
    kinds: Counter[str] = Counter()
    before_copies = [0.0]
    beside_copies = [0.0]
    largest_layer = 0.0
    for part in sharded.pieces:
        piece = part.piece
        tower = part.piece.tower
        trainable = part.trainable
        batch = stage_batch(config, layout, stages, number, layout.shapes[shape], tower)
        work = row_work(model, batch.shape)
        positions = work[tower].positions
        module = model.towers[tower]
        is_unet = not module.is_stack
        kinds["parameters"] += trainable + part.frozen
        if module.encode == "once":
            kinds["encoding"] += encoding_bytes(model, tower, activation)
        kinds["gradients"] += trainable - (
            0 if accumulates else (1 - activation / MASTER) * part.scanned
        )
        kinds["optimizer"] += 0.0 if config.optimizer.offload else part.moments
        # Of scanned stacks they are added to their sums layer by layer.
        outside = trainable - part.scanned
        if is_whole:
            kinds["copies"] += accumulates * activation / MASTER * outside
            largest_layer = max(largest_layer, part.scanned / len(piece.layers))
        elif part.has_backward:
            kinds["copies"] += outside + cast / MASTER * (trainable if is_unet else part.scanned)
        if not is_unet and (is_whole or part.has_backward):
            # The matrices of a program of both passes are reordered before they are cast.
            dtype_bytes = MASTER if sharded.is_sink and tower not in frozen else activation
            kinds["copies"] += dtype_bytes * reordered_elements(
                module, len(piece.layers), sharding, tower
            )
        if part.has_backward and is_unet:
            saved, peaks = unet_bytes(model, {tower: work[tower]}, frozen, activation)
            kinds["images"] += in_flight * saved
            beside_copies.append(sum(peaks))
        elif part.has_backward:
            of_layer = unsaved[number, tower][shape] / in_flight
            beside_copies.append(
                layer_backward_bytes(model, tower, of_layer, work[tower], sharding, activation)
            )
            if piece.first and module.modality == "audio":
                beside_copies.append(stem_backward_bytes(module, positions, activation))
        # A connector stands behind its encoder, or before its generator.
        if (
            (is_whole or part.has_backward)
            and tower != "llm"
            and (piece.first if piece.generates else piece.last)
        ):
            # Where a generator is with the LLM's end, each device of a rank has the whole rows that
            # it reads.
            context = batch.context if piece.generates and tower not in sharded.stage.inputs else 1
            kinds["tokens"] += in_flight * token_bytes(
                model, tower, replace(batch, context=context), activation
            )
        if batch.context > 1 and set(piece.sends_states) & set(sharded.stage.outputs):
            # The same, as they came and in order.
            beside_copies.append(2 * batch.context * positions * model.llm.width * activation)
        if piece.makes_loss and not piece.generates:
            of_tokens = loss_parts_are_of_tokens(sharded.mesh.shape, config.loss)
            # Copies, which backward makes when the loss is done with.
            loss = loss_bytes(model, positions, sharding, activation, chunks, of_tokens)
            if of_tokens and chunks > 1 and "llm" not in frozen:
                # The loss adds up the table's gradient in float32, in the room of later gradients
                # where it is part of a program of both passes.
                room = outside * (activation / MASTER if accumulates else 1) if is_whole else 0.0
                sums = MASTER * model.llm.vocab * model.llm.width / sharding.llm
                loss += max(0.0, sums - room)
            before_copies.append(loss)
        if piece.first and (vae := step_vaes(model).get(tower)):
            encoding = vae_bytes(vae, module.image_size, activation)
            before_copies.append(batch.shape[tower][0] * encoding)
        # Tables that say which tokens are sent lie where the exchange is, and not with encoders and
        # generators.
        tables = 0
        if exchanged := (*piece.encoders, *piece.sends_states):
            exchanging = replace(batch, widths={name: batch.widths[name] for name in exchanged})
            tables = 4 * sum(sent_slots(model, exchanging).values())
            exchange = exchange_bytes(model, exchanging, activation)
            if is_whole:
                kinds["exchange"] += exchange
            else:  # encoders' tokens are exchanged before copies are made, and their gradients behind the layers
                before_copies.append(exchange)
        of_batch = batch_bytes(model, replace(batch, widths={}), tower, activation) + tables
        kinds["batch"] += LOADED * config.batch.microbatches * of_batch
        # For every microbatch in flight one; of a UNet the states that it takes.
        if {*piece.inputs, *piece.outputs} & {*sharded.stage.inputs, *sharded.stage.outputs}:
            numbers = work[tower].tokens * model.llm.width if is_unet else positions * module.width
            # Those of a frozen reference are kept for no backward pass.
            messages_held = in_flight + (config.loss.repeats_forward and runs_twice(tower, model))
            kinds["messages"] += 2 * messages_held * numbers * activation
    kinds["copies"] += (activation + cast) / MASTER * largest_layer
    kinds["messages"] += _deepstack_bytes(
        config, stages, number, layout, shape, microbatches_in_flight
    )
    if is_whole:
        # The embedding's gradient is made last, and XLA uses its buffer until then.
        embedding = 0.0
        if not accumulates and not model.llm.tied and "llm" not in frozen:
            embedding = MASTER * model.llm.vocab * model.llm.width * sharding.part_of("llm")
        transient = max(*before_copies, *beside_copies) - embedding
    else:
        # Pieces run in turn.
        transient = max(max(beside_copies), max(before_copies) - kinds["copies"])
    if config.optimizer.has_muon:
        # The update begins when copies and activations are gone.
        trained = {
            p.piece.tower: len(p.piece.layers)
            for p in sharded.pieces
            if p.piece.tower not in frozen
        }
        layers = {
            tower: count for tower, count in trained.items() if tower in stacked_towers(model)
        }
        transient = max(
            transient, muon_update_bytes(model, layers, sharding, activation) - kinds["copies"]
        )
    order = (
        "parameters",
        "gradients",
        "optimizer",
        "copies",
        "batch",
        "messages",
        "tokens",
        "images",
        "exchange",
        "encoding",
    )
    return {kind: float(kinds[kind]) for kind in order} | {"transient": max(0.0, transient)}


def _deepstack_bytes(
    config: Config,
    stages: Sequence[ShardedStage],
    number: int,
    layout: RankLayout,
    shape: int,
    in_flight: Sequence[int],
) -> float:
    """Count the bytes of deepstack tokens that wait on each device of an LLM's stage for their layers' outputs."""
    producers = {name: n for n, placed in enumerate(stages) for name in placed.stage.outputs}
    rows = rows_on_device(config, layout, stages)
    bytes_ = 0.0
    for name in stages[number].stage.inputs:
        encoder, deeper, _ = name.partition(".deeper.")
        if deeper:
            batch = device_batch(config, layout, rows, layout.shapes[shape])
            ends = stages[producers[name]], stages[number]
            made_on, added_on = (row_ranks(end.mesh, end.rules.token_rows) for end in ends)
            tokens = row_work(config.model, batch.shape)[encoder].tokens * made_on / added_on
            size_of_token = config.model.llm.width * ACTIVATION[config.training.precision]
            # Those of a microbatch come before all stages between, and its maker has it in flight
            # as long.
            bytes_ += in_flight[producers[name]] * tokens * size_of_token
    return bytes_


def unsaved_bytes(config: Config, layout: RankLayout) -> dict[str, float]:
    """Count the bytes that one layer of each tower saves without remat or tensor parallelism, by position."""
    model = config.model
    precision = config.training.precision
    unsaved = {}
    for k, (tower, module) in enumerate(model.towers.items()):
        length = max(shape.lengths[k] for shape in layout.shapes)
        work = row_work(model, {tower: (1, length)})[tower]
        if not module.is_stack:
            images = work.tokens // module.condition_tokens
            trained = tower not in frozen_modules(model)
            saved = unet_saved_bytes(
                replace(module, remat="none"), images, ACTIVATION[precision], trained
            )[0]
        else:
            saved = saved_bytes_per_layer(model, tower, (1, length), precision)["none"].device
        unsaved[tower] = saved / max(work.positions, 1)
    return unsaved
