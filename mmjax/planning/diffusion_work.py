"""Products, elementwise operations and saved bytes of diffusion transformers: what differs there from encoders.

An image's time and sizes are embedded once per image. Layers attend an image's condition too, whose keys and values are
products per token of it; and in backward the gradient of a gate needs the output that it gates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from mmjax.config import DiffusionTransformerConfig, ModelConfig, Remat
from mmjax.config.generators import TIME_FEATURES
from mmjax.config.model import towers_of
from mmjax.planning.work import AdapterWork, Products, Work, layer_sizes

LOGSUMEXP = 4  # bytes: blockwise attention saves the log-sum-exp of each query and head, in float32
VECTORS = 6  # per image, that shift, scale and gate a layer's attention and MLP
RECOMPUTED_VECTORS = 4  # of these, that backward spreads over positions once more: scales and gates


def diffusion_transformers(model: ModelConfig) -> dict[str, DiffusionTransformerConfig]:
    """Return a model's diffusion transformers by name."""
    return {name: c for name, c in towers_of(model).items() if isinstance(c, DiffusionTransformerConfig)}


def diffusion_parameters(config: DiffusionTransformerConfig) -> int:
    """Count the parameters of a diffusion transformer."""
    c = config
    width, third = c.width, c.width // 3
    patches = (c.patch_values + 1) * width
    head = 2 * width + (1 + c.learned_variance) * (width + 1) * c.patch_values
    modulation = (width + 1) * VECTORS * width
    return (
        patches
        + _mlp(TIME_FEATURES, width)
        + c.micro_conditions * 2 * _mlp(TIME_FEATURES, third)
        + modulation
        + c.condition_mlp * _mlp(c.condition_width, width)
        + c.layers * layer_sizes(c).parameters
        + head
    )


def _mlp(inputs: int, width: int) -> int:
    """Count the parameters of an MLP to a width, over a hidden layer as wide."""
    return (inputs + 1 + width + 1) * width


def diffusion_products(
    config: DiffusionTransformerConfig, work: Work, trainable: bool, upstream: bool, adapters: Mapping[str, int]
) -> Products:
    """Count the multiply-adds of a forward pass. upstream: the gradient of the condition is wanted.

    adapters: ranks by the linear layers of a layer that have one. What they add counts apart.
    """
    c = config
    layer = layer_sizes(c)
    width, third = c.width, c.width // 3
    images = work.tokens // c.condition_tokens
    features = TIME_FEATURES * (width + c.micro_conditions * 3 * third)
    embedded = (1 + VECTORS) * width**2 + c.micro_conditions * 3 * third**2
    per_token = c.layers * layer.idle
    # The condition's first product, which is with data where nothing before it is trained; so are the others where
    # nothing of the transformer is either.
    first = c.condition_width * width if c.condition_mlp else per_token
    rest = width**2 + per_token if c.condition_mlp else 0
    of_data = first * (not upstream) + rest * (not upstream and not trainable)
    weights = (c.layers * layer.weights + width * c.patch_values) * work.positions
    reach = _reach(adapters, upstream)
    return Products(
        data=c.patch_values * width * work.inputs + features * images + of_data * work.tokens,
        weights=weights + (first + rest - of_data) * work.tokens,
        attention=c.layers * 2 * layer.attended * work.pairs,
        of_time=embedded * images,
        cross=c.layers * 2 * layer.cross * c.condition_tokens * work.positions,
        spared_weights=0 if trainable else _spared_weights(c, work, reach),
        spared_attention=0 if trainable else _spared_attention(c, work, reach, adapters),
    )


class _Reach(NamedTuple):
    """Tell which inputs of the first layer's parts have a gradient, where adapters and perhaps the condition do."""

    output: bool  # of self-attention: its queries, keys or values have adapters
    queries: bool  # of cross-attention, by the stream
    own_queries: bool  # the same, or an adapter makes them
    keys: bool  # of cross-attention, in all layers: by the condition or an adapter
    values: bool
    mlp: bool
    down: bool  # of the MLP's last product

    @property
    def cross_output(self) -> bool:
        return self.own_queries or self.keys or self.values


def _reach(adapters: Collection[str], upstream: bool) -> _Reach:
    output = any(f"attention.{name}" in adapters for name in ("query", "key", "value"))
    queries = output or "attention.output" in adapters
    inputs = [queries or "cross_attention.query" in adapters]
    inputs += [upstream or f"cross_attention.{name}" in adapters for name in ("key", "value")]
    mlp = any(inputs) or "cross_attention.output" in adapters
    return _Reach(output, queries, *inputs, mlp, mlp or "mlp.up" in adapters)


def _spared_weights(config: DiffusionTransformerConfig, work: Work, reach: _Reach) -> int:
    """Count the gradients of inputs of the first layer's matrices that nobody needs."""
    width = config.width
    square = 3 + (not reach.output) + (not reach.queries) + (not reach.cross_output)
    return width * (square * width + ((not reach.mlp) + (not reach.down)) * config.mlp_width) * work.positions


