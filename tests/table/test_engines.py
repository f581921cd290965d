"""The engines compared: random programs of calls produce equal tables.

Weights that were only looked up, initialised or assigned are equal to the bit; what an
optimizer touched is equal within 1e-6. Gradients are dyadic, so that no rounding depends on how
a sum is cut, and the tolerance covers the optimizers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    BatchSoftmax,
    Constant,
    Momentum,
    Normal,
    RowWiseAdagrad,
    Segment,
    Table,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Warmup,
    Zeros,
)
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Chunk
from tests.fixed_examples import fixed_examples
from tests.table.support import (
    HIGHEST,
    LOWEST,
    OPTIMIZERS,
    as_sets,
    assert_close,
    assert_same_bits,
    dyadic,
    ints,
    sgd_table,
    summed,
    whole,
)

IDS = [0, -1, LOWEST, HIGHEST, 1, 2, 3, 2**32, -(2**32), 7 * 2**40]
CONSUMERS = ("publisher", "delta")
DRIFT = 1e-6  # absolute; a program takes up to 50 steps, and the 1e-6 is promised for each of them
CONFIGS = [
    TableConfig(
        "t",
        segments=[
            Segment(1, optimizer=FTRL(0.5, beta=1.0, l1=0.25), initializer=Zeros()),
            Segment(9, optimizer=Adam(0.1), initializer=Normal(0.0, 1.0)),
            Segment(3, optimizer=Adagrad(0.1, initial_accumulator_value=0.1)),
        ],
    ),
    TableConfig(
        "t",
        segments=[
            Segment(8, optimizer=Momentum(Warmup(0.1, 4), nesterov=True)),
            Segment(5, optimizer=RowWiseAdagrad(0.1, initial_accumulator_value=0.1)),
        ],
        missing="zeros",
    ),
    TableConfig("t", dim=16, optimizer=SGD(0.5), initializer=TruncatedNormal(0.0, 1.0)),
]

batches = st.lists(st.sampled_from(IDS), max_size=8)
seeds = st.integers(0, 2**32 - 1)
times = st.integers(0, 2**32 - 1)
steps = st.integers(0, 20)


@st.composite
def poolings(draw: st.DrawFn, num_ids: int, dim: int) -> Pooling:
    """Some features of table "t", with gaps between them, into some outputs."""
    rows = draw(st.integers(0, 3))
    widths: list[list[int]] = [[] for _ in range(draw(st.integers(1, 3)))]  # by output, left to right
    features = []
    begin = 0
    for _ in range(draw(st.integers(0, 3))):
        inner = draw(st.sampled_from([1, 1, 2]))
        cuts = st.lists(st.integers(begin, num_ids), min_size=rows * inner + 1, max_size=rows * inner + 1)
        offsets = sorted(draw(cuts))
        begin = offsets[-1]
        parts = []
        for _ in range(draw(st.integers(1, 2))):
            start = draw(st.integers(0, dim - 1))
            end = draw(st.integers(start + 1, dim))
            output = draw(st.integers(0, len(widths) - 1))
            width = inner * (end - start)
            same = [at for at, w in enumerate(widths[output]) if w == width]
            on_top = draw(st.booleans())
            if same and on_top:
                column = sum(widths[output][: draw(st.sampled_from(same))])
                parts.append(OutputSlice(output, column, start, end, inner, accumulate=True))
            else:
                add = draw(st.booleans())  # to an output that starts at zero
                parts.append(OutputSlice(output, sum(widths[output]), start, end, inner, accumulate=add))
                widths[output].append(width)
        weights = dyadic(draw(seeds), num_ids) if draw(st.booleans()) else None
        divisor = None
        if draw(st.booleans()):
            divisor = 2.0 ** dyadic(draw(seeds), rows * inner).round()
        features.append(Bags(ints(*offsets), tuple(parts), weights, divisor))
    spare = draw(st.integers(0, 1))  # columns that no part writes
    outputs = tuple((rows, max(1, spare + sum(w))) for w in widths)
    return Pooling(outputs, {"t": tuple(features)})


@dataclass
class Found:
    """Rows found by each engine at some moment."""

    ids: Tensor
    rows: tuple[Tensor, Tensor]
    epochs: tuple[int, int]


class Engines(RuleBasedStateMachine):
    """A reference and a cpu table that hear the same calls."""

    tables: tuple[Table, Table]
    tolerance: ClassVar[dict[str, float]] = {"rtol": 1e-6, "atol": DRIFT}

    @initialize(config=st.sampled_from(CONFIGS), seed=st.integers(-5, 5))
    def make(self, config: TableConfig, seed: int) -> None:
        self.start(config, seed)

    def start(self, config: TableConfig, seed: int) -> None:
        self.tables = (
            Table(config, engine="reference", seed=seed),
            Table(config, engine="cpu", seed=seed),
        )
        self.dim = config.dim
        self.trained: set[int] = set()  # ids whose weights an optimizer wrote since an exact write
        self.found = Found(ints(), (ints().int(), ints().int()), (0, 0))
        self.saved: list[Chunk] = []

    def compare(self, ids: Tensor, actual: Tensor, expected: Tensor) -> None:
        if self.trained.isdisjoint(ids.tolist()):
            assert_same_bits(actual, expected)
        else:
            assert_close(actual, expected, **self.tolerance)

    # ---- reading

    @rule(ids=batches)
    def lookup(self, ids: list[int]) -> None:
        expected, actual = (t.lookup(ints(*ids)) for t in self.tables)
        for at in range(len(ids)):
            self.compare(ints(ids[at]), actual[at], expected[at])

    @rule(ids=batches)
    def find(self, ids: list[int]) -> None:
        rows = tuple(t.find(ints(*ids)) for t in self.tables)
        assert (rows[0] >= 0).tolist() == (rows[1] >= 0).tolist()
        self.found = Found(ints(*ids), (rows[0], rows[1]), (self.tables[0].epoch, self.tables[1].epoch))

    @rule(with_epoch=st.booleans())
    def read_found(self, with_epoch: bool) -> None:
        f = self.found
        expected, actual = (
            t.read(rows, f.ids, epoch=epoch if with_epoch else None)
            for t, rows, epoch in zip(self.tables, f.rows, f.epochs, strict=True)
        )
        self.compare(f.ids, actual, expected)

    @rule(data=st.data(), with_epoch=st.booleans())
    def read_pooled(self, data: st.DataObject, with_epoch: bool) -> None:
        f = self.found
        pooling = data.draw(poolings(f.ids.numel(), self.dim))
        expected, actual = (
            t.read(rows, f.ids, pooling, epoch=epoch if with_epoch else None)
            for t, rows, epoch in zip(self.tables, f.rows, f.epochs, strict=True)
        )
        for a, e in zip(actual, expected, strict=True):
            self.compare(f.ids, a, e)

    # ---- training

    @rule(ids=batches, seed=seeds, step=steps, time=times)
    def apply_gradients(self, ids: list[int], seed: int, step: int, time: int) -> None:
        for t in self.tables:
            t.apply_gradients(ints(*ids), dyadic(seed, len(ids), self.dim), step=step, time=time)
        self.trained.update(ids)

    @rule(
        seed=seeds,
        step=steps,
        time=times,
        with_epoch=st.booleans(),
        scale=st.sampled_from([1.0, 0.5, -2.0, 0.0]),
        clip_norm=st.sampled_from([None, 0.5, 100.0]),
    )
    def update_found(
        self, seed: int, step: int, time: int, with_epoch: bool, scale: float, clip_norm: float | None
    ) -> None:
        f = self.found
        grads = dyadic(seed, f.ids.numel(), self.dim)
        for t, rows, epoch in zip(self.tables, f.rows, f.epochs, strict=True):
            known = epoch if with_epoch else None
            t.update(rows, f.ids, grads, step=step, time=time, scale=scale, clip_norm=clip_norm, epoch=known)
        self.trained.update(f.ids.tolist())

    @rule(data=st.data(), seed=seeds, step=steps, time=times, with_rows=st.booleans())
    def update_pooled(self, data: st.DataObject, seed: int, step: int, time: int, with_rows: bool) -> None:
        f = self.found
        pooling = data.draw(poolings(f.ids.numel(), self.dim))
        grads = [dyadic(seed + k, *shape) for k, shape in enumerate(pooling.outputs)]
        for t, rows, epoch in zip(self.tables, f.rows, f.epochs, strict=True):
            if with_rows:
                t.update(rows, f.ids, grads, pooling, step=step, time=time, epoch=epoch)
            else:
                t.update(None, f.ids, grads, pooling, step=step, time=time)
        self.trained.update(f.ids.tolist())

    # ---- writing and removing

    @rule(ids=batches, seed=seeds, time=times)
    def assign(self, ids: list[int], seed: int, time: int) -> None:
        rows = dyadic(seed, len(ids), self.dim) * 0.3
        for t in self.tables:
            t.assign(ints(*ids), rows, time=time)
        self.trained.difference_update(ids)

    @rule(ids=batches, seed=seeds, time=times)
    def assign_add(self, ids: list[int], seed: int, time: int) -> None:
        rows = dyadic(seed, len(ids), self.dim) * 0.3
        for t in self.tables:
            t.assign_add(ints(*ids), rows, time=time)

    @rule(ids=batches, time=times)
    def reinitialize(self, ids: list[int], time: int) -> None:
        expected, actual = (t.reinitialize(ints(*ids), time=time) for t in self.tables)
        assert actual.tolist() == expected.tolist()
        self.trained.difference_update(ids)

    @rule(ids=batches)
    def remove(self, ids: list[int]) -> None:
        expected, actual = (t.remove(ints(*ids)) for t in self.tables)
        assert actual == expected
        self.trained.difference_update(ids)

    @rule(ids=batches, removed=batches, created=batches, with_epoch=st.booleans(), seed=seeds)
    def train_on_rows_that_moved(
        self, ids: list[int], removed: list[int], created: list[int], with_epoch: bool, seed: int
    ) -> None:
        self.find(ids)
        self.remove(removed)
        self.assign(created, seed, time=1)
        self.update_found(seed, step=1, time=2, with_epoch=with_epoch, scale=1.0, clip_norm=None)

    @rule(n=st.integers(0, 200))
    def reserve(self, n: int) -> None:
        for t in self.tables:
            t.reserve(n)

    @precondition(lambda self: len(self.tables[0]) > 3)
    @rule()
    def clear(self) -> None:
        for t in self.tables:
            t.clear()
        self.trained.clear()

    @rule(source=st.sampled_from([0, 1]), chunk_size=st.integers(1, 4))
    def save(self, source: int, chunk_size: int) -> None:
        self.saved = list(self.tables[source].scan(chunk_size))

    @rule(skip=st.integers(1, 3))
    def restore(self, skip: int) -> None:
        for chunk in self.saved[::skip]:
            for t in self.tables:
                t.restore(chunk)
            self.trained.difference_update(chunk.ids.tolist())

    # ---- touched rows

    @rule(consumer=st.sampled_from(CONSUMERS))
    def track(self, consumer: str) -> None:
        for t in self.tables:
            t.track(consumer)

    @precondition(lambda self: len(self.tables[0].stats().consumers) == 2)
    @rule(consumer=st.sampled_from(CONSUMERS))
    def untrack(self, consumer: str) -> None:
        for t in self.tables:
            t.untrack(consumer)

    @precondition(lambda self: self.tables[0].stats().consumers)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(sorted(self.tables[0].stats().consumers)))
        expected, actual = (as_sets(t.drain_touched(consumer)) for t in self.tables)
        assert actual == expected

    @precondition(lambda self: self.tables[0].stats().consumers)
    @rule(data=st.data(), ids=batches)
    def mark(self, data: st.DataObject, ids: list[int]) -> None:
        consumer = data.draw(st.sampled_from(sorted(self.tables[0].stats().consumers)))
        for t in self.tables:
            t.mark_touched(consumer, ints(*ids))

    # ---- after every call

    @invariant()
    def tables_are_equal(self) -> None:
        reference, native = self.tables
        assert len(native) == len(reference)
        assert native.epoch == reference.epoch
        assert native.stats().consumers == reference.stats().consumers
        expected, actual = whole(reference, 4), whole(native, 4)
        assert actual.ids.tolist() == expected.ids.tolist()
        assert actual.time.tolist() == expected.time.tolist()
        assert [id in native for id in IDS] == [id in set(expected.ids.tolist()) for id in IDS]
        exact = torch.tensor([id not in self.trained for id in expected.ids.tolist()], dtype=torch.bool)
        assert_same_bits(actual.rows[exact], expected.rows[exact])
        assert_close(actual.rows, expected.rows, **self.tolerance)
        for key in expected.state:
            assert_close(actual.state[key], expected.state[key], atol=DRIFT)


Engines.TestCase.settings = fixed_examples(25, 50, stateful_step_count=50)
TestEngines = Engines.TestCase


# ---- larger batches than a program of calls draws


@pytest.mark.parametrize("name", [*OPTIMIZERS, "batch_softmax"])
@given(
    dim=st.sampled_from([1, 2, 8, 11, 16, 32, 37, 64, 72]),
    distinct=st.integers(1, 200),
    occurrences=st.integers(0, 200),
    steps=st.lists(st.sampled_from([0, 1, 999, 2**24, 2**40]), min_size=2, max_size=2).map(sorted),
    seed=seeds,
)
@fixed_examples(4, 20)
def test_each_step_on_many_duplicated_ids(
    name: str, dim: int, distinct: int, occurrences: int, steps: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer, dim = (BatchSoftmax(0.5), 1) if name == "batch_softmax" else (OPTIMIZERS[name], dim)
    ids = torch.randint(distinct, (occurrences,), generator=generator) * 0x9E3779B97F4A7C1
    reference, cpu = (
        sgd_table(e, dim, optimizer=optimizer, initializer=Uniform()) for e in ("reference", "cpu")
    )
    for step in steps:
        grads = torch.randn(occurrences, dim, generator=generator)
        for table in (reference, cpu):
            table.apply_gradients(ids, grads, step=step, time=step % 7)

        expected, actual = whole(reference), whole(cpu)
        assert actual.ids.tolist() == expected.ids.tolist()
        for mine, theirs in zip(actual.columns(), expected.columns(), strict=True):
            # torch's sqrt is not rounded correctly, and a difference of large numbers may be small.
            largest = theirs.abs().max().item() if theirs.numel() else 0.0
            assert_close(mine, theirs, atol=1e-6 * largest)
        cpu.restore(expected)  # the next step starts from equal rows


@given(
    dim=st.sampled_from([1, 3, 8, 20, 32, 64, 100]),
    bags=st.integers(1, 60),
    weighted=st.booleans(),
    divided=st.booleans(),
    missing=st.sampled_from(["initial", "zeros"]),
    seed=seeds,
)
@fixed_examples(25, 40)
def test_pooled_reads_and_updates_of_ordinary_numbers(
    dim: int, bags: int, weighted: bool, divided: bool, missing: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (bags,), generator=generator)
    offsets = torch.cat([ints(0), lengths.cumsum(0)])
    n = int(offsets[-1])
    ids = torch.randint(-20, 20, (n,), generator=generator)
    fields: dict[str, Tensor] = {}
    if weighted:
        fields["weights"] = torch.randn(n, generator=generator)
    if divided:
        fields["divisor"] = lengths.clamp(min=1).float()
    pooling = summed("t", offsets, dim, **fields)
    grads = torch.randn(bags, dim, generator=generator)
    known = torch.randn(20, dim, generator=generator)
    outputs = []
    for engine in ("reference", "cpu"):
        table = sgd_table(engine, dim, optimizer=SGD(0.1), initializer=Constant(0.7), missing=missing)
        table.assign(torch.arange(20), known)
        outputs.append(table.read(table.find(ids), ids, pooling))
        table.update(table.find(ids), ids, [grads], pooling, step=0)
        outputs.append([table.lookup(torch.arange(-20, 20))])

    assert_same_bits(outputs[2][0], outputs[0][0])
    assert_close(outputs[3][0], outputs[1][0])
