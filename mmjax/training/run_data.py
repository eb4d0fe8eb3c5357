"""Open a run's data at a step, and keep the history of its launches."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh

from mmjax import __version__
from mmjax.autotune.cuts import cut_units
from mmjax.autotune.memory_plan import memory_limit
from mmjax.config import Config, DataConfig, MeshConfig, Unit
from mmjax.config.loading import copy_config, from_json, to_json, validate
from mmjax.console import print_lines
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.data_change import (
    WHOLE_RUN,
    IndexedFiles,
    Segment,
    still_due,
    translate_due,
    write_due,
)
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.length_index import LengthIndex, cached_index
from mmjax.data.plan.placement import Shape, Topology
from mmjax.data.plan.sampler import mixture_weights
from mmjax.data.plan.step_plan import RankLayout, make_planner
from mmjax.data.sample import Files, Source
from mmjax.data.sources.chat_source import BadSampleEntry, Quarantine
from mmjax.data.sources.opening import (
    check_records,
    contents_of,
    files_of,
    look_again,
    notes_of,
    open_sources,
    records_of,
)
from mmjax.disk import (
    append_json_lines,
    json_lines,
    read_json_lines,
    verify_checksum,
    with_checksum,
)
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.parallel.sharding import encoder_axes, local_ranks, make_mesh, owned_ranks
from mmjax.runtime.devices import choose_devices, device_description, mesh_topology
from mmjax.runtime.latents import latent_folders, vae_generators
from mmjax.runtime.run_dir import NO_CHANGES, AllowedChanges, RunFolder
from mmjax.runtime.units import unit_ranks, units_topology


@dataclass(frozen=True)
class Launch:
    """One start of a run. index: name of the length index's folder, inside the run's `index` folder."""

    first: int  # its first step
    began: str  # date and time
    version: str  # of mmjax
    processes: int
    devices: str
    samples: int
    index: str
    fingerprint: str  # of the index
    files: Mapping[str, Files]  # of every source
    weights: Sequence[float]  # of the sources
    budget: Budget
    layout: RankLayout
    segment: Segment
    config: Config
    # hash of what each source's conversations say
    contents: Mapping[str, str] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Return this start as an object of `history.jsonl`, with its checksum."""
        plain = asdict(replace(self, config=None, segment=None))
        segment = asdict(self.segment) | {"due": self.segment.due and self.segment.due.name}
        return with_checksum(
            plain | {"segment": segment, "config": json.loads(to_json(self.config))}
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], folder: Path) -> Self:
        """Restore a start from its verified record; its file of due samples is in `folder`.

        Raises ValueError, KeyError, TypeError or UserError where the record is of another version.
        """
        layout = record["layout"]
        shapes = tuple(Shape(tuple(lengths), tuple(widths)) for lengths, widths in layout["shapes"])
        due = record["segment"]["due"]
        budget = {
            key: tuple(x) if isinstance(x, list) else x for key, x in record["budget"].items()
        }
        fields = {
            "layout": RankLayout(Topology(**layout["topology"]), tuple(layout["rows"]), shapes),
            "segment": Segment(**record["segment"] | {"due": folder / due if due else None}),
            "budget": Budget(**budget),
            "files": {
                name: [(file, n) for file, n in files] for name, files in record["files"].items()
            },
            "config": from_json(json.dumps(record["config"])),
        }
        return cls(**{**record, **fields})


# The end of a complete line. A line without it was cut off by a kill, before any step was run.
_COMPLETE = re.compile(r'"sum": "[0-9a-f]{16}"}$')


def launch_of_step(path: Path, step: int, due: Path) -> Launch | None:
    """Return the start that ran step `step`, or will if it is the next; None where no line of `path` has one.

    due: the folder of due samples. Raises UserError where a line is damaged, or is of another
    version of mmjax.
    """
    match = None
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not _COMPLETE.search(line):
            continue
        try:
            record = verify_checksum(json.loads(line))
        except ValueError:
            raise UserError(
                f"{path}:{number}: is not what was written; restore that file"
            ) from None
        # Later lines win: a resumed run may repeat steps that an earlier start had run.
        if record["first"] <= step:
            match = number, record
    if match is None:
        return None
    number, record = match
    try:
        return Launch.from_record(record, due)
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(
            f"{path}:{number}: cannot be read by this version of mmjax ({error}); use the one that wrote it"
        ) from None


def read_launches(path: Path) -> list[dict[str, Any]]:
    """Read every start as plain JSON, to show to a person."""
    return [launch for launch in read_json_lines(path) if "first" in launch]


def append_launch(path: Path, launch: Launch) -> None:
    """Append a start to the history."""
    append_json_lines(path, [launch.to_record()])


