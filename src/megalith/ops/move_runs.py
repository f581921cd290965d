"""Copy runs of values: rows of a column, padded rows, chunks of a buffer; locate packed offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import copy_repeated, define_op, native_module, new_size, new_tensor
from megalith.ops import checks
from megalith.ops.gather_rows import add_at
from megalith.ragged import Ragged


def take(ragged: Ragged, rows: Tensor) -> Ragged:
    """Select rows of a column, with their weights. Differentiable.

    Args:
        ragged: The column.
        rows: int [k], the numbers of the rows; a row may occur several times.

    Returns:
        A column of k rows, in the order of `rows`.
    """
    if not isinstance(ragged, Ragged):
        raise InputError(f"ragged must be a Ragged, got {checks.kind(ragged)}")
    rows = checks.with_data(checks.int64(rows, "rows"), "rows")
    checks.with_data(ragged.row_splits, "ragged.row_splits")
    values, splits = _taken(ragged.values, ragged.row_splits, rows)
    weights = None if ragged.weights is None else _taken(ragged.weights, ragged.row_splits, rows)[0]
    return Ragged.trusted(values, splits, weights)


def _taken(values: Tensor, splits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() or not values.requires_grad:
        taken: tuple[Tensor, Tensor] = _take(values, splits, rows)
        return taken
    index, new_splits = _take(torch.arange(values.shape[0], device=values.device), splits, rows)
    return values.index_select(0, index), new_splits


def pad_rows(values: Tensor, row_splits: Tensor, length: int) -> Tensor:
    """Cut or pad each row of a column to `length` values. Differentiable.

    Args:
        values: [n, ...].
        row_splits: int [rows + 1], from 0 to n.
        length: The number of values of each row of the result.

    Returns:
        [rows, length, ...], with zeros where a row has fewer values.
    """
    values = checks.tensor(values, "values", None)
    if values.dim() < 1:
        raise InputError("values must have at least one dimension")
    row_splits = checks.splits(row_splits, "row_splits", values.shape[0])
    length = checks.integer(length, "length", least=0)
    if torch.is_grad_enabled() and values.requires_grad:
        out: Tensor = _Pad.apply(values, row_splits, length)
        return out
    padded: Tensor = _pad(values, row_splits, length)
    return padded


def move_runs(
    values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, *, name: str = "source"
) -> Tensor:
    """Add chunks of a flat buffer into a new one. Differentiable in `values`.

    Chunk i is out[target[i]:target[i] + widths[i]] += values[source[i]:source[i] + widths[i]].

    Args:
        values: float [m].
        source: int64 [k], where each chunk begins in `values`.
        target: int64 [k], where each chunk begins in the result.
        widths: int64 [k], the size of each chunk.
        size: The number of elements of the result.
        name: The name of the chunks in error messages.

    Returns:
        [size].

    Raises:
        InputError: A chunk is outside either buffer.
    """
    values = checks.floats(values, "values", (None,))
    widths = checks.int64(widths, "widths")
    source = checks.int64(source, "source", (widths.shape[0],))
    target = checks.int64(target, "target", (widths.shape[0],))
    size = checks.integer(size, "size", least=0)
    return moved(values, source, target, widths, size, checks.text(name, "name"))


def moved(values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, name: str) -> Tensor:
    """Compute `move_runs` of arguments whose types and shapes are already checked."""
    # values: float [m]; source: int64 [k]; target: int64 [k]; widths: int64 [k]; returns: [size].
    if torch.is_grad_enabled() and values.requires_grad:
        out: Tensor = _MoveRuns.apply(values, *copy_repeated([source, target, widths]), size, name)
        return out
    result: Tensor = _move(values, source, target, widths, size, name)
    return result


def locate(packed: Tensor, bases: Tensor, ends: Tensor, widths: Tensor, name: str) -> Tensor:
    """Convert packed (list, element) offsets to elements of the concatenated lists."""
    # packed: int64 [n], the list in the high 32 bits; bases: int64 [lists + 1], where each list begins; ends:
    # int64 [features], where the occurrences of each feature end; widths: int64 [features], the number of
    # elements that an occurrence of each feature reads; returns: int64 [n].
    located: Tensor = _locate(packed, bases, ends, widths, name)
    return located


# ---- take

_NATIVE_SHARE = 4
"""The native implementation checks the whole column, so it runs for at least this fraction of its rows."""


def _take_native(values: Tensor, splits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.shape[0] < splits.shape[0] // _NATIVE_SHARE:
        return _take_reference(values, splits, rows)
    splits, rows = splits.contiguous(), rows.contiguous()
    new_splits = splits.new_empty(rows.shape[0] + 1)
    native: Any = native_module()
    total = native.take_splits(splits, rows, values.shape[0], new_splits)
    width = values.shape[1:].numel()
    out = new_tensor(total, width, dtype=values.dtype)
    native.take_rows(
        values.reshape(values.shape[0], width).contiguous(),
        splits,
        rows,
        new_splits,
        out,
        torch.get_num_threads(),
    )
    return out.view(total, *values.shape[1:]), new_splits


def _take_reference(values: Tensor, splits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Check only the rows that it reads: a reader takes every batch from the same column."""
    checks.index_range(rows, 0, splits.shape[0] - 1, "rows")
    begin, end = splits.index_select(0, rows), splits.index_select(0, rows + 1)
    inside = (begin >= 0) & (begin <= end) & (end <= values.shape[0])
    checks.require(inside, "row_splits must ascend from 0 to the number of values")
    lengths = end - begin
    new_splits = splits.new_zeros(rows.shape[0] + 1)
    torch.cumsum(lengths, 0, out=new_splits[1:])
    size = int(new_splits[-1])
    index = torch.repeat_interleave(begin - new_splits[:-1], lengths, output_size=size)
    index += torch.arange(size, device=values.device)
    return values.index_select(0, index), new_splits


