"""megalith predict: a file in, a file of probabilities out."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megalith.cli.console import exit_on_error
from megalith.cli.output import console, progress
from megalith.data import Reader
from megalith.data.arrow import arrow
from megalith.errors import InputError
from megalith.models import Model, forward_batch
from megalith.training import load_trained, open_reader

SUFFIXES = (".csv", ".parquet")


def predict(
    run: Annotated[Path, typer.Argument(help="A run's directory, or a checkpoint of one.")],
    path: Annotated[Path, typer.Argument(help="Data as the run was trained on; labels are not needed.")],
    out: Annotated[Path, typer.Argument(help="File to write: .csv or .parquet.")],
) -> None:
    """Predict the probability of each row of a file, in the file's order.

    Example: megalith predict runs/mine candidates.parquet scores.parquet
    """
    with exit_on_error():
        if out.suffix not in SUFFIXES:
            raise InputError(f"{out}: write to a file named {' or '.join(SUFFIXES)}")
        model, config = load_trained(run)
        reader = open_reader(config.data, path, labelled=False)
        if reader.on_error != "raise":
            reader.on_error = "raise"  # a row left out would shift all after it
        with progress("predicting", reader.num_rows) as on_batch:
            scores = torch.cat([torch.empty(0), *_scores(model, reader, on_batch)])
        temporary = out.with_name(out.name + ".tmp")
        _write(temporary, out.suffix, scores.tolist())
        os.replace(temporary, out)
    console().print(f"{scores.numel():,} probabilities in {out}", markup=False, soft_wrap=True)


@torch.no_grad()
def _scores(model: Model, reader: Reader, on_batch: Any) -> Iterator[torch.Tensor]:
    done = 0
    for batch in reader:
        yield forward_batch(model, batch).sigmoid()
        done += len(batch)
        on_batch(done)


def _write(path: Path, suffix: str, scores: list[float]) -> None:
    if suffix == ".parquet":
        pa = arrow()
        arrow("pyarrow.parquet").write_table(pa.table({"probability": pa.array(scores, pa.float32())}), path)
        return
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["probability"])
        writer.writerows([f"{score:.9g}"] for score in scores)
