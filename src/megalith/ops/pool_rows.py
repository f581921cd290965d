"""Pooling rows that lie in one piece of memory, with gradients: the op under layouts and combiners.

What a table does with its own storage (`Table.read` with a pooling) this does with any tensor: rows
received from other shards, or rows a user holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import define, native_module
from megalith.ops import checks
from megalith.ops.pooling import Bags, Part, covered, pool, unpool
from megalith.ops.rows import index_limit


def pool_rows(
    source: Tensor,
    index: Tensor | None,
    bags: Sequence[Bags],
    outputs: Sequence[tuple[int, int]],
    *,
    dim: int | None = None,
    name: str = "index",
) -> list[Tensor]:
    """Reads rows into pooled outputs: one [rows, columns] per shape in `outputs`. Differentiable in source.

    source: float [m, dim], and index int64 [n] the row of each occurrence (-1: a row of zeros; None:
    occurrence i is row i). Or source a flat buffer with `dim` given: then the index counts elements, and rows
    may have any width up to `dim`. bags: as a table's in a `Pooling`, features in the order of the occurrences;
    weights and divisors of any float type. Raises InputError for an index out of range or bags that do not fit.
    """
    if not isinstance(source, Tensor) or not source.is_floating_point():
        raise InputError(f"source must be a float tensor, got {checks.kind(source)}")
    flat = dim is not None
    if source.dim() != (1 if flat else 2):
        raise InputError("source must be [m, dim], or one dimension when dim is given")
    width = source.shape[1] if dim is None else dim
    dtype = torch.promote_types(source.dtype, torch.float32)
    index = None if index is None else checks.whole(index, name)
    args = (index, 1 if flat else width, width, *arguments(bags, dtype))
    rows, columns = [r for r, _ in outputs], [c for _, c in outputs]
    wide = source.reshape(-1).to(dtype)
    if torch.is_grad_enabled() and wide.requires_grad:
        results = list(_PoolRows.apply(wide, args, rows, columns, name))
    else:
        results = _pool(wide, *args, rows, columns, name)
    return [r.to(source.dtype) for r in results]


def segment_sum(values: Tensor, splits: Tensor) -> Tensor:
    """The sum of each segment's rows: [n, d], int64 [segments + 1] -> [segments, d]. Differentiable."""
    values = checks.floats(values, "values", (None, None))
    splits = checks.whole(splits, "splits")
    dim = values.shape[1]
    if dim == 0:
        return values.new_zeros(splits.shape[0] - 1, 0)
    bags = Bags(splits, (Part(0, 0, 0, dim),))
    return pool_rows(values, None, [bags], [(splits.shape[0] - 1, dim)], name="values")[0]


def arguments(bags: Sequence[Bags], dtype: torch.dtype) -> tuple[Any, ...]:
    """The bags as the ops `pool` and `unpool` take them."""
    weights = next((b.weights for b in bags if b.weights is not None), None)
    if any(b.weights is not None and b.weights is not weights for b in bags):
        raise InputError("weights: all features of a call share one tensor, one weight per occurrence")
    if weights is not None and weights.requires_grad:
        raise UsageError("weights take no gradient here: multiply the rows instead")
    return (
        [b.offsets for b in bags],
        [_divisor(b, dtype) for b in bags],
        [int(b.weights is not None) for b in bags],
        None if weights is None else weights.to(dtype),
        _parts_tensor(bags),
    )


def _divisor(bags: Bags, dtype: torch.dtype) -> Tensor:
    if bags.divisor is None:
        return torch.empty(0, dtype=dtype, device=bags.offsets.device)
    return bags.divisor.to(dtype)


def _parts_tensor(bags: Sequence[Bags]) -> Tensor:
    """int64 [parts, 9]: feature, output, column, start, end, inner, accumulate, step, shared."""
    rows = [
        [f, p.output, p.column, p.start, p.end, p.inner, int(p.accumulate), p.step, int(b.shared)]
        for f, b in enumerate(bags)
        for p in b.parts
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 9)


