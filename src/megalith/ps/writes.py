"""What each kind of write does with the tables of a server.

`messages.py` lists the kinds and their fields. A log is replayed with `apply_write` too, so a write needs
nothing of the process that sent it. `table_space.py` decides when and in which order writes are applied.

Functions for touched ids run here too. Ids that a consumer has taken are kept until that is confirmed:

    call       effect on a server
    drain      takes the touched ids and those of a drain that was not confirmed, keeps and returns them
    confirm    forgets what is kept; sent when all servers have answered
    abandon    the worker has left or was replaced: what is kept becomes touched again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.ps.messages import Array, ServerWrite, array_of, chunk_of, tensor_of
from megalith.shards.contract import ShardsPart
from megalith.shards.gradients import Gradients, concatenated
from megalith.shards.local import LocalShards, OwnerRows
from megalith.shards.row_encoding import Wire
from megalith.table.table_data import FoundRows, Update


class OwnedTables:
    def __init__(self, shards: LocalShards, rows_wire: Wire, wire: Wire) -> None:
        self.shards = shards
        self.rows = OwnerRows(shards)
        self.names = list(shards.local)
        self.dims = [table.dim for table in shards.local.values()]
        self.rows_wire = rows_wire
        self.wire = wire
        self._direct = rows_wire.exact and shards.device.type == "cpu"
        self._no_ids = torch.empty(0, dtype=torch.int64, device=shards.device)

    def read(
        self,
        ids: Array,
        counts: Sequence[int],
        step: int | None,
        out: Array | None,
        corrected: Callable[[Mapping[str, Tensor], Sequence[Tensor]], None] | None = None,
    ) -> Array:
        # corrected: receives the ids by table and their rows, float32 [n, dim] each, and may change rows.
        self._check_counts(counts)
        own = torch.tensor([counts], dtype=torch.int64, device="cpu")
        (size,) = self.rows_wire.sizes(own, self.dims)
        if out is not None and out.size != size:
            raise InputError(f"a lookup of {size} bytes of rows was given {out.size} bytes for them")
        direct = out is not None and self._direct
        if direct:
            flat = torch.from_numpy(out).view(torch.float32)
        else:
            flat = torch.empty(sum(map(mul, counts, self.dims)), device=self.shards.device)
        pieces = dict.fromkeys(self.names, self._no_ids) | self.by_table(tensor_of(ids), counts)
        self.rows.read(pieces, own, flat, step)
        if corrected is not None:
            corrected(pieces, self._views(flat, counts))
        if out is None:
            return array_of(self.rows_wire.encode(flat, own, self.dims))
        if not direct:
            torch.from_numpy(out).copy_(self.rows_wire.encode(flat, own, self.dims))
        return out

    def read_before(
        self, received: Mapping[str, Gradients], step: int
    ) -> tuple[dict[str, FoundRows], dict[str, tuple[Tensor, Tensor]]]:
        # returns: where the rows are, and by table the ids and rows, float32 [n, dim], in new memory.
        pieces = {name: received[name].ids if name in received else self._no_ids for name in self.names}
        counts = [piece.numel() for piece in pieces.values()]
        flat = torch.empty(sum(map(mul, counts, self.dims)), device=self.shards.device)
        found = self.rows.read(pieces, torch.tensor([counts], dtype=torch.int64, device="cpu"), flat, step)
        views = dict(zip(self.names, self._views(flat, counts), strict=True))
        return found, {name: (pieces[name].clone(), views[name]) for name in received}

    def _views(self, flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The rows of each table, float32 [n, dim]."""
        sizes = list(map(mul, counts, self.dims))
        return [x.view(-1, dim) for x, dim in zip(flat.split_with_sizes(sizes), self.dims, strict=True)]

    def check_push(self, write: ServerWrite) -> None:
        """Check the sizes of the arrays of a push, before it is recorded."""
        counts = write.header["counts"]
        self._check_counts(counts)
        (size,) = self.wire.sizes(torch.tensor([counts], dtype=torch.int64, device="cpu"), self.dims)
        if write.arrays["grads"].size != size:
            raise InputError(
                f"a push of {size} bytes of gradients has {write.arrays['grads'].size}: workers and servers "
                "must have the same tables and wire"
            )

    def _check_counts(self, counts: Sequence[int]) -> None:
        # That they are the numbers of the ids was checked when the request was decoded.
        if len(counts) != len(self.names):
            raise InputError(f"{sum(counts)} ids with counts {list(counts)} for {len(self.names)} tables")

    def by_table(self, flat: Tensor, counts: Sequence[int]) -> dict[str, Tensor]:
        # flat: [n], the values of all tables concatenated.
        pieces = flat.to(self.shards.device).split_with_sizes(list(counts))
        return {name: piece for name, piece in zip(self.names, pieces, strict=True) if piece.numel()}


