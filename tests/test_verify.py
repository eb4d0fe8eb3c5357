"""`python -m mmjax.verify`: it passes, and a planted leak is named with the layer that it begins in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from commands import TINY, TINY_MEDIA, run

import mmjax.data.loading.packing as packing
import mmjax.models.audio_encoder as encoders
import mmjax.models.decoder as decoder
from mmjax import verify
from mmjax.config import NoBalance, PostBalance
from mmjax.config.loading import load
from mmjax.data.toy.dataset import ALPHABET
from mmjax.models import gated_delta_net
from mmjax.models.layers import Context, RMSNorm

# Windows in some layers of the towers that can have them.
WINDOWS = (
    "model.encoders.vision.layers=2", "model.encoders.vision.window=2", "model.encoders.vision.windowed=1",
    "model.encoders.vision.feature_layers=1,0", "model.encoders.vision.head_norm=false",
    "model.llm.window=6", "model.llm.windowed=1",
)  # fmt: skip
KINDS = (
    "inputs", "audio embedding", "audio layers, full", "audio connector", "vision positions", "vision embedding",
    "vision layers, full", "vision layers, windowed", "vision connector", "llm positions", "llm embedding",
    "llm layers, full", "llm layers, windowed", "llm final norm", "token losses", "gradients",
)  # fmt: skip
# docs/exactness.md: how the configs of large models are verified on a small machine.
REDUCED = {
    "llm": "layers=2 width=128 heads=4 kv_heads=2 head_width=32 mlp_width=256 vocab=64",
    "encoders.vision": "layers=2 width=96 heads=4 mlp_width=192 patch=4 channels=1 connector.mlp_width=96",
    "encoders.audio": "layers=2 width=96 heads=4 mlp_width=192 connector.mlp_width=96 clips.mels=20 "
    "clips.sample_rate=4000 clips.window=128 clips.hop=64",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words", [["--backend=flash"], ["--backend=dense", "--precision=bfloat16"]], ids=" ".join
)
def test_every_kind_of_layer_passes_on_eight_ranks(capsys, words):
    ended = run(capsys, verify.main, TINY_MEDIA, *WINDOWS, "batch.size.count=32", *words, "--json")
    checks = json.loads(ended.out)
    assert (ended.code, [check for check in checks if not check["passed"]]) == (0, [])
    assert [check["kind"].partition(":")[0] for check in checks] == [*KINDS, "balance post"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["tiny_omni", "tiny_text", "tiny_audio", "tiny_vlm", "tiny_frozen"]
)
def test_the_shipped_configs_pass_with_every_backend(capsys, name):
    ended = run(capsys, verify.main, name, "--samples=8", "batch.size.count=48")
    assert ended.code == 0, ended.out
    assert ended.out.endswith(
        "nothing leaks: samples compute in the run's rows what they compute alone\n"
    )
    assert {"dense", "blockwise", "flash"} <= set(ended.out.split())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["omni_10b", "internvl_26b"])
def test_the_configs_of_large_models_pass_with_fewer_layers_and_smaller_widths(capsys, name):
    parts = [part for part in REDUCED if part != "encoders.audio" or name != "internvl_26b"]
    words = [f"model.{part}.{word}" for part in parts for word in REDUCED[part].split()]
    words += [f"batch.rows.{part.removeprefix('encoders.')}=8" for part in parts]
    modalities = "image audio mixed text" if "encoders.audio" in parts else "image text"
    words += [
        "data.sources.toy=embedded",
        f"data.sources.toy.modalities={modalities.replace(' ', ',')}",
    ]
    words += [f"data.alphabet={ALPHABET}", "mesh.fsdp=1", "batch.size.count=48", "--samples=8"]
    ended = run(capsys, verify.main, name, *words)
    assert ended.code == 0, ended.out + ended.err
    assert {"dense", "blockwise", "flash"} <= set(ended.out.split())


@pytest.mark.exhaustive
def test_a_checkpoint_passes_on_questions_about_images(capsys, tmp_path):
    from llava_folder import save_checkpoint, save_questions  # imports PyTorch, which takes seconds

    checkpoint, data = (
        save_checkpoint(tmp_path / "checkpoint"),
        save_questions(tmp_path / "data", 64),
    )
    words = (
        f"checkpoint={checkpoint}",
        f"data={data}",
        f"images={tmp_path / 'data' / 'images'}",
        "device=cpu",
    )
    ended = run(
        capsys, verify.main, "llava_style", *words, "batch.size.count=32", "--backend=blockwise"
    )
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["omni_10b"],
            "error: omni_10b names no data to compute: name yours in data.sources (docs/data.md)",
        ),
        ([TINY, "--samples=0"], "error: --samples 0: give 1 or more"),
        (
            [TINY, "batch.rows.llm=32"],
            "error: no row holds two samples, so nothing is packed: raise batch.size or",
        ),
    ],
)
def test_what_cannot_be_verified_is_one_line(capsys, words, message):
    ended = run(capsys, verify.main, *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(message)
    assert ended.err.count("\n") == 1


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> verify.Verifier:
    """A run of all kinds of layers on one device."""
    folder = tmp_path_factory.mktemp("run")
    return verify.Verifier(load(TINY_MEDIA, WINDOWS), Path(TINY_MEDIA), folder, jax.devices()[:1])


@pytest.mark.default_cases("none")
@pytest.mark.parametrize("balance", [NoBalance(), PostBalance()], ids=lambda balance: balance.kind)
def test_every_kind_of_layer_passes_and_so_does_the_balance_over_ranks_that_one_device_stands_for(
    verifier, balance
):
    verifier.config = replace(
        verifier.config, batch=replace(verifier.config.batch, balance=balance)
    )
    checks = list(verify.verify(verifier, 8, ["dense"]))
    compared = [] if balance.kind == "none" else ["balance post"]
    assert [check.kind.partition(":")[0] for check in checks] == [*KINDS, *compared]
    assert [check for check in checks if not check.difference <= check.tolerance <= 1e-5] == []


def first_leak(verifier: verify.Verifier) -> str:
    """The first place that is not what it is alone."""
    batches = [batch for step in verifier.load_steps(8) for batch in step]
    differences = verify.Programs(verifier, "dense").packed_is_alone(
        batches, verifier.pack_alone(batches)
    )
    return next((place.name for place, (relative, _) in differences.items() if relative > 1e-5), "")


def mask_without_samples(patch: pytest.MonkeyPatch) -> None:
    """In layers with windows, all of which become one."""
    of_layers = Context.of_layers

    def leaking(self, windowed):
        context = of_layers(self, windowed)
        mask = context.mask
        leaky = mask._replace(sample=jnp.minimum(mask.sample, 0), span=jnp.minimum(mask.span, 1))
        return context._replace(mask=leaky) if windowed else context

    patch.setattr(Context, "of_layers", leaking)


def convolution_over_clips(patch: pytest.MonkeyPatch) -> None:
    taps = encoders.taps

    # Clips of a row need not touch: what a convolution of the whole row would read, all of them do.
    def leaking(x, item, stride):
        return taps(x + x.mean(1, keepdims=True), item, stride)

    patch.setattr(encoders, "taps", leaking)


def rotary_positions_of_the_row(patch: pytest.MonkeyPatch) -> None:
    rotation = decoder.text_rotation
    of_row = lambda c, position, sample: rotation(c, jnp.cumsum(jnp.ones_like(position), 1), sample)  # noqa: E731
    patch.setattr(decoder, "text_rotation", of_row)


def positions_that_go_on(patch: pytest.MonkeyPatch) -> None:
    write = packing.write_sample

    def leaking(row, sample, arrays, places, first_span):
        write(row, sample, arrays, places, first_span)
        row.position[:] += row.pos[0]

    patch.setattr(packing, "write_sample", leaking)


def norm_of_the_row(patch: pytest.MonkeyPatch) -> None:
    def leaking(self, x):
        mean_square = jnp.mean(x * x, axis=(-2, -1), keepdims=True)
        return (x * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...]).astype(x.dtype)

    patch.setattr(RMSNorm, "__call__", leaking)


LEAKS = {
    mask_without_samples: "vision layer 1 (windowed)",
    convolution_over_clips: "audio embedding",
    rotary_positions_of_the_row: "llm rotary positions",
    positions_that_go_on: "llm position",
    norm_of_the_row: "llm layer 0 (full)",
}


@pytest.mark.default_cases("mask_without_samples", "positions_that_go_on")
@pytest.mark.parametrize("plant", LEAKS, ids=lambda plant: plant.__name__)
def test_a_planted_leak_is_named_with_the_first_place_that_it_reaches(verifier, monkeypatch, plant):
    plant(monkeypatch)
    assert first_leak(verifier) == LEAKS[plant]


DELTA_NETS = (
    *(f"model.llm.delta_net.{key}" for key in (
        "layers=0,2", "key_heads=2", "value_heads=2", "key_width=16", "value_width=16",
    )),
    "model.llm.norm_eps=1e-2",  # so that norms enlarge rounding little
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["", "gated_delta_rule", "causal_convolution", "trunk_of"])
@pytest.mark.parametrize("name", ["tiny_vlm", "tiny_dpo"])  # whose samples have branches
def test_delta_nets_pass_and_a_leak_through_a_state_or_a_convolution_is_named(
    tmp_path, monkeypatch, name, fault
):
    verifier = verify.Verifier(load(name, DELTA_NETS), Path(name), tmp_path, jax.devices()[:1])
    jax.clear_caches()
    if fault == "trunk_of":  # every branch goes on from the trunk of the row's first sample
        monkeypatch.setattr(gated_delta_net, fault, lambda path: path * 0)
    elif fault:
        function = getattr(gated_delta_net, fault)
        at = 5 if fault == "gated_delta_rule" else 2  # the place of `path`
        monkeypatch.setattr(
            gated_delta_net,
            fault,
            lambda *x, **options: function(*x[:at], 0 * x[at], *x[at + 1 :], **options),
        )
    found = first_leak(verifier)
    jax.clear_caches()
    assert found.endswith("(delta net)") if fault else found == ""


def test_a_leak_is_a_line_of_the_table_and_exit_code_1(capsys, monkeypatch):
    norm_of_the_row(monkeypatch)
    ended = run(
        capsys, verify.main, TINY, "batch.size.count=32", "batch.balance=none", "--backend=dense"
    )
    assert ended.code == 1
    leaks = [line.split() for line in ended.out.splitlines() if line.startswith("LEAK ")]
    assert [leak[1:4] for leak in leaks[:2]] == [
        ["llm", "layers,", "full"],
        ["llm", "final", "norm"],
    ]
    assert leaks[-1][1] == "into"
    assert leaks[-1][2].startswith("few[")
    assert " ".join(leaks[-1][3:]) == "first in llm layer 0 (full), with dense attention"
