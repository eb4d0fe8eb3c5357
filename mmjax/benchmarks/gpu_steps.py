"""Whole training steps of models in the shape of Qwen2.5-VL on one device, and their products, for `bench gpu`."""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.batch import PADDING
from mmjax.benchmarks.corpora import visual_corpus
from mmjax.benchmarks.gpu_kernels import Sizes, sustained_seconds
from mmjax.benchmarks.harness import seconds_of, timed
from mmjax.benchmarks.synthetic_run import RandomSamples, Trainer, fit_data, prepare
from mmjax.config import (
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    FunctionSource,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    Tokens,
    TrainingConfig,
    VisionConfig,
)
from mmjax.config.loading import apply_overrides
from mmjax.cost.table import parameters
from mmjax.data.sample import SampleLengths, Split
from mmjax.errors import UserError
from mmjax.models.float8 import float8_products
from mmjax.planning.memory import GB
from mmjax.planning.remat import RunPlan
from mmjax.runtime.devices import CompileCounter, peak_flops, peak_memory_used
from mmjax.training.rate_probe import SAMPLES as PROBED_SAMPLES
from mmjax.training.rate_probe import (
    ProbedRow,
    fit_rates,
    fullest_pairs,
    time_gradients,
    with_samples,
)
from mmjax.training.run_data import RunData

STEPS = 5  # that are timed, after two that are not
TOP = 20  # kernels of a profile
CORPUS = 2000  # samples
WARM_SECONDS = 20.0  # until a card has the clock of a long run
ROWS = 60  # that are predicted, of each kind as many
FP8_CAPABILITY = 8.9
RANKS = 8  # of which one is run
KINDS = ("1", "16", "64", "mixed")  # samples in a row


QWEN = {
    "rope_theta": 1e6,
    "rope_sections": (16, 24, 24),
    "biases": ("query", "key", "value"),
    "attention": "auto",
}
LLM_7B = DecoderConfig(28, 3584, 28, 4, 128, mlp_width=18_944, vocab=152_064, tied=False, **QWEN)
LLM_3B = DecoderConfig(36, 2048, 16, 2, 128, mlp_width=11_008, vocab=151_936, tied=True, **QWEN)
VISION = VisionConfig(
    layers=32,
    width=1280,
    heads=16,
    mlp_width=3420,
    patch=14,
    frames=2,
    window=8,
    windowed=tuple(i for i in range(32) if i not in (7, 15, 23, 31)),
    embed_bias=False,
    head_norm=False,
    norm="rms",
    activation="silu",
    gated=True,
    biases=("query", "key", "value", "output", "gate", "up", "down"),
    connector=ConnectorConfig(merge=2, mlp_width=5120, norm="rms", activation="gelu"),
    attention="auto",
)
LORA = LoraConfig(("llm.layers.*",), rank=16, alpha=32.0)  # on every linear layer
MODELS = {
    "7b": ModelConfig(LLM_7B, {"vision": VISION}),
    "3b": ModelConfig(LLM_3B, {"vision": VISION}),
    "lora_7b": ModelConfig(LLM_7B, {"vision": replace(VISION, frozen=True)}, lora={"llm": LORA}),
    # what PyTorch can train beside
    "decoder": ModelConfig(replace(LLM_7B, layers=4, rope_sections=())),
}


def _tiny(model: ModelConfig) -> ModelConfig:
    small = {"layers": 2, "width": 32, "heads": 4, "mlp_width": 48}
    llm = replace(model.llm, **small, kv_heads=2, head_width=8, vocab=64)
    llm = replace(llm, rope_sections=(1, 1, 2) if llm.rope_sections else ())
    encoders = {
        name: replace(
            encoder, **small, windowed=(0,), connector=replace(encoder.connector, mlp_width=48)
        )
        for name, encoder in model.encoders.items()
    }
    return replace(model, llm=llm, encoders=encoders)


