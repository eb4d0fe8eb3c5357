"""Choose a run's devices, group them by host, and keep the compilation cache."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from mmjax.config import MeshConfig
from mmjax.console import size
from mmjax.data.plan.placement import Topology
from mmjax.distributed import coordination
from mmjax.errors import LESS_MEMORY, UserError, check_file_limit
from mmjax.parallel.sharding import local_ranks, row_ranks
from mmjax.planning.hardware import USABLE, Cluster, Device, find_device

Clock = Callable[[], float]  # seconds

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_events: Counter[str] = Counter()  # since `_listen`


class CompileCounter:
    """Counts the programs that XLA was asked for since this counter was made, and how many the disk cache had."""

    def __init__(self) -> None:
        _listen()
        self._begin = _events.copy()  # events are counted per process, never from zero again

    @property
    def requested(self) -> int:
        """Return how many programs were not in this process's memory."""
        return _events[_COMPILE] - self._begin[_COMPILE]

    @property
    def from_cache(self) -> int:
        """Return how many of the requested were read from the disk cache."""
        return _events[_HIT] - self._begin[_HIT]

    @property
    def compiled(self) -> int:
        """Return how many of the requested were compiled."""
        return self.requested - self.from_cache


@cache
def _listen() -> None:
    """Count JAX's events from now on; its hooks cannot be removed, so there is one per process and event."""
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: _events.update((event,))
    )
    jax.monitoring.register_event_listener(lambda event, **_: _events.update((event,)))


def count_cached_program() -> None:
    """Count a program that was read from disk without asking JAX for it."""
    _events.update((_COMPILE, _HIT))


def enable_compilation_cache(folder: Path) -> None:
    """Cache every compiled program under `folder`; a second start of the same run compiles nothing."""
    if jax.config.jax_compilation_cache_dir != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # JAX opens its cache once and would stay with the previous folder
        compilation_cache.reset_cache()
    # JAX's defaults skip programs that compile fast or are small.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def device_description(device: jax.Device, clock: Clock = time.perf_counter) -> Device:
    """Return a device's peak rates and memory from its data sheet; a CPU, or an unknown device, is measured."""
    # The devices of one CPU share its cores, its memory and the memory's bandwidth.
    known = find_device(device.device_kind)
    if known is not None:
        return known
    sharing = jax.local_device_count() * coordination.per_host() if device.platform == "cpu" else 1
    peak = measured_peak(device, clock=clock) / sharing
    bandwidth = measured_update_bandwidth(device, clock=clock) / sharing
    return Device(
        name=device.platform,
        kind=device.device_kind,
        platform=device.platform,
        bfloat16=peak,
        float32=peak,
        memory=(device.memory_stats() or {}).get("bytes_limit", host_ram() / sharing),
        bandwidth=bandwidth,
        link=bandwidth,
        network=bandwidth,
        host=bandwidth,
    )


