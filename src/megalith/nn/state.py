"""A collection's rows as a state_dict carries them: plain tensors by table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table import Chunk, Table
from megalith.table.records import MAX_TIME


def rows_of(table: Table) -> dict[str, Any]:
    """All rows of a table: ids, weights, optimizer state, last-update times."""
    chunks = list(table.scan())
    if not chunks:
        chunks = [table.new_chunk(0)]
    keys = chunks[0].state
    return {
        "ids": torch.cat([c.ids for c in chunks]),
        "rows": torch.cat([c.rows for c in chunks]),
        "state": {key: torch.cat([c.state[key] for c in chunks]) for key in keys},
        "time": torch.cat([c.time for c in chunks]),
    }


def set_rows(tables: Mapping[str, Table], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces all rows of all tables.

    Raises InputError, before anything is written, unless tables, dims and optimizers are the same.
    """
    if set(saved) != set(tables):
        raise InputError(f"state_dict holds tables {sorted(saved)}, this collection has {sorted(tables)}")
    chunks = {name: _chunk(table, saved[name]) for name, table in tables.items()}
    for name, table in tables.items():
        table.clear()
        table.restore(chunks[name])


def _chunk(table: Table, saved: Mapping[str, Any]) -> Chunk:
    """What `rows_of` gave, on the CPU, if it fits the table."""
    shapes = {"rows": table.dim} | {c.key: c.end - c.start for c in table.config.state_columns}
    state: Mapping[str, Tensor] = saved["state"]
    if set(state) != shapes.keys() - {"rows"}:
        raise InputError(
            f"table {table.name!r}: state_dict holds optimizer state {sorted(state)}, this table keeps "
            f"{sorted(shapes.keys() - {'rows'})}: the optimizers differ"
        )
    ids, time = saved["ids"].cpu(), saved["time"].cpu()
    n = ids.numel()
    for name, columns in shapes.items():
        piece = saved["rows"] if name == "rows" else state[name]
        if tuple(piece.shape) != (n, columns) or piece.dtype != torch.float32:
            raise InputError(
                f"table {table.name!r}: state_dict holds {name} of {piece.dtype} {list(piece.shape)}, "
                f"this table has float32 [{n}, {columns}]"
            )
    good = time.dtype == torch.int64 and tuple(time.shape) == (n,)
    if not good or (n and not 0 <= int(time.min()) <= int(time.max()) <= MAX_TIME):
        raise InputError(f"table {table.name!r}: state_dict holds times that are not {n} numbers of seconds")
    table.check_ids(ids)
    return Chunk(ids, saved["rows"].cpu(), {key: piece.cpu() for key, piece in state.items()}, time)