_take = define_op(
    "take(Tensor values, Tensor splits, Tensor rows) -> (Tensor, Tensor)",
    native=_take_native,
    reference=_take_reference,
    fake=lambda values, splits, rows: (
        values.new_empty(new_size(), *values.shape[1:]),
        splits.new_empty(rows.shape[0] + 1),
    ),
)

# ---- pad


def _pad_native(values: Tensor, splits: Tensor, length: int) -> Tensor:
    native: Any = native_module()
    rows, width = splits.shape[0] - 1, values.shape[1:].numel()
    out = new_tensor(rows, length, width, dtype=values.dtype)
    flat = values.reshape(values.shape[0], width).contiguous()
    native.pad_rows(flat, splits.contiguous(), out, torch.get_num_threads())
    return out.view(rows, length, *values.shape[1:])


def _pad_reference(values: Tensor, splits: Tensor, length: int) -> Tensor:
    at, filled = _places(splits, length)
    out = values.new_zeros(splits.shape[0] - 1, length, *values.shape[1:])
    out[filled] = values[at[filled]]
    return out


def _unpad_native(padded: Tensor, splits: Tensor, size: int) -> Tensor:
    native: Any = native_module()
    rows, length, width = *padded.shape[:2], padded.shape[2:].numel()
    out = new_tensor(size, width, dtype=padded.dtype)
    block = padded.reshape(rows, length, width).contiguous()
    native.unpad_rows(block, splits.contiguous(), out, torch.get_num_threads())
    return out.view(size, *padded.shape[2:])


def _unpad_reference(padded: Tensor, splits: Tensor, size: int) -> Tensor:
    at, filled = _places(splits, padded.shape[1])
    out = padded.new_zeros(size, *padded.shape[2:])
    out[at[filled]] = padded[filled]
    return out


