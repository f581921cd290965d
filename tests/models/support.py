"""What the tests of models share: synthetic data, one small model of each kind, a training loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megalith import Adagrad
from megalith.data import Batch, SyntheticFeature, SyntheticReader
from megalith.models import EmbeddingConfig, Model, build_model, forward_batch

NAMES = ["user", "item", "tags", "context"]


def synthetic_reader(batch_size: int = 256, **options: Any) -> SyntheticReader:
    """A few hundred ids, so that some dozens of batches teach something."""
    features = [
        SyntheticFeature(name="user", num_ids=200),
        SyntheticFeature(name="item", num_ids=100, new_per_batch=0.5, fresh=0.1),
        SyntheticFeature(name="tags", num_ids=30, max_length=4),
        SyntheticFeature(name="context", num_ids=10),
    ]
    return SyntheticReader(features, batch_size=batch_size, **options)


def embeddings(*, without: str | None = None, **options: Any) -> EmbeddingConfig:
    names = [name for name in NAMES if name != without]
    return EmbeddingConfig(names, **{"dim": 4, "optimizer": Adagrad(0.1), **options})


def make(name: str, *, config: dict[str, Any] | None = None, **options: Any) -> Model:
    """A model of the synthetic data by its name. DIN takes the tags for a history of the item."""
    torch.manual_seed(0)
    if name == "din":
        options = {"target": "item", "history": "tags", "max_length": 4, "attention": (8,), **options}
    own = embeddings(without=options.get("history"), **(config or {}))
    return build_model(name, own, **options)


def loss_of(model: Model, batch: Batch) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(forward_batch(model, batch), batch.labels)


def train(model: Model, batches: Iterable[Batch], lr: float = 5e-3) -> list[float]:
    """One pass; the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def known_ids(model: Model) -> dict[str, set[int]]:
    """The ids that have a row, by table."""
    shards = model.embeddings.shards
    return {table: {int(i) for chunk in shards.scan(table) for i in chunk.ids} for table in shards.configs}
