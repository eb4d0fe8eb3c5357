"""A checkpoint is read straight into the devices' shards: its process needs little more than they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
LAYERS, WIDTH, MLP, VOCAB, FILES = 16, 2048, 8192, 32_000, 4


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A Llama of 2 GB in bfloat16, in several files."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in (f"model.layers.{i}." for i in range(LAYERS)):
        shapes |= {
            f"{layer}{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")
        }
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (512, WIDTH) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (MLP, WIDTH) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (WIDTH, MLP)
    names, weights = list(shapes), {}
    for k in range(FILES):
        file = f"model-{k + 1:05}-of-{FILES:05}.safetensors"
        part = names[k::FILES]
        save_file(
            {name: np.full(shapes[name], 0.01, ml_dtypes.bfloat16) for name in part}, folder / file
        )
        weights |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
    }
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_a_process_needs_at_most_a_third_more_than_its_devices_hold(large, kind):
    command = [sys.executable, "tests/training/loads_large.py", str(large), kind]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["held"] > (4e9 if kind == "trained" else 2e9)
    assert found["peak"] <= 1.3 * found["held"]
