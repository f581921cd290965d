"""sharding_sparse_fids: splits the ids of all features by table and server, in Monolith's layout encoding.

The encoding is Monolith's version 5: `fid_offset` packs the number of a list (table * servers + server) and
an element of that list into one integer, `nfl_offset` marks shared features in bit 31. It is for models that
come from Monolith; Megalith's own modules pool without it. `layout_ops` reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.compat.monolith.feature_configs import FeatureConfigs
from megalith.compat.monolith.layout_plan import layout_plan
from megalith.errors import InputError
from megalith.library import define_op, new_size
from megalith.ops import checks
from megalith.ops.bucketing import _dedup
from megalith.ragged import Ragged
from megalith.routing import Router

SHARED = 1 << 31
"""The bit of nfl_offset that marks a shared feature."""


class ShardedFids(NamedTuple):
    """Result of `sharding_sparse_fids`. T tables and F features are numbered in the order of their names."""

    fid_list: list[Tensor]
    """T * servers x int64 [k]: list t * servers + p has the ids that table t looks up on server p."""
    fid_list_row_split: list[Tensor]
    """T * servers x int64 [features of the table + 1]: where the ids of each feature begin in the list."""
    fid_offset: Tensor
    """int64 [n]: for each id the list (high 32 bits) and the element of it where its row begins."""
    feature_offset: Tensor
    """int64 [rows + 1]: where the ids of each row of each feature begin."""
    nfl_offset: Tensor
    """int64 [F + 1]: each feature's first row, plus 2^31 if shared; then the length of feature_offset."""
    batch_size: int
    nfl_size: Tensor
    """int64 [1]: the length of nfl_offset."""
    feature_size: Tensor
    """int64 [1]: the length of feature_offset."""
    fid_size: Tensor
    """int64 [1]: the length of fid_offset."""
    emb_size: Tensor
    """int64 [T * servers]: the number of elements of the rows of each list."""


def sharding_sparse_fids(
    columns: Mapping[str, Ragged],
    ps_num: int | Router,
    feature_cfgs: FeatureConfigs,
    unique: bool = True,
    *,
    shared: Collection[str] = (),
    batch_size: int | None = None,
) -> ShardedFids:
    """Splits the ids of all features by table and server, and records where each id finds its row.

    Args:
        columns: ids by feature. Columns without a config are ignored; a feature without a column counts as
            a shared feature without ids.
        ps_num: the number of servers for roundrobin (0 counts as 1), or a Router.
        feature_cfgs: the features and their tables.
        unique: whether an id is sent only once per feature and server.
        shared: features with one row for the whole batch.
        batch_size: required if every feature is shared.

    Raises:
        InputError: the columns do not match the config or each other.
    """
    if not isinstance(feature_cfgs, FeatureConfigs) or not isinstance(columns, Mapping):
        got = f"{checks.kind(columns)} and {checks.kind(feature_cfgs)}"
        raise InputError(f"columns must be a dict and feature_cfgs FeatureConfigs, got {got}")
    router = ps_num
    if not isinstance(router, Router):
        router = Router("roundrobin", max(1, checks.integer(ps_num, "ps_num", least=0)))
    checks.flag(unique, "unique")
    if not isinstance(shared, list | tuple | set | frozenset | dict) or not all(
        isinstance(name, str) for name in shared
    ):
        raise InputError(f"shared must be a list of names of features, got {checks.kind(shared)}")
    names = list(feature_cfgs.feature_names)
    if not names:
        raise InputError("feature_cfgs has no features")
    for name in names:
        if name in columns and not isinstance(columns[name], Ragged):
            raise InputError(f"columns[{name!r}] must be a Ragged, got {checks.kind(columns[name])}")
    device = next((columns[n].values.device for n in names if n in columns), torch.device("cpu"))
    empty = torch.zeros(2, dtype=torch.int64, device=device)
    taken = [columns[n] if n in columns else Ragged(empty[:0], empty) for n in names]
    one_row = [n in shared or n not in columns for n in names]
    batch = None if batch_size is None else checks.integer(batch_size, "batch_size", least=0)
    for name, column, alone in zip(names, taken, one_row, strict=True):
        rows = column.row_splits.shape[0] - 1
        batch = rows if batch is None and not alone else batch
        if rows != (1 if alone else batch):
            wanted = "1 row because it is shared" if alone else f"{batch} rows like the others"
            raise InputError(f"columns[{name!r}] must have {wanted}, got {rows}")
    if batch is None:
        raise InputError("batch_size is required when every feature is shared")
    values = [checks.int64(c.values, f"columns[{n!r}].values") for n, c in zip(names, taken, strict=True)]
    lists = len(feature_cfgs.table_names) * router.num_shards
    *outputs, fid_offset, feature_offset, nfl_offset, emb_size = _shard(
        values,
        [c.row_splits for c in taken],
        [int(s) for s in one_row],
        list(router.rule),
        router.num_shards,
        unique,
        feature_cfgs.encoded,
    )
    nfl_size, feature_size, fid_size = (
        torch.full((1,), t.shape[0], dtype=torch.int64, device=device)
        for t in (nfl_offset, feature_offset, fid_offset)
    )
    return ShardedFids(
        fid_list=outputs[:lists],
        fid_list_row_split=outputs[lists:],
        fid_offset=fid_offset,
        feature_offset=feature_offset,
        nfl_offset=nfl_offset,
        batch_size=batch,
        nfl_size=nfl_size,
        feature_size=feature_size,
        fid_size=fid_size,
        emb_size=emb_size,
    )


