"""Memory of a device beside the activations that layers save: parameters, optimizer, batches, peak temporaries.

A model of XLA's allocation, accurate to a few percent where it was compiled for a GPU
(docs/planning.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import numpy as np

from mmjax.config import (
    AudioConfig,
    DecoderConfig,
    ModelConfig,
    OptimizerConfig,
    Remat,
    SequenceParallel,
    Tower,
    VaeConfig,
)
from mmjax.config.model import (
    NF4_BLOCK,
    frozen_modules,
    layer_count,
    linear_layers,
    quantized_layers,
    stacked_towers,
)
from mmjax.cost.table import module_parameters, parameters
from mmjax.planning.flops import mean_layer, needed_gradients, tower_trace
from mmjax.planning.unet import unet_saved_bytes, unets
from mmjax.planning.work import Work, connector_mlps, layer_sizes, row_work

GB = 1e9  # bytes
CONV_TAPS = 3  # along each side of the convolutions of an audio encoder


class SavedBytes(NamedTuple):
    """Bytes saved between the passes of one microbatch."""

    device: float
    host: float = 0.0  # offloaded


def saved_bytes_per_layer(
    model: ModelConfig, tower: str, shape: tuple[int, int], dtype: str
) -> dict[Remat, SavedBytes]:
    """Return the bytes that one layer of a tower saves under every policy; of layers the mean.

    shape: (rows, row length). dtype: of the activations. Counted are the residuals of JAX's
    vector-Jacobian product, between layers and inside them (OmniBal, A.1.1, measures them on a
    device); not the parameters, nor the masks and rotary angles that all layers share.
    """
    trace = tower_trace(
        model, tower, frozenset(model.item_modules), frozen_modules(model), dtype=dtype
    )
    units = np.array(row_work(model, {tower: shape})[tower], float)
    costs = {policy: mean_layer(trace, policy) for policy in get_args(Remat)}
    return {
        policy: SavedBytes(float(c.device @ units), float(c.host @ units))
        for policy, c in costs.items()
    }


# Arrays as wide as the layer among what a policy saves: with `none`, inputs of attention and MLP
# before and after their norms; with `products`, the layer's input and attention's last product;
# else inputs of the layer and of its MLP.
WIDE_ARRAYS: dict[Remat, int] = {"none": 4, "products": 2, "attention_mlp": 2}
# A diffusion transformer has the gated outputs of attention and MLP, and the input of
# cross-attention beside these.
WIDE_ARRAYS_OF_DIFFUSION: dict[Remat, int] = {"none": 7, "products": 4, "attention_mlp": 2}
# With an MLP that reads what attention reads, the layer's input before and after its norm.
WIDE_ARRAYS_OF_PARALLEL: dict[Remat, int] = {"none": 2}


def divide_by_tensor_parallelism(
    saved: SavedBytes,
    config: Tower,
    policy: Remat,
    positions: int,
    activation: int,
    parts: int,
    by_sequence: bool = False,
) -> SavedBytes:
    """Divide the bytes that a policy saves at `positions` by tensor parallelism into `parts`.

    Wide arrays are divided only with sequence parallelism, `by_sequence`.
    """
    if by_sequence:
        return SavedBytes(saved.device / parts, saved.host / parts)
    # What is as wide as the layer is whole on every device: tensor parallelism cuts only what lies
    # within a layer.
    arrays = WIDE_ARRAYS_OF_PARALLEL if config.parallel_mlp else WIDE_ARRAYS
    arrays = WIDE_ARRAYS_OF_DIFFUSION if config.is_generator else arrays
    wide = arrays.get(policy, 1) * layer_sizes(config).width * activation * positions
    replicated = min(wide, saved.device)
    return SavedBytes(replicated + (saved.device - replicated) / parts, saved.host / parts)


# bytes of a number of activations, by `training.precision`
ACTIVATION = {"float32": 4, "bfloat16": 2}
MASTER = 4  # bytes: parameters and the sum of gradients are float32
MOMENT = {"float32": 4, "bfloat16": 2, "int8": 1}  # bytes of a moment, by `optimizer.moments`
LOADED = 2  # steps whose batches are on the devices: the running one and the next
TEXT_FIELDS = 12  # four-byte numbers per text position, beside slots
ITEM_FIELDS = 6  # four-byte numbers per encoder position, beside its values
# Fraction of a layer's values, saved without remat or not, that is live at once in its backward
# pass. Fitted to XLA.
ALIVE = 0.7
# What a layer does not save but computes again: arrays as wide as the MLP, and float32 ones as wide
# as the layer.
MLP_ARRAYS = 4
STREAMS = 4
# Float32 scores and arrays as large, beside the saved ones. As compiled for CPUs: 2.2 to 3.6, by
# precision and policy.
SCORE_ARRAYS = 3
# arrays as wide as the layer of the copies of tokens that go to experts, and of their gradients
COPIES = 4
# the same of tokens that come from other devices, before they are copied for their experts
ARRIVED = 5


@dataclass(frozen=True)
class ModelSharding:
    """Sharding of a model over devices."""

    shards: int = 1  # of the parameters: ZeRO-3 times tensor parallelism
    llm: int = 1  # tensor-parallel parts of the LLM's layers
    encoders: int = 1  # tensor-parallel parts of the encoders' layers
    sequence_parallel: SequenceParallel = "off"  # as `mesh.sequence_parallel`, decided
    # By module, the fraction of its parameters on each device, where known: what a mesh axis does
    # not divide is replicated, so it may be more than 1 / shards.
    shares: Mapping[str, float] = field(default_factory=dict)
    experts: int = 1  # devices that share the experts of a layer

    def part_of(self, module: str) -> float:
        """Return the fraction of a module's parameters on each device."""
        return self.shares.get(module, 1 / self.shards)

    def parts(self, tower: str) -> int:
        """Return the number of tensor-parallel parts of a tower's layers."""
        return self.llm if tower == "llm" else self.encoders


