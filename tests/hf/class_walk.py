"""A walk over the fields of every config that is read: each missing, null and changed, here and in transformers.

What is read of a config must be what is read of the config that its class in transformers makes of
it, with every field written, or be refused. A field whose change is not noticed must be one that
nothing there computes with (`INERT`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from class_defaults import TABLE
from families_page import CONFIGS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmjax.errors import UserError
from mmjax.hf.families import CHECKPOINTS, encoder_from_hf, from_hf

Config = dict[str, Any]
# Thinkers before the checkpoints around them, whose classes take long to make.
KINDS = sorted(
    (kind for kind in CHECKPOINTS if kind in CONFIG_MAPPING),
    key=lambda kind: "_omni" in kind,
    reverse=True,
)
KINDS.sort(key=lambda kind: kind in ("qwen2_5_omni", "qwen3_omni_moe"))
# Fields that some class or module reads though they are no field of the class.
HIDDEN = (
    *(
        "head_dim",
        "is_causal",
        "use_bidirectional_attention",
        "attention_chunk_size",
        "layer_types",
        "sliding_window",
    ),
    *(
        "attention_bias",
        "tie_word_embeddings",
        "rope_theta",
        "partial_rotary_factor",
        "rope_local_base_freq",
    ),
    *("per_layer_config", "mlp_bias", "use_sliding_window", "alignment_intermediate_size"),
)
# of a text, that the class around it reads too
OF_WHOLE = ("tie_word_embeddings", "use_bidirectional_attention")
WORDS = ("relu", "gelu", "silu", "quick_gelu", "full", "default", "rms_norm", "anyres_max_4")
REFUSED = "refused: "
CHANGES = ("missing", "null", "changed")
MISSING = object()


@dataclass(frozen=True)
class Finding:
    """What one change of one field showed."""

    kind: str  # of the checkpoint
    part: str  # the class of the part
    field: str
    change: str
    fault: str  # "differs", "crash" or "ignored"
    text: str = ""


@cache
def classes() -> dict[str, Any]:
    """Read the table of classes."""
    return json.loads(TABLE.read_text())["configs"]


def complete_there(config: Config) -> Config | None:
    """Make the whole config of a class in transformers of one; None where it refuses it."""
    kind = CONFIG_MAPPING[config["model_type"]]
    # A class that takes such fields over writes into them (GLM-ASR's RoPE).
    shared = [
        (spec.init_kwargs, copy.deepcopy(spec.init_kwargs))
        for spec in kind.sub_configs_defaults.values()
    ]
    try:
        made = kind.from_dict(copy.deepcopy(config)).to_dict()
    except Exception:  # of any kind: a validator's, or of the arithmetic with it
        return None
    finally:
        for fields, before in shared:
            fields.update(before)
    return json.loads(json.dumps(made, default=str))


def read_here(folder: Path, config: Config) -> Any:
    """Read a config: what it says, or how it is refused, or how that failed."""
    return _read_text(folder, json.dumps(config), bool(CHECKPOINTS[config["model_type"]].read))


@lru_cache(maxsize=64)  # the config that others are compared with is asked for again and again
def _read_text(folder: Path, config: str, whole: bool) -> Any:
    (folder / "config.json").write_text(config)
    try:
        return from_hf(folder) if whole else encoder_from_hf(folder)
    except UserError as error:
        return REFUSED + str(error)
    except Exception as error:
        return f"crash: {error!r}"


def other_values(field: str, value: Any) -> Sequence[Any]:
    """Other values for a field, of which a class may refuse some."""
    if field == "per_layer_config":
        return [{"0": {"hidden_act": "relu", "hidden_activation": "relu"}}]
    match value:
        case bool():
            return [not value]
        case int():
            return [2 * value, max(value // 2, 1), value + 1]
        case float():
            return [2 * value + 0.01, 0.0]
        case str():
            return [word for word in WORDS if word != value]
        case list():
            doubled = [2 * entry for entry in value if isinstance(entry, int)]
            return [value[1:], [*value, *value[-1:]], doubled] if value else [[0], [1]]
        case None:
            return [2, 0.5, True, False, [0]]
    return []


def parts_of(
    config: Config, kind: str, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Walk the parts of a whole config, itself first, with the class of each."""
    yield path, kind
    for name, part in classes()[kind].get("parts", {}).items():
        inner = part["type"] if part.get("fixed") else config[name].get("model_type", part["type"])
        yield from parts_of(config[name], inner, (*path, name))


