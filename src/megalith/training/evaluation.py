"""Evaluation and prediction: what a trained model computes for the rows of a reader.

`evaluate` returns AUC, log loss and calibration. `predict_file` writes the probability of each row to a file.
Neither changes the tables.
"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.data import Batch, Reader
from megalith.data.table_reader import TableReader
from megalith.distributed.ranks import Ranks
from megalith.errors import InputError
from megalith.metrics import AUC, Calibration
from megalith.models import Model
from megalith.ops import checks
from megalith.ragged import arrow
from megalith.training.batches import RunBatches
from megalith.training.model import score


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    samples: int
    """Number of samples."""
    auc: float
    """NaN if all labels are equal."""
    log_loss: float
    """Weighted mean of the log loss."""
    calibration: list[dict[str, float]]
    """Bins of {predicted, observed, count}."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of bad rows that were skipped, by reason."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-compatible form. NaN becomes None."""
        numbers = {"auc": self.auc, "log_loss": self.log_loss}
        finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
        skipped = {"skipped": self.skipped} if self.skipped else {}
        return {"samples": self.samples, **finite, "calibration": self.calibration, **skipped}


def evaluate(
    model: nn.Module,
    reader: Reader,
    on_batch: Callable[[int], None] | None = None,
    *,
    ranks: Ranks | None = None,
    shards: bool = False,
) -> Evaluation:
    """Evaluate a model on all samples of a reader. The tables are not changed.

    Args:
        model: The model.
        reader: The samples, with labels.
        on_batch: Called after each batch with the number of samples so far.
        ranks: The ranks of a run. Each rank computes its part of every batch; all ranks return the same
            result.
        shards: Whether each rank reads its own shard. False: each rank reads all samples.

    Returns:
        The metrics over all samples.

    Raises:
        InputError: A sample has no label.
    """
    checks.instance(model, nn.Module, "evaluate: model")
    if not isinstance(reader, Reader):
        raise InputError(f"evaluate: reader must be a Reader, got {type(reader).__name__}")
    checks.callback(on_batch, "evaluate: on_batch")
    if ranks is not None:
        checks.instance(ranks, Ranks, "evaluate: ranks")
    checks.flag(shards, "evaluate: shards")
    return evaluate_batches(
        model, reader if ranks is None else RunBatches(reader, ranks, shards=shards), on_batch, ranks
    )


@torch.no_grad()
def evaluate_batches(
    model: nn.Module,
    batches: Reader | RunBatches,
    on_batch: Callable[[int], None] | None,
    ranks: Ranks | None,
) -> Evaluation:
    was_training = model.training
    model.eval()
    auc, calibration = AUC(), Calibration()
    total, weight, samples = 0.0, 0.0, 0
    before = Counter(batches.skipped() if isinstance(batches, RunBatches) else batches.skipped)
    try:
        for logits, labels, weights in _scored(model, batches, ranks):
            if bool(labels.isnan().any()):
                raise InputError("evaluate: the data has no labels; name the label column in the schema")
            losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            own = torch.ones_like(losses) if weights is None else weights
            total += float((losses.double() * own).sum())
            weight += float(own.double().sum())
            auc.update(logits, labels, weights)
            calibration.update(logits, labels, weights)
            samples += len(labels)
            if on_batch is not None:
                on_batch(samples)
    finally:
        model.train(was_training)
    counted = batches.skipped() if isinstance(batches, RunBatches) else batches.skipped
    return Evaluation(
        samples,
        auc.compute(),
        total / weight if weight else math.nan,
        _bins(calibration),
        dict(counted - before),
    )


@dataclass
class BestValidation:
    """The best validation of a run so far."""

    value: float | None = None
    step: int = 0
    since: int = 0
    """Number of validations since then."""
    last: int = 0
    """Step of the last validation."""

    def update(self, result: Evaluation, metric: str, step: int) -> bool:
        """Add a validation; return whether it is the best."""
        value = -result.log_loss if metric == "log_loss" else result.auc
        self.since, self.last = self.since + 1, step
        if math.isnan(value) or not (self.value is None or value > self.value):
            return False
        self.value, self.step, self.since = value, step, 0
        return True


def _scored(
    model: nn.Module, batches: Reader | RunBatches, ranks: Ranks | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Logits, labels and weights of each batch, with the rows of all ranks."""
    for step in batches:
        if isinstance(step, Batch):
            yield score(model, step), step.labels, step.weights
            continue
        assert ranks is not None
        sizes = step.sizes_of(ranks.size)
        own = step.part(ranks.rank, ranks.size, range(ranks.rank, ranks.rank + 1))
        logits = _join(ranks, score(model, own), sizes)
        labels = _join(ranks, own.labels, sizes)
        yield logits, labels, None if own.weights is None else _join(ranks, own.weights, sizes)


def _join(ranks: Ranks, own: Tensor, sizes: Sequence[int]) -> Tensor:
    # own: float32 [rows of this rank]; returns: float32 [sum of sizes].
    size = [4 * rows for rows in sizes]
    data = own.detach().contiguous().view(-1).view(torch.uint8)
    sent = [size[ranks.rank]] * ranks.size
    joined = ranks.all_to_all(data.repeat(ranks.size), sent, size, "exchange of predictions")
    return joined.view(torch.float32)


def _bins(calibration: Calibration) -> list[dict[str, float]]:
    bins = calibration.compute()
    columns: list[Tensor] = [bins.predicted, bins.observed, bins.weight]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [{"predicted": p, "observed": o, "count": n} for p, o, n in rows if n > 0]


SUFFIXES = (".csv", ".parquet")


def predict_file(
    model: Model,
    reader: Reader,
    out: Path,
    on_batch: Callable[[int], None] | None = None,
    *,
    columns: Sequence[str] = (),
) -> int:
    """Predict the rows of a reader; write given columns of its files and the probabilities, in order."""
    check_output(out)
    if columns:
        if not isinstance(reader, TableReader):
            raise InputError(
                "predict: only files with named columns (parquet, csv, criteo) have columns to keep"
            )
        if "probability" in columns:
            raise InputError(
                "predict: a column named 'probability' cannot be kept: the scores have this name"
            )
        columns = list(dict.fromkeys(columns))
        reader = reader.carrying(columns)
    scores = torch.cat([torch.empty(0, device="cpu"), *_scores(model, reader, on_batch)])
    temporary = out.with_name(out.name + ".tmp")
    kept: dict[str, Any] = {}
    if isinstance(reader, TableReader) and scores.numel():
        kept = {name: _text(name, reader.carried_column(name)) for name in columns}
    _write(temporary, out.suffix, kept or {name: [] for name in columns}, scores)
    os.replace(temporary, out)
    return scores.numel()


def check_output(out: Path) -> None:
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


def _text(name: str, column: Any) -> Any:
    """Columns of CSV files are bytes: the text of the file."""
    pa = arrow()
    if column.type != pa.binary():
        return column
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        raise InputError(
            f"predict: column {name!r} has text that is not UTF-8, so it cannot be kept: leave it out"
        ) from None


def _write(path: Path, suffix: str, columns: Mapping[str, Any], scores: Tensor) -> None:
    if suffix == ".parquet":
        pa = arrow()
        table = pa.table({**columns, "probability": pa.array(scores.numpy())})
        arrow("pyarrow.parquet").write_table(table, path)
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "probability"])
        lists = [column.to_pylist() if len(column) else [] for column in columns.values()]
        writer.writerows(zip(*lists, (f"{score:.9g}" for score in scores.tolist()), strict=True))
