"""The same weights in transformers and here: logits of packed rows against samples one by one, and gradients."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode

from mmjax.batch import PADDING, Microbatch, TextBatch
from mmjax.config import MeshConfig, ModelConfig
from mmjax.hf import class_defaults
from mmjax.hf.families import from_hf, layout_of
from mmjax.hf.folder import HfFolder, split_entry
from mmjax.hf.layout import Layout, TensorSlice
from mmjax.losses.cross_entropy import mean_loss, token_losses
from mmjax.models.layer_stacks import unstack_layers
from mmjax.models.model import Model, module_of
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained

Params = dict[str, Any]
Loss = Callable[[torch.nn.Module], torch.Tensor]  # of a model there, over the samples of a test
AT_A_KINK = 2e-6  # inputs of a ReLU this close to 0 may have either sign by rounding
ULP = 2.0**-23  # of float32, over the value
ULP_DRAWS = 8
NO_ROUNDING = 1e-2  # over the largest value: no difference as large passes as rounding


def random_model(
    config: transformers.PreTrainedConfig, kind: type | None = None, seed: int = 0
) -> torch.nn.Module:
    """A model in float32 whose every parameter is random: norms and biases too, or they would prove nothing."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    for part in (config, config.get_text_config()):
        # its grouped products want widths that are multiples of 4
        part._experts_implementation = "eager"
    model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
    model = converted(model, torch.float32).eval()
    randomize(model)
    watch_kinks(model)
    return model


