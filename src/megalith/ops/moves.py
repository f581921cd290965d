"""Runs that move as a whole: rows of a column, chunks of a buffer, rows behind packed offsets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import apart, define, native_module, new_size
from megalith.ops import checks
from megalith.ragged import Ragged


def take(ragged: Ragged, rows: Tensor) -> Ragged:
    """The chosen rows of a column, in the order given: int [k], repeats allowed. Weights come along."""
    if not isinstance(ragged, Ragged):
        raise InputError(f"ragged must be a Ragged, got {checks.kind(ragged)}")
    rows = checks.whole(rows, "rows")
    values, splits = _taken(ragged.values, ragged.row_splits, rows)
    weights = None if ragged.weights is None else _taken(ragged.weights, ragged.row_splits, rows)[0]
    return Ragged(values, splits, weights)


def _taken(values: Tensor, splits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() or not values.requires_grad:
        taken: tuple[Tensor, Tensor] = _take(values, splits, rows)
        return taken
    index, new_splits = _take(torch.arange(values.shape[0], device=values.device), splits, rows)
    return values.index_select(0, index), new_splits


def move_runs(
    values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, *, name: str = "source"
) -> Tensor:
    """Adds chunks of a flat buffer into one of zeros: out[target:+width] += values[source:+width].

    values: float [m]. source, target, widths: int64 [k]. Returns [size]. Differentiable in values.
    Raises InputError, naming the argument `name`, for a chunk that leaves either buffer.
    """
    values = checks.floats(values, "values", (None,))
    widths = checks.whole(widths, "widths")
    source = checks.whole(source, "source", (widths.shape[0],))
    target = checks.whole(target, "target", (widths.shape[0],))
    return moved(values, source, target, widths, checks.positive(size, "size", least=0), name)


def moved(values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, name: str) -> Tensor:
    """`move_runs` of arguments that need no check."""
    if torch.is_grad_enabled() and values.requires_grad:
        out: Tensor = _MoveRuns.apply(values, *apart([source, target, widths]), size, name)
        return out
    result: Tensor = _move(values, source, target, widths, size, name)
    return result


def locate(packed: Tensor, bases: Tensor, ends: Tensor, widths: Tensor, name: str) -> Tensor:
    """Packed (list, element) offsets as elements of all lists joined.

    packed: int64 [n], the list in the high 32 bits. bases: int64 [lists + 1], where each list begins.
    ends, widths: int64 [features], where each feature's occurrences end and how many elements they read.
    Raises InputError for one that leads out of its list.
    """
    located: Tensor = _locate(packed, bases, ends, widths, name)
    return located


# ---- take


def _take_native(values: Tensor, splits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    if values.dim() > 1:
        return _take_twin(values, splits, rows)
    checks.index_range(rows, 0, splits.shape[0] - 1, "rows")
    new_splits = _taken_splits(splits, rows)
    native: Any = native_module()
    out = values.new_empty(int(new_splits[-1]))
    native.take_rows(values.contiguous(), splits.contiguous(), rows.contiguous(), out)
    return out, new_splits


def _take_twin(values: Tensor, splits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    splits = checks.splits(splits, "row_splits", values.shape[0])
    checks.index_range(rows, 0, splits.shape[0] - 1, "rows")
    new_splits = _taken_splits(splits, rows)
    shift = splits[:-1][rows] - new_splits[:-1]
    index = torch.arange(int(new_splits[-1]), device=values.device)
    return values[index + torch.repeat_interleave(shift, torch.diff(new_splits))], new_splits


def _taken_splits(splits: Tensor, rows: Tensor) -> Tensor:
    new = splits.new_zeros(rows.shape[0] + 1)
    torch.cumsum(torch.diff(splits)[rows], 0, out=new[1:])
    return new


_take = define(
    "take(Tensor values, Tensor splits, Tensor rows) -> (Tensor, Tensor)",
    native=_take_native,
    twin=_take_twin,
    fake=lambda values, splits, rows: (
        values.new_empty(new_size(), *values.shape[1:]),
        splits.new_empty(rows.shape[0] + 1),
    ),
)

# ---- move


def _move_native(
    values: Tensor, source: Tensor, target: Tensor, widths: Tensor, size: int, name: str
) -> Tensor:
    native: Any = native_module()
    wide = torch.promote_types(values.dtype, torch.float32)
    out = torch.zeros(size, dtype=wide)
    runs = (source.contiguous(), target.contiguous(), widths.contiguous())
    native.move_runs(values.to(wide).contiguous(), *runs, out, name)
    return out.to(values.dtype)


def _move_twin(
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
    return out.index_add_(0, to, values.to(wide)[at]).to(values.dtype)


_move = define(
    "move(Tensor values, Tensor source, Tensor target, Tensor widths, SymInt size, str name) -> Tensor",
    native=_move_native,
    twin=_move_twin,
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
    out = torch.empty(packed.shape[0], dtype=torch.int64)
    bad = native.locate(packed.contiguous(), bases, ends.contiguous(), widths, out)
    if bad >= 0:
        _refuse_packed(packed, bad, name)
    return out


def _locate_twin(packed: Tensor, bases: Tensor, ends: Tensor, widths: Tensor, name: str) -> Tensor:
    lists, element = packed >> 32, packed & 0xFFFFFFFF
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    if bool((counts < 0).any()) or (ends.numel() and int(ends[-1]) > packed.shape[0]):
        raise InputError("feature_offset: must ascend within the occurrences")
    known = (lists >= 0) & (lists < bases.shape[0] - 1)
    safe = torch.where(known, lists, 0)
    width = torch.repeat_interleave(widths, counts)
    at = bases[safe] + element
    bad = ~known | (at + width > bases[safe + 1])
    if bool(bad.any()):
        _refuse_packed(packed, int(bad.nonzero()[0]), name)
    return at


def _refuse_packed(packed: Tensor, position: int, name: str) -> None:
    value = int(packed[position])
    raise InputError(
        f"{name}[{position}] leads out of the embeddings: list {value >> 32}, element {value & 0xFFFFFFFF}"
    )


_locate = define(
    "locate(Tensor packed, Tensor bases, Tensor ends, Tensor widths, str name) -> Tensor",
    native=_locate_native,
    twin=_locate_twin,
    fake=lambda packed, bases, ends, widths, name: torch.empty_like(packed),
)
