"""`python -m mmjax.verify` as a user runs it: it passes, and a planted leak is named with the layer that it begins in."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from commands import TINY, TINY_MEDIA, run

import mmjax.data.loading.packing as packing
import mmjax.models.decoder as decoder
import mmjax.models.encoders as encoders
from mmjax import verify
from mmjax.config.loading import load
from mmjax.models.layers import Context, RMSNorm

# Windows in some layers of the towers that can have them.
WINDOWS = (
    "model.encoders.vision.layers=2", "model.encoders.vision.window=2", "model.encoders.vision.windowed=1",
    "model.llm.window=6", "model.llm.windowed=1",
)  # fmt: skip
KINDS = (
    "inputs", "audio embedding", "audio layers, full", "audio connector", "vision positions", "vision embedding",
    "vision layers, full", "vision layers, windowed", "vision connector", "llm positions", "llm embedding",
    "llm layers, full", "llm layers, windowed", "llm final norm", "token losses", "gradients",
)  # fmt: skip


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> verify.Verifier:
    """A run of all kinds of layers on one device."""
    folder = tmp_path_factory.mktemp("run")
    return verify.Verifier(load(TINY_MEDIA, WINDOWS), Path(TINY_MEDIA), folder, jax.devices()[:1])


def first_leak(verifier: verify.Verifier) -> str:
    """The first place that is not what it is alone."""
    batches = [batch for step in verifier.load_steps(8) for batch in step]
    differences = verify.Programs(verifier, "dense").packed_is_alone(batches)
    return next((place.name for place, (relative, _) in differences.items() if relative > 1e-5), "")


def mask_without_samples(patch: pytest.MonkeyPatch) -> None:
    """In layers with windows, whose numbers are the same in every image."""
    of_layers = Context.of_layers

    def leaking(self, windowed):
        context = of_layers(self, windowed)
        everyone = jnp.minimum(context.mask.sample, 0)
        return context._replace(mask=context.mask._replace(sample=everyone)) if windowed else context

    patch.setattr(Context, "of_layers", leaking)


def convolution_over_clips(patch: pytest.MonkeyPatch) -> None:
    taps = encoders.taps
    patch.setattr(encoders, "taps", lambda x, item, stride: taps(x, jnp.minimum(item, 0), stride))


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
        return x * jax.lax.rsqrt(mean_square + self.eps) * self.scale[...]

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
