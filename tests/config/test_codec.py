"""Values read from text and from JSON, and written back."""

from __future__ import annotations

from contextlib import suppress

import pytest
from commands import SHIPPED

from mmjax.config import (
    Adafactor,
    AdamW,
    IsfGrouping,
    Muon,
    NoGrouping,
    PackGrouping,
    Rates,
    Samples,
    Tokens,
)
from mmjax.config.loading import (
    apply_overrides,
    describe,
    differences,
    from_json,
    keys_of,
    load,
    to_json,
)
from mmjax.errors import UserError

STEPS = load("tiny_omni").training.steps


def message(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load("tiny_omni", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.steps=1_000", "training.steps", 1000),
        ("mesh.data=-1", "mesh.data", -1),
        ("model.llm.tied=false", "model.llm.tied", False),
        ("model.llm.tied=True", "model.llm.tied", True),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("run=/data/my run", "run", "/data/my run"),
        ('run=" a=b\\n"', "run", " a=b\n"),
        ("run=", "run", ""),
        ("run = there", "run", "there"),
        ("training.precision=bfloat16", "training.precision", "bfloat16"),
        ("model.llm.remat=full", "model.llm.remat", "full"),
        ("model.llm.remat=none,full,attention", "model.llm.remat", ("none", "full", "attention")),
        ("model.llm.remat=(none, full, none)", "model.llm.remat", ("none", "full", "none")),
        ("batch.rows.llm=4", "batch.rows", {"llm": 4, "vision": 2, "audio": 3}),
        ("batch.size.count=32", "batch.size", Samples(32)),
        ("batch.grouping=isf", "batch.grouping", IsfGrouping()),
        ("batch.grouping=none", "batch.grouping", NoGrouping()),
        ("batch.grouping.pool_steps=5", "batch.grouping", PackGrouping(pool_steps=5)),
        ("optimizer=adamw", "optimizer", AdamW()),
        ("optimizer=adafactor", "optimizer", Adafactor()),
        ("optimizer.moments=int8", "optimizer.moments", "int8"),
        (
            "optimizer.modules.vision.learning_rate=0.1",
            "optimizer.modules",
            {"vision": Rates(learning_rate=0.1)},
        ),
        (
            "optimizer.modules.audio.connector.weight_decay=0",
            "optimizer.modules",
            {"audio.connector": Rates(None, 0.0)},
        ),
        ("model.encoders.vision.connector.merge=1", "model.encoders.vision.connector.merge", 1),
        ("compiler.xla_one=true", "compiler.xla_one", True),
        ("compiler.xla_two=120", "compiler.xla_two", 120),
        ("compiler.xla_three=AUTO", "compiler.xla_three", "AUTO"),
    ],
)
def test_an_override_is_read_by_its_fields_type(override: str, key: str, value: object) -> None:
    found: object = load("tiny_omni", [override])
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_overrides_apply_in_order_and_a_new_kind_takes_its_own_fields() -> None:
    config = load(
        "tiny_omni",
        [
            "batch.grouping=isf",
            "batch.grouping.iterations=5",
            "batch.size=tokens",
            "batch.size.count=9",
        ],
    )
    assert config.batch.grouping == IsfGrouping(iterations=5)
    assert config.batch.size == Tokens(9)
    assert load("tiny_omni", ["seed=1", "seed=2"]).seed == 2


def test_naming_the_kind_that_is_there_keeps_its_settings() -> None:
    assert load("tiny_omni", ["optimizer.momentum=0.5", "optimizer=muon"]).optimizer == Muon(
        momentum=0.5
    )


def test_none_clears_an_optional_value_and_braces_clear_a_dict() -> None:
    rate = "optimizer.modules.llm.learning_rate"
    assert load("tiny_omni", [f"{rate}=0.1", f"{rate}=none"]).optimizer.modules == {"llm": Rates()}
    assert (
        apply_overrides(
            load("tiny_omni", [f"{rate}=0.1"]), ["optimizer.modules={}"]
        ).optimizer.modules
        == {}
    )


