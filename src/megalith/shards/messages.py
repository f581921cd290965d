"""Messages: what the ranks of SyncShards say to each other, and what each does with its rows when asked.

Everything here runs in the exchange's thread. A call begins with sizes: its kind, its number, flags, and how
many ids of each table go where; then come ids, then rows or values. Gradients carry their own header, so that
an error on one rank is known on all before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megalith.errors import RankFailedError, UsageError
from megalith.shards.exchange import Exchange
from megalith.shards.prepare import SyncPrepared
from megalith.shards.sums import Part, halves
from megalith.shards.wire import make_wire
from megalith.table import Table

CALLS = ("lookup", "apply_gradients", "assign", "assign_add", "reinitialize", "remove")
_FAILED, _DONE = 1, 2
_HEAD = 3  # call, number, flags
_PUSH_WORDS = 6  # number, flags, step, time, scale, clip_norm
_NO_TIME = -1


@dataclass
class Asked:
    """What the ranks want of this one: ids by source, then table.

    counts: int64 [ranks, tables]. done: ranks that have run out of data. ids: per table, sources one behind
    the other. found: per table row numbers and epoch, once rows were read.
    """

    number: int
    counts: Tensor
    done: list[int]
    ids: dict[str, Tensor]
    found: dict[str, tuple[Tensor, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Push:
    """Gradients on their way: floats of all distinct ids, which of them take part, and the step's numbers."""

    flat: Tensor
    mask: Tensor | None
    step: int
    time: float | None
    scale: float
    clip_norm: float | None


