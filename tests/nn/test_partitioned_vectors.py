"""The predecessor's PartitionedHashTable vectors (reference 1.5), through EmbeddingCollection.

Features uid [1, 4], gid [1, 4, 8] and cid [1, 4, 8]: segment 0 is FTRL, the others Adagrad, all with the
predecessor's defaults (accumulators 0.1, no eps, beta, l1 and l2 0), from zeros, rate 1. Layouts by
position: `bias` the first slices, `vec` the second, `deep` the third. Six examples: example i has uid 3i,
gid 3i + 1, cid 3i + 2. The predecessor spread ids over two servers by parity; here they lie in one place.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from megalith import (
    FTRL,
    Adagrad,
    EmbeddingCollection,
    Feature,
    Layout,
    Segment,
    Slice,
    Sum,
    TableConfig,
    Zeros,
)
from tests.nn.support import contents

DIMS = {"uid": [1, 4], "gid": [1, 4, 8], "cid": [1, 4, 8]}
LAYOUTS = ["bias", "vec", "deep"]
BATCH = {name: torch.arange(6) * 3 + k for k, name in enumerate(DIMS)}
SERVERS = 2


def table(name: str) -> TableConfig:
    ftrl = FTRL(1.0, initial_accumulator_value=0.1, beta=0.0, l1=0.0, l2=0.0)
    adagrad = Adagrad(1.0, initial_accumulator_value=0.1, eps=0.0)
    segments = [
        Segment(dim, optimizer=adagrad if number else ftrl, initializer=Zeros())
        for number, dim in enumerate(DIMS[name])
    ]
    return TableConfig(name, segments=segments)


def slices(position: int) -> list[Slice]:
    """The slices at a position of all features that have it."""
    cuts = {name: list(pairwise(accumulate(dims, initial=0))) for name, dims in DIMS.items()}
    return [Slice(name, *own[position]) for name, own in cuts.items() if position < len(own)]


def partitioned(engine: str, merged: bool, update: str = "backward") -> EmbeddingCollection:
    """A table for each feature or, as the predecessor merged equal configs, one for gid and cid."""
    tables = [table("uid"), table("gid")] + ([] if merged else [table("cid")])
    features = [Feature(name, "gid" if merged and name == "cid" else name, Sum()) for name in DIMS]
    layouts = [Layout(name, slices(position)) for position, name in enumerate(LAYOUTS)]
    return EmbeddingCollection(tables, features, layouts=layouts, update=update, engine=engine)


def assigned(name: str) -> Tensor:
    """`gen_data`: of each server p the fids p, p + 2, p + 4, ..., as many as the table is wide."""
    dim = sum(DIMS[name])
    return torch.cat([server + SERVERS * torch.arange(dim) for server in range(SERVERS)])


def fill(made: EmbeddingCollection, value: float) -> None:
    for name, config in made.shards.configs.items():
        ids = assigned(name)
        made.shards.assign({name: (ids, torch.full((len(ids), config.dim), value))})


both_merged = pytest.mark.parametrize("merged", [False, True], ids=["own tables", "merged"])


@both_merged
def test_basic_assign_and_assign_add(engine: str, merged: bool) -> None:
    made = partitioned(engine, merged)
    generator = torch.Generator().manual_seed(0)
    for name, config in made.shards.configs.items():
        ids = assigned(name)
        a, b = (torch.rand(len(ids), config.dim, generator=generator) * 2 - 1 for _ in range(2))
        made.shards.assign({name: (ids, a)})
        made.shards.assign_add({name: (ids, b)})
        torch.testing.assert_close(made.shards.lookup({name: ids}).rows[name], a + b, rtol=0, atol=1e-6)


@both_merged
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_lookup(engine: str, merged: bool, train: bool) -> None:
    made = partitioned(engine, merged).train(train)
    fill(made, 2.0)

    out = made(BATCH)

    assert list(out) == LAYOUTS
    # uid 12 and 15 are not among the ten ids assigned.
    assert out["bias"].tolist() == [[2, 2, 2]] * 4 + [[0, 2, 2]] * 2
    assert out["vec"].tolist() == [[2] * 12] * 4 + [[0] * 4 + [2] * 8] * 2
    assert out["deep"].tolist() == [[2] * 16] * 6


def ftrl_step(w: float, g: float, n: float = 0.1, lr: float = 1.0) -> float:
    """FTRL of reference 3.3 with beta, l1 and l2 0: z = g - (sqrt(n + g^2) - sqrt(n)) / lr * w."""
    z = g - ((n + g * g) ** 0.5 - n**0.5) / lr * w
    return float(-lr * z / (n + g * g) ** 0.5)


def adagrad_step(w: float, g: float, n: float = 0.1, lr: float = 1.0) -> float:
    """Adagrad of reference 3.3: w -= lr * g / sqrt(n + g^2)."""
    return float(w - lr * g / (n + g * g) ** 0.5)


def test_the_expected_numbers_written_out() -> None:
    assert ftrl_step(3.0, 2.0) == pytest.approx(1.5438, abs=1e-4)
    assert adagrad_step(3.0, 2.0) == pytest.approx(2.0123, abs=1e-4)
    assert ftrl_step(0.0, 2.0) == adagrad_step(0.0, 2.0) == pytest.approx(-0.98773, abs=1e-5)


@both_merged
@pytest.mark.parametrize("update", ["backward", "step"])
def test_apply_gradients(engine: str, merged: bool, update: str) -> None:
    made = partitioned(engine, merged, update)
    fill(made, 3.0)

    out = made(BATCH)
    sum(2.0 * tensor.sum() for tensor in out.values()).backward()
    if update == "step":
        made.step()

    touched: dict[str, set[int]] = {}
    for feature in made.features:
        touched.setdefault(feature.table, set()).update(BATCH[feature.name].tolist())
    for name, config in made.shards.configs.items():
        before = dict.fromkeys(assigned(name).tolist(), 3.0)
        rows = contents(made, name)
        assert rows.keys() == before.keys() | touched[name]
        for id, row in rows.items():
            w = before.get(id, 0.0)
            stepped = [ftrl_step(w, 2.0)] + [adagrad_step(w, 2.0)] * (config.dim - 1)
            expected = stepped if id in touched[name] else [w] * config.dim
            assert row == pytest.approx(expected, rel=1e-6, abs=1e-6), f"table {name!r}, id {id}"
