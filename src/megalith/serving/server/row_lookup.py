"""Row lookup: the rows of ids, with the inputs and outputs of Monolith's two signatures.

    signature     inputs                                    outputs
    lookup        {table}: int64 [n], for any tables        {table}: float32 [n, dim]
    raw_lookup    id: int64 [n], id_split: int64 [T + 1]    flat_emb: float32 [sum of n_t * dim_t]

raw_lookup has the ids of all T tables of the model, concatenated in the order of the sorted table names; the
ids of table t are `id[id_split[t]:id_split[t + 1]]`. Its output has the rows in the same order, flat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.export.servable import Servable
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.sync.push_messages import split_by_table
from megalith.serving.wire_names import RAW_LOOKUP

FLAT_ROWS = "flat_emb"


def lookup_rows(
    servable: Servable,
    inputs: Mapping[str, Tensor | Strings],
    *,
    signature: str,
    outputs: Sequence[str] = (),
    max_bytes: int,
) -> dict[str, Tensor]:
    """Return the rows of the ids of a request."""
    dims = servable.signature.dims
    raw = signature == RAW_LOOKUP
    ids = _raw_ids(inputs, dims) if raw else _ids_by_table(inputs, dims)
    _check_outputs(outputs, [FLAT_ROWS] if raw else list(ids), signature)
    size = sum(4 * each.numel() * dims[table] for table, each in ids.items())
    if size > max_bytes:
        raise InputError(
            f"{signature}: the rows would take {size} bytes, more than the limit of {max_bytes}; "
            "request fewer ids"
        )
    if raw:
        flat = [servable.lookup(table, each).reshape(-1) for table, each in ids.items()]
        return {FLAT_ROWS: torch.cat([torch.empty(0, device="cpu"), *flat])}
    return {table: servable.lookup(table, each) for table, each in ids.items() if table in (outputs or ids)}


def _ids_by_table(inputs: Mapping[str, Tensor | Strings], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the inputs of `lookup` by table; raise InputError."""
    found = {}
    for table, ids in inputs.items():
        if table not in dims:
            raise InputError(f"input {table[:100]!r} is unknown; lookup takes {_shorten(dims)}")
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
            raise InputError(f"input {table!r} must be int64 [ids]")
        found[table] = ids
    return found


def _raw_ids(inputs: Mapping[str, Tensor | Strings], dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the inputs of `raw_lookup` by table, for all tables in their order; raise InputError."""
    left = dict(inputs)
    tables = sorted(dims)
    ids = split_by_table(left, "id", "id_split", len(tables))
    if left:
        raise InputError(f"input {min(left)[:100]!r} is unknown; raw_lookup takes id, id_split")
    return dict(zip(tables, ids, strict=True))


def _check_outputs(names: Sequence[str], known: Sequence[str], signature: str) -> None:
    for name in names:
        if name not in known:
            raise InputError(
                f"output {name[:100]!r} is unknown; this {signature} returns {_shorten(known) or 'nothing'}"
            )


def _shorten(names: Mapping[str, int] | Sequence[str]) -> str:
    return ", ".join(list(names)[:20])
