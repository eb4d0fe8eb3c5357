"""Write a config that fits your devices: ``python -m mmjax.init mine.yaml [KEY=VALUE ...]``.

It asks on the terminal for what is not given: ``checkpoint=FOLDER``, or a config of mmjax's to
train from nothing; ``data=FILE``; ``cluster=h100x8``, ``24GBx2`` (two devices of this machine's
kind with 24 GB each) or ``here``; ``train=llm|lora|connector|all``; ``length=1000`` updates or
``3epochs``. ``images=FOLDER``, ``audio=`` and ``videos=`` say where media are, and ``a.b=value``
sets any other key. The planner chooses the mesh, rows and microbatches; a config that does not fit
is not written. A file that ends in .py is written as Python.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mmjax.autotune.forecast import RunForecast, forecast_best_mesh, forecast_run
from mmjax.autotune.memory_plan import describe_shortage
from mmjax.config import Config
from mmjax.config.assignment import assign, value_at
from mmjax.config.codec import did_you_mean, encode, key_of, walk
from mmjax.config.loading import apply_overrides, load, shipped_configs
from mmjax.config.meanings import meaning
from mmjax.config.other_names import parse_words
from mmjax.console import print_lines
from mmjax.data.sources.opening import FOLDERS, cache_folder, source_of, split_data_set
from mmjax.errors import UserError, check_output, command_parser, exit_process, run_command
from mmjax.hf.families import frozen
from mmjax.training.describe_plan import describe_plan
from mmjax.training.plan_inputs import PlanInputs, open_plan_inputs

# what is asked, and the answer where there is none
QUESTIONS = {
    "checkpoint": ("a Hugging Face folder or OWNER/NAME, or a config of mmjax's", ""),
    "data": ("conversations: a file, or a pattern of shards, as mmjax.index reads them", ""),
    "cluster": ("devices: h100x8, 24GBx2, or here, this machine's", "here"),
    "train": ("llm (with the connector), lora, connector or all", "llm"),
    "length": ("updates, such as 1000, or passes over the data, such as 3epochs", "1epochs"),
}
# by what is trained, the config that does so, or nearly
TRAINED = {
    "llm": "llava_style",
    "lora": "llava_lora",
    "connector": "llava_style",
    "all": "llava_style",
}
# what the planner chooses, where none of it is set
CHOSEN = (
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.context",
    "batch.rows",
    "batch.micro",
    "units",
)
COMMENT_COLUMN = 44


class Draft(NamedTuple):
    """Hold a config as edits of a shipped one."""

    base: str
    arguments: Mapping[str, str]
    settings: Sequence[str]  # the user's own
    original: Config  # the base with its arguments and the settings
    config: Config


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("init", __doc__)
    parser.add_argument("words", nargs="*", metavar="FILE.yaml|py | KEY=VALUE", help="see above")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    args = parse_words(parser, argv)
    out = Path(next((word for word in args.words if "=" not in word), "mine.yaml"))
    check_output("FILE", out, (".yaml", ".yml", ".py"))
    if out.stem in shipped_configs():
        raise UserError(f"{out}: a config of mmjax's has this name; choose another")
    if out.exists() and not args.overwrite:
        raise UserError(f"{out} is there already; name another file, or say --overwrite")
    words = [word.partition("=") for word in args.words if "=" in word]
    known = (*QUESTIONS, *FOLDERS.values())
    answers = {key: text for key, _, text in words if key in known}
    settings = [f"{key}={text}" for key, _, text in words if key not in known]
    answers |= {key: _ask(key, answers) for key in QUESTIONS if key not in answers}
    memory = re.fullmatch(r"(\d+)gbx?(\d*)", answers["cluster"].lower())
    if memory:
        settings.append(f"mesh.memory={memory[1]}")
        answers["cluster"] = f"herex1x{memory[2] or 1}"
    draft = make_draft(answers, settings, out.stem)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "draft.yaml"
        path.write_text(yaml_text(draft))
        inputs = open_plan_inputs([str(path), f"cluster={answers['cluster']}"])
        config, forecast = choose(draft, inputs)
    text = yaml_text if out.suffix != ".py" else python_text
    out.write_text(text(draft._replace(config=config)))
    print_lines(*describe_plan(forecast, inputs.lengths.source))
    print_lines(f"wrote  {out}; train it with python -m mmjax.train {out}")


def _ask(key: str, answers: Mapping[str, str]) -> str:
    """Ask a question on the terminal, where there is one. Raises UserError where nothing answers it."""
    question, default = QUESTIONS[key]
    of_its_own = answers.get("checkpoint") in shipped_configs() and key != "cluster"
    if of_its_own:
        default = ""
    answer = ""
    if sys.stdin.isatty():
        hint = default or ("its own" if of_its_own else "")
        answer = input(f"{key}: {question}{f' [{hint}]' if hint else ''}: ").strip()
    if not (answer or default or of_its_own):
        raise UserError(f"say {key}=...: {question}")
    return answer or default


def make_draft(answers: Mapping[str, str], settings: Sequence[str], name: str) -> Draft:
    """Edit the shipped config that trains what is wanted. Raises UserError for an answer that is none."""
    checkpoint, data, trained = (answers[key] for key in ("checkpoint", "data", "train"))
    folders = {key: answers[key] for key in FOLDERS.values() if key in answers}
    base = TRAINED.get(trained, "")
    arguments = {"checkpoint": checkpoint, "data": split_data_set(data)[0], **folders}
    if checkpoint in shipped_configs():
        if trained:
            raise UserError(f"train={trained}: {checkpoint} says what it trains; leave it out")
        base, arguments = checkpoint, {}
    elif not base:
        raise UserError(f"train={trained}{did_you_mean(trained, TRAINED)}")
    words = [f"{key}={text}" for key, text in arguments.items()]
    original = load(base, [*words, *settings])
    config = replace(original, name=name)
    source_name = next(iter(config.data.sources), "chat")
    if data and f"data.sources.{source_name}" not in map(key_of, settings):
        source = source_of(data, "data", cache_folder(config.data), **folders)
        config = replace(config, data=replace(config.data, sources={source_name: source}))
    freeze = {"all": [], "connector": ["llm", *config.model.encoders]}
    if trained in freeze:
        config = replace(config, model=frozen(config.model, freeze[trained]))
    lines = _length_lines(answers["length"])
    return Draft(base, arguments, settings, original, apply_overrides(config, [*lines, *settings]))


def _length_lines(text: str) -> list[str]:
    """Return what sets a run's length; its warm-up is known once the data is."""
    length = re.fullmatch(r"(\d*\.?\d+) ?(epochs?)?", text)
    if text and (length is None or not float(length[1])):
        raise UserError(f"length={text}: write updates, such as 1000, or passes, such as 3epochs")
    if length is None:
        return []
    key = "training.epochs" if length[2] else "training.steps"
    return [f"{key}={length[1]}", "schedule.warmup=0"]


