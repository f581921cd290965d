"""Monolith's numeric vectors for tables over shards (reference 1.5 and 1.7), for every placement.

Where Monolith made one optimizer step a worker, in any order, gradients of one id are one step of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalith import SGD, PolynomialDecay, Shards, TableConfig, Zeros
from tests.table.support import ints

Create = Callable[..., Shards]
"""Creates shards of tables; placements over ranks take the option `wire`."""
GROWING = PolynomialDecay(1.0, 10, 2.0)
NONE: list[Any] = []


def table(name: str = "t", dim: int = 1, lr: Any = 1.0, **options: Any) -> TableConfig:
    """A table that starts at zeros."""
    return TableConfig(name, dim=dim, **({"optimizer": SGD(lr), "initializer": Zeros()} | options))


def one_rate(step: int) -> float:
    return 1.0


def near(*expected: float) -> list[Any]:
    return [pytest.approx([x], rel=1e-6, abs=1e-7) for x in expected]


class Data:
    """Shards to which this process may bring no data; every process reads."""

    def __init__(self, shards: Shards, has_data: bool) -> None:
        self.shards, self.has_data = shards, has_data

    def read(self, name: str, *ids: int) -> list[list[float]]:
        return self.shards.lookup({name: ints(*ids)}).rows[name].tolist()

    def push(
        self, ids: dict[str, list[int]], grads: dict[str, list[Any]], step: int = 0, *, lookup: bool = True
    ) -> None:
        """A process without data has empty tensors."""
        keep = slice(None) if self.has_data else slice(0)
        given: Any = {name: ints(*x)[keep] for name, x in ids.items()}
        gradients = {name: torch.tensor(x, dtype=torch.float32)[keep] for name, x in grads.items()}
        self.shards.apply_gradients(self.shards.lookup(given) if lookup else given, gradients, step=step)

    def assign(self, rows: dict[str, dict[int, list[float]]], *, add: bool = False) -> None:
        """A process without data names no table."""
        given = {name: (ints(*x), torch.tensor(list(x.values()))) for name, x in rows.items()}
        (self.shards.assign_add if add else self.shards.assign)(given if self.has_data else {})


def one_table(create: Create, has_data: bool = True) -> None:
    data = Data(create(table(dim=2)), has_data)
    data.assign({"t": {1: [1.0, 1.0], 2: [2.0, 2.0], 3: [3.0, 3.0]}}, add=True)
    assert data.read("t", 1, 2, 3) == [[1, 1], [2, 2], [3, 3]]
    assert data.read("t", 1, 1, 3) == [[1, 1], [1, 1], [3, 3]]
    data.assign({"t": {2: [1.0, 1.0], 3: [2.0, 2.0], 4: [3.0, 3.0]}})
    assert data.read("t", 1, 2, 3, 4) == [[1, 1], [1, 1], [2, 2], [3, 3]]


def gradients_of_one_table(create: Create, has_data: bool = True) -> None:
    data = Data(create(table("plain"), table("twice"), table("other"), table("lr", lr=GROWING)), has_data)
    data.push({"plain": [0, 1]}, {"plain": [[2.0], [2.0]]})
    assert data.read("plain", 0, 1) == [[-2], [-2]]
    data.push({"twice": [0, 3, 0, 1]}, {"twice": [[2.0]] * 4})
    assert data.read("twice", 0, 3, 0, 1) == [[-4], [-2], [-4], [-2]]
    data.read("other", 1, 0)  # other ids than those looked up
    data.push({"other": [1, 1]}, {"other": [[-2.0], [-2.0]]}, lookup=False)
    assert data.read("other", 1, 0) == [[4], [0]]
    for step, expected in enumerate((-2, -4.2)):
        data.push({"lr": [0, 1]}, {"lr": [[2.0], [2.0]]}, step)
        assert data.read("lr", 0, 1) == near(expected, expected)


def two_dims(create: Create, has_data: bool = True) -> None:
    """Rates belong to their tables whatever the order; the predecessor mixed insertion and sorted order."""
    data = Data(create(table("2", 2, lr=one_rate), table("1", 1, lr=GROWING)), has_data)
    half = {"1": [[-0.5], [-1.0]], "2": [[-1.5, -1.5]]}

    def both() -> list[Any]:
        rows = data.shards.lookup({"1": ints(1, 2), "2": ints(3)}).rows
        return [rows["1"].tolist(), rows["2"].tolist()]

    data.assign({"1": {1: [-1.0], 2: [-2.0]}, "2": {3: [-3.0, -3.0]}}, add=True)
    assert both() == [[[-1], [-2]], [[-3, -3]]]
    data.push({"1": [1, 2], "2": [3]}, half)
    assert both() == [[[-0.5], [-1]], [[-1.5, -1.5]]]
    data.push({"1": [1, 2], "2": [3]}, half, 1)
    assert both() == [near(0.05, 0.1), [[0, 0]]]
    data.assign({"1": {1: [-0.5], 2: [-1.0]}, "2": {3: [-1.5, -1.5]}})
    asked = {"1": ints(1, 2, 3), "3": ints(1, 2, 3)} if has_data else {}
    status = data.shards.reinitialize(asked, missing_ok=True)
    expected = {"1": [1, 1, 0], "3": [-1, -1, -1]} if has_data else {}
    assert {name: x.tolist() for name, x in status.items()} == expected
    assert both() == [[[0], [0]], [[-1.5, -1.5]]]
    assert list(data.shards.lookup({"1": ints(1), "3": ints(1)}, missing_ok=True).rows) == ["1"]


def many_tables(create: Create, has_data: bool = True) -> None:
    tables = [table(name, dim) for name, dim in (("slot0", 1), ("slot1", 2), ("slot2", 2), ("merged", 1))]
    data = Data(create(*tables), has_data)
    rows = {"slot0": {0: [1.0]}, "slot1": {1: [2.0, 2.0]}, "slot2": {2: [4.0, 4.0], 3: [8.0, 8.0]}}
    data.assign(rows, add=True)
    found = data.shards.lookup({"slot2": ints(2, 3), "slot0": ints(0), "slot1": ints(1)}).rows
    assert {name: found[name].tolist() for name in rows} == {
        name: list(expected.values()) for name, expected in rows.items()
    }
    grads = {"slot0": [[3.0]], "slot1": [[1.1, 3.1], [2.2, 4.2]]}
    data.push({"slot0": [5], "slot1": [6, 6]}, grads, lookup=False)
    assert (data.read("slot0", 5), data.read("slot1", 7)) == ([[-3]], [[0, 0]])
    assert data.read("slot1", 6) == [pytest.approx([-3.3, -7.3])]
    # What the predecessor called merged slots, two features of one table with the same id.
    two = (ints(1, 1), torch.tensor([[2.0], [4.0]]))
    data.shards.assign_add({"merged": two} if has_data else {})
    assert data.read("merged", 1, 1) == [[6], [6]]
    data.push({"merged": [1, 1]}, {"merged": [[1.0], [1.0]]})
    assert data.read("merged", 1, 1) == [[4], [4]]

    for lr in (1.0, PolynomialDecay(0.1, 10, 1.1)):
        data = Data(create(table("slot0", 1, lr), table("slot1", 2, lr)), has_data)
        data.push({"slot0": [0], "slot1": [1, 2]}, {"slot0": [[2.0]], "slot1": [[1.0, 3.0], [2.0, 4.0]]})
        rate = 1.0 if lr == 1.0 else 0.1
        assert data.read("slot0", 0) == near(-2 * rate)
        assert data.read("slot1", 1, 2) == [
            pytest.approx([-rate, -3 * rate]),
            pytest.approx([-2 * rate, -4 * rate]),
        ]


def float16_on_the_wire(create: Create, has_data: bool = True) -> None:
    data = Data(create(table("1"), table("2", 2), wire="float16"), has_data)
    data.push({"1": [1, 2], "2": [3]}, {"1": [[2.0], [2.0]], "2": [[3.0, 3.0]]})
    assert (data.read("1", 1, 2), data.read("2", 3)) == ([[-2], [-2]], [[-3, -3]])
    data.assign({"1": {9: [1 / 3]}})
    assert data.read("1", 9) == [[torch.tensor(1 / 3).half().item()]]  # rows are rounded on the way back


VECTORS: list[Callable[..., None]] = [one_table, gradients_of_one_table, two_dims, many_tables]
