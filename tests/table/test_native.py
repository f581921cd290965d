"""The native layer: borrowed tensors, limits, the GIL, and life without it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith import SGD, Adagrad, Normal, Table, TableConfig, Zeros, _native
from megalith.errors import InputError, TableFullError
from megalith.ops import Pooling
from megalith.table import Chunk
from megalith.table.engines.cpu import CpuEngine, set_huge_pages
from megalith.table.table_data import Step
from tests.table.support import (
    OPTIMIZERS,
    as_sets,
    assert_same_tables,
    cpu_table,
    ints,
    life,
    native_table,
    sgd_table,
    unchanged,
    whole,
)

# ---- huge pages


def test_huge_pages_do_not_show() -> None:
    ids = torch.arange(70_000)  # two chunks of rows
    tables = []
    try:
        for process, own in ((True, True), (True, False), (False, True)):
            set_huge_pages(process)
            config = TableConfig("t", dim=64, optimizer=SGD(1.0), initializer=Normal(), huge_pages=own)
            table = Table(config, engine="cpu")
            table.apply_gradients(ids, torch.ones(ids.numel(), 64), step=0, time=0)
            tables.append(whole(table))
    finally:
        set_huge_pages(True)

    for other in tables[1:]:
        assert_same_tables(other, tables[0])


# ---- borrowing tensors


@pytest.fixture(params=[True, False], ids=["exchange api", "attributes"])
def exchange_api(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both ways into a tensor's memory."""
    on: bool = request.param
    _native.set_exchange_api(on)
    yield on
    _native.set_exchange_api(True)


def test_both_ways_into_a_tensor_give_the_same_table(exchange_api: bool) -> None:
    table = sgd_table("cpu", 20, optimizer=OPTIMIZERS["adam"], initializer=Normal())
    actual = life(table)
    table.restore(actual)
    _native.set_exchange_api(True)
    expected = life(sgd_table("cpu", 20, optimizer=OPTIMIZERS["adam"], initializer=Normal()))

    assert_same_tables(whole(table), expected)


GOOD_IDS, GOOD_VALUES = ints(1, 2), torch.zeros(2, 3)


@pytest.mark.usefixtures("exchange_api")
def test_the_native_layer_refuses_tensors_it_cannot_borrow() -> None:
    ids: list[Any] = [GOOD_IDS.int(), GOOD_IDS.float(), GOOD_IDS.view(torch.uint64), ints(1, 2, 3)[::2]]
    ids += [GOOD_IDS.to("meta"), [1, 2], "ids", torch.zeros(1, 1, 1, 1, 1, dtype=torch.int64)]
    values: list[Any] = [GOOD_VALUES.double(), GOOD_VALUES.half(), torch.zeros(2, dtype=torch.complex64)]
    values += [GOOD_VALUES.T, GOOD_VALUES[:, ::2], torch.zeros(1).expand(4), GOOD_VALUES.to_sparse()]
    values += [GOOD_VALUES.to("meta"), [[1.0]]]
    for wrong in ids:
        with pytest.raises(TypeError, match="ids: expected a contiguous int64 tensor"):
            _native.check_tensors(wrong, GOOD_VALUES)
    for wrong in values:
        with pytest.raises(TypeError, match="values: expected a contiguous float32 tensor"):
            _native.check_tensors(GOOD_IDS, wrong)


def test_a_tensor_without_memory_raises() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, dtype=torch.int64)
        with pytest.raises((InputError, TypeError)):
            native_table(sgd_table("cpu")).remove(fake)


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        (GOOD_IDS, GOOD_VALUES),
        (ints(), torch.zeros(0, 3)),
        (ints(1), torch.zeros(5, 0)),
        (ints(1, 2, 3)[1:], torch.zeros(4, 3)[1:3]),
        (ints(1, 2)[::2], torch.zeros(3, 1).T),  # one element: strides do not matter
        (ints(1), torch.nn.Parameter(torch.zeros(1, 3))),
    ],
    ids=["plain", "empty", "no columns", "offset", "one element", "parameter"],
)
@pytest.mark.usefixtures("exchange_api")
def test_the_native_layer_borrows_every_contiguous_tensor(ids: Tensor, values: Tensor) -> None:
    _native.check_tensors(ids, values)


