"""Write a model card: the README.md of an exported run, which says what was trained, on what, how, and how well."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import PurePath
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import yaml

from mmjax import __version__
from mmjax.config.loading import to_json
from mmjax.config.model import adapters_by_layer, frozen_modules, module_names, module_of_layer
from mmjax.console import percent
from mmjax.hub import dataset_name, repository_name
from mmjax.reporting.facts import facts_of
from mmjax.reporting.run import Run
from mmjax.runtime.weights import modules_by_folder

Library = Literal["transformers", "peft", "mmjax"]
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")
TASKS = {"image": "image-text-to-text", "audio": "audio-text-to-text"}  # of the Hub, by modality


def model_card(run: Run, name: str, step: int, library: Library) -> str:
    """Write the card of a checkpoint of a run, as Markdown behind the Hub's YAML header.

    name: of the model. library: what loads it; `peft` for adapters alone. Folders are named by
    their last part alone, and URLs without what may be a password.
    """
    config, adapter = run.config, library == "peft"
    bases = [repository_name(folder) or folder.name for folder in modules_by_folder(config.model)]
    of_hub = [base for base in bases if "/" in base]
    stored = _public(json.loads(to_json(config)))
    modalities = [module.modality for module in config.model.encoders.values()]
    header = {
        "base_model": of_hub,
        "base_model_relation": "adapter" if adapter else "finetune",
        "datasets": sorted(_datasets(run)),
        "library_name": library,
        "pipeline_tag": next((TASKS[m] for m in modalities if m in TASKS), "text-generation"),
        "tags": ["mmjax"],
    }
    if not of_hub:
        del header["base_model"], header["base_model_relation"]
    lines = [
        "---",
        yaml.safe_dump({key: value for key, value in header.items() if value}).strip(),
        "---",
        f"# {name}",
        f"{' and '.join(bases) or 'A new model'}, trained for {step:,} steps with mmjax. "
        + _trained(run, adapter),
        "## Training",
        *_table(_training(run)),
        "## Data",
        *_table([("source", "kind", "share of the samples"), *_sources(run)]),
        *_scores(run, step),
        "## Config and plan",
        "<details>",
        f"```json\n{json.dumps(stored, indent=2)}\n```",
        "</details>",
        "## Versions",
        f"Trained with mmjax {run.launches[-1].get('version') if run.launches else __version__}; exported with mmjax "
        f"{__version__}, {', '.join(f'{name} {metadata.version(name)}' for name in LIBRARIES)}.",
    ]
    return "\n".join(_spaced(lines)) + "\n"


def _trained(run: Run, adapter: bool) -> str:
    """Say which modules were trained, by adapters or in full, and which were frozen."""
    model = run.config.model
    adapters = {module_of_layer(name): lora for name, lora in adapters_by_layer(model).items()}
    merged = "" if adapter else ", merged into the weights"
    frozen = frozen_modules(model)
    parts = [
        f"{module} (LoRA of rank {adapters[module].rank}{merged})" if module in adapters else module
        for module in module_names(model)
        if module in adapters or module not in frozen
    ]
    frozen_whole = sorted(frozen - adapters.keys())
    return f"Trained: {', '.join(parts)}." + (
        f" Frozen: {', '.join(frozen_whole)}." if frozen_whole else ""
    )


def _training(run: Run) -> list[tuple[str, ...]]:
    (heading, values), config = facts_of([run]), run.config
    facts = [
        (n, v) for n, v in zip(heading, values, strict=True) if v and n not in ("run", "scores")
    ]
    devices = [launch.get("devices", "") for launch in run.launches[-1:]]
    return [
        ("", run.name),
        *facts,
        *(("devices", text) for text in devices if text),
        ("precision", config.training.precision),
        ("optimizer", config.optimizer.kind),
        ("loss", config.loss.kind),
        ("grouping and balance", f"{config.batch.grouping.kind}, {config.batch.balance.kind}"),
    ]


def _sources(run: Run) -> Iterator[tuple[str, ...]]:
    weights = {name: source.weight for name, source in run.config.data.sources.items()}
    for name, source in run.config.data.sources.items():
        yield name, source.kind, percent(weights[name] / (sum(weights.values()) or 1))


def _scores(run: Run, step: int) -> Iterator[str]:
    """Tabulate the scores of the test split, where this checkpoint was scored."""
    try:
        scores = json.loads(run.folder.scores.read_text())
    except (OSError, ValueError):
        return
    if isinstance(scores, dict) and scores.pop("step", None) == step:
        yield "## Scores of the test split"
        yield from _table([("", "score"), *((name, f"{v:.4g}") for name, v in scores.items())])


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Format rows as one Markdown table; the first row is the heading."""
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    ruled = [cells[0], " | ".join(["---"] * len(rows[0])), *cells[1:]]
    return ["\n".join(f"| {row} |" for row in ruled)]


def _spaced(lines: list[str]) -> Iterator[str]:
    """Separate blocks by empty lines; the header is one block."""
    yield "\n".join(lines[:3])
    for line in lines[3:]:
        yield ""
        yield line


def _public(tree: Any) -> Any:
    """Replace absolute paths by their last parts, and drop users, passwords and queries of URLs."""
    if isinstance(tree, Mapping):
        return {key: _public(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_public(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    if "://" in tree:
        url = urlsplit(tree)
        return urlunsplit((url.scheme, url.netloc.rpartition("@")[2], url.path, "", ""))
    path = PurePath(tree)
    return path.name if path.is_absolute() or tree.startswith("~") else tree


def _datasets(run: Run) -> set[str]:
    """Name the data sets of the Hub that the run trained on."""
    paths = [getattr(source, "path", "") for source in run.config.data.sources.values()]
    return {name for path in paths if (name := dataset_name(path))}
