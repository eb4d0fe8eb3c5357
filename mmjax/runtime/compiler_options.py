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
    # XLA computes GEMMs again and makes collectives synchronous rather than use more of the memory
    # than this share, in percent of what JAX's allocator has. Plans leave less free than its
    # default, 95, does.
    "xla_gpu_memory_limit_slop_factor": 100,
}

# Those with context parallelism beside them: keys, values and their gradients are under way at the
# same time.
GPU_CONTEXT: CompilerOptions = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}

# Those of programs that a CPU runs a few times: without LLVM's optimizations, with XLA's older code
# for fusions and in one piece they compile in a third of the time.
QUICK_CPU: CompilerOptions = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

# Those of programs that a CPU runs once, to make parameters: they compile in half the time, and to
# the same bits, which they do not with none of LLVM's optimizations.
ONCE_CPU: CompilerOptions = {"xla_backend_optimization_level": 1}


def compiler_options(
    chosen: CompilerOptions, device: jax.Device, context: int = 1
) -> dict[str, bool | int | float | str]:
    """Return the options that the programs of a step are compiled with for a device, absent or not.

    chosen: the config's, in place of those of the same name. context: devices that share a row.
    Raises UserError where XLA refuses one.
    """
    defaults = (
        {**GPU, **(GPU_CONTEXT if context > 1 else {})}
        if device.platform in ("gpu", "cuda")
        else {}
    )
    options = {**defaults, **chosen}
    if reason := _refusal(options, device):
        raise UserError(
            f"compiler: XLA of JAX {jax.__version__} says: {reason}; change or leave it out"
        )
    return options


def quick_compiler_options(
    chosen: CompilerOptions, device: jax.Device
) -> dict[str, bool | int | float | str]:
    """Return options for programs of a step that run only a few times: `QUICK_CPU` on CPUs, if XLA still has them all.

    chosen and errors: as `compiler_options`.
    """
    quick = QUICK_CPU if device.platform == "cpu" and not _refusal(QUICK_CPU, device) else {}
    return compiler_options({**quick, **chosen}, device)


def initial_compiler_options(device: jax.Device) -> dict[str, bool | int | float | str]:
    """Return options for programs that make parameters: `ONCE_CPU` on CPUs, if XLA still has them."""
    quicker = jax.config.read("jax_disable_most_optimizations")  # than these options are
    return (
        {} if quicker or device.platform != "cpu" or _refusal(ONCE_CPU, device) else dict(ONCE_CPU)
    )


def _refusal(options: CompilerOptions, device: jax.Device) -> str:
    """Return why XLA refuses options for a device, or nothing."""
    if options:
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
        try:
            jax.jit(jnp.negative, compiler_options=dict(options)).lower(scalar).compile()
        except (
            jax.errors.JaxRuntimeError,
            ValueError,
            TypeError,
        ) as error:  # the last two are of JAX's own options
            return str(error).partition("\n")[0].removeprefix("INVALID_ARGUMENT: ")
    return ""


def describe_compiler_options(options: CompilerOptions) -> str:
    """List the options on one line."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
