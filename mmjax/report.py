"""See how a run went, on one page: ``python -m mmjax.report RUN [RUN2 ...] [--out report.html]``.

Curves of the runs beside each other, how full rows were and how balanced ranks were, where a step's
time goes, when a pipeline's passes run, a packed row with its images and clips, the samples with
the largest losses, skipped samples and every launch. The page is one file that needs no network,
made from run folders and their data without an accelerator, also while a run trains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmjax.console import print_lines, size
from mmjax.errors import check_output, command_parser, exit_process, run_command
from mmjax.runtime.run_trust import HELP as TRUST_HELP


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser("report", __doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folders that mmjax.train printed"
    )
    parser.add_argument("--out", type=Path, help="the page (report.html in the first run's folder)")
    parser.add_argument("--trust", action="store_true", help=TRUST_HELP)
    args = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    path = report(args.runs, args.out, args.trust)
    print_lines(f"report {path} ({size(path.stat().st_size)})")


def report(paths: Sequence[Path], out: Path | None = None, trust: bool = False) -> Path:
    """Write the page of these runs, and return its path. Raises UserError where one is no run.

    trust: execute and fetch what their configs say, whoever wrote them.
    """
    # import JAX, which reads the variable that main sets
    from mmjax.reporting.page import page_of, write_page
    from mmjax.reporting.run import read_runs

    runs = read_runs(paths, trust=trust)
    out = out or runs[0].folder.path / "report.html"
    check_output("--out", out, (".html",))
    write_page(page_of(runs), out)
    return out


if __name__ == "__main__":
    exit_process(run_command(main))
