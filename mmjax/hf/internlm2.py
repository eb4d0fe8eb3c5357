"""Tensors of InternLM2 and 2.5: a Llama whose queries, keys and values take turns in one matrix."""

from __future__ import annotations

from mmjax.config import DecoderConfig
from mmjax.hf.layout import TensorNames, TensorSlice, linear, linears, norm, table


def internlm2_parts(config: DecoderConfig, inner: str, output: str) -> TensorNames:
    """Locate InternLM2's parameters: for each key head its queries, its key and its value follow each other."""
    layer = f"{inner}layers.*."
    width = config.head_width
    queries = config.heads // config.kv_heads * width
    rows = {
        "query": (0, queries),
        "key": (queries, queries + width),
        "value": (queries + width, queries + 2 * width),
    }
    fused = f"{layer}attention.wqkv"
    attention = {
        f"layers.*.attention.{name}": {
            # [key head, row, input] is here [input, key head and row].
            "weight": TensorSlice(f"{fused}.weight", (2, 0, 1), groups=(config.kv_heads, *span)),
            "bias": TensorSlice(f"{fused}.bias", (0, 1), groups=(config.kv_heads, *span)),
        }
        for name, span in rows.items()
    }
    return TensorNames(
        {
            "embed": table(f"{inner}tok_embeddings"),
            "layers.*.attention_norm": norm(f"{layer}attention_norm"),
            **attention,
            "layers.*.attention.output": linear(f"{layer}attention.wo"),
            "layers.*.mlp_norm": norm(f"{layer}ffn_norm"),
            **linears("layers.*.mlp", f"{layer}feed_forward", gate="w1", up="w3", down="w2"),
            "head.norm": norm(f"{inner}norm"),
            "head.table": table(output),
        }
    )
