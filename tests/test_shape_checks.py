"""Shapes in annotations are checked at every call, also those of functions inside functions."""

import importlib
import textwrap

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError
from shape_checks import check_shapes

from mmjax.models.embedding import look_up

MODULE = """
from jax import Array
from jaxtyping import Float


def halve(x: Float[Array, "r t"]) -> Float[Array, "r t"]:
    return x[:, ::2]


def doubled(x: Array) -> Array:
    def twice(y: Float[Array, "r t"]) -> Array:
        return y + y

    return twice(x)


def inner():
    def plain(x: Array) -> Array:
        return x

    return plain
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A package of its own, imported with checks."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "checked_shapes.py").write_text(textwrap.dedent(MODULE))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        check_shapes("checked_shapes")
        yield importlib.import_module("checked_shapes")


def test_a_result_or_an_argument_of_another_shape_than_annotated_is_refused(checked):
    with pytest.raises(TypeCheckError, match="return value"):
        checked.halve(jnp.ones((2, 4)))
    with pytest.raises(TypeCheckError, match="parameters"):
        checked.halve(jnp.ones(4))


def test_a_function_inside_another_is_checked_where_it_annotates_shapes(checked):
    assert checked.doubled(jnp.ones((2, 4))).shape == (2, 4)
    with pytest.raises(TypeCheckError, match="twice"):
        checked.doubled(jnp.ones(4))
    assert not hasattr(checked.inner(), "__wrapped__")


def test_the_models_are_checked():
    with pytest.raises(TypeCheckError, match="index"):
        look_up(jnp.ones((4, 2)), ("vocab", "embed"), jnp.zeros(3, jnp.int32), jnp.float32)
