"""TorchRec's jagged tensors, for users without TorchRec: the part of their methods that models call.

The collections take TorchRec's own objects as well, and then return TorchRec's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from megalith.errors import InputError, UnknownNameError
from megalith.ops import checks
from megalith.ragged import Ragged


class JaggedTensor:
    """Rows of different lengths.

    Args:
        values: [n, ...], the values of all rows, concatenated.
        weights: [n], one per value, or None.
        lengths: Integers [batch]; either lengths or offsets are needed.
        offsets: Integers [batch + 1].
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._rows = Ragged.from_lengths(values, _lengths("JaggedTensor", lengths, offsets))
        if weights is not None:
            checks.tensor(weights, "JaggedTensor: weights", (values.shape[0],))
        self._weights = weights

    def values(self) -> Tensor:
        """Return the values, [n, ...]."""
        return self._rows.values

    def lengths(self) -> Tensor:
        """Return the lengths of the rows, int64 [batch]."""
        return self._rows.lengths()

    def offsets(self) -> Tensor:
        """Return where each row begins, int64 [batch + 1]."""
        return self._rows.row_splits

    def weights(self) -> Tensor:
        """Return the weights, [n]; without any, it raises InputError."""
        return _present(self._weights, "JaggedTensor")

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, [n], or None."""
        return self._weights

    def to_dense(self) -> list[Tensor]:
        """Return the values of each row."""
        return list(self._rows)

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0) -> Tensor:
        """Return the rows as one tensor.

        Args:
            desired_length: The length of a row; None: that of the longest.
            padding_value: Fills the rest of a row.

        Returns:
            [batch, desired_length, ...].
        """
        return self._rows.to_padded(pad=padding_value, length=desired_length)


class KeyedJaggedTensor:
    """One jagged tensor of ids per key.

    Args:
        keys: The names of the features.
        values: Ids [n]: all rows of the first key, then those of the second, and so on.
        weights: float [n], one per id, or None.
        lengths: Integers [F * B], the lengths of the rows; either lengths or offsets are needed.
        offsets: Integers [F * B + 1].
        stride: The batch size B; computed if it is not given.
        stride_per_key_per_rank: For keys with different numbers of rows, their numbers by rank.
        inverse_indices: For such keys, their names and the row of each example, int64 [F, B].
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    ) -> None:
        where = "KeyedJaggedTensor"
        self._keys = [checks.text(key, f"{where}: a key") for key in checks.as_list(keys, f"{where}: keys")]
        self._values = checks.integers(values, f"{where}: values")
        if weights is not None:
            checks.floats(weights, f"{where}: weights", (values.shape[0],))
        self._weights = weights
        self._lengths = checks.with_data(_lengths(where, lengths, offsets), f"{where}: lengths")
        if stride_per_key_per_rank is not None:
            given = checks.as_list(stride_per_key_per_rank, f"{where}: stride_per_key_per_rank")
            self._strides = [sum(checks.sizes(each, f"{where}: strides", 0)) for each in given]
        else:
            even = self._lengths.numel() // max(len(self._keys), 1) if stride is None else stride
            self._strides = [checks.integer(even, f"{where}: stride", 0)] * len(self._keys)
        self._inverse = inverse_indices
        self._columns = Ragged.from_keyed(self)  # checks that lengths fit keys and values

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Make one of lengths; the arguments are those of the class."""
        return cls(keys, values, weights, lengths)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Make one of offsets; the arguments are those of the class."""
        return cls(keys, values, weights, offsets=offsets)

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Return all ids, [n]."""
        return self._values

    def lengths(self) -> Tensor:
        """Return the lengths of all rows, [F * B]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return where each row begins, int64 [F * B + 1]."""
        return torch.nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def weights(self) -> Tensor:
        """Return the weights, [n]; without any, it raises InputError."""
        return _present(self._weights, "KeyedJaggedTensor")

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, [n], or None."""
        return self._weights

    def stride(self) -> int:
        """Return the batch size, the largest number of rows of a key."""
        return max(self._strides, default=0)

    def stride_per_key(self) -> list[int]:
        """Return the number of rows of each key."""
        return self._strides

    def inverse_indices_or_none(self) -> tuple[Sequence[str], Tensor] | None:
        """Return the row of each example for each key, as they were given."""
        return self._inverse

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the jagged tensor of each key."""
        return {key: self[key] for key in self._keys}

    def __getitem__(self, key: str) -> JaggedTensor:
        column = _named(self._columns, key)
        return JaggedTensor(column.values, column.weights, column.lengths())


class KeyedTensor:
    """Tensors of several features, concatenated.

    Args:
        keys: The names of the features.
        length_per_key: The number of columns of each.
        values: [batch, sum of length_per_key].
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = checks.as_list(keys, "KeyedTensor: keys")
        self._widths = checks.sizes(
            checks.as_list(length_per_key, "KeyedTensor: length_per_key"), "KeyedTensor: a length"
        )
        checks.same_length(keys=self._keys, length_per_key=self._widths)
        self._values = checks.tensor(values, "KeyedTensor: values", (None, sum(self._widths)))

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Return all tensors as one, [batch, sum of length_per_key]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the number of columns of each feature."""
        return self._widths

    def offset_per_key(self) -> list[int]:
        """Return where the columns of each feature begin, and the number of all columns."""
        return [0, *accumulate(self._widths)]

    def to_dict(self) -> dict[str, Tensor]:
        """Return the tensor of each feature, [batch, length], as views."""
        return dict(zip(self._keys, self._values.split(self._widths, 1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        found: Tensor = _named(self.to_dict(), key)
        return found


def _lengths(where: str, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if (lengths is None) == (offsets is None):
        raise InputError(f"{where}: pass either lengths or offsets")
    if lengths is not None:
        return checks.integers(lengths, f"{where}: lengths")
    return torch.diff(checks.integers(offsets, f"{where}: offsets"))


def _present(weights: Tensor | None, where: str) -> Tensor:
    if weights is None:
        raise InputError(f"{where}: it has no weights; pass weights=, or call weights_or_none()")
    return weights


def _named(found: Mapping[str, Any], key: str) -> Any:
    if not isinstance(key, str) or key not in found:
        raise UnknownNameError(f"no key {key!r} (known: {', '.join(map(repr, found))})")
    return found[key]
