"""The interface of executors that training, checkpoints and evaluation use: one program, or a pipeline of stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import Microbatch
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules
from mmjax.runtime.state import Hyperparameters, Optimizer, TrainState
from mmjax.runtime.step import ProcessReport, StepReport


class Runner(Protocol):
    """Runs the steps of a model. States, gradient sums and batches on devices are its own types."""

    model: Model
    optimizer: Optimizer
    mesh: Mesh  # of all devices
    rules: ShardingRules
    frozen: frozenset[str]
    synchronous: bool  # whether `step` returns when it is done

    @property
    def modules(self) -> tuple[str, ...]: ...

    def init(self, key: jax.Array, pretrained: Params | None = None) -> Any: ...

    def init_from(self, params: Params) -> Any: ...

    def random_adapters(self, key: jax.Array) -> Params: ...

    def zeros(self) -> Any: ...

    def put(self, batch: Microbatch) -> Any: ...

    def put_report(self, report: ProcessReport) -> ProcessReport: ...

    def step(
        self,
        state: Any,
        accumulated: Any,
        batches: Sequence[Any],
        hyper: Hyperparameters,
        process_report: ProcessReport | None = None,
        noise: np.ndarray | None = None,
    ) -> tuple[Any, Any, StepReport]: ...

    def compile(self, state: Any, accumulated: Any, batches: Sequence[Microbatch], hyper: Hyperparameters) -> None: ...

    def weigh_batches(
        self, batches: Sequence[Any], reports: ProcessReport
    ) -> tuple[jax.Array, list[Any], tuple[jax.Array, jax.Array]]: ...

    def owners(self, batch: Any) -> np.ndarray: ...

    def is_finite(
        self, state: Any, batch: Any, rows: np.ndarray, weight: jax.Array, noise: np.ndarray | None
    ) -> bool: ...

    def parts(self, state: Any) -> tuple[TrainState, ...]: ...

    def from_parts(self, parts: Sequence[TrainState]) -> Any: ...

    @property
    def abstract_parts(self) -> tuple[TrainState, ...]: ...

    @property
    def parameter_shardings(self) -> Params: ...

    def parameters(self, state: Any) -> Params: ...
