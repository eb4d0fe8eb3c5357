"""Runs that are spoiled in their folder, their config and their checkpoints, and then read as commands do."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from commands import TINY
from mutations import Random, spoiled_record, spoiled_source, spoiled_words
from spoilable import CONFIG_TEXT, Fault, one_file, put_back, spoil_file

from mmjax.autotune.memory_plan import MemoryDecision, plan_key, read_memory_plan, write_memory_plan
from mmjax.config import Config, DataConfig, MeshConfig
from mmjax.config.loading import apply_overrides, describe, from_json, load, to_json
from mmjax.config.validation import check_layout
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.chat_source import BadSampleEntry, Quarantine
from mmjax.data.sources.opening import open_sources
from mmjax.disk import json_lines, read_json_lines
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.planning.memory import ModelSharding
from mmjax.planning.remat import MemoryLimit, RunPlan, StagePlan
from mmjax.runtime.checkpoint import CheckpointStore
from mmjax.runtime.checkpoint_commit import Retention
from mmjax.runtime.checkpoint_metadata import CheckpointMetadata, DataState, read_metadata
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.run_dir import RunFolder, changes_of
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import make_optimizer, parameter_shardings
from mmjax.training.metrics_log import MetricsLog


class Runs:
    """As `mutated_data.DataSets`: a method for each kind of mutation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def run_files(self) -> tuple[Config, Path]:
        config, folder = load(TINY), RunFolder(self.folder / "run")
        folder.path.mkdir()
        folder.write_config(config)
        stage = StagePlan(
            name="all",
            devices=(0,),
            mesh={},
            layers={"llm": range(2)},
            policies={"llm": ("none", "full")},
            parameters=0,
            in_flight=1,
            fixed={},
            activations={"llm": 0.0},
            largest_shape=0,
            recompute={},
            sharding=ModelSharding(),
        )
        decided = RunPlan((stage,), 1, MemoryLimit(1e9), 0.0, 0.0)
        write_memory_plan(folder.memory_plan, self._asked(config), decided)
        steps = [json.dumps({"step": k, "loss": 1.5, "time": 1.0 * k}) for k in range(1, 9)]
        folder.metrics.write_text("".join(line + "\n" for line in steps))
        folder.quarantine.write_text(
            json_lines({"sample": f"few[{k}]", "reason": "broken"} for k in range(3))
        )
        return config, folder.path

    def _asked(self, config: Config) -> dict[str, Any]:
        return plan_key(config, make_mesh(MeshConfig(), jax.devices()[:1]))

    def run(self, rng: Random, way: list[str]) -> int:
        config, path = self.run_files
        folder = RunFolder(path)
        with put_back(path):
            spoiled = (folder.config, folder.memory_plan, folder.metrics, folder.quarantine)[
                int(rng.integers(4))
            ]
            if spoiled.suffix == ".json" and rng.random() < 0.5:
                kind, content = spoiled_record(json.loads(spoiled.read_text()), rng)
                spoiled.write_bytes(content)
                way[0] = f"{kind} {spoiled.name}: {content[:100]!r}"
            else:
                way[0] = spoil_file(spoiled, rng)
            self._run_again(folder, config)
        return 0

    def _run_again(self, folder: RunFolder, config: Config) -> None:
        """What resuming and scoring read of a run's folder."""
        apply_overrides(folder.read_config(), [])
        changes_of(folder, config)
        if kept := read_memory_plan(folder.memory_plan, self._asked(config)):
            decided = MemoryDecision.of(kept)
            apply_overrides(
                config,
                [
                    f"model.llm.remat={','.join(decided.policies['llm'])}",
                    f"training.loss_chunks={decided.loss_chunks}",
                ],
            )
            if len(decided.policies["llm"]) != config.model.llm.layers:
                raise Fault(f"a fit of other layers: {decided}")
        log = MetricsLog(folder.metrics, 4)
        log.write(5, {"loss": 1.0})
        log.close()
        told = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        if told[-1]["step"] != 5 or any(record["step"] > 5 for record in told):
            raise Fault(f"the log has {told}")
        quarantine = Quarantine(folder.quarantine, DataConfig(max_bad_share=1.0), 100)
        quarantine.add([BadSampleEntry("few[1]", "broken"), BadSampleEntry("few[7]", "torn")])
        listed = [
            (str(bad.get("sample")), str(bad.get("reason")))
            for bad in read_json_lines(folder.quarantine)
        ]
        if not {("few[1]", "broken"), ("few[7]", "torn")} <= set(listed):
            raise Fault(f"the list has {listed}")

    # ----------------------------------------------------------------------------------------------
    # configs

    def config_file(self, text: str) -> Path:
        path = self.folder / "mine.py"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path

    def config(self, rng: Random, way: list[str]) -> int:
        kind, text = spoiled_source(CONFIG_TEXT, rng)
        way[0] = f"{kind}: {first_difference(CONFIG_TEXT, text)}"
        self._start(load(self.config_file(text)))
        return 0

    def words(self, rng: Random, way: list[str]) -> int:
        path = self.config_file(CONFIG_TEXT)
        words = spoiled_words(describe(load(path)).splitlines(), rng)
        way[0] = repr(words)[:300]
        self._start(load(path, words))
        return 0

    def _start(self, config: Config) -> None:
        """What a start does before it compiles."""
        if from_json(to_json(config)) != config:
            raise Fault("the config is another one when it was stored")
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        check_layout("mesh", replace(config.mesh, **mesh.shape), config.model)
        sources = open_sources(config, "train", self.folder)
        index = build_index(sources, config.model.encoders)
        make_planner(index, config, [source.weight for source in config.data.sources.values()])
        model = Model.build(config.model, jnp.dtype(config.training.precision))
        make_optimizer(config.optimizer, model.axes)
        parameter_shardings(model, mesh, ShardingRules.of(config.mesh))

    # ----------------------------------------------------------------------------------------------
    # checkpoints

    @cached_property
    def saved(self) -> tuple[Path, Model, Any, Any, CheckpointMetadata]:
        config = load(TINY)
        mesh, rules = make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
        model = Model.build(config.model, jnp.float32)
        executor = Executor.on_mesh(
            model, make_optimizer(config.optimizer, model.axes), mesh, rules, sources=1
        )
        rng, folder = np.random.default_rng(0), self.folder / "checkpoints"
        host = jax.tree.map(
            lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), executor.states[0].abstract
        )
        state = State((jax.device_put(host, executor.states[0].shardings),))
        checkpoints = CheckpointStore(folder, executor, Retention(2))
        for step in (2, 4):
            checkpoints.save(state, to_json(config), DataState(step, "an index", {"rows": [1]}))
        checkpoints.wait()
        shardings = parameter_shardings(model, mesh, rules)
        params = jax.device_get(restore_parameters(folder, 4, model, shardings))
        return folder, model, shardings, params, read_metadata(folder, 4)

    def checkpoint(self, rng: Random, way: list[str]) -> int:
        folder, model, shardings, params, said = self.saved
        with put_back(folder):
            path = one_file(folder / "4", rng)
            way[0] = f"{path.relative_to(folder).parent}/{spoil_file(path, rng)}"
            if read_metadata(folder, 4) != said:
                raise Fault("what it says of itself is something else")
            restored = jax.device_get(restore_parameters(folder, 4, model, shardings))
            if not all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(params))):
                raise Fault("the parameters are others")
        return 0


def first_difference(a: str, b: str) -> str:
    """Where two texts begin to differ."""
    at = next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return f"{a[max(0, at - 20) : at + 20]!r} -> {b[max(0, at - 20) : at + 20]!r}"
