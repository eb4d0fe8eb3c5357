"""Ask a model: ``python -m mmjax.generate RUN|HF_FOLDER [--image x.jpg|--audio y.wav|--video z.mp4] "question"``.

``--out image.png`` has a model with a generator answer with an image.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from mmjax.config import MediaLimits
from mmjax.config.loading import is_override
from mmjax.config.other_names import parse_words
from mmjax.console import print_lines, print_note
from mmjax.data.media.decode import check_media_size
from mmjax.data.media.patches import Encoders
from mmjax.data.sample import BadSample, Medium
from mmjax.data.sources.processors import PROBES, MediaProcessors
from mmjax.errors import BadMedia, UserError, command_parser, exit_process, run_command
from mmjax.inference.checkpoint_model import CheckpointModel
from mmjax.inference.generator import DEFAULT_MAX_TOKENS, Answer, Sampling
from mmjax.inference.image_sampler import ImageSampler, ImageSampling, contact_sheet, write_image
from mmjax.inference.loaded_model import LoadedModel, answer_room, user_prompts
from mmjax.inference.picture_prompts import UserPictureSource, picture_size
from mmjax.inference.prompts import UserPrompt, make_prompt
from mmjax.runtime.run_trust import HELP as TRUST_HELP

EVERY = 4  # tokens between updates of a terminal
# what a character decodes to while a token with its last bytes is still missing
UNFINISHED = "\ufffd"


def generate(
    served: CheckpointModel,
    prompt: UserPrompt,
    sampling: Sampling | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    show: bool = False,
) -> tuple[Answer, float]:
    """Answer one question. Returns the answer and its seconds, without loading the model.

    max_tokens: of the answer, at most. show: stream it to standard output. Raises UserError where
    the question cannot be used, or is too long for the model.
    """
    prompts = user_prompts(served, prompt)
    max_tokens = answer_room(served, prompts, max_tokens)
    loaded = LoadedModel(served)
    start = time.perf_counter()
    answer = read_answer(loaded.answers(prompts, sampling, max_tokens, every=EVERY), show)
    return answer, time.perf_counter() - start


def generate_images(
    served: CheckpointModel,
    prompt: UserPrompt,
    size: tuple[int, int],
    sampling: ImageSampling,
    count: int = 1,
) -> list[np.ndarray]:
    """Make `count` images of (height, width) pixels for one prompt, uint8 `[H, W, C]` each.

    Raises UserError where the prompt cannot be used.
    """
    config = served.config
    prompts = UserPictureSource(
        [prompt] * count,
        served.prompt_format,
        config.model,
        size=size,
        functions=served.functions(),
        limits=config.data.limits,
    )
    try:
        prompts.facts(0)
    except BadSample as bad:
        raise UserError(f"the prompt cannot be used: {bad}") from None
    loaded = LoadedModel(served)
    images = ImageSampler(loaded.model, loaded.mesh, loaded.rules, sampling).images(
        loaded.params, prompts
    )
    return [image.pixels for image in sorted(images, key=lambda image: image.prompt)]


def read_answer(answers: Iterable[Answer], show: bool = False) -> Answer:
    """Return the last state of an answer that grows. show: print it meanwhile."""
    shown = ""
    for answer in answers:
        # The newest token may still change the text before it, or end inside a character: then wait
        # for the next.
        if show and answer.text.startswith(shown) and not answer.text.endswith(UNFINISHED):
            print(answer.text.removeprefix(shown), end="", flush=True)
            shown = answer.text
    if show:
        print(answer.text.removeprefix(shown), flush=True)
    return answer


def read_media(
    files: Mapping[Medium, Sequence[Path]], encoders: Encoders, limits: MediaLimits = MediaLimits()
) -> dict[Medium, list[bytes]]:
    """Read media files and probe their headers.

    Raises UserError for what is no image, clip or video, is beyond the limits, or has no encoder.
    """
    return {
        kind: [read_medium(f"--{kind} {path}", kind, path, encoders, limits) for path in paths]
        for kind, paths in files.items()
        if paths
    }


def read_medium(
    name: str, kind: Medium, path: Path, encoders: Encoders, limits: MediaLimits = MediaLimits()
) -> bytes:
    """Read a media file. Raises UserError, naming it, as `check_medium`, or where it cannot be read."""
    try:
        encoded = path.expanduser().read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    check_medium(name, kind, encoded, encoders, limits)
    return encoded


def check_medium(
    name: str, kind: Medium, encoded: bytes, encoders: Encoders, limits: MediaLimits = MediaLimits()
) -> None:
    """Raise UserError, naming it, for a file that is no medium, is too large or has no encoder."""
    try:
        MediaProcessors(encoders).encoder(kind)
        check_media_size(kind, PROBES[kind](io.BytesIO(encoded)), limits)
    except UserError:
        known = ", ".join(encoders) or "none"
        raise UserError(f"{name}: this model has no encoder for it (it has {known})") from None
    except (BadMedia, OSError) as bad:
        raise UserError(f"{name}: {bad}") from None


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options of all commands that answer questions."""
    parser.add_argument(
        "model", type=Path, help="a run's folder, or that of a Hugging Face checkpoint"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="of a run's checkpoint; by default the newest"
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="a system message before the question"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"of the answer ({DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, is the most likely answer"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K most likely tokens"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest with P in all",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same one draws the same answer")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object an answer: answer, tokens, seconds",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)


