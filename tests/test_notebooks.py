"""The notebooks, run from their first cell to their last on tiny checkpoints."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from compilation import optimized
from llava_folder import save_checkpoint, save_parts
from nbclient import NotebookClient
from started import ROOT

NOTEBOOKS = ROOT / "notebooks"

pytestmark = pytest.mark.exhaustive


def executed(name: str, folder: Path, **given: object) -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    said = {name: str(value) for name, value in given.items()} | {"PLACE": str(folder / "place")}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | said
    with optimized():
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | said
        NotebookClient(
            notebook, timeout=1800, resources={"metadata": {"path": str(folder)}}
        ).execute(env=environment)
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    """All that its cells said."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join([*(output.get("text", "") for output in outputs), *shown])


def test_every_notebook_is_stored_with_short_outputs_and_is_tested_here():
    found = {path.name: nbformat.read(path, as_version=4) for path in NOTEBOOKS.glob("*.ipynb")}
    assert set(found) == {"compose.ipynb", "finetune.ipynb", "quickstart.ipynb"}
    for name, notebook in found.items():
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), name
        outputs = [output for cell in code for output in cell.outputs]
        assert any("image/png" in output.get("data", {}) for output in outputs), name
        assert not any(output.output_type == "error" for output in outputs), name
        texts = [
            output.get("text", "") + output.get("data", {}).get("text/plain", "")
            for output in outputs
        ]
        assert max(map(len, texts)) < 3000, name
        assert not any(
            word in text for text in texts for word in ("/home/", "/root/", "/tmp/", "Warning")
        ), name


def test_quickstart_trains_looks_at_rows_asks_and_reports(tmp_path):
    notebook = executed("quickstart.ipynb", tmp_path)
    said = printed(notebook)
    assert "step 1 has" in said
    assert "of which are used" in said
    loss = [float(number) for number in re.search(r"loss: ([\d.]+) to ([\d.]+)", said).groups()]
    assert loss[1] < 0.7 * loss[0]
    assert said.count("->") >= 6
    assert (tmp_path / "place" / "run" / "report.html").is_file()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 5


def test_compose_shows_a_packed_batch_of_two_models_that_never_met(tmp_path):
    save_parts(tmp_path)
    notebook = executed(
        "compose.ipynb",
        tmp_path,
        TOWER=tmp_path / "tower",
        LLM=tmp_path / "llm",
        IMAGE_TOKEN="<image>",
    )
    said = printed(notebook)
    assert "parameters train" in said
    assert "samples in rows of" in said
    assert "<16 tokens of an image>" in said
    assert "What colour is the" in said
    assert any(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )


def test_finetune_learns_to_answer_what_it_was_not_shown(tmp_path):
    save_checkpoint(tmp_path / "checkpoint")
    given = {"CHECKPOINT": tmp_path / "checkpoint", "STEPS": 120, "RATE": 2e-3}
    notebook = executed("finetune.ipynb", tmp_path, **given)
    scores = [
        float(line.split("'exact_match': ")[1].split(",")[0])
        for line in printed(notebook).splitlines()
        if "'exact_match': " in line
    ]
    assert len(scores) == 2
    assert scores[0] <= 0.3 < 0.9 <= scores[1]
