"""Monolith's layout ops: ids of all features parted by server, and rows assembled into layouts.

The encoding is Monolith's newest (version 5): `fid_offset` packs a list's number (table * servers + server)
and an element of that list into one integer, `nfl_offset` marks shared features in bit 31. It is for models
that come from Monolith; Megalith's own modules pool without it.

`fused_embedding_to_layout` compiles the encoding to a Pooling and runs `pool_rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.compat.monolith.feature_configs import FeatureConfigs, OutType, PoolingType
from megalith.errors import InputError
from megalith.library import apart, define, fresh, native_module, new_size
from megalith.ops import checks
from megalith.ops.bucketing import _dedup
from megalith.ops.move_runs import locate
from megalith.ops.pool_rows import _pool, _unpool, arguments
from megalith.ops.pooling import Bags, OutputSlice, covered
from megalith.ragged import Ragged
from megalith.routing import Router

SHARED = 1 << 31
_INPUTS = ("example", "example_batch", "examplebatch", "instance")

# ---- ids by server


class ShardedFids(NamedTuple):
    """What `sharding_sparse_fids` gives. T tables and F features are numbered in the order of their names."""

    fid_list: list[Tensor]
    """T * servers x int64 [k]: the ids that table t looks up on server p, at t * servers + p."""
    fid_list_row_split: list[Tensor]
    """T * servers x int64 [features of the table + 1]: where each feature's ids begin."""
    fid_offset: Tensor
    """int64 [n]: for each id the list (high 32 bits) and the element of it where its row begins."""
    feature_offset: Tensor
    """int64 [rows + 1]: where the ids of each row of each feature begin."""
    nfl_offset: Tensor
    """int64 [F + 1]: each feature's first row, plus 2^31 if shared; last the length of feature_offset."""
    batch_size: int
    nfl_size: Tensor
    """int64 [1]: the length of nfl_offset."""
    feature_size: Tensor
    """int64 [1]: the length of feature_offset."""
    fid_size: Tensor
    """int64 [1]: the length of fid_offset."""
    emb_size: Tensor
    """int64 [T * servers]: the elements of the rows of each list."""


def sharding_sparse_fids(
    columns: Mapping[str, Ragged],
    ps_num: int | Router,
    feature_cfgs: FeatureConfigs,
    unique: bool = True,
    *,
    shared: Collection[str] = (),
    batch_size: int | None = None,
) -> ShardedFids:
    """Parts the ids of all features by table and server, and says where each finds its row.

    columns: ids by feature; columns without a config are left alone, a feature without a column counts as a
    shared one without ids. ps_num: a number of servers (0 counts as 1) for roundrobin, or a Router.
    unique: an id travels once per feature and server. shared: features with one row for the whole batch.
    batch_size: needed when every feature is shared.
    """
    if not isinstance(feature_cfgs, FeatureConfigs) or not isinstance(columns, Mapping):
        got = f"{checks.kind(columns)} and {checks.kind(feature_cfgs)}"
        raise InputError(f"columns must be a dict and feature_cfgs FeatureConfigs, got {got}")
    router = ps_num
    if not isinstance(router, Router):
        router = Router("roundrobin", max(1, checks.positive(ps_num, "ps_num", least=0)))
    names = list(feature_cfgs.feature_names)
    if not names:
        raise InputError("feature_cfgs has no features")
    for name in names:
        if name in columns and not isinstance(columns[name], Ragged):
            raise InputError(f"columns[{name!r}] must be a Ragged, got {checks.kind(columns[name])}")
    device = next((columns[n].values.device for n in names if n in columns), torch.device("cpu"))
    taken = [columns[n] if n in columns else _empty_row(device) for n in names]
    one_row = [n in shared or n not in columns for n in names]
    batch = None if batch_size is None else checks.positive(batch_size, "batch_size", least=0)
    for name, column, alone in zip(names, taken, one_row, strict=True):
        rows = column.row_splits.shape[0] - 1
        batch = rows if batch is None and not alone else batch
        if rows != (1 if alone else batch):
            wanted = "1 row, as it is shared" if alone else f"{batch} rows like the others"
            raise InputError(f"columns[{name!r}] must have {wanted}, got {rows}")
    if batch is None:
        raise InputError("batch_size must be given when every feature is shared")
    values = [checks.whole(c.values, f"columns[{n!r}].values") for n, c in zip(names, taken, strict=True)]
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


