"""The engines compared under policies: random programs of calls leave equal tables, counts and logs.

The programs mix admission, eviction, capacity, precision, writes, passes in parts, compaction, snapshots,
touched rows and time. `SmallPrograms` makes many calls on few ids, `LargePrograms` few calls on thousands of
ids, because only a table of more than 4096 places moves rows to return memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from megalith import (
    SGD,
    TTL,
    Adagrad,
    Capacity,
    MinCount,
    MinNorm,
    OneBit,
    Probability,
    Segment,
    Table,
    TableConfig,
    fid,
)
from megalith.errors import TableFullError
from megalith.table import Admission, Chunk, Eviction, Optimizer
from megalith.table.engines import shard_capacity
from megalith.table.engines.shard_capacity import MIN_PART
from megalith.table.snapshot import Snapshot
from tests.fixed_examples import fixed_examples
from tests.table.support import as_sets, assert_close, assert_same_bits, dyadic, ints, summed

CONSUMERS = ("publisher", "delta")
DRIFT = 1e-6
SLOT = 7


class SignSGD(Optimizer):
    """An optimizer in torch, which the cpu engine runs outside of the native table."""

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows -= lr * grads.sign()


def smallest_remainder(chunk: Chunk) -> Tensor:
    """A score function: has many ties, so the engines must also agree on the order of rows."""
    return (chunk.ids % 7).double()


SEGMENTS = [
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


class PolicyPrograms(RuleBasedStateMachine):
    """A reference and a cpu table that receive the same calls."""

    ids_in_use: ClassVar[int]
    most_ids: ClassVar[int]
    capacities: ClassVar[tuple[int, int]]
    parts: ClassVar[list[int]]

    @initialize(data=st.data(), segments=st.sampled_from(SEGMENTS), admission=admissions)
    def make(self, data: st.DataObject, segments: list[Segment], admission: Admission | None) -> None:
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
        config = TableConfig("t", segments=segments, admission=admission, eviction=eviction)
        self.tables = (Table(config, engine="reference", seed=3), Table(config, engine="cpu", seed=3))
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
        return torch.where(at % 3 == 0, fid(SLOT, at), at)

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

    # ---- training

    @rule(span=spans, seed=seeds, step=steps, delay=delays)
    def apply_gradients(self, span: Span, seed: int, step: int, delay: int) -> None:
        self.now += max(0, delay)
        ids = self.ids(span)
        grads = dyadic(seed, ids.numel(), 3)
        self.both(lambda t: t.apply_gradients(ids, grads, step=step, time=self.now + min(0, delay)))

    @rule(span=spans, seed=seeds, step=steps, bag=st.integers(1, 5), skipped=st.integers(0, 2))
    def update_pooled(self, span: Span, seed: int, step: int, bag: int, skipped: int) -> None:
        ids = self.ids(span)
        first = min(skipped, ids.numel())  # occurrences that are in no bag
        offsets = torch.cat([torch.arange(first, ids.numel(), bag), ints(ids.numel())])
        pooling = summed("t", offsets, 3)
        grads = [dyadic(seed, *shape) for shape in pooling.outputs]

        def update(table: Table) -> None:
            epoch = table.epoch
            table.update(table.find(ids), ids, grads, pooling, step=step, time=self.now, epoch=epoch)

        self.both(update)

    @rule(span=spans, seed=seeds, step=steps)
    def update_with_occurrences(self, span: Span, seed: int, step: int) -> None:
        ids = self.ids(span)
        grads = dyadic(seed, ids.numel(), 3)
        occurrences = torch.randint(1, 4, ids.shape, generator=torch.Generator().manual_seed(seed))

        def update(table: Table) -> None:
            numbers = table.checks.step(step, self.now, 1.0, None)
            table.engine_impl.update(ids, None, [grads], None, numbers, occurrences)

        self.both(update)

    # ---- writing and removing

    @rule(span=spans, seed=seeds, delay=delays, add=st.booleans())
    def assign(self, span: Span, seed: int, delay: int, add: bool) -> None:
        ids = self.ids(span)
        rows = dyadic(seed, ids.numel(), 3) * 0.3
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
                chunk = Chunk(
                    chunk.ids,
                    chunk.rows,
                    chunk.state,
                    chunk.time,
                    torch.full_like(chunk.ids, count),
                    chunk.step,
                )
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
        for mine, theirs in zip(actual.columns, expected.columns, strict=True):
            assert_close(mine, theirs, atol=DRIFT)
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


class SmallPrograms(PolicyPrograms):
    ids_in_use, most_ids, capacities = 60, 25, (25, 50)
    parts: ClassVar[list[int]] = [1, 7, 100]


class LargePrograms(PolicyPrograms):
    """Parts are large enough for the index, which grows in steps of its own, to finish within one."""

    ids_in_use, most_ids, capacities = 12_000, 6_000, (6_000, 9_000)
    parts: ClassVar[list[int]] = [3_000, 5_000, 20_000]


SmallPrograms.TestCase.settings = fixed_examples(25, 80, stateful_step_count=40)
TestSmallPrograms = SmallPrograms.TestCase
LargePrograms.TestCase.settings = fixed_examples(2, 8, stateful_step_count=15)
TestLargePrograms = LargePrograms.TestCase
