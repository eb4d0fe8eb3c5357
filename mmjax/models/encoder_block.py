"""The transformer layer of the image and audio encoders."""

from __future__ import annotations

from functools import partial

from mmjax.config import AudioConfig, VisionConfig
from mmjax.models.layers import LayerConfig, LayerNorm, RMSNorm

WHISPER_BIASES = ("query", "value", "output", "up", "down")  # all but the keys
NORMS = {"layer": LayerNorm, "rms": RMSNorm}


def encoder_layer_config(config: VisionConfig | AudioConfig) -> LayerConfig:
    """Describe a pre-norm layer with full attention. Raises ValueError where heads do not divide the width."""
    c = config
    if c.width % c.heads:
        raise ValueError(f"a width of {c.width} does not divide into {c.heads} heads")
    vision = c if isinstance(c, VisionConfig) else None
    return LayerConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.heads,
        head_width=c.width // c.heads,
        mlp_width=c.mlp_width,
        backend=c.attention,
        norm=partial(NORMS[vision.norm if vision else "layer"], eps=c.norm_eps),
        activation=c.activation,
        gated=vision is not None and vision.gated,
        biases=vision.biases if vision else WHISPER_BIASES,
        width_norm=partial(RMSNorm, eps=vision.qk_norm_eps) if vision and vision.qk_norm == "width" else None,
        layer_scale=vision is not None and vision.layer_scale,
    )
