"""EVA-CLIP's vision tower in torch, from its formulas, under the names of its checkpoints: transformers has no class.

A ViT with a class token (Sun et al. 2024, "EVA-CLIP-18B"): queries, keys and values have biases
each or not, norms are RMSNorms or LayerNorms, and stand before attention and MLP, or behind them,
before what these make is added.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN


class EvaClipVisionConfig(PreTrainedConfig):
    """The fields of a checkpoint's `vision_config`, all of which are written."""

    model_type = "evaclip_vision_model"

    def __init__(self, **fields):
        biases = dict.fromkeys(("q_bias", "k_bias", "v_bias"), True)
        defaults = {
            "num_channels": 3,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "post_layernorm": False,
        }
        super().__init__(**biases | defaults | {"use_rms_norm": True} | fields)


class Embeddings(nn.Module):
    def __init__(self, config: EvaClipVisionConfig):
        super().__init__()
        width, patch, positions = (
            config.hidden_size,
            config.patch_size,
            (config.image_size // config.patch_size) ** 2,
        )
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.patch_embedding = nn.Conv2d(config.num_channels, width, patch, patch)
        self.position_embedding = nn.Embedding(1 + positions, width)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_embedding.expand(len(pixels), 1, -1), patches], dim=1)
        return tokens + self.position_embedding.weight


class Attention(nn.Module):
    def __init__(self, config: EvaClipVisionConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        width = config.hidden_size
        for name in "qkv":
            setattr(
                self, f"{name}_proj", nn.Linear(width, width, bias=getattr(config, f"{name}_bias"))
            )
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: EvaClipVisionConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


def norm_of(config: EvaClipVisionConfig) -> nn.Module:
    return (nn.RMSNorm if config.use_rms_norm else nn.LayerNorm)(
        config.hidden_size, eps=config.layer_norm_eps
    )


class Layer(nn.Module):
    def __init__(self, config: EvaClipVisionConfig):
        super().__init__()
        self.after = config.post_layernorm
        self.layer_norm1, self.self_attn = norm_of(config), Attention(config)
        self.layer_norm2, self.mlp = norm_of(config), MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in ((self.layer_norm1, self.self_attn), (self.layer_norm2, self.mlp)):
            x = x + (norm(part(x)) if self.after else part(norm(x)))
        return x


class EvaClipVisionModel(PreTrainedModel):
    config_class = EvaClipVisionConfig
    _supports_sdpa = True

    def __init__(self, config: EvaClipVisionConfig):
        super().__init__(config)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        parts = {"embeddings": Embeddings(config), "encoder": nn.ModuleDict({"layers": layers})}
        self.vision_model = nn.ModuleDict(parts | {"post_layernorm": norm_of(config)})

    def hidden_states(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """Return the embedding, and the output of every layer."""
        states = [self.vision_model["embeddings"](pixels)]
        for layer in self.vision_model["encoder"]["layers"]:
            states.append(layer(states[-1]))
        return states
