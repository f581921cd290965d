"""Each model's logits against its formula, written out with loops."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import Normal, Ragged
from megalith.errors import InputError, UnknownNameError
from megalith.models import DIN, DLRM, DCNv2, DeepFM, EmbeddingConfig, Model

DIM = 3
FEATURES = {
    "user": Ragged.from_lists([[1], [2], [1]]),
    "item": Ragged.from_lists([[7], [8], [9]]),
    "tags": Ragged.from_lists([[4, 5], [], [6]]),
}
DENSE = torch.tensor([[0.5, -1.0], [0.0, 2.0], [1.5, 1.0]])


def config(*names: str) -> EmbeddingConfig:
    torch.manual_seed(0)
    return EmbeddingConfig(names or list(FEATURES), dim=DIM, initializer=Normal(std=1.0))


def vector(model: Model, table: str, ids: Tensor, columns: slice = slice(None)) -> Tensor:
    """The mean of some ids' rows."""
    rows = model.embeddings.shards.lookup({table: ids}).rows[table][:, columns]
    return rows.mean(0) if len(ids) else torch.zeros(rows.shape[1])


def close(
    model: Model, expected: list[Tensor], features: Any = FEATURES, dense: Tensor | None = None
) -> None:
    torch.testing.assert_close(model.eval()(features, dense), torch.stack(expected))


def test_deepfm() -> None:
    model = DeepFM(config(), num_dense=2, hidden=(5,))
    ids = {"user": torch.tensor([1, 2]), "item": torch.tensor([7])}
    weights = {name: (i, torch.randn(len(i), 1 + DIM)) for name, i in ids.items()}
    model.embeddings.shards.assign(weights)  # initial weights of first order are 0
    expected = []
    for b in range(3):
        weight = [vector(model, name, column[b], slice(0, 1)) for name, column in FEATURES.items()]
        factors = [vector(model, name, column[b], slice(1, None)) for name, column in FEATURES.items()]
        pairs = sum((x @ y for x, y in combinations(factors, 2)), torch.zeros(()))
        deep = model.deep(torch.cat([*factors, DENSE[b]]))
        expected.append((sum(weight) + pairs + deep + DENSE[b] @ model.linear.weight[0]).squeeze(0))  # type: ignore[union-attr]
    close(model, expected, dense=DENSE)


@pytest.mark.parametrize("num_dense", [0, 2])
def test_dlrm(num_dense: int) -> None:
    model: Any = DLRM(config(), num_dense=num_dense, bottom=(4,), top=(5,))
    expected = []
    for b in range(3):
        first = model.vector if model.bottom is None else model.bottom(DENSE[b])
        vectors = [first, *(vector(model, name, column[b]) for name, column in FEATURES.items())]
        pairs = [x @ y for x, y in combinations(vectors, 2)]
        expected.append(model.top(torch.cat([first, torch.stack(pairs)])).squeeze(0))
    close(model, expected, dense=DENSE)


def test_dcnv2() -> None:
    model: Any = DCNv2(config(), num_dense=2, num_cross=2, rank=2, hidden=(5,))
    expected = []
    for b in range(3):
        x0 = torch.cat([*(vector(model, name, column[b]) for name, column in FEATURES.items()), DENSE[b]])
        x = x0
        for cross in model.cross:
            matrix = cross.up.weight @ cross.down.weight
            x = x0 * (matrix @ x + cross.up.bias) + x
        expected.append(model.last(torch.cat([x, model.deep(x0)])).squeeze(0))
    close(model, expected, dense=DENSE)


HISTORY = Ragged.from_lists([[7, 9, 8, 8], [], [5]])


def din(max_length: int = 3) -> DIN:
    return DIN(config(), target="item", history="past", max_length=max_length, attention=(4,), hidden=(5,))


def test_din_attends_to_the_real_places() -> None:
    model = din(max_length=3)
    expected = []
    for b in range(3):
        target = vector(model, "item", FEATURES["item"][b])
        past = model.embeddings.shards.lookup({"item": HISTORY[b][:3]}).rows["item"]
        scores = [model.attention(torch.cat([p, target, p - target, p * target])) for p in past]
        weights = torch.cat(scores).softmax(0) if scores else torch.zeros(0)
        own = [vector(model, name, column[b]) for name, column in FEATURES.items()]
        expected.append(model.deep(torch.cat([*own, weights @ past])).squeeze(0))
    close(model, expected, FEATURES | {"past": HISTORY})


def test_din_places_that_are_not_real_change_nothing() -> None:
    features = FEATURES | {"past": HISTORY}
    exact, roomy = din(max_length=4).eval(), din(max_length=9).eval()
    torch.testing.assert_close(roomy(features), exact(features))


def test_din_trains_only_the_places_it_looks_at() -> None:
    model = din(max_length=2)
    model(FEATURES | {"past": Ragged.from_lists([[1, 2, 3], [4], []])}).sum().backward()
    (chunk,) = model.embeddings.shards.scan("item")
    assert sorted(chunk.ids.tolist()) == [1, 2, 4, 7, 8, 9]


def test_what_din_refuses() -> None:
    with pytest.raises(UnknownNameError, match=r"target 'movie' is not a feature \(known: 'user', 'item'\)"):
        DIN(config("user", "item"), target="movie", history="past")
    with pytest.raises(InputError, match="history 'user' is also in features"):
        DIN(config("user", "item"), target="item", history="user")
    with pytest.raises(InputError, match="n must be an integer >= 1"):
        din(max_length=0)
