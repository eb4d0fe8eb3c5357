"""DeepSeek-OCR 2: SAM's tower, layers with learned queries, a matrix, and a Llama with DeepSeek-V2's experts."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import (
    AsIs,
    Biased,
    ConnectorConfig,
    DecoderConfig,
    LearnedGrid,
    ModelConfig,
    QueryLayers,
    TilesAndSquare,
    VisionConfig,
)
from mmjax.config.encoders import QUERY_MERGE
from mmjax.errors import UserError
from mmjax.hf.decoder_tensors import decoder_layout
from mmjax.hf.decoders import decoder_of, greedy_experts, tables_are_tied
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import (
    Layout,
    LeafTensors,
    TensorNames,
    TensorSlice,
    array,
    below,
    convolution,
    fused_parts,
    linear,
    linears,
    norm,
)
from mmjax.hf.names import ACTIVATIONS, GATED_MLP, PROJECTIONS, QKV
from mmjax.hf.vision import with_images
from mmjax.hf.vision_tensors import PATCHES

SAM, QUERIES, PROJECTOR = "model.sam_model.", "model.qwen2_model.", "model.projector."
SEPARATOR = "model.view_seperator"  # as its publisher spells it
SIDES = {12: "query_768", 16: "query_1024"}  # of the squares of tokens that have queries


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that the config of a DeepSeek-OCR 2 says. Raises UserError for what is missing or not supported."""
    llm = _llm(fields)
    vision = fields.inner("vision_config")
    tower = with_images(folder, _tower(vision.inner("sam_config"), vision.inner("encoder_config")))
    unit = tower.patch * QUERY_MERGE
    how = tower.images
    if isinstance(how, AsIs):  # there is no processor: its class's sizes, in such tokens
        how = TilesAndSquare(tile=12 * unit, square=16 * unit, unit=unit)
    elif not isinstance(how, TilesAndSquare):
        raise UserError(
            f"{fields.where}: its images are tiles and a square, but the folder's image processor makes none"
        )
    for name, side in (("tile_size", how.tile), ("size", how.square)):
        if side % unit or side // unit not in SIDES:
            known = " and ".join(str(unit * n) for n in SIDES)
            raise UserError(
                f"{folder.path}: its processor has {name}={side}, and the tower queries for images of {known} pixels a "
                "side; use one of these"
            )
    return ModelConfig(llm, {"vision": replace(tower, images=how)})


def _llm(fields: Fields) -> DecoderConfig:
    text = fields.inner("text_config")
    text.allow_only("model_type", "deepseek_ocr2_text")
    # Its class sets the width of heads itself.
    values = {name: value for name, value in text.values.items() if name != "head_dim"}
    values["model_type"] = "llama"
    llm = decoder_of(replace(text, values=values), tables_are_tied(fields))
    types = text.get("mlp_layer_types", list[str])
    if len(types) < llm.layers or set(types) - {"dense", "sparse"}:
        raise UserError(
            f"{text.where}: mlp_layer_types must give each of {llm.layers} layers dense or sparse"
        )
    sparse = tuple(i for i in range(llm.layers) if types[i] == "sparse")
    return replace(llm, experts=greedy_experts(text, llm, layers=sparse))


def _tower(sam: Fields, encoder: Fields) -> VisionConfig:
    """Read SAM's layers, and those with queries behind them."""
    for name in ("use_abs_pos", "use_rel_pos"):
        sam.allow_only(name, True)
    queries = _query_layers(sam, encoder)
    width, patch = sam.size("hidden_size"), sam.size("patch_size")
    side, layers = sam.size("image_size") // patch, sam.size("num_hidden_layers")
    window = sam.get("window_size", int)
    full = sam.get("global_attn_indexes", list[int])
    biased: tuple[Biased, ...] = QKV if sam.get("qkv_bias", bool) else ()
    mlp_width = int(width * sam.get("mlp_ratio", (int, float)))
    return VisionConfig(
        attention="auto",
        layers=layers + encoder.size("num_hidden_layers"),
        width=width,
        heads=sam.size("num_attention_heads"),
        mlp_width=sam.size("mlp_dim", mlp_width),
        patch=patch,
        channels=sam.size("num_channels"),
        positions=LearnedGrid(side, side, interpolation="antialiased"),
        window=window,
        windowed=tuple(i for i in range(layers) if i not in full) if window else (),
        norm_eps=sam.get("layer_norm_eps", float),
        activation=sam.choice("hidden_act", ACTIVATIONS),
        biases=(*biased, "output", "up", "down"),
        relative_side=QUERY_MERGE * queries.sides[-1],
        merge_after=layers,
        query_layers=queries,
        head_norm_type="rms",
        connector=ConnectorConfig(
            merge=1, mlp_width=0, norm="none", biases=("down",), newline=True
        ),
    )


