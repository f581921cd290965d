"""Table.merge, filter and reseed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import (
    SGD,
    TTL,
    Adagrad,
    Capacity,
    EmbeddingCollection,
    Feature,
    MinCount,
    Probability,
    Table,
    TableConfig,
    Zeros,
    checkpoint,
)
from megalith.errors import InputError
from megalith.table import Chunk, MergeCounts
from tests.table.support import ints

CONFIG = TableConfig("t", dim=2, optimizer=Adagrad(1.0), initializer=Zeros())


def filled(engine: str, ids: list[int], value: float, time: int, config: TableConfig = CONFIG) -> Table:
    table = Table(config, engine=engine)
    table.assign(torch.tensor(ids), torch.full((len(ids), 2), value), time=time)
    return table


def content(table: Table) -> dict[int, tuple[float, int]]:
    return {
        i: (float(row[0]), t)
        for chunk in table.scan()
        for i, row, t in zip(chunk.ids.tolist(), chunk.rows, chunk.time.tolist(), strict=True)
    }


# ---- merge


@pytest.mark.parametrize(
    ("on_conflict", "row_2", "row_3", "counts"),
    [
        ("newer", (2.0, 30), (1.0, 20), (1, 1, 1)),
        ("ours", (1.0, 20), (1.0, 20), (1, 0, 2)),
        ("theirs", (2.0, 30), (2.0, 10), (1, 2, 0)),
    ],
)
@pytest.mark.parametrize("other_engine", ["reference", "cpu"])
def test_merge_takes_the_chosen_rows(
    engine: str, other_engine: str, on_conflict: str, row_2: Any, row_3: Any, counts: tuple[int, int, int]
) -> None:
    table = filled(engine, [1, 2, 3], 1.0, 20)
    other = filled(other_engine, [4, 2], 2.0, 30)
    other.assign(ints(3), torch.full((1, 2), 2.0), time=10)

    merged = table.merge(other, on_conflict=on_conflict)

    assert merged == MergeCounts(*counts)
    assert content(table) == {1: (1.0, 20), 2: row_2, 3: row_3, 4: (2.0, 30)}
    assert len(other) == 3
    equal_age = filled(engine, [1], 1.0, 20)
    equal_age.merge(filled(engine, [1], 2.0, 20))
    assert content(equal_age) == {1: (1.0, 20)}  # ours stays


def test_merge_into_an_empty_table_copies_state_counts_and_pending_ids(engine: str) -> None:
    config = TableConfig("t", dim=2, optimizer=Adagrad(1.0), admission=MinCount(2))
    table, other = Table(config, engine=engine), Table(config, engine=engine)
    for step in range(3):
        other.apply_gradients(ints(7, 7, 8 + step), torch.ones(3, 2), step=step, time=step)
    table.apply_gradients(ints(8), torch.ones(1, 2), step=0)
    table.track("sync")

    assert table.merge(other) == MergeCounts(1, 0, 0)

    (own,), (theirs,) = table.scan(), other.scan()
    assert torch.equal(own.rows, theirs.rows)
    assert own.state.keys() == theirs.state.keys() != set()
    assert all(torch.equal(own.state[key], theirs.state[key]) for key in own.state)
    assert own.count is not None
    assert own.step is not None
    assert (own.count.tolist(), own.step.tolist(), own.time.tolist()) == ([3], [2], [2])
    counted = zip(*(x.tolist() for x in table.pending()), strict=True)
    assert sorted(counted) == [(8, 2), (9, 1), (10, 1)]
    assert table.drain_touched("sync")[0].tolist() == [7]


def test_merge_respects_the_capacity(engine: str) -> None:
    config = TableConfig("t", dim=2, optimizer=Adagrad(1.0), initializer=Zeros(), eviction=Capacity(2))
    table = filled(engine, [1, 2], 1.0, 5, config)

    table.merge(filled(engine, [3], 2.0, 9))

    assert len(table) == 2
    assert 3 in table
    assert table.stats().counters.evicted == 1


@pytest.mark.parametrize(
    ("other", "on_conflict", "words"),
    [
        (Table(CONFIG), "older", "on_conflict must be one of newer, ours, theirs, got 'older'"),
        (Table(TableConfig("o", dim=3, optimizer=Adagrad(1.0))), "ours", r"rows differ: .*\[2\].*\[3\].*'o'"),
        (Table(TableConfig("o", dim=2, optimizer=SGD(1.0))), "ours", "rows differ"),
        ({1: 2}, "ours", "takes another Table"),
    ],
)
def test_wrong_merges_raise(other: Any, on_conflict: str, words: str) -> None:
    with pytest.raises(InputError, match=f"table 't': merge.*{words}"):
        Table(CONFIG).merge(other, on_conflict=on_conflict)


def test_a_table_does_not_merge_with_itself(engine: str) -> None:
    table = filled(engine, [1], 1.0, 1)
    with pytest.raises(InputError, match="got itself"):
        table.merge(table)


# ---- filter


def test_filter_removes_the_rows_that_are_not_kept(engine: str) -> None:
    table = filled(engine, list(range(100)), 1.0, 5)
    table.track("sync")
    table.drain_touched("sync")
    sizes = []

    def small(chunk: Chunk) -> Tensor:
        sizes.append(chunk.ids.numel())
        return chunk.ids < 40

    removed = table.filter(small, chunk_size=32)

    assert sorted(removed.tolist()) == list(range(40, 100))
    assert sorted(content(table)) == list(range(40))
    assert sizes == [32, 32, 32, 4]
    counters = table.stats().counters
    assert (counters.created, counters.removed, counters.evicted) == (100, 60, 0)
    updated, gone = table.drain_touched("sync")
    assert (updated.tolist(), sorted(gone.tolist())) == ([], list(range(40, 100)))
    assert table.filter(lambda chunk: torch.ones_like(chunk.ids).bool()).numel() == 0


def test_filter_returns_memory_and_restarts_a_pass_of_eviction(engine: str) -> None:
    config = TableConfig("t", dim=2, optimizer=Adagrad(1.0), initializer=Zeros(), eviction=TTL(10))
    n = 9000
    table = filled(engine, list(range(n)), 1.0, 5, config)
    table.evict_part(6, rows=4000)  # nothing has expired; the next part would begin at row 4000
    before = table.memory()

    table.filter(lambda chunk: chunk.ids >= n - 100)

    after = table.memory()
    if engine != "cuda":  # which has chunks of 16 MiB
        assert after.rows + after.slack < before.rows / 4
    assert sorted(table.evict_part(100, rows=4000).tolist()) == list(range(n - 100, n))


@pytest.mark.parametrize(
    "predicate",
    [
        lambda chunk: chunk.ids,
        lambda chunk: torch.ones(3, dtype=torch.bool),
        lambda chunk: True,
        lambda chunk: 1 / 0,
        5,
        bool,
    ],
)
def test_a_wrong_predicate_removes_nothing(predicate: Any) -> None:
    table = filled("reference", [1, 2], 1.0, 5)
    with pytest.raises((InputError, ZeroDivisionError)):
        table.filter(predicate)
    assert len(table) == 2


# ---- reseed


def test_reseed_changes_only_rows_created_later(engine: str) -> None:
    config = TableConfig("t", dim=4, optimizer=SGD(1.0))
    table, fresh = Table(config, engine=engine, seed=1), Table(config, engine="reference", seed=2)
    table.apply_gradients(ints(1), torch.ones(1, 4), step=0)
    before = table.lookup(ints(1))

    table.reseed(2)

    assert table.seed == table.engine_impl.seed == 2
    assert torch.equal(table.lookup(ints(1)), before)
    assert torch.equal(table.lookup(ints(5)), fresh.lookup(ints(5)))
    table.apply_gradients(ints(5), torch.zeros(1, 4), step=1)
    assert torch.equal(table.lookup(ints(5)), fresh.lookup(ints(5)))
    table.reinitialize(ints(1))
    assert torch.equal(table.lookup(ints(1)), fresh.lookup(ints(1)))
    with pytest.raises(InputError, match="table 't': seed must be an integer"):
        table.reseed("3")  # type: ignore[arg-type]


def test_reseed_changes_the_draws_of_admission(engine: str) -> None:
    config = TableConfig("t", dim=1, optimizer=SGD(1.0), admission=Probability(0.5))
    table, expected = Table(config, engine=engine, seed=1), Table(config, engine="reference", seed=7)

    table.reseed(7)

    for each in (table, expected):
        each.apply_gradients(torch.arange(200), torch.ones(200, 1), step=0)
    assert [i in table for i in range(200)] == [i in expected for i in range(200)]


def test_a_checkpoint_records_the_new_seed(engine: str, tmp_path: Path) -> None:
    model = EmbeddingCollection([CONFIG], [Feature("f", "t")], engine=engine, seed=1)
    model.tables["t"].reseed(9)

    checkpoint.save(model, tmp_path)

    (entry,) = checkpoint.read_manifest(tmp_path).tables()["t"]
    assert entry.seed == 9
