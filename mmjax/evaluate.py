"""Score a model's answers: ``python -m mmjax.evaluate RUN|HF_FOLDER [--data questions.jsonl] [--json]``.

A run answers the questions of its own test split. ``--data`` names a file of other questions, for a
run or a Hugging Face checkpoint, in any format that `data.sources` reads (docs/data.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mmjax.config import Config, ManifestSource, MeshConfig
from mmjax.config.loading import apply_overrides, resolve_callbacks
from mmjax.config.losses import loss_of_source
from mmjax.config.other_names import parse_words
from mmjax.config.validation import check_loss
from mmjax.console import ProgressLine, mute, print_lines, table
from mmjax.data.sample import BadSample, Split
from mmjax.data.sources.answers import AnswerForm, form_of, with_loss
from mmjax.data.sources.chat_files import ChatFiles
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.sources.opening import cache_folder, open_sources, source_of
from mmjax.data.toy.dataset import EmbeddedDataset, SwappedItems
from mmjax.data.toy.drawing import DrawnDigits
from mmjax.disk import atomic_write
from mmjax.distributed import coordination
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.inference.benchmarks import BENCHMARKS, QUESTIONS, score_replies, write_questions
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.evaluation import Evaluator, evaluation_sources
from mmjax.inference.generator import DEFAULT_MAX_TOKENS
from mmjax.inference.image_sampler import contact_sheet, write_image
from mmjax.inference.prompt_rows import BatchLimits
from mmjax.inference.prompts import QuestionSource
from mmjax.inference.scores import MEASURES, Answered, Replies, Scores, chance, exact_match_by_group
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.checkpoint_metadata import checkpoint_step
from mmjax.runtime.devices import choose_devices, enable_compilation_cache
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.run_trust import HELP as TRUST_HELP
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings
from mmjax.training.outcome import score_table

BATCH_LIMITS = BatchLimits(tokens=4096)  # small enough for the logits of all of them
DATA_SOURCE = "asked"  # the name in data.sources of what --data names
FOLDERS = {"images": "images", "audio": "clips", "videos": "videos"}  # options, and what is there
WRITTEN_MEASURES = ("exact_match", "anls", "vqa_accuracy")  # by default
SPOKEN_MEASURES = ("exact_match", "wer")  # by default, for transcripts: manifests of audio


def evaluate(
    run: Path,
    split: str = "test",
    swap: str = "",
    overrides: Sequence[str] = (),
    step: int | None = None,
    trust: bool = False,
) -> Scores:
    """Score a checkpoint of a run without conversations, by default the newest, with greedy decoding.

    Returns `exact_match_*`, `samples`, `loss`, and the checkpoint's number of updates as `step`.
    swap: an encoder whose items are replaced by those of another sample. The questions that need
    them can then only be guessed, so their exact match should be no more than `chance_*`, and no
    loss is returned. trust: execute and fetch what the run's config says, whoever wrote it.

    Images to be made are written into the run as one sheet. Where a source can tell what is on
    them, `drawn_as_asked` is the share that it finds; with a generator's name as `swap`, of what
    another sample asks for.
    """
    generators = RunFolder(run).stored_config().model.towers_behind("llm")
    if swap in generators:
        evaluator, params, step = _open_evaluator(
            run, split, overrides=overrides, step=step, trust=trust
        )
        return {"step": step} | _judge_pictures(evaluator, params, run, step, swapped=True)
    evaluator, params, step = _open_evaluator(run, split, swap, overrides, step=step, trust=trust)
    answers = [
        answer for replies in evaluator.answer(params).values() for answer in replies.answered
    ]
    scores = {"step": step} | ({"left_out": len(evaluator.left_out)} if evaluator.left_out else {})
    if not swap:
        pictures = _judge_pictures(evaluator, params, run, step) if generators else {}
        return scores | exact_match_by_group(answers) | evaluator.loss(params) | pictures
    swapped = [a for a in answers if swap in a.needs]
    return scores | exact_match_by_group(swapped) | chance(swapped)


def _judge_pictures(
    evaluator: Evaluator, params: Params, run: Path, step: int, swapped: bool = False
) -> Scores:
    """Make the images of samples, and judge them where a source can.

    Those of a source are written into the run as one sheet, and beside it their prompts and the
    judgement, for the report.
    """
    judged = []
    for name, images in evaluator.pictures(params).items():
        source = evaluator.sources[name]
        scores = []
        numbered = [(n, image) for n, of_sample in images.items() for image in of_sample]
        if isinstance(source, DrawnDigits):
            prompt_of = source.partner if swapped else int
            scores = [source.judge(prompt_of(n), image) for n, image in numbered]
        judged += scores
        if swapped:
            continue
        folder = RunFolder(run).pictures
        folder.mkdir(exist_ok=True)
        path = folder / f"{name.replace('/', '-')}-{step}.png"
        write_image(contact_sheet([image for _, image in numbered]), path)
        sheet = {
            "source": name,
            "step": step,
            "prompts": [p for n in images for p in evaluator.image_prompts(name, n)],
        }
        path.with_suffix(".json").write_text(
            json.dumps(sheet | _share_as_asked(scores), ensure_ascii=False)
        )
    return _share_as_asked(judged)


def _share_as_asked(judged: Sequence[float]) -> Scores:
    return {"drawn_as_asked": float(np.mean(judged))} if judged else {}


def ask(
    run: Path, samples: Sequence[int], source: str = "", split: Split = "test"
) -> list[Answered]:
    """Answer the questions of some samples of a run's split with its newest checkpoint and greedy decoding.

    source: a name of the config's `data.sources`; by default the first one that has questions.
    Unreadable samples are left out. Raises UserError where the run has no such source.
    """
    evaluator, params, _ = _open_evaluator(run, split, name=source, samples=samples)
    (replies,) = evaluator.answer(params).values()
    return list(replies.answered)


def _open_evaluator(
    run: Path,
    split: str,
    swap: str = "",
    overrides: Sequence[str] = (),
    name: str = "",
    samples: Sequence[int] | None = None,
    step: int | None = None,
    trust: bool = False,
) -> tuple[Evaluator, dict[str, Any], int]:
    """Open the evaluator of a run's split, with a checkpoint's parameters and the number of updates they have had.

    samples: of one source, the first with questions unless `name` says which. step: of the
    checkpoint; None: the newest. The loss is computed where neither samples are chosen nor items
    swapped.
    """
    folder = RunFolder(run, trusted=trust)
    config = apply_overrides(folder.read_config(overrides), overrides)
    with_loss = not swap and samples is None
    sources = {
        key: source
        for key, source in evaluation_sources(config, (split,), folder.path).items()
        if with_loss or hasattr(source, "question")
    }
    if not sources:
        raise UserError(f"{run}: none of its sources has a {split} split to score")
    if samples is not None:
        key = f"{split}/{name}" if name else next(iter(sources))
        if key not in sources:
            raise UserError(f"{run}: {key} has no questions; those that have: {', '.join(sources)}")
        sources = {key: sources[key]}
    if swap:
        sources = {key: _swap_items(key, source, swap, config) for key, source in sources.items()}
    step = checkpoint_step(folder.checkpoints, step)
    mesh = make_mesh(MeshConfig(), choose_devices(config.device))
    enable_compilation_cache(folder.programs)
    rules = ShardingRules()
    functions = resolve_callbacks(config.model, folder.path)
    model = Model.build(config.model, jnp.dtype(config.training.precision), functions=functions)
    shardings = parameter_shardings(model, mesh, rules)
    params = restore_parameters(
        folder.checkpoints, step, model, shardings, config.training.evaluated
    )
    evaluator = Evaluator(
        model,
        mesh,
        rules,
        sources,
        config,
        samples=None if samples is None else dict.fromkeys(sources, samples),
        batch_limits=BATCH_LIMITS,
        one_shape=True,
        loss_chunks=max(1, config.training.loss_chunks) if with_loss else None,
    )
    return evaluator, params, step


def answer(
    served: CheckpointModel,
    sources: Mapping[str, ChatSource],
    max_tokens: int = DEFAULT_MAX_TOKENS,
    limit: int | None = None,
    show: bool = True,
) -> dict[str, Replies]:
    """Answer the questions of each source with a run or a checkpoint, with greedy decoding on all devices.

    max_tokens: tokens of an answer. limit: answer only so many questions of each source. show:
    print a progress line.
    """
    # Questions that cannot be asked are listed beside the answers, whatever training did with them.
    config = replace(served.config, data=replace(served.config.data, on_bad_sample="skip"))
    mesh = make_mesh(config.mesh, choose_devices(config.device))
    rules = ShardingRules.of(config.mesh)
    enable_compilation_cache(served.programs())
    model, params = served.load(mesh, rules)
    limits = dict.fromkeys(sources, limit)
    make_evaluator = partial(
        Evaluator, model, mesh, rules, sources, config, limits, max_tokens=max_tokens
    )
    if not show:
        return make_evaluator().answer(params)
    questions = sum(min(len(source), limit or len(source)) for source in sources.values())
    with ProgressLine(0, questions, "question") as line:
        return make_evaluator(progress=lambda done: line.show(done, str)).answer(params)


def _open_questions(
    args: argparse.Namespace,
) -> tuple[CheckpointModel, Config, dict[str, ChatSource]]:
    """Open a model and its sources of conversations, of which the file of --data is the only one where it is named.

    Raises UserError where there is nothing to ask.
    """
    # Overrides of the source that --data makes apply once it is in the config.
    of_data = [word for word in args.overrides if word.startswith(f"data.sources.{DATA_SOURCE}.")]
    of_model = [word for word in args.overrides if word not in of_data]
    served = CheckpointModel.open(args.model, of_model, args.step, args.trust)
    config = served.config
    if args.data:
        cache = cache_folder(config.data)
        cache.mkdir(parents=True, exist_ok=True)
        if args.benchmark:
            write = partial(write_questions, args.benchmark, args.data, "--data", cache)
            args.data = str(Path(coordination.run_on_leader(lambda: str(write()))) / QUESTIONS)
        folders = {option: getattr(args, option) for option in FOLDERS}
        source = source_of(args.data, "--data", cache, **folders)
        # The loss says which answers are branches.
        loss = loss_of_source(source, config.loss)
        config = replace(
            config, data=replace(config.data, sources={DATA_SOURCE: source}), loss=loss
        )
    elif served.run is None:
        raise UserError(
            f"{served.path} is a checkpoint, which has no data of its own; name questions with --data"
        )
    config = apply_overrides(config, of_data)
    opened = open_sources(config, "train" if args.data else args.split, args.model)
    return served, config, {n: s for n, s in opened.items() if isinstance(s, ChatSource)}


def _swap_items(name: str, source: QuestionSource, swap: str, config: Config) -> QuestionSource:
    """Give each sample of a source another one's items of the encoder `swap`. Raises UserError where that cannot be."""
    if swap not in config.model.encoders:
        known = ", ".join(config.model.encoders) or "none"
        raise UserError(f"--swap={swap} names no encoder of this run; it has {known}")
    if not isinstance(source, EmbeddedDataset):
        raise UserError(
            f"--swap: {name} is not an embedded source, and only their items can be swapped; leave out --swap"
        )
    return SwappedItems(source, (swap,))