def apply_write(tables: OwnedTables, write: ServerWrite) -> Any:
    return _KINDS[write.kind](tables, write)


def apply_pushes(
    tables: OwnedTables, pushes: Sequence[ServerWrite], *, keep: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum the gradients of several workers by the fixed tree, and make one optimizer step per distinct id."""
    # returns: by table, ids, which may repeat, and their rows before the step, float32 [n, dim].
    first = pushes[0].header
    for push in pushes:
        if any(push.header[key] != first[key] for key in ("step", "scale", "clip_norm")):
            steps = [each.header["step"] for each in pushes]
            raise UsageError(
                f"apply_gradients: step, scale and clip_norm must be equal on all workers (steps: {steps})"
            )
    counts = torch.tensor([push.header["counts"] for push in pushes], dtype=torch.int64, device="cpu")
    time = max(push.header["time"] for push in pushes)
    rates: dict[str, list[float]] = {}
    for push in reversed(pushes):
        rates |= push.header["rates"]
    parts: dict[str, list[Gradients]] = {name: [] for name in tables.names}
    for push in pushes:
        for name, part in _sums(tables, push).items():
            parts[name].append(part)
    received = {name: concatenated(each) for name, each in parts.items() if each}
    update = Update(first["step"], time, first["scale"], first["clip_norm"], rates)
    found: dict[str, FoundRows] = {}
    before: dict[str, tuple[Tensor, Tensor]] = {}
    if keep:
        found, before = tables.read_before(received, first["step"])
    tables.rows.update(received, counts, update, found)
    return before


def _sums(tables: OwnedTables, push: ServerWrite) -> dict[str, Gradients]:
    counts = push.header["counts"]
    ids = tables.by_table(tensor_of(push.arrays["ids"]), counts)
    own = torch.tensor([counts], dtype=torch.int64, device="cpu")
    flat = tables.wire.decode(tensor_of(push.arrays["grads"]), own, tables.dims)
    floats = list(map(mul, counts, tables.dims))
    grads = tables.by_table(flat, floats)
    seen: Mapping[str, Tensor] = {}
    if "seen" in push.arrays:
        seen = tables.by_table(tensor_of(push.arrays["seen"]), counts)
    dims = dict(zip(tables.names, tables.dims, strict=True))
    return {name: Gradients(x, grads[name].view(-1, dims[name]), seen.get(name)) for name, x in ids.items()}


# ---- the kinds


def _push(tables: OwnedTables, write: ServerWrite) -> None:
    apply_pushes(tables, [write])  # a worker gets no result, and so not the rows before the step


def _ids_of(tables: OwnedTables, write: ServerWrite) -> dict[str, Tensor]:
    return tables.by_table(tensor_of(write.arrays["ids"]), write.header["counts"])


def _write_rows(tables: OwnedTables, write: ServerWrite, *, add: bool) -> None:
    floats = list(map(mul, write.header["counts"], tables.dims))
    rows = tables.by_table(tensor_of(write.arrays["rows"]), floats)
    for name, ids in _ids_of(tables, write).items():
        engine = tables.shards.engines[name]
        engine.assign(ids, rows[name].view(-1, engine.dim), add=add, time=write.header["time"])


def _reinitialize(tables: OwnedTables, write: ServerWrite) -> Array:
    local, time = tables.shards.local, write.header["time"]
    found = [local[name].reinitialize(ids, time=time) for name, ids in _ids_of(tables, write).items()]
    return array_of(torch.cat(found) if found else torch.empty(0, dtype=torch.int32, device="cpu"))


def _evict(tables: OwnedTables, write: ServerWrite) -> dict[str, Array]:
    return {name: array_of(ids) for name, ids in tables.shards.evict(write.header["time"]).items()}


def _evict_part(tables: OwnedTables, write: ServerWrite) -> dict[str, Array]:
    time, parts, start = (write.header[name] for name in ("time", "parts", "start"))
    found = tables.shards.evict_part(time, parts=parts, start=start)
    return {name: array_of(ids) for name, ids in found.items()}


def _restore_pending(tables: OwnedTables, write: ServerWrite) -> None:
    ids, counts = (tensor_of(write.arrays[name]) for name in ("ids", "counts"))
    tables.shards.local[write.header["table"]].restore_pending(ids, counts)


def _clear(tables: OwnedTables, write: ServerWrite) -> None:
    for name in write.header["tables"]:
        tables.shards.local[name].clear()


_KINDS: Mapping[str, Callable[[OwnedTables, ServerWrite], Any]] = {
    "push": _push,
    "assign": partial(_write_rows, add=False),
    "assign_add": partial(_write_rows, add=True),
    "reinitialize": _reinitialize,
    "remove": lambda tables, write: tables.shards.remove(_ids_of(tables, write)),
    "evict": _evict,
    "evict_part": _evict_part,
    "restore": lambda tables, write: tables.shards.restore(write.header["table"], chunk_of(write.arrays)),
    "restore_pending": _restore_pending,
    "clear": _clear,
    "track": lambda tables, write: tables.shards.track(write.header["consumer"]),
    "untrack": lambda tables, write: tables.shards.untrack(write.header["consumer"]),
    "mark": lambda tables, write: tables.shards.mark_touched(
        write.header["consumer"], _ids_of(tables, write)
    ),
}


# ---- touched ids


class DrainedIds:
    """The ids of a drain that is not confirmed; a `PartOperation`."""

    def __init__(self, shards: LocalShards, consumer: str, found: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._shards = shards
        self._consumer = consumer
        self.found = found

    def abandon(self) -> None:
        """Mark the ids again, unless the consumer was removed."""
        ids = {name: torch.cat(pair) for name, pair in self.found.items()}
        try:
            self._shards.mark_touched(self._consumer, ids)
        except UnknownNameError:
            return


def drain(part: ShardsPart, consumer: str) -> dict[str, tuple[Array, Array]]:
    kept = part.kept.pop(_key(consumer), None)
    if kept is not None:
        kept.abandon()
    found = part.shards.drain_touched(consumer)
    part.kept[_key(consumer)] = DrainedIds(part.shards, consumer, found)
    return {name: (array_of(updated), array_of(removed)) for name, (updated, removed) in found.items()}


def confirm(part: ShardsPart, consumer: str) -> None:
    part.kept.pop(_key(consumer), None)


def pending_ids(part: ShardsPart, consumer: str) -> dict[str, Tensor]:
    """Return the touched ids of a consumer without taking them."""
    # returns: int64 [n] per table, updated and removed ids.
    drain(part, consumer)
    kept = part.kept.pop(_key(consumer))
    assert isinstance(kept, DrainedIds)
    kept.abandon()
    return {name: torch.cat(pair) for name, pair in kept.found.items()}


def check_consumer(part: ShardsPart, consumer: str) -> None:
    part.shards.consumer_numbers(consumer)


def _key(consumer: str) -> str:
    return f"drained/{consumer}"
