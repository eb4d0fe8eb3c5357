"""What `mutations.py` spoils, each thing made once and put back after every mutation, and what mmjax made of it.

A mutation is accepted where everything is used whole or is what it was before, refused where a UserError says so in one
line; samples that mmjax lists as bad are counted. Anything else is a fault: a traceback, a minute without an end, a
sample that is lost or half used without a word.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from commands import TINY
from mutations import BYTES, VALUES, Mutation, Random, spoiled_bytes, spoiled_record, spoiled_source, spoiled_words
from spoilable import (
    CONFIG_TEXT,
    RECORDS,
    chat_of,
    config_of,
    is_image,
    lines,
    rows,
    save_chat,
    save_formats,
    save_media,
    save_parquet,
    zipped,
)

from mmjax.config import Config, DataConfig, FileSource, MeshConfig, ShareGptSource
from mmjax.config_files import describe, edit, load, to_json
from mmjax.data.index import LengthIndex, build_index, cached_index
from mmjax.data.media_facts import open_facts
from mmjax.data.pipeline import LoadedStep, StepLoader
from mmjax.data.plan import make_planner
from mmjax.data.quarantine import Bad, Quarantine
from mmjax.data.sample import Source
from mmjax.data.sources import look_again, open_sources
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.mesh import check_heads, make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.fit import Fit, Room
from mmjax.planning.memory import Spread
from mmjax.training.checkpoint import Checkpoints, DataState, read_saved, restore_parameters
from mmjax.training.kept_fit import Decision, asked_of, read_fit, write_fit
from mmjax.training.metrics import MetricsLog
from mmjax.training.optimizer import make_optimizer
from mmjax.training.run_folder import RunFolder, refuse_other_run
from mmjax.training.state import parameter_shardings
from mmjax.training.step import Executor

STEPS = 6  # in which every sample of a small data set has come
SECONDS = 60  # that a mutation may take; they take a tenth of one
PLACE = "data.sources.mine"


class Outcome(NamedTuple):
    """What became of one mutation."""

    way: str  # in which it was spoiled, and what
    verdict: str  # accepted, refused, fault
    listed: int = 0  # samples that are said to be bad
    told: str = ""  # the one line of a refusal, or what is wrong


class Fault(AssertionError):
    """mmjax did what it must not."""


class Loaded(NamedTuple):
    """A data set as training takes it."""

    sources: dict[str, Source]
    index: LengthIndex
    steps: tuple[LoadedStep, ...]  # the first, until every sample has come

    def bad(self) -> dict[int, str]:
        """The samples that are listed, now or when they are decoded."""
        known = dict(zip(self.index.bad.tolist(), self.index.reason.tolist(), strict=True))
        return known | {of.sample: of.reason for step in self.steps for of in step.spoiled}

    def drawn(self) -> set[int]:
        """The samples that came."""
        return {sample for step in self.steps for sample in step.samples.tolist()}


def tried(mutations: Iterable[Mutation]) -> Iterator[tuple[Mutation, Outcome]]:
    """Every mutation with what became of it."""
    with tempfile.TemporaryDirectory() as folder, pytest_free_cache(Path(folder)):
        things = Things(Path(folder).resolve())
        for one in mutations:
            yield one, outcome_of(one, things)


@contextlib.contextmanager
def pytest_free_cache(folder: Path) -> Iterator[None]:
    yield


def outcome_of(one: Mutation, things: Things) -> Outcome:
    """One mutation; whatever mmjax raises but a UserError of one line is a fault."""
    way = ["?"]

    def ring(signum: int, frame: Any) -> None:
        raise Fault(f"no end within {SECONDS} s: {''.join(traceback.format_stack(frame)[-3:])}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # where it hangs in a library, which no signal reaches
    try:
        listed = getattr(things, one.kind)(one.random(), way)
        return Outcome(way[0], "accepted", listed)
    except UserError as error:
        if "\n" in str(error) or not str(error).strip():
            return Outcome(way[0], "fault", told=f"not one line: {str(error)!r}")
        return Outcome(way[0], "refused", told=str(error))
    except Fault as fault:
        return Outcome(way[0], "fault", told=str(fault))
    except BaseException as error:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "mmjax" in f.filename
        ] or traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}"
        return Outcome(way[0], "fault", told=f"{place}: {type(error).__name__}: {str(error)[:500]}")
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


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
                raise Fault(f"sample {sample} has {tokens} tokens and {held} positions of items, not what was promised")


def same(a: Loaded, b: Loaded) -> bool:
    """To the bit, but for what the clock says."""
    x, y = (
        jax.tree.leaves([s._replace(plan_seconds=0, load_seconds=0, spoiled=()) for s in of.steps]) for of in (a, b)
    )
    return len(x) == len(y) and all(np.array_equal(u, v) for u, v in zip(x, y, strict=True))


def spoil_file(path: Path, rng: Random) -> str:
    """Spoil one file of a folder where it lies; the way."""
    way = str(rng.choice([*BYTES, "missing", "folder"]))
    if way in BYTES:
        path.write_bytes(BYTES[way](path.read_bytes(), rng))
    else:
        path.unlink()
        if way == "folder":
            path.mkdir()
    return f"{way} {path.name}"


class Things:
    """What there is to spoil, made when it is first needed. A method for each kind of mutation.

    Each is given random numbers and a list for the way, and returns how many samples are listed as bad. Raises UserError
    where mmjax refuses, Fault where it does wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chat, self.media = save_chat(folder / "chat"), save_media(folder / "media")

    # ------------------------------------------------------------------------------------------------------- media

    @cached_property
    def names(self) -> list[str]:
        """Of the files that the data set's samples have, one each; then one with two, and one without."""
        return list(self.media)

    @cached_property
    def data(self) -> Config:
        both = chat_of("1.png")
        both["conversations"][0]["value"] = "<image><audio>What?"
        both |= {"audios": ["0.wav"]}
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
            raise Fault(f"of {len(loaded.index)} samples {bad} are listed; only {number} is spoiled")
        if kind in ("cut", "empty") and not bad and len(spoiled) < 0.95 * len(self.media[name]):
            path.write_bytes(spoiled)
            after = loaded.sources["mine"].item(number, 0)
            path.write_bytes(self.media[name])
            if not np.array_equal(before, after):
                raise Fault(
                    f"{len(spoiled)} of {len(self.media[name])} bytes are used as {after.shape}, {before.shape}"
                )
        return len(bad)

    # ----------------------------------------------------------------------------------------------------- records

    @cached_property
    def formats(self) -> dict[str, FileSource]:
        return save_formats(self.folder / "formats", self.folder / "media", self.folder / "cache")

    def records(self, rng: Random, way: list[str]) -> int:
        name = str(rng.choice(list(self.formats)))
        source = self.formats[name]
        path = Path(source.path)
        changed: int | None = None
        with put_back(path):
            if name in RECORDS and rng.random() < 0.6:
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
                files = sorted(p for p in path.rglob("*") if p.is_file())
                way[0] = f"{name} {spoil_file(files[int(rng.integers(len(files)))], rng)}"
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
        if changed is not None and (len(loaded.index) != len(RECORDS[name]) or set(bad) - {changed}):
            raise Fault(f"of {len(loaded.index)} records {bad} are listed; only {changed} is spoiled")
        return len(bad)

    # ------------------------------------------------------------------------------------------ index, cache and run

    @cached_property
    def kept(self) -> tuple[Config, Loaded]:
        """A data set with an archive and a bad sample, with its index and all that is kept of it."""
        archive = str(zipped(self.folder / "media", self.folder / "media.zip"))
        records = [*map(chat_of, self.names), chat_of("missing.png")]
        files = {"media.zip": "", "bad.zip": ""}
        del files
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
            files = sorted(p for p in (self.folder / "kept" / part).rglob("*") if p.is_file() and p.name != "lock")
            path = files[int(rng.integers(len(files)))]
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

    @cached_property
    def run_files(self) -> tuple[Config, Path]:
        config, folder = load(TINY), RunFolder(self.folder / "run")
        folder.path.mkdir()
        folder.write_config(config)
        decided = Fit({"llm": ("none", "full")}, 1, {}, {}, {}, 0.0, 0.0, {}, 0, Spread(1, 1, 1), Room(1e9))
        write_fit(folder.fit, self._asked(config), decided)
        steps = [json.dumps({"step": k, "loss": 1.5, "time": 1.0 * k}) for k in range(1, 9)]
        folder.metrics.write_text("".join(line + "\n" for line in steps))
        folder.quarantine.write_text("".join(Bad(f"few[{k}]", "broken").line() + "\n" for k in range(3)))
        return config, folder.path

    def _asked(self, config: Config) -> dict[str, Any]:
        return asked_of(config, make_mesh(MeshConfig(), jax.devices()[:1]))

    def run(self, rng: Random, way: list[str]) -> int:
        config, path = self.run_files
        folder = RunFolder(path)
        with put_back(path):
            spoiled = (folder.config, folder.fit, folder.metrics, folder.quarantine)[int(rng.integers(4))]
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
        edit(folder.read_config(), [])
        refuse_other_run(folder, config)
        if kept := read_fit(folder.fit, self._asked(config)):
            decided = Decision.of(kept)
            edit(
                config,
                [f"model.llm.remat={','.join(decided.policies['llm'])}", f"training.loss_chunks={decided.loss_chunks}"],
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
        quarantine.add([Bad("few[1]", "broken"), Bad("few[7]", "torn")])
        listed = folder.quarantine.read_text(errors="replace").splitlines()
        if not {Bad("few[1]", "broken").line(), Bad("few[7]", "torn").line()} <= set(listed):
            raise Fault(f"the list has {listed}")

    # ----------------------------------------------------------------------------------------------------- configs

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
        if load_again(config) != config:
            raise Fault("the config is another one when it was stored")
        mesh = make_mesh(config.mesh, jax.devices()[:1])
        check_heads(mesh.shape, config.mesh, config.model)
        sources = open_sources(config, "train", self.folder)
        index = build_index(sources, config.model.encoders)
        make_planner(index, config, [source.weight for source in config.data.sources.values()])
        model = Model.build(config.model, jnp.dtype(config.training.precision))
        make_optimizer(config.optimizer, model.axes)
        parameter_shardings(model, mesh, ShardingRules.of(config.mesh))

    # ------------------------------------------------------------------------------------------------- checkpoints

    @cached_property
    def saved(self) -> tuple[Path, Model, Any, Any, Any]:
        config = load(TINY)
        mesh, rules = make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
        model = Model.build(config.model, jnp.float32)
        executor = Executor(model, make_optimizer(config.optimizer, model.axes), mesh, rules, sources=1)
        rng, folder = np.random.default_rng(0), self.folder / "checkpoints"
        host = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), x.dtype), executor.abstract)
        state = jax.device_put(host, executor.shardings)
        checkpoints = Checkpoints(folder, executor, keep=2)
        for step in (2, 4):
            checkpoints.save(state, to_json(config), DataState(step, "an index", {"rows": [1]}))
        checkpoints.close()
        shardings = parameter_shardings(model, mesh, rules)
        params = jax.device_get(restore_parameters(folder, 4, model, shardings))
        return folder, model, shardings, params, read_saved(folder, 4)

    def checkpoint(self, rng: Random, way: list[str]) -> int:
        folder, model, shardings, params, said = self.saved
        with put_back(folder):
            files = sorted(p for p in (folder / "4").rglob("*") if p.is_file())
            path = files[int(rng.integers(len(files)))]
            way[0] = f"{path.relative_to(folder).parent}/{spoil_file(path, rng)}"
            found = read_saved(folder, 4)
            if found != said:
                raise Fault(f"says {found}"[:300])
            restored = jax.device_get(restore_parameters(folder, 4, model, shardings))
            if not all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(params))):
                raise Fault("the parameters are others")
        return 0


