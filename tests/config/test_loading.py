from __future__ import annotations

import dataclasses
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SHIPPED

from mmjax.config import Config
from mmjax.config.loading import (
    apply_overrides,
    copy_config,
    default_config,
    find_config,
    load,
    resolve,
    sibling,
)
from mmjax.config.training import unit_devices
from mmjax.cost.table import parameters
from mmjax.errors import UserError

ROOT = Path(__file__).parents[2]
# not those that are made of parts of another
WHOLE = [name for name in SHIPPED if name != "mmscale"]

VARIANT = """
from dataclasses import replace
from mmjax.config import Config
from mmjax.config.loading import sibling

base = sibling(__file__, "{base}")


def config() -> Config:
    return replace(base.config(), name="{name}"{edits})
"""


def write_variant(
    folder: Path, name: str, base: str = "tiny_omni", edits: str = "", more: str = ""
) -> Path:
    path = folder / f"{name}.py"
    path.write_text(
        VARIANT.format(base=base, name=name, edits=f", {edits}" if edits else "") + more
    )
    return path


def message(path: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------
# files and names


def test_the_default_is_tiny_omni() -> None:
    assert load(default_config()).name == "tiny_omni"


@pytest.mark.parametrize(
    "given", ["tiny_vlm", "tiny_vlm.py", "configs/tiny_vlm.py", "configs/tiny_vlm"]
)
def test_a_shipped_config_is_found_by_name_from_any_folder(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(given).name == "tiny_vlm"


def test_a_file_that_exists_goes_before_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    write_variant(tmp_path / "configs", "tiny_vlm", edits="seed=7")
    assert load("configs/tiny_vlm.py").seed == 7


def test_a_missing_file_names_what_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message("tiny_vml") == "no config tiny_vml: did you mean 'tiny_vlm'?"
    assert message("gone/own.py") == "no config gone/own.py: gone has none"
    write_variant(tmp_path, "experiment")
    assert f"did you mean '{tmp_path / 'experiment.py'}'?" in message(tmp_path / "experimnet.py")
    monkeypatch.chdir(tmp_path)
    for name in ("experimnet.py", "experiment"):
        assert "did you mean 'experiment.py'?" in message(name)
    assert "tiny_omni" in message("zzz")


def test_what_is_no_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.txt").write_text("{}")
    assert "a config is a Python file" in message(tmp_path / "config.txt")
    assert "a config is a Python file" in message(tmp_path)


def test_the_shipped_configs_are_what_their_names_say() -> None:
    assert {name: list(load(name).model.encoders) for name in WHOLE if name != "tiny_frozen"} == {
        **{f"omni_{size}": ["vision", "audio"] for size in ("10b", "18b", "84b")},
        **{f"mllm_{size}": ["vision"] for size in ("9b", "15b", "72b")},
        "internvl_26b": ["vision"],
        "omni_10b_units": ["vision", "audio"],
        "internvl_26b_units": ["vision"],
        "tiny_omni": ["vision", "audio"],
        "tiny_vlm": ["vision"],
        "tiny_video": ["vision"],
        "tiny_audio": ["audio"],
        "tiny_draw": ["vision"],
        "tiny_dpo": ["vision"],
        "tiny_text": [],
    }
    frozen = load("tiny_frozen").model
    assert all(e.frozen and not e.connector.frozen for e in frozen.encoders.values())
    assert not frozen.llm.frozen


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("omni_10b", (7, 2, 0.6)),
        ("omni_18b", (14, 3, 0.6)),
        ("omni_84b", (72, 6, 6)),
        ("mllm_9b", (7.5, 0.63, 0.87)),
        ("mllm_15b", (14, 0.63, 0.87)),
        ("mllm_72b", (70, 0.63, 0.87)),
        ("internvl_26b", (20, 6)),
        ("internvl llm=8b", (8, 6)),
        ("internvl llm=34b", (34, 6)),
        ("internvl llm=70b", (70, 6)),
    ],
)
def test_the_large_configs_have_the_published_parameters(
    name: str, billions: tuple[float, ...]
) -> None:
    config, *words = name.split()
    model = load(config, words).model
    counts = parameters(model)
    assert [counts[module] / 1e9 for module in ("llm", *model.item_modules)] == pytest.approx(
        billions, rel=0.12
    )


@pytest.mark.parametrize("name", ["omni_10b", "internvl_26b"])
def test_configs_on_units_are_of_the_same_model(name: str) -> None:
    config = load(f"{name}_units")
    assert config.model == load(name).model
    # two nodes, as their first lines say
    assert sum(map(unit_devices, config.units.values())) == 16


