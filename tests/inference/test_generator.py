"""Cached decoding is the parallel forward's, for any batch and mesh, with adapters too, up to an end or the limit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY_MEDIA
from decoding_reference import greedy_tokens

from mmjax.batch import Microbatch, TextBatch
from mmjax.config import (
    Config,
    DeltaNetConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    LoraConfig,
    MeshConfig,
    TokenInputsConfig,
)
from mmjax.config.loading import copy_config, load
from mmjax.inference.evaluation import evaluation_sources
from mmjax.inference.generator import Generator, Sampling
from mmjax.inference.prompt_rows import BatchLimits
from mmjax.inference.prompts import QuestionPrompts, answer_tokens, decode_answer
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.state import parameter_shardings

END, DEFAULT_MAX_TOKENS = 1, 8
DRAWN = Sampling(0.8, top_k=20, top_p=0.9, seed=5)
MESHES = {
    "data x tensor": (MeshConfig(data=4, tensor=2), DRAWN),
    "data x fsdp x tensor": (MeshConfig(data=2, fsdp=2, tensor=2), Sampling()),
    "rows over devices": (MeshConfig(data=2, context=2, tensor=2), Sampling()),
    "tokens divided between layers": (
        MeshConfig(data=4, tensor=2, sequence_parallel="overlap"),
        DRAWN,
    ),
    "encoders over all": (MeshConfig(data=2, tensor=2, encoders="data"), DRAWN),
}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A config and its source of questions about images, clips and text."""
    folder: Path = tmp_path_factory.mktemp("few")
    config = load(TINY_MEDIA)
    copy_config(TINY_MEDIA, folder)
    (source,) = evaluation_sources(config, ("test",), folder).values()
    return config, source


