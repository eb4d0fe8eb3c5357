from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY

from mmjax.config import MeshConfig
from mmjax.config.loading import load
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime import program_cache
from mmjax.runtime.devices import CompileCounter, enable_compilation_cache
from mmjax.runtime.executor import Executor
from mmjax.runtime.program_cache import CachedProgram
from mmjax.runtime.state import make_optimizer

X = np.arange(6, dtype=np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    enable_compilation_cache(tmp_path)
    yield tmp_path
    enable_compilation_cache(Path(before)) if before else jax.config.update(
        "jax_compilation_cache_dir", None
    )


class Start:
    """What one start of a process makes of a function, as far as JAX's memory goes."""

    def __init__(self, context: str | None = "a model", scale: float = 0.12345) -> None:
        self.traced = 0
        counter = CompileCounter()
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])

        def function(
            x: dict[str, jax.Array], count: jax.Array
        ) -> tuple[dict[str, jax.Array], jax.Array]:
            self.traced += 1
            return {"scaled": jnp.sin(x["values"]) * scale}, count + 1

        program = CachedProgram(context, mesh, function)
        self.result = jax.device_get(program.run({"values": X}, np.int32(3)))
        assert jax.tree.structure(program({"values": X}, np.int32(3))) == jax.tree.structure(
            self.result
        )
        self.compiled = counter.compiled
        self.from_cache = counter.from_cache


def test_a_program_that_was_compiled_before_is_read_without_tracing_and_computes_the_same_bits():
    first, second = Start(), Start()
    assert (first.traced, first.compiled) == (1, 1)
    assert (second.traced, second.compiled, second.from_cache) == (0, 0, 1)
    np.testing.assert_array_equal(first.result[0]["scaled"], second.result[0]["scaled"])
    assert second.result[1] == 4


def test_a_program_that_returns_nothing_runs_at_every_start_on_several_devices():
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    for _ in range(2):
        program = CachedProgram("a model", mesh, lambda key: ({}, {}), out_shardings=({}, {}))
        assert program.run(jax.random.key(0)) == ({}, {})


def test_another_context_setting_or_kind_of_argument_is_another_program():
    Start()
    assert Start("another model", scale=2.0).compiled == 1
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert Start().compiled == 1
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def test_of_another_source_equal_programs_are_traced_and_not_compiled(monkeypatch):
    first = Start()
    monkeypatch.setattr(program_cache, "_source", lambda: "another")
    again = Start()
    assert (again.traced, again.compiled) == (1, 0)
    np.testing.assert_array_equal(first.result[0]["scaled"], again.result[0]["scaled"])
    assert Start().traced == 0


@pytest.mark.parametrize("context", [None, "a function at 0x7f59a2770390"])
def test_a_function_of_the_users_is_always_traced(context):
    assert [Start(context).traced for _ in range(2)] == [1, 1]


def test_a_file_that_is_cut_off_or_changed_is_compiled_again(folder):
    first = Start()
    for spoil in (
        lambda data: data[: len(data) // 2],
        lambda data: data[:-99] + bytes([data[-99] ^ 1]) + data[-98:],
        lambda data: b"",
    ):
        (program,) = folder.glob("*.program")
        program.write_bytes(spoil(program.read_bytes()))
        again = Start()
        assert again.compiled == 1
        np.testing.assert_array_equal(first.result[0]["scaled"], again.result[0]["scaled"])
    assert Start().compiled == 0


def test_a_program_that_calls_python_which_cannot_be_written_runs_at_every_start():
    calls = []

    def function(x: jax.Array) -> jax.Array:
        jax.debug.callback(calls.append, x[0])
        return x + 1

    for _ in range(2):
        program = CachedProgram("a model", make_mesh(MeshConfig(), jax.devices()[:1]), function)
        np.testing.assert_array_equal(program.run(X), X + 1)
        jax.effects_barrier()
    assert len(calls) == 2


def test_another_executor_of_the_same_config_reads_its_programs_and_one_of_another_does_not():
    config = load(TINY)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def drawn(**changes: Any) -> tuple[int, int]:
        model = Model.build(config.model, jnp.float32)
        optimizer = make_optimizer(replace(config.optimizer, **changes), model.axes, model.dtype)
        executor = Executor.on_mesh(model, optimizer, mesh, ShardingRules(), sources=1)
        counter = CompileCounter()
        executor.states[0].init_optimizer.compile(executor.states[0].abstract.trainable)
        return counter.compiled, counter.from_cache

    assert drawn() == (1, 0)
    assert drawn() == (0, 1)
    assert drawn(moments="bfloat16") == (1, 0)
