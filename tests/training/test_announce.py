"""What a run says of itself: the commands that it names work, and a learning rate of 0 does not go unsaid."""

from __future__ import annotations

import json
import shlex
import shutil
from importlib import import_module
from types import SimpleNamespace

import jax
import pytest
from commands import TINY, TINY_DRAWING, media_run, run

from mmjax import train
from mmjax.config.loading import load
from mmjax.models import attention, gated_delta_net
from mmjax.training import loop
from mmjax.training.announce import describe_attention, describe_zero_rates
from mmjax.training.outcome import describe_interruption

SHORT = (
    "training.steps=2",
    "training.evaluate_every=0",
    "training.checkpoint_every=0",
    "schedule.warmup=1",
)
WITHOUT_LIBRARIES = ("tensorboard",)


def named_commands(printed: str) -> list[list[str]]:
    """The words of the commands under "try next", without `python -m`; of those that are mmjax's."""
    lines = printed[printed.index("try next") :].splitlines()[1:]
    commands = [shlex.split(line.strip().partition("  ")[0]) for line in lines]
    return [command[2:] for command in commands if command[0] not in WITHOUT_LIBRARIES]


def assert_works(capsys, command: list[str]) -> None:
    ended = run(capsys, import_module(command[0]).main, *command[1:])
    assert ended.code == 0, (command, ended.err)


@pytest.fixture(scope="module")
def media(runs):
    return media_run(runs)


def test_the_commands_that_a_finished_run_names_work_with_it(media, capsys):
    folder, printed = media
    commands = named_commands(printed)
    assert [command[0] for command in commands] == ["mmjax.evaluate", "mmjax.report", "mmjax.train"]
    assert all(str(folder.name) in " ".join(command) for command in commands)
    for command in commands[1:]:  # what evaluating takes is in the exhaustive tier
        assert_works(capsys, command)


def conversations(tmp_path, splits: tuple[str, ...]) -> list[str]:
    """The words of a run of LLaVA's recipe on a tiny checkpoint, with files for these splits."""
    import llava_folder  # imports torch

    llava_folder.save_checkpoint(tmp_path / "llava")
    llava_folder.save_questions(tmp_path / "data", 16)
    data = tmp_path / "data" / "data.json"
    words = [f"checkpoint={tmp_path / 'llava'}", f"data={data}", f"images={data.parent / 'images'}"]
    small = (
        "training.precision=float32",
        "batch.size.count=8",
        "batch.rows.llm=8",
        "batch.rows.vision=8",
    )
    return [
        "llava_style",
        *words,
        *small,
        *(f"data.sources.chat.{split}={data}" for split in splits),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["text", "drawing", "chat", "chat with validation", "embedded", "preference"]
)
def test_the_commands_that_a_run_of_any_kind_names_work_wherever_it_lies(kind, tmp_path, capsys):
    words = {
        "text": [TINY],
        "drawing": [TINY_DRAWING],
        "embedded": ["tiny_vlm", "data.sources.embedded.samples=200", "batch.size.count=8"],
        "preference": ["tiny_dpo"],
    }.get(kind) or conversations(tmp_path, ("validation",) if "validation" in kind else ())
    folder = tmp_path / "a run, moved's"
    ended = run(capsys, train.main, *words, *SHORT, f"run={folder}", "data.workers=0", "device=cpu")
    assert ended.code == 0, ended.err
    commands = named_commands(ended.out)
    assert ("mmjax.evaluate" in [command[0] for command in commands]) == (kind != "chat")
    for command in commands:
        assert_works(capsys, command)


def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on(tmp_path):
    (saved,) = describe_interruption(tmp_path / "my run", 7, 6)
    assert saved.startswith(
        "interrupted after step 7; step 6 is saved; go on with python -m mmjax.train --resume '"
    )
    (unsaved,) = describe_interruption(tmp_path, 1, 0)
    assert (
        "after step 1; nothing is saved yet; go on from the beginning with python -m mmjax.train --resume"
        in unsaved
    )


