"""Grain workers that bring packed steps ahead of the training loop."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.errors import UserError

# Grain imports Orbax where it finds it, .3 s in each data worker for a class that is not used there:
# hidden in workers alone, which are processes of our own. Remove when Grain imports it where it is
# asked for.
_IN_WORKER = multiprocessing.parent_process() is not None
if _IN_WORKER:
    sys.modules.setdefault("orbax.checkpoint", None)
import grain  # noqa: E402
from grain.multiprocessing import SharedMemoryArray  # noqa: E402

if _IN_WORKER and sys.modules["orbax.checkpoint"] is None:
    del sys.modules["orbax.checkpoint"]


class Block(NamedTuple):
    """An object whose arrays lie one behind the other."""

    head: bytes  # the object, pickled without what its arrays hold
    ends: tuple[int, ...]  # of each array in `data`
    data: np.ndarray  # uint8 [bytes]


def to_block(value: Any) -> Block:
    """Pack `value`, which can be pickled and has at least one array that is not empty, with a copy of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [np.asarray(buffer.raw()) for buffer in buffers]
    return Block(
        head, tuple(np.cumsum([part.size for part in parts]).tolist()), np.concatenate(parts)
    )


def from_block(block: Block) -> Any:
    """Unpack what went into `to_block`, each array in memory of its own: JAX may keep one to the end."""
    parts = np.split(np.asarray(block.data), block.ends[:-1])
    return pickle.loads(block.head, buffers=[np.array(part) for part in parts])


class LoadingFailed(RuntimeError):
    """A step could not be loaded in a data worker; the message is the worker's traceback."""


class WorkerEnded(UserError):
    """A data worker was killed, or ended by itself."""


def load_block(loader: StepLoader, step: int) -> Block:
    """Load a step in another process. An error that can't be pickled would leave the training process waiting."""
    try:
        return to_block(loader(step))
    except UserError as error:
        raise UserError(str(error)) from None
    except BaseException:
        raise LoadingFailed(f"step {step} could not be loaded:\n{traceback.format_exc()}") from None


def refuse_in_worker() -> None:
    """Raise UserError in a data worker, which imports the script that training was started from.

    Else a script that trains at its top level would do so in each of its workers too.
    """
    # Private: set while a child imports its parent's script, and in no other child. Remove when
    # Grain's workers can be started without importing that script.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            'a data worker imports the script that trains: put train(..) there under if __name__ == "__main__":'
        )


# A terminal and a cluster send these to every process; workers leave it to their parent to heed
# them.
_FOR_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SHOW_STACKS = signal.SIGQUIT
_SHARED_MEMORY = Path("/dev/shm")  # where Linux shows blocks by their names


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that do not end workers until those that are started here are ready for them.

    They inherit what this thread blocks, also where a thread that is started here starts them
    later.
    """
    blocked = {*_FOR_PARENTS, _SHOW_STACKS}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        # Starting it lets some of them through again. Remove both lines when it restores the mask
        # that it found.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _start_worker(worker: int, workers: int) -> None:
    """End this worker when its parent ends, also when that was killed; SIGQUIT has it write its stacks."""
    for of_parent in _FOR_PARENTS:
        signal.signal(of_parent, signal.SIG_IGN)
    faulthandler.register(_SHOW_STACKS)
    # Private: remove when Grain names the blocks that it makes, or frees all of them.
    shared_memory._SHM_NAME_PREFIX = f"/{_block_prefix(os.getppid())}"
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    # the main thread may be in native code. Remove when Grain ends workers whose parent was killed
    os._exit(1)


def _block_prefix(parent: int) -> str:
    """Return how the names of the shared memory of a process's data workers begin."""
    return f"mm{parent:x}-"  # short: a whole name has 14 characters


def kill_workers() -> None:
    """End all data workers of this process at once, and free the memory that they shared with it."""
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()
    _free_blocks()


def _free_blocks() -> None:
    """Free what ended workers have shared and nobody has taken: Python calls it a leak at exit."""
    for path in _SHARED_MEMORY.glob(f"{_block_prefix(os.getpid())}*"):
        with suppress(FileNotFoundError):  # freed meanwhile
            block = shared_memory.SharedMemory(path.name)
            block.close()
            block.unlink()


