"""Write a run as a folder that serves: ``python -m mmjax.export RUN OUT [--adapter] [--step N] [--source FOLDER]``."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mmjax.adapters import adapted_modules
from mmjax.config import ModelConfig
from mmjax.config_values import did_you_mean, encode
from mmjax.errors import UserError, leave, run_command
from mmjax.hf.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, module_path, saved_name, tensor_names
from mmjax.hf.folder import SINGLE, HfFolder
from mmjax.hf.parts import TRANSPOSED
from mmjax.hf.writing import NewTensor, copy_beside, write_tensors
from mmjax.hub import checkpoint_folder
from mmjax.models.model import Model
from mmjax.training.checkpoint import SavedParameters, checkpoint_step
from mmjax.training.console import say, table
from mmjax.training.exporting import Exporter, Piece
from mmjax.training.pretrained import by_folder
from mmjax.training.run_folder import RunFolder

PARTS = "parts.json"  # of a composed model: the folder of each module


def export(
    run: Path,
    out: Path,
    step: int | None = None,
    adapter: bool = False,
    sources: Sequence[str] = (),
    again: bool = False,
) -> list[str]:
    """Write the parameters of a run's checkpoint, by default the newest, to a folder that appears whole or not at all.

    adapter: only the adapters, as PEFT reads them. sources: folders that moved, each NEW, or MODULE=NEW. again: replace
    what is at `out`. Returns what to tell. Raises UserError where something is missing or in the way.
    """
    folder = RunFolder(run)
    config = folder.read_config()
    model = _with_sources(config.model, sources)
    step = checkpoint_step(folder.checkpoints, step)
    opened = {path: (_opened(path, names), names) for path, names in by_folder(model).items()}
    _check_out(out, [folder.path, *opened], again)
    cuts = {name: tuple(range(1, c.layers)) for name, c in {"llm": model.llm, **model.encoders}.items()}
    built = Model.build(model, jnp.float32, cuts)
    exporter = Exporter(model, SavedParameters(folder.checkpoints, step, built))
    with _whole(out, again) as partial:
        if adapter:
            told = _adapter(exporter, built, list(opened.values()), partial)
        elif len(opened) == 1 and not _born(model):
            ((source, modules),) = opened.values()
            told = _folder(exporter, source, modules, partial)
        else:
            told = _composed(exporter, list(opened.values()), partial)
    return [f"{run} after {step} steps: {out}", *told]


# ------------------------------------------------------------------------------------------------------ where from


def _with_sources(model: ModelConfig, sources: Sequence[str]) -> ModelConfig:
    """The model with folders where they are now."""
    folders = by_folder(model)
    modules = [module for names in folders.values() for module in names]
    for source in sources:
        module, named, path = source.rpartition("=")
        if named and module not in modules:
            raise UserError(
                f"--source {source}: no module {module!r} came from a folder{did_you_mean(module, modules)}"
            )
        if not named and len(folders) != 1:
            listed = "; ".join(f"{', '.join(names)} from {path}" for path, names in folders.items()) or "none"
            raise UserError(f"--source {source}: say of which module, --source MODULE=FOLDER ({listed})")
        moved = next(names for names in folders.values() if not named or module in names)
        model = _moved(model, moved, str(checkpoint_folder(path).absolute()))
    return model


def _moved(model: ModelConfig, modules: Sequence[str], path: str) -> ModelConfig:
    def at(section, module: str):
        return replace(section, weights=path) if module in modules else section

    encoders = {
        name: replace(at(e, name), connector=at(e.connector, f"{name}.connector")) for name, e in model.encoders.items()
    }
    return replace(model, llm=at(model.llm, "llm"), encoders=encoders)


def _opened(path: Path, modules: Sequence[str]) -> HfFolder:
    if not path.is_dir():
        raise UserError(
            f"{path}, from which {', '.join(modules)} came, is not there; say where it is now with --source FOLDER"
        )
    return HfFolder.open(path)


def _born(model: ModelConfig) -> list[str]:
    """The modules that came from no folder."""
    modules = ["llm", *(part for name in model.encoders for part in (name, f"{name}.connector"))]
    known = {module for names in by_folder(model).values() for module in names}
    return [module for module in modules if module not in known]


# --------------------------------------------------------------------------------------------------------- where to


def _check_out(out: Path, kept: Sequence[Path], again: bool) -> None:
    here = out.expanduser().resolve()
    for path in kept:
        if path.resolve().is_relative_to(here):
            raise UserError(f"{out} is or holds {path}, which is needed; choose another folder")
    if out.exists() and not again:
        raise UserError(f"{out} is there already; choose another folder, or replace it with --overwrite")


@contextmanager
def _whole(out: Path, again: bool) -> Iterator[Path]:
    """A folder to write into, which takes its name when all is written, and is gone where something fails."""
    partial, old = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.replaced")
    try:
        for stale in (partial, old):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if again and out.exists():
            out.rename(old)
        partial.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}; choose another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- what


def _folder(exporter: Exporter, source: HfFolder, modules: Sequence[str], out: Path) -> list[str]:
    """A source's folder again, with these modules as trained."""
    left = copy_beside(source, out)
    changed = exporter.rewrite(source, modules, out)
    merged = [module for module in adapted_modules(exporter.model) if module in modules]
    lines = [
        f"  {changed} of {len(source.tensors)} tensors changed, all else as in {source.path}",
        *([f"  adapters of {', '.join(merged)} merged"] if merged else []),
        *([f"  left out, as weights that nobody loaded: {', '.join(left)}"] if left else []),
    ]
    return lines


