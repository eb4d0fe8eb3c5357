"""Who may import whom."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from import_graph import imports_of, modules_of

ROOT = Path(__file__).parent.parent

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
DISTRIBUTIONS = {
    "pillow_heif": "pillow-heif",  # where an import is not called as its distribution
    "absl": "absl-py",
    "huggingface_hub": "huggingface-hub",
    "array_record": "array-record",
    "orbax": "orbax-checkpoint",
    "PIL": "pillow",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class May:
    """What one part may import: of mmjax by prefix, and of others by top name (None = anything declared)."""

    ours: tuple[str, ...]
    others: frozenset[str] | None


BASE_MODULES = ("batch", "console", "disk", "errors", "hub", "startup")
NUMERIC = frozenset({"numpy", "scipy", "numba"})
BASE = ("mmjax.config", "mmjax.errors", "mmjax.startup", "mmjax.console", "mmjax.disk")
DATA = tuple(f"mmjax.data.{part}" for part in ("sample", "conversation"))
RULES = {  # from the bottom upwards; a part within a package has rules of its own
    "errors": May((), frozenset()),
    "startup": May((), frozenset()),
    "disk": May(("mmjax.errors",), frozenset()),
    "console": May(("mmjax.startup",), frozenset({"rich"})),
    "batch": May((), frozenset()),
    "hub": May(("mmjax.disk", "mmjax.errors"), frozenset({"huggingface_hub"})),
    "config": May(("mmjax.config", "mmjax.errors"), frozenset({"rapidfuzz", "yaml"})),
    "supervise": May(("mmjax.disk", "mmjax.errors"), frozenset()),
    "doctor": May(("mmjax.disk", "mmjax.errors"), frozenset()),
    "cli": May(("mmjax.config", "mmjax.errors", "mmjax.startup"), frozenset()),
    "balance": May(("mmjax.balance",), NUMERIC),
    "cost": May(
        (
            *(f"mmjax.{part}" for part in ("cost", "models", "parallel.sharding", "kernels.tiles")),
            *(f"mmjax.{part}" for part in ("config", "batch", "disk")),
        ),
        frozenset({"jax", "flax", "numpy"}),
    ),
    "planning": May(
        (
            "mmjax.planning",
            "mmjax.cost",
            "mmjax.balance",
            "mmjax.kernels.tiles",
            "mmjax.config",
            "mmjax.batch",
            "mmjax.errors",
        ),
        NUMERIC,
    ),
    "data": May(("mmjax.data.sample", *BASE), frozenset({"numpy"})),
    "data.storage": May(
        ("mmjax.data.storage", "mmjax.data.media.mp3", *DATA, "mmjax.hub", *BASE),
        frozenset({"numpy", "fsspec", "soundfile"}),
    ),
    "data.media": May(
        ("mmjax.data.media", *DATA, "mmjax.batch", *BASE),
        frozenset(
            {"av", "numpy", "pillow_heif", "scipy", "PIL", "simplejpeg", "soundfile", "soxr"}
        ),
    ),
    "data.toy": May(("mmjax.data.toy", *DATA, *BASE), frozenset({"numpy"})),
    "data.text": May(
        ("mmjax.data.text", "mmjax.data.toy", *DATA, "mmjax.hub", *BASE),
        frozenset({"numpy", "tokenizers", "jinja2"}),
    ),
    "data.sources": May(
        (
            *(f"mmjax.data.{part}" for part in ("sources", "storage", "media", "toy", "text")),
            *DATA,
            "mmjax.hub",
            *BASE,
        ),
        frozenset({"numpy", "numba", "array_record", "pyarrow", "fsspec"}),
    ),
    "data.plan": May(
        (
            *(f"mmjax.data.{part}" for part in ("plan", "storage", "media")),
            *DATA,
            "mmjax.balance",
            "mmjax.planning",
            "mmjax.batch",
            *BASE,
        ),
        NUMERIC,
    ),
    "data.loading": May(
        (
            "mmjax.data",
            "mmjax.balance",
            "mmjax.planning",
            "mmjax.cost",
            "mmjax.batch",
            "mmjax.console",
            *BASE,
        ),
        frozenset({"numpy", "grain", "absl", "ray"}),
    ),
    "hf": May(
        ("mmjax.hf", "mmjax.hub", "mmjax.config", "mmjax.disk", "mmjax.errors"),
        frozenset({"numpy", "ml_dtypes"}),
    ),
    "kernels": May(("mmjax.kernels", "mmjax.batch"), frozenset({"jax", "numpy", "jaxtyping"})),
    "models": May(
        (
            "mmjax.models",
            "mmjax.kernels",
            "mmjax.parallel.collective_matmul",
            "mmjax.parallel.encoder_exchange",
            "mmjax.parallel.expert_exchange",
            "mmjax.parallel.sharding",
            "mmjax.config",
            "mmjax.batch",
        ),
        frozenset({"jax", "flax", "numpy", "jaxtyping"}),
    ),
    "losses": May(
        ("mmjax.losses", "mmjax.models", "mmjax.parallel.sharding", "mmjax.config", "mmjax.batch"),
        frozenset({"jax"}),
    ),
    "parallel": May(
        (
            "mmjax.parallel",
            "mmjax.kernels",
            "mmjax.balance",
            "mmjax.config",
            "mmjax.batch",
            "mmjax.errors",
        ),
        frozenset({"jax", "numpy", "jaxtyping"}),
    ),
    "distributed": May(("mmjax.distributed", *BASE), frozenset({"jax", "numpy"})),
    "runtime": May(
        (
            *(
                f"mmjax.{part}"
                for part in (
                    "runtime",
                    "losses",
                    "models",
                    "parallel",
                    "distributed",
                    "kernels",
                    "hf",
                    "data",
                )
            ),
            *(f"mmjax.{part}" for part in ("planning", "balance", "batch", "hub")),
            *BASE,
        ),
        None,
    ),
    "autotune": May(
        (
            *(
                f"mmjax.{part}"
                for part in ("autotune", "runtime", "models", "parallel", "distributed", "data")
            ),
            *(f"mmjax.{part}" for part in ("planning", "cost", "balance", "batch")),
            *BASE,
        ),
        frozenset({"jax", "flax", "numpy"}),
    ),
    "inference": May(
        (
            *(
                f"mmjax.{part}"
                for part in (
                    "inference",
                    "runtime",
                    "losses",
                    "models",
                    "parallel",
                    "distributed",
                    "hf",
                    "data",
                )
            ),
            *(f"mmjax.{part}" for part in ("balance", "batch", "hub")),
            *BASE,
        ),
        frozenset({"jax", "numpy", "rapidfuzz", "PIL", "soundfile", "torch", "transformers"}),
    ),
    "verification": May(
        ("mmjax.verification", "mmjax.data", "mmjax.hf", "mmjax.batch", *BASE),
        frozenset({"numpy"}),
    ),
    "training": May(
        (
            *(
                f"mmjax.{part}"
                for part in ("training", "inference", "autotune", "runtime", "losses", "models")
            ),
            "mmjax.parallel",
            *(
                f"mmjax.{part}"
                for part in ("distributed", "data", "planning", "cost", "balance", "batch")
            ),
            *BASE,
        ),
        None,
    ),
    "reporting": May(
        (
            *(
                f"mmjax.{part}"
                for part in ("reporting", "training", "autotune", "runtime", "data", "planning")
            ),
            *(f"mmjax.{part}" for part in ("cost", "balance", "batch", "hub")),
            *BASE,
        ),
        frozenset({"numpy", "PIL", "jinja2", "matplotlib", "yaml"}),
    ),
    "benchmarks": May(("mmjax",), None),  # part of the command `bench`
}
ONLY_IN: dict[str, tuple[str, ...]] = {
    "grain": ("mmjax.data.loading.workers",),
    "absl": ("mmjax.data.loading.workers",),
    "ray": ("mmjax.data.loading.ray_pool",),
    "array_record": ("mmjax.data.sources.array_records", "mmjax.data.sources.array_record_writing"),
    "pyarrow": ("mmjax.data.sources.parquet_files", "mmjax.data.sources.csv_tables"),
    "orbax": ("mmjax.runtime.array_storage",),
    "matplotlib": ("mmjax.reporting.drawing",),
    "tokenizers": ("mmjax.data.text.tokenizer",),
    "jinja2": (
        "mmjax.data.text.chat_template",
        "mmjax.data.text.template_sandbox",
        "mmjax.reporting.page",
    ),
    "wandb": ("mmjax.training.trackers",),
    "mlflow": ("mmjax.training.trackers",),
    "swanlab": ("mmjax.training.trackers",),
    "huggingface_hub": ("mmjax.hub",),
    "av": ("mmjax.data.media.video_header",),
    # a process of its own, with which a checkpoint is compared
    "torch": ("mmjax.inference.transformers_answer", "mmjax.benchmarks.peer_trainer"),
    "transformers": ("mmjax.inference.transformers_answer", "mmjax.benchmarks.peer_trainer"),
    "pillow_heif": ("mmjax.data.media.decode_images",),
}


def breaches(package: Path) -> list[str]:
    """Every import and module name of a package that the house rules forbid."""
    modules = modules_of(package)
    found = []
    for name, path in modules.items():
        words = name.split(".")[1:]
        part = next((key for k in (2, 1) if (key := ".".join(words[:k])) in RULES), "")
        if name.rpartition(".")[2] in BANNED_NAMES:
            found.append(f"{name}: its name says nothing of what it holds")
        for imported in sorted(imports_of(name, path, modules)):
            top = imported.split(".")[0]
            if name not in ONLY_IN.get(top, (name,)):
                found.append(
                    f"{name} imports {imported}, which only {' and '.join(ONLY_IN[top])} may"
                )
            if not part or top in sys.stdlib_module_names:
                continue  # commands may import everything
            may = RULES[part]
            if top == "mmjax":
                allowed = imported == "mmjax" or any(
                    imported == p or imported.startswith(f"{p}.") for p in may.ours
                )
            else:
                allowed = may.others is None or top in may.others
            if not allowed:
                found.append(f"{name} imports {imported}")
    return found


def cycle(package: Path) -> list[str]:
    """One cycle of imports between a package's modules, or nothing."""
    modules = modules_of(package)
    graph = {name: imports_of(name, path, modules) & set(modules) for name, path in modules.items()}
    while free := [name for name, imported in graph.items() if not imported & set(graph)]:
        for name in free:
            del graph[name]
    trail = list(graph)[:1]
    while trail and trail[-1] not in trail[:-1]:
        trail.append(next(iter(sorted(graph[trail[-1]] & set(graph)))))
    return trail[trail.index(trail[-1]) :] if trail else []


