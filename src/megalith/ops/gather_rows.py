"""Gather rows by index and scatter-sum rows by index: each is the gradient of the other.

Both address memory as elements: row i of a piece begins at element `index[i] * stride` and has `width`
elements. A matrix [m, d] has stride and width d; rows of several widths in one flat buffer have stride 1.
Sums run in the order of the index, for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.library import copy_repeated, define_op, native_module, new_tensor
from megalith.ops import checks

Sizes = Sequence[int]

# ---- public functions


def gather(rows: Tensor, index: Tensor, *, name: str = "index") -> Tensor:
    """Gather rows of a matrix. Differentiable.

    Args:
        rows: [m, d].
        index: int [...], each in 0:m.
        name: The name of the index in error messages.

    Returns:
        [..., d].

    Raises:
        InputError: An index is out of range.
    """
    rows = checks.tensor(rows, "rows", (None, None))
    flat = checks.int64(index, checks.text(name, "name"), None).reshape(-1)
    dim = rows.shape[1]
    if dim == 0:
        checks.require((flat >= 0) & (flat < rows.shape[0]), f"{name} is out of range")
        return rows.reshape(-1).view(*index.shape, 0)
    (out,) = _gathered(rows.reshape(-1), [flat], [dim], [dim], name)
    return out.view(*index.shape, dim)


def scatter_sum(rows: Tensor, index: Tensor, num_rows: int, *, name: str = "index") -> Tensor:
    """Sum rows that have the same index. Differentiable.

    Args:
        rows: float [n, d].
        index: int [n], each in 0:num_rows.
        num_rows: The number of rows of the result.
        name: The name of the index in error messages.

    Returns:
        [num_rows, d]; rows without an index are zero.

    Raises:
        InputError: An index is out of range.
    """
    rows = checks.floats(rows, "rows", (None, None))
    index = checks.int64(index, checks.text(name, "name"), (rows.shape[0],))
    num_rows = checks.integer(num_rows, "num_rows", least=0)
    dim = rows.shape[1]
    if dim == 0:
        checks.require((index >= 0) & (index < num_rows), f"{name} is out of range")
        return rows.reshape(-1).view(num_rows, 0)
    return _scattered([rows], [index], num_rows * dim, [dim], name).view(num_rows, dim)


def gather_pieces(
    source: Tensor,
    indices: Sequence[Tensor],
    widths: Sizes,
    *,
    strides: Sizes | None = None,
    name: str = "index",
) -> list[Tensor]:
    """Gather rows of several widths from one buffer. Differentiable.

    Args:
        source: The buffer; a tensor of any shape is flattened.
        indices: int [n] for each piece.
        widths: The row size of each piece.
        strides: The number of elements that an index counts, for each piece; default 1.
        name: The name of the indices in error messages.

    Returns:
        A [n, width] for each piece.

    Raises:
        InputError: A row ends beyond the buffer.
    """
    indices, name = checks.as_list(indices, "indices"), checks.text(name, "name")
    strides = [1] * len(indices) if strides is None else strides
    source = checks.tensor(source, "source", None).reshape(-1)
    indices = [checks.int64(index, name) for index in indices]
    widths, strides = checks.sizes(widths, "widths", 0), checks.sizes(strides, "strides", 0)
    checks.same_length(indices=indices, widths=widths, strides=strides)
    return _gathered(source, indices, widths, strides, name)


def scatter_pieces(
    pieces: Sequence[Tensor],
    indices: Sequence[Tensor],
    size: int,
    *,
    strides: Sizes | None = None,
    name: str = "index",
) -> Tensor:
    """Sum rows of several widths into one buffer: the gradient of `gather_pieces`. Differentiable.

    Args:
        pieces: float [n, width] each.
        indices: int [n] for each piece.
        size: The number of elements of the buffer.
        strides: The number of elements that an index counts, for each piece; default 1.
        name: The name of the indices in error messages.

    Returns:
        [size].

    Raises:
        InputError: A row ends beyond the buffer.
    """
    pieces, indices = checks.as_list(pieces, "pieces"), checks.as_list(indices, "indices")
    name = checks.text(name, "name")
    strides = [1] * len(pieces) if strides is None else strides
    strides = checks.sizes(strides, "strides", 0)
    checks.same_length(pieces=pieces, indices=indices, strides=strides)
    pieces = [checks.floats(piece, f"pieces[{k}]", (None, None)) for k, piece in enumerate(pieces)]
    indices = [checks.int64(i, name, (p.shape[0],)) for i, p in zip(indices, pieces, strict=True)]
    return _scattered(pieces, indices, checks.integer(size, "size", least=0), strides, name)


def _gathered(
    source: Tensor, indices: Sequence[Tensor], widths: Sizes, strides: Sizes, name: str
) -> list[Tensor]:
    if torch.is_grad_enabled() and source.requires_grad:
        return list(_Gather.apply(source, tuple(strides), tuple(widths), name, *copy_repeated(indices)))
    return list(_gather(source, list(indices), list(strides), list(widths), name))


def _scattered(
    pieces: Sequence[Tensor], indices: Sequence[Tensor], size: int, strides: Sizes, name: str
) -> Tensor:
    if not pieces:
        return torch.zeros(size, dtype=torch.float32, device="cpu")
    if torch.is_grad_enabled() and any(p.requires_grad for p in pieces):
        tensors = copy_repeated([*pieces, *indices])
        out: Tensor = _Scatter.apply(len(pieces), tuple(strides), size, name, *tensors)
        return out
    result: Tensor = _scatter(list(pieces), list(indices), list(strides), size, name)
    return result


# ---- the ops


def _gather_native(
    source: Tensor, indices: list[Tensor], strides: list[int], widths: list[int], name: str
) -> list[Tensor]:
    source = source.contiguous()
    outputs = [
        new_tensor(i.shape[0], width, dtype=source.dtype) for i, width in zip(indices, widths, strict=True)
    ]
    threads = torch.get_num_threads()
    native: Any = native_module()
    for index, stride, out in zip(indices, strides, outputs, strict=True):
        native.gather(source, index.contiguous(), stride, out, name, threads)
    return outputs


def _gather_reference(
    source: Tensor, indices: list[Tensor], strides: list[int], widths: list[int], name: str
) -> list[Tensor]:
    return [
        source[_elements(index, stride, width, source.numel(), name)]
        for index, stride, width in zip(indices, strides, widths, strict=True)
    ]


def _scatter_native(
    pieces: list[Tensor], indices: list[Tensor], strides: list[int], size: int, name: str
) -> Tensor:
    dtype = pieces[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    out = new_tensor(size, dtype=wide, zero=True)
    rows = [p.to(wide).contiguous() for p in pieces]
    at = [i.contiguous() for i in indices]
    native: Any = native_module()
    native.scatter(rows, at, strides, out, name, torch.get_num_threads())
    return out.to(dtype)


def _scatter_reference(
    pieces: list[Tensor], indices: list[Tensor], strides: list[int], size: int, name: str
) -> Tensor:
    dtype = pieces[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(size, dtype=wide, device=pieces[0].device)
    for piece, index, stride in zip(pieces, indices, strides, strict=True):
        at = _elements(index, stride, piece.shape[1], size, name)
        add_at(out, at.flatten(), piece.to(wide).flatten())
    return out.to(dtype)


def add_at(out: Tensor, index: Tensor, values: Tensor) -> None:
    """Add rows at positions, in the order of the index on every device: the same bits in every run."""
    # out: [m, ...], changed in place; index: int64 [n], positions; values: [n, ...].
    if out.is_cuda:  # it sorts the index; index_add_ has atomic additions there, in any order
        out.index_put_((index,), values, accumulate=True)
    else:
        out.index_add_(0, index, values)


def _elements(index: Tensor, stride: int, width: int, size: int, name: str) -> Tensor:
    checks.index_range(index, 0, index_limit(size, stride, width), name)
    return (index * stride)[:, None] + torch.arange(width, device=index.device)


def index_limit(size: int, stride: int, width: int) -> int:
    """Return the number of legal indices: those whose rows end within the buffer."""
    if size < width:
        return 0
    return (size - width) // stride + 1 if stride else 2**63 - 1


_gather = define_op(
    "gather(Tensor source, Tensor[] indices, SymInt[] strides, SymInt[] widths, str name) -> Tensor[]",
    native=_gather_native,
    reference=_gather_reference,
    fake=lambda source, indices, strides, widths, name: [
        source.new_empty(i.shape[0], w) for i, w in zip(indices, widths, strict=True)
    ],
)
_scatter = define_op(
    "scatter(Tensor[] pieces, Tensor[] indices, SymInt[] strides, SymInt size, str name) -> Tensor",
    native=_scatter_native,
    reference=_scatter_reference,
    fake=lambda pieces, indices, strides, size, name: pieces[0].new_empty(size),
)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, strides: Sizes, widths: Sizes, name: str, *indices: Tensor) -> Any:
        ctx.save_for_backward(*indices)
        ctx.size, ctx.strides, ctx.name = source.shape[0], strides, name
        return tuple(_gather(source, list(indices), list(strides), list(widths), name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        indices = ctx.saved_tensors
        total = _scattered(grads, indices, ctx.size, ctx.strides, ctx.name)
        return total, None, None, None, *[None] * len(indices)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, strides: Sizes, size: int, name: str, *tensors: Tensor) -> Any:
        pieces, indices = tensors[:count], tensors[count:]
        ctx.save_for_backward(*indices)
        ctx.widths, ctx.strides, ctx.name = [p.shape[1] for p in pieces], strides, name
        return _scatter(list(pieces), list(indices), list(strides), size, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        indices = ctx.saved_tensors
        pieces = _gathered(grad, indices, ctx.widths, ctx.strides, ctx.name)
        return None, None, None, None, *pieces, *[None] * len(indices)
