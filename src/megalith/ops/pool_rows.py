"""Pool rows of one tensor, with gradients: the op behind layouts and combiners.

`Table.read` with a pooling does the same with the table's own storage. This op works on any tensor: rows
received from other shards, or rows that a user holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.library import define_op, native_module, new_tensor
from megalith.ops import checks
from megalith.ops.gather_rows import add_at, index_limit
from megalith.ops.pooling import Bags, OutputSlice, Pooling, covered, pool, unpool


def pool_rows(
    source: Tensor,
    index: Tensor | None,
    bags: Sequence[Bags],
    outputs: Sequence[tuple[int, int]],
    *,
    dim: int | None = None,
    name: str = "index",
) -> list[Tensor]:
    """Read rows into pooled outputs. Differentiable in `source`.

    Args:
        source: float [m, dim], or a flat buffer if `dim` is given.
        index: int64 [n], the row of each occurrence; -1 is a row of zeros. For a flat buffer, the element
            where the row begins. None: occurrence i is row i.
        bags: As for a table in a `Pooling`, features in the order of the occurrences; weights and divisors
            of any float type.
        outputs: The shape (rows, columns) of each output.
        dim: For a flat buffer, the largest width of a row.
        name: The name of the index in error messages.

    Returns:
        A tensor for each shape.

    Raises:
        InputError: An index is out of range, or the bags do not match the occurrences or the outputs.
    """
    source, name = checks.floats(source, "source", None), checks.text(name, "name")
    flat = dim is not None
    if source.dim() != (1 if flat else 2):
        raise InputError("source must be [m, dim], or one dimension when dim is given")
    width = source.shape[1] if dim is None else checks.integer(dim, "dim", least=0)
    dtype = torch.promote_types(source.dtype, torch.float32)
    index = None if index is None else checks.int64(index, name)
    args = (index, 1 if flat else width, width, *arguments(_checked(bags), dtype))
    shapes = [
        checks.sizes(shape, f"outputs[{k}]", 0) for k, shape in enumerate(checks.as_list(outputs, "outputs"))
    ]
    if any(len(shape) != 2 for shape in shapes):
        raise InputError("outputs must hold a shape (rows, columns) for each output")
    rows, columns = [r for r, _ in shapes], [c for _, c in shapes]
    wide = source.reshape(-1).to(dtype)
    if torch.is_grad_enabled() and wide.requires_grad:
        results = list(_PoolRows.apply(wide, args, rows, columns, name))
    else:
        results = _pool(wide, *args, rows, columns, name)
    return [r.to(source.dtype) for r in results]


def pool_flat(
    source: Tensor,
    index: Tensor,
    bags: Sequence[Bags],
    outputs: Sequence[tuple[int, int]],
    dim: int,
    whole: Sequence[bool] | None = None,
    stride: int = 1,
) -> list[Tensor]:
    """Compute `pool_rows` of a flat float32 buffer, without gradients and without torch.compile."""
    # source: float32 [m]; index: int64 [n], where the row of each occurrence begins, in units of `stride`.
    if source.is_cpu and native_module() is not None:
        return _pool_into(source, index, stride, dim, bags, outputs, "index", whole)
    rows, columns = [r for r, _ in outputs], [c for _, c in outputs]
    pooled: list[Tensor] = _pool(
        source, index, stride, dim, *arguments(bags, torch.float32), rows, columns, "index"
    )
    return pooled


def unpool_flat(
    grads: Sequence[Tensor], index: Tensor, bags: Sequence[Bags], size: int, dim: int, stride: int = 1
) -> Tensor:
    """Compute the gradient of `pool_flat`; sums run in the order of the occurrences."""
    # index: int64 [n], as for `pool_flat`; returns: float32 [size].
    if index.is_cpu and native_module() is not None:
        return _unpool_into(grads, index, stride, dim, bags, size, "index")
    summed: Tensor = _unpool(list(grads), index, stride, dim, *arguments(bags, torch.float32), size, "index")
    return summed


def segment_sum(values: Tensor, row_splits: Tensor) -> Tensor:
    """Sum the rows of each segment. Differentiable.

    Args:
        values: float [n, d].
        row_splits: int64 [segments + 1], ascending from 0 to n.

    Returns:
        [segments, d].
    """
    values = checks.floats(values, "values", (None, None))
    row_splits = checks.splits(row_splits, "row_splits", values.shape[0])
    dim = values.shape[1]
    if dim == 0:
        return values.reshape(-1).view(row_splits.shape[0] - 1, 0)
    bags = Bags(row_splits, (OutputSlice(0, 0, 0, dim),))
    return pool_rows(values, None, [bags], [(row_splits.shape[0] - 1, dim)], name="values")[0]


def _checked(bags: Sequence[Bags]) -> list[Bags]:
    """Check the dtypes and shapes of the bags' tensors; the op checks their values."""
    for number, each in enumerate(checks.as_list(bags, "bags")):
        if not isinstance(each, Bags):
            raise InputError(f"bags[{number}] must be Bags, got {checks.kind(each)}")
        offsets = checks.integers(each.offsets, f"bags[{number}].offsets")
        if each.weights is not None:
            checks.floats(each.weights, f"bags[{number}].weights", (None,))
        if each.divisor is not None:
            checks.floats(each.divisor, f"bags[{number}].divisor", (offsets.shape[0] - 1,))
    return list(bags)