@dataclass(frozen=True)
class DeviceBatch:
    """One microbatch on one device."""

    shape: Mapping[str, tuple[int, int]]  # (rows, row length) by tower
    widths: Mapping[str, int]  # tokens exchanged with each peer, by encoder
    peers: int = 1
    microbatches: int = 1
    context: int = 1  # devices that share a row, of which each has the length in `shape`
    # By tower, those of the blocks that attention visits on the device with most, where contents
    # are known.
    pairs: Mapping[str, float] = field(default_factory=dict)


def unet_bytes(
    model: ModelConfig, work: Mapping[str, Work], frozen: Set[str], activation: int
) -> tuple[float, list[float]]:
    """Count the bytes that all UNets keep for backward, and of each those of its largest block's backward pass."""
    saved = 0.0
    peaks = []
    for name, unet in unets(model).items():
        if not needed_gradients(name, model, frozen):
            continue
        images = work[name].tokens // unet.queries if name in work else 0
        of_images, largest = unet_saved_bytes(unet, images, activation, name not in frozen)
        saved += of_images
        peaks.append((1 + ALIVE) * largest if unet.remat == "full" else ALIVE * largest)
    return saved, peaks


# arrays of a block's widest channels that are live at once in the precision of the computation,
VAE_STREAMS = 2
VAE_NORMED = 1  # and in float32, inside its norm
VAE_SCORES = 2 * 4  # bytes of scores and weights of attention, in float32


def vae_bytes(vae: VaeConfig, size: tuple[int, int], activation: int) -> float:
    """Count the peak bytes of encoding one image of (height, width) latents. activation: bytes of a number."""
    positions = size[0] * size[1]
    widths_in = (vae.widths[0], *vae.widths)
    # Of a level's first block, which has the channels of the level before: a quarter of the
    # positions further down.
    widest = max(
        max(widths_in[i], width) * positions * 4 ** (len(vae.widths) - 1 - i)
        for i, width in enumerate(vae.widths)
    )
    return (
        widest * (VAE_STREAMS * activation + VAE_NORMED * 4)
        + vae.attention * VAE_SCORES * positions**2
    )


