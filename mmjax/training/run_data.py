"""Open a run's data at a step: the length index, the step loader, and the history record of this start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version

from jax.sharding import Mesh

from mmjax.config import Config
from mmjax.config.loading import validate
from mmjax.console import print_lines
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.data_change import WHOLE_RUN, Held, Segment, carried, still_due, write_due
from mmjax.data.plan.length_index import LengthIndex, cached_index
from mmjax.data.plan.row_shapes import RankLayout
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import Source
from mmjax.data.sources.opening import files_of, look_again, notes_of, open_sources
from mmjax.data.sources.quarantine import BadSampleEntry, Quarantine
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.parallel.mesh import encoder_axes, local_ranks, owned_ranks
from mmjax.runtime.devices import mesh_topology
from mmjax.runtime.run_dir import AllowedChanges, RunFolder
from mmjax.training.run_history import Launch, launch_of_step


@dataclass(frozen=True)
class RunData:
    """The opened data of a run."""

    life: Launch
    loader: StepLoader
    index: LengthIndex
    quarantine: Quarantine
    sources: int

    def layout_of(self, config: Config, mesh: Mesh) -> RankLayout:
        """Return the row layout of another config on the same devices."""
        life = self.life
        if config == life.config:
            return life.layout
        topology = mesh_topology(mesh, config.mesh)
        return make_planner(self.index, config, life.weights, topology, segment=life.segment)[1]


def open_data(config: Config, folder: RunFolder, step: int, permitted: AllowedChanges, mesh: Mesh) -> RunData:
    """Open the data of a run from `step` on, by all processes together.

    Where the data, or its grouping into steps, has changed since the last start, a new segment begins, with the samples
    that epochs under way still owe. Raises UserError where such a change is not permitted.
    """
    sources = open_sources(config, "train", folder.path)
    # Process 0 builds the index once; the call below only opens it, on every process.
    coordination.run_on_leader(lambda: _index_sources(sources, config, folder))
    index, index_folder = cached_index(sources, config.model.encoders, folder.index)
    weights = [source.weight for source in config.data.sources.values()]
    data = Held(index, {name: files_of(source) for name, source in sources.items()})
    fingerprint = index.fingerprint()
    segment = WHOLE_RUN
    if step and (last := launch_of_step(folder.history, step, folder.due)) is not None:
        same = last.fingerprint == fingerprint and list(last.weights) == weights
        same = same and _grouping_settings(last.config) == _grouping_settings(config)
        if not same and not permitted.allows_other_samples():
            raise UserError(
                f"{folder.path} was trained on other data: its files have changed since; restore them, go on with what "
                "there is now by --new-data, or start another run from its parameters with init_from="
            )
        segment = last.segment if same else _next_segment(last, data, folder, step)
    planner, layout = make_planner(index, config, weights, mesh_topology(mesh, config.mesh), segment=segment)
    grouper = planner.grouper
    coordination.run_on_leader(lambda: folder.list_oversize(map(index.name, grouper.oversize), config.data.on_oversize))
    axes = encoder_axes(config.mesh)
    loader = StepLoader(
        config=config,
        budget=grouper.budget,
        layout=layout,
        index_folder=index_folder,
        config_folder=folder.path,
        ranks=local_ranks(mesh),
        leads=coordination.is_leader(),
        encoder_ranks=local_ranks(mesh, axes),
        own=(owned_ranks(mesh), owned_ranks(mesh, axes)),
        segment=segment,
    )
    # The number of steps per epoch is known only now that the planner is built.
    if epochs := config.training.epochs:
        # From here on the length of the run is fixed in steps, so that the learning rate schedule knows its end.
        steps = coordination.run_on_leader(lambda: max(1, loader.steps_for_epochs(epochs)))
        config = replace(config, training=replace(config.training, steps=steps, epochs=0.0))
        validate(config)
        loader = replace(loader, config=config)
    life = Launch(
        first=step,
        began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        version=version("mmjax"),
        processes=coordination.count(),
        devices=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        samples=len(index),
        index=index_folder.name,
        fingerprint=fingerprint,
        files=data.files,
        weights=weights,
        budget=grouper.budget,
        layout=layout,
        segment=segment,
        config=config,
    )
    return RunData(life, loader, index, _quarantine(index, folder, config), len(sources))


def loader_of(life: Launch, folder: RunFolder) -> StepLoader:
    """Make a loader of all rows of a past start's steps. Raises UserError where its index is missing."""
    index = folder.index / life.index
    if not index.is_dir():
        raise UserError(
            f"{index} is gone: the length index by which steps from {life.first} on were planned; restore it"
        )
    return StepLoader(
        config=life.config,
        budget=life.budget,
        layout=life.layout,
        index_folder=index,
        config_folder=folder.path,
        ranks=range(life.layout.topology.ranks),
        leads=False,
        segment=life.segment,
    )


def _index_sources(sources: Mapping[str, Source], config: Config, folder: RunFolder) -> str:
    """Check the sources for changes and index them, on process 0, before the others read the index."""
    look_again(sources)
    for note in notes_of(sources):
        print_lines(f"note   {note}")
    return str(cached_index(sources, config.model.encoders, folder.index)[1])


def _grouping_settings(config: Config) -> tuple[object, ...]:
    """Return the settings that decide which samples form a step, whatever the devices."""
    batch = config.batch
    return batch.size, dict(batch.rows), batch.microbatches, batch.grouping, batch.alignment, config.seed


def _next_segment(last: Launch, data: Held, folder: RunFolder, step: int) -> Segment:
    """Begin the segment after that of the last start at `step`; process 0 determines which samples are due."""

    def write() -> tuple[str, float]:
        grouper = loader_of(last, folder).planner.grouper
        due = carried(still_due(grouper, step), Held(grouper.index, last.files), grouper.pools, data)
        count = sum(map(len, due))
        print_lines(
            f"data   {len(data.index):,} samples from step {step} on; epochs under way still have {count:,} to come"
        )
        return write_due(folder.due, step, due).name, grouper.epochs_after(step - 1)

    name, epochs = coordination.run_on_leader(write)
    return Segment(step, folder.due / name, epochs)


def _quarantine(index: LengthIndex, folder: RunFolder, config: Config) -> Quarantine:
    """Quarantine the samples that cannot be used, listed by process 0. Raises UserError where they are fatal."""
    bad = [BadSampleEntry(index.name(int(k)), str(reason)) for k, reason in zip(index.bad, index.reason, strict=True)]
    quarantine = Quarantine(folder.quarantine, config.data, len(index), writes=coordination.is_leader())
    coordination.run_on_leader(lambda: len(quarantine.add(bad)))
    quarantine.add(bad)  # on the other processes; adding the same samples twice changes nothing
    if bad:
        print_lines(
            f"{len(bad)} of {len(index)} samples cannot be used; they are skipped, and listed in {folder.quarantine}"
        )
    return quarantine
