"""Run a cluster's planned steps rank by rank on one device: ``python -m mmjax.rehearse CONFIG cluster=h100x8x8``.

Each rank's programs run with its own rows, one rank after the other; the time of what ranks send to
each other is planned. It says which rank is slowest, how long the others wait for it, and how long a
step takes, with balance ``none``, ``llm`` and ``post``, beside what the plan says.
``cluster=herexNODESxCOUNT`` is a cluster of such devices as the one at hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.forecast import forecast_run
from mmjax.autotune.rehearsal import rehearse
from mmjax.config.other_names import parse_words
from mmjax.console import print_lines, print_note
from mmjax.errors import CommandParser, UserError, command_parser, exit_process, run_command
from mmjax.training.describe_rehearsal import describe_rehearsals, rehearsal_numbers
from mmjax.training.plan_inputs import add_plan_options, compile_forecast, open_plan_inputs

SLOWEST = 2  # ranks that run by default: of those whose rows attend least and most


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_words(_parser(), argv)
    ranks = _parse_ranks(args.ranks)
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: give at least 1")
    inputs = open_plan_inputs(args.words, args.lengths, args.measured)
    if "price" in inputs.options:
        raise UserError(f"price={inputs.options['price']}: mmjax.plan says what a run costs")
    devices = aot_devices(inputs.cluster) if args.compile else None
    index, weights, _, reader = inputs.lengths
    forecast = forecast_run(inputs.config, inputs.cluster, index, weights, inputs.measure_speed)
    device = jax.devices()[0]
    rehearsals = {}
    for kind, planned in forecast.by_balance.items():
        print_note(f"rehearse: balance {kind} on {device.device_kind}")
        rehearsals[kind] = rehearse(planned, reader, device, args.steps, ranks)
    compiled = None if devices is None else compile_forecast(forecast.chosen, devices)
    if args.json:
        print_lines(json.dumps(rehearsal_numbers(rehearsals, compiled)))
    else:
        balance = inputs.config.batch.balance.kind
        print_lines(*describe_rehearsals(rehearsals, balance, device, compiled))


def _parse_ranks(text: str) -> int | None:
    """Return how many ranks run in each microbatch; None: all."""
    if text in ("slowest", "all"):
        return SLOWEST if text == "slowest" else None
    if not text.isdecimal() or int(text) < SLOWEST:
        raise UserError(f"--ranks {text}: give slowest, all, or a number of at least {SLOWEST}")
    return int(text)


def _parser() -> CommandParser:
    """Make the parser of the command line."""
    parser = command_parser("rehearse", __doc__)
    words = "a config's file or name (default: tiny_omni); cluster=DEVICExNODESxCOUNT"
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG | cluster=h100x8x8 | a.b=value", help=words
    )
    parser.add_argument(
        "--ranks",
        default="slowest",
        metavar="slowest|all|N",
        help="that run in each microbatch: those whose rows attend least and most, all, or N from one to the other; "
        "seconds of the rest are interpolated",
    )
    parser.add_argument("--steps", type=int, default=1, help="of the run's first ones")
    add_plan_options(parser)
    return parser


if __name__ == "__main__":
    exit_process(run_command(main))
