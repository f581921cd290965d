"""megalith eval: evaluates a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megalith.cli.console import exit_on_error
from megalith.cli.output import console, print_json, progress
from megalith.errors import InputError
from megalith.training import evaluate as evaluate_model
from megalith.training import load_trained, open_reader, open_source


def evaluate(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or one of its checkpoints.")],
    path: Annotated[
        Path | None, typer.Argument(help="Data with labels. Default: the held-out data of the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a trained model: AUC, log loss and calibration. Nothing is written.

    Example: megalith eval runs/mine clicks-of-today.parquet
    """
    with exit_on_error():
        model, config = load_trained(run)
        reader = open_source(config).test if path is None else open_reader(config.data, path)
        if reader is None:
            raise InputError(f"{run} has no held-out data: name the data to evaluate on")
        with progress("evaluating", reader.num_rows) as on_batch:
            result = evaluate_model(model, reader, on_batch)
    if as_json:
        return print_json(result.to_dict())
    table = Table("predicted", "observed", "samples", title="calibration")
    for each in result.calibration:
        table.add_row(f"{each['predicted']:.3f}", f"{each['observed']:.3f}", f"{each['count']:,.0f}")
    out = console()
    out.print(f"{result.samples:,} samples   AUC {result.auc:.4f}   log loss {result.log_loss:.4f}")
    out.print(table)
