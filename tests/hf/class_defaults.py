"""The defaults of the classes whose configs are read, as data: `python tests/hf/class_defaults.py` writes them again.

`mmjax/hf/class_defaults.json` is made from the installed transformers and diffusers, whose versions
it names. Of a config's class it has the defaults of its fields, other names of these, fields that
must not be null, the RoPE of a config that says none, and its parts: their class, and their fields
where a config has no such part. Processors of images and videos are parsed, for they cannot be
imported without torchvision. Classes whose code is in repositories of their own (OpenGVLab,
InternLM, BAAI) are written here.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import re
import warnings
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import diffusers
import transformers
from transformers import image_utils
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL,
)

from mmjax.hf.families import CHECKPOINTS

TABLE = Path(__file__).parents[2] / "mmjax/hf/class_defaults.json"
LIBRARY = Path(transformers.__file__).parent
PARTS = (  # that are read
    *("text_config", "vision_config", "audio_config", "thinker_config"),
    *("sam_config", "encoder_config"),
)
UNREAD_PARTS = {
    *(("clip", "text_config"), ("siglip", "text_config")),
}
# of labels, dtypes and outputs
OF_ALL = {field.name for field in fields(transformers.PreTrainedConfig)}
WHOLE = (
    *(
        "qwen2",
        "qwen3",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_5_moe_text",
        "mixtral",
        "llama",
        "mistral",
        "phi3",
    ),
    *(
        "glm4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "opt",
        "gpt2",
        "cohere",
        "cohere2",
        "exaone4",
        "granite",
        "hyperclovax",
        "gpt_oss",
        "lfm2",
        "llama4_text",
    ),
    *(
        "llava",
        "vipllava",
        "llava_next",
        "llava_onevision",
        "glm4v",
        "glm46v",
        "glmga",
        "idefics3",
        "smolvlm",
        "mistral3",
        "gemma3",
        "gemma4",
        "gemma4_unified",
    ),
    *(
        "llava_next_video",
        "deepseek_vl",
        "janus",
        "paddleocr_vl",
        "video_llama_3",
        "video_llava",
        "minicpmv4_6",
        "minicpmv4_7",
        "minicpm_ocr",
        "ernie4_5",
        "lighton_ocr",
        "lfm2_vl",
        "llama4",
        "shieldgemma2",
        "glm_ocr",
        "glm4v_moe",
        "glm4_moe",
        "ministral3",
        "mistral4",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k25",
        "muse_glimmer",
        "deepseek_ocr2",
    ),
    *(
        "paligemma",
        "internvl",
        "aya_vision",
        "cohere2_vision",
        "qwen2_vl",
        "qwen2_5_vl",
        "exaone4_5",
        "hyperclovax_vision_v2",
        "qwen3_vl",
        "cosmos3_omni",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
    ),
    *("qwen2_5_omni", "qwen3_omni_moe", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    *(
        "clip",
        "clip_vision_model",
        "siglip",
        "siglip_vision_model",
        "siglip2_vision_model",
        "pixtral",
        "internvl_vision",
    ),
    *("dinov2", "dinov2_with_registers", "qwen2_audio", "qwen2_audio_encoder", "whisper"),
    *("qwen3_asr", "voxtral", "glmasr"),
)
IMAGES = {  # by the folder of their model
    "clip": ("CLIPImageProcessor",),
    "siglip": ("SiglipImageProcessor",),
    "bit": ("BitImageProcessor",),
    "llava": ("LlavaImageProcessor",),
    "llava_next": ("LlavaNextImageProcessor",),
    "llava_onevision": ("LlavaOnevisionImageProcessor", "LlavaOnevisionVideoProcessor"),
    "qwen2_vl": ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLVideoProcessor",),
    "pixtral": ("PixtralImageProcessor",),
    "kimi_k25": ("Kimi_K25ImageProcessor",),
    "muse_glimmer": ("MuseGlimmerImageProcessor", "MuseGlimmerVideoProcessor"),
    "glm4v": ("Glm4vImageProcessor", "Glm4vVideoProcessor"),
    "glm46v": ("Glm46VImageProcessor",),
    "glmga": ("GlmgaImageProcessor",),
    "idefics3": ("Idefics3ImageProcessor",),
    "smolvlm": ("SmolVLMImageProcessor",),
    "gemma3": ("Gemma3ImageProcessor",),
    "gemma4": ("Gemma4ImageProcessor",),
    "gemma4_unified": ("Gemma4UnifiedImageProcessor",),
    "got_ocr2": ("GotOcr2ImageProcessor",),
    "internvl": ("InternVLVideoProcessor",),
    "deepseek_vl": ("DeepseekVLImageProcessor",),
    "deepseek_ocr2": ("DeepseekOcr2ImageProcessor",),
    "janus": ("JanusImageProcessor",),
    "paddleocr_vl": ("PaddleOCRVLImageProcessor",),
    "video_llama_3": ("VideoLlama3ImageProcessor",),
    "minicpmv4_6": ("MiniCPMV4_6ImageProcessor",),
    "minicpm_ocr": ("MiniCPMOcrImageProcessor",),
    "cohere2_vision": ("Cohere2VisionImageProcessor",),
    "lfm2_vl": ("Lfm2VlImageProcessor",),
    "llama4": ("Llama4ImageProcessor",),
}
# processors of texts and images whose own fields are read
AROUND = {
    "pixtral": "PixtralProcessor",
    "aya_vision": "AyaVisionProcessor",
    "deepseek_ocr2": "DeepseekOcr2Processor",
}
GENERATORS = (
    "AutoencoderKL",
    "UNet2DConditionModel",
    "PixArtTransformer2DModel",
    "Transformer2DModel",
)
# Of code that is beside its checkpoints.
REMOTE: dict[str, dict[str, Any]] = {
    "internlm2": {
        "vocab_size": 103_168,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bias": True,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
    },
    "internvl_chat": {
        "select_layer": -1,
        "force_image_size": None,
        "downsample_ratio": 0.5,
        "dynamic_image_size": False,
        "use_thumbnail": False,
        "ps_version": "v1",
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
        "pad2square": False,
    },
    "intern_vit_6b": {
        "num_channels": 3,
        "patch_size": 14,
        "image_size": 224,
        "qkv_bias": False,
        "hidden_size": 3200,
        "num_attention_heads": 25,
        "intermediate_size": 12_800,
        "qk_normalization": True,
        "num_hidden_layers": 48,
        "hidden_act": "gelu",
        "norm_type": "rms_norm",
        "layer_norm_eps": 1e-6,
    },
    "evaclip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "q_bias": True,
        "k_bias": True,
        "v_bias": True,
        "use_rms_norm": True,
        "post_layernorm": False,
    },
}
REMOTE_PARTS = {
    "internvl_chat": {
        "vision_config": {"type": "intern_vit_6b", "missing": {}, "fixed": True},
        "llm_config": {"type": None, "missing": None},
    },
    "evaclip": {"vision_config": {"type": "evaclip_vision_model", "missing": {}, "fixed": True}},
}


def table(nulls: bool = True) -> dict[str, Any]:
    """Make the table, from the classes that are installed. nulls: try which fields may be null, which takes seconds."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        configs: dict[str, Any] = {}
        for kind in WHOLE:
            _add(configs, kind, nulls)
        processors = {
            name: _processor(folder, name) for folder, names in IMAGES.items() for name in names
        }
        for folder, name in AROUND.items():
            path = LIBRARY / f"models/{folder}/processing_{folder}.py"
            processors[name] = _arguments(path, name)
        for extractor in (
            transformers.WhisperFeatureExtractor,
            transformers.Qwen3ASRFeatureExtractor,
            transformers.Gemma4AudioFeatureExtractor,
            transformers.Gemma4UnifiedAudioFeatureExtractor,
        ):
            processors[extractor.__name__] = _signature(extractor)
        generators = {name: _signature(getattr(diffusers, name)) for name in GENERATORS}
    logging.disable(logging.NOTSET)
    configs |= {
        kind: {"defaults": defaults, "nullable": list(defaults)}
        for kind, defaults in REMOTE.items()
    }
    for kind, parts in REMOTE_PARTS.items():
        configs.setdefault(kind, {"defaults": {}, "nullable": []})["parts"] = parts
    made = {
        "transformers": transformers.__version__,
        "diffusers": diffusers.__version__,
        "multimodal": {
            kind: {"class": name} | ({} if kind in CHECKPOINTS else {"nearest": nearest(kind)})
            for kind, name in sorted(MULTIMODAL.items())
        },
        "configs": dict(sorted(configs.items())),
        "processors": processors,
        "generators": generators,
    }
    return json.loads(json.dumps(made))  # tuples as lists


