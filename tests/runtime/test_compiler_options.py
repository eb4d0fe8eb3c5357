"""XLA's options reach the programs of a step, and none that it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from compilation import optimized

from mmjax.autotune.compile_run import RunPrograms
from mmjax.config.loading import load
from mmjax.errors import UserError
from mmjax.planning.memory import DeviceBatch
from mmjax.runtime.compiler_options import (
    GPU,
    GPU_CONTEXT,
    ONCE_CPU,
    QUICK_CPU,
    compiler_options,
    describe_compiler_options,
    initial_compiler_options,
    quick_compiler_options,
)

TINY = load("tiny_text")
BATCH = DeviceBatch({"llm": (1, 32)}, {})


def test_a_cpu_has_no_options_and_a_gpu_those_of_mmjax_under_those_of_the_config(monkeypatch):
    cpu = jax.devices()[0]
    assert compiler_options({}, cpu) == {}
    monkeypatch.setattr("mmjax.runtime.compiler_options.SingleDeviceSharding", lambda device: None)
    monkeypatch.setattr(
        jax, "jit", lambda f, compiler_options: SimpleNamespace(lower=lambda x: compiled)
    )
    compiled = SimpleNamespace(compile=lambda: None)
    for platform in ("gpu", "cuda"):
        gpu = SimpleNamespace(platform=platform)
        assert compiler_options({}, gpu) == GPU
        assert compiler_options({}, gpu, context=2) == GPU | GPU_CONTEXT
        name = next(iter(GPU))
        assert compiler_options({name: 7, "xla_x": True}, gpu) == GPU | {name: 7, "xla_x": True}
    assert (
        describe_compiler_options({"xla_x": True, "xla_y": 7, "xla_z": "A"})
        == 'xla_x=true, xla_y=7, xla_z="A"'
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"xla_no_such_option": True}, "No such compile option: 'xla_no_such_option'"),
        ({"xla_backend_optimization_level": "much"}, "'much' is not a valid int32 value"),
    ],
)
def test_what_xla_refuses_is_told_in_its_words(options, says):
    with pytest.raises(
        UserError, match=f"compiler: XLA of JAX {re.escape(jax.__version__)} says: .*{says}"
    ):
        compiler_options(options, jax.devices()[0])


def test_a_cpu_compiles_quickly_beside_the_configs_options_and_as_ever_where_xla_has_an_option_no_more(
    monkeypatch,
):
    cpu = jax.devices()[0]
    chosen = {"xla_backend_optimization_level": 1}
    assert quick_compiler_options({}, cpu) == QUICK_CPU
    assert quick_compiler_options(chosen, cpu) == {**QUICK_CPU, **chosen}
    monkeypatch.setattr(
        "mmjax.runtime.compiler_options.QUICK_CPU", {**QUICK_CPU, "xla_no_such_option": True}
    )
    assert quick_compiler_options(chosen, cpu) == chosen


def test_programs_that_make_parameters_compile_with_fewer_optimizations_and_to_the_same_bits():
    cpu = jax.devices()[0]
    assert initial_compiler_options(cpu) == {}  # tests have fewer still
    with optimized():
        options = initial_compiler_options(cpu)
        draw = jax.jit(lambda key: jax.random.truncated_normal(key, -2.0, 2.0, (33, 7)) / 3).lower(
            jax.random.key(0)
        )
        usual, quick = (
            draw.compile(compiler_options=chosen)(jax.random.key(0)) for chosen in (None, options)
        )
    assert options == ONCE_CPU
    assert (usual == quick).all()


def test_both_programs_of_a_step_are_compiled_with_the_options():
    fused, not_fused = (
        RunPrograms.on_one_mesh(replace(TINY, compiler=options), BATCH, jax.devices()[:1])
        for options in ({}, {"xla_disable_hlo_passes": "fusion"})
    )
    for compile_program in (RunPrograms.compile_gradients, RunPrograms.compile_update):
        assert "kind=kLoop" in compile_program(fused).text
        assert "kind=kLoop" not in compile_program(not_fused).text
