"""Kernels of one device, for `bench gpu`: how exact they are and how fast, beside what others compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import MaskSpec
from mmjax.kernels.grouped_matmul import grouped_matmul
from mmjax.kernels.masked_tiles import KEYS, TILE, TilePlan
from mmjax.kernels.masks import encoder_mask
from mmjax.kernels.tiles import tiles_for
from mmjax.kernels.window_attention import WindowPlan, plan_windows, window_attention
from mmjax.models.attention import attention, plan_attention
from mmjax.models.blockwise_attention import dense_attention
from mmjax.models.gated_delta_net import L2_EPS, gated_delta_rule
from mmjax.runtime.devices import measured_bandwidth

# FLOPs of attention's backward pass over those of its forward pass, as is usual for FlashAttention
BACKWARD = 2.5
ROUNDS = 3  # of which the fastest counts


@dataclass(frozen=True)
class Sizes:
    """Sizes of all sections."""

    lengths: tuple[int, ...] = (4096, 8192, 16_384, 32_768)  # of rows of the LLM
    compared: int = 2048  # tokens of a row whose scores fit in memory
    samples: tuple[int, int] = (1024, 4096)  # shortest and longest sample of a row
    heads: tuple[int, int, int] = (28, 4, 128)  # of queries, of keys, and their width
    vision_heads: int = 16
    vision_widths: tuple[int, ...] = (72, 80)  # of a head
    image: int = 1024  # patches
    window: int = 64  # patches
    patches: int = 41_984  # of a row of images, as in a 7B step
    step_rows: tuple[int, int] = (16_640, 41_984)  # of the LLM and of vision, in a step's products
    sustained: float = 0.5  # seconds that a product runs for at least
    # rows, experts, input and output channels
    experts: tuple[int, int, int, int] = (131_072, 128, 2048, 768)
    # tokens, heads of keys and of values, and their width: those of Qwen3.5
    delta_net: tuple[int, int, int, int] = (16_384, 16, 32, 128)
    looped: int = 512  # tokens of a row that a loop goes over in float64
    calls: int = 5  # of a program in a round
    copied: int = 2**30  # bytes
    tokens: int = 16_384  # of a row of a step
    tiny: bool = False  # models of a step, and its samples


TINY = Sizes(
    lengths=(64, 128), compared=64, samples=(16, 40), heads=(4, 2, 16), vision_heads=2, vision_widths=(8,), image=32,
    window=8, patches=64, step_rows=(64, 128), sustained=0.001, experts=(256, 4, 64, 32), delta_net=(256, 2, 4, 16),
    looped=100, calls=1, copied=2**20, tokens=256, tiny=True,
)  # fmt: skip


def call_seconds(
    program: Callable[..., Any], *inputs: Any, calls: int, rounds: int = ROUNDS
) -> float:
    """Time one call of a compiled program, in the fastest of some rounds of several calls."""
    jax.block_until_ready(program(*inputs))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            out = program(*inputs)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds)


def sustained_seconds(program: Callable[..., Any], *inputs: Any, least: float) -> float:
    """Time one call of a program that runs for at least so many seconds, in which a device clocks down."""
    once = call_seconds(program, *inputs, calls=1, rounds=1)
    return call_seconds(program, *inputs, calls=max(1, int(least / once)), rounds=1)


# --------------------------------------------------------------------------------------------------
# inputs


def text_mask(length: int, samples: tuple[int, int]) -> tuple[MaskSpec, int]:
    """Fill a causal row with samples of random lengths; return its mask and the allowed pairs."""
    low, high = samples
    drawn = np.random.default_rng(0).integers(low, high, length // low + 1, endpoint=True)
    sample = np.repeat(np.arange(len(drawn)), drawn)[None, :length].astype(np.int32)
    counts = np.bincount(sample[0]).astype(np.int64)
    ones = np.ones_like(sample)
    pos = np.arange(length, dtype=np.int32)[None]
    mask = MaskSpec(sample=sample, pos=pos, span=0 * pos, kind=ones, sees=ones)
    return jax.tree.map(jnp.asarray, mask), int((counts * (counts + 1) // 2).sum())


def image_mask(length: int, image: int, window: int = 0) -> tuple[MaskSpec, int]:
    """Fill a row with images of so many patches, attended as a whole or in windows; return mask and allowed pairs."""
    patch = jnp.arange(length, dtype=jnp.int32)[None]
    mask = encoder_mask(patch // image)
    if window:
        # Patches in the order of the windows, which are numbered anew in every image.
        mask = mask._replace(span=1 + patch % image // window, sees=0 * patch)
    return mask, length * (window or image)


def draw(
    length: int, heads: int, kv_heads: int, width: int, dtype: Any = jnp.bfloat16
) -> list[jax.Array]:
    """Draw queries, keys, values and the gradient of the output of one row."""
    counts = (heads, kv_heads, kv_heads, heads)
    keys = jax.random.split(jax.random.key(0), len(counts))
    return [
        jax.random.normal(k, (1, length, n, width), dtype)
        for k, n in zip(keys, counts, strict=True)
    ]


def with_gradients(
    function: Callable[..., jax.Array], count: int = 3
) -> Callable[..., tuple[jax.Array, ...]]:
    """Make the program of a function's output and gradients: `(*inputs, d_out, *others)`, of so many inputs."""

    @jax.jit
    def program(*arrays: Any) -> tuple[jax.Array, ...]:
        inputs, d_out, others = arrays[:count], arrays[count], arrays[count + 1 :]
        out, backward = jax.vjp(lambda *inputs: function(*inputs, *others), *inputs)
        return out, *backward(d_out.astype(out.dtype))

    return program