@dataclass(frozen=True)
class RunData:
    """The opened data of a run."""

    launch: Launch
    loader: StepLoader
    index: LengthIndex
    quarantine: Quarantine
    sources: int  # number of data sources

    def layout_of(self, config: Config, mesh: Mesh) -> RankLayout:
        """Return the row layout of another config on the same devices."""
        launch = self.launch
        if config == launch.config:
            return launch.layout
        topology = topology_of(config, mesh)
        return make_planner(self.index, config, launch.weights, topology, segment=launch.segment)[1]


def topology_of(config: Config, mesh: Mesh) -> Topology:
    """Return the ranks that rows are planned for."""
    return units_topology(config.units) if config.units else mesh_topology(mesh, config.mesh)


def _ranks_of_process(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Return the ranks whose rows a StepLoader of this process loads, and those that count here."""
    # A process may have stages of some modules alone: its ranks differ by module.
    if config.units:
        return unit_ranks(config, list(mesh.devices.flat))._asdict()
    axes = encoder_axes(config.mesh)
    return {
        "ranks": local_ranks(mesh),
        "encoder_ranks": local_ranks(mesh, axes),
        "own": (owned_ranks(mesh), owned_ranks(mesh, axes)),
    }


def _cut_units(
    config: Config, layout: RankLayout, mesh: Mesh, resumed: Mapping[str, Unit]
) -> Config:
    """Return the config with cuts of all its units, the same in every process. resumed: units of the last start."""

    def cut() -> list[Any]:
        device = mesh.devices.flat[0]
        cut = cut_units(
            config, layout, device_description(device), memory_limit(config.mesh, device), resumed
        )
        return [{name: unit.cuts for name, unit in cut.units.items()}, cut.pipeline.stage_times]

    cuts, stage_times = coordination.run_on_leader(cut)
    units = {name: replace(unit, cuts=tuple(cuts[name])) for name, unit in config.units.items()}
    config = replace(
        config, units=units, pipeline=replace(config.pipeline, stage_times=tuple(stage_times))
    )
    validate(config)  # an encoder that was whole may be cut now
    return config


def open_data(
    config: Config, folder: RunFolder, step: int, permitted: AllowedChanges, mesh: Mesh
) -> RunData:
    """Open the data of a run from `step` on, by all processes together.

    Where the data, or its grouping into steps, has changed since the last start, a new segment
    begins, with the samples that epochs under way still owe. Raises UserError where such a change
    is not permitted.
    """
    sources = open_sources(config, "train", folder.path)
    # Process 0 builds the index once; the call below only opens it, on every process.
    coordination.run_on_leader(lambda: _index_sources(sources, config, folder))
    records = coordination.run_on_leader(lambda: records_of(sources))
    check_records(sources, records)
    index, index_folder = cached_index(
        sources, config.model.item_modules, folder.index, config.model.llm
    )
    weights = mixture_weights(config.data, index)
    data = IndexedFiles(index, {name: files_of(source) for name, source in sources.items()})
    fingerprint = index.fingerprint()
    contents = contents_of(sources)
    segment = WHOLE_RUN
    budget = make_budget(index, config, weights)
    last = None
    if step and (last := launch_of_step(folder.history, step, folder.due_samples)) is not None:
        same = last.fingerprint == fingerprint and list(last.weights) == weights
        same = same and _grouping_settings(last.config) == _grouping_settings(config)
        same = same and last.contents in ({}, contents)
        if not same and not permitted.allows_other_samples():
            raise UserError(
                f"{folder.path} was trained on other data: its files have changed since; restore them, go on with what "
                "there is now by --new-data, or start another run from its parameters with init_from="
            )
        segment = last.segment if same else _next_segment(last, data, folder, step)
        # Rows are filled as the run began, whatever is assumed of devices by now.
        budget = replace(budget, **last.budget.of_start())
    planner, layout = make_planner(
        index, config, weights, topology_of(config, mesh), budget, segment=segment
    )
    grouper = planner.grouper
    if config.units:
        config = _cut_units(config, layout, mesh, last.config.units if last else {})
    coordination.run_on_leader(lambda: _list_oversize(index, grouper.oversize, config.data, folder))
    loader = StepLoader(
        config=config,
        budget=grouper.budget,
        layout=layout,
        index_folder=index_folder,
        config_folder=folder.path,
        leads=coordination.is_leader(),
        segment=segment,
        latents=latent_folders(config, sources, index),
        records=records,
        **_ranks_of_process(config, mesh),
    )
    loader.check_latents()
    # The number of steps per epoch is known only now that the planner is built.
    if epochs := config.training.epochs:
        # From here on the length of the run is fixed in steps, so that the learning rate schedule
        # knows its end.
        steps = coordination.run_on_leader(lambda: max(1, loader.steps_for_epochs(epochs)))
        config = replace(config, training=replace(config.training, steps=steps, epochs=0.0))
        validate(config)
        loader = replace(loader, config=config)
    launch = Launch(
        first=step,
        began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        version=__version__,
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
        contents=contents,
    )
    return RunData(
        launch=launch,
        loader=loader,
        index=index,
        quarantine=_quarantine(index, folder, config),
        sources=len(sources),
    )


def open_first_data(config: Config, source: Path, path: Path) -> RunData:
    """Open the data with which a run would begin on one CPU device.

    source: the config's file. path: an empty folder, as of a run.
    """
    config = replace(config, units={}, mesh=MeshConfig(), device="cpu")
    copy_config(source, path)  # where a FunctionSource looks its function up
    mesh = make_mesh(config.mesh, choose_devices(config.device)[:1])
    return open_data(config, RunFolder(path), 0, NO_CHANGES, mesh)


def loader_of(launch: Launch, folder: RunFolder) -> StepLoader:
    """Make a loader of all rows of a past start's steps. Raises UserError where its index is missing."""
    index = folder.index / launch.index
    if not index.is_dir():
        raise UserError(
            f"{index} is gone: the length index by which steps from {launch.first} on were planned; restore it"
        )
    loader = StepLoader(
        config=launch.config,
        budget=launch.budget,
        layout=launch.layout,
        index_folder=index,
        config_folder=folder.path,
        ranks=range(launch.layout.topology.ranks),
        leads=False,
        segment=launch.segment,
    )
    if not vae_generators(launch.config.model):
        return loader
    return replace(loader, latents=latent_folders(launch.config, loader.sources, loader.index))


def _index_sources(sources: Mapping[str, Source], config: Config, folder: RunFolder) -> str:
    """Check the sources for changes and index them, on process 0, before the others read the index."""
    look_again(sources)
    for note in notes_of(sources):
        print_lines(f"note   {note}")
    return str(cached_index(sources, config.model.item_modules, folder.index, config.model.llm)[1])


def _grouping_settings(config: Config) -> tuple[object, ...]:
    """Return the settings that decide which samples form a step, whatever the devices."""
    batch = config.batch
    size = batch.size, config.data.max_tokens
    return *size, dict(batch.rows), batch.microbatches, batch.grouping, batch.alignment, config.seed


MAX_NAMED = 5  # samples in an error


def _list_oversize(
    index: LengthIndex, oversize: np.ndarray, data: DataConfig, folder: RunFolder
) -> None:
    """List the samples that no step takes, because of `data.max_tokens` or since they fit no budget.

    Raises UserError for the latter where they are fatal; it removes the folder of a new run, so it
    names samples.
    """
    entries = []
    fatal = []
    for name, tokens in zip(
        map(index.name, oversize), index.llm_tokens[oversize].tolist(), strict=True
    ):
        capped = data.max_tokens is not None and tokens > data.max_tokens
        reason = f"{tokens:,} LLM tokens, " + (
            f"beyond data.max_tokens={data.max_tokens}" if capped else "fits no budget"
        )
        entries.append({"sample": name, "reason": reason})
        fatal += [] if capped else [f"{name}: {reason}"]
    folder.oversize.write_text(json_lines(entries))
    if fatal and data.on_oversize == "raise":
        unnamed = f" and {len(fatal) - MAX_NAMED} more" if len(fatal) > MAX_NAMED else ""
        raise UserError(
            f"{len(fatal)} samples fit no budget (data.on_oversize=raise): {'; '.join(fatal[:MAX_NAMED])}{unnamed}. "
            "Raise batch.size, lower batch.rows, or skip them with data.on_oversize=skip"
        )


def _next_segment(last: Launch, data: IndexedFiles, folder: RunFolder, step: int) -> Segment:
    """Begin the segment after that of the last start at `step`; process 0 determines which samples are due."""

    def write() -> tuple[str, float]:
        grouper = loader_of(last, folder).planner.grouper
        due = translate_due(
            still_due(grouper, step), IndexedFiles(grouper.index, last.files), grouper.pools, data
        )
        count = sum(map(len, due))
        print_lines(
            f"data   {len(data.index):,} samples from step {step} on; epochs under way still have {count:,} to come"
        )
        return write_due(folder.due_samples, step, due).name, grouper.epochs_after(step - 1)

    name, epochs = coordination.run_on_leader(write)
    return Segment(step, folder.due_samples / name, epochs)


def _quarantine(index: LengthIndex, folder: RunFolder, config: Config) -> Quarantine:
    """Quarantine the samples that cannot be used, listed by process 0. Raises UserError where they are fatal."""
    bad = [
        BadSampleEntry(index.name(int(k)), str(reason))
        for k, reason in zip(index.bad, index.reason, strict=True)
    ]
    quarantine = Quarantine(
        folder.quarantine, config.data, len(index), writes=coordination.is_leader()
    )
    coordination.run_on_leader(lambda: len(quarantine.add(bad, starting=True)))
    # on the other processes; adding the same samples twice changes nothing
    quarantine.add(bad, starting=True)
    if bad:
        print_lines(
            f"{len(bad)} of {len(index)} samples cannot be used; they are skipped, and listed in {folder.quarantine}"
        )
    return quarantine
