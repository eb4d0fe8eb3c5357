import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from commands import TINY, TINY_MEDIA

from mmjax.config import Adafactor, AdamW, MeshConfig, ModelConfig, Muon
from mmjax.config.loading import load
from mmjax.disk import verify_checksum, with_checksum
from mmjax.errors import UserError
from mmjax.models.layer_stacks import unstack_layers
from mmjax.models.model import Model
from mmjax.models.piece import Piece
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.bit_sums import bit_sums, host_bit_sum
from mmjax.runtime.checkpoint import CheckpointStore
from mmjax.runtime.checkpoint_commit import Retention, saved_steps
from mmjax.runtime.checkpoint_metadata import (
    DamagedCheckpoint,
    DataState,
    checkpoint_step,
    read_metadata,
)
from mmjax.runtime.device_batch import ProcessReport, put_report
from mmjax.runtime.devices import CompileCounter
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.passes import PlacedStage
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import SavedParameters, restore_parameters
from mmjax.runtime.state import all_parameters, hyperparameters, make_optimizer, parameter_shardings

CONFIG = load(TINY_MEDIA)
DATA = DataState(4, "an index", {"rows": [4, 1, 1], "shapes": [[128, 96, 192]]})
WHOLE, EIGHT = MeshConfig(), MeshConfig(data=1, fsdp=4, tensor=2)


def freeze(model: ModelConfig, vision: bool) -> ModelConfig:
    return replace(
        model,
        encoders=model.encoders | {"vision": replace(model.encoders["vision"], frozen=vision)},
    )


def executor(
    model=CONFIG.model, mesh=WHOLE, devices=1, cuts=None, optimizer=CONFIG.optimizer
) -> Executor:
    built = Model.build(model, jnp.bfloat16, cuts)
    laid = make_mesh(mesh, jax.devices()[:devices])
    return Executor.on_mesh(
        built, make_optimizer(optimizer, built.axes), laid, ShardingRules(), sources=1
    )


def moved(on: Executor, seed=0) -> State:
    """A state whose every array is random, so that nothing can be mixed up unseen."""
    rng = np.random.default_rng(seed)
    host = jax.tree.map(
        lambda x: np.asarray(100 * rng.normal(size=x.shape), x.dtype), on.states[0].abstract
    )
    return State((jax.device_put(host, on.states[0].shardings),))


def values(tree) -> dict[str, np.ndarray]:
    """Every array by its layer's own name, whatever the runs."""
    tree = tree.stages[0] if isinstance(tree, State) else tree
    leaves = jax.tree.leaves_with_path(unstack_layers(tree))
    return {jax.tree_util.keystr(path): np.array(x) for path, x in leaves}


def assert_equal(a, b) -> None:
    a, b = values(a), values(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def save(folder: Path, on: Executor, state: State, step=4, config="{}") -> Path:
    checkpoints = CheckpointStore(folder, on, Retention(2))
    checkpoints.save(state, config, replace(DATA, step=step))
    checkpoints.wait()
    return folder


@pytest.fixture(scope="module")
def one() -> Executor:
    return executor(freeze(CONFIG.model, True))


@pytest.fixture(scope="module")
def state(one) -> State:
    return moved(one)


@pytest.fixture(scope="module")
def saved(one, state, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), one, state)


def restored(folder: Path, on: Executor, step=4) -> State:
    checkpoints = CheckpointStore(folder, on, Retention(2))
    try:
        return checkpoints.restore(step)[0]
    finally:
        checkpoints.wait()


def test_the_step_config_and_data_position_come_back(saved):
    said = read_metadata(saved, 4)
    assert (said.step, said.config, said.data) == (4, "{}", DATA)
    assert checkpoint_step(saved) == 4


def test_a_checkpoint_holds_the_state_at_its_step_though_training_goes_on_at_once(one, tmp_path):
    state = moved(one)
    before = values(state)
    checkpoints = CheckpointStore(tmp_path, one, Retention(1))
    checkpoints.prepare()
    checkpoints.save(state, "{}", DATA)
    hyper = hyperparameters(CONFIG, 0)
    (accumulated,) = one.zeros()
    (part,) = state.stages
    reports = put_report(ProcessReport(), one.mesh)
    reported = reports, one.merge_unreadable(reports.unreadable)
    for _ in range(3):  # donates the arrays that are being written
        part, accumulated, _ = one.update_whole(
            part, accumulated, hyper, {"llm": np.float32(1)}, *reported
        )
    jax.block_until_ready(part)
    checkpoints.wait()
    after = values(restored(tmp_path, one))
    assert all((before[name] == after[name]).all() for name in before)