def at(config: Config, path: Sequence[str]) -> Config:
    """Find a part of a config, which is then there."""
    for name in path:
        config = config.setdefault(name, {})
    return config


def walk(
    folder: Path, kind: str, seen: set[str], changes: Sequence[str] = CHANGES
) -> Iterator[Finding | None]:
    """Walk a kind of checkpoint; yields None for a check that holds, else a Finding.

    seen: classes of parts that were walked already, which are left out.
    """
    plain = {"model_type": kind, **CONFIGS.get(kind, {})}
    whole = complete_there(plain)
    assert whole is not None
    for config in (plain, whole):
        yield from _compared(folder, config, whole, Finding(kind, kind, "", "", ""))
    for path, part in parts_of(whole, kind):
        if part in seen:
            continue
        seen.add(part)
        parts, defaults = classes()[part].get("parts", {}), classes()[part]["defaults"]
        able = copy.deepcopy(plain)
        at(able, path).update({name: value for name, value in ENABLED.items() if name in defaults})
        at(able, path).update(ENABLED_IN.get(part, {}))
        bases = (
            (plain, whole, able)
            if at(able, path) != at(copy.deepcopy(plain), path)
            else (plain, whole)
        )
        for field in dict.fromkeys((*defaults, *parts, *HIDDEN)):
            present = [at(base, path).get(field, at(whole, path).get(field)) for base in bases]
            others = [value for old in _different(present) for value in other_values(field, old)]
            tried = {
                "missing": [MISSING],
                "null": [None],
                "changed": [{}] if field in parts else others,
            }
            for change in changes:
                yield from _try(
                    folder, bases, path, Finding(kind, part, field, change, ""), tried[change]
                )


