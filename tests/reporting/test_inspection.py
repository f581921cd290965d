"""inspection: what is read out of a checkpoint; tests/cli/test_table.py has what the command shows of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import FTRL, SGD, Adam, EmbeddingCollection, Feature, MinCount, Segment, TableConfig, checkpoint
from megalith.checkpoint import saved_rows
from megalith.checkpoint.manifest import Manifest, TableEntry
from megalith.errors import CheckpointError
from megalith.reporting.inspection import (
    _Spread,
    find_row,
    find_table,
    measure_ages,
    measure_norms,
    newest_time,
    summarize,
)

NOW = 1_700_000_000
ROWS = {5: [3.0, 4.0], -7: [0.0, 0.0], 2**62: [6.0, 8.0], 9: [0.6, 0.8]}
AGES = {5: 30, -7: 7200, 2**62: 86_400 * 400, 9: 45}


def collection() -> EmbeddingCollection:
    tables = [
        TableConfig("user", dim=2, optimizer=SGD(1.0)),
        TableConfig("item", segments=[Segment(1, optimizer=FTRL(0.1)), Segment(3, optimizer=Adam(0.1))]),
        TableConfig("counted", dim=3, optimizer=SGD(0.1), admission=MinCount(3)),
    ]
    made = EmbeddingCollection(tables, [Feature(table.name, table.name) for table in tables])
    for id, weights in ROWS.items():
        made.tables["user"].assign(torch.tensor([id]), torch.tensor([weights]), time=NOW - AGES[id])
    made.tables["item"].apply_gradients(torch.tensor([-3, 8]), torch.ones(2, 4), step=0, time=77)
    made.tables["counted"].apply_gradients(torch.arange(4), torch.ones(4, 3), step=0)
    return made


def entry(manifest: Manifest, name: str = "user") -> list[TableEntry]:
    return find_table(manifest, name)[1]


def test_tables_are_summarized(tmp_path: Path) -> None:
    manifest = checkpoint.save(collection(), tmp_path)
    user, item, counted = summarize(manifest)
    assert (user.name, user.rows, user.dim, user.num_files, user.collection) == ("user", 4, 2, 1, "")
    assert user.routing.dist_type == "roundrobin"
    segments = [(s.dim, s.optimizer, s.precision) for s in item.segments]
    assert segments == [(1, "ftrl", "float32"), (3, "adam", "float32")]
    assert user.bytes == (tmp_path / entry(manifest)[0].pieces[0].file.path).stat().st_size
    assert item.memory == 2 * (4 * (4 + 2 * 1 + 2 * 3) + 8 + 4)  # weights, state, id, time
    assert item.memory_parts == {"rows": 32, "state": 64, "index": 48, "side": 24, "counters": 0}
    assert (counted.rows, counted.pending, counted.memory_parts["counters"]) == (0, 4, 180)


def test_norms(tmp_path: Path) -> None:
    user = entry(checkpoint.save(collection(), tmp_path))
    norms = measure_norms(tmp_path, user, top=2)
    assert (norms.rows, norms.minimum, norms.maximum) == (4, 0.0, 10.0)
    assert norms.median == pytest.approx(1.0, rel=2e-4)
    assert (norms.num_zero, norms.num_nonfinite) == (1, 0)
    assert sum(norms.histogram.counts) == 4
    assert norms.top == [(2**62, 10.0), (5, 5.0)]
    assert measure_norms(tmp_path, user, top=0).top == []


def test_rows_that_are_not_finite_are_counted_apart(tmp_path: Path) -> None:
    made = collection()
    (chunk,) = made.tables["user"].scan()
    chunk.rows[0, 0], chunk.rows[1, 1] = torch.nan, -torch.inf  # as an overflow in training leaves them
    made.tables["user"].restore(chunk)
    norms = measure_norms(tmp_path, entry(checkpoint.save(made, tmp_path)))
    assert (norms.num_nonfinite, sum(norms.histogram.counts), len(norms.top)) == (2, 2, 2)


def test_ages(tmp_path: Path) -> None:
    user = entry(checkpoint.save(collection(), tmp_path))
    ages = measure_ages(tmp_path, user, now=NOW)
    assert (ages.newest, ages.oldest, ages.rows) == (NOW - 30, NOW - 400 * 86_400, 4)
    assert ages.median == pytest.approx(45, rel=2e-4)
    held = {label: rows for label, rows in ages.bins if rows}
    assert held == {"10 to 60 seconds": 2, "1 to 6 hours": 1, "1 to 3 years": 1}
    assert (ages.bins[0][0], ages.bins[-1][0]) == ("10 to 60 seconds", "1 to 3 years")
    assert newest_time(tmp_path, user) == NOW - 30
    assert measure_ages(tmp_path, user, now=NOW - 40).bins[0] == ("in the future", 1)


def test_one_row(tmp_path: Path) -> None:
    made = collection()
    item = entry(checkpoint.save(made, tmp_path), "item")
    (chunk,) = made.tables["item"].scan()
    at = chunk.ids.tolist().index(-3)

    row = find_row(tmp_path, item, -3)

    assert row is not None
    assert (row.id, row.time, row.count) == (-3, 77, None)
    assert row.weights == chunk.rows[at].tolist()
    assert row.state == {key: value[at].tolist() for key, value in chunk.state.items()}
    assert set(row.state) == {"0/sum", "0/z", "1/m", "1/v"}, "Adam counts steps, not the updates of a row"


def test_tables_of_many_files_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 200)
    made = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(1.0))], [Feature("f", "t")])
    rows = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    made.shards.assign({"t": (torch.arange(200), rows)})
    saved = entry(checkpoint.save(made, tmp_path), "t")
    assert len(saved[0].pieces) > 10
    done: list[int] = []

    norms = measure_norms(tmp_path, saved, top=7, on_rows=done.append)

    expected = torch.linalg.vector_norm(rows.double(), dim=1)
    assert done[-1] == norms.rows == 200
    assert norms.minimum == pytest.approx(float(expected.min()))
    assert norms.median == pytest.approx(float(expected.median()), rel=2e-4)
    assert [row.id for row in norms.top] == expected.argsort(descending=True)[:7].tolist()
    assert sum(norms.histogram.counts) == 200
    found = find_row(tmp_path, saved, 199)
    assert found is not None
    assert found.weights == rows[199].tolist()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    user = entry(checkpoint.save(collection(), tmp_path))
    path = tmp_path / user[0].pieces[0].file.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        measure_norms(tmp_path, user)
    with pytest.raises(CheckpointError, match="damaged"):
        find_row(tmp_path, user, 5)


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=50), st.integers(1, 5))
def test_a_spread_counts_everything_and_knows_the_median(values: list[float], cuts: int) -> None:
    spread = _Spread()
    for part in np.array_split(np.array(values), cuts):
        spread.add(part)
    histogram = spread.histogram()
    assert sum(histogram.counts) == len(values)
    assert (spread.minimum, spread.maximum) == (min(values), max(values))
    assert (histogram.edges[0], histogram.edges[-1]) == (min(values), max(values))
    assert histogram.edges == sorted(histogram.edges)
    middle = sorted(values)[(len(values) - 1) // 2]
    assert spread.median() == pytest.approx(middle, rel=2e-4, abs=1e-40)