def _bags(
    offsets: list[Tensor], divisors: list[Tensor], weighted: list[int], weights: Tensor | None, parts: Tensor
) -> list[Bags]:
    """What the op's arguments describe."""
    of: list[list[Part]] = [[] for _ in offsets]
    shared = [False] * len(offsets)
    for feature, output, column, start, end, inner, accumulate, step, is_shared in parts.tolist():
        of[feature].append(Part(output, column, start, end, inner, bool(accumulate), step))
        shared[feature] = bool(is_shared)
    return [
        Bags(o, tuple(p), weights if w else None, d if d.numel() else None, s)
        for o, p, w, d, s in zip(offsets, of, weighted, divisors, shared, strict=True)
    ]


def _pool_native(source: Tensor, index: Any, stride: int, dim: int, *plan: Any) -> list[Tensor]:
    native: Any = native_module()
    *described, rows, columns, name = plan
    bags = _bags(*described)
    shapes = list(zip(rows, columns, strict=True))
    outputs = [
        source.new_empty(shape) if whole else source.new_zeros(shape)
        for shape, whole in zip(shapes, covered(bags, shapes), strict=True)
    ]
    index = None if index is None else index.contiguous()
    forms = [b.native for b in bags]
    native.pool(source.contiguous(), index, stride, dim, forms, outputs, name, torch.get_num_threads())
    return outputs


def _pool_twin(source: Tensor, index: Any, stride: int, dim: int, *plan: Any) -> list[Tensor]:
    *described, rows, columns, name = plan
    outputs = [source.new_zeros(r, c) for r, c in zip(rows, columns, strict=True)]
    elements, present = _row_elements(source.shape[0], index, stride, dim, name)
    rows_of = torch.where(present[:, None], source[elements], 0) if elements.numel() else None
    if rows_of is None:
        rows_of = source.new_zeros(present.numel(), dim)
    pool(rows_of, _bags(*described), outputs)
    return outputs


def _unpool_native(grads: list[Tensor], index: Any, stride: int, dim: int, *plan: Any) -> Tensor:
    native: Any = native_module()
    *described, size, name = plan
    out = grads[0].new_zeros(size)
    index = None if index is None else index.contiguous()
    forms = [b.native for b in _bags(*described)]
    flat = [g.contiguous() for g in grads]
    native.unpool(out, index, stride, dim, forms, flat, name, torch.get_num_threads())
    return out


def _unpool_twin(grads: list[Tensor], index: Any, stride: int, dim: int, *plan: Any) -> Tensor:
    *described, size, name = plan
    elements, present = _row_elements(size, index, stride, dim, name)
    result, reached = unpool(grads, _bags(*described), present.numel(), dim)
    keep = present & reached
    out = grads[0].new_zeros(size)
    return out.index_add_(0, elements[keep].flatten(), result[keep].flatten())


def _row_elements(size: int, index: Any, stride: int, dim: int, name: str) -> tuple[Tensor, Tensor]:
    """The elements [n, dim] of each occurrence's row, and which are there (others stand at the first row)."""
    limit = index_limit(size, stride, dim)
    index = torch.arange(limit) if index is None else index
    checks.index_range(index, -1, limit, name)
    start = (index.clamp(min=0) * stride)[:, None]
    return start + torch.arange(dim, device=index.device), index >= 0


_PLAN = (
    "Tensor? index, SymInt stride, SymInt dim, Tensor[] offsets, Tensor[] divisors, int[] weighted,"
    " Tensor? weights, Tensor parts"
)
_pool = define(
    f"pool(Tensor source, {_PLAN}, SymInt[] rows, SymInt[] columns, str name) -> Tensor[]",
    native=_pool_native,
    twin=_pool_twin,
    fake=lambda source, *plan: [source.new_empty(r, c) for r, c in zip(plan[-3], plan[-2], strict=True)],
)
_unpool = define(
    f"unpool(Tensor[] grads, {_PLAN}, SymInt size, str name) -> Tensor",
    native=_unpool_native,
    twin=_unpool_twin,
    fake=lambda grads, *plan: grads[0].new_empty(plan[-2]),
)


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, args: Any, rows: Any, columns: Any, name: str) -> Any:
        ctx.args, ctx.size, ctx.name = args, source.shape[0], name
        return tuple(_pool(source, *args, rows, columns, name))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _unpool(list(grads), *ctx.args, ctx.size, ctx.name), None, None, None, None
