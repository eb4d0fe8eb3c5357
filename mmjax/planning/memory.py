"""What a device holds beside the activations that layers keep.

A model of what XLA's allocation comes to, to a few percent where it was compiled for a GPU (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from mmjax.config import AdamW, AudioConfig, DecoderConfig, ModelConfig, Muon, VisionConfig
from mmjax.planning.cost import frozen_modules, parameters
from mmjax.planning.work import Encoder, connector_weights, layer_of, merged_positions, row_work, streams

MASTER = 4  # bytes: parameters, the sum of gradients, and the optimizer's moments are float32
LOADED = 2  # steps whose batches lie on the devices: the one that runs and the next
TEXT_FIELDS, ITEM_FIELDS = 12, 6  # four-byte numbers of a position beside slots, and beside its values
# Of what a layer without remat keeps: what lives at once while one layer's backward pass runs. Fitted to XLA.
ALIVE = 0.8


@dataclass(frozen=True)
class Spread:
    """Devices that share a model. shards: of its parameters (ZeRO-3 times tensor parallelism).

    llm, encoders: parts into which tensor parallelism cuts a layer's heads and MLP. held: by module, the part of its
    parameters that lies on each, where it is known; what a mesh axis does not divide lies whole on all.
    """

    shards: int = 1
    llm: int = 1
    encoders: int = 1
    held: Mapping[str, float] = field(default_factory=dict)

    def part_of(self, module: str) -> float:
        """Of a module's parameters, what lies on each device."""
        return self.held.get(module, 1 / self.shards)

    def parts(self, tower: str) -> int:
        """Into which a tower's layers are cut."""
        return self.llm if tower == "llm" else self.encoders


@dataclass(frozen=True)
class OnDevice:
    """One microbatch on one device. shape: as in `row_work`; widths: of every encoder, to each of `peers`."""

    shape: Mapping[str, tuple[int, int]]
    widths: Mapping[str, int]
    peers: int = 1
    microbatches: int = 1


def fixed_bytes(
    model: ModelConfig,
    batch: OnDevice,
    layers: Mapping[str, float],
    frozen: Set[str],
    spread: Spread,
    activation: int,
    optimizer: AdamW | Muon,
    loss_chunks: int = 1,
) -> dict[str, float]:
    """Bytes on one device by kind, whatever the layers' remat policies.

    layers: what one layer of each tower that has a backward pass keeps without remat, cut. activation: bytes of an
    activation, and of a frozen parameter. `copies` are trainable weights in the precision of the computation and a
    microbatch's own gradients, sharded like the parameters; `tokens` what encoders give, as it is made and as it
    arrives, with what connectors keep. The largest of the moments that no other kind covers is `transient`: the loss,
    whose logits and their gradient are float32, or the backward pass of a layer, with weights gathered for it; and,
    where parameters are sharded, one whole table of the vocabulary. loss_chunks: as in the training config.
    """
    counts, work = parameters(model), row_work(model, batch.shape)
    trainable = sum(n * spread.part_of(module) for module, n in counts.items() if module not in frozen)
    still = sum(n * spread.part_of(module) for module, n in counts.items() if module in frozen)
    own = moments(model, frozen, optimizer)
    cast = 0 if activation == MASTER else activation
    return {
        "parameters": MASTER * trainable + activation * still,
        "gradients": MASTER * trainable,
        "optimizer": MASTER * sum(n * spread.part_of(module) for module, n in own.items()),
        "copies": (MASTER + cast) * trainable,
        "batch": LOADED * batch.microbatches * _batch_bytes(model, batch),
        "tokens": sum(
            w.tokens * _per_token(model, model.encoders[name]) * activation for name, w in work.items() if name != "llm"
        ),
        "exchange": sum(
            2 * batch.peers * n * streams(model.encoders[name]) * model.llm.width * activation
            for name, n in batch.widths.items()
        ),
        "transient": max(
            _loss(model, work["llm"].positions, spread, loss_chunks),
            max((_layer(model, name, none, spread, activation) for name, none in layers.items()), default=0.0),
        )
        + _table(model, spread, activation),
    }