def _empty_row(device: torch.device) -> Ragged:
    return Ragged(
        torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
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
    plan = _plan(encoded)
    device = values[0].device
    # Lists in the order of (table, feature), so that a table's ids of one server lie together.
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
            row_splits.append(torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)))
    if bool((emb_size >= 1 << 32).any()):
        raise InputError("columns: a list of rows would exceed the 2^32 elements that fid_offset can address")

    # Of each distinct id: the list it is in and the element where its row begins.
    bucket = torch.repeat_interleave(torch.arange(counts.numel(), device=device), counts.flatten())
    rank = torch.arange(found.shape[0], device=device) - starts.flatten()[bucket]
    servers_of = torch.arange(servers, device=device)[:, None].expand_as(counts)
    number = (table_of * servers + servers_of).flatten()[bucket]
    packed = number << 32 | base.flatten()[bucket] + rank * dims.expand_as(counts).flatten()[bucket]

    pieces = dict(zip(by_table, packed[index].split(sizes), strict=True))
    fid_offset = torch.cat([pieces[f] for f in range(len(values))])
    lengths = torch.cat([torch.diff(s) for s in splits])
    feature_offset = torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0))
    rows = [0]
    for s in splits:
        rows.append(rows[-1] + s.shape[0] - 1)
    starts_of = [r + (SHARED if s else 0) for r, s in zip(rows, shared, strict=False)]
    nfl_offset = torch.tensor([*starts_of, rows[-1] + 1], device=device)
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
    plan = _plan(encoded)
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


_shard = define(
    "shard_fids(Tensor[] values, Tensor[] splits, int[] shared, int[] rule, int servers, bool unique,"
    " str encoded) -> Tensor[]",
    native=_shard_any,
    twin=_shard_any,
    fake=_shard_fake,
)

# ---- rows to layouts


@dataclass(frozen=True)
class _Plan:
    """What a config says about every batch. Features, tables and layouts in the order of their names."""

    tables: tuple[int, ...]
    """Of each feature."""
    num_tables: int
    dims: tuple[int, ...]
    means: tuple[bool, ...]
    firsts: tuple[int, ...]
    """Of each feature: how many rows FIRSTN keeps, 0 for pooled features."""
    parts: tuple[tuple[OutputSlice, ...], ...]
    """Of each feature."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each output, the batch first."""
    order: tuple[int, ...]
    """Features as the pooling lists them: those that FIRSTN keeps come last."""
    native_parts: tuple[Any, ...]
    """Of each feature, in the native module's form."""
    covered: tuple[bool, ...]
    """Of each output: whether parts write all of it."""


@lru_cache(maxsize=64)
def _plan(encoded: str) -> _Plan:
    configs = FeatureConfigs.from_proto(encoded.encode("latin-1"))
    configs.validate()
    names, tables = configs.feature_names, configs.table_names
    features = [configs.feature_configs[n] for n in names]
    firsts = [f.max_sequence_length if f.pooling_type == PoolingType.FIRSTN else 0 for f in features]
    parts: list[list[OutputSlice]] = [[] for _ in names]
    shapes: list[tuple[int, ...]] = []
    for layout in configs.layout_names:
        out = configs.out_configs[layout]
        kind, given = out.out_type, configs.output_shapes(layout)
        column = 0
        for number, cut in enumerate(out.slice_configs):
            feature = names.index(cut.feature_name)
            inner = firsts[feature] or 1
            output = len(shapes) + (number if kind == OutType.NONE else 0)
            # CONCAT lays the k-th rows of all features side by side: [B, L, sum of widths].
            step = given[0][-1] if kind == OutType.CONCAT else 0
            parts[feature].append(
                OutputSlice(output, column, cut.start, cut.end, inner, kind == OutType.ADDN, step)
            )
            if kind == OutType.CONCAT:
                column += cut.width
            elif kind == OutType.STACK:
                column += inner * cut.width
        shapes += given
    flat = [(-1, _columns(shape)) for shape in shapes]
    bags = [Bags(torch.zeros(1), tuple(p)) for p in parts]
    return _Plan(
        tables=tuple(tables.index(f.table) for f in features),
        num_tables=len(tables),
        dims=tuple(f.dim for f in features),
        means=tuple(f.pooling_type == PoolingType.MEAN for f in features),
        firsts=tuple(firsts),
        parts=tuple(tuple(p) for p in parts),
        shapes=tuple(shapes),
        order=tuple(sorted(range(len(names)), key=lambda f: (bool(firsts[f]), f))),
        native_parts=tuple(b.native[-1] for b in bags),
        covered=tuple(covered(bags, flat)),
    )


