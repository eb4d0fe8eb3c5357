"""Cosmos 3's reasoner: a Qwen3-VL whose tensors stand beside those of what makes images, sound and actions."""

from __future__ import annotations

from dataclasses import replace

from mmjax.config import ModelConfig
from mmjax.hf import qwen_vl
from mmjax.hf.folder import HfFolder
from mmjax.hf.layout import Layout, TensorNames, linears, norm
from mmjax.hf.names import ATTENTION

# Of what makes images and videos, sound and actions; an export copies them.
GENERATING = (
    *(f"*.{name}.*" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *("*.norm_added_q.*", "*.norm_added_k.*", "*moe_gen*", "proj_out.*", "proj_in.*"),
    *("time_embedder.*", "audio_proj_*", "audio_modality_embed", "action_*"),
)


def layout(folder: HfFolder, model: ModelConfig) -> Layout:
    """Locate the tensors of such a checkpoint, in its own layout or as Qwen3-VL's."""
    whole = qwen_vl.layout(folder, model)
    modules, prefixes = dict(whole.modules), dict(whole.prefixes)
    if "embed_tokens.weight" in folder.tensors:
        prefixes["llm"] = ("layers.", "embed_tokens.", "norm.", "lm_head.")
    if "layers.0.self_attn.to_q.weight" in folder.tensors:
        there = "layers.*.self_attn"
        names = {"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out"}
        norms = {
            f"{ATTENTION}.{ours}_norm": norm(f"{there}.norm_{ours[0]}") for ours in ("query", "key")
        }
        llm = modules["llm"].by_module
        modules["llm"] = TensorNames({**llm, **linears(ATTENTION, there, **names), **norms})
    return replace(whole, modules=modules, prefixes=prefixes, unused=(*whole.unused, *GENERATING))
