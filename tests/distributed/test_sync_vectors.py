"""Monolith's vectors for tables over shards, under Megalith's decisions, on 1, 2 and 4 real ranks.

Where Monolith made one optimizer step a worker, in any order, ranks that push the same id make one step of
the sum. Every rank must read the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import SGD, Adagrad, Adam, LocalShards, PolynomialDecay, SyncShards, TableConfig, Zeros
from megalith.table import Optimizer
from tests.distributed.ranks import run_ranks
from tests.table.support import ints

GROWING = PolynomialDecay(1.0, 10, 2.0)
NONE = ints()


def table(name: str, dim: int, lr: Any = 1.0, optimizer: Optimizer | None = None) -> TableConfig:
    """A table that starts at zeros."""
    return TableConfig(name, dim=dim, optimizer=optimizer or SGD(lr), initializer=Zeros())


def one_rate(step: int) -> float:
    return 1.0


class Ranks:
    """SyncShards to which only rank 0 brings data by default; all ranks read."""

    def __init__(self, *tables: TableConfig, all_push: bool = False, **options: Any) -> None:
        self.shards = SyncShards(tables, **options)
        self.has_data = all_push or dist.get_rank() == 0

    def read(self, table: str, *ids: int) -> list[list[float]]:
        return self.shards.lookup({table: ints(*ids)}).rows[table].tolist()

    def push(self, ids: dict[str, list[int]], grads: dict[str, list[list[float]]], step: int = 0) -> None:
        """Looks ids up and applies their gradients; a rank without data has empty tensors."""
        keep = slice(None) if self.has_data else slice(0)
        lookup = self.shards.lookup({name: ints(*x)[keep] for name, x in ids.items()})
        gradients = {name: torch.tensor(x)[keep] for name, x in grads.items()}
        self.shards.apply_gradients(lookup, gradients, step=step)

    def put(self, add: bool, **rows: dict[int, list[float]]) -> None:
        """assign or assign_add; a rank without data names no table."""
        given = {name: (ints(*x), torch.tensor(list(x.values()))) for name, x in rows.items()}
        call = self.shards.assign_add if add else self.shards.assign
        call(given if self.has_data else {})


def one_table(options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    ranks = Ranks(table("t", 2), **options)
    ranks.put(True, t={1: [1.0, 1.0], 2: [2.0, 2.0], 3: [3.0, 3.0]})
    found["basic"] = ranks.read("t", 1, 2, 3)
    found["look up twice"] = ranks.read("t", 1, 1, 3)
    ranks.put(False, t={2: [1.0, 1.0], 3: [2.0, 2.0], 4: [3.0, 3.0]})
    found["assign"] = ranks.read("t", 1, 2, 3, 4)

    ranks = Ranks(table("t", 1), **options)
    ranks.push({"t": [0, 1]}, {"t": [[2.0], [2.0]]})
    found["apply_gradients"] = ranks.read("t", 0, 1)

    ranks = Ranks(table("t", 1, GROWING), **options)
    for step in (0, 1):
        ranks.push({"t": [0, 1]}, {"t": [[2.0], [2.0]]}, step)
        found[f"learning rate at step {step}"] = ranks.read("t", 0, 1)

    ranks = Ranks(table("t", 1), **options)
    ranks.push({"t": [0, 3, 0, 1]}, {"t": [[2.0]] * 4})
    found["duplicates"] = ranks.read("t", 0, 3, 0, 1)

    ranks = Ranks(table("t", 1), **options)
    ranks.read("t", 1, 0)
    ids, grads = (ints(1, 1), -2 * torch.ones(2, 1)) if ranks.has_data else (NONE, torch.empty(0, 1))
    ranks.shards.apply_gradients({"t": ids}, {"t": grads}, step=0)
    found["other ids than looked up"] = ranks.read("t", 1, 0)
    return found


def tables_of_two_dims(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ranks = Ranks(table("1", 1), table("2", 2), **options)

    def both() -> list[Any]:
        rows = ranks.shards.lookup({"1": ints(1, 2), "2": ints(3)}).rows
        return [rows["1"].tolist(), rows["2"].tolist()]

    ranks.put(True, **{"1": {1: [-1.0], 2: [-2.0]}, "2": {3: [-3.0, -3.0]}})
    found["assign_add"] = both()
    half = {"1": [[-0.5], [-1.0]], "2": [[-1.5, -1.5]]}
    ranks.push({"1": [1, 2], "2": [3]}, half)
    found["gradients of half the values"] = both()

    ranks.put(False, **{"1": {1: [-0.5], 2: [-1.0]}, "2": {3: [-1.5, -1.5]}})
    asked = {"1": ints(1, 2, 3), "3": ints(1, 2, 3)} if ranks.has_data else {}
    status = ranks.shards.reinitialize(asked, missing_ok=True)
    found["after reinitialize"] = both()
    found["status"] = {name: x.tolist() for name, x in status.items()} if ranks.has_data else "no data"
    found["unknown table"] = list(ranks.shards.lookup({"1": ints(1), "3": ints(1)}, missing_ok=True).rows)

    ranks = Ranks(table("1", 1, GROWING), table("2", 2, one_rate), **options)
    ranks.put(True, **{"1": {1: [-1.0], 2: [-2.0]}, "2": {3: [-3.0, -3.0]}})
    for step in (0, 1):
        ranks.push({"1": [1, 2], "2": [3]}, half, step)
        found[f"own learning rates at step {step}"] = both()

    ranks = Ranks(table("1", 1), table("2", 2), wire="float16", **options)
    ranks.push({"1": [1, 2], "2": [3]}, {"1": [[2.0], [2.0]], "2": [[3.0, 3.0]]})
    found["float16 on the wire"] = both()
    return found


def many_tables(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tables = table("slot0", 1), table("slot1", 2), table("slot2", 2)
    ranks = Ranks(*tables, **options)
    ranks.put(True, slot0={0: [1.0]}, slot1={1: [2.0, 2.0]}, slot2={2: [4.0, 4.0], 3: [8.0, 8.0]})
    rows = ranks.shards.lookup({"slot2": ints(2, 3), "slot0": ints(0), "slot1": ints(1)}).rows
    found["assign_add"] = {name: rows[name].tolist() for name in rows}

    for name, lr in (("rate 1", 1.0), ("rate 0.1", PolynomialDecay(0.1, 10, 1.1))):
        ranks = Ranks(table("slot0", 1, lr), table("slot1", 2, lr), **options)
        ranks.push({"slot0": [0], "slot1": [1, 2]}, {"slot0": [[2.0]], "slot1": [[1.0, 3.0], [2.0, 4.0]]})
        found[f"gradients, {name}"] = [ranks.read("slot0", 0), ranks.read("slot1", 1, 2)]

    ranks = Ranks(*tables, **options)
    first = dist.get_rank() == 0
    ids = {"slot0": ints(1), "slot1": ints(2, 2)} if first else {}
    grads = {"slot0": torch.tensor([[3.0]]), "slot1": torch.tensor([[1.1, 3.1], [2.2, 4.2]])} if first else {}
    ranks.shards.apply_gradients(ids, grads, step=0)
    found["without a lookup"] = [ranks.read("slot0", 1), ranks.read("slot1", 1, 2)]

    ranks = Ranks(table("merged", 1), **options)  # two features of one table, with the same id
    given: dict[str, Any] = {"merged": (ints(1, 1), torch.tensor([[2.0], [4.0]]))} if first else {}
    ranks.shards.assign_add(given)
    found["two features of a table"] = [ranks.read("merged", 1, 1)]
    ranks.push({"merged": [1, 1]}, {"merged": [[1.0], [1.0]]})
    found["two features of a table"].append(ranks.read("merged", 1, 1))

    ranks = Ranks(table("t", 1), **options)  # an id from two shards, gradients 1 and 2
    own = {0: [1.0], 1: [2.0]} if dist.get_world_size() > 1 else {0: [1.0, 2.0]}
    pushed = torch.tensor(own.get(dist.get_rank(), [])).view(-1, 1)
    ranks.shards.apply_gradients({"t": ints(*[1] * len(pushed))}, {"t": pushed}, step=0)
    found["an id of two ranks"] = ranks.read("t", 1)
    return found


def all_push(options: dict[str, Any]) -> dict[str, Any]:
    """Reference 1.6: every rank pushes the same gradients."""
    found: dict[str, Any] = {}
    ranks = Ranks(table("1", 1), table("2", 2, GROWING), all_push=True, **options)
    found["before"] = [ranks.read("1", 1, 1), ranks.read("2", 2)]
    ranks.push({"1": [1, 1], "2": [2]}, {"1": [[0.5], [0.5]], "2": [[0.5, 1.0]]})
    found["after"] = [ranks.read("1", 1, 1), ranks.read("2", 2)]
    size = dist.get_world_size()
    for optimizer in (Adagrad(0.1), Adam(0.1), SGD(0.1)):
        ranks = Ranks(table("t", 2, optimizer=optimizer), all_push=True, **options)
        alone = LocalShards([table("t", 2, optimizer=optimizer)])
        grads = torch.tensor([[0.5, -0.25]])
        for step in range(3):
            ranks.push({"t": [7]}, {"t": grads.tolist()}, step)
            alone.apply_gradients({"t": ints(7)}, {"t": size * grads}, step=step)
        expected: Tensor = alone.lookup({"t": ints(7)}).rows["t"]
        found[f"{optimizer.name} makes one step of the sum"] = torch.allclose(
            torch.tensor(ranks.read("t", 7)), expected, rtol=1e-6, atol=0
        )
    return found


def on_a_rank(options: dict[str, Any]) -> dict[str, Any]:
    work = (one_table, tables_of_two_dims, many_tables, all_push)
    return {each.__name__: each(options) for each in work}


@pytest.fixture(scope="module", params=[(1, "gloo"), (2, "gloo"), (4, "auto")], ids=str)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    size, transport = request.param
    return run_ranks(on_a_rank, {"transport": transport, "timeout": 60.0}, world_size=size)


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_one_table(found: list[dict[str, Any]]) -> None:
    for rank in found:
        got = rank["one_table"]
        assert got["basic"] == [[1, 1], [2, 2], [3, 3]]
        assert got["look up twice"] == [[1, 1], [1, 1], [3, 3]]
        assert got["assign"] == [[1, 1], [1, 1], [2, 2], [3, 3]]
        assert got["apply_gradients"] == [[-2], [-2]]
        assert got["learning rate at step 0"] == [[-2], [-2]]
        assert [x for (x,) in got["learning rate at step 1"]] == near([-4.2, -4.2])
        assert got["duplicates"] == [[-4], [-2], [-4], [-2]]
        assert got["other ids than looked up"] == [[4], [0]]


def test_tables_of_two_dims(found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        got = rank["tables_of_two_dims"]
        assert got["assign_add"] == [[[-1], [-2]], [[-3, -3]]]
        assert got["gradients of half the values"] == [[[-0.5], [-1]], [[-1.5, -1.5]]]
        assert got["after reinitialize"] == [[[0], [0]], [[-1.5, -1.5]]]
        assert got["status"] == ({"1": [1, 1, 0], "3": [-1, -1, -1]} if number == 0 else "no data")
        assert got["unknown table"] == ["1"]
        assert got["own learning rates at step 0"] == [[[-0.5], [-1]], [[-1.5, -1.5]]]
        (one, two), three = got["own learning rates at step 1"]
        assert [*one, *two] == near([0.05, 0.1])
        assert three == [[0, 0]]
        assert got["float16 on the wire"] == [[[-2], [-2]], [[-3, -3]]]


def test_many_tables(found: list[dict[str, Any]]) -> None:
    for rank in found:
        got = rank["many_tables"]
        assert got["assign_add"] == {"slot0": [[1]], "slot1": [[2, 2]], "slot2": [[4, 4], [8, 8]]}
        assert got["gradients, rate 1"] == [[[-2]], [[-1, -3], [-2, -4]]]
        (zero,), (one, two) = got["gradients, rate 0.1"]
        assert [*zero, *one, *two] == near([-0.2, -0.1, -0.3, -0.2, -0.4])
        (one,), (absent, two) = got["without a lookup"]
        assert (one, absent) == ([-3], [0, 0])
        assert two == near([-3.3, -7.3])
        assert got["two features of a table"] == [[[6], [6]], [[4], [4]]]
        assert got["an id of two ranks"] == [[-3]]


def test_ranks_that_push_the_same_gradient_make_one_step_of_the_sum(found: list[dict[str, Any]]) -> None:
    size = len(found)
    for rank in found:
        got = rank["all_push"]
        assert got["before"] == [[[0], [0]], [[0, 0]]]
        assert got["after"] == [[[-size], [-size]], [[-0.5 * size, -size]]]
        for optimizer in ("adagrad", "adam", "sgd"):
            assert got[f"{optimizer} makes one step of the sum"]
