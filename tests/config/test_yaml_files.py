from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from commands import SHIPPED, run
from llava_folder import save_checkpoint, save_parts, save_questions

from mmjax import train
from mmjax.config import Config
from mmjax.config.loading import config_texts, load, sibling, to_json
from mmjax.config.yaml_files import read_yaml
from mmjax.errors import UserError

BASE = "base: tiny_vlm\n"
# lists and texts that the command line would read as something else
AWKWARD = {
    "base": "tiny_vlm",
    "optimizer": {"modules": {"own": {"parameters": ["llm.*,vision.*", "none"]}}},
    "data": {
        "cache": "null",
        "sources": {
            "own": {
                "kind": "function",
                "function": "mmjax.data.toy.dataset:EmbeddedDataset",
                "arguments": {"a": "3", "b": 3, "c": "true", "d": 1e-05, "e": " \U0001f600\n", "f": ""},
            }
        },
    },
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def message(path: Path, text: str | bytes) -> str:
    """The error of a file with this text, which names the file in one line."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as raised:
        load(path)
    said = str(raised.value)
    assert said.startswith(str(path))
    assert "\n" not in said
    return said.removeprefix(str(path))


def assert_round_trip(config: Config, name: str, tmp_path: Path) -> None:
    """It is the same from block and flow YAML and from JSON."""
    tree = json.loads(to_json(config))
    if "config:" in to_json(config):  # functions of the Python file
        tree = {"base": name} | tree
    texts = {
        "block.yaml": yaml.safe_dump(tree, sort_keys=False),
        "flow.yml": yaml.safe_dump(tree, sort_keys=False, default_flow_style=True),
        "stored.json": json.dumps(tree, indent="\t"),
    }
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
        assert load(tmp_path / file) == config
        assert to_json(load(tmp_path / file)) == to_json(config)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_config_is_the_same_from_python_yaml_and_json(name: str, tmp_path: Path) -> None:
    assert_round_trip(load(name), name, tmp_path)


OF_CHECKPOINTS = {
    "llava_style": "checkpoint={0}/tiny data={0}/data/data.json",
    "llava_lora": "checkpoint={0}/tiny data={0}/data/data.json model.lora.llm.rank=8",
    "llava_dpo": "checkpoint={0}/tiny data={0}/data/data.json model.lora.llm.rank=8",
    "llava_alignment": "tower={0}/tower llm={0}/llm data={0}/data/data.json image=<image>",
    "internvl": "llm=8b",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "words"), OF_CHECKPOINTS.items())
def test_a_config_that_asks_for_a_checkpoint_is_the_same_too(
    name: str, words: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "tiny")
    save_parts(tmp_path)
    save_questions(tmp_path / "data", 4)
    assert_round_trip(load(name, words.format(tmp_path).split()), name, tmp_path)


def test_values_of_quoted_texts_lists_and_numbers_are_kept(file: Path) -> None:
    for text in (yaml.safe_dump(AWKWARD, allow_unicode=True), json.dumps(AWKWARD)):
        file.write_text(text)
        config = load(file)
        assert config.optimizer.modules["own"].parameters == ("llm.*,vision.*", "none")
        assert config.data.cache == "null"
        own = config.data.sources["own"].arguments
        assert own == AWKWARD["data"]["sources"]["own"]["arguments"]
        assert list(map(type, own.values())) == [str, int, str, float, str, str]


def test_a_file_says_what_the_command_line_says(file: Path, tmp_path: Path) -> None:
    file.write_text(
        """
base: tiny_vlm
name: mine
training: {epochs: 2}       # unsets steps
optimizer: adamw
batch:
  size: {count: 4096, kind: tokens}
  grouping: isf
data: {max_bad: null, max_tokens: none}
model: {llm: {remat: [full, none, full]}}
optimizer.modules.llm.learning_rate: 1e-4
mesh: {fsdp: -1}
"""
    )
    words = [
        "name=mine",
        "training.epochs=2",
        "optimizer=adamw",
        "batch.size=tokens",
        "batch.size.count=4096",
        "batch.grouping=isf",
        "model.llm.remat=full,none,full",
        "optimizer.modules.llm.learning_rate=1e-4",
        "mesh.fsdp=-1",
    ]
    assert load(file) == load("tiny_vlm", words)
    assert load(file, ["seed=3"]) == load("tiny_vlm", [*words, "seed=3"])
    (tmp_path / "second.json").write_text('{"base": "mine", "seed": 3}')
    assert load(tmp_path / "second.json") == load(file, ["seed=3"])
    assert sibling(str(tmp_path / "third.py"), "second").config() == load(file, ["seed=3"])


def test_a_base_is_called_with_arguments_and_gives_its_functions(file: Path) -> None:
    file.write_text("base: tiny_dpo\nseed: 3\n")
    assert load(file) == load("tiny_dpo", ["seed=3"])
    # which a run's copy of the config then has
    assert list(config_texts(file)) == ["config.yaml", "config.py"]
    file.write_text("base: llava_style\narguments: {checkpoint: first, data: a.json}")
    for words, folder in ([], "first"), (["checkpoint=second"], "second"):
        with pytest.raises(UserError, match=f"{folder} "):
            load(file, words)
    file.write_text("base: layers\narguments: {layers: 4, heads: 2}")
    file.with_name("layers.yaml").write_text("base: tiny_vlm")
    assert "config() has no argument 'layers'" in message(file, file.read_text())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE + "training:\n  stps: 3", ":3: unknown key 'training.stps': did you mean 'training.steps'?"),
        (BASE + "lr: 1e-4", ":2: unknown key 'lr': here it is optimizer.learning_rate=1e-4"),
        (BASE + "training: {steps: ten}", ":2: training.steps: got 'ten'; expected int"),
        (BASE + 'training: {steps: "3"}', """:2: training.steps: got '"3"'; expected int"""),
        (BASE + "training: {steps: 1:30}", ":2: training.steps: got '1:30'; expected int"),
        (BASE + "model: {llm: {frozen: no}}", ":2: model.llm.frozen: got 'no'; expected true or false"),
        (BASE + "optimizer: {offload: off}", ":2: optimizer.offload: got 'off'; expected true or false"),
        (BASE + "name: ~", ":2: name: got null; expected str"),
        (BASE + "model: {llm: {remat: [full, {a: 1}]}}", ":2: model.llm.remat[1]: got '{}'; expected one of"),
        (BASE + "seed: 1\n\nseed: 2", ":4: seed is in line 2 too; leave one of them out"),
        (BASE + "name: !!python/object/apply:os.system ['touch evil']", ":2: anchors (&), aliases (*) and tags (!)"),
        (BASE + "name: !own x", ":2: anchors (&), aliases (*) and tags (!) are not read: write the value out"),
        (BASE + "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ":2: anchors (&), aliases (*) and tags (!)"),
        (BASE + "training:\n  <<: {steps: 3}", ":3: a key is one name; merge keys (<<) are not read"),
        (BASE + "? [a, b]\n: 1", ":2: a key is one name"),
        ("seed=3: 4", ":1: a key is one name"),
        (BASE + "name: a\n\tseed: 2", ":3: "),
        (BASE + "---\nname: a", ":2: expected a single document in the stream but found another document"),
        ("", ":1: has no keys"),
        ("- a", ":1: has no keys"),
        ("[" * 3000, " is not YAML: maximum recursion depth"),
        (b"name: \xff", " is not YAML: 'utf-8' codec can't decode"),
        ("name: a", ": missing key 'data'"),
        ("base: tiny_vlmm", ":1: no config 'tiny_vlmm' beside it: did you mean 'tiny_vlm'?"),
        ("base: mine", ": derives from itself"),
        ("name: a\nbase: llava_style", "config() asks for checkpoint; say it after the config's name: checkpoint=..."),
        ("base: llava_style\narguments: {chekpoint: a}", "has no argument 'chekpoint': did you mean 'checkpoint'?"),
        (BASE + "arguments: {a: 1}", ":1: "),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_place_and_nothing_is_executed(
    text: str | bytes, expected: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    said = message(file, text)
    assert said.startswith(expected) if expected[0] in ": " else expected in said
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_python_beside_a_file_is_never_its_base(file: Path) -> None:
    file.with_name("own.py").write_text("raise SystemExit('executed')")
    assert "no config 'own' beside it" in message(file, "base: own")


def test_a_runs_own_config_is_resumed_or_copied_but_not_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(to_json(load("tiny_vlm")))
    with pytest.raises(UserError, match=re.escape(f"--resume {tmp_path}")):
        load(tmp_path / "config.json")
    (tmp_path / "config.json").rename(tmp_path / "copy.json")
    assert load(tmp_path / "copy.json") == load("tiny_vlm")


def test_other_yaml_is_plain_data_too(file: Path) -> None:
    file.write_text("a: [1, x]\nb: {}\n")
    assert read_yaml(file) == {"a": [1, "x"], "b": {}}
    file.write_text("a: !!python/name:os.system")
    with pytest.raises(UserError, match=r"mine\.yaml:1: anchors"):
        read_yaml(file)


def test_a_command_takes_a_file_and_its_faults_end_it_with_code_2(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(BASE + "name: mine\n")
    shown = run(capsys, train.main, file, "seed=3", "--show")
    assert "= mine" in shown.out
    file.write_text(BASE + "nam: mine\n")
    ended = run(capsys, train.main, file)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert f"error: {file}:2: unknown key 'nam': did you mean 'name'?" in ended.err


@pytest.mark.exhaustive
def test_a_run_of_a_file_is_resumed_by_it_and_by_its_folder(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.write_text(
        "base: tiny_text\nname: mine\ntraining: {steps: 2, evaluate_every: 0}\nbatch: {size: {count: 8}}\n"
        "schedule: {warmup: 0}\n"
    )
    for words in ((file,), ("--resume", file, "training.steps=3"), ("--resume", "runs/mine")):
        assert run(capsys, train.main, *words).code == 0
    folder = file.parent / "runs/mine"
    assert (folder / "config.yaml").read_text() == file.read_text()
    assert json.loads((folder / "config.json").read_text())["training"]["steps"] == 3