def test_every_part_imports_only_what_it_may() -> None:
    assert breaches(ROOT / "mmjax") == []


def test_nothing_but_the_command_bench_imports_a_benchmark() -> None:
    modules = modules_of(ROOT / "mmjax")
    importing = {
        name.removeprefix("mmjax.").split(".")[0]
        for name, path in modules.items()
        if any(
            imported.startswith("mmjax.benchmarks") for imported in imports_of(name, path, modules)
        )
    }
    assert importing == {"bench", "benchmarks"}


def test_what_the_pages_of_the_docs_are_made_from_exists() -> None:
    # They are made without the tests' libraries, so nothing else imports this file.
    tree = ast.parse((ROOT / "docs/reference_pages.py").read_text())
    wanted = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("mmjax")
    ]
    names = [(node.module, alias.name) for node in wanted for alias in node.names]
    assert names
    assert [name for name in names if not hasattr(importlib.import_module(name[0]), name[1])] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycle(ROOT / "mmjax") == []


def map_in_docs() -> list[str]:
    """The packages of docs/architecture.md's map, from the top down."""
    text = (
        (ROOT / "docs/architecture.md").read_text().split("<!-- packages, from the top down -->")[1]
    )
    return [line.split()[0] for line in text.split("```")[1].strip().splitlines()]


