"""Configs of transformers drawn from a seed: sizes, norms, biases, windows, positions and ties of every family.

Sizes are tiny, and odd where a family allows it: heads wider than their share, images with a rest
that is no patch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from evaclip import EvaClipVisionConfig

Fields = dict[str, Any]
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "gelu_new",
    "gelu_fast",
    "quick_gelu",
    "relu",
    "swish",
)
DECODERS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig,
    "ministral3": transformers.Ministral3Config,
    "phi3": transformers.Phi3Config,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "gemma4_text": transformers.Gemma4TextConfig,
    "gemma4_unified_text": transformers.Gemma4UnifiedTextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "gpt_oss": transformers.GptOssConfig,
    "lfm2": transformers.Lfm2Config,
    "llama4_text": transformers.Llama4TextConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
    "mistral4": transformers.Mistral4Config,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "glm4": transformers.Glm4Config,
    "glm4_moe": transformers.Glm4MoeConfig,
    "cohere": transformers.CohereConfig,
    "cohere2": transformers.Cohere2Config,
    "exaone4": transformers.Exaone4Config,
    "granite": transformers.GraniteConfig,
    "hyperclovax": transformers.HyperCLOVAXConfig,
    "opt": transformers.OPTConfig,
    "gpt2": transformers.GPT2Config,
    "ernie4_5": transformers.Ernie4_5Config,
}
LATENT = ("mistral4", "deepseek_v2", "deepseek_v3")  # attention
NOT_IN_LLAVA = (
    *LATENT,
    *("ministral3", "qwen3_5_text", "mixtral", "qwen3_moe", "qwen3_5_moe_text", "glm4", "glm4_moe"),
    *(
        "opt",
        "gpt2",
        "ernie4_5",
        "gemma4_text",
        "gemma4_unified_text",
        "gpt_oss",
        "lfm2",
        "llama4_text",
    ),
)
# as the text of any vision tower
IN_LLAVA = [name for name in DECODERS if name not in NOT_IN_LLAVA]


def pick(rng: np.random.Generator, *options: Any) -> Any:
    """One of these, as it is."""
    return options[rng.integers(len(options))]


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer, `high` included."""
    return int(rng.integers(low, high + 1))


def rope(rng: np.random.Generator, pairs: int) -> Fields:
    """RoPE of any kind, and how long the model's texts are. pairs: of a head's channels."""
    kind = pick(rng, "default", "default", "linear", "dynamic", "yarn", "llama3", "longrope")
    given: Fields = {"rope_type": kind, "rope_theta": pick(rng, 1e4, 5e5)}
    if kind != "default":
        given["factor"] = pick(rng, 1.5, 2.0, 4.0)
    if kind in ("yarn", "llama3", "longrope"):
        given["original_max_position_embeddings"] = pick(rng, 8, 16)
    if kind == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        given |= {
            f"{name}_factor": (1 + 3 * rng.random(pairs)).tolist() for name in ("short", "long")
        }
    return {"rope_parameters": given, "max_position_embeddings": 12 if kind == "dynamic" else 64}


