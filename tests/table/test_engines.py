"""The engines compared: random programs of calls leave equal tables, counts and logs.

The programs mix reads, training, admission, eviction, capacity, precision, views, writes, passes in parts,
compaction, snapshots, consumers and restores. Gradients are dyadic, so that no rounding depends on how a
sum is cut: steps of SGD are equal to the bit, and the tolerance covers the other optimizers. Programs with
few ids change each of them often; in those with many, a table of more than 4096 places moves rows to return
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from megalith import (
    FTRL,
    SGD,
    TTL,
    Adagrad,
    Adam,
    BatchSoftmax,
    Capacity,
    Constant,
    FixedPoint,
    MinCount,
    MinNorm,
    Momentum,
    Normal,
    OneBit,
    Probability,
    RowWiseAdagrad,
    Segment,
    Table,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Warmup,
    fid,
)
from megalith.errors import TableFullError
from megalith.ops import Bags, OutputSlice, Pooling
from megalith.table import Admission, Chunk, Eviction
from megalith.table.engines import shard_capacity
from megalith.table.engines.shard_capacity import MIN_PART
from megalith.table.snapshot import Snapshot
from tests.fixed_examples import fixed_examples
from tests.table.support import (
    EXTREME_IDS,
    OPTIMIZERS,
    as_sets,
    assert_close,
    assert_same_bits,
    dyadic,
    ints,
    sgd_table,
    whole,
)
from tests.table.test_custom_optimizer import SignSGD

CONSUMERS = ("publisher", "delta")
DRIFT = 1e-6  # absolute; a program takes up to 40 steps, and the 1e-6 is promised for each of them
SLOT = 7


def smallest_remainder(chunk: Chunk) -> Tensor:
    """A score function: has many ties, so the engines must also agree on the order of rows."""
    return (chunk.ids % 7).double()


SEGMENTS = [
    [Segment(16, optimizer=SGD(0.5), initializer=TruncatedNormal(0.0, 1.0))],
    [
        Segment(1, optimizer=FTRL(0.5, beta=1.0, l1=0.25), initializer=Constant(0.0)),
        Segment(9, optimizer=Adam(0.1), initializer=Normal(0.0, 1.0)),
        Segment(3, optimizer=Adagrad(0.1, initial_accumulator_value=0.1)),
    ],
    [
        Segment(8, optimizer=Momentum(Warmup(0.1, 4), nesterov=True)),
        Segment(5, optimizer=RowWiseAdagrad(0.1, initial_accumulator_value=0.1)),
    ],
    [Segment(3, optimizer=SGD(0.5))],
    [Segment(3, optimizer=Adagrad(0.1, initial_accumulator_value=0.1))],
    [Segment(2, optimizer=Adagrad(0.1, initial_accumulator_value=0.1)), Segment(1, optimizer=SignSGD(0.125))],
    # Steps that are exact in float32, so that both engines round the same numbers.
    [Segment(3, optimizer=SGD(0.5), precision="bfloat16", rounding="stochastic")],
    [
        Segment(2, optimizer=SGD(0.5), precision="float16"),
        Segment(1, optimizer=SignSGD(0.125), precision="bfloat16", rounding="stochastic"),
    ],
    # Gradients that depend on the stored rows.
    [Segment(3, optimizer=SGD(0.5), serving=OneBit(0.5, step_size=3))],
    [Segment(9, optimizer=SGD(0.5), serving=FixedPoint(0.5))],
]


class Span(NamedTuple):
    """Ids start, start + stride, and so on; start and size are fractions of what a machine allows."""

    start: float
    size: float
    stride: int
    repeats: int


spans = st.builds(
    Span,
    st.floats(0, 1, width=16),
    st.floats(0, 1, width=16),
    st.sampled_from([1, 1, 2, 5]),
    st.integers(1, 3),
)
seeds = st.integers(0, 2**32 - 1)
steps = st.integers(0, 20)
delays = st.integers(-2, 6)
admissions: st.SearchStrategy[Admission | None] = st.one_of(
    st.none(),
    st.builds(MinCount, st.integers(1, 4), max_ids=st.sampled_from([3, 10_000])),
    st.builds(Probability, st.sampled_from([0.1, 0.5])),
)


@st.composite
def poolings(draw: st.DrawFn, num_ids: int, dim: int) -> Pooling:
    """Some features of table "t", with gaps between them, into some outputs."""
    rows = draw(st.integers(0, 3))
    widths: list[list[int]] = [[] for _ in range(draw(st.integers(1, 3)))]  # by output, left to right
    features = []
    begin = 0
    for _ in range(draw(st.integers(0, 3))):
        shared = rows > 0 and draw(st.booleans())
        inner = 1 if shared else draw(st.sampled_from([1, 1, 2]))
        count = draw(st.sampled_from([1, rows])) if shared else rows * inner
        cuts = st.lists(st.integers(begin, num_ids), min_size=count + 1, max_size=count + 1)
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
            divisor = 2.0 ** dyadic(draw(seeds), count).round()
        features.append(Bags(ints(*offsets), tuple(parts), weights, divisor, shared=shared))
    spare = draw(st.integers(0, 1))  # columns that no part writes
    outputs = tuple((rows, max(1, spare + sum(w))) for w in widths)
    return Pooling(outputs, {"t": tuple(features)})


class Contents(NamedTuple):
    """A table in the order of its rows."""

    ids: list[int]
    time: list[int]
    counts: list[int]
    steps: list[int]
    columns: list[Tensor]


def contents(table: Table) -> Contents:
    chunk, end = table.engine_impl.scan_part(0, len(table) + 1)
    assert end == -1
    assert chunk.ids.numel() == len(table)
    count, step = ([] if x is None else x.tolist() for x in (chunk.count, chunk.step))
    return Contents(chunk.ids.tolist(), chunk.time.tolist(), count, step, list(chunk.columns()))


class Found(NamedTuple):
    """Rows that each engine found at some moment."""

    ids: Tensor
    rows: tuple[Tensor, Tensor]
    epochs: tuple[int, int]


class Programs(RuleBasedStateMachine):
    """A reference and a cpu table that receive the same calls."""

    ids_in_use: ClassVar[int]
    most_ids: ClassVar[int]
    capacities: ClassVar[tuple[int, int]]
    parts: ClassVar[list[int]]

    @initialize(
        data=st.data(),
        segments=st.sampled_from(SEGMENTS),
        admission=admissions,
        missing=st.sampled_from(["initial", "zeros"]),
    )
    def make(
        self, data: st.DataObject, segments: list[Segment], admission: Admission | None, missing: str
    ) -> None:
        eviction: list[Eviction] = []
        if data.draw(st.booleans()):
            eviction.append(
                TTL(data.draw(st.integers(4, 20)), per_slot={SLOT: data.draw(st.integers(1, 40))})
            )
        if data.draw(st.booleans()):
            eviction.append(MinNorm(0.07))
        if data.draw(st.booleans()):
            score = data.draw(st.sampled_from(["lru", "lfu", "step", smallest_remainder, None]))
            eviction.append(Capacity(data.draw(st.integers(*self.capacities)), score=score))
        # With small parts, a search for low scores takes several calls.
        shard_capacity.MIN_PART = data.draw(st.sampled_from([8, MIN_PART]))
        config = TableConfig("t", segments=segments, admission=admission, eviction=eviction, missing=missing)
        self.tables = (Table(config, engine="reference", seed=3), Table(config, engine="cpu", seed=3))
        self.dim = config.dim
        plain = all(s.precision == "float32" and s.serving is None for s in segments)
        self.exact = plain and all(isinstance(s.optimizer, SGD | SignSGD) for s in segments)
        # A trained weight may differ by a rounding, and its view then by a code.
        self.views, self.trained = any(s.serving is not None for s in segments), False
        self.found = Found(ints(), (ints().int(), ints().int()), (0, 0))
        self.snapshots: tuple[Snapshot, Snapshot] | None = None
        self.snapshot_consumer: str | None = None
        self.expected: Contents | None = None
        self.saved: list[Chunk] = []
        self.now = 100
        self.evicted = self.refused = 0

    def ids(self, span: Span) -> Tensor:
        n = int(span.size * self.most_ids)
        at = (int(span.start * self.ids_in_use) + span.stride * torch.arange(n)) % self.ids_in_use
        at = at.repeat(span.repeats)[: self.most_ids]
        ids = torch.where(at % 3 == 0, fid(SLOT, at), at)
        last = len(EXTREME_IDS) - 1
        return torch.where(at <= last, ints(*EXTREME_IDS)[at.clamp(max=last)], ids)

    def both(self, call: Callable[[Table], Any]) -> list[Any]:
        """Call both tables. They must both succeed, or both raise because they are full."""
        results: list[Any] = []
        for table in self.tables:
            try:
                results.append(call(table))
            except TableFullError:
                results.append("full")
        assert (results[0] == "full") == (results[1] == "full")
        return results

    def same(self, call: Callable[[Table], Tensor]) -> None:
        expected, actual = (x if isinstance(x, str) else x.tolist() for x in self.both(call))
        assert actual == expected

    def compare(self, actual: Tensor, expected: Tensor) -> None:
        if self.exact:
            assert_same_bits(actual, expected)
        else:
            assert_close(actual, expected, atol=DRIFT)

    def train(self, call: Callable[[Table, Tensor | None, int | None], None], epoch: bool = True) -> None:
        """Call both tables with the rows that they found, and the epoch of that moment."""
        self.trained = True
        found = dict(zip(self.tables, zip(self.found.rows, self.found.epochs, strict=True), strict=True))
        self.both(lambda t: call(t, found[t][0], found[t][1] if epoch else None))

    # ---- reading

    @rule(span=spans)
    def lookup(self, span: Span) -> None:
        ids = self.ids(span)
        expected, actual = (t.lookup(ids, stored=True) for t in self.tables)
        self.compare(actual, expected)

    @rule(span=spans)
    def find(self, span: Span) -> None:
        ids = self.ids(span)
        rows = tuple(t.find(ids) for t in self.tables)
        assert (rows[0] >= 0).tolist() == (rows[1] >= 0).tolist()
        self.found = Found(ids, (rows[0], rows[1]), (self.tables[0].epoch, self.tables[1].epoch))

    @rule(data=st.data(), with_epoch=st.booleans(), pooled=st.booleans())
    def read_found(self, data: st.DataObject, with_epoch: bool, pooled: bool) -> None:
        ids, rows, epochs = self.found
        pooling = data.draw(poolings(ids.numel(), self.dim)) if pooled else None
        expected, actual = (
            t.read(own, ids, pooling, epoch=epoch if with_epoch else None)
            for t, own, epoch in zip(self.tables, rows, epochs, strict=True)
        )
        if not (self.views and self.trained):
            for mine, theirs in zip(actual, expected, strict=True):
                self.compare(mine, theirs)

    # ---- training

    @rule(span=spans, seed=seeds, step=steps, delay=delays)
    def apply_gradients(self, span: Span, seed: int, step: int, delay: int) -> None:
        self.now += max(0, delay)
        self.trained = True
        ids = self.ids(span)
        grads = dyadic(seed, ids.numel(), self.dim)
        self.both(lambda t: t.apply_gradients(ids, grads, step=step, time=self.now + min(0, delay)))

    @rule(
        seed=seeds,
        step=steps,
        with_epoch=st.booleans(),
        scale=st.sampled_from([1.0, 0.5, -2.0, 0.0]),
        clip_norm=st.sampled_from([None, 0.5, 100.0]),
    )
    def update_found(
        self, seed: int, step: int, with_epoch: bool, scale: float, clip_norm: float | None
    ) -> None:
        self.exact = self.exact and clip_norm is None
        ids = self.found.ids
        grads = dyadic(seed, ids.numel(), self.dim)

        def update(table: Table, rows: Tensor | None, epoch: int | None) -> None:
            options: dict[str, Any] = {"step": step, "time": self.now, "epoch": epoch}
            table.update(rows, ids, grads, scale=scale, clip_norm=clip_norm, **options)

        self.train(update, with_epoch)

    @rule(data=st.data(), seed=seeds, step=steps, with_rows=st.booleans())
    def update_pooled(self, data: st.DataObject, seed: int, step: int, with_rows: bool) -> None:
        ids = self.found.ids
        pooling = data.draw(poolings(ids.numel(), self.dim))
        grads = [dyadic(seed + k, *shape) for k, shape in enumerate(pooling.outputs)]

        def update(table: Table, rows: Tensor | None, epoch: int | None) -> None:
            known: dict[str, Any] = {"epoch": epoch} if with_rows else {}
            table.update(rows if with_rows else None, ids, grads, pooling, step=step, time=self.now, **known)

        self.train(update)

    @rule(span=spans, seed=seeds, step=steps)
    def update_with_occurrences(self, span: Span, seed: int, step: int) -> None:
        ids = self.ids(span)
        self.trained = True
        grads = dyadic(seed, ids.numel(), self.dim)
        occurrences = torch.randint(1, 4, ids.shape, generator=torch.Generator().manual_seed(seed))

        def update(table: Table) -> None:
            numbers = table.checks.step(step, self.now, 1.0, None)
            table.engine_impl.update(ids, None, [grads], None, numbers, occurrences)

        self.both(update)

    @rule(span=spans, removed=spans, created=spans, with_epoch=st.booleans(), seed=seeds)
    def train_on_rows_that_moved(
        self, span: Span, removed: Span, created: Span, with_epoch: bool, seed: int
    ) -> None:
        self.find(span)
        self.remove(removed)
        self.assign(created, seed, delay=1, add=False)
        self.update_found(seed, step=1, with_epoch=with_epoch, scale=1.0, clip_norm=None)

    # ---- writing and removing

    @rule(span=spans, seed=seeds, delay=delays, add=st.booleans())
    def assign(self, span: Span, seed: int, delay: int, add: bool) -> None:
        ids = self.ids(span)
        rows = dyadic(seed, ids.numel(), self.dim) * 0.3
        call = Table.assign_add if add else Table.assign
        self.both(lambda t: call(t, ids, rows, time=self.now + delay))

    @rule(span=spans)
    def reinitialize(self, span: Span) -> None:
        ids = self.ids(span)
        self.same(lambda t: t.reinitialize(ids, time=self.now))

    @rule(source=st.sampled_from([0, 1]), chunk_size=st.sampled_from([3, 5000]))
    def save(self, source: int, chunk_size: int) -> None:
        self.saved = list(self.tables[source].scan(chunk_size))

    @rule(skip=st.integers(1, 3), count=st.sampled_from([None, 0, 1, 2**32 - 1]))
    def restore(self, skip: int, count: int | None) -> None:
        for chunk in self.saved[::skip]:
            if count is not None and chunk.count is not None:
                chunk = replace(chunk, count=torch.full_like(chunk.ids, count))
            self.both(partial(Table.restore, chunk=chunk))

    @rule(span=spans)
    def remove(self, span: Span) -> None:
        ids = self.ids(span)
        expected, actual = self.both(lambda t: t.remove(ids))
        assert actual == expected

    @precondition(lambda self: self.snapshots is None)
    @rule()
    def clear(self) -> None:
        self.both(Table.clear)

    @rule(n=st.integers(0, 200))
    def reserve(self, n: int) -> None:
        self.both(lambda t: t.reserve(n))

    # ---- policies

    @rule(delay=delays)
    def evict(self, delay: int) -> None:
        self.same(lambda t: t.evict(self.now + delay))

    @rule(data=st.data(), delay=delays)
    def evict_part(self, data: st.DataObject, delay: int) -> None:
        rows = data.draw(st.sampled_from(self.parts))
        self.same(lambda t: t.evict_part(self.now + delay, rows=rows))

    @rule(span=spans, seed=seeds)
    def restore_pending(self, span: Span, seed: int) -> None:
        ids = self.ids(span)
        counts = torch.randint(1, 4, ids.shape, generator=torch.Generator().manual_seed(seed))
        self.both(lambda t: t.restore_pending(ids, counts))

    # ---- touched rows and snapshots

    @rule(consumer=st.sampled_from(CONSUMERS))
    def track(self, consumer: str) -> None:
        self.both(lambda t: t.track(consumer))

    @rule(consumer=st.sampled_from(CONSUMERS))
    def untrack(self, consumer: str) -> None:
        if len(self.tables[0].stats().consumers) == 2 and consumer != self.snapshot_consumer:
            self.both(lambda t: t.untrack(consumer))

    @precondition(lambda self: self.tables[0].stats().consumers)
    @rule(data=st.data(), span=spans)
    def mark(self, data: st.DataObject, span: Span) -> None:
        consumer, ids = data.draw(st.sampled_from(sorted(self.tables[0].stats().consumers))), self.ids(span)
        self.both(lambda t: t.mark_touched(consumer, ids))

    @precondition(lambda self: self.tables[0].stats().consumers)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(sorted(self.tables[0].stats().consumers)))
        if consumer == self.snapshot_consumer:
            return  # a row that another id took may be marked once too often when the snapshot is given back
        expected, actual = (as_sets(t.drain_touched(consumer)) for t in self.tables)
        assert actual == expected

    @precondition(lambda self: self.snapshots is None)
    @rule(data=st.data(), touched_only=st.booleans())
    def open_snapshot(self, data: st.DataObject, touched_only: bool) -> None:
        known = sorted(self.tables[0].stats().consumers)
        consumer = data.draw(st.sampled_from([None, *known]))
        touched_only = touched_only and consumer is not None
        if not touched_only:
            self.expected = contents(self.tables[0])
        reference, native = (t.snapshot(consumer=consumer, touched_only=touched_only) for t in self.tables)
        assert (native.rows, native.live) == (reference.rows, reference.live)
        assert set(native.removed.tolist()) == set(reference.removed.tolist())
        self.snapshots, self.snapshot_consumer = (reference, native), consumer

    @precondition(lambda self: self.snapshots is not None)
    @rule(read=st.booleans(), give_back=st.booleans())
    def close_snapshot(self, read: bool, give_back: bool) -> None:
        assert self.snapshots is not None
        if read:
            reference, native = (self._all_rows(snapshot) for snapshot in self.snapshots)
            assert native.keys() == reference.keys()
            for id, (marks, values) in native.items():
                assert marks == reference[id][0]
                assert_close(values, reference[id][1], atol=DRIFT)
            if self.expected is not None:
                assert sorted(native) == sorted(self.expected.ids)
        for snapshot in self.snapshots:
            snapshot.close(give_back=give_back)
        self.snapshots = self.snapshot_consumer = self.expected = None

    @staticmethod
    def _all_rows(snapshot: Snapshot) -> dict[int, tuple[tuple[int, ...], Tensor]]:
        rows = {}
        for chunk in snapshot.chunks(1000):
            values = torch.cat(list(chunk.columns()), dim=1)
            marks = [x.tolist() for x in (chunk.time, chunk.count, chunk.step) if x is not None]
            for at, id in enumerate(chunk.ids.tolist()):
                assert id not in rows
                rows[id] = (tuple(column[at] for column in marks), values[at])
        return rows

    # ---- after every call

    @invariant()
    def tables_are_equal(self) -> None:
        reference, native = self.tables
        expected, actual = contents(reference), contents(native)
        assert actual[:4] == expected[:4]
        assert native.epoch == reference.epoch
        assert native.stats().consumers == reference.stats().consumers
        for mine, theirs in zip(actual.columns, expected.columns, strict=True):
            self.compare(mine, theirs)
        known = set(expected.ids)
        assert [id in native for id in EXTREME_IDS] == [id in known for id in EXTREME_IDS]
        some = torch.tensor(expected.ids[:5], dtype=torch.int64)
        assert_same_bits(native.lookup(some, stored=True), actual.columns[0][:5])

    @invariant()
    def every_id_is_accounted_for(self) -> None:
        reference, native = self.tables
        counters = native.stats().counters
        assert counters == reference.stats().counters
        assert counters.created - counters.removed - counters.evicted == len(native)
        for mine, theirs in zip(native.pending(), reference.pending(), strict=True):
            assert mine.tolist() == theirs.tolist()
        evicted, refused = native.drain_evicted().tolist(), native.drain_refused().tolist()
        assert evicted == reference.drain_evicted().tolist()
        assert refused == reference.drain_refused().tolist()
        self.evicted += len(evicted)
        self.refused += len(refused)
        assert (counters.evicted, counters.refused) == (self.evicted, self.refused)

    @invariant()
    def no_table_exceeds_its_capacity(self) -> None:
        limit = self.tables[0].engine_impl.row_limit
        assert limit is None or len(self.tables[1]) <= limit

    def teardown(self) -> None:
        shard_capacity.MIN_PART = MIN_PART
        for snapshot in getattr(self, "snapshots", None) or ():
            snapshot.close()


class SmallPrograms(Programs):
    ids_in_use, most_ids, capacities = 60, 25, (25, 50)
    parts: ClassVar[list[int]] = [1, 7, 100]


class LargePrograms(Programs):
    """Parts are large enough for the index, which grows in steps of its own, to finish within one."""

    ids_in_use, most_ids, capacities = 12_000, 6_000, (6_000, 9_000)
    parts: ClassVar[list[int]] = [3_000, 5_000, 20_000]


SmallPrograms.TestCase.settings = fixed_examples(50, 150, stateful_step_count=40)
TestSmallPrograms = SmallPrograms.TestCase
LargePrograms.TestCase.settings = fixed_examples(2, 8, stateful_step_count=15)
TestLargePrograms = LargePrograms.TestCase


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
