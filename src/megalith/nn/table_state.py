"""The rows of a collection in a state_dict: plain tensors per table, under a key for their rank.

torch.distributed.checkpoint (DCP) descends into every mapping and writes each leaf once for all ranks, by its
path; it loads a tensor only into one of the same size. Hence the rank in the path, and the tuple, which DCP
treats as a leaf with any content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.distributed.ranks import current_rank, world_size
from megalith.errors import InputError, UsageError
from megalith.shards import Shards
from megalith.table import Chunk, Table, TableConfig
from megalith.table.table_data import MAX_TIME


def packed(state: dict[str, Any]) -> dict[str, tuple[dict[str, Any]]]:
    """Returns the state of this process in the form for `state_dict`."""
    return {_key(): (state,)}


def unpacked(saved: Any) -> Any:
    """Returns the argument of `packed`: the state of this process, or the only one.

    Raises:
        UsageError: If there are only states of other ranks.
        InputError: If it is not a state of an EmbeddingCollection.
    """
    if isinstance(saved, Mapping):
        for found in (saved.get(_key()), *(saved.values() if len(saved) == 1 else ())):
            if isinstance(found, tuple) and len(found) == 1:
                return found[0]
        if saved:
            raise UsageError(f"this state_dict holds {sorted(saved)}, not {_key()!r}")
    raise InputError(
        f"this state_dict holds a {type(saved).__name__} instead of the rows of an EmbeddingCollection"
    )


def _key() -> str:
    """Returns the key of this process's state. DCP prints it if it is missing, so it contains the remedy."""
    here = f"rank {current_rank()} of {world_size()}"
    return f"{here} (at another world size: checkpoint.save and checkpoint.load)"


def rows_of(table: Table) -> dict[str, Any]:
    """Returns all rows of a table: ids, weights, optimizer state, last-update times."""
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


def no_rows(config: TableConfig) -> dict[str, Any]:
    """Returns what `rows_of` returns for a table without rows."""
    return {
        "ids": torch.empty(0, dtype=torch.int64),
        "rows": torch.empty(0, config.dim),
        "state": {column.key: torch.empty(0, column.end - column.start) for column in config.state_columns},
        "time": torch.empty(0, dtype=torch.int64),
    }


def set_rows(shards: Shards, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Replaces all rows of the tables of this process.

    Args:
        shards: The shards to write to.
        saved: The result of `rows_of` for each table.

    Raises:
        InputError: If tables, dims or optimizers differ; nothing was written.
        UsageError: If other ranks own some of the rows; nothing was written.
    """
    tables = shards.local
    if set(saved) != set(tables):
        raise InputError(f"state_dict holds tables {sorted(saved)}, this collection has {sorted(tables)}")
    chunks = {name: _chunk(table, saved[name]) for name, table in tables.items()}
    for name, chunk in chunks.items():
        router = shards.router(name)
        if router is not None and bool((router.owner(chunk.ids) != shards.rank).any()):
            raise UsageError(
                f"table {name!r}: this state_dict holds rows that {router} assigns to other ranks than "
                f"{shards.rank}: use checkpoint.save, and checkpoint.load with reroute=True"
            )
    for name, table in tables.items():
        table.clear()
        table.restore(chunks[name])


def _chunk(table: Table, saved: Mapping[str, Any]) -> Chunk:
    """Returns the result of `rows_of` as a chunk on the CPU; raises InputError if the table differs."""
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
        raise InputError(
            f"table {table.name!r}: time in the state_dict must be int64 [{n}], seconds from 0 to {MAX_TIME}"
        )
    table.checks.ids(ids)
    return Chunk(ids, saved["rows"].cpu(), {key: piece.cpu() for key, piece in state.items()}, time)
