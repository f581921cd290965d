"""LocalShards: the Shards contract over several tables in one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, Capacity, LocalShards, MinCount, TableConfig
from megalith.errors import InputError, MegalithError, TableFullError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.shards import CommMetrics, PreparedIds
from megalith.table import Optimizer
from megalith.table.validation import InputChecks
from tests.shards.vectors import VECTORS
from tests.shards.vectors import table as zeros
from tests.table.support import ints as ids


def rows(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def contents(shards: LocalShards) -> dict[str, dict[int, list[float]]]:
    return {
        name: {
            int(i): row.tolist()
            for chunk in shards.scan(name)
            for i, row in zip(chunk.ids, chunk.rows, strict=True)
        }
        for name in shards.configs
    }


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.__name__)
def test_vectors(engine: str, vector: Any) -> None:
    vector(lambda *tables: LocalShards(tables, engine=engine))


# ---- the contract


def test_lookup_is_used_once() -> None:
    shards = LocalShards([zeros("a", 1)])
    lookup = shards.lookup({"a": ids(1)})
    shards.apply_gradients(lookup, {"a": rows([1])}, step=0)
    with pytest.raises(UsageError, match="already been used"):
        shards.apply_gradients(lookup, {"a": rows([1])}, step=0)
    assert contents(shards)["a"] == {1: [-1]}


def test_a_lookup_survives_removal_in_between(engine: str) -> None:
    shards = LocalShards([zeros("a", 1)], engine=engine)
    shards.assign({"a": (ids(1, 2, 3), rows([1], [2], [3]))})
    lookup = shards.lookup({"a": ids(1, 3)})
    shards.remove({"a": ids(1, 2)})
    shards.assign({"a": (ids(7), rows([7]))})  # takes a freed row

    shards.apply_gradients(lookup, {"a": rows([1], [1])}, step=0)

    assert contents(shards)["a"] == {1: [-1], 3: [2], 7: [7]}


def test_prepared_ids_give_the_same_lookup_and_travel_between_processes() -> None:
    shards = LocalShards([zeros("a", 1)])
    shards.assign({"a": (ids(1, 2), rows([1], [2]))})
    prepared = pickle.loads(pickle.dumps(shards.prepare({"a": ids(2, 1).int()})))
    assert shards.lookup(prepared).rows["a"].tolist() == [[2], [1]]


def test_unknown_tables_are_named() -> None:
    shards = LocalShards([zeros("user", 1), zeros("item", 1)])
    for call in (
        lambda: shards.lookup({"itme": ids(1)}),
        lambda: shards.assign({"itme": (ids(1), rows([1]))}),
        lambda: shards.apply_gradients({"itme": ids(1)}, {"itme": rows([1])}, step=0),
        lambda: shards.reinitialize({"itme": ids(1)}),
        lambda: shards.remove({"itme": ids(1)}),
        lambda: shards.scan("itme"),
    ):
        with pytest.raises(KeyError, match="unknown table 'itme' \\(known: 'user', 'item'\\)"):
            call()
    with pytest.raises(UnknownNameError, match="was not looked up"):
        shards.lookup({"user": ids(1)}).rows["item"]


@pytest.mark.parametrize("wrong", [rows([1, 1]), rows([float("nan")]), torch.ones(1, 1).double()])
def test_nothing_is_written_to_any_table_when_one_gradient_is_wrong(engine: str, wrong: Tensor) -> None:
    shards = LocalShards([zeros("a", 1), zeros("b", 1)], engine=engine)
    lookup = shards.lookup({"a": ids(1), "b": ids(1)})
    with pytest.raises(InputError, match="table 'b'"):
        shards.apply_gradients(lookup, {"a": rows([1]), "b": wrong}, step=0)
    assert contents(shards) == {"a": {}, "b": {}}
    shards.apply_gradients(lookup, {"a": rows([1])}, step=0)  # and the lookup can still be used


def test_nothing_is_written_when_one_schedule_fails() -> None:
    shards = LocalShards([zeros("a", 1), zeros("b", 1, lambda step: float("nan"))])
    with pytest.raises(InputError, match="table 'b', segment 0: learning rate"):
        shards.apply_gradients({"a": ids(1), "b": ids(1)}, {"a": rows([1]), "b": rows([1])}, step=0)
    assert contents(shards) == {"a": {}, "b": {}}


# ---- pooling over several tables


def two_table_pooling() -> tuple[dict[str, Tensor], Pooling]:
    """Output 0 = [sum of a | mean of b], output 1 = b's rows added to a's bias column."""
    asked = {"a": ids(1, 2, 2), "b": ids(5, 6)}
    bags_a = Bags(torch.tensor([0, 1, 3]), (OutputSlice(0, 0, 0, 2), OutputSlice(1, 0, 2, 3)))
    bags_b = Bags(
        torch.tensor([0, 0, 2]),
        (OutputSlice(0, 2, 0, 2), OutputSlice(1, 0, 0, 1, accumulate=True)),
        divisor=torch.tensor([1.0, 2.0]),
    )
    return asked, Pooling(((2, 4), (2, 1)), {"a": (bags_a,), "b": (bags_b,)})


def test_pooling_spans_tables(engine: str) -> None:
    shards = LocalShards([zeros("a", 3), zeros("b", 2)], engine=engine)
    shards.assign({"a": (ids(1, 2), rows([1, 2, 3], [10, 20, 30])), "b": (ids(5, 6), rows([1, 1], [3, 5]))})
    asked, pooling = two_table_pooling()
    lookup = shards.lookup({"b": asked["b"], "a": asked["a"]})  # the pooling's order counts, not this one

    first, second = lookup.pool(pooling)

    assert first.tolist() == [[1, 2, 0, 0], [20, 40, 2, 3]]
    assert second.tolist() == [[3], [62]]
    shards.apply_gradients(lookup, [torch.ones(2, 4), torch.ones(2, 1)], pooling=pooling, step=0)
    # id 2 occurs twice: every column -2. b: (1 + 1) / 2 for column 0, 1 / 2 for column 1.
    assert contents(shards) == {
        "a": {1: [0, 1, 2], 2: [8, 18, 28]},
        "b": {5: [0, 0.5], 6: [2, 4.5]},
    }


def test_a_pooling_that_does_not_fit_raises_before_anything_is_written(engine: str) -> None:
    shards = LocalShards([zeros("a", 3), zeros("b", 2)], engine=engine)
    asked, pooling = two_table_pooling()
    asked["b"] = ids(5)
    lookup = shards.lookup(asked)
    with pytest.raises(InputError, match="table 'b': offsets"):
        lookup.pool(pooling)
    with pytest.raises(InputError, match="table 'b': offsets"):
        shards.apply_gradients(lookup, [torch.ones(2, 4), torch.ones(2, 1)], pooling=pooling, step=0)
    with pytest.raises(InputError, match="not looked up"):
        shards.lookup({"a": asked["a"]}).pool(pooling)
    assert contents(shards) == {"a": {}, "b": {}}


def test_tables_are_tracked_together(engine: str) -> None:
    shards = LocalShards([zeros("a"), zeros("b")], engine=engine)
    shards.assign({"a": (ids(1), rows([1]))})
    shards.track("publisher")
    shards.assign({"b": (ids(2, 3), rows([1], [1]))})
    shards.remove({"a": ids(1)})

    drained = {name: (u.tolist(), r.tolist()) for name, (u, r) in shards.drain_touched("publisher").items()}

    assert drained == {"a": ([], [1]), "b": ([2, 3], [])}
    shards.mark_touched("publisher", {"b": ids(3)})
    assert shards.drain_touched("publisher")["b"][0].tolist() == [3]


def test_every_table_is_counted_cleared_and_restored(engine: str) -> None:
    shards = LocalShards([zeros("a", 1), zeros("b", 2)], engine=engine)
    shards.reserve({"a": 100})
    shards.assign({"a": (ids(1, 2), rows([1], [2])), "b": (ids(3), rows([3, 3]))})
    before = contents(shards)
    assert {name: s.rows for name, s in shards.stats().items()} == {"a": 2, "b": 1}
    assert all(use.total > 0 for use in shards.memory().values())
    assert {name: x.numel() for name, x in shards.evict().items()} == {"a": 0, "b": 0}
    kept = {name: list(shards.scan(name)) for name in shards.configs}

    shards.clear()

    assert contents(shards) == {"a": {}, "b": {}}
    for name, chunks in kept.items():
        for chunk in chunks:
            shards.restore(name, chunk)
    assert contents(shards) == before


# ---- one validation, named phases


def test_a_batch_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, pooling = two_table_pooling()
    asked = {name: ids.to(torch.int32) for name, ids in asked.items()}  # int64 ids are checked together
    shards = LocalShards([zeros("a", 3), zeros("b", 2)])
    calls: list[str] = []

    def count(method: str) -> None:
        original = getattr(InputChecks, method)

        def counted(self: InputChecks, *args: object, **options: object) -> object:
            calls.append(f"{method} of {self.name}")
            return original(self, *args, **options)

        monkeypatch.setattr(InputChecks, method, counted)

    count("ids")
    count("grads")
    lookup = shards.lookup(asked)
    lookup.pool(pooling)
    shards.apply_gradients(lookup, [torch.ones(2, 4), torch.ones(2, 1)], pooling=pooling, step=0)

    assert calls == ["ids of a", "ids of b", "grads of a"]  # the gradients of outputs belong to all tables

    shards.track("publisher")
    calls.clear()
    shards.mark_touched("publisher", asked)

    assert calls == ["ids of a", "ids of b"]


def test_the_phases_of_a_step_are_named_in_a_profile(engine: str) -> None:
    asked, pooling = two_table_pooling()
    shards = LocalShards([zeros("a", 3), zeros("b", 2)], engine=engine)

    with torch.profiler.profile() as profile:
        lookup = shards.lookup(asked)
        lookup.gather("a")
        lookup.pool(pooling)
        shards.apply_gradients(lookup, [torch.ones(2, 4), torch.ones(2, 1)], pooling=pooling, step=0)

    spans = {event.key: event.count for event in profile.key_averages() if event.key.startswith("megalith.")}
    assert spans == {"megalith.ids": 1, "megalith.rows": 1, "megalith.pool": 1, "megalith.optimizer": 1}


def test_prepared_ids_made_by_hand_are_validated(engine: str) -> None:
    shards = LocalShards([zeros("a", 2)], engine=engine)
    shards.assign({"a": (ids(1, 2), rows([1, 2], [3, 4]))})
    assert shards.lookup(PreparedIds({"a": ids(1, 2).int()})).rows["a"].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(InputError, match="table 'a': ids"):
        shards.lookup(PreparedIds({"a": torch.ones(2)}))
    with pytest.raises(UnknownNameError, match="unknown table 'zz'"):
        shards.lookup(PreparedIds({"zz": ids(1)}))


def test_what_is_not_a_pair_or_not_a_dict_is_named(engine: str) -> None:
    shards: Any = LocalShards([zeros("a", 1)], engine=engine)
    pair, mapping = (
        r"assign takes a pair \(ids, rows\) per table, got Tensor",
        "must map table names, such as",
    )
    for call, text in (
        (lambda: shards.assign({"a": ids(1)}), f"^table 'a': {pair}"),
        (lambda: shards.assign_add(ids(1)), rf"^rows {mapping} \{{'user': \(ids, rows\)\}}"),
        (lambda: shards.lookup(ids(1)), rf"^ids {mapping} \{{'user': ids\}}, got Tensor"),
        (lambda: shards.preparer({"zz": ids(1)}), r"unknown table 'zz' \(known: 'a'\)"),
        (lambda: CommMetrics(shards), "CommMetrics counts the traffic of a SyncShards, got LocalShards"),
        (lambda: shards.add_recorder(None), "LocalShards has no exchanges to record"),
        (lambda: shards.assign({"a": (ids(1), rows([torch.nan]))}), "table 'a': rows hold NaN or Inf"),
        (lambda: LocalShards([zeros("a", 1), zeros("a", 2)]), "two tables are named 'a'"),
        (lambda: shards.apply_gradients({"a": ids(1)}, {}, step=0, time=-3), "time must be"),
    ):
        with pytest.raises(MegalithError, match=text):
            call()
    assert contents(shards) == {"a": {}}


def test_an_update_of_a_full_table_changes_no_table(engine: str) -> None:
    full = TableConfig("b", dim=1, optimizer=SGD(1.0), eviction=Capacity(2, score=None))
    shards = LocalShards([zeros("a"), full], engine=engine)
    with pytest.raises(TableFullError, match="table 'b'"):
        shards.apply_gradients(
            dict.fromkeys("ab", ids(1, 2, 3)), dict.fromkeys("ab", torch.ones(3, 1)), step=0
        )
    assert len(shards.local["a"]) == len(shards.local["b"]) == 0


class Failing(Optimizer):
    """An optimizer written in torch, whose step raises for some gradients."""

    name = "failing"

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        if bool((grads > 100).any()):
            raise RuntimeError("too steep")
        rows -= lr * grads


@pytest.mark.parametrize("first", ["a", "z"])
def test_an_optimizer_that_raises_changes_no_table(engine: str, first: str) -> None:
    configs = [zeros(first), zeros("m"), zeros("n", optimizer=Failing(1.0), admission=MinCount(1))]
    shards = LocalShards([*configs, zeros("o", optimizer=Failing(1.0))], engine=engine)
    batch, flat = dict.fromkeys(shards.configs, ids(1, 2)), dict.fromkeys(shards.configs, rows([1], [1]))
    shards.apply_gradients(batch, flat, step=0)
    before = contents(shards)

    with pytest.raises(RuntimeError, match="too steep"):
        shards.apply_gradients(batch, flat | {"o": rows([1], [200])}, step=1)

    assert contents(shards) == before
    shards.apply_gradients(batch, flat, step=1)
    assert all(row == [-2.0] for table in contents(shards).values() for row in table.values())


@pytest.mark.parametrize("optimizer", [SGD(1.0), Failing(1.0)], ids=["native", "torch"])
@pytest.mark.parametrize("score", ["lru", None])
def test_a_table_that_fills_up_by_admission_changes_no_table(
    engine: str, optimizer: Optimizer, score: str | None
) -> None:
    limited = TableConfig(
        "b", dim=1, optimizer=optimizer, admission=MinCount(2), eviction=Capacity(2, score=score)
    )
    shards = LocalShards([zeros("a", 1), limited, zeros("c", 1)], engine=engine)
    few, many = ids(1, 1, 2, 3, 4), ids(1, 1, 2, 2, 3, 3)  # one and three ids occur twice
    grads = {name: torch.ones(5, 1) for name in ("a", "b", "c")}
    shards.apply_gradients(dict.fromkeys(grads, few), grads, step=0)
    before, pending = contents(shards), [x.tolist() for x in shards.local["b"].pending()]

    with pytest.raises(TableFullError, match="table 'b'"):
        shards.apply_gradients(dict.fromkeys(grads, many), {name: torch.ones(6, 1) for name in grads}, step=1)

    assert contents(shards) == before
    assert [x.tolist() for x in shards.local["b"].pending()] == pending == [[2, 3, 4], [1, 1, 1]]