def steps(
    loader: StepLoader, first: int, last: int, workers: int, prefetch: int
) -> Iterator[LoadedStep]:
    """Load steps `first` to `last` - 1 in order, prefetched by `workers` persistent processes (0: by a thread).

    They start at once. Grain only loads and prefetches what the plan names: step numbers go in,
    whole steps come out. What loading raises is raised here: UserError as it was, anything else
    from a worker as LoadingFailed. A worker that was killed, or ended by itself, is a UserError.
    """
    if first >= last:
        return iter(())
    if workers == 0:
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=max(1, prefetch))
        iterator = iter(grain.MapDataset.range(first, last).map(loader).to_iter_dataset(options))
    else:
        workers = min(workers, last - first)
        iterator = start_workers(
            partial(load_block, loader), first, last, workers, max(1, prefetch)
        )
    loaded = read_steps(iterator, first, last)
    # so that close() finds it running and ends the workers, even if no step is ever asked for
    next(loaded)
    return loaded


def start_workers(
    load: Callable[[int], Block | str], first: int, last: int, workers: int, prefetch: int
) -> grain.DatasetIterator:
    """Start processes that call `load` with the steps `first` to `last` - 1. Raises UserError."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain's workers read absl flags, which nobody parses here
    # Workers import JAX through Grain and must never touch an accelerator; this process has read
    # the variable already.
    os.environ["JAX_PLATFORMS"] = "cpu"
    dataset = grain.MapDataset.range(first, last).map(load)
    iterable = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
    try:
        with _signals_blocked():
            iterator = iter(iterable.mp_prefetch(options, worker_init_fn=_start_worker))
            # makes what start_prefetch starts: otherwise each worker waits for the one before it
            iterator.get_state()
            iterator.start_prefetch()
        multiprocessing.util.Finalize(None, _free_blocks, exitpriority=0)
    except OSError as error:
        raise UserError(
            f"data workers cannot be started: {error.strerror or error}; make room in /dev/shm, or set data.workers=0"
        ) from error
    return iterator


def read_steps(iterator: grain.DatasetIterator, first: int, last: int) -> Iterator[LoadedStep]:
    """Yield None at first, then every step, or raise: Grain ends early without a word when it loses count.

    Raises WorkerEnded where a worker did.
    """
    exhausted = False
    try:
        yield None
        for step in range(first, last):
            loaded = _unpacked(next(iterator, None))
            if loaded is None or int(loaded.step) != step:
                raise RuntimeError(f"the data workers ended before step {step} of {last}")
            exhausted = step == last - 1
            yield loaded
    except RuntimeError as error:
        if "terminated unexpectedly" not in str(error):
            raise
        raise WorkerEnded(f"{_how_it_ended(str(error), step)}; then go on with --resume") from error
    finally:
        # Workers take a second or two to end; nobody needs to wait for that.
        threading.Thread(target=end_workers, args=(iterator, exhausted)).start()


def _how_it_ended(message: str, step: int) -> str:
    cause = message.split(".")[0]
    if "exit code -" not in message:
        return f"a data worker ended before step {step}: {cause}. What it said is above; mend that"
    return (
        f"a data worker was killed before step {step}: {cause}. If memory or /dev/shm ran out, "
        "lower data.workers or data.prefetch"
    )


def _unpacked(brought: Block | LoadedStep | None) -> LoadedStep | None:
    return from_block(brought) if isinstance(brought, Block) else brought


def end_workers(iterator: grain.DatasetIterator, exhausted: bool) -> None:
    """End the workers. exhausted: all of their steps were read."""
    if exhausted:
        # The exception that ends a worker holds its last step, in shared memory and in a cycle.
        next(iterator, None)
        gc.collect()
    iterator.close()
    # A thread of Grain's frees the memory of steps, and Python would call what it has not come to
    # at exit a leak. One more task for it ends behind the others. Private; remove when `close`
    # waits for that thread.
    if freeing := SharedMemoryArray._del_thread_pool:
        freeing.apply(int)
    _free_blocks()
