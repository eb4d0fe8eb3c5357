"""Snapshots in memory: they restore to the bit into any shardings, and only whole ones of this run are used."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY, TINY_MEDIA

from mmjax.config import MeshConfig, TrainingConfig
from mmjax.config.loading import load
from mmjax.disk import PROGRESS, with_checksum
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.models.piece import Piece
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint_metadata import DamagedCheckpoint, DataState
from mmjax.runtime.executor import Executor
from mmjax.runtime.memory_snapshots import MemorySnapshots, open_snapshots
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.snapshot_files import SnapshotFolder
from mmjax.runtime.state import make_optimizer

SHARDED = MeshConfig(data=2, fsdp=4)


def executor(mesh: MeshConfig, devices: int = 8, moments: str = "bfloat16") -> Executor:
    config = load(TINY, [f"optimizer.moments={moments}"])
    model = Model.build(config.model, jnp.float32)
    optimizer = make_optimizer(config.optimizer, model.axes, model.dtype)
    mesh = make_mesh(mesh, jax.devices()[:devices])
    return Executor.on_mesh(model, optimizer, mesh, ShardingRules(), sources=1)


@pytest.fixture(scope="module")
def sharded() -> Executor:
    return executor(SHARDED)


@pytest.fixture(scope="module")
def state(sharded):
    return sharded.init(jax.random.key(3))


@pytest.fixture
def folder(tmp_path) -> SnapshotFolder:
    return SnapshotFolder(tmp_path, "a run", "a host")


def save(folder: SnapshotFolder, sharded: Executor, state, *steps: int) -> None:
    snapshots = MemorySnapshots(folder, sharded)
    for step in steps:
        snapshots.save(state, "{}", DataState(step, "index", {}))
        assert snapshots.wait() == ""


@pytest.mark.parametrize(
    ("mesh", "devices"), [(SHARDED, 8), (MeshConfig(data=1, fsdp=8), 8), (MeshConfig(), 1)]
)
def test_a_snapshot_restores_to_the_bit_into_other_shardings(mesh, devices, folder, sharded, state):
    save(folder, sharded, state, 5)
    other = sharded if mesh == SHARDED else executor(mesh, devices)
    restored, saved = MemorySnapshots(folder, other).restore(folder.whole_snapshots()[5])
    jax.tree.map(np.testing.assert_array_equal, restored.stages, state.stages)
    layouts = [
        jax.tree.map(lambda x: x.sharding, x) for x in (restored.stages, other.states[0].abstract)
    ]
    assert layouts[0][0] == layouts[1]
    assert (saved.step, saved.run, saved.data.index) == (5, "a run", "index")


@pytest.mark.exhaustive
def test_units_go_on_from_a_snapshot_of_one_mesh_and_the_reverse(folder):
    config = load(TINY_MEDIA)
    model = Model.build(config.model, jnp.float32)
    optimizer = make_optimizer(config.optimizer, model.axes, model.dtype)
    towers = config.model.towers
    stages = [
        PlacedStage(
            tower,
            Stage(model, (Piece(config.model, tower, 0, towers[tower].layers),)),
            make_mesh(MeshConfig(), jax.devices()[n : n + 1]),
        )
        for n, tower in enumerate(towers)
    ]
    units = Executor(model, optimizer, stages, sources=1)
    one = Executor.on_mesh(
        model, optimizer, make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules(), sources=1
    )
    state = one.init(jax.random.key(3))
    save(folder, one, state, 5)
    in_units, _ = MemorySnapshots(folder, units).restore(folder.whole_snapshots()[5])
    assert len(in_units.stages) == 3
    save(folder, units, in_units, 6)
    again, _ = MemorySnapshots(folder, one).restore(folder.whole_snapshots()[6])
    jax.tree.map(np.testing.assert_array_equal, again.stages, state.stages)


def test_the_newest_whole_snapshot_alone_stays_and_a_later_one_of_another_past_goes(
    folder, sharded, state
):
    save(folder, sharded, state, 4, 5, 6)
    assert list(folder.whole_snapshots()) == [6]
    (folder.path / "6-0.state").rename(folder.path / "5-0.state")
    assert folder.whole_snapshots() == {}  # it says of which step it is
    save(folder, sharded, state, 6)
    (kept,) = (path.read_bytes() for path in folder.path.iterdir())
    save(folder, sharded, state, 9)
    (folder.path / "6-0.state").write_bytes(kept)
    MemorySnapshots(folder, sharded).restore(folder.whole_snapshots()[6])
    assert list(folder.whole_snapshots()) == [6]


def test_what_is_cut_off_changed_or_of_another_run_is_not_used(folder, sharded, state, tmp_path):
    save(folder, sharded, state, 5)
    path = folder.path / "5-0.state"
    whole = path.read_bytes()
    other = SnapshotFolder(tmp_path, "another run", "a host")
    (other.path / path.name).write_bytes(whole)
    assert other.whole_snapshots() == {}
    start = whole.index(b"\n")
    for spoiled in (whole[: start // 2], whole.replace(b'"step": 5', b'"step": 7', 1), b""):
        path.write_bytes(spoiled)
        assert folder.whole_snapshots() == {}
    for spoiled in (whole[:-9], whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]):
        path.write_bytes(spoiled)
        with pytest.raises(DamagedCheckpoint, match="snapshot of step 5 in memory cannot be used"):
            MemorySnapshots(folder, sharded).restore(folder.whole_snapshots()[5])


def test_a_snapshot_of_another_model_or_optimizer_is_refused_by_the_arrays_name(
    folder, sharded, state
):
    save(folder, sharded, state, 5)
    other = executor(SHARDED, moments="float32")
    with pytest.raises(DamagedCheckpoint, match=r"is bfloat16 .* in it, and float32"):
        MemorySnapshots(folder, other).restore(folder.whole_snapshots()[5])


def test_of_files_without_all_that_their_group_has_nothing_is_whole(folder, sharded, state):
    save(folder, sharded, state, 5)
    path = folder.path / "5-0.state"
    header, _, pieces = path.read_bytes().partition(b"\n")
    fields = json.loads(header)
    fields["header"]["writers"] = 2
    del fields["sum"]
    path.write_bytes(json.dumps(with_checksum(fields)).encode() + b"\n" + pieces)
    assert folder.whole_snapshots() == {}


def test_too_little_memory_a_full_one_and_another_users_folder_are_said(
    folder, sharded, state, monkeypatch, tmp_path
):
    monkeypatch.setattr(SnapshotFolder, "free_bytes", lambda folder: 10_000)
    with pytest.raises(UserError, match=r"snapshots need [\d.]+ MB of the memory of .* has 0.0 MB"):
        MemorySnapshots(folder, sharded)
    monkeypatch.undo()
    snapshots = MemorySnapshots(folder, sharded)
    folder.path.rmdir()  # as where nothing can be written
    snapshots.save(state, "{}", DataState(5, "index", {}))
    assert "No such file or directory" in snapshots.wait()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "mmjax-12345").mkdir()
    with pytest.raises(UserError, match="mmjax-12345 is not yours; remove it"):
        SnapshotFolder(tmp_path, "a run", "a host")


def test_snapshots_that_nothing_would_read_are_refused(tmp_path, monkeypatch):
    config = TrainingConfig(steps=9, memory_every=1, memory_folder=str(tmp_path))
    monkeypatch.delenv(PROGRESS, raising=False)
    assert open_snapshots(TrainingConfig(steps=9), RunFolder(tmp_path)) is None
    with pytest.raises(UserError, match="memory_every=1: nothing restarts this run"):
        open_snapshots(config, RunFolder(tmp_path))
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    with pytest.raises(UserError, match="gave runs no id"):
        open_snapshots(config, RunFolder(tmp_path))
    (tmp_path / "id").write_text("0123\n")
    assert open_snapshots(config, RunFolder(tmp_path)).path.parent.name == "0123"
    missing = TrainingConfig(steps=9, memory_every=1, memory_folder=str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"memory_folder=.*: No such file or directory; name a"):
        open_snapshots(missing, RunFolder(tmp_path))
