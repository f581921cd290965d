"""Ragged: a batch column whose rows hold any number of values.

`values` [n] and `row_splits` [batch + 1]: row i is `values[row_splits[i]:row_splits[i + 1]]`. Each value may
have a weight. The class holds tensors and offers constructors and views; arithmetic on rows is in
`megalith.ops`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Ragged:
    """Values in rows of different lengths.

    Args:
        values: [n, ...].
        row_splits: int64 or int32 [batch + 1], from 0 to n, in ascending order.
        weights: float [n], or None.

    Raises:
        InputError: The tensors do not match. On a GPU and inside torch.compile only the shape of row_splits
            is checked; ops check the values that they read.
    """

    __slots__ = ("row_splits", "single", "values", "weights")

    single: bool
    """Whether every row is known to have exactly one value."""

    def __init__(self, values: Tensor, row_splits: Tensor, weights: Tensor | None = None) -> None:
        if not isinstance(values, Tensor) or values.dim() < 1:
            raise InputError("Ragged: values must be a tensor of at least one dimension")
        if not isinstance(row_splits, Tensor) or row_splits.dtype not in (torch.int64, torch.int32):
            raise InputError("Ragged: row_splits must be an int64 or int32 tensor")
        if row_splits.dim() != 1 or row_splits.numel() < 1:
            raise InputError(f"Ragged: row_splits must be [batch + 1], got {list(row_splits.shape)}")
        if values.device != row_splits.device:
            raise InputError(f"Ragged: values are on {values.device}, row_splits on {row_splits.device}")
        if weights is not None:
            if not isinstance(weights, Tensor) or not weights.is_floating_point():
                raise InputError("Ragged: weights must be a float tensor")
            if tuple(weights.shape) != (values.shape[0],) or weights.device != values.device:
                raise InputError(f"Ragged: weights must be [{values.shape[0]}] on {values.device}")
        row_splits = row_splits.to(torch.int64)
        if row_splits.is_cpu and not torch.compiler.is_compiling():
            _check_splits(row_splits, values.shape[0])
        self.values = values
        self.row_splits = row_splits
        self.weights = weights
        self.single = False

    # ---- constructors

    @classmethod
    def trusted(
        cls, values: Tensor, row_splits: Tensor, weights: Tensor | None = None, *, single: bool = False
    ) -> Ragged:
        """Make a Ragged of tensors that are known to match, without any check.

        Args:
            values: [n].
            row_splits: int64 [batch + 1], from 0 to n.
            weights: float32 [n], or None.
            single: Whether every row has exactly one value.

        Returns:
            A Ragged of these tensors, which are not copied.
        """
        made = object.__new__(cls)
        made.values, made.row_splits, made.weights, made.single = values, row_splits, weights, single
        return made

    @classmethod
    def from_lists(
        cls,
        rows: Sequence[Sequence[Any]],
        *,
        dtype: torch.dtype = torch.int64,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> Ragged:
        """Make a Ragged of one list per row, for example `Ragged.from_lists([[1, 2], []])`.

        Args:
            rows: The values of each row.
            dtype: Type of the values. An integer type accepts integers only.
            weights: The weights of each row, with the same lengths.

        Returns:
            A Ragged with one row per list, on the default device of torch, like a `torch.tensor`.

        Raises:
            InputError: An argument is not a list of lists of numbers, or a number does not fit the type.
        """
        if not isinstance(dtype, torch.dtype):
            raise InputError(f"Ragged: dtype must be a torch.dtype, got {dtype!r}")
        values, lengths = _flat_tensor(rows, "rows", dtype)
        flat = None
        if weights is not None:
            flat, weight_lengths = _flat_tensor(weights, "weights", torch.float32)
            if weight_lengths != lengths:
                raise InputError("Ragged: weights must have the same lengths as rows")
        splits = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        return cls.from_lengths(values, splits, weights=flat).to(torch.get_default_device())

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Ragged:
        """Make a Ragged of values and lengths.

        Args:
            values: [n, ...], the values of all rows, concatenated.
            lengths: Integers [batch], the length of each row.
            weights: float [n], or None.

        Returns:
            A Ragged of `batch` rows; `values` and `weights` are not copied.

        Raises:
            InputError: The lengths are not integers [batch], or do not add up to n.
        """
        if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype not in _INTEGERS:
            raise InputError("Ragged: lengths must be an integer tensor [batch]")
        splits = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=splits[1:])
        return cls(values, splits, weights)

    @classmethod
    def from_padded(cls, x: Tensor, *, pad: float = 0, weights: Tensor | None = None) -> Ragged:
        """Make a Ragged of a padded tensor.

        Args:
            x: [batch, length].
            pad: The value that means "no value", at any position of a row.
            weights: float [batch, length], or None.

        Returns:
            A Ragged of `batch` rows without the padding, on the device of `x`.

        Raises:
            InputError: A tensor has the wrong type, shape or device.
        """
        if not isinstance(x, Tensor) or x.dim() != 2:
            raise InputError("Ragged: a padded tensor must have shape [batch, length]")
        if x.layout != torch.strided or x.is_meta:
            raise InputError(f"Ragged: a padded tensor must be dense, got {x.layout} on {x.device}")
        kept = x != _number(pad, "pad")
        picked = None
        if weights is not None:
            if not isinstance(weights, Tensor) or weights.layout != torch.strided:
                raise InputError("Ragged: weights must be a float tensor")
            if weights.device != x.device:
                raise InputError(f"Ragged: weights are on {weights.device}, the padded tensor on {x.device}")
            if weights.shape != x.shape:
                raise InputError(f"Ragged: weights must have shape {list(x.shape)} like the padded tensor")
            picked = weights[kept]
        return cls.from_lengths(x[kept], kept.sum(1), weights=picked)

    @classmethod
    def from_nested(cls, x: Tensor) -> Ragged:
        """Make a Ragged of a nested tensor.

        Args:
            x: A nested tensor with layout torch.jagged, [batch, (length)].

        Returns:
            A Ragged of `batch` rows; the values are copied only if the nested tensor has gaps between its
            rows.

        Raises:
            InputError: `x` is not such a tensor.
        """
        if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
            raise InputError("Ragged: expected a nested tensor with layout torch.jagged")
        jagged: Any = x
        if jagged.lengths() is None:
            return cls(jagged.values(), jagged.offsets())
        rows = jagged.unbind()  # it has gaps between rows
        return cls.concat([cls(row, torch.tensor([0, len(row)], device=row.device)) for row in rows])

    @classmethod
    def from_keyed(cls, keyed: Any) -> dict[str, Ragged]:
        """Make one Ragged per key of a KeyedJaggedTensor.

        Args:
            keyed: Any object with keys(), values(), lengths() and, optionally, weights_or_none().

        Returns:
            A Ragged per key; the values are views of those of `keyed`.

        Raises:
            InputError: `keyed` lacks a method, or its lengths do not match its keys or values.
        """
        try:
            keys = list(keyed.keys())
            values, lengths = keyed.values(), keyed.lengths()
            weights = keyed.weights_or_none() if hasattr(keyed, "weights_or_none") else None
        except (AttributeError, TypeError):
            raise InputError(f"Ragged: expected a KeyedJaggedTensor, got {type(keyed).__name__}") from None
        if not isinstance(values, Tensor) or not isinstance(lengths, Tensor):
            raise InputError("Ragged: values() and lengths() of a KeyedJaggedTensor must be tensors")
        if not keys:
            return {}
        if lengths.numel() % len(keys):
            raise InputError(f"Ragged: {lengths.numel()} lengths do not divide among {len(keys)} keys")
        per_key = lengths.view(len(keys), -1)
        ends = per_key.sum(1).cumsum(0).tolist()
        if ends[-1] != values.shape[0]:
            raise InputError(f"Ragged: lengths add up to {ends[-1]}, but there are {values.shape[0]} values")
        columns: dict[str, Ragged] = {}
        for key, own, begin, end in zip(keys, per_key, [0, *ends], ends, strict=False):
            picked = None if weights is None else weights[begin:end]
            columns[key] = cls.from_lengths(values[begin:end], own, weights=picked)
        return columns

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of all parts.

        Args:
            parts: At least one Ragged; all with weights, or none.

        Returns:
            A Ragged with the rows of the first part, then those of the second, and so on; a copy.

        Raises:
            InputError: There are no parts, or only some have weights.
        """
        if not isinstance(parts, list | tuple) or not all(isinstance(part, Ragged) for part in parts):
            raise InputError("Ragged: concat needs a list of Raggeds")
        if not parts:
            raise InputError("Ragged: concat needs at least one part")
        if len({part.weights is None for part in parts}) > 1:
            raise InputError("Ragged: either all parts or no part must have weights")
        weights = [part.weights for part in parts if part.weights is not None]
        return cls.from_lengths(
            torch.cat([part.values for part in parts]),
            torch.cat([part.lengths() for part in parts]),
            weights=torch.cat(weights) if weights else None,
        )

    # ---- views

    def __len__(self) -> int:
        return self.row_splits.numel() - 1

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.values.device

    def lengths(self) -> Tensor:
        """Return the length of each row, int64 [batch]."""
        return torch.diff(self.row_splits)

    def row_ids(self) -> Tensor:
        """Return the row of each value, int64 [n]."""
        rows = torch.arange(len(self), device=self.device)
        return torch.repeat_interleave(rows, self.lengths(), output_size=self.values.shape[0])

    def to_padded(self, *, pad: float = 0, length: int | None = None) -> Tensor:
        """Return the values as a padded tensor.

        Args:
            pad: The value of positions after the end of a row.
            length: Length of a row; longer rows are cut. None: the length of the longest row.

        Returns:
            [batch, length, ...], of the dtype of the values.

        Raises:
            InputError: `pad` is not a number of the values' type, or `length` is not an integer >= 0.
        """
        pad = _number(pad, "pad", self.values.dtype)
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise InputError(f"Ragged: length must be an integer >= 0, got {length!r}")
        lengths = self.lengths()
        if length is None:
            length = int(lengths.max()) if len(self) else 0
        column = torch.arange(length, device=self.device)
        filled = column < lengths[:, None]
        out = self.values.new_full((len(self), length, *self.values.shape[1:]), pad)
        out[filled] = self.values[(self.row_splits[:-1, None] + column)[filled]]
        return out

    def to_lists(self) -> list[list[Any]]:
        """Return the rows as lists."""
        splits = self.row_splits.tolist()
        flat = self.values.tolist()
        return [flat[a:b] for a, b in pairwise(splits)]

    def __getitem__(self, index: int | slice | Tensor | Sequence[int] | Sequence[bool]) -> Any:
        """Return the values of a row (int), or the Ragged of some rows.

        A slice with step 1 is a view. A tensor or list of row numbers, or of a bool per row, copies rows.
        """
        if self.row_splits.is_meta:
            raise InputError("the rows of a Ragged on the meta device cannot be read")
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return self._select(list(range(start, stop, step)))
            splits = self.row_splits[start : max(start, stop) + 1]
            begin, end = int(splits[0]), int(splits[-1])
            weights = None if self.weights is None else self.weights[begin:end]
            return Ragged.trusted(self.values[begin:end], splits - begin, weights, single=self.single)
        if not isinstance(index, Integral):
            return self._select(index)
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is out of range: the Ragged has {len(self)} rows")
        index %= len(self)
        return self.values[int(self.row_splits[index]) : int(self.row_splits[index + 1])]

    def _select(self, index: Any) -> Ragged:
        try:
            rows = torch.as_tensor(index, device=self.device)
            rows = rows.to(torch.int64) if rows.numel() == 0 else rows
        except (TypeError, ValueError, RuntimeError):
            rows = torch.empty((), device=self.device)
        if rows.dim() != 1 or rows.dtype not in (*_INTEGERS, torch.bool):
            raise InputError(
                f"Ragged: an index must be an integer, a slice, or integers or bools [rows], got {index!r}"
            )
        if rows.dtype == torch.bool:
            if len(rows) != len(self):
                raise IndexError(f"the index has {len(rows)} bools, but the Ragged has {len(self)} rows")
            rows = rows.nonzero().flatten()
        outside = rows[(rows < -len(self)) | (rows >= len(self))]
        if len(outside):
            raise IndexError(f"row {int(outside[0])} is out of range: the Ragged has {len(self)} rows")
        rows = rows.to(torch.int64) % max(len(self), 1)
        lengths = self.lengths()[rows]
        splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        places = torch.repeat_interleave(self.row_splits[:-1][rows] - splits[:-1], lengths)
        places += torch.arange(len(places), device=self.device)
        weights = None if self.weights is None else self.weights[places]
        return Ragged.trusted(self.values[places], splits, weights)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        state = {name: getattr(self, name) for name in self.__slots__}
        return None, {
            name: without_other_memory(x) if isinstance(x, Tensor) else x for name, x in state.items()
        }

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Ragged:
        """Return the Ragged on another device.

        Args:
            device: The device.
            non_blocking: As for `torch.Tensor.to`.

        Returns:
            A Ragged on that device; tensors that are already there are not copied.

        Raises:
            InputError: The device is not known.
        """
        if isinstance(device, bool) or not isinstance(device, str | torch.device | int):
            raise InputError(f"Ragged: device must be a torch.device or its name, got {device!r}")
        try:
            device = torch.device(device)
        except RuntimeError:
            raise InputError(f"Ragged: unknown device {device!r}") from None
        non_blocking = non_blocking is True
        weights = None if self.weights is None else self.weights.to(device, non_blocking=non_blocking)
        return Ragged.trusted(
            self.values.to(device, non_blocking=non_blocking),
            self.row_splits.to(device, non_blocking=non_blocking),
            weights,
            single=self.single,
        )

    def pin_memory(self) -> Ragged:
        """Return the Ragged in pinned memory; DataLoader calls it."""
        weights = None if self.weights is None else self.weights.pin_memory()
        return Ragged(self.values.pin_memory(), self.row_splits.pin_memory(), weights)

    def __repr__(self) -> str:
        weights = "" if self.weights is None else ", weighted"
        return f"Ragged({len(self)} rows, {self.values.shape[0]} values, {self.values.dtype}{weights})"


