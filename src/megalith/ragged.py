"""Ragged: a batch column whose rows hold any number of values.

`values` [n] and `row_splits` [batch + 1]: row i is `values[row_splits[i]:row_splits[i + 1]]`. Each value may
have a weight. The class holds tensors and offers constructors and views; arithmetic on rows is in
`megalith.ops`. `read_ids` converts an Arrow array to ids, for the constructors and for the readers of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from megalith.errors import InputError
from megalith.hashing import hash_bytes, hash_strings
from megalith.library import import_extra

Texts = dict[int, str]
"""Id -> the text that was hashed to it."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Ragged:
    """Values in rows of different lengths.

    It is a pytree node, `default_collate` concatenates the rows of several, and a DataLoader pins its memory.

    Args:
        values: [n, ...]. This and the other arguments may be numpy arrays.
        row_splits: int64 or int32 [batch + 1], from 0 to n, in ascending order.
        weights: float [n], or None.

    Raises:
        InputError: The tensors do not match. On a GPU and inside torch.compile only the shape of row_splits
            is checked; ops check the values that they read.
    """

    __slots__ = ("row_splits", "single", "values", "weights")

    single: bool
    """Whether every row is known to have exactly one value."""

    def __init__(self, values: TensorLike, row_splits: TensorLike, weights: TensorLike | None = None) -> None:
        values, row_splits, weights = as_tensor(values), as_tensor(row_splits), as_tensor(weights)
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
    def from_lengths(
        cls, values: TensorLike, lengths: TensorLike, weights: TensorLike | None = None
    ) -> Ragged:
        """Make a Ragged of values and lengths.

        Args:
            values: [n, ...], the values of all rows, concatenated. All arguments may be numpy arrays.
            lengths: Integers [batch], the length of each row.
            weights: float [n], or None.

        Returns:
            A Ragged of `batch` rows; `values` and `weights` are not copied.

        Raises:
            InputError: The lengths are not integers [batch], or do not add up to n.
        """
        lengths = as_tensor(lengths)
        if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype not in _INTEGERS:
            raise InputError("Ragged: lengths must be an integer tensor [batch]")
        splits = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=splits[1:])
        return cls(values, splits, weights)

    @classmethod
    def from_padded(cls, x: TensorLike, *, pad: float = 0, weights: TensorLike | None = None) -> Ragged:
        """Make a Ragged of a padded tensor.

        Args:
            x: [batch, length], a tensor or a numpy array.
            pad: The value that means "no value", at any position of a row.
            weights: float [batch, length], or None.

        Returns:
            A Ragged of `batch` rows without the padding, on the device of `x`.

        Raises:
            InputError: A tensor has the wrong type, shape or device.
        """
        x, weights = as_tensor(x), as_tensor(weights)
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
            keyed: Any object with keys(), values(), lengths() and, optionally, weights_or_none() and
                stride_per_key(), the number of rows of each key.

        Returns:
            A Ragged per key; the values are views of those of `keyed`.

        Raises:
            InputError: `keyed` lacks a method, or its lengths do not match its keys or values.
        """
        try:
            keys = list(keyed.keys())
            values, lengths = keyed.values(), keyed.lengths()
            weights = keyed.weights_or_none() if hasattr(keyed, "weights_or_none") else None
            strides = list(keyed.stride_per_key()) if hasattr(keyed, "stride_per_key") else None
        except (AttributeError, TypeError):
            raise InputError(f"Ragged: expected a KeyedJaggedTensor, got {type(keyed).__name__}") from None
        if not isinstance(values, Tensor) or not isinstance(lengths, Tensor):
            raise InputError("Ragged: values() and lengths() of a KeyedJaggedTensor must be tensors")
        if not keys:
            return {}
        if strides is None:
            if lengths.numel() % len(keys):
                raise InputError(f"Ragged: {lengths.numel()} lengths do not divide among {len(keys)} keys")
            strides = [lengths.numel() // len(keys)] * len(keys)
        if len(strides) != len(keys) or sum(strides) != lengths.numel():
            raise InputError(f"Ragged: {keys} have {strides} rows, but there are {lengths.numel()} lengths")
        per_key = lengths.split(strides)
        ends = torch.stack([own.sum() for own in per_key]).cumsum(0).tolist()
        if ends[-1] != values.shape[0]:
            raise InputError(f"Ragged: lengths add up to {ends[-1]}, but there are {values.shape[0]} values")
        columns: dict[str, Ragged] = {}
        for key, own, begin, end in zip(keys, per_key, [0, *ends], ends, strict=False):
            picked = None if weights is None else weights[begin:end]
            columns[key] = cls.from_lengths(values[begin:end], own, weights=picked)
        return columns

    @classmethod
    def from_arrow(
        cls,
        column: Any,
        *,
        hash: bool | None = None,
        separator: str | None = None,
        weights: Any = None,
        texts: Texts | None = None,
    ) -> Ragged:
        """Make a Ragged of an Arrow column of ids: integers, text, or lists of them.

        A missing row has no ids, and a missing value in a list is left out. It needs pyarrow.

        Args:
            column: A pyarrow Array or ChunkedArray [batch], or an object with Arrow's PyCapsule interface.
            hash: None hashes text and uses integers as ids. True hashes integers as text too. False accepts
                only integers, also those written as text.
            separator: Splits a text into several ids: "|" splits "a|b".
            weights: A column of floats with as many values per row. None: no weights.
            texts: A dict that gets the text of each hashed id. None: the text is not kept.

        Returns:
            A Ragged of `batch` rows on the CPU.

        Raises:
            InputError: The column does not hold ids; the message names the first such row.
        """
        array = _as_arrow(column, "column")
        if not (hash is None or isinstance(hash, bool)) or not (
            separator is None or isinstance(separator, str)
        ):
            raise InputError(f"Ragged: hash must be a bool and separator text, got {hash!r}, {separator!r}")
        why = why_not_ids(array.type)
        if why is not None:
            raise InputError(f"Ragged: the column {why}")
        found = read_ids(array, hash=hash, separator=separator or None, texts=_checked_texts(texts))
        if found.unread is not None:
            row = int(found.rows[int(np.flatnonzero(found.unread)[0])])
            raise InputError(
                f"Ragged: row {row} of the column holds {array[row].as_py()!r}, {NOT_AN_ID}; "
                "hash=True accepts any text"
            )
        if weights is None:
            return found.ragged
        flat = plain_array(_as_arrow(weights, "weights"))
        flat = flat.flatten() if is_list(flat.type) else flat
        try:
            values = np.array(flat.to_numpy(zero_copy_only=False), np.float32)
        except (TypeError, ValueError):
            raise InputError(f"Ragged: weights must be a column of floats, got {flat.type}") from None
        if found.kept is not None and len(values) == len(found.kept):
            values = values[found.kept]
        if len(values) != len(found.ragged.values) or np.isnan(values).any():
            raise InputError("Ragged: weights must hold one number for each value of the column")
        return cls(found.ragged.values, found.ragged.row_splits, torch.from_numpy(values))

    @classmethod
    def from_pandas(
        cls,
        series: Any,
        *,
        hash: bool | None = None,
        separator: str | None = None,
        texts: Texts | None = None,
    ) -> Ragged:
        """Make a Ragged of a pandas Series of ids: integers, text, categories, or lists of them.

        Args:
            series: The column [batch]; its index is ignored.
            hash: See `from_arrow`.
            separator: See `from_arrow`.
            texts: See `from_arrow`.

        Returns:
            A Ragged of `batch` rows on the CPU.

        Raises:
            InputError: It is not a Series, or does not hold ids, for example floats.
        """
        if type(series).__module__.partition(".")[0] != "pandas" or getattr(series, "ndim", 0) != 1:
            raise InputError(
                f"Ragged: series must be a pandas Series, got {type(series).__name__}; "
                "megalith.data.batch_from reads a DataFrame"
            )
        if getattr(series.dtype, "kind", "") == "f":
            raise InputError(
                f"Ragged: the column holds {series.dtype}; ids are integers or text; pandas turns integers "
                'with missing values into floats: convert them with series.astype("Int64")'
            )
        return cls.from_arrow(arrow_of(series), hash=hash, separator=separator, texts=texts)

    @classmethod
    def from_polars(
        cls,
        series: Any,
        *,
        hash: bool | None = None,
        separator: str | None = None,
        texts: Texts | None = None,
    ) -> Ragged:
        """Make a Ragged of a polars Series of ids: integers, text, categories, or lists of them.

        Args:
            series: The column [batch].
            hash: See `from_arrow`.
            separator: See `from_arrow`.
            texts: See `from_arrow`.

        Returns:
            A Ragged of `batch` rows on the CPU.

        Raises:
            InputError: It is not a Series, or does not hold ids.
        """
        if type(series).__module__.partition(".")[0] != "polars" or not hasattr(series, "dtype"):
            raise InputError(
                f"Ragged: series must be a polars Series, got {type(series).__name__}; "
                "megalith.data.batch_from reads a DataFrame"
            )
        return cls.from_arrow(series.to_arrow(), hash=hash, separator=separator, texts=texts)

    @classmethod
    def from_numpy(
        cls, array: NDArray[Any], *, hash: bool | None = None, texts: Texts | None = None
    ) -> Ragged:
        """Make a Ragged of a numpy array of ids: integers, text, or objects such as lists and arrays.

        Args:
            array: [batch], one id or list of ids per row; or [batch, length], `length` ids per row.
            hash: See `from_arrow`.
            texts: See `from_arrow`.

        Returns:
            A Ragged of `batch` rows on the CPU.

        Raises:
            InputError: It is not an array of ids.
        """
        if not (hash is None or isinstance(hash, bool)):
            raise InputError(f"Ragged: hash must be a bool, got {hash!r}")
        if not isinstance(array, np.ndarray) or array.ndim not in (1, 2):
            shape = f"{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InputError(f"Ragged: array must be a numpy array [batch] or [batch, length], got {shape}")
        splits = torch.arange(len(array) + 1, device="cpu") * (1 if array.ndim == 1 else array.shape[1])
        if array.dtype.kind == "O" and array.ndim == 1:
            return cls.from_arrow(arrow_of(array), hash=hash, texts=texts)
        if array.dtype.kind in "iub" and not hash:
            ids = as_tensor(array.reshape(-1)).to(torch.int64)
            return cls.trusted(ids, splits, single=array.ndim == 1)
        if array.dtype.kind in "iub":
            array = array.astype(str)
        if array.dtype.kind not in "USTO" or hash is False:
            raise InputError(f"Ragged: the array holds {array.dtype}; ids are integers or text")
        ids = hash_strings(array.reshape(-1))
        if texts is not None:
            _checked_texts(texts).update(zip(ids.tolist(), map(_shown, array.reshape(-1)), strict=True))
        return cls.trusted(ids, splits, single=array.ndim == 1)

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

    def to_nested(self) -> Tensor:
        """Return the values as a nested tensor with layout torch.jagged, [batch, (length)].

        Its values are those of the Ragged, not a copy. The weights are not part of it.
        """
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.row_splits)
        return nested

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
        values, splits = self.values.pin_memory(), self.row_splits.pin_memory()
        return Ragged.trusted(values, splits, weights, single=self.single)

    def __repr__(self) -> str:
        weights = "" if self.weights is None else ", weighted"
        return f"Ragged({len(self)} rows, {self.values.shape[0]} values, {self.values.dtype}{weights})"


pytree.register_pytree_node(
    Ragged,
    lambda ragged: (
        [x for x in (ragged.values, ragged.row_splits, ragged.weights) if x is not None],
        ragged.single,
    ),
    lambda leaves, single: Ragged.trusted(*leaves, single=single),  # leaves may be anything, not only tensors
    serialized_type_name="megalith.Ragged",
)
default_collate_fn_map[Ragged] = lambda rows, *, collate_fn_map=None: Ragged.concat(rows)


TensorLike = Tensor | NDArray[Any]


def as_tensor(x: Any) -> Any:
    """Return a numpy array of numbers as a tensor, without a copy if it can be written; others unchanged."""
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iufb":
        return x
    if x.dtype.kind == "u" and x.dtype.itemsize > 1:  # torch computes little with them; the bits stay
        x = x.astype(np.int64) if x.dtype.itemsize < 8 else x.view(np.int64)
    usable = x.flags.writeable and x.dtype.isnative and all(stride >= 0 for stride in x.strides)
    return torch.from_numpy(x if usable else x.astype(x.dtype.newbyteorder("=")).copy())


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
            f"got {int(row_splits[0])} to {int(row_splits[-1])} (to offsets of nn.EmbeddingBag, append the "
            "number of values)"
        )
    if row_splits.numel() > 1 and bool((row_splits[1:] < row_splits[:-1]).any()):
        raise InputError("Ragged: row_splits must be in ascending order")


# ---- Arrow columns of ids

NOT_AN_ID = "is not a 64-bit integer"
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
Mask = NDArray[np.bool_]


class ReadIds(NamedTuple):
    """The ids of an Arrow array."""

    ragged: Ragged
    rows: NDArray[np.int64]
    """Row of each id, int64 [n]."""
    kept: Mask | None
    """Which values of the flat array were not missing; None: all."""
    unread: Mask | None
    """Which ids could not be read and are 0, bool [n]; None: none."""


def read_ids(
    array: Any, *, hash: bool | None, separator: str | None = None, texts: Texts | None = None
) -> ReadIds:
    """Read the ids of an Arrow array whose type `why_not_ids` accepts."""
    pc = arrow("pyarrow.compute")
    array = plain_array(array)
    split = separator is not None and is_text(array.type)
    if split:
        array = pc.split_pattern(array, separator)
    lengths = None
    if is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        array = plain_array(array.flatten())
    num_rows = len(array) if lengths is None else len(lengths)
    rows = np.arange(num_rows) if lengths is None else np.repeat(np.arange(num_rows), lengths)
    if split:  # "a||b" and "" hold no id in between
        empty = pc.equal(pc.binary_length(array), 0)
        array = pc.if_else(empty, arrow().scalar(None, array.type), array)
    kept = None
    if array.null_count:
        kept = np.asarray(array.is_valid())
        rows, array = rows[kept], array.drop_null()
        lengths = np.bincount(rows, minlength=num_rows)
    values, unread = _id_values(array, hash)
    if texts is not None and (hash or (hash is None and is_text(array.type))):
        texts.update(zip(values.tolist(), map(_shown, array.to_pylist()), strict=True))
    splits = np.arange(num_rows + 1)
    if lengths is not None:
        np.cumsum(lengths, out=splits[1:])
    ragged = Ragged.trusted(values, torch.from_numpy(splits), single=lengths is None)
    return ReadIds(ragged, rows, kept, unread)


def why_not_ids(kind: Any) -> str | None:
    """Return why a column of an Arrow type cannot hold ids, or None if it can."""
    types = arrow().types
    kind = without_encoding(kind)
    if is_list(kind):
        kind = without_encoding(kind.value_type)
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind) or is_text(kind):
        return None
    hint = '; convert them (pandas: .astype("Int64"))' if types.is_floating(kind) else ""
    return f"holds {kind}; ids are integers or text{hint}"


def arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or one of its modules."""
    return import_extra(module, f"{module} is required to read this data", "data")


