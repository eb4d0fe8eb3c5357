"""`python -m mmjax.bench memory`: what is predicted for a device is what the compiler takes, to a tenth."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from started import ROOT

WHEELS = importlib.util.find_spec("jax_cuda13_plugin") is not None


def bench(*words: str) -> subprocess.CompletedProcess:
    """In a process of its own: whether to look for a driver is decided when JAX starts."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mmjax.bench", "memory", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_predictions_are_within_a_tenth_of_the_compiler_for_every_model_and_mix():
    ended = bench("--json")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])
    assert len({(row["model"], row["remat"], row["loss_chunks"]) for row in rows}) == 3 * 2 + 2 * 2
    for row in rows:
        assert abs(row["off"]) < 0.1, row


@pytest.mark.exhaustive
@pytest.mark.skipif(WHEELS, reason="the CUDA wheels are installed")
def test_without_the_wheels_it_says_what_to_install():
    ended = bench("--model=omni")
    assert ended.returncode == 2
    assert ended.stderr.strip() == (
        'error: compiling for GPUs needs JAX\'s CUDA wheels, not a GPU; install them with: pip install "mmjax[aot]"'
    )
