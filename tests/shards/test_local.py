"""LocalShards: the Shards contract over several tables in one process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, Capacity, LocalShards, MinCount, PolynomialDecay, TableConfig, Zeros
from megalith.errors import InputError, TableFullError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.shards import CommMetrics, PreparedIds
from megalith.table import Optimizer
from megalith.table.validation import InputChecks


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def zeros(name: str, dim: int, lr: object = 1.0) -> TableConfig:
    return TableConfig(name, dim=dim, optimizer=SGD(lr), initializer=Zeros())  # type: ignore[arg-type]


def contents(shards: LocalShards) -> dict[str, dict[int, list[float]]]:
    return {
        name: {
            int(i): row.tolist()
            for chunk in shards.scan(name)
            for i, row in zip(chunk.ids, chunk.rows, strict=True)
        }
        for name in shards.configs
    }


# ---- vectors of the predecessor (reference 1.5 and 1.7)


def test_assign_add_then_half_gradients(engine: str) -> None:
    shards = LocalShards([zeros("1", 1), zeros("2", 2)], engine=engine)
    asked = {"1": ids(1, 2), "2": ids(3)}
    shards.assign_add({"1": (ids(1, 2), rows([-1], [-2])), "2": (ids(3), rows([-3, -3]))})

    lookup = shards.lookup(asked)

    assert lookup.rows["1"].tolist() == [[-1], [-2]]
    assert lookup.rows["2"].tolist() == [[-3, -3]]
    shards.apply_gradients(lookup, {"1": rows([-0.5], [-1]), "2": rows([-1.5, -1.5])}, step=0)
    lookup = shards.lookup(asked)
    assert lookup.rows["1"].tolist() == [[-0.5], [-1]]
    assert lookup.rows["2"].tolist() == [[-1.5, -1.5]]


def test_reinitialize_reports_in_input_order_and_unknown_tables(engine: str) -> None:
    shards = LocalShards([zeros("1", 1), zeros("2", 2)], engine=engine)
    shards.assign({"1": (ids(1, 2), rows([-1], [-2])), "2": (ids(3), rows([-3, -3]))})
    shards.assign({"1": (ids(1, 2), rows([-0.5], [-1])), "2": (ids(3), rows([-1.5, -1.5]))})

    status = shards.reinitialize({"1": ids(1, 2, 3), "3": ids(1, 2, 3)}, missing_ok=True)

    assert status["1"].tolist() == [1, 1, 0]
    assert status["3"].tolist() == [-1, -1, -1]
    lookup = shards.lookup({"1": ids(1, 2), "2": ids(3), "3": ids(1)}, missing_ok=True)
    assert sorted(lookup.rows) == ["1", "2"]
    assert lookup.rows["1"].tolist() == [[0], [0]]
    assert lookup.rows["2"].tolist() == [[-1.5, -1.5]]


def test_each_table_has_its_own_learning_rate_whatever_the_order(engine: str) -> None:
    # The predecessor built its rates in insertion order and its tables in sorted order.
    decay = PolynomialDecay(1.0, decay_steps=10, end=2.0)
    shards = LocalShards([zeros("2", 2, lambda step: 1.0), zeros("1", 1, decay)], engine=engine)
    asked = {"1": ids(1, 2), "2": ids(3)}
    shards.assign_add({"1": (ids(1, 2), rows([-1], [-2])), "2": (ids(3), rows([-3, -3]))})
    grads = {"1": rows([-0.5], [-1]), "2": rows([-1.5, -1.5])}

    shards.apply_gradients(asked, grads, step=0)
    shards.apply_gradients(asked, grads, step=1)

    lookup = shards.lookup(asked)
    torch.testing.assert_close(lookup.rows["1"], rows([0.05], [0.1]))
    assert lookup.rows["2"].tolist() == [[0, 0]]


def three_slots(engine: str) -> LocalShards:
    return LocalShards([zeros("slot0", 1), zeros("slot1", 2), zeros("slot2", 2)], engine=engine)


def test_apply_without_lookup_sums_duplicates(engine: str) -> None:
    shards = three_slots(engine)

    shards.apply_gradients(
        {"slot0": ids(1), "slot1": ids(2, 2)},
        {"slot0": rows([3]), "slot1": rows([1.1, 3.1], [2.2, 4.2])},
        step=0,
    )

    assert shards.lookup({"slot0": ids(1)}).rows["slot0"].tolist() == [[-3]]
    found = shards.lookup({"slot1": ids(1, 2)}).rows["slot1"]
    torch.testing.assert_close(found, rows([0, 0], [-3.3, -7.3]))


def test_two_features_of_one_table_share_rows(engine: str) -> None:
    # What the predecessor called merged slots: assign_add 2 and 4 reads 6; gradients 1 + 1 leave 4.
    shards = LocalShards([zeros("merged", 1)], engine=engine)

    shards.assign_add({"merged": (ids(1, 1), rows([2], [4]))})

    assert shards.lookup({"merged": ids(1, 1)}).rows["merged"].tolist() == [[6], [6]]
    shards.apply_gradients({"merged": ids(1, 1)}, {"merged": rows([1], [1])}, step=0)
    assert shards.lookup({"merged": ids(1)}).rows["merged"].tolist() == [[4]]


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


@pytest.mark.parametrize(
    "grads",
    [
        {"a": rows([1]), "b": rows([1, 1])},  # wrong shape for b
        {"a": rows([1]), "b": rows([float("nan")])},
        {"a": rows([1]), "b": torch.ones(1, 1, dtype=torch.float64)},
    ],
)
def test_nothing_is_written_to_any_table_when_one_gradient_is_wrong(
    engine: str, grads: dict[str, Tensor]
) -> None:
    shards = LocalShards([zeros("a", 1), zeros("b", 1)], engine=engine)
    lookup = shards.lookup({"a": ids(1), "b": ids(1)})
    with pytest.raises(InputError, match="table 'b'"):
        shards.apply_gradients(lookup, grads, step=0)
    assert contents(shards) == {"a": {}, "b": {}}
    shards.apply_gradients(lookup, {"a": rows([1])}, step=0)  # and the lookup can still be used


def test_nothing_is_written_when_one_schedule_fails() -> None:
    shards = LocalShards([zeros("a", 1), zeros("b", 1, lambda step: float("nan"))])
    with pytest.raises(InputError, match="table 'b', segment 0: learning rate"):
        shards.apply_gradients({"a": ids(1), "b": ids(1)}, {"a": rows([1]), "b": rows([1])}, step=0)
    assert contents(shards) == {"a": {}, "b": {}}


def test_names_must_differ() -> None:
    with pytest.raises(InputError, match="two tables are named 'a'"):
        LocalShards([zeros("a", 1), zeros("a", 2)])


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


def test_scale_multiplies_summed_gradients(engine: str) -> None:
    shards = LocalShards([zeros("a", 1)], engine=engine)
    shards.apply_gradients({"a": ids(1, 1)}, {"a": rows([1], [2])}, step=0, scale=0.5)
    assert contents(shards)["a"] == {1: [-1.5]}


def test_tables_are_tracked_together(engine: str) -> None:
    shards = LocalShards([zeros("a", 1), zeros("b", 1)], engine=engine)
    shards.assign({"a": (ids(1), rows([1]))})
    shards.track("publisher")
    shards.assign({"b": (ids(2, 3), rows([1], [1]))})
    shards.remove({"a": ids(1)})

    drained = shards.drain_touched("publisher")

    assert {name: (u.tolist(), r.tolist()) for name, (u, r) in drained.items()} == {
        "a": ([], [1]),
        "b": ([2, 3], []),
    }
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
    right = shards.lookup({"a": ids(1, 2)}).rows["a"]
    small = PreparedIds({"a": ids(1, 2).int()})
    assert torch.equal(shards.lookup(small).rows["a"], right)
    with pytest.raises(InputError, match="table 'a': ids"):
        shards.lookup(PreparedIds({"a": torch.ones(2)}))
    with pytest.raises(UnknownNameError, match="unknown table 'zz'"):
        shards.lookup(PreparedIds({"zz": ids(1)}))


def test_wrong_times_raise_without_gradients_too(engine: str) -> None:
    with pytest.raises(InputError, match="time"):
        LocalShards([zeros("a", 2)], engine=engine).apply_gradients({"a": ids(1)}, {}, step=0, time=-3)


def test_what_is_not_a_pair_or_not_a_dict_is_named(engine: str) -> None:
    shards = LocalShards([zeros("a", 1)], engine=engine)
    bad: Any = {"a": ids(1)}
    with pytest.raises(
        InputError, match=r"table 'a': assign takes a pair \(ids, rows\) per table, got Tensor"
    ):
        shards.assign(bad)
    with pytest.raises(InputError, match=r"rows must map table names, such as \{'user': \(ids, rows\)\}"):
        shards.assign_add(ids(1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"ids must map table names, such as \{'user': ids\}, got Tensor"):
        shards.lookup(ids(1))  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match=r"unknown table 'zz' \(known: 'a'\)"):
        shards.preparer({"zz": ids(1)})
    with pytest.raises(UsageError, match="CommMetrics counts the traffic of a SyncShards, got LocalShards"):
        CommMetrics(shards)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="LocalShards has no exchanges to record"):
        shards.add_recorder(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="table 'a': rows hold NaN or Inf"):
        shards.assign({"a": (ids(1), torch.full((1, 1), torch.nan))})
    assert contents(shards) == {"a": {}}


def test_an_update_of_a_full_table_changes_no_table(engine: str) -> None:
    shards = LocalShards(
        [
            TableConfig("a", dim=1, optimizer=SGD(1.0), initializer=Zeros()),
            TableConfig("b", dim=1, optimizer=SGD(1.0), eviction=Capacity(2, score=None)),
        ],
        engine=engine,
    )
    batch = {"a": torch.tensor([1, 2, 3]), "b": torch.tensor([1, 2, 3])}
    grads = {name: torch.ones(3, 1) for name in batch}

    with pytest.raises(TableFullError, match="table 'b'"):
        shards.apply_gradients(batch, grads, step=0)

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
    configs = [zeros(name, 1) for name in (first, "m")]
    configs += [TableConfig("n", dim=1, optimizer=Failing(1.0), initializer=Zeros(), admission=MinCount(1))]
    configs += [TableConfig("o", dim=1, optimizer=Failing(1.0), initializer=Zeros())]
    shards = LocalShards(configs, engine=engine)
    batch = {name: ids(1, 2) for name in shards.configs}
    shards.apply_gradients(batch, {name: rows([1], [1]) for name in batch}, step=0)
    before = contents(shards)
    steep = {name: rows([1], [1]) for name in batch} | {"o": rows([1], [200])}

    with pytest.raises(RuntimeError, match="too steep"):
        shards.apply_gradients(batch, steep, step=1)

    assert contents(shards) == before
    shards.apply_gradients(batch, {name: rows([1], [1]) for name in batch}, step=1)
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