def open_model(args: argparse.Namespace) -> tuple[CheckpointModel, Sampling]:
    """Open what the options name, and return how answers are drawn. Raises UserError."""
    if args.max_tokens < 1:
        raise UserError(f"--max-tokens={args.max_tokens}: choose 1 or more")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    return CheckpointModel.open(args.model, args.overrides, args.step, args.trust), sampling


def shows_answers(args: argparse.Namespace) -> bool:
    """Return whether answers are printed while they grow."""
    return sys.stdout.isatty() and not args.json


def print_answer(answer: Answer, seconds: float, args: argparse.Namespace) -> None:
    """Print a whole answer, where `read_answer` has not, and say so where it has no end."""
    if args.json:
        fields = {
            "answer": answer.text,
            "tokens": list(answer.tokens),
            "seconds": round(seconds, 3),
        }
        print_lines(json.dumps(fields))
        return
    if not shows_answers(args):
        print_lines(answer.text)
    if not answer.ended:
        print_note(f"(stopped after {len(answer.tokens)} tokens, before its end; see --max-tokens)")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("generate", __doc__)
    add_answer_options(parser)
    parser.add_argument(
        "question",
        nargs="?",
        help="what to ask; <image>, <audio> and <video> in it are where media stand",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=value",
        help="changes to the config, such as device=cpu",
    )
    kinds = get_args(Medium)
    for kind in kinds:  # --image, --audio and --video
        about = "may be given again"
        parser.add_argument(
            f"--{kind}", type=Path, action="append", default=[], metavar="FILE", help=about
        )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="answer with an image, and write it there"
    )
    parser.add_argument(
        "--size", default="", metavar="HxW", help="of the image, in pixels; by default its only one"
    )
    parser.add_argument("--count", type=int, default=1, metavar="N", help="images on one sheet (1)")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="of sampling an image (20)"
    )
    parser.add_argument(
        "--guidance", type=float, default=4.0, help="towards the prompt; 1 is none (4)"
    )
    args = parse_words(parser, argv)
    if not args.question or is_override(args.question):
        raise UserError(
            f"there is no question; put one behind the model: python -m mmjax.generate {shlex.quote(str(args.model))} "
            '"What is this?" --image FILE'
        )
    served, sampling = open_model(args)
    media = read_media(
        {kind: getattr(args, kind) for kind in kinds},
        served.config.model.encoders,
        served.config.data.limits,
    )
    prompt = make_prompt(args.question, media, args.system)
    if args.out is not None:
        if args.count < 1:
            raise UserError(f"--count={args.count}: choose 1 or more")
        size = picture_size(served.config.model, args.size)
        image_sampling = ImageSampling(args.steps, args.guidance, args.seed)
        images = generate_images(served, prompt, size, image_sampling, args.count)
        try:
            write_image(contact_sheet(images) if images[1:] else images[0], args.out)
        except (OSError, ValueError) as error:
            raise UserError(f"--out {args.out}: {error}") from None
        print_lines(json.dumps({"out": str(args.out)}) if args.json else f"wrote {args.out}")
        return
    show = shows_answers(args)
    answer, seconds = generate(served, prompt, sampling, args.max_tokens, show)
    print_answer(answer, seconds, args)


if __name__ == "__main__":
    exit_process(run_command(main))
