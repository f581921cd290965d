"""`torch.set_default_device`: the tensors of a user may be on another device by default than those of tables.

Here the default is "meta", whose tensors have no data: an internal tensor on the default device would fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith import (
    TTL,
    Adagrad,
    Adam,
    Capacity,
    EmbeddingCollection,
    Feature,
    FirstN,
    Layout,
    Mean,
    MinCount,
    Ragged,
    Slice,
    Table,
    TableConfig,
    checkpoint,
    hash_strings,
)
from tests.table.engines.cuda_configs import cases

CPU = torch.device("cpu")
ENGINES = ["reference", "cpu", "cuda"]


@pytest.fixture(autouse=True)
def other_default() -> Iterator[None]:
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        yield


def ids(*values: int) -> Tensor:
    return torch.tensor(values, device=CPU)


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.from_lengths(ids(*(id for row in rows for id in row)), ids(*map(len, rows)))


def test_a_ragged_of_lists_is_on_the_default_device() -> None:
    assert Ragged.from_lists([[1], [2, 3]]).values.is_meta
    with torch.device("cpu"):
        assert Ragged.from_lists([[1], [2, 3]]).values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_calls_of_a_table(engine: str) -> None:
    table = Table(TableConfig("t", dim=2, optimizer=Adagrad(0.1)), engine=engine)
    ones = torch.ones(3, 2, device=CPU)
    table.track("a")
    table.apply_gradients(ids(1, 2, 1), ones, step=0, time=0)
    table.assign(ids(1, 2, 3), ones)
    table.assign_add(ids(1, 2, 3), ones)
    assert table.lookup(ids(1, 3)).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert table.reinitialize(ids(3, 4)).tolist() == [1, 0]
    assert table.remove(ids(4)) == 1
    assert sorted(table.drain_touched("a")[0].tolist()) == [1, 2, 3]
    assert sum(chunk.ids.numel() for chunk in table.scan()) == len(table) == 3
    assert 2 in table
    table.reserve(100)
    table.clear()
    assert table.stats().rows == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_policies(engine: str) -> None:
    config = TableConfig(
        "t", dim=2, optimizer=Adam(0.1), admission=MinCount(2), eviction=(TTL(5), Capacity(rows=3))
    )
    table = Table(config, engine=engine)
    for step in range(4):
        table.apply_gradients(ids(step, step + 1), torch.ones(2, 2, device=CPU), step=step, time=step)
    assert sorted(table.evict(100).tolist()) == [1, 2, 3]


@pytest.mark.parametrize("engine", cases(ENGINES, "reference", "cpu"))
def test_a_collection_trains_and_is_saved(engine: str, tmp_path: Path) -> None:
    features = [
        Feature("one", "a"),
        Feature("mean", "b", combiner=Mean()),
        Feature("first", "a", combiner=FirstN(2)),
        Feature("rows", "b", combiner=None),
    ]
    tables = [
        TableConfig("a", dim=4, optimizer=Adagrad(0.1)),
        TableConfig("b", dim=3, optimizer=Adagrad(0.1)),
    ]
    collection = EmbeddingCollection(tables, features, engine=engine)
    columns = {
        "one": ids(1, 2, 3),
        "mean": ragged([1], [], [2, 3]),
        "first": torch.tensor([[1, 2], [3, 4], [5, 6]], device=CPU),
        "rows": hash_strings(["x", "y", "x"]),
    }
    for _ in range(4):
        out = collection(columns)
        (out["one"].sum() + out["mean"].sum() + out["first"].sum() + out["rows"].values.sum()).backward()
    before = collection.eval()(columns)["one"]
    assert before.device == CPU
    collection.load_state_dict(collection.state_dict())
    checkpoint.save(collection, tmp_path / "saved")
    checkpoint.load(collection, tmp_path / "saved")
    assert torch.equal(collection(columns)["one"], before)


@pytest.mark.parametrize("engine", ENGINES)
def test_layouts_and_joint_steps(engine: str) -> None:
    collection = EmbeddingCollection(
        [TableConfig("a", dim=4, optimizer=Adagrad(0.1))],
        [Feature("x", "a"), Feature("y", "a", combiner=Mean())],
        layouts=[Layout("both", [Slice("x", 0, 2), Slice("y", 1, 4)])],
        update="step",
        clip_norm=1.0,
        engine=engine,
    )
    columns = {"x": ids(1, 2), "y": ragged([1], [2, 3])}
    for _ in range(2):
        collection(columns)["both"].sum().backward()
    assert float(collection.grad_norm()) > 0
    assert collection.grads_finite()
    collection.step()
    assert len(collection.tables["a"]) == 3
