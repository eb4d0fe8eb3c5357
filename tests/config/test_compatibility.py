"""Features that do not work together are refused by the table that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmjax.config import MeshConfig, Unit
from mmjax.config.compatibility import CONFLICTS, Features, check_conflicts
from mmjax.config.loading import find_config, load
from mmjax.config.losses import Dpo
from mmjax.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "unsupported.md"
DELTA_NET = " ".join(
    f"model.llm.delta_net.{key}={value}"
    for key, value in {
        "layers": 0,
        "key_heads": 2,
        "value_heads": 2,
        "key_width": 16,
        "value_width": 16,
    }.items()
)
EXPERTS = " ".join(
    f"model.llm.experts.{key}={value}"
    for key, value in {"layers": 1, "count": 4, "per_token": 2, "width": 32}.items()
)
# A config and settings that have both features of a conflict, and the key of its error; two have
# tests of their own.
BOTH = [
    ("tiny_dpo", "model.encoders.vision.dropout=0.1", "model.encoders.vision.dropout"),
    ("tiny_dpo", "model.llm.items=prefix", "model.llm.items"),
    ("tiny_vlm", f"{DELTA_NET} model.llm.items=isolated", "model.llm.items"),
    ("tiny_vlm", "model.llm.layers=3 model.llm.fp8=linears mesh.tensor=2", "model.llm.fp8"),
    ("tiny_vlm", f"{EXPERTS} model.llm.quantize=int8 model.llm.frozen=true", "model.llm.quantize"),
    ("mllm_9b", "model.lora.all.layers=picture.*", "model.lora.all.layers"),
]


@pytest.mark.parametrize(("config", "words", "key"), BOTH, ids=[words for _, words, _ in BOTH])
def test_a_config_with_both_features_is_refused_by_key(config: str, words: str, key: str) -> None:
    with pytest.raises(UserError, match=re.escape(key)):
        load(find_config(config), words.split())


def test_losses_of_answers_are_refused_where_images_are_made() -> None:
    model = load(find_config("tiny_draw")).model
    with pytest.raises(UserError, match="loss=dpo does not work with model"):
        check_conflicts(Features(model, Dpo(reference="none")))


def test_a_unet_alone_on_its_devices_is_not_cut() -> None:
    model = load(find_config("mllm_9b")).model
    check_conflicts(
        Features(model, layouts={"mesh": (MeshConfig(tensor=2), ("llm", "vision", "picture"))})
    )
    with pytest.raises(UserError, match="the blocks of a UNet, model"):
        check_conflicts(Features(model, layouts={"units.picture": (Unit(tensor=2), ("picture",))}))


def table() -> str:
    rows = [f"| {one.feature} | {one.other} | {one.remedy} |\n" for one in CONFLICTS]
    return "| does not work | with | instead |\n|---|---|---|\n" + "".join(rows)


def test_every_conflict_has_a_test() -> None:
    assert len(CONFLICTS) == len(BOTH) + 2


def test_the_documentation_shows_every_conflict() -> None:
    begin, end = "<!-- conflicts -->\n\n", "\n<!-- /conflicts -->"
    shown = PAGE.read_text().split(begin)[1].split(end)[0]
    assert shown == table(), f"write it again: {PAGE}"