def layer_matrices(model: ModelConfig) -> dict[str, int]:
    """Count the elements of the matrices in each tower's layers."""
    counts = module_parameters(model)
    return {name: counts[name].matrices for name in stacked_towers(model)}


def moment_bytes(
    model: ModelConfig, frozen: Set[str], optimizer: OptimizerConfig
) -> dict[str, float]:
    """Count the bytes of the optimizer's moments by module, all as if of matrices, and of the moving average.

    Two moments per parameter, but one of Muon's matrices (no adapters), and at most one of
    Adafactor. Left out: scales of rows, and Adafactor's factors.
    """
    trained = {module: n for module, n in parameters(model).items() if module not in frozen}
    numbers = {module: optimizer.moments_per_parameter * n for module, n in trained.items()}
    if optimizer.has_muon:
        counts = module_parameters(model)
        of_muon = {
            module: n.matrices for module, n in counts.items() if not module.endswith(".lora")
        }
        numbers = {module: n - of_muon.get(module, 0) for module, n in numbers.items()}
    average = MASTER if optimizer.ema else 0
    return {
        module: MOMENT[optimizer.moments] * n + average * trained[module]
        for module, n in numbers.items()
    }


def saved_bytes(model: ModelConfig, activation: int, optimizer: OptimizerConfig) -> int:
    """Count the bytes of a checkpoint: parameters, frozen ones in the computation's precision, and moments."""
    frozen = frozen_modules(model)
    weights = sum(parameter_bytes(model, frozen, activation).values())
    return round(weights + sum(moment_bytes(model, frozen, optimizer).values()))


# Of what a host writes of a snapshot: the newest, the one that is written, and what it is written
# from; of what it keeps for another host, the first two.
WRITTEN_COPIES = 3
KEPT_COPIES = 2


def snapshot_bytes(state: float, hosts: int) -> float:
    """Count the bytes of a host's memory that snapshots take. hosts: over which one copy of the state lies."""
    return state / hosts * (WRITTEN_COPIES + (KEPT_COPIES if hosts > 1 else 0))


def parameter_bytes(model: ModelConfig, frozen: Set[str], activation: int) -> dict[str, float]:
    """Count the bytes of every module's parameters: float32, but of frozen ones as activations, or quantised."""
    counts = {
        module: n * (activation if module in frozen else MASTER)
        for module, n in parameters(model).items()
    }
    sizes = linear_layers(model)
    for layer, how in quantized_layers(model).items():
        inputs, outputs = sizes[layer]
        # Bytes per output: codes of a byte and a float32 scale per output, or per matrix; or two
        # codes a byte and a scale per block of inputs.
        numbers = {
            "int8": inputs + MASTER,
            "fp8": inputs + MASTER / outputs,
            "nf4": inputs / 2 + MASTER * inputs / NF4_BLOCK,
        }[how]
        counts[layer.split(".")[0]] -= (
            layer_count(model, layer) * outputs * (activation * inputs - numbers)
        )
    return counts


def reordered_elements(config: Tower, layers: int, sharding: ModelSharding, tower: str) -> float:
    """Count the elements of the matrices of a tower's layers whose outputs are sharded: attentions' output, MLP's down.

    Of these XLA makes a second copy in another order.
    """
    if sharding.shards == 1:
        return 0.0
    layer = layer_sizes(config)
    return (
        layers * layer.width * (layer.queries + layer.cross + layer.mlp) * sharding.part_of(tower)
    )


