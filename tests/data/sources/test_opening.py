"""Sources by name: the embedded one, and a user's own from the config file that the run folder keeps."""

from dataclasses import replace

import pytest
from made import config

from mmjax.config import EmbeddedSource, FunctionSource
from mmjax.data.sources.opening import open_sources
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.errors import UserError

KEPT = """
from made import random_texts


class Bare:
    def __len__(self):
        return 3


def make(split, count=4):
    source = random_texts([5] * count)
    source.split = split
    return source


def without_split(count=4):
    return random_texts([5] * count)


def bare(split):
    return Bare()
"""


def opened(tmp_path, split="train", **sources):
    (tmp_path / "config.py").write_text(KEPT)
    made = config()
    return open_sources(replace(made, data=replace(made.data, sources=sources)), split, tmp_path)


def test_sources_come_in_the_order_of_the_config_each_with_its_split(tmp_path):
    for split in ("train", "validation", "test"):
        got = opened(
            tmp_path,
            split,
            b=FunctionSource("config:make", {"count": 2}),
            a=EmbeddedSource(samples=10),
            c=FunctionSource("config:make"),
        )
        assert list(got) == ["b", "a", "c"]
        assert isinstance(got["a"], EmbeddedDataset)
        assert [len(got["b"]), len(got["c"])] == [2, 4]
        assert got["b"].split == got["c"].split == got["a"].split == split


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (FunctionSource("config:without_split"), "cannot be called with split"),
        (FunctionSource("config:make", {"size": 4}), "cannot be called with split, size"),
        (FunctionSource("config:bare"), "returned Bare, which has no fingerprint()"),
        (FunctionSource("config:gone"), "no function 'gone'"),
    ],
)
def test_a_function_that_makes_no_source_is_refused_by_name(source, message, tmp_path):
    with pytest.raises(UserError) as error:
        opened(tmp_path, mine=source)
    assert message in str(error.value)


def test_a_run_folder_without_its_config_is_said(tmp_path):
    made = config()
    with pytest.raises(UserError, match=r"config\.py"):
        open_sources(made, "train", tmp_path)
