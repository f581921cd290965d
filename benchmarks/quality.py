"""The gain of a separate row for every id: one DeepFM on MovieLens-1M with three kinds of embeddings.

    python benchmarks/quality.py [--quick] [--epochs N] [--output PATH]

    megalith    tables that grow: raw hashed ids, a row for each
    remapped    nn.EmbeddingBag, ids numbered beforehand (which is not possible on a stream)
    hashed      nn.EmbeddingBag with as many bytes as megalith uses, ids modulo its rows: collisions

Label rating >= 4, split by time, the last tenth held out. Same dense part, same optimizers, same order of
samples; remapped starts from megalith's own initial rows. A full run saves results/quality-DATE.json, and
results/quality.json for the demo's report.
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
    RESULTS,
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
from torch import Tensor, nn

from megalith import Adagrad
from megalith.data import MemoryReader, Samples, load_movielens
from megalith.models import DeepFM, EmbeddingConfig, forward_batch
from megalith.routing import mix
from megalith.training import Evaluation, evaluate

PACKAGES = ("megalith", "torch", "numpy")
BATCH, DIM, LR, TABLE_LR, SEED = 1024, 16, 1e-3, 0.05, 0
FEATURES = ["user", "movie", "genres", "year", "gender", "age", "occupation", "zip"]


def deepfm() -> DeepFM:
    torch.manual_seed(SEED)
    return DeepFM(EmbeddingConfig(FEATURES, dim=DIM, optimizer=Adagrad(TABLE_LR), seed=SEED))


class BagDeepFM(DeepFM):
    """The same model with nn.EmbeddingBag. rows: the number of each feature; place: maps ids to rows."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        torch.manual_seed(SEED)
        super().__init__(EmbeddingConfig(FEATURES, dim=DIM, optimizer=Adagrad(TABLE_LR), seed=SEED))
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(rows[name], 1 + DIM, mode="mean", sparse=True) for name in FEATURES}
        )
        for bag in self.bags.values():
            bag.weight.data.uniform_(-0.05, 0.05)
            bag.weight.data[:, 0] = 0

    def place(self, name: str, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def embed(self, features: Any, time: float | None) -> dict[str, Tensor]:
        rows = [
            self.bags[name](self.place(name, features[name].values), features[name].row_splits[:-1])
            for name in FEATURES
        ]
        bias = torch.stack([r[:, 0] for r in rows], 1).sum(1, keepdim=True)
        return {"bias": bias, "factors": torch.stack([r[:, 1:] for r in rows], 1)}

    @property
    def bytes(self) -> int:
        """The size of weights and Adagrad state."""
        return sum(2 * bag.weight.numel() * 4 for bag in self.bags.values())


class Remapped(BagDeepFM):
    def __init__(self, known: Mapping[str, Tensor], ours: DeepFM) -> None:
        super().__init__({name: ids.numel() for name, ids in known.items()})
        self.known = known
        for name, ids in known.items():
            self.bags[name].weight.data.copy_(ours.embeddings.shards.local[name].lookup(ids))

    def place(self, name: str, ids: Tensor) -> Tensor:
        return torch.searchsorted(self.known[name], ids)


class Hashed(BagDeepFM):
    def place(self, name: str, ids: Tensor) -> Tensor:
        return torch.remainder(mix(ids), self.bags[name].num_embeddings)


def train(model: DeepFM, samples: Samples, epochs: int) -> None:
    bags = [p for name, p in model.named_parameters() if name.startswith("bags.")]
    dense = [p for name, p in model.named_parameters() if not name.startswith("bags.")]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, LR)]
    if bags:
        optimizers.append(torch.optim.Adagrad(bags, TABLE_LR, eps=1e-10))
    reader = MemoryReader(samples, batch_size=BATCH, shuffle=SEED)
    for epoch in range(epochs):
        for batch in reader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(forward_batch(model, batch), batch.labels)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        progress(f"  epoch {epoch + 1} of {epochs}: last loss {float(loss.detach()):.4f}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the data; nothing is saved")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="where to save the result")
    options = parser.parse_args(arguments)
    data = load_movielens()
    samples = data.samples[: len(data.samples) // 10] if options.quick else data.samples
    cut = len(samples) * 9 // 10
    known = {name: torch.unique(samples.features[name].values) for name in FEATURES}
    results: dict[str, tuple[Evaluation, int]] = {}

    progress("megalith")
    ours = deepfm()
    remapped = Remapped(known, ours)
    train(ours, samples[:cut], options.epochs)
    shards = ours.embeddings.shards
    memory = {name: use.total for name, use in shards.memory().items()}
    test = MemoryReader(samples[cut:], batch_size=8192)
    results["megalith"] = evaluate(ours, test), sum(memory.values())
    progress("remapped")
    train(remapped, samples[:cut], options.epochs)
    results["EmbeddingBag, ids remapped"] = evaluate(remapped, test), remapped.bytes
    progress("hashed")
    rows = {name: max(1, memory[name] // (2 * (1 + DIM) * 4)) for name in FEATURES}
    hashed = Hashed(rows)
    train(hashed, samples[:cut], options.epochs)
    results["EmbeddingBag, ids hashed, equal memory"] = evaluate(hashed, test), hashed.bytes

    table = [
        {"name": name, "auc": e.auc, "log_loss": e.log_loss, "bytes": size}
        for name, (e, size) in results.items()
    ]
    print_table(
        f"DeepFM on MovieLens-1M, {options.epochs} epoch(s), {len(samples) - cut:,} samples held back",
        ("embeddings", "AUC", "log loss", "bytes"),
        [(r["name"], f"{r['auc']:.4f}", f"{r['log_loss']:.4f}", f"{r['bytes']:,}") for r in table],
    )
    aucs = [float(r["auc"]) for r in table]
    bars = [
        Bar("|AUC - AUC of remapped ids|", abs(aucs[0] - aucs[1]), 0.002, at_most=True),
        Bar("AUC - AUC of hashed ids", aucs[0] - aucs[2], 0.0, strict=True),
    ]
    print_bars(bars)
    content = {
        "benchmark": "quality",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "rows": {name: stats.rows for name, stats in shards.stats().items()},
        "hashed_rows": rows,
        "results": table,
        "bars": bars,
    }
    page = {
        "title": "A row of its own for every id: DeepFM on MovieLens-1M",
        "date": date.today().isoformat(),
        "rows": table,
        "note": "Same model, data and order; `make bench` computes it. Memory counts weights, optimizer "
        "state and, for megalith, the index.",
    }
    if options.output or not options.quick:
        write_result(options.output or result_path("quality"), content)
    if not options.quick:
        write_result(RESULTS / "quality.json", page)


if __name__ == "__main__":
    main(sys.argv[1:])
