"""Data sets that are spoiled in their files, their index and their cache, and then loaded as training does."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from mutations import Random, spoiled_bytes, spoiled_record
from spoilable import (
    RECORDS,
    Fault,
    chat_of,
    config_of,
    is_image,
    lines,
    one_file,
    put_back,
    rows,
    save_chat,
    save_formats,
    save_media,
    save_parquet,
    spoil_file,
    zipped,
)

from mmjax.config import Config, FileSource, ShareGptSource
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.length_index import LengthIndex, cached_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sample import Source
from mmjax.data.sources.media_sizes import open_facts
from mmjax.data.sources.opening import look_again, open_sources
from mmjax.errors import UserError

STEPS = 6  # in which every sample of a small data set has come
PLACE = "data.sources.mine"


class Loaded(NamedTuple):
    """A data set as training takes it."""

    sources: dict[str, Source]
    index: LengthIndex
    steps: tuple[LoadedStep, ...]  # the first, until every sample has come

    def bad(self) -> dict[int, str]:
        """The samples that are listed, now or when they are decoded."""
        known = dict(zip(self.index.bad.tolist(), self.index.reason.tolist(), strict=True))
        return known | {
            sample: reason for step in self.steps for sample, reason in step.unreadable.items()
        }

    def drawn(self) -> set[int]:
        """The samples that came."""
        return {sample for step in self.steps for sample in step.samples.tolist()}


def loaded_of(config: Config, index_folder: Path) -> Loaded:
    """Index, plan and load one step that has every sample, as training does."""
    sources = open_sources(config, "train", index_folder)
    look_again(sources)
    index, path = cached_index(sources, config.model.encoders, index_folder)
    planner, layout = make_planner(index, config, [1.0])
    loader = StepLoader(config, planner.grouper.budget, layout, path, index_folder)
    loaded = Loaded(sources, index, ())
    while set(range(len(index))) - set(loaded.bad()) - loaded.drawn():
        if len(loaded.steps) == STEPS:
            raise Fault(
                f"samples {set(range(len(index))) - set(loaded.bad()) - loaded.drawn()} are neither used nor listed"
            )
        loaded = loaded._replace(steps=(*loaded.steps, loader(len(loaded.steps))))
    check_whole(loaded)
    return loaded


def check_whole(loaded: Loaded) -> None:
    """Fault where a sample is in a step, not listed, and not all there."""
    index, bad = loaded.index, loaded.bad()
    for step in loaded.steps:
        for sample, times in zip(*np.unique(step.samples, return_counts=True), strict=True):
            if sample in bad:
                continue
            tokens = sum(int((batch.text.owner == sample).sum()) for batch in step.microbatches)
            items = [items for batch in step.microbatches for items in batch.items.values()]
            held = sum(int(((of.owner == sample) & (of.item >= 0)).sum()) for of in items)
            useful = index.item_useful[slice(*index.item_start[sample : sample + 2])].sum()
            if tokens != times * index.llm_tokens[sample] or held != times * useful:
                raise Fault(
                    f"sample {sample} has {tokens} tokens and {held} positions of items, not what was promised"
                )


def same(a: Loaded, b: Loaded) -> bool:
    """To the bit, but for what the clock says."""
    x, y = (
        jax.tree.leaves(
            [s._replace(plan_seconds=0, load_seconds=0, unreadable={}) for s in of.steps]
        )
        for of in (a, b)
    )
    return len(x) == len(y) and all(np.array_equal(u, v) for u, v in zip(x, y, strict=True))


class DataSets:
    """Data sets, made when they are first needed, and put back after every mutation. A method for each kind.

    Each is given random numbers and a list for the way, and returns how many samples are listed as
    bad. Raises UserError where mmjax refuses, Fault where it does wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chat, self.media = save_chat(folder / "chat"), save_media(folder / "media")

    # ----------------------------------------------------------------------------------------------
    # media

    @cached_property
    def names(self) -> list[str]:
        """Of the files that the data set's samples have, one each; then one with two, and one without."""
        return list(self.media)

    @cached_property
    def data(self) -> Config:
        records = [*map(chat_of, self.names), chat_of("")]
        (self.folder / "data.jsonl").write_bytes(lines(records))
        files = str(self.folder / "media")
        source = ShareGptSource(str(self.folder / "data.jsonl"), images=files, audio=files)
        return config_of(source, self.chat, self.folder / "cache", len(records))

    @cached_property
    def whole(self) -> Loaded:
        """The data set when nothing is spoiled."""
        loaded = loaded_of(self.data, self.folder / "index")
        if loaded.bad():
            raise RuntimeError(f"the data set is spoiled to begin with: {loaded.bad()}")
        return loaded

    def image(self, rng: Random, way: list[str]) -> int:
        return self._medium(rng, way, [name for name in self.names if is_image(name)])

    def audio(self, rng: Random, way: list[str]) -> int:
        return self._medium(rng, way, [name for name in self.names if not is_image(name)])

    def _medium(self, rng: Random, way: list[str], names: list[str]) -> int:
        name = str(rng.choice(names))
        number, path = self.names.index(name), self.folder / "media" / name
        before = self.whole.sources["mine"].item(number, 0)
        kind, spoiled = spoiled_bytes(self.media[name], rng)
        way[0] = f"{kind} {name}"
        path.write_bytes(spoiled)
        try:
            loaded = loaded_of(self.data, self.folder / "index")
        finally:
            path.write_bytes(self.media[name])
        bad = loaded.bad()
        if len(loaded.index) != len(self.names) + 1 or set(bad) - {number}:
            raise Fault(
                f"of {len(loaded.index)} samples {bad} are listed; only {number} is spoiled"
            )
        if kind in ("cut", "empty") and not bad and len(spoiled) < 0.95 * len(self.media[name]):
            path.write_bytes(spoiled)
            after = loaded.sources["mine"].item(number, 0)
            path.write_bytes(self.media[name])
            if not np.array_equal(before, after):
                raise Fault(
                    f"{len(spoiled)} of {len(self.media[name])} bytes are used as {after.shape}, {before.shape}"
                )
        return len(bad)

    # ----------------------------------------------------------------------------------------------
    # records

    @cached_property
    def formats(self) -> dict[str, FileSource]:
        return save_formats(self.folder / "formats", self.folder / "media", self.folder / "cache")

    def records(self, rng: Random, way: list[str]) -> int:
        name = str(rng.choice(list(self.formats)))
        source = self.formats[name]
        path = Path(source.path)
        changed: int | None = None
        with put_back(path):
            if name == "arrayrecord" and rng.random() < 0.4:
                headers = (path / "00000.jsonl").read_text().splitlines()
                number = int(rng.integers(len(headers)))
                kind, line = spoiled_record(json.loads(headers[number]), rng)
                content = b"\n".join(
                    line if k == number else of.encode() for k, of in enumerate(headers)
                )
                (path / "00000.jsonl").write_bytes(content + b"\n")
                way[0] = f"arrayrecord header {kind}: {line[:150]!r}"
            elif name in RECORDS and rng.random() < 0.6:
                records = [json.dumps(record).encode() for record in RECORDS[name]]
                changed = int(rng.integers(len(records)))
                kind, records[changed] = spoiled_record(RECORDS[name][changed], rng)
                path.write_bytes(b"\n".join(records) + b"\n")
                way[0] = f"{name} {kind}: {records[changed][:150]!r}"
            elif name == "parquet" and rng.random() < 0.4:
                columns, column = rows(), str(rng.choice(["question", "answer", "image"]))
                columns[column] = odd_column(rng)
                save_parquet(path, columns)
                way[0] = f"parquet {column} as {columns[column]!r:.150}"
            elif path.is_dir():
                way[0] = f"{name} {spoil_file(one_file(path, rng), rng)}"
            else:
                kind, content = spoiled_bytes(path.read_bytes(), rng)
                path.write_bytes(content)
                way[0] = f"{name} {kind}"
            return self._read(name, source, changed)

    def _read(self, name: str, source: FileSource, changed: int | None) -> int:
        cache, index = self.folder / "fresh", self.folder / "fresh_index"
        try:
            loaded = loaded_of(config_of(source, self.chat, cache, 8), index)
        except UserError as error:
            if str(self.folder) not in str(error) and PLACE not in str(error):
                raise Fault(f"names neither file nor key: {error}") from None
            raise
        finally:
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(index, ignore_errors=True)
        bad = loaded.bad()
        if changed is not None and (
            len(loaded.index) != len(RECORDS[name]) or set(bad) - {changed}
        ):
            raise Fault(
                f"of {len(loaded.index)} records {bad} are listed; only {changed} is spoiled"
            )
        return len(bad)

    # ------------------------------------------------------------------------------------------
    # index, cache and run

    @cached_property
    def kept(self) -> tuple[Config, Loaded]:
        """A data set with an archive and a bad sample, with its index and all that is kept of it."""
        archive = str(zipped(self.folder / "media", self.folder / "media.zip"))
        records = [*map(chat_of, self.names), chat_of("missing.png")]
        (self.folder / "kept.jsonl").write_bytes(lines(records))
        source = ShareGptSource(str(self.folder / "kept.jsonl"), images=archive, audio=archive)
        config = config_of(source, self.chat, self.folder / "kept" / "cache", len(records))
        return config, loaded_of(config, self.folder / "kept" / "index")

    def index(self, rng: Random, way: list[str]) -> int:
        return self._kept("index", rng, way)

    def cache(self, rng: Random, way: list[str]) -> int:
        return self._kept("cache", rng, way)

    def _kept(self, part: str, rng: Random, way: list[str]) -> int:
        config, whole = self.kept
        with put_back(self.folder / "kept"):
            path = one_file(self.folder / "kept" / part, rng)
            way[0] = f"{part} {path.parent.name}/{spoil_file(path, rng)}"
            loaded = loaded_of(config, self.folder / "kept" / "index")
            if loaded.index.fingerprint() != whole.index.fingerprint():
                raise Fault("the index is another one")
            if not same(loaded, whole):
                raise Fault("the step is another one")
            facts = open_facts(loaded.sources["mine"].conversations, self.folder / "kept" / "cache")
            if facts is None or not np.array_equal(facts.size, whole.sources["mine"]._facts.size):
                raise Fault("the facts are others")
        return len(loaded.bad())


def odd_column(rng: Random) -> list[Any]:
    """Four values of a column that Arrow can hold."""
    columns: list[list[Any]] = [
        [1, 2, 3, 4], [None] * 4, ["text"] * 4, [[]] * 4, [[None]] * 4, [{"bytes": None, "path": None}] * 4,
        [b"\xff\xfe"] * 4, [{"path": "../../x"}] * 4, [{"bytes": 5}] * 4, [{"other": "a"}] * 4,
        [[{"bytes": b"x"}]] * 4, [float("nan")] * 4, [[["a"]]] * 4, ["What?", None, "", "<image>"], [True] * 4,
        [[{"answer": "x"}]] * 4, [[1, 2]] * 4,
    ]  # fmt: skip
    return columns[int(rng.integers(len(columns)))]
