"""XLA's compiler options by kind of device: the ones that training wants, and a config's beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mmjax.errors import UserError

CompilerOptions = Mapping[str, bool | int | float | str]

# Those of the programs of a step, on GPUs (docs/planning.md, "Compiler options").
GPU: CompilerOptions = {
    # XLA computes GEMMs again and makes collectives synchronous rather than use more of the memory than this share, in
    # percent of what JAX's allocator has. Plans leave less free than its default, 95, does.
    "xla_gpu_memory_limit_slop_factor": 100,
}


def compiler_options(chosen: CompilerOptions, device: jax.Device) -> dict[str, bool | int | float | str]:
    """Return the options that the programs of a step are compiled with for a device, absent or not.

    chosen: the config's, in place of those of the same name. Raises UserError where XLA refuses one.
    """
    options = {**(GPU if device.platform in ("gpu", "cuda") else {}), **chosen}
    if options:
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
        try:
            jax.jit(jnp.negative, compiler_options=options).lower(scalar).compile()
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:  # the last two are of JAX's own options
            reason = str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ")
            raise UserError(f"compiler: XLA of JAX {jax.__version__} says: {reason}; change or leave it out") from error
    return options


def describe_compiler_options(options: CompilerOptions) -> str:
    """List the options on one line."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
