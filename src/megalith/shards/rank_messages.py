"""RankMessages: the messages between the ranks of SyncShards, and what each rank does with its rows.

`RankMessages` runs in the thread of the exchange. A call is a sequence of all-to-all exchanges; numbers are
little-endian int64 unless stated, and each part is padded to 8 bytes:

    exchange     part for each rank
    sizes        call, sequence number, flags (1 failed, 2 out of data, 4 left), time, number of ids per table
    ids          the distinct ids by table
    rows         the rows of the requested ids by table, in the precision of the wire
    gradients    a `GradientMessage`, see below

    call                     exchanges
    lookup                   sizes, ids; rows when they are fetched; gradients in apply_gradients
    apply_gradients (ids)    sizes, ids, gradients
    assign, assign_add       sizes, ids, rows (float32, from the asking rank to the owner)
    reinitialize             sizes, ids, then an int32 status per id
    remove                   sizes, ids

Sizes and gradients begin with a header, so all ranks know of an error on one rank before anything is
written. Exchanges that a `LookupSeries` leaves out are not made on any rank.

The message of gradients from one rank to another is a header, one bit per id, and the values:

    part       content
    header     sequence number, flags (1 failed, 4 left), step, time, scale, clip_norm: int64, the last two
               the bits of float64
    bits       one per requested id (1: it has a gradient), padded to 8 bytes
    values     the gradients by table, in the precision of the wire, padded to 8 bytes
    counts     int32 per requested id: its occurrences, padded to 8 bytes; only if a table has an admission
               policy

A rank that fails the update sends a header and zeros, as the other ranks expect data of a known size.
"""

from __future__ import annotations

import struct
import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from megalith.distributed.exchange import Exchange
from megalith.errors import InputError, RankFailedError, UsageError
from megalith.library import native_module
from megalith.shards.contract import EXCHANGES, Recorder
from megalith.shards.gradients import Gradients
from megalith.shards.local import LocalShards, OwnerRows
from megalith.shards.lookup import LookupSeries
from megalith.shards.preparer import RoutedIds, blocks_by_table
from megalith.shards.row_encoding import Wire, make_wire
from megalith.table.table_data import FoundRows, Update


def begins_of(sizes: Sequence[int]) -> list[int]:
    """Compute where consecutive pieces begin."""
    return list(accumulate(sizes, initial=0))[:-1]


def join_blocks(data: Tensor, begins: Sequence[int], counts: Tensor, widths: Tensor, out: Tensor) -> None:
    """Copy blocks that are stored by rank, then table, in the order by table, then rank."""
    # counts: int64 [ranks, tables], the number of items of each block; widths: int64 [tables], the bytes of
    # an item.
    native = native_module()
    if native is not None and data.is_cpu:
        native.join_blocks(data, begins, counts, widths, out)
        return
    sizes = (counts * widths).tolist()
    blocks = [
        data[at:].split_with_sizes([*own, data.numel() - at - sum(own)])
        for at, own in zip(begins, sizes, strict=True)
    ]
    pieces = [blocks[rank][table] for table in range(len(widths)) for rank in range(len(sizes))]
    if pieces:
        torch.cat(pieces, out=out)


NO_TIME = -1
"""Stands for no time in a header."""
_HEAD_WORDS = 6
_HEAD_BYTES = 8 * _HEAD_WORDS


