"""Quantised frozen weights: bitsandbytes' formula to the bit, and its loss and adapters' gradients in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from parity import packed_text, random_model
from torch import nn

from mmjax.batch import Microbatch
from mmjax.config import AdamW, LoraConfig, MeshConfig
from mmjax.config.model import lora_scale
from mmjax.hf.families import from_hf
from mmjax.models.layer_stacks import unstack_layers
from mmjax.models.model import Model
from mmjax.models.quantization import dequantize, quantize
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.executor import Executor
from mmjax.runtime.state import make_optimizer
from mmjax.runtime.weights import load_pretrained

LORA = LoraConfig(("llm.layers.*",), rank=4, alpha=8.0)
SAMPLES = [np.arange(1, 12) * 5 % 61, np.arange(1, 20) * 7 % 61]
COUNT = sum(len(tokens) - 1 for tokens in SAMPLES)
OURS = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
}
OURS |= {"self_attn.o_proj": "attention.output"} | {
    f"mlp.{name}_proj": f"mlp.{name}" for name in ("gate", "up", "down")
}
# As bitsandbytes writes them (bitsandbytes/functional.py, `get_4bit_type`).
QUANTILES = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


def reference(weight: torch.Tensor, how: str) -> torch.Tensor:
    """A matrix `[out, in]` as bitsandbytes makes it again: nf4 of blocks of 64 of its rows one after the other.

    fp8: as PyTorch rounds it, over the least power of two.
    """
    if how == "int8":
        largest = weight.abs().amax(1, keepdim=True)
        return (weight * (127 / largest)).round() * largest / 127
    if how == "fp8":
        scale = 2.0 ** torch.ceil(torch.log2(weight.abs().max() / 448))
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / largest)[..., None] - QUANTILES).abs().argmin(-1)
    return (QUANTILES[nearest] * largest).reshape(weight.shape)


class Adapted(nn.Module):
    """A linear layer as bitsandbytes and PEFT compute it: the weight made again, and an adapter beside it."""

    def __init__(self, linear: nn.Linear, how: str, a: np.ndarray, b: np.ndarray):
        super().__init__()
        self.weight = nn.Parameter(reference(linear.weight.detach(), how), requires_grad=False)
        self.bias = linear.bias
        self.a, self.b = (nn.Parameter(torch.tensor(x)) for x in (a, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + lora_scale(LORA) * (
            x @ self.a @ self.b
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config = transformers.Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("qwen2")
    random_model(config).save_pretrained(path)
    return path


ALONE = MeshConfig(fsdp=1)


def step(folder: Path, how: str, remat: str = "none", mesh: MeshConfig = ALONE):
    """A step's loss, its gradients and its parameters, by layer."""
    config = from_hf(folder)
    config = replace(config, llm=replace(config.llm, quantize=how, remat=remat), lora={"llm": LORA})
    model = Model.build(config, jnp.float32)
    devices = jax.devices()[: mesh.fsdp * mesh.tensor]
    placed, rules = make_mesh(replace(mesh, data=1), devices), ShardingRules.of(mesh)
    executor = Executor.on_mesh(
        model, make_optimizer(AdamW(), model.axes), placed, rules, sources=1, accumulates=False
    )
    state = executor.init(jax.random.key(0), load_pretrained(model, executor.parameter_shardings))
    # Every b is zero at first, and no a would have a gradient.
    trainable = jax.tree.map(
        lambda p, layout: jax.device_put(
            0.1 * np.sin(np.arange(p.size, dtype=np.float32)).reshape(p.shape), layout
        ),
        state.trainable,
        executor.states[0].shardings.trainable,
    )
    (batch,) = executor.put(Microbatch(packed_text(SAMPLES, 32, rows=2), {}))
    program = executor.programs[0].forward_backward
    sums, _ = program(trainable, state.frozen, None, batch, {"llm": np.float32(COUNT)}, None)
    return (
        float(sums.losses.loss[0]) / COUNT,
        unstack_layers(jax.device_get(sums.gradients)),
        trainable,
        state.frozen,
    )


def adapters(tree, layer: int, path: str):
    part, name = path.split(".")
    lora = tree["llm"]["layers"][str(layer)][part][name]["lora"]
    return np.asarray(lora["a"]), np.asarray(lora["b"])


@pytest.mark.default_cases("nf4-none")
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("how", ["nf4", "int8", "fp8"])
def test_a_steps_loss_and_adapters_gradients_are_those_of_bitsandbytes_formula(how, remat, folder):
    loss, gradients, trainable, _ = step(folder, how, remat)
    there = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    there.requires_grad_(False)
    ours = unstack_layers(jax.device_get(trainable))
    for number, layer in enumerate(there.model.layers):
        for name, path in OURS.items():
            parent, last = name.split(".")
            linear = getattr(getattr(layer, parent), last)
            setattr(
                getattr(layer, parent), last, Adapted(linear, how, *adapters(ours, number, path))
            )
    losses = [
        nn.functional.cross_entropy(
            there(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0, :-1],
            torch.tensor(tokens[1:]),
            reduction="sum",
        )
        for tokens in SAMPLES
    ]
    theirs = sum(losses) / COUNT
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-3)
    for number, layer in enumerate(there.model.layers):
        for name, path in OURS.items():
            module = layer.get_submodule(name)
            for mine, wanted in zip(
                adapters(gradients, number, path), (module.a.grad, module.b.grad), strict=True
            ):
                np.testing.assert_allclose(
                    mine, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max())
                )


@pytest.mark.parametrize("how", ["nf4", "int8", "fp8"])
def test_a_matrix_of_a_stack_is_quantised_by_the_formula_and_one_of_zeros_stays_so(how):
    stack = torch.randn(2, 48, 192, generator=torch.Generator().manual_seed(0))
    ours = quantize(jnp.asarray(stack.numpy().swapaxes(1, 2)), how)
    assert ours.shape == (2, 192, 48)
    found = np.asarray(dequantize(ours, jnp.float32)).swapaxes(1, 2)
    np.testing.assert_allclose(found, [reference(matrix, how) for matrix in stack], rtol=1e-6)
    assert not np.asarray(dequantize(quantize(jnp.zeros((64, 3)), how), jnp.bfloat16)).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["nf4", "int8", "fp8"])
def test_codes_and_scales_lie_in_shards_of_whole_blocks_and_four_devices_compute_the_same(
    how, folder
):
    alone = step(folder, how)
    meshes = MeshConfig(fsdp=2, tensor=2), MeshConfig(fsdp=2, tensor=2, sequence_parallel="on")
    for mesh in meshes:
        together = step(folder, how, mesh=mesh)
        assert together[0] == pytest.approx(alone[0], rel=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), together[1], alone[1]
        )
    # Inputs of the last matrix are shared by two devices: 64 each, which are one block.
    down = together[3]["llm"]["layers"]["runs"]["0:3"]["mlp"]["down"]["weight"]
    shards = {name: x.sharding.shard_shape(x.shape) for name, x in down.items()}
    wanted = {
        "nf4": {"codes": (3, 1, 32, 32), "scales": (3, 1, 32)},
        "int8": {"codes": (3, 64, 32), "scales": (3, 32)},
        "fp8": {"codes": (3, 64, 32), "scales": (3,)},
    }
    assert shards == wanted[how]
