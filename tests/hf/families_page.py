"""The table of docs/families.md, made from what the code reads: `python tests/hf/families_page.py` writes it again."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax.config import AudioConfig, MeshConfig, ModelConfig, NoVideo, VisionConfig
from mmjax.config.validation import check_layout
from mmjax.errors import UserError
from mmjax.hf.class_defaults import multimodal_classes
from mmjax.hf.families import CHECKPOINTS, encoder_from_hf, from_hf

DOCS = Path(__file__).parents[2] / "docs"
PAGE, EXACTNESS = DOCS / "families.md", DOCS / "exactness.md"
END = "<!-- end of table -->\n"
# What a config of the family must say beside its kind; everything else has a documented default.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{
        kind: {"vision_config": {"image_size": 896, "patch_size": 14}}
        for kind in ("gemma3", "shieldgemma2")
    },
    "internvl_chat": {
        "vision_config": {"image_size": 448},
        "llm_config": {"model_type": "qwen2"},
        "ps_version": "v2",
    },
    **{kind: {"vision_config": {}} for kind in ("clip", "evaclip", "siglip", "aya_vision")},
    **{
        kind: {"text_config": {"partial_rotary_factor": 0.5}}
        for kind in ("glm4v", "glm46v", "glmga")
    },
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
    },
    "deepseek_ocr2": {
        "vision_config": {"encoder_config": {"hidden_size": 896, "num_attention_heads": 14}},
        "text_config": {
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["sparse"] * 32,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
        },
    },
    "glm4v_moe": {"text_config": {"head_dim": 128, "partial_rotary_factor": 0.5}},
    "glm_ocr": {
        "text_config": {"hidden_size": 1536, "head_dim": 128, "partial_rotary_factor": 0.5}
    },
    **{kind: {"vision_config": {}, "audio_config": {}} for kind in ("gemma4", "gemma4_unified")},
    # as published: the tower's default widths in transformers do not go with each other
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}},
    "janus": {"vision_config": {"projection_dim": 4096}},
    # The tower's default width in transformers is not the text's.
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "exaone4_5": {"vision_config": {"out_hidden_size": 4096}},
    **{
        kind: {"vision_config": {"out_hidden_size": 4096}}
        for kind in ("qwen3_vl", "cosmos3_omni", "qwen3_5")
    },
    "qwen2_5_omni": {"thinker_config": {"text_config": {}, "vision_config": {}}},
    "qwen3_asr": {"audio_config": {"output_dim": 4096}, "text_config": {}},
    "qwen2_5_omni_thinker": {"text_config": {}, "vision_config": {}},
    "qwen3_omni_moe": {
        "thinker_config": {"text_config": {"hidden_size": 3584}, "vision_config": {}}
    },
    "qwen3_omni_moe_thinker": {"text_config": {"hidden_size": 3584}, "vision_config": {}},
    **{
        kind: {"vision_config": {"out_hidden_size": 2048}}
        for kind in ("qwen3_vl_moe", "qwen3_5_moe")
    },
}
STATES = ("`model_type`", "class in transformers", "state")
HEAD = ("`model_type`", "modules", "attention", "video", "context", "compared")


def table() -> str:
    """Make the table, a row for each kind of checkpoint."""
    return _table(HEAD, map(row, CHECKPOINTS))


def states() -> str:
    """Make the table of all multimodal classes of transformers."""
    classes = multimodal_classes().items()
    return _table(
        STATES,
        (
            (f"`{kind}`", f"`{there['class']}`", f"no; nearest: `{there['nearest']}`")
            if "nearest" in there
            else (f"`{kind}`", f"`{there['class']}`", "read")
            for kind, there in classes
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def row(kind: str) -> tuple[str, ...]:
    """Make the row of a kind of checkpoint from the model that its smallest config says."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({"model_type": kind, **CONFIGS.get(kind, {})})
        )
        model = from_hf(folder) if CHECKPOINTS[kind].read else encoder_from_hf(folder)
    if not isinstance(model, ModelConfig):
        encoder = "vision encoder" if isinstance(model, VisionConfig) else "audio encoder"
        return f"`{kind}`", encoder, "whole items", "-", "items", tests_of(kind)
    llm = model.llm
    attention = ["windows"] * bool(llm.windowed) + ["delta nets"] * bool(llm.delta_net)
    attention += ["images both ways"] * (llm.items == "bidirectional") + ["prefix both ways"] * (
        llm.items == "prefix"
    )
    module = "llm with experts" if llm.experts else "llm"
    parts = (
        f"`{kind}`",
        ", ".join((module, *model.encoders)),
        ", ".join(attention) or "causal",
        video(model),
    )
    return *parts, "yes" if has_context(model) else "no", tests_of(kind)


def tests_of(kind: str) -> str:
    """Name the files of the tests that compare a kind with transformers, by docs/exactness.md."""
    lines = [
        line
        for line in EXACTNESS.read_text().splitlines()
        if line.startswith("| Hugging Face family")
    ]
    files = [re.findall(r"`tests/hf/(\w+\.py)", line) for line in lines if f"`{kind}`" in line]
    return ", ".join(sorted({f"`{name}`" for names in files for name in names}))


def video(model: ModelConfig) -> str:
    """Say whether a model's encoders take videos."""
    towers = [e for e in model.encoders.values() if not isinstance(e, AudioConfig)]
    return "yes" if any(not isinstance(tower.videos, NoVideo) for tower in towers) else "-"


def has_context(model: ModelConfig) -> bool:
    """Return whether rows of the LLM may be cut over devices."""
    try:
        check_layout("mesh", MeshConfig(context=2), model)
    except UserError:
        return False
    return True


def page() -> str:
    """Return the page with these tables in place of its own."""
    text = PAGE.read_text()
    for name, made in (("table", table()), ("classes", states())):
        begin = f"<!-- {name}: made by tests/hf/families_page.py -->\n"
        pattern = f"{re.escape(begin)}.*?{re.escape(END)}"
        text = re.sub(pattern, lambda _, new=begin + made + END: new, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