def fused_embedding_to_layout(
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: Sequence[Tensor] | None,
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: int | Tensor,
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    *,
    parallel_flag: int = 0,
    version: int = 5,
) -> list[Tensor]:
    """Assembles rows into layouts: a tensor for each shape of each layout, layouts sorted by name.

    embeddings_list: the rows of each list of `sharding_sparse_fids`, flat or [k, dim], of one float type.
    The other tensors are that function's. Differentiable in the embeddings. parallel_flag and
    fid_list_row_split are accepted and not needed; versions other than 3 and 5, which encode alike, are
    refused. Raises InputError for offsets that lead out of a list or do not fit the config.
    """
    lists, encoding = _layout_arguments(
        embeddings_list, fid_offset, feature_offset, nfl_offset, batch_size, feature_cfgs, ps_num
    )
    _check_variant(variant_type, version)
    if torch.is_grad_enabled() and any(rows.requires_grad for rows in lists):
        outputs = list(_ToLayout.apply(*encoding, *apart(lists)))
    else:
        outputs = _layout(lists, *encoding)
    return [o.to(embeddings_list[0].dtype) for o in outputs]


def fused_embedding_to_layout_grad(
    nfl_offset: Tensor,
    feature_offset: Tensor,
    fid_offset: Tensor,
    batch_size: int | Tensor,
    embeddings_list: Sequence[Tensor],
    fid_list_row_split: Sequence[Tensor] | None,
    layout_tensors_grad: Sequence[Tensor],
    variant_type: str,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
    *,
    layout_tensors_grad_scale: float | Tensor | None = None,
    parallel_flag: int = 0,
    version: int = 5,
) -> list[Tensor]:
    """The gradient of each of the embeddings, in their shapes. The scale multiplies the layouts' first."""
    with torch.no_grad():
        lists, encoding = _layout_arguments(
            embeddings_list, fid_offset, feature_offset, nfl_offset, batch_size, feature_cfgs, ps_num
        )
    _check_variant(variant_type, version)
    grads = checks.tensors(layout_tensors_grad, "layout_tensors_grad")
    dtype = lists[0].dtype
    wide = [checks.floats(g, f"layout_tensors_grad[{i}]", None).to(dtype) for i, g in enumerate(grads)]
    if layout_tensors_grad_scale is not None:
        wide = [g * layout_tensors_grad_scale for g in wide]
    flat = _layout_grad(wide, [rows.shape[0] for rows in lists], *encoding)
    pieces = flat.split([e.numel() for e in embeddings_list])
    return [p.view(e.shape).to(e.dtype) for p, e in zip(pieces, embeddings_list, strict=True)]


def _check_variant(variant_type: str, version: int) -> None:
    if variant_type not in _INPUTS:
        raise InputError(f"variant_type must be one of {', '.join(_INPUTS)}, got {variant_type!r}")
    if version not in (3, 5):
        raise InputError(
            f"version {version} has another encoding; encode with sharding_sparse_fids and give 5"
        )


