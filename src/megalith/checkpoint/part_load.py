"""load_part: read the rows of one table that belong to one part of the shards, in the process of that part.

The files are read one by one, the base first and the deltas in order. A part keeps the rows that it owns by
the routing of the model, not that of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Piece, TableEntry
from megalith.checkpoint.saved_rows import read_chunk, read_pending, read_removed
from megalith.errors import CheckpointError, UsageError
from megalith.routing import Router
from megalith.shards.part import ShardsPart
from megalith.storage.store import Store, read_ahead
from megalith.table import Chunk, TableConfig


@dataclass(frozen=True)
class TableLoad:
    """A table to load."""

    name: str  # Its name in its shards
    entries: Sequence[TableEntry]  # Its entries in the base and the deltas
    router: Router | None  # The routing of the model; None: the part owns all ids
    keeps_state: bool  # Whether optimizer state is loaded as it was saved
    fresh: bool  # Whether optimizer state starts fresh instead
    count: int | None  # The update count of every row, where the checkpoint does not hold it
    alone: bool  # Whether there is one rank


def check_part_fits(part: ShardsPart, load: TableLoad) -> None:
    """Raise TableFullError if the rows do not fit into the only part."""
    part.shards.local[load.name].check_fits(load.entries[-1].live)


def load_part(
    part: ShardsPart, store: Store, load: TableLoad, on_rows: Callable[[int], None] | None
) -> tuple[int, int]:
    """Replace the rows of a table."""
    table = part.shards.local[load.name]
    table.clear()
    if load.alone and part.count == 1:
        live, limit = load.entries[-1].live, table.engine_impl.row_limit
        table.reserve(live if limit is None else min(live, limit))
    done = 0
    for entry in load.entries:
        # A delta does not save ids that it removes. Removing first keeps the table within its Capacity.
        for piece in entry.removed:
            table.remove(read_removed(store, piece))
        pieces = relevant_pieces(entry, load.router, part.index)
        # One thread reads and decodes files while this one inserts the rows of those before.
        chunks = read_ahead(partial(read_chunk, store, entry=entry), pieces)
        for piece, chunk in zip(pieces, chunks, strict=True):
            if load.router is not None:
                chunk = chunk.select(load.router.owner(chunk.ids) == part.index)
            table.restore(chunk if load.keeps_state else _with_state(chunk, table.config, load))
            done += piece.rows
            if on_rows is not None:
                on_rows(done)
    for piece in load.entries[-1].pending:
        table.restore_pending(*_owned(load.router, part.index, *read_pending(store, piece)))
    return done, len(table)


def load_on_server(part: ShardsPart, store: Store, load: TableLoad) -> tuple[int, int]:
    """Fetch and verify the files that a server needs, and load them."""
    own = object()
    if part.loads.setdefault(load.name, own) is not own:
        raise UsageError(f"table {load.name!r} is being loaded on server {part.index}: load it again later")
    try:
        return _load_files(part, store, load)
    finally:
        del part.loads[load.name]


def _load_files(part: ShardsPart, store: Store, load: TableLoad) -> tuple[int, int]:
    last = load.entries[-1].pending
    pieces = [p for entry in load.entries for p in relevant_pieces(entry, load.router, part.index)]
    removed = [p for entry in load.entries for p in entry.removed]
    with store.local_copy([p.file for p in (*pieces, *removed, *last)], CheckpointError) as local:
        return load_part(part, local, load, None)


def relevant_pieces(entry: TableEntry, router: Router | None, index: int) -> list[Piece]:
    """Return the files that may hold rows of a part: only its own if the routing is the same."""
    saved = entry.routing
    if router is None:
        return entry.pieces
    same = (saved.dist_type, saved.num_shards, saved.block_size, saved.skip_first) == (
        router.mode,
        router.num_shards,
        router.block_size,
        router.skip_first,
    )
    return [piece for piece in entry.pieces if not same or piece.shard == index]


def check_pending(store: Store, piece: Piece) -> None:
    """Check a file of counted ids."""
    read_pending(store, piece)


def _with_state(chunk: Chunk, config: TableConfig, load: TableLoad) -> Chunk:
    """Return rows with the optimizer state that the table keeps: fresh, or saved apart from counts."""
    n, columns = chunk.ids.numel(), config.state_columns
    state = {c.key: torch.full((n, c.end - c.start), c.initial, device="cpu") for c in columns}
    if not load.fresh:
        counts = {
            c.key: torch.full((n, 1), float(load.count or 0), device="cpu")
            for c in columns
            if c.name == "count"
        }
        state |= counts | {key: values for key, values in chunk.state.items() if key in state}
    return replace(chunk, state=state)


def _owned(router: Router | None, index: int, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    if router is None:
        return ids, counts
    own = router.owner(ids) == index
    return ids[own], counts[own]