def arrow_of(values: Any) -> Any:
    """Return an array of numpy or pandas as an Arrow array."""
    pa = arrow()
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"Ragged: the column has values of several types, or no ids ({error}); convert it to one type, "
            "for example with astype(str)"
        ) from None


def is_list(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: Any) -> bool:
    types = arrow().types
    views = (types.is_string_view, types.is_binary_view)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, *views)
    return any(each(kind) for each in texts)


def without_encoding(kind: Any) -> Any:
    """The type of the values of a dictionary or extension type."""
    kind = getattr(kind, "storage_type", kind)
    return kind.value_type if arrow().types.is_dictionary(kind) else kind


def plain_array(array: Any) -> Any:
    """Return the array without extension, dictionary or view encodings."""
    types = arrow().types
    array = getattr(array, "storage", array)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        array = array.cast(arrow().large_binary())
    return array


def as_text(array: Any) -> Any:
    """View binary data as text without checking that it is UTF-8."""
    pa = arrow()
    if pa.types.is_binary(array.type):
        return array.view(pa.string())
    return array.view(pa.large_string()) if pa.types.is_large_binary(array.type) else array


def _as_arrow(column: Any, field: str) -> Any:
    pa = arrow()
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        if hasattr(column, "__arrow_c_array__"):
            column = pa.array(column)
        elif hasattr(column, "__arrow_c_stream__"):
            column = pa.chunked_array(column)
        else:
            raise InputError(
                f"Ragged: {field} must be an Arrow array or have its PyCapsule interface, "
                f"got {type(column).__name__}"
            )
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column


