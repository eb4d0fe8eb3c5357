"""Write a run as a folder that serves: ``python -m mmjax.export RUN OUT [--adapter] [--step N] [--push NAME]``."""

from __future__ import annotations

import errno
import glob
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.config import ModelConfig
from mmjax.config.codec import did_you_mean, encode
from mmjax.config.model import adapted_modules, module_names, stacked_towers, with_changes
from mmjax.console import print_lines, table
from mmjax.disk import atomic_folder, remove_path
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.hf.families import module_names_of
from mmjax.hf.folder import SINGLE, HfFolder
from mmjax.hf.layout import TRANSPOSED
from mmjax.hf.writing import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModuleNames,
    NewTensor,
    adapter_config,
    copy_beside,
    has_module,
    magnitude_name,
    module_path,
    saved_name,
    tensor_names,
    write_tensors,
)
from mmjax.hub import check_push, checkpoint_folder, push
from mmjax.models.model import Model
from mmjax.reporting.model_card import Library, model_card
from mmjax.reporting.run import read_runs
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import SavedParameters
from mmjax.runtime.trained_weights import Exporter, Piece
from mmjax.runtime.weights import modules_by_folder

CARD = "README.md"
PARTS = "parts.json"  # the folder of each module of a model that is exported in parts


def export(
    run: Path,
    out: Path,
    step: int | None = None,
    adapter: bool = False,
    sources: Sequence[str] = (),
    again: bool = False,
    weights: str = "",
    card: str = "",
) -> list[str]:
    """Write a run's checkpoint, by default the newest, as a Hugging Face folder that appears whole or not at all.

    adapter: only the adapters, as PEFT reads them. sources: new places of folders that weights came
    from, each NEW or MODULE=NEW. again: replace what is at `out`. weights: trained, or their moving
    average; by default what the run says (`training.evaluated`). card: name of the model on a model
    card, README.md; empty: none is written. Returns lines for the user. Raises UserError where
    something is missing or in the way.
    """
    folder = RunFolder(run)
    config = folder.stored_config()
    model = _with_sources(config.model, sources)
    step = checkpoint_step(folder.checkpoints, step)
    opened = {
        path: (_open_source(path, names), names) for path, names in modules_by_folder(model).items()
    }
    _check_out(out, [folder.path, *opened], again)
    # Cut after every layer, so that parameters are read a layer at a time and never all at once.
    cuts = {name: tuple(range(1, c.layers)) for name, c in stacked_towers(model).items()}
    built = Model.build(model, jnp.float32, cuts)
    weights = weights or config.training.evaluated
    saved = SavedParameters(folder.checkpoints, step, built, evaluated=weights)
    exporter = Exporter(model, saved)
    with _new_folder(out, again) as partial:
        library: Library = "transformers"
        if adapter:
            library = "peft"
            lines = _write_adapter(exporter, built, list(opened.values()), partial)
        elif len(opened) == 1 and not _modules_without_source(model):
            ((source, modules),) = opened.values()
            lines = [*_write_source(exporter, source, modules, partial), *_how_to_serve(out)]
        else:
            library = "mmjax"
            lines = _write_parts(exporter, list(opened.values()), partial)
        if card:
            (described,) = read_runs([run])
            (partial / CARD).write_text(model_card(described, card, step, library))
    of_average = ", the average of its parameters" if weights == "average" else ""
    return [f"{run} after {step} steps{of_average}: {out}", *lines]


# --------------------------------------------------------------------------------------------------
# source folders


