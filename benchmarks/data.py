"""Reading training data: Parquet, CSV and Monolith records, against pyarrow alone and Hugging Face
`datasets`.

    python benchmarks/data.py [--rows N] [--rounds N] [--output PATH]

A Parquet file holds the columns of the demo (label, five ids, a list of ids) in row groups of 100,000 rows.
`ParquetReader` reads batches of 1,024 rows, in order, and with shuffle and prefetch. pyarrow alone scans
the same columns to record batches, without tensors. The peer is torch's DataLoader over a `datasets`
Dataset in torch format, which fetches whole batches, in order and shuffled. One core: the process is
pinned, with one thread per pool, and CPU time is measured, rounds interleaved. The demo's model (DeepFM,
dim 16, the settings of `megalith train`) is trained on batches in memory in the same rounds. Workers of a
DataLoader are measured in wall time, on all cores. A full run saves results/data-DATE.json.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet
import torch
from harness import (
    Bar,
    Spread,
    command_line,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from megalith.data import Batch, CsvReader, ParquetReader, Schema
from megalith.training.batches import StepBatch
from megalith.training.config import RunConfig
from megalith.training.model import model_for
from megalith.training.steps import WholeBatches

FULL, BATCH, GROUP = 400_000, 1024, 100_000
FEATURES = ["user", "movie", "age", "gender", "occupation", "genres"]
SCHEMA = Schema(label="label", features=FEATURES)
RECORDS = 20_000


def table(rows: int) -> Any:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 4, rows)
    genres = pa.ListArray.from_arrays(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), draw.integers(0, 18, int(lengths.sum()))
    )
    sizes = {"user": 6040, "movie": 3706, "age": 7, "gender": 2, "occupation": 21}
    ids = {name: (draw.zipf(1.3, rows) % size).astype(np.int64) for name, size in sizes.items()}
    return pa.table({"label": draw.integers(0, 2, rows), **ids, "genres": genres})


def rows_of(batches: Any) -> int:
    return sum(len(batch) for batch in batches)


def scan(path: Path) -> int:
    scanner = dataset.dataset(path).scanner(columns=["label", *FEATURES], use_threads=False)
    return sum(batch.num_rows for batch in scanner.to_batches())


def hugging_face(source: Any, shuffle: bool, limit: int) -> int:
    order = RandomSampler(source) if shuffle else SequentialSampler(source)
    rows = 0
    for batch in DataLoader(source, sampler=BatchSampler(order, BATCH, drop_last=False), batch_size=None):
        rows += len(batch["label"])
        if rows >= limit:
            break
    return rows


class Training:
    """The demo's model on batches in memory."""

    def __init__(self, path: Path) -> None:
        config = RunConfig()
        self.batches: list[Batch] = []
        for batch in ParquetReader(path, SCHEMA, batch_size=BATCH, shuffle=0):
            self.batches.append(batch)
            if len(self.batches) == 60:
                break
        model = model_for(config, FEATURES, 0)
        self.steps = WholeBatches(model, torch.optim.Adam(model.parameters(), lr=config.train.lr))

    def __call__(self) -> int:
        for batch in self.batches:
            self.steps.take(StepBatch(batch, None))
        return rows_of(self.batches)


def with_workers(path: Path, workers: int) -> int:
    reader = ParquetReader(path, SCHEMA, batch_size=BATCH, shuffle=0)
    return rows_of(DataLoader(reader, batch_size=None, num_workers=workers, timeout=120 * bool(workers)))


def measure(
    variants: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Rows per second of each variant, one number per round, after a round that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, call in variants.items():
            start = clock()
            rows = call()
            seconds = clock() - start
            if number:
                rates[name].append(rows / seconds)
    return rates


def ratio(rates: dict[str, list[float]], fast: str, slow: str) -> Spread:
    return Spread.of([a / b for a, b in zip(rates[fast], rates[slow], strict=True)])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=FULL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with tempfile.TemporaryDirectory() as folder:
        path, text = Path(folder) / "rows.parquet", Path(folder) / "rows.csv"
        progress(f"writing {options.rows:,} rows")
        content = table(options.rows)
        parquet.write_table(content, path, row_group_size=GROUP)
        csv.write_csv(content.drop_columns(["genres"]), text)
        flat = Schema(label="label", features=FEATURES[:-1])
        ahead: dict[str, Any] = {"shuffle": 0, "prefetch": 4}
        variants: dict[str, Callable[[], int]] = {
            "pyarrow alone": lambda: scan(path),
            "Parquet": lambda: rows_of(ParquetReader(path, SCHEMA, batch_size=BATCH)),
            "Parquet, shuffle and prefetch": lambda: rows_of(
                ParquetReader(path, SCHEMA, batch_size=BATCH, **ahead)
            ),
            "CSV": lambda: rows_of(CsvReader(text, flat, batch_size=BATCH)),
            "training the demo's model": Training(path),
        }
        try:
            import datasets
        except ImportError:
            progress("datasets is not installed: no comparison with it")
        else:
            held = datasets.Dataset(content).with_format("torch")
            limit = min(options.rows, 20 * BATCH)
            variants["DataLoader over datasets"] = lambda: hugging_face(held, False, limit)
            variants["DataLoader over datasets, shuffled"] = lambda: hugging_face(held, True, limit)
        records = Path(folder) / "examples.pb"
        try:
            from records_cpu import consume, read_ours, write_examples

            random.seed(0)
            write_examples(records, RECORDS)
            variants["Monolith Examples, 30 features of 3 fids"] = lambda: consume(read_ours)(records)
        except ImportError:
            progress("protobuf is not installed: no Monolith records")
        rates = measure(variants, options.rounds, time.process_time)
        os.sched_setaffinity(0, cores)
        progress("workers of a DataLoader")
        workers = {str(count): (lambda count=count: with_workers(path, count)) for count in (0, 1, 2)}
        scaling = measure(workers, max(1, options.rounds // 2), time.perf_counter)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print_table("one core", ("reader", "rows/s"), [(name, f"{rate:,.0f}") for name, rate in medians.items()])
    walls = {name: statistics.median(found) for name, found in scaling.items()}
    print_table(
        f"{len(cores)} cores, wall time",
        ("workers", "rows/s"),
        [(name, f"{rate:,.0f}") for name, rate in walls.items()],
    )
    shuffled = "Parquet, shuffle and prefetch"
    fed = ratio(rates, shuffled, "training the demo's model")
    alone = ratio(rates, "Parquet", "pyarrow alone")
    bars = [
        Bar("Parquet with shuffle and prefetch / the demo's training", fed.median, 4, note=str(fed)),
        Bar("Parquet to batches / pyarrow's scan alone", alone.median, note=str(alone)),
    ]
    if "DataLoader over datasets" in rates:
        for ours, theirs in (
            ("Parquet", "DataLoader over datasets"),
            (shuffled, "DataLoader over datasets, shuffled"),
        ):
            found = ratio(rates, ours, theirs)
            bars.append(Bar(f"{ours} / {theirs}", found.median, note=str(found)))
    name = "Monolith Examples, 30 features of 3 fids"
    if name in medians:
        bars.append(Bar(f"{name}, per second", medians[name], 50_000))
    print_bars(bars)
    content = {
        "benchmark": "data",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(("megalith", "torch", "numpy", "pyarrow", "datasets", "protobuf")),
        "rows": options.rows,
        "batch": BATCH,
        "rows_per_cpu_second": rates,
        "rows_per_second_by_workers": scaling,
        "bars": bars,
    }
    if options.output or options.rows >= FULL:
        write_result(options.output or result_path("data"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
