"""Names that Hugging Face gives activations and linear layers, and layers that may have biases."""

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
# Our names of linear layers, and those that most checkpoints have.
ATTENTION = "layers.*.attention"
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
GATED_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