def _with_sources(model: ModelConfig, sources: Sequence[str]) -> ModelConfig:
    """Point a model's modules to where the folders of their weights are now, as --source says."""
    folders = modules_by_folder(model)
    modules = [module for names in folders.values() for module in names]
    for source in sources:
        module, named, path = source.rpartition("=")
        if named and module not in modules:
            raise UserError(
                f"--source {source}: no module {module!r} came from a folder{did_you_mean(module, modules)}"
            )
        if not named and len(folders) != 1:
            listed = (
                "; ".join(f"{', '.join(names)} from {path}" for path, names in folders.items())
                or "none"
            )
            raise UserError(
                f"--source {source}: say of which module, --source MODULE=FOLDER ({listed})"
            )
        moved = next(names for names in folders.values() if not named or module in names)
        model = _with_weights(model, moved, str(checkpoint_folder(path).absolute()))
    return model


def _with_weights(model: ModelConfig, modules: Sequence[str], path: str) -> ModelConfig:
    changes: dict[str, dict[str, Any]] = {
        module: {"weights": path} for module in modules if "." not in module
    }
    for name, section in model.item_modules.items():
        if f"{name}.connector" in modules:
            changes.setdefault(name, {})["connector"] = replace(section.connector, weights=path)
    return with_changes(model, changes)


def _open_source(path: Path, modules: Sequence[str]) -> HfFolder:
    if not path.is_dir():
        raise UserError(
            f"{path}, from which {', '.join(modules)} came, is not there; say where it is now with --source FOLDER"
        )
    return HfFolder.open(path)


def _modules_without_source(model: ModelConfig) -> list[str]:
    """List the modules that were initialised at random."""
    loaded = {module for modules in modules_by_folder(model).values() for module in modules}
    return [module for module in module_names(model) if module not in loaded]


# --------------------------------------------------------------------------------------------------
# the new folder


def _check_out(out: Path, inputs: Sequence[Path], again: bool) -> None:
    """Raises UserError where `out` exists and may not be replaced, or would replace a folder that is read."""
    target = out.expanduser().resolve()
    for path in inputs:
        if path.resolve().is_relative_to(target):
            raise UserError(f"{out} is or holds {path}, which is needed; choose another folder")
    if out.exists() and not again:
        raise UserError(
            f"{out} is there already; choose another folder, or replace it with --overwrite"
        )


@contextmanager
def _new_folder(out: Path, again: bool) -> Iterator[Path]:
    """Yield a folder to write into, which gets its place when all is written, and is removed where something fails."""
    # a kill may have left gigabytes there
    for killed in out.parent.glob(f"{glob.escape(out.name)}.*.partial"):
        remove_path(killed)
    try:
        with atomic_folder(out) as partial:
            yield partial
            if out.exists() and not again:
                raise FileExistsError(errno.EEXIST, "it is there by now")
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}; choose another folder"
        ) from error


# --------------------------------------------------------------------------------------------------
# what is written


def _write_source(
    exporter: Exporter, source: HfFolder, modules: Sequence[str], out: Path
) -> list[str]:
    """Write a copy of a source folder in which these modules have their trained weights. Returns lines for the user."""
    left_out = copy_beside(source, out)
    changed = exporter.rewrite(source, modules, out)
    merged = [module for module in adapted_modules(exporter.model) if module in modules]
    return [
        f"  {changed} of {len(source.tensors)} tensors changed, all else as in {source.path}",
        *([f"  adapters of {', '.join(merged)} merged"] if merged else []),
        *(
            [f"  left out, as weights that nobody loaded: {', '.join(left_out)}"]
            if left_out
            else []
        ),
    ]


def _how_to_serve(out: Path) -> list[str]:
    """Say how transformers serves the folder with OpenAI's API, how to ask it, and how another evaluator does."""
    message = {"role": "user", "content": "What is this?"}
    body = json.dumps({"model": str(out), "messages": [message], "max_tokens": 64})
    return [
        f"  serve it: transformers serve {shlex.quote(str(out))} --port 8000",
        "  ask it:   curl http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
        + shlex.quote(body),
        "  score it: lmms-eval eval --model openai --model_args "
        + shlex.quote(f"model_version={out},base_url=http://localhost:8000/v1,api_key=none")
        + " --tasks mmmu_val",
    ]


