"""Needed FLOPs are an exact count, executed FLOPs are XLA's, and both are held against the real models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import model_outputs

from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import (
    AudioConfig,
    ConformerConfig,
    ConnectorConfig,
    ConvolutionConfig,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FractionalGrid,
    LatentAttentionConfig,
    LogMel,
    LoraConfig,
    ModelConfig,
    Remat,
    StoredTable,
    TokenInputsConfig,
    VisionConfig,
)
from mmjax.config.model import frozen_modules
from mmjax.cost.table import active_parameters, parameters
from mmjax.data.media.patches import to_patches
from mmjax.kernels.tiles import MAX_BLOCK
from mmjax.losses.cross_entropy import losses_in_chunks, mean_loss_in_chunks
from mmjax.models.model import Model, merge, partition
from mmjax.planning import work
from mmjax.planning.flops import executed, model_flops, step_needed
from mmjax.planning.prices import relative_cost
from mmjax.planning.work import useful_work

LATENT = {
    "latent": LatentAttentionConfig(key_rank=7, value_width=5, query_rank=9),
    "kv_heads": 4,
    "rotary_width": 2,
}
GLM = ConnectorConfig(
    mlp_width=20,
    norm="none",
    biases=(),
    merger_width=12,
    merger_bias=True,
    projection=True,
    gated=True,
)
MODULES = ("llm", "vision", "vision.connector", "audio", "audio.connector")
FROZEN = [
    frozenset(),
    frozenset({"vision", "audio"}),
    frozenset({"llm"}),
    frozenset({"llm", "vision", "audio"}),
    frozenset({"vision.connector", "audio"}),
    frozenset({"vision", "vision.connector", "audio"}),
    frozenset(MODULES) - {"audio.connector"},
]


def make_model(scale: int = 1, layers: int = 2, encoder_layers: int = 1, **llm) -> ModelConfig:
    """A model of every part whose widths all differ, so that none can stand in for another."""
    connector = ConnectorConfig(merge=2, mlp_width=20 * scale, position_grid=8)
    width = 24 * scale
    vision = VisionConfig(
        encoder_layers, width, 2, 40 * scale, patch=2, channels=3, connector=connector
    )
    audio = AudioConfig(
        encoder_layers, width, 3, 36 * scale, LogMel(mels=5), connector=replace(connector, merge=3)
    )
    decoder = DecoderConfig(layers, 32 * scale, 4, 2, 6 * scale, 44 * scale, vocab=29)
    return ModelConfig(replace(decoder, **llm), {"vision": vision, "audio": audio})


def pooled(model: ModelConfig) -> ModelConfig:
    """Its clips as Qwen2-Audio has them: stored positions, pooled before the last norm, one matrix to the LLM."""
    connector = ConnectorConfig(merge=1, mlp_width=0, norm="none", biases=("down",))
    audio = replace(model.encoders["audio"], positions=StoredTable(9), pool=2, connector=connector)
    return replace(model, encoders=model.encoders | {"audio": audio})


def in_chunks(model: ModelConfig, mels: int = 5, width: int = 7) -> ModelConfig:
    """Its clips as Qwen3-Omni has them: three 2D convolutions over chunks, and keys with a bias."""
    clips = {
        "clips": LogMel(mels=mels),
        "chunk": 20,
        "attended_chunks": 2,
        "stem_width": width,
        "key_bias": True,
    }
    return replace(
        model, encoders=model.encoders | {"audio": replace(model.encoders["audio"], **clips)}
    )


def without_norms(model: ModelConfig) -> ModelConfig:
    """Its connectors take what encoders give as it is."""
    encoders = {
        name: replace(e, connector=replace(e.connector, norm="none"))
        for name, e in model.encoders.items()
    }
    return replace(model, encoders=encoders)


def make_text(sample: np.ndarray, span: np.ndarray | None = None) -> TextBatch:
    """Text of the given samples that sees everything before it, and both ways inside spans."""
    zero, one = np.zeros_like(sample), np.ones_like(sample)
    span = zero if span is None else span
    pos = zero + np.arange(sample.shape[1], dtype=np.int32)
    weight = np.ones(sample.shape, np.float32)
    return TextBatch(zero, zero, weight, pos, sample, pos, span, one, one, zero, zero, pos, {}, {})


def make_items(encoder: VisionConfig | AudioConfig, item: np.ndarray) -> ItemBatch:
    features = (
        encoder.patch**2 * encoder.channels if isinstance(encoder, VisionConfig) else encoder.mels
    )
    values, coordinates = (
        np.zeros((*item.shape, features), np.float32),
        np.zeros((*item.shape, 3), np.int32),
    )
    return ItemBatch(values, item, coordinates, np.zeros_like(item), np.zeros_like(item))


def make_batch(model: ModelConfig, shape: dict[str, tuple[int, int]]) -> Microbatch:
    """Rows without padding in which everything sees everything: one sample, one span, one item."""
    sample = np.zeros(shape["llm"], np.int32)
    text = make_text(sample, sample + 1)
    items = {
        e: make_items(c, np.zeros(shape[e], np.int32))
        for e, c in model.encoders.items()
        if e in shape
    }
    send = dict.fromkeys(items, np.zeros((1, 1, 0), np.int32))
    return Microbatch(text._replace(slots=dict.fromkeys(items, sample), send=send), items)


def random_microbatch(model: ModelConfig, rng: np.random.Generator) -> Microbatch:
    def ids(rows: int, length: int, group: int) -> np.ndarray:
        """Ascending ids with padding after each, every one from a multiple of `group` on."""
        out = np.full((rows, length), -1, np.int32)
        for row in range(rows):
            at = number = 0
            while at < length:
                end = min(length, at + int(rng.integers(1, 3 * group + 6)))
                out[row, at:end] = number
                at, number = (
                    at + -(-(end - at) // group) * group + group * int(rng.integers(0, 2)),
                    number + 1,
                )
        return out

    sample = ids(2, 17, 1)
    span = rng.integers(0, 3, sample.shape).astype(np.int32)
    items = {"vision": ids(2, 24, 4), "audio": ids(3, 36, 6)}
    return Microbatch(
        make_text(sample, span), {e: make_items(model.encoders[e], x) for e, x in items.items()}
    )


def walk(owner: np.ndarray, span: np.ndarray | None = None) -> int:
    """Pairs of positions of one owner, -1 = padding: those of a row's item, or where there are spans those of text."""
    pairs = 0
    for row, positions in enumerate(owner):
        for q, k in itertools.product(range(len(positions)), repeat=2):
            near = span is None or k <= q or span[row, q] == span[row, k] != 0
            pairs += near and positions[q] == positions[k] >= 0
    return pairs


