"""What is planned for GPUs that are not there holds by their compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from commands import run

from mmjax import plan
from mmjax.autotune import absent
from mmjax.kernels.masked_tiles import OLDEST_JAX
from mmjax.models.float8 import NO_FP8_ALGORITHMS
from mmjax.planning.hardware import USABLE, find_device, parse_cluster

ROOT = Path(__file__).parents[2]
WHEELS = importlib.util.find_spec("jax_cuda13_plugin") is not None


def printed(*words: str) -> str:
    """What Python prints, in a process of its own: whether to look for a driver is decided when JAX starts."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    options = {"env": environment, "cwd": ROOT, "capture_output": True, "timeout": 600}
    ended = subprocess.run([sys.executable, *words], check=False, **options)
    assert ended.returncode == 0, ended.stderr.decode(errors="replace")
    # with binary reports of newer compilers between the lines
    return ended.stdout.decode(errors="replace")


def told(*words: str) -> dict:
    """The JSON that Python prints."""
    return json.loads(printed(*words).splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
@pytest.mark.parametrize("gigabytes", [16, 10])
def test_the_nearest_plan_that_fits_also_fits_by_the_compiler(gigabytes):
    found = told("tests/training/nearest_by_compiler.py", str(gigabytes))
    assert found["fits"] == [False, True]
    assert found["compiled"] <= found["room"]
    assert found["planned"] == pytest.approx(found["compiled"], rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_a_plan_of_ten_billion_parameters_takes_what_the_compiler_says():
    rows = ("batch.rows.llm=8", "batch.rows.vision=8", "batch.rows.audio=8")
    words = (
        "omni_10b",
        "cluster=h100x8",
        "mesh.fsdp=8",
        "batch.size.count=64",
        *rows,
        "--compile",
        "--json",
    )
    found = told("-m", "mmjax.plan", *words)
    assert found["ways"]["post"]["memory"] == pytest.approx(found["compiled"], rel=0.1)
    assert found["compiled"] <= found["room"]


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
@pytest.mark.parametrize(
    "words",
    [
        ("none",),
        ("products",),
        ("full",),
        ("full", "divided"),
        ("none", "divided"),
        ("full", "experts"),
    ],
)
def test_every_stage_of_a_pipeline_takes_what_was_planned_for_it(words):
    stages = told("tests/autotune/compiled_stages.py", *words)
    assert list(stages) == ["audio + vision", "llm[0:9]", "llm[9:19]", "llm[19:28]"]
    for name, found in stages.items():
        assert found["planned"] == pytest.approx(max(found["compiled"].values()), rel=0.1), name


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_units_that_are_chosen_take_what_the_compiler_says_with_all_pixels_loaded():
    found = told(
        "-m", "mmjax.plan", "omni_10b", "cluster=h100x8", "units=auto", "--compile", "--json"
    )
    assert {stage["name"] for stage in found["stages"]} == set(found["compiled"])
    assert {tower for stage in found["stages"] for tower in stage["layers"]} == {
        "vision",
        "audio",
        "llm",
    }
    for stage in found["stages"]:
        compiled = max(found["compiled"][stage["name"]].values())
        assert sum(stage["memory"].values()) == pytest.approx(compiled, rel=0.1), stage["name"]


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_the_attention_kernel_compiles_in_little_memory():
    found = told("tests/kernels/compiled_kernel.py")
    assert found["16384 x 28 (4) x 128"] <= 0.13e9
    assert found["16384 x 16 (16) x 80"] <= 0.06e9
    assert found["16384 x 16 (16) x 80, blocks of 64"] <= 0.06e9


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
@pytest.mark.skipif(
    jax.__version_info__[:3] < OLDEST_JAX, reason="before JAX 0.11.2 no kernel is for Hopper alone"
)
def test_the_hopper_kernels_spill_no_more_registers_than_is_stated():
    report = printed("tests/kernels/compiled_hopper.py")
    spills = re.findall(
        r"entry function 'hopper_attention_(\w+?)_mosaic.*?(\d+) bytes spill stores",
        report,
        re.DOTALL,
    )
    assert {kernel for kernel, _ in spills} == {"forward", "d_query", "d_key"}
    # The compiler in JAX 0.12's plugin spills what the one before it does not
    # (docs/measurements/gpu.md).
    newer = jax.__version_info__[:2] >= (0, 12)
    stated = {"forward": 0, "d_query": 64 * newer, "d_key": 1500 if newer else 64}
    assert all(int(stores) <= stated[kernel] for kernel, stores in spills), spills


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
@pytest.mark.parametrize(
    ("states", "temporary", "stated"),
    [
        (1, 1.05e9, {"state_gradients": 0, "read_gradients": 200, "token_gradients": 600}),
        # with branches
        (2, 1.6e9, {"state_gradients": 400, "read_gradients": 900, "token_gradients": 1400}),
    ],
)
def test_the_kernels_of_the_delta_rule_spill_and_take_no_more_than_is_stated(
    states, temporary, stated
):
    found = told("tests/kernels/compiled_delta_rule.py", str(states))
    assert found["temporary"] <= temporary
    stated |= dict.fromkeys(("solve", "states", "outputs", "written_gradients"), 0)
    assert found["spills"].keys() == stated.keys()
    assert all(found["spills"][name] <= stated[name] for name in stated), found


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
@pytest.mark.parametrize(
    ("moments", "most"), [("float32", 1e6), ("bfloat16", 1e6), ("int8", 0.17e9)]
)
def test_an_update_of_a_7b_model_is_written_in_place(moments, most):
    assert told("tests/autotune/compiled_update.py", "1", moments)[moments] <= most


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_the_kernel_of_windows_spills_no_register_and_one_that_does_is_seen():
    found = told("tests/kernels/compiled_windows.py")
    assert list(found) == ["64", "72", "80"]
    assert max(found.values()) <= 1e6  # lists of blocks alone
    with pytest.raises(AssertionError, match="register spilling"):
        printed("tests/kernels/compiled_windows.py", "1")


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_no_scan_over_layers_plans_masks_and_xla_computes_nothing_again():
    found = told("tests/autotune/compiled_step.py")
    assert found["scans"] == 4  # forward and backward, of the LLM and the vision encoder
    # of the gathered bytes, behind products; the first gather of a turn never is
    assert found["hidden"] >= 0.6
    assert found["mask reductions"] == found["sorts"] == found["rematerialized"] == 0


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
@pytest.mark.parametrize(("tensor", "remat"), [(2, "attention"), (4, "full"), (8, "none")])
def test_every_chunk_of_a_tensor_parallel_layer_is_sent_while_a_product_is_computed(tensor, remat):
    found = told("tests/autotune/compiled_rings.py", str(tensor), remat)
    # Forward has four exchanges; backward eight, of which six send chunks of their own, and those
    # that are recomputed.
    recomputed = {"attention": 3, "full": 3, "none": 0}[remat]
    assert found["chunks"] == [4 * (tensor - 1), (6 + recomputed) * (tensor - 1)]
    assert found["exposed"] == [0, 0]
    assert found["all-reduces"] == found["gathers"] == found["rematerialized"] == 0


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_with_less_memory_than_it_takes_xla_computes_again_and_it_is_seen():
    assert (
        told("tests/autotune/compiled_step.py", "compiler.xla_gpu_memory_limit_slop_factor=5")[
            "rematerialized"
        ]
        > 0
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not WHEELS, reason='compiling for absent GPUs needs the CUDA wheels: pip install "mmjax[aot]"'
)
def test_products_in_float8_are_cublas_and_turn_no_weights_of_all_layers():
    # Three products of each of seven linear layers, of which XLA merges those that share an
    # operand. From JAX 0.12 on a device chooses among kernels when it compiles.
    named = jax.__version_info__ < NO_FP8_ALGORITHMS
    assert told("tests/autotune/compiled_float8.py") == {
        "products": 15 if named else 0,
        "turned": 0,
    }


@pytest.mark.parametrize("name", ["a100", "h100", "h100-pcie", "h200"])
def test_the_target_of_a_gpu_says_what_xla_must_know(monkeypatch, name):
    monkeypatch.setattr(absent.importlib.util, "find_spec", lambda name: True)
    asked = {}
    describe = lambda **options: asked.update(options) or SimpleNamespace(devices=[])  # noqa: E731
    monkeypatch.setattr(absent.topologies, "get_topology_desc", describe)
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "")
    cluster = parse_cluster(f"{name}x2x4")
    absent.aot_devices(cluster)
    target = asked["target_config"]
    cuda = cluster.device.cuda
    assert asked["topology"] == "1x2x4"
    # XLA takes 80 % of a target's memory, and on a device all that JAX's allocator has of it.
    memory = int(re.search(r"device_memory_size: (\d+)", target)[1])
    assert 0.8 * memory == pytest.approx(USABLE * cuda.memory)
    assert f'device_description_str: "{cuda.name}"' in target
    assert find_device(cuda.name) == cluster.device
    assert f"core_count: {cuda.cores}\n" in target
    assert f"memory_bandwidth: {int(cluster.device.bandwidth)}\n" in target
    assert f"major: {cuda.capability // 10} minor: {cuda.capability % 10} " in target


@pytest.mark.skipif(WHEELS, reason="the CUDA wheels are installed")
def test_without_the_wheels_nothing_is_planned_and_it_says_what_to_install(capsys):
    ended = run(capsys, plan.main, "omni_10b", "cluster=h100x8", "--compile")
    assert ended.code == 2
    assert 'install them with: pip install "mmjax[aot]"' in ended.err
