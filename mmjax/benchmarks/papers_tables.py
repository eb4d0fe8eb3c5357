"""Tables of the papers that pipelines are compared with, as they stand there."""

from __future__ import annotations

from typing import NamedTuple

from mmjax.config import ConnectorConfig, DecoderConfig, VisionConfig


class FrozenRow(NamedTuple):
    """A row of Cornstarch's tables 3, 10 and 11 with its stages from table 9: milliseconds of one stage."""

    llm_stages: int
    encoder_stages: int
    encoder_forward: float
    llm_forward: float
    encoder_backward: float
    llm_backward: float
    throughput: float


# Cornstarch table 1: layers.
LLM_LAYERS = {"S": 16, "M": 32, "L": 64}
ENCODER_LAYERS = {"VLM-S": 40, "VLM-M": 32, "VLM-L": 48, "ALM-S": 32, "ALM-M": 40, "ALM-L": 48}
CORNSTARCH_MICROBATCHES = 24
# LLM: Llama S, M, L; model: with a vision (VLM) or audio (ALM) encoder S, M, L. First the frozen-aware partition.
CORNSTARCH_FROZEN: dict[tuple[str, str], tuple[FrozenRow, FrozenRow]] = {
    key: (FrozenRow._make(aware), FrozenRow._make(unaware))
    for key, aware, unaware in (
        (("M", "VLM-S"), (6, 1, 49.06, 27.46, 0.12, 43.03, 6.47), (3, 1, 26.49, 28.13, 0.16, 51.32, 5.30)),
        (("M", "VLM-M"), (5, 2, 75.04, 28.15, 0.27, 51.30, 5.15), (4, 3, 45.90, 45.26, 0.16, 84.89, 3.73)),
        (("M", "VLM-L"), (5, 4, 101.02, 34.67, 0.20, 63.77, 3.17), (3, 5, 70.42, 67.03, 0.15, 127.34, 2.06)),
        (("M", "ALM-S"), (6, 1, 57.25, 81.73, 0.38, 157.12, 1.94), (5, 1, 57.79, 81.94, 0.38, 157.14, 1.94)),
        (("M", "ALM-M"), (6, 1, 176.80, 82.19, 0.64, 157.51, 1.96), (4, 4, 93.39, 98.25, 0.34, 189.11, 1.70)),
        (("M", "ALM-L"), (4, 2, 308.16, 100.20, 0.73, 188.50, 1.98), (5, 5, 145.97, 121.21, 0.33, 235.23, 1.69)),
        (("L", "VLM-S"), (5, 1, 52.54, 88.58, 0.10, 171.72, 2.39), (3, 5, 85.83, 106.26, 0.10, 171.38, 2.10)),
        (("L", "VLM-M"), (5, 1, 249.38, 88.95, 0.49, 171.68, 2.29), (5, 1, 132.16, 113.64, 0.26, 213.58, 1.85)),
        (("L", "VLM-L"), (4, 1, 481.44, 106.53, 0.74, 215.06, 1.76), (4, 2, 246.22, 146.62, 0.38, 287.14, 1.81)),
        (("L", "ALM-S"), (5, 1, 76.84, 286.16, 0.24, 596.40, 0.72), (5, 1, 78.80, 285.07, 0.24, 594.31, 0.73)),
        (("L", "ALM-M"), (5, 1, 197.21, 287.37, 0.45, 597.47, 0.72), (3, 1, 101.97, 359.27, 0.24, 743.91, 0.62)),
        (("L", "ALM-L"), (5, 1, 319.31, 286.31, 0.50, 596.50, 0.71), (4, 2, 177.29, 356.06, 0.27, 742.80, 0.61)),
        (("S", "VLM-S"), (4, 2, 25.57, 15.51, 0.05, 15.09, 12.64), (4, 4, 32.80, 18.80, 0.06, 20.09, 13.79)),
        (("S", "VLM-M"), (2, 4, 75.67, 17.31, 0.15, 20.08, 7.85), (1, 4, 45.25, 17.61, 0.09, 20.33, 7.63)),
        (("S", "VLM-L"), (1, 4, 98.27, 26.22, 0.11, 30.50, 4.81), (1, 5, 122.50, 47.39, 0.13, 60.31, 6.05)),
        (("S", "ALM-S"), (5, 1, 57.52, 42.73, 0.20, 70.21, 7.13), (3, 2, 30.14, 42.30, 0.10, 70.22, 5.34)),
        (("S", "ALM-M"), (4, 2, 92.19, 32.54, 0.17, 52.63, 4.85), (2, 3, 59.18, 72.90, 0.12, 105.22, 4.09)),
        (("S", "ALM-L"), (4, 3, 97.77, 33.27, 0.12, 52.88, 4.29), (2, 4, 76.81, 62.01, 0.09, 105.22, 3.59)),
    )
}

