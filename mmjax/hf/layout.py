"""Map parameters to checkpoint tensors: each one's key, axis order, and rows of a fused tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from mmjax.hf.folder import HfFolder


@dataclass(frozen=True)
class Part:
    """One parameter as a tensor, or some rows of one. A `*` in the key stands for the layer's number.

    order: the tensor's axes in the order in which ours has them; ours may join several into one.
    """

    key: str
    order: tuple[int, ...] | None = None  # None: as it is
    rows: tuple[int, int] | None = None  # of the tensor's first axis, where it holds several of ours

    def ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our parameter of this shape, from the tensor's rows."""
        return (tensor if self.order is None else tensor.transpose(self.order)).reshape(shape)

    def theirs(self, parameter: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor's rows, of this shape, from our parameter: the inverse of `ours`."""
        if self.order is None:
            return parameter.reshape(shape)
        # Our matrix joins several axes; here they come apart again, still in our order.
        turned = parameter.reshape([shape[axis] for axis in self.order])
        # argsort of a permutation is its inverse: order (2, 3, 1, 0) is undone by (3, 2, 0, 1).
        return turned.transpose(np.argsort(self.order))


Leaves = Mapping[str, Part]  # of one of our modules, by the attribute
TRANSPOSED = (1, 0)


def linear(key: str) -> Leaves:
    """A matrix, stored [out, in], with a bias or without."""
    return {"weight": Part(f"{key}.weight", TRANSPOSED), "bias": Part(f"{key}.bias")}


def norm(key: str) -> Leaves:
    """A norm's scale, and its bias if it has one."""
    return {"scale": Part(f"{key}.weight"), "bias": Part(f"{key}.bias")}


def table(key: str) -> Leaves:
    """A table with one row per entry."""
    return {"weight": Part(f"{key}.weight")}


def vector(key: str) -> Leaves:
    """A parameter that is a tensor by itself."""
    return {"weight": Part(key)}


def convolution(key: str, order: tuple[int, ...]) -> Leaves:
    """A convolution that is computed as a matrix product; `order` as in `Part`."""
    return {"weight": Part(f"{key}.weight", order), "bias": Part(f"{key}.bias")}


def third(leaves: Leaves, which: int, width: int) -> Leaves:
    """One of queries, keys and values that are stored as one matrix, each of `width` rows."""
    # Queries are rows 0 .. width, keys the next, values the last.
    rows = which * width, (which + 1) * width
    return {name: replace(part, rows=rows) for name, part in leaves.items()}


@dataclass(frozen=True)
class Parts:
    """Map the parameters of a tower or a connector to tensors, by our module's path, layers as `*`."""

    by_module: Mapping[str, Leaves]

    def find(self, path: tuple[str, ...]) -> Part | None:
        """The part that is this parameter (its path inside the tower, layers numbered); None: there is none."""
        *modules, leaf = path
        # At most one number stands in a path: that of the layer, or of a deepstack's merger.
        number = next((name for name in modules if name.isdigit()), "")
        named = ".".join("*" if name.isdigit() else name for name in modules)
        part = self.by_module.get(named, {}).get(leaf)
        return None if part is None else replace(part, key=part.key.replace("*", number))


BUFFERS = ("*.rotary_emb.inv_freq", "*.position_ids", "*.masked_bias")  # that old versions saved; nothing to read


@dataclass(frozen=True)
class Layout:
    """A checkpoint's modules by our names: "llm", an encoder's, "<encoder>.connector"."""

    modules: Mapping[str, Parts]
    prefixes: Mapping[str, tuple[str, ...]]  # what a module's tensors begin with
    unused: tuple[str, ...] = ()  # patterns of tensors that no computation here reads

    def strangers(self, folder: HfFolder, read: set[str], modules: Sequence[str]) -> list[str]:
        """Tensors of these modules that nobody reads and that are not known to be unused.

        Of all modules of a checkpoint together: every tensor that is not known.
        """
        # Every key begins with the empty string.
        prefixes = ("",) if set(modules) >= set(self.modules) else tuple(p for m in modules for p in self.prefixes[m])
        known = (*self.unused, *BUFFERS)
        return sorted(
            key
            for key in set(folder.tensors) - read
            if key.startswith(prefixes) and not any(fnmatchcase(key, pattern) for pattern in known)
        )