def choose(draft: Draft, inputs: PlanInputs) -> tuple[Config, RunForecast]:
    """Choose the fastest mesh that fits, with its rows and microbatches. Raises UserError where none does."""
    config, original = draft.config, draft.original
    lengths = inputs.lengths[:2]
    if not any(key_of(line).startswith(CHOSEN) for line in draft.settings):
        # that of the base may not go with these devices
        config = replace(config, units={}, mesh=replace(config.mesh, data=1, fsdp=-1))
        speed = inputs.measure_speed({})
        if best := forecast_best_mesh(config, inputs.cluster, *lengths, speed):
            rows, microbatches = best.config.batch.rows, best.config.batch.microbatches
            batch = replace(config.batch, rows=rows, microbatches=microbatches)
            mesh = replace(config.mesh, data=best.mesh["data"], fsdp=best.mesh["fsdp"])
            config = replace(config, batch=batch, mesh=mesh)
    forecast = forecast_run(config, inputs.cluster, *lengths, inputs.measure_speed)
    plan = forecast.chosen.plan
    if not plan.fits:
        reasons = (describe_shortage(plan), forecast.longest, forecast.remedy)
        raise UserError(
            f"it does not fit {inputs.cluster}: {'; '.join(filter(None, reasons))}. Nothing is written; take more "
            "devices, or train less (train=lora)"
        )
    if original.training.steps and config.schedule != original.schedule:
        warmup = original.schedule.warmup * forecast.steps // original.training.steps
        config = apply_overrides(config, [f"schedule.warmup={warmup}", *draft.settings])
    return config, forecast


def _edits(draft: Draft) -> Iterator[tuple[str, str, str]]:
    """Yield what a draft sets in its base: keys, texts and meanings."""
    tree, edited = (encode(Config, config, "") for config in (draft.original, draft.config))
    leaves = list(walk(Config, edited))
    meanings = {leaf.key: meaning(leaf) for leaf in leaves}
    for line in draft.settings:
        key, _, text = line.partition("=")
        yield key, text, meanings.get(key, "")
    for leaf in leaves:
        if value_at(tree, leaf.key) != value_at(edited, leaf.key):
            assign(Config, tree, f"{leaf.key}={leaf.text}")
            yield leaf.key, leaf.text, meanings[leaf.key]


def yaml_text(draft: Draft) -> str:
    """Format a draft as YAML."""
    lines = [
        "# Written by mmjax.init. All keys: python -m mmjax.train FILE --show",
        f"base: {draft.base}  # {shipped_configs()[draft.base]}",
    ]
    if draft.arguments:
        lines.append("arguments:")
        lines += [f"  {key}: {json.dumps(text)}" for key, text in draft.arguments.items()]
    for key, text, about in _edits(draft):
        plain = re.fullmatch(r'".*"|[\w./()-][\w./,()+-]*', text)
        line = f"{key}: {text if plain else json.dumps(text)}"
        lines.append(f"{line:<{COMMENT_COLUMN}}  # {about}")
    return "\n".join(lines) + "\n"


def python_text(draft: Draft) -> str:
    """Format a draft as Python."""
    edits = [f"    {f'{key}={text}'!r},  # {about}\n" for key, text, about in _edits(draft)]
    return f'''"""{shipped_configs()[draft.base]}

Written by mmjax.init. All keys: python -m mmjax.train FILE --show
"""

from mmjax.config import Config
from mmjax.config.loading import apply_overrides, sibling

base = sibling(__file__, {draft.base!r})
ARGUMENTS = {dict(draft.arguments)!r}
EDITS = [
{"".join(edits)}]


def config() -> Config:
    return apply_overrides(base.config(**ARGUMENTS), EDITS)
'''


if __name__ == "__main__":
    exit_process(run_command(main))
