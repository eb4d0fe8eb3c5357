"""Muse Glimmer: a ViT with windows, an MLP on squares of patches, a Gemma 2 with gated attention and other norms."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    ConnectorConfig,
    DecoderConfig,
    ModelConfig,
    MuseVideo,
    StretchedGrid,
    VisionConfig,
)
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.decoders import decoder_of, layer_types, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, TensorSlice, linear, linears, norm, table
from mmjax.hf.names import ACTIVATIONS, ATTENTION, PROJECTIONS
from mmjax.hf.processors import read_videos
from mmjax.hf.vision import ALL_BIASES, axial_theta, with_images

EPS = 1e-5  # of the norms in the tower's layers, written in no config
TOWER, ADAPTER, PROJECTION = (
    f"model.vision_{name}" for name in ("tower.", "adapter.", "projection")
)


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a Muse Glimmer's config says. Raises UserError for what is missing or not supported."""
    llm = _llm(fields)
    tower = with_images(folder, _tower(fields, llm.norm_eps))
    tower = replace(tower, videos=read_videos(folder.path, tower, MuseVideo()))
    return ModelConfig(llm, {"vision": tower})


def _tower(fields: Fields, token_eps: float) -> VisionConfig:
    """Read the tower. token_eps: of the norm of its tokens, which the text says."""
    vision = fields.inner("vision_config")
    layers, width = vision.size("num_hidden_layers"), vision.size("hidden_size")
    side, merge = vision.size("pos_emb_height"), vision.size("merge_size")
    vision.allow_only("pos_emb_width", side)
    vision.allow_only("layer_norm_eps", EPS)
    fields.allow_only("out_hidden_size", merge**2 * width)
    ends = [(i + 1) % 4 == 0 or i == layers - 1 for i in range(layers)]
    default = ["full_attention" if end else "window_attention" for end in ends]
    types = layer_types(vision, default, {"full_attention", "window_attention"})
    heads, hidden = vision.size("num_attention_heads"), fields.size("projector_hidden_size")
    return VisionConfig(
        attention="auto",
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=vision.size("intermediate_size"),
        patch=vision.size("patch_size"),
        frames=vision.size("patch_temporal"),
        positions=StretchedGrid(
            side, axial_theta(vision, width // heads), filter="bilinear_zeros", transposed=True
        ),
        window=side,
        windowed=tuple(i for i, kind in enumerate(types) if kind == "window_attention"),
        embed_bias=False,
        embed_norm=True,
        norm_eps=EPS,
        activation=vision.choice("hidden_act", ACTIVATIONS),
        biases=ALL_BIASES,
        connector=ConnectorConfig(
            merge=merge,
            merging="interleave",
            mlp_width=hidden,
            norm="token_unscaled",
            norm_eps=token_eps,
            activation=fields.choice("projector_hidden_act", ACTIVATIONS),
            biases=(),
            output_width=hidden,
            output_activation=True,
        ),
    )


def _llm(fields: Fields) -> DecoderConfig:
    text = fields.inner("text_config")
    for name in ("qk_scale_factor", "post_norm_eps", "final_logit_softcapping"):
        if (value := text.get(name, float)) <= 0:
            raise UserError(f"{text.where}: {name}={value} must be above 0")
    layers = text.size("num_hidden_layers")
    # Counted from the last layer.
    windowed = [(layers - 1 - i) % 4 > 0 for i in range(layers)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windowed]
    own = {"model_type": "gemma2", "attn_logit_softcapping": None, "query_pre_attn_scalar": 1}
    own["layer_types"] = text.get("layer_types", list[str], kinds)
    gemma = decoder_of(replace(text, values={**text.values, **own}), tables_are_tied(fields))
    base = gemma.rope_theta
    thetas = text.get("layer_rope_theta", list[float], [base * window for window in windowed])
    # transformers reads of them only which are 0, and takes the others' angles from `base`.
    if len(thetas) != layers or set(thetas) - {0, base}:
        raise UserError(
            f"{text.where}: layer_rope_theta must give each of {layers} layers 0 or rope_theta={base:g}"
        )
    return replace(
        gemma,
        embedding_scale=1.0,
        embedding_norm=True,
        attention_scale=text.get("qk_scale_factor", float) * gemma.head_width**-0.5,
        qk_norm="unscaled",
        attention_gate=True,
        separate_gate=True,
        post_norm_eps=text.get("post_norm_eps", float),
        plain_head_norm=True,
        logit_scale=text.get("output_multiplier", float),
        unrotated=tuple(i for i, theta in enumerate(thetas) if not theta),
    )


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    decoder = decoder_layout(folder, model)
    c = model.encoders["vision"]
    layer = f"{TOWER}layers.*."
    # Stored [width, frame x channel x row x column]; ours: frame, row, column, channel.
    patches = TensorSlice(
        f"{TOWER}patch_embedder.patch_embedding.weight",
        (1, 3, 4, 2, 0),
        view=(c.width, c.frames, c.channels, c.patch, c.patch),
    )
    vision = {
        "embed.patches": {"weight": patches},
        "embed.positions": table(f"{TOWER}patch_embedder.position_embedding_table"),
        "embed.norm": norm(f"{TOWER}ln_pre"),
        "layers.*.attention_norm": norm(f"{layer}norm1"),
        **linears(ATTENTION, f"{layer}attn", **PROJECTIONS, output="proj"),
        "layers.*.mlp_norm": norm(f"{layer}norm2"),
        **linears("layers.*.mlp", f"{layer}mlp", up="fc1", down="fc2"),
        "head": norm(f"{TOWER}ln_post"),
    }
    connector = {
        **linears("mlp", ADAPTER.rstrip("."), up="fc1", down="fc2"),
        "output": linear(PROJECTION),
    }
    return Layout(
        {
            **decoder.modules,
            "vision": TensorNames(vision),
            "vision.connector": TensorNames(connector),
        },
        {
            **decoder.prefixes,
            "vision": (TOWER,),
            "vision.connector": (ADAPTER, PROJECTION),
        },
        decoder.unused,
    )
