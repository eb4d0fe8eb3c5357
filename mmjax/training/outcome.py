"""Describe how a run scores, ends or is interrupted, and what to try next."""

from __future__ import annotations

from pathlib import Path

from mmjax.config import Config, EmbeddedSource
from mmjax.console import table
from mmjax.inference.evaluation import Evaluator
from mmjax.runtime.run_dir import path_words

ACCURACY = "rewards/accuracies"  # of pairs of answers


def score_line(scores: dict[str, float]) -> str:
    """Format the exact match of families and the loss on one line; names are those of metrics.jsonl."""
    names = {name.partition("/")[2]: value for name, value in scores.items()}
    families = {
        n.removeprefix("exact_match_"): v for n, v in names.items() if n.startswith("exact_match_")
    }
    matches = "  ".join(
        f"{name} {value:.3f}" for name, value in families.items() if "." not in name
    )
    parts = [f"exact match:  {matches}"] if matches else []
    parts += [f"loss {names['loss']:.4g}"] if "loss" in names else []
    return "  ".join(
        parts + ([f"chosen preferred {names[ACCURACY]:.1%}"] if ACCURACY in names else [])
    )


def score_table(scores: dict[str, float], split: str = "test") -> list[str]:
    """Format all scores, one family with its tasks per line."""
    lines = []
    for key, value in scores.items():
        name = key.removeprefix("exact_match_")
        if key.startswith("exact_match_") and "." not in name:
            tasks = {k.split(".")[1]: v for k, v in scores.items() if k.startswith(f"{key}.")}
            guessed = (
                f"  (guessed blind {scores[f'chance_{name}']:.3f})"
                if f"chance_{name}" in scores
                else ""
            )
            by_task = "  ".join(f"{task} {v:.2f}" for task, v in tasks.items())
            lines.append((name, f"{value:.3f}{guessed}", by_task))
    loss = [f"loss {scores['loss']:.4g} of the {split} split"] if "loss" in scores else []
    if "drawn_as_asked" in scores:
        loss.append(
            f"{scores['drawn_as_asked']:.1%} of what the {split} split asks for is on the images made"
        )
    if ACCURACY in scores:
        loss.append(
            f"the chosen answer preferred in {scores[ACCURACY]:.1%} of the pairs of the {split} split"
        )
    if not lines:
        return loss
    return [
        f"exact match on {int(scores['samples'])} questions of the {split} split",
        *table(lines),
        *loss,
    ]


def describe_interruption(run: Path, done: int, saved: int) -> list[str]:
    """Say after how many steps a run was interrupted, what of it is saved, and how to go on."""
    so_far = f"step {saved} is saved" if saved else "nothing is saved yet"
    again = "" if saved else " from the beginning"
    return [
        f"interrupted after step {done}; {so_far}; go on{again} with python -m mmjax.train --resume {path_words(run)}"
    ]


def next_commands(run: Path, config: Config, evaluator: Evaluator) -> list[str]:
    """Suggest commands for a finished run: those that work for it."""
    path = path_words(run)
    commands = [
        (f"tensorboard --logdir {path}", "every metric of every step (pip install tensorboard)"),
        (f"python -m mmjax.report {path}", "its curves, rows and worst samples on one page"),
        (
            f"python -m mmjax.train --resume {path} --show",
            "its config, and everything that can be changed",
        ),
    ]
    # Conversations are asked, other samples scored.
    count = evaluator.questions if config.data.chat else lambda split: len(evaluator.metrics(split))
    if split := next((split for split in ("test", "validation") if count(split)), ""):
        words = f"{path} --split=validation" if split == "validation" else path
        swaps = all(isinstance(source, EmbeddedSource) for source in config.data.sources.values())
        encoder = next(iter(config.model.encoders), "")
        blind = (
            f", or with --swap={encoder}: with another sample's items" if encoder and swaps else ""
        )
        commands.insert(0, (f"python -m mmjax.evaluate {words}", f"score it again{blind}"))
    return ["try next", *table(commands)]