def nearest(kind: str) -> str:
    """Find the family that is read whose code a class's is made from in the fewest steps; LLaVA if none is."""
    found, new = {kind}, [kind]
    while new:
        bases = sorted({base for one in new for base in _bases(one)} - found)
        if read := [base for base in bases if base in CHECKPOINTS and base in MULTIMODAL]:
            return read[0]
        found.update(bases)
        new = bases
    return "llava"


def _bases(kind: str) -> set[str]:
    """Name the models whose classes a model's code builds on."""
    folder = LIBRARY / "models" / kind.replace("-", "_").replace(".", "_")
    paths = [*folder.glob("modular_*.py"), *folder.glob("modeling_*.py")][:1]
    text = "".join(path.read_text() for path in paths)
    return set(re.findall(r"^from \.\.(\w+)\.(?:modeling|modular)_", text, re.MULTILINE)) - {"auto"}


def _add(configs: dict[str, Any], kind: str, nulls: bool) -> None:
    """Add a class and those of its parts."""
    if kind in configs:
        return
    made = CONFIG_MAPPING[kind]
    configs[kind] = entry = {"defaults": _defaults(made)}
    if aliases := dict(made.attribute_map):
        entry["aliases"] = aliases
    entry["nullable"] = (
        [name for name in entry["defaults"] if _takes_null(made, name)] if nulls else []
    )
    if rope := getattr(made(), "rope_parameters", None):
        entry["rope"] = rope
        if rope.get("rope_type", "default") != "default" and _says_theta(made):
            entry["own_theta"] = True
    parts = {}
    for name, spec in made.sub_configs_defaults.items():
        if name not in PARTS or (kind, name) in UNREAD_PARTS:
            continue
        missing = None if spec.optional else dict(spec.init_kwargs)
        parts[name] = part = {"type": spec.model_type, "missing": missing}
        if issubclass(spec.config_class, transformers.PreTrainedConfig):
            part["fixed"] = True
        _add(configs, spec.model_type, nulls)
        if _is_merged(made, name, configs[spec.model_type]["defaults"]):
            part["merged"] = True
    if parts:
        entry["parts"] = parts
    if "text_config" in parts:
        entry |= _text_rules(made, parts["text_config"]["type"])


