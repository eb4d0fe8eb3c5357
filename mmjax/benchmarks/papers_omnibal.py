"""OmniBal's partitions of models, as they stand in its tables, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mmjax.benchmarks.baselines.partition import BASELINES
from mmjax.benchmarks.papers_row import Row, read_table
from mmjax.config import ConnectorConfig, DecoderConfig, ModelConfig, VisionConfig
from mmjax.cost.table import module_parameters
from mmjax.planning.flops import model_flops
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.partition import Chain, fastest_partition, iteration_seconds, partition
from mmjax.planning.work import Work

# Where the paper gives no figure.
# of the LLM's FLOP/s: a layer of InternViT-6B then takes 1.03 times one of InternLM2-20B
ENCODER_RATE = 0.68
NETWORK = 12.5e9  # bytes per second of one GPU: 4 x 200 Gbit/s for 8 (OmniBal appendix A.9)
OMNIBAL_MICROBATCHES = 56  # InternVL-Chat-1.5's batch of 1,024 over DP 4, with 4.6 samples in each
TABLE_6 = "OmniBal table 6"
MIB = 2**20


class OmniBalRow(NamedTuple):
    """A row of table 1 of OmniBal's appendix."""

    vision: VisionConfig
    llm: DecoderConfig
    tensor: int
    layers: tuple[int, ...]  # of each stage
    contradiction: str = ""


# Layers, width, heads, width of the MLP. InternVL-Chat-1.5 uses 45 of the 48 layers of its encoder.
ENCODERS = """
InternViT-6B  45 3200 25 12800
EVA-CLIP-1B   40 1408 16  6144
EVA-CLIP-4B   54 1792 16 15360
EVA-CLIP-8B   32 4096 32 20480
EVA-CLIP-18B  48 5120 40 25600
"""
# Layers, width, heads, key and value heads of 128 channels, width of the MLP.
LLMS = """
Llama3-8B      32 4096 32 8 14336
InternLM2-20B  48 6144 48 8 16384
Yi-34B         60 7168 56 8 20480
Llama3-70B     80 8192 64 8 28672
Qwen1.5-110B   80 8192 64 8 49152
"""
# Encoder, LLM, tensor parallelism, and the layers of each stage.
PARTITIONS = """
InternViT-6B Llama3-8B      1  16 17 20 24
InternViT-6B InternLM2-20B  2  22 23 24 24
InternViT-6B Yi-34B         4  28 29 24 24
InternViT-6B Llama3-70B     4  22 23 13 14 14 14 13 12
InternViT-6B Qwen1.5-110B   8  21 22 13 13 14 14 14 14
EVA-CLIP-1B  InternLM2-20B  2  43 16 15 14
EVA-CLIP-4B  InternLM2-20B  2  39 22 21 20
EVA-CLIP-8B  InternLM2-20B  2  17 18 23 22
EVA-CLIP-18B InternLM2-20B  4  18 19 25 34
"""
CONTRADICTIONS = {
    "EVA-CLIP-4B": "102 layers in all leave 54 for the encoder, and EVA-02-CLIP-E has 64"
}


def _models() -> dict[str, OmniBalRow]:
    connector = ConnectorConfig(merge=2, mlp_width=0)
    encoders = {
        name: VisionConfig(*map(int, sizes), patch=14, connector=connector)
        for name, *sizes in read_table(ENCODERS)
    }
    llms = {}
    for name, *sizes, mlp_width in read_table(LLMS):
        # A vocabulary of one token: the layers alone count.
        llms[name] = DecoderConfig(*map(int, sizes), 128, mlp_width=int(mlp_width), vocab=1)
    models = {}
    for encoder, llm, tensor, *layers in read_table(PARTITIONS):
        models[f"{encoder}, {llm}"] = OmniBalRow(
            vision=encoders[encoder],
            llm=llms[llm],
            tensor=int(tensor),
            layers=tuple(map(int, layers)),
            contradiction=CONTRADICTIONS.get(encoder, ""),
        )
    return models


OMNIBAL_MODELS = _models()
MAIN_MODEL = OMNIBAL_MODELS["InternViT-6B, InternLM2-20B"]
# of a microbatch (section 5.1: 9K patches, 4K tokens)
OMNIBAL_TILES, OMNIBAL_TILE, OMNIBAL_TOKENS = 9, 1025, 4096

# OmniBal table 6: partitions of 6+20B, SUM(comm) in MB beside the first row's, GPU days; its own is
# the last.
OMNIBAL_PARTITIONS = {
    "parameters": (0.0, 42.2),
    "layers": (8.2, 30.6),
    "profile": (16.6, 30.9),
    "BMP": (-21.0, 29.0),
}