def rates(
    label: str,
    function: Callable[..., jax.Array],
    arrays: Sequence[Any],
    flops: tuple[float, float],
    calls: int,
    count: int = 3,
) -> dict[str, float]:
    """Measure the TFLOP/s of a function, forward and backward, with these FLOPs. arrays: as of `with_gradients`."""
    forward = call_seconds(jax.jit(function), *arrays[:count], *arrays[count + 1 :], calls=calls)
    both = call_seconds(with_gradients(function, count), *arrays, calls=calls)
    backward = max(both - forward, 1e-9)
    return {
        f"{label}forward TFLOP/s": flops[0] / forward / 1e12,
        f"{label}backward TFLOP/s": flops[1] / backward / 1e12,
    }


def attention_flops(pairs: int, heads: int, width: int) -> tuple[float, float]:
    """Count the FLOPs of attention's forward and backward pass."""
    forward = 4.0 * pairs * heads * width
    return forward, BACKWARD * forward


def flash(q: jax.Array, k: jax.Array, v: jax.Array, mask: MaskSpec, plan: Any = None) -> jax.Array:
    """Attend with the kernel."""
    return attention(q, k, v, mask, "flash", plan=plan)


def in_windows(*operands: Any) -> jax.Array:
    """Attend with the kernel of windows. operands: q, k, v and a mask, or its plan."""
    *arrays, mask = operands
    plan = mask if isinstance(mask, WindowPlan) else plan_windows(mask)
    return window_attention(
        *arrays, plan, arrays[0].shape[-1] ** -0.5, jax.default_backend() == "cpu"
    )


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend causally over the whole row with cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


# --------------------------------------------------------------------------------------------------
# sections


def device(sizes: Sizes) -> dict[str, Any]:
    """Name the device, its memory and the versions that drive it."""
    first = jax.devices()[0]
    return {
        "device": first.device_kind,
        "sizes": "tiny" if sizes.tiny else "full",
        "platform": first.platform,
        "devices": jax.device_count(),
        "GB for programs": (first.memory_stats() or {}).get("bytes_limit", 0) / 1e9,
        "JAX": jax.__version__,
        "driver": " ".join(first.client.platform_version.split()),
        "memory GB/s": measured_bandwidth(first, sizes.copied) / 1e9,
    }


