"""Say what is read of a checkpoint, and try it: ``python -m mmjax.families [FOLDER] [--try] [a.b=value ...]``.

Without a folder: the families that are read. Of a folder: its modules, and each tensor that is
missing, of another shape, or of nobody. ``--try`` computes a prompt, with an image or a clip where
the model takes one, here and in transformers, which must be installed, and compares tokens, logits
and the answer. The exit code is 1 where something is missing or differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import soundfile
from PIL import Image

from mmjax.batch import WeightedSlots
from mmjax.config.other_names import parse_words
from mmjax.console import count, print_lines, table
from mmjax.cost.table import parameters
from mmjax.data.plan.placement import Topology
from mmjax.data.sample import Medium, Sample, SampleLengths, Source, Text
from mmjax.disk import read_json
from mmjax.errors import UserError, command_parser, exit_process, run_command
from mmjax.generate import read_media
from mmjax.hf.class_defaults import multimodal_classes
from mmjax.hf.families import CHECKPOINTS, from_hf
from mmjax.hub import checkpoint_folder
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.generator import Generator
from mmjax.inference.loaded_model import choose_mesh, user_prompts
from mmjax.inference.prompt_rows import PromptRows
from mmjax.inference.prompts import make_prompt
from mmjax.inference.transformers_process import Computed, Request, ask_transformers
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.weights import folder_sources

# Logits may differ by so much of the largest: by rounding.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.05}
QUESTION = "What is this?"
IMAGE_SIZE = 214, 301  # odd, so that it is resized or padded
CLIP = 16_000, 1.3  # samples a second, and seconds
DRAWN_TOKENS = 24  # where a folder has no chat format
MAX_TOKENS = 8  # of the answer


class Check(NamedTuple):
    """One thing that was compared, and whether it is right."""

    name: str
    text: str
    right: bool


def list_families() -> list[str]:
    """Format the families that are read, and the nearest to each multimodal one that is not."""
    unread: dict[str, list[str]] = {}
    for kind, of_class in multimodal_classes().items():
        if kind not in CHECKPOINTS:
            unread.setdefault(of_class["nearest"], []).append(kind)
    return [
        f"read: {' '.join(CHECKPOINTS)}",
        "not read, behind the nearest that is:",
        *table([(nearest, " ".join(kinds)) for nearest, kinds in sorted(unread.items())]),
    ]


def _kind(folder: Path) -> str:
    return read_json(folder / "config.json")["model_type"]


def check_weights(folder: Path) -> Iterator[Check]:
    """Compare the tensors of a folder with those that its model has. Raises UserError where the config is not read."""
    model = Model.build(from_hf(folder), jnp.float32)
    for sources in folder_sources(model):
        count = len(sources.folder.tensors)
        yield Check("tensors", f"{count} in the folder", not sources.problems)
        for problem in sources.problems:
            yield Check("tensor", problem, False)


def draw_media(folder: Path, kinds: Sequence[Medium]) -> dict[Medium, list[Path]]:
    """Write an image of random blocks and a clip of a rising tone into a folder, as far as they are asked for."""
    files: dict[Medium, list[Path]] = {}
    if "image" in kinds:
        blocks = np.random.default_rng(0).integers(0, 256, (7, 9, 3), np.uint8)
        files["image"] = [folder / "image.png"]
        Image.fromarray(blocks).resize(IMAGE_SIZE[::-1], Image.Resampling.BICUBIC).save(
            files["image"][0]
        )
    if "audio" in kinds:
        rate, seconds = CLIP
        time = np.arange(int(rate * seconds)) / rate
        files["audio"] = [folder / "clip.wav"]
        soundfile.write(files["audio"][0], 0.3 * np.sin(time * (2000 + 3000 * time)), rate)
    return files


class DrawnTokens:
    """One prompt of tokens alone, as a `Source`."""

    def __init__(self, vocab: int) -> None:
        self.tokens = np.random.default_rng(0).integers(1, vocab, DRAWN_TOKENS, np.int32)

    def __len__(self) -> int:
        return 1

    def fingerprint(self) -> str:
        return "drawn"

    def facts(self, index: int) -> SampleLengths:
        return SampleLengths(DRAWN_TOKENS, ())

    def sample(self, index: int) -> Sample:
        return Sample((Text(self.tokens, np.zeros(DRAWN_TOKENS, np.float32)),))

    def item(self, index: int, number: int) -> np.ndarray:
        raise IndexError(number)


def compute(
    served: CheckpointModel, prompts: Source, ends: Sequence[int], max_tokens: int
) -> Computed:
    """Compute the logits of a source's only prompt, and the most likely answer."""
    mesh_config, devices = choose_mesh(served.config)
    mesh, rules = make_mesh(mesh_config, devices), ShardingRules.of(mesh_config)
    model, params = served.load(mesh, rules)
    [(_, batch)] = PromptRows(prompts, model.config, Topology(), 0).batches()
    with activations_on(mesh, rules):
        logits = jax.jit(model.logits)(params, put_rows(batch, mesh, rules))
    n = int((batch.text.sample[0] >= 0).sum())
    ids = batch.text.token[0].copy()
    for slots in batch.text.slots.values():
        ids[(slots.slot.max(-1) if isinstance(slots, WeightedSlots) else slots)[0] >= 0] = -1
    generator = Generator(model, mesh, rules, ends, lambda tokens: "", max_tokens=max_tokens)
    (answer,) = generator.answers(params, prompts)
    return Computed(ids[:n], np.asarray(logits[0, :n], np.float32), answer.tokens, "")