def floor_of(module: str, floors: list[str]) -> int:
    """The line of the map that a module belongs to, counted from the bottom."""
    words = module.split(".")[1:]
    name = next((key for k in (2, 1) if (key := ".".join(words[:k])) in floors), "")
    if not name:
        places = {"bench": "benchmarks"} | dict.fromkeys(BASE_MODULES, "base")
        name = places.get("".join(words[:1]), "commands")
    return len(floors) - floors.index(name)


def test_the_map_in_the_docs_names_every_package_and_its_arrows_run_downwards() -> None:
    floors, modules = map_in_docs(), modules_of(ROOT / "mmjax")
    packages = {p.parent.name for p in (ROOT / "mmjax").glob("*/__init__.py")}
    packages |= {f"data.{p.parent.name}" for p in (ROOT / "mmjax/data").glob("*/__init__.py")}
    assert packages <= set(floors)
    upwards = [
        f"{name} imports {imported}"
        for name, path in modules.items()
        for imported in imports_of(name, path, modules) & set(modules)
        if imported != "mmjax" and floor_of(imported, floors) > floor_of(name, floors)
    ]
    assert upwards == []


def test_every_package_has_its_rules() -> None:
    packages = {p.parent.name for p in (ROOT / "mmjax").glob("*/__init__.py")}
    assert packages <= set(RULES), "a new package needs a line in RULES"


