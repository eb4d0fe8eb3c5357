from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mmjax.runtime.devices import CompileCounter, enable_compilation_cache


@pytest.fixture(autouse=True)
def _cache_as_it_was():
    before = jax.config.jax_compilation_cache_dir
    yield
    enable_compilation_cache(Path(before)) if before else jax.config.update(
        "jax_compilation_cache_dir", None
    )


def compile_one(seed: int) -> None:
    """A program that nothing else compiles, from scratch for JAX's own memory each time."""
    jax.jit(lambda x: jnp.sin(x) * (seed + 0.12345)).lower(jnp.float32(1)).compile()


def test_every_counter_counts_from_its_own_beginning(tmp_path):
    enable_compilation_cache(tmp_path)
    jnp.float32(1)
    first = CompileCounter()
    compile_one(1)
    second = CompileCounter()
    compile_one(2)
    compile_one(3)
    assert (first.requested, second.requested) == (3, 2)
    assert (first.from_cache, second.from_cache) == (0, 0)


def test_what_the_folder_already_has_is_not_compiled_again(tmp_path):
    enable_compilation_cache(tmp_path / "a")
    compile_one(4)
    counter = CompileCounter()
    compile_one(4)
    assert (counter.requested, counter.from_cache, counter.compiled) == (1, 1, 0)


def test_another_folder_is_another_cache(tmp_path):
    enable_compilation_cache(tmp_path / "a")
    compile_one(5)
    enable_compilation_cache(tmp_path / "b")
    counter = CompileCounter()
    compile_one(5)
    assert counter.compiled == 1
    assert any((tmp_path / "b").iterdir())