def _spared_attention(
    config: DiffusionTransformerConfig, work: Work, reach: _Reach, adapters: Collection[str]
) -> float:
    """Count the products inside attention's backward that nobody needs: of the first layer, and of condition tokens."""
    layer = layer_sizes(config)
    spared = 4 - attention_gradients(adapters)
    cross = (not (reach.own_queries or reach.keys)) + (not reach.own_queries)
    cross += config.layers * ((not reach.keys) + (not reach.values))
    return spared * layer.attended * work.pairs + cross * layer.cross * config.condition_tokens * work.positions


def attention_gradients(adapters: Collection[str]) -> int:
    """Count the products of self-attention's backward that adapters of the first layer need, of four."""
    query, key, value = (f"attention.{name}" in adapters for name in ("query", "key", "value"))
    # The gradient of the attention weights is needed for those of queries and keys.
    return (query or key) * (1 + query + key) + value


def diffusion_adapters(
    config: DiffusionTransformerConfig, work: Work, adapters: Mapping[str, int], trainable: bool, upstream: bool
) -> AdapterWork:
    """Count the multiply-adds of a transformer's adapters, given as in `diffusion_products`."""
    c = config
    reach = _reach(adapters, upstream)
    tokens = c.width if c.condition_mlp else c.condition_width
    # Of every linear layer: inputs, outputs, and whether the first layer's input has a gradient.
    sizes = {
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), (c.width, c.width, False)),
        "attention.output": (c.width, c.width, reach.output),
        "cross_attention.query": (c.width, c.width, reach.queries),
        **dict.fromkeys(("cross_attention.key", "cross_attention.value"), (tokens, c.width, upstream)),
        "cross_attention.output": (c.width, c.width, reach.cross_output),
        "mlp.up": (c.width, c.mlp_width, reach.mlp),
        "mlp.down": (c.mlp_width, c.width, reach.down),
    }
    forward = unread = 0
    for name, rank in adapters.items():
        inputs, outputs, is_read = sizes[name]
        of_condition = name in ("cross_attention.key", "cross_attention.value")
        rows = work.tokens if of_condition else work.positions
        forward += c.layers * rank * (inputs + outputs) * rows
        if of_condition:
            unread += (not upstream and not (trainable and c.condition_mlp)) * c.layers * rank * inputs * rows
        else:
            unread += (not trainable and not is_read) * rank * inputs * rows
    return AdapterWork(forward, 2 * forward - unread)


def executed_cross(config: DiffusionTransformerConfig, work: Work, trainable: bool) -> tuple[int, int]:
    """Count the multiply-adds that spread images' vectors over blocks and attend their condition, forward and backward.

    A position attends the condition of both images of its block. Backward takes these once more, and computes the
    scores again; of frozen layers' own vectors there is no gradient.
    """
    c = config
    layer = layer_sizes(c)
    tokens = 2 * c.condition_tokens * work.taken * layer.cross  # keys and values, as blocks take them
    attended = layer.cross * 2 * c.condition_tokens * work.blocks * c.min_patches  # one product
    vector = c.width * work.taken
    forward = c.layers * (tokens + 2 * attended + VECTORS * vector) + 2 * vector
    of_vectors = c.layers * (RECOMPUTED_VECTORS + VECTORS * trainable) + 1 + 2 * trainable
    return forward, c.layers * (2 * tokens + 5 * attended) + of_vectors * vector


def recomputed_products(config: DiffusionTransformerConfig, work: Work, policy: Remat, trainable: bool) -> int:
    """Count the multiply-adds that a layer under a policy recomputes in backward, self-attention aside.

    The MLP's last product has to be computed again for its gate alone, and that of cross-attention only where the
    MLP's input is not saved.
    """
    if policy == "none":
        return 0
    layer = layer_sizes(config)
    spread = (VECTORS - RECOMPUTED_VECTORS) * config.width * work.taken
    if policy in ("products", "offload"):
        return spread
    needless = (not trainable) * layer.width * layer.mlp + (policy == "attention_mlp") * layer.width * layer.cross
    attended = layer.cross * 2 * config.condition_tokens * work.blocks * config.min_patches
    products = (layer.weights - needless) * work.positions + layer.idle * work.tokens
    return products + spread + (policy == "full") * attended


def diffusion_saved_bytes(
    config: DiffusionTransformerConfig, policy: Remat, activation: int, trainable: bool
) -> tuple[float, float]:
    """Count the bytes saved per position of one layer, on the device and offloaded. Not for the policy `none`."""
    c = config
    layer = layer_sizes(c)
    stream = layer.width * activation
    attention = LOGSUMEXP * layer.heads * (c.attention != "dense") + layer.attended * activation
    cross = layer.cross * activation
    # And values, of the fewest positions of an image.
    keys = 2 * layer.cross * activation * c.condition_tokens / c.min_patches
    # Queries, keys and values; outputs of both attentions, the query of the second, and both products of the MLP, of
    # which only the gate's gradient needs the last.
    outputs = 3 * layer.attended + 2 * layer.width + layer.cross + layer.mlp + trainable * layer.width
    needed = trainable or c.attention != "dense"
    products = needed * attention + trainable * cross + outputs * activation + keys
    return {
        "full": (stream, 0.0),
        "attention": (stream + attention + cross, 0.0),
        "attention_mlp": (2 * stream + attention + trainable * cross, 0.0),
        "products": (stream + products, 0.0),
        "offload": (stream, products),
    }[policy]