def converted(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in another precision, but for complex buffers, whose imaginary part PyTorch would drop."""
    kept = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    model.to(dtype)
    for module, name, buffer in kept:
        setattr(module, name, buffer)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Draw every parameter, around 1 where it is a scale."""
    with torch.no_grad():
        draw_bounds(model)
        for buffer in corrections(model):
            buffer.add_(torch.randn_like(buffer), alpha=0.2)
        for parameter in model.parameters():
            spread = 0.2 if parameter.ndim < 2 else 1.3 / max(parameter[0].numel(), 1) ** 0.5
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.normal_(centre, spread)


@torch.no_grad()
def draw_bounds(model: torch.nn.Module) -> None:
    """Make the bounds of linear layers finite, and near enough to clip something."""
    for buffer in corrections(model):
        if buffer.isinf().all():
            buffer.copy_(torch.copysign(torch.rand(()) + 1.2, buffer))


def watch_kinks(model: torch.nn.Module) -> None:
    """Record in `model.nearest_kink` how close the input of a ReLU or a clamp has come to where its gradient jumps."""
    model.nearest_kink = float("inf")

    def watch(module: torch.nn.Module, kinks: Sequence[torch.Tensor], of_output: bool) -> None:
        def record(
            module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> None:
            x = (output if of_output else inputs[0]).detach()
            # What is exactly at one is so in every program, as what is made of zeros behind a clip.
            away = [(x - kink).abs() for kink in kinks]
            nearest = [float(y[y > 0].min()) for y in away if (y > 0).any()]
            model.nearest_kink = min(model.nearest_kink, *nearest)

        module.register_forward_hook(record)

    for module in model.modules():
        if isinstance(module, torch.nn.ReLU):
            watch(module, [torch.zeros(())], False)
        if hasattr(module, "input_min"):
            watch(module, [module.input_min, module.input_max], False)
            watch(module.linear, [module.output_min, module.output_max], True)


def leave_out_defaults(folder: Path) -> None:
    """Take from a folder's config every field that is a default of its class, as published configs do."""

    def plain(values: dict[str, Any], kind: str) -> dict[str, Any]:
        entry = classes[kind]
        defaults, parts = entry["defaults"], entry.get("parts", {})
        own = {k: v for k, v in values.items() if k not in defaults or defaults[k] != v}
        types = {name: parts[name]["type"] for name in parts.keys() & own.keys()}
        kinds = {name: own[name].get("model_type", kind) for name, kind in types.items()}
        return own | {name: plain(own[name], kind) for name, kind in kinds.items()}

    classes = json.loads(Path(class_defaults.__file__).with_suffix(".json").read_text())["configs"]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(plain(config, config["model_type"])))


def loaded(folder: Path) -> tuple[Model, Params, ModelConfig]:
    """The model of a folder with its weights, on one device."""
    config = from_hf(folder)
    model = Model.build(config, jnp.float32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return model, load_pretrained(model, parameter_shardings(model, mesh, ShardingRules())), config


def packed_text(samples: Sequence[np.ndarray], length: int, rows: int = 1) -> TextBatch:
    """Rows of text samples one after the other, every token of a sample but the first a target."""
    shape = (rows, length)
    full = lambda value: np.full(shape, value, np.int32)  # noqa: E731
    text = TextBatch(
        *(full(0), full(0), np.zeros(shape, np.float32), full(0), full(PADDING)),
        np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        *(full(0), full(1), full(1), full(PADDING), full(PADDING), full(0), {}, {}),
    )
    at, row = 0, 0
    for number, tokens in enumerate(samples):
        if at + len(tokens) > length:
            at, row = 0, row + 1
        here = slice(at, at + len(tokens))
        text.token[row, here], text.sample[row, here] = tokens, number
        text.position[row, here] = text.offset[row, here] = np.arange(len(tokens))
        text.target[row, here][:-1], text.weight[row, here][:-1] = tokens[1:], 1
        text.source[row, here], text.owner[row, here] = 0, number
        at += len(tokens)
    return text


def logits_there(model: torch.nn.Module, tokens: np.ndarray, **inputs: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor(tokens)[None].long(), use_cache=False, **inputs).logits[0]


def forget_longer_texts(model: torch.nn.Module) -> None:
    """Reset what dynamic RoPE there keeps of the longest text so far, which turns all shorter ones after it."""
    # A tower's rotary embedding is never dynamic, and has no such length.
    for module in (module for module in model.modules() if hasattr(module, "original_max_seq_len")):
        for name, original in dict(module.named_buffers(recurse=False)).items():
            # with the layer's type before it where types differ
            if name.endswith("original_inv_freq"):
                kind = name.removesuffix("original_inv_freq")
                setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)
                module.register_buffer(f"{kind}inv_freq", original.clone(), persistent=False)


def same_logits(
    ours: np.ndarray, theirs: torch.Tensor, number: int, model: torch.nn.Module, logits_there: Loss
) -> None:
    """Hold the logits of sample `number` equal to 1e-4 of the largest, or of 1.

    Where the model itself enlarges rounding, no two programs in float32 are so close: the gated
    norm of a delta net does, thousands of times, of outputs that are nearly 0. A token may then be
    as far from float64 as an ulp moves it.
    logits_there: of this sample, by a model there.
    """
    wanted = theirs.detach().numpy()
    scale = max(1.0, np.abs(wanted).max())
    limit = np.full((len(wanted), 1), 1e-4 * scale)
    if (np.abs(ours - wanted) > limit).any():
        runs = (logits.numpy() for logits in near_float64(model, torch.no_grad()(logits_there)))
        wanted = next(runs)
        if (np.abs(ours - wanted) > limit).any():
            moves = np.max(
                [np.abs(moved - wanted).max(-1, keepdims=True) for moved in runs], axis=0
            )
            limit = np.clip(moves, limit, NO_ROUNDING * scale)
    difference = np.abs(ours - wanted)
    worst = int(np.argmax((difference - limit).max(-1)))
    assert (difference <= limit).all(), (
        f"sample {number}, token {worst}: {difference[worst].max():.1e} where {limit[worst, 0]:.1e} is allowed"
    )


def check_text(
    model: torch.nn.Module, folder: Path, samples: Sequence[np.ndarray], length: int
) -> None:
    """Logits of packed samples to 1e-4, and the gradient of the mean loss over all of them."""
    ours, params, _ = loaded(folder)
    text = packed_text(samples, length)
    batch = jax.tree.map(jnp.asarray, Microbatch(text, {}))
    logits, gradients = logits_and_gradients(ours, params, batch)
    count = sum(len(tokens) - 1 for tokens in samples)

    def loss_there(model: torch.nn.Module, compare: bool = False) -> torch.Tensor:
        losses = []
        for number, tokens in enumerate(samples):
            forget_longer_texts(model)
            theirs = logits_there(model, tokens)
            row, at = np.argwhere(text.sample == number)[0]
            if compare:
                ours_here = logits[row, at : at + len(tokens)]
                same_logits(ours_here, theirs, number, model, partial(logits_there, tokens=tokens))
            targets = torch.tensor(tokens[1:]).long()
            losses.append(torch.nn.functional.cross_entropy(theirs[:-1], targets, reduction="sum"))
        return sum(losses) / count

    loss_there(model, compare=True).backward()
    compare_gradients(ours, gradients, model, loss_there)


def logits_and_gradients(
    ours: Model, params: Params, batch: Microbatch
) -> tuple[np.ndarray, Params]:
    """Compute logits, and the gradient of the mean loss by every parameter, in one program."""
    count = float(np.asarray(batch.text.weight).sum())

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        logits = ours.logits(params, batch)
        return mean_loss(token_losses(logits, batch.text), count), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return np.asarray(logits), gradients


def compare_gradients(
    ours: Model, gradients: Params, model: torch.nn.Module, loss_there: Loss
) -> None:
    """Compare every parameter's gradient, in its own place of the checkpoint's layout, with what the model there holds.

    Not where an input of a ReLU is 0 but for rounding: its gradient is then 0 here and 1 there, and
    both are right. Where drawn norms and caps enlarge rounding, ours may be four times as far from
    float64 as those there are, or as far as an ulp moves them.
    """
    if getattr(model, "nearest_kink", 1.0) < AT_A_KINK:
        return
    untouched = copy.deepcopy(model)
    theirs = saved_gradients(model)
    layout = layout_of(theirs, moved(ours.config, theirs.path))
    if not different_gradients(gradients, layout, theirs):
        return
    runs = near_float64(untouched, partial(gradients_there, loss_there=loss_there))
    exact = next(runs)
    if different_gradients(gradients, layout, exact, theirs):
        different = different_gradients(gradients, layout, exact, theirs, list(runs))
        assert not different, different


def moved(config: ModelConfig, folder: Path) -> ModelConfig:
    """The model with its weights in another folder."""
    encoders = {
        name: replace(e, weights=str(folder), connector=replace(e.connector, weights=str(folder)))
        for name, e in config.encoders.items()
    }
    return replace(config, llm=replace(config.llm, weights=str(folder)), encoders=encoders)


def gradients_there(model: torch.nn.Module, loss_there: Loss) -> HfFolder:
    """Compute the gradients of a model there, in the places of its parameters."""
    model.zero_grad()
    loss_there(model).backward()
    return saved_gradients(model)


def near_float64(
    model: torch.nn.Module, compute: Callable[[torch.nn.Module], Any]
) -> Iterator[Any]:
    """Compute something of a model in float64, then several times of one that is off by an ulp of float32."""
    for seed in (None, *range(ULP_DRAWS)):
        with in_float64(model) as exact:
            if seed is not None:
                add_ulp_errors(exact, torch.Generator().manual_seed(seed))
            yield compute(exact)


def add_ulp_errors(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Put errors of up to an ulp of float32 into the parameters, and into what every innermost module gives.

    A sum of products in float32 is the exact one of numbers that are off by at least as much
    (backward error).
    """

    def inexact(x: Any) -> Any:
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            return x
        return x * (1 + ULP * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))

    def err(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        return tuple(map(inexact, output)) if isinstance(output, tuple) else inexact(output)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(inexact(parameter))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(err)


class Float64(TorchFunctionMode):
    """Compute in float64 what asks for float32, as norms, softmax and delta nets there do whatever they are given."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        double = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(
            *map(double, args), **{name: double(x) for name, x in (kwargs or {}).items()}
        )


@contextmanager
def in_float64(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Give a copy of a model in float64; every module casts what it is given."""

    def cast(
        module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        double = lambda x: (  # noqa: E731
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        )
        return tuple(map(double, args)), {name: double(x) for name, x in kwargs.items()}

    exact = converted(copy.deepcopy(model), torch.float64)
    for module in exact.modules():
        module.register_forward_pre_hook(cast, with_kwargs=True)
    with Float64():
        yield exact


def same_gradients(ours: Params, layout: Layout, theirs: HfFolder) -> None:
    """Hold every gradient equal to 2e-4 of its largest, by the checkpoint's layout."""
    different = different_gradients(ours, layout, theirs)
    assert not different, different


def different_gradients(
    ours: Params,
    layout: Layout,
    theirs: HfFolder,
    rounded: HfFolder | None = None,
    perturbed: Sequence[HfFolder] = (),
) -> dict[str, str]:
    """Return by how much gradients differ by more than 2e-4 of their largest, and what is allowed.

    rounded: theirs in float32 where `theirs` are exact; a gradient may be four times as far off as
    these are.
    perturbed: of models that are off by an ulp; a gradient may be as far off as the farthest of
    these.
    """
    different = {}
    largest = max(float(np.abs(gradient).max()) for gradient in jax.tree.leaves(ours))
    for path, gradient in jax.tree.leaves_with_path(unstack_layers(ours)):
        names = tuple(key.key for key in path)
        inside = names[1:] if names[0] == "llm" else names[2:]
        part = layout.modules[module_of(names)].find(inside)
        wanted = stored_parameter(theirs, part, gradient.shape)
        scale = max(np.abs(wanted).max(), 1e-3)
        if names[-2:] == ("key", "bias"):
            # It moves all scores of a query alike, so without RoPE its gradient is but rounding of
            # sums of others.
            scale = max(scale, 1e-3 * largest)
        limit = 2e-4 * scale
        if rounded is not None:
            limit = max(
                limit, 4 * np.abs(stored_parameter(rounded, part, gradient.shape) - wanted).max()
            )
        if perturbed:
            moves = [
                np.abs(stored_parameter(folder, part, gradient.shape) - wanted).max()
                for folder in perturbed
            ]
            limit = max(limit, min(max(moves), NO_ROUNDING * scale))
        difference = np.abs(np.asarray(gradient) - wanted).max()
        if not difference <= limit:  # NaN is different too
            different[".".join(names)] = f"{difference:.1e} where {limit:.1e} is allowed"
    return different


def stored_parameter(folder: HfFolder, part: TensorSlice, shape: tuple[int, ...]) -> np.ndarray:
    """Read the parameter of this shape that a checkpoint has here, each expert's own."""
    parts = part.split(shape)
    tensors = {name: folder.read(name) for name in {split_entry(one.key)[0] for one, _ in parts}}
    return np.stack(
        [one.from_hf(one.selected(tensors[split_entry(one.key)[0]]), s) for one, s in parts]
    ).reshape(shape)


def adamw_there(model: torch.nn.Module) -> torch.optim.AdamW:
    """Make the optimizer there; as here, decay falls on matrices alone."""
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim > 1) == matrices],
            "weight_decay": 0.1 * matrices,
        }
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


def corrections(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers that a checkpoint has: what routers add to scores to choose, scales of layers' outputs.

    Gemma 4's numbers of every channel too, and the bounds of its linear layers.
    """
    kept = ("e_score_correction_bias", "layer_scalar", "std_bias", "std_scale")
    kept += ("input_min", "input_max", "output_min", "output_max")
    return [x for name, x in model.named_buffers() if name.endswith(kept)]


def saved_gradients(model: torch.nn.Module) -> HfFolder:
    """The gradients in the places of their parameters, saved as a checkpoint: under the names that these have there."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        for buffer in corrections(model):  # which learn nothing
            buffer.zero_()
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return HfFolder.open(folder)
