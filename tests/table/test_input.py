"""What tables refuse, naming the table and the field and changing nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith import SGD, Adagrad, Normal, Segment, Table, TableConfig
from megalith.errors import InputError, MegalithError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk
from tests.table.support import as_sets, ints, sgd_table, summed, unchanged, whole

DIM = 3
TOO_LARGE = 1e39  # a finite number that is infinite in float32
Call = Callable[[Table], object]
Fields = dict[str, Any]


def user_table(engine: str, first: Any = 1.0, second: Any = 1.0) -> Table:
    """A table "user" of two segments that holds ids 1 and 2, trained in step 0; its consumer is "sync"."""
    segments = [
        Segment(1, optimizer=SGD(first), initializer=Normal()),
        Segment(2, optimizer=Adagrad(second), initializer=Normal()),
    ]
    made = Table(TableConfig("user", segments=segments), engine=engine)
    made.track("sync")
    made.apply_gradients(ints(1, 2), torch.ones(2, DIM), step=0, time=5)
    made.drain_touched("sync")
    return made


@pytest.fixture
def table(engine: str) -> Table:
    return user_table(engine)


def refuses(table: Table, call: Call, *words: str, kind: type[MegalithError] = InputError) -> None:
    """Checks that the call raises and writes nothing, and that the message names the table and the words."""
    with unchanged(table), pytest.raises(kind) as raised:
        call(table)
    for word in ("'user'", *words):
        assert word in str(raised.value), raised.value
    assert as_sets(table.drain_touched("sync")) == (set(), set())


def ones(n: int = 1, dim: int = DIM) -> Tensor:
    return torch.ones(n, dim)


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def chunk_with(**changed: Any) -> Chunk:
    """Row 3 whole, with something changed."""
    fields = {"ids": ints(3), "rows": ones(), "state": {"1/sum": ones(1, 2)}, "time": ints(0)}
    return Chunk(**{**fields, **changed})


POOLED = Pooling.sum("user", ints(0, 1), DIM)

# ---- one argument of each call, with values that it does not take

NOT_IDS = [ints(1).float(), ints(1).to(torch.uint64), torch.tensor(1), ints(1)[None], meta(ints(1))]
NOT_IDS += [ints(1).to_sparse(), [1], None]
NOT_ROWS = [ones().double(), ones().long(), ones(2), ones(0), ones(1, DIM - 1), ones(1, DIM + 1)]
NOT_ROWS += [torch.ones(DIM), meta(ones()), ones().to_sparse(), [[1.0] * DIM], None]
NOT_FOUND = [torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), [0]]
NOT_FOUND += [torch.zeros(1, 1, dtype=torch.int32), meta(torch.zeros(1, dtype=torch.int32))]
NOT_STEPS = [-1, 1.0, "1", None, True, torch.tensor(1.0), torch.tensor([1, 2]), 2**63]
NOT_TIMES = [-1, 2**32, math.nan, math.inf, "now", torch.tensor([1, 2]), True, 1j]
NOT_TIMES_OF_ROWS = [ints(-1), ints(2**32), ints(0, 0), ints(0).int(), meta(ints(0)), None]
NOT_STATES = [{}, {"0/sum": ones(1, 2)}, {"1/sum": ones(1, 2), "1/z": ones(1, 2)}]
NOT_STATES += [{"1/sum": x} for x in (ones(1, 1), ones(2, 2), ones(1, 2).half(), None)]
NOT_OUTPUTS = [
    [],
    [ones(), ones()],
    [ones(3)],
    [ones().double()],
    [torch.ones(1, 2 * DIM)[:, ::2]],
    [meta(ones())],
]

REFUSED: dict[str, tuple[Callable[[Table, Any], object], str, list[Any]]] = {
    "find": (lambda t, x: t.find(x), "ids", NOT_IDS),
    "mark_touched": (lambda t, x: t.mark_touched("sync", x), "ids", NOT_IDS),
    "restore ids": (lambda t, x: t.restore(chunk_with(ids=x)), "ids", NOT_IDS),
    "restore rows": (lambda t, x: t.restore(chunk_with(rows=x)), "rows", NOT_ROWS),
    "restore state": (lambda t, x: t.restore(chunk_with(state=x)), "state", NOT_STATES),
    "restore time": (lambda t, x: t.restore(chunk_with(time=x)), "time", NOT_TIMES_OF_ROWS),
    "gradients": (lambda t, x: t.apply_gradients(ints(3), x, step=0), "grads", NOT_ROWS),
    "pooled gradients": (lambda t, x: t.update(None, ints(3), [x], POOLED, step=0), "grads[0]", NOT_ROWS),
    "lists of gradients": (
        lambda t, x: t.update(None, ints(3), x, POOLED, step=0),
        "output",
        [[], [ones(), ones()], ones(), None, 3.0],
    ),
    "assigned rows": (lambda t, x: t.assign(ints(3), x), "rows", NOT_ROWS),
    "rows to read": (lambda t, x: t.read(x, ints(1)), "rows", NOT_FOUND),
    "rows to update": (lambda t, x: t.update(x, ints(1), ones(), step=0), "rows", NOT_FOUND),
    "outputs": (lambda t, x: t.read(t.find(ints(1)), ints(1), POOLED, out=x), "out", NOT_OUTPUTS),
    "step": (lambda t, x: t.apply_gradients(ints(3), ones(), step=x), "step", NOT_STEPS),
    "scale": (
        lambda t, x: t.update(None, ints(3), ones(), step=0, scale=x),
        "scale",
        [math.nan, -math.inf, TOO_LARGE, "1", None],
    ),
    "time of gradients": (
        lambda t, x: t.apply_gradients(ints(3), ones(), step=0, time=x),
        "time",
        NOT_TIMES,
    ),
    "time of evict": (lambda t, x: t.evict(x), "time", NOT_TIMES),
    "chunk_size": (lambda t, x: list(t.scan(x)), "chunk_size", [0, -1]),
    "reserve": (lambda t, x: t.reserve(x), "reserve", [-1, 2.5, 2**70, True]),
    "track": (lambda t, x: t.track(x), "consumer", [None, "", 3]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_named_and_nothing_is_written(table: Table, case: str) -> None:
    call, word, wrong = REFUSED[case]
    for value in wrong:
        refuses(table, lambda t, value=value: call(t, value), word)


# ---- numbers


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 4096, 70_000])
@pytest.mark.parametrize("at", [0, -1])
def test_gradients_and_rows_are_finite(table: Table, value: float, size: int, at: int) -> None:
    rows, ids = torch.zeros(size, DIM), torch.arange(size)
    rows[at, at] = value

    refuses(table, lambda t: t.apply_gradients(ids, rows, step=0), "grads", "NaN or Inf")
    refuses(table, lambda t: t.assign(ids, rows), "rows", "NaN or Inf")
    refuses(table, lambda t: t.assign_add(ids, rows), "rows", "NaN or Inf")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pooled_gradients_are_finite(table: Table, value: float) -> None:
    slices = (OutputSlice(0, 0, 0, DIM), OutputSlice(1, 0, 0, DIM))
    pooling = Pooling(((1, DIM), (1, DIM)), {"user": (Bags(ints(0, 1), slices),)})
    grads = [ones(), torch.tensor([[0.0, 0.0, value]])]

    call = lambda t: t.update(None, ints(3), grads, pooling, step=0)  # noqa: E731
    refuses(table, call, "grads of output 1", "NaN or Inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [("weights", [1.0, math.nan]), ("weights", [1.0, math.inf]), ("divisor", [math.nan]), ("divisor", [0.0])],
)
def test_a_pooling_must_not_make_gradients_infinite(table: Table, field: str, values: list[float]) -> None:
    pooling = summed("user", ints(0, 2), DIM, **{field: torch.tensor(values)})
    refuses(table, lambda t: t.update(None, ints(3, 4), [ones()], pooling, step=0), field)


def test_steps_and_times_may_be_tensors_or_numbers_of_numpy(engine: str) -> None:
    for kind in (torch.tensor, np.int64, np.uint8, np.array):
        table = sgd_table(engine, 1, optimizer=SGD(lambda step: float(step)))
        table.apply_gradients(ints(1), torch.ones(1, 1), step=kind(3))
        assert table.lookup(ints(1)).tolist() == [[-3.0]]

    for time in (torch.tensor(7), torch.tensor(7.9), np.int32(7), np.float32(7.5)):
        table = sgd_table(engine, 1)
        table.assign(ints(1), torch.ones(1, 1), time=time)
        table.apply_gradients(ints(2), torch.ones(1, 1), step=0, time=time)
        table.reinitialize(ints(3), time=time)
        assert whole(table).time.tolist() == [7, 7, 7]


# ---- rates


def test_a_schedule_must_give_a_rate_and_one_that_fails_is_named(engine: str) -> None:
    def lost(step: int) -> float:
        if step == 2:
            raise KeyError("rates.json")
        return 0.5

    for rate in (math.nan, math.inf, TOO_LARGE, -0.5, None):
        table = user_table(engine, second=lambda step, rate=rate: 0.5 if step == 0 else rate)
        call = lambda t: t.apply_gradients(ints(1, 2), ones(2), step=1)  # noqa: E731
        refuses(table, call, "segment 1", "rate", "step 1")

    call = lambda t: t.apply_gradients(ints(1), ones(), step=2)  # noqa: E731
    refuses(user_table(engine, second=lost), call, "segment 1", "step 2", "lost", "KeyError: 'rates.json'")


def test_a_table_that_is_not_trainable_takes_rows_but_refuses_to_train(engine: str) -> None:
    table = Table(TableConfig("user", dim=DIM, optimizer=SGD(), trainable=False), engine=engine)
    table.assign(ints(1), 2 * ones())
    table.track("sync")

    for call in (
        lambda t: t.apply_gradients(ints(1), ones(), step=0),
        lambda t: t.update(None, ints(1), [ones()], POOLED, step=0),
    ):
        refuses(table, call, "not trainable", kind=UsageError)
    assert table.lookup(ints(1)).tolist() == [[2.0] * DIM]


# ---- poolings


def pooling_with(
    *, outputs: Any = ((2, DIM),), offsets: Any = None, part: Fields | None = None, **bag: Any
) -> Pooling:
    """Two bags over three occurrences into one output, with something changed."""
    fields: Fields = {"output": 0, "column": 0, "start": 0, "end": DIM, **(part or {})}
    offsets = ints(0, 1, 3) if offsets is None else offsets
    return Pooling(outputs, {"user": (Bags(offsets, (OutputSlice(**fields),), **bag),)})


def two_bags(*bags: tuple[Tensor, tuple[OutputSlice, ...]], outputs: Any = ((2, DIM),)) -> Pooling:
    return Pooling(outputs, {"user": tuple(Bags(offsets, parts) for offsets, parts in bags)})


OFFSETS = ints(0, 1, 3)
BAD_POOLINGS: list[tuple[str, list[Fields]]] = [
    ("offsets", [{"offsets": x} for x in (ints(0, 2, 1), ints(-1, 1, 3), ints(0, 1, 4), meta(OFFSETS))]),
    ("bags", [{"offsets": ints(0, 1)}, {"part": {"inner": 2}}]),
    ("weights", [{"weights": x} for x in (torch.ones(2), torch.ones(3).double(), meta(torch.ones(3)))]),
    ("divisor", [{"divisor": x} for x in (torch.ones(1), torch.ones(2).long(), meta(torch.ones(2)))]),
    ("output", [{"part": {"output": output}} for output in (1, -1)]),
    ("slice", [{"part": part} for part in ({"end": 2**40}, {"start": -1}, {"start": 2, "end": 1})]),
    ("columns", [{"part": {"column": column}} for column in (-1, 1, 2**40)]),
    ("columns", [{"outputs": ((1, DIM),), "part": {"inner": 2}}]),
]


def refuses_pooling(table: Table, make: Callable[[], Pooling], field: str) -> None:
    """Refuses it to read, to fill outputs, which stay as they are, and to train."""
    pooling, ids = make(), ints(1, 2, 3)
    outputs = [torch.ones(shape) for shape in pooling.outputs]
    refuses(table, lambda t: t.read(t.find(ids), ids, pooling), field)
    refuses(table, lambda t: t.read(t.find(ids), ids, pooling, out=outputs), field)
    refuses(table, lambda t: t.update(None, ids, outputs, pooling, step=0), field)
    assert all(bool((out == 1).all()) for out in outputs)


def test_a_pooling_fits_the_ids_the_rows_and_the_outputs(table: Table) -> None:
    for field, cases in BAD_POOLINGS:
        for case in cases:
            refuses_pooling(table, lambda case=case: pooling_with(**case), field)  # type: ignore[misc]


def test_bags_and_slices_of_a_pooling_fit_each_other(table: Table) -> None:
    part, added = OutputSlice(0, 0, 0, DIM), OutputSlice(0, 0, 0, DIM, accumulate=True)
    overlap = lambda: two_bags((ints(0, 1, 3), (part,)), (ints(2, 3, 3), (added,)))  # noqa: E731
    wide = OutputSlice(1, 0, 0, DIM, inner=2)
    inner = lambda: two_bags((OFFSETS, (part, wide)), outputs=((2, DIM), (1, 2 * DIM)))  # noqa: E731

    refuses_pooling(table, overlap, "offsets")
    refuses_pooling(table, inner, "")


def test_a_column_near_the_largest_number_raises(engine: str) -> None:
    table = sgd_table(engine, 2, name="user")
    table.track("sync")
    pooling = Pooling(((1, 2),), {"user": (Bags(ints(0, 1), (OutputSlice(0, 2**63 - 1, 0, 2),)),)})

    refuses(table, lambda t: t.read(t.find(ints(1)), ints(1), pooling, out=[torch.zeros(1, 2)]))


# ---- consumers


def test_an_unknown_consumer_is_named_with_the_known_ones(table: Table) -> None:
    for call in (
        lambda t: t.drain_touched("other"),
        lambda t: t.untrack("other"),
        lambda t: t.mark_touched("other", ints(1)),
    ):
        refuses(table, call, "'other'", "'sync'", kind=UnknownNameError)
    with pytest.raises(KeyError):
        table.drain_touched("other")


def test_a_ninth_consumer_raises(table: Table) -> None:
    for number in range(2, 9):
        table.track(f"consumer {number}")

    refuses(table, lambda t: t.track("consumer 9"), "8 consumers", "untrack", kind=UsageError)
    table.untrack("consumer 5")
    table.track("consumer 9")
    assert "consumer 9" in table.stats().consumers
