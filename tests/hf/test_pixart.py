"""PixArt's transformer computes what diffusers computes, images of many sizes in a row, and goes back to its folder."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from commands import TINY
from diffusers import PixArtTransformer2DModel
from fine_tuning import moved_run
from flax import nnx
from image_rows import rows_of_images
from safetensors.numpy import load_file, save_file

from mmjax.config import (
    DecoderConfig,
    DiffusionTransformerConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    VaeLatents,
)
from mmjax.config.loading import load
from mmjax.errors import UserError
from mmjax.export import export
from mmjax.hf import pixart
from mmjax.hf.folder import HfFolder
from mmjax.hf.generators import generator_from_hf
from mmjax.hub import DIFFUSERS_SINGLE
from mmjax.models.diffusion_transformer import DiffusionTransformer
from mmjax.models.layer_stacks import plan_stacks
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.trained_weights import Exporter
from mmjax.runtime.weights import load_pretrained

Path_ = tuple[str, ...]
Tensors = dict[str, Any]  # by name


def saved(folder: Path, fields: dict[str, Any], seed: int = 0) -> PixArtTransformer2DModel:
    """A transformer of diffusers whose every parameter is random, and its folder."""
    torch.manual_seed(seed)
    model = PixArtTransformer2DModel(**fields).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2 if parameter.ndim < 2 else parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return model


def graph_and_shapes(
    config: DiffusionTransformerConfig,
) -> tuple[nnx.GraphDef, dict[Path_, tuple[int, ...]]]:
    """The graph of our module, every layer by itself, and the shapes of its parameters by their paths."""
    plan = plan_stacks(config.layers, "none", tuple(range(1, config.layers)))
    module = nnx.eval_shape(
        lambda: DiffusionTransformer(config, plan, jnp.dtype(jnp.float32), nnx.Rngs(0))
    )
    graph, state = nnx.split(module)
    flat = nnx.traversals.flatten_mapping(nnx.to_pure_dict(state))
    return graph, {path: leaf.shape for path, leaf in flat.items()}


def numbered(path: Path_) -> Path_:
    """The path of a parameter in a checkpoint."""
    return tuple(part for part in path if part != "runs")


def ours(tensors: Tensors, config: DiffusionTransformerConfig) -> dict[Path_, np.ndarray]:
    """Our parameters, or their gradients, from diffusers' tensors."""
    names = pixart.parts(config)
    found = {}
    for path, shape in graph_and_shapes(config)[1].items():
        part = names.find(numbered(path))
        found[path] = part.from_hf(part.selected(tensors[part.key]), shape)
    return found


def predict(graph: nnx.GraphDef, params: dict[Path_, np.ndarray], *inputs: Any) -> jax.Array:
    module = nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(params)))
    return module(*jax.tree.map(jnp.asarray, inputs))


def unpatched(x: np.ndarray, size: tuple[int, int], patch: int) -> np.ndarray:
    """Patches `[height * width, F]` as an image `[channels, rows, columns]`."""
    height, width = size
    pixels = x.reshape(height, width, patch, patch, -1)
    return np.einsum("hwpqc->chpwq", pixels).reshape(
        pixels.shape[-1], height * patch, width * patch
    )


class Step(NamedTuple):
    """Inputs of one denoising step of an image, as diffusers takes them, and the factors of its loss."""

    latents: np.ndarray
    time: float
    condition: np.ndarray
    size: tuple[float, float]  # in pixels
    factors: np.ndarray