def without_other_memory(x: Tensor) -> Tensor:
    """Return a tensor for pickle, which writes the whole memory of a view: a copy if that is more."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def _flat_tensor(rows: Any, field: str, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Return the values of a list of lists as one tensor, and the length of each list."""
    listed = isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping | set | Ragged)
    if not listed or (isinstance(rows, Tensor) and (rows.dim() == 0 or rows.is_meta)):
        raise InputError(f"Ragged: {field} must be a list of lists, got {type(rows).__name__}")
    lists = []
    for number, row in enumerate(rows):
        if isinstance(row, str | bytes | Mapping | set) or not isinstance(row, Iterable) or _is_scalar(row):
            remedy = _ROW_REMEDIES.get(type(row), "put the values of a row, also a single one, into a list")
            raise InputError(
                f"Ragged: {field} must be a list of lists such as [[1, 2], []], but {field}[{number}] is "
                f"{row!r}: {remedy}"
            )
        lists.append(row if isinstance(row, np.ndarray | Tensor) else list(row))
    integral = dtype in _INTEGERS
    try:
        values = _joined([row for row in lists if len(row)])
        if values is None:
            flat = [x for row in lists for x in row]
            values = torch.tensor(flat, dtype=None if integral and flat else dtype, device="cpu")
        good = values.dim() == 1 and (not integral or values.dtype in (*_INTEGERS, torch.bool))
        narrow = values.to(dtype)
        good = good and (not integral or bool((narrow.to(torch.int64) == values).all()))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        good = False
    if not good:
        raise _bad_value(lists, field, dtype)
    return narrow, [len(row) for row in lists]


