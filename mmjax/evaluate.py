"""Score a model's answers: ``python -m mmjax.evaluate RUN|HF_FOLDER [--data questions.jsonl] [--json]``.

A run is asked what its config has: the questions of its test split. ``--data`` names other questions, for a run or a
Hugging Face checkpoint: a file of records as `data.sources` reads them (docs/data.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mmjax.config import Config, ManifestSource, MeshConfig
from mmjax.config_files import callbacks_of, edit
from mmjax.data.chat_source import ChatSource
from mmjax.data.embedded import EmbeddedDataset, SwappedItems
from mmjax.data.file_kinds import source_of
from mmjax.data.file_sources import Split, cache_folder
from mmjax.data.prompt_rows import AtOnce
from mmjax.data.prompts import QuestionSource
from mmjax.data.sources import open_sources
from mmjax.errors import UserError, leave, run_command
from mmjax.models.model import Model
from mmjax.parallel import processes
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.training.announce import score_table
from mmjax.training.answer_scores import MEASURES
from mmjax.training.checkpoint import checkpoint_step, restore_parameters
from mmjax.training.console import ProgressLine, mute, say, table
from mmjax.training.devices import choose_devices
from mmjax.training.evaluation import (
    Answered,
    Evaluator,
    Replies,
    Scores,
    chance,
    evaluation_sources,
    exact_match,
)
from mmjax.training.generation import MOST
from mmjax.training.programs import keep_programs
from mmjax.training.run_folder import RunFolder
from mmjax.training.served import Served
from mmjax.training.state import parameter_shardings

ASKED = "asked"  # the source of --data
AT_ONCE = AtOnce(tokens=4096)  # small enough for the logits of all of them
WRITTEN, HEARD = ("exact_match", "anls", "vqa_accuracy"), ("exact_match", "wer")  # measures, where none are named


def evaluate(
    run: Path, split: str = "test", swap: str = "", overrides: Sequence[str] = (), step: int | None = None
) -> Scores:
    """Score a checkpoint of a run without conversations, by default the newest, from its folder alone: greedily.

    Beside `exact_match_*` and `samples`, `step` is the number of updates that the checkpoint has seen. `swap` names an
    encoder whose items come from another sample: of the questions that need them, what is still answered right was
    guessed, and should be no more than `chance_*`.
    """
    evaluator, params, step = _evaluator(run, split, swap, overrides, step=step)
    answered = [a for replies in evaluator.answer(params).values() for a in replies.answered]
    about = {"step": step} | ({"left_out": len(evaluator.left_out)} if evaluator.left_out else {})
    if not swap:
        return about | exact_match(answered) | evaluator.loss(params)
    blind = [a for a in answered if swap in a.needs]
    return about | exact_match(blind) | chance(blind)


def ask(run: Path, samples: Sequence[int], source: str = "", split: Split = "test") -> list[Answered]:
    """Answer the questions of these samples of a run's split with its newest checkpoint, greedily.

    source: a name of the config's `data.sources`; by default the first one that has questions. Those that cannot be
    read are left out. Raises UserError where the run has no such source.
    """
    evaluator, params, _ = _evaluator(run, split, name=source, samples=samples)
    (replies,) = evaluator.answer(params).values()
    return list(replies.answered)


def _evaluator(
    run: Path,
    split: str,
    swap: str = "",
    overrides: Sequence[str] = (),
    name: str = "",
    samples: Sequence[int] | None = None,
    step: int | None = None,
) -> tuple[Evaluator, dict[str, Any], int]:
    """Make the evaluator of a run's questions; return it with a checkpoint's parameters and step.

    samples: of one source, the first with questions unless it is named.
    """
    folder = RunFolder(run)
    config = edit(folder.read_config(), overrides)
    opened = evaluation_sources(config, (split,), folder.path)
    sources = opened
    if swap or samples is not None:
        sources = {name: source for name, source in opened.items() if hasattr(source, "question")}
    if not sources:
        raise UserError(f"{run}: none of its sources has a {split} split to score")
    if samples is not None:
        named = f"{split}/{name}" if name else next(iter(sources))
        if named not in sources:
            raise UserError(f"{run}: {named} has no questions; those that have: {', '.join(sources)}")
        sources = {named: sources[named]}
    if swap:
        sources = {name: _swapped(name, source, swap, config) for name, source in sources.items()}
    step = checkpoint_step(folder.checkpoints, step)
    mesh = make_mesh(MeshConfig(), choose_devices(config.device))
    keep_programs(folder.programs)
    functions, rules = callbacks_of(config.model, folder.path), ShardingRules()
    model = Model.build(config.model, jnp.dtype(config.training.precision), functions=functions)
    params = restore_parameters(folder.checkpoints, step, model, parameter_shardings(model, mesh, rules))
    chosen = None if samples is None else dict.fromkeys(sources, samples)
    loss_chunks = max(1, config.training.loss_chunks) if sources is opened else None
    evaluator = Evaluator(model, mesh, rules, sources, config, samples=chosen, at_once=AT_ONCE, loss_chunks=loss_chunks)
    return evaluator, params, step


def answer(
    served: Served, sources: Mapping[str, ChatSource], most: int = MOST, limit: int | None = None, show: bool = True
) -> dict[str, Replies]:
    """Answer the questions of each source with a run or a checkpoint, greedily, on all devices at once.

    show: say how far it is.
    """
    config = served.config
    mesh, rules = make_mesh(config.mesh, choose_devices(config.device)), ShardingRules.of(config.mesh)
    keep_programs(served.programs())
    model, params = served.load(mesh, rules)
    config = replace(config, data=replace(config.data, on_bad_sample="skip"))  # they are listed beside the answers
    evaluate = partial(Evaluator, model, mesh, rules, sources, config, dict.fromkeys(sources, limit), max_tokens=most)
    if not show:
        return evaluate().answer(params)
    with ProgressLine(
        0, sum(min(len(source), limit or len(source)) for source in sources.values()), "question"
    ) as line:
        return evaluate(progress=lambda done: line.show(done, str)).answer(params)


def _sources(served: Served, data: str, split: Split, folders: Mapping[str, str], more: Sequence[str]) -> Config:
    """The config with the questions that are to be asked as its sources."""
    config = served.config
    if data:
        cache = cache_folder(config.data)
        cache.mkdir(parents=True, exist_ok=True)
        source = source_of(data, "--data", cache, **folders)
        config = replace(config, data=replace(config.data, sources={ASKED: source}))
    elif served.run is None:
        raise UserError(f"{served.path} is a checkpoint, which has no data of its own; name questions with --data")
    return edit(config, more)


def _swapped(name: str, source: QuestionSource, swap: str, config: Config) -> QuestionSource:
    if swap not in config.model.encoders:
        known = ", ".join(config.model.encoders) or "none"
        raise UserError(f"--swap={swap} names no encoder of this run; it has {known}")
    if not isinstance(source, EmbeddedDataset):
        raise UserError(
            f"--swap: {name} is not an embedded source, and only their items can be swapped; leave --swap away"
        )
    return SwappedItems(source, (swap,))


def score(args: argparse.Namespace) -> None:
    """Ask conversations, and say how right the answers are."""
    own = [word for word in args.overrides if word.startswith(f"data.sources.{ASKED}.")]
    served = Served.open(args.model, [word for word in args.overrides if word not in own], args.step)
    config = _sources(served, args.data, args.split, {"images": args.images, "audio": args.audio}, own)
    split: Split = "train" if args.data else args.split
    opened = {n: s for n, s in open_sources(config, split, args.model).items() if isinstance(s, ChatSource)}
    if not opened:
        raise UserError(f"{args.model}: no source of its has a {args.split} split to ask; name questions with --data")
    for source in opened.values():
        processes.led(lambda source=source: len(source.read_headers()))
        processes.led(source.count_tokens)
    replies = answer(served, opened, args.max_tokens, args.limit, show=not args.json)
    if not processes.leads():
        return
    spoken = {name for name, source in config.data.sources.items() if isinstance(source, ManifestSource)}
    chosen = {name: args.measures or (HEARD if name in spoken else WRITTEN) for name in replies}
    scores = {name: found.scores(chosen[name]) for name, found in replies.items()}
    if args.out:
        lines = (line for name, of_source in replies.items() for line in of_source.json_lines(name))
        args.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if args.json:
        say(json.dumps({name: _counts(found) | scores[name] for name, found in replies.items()}))
        return
    names = [measure for measure in MEASURES if any(measure in of for of in scores.values())]
    rows = [("questions of", "asked", "left out", *names)]
    for name, found in replies.items():
        counts = map(str, _counts(found).values())
        rows.append((name, *counts, *(f"{scores[name][m]:.3f}" if m in scores[name] else "" for m in names)))
    say(*table(rows))
    for name, found in replies.items():
        for sample, reason in list(found.left_out.items())[:3]:
            say(f"left out {name}[{sample}]: {reason}")


def _counts(replies: Replies) -> dict[str, Any]:
    return {"asked": len(replies.answered), "left_out": len(replies.left_out)}


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in MEASURES]:
        raise UserError(f"--measures: there is no {unknown[0]!r}; known are {', '.join(MEASURES)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmjax.evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path, help="a run's folder, or that of a Hugging Face checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="changes to the config, such as device=cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="of the run's own sources")
    parser.add_argument("--step", type=int, metavar="N", help="of a run's checkpoint; by default the newest")
    parser.add_argument("--swap", default="", metavar="ENCODER", help="show another sample's images or clips")
    parser.add_argument("--data", default="", metavar="FILE", help="questions to ask; docs/data.md has the formats")
    parser.add_argument("--images", default="", metavar="FOLDER", help="that their images are relative to")
    parser.add_argument("--audio", default="", metavar="FOLDER", help="that their clips are relative to")
    parser.add_argument("--measures", type=str, default="", metavar="A,B", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--max-tokens", type=int, default=MOST, metavar="N", help=f"of an answer ({MOST})")
    parser.add_argument("--limit", type=int, metavar="N", help="ask no more than the first N of a source")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was said to each question, JSON lines")
    args = parser.parse_intermixed_args(argv)
    args.measures = _measures(args.measures) if args.measures else ()
    if args.max_tokens < 1 or (args.limit is not None and args.limit < 1):
        raise UserError("--max-tokens and --limit are 1 or more")
    if not processes.leads():
        mute()
    with processes.joined():
        if args.data or Served.open(args.model).config.data.chat:
            if args.swap:
                raise UserError("--swap goes with a run's embedded questions alone; leave it away")
            score(args)
            return
        scores = evaluate(args.model, args.split, args.swap, args.overrides, args.step)
    if args.json:
        say(json.dumps(scores))
        return
    swapped = f", with the {args.swap} items of other samples" if args.swap else ""
    say(f"{args.model} after {scores['step']} steps{swapped}", *score_table(scores, args.split))


if __name__ == "__main__":
    leave(run_command(main))