def _shard_any(
    values: list[Tensor],
    splits: list[Tensor],
    shared: list[int],
    rule: list[int],
    servers: int,
    unique: bool,
    encoded: str,
) -> list[Tensor]:
    plan = layout_plan(encoded)
    device = values[0].device
    # Features in the order of (table, feature), so that a table's ids of one server are contiguous.
    by_table = sorted(range(len(values)), key=lambda f: (plan.tables[f], f))
    sizes = [values[f].shape[0] for f in by_table]
    ids = torch.cat([values[f] for f in by_table])
    cuts = torch.tensor([0, *sizes], device=device).cumsum(0)
    found, _, counts, index, _ = _dedup(ids, cuts, None, rule, servers, unique, [], "ids")

    counts = counts.view(servers, len(by_table))
    dims = torch.tensor([plan.dims[f] for f in by_table], device=device)
    elements = counts * dims
    table_of = torch.tensor([plan.tables[f] for f in by_table], device=device)
    tables = plan.num_tables
    fids: list[Tensor] = []
    row_splits: list[Tensor] = []
    base = torch.zeros_like(counts)  # elements of the list before a (server, feature)
    emb_size = counts.new_zeros(tables, servers)
    starts = (torch.cumsum(counts.flatten(), 0) - counts.flatten()).view_as(counts)
    for table in range(tables):
        members = (table_of == table).nonzero().flatten()
        inside = elements[:, members]
        base[:, members] = torch.cumsum(inside, 1) - inside
        emb_size[table] = inside.sum(1)
        for server in range(servers):
            lengths = counts[server, members]
            begin = int(starts[server, members[0]])
            fids.append(found[begin : begin + int(lengths.sum())].clone())
            row_splits.append(pad(torch.cumsum(lengths, 0), (1, 0)))
    if bool((emb_size >= 1 << 32).any()):
        raise InputError("columns: a list of rows would exceed the 2^32 elements that fid_offset can address")

    # For each distinct id: the list it is in and the element where its row begins.
    bucket = torch.repeat_interleave(torch.arange(counts.numel(), device=device), counts.flatten())
    rank = torch.arange(found.shape[0], device=device) - starts.flatten()[bucket]
    servers_of = torch.arange(servers, device=device)[:, None].expand_as(counts)
    number = (table_of * servers + servers_of).flatten()[bucket]
    packed = number << 32 | base.flatten()[bucket] + rank * dims.expand_as(counts).flatten()[bucket]

    pieces = dict(zip(by_table, packed[index].split(sizes), strict=True))
    fid_offset = torch.cat([pieces[f] for f in range(len(values))])
    lengths = torch.cat([torch.diff(s) for s in splits])
    feature_offset = pad(torch.cumsum(lengths, 0), (1, 0))
    *rows, total = accumulate((s.shape[0] - 1 for s in splits), initial=0)
    first_rows = [r + (SHARED if s else 0) for r, s in zip(rows, shared, strict=True)]
    nfl_offset = torch.tensor([*first_rows, total + 1], device=device)
    return [*fids, *row_splits, fid_offset, feature_offset, nfl_offset, emb_size.flatten()]


def _shard_fake(
    values: list[Tensor],
    splits: list[Tensor],
    shared: Any,
    rule: Any,
    servers: int,
    unique: bool,
    encoded: str,
) -> list[Tensor]:
    plan = layout_plan(encoded)
    new = values[0].new_empty
    per_table = [sum(t == table for t in plan.tables) for table in range(plan.num_tables)]
    return [
        *(new(new_size()) for _ in range(plan.num_tables * servers)),
        *(new(n + 1) for n in per_table for _ in range(servers)),
        new(sum(v.shape[0] for v in values)),
        new(sum(s.shape[0] - 1 for s in splits) + 1),
        new(len(values) + 1),
        new(plan.num_tables * servers),
    ]


_shard = define_op(
    "shard_fids(Tensor[] values, Tensor[] splits, int[] shared, int[] rule, int servers, bool unique,"
    " str encoded) -> Tensor[]",
    native=_shard_any,
    twin=_shard_any,
    fake=_shard_fake,
)
