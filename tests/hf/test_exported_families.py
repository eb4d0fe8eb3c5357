"""What a run changed of any family is in the exported folder, which transformers reads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import transformers
from fine_tuning import moved
from parity import draw_bounds, loaded
from safetensors.torch import load_file
from test_adapter_paths import CLASSES, CONFIGS, class_of
from test_export import check_beside

from mmjax import export
from mmjax.config import MeshConfig
from mmjax.hf.families import CHECKPOINTS
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings


@pytest.mark.default_cases("glmasr", "janus", "qwen3_5_moe")
@pytest.mark.parametrize("family", [name for name in CONFIGS if CHECKPOINTS[name].read])
def test_an_exported_folder_is_read_there_with_what_the_run_changed(family, tmp_path):
    config = CONFIGS[family]()
    kind = CLASSES.get(family) or class_of(config)
    model = kind(config)
    draw_bounds(model)
    model.save_pretrained(tmp_path / "source")
    if family == "glmasr":  # whose windows are its extractor's
        mels = config.audio_config.num_mel_bins
        transformers.WhisperFeatureExtractor(mels).save_pretrained(tmp_path / "source")
    run = RunFolder(moved(tmp_path / "source", tmp_path / "run"))
    export.export(run.path, tmp_path / "out")
    check_beside(tmp_path / "source", tmp_path / "out")

    model, params, _ = loaded(tmp_path / "out")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    shardings = parameter_shardings(model, mesh, ShardingRules())
    trained = restore_parameters(run.checkpoints, 3, model, shardings)
    jax.tree.map(np.testing.assert_array_equal, params, trained)
    _, untrained, _ = loaded(tmp_path / "source")
    same = jax.tree.map(np.array_equal, params, untrained)
    assert not any(jax.tree.leaves(same)), same

    kind.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, written[key]), key
