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
            overlay.apply({"t": rows(ids, number)})
            now |= {id: [float(id + number), float(number)] for id in ids}
        else:
            overlay.apply({}, {"t": torch.tensor(ids, dtype=torch.int64)})
            now |= dict.fromkeys(ids)
    if hides_base:  # a removal needs no row there
        now = {id: row for id, row in now.items() if row is not None}
    queries = torch.arange(-4, 14)

    with tempfile.TemporaryDirectory() as folder:
        frozen = write(Path(folder) / "t", *rows(list(base)))
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