def traced_products(jaxpr) -> int:
    """Multiply-adds of all matrix products in a jaxpr without products in loops."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        inside = (getattr(inner, "jaxpr", inner) for inner in equation.params.values())
        products = sum(traced_products(inner) for inner in inside if hasattr(inner, "eqns"))
        assert not products or equation.primitive.name not in ("scan", "while"), (
            "they would be counted once"
        )
        total += products
    return total


def gradient(
    model: ModelConfig, frozen: frozenset[str], loss_chunks: int = 1, of_tokens: bool = False
):
    """(the gradient function of the trainable parameters, its abstract parameters), every layer a run of its own."""
    towers = {"llm": model.llm, **model.encoders}
    built = Model.build(
        model, jnp.float32, {name: tuple(range(1, c.layers)) for name, c in towers.items()}
    )
    trainable, rest = partition(built.abstract, set(frozen))

    def loss(trainable, rest, batch):
        hidden, table, *_ = model_outputs(built, merge(rest, trainable), batch)
        if of_tokens:
            one = jnp.ones(())
            return mean_loss_in_chunks(hidden, table, batch.text, one, loss_chunks)[0]
        return losses_in_chunks(hidden, table, batch.text, loss_chunks).sum()

    return jax.grad(loss), (trainable, rest)


@pytest.mark.parametrize("seed", range(3))
def test_useful_work_is_a_walk_over_all_positions_and_pairs_that_are_no_padding(seed: int) -> None:
    model = make_model()
    batch = random_microbatch(model, np.random.default_rng(seed))
    patches, frames = (batch.items[name].item for name in ("vision", "audio"))
    heard = frames[:, ::2]

    def groups(item: np.ndarray, size: int) -> int:
        return int((item.reshape(len(item), -1, size) >= 0).any(-1).sum())

    text, seen, read, layers = (
        int((x >= 0).sum()) for x in (batch.text.sample, patches, frames, heard)
    )
    assert useful_work(model, batch.text, batch.items) == {
        "llm": work.Work(text, walk(batch.text.sample, batch.text.span)),
        "vision": work.Work(seen, walk(patches), seen, groups(patches, 4)),
        "audio": work.Work(layers, walk(heard), read, groups(heard, 3)),
    }


def untied(model: ModelConfig) -> ModelConfig:
    """Its logits have a table of their own."""
    return replace(model, llm=replace(model.llm, tied=False))


def parallel(model: ModelConfig) -> ModelConfig:
    """Its LLM's MLPs read what attention reads, and its last layer has no RoPE."""
    llm = model.llm
    return replace(model, llm=replace(llm, parallel_mlp=True, unrotated=(llm.layers - 1,)))