def _composed(exporter: Exporter, opened: Sequence[tuple[HfFolder, list[str]]], out: Path) -> list[str]:
    """Every source's folder again inside `out`, and modules that came from none in mmjax's own layout."""
    model, parts = exporter.model, dict[str, str]()
    rows = []
    for source, modules in opened:
        _folder(exporter, source, modules, _made(out / modules[0]))
        parts |= dict.fromkeys(modules, modules[0])
        rows.append((f"{modules[0]}/", f"{', '.join(modules)}, as in {source.path}"))
    for module in _born(model):
        own = _made(out / module)
        write_tensors(own / SINGLE, exporter.own_layout(module))
        section = _section(model, module)
        described = {"mmjax_module": module, **encode(type(section), section, module)}
        (own / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        parts[module] = module
        rows.append((f"{module}/", "in mmjax's own layout, for it came from no folder"))
    (out / PARTS).write_text(json.dumps(parts, indent=2) + "\n")
    return ["  no class of transformers is this whole model, so its parts are exported", *table(rows)]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _section(model: ModelConfig, module: str):
    if module == "llm":
        return model.llm
    name = module.removesuffix(".connector")
    return model.encoders[name] if name == module else model.encoders[name].connector


def _adapter(exporter: Exporter, built: Model, opened: Sequence[tuple[HfFolder, list[str]]], out: Path) -> list[str]:
    """The adapters alone, as a folder that PEFT loads beside the source."""
    model = exporter.model
    modules = adapted_modules(model)
    if not modules:
        raise UserError("--adapter: this run has no adapters (model.lora); leave --adapter away to write it whole")
    whole = sorted({"llm", *(n for e in model.encoders for n in (e, f"{e}.connector"))} - built.frozen)
    if both := sorted(set(whole) & set(modules)):
        raise UserError(
            f"--adapter: {', '.join(both)} was trained whole beneath its adapters (base=trained), which no adapter "
            "holds; leave --adapter away"
        )
    found = [(source, names) for source, names in opened if set(names) & {*modules, *whole}]
    if len(found) != 1 or {*modules, *whole} - set(found[0][1]):
        raise UserError(
            f"--adapter: {', '.join([*modules, *whole])} did not come from one Hugging Face folder, whose adapter it "
            "could be; leave --adapter away to have them merged"
        )
    source, names = found[0]
    pieces = [piece for own in exporter.pieces(source, names).values() for piece in own if exporter.lora_of(piece.name)]
    alone = names == ["llm"]
    tensors, configs = {}, {}
    for piece in pieces:
        path = module_path(_plain(piece), alone)
        configs[path] = exporter.lora_of(piece.name)
        tensors |= _tensors(exporter, piece, path)
    saved = _saved_modules(exporter, source, whole, alone)
    write_tensors(out / ADAPTER_WEIGHTS, tensors | saved.tensors)
    (out / ADAPTER_CONFIG).write_text(adapter_config(configs, str(source.path), alone, saved.paths))
    told = [f"  adapters of {len(configs)} linear layers, for {source.path}"]
    return [*told, *([f"  {', '.join(whole)} whole, as modules_to_save"] if whole else [])]


class SavedModules(NamedTuple):
    """Modules that an adapter's folder saves whole: paths in transformers, and tensors as PEFT names them."""

    paths: list[str]
    tensors: dict[str, NewTensor]


def _saved_modules(exporter: Exporter, source: HfFolder, whole: Sequence[str], alone: bool) -> SavedModules:
    """Find the modules that were trained whole. Raises UserError for a tensor that is no weight or bias of a module."""
    if "llm" in whole and exporter.model.llm.tied:
        raise UserError(
            "--adapter: llm was trained whole, and its tables are one, which PEFT would part; leave --adapter away"
        )
    paths, tensors = dict[str, None](), dict[str, NewTensor]()
    for key, pieces in exporter.pieces(source, whole).items():
        path, _, last = key.rpartition(".")
        if last not in ("weight", "bias"):
            raise UserError(
                f"--adapter: {key} was trained and is no module of its own in transformers, so PEFT has no place for "
                "it; leave --adapter away"
            )
        stored, path = source.stored(key), module_path(f"{path}.weight", alone)

        def made(key: str = key, pieces: Sequence[Piece] = pieces):
            exporter.read([piece.name for piece in pieces])
            trained = exporter.tensor(source, key, pieces)
            return source.read(key) if trained is None else trained

        paths[path] = None
        tensors[saved_name(path, last)] = NewTensor(stored.dtype, stored.shape, made)
    return SavedModules(sorted(paths), tensors)


def _plain(piece: Piece) -> str:
    """The tensor of a piece that is one linear layer's whole weight."""
    if piece.part.order != TRANSPOSED or piece.part.rows is not None:
        raise UserError(
            f"--adapter: {piece.part.key} is no linear layer's own weight there, so PEFT has no place for its adapter; "
            "leave --adapter away to have it merged"
        )
    return piece.part.key


def _tensors(exporter: Exporter, piece: Piece, path: str) -> dict[str, NewTensor]:
    lora, (inputs, outputs) = exporter.lora_of(piece.name), piece.shape

    def made(which: int):
        exporter.read([piece.name])
        return exporter.adapter(piece.name)[which].T

    a, b = tensor_names(path)
    return {
        a: NewTensor("F32", (lora.rank, inputs), lambda: made(0)),
        b: NewTensor("F32", (outputs, lora.rank), lambda: made(1)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmjax.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--step", type=int, metavar="N", help="of this checkpoint; by default the newest")
    parser.add_argument("--adapter", action="store_true", help="only the adapters, as a folder that PEFT loads")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="[MODULE=]FOLDER",
        help="where the folder is now that weights came from",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is at OUT")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing is computed, and the accelerator may be training
    say(*export(args.run, args.out, args.step, args.adapter, args.source, args.overwrite))


if __name__ == "__main__":
    leave(run_command(main))