def _says_theta(made: type) -> bool:
    """Return whether a class that says its RoPE takes no `rope_theta` from beside it."""
    return made(rope_theta=2.0).rope_parameters.get("rope_theta") != 2.0


def _is_merged(made: type, name: str, defaults: dict[str, Any]) -> bool:
    """Return whether a part that says little takes what the class around it takes where there is none."""
    spec = made.sub_configs_defaults[name]
    own = {k: v for k, v in spec.init_kwargs.items() if k in defaults and defaults[k] != v}
    part = getattr(made(**{name: {"model_type": spec.model_type}}), name) if own else None
    return bool(own) and all(getattr(part, k) == v for k, v in own.items())


def _text_rules(made: type, text: str) -> dict[str, bool]:
    """Say what a class makes of its text: `flat`, of fields beside its parts; `forwards_ties`, of the text's tables."""
    flat = made(hidden_size=64).get_text_config().hidden_size == 64
    tied = made(
        text_config={"model_type": text, "tie_word_embeddings": True}, tie_word_embeddings=False
    )
    rules = {"flat": flat, "forwards_ties": bool(tied.tie_word_embeddings)}
    return {name: True for name, holds in rules.items() if holds}


def _defaults(made: type) -> dict[str, Any]:
    own = [field for field in fields(made) if field.name not in OF_ALL]
    # `tie_word_embeddings` is a field of models that have tables; of others it is none.
    return {
        field.name: _default(field) for field in own if field.name not in made.sub_configs_defaults
    }


def _default(field: Field) -> Any:
    return field.default_factory() if field.default is MISSING else field.default


def _takes_null(made: type, name: str) -> bool:
    own = {}
    if made is transformers.Exaone4Config and name.startswith("sliding_window"):
        # Without a window a config says the types of its layers.
        own["layer_types"] = ["full_attention"] * made().num_hidden_layers
    try:
        made(**own, **{name: None})
    except Exception:  # of any kind: a validator's, or of the arithmetic with it
        return False
    return True


def _processor(folder: str, name: str) -> dict[str, Any]:
    """Read the attributes of a processor's class from its source, beside those that all processors have."""
    kind = "image" if name.endswith("ImageProcessor") else "video"
    path = LIBRARY / f"models/{folder}/{kind}_processing_{folder}.py"
    common = {
        name: getattr(BaseImageProcessor, name) for name in ("default_to_square", "rescale_factor")
    }
    return common | _class_attributes(path, name)


def _body(path: Path, name: str) -> list[ast.stmt]:
    tree = ast.parse(path.read_text())
    return next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )


def _arguments(path: Path, name: str) -> dict[str, Any]:
    """Read the defaults of a class's arguments from its source."""
    (made,) = (
        node
        for node in _body(path, name)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    names = [argument.arg for argument in made.args.args[-len(made.args.defaults) :]]
    return dict(zip(names, map(ast.literal_eval, made.args.defaults), strict=True))


def _class_attributes(path: Path, name: str) -> dict[str, Any]:
    known = vars(image_utils) | {"PILImageResampling": image_utils.PILImageResampling}
    attributes = {}
    for node in _body(path, name):
        if not isinstance(node, ast.Assign) or not isinstance(target := node.targets[0], ast.Name):
            continue
        if target.id in ("valid_kwargs", "model_input_names") or target.id.startswith("_"):
            continue
        value = eval(compile(ast.Expression(node.value), str(path), "eval"), dict(known))
        attributes[target.id] = (
            int(value) if isinstance(value, image_utils.PILImageResampling) else value
        )
    return attributes


def _signature(made: type) -> dict[str, Any]:
    parameters = inspect.signature(made.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def written(made: dict[str, Any]) -> str:
    """Write the table as JSON, a line for each class."""
    sections = []
    for name, section in made.items():
        if isinstance(section, str):
            sections.append(f"{json.dumps(name)}: {json.dumps(section)}")
            continue
        lines = ",\n".join(
            f"  {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in section.items()
        )
        sections.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    return "{" + ",\n".join(sections) + "}\n"


if __name__ == "__main__":
    TABLE.write_text(written(table()))
