"""See what a run will do, without its hardware: ``python -m mmjax.plan CONFIG cluster=h100x8x8 [a.b=value ...]``.

``cluster=here`` is this machine; with ``--profile``, the layers' times are measured on it.
``units=auto`` looks for the fastest units, devices for each module, and compares them with the best
single mesh. ``--measured FILE`` states rates that were measured on such a cluster, in place of
those that plans assume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.choose_units import choose_units
from mmjax.autotune.forecast import Forecast, RunForecast, forecast_best_mesh, forecast_run
from mmjax.autotune.layer_profile import MeasureSpeed
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.config import Config
from mmjax.config.codec import key_of
from mmjax.config.loading import config_parameters, load
from mmjax.config.other_names import parse_words
from mmjax.console import print_lines
from mmjax.data.plan.length_index import LengthIndex
from mmjax.errors import (
    PLOT_SUFFIXES,
    CommandParser,
    UserError,
    check_output,
    command_parser,
    exit_process,
    run_command,
)
from mmjax.planning.hardware import Cluster
from mmjax.planning.plan_file import plan_text
from mmjax.planning.schedules import schedule_name
from mmjax.runtime.run_trust import sign_text
from mmjax.training.describe_plan import describe_plan, plan_numbers
from mmjax.training.plan_inputs import add_plan_options, compile_forecast, open_plan_inputs

AUTO = "units=auto"  # in place of a config's units: those of the fastest allocation


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_words(_parser(), argv)
    if args.out is not None:
        check_output("--out", args.out)
    if args.picture is not None:
        check_output("--picture", args.picture, PLOT_SUFFIXES)
    chooses = AUTO in args.words
    inputs = open_plan_inputs(
        [word for word in args.words if word != AUTO], args.lengths, args.measured, args.profile
    )
    path, config, cluster = inputs.path, inputs.config, inputs.cluster
    price = _parse_price(inputs.options.get("price"))
    devices = aot_devices(cluster) if args.compile else None
    index, weights, source, _ = inputs.lengths
    forecast, compared = _forecast(
        config, cluster, (index, weights), inputs.measure_speed, chooses=chooses
    )
    plan = forecast.chosen.plan
    planned = apply_memory_plan(forecast.chosen.config, plan.policies, plan.loss_chunks)
    compiled = None if devices is None else compile_forecast(forecast.chosen, devices)
    if args.json:
        print_lines(json.dumps(plan_numbers(forecast, price, compiled, compared)))
    else:
        print_lines(*describe_plan(forecast, source, price, compiled, compared))
    if args.picture is not None:
        _plot(args.picture, forecast)
    if args.out is not None:
        _write_plan(args.out, path, config, inputs.overrides, planned, forecast.chosen)


def _forecast(
    config: Config,
    cluster: Cluster,
    lengths: tuple[LengthIndex, list[float]],
    measure_speed: MeasureSpeed,
    *,
    chooses: bool,
) -> tuple[RunForecast, list[Forecast | None]]:
    """Forecast a run as it is configured, or as `units=auto` finds it fastest, and what it is compared with."""
    arguments = config, cluster, *lengths
    if not (config.units or chooses):
        return forecast_run(*arguments, measure_speed), []
    if not chooses:  # units that a person wrote are wanted
        forecast = forecast_run(*arguments, measure_speed)
        return forecast, [forecast_best_mesh(*arguments, forecast.chosen.speed), forecast.chosen]
    units, mesh = choose_units(*arguments, measure_speed)
    compared = [mesh, *(forecast.chosen for forecast in units)]
    if units and (mesh is None or units[0].chosen.seconds < mesh.seconds):
        return units[0], compared
    if mesh is None:
        raise UserError(
            f"neither one mesh nor any units fit {cluster}; use more devices, or a smaller model"
        )
    return forecast_run(mesh.config, cluster, *lengths, measure_speed), compared


def _plot(path: Path, forecast: RunForecast) -> None:
    """Draw memory, time and each rank's work; of units, the passes of a step."""
    chosen = forecast.chosen
    if not chosen.config.units:
        # matplotlib looks for fonts when it is first imported
        from mmjax.reporting.plan_plot import plot_plan

        plot_plan(path, forecast)
        return
    from mmjax.reporting.timeline_plot import plot_timelines  # as above

    config = chosen.config
    heading = f"planned: {schedule_name(config)}, {config.batch.microbatches} microbatches"
    subtitle = f"one step on {chosen.cluster}, transfers included"
    names = [stage.name for stage in chosen.plan.stages]
    plot_timelines(path, config.name, subtitle, {heading: chosen.run_time.timeline}, names)


def _write_plan(
    out: Path, path: Path, config: Config, words: Sequence[str], planned: Config, forecast: Forecast
) -> None:
    """Write the plan file of a config, loaded from `path` with these words. planned: with its remat policies."""
    if not forecast.plan.fits:
        raise UserError(
            f"--out {out}: nothing is written, for the run does not fit; see what limits it"
        )
    if not planned.units:
        # What the tokens between layers do is chosen for tensor-parallel devices alone.
        way = planned.mesh.sequence_parallel if forecast.mesh["tensor"] > 1 else "auto"
        planned = replace(
            planned, mesh=replace(planned.mesh, **forecast.mesh, sequence_parallel=way)
        )
    parameters = config_parameters(path)
    arguments = [word for word in words if key_of(word) in parameters]
    overrides = [word for word in words if key_of(word) not in parameters]
    unnamed = [word for word in words if key_of(word) != "name" or word in arguments]
    name = config.name if unnamed == list(words) else load(path, unnamed).name
    expected = {"seconds": forecast.seconds, "mfu": forecast.mfu, "memory": forecast.plan.device}
    text = plan_text(planned, config, name, arguments, overrides, str(forecast.cluster), expected)
    out.write_text(sign_text(text))


def _parser() -> CommandParser:
    """Make the parser of the command line."""
    parser = command_parser("plan", __doc__)
    words = (
        "a config's file or name (default: tiny_omni); cluster=DEVICExNODESxCOUNT, or here: this machine; price=N, of "
        "a device for an hour"
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG | cluster=h100x8x8 | price=2.5 | a.b=value", help=words
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="plan.json",
        help="write a plan that mmjax.train takes as plan=plan.json",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="time layers on this machine (cluster=here); kept for the next time",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="F.png|svg",
        help="draw memory, time and each rank's work; of units, a step's passes",
    )
    add_plan_options(parser)
    return parser


def _parse_price(text: str | None) -> float | None:
    """Parse `price=`, the cost of a device for an hour. Raises UserError for anything but a number of 0 or more."""
    if text is None:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not price >= 0:  # "nan" parses, and is refused here
        raise UserError(f"price={text}: give what a device costs for an hour, as a number")
    return price


if __name__ == "__main__":
    exit_process(run_command(main))
