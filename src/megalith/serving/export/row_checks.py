"""Row checks: whether ids and rows fit an exported model, before they are looked up or written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError
from megalith.ops.checks import all_finite, kind, mapping
from megalith.serving.export.overlay import RowsByTable
from megalith.serving.export.signature import ENTRY, Signature


def check_ids(signature: Signature, table: str, ids: Tensor) -> None:
    """Check ids of a table."""
    # ids: int64 [n].
    if not isinstance(table, str) or table not in signature.tables:
        known = ", ".join(map(repr, signature.tables))
        raise UnknownNameError(f"unknown table {table!r} (known: {known})")
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_cpu:
        raise InputError(f"table {table!r}: ids must be int64 [n] on the CPU, got {_describe(ids)}")
    shard = signature.shard
    if shard is None:
        return
    owners = signature.tables[table].router().owner(ids)
    if bool((owners != shard).any()):
        wrong = int(ids[owners != shard][0])
        raise InputError(
            f"table {table!r}: id {wrong} belongs to another part than {signature.part} of "
            f"{signature.sub_graph_num}, version {signature.version}"
        )


def check_rows(signature: Signature, rows: RowsByTable, removed: Mapping[str, Tensor]) -> None:
    """Check rows to write and ids to remove."""
    # rows: table -> (ids int64 [n], rows float32 [n, dim]); removed: table -> ids int64 [n].
    mapping(rows, "rows", '{"user": (ids, rows)}')
    mapping(removed, "removed", '{"user": ids}')
    if signature.part == ENTRY and (rows or removed):
        raise InputError(f"{signature.name} holds no rows: push them to the ps parts")
    for table, pair in rows.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"rows: table {table!r} must have a pair (ids, rows), got {kind(pair)}")
        ids, values = pair
        check_ids(signature, table, ids)
        shape = [ids.numel(), signature.tables[table].dim]
        is_cpu = isinstance(values, Tensor) and values.is_cpu
        if not is_cpu or values.dtype != torch.float32 or list(values.shape) != shape:
            raise InputError(
                f"table {table!r}: rows must be float32 {shape} on the CPU, got {_describe(values)}"
            )
        if not all_finite(values):
            raise InputError(f"table {table!r}: rows hold NaN or Inf")
    for table, ids in removed.items():
        check_ids(signature, table, ids)


def _describe(given: object) -> str:
    if not isinstance(given, Tensor):
        return kind(given)
    return f"{given.dtype} {list(given.shape)}" + ("" if given.is_cpu else f" on {given.device}")