def step_there(model: PixArtTransformer2DModel, steps: list[Step]) -> dict[str, Tensors]:
    """Velocities, and the gradients of latents, conditions and parameters, in the model's dtype."""
    dtype = model.dtype
    model.zero_grad()
    outputs: dict[str, Tensors] = {"velocity": {}, "latents": {}, "condition": {}}
    for number, step in enumerate(steps):
        latents = torch.tensor(step.latents, dtype=dtype)[None].requires_grad_()
        condition = torch.tensor(step.condition, dtype=dtype)[None].requires_grad_()
        size = torch.tensor([step.size])
        sizes = {"resolution": size, "aspect_ratio": size[:, :1] / size[:, 1:]}
        time = torch.tensor([1000.0]) * step.time
        velocity = model(
            latents, condition, time, sizes if model.use_additional_conditions else None
        ).sample[0]
        velocity = velocity[: len(step.latents)]  # variances follow
        (velocity * torch.tensor(step.factors)).sum().backward()
        for name, x in {
            "velocity": velocity,
            "latents": latents.grad[0],
            "condition": condition.grad[0],
        }.items():
            outputs[name][str(number)] = x.detach().numpy()
    return outputs | {"parameters": {name: p.grad.numpy() for name, p in model.named_parameters()}}


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(24))
def test_a_step_is_what_diffusers_makes_of_it_with_images_of_many_sizes_in_a_row(seed, tmp_path):
    rng = np.random.default_rng(seed)
    theirs = saved(tmp_path / "transformer", drawn.pixart(rng))
    base = generator_from_hf(tmp_path)
    config = replace(
        base,
        attention=drawn.pick(rng, "dense", "blockwise"),
        min_patches=drawn.between(rng, 4, 8),
        queries=drawn.between(rng, 1, 7),
        latents=replace(base.latents, factor=drawn.pick(rng, 1, 8)),
    )
    sizes = [[(2, 4), (4, 3), (5, 7)], [(3, 3), (1, 8)]]
    length = 55 + drawn.between(rng, 0, 9)
    items = rows_of_images(sizes, length)
    images, queries = config.max_images(length), config.queries
    latents = rng.normal(size=(2, length, config.patch_values)).astype(np.float32)
    time = rng.uniform(size=(2, images)).astype(np.float32)
    condition = rng.normal(size=(2, images * queries, config.condition_width)).astype(np.float32)
    factors = rng.normal(size=latents.shape).astype(np.float32)
    graph, _ = graph_and_shapes(config)
    params = ours({name: p.detach().numpy() for name, p in theirs.named_parameters()}, config)
    assert sum(x.size for x in params.values()) == sum(p.numel() for p in theirs.parameters())

    def loss(params, latents, condition):
        velocity = predict(graph, params, latents, items, time, condition)
        return (velocity * factors).sum(), velocity

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, velocity), (gradients, *of_inputs) = run(
        jax.tree.map(jnp.asarray, params), latents, condition
    )
    velocity, of_latents, of_condition = map(np.asarray, (velocity, *of_inputs))
    assert not velocity[items.item < 0].any()

    steps: list[Step] = []
    found: dict[str, Tensors] = {"velocity": {}, "latents": {}, "condition": {}}
    pixels = config.patch * config.latents.factor
    for row, number in [
        (row, number) for row, images in enumerate(sizes) for number in range(len(images))
    ]:
        size = sizes[row][number]
        (here,) = np.nonzero(items.item[row] == number)
        tokens = slice(number * queries, (number + 1) * queries)
        image = partial(unpatched, size=size, patch=config.patch)
        found["velocity"][str(len(steps))] = image(velocity[row, here])
        found["latents"][str(len(steps))] = image(of_latents[row, here])
        found["condition"][str(len(steps))] = of_condition[row, tokens]
        given = image(latents[row, here]), float(time[row, number]), condition[row, tokens]
        steps.append(
            Step(*given, tuple(float(side * pixels) for side in size), image(factors[row, here]))
        )
    wanted, exact = step_there(theirs, steps), step_there(copy.deepcopy(theirs).double(), steps)
    for name, by_image in found.items():
        for number, x in by_image.items():
            least = 1.0 if name == "velocity" else 1e-3
            limit = 1e-4 if name == "velocity" else 2e-4
            close(
                x,
                wanted[name][number],
                exact[name][number],
                f"{name} of image {number}",
                limit,
                least,
            )
    wanted, exact = (ours(x["parameters"], config) for x in (wanted, exact))
    largest = max(np.abs(gradient).max() for gradient in exact.values())
    for path, gradient in gradients.items():
        # A key's bias moves all scores of a query alike, and a lone token's scores do nothing: only
        # rounding is left.
        least = 1e-3 * largest if "key" in path else 1e-3
        close(gradient, wanted[path], exact[path], ".".join(path), 2e-4, least)
        assert "variance" not in path or not np.any(gradient)


def close(
    found: Any, wanted: np.ndarray, exact: np.ndarray, name: str, relative: float, least: float
) -> None:
    """Hold numbers equal to a part of the largest, or four times as far from float64 as those there are."""
    limit = max(relative * max(np.abs(exact).max(), least), 4 * np.abs(wanted - exact).max())
    np.testing.assert_allclose(found, exact, rtol=0, atol=limit, err_msg=name)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_is_what_diffusers_reads(seed, tmp_path):
    theirs = saved(tmp_path / "transformer", drawn.pixart(np.random.default_rng(seed)))
    config = generator_from_hf(tmp_path / "transformer")
    tensors = load_file(tmp_path / "transformer" / DIFFUSERS_SINGLE)
    params = {numbered(path): value for path, value in ours(tensors, config).items()}
    pixart.write(tmp_path / "out", config, params)
    again = PixArtTransformer2DModel.from_pretrained(tmp_path / "out")
    wanted, found = theirs.state_dict(), again.state_dict()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(found[name].numpy(), tensor.numpy(), err_msg=name)
    assert generator_from_hf(tmp_path / "out") == replace(config, weights=str(tmp_path / "out"))


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("seed", range(6))
def test_a_model_starts_from_a_folder_and_is_written_over_it(seed, tmp_path):
    theirs = saved(tmp_path / "transformer", drawn.pixart(np.random.default_rng(seed)))
    config = generator_from_hf(tmp_path)
    model = ModelConfig(DecoderConfig(1, 16, 2, 1, 8, 16, vocab=9), generators={"picture": config})
    built = Model.build(model, jnp.float32, {"picture": tuple(range(1, config.layers))})
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    loaded = load_pretrained(built, parameter_shardings(built, mesh, ShardingRules()))
    wanted = ours({name: p.detach().numpy() for name, p in theirs.named_parameters()}, config)
    found = nnx.traversals.flatten_mapping(loaded["generators"]["picture"])
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=".".join(path))
    trained = {
        ("generators", "picture", *numbered(path)): np.asarray(x) + 1 for path, x in found.items()
    }
    structs = nnx.traversals.unflatten_mapping(trained)
    checkpoint = SimpleNamespace(
        structs=structs, read=lambda names: {name: trained[name] for name in names}
    )
    (tmp_path / "out").mkdir()
    count = Exporter(model, checkpoint).rewrite(
        HfFolder.open(config.weights), ["picture"], tmp_path / "out"
    )
    before, after = (
        load_file(tmp_path / folder / DIFFUSERS_SINGLE) for folder in ("transformer", "out")
    )
    assert count == len(after) == len(before)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor + 1, err_msg=name)