def _write_parts(
    exporter: Exporter, opened: Sequence[tuple[HfFolder, list[str]]], out: Path
) -> list[str]:
    """Write a copy of each source folder inside `out`, and randomly initialised modules in mmjax's own layout."""
    model = exporter.model
    parts: dict[str, str] = {}
    rows = []
    for source, modules in opened:
        folder = out / modules[0]
        folder.mkdir()
        _write_source(exporter, source, modules, folder)
        parts |= dict.fromkeys(modules, folder.name)
        rows.append((f"{folder.name}/", f"{', '.join(modules)}, as in {source.path}"))
    for module in _modules_without_source(model):
        folder = out / module
        folder.mkdir()
        write_tensors(folder / SINGLE, exporter.own_layout(module))
        section = _section(model, module)
        module_config = {"mmjax_module": module, **encode(type(section), section, module)}
        (folder / "config.json").write_text(json.dumps(module_config, indent=2) + "\n")
        parts[module] = module
        rows.append((f"{module}/", "in mmjax's own layout, for it came from no folder"))
    (out / PARTS).write_text(json.dumps(parts, indent=2) + "\n")
    return [
        "  no class of transformers is this whole model, so its parts are exported",
        *table(rows),
    ]


def _section(model: ModelConfig, module: str):
    """Find the part of a model's config that describes a module."""
    if module == "llm":
        return model.llm
    name = module.removesuffix(".connector")
    section = model.item_modules[name]
    return section if name == module else section.connector


def _write_adapter(
    exporter: Exporter, built: Model, opened: Sequence[tuple[HfFolder, list[str]]], out: Path
) -> list[str]:
    """Write the adapters alone, as a folder that PEFT loads beside the source folder. Returns lines for the user.

    Modules that were trained without adapters are saved in full, as PEFT's `modules_to_save`.
    """
    model = exporter.model
    modules = adapted_modules(model)
    if not modules:
        raise UserError(
            "--adapter: this run has no adapters (model.lora); leave out --adapter to write it whole"
        )
    full = sorted(set(module_names(model)) - built.frozen)
    if both := sorted(set(full) & set(modules)):
        raise UserError(
            f"--adapter: {', '.join(both)} was trained whole beneath its adapters (base=trained), which no adapter "
            "holds; leave out --adapter"
        )
    trained = {*modules, *full}
    candidates = [(source, names) for source, names in opened if trained & set(names)]
    if len(candidates) != 1 or trained - set(candidates[0][1]):
        raise UserError(
            f"--adapter: {', '.join([*modules, *full])} did not come from one Hugging Face folder, whose adapter it "
            "could be; leave out --adapter to have them merged"
        )
    source, names = candidates[0]
    names_there = module_names_of(source)
    tensors: dict[str, NewTensor] = {}
    configs = {}
    for piece in (piece for pieces in exporter.pieces(source, names).values() for piece in pieces):
        if lora := exporter.lora_of(piece.name):
            path = module_path(_linear_weight(piece), names_there)
            configs[path] = lora
            tensors |= _adapter_tensors(exporter, piece, path)
    if len({lora.dora for lora in configs.values()}) > 1:
        raise UserError(
            "--adapter: some adapters are DoRA's and some are not, and PEFT has one use_dora for all; leave out "
            "--adapter to have them merged"
        )
    paths, full_tensors = _modules_to_save(exporter, source, full, names_there)
    write_tensors(out / ADAPTER_WEIGHTS, tensors | full_tensors)
    (out / ADAPTER_CONFIG).write_text(
        adapter_config(configs, str(source.path), names_there == "decoder", paths)
    )
    lines = [f"  adapters of {len(configs)} linear layers, for {source.path}"]
    return [*lines, *([f"  {', '.join(full)} whole, as modules_to_save"] if full else [])]


