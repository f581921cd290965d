"""Overlay: written rows are read, removed ones are gone; compaction keeps the bits of both."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.serving.export import overlay as overlay_module
from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.overlay import PRESENT, REMOVED, Compactor, Overlay
from megalith.serving.export.row_format import RowFormat, RowPart
from megalith.serving.export.servable import Servable
from tests.serving.export.test_frozen_rows import write
from tests.serving.exports import export_version, rows
from tests.table.support import assert_same_bits

SMALL = st.integers(-3, 12)


def numbered(ids: list[int], value: float = 0.0) -> tuple[Tensor, Tensor]:
    """Ids, and rows [id + value, value]."""
    found = torch.tensor(ids, dtype=torch.int64)
    return found, torch.stack([found + value, torch.full((len(ids),), value)], 1)


def join(compactor: Compactor) -> None:
    thread = compactor._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def read(overlay: Overlay, ids: list[int]) -> tuple[list[list[float]], list[float]]:
    values, flags = overlay.read("t", torch.tensor(ids, dtype=torch.int64))
    return values.tolist(), flags.tolist()


def test_the_last_of_a_repeated_id_counts() -> None:
    overlay = Overlay({"t": 2})
    overlay.apply({"t": (torch.tensor([5, 5]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))})
    assert read(overlay, [5]) == ([[2, 2]], [PRESENT])


def test_reserving_writes_nothing_and_is_bounded() -> None:
    overlay = Overlay({"t": 2, "u": 1})
    overlay.apply({"t": numbered([1], 0.5)})
    overlay.reserve({"t": 100_000, "u": 2**62})
    overlay.apply({"t": numbered([2], 0.5)})
    assert read(overlay, [1, 2, 3]) == ([[1.5, 0.5], [2.5, 0.5], [0, 0]], [PRESENT, PRESENT, 0])
    assert (overlay.rows_of("t"), overlay.rows_of("u")) == (2, 0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["rows", "removed"]), st.lists(SMALL, max_size=5)), max_size=12),
    st.booleans(),
)
def test_over_frozen_rows_it_reads_like_a_dict(writes: list[tuple[str, list[int]]], hides_base: bool) -> None:
    base = {} if hides_base else {id: [float(id), 0.0] for id in range(0, 12, 2)}
    now: dict[int, list[float] | None] = {}
    overlay = Overlay({"t": 2, "u": 1}, hides_base=hides_base)
    for number, (kind, ids) in enumerate(writes):  # number 0: the row of id 0 is zeros, and still a row
        if kind == "rows":
            overlay.apply({"t": numbered(ids, number)})
            now |= {id: [float(id + number), float(number)] for id in ids}
        else:
            overlay.apply({}, {"t": torch.tensor(ids, dtype=torch.int64)})
            now |= dict.fromkeys(ids)
    if hides_base:  # a removal needs no row there
        now = {id: row for id, row in now.items() if row is not None}
    queries = torch.arange(-4, 14)

    with tempfile.TemporaryDirectory() as folder:
        frozen = write(Path(folder) / "t", *numbered(list(base)))
        out, flags = (each.clone() for each in overlay.read("t", queries))
        frozen.read(queries, out, (flags != 0).to(torch.uint8))

    expected = [now[id] if id in now else base.get(id) for id in queries.tolist()]
    assert out.tolist() == [row or [0.0, 0.0] for row in expected]
    state = {id: REMOVED if row is None else PRESENT for id, row in now.items()}
    assert flags.tolist() == [state.get(id, 0.0) for id in queries.tolist()]
    scanned = [each for ids, *rest in overlay.scan("t") for each in zip(ids.tolist(), *rest, strict=True)]
    found = {id: (values.tolist(), float(flag)) for id, values, flag in scanned}
    assert found == {id: (row or [0.0, 0.0], state[id]) for id, row in now.items()}
    assert (len(overlay), overlay.rows_of("t"), overlay.rows_of("u")) == (len(now), len(now), 0)


def test_a_concurrent_reader_sees_whole_rows() -> None:
    """The row of an id is always [x, x, ...] of one x, or gone: never a part of each."""
    dim, ids = 32, torch.arange(50)
    overlay = Overlay({"t": dim})
    done = threading.Event()
    torn: list[Tensor] = []

    def look() -> None:
        while True:
            last = done.is_set()
            values, flags = overlay.read("t", ids)
            whole = (values == values[:, :1]).all(1) & ((flags == PRESENT) | (values == 0).all(1))
            if not bool(whole.all()):
                torn.append(values)
            if last:
                return

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 301):
        overlay.apply({"t": (ids, torch.full((50, dim), float(number)))}, {"t": ids[number % 7 :: 7]})
    done.set()
    for reader in readers:
        reader.join(60)
    assert torn == []


# ---- compaction

CODES = RowFormat((RowPart("float32", 2), RowPart("fixed_point", 3, 1 / 64), RowPart("one_bit", 4, 0.5)))
IDS = torch.arange(-20, 120)


def some(ids: Tensor, seed: int, dim: int = 9) -> tuple[Tensor, Tensor]:
    values = torch.randint(-100, 100, (ids.numel(), dim), generator=torch.Generator().manual_seed(seed))
    return ids, values.float() / 64


def seen(overlay: Overlay, frozen: dict[str, FrozenRows] | None = None) -> list[Tensor]:
    """What a reader sees: rows and flags, every scanned row by id, and what the native reader returns."""
    read, flags = overlay.read("t", IDS)
    chunks = list(overlay.scan("t"))
    scanned = torch.cat([ids for ids, _, _ in chunks])
    order = scanned.argsort()
    kept = torch.cat([flag for _, _, flag in chunks])[order] == PRESENT
    stated = flags == PRESENT if overlay.hides_base else flags  # nothing is below: removed is not written
    found = [read, stated, scanned[order][kept], torch.cat([values for _, values, _ in chunks])[order][kept]]
    if frozen is not None:
        out = torch.full((IDS.numel(), 9), 7.0)
        missing = overlay.served(frozen).read(IDS, torch.tensor([IDS.numel()]), out)
        base = torch.zeros_like(read)
        if not overlay.hides_base:
            frozen["t"].read(IDS, base)
        has = (flags == PRESENT)[:, None]
        expected = torch.where(has, read, torch.where((flags == 0)[:, None], base, torch.zeros(1)))
        assert_same_bits(out, expected)
        unwritten = (flags == 0) & ((frozen["t"].find(IDS) < 0) | overlay.hides_base)
        assert missing == int((flags == REMOVED).sum() + unwritten.sum())
        found.append(out)
    return found


@pytest.mark.parametrize("coded", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("hides_base", [False, True], ids=["over", "hides"])
def test_a_fold_changes_no_bit_whatever_is_written_meanwhile(
    tmp_path: Path, coded: bool, hides_base: bool
) -> None:
    codes = {"t": CODES} if coded else {}
    folded, plain = (Overlay({"t": 9}, hides_base=hides_base, codes=codes) for _ in range(2))
    frozen = {"t": write(tmp_path / "base", *some(torch.arange(50, 90), 9))}
    folder = Compactor(tmp_path, rows=1)

    def push(ids: Tensor, removed: Tensor, seed: int) -> None:
        for overlay in (folded, plain):
            overlay.apply({"t": some(ids, seed)}, {"t": removed})
        for before, after in zip(seen(plain, frozen), seen(folded, frozen), strict=True):
            assert torch.equal(before, after)

    push(torch.arange(0, 60), torch.tensor([3, 55, 95]), 0)
    sealed = folded.seal()
    push(torch.arange(20, 40), torch.tensor([20, 41, 56]), 1)  # while the fold runs
    folder._fold(folded, sealed)
    assert folder.folds == 1
    push(torch.arange(35, 45), torch.tensor([1, 35]), 2)
    folder.consider(folded)  # merges what was folded before
    join(folder)
    assert folder.folds == 2
    assert folded.unfolded_rows == 0
    push(torch.tensor([3, 41]), torch.tensor([0]), 3)
    assert list(tmp_path.iterdir()) == [tmp_path / "base"]  # no file has a name


def test_a_version_inherits_folded_rows(tmp_path: Path) -> None:
    export_version(tmp_path)
    folder = Compactor(tmp_path, rows=2)
    servable, other = Servable(tmp_path / "1", folder=folder), Servable(tmp_path / "1")
    table = next(iter(servable.signature.tables))
    ids, values = some(torch.arange(5), 4, servable.signature.dims[table])
    servable.apply({table: (ids, values)}, {table: torch.tensor([2])})
    join(folder)
    assert (servable.overlay.unfolded_rows, servable.overlay.folded_rows) == (0, 5)

    other.inherit(servable.overlay)

    assert_same_bits(other.lookup(table, ids), servable.lookup(table, ids))
    features, dense = rows(2)
    scores = [each.predict(features, dense) for each in (servable, other)]
    assert torch.equal(scores[0]["logits"], scores[1]["logits"])
    servable.reset()
    assert len(servable.overlay) == 0


def test_a_fold_waits_for_enough_rows_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay, folder = Overlay({"t": 9}), Compactor(rows=10)
    overlay.apply({"t": some(torch.arange(9), 0)})
    folder.consider(overlay)
    assert overlay.unfolded_rows == 9

    overlay, folder = Overlay({"t": 9}), Compactor(tmp_path, rows=1, seconds=3600)
    overlay.apply({"t": some(IDS, 0)})
    folder.consider(overlay)
    assert overlay.unfolded_rows == IDS.numel()

    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    folder.consider(overlay)
    join(folder)
    assert folder.folds == 1
    overlay.apply({"t": some(IDS, 1)})
    folder.consider(overlay)
    assert overlay.unfolded_rows == IDS.numel()  # the next hour began with the end of the fold


def test_folds_that_fail_leave_the_rows_in_one_more_layer_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    overlay, folder = Overlay({"t": 9}), Compactor(tmp_path / "absent", rows=1)
    for seed in range(5):
        overlay.apply({"t": some(IDS, seed)})  # the same ids: each layer would have a copy
        before = seen(overlay)
        folder.consider(overlay)
        join(folder)
        assert all(torch.equal(a, b) for a, b in zip(before, seen(overlay), strict=True))
    assert (folder.folds, len(overlay)) == (0, 2 * IDS.numel())
    assert caplog.text.count("pushed rows stay in memory") == 5

    monkeypatch.setattr(folder, "_directory", tmp_path)
    overlay.apply({"t": some(IDS, 5)})
    folder.consider(overlay)
    join(folder)
    assert (folder.folds, overlay.folded_rows) == (1, IDS.numel())
    assert torch.equal(overlay.read("t", IDS)[0], some(IDS, 5)[1])


def test_a_closed_servable_ends_its_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_version(tmp_path / "model")
    folds = tmp_path / "folds"
    folds.mkdir()
    folder = Compactor(folds, rows=1)
    servable = Servable(tmp_path / "model" / "1", folder=folder)
    table = next(iter(servable.signature.tables))
    writer = overlay_module.FrozenWriter
    files: list[int] = []

    def close_then_write(path: Path, *rest: Any) -> Any:
        made = writer(path, *rest)
        files.append(len(list(folds.iterdir())))
        servable.close()  # between the beginning of a file and its rows
        return made

    monkeypatch.setattr(overlay_module, "FrozenWriter", close_then_write)
    ids, values = some(torch.arange(5), 4, servable.signature.dims[table])
    overlay = servable.overlay
    servable.apply({table: (ids, values)})
    join(folder)

    assert files == [1]
    assert list(folds.iterdir()) == []
    assert folder.folds == 0
    assert torch.equal(overlay.read(table, ids)[0], values)
    folder.consider(overlay)
    assert overlay.unfolded_rows == 0  # nothing is sealed, and nothing is folded any more


def test_the_memory_of_folded_rows_is_freed_without_a_request(tmp_path: Path) -> None:
    overlay, folder = Overlay({"t": 9}), Compactor(tmp_path, rows=1)
    frozen = {"t": write(tmp_path / "base", *some(torch.arange(50, 90), 9))}
    overlay.apply({"t": some(IDS, 0)})
    out = torch.empty(IDS.numel(), 9)
    overlay.served(frozen).read(IDS, torch.tensor([IDS.numel()]), out)  # makes the native reader
    table = weakref.ref(overlay._layers["t"][0])

    folder.consider(overlay)
    join(folder)
    gc.collect()

    assert folder.folds == 1
    assert table() is None