def _different(values: Sequence[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _try(
    folder: Path,
    bases: Sequence[Config],
    path: Sequence[str],
    finding: Finding,
    values: Sequence[Any],
) -> Iterator[Finding | None]:
    """Give a field other values, in a config that says little and in one that says all."""
    noticed = compared = False
    for base in bases:
        expected = read_here(folder, base)
        for value in values:
            config = copy.deepcopy(base)
            inner = at(config, path)
            if value is MISSING:
                if inner.pop(finding.field, MISSING) is MISSING:
                    continue
            else:
                inner[finding.field] = value
            if (there := _complete_part(config, path, finding.part, finding.field)) is None:
                continue  # refused there
            compared = True
            yield from _compared(
                folder, config, there, replace(finding, change=f"{finding.change} {value}")
            )
            noticed |= read_here(folder, config) != expected
    is_part = finding.field in classes()[finding.part].get("parts", {})
    if (
        finding.change == "changed"
        and compared
        and not (noticed or is_part or is_inert(finding.part, finding.field))
    ):
        yield replace(finding, fault="ignored")


def _compared(
    folder: Path, config: Config, there: Config, finding: Finding
) -> Iterator[Finding | None]:
    """Compare what is read of a config with what is read of the whole one that is made of it there."""
    here = read_here(folder, config)
    if isinstance(here, str):
        yield None if here.startswith(REFUSED) else replace(finding, fault="crash", text=here)
        return
    explicit = read_here(folder, there)
    yield (
        None
        if here == explicit
        else replace(finding, fault="differs", text=difference(here, explicit))
    )


def _complete_part(config: Config, path: Sequence[str], part: str, field: str) -> Config | None:
    """Make a config whole there: the part alone where that is enough, for it is faster."""
    merged = path and classes()[config["model_type"]]["parts"][path[0]].get("merged")
    if not path or merged or field in OF_WHOLE or classes()[part].get("parts"):
        return complete_there(config)
    whole = copy.deepcopy(config)
    if (made := complete_there({**at(whole, path), "model_type": part})) is None:
        return None
    at(whole, path[:-1])[path[-1]] = made
    return whole


def difference(here: Any, there: Any, name: str = "") -> str:
    """Name what differs between two configs that were read."""
    if here == there:
        return ""
    if isinstance(there, str) or type(here) is not type(there):
        return f"{name} {here} | {there}"[:300]
    if isinstance(here, Mapping):
        return "".join(difference(here[key], there[key], f"{name}.{key}") for key in here)
    if hasattr(here, "__dataclass_fields__"):
        names = here.__dataclass_fields__
        return "".join(
            difference(getattr(here, f), getattr(there, f), f"{name}.{f}") for f in names
        )
    return f"{name} {here} | {there}; "


# Of all classes: fields that no output depends on. Initial values, dropout, caches, what a speaker
# or a pooler does.
INERT = {
    *(
        "initializer_range",
        "initializer_factor",
        "init_std",
        "layer_scale_init_value",
        "layerscale_value",
        "use_cache",
    ),
    *(
        "attention_dropout",
        "activation_dropout",
        "dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "layerdrop",
    ),
    *(
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "projection_dropout",
        "hidden_dropout_rate",
        "encoder_layerdrop",
    ),
    *(
        "drop_path_rate",
        "pretraining_tp",
        "num_mtp_layers",
        "reorder_and_upcast_attn",
        "image_seq_length",
        "enable_audio_output",
    ),
    *(
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
    ),
    *(
        "vision_use_head",
        "logit_scale_init_value",
        "conv_chunksize",
        "scale_embedding",
        "use_mask_token",
    ),
    *("_out_features", "_out_indices", "apply_layernorm", "reshape_hidden_states"),
}
OF_DECODER = {  # of Whisper, whose decoder is not read, and of its training
    *(
        "decoder_layers",
        "decoder_attention_heads",
        "decoder_ffn_dim",
        "decoder_layerdrop",
        "max_target_positions",
    ),
    *(
        "vocab_size",
        "suppress_tokens",
        "begin_suppress_tokens",
        "use_weighted_layer_sum",
        "classifier_proj_size",
    ),
    *(
        "apply_spec_augment",
        "mask_time_prob",
        "mask_time_length",
        "mask_time_min_masks",
        "mask_feature_prob",
    ),
    *(
        "mask_feature_length",
        "mask_feature_min_masks",
        "median_filter_width",
        "tie_word_embeddings",
    ),
}
# Of one class. PaliGemma's sizes are those of its parts; the classes around these texts have the
# word on their tables.
INERT_IN = {
    # The first is read of a RoPE that lacks other fields here. Classes whose routers are DeepSeek's
    # have no loss of these logits.
    "ministral3": {"max_position_embeddings"},
    "mistral4": {"max_position_embeddings", "output_router_logits"},
    **{kind: {"output_router_logits"} for kind in ("glm4_moe", "deepseek_v2")},
    # The class of Kimi K2.5 has the word on the tables.
    "deepseek_v3": {"output_router_logits", "tie_word_embeddings"},
    # The class around it has the word on the tables, and its own computes the width of heads.
    "deepseek_ocr2_text": {"output_router_logits", "tie_word_embeddings", "head_dim"},
    "deepseek_ocr2_encoder": {  # without tables, and with RoPE of one kind
        *("vocab_size", "tie_word_embeddings", "max_position_embeddings"),
        *("sliding_window", "max_window_layers"),
    },
    "llama4_text": {"output_router_logits", "router_jitter_noise"},
    "llama4": {"tie_word_embeddings"},  # its text has the word on the tables
    "llama4_vision_model": {
        *("hidden_act", "norm_eps", "vision_feature_select_strategy"),
        *("multi_modal_projector_bias", "projector_dropout"),
    },
    "llava_next_video": {"spatial_pool_stride", "video_seq_length"},  # of videos
    # Their text's default, which they take over, is true.
    **{
        kind: {"tie_word_embeddings"}
        for kind in ("shieldgemma2", "paddleocr_vl", "paddleocr_vl_text")
    },
    "video_llava": {"video_seq_length"},  # of videos
    "minicpmv4_6": {"drop_vision_last_layer", "image_size"},  # which its class does not read
    "minicpmv4_7": {"image_size"},
    # the class around it has the word on it
    **{
        kind: {"insert_layer_id"}
        for kind in ("minicpmv4_6_vision", "minicpmv4_7_vision", "minicpm_ocr_vision")
    },
    "whisper": OF_DECODER,
    "paligemma": {"hidden_size", "vocab_size"},
    # The second is read of a dynamic RoPE, which Gemma 3 says by type of layer.
    "gemma3_text": {"attn_logit_softcapping", "max_position_embeddings"},
    # The class around them has the word on the tables: true, unless it says otherwise.
    **{
        kind: {"max_position_embeddings", "tie_word_embeddings"}
        for kind in ("gemma4_text", "gemma4_unified_text")
    },
    "gemma4_vision": {"attention_bias", "max_position_embeddings"},
    "qwen3_vl_moe_text": {"tie_word_embeddings"},
    "qwen2_5_omni_text": {"tie_word_embeddings"},
    "qwen2_5_omni_audio_encoder": {"max_source_positions"},
    "qwen3_omni_moe_audio_encoder": {"max_source_positions"},
    "qwen3_omni_moe_text": {"sliding_window"},
    # read of a LongRoPE alone
    "phi3": {"original_max_position_embeddings", "max_position_embeddings"},
    "qwen3_asr": {"token_classification_bias"},  # of its forced aligner
    "voxtral_encoder": {"vocab_size"},
    # read of other RoPE than it is allowed
    "glmasr_encoder": {"max_position_embeddings"},
    **{kind: {"image_size"} for kind in ("pixtral", "glm_ocr_vision")},  # images are of any size
    "kimi_k25_vision": {"pos_emb_time"},  # of videos
    "muse_glimmer_text": {"tie_word_embeddings"},  # the class around it has the word on the tables
    "muse_glimmer_vision": {"max_position_embeddings"},  # which its class does not read
    "janus_vision_model": {"num_image_tokens"},  # that it makes
    "clip": {"projection_dim"},
    "clip_vision_model": {"projection_dim"},
}
# What a field needs in order to have an effect.
ENABLED = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
    "output_router_logits": True,
    "full_attn_idxs": [1],
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}
ENABLED_IN = {
    "gemma4_text": {
        "num_kv_shared_layers": 10,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "rope_parameters": None,
    },
    "gemma4_unified_text": {"num_kv_shared_layers": 10, "rope_parameters": None},
    "gemma4_audio": {"attention_context_right": 3},  # of which 0 and 1 are the same
}


def is_inert(part: str, field: str) -> bool:
    """Return whether no output depends on a field of a class, or on one that the class has not."""
    # of a token, which texts say by its name
    is_name = field.endswith(("_token_id", "_token_index"))
    return (
        field not in classes()[part]["defaults"]
        or is_name
        or field in INERT
        or field in INERT_IN.get(part, ())
    )


if __name__ == "__main__":
    import logging
    import sys
    import tempfile
    import time
    import warnings

    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as made:
        for kind in sys.argv[1:] or KINDS:
            begin, findings = time.perf_counter(), list(walk(Path(made), kind, seen))
            print(
                f"{kind}: {len(findings)} checks in {time.perf_counter() - begin:.1f} s", flush=True
            )
            for finding in filter(None, findings):
                print(
                    "  ",
                    finding.part,
                    finding.field,
                    finding.change,
                    finding.fault,
                    finding.text,
                    flush=True,
                )