class GradientMessage:
    """Encodes and decodes messages.

    In all methods `counts` is the number of ids, int64 [ranks, tables].
    """

    def __init__(
        self,
        wire: Wire,
        dims: Sequence[int],
        *,
        with_counts: bool = False,
        new_buffer: Callable[[int], Tensor],
    ) -> None:
        self._with_counts = with_counts
        self._wire = wire
        self._dims = dims
        self._row_bytes = torch.tensor([wire.row_bytes(dim) for dim in dims], dtype=torch.int64, device="cpu")
        self._new_buffer = new_buffer
        self._device = new_buffer(0).device

    def sizes(self, counts: Tensor) -> list[int]:
        """Return the size of the message for each rank."""
        values = self._wire.sizes(counts, self._dims)
        ids = counts.sum(1).tolist()
        extra = [-(-n // 2) * 8 if self._with_counts else 0 for n in ids]
        bits = [-(-n // 64) * 8 for n in ids]
        return [_HEAD_BYTES + b + -(-v // 8) * 8 + e for b, v, e in zip(bits, values, extra, strict=True)]

    def encode(
        self, words: list[int], gradients: Gradients | None, counts: Tensor, sizes: list[int]
    ) -> Tensor:
        """Encode one message per rank, of the gradients of all tables."""
        # words: the header; returns: uint8 [sum of sizes].
        head = torch.tensor(words, device=self._device)
        if gradients is None:
            heads = [torch.nn.functional.pad(head, (0, size // 8 - _HEAD_WORDS)) for size in sizes]
            return torch.cat(heads).view(torch.uint8)
        ids = counts.sum(1).tolist()
        values = self._wire.encode(gradients.values, counts, self._dims)
        parts = values.split_with_sizes(self._wire.sizes(counts, self._dims))
        masks: Sequence[Tensor | None] = [None] * len(ids)
        if gradients.mask is not None:
            masks = gradients.mask.split_with_sizes(ids)
        seen: Sequence[Tensor | None] = [None] * len(ids)
        if gradients.counts is not None:
            seen = gradients.counts.split_with_sizes(ids)
        pieces: list[Tensor] = []
        for n, mask, part, count in zip(ids, masks, parts, seen, strict=True):
            filler = torch.zeros(-part.numel() % 8, dtype=torch.uint8, device=self._device)
            pieces += [head.view(torch.uint8), _bits(n, mask, self._device), part, filler]
            if self._with_counts:
                ones = torch.ones(n, dtype=torch.int32, device=self._device)
                own = ones if count is None else count.to(torch.int32)
                pieces.append(torch.nn.functional.pad(own, (0, n % 2)).view(torch.uint8))
        return torch.cat(pieces, out=self._new_buffer(sum(sizes)))

    def decode(
        self, data: Tensor, ids_of: Sequence[Tensor], counts: Tensor, sizes: list[int]
    ) -> list[Gradients]:
        """Decode the messages of all ranks: the gradients of each table, in the order of the ranks."""
        # data: uint8 [sum of sizes], the messages in the order of the ranks; ids_of: int64 [n] of each table.
        ids = counts.sum(1).tolist()
        totals = counts.sum(0).tolist()
        begins = begins_of(sizes)
        values_at = [at + _HEAD_BYTES + -(-n // 64) * 8 for at, n in zip(begins, ids, strict=True)]
        joined = self._new_buffer(sum(map(mul, totals, self._row_bytes.tolist())))
        join_blocks(data, values_at, counts, self._row_bytes, joined)
        # The wires of gradients encode each number by itself, so they can be decoded in another order.
        flat = self._wire.decode(joined, counts, self._dims)
        floats = flat.split_with_sizes([n * dim for n, dim in zip(totals, self._dims, strict=True)])
        values = [own.view(-1, dim) for own, dim in zip(floats, self._dims, strict=True)]
        bits = [data[at + _HEAD_BYTES : end] for at, end in zip(begins, values_at, strict=True)]
        masks: Sequence[Tensor | None] = [None] * len(self._dims)
        if not all(bool((own == 255).all()) for own in bits):
            each = [_unpack_bits(own, n).view(torch.uint8) for own, n in zip(bits, ids, strict=True)]
            masks = [own.view(torch.bool) for own in self._by_table(torch.cat(each), begins_of(ids), counts)]
        seen: Sequence[Tensor | None] = [None] * len(self._dims)
        if self._with_counts:
            values_of = self._wire.sizes(counts, self._dims)
            at = [begin + -(-size // 8) * 8 for begin, size in zip(values_at, values_of, strict=True)]
            words = self._by_table(data, at, counts, 4)
            seen = [own.view(torch.int32).to(torch.int64) for own in words]
        return [Gradients(*own) for own in zip(ids_of, values, seen, masks, strict=True)]

    def _by_table(self, data: Tensor, begins: list[int], counts: Tensor, width: int = 1) -> Sequence[Tensor]:
        """Return the items of each table, of `width` bytes each, as bytes."""
        out = torch.empty(int(counts.sum()) * width, dtype=torch.uint8, device=data.device)
        join_blocks(data, begins, counts, torch.full_like(counts[0], width), out)
        return out.split_with_sizes([n * width for n in counts.sum(0).tolist()])


def push_head(number: int, flags: int, update: Update | None) -> list[int]:
    """Return the words of a header."""
    if update is None:
        return [number, flags, 0, NO_TIME, 0, 0]
    seconds = NO_TIME if update.time is None else int(update.time)
    bits = struct.unpack("=2q", struct.pack("=2d", update.scale, update.clip_norm))
    return [number, flags, update.step, seconds, *bits]


def latest_time(times: Sequence[int]) -> int | None:
    """Return the latest time of all ranks."""
    latest = max(times)
    return None if latest == NO_TIME else latest


def _bits(n: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return one bit per id, padded to 8 bytes: those in the mask, or all."""
    if mask is None:
        return torch.full((-(-n // 64) * 8,), 255, dtype=torch.uint8, device=device)
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 64)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=device)).sum(1).to(torch.uint8)


def _unpack_bits(bits: Tensor, n: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> places) & 1).view(-1)[:n].bool()


CALLS = ("lookup", "apply_gradients", "assign", "assign_add", "reinitialize", "remove")
_FAILED, _OUT_OF_DATA, _LEFT = 1, 2, 4
_HEAD = 4  # call, number, flags, time


@dataclass
class RequestedIds:
    """The ids that all ranks request from this one, by rank, then table."""

    number: int  # The sequence number of the call
    counts: Tensor  # int64 [ranks, tables], the number of ids
    out_of_data: list[int]  # The ranks that have no more data
    time: int | None  # The latest time of all ranks, for what is written; None if no rank passes one
    ids: dict[str, Tensor]  # int64 [n] per table, the ids of all ranks concatenated in rank order
    series: LookupSeries | None
    # Row numbers and epoch per table, after rows were read
    found: dict[str, FoundRows] = field(default_factory=dict)


class RankMessages:
    """The exchanges of one SyncShards."""

    def __init__(self, exchange: Exchange, shards: LocalShards, wire: tuple[str, str]) -> None:
        self._exchange = exchange
        self._engines = shards.engines
        self._rows = OwnerRows(shards)
        self._tables = tables = shards.local
        self._names = list(tables)
        self._dims = [table.dim for table in tables.values()]
        self._widths = torch.tensor(self._dims, dtype=torch.int64, device="cpu")
        self._rows_wire, self._grads_wire = make_wire(wire[0]), make_wire(wire[1])
        counting = any(table.config.admission is not None for table in tables.values())
        self._gradients = GradientMessage(
            self._grads_wire, self._dims, with_counts=counting, new_buffer=exchange.new_buffer
        )
        self._id_bytes = torch.full_like(self._widths, 8)
        self._named = ", ".join(self._names[:8]) + (", ..." if len(self._names) > 8 else "")  # for errors
        self._calls = 0
        self._recorder: Recorder | None = None

    def add_recorder(self, recorder: Recorder) -> None:
        """Start to report exchanges to a recorder."""
        if not isinstance(recorder, Recorder):
            raise InputError(f"recorder must be a Recorder, got {type(recorder).__name__}")
        if self._recorder is not None:
            raise UsageError("these shards already have a recorder, such as a CommMetrics: close() it first")
        self._recorder = recorder

    def remove_recorder(self, recorder: Recorder) -> None:
        """Stop reporting to a recorder, if it is the one that was added."""
        if self._recorder is recorder:
            self._recorder = None

    def _send(
        self,
        data: Tensor,
        send: list[int],
        receive: list[int],
        call: str,
        exchange: str,
        number: int = 0,
        detail: str = "",
    ) -> Tensor:
        """Send a part of a tensor to each rank; return the parts received as bytes. Sizes are in bytes."""
        what = (
            f"SyncShards.{call} (call {number or self._calls}), exchange of {exchange}{detail} "
            f"(tables {self._named})"
        )
        got = self._exchange.all_to_all(data.contiguous().view(-1).view(torch.uint8), send, receive, what)
        if self._recorder is not None and exchange in EXCHANGES:
            self._recorder.waited(exchange, self._exchange.waited)
        return got

    # ---- sizes and ids

    def request(
        self,
        call: str,
        routed: RoutedIds | None,
        error: Exception | None = None,
        *,
        out_of_data: bool = False,
        time: float | None = None,
        series: LookupSeries | None = None,
        leave: bool = False,
    ) -> RequestedIds:
        """Exchange sizes, then ids."""
        flags = (_FAILED if error is not None else 0) | (_OUT_OF_DATA if out_of_data else 0)
        flags |= _LEFT if leave else 0
        if series is None:
            return self._request(call, routed, error, flags, time, None)
        series.check_lookup()
        try:
            return self._request(call, routed, error, flags, time, series)
        except Exception as raised:
            series.fail_lookups(raised)
            raise

    def _request(
        self,
        call: str,
        routed: RoutedIds | None,
        error: Exception | None,
        flags: int,
        time: float | None,
        series: LookupSeries | None,
    ) -> RequestedIds:
        size, tables = self._exchange.size, len(self._names)
        self._calls += 1
        seconds = NO_TIME if time is None else int(time)
        words = torch.tensor([CALLS.index(call), self._calls, flags, seconds], device="cpu")
        sent = (
            torch.zeros(size, tables, dtype=torch.int64, device="cpu")
            if routed is None
            else routed.deduped.counts
        )
        head = torch.cat([words.expand(size, _HEAD), sent], 1)
        width = [head.shape[1] * 8] * size
        heads = self._send(head, width, width, call, "sizes").view(torch.int64).view(size, -1)
        kinds, numbers, all_flags, times = heads[:, :_HEAD].t().tolist()
        self._check_heads(kinds, numbers, all_flags, call, error, series)
        if error is not None:
            raise error
        assert routed is not None
        counts = heads[:, _HEAD:].contiguous()
        sizes = (sent.sum(1) * 8).tolist(), (counts.sum(1) * 8).tolist()
        ids = self._send(routed.deduped.ids, *sizes, call, "ids").view(torch.int64)
        if size > 1:  # from the order of the ranks to that of the tables
            data, ids = ids.view(torch.uint8), torch.empty_like(ids)
            join_blocks(data, begins_of(sizes[1]), counts, self._id_bytes, ids.view(torch.uint8))
        by_table = dict(zip(self._names, ids.split_with_sizes(counts.sum(0).tolist()), strict=True))
        if self._recorder is not None:
            occurrences = {name: own.numel() for name, own in routed.ids.items()}
            self._recorder.requested(call, occurrences, routed.deduped.counts, counts)
            self._recorder.sent("ids", routed.deduped.counts, counts, [8] * tables)
        done = [rank for rank, flags in enumerate(all_flags) if flags & _OUT_OF_DATA]
        return RequestedIds(self._calls, counts, done, latest_time(times), by_table, series)

    def _check_heads(
        self,
        kinds: list[int],
        numbers: list[int],
        flags: list[int],
        call: str,
        error: Exception | None,
        series: LookupSeries | None,
    ) -> None:
        if any(flag & _FAILED for flag in flags):
            self._fail(flags, call, error, series)
        for rank, (kind, number) in enumerate(zip(kinds, numbers, strict=True)):
            if kind != CALLS.index(call) or number != self._calls:
                other = CALLS[kind] if 0 <= kind < len(CALLS) else "something else"
                raise RankFailedError(
                    f"rank {self._exchange.rank} calls {call} (call {self._calls}), but rank {rank} calls "
                    f"{other} (call {number}): all ranks must make the same calls in the same order"
                )

    def _fail(
        self, flags: Sequence[int], call: str, error: Exception | None, series: LookupSeries | None
    ) -> None:
        """Exchange the errors; raise RankFailedError on the ranks that have none."""
        errors = self._exchange.gather(None if error is None else f"{type(error).__name__}: {error}")
        first = next(rank for rank, flag in enumerate(flags) if flag & _FAILED)
        failed = RankFailedError(f"{call}: rank {first} failed, so nothing was done: {errors[first]}")
        if series is not None and any(flag & _LEFT for flag in flags):
            series.leave(error or failed)
        if error is None:  # otherwise the caller raises it
            raise failed

    # ---- rows

    def send_rows(self, requested: RequestedIds, routed: RoutedIds, step: int | None = None) -> Tensor:
        """Read the rows that all ranks request from this one, and exchange them."""
        # returns: the rows of the ids of `routed`, in their order, float32 [size].
        if requested.series is not None:
            requested.series.check()
        counts, dims = requested.counts, self._dims
        flat = self._exchange.new_buffer(4 * int((counts @ self._widths).sum())).view(torch.float32)
        requested.found = self._rows.read(requested.ids, counts, flat, step)
        mine = routed.deduped.counts
        wire = self._rows_wire
        sizes = wire.sizes(counts, dims), wire.sizes(mine, dims)
        data = self._send(wire.encode(flat, counts, dims), *sizes, "lookup", "rows", requested.number)
        if self._recorder is not None:
            missing = {name: int((found.rows < 0).sum()) for name, found in requested.found.items()}
            self._recorder.read(missing)
            self._recorder.sent("rows", counts, mine, [wire.row_bytes(dim) for dim in dims])
        return wire.decode(data, mine, dims)

    # ---- gradients

    def push(
        self,
        requested: RequestedIds,
        routed: RoutedIds,
        sent: tuple[Gradients, Update] | None,
        error: Exception | None = None,
        leave: bool = False,
    ) -> None:
        """Send gradients; sum the received ones by a tree over ranks, and make one optimizer step per id.

        A rank that fails sends an error instead.
        """
        if requested.series is not None:
            requested.series.check()
        mine, theirs = routed.deduped.counts, requested.counts
        sizes = self._gradients.sizes(mine), self._gradients.sizes(theirs)
        flags = (_FAILED if error is not None else 0) | (_LEFT if leave else 0)
        gradients, update = sent or (None, None)
        head = push_head(requested.number, flags, update)
        data = self._gradients.encode(head, gradients, mine, sizes[0])
        step = "" if update is None else f" of step {update.step}"
        got = self._send(data, *sizes, "apply_gradients", "gradients", requested.number, step)
        parts = got.split_with_sizes(sizes[1])
        heads = [part[:_HEAD_BYTES].view(torch.int64).tolist() for part in parts]
        time = self._check_push(heads, head, error, requested.series)
        if update is None:
            return
        if self._recorder is not None:
            row_bytes = [self._grads_wire.row_bytes(dim) for dim in self._dims]
            self._recorder.sent("gradients", mine, theirs, row_bytes)
        ids = list(requested.ids.values())
        decoded = zip(self._names, self._gradients.decode(got, ids, theirs, sizes[1]), strict=True)
        received = {name: own for name, own in decoded if own.ids.numel()}
        before = {}
        if self._recorder is not None:
            before = {name: self._engines[name].counters().created for name in received}
        seconds = int(clock.time()) if time is None else int(time)
        self._rows.update(received, theirs, update._replace(time=seconds), requested.found)
        for name, rows in before.items():
            assert self._recorder is not None
            self._recorder.created(name, self._engines[name].counters().created - rows)

    def _check_push(
        self, heads: list[list[int]], mine: list[int], error: Exception | None, series: LookupSeries | None
    ) -> float | None:
        """Return the latest time; raise if another rank fails the update or passes other numbers."""
        flags = [head[1] for head in heads]
        if any(flags):
            self._fail(flags, "apply_gradients", error, series)
            return None
        if any(head[i] != mine[i] for head in heads for i in (0, 2, 4, 5)):
            raise UsageError(
                "apply_gradients: step, scale and clip_norm must be equal on all ranks, and the gradients "
                f"must belong to the same lookup (steps by rank: {[head[2] for head in heads]})"
            )
        return latest_time([head[3] for head in heads])

    # ---- other writes

    def write(self, routed: RoutedIds, flat: Tensor, *, add: bool, time: float | None) -> None:
        """Exchange ids and rows of assign or assign_add, and write them in the order of the ranks."""
        call = "assign_add" if add else "assign"
        requested = self.request(call, routed, time=time)
        out, into = routed.deduped.counts @ self._widths, requested.counts @ self._widths
        sizes = (out * 4).tolist(), (into * 4).tolist()
        values = self._send(flat.to(self._exchange.device), *sizes, call, "rows").view(torch.float32)
        if self._recorder is not None:
            row_bytes = [4 * dim for dim in self._dims]
            self._recorder.sent("rows", routed.deduped.counts, requested.counts, row_bytes)
        blocks = blocks_by_table(values, requested.counts * self._widths)
        for (name, table), own in zip(self._tables.items(), blocks, strict=True):
            if requested.ids[name].numel():
                rows, seconds = _join(own).view(-1, table.dim), table.checks.time(requested.time)
                self._engines[name].assign(requested.ids[name], rows, add=add, time=seconds)

    def reinitialize(self, routed: RoutedIds, time: float | None) -> Tensor:
        """Reset rows to their initial values, in the order of the ranks."""
        # returns: the status of each id of this rank, int32 [n] on the CPU, in the order of `routed`.
        requested = self.request("reinitialize", routed, time=time)
        status = torch.empty(int(requested.counts.sum()), dtype=torch.int32, device="cpu")
        blocks = blocks_by_table(status, requested.counts)
        for t, name in enumerate(self._names):
            if requested.ids[name].numel():
                found = self._tables[name].reinitialize(requested.ids[name], time=requested.time)
                for block, part in zip(blocks[t], found.split([b.numel() for b in blocks[t]]), strict=True):
                    block.copy_(part)
        out, into = requested.counts.sum(1) * 4, routed.deduped.counts.sum(1) * 4
        return self._send(status, out.tolist(), into.tolist(), "reinitialize", "statuses").view(torch.int32)

    def remove(self, routed: RoutedIds) -> dict[str, int]:
        """Remove ids from their owners."""
        requested = self.request("remove", routed)
        return {name: self._tables[name].remove(ids) for name, ids in requested.ids.items() if ids.numel()}


def _join(blocks: list[Tensor]) -> Tensor:
    full = [block for block in blocks if block.numel()]
    return full[0] if len(full) == 1 else torch.cat(full) if full else blocks[0]