def test_every_config_works_from_an_installed_package(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mmjax", tmp_path / "site" / "mmjax", ignore=ignore)
    shutil.copytree(ROOT / "configs", tmp_path / "site" / "mmjax" / "configs", ignore=ignore)
    script = "import sys; from mmjax.config.loading import load; [print(load(n).name) for n in sys.argv[1:]]"
    done = subprocess.run(
        [sys.executable, "-c", script, *WHOLE],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == WHOLE


def test_reading_a_config_does_not_import_jax() -> None:
    script = "import sys; from mmjax.config.loading import load; load('tiny_omni'); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


# --------------------------------------------------------------------------------------------------
# variants


def test_a_variant_of_a_variant_is_a_short_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_variant(tmp_path, "first", edits="seed=3")
    second = write_variant(tmp_path, "second", "first", "device='cpu'")
    monkeypatch.chdir("/")
    config = load(second)
    assert (config.name, config.seed, config.device) == ("second", 3, "cpu")


def test_a_sibling_beside_the_file_goes_before_a_shipped_one(tmp_path: Path) -> None:
    shutil.copy(default_config(), tmp_path / "tiny_omni.py")
    own = (
        (tmp_path / "tiny_omni.py")
        .read_text()
        .replace('name="tiny_omni"', 'name="tiny_omni", seed=5')
    )
    (tmp_path / "tiny_omni.py").write_text(own)
    assert load(write_variant(tmp_path, "mine")).seed == 5


def test_a_missing_sibling_names_what_was_meant(tmp_path: Path) -> None:
    path = write_variant(tmp_path, "mine", "tiny_omny")
    assert message(path) == f"{path}: no config 'tiny_omny' beside it: did you mean 'tiny_omni'?"


def test_files_that_derive_from_each_other_are_refused(tmp_path: Path) -> None:
    path = write_variant(tmp_path, "first", "second")
    write_variant(tmp_path, "second", "first")
    assert f"{path}: derives from itself, by way of second.py" in message(path)


def test_a_sibling_is_executed_once_in_one_reading(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write_variant(tmp_path, "first", more=f"open({str(log)!r}, 'a').write('x')\n")
    path = write_variant(tmp_path, "second", "first", more='\nsibling(__file__, "first")\n')
    load(path)
    assert log.read_text() == "x"
    load(path)
    assert log.read_text() == "xx"


def test_a_config_may_define_dataclasses_of_its_own(tmp_path: Path) -> None:
    own = "import dataclasses\n@dataclasses.dataclass\nclass Own:\n    x: int = 1\n"
    path = write_variant(tmp_path, "mine", more=own)
    path.write_text("from __future__ import annotations\n" + path.read_text())
    assert load(path).name == "mine"


# ------------------------------------------------------------------------------------------------
# faults of a file


def test_an_exception_in_a_file_gives_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def config():\n    layers = [1]\n    return layers[4]\n")
    assert message(path) == f"{path}:3: IndexError: list index out of range"
    path.write_text("import no_such_module\n")
    assert message(path) == f"{path}:1: ModuleNotFoundError: No module named 'no_such_module'"
    path.write_text("from mmjax.config import Config\ndef config():\n    return Config(steps=3)\n")
    assert message(path).startswith(f"{path}:3: TypeError: ")


def test_an_exception_in_a_sibling_gives_the_siblings_line(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("def config():\n    raise ValueError('two\\nlines')\n")
    assert (
        message(write_variant(tmp_path, "second", "first"))
        == f"{tmp_path}/first.py:2: ValueError: two lines"
    )


def test_a_syntax_error_gives_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ndef config(:\n")
    assert message(path).startswith(f"{path}:2: ")


def test_a_file_with_a_null_byte_is_named(tmp_path: Path) -> None:
    path = tmp_path / "null.py"
    path.write_bytes(b"x = 1\n\0\n")
    assert message(path).startswith(f"{path}:")
    assert "null bytes" in message(path)


def test_a_file_without_config_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("config = 3\n")
    assert (
        message(path)
        == f"{path}:1: has no function config; a config file defines def config() -> Config"
    )


def test_another_return_type_gives_the_line_of_config(tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    path.write_text("\n\ndef config():\n    pass\n")
    assert message(path) == f"{path}:3: config() returns NoneType, expected mmjax.config.Config"


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ("seed='1'", "seed: got a str, '1'; expected int"),
        ("seed=True", "seed: got a bool, True; expected int"),
        ("seed=1.0", "seed: got a float, 1.0; expected int"),
        (
            "device='gpus'",
            "device: got a str, 'gpus'; expected one of auto, cpu, gpu, tpu: did you mean 'gpu'?",
        ),
        ("schedule=None", "schedule: got none; expected Schedule"),
        (
            "optimizer={'kind': 'adamw'}",
            "optimizer: got a dict; expected a kind: adamw, muon, adafactor",
        ),
        ("mesh=replace(base.config().mesh, fsdp=[2])", "mesh.fsdp: got a list; expected int"),
        (
            "batch=replace(base.config().batch, rows={'llm': 8, 3: 2})",
            "batch.rows: 3 cannot be a name; use letters, digits, '_', '-' and '.'",
        ),
        (
            "optimizer=replace(base.config().optimizer, kind='adamw')",
            "optimizer.kind: got 'adamw', but a Muon is a 'muon'",
        ),
    ],
)
def test_a_value_of_another_type_gives_its_key_and_the_line_that_has_it(
    tmp_path: Path, edits: str, error: str
) -> None:
    path = write_variant(tmp_path, "mine", edits=edits)
    assert message(path) == f"{path}:10: {error}"


def test_a_whole_number_is_a_float_where_a_float_is_meant(tmp_path: Path) -> None:
    path = write_variant(
        tmp_path, "mine", edits="optimizer=replace(base.config().optimizer, learning_rate=1)"
    )
    rate = load(path).optimizer.learning_rate
    assert rate == 1.0
    assert type(rate) is float


def test_a_fault_between_values_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = write_variant(tmp_path, "mine", edits="seed=-1")
    assert message(path).startswith(f"{path}: seed=-1: ")


def test_edit_validates_and_leaves_the_old_config() -> None:
    config = load("tiny_omni")
    assert apply_overrides(config, ["device=cpu"]) == dataclasses.replace(config, device="cpu")
    assert config.device == "auto"
    with pytest.raises(UserError, match=r"training\.steps"):
        apply_overrides(config, ["training.steps=0"])


# --------------------------------------------------------------------------------------------------
# functions

SOURCE = """

def numbers(split: str, n: int = 3) -> list[int]:
    return [len(split)] * n


class Group:
    @staticmethod
    def numbers(split: str) -> str:
        return split


def _private() -> None:
    pass

import os
"""

OWN = (
    "data=replace(base.config().data, "
    "sources={'own': __import__('mmjax.config', fromlist=['x']).FunctionSource('config:numbers')})"
)


def test_a_function_of_mmjax_is_found() -> None:
    assert resolve("mmjax.config.loading:load", None) is load
    assert resolve("mmjax.config:Config", None) is Config


def test_a_function_of_the_kept_config_is_found_when_the_file_is_gone(tmp_path: Path) -> None:
    folder, run = tmp_path / "mine", tmp_path / "run"
    folder.mkdir()
    run.mkdir()
    write_variant(folder, "first")
    path = write_variant(folder, "second", "first", OWN, SOURCE)
    config = load(path)
    copy_config(path, run)
    shutil.rmtree(folder)
    assert resolve(config.data.sources["own"].function, run)(split="train") == [5, 5, 5]
    assert resolve("config:Group.numbers", run)("test") == "test"
    assert load(run / "config.py") == config


def test_keeping_a_run_s_own_config_again_changes_nothing(tmp_path: Path) -> None:
    copy_config("tiny_vlm", tmp_path)
    text = (tmp_path / "config.py").read_text()
    copy_config(tmp_path / "config.py", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.py"]
    assert (tmp_path / "config.py").read_text() == text


def test_a_base_that_would_overwrite_the_kept_config_is_refused(tmp_path: Path) -> None:
    write_variant(tmp_path, "config")
    assert "rename that file" in message(write_variant(tmp_path, "mine", "config"))


def test_a_class_of_a_config_file_can_be_pickled(tmp_path: Path) -> None:
    module = sibling(str(tmp_path / "x.py"), write_variant(tmp_path, "mine", more=SOURCE).stem)
    assert isinstance(pickle.loads(pickle.dumps(module.Group())), module.Group)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("os:system", "is neither mmjax"),
        ("numpy:zeros", "is neither mmjax"),
        ("mmjaxx.config:Config", "is neither mmjax"),
        ("config.x:numbers", "is neither mmjax"),
        ("mmjax.config", "is neither mmjax"),
        ("mmjax.config.loading:_execute", "is private"),
        ("mmjax.config.loading:load.__globals__", "is private"),
        ("mmjax.config.loading:json.loads", "no function 'json.loads' in mmjax.config.loading"),
        ("mmjax.config.loading:importlib.import_module", "no function"),
        ("mmjax.config.loading:laod", "no function 'laod' in mmjax.config.loading"),
        ("mmjax.nowhere:x", "No module named 'mmjax.nowhere'"),
        ("config:nubmers", "no function 'nubmers' in "),
        ("config:_private", "is private"),
        ("config:os", "no function 'os' in "),
    ],
)
def test_no_other_function_can_be_named(function: str, error: str, tmp_path: Path) -> None:
    write_variant(tmp_path, "config", more=SOURCE)
    with pytest.raises(UserError) as caught:
        resolve(function, tmp_path)
    assert error in str(caught.value)


def test_a_function_of_the_config_needs_the_runs_folder(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match="give the run's folder"):
            resolve("config:numbers", folder)


def test_a_function_that_the_file_does_not_have_is_refused_when_it_is_loaded(
    tmp_path: Path,
) -> None:
    path = write_variant(tmp_path, "mine", edits=OWN)
    assert message(path) == f"{path}: data.sources.own.function: no function 'numbers' in {path}"


def test_find_gives_the_file_that_load_reads() -> None:
    assert find_config("tiny_omni") == default_config()
    assert math.isclose(load(find_config("tiny_omni")).model.llm.rope_theta, 1000.0)


ASKS = """
from dataclasses import replace

from mmjax.config.loading import sibling

base = sibling(__file__, "tiny_text")


def config(label: str, size: str = "24"):
    return replace(base.config(), name=label, seed=int(size))
"""


def test_a_config_may_ask_for_words(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(ASKS)
    made = load(path, ["label=mine", "training.steps=70", "size=7"])
    assert (made.name, made.training.steps, made.seed) == ("mine", 70, 7)
    with pytest.raises(
        UserError,
        match=r"asks\.py: config\(\) asks for label; say it after the config's name: label=",
    ):
        load(path, ["size=7"])
    # as some parameter of a recipe is called, and `mesh.data`
    path.write_text(ASKS.replace("size", "data"))
    assert load(path, ["label=mine", "mesh.data=2"]).mesh.data == 2
    path.write_text(ASKS)
    with pytest.raises(UserError, match=r"^unknown key 'labell': did you mean 'label'"):
        load(path, ["labell=mine"])
    with pytest.raises(UserError, match=r"^unknown key 'steps': did you mean 'training\.steps'"):
        load(path, ["label=mine", "steps=7"])
    (tmp_path / "kept").mkdir()
    copy_config(path, tmp_path / "kept")
    assert (tmp_path / "kept" / "config.py").read_text() == ASKS


def test_an_argument_of_a_config_has_the_type_of_its_annotation(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text(
        "from pathlib import Path\n"
        + ASKS[: ASKS.index("def")]
        + "def config(size: int = 24, folder: Path | None = None):\n"
        "    seed = size if type(size) is int else -1\n"
        "    return replace(base.config(), seed=seed, name=folder or 'none')\n"
    )
    assert load(path, ["size=7"]).seed == 7
    assert load(path, ["folder=ab"]).name == "ab"  # of a type that is not parsed
    with pytest.raises(UserError, match=r"^size: got 'seven'; expected int"):
        load(path, ["size=seven"])


def test_a_length_in_epochs_takes_the_place_of_one_in_steps_and_the_other_way_round() -> None:
    def length(*lines: str) -> tuple[int, float]:
        training = load("tiny_omni", lines).training
        return training.steps, training.epochs

    assert length("training.epochs=1.5") == (0, 1.5)
    assert length("training.epochs=2", "training.steps=0") == (0, 2)
    assert "training.steps=7 and training.epochs=2: give one, and 0 as the other" in message(
        "tiny_omni", "training.epochs=2", "training.steps=7"
    )
    for line in ("training.steps=0", "training.epochs=0", "training.epochs=-1"):
        assert "training.steps=0: must be at least 1, or give training.epochs above 0" in message(
            "tiny_omni", line
        )
    for endless in ("inf", "nan", "1e400"):
        assert "training.epochs" in message("tiny_omni", f"training.epochs={endless}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ("optimizer.weight_decay=0.1", "optimizer=adamw"),
            ("optimizer.weight_decay=0.1 is undone by optimizer=adamw",),
        ),
        (("units.llm.data=2", "units={}"), ("units.llm.data=2 is undone by units={}",)),
        (("place=x", "run=y"), ("place=x and run=y set run twice",)),
        (
            ("steps=7", "training.steps=8"),
            ("steps=7 and training.steps=8 set training.steps twice",),
        ),
    ],
)
def test_an_override_or_argument_without_effect_is_refused_with_what_undoes_it(
    words, named, tmp_path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from mmjax.config.loading import sibling\n"
        "base = sibling(__file__, 'tiny_omni')\n"
        "def config(place='', steps='900'):\n"
        "    whole = base.config()\n"
        "    return replace(whole, run=place, training=replace(whole.training, steps=int(steps)))\n"
    )
    with pytest.raises(UserError) as raised:
        load(path, words)
    assert all(text in str(raised.value) for text in named)
    assert load(path, ["place=x", "steps=700", "seed=3"]).training.steps == 700
    assert load(path, ["seed=3", "seed=4"]).seed == 4  # of one key the last counts
