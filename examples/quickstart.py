"""Trains a click model on ids that nobody listed beforehand, and says how good it got.

A teacher with hidden tastes makes clicks of users on items; ids are arbitrary 64-bit numbers
and popular items come often. The model is a dot product of two rows plus two biases. Each row has
two segments: a vector trained by Adagrad and a bias trained by FTRL.

    python examples/quickstart.py
"""

import json
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from megalith import FTRL, Adagrad, LocalShards, Normal, Segment, TableConfig, Zeros

DIM, BATCH, STEPS = 16, 4096, 600
USERS, ITEMS = 50_000, 20_000


class Teacher:
    """Hidden tastes: a click is likely where a user's and an item's vectors agree."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.users = torch.randn(USERS, 8, generator=self.generator)
        self.items = torch.randn(ITEMS, 8, generator=self.generator)
        self.user_ids = torch.randint(-(2**62), 2**62, (USERS,), generator=self.generator)
        self.item_ids = torch.randint(-(2**62), 2**62, (ITEMS,), generator=self.generator)

    def batch(self, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """User ids, item ids, clicks (0 or 1) and the probability they were drawn with."""
        user = self._popular(USERS, n)
        item = self._popular(ITEMS, n)
        chance = torch.sigmoid((self.users[user] * self.items[item]).sum(1) - 1.0)
        click = torch.bernoulli(chance, generator=self.generator)
        return self.user_ids[user], self.item_ids[item], click, chance

    def _popular(self, size: int, n: int) -> torch.Tensor:
        even = torch.rand(n, generator=self.generator)
        return (size**even - 1).long().clamp(max=size - 1)


def segments() -> list[Segment]:
    vector = Segment(DIM, optimizer=Adagrad(0.1, initial_accumulator_value=0.01), initializer=Normal(std=0.1))
    bias = Segment(1, optimizer=FTRL(0.1, beta=1.0, l2=0.001), initializer=Zeros())
    return [vector, bias]


def score(user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
    return (user[:, :DIM] * item[:, :DIM]).sum(1) + user[:, DIM] + item[:, DIM] - 1.0


def auc(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    hits = clicks.sum().item()
    return (ranks[clicks == 1].sum().item() - hits * (hits + 1) / 2) / (hits * (len(clicks) - hits))


def main() -> None:
    console = Console()
    teacher = Teacher()
    shards = LocalShards([TableConfig("user", segments=segments()), TableConfig("item", segments=segments())])
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  rows {task.fields[rows]:,}"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=STEPS, loss=0.0, rows=0)
        for step in range(STEPS):
            user_ids, item_ids, clicks, _ = teacher.batch(BATCH)
            lookup = shards.lookup({"user": user_ids, "item": item_ids})
            rows = {name: lookup.rows[name].requires_grad_() for name in ("user", "item")}
            scores = score(rows["user"], rows["item"])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, clicks, reduction="sum")
            loss.backward()
            shards.apply_gradients(lookup, {name: row.grad for name, row in rows.items()}, step=step)
            known = sum(len(table) for table in shards.local.values())
            progress.update(task, advance=1, loss=loss.item() / BATCH, rows=known)
    seconds = time.perf_counter() - start

    user_ids, item_ids, clicks, chance = teacher.batch(100_000)
    lookup = shards.lookup({"user": user_ids, "item": item_ids})
    scores = score(lookup.rows["user"], lookup.rows["item"])
    report = {
        "auc": auc(scores, clicks),
        "auc_of_the_teacher": auc(chance, clicks),
        "log_loss": torch.nn.functional.binary_cross_entropy_with_logits(scores, clicks).item(),
        "samples_per_second": BATCH * STEPS / seconds,
        "rows": {name: len(table) for name, table in shards.local.items()},
        "megabytes": sum(use.total for use in shards.memory().values()) / 1e6,
    }
    grid = Grid("", "value", title="100,000 clicks the model has not seen")
    grid.add_row("AUC", f"{report['auc']:.4f}")
    grid.add_row("AUC of the teacher itself", f"{report['auc_of_the_teacher']:.4f}")
    grid.add_row("log loss", f"{report['log_loss']:.4f}")
    grid.add_row("samples a second", f"{report['samples_per_second']:,.0f}")
    grid.add_row("rows (user, item)", ", ".join(f"{n:,}" for n in report["rows"].values()))
    grid.add_row("memory of the tables", f"{report['megabytes']:.1f} MB")
    console.print(grid)
    path = Path("runs/demo/report.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2))
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
