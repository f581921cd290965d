"""What tables refuse, naming the table and the field and changing nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith import FTRL, SGD, Adagrad, Normal, Piecewise, Segment, Table, TableConfig
from megalith.errors import InputError, MegalithError, UnknownNameError, UsageError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk
from tests.table.support import (
    as_sets,
    ints,
    sgd_table,
    summed,
    unchanged,
    whole,
)

DIM = 3
TOO_LARGE = 1e39  # a finite number that is infinite in float32
Call = Callable[[Table], object]


@pytest.fixture
def table(engine: str) -> Table:
    """A table "user" that holds ids 1 and 2."""
    config = TableConfig(
        "user",
        segments=[
            Segment(1, optimizer=SGD(1.0), initializer=Normal()),
            Segment(2, optimizer=Adagrad(0.1), initializer=Normal()),
        ],
    )
    made = Table(config, engine=engine)
    made.track("sync")
    made.apply_gradients(ints(1, 2), torch.ones(2, DIM), step=0, time=5)
    made.drain_touched("sync")
    return made


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


# ---- ids

TAKES_IDS: dict[str, Callable[[Table, Any], object]] = {
    "find": lambda t, ids: t.find(ids),
    "lookup": lambda t, ids: t.lookup(ids),
    "read": lambda t, ids: t.read(t.find(ints(1)), ids),
    "update": lambda t, ids: t.update(None, ids, ones(), step=0),
    "apply_gradients": lambda t, ids: t.apply_gradients(ids, ones(), step=0),
    "assign": lambda t, ids: t.assign(ids, ones()),
    "assign_add": lambda t, ids: t.assign_add(ids, ones()),
    "reinitialize": lambda t, ids: t.reinitialize(ids),
    "remove": lambda t, ids: t.remove(ids),
    "mark_touched": lambda t, ids: t.mark_touched("sync", ids),
    "restore": lambda t, ids: t.restore(
        Chunk(ids, ones(), {"1/sum": ones(1, 2)}, torch.zeros(1, dtype=torch.int64))
    ),
}


BAD_IDS: dict[str, Any] = {
    "float": torch.tensor([1.0]),
    "int16": torch.tensor([1], dtype=torch.int16),
    "uint8": torch.tensor([1], dtype=torch.uint8),
    "uint64": torch.tensor([1], dtype=torch.uint64),
    "bool": torch.tensor([True]),
    "scalar": torch.tensor(1),
    "matrix": torch.tensor([[1]]),
    "meta": meta(torch.tensor([1])),
    "sparse": torch.tensor([1]).to_sparse(),
    "list": [1],
    "int": 1,
    "none": None,
}


@pytest.mark.parametrize("bad", BAD_IDS)
def test_ids_are_a_vector_of_whole_numbers_on_the_cpu(table: Table, bad: str) -> None:
    refuses(table, lambda t: t.find(BAD_IDS[bad]), "ids")


@pytest.mark.parametrize("bad", ["float", "matrix", "meta"])
@pytest.mark.parametrize("call", TAKES_IDS)
def test_every_call_checks_its_ids(table: Table, call: str, bad: str) -> None:
    refuses(table, lambda t: TAKES_IDS[call](t, BAD_IDS[bad]), "ids")


# ---- gradients and rows

BAD_MATRICES: dict[str, Any] = {
    "float64": ones().double(),
    "float16": ones().half(),
    "bfloat16": ones().bfloat16(),
    "int": ones().long(),
    "too many rows": ones(2),
    "too few rows": ones(0),
    "too narrow": ones(1, DIM - 1),
    "too wide": ones(1, DIM + 1),
    "vector": torch.ones(DIM),
    "cube": torch.ones(1, 1, DIM),
    "meta": meta(ones()),
    "sparse": ones().to_sparse(),
    "list": [[1.0] * DIM],
    "none": None,
}


@pytest.mark.parametrize("bad", BAD_MATRICES)
def test_gradients_have_the_shape_of_the_rows(table: Table, bad: str) -> None:
    grads = BAD_MATRICES[bad]
    refuses(table, lambda t: t.apply_gradients(ints(3), grads, step=0), "grads")
    refuses(table, lambda t: t.update(t.find(ints(3)), ints(3), grads, step=0), "grads")


@pytest.mark.parametrize("bad", BAD_MATRICES)
def test_assigned_rows_have_the_shape_of_the_rows(table: Table, bad: str) -> None:
    refuses(table, lambda t: t.assign(ints(3), BAD_MATRICES[bad]), "rows")
    refuses(table, lambda t: t.assign_add(ints(3), BAD_MATRICES[bad]), "rows")


@pytest.mark.parametrize("bad", BAD_MATRICES)
def test_pooled_gradients_have_the_shape_of_the_outputs(table: Table, bad: str) -> None:
    pooling = Pooling.sum("user", ints(0, 1), DIM)
    call = lambda t: t.update(None, ints(3), [BAD_MATRICES[bad]], pooling, step=0)  # noqa: E731
    refuses(table, call, "grads[0]")


@pytest.mark.parametrize("grads", [[], [ones(), ones()], ones(), None, 3.0])
def test_pooled_gradients_are_one_per_output(table: Table, grads: Any) -> None:
    pooling = Pooling.sum("user", ints(0, 1), DIM)
    refuses(table, lambda t: t.update(None, ints(3), grads, pooling, step=0), "grad", "output")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 8, 4096, 70_000])
@pytest.mark.parametrize("at", [0, -1])
def test_gradients_are_finite(table: Table, value: float, size: int, at: int) -> None:
    grads = torch.zeros(size, DIM)
    grads[at, at] = value
    ids = torch.arange(size)

    refuses(table, lambda t: t.apply_gradients(ids, grads, step=0), "grads", "NaN or Inf")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pooled_gradients_are_finite(table: Table, value: float) -> None:
    pooling = Pooling(
        ((1, DIM), (1, DIM)),
        {"user": (Bags(ints(0, 1), (OutputSlice(0, 0, 0, DIM), OutputSlice(1, 0, 0, DIM))),)},
    )
    grads = [ones(), torch.tensor([[0.0, 0.0, value]])]

    call = lambda t: t.update(None, ints(3), grads, pooling, step=0)  # noqa: E731
    refuses(table, call, "grads of output 1", "NaN or Inf")


@pytest.mark.parametrize(
    ("field", "bag"),
    [
        ("weights", {"weights": torch.tensor([1.0, math.nan])}),
        ("weights", {"weights": torch.tensor([1.0, math.inf])}),
        ("divisor", {"divisor": torch.tensor([math.nan])}),
        ("divisor", {"divisor": torch.tensor([0.0])}),
    ],
)
def test_a_pooling_must_not_make_gradients_infinite(table: Table, field: str, bag: dict[str, Tensor]) -> None:
    pooling = summed("user", ints(0, 2), DIM, **bag)
    refuses(table, lambda t: t.update(None, ints(3, 4), [ones()], pooling, step=0), field)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, TOO_LARGE, "1", None])
def test_a_scale_is_finite(table: Table, scale: Any) -> None:
    refuses(table, lambda t: t.update(None, ints(3), ones(), step=0, scale=scale), "scale")


# ---- rows from find()


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        meta(torch.zeros(1, dtype=torch.int32)),
        [0],
    ],
    ids=["int64", "too many", "too few", "matrix", "meta", "list"],
)
def test_rows_are_what_find_gave(table: Table, rows: Any) -> None:
    refuses(table, lambda t: t.read(rows, ints(1)), "rows")
    refuses(table, lambda t: t.update(rows, ints(1), ones(), step=0), "rows")


# ---- steps, times, rates


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 70_000])
@pytest.mark.parametrize("at", [0, -1])
def test_assigned_rows_are_finite(table: Table, value: float, size: int, at: int) -> None:
    rows = torch.zeros(size, DIM)
    rows[at, at] = value
    ids = torch.arange(size)

    refuses(table, lambda t: t.assign(ids, rows), "rows", "NaN or Inf")
    refuses(table, lambda t: t.assign_add(ids, rows), "rows", "NaN or Inf")


@pytest.mark.parametrize(
    "step", [-1, 1.0, "1", None, True, torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(True), 2**63]
)
def test_a_step_is_an_integer_from_zero(table: Table, step: Any) -> None:
    refuses(table, lambda t: t.apply_gradients(ints(3), ones(), step=step), "step")


@pytest.mark.parametrize("kind", [torch.tensor, np.int64, np.uint8, np.array], ids=lambda kind: kind.__name__)
def test_a_step_may_be_a_tensor_or_a_numpy_integer(engine: str, kind: Any) -> None:
    table = sgd_table(engine, 1, optimizer=SGD(lambda step: float(step)))

    table.apply_gradients(ints(1), torch.ones(1, 1), step=kind(3))

    assert table.lookup(ints(1)).tolist() == [[-3.0]]


@pytest.mark.parametrize("time", [torch.tensor(7), torch.tensor(7.9), np.int32(7), np.float32(7.5)], ids=repr)
def test_a_time_may_be_a_tensor_or_a_numpy_number(engine: str, time: Any) -> None:
    table = sgd_table(engine, 1)

    table.assign(ints(1), torch.ones(1, 1), time=time)
    table.apply_gradients(ints(2), torch.ones(1, 1), step=0, time=time)
    table.reinitialize(ints(3), time=time)

    assert whole(table).time.tolist() == [7, 7, 7]


@pytest.mark.parametrize("time", [-1, 2**32, math.nan, math.inf, "now", torch.tensor([1, 2]), True, 1j])
@pytest.mark.parametrize(
    "write",
    [
        lambda t, time: t.apply_gradients(ints(3), ones(), step=0, time=time),
        lambda t, time: t.assign(ints(3), ones(), time=time),
        lambda t, time: t.assign_add(ints(3), ones(), time=time),
        lambda t, time: t.reinitialize(ints(3), time=time),
        lambda t, time: t.evict(time),
    ],
    ids=["apply_gradients", "assign", "assign_add", "reinitialize", "evict"],
)
def test_a_time_is_seconds_in_32_bits(table: Table, write: Callable[[Table, Any], object], time: Any) -> None:
    refuses(table, lambda t: write(t, time), "time")


@pytest.mark.parametrize("rate", [math.nan, math.inf, TOO_LARGE, -0.5, None])
def test_a_schedule_must_give_a_rate(engine: str, rate: Any) -> None:
    fine_then_bad = SGD(lambda step: 0.5 if step == 0 else rate)
    segments = [Segment(1, optimizer=SGD(1.0)), Segment(2, optimizer=fine_then_bad)]
    table = Table(TableConfig("user", segments=segments), engine=engine)
    table.track("sync")
    table.apply_gradients(ints(1), ones(), step=0)
    table.drain_touched("sync")

    refuses(table, lambda t: t.apply_gradients(ints(1, 2), ones(2), step=1), "segment 1", "rate", "step 1")


def test_a_rate_that_fails_names_table_and_segment(table: Table) -> None:
    def lost() -> float:
        raise KeyError("rates.json")

    segments = [Segment(1, optimizer=SGD(1.0)), Segment(2, optimizer=SGD(lost))]
    table = Table(TableConfig("user", segments=segments), engine=table.engine)
    table.track("sync")

    call = lambda t: t.apply_gradients(ints(1), ones(), step=0)  # noqa: E731
    refuses(table, call, "segment 1", "step 0", "lost", "KeyError: 'rates.json'")


def test_ftrl_refuses_a_rate_of_zero(engine: str) -> None:
    optimizer = FTRL(Piecewise((1,), (0.1, 0.0)))
    table = sgd_table(engine, DIM, optimizer=optimizer, name="user")
    table.track("sync")
    table.apply_gradients(ints(1), ones(), step=0)
    table.drain_touched("sync")

    refuses(table, lambda t: t.apply_gradients(ints(1, 2), ones(2), step=1), "FTRL", "step 1")


def test_a_table_that_is_not_trainable_refuses_to_train(engine: str) -> None:
    config = TableConfig("user", dim=DIM, optimizer=SGD(), trainable=False)
    table = Table(config, engine=engine)
    table.track("sync")

    for call in (
        lambda t: t.apply_gradients(ints(1), ones(), step=0),
        lambda t: t.update(None, ints(1), [ones()], Pooling.sum("user", ints(0, 1), DIM), step=0),
    ):
        refuses(table, call, "not trainable", kind=UsageError)


# ---- poolings

Fields = dict[str, Any]


def pooling_with(
    *, outputs: Any = ((2, DIM),), offsets: Any = None, part: Fields | None = None, **bag: Any
) -> Pooling:
    """Two bags over three occurrences into one output, with something changed."""
    fields: Fields = {"output": 0, "column": 0, "start": 0, "end": DIM, **(part or {})}
    offsets = ints(0, 1, 3) if offsets is None else offsets
    return Pooling(outputs, {"user": (Bags(offsets, (OutputSlice(**fields),), **bag),)})


BAD_POOLINGS: dict[str, tuple[Callable[[], Pooling], str]] = {
    "offsets descend": (lambda: pooling_with(offsets=ints(0, 2, 1)), "offsets"),
    "offsets negative": (lambda: pooling_with(offsets=ints(-1, 1, 3)), "offsets"),
    "offsets beyond the ids": (lambda: pooling_with(offsets=ints(0, 1, 4)), "offsets"),
    "offsets int32": (lambda: pooling_with(offsets=ints(0, 1, 3).int()), "offsets"),
    "offsets float": (lambda: pooling_with(offsets=ints(0, 1, 3).float()), "offsets"),
    "offsets matrix": (lambda: pooling_with(offsets=ints(0, 1, 3)[None]), "offsets"),
    "offsets empty": (lambda: pooling_with(offsets=ints()), "offsets"),
    "offsets meta": (lambda: pooling_with(offsets=meta(ints(0, 1, 3))), "offsets"),
    "offsets list": (lambda: pooling_with(offsets=[0, 1, 3]), "offsets"),
    "too few bags": (lambda: pooling_with(offsets=ints(0, 1)), "bags"),
    "too many bags": (lambda: pooling_with(offsets=ints(0, 1, 2, 3)), "bags"),
    "features overlap": (
        lambda: Pooling(
            ((2, DIM),),
            {
                "user": (
                    Bags(ints(0, 1, 3), (OutputSlice(0, 0, 0, DIM),)),
                    Bags(ints(2, 3, 3), (OutputSlice(0, 0, 0, DIM, accumulate=True),)),
                )
            },
        ),
        "offsets",
    ),
    "weights short": (lambda: pooling_with(weights=torch.ones(2)), "weights"),
    "weights long": (lambda: pooling_with(weights=torch.ones(4)), "weights"),
    "weights matrix": (lambda: pooling_with(weights=torch.ones(3, 1)), "weights"),
    "weights float64": (lambda: pooling_with(weights=torch.ones(3).double()), "weights"),
    "weights meta": (lambda: pooling_with(weights=meta(torch.ones(3))), "weights"),
    "divisor short": (lambda: pooling_with(divisor=torch.ones(1)), "divisor"),
    "divisor long": (lambda: pooling_with(divisor=torch.ones(3)), "divisor"),
    "divisor int": (lambda: pooling_with(divisor=torch.ones(2).long()), "divisor"),
    "divisor meta": (lambda: pooling_with(divisor=meta(torch.ones(2))), "divisor"),
    "output unknown": (lambda: pooling_with(part={"output": 1}), "output"),
    "output negative": (lambda: pooling_with(part={"output": -1}), "output"),
    "slice beyond the row": (lambda: pooling_with(part={"end": DIM + 1}), "slice"),
    "slice far beyond the row": (lambda: pooling_with(part={"end": 2**40}), "slice"),
    "slice negative": (lambda: pooling_with(part={"start": -1}), "slice"),
    "slice empty": (lambda: pooling_with(part={"start": 2, "end": 2}), "slice"),
    "slice upside down": (lambda: pooling_with(part={"start": 2, "end": 1}), "slice"),
    "column negative": (lambda: pooling_with(part={"column": -1}), "columns"),
    "column beyond the output": (lambda: pooling_with(part={"column": 1}), "columns"),
    "column far beyond the output": (lambda: pooling_with(part={"column": 2**40}), "columns"),
    "inner zero": (lambda: pooling_with(part={"inner": 0}), "bags"),
    "inner negative": (lambda: pooling_with(part={"inner": -1}), "bags"),
    "inner and bags differ": (lambda: pooling_with(part={"inner": 2}), "bags"),
    "inner wider than the output": (
        lambda: pooling_with(outputs=((1, DIM),), part={"inner": 2}),
        "columns",
    ),
    "parts differ in inner": (
        lambda: Pooling(
            ((2, DIM), (1, 2 * DIM)),
            {"user": (Bags(ints(0, 1, 3), (OutputSlice(0, 0, 0, DIM), OutputSlice(1, 0, 0, DIM, inner=2))),)},
        ),
        "",
    ),
}


@pytest.mark.parametrize("bad", BAD_POOLINGS)
def test_a_pooling_fits_the_ids_the_rows_and_the_outputs(table: Table, bad: str) -> None:
    make, field = BAD_POOLINGS[bad]
    pooling, ids = make(), ints(1, 2, 3)
    outputs = [torch.ones(shape) for shape in pooling.outputs]

    refuses(table, lambda t: t.read(t.find(ids), ids, pooling), field)
    refuses(table, lambda t: t.read(t.find(ids), ids, pooling, out=outputs), field)
    refuses(table, lambda t: t.update(None, ids, outputs, pooling, step=0), field)

    assert all(bool((out == 1).all()) for out in outputs)


def test_a_column_near_the_largest_number_raises(engine: str) -> None:
    table = sgd_table(engine, 2, name="user")
    table.track("sync")
    pooling = Pooling(((1, 2),), {"user": (Bags(ints(0, 1), (OutputSlice(0, 2**63 - 1, 0, 2),)),)})

    refuses(table, lambda t: t.read(t.find(ints(1)), ints(1), pooling, out=[torch.zeros(1, 2)]))


@pytest.mark.parametrize(
    "out",
    [[], [ones(2), ones(2)], [ones(3)], [ones(2).double()], [torch.ones(DIM, 2).T], [meta(ones(2))]],
    ids=["none", "two", "shape", "float64", "strided", "meta"],
)
def test_outputs_to_fill_have_the_poolings_shapes(table: Table, out: list[Tensor]) -> None:
    ids, pooling = ints(1, 2, 3), pooling_with()
    refuses(table, lambda t: t.read(t.find(ids), ids, pooling, out=out), "out")


# ---- chunks


def chunk_with(**changed: Any) -> Chunk:
    """Row 3 whole, with something changed."""
    fields: Fields = {
        "ids": ints(3),
        "rows": ones(),
        "state": {"1/sum": ones(1, 2)},
        "time": ints(0),
    }
    return Chunk(**{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"rows": ones().double()}, "rows"),
        ({"rows": ones(2)}, "rows"),
        ({"rows": meta(ones())}, "rows"),
        ({"rows": None}, "rows"),
        ({"state": {}}, "state"),
        ({"state": {"0/sum": ones(1, 2)}}, "state"),
        ({"state": {"1/sum": ones(1, 2), "1/z": ones(1, 2)}}, "state"),
        ({"state": {"1/sum": ones(1, 1)}}, "state 1/sum"),
        ({"state": {"1/sum": ones(2, 2)}}, "state 1/sum"),
        ({"state": {"1/sum": ones(1, 2).half()}}, "state 1/sum"),
        ({"state": {"1/sum": None}}, "state 1/sum"),
        ({"time": ints(-1)}, "time"),
        ({"time": ints(2**32)}, "time"),
        ({"time": ints(0, 0)}, "time"),
        ({"time": ints(0).int()}, "time"),
        ({"time": torch.tensor([0.0])}, "time"),
        ({"time": meta(ints(0))}, "time"),
        ({"time": None}, "time"),
    ],
)
def test_a_chunk_fits_the_table(table: Table, changed: Fields, word: str) -> None:
    refuses(table, lambda t: t.restore(chunk_with(**changed)), word)


def test_the_chunk_used_above_is_otherwise_right(table: Table) -> None:
    table.restore(chunk_with())
    assert 3 in table


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_chunks_hold_at_least_a_row(table: Table, chunk_size: int) -> None:
    refuses(table, lambda t: list(t.scan(chunk_size)), "chunk_size")


def test_less_than_nothing_cannot_be_reserved(table: Table) -> None:
    refuses(table, lambda t: t.reserve(-1), "reserve")


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


# ---- making a table


@pytest.mark.parametrize("config", [None, "user", {"name": "user"}])
def test_a_table_needs_a_config(engine: str, config: Any) -> None:
    with pytest.raises(InputError, match="config must be a TableConfig"):
        Table(config, engine=engine)