def test_everything_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = (
        line
        for extra in ("wandb", "mlflow", "swanlab", "hub", "video", "heif", "pool", "peer")
        for line in extras[extra]
    )
    lines = [*project["dependencies"], *optional]
    declared = {re.split(r"[\[<>=!~ ;]", line)[0].lower() for line in lines}
    modules = modules_of(ROOT / "mmjax")
    tops = {
        i.split(".")[0] for name, path in modules.items() for i in imports_of(name, path, modules)
    }
    others = tops - set(sys.stdlib_module_names) - {"mmjax"}
    assert {DISTRIBUTIONS.get(name, name).lower() for name in others} <= declared


@pytest.mark.parametrize(
    ("module", "source", "breach"),
    [
        ("balance/isf", "import jax", "mmjax.balance.isf imports jax"),
        (
            "balance/isf",
            "from mmjax.planning import costs",
            "mmjax.balance.isf imports mmjax.planning.costs",
        ),
        (
            "balance/isf",
            "from ..planning.costs import f",
            "mmjax.balance.isf imports mmjax.planning.costs",
        ),
        ("planning/costs", "import mmjax.models", "mmjax.planning.costs imports mmjax.models"),
        (
            "data/plan/length_index",
            "def f():\n    import jax.numpy as jnp",
            "mmjax.data.plan.length_index imports jax.numpy",
        ),
        (
            "data/plan/length_index",
            "import grain",
            "mmjax.data.plan.length_index imports grain, which only mmjax.data.loading.workers may",
        ),
        (
            "data/plan/length_index",
            "import mmjax.models.llm",
            "mmjax.data.plan.length_index imports mmjax.models.llm",
        ),
        (
            "models/llm",
            "import mmjax.runtime.executor",
            "mmjax.models.llm imports mmjax.runtime.executor",
        ),
        ("models/llm", "import optax", "mmjax.models.llm imports optax"),
        (
            "parallel/sharding",
            "import mmjax.models.llm",
            "mmjax.parallel.sharding imports mmjax.models.llm",
        ),
        (
            "parallel/sharding",
            "import mmjax.data.plan.length_index",
            "mmjax.parallel.sharding imports mmjax.data.plan.length_index",
        ),
        ("runtime/executor", "import mmjax.train", "mmjax.runtime.executor imports mmjax.train"),
        (
            "train",
            "import orbax.checkpoint",
            "mmjax.train imports orbax.checkpoint, which only mmjax.runtime.array_storage may",
        ),
        ("config", "import mmjax.console", "mmjax.config imports mmjax.console"),
        ("data/utils", "", "mmjax.data.utils: its name says nothing of what it holds"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, source: str, breach: str) -> None:
    for name in ("planning/costs", "models/llm", module):
        path = tmp_path / "mmjax" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source if name == module else "")
    assert breach in breaches(tmp_path / "mmjax")


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "mmjax"
    package.mkdir()
    (package / "a.py").write_text("import mmjax.b")
    (package / "b.py").write_text("def f():\n    from mmjax import c")
    (package / "c.py").write_text("from .a import x")
    (package / "d.py").write_text("import mmjax.a")
    assert set(cycle(package)) == {"mmjax.a", "mmjax.b", "mmjax.c"}