def omnibal_chain(row: OmniBalRow, encoder_rate: float = ENCODER_RATE) -> Chain:
    """Time the layers of a model by their FLOPs; all are trained, so backward passes take twice as long."""
    vision = row.vision
    llm = row.llm
    patches = OMNIBAL_TILES * OMNIBAL_TILE
    tokens = patches // vision.merged_positions
    work = {
        "vision": Work(patches, patches * OMNIBAL_TILE, patches, tokens),
        "llm": Work(OMNIBAL_TOKENS, OMNIBAL_TOKENS**2 / 2),
    }
    model = ModelConfig(llm, encoders={"vision": vision})
    flops = model_flops(model, work, frozenset())
    modules = module_parameters(model)
    rate = row.tensor * parse_cluster("a100").device.rates("bfloat16").flops
    counts = vision.layers, llm.layers

    def by_layer(vision_layer: float, llm_layer: float) -> np.ndarray:
        return np.repeat([vision_layer, llm_layer], counts)

    forward = by_layer(
        flops["vision"].forward / vision.layers / (encoder_rate * rate),
        flops["llm"].forward / llm.layers / rate,
    )
    sizes = by_layer(2 * patches * vision.width, 2 * OMNIBAL_TOKENS * llm.width)
    sizes[vision.layers] = 2 * tokens * llm.width  # behind the connector, which merges four patches
    return Chain(
        parameters=by_layer(
            modules["vision"].layers / vision.layers, modules["llm"].layers / llm.layers
        ),
        forward=forward,
        backward=2 * forward,
        cut_bytes=np.append(sizes, 0),
        towers=(0, vision.layers),
        microbatches=OMNIBAL_MICROBATCHES,
        bandwidth=NETWORK,
    )


def stage_sizes(chain: Chain, cuts: Sequence[int]) -> list[int]:
    """Return the layers of each stage."""
    return np.diff([0, *cuts, len(chain.forward)]).tolist()


def omnibal_partition(row: OmniBalRow) -> list[int]:
    """Return the layers of each stage of our partition."""
    chain = omnibal_chain(row)
    return stage_sizes(chain, fastest_partition(chain, len(row.layers)))


def omnibal_model_rows() -> list[Row]:
    """Compare our partition of nine models with the paper's and with the baselines."""
    rows = []
    for name, row in OMNIBAL_MODELS.items():
        chain = omnibal_chain(row)
        cuts = fastest_partition(chain, len(row.layers))
        baselines = {"paper": tuple(accumulate(row.layers))[:-1]}
        baselines |= {
            label: baseline(chain, len(row.layers)) for label, baseline in BASELINES.items()
        }
        seconds = iteration_seconds(chain, cuts)
        rows.append(
            Row(
                source="OmniBal appendix table 1",
                case=f"{name}: partition",
                ours={
                    label: iteration_seconds(chain, by_label) / seconds
                    for label, by_label in baselines.items()
                },
                contradiction=row.contradiction,
                note=f"paper {list(row.layers)}, ours {stage_sizes(chain, cuts)}",
            )
        )
    return rows


def omnibal_partition_rows(encoder_rate: float = ENCODER_RATE) -> list[Row]:
    """Predict table 6: GPU days of three partitions over the paper's own, and what each sends beside the first."""
    chain = omnibal_chain(MAIN_MODEL, encoder_rate)
    stages = len(MAIN_MODEL.layers)
    kinds = {kind: BASELINES[kind](chain, stages) for kind in ("parameters", "layers", "profile")}
    kinds["BMP"] = tuple(accumulate(MAIN_MODEL.layers))[:-1]
    seconds = {kind: iteration_seconds(chain, cuts) for kind, cuts in kinds.items()}
    sent = {kind: float(chain.cut_bytes[list(cuts)].sum()) / MIB for kind, cuts in kinds.items()}
    fastest = iteration_seconds(chain, fastest_partition(chain, stages))
    rows = []
    for kind, (comm, days) in OMNIBAL_PARTITIONS.items():
        layers = f"{kind} {stage_sizes(chain, kinds[kind])}"
        if kind != "BMP":
            reported = days / OMNIBAL_PARTITIONS["BMP"][1]
            predicted = seconds[kind] / seconds["BMP"]
            ours = {kind: seconds[kind] / fastest}
            rows.append(
                Row(TABLE_6, f"{layers}: GPU days over BMP's", reported, predicted, ours=ours)
            )
        if kind != "parameters":
            change = sent[kind] - sent["parameters"]
            # -21.0 MB is the connector's cut for one of the LLM's, without the encoder's in [22,
            # 23, 24, 24].
            contradiction = f"cuts the encoder once: {change:.1f}" if kind == "BMP" else ""
            case = f"{layers}: MB sent, over parameters'"
            rows.append(Row(TABLE_6, case, comm, change, neutral=0.0, contradiction=contradiction))
    return rows


def omnibal_exact() -> bool:
    """Return whether layer times in the ratio 1.00 to 1.05 give the partition [22, 23, 24, 24]."""
    chain = omnibal_chain(MAIN_MODEL)
    encoder = np.arange(len(chain.forward)) < chain.towers[1]
    ratios = np.linspace(1.0, 1.05, 6)
    partitions = [partition(np.where(encoder, ratio, 1.0), 4, chain.cut_bytes) for ratio in ratios]
    return all(stage_sizes(chain, cuts) == [22, 23, 24, 24] for cuts in partitions)
