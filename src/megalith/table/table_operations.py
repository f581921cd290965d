"""Operations over all rows of a table: merging two tables and removing rows by a predicate.

They are made of the calls of `Table`, so they work with any engine and between engines. Other threads may
read the tables meanwhile, but must not write to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table.table_data import Chunk

if TYPE_CHECKING:
    from megalith.table.table import Table

ON_CONFLICT = ("newer", "ours", "theirs")
MERGE_ROWS = 65536
"""Number of rows that are read and written at once."""

Predicate = Callable[[Chunk], Tensor]


class MergeCounts(NamedTuple):
    """What happened to the rows of the other table in a merge.

    Attributes:
        added: Rows of ids that had no row.
        replaced: Rows that replaced a row of the same id.
        kept: Rows that were not taken, because the row of the same id stayed.
    """

    added: int
    replaced: int
    kept: int


def merge_tables(table: Table, other: Table, on_conflict: str) -> MergeCounts:
    """Copy the rows of another table into a table; see `Table.merge`."""
    _check_merge(table, other, on_conflict)
    own_ids, own_times = _times(table) if on_conflict == "newer" else (None, None)
    added = replaced = kept = 0
    for chunk in other.scan(MERGE_ROWS):
        exists = table.engine_impl.has_rows(table.checks.ids(chunk.ids)).to(chunk.ids.device)
        if on_conflict == "ours":
            taken = ~exists
        elif own_ids is None or own_times is None or own_ids.numel() == 0:
            taken = torch.ones_like(exists)
        else:
            at = torch.searchsorted(own_ids, chunk.ids).clamp(max=own_ids.numel() - 1)
            taken = ~exists | (chunk.time > own_times[at])
        added += int((~exists).sum())
        replaced += int((taken & exists).sum())
        kept += int((~taken).sum())
        table.restore(chunk.select(taken))
    table.restore_pending(*other.pending())
    return MergeCounts(added, replaced, kept)


def _check_merge(table: Table, other: Any, on_conflict: Any) -> None:
    where = f"table {table.name!r}: merge"
    if not isinstance(other, type(table)) or other is table:
        raise InputError(f"{where} takes another Table, got {'itself' if other is table else repr(other)}")
    if not isinstance(on_conflict, str) or on_conflict not in ON_CONFLICT:
        raise InputError(f"{where}: on_conflict must be one of {', '.join(ON_CONFLICT)}, got {on_conflict!r}")
    own, theirs = _columns(table), _columns(other)
    if own != theirs:
        raise InputError(
            f"{where}: the rows differ: dims and states are {own}, and {theirs} in table {other.name!r}"
        )


def _columns(table: Table) -> tuple[list[int], dict[str, int]]:
    dims = [segment.dim for segment in table.config.segments]
    return dims, {column.key: column.end - column.start for column in table.config.state_columns}


def _times(table: Table) -> tuple[Tensor, Tensor]:
    """Return all ids in increasing order, and their last-update times."""
    ids, times, at = (
        [torch.empty(0, dtype=torch.int64, device="cpu")],
        [torch.empty(0, dtype=torch.int64, device="cpu")],
        0,
    )
    with table.engine_impl.scanning():
        while at >= 0:
            chunk, at = table.engine_impl.scan_part(at, MERGE_ROWS, rows=False)
            ids.append(chunk.ids)
            times.append(chunk.time)
    order = torch.argsort(torch.cat(ids))
    return torch.cat(ids)[order], torch.cat(times)[order]


def unwanted_ids(table: Table, predicate: Predicate, chunk_size: int) -> Tensor:
    """Find the ids whose rows a predicate does not keep; see `Table.filter`."""
    # predicate: takes a chunk and returns which rows stay, bool [n].
    if not callable(predicate) or isinstance(predicate, type):
        raise InputError(f"table {table.name!r}: filter takes a function of a Chunk, got {predicate!r}")
    unwanted = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for chunk in table.scan(chunk_size):
        keep = predicate(chunk)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != chunk.ids.shape:
            got = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else repr(keep)
            raise InputError(
                f"table {table.name!r}: filter: the predicate must return a bool tensor "
                f"[{chunk.ids.numel()}] of rows to keep, got {got}"
            )
        unwanted.append(chunk.ids[~keep])
    return torch.cat(unwanted)
