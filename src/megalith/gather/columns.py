"""Columns: rows of all peers' payloads brought to one rank each, so that the ranks share an update's work.

A download leaves all rows of a peer on one rank. Here each block of rows is cut into a share per rank, and
every peer's packed bytes of a share travel to its rank. Indices travel first: the Gram matrix is known, and
refusals are over, before a weight changes. They are kept in a spool file, and only codes travel after that.
Results depend on no block and no share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from megalith.errors import BudgetError
from megalith.gather.body import FileBody, SpoolWriter
from megalith.gather.budget import lookup_bytes, row_bytes
from megalith.gather.ledger import Ledger
from megalith.gather.merge import GatherResult
from megalith.gather.overlap import block_gram, counted, gram_bytes
from megalith.gather.payload import Payload
from megalith.gather.ranks import Ranks
from megalith.gather.reduce import PeerRows, reduce_rows
from megalith.gather.schema import ParameterSpec
from megalith.gather.sharding import Span

_PAIR_BYTES = 32  # one pair of peers of the Gram matrix: its count, and what adding to it takes


class Block(NamedTuple):
    """Rows of one parameter, and the share of each rank by place."""

    number: int
    shares: tuple[Span, ...]


class Columns:
    """The column layout of one result on these ranks.

    holders: the place of the rank that has each accepted payload. Raises BudgetError, on all ranks alike, if
    not even a row per rank fits into the plan's budget.
    """

    def __init__(
        self,
        result: GatherResult,
        holders: Mapping[int, int],
        ranks: Ranks,
        *,
        spool_directory: Path | None = None,
    ) -> None:
        self.result = result
        self.ledger = Ledger(result.plan.memory_budget, "the update")
        self._ranks = ranks
        self._holders = holders
        self._directory = spool_directory
        self._spool: FileBody | None = None
        self._offsets: list[int] = []
        self._blocks = list(self._cut())

    def close(self) -> None:
        """Deletes the spool."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def exchange_indices(self) -> Tensor:
        """Brings every rank the indices of its shares; the Gram matrix of all peers, int64 [peers, peers]."""
        result, uids = self.result, self.result.uids
        total = torch.zeros(len(uids), len(uids), dtype=torch.int64)
        spool = SpoolWriter(self._directory)
        self._offsets = []
        try:
            for block in self._blocks:
                spec, own = result.schema.parameters[block.number], self._own(block)
                with self.ledger.hold(own * self._row_bytes(spec), "a block of indices"):
                    rows = self._bring(
                        "indices", block, uids, spec.index_bytes, lambda p, n, s: p.indices(n, *s)
                    )
                    self._offsets.append(spool.file.tell())
                    for each in rows:
                        spool.write(each.numpy().data if each.numel() else b"")
                    if own and counted(spec, result.plan.overlap):
                        total += block_gram(spec, rows)
            self._spool = spool.finish()
        except BaseException:
            spool.discard()
            raise
        return self._ranks.total("Gram matrix", total)

    def tiles(
        self,
        uids: Sequence[int],
        factors: Tensor,
        wanted: Sequence[Sequence[Span]],
        device: Callable[[int], torch.device],
    ) -> Iterator[tuple[int, int, Tensor]]:
        """The update by pieces: parameter, first row, and tile float32 [rows, size], of rows wanted here.

        uids: contributors in canonical order. factors: float32 [contributors, parameters and tables]. wanted:
        by place and parameter, the rows that go there. device: where a parameter is reduced.
        """
        places = {uid: number for number, uid in enumerate(self.result.uids)}
        config, place = self.result.plan.update, self._ranks.place
        for block, offset in zip(self._blocks, self._offsets, strict=True):
            number, own = block.number, self._own(block)
            spec = self.result.schema.parameters[number]
            each = own * spec.index_bytes
            lookups = lookup_bytes(self.result.schema, len(self.result.uids))
            with self.ledger.hold(lookups + own * self._row_bytes(spec), "a block"):
                codes = self._bring("codes", block, uids, spec.code_bytes, lambda p, n, s: p.codes(n, *s))
                there = device(number)
                peers = (
                    PeerRows(
                        self._indices(offset + places[uid] * each, own, spec).to(there),
                        packed.to(there),
                        (self._lookup(uid, number) * factor).to(there),
                    )
                    for uid, packed, factor in zip(uids, codes, factors[:, number], strict=True)
                )
                tile = (
                    reduce_rows(spec, own, peers, len(uids), config).cpu()
                    if own
                    else torch.empty(0, spec.size)
                )
                mine = block.shares[place]
                out = [_common(mine, spans[number]) for spans in wanted]
                into = [_common(share, wanted[place][number]) for share in block.shares]
                sent = torch.cat([tile[start - mine[0] : stop - mine[0]] for start, stop in out]).flatten()
                got = self._ranks.all_to_all(
                    "tiles",
                    sent,
                    [spec.size * _length(s) for s in out],
                    [spec.size * _length(s) for s in into],
                ).view(-1, spec.size)
                done = 0
                for span in into:
                    if _length(span):
                        yield number, span[0], got[done : done + _length(span)].to(there)
                        done += _length(span)

    def table_payloads(self, uids: Sequence[int], counts: Mapping[int, Sequence[int]]) -> list[Payload]:
        """Payloads whose tables all ranks read together, each part sent by the rank that has it.

        counts: rows of each table by uid.
        """
        return [cast(Payload, _Shared(self, uid, counts[uid])) for uid in uids]

    def send_part(self, what: str, uid: int, data: Tensor, read: Callable[[Payload], Tensor]) -> Tensor:
        """Fills `data` on all ranks with what the holder reads of a payload."""
        holder = self._holders[uid]
        if holder == self._ranks.place:
            data.copy_(read(self.result.payloads[uid]))
        return self._ranks.from_one(what, data, holder) if data.numel() else data

    # ---- blocks

    def _row_bytes(self, spec: ParameterSpec) -> int:
        """Memory of a row of a rank's own share, on the rank where it is most."""
        count, size, plan = len(self.result.uids), self._ranks.size, self.result.plan
        packed = spec.index_bytes + spec.code_bytes
        most = max((list(self._holders.values()).count(place) for place in range(size)), default=0)
        updating = row_bytes(spec, plan.update, count, size) + max(0, most * size - count) * packed
        counting = (count + most * size) * spec.index_bytes
        if counted(spec, plan.overlap):
            counting += gram_bytes(spec, count)
        return max(updating, counting)

    def _cut(self) -> Iterator[Block]:
        count, size = len(self.result.uids), self._ranks.size
        fixed = lookup_bytes(self.result.schema, count) + _PAIR_BYTES * count * count
        for number, spec in enumerate(self.result.schema.parameters):
            each = self._row_bytes(spec)
            rows = (self.ledger.budget - fixed) // each
            if rows < 1:
                raise BudgetError(
                    f"the update: one row of {spec.name!r} of {count} peers takes {each} bytes on each of "
                    f"{size} ranks, {max(0, self.ledger.budget - fixed)} are left: raise memory_budget"
                )
            for start in range(0, spec.rows, rows * size):
                stop = min(start + rows * size, spec.rows)
                edges = [start + (stop - start) * place // size for place in range(size + 1)]
                yield Block(number, tuple(pairwise(edges)))

    def _own(self, block: Block) -> int:
        return _length(block.shares[self._ranks.place])

    def _bring(
        self,
        what: str,
        block: Block,
        uids: Sequence[int],
        width: int,
        read: Callable[[Payload, int, Span], Tensor],
    ) -> list[Tensor]:
        """The packed rows of this rank's share, by uid: uint8 [rows, width] each."""
        place, own = self._ranks.place, self._own(block)
        held = [uid for uid in uids if self._holders[uid] == place]
        sent = [read(self.result.payloads[u], block.number, s) for s in block.shares for u in held]
        flat = torch.cat([each.flatten() for each in sent]) if sent else torch.empty(0, dtype=torch.uint8)
        order = sorted(range(len(uids)), key=lambda number: self._holders[uids[number]])
        senders = [self._holders[uid] for uid in uids]
        counts = [senders.count(other) * own * width for other in range(self._ranks.size)]
        got = self._ranks.all_to_all(
            what, flat, [len(held) * _length(share) * width for share in block.shares], counts
        ).view(len(uids), own, width)
        by_uid = dict(zip(order, got, strict=True))
        return [by_uid[number] for number in range(len(uids))]

    def _indices(self, offset: int, rows: int, spec: ParameterSpec) -> Tensor:
        assert self._spool is not None
        data = self._spool.read(offset, rows * spec.index_bytes)
        return torch.frombuffer(data, dtype=torch.uint8).view(rows, spec.index_bytes)

    def _lookup(self, uid: int, number: int) -> Tensor:
        parameters = self.result.schema.parameters
        start = sum(spec.bins for spec in parameters[:number])
        return self.result.lookups[uid][start : start + parameters[number].bins]


class _Shared:
    """The tables of a payload that lies on one rank, as all ranks read them: in step."""

    def __init__(self, columns: Columns, uid: int, counts: Sequence[int]) -> None:
        self._columns = columns
        self._uid = uid
        tables = columns.result.schema.tables
        self.header = SimpleNamespace(
            tables=[SimpleNamespace(spec=t, num_rows=n) for t, n in zip(tables, counts, strict=True)]
        )

    def ids(self, number: int, start: int, stop: int) -> Tensor:
        data = torch.empty(stop - start, dtype=torch.int64)
        return self._columns.send_part("ids", self._uid, data, lambda p: p.ids(number, start, stop))

    def rows(self, number: int, start: int, stop: int) -> Tensor:
        data = torch.empty(stop - start, self._columns.result.schema.tables[number].dim)
        return self._columns.send_part("rows", self._uid, data, lambda p: p.rows(number, start, stop))


def _length(span: Span) -> int:
    return max(0, span[1] - span[0])


def _common(a: Span, b: Span) -> Span:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else (a[0], a[0])
