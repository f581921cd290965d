"""Columns: rows of all peers' payloads brought to one rank each, so that ranks share the work.

A download leaves all rows of a peer on one rank. Here each parameter is divided into one range of rows per
rank: the rows that the rank holds if the parameter is sharded, an equal share otherwise. The packed bytes of
all peers for a range travel to its rank, block by block.

    gram    indices travel; common positions are counted, before a weight changes; received ones are spooled
    tiles   codes travel (and indices, if they were not spooled); each rank reduces its rows; a finished tile
            is sent to all ranks if another rank needs rows of it

What a rank holds itself does not travel. One process alone is the case in which nothing travels. Results do
not depend on blocks or ranges, except with exchange="fast".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.distributed.elastic_ranks import ElasticRanks
from megalith.distributed.tensor_parts import Span, TensorPart, shard_spans
from megalith.errors import BudgetError
from megalith.gather.payload import PackedRows
from megalith.gather.payload_schema import ParameterSpec
from megalith.gather.reduce import (
    TablePart,
    Travel,
    block_bytes,
    reduce_rows,
    reduce_table,
    row_bytes,
    table_row_bytes,
)
from megalith.gather.result import GatherResult
from megalith.ops.matrix_chunks import STEP_BYTES, common_positions
from megalith.storage.bodies import FileBody, Ledger, SpoolWriter
from megalith.storage.tensor_files import raw_bytes, tensor_of

RowPart = Literal["indices", "codes"]
_PAIR_BYTES = 32  # one pair of peers in the count of common positions


class Block(NamedTuple):
    """Rows of one parameter, given by its number: those of each rank, by place."""

    number: int
    shares: tuple[Span, ...]


class Columns:
    """The column layout of one result on some ranks."""

    def __init__(
        self,
        result: GatherResult,
        ranks: ElasticRanks,
        *,
        parts: Mapping[str, TensorPart] | None = None,
        spool_directory: Path | None = None,
    ) -> None:
        self.result = result
        budget = result.plan.gather.memory_budget
        self.ledger = Ledger(budget, "the update", freed=budget)  # fetching may have used all of it
        self._ranks = ranks
        self._directory = spool_directory
        if ranks.size == 1:
            result.held(result.uids)
            self._holders = dict.fromkeys(result.uids, 0)
        else:
            self._holders = {uid: ranks.members.index(result.holders[uid]) for uid in result.uids}
        held = [list(self._holders.values()).count(place) for place in range(ranks.size)]
        self._travel = Travel(max(held) * (ranks.size - 1), sum(held) - min(held))
        full_rows = result.plan.overlap.full_rows  # otherwise complete rows carry no information
        self._counted = [full_rows or not spec.full for spec in result.schema.parameters]
        self._sharded = {name for name, part in (parts or {}).items() if part.span is not None}
        self._spool: FileBody | None = None
        self._offsets: dict[tuple[Block, int], int] = {}
        for table in result.schema.tables:
            each = table_row_bytes(table, result.plan.update, len(result.uids))
            if each > budget:
                raise BudgetError(
                    f"the update: one row of table {table.name!r} of {len(result.uids)} peers takes {each} "
                    f"bytes, the budget is {budget}: raise memory_budget"
                )
        self._blocks = [list(self._cut(number)) for number in range(len(result.schema.parameters))]

    def close(self) -> None:
        """Delete the spool."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    # ---- common positions

    def gram(self) -> tuple[Tensor, bool]:
        """Count the positions that each pair of peers has in common. A collective call."""
        # returns: int64 [peers, peers], and whether it is exact.
        config = self.result.plan.overlap
        uids, specs = self.result.uids, self.result.schema.parameters
        if config.sample == 1.0 or len(uids) < 2:
            return self._count(uids, None, spooled=self.result.plan.update.exchange == "exact"), True
        found = self._count(uids, config.sample, spooled=False)
        total = sum(spec.kept for spec, counted in zip(specs, self._counted, strict=True) if counted)
        sampled = int(found[0, 0])
        estimate = torch.round(found.double() * (total / max(1, sampled))).to(torch.int64)
        estimate[range(len(uids)), range(len(uids))] = total
        limit = (config.threshold - config.margin) * sampled
        pairs = [(i, j) for i in range(len(uids)) for j in range(i) if found[i, j] >= limit and sampled]
        suspects = sorted({i for pair in pairs for i in pair})
        if suspects:
            exact = self._count([uids[i] for i in suspects], None, spooled=False)
            for i, j in pairs:
                value = exact[suspects.index(i), suspects.index(j)]
                estimate[i, j] = estimate[j, i] = value
        return estimate, False

    def _count(self, uids: Sequence[int], sample: float | None, *, spooled: bool) -> Tensor:
        place, total = self._ranks.place, torch.zeros(len(uids), len(uids), dtype=torch.int64, device="cpu")
        spool = SpoolWriter(self._directory) if spooled and self._ranks.size > 1 else None
        try:
            for block in (each for blocks in self._blocks for each in blocks):
                counted = self._counted[block.number]
                if spool is None and not counted:
                    continue
                spec, length = self.result.schema.parameters[block.number], _length(block.shares[place])
                with self.ledger.hold(length * self._row_bytes(block.number), "a block of indices"):
                    chosen = None if sample is None else self._sampled(block, sample)
                    got = self._bring("indices", block, uids, chosen)
                    if spool is not None:
                        for uid, rows in got.items():
                            self._offsets[block, uid] = spool.file.tell()
                            spool.write(raw_bytes(rows))
                    if length and counted:
                        mine = (uid for uid in uids if uid not in got)
                        got |= {uid: self._held("indices", uid, block, place, chosen) for uid in mine}
                        total += common_positions([got[uid] for uid in uids], spec.keep, spec.size)
                    del got  # its memory is needed for the next block
            if spool is not None:
                self._spool = spool.finish()
        except BaseException:
            if spool is not None:
                spool.discard()
            raise
        return self._ranks.total("Gram matrix", total)

    def _sampled(self, block: Block, rate: float) -> list[Tensor]:
        """The rows of each share that are sampled, by window, parameter and row alone."""
        chosen = []
        for start, stop in block.shares:
            draws = np.random.PCG64([self.result.plan.window, block.number]).advance(start)
            picked = np.random.Generator(draws).random(stop - start) < rate
            chosen.append(torch.from_numpy(np.flatnonzero(picked)))
        return chosen

    # ---- the update

    def tiles(
        self, uids: Sequence[int], factors: Tensor, device: Callable[[int], torch.device]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Reduce all parameters, piece by piece. A collective call."""
        # factors: float32 [contributors, parameters and tables]; yields: the number of a parameter, the first
        # row, and float32 [rows, size]: rows that this rank needs.
        make = self._fast_tiles if self.result.plan.update.exchange == "fast" else self._exact_tiles
        bins = 4 * len(uids) * max((spec.bins for spec in self.result.schema.parameters), default=0)
        with self.ledger.hold(bins + STEP_BYTES, "values of codes, and the step"):
            for number in range(len(self._blocks)):
                lookups = self._lookups(number, uids, factors[:, number])
                for start, tile in make(number, uids, lookups, device(number)):
                    yield number, start, tile
                    del tile  # its memory is needed for the next one

    def _exact_tiles(
        self, number: int, uids: Sequence[int], lookups: list[Tensor], there: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Each rank reduces its share of the rows, of all peers; then it sends them to who needs them."""
        spec, ranks, config = self.result.schema.parameters[number], self._ranks, self.result.plan.update
        wanted = self._wanted(spec)
        for block in self._blocks[number]:
            mine = block.shares[ranks.place]
            with self.ledger.hold(max(map(_length, block.shares)) * self._row_bytes(number), "a block"):
                rows = self._peer_rows(block, uids, lookups, there)
                tile = reduce_rows(spec, _length(mine), rows, len(uids), config, there)
                del rows  # with the codes that were received
                start, stop = _common(mine, wanted[ranks.place])
                if start < stop:
                    yield start, tile[start - mine[0] : stop - mine[0]]
                for place, share in enumerate(block.shares):
                    spans = [_common(share, span) for other, span in enumerate(wanted) if other != place]
                    spans = [span for span in spans if span[0] < span[1]]
                    if not spans:
                        continue
                    low, high = min(a for a, _ in spans), max(b for _, b in spans)
                    if place == ranks.place:
                        part = slice(low - mine[0], high - mine[0])
                        ranks.from_one("tiles", tile[part].cpu().contiguous(), place)
                        continue
                    got = ranks.from_one("tiles", torch.empty(high - low, spec.size, device="cpu"), place)
                    start, stop = _common((low, high), wanted[ranks.place])
                    if start < stop:
                        yield start, got[start - low : stop - low].to(there)
                    del got
                del tile

    def _fast_tiles(
        self, number: int, uids: Sequence[int], lookups: list[Tensor], there: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Each rank adds the peers that it holds, for all rows; then the sums are added."""
        spec, place = self.result.schema.parameters[number], self._ranks.place
        config, payloads, cpu = self.result.plan.update, self.result.payloads, torch.device("cpu")
        wanted = self._wanted(spec)[place]
        each = row_bytes(spec, config, len(uids), self._travel)
        count = max(1, block_bytes(self.ledger.budget - self._fixed()) // each)
        held = [(payloads[uid], n) for n, uid in enumerate(uids) if self._holders[uid] == place]
        for start in range(0, spec.rows, count):
            span = start, min(start + count, spec.rows)
            with self.ledger.hold(_length(span) * each, "a block"):
                peers = (
                    PackedRows(own.indices(number, *span), lookups[n], own.codes(number, *span))
                    for own, n in held
                )
                total = partial(self._ranks.total, "sums")
                tile = reduce_rows(spec, _length(span), peers, len(uids), config, cpu, total)
                first, last = _common(span, wanted)
                if first < last:
                    yield first, tile[first - start : last - start].to(there)

    def _peer_rows(
        self, block: Block, uids: Sequence[int], lookups: list[Tensor], there: torch.device
    ) -> Iterator[PackedRows]:
        """The rows of this rank's share, which are read peer by peer after the exchange."""
        spec, place, spooled = self.result.schema.parameters[block.number], self._ranks.place, self._spool
        shape = _length(block.shares[place]), spec.index_bytes
        indices = {} if spooled else self._bring("indices", block, uids)
        codes = self._bring("codes", block, uids)

        def read(uid: int) -> tuple[Tensor, Tensor]:
            if self._holders[uid] == place:
                return self._held("indices", uid, block, place), self._held("codes", uid, block, place)
            if spooled is None:
                return indices[uid], codes[uid]
            data = spooled.read(self._offsets[block, uid], prod(shape))
            return tensor_of(data, torch.uint8).view(shape), codes[uid]

        return (
            PackedRows(packed[0].to(there), lookup.to(there), packed[1].to(there))
            for packed, lookup in zip(map(read, uids), lookups, strict=True)
        )

    def _lookups(self, number: int, uids: Sequence[int], factors: Tensor) -> list[Tensor]:
        """The values of codes of all contributors, clipped: float32 [bins] each."""
        bins = self.result.schema.parameters[number].bins
        held = [uid for uid in uids if self._holders[uid] == self._ranks.place]
        own = {uid: self.result.payloads[uid].lookup(number) for uid in held}
        if self._ranks.size > 1:
            sent = b"".join(raw_bytes(own[uid]) for uid in held)
            for place, data in enumerate(self._ranks.exchange("values", sent)):
                theirs = [uid for uid in uids if self._holders[uid] == place]
                numbers = tensor_of(bytearray(data), torch.float32)
                own |= dict(zip(theirs, numbers.view(len(theirs), bins), strict=True))
        return [own[uid] * factor for uid, factor in zip(uids, factors, strict=True)]

    def table_rows(
        self, number: int, uids: Sequence[int], factors: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Reduce the rows of a table. A collective call: all ranks get all rows."""
        # factors: float32 [contributors]; returns: an iterator over ids int64 [n], ascending, and reduced
        # rows float32 [n, dim].
        table, place = self.result.schema.tables[number], self._ranks.place

        def read(part: TablePart, peer: int, start: int, stop: int) -> Tensor:
            ids = part == "ids"
            shape = (stop - start,) if ids else (stop - start, table.dim)
            data = torch.empty(shape, dtype=torch.int64 if ids else torch.float32, device="cpu")
            holder = self._holders[uids[peer]]
            if holder == place:
                payload = self.result.payloads[uids[peer]]
                data.copy_((payload.ids if ids else payload.rows)(number, start, stop))
            return self._ranks.from_one(part, data, holder) if data.numel() else data

        counts = [self.result.accepted[uid].table_rows[number] for uid in uids]
        return reduce_table(table, counts, read, factors, self.result.plan.update, self.ledger)

    # ---- blocks

    def _wanted(self, spec: ParameterSpec) -> list[Span]:
        """The rows that each rank needs, by place."""
        size = self._ranks.size
        if spec.name not in self._sharded:
            return [(0, spec.rows)] * size
        lines, chunks = spec.band
        spans = shard_spans(spec.shape[0], size)
        return [(a // lines * chunks, -(-b // lines) * chunks) if a < b else (0, 0) for a, b in spans]

    def _fixed(self) -> int:
        count = len(self.result.uids)
        bins = max((spec.bins for spec in self.result.schema.parameters), default=0)
        return 4 * count * bins + _PAIR_BYTES * count * count + STEP_BYTES

    def _row_bytes(self, number: int) -> int:
        spec, config = self.result.schema.parameters[number], self.result.plan.update
        return row_bytes(spec, config, len(self.result.uids), self._travel, counted=self._counted[number])

    def _cut(self, number: int) -> Iterator[Block]:
        spec, size = self.result.schema.parameters[number], self._ranks.size
        each, left = self._row_bytes(number), self.ledger.budget - self._fixed()
        if left < each:
            raise BudgetError(
                f"the update: one row of {spec.name!r} of {len(self.result.uids)} peers takes {each} bytes "
                f"on each of {size} ranks, {max(0, left)} are left: raise memory_budget"
            )
        # An eighth is left for what the allocator rounds up.
        count = max(1, block_bytes(left) * 7 // 8 // each)
        if spec.name in self._sharded:
            lines, chunks = spec.band  # a rank has the chunks that begin in its lines
            edges = [-(-start // lines) * chunks for start, _ in shard_spans(spec.shape[0], size)]
            edges.append(spec.rows)
        else:
            edges = [spec.rows * place // size for place in range(size + 1)]
        ranges = list(pairwise(edges))
        for start in range(0, max(map(_length, ranges)), count):
            yield Block(number, tuple((min(a + start, b), min(a + start + count, b)) for a, b in ranges))

    def _held(
        self, what: RowPart, uid: int, block: Block, place: int, chosen: list[Tensor] | None = None
    ) -> Tensor:
        """The packed rows of a rank's share of a peer that this rank holds: uint8 [rows, width]."""
        payload = self.result.payloads[uid]
        read = payload.indices if what == "indices" else payload.codes
        rows = read(block.number, *block.shares[place])
        return rows if chosen is None else rows[chosen[place]]

    def _bring(
        self, what: RowPart, block: Block, uids: Sequence[int], chosen: list[Tensor] | None = None
    ) -> dict[int, Tensor]:
        """The packed rows of this rank's share that other ranks hold, by uid: uint8 [rows, width] each."""
        ranks, place, spec = self._ranks, self._ranks.place, self.result.schema.parameters[block.number]
        if ranks.size == 1:
            return {}
        width = spec.index_bytes if what == "indices" else spec.code_bytes
        counts = [_length(s) for s in block.shares] if chosen is None else [len(rows) for rows in chosen]
        held = [uid for uid in uids if self._holders[uid] == place]
        send = [0 if p == place else len(held) * count * width for p, count in enumerate(counts)]
        flat = torch.empty(sum(send), dtype=torch.uint8, device="cpu")
        at = 0
        for other in range(ranks.size):
            for uid in held if other != place else []:
                rows = self._held(what, uid, block, other, chosen)
                flat[at : at + rows.numel()] = rows.view(-1)
                at += rows.numel()
        senders = [uid for p in range(ranks.size) if p != place for uid in uids if self._holders[uid] == p]
        size = counts[place] * width
        receive = [size * sum(self._holders[uid] == p for uid in senders) for p in range(ranks.size)]
        got = ranks.all_to_all(flat, send, receive, what).view(len(senders), counts[place], width)
        return dict(zip(senders, got, strict=True))


def _length(span: Span) -> int:
    return span[1] - span[0]


def _common(a: Span, b: Span) -> Span:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else (a[0], a[0])
