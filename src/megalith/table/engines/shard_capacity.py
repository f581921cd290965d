"""The capacity of a shard: how much it may hold, the check before a write, and eviction by a score function.

`Capacity(max_bytes=...)` limits all bytes that `Table.memory` reports. A table never exceeds it, because
the bytes are divided in advance (`shard_limits`), with the largest size that each part can have:

| part | bytes |
| --- | --- |
| an empty table | `FIXED_BYTES` |
| the logs of evicted and refused ids | 1/128 each, or less: a log never needs more than 8 MiB |
| ids without a row that `MinCount` counts | `COUNTED_BYTES` for each of `max_ids`, at most a quarter |
| rows, with the candidates of a score function | the rest |

Two things are not included, because they do not belong to rows and go away when they are read: the ids
removed since a consumer's last drain (8 bytes each), and copies of rows for an open snapshot
(`buffer_bytes`).

`ScoreSearch` finds rows with low results of a score function. A pass over the table would make a write
wait. So a write that needs places visits a part: 1/40 of the table, or 8 rows for each row that goes. A
part has blocks from all over the table, so it is a sample of all rows, and 40 of them are a pass. The
lowest rows of a pass are kept as candidates for the following writes.

    rows that go                                  when
    the lowest of the last complete pass          while enough of them are left
    the lowest that the pass in progress found    otherwise: in the first pass, or if most candidates changed

A row that was written after it was visited stays (`Engine.open_watch`): its score is another one now. If
rows are moved or the table is cleared, the search starts again. Rows are scored on the device of the
table; candidates are kept on the CPU. The result depends only on the sequence of calls, and is the same
on all engines. Between two calls a search holds at most `SCORED_BYTES` for each row of the table.

Named scores are ranked by the engines themselves: native/table_evict.hpp and reference_policies.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError, TableFullError
from megalith.ops.pooling import Pooling
from megalith.table.config import TableConfig
from megalith.table.engines.torch_step import distinct_ids
from megalith.table.policies import Capacity, MinCount, Score
from megalith.table.table_data import Chunk, Step, concatenated_chunks

if TYPE_CHECKING:
    from megalith.table.engines.contract import Engine


MAX_LOG = 1 << 20
"""Largest number of ids of a log."""
FIXED_BYTES = 8192
"""Bytes of a table without rows: a page for each index."""
INDEX_BYTES = 48
"""Largest number of bytes of the index per row, also while it grows."""
SIDE_BYTES = 18
"""Bytes of id, time, flags and the list of free places per row."""
SCORED_BYTES = 8
"""Largest number of bytes per row of the candidates of a score function (score_search.py)."""
COUNTED_BYTES = 76
"""Largest number of bytes of an id that is counted, its place in the index included."""


class ShardLimits(NamedTuple):
    """The limits of one shard."""

    rows: int | None  # Number of rows; None without a `Capacity`
    log_ids: int  # Number of ids of each log
    counted_ids: int  # Number of ids that `MinCount` counts; 0 without it


def shard_limits(config: TableConfig, num_shards: int) -> ShardLimits:
    """Compute the limits of one shard."""
    capacity = config.capacity
    counted_ids = config.admission.max_ids if isinstance(config.admission, MinCount) else 0
    if capacity is None or capacity.max_bytes is None:
        return ShardLimits(_rows(capacity, num_shards), MAX_LOG, counted_ids)
    room = capacity.max_bytes // num_shards
    log_ids = max(1, min(MAX_LOG, room // 128 // 8))
    if counted_ids:
        counted_ids = max(1, min(counted_ids, room // 4 // COUNTED_BYTES))
    per_row = config.row_bytes + INDEX_BYTES + SIDE_BYTES + (8 if config.counted else 0)
    per_row += SCORED_BYTES if callable(capacity.score) else 0
    fit = (room - FIXED_BYTES - 16 * log_ids - COUNTED_BYTES * counted_ids) // per_row
    if fit < 1:
        # The logs and the counted ids take an id each at least, and 1/64 and a quarter of all bytes at most.
        rest = 47 if counted_ids else 63
        least = num_shards * -(-64 * (FIXED_BYTES + per_row + 16 + COUNTED_BYTES) // rest)
        raise InputError(
            f"table {config.name!r}: Capacity(max_bytes={capacity.max_bytes}) has no room for a row"
            f"{f' on each of {num_shards} shards' if num_shards > 1 else ''}; {least} are enough"
        )
    wanted = _rows(capacity, num_shards)
    return ShardLimits(fit if wanted is None else min(fit, wanted), log_ids, counted_ids)


def _rows(capacity: Capacity | None, num_shards: int) -> int | None:
    return None if capacity is None or capacity.rows is None else max(1, -(-capacity.rows // num_shards))


def check_capacity(
    engine: Engine, ids: Tensor, pooling: Pooling | None, step: Step, occurrences: Tensor | None
) -> None:
    """Raise if the rows of an update cannot fit. An update of several tables asks all of them first."""
    capacity, limit = engine.config.capacity, engine.row_limit
    if capacity is None or limit is None or engine.most_rows + ids.numel() <= limit:
        return
    if capacity.score is not None and ids.numel() <= limit:
        return  # other rows can make room
    if len(engine) + ids.numel() <= limit:
        return
    distinct, seen = distinct_ids(ids, pooling, engine.name, occurrences)
    new = ~engine.has_rows(distinct)
    needed = int((new & engine.admitted(distinct, seen, step.step)).sum())
    needed += len(engine) if capacity.score is None else int(engine.has_rows(torch.unique(ids)).sum())
    if needed > limit:
        raise TableFullError(
            f"table {engine.name!r} holds {len(engine)} rows, and this call needs {needed} in all, but its "
            f"Capacity is {limit} rows; raise it"
        )


def make_room(engine: Engine, ids: Tensor, new: int) -> None:
    """Remove rows with low results of a score function."""
    # ids: int64 [n], the ids of the write that needs room.
    limit = engine.row_limit
    assert limit is not None
    assert engine.score_search is not None
    distinct = torch.unique(ids)
    wanted = int(engine.has_rows(distinct).sum()) + new
    if wanted > limit:
        raise TableFullError(
            f"table {engine.name!r}: a call needs {wanted} rows, but Capacity is {limit} rows; raise it"
        )
    engine.score_search.make_room(len(engine) + new - limit, distinct)


PARTS = 40
"""Number of parts of a pass."""
MIN_PART = 4096
"""A part has at least this number of rows."""
VISITED = 8
"""Number of rows that are visited for each row that goes."""

_BLOCKS = 32  # of a part
_CANDIDATES = 5  # a pass has at most 1/5 of the rows as candidates; the next one removes 1/8
_SHARE = 3 / 16  # of the rows become candidates
_SAMPLE = 4096
_SCORED_ROWS = 1 << 16  # rows of a call of the score function


class ScoreSearch:
    """The search of one table. The lock of the table's writers must be held."""

    def __init__(self, engine: Engine, score: Score, limit: int) -> None:
        self._engine = engine
        self._score = score
        self._limit = limit
        self._moves = engine.moves
        self._ready: _Pass | None = None  # the last complete pass
        self._passing: _Pass | None = None  # the pass in progress

    @property
    def bytes(self) -> int:
        """Bytes of the candidates."""
        return sum(each.bytes for each in (self._ready, self._passing) if each is not None)

    def make_room(self, need: int, kept: Tensor) -> None:
        """Remove rows with low scores; a few more than needed, so that not every write has to."""
        # kept: int64 [n], sorted: ids whose rows stay.
        if self._moves != self._engine.moves:
            self.restart()
        few = self._limit // (PARTS * VISITED)
        part = max(MIN_PART, self._limit // PARTS, VISITED * max(need, few))
        try:
            # The candidates must last for the next pass.
            if (
                self._passing is not None
                or self._ready is None
                or (len(self._ready) <= max(need, few) * -(-self._limit // part))
            ):
                self._visit(part, need, kept)
            gone = self._evict(self._ready, max(need, few), kept)
            begun = 0  # passes since the last row that went
            while gone < need:
                more = self._evict(self._ready, need - gone, kept)
                more += self._evict(self._passing, need - gone - more, kept)
                gone, begun = gone + more, 0 if more else begun
                begun += self._passing is None
                if gone >= need or begun > 1:  # a whole pass found no other row
                    break
                self._visit(part, need, kept)
        except BaseException:
            self.restart()
            raise
        for candidates in (self._ready, self._passing):
            if candidates is not None:
                candidates.keep(max(1, self._limit // _CANDIDATES))

    def _evict(self, candidates: _Pass | None, wanted: int, kept: Tensor) -> int:
        """Remove rows of candidates, at least the wanted number if there are enough. Returns how many."""
        gone = 0
        while candidates is not None and gone < wanted and len(candidates):
            ids = candidates.take(max(wanted - gone, self._limit // (PARTS * VISITED)))
            gone += self._engine.evict(ids[~_contains(kept, ids)], candidates.watch).numel()
        return gone

    def restart(self) -> None:
        """Forget all candidates."""
        for each in (self._ready, self._passing):
            if each is not None:
                self._engine.close_watch(each.watch)
        self._ready = self._passing = None
        self._moves = self._engine.moves

    def _visit(self, rows: int, need: int, kept: Tensor) -> None:
        """Continue the pass, or begin one."""
        if self._passing is None:
            self._passing = _Pass(self._engine, self._limit, need)
        self._passing.visit(self._score, rows, kept)
        if self._passing.complete:
            if self._ready is not None:
                self._engine.close_watch(self._ready.watch)
            self._ready, self._passing = self._passing, None


class _Pass:
    """A pass over a table, and candidates: the rows with the lowest scores so far.

    Candidates are in groups by score, so that neither adding nor taking some of them costs time for all. The
    bounds of the groups come from the first rows that the pass visits, which are a sample of the table.
    """

    def __init__(self, engine: Engine, limit: int, wanted: int) -> None:
        self.watch = engine.open_watch()
        self.complete = False
        self._engine = engine
        self._most = max(1, limit // _CANDIDATES, 2 * wanted)
        self._block = limit if limit <= MIN_PART else max(_BLOCKS, MIN_PART, limit // PARTS) // _BLOCKS
        self._blocks = -(-limit // self._block)
        self._stride = _spreading_stride(self._blocks)
        self._done = 0  # number of blocks
        self._rest = self._blocks * self._block  # rows from here on follow the blocks
        # The part of all rows that become candidates.
        self._share = 1.0 if self._blocks == 1 else min(1.0, max(_SHARE, 1.5 * wanted / limit))
        self._bounds: Tensor | None = None
        self._groups: list[_Candidates] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """Bytes of the candidates, and a bit for each row."""
        return 16 * self._count + self._blocks * self._block // 8

    def visit(self, score: Score, rows: int, kept: Tensor) -> None:
        """Visit the next blocks."""
        # kept: int64 [n], sorted: ids that do not become candidates, since their rows are about to change.
        while rows > 0 and not self.complete:
            chunks, count = [], 0
            while count < min(rows, _SCORED_ROWS) and not self.complete:
                chunks.append(self._next_block())
                count += self._block
            rows -= count
            chunk = chunks[0] if len(chunks) == 1 else concatenated_chunks(chunks)
            if chunk.ids.numel():
                ids, scores = chunk.ids.cpu(), _checked_scores(self._engine.name, score, chunk)
                other = ~_contains(kept, ids)
                self._add(ids[other], scores[other])
                self.keep(self._most)

    def take(self, n: int) -> Tensor:
        """Remove the candidates with the lowest scores; among equals those that were visited first."""
        taken = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for group in self._groups:
            if n > 0 and len(group):
                taken.append(group.take(n))
                n -= taken[-1].numel()
        self._count -= sum(map(len, taken))
        return torch.cat(taken)

    def keep(self, n: int) -> None:
        """Limit the number of candidates: those with the lowest scores stay."""
        self._most = n
        while self._count > n:
            last = self._groups[-1]
            excess = self._count - n
            if excess < len(last):
                last.keep(len(last) - excess)
                self._count = n
            else:
                self._groups.pop()
                self._count -= len(last)

    def _next_block(self) -> Chunk:
        if self._done < self._blocks:
            start = self._done * self._stride % self._blocks * self._block
            self._done += 1
            stop = start + self._block
            chunk, _ = self._engine.scan_on_device(start, self._block, watch=self.watch, stop=stop)
            self.complete = self._done == self._blocks and self._at_end()
            return chunk
        chunk, self._rest = self._engine.scan_on_device(self._rest, self._block, watch=self.watch)
        self.complete = self._rest < 0
        return chunk

    def _at_end(self) -> bool:
        """Whether there is no row after the blocks."""
        return self._engine.scan_part(self._rest, 1, rows=False)[0].ids.numel() == 0

    def _add(self, ids: Tensor, scores: Tensor) -> None:
        if not ids.numel():
            return
        if self._bounds is None:
            self._bounds = _group_bounds(scores[:_SAMPLE], self._share)
            self._groups = [_Candidates() for _ in range(self._bounds.numel())]
        if not self._groups:
            return  # all candidates were taken; the next pass finds others
        low = scores <= self._bounds[len(self._groups) - 1]
        ids, scores = ids[low], scores[low]
        group_of = torch.bucketize(scores, self._bounds)
        order = torch.argsort(group_of, stable=True)
        sizes = torch.bincount(group_of, minlength=len(self._groups)).tolist()
        parts = zip(ids[order].split(sizes), scores[order].split(sizes), strict=True)
        for group, (own, values) in zip(self._groups, parts, strict=True):
            if own.numel():
                group.add(own, values)
        self._count += ids.numel()


class _Candidates:
    """Some rows and their scores, in the order of the visits."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ids: Tensor, scores: Tensor) -> None:
        """Add rows."""
        # ids: int64 [n]; scores: float64 [n].
        self._ids.append(ids)
        self._scores.append(scores)
        self._count += ids.numel()

    def take(self, n: int) -> Tensor:
        ids, scores, low = self._lowest(n)
        self._set(ids[~low], scores[~low])
        return ids[low]

    def keep(self, n: int) -> None:
        ids, scores, low = self._lowest(n)
        self._set(ids[low], scores[low])

    def _set(self, ids: Tensor, scores: Tensor) -> None:
        self._ids, self._scores, self._count = [ids], [scores], ids.numel()

    def _lowest(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return all ids and scores, and which of them are the n lowest."""
        ids, scores = torch.cat(self._ids), torch.cat(self._scores)
        if n >= self._count:
            return ids, scores, torch.ones_like(ids, dtype=torch.bool)
        largest = scores.kthvalue(n).values
        low = scores < largest
        equal = (scores == largest).nonzero()[:, 0]
        low[equal[: n - int(low.sum())]] = True
        return ids, scores, low


def _group_bounds(sample: Tensor, share: float) -> Tensor:
    """Return the largest score of each group. Groups are about as large as the number of rows that go at
    once, and all together have a share of the rows.
    """
    if sample.numel() < _SAMPLE or share >= 1:
        return torch.tensor([math.inf], dtype=torch.float64, device="cpu")
    size = _SAMPLE // (PARTS * VISITED)
    largest = sample.sort().values[size - 1 : max(size, int(share * _SAMPLE)) : size]
    bounds: Tensor = torch.unique(largest)
    return bounds


def _spreading_stride(n: int) -> int:
    """Return a number without a common divisor with n, near its golden section: multiples modulo n then are
    spread evenly, however many there are.
    """
    stride = max(1, round(n * 0.6180339887498949))
    while math.gcd(stride, n) > 1:
        stride += 1
    return stride


def _contains(ordered: Tensor, ids: Tensor) -> Tensor:
    if not ordered.numel():
        return torch.zeros_like(ids, dtype=torch.bool)
    at = torch.searchsorted(ordered, ids).clamp(max=ordered.numel() - 1)
    return ordered[at] == ids


def _checked_scores(table: str, score: Score, chunk: Chunk) -> Tensor:
    scores = score(chunk)
    if not isinstance(scores, Tensor) or scores.shape != chunk.ids.shape:
        raise InputError(
            f"table {table!r}: the score function of Capacity must return a tensor "
            f"[{chunk.ids.numel()}], got {getattr(scores, 'shape', scores)!r}"
        )
    scores = scores.detach().cpu().to(torch.float64)
    if not bool(torch.isfinite(scores).all()):
        raise InputError(f"table {table!r}: the score function of Capacity returned NaN or Inf")
    return scores
