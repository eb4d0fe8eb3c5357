"""`python -m mmjax.bench NAME`: every benchmark runs, and says what it promises to."""

import json

import pytest
from commands import run

from mmjax import bench


def rows(capsys, *words: str) -> list[dict]:
    ended = run(capsys, bench.main, *words, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_fill_compares_groupings_on_the_same_data(capsys):
    found = {
        r["grouping"]: r for r in rows(capsys, "fill", "--seeds=1", "--steps=64", "data.sources.embedded.samples=4000")
    }
    assert list(found) == ["pack", "isf", "none", "none, one shape"]
    assert found["pack"]["shapes"] == found["none, one shape"]["shapes"] == 1
    assert 3 <= found["none"]["shapes"] <= 8
    for module in ("llm", "vision", "audio"):
        fill = {name: r[f"fill_{module}"] for name, r in found.items()}
        assert fill["none, one shape"] < fill["none"] < fill["pack"] <= 1


def test_attention_reports_both_backends_against_dense(capsys):
    dense, blockwise = rows(capsys, "attention", "--tokens=512", "--repeats=1")
    assert dense["speedup"] == dense["memory_saving"] == 1
    assert blockwise["memory_saving"] > 1


def test_compile_reports_the_ratio_of_many_layers_to_few(capsys):
    few, many = rows(capsys, "compile", "--layers", "2", "6", "--repeats=1")
    assert many["ratio"] == pytest.approx(many["seconds"] / few["seconds"])


def test_a_table_is_printed_without_json(capsys):
    ended = run(capsys, bench.main, "attention", "--tokens=256", "--repeats=1")
    assert ended.out.splitlines()[0].split() == ["backend", "milliseconds", "temporary_mb", "speedup", "memory_saving"]