# Of cgroup versions 2 and 1.
CGROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def host_ram() -> float:
    """Return the bytes of RAM of this machine, or of this process's container where that may use less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # `sysconf` gives the machine's RAM in a container too; the container's limit is in its cgroup.
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # the file is missing, or says "max"
            limits.append(int(Path(path).read_text()))
    return float(min(limits))


def ram_per_device(device: jax.Device) -> float | None:
    """Return the bytes of RAM for each of the devices that a CPU is divided into; None for other devices."""
    return (
        host_ram() / (jax.local_device_count() * coordination.per_host())
        if device.platform == "cpu"
        else None
    )


def check_ram(program: jax.stages.Compiled, device: jax.Device) -> None:
    """Raise UserError where a program for a CPU takes more memory than that has, before it runs."""
    ram = ram_per_device(device)
    if ram is None:
        return
    memory = program.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    if needed > ram:
        raise UserError(
            f"a step takes {size(needed)} of RAM for each device, as compiled, and there are {size(ram)}; "
            f"{LESS_MEMORY}",
            everywhere=True,
        )


def local_cluster() -> Cluster:
    """Describe the devices that JAX finds on this machine."""
    devices = jax.devices()
    return Cluster(device_description(devices[0]), 1, len(devices))


def peak_flops(devices: Sequence[jax.Device], precision: Literal["bfloat16", "float32"]) -> float:
    """Return the peak FLOP/s of all `devices` together."""
    # others cannot be measured from here
    local = next(d for d in devices if d.process_index == jax.process_index())
    return device_description(local).peak(precision) * len(devices)


def peak_memory_used(mesh: Mesh) -> int | None:
    """Return the peak bytes in use so far on this process's fullest device; None where the backend does not count."""
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in mesh.local_devices
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def resident_memory() -> int:
    """Return this process's resident bytes of host memory; 0 where the system does not tell."""
    try:
        # The second field: resident pages.
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def open_files() -> int:
    """Count this process's open files; 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


@cache
def measured_bandwidth(device: jax.Device, size: int = 2**25) -> float:
    """Measure the bytes per second, read and written, of the fastest of a few passes over `size` bytes."""
    x = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    return 2 * size / _best_seconds(jax.jit(lambda x: x + 1), x, repeats=3)


@cache
def measured_update_bandwidth(device: jax.Device, clock: Clock = time.perf_counter) -> float:
    """Measure the bytes per second, read and written, of the fastest of a few updates like AdamW's, in place.

    An unknown device's memory counts by these: on a CPU a step's update computes, and puts what it
    makes in new pages of memory before it copies it, so that a plain pass over as many bytes takes
    a fifth of the time.
    """
    parameters = 2**23
    state = tuple(
        jax.device_put(jnp.full(parameters, n, jnp.float32), device) for n in (1.0, 2.0, 3.0)
    )
    gradient = jax.device_put(jnp.ones(parameters, jnp.float32), device)

    def update(state: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
        parameter, mean, square = state
        finite = jnp.isfinite((gradient * gradient).sum())
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient * gradient
        parameter = parameter - 1e-3 * (mean / (jnp.sqrt(square) + 1e-8) + 0.01 * parameter)
        return jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (parameter, mean, square), state
        )

    program = jax.jit(update, donate_argnums=0)
    seconds = _best_seconds(lambda state: program(state, gradient), state, 5, clock)
    # Of 4 bytes each: the state is read and written, the gradient read twice.
    return 32 * parameters / seconds


@cache
def measured_peak(device: jax.Device, clock: Clock = time.perf_counter) -> float:
    """Measure FLOP/s by the fastest of a few float32 products of square matrices: the peak of an unknown device."""
    size = 1024
    a = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    return 2 * size**3 / _best_seconds(jax.jit(lambda a: a @ a), a, 5, clock)


def _best_seconds(
    program: Callable[[Any], Any], x: Any, repeats: int, clock: Clock = time.perf_counter
) -> float:
    """Time the fastest of a few calls, each on the result of the one before, after one that compiles."""
    x = jax.block_until_ready(program(x))
    best = float("inf")
    for _ in range(repeats):
        begin = clock()
        x = jax.block_until_ready(program(x))
        best = min(best, clock() - begin)
    return best


INSTALL_CUDA = 'pip install "mmjax[cuda13]"'


def set_gpu_memory_fraction() -> None:
    """Let JAX's allocator use as much of a GPU as plans assume, unless the user says otherwise; before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(USABLE))


def choose_devices(
    device: Literal["auto", "cpu", "gpu", "tpu"], nvidia: Path = Path("/proc/driver/nvidia/version")
) -> list[jax.Device]:
    """Return the devices to train on.

    nvidia: a file that exists where the NVIDIA driver is loaded. Raises UserError where the machine
    has an NVIDIA GPU that JAX cannot use (unless device=cpu or JAX_PLATFORMS=cpu), or no device of
    the requested kind, and where the process may not open as many files as it needs.
    """
    check_file_limit()
    if device != "auto":
        try:
            return jax.devices(device)
        except RuntimeError as error:
            remedy = f"; for NVIDIA GPUs install {INSTALL_CUDA}" if device == "gpu" else ""
            raise UserError(
                f"device={device}: JAX finds no {device} here{remedy}, or use device=auto"
            ) from error
    devices = jax.devices()
    if devices[0].platform == "cpu" and nvidia.exists() and jax.config.jax_platforms != "cpu":
        raise UserError(
            f"this machine has an NVIDIA GPU that JAX cannot use; install it with: {INSTALL_CUDA}  (device=cpu to "
            "train on the CPU all the same)"
        )
    return devices


def mesh_topology(mesh: Mesh, config: MeshConfig) -> Topology:
    """Return the ranks of a mesh and how many of them are on one host; encoder outputs are exchanged among these.

    Raises UserError where `mesh.ranks_per_node` does not divide the ranks.
    """
    return make_topology(
        config, row_ranks(mesh), len(local_ranks(mesh)) * coordination.per_host(), dict(mesh.shape)
    )


def make_topology(
    config: MeshConfig, ranks: int, ranks_on_host: int, sizes: Mapping[str, int]
) -> Topology:
    """Return the topology of so many ranks. sizes: of the mesh's axes.

    Raises UserError where `mesh.ranks_per_node` does not divide them."""
    peers = config.ranks_per_node
    if peers < 0 or (peers and ranks % peers):
        raise UserError(
            f"mesh.ranks_per_node={peers}: choose a divisor of the {ranks} ranks, or 0 for those of a host"
        )
    # The gcd, since groups of ranks must be equal even where the ranks of a host do not divide all
    # of them.
    per_node = math.gcd(ranks, ranks_on_host)
    encoders_per_rank = sizes["context"] * (sizes["tensor"] if config.encoders == "data" else 1)
    return Topology(ranks, peers or per_node, per_node, encoders_per_rank, sizes["context"])
