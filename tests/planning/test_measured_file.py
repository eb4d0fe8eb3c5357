"""What a user measured on his cluster takes the place of what is assumed, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.loading import default_config, load
from mmjax.errors import UserError
from mmjax.planning.exchange_time import collective_seconds
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.measured_file import Probed, probed_text, read_measured, read_probed

CONFIG = load(default_config(), ())
CLUSTER = parse_cluster("h100x2x8")
POLICIES = {
    "forward": 1.0,
    "none": 3.0,
    "products": 3.5,
    "attention_mlp": 3.6,
    "attention": 3.8,
    "full": 4.0,
}


def write(folder: Path, contents: Any) -> Path:
    path = folder / "rates.json"
    path.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


def test_stated_rates_replace_the_assumed_ones_and_the_rest_stays(tmp_path):
    cluster, layers = read_measured(
        write(tmp_path, {"products": 0.5, "launch": 0, "link": 3e11}), CLUSTER, CONFIG
    )
    assumed, rates = (c.device.rates("bfloat16") for c in (CLUSTER, cluster))
    assert rates == assumed._replace(flops=0.5 * 989.4e12, launch=0.0)
    assert layers == {}
    assert collective_seconds(8e9, 8, 1, cluster) == pytest.approx(7e9 / 3e11)
    between = collective_seconds(8e9, 2, 8, cluster)
    assert between == collective_seconds(8e9, 2, 8, CLUSTER)
    cluster, _ = read_measured(
        write(tmp_path, {"attention": 0.3, "memory": 2e12, "host": 4e10, "network": 4e10}),
        CLUSTER,
        CONFIG,
    )
    assert cluster.device.rates("bfloat16") == assumed._replace(
        attention=0.3 * 989.4e12, memory=2e12, host=4e10
    )
    assert collective_seconds(8e9, 2, 8, cluster) == pytest.approx(between)  # 80% of 50 GB/s


def test_stated_layer_times_are_those_of_the_rows_and_lengths_in_the_file(tmp_path):
    stated = {
        "llm": {
            "rows": 2,
            "seconds": {"128": POLICIES, "256": {k: 2 * s for k, s in POLICIES.items()}},
        }
    }
    path = write(tmp_path, {"layers": stated})
    _, layers = read_measured(path, CLUSTER, CONFIG)
    assert (layers["llm"].rows, layers["llm"].source) == (2, f"({path})")
    assert layers["llm"].interpolate(192)["full"] == pytest.approx(6.0)
    with pytest.raises(UserError, match=r"layers.llm.seconds.128: 'offload' is missing"):
        read_measured(path, CLUSTER, replace(CONFIG, mesh=replace(CONFIG.mesh, host_memory=8)))


def test_what_a_run_stores_is_read_by_plans_for_its_device_and_by_the_run_on_such_devices(tmp_path):
    path, probed = tmp_path / "rates.json", Probed(position=1.1, pair=0.9)
    # of no peak
    path.write_text(
        probed_text("NVIDIA H100 80GB HBM3", probed, {"products": 0.61, "attention": 1.2})
    )
    cluster, _ = read_measured(path, CLUSTER, CONFIG)
    assumed = CLUSTER.device.rates("bfloat16")
    assert cluster.device.rates("bfloat16") == assumed._replace(flops=0.61 * 989.4e12)
    assert read_probed(path, "NVIDIA H100 80GB HBM3") == probed
    assert read_probed(path, "NVIDIA H200") is None
    with pytest.raises(
        UserError, match="measured on NVIDIA H100 80GB HBM3, and the plan is for h200;"
    ):
        read_measured(path, parse_cluster("h200x8"), CONFIG)
    tree = json.loads(path.read_text())
    for damaged in (
        "{",
        "[]",
        "7",
        json.dumps(tree | {"probed": {"position": 0, "pair": 1.0}}),
        json.dumps({}),
    ):
        write(tmp_path, damaged)
        assert read_probed(path, "NVIDIA H100 80GB HBM3") is None
    assert read_probed(tmp_path / "missing.json", "cpu") is None


def layer(rows: Any = 1, length: str = "64", **changes: Any) -> dict[str, Any]:
    return {"layers": {"llm": {"rows": rows, "seconds": {length: POLICIES | changes}}}}


@pytest.mark.parametrize(
    ("contents", "cluster", "message"),
    [
        ("{", "h100x8", "no readable JSON"),
        ([0.5], "h100x8", "not a JSON object"),
        ({"prodcts": 0.5}, "h100x8", "unknown key 'prodcts'"),
        ({"products": "0.5"}, "h100x8", "products: got a str, '0.5'; expected a finite float"),
        ({"products": True}, "h100x8", "products: got a bool, True"),
        ({"products": 65}, "h100x8", "products: got 65; give a share"),
        ({"attention": 0}, "h100x8", "attention: got 0; give a share"),
        ({"attention": 0.3}, "v5px8", "attention: there is no attention kernel on v5p"),
        ({"launch": -1e-6}, "h100x8", "launch: got -1e-06; give seconds, 0 or more"),
        ('{"link": NaN}', "h100x8", "link: got a float, nan; expected a finite float"),
        ('{"network": 1e999}', "h100x8", "network: got a float, inf"),
        ({"link": 0}, "h100x8", "link: got 0; give bytes/s, above 0"),
        ({"device": 7}, "h100x8", "device: got a int, 7; expected str"),
        ({"probed": {"pair": 1.0}}, "h100x8", "missing key 'probed.position'"),
        ({"layers": {"ears": {}}}, "h100x8", "missing key 'layers.ears.rows'"),
        (
            {"layers": {"ears": layer()["layers"]["llm"]}},
            "h100x8",
            "layers.ears: the model has no such tower, only llm",
        ),
        (layer(rows=0), "h100x8", "layers.llm: give at least 1 row"),
        (layer(rows=1.5), "h100x8", "layers.llm.rows: got a float, 1.5; expected int"),
        (layer(length="-8"), "h100x8", "layers.llm.seconds.-8: '-8' is no row length"),
        (
            layer(all=1.0),
            "h100x8",
            "layers.llm.seconds.64: unknown key 'all'; known are forward, none",
        ),
        (layer(full=-1.0), "h100x8", "layers.llm.seconds.64.full: got -1; give seconds, above 0"),
        (
            {"layers": {"llm": {"rows": 1, "seconds": {"64": {"none": 1.0}}}}},
            "h100x8",
            "'forward' is missing",
        ),
    ],
)
def test_what_cannot_be_a_rate_is_named_with_the_file_the_key_and_the_known_ones(
    tmp_path, contents, cluster, message
):
    path = write(tmp_path, contents)
    with pytest.raises(UserError) as refused:
        read_measured(path, parse_cluster(cluster), CONFIG)
    text = str(refused.value)
    assert text.startswith(f"--measured {path}: ")
    assert message in text
    assert "\n" not in text
    assert (
        "products, attention, launch, memory, host, link, network, layers" in text
        or contents == "{"
    )