class Messages:
    """The exchanges of one SyncShards. recorder: is told what travels, if set (see `metrics`)."""

    def __init__(self, exchange: Exchange, tables: Mapping[str, Table], wire: tuple[str, str]) -> None:
        self._exchange = exchange
        self._tables = tables
        self._names = list(tables)
        self._dims = [table.dim for table in tables.values()]
        self._rows_wire, self._grads_wire = make_wire(wire[0]), make_wire(wire[1])
        self._calls = 0
        self.recorder: Any = None

    def floats(self, counts: Tensor) -> Tensor:
        """Floats of rows, int64 [ranks], of so many ids [ranks, tables]."""
        return counts @ torch.tensor(self._dims, dtype=torch.int64)

    # ---- sizes and ids

    def ask(self, call: str, prepared: SyncPrepared | None, error: Exception | None, done: bool) -> Asked:
        """Sizes, then ids. Raises on every rank if one brings an error, or makes another call."""
        size, tables = self._exchange.size, len(self._names)
        self._calls += 1
        head = torch.zeros(size, _HEAD + tables, dtype=torch.int64)
        head[:, 0] = CALLS.index(call)
        head[:, 1] = self._calls
        head[:, 2] = (_FAILED if error is not None else 0) | (_DONE if done else 0)
        if prepared is not None:
            head[:, _HEAD:] = prepared.deduped.counts
        width = head.shape[1] * 8
        what = self._what(call, "sizes")
        got = self._exchange.all_to_all(_bytes(head), [width] * size, [width] * size, what)
        heads = got.view(torch.int64).view(size, -1)
        self._note("sizes")
        self._check_heads(heads, call, error)
        assert prepared is not None
        counts = heads[:, _HEAD:]
        ids = self._send(prepared.deduped.ids, prepared.deduped.counts, counts, self._what(call, "ids"))
        self._note("ids")
        blocks = _blocks(ids, counts)
        by_table = {name: _join(blocks[t]) for t, name in enumerate(self._names)}
        if self.recorder is not None:
            self.recorder.asked(call, prepared, counts)
        gone = [rank for rank, flags in enumerate(heads[:, 2].tolist()) if flags & _DONE]
        return Asked(self._calls, counts, gone, by_table)

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
        starts = _float_starts(counts, dims)
        for t, name in enumerate(self._names):
            ids = asked.ids[name]
            if not ids.numel():
                continue
            table = self._tables[name]
            rows, epoch = asked.found[name] = table.find_with_epoch(ids)
            at = 0
            for source, n in enumerate(counts[:, t].tolist()):
                if n:
                    begin = starts[source][t]
                    out = flat[begin : begin + n * dims[t]].view(n, dims[t])
                    table.read_into(rows[at : at + n], epoch, ids[at : at + n], out)
                    at += n
        mine = prepared.deduped.counts
        wire = self._rows_wire
        data = self._exchange.all_to_all(
            wire.encode(flat, counts, dims),
            wire.sizes(counts, dims),
            wire.sizes(mine, dims),
            self._what("lookup", "rows"),
        )
        self._note("rows")
        if self.recorder is not None:
            self.recorder.read(asked)
        return wire.decode(data, mine, dims)

    # ---- gradients

    def push(self, asked: Asked, prepared: SyncPrepared, push: Push | None, error: Exception | None) -> None:
        """Sends gradients; sums those received by a tree over ranks, and makes one step per id."""
        mine, theirs = prepared.deduped.counts, asked.counts
        sizes = self._push_sizes(mine), self._push_sizes(theirs)
        head = _push_head(asked.number, push, error)
        data = self._pack(head, push, mine, sizes[0])
        step = "" if push is None else f" of step {push.step}"
        got = self._exchange.all_to_all(data, *sizes, self._what("apply_gradients", f"gradients{step}"))
        self._note("gradients")
        parts = got.split(sizes[1])
        heads = torch.stack([part[: _PUSH_WORDS * 8].view(torch.int64) for part in parts])
        time = self._check_push(heads, head, error)
        if push is None:
            return
        masks, grads = zip(
            *(self._unpack(part, theirs[s : s + 1]) for s, part in enumerate(parts)), strict=True
        )
        flat_masks = None if all(m is None for m in masks) else masks
        for t, name in enumerate(self._names):
            self._update(t, name, asked, grads, flat_masks, push, time)

    def _update(
        self,
        t: int,
        name: str,
        asked: Asked,
        grads: Sequence[Tensor],
        masks: Sequence[Tensor | None] | None,
        push: Push,
        time: float | None,
    ) -> None:
        ids = asked.ids[name]
        if not ids.numel():
            return
        table, dim = self._tables[name], self._dims[t]
        parts, whole = [], True
        at = 0
        for source, n in enumerate(asked.counts[:, t].tolist()):
            before = asked.counts[source, :t]
            first = int(self.floats_before(before))
            values = grads[source][first : first + n * dim].view(n, dim)
            part = Part(ids[at : at + n], values)
            at += n
            mask = None if masks is None else masks[source]
            if mask is not None:
                skip = int(before.sum())
                own = mask[skip : skip + n]
                if not bool(own.all()):
                    part, whole = Part(part.ids[own], values[own]), False
            if part.ids.numel():
                parts.append(part)
            elif n:
                whole = False
        if not parts:
            return
        before_rows = len(table)
        step = table.check_step(push.step, time, push.scale, push.clip_norm)
        sources = int((asked.counts[:, t] > 0).sum())
        if whole and sources <= 2:
            rows, epoch = asked.found.get(name, (None, None))
            summed = parts[0].grads if len(parts) == 1 else torch.cat([part.grads for part in parts])
            table.update_checked(rows, ids, [summed.contiguous()], None, step, epoch=epoch)
        else:
            both = halves(parts)
            joined = torch.cat([part.ids for part in both]), torch.cat([part.grads for part in both])
            table.update_checked(None, joined[0], [joined[1]], None, step, epoch=None)
        if self.recorder is not None:
            self.recorder.created(name, len(table) - before_rows)

    def floats_before(self, counts: Tensor) -> int:
        """Floats of the first tables' rows."""
        return sum(n * dim for n, dim in zip(counts.tolist(), self._dims, strict=False))

    def _push_sizes(self, counts: Tensor) -> list[int]:
        """Bytes per peer: header, a bit per id, values."""
        values = self._grads_wire.sizes(counts, self._dims)
        bits = [_pad(-(-n // 8)) for n in counts.sum(1).tolist()]
        return [_PUSH_WORDS * 8 + b + _pad(v) for b, v in zip(bits, values, strict=True)]

    def _pack(self, head: Tensor, push: Push | None, counts: Tensor, sizes: list[int]) -> Tensor:
        data = torch.zeros(sum(sizes), dtype=torch.uint8)
        head_bytes = head.view(torch.uint8)
        begin = first_id = first_float = 0
        floats = self.floats(counts).tolist()
        for peer, (size, ids) in enumerate(zip(sizes, counts.sum(1).tolist(), strict=True)):
            part = data[begin : begin + size]
            part[: head_bytes.numel()] = head_bytes
            if push is not None:
                bits = part[head_bytes.numel() :][: _pad(-(-ids // 8))]
                if push.mask is None:
                    bits.fill_(255)
                else:
                    packed = _pack_bits(push.mask[first_id : first_id + ids])
                    bits[: packed.numel()] = packed
                own = push.flat[first_float : first_float + floats[peer]]
                values = self._grads_wire.encode(own, counts[peer : peer + 1], self._dims)
                part[head_bytes.numel() + bits.numel() :][: values.numel()] = values
            begin, first_id, first_float = begin + size, first_id + ids, first_float + floats[peer]
        return data

    def _unpack(self, part: Tensor, counts: Tensor) -> tuple[Tensor | None, Tensor]:
        """Which ids take part (None: all), and their values."""
        ids = int(counts.sum())
        bits = part[_PUSH_WORDS * 8 :][: _pad(-(-ids // 8))]
        (size,) = self._grads_wire.sizes(counts, self._dims)
        values = part[_PUSH_WORDS * 8 + bits.numel() :][:size]
        mask = None if bool((bits == 255).all()) else _unpack_bits(bits, ids)
        return mask, self._grads_wire.decode(values, counts, self._dims)

    def _check_push(self, heads: Tensor, mine: Tensor, error: Exception | None) -> float | None:
        """The latest time given. Raises on every rank if one brings an error or other numbers."""
        flags = heads[:, 1].tolist()
        if any(flags):
            self._fail([bool(flag) for flag in flags], "apply_gradients", error)
            return None
        if not bool((heads[:, [0, 2, 4, 5]] == mine[[0, 2, 4, 5]]).all()):
            steps = heads[:, 2].tolist()
            raise UsageError(
                "apply_gradients: step, scale and clip_norm must be alike on all ranks, and gradients belong "
                f"to the same look-up (steps by rank: {steps})"
            )
        latest = int(heads[:, 3].max())
        return None if latest == _NO_TIME else latest

    # ---- other writes

    def write(self, call: str, prepared: SyncPrepared, flat: Tensor, time: float | None) -> None:
        """assign and assign_add: ids, then values; sources in rank order."""
        asked = self.ask(call, prepared, None, False)
        out, into = self.floats(prepared.deduped.counts), self.floats(asked.counts)
        sizes = (out * 4).tolist(), (into * 4).tolist()
        values = self._exchange.all_to_all(_bytes(flat), *sizes, self._what(call, "rows")).view(torch.float32)
        starts = _float_starts(asked.counts, self._dims)
        for t, (name, dim) in enumerate(zip(self._names, self._dims, strict=True)):
            counts = asked.counts[:, t].tolist()
            blocks = [values[starts[s][t] :][: n * dim].view(n, dim) for s, n in enumerate(counts)]
            if asked.ids[name].numel():
                table = self._tables[name]
                getattr(table, call)(asked.ids[name], torch.cat(blocks), time=time)

    def reinitialize(self, prepared: SyncPrepared, time: float | None) -> Tensor:
        """The status of each id sent, int32, in the order they were sent."""
        asked = self.ask("reinitialize", prepared, None, False)
        status = torch.empty(int(asked.counts.sum()), dtype=torch.int32)
        blocks = _blocks(status, asked.counts)
        for t, name in enumerate(self._names):
            if asked.ids[name].numel():
                found = self._tables[name].reinitialize(asked.ids[name], time=time)
                for block, part in zip(blocks[t], found.split([b.numel() for b in blocks[t]]), strict=True):
                    block.copy_(part)
        out, into = asked.counts.sum(1) * 4, prepared.deduped.counts.sum(1) * 4
        what = self._what("reinitialize", "statuses")
        return self._exchange.all_to_all(_bytes(status), out.tolist(), into.tolist(), what).view(torch.int32)

    def remove(self, prepared: SyncPrepared) -> dict[str, int]:
        """How many of the ids asked of this rank had a row."""
        asked = self.ask("remove", prepared, None, False)
        return {name: self._tables[name].remove(ids) for name, ids in asked.ids.items() if ids.numel()}

    # ---- small things

    def _what(self, call: str, exchange: str) -> str:
        names = ", ".join(self._names[:8]) + (", ..." if len(self._names) > 8 else "")
        return f"SyncShards.{call} number {self._calls}, exchange of {exchange} (tables {names})"

    def _note(self, exchange: str) -> None:
        if self.recorder is not None:
            self.recorder.waited(exchange, self._exchange.waited)


def _push_head(number: int, push: Push | None, error: Exception | None) -> Tensor:
    head = torch.zeros(_PUSH_WORDS, dtype=torch.int64)
    head[0] = number
    head[1] = int(error is not None)
    head[3] = _NO_TIME
    if push is not None:
        head[2] = push.step
        head[3] = _NO_TIME if push.time is None else int(push.time)
        numbers = torch.tensor([push.scale, push.clip_norm or 0.0], dtype=torch.float64)
        head[4:6] = numbers.view(torch.int64)
    return head


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _pad(size: int) -> int:
    return -(-size // 8) * 8


def _pack_bits(mask: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
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


def _float_starts(counts: Tensor, dims: Sequence[int]) -> list[list[int]]:
    """Where the floats of each block begin, [ranks][tables]."""
    floats = counts * torch.tensor(dims, dtype=torch.int64)
    ends = floats.reshape(-1).cumsum(0).view(counts.shape)
    starts: list[list[int]] = (ends - floats).tolist()
    return starts
