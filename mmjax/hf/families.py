"""From a Hugging Face folder to a model's config, and to where each of its modules' tensors lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from mmjax.config import ModelConfig
from mmjax.config_values import did_you_mean
from mmjax.errors import UserError
from mmjax.hf import decoders, qwen_vl
from mmjax.hf.decoders import decoder_of, decoder_parts, find_decoder
from mmjax.hf.fields import Fields
from mmjax.hf.folder import HfFolder
from mmjax.hf.parts import Parts

BUFFERS = ("*.rotary_emb.inv_freq", "*.position_ids", "*.masked_bias")  # that old versions saved; nothing to read


@dataclass(frozen=True)
class Layout:
    """Where a checkpoint's modules lie, by our names: "llm", an encoder's, "<encoder>.connector"."""

    modules: Mapping[str, Parts]
    prefixes: Mapping[str, tuple[str, ...]]  # what a module's tensors begin with
    unused: tuple[str, ...] = ()  # patterns of tensors that no computation here reads

    def strangers(self, folder: HfFolder, read: set[str], modules: Sequence[str]) -> list[str]:
        """Tensors of these modules that nobody reads and that are not known to be unused."""
        own = tuple(prefix for module in modules for prefix in self.prefixes[module])
        known = (*self.unused, *BUFFERS)
        return sorted(
            key
            for key in set(folder.tensors) - read
            if key.startswith(own) and not any(fnmatchcase(key, pattern) for pattern in known)
        )


def from_hf(folder: str | Path, freeze: Sequence[str] = ()) -> ModelConfig:
    """The model of a Hugging Face folder, whose weights it will start from: the whole model section of a config.

    freeze: modules that are not trained: "llm", an encoder's name, "<encoder>.connector". Raises UserError for a
    folder, family or field that cannot be read, naming it.
    """
    opened = HfFolder.open(Path(folder).expanduser().absolute())
    fields = Fields(opened.config, str(opened.path / "config.json"))
    kind = fields.get("model_type", str)
    if kind in qwen_vl.FAMILIES:
        return frozen(qwen_vl.model_of(fields, opened.path), freeze)
    if kind not in decoders.FAMILIES:
        known = ", ".join((*decoders.FAMILIES, *qwen_vl.FAMILIES))
        raise UserError(f"{fields.where}: model_type={kind!r} cannot be read; known: {known}")
    llm = decoder_of(fields)
    return frozen(ModelConfig(replace(llm, weights=str(opened.path))), freeze)


def frozen(model: ModelConfig, freeze: Sequence[str]) -> ModelConfig:
    """The model with these modules, and no others, frozen. Raises UserError for a module that it does not have."""
    modules = ["llm", *(part for name in model.encoders for part in (name, f"{name}.connector"))]
    for name in freeze:
        if name not in modules:
            raise UserError(f"freeze: there is no module {name!r}{did_you_mean(name, modules)}")
    encoders = {
        name: replace(e, frozen=name in freeze, connector=replace(e.connector, frozen=f"{name}.connector" in freeze))
        for name, e in model.encoders.items()
    }
    return replace(model, llm=replace(model.llm, frozen="llm" in freeze), encoders=encoders)


def layout_of(folder: HfFolder, model: ModelConfig) -> Layout:
    """Where the modules that this model takes from a folder lie there."""
    if folder.config.get("model_type") in qwen_vl.FAMILIES:
        return Layout(*qwen_vl.modules_of(folder, model))
    inner, output = find_decoder(folder)
    unused = (f"{output}.weight",) if model.llm.tied else ()
    return Layout({"llm": decoder_parts(model.llm, inner, output)}, {"llm": (inner, output)}, unused)
