"""Score a run on held-out questions: ``python -m mmjax.evaluate RUN [--json] [--swap=vision]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from mmjax.config import Config, MeshConfig
from mmjax.config_files import callbacks_of, edit
from mmjax.data.embedded import EmbeddedDataset, SwappedItems
from mmjax.data.prompts import QuestionSource
from mmjax.errors import UserError, run_command
from mmjax.models.model import Model
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.training.announce import score_table
from mmjax.training.checkpoint import newest, restore_parameters
from mmjax.training.console import say
from mmjax.training.devices import choose_devices, topology_of
from mmjax.training.evaluation import Evaluator, Scores, chance, exact_match, question_sources
from mmjax.training.programs import keep_programs
from mmjax.training.run_folder import RunFolder
from mmjax.training.state import parameter_shardings


def evaluate(run: Path, split: str = "test", swap: str = "", overrides: Sequence[str] = ()) -> Scores:
    """Scores of the newest checkpoint of a run, from its folder alone: greedy decoding, one question a prompt.

    Beside `exact_match_*` and `samples`, `step` is the number of updates that the checkpoint has seen. `swap` names an
    encoder whose items come from another sample: of the questions that need them, what is still answered right was
    guessed, and should be no more than `chance_*`.
    """
    folder = RunFolder(run)
    config = edit(folder.read_config(), overrides)
    sources = question_sources(config, (split,), folder.path)
    if not sources:
        raise UserError(f"{run}: none of its sources has questions to score")
    if swap:
        sources = {name: _swapped(name, source, swap, config) for name, source in sources.items()}
    step = newest(folder.checkpoints)
    mesh = make_mesh(MeshConfig(), choose_devices(config.device))
    keep_programs(folder.programs)
    functions, rules = callbacks_of(config.model, folder.path), ShardingRules()
    model = Model.build(config.model, jnp.dtype(config.training.precision), functions=functions)
    params = restore_parameters(folder.checkpoints, step, model, parameter_shardings(model, mesh, rules))
    evaluator = Evaluator(model, mesh, rules, sources, config, topology_of(mesh, MeshConfig()))
    answered = evaluator.ask_all(params, split)
    if not swap:
        return {"step": step} | exact_match(answered)
    blind = [a for a in answered if swap in a.needs]
    return {"step": step} | exact_match(blind) | chance(blind)


def _swapped(name: str, source: QuestionSource, swap: str, config: Config) -> QuestionSource:
    if swap not in config.model.encoders:
        known = ", ".join(config.model.encoders) or "none"
        raise UserError(f"--swap={swap} names no encoder of this run; it has {known}")
    if not isinstance(source, EmbeddedDataset):
        raise UserError(
            f"--swap: {name} is not an embedded source, and only their items can be swapped; leave --swap away"
        )
    return SwappedItems(source, (swap,))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mmjax.evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="changes to the run's config, such as device=cpu"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--swap", default="", metavar="ENCODER", help="show another sample's images or clips")
    args = parser.parse_intermixed_args(argv)
    scores = evaluate(args.run, args.split, args.swap, args.overrides)
    if args.json:
        say(json.dumps(scores))
        return
    say(
        f"{args.run} after {scores['step']} steps"
        + (f", with the {args.swap} items of other samples" if args.swap else "")
    )
    say(*score_table(scores, args.split))


if __name__ == "__main__":
    sys.exit(run_command(main))