def random_params(model: Model, seed: int = 0):
    """Large enough that an answer's tokens differ and depend on those before them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), model.abstract)


def generator(model: Model, source, mesh: MeshConfig | None = None, **own) -> Generator:
    mesh = mesh or MeshConfig(data=1)
    count = 4 if mesh.encoders == "data" else 8 if mesh.data > 1 else 1
    made = make_mesh(mesh, jax.devices()[:count])
    return Generator(
        model,
        made,
        ShardingRules.of(mesh),
        (END,),
        lambda t: decode_answer(source, t),
        **{"max_tokens": DEFAULT_MAX_TOKENS} | own,
    )


@pytest.mark.default_cases("windows and caps")
@pytest.mark.parametrize(
    "change",
    [
        "plain",
        "windows and caps",
        "adapters",
        "blockwise, scanned with a border",
        "latent attention",
        "chunks",
        "shared keys",
    ],
)
def test_the_cache_gives_what_a_full_forward_pass_for_every_token_gives(few, change):
    config, source = few
    config = replace(config, model=changed(config, change))
    model = Model.build(config.model, jnp.float32)
    params = random_params(model)
    room = max(answer_tokens(source, i) for i in range(len(source)))
    wanted = greedy_tokens(model, params, source, range(12), room)
    here = generator(model, source, max_tokens=room).answers(
        params, QuestionPrompts(source), range(12)
    )
    assert [a.text for a in here] == [decode_answer(source, wanted[i]) for i in range(12)]
    assert len({a.text for a in here}) > 4


def changed(config: Config, how: str):
    llm = config.model.llm
    match how:
        case "windows and caps":
            llm = replace(
                llm,
                layers=3,
                window=5,
                windowed=(0, 2),
                attention_cap=4.0,
                logit_cap=9.0,
                post_norms=True,
                query_growth=0.5,
                query_span=4,
            )
        case "blockwise, scanned with a border":
            llm = replace(
                llm, layers=4, attention="blockwise", remat=("none", "none", "full", "full")
            )
        case "parallel, without rope":
            gated = {"attention_gate": True, "separate_gate": True, "qk_norm": "unscaled"}
            windows = {"window": 5, "windowed": (0, 1, 3), "unrotated": (2,)}
            normed = {"embedding_norm": True, "parallel_mlp": True}
            llm = replace(llm, layers=4, **gated, **windows, **normed)
        case "chunks":
            growing = {"query_growth": 0.5, "query_span": 4, "growing": "unrotated"}
            llm = replace(llm, layers=4, window=5, windowed=(0, 1, 3), unrotated=(2,), **growing)
            experts = ExpertsConfig((1,), 3, 2, 12, normalized=False, weighted="inputs")
            llm = replace(llm, chunked=True, qk_norm="rotated", experts=experts)
        case "shared keys":
            llm = replace(
                llm,
                layers=6,
                window=5,
                windowed=(0, 2, 4),
                full_head_width=2 * llm.head_width,
                keys_as_values=True,
                shared_layers=3,
                value_norm=True,
                token_inputs=TokenInputsConfig(6, llm.vocab),
                output_scales=True,
            )
        case "latent attention":
            latent = LatentAttentionConfig(key_rank=12, value_width=6, query_rank=10)
            llm = replace(llm, latent=latent, kv_heads=llm.heads, rotary_width=4)
            return replace(config.model, llm=llm, lora={"all": LoraConfig(("llm.layers.*",), 2)})
        case "delta nets":
            llm = replace(llm, delta_net=DeltaNetConfig((0,), 2, 2, 8, 12))
        case "adapters":
            return replace(
                config.model, lora={"all": LoraConfig(("llm.layers.*", "*.connector.*"), 2)}
            )
    return replace(config.model, llm=llm)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change",
    ["plain", "delta nets", "parallel, without rope", "latent attention", "shared keys", "chunks"],
)
@pytest.mark.parametrize("where", MESHES)
def test_a_mesh_writes_what_one_device_writes(few, where, change):
    (mesh, sampling), (config, source) = MESHES[where], few
    config = replace(config, model=changed(config, change))
    model = Model.build(config.model, jnp.float32)
    params = random_params(model)
    numbers = [3, 17, 0, 9, 22, 5, 1]
    alone = generator(model, source, sampling=sampling).answers(
        params, QuestionPrompts(source), numbers
    )
    spread = generator(model, source, mesh, sampling=sampling, batch_limits=BatchLimits(rows=2))
    made = make_mesh(mesh, jax.devices()[: 4 if mesh.encoders == "data" else 8])
    held = jax.device_put(params, parameter_shardings(model, made, ShardingRules.of(mesh)))
    assert spread.answers(held, QuestionPrompts(source), numbers) == alone
    assert len({a.tokens for a in alone}) > 3


def test_the_cache_stays_where_it_lies(few):
    """No step gathers keys and values over the mesh: every rank keeps its rows and its heads."""
    config, _ = few
    model = Model.build(config.model, jnp.float32)
    mesh, rules = make_mesh(MeshConfig(data=4, tensor=2), jax.devices()), ShardingRules()
    params = jax.device_put(random_params(model), parameter_shardings(model, mesh, rules))
    tokens, ones, zeros = (np.full((8, 11), value, np.int32) for value in (5, 1, 0))
    place = np.tile(np.arange(11, dtype=np.int32), (8, 1))
    masks = {"sample": zeros, "pos": place, "span": zeros, "kind": ones, "sees": ones}
    others = {"source": zeros, "owner": zeros, "offset": place, "slots": {}, "send": {}}
    text = TextBatch(tokens, tokens, zeros.astype(np.float32), place, **masks, **others)

    def on_mesh(function, *arguments):
        with activations_on(mesh, rules):
            return function(*arguments)

    batch = put_rows(Microbatch(text, {}), mesh, rules)
    _, cache = jax.jit(lambda p, b: on_mesh(model.prefill, p, b, 6))(params, batch)
    for leaf in jax.tree.leaves(cache.layers):
        shard = leaf.sharding.shard_shape(leaf.shape)
        assert (shard[-4] * 4, shard[-2] * 2) == (leaf.shape[-4], leaf.shape[-2])
    step = (
        jax.jit(lambda p, t, c: on_mesh(model.step, p, t, c))
        .lower(params, tokens[:, 0], cache)
        .compile()
    )
    gathered = re.findall(r"= (\S+) all-gather\(", step.as_text())
    assert not [shape for shape in gathered if ",17," in shape], gathered


@pytest.mark.exhaustive
def test_what_is_drawn_does_not_depend_on_what_else_is_asked(few):
    config, source = few
    model = Model.build(config.model, jnp.float32)
    params = random_params(model)
    sampling = Sampling(1.0, seed=2)
    together = generator(model, source, sampling=sampling).answers(
        params, QuestionPrompts(source), range(8)
    )
    apart = generator(model, source, sampling=sampling, batch_limits=BatchLimits(rows=1))
    assert apart.answers(params, QuestionPrompts(source), [6, 2]) == [together[6], together[2]]
    other = generator(model, source, sampling=Sampling(1.0, seed=3)).answers(
        params, QuestionPrompts(source), range(8)
    )
    assert other != together


@pytest.mark.exhaustive
def test_an_answer_stops_at_an_end_or_at_the_limit_and_can_be_watched(few):
    config, source = few
    model = Model.build(config.model, jnp.float32)
    params = random_params(model, 1)
    writes = generator(model, source, max_tokens=20)
    answers = writes.answers(params, QuestionPrompts(source), range(16))
    for answer in answers:
        assert answer.ended == (answer.tokens[-1] == END)
        assert END not in answer.tokens[:-1]
        assert answer.ended or len(answer.tokens) == 20
    assert {a.ended for a in answers} == {True, False}
    long = next(i for i, a in enumerate(answers) if not a.ended)
    grown = [a for _, a in writes.answered(params, QuestionPrompts(source), [long], every=6)]
    assert [len(a.tokens) for a in grown] == [6, 12, 18, 20]
    assert all(a.tokens == answers[long].tokens[: len(a.tokens)] for a in grown)
