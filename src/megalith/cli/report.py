"""megalith report: writes the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.output import exit_on_error, print_line
from megalith.reporting.report import write_report


def report(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    out: Annotated[Path | None, typer.Option(help="File to write. Default: RUN/report.html.")] = None,
    comparison: Annotated[Path | None, typer.Option(help="JSON of a benchmark to show.")] = None,
) -> None:
    """Write report.html of a run: loss, AUC, calibration, table growth, id frequencies and row ages.

    The page is self-contained.

    Example: megalith report runs/demo
    """
    with exit_on_error():
        print_line(str(write_report(run, out, comparison=comparison)))