# Cornstarch tables 2, 7, 8: vision and audio encoder; stages of the LLM and of both encoders colocated, throughput of a
# GPU; stages of the LLM, vision and audio side by side, throughput of a GPU.
CORNSTARCH_MODALITIES: dict[str, tuple[tuple[str, tuple[int, int], float, tuple[int, int, int], float], ...]] = {
    "M": (
        ("SS", (6, 1), 3.09, (6, 1, 1), 2.68),
        ("SM", (6, 2), 2.64, (6, 1, 1), 2.73),
        ("SL", (6, 2), 2.57, (6, 1, 2), 2.25),
        ("MS", (6, 2), 2.57, (6, 2, 1), 2.29),
        ("MM", (6, 3), 2.21, (6, 1, 1), 2.22),
        ("ML", (6, 4), 1.91, (6, 2, 2), 2.05),
        ("LS", (6, 4), 1.95, (6, 3, 1), 1.92),
        ("LM", (6, 4), 1.88, (6, 3, 1), 1.97),
        ("LL", (6, 5), 1.74, (6, 3, 2), 1.82),
    ),
    "S": (
        ("SS", (3, 4), 6.31, (3, 1, 1), 8.82),
        ("SM", (1, 3), 5.20, (3, 1, 4), 4.99),
        ("SL", (1, 4), 4.31, (3, 1, 5), 4.61),
        ("MS", (2, 4), 5.18, (3, 3, 1), 5.24),
        ("MM", (1, 4), 3.93, (3, 2, 3), 4.66),
        ("ML", (1, 5), 3.40, (3, 2, 4), 3.78),
        ("LS", (1, 4), 3.82, (3, 5, 1), 3.96),
        ("LM", (1, 6), 2.96, (2, 4, 3), 3.42),
        ("LL", (1, 6), 2.76, (2, 3, 3), 3.25),
    ),
    "L": (
        ("SS", (5, 1), 1.57, (5, 1, 1), 1.33),
        ("SM", (5, 2), 1.37, (5, 1, 1), 1.36),
        ("SL", (5, 2), 1.33, (5, 1, 1), 1.37),
        ("MS", (4, 1), 1.57, (5, 1, 1), 1.37),
        ("MM", (4, 2), 1.32, (5, 1, 1), 1.37),
        ("ML", (6, 1), 1.04, (5, 1, 1), 0.93),
        ("LS", (4, 2), 1.31, (5, 1, 1), 1.36),
        ("LM", (4, 3), 1.10, (5, 1, 1), 1.33),
        ("LL", (4, 3), 1.09, (5, 1, 1), 1.36),
    ),
}