def sharing(model: ModelConfig) -> ModelConfig:
    """Its LLM's last layers share keys, those without windows have wider heads, and all take vectors of tokens."""
    llm = replace(model.llm, layers=6, window=5, windowed=(0, 2, 4), window_rope_theta=100.0)
    own = {"full_head_width": 14, "full_kv_heads": 1, "keys_as_values": True, "value_norm": True}
    own |= {"shared_layers": 3, "shared_mlp_width": 50, "output_scales": True}
    return replace(
        model, llm=replace(llm, **own, token_inputs=TokenInputsConfig(7, 29), qk_norm="head")
    )


def normed_outputs(model: ModelConfig) -> ModelConfig:
    """Its LLM norms outputs, its attention has a gate; two heads of its tower share keys, and tokens have a matrix."""
    vision = replace(model.encoders["vision"], heads=4, width=32, kv_heads=2)
    ending = {"output_width": 20, "output_activation": True}
    vision = replace(vision, connector=replace(vision.connector, **ending))
    gated = {"attention_gate": True, "separate_gate": True}
    llm = replace(model.llm, pre_norms=False, post_norms=True, **gated)
    return replace(model, llm=llm, encoders=model.encoders | {"vision": vision})


def convolved(model: ModelConfig) -> ModelConfig:
    """Its LLM has a convolution in place of attention in its last layer, and sinks in the others."""
    convolution = ConvolutionConfig((model.llm.layers - 1,))
    return replace(model, llm=replace(model.llm, sinks=True, convolution=convolution))


def features(model: ModelConfig) -> ModelConfig:
    """Its connector of images reads two of three layers."""
    read = {"layers": 3, "feature_layers": (2, 0), "head_norm": False}
    vision = replace(model.encoders["vision"], **read)
    return replace(model, encoders=model.encoders | {"vision": vision})


def merging(model: ModelConfig) -> ModelConfig:
    """Its vision encoder merges patches behind two of its four layers."""
    changes = {"layers": 4, "merge_after": 2, "positions": FractionalGrid(3)}
    vision = replace(model.encoders["vision"], **changes)
    vision = replace(vision, connector=replace(vision.connector, merge=1))
    return replace(model, encoders=model.encoders | {"vision": vision})


KINDS = {
    "merged": lambda model: model,
    "pooled": pooled,
    "no norms": without_norms,
    "untied": untied,
    "parallel": parallel,
    "normed outputs": normed_outputs,
    "features": features,
    "merger inside": merging,
    "sharing": sharing,
    "convolved": convolved,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda f: "+".join(sorted(f)) or "nothing")
def test_needed_is_every_matrix_product_of_the_traced_gradient_where_nothing_is_padded(
    frozen: frozenset[str], kind: Callable[[ModelConfig], ModelConfig]
) -> None:
    model = kind(make_model())
    batch = make_batch(model, {"llm": (2, 12), "vision": (1, 8), "audio": (2, 12)})
    function, params = gradient(model, frozen)
    assert step_needed(model, batch.text, batch.items, frozen) == 2 * traced_products(
        jax.make_jaxpr(function)(*params, batch).jaxpr
    )