@pytest.mark.exhaustive
def test_ctrl_c_names_the_command_that_goes_on_with_the_run(tmp_path, capsys, monkeypatch):
    update = loop.ProgressLine.update

    def interrupted(line, done, scalars):
        update(line, done, scalars)
        if done == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr(loop.ProgressLine, "update", interrupted)
        ended = run(capsys, train.main, TINY, f"run={folder}")
    assert (ended.code, ended.err) == (130, "interrupted\n")
    line = ended.out.splitlines()[-1]
    assert line.startswith(
        "interrupted after step 3; step 2 is saved; go on with python -m mmjax.train --resume "
    )
    shutil.move(folder, tmp_path / "moved")
    words = [
        word.replace("a run", "moved") for word in shlex.split(line.partition("python -m ")[2])
    ]
    assert_works(capsys, words)
    steps = [
        json.loads(text)["step"]
        for text in (tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1] == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), []),
        (
            ("optimizer=adamw", "optimizer.learning_rate=0"),
            ["NOTHING IS TRAINED: every learning rate is 0"],
        ),
        (
            ("optimizer.learning_rate=0",),
            ["not trained, with a learning rate of 0: llm/matrix, vision/matrix"],
        ),
        (("optimizer.learning_rate=0", "optimizer.adam_learning_rate=0"), ["NOTHING IS TRAINED"]),
        (
            ("optimizer.modules.llm.learning_rate=0",),
            ["not trained, with a learning rate of 0: llm/matrix, llm/other"],
        ),
    ],
)
def test_a_learning_rate_of_0_is_said(words, said):
    lines = describe_zero_rates(load("tiny_omni", words))
    assert len(lines) == len(said)
    assert all(text in line for line, text in zip(lines, said, strict=True))


def test_a_gpus_kernels_are_named_with_what_keeps_a_tower_from_hoppers(monkeypatch):
    monkeypatch.setattr(
        attention, "first_device", lambda: SimpleNamespace(platform="gpu", compute_capability="9.0")
    )
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    precision, backends = (
        ["training.precision=bfloat16"],
        ["model.llm.attention=auto", "model.encoders.vision.attention=auto"],
    )
    layout = SimpleNamespace(
        shapes=[SimpleNamespace(lengths=(256, 256)), SimpleNamespace(lengths=(512, 64))]
    )
    config = load(
        "tiny_vlm",
        [*precision, *backends, "model.llm.head_width=32", "model.encoders.vision.heads=8"],
    )
    expected = "llm: Mosaic GPU for Hopper; vision: Triton (heads of 12 channels)"
    assert describe_attention(config, layout) == expected
    windows = ["model.encoders.vision.windowed=(0,)"]
    for side, precision_of, expected in (
        (8, "bfloat16", "Mosaic GPU for Hopper, Triton in windows"),
        (12, "bfloat16", "Mosaic GPU for Hopper, windows too (windows of 144 tokens)"),
        (8, "float32", "Triton (numbers of 4 bytes), windows too (numbers of 4 bytes)"),
    ):
        window = f"model.encoders.vision.window={side}"
        words = [*backends, *windows, window, f"training.precision={precision_of}"]
        described = describe_attention(load("tiny_vlm", words), layout)
        assert described.endswith(f"; vision: {expected}")
    assert describe_attention(
        load("tiny_vlm", [*precision, "model.llm.attention=dense"]), layout
    ).startswith("llm: dense; ")


def test_a_gpus_kernels_of_delta_nets_are_named_beside_those_of_attention(monkeypatch):
    monkeypatch.setattr(
        attention, "first_device", lambda: SimpleNamespace(platform="gpu", compute_capability="8.0")
    )
    monkeypatch.setattr(gated_delta_net, "platform", lambda: "gpu")
    net = ["layers=0,", "key_heads=2", "value_heads=4", "key_width=16", "value_width=16"]
    words = ["training.precision=bfloat16", "model.llm.attention=auto"]
    config = load("tiny_text", [*words, *(f"model.llm.delta_net.{word}" for word in net)])
    layout = SimpleNamespace(shapes=[SimpleNamespace(lengths=(256,))])
    expected = "llm: Triton (compute capability 8.0); llm's delta nets: Triton"
    assert describe_attention(config, layout) == expected