def muon_update_bytes(
    model: ModelConfig, layers: Mapping[str, int], sharding: ModelSharding, activation: int
) -> float:
    """Count the bytes of Muon's update on one of several devices: its layers as received and as sent back.

    layers: trained ones of every tower. XLA keeps the exchanges of all towers in flight (fitted to
    it). Beside them is one product of the largest matrix.
    """
    if sharding.shards == 1:
        return 0.0
    sizes = {name: layer_sizes(stacked_towers(model)[name]) for name in layers}
    matrices = {
        name: layer_matrices(model)[name] / stacked_towers(model)[name].layers for name in layers
    }
    exchanged = sum(-(-count // sharding.shards) * matrices[name] for name, count in layers.items())
    product = max((s.width * max(s.mlp, s.queries) for s in sizes.values()), default=0)
    return 2 * activation * exchanged + MASTER * product


def kv_cache_bytes(llm: DecoderConfig, sharding: ModelSharding, activation: int) -> float:
    """Count a device's bytes for each position of a generated row: keys and values of the layers with attention.

    Of latent attention the latents, which every device has.
    """
    if llm.latent:  # that all heads share
        numbers = llm.latent.key_rank + 2 * llm.rotary_pairs
        return llm.attention_layers * numbers * activation
    return 2 * sum(llm.key_channels) * activation / sharding.llm


def batch_bytes(model: ModelConfig, batch: DeviceBatch, tower: str, activation: int) -> float:
    """Count the bytes of one tower's input arrays in a microbatch."""
    rows, length = batch.shape[tower]
    if tower == "llm":
        # One of the text's fields, the position, has an entry for each axis.
        axes = max(len(model.llm.rope_sections), 1)
        # One column of `slots` for each encoder and generator, beside the fields.
        return 4 * rows * length * (TEXT_FIELDS - 1 + axes + len(model.item_modules))
    module = model.towers[tower]
    # Pixels are bytes, latents and log-mel bins float32.
    values = module.input_values * (1 if module.takes_pixels else 4)
    if module.encode == "once":
        values = module.output_width * activation / module.output_stride
    return rows * length * (values + 4 * ITEM_FIELDS) + 4 * batch.peers * batch.widths.get(tower, 0)


def token_bytes(model: ModelConfig, name: str, batch: DeviceBatch, activation: int) -> float:
    """Count the bytes of an encoder's outputs before and after the exchange, with what its connector saves.

    Of a generator those of its inputs, which its connector takes in the LLM's width; where devices
    share rows of the LLM, each has the whole rows' outputs too, as they came and in order.
    """
    module = model.towers[name]
    c = module.connector
    if module.is_generator:
        numbers = 2 * model.llm.width + (2 + c.gated) * c.mlp_width + module.condition_width
        gathered = (
            2 * batch.context * math.prod(batch.shape["llm"]) * model.llm.width
            if batch.context > 1
            else 0
        )
        return (row_work(model, batch.shape)[name].tokens * numbers + gathered) * activation
    # Numbers per token: itself before and after the exchange, the connector's input, its MLP's
    # hidden values twice, and what a patch merger makes, with a projection three times more.
    numbers = (
        2 * model.llm.width + module.merged_positions * module.width + (2 + c.gated) * c.mlp_width
    )
    numbers += (1 + 3 * c.projection) * c.merger_width + c.output_width
    return row_work(model, batch.shape)[name].tokens * connector_mlps(module) * numbers * activation


def exchange_bytes(model: ModelConfig, batch: DeviceBatch, activation: int) -> float:
    """Count the bytes of the tokens that a device sends and receives, to peers and on its rank, padding included."""
    sent = sum(
        slots * connector_mlps(model.item_modules[name])
        for name, slots in sent_slots(model, batch).items()
    )
    return 2 * sent * model.llm.width * activation


def sent_slots(model: ModelConfig, batch: DeviceBatch) -> dict[str, int]:
    """Count the tokens for which a device's sends have room, by module: `send` and `spread` of a TextBatch."""
    work = row_work(model, batch.shape) if batch.context > 1 else {}
    slots = {name: batch.peers * width for name, width in batch.widths.items()}
    # Each of the rank's devices may get all that came and that is here, but of what goes to a
    # generator.
    spread = {name for name in work if not model.towers[name].is_generator}
    return {
        name: n + (batch.context * (n + work[name].tokens) if name in spread else 0)
        for name, n in slots.items()
    }


def loss_bytes(
    model: ModelConfig,
    positions: int,
    sharding: ModelSharding,
    activation: int,
    chunks: int,
    of_tokens: bool,
) -> float:
    """Count the peak bytes of the loss: activations and their gradient in float32, and what one chunk takes.

    Where parameters are sharded, the gathered part of the output table, in both passes. Beside it
    the larger of two: float32 logits with their gradient, which in float32 reuses their buffer, or
    this gradient and the part's own. of_tokens: chunks are parts of the tokens: a trained
    table, cast for computation, in place of the activations in float32; its gradient is not
    counted.
    """
    width = model.llm.width
    vocab = model.llm.vocab / (sharding.llm * chunks)
    logits = MASTER * positions * vocab
    gradient = activation * positions * vocab
    table = activation * width * vocab if sharding.shards > 1 else 0
    both = logits if activation == MASTER else logits + gradient
    if of_tokens and chunks > 1:
        # Frozen ones lie in the precision of the computation.
        is_cast = activation < MASTER and "llm" not in frozen_modules(model)
        cast = is_cast * activation * width * vocab * chunks
        return MASTER * positions * width + cast + both
    return MASTER * positions * 2 * width + table + max(both, gradient + table)


def layer_backward_bytes(
    model: ModelConfig,
    tower: str,
    saved: float,
    work: Work,
    sharding: ModelSharding,
    activation: int,
) -> float:
    """Count the peak bytes of one layer's backward pass, its largest matrix gathered with a float32 gradient.

    work: of the tower's rows, padding included (`row_work`).
    """
    config = stacked_towers(model)[tower]
    positions = work.positions
    layer = layer_sizes(config)
    parts = sharding.parts(tower)
    largest = layer.width * max(layer.mlp, layer.queries) / parts
    copied = 0.0
    if experts := config.experts:
        # All experts of the device, of which gate and up are gathered together.
        largest = max(
            largest, 2 * layer.width * experts.width * experts.count / (parts * sharding.experts)
        )
        copied = dispatch_bytes(config, positions, sharding, activation)
    stream_parts = 1 if sharding.sequence_parallel == "off" else parts
    scores = (
        SCORE_ARRAYS * MASTER * layer.heads / parts * work.pairs
        if config.attention == "dense"
        else 0.0
    )
    again = positions * (
        MLP_ARRAYS * layer.mlp * activation / parts + STREAMS * MASTER * layer.width / stream_parts
    )
    return (
        ALIVE * (saved + again)
        + scores
        + copied
        + ((activation + MASTER) * largest if sharding.shards > 1 else 0)
    )


def stem_backward_bytes(encoder: AudioConfig, positions: int, activation: int) -> float:
    """Count the peak bytes of the backward pass of 2D convolutions: recomputed arrays and a gradient of each.

    These are activations and the operands of products, nine times what they are read from. 1D ones
    take less than a layer.
    """
    activations = operands = 0
    inputs = 1
    count = len(encoder.stem_channels)
    for n, (bins, width) in enumerate(zip(encoder.stem_bins, encoder.stem_channels, strict=True)):
        times = 2 ** (count - 1 - n)  # of a position of the layers
        activations += times * bins * width
        operands += CONV_TAPS**2 * times * bins * inputs
        inputs = width
    return 2 * activation * positions * (activations + operands)


def dispatch_bytes(
    llm: DecoderConfig, positions: int, sharding: ModelSharding, activation: int
) -> float:
    """Count the bytes of the copies of tokens, one for each of their experts, that backward makes of a layer.

    Where devices share the experts, these are as many as it computes at once, beside the tokens
    that come at once.
    """
    e = llm.experts
    devices = sharding.experts
    copies = e.computed_at_once(positions * devices, devices)
    if devices == 1:  # the hidden layer is counted with the layer's MLP
        return activation * copies * COPIES * llm.width
    arrived = devices * e.sent_at_once(positions, devices)
    hidden = MLP_ARRAYS * e.width / sharding.llm
    return activation * (copies * (COPIES * llm.width + hidden) + arrived * ARRIVED * llm.width)