def _query_layers(sam: Fields, encoder: Fields) -> QueryLayers:
    encoder.allow_only("is_causal", True)
    encoder.allow_only("use_sliding_window", False)
    encoder.allow_only("layer_types", ["full_attention"] * encoder.size("num_hidden_layers"))
    rope = Fields(
        {"rope_theta": encoder.values.get("rope_theta")} | encoder.get("rope_parameters", dict, {}),
        f"{encoder.where}: rope_parameters",
    )
    rope.allow_only("rope_type", "default")
    heads = encoder.size("num_attention_heads")
    width = encoder.size("hidden_size")
    channels = sam.get("downsample_channels", list[int], [512, 896])
    if len(channels) != 2 or channels[1] != width:
        raise UserError(
            f"{sam.where}: downsample_channels={channels}: give two, the second as many as the encoder's "
            f"hidden_size={width}"
        )
    return QueryLayers(
        width=width,
        heads=heads,
        kv_heads=encoder.size("num_key_value_heads", heads),
        mlp_width=encoder.size("intermediate_size"),
        sides=tuple(SIDES),
        merger_widths=(sam.size("output_channels"), channels[0]),
        activation=encoder.choice("hidden_act", ACTIVATIONS),
        norm_eps=encoder.get("rms_norm_eps", float),
        theta=rope.get("rope_theta", float),
    )


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint, by the names that its publisher and transformers write."""
    decoder = decoder_layout(folder, model)
    connector = {"linear": linear(f"{PROJECTOR}layers"), "newline": array(SEPARATOR, (0,))}
    return Layout(
        {
            **decoder.modules,
            "vision": _tower_parts(model.encoders["vision"]),
            "vision.connector": TensorNames(connector),
        },
        {
            **decoder.prefixes,
            "vision": (SAM, QUERIES),
            "vision.connector": (PROJECTOR, SEPARATOR),
        },
        decoder.unused,
    )


def _tower_parts(config: VisionConfig) -> TensorNames:
    parts = {
        "embed.patches": convolution(f"{SAM}patch_embed.proj", PATCHES),
        "embed.positions": array(f"{SAM}pos_embed", (0, 1, 2, 3)),
        "head": norm(f"{QUERIES}model.model.norm"),
    }
    for number in range(config.merge_after):
        parts |= below(f"layers.{number}", _sam_layer(config, f"{SAM}blocks.{number}"))
    last = config.merge_after - 1
    parts |= below(f"layers.{last}.merger", _merger_parts(config))
    for number in range(config.merge_after, config.layers):
        layer = f"{QUERIES}model.model.layers.{number - config.merge_after}"
        parts |= below(
            f"layers.{number}",
            {
                "attention_norm": norm(f"{layer}.input_layernorm"),
                **linears("attention", f"{layer}.self_attn", **PROJECTIONS, output="o_proj"),
                "mlp_norm": norm(f"{layer}.post_attention_layernorm"),
                **linears("mlp", f"{layer}.mlp", **GATED_MLP),
            },
        )
    return TensorNames(parts)


def _sam_layer(config: VisionConfig, layer: str) -> dict[str, LeafTensors]:
    thirds = fused_parts(linear(f"{layer}.attn.qkv"), **dict.fromkeys(QKV, config.width))
    return {
        "attention_norm": norm(f"{layer}.norm1"),
        **below("attention", thirds),
        "attention.output": linear(f"{layer}.attn.proj"),
        "attention.relative": {
            "rows": TensorSlice(f"{layer}.attn.rel_pos_h"),
            "columns": TensorSlice(f"{layer}.attn.rel_pos_w"),
        },
        "mlp_norm": norm(f"{layer}.norm2"),
        **linears("mlp", f"{layer}.mlp", up="lin1", down="lin2"),
    }


def _merger_parts(config: VisionConfig) -> dict[str, LeafTensors]:
    sides = config.query_layers.sides
    return {
        "projection": convolution(f"{SAM}neck.0", PATCHES),
        "projection_norm": norm(f"{SAM}neck.1"),
        "neighbours.linear": convolution(f"{SAM}neck.2", PATCHES),
        "neighbours_norm": norm(f"{SAM}neck.3"),
        "halving.linear": convolution(f"{SAM}net_2", PATCHES),
        "merging.linear": convolution(f"{SAM}net_3", PATCHES),
        **{f"queries.side_{n}": array(f"{QUERIES}{SIDES[n]}.weight") for n in sides},
    }
