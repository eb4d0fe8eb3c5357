"""Map the modules of a checkpoint to its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mmjax.hf.folder import HfFolder
from mmjax.hf.parts import Parts

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
        prefixes = ("",) if set(modules) >= set(self.modules) else tuple(p for m in modules for p in self.prefixes[m])
        known = (*self.unused, *BUFFERS)
        return sorted(
            key
            for key in set(folder.tensors) - read
            if key.startswith(prefixes) and not any(fnmatchcase(key, pattern) for pattern in known)
        )
