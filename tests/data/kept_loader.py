"""A loader whose source comes from a run's kept config, as in a worker, and may be at fault."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from made import config, index_of

from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources

KEPT = """
import numpy as np
from made import Made, random_samples


class Faulty(Made):
    def __init__(self, samples, fault, index):
        super().__init__(samples)
        self.fault, self.index = fault, index

    def sample(self, index):
        if index == self.index and self.fault == "bug":
            error = KeyError("caption")
            error.cannot_be_pickled = lambda: None
            raise error
        if index == self.index and self.fault == "exit":
            raise SystemExit(0)
        if index == self.index and self.fault == "stop":
            raise StopIteration
        return super().sample(index)

    def item(self, index, number):
        array = super().item(index, number)
        if index == self.index and self.fault == "torn":
            raise OSError("image file is truncated")
        return array


def make(split, fault="", index=-1):
    return Faulty(random_samples(60, seed=0).samples, fault, index)
"""


def run_folder(folder: Path, **fault) -> StepLoader:
    """A loader whose source comes from the run folder's kept config, as in a worker."""
    (folder / "config.py").write_text(KEPT)
    made = config()
    source = made.data.sources["made"]
    source.arguments.update(fault)
    opened = open_sources(made, "train", folder)["made"]
    index = index_of(opened, made)
    index.save(folder / "index")
    planner, layout = make_planner(index, made, [1.0])
    return StepLoader(made, planner.grouper.budget, layout, folder / "index", folder)


def assert_same(a: LoadedStep, b: LoadedStep) -> None:
    timeless = [step._replace(plan_seconds=0, load_seconds=0) for step in (a, b)]
    assert jax.tree.structure(timeless[0]) == jax.tree.structure(timeless[1])
    for x, y in zip(*map(jax.tree.leaves, timeless), strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.asarray(x).dtype == np.asarray(y).dtype