def visual_samples(split: Split, vocab: int, tile: int, scale: int) -> RandomSamples:
    """Make samples with the lengths of `visual_corpus`: tiles of an image, then text.

    tile: pixels of a tile's side; 0: text alone, of as many tokens. scale: that the text's lengths
    are divided by.
    """
    del split
    corpus = visual_corpus(CORPUS, 0)
    tiles = corpus["vision_items"] * (tile > 0)
    text = np.maximum((corpus["llm_tokens"] - 256 * tiles) // scale, 4)
    lengths = [
        SampleLengths(tokens, (("vision", (tile, tile)),) * count)
        for tokens, count in zip(text.tolist(), tiles.tolist(), strict=True)
    ]
    return RandomSamples(lengths, vocab, channels=3)


def make_config(sizes: Sizes, name: str, changes: Sequence[str] = ()) -> Config:
    """Return the config of full tuning in bfloat16 with rows of about so many tokens, one of each module a step."""
    model = _tiny(MODELS[name]) if sizes.tiny else MODELS[name]
    tile = (model.encoders["vision"].patch * (4 if sizes.tiny else 32)) if model.encoders else 0
    arguments = {"vocab": model.llm.vocab, "tile": tile, "scale": 32 if sizes.tiny else 1}
    config = Config(
        name="gpu",
        data=DataConfig(
            {"made": FunctionSource("mmjax.benchmarks.gpu_steps:visual_samples", arguments)},
            workers=0,
        ),
        batch=BatchConfig(
            Tokens(sizes.tokens),
            dict.fromkeys(("llm", *model.encoders), 1),
            alignment=128,
            shapes=1,
        ),
        model=model,
        training=TrainingConfig(steps=100, precision="bfloat16"),
        mesh=MeshConfig(),
    )
    return apply_overrides(config, changes)


def _fit(config: Config, mesh: jax.sharding.Mesh, data: RunData) -> tuple[Config, RunPlan]:
    """Plan full tuning, with three quarters of the LLM's layers until it fits. Raises UserError where one does not."""
    while True:
        try:
            return fit_data(config, mesh, data)
        except UserError:
            llm = config.model.llm
            if llm.layers == 1:
                raise
            fewer = replace(llm, layers=llm.layers * 3 // 4)
            config = replace(config, model=replace(config.model, llm=fewer))


def measure_rank(sizes: Sizes, name: str, changes: Sequence[str]) -> dict[str, Any]:
    """Measure a step as one rank of eight with mocked collectives: a rank's time and memory, but no values.

    On eight real devices it is a step of all.
    """
    # Before JAX starts; it does not read the environment for it.
    jax.config.update("jax_mock_gpu_topology", f"1x{RANKS}x1")
    if jax.device_count() != RANKS:
        return {
            "skipped": f"JAX {jax.__version__} mocks no ranks here: {jax.device_count()} devices"
        }
    divided = [f"mesh.fsdp={RANKS}", f"batch.size.count={RANKS * sizes.tokens}", *changes]
    return measure_step(sizes, name, divided, RANKS)


def measure_step(
    sizes: Sizes, name: str, changes: Sequence[str], devices: int = 1
) -> dict[str, Any]:
    """Measure compiling, a step, its MFU and memory, and the kernels that take most of it."""
    whole = make_config(sizes, name, changes)
    config, plan, _, executor, steps = prepare(whole, jax.devices()[:devices], 2 + STEPS, _fit)
    trainer = Trainer.start(config, executor)
    programs = CompileCounter()
    _, compiling = timed(executor.compile, trainer.state, steps[0].microbatches, trainer.hyper)
    seconds = []
    for loaded in steps:
        batches = [executor.put(batch) for batch in loaded.microbatches]
        jax.block_until_ready((batches, trainer.state))
        report, taken = timed(trainer.step, batches)
        seconds.append(taken)
    weighed = executor.weigh_batches(batches)
    jax.block_until_ready(weighed.batches)

    def gradients() -> None:
        for batch in weighed.batches:
            trainer.sums = executor.gradients(
                trainer.state, trainer.sums, [batch], weighed.weights, None
            ).sums
        jax.block_until_ready(trainer.sums)

    of_gradients = seconds_of(gradients)
    trainer.sums = executor.zeros()
    kernels = _trace(lambda: trainer.step(batches))
    step = statistics.median(seconds[2:])
    needed = statistics.mean(float(loaded.needed_flops) for loaded in steps[2:])
    useful = statistics.mean(int(loaded.tokens.sum()) for loaded in steps[2:])
    peak = peak_memory_used(executor.mesh)
    peak_rate = peak_flops(list(executor.mesh.devices.flat), config.training.precision)
    rows = zip(("llm", *config.model.encoders), steps[0].lengths[0], strict=True)
    policies = (f"{module} {dict(Counter(p))}" for module, p in plan.policies.items())
    return {
        "layers of the LLM": f"{config.model.llm.layers} of {whole.model.llm.layers}",
        "parameters, billions": sum(parameters(config.model).values()) / 1e9,
        "optimizer": config.optimizer.kind,
        "rows": ", ".join(f"{module} {length}" for module, length in rows),
        "computed again": ", ".join(policies),
        "compiling, s": compiling,
        "programs compiled": programs.compiled,
        "step, s": step,
        "of it forward and backward, s": of_gradients,
        "LLM tokens / s": useful / step,
        "MFU": needed / step / peak_rate,
        "loss": report.mean_loss,
        "memory predicted, GB": plan.device / GB,
        "memory used at most, GB": None if peak is None else peak / GB,
        **kernels,
    }


def step_products(
    model: ModelConfig, rows: int, patches: int
) -> dict[str, tuple[int, int, int, int]]:
    """List the products of a step: rows, channels of input and output, and how many alike."""
    llm = model.llm
    vision = model.encoders["vision"]
    heads = (llm.heads + 2 * llm.kv_heads) * llm.head_width
    return {
        "gate, up": (rows, llm.width, llm.mlp_width, 2 * llm.layers),
        "down": (rows, llm.mlp_width, llm.width, llm.layers),
        "q k v": (rows, llm.width, heads, llm.layers),
        "o": (rows, llm.heads * llm.head_width, llm.width, llm.layers),
        "an eighth of the head": (rows, llm.width, llm.vocab // 8, 8),
        "vision gate, up, down": (
            patches,
            vision.width,
            vision.mlp_width + -vision.mlp_width % 128,
            3 * vision.layers,
        ),
        "vision q, k, v, o": (patches, vision.width, vision.width, 4 * vision.layers),
    }


def measure_products(sizes: Sizes) -> dict[str, Any]:
    """Measure the products of a 7B step: outputs, gradients of rows and of weights, each sustained, and all together.

    In bfloat16, and with quantising in FP8 where the device has it.
    """
    model = _tiny(MODELS["7b"]) if sizes.tiny else MODELS["7b"]
    kinds: dict[str, Callable[..., jax.Array]] = {"bfloat16": jnp.matmul}
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if sizes.tiny or float(capability) >= FP8_CAPABILITY:
        kinds["FP8"] = lambda x, weight: float8_products(x, weight)[0]
    figures: dict[str, Any] = {}
    total = dict.fromkeys(kinds, 0.0)
    for name, (m, k, n, count) in step_products(model, *sizes.step_rows).items():
        # Of noise: a GPU that multiplies ones draws less power, and is faster.
        arrays = [
            jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
            for shape in ((m, k), (k, n), (m, n))
        ]
        for kind, multiply in kinds.items():
            seconds = [
                sustained_seconds(program, *arrays, least=sizes.sustained)
                for program in product_forms(multiply)
            ]
            total[kind] += count * sum(seconds)
            rates = " / ".join(f"{2e-12 * m * k * n / s:.4g}" for s in seconds)
            figures[f"{name} {m} x {k} x {n} {kind}, TFLOP/s"] = rates
    return figures | {
        f"all of a step {kind}, nothing recomputed, s": seconds for kind, seconds in total.items()
    }


def product_forms(multiply: Callable[..., jax.Array]) -> list[Callable[..., jax.Array]]:
    """Make the programs `(rows, weights, gradient of output)` of a product and of the gradients of both."""
    return [
        jax.jit(lambda x, w, d_out: multiply(x, w)),
        jax.jit(lambda x, w, d_out: jax.vjp(lambda x: multiply(x, w), x)[1](d_out)[0]),
        jax.jit(lambda x, w, d_out: jax.vjp(lambda w: multiply(x, w), w)[1](d_out)[0]),
    ]


def measure_rows(sizes: Sizes) -> dict[str, Any]:
    """Predict what rows of `decoder` of all kinds take by the two that a run probes, and measure them."""
    config, _, _, executor, (loaded,) = prepare(
        make_config(sizes, "decoder"), jax.devices()[:1], 1, _fit
    )
    trainer = Trainer.start(config, executor)
    executor.compile(trainer.state, loaded.microbatches, trainer.hyper)
    (batch,) = loaded.microbatches

    def measure(sample: np.ndarray) -> ProbedRow:
        text = with_samples(batch.text, sample)
        row = batch._replace(text=text)
        seconds, _ = time_gradients(executor, trainer.state, trainer.sums, row, None)
        return ProbedRow(min(seconds), fullest_pairs(config.model.llm, text, 1, 1))

    length = batch.text.sample.shape[1]
    one_sample = samples_of([length], length)
    ready = time.monotonic() + (0 if sizes.tiny else WARM_SECONDS)
    while time.monotonic() < ready:
        measure(one_sample)
    one, many = measure(one_sample), measure(np.arange(length)[None] * PROBED_SAMPLES // length)
    figures: dict[str, Any] = {
        "probe of one sample, ms": 1e3 * one.seconds,
        f"probe of {PROBED_SAMPLES} samples, ms": 1e3 * many.seconds,
    }
    rates = fit_rates(1.0, 0.0, 1.0, one, many)
    if rates is None:
        return figures | {"predicted": "nothing, as one sample takes no longer"}
    figures |= {"all positions, ms": 1e3 * rates.position, "1e6 pairs, ms": 1e9 * rates.pair}
    errors: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for number in range(ROWS):
        kind = KINDS[number % len(KINDS)]
        row = measure(samples_of(row_lengths(kind, number // len(KINDS), length, rng), length))
        error = (rates.position + rates.pair * row.pairs) / row.seconds - 1
        errors.setdefault(kind, []).append(abs(error))
        errors.setdefault("all", []).append(abs(error))
    for kind, of_kind in errors.items():
        figures[f"{kind}: largest error"] = max(of_kind)
        figures[f"{kind}: median error"] = statistics.median(of_kind)
    return figures


def row_lengths(kind: str, number: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the lengths of a row's samples, together `length`; one sample leaves up to a quarter of the row empty."""
    if kind == "1":
        return np.array([length - number * length // ROWS])
    samples, spread = (int(rng.integers(2, 40)), 1.5) if kind == "mixed" else (int(kind), 0.5)
    weights = rng.lognormal(0, spread, samples)
    ends = np.round(length * weights.cumsum() / weights.sum()).astype(int)
    return np.diff(ends, prepend=0)


def samples_of(lengths: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """Number the tokens of a row by sample, int `[1, length]`, -1 behind the last."""
    sample = np.repeat(np.arange(len(lengths)), lengths)
    return np.pad(sample, (0, length - len(sample)), constant_values=PADDING)[None]


def _trace(run: Callable[[], Any]) -> dict[str, Any]:
    """Run a step under the profiler; return the kernels that take most of it."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace has room for a million events
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        return top_kernels(Path(folder))


def top_kernels(folder: Path) -> dict[str, Any]:
    """Sum up the time of each kernel in the newest trace of a folder: the longest, with share and number of launches.

    Of a GPU its streams are read; of another device, whose trace has none, all threads.
    """
    path = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {
        (e["name"], e["pid"], e["tid"] if e["name"] == "thread_name" else 0): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and "name" in e["args"]
    }
    # Beside its streams a GPU has lines that name the same time once more, by operation or module.
    streams = {
        (pid, tid)
        for (kind, pid, tid), name in names.items()
        if kind == "thread_name"
        and name.startswith("Stream")
        and "GPU" in names.get(("process_name", pid, 0), "")
    }
    total: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and (not streams or (event["pid"], event["tid"]) in streams):
            total[event["name"]] += event.get("dur", 0.0)
            launches[event["name"]] += 1
    all_ms = total.total() / 1e3
    figures: dict[str, Any] = {"all kernels, ms": all_ms, "launches": launches.total()}
    for rank, (name, us) in enumerate(total.most_common(TOP), start=1):
        share = us / 1e3 / all_ms if all_ms else 0.0
        figures[f"{rank:2} {name[:100]}"] = (
            f"{us / 1e3:.2f} ms, {share:.1%}, {launches[name]} launches"
        )
    return figures
