"""MiniCPM-V and -OCR: a SigLIP that merges patches between its layers, an MLP that merges them again, a Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import AsIs, ConnectorConfig, DecoderConfig, ModelConfig, Slices
from mmjax.errors import UserError
from mmjax.hf.folder import Fields, HfFolder
from mmjax.hf.layout import Layout, TensorNames, linears, norm
from mmjax.hf.llava import text_of, whole_layout
from mmjax.hf.qwen_vl import in_sections
from mmjax.hf.vision import find_tower, kind_of, vision_of, with_images

CANVAS = "minicpmv4_7"  # whose slices have positions on a canvas
FAMILIES = ("minicpmv4_6", CANVAS, "minicpm_ocr")
CANVAS_TEXTS = ("qwen3_5_text", "qwen3_5_moe_text")
SECTIONS = (11, 11, 10)
EPS = 1e-6  # of the merger's norm, written in no config
MERGERS = ("model.merger.", "merger.")


def read(folder: HfFolder, fields: Fields) -> ModelConfig:
    """The model that a config of one of `FAMILIES` says. Raises UserError for what is missing or not supported."""
    llm = _llm(fields)
    fields.allow_only("merger_times", 1)
    fields.allow_only("downsample_mode", "16x", "4x")
    vision = fields.inner("vision_config")
    fields.allow_only("merge_kernel_size", [2, 2])
    vision.allow_only("window_kernel_size", [2, 2])
    width = vision.size("hidden_size")
    connector = ConnectorConfig(
        merge=2, mlp_width=4 * width, norm="merged_layer", norm_eps=EPS, activation="gelu"
    )
    tower = vision_of(vision, -1, True, connector)
    layer = fields.get("insert_layer_id", int)
    if not 0 <= layer < tower.layers:
        raise UserError(
            f"{fields.where}: insert_layer_id={layer} is none of the tower's {tower.layers} layers"
        )
    merged = fields.get("downsample_mode", str) == "16x"
    tower = replace(tower, merge_after=layer + 1 if merged else 0)
    tower = with_images(folder, tower)
    # there is no processor: its defaults
    how = tower.images
    if isinstance(how, AsIs):
        how = Slices(unit=tower.patch * tower.token_side, begin="{image}")
    if isinstance(how, Slices):
        how = replace(how, **_texts(folder, bool(how.begin)))
    return ModelConfig(llm, {"vision": replace(tower, images=how)})


def _llm(fields: Fields) -> DecoderConfig:
    if fields.get("model_type", str) != CANVAS:
        # Of text and images alike all three coordinates of a position are one number.
        return replace(text_of(fields), rope_sections=(), rope_interleaved=False)
    text = fields.inner("text_config")
    text.allow_only("model_type", *CANVAS_TEXTS)
    llm = in_sections(text_of(fields), text.where, SECTIONS, True)
    names = ("slice_start", "slice_end", "image_start", "image_end", "newline")
    return replace(llm, canvas_markers=tuple(fields.get(f"{name}_id", int, -1) for name in names))


def _texts(folder: HfFolder, numbered: bool) -> dict[str, str]:
    """Read what the processor writes around images and slices; the tokenizer names it. numbered: images are."""
    names = {"begin": "image_start", "end": "image_end"}
    names |= {"slice_begin": "slice_start", "slice_end": "slice_end"}
    defaults = ("<image>", "</image>", "<slice>", "</slice>")
    texts = {
        ours: folder.special_token(f"{name}_token", default)
        for (ours, name), default in zip(names.items(), defaults, strict=True)
    }
    if numbered:
        begin = folder.special_token("image_id_start_token", "<image_id>")
        end = folder.special_token("image_id_end_token", "</image_id>")
        texts["begin"] = f"{begin}{{image}}{end}{texts['begin']}"
    return texts


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint."""
    first = next((p for p in MERGERS if f"{p}mlp.0.linear_1.weight" in folder.tensors), MERGERS[-1])
    parts = {
        "norm": norm(f"{first}mlp.0.pre_norm"),
        **linears("mlp", f"{first}mlp.0", up="linear_1", down="linear_2"),
    }
    whole = whole_layout(folder, model, TensorNames(parts), first)
    if model.encoders["vision"].merge_after:
        return whole
    tower = find_tower(folder, kind_of(folder.fields.inner("vision_config")))
    return replace(whole, unused=(*whole.unused, f"{tower}vit_merger.*"))