@pytest.mark.usefixtures("exchange_api")
def test_the_native_layer_checks_shapes_itself() -> None:
    table = CpuEngine(TableConfig("t", dim=3, optimizer=SGD()))._native
    rows = torch.zeros(2, dtype=torch.int32)
    step = Step([1.0], 0, 1.0, 0.0, 0)
    good = (table, GOOD_IDS, None, -1, None, GOOD_VALUES, step, [1.0], None)

    def read(*lookups: Any) -> Callable[[], object]:
        return lambda: _native.read_tables(list(lookups), (), 1)

    def update(**fields: Any) -> Callable[[], object]:
        return lambda: _native.update_tables([(*good[:6], step._replace(**fields), *good[7:])], (), 1)

    def restore(values: list[Tensor], times: Tensor = GOOD_IDS) -> Callable[[], object]:
        return lambda: table.restore(GOOD_IDS, values, times, None, None, 1)

    snapshot = (GOOD_IDS.clone(), [GOOD_VALUES.clone()], GOOD_IDS.clone(), None, None)
    narrow = (*good[:5], torch.zeros(2, 2), *good[6:])
    refused: list[tuple[Callable[[], object], str]] = [
        (read((table, GOOD_IDS[None], rows, None, ())), "table 't': ids: expected one dimension"),
        (read((table, ints(1), rows, None, ())), "rows: expected one per id"),
        *[(read((table, ints(1), None, epoch, ())), "rows: expected a tensor") for epoch in (None, -1, 0)],
        (read((table, ints(1), rows)), "expected five fields"),
        (read(*[(table, GOOD_IDS, rows, None, ())] * 2), "a table occurs twice"),
        (lambda: table.read(None, -1, GOOD_IDS, torch.zeros(2, 4), 1), r"out: expected shape \[2, 3\]"),
        (lambda: table.assign(GOOD_IDS, torch.zeros(3, 3), False, 0, 1), r"values: expected shape \[2, 3\]"),
        (lambda: _native.update_tables([narrow], (), 1), r"table 't': grads: expected shape \[2, 3\]"),
        (update(rates=[1.0, 1.0]), "learning_rates"),
        (update(time=-1), "time: out of range"),
        (update(scale="1"), "scale: expected a number"),
        (lambda: _native.update_tables([good, good], (), 1), "a table occurs twice"),
        (restore([GOOD_VALUES], ints(1)), "times"),
        (restore([GOOD_VALUES[:1]]), "columns: expected one row per id"),
        (restore([GOOD_VALUES, GOOD_VALUES]), "columns: their widths do not add up"),
        (lambda: table.read_snapshot(*snapshot), "has no open snapshot"),
        (lambda: table.begin_snapshot(3, True, 1, False, 1.0), "consumer: not tracked"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(table) == 0


PLAIN = (0, 0.0, 0.0)


@pytest.mark.parametrize(
    "segment",
    [
        (0, "sgd", "", [], [], *PLAIN),
        (-1, "sgd", "", [], [], *PLAIN),
        (1, "newton", "", [], [], *PLAIN),
        (1, "sgd", "", [0.0] * 9, [], *PLAIN),
        (1, "sgd", "", [], [], 4, 0.0, 0.0),
        (1, "sgd", "", [], [], -1, 0.0, 0.0),
        (1, "sgd", "", [], [0.0], *PLAIN),
        (2, "adagrad", "", [], [0.0], *PLAIN),
        (1, "sgd", "adagrad", [], [0.0], *PLAIN),
        *[
            (1, "delay_compensated", base, [], [0.0], *PLAIN)
            for base in ("", "newton", "custom", "delay_compensated")
        ],
    ],
)
def test_the_native_layer_refuses_segments_it_does_not_know(segment: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"segment|optimizer"):
        _native.Table("t", [(*segment, 0, False)], key=0, missing_zeros=False)
    with pytest.raises(ValueError, match="segment"):
        _native.Table("t", [], key=0, missing_zeros=False)
    for precision in (-1, len(_native.PRECISIONS)):
        unknown = (1, "sgd", "", [], [], 0, 0.0, 0.0, precision, False)
        with pytest.raises(ValueError, match="precision"):
            _native.Table("t", [unknown], key=0, missing_zeros=False)


@pytest.mark.parametrize("size", [0, 1, 7, 31, 32, 33, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_is_found_wherever_it_is(size: int, bad: float) -> None:
    values = torch.full((size,), torch.finfo(torch.float32).max)
    for threads in (1, 2):
        assert _native.all_finite(values, threads)
    for at in {0, size // 2, size - 1} if size else ():
        values[at] = bad
        for threads in (1, 2):
            assert not _native.all_finite(values, threads)
        values[at] = -1e-45


@pytest.mark.parametrize("columns", [1, 7, 8, 21, 59])
def test_a_bad_number_is_found_in_rows_of_a_wider_tensor_and_not_beside_them(columns: int) -> None:
    wide = torch.full((3, columns + 2), torch.nan)
    rows = wide[:, 1:-1]
    rows.fill_(torch.finfo(torch.float32).max)
    assert _native.all_finite(rows, 1)
    for at in range(3 * columns):
        row, column = divmod(at, columns)
        rows[row, column] = torch.inf
        assert not _native.all_finite(rows, 1)
        rows[row, column] = 0.0
    many = torch.zeros(70_000, columns + 1)[:, :columns]  # shared by threads
    assert _native.all_finite(many, 2)
    many[-1, -1] = torch.nan
    assert not _native.all_finite(many, 2)


# ---- limits


def full_table() -> Table:
    """A table "user" of at most ten rows that holds eight."""
    config = TableConfig("user", dim=1, optimizer=SGD(1.0), initializer=Zeros())
    table = cpu_table(config, max_rows=10)
    table.assign(torch.arange(8), torch.ones(8, 1))
    return table


@pytest.mark.parametrize(
    "write",
    [
        lambda t, ids: t.apply_gradients(ids, torch.ones(ids.numel(), 1), step=0),
        lambda t, ids: t.update(
            None, ids, [torch.ones(1, 1)], Pooling.sum("user", ints(0, ids.numel()), 1), step=0
        ),
        lambda t, ids: t.assign(ids, torch.ones(ids.numel(), 1)),
        lambda t, ids: t.assign_add(ids, torch.ones(ids.numel(), 1)),
        lambda t, ids: t.reinitialize(ids),
        lambda t, ids: t.restore(Chunk(ids, torch.ones(ids.numel(), 1), {}, torch.zeros_like(ids))),
    ],
    ids=["apply_gradients", "pooled", "assign", "assign_add", "reinitialize", "restore"],
)
def test_a_full_table_refuses_before_anything_is_written(
    write: Callable[[Table, Tensor], object],
) -> None:
    table = full_table()
    table.track("a")

    with unchanged(table), pytest.raises(TableFullError, match="'user' holds 8 rows"):
        write(table, ints(0, 1, 100, 101, 102))
    assert as_sets(table.drain_touched("a")) == (set(), set())

    write(table, ints(0, 100, 101))
    assert len(table) == 10
    assert as_sets(table.drain_touched("a")) == ({0, 100, 101}, set())
    write(table, torch.arange(8))


def test_duplicates_do_not_hide_how_many_rows_are_needed_and_removed_rows_make_room() -> None:
    table = full_table()

    with unchanged(table), pytest.raises(TableFullError, match="cannot take 3 more"):
        table.apply_gradients(ints(*[100, 101, 102] * 4), torch.ones(12, 1), step=0)
    with pytest.raises(ValueError, match="at most 10 rows; spread the table over more shards"):
        table.reserve(11)
    table.apply_gradients(ints(*[100, 101] * 4), torch.ones(8, 1), step=0)

    assert len(table) == 10
    assert table.lookup(ints(100, 101, 0)).tolist() == [[-4.0], [-4.0], [1.0]]
    for generation in range(20):
        table.remove(torch.arange(8) + 1000 * generation)
        table.assign(torch.arange(8) + 1000 * (generation + 1), torch.ones(8, 1))
    assert len(table) == 10


# ---- the GIL


@pytest.fixture
def no_switching() -> Iterator[None]:
    """Python threads switch only where one releases the GIL itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("call", ["find", "read", "pool", "update", "assign", "scan", "all_finite"])
def test_native_calls_let_other_python_threads_run(call: str) -> None:
    n, dim = 50_000, 16
    table = Table(TableConfig("t", dim=dim, optimizer=SGD()))
    ids, rows = torch.arange(n), torch.empty(n, dtype=torch.int32)
    values, times = torch.ones(n, dim), torch.empty(n, dtype=torch.int64)
    table.assign(ids, values)
    bags = [bag.native for bag in Pooling.sum("t", torch.arange(n + 1), dim).of("t")]
    native = native_table(table)
    calls: dict[str, Callable[[], object]] = {
        "find": lambda: _native.read_tables([(native, ids, rows, None, ())], (), 1),
        "read": lambda: native.read(None, -1, ids, values, 1),
        "pool": lambda: _native.read_tables([(native, ids, rows, None, bags)], [values], 1),
        "update": lambda: _native.update_tables(
            [(native, ids, None, -1, None, values, Step([0.1], 0, 1.0, 0.0, 0), [1.0], None)], (), 1
        ),
        "assign": lambda: native.assign(ids, values, False, 0, 1),
        "scan": lambda: native.scan(0, times, [values], times, None, None),
        "all_finite": lambda: _native.all_finite(values, 1),
    }
    ready, go, ran = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        ready.set()
        go.wait()
        ran.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    ready.wait()
    go.set()
    for _ in range(20_000):  # Python code only: no other thread runs
        _native.check_tensors(ids, values)
    assert not ran.is_set(), "this test would not detect a held GIL"

    for _ in range(2000):
        calls[call]()
        if ran.is_set():
            break

    assert ran.is_set(), "the native call kept the GIL"
    thread.join(60)


# ---- without the native module

WITHOUT_NATIVE = """
import sys
sys.modules["megalith._native"] = None
import torch
import megalith
from megalith.errors import NativeMissingError

config = megalith.TableConfig("t", dim=2, optimizer=megalith.SGD(1.0), initializer=megalith.Zeros())
table = megalith.Table(config, engine="reference")
table.apply_gradients(torch.tensor([1, 1]), torch.ones(2, 2), step=0)
assert table.lookup(torch.tensor([1])).tolist() == [[-2.0, -2.0]]
for _ in range(2):
    try:
        megalith.Table(config)
    except NativeMissingError as error:
        assert isinstance(error, ImportError)
        assert "pip install" in str(error), error
        assert 'engine="reference"' in str(error), error
    else:
        raise SystemExit("made a native table without the native module")
print(sorted(name for name in ("typer", "rich", "grpc", "ray", "triton") if name in sys.modules))
"""


def test_megalith_imports_without_the_native_module_and_libraries_of_commands_or_networks() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE], capture_output=True, text=True, timeout=120
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


# ---- rows of parameter sync


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_columns_after_assigned_ones_get_one_value(precision: str) -> None:
    adagrad = Adagrad(0.1, initial_accumulator_value=2.0)
    config = TableConfig("t", dim=3, optimizer=adagrad, precision=precision)
    engine, other = CpuEngine(config), CpuEngine(config)
    ids, rows = ints(5, 6, 5), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    engine.assign_filled(ids, rows, -1.0, time=7)
    other.assign(ids, torch.cat([rows, torch.full((3, 1), -1.0)], 1), add=False, time=7)

    assert engine.read(ints(5, 6)).tolist() == [[5.0, 6.0, -1.0], [3.0, 4.0, -1.0]]
    chunk, expected = engine.scan_part(0, 9)[0], other.scan_part(0, 9)[0]
    assert torch.equal(chunk.rows, expected.rows)
    assert chunk.time.tolist() == [7, 7]
    for name, column in chunk.state.items():
        assert torch.equal(column, expected.state[name])
        assert column.unique().tolist() == [2.0]
    with pytest.raises(InputError, match="at most dim"):
        engine.assign_filled(ids, torch.zeros(3, 4), 0.0, time=0)


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf])
def test_rows_are_checked_while_they_are_read(bad: float | None) -> None:
    engine = CpuEngine(TableConfig("t", dim=3, optimizer=SGD()))
    ids, rows = torch.arange(10_000), torch.randn(10_000, 3)
    if bad is not None:
        rows[7777, 1] = bad
    engine.assign(ids, rows, add=False, time=0)
    out = torch.empty(10_000, 3)

    assert engine.read_finite(ids, engine.find(ids), out) == (bad is None)
    if bad is None:
        assert torch.equal(out, rows)


def test_each_compaction_returns_the_places_of_removed_rows() -> None:
    table = Table(TableConfig("t", dim=4, optimizer=SGD(0.1)))
    for kept in (1000, 300):  # fewer than after the one before
        table.assign(torch.arange(5000), torch.ones(5000, 4))
        table.remove(torch.arange(kept, 5000))
        assert table.memory().slack > 0
        while not table.engine_impl.compact(1000):
            pass
        assert (len(table), table.memory().slack) == (kept, 0)
    assert torch.equal(table.lookup(torch.arange(300)), torch.ones(300, 4))
