"""Messages: what the ranks of SyncShards say to each other, and what each does with its rows when asked.

Everything here runs in the exchange's thread. A call begins with sizes: its kind, its number, flags, and how
many ids of each table go where; then come ids, then rows or values. Gradients carry their own header, so that
an error on one rank is known on all before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megalith.distributed.exchange import Exchange
from megalith.errors import RankFailedError, UsageError
from megalith.shards.gradient_sums import GradientSum, halves
from megalith.shards.preparer import SyncPrepared
from megalith.shards.wire import make_wire
from megalith.table import Table

CALLS = ("lookup", "apply_gradients", "assign", "assign_add", "reinitialize", "remove")
_FAILED, _DONE = 1, 2
_HEAD = 4  # call, number, flags, time
_PUSH_WORDS = 6  # number, flags, step, time, scale, clip_norm
_NO_TIME = -1


@dataclass
class Asked:
    """What the ranks want of this one: ids by source, then table.

    counts: int64 [ranks, tables]. done: ranks that have run out of data. time: the latest that a rank gives
    for what is written. ids: per table, sources one behind the other. found: per table row numbers and epoch,
    once rows were read.
    """

    number: int
    counts: Tensor
    done: list[int]
    time: int | None
    ids: dict[str, Tensor]
    found: dict[str, tuple[Tensor, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class GradientPush:
    """Gradients on their way: floats of all distinct ids, which of them take part, and the step's numbers."""

    flat: Tensor
    mask: Tensor | None
    step: int
    time: float | None
    scale: float
    clip_norm: float | None


class Recorder(Protocol):
    """Is told what travels, in the exchange's thread. Counts: int64 [ranks, tables], this rank's included."""

    def asked(self, call: str, prepared: SyncPrepared, counts: Tensor) -> None:
        """A call began: what this rank asks for, and how many ids the ranks ask of it."""

    def travelled(self, out: Tensor, into: Tensor, row_bytes: Sequence[int]) -> None:
        """Ids, rows or gradients went out and came in; bytes of one, by table."""

    def waited(self, exchange: str, seconds: float) -> None:
        """How long an exchange (sizes, ids, rows, gradients) took, waiting for other ranks included."""

    def read(self, asked: Asked) -> None:
        """Rows were found and read; `asked.found` says where."""

    def created(self, table: str, rows: int) -> None:
        """An update made new rows."""