def exactness(sizes: Sizes) -> dict[str, Any]:
    """Compare the kernel with dense attention in float32: the largest error over the largest value."""
    heads, kv_heads, width = sizes.heads
    cases = {
        f"text {heads}/{kv_heads} x {width}": (
            sizes.heads,
            [text_mask(sizes.compared, sizes.samples)[0]],
            flash,
        )
    }
    image = min(sizes.image, sizes.compared // 2)
    masks = [image_mask(sizes.compared, image, window)[0] for window in (0, sizes.window)]
    for width in sizes.vision_widths:
        shape = sizes.vision_heads, sizes.vision_heads, width
        cases[f"images {sizes.vision_heads} x {width}"] = shape, masks, flash
        cases[f"windows {sizes.vision_heads} x {width}"] = shape, masks[1:], in_windows
    figures: dict[str, Any] = {}
    repeatable = True
    exact = with_gradients(lambda q, k, v, mask: dense_attention(q, k, v, mask, mask))
    for (name, (shape, masks, function)), dtype in product(cases.items(), ("float32", "bfloat16")):
        if function is in_windows and dtype == "float32" and not sizes.tiny:
            continue  # which takes minutes to compile, and towers attend by lists
        inputs = draw(sizes.compared, *shape, dtype)
        kernel = with_gradients(function)
        errors = []
        for mask in masks:
            with jax.default_matmul_precision("highest"):
                expected = exact(*(x.astype(jnp.float32) for x in inputs), mask)
            results = kernel(*inputs, mask)
            pairs = zip(results, expected, strict=True)
            errors.append([float(jnp.abs(x - e).max() / jnp.abs(e).max()) for x, e in pairs])
            repeated = kernel(*inputs, mask)
            repeatable &= all(bool((x == y).all()) for x, y in zip(results, repeated, strict=True))
        output, *gradients = np.max(errors, axis=0).tolist()
        figures[f"{name} {dtype}, error of output"] = output
        figures[f"{name} {dtype}, error of gradients"] = max(gradients)
    return figures | {"repeatable to the bit": repeatable}


def text_attention(sizes: Sizes) -> dict[str, Any]:
    """Measure causal attention of packed rows, of whole rows, and cuDNN's of whole rows, by length."""
    heads, kv_heads, width = sizes.heads
    figures: dict[str, Any] = {}
    for length in sizes.lengths:
        inputs = draw(length, *sizes.heads)
        for name, samples in (("packed", sizes.samples), ("one sample", (length, length))):
            mask, pairs = text_mask(length, samples)
            plan = plan_attention(mask, "flash", width, (heads, kv_heads), inputs[0].dtype)
            flops = attention_flops(pairs, heads, width)
            arrays = (*inputs, mask, plan)
            figures |= rates(f"{length} {name}, ", flash, arrays, flops, sizes.calls)
            hopper = isinstance(plan, TilePlan)
            figures[f"{length} {name}, kernel"] = "Mosaic" if hopper else "Triton"
            tile = tiles_for(width, length).forward
            blocks = (plan.by_query.blocks if hopper else plan.forward).count[..., 1].sum()
            visited = int(blocks) * (TILE * KEYS if hopper else tile.q * tile.k)
            figures[f"{length} {name}, allowed / visited pairs"] = pairs / visited
        try:
            figures |= rates(f"{length} one sample, cuDNN ", cudnn, inputs, flops, sizes.calls)
        except Exception as error:
            figures[f"{length} one sample, cuDNN"] = first_line(error)
    return figures


def image_attention(sizes: Sizes) -> dict[str, Any]:
    """Measure attention of images, whole and in windows, by lists and by the kernel of windows, by a head's width."""
    figures: dict[str, Any] = {}
    heads = sizes.vision_heads
    for width in sizes.vision_widths:
        inputs = draw(sizes.patches, heads, heads, width)
        for name, window in (("whole", 0), ("windows", sizes.window)):
            mask, pairs = image_mask(sizes.patches, sizes.image, window)
            plan = plan_attention(mask, "flash", width, (heads, heads), inputs[0].dtype)
            label = f"{heads} x {width} {name}, "
            flops = attention_flops(pairs, heads, width)
            figures |= rates(label, flash, (*inputs, mask, plan), flops, sizes.calls)
        label = f"{heads} x {width} windows, kernel of windows, "
        figures |= rates(label, in_windows, (*inputs, plan_windows(mask)), flops, sizes.calls)
    return figures


def grouped_products(sizes: Sizes) -> dict[str, Any]:
    """Measure the products of experts, forward and backward, beside one product of all rows."""
    rows, experts, width, output = sizes.experts
    shapes = ((rows, width), (experts, width, output), (rows, output))
    x, weights, d_out = (
        jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) for shape in shapes
    )
    rng = np.random.default_rng(0)
    counts = jnp.asarray(rng.multinomial(rows, rng.dirichlet(np.full(experts, 4.0))), jnp.int32)
    interpret = jax.default_backend() == "cpu"

    flops = 2.0 * rows * width * output
    figures = {"largest group / mean": float(counts.max() / counts.mean())}
    for name, multiply in (
        ("kernel", lambda x, weights: grouped_matmul(x, weights, counts, interpret)),
        ("one matrix", lambda x, weights: x @ weights[0]),
    ):
        arrays = (x, weights, d_out)
        figures |= rates(f"{name}, ", multiply, arrays, (flops, 2 * flops), sizes.calls, count=2)
    return figures