def moments(model: ModelConfig, frozen: Set[str], optimizer: AdamW | Muon) -> dict[str, int]:
    """Numbers that the optimizer keeps, by module: two for each parameter; one of Muon's matrices (no adapters)."""
    kept = {module: 2 * n for module, n in parameters(model).items() if module not in frozen}
    if isinstance(optimizer, AdamW):
        return kept
    matrices = {name: c.layers * layer_of(c).weights for name, c in {"llm": model.llm, **model.encoders}.items()}
    for name, encoder in model.encoders.items():
        matrices[f"{name}.connector"] = streams(encoder) * connector_weights(encoder, model.llm.width)
    return {module: n - matrices.get(module, 0) for module, n in kept.items()}


def saved_bytes(model: ModelConfig, activation: int, optimizer: AdamW | Muon) -> int:
    """Of a checkpoint: parameters, frozen ones in the precision of the computation, and the optimizer's moments."""
    frozen = frozen_modules(model)
    held = sum(n * (activation if module in frozen else MASTER) for module, n in parameters(model).items())
    return held + MASTER * sum(moments(model, frozen, optimizer).values())


def kv_cache_bytes(llm: DecoderConfig, spread: Spread, activation: int) -> float:
    """Bytes on one device that each position of a generated row takes: keys and values of all layers."""
    return 2 * llm.layers * llm.kv_heads * llm.head_width * activation / spread.llm


def _batch_bytes(model: ModelConfig, batch: OnDevice) -> float:
    rows, length = batch.shape["llm"]
    axes = max(len(model.llm.rope_sections), 1)  # of a position
    total = 4 * rows * length * (TEXT_FIELDS - 1 + axes + len(model.encoders))
    for name, encoder in model.encoders.items():
        rows, length = batch.shape[name]
        # Pixels are bytes, log-mel bins float32.
        values = encoder.patch**2 * encoder.channels if isinstance(encoder, VisionConfig) else 4 * encoder.mels
        total += rows * length * (values + 4 * ITEM_FIELDS) + 4 * batch.peers * batch.widths[name]
    return total


def _per_token(model: ModelConfig, encoder: Encoder) -> int:
    """Numbers: an encoder token twice, the connector's input, and what is between its two products."""
    each = 2 * model.llm.width + merged_positions(encoder) * encoder.width + 2 * encoder.connector.mlp_width
    return streams(encoder) * each


def _table(model: ModelConfig, spread: Spread, activation: int) -> float:
    """One table of the vocabulary, gathered for the logits or where the gradient of looked-up tokens is added up."""
    return activation * model.llm.width * model.llm.vocab / spread.llm if spread.shards > 1 else 0


def _loss(model: ModelConfig, positions: int, spread: Spread, chunks: int) -> float:
    """float32 logits of one part of the vocabulary, whose gradient takes their place, beside the sums of its products.

    Those are the gradient of the activations, with the activations themselves, and that of this part of the table.
    """
    vocab, width = model.llm.vocab / (spread.llm * chunks), model.llm.width
    table = width * vocab if spread.shards > 1 else 0
    return MASTER * (positions * (vocab + 2 * width) + table)


def _layer(model: ModelConfig, tower: str, none: float, spread: Spread, activation: int) -> float:
    """One layer's backward pass, its largest matrix gathered with a float32 gradient."""
    config: DecoderConfig | VisionConfig | AudioConfig = model.llm if tower == "llm" else model.encoders[tower]
    layer = layer_of(config)
    largest = layer.width * max(layer.mlp, layer.queries) / spread.parts(tower)
    return ALIVE * none + ((activation + MASTER) * largest if spread.shards > 1 else 0)
