"""What docs/llama_factory.md says works for a data set in LLaMA-Factory's format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import run
from llava_folder import save_checkpoint, save_questions

from mmjax import export, train

pytestmark = pytest.mark.exhaustive

PAGE = Path(__file__).parents[1] / "docs/llama_factory.md"


def test_the_documented_config_trains_and_is_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (config,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("mine.yaml").write_text(config)
    save_checkpoint(Path("llava-1.5-7b-hf"))
    entries = {}
    for number, name in enumerate(("mm_train", "mm_validation")):
        folder = Path("data") / name
        save_questions(folder, 24 - 16 * number, seed=number)
        records = json.loads((folder / "data.json").read_text())
        for record in records:
            record["images"] = [f"{name}/images/{record.pop('image')}"]
        Path(f"data/{name}.json").write_text(json.dumps(records))
        columns = {"messages": "conversations", "images": "images"}
        entries[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": columns,
        }
    texts = [{"instruction": f"Say {n}.", "input": "", "output": str(n)} for n in range(12)]
    Path("data/alpaca.json").write_text(json.dumps(texts))
    entries["alpaca"] = {"file_name": "alpaca.json"}
    Path("data/dataset_info.json").write_text(json.dumps(entries))
    words = ["mine.yaml", "batch.size.count=8", "schedule.warmup=1", "device=cpu"]
    ended = run(capsys, train.main, *words)
    assert ended.code == 0, ended.err
    (read,) = re.findall(r"\n\s+alpaca .*", ended.out)[:1]
    assert float(read.split()[-1]) == pytest.approx(2, abs=0.2)  # epochs, as of the larger source
    assert run(capsys, export.main, "runs/mine", "out").code == 0
