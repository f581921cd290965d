"""megalith predict: writes the probability of each row of a file to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalith.cli.console import exit_on_error
from megalith.cli.output import print_line, progress
from megalith.training import load_trained, open_reader
from megalith.training.prediction import check_output, predict_file


def predict(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or one of its checkpoints.")],
    path: Annotated[Path, typer.Argument(help="Data like the training data; labels are not required.")],
    out: Annotated[Path, typer.Argument(help="File to write: .csv or .parquet.")],
) -> None:
    """Predict the probability of each row of a file, in the order of the file.

    Example: megalith predict runs/mine candidates.parquet scores.parquet
    """
    with exit_on_error():
        check_output(out)
        model, config = load_trained(run)
        reader = open_reader(config.data, path, labelled=False)
        with progress("predicting", reader.num_rows) as on_batch:
            count = predict_file(model, reader, out, on_batch)
    print_line(f"{count:,} probabilities in {out}")
