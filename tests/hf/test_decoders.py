"""Decoders of every family compute what transformers computes, and learn the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from parity import check_text, loaded, random_model
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mmjax.config import MeshConfig, PlainRope
from mmjax.errors import UserError
from mmjax.hf.families import from_hf, layout_of
from mmjax.hf.folder import HfFolder
from mmjax.models.expert_routing import Routing, balance_loss, z_loss
from mmjax.models.layer_stacks import unstack_layers
from mmjax.models.model import Model
from mmjax.models.rope import text_rotation
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.default_cases(
    "llama-0",
    "llama-1",
    "qwen2-0",
    "qwen2-1",
    "qwen3-0",
    "mistral-0",
    "ministral3-0",
    "phi3-0",
    "gemma-0",
    "gemma2-0",
    "gemma2-1",
    "gemma3-0",
    "gemma4_text-0",
    "gemma4_text-1",
    "qwen3_5_text-0",
    "gpt_oss-0",
    "lfm2-0",
    "llama4_text-0",
    "mixtral-0",
    "qwen3_moe-2",
    "glm4-0",
    "glm4_moe-1",
    "mistral4-0",
    "deepseek_v2-0",
    "deepseek_v3-0",
    "cohere-0",
    "cohere2-0",
    "exaone4-0",
    "granite-0",
    "hyperclovax-1",
    "opt-0",
    "gpt2-0",
    "ernie4_5-0",
)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", drawn.DECODERS)
def test_a_decoder_is_what_transformers_makes_of_it(family, seed, tmp_path):
    rng = np.random.default_rng(seed)
    model = random_decoder(drawn.decoder(rng, family))
    model.save_pretrained(tmp_path)
    # 0 is padding there, which learns nothing
    samples = [rng.integers(1, 97, n) for n in (19, 7, 11, 1)]
    check_text(model, tmp_path, samples, 40)


def random_decoder(config):
    """A random model of a config, whose class transformers may not list among decoders."""
    kind = transformers.Mistral4ForCausalLM if config.model_type == "mistral4" else None
    return random_model(config, kind)


def saved(tmp_path, kind=transformers.Qwen2Config, dtype=torch.float32, shard="5GB", **own):
    model = random_model(kind(**COMMON | own)).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    return model


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_several_files_in_bfloat16_give_exactly_their_values(tmp_path):
    model = saved(tmp_path, dtype=torch.bfloat16, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    _, params, _ = loaded(tmp_path)
    wanted = model.lm_head.weight.detach().float().numpy()
    np.testing.assert_array_equal(params["llm"]["head"]["table"]["weight"], wanted)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    frozen = Model.build(from_hf(tmp_path, freeze=["llm"]), jnp.bfloat16)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    still = load_pretrained(frozen, parameter_shardings(frozen, mesh, ShardingRules()))
    assert {x.dtype for x in jax.tree.leaves(still)} == {jnp.dtype(jnp.bfloat16)}
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.map(lambda x: x.astype(jnp.float32), still), params
    )


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_what_lies_on_a_mesh_is_what_lies_on_one_device(tmp_path, mesh):
    saved(tmp_path, hidden_size=64)
    config = edit_policies(from_hf(tmp_path))
    model = Model.build(config, jnp.float32)
    assert len(model.runs["llm"]) == 2  # a stack and a single layer
    made = make_mesh(MeshConfig(**{"data": 1} | mesh), jax.devices())
    shardings = parameter_shardings(model, made, ShardingRules())
    params = load_pretrained(model, shardings)
    assert all(
        jax.tree.leaves(
            jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, shardings)
        )
    )
    _, whole, _ = loaded(tmp_path)
    one_by_one = unstack_layers(jax.device_get(params)), unstack_layers(jax.device_get(whole))
    jax.tree.map(np.testing.assert_array_equal, *one_by_one)


def edit_policies(config):
    return replace(config, llm=replace(config.llm, remat=("none", "none", "full")))


def test_old_names_of_rope_mean_the_same(tmp_path):
    saved(tmp_path, transformers.LlamaConfig, rope_parameters=LLAMA3)
    new = from_hf(tmp_path)

    def old(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}

    edit_config(tmp_path, old)
    assert from_hf(tmp_path) == new
    edit_config(tmp_path, lambda config: config.update(rope_scaling=None))
    assert from_hf(tmp_path).llm == replace(new.llm, rope_scaling=PlainRope())


def drawn_rope(rng):
    """Fields of a config whose RoPE is of any kind and written in any of the ways that there are."""
    kind = str(rng.choice(["linear", "dynamic", "yarn", "llama3", "longrope"]))
    rope = {"rope_type": kind, "factor": float(rng.choice([1.5, 2.0, 4.0]))}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        rope |= {f"{name}_factor": (1 + 3 * rng.random(6)).tolist() for name in ("short", "long")}
    if kind == "yarn" and rng.integers(2):
        rope |= {
            "beta_fast": 16.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "truncate": bool(rng.integers(2)),
        }
    fields = {"max_position_embeddings": int(rng.choice([24, 64]))}
    if rng.integers(2):
        rope["original_max_position_embeddings"] = int(rng.choice([8, 16]))
    if rng.integers(2):
        fields["original_max_position_embeddings"] = int(rng.choice([8, 12]))
    if rng.integers(2):
        rope["finetuned"] = True
    place = str(rng.choice(["rope_parameters", "rope_scaling", "both"]))
    (rope if place != "rope_scaling" or rng.integers(2) else fields)["rope_theta"] = float(
        rng.choice([1e4, 5e5])
    )
    if place == "rope_scaling":
        rope["type"] = rope.pop("rope_type")
    places = ("rope_parameters", "rope_scaling") if place == "both" else (place,)
    return fields | dict.fromkeys(places, rope)


@pytest.mark.parametrize("seed", range(24))
def test_rope_is_read_from_wherever_transformers_reads_it(seed, tmp_path):
    drawn = drawn_rope(np.random.default_rng(seed))
    transformers.LlamaConfig(**COMMON).save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: (config.pop("rope_parameters"), config.update(drawn)))
    there = transformers.AutoConfig.from_pretrained(tmp_path)
    for length in (6, 40):  # below what it was trained with, and beyond
        positions = np.arange(length)[None]
        turned = LlamaRotaryEmbedding(there)(torch.zeros(1), torch.tensor(positions))
        rotation = text_rotation(
            from_hf(tmp_path).llm, jnp.asarray(positions), jnp.zeros((1, length), jnp.int32)
        )
        for ours, theirs in zip(rotation[:2], turned, strict=True):
            np.testing.assert_allclose(
                ours, theirs[..., : ours.shape[-1]].numpy(), atol=1e-4, err_msg=str(drawn)
            )


def test_fields_of_rope_that_change_nothing_are_named_once_and_not_refused(tmp_path, capsys):
    saved(tmp_path)
    before = from_hf(tmp_path)
    capsys.readouterr()
    edit_config(
        tmp_path, lambda config: config["rope_parameters"].update(finetuned=True, beta_fast=9)
    )
    assert from_hf(tmp_path) == from_hf(tmp_path) == before
    said = f"note: {tmp_path}/config.json: rope_parameters: beta_fast, finetuned: not read for rope_type='default'"
    assert capsys.readouterr().err == f"{said}, as in transformers\n"


def test_a_single_file_is_read_where_an_index_is_beside_it_and_said(tmp_path, capsys):
    saved(tmp_path, shard="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    other = random_model(transformers.Qwen2Config(**COMMON), seed=1)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    there = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight.detach().numpy()
    )
    np.testing.assert_array_equal(there, other.lm_head.weight.detach().numpy())
    capsys.readouterr()
    for shard in tmp_path.glob("model-*.safetensors"):  # the index may be stale
        shard.unlink()
        _, params, _ = loaded(tmp_path)
        np.testing.assert_array_equal(params["llm"]["head"]["table"]["weight"], there)
    assert capsys.readouterr().err.count(f"note: {tmp_path} has both model.safetensors and") == 1


def test_a_tied_checkpoint_may_hold_its_output_table_too(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)
    edit_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    edit_tensors(
        tmp_path,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}),
    )
    _, params, config = loaded(tmp_path)
    assert config.llm.tied
    assert "table" not in params["llm"]["head"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"has no tensor model\.norm\.weight"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), r"1 tensors that this model lacks, such as model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(2)}), r"norm\.weight has shape \[2\], this model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), r"is of type I8"),
        (lambda t: t.pop("model.embed_tokens.weight"), r"has no decoder"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_go_with_the_config_are_named(tmp_path, change, message):
    saved(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(UserError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"model_type='bert' cannot be read; known: qwen2"),
        ({"model_type": None}, r"config.json has no 'model_type'"),
        ({"hidden_size": "48"}, r"hidden_size='48' is no int"),
        ({"hidden_act": "mish"}, r"hidden_act='mish' is not supported"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            r"rope_type='spiral' is not supported; known: default",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters has no 'factor'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            r"full_attention: RoPE by the type of a layer",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
            r"rope_scaling and rope_parameters differ, and transformers reads rope_scaling alone",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_theta": 1e6},
            },
            r"rope_scaling and rope_parameters differ",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5 is not supported"),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
            r"layer_types must give each of 3 layers",
        ),
        (
            {"use_sliding_window": True, "layer_types": [{}, [], 1]},
            r"layer_types=\[{}, \[\], 1\] is no list\[str\]",
        ),
        ({"model_type": {"qwen2": 1}}, r"model_type={'qwen2': 1} is no str"),
        (
            {"model_type": "clip", "architectures": 5, "auto_map": ["x"]},
            r"has an encoder, and no decoder",
        ),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_field(tmp_path, change, message):
    saved(tmp_path)
    edit_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


QWEN3_5 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, r"attn_output_gate=False is not supported; known: True"),
        (
            {"output_gate_type": "sigmoid"},
            r"output_gate_type='sigmoid' is not supported; known: 'swish', 'silu'",
        ),
        ({"mamba_ssm_dtype": "bfloat16"}, r"mamba_ssm_dtype='bfloat16' is not supported"),
        (
            {"linear_num_value_heads": 3},
            r"linear_num_value_heads=3 is no multiple of linear_num_key_heads=2",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4},
            r"layer_types must give each of 4 layers one of full_attention, lin",
        ),
    ],
)
def test_what_qwen3_5_does_not_support_is_refused_by_field(tmp_path, change, message):
    transformers.Qwen3_5TextConfig(**COMMON | QWEN3_5).save_pretrained(tmp_path)
    from_hf(tmp_path)
    edit_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            transformers.OPTConfig,
            {"do_layer_norm_before": False},
            r"do_layer_norm_before=False is not supported; known: True",
        ),
        (
            transformers.OPTConfig,
            {"word_embed_proj_dim": 24},
            r"word_embed_proj_dim=24 is not supported; known: 48",
        ),
        (
            transformers.OPTConfig,
            {"num_attention_heads": 5},
            r"a width of 48 does not divide into 5 heads",
        ),
        (
            transformers.GPT2Config,
            {"scale_attn_by_inverse_layer_idx": True},
            r"scale_attn_by_inverse_layer_idx=True is not supported",
        ),
        (
            transformers.MixtralConfig,
            {"router_jitter_noise": 0.1},
            r"router_jitter_noise=0.1 is not supported",
        ),
        (
            transformers.MixtralConfig,
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok=9 is not between 1 and",
        ),
        (
            transformers.GraniteConfig,
            {"logits_scaling": 0.0},
            r"attention_multiplier=1.0 and logits_scaling=0.0 must be above 0",
        ),
        (
            transformers.CohereConfig,
            {"use_qk_norm": True},
            r"use_qk_norm=True is not supported; known: False",
        ),
        (
            transformers.Qwen3MoeConfig,
            {"hidden_act": "mish"},
            r"hidden_act='mish' is not supported",
        ),
    ],
)
def test_what_other_decoders_do_not_support_is_refused_by_field(tmp_path, kind, change, message):
    kind(**COMMON).save_pretrained(tmp_path)
    from_hf(tmp_path)
    edit_config(tmp_path, lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        from_hf(tmp_path)


def test_experts_in_mxfp4_are_refused_by_name(tmp_path):
    saved(tmp_path, transformers.GptOssConfig, head_dim=12, num_local_experts=5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{name}_blocks": tensors.pop(name)}))
    with pytest.raises(
        UserError, match=r"experts in MXFP4 .* are not read; save it once in bfloat16"
    ):
        loaded(tmp_path)


@pytest.mark.parametrize("biased", [False, True])
def test_internlm2s_layout_is_the_llama_that_it_is(tmp_path, biased):
    saved(tmp_path, transformers.LlamaConfig, attention_bias=biased)
    _, before, llama = loaded(tmp_path)
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }

    def renamed(tensors):
        for kind in ("weight", "bias") if biased else ("weight",):
            for layer in range(3):
                q, k, v = (
                    tensors.pop(f"model.layers.{layer}.self_attn.{x}_proj.{kind}") for x in "qkv"
                )
                # Of 4 heads of 12 channels, two share a key: "(h gs d)" of InternLM2's own code, gs
                # = 2 + 1 + 1.
                parts = (x.reshape(2, -1, 12, *x.shape[1:]) for x in (q, k, v))
                fused = torch.cat(tuple(parts), dim=1).reshape(-1, *q.shape[1:])
                tensors[f"model.layers.{layer}.attention.wqkv.{kind}"] = fused.contiguous()
        for key in list(tensors):
            new = key
            for old, name in names.items():
                new = new.replace(old, name)
            tensors[new] = tensors.pop(key)

    edit_tensors(tmp_path, renamed)
    edit_config(tmp_path, lambda config: config.update(model_type="internlm2", bias=biased))
    _, after, internlm2 = loaded(tmp_path)
    assert internlm2.llm == llama.llm
    jax.tree.map(np.testing.assert_array_equal, after, before)
    folder = HfFolder.open(tmp_path)
    fused = folder.read("model.layers.0.attention.wqkv.weight")
    written = np.zeros_like(fused)
    for name, width in {"query": 48, "key": 24, "value": 24}.items():
        part = (
            layout_of(folder, internlm2)
            .modules["llm"]
            .find(("layers", "0", "attention", name, "weight"))
        )
        place = part.selected(written)
        place[...] = part.to_hf(part.from_hf(part.selected(fused), (48, width)), place.shape)
    np.testing.assert_array_equal(written, fused)


def test_gpt2_without_its_prefix_and_with_old_buffers_is_the_same_model(tmp_path):
    saved(tmp_path, transformers.GPT2Config)
    _, before, _ = loaded(tmp_path)

    def old(tensors):
        named = {key.removeprefix("transformer."): tensors.pop(key) for key in list(tensors)}
        tensors.update(named | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)})

    edit_tensors(tmp_path, old)
    _, after, _ = loaded(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_balance_loss_is_trained_on_where_the_routers_logits_are_asked_for(tmp_path):
    for asked, weight in ((False, 0.0), (True, 0.02)):
        transformers.MixtralConfig(
            **COMMON, output_router_logits=asked, router_aux_loss_coef=0.02
        ).save_pretrained(tmp_path)
        assert from_hf(tmp_path).llm.experts.balance_loss == weight


def test_losses_of_routing_are_those_of_transformers_without_padding():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 30, 5)).astype(np.float32)
    mask = np.arange(30) < 23
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    tokens = (np.argsort(-logits, -1)[..., :2, None] == np.arange(5)).sum(2)
    squares = np.log(np.exp(logits).sum(-1)) ** 2
    sums = ((x * mask[:, None]).sum(1).astype(np.float32) for x in (tokens, probability))
    routing = Routing(
        *map(
            jnp.asarray,
            (*sums, (squares * mask).sum(1), np.full(2, 23.0, np.float32), np.ones(2, np.float32)),
        )
    )
    theirs = load_balancing_loss_func(
        tuple(torch.tensor(logits)), 5, 2, torch.tensor(mask[None].astype(int))
    )
    assert float(balance_loss(routing)) == pytest.approx(float(theirs), rel=1e-5)
    assert float(z_loss(routing)) == pytest.approx(squares[:, mask].mean(), rel=1e-5)


def test_tensors_of_multi_token_prediction_are_not_read_and_said_once(tmp_path, capsys):
    saved(tmp_path, transformers.Qwen3_5TextConfig, **QWEN3_5)
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({"mtp.layers.0.norm.weight": torch.ones(4)})
    )
    loaded(tmp_path)
    loaded(tmp_path)
    said = f"note: {tmp_path}: mtp.* (prediction several tokens ahead) is not read; an export copies it as it is\n"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("cut", [4, 100, 5000])
def test_a_torn_file_is_named(tmp_path, cut):
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        loaded(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights are never loaded, so save it once with"):
        loaded(tmp_path)