@contextlib.contextmanager
def put_back(path: Path) -> Iterator[None]:
    """Whatever happens to a file or folder, it is as before afterwards, to its times of change."""
    aside = path.with_name(f"{path.name}.aside")
    copy: Callable[..., Any] = shutil.copytree if path.is_dir() else shutil.copy2
    path.rename(aside)  # the copy is spoiled: what is memory-mapped stays as it is
    copy(aside, path)
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        aside.rename(path)


def odd_column(rng: Random) -> list[Any]:
    """Four values of a column that Arrow can hold."""
    columns: list[list[Any]] = [
        [1, 2, 3, 4], [None] * 4, ["text"] * 4, [[]] * 4, [[None]] * 4, [{"bytes": None, "path": None}] * 4, [b"\xff\xfe"] * 4,
        [{"path": "../../x"}] * 4, [{"bytes": 5}] * 4, [{"other": "a"}] * 4, [[{"bytes": b"x"}]] * 4, [float("nan")] * 4,
        [[["a"]]] * 4, ["What?", None, "", "<image>"], [True] * 4, [[{"answer": "x"}]] * 4, [[1, 2]] * 4,
    ]  # fmt: skip
    return columns[int(rng.integers(len(columns)))]


def load_again(config: Config) -> Config:
    from mmjax.config_files import from_json

    return from_json(to_json(config))


def first_difference(a: str, b: str) -> str:
    """Where two texts begin to differ."""
    at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{a[max(0, at - 20) : at + 20]!r} -> {b[max(0, at - 20) : at + 20]!r}"


__all__ = ["VALUES", "Outcome", "tried"]