def test_it_restores_onto_any_mesh_and_under_any_run_borders(saved, state):
    cut = replace(CONFIG.model, llm=replace(CONFIG.model.llm, remat=("none", "full")))
    assert executor(cut).model.runs != executor().model.runs
    assert_equal(restored(saved, executor(freeze(cut, True), EIGHT, 8)), state)


def test_what_eight_devices_saved_one_device_restores(saved, one, state, tmp_path):
    eight = executor(freeze(CONFIG.model, True), EIGHT, 8)
    spread = restored(saved, eight)
    assert len(spread.trainable["llm"]["embed"]["weight"].sharding.device_set) == 8
    assert_equal(restored(save(tmp_path, eight, spread), one), state)


def test_stages_go_on_from_one_mesh_though_one_of_them_trains_nothing(tmp_path):
    vision = CONFIG.model.encoders["vision"]
    vision = replace(vision, frozen=True, connector=replace(vision.connector, frozen=True))
    model = replace(CONFIG.model, encoders={"vision": vision})
    one = executor(model)
    state = moved(one)
    stages = [
        PlacedStage(
            tower,
            Stage(one.model, (Piece(model, tower, 0, model.towers[tower].layers),)),
            make_mesh(WHOLE, [device]),
        )
        for tower, device in zip(("vision", "llm"), jax.devices(), strict=False)
    ]
    staged = Executor(one.model, one.optimizer, stages, sources=1)
    found = [values(part) for part in restored(save(tmp_path, one, state), staged).stages]
    assert not any(".trainable" in name for name in found[0])
    expected = values(state)
    assert found[0].keys() | found[1].keys() == expected.keys()
    for name, x in (found[0] | found[1]).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_parameters_alone_start_another_optimizer_and_another_choice_of_frozen_modules(
    saved, state
):
    model = Model.build(CONFIG.model, jnp.float32)
    mesh = make_mesh(EIGHT, jax.devices())
    params = restore_parameters(saved, 4, model, parameter_shardings(model, mesh, ShardingRules()))
    expected = jax.tree.map(lambda x: np.asarray(x, np.float32), all_parameters(state))
    assert_equal(params, expected)
    assert state.frozen["encoders"]["vision"]["embed"]["patches"]["weight"].dtype == jnp.bfloat16


OPTIMIZERS = {
    "muon": Muon(),
    "muon-int8": Muon(moments="int8"),
    "bfloat16": AdamW(moments="bfloat16"),
    "adafactor": Adafactor(),
    "averaged": Muon(ema=0.9),
}


