"""The rows of a collection in a state_dict: tensors only, under keys with their rank.

    key (after the collection's prefix)          tensor
    rank R of W (at another world size: ...)     int64 [3]: global step, number of shards, this shard
    rank R of W/TABLE/ids                        int64 [n]
    rank R of W/TABLE/rows                       float32 [n, dim]
    rank R of W/TABLE/state/SEGMENT/NAME         float32 [n, size], one per optimizer state
    rank R of W/TABLE/time                       int64 [n], seconds
    rank R of W/TABLE/count, step                int64 [n] each, if a policy counts updates
    rank R of W/TABLE/pending_ids, _counts       int64 [k] each, if `MinCount` counts ids without a row

torch.distributed.checkpoint (DCP) writes each key once for all ranks, hence the rank in the keys. It prints
the first key that is missing, which is the one with the remedy. R and W are those of the default process
group; those of the shards are in the first tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.distributed.ranks import current_rank, world_size
from megalith.errors import InputError, UsageError
from megalith.nn.state_savers import check_state_caller
from megalith.nn.state_tensor import StateTensor
from megalith.shards import Shards
from megalith.table import Chunk, MinCount, Table, TableConfig
from megalith.table.table_data import MAX_TIME

_REMEDY = " (at another world size: checkpoint.save and checkpoint.load)"
_NAMES = r"ids|rows|time|count|step|pending_ids|pending_counts|state/[0-9]+/[^/]+"
_KEY = re.compile(rf"(rank [0-9]+ of [0-9]+)(?:/(.+)/({_NAMES})| \(.*\))", re.DOTALL)


def state_key() -> str:
    """Return the key of the first tensor of this process."""
    return _label() + _REMEDY


def is_state_path(name: str) -> bool:
    """Return whether a name is the beginning of a key."""
    return re.match(r"rank [0-9]+ of [0-9]+[ /]", name) is not None


class StatePath:
    """Stands for a key in torch's helpers, which split keys at dots and read the parts as attributes."""

    def __getattr__(self, name: str) -> StatePath:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


def collect_state(
    shards: Shards | None, configs: Mapping[str, TableConfig], global_step: int
) -> dict[str, Tensor]:
    """Return the tensors of this process."""
    if shards is None:
        size, rank = world_size(), current_rank()
        tables = {name: _no_rows(config) for name, config in configs.items()}
    else:
        _check_here(shards)
        size, rank = shards.world_size, shards.rank
        if size > 1:
            check_state_caller(size)
        shards.flush()
        tables = {name: _rows_of(table) for name, table in shards.local.items()}
    found: dict[str, Tensor] = {state_key(): torch.tensor([global_step, size, rank], device="cpu")}
    for name, pieces in tables.items():
        found |= {f"{_label()}/{name}/{piece}": StateTensor.of(x) for piece, x in pieces.items()}
    return found


def restore_state(shards: Shards, saved: Mapping[str, Any]) -> int:
    """Replace all rows of the tables of this process."""
    _check_here(shards)
    label = _select(shards, saved)
    tables: dict[str, dict[str, Tensor]] = {}
    header: Tensor | None = None
    for key, value in saved.items():
        found = _KEY.fullmatch(key)
        if found is None or found[1] != label:
            continue
        if not isinstance(value, Tensor):
            raise InputError(f"this state_dict holds a {type(value).__name__} under {key!r}, not a tensor")
        plain = value.plain() if isinstance(value, StateTensor) else value
        if found[2] is None:
            header = plain
        else:
            tables.setdefault(found[2], {})[found[3]] = plain
    if header is None or header.dtype != torch.int64 or tuple(header.shape) != (3,):
        raise InputError(f"this state_dict holds no int64 [3] under {label + _REMEDY!r}")
    global_step, size, rank = header.tolist()
    if (size, rank) != (shards.world_size, shards.rank):
        raise UsageError(
            _another_rank(f"rank {rank} of {size}", f"rank {shards.rank} of {shards.world_size}")
        )
    _set_rows(shards, tables)
    return int(global_step)


def is_state_key(key: str) -> bool:
    """Return whether a key is one of `collect_state`."""
    return _KEY.fullmatch(key) is not None


def _check_here(shards: Shards) -> None:
    """Raise UsageError if the rows are in other processes."""
    if not shards.holds_rows:
        raise UsageError(
            "the rows are on parameter servers, and a state_dict holds those of this process: use "
            "checkpoint.save and checkpoint.load; for dense weights alone, the state_dict of their modules"
        )


def _label() -> str:
    return f"rank {current_rank()} of {world_size()}"


def _another_rank(there: str, here: str) -> str:
    return (
        f"this state_dict holds the rows of {there}, this is {here}: use checkpoint.save and "
        "checkpoint.load, which move rows to their owners"
    )


def _select(shards: Shards, saved: Mapping[str, Any]) -> str:
    """Return the rank whose rows this process takes: its own, or a single process with all rows."""
    labels = sorted({found[1] for found in map(_KEY.fullmatch, saved) if found is not None})
    if _label() in labels:
        return _label()
    whole = "rank 0 of 1"
    if labels == [whole] and shards.world_size == 1:
        return whole
    raise UsageError(_another_rank(", ".join(labels), _label()))


