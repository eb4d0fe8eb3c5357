"""Map parameters to checkpoint tensors: each one's key, axis order, and rows or columns of a fused tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from mmjax.hf.folder import HfFolder, split_entry


@dataclass(frozen=True)
class TensorSlice:
    """Locate one parameter in a checkpoint: a tensor, or some rows or columns of one.

    key: a `*` in it stands for the layer's number; `name[3]` is entry 3 of a tensor's first axis.
    order: the tensor's axes in the order in which the parameter has them, which may join several
    into one. view: axes that the tensor is split into before that.
    """

    key: str
    order: tuple[int, ...] | None = None  # None: as it is
    # of the tensor's first axis, where it holds several parameters
    rows: tuple[int, int] | None = None
    columns: tuple[int, ...] | None = None  # of its second axis, perhaps every so many
    # the parameter's first axis counts experts, whose numbers stand for `#` in the key
    experts: bool = False
    view: tuple[int, ...] | None = None  # None: its own axes
    # (n, first, stop): rows of each of n equal groups along its first axis, where they take turns;
    # then an axis more
    groups: tuple[int, int, int] | None = None

    def split(self, shape: tuple[int, ...]) -> list[tuple[TensorSlice, tuple[int, ...]]]:
        """Return the slice and the shape of each expert of a parameter of this shape; of any other its own."""
        if not self.experts:
            return [(self, shape)]
        expert = replace(self, experts=False)
        return [
            (replace(expert, key=self.key.replace("#", str(n))), shape[1:]) for n in range(shape[0])
        ]

    def selected(self, tensor: np.ndarray) -> np.ndarray:
        """Select a view of what holds the parameter from the tensor that `key` names without its entry."""
        _, entry = split_entry(self.key)
        tensor = tensor[...] if entry is None else tensor[entry]
        if self.groups is not None:
            count, first, stop = self.groups
            return tensor.reshape(count, -1, *tensor.shape[1:])[:, first:stop]
        if self.rows is not None:
            tensor = tensor[slice(*self.rows)]
        return tensor if self.columns is None else tensor[:, slice(*self.columns)]

    def from_hf(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the parameter of this shape that what is `selected` from the tensor holds."""
        tensor = tensor if self.view is None else tensor.reshape(self.view)
        return (tensor if self.order is None else tensor.transpose(self.order)).reshape(shape)

    def to_hf(self, parameter: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return what is `within` the tensor, of this shape, to hold the parameter: the inverse of `from_hf`."""
        if self.order is None:
            return parameter.reshape(shape)
        # The parameter joins several axes; here they come apart again, still in its order.
        axes = self.view or shape
        turned = parameter.reshape([axes[axis] for axis in self.order])
        # argsort of a permutation is its inverse: order (2, 3, 1, 0) is undone by (3, 2, 0, 1).
        return turned.transpose(np.argsort(self.order)).reshape(shape)


LeafTensors = Mapping[str, TensorSlice]  # of one module, by attribute
TRANSPOSED = (1, 0)


def linear(key: str) -> LeafTensors:
    """Locate a linear layer: a matrix, stored [out, in], with a bias or without."""
    return {"weight": TensorSlice(f"{key}.weight", TRANSPOSED), "bias": TensorSlice(f"{key}.bias")}


def norm(key: str) -> LeafTensors:
    """Locate a norm's scale, and its bias if it has one."""
    return {"scale": TensorSlice(f"{key}.weight"), "bias": TensorSlice(f"{key}.bias")}


def table(key: str) -> LeafTensors:
    """Locate a table with one row per entry."""
    return array(f"{key}.weight")


def array(key: str, order: tuple[int, ...] | None = None) -> LeafTensors:
    """Locate an array that is no module's in the checkpoint; `order` as in `TensorSlice`."""
    return {"weight": TensorSlice(key, order)}


def linears(path: str, key: str, /, **names: str) -> dict[str, LeafTensors]:
    """Locate linear layers of a module, by our names those of the checkpoint below `key`."""
    return below(path, {ours: linear(f"{key}.{theirs}") for ours, theirs in names.items()})


def below(path: str, parts: Mapping[str, LeafTensors]) -> dict[str, LeafTensors]:
    """Return parts of a module by their paths in the tower."""
    return {f"{path}.{name}": leaves for name, leaves in parts.items()}


def convolution(key: str, order: tuple[int, ...]) -> LeafTensors:
    """Locate a convolution that is computed as a matrix product; `order` as in `TensorSlice`."""
    return {"weight": TensorSlice(f"{key}.weight", order), "bias": TensorSlice(f"{key}.bias")}


def merging_linear(key: str, outputs: int, inputs: int, merge: int) -> LeafTensors:
    """Locate a matrix over merge x merge neighbours that is stored channel by channel: [out, channel x neighbour]."""
    # Ours: neighbour, channel, out.
    return {"weight": TensorSlice(f"{key}.weight", (2, 1, 0), view=(outputs, inputs, merge**2))}


def fused_parts(leaves: LeafTensors, **widths: int) -> dict[str, LeafTensors]:
    """Locate layers that are stored as one matrix: their names and rows, in its order."""
    parts = {}
    start = 0
    for part, width in widths.items():
        rows = start, start + width
        parts[part] = {name: replace(tensor, rows=rows) for name, tensor in leaves.items()}
        start += width
    return parts


def fused_columns(leaves: LeafTensors, **widths: int) -> dict[str, LeafTensors]:
    """The same of matrices that are stored [in, out]: their names and columns."""
    parts = fused_parts(leaves, **widths)
    return {
        part: {
            name: replace(tensor, rows=None, columns=tensor.rows) for name, tensor in fused.items()
        }
        for part, fused in parts.items()
    }


@dataclass(frozen=True)
class TensorNames:
    """Map the parameters of a tower or a connector to tensors, by the module's path, layers as `*`, or by number."""

    by_module: Mapping[str, LeafTensors]

    def find(self, path: tuple[str, ...]) -> TensorSlice | None:
        """Return the tensor of this parameter (its path inside the tower, layers numbered); None: there is none."""
        *modules, leaf = path
        # At most one number stands in a path: that of the layer, or of a deepstack's merger.
        number = next((name for name in modules if name.isdigit()), "")
        named = ".".join("*" if name.isdigit() else name for name in modules)
        leaves = self.by_module.get(".".join(modules)) or self.by_module.get(named, {})
        tensor = leaves.get(leaf)
        return None if tensor is None else replace(tensor, key=tensor.key.replace("*", number))


# That old versions saved; nothing to read.
BUFFERS = ("*.rotary_emb.inv_freq", "*.position_ids", "*.masked_bias", "*h.*.attn.bias")


@dataclass(frozen=True)
class Layout:
    """Map a checkpoint's modules, by their names here: "llm", an encoder's, "<encoder>.connector"."""

    modules: Mapping[str, TensorNames]
    prefixes: Mapping[str, tuple[str, ...]]  # what a module's tensors begin with
    unused: tuple[str, ...] = ()  # patterns of tensors that no computation here reads

    def unexpected_tensors(
        self, folder: HfFolder, read: set[str], modules: Sequence[str]
    ) -> list[str]:
        """List tensors of these modules that nobody reads and that are not known to be unused.

        Of all modules of a checkpoint together: every tensor that is not known.
        """
        # Every key begins with the empty string.
        prefixes = (
            ("",)
            if set(modules) >= set(self.modules)
            else tuple(p for m in modules for p in self.prefixes[m])
        )
        known = (*self.unused, *BUFFERS)
        return sorted(
            key
            for key in set(folder.tensors) - read
            if key.startswith(prefixes) and not any(fnmatchcase(key, pattern) for pattern in known)
        )