@pytest.mark.default_cases("muon-int8")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_state_comes_back_on_another_mesh_and_in_other_stacks(name, tmp_path):
    on = executor(optimizer=OPTIMIZERS[name])
    state = moved(on)
    cut = replace(CONFIG.model, llm=replace(CONFIG.model.llm, remat=("none", "full")))
    other = executor(cut, EIGHT, 8, optimizer=OPTIMIZERS[name])
    assert_equal(restored(save(tmp_path, on, state), other), state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", [True, False], ids=["divided", "whole"])
def test_moments_over_data_come_back_whole_and_whole_ones_over_data(before, tmp_path):
    optimizers = {
        over_data: AdamW(moments="int8", over_data=over_data) for over_data in (True, False)
    }
    on, other = (
        executor(mesh=MeshConfig(4, fsdp=2), devices=8, optimizer=optimizers[o])
        for o in (before, not before)
    )
    state = moved(on)
    assert_equal(restored(save(tmp_path, on, state), other), state)


def test_other_moments_are_refused_and_are_no_damage(small_saved):
    model = load(TINY).model
    for optimizer, expected in (
        (replace(CONFIG.optimizer, moments="bfloat16"), "is float32 there and bfloat16 here"),
        (replace(CONFIG.optimizer, moments="int8"), "codes.* is only here"),
        (Adafactor(), "is only"),
    ):
        with pytest.raises(UserError, match=f"another model or optimizer: .*{expected}") as error:
            restored(small_saved, executor(model, optimizer=optimizer))
        assert not isinstance(error.value, DamagedCheckpoint)
        assert "init_from=" in one_line(error, small_saved)


@pytest.mark.default_cases("int8")
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_an_update_after_a_restart_is_bit_for_bit_the_one_without_wherever_moments_are(
    moments, tmp_path
):
    on, on_host = (
        executor(load(TINY).model, optimizer=AdamW(moments=moments, offload=o, ema=0.9))
        for o in (False, True)
    )
    hyper = hyperparameters(CONFIG, 0)
    reports = put_report(ProcessReport(), on.mesh)
    reported = reports, on.merge_unreadable(reports.unreadable)

    def updated(state: State, steps: range, on: Executor = on) -> State:
        (part,) = state.stages
        for step in steps:
            rng = np.random.default_rng(step)
            (accumulated,) = on.zeros()
            gradients = jax.tree.map(
                lambda x, rng=rng: rng.normal(size=x.shape).astype(x.dtype), accumulated.gradients
            )
            gradients = jax.device_put(gradients, on.states[0].shardings.trainable)
            part, _, report = on.update_whole(
                part,
                accumulated._replace(gradients=gradients),
                hyper,
                {"llm": np.float32(1)},
                *reported,
            )
            assert report.finite
        return State((part,))

    def start() -> State:
        return on.init(jax.random.key(0))

    straight = jax.device_get(updated(start(), range(4)))
    save(tmp_path, on, updated(start(), range(2)))
    assert_equal(updated(restored(tmp_path, on), range(2, 4)), straight)
    # From the device's memory to the host's, and back by another checkpoint.
    offloaded = updated(restored(tmp_path, on_host), range(2, 3), on_host)
    kinds = {
        x.sharding.memory_kind for x in jax.tree.leaves(offloaded.stages[0].optimizer) if x.ndim
    }
    assert kinds == {"pinned_host"}
    save(tmp_path, on_host, offloaded, 5)
    assert_equal(updated(restored(tmp_path, on, 5), range(3, 4)), straight)
    # A step that is not finite leaves codes and scales as they were.
    state = restored(tmp_path, on)
    before = jax.device_get(state)
    (zeros,) = on.zeros()
    infinite = zeros._replace(losses=zeros.losses._replace(loss=jnp.array([jnp.inf])))
    state, _, report = on.update_whole(
        state.stages[0], infinite, hyper, {"llm": np.float32(1)}, *reported
    )
    assert not report.finite
    assert_equal(State((state,)), before)


def test_only_the_newest_stay(one, state, tmp_path):
    checkpoints = CheckpointStore(tmp_path, one, Retention(2))
    for step in (1, 2, 3):
        checkpoints.save(state, "{}", replace(DATA, step=step))
    checkpoints.wait()
    assert saved_steps(tmp_path) == [2, 3]


def test_a_save_that_was_cut_off_is_no_checkpoint(saved, one, state, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "4", tmp_path / "8.orbax-checkpoint-tmp-0")
    assert checkpoint_step(tmp_path) == 4
    assert_equal(restored(tmp_path, one), state)


# --------------------------------------------------------------------------------------------- torn
# and foreign ones


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in (len(data) // 3, len(data) // 2, len(data) - 1):
        data[at] ^= 0x10
    path.write_bytes(bytes(data))


DAMAGE = {"truncated": truncate, "emptied": empty, "flipped": flip, "deleted": Path.unlink}


def one_line(error: pytest.ExceptionInfo[UserError], folder: Path) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert str(folder / "4") in message
    return message


@pytest.fixture(scope="module")
def small() -> Executor:
    return executor(load(TINY).model)


@pytest.fixture(scope="module")
def small_saved(small, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("small"), small, moved(small))


# Orbax leaves its other reads alone when one fails; the collector tells of them later.
@pytest.mark.default_cases("flipped", "deleted")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_line_or_does_no_harm(damage, small, small_saved, tmp_path):
    layouts = parameter_shardings(small.model, small.mesh, small.rules)
    whole = values(moved(small))
    told = []
    for number, path in enumerate([p for p in sorted(small_saved.rglob("*")) if p.is_file()]):
        torn = tmp_path / str(number)
        shutil.copytree(small_saved, torn)
        DAMAGE[damage](torn / path.relative_to(small_saved))
        try:
            assert all(
                (whole[name] == x).all() for name, x in values(restored(torn, small)).items()
            )
            parameters = restore_parameters(torn, 4, small.model, layouts)
            assert all(
                (whole[f".trainable{name}"] == x).all() for name, x in values(parameters).items()
            )
        except UserError as error:
            told.append((torn, str(error)))
    assert len(told) >= 4
    assert all(str(torn / "4") in line and "\n" not in line for torn, line in told)


def test_noise_that_storage_does_not_notice_is_named(saved, one, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    meta = tmp_path / "4" / "meta" / "metadata"
    said = verify_checksum(json.loads(meta.read_text()))
    said["sums"]["trainable.llm.embed.weight"] += 1
    meta.write_text(json.dumps(with_checksum(said)))
    with pytest.raises(
        DamagedCheckpoint, match=r"trainable\.llm\.embed\.weight is not what was saved"
    ) as error:
        restored(tmp_path, one)
    one_line(error, tmp_path)
    layouts = parameter_shardings(one.model, one.mesh, one.rules)
    with pytest.raises(
        UserError, match=r"trainable\.llm\.embed\.weight is not what was saved"
    ) as error:
        restore_parameters(tmp_path, 4, one.model, layouts)
    assert "there is no older one" in one_line(error, tmp_path)


CHANGES = {
    "two signs": lambda x: x * np.where(np.arange(x.size) < 2, -1, 1).astype(x.dtype),
    "two values swapped": lambda x: x[np.r_[1, 0, 2 : x.size]],
    "as much added as taken": lambda x: (
        x.view("u4") + np.r_[1, 2**32 - 1, [0] * (x.size - 2)].astype("u4")
    ).view("f4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_two_changes_do_not_cancel_in_an_array_s_checksum(change):
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    before, after = (
        bit_sums({"x": jnp.asarray(values)})["x"] for values in (x, CHANGES[change](x))
    )
    assert before != after


def test_checksums_are_the_same_by_the_host_as_by_a_program():
    """Of scalars, empty arrays, layers of stacks and what is longer than a chunk of the host's sum."""
    noise = np.random.default_rng(0).integers(0, 256, 4 * 70_001, dtype=np.uint8)
    arrays = {}
    for dtype in ("float32", "bfloat16", "int8", "uint8", "int32"):
        x = noise.view(jnp.dtype(dtype))[:70_001]
        arrays[dtype] = {
            "scalar": x[7],
            "empty": x[:0],
            "layer": x[:210].reshape(2, 3, 35)[1],
            "long": x,
        }
    sums = jax.jit(bit_sums)(jax.tree.map(jnp.asarray, arrays))
    host = {
        f"{dtype}.{name}": host_bit_sum(np.asarray(x))
        for dtype, of in arrays.items()
        for name, x in of.items()
    }
    assert host == {name: int(x) for name, x in sums.items()}


def test_nothing_is_compiled_to_save_and_restore_on_cpus(small, tmp_path):
    eight = executor(load(TINY).model, EIGHT, 8)
    state = moved(eight)
    programs = CompileCounter()
    checkpoints = CheckpointStore(tmp_path, eight, Retention(1))
    checkpoints.prepare()
    checkpoints.save(state, "{}", DATA)
    assert checkpoints.wait() == ""
    states = [restored(tmp_path, on) for on in (eight, small)]
    layouts = [parameter_shardings(on.model, on.mesh, on.rules) for on in (eight, small)]
    parameters = [restore_parameters(tmp_path, 4, small.model, layout) for layout in layouts]
    assert programs.requested == 0
    for again in states:
        assert_equal(again, state)
    for again in parameters:
        assert_equal(again, all_parameters(state))


def test_a_letter_that_has_changed_in_what_it_says_of_itself_is_noticed(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    meta = tmp_path / "4" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace("an index", "an indey"))
    with pytest.raises(UserError, match="it is not what was written"):
        read_metadata(tmp_path, 4)


def test_a_torn_checkpoint_names_the_one_before(saved, one, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "4", tmp_path / "2")
    shutil.rmtree(tmp_path / "4" / "state")
    with pytest.raises(UserError, match="to use step 2 instead, remove it") as error:
        restore_parameters(
            tmp_path, 4, one.model, parameter_shardings(one.model, one.mesh, one.rules)
        )
    one_line(error, tmp_path)


@pytest.mark.parametrize("whose", ["this run's", "another run's", "a run's without an id"])
def test_a_checkpoint_in_the_place_of_another_is_refused_by_every_reader(whose, small, tmp_path):
    """Of a run with an id; one begun before there were ids has its own checkpoints alone to compare."""
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    for folder, name in ((run, "first"), (other, "" if "without" in whose else "second")):
        folder.path.mkdir()
        folder.identity.write_text(name)
        save(
            folder.checkpoints,
            small,
            moved(small),
            step=2,
            config=json.dumps({"run": str(folder.path)}),
        )
    if whose == "this run's":
        shutil.copytree(run.checkpoints / "2", run.checkpoints / "4")
        step, expected = (
            4,
            "it is this run's state after step 2, in the place of step 4; put back what was there, or",
        )
    else:
        shutil.rmtree(run.checkpoints / "2")
        shutil.copytree(other.checkpoints / "2", run.checkpoints / "2")
        step, expected = (
            2,
            f"it is the state of run {other.path} after step 2, in the place of step 2; put back what",
        )
    layouts = parameter_shardings(small.model, small.mesh, small.rules)
    for read in (
        # train --resume
        lambda: CheckpointStore(run.checkpoints, small, Retention(2)).restore(step),
        # evaluate, generate, init_from
        lambda: restore_parameters(run.checkpoints, step, small.model, layouts),
        lambda: SavedParameters(run.checkpoints, step, small.model),  # export
    ):
        with pytest.raises(UserError, match=re.escape(f"cannot be used: {expected}")) as refused:
            read()
        assert not isinstance(refused.value, DamagedCheckpoint)  # which would be set aside
    moved_run = RunFolder(run.path.rename(tmp_path / "elsewhere"))
    moved_run.identity.unlink()
    if whose != "this run's":
        assert read_metadata(moved_run.checkpoints, 2).step == 2


def test_foreign_checkpoints_are_refused(one, tmp_path):
    (tmp_path / "empty" / "4").mkdir(parents=True)
    (tmp_path / "torch" / "4").mkdir(parents=True)
    (tmp_path / "torch" / "4" / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with ocp.CheckpointManager(tmp_path / "other") as manager:
        manager.save(4, args=ocp.args.StandardSave({"weights": np.arange(4.0)}))
    with ocp.CheckpointManager(tmp_path / "meta") as manager:
        foreign = {
            "state": ocp.args.StandardSave({"w": np.ones(4)}),
            "meta": ocp.args.JsonSave({"version": 3}),
        }
        manager.save(4, args=ocp.args.Composite(**foreign))
    for name in ("empty", "torch", "other", "meta"):
        with pytest.raises(UserError, match="cannot be used") as error:
            restored(tmp_path / name, one)
        one_line(error, tmp_path / name)
        with pytest.raises(UserError, match="cannot be used"):
            restore_parameters(tmp_path / name, 4, one.model, {})


def test_another_model_is_refused_with_the_parameter(saved, one):
    wider = replace(CONFIG.model, llm=replace(CONFIG.model.llm, mlp_width=56))
    deeper = replace(CONFIG.model, llm=replace(CONFIG.model.llm, layers=3))
    deaf = replace(CONFIG.model, encoders={"vision": CONFIG.model.encoders["vision"]})
    for other, expected in (
        (wider, r"has shape .*, this model needs"),
        (deeper, r"no parameter llm\.layers\.2"),
        (deaf, "lacks"),
    ):
        model = Model.build(other, jnp.float32)
        with pytest.raises(UserError, match=f"another model.*{expected}") as error:
            restore_parameters(saved, 4, model, parameter_shardings(model, one.mesh, one.rules))
        one_line(error, saved)


def test_no_checkpoint_at_all_says_so(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        checkpoint_step(tmp_path / "checkpoints")
