"""Layers are timed once, and what was measured is found again."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import pytest
from tiny_run import tiny_config

from mmjax.autotune import layer_profile as measuring
from mmjax.autotune.layer_profile import layer_times, profile_folder, typical_seconds
from mmjax.disk import with_checksum
from mmjax.planning.speed import FORWARD

SHAPES = {"llm": (1, (16, 40)), "vision": (2, (16,)), "audio": (1, (16,))}
POLICIES = {FORWARD, "none", "products", "attention_mlp", "attention", "full"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache of its own, filled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(measuring, "ENOUGH", 0.0)
        yield layer_times(tiny_config(), SHAPES, jax.devices()[0], True)


@pytest.mark.exhaustive
def test_every_layer_type_is_timed_forward_and_with_every_policy(home):
    assert set(home) == set(SHAPES)
    assert set(home["llm"].seconds) == {16, 32, 40}
    for times in home.values():
        for seconds in times.seconds.values():
            assert set(seconds) == POLICIES
            assert min(seconds.values()) > 0


@pytest.mark.exhaustive
def test_what_was_measured_is_read_and_not_measured_again(home, monkeypatch):
    monkeypatch.setattr(measuring, "time_layer", lambda *of: pytest.fail("measured again"))
    assert layer_times(tiny_config(), SHAPES, jax.devices()[0], True) == home
    assert layer_times(tiny_config(), SHAPES, jax.devices()[0], False) == home


@pytest.mark.exhaustive
def test_without_measuring_only_towers_of_which_all_is_known_are_told(home):
    assert set(
        layer_times(tiny_config(), SHAPES | {"llm": (1, (16, 64))}, jax.devices()[0], False)
    ) == {
        "vision",
        "audio",
    }


@pytest.mark.exhaustive
def test_another_precision_layer_or_gradient_has_times_of_its_own(home):
    made = tiny_config()
    others = [
        replace(made, training=replace(made.training, precision="bfloat16")),
        replace(made, model=replace(made.model, llm=replace(made.model.llm, mlp_width=96))),
        replace(made, model=replace(made.model, llm=replace(made.model.llm, frozen=True))),
    ]
    for other in others:
        assert "llm" not in layer_times(other, SHAPES, jax.devices()[0], False)
    longer = replace(
        made, model=replace(made.model, llm=replace(made.model.llm, layers=7, remat="full"))
    )
    assert "llm" in layer_times(longer, SHAPES, jax.devices()[0], False)


def test_layers_of_every_kind_are_timed_alone_and_weighed_by_their_share():
    llm = replace(tiny_config().model.llm, layers=5, unrotated=(1, 3))
    kinds = measuring.kinds_of_layers(llm)
    assert {kind.unrotated: share for kind, share in kinds} == {(): 0.6, (0, 1, 2, 3, 4): 0.4}
    isolated = measuring.isolate_tower(
        replace(tiny_config().model, llm=kinds[1][0]), "llm", 7, "none"
    )
    assert len(set(isolated.llm.layer_kinds)) == 1


def test_layers_with_and_without_windows_that_differ_are_timed_alone():
    llm = replace(tiny_config().model.llm, layers=6, window=5, windowed=(0, 1, 3, 4))
    llm = replace(llm, full_head_width=12, shared_layers=3, shared_mlp_width=7)
    kinds = {
        (kind.windowed, kind.mlp_width): share for kind, share in measuring.kinds_of_layers(llm)
    }
    every = tuple(range(6))
    wide = {(every, 7): 2 / 6, ((), 7): 1 / 6}
    assert kinds == {(every, llm.mlp_width): 2 / 6, ((), llm.mlp_width): 1 / 6, **wide}


def test_a_tower_without_gradients_takes_its_forward_time_whatever_the_policy(monkeypatch):
    monkeypatch.setattr(measuring, "ENOUGH", 0.0)
    made = tiny_config()
    encoders = {name: replace(e, frozen=True) for name, e in made.model.encoders.items()}
    frozen = replace(made, model=replace(made.model, encoders=encoders))
    seconds = measuring.time_layer(frozen, "vision", (1, 16), jax.devices()[0])
    assert len(set(seconds.values())) == 1


@pytest.mark.exhaustive
def test_a_damaged_profile_counts_as_none(home):
    for path in profile_folder().iterdir():
        whole = path.read_text()
        for damaged in (
            whole[: len(whole) // 2],
            "[]",
            json.dumps(with_checksum({"of": 1, "seconds": {}})),
            whole.replace("none", "nome"),
        ):
            path.write_text(damaged)
            layer_times(tiny_config(), SHAPES, jax.devices()[0], False)
        path.write_text(whole)
    assert layer_times(tiny_config(), SHAPES, jax.devices()[0], False) == home


@pytest.mark.exhaustive
def test_where_nothing_can_be_written_the_run_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measuring, "ENOUGH", 0.0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = layer_times(tiny_config(), {"vision": (2, (16,))}, jax.devices()[0], True)
    assert set(found) == {"vision"}
    assert "cannot be written" in capsys.readouterr().err


def test_programs_take_turns():
    calls = []
    found = typical_seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 600)
    assert calls == ["a", "b"] * (measuring.ROUNDS + 1)
    assert set(found) == {"a", "b"}
