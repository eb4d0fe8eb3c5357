"""Count the parameters of a model, module by module."""

from __future__ import annotations

from mmjax.config import (
    AudioConfig,
    ConnectorConfig,
    FractionalGrid,
    LearnedGrid,
    ModelConfig,
    StoredTable,
    StretchedGrid,
    UnetConfig,
    VisionConfig,
)
from mmjax.config.model import (
    adapter_parameters,
    merged_width,
    step_vaes,
)
from mmjax.config.towers import Encoder
from mmjax.planning.diffusion_work import (
    diffusion_parameters,
)
from mmjax.planning.unet import unet_parameters
from mmjax.planning.vae import vae_parameters
from mmjax.planning.work import (
    CONV_TAPS,
    connector_mlps,
    connector_weights,
    layer_sizes,
    norm_parameters,
)


def parameters(model: ModelConfig) -> dict[str, int]:
    """Count the parameters of every module exactly; those of adapters are separate, as `<module>.lora`."""
    llm = model.llm
    # Layers, final norm, learned positions, and a table of embeddings that a tied output table shares.
    layers = round(llm.layers * layer_sizes(llm).parameters)  # a mean where they are of several kinds
    tables = llm.learned_positions + (2 - llm.tied) * llm.vocab
    counts = {"llm": layers + norm_parameters(llm) + tables * llm.width}
    for name, encoder in model.encoders.items():
        width = encoder.width
        vision = isinstance(encoder, VisionConfig)
        # A norm after the last layer: a scale, and a bias unless it is an RMSNorm; audio towers always have one.
        head = encoder.head_norm * (1 if encoder.head_norm_kind == "rms" else 2) * width if vision else 2 * width
        counts[name] = _embedding_parameters(encoder) + encoder.layers * layer_sizes(encoder).parameters + head
        counts[f"{name}.connector"] = _connector_parameters(model, name, encoder.connector, width, llm.width)
    for name, generator in model.generators.items():
        unet = isinstance(generator, UnetConfig)
        counts[name] = unet_parameters(generator) if unet else diffusion_parameters(generator)
        sizes = llm.width, generator.condition_width
        # Beside its matrices a table of queries, and one of the tokens of an image whose condition is dropped.
        tables = generator.queries * sum(sizes)
        counts[f"{name}.connector"] = _connector_parameters(model, name, generator.connector, *sizes) + tables
    counts |= {f"{name}.vae": vae_parameters(vae) for name, vae in step_vaes(model).items()}
    return counts | adapter_parameters(model)


def _connector_parameters(model: ModelConfig, name: str, c: ConnectorConfig, width: int, outputs: int) -> int:
    """Count the parameters of a connector that reads features of this width."""
    encoder = model.encoders.get(name)
    merged = width if encoder is None else merged_width(encoder)
    # A norm has a scale, and with "layer" a bias too; each further MLP of a deepstack norms what it merges.
    norms = {"none": 0, "layer": 2 * width, "rms": width, "merged_layer": 2 * merged, "merged_rms": merged}
    mlp = connector_weights(model, name) + ("up" in c.biases) * c.mlp_width + ("down" in c.biases) * outputs
    mlp += c.merger_bias * c.merger_width + c.projection * 2 * (c.merger_width or merged)
    # Each has a norm of the merged width, scale and bias, and an MLP like the connector's own.
    deeper = 0 if encoder is None else (connector_mlps(encoder) - 1) * (2 * merged + mlp)
    tables = (2 if isinstance(encoder, VisionConfig) else 1) * c.position_grid + c.newline
    return norms[c.norm] + mlp + deeper + tables * outputs


def active_parameters(model: ModelConfig) -> int:
    """Count the parameters that a token uses: all but the experts that it is not sent to."""
    return sum(parameters(model).values()) - round(model.llm.layers * layer_sizes(model.llm).idle)


def _embedding_parameters(c: Encoder) -> int:
    """Count an encoder's parameters before its first layer."""
    if isinstance(c, AudioConfig):
        if c.stem_width:
            matrices = CONV_TAPS**2 * (1 + 2 * c.stem_width) + c.stem_bins[-1] * c.width
            return (matrices + 3) * c.stem_width
        # Two convolutions with a bias each, and the table of positions where it is stored.
        table = c.positions.positions if isinstance(c.positions, StoredTable) else 0
        return (CONV_TAPS * (c.mels + c.width) + 2 + table) * c.width
    learned = c.positions.rows * c.positions.columns + c.class_token if isinstance(c.positions, LearnedGrid) else 0
    learned += c.positions.side**2 if isinstance(c.positions, StretchedGrid | FractionalGrid) else 0
    vectors = c.embed_bias + c.own_tokens + learned
    return (c.frames * c.patch**2 * c.channels + vectors) * c.width + c.embed_norm * norm_parameters(c)
