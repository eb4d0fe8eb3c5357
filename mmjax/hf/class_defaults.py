"""Complete what a folder's config leaves out, as its class in transformers or diffusers does.

Published configs leave out what equals a default of their class, so every default matters.
`class_defaults.json` has them, made from the classes themselves by `tests/hf/class_defaults.py`.
What a class computes of other fields (as many key heads as heads, kinds of layers) is left to
whoever reads the config: there the field is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mmjax.errors import UserError

Values = Mapping[str, Any]
# Where a config may say its RoPE, beside the fields of its class; older versions wrote it in
# several.
SCALINGS = ("rope_parameters", "rope_scaling")
ROPE = (
    *SCALINGS,
    "rope_theta",
    "partial_rotary_factor",
    "rope_local_base_freq",
)
# Whose first checkpoints have the fields of their text beside `vision_config`, as older versions
# read them.
# Names of parts in checkpoints of before transformers had their classes.
PART_KINDS = {
    "exaone4_5_text": "exaone4",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_5_vl_vision",
}
FLAT = ("glm4v", "glm46v")
# Whose configs say by layer what those without a window have, and are read so.
PER_LAYER = ("gemma4_text", "gemma4_unified_text")


@cache
def _table() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "class_defaults.json").read_text())


def multimodal_classes() -> Mapping[str, Mapping[str, str]]:
    """Return transformers' multimodal kinds: the `class` of each, and of one that is not read the `nearest` that is."""
    return _table()["multimodal"]


def class_rule(kind: str, rule: str) -> bool:
    """Return whether the class of a config of this `model_type` has a rule: `flat` or `forwards_ties`."""
    return bool(_table()["configs"].get(kind, {}).get(rule))


def processor_names(suffix: str) -> list[str]:
    """List the classes of processors that are known and end with this, such as `ImageProcessor`."""
    return [name for name in _table()["processors"] if name.endswith(suffix)]


def processor_defaults(name: str) -> Values:
    """Return the attributes of the class of a processor; of one that is not known, none."""
    return _table()["processors"].get(name, {})


def generator_config(config: Values, name: str) -> Values:
    """Return a config of a class of diffusers with what it leaves out. Null is a value there."""
    return {**_table()["generators"].get(name, {}), **config}


def complete_config(config: Values, where: str) -> Values:
    """Return a config of transformers with what it and its parts leave out; as it is where its class is not known.

    where: names it in messages. Raises UserError for a field that is null and must not be.
    """
    kind = config.get("model_type")
    if kind in ("clip", "clip_vision_model") and _is_evaclip(config):
        kind = f"eva{kind}"
    return _completed(config, kind, where) if _is_known(kind) else config


def _is_known(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _table()["configs"]


def _is_evaclip(config: Values) -> bool:
    """Return whether this is EVA-CLIP, which calls itself CLIP and says the class of its own code."""
    return "evaclip" in f"{config.get('architectures')} {config.get('auto_map')}".lower()


def _completed(config: Values, kind: str, where: str) -> dict[str, Any]:
    entry = _table()["configs"][kind]
    aliases = entry.get("aliases", {})
    fields = {name: value for name, value in config.items() if name not in aliases}
    # Other names are set last there, and win.
    fields |= {aliases[name]: value for name, value in config.items() if name in aliases}
    defaults = entry["defaults"]
    for name in defaults:
        if name in fields and fields[name] is None and name not in entry["nullable"]:
            raise UserError(
                f"{where}: {name}=null is not supported, as in transformers; leave it out for {defaults[name]!r}"
            )
    if fields.get("per_layer_config") and kind not in PER_LAYER:
        raise UserError(
            f"{where}: per_layer_config is not supported: layers that differ in other fields than their type"
        )
    if kind == "clip" and fields.get("vision_config_dict") is not None:
        # Of the first CLIPs: with its class's defaults, it replaces what `vision_config` says.
        fields["vision_config"] = fields["vision_config_dict"]
    if kind == "gemma" and fields.get("hidden_act") == "gelu":
        fields["hidden_act"] = "gelu_pytorch_tanh"  # which the official releases mean by it
    for name, part in entry.get("parts", {}).items():
        fields[name] = _completed_part(fields, name, part, entry.get("flat") or kind in FLAT, where)
    rope = entry.get("rope", {})
    by_layer = rope.get("full_attention", {}).get("rope_type", "default") != "default"
    if by_layer:
        # Such a class is too new for other names.
        fields = {name: value for name, value in fields.items() if name not in ROPE[1:]}
    scaled = by_layer or rope.get("rope_type", "default") != "default"
    if scaled and not any(map(fields.get, SCALINGS)):
        # whose scaling is the class's own
        theta = None if entry.get("own_theta") else fields.get("rope_theta")
        fields["rope_parameters"] = rope if theta is None else {**rope, "rope_theta": theta}
    return {**defaults, **_rope_defaults(rope), **fields, "model_type": kind}


def _completed_part(around: Values, name: str, part: Values, flat: bool, where: str) -> Any:
    """Complete a part: where there is none, of the fields beside the parts, or of what the class then takes."""
    values = around.get(name)
    if values is None and flat and name == "text_config":
        # A field of the class around it is none of the text's.
        own = _table()["configs"][around["model_type"]]["defaults"]
        text_fields = (*_table()["configs"][part["type"]]["defaults"], *ROPE)
        values = {
            field: around[field] for field in text_fields if field in around and field not in own
        }
    values = part["missing"] if values is None else values
    if not isinstance(values, dict):
        return values
    if part.get("merged"):
        values = {**part["missing"], **values}
    # A class of its own takes the part, or the one that the part names.
    kind = part["type"] if part.get("fixed") else values.get("model_type", part["type"])
    kind = PART_KINDS.get(kind, kind)
    return _completed(values, kind, f"{where}: {name}") if _is_known(kind) else values


def _rope_defaults(rope: Values) -> dict[str, Any]:
    """Return the fields of a config's first level that say the RoPE of a config without any."""
    if "full_attention" in rope:
        thetas = (rope[layers]["rope_theta"] for layers in ("full_attention", "sliding_attention"))
        return dict(zip(("rope_theta", "rope_local_base_freq"), thetas, strict=True))
    return {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