def _checked_texts(texts: Any) -> Any:
    if texts is not None and not isinstance(texts, dict):
        raise InputError(f"Ragged: texts must be a dict that gets id -> text, got {type(texts).__name__}")
    return texts


def _shown(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _id_values(array: Any, hash: bool | None) -> tuple[Tensor, Mask | None]:
    """int64 [n] of an array without nulls, and a mask of the values that are not valid ids."""
    pa, pc = arrow(), arrow("pyarrow.compute")
    if pa.types.is_null(array.type):
        return torch.empty(0, dtype=torch.int64, device="cpu"), None
    if not is_text(array.type):
        if hash:
            return _hashed(pc.cast(array, pa.string())), None
        if pa.types.is_uint64(array.type):
            return torch.from_numpy(array.to_numpy().view(np.int64).copy()), None
        integers = pc.cast(array, pa.int64())
        return torch.from_numpy(np.array(integers.to_numpy(zero_copy_only=False), np.int64)), None
    if hash is not False:
        return _hashed(array), None
    try:
        return torch.from_numpy(pc.cast(as_text(array), pa.int64()).to_numpy().copy()), None
    except pa.ArrowInvalid:
        values = [_integer(x) for x in as_text(array).cast(pa.binary()).to_pylist()]
        unread = np.array([x is None for x in values], bool)
        ids = torch.tensor([x or 0 for x in values], dtype=torch.int64, device="cpu")
        return ids, unread if unread.any() else None


def _hashed(array: Any) -> Tensor:
    if len(array) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    types = arrow().types
    _, offsets, data = array.buffers()
    large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    width = np.dtype(np.int64 if large else np.int32)
    splits = np.frombuffer(offsets, width, len(array) + 1, array.offset * width.itemsize).astype(np.int64)
    used = b"" if data is None else data.slice(int(splits[0]), int(splits[-1] - splits[0]))
    return hash_bytes(used, torch.from_numpy(splits - splits[0]))


def _integer(text: bytes) -> int | None:
    """The int64 with the bits of a signed or unsigned 64-bit integer, or None."""
    plain = text.decode("latin-1").strip(" \t")
    value = int(plain) if _INTEGER.fullmatch(plain) else None
    if value is None or not -(2**63) <= value < 2**64:
        return None
    return value - 2**64 if value >= 2**63 else value
