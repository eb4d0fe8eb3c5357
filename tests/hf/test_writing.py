"""Files are written that the safetensors library reads, and written again without a changed byte."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

from mmjax.errors import UserError
from mmjax.hf.folder import HfFolder
from mmjax.hf.writing import NewTensor, copy_beside, rewrite_tensors, write_tensors


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text('{ "a":1}')
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "none": torch.zeros(0, 4),
        "c": torch.randn(2, 2, dtype=torch.float64),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt", "by": "a person"})
    return HfFolder.open(path)


def test_what_is_written_is_what_the_library_reads(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "x": rng.normal(size=(4, 3)).astype(np.float32),
        "half.y": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "one": np.float32(3.0).reshape(()),
        "empty": np.zeros((0, 2), np.float16),
    }
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    order = []

    def make(name):
        order.append(name)
        return values[name]

    new = {
        n: NewTensor(names[v.dtype.name], v.shape, lambda n=n: make(n)) for n, v in values.items()
    }
    write_tensors(tmp_path / "new.safetensors", new)
    assert order == list(values)
    found = load_file(tmp_path / "new.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    assert int.from_bytes((tmp_path / "new.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_a_file_without_changes_is_the_same_to_the_byte(folder, tmp_path):
    source = folder.path / "model.safetensors"
    assert rewrite_tensors(folder, source, tmp_path / "out", lambda name: None) == 0
    assert (tmp_path / "out").read_bytes() == source.read_bytes()
    assert rewrite_tensors(folder, source, tmp_path / "out", folder.read) == 5
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


def test_changed_tensors_keep_their_type_and_leave_the_others_alone(folder, tmp_path):
    out = tmp_path / "out.safetensors"
    changes = {"a": np.full(7, 1 / 3, np.float32), "c": np.full((2, 2), 4.0, np.float32)}
    assert rewrite_tensors(folder, folder.path / "model.safetensors", out, changes.get) == 2
    before, after = load_file(folder.path / "model.safetensors"), load_file(out)
    for name, value in before.items():
        wanted = changes[name].astype(value.dtype) if name in changes else value
        assert after[name].dtype == value.dtype
        np.testing.assert_array_equal(after[name], wanted)
    with pytest.raises(ValueError, match="does not go into"):
        rewrite_tensors(
            folder, folder.path / "model.safetensors", out, lambda _: np.zeros(3, np.float32)
        )


def test_other_files_are_copied_and_old_weights_are_not(folder, tmp_path):
    kept = {"config.json", "merges.txt", "additional_chat_templates/a.jinja"}
    for name in (
        *kept,
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "adapter_model.safetensors",
        ".git/config",
    ):
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).write_bytes(b"\x00\xff" + name.encode())
    left = copy_beside(folder, tmp_path / "out")
    assert left == [
        "adapter_model.safetensors",
        "original/consolidated.00.pth",
        "pytorch_model.bin",
    ]
    files = {
        str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()
    }
    assert files == kept
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (folder.path / name).read_bytes()


def test_an_index_beside_the_single_file_that_is_read_is_left_out(folder, tmp_path):
    (folder.path / "model.safetensors.index.json").write_text("{}")
    assert copy_beside(folder, tmp_path / "out") == ["model.safetensors.index.json"]


def test_a_file_that_was_cut_meanwhile_is_named(folder, tmp_path):
    source = folder.path / "model.safetensors"
    assert folder.tensors
    source.write_bytes(source.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"model\.safetensors ends"):
        rewrite_tensors(folder, source, tmp_path / "out", lambda name: None)