def test_adapters_are_merged_or_written_for_peft_and_both_predict_the_same(tmp_path):
    theirs = saved(tmp_path / "transformer", drawn.pixart(np.random.default_rng(2)))
    picture = generator_from_hf(tmp_path / "transformer")
    picture = replace(picture, connector=replace(picture.connector, frozen=True), frozen=True)
    llm = DecoderConfig(1, 16, 2, 1, 8, 16, vocab=9, frozen=True)
    rest = LoraConfig(("picture.*.attention.query", "picture.*.up"), 3)
    lora = {"cross": LoraConfig(("picture.*.cross_attention.*",), 2), "rest": rest}
    config = replace(
        load(TINY),
        run=str(tmp_path / "run"),
        model=ModelConfig(llm, {}, lora, {"picture": picture}),
    )
    moved_run(config, 0.3)
    export(tmp_path / "run", tmp_path / "merged")
    export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    merged = PixArtTransformer2DModel.from_pretrained(tmp_path / "merged" / "picture").eval()
    rng = torch.Generator().manual_seed(0)
    side = theirs.config.patch_size * 4
    given = (
        torch.randn(1, theirs.config.in_channels, side, side, generator=rng),
        torch.randn(
            1, 5, theirs.config.caption_channels or theirs.config.cross_attention_dim, generator=rng
        ),
        torch.tensor([300.0]),
        {"resolution": torch.tensor([[64.0, 64.0]]), "aspect_ratio": torch.tensor([[1.0]])},
    )
    before, wanted = (model(*given).sample.detach() for model in (theirs, merged))
    found = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(*given).sample
    assert float((wanted - before).abs().max()) > 0.01 * float(before.abs().max())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_a_tensor_that_the_transformer_lacks_is_refused(tmp_path):
    saved(tmp_path / "transformer", drawn.pixart(np.random.default_rng(0)))
    file = tmp_path / "transformer" / DIFFUSERS_SINGLE
    save_file(load_file(file) | {"adaln_single.more": np.zeros(3, np.float32)}, file)
    model = ModelConfig(
        DecoderConfig(1, 16, 2, 1, 8, 16, vocab=9),
        generators={"picture": generator_from_hf(tmp_path)},
    )
    built = Model.build(model, jnp.float32)
    shardings = parameter_shardings(
        built, make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    )
    with pytest.raises(
        UserError, match=r"1 tensors that this model lacks, such as adaln_single\.more"
    ):
        load_pretrained(built, shardings)


FIELDS = {
    "_class_name": "PixArtTransformer2DModel",
    "caption_channels": 4096,
    "sample_size": 64,
    "num_vector_embeds": None,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_type", "ada_norm_zero"),
        ("norm_elementwise_affine", True),
        ("dropout", 0.1),
        ("attention_type", "gated"),
        ("activation_fn", "geglu"),
        ("out_channels", 3),
        ("cross_attention_dim", 1024),
        ("_class_name", "DiTTransformer2DModel"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(field, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {field: value}))
    with pytest.raises(UserError, match=field):
        generator_from_hf(tmp_path)


@pytest.mark.parametrize("name", ["PixArtTransformer2DModel", "Transformer2DModel"])
def test_pixart_alpha_is_read_as_it_is_by_either_of_its_names(name, tmp_path):
    fields = FIELDS | {
        "_class_name": name,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "dropout": 0.0,
    }
    fields |= {
        "attention_head_dim": 72,
        "num_attention_heads": 16,
        "num_layers": 28,
        "cross_attention_dim": 1152,
    }
    fields |= {
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "in_channels": 4,
    }
    fields |= {
        "out_channels": 8,
        "patch_size": 2,
        "only_cross_attention": False,
        "upcast_attention": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert generator_from_hf(tmp_path) == DiffusionTransformerConfig(
        attention="auto", layers=28, width=1152, heads=16, mlp_width=4608, condition_width=4096, grid=32,
        latents=VaeLatents(), learned_variance=True,
    )  # fmt: skip