def test_an_argument_of_a_function_keeps_the_kind_of_value_it_looks_like() -> None:
    lines = [
        f"data.sources.own.arguments.{a}"
        for a in ("n=3", "x=0.5", "on=true", "name=abc", 'digits="3"')
    ]
    function = [
        "data.sources.own=function",
        "data.sources.own.function=mmjax.data.toy.dataset:EmbeddedDataset",
    ]
    source = load("tiny_omni", [*function, *lines]).data.sources["own"]
    assert source.arguments == {"n": 3, "x": 0.5, "on": True, "name": "abc", "digits": "3"}
    assert [type(v) for v in source.arguments.values()] == [int, float, bool, str, str]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("batch.row=3", "unknown key 'batch.row': did you mean 'batch.rows'?"),
        ("batch.row.llm=3", "unknown key 'batch.row.llm': did you mean 'batch.rows.llm'?"),
        ("trainig.steps=3", "unknown key 'trainig.steps': did you mean 'training.steps'?"),
        ("trainig.step=3", "unknown key 'trainig.step': did you mean 'training'?"),
        ("steps=3", "unknown key 'steps': did you mean 'training.steps'?"),
        ("sead=3", "unknown key 'sead': did you mean 'seed'?"),
        ("seed.x=3", "unknown key 'seed.x': seed is int, it has no fields"),
        (
            "batch.grouping.kind=isf",
            "unknown key 'batch.grouping.kind': say batch.grouping=<kind> (pack, isf, none)",
        ),
        (
            "batch.grouping.iterations=5",
            "unknown key 'batch.grouping.iterations': batch.grouping is 'pack'; say batch.grouping=isf first",
        ),
        (
            "model.encoders.visoin.width=64",
            "unknown key 'model.encoders.visoin.width': there is no 'model.encoders.visoin'; "
            "say model.encoders.visoin=<kind> first (vision, audio)",
        ),
        (
            "batch.grouping=ifs",
            "batch.grouping: got 'ifs'; expected a kind: pack, isf, none: did you mean 'isf'?",
        ),
        ("training.steps=many", "training.steps: got 'many'; expected int"),
        ("training.steps=1e3", "training.steps: got '1e3'; expected int"),
        ("training.clip=nan", "training.clip: got 'nan'; expected a finite float"),
        ("model.llm.tied=1", "model.llm.tied: got '1'; expected true or false"),
        (
            "training.precision=float16",
            "training.precision: got 'float16'; expected one of float32, bfloat16: did you mean 'bfloat16'?",
        ),
        (
            "optimizer.modules.llm.learning_rate=fast",
            "optimizer.modules.llm.learning_rate: got 'fast'; expected a finite float or none",
        ),
        ("schedule=2", "schedule: got '2', but it has fields; did you mean schedule.warmup=2?"),
        (
            "schedule=cosine",
            "schedule: got 'cosine', but it has fields; did you mean schedule.shape=cosine?",
        ),
        (
            "batch.size=4",
            "batch.size: got '4'; expected a kind: samples, tokens: did you mean batch.size.count=4?",
        ),
        (
            "optimizer=0.1",
            "optimizer: got '0.1'; expected a kind: adamw, muon, adafactor: did you mean optimizer.learning_rate=0.1?",
        ),
        (
            "model.lora.llm=8",
            "model.lora.llm: got '8', but it has fields; did you mean model.lora.llm.rank=8?",
        ),
        ("batch.rows=2", "batch.rows: got '2', but it has entries by name; write batch.rows.llm=2"),
        ("compiler=2", "compiler: got '2', but it has entries by name; write compiler.NAME=2"),
        (
            "units.llm.pipelines=2",
            "unknown key 'units.llm.pipelines': did you mean 'units.llm.pipeline'?",
        ),
        ("batch.size=tokens", "missing key 'batch.size.count', int: it has no default; give it"),
        ("--steps", "'--steps' is not an override; write key=value, such as training.steps=100"),
    ],
)
def test_a_wrong_override_says_what_was_given_and_what_is_expected(
    override: str, error: str
) -> None:
    assert message(override) == error


def test_a_tuple_with_a_wrong_entry_names_the_entry() -> None:
    assert message("data.sources.embedded.modalities=image,sound").startswith(
        "data.sources.embedded.modalities[1]: got 'sound'; expected one of image, audio, mixed, text"
    )


# -------------------------------------------------------------------------------------- JSON,
# printing, comparing


@pytest.mark.parametrize("name", SHIPPED)
def test_config_to_json_to_config_is_the_identity(name: str) -> None:
    config = load(name)
    again = from_json(to_json(config))
    assert again == config
    assert to_json(again) == to_json(config)