def arguments(bags: Sequence[Bags], dtype: torch.dtype) -> tuple[Any, ...]:
    """Convert bags to the arguments of the ops `pool` and `unpool`."""
    weights = next((b.weights for b in bags if b.weights is not None), None)
    if any(b.weights is not None and b.weights is not weights for b in bags):
        raise InputError("weights: all features of a call must share one tensor, a weight per occurrence")
    if weights is not None and weights.requires_grad:
        raise UsageError("weights take no gradient here: multiply the rows instead")
    return (
        [b.offsets.to(torch.int64) for b in bags],
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
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 9)


def _bags(
    offsets: list[Tensor], divisors: list[Tensor], weighted: list[int], weights: Tensor | None, parts: Tensor
) -> list[Bags]:
    """Convert the op's arguments back to bags."""
    of: list[list[OutputSlice]] = [[] for _ in offsets]
    shared = [False] * len(offsets)
    for feature, output, column, start, end, inner, accumulate, step, is_shared in parts.tolist():
        of[feature].append(OutputSlice(output, column, start, end, inner, bool(accumulate), step))
        shared[feature] = bool(is_shared)
    return [
        Bags(o, tuple(p), weights if w else None, d if d.numel() else None, s)
        for o, p, w, d, s in zip(offsets, of, weighted, divisors, shared, strict=True)
    ]


def _pool_native(source: Tensor, index: Any, stride: int, dim: int, *plan: Any) -> list[Tensor]:
    *described, rows, columns, name = plan
    return _pool_into(
        source, index, stride, dim, _bags(*described), list(zip(rows, columns, strict=True)), name
    )


def _pool_into(
    source: Tensor,
    index: Tensor | None,
    stride: int,
    dim: int,
    bags: Sequence[Bags],
    shapes: Sequence[tuple[int, int]],
    name: str,
    whole: Sequence[bool] | None = None,
) -> list[Tensor]:
    native: Any = native_module()
    whole = covered(bags, shapes) if whole is None else whole
    outputs = [
        new_tensor(*shape, dtype=source.dtype, zero=not filled)
        for shape, filled in zip(shapes, whole, strict=True)
    ]
    index = None if index is None else index.contiguous()
    forms = [b.native for b in bags]
    native.pool(source.contiguous(), index, stride, dim, forms, outputs, name, torch.get_num_threads())
    return outputs


def _pool_twin(source: Tensor, index: Any, stride: int, dim: int, *plan: Any) -> list[Tensor]:
    *described, rows, columns, name = plan
    outputs = [source.new_zeros(r, c) for r, c in zip(rows, columns, strict=True)]
    bags = _bags(*described)
    index = _index_twin(source, index, stride, dim, name)
    _check_twin(bags, list(zip(rows, columns, strict=True)), index, source.shape[0], stride, dim, name)
    padded = torch.nn.functional.pad(source, (0, dim))  # the last rows of a flat buffer may be narrower
    pool(torch.where(index[:, None] >= 0, padded[_elements(index, stride, dim)], 0), bags, outputs)
    return outputs


