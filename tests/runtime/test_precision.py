"""In bfloat16 the products of a step are bfloat16 ones, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import make_executor, tiny_config

from mmjax.batch import Microbatch
from mmjax.config import Config, MeshConfig
from mmjax.cost.trace import tower_batch

RANKS = 2


def traced(config: Config) -> Any:
    """The jaxpr of the program that accumulates gradients, under FSDP."""
    executor = make_executor(config, MeshConfig(1, fsdp=RANKS))
    items = {name: tower_batch(config.model, name, (RANKS, 48)) for name in config.model.encoders}
    text = tower_batch(config.model, "llm", (RANKS, 32))
    nothing = jax.ShapeDtypeStruct((RANKS, RANKS, 0), np.int32)
    text = text._replace(slots=dict.fromkeys(items, text.token), send=dict.fromkeys(items, nothing))
    args = (
        executor.states[0].abstract.trainable,
        {},
        jax.eval_shape(executor.zeros)[0],
        Microbatch(text, items),
        {"llm": np.float32(1)},
    )
    return jax.make_jaxpr(executor.programs[0].forward_backward)(*args).jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of loops and inner functions included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_no_product_of_a_bfloat16_step_has_a_float32_operand(chunks, tied):
    base = tiny_config()
    # Dense attention, the reference, has float32 gradients of its scores.
    encoders = {
        name: replace(encoder, attention="blockwise")
        for name, encoder in base.model.encoders.items()
    }
    llm = replace(base.model.llm, tied=tied, logit_cap=30.0, attention="blockwise")
    model = replace(base.model, llm=llm, encoders=encoders)
    training = replace(base.training, precision="bfloat16", loss_chunks=chunks)
    program = traced(replace(base, model=model, training=training))
    products = [e for e in equations(program) if e.primitive.name == "dot_general"]
    # The table's gradient leaves its product in bfloat16, in which it is reduced over the ranks.
    table = {llm.vocab // chunks, llm.width}
    assert {x.aval.dtype for e in products for x in e.outvars if {*x.aval.shape} == table} == {
        jnp.dtype("bfloat16")
    }
    wide = [e for e in products if any(x.aval.dtype == np.float32 for x in e.invars)]
    # Losses and weights are added up by source: vectors, not matrices.
    sums = (len(base.data.sources),)
    assert [str(e) for e in wide if e.outvars[0].aval.shape != sums] == []