# ---- rows


def _rows_of(table: Table) -> dict[str, Tensor]:
    """Return all rows of a table: ids, weights, optimizer state, last-update times."""
    chunks = list(table.scan())
    if not chunks:
        return _no_rows(table.config) | _pending(table)
    state = {f"state/{key}": torch.cat([c.state[key] for c in chunks]) for key in chunks[0].state}
    return {
        "ids": torch.cat([c.ids for c in chunks]),
        "rows": torch.cat([c.rows for c in chunks]),
        **state,
        "time": torch.cat([c.time for c in chunks]),
        **_counts([c.count for c in chunks], [c.step for c in chunks]),
        **_pending(table),
    }


def _counts(counts: list[Tensor | None], steps: list[Tensor | None]) -> dict[str, Tensor]:
    """Return the counts and steps of a counted table by name."""
    columns = {"count": counts, "step": steps}
    return {
        name: torch.cat([c for c in column if c is not None])
        for name, column in columns.items()
        if None not in column
    }


def _pending(table: Table) -> dict[str, Tensor]:
    """Return the ids that an admission policy counts, and their counts, if it does."""
    if "pending_ids" not in _extra_names(table.config):
        return {}
    ids, counts = table.pending()
    return {"pending_ids": ids, "pending_counts": counts}


def _no_rows(config: TableConfig) -> dict[str, Tensor]:
    """Return what `_rows_of` returns for a table without rows."""
    state = {
        f"state/{column.key}": torch.empty(0, column.end - column.start, dtype=torch.float32, device="cpu")
        for column in config.state_columns
    }
    return {
        "ids": torch.empty(0, dtype=torch.int64, device="cpu"),
        "rows": torch.empty(0, config.dim, dtype=torch.float32, device="cpu"),
        **state,
        "time": torch.empty(0, dtype=torch.int64, device="cpu"),
        **{name: torch.empty(0, dtype=torch.int64, device="cpu") for name in _extra_names(config)},
    }


def _extra_names(config: TableConfig) -> list[str]:
    """Return the names of the tensors that only policies need."""
    counted = ["count", "step"] if config.counted else []
    return counted + (["pending_ids", "pending_counts"] if isinstance(config.admission, MinCount) else [])


def _set_rows(shards: Shards, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    tables = shards.local
    if set(saved) != set(tables):
        raise InputError(f"state_dict holds tables {sorted(saved)}, this collection has {sorted(tables)}")
    chunks = {name: _chunk(table, saved[name]) for name, table in tables.items()}
    counts = {name: _counted_ids(table, saved[name]) for name, table in tables.items()}
    for name, chunk in chunks.items():
        tables[name].check_fits(chunk.ids.numel())
        router = shards.router(name)
        if router is not None and bool((router.owner(chunk.ids) != shards.rank).any()):
            raise UsageError(
                f"table {name!r}: this state_dict holds rows that {router} assigns to other ranks than "
                f"{shards.rank}: use checkpoint.save, and checkpoint.load with reroute=True"
            )
    for name, table in tables.items():
        table.clear()
        table.restore(chunks[name])
        table.restore_pending(*counts[name])


def _counted_ids(table: Table, saved: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the ids without a row and their counts on the CPU; raise InputError if they are wrong."""
    names = ("pending_ids", "pending_counts")
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    if ("pending_ids" in saved) != ("pending_counts" in saved):
        raise InputError(f"table {table.name!r}: state_dict holds only one of {' and '.join(names)}")
    ids, counts = (saved[name].cpu() if name in saved else none for name in names)
    return table.checks.ids(ids), table.checks.occurrences(ids, counts)


def _chunk(table: Table, saved: Mapping[str, Tensor]) -> Chunk:
    """Return the result of `_rows_of` as a chunk on the CPU; raise InputError if the table differs."""
    absent = sorted({"ids", "rows", "time"} - saved.keys())
    if absent:
        raise InputError(f"table {table.name!r}: state_dict lacks {', '.join(absent)}")
    shapes = {"rows": table.dim} | {f"state/{c.key}": c.end - c.start for c in table.config.state_columns}
    state = {key for key in saved if key.startswith("state/")}
    if state != shapes.keys() - {"rows"}:
        raise InputError(
            f"table {table.name!r}: state_dict holds optimizer state {sorted(state)}, this table keeps "
            f"{sorted(shapes.keys() - {'rows'})}: the optimizers differ"
        )
    ids, time = saved["ids"].cpu(), saved["time"].cpu()
    n = ids.numel()
    for name, columns in shapes.items():
        piece = saved[name]
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
    columns_of = {key.removeprefix("state/"): saved[key].cpu() for key in state}
    extra = [saved[name].cpu() if name in saved else None for name in ("count", "step")]
    return table.checks.chunk(Chunk(ids, saved["rows"].cpu(), columns_of, time, *extra))