def delta_net(sizes: Sizes) -> dict[str, Any]:
    """Measure the recurrence of one layer of gated delta nets, and its errors beside a loop over tokens in float64."""
    length, *shape = sizes.delta_net
    delta_rule = with_gradients(_delta_rule, len(DELTA_INPUTS))
    figures: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        inputs, d_out = delta_inputs(length, *shape, dtype)
        sample = jnp.arange(length, dtype=jnp.int32)[None] // (length // 4)
        seconds = {
            "forward": call_seconds(jax.jit(_delta_rule), *inputs, sample, calls=1),
            "with gradients": call_seconds(delta_rule, *inputs, d_out, sample, calls=1),
        }
        figures |= {f"{dtype} {name}, ms": 1e3 * value for name, value in seconds.items()}
    for dtype, repeated in product(("bfloat16", "float32"), (False, True)):
        inputs, d_out = delta_inputs(sizes.looped, *shape, dtype, repeated)
        # borders inside a chunk, at its end and behind its first token
        borders = np.array([1, 64, 65, 127, 140])
        sample = np.searchsorted(borders, np.arange(sizes.looped), side="right")[None]
        results = delta_rule(*inputs, d_out, jnp.asarray(sample, jnp.int32))
        expected = looped_delta_rule(inputs, d_out, sample)
        for name, x, e in zip(("output", *DELTA_INPUTS), results, expected, strict=True):
            error = np.abs(np.asarray(x, np.float64) - e).max() / np.abs(e).max()
            label = f"{dtype}{', repeated tokens' if repeated else ''}, error of {name}"
            figures[label] = float(error)
    return figures


DELTA_INPUTS = ("q", "k", "v", "g", "beta")


def _delta_rule(*arrays: jax.Array) -> jax.Array:
    return gated_delta_rule(*arrays)[0]


def delta_inputs(
    length: int, key_heads: int, value_heads: int, width: int, dtype: str, repeated: bool = False
) -> tuple[list[jax.Array], jax.Array]:
    """Draw a row of `DELTA_INPUTS` and the gradient of its output; some decays are as large as they may be.

    repeated: all keys are equal, and hardly anything decays.
    """
    heads = (key_heads, key_heads, value_heads, value_heads)
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, d_out = (
        jax.random.normal(key, (1, length, n, width), dtype)
        for key, n in zip(keys, heads, strict=False)
    )
    g, beta = (jax.random.normal(key, (1, length, value_heads)) for key in keys[4:])
    if repeated:
        k = jnp.broadcast_to(k[:, :1], k.shape)
        return [q, k, v, jnp.full_like(g, -1e-3), jnp.full_like(beta, 0.99)], d_out
    g = (-jax.nn.softplus(g)).at[:, ::20].set(-300.0)
    return [q, k, v, g, jax.nn.sigmoid(beta)], d_out


def looped_delta_rule(
    inputs: Sequence[jax.Array], d_out: jax.Array, sample: np.ndarray
) -> list[np.ndarray]:
    """Compute the delta rule's output and gradients one token after the other, in float64 on the CPU."""
    group = inputs[2].shape[2] // inputs[1].shape[2]
    begins = np.diff(sample[0], prepend=-1) != 0

    def loop(*arrays: jax.Array) -> jax.Array:
        q, k, v, g, beta = (x[0] for x in arrays)

        def heads(x: jax.Array) -> jax.Array:
            normalized = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + L2_EPS)
            return jnp.repeat(normalized, group, axis=1)

        def advance(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            q, k, v, g, beta, begins = token
            state = jnp.where(begins, 0, state * jnp.exp(g)[:, None, None])
            change = beta[:, None] * (v - jnp.einsum("hk,hkv->hv", k, state))
            state = state + k[..., None] * change[:, None]
            return state, jnp.einsum("hk,hkv->hv", q, state)

        state = jnp.zeros((v.shape[1], k.shape[-1], v.shape[-1]))
        tokens = (heads(q) * q.shape[-1] ** -0.5, heads(k), v, g, beta, begins)
        return jax.lax.scan(advance, state, tokens)[1][None]

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = [np.asarray(x, np.float64) for x in (*inputs, d_out)]
        return [np.asarray(x) for x in with_gradients(loop, len(inputs))(*exact)]


def first_line(error: BaseException) -> str:
    """Say what an error is on one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