def _unpool_native(grads: list[Tensor], index: Any, stride: int, dim: int, *plan: Any) -> Tensor:
    *described, size, name = plan
    return _unpool_into(grads, index, stride, dim, _bags(*described), size, name)


def _unpool_into(
    grads: Sequence[Tensor],
    index: Tensor | None,
    stride: int,
    dim: int,
    bags: Sequence[Bags],
    size: int,
    name: str,
) -> Tensor:
    native: Any = native_module()
    out = new_tensor(size, dtype=grads[0].dtype, zero=True)
    index = None if index is None else index.contiguous()
    forms = [b.native for b in bags]
    flat = [g.contiguous() for g in grads]
    native.unpool(out, index, stride, dim, forms, flat, name, torch.get_num_threads())
    return out


def _unpool_twin(grads: list[Tensor], index: Any, stride: int, dim: int, *plan: Any) -> Tensor:
    *described, size, name = plan
    bags = _bags(*described)
    out = grads[0].new_zeros(size + dim)
    index = _index_twin(out[:size], index, stride, dim, name)
    _check_twin(bags, [tuple(g.shape) for g in grads], index, size, stride, dim, name)
    result, reached = unpool(grads, bags, index.shape[0], dim)
    keep = (index >= 0) & reached
    if stride == dim and size % dim == 0:
        add_at(out.view(-1, dim), index[keep], result[keep])
    else:
        add_at(out, _elements(index[keep], stride, dim).flatten(), result[keep].flatten())
    return out[:size].clone()


def _index_twin(source: Tensor, index: Tensor | None, stride: int, dim: int, name: str) -> Tensor:
    """Check the index; without one, return the number of every row."""
    if index is None:
        return torch.arange(index_limit(source.shape[0], stride, dim), device=source.device)
    checks.index_range(index, -1, index_limit(source.shape[0], stride, 1), name)
    return index


def _elements(index: Tensor, stride: int, dim: int) -> Tensor:
    """Return the elements [n, dim] of the row of each occurrence; -1 counts as 0."""
    return (index.clamp(min=0) * stride)[:, None] + torch.arange(dim, device=index.device)


def _check_twin(
    bags: list[Bags], shapes: Any, index: Tensor, size: int, stride: int, dim: int, name: str
) -> None:
    """Raise InputError unless the bags match the occurrences and every row has the columns of its parts."""
    plain = tuple(Bags(b.offsets.cpu(), b.parts, shared=b.shared) for b in bags)
    Pooling(tuple(shapes), {name: plain}).check(name, index.shape[0], dim)
    for b in bags:
        own = slice(int(b.offsets[0]), int(b.offsets[-1]))
        reach = max((p.end for p in b.parts), default=0)
        checks.index_range(index[own], -1, index_limit(size, stride, reach), name)
        if b.weights is not None:
            weights = checks.floats(b.weights, "weights", (index.shape[0],))
            checks.require(torch.isfinite(weights[own]), "weights: NaN or Inf")
        if b.divisor is not None:
            checks.require(torch.isfinite(b.divisor), "divisor: NaN or Inf")
            checks.require(b.divisor != 0, "divisor: zero")


_PLAN = (
    "Tensor? index, SymInt stride, SymInt dim, Tensor[] offsets, Tensor[] divisors, int[] weighted,"
    " Tensor? weights, Tensor parts"
)
_pool = define_op(
    f"pool(Tensor source, {_PLAN}, SymInt[] rows, SymInt[] columns, str name) -> Tensor[]",
    native=_pool_native,
    twin=_pool_twin,
    fake=lambda source, *plan: [source.new_empty(r, c) for r, c in zip(plan[-3], plan[-2], strict=True)],
)
_unpool = define_op(
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
