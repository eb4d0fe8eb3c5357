"""What the layers of an encoder are made of."""

from __future__ import annotations

from functools import partial

from mmjax.config import AudioConfig, VisionConfig
from mmjax.models.layers import Block, LayerNorm


def encoder_block(config: VisionConfig | AudioConfig) -> Block:
    """A pre-LN layer: LayerNorm, full attention, LayerNorm, GELU MLP; biases on all but the keys, as in Whisper.

    Raises ValueError where the heads do not divide the width.
    """
    c = config
    if c.width % c.heads:
        raise ValueError(f"a width of {c.width} does not divide into {c.heads} heads")
    return Block(
        width=c.width,
        heads=c.heads,
        kv_heads=c.heads,
        head_width=c.width // c.heads,
        mlp_width=c.mlp_width,
        backend=c.attention,
        norm=partial(LayerNorm, eps=c.norm_eps),
        activation="gelu_tanh",
        gated=False,
        biases=("query", "value", "output", "up", "down"),
    )