# Cornstarch figure 3b, CLIP and Mistral-7B on one A40 with checkpointing: forward and backward milliseconds.
CORNSTARCH_BACKWARD = {
    "encoder, frozen": (67.89, 0.01),
    "LLM, frozen behind a trained projector": (397.11, 530.67),
    "encoder, trained": (67.94, 205.09),
    "LLM, trained": (400.87, 1184.65),
}
MISTRAL_7B = DecoderConfig(
    layers=32, width=4096, heads=32, kv_heads=8, head_width=128, mlp_width=14_336, vocab=32_000, remat="full"
)
CLIP_L = VisionConfig(layers=24, width=1024, heads=16, mlp_width=4096, patch=14, remat="full")


def _vit(layers: int, width: int, heads: int, mlp_width: int) -> VisionConfig:
    connector = ConnectorConfig(merge=2, mlp_width=0)
    return VisionConfig(layers=layers, width=width, heads=heads, mlp_width=mlp_width, patch=14, connector=connector)


def _llm(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int) -> DecoderConfig:
    # A vocabulary of one token: the layers alone count.
    sizes = {"layers": layers, "width": width, "heads": heads, "mlp_width": mlp_width}
    return DecoderConfig(**sizes, kv_heads=kv_heads, head_width=128, vocab=1)


INTERNVIT_6B = _vit(45, 3200, 25, 12_800)  # InternVL-Chat-1.5 uses 45 of its 48 layers
INTERNLM2_20B = _llm(48, 6144, 48, 8, 16_384)


class OmniBalRow(NamedTuple):
    """A row of table 1 of OmniBal's appendix."""

    vision: VisionConfig
    llm: DecoderConfig
    tensor: int
    layers: tuple[int, ...]  # of each stage
    contradiction: str = ""


OMNIBAL_MODELS = {
    "InternViT-6B, Llama3-8B": OmniBalRow(INTERNVIT_6B, _llm(32, 4096, 32, 8, 14_336), 1, (16, 17, 20, 24)),
    "InternViT-6B, InternLM2-20B": OmniBalRow(INTERNVIT_6B, INTERNLM2_20B, 2, (22, 23, 24, 24)),
    "InternViT-6B, Yi-34B": OmniBalRow(INTERNVIT_6B, _llm(60, 7168, 56, 8, 20_480), 4, (28, 29, 24, 24)),
    "InternViT-6B, Llama3-70B": OmniBalRow(
        INTERNVIT_6B, _llm(80, 8192, 64, 8, 28_672), 4, (22, 23, 13, 14, 14, 14, 13, 12)
    ),
    "InternViT-6B, Qwen1.5-110B": OmniBalRow(
        INTERNVIT_6B, _llm(80, 8192, 64, 8, 49_152), 8, (21, 22, 13, 13, 14, 14, 14, 14)
    ),
    "EVA-CLIP-1B, InternLM2-20B": OmniBalRow(_vit(40, 1408, 16, 6144), INTERNLM2_20B, 2, (43, 16, 15, 14)),
    "EVA-CLIP-4B, InternLM2-20B": OmniBalRow(
        _vit(54, 1792, 16, 15_360),
        INTERNLM2_20B,
        2,
        (39, 22, 21, 20),
        contradiction="102 layers in all leave 54 for the encoder, and EVA-02-CLIP-E has 64",
    ),
    "EVA-CLIP-8B, InternLM2-20B": OmniBalRow(_vit(32, 4096, 32, 20_480), INTERNLM2_20B, 2, (17, 18, 23, 22)),
    "EVA-CLIP-18B, InternLM2-20B": OmniBalRow(_vit(48, 5120, 40, 25_600), INTERNLM2_20B, 4, (18, 19, 25, 34)),
}
OMNIBAL_TILES, OMNIBAL_TILE, OMNIBAL_TOKENS = 9, 1025, 4096  # of a microbatch (section 5.1: 9K patches, 4K tokens)

# OmniBal table 6: partitions of 6+20B, SUM(comm) in MB beside the first row's, GPU days; its own is the last.
OMNIBAL_PARTITIONS = {"parameters": (0.0, 42.2), "layers": (8.2, 30.6), "profile": (16.6, 30.9), "BMP": (-21.0, 29.0)}