def compare(here: Computed, there: Computed, rounding: float) -> Iterator[Check]:
    """Compare a prompt's tokens, its logits and its answer; what follows from another prompt is not compared."""
    lengths = len(here.ids), len(there.ids)
    same = lengths[0] == lengths[1] and bool(np.all((here.ids == there.ids) | (here.ids < 0)))
    text = f"{lengths[0]} tokens" if same else f"{lengths[0]} tokens here, {lengths[1]} there"
    yield Check("prompt", text, same)
    if not same:
        return
    largest = float(np.abs(there.logits).max())
    difference = float(np.abs(here.logits - there.logits).max()) / max(largest, 1.0)
    text = f"differ by {difference:.1e} of the largest; {rounding:g} is rounding"
    yield Check("logits", text, difference <= rounding)
    equal = list(here.answer) == list(there.answer)
    text = f"{len(here.answer)} tokens" if equal else f"{here.answer} here, {there.answer} there"
    yield Check("answer", text, equal)


def try_folder(
    folder: Path,
    question: str,
    media: Mapping[Medium, Sequence[Path]],
    max_tokens: int,
    overrides: Sequence[str] = (),
) -> Iterator[Check]:
    """Compare a prompt here and in transformers. media: by default one of each kind that the model takes.

    A folder without tokenizer or chat template is asked random tokens. Raises UserError where
    transformers is not installed, or fails.
    """
    served = CheckpointModel.open(folder, ["training.precision=float32", *overrides])
    config = served.config
    with tempfile.TemporaryDirectory() as place:
        kinds = [e.modality for e in config.model.encoders.values()]
        files = dict(media) or draw_media(Path(place), kinds)
        request = Request(
            str(served.path),
            multimodal_classes().get(_kind(served.path), {}).get("class", "AutoModelForCausalLM"),
            config.training.precision,
            max_tokens,
            question,
            {kind: str(path) for kind, paths in files.items() for path in paths},
        )
        prompts: Source
        try:
            chat = served.chat()
        except UserError as error:
            yield Check("chat", f"none, so random tokens are compared: {error}", True)
            prompts = DrawnTokens(config.model.llm.vocab)
            request = replace(request, media={}, tokens=prompts.tokens.tolist())
        else:
            read = read_media(files, config.model.encoders, config.data.limits)
            prompts = user_prompts(served, make_prompt(question, read))
            request = replace(request, ends=chat.ends)
        there = ask_transformers(request)
        yield Check("transformers", there.version, True)
        here = compute(served, prompts, request.ends, max_tokens)
    yield from compare(here, there, ROUNDING[config.training.precision])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = command_parser("families", __doc__)
    parser.add_argument(
        "folder", nargs="?", help="of a Hugging Face checkpoint, or its name on the Hub"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="such as training.precision=bfloat16"
    )
    parser.add_argument(
        "--try", action="store_true", dest="tried", help="compare with transformers"
    )
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f'"{QUESTION}"')
    for kind in ("image", "audio"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help="instead of a drawn one")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=MAX_TOKENS,
        metavar="N",
        help=f"of the answer ({MAX_TOKENS})",
    )
    args = parse_words(parser, argv)
    if args.folder is None:
        print_lines(*list_families())
        return 0
    folder = checkpoint_folder(args.folder)
    model = from_hf(folder)
    counts = [(name, count(n) + " parameters") for name, n in parameters(model).items()]
    print_lines(f"{folder}: {_kind(folder)}", *table(counts))
    wrong = 0
    media = {kind: [file] for kind in get_args(Medium) if (file := getattr(args, kind, None))}
    checks = [check_weights(folder)]
    if args.tried:
        checks.append(try_folder(folder, args.question, media, args.max_tokens, args.overrides))
    for some in checks:
        for check in some:
            print_lines(f"  {check.name}{'' if check.right else ' WRONG'}: {check.text}")
            wrong += not check.right
        if wrong:
            return 1
    return 0


if __name__ == "__main__":
    exit_process(run_command(main))
