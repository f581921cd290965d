"""megalith report: the page of a run, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import exit_on_error
from megalith.cli.output import console
from megalith.reporting.report import write_report


def report(
    run: Annotated[Path, typer.Argument(help="A run's directory.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it; default RUN/report.html.")] = None,
    comparison: Annotated[Path | None, typer.Option(help="JSON of a benchmark to show.")] = None,
) -> None:
    """Write report.html of a run: loss, AUC, calibration, growth, frequencies, ages. One self-contained page.

    Example: megalith report runs/demo
    """
    with exit_on_error():
        console().print(f"{write_report(run, out, comparison=comparison)}", markup=False, soft_wrap=True)
