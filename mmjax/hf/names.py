"""Names that Hugging Face gives activations, and layers that may have biases."""

from __future__ import annotations

from mmjax.config import Activation, Biased

# By HF's names. The three approximations of GELU by tanh differ in how they are computed, not in
# what.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
QKV: tuple[Biased, ...] = ("query", "key", "value")
