"""The examples in the documentation run as they stand."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import socket
import tomllib
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fine_tuning import moved_run
from llava_folder import save_checkpoint, save_parts, save_questions
from PIL import Image
from started import begin, environment, finish, free_port, kill, wait_until

from mmjax.bench import main as bench
from mmjax.config.loading import load
from mmjax.config.model import adapted_modules
from mmjax.errors import run_command
from mmjax.generate import main as generate
from mmjax.train import main as train

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


def write_examples(document: str, folder: Path) -> None:
    for name, code in EXAMPLE.findall((ROOT / document).read_text()):
        (folder / name).write_text(code)


def test_the_variant_in_configs_md_loads_with_its_overrides(tmp_path: Path) -> None:
    write_examples("docs/configs.md", tmp_path)
    config = load(
        tmp_path / "bigger.py",
        ["batch.grouping=isf", "seed=3", "optimizer.modules.vision.learning_rate=1e-3"],
    )
    assert (config.name, config.model.llm.layers, config.batch.grouping.kind, config.seed) == (
        "bigger",
        6,
        "isf",
        3,
    )


def test_the_adapters_in_models_md_load_with_their_overrides(tmp_path: Path) -> None:
    write_examples("docs/models.md", tmp_path)
    config = load(
        tmp_path / "adapters.py", ["model.lora.llm.rank=4", "model.lora.ears.layers=audio.*"]
    )
    assert adapted_modules(config.model) == ["llm", "vision", "audio", "audio.connector"]
    assert config.model.lora["llm"].rank == 4


def test_the_composed_model_in_models_md_is_built_of_two_folders(tmp_path: Path) -> None:
    write_examples("docs/models.md", tmp_path)
    save_parts(tmp_path)
    words = [f"tower={tmp_path / 'tower'}", f"llm={tmp_path / 'llm'}", "data=questions.json"]
    model = load(tmp_path / "composed.py", words).model
    assert (model.llm.width, model.encoders["vision"].width) == (32, 24)
    assert model.llm.frozen
    assert not model.encoders["vision"].connector.frozen


@pytest.mark.exhaustive
def test_the_captions_example_in_data_sources_md_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_examples("docs/data_sources.md", tmp_path)
    photos = tmp_path / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    words = ["a red cat", "two dogs", "rain", "a small house by the sea"]
    (photos / "captions.txt").write_text("\n".join(words[i % 4] for i in range(60)))
    for i in range(60):
        np.save(photos / f"{i}.npy", rng.integers(0, 255, (8 + 4 * (i % 5), 12), np.uint8))
    monkeypatch.chdir(tmp_path)
    small = [
        "model.llm.layers=1",
        "model.encoders.vision.layers=1",
        "data.workers=0",
        "mesh.data=1",
        "mesh.fsdp=8",
    ]
    code = run_command(
        lambda: train(["captions.py", "training.steps=3", "schedule.warmup=1", *small])
    )
    assert code == 0, capsys.readouterr().err
    assert "3 steps" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_examples_in_using_md_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save_checkpoint(tmp_path / "llava-1.5-7b-hf")
    data = save_questions(tmp_path / "data", 2)
    (tmp_path / "runs").mkdir()
    words = [f"checkpoint={checkpoint}", f"data={data}", f"run={tmp_path / 'runs' / 'mine'}"]
    moved_run(load("llava_lora", [*words, "model.lora.llm.rank=2"]))
    for name in ("street.jpg", "left.jpg"):
        Image.new("RGB", (30, 20), "red").save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(
        r"^python -m mmjax.generate (.+)$", (ROOT / "docs/using.md").read_text(), re.M
    )
    assert len(commands) == 3
    for command in commands:
        few = [] if "--max-tokens" in command else ["--max-tokens", "6"]
        assert run_command(partial(generate, [*shlex.split(command), *few])) == 0, (
            capsys.readouterr().err
        )
    write_examples("docs/using.md", tmp_path)
    made: dict[str, Any] = {}
    exec((tmp_path / "ask.py").read_text(), made)
    said = made["answers"](checkpoint, ["What?", "How many?"], (tmp_path / "left.jpg").read_bytes())
    assert [0 < len(answer.tokens) <= 16 for answer in said] == [True, True]


def test_the_code_in_balance_md_runs() -> None:
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs/balance.md").read_text(), re.DOTALL)
    assert found
    for code in found:
        exec(code, {})


def test_the_picture_in_pipelines_md_is_made_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (ROOT / "docs/pipelines.md").read_text()
    (code,) = (
        code
        for code in re.findall(r"```python\n(.*?)```", document, re.DOTALL)
        if "plot_timelines" in code
    )
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    texts = [
        re.findall("<text.*?>(.*?)</text>", (at / "schedules.svg").read_text())
        for at in (ROOT / "docs", tmp_path)
    ]
    assert texts[0] == texts[1] != []


def write_lengths(path: Path) -> None:
    """Write lengths of samples with images, as the benchmarks that the documents show read them."""
    rng = np.random.default_rng(0)
    np.savez(path, llm_tokens=rng.integers(50, 2000, 4000), vision=rng.integers(100, 3000, 4000))


@pytest.mark.exhaustive
def test_the_commands_in_balance_md_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lengths(tmp_path / "F.npz")
    text = (ROOT / "docs/balance.md").read_text()
    commands = re.findall(
        r"python -m mmjax.bench (.+)", re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1]
    )
    assert len(commands) == 6
    for command in commands:
        assert run_command(partial(bench, command.split())) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "document", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_every_file_that_a_document_names_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / document).parent.joinpath(link).exists(), f"{document} links to {link}"
    for name in re.findall(
        r"`((?:mmjax|tests|data|models|parallel|training|balance|configs)/[\w/]*\.?\w*)`", text
    ):
        assert (ROOT / name).exists() or (ROOT / "mmjax" / name).exists(), (
            f"{document} names {name}"
        )


def test_the_tutorials_split_reads_a_table_that_excel_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples("docs/tutorial.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{n}.jpg,What?,a cat\n" for n in range(20))
    (tmp_path / "questions.csv").write_text("image,question,answer\n" + rows, "utf-8-sig")
    runpy.run_path("split.py")
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 16


def named(dotted: str) -> bool:
    """Whether there is a module of this name, or such an attribute of one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return (
            reduce(lambda owner, name: getattr(owner, name, None), parts[end:], found) is not None
        )
    return False


DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]


def test_every_module_and_function_that_a_document_names_is_there() -> None:
    """Also those of docs/balance.md, which are relative to mmjax.balance."""
    texts = {document: (ROOT / document).read_text() for document in DOCUMENTS}
    names = {
        (name, doc)
        for doc, text in texts.items()
        for name in re.findall(r"\bmmjax(?:\.[a-z_][\w]*)+\b", text)
    }
    balance = re.findall(r"`((?:[a-z_]\w*\.)+[a-z_]\w*)(?:\(.*?\))?`", texts["docs/balance.md"])
    files = (".jsonl", ".npz", ".py", ".svg", ".md")
    relative = {name for name in balance if not name.startswith(("mmjax.", "batch.", "mesh."))}
    names |= {
        (f"mmjax.balance.{name}", "docs/balance.md")
        for name in relative
        if not name.endswith(files)
    }
    assert len(set(balance)) > 20
    missing = [f"{document}: {name}" for name, document in sorted(names) if not named(name)]
    assert not missing


@pytest.mark.exhaustive
def test_the_examples_in_balancing_md_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lengths(tmp_path / "F.npz")
    commands = re.findall(
        r"^python -m mmjax.bench (.+?)(?: +#.*)?$", (ROOT / "docs/balancing.md").read_text(), re.M
    )
    assert len(commands) == 4
    for command in commands:
        assert run_command(partial(bench, command.split())) == 0, capsys.readouterr().err
    assert (tmp_path / "work.svg").read_text().endswith("</svg>\n")


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """The build of the site, a stage of .ci/run, fails for this too, and for broken links and anchors."""
    # Those that docs/reference_pages.py makes, or takes from outside docs/.
    made = {"index", "tests", "contributing", "changelog", "reference/config", "reference/commands"}
    named = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages | {f"{page}.md" for page in made})


@cache
def texts_of_the_code() -> str:
    """Every string of mmjax's code; of an f-string, the parts between its values."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "mmjax").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_every_extra_is_in_install_md() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [extra for extra in extras if f"`{extra}`" not in page] == []


def test_the_error_lines_of_mmjax_in_troubleshooting_md_are_in_its_code() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    lines = [
        line
        for block in blocks
        for line in block.splitlines()
        if re.match("error: |note: |THE LOADER", line)
    ]
    assert len(lines) >= 20
    for line in lines:
        for part in re.sub("^(error|note): ", "", line).split("..."):
            assert part.strip() in texts_of_the_code(), line
    for heading in (
        "Out of memory",
        "Shared memory: no space in /dev/shm",
        "NCCL timeout",
        "Missing chat template",
        "Wrong driver",
    ):
        assert re.search(f"^##+ {re.escape(heading)}", text, re.MULTILINE), heading


@pytest.mark.exhaustive
def test_the_tutorial_goes_from_photos_to_an_answer_over_http(tmp_path: Path) -> None:
    write_examples("docs/tutorial.md", tmp_path)
    port = free_port()
    variables = environment(1)
    printed = {}
    server = None
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "ask.py").write_text((tmp_path / "ask.py").read_text().replace("8000", str(port)))
    for command in (block.strip() for block in blocks if not block.startswith("pip install")):
        process = begin(["bash", "-c", command.replace("8000", str(port))], variables, cwd=tmp_path)
        if command.startswith("transformers serve"):
            server = process
            wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, server)
            continue
        ended = finish(process, 1800)
        assert ended.code == 0, (command, ended.err)
        printed[command] = ended.out
    assert server is not None
    kill(server)
    assert len(printed) == 14
    (table,) = (out for command, out in printed.items() if command.startswith("mmjax evaluate"))
    assert float(re.search(r"photos +40 +0 +(\S+)", table)[1]) > 0.9
    answers = [
        out.strip()
        for command, out in printed.items()
        if re.match("mmjax generate|python ask.py", command)
    ]
    assert len(answers) == 3
    assert set(answers) < {"red", "green", "blue", "white"}
    assert len(set(answers)) == 1
