"""Load the packed rows of a step from its number."""

from __future__ import annotations

import hashlib
import pickle
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmjax.batch import Microbatch
from mmjax.config import Config, NoBalance
from mmjax.config.model import encoded_once, frozen_modules, tower_key
from mmjax.cost import table
from mmjax.data.loading.batch_hash import (
    EncoderRanks,
    Own,
    add_hashes,
    batch_hash,
    ranks_of_encoder,
)
from mmjax.data.loading.context import spread_over_context
from mmjax.data.loading.feature_lookup import FeatureLookup, MissingItem
from mmjax.data.loading.packing import Reader, pack_microbatch
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.budget import PLANNER, Budget
from mmjax.data.plan.data_change import WHOLE_RUN, Segment
from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.plan.sampler import mixture_weights
from mmjax.data.plan.step_plan import RankLayout, StepPlan, StepPlanner, make_step_planner
from mmjax.data.sample import Sample, SampleLengths, Source, with_place
from mmjax.data.sources.opening import check_records, open_sources
from mmjax.data.storage.feature_store import FeatureLayout, FeatureReader
from mmjax.data.storage.latent_store import StoredLatents
from mmjax.disk import read_sealed, write_sealed
from mmjax.planning.flops import model_flops, needed_by_tower, step_needed
from mmjax.planning.item_encoding import encoding_flops
from mmjax.planning.work import Work

COSTS = "_packed_costs"  # in a pickled loader


class LoadedStep(NamedTuple):
    """One step's microbatches, and the plan's work of every rank, whichever process loads its rows."""

    microbatches: tuple[Microbatch, ...]  # this process's rows
    step: np.ndarray  # int64 []
    digest: np.ndarray  # int64 []: hash of the step plan
    content: np.ndarray  # uint64 []: of the rows that count here, as `batch_hash`
    samples: np.ndarray  # int64 [n]
    # reasons why samples of this process's rows could not be read, by id
    unreadable: dict[int, str]
    epoch: np.ndarray  # float64 []: epochs that are done after this step
    source_epochs: np.ndarray  # float64 [sources]: the same of each source
    plan_seconds: np.ndarray  # float64 []
    load_seconds: np.ndarray  # float64 []: opening, decoding and packing
    needed_flops: np.ndarray  # float64 []: forward and backward of this process's ranks, no padding
    tokens: np.ndarray  # int64 [modules]: LLM tokens of the whole step by modality, text first
    # By microbatch, their first axis:
    # int64 [microbatches, modules, rows]: positions of every row that hold something
    useful: np.ndarray
    lengths: np.ndarray  # int64 [microbatches, modules]: of the rows
    # int64 [microbatches, encoders]: tokens that a rank can send to each of its peers
    widths: np.ndarray
    # int64 [microbatches, encoders]: tokens encoded on another rank than their sample's
    moved: np.ndarray
    # int64 [microbatches, modules, encoder ranks]: as MicrobatchPlan.work, alignment included
    balanced: np.ndarray
    unbalanced: np.ndarray  # int64 [microbatches, modules, encoder ranks]: with balance `none`
    pairs: np.ndarray  # int64 [microbatches, modules, encoder ranks]: of attention
    # int64 [microbatches, modules, encoder ranks]: with balance `none`
    unbalanced_pairs: np.ndarray
    # items of encoders that encode once whose outputs are not stored, and are not in the rows yet
    missing: tuple[MissingItem, ...] = ()
    # by encoder: how many items were encoded for this step, by this process
    encoded: Mapping[str, int] = {}