def _places(splits: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the value number of each place of a padded column, [rows, length], and whether it exists."""
    at = splits[:-1, None] + torch.arange(length, device=splits.device)
    return at, at < splits[1:, None]


_pad = define_op(
    "pad(Tensor values, Tensor splits, SymInt length) -> Tensor",
    native=_pad_native,
    reference=_pad_reference,
    fake=lambda values, splits, length: values.new_empty(splits.shape[0] - 1, length, *values.shape[1:]),
)
_unpad = define_op(
    "unpad(Tensor padded, Tensor splits, SymInt size) -> Tensor",
    native=_unpad_native,
    reference=_unpad_reference,
    fake=lambda padded, splits, size: padded.new_empty(size, *padded.shape[2:]),
)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, splits: Tensor, length: int) -> Any:
        ctx.save_for_backward(splits)
        ctx.size = values.shape[0]
        return _pad(values, splits, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (splits,) = ctx.saved_tensors
        if torch.is_grad_enabled() and grad.requires_grad:
            return _Unpad.apply(grad, splits, ctx.size), None, None
        return _unpad(grad, splits, ctx.size), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, splits: Tensor, size: int) -> Any:
        ctx.save_for_backward(splits)
        ctx.length = padded.shape[1]
        return _unpad(padded, splits, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (splits,) = ctx.saved_tensors
        return pad_rows(grad, splits, ctx.length), None, None


# ---- move


def _move_native(
    values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, name: str
) -> Tensor:
    native: Any = native_module()
    wide = torch.promote_types(values.dtype, torch.float32)
    out = torch.zeros(size, dtype=wide, device="cpu")
    runs = (source.contiguous(), target.contiguous(), widths.contiguous())
    native.move_runs(values.to(wide).contiguous(), *runs, out, name)
    return out.to(values.dtype)


def _move_reference(
    values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, name: str
) -> Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    m = values.shape[0]
    checks.index_range(widths, 0, min(m, size) + 1, "widths")
    inside = (source >= 0) & (source <= m - widths) & (target >= 0) & (target <= size - widths)
    checks.require(inside, f"{name}: a chunk is out of range")
    begin = torch.cumsum(widths, 0) - widths
    within = torch.arange(int(widths.sum()), device=values.device) - torch.repeat_interleave(begin, widths)
    at, to = (torch.repeat_interleave(x, widths) + within for x in (source, target))
    out = torch.zeros(size, dtype=wide, device=values.device)
    add_at(out, to, values.to(wide)[at])
    return out.to(values.dtype)


_move = define_op(
    "move(Tensor values, Tensor source, Tensor target, Tensor widths, SymInt size, str name) -> Tensor",
    native=_move_native,
    reference=_move_reference,
    fake=lambda values, source, target, widths, size, name: values.new_empty(size),
)


class _MoveRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, target: Tensor, widths: Tensor, *rest: Any) -> Any:
        ctx.save_for_backward(source, target, widths)
        ctx.size, ctx.name = values.shape[0], rest[1]
        return _move(values, source, target, widths, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, target, widths = ctx.saved_tensors
        back = moved(grad, target, source, widths, ctx.size, ctx.name)
        return back, None, None, None, None, None


# ---- locate


def _locate_native(packed: Tensor, bases: Tensor, ends: Tensor, widths: Tensor, name: str) -> Tensor:
    native: Any = native_module()
    out = torch.empty(packed.shape[0], dtype=torch.int64, device="cpu")
    bad = native.locate(packed.contiguous(), bases, ends.contiguous(), widths, out)
    if bad >= 0:
        _raise_packed(packed, bad, name)
    return out


def _locate_reference(packed: Tensor, bases: Tensor, ends: Tensor, widths: Tensor, name: str) -> Tensor:
    lists, element = packed >> 32, packed & 0xFFFFFFFF
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if bool((counts < 0).any()) or (ends.numel() and int(ends[-1]) > packed.shape[0]):
        raise InputError("feature_offset must ascend within the occurrences")
    known = (lists >= 0) & (lists < bases.shape[0] - 1)
    safe = torch.where(known, lists, 0)
    width = torch.repeat_interleave(widths, counts)
    at = bases[safe] + element
    bad = ~known | (at + width > bases[safe + 1])
    if bool(bad.any()):
        _raise_packed(packed, int(bad.nonzero()[0]), name)
    return at


def _raise_packed(packed: Tensor, position: int, name: str) -> None:
    value = int(packed[position])
    raise InputError(
        f"{name}[{position}] is outside the embeddings: list {value >> 32}, element {value & 0xFFFFFFFF}"
    )


_locate = define_op(
    "locate(Tensor packed, Tensor bases, Tensor ends, Tensor widths, str name) -> Tensor",
    native=_locate_native,
    reference=_locate_reference,
    fake=lambda packed, bases, ends, widths, name: torch.empty_like(packed),
)
