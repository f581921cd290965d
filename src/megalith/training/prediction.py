"""predict_file: the probability of each row of a file, written to a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megalith.data import Reader
from megalith.data.arrow import arrow
from megalith.errors import InputError
from megalith.models import Model
from megalith.training.run_device import score

SUFFIXES = (".csv", ".parquet")


def predict_file(
    model: Model, reader: Reader, out: Path, on_batch: Callable[[int], None] | None = None
) -> int:
    """Predicts the rows of a reader and writes their probabilities in the same order."""
    check_output(out)
    scores = torch.cat([torch.empty(0, device="cpu"), *_scores(model, reader, on_batch)])
    temporary = out.with_name(out.name + ".tmp")
    _write(temporary, out.suffix, scores.tolist())
    os.replace(temporary, out)
    return scores.numel()


def check_output(out: Path) -> None:
    """Checks the name of an output file."""
    if out.suffix not in SUFFIXES:
        raise InputError(f"{out}: write to a file named {' or '.join(SUFFIXES)}")


@torch.no_grad()
def _scores(model: Model, reader: Reader, on_batch: Callable[[int], None] | None) -> Iterator[Tensor]:
    done = 0
    for batch in reader:
        yield score(model, batch).sigmoid()
        done += len(batch)
        if on_batch is not None:
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
