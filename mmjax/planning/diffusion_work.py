"""Products, elementwise operations and saved bytes of diffusion transformers: what differs there from encoders.

An image's time and sizes are embedded once per image. Layers attend an image's condition too, whose keys and values are
products per token of it; and in backward the gradient of a gate needs the output that it gates.
"""

from __future__ import annotations

from mmjax.config import DiffusionTransformerConfig, ModelConfig, Remat
from mmjax.config.generators import TIME_FEATURES
from mmjax.config.model import towers_of
from mmjax.planning.work import Products, Work, layer_sizes

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


def diffusion_products(config: DiffusionTransformerConfig, work: Work, trainable: bool, upstream: bool) -> Products:
    """Count the multiply-adds of a forward pass. upstream: the gradient of the condition is wanted."""
    c = config
    layer = layer_sizes(c)
    width, third = c.width, c.width // 3
    images = work.tokens // c.queries
    features = TIME_FEATURES * (width + c.micro_conditions * 3 * third)
    embedded = (1 + VECTORS) * width**2 + c.micro_conditions * 3 * third**2
    per_token = c.layers * layer.idle
    # The condition's first product, which is with data where nothing before it is trained.
    first = c.condition_width * width if c.condition_mlp else per_token
    rest = width**2 + per_token if c.condition_mlp else 0
    weights = (c.layers * layer.weights + width * c.patch_values) * work.positions + rest * work.tokens
    cross = 2 * layer.cross * c.queries * work.positions
    of_attention = 2 * layer.attended * work.pairs
    spares = not trainable
    return Products(
        data=c.patch_values * width * work.inputs + features * images + first * work.tokens * (not upstream),
        weights=weights + first * work.tokens * upstream,
        attention=c.layers * of_attention,
        of_time=embedded * images,
        cross=c.layers * cross,
        # The first layer up to its queries of the condition, all of which time and latents alone decide.
        spared_weights=spares * 5 * width**2 * work.positions,
        spared_attention=spares * (2 * of_attention + cross // 2),
    )


def executed_cross(config: DiffusionTransformerConfig, work: Work, trainable: bool) -> tuple[int, int]:
    """Count the multiply-adds that spread images' vectors over blocks and attend their condition, forward and backward.

    A position attends the condition of both images of its block. Backward takes these once more, and computes the
    scores again; of frozen layers' own vectors there is no gradient.
    """
    c = config
    layer = layer_sizes(c)
    tokens = 2 * c.queries * work.taken * layer.cross  # keys and values, as blocks take them
    attended = layer.cross * 2 * c.queries * work.blocks * c.min_patches  # one product
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
    attended = layer.cross * 2 * config.queries * work.blocks * config.min_patches
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
    keys = 2 * layer.cross * activation * c.queries / c.min_patches  # and values, of the fewest positions of an image
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