def with_conformer(model: ModelConfig) -> ModelConfig:
    """Its clips as Gemma 4 has them: a Conformer's layers, with bounds of their matrices."""
    conformer = ConformerConfig(past=3, future=1, stem_widths=(7, 5))
    audio = replace(model.encoders["audio"], layers=2, conformer=conformer, clipped_linears=True)
    return replace(model, encoders=model.encoders | {"audio": audio})


@pytest.mark.covering(1)
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda f: "+".join(sorted(f)) or "nothing")
def test_a_conformer_needs_its_traced_products_but_for_those_that_it_makes_again(
    frozen: frozenset[str],
) -> None:
    """Scores and the stem's convolutions, and keys of distances, which are made once for all rows."""
    model = with_conformer(make_model())
    batch = make_batch(model, {"llm": (1, 4), "vision": (1, 8), "audio": (2, 960)})
    function, params = gradient(model, frozen)
    needed = step_needed(model, batch.text, batch.items, frozen)
    traced = 2 * traced_products(jax.make_jaxpr(function)(*params, batch).jaxpr)
    assert traced * (0.96 if "audio" not in frozen else 0.99) < needed <= traced


def test_silence_after_a_clip_is_read_but_passes_through_no_layer() -> None:
    """Clips of 5 and 4 frames, which the convolutions see 7 and 5 frames of: 3 and 2 positions, one token each."""
    model = pooled(make_model())
    item = np.array([[0] * 7 + [-1] + [1] * 5 + [-1] * 7], np.int32)
    batch = make_items(model.encoders["audio"], item)
    batch.coordinates[0, [5, 6, 12], 1] = -1
    text = make_text(np.zeros((1, 4), np.int32))
    found = useful_work(model, text, {"audio": batch})["audio"]
    assert found == work.Work(positions=5, pairs=3**2 + 2**2, inputs=12, tokens=2)
    lengths = np.array([4]), np.array([1, 1]), np.array([7, 5]), np.array([1, 1])
    assert work.length_work(model, *lengths)["audio"] == found


def test_a_frozen_llm_over_text_alone_needs_no_backward() -> None:
    model = make_model()
    batch = random_microbatch(model, np.random.default_rng(4))
    empty = {e: make_items(c, np.full((1, 12), -1, np.int32)) for e, c in model.encoders.items()}
    frozen = frozenset({"llm"})
    assert model_flops(model, useful_work(model, batch.text, empty), frozen)["llm"].backward == 0
    assert (
        model_flops(model, useful_work(model, batch.text, batch.items), frozen)["llm"].backward > 0
    )


def test_a_process_that_holds_no_rows_needs_nothing() -> None:
    model = make_model()
    nothing = {e: make_items(c, np.zeros((0, 12), np.int32)) for e, c in model.encoders.items()}
    assert step_needed(model, make_text(np.zeros((0, 8), np.int32)), nothing, frozenset()) == 0


SHAPE = {"llm": (4, 128), "vision": (2, 128), "audio": (2, 192)}
WIDE = make_model(scale=6, layers=1)  # width 192, encoders 144; compiling takes time


def recomputing(policy: Remat) -> ModelConfig:
    """Every tower with this policy."""
    encoders = {name: replace(encoder, remat=policy) for name, encoder in WIDE.encoders.items()}
    return ModelConfig(replace(WIDE.llm, remat=policy), encoders)


def adapted(policy: Remat, *layers: str) -> ModelConfig:
    """The same with adapters beside these linear layers."""
    return replace(recomputing(policy), lora={"one": LoraConfig(layers, rank=16)})


def xlas_count(model: ModelConfig, frozen: frozenset[str], *chunks: int | bool) -> float:
    """FLOPs of the compiled gradient. chunks: as of `gradient`."""
    function, params = gradient(model, frozen, *chunks)
    # Slow machine code, compiled in half the time, from the same program.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    program = (
        jax.jit(function).lower(*params, make_batch(model, SHAPE)).compile(compiler_options=quick)
    )
    return program.cost_analysis()["flops"]