def text_sizes(rng: np.random.Generator, vocab: int = 97) -> tuple[Fields, int]:
    """What all decoders say alike, with `head_dim`; and its value."""
    kv_heads, group, head_width = pick(rng, 1, 2, 3), pick(rng, 1, 2, 4), 2 * between(rng, 2, 8)
    heads = kv_heads * group
    # a multiple, as some classes want it
    width = heads * (head_width if rng.integers(2) else between(rng, 3, 12))
    sizes = {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": between(rng, 20, 90),
        "num_hidden_layers": between(rng, 1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
        "rms_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": pick(rng, False, True),
    }
    return sizes, head_width


def decoder(
    rng: np.random.Generator, family: str, vocab: int = 97, **own: Any
) -> transformers.PreTrainedConfig:
    """The config of a text decoder of a family. own: fields that win over what is drawn."""
    if family == "qwen3_5_text":
        return transformers.Qwen3_5TextConfig(**qwen3_5_text(rng) | own)
    if family == "gemma4_text":
        return transformers.Gemma4TextConfig(**gemma4_text(rng, vocab) | own)
    if family == "gemma4_unified_text":
        return transformers.Gemma4UnifiedTextConfig(**gemma4_unified_text(rng, vocab) | own)
    if family in ("opt", "gpt2"):
        return DECODERS[family](**learned_positions(rng, family, vocab) | own)
    if family == "qwen3_5_moe_text":
        return transformers.Qwen3_5MoeTextConfig(**qwen3_5_moe_text(rng) | own)
    sizes, head_width = text_sizes(rng, vocab)
    given = sizes | rope(rng, head_width // 2)
    given["hidden_activation" if family in ("gemma2", "gemma3") else "hidden_act"] = pick(
        rng, *ACTIVATIONS
    )
    if family in ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3"):
        given["attention_bias"] = pick(rng, False, True)
    if family == "llama":
        given["mlp_bias"] = pick(rng, False, True)
    if family in ("mistral", "ministral3", "mixtral"):
        given["sliding_window"] = pick(rng, None, 4, 6)
    if family == "ministral3":
        given |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        given["rope_parameters"] |= {
            "llama_4_scaling_beta": pick(rng, 0.1, 0.5),
            "original_max_position_embeddings": between(rng, 3, 9),
        }
    if family == "qwen2":  # its heads are of the width's share, whatever a config says
        given["hidden_size"] = given["num_attention_heads"] * given.pop("head_dim")
    if family in ("qwen2", "qwen3"):
        given |= late_windows(rng, given["num_hidden_layers"])
    if family in ("mixtral", "qwen3_moe"):
        given |= expert_fields(rng, family, given["num_hidden_layers"])
    if family == "gpt_oss":
        given |= gpt_oss_fields(rng, given["num_hidden_layers"])
    if family == "lfm2":
        given |= lfm2_fields(rng, given)
    if family == "llama4_text":
        given |= llama4_fields(rng, given["num_hidden_layers"])
    if family == "phi3":
        given |= phi3_fields(rng, given)
    if family in ("glm4", "glm4_moe"):
        given |= glm4_fields(rng, given) | {
            "attention_bias": pick(rng, False, True),
            "pad_token_id": 0,
        }
    if family == "glm4_moe":
        given |= grouped_experts(rng, given["num_hidden_layers"])
        given["use_qk_norm"] = pick(rng, False, True)
    if family in LATENT:
        given |= latent_attention(rng, family, given)
    if family == "ernie4_5":
        given["use_bias"] = pick(rng, False, True)
    if family in ("cohere", "cohere2"):
        given |= cohere_fields(rng, family, given)
    if family in ("granite", "hyperclovax"):
        given |= multipliers(rng, family)
    if family == "exaone4":
        given |= exaone4_fields(rng)
    if family == "gemma3":
        near = {"rope_type": "default", "rope_theta": pick(rng, 100.0, 1e4)}
        given["rope_parameters"] = {
            "full_attention": given["rope_parameters"],
            "sliding_attention": near,
        }
        given["hidden_size"] = given["num_attention_heads"] * between(rng, 3, 12)
    if family in ("gemma2", "gemma3"):
        given |= {
            "query_pre_attn_scalar": pick(rng, 7, 13, 256),
            "attn_logit_softcapping": pick(rng, None, 2.0, 20.0),
            "final_logit_softcapping": pick(rng, None, 3.0, 20.0),
            "sliding_window": pick(rng, 3, 6),
        }
        if rng.integers(2):
            given["layer_types"] = layer_types(rng, given["num_hidden_layers"])
    return DECODERS[family](**given | own)


def gemma4_text(rng: np.random.Generator, vocab: int) -> Fields:
    """Gemma 4: heads of layers without windows, keys shared, inputs by token, and experts beside the MLP or none."""
    sizes, _ = text_sizes(rng, vocab)
    heads, layers = sizes["num_attention_heads"], between(rng, 1, 9)
    types = layer_types(rng, layers)
    types[-1] = "full_attention"  # which the class makes of it
    # A layer of each type is before those that share keys.
    firsts = [types.index(one) for one in set(types)]
    shared = between(rng, 0, layers - 1 - max(firsts)) if rng.integers(3) else 0
    full_width = 2 * between(rng, 2, 8)
    turned = pick(
        rng,
        {"rope_type": "proportional", "partial_rotary_factor": pick(rng, 0.25, 0.3, 0.5, 1.0)},
        {"rope_type": "proportional", "factor": 2.0},
        {"rope_type": "default"},
    )
    experts = between(rng, 2, 6)
    moe = {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": between(rng, 1, experts),
        "moe_intermediate_size": between(rng, 10, 40),
    }
    return sizes | {
        "num_hidden_layers": layers,
        "layer_types": types,
        "hidden_activation": pick(rng, *ACTIVATIONS),
        "attention_bias": pick(rng, False, True),
        "sliding_window": pick(rng, 3, 6),
        "final_logit_softcapping": pick(rng, None, 3.0, 20.0),
        "rope_parameters": {
            "full_attention": turned | {"rope_theta": pick(rng, 1e4, 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": pick(rng, 100.0, 1e4)},
        },
        "max_position_embeddings": 64,
        "global_head_dim": full_width,
        "num_global_key_value_heads": pick(
            rng, None, *(n for n in range(1, heads + 1) if heads % n == 0)
        ),
        "attention_k_eq_v": pick(rng, False, True),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": pick(rng, False, True),
        "hidden_size_per_layer_input": pick(rng, 0, between(rng, 3, 9)),
        "vocab_size_per_layer_input": vocab,
        **pick(rng, {}, moe),
    }


def gemma4_unified_text(rng: np.random.Generator, vocab: int) -> Fields:
    """Gemma 4 without vectors of tokens and without experts."""
    others = ("per_layer_input", "moe", "experts")
    fields = gemma4_text(rng, vocab).items()
    return {name: value for name, value in fields if not any(map(name.count, others))}


def gemma4_unified(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """Gemma 4 without towers; images attend both ways in windows that are longer, or not at all."""
    width = between(rng, 20, 40)
    vision = {
        "patch_size": between(rng, 2, 5),
        "pooling_kernel_size": pick(rng, 1, 2, 3),
        "mm_embed_dim": width,
        "output_proj_dims": width,
        "mm_posemb_size": between(rng, 3, 9),
        "rms_norm_eps": pick(rng, 1e-6, 1e-3),
    }
    audio = {"audio_embed_dim": between(rng, 20, 40), "rms_norm_eps": pick(rng, 1e-6, 1e-3)}
    text = gemma4_unified_text(rng, vocab)
    text["hidden_size"] = max(text["hidden_size"], 24)  # fewer channels enlarge rounding
    text["use_bidirectional_attention"] = pick(rng, None, "vision")
    if text["use_bidirectional_attention"]:
        text["sliding_window"] = pick(rng, 9, 12)  # an image of the tests has up to nine tokens
    return transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def gemma4(
    rng: np.random.Generator, vocab: int = 97, mels: int = 128, **tokens: int
) -> transformers.PreTrainedConfig:
    """Gemma 4 with a tower of images, which attend both ways in windows that are longer, or not at all."""
    heads = pick(rng, 1, 2, 4)
    head_width = 4 * between(rng, 2, 4)
    vision = {
        "hidden_size": heads * head_width,
        "head_dim": head_width,
        "intermediate_size": between(rng, 10, 40),
        "num_hidden_layers": between(rng, 1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": pick(rng, *(n for n in (1, 2, 4) if heads % n == 0)),
        "hidden_activation": pick(rng, *ACTIVATIONS),
        "rms_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "rope_parameters": {"rope_type": "axial", "rope_theta": pick(rng, 100.0, 1e4)},
        "pooling_kernel_size": pick(rng, 2, 3),  # with 1 transformers drops all tokens
        "patch_size": between(rng, 2, 5),
        "position_embedding_size": between(rng, 9, 15),
        "standardize": pick(rng, False, True),
    }
    text = gemma4_text(rng, vocab) | {"pad_token_id": 0}
    text["hidden_size"] = max(text["hidden_size"], 24)  # fewer channels enlarge rounding
    if rng.integers(2):
        # An image of the tests has up to nine tokens.
        both = {"use_bidirectional_attention": "vision", "sliding_window": pick(rng, 9, 12)}
        text |= both
    tied = pick(rng, False, True)
    clipped = rng.integers(2)
    audio = gemma4_audio(rng, mels)
    if clipped:  # as in E2B and E4B, which have no experts
        vision["use_clipped_linears"] = audio["use_clipped_linears"] = True
        text["enable_moe_block"] = False
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=transformers.Gemma4AudioConfig(**audio),
        tie_word_embeddings=tied,
        **tokens,
    )


def gemma4_audio(rng: np.random.Generator, mels: int) -> Fields:
    """Gemma 4's tower of clips: a Conformer whose windows and distances are odd."""
    heads = pick(rng, 1, 2, 3)
    return {
        "hidden_size": 2 * heads * between(rng, 3, 6),
        "num_hidden_layers": between(rng, 1, 3),
        "num_attention_heads": heads,
        "hidden_act": pick(rng, "silu", "gelu"),
        "subsampling_conv_channels": [mels + between(rng, 0, 3), between(rng, 3, 6)],
        "conv_kernel_size": between(rng, 1, 6),
        "residual_weight": pick(rng, 0.5, 0.3, 1.0),
        "attention_chunk_size": between(rng, 1, 13),
        "attention_context_left": between(rng, 2, 14),
        "attention_context_right": between(rng, 0, 4),
        "attention_logit_cap": pick(rng, 50.0, 2.0),
        "rms_norm_eps": pick(rng, 1e-6, 1e-3),
        "gradient_clipping": pick(rng, 1e10, 1.5),
        "output_proj_dims": between(rng, 20, 40),
        "use_clipped_linears": False,
    }


def learned_positions(rng: np.random.Generator, family: str, vocab: int) -> Fields:
    """OPT or GPT-2, with odd heads as well."""
    heads = pick(rng, 1, 2, 3)
    given = {
        "vocab_size": vocab,
        "hidden_size": heads * between(rng, 5, 16),
        "num_hidden_layers": between(rng, 1, 4),
        "num_attention_heads": heads,
        "max_position_embeddings": between(rng, 20, 40),
        "activation_function": pick(rng, *ACTIVATIONS),
        "tie_word_embeddings": pick(rng, False, True),
        "bos_token_id": 2,
        "eos_token_id": 2,
    }
    if family == "opt":
        own = {"ffn_dim": between(rng, 20, 90), "enable_bias": pick(rng, False, True)}
        return given | own | {"pad_token_id": 0}  # of which nothing is learned there
    return given | {
        "n_inner": pick(rng, None, between(rng, 20, 90)),
        "layer_norm_epsilon": pick(rng, 1e-6, 1e-5, 1e-3),
        "scale_attn_weights": pick(rng, False, True),
    }


def phi3_fields(rng: np.random.Generator, given: Fields) -> Fields:
    """Phi-3's heads of even width, its RoPE, default or LongRoPE, and its window."""
    heads = given["num_attention_heads"]
    head_width = 2 * between(rng, 2, 8)
    share = pick(rng, 1.0, 0.75, 0.5) if head_width % 8 == 0 else 1.0
    turned: Fields = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    own = {
        "hidden_size": heads * head_width,
        "head_dim": head_width,
        "sliding_window": pick(rng, None, 4, 6),
    }
    if rng.integers(2):
        factors = {
            f"{name}_factor": (1 + 3 * rng.random(round(share * head_width / 2))).tolist()
            for name in ("short", "long")
        }
        turned |= {"rope_type": "longrope", **factors}
        own["original_max_position_embeddings"] = 16
    return own | {"rope_parameters": turned, "pad_token_id": 0, "eos_token_id": None}


def expert_fields(rng: np.random.Generator, family: str, layers: int) -> Fields:
    """Experts of a number and width, few of which a token takes; in Qwen3-MoE perhaps not in all layers."""
    count = between(rng, 2, 6)
    experts: Fields = {"num_experts_per_tok": between(rng, 1, count)}
    if family == "mixtral":
        return experts | {"num_local_experts": count}
    windows = (
        pick(rng, {}, {"use_sliding_window": True, "sliding_window": 4})
        if family == "qwen3_moe"
        else {}
    )
    sparse = {
        "decoder_sparse_step": pick(rng, 1, 1, 2),
        "mlp_only_layers": pick(rng, [], [], [between(rng, 0, layers)]),
    }
    width = {
        "moe_intermediate_size": between(rng, 10, 40),
        "norm_topk_prob": pick(rng, False, True),
    }
    return experts | windows | sparse | width | {"num_experts": count}


def gpt_oss_fields(rng: np.random.Generator, layers: int) -> Fields:
    """gpt-oss's experts, whose gates are cut off, and its windows: in turns, or by name."""
    windows = pick(rng, {}, {"layer_types": layer_types(rng, layers)})
    count = between(rng, 2, 6)
    return windows | {
        "num_local_experts": count,
        "num_experts_per_tok": between(rng, 1, count),
        "swiglu_limit": pick(rng, 0.1, 7.0),
        "swiglu_alpha": pick(rng, 1.0, 1.702),
        "sliding_window": pick(rng, 3, 6),
        "attention_bias": pick(rng, False, True),
        "pad_token_id": 0,
    }


def llama4_fields(rng: np.random.Generator, layers: int) -> Fields:
    """Llama 4's chunks, layers without RoPE whose queries grow, and experts in some layers."""
    count = between(rng, 2, 5)
    given = {
        "intermediate_size_mlp": between(rng, 20, 60),
        "num_local_experts": count,
        "num_experts_per_tok": between(rng, 1, count),
        "use_qk_norm": pick(rng, False, True),
        "attention_bias": pick(rng, False, True),
        "attn_temperature_tuning": pick(rng, True, True, False),
        "floor_scale": between(rng, 2, 6),
        "attn_scale": pick(rng, 0.1, 0.5),
        "attention_chunk_size": pick(rng, None, 3, 4, 8),
        "no_rope_layer_interval": between(rng, 2, 4),
        "interleave_moe_layer_step": pick(rng, 1, 1, 2),
        "pad_token_id": 0,
    }
    flags = [between(rng, 0, 1) for _ in range(layers)]
    given |= pick(rng, {}, {"no_rope_layers": flags})
    return given | pick(rng, {}, {"moe_layers": [i for i in range(layers) if rng.integers(2)]})


def lfm2_fields(rng: np.random.Generator, given: Fields) -> Fields:
    """LFM2's convolutions, and the width of its MLPs; its heads are of the width's share."""
    layers = between(rng, 1, 7)
    types = [pick(rng, "full_attention", "conv") for _ in range(layers)]
    attended = [i for i, kind in enumerate(types) if kind == "full_attention"]
    return {
        "hidden_size": given["num_attention_heads"] * given["head_dim"],
        "num_hidden_layers": layers,
        "norm_eps": given["rms_norm_eps"],
        "conv_L_cache": between(rng, 2, 4),
        "conv_bias": pick(rng, False, True),
        "block_auto_adjust_ff_dim": pick(rng, False, True),
        "block_multiple_of": pick(rng, 8, 10),
        "block_ffn_dim_multiplier": pick(rng, 1, 1.3),
        **pick(rng, {"layer_types": types}, {"full_attn_idxs": attended}),
    }


def grouped_experts(rng: np.random.Generator, layers: int) -> Fields:
    """DeepSeek-V3's experts, as GLM-4.5 has them: in groups, of which some are chosen first."""
    groups = pick(rng, 1, 1, 2, 3)
    experts = groups * between(rng, 2, 4)
    chosen = between(rng, 1, groups)
    return {
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": between(rng, 1, chosen * experts // groups),
        "moe_intermediate_size": between(rng, 8, 30),
        "n_shared_experts": pick(rng, 1, 1, 2),
        "first_k_dense_replace": between(rng, 0, layers),
        "norm_topk_prob": pick(rng, False, True),
        "routed_scaling_factor": pick(rng, 1.0, 2.5),
    }


def latent_attention(rng: np.random.Generator, family: str, given: Fields) -> Fields:
    """Latent attention and experts of DeepSeek and Mistral 4, whose heads have parts of any width."""
    # complex numbers there: DeepSeek-V2's strides are even
    unit = 2 if family == "deepseek_v2" else 1
    rotary, plain, rank = (
        2 * between(rng, 1, 6),
        unit * between(rng, 1, 5),
        unit * between(rng, 3, 9),
    )
    fields = rope(rng, rotary // 2)
    turned = fields["rope_parameters"]
    if family == "mistral4":  # of the other kinds its class computes too many angles
        turned = {"rope_type": "yarn", "rope_theta": pick(rng, 1e4, 5e5), "factor": 4.0}
        turned |= {
            "llama_4_scaling_beta": pick(rng, 0.1, 0.5),
            "original_max_position_embeddings": between(rng, 3, 9),
        }
    if turned["rope_type"] != "default" and rng.integers(2):
        turned |= {"mscale": pick(rng, 0.7, 1.0), "mscale_all_dim": pick(rng, 0.5, 1.0)}
    heads = given["num_attention_heads"]
    fields |= {
        "rope_parameters": turned,
        "hidden_size": heads * between(rng, 3, 12),
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": plain,
        "v_head_dim": between(rng, 1, plain + rotary),
        "kv_lora_rank": rank,
        "q_lora_rank": pick(rng, None, between(rng, 5, 20)),
        "attention_bias": pick(rng, False, True),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        **grouped_experts(rng, given["num_hidden_layers"]),
    }
    if family == "deepseek_v2":
        fields |= {
            "topk_method": pick(rng, "greedy", "group_limited_greedy"),
            "norm_topk_prob": False,
        }
    else:
        fields["rope_interleave"] = pick(rng, False, True)
    given.pop("head_dim")
    return fields


def glm4_fields(rng: np.random.Generator, given: Fields) -> Fields:
    """GLM-4's heads, a part of whose channels RoPE turns."""
    share, head_width = pick(rng, (0.5, 16), (0.5, 12), (0.25, 24), (1.0, 10))
    turned = rope(rng, int(head_width * share) // 2)
    turned["rope_parameters"]["partial_rotary_factor"] = share
    return turned | {
        "head_dim": head_width,
        "hidden_size": given["num_attention_heads"] * between(rng, 3, 12),
    }


def cohere_fields(rng: np.random.Generator, family: str, given: Fields) -> Fields:
    """Cohere's norms and logits, and Command R7B's windows; its heads are of the width's share."""
    fields = {
        "hidden_size": given["num_attention_heads"] * given["head_dim"],
        "layer_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "logit_scale": pick(rng, 0.0625, 0.25, 1.7),
        "attention_bias": pick(rng, False, True),
        "eos_token_id": 2,
    }
    if family == "cohere":
        return fields
    layers = between(rng, 1, 9)
    windows = pick(
        rng,
        {"layer_types": layer_types(rng, layers)},
        {"sliding_window_pattern": between(rng, 1, 4)},
        {},
    )
    return fields | windows | {"num_hidden_layers": layers, "sliding_window": pick(rng, 3, 6)}


def multipliers(rng: np.random.Generator, family: str) -> Fields:
    """Granite's multipliers, and HyperCLOVA X's norms of outputs."""
    fields = {
        "embedding_multiplier": pick(rng, 1.0, 3.0, 12.0),
        "residual_multiplier": pick(rng, 1.0, 0.22, 1.4),
        "attention_multiplier": pick(rng, 0.0625, 0.3, 1.0),
        "logits_scaling": pick(rng, 0.125, 1.0, 8.0),
        "attention_bias": pick(rng, False, True),
        "mlp_bias": pick(rng, False, True),
    }
    if family == "granite":
        return fields
    if rng.integers(2):
        del fields["attention_multiplier"]
    return fields | {"use_post_norm": pick(rng, False, True)}


def exaone4_fields(rng: np.random.Generator) -> Fields:
    """EXAONE 4's layers: with windows and RoPE, or without either; all without windows have RoPE."""
    layers = between(rng, 1, 6)
    letters = {"sliding_window_pattern": "LLLG"}
    windows = pick(
        rng,
        {"layer_types": layer_types(rng, layers)} | letters,
        {"sliding_window_pattern": between(rng, 1, 4)},
        {"sliding_window": None, "layer_types": ["full_attention"] * layers},
    )
    return {"num_hidden_layers": layers, "sliding_window": pick(rng, 3, 6), **windows}


def late_windows(rng: np.random.Generator, layers: int) -> Fields:
    """Qwen's windows: none, from a layer on, or of layers by name."""
    match between(rng, 0, 2):
        case 0:
            return {"use_sliding_window": False, "sliding_window": 5}
        case 1:
            first = between(rng, 0, layers)
            return {
                "use_sliding_window": True,
                "sliding_window": pick(rng, 3, 5),
                "max_window_layers": first,
            }
        case _:
            return {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": layer_types(rng, layers),
            }


def layer_types(rng: np.random.Generator, layers: int) -> list[str]:
    """A kind of attention for each layer."""
    return [pick(rng, "full_attention", "sliding_attention") for _ in range(layers)]


def any_decoder(
    rng: np.random.Generator, vocab: int = 97, **own: Any
) -> transformers.PreTrainedConfig:
    """The config of a text decoder of any family."""
    return decoder(rng, pick(rng, *IN_LLAVA), vocab, **own)


def qwen3_5_text(rng: np.random.Generator, sections: bool = False) -> Fields:
    """The text of Qwen3.5: gated delta nets and gated attention, and RoPE that turns a part of each head."""
    sizes, _ = text_sizes(rng)
    key_heads, layers = pick(rng, 1, 2, 3), between(rng, 1, 6)
    share, head_width = pick(rng, (0.25, 16), (0.5, 12), (0.25, 24), (1.0, 10))
    pairs = int(head_width * share) // 2
    given = rope(rng, pairs)
    given["rope_parameters"]["partial_rotary_factor"] = share
    if sections:
        y = between(rng, 0, pairs // 2)
        x = between(rng, 0, pairs // 2)
        own = {"mrope_section": [pairs - y - x, y, x], "mrope_interleaved": True}
        given = {
            "rope_parameters": {"rope_type": "default", "rope_theta": pick(rng, 1e4, 5e6)} | own
        }
        given["rope_parameters"]["partial_rotary_factor"] = share
    sizes |= {
        "head_dim": head_width,
        "num_hidden_layers": layers,
        "hidden_act": pick(rng, "silu", "silu", *ACTIVATIONS),
        "attention_bias": pick(rng, False, True),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * pick(rng, 1, 2, 3),
        "linear_key_head_dim": between(rng, 8, 16),
        "linear_value_head_dim": between(rng, 8, 16),
        "linear_conv_kernel_dim": pick(rng, 2, 3, 4, 4),
    }
    if rng.integers(2):
        sizes["layer_types"] = [
            pick(rng, "linear_attention", "full_attention") for _ in range(layers)
        ]
    return sizes | given


def qwen3_5_moe_text(rng: np.random.Generator, sections: bool = False) -> Fields:
    """The text of Qwen3.5 with mixtures of experts, and one that every token takes."""
    given = qwen3_5_text(rng, sections)
    del given["intermediate_size"]
    count = between(rng, 2, 6)
    return given | {
        "num_experts": count,
        "num_experts_per_tok": between(rng, 1, count),
        "moe_intermediate_size": between(rng, 10, 40),
        "shared_expert_intermediate_size": between(rng, 10, 40),
    }


def tower_sizes(rng: np.random.Generator, most: int) -> Fields:
    """What CLIP, SigLIP and InternViT say alike. An image may have a rest that is no whole patch.

    most: patches along a side of an image.
    """
    heads, patch = pick(rng, 1, 2, 3), between(rng, 2, 6)
    return {
        # norms over fewer channels enlarge what rounding differs by
        "hidden_size": heads * between(rng, 9, 14),
        "intermediate_size": between(rng, 10, 50),
        "num_hidden_layers": between(rng, 1, 4),
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": patch * between(rng, 2, most) + between(rng, 0, patch - 1),
        "layer_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "hidden_act": pick(rng, *ACTIVATIONS),
    }


def two_norm_tower(
    rng: np.random.Generator, most: int = 5
) -> tuple[transformers.PreTrainedConfig, Fields]:
    """CLIP or SigLIP, and what a LLaVA around it says of the features that it takes."""
    sizes = tower_sizes(rng, most)
    layers = sizes["num_hidden_layers"]
    one = -1, between(rng, -layers, -1), between(rng, 1, layers)
    own = {
        "vision_feature_layer": pick(rng, *one, [between(rng, 1, layers), -1]),
        "multimodal_projector_bias": pick(rng, False, True),
        "projector_hidden_act": pick(rng, *ACTIVATIONS),
    }
    if rng.integers(2):
        return transformers.CLIPVisionConfig(**sizes), own | {
            "vision_feature_select_strategy": "default"
        }
    tower = transformers.SiglipVisionConfig(**sizes, vision_use_head=pick(rng, False, True))
    return tower, own | {"vision_feature_select_strategy": "full"}


def vipllava(
    rng: np.random.Generator, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """ViP-LLaVA: a CLIP whose patches are read of one layer or of several, in any order, and normed."""
    tower = tower_sizes(rng, 5)
    layers = tower["num_hidden_layers"]
    several = [pick(rng, 1, -1) * between(rng, 1, layers) for _ in range(between(rng, 2, 4))]
    return transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tower),
        text_config=any_decoder(rng, vocab),
        vision_feature_layer=pick(rng, several, several, several, -1),
        projector_hidden_act=pick(rng, *ACTIVATIONS),
        projector_layernorm_eps=pick(rng, 1e-5, 1e-3),
        tie_word_embeddings=pick(rng, False, True),
        **own,
    )


def evaclip_tower(rng: np.random.Generator) -> EvaClipVisionConfig:
    """EVA-CLIP, with any of its biases, norms of both kinds, before or after attention and MLP."""
    sizes = tower_sizes(rng, 6)
    sizes["num_hidden_layers"] = between(rng, 2, 4)  # of which all but the last are read
    options = ("q_bias", "k_bias", "v_bias", "post_layernorm", "use_rms_norm")
    return EvaClipVisionConfig(**sizes, **{name: pick(rng, False, True) for name in options})


def dinov2_tower(
    rng: np.random.Generator, registers: bool = False
) -> transformers.PreTrainedConfig:
    """DINOv2, with registers or without, whose positions are learned of images of another size."""
    sizes = tower_sizes(rng, 6)
    del sizes["intermediate_size"]
    sizes |= {
        "mlp_ratio": between(rng, 1, 4),
        "qkv_bias": pick(rng, False, True),
        "use_swiglu_ffn": pick(rng, False, True),
    }
    if registers:
        return transformers.Dinov2WithRegistersConfig(
            **sizes, num_register_tokens=between(rng, 1, 5)
        )
    return transformers.Dinov2Config(**sizes, use_mask_token=pick(rng, False, True))


def gemma3(rng: np.random.Generator, vocab: int = 97, **own: int) -> transformers.PreTrainedConfig:
    """Gemma 3: a SigLIP whose squares of patches become one token each, windows longer than an image."""
    vision = tower_sizes(rng, 5)
    pooled = pick(rng, 1, 2, 3)
    side = between(rng, 1, 3)
    vision["image_size"] = vision["patch_size"] * pooled * side
    text = decoder(rng, "gemma3", vocab, sliding_window=side**2 + between(rng, 0, 3))
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**vision, vision_use_head=False),
        mm_tokens_per_image=side**2,
        tie_word_embeddings=pick(rng, False, True),
        **own,
    )


def paligemma(
    rng: np.random.Generator, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """PaliGemma 1 or 2, around a Gemma or a Gemma 2, whose windows a prefix may exceed."""
    text = decoder(rng, pick(rng, "gemma", "gemma2"), vocab)
    # positions there begin at 1
    while text.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        text = decoder(rng, text.model_type, vocab)
    return transformers.PaliGemmaConfig(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**tower_sizes(rng, 4), vision_use_head=False),
        projection_dim=text.hidden_size,
        tie_word_embeddings=pick(rng, False, True),
        **own,
    )


def pixtral_tower(rng: np.random.Generator, merge: int = 1) -> transformers.PreTrainedConfig:
    """Pixtral's tower. Heads of an odd number of channel pairs have one more turned by rows than by columns."""
    sizes = tower_sizes(rng, 5)
    heads = sizes["num_attention_heads"]
    sizes |= {"hidden_size": heads * 2 * between(rng, 5, 7), "rope_parameters": pixtral_rope(rng)}
    sizes["image_size"] = sizes["patch_size"] * merge * between(rng, 2, 4)
    del sizes["layer_norm_eps"]
    return transformers.PixtralVisionConfig(**sizes)


def pixtral_rope(rng: np.random.Generator) -> Fields:
    """The base of Pixtral's RoPE."""
    return {"rope_type": "axial", "rope_theta": pick(rng, 100.0, 1e4)}


def pixtral(rng: np.random.Generator, vocab: int = 97, **own: int) -> transformers.PreTrainedConfig:
    """Pixtral: a LLaVA whose tower takes images of any size."""
    vision = pixtral_tower(rng)
    layers = vision.num_hidden_layers
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config=decoder(rng, "mistral", vocab),
        vision_feature_layer=pick(rng, -1, between(rng, -layers, -1), between(rng, 1, layers)),
        vision_feature_select_strategy="full",
        multimodal_projector_bias=pick(rng, False, True),
        projector_hidden_act=pick(rng, *ACTIVATIONS),
        tie_word_embeddings=pick(rng, False, True),
        **own,
    )


def mistral3(
    rng: np.random.Generator, vocab: int = 97, text: str = "", **own: int
) -> transformers.PreTrainedConfig:
    """Mistral 3: Pixtral's tower, whose patches are merged by a matrix. text: the kind of its text; empty: drawn."""
    merge = pick(rng, 1, 2, 2, 3)
    vision = pixtral_tower(rng, merge)
    layers = vision.num_hidden_layers
    return transformers.Mistral3Config(
        vision_config=vision,
        text_config=decoder(rng, text or pick(rng, "mistral", "ministral3"), vocab),
        vision_feature_layer=pick(rng, -1, between(rng, -layers, -1), between(rng, 1, layers)),
        multimodal_projector_bias=pick(rng, False, True),
        projector_hidden_act=pick(rng, *ACTIVATIONS),
        tie_word_embeddings=pick(rng, False, True),
        spatial_merge_size=merge,
        **own,
    )


def lighton_ocr(
    rng: np.random.Generator, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """LightOnOCR: Pixtral's tower, whose patches are merged by a matrix, around a Qwen3."""
    merge = pick(rng, 1, 2, 2, 3)
    return transformers.LightOnOcrConfig(
        vision_config=pixtral_tower(rng, merge),
        text_config=decoder(rng, "qwen3", vocab),
        spatial_merge_size=merge,
        tie_word_embeddings=pick(rng, False, True),
        **own,
    )


def deepseek_vl(
    rng: np.random.Generator, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """DeepSeek-VL of one tower, a SigLIP."""
    text = any_decoder(rng, vocab)
    return transformers.DeepseekVLConfig(
        vision_config=transformers.SiglipVisionConfig(
            **tower_sizes(rng, 5), vision_use_head=pick(rng, False, True)
        ),
        text_config=text,
        tie_word_embeddings=text.tie_word_embeddings,
        **own,
    )


def janus(rng: np.random.Generator, vocab: int = 97, **own: int) -> transformers.PreTrainedConfig:
    """Janus, with the smallest model that makes images."""
    text = any_decoder(rng, vocab)
    tower = tower_sizes(rng, 5)
    tower["mlp_ratio"] = tower.pop("intermediate_size") / tower["hidden_size"]
    tower |= {
        "attention_bias": pick(rng, False, True),
        "depth": pick(rng, 1, 2, 2),
        "projection_dim": text.hidden_size,
    }
    images = {
        "embed_dim": 4,
        "num_embeddings": 7,
        "latent_channels": 32,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "projection_dim": text.hidden_size,
        "image_token_embed_dim": text.hidden_size,
    }
    return transformers.JanusConfig(
        vision_config=tower,
        text_config=text,
        vq_config=images,
        tie_word_embeddings=text.tie_word_embeddings,
        **own,
    )


def shieldgemma2(
    rng: np.random.Generator, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """ShieldGemma 2: a Gemma 3."""
    of_gemma = gemma3(rng, vocab, **own)
    return transformers.ShieldGemma2Config(
        vision_config=of_gemma.vision_config,
        text_config=of_gemma.text_config,
        mm_tokens_per_image=of_gemma.mm_tokens_per_image,
        tie_word_embeddings=of_gemma.tie_word_embeddings,
        **own,
    )


def idefics3(
    rng: np.random.Generator, family: str, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """Idefics3, or SmolVLM: a SigLIP tower for images of several sizes, and a matrix on squares of patches."""
    vision = tower_sizes(rng, 9)
    text = any_decoder(rng, vocab)
    kind = {"idefics3": transformers.Idefics3Config, "smolvlm": transformers.SmolVLMConfig}[family]
    tied = text.tie_word_embeddings
    return kind(
        vision_config=vision,
        text_config=text,
        scale_factor=pick(rng, 1, 2, 3),
        tie_word_embeddings=tied,
        **own,
    )


def lfm2_vl(rng: np.random.Generator, vocab: int = 97, **own: Any) -> transformers.Lfm2VlConfig:
    """LFM2-VL: a SigLIP 2 with positions of a square, and an MLP on squares of patches."""
    vision = tower_sizes(rng, 5) | {
        "model_type": "siglip2_vision_model",
        "num_patches": between(rng, 1, 7) ** 2,
        "vision_use_head": pick(rng, False, True),
    }
    del vision["image_size"]
    given = {
        "vision_config": vision,
        "text_config": decoder(rng, pick(rng, "lfm2", "lfm2", *IN_LLAVA), vocab),
        "downsample_factor": pick(rng, 1, 2, 3),
        "projector_hidden_size": between(rng, 10, 40),
        "projector_hidden_act": pick(rng, *ACTIVATIONS),
        "projector_bias": pick(rng, False, True),
        "projector_use_layernorm": pick(rng, False, True),
        "tie_word_embeddings": pick(rng, False, True),
    }
    return transformers.Lfm2VlConfig(**given | own)


def deepseek_ocr2(
    rng: np.random.Generator, vocab: int = 97, **own: Any
) -> transformers.PreTrainedConfig:
    """DeepSeek-OCR 2: SAM's layers, whose windows an image cuts, layers with queries, a text with experts."""
    sizes, _ = text_sizes(rng, vocab)
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    sizes["hidden_size"] = heads * sizes.pop("head_dim")
    text = sizes | rope(rng, sizes["hidden_size"] // heads // 2) | grouped_experts(rng, layers)
    text |= {
        "attention_bias": pick(rng, False, True),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "topk_method": pick(rng, "greedy", "group_limited_greedy"),
        "mlp_layer_types": [pick(rng, "dense", "sparse") for _ in range(layers)],
        "pad_token_id": 0,
    }
    for name in ("first_k_dense_replace", "norm_topk_prob"):
        text.pop(name)
    sam_heads, sam_layers, kv_heads = pick(rng, 1, 2), between(rng, 1, 3), pick(rng, 1, 2)
    query_heads = kv_heads * pick(rng, 1, 2)
    width, patch = query_heads * 2 * between(rng, 2, 5), pick(rng, 1, 2, 3)
    sam = {
        "hidden_size": sam_heads * between(rng, 3, 8),
        "num_hidden_layers": sam_layers,
        "num_attention_heads": sam_heads,
        "image_size": patch * pick(rng, 3, 8, 10, 64) + between(rng, 0, patch - 1),
        "patch_size": patch,
        "window_size": pick(rng, 3, 5, 12, 14, 0),
        "global_attn_indexes": [i for i in range(sam_layers) if rng.integers(2)],
        "mlp_dim": pick(rng, None, between(rng, 10, 30)),
        "mlp_ratio": pick(rng, 2.5, 4.0),
        "qkv_bias": pick(rng, True, True, False),
        "output_channels": between(rng, 4, 9),
        "downsample_channels": [between(rng, 4, 9), width],
        "hidden_act": pick(rng, *ACTIVATIONS),
        "layer_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
    }
    encoder = {
        "hidden_size": width,
        "intermediate_size": between(rng, 10, 40),
        "num_hidden_layers": between(rng, 1, 3),
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": pick(rng, *ACTIVATIONS),
        "rms_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "rope_parameters": {"rope_type": "default", "rope_theta": pick(rng, 1e4, 1e6)},
    }
    given = {
        "text_config": text,
        "vision_config": {"sam_config": sam, "encoder_config": encoder},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    return transformers.DeepseekOcr2Config(**given | own)


def llama4(rng: np.random.Generator, vocab: int = 97, **own: Any) -> transformers.Llama4Config:
    """Llama 4 with images of one size, whole squares of patches, and fields of its tower that are not read."""
    heads, merge, patch = pick(rng, 1, 2, 3), pick(rng, 1, 2, 2, 4), between(rng, 2, 6)
    width, projected = heads * 4 * between(rng, 2, 4), between(rng, 10, 40)
    vision = {
        "hidden_size": width,
        "intermediate_size": merge**2 * width,
        "num_hidden_layers": between(rng, 1, 3),
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": patch * merge * between(rng, 1, 6 // merge) + between(rng, 0, patch - 1),
        "pixel_shuffle_ratio": 1 / merge,
        "projector_input_dim": projected,
        "projector_output_dim": projected,
        "vision_output_dim": projected,
        "rope_parameters": {"rope_type": "default", "rope_theta": pick(rng, 100.0, 1e4)},
        "norm_eps": pick(rng, 1e-6, 1e-3),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "multi_modal_projector_bias": pick(rng, False, True),
    }
    text = decoder(rng, "llama4_text", vocab)
    given = {"text_config": text, "vision_config": vision}
    # of which only the text's counts
    given["tie_word_embeddings"] = pick(rng, False, True)
    return transformers.Llama4Config(**given | own)


def intern_tower(rng: np.random.Generator) -> tuple[transformers.PreTrainedConfig, Fields]:
    """InternViT, and what an InternVL around it says of the features that it takes."""
    sizes = tower_sizes(rng, 5)
    merge, layers = pick(rng, 1, 2, 2, 4), sizes["num_hidden_layers"]
    sizes |= {
        "image_size": merge * between(rng, 1, 3) * sizes["patch_size"],
        "norm_type": pick(rng, "layer_norm", "rms_norm"),
        "use_qk_norm": pick(rng, False, True),
        "attention_bias": pick(rng, False, True),
        "use_mean_pooling": pick(rng, False, True),
    }
    own = {
        "vision_feature_layer": pick(
            rng, -1, -1, between(rng, -layers, -1), between(rng, 1, layers)
        ),
        "downsample_ratio": 1 / merge,
        "projector_hidden_act": pick(rng, *ACTIVATIONS),
        "tie_word_embeddings": pick(rng, False, True),
    }
    return transformers.InternVLVisionConfig(**sizes), own


def cohere_vision(
    rng: np.random.Generator, family: str, vocab: int = 97, **own: int
) -> transformers.PreTrainedConfig:
    """Aya Vision, or Command A Vision: a SigLIP, squares of whose patches go through a gated MLP."""
    vision = tower_sizes(rng, 5)
    merge, layers = pick(rng, 1, 2, 2, 3), vision["num_hidden_layers"]
    vision["image_size"] = vision["patch_size"] * merge * between(rng, 1, 2)
    given = {
        "text_config": decoder(rng, pick(rng, "cohere2", "cohere2", *IN_LLAVA), vocab),
        "vision_config": transformers.SiglipVisionConfig(**vision, vision_use_head=False),
        "downsample_factor": merge,
        "tie_word_embeddings": pick(rng, False, True),
        "alignment_intermediate_size": 2 * between(rng, 4, 20),
    }
    if family == "cohere2_vision":
        return transformers.Cohere2VisionConfig(**given, **own)
    read = {
        "vision_feature_layer": pick(rng, -1, between(rng, -layers, -1), between(rng, 1, layers)),
        "adapter_layer_norm_eps": pick(rng, 1e-6, 1e-3),
    }
    return transformers.AyaVisionConfig(**given, **read, **own)


def qwen_text(rng: np.random.Generator, interleaved: bool) -> Fields:
    """The text of a Qwen-VL, whose RoPE is in sections of t, y and x."""
    sizes, head_width = text_sizes(rng)
    if not interleaved:
        sizes["hidden_size"] = sizes["num_attention_heads"] * sizes.pop("head_dim")
    pairs = head_width // 2
    y = between(rng, 0, pairs // 2)
    x = between(rng, 0, pairs // 2)
    kind = pick(rng, "default", "default", "yarn")
    turned: Fields = {
        "rope_type": kind,
        "rope_theta": pick(rng, 1e4, 5e6),
        "mrope_section": [pairs - y - x, y, x],
    }
    if interleaved:
        turned["mrope_interleaved"] = True
        if rng.integers(4) == 0:
            del turned["mrope_section"]
    if kind == "yarn":
        turned |= {"factor": 4.0, "original_max_position_embeddings": 16}
    windows = late_windows(rng, sizes["num_hidden_layers"])
    windows.pop("layer_types", None)
    bias = {"attention_bias": pick(rng, False, True)} if interleaved else {}
    del sizes["tie_word_embeddings"]
    return sizes | windows | bias | {"rope_parameters": turned, "hidden_act": pick(rng, *ACTIVATIONS),
                                     "max_position_embeddings": 64}  # fmt: skip


def qwen_tower(rng: np.random.Generator, outputs: int) -> Fields:
    """What the towers of Qwen2.5-VL and Qwen3-VL say alike. outputs: the width of the text."""
    heads = pick(rng, 1, 2, 3)
    return {
        "depth": between(rng, 1, 5),
        "hidden_size": heads * 4 * between(rng, 3, 5),
        "intermediate_size": between(rng, 20, 60),
        "num_heads": heads,
        "patch_size": between(rng, 3, 6),
        "spatial_merge_size": pick(rng, 2, 2, 3),
        "temporal_patch_size": pick(rng, 1, 2, 2),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "out_hidden_size": outputs,
    }


def qwen2_vl(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """Qwen2-VL: a tower whose layers see the whole image, with names of its own."""
    text = qwen_text(rng, interleaved=False)
    vision = qwen_tower(rng, text["hidden_size"])
    vision["embed_dim"] = vision.pop("hidden_size")
    vision["hidden_size"] = vision.pop("out_hidden_size")
    vision["mlp_ratio"] = between(rng, 1, 4)
    del vision["intermediate_size"]
    return transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=pick(rng, False, True), **tokens
    )


def qwen2_5_vl(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """Qwen2.5-VL: a tower of windows, some layers of which see the whole image."""
    text = qwen_text(rng, interleaved=False)
    vision = qwen_tower(rng, text["hidden_size"])
    merged, depth = vision["patch_size"] * vision["spatial_merge_size"], vision["depth"]
    vision |= {
        "window_size": merged * between(rng, 1, 4) + between(rng, 0, merged - 1),
        "fullatt_block_indexes": [i for i in range(depth + 2) if rng.integers(2)],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=pick(rng, False, True), **tokens
    )


def exaone4_5(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """EXAONE 4.5: Qwen2.5-VL's tower with grouped queries, and plain positions of the tokens of images."""
    vl = qwen2_5_vl(rng)
    text = decoder(rng, "exaone4").to_dict()
    vision = {
        name: value
        for name, value in vl.vision_config.to_dict().items()
        if name not in ("model_type", "rope_parameters", "tokens_per_second")
    }
    heads = vision["num_heads"] * pick(rng, 1, 2)
    vision |= {
        "num_heads": heads,
        "hidden_size": heads * 4 * between(rng, 2, 4),
        "num_key_value_heads": pick(rng, *(n for n in (1, 2, 3, 6) if heads % n == 0)),
        "out_hidden_size": text["hidden_size"],
    }
    return transformers.Exaone4_5_Config(
        text_config=text, vision_config=vision, tie_word_embeddings=pick(rng, False, True), **tokens
    )


def hyperclovax(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """HyperCLOVA X Think: Qwen2.5-VL's tower, whose merger's outputs are as wide as they like."""
    vision = qwen2_5_vl(rng).vision_config.to_dict() | {"out_hidden_size": between(rng, 10, 40)}
    return transformers.HyperCLOVAXVisionV2Config(
        text_config=decoder(rng, "hyperclovax").to_dict(),
        vision_config=vision,
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def cosmos3_omni(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """Cosmos 3's reasoner, a Qwen3-VL."""
    return qwen3_vl(rng, transformers.Cosmos3OmniConfig, **tokens)


def qwen3_vl(
    rng: np.random.Generator, kind: type = transformers.Qwen3VLConfig, **tokens: int
) -> transformers.PreTrainedConfig:
    """Qwen3-VL: a table of positions that is stretched, features of several layers added to the text's."""
    text = qwen_text(rng, interleaved=True)
    vision = qwen3_tower(rng, text["hidden_size"])
    return kind(
        text_config=text, vision_config=vision, tie_word_embeddings=pick(rng, False, True), **tokens
    )


def qwen3_tower(rng: np.random.Generator, outputs: int) -> Fields:
    """The tower of Qwen3-VL. outputs: the width of the text."""
    vision = qwen_tower(rng, outputs)
    return vision | {
        "num_position_embeddings": between(rng, 2, 7) ** 2,
        "deepstack_visual_indexes": [i for i in range(vision["depth"] + 2) if rng.integers(2)],
    }


def qwen3_vl_moe(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """Qwen3-VL with mixtures of experts in the text."""
    text = qwen_text(rng, interleaved=True)
    text |= expert_fields(rng, "qwen3_vl_moe", text["num_hidden_layers"])
    return transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=qwen3_tower(rng, text["hidden_size"]),
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def qwen3_5(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """Qwen3.5: gated delta nets in the text, and Qwen3-VL's tower without its deepstack."""
    return transformers.Qwen3_5Config(**_qwen3_5(rng, qwen3_5_text(rng, sections=True)), **tokens)


def qwen3_5_moe(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """Qwen3.5 with mixtures of experts in the text."""
    return transformers.Qwen3_5MoeConfig(
        **_qwen3_5(rng, qwen3_5_moe_text(rng, sections=True)), **tokens
    )


def _qwen3_5(rng: np.random.Generator, text: Fields) -> Fields:
    """What Qwen3.5 says around its text."""
    del text["tie_word_embeddings"]
    vision = qwen_tower(rng, text["hidden_size"])
    vision["num_position_embeddings"] = between(rng, 2, 7) ** 2
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": pick(rng, False, True),
    }


def glm4v(rng: np.random.Generator, family: str, **tokens: int) -> transformers.PreTrainedConfig:
    """GLM-4.1V, or GLM-4.6V: positions stretched bicubically, and a merger of a convolution and a gated MLP."""
    sizes, _ = text_sizes(rng)
    own = glm4_fields(rng, sizes)
    pairs = int(own["head_dim"] * own["rope_parameters"]["partial_rotary_factor"]) // 2
    y, x = between(rng, 0, pairs // 2), between(rng, 0, pairs // 2)
    turned = own["rope_parameters"] | {
        "rope_type": "default",
        "mrope_section": [pairs - y - x, y, x],
    }
    turned = {
        name: turned[name]
        for name in ("rope_type", "rope_theta", "partial_rotary_factor", "mrope_section")
    }
    del sizes["head_dim"], sizes["tie_word_embeddings"]
    sizes |= {
        "hidden_size": sizes["num_attention_heads"] * own["head_dim"],
        "rope_parameters": turned,
    }
    sizes |= {
        "hidden_act": pick(rng, *ACTIVATIONS),
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    heads, patch = pick(rng, 1, 2, 3), between(rng, 3, 6)
    vision = {
        "depth": between(rng, 1, 4),
        "hidden_size": heads * 4 * between(rng, 3, 5),
        "intermediate_size": between(rng, 20, 60),
        "num_heads": heads,
        "attention_bias": pick(rng, False, True),
        "image_size": patch * between(rng, 1, 6) + between(rng, 0, patch - 1),
        "patch_size": patch,
        "spatial_merge_size": pick(rng, 1, 2, 2, 3),
        "temporal_patch_size": pick(rng, 1, 2, 2),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "out_hidden_size": sizes["hidden_size"],
        "rms_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
    }
    if family == "glm_ocr":  # heads of any width
        sizes |= {"head_dim": own["head_dim"], "hidden_size": sizes["hidden_size"] + 4}
        vision["out_hidden_size"] = sizes["hidden_size"]
    if family == "glm4v_moe":
        sizes |= grouped_experts(rng, sizes["num_hidden_layers"]) | {
            "head_dim": own["head_dim"],
            "attention_bias": pick(rng, False, True),
        }
    kind = {
        "glm4v_moe": transformers.Glm4vMoeConfig,
        "glm4v": transformers.Glm4vConfig,
        "glm46v": transformers.Glm46VConfig,
        "glmga": transformers.GlmgaConfig,
        "glm_ocr": transformers.GlmOcrConfig,
    }[family]
    return kind(
        text_config=sizes,
        vision_config=vision,
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def paddleocr_vl(rng: np.random.Generator, **tokens: int) -> transformers.PreTrainedConfig:
    """PaddleOCR-VL: positions stretched from edge to edge, and RoPE in sections in a text with heads of any width."""
    text = qwen_text(rng, interleaved=False)
    text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    text["hidden_size"] += pick(rng, 0, 4)
    text["use_bias"] = pick(rng, False, True)
    for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
        text.pop(name, None)
    heads, patch = pick(rng, 1, 2, 3), between(rng, 3, 6)
    vision = {
        "num_hidden_layers": between(rng, 1, 4),
        "hidden_size": heads * 4 * between(rng, 3, 5),
        "intermediate_size": between(rng, 20, 60),
        "num_attention_heads": heads,
        "image_size": patch * between(rng, 1, 6) + between(rng, 0, patch - 1),
        "patch_size": patch,
        "spatial_merge_size": pick(rng, 1, 2, 2, 3),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "layer_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "rope_parameters": {"rope_type": "axial", "rope_theta": pick(rng, 1e4, 100.0)},
    }
    return transformers.PaddleOCRVLConfig(
        text_config=text | {"tie_word_embeddings": False},
        vision_config=vision,
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def video_llama_3(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """VideoLLaMA 3: a SigLIP with 2D RoPE for images of any size, around any text."""
    text = any_decoder(rng, vocab)
    heads = pick(rng, 1, 2, 3)
    vision = {
        "num_hidden_layers": between(rng, 1, 4),
        "hidden_size": heads * 4 * between(rng, 3, 5),
        "intermediate_size": between(rng, 20, 60),
        "num_attention_heads": heads,
        "patch_size": between(rng, 3, 6),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "layer_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
        "rope_parameters": {"rope_type": "axial", "rope_theta": pick(rng, 1e4, 100.0)},
    }
    return transformers.VideoLlama3Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text.tie_word_embeddings,
        **tokens,
    )


def minicpm(
    rng: np.random.Generator, family: str, vocab: int = 97, **own: Any
) -> transformers.PreTrainedConfig:
    """MiniCPM-V and -OCR: a SigLIP with a merger behind one of its layers, around a Qwen3.5 or another text."""
    if family == "minicpmv4_7":
        draw = pick(rng, qwen3_5_text, qwen3_5_moe_text)
        fields = draw(rng, sections=True)
        kinds = ("linear_attention", "full_attention")
        fields["layer_types"] = [pick(rng, *kinds) for _ in range(fields["num_hidden_layers"])]
        fields["layer_types"][-1] = "full_attention"  # without it positions would not matter
        text = DECODERS[draw.__name__](**fields)
    else:
        text = (
            any_decoder(rng, vocab)
            if pick(rng, False, True)
            else decoder(rng, "qwen3_5_text", vocab)
        )
    heads, patch = pick(rng, 1, 2, 3), between(rng, 2, 5)
    layers = between(rng, 1, 6)
    vision = {
        "num_hidden_layers": layers,
        "hidden_size": heads * between(rng, 6, 12),
        "intermediate_size": between(rng, 20, 60),
        "num_attention_heads": heads,
        "image_size": patch * between(rng, 2, 9) + between(rng, 0, patch - 1),
        "patch_size": patch,
        "hidden_act": pick(rng, *ACTIVATIONS),
        "layer_norm_eps": pick(rng, 1e-6, 1e-5, 1e-3),
    }
    given = {
        "text_config": text,
        "vision_config": vision,
        "insert_layer_id": between(rng, 0, layers - 1),
        "downsample_mode": pick(rng, "16x", "16x", "16x", "4x"),
        "tie_word_embeddings": text.tie_word_embeddings,
    }
    kind = {
        "minicpmv4_6": "MiniCPMV4_6",
        "minicpmv4_7": "MiniCPMV4_7",
        "minicpm_ocr": "MiniCPMOcr",
    }[family]
    return getattr(transformers, f"{kind}Config")(**given | own)


def kimi_k25(rng: np.random.Generator, **own: int) -> transformers.PreTrainedConfig:
    """Kimi K2.5: interpolated positions and RoPE of x and y in turns, around a DeepSeek-V3."""
    heads = pick(rng, 1, 2, 3)
    width, side, merge = heads * 4 * between(rng, 3, 5), between(rng, 2, 6), pick(rng, 1, 2, 2, 3)
    vision = {
        "num_hidden_layers": between(rng, 1, 4),
        "hidden_size": width,
        "intermediate_size": between(rng, 20, 60),
        "num_attention_heads": heads,
        "patch_size": between(rng, 3, 6),
        "pos_emb_height": side,
        "pos_emb_width": side,
        "merge_kernel_size": [merge, merge],
        "hidden_act": pick(rng, *ACTIVATIONS),
        "rope_parameters": {"rope_type": "axial", "rope_theta": pick(rng, 1e4, 100.0)},
    }
    return transformers.Kimi_K25Config(
        # transformers would write a plain matrix of queries under the name of the tower's
        text_config=decoder(rng, "deepseek_v3", q_lora_rank=between(rng, 5, 20)),
        vision_config=vision,
        projection_hidden_size=width,
        projection_layer_norm_eps=pick(rng, 1e-6, 1e-5, 1e-3),
        tie_word_embeddings=pick(rng, False, True),
        **own,
    )


def muse_glimmer(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """Muse Glimmer: a tower with windows as large as its table of positions, and a Gemma 2 with gates."""
    heads, merge = pick(rng, 1, 2, 3), pick(rng, 1, 2, 2, 3)
    width, side, layers = (
        heads * 4 * between(rng, 2, 5),
        merge * between(rng, 1, 3),
        between(rng, 1, 5),
    )
    vision = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": between(rng, 20, 60),
        "num_attention_heads": heads,
        "patch_size": between(rng, 3, 6),
        "patch_temporal": pick(rng, 1, 2, 2, 3),
        "pos_emb_height": side,
        "pos_emb_width": side,
        "merge_size": merge,
        "hidden_act": pick(rng, *ACTIVATIONS),
        "rope_parameters": {"rope_type": "axial", "rope_theta": pick(rng, 1e4, 100.0)},
    }
    if rng.integers(2):
        kinds = ("window_attention", "full_attention")
        vision["layer_types"] = [pick(rng, *kinds) for _ in range(layers)]
    sizes, head_width = text_sizes(rng, vocab)
    text = sizes | rope(rng, head_width // 2)
    # as its class wants it, whatever heads are wide
    text["hidden_size"] = text["num_attention_heads"] * -(-24 // text["num_attention_heads"])
    text |= {
        "hidden_activation": pick(rng, *ACTIVATIONS),
        "attention_bias": pick(rng, False, True),
        "sliding_window": pick(rng, 3, 6),
        "final_logit_softcapping": pick(rng, 3.0, 20.0),
        "qk_scale_factor": pick(rng, 0.7, 1.5, 3.87),
        "output_multiplier": pick(rng, 0.2, 1.3),
        "post_norm_eps": pick(rng, 1e-8, 1e-6, 1e-2),
        "pad_token_id": 0,
    }
    if rng.integers(2):
        text["layer_types"] = layer_types(rng, text["num_hidden_layers"])
    if rng.integers(2):
        theta = text["rope_parameters"]["rope_theta"]
        text["layer_rope_theta"] = [pick(rng, 0, theta) for _ in range(text["num_hidden_layers"])]
    return transformers.MuseGlimmerConfig(
        text_config=text,
        vision_config=vision,
        out_hidden_size=merge**2 * width,
        projector_hidden_size=between(rng, 20, 60),
        projector_hidden_act=pick(rng, *ACTIVATIONS),
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def audio_tower(rng: np.random.Generator) -> Fields:
    """Whisper's encoder, and Qwen2-Audio's, for windows of one or two seconds."""
    heads = pick(rng, 1, 2, 3, 4)
    return {
        "d_model": 2 * heads * between(rng, -(-5 // heads), 6),  # at least 10: see `tower_sizes`
        "encoder_layers": between(rng, 1, 4),
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": between(rng, 20, 60),
        "num_mel_bins": pick(rng, 40, 80, 128),
        "max_source_positions": pick(rng, 50, 100),
        "activation_function": pick(rng, *ACTIVATIONS),
        "scale_embedding": pick(rng, False, True),
    }


def qwen2_5_omni(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """Qwen2.5-Omni's thinker: Qwen2.5-VL's tower and text, and Whisper's encoder in chunks, whose pairs may cross."""
    vl = qwen2_5_vl(rng)
    text, vision = vl.text_config.to_dict(), vl.vision_config.to_dict()
    for fields in (text, vision):
        del fields["model_type"]
    audio = audio_tower(rng) | {"n_window": between(rng, 3, 25), "output_dim": text["hidden_size"]}
    return transformers.Qwen2_5OmniThinkerConfig(
        text_config=text | {"vocab_size": vocab},
        vision_config=vision,
        audio_config=audio,
        position_id_per_seconds=pick(rng, 25, 25, 10, 13),
        seconds_per_chunk=pick(rng, 2, 2, 1),
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def qwen3_omni_moe(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """Qwen3-Omni's thinker: Qwen3-VL's tower, experts in the text, and 2D convolutions over chunks of clips."""
    text = qwen_text(rng, interleaved=True)
    text |= expert_fields(rng, "qwen3_vl_moe", text["num_hidden_layers"]) | {"vocab_size": vocab}
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=qwen3_tower(rng, text["hidden_size"]),
        audio_config=audio_tower(rng) | convolved_chunks(rng, text["hidden_size"]),
        position_id_per_seconds=pick(rng, 13, 13, 25, 6),
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def convolved_chunks(rng: np.random.Generator, outputs: int) -> Fields:
    """What the audio encoders of Qwen3-Omni and Qwen3-ASR say beside Whisper's fields."""
    half = between(rng, 49, 52)  # chunks that become 13 positions, as the class there has it
    return {
        "n_window": half,
        "n_window_infer": 2 * half * between(rng, 1, 3) + between(rng, 0, 40),
        "conv_chunksize": between(rng, 1, 4),
        "downsample_hidden_size": between(rng, 5, 12),
        "output_dim": outputs,
    }


def qwen3_asr(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """Qwen3-ASR: 2D convolutions over chunks of clips, and a text of any family."""
    text = any_decoder(rng, vocab)
    audio = audio_tower(rng) | convolved_chunks(rng, text.hidden_size)
    del audio["max_source_positions"], audio["conv_chunksize"]
    return transformers.Qwen3ASRConfig(
        text_config=text.to_dict(),
        audio_config=audio | {"max_position_embeddings": between(rng, 13, 20)},
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def voxtral(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """Voxtral: Whisper's encoder in windows of one or two seconds, and a text of any family."""
    positions, merge = pick(rng, (50, 1), (50, 2), (50, 5), (100, 2), (100, 4), (100, 4))
    audio = audio_tower(rng)
    audio |= {"max_source_positions": positions, "encoder_ffn_dim": merge * audio["d_model"]}
    return transformers.VoxtralConfig(
        text_config=any_decoder(rng, vocab).to_dict(),
        audio_config=audio,
        projector_hidden_act=pick(rng, *ACTIVATIONS),
        **tokens,
    )


def glmasr(
    rng: np.random.Generator, vocab: int = 97, **tokens: int
) -> transformers.PreTrainedConfig:
    """GLM-ASR: an encoder whose RoPE turns a part of each head, and a text of any family."""
    heads = pick(rng, 1, 2, 3)
    share, head_width = pick(rng, (0.5, 8), (0.5, 12), (0.25, 16), (1.0, 10), (0.5, 13))
    width = heads * head_width
    audio = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": between(rng, 1, 4),
        "num_attention_heads": heads,
        "num_mel_bins": pick(rng, 40, 80, 128),
        "hidden_act": pick(rng, *ACTIVATIONS),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": pick(rng, 100.0, 1e4),
            "partial_rotary_factor": share,
        },
    }
    return transformers.GlmAsrConfig(
        text_config=any_decoder(rng, vocab).to_dict(),
        audio_config=audio,
        projector_hidden_act=pick(rng, *ACTIVATIONS),
        tie_word_embeddings=pick(rng, False, True),
        **tokens,
    )


def unet(rng: np.random.Generator) -> Fields:
    """A UNet of Stable Diffusion, on images of any size that its levels can halve."""
    levels = pick(rng, 1, 2, 2, 3)
    groups = 2 * between(rng, 1, 2)
    heads = [pick(rng, 1, 2, 3) for _ in range(levels)]
    widths = [groups * h * pick(rng, 2, 3, 4) for h in heads]
    attending = [bool(rng.integers(2)) for _ in range(levels)]
    if one := bool(rng.integers(2)):
        heads, widths = [2] * levels, [2 * groups * pick(rng, 2, 3) for _ in range(levels)]
    height, width = (2 ** (levels - 1) * between(rng, 1, 3) for _ in range(2))
    channels = between(rng, 1, 4)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "sample_size": [height, width],
        "block_out_channels": widths,
        "down_block_types": [
            "CrossAttnDownBlock2D" if attends else "DownBlock2D" for attends in attending
        ],
        "up_block_types": [
            "CrossAttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(attending)
        ],
        "layers_per_block": pick(rng, 1, 1, 2),
        "norm_num_groups": groups,
        "cross_attention_dim": between(rng, 3, 20),
        "attention_head_dim": heads[0] if one else heads,
        "use_linear_projection": pick(rng, False, True),
    }


def vae(rng: np.random.Generator) -> Fields:
    """Fields of diffusers' AutoencoderKL: Stable Diffusion's, and those of SD3 and Flux without products."""
    groups = pick(rng, 1, 2, 4)
    levels = between(rng, 1, 4)
    return {
        "block_out_channels": [groups * between(rng, 1, 6) for _ in range(levels)],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": between(rng, 1, 3),
        "latent_channels": pick(rng, 1, 4, 16),
        "in_channels": (channels := pick(rng, 1, 3, 3)),
        "out_channels": channels,
        "norm_num_groups": groups,
        "act_fn": pick(rng, "silu", "swish"),
        "scaling_factor": pick(rng, 0.18215, 1.5305),
        "shift_factor": pick(rng, None, 0.0609),
        "use_quant_conv": pick(rng, False, True),
        "use_post_quant_conv": pick(rng, False, True),
        "mid_block_add_attention": pick(rng, False, True, True),
    }


def pixart(rng: np.random.Generator) -> Fields:
    """PixArt's transformer, of images around a square of any size."""
    heads, quarters = between(rng, 1, 3), between(rng, 1, 3)
    micro_conditions = pick(rng, False, True)
    head_width = 4 * quarters * (3 if micro_conditions and heads * quarters % 3 else 1)
    width, patch, channels = heads * head_width, between(rng, 1, 3), between(rng, 1, 4)
    captions = pick(rng, None, between(rng, 3, 20))
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head_width,
        "in_channels": channels,
        "out_channels": pick(rng, channels, 2 * channels),
        "num_layers": between(rng, 1, 3),
        "cross_attention_dim": width if captions else between(rng, 3, 20),
        "caption_channels": captions,
        "attention_bias": pick(rng, False, True),
        "sample_size": patch * between(rng, 2, 9),
        "patch_size": patch,
        "activation_fn": pick(rng, "gelu", "gelu-approximate"),
        "norm_eps": pick(rng, 1e-6, 1e-3),
        "interpolation_scale": pick(rng, None, 2, 1.5),
        "use_additional_conditions": micro_conditions,
    }
