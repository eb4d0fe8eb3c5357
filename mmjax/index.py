"""Scan the files of a config's data: ``python -m mmjax.index CONFIG [a.b=value ...]``.

Reads the headers of all media, once for each file, lists the bad samples, and draws the lengths of
all others; in tokens where the config has a chat format. Training reuses the results from a cache.
``--to arrayrecord OUT`` writes the format to train on at scale. ``--shrink FOLDER`` writes copies
of the images as small as the model uses them. ``--latents`` makes the latents of the images that
generators learn to make. ``--show PAGE.html`` shows samples as the model gets them. ``--json``
prints the bad records and the keys that nothing reads, for programs.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mmjax.config import AsIs, Config, ConversationFiles, FileSource
from mmjax.config.loading import config_of_words, load, resolve_callbacks
from mmjax.config.other_names import parse_words
from mmjax.console import ProgressLine, print_lines, size
from mmjax.data.plan.length_index import build_index
from mmjax.data.sample import Split
from mmjax.data.sources.array_record_writing import UNREADABLE_FILE, write_array_records
from mmjax.data.sources.chat_source import BadSampleEntry, bad_limit
from mmjax.data.sources.image_copies import CopyMaker, named_images
from mmjax.data.sources.media_sizes import Progress, read_facts
from mmjax.data.sources.opening import (
    SPLITS,
    cache_folder,
    describe_unread,
    open_conversations,
    open_sources,
    path_of,
)
from mmjax.data.sources.processors import PROBES, MediaProcessors
from mmjax.data.storage.files import FileRef
from mmjax.disk import json_lines
from mmjax.errors import UserError, check_output, command_parser, exit_process, run_command
from mmjax.reporting.data_report import Part, measures, report, report_rates

ARRAY_RECORD = "arrayrecord"
PICTURE = "lengths.svg"
BAD = "bad.jsonl"

MAX_SHOWN = 500  # samples of a page, which is large enough then

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("index", __doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG | a.b=value",
        help="a config's file or name, and edits of it",
    )
    parser.add_argument(
        "--to",
        nargs=2,
        metavar=("FORMAT", "OUT"),
        help=f"write the data as {ARRAY_RECORD} into a folder",
    )
    parser.add_argument(
        "--out", type=Path, help="a folder for the picture and the list of what is bad (index/NAME)"
    )
    parser.add_argument(
        "--video-tokens",
        type=int,
        metavar="N",
        help="also say at how many frames per second videos have so many tokens",
    )
    parser.add_argument(
        "--shrink",
        type=Path,
        metavar="FOLDER",
        help="write copies of the images into a folder, as small as the model uses them, and nothing else",
    )
    parser.add_argument(
        "--latents",
        action="store_true",
        help="make the latents of the images that generators learn to make, with their frozen VAE, and nothing else",
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="PAGE.html",
        help="write a page of the samples that training begins with, as the model gets them, and nothing else",
    )
    parser.add_argument(
        "--samples", type=int, default=50, metavar="N", help="on the page of --show (50)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    args = parse_words(parser, argv)
    if args.video_tokens is not None and args.video_tokens < 1:
        raise UserError(f"--video-tokens {args.video_tokens}: give at least 1")
    if args.to and args.to[0] != ARRAY_RECORD:
        raise UserError(
            f"--to {args.to[0]}: there is no writing that; say --to {ARRAY_RECORD} {args.to[1]}"
        )
    if args.json and (args.to or args.latents or args.video_tokens or args.show):
        raise UserError(
            "--json prints what is in the data; leave --to, --latents, --video-tokens and --show out"
        )
    path, overrides = config_of_words(args.words)
    config = load(path, overrides)
    if args.show:
        if not 1 <= args.samples <= MAX_SHOWN:
            raise UserError(f"--samples {args.samples}: choose 1 to {MAX_SHOWN}")
        check_output("--show", args.show, (".html",))
        import jax

        from mmjax.reporting.page import write_page
        from mmjax.reporting.samples_page import samples_page

        jax.config.update("jax_platforms", "cpu")  # a GPU's memory stays free

        write_page(samples_page(config, path, args.samples), args.show, "--show")
        print_lines(f"page   {args.show}")
        return
    if args.json:
        with contextlib.redirect_stdout(sys.stderr):
            parts = list(read_parts(config))
            if args.out:
                _list_bad(parts, _make_folder("--out", args.out) / BAD)
        print_lines(json.dumps(as_json(parts)))
        return
    out = _make_folder("--out", args.out or Path("index") / config.name)
    if args.latents:
        from mmjax.runtime.latents import make_all_latents  # starts JAX

        _write_bad(list(make_all_latents(config)), out / BAD)
        return
    if args.shrink:
        _shrink(config, args.shrink, out / BAD)
        return
    parts = list(read_parts(config))
    unread = [line for part in parts for line in describe_unread(part.name, part.facts.unread)]
    print_lines(*report(parts), *unread, *report_rates(config, parts, args.video_tokens))
    _list_bad(parts, out / BAD)
    for part in parts:
        if len(part.bad) == len(part.conversations):
            raise UserError(
                f"{part.name}: none of its {len(part.bad):,} records can be used; see {out / BAD}"
            )
    draw(config, parts, out / PICTURE)
    print_lines(*_describe_training(config, [part for part in parts if part.split == "train"]))
    if args.to:
        _convert(parts, _make_folder("--to", Path(args.to[1])))


def as_json(parts: Sequence[Part]) -> dict[str, Any]:
    """Build the JSON object of `--json`: how many records there are, the bad ones, and by source the unread keys."""
    ignored: dict[str, Counter[str]] = {}
    for part in parts:
        ignored.setdefault(part.source, Counter()).update(part.facts.unread)
    return {
        "records": sum(len(part.conversations) for part in parts),
        "bad": [record for part in parts for record in part.bad_records()],
        "ignored_keys": {
            source: dict(sorted(keys.items())) for source, keys in ignored.items() if keys
        },
    }


def _describe_training(config: Config, parts: Sequence[Part]) -> list[str]:
    """Say what training does about the bad records of its split, if there are any."""
    bad, total = (
        sum(map(len, counted))
        for counted in ([p.bad for p in parts], [p.conversations for p in parts])
    )
    if not bad:
        return []
    summary = f"train  {bad:,} of {total:,} records are bad"
    if config.data.on_bad_sample == "raise":
        return [
            f"{summary}, and data.on_bad_sample=raise: training refuses to start; mend them, or say skip"
        ]
    limit, setting = bad_limit(config.data, total)
    if bad > limit:
        return [
            f"{summary}, more than {setting} allows: training refuses to start; mend them, or allow so many with "
            f"data.max_bad={bad}"
        ]
    return [f"{summary}: training leaves them out"]


def _shrink(config: Config, folder: Path, bad_path: Path) -> None:
    """Write copies of the images of every source that names them by paths, and print what trains on these."""
    functions = resolve_callbacks(config.model, Path())
    processors = MediaProcessors(
        config.model.item_modules, functions, config.data.limits
    ).image_processors
    if not processors or any(isinstance(p.encoder.images, AsIs) for p in processors):
        raise UserError(
            "--shrink: no encoder of the config resizes images, so there is no size to which to shrink them"
        )
    sources = {n: s for n, s in config.data.sources.items() if isinstance(s, ConversationFiles)}
    if not sources:
        raise UserError(
            "--shrink: no source of the config names its images by paths; --to arrayrecord OUT copies them"
        )
    cache = cache_folder(config.data)
    bad: list[BadSampleEntry] = []
    words = []
    for name, source in sources.items():
        maker = CopyMaker(
            folder / name if len(sources) > 1 else folder, processors, config.data.limits
        )
        images: dict[str, FileRef] = {}
        unnamed, multiple = 0, False
        for split in SPLITS:
            if path_of(source, split):
                records = open_conversations(
                    source, split, cache, f"data.sources.{name}", config.data.window_space
                )
                of_split = _with_progress(
                    len(records), f"{name} {split}", partial(named_images, records)
                )
                images |= of_split[0]
                unnamed, multiple = unnamed + of_split[1], multiple or of_split[2]
        maker.prepare_folder()
        copies = []
        with ProgressLine(0, len(images), "record") as line:
            for copy in maker.copies(images, multiple):
                copies.append(copy)
                line.show(len(copies), lambda folder=maker.folder: f"to {folder}")
        states = Counter(copy.state for copy in copies)
        counts = ", ".join(f"{number:,} {state}" for state, number in states.items()) or "none"
        print_lines(f"wrote  {counts} of {len(images):,} images: {maker.folder}")
        if shrunk := [copy for copy in copies if copy.state == "shrunk"]:
            original, copied = (
                sum(getattr(copy, key) for copy in shrunk)
                for key in ("original_bytes", "copy_bytes")
            )
            print_lines(f"       {size(original)} of files became {size(copied)}")
        if unnamed:
            print_lines(
                f"       {unnamed:,} images have no path below the source's folder, and no copy: {name}"
            )
        bad += [BadSampleEntry(f"{name}: {c.name}", c.reason) for c in copies if c.state == "bad"]
        words.append(f"data.sources.{name}.images={maker.folder}")
    _write_bad(bad, bad_path)
    print_lines("train on them with", *(f"  {word}" for word in words))


def _make_folder(option: str, path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{option} {path}: {error.strerror}; name a folder that you may write"
        ) from None
    return path


def read_parts(config: Config) -> Iterator[Part]:
    """Scan every split of every source of files. Raises UserError where there is no such source."""
    sources = {
        name: source
        for name, source in config.data.sources.items()
        if isinstance(source, FileSource)
    }
    if not sources:
        raise UserError(
            "data.sources has no source of files; name one, such as data.sources.mine=llava"
        )
    cache = cache_folder(config.data)
    print_lines(f"index  {config.name}: facts of media are kept in {cache}")
    for name, source in sources.items():
        for split in SPLITS:
            if split == "train" or path_of(source, split):
                yield _scan(
                    replace(config, data=replace(config.data, sources={name: source})),
                    name,
                    split,
                    cache,
                )


def _scan(config: Config, name: str, split: Split, cache: Path) -> Part:
    """Scan one split of a config with a single source."""
    if config.data.chat is None:
        conversations = open_conversations(
            config.data.sources[name],
            split,
            cache,
            f"data.sources.{name}",
            config.data.window_space,
        )
        read = partial(read_facts, conversations, PROBES, cache, limits=config.data.limits)
        facts = _with_progress(len(conversations), f"{name} {split}", read)
        return Part(name, split, conversations, facts)
    source = open_sources(config, split, Path())[name]
    facts = _with_progress(len(source), f"{name} {split}, headers", source.read_headers)
    _with_progress(len(source), f"{name} {split}, tokens", source.count_tokens)
    encoders = config.model.item_modules
    return Part(
        source=name,
        split=split,
        conversations=source.conversations,
        facts=facts,
        encoders=tuple(encoders),
        lengths=build_index({name: source}, encoders),
    )


def _with_progress(records: int, description: str, work: Callable[[Progress], T]) -> T:
    """Run `work` with a progress line and return its result."""
    with ProgressLine(0, records, "record") as line:
        return work(lambda done: line.show(done, lambda: description))


# --------------------------------------------------------------------------------------------------
# the report


def _list_bad(parts: Sequence[Part], path: Path) -> None:
    _write_bad(
        [BadSampleEntry(f"{p.name}[{i}]", reason) for p in parts for i, reason in p.bad.items()],
        path,
    )


def _write_bad(bad: Sequence[BadSampleEntry], path: Path) -> None:
    path.write_text(json_lines(map(asdict, bad)))
    if bad:
        print_lines(
            f"bad    {len(bad):,} records cannot be used; the first, {bad[0].sample}: {bad[0].reason}"
        )
        print_lines(f"       all are in {path}")


def draw(config: Config, parts: Sequence[Part], path: Path) -> None:
    """Draw a histogram of each measure, with the sources beside each other."""
    # matplotlib looks for fonts when it is first imported
    from mmjax.reporting.plots import plot_lengths

    by_measure: dict[str, dict[str, np.ndarray]] = {}
    for part in parts:
        for name, values in measures(part).items():
            by_measure.setdefault(name, {})[part.name] = values
    records = sum(len(part.facts) for part in parts)
    plot_lengths(path, f"Data of {config.name}", f"{records:,} records", by_measure)
    print_lines(f"plot   {path}")


# --------------------------------------------------------------------------------------------------
# converting


def _convert(parts: Sequence[Part], out: Path) -> None:
    """Write every part as ArrayRecord shards, and print the overrides that train on them."""
    words = []
    for part in parts:
        folder = out / part.source / part.split
        write = partial(write_array_records, part.conversations, part.facts, folder)
        contents = _with_progress(len(part.facts.good()), f"to {folder}", write)
        print_lines(
            f"wrote  {sum(contents.records):,} records in {len(contents.records)} shard(s): {folder}"
        )
        if (left_out := folder / UNREADABLE_FILE).exists():
            print_lines(
                f"       {len(left_out.read_text().splitlines()):,} could not be read and are left out: {left_out}"
            )
        key = f"data.sources.{part.source}"
        if part.split == "train":
            words.append(f"{key}={ARRAY_RECORD}")
        words.append(f"{key}.{'path' if part.split == 'train' else part.split}={folder}")
    print_lines("train on it with", *(f"  {word}" for word in words))


if __name__ == "__main__":
    exit_process(run_command(main))
