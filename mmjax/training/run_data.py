"""A run's data at a step: the length index, the loader and the life that begins there, with what was due before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version

from jax.sharding import Mesh

from mmjax.config import Config
from mmjax.config_files import validate
from mmjax.data.grouping import StepGrouper
from mmjax.data.index import LengthIndex, cached_index
from mmjax.data.layout import RankLayout
from mmjax.data.loader import StepLoader
from mmjax.data.plan import make_planner
from mmjax.data.quarantine import Bad, Quarantine
from mmjax.data.sample import Source
from mmjax.data.segments import WHOLE_RUN, Held, Segment, carried, still_due, write_due
from mmjax.data.sources import files_of, look_again, notes_of, open_sources
from mmjax.errors import UserError
from mmjax.parallel import processes
from mmjax.parallel.mesh import encoder_axes, held_ranks, own_ranks
from mmjax.training.console import say
from mmjax.training.devices import topology_of
from mmjax.training.run_folder import Permitted, RunFolder
from mmjax.training.run_history import Life, life_of


@dataclass(frozen=True)
class RunData:
    """The opened data of a run."""

    life: Life
    loader: StepLoader
    index: LengthIndex
    quarantine: Quarantine
    sources: int

    def layout_of(self, other: Config, mesh: Mesh) -> RankLayout:
        """Return the row layout of another config on the same devices."""
        life = self.life
        if other == life.config:
            return life.layout
        return make_planner(self.index, other, life.weights, topology_of(mesh, other.mesh), segment=life.segment)[1]


def open_data(config: Config, folder: RunFolder, step: int, permitted: Permitted, mesh: Mesh) -> RunData:
    """Open the data of a run from `step` on, by all processes together.

    Where it is other data than the run had before, or is grouped otherwise, a new segment begins with what is due.
    Raises UserError where that is not permitted.
    """
    sources = open_sources(config, "train", folder.path)
    processes.led(lambda: _look(sources, config, folder))
    index, index_folder = cached_index(sources, config.model.encoders, folder.index)
    weights = [source.weight for source in config.data.sources.values()]
    held = Held(index, {name: files_of(source) for name, source in sources.items()})
    fingerprint = index.fingerprint()
    before = life_of(folder.history, step, folder.due) if step else None
    segment = WHOLE_RUN
    if before is not None:
        same = (before.fingerprint, list(before.weights), _grouped(before.config)) == (
            fingerprint,
            weights,
            _grouped(config),
        )
        if not same and not permitted.allows_other_samples():
            raise UserError(
                f"{folder.path} was trained on other data: its files have changed since; restore them, go on with what "
                "there is now by --new-data, or start another run from its parameters with init_from="
            )
        segment = before.segment if same else _next_segment(before, held, folder, step)
    planner, layout = make_planner(index, config, weights, topology_of(mesh, config.mesh), segment=segment)
    grouper = planner.grouper
    processes.led(lambda: folder.list_oversize(map(index.name, grouper.oversize), config.data.on_oversize))
    axes = encoder_axes(config.mesh)
    loader = StepLoader(
        config,
        grouper.budget,
        layout,
        index_folder,
        folder.path,
        held_ranks(mesh),
        processes.leads(),
        held_ranks(mesh, axes),
        (own_ranks(mesh), own_ranks(mesh, axes)),
        segment,
    )
    if epochs := config.training.epochs:
        steps = processes.led(lambda: max(1, loader.steps_for_epochs(epochs)))
        config = replace(config, training=replace(config.training, steps=steps, epochs=0.0))
        validate(config)
        loader = replace(loader, config=config)
    life = Life(
        first=step,
        began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        version=version("mmjax"),
        processes=processes.count(),
        devices=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        samples=len(index),
        index=index_folder.name,
        fingerprint=fingerprint,
        files=held.files,
        weights=weights,
        budget=grouper.budget,
        layout=layout,
        segment=segment,
        config=config,
    )
    return RunData(life, loader, index, _quarantine(index, folder, config), len(sources))


def loader_of(life: Life, folder: RunFolder) -> StepLoader:
    """A loader of all rows of a life's steps, as they were. Raises UserError where its index is gone."""
    index = folder.index / life.index
    if not index.is_dir():
        raise UserError(
            f"{index} is gone: the length index by which steps from {life.first} on were planned; restore it"
        )
    return StepLoader(
        life.config,
        life.budget,
        life.layout,
        index,
        folder.path,
        range(life.layout.topology.ranks),
        leads=False,
        segment=life.segment,
    )


def _look(sources: Mapping[str, Source], config: Config, folder: RunFolder) -> str:
    look_again(sources)
    for note in notes_of(sources):
        say(f"note   {note}")
    return str(cached_index(sources, config.model.encoders, folder.index)[1])


def _grouped(config: Config) -> tuple[object, ...]:
    """Return the settings that decide which samples form a step, whatever the devices."""
    batch = config.batch
    return batch.size, dict(batch.rows), batch.microbatches, batch.grouping, batch.alignment, config.seed


def _next_segment(before: Life, now: Held, folder: RunFolder, step: int) -> Segment:
    """Begin the segment after `before` at `step`; process 0 determines what is due."""

    def find() -> tuple[str, float]:
        grouper = _grouper_of(before, folder)
        held = Held(grouper.index, before.files)
        due = carried(still_due(grouper, step), held, grouper.pools, now)
        owed = sum(map(len, due))
        say(f"data   {len(now.index):,} samples from step {step} on; epochs under way still have {owed:,} to come")
        return write_due(folder.due, step, due).name, grouper.epochs_after(step - 1)

    name, epochs = processes.led(find)
    return Segment(step, folder.due / name, epochs)


def _grouper_of(life: Life, folder: RunFolder) -> StepGrouper:
    return loader_of(life, folder).planner.grouper


def _quarantine(index: LengthIndex, folder: RunFolder, config: Config) -> Quarantine:
    """The samples that cannot be used, which process 0 writes down. Raises UserError where they are fatal."""
    bad = [Bad(index.name(int(k)), str(reason)) for k, reason in zip(index.bad, index.reason, strict=True)]
    quarantine = Quarantine(folder.quarantine, config.data, len(index), writes=processes.leads())
    processes.led(lambda: len(quarantine.add(bad)))
    quarantine.add(bad)  # by the other processes, for whom it is the same
    if bad:
        say(f"{len(bad)} of {len(index)} samples cannot be used; they are skipped, and listed in {folder.quarantine}")
    return quarantine