def _joined(rows: list[Any]) -> Tensor | None:
    """Return the concatenation of rows that are all tensors, or all arrays, of one type."""
    for kind in (np.ndarray, Tensor):
        if rows and all(isinstance(row, kind) and row.dtype == rows[0].dtype for row in rows):
            if kind is Tensor:
                return torch.cat(rows).detach().cpu()
            return torch.from_numpy(np.concatenate(rows)) if rows[0].dtype.kind in "ifb" else None
    return None


def _bad_value(lists: list[Any], field: str, dtype: torch.dtype) -> InputError:
    """Return the error for the first value that is not a number of this type."""
    integral = dtype in _INTEGERS
    for number, row in enumerate(lists):
        for at, value in enumerate(row):
            value = value.item() if _is_scalar(value) else value
            number_of_kind = isinstance(value, Integral if integral else Real)
            if not number_of_kind:
                kind = "an integer" if integral else "a number"
                remedy = _value_remedy(value, integral)
                return InputError(f"Ragged: {field}[{number}][{at}] is {value!r}, not {kind}: {remedy}")
            if integral and not -(2**63) <= int(value) < 2**63:
                return InputError(
                    f"Ragged: {field}[{number}][{at}] is {value!r}: ids are signed 64-bit integers; subtract "
                    "2**64 from ids of 2**63 and above"
                )
    return InputError(f"Ragged: {field} must hold numbers that fit {dtype}")


