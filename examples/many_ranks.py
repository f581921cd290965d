"""One model on many ranks: distributed tables, rows exchanged all-to-all, dense weights averaged.

    torchrun --nproc-per-node 2 examples/many_ranks.py --dist-type hash_roundrobin

All user ids here are multiples of 8, as ids assigned by another system often are. "roundrobin" places all of
them on rank 0; "hash_roundrobin" and "continuous" distribute them. The last lines show the number of rows per
rank. Without torchrun the script trains on one rank with the same loop.
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megalith import (
    Adagrad,
    EmbeddingCollection,
    Feature,
    Ragged,
    Router,
    SyncShards,
    TableConfig,
    checkpoint,
)
from megalith.data import Batch, pad_to_equal_batches
from megalith.distributed.launcher_environment import LaunchWarning, RankSetup, configure, init_process_group
from megalith.metrics import auc
from megalith.routing import MODES
from megalith.shards import CommMetrics, CommReport, LocalShards, Shards

DIM, USERS, ITEMS = 8, 2000, 500
NUM_IDS = {"user": 8 * USERS, "item": ITEMS}  # ids are below these


def clicks(rank: int, size: int, batches: int, rows: int) -> Iterator[Batch]:
    """The data of a rank. The last rank has one batch less than the others."""
    taste = torch.randn(USERS, generator=torch.Generator().manual_seed(1))
    quality = torch.randn(ITEMS, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(batches - (rank == size - 1 and size > 1)):
        user = torch.randint(USERS, (rows,), generator=generator)
        item = torch.randint(ITEMS, (rows,), generator=generator)
        noise = torch.randn(rows, generator=generator) / 2
        labels = (taste[user] + quality[item] + noise > 0).float()
        one_each = torch.arange(rows + 1)
        yield Batch({"user": Ragged(8 * user, one_each), "item": Ragged(item, one_each)}, labels)


def make_shards(dist_type: str, size: int) -> Shards:
    """The tables: in this process, or distributed over all ranks."""
    tables = [TableConfig(name, dim=DIM, optimizer=Adagrad(0.2), dist_type=dist_type) for name in NUM_IDS]
    if size == 1:
        return LocalShards(tables)
    routers = {
        name: Router(dist_type, size, block_size=-(-ids // size) if dist_type == "continuous" else None)
        for name, ids in NUM_IDS.items()
    }
    return SyncShards(tables, router=routers, timeout=60)


class ClickModel(nn.Module):
    """Embeddings of user and item, and an MLP."""

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(shards, [Feature(name, name) for name in NUM_IDS])
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch.features)  # a collective call: ids go to their owners, rows come back
        logits: Tensor = self.mlp(torch.cat([rows["user"], rows["item"]], 1)).squeeze(1)
        return logits


def train(model: nn.Module, batches: Iterator[Batch], rows: int, metrics: CommMetrics | None) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    # Ranks must make the same number of steps: those without data get empty batches.
    for step, batch in enumerate(pad_to_equal_batches(batches), start=1):
        losses = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="none")
        loss = losses.sum() / rows  # the mean, and 0 instead of NaN for an empty batch
        optimizer.zero_grad()
        loss.backward()  # gradients go to the owners, one step per distinct id; DDP averages the dense ones
        optimizer.step()
        if metrics is not None and step % 50 == 0:
            metrics.collect(step)


def show(report: CommReport) -> None:
    """Prints the bytes sent between ranks. `collect` returns the report on every rank; one rank prints it."""
    for table, numbers in report.tables.items():
        served, sent = numbers["served"], numbers["bytes_sent"]
        print(
            f"step {report.step}, table {table}: {sum(sent.by_rank):,.0f} bytes sent; rank {served.max_rank} "
            f"serves {served.skew:.2f} times the mean"
        )


@torch.no_grad()
def evaluate(model: nn.Module, setup: RankSetup, rows: int) -> float:
    """Every rank scores its own rows. Lookups are collective in eval mode too."""
    model.eval()
    (batch,) = clicks(1000 + setup.rank, 0, 1, rows)
    own = model(batch).tolist(), batch.labels.tolist()
    every = model.embeddings.shards.ranks.gather(own)
    model.train()
    scores, labels = ([x for part in every for x in part[i]] for i in (0, 1))
    return auc(torch.tensor(scores), torch.tensor(labels))


def main(args: argparse.Namespace) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        setup = configure(args.run_dir, merge_checkpoints=True, device="cpu")
    init_process_group(setup, timeout=60)
    first = setup.rank == 0
    torch.manual_seed(0)
    shards = make_shards(args.dist_type, setup.size)
    model = ClickModel(shards)
    distributed = isinstance(shards, SyncShards)
    trained = DistributedDataParallel(model) if distributed else model  # broadcasts dense weights from rank 0
    metrics = CommMetrics(shards, callback=show if first else None) if distributed else None
    train(trained, clicks(setup.rank, setup.size, args.batches, args.rows), args.rows, metrics)

    score = evaluate(model, setup, args.rows)
    checkpoint.save(
        model, setup.run_dir / "checkpoint"
    )  # one checkpoint of all ranks; any number of ranks can load it
    counts = {name: shards.ranks.gather(len(table)) for name, table in shards.local.items()}
    if first:
        print(f"{args.dist_type} on {setup.size} ranks: AUC {score:.4f}")
        for name, rows in counts.items():
            print(f"table {name}: rows by rank {rows}")
    if setup.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains one model on the ranks of torchrun.")
    parser.add_argument("--dist-type", choices=MODES, default="roundrobin", help="routing mode")
    parser.add_argument("--batches", type=int, default=150, help="batches per rank")
    parser.add_argument("--rows", type=int, default=512, help="rows per batch")
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/many_ranks"), help="directory of the checkpoint"
    )
    main(parser.parse_args())