@pytest.mark.default_cases("adapters alone, full", "products, frozen llm")
@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        (WIDE, FROZEN[0]),
        (WIDE, FROZEN[1]),
        (WIDE, FROZEN[2]),
        (in_chunks(WIDE, 24, 40), FROZEN[0]),
        (in_chunks(WIDE, 24, 40), FROZEN[1]),
        (parallel(recomputing("attention_mlp")), FROZEN[0]),
        (adapted("none", "*"), FROZEN[0]),
        (adapted("full", "*"), FROZEN[4]),
        (adapted("products", "llm.*.query", "vision.layers.*"), FROZEN[3]),
        *(
            (recomputing(policy), frozen)
            for policy in get_args(Remat)[1:]
            for frozen in (FROZEN[0], FROZEN[2])
        ),
    ],
    ids=[
        *(
            "all trainable",
            "frozen encoders",
            "frozen llm",
            "2D convolutions",
            "frozen 2D convolutions",
            "parallel",
        ),
        *("adapters", "adapters alone, full", "some adapters, products"),
        *(
            f"{policy}, {kind}"
            for policy in get_args(Remat)[1:]
            for kind in ("all trainable", "frozen llm")
        ),
    ],
)
def test_executed_is_within_two_percent_of_xlas_count(
    model: ModelConfig, frozen: frozenset[str]
) -> None:
    found = sum(f.total for f in executed(model, SHAPE, frozen).values())
    assert found == pytest.approx(xlas_count(model, frozen), rel=0.02)


@pytest.mark.default_cases("frozen llm-tokens", "frozen llm-vocabulary")
@pytest.mark.parametrize("of_tokens", [True, False], ids=["tokens", "vocabulary"])
@pytest.mark.parametrize("frozen", [FROZEN[0], FROZEN[2]], ids=["all trainable", "frozen llm"])
def test_a_loss_in_parts_of_the_vocabulary_executes_its_logits_once_more_and_of_tokens_does_not(
    frozen: frozenset[str], of_tokens: bool
) -> None:
    model = replace(WIDE, llm=replace(WIDE.llm, vocab=960))
    two, four = (xlas_count(model, frozen, chunks, of_tokens) for chunks in (2, 4))
    # XLA counts one chunk: a half of the loss or a quarter of it, beside all the rest.
    loss = 4 * (two - four)
    found, whole = (
        sum(f.total for f in executed(model, SHAPE, frozen, again).values())
        for again in (not of_tokens, False)
    )
    assert found == pytest.approx(two + loss / 2, rel=0.02)
    assert (found > 1.05 * whole) == (not of_tokens)


def test_executed_adds_what_needed_leaves_out() -> None:
    shape = {"llm": (2, 12), "vision": (1, 8), "audio": (2, 12)}
    plain, frozen = make_model(), frozenset({"vision"})
    batch = make_batch(plain, shape)
    least = model_flops(plain, useful_work(plain, batch.text, batch.items), frozen)
    full = make_model(remat="full")
    for module, flops in executed(plain, shape, frozen).items():
        again = executed(full, shape, frozen)[module]
        assert flops.forward > least[module].forward
        assert again.forward == pytest.approx(flops.forward, rel=1e-3)
        assert flops.backward > least[module].backward or module == "vision"
        assert (again.backward > flops.backward) == (module == "llm")
    assert executed(plain, shape, frozen)["vision"].backward == least["vision"].backward == 0


def test_blockwise_attention_executes_the_blocks_it_may_visit() -> None:
    dense = ModelConfig(make_model().llm, {})
    blockwise = ModelConfig(replace(dense.llm, attention="blockwise"), {})
    pairs = {
        m.llm.attention: work.row_work(m, {"llm": (3, 1000)})["llm"].pairs
        for m in (dense, blockwise)
    }
    assert pairs == {"dense": 3 * 1000**2, "blockwise": 3 * MAX_BLOCK**2 * sum(range(1, 9))}
    # one of two layers
    near = replace(blockwise, llm=replace(blockwise.llm, window=100, windowed=(1,)))
    assert (
        work.row_work(near, {"llm": (1, 1000)})["llm"].pairs == MAX_BLOCK**2 * (36 + 1 + 7 * 2) / 2
    )
    # Squares of 20 x 20 patches, one after the other: of eight blocks the fourth and the seventh
    # meet those of two.
    tower = replace(
        make_model(encoder_layers=2).encoders["vision"],
        attention="blockwise",
        window=20,
        windowed=(0,),
    )
    squares = ModelConfig(blockwise.llm, {"vision": tower})
    row = {"llm": (1, 8), "vision": (1, 1000)}
    assert (
        work.row_work(squares, row)["vision"].pairs
        == MAX_BLOCK**2 * (64 + 3 * 4 + 7 + 2 * 4 + 5 + 2) / 2
    )