def evaluate_conversations(args: argparse.Namespace) -> None:
    """Answer questions in conversations or of a benchmark, and print or write the answers' scores."""
    served, config, sources = _open_questions(args)
    if not sources:
        raise UserError(
            f"{args.model}: none of its sources has a {args.split} split to ask; name questions with --data"
        )
    # Process 0 fills the caches of headers and lengths, which the others then read.
    for source in sources.values():
        coordination.run_on_leader(lambda source=source: len(source.read_headers()))
        coordination.run_on_leader(source.count_tokens)
    replies = answer(served, sources, args.max_tokens, args.limit, show=not args.json)
    reasons = [
        f"{name}[{n}]: {why}"
        for name, reply in replies.items()
        for n, why in reply.left_out.items()
    ]
    if reasons and not any(reply.answered for reply in replies.values()):
        raise UserError(f"none of {len(reasons):,} records can be asked; the first, {reasons[0]}")
    if not coordination.is_leader():
        return
    spoken = {
        name for name, source in config.data.sources.items() if isinstance(source, ManifestSource)
    }
    measures = {
        name: args.measures or (SPOKEN_MEASURES if name in spoken else WRITTEN_MEASURES)
        for name in replies
    }
    scores = {
        name: score_replies(args.benchmark, Path(args.data).parent, reply)
        if args.benchmark
        else reply.scores(measures[name])
        for name, reply in replies.items()
    }
    counts = {
        n: {"asked": len(reply.answered), "left_out": len(reply.left_out)}
        for n, reply in replies.items()
    }
    if args.out:
        records = [record for name, reply in replies.items() for record in reply.json_lines(name)]
        args.out.write_text(
            "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        )
    if args.json:
        print_lines(json.dumps({name: counts[name] | scores[name] for name in replies}))
        return
    columns = [*dict.fromkeys(measure for values in scores.values() for measure in values)]
    rows = [("questions of", "asked", "left out", *columns)]
    for name, values in scores.items():
        cells = [f"{values[measure]:.3f}" if measure in values else "" for measure in columns]
        rows.append((name, *map(str, counts[name].values()), *cells))
    print_lines(*table(rows))
    for name, reply in replies.items():
        for sample, reason in list(reply.left_out.items())[:3]:
            print_lines(f"left out {name}[{sample}]: {reason}")


def write_log_probs(args: argparse.Namespace) -> None:
    """Write every record of answers again, with the model's log-probabilities of each: a run's stored reference."""
    served, config, sources = _open_questions(args)
    sources = {n: s for n, s in sources.items() if isinstance(s.conversations, ChatFiles)}
    if len(sources) != 1:
        raise UserError(
            "--log-probs writes the answers of one file of JSON records; name it with --data"
        )
    ((name, source),) = sources.items()
    form = _form_of_answers(source)
    if form is None or form.measured_by is None:
        raise UserError(
            f"--data {args.data}: its first record has no chosen and rejected, and no completion and label, of which "
            "--log-probs computes log-probabilities"
        )
    config = replace(config, loss=form.measured_by)
    check_loss(config)
    source.chat = with_loss(source.chat, config.loss)
    mesh = make_mesh(config.mesh, choose_devices(config.device))
    rules = ShardingRules.of(config.mesh)
    model, params = served.load(mesh, rules)
    evaluator = Evaluator(
        model, mesh, rules, sources, config, max_tokens=1, batch_limits=BATCH_LIMITS, loss_chunks=1
    )
    log_probs = evaluator.log_probs(params, form.log_probs).get(name, {})
    if not coordination.is_leader():
        return
    with atomic_write(args.log_probs) as partial_file, partial_file.open("w") as out:
        for number in range(len(source)):
            with suppress(BadSample):  # what is no JSON object is in no file of pairs
                record = source.conversations.record(number)
                if number in log_probs:
                    record |= log_probs[number] | form.beside(
                        source.chat.read(source.conversations, number)
                    )
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
    print_lines(f"{len(log_probs):,} {form.describe(log_probs.values())}: {args.log_probs}")
    for sample, reason in list(evaluator.left_out.items())[:3]:
        print_lines(f"left out {sample}: {reason}")
    if (unnamed := len(evaluator.left_out) - 3) > 0:
        print_lines(
            f"left out {unnamed:,} more; {args.log_probs} has them without log-probabilities"
        )


def _form_of_answers(source: ChatSource) -> AnswerForm | None:
    """Tell which form of several answers the first record has that can be read."""
    for number in range(len(source)):
        with suppress(BadSample):
            return form_of(source.conversations.record(number))
    return None


def _parse_measures(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in MEASURES]:
        raise UserError(f"--measures: there is no {unknown[0]!r}; known are {', '.join(MEASURES)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("evaluate", __doc__)
    parser.add_argument(
        "model", type=Path, help="a run's folder, or that of a Hugging Face checkpoint"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=value",
        help="changes to the config, such as device=cpu",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument(
        "--split", choices=("validation", "test"), default="test", help="of the run's own sources"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run's checkpoint; by default the newest"
    )
    parser.add_argument(
        "--swap", default="", metavar="ENCODER", help="show another sample's images or clips"
    )
    parser.add_argument(
        "--data", default="", metavar="FILE", help="questions to ask; docs/data.md has the formats"
    )
    for option, media in FOLDERS.items():
        about = f"that their {media} are relative to"
        parser.add_argument(f"--{option}", default="", metavar="FOLDER", help=about)
    parser.add_argument(
        "--measures",
        type=_parse_measures,
        default=(),
        metavar="A,B",
        help=f"of {', '.join(MEASURES)}",
    )
    parser.add_argument(
        "--benchmark",
        choices=BENCHMARKS,
        default="",
        help="the benchmark whose table --data is, asked and scored by its own rules",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"of an answer ({DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="ask no more than the first N of a source"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write what was said to each question, JSON lines"
    )
    parser.add_argument(
        "--log-probs",
        type=Path,
        metavar="FILE",
        help="write pairs of answers again, with log-probabilities of both",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    args = parse_words(parser, argv)
    if args.max_tokens < 1 or (args.limit is not None and args.limit < 1):
        raise UserError("--max-tokens and --limit are 1 or more")
    if args.benchmark and (args.measures or not args.data):
        raise UserError(
            f"--benchmark {args.benchmark}: its table is named with --data, and --measures are not for it"
        )
    if not coordination.is_leader():
        mute()
    with coordination.process_group():
        if args.log_probs:
            write_log_probs(args)
            return
        if (
            args.data
            or CheckpointModel.open(args.model, args.overrides, trust=args.trust).config.data.chat
        ):
            if args.swap:
                raise UserError("--swap goes with a run's embedded questions alone; leave it out")
            evaluate_conversations(args)
            return
        scores = evaluate(args.model, args.split, args.swap, args.overrides, args.step, args.trust)
    if args.json:
        print_lines(json.dumps(scores))
        return
    swapped = f", with the {args.swap} items of other samples" if args.swap else ""
    print_lines(
        f"{args.model} after {scores['step']} steps{swapped}", *score_table(scores, args.split)
    )


if __name__ == "__main__":
    exit_process(run_command(main))
