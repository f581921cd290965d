"""inspection: what is read out of a checkpoint, and what damage says."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    MinCount,
    Segment,
    TableConfig,
    checkpoint,
)
from megalith.checkpoint import read_manifest, saved_rows
from megalith.checkpoint.manifest import Manifest, TableEntry
from megalith.errors import CheckpointError, UnknownNameError
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


def save(root: Path) -> Manifest:
    tables = [
        TableConfig("user", dim=2, optimizer=SGD(1.0)),
        TableConfig("item", segments=[Segment(1, optimizer=FTRL(0.1)), Segment(3, optimizer=Adam(0.1))]),
    ]
    collection = EmbeddingCollection(tables, [Feature("u", "user"), Feature("i", "item")])
    user = collection.shards.local["user"]
    for id, weights in ROWS.items():
        user.assign(torch.tensor([id]), torch.tensor([weights]), time=NOW - AGES[id])
    return checkpoint.save(collection, root)


def entry(manifest: Manifest, name: str) -> list[TableEntry]:
    return find_table(manifest, name)[1]


def test_tables_are_summarized(tmp_path: Path) -> None:
    user, item = summarize(save(tmp_path))
    assert (user.name, user.rows, user.dim, user.num_files, user.collection) == ("user", 4, 2, 1, "")
    assert user.bytes == sum(f.stat().st_size for f in tmp_path.rglob("0-*.safetensors"))
    assert user.routing.dist_type == "roundrobin"
    assert [(s.dim, s.optimizer, s.precision) for s in item.segments] == [
        (1, "ftrl", "float32"),
        (3, "adam", "float32"),
    ]
    assert (item.rows, item.bytes) == (0, 0)


def test_norms(tmp_path: Path) -> None:
    norms = measure_norms(tmp_path, entry(save(tmp_path), "user"), top=2)
    assert (norms.rows, norms.minimum, norms.maximum) == (4, 0.0, 10.0)
    assert norms.median == pytest.approx(1.0, rel=2e-4)
    assert (norms.num_zero, norms.num_nonfinite) == (1, 0)
    assert sum(norms.histogram.counts) == 4
    assert norms.top == [(2**62, 10.0), (5, 5.0)]
    assert measure_norms(tmp_path, entry(read_manifest(tmp_path), "user"), top=0).top == []


def test_ages(tmp_path: Path) -> None:
    user = entry(save(tmp_path), "user")
    ages = measure_ages(tmp_path, user, now=NOW)
    assert (ages.newest, ages.oldest, ages.rows) == (NOW - 30, NOW - 400 * 86_400, 4)
    assert ages.median == pytest.approx(45, rel=2e-4)
    held = {label: rows for label, rows in ages.bins if rows}
    assert held == {"10 to 60 seconds": 2, "1 to 6 hours": 1, "1 to 3 years": 1}
    assert (ages.bins[0][0], ages.bins[-1][0]) == ("10 to 60 seconds", "1 to 3 years")
    assert newest_time(tmp_path, user) == NOW - 30
    assert measure_ages(tmp_path, user, now=NOW - 40).bins[0] == ("in the future", 1)


def test_an_empty_table_has_no_numbers(tmp_path: Path) -> None:
    item = entry(save(tmp_path), "item")
    norms, ages = measure_norms(tmp_path, item), measure_ages(tmp_path, item, now=NOW)
    assert (norms.minimum, norms.median, norms.maximum, norms.top) == (None, None, None, [])
    assert (ages.newest, ages.median, ages.bins) == (None, None, [])
    assert newest_time(tmp_path, item) is None
    assert find_row(tmp_path, item, 5) is None


def test_one_row(tmp_path: Path) -> None:
    root = tmp_path / "c"
    tables = [
        TableConfig("item", segments=[Segment(1, optimizer=FTRL(0.1)), Segment(2, optimizer=Adam(0.1))])
    ]
    collection = EmbeddingCollection(tables, [Feature("i", "item")])
    table = collection.shards.local["item"]
    table.apply_gradients(torch.tensor([-3, 8]), torch.ones(2, 3), step=0, time=77)
    checkpoint.save(collection, root)
    (chunk,) = table.scan()
    at = chunk.ids.tolist().index(-3)

    row = find_row(root, entry(read_manifest(root), "item"), -3)

    assert row is not None
    assert (row.id, row.time, row.count) == (-3, 77, None)
    assert row.weights == chunk.rows[at].tolist()
    assert row.state == {key: value[at].tolist() for key, value in chunk.state.items()}
    assert set(row.state) == {"0/sum", "0/z", "1/m", "1/v"}, "Adam counts steps, not the updates of a row"


def test_tables_of_many_files_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 200)
    collection = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(1.0))], [Feature("f", "t")])
    ids = torch.arange(200)
    rows = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    collection.shards.assign({"t": (ids, rows)})
    saved = entry(checkpoint.save(collection, tmp_path), "t")
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


def test_rows_that_are_not_finite_are_counted_apart(tmp_path: Path) -> None:
    saved = save(tmp_path)
    piece = entry(saved, "user")[0].pieces[0]
    path = tmp_path / piece.file.path
    tensors = load_file(path)
    tensors["rows"][0, 0] = float("nan")
    tensors["rows"][1, 1] = float("-inf")
    save_file(tensors, path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    text = manifest["collections"][""]["tables"]["user"]["pieces"][0]["file"]
    text.update(bytes=path.stat().st_size, checksum=f"crc32:{zlib.crc32(path.read_bytes()):08x}")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    norms = measure_norms(tmp_path, entry(read_manifest(tmp_path), "user"))
    assert (norms.num_nonfinite, sum(norms.histogram.counts), len(norms.top)) == (2, 2, 2)


def test_names_that_do_not_fit_are_answered_with_those_that_do(tmp_path: Path) -> None:
    manifest = save(tmp_path)
    with pytest.raises(UnknownNameError, match=r"no table 'users' \(known: user, item\)"):
        find_table(manifest, "users")
    with pytest.raises(UnknownNameError, match=r"no collection 'x' \(known: ''\)"):
        find_table(manifest, "user", "x")
    with pytest.raises(UnknownNameError, match=r"several tables; name one \(known: user, item\)"):
        find_table(manifest)
    twice = replace(manifest, collections={"a": manifest.collections[""], "b": manifest.collections[""]})
    with pytest.raises(UnknownNameError, match=r"several collections; name one \(known: 'a', 'b'\)"):
        find_table(twice, "user")
    assert find_table(twice, "user", "b")[0].collection == "b"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("rows"), "lacks rows"),
        (lambda t: t.update(rows=torch.zeros(4, 3)), r"rows \[4, 3\], but its manifest states \[4, 2\]"),
        (lambda t: t.update(ids=t["ids"][:2]), r"ids \[2\]"),
        (lambda t: t.update(ids=t["ids"].double()), "ids of dtype torch.float64"),
        (lambda t: t.update(rows=t["rows"].long()), "rows of dtype torch.int64"),
    ],
)
def test_files_that_are_not_what_the_manifest_says(tmp_path: Path, change: object, words: str) -> None:
    user = entry(save(tmp_path), "user")
    path = tmp_path / user[0].pieces[0].file.path
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    text = manifest["collections"][""]["tables"]["user"]["pieces"][0]["file"]
    text.update(bytes=path.stat().st_size, checksum=f"crc32:{zlib.crc32(path.read_bytes()):08x}")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=words):
        measure_norms(tmp_path, entry(read_manifest(tmp_path), "user"))


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    user = entry(save(tmp_path), "user")
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


def test_memory_counts_weights_state_ids_and_times(tmp_path: Path) -> None:
    configs = [TableConfig("t", dim=3, optimizer=Adagrad(0.1))]
    model = EmbeddingCollection(configs, [Feature("f", "t")])
    model.shards.assign({"t": (torch.arange(5), torch.ones(5, 3))})
    checkpoint.save(model, tmp_path)
    (table,) = summarize(read_manifest(tmp_path))
    assert table.memory == 5 * (4 * (3 + 3) + 8 + 4)
    assert table.memory_parts == {"rows": 60, "state": 60, "index": 120, "side": 60, "counters": 0}


def test_ids_that_an_admission_policy_counts_are_in_the_summary(tmp_path: Path) -> None:
    config = TableConfig("t", dim=3, optimizer=Adagrad(0.1), admission=MinCount(3))
    model = EmbeddingCollection([config], [Feature("f", "t")])
    model.tables["t"].apply_gradients(torch.arange(4), torch.ones(4, 3), step=0)
    checkpoint.save(model, tmp_path)

    (table,) = summarize(read_manifest(tmp_path))

    assert (table.rows, table.pending, table.memory_parts["counters"]) == (0, 4, 180)