def test_latent_attention_needs_its_matrices_and_the_products_of_its_keys_and_values() -> None:
    model = make_model(**LATENT)
    c, latent = model.llm, LATENT["latent"]
    none = np.zeros(0, np.int64)
    given = {"llm": work.length_work(model, np.array([40]), none, none, none)["llm"]}
    flops = model_flops(model, given, frozenset())["llm"]
    rank, heads = latent.query_rank, c.heads
    matrices = c.width * rank + rank * heads * c.head_width
    matrices += c.width * (latent.key_rank + c.rotary_width)
    matrices += latent.key_rank * heads * (c.head_width - c.rotary_width + latent.value_width)
    matrices += heads * latent.value_width * c.width + 3 * c.width * c.mlp_width
    pairs = c.layers * heads * (c.head_width + latent.value_width) * 40 * 41 // 2
    assert flops.forward == 2 * (40 * (c.layers * matrices + c.vocab * c.width) + pairs)
    assert flops.backward == 2 * flops.forward
    # The kernel computes values as wide as keys, both padded to 16 channels.
    shape = dict.fromkeys(("llm", "vision", "audio"), (1, 64))
    narrow, wide = (
        executed(
            make_model(**LATENT | {"latent": replace(latent, value_width=w)}, attention="flash"),
            shape,
            frozenset(),
        )
        for w in (latent.value_width, c.head_width)
    )
    assert narrow["llm"].attention == pytest.approx(wide["llm"].attention, rel=0.02)