def _value_remedy(value: Any, integral: bool) -> str:
    if value is None:
        return "leave the value out; a row without values is []"
    if isinstance(value, str | bytes) and integral:
        return "convert text to ids with megalith.hash_strings"
    if isinstance(value, Real) and integral:
        return "ids must be integers; pass dtype=torch.float32 for values that are not ids"
    return "each row must be a flat list of numbers"


_ROW_REMEDIES: dict[type, str] = {
    str: "convert text to ids with megalith.hash_strings",
    type(None): "a row without values is []",
}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim == 0


def _number(value: Any, field: str, dtype: torch.dtype | None = None) -> Any:
    """Check a number; for an integer type, an integer."""
    integral = dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    if not isinstance(value, Integral if integral else Real):
        raise InputError(
            f"Ragged: {field} must be a number{f' of type {dtype}' if dtype else ''}, got {value!r}"
        )
    return value


def _check_splits(row_splits: Tensor, num_values: int) -> None:
    if int(row_splits[0]) != 0 or int(row_splits[-1]) != num_values:
        raise InputError(
            f"Ragged: row_splits must start at 0 and end at {num_values}, the number of values, "
            f"got {int(row_splits[0])} to {int(row_splits[-1])}"
        )
    if row_splits.numel() > 1 and bool((row_splits[1:] < row_splits[:-1]).any()):
        raise InputError("Ragged: row_splits must be in ascending order")
