"""Overlay: written rows are read, removed rows are gone, and other ids are not covered."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.serving.export.overlay import PRESENT, REMOVED, Overlay
from tests.serving.export.test_frozen_rows import write

SMALL = st.integers(-3, 12)


def rows(ids: list[int], value: float = 0.0) -> tuple[Tensor, Tensor]:
    """Ids, and rows [id + value, value]."""
    found = torch.tensor(ids, dtype=torch.int64)
    return found, torch.stack([found + value, torch.full((len(ids),), value)], 1)


def read(overlay: Overlay, ids: list[int]) -> tuple[list[list[float]], list[float]]:
    values, flags = overlay.read("t", torch.tensor(ids, dtype=torch.int64))
    return values.tolist(), flags.tolist()


def test_written_removed_and_untouched_ids() -> None:
    overlay = Overlay({"t": 2})
    overlay.apply({"t": rows([1, 2], 0.5)}, {"t": torch.tensor([2, 3])})
    assert read(overlay, [1, 2, 3, 4]) == (
        [[1.5, 0.5], [0, 0], [0, 0], [0, 0]],
        [PRESENT, REMOVED, REMOVED, 0],
    )
    assert (len(overlay), overlay.rows_of("t")) == (3, 3)


def test_the_last_of_a_repeated_id_counts() -> None:
    overlay = Overlay({"t": 2})
    overlay.apply({"t": (torch.tensor([5, 5]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))})
    assert read(overlay, [5]) == ([[2, 2]], [PRESENT])


def test_reserving_writes_nothing_and_is_bounded() -> None:
    overlay = Overlay({"t": 2, "u": 1})
    overlay.apply({"t": rows([1], 0.5)})
    overlay.reserve({"t": 100_000, "u": 2**62})
    overlay.apply({"t": rows([2], 0.5)})
    assert read(overlay, [1, 2, 3]) == ([[1.5, 0.5], [2.5, 0.5], [0, 0]], [PRESENT, PRESENT, 0])
    assert (overlay.rows_of("t"), overlay.rows_of("u")) == (2, 0)


def test_a_row_of_zeros_is_there() -> None:
    overlay = Overlay({"t": 2})
    overlay.apply({"t": (torch.tensor([5]), torch.zeros(1, 2))})
    assert read(overlay, [5]) == ([[0, 0]], [PRESENT])


def test_a_row_comes_back_after_its_removal() -> None:
    overlay = Overlay({"t": 2})
    overlay.apply({}, {"t": torch.tensor([1, 2])})
    overlay.apply({"t": rows([1], 1.0)})
    assert read(overlay, [1, 2]) == ([[2, 1], [0, 0]], [PRESENT, REMOVED])


def test_where_the_base_is_hidden_a_removal_needs_no_row() -> None:
    overlay = Overlay({"t": 2}, hides_base=True)
    overlay.apply({"t": rows([1, 2])}, {"t": torch.tensor([2, 3])})
    assert len(overlay) == 1
    assert read(overlay, [1, 2, 3])[1] == [PRESENT, 0, 0]


def test_scan_gives_all_that_was_written() -> None:
    overlay = Overlay({"t": 2, "u": 1})
    overlay.apply({"t": rows([1, 2], 0.5)}, {"t": torch.tensor([7])})
    found = [each for ids, *rest in overlay.scan("t") for each in zip(ids.tolist(), *rest, strict=True)]
    by_id = {id: (values.tolist(), float(flag)) for id, values, flag in found}
    assert by_id == {1: ([1.5, 0.5], PRESENT), 2: ([2.5, 0.5], PRESENT), 7: ([0, 0], REMOVED)}
    assert list(overlay.scan("u")) == []


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["rows", "removed"]), st.lists(SMALL, max_size=5)), max_size=12))
def test_over_frozen_rows_it_reads_like_a_dict(writes: list[tuple[str, list[int]]]) -> None:
    base = {id: [float(id), 0.0] for id in range(0, 12, 2)}
    now: dict[int, list[float] | None] = {}
    overlay = Overlay({"t": 2})
    for number, (kind, ids) in enumerate(writes, start=1):
        if kind == "rows":
            overlay.apply({"t": rows(ids, number)})
            now |= {id: [float(id + number), float(number)] for id in ids}
        else:
            overlay.apply({}, {"t": torch.tensor(ids, dtype=torch.int64)})
            now |= dict.fromkeys(ids)
    queries = torch.arange(-4, 14)
    with tempfile.TemporaryDirectory() as folder:
        frozen = write(Path(folder) / "t", *rows(list(base)))
        out, flags = (each.clone() for each in overlay.read("t", queries))
        frozen.read(queries, out, (flags != 0).to(torch.uint8))
    expected = [now[id] if id in now else base.get(id) for id in queries.tolist()]
    assert out.tolist() == [row or [0.0, 0.0] for row in expected]


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