EDITED = [
    "optimizer=adamw",
    "optimizer.moments=bfloat16",
    "optimizer.modules.vision.connector.learning_rate=1e-4",
    "batch.size=tokens",
    "batch.size.count=4096",
    "batch.grouping=none",
    "model.llm.remat=none,full,attention",
    "model.encoders.vision.remat=(full,full)",
    "data.sources.own=function",
    "data.sources.own.function=mmjax.data.toy.dataset:EmbeddedDataset",
    'data.sources.own.arguments.text="3"',
    "data.sources.own.arguments.number=3",
    "data.sources.embedded.modalities=text,",
]


def test_json_keeps_unions_tuples_dicts_and_none() -> None:
    config = load("tiny_omni", EDITED)
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("overrides", [[], EDITED])
def test_every_printed_line_is_a_valid_override(overrides: list[str]) -> None:
    config = load("tiny_omni", overrides)
    lines = describe(config).splitlines()
    assert len({line.index(" = ") for line in lines}) == 1, "aligned"
    assert load("tiny_omni", lines) == config


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"seed"', '"sead"', "unknown key 'sead': did you mean 'seed'?"),
        (
            '"patch"',
            '"patsh"',
            "unknown key 'model.encoders.vision.patsh': did you mean 'model.encoders.vision.patch'?",
        ),
        (
            '"kind": "pack"',
            '"kind": "pac"',
            "batch.grouping: unknown kind 'pac': did you mean 'pack'?",
        ),
        ('"kind": "pack",', "", "batch.grouping: unknown kind None"),
        (f'"steps": {STEPS}', '"steps": true', "training.steps: got a bool, True; expected int"),
        ('"heads": 4,', "", "missing key 'model.llm.heads', int"),
        ('"seed": 0', '"seed": null', "seed: got none; expected int"),
        ('"clip": 1.0', '"clip": NaN', "training.clip: got a float, nan; expected a finite float"),
        ('"rows": {', '"rows": [', "the stored config is not JSON"),
    ],
)
def test_json_that_does_not_fit_is_named(old: str, new: str, error: str) -> None:
    text = to_json(load("tiny_omni"))
    assert old in text
    with pytest.raises(UserError) as caught:
        from_json(text.replace(old, new, 1))
    assert str(caught.value).startswith(error)


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="JSON list"):
        from_json("[]")


def test_differences_are_lines_of_old_and_new() -> None:
    a = load("tiny_omni")
    b = load(
        "tiny_omni", ["training.steps=100", "batch.grouping=isf", "model.llm.remat=none,none,full"]
    )
    assert differences(a, a) == []
    assert differences(a, b) == [
        "batch.grouping: pack -> isf",
        "batch.grouping.pool_steps: 4 -> absent",
        "model.llm.remat: auto -> none,none,full",
        f"training.steps: {STEPS} -> 100",
        "batch.grouping.iterations: absent -> 10",
    ]


def test_a_whole_section_that_is_absent_is_one_line() -> None:
    lines = differences(load("tiny_vlm"), load("tiny_omni"))
    assert "model.encoders.audio: absent -> audio" in lines
    assert not [line for line in lines if line.startswith("model.encoders.audio.")]


@pytest.mark.parametrize("number", ["9" * 400, str(2**63), str(-(2**63)), "9" * 5000])
def test_numbers_that_nothing_holds_are_one_line_for_every_key(number: str) -> None:
    tiny = load("tiny_omni")
    for key in keys_of(tiny):
        with suppress(UserError):
            apply_overrides(tiny, [f"{key}={number}"])
    with pytest.raises(UserError, match=r"^training\.steps: "):
        apply_overrides(tiny, [f"training.steps={number}"])
    text = to_json(tiny).replace(f'"steps": {STEPS}', f'"steps": {number}')
    with pytest.raises(
        UserError, match=r"training\.steps: a whole number beyond|the stored config is not JSON"
    ):
        from_json(text)


def test_another_kind_of_source_takes_over_path_and_folders_and_nothing_that_means_something_else() -> (
    None
):
    words = ["data.sources.mine=llava", "data.sources.mine.path=a.jsonl"]
    words += ["data.sources.mine.outside=allow", "data.sources.mine.weight=2"]
    folder = "data.sources.mine.images=photos"
    columns = "data.sources.mine.messages=messages"
    for kind, images, more in (("messages", "photos", [folder]), ("parquet", "", [])):
        behind = [columns] if kind == "parquet" else []
        source = load(
            "tiny_omni", [*words, *more, f"data.sources.mine={kind}", *behind]
        ).data.sources["mine"]
        assert (source.kind, source.path, source.images) == (kind, "a.jsonl", images)
        assert (source.outside, source.weight) == ("allow", 2)
