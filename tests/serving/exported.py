"""What the tests of exports share: trained models of every kind, requests of ids they know, and versions."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import Ragged
from megalith.models import Model
from megalith.serving.export.exporter import export_model
from megalith.serving.export.servable import Servable
from tests.models.support import NAMES, make

MODELS = ("deepfm", "dlrm", "dcnv2", "din")
NUM_IDS = 40
"""Every feature's ids are 0 .. NUM_IDS - 1, and training sees all of them."""


def request(size: int = 16, num_dense: int = 0, seed: int = 0) -> tuple[dict[str, Ragged], Tensor | None]:
    """Features of known ids, one id per row but 0 to 4 tags, and dense values if there are any."""
    random = torch.Generator().manual_seed(seed)

    def ids(n: int) -> Tensor:
        return torch.randint(NUM_IDS, (n,), generator=random)

    features = {name: Ragged.from_lengths(ids(size), torch.ones(size, dtype=torch.int64)) for name in NAMES}
    lengths = torch.randint(5, (size,), generator=random)
    features["tags"] = Ragged.from_lengths(ids(int(lengths.sum())), lengths)
    dense = torch.randn(size, num_dense, generator=random) if num_dense else None
    return features, dense


def train(model: Model, steps: int = 4, seed: int = 0) -> Model:
    """Some steps, the first of which has all ids."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        features, dense = request(2 * NUM_IDS, model.num_dense, seed + step)
        if step == 0:
            every = torch.arange(2 * NUM_IDS) % NUM_IDS
            one = torch.ones(2 * NUM_IDS, dtype=torch.int64)
            features = {name: Ragged.from_lengths(every, one) for name in features}
        loss = (model(features, dense) - torch.arange(2.0 * NUM_IDS) % 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@cache
def trained(name: str = "deepfm", num_dense: int = 0, dist_type: str | None = None) -> Model:
    """A model that tests share: not to be written to."""
    return train(make(name, num_dense=num_dense, config={"dist_type": dist_type}))


def served(model: Model, out: Path, **options: Any) -> Servable:
    """A model that stands alone, exported and opened."""
    export_model(model, out, **{"name": "movies", "version": 1, **options})
    return Servable(out / str(options.get("version", 1)))


def logits_of(model: Model, features: Any, dense: Tensor | None = None) -> Tensor:
    """The output of the trained module in eval mode."""
    was = model.training
    with torch.no_grad():
        logits: Tensor = model.eval()(features, dense)
    model.train(was)
    return logits


def rows_of(model: Model, table: str) -> dict[int, Tensor]:
    """The rows of a table by id."""
    rows: dict[int, Tensor] = {}
    for chunk in model.embeddings.shards.scan(table):
        rows |= dict(zip(chunk.ids.tolist(), chunk.rows, strict=True))
    return rows
