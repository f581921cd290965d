"""megalith eval, megalith predict: what a trained model computes for the rows of files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from megalith.cli.config_options import config_options
from megalith.cli.output import (
    AsJson,
    console,
    exit_on_error,
    print_json,
    print_line,
    progress,
    skipped_lines,
)
from megalith.errors import InputError
from megalith.training import DataConfig, load_trained, open_reader
from megalith.training import evaluate as evaluate_model
from megalith.training.config import FIXED_DATA
from megalith.training.data_source import open_test
from megalith.training.evaluation import check_output, predict_file
from megalith.training.model import threads_of, using_threads


@config_options("data", DataConfig, omit=FIXED_DATA, only_given=True)
def evaluate(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or one of its checkpoints.")],
    path: Annotated[
        Path | None, typer.Argument(help="Data with labels. Default: the held-out data of the run.")
    ] = None,
    *,
    data: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model: AUC, log loss and calibration. Nothing is written.

    The data is read with the settings of the run, unless a flag changes them.

    Example: megalith eval runs/mine clicks-of-today.parquet
    """
    with exit_on_error():
        model, config = load_trained(run)
        config = config.changed(**{f"data_{key}": value for key, value in data.items()})
        reader = open_test(config) if path is None else open_reader(config.data, path)
        if reader is None:
            raise InputError(f"{run} has no held-out data: name the data to evaluate on")
        threads = threads_of(config, reader.feature_names)
        with using_threads(threads), progress("evaluating", reader.num_rows) as on_batch:
            result = evaluate_model(model, reader, on_batch)
        skipped = skipped_lines(result.skipped, first=reader.first_skipped)
        if not result.samples:
            raise InputError("; ".join(["there is no valid row to evaluate", *skipped]))
    if as_json:
        return print_json(result.to_dict())
    table = Table("predicted", "observed", "samples", title="calibration")
    for each in result.calibration:
        table.add_row(f"{each['predicted']:.3f}", f"{each['observed']:.3f}", f"{each['count']:,.0f}")
    out = console()
    for line in skipped:
        out.print(line, markup=False)
    out.print(f"{result.samples:,} samples   AUC {result.auc:.4f}   log loss {result.log_loss:.4f}")
    out.print(table)


@config_options("data", DataConfig, omit=FIXED_DATA, only_given=True)
def predict(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or one of its checkpoints.")],
    path: Annotated[Path, typer.Argument(help="Data like the training data; labels are not required.")],
    out: Annotated[Path, typer.Argument(help="File to write: .csv or .parquet.")],
    *,
    keep: Annotated[
        str, typer.Option(help="Columns of the file to write before the probability: user_id,item_id.")
    ] = "",
    data: dict[str, Any],
) -> None:
    """Predict the probability of each row of a file, in the order of the file.

    A bad row stops the command, also if training skipped bad rows: without it, the lines of the output would
    not match those of the input. --on-error skip leaves such rows out and counts them.

    Example: megalith predict runs/mine candidates.parquet scores.parquet --keep user_id,item_id
    """
    with exit_on_error():
        check_output(out)
        model, config = load_trained(run)
        columns = [name.strip() for name in keep.split(",") if name.strip()]
        settings = {"on_error": "raise", **data}
        config = config.changed(**{f"data_{key}": value for key, value in settings.items()})
        reader = open_reader(config.data, path, labelled=False)
        threads = threads_of(config, reader.feature_names)
        with using_threads(threads), progress("predicting", reader.num_rows) as on_batch:
            count = predict_file(model, reader, out, on_batch, columns=columns)
    lines = skipped_lines(reader.skipped, first=reader.first_skipped)
    for line in lines:
        print_line(line)
    print_line(f"{count:,} probabilities in {out}" + ("; skipped rows have no line in it" if lines else ""))