def _modules_to_save(
    exporter: Exporter, source: HfFolder, modules: Sequence[str], names: ModuleNames
) -> tuple[list[str], dict[str, NewTensor]]:
    """List the `modules_to_save` of modules trained in full: paths in transformers, and tensors as PEFT names them.

    Raises UserError for a tensor that is no weight or bias of a torch module.
    """
    if "llm" in modules and exporter.model.llm.tied:
        raise UserError(
            "--adapter: llm was trained whole, and its tables are one, which PEFT would part; leave out --adapter"
        )
    paths: set[str] = set()
    tensors: dict[str, NewTensor] = {}
    for key, pieces in exporter.pieces(source, modules).items():
        if not has_module(key):
            raise UserError(
                f"--adapter: {key} was trained and is no module of its own in transformers, so PEFT has no place for "
                "it; leave out --adapter"
            )
        stored = source.stored(key)
        layer, _, last = key.rpartition(".")
        path = module_path(f"{layer}.weight", names)

        # Read when it is written: tensors of a large model never are in memory together.
        def read(key: str = key, pieces: Sequence[Piece] = pieces):
            exporter.read([piece.name for piece in pieces])
            # None: training has not changed the tensor.
            trained = exporter.tensor(source, key, pieces)
            return source.read(key) if trained is None else trained

        paths.add(path)
        tensors[saved_name(path, last)] = NewTensor(stored.dtype, stored.shape, read)
    return sorted(paths), tensors


def _linear_weight(piece: Piece) -> str:
    """Name the checkpoint tensor of a linear layer. Raises UserError where the layer is only a part of a tensor."""
    if piece.part.order != TRANSPOSED or piece.part.rows is not None:
        raise UserError(
            f"--adapter: {piece.part.key} is no linear layer's own weight there, so PEFT has no place for its adapter; "
            "leave out --adapter to have it merged"
        )
    return piece.part.key


def _adapter_tensors(exporter: Exporter, piece: Piece, path: str) -> dict[str, NewTensor]:
    """Name and describe the matrices of an adapter, which PEFT stores transposed: [rank, inputs], [outputs, rank]."""
    rank = exporter.lora_of(piece.name).rank
    inputs, outputs = piece.shape

    def read(which: int):
        exporter.read([piece.name])
        return exporter.adapter(piece.name)[which].T

    def read_magnitude():
        exporter.read([piece.name])
        return exporter.magnitude(piece.name)

    a, b = tensor_names(path)
    lengths = {magnitude_name(path): NewTensor("F32", (outputs,), read_magnitude)}
    return {
        a: NewTensor("F32", (rank, inputs), lambda: read(0)),
        b: NewTensor("F32", (outputs, rank), lambda: read(1)),
    } | (lengths if exporter.lora_of(piece.name).dora else {})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("export", __doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of this checkpoint; by default the newest"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="only the adapters, as a folder that PEFT loads"
    )
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="[MODULE=]FOLDER",
        help="where the folder is now that weights came from",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is at OUT")
    parser.add_argument(
        "--weights",
        choices=("trained", "average"),
        default="",
        help="as trained, or their moving average; by default the run's training.evaluated",
    )
    parser.add_argument(
        "--card", action="store_true", help="write a model card, README.md: data, config, scores"
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        default="",
        help="push OUT, with a model card, to this repository of the Hugging Face Hub",
    )
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    args = parser.parse_args(argv)
    if args.private and not args.push:
        raise UserError("--private is for --push OWNER/NAME; give both")
    if args.push:
        check_push(args.push)
    # nothing is computed, and the accelerator may be training
    jax.config.update("jax_platforms", "cpu")
    card = args.push.partition("/")[2] or (args.out.name if args.card else "")
    lines = export(
        args.run, args.out, args.step, args.adapter, args.source, args.overwrite, args.weights, card
    )
    print_lines(*lines)
    if args.push:
        print_lines(f"  pushed to {push(args.out, args.push, args.private)}")


if __name__ == "__main__":
    exit_process(run_command(main))