def _layout_arguments(
    embeddings_list: Sequence[Tensor],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch_size: int | Tensor,
    feature_cfgs: FeatureConfigs,
    ps_num: int | Router,
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The rows of each list, flat, and what `layout` takes beside them."""
    if not isinstance(feature_cfgs, FeatureConfigs):
        raise InputError(f"feature_cfgs must be FeatureConfigs, got {checks.kind(feature_cfgs)}")
    lists = checks.tensors(embeddings_list, "embeddings_list")
    servers = ps_num.num_shards if isinstance(ps_num, Router) else checks.positive(ps_num, "ps_num", least=0)
    wanted = len(feature_cfgs.table_names) * max(1, servers)
    if len(lists) != wanted:
        raise InputError(f"embeddings_list has {len(lists)} tensors, tables times servers are {wanted}")
    if not lists:
        raise InputError("feature_cfgs has no features")
    for i, rows in enumerate(lists):
        checks.floats(rows, f"embeddings_list[{i}]", None)
        if rows.dtype != lists[0].dtype:
            raise InputError(f"embeddings_list[{i}] is {rows.dtype}, embeddings_list[0] {lists[0].dtype}")
    dtype = torch.promote_types(lists[0].dtype, torch.float32)
    if isinstance(batch_size, Tensor) and batch_size.numel() == 1:
        batch_size = int(batch_size)
    batch = checks.positive(batch_size, "batch_size", least=0)
    return [rows.reshape(-1).to(dtype) for rows in lists], (
        _unsigned(fid_offset, "fid_offset", (None,)),
        checks.whole(feature_offset, "feature_offset"),
        _unsigned(nfl_offset, "nfl_offset", (len(feature_cfgs.feature_names) + 1,)),
        batch,
        feature_cfgs.encoded,
    )


def _unsigned(tensor: Tensor, name: str, shape: tuple[int | None, ...]) -> Tensor:
    """int64 from it or from the unsigned type that Monolith uses."""
    if isinstance(tensor, Tensor) and tensor.dtype in (torch.uint32, torch.uint64):
        tensor = tensor.to(torch.int64)
    return checks.whole(tensor, name, shape)


def _rows_of(plan: _Plan, feature_offset: Tensor, nfl_offset: Tensor, batch: int) -> tuple[Any, ...]:
    """Where each feature's rows begin in feature_offset, and which features are shared."""
    for shape in plan.shapes:
        if shape[0] not in (-1, batch):
            raise InputError(f"batch_size is {batch}, a layout declares the shape {list(shape)}")
    numbers = nfl_offset.tolist()
    starts = [n & (SHARED - 1) for n in numbers]
    shared = [bool(n & SHARED) for n in numbers]
    starts[-1] -= 1
    total = feature_offset.shape[0] - 1
    if starts[0] != 0 or starts[-1] != total:
        raise InputError(f"nfl_offset must lead from 0 to the {total + 1} entries of feature_offset")
    for f in range(len(plan.dims)):
        rows = 1 if shared[f] else batch
        if starts[f + 1] - starts[f] != rows:
            found = starts[f + 1] - starts[f]
            raise InputError(f"nfl_offset gives feature number {f} {found} rows, expected {rows}")
    return starts, shared


def _pooling(
    sizes: list[int],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch: int,
    encoded: str,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """What the encoding says, as arguments of the ops `pool` and `unpool`."""
    plan = _plan(encoded)
    starts, shared = _rows_of(plan, feature_offset, nfl_offset, batch)
    device, n = fid_offset.device, fid_offset.shape[0]
    steps = torch.diff(feature_offset)
    if int(feature_offset[0]) != 0 or int(feature_offset[-1]) != n or bool((steps < 0).any()):
        raise InputError(f"feature_offset must ascend from 0 to {n}, the length of fid_offset")
    bases = torch.tensor([0, *sizes], device=device).cumsum(0)
    index = locate(
        fid_offset, bases, feature_offset[starts[1:]], torch.tensor(plan.dims, device=device), "fid_offset"
    )
    divisor = steps.clamp(min=1).to(dtype)
    blocks, bags = [index], []
    end = n
    for f in plan.order:
        offsets = feature_offset[starts[f] : starts[f + 1] + 1]
        if plan.firsts[f]:
            kept = _first_rows(index, offsets, plan.firsts[f])
            blocks.append(kept)
            offsets = torch.arange(end, end + kept.shape[0] + 1, device=device)
            end += kept.shape[0]
        mean = divisor[starts[f] : starts[f + 1]] if plan.means[f] else None
        if plan.parts[f]:
            bags.append(Bags(offsets, plan.parts[f], divisor=mean, shared=shared[f]))
    joined = torch.cat(blocks) if len(blocks) > 1 else index
    return joined, 1, max(plan.dims), *arguments(bags, dtype)


def _first_rows(index: Tensor, offsets: Tensor, first: int) -> Tensor:
    """The first occurrences of each row, -1 where it has fewer: int64 [rows * first]."""
    at = offsets[:-1, None] + torch.arange(first, device=index.device)
    missing = at >= offsets[1:, None]
    found = torch.nn.functional.pad(index, (0, 1), value=-1)[at.masked_fill(missing, -1)]
    return found.flatten()


def _native_features(plan: _Plan, feature_offset: Tensor, nfl_offset: Tensor, batch: int) -> list[Any]:
    """The features as native code takes them."""
    starts, shared = _rows_of(plan, feature_offset, nfl_offset, batch)
    rows = [1 if s else batch for s in shared]
    return list(
        zip(
            starts, rows, plan.dims, plan.firsts, plan.means, shared, plan.native_parts, strict=False
        )  # starts have an end
    )


def _layout_native(
    lists: list[Tensor],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch: int,
    encoded: str,
) -> list[Tensor]:
    plan = _plan(encoded)
    features = _native_features(plan, feature_offset, nfl_offset, batch)
    dtype = lists[0].dtype
    outputs = [
        fresh(batch, _columns(shape), dtype=dtype, zero=not whole)
        for shape, whole in zip(plan.shapes, plan.covered, strict=True)
    ]
    native: Any = native_module()
    native.layout(
        [rows.contiguous() for rows in lists],
        fid_offset.contiguous(),
        feature_offset.contiguous(),
        features,
        outputs,
        dtype == torch.float64,
        torch.get_num_threads(),
    )
    return [o.view(batch, *shape[1:]) for o, shape in zip(outputs, plan.shapes, strict=True)]


def _layout_twin(
    lists: list[Tensor],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch: int,
    encoded: str,
) -> list[Tensor]:
    plan = _plan(encoded)
    sizes = [rows.shape[0] for rows in lists]
    pooling = _pooling(sizes, fid_offset, feature_offset, nfl_offset, batch, encoded, lists[0].dtype)
    columns = [_columns(shape) for shape in plan.shapes]
    outputs = _pool(torch.cat(lists), *pooling, [batch] * len(columns), columns, "fid_offset")
    return [o.view(batch, *shape[1:]) for o, shape in zip(outputs, plan.shapes, strict=True)]


def _layout_grad_native(
    grads: list[Tensor],
    sizes: list[int],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch: int,
    encoded: str,
) -> Tensor:
    plan = _plan(encoded)
    _check_grads(grads, plan, batch)
    dtype = grads[0].dtype if grads else torch.float32
    out = fresh(sum(sizes), dtype=dtype, zero=True)
    native: Any = native_module()
    native.layout_gradient(
        out,
        torch.tensor([0, *sizes]).cumsum(0),
        fid_offset.contiguous(),
        feature_offset.contiguous(),
        _native_features(plan, feature_offset, nfl_offset, batch),
        [g.reshape(batch, _columns(g.shape)).contiguous() for g in grads],
        torch.get_num_threads(),
    )
    return out


def _layout_grad_twin(
    grads: list[Tensor],
    sizes: list[int],
    fid_offset: Tensor,
    feature_offset: Tensor,
    nfl_offset: Tensor,
    batch: int,
    encoded: str,
) -> Tensor:
    _check_grads(grads, _plan(encoded), batch)
    if not grads:
        return torch.zeros(sum(sizes))
    pooling = _pooling(sizes, fid_offset, feature_offset, nfl_offset, batch, encoded, grads[0].dtype)
    flat = [g.reshape(batch, _columns(g.shape)) for g in grads]
    result: Tensor = _unpool(flat, *pooling, sum(sizes), "fid_offset")
    return result


def _check_grads(grads: list[Tensor], plan: _Plan, batch: int) -> None:
    if len(grads) != len(plan.shapes):
        raise InputError(f"layout_tensors_grad has {len(grads)} tensors, the layouts have {len(plan.shapes)}")
    for i, (grad, shape) in enumerate(zip(grads, plan.shapes, strict=True)):
        checks.floats(grad, f"layout_tensors_grad[{i}]", (batch, *shape[1:]))


def _columns(shape: Sequence[int]) -> int:
    columns = 1
    for size in shape[1:]:
        columns *= size
    return columns


_ENCODING = "Tensor fid_offset, Tensor feature_offset, Tensor nfl_offset, SymInt batch, str encoded"
_layout = define(
    f"layout(Tensor[] lists, {_ENCODING}) -> Tensor[]",
    native=_layout_native,
    twin=_layout_twin,
    fake=lambda lists, *encoding: [
        lists[0].new_empty(encoding[3], *shape[1:]) for shape in _plan(encoding[4]).shapes
    ],
)
_layout_grad = define(
    f"layout_grad(Tensor[] grads, SymInt[] sizes, {_ENCODING}) -> Tensor",
    native=_layout_grad_native,
    twin=_layout_grad_twin,
    fake=lambda grads, sizes, *encoding: grads[0].new_empty(sum(sizes)) if grads else torch.empty(sum(sizes)),
)


class _ToLayout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fid_offset: Tensor,
        feature_offset: Tensor,
        nfl_offset: Tensor,
        batch: int,
        encoded: str,
        *lists: Tensor,
    ) -> Any:
        ctx.save_for_backward(fid_offset, feature_offset, nfl_offset)
        ctx.sizes, ctx.batch, ctx.encoded = [rows.shape[0] for rows in lists], batch, encoded
        return tuple(_layout(list(lists), fid_offset, feature_offset, nfl_offset, batch, encoded))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = _layout_grad(list(grads), ctx.sizes, *ctx.saved_tensors, ctx.batch, ctx.encoded)
        return None, None, None, None, None, *flat.split(ctx.sizes)
