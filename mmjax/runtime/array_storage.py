"""Write arrays to storage and read them back, each into the sharding that is asked for, or into the host's memory.

The only file that uses Orbax. It is used by its handlers, below its checkpointers and its
CheckpointManager: why is in docs/libraries.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from mmjax.runtime.bit_sums import leaves_by_name

T = TypeVar("T")


class _LocalShards:
    """An array as Orbax reads it to save it, but no jax.Array: of these it refuses what one process holds whole.

    Where this process has none of the array, an empty shard that Orbax never writes gives it the
    shape of shards. Goes when Orbax saves arrays of a part of the processes' devices.
    """

    def __init__(self, x: jax.Array) -> None:
        self.shape = x.shape
        self.dtype = x.dtype
        self.sharding = x.sharding
        self.size = x.size
        self.nbytes = x.nbytes
        self.ndim = x.ndim
        empty = SimpleNamespace(shape=x.sharding.shard_shape(x.shape))
        self.addressable_shards = x.addressable_shards or [
            SimpleNamespace(data=empty, replica_id=-1, index=None)
        ]


class _StageHandler(ocp.type_handlers.ArrayHandler):
    """Saves arrays that lie on some of the processes' devices, such as those of a pipeline's stages."""

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None
    ) -> Any:
        return await super().serialize([_LocalShards(x) for x in values], infos, args)


class _HostHandler(ocp.type_handlers.NumpyHandler):
    """Reads and writes arrays in the host's memory, under the type of those on devices: a checkpoint is of one kind."""

    def typestr(self) -> str:
        return ocp.type_handlers.ArrayHandler.typestr(self)


class ArrayStorage:
    """Writes and reads the arrays of a pytree by one of Orbax's handlers."""

    def __init__(self) -> None:
        # By default Orbax slices replicated arrays on the devices, to divide the writing among
        # replicas: a hundred small programs, compiled in mid-run.
        arrays = _StageHandler(use_replica_parallel=False)
        host = _HostHandler(deepcopy_host_arrays=False)  # what is saved is a copy already
        registry = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, host), (jax.Array, arrays)
        )
        # Random mantissas do not compress: a tenth of the bytes for half of the time.
        self._handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry, use_compression=False
        )

    def begin_write(self, path: Path, tree: Any) -> list[Any]:
        """Copy arrays to the host's memory and begin to write them; return futures, all to be awaited.

        From then on their buffers may be donated. `finish_write` completes the folder.
        """
        saving = self._handler.async_save(path, args=ocp.args.PyTreeSave(tree))
        return _run_in_thread(saving)

    def finish_write(self, path: Path) -> None:
        """Complete the folder that all processes have written, on one of them."""
        self._handler.finalize(path)

    def structure(self, path: Path) -> Any:
        """Read shape and dtype of all stored arrays, in nested dicts."""
        return self._handler.metadata(path).tree

    def read(self, path: Path, structs: Any, partial: bool) -> Any:
        """Read arrays into their shardings, or whole into the host's memory where they all belong on CPUs.

        partial: more arrays than these may be stored. By the handler itself: Orbax's checkpointers
        have processes wait for each other, also for a failed one.
        """
        # A stage that trains nothing has no moments where the whole state has some: Orbax would
        # read a number there.
        item = _without_empty(structs) if partial else structs
        if lies_on_cpus(structs):
            args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        else:
            args = ocp.checkpoint_utils.construct_restore_args(item)
        request = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=partial)
        restored = leaves_by_name(self._handler.restore(path, args=request))
        expected = leaves_by_name(structs)
        for name, struct in expected.items():
            if restored[name].shape != struct.shape:
                raise ValueError(f"{name} has shape {restored[name].shape}, not {struct.shape}")
        return jax.tree.unflatten(jax.tree.structure(structs), [restored[x] for x in expected])


def lies_on_cpus(structs: Any) -> bool:
    """Return whether all arrays belong on CPUs, whose memory is the host's."""
    return all(d.platform == "cpu" for x in jax.tree.leaves(structs) for d in x.sharding.device_set)


def copy_to_host(x: jax.Array) -> np.ndarray:
    """Copy an array of this process: training may donate its buffers, of which CPUs' are NumPy's without a copy."""
    copy = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            copy[shard.index] = shard.data
    return copy


def put_tree(tree: Any, shardings: Any) -> Any:
    """Put arrays where they belong. NumPy's may be whole on each of several processes, which JAX would compare."""

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, np.ndarray):
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        return jax.device_put(x, sharding)

    return jax.tree.map(put, tree, shardings)


def _without_empty(tree: Any) -> Any:
    """Return dicts and named tuples as dicts, without what holds no array."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if not isinstance(tree, dict):
        return tree
    return {key: _without_empty(value) for key, value in tree.items() if jax.tree.leaves(value)}


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: a notebook's main thread already runs an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