class Messages:
    """The exchanges of one SyncShards. recorder: is told what travels, if set."""

    def __init__(self, exchange: Exchange, tables: Mapping[str, Table], wire: tuple[str, str]) -> None:
        self._exchange = exchange
        self._tables = tables
        self._names = list(tables)
        self._dims = [table.dim for table in tables.values()]
        self._widths = torch.tensor(self._dims, dtype=torch.int64)
        self._rows_wire, self._grads_wire = make_wire(wire[0]), make_wire(wire[1])
        self._calls = 0
        self.done: list[int] = []
        """Ranks that had run out of data at the last call."""
        self.recorder: Recorder | None = None

    def floats(self, counts: Tensor) -> Tensor:
        """Floats of rows, int64 [ranks], of so many ids [ranks, tables]."""
        return counts @ self._widths

    # ---- sizes and ids

    def ask(
        self,
        call: str,
        prepared: SyncPrepared | None,
        error: Exception | None = None,
        done: bool = False,
        time: float | None = None,
    ) -> Asked:
        """Sizes, then ids. Raises on every rank if one brings an error, or makes another call."""
        size, tables = self._exchange.size, len(self._names)
        self._calls += 1
        head = torch.zeros(size, _HEAD + tables, dtype=torch.int64)
        head[:, 0] = CALLS.index(call)
        head[:, 1] = self._calls
        head[:, 2] = (_FAILED if error is not None else 0) | (_DONE if done else 0)
        head[:, 3] = _seconds(time)
        if prepared is not None:
            head[:, _HEAD:] = prepared.deduped.counts
        width = head.shape[1] * 8
        what = self._what(call, "sizes")
        got = self._exchange.all_to_all(_bytes(head), [width] * size, [width] * size, what)
        heads = got.view(torch.int64).view(size, -1)
        self._note("sizes")
        self._check_heads(heads, call, error)
        if error is not None:
            raise error
        assert prepared is not None
        counts = heads[:, _HEAD:]
        ids = self._send(prepared.deduped.ids, prepared.deduped.counts, counts, self._what(call, "ids"))
        self._note("ids")
        blocks = _blocks(ids, counts)
        by_table = {name: _join(blocks[t]) for t, name in enumerate(self._names)}
        if self.recorder is not None:
            self.recorder.asked(call, prepared, counts)
            self.recorder.travelled(prepared.deduped.counts, counts, [8] * tables)
        self.done = [rank for rank, flags in enumerate(heads[:, 2].tolist()) if flags & _DONE]
        return Asked(self._calls, counts, self.done, _latest(heads[:, 3].tolist()), by_table)

    def _check_heads(self, heads: Tensor, call: str, error: Exception | None) -> None:
        kinds, numbers, flags = heads[:, 0].tolist(), heads[:, 1].tolist(), heads[:, 2].tolist()
        if any(flag & _FAILED for flag in flags):
            self._fail([bool(flag & _FAILED) for flag in flags], call, error)
        for rank, (kind, number) in enumerate(zip(kinds, numbers, strict=True)):
            if kind != CALLS.index(call) or number != self._calls:
                other = CALLS[kind] if 0 <= kind < len(CALLS) else "something else"
                raise RankFailedError(
                    f"rank {self._exchange.rank} calls {call} (number {self._calls}), rank {rank} calls "
                    f"{other} (number {number}): all ranks must make the same calls in the same order"
                )

    def _fail(self, failed: Sequence[bool], call: str, error: Exception | None) -> None:
        """All ranks know that some failed: they tell each other why."""
        said = self._exchange.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            return  # its own rank raises it
        first = next(rank for rank, bad in enumerate(failed) if bad)
        raise RankFailedError(f"{call}: rank {first} failed, so nothing was done: {said[first]}")

    def _send(self, ids: Tensor, out: Tensor, into: Tensor, what: str) -> Tensor:
        sizes = [n * 8 for n in out.sum(1).tolist()], [n * 8 for n in into.sum(1).tolist()]
        return self._exchange.all_to_all(_bytes(ids), *sizes, what).view(torch.int64)

    # ---- rows

    def send_rows(self, asked: Asked, prepared: SyncPrepared) -> Tensor:
        """Reads what others asked for; the rows asked for here, float32, flat."""
        counts, dims = asked.counts, self._dims
        flat = torch.empty(int(self.floats(counts).sum()))
        blocks = _blocks(flat, counts * self._widths)
        for (name, table), sizes, into in zip(self._tables.items(), counts.t().tolist(), blocks, strict=True):
            ids = asked.ids[name]
            if not ids.numel():
                continue
            rows, epoch = asked.found[name] = table.find_with_epoch(ids)
            blocks_of = (ids.split_with_sizes(sizes), rows.split_with_sizes(sizes))
            for out, own, where in zip(into, *blocks_of, strict=True):
                if own.numel():
                    table.read_into(where, epoch, own, out.view(-1, table.dim))
        mine = prepared.deduped.counts
        wire = self._rows_wire
        data = self._exchange.all_to_all(
            wire.encode(flat, counts, dims),
            wire.sizes(counts, dims),
            wire.sizes(mine, dims),
            self._what("lookup", "rows", asked.number),
        )
        self._note("rows")
        if self.recorder is not None:
            self.recorder.read(asked)
            self.recorder.travelled(counts, mine, [wire.row_bytes(dim) for dim in dims])
        return wire.decode(data, mine, dims)

    # ---- gradients

    def push(
        self, asked: Asked, prepared: SyncPrepared, push: GradientPush | None, error: Exception | None
    ) -> None:
        """Sends gradients; sums those received by a tree over ranks, and makes one step per id."""
        mine, theirs = prepared.deduped.counts, asked.counts
        sizes = self._push_sizes(mine), self._push_sizes(theirs)
        head = _push_head(asked.number, push, error)
        data = self._pack(head, push, mine, sizes[0])
        step = "" if push is None else f" of step {push.step}"
        what = self._what("apply_gradients", f"gradients{step}", asked.number)
        got = self._exchange.all_to_all(data, *sizes, what)
        self._note("gradients")
        parts = got.split_with_sizes(sizes[1])
        heads = [part[: _PUSH_WORDS * 8].view(torch.int64).tolist() for part in parts]
        time = self._check_push(heads, head.tolist(), error)
        if push is None:
            return
        if self.recorder is not None:
            self.recorder.travelled(mine, theirs, [self._grads_wire.row_bytes(dim) for dim in self._dims])
        received = [self._unpack(part, counts) for part, counts in zip(parts, theirs, strict=True)]
        for t, name in enumerate(self._names):
            if asked.ids[name].numel():
                self._update(name, asked, [of_source[t] for of_source in received], push, time)

    def _update(
        self,
        name: str,
        asked: Asked,
        received: Sequence[tuple[Tensor | None, Tensor]],
        push: GradientPush,
        time: float | None,
    ) -> None:
        """received: by source, which ids take part (None: all) and their floats."""
        table, ids = self._tables[name], asked.ids[name]
        masked = any(mask is not None and not bool(mask.all()) for mask, _ in received)
        grads = [floats.view(-1, table.dim) for _, floats in received]
        rows: Tensor | None = None
        epoch: int | None = None
        if not masked and sum(g.numel() > 0 for g in grads) <= 2:
            summed = _join(grads)
            rows, epoch = asked.found.get(name, (None, None))
        else:
            sources = zip(ids.split_with_sizes([len(g) for g in grads]), grads, received, strict=True)
            # Empty parts too: a part's place in the tree of sums must not shift.
            both = halves(
                [GradientSum(i, g) if m is None else GradientSum(i[m], g[m]) for i, g, (m, _) in sources]
            )
            ids, summed = torch.cat([part.ids for part in both]), torch.cat([part.grads for part in both])
            if not ids.numel():
                return
        before = 0 if self.recorder is None else len(table)
        step = table.check_step(push.step, time, push.scale, push.clip_norm)
        table.update_checked(rows, ids, [summed], None, step, epoch=epoch)
        if self.recorder is not None:
            self.recorder.created(name, len(table) - before)

    def _push_sizes(self, counts: Tensor) -> list[int]:
        """Bytes per peer: header, a bit per id, values."""
        values = self._grads_wire.sizes(counts, self._dims)
        bits = [_pad(-(-n // 8)) for n in counts.sum(1).tolist()]
        return [_PUSH_WORDS * 8 + b + _pad(v) for b, v in zip(bits, values, strict=True)]

    def _pack(self, head: Tensor, push: GradientPush | None, counts: Tensor, sizes: list[int]) -> Tensor:
        """A part for each peer, of these sizes; without a push, of which only the header counts."""
        if push is None:
            parts = [torch.nn.functional.pad(head, (0, size // 8 - _PUSH_WORDS)) for size in sizes]
            return torch.cat(parts).view(torch.uint8)
        ids = counts.sum(1).tolist()
        flats = push.flat.split_with_sizes(self.floats(counts).tolist())
        masks = [None] * len(ids) if push.mask is None else push.mask.split_with_sizes(ids)
        pieces: list[Tensor] = []
        for own, n, mask, flat, size in zip(counts, ids, masks, flats, sizes, strict=True):
            bits = _bits(n, mask)
            values = self._grads_wire.encode(flat, own[None], self._dims)
            filler = size - _PUSH_WORDS * 8 - bits.numel() - values.numel()
            pieces += [head.view(torch.uint8), bits, values, torch.zeros(filler, dtype=torch.uint8)]
        return torch.cat(pieces)

    def _unpack(self, part: Tensor, counts: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """By table, which ids take part (None: all) and their floats; of a source with these counts."""
        sizes = counts.tolist()
        ids, one = sum(sizes), counts[None]
        bits = part[_PUSH_WORDS * 8 :][: _pad(-(-ids // 8))]
        (size,) = self._grads_wire.sizes(one, self._dims)
        values = part[_PUSH_WORDS * 8 + bits.numel() :][:size]
        flat = self._grads_wire.decode(values, one, self._dims)
        floats = flat.split_with_sizes([n * dim for n, dim in zip(sizes, self._dims, strict=True)])
        if bool((bits == 255).all()):
            return [(None, each) for each in floats]
        return list(zip(_unpack_bits(bits, ids).split_with_sizes(sizes), floats, strict=True))

    def _check_push(self, heads: list[list[int]], mine: list[int], error: Exception | None) -> float | None:
        """The latest time given. Raises on every rank if one brings an error or other numbers."""
        flags = [head[1] for head in heads]
        if any(flags):
            self._fail([bool(flag) for flag in flags], "apply_gradients", error)
            return None
        if any(head[i] != mine[i] for head in heads for i in (0, 2, 4, 5)):
            raise UsageError(
                "apply_gradients: step, scale and clip_norm must be alike on all ranks, and gradients belong "
                f"to the same look-up (steps by rank: {[head[2] for head in heads]})"
            )
        return _latest([head[3] for head in heads])

    # ---- other writes

    def write(self, call: str, prepared: SyncPrepared, flat: Tensor, time: float | None) -> None:
        """assign and assign_add: ids, then values; sources in rank order."""
        asked = self.ask(call, prepared, time=time)
        out, into = self.floats(prepared.deduped.counts), self.floats(asked.counts)
        sizes = (out * 4).tolist(), (into * 4).tolist()
        values = self._exchange.all_to_all(_bytes(flat), *sizes, self._what(call, "rows")).view(torch.float32)
        self._note("rows")
        if self.recorder is not None:
            row_bytes = [4 * dim for dim in self._dims]
            self.recorder.travelled(prepared.deduped.counts, asked.counts, row_bytes)
        blocks = _blocks(values, asked.counts * self._widths)
        for (name, table), own in zip(self._tables.items(), blocks, strict=True):
            if asked.ids[name].numel():
                getattr(table, call)(asked.ids[name], _join(own).view(-1, table.dim), time=asked.time)

    def reinitialize(self, prepared: SyncPrepared, time: float | None) -> Tensor:
        """The status of each id sent, int32, in the order they were sent."""
        asked = self.ask("reinitialize", prepared, time=time)
        status = torch.empty(int(asked.counts.sum()), dtype=torch.int32)
        blocks = _blocks(status, asked.counts)
        for t, name in enumerate(self._names):
            if asked.ids[name].numel():
                found = self._tables[name].reinitialize(asked.ids[name], time=asked.time)
                for block, part in zip(blocks[t], found.split([b.numel() for b in blocks[t]]), strict=True):
                    block.copy_(part)
        out, into = asked.counts.sum(1) * 4, prepared.deduped.counts.sum(1) * 4
        what = self._what("reinitialize", "statuses")
        return self._exchange.all_to_all(_bytes(status), out.tolist(), into.tolist(), what).view(torch.int32)

    def remove(self, prepared: SyncPrepared) -> dict[str, int]:
        """How many of the ids asked of this rank had a row."""
        asked = self.ask("remove", prepared)
        return {name: self._tables[name].remove(ids) for name, ids in asked.ids.items() if ids.numel()}

    # ---- small things

    def _what(self, call: str, exchange: str, number: int | None = None) -> str:
        names = ", ".join(self._names[:8]) + (", ..." if len(self._names) > 8 else "")
        return f"SyncShards.{call} number {number or self._calls}, exchange of {exchange} (tables {names})"

    def _note(self, exchange: str) -> None:
        if self.recorder is not None:
            self.recorder.waited(exchange, self._exchange.waited)


def _push_head(number: int, push: GradientPush | None, error: Exception | None) -> Tensor:
    head = torch.zeros(_PUSH_WORDS, dtype=torch.int64)
    head[0] = number
    head[1] = int(error is not None)
    head[3] = _NO_TIME
    if push is not None:
        head[2] = push.step
        head[3] = _seconds(push.time)
        numbers = torch.tensor([push.scale, push.clip_norm or 0.0], dtype=torch.float64)
        head[4:6] = numbers.view(torch.int64)
    return head


def _seconds(time: float | None) -> int:
    return _NO_TIME if time is None else int(time)


def _latest(times: Sequence[int]) -> int | None:
    latest = max(times)
    return None if latest == _NO_TIME else latest


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _pad(size: int) -> int:
    return -(-size // 8) * 8


def _bits(n: int, mask: Tensor | None) -> Tensor:
    """A bit for each of n ids, filled up to 8 bytes: those in the mask, or all."""
    if mask is None:
        return torch.full((_pad(-(-n // 8)),), 255, dtype=torch.uint8)
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 64)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _unpack_bits(bits: Tensor, n: int) -> Tensor:
    return ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(-1)[:n].bool()


def _blocks(flat: Tensor, counts: Tensor) -> list[list[Tensor]]:
    """What lies by source, then table -> for each table its blocks by source, views."""
    tables = counts.shape[1]
    pieces = flat.split(counts.reshape(-1).tolist()) if counts.numel() else ()
    return [list(pieces[t::tables]) for t in range(tables)]


def _join(blocks: list[Tensor]) -> Tensor:
    full = [block for block in blocks if block.numel()]
    return full[0] if len(full) == 1 else torch.cat(full) if full else blocks[0]
