"""Two data centres train one recommender: tables and dense weights are exchanged every N steps.

Each data centre sees half of the clicks. It trains its own EmbeddingCollection and dense layers, and every N
steps publishes a compressed update of the dense weights and the changed rows of its tables. Both gather both
updates and continue from the same model. The result is compared with one trainer that sees all clicks.
Run: python examples/two_data_centres.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megalith import Adagrad, EmbeddingCollection, Feature, TableConfig, metrics
from megalith.gather import (
    GatherPlan,
    Label,
    ObjectStore,
    OuterUpdate,
    PayloadSchema,
    PeerTables,
    UpdateConfig,
    compress,
    open_object_store,
    publish,
    run_window,
)

USERS, ITEMS, DIM, BATCH = 400, 200, 8, 128
Clicks = tuple[Tensor, Tensor, Tensor]


class Recommender(nn.Module):
    """Rows of users and items, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [TableConfig(name, dim=DIM, optimizer=Adagrad(0.1)) for name in ("users", "items")]
        features = [Feature("user", "users"), Feature("item", "items")]
        self.embeddings = EmbeddingCollection(tables, features, seed=1)
        self.dense = nn.Sequential(nn.Linear(3 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rows = self.embeddings({"user": users, "item": items})
        user, item = rows["user"], rows["item"]
        logits: Tensor = self.dense(torch.cat([user, item, user * item], 1)).squeeze(1)
        return logits


def clicks(seed: int, batches: int) -> Iterator[Clicks]:
    """Clicks whose probability depends on hidden vectors of users and items."""
    hidden = torch.Generator().manual_seed(42)
    taste, kind = torch.randn(USERS, 4, generator=hidden), torch.randn(ITEMS, 4, generator=hidden)
    make = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        users = torch.randint(USERS, (BATCH,), generator=make)
        items = torch.randint(ITEMS, (BATCH,), generator=make)
        chance = torch.sigmoid((taste[users] * kind[items]).sum(1))
        yield users, items, (torch.rand(BATCH, generator=make) < chance).float()


def train(model: Recommender, optimizer: torch.optim.Optimizer, batches: list[Clicks]) -> None:
    for users, items, clicked in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def auc(model: Recommender) -> float:
    model.eval()
    with torch.no_grad():
        scored = [(model(users, items), clicked) for users, items, clicked in clicks(99, 40)]
    model.train()
    scores, labels = (torch.cat(column) for column in zip(*scored, strict=True))
    return float(metrics.auc(scores, labels))


class DataCentre:
    """One trainer with half of the clicks, and the model of the last window."""

    def __init__(self, uid: int, store: ObjectStore) -> None:
        self.uid, self.store = uid, store
        self.local, self.shared = Recommender(), Recommender()
        self.optimizer = torch.optim.Adam(self.local.dense.parameters(), 0.005)
        self.rows = PeerTables(self.local.embeddings.shards, self.shared.embeddings.shards)
        dims = dict.fromkeys(("users", "items"), DIM)
        self.schema = PayloadSchema.of(self.local, tables=dims, chunk=32, keep=1024, bins=256)
        self.update = OuterUpdate(self.schema)
        self.sent = 0

    def work(self, window: int, batches: list[Clicks]) -> None:
        """Train, and publish the changes since the last window."""
        train(self.local, self.optimizer, batches)
        before, after = dict(self.shared.named_parameters()), dict(self.local.named_parameters())
        change = {name: (before[name] - after[name]).detach() for name in before}
        compressed = compress(change, self.schema, tables=self.rows.changes())
        self.sent += publish(self.store, compressed, Label("centres", window, self.uid)).bytes

    def gather(self, window: int) -> None:
        """Apply the updates of both, and continue from the result."""
        plan = GatherPlan(
            run="centres",
            window=window,
            schema=self.schema,
            primary=(1, 2),
            update=UpdateConfig(clip="none"),
        )
        stores, tables = {"default": self.store}, self.shared.embeddings.shards
        report = run_window(plan, self.shared, self.update, stores, tables=tables)
        assert report.decision.go, report.decision.reason
        self.rows.adopt()
        self.local.load_state_dict(dict(self.shared.named_parameters()), strict=False)


def together(windows: int, steps: int) -> tuple[float, int]:
    """AUC of two data centres, and the bytes that they sent."""
    store = open_object_store("memory://")
    centres = [DataCentre(uid, store) for uid in (1, 2)]
    streams = [clicks(uid, windows * steps) for uid in (1, 2)]
    for window in range(windows):
        for centre, stream in zip(centres, streams, strict=True):
            centre.work(window, [next(stream) for _ in range(steps)])
        for centre in centres:
            centre.gather(window)
    return auc(centres[0].shared), sum(centre.sent for centre in centres)


def alone(windows: int, steps: int) -> float:
    """AUC of one trainer that sees the clicks of both."""
    model = Recommender()
    optimizer = torch.optim.Adam(model.dense.parameters(), 0.005)
    both = zip(clicks(1, windows * steps), clicks(2, windows * steps), strict=True)
    train(model, optimizer, [batch for pair in both for batch in pair])
    return auc(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--steps", type=int, default=16, help="steps between two exchanges")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gathered, sent = together(given.windows, given.steps)
    single = alone(given.windows, given.steps)
    print(f"two data centres, exchange every {given.steps} steps: AUC {gathered:.4f}, {sent:,} bytes sent")
    print(f"one trainer with all clicks: AUC {single:.4f}")
    print(f"ratio {gathered / single:.4f}")


if __name__ == "__main__":
    main()
