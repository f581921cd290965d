"""What admission and a capacity cost in quality: one DeepFM on MovieLens-1M, AUC beside memory.

    python benchmarks/quality_policies.py [--quick] [--output PATH]

    no policy       a row for every id
    MinCount(2)     a row for ids that occur twice
    Capacity, lru   half of the rows in each table that has more than 2,048 (user, movie, zip); the rows that
    Capacity, lfu   were not updated for longest, or least often, make room

Label rating >= 4, split by time, the last tenth held out. One epoch in the order of time, as in a stream: an
eviction by age means little in shuffled samples. Same dense part, optimizers and order in all runs. Memory is
what the tables report after training: rows, optimizer state, index and counts. A full run saves
results/quality_policies-DATE.json. The bars are our own targets: they show a change for the worse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from harness import (
    Bar,
    command_line,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from quality import BATCH, DIM, FEATURES, LR, PACKAGES, SEED, TABLE_LR
from torch import nn

from megalith import Adagrad, Capacity, MinCount
from megalith.data import MemoryReader, Samples, load_movielens
from megalith.models import DeepFM, EmbeddingConfig, forward_batch
from megalith.models.embedding_config import TableSettings
from megalith.training import evaluate

SMALL = 2 * BATCH
"""A table with fewer rows has no capacity: half of them might not be enough for the ids of one batch."""


def train(samples: Samples, **policies: Any) -> DeepFM:
    torch.manual_seed(SEED)
    config = EmbeddingConfig(FEATURES, dim=DIM, optimizer=Adagrad(TABLE_LR), seed=SEED, **policies)
    model = DeepFM(config)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for batch in MemoryReader(samples, batch_size=BATCH):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(forward_batch(model, batch), batch.labels)
        loss.backward()
        optimizer.step()
    return model


def measure(name: str, model: DeepFM, test: Samples) -> dict[str, Any]:
    result = evaluate(model, MemoryReader(test, batch_size=8192))
    shards = model.embeddings.shards
    stats = shards.stats()
    for table in shards.local.values():  # a run fetches the logs from time to time
        table.drain_evicted()
        table.drain_refused()
    record = {
        "name": name,
        "auc": result.auc,
        "log_loss": result.log_loss,
        "rows": sum(s.rows for s in stats.values()),
        "bytes": sum(use.total for use in shards.memory().values()),
        "evicted": sum(s.counters.evicted for s in stats.values()),
        "refused": sum(s.counters.refused for s in stats.values()),
        "rows_by_table": {table: s.rows for table, s in stats.items()},
    }
    progress(f"  {name}: {record}")
    return record


def halved(rows: Mapping[str, int], score: str) -> dict[str, TableSettings]:
    large = {table: n for table, n in rows.items() if n > SMALL}
    return {table: TableSettings(eviction=[Capacity(n // 2, score=score)]) for table, n in large.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data; nothing is saved")
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    about = {"machine": machine(), "versions": versions(PACKAGES)}
    data = load_movielens()
    samples = data.samples[: len(data.samples) // 10] if options.quick else data.samples
    cut = len(samples) * 9 // 10
    plain = measure("no policy", train(samples[:cut]), samples[cut:])
    records = [plain, measure("MinCount(2)", train(samples[:cut], admission=MinCount(2)), samples[cut:])]
    for score in ("lru", "lfu"):
        policies = halved(plain["rows_by_table"], score)
        name = f"Capacity, {score}, half of the rows"
        records.append(measure(name, train(samples[:cut], settings=policies), samples[cut:]))
    for record in records:
        record["auc_ratio"] = record["auc"] / plain["auc"]
        record["memory_ratio"] = record["bytes"] / plain["bytes"]
    by_name = {record["name"]: record for record in records}
    bars = [Bar("AUC of MinCount(2) / without policies", by_name["MinCount(2)"]["auc_ratio"], 0.995)]
    for score, least in (("lru", 0.93), ("lfu", 0.96)):
        record = by_name[f"Capacity, {score}, half of the rows"]
        bars.append(Bar(f"AUC at half of the rows, {score} / without policies", record["auc_ratio"], least))
        memory = f"memory at half of the rows, {score} / without policies"
        bars.append(Bar(memory, record["memory_ratio"], 0.6, at_most=True))
    print_table(
        f"DeepFM on MovieLens-1M in the order of time, {len(samples) - cut:,} samples held out",
        ("policy", "AUC", "log loss", "rows", "bytes", "memory", "evicted", "refused"),
        [
            (
                r["name"],
                f"{r['auc']:.4f}",
                f"{r['log_loss']:.4f}",
                f"{r['rows']:,}",
                f"{r['bytes']:,}",
                f"{r['memory_ratio']:.0%}",
                f"{r['evicted']:,}",
                f"{r['refused']:,}",
            )
            for r in records
        ],
    )
    print_bars(bars)
    content = {
        "benchmark": "quality_policies",
        "date": str(date.today()),
        "command": command_line(arguments),
        **about,
        "order": "time, one epoch",
        "results": records,
        "bars": bars,
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("quality_policies"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
