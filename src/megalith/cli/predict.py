"""megalith predict: writes the probability of each row of a file to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megalith.cli.config_options import config_options
from megalith.cli.output import exit_on_error, print_line, progress, skipped_lines
from megalith.training import DataConfig, load_trained, open_reader
from megalith.training.config import FIXED_DATA
from megalith.training.evaluation import check_output, predict_file
from megalith.training.model import threads_of, using_threads


@config_options("data", DataConfig, omit=FIXED_DATA, only_given=True)
def predict(
    run: Annotated[Path, typer.Argument(help="Directory of a run, or one of its checkpoints.")],
    path: Annotated[Path, typer.Argument(help="Data like the training data; labels are not required.")],
    out: Annotated[Path, typer.Argument(help="File to write: .csv or .parquet.")],
    *,
    data: dict[str, Any],
) -> None:
    """Predict the probability of each row of a file, in the order of the file.

    A bad row stops the command, also if training skipped bad rows: without it, the lines of the output would
    not match those of the input. --on-error skip leaves such rows out and counts them.

    Example: megalith predict runs/mine candidates.parquet scores.parquet
    """
    with exit_on_error():
        check_output(out)
        model, config = load_trained(run)
        settings = {"on_error": "raise", **data}
        config = config.changed(**{f"data_{key}": value for key, value in settings.items()})
        reader = open_reader(config.data, path, labelled=False)
        threads = threads_of(config, reader.feature_names)
        with using_threads(threads), progress("predicting", reader.num_rows) as on_batch:
            count = predict_file(model, reader, out, on_batch)
    lines = skipped_lines(reader.skipped, first=reader.first_skipped)
    for line in lines:
        print_line(line)
    print_line(f"{count:,} probabilities in {out}" + ("; skipped rows have no line in it" if lines else ""))