@dataclass(frozen=True)
class StepLoader:
    """Loads step n: small enough to pickle (the config and two paths), everything else is opened in the worker."""

    config: Config
    budget: Budget
    layout: RankLayout
    index_folder: Path
    config_folder: Path  # where a FunctionSource's code is
    ranks: range = range(1)  # whose rows are loaded here
    leads: bool = True  # whether this process writes down what is found out about chunks
    # whose rows of items are loaded here; None = those of the ranks
    encoder_ranks: EncoderRanks | None = None
    # ranks and encoder ranks that no process before this one holds; None = all
    own: Own | None = None
    # the last two by microbatch in turn, where encoders have copies
    copies: Sequence[tuple[EncoderRanks, Own]] = ()
    segment: Segment = WHOLE_RUN
    # Of images to be made, stored for sources and generators by their names.
    latents: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    # Of encoders that encode once, where their outputs are stored, and what these are.
    features: Mapping[str, tuple[Path, FeatureLayout]] = field(default_factory=dict)
    # hashes of the sources' records; empty: not checked
    records: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, step: int) -> LoadedStep:
        begin = time.perf_counter()
        plan = self.plan(int(step))
        planned = time.perf_counter()
        unreadable: dict[int, str] = {}
        reader = (
            replace(self.reader, item=partial(self._item, int(step)))
            if self.latents
            else self.reader
        )
        stored = [
            FeatureLookup(self.config.model.encoders, self.feature_readers, n)
            for n in range(len(plan.microbatches))
        ]
        batches = tuple(
            pack_microbatch(
                m, self.batch_layout, reader, self.ranks, self._held(n)[0], unreadable, stored[n]
            )
            for n, m in enumerate(plan.microbatches)
        )
        useful, moved = zip(*map(self._useful_and_moved, plan.microbatches), strict=True)
        return LoadedStep(
            microbatches=tuple(
                spread_over_context(b, m, self.batch_layout)
                for b, m in zip(batches, plan.microbatches, strict=True)
            ),
            step=np.int64(step),
            digest=np.int64(plan.digest()),
            content=np.uint64(self._content(batches)),
            samples=plan.samples(),
            unreadable=unreadable,
            epoch=np.float64(self.planner.grouper.epochs_after(int(step))),
            source_epochs=self.planner.grouper.source_epochs_after(int(step)),
            plan_seconds=np.float64(planned - begin),
            load_seconds=np.float64(time.perf_counter() - planned),
            needed_flops=np.float64(
                sum(self._needed_flops(n, batch) for n, batch in enumerate(batches))
                + sum(self._encoding_flops(lookup.missing) for lookup in stored)
            ),
            tokens=sum(self._tokens(m) for m in plan.microbatches),
            useful=np.stack(useful),
            lengths=np.array([m.shape.lengths for m in plan.microbatches], np.int64),
            widths=np.array([m.shape.widths for m in plan.microbatches], np.int64),
            moved=np.stack(moved),
            balanced=np.stack([m.work() for m in plan.microbatches]),
            unbalanced=np.stack([m.unbalanced for m in plan.microbatches]),
            pairs=np.stack([m.per_rank(m.pairs, m.row) for m in plan.microbatches]),
            unbalanced_pairs=np.stack(
                [m.per_rank(m.pairs, m.unbalanced_row) for m in plan.microbatches]
            ),
            missing=tuple(item for lookup in stored for item in lookup.missing),
        )

    @cached_property
    def sources(self) -> dict[str, Source]:
        sources = open_sources(self.config, "train", self.config_folder)
        if self.records:  # a worker that starts late opens the files late
            check_records(sources, self.records)
        return sources

    @cached_property
    def index(self) -> LengthIndex:
        return LengthIndex.open(self.index_folder)

    @cached_property
    def planner(self) -> StepPlanner:
        weights = mixture_weights(self.config.data, self.index)
        grouper = StepGrouper(
            index=self.index,
            batch=self.config.batch,
            weights=weights,
            seed=self.config.seed,
            budget=self.budget,
            first_steps=self._known_chunks(),
            first=self.segment.first,
            due=self.segment.read_due(),
            epochs_before=self.segment.epochs,
        )
        return make_step_planner(grouper, self.config, self.layout)

    def _known_chunks(self) -> list[int]:
        known = read_sealed(self._chunks)
        return known["first_steps"] if known else [0]

    @property
    def _chunks(self) -> Path:
        """Return the file of known chunk starts, with which a late step is planned without replaying early ones."""
        weights = mixture_weights(self.config.data, self.index)
        # which does not change what a step has
        grouped = replace(self.config.batch, balance=NoBalance())
        due = (self.segment.due.name,) if self.segment.due else ()
        key = repr((PLANNER, grouped, weights, self.config.seed, self.budget, *due))
        return self.index_folder / f"chunks-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    @cached_property
    def batch_layout(self) -> BatchLayout:
        return BatchLayout.of_config(self.config)

    @cached_property
    def reader(self) -> Reader:
        return reader_of(self.sources, self.index)

    @cached_property
    def feature_readers(self) -> dict[str, FeatureReader]:
        return {name: FeatureReader(*where) for name, where in self.features.items()}

    @cached_property
    def stored_latents(self) -> dict[tuple[str, str], StoredLatents]:
        """Open the latents. Raises UserError where some are missing."""
        samples = dict(zip(self.sources, np.diff(self.index.source_start).tolist(), strict=True))
        return {
            (source, generator): StoredLatents(
                folder,
                samples[source],
                f"{tower_key(self.config.model, generator)}: the latents of data.sources.{source}",
            )
            for (source, generator), folder in self.latents.items()
        }

    def check_latents(self) -> None:
        """Raise UserError where latents are missing."""
        _ = self.stored_latents

    def _item(self, step: int, sample: int, number: int) -> np.ndarray:
        """Read an item; of an image with stored latents, latents drawn anew in every step."""
        index = self.index
        k = int(index.source_of(np.array(sample)))
        # The modules of its items up to this one.
        *preceding, module = index.item_encoder[index.item_start[sample] :][: number + 1].tolist()
        generator = list(self.batch_layout.modules)[module]
        stored = self.stored_latents.get((list(self.sources)[k], generator))
        if stored is None:
            return self.reader.item(sample, number)
        moments = stored.moments(int(sample - index.source_start[k]), preceding.count(module))
        rng = np.random.default_rng((self.config.seed, step, sample, number))
        return moments.draw(self.config.model.towers[generator].latents, rng)

    def plan(self, step: int) -> StepPlan:
        """Plan a step without loading anything."""
        with self._keep_chunks():
            return self.planner.plan(step)

    def steps_for_epochs(self, epochs: float) -> int:
        """Return with which number of steps of the run so many epochs are done."""
        with self._keep_chunks():
            return self.planner.grouper.steps_for_epochs(epochs)

    @cached_property
    def _packed_costs(self) -> bytes:
        """Pack the costs with which steps are planned and their needed FLOPs counted."""

        def count() -> None:
            make_step_planner(self.planner.grouper, self.config, self.layout)
            model, reference = self.config.model, self.config.loss.repeats_forward
            for amount in (0, 1):  # with no items at all, and with some of every kind
                work = dict.fromkeys(
                    ("llm", *model.item_modules), Work._make([amount] * len(Work._fields))
                )
                model_flops(model, work, frozen_modules(model), reference)
            for encoder in encoded_once(model):
                encoding_flops(model, encoder, np.ones(1, np.int64))

        return zlib.compress(pickle.dumps(table.recorded(count)))

    @contextmanager
    def _keep_chunks(self) -> Iterator[None]:
        """Write down where chunks start, if more of that is known afterwards."""
        grouper = self.planner.grouper
        known = len(grouper.first_steps)
        yield
        if self.leads and len(grouper.first_steps) > known:
            with suppress(OSError):  # the disk is full: it only saves time
                write_sealed(self._chunks, {"first_steps": grouper.first_steps})

    def _held(self, number: int) -> tuple[EncoderRanks, Own]:
        """Return the encoder ranks of a microbatch that are loaded here, and those whose rows count."""
        if self.copies:
            return self.copies[number % len(self.copies)]
        parts = self.layout.topology.encoders_per_rank
        of_ranks = range(self.ranks.start * parts, self.ranks.stop * parts)
        encoder_ranks = of_ranks if self.encoder_ranks is None else self.encoder_ranks
        return encoder_ranks, self.own or (self.ranks, encoder_ranks)

    def _content(self, batches: Sequence[Microbatch]) -> int:
        return reduce(
            add_hashes,
            (
                batch_hash(b, n, self.ranks, *self._held(n), encoded_once(self.config.model))
                for n, b in enumerate(batches)
            ),
        )

    def _needed_flops(self, number: int, batch: Microbatch) -> float:
        """Count the FLOPs of this process's ranks; encoder ranks that other processes hold count as its own."""
        model = self.config.model
        frozen, reference = frozen_modules(model), self.config.loss.repeats_forward
        # a unit's rows lie on each of its stages, and count on the first
        if isinstance(self.encoder_ranks, Mapping):
            encoder_ranks, counted = self._held(number)
            local = {"llm": self.ranks, **encoder_ranks}
            owned = {
                "llm": counted[0],
                **{e: ranks_of_encoder(counted[1], e) for e in encoder_ranks},
            }
            part = {
                tower: sum(r in owned[tower] for r in ranks) / max(1, len(ranks))
                for tower, ranks in local.items()
            }
            flops = needed_by_tower(model, batch.text, batch.items, frozen, reference)
            return sum(flops[tower] * part[tower] for tower in flops)
        own_encoder_ranks = len(self.ranks) * self.layout.topology.encoders_per_rank
        share = 1.0 if self.encoder_ranks is None else len(self.encoder_ranks) / own_encoder_ranks
        return step_needed(model, batch.text, batch.items, frozen, share, reference)

    def _encoding_flops(self, missing: Sequence[MissingItem]) -> float:
        """Count the FLOPs of encoding items that are not stored."""
        inputs: dict[str, list[int]] = defaultdict(list)
        for item in missing:
            inputs[item.encoder].append(int(item.item.valid.sum()))
        model = self.config.model
        return sum(
            encoding_flops(model, encoder, np.array(of_items))
            for encoder, of_items in inputs.items()
        )

    def _useful_and_moved(self, plan: MicrobatchPlan) -> tuple[np.ndarray, np.ndarray]:
        """Count the useful positions of every row, and each encoder's tokens that move, as `LoadedStep` has them."""
        modules = len(plan.rows)
        useful = np.zeros((modules, plan.topology.ranks * max(plan.rows)), np.int64)
        np.add.at(useful, (plan.module, plan.row), self.index.useful(plan.samples))
        away = plan.rank() != plan.home_rank()
        # An item is moved as tokens, of which each takes several positions of the encoder's row.
        tokens = self.index.tokens(plan.samples)
        moved = np.bincount(plan.module[away], tokens[away], modules)[1:].astype(np.int64)
        return useful, moved

    def _tokens(self, plan: MicrobatchPlan) -> np.ndarray:
        tokens = np.bincount(plan.module, self.index.tokens(plan.samples), len(plan.rows)).astype(
            np.int64
        )
        tokens[0] = self.index.text_tokens[plan.samples].sum()
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        # What was opened here stays here: a worker gets the description and opens its own. But
        # costs come with it, for to trace them it would need JAX.
        return {f.name: getattr(self, f.name) for f in fields(self)} | {COSTS: self._packed_costs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        table.adopt(pickle.loads(zlib.decompress(state[COSTS])))
        self.__dict__.update(state)


def reader_of(sources: Mapping[str, Source], index: LengthIndex) -> Reader:
    """Give access by global id to several sources, one after the other."""
    opened = list(sources.values())

    def locate(sample: int) -> tuple[Source, int]:
        s = int(index.source_of(np.array(sample)))
        return opened[s], int(sample - index.source_start[s])

    def read(sample: int) -> Sample:
        source, i = locate(sample)
        return source.sample(i)

    def facts(sample: int) -> SampleLengths:
        source, i = locate(sample)
        return source.facts(i)

    def item(sample: int, number: int) -> np.ndarray:
        source, i = locate(sample)
        return source.item(i, number)

    def item_hash(sample: int, number: int) -> bytes | None:
        source, i = locate(sample)
        return source.item_hash(i, number) if hasattr(source, "item_hash") else None

    def placed(sample: int, reason: object) -> str:
        return with_place(*locate(sample), reason)

    return Reader(
        sample=read,
        facts=facts,
        item=item,
        source_of=index.source_of,
        name=index.name,
        with_place=placed,
        item_hash=item_hash,
    )
