"""Read compiled programs of CPUs from disk by what they are made from, without tracing and lowering them first.

JAX's own cache is keyed by a program's lowered text, which takes longer to make than the program
takes to read: tracing and lowering are Python. The key here is the source of mmjax, the libraries'
versions, JAX's settings, the machine, what the function closes over, and shapes, types and
shardings of its arguments. Whatever is not found is traced and lowered, and then JAX's cache may
still have it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

import mmjax
from mmjax.disk import atomic_write
from mmjax.runtime.devices import count_cached_program

LIBRARIES = "jax", "jaxlib", "flax", "optax", "numpy"  # that programs are traced through
FORMAT = 2  # of the files; those of other formats are not read
SUM = 32  # bytes of a file's checksum, which it begins with
FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"


class CachedProgram:
    """A jitted function, with the programs that `compile` has compiled or read from the cache.

    context: all that the function closes over, as text; None, or text that names an object by its
    address, keeps it out of the cache. mesh: the devices that it runs on. options: of `jax.jit`.
    """

    def __init__(
        self, context: str | None, mesh: Mesh, function: Callable[..., Any], **options: Any
    ) -> None:
        self._jitted = jax.jit(function, **options)
        self._devices = list(mesh.devices.flat)
        ids = [device.id for device in self._devices]
        self._context = (
            None if context is None else f"{function.__qualname__} {context} {options} {ids}"
        )
        self._programs: dict[Any, jax.stages.Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the program compiled for arguments of these shapes; else the jitted function."""
        return self._programs.get(_shapes(args), self._jitted)(*args)

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Return the program for these arguments, or for any of their shapes, types and shardings."""
        shapes = _shapes(args)
        if shapes not in self._programs:
            self._programs[shapes] = self._read_or_compile(args)
        return self._programs[shapes]

    def run(self, *args: Any) -> Any:
        """Compile the program for these arguments, or read it, and call it."""
        return self.compile(*args)(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Trace and lower the function, past the cache."""
        return self._jitted.lower(*args)

    def _read_or_compile(self, args: Any) -> jax.stages.Compiled:
        cache = jax.config.jax_compilation_cache_dir
        # Other devices' programs take minutes to compile, beside which tracing is little. Their
        # processes compile together, and each would have to find what the others find.
        if not cache or self._devices[0].platform != "cpu" or self._context is None:
            return self._jitted.lower(*args).compile()
        # Python numbers have neither weak type nor sharding, and NumPy's arrays have no sharding.
        described = [
            (getattr(x, "weak_type", ""), str(getattr(x, "sharding", "")))
            for x in jax.tree.leaves(args)
        ]
        environment = _environment(self._devices[0].client)
        context = (
            f"{FORMAT} {self._context} {jax.process_index()} {_shapes(args)} {described} {_settings()} "
            f"{environment}"
        )
        # The default repr of an object, as of a function, names its address, which differs by
        # process.
        if " at 0x" in context:
            return self._jitted.lower(*args).compile()
        # Two files: `<key of source and arguments>.source` has the name of a `<hash of the lowered
        # text>.program`. After an edit of mmjax the first is another, and the second is found again
        # by lowering, where the edit did not change the program.
        reference = Path(cache) / f"{_hash(context + _source())}.source"
        read = partial(_read_program, args=args, devices=self._devices)
        if (name := _read_text(reference)) and (program := read(Path(cache) / name)):
            return program
        # Of another version of the source most programs are the same once they are lowered.
        lowered = self._jitted.lower(*args)
        file = Path(cache) / f"{_hash(f'{context} {lowered.out_tree} {lowered.as_text()}')}.program"
        if file.exists() and not file.stat().st_size:
            return lowered.compile()  # what cannot be written may be in JAX's cache
        program = read(file)
        if program is None:
            with _jax_cache_off():  # what comes out of it cannot be written again
                program = lowered.compile()
            _write(file, _dumped(program, self._devices))
        _write(reference, file.name.encode())
        return program


def _shapes(args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple([(x.shape, x.dtype) if hasattr(x, "shape") else type(x) for x in leaves])


def _settings() -> str:
    values = {
        name: value
        for name, value in jax.config.values.items()
        if name != "jax_compilation_cache_dir"
    }
    return f"{jax.default_backend()} {sorted(values.items())}"


@cache
def _environment(client: Any) -> str:
    """Describe all that programs depend on beside their text and JAX's settings."""
    processor = f"{platform.machine()} {platform.processor()}"
    with suppress(OSError):  # whose instructions programs use
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = str(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    versions = [f"{name} {version(name)}" for name in LIBRARIES]
    return f"{versions} {sys.version} {client.platform_version} {processor} {[os.environ.get(name) for name in FLAGS]}"


@cache
def _source() -> str:
    """Hash the source of mmjax."""
    folder = Path(mmjax.__file__).parent
    sources = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        sources.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())
    return sources.hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _jax_cache_off() -> Iterator[None]:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def _read_text(file: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    return ""


def _read_program(file: Path, args: Any, devices: list[jax.Device]) -> jax.stages.Compiled | None:
    # A file that is missing, damaged or of another JAX: the program is compiled, and written again.
    with suppress(Exception):
        content = file.read_bytes()
        if hashlib.sha256(content[SUM:]).digest() != content[:SUM]:
            return None
        payload, output = pickle.loads(content[SUM:])
        trees = jax.tree.structure((args, {})), jax.tree.structure(output)
        program = serialize_executable.deserialize_and_load(
            payload, *trees, devices[0].client, devices
        )
        count_cached_program()
        return program
    return None


def _dumped(program: jax.stages.Compiled, devices: list[jax.Device]) -> bytes:
    """Return the content of a program's file; nothing where it cannot be written, as with calls of Python in it."""
    # What returns nothing JAX compiles for one device, and once read it would run on all.
    local = {device for device in devices if device.process_index == jax.process_index()}
    if {*program.runtime_executable().local_devices()} != local:
        return b""
    try:
        payload, _, tree = serialize_executable.serialize(program)
    except Exception:  # pickle has an own kind for each reason, and JAX others
        return b""
    # Trees of classes outside Python's own cannot be pickled; an object of that structure can.
    content = pickle.dumps((payload, jax.tree.unflatten(tree, [0] * tree.num_leaves)))
    return hashlib.sha256(content).digest() + content


def _write(file: Path, content: bytes) -> None:
    # without it, it is compiled again next time
    with suppress(OSError), atomic_write(file) as partial_file:
        partial_file.write_bytes(content)