def test_what_a_window_forbids_is_not_needed() -> None:
    model = make_model(window=5, windowed=(0,))
    sample = np.array([[0] * 9 + [1] * 4 + [-1] * 2], np.int32)
    near = sum(min(i + 1, 5) for n in (9, 4) for i in range(n))
    pairs = (near + 9 * 10 // 2 + 4 * 5 // 2) / 2
    assert useful_work(model, make_text(sample), {})["llm"].pairs == pairs
    none = np.zeros(0, np.int64)
    assert work.length_work(model, np.array([9, 4]), none, none, none)["llm"].pairs == pairs


DELTA_NET = DeltaNetConfig(
    (0, 1, 4), key_heads=2, value_heads=6, key_width=5, value_width=7, taps=3
)


def test_delta_nets_need_work_in_proportion_to_tokens_and_attention_only_in_its_own_layers() -> (
    None
):
    model = make_model(layers=7, delta_net=DELTA_NET, attention_gate=True)
    counts = []
    for lengths in ([40], [20, 20]):
        llm, none = np.array(lengths), np.zeros(0, np.int64)
        given = {"llm": work.length_work(model, llm, none, none, none)["llm"]}
        counts.append(model_flops(model, given, frozenset())["llm"])
    c, net = model.llm, DELTA_NET
    # Of two samples the scores of 20 x 20 pairs less, forward; of four layers with attention.
    assert counts[0].forward - counts[1].forward == 4 * 2 * 2 * c.heads * c.head_width * 20 * 20
    plain = c.width * (2 * c.heads + 2 * c.kv_heads + c.heads) * c.head_width
    keys, values = net.key_heads * net.key_width, net.value_heads * net.value_width
    linear = c.width * (2 * keys + 3 * values + 2 * net.value_heads)
    recurrence = round(3 * net.value_heads * 3.5 * net.key_width * net.value_width)
    per_token = (
        4 * plain + 3 * linear + 7 * 3 * c.width * c.mlp_width + c.vocab * c.width + recurrence
    )
    pairs = 4 * 2 * c.heads * c.head_width * 40 * 41 // 2
    assert counts[0].forward == 2 * (40 * per_token + pairs)
    assert counts[0].backward == 2 * counts[0].forward
    positions = {"llm": (1, 64), "vision": (1, 64), "audio": (1, 64)}
    remat = [
        executed(replace(model, llm=replace(c, remat=p)), positions, frozenset())["llm"]
        for p in ("none", "full")
    ]
    assert remat[1].forward == pytest.approx(remat[0].forward, rel=0.01)
    assert remat[1].backward > remat[0].backward > 2 * remat[0].forward


EXPERTS = ExpertsConfig((0, 2, 5), count=6, per_token=2, width=9, shared_width=5)


def test_experts_need_the_work_of_those_that_a_token_takes_and_have_the_parameters_of_all() -> None:
    model = make_model(layers=7, experts=EXPERTS)
    llm, none = np.array([40]), np.zeros(0, np.int64)
    given = {"llm": work.length_work(model, llm, none, none, none)["llm"]}
    c = model.llm
    attention = 7 * c.width * (2 * c.heads + 2 * c.kv_heads) * c.head_width
    # Three matrices of each MLP, a router of six experts, and the gate of the shared one.
    expert = 3 * c.width * EXPERTS.width
    sparse = 2 * expert + 3 * c.width * EXPERTS.shared_width + c.width * (6 + 1)
    per_token = attention + 3 * sparse + 4 * 3 * c.width * c.mlp_width + c.vocab * c.width
    pairs = 7 * 2 * c.heads * c.head_width * 40 * 41 // 2
    assert model_flops(model, given, frozenset())["llm"].forward == 2 * (40 * per_token + pairs)
    assert sum(parameters(model).values()) - active_parameters(model) == 3 * 4 * expert


def test_pairs_of_windowed_vision_layers_are_those_within_squares() -> None:
    model = make_model(encoder_layers=3)
    tower = replace(model.encoders["vision"], window=4, windowed=(0, 2))
    model = replace(model, encoders={"vision": tower})
    grids = [(5, 6), (4, 4), (2, 9), (3, 3)]  # patches; windows of 2 x 2 merge them
    packed = [to_patches(np.zeros((2 * h, 2 * w, 3), np.uint8), 2, 2) for h, w in grids]
    item = np.concatenate([np.where(p.valid, n, -1) for n, p in enumerate(packed)])[None].astype(
        np.int32
    )
    coordinates = np.concatenate([p.coordinates for p in packed])[None]
    items = make_items(tower, item)._replace(coordinates=coordinates)
    own = [(n, *(p // 4)) for n, p in zip(item[0], coordinates[0, :, 1:], strict=True) if n >= 0]
    near = sum(a == b for a in own for b in own)
    everything = sum((h * w) ** 2 for h, w in grids)
    text = make_text(np.zeros((1, 4), np.int32))
    assert useful_work(model, text, {"vision": items})["vision"].pairs == pytest.approx(
        (2 * near + everything) / 3
    )


def test_relative_cost_is_what_another_stretch_of_a_row_executes() -> None:
    model, length = make_model(), 96
    shape = dict.fromkeys(("llm", "vision", "audio"), (1, length))
    costs = dict(zip(shape, relative_cost(model, length), strict=True))
    for name, cost in costs.items():
        longer, shorter = (
            sum(f.total for f in executed(model, {**shape, name: (1, n)}, frozenset()).values())
            for n in (length + 24, length - 24)
        )
        assert cost == pytest.approx((longer - shorter) / 48)
    frozen = relative_cost(model, length, frozenset({"vision"}))
    assert frozen[1] < costs["vision"]
    assert frozen[[0, 2]] == pytest.approx([costs["llm"], costs["audio"]])


def test_frozen_modules_are_those_that_the_model_freezes() -> None:
    model = make_model(frozen=True)
    vision = replace(model.encoders["vision"], connector=ConnectorConfig(frozen=True))
    model = replace(
        model, encoders={"vision": vision, "audio": replace(model.encoders["audio"], frozen=True)}
    )
    assert (
        frozen_modules(model)
        == {"llm", "vision.connector", "audio"}
        == Model.build(model, jnp.float32).frozen
    )
