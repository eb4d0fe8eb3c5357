"""Every command of the documentation runs: here, shortened, or in the test that is named for it."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import TINY, TINY_MEDIA, run
from llava_folder import save_checkpoint, save_parts, save_questions
from started import ROOT
from test_docs import write_examples

PROGRAMS = ("python", "mmjax", "pip", "launch/", "sbatch", "ray", "transformers", "mkdocs", "pytest", "JAX_NUM_CPU")
# Commands by their beginning, or by their document, that another test runs; .ci/run is what a newcomer does.
ELSEWHERE = {
    "README.md": ".ci/run",
    "docs/balance.md": "tests/test_docs.py::test_the_commands_in_balance_md_run",
    "docs/balancing.md": "tests/test_docs.py::test_the_examples_in_balancing_md_run",
    "docs/tutorial.md": "tests/test_docs.py::test_the_tutorial_goes_from_photos_to_an_answer_over_http",
    "launch/local.sh": "tests/test_launch.py",
    "mmjax doctor": "tests/test_doctor.py",
    "pip install": ".ci/run",
    "python -m mmjax.bench coordination": "tests/test_bench.py",
    "python -m mmjax.bench papers": "tests/benchmarks/test_bench_papers.py",
    "python -m mmjax.doctor": "tests/test_doctor.py",
    "python -m mmjax.evaluate RUN": "tests/test_evaluate_data.py",
    "python -m mmjax.evaluate llava-1.5-7b-hf --data pairs.jsonl": "tests/hf/test_preferences.py",
    "python -m mmjax.evaluate runs/speech": "tests/test_recipes.py",
    "python -m mmjax.evaluate runs/tiny_video": "tests/test_recipes.py",
    "python -m mmjax.export": "tests/test_export.py",
    "python -m mmjax.generate llava": "tests/test_docs.py::test_the_examples_in_using_md_answer",
    "python -m mmjax.generate runs/mine": "tests/test_docs.py::test_the_examples_in_using_md_answer",
    "python -m mmjax.generate runs/speech": "tests/test_recipes.py",
    "python -m mmjax.index my_config.py --latents": "tests/test_latents_command.py",
    "python -m mmjax.plan omni": "tests/test_plan_command.py",
    "python -m mmjax.plan tiny_omni cluster=here": "tests/test_plan_command.py",
    "python -m mmjax.studio": "tests/test_studio.py",
    "python -m mmjax.supervise": "tests/test_supervise.py",
    "python -m mmjax.train captions.py": "tests/test_docs.py::test_the_captions_example_in_data_md_trains",
    "python -m mmjax.train llava_dpo": "tests/hf/test_preferences.py",
    "python -m mmjax.train llava_lora checkpoint=Qwen2-Audio": "tests/test_recipes.py",
    "python -m mmjax.train llava_lora checkpoint=llava-1.5-7b-hf": "tests/training/test_quantized_training.py",
    "python -m mmjax.train my.py --resume": "tests/training/test_new_data.py",
    "python -m mmjax.train my.py mesh.data=2 mesh.expert=4": "tests/training/test_expert_meshes.py",
    "python -m mmjax.train my.py units.vision": "tests/pipeline/test_runs.py",
    "python -m mmjax.train my_config.py data.pool": "tests/data/loading/test_ray_pool.py",
    "python -m mmjax.train speech.py": "tests/test_recipes.py",
    "python -m mmjax.train tiny_video": "tests/test_recipes.py",
    "python -m mmjax.verify internvl_26b": "tests/test_verify.py",
    "python3 -m venv": ".ci/run",
    "ray start": "tests/data/loading/test_ray_pool.py",
    "sbatch": "tests/test_launch.py",
}


def commands(document: str) -> list[str]:
    """The commands of a document's shell blocks and of its indented lines, without comments."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"^ {4}(python -m .*)$", text, re.MULTILINE)
    return [re.sub(r"\s+#.*", "", " ".join(line.split())) for line in lines if line.startswith(PROGRAMS)]


DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
FOUND = [(document, command) for document in DOCUMENTS for command in commands(document)]


def is_elsewhere(document: str, command: str, beginning: str) -> bool:
    """Whether an entry of ELSEWHERE is for a command of a document."""
    return document == beginning or command.startswith(beginning)


HERE: dict[str, list[str]] = {}
for document, command in FOUND:
    if not any(is_elsewhere(document, command, beginning) for beginning in ELSEWHERE):
        HERE.setdefault(document, []).append(command)


@pytest.mark.parametrize("beginning", ELSEWHERE)
def test_a_documented_command_that_runs_elsewhere_is_there_and_so_is_its_test(beginning: str) -> None:
    file, _, name = ELSEWHERE[beginning].partition("::")
    assert not name or f"def {name}(" in (ROOT / file).read_text()
    assert (ROOT / file).is_file()
    assert any(is_elsewhere(document, command, beginning) for document, command in FOUND)


SHORT = ["training.steps=2", "schedule.warmup=1", "training.evaluate_every=0", "training.evaluate_samples=4"]
SMALL = [
    "training.precision=float32",
    "batch.size.count=8",
    "batch.rows.llm=8",
    "batch.rows.vision=8",
    "data.workers=0",
]


def shortened(command: str, place: Path) -> tuple[str, list[str]]:
    """A command's name and words, with few steps, on files of the test."""
    name, *words = shlex.split(re.sub("^(python -m mmjax.|mmjax )", "", command))
    words = [word.replace("/data/fast", str(place / "fast")).replace("120", "2") for word in words]
    if name == "train" and "--show" not in words:
        words += SHORT + (SMALL if any(word.startswith(("checkpoint=", "tower=")) for word in words) else [])
    few = {"verify": ["--backend=dense"]}
    return name, [*words, *few.get(name, [])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("document", HERE)
def test_the_commands_of_a_document_run(document, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_examples(document, tmp_path)
    shutil.copy(TINY, tmp_path)
    shutil.copy(TINY_MEDIA, tmp_path / "my.py")
    save_checkpoint(tmp_path / "llava-1.5-7b-hf")
    save_parts(tmp_path)
    (tmp_path / "tower").rename("siglip-so400m-patch14-384")
    (tmp_path / "llm").rename("Qwen3-4B")
    save_questions(tmp_path, 16).rename("llava.json")
    for image in (tmp_path / "images").iterdir():
        shutil.copy(image, tmp_path)
    shutil.copy("llava.json", "questions.json")
    (tmp_path / "my_config.py").write_text(
        "from mmjax.config.loading import sibling\n\nstyle = sibling(__file__, 'llava_style')\n\n\n"
        "def config():\n    return style.config('llava-1.5-7b-hf', 'llava.json', 'images')\n"
    )
    earlier = {"tiny_omni": "tiny_omni", "mine": "my.py", "first": "tiny_text", "second": "tiny_text"}
    for folder, config in earlier.items():
        if any(f"runs/{folder}" in command for command in HERE[document]):
            words = [config, f"run=runs/{folder}", *SHORT]
            assert run(capsys, importlib.import_module("mmjax.train").main, *words).code == 0
    for command in HERE[document]:
        name, words = shortened(command, tmp_path)
        ended = run(capsys, importlib.import_module(f"mmjax.{name}").main, *words)
        assert ended.code == 0, (command, ended.err)
