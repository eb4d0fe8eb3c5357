"""What is planned for GPUs that are not there holds by their compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = importlib.util.find_spec("jax_cuda13_plugin") is not None


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install -e ".[aot]"')
@pytest.mark.parametrize("gigabytes", [16, 10])
def test_the_nearest_plan_that_fits_also_fits_by_the_compiler(gigabytes):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/training/nearest_by_compiler.py"), str(gigabytes)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["fits"] == [False, True]
    assert found["compiled"] <= found["room"]
    assert found["planned"] == pytest.approx(found["compiled"], rel=0.1)
