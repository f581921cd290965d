"""A collection's rows as a state_dict carries them: plain tensors by table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.table import Chunk, Table


def rows_of(table: Table) -> dict[str, Any]:
    """All rows of a table: ids, weights, optimizer state, last-update times."""
    chunks = list(table.scan())
    if not chunks:
        chunks = [table.empty_chunk()]
    keys = chunks[0].state
    return {
        "ids": torch.cat([c.ids for c in chunks]),
        "rows": torch.cat([c.rows for c in chunks]),
        "state": {key: torch.cat([c.state[key] for c in chunks]) for key in keys},
        "time": torch.cat([c.time for c in chunks]),
    }


def set_rows(tables: Mapping[str, Table], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces all rows of all tables. Raises InputError unless the tables are the same."""
    if set(saved) != set(tables):
        raise InputError(f"state_dict holds tables {sorted(saved)}, this collection has {sorted(tables)}")
    for name, table in tables.items():
        rows: Tensor = saved[name]["rows"]
        if rows.dim() != 2 or rows.shape[1] != table.dim:
            raise InputError(f"table {name!r}: rows of {list(rows.shape)} do not fit dim {table.dim}")
    for name, table in tables.items():
        own = saved[name]
        table.clear()
        table.restore(Chunk(own["ids"], own["rows"], own["state"], own["time"]))
