"""Conversion of Arrow arrays to tensors: ids, numbers and times from columns of any type.

Each function returns the values and the rows that it cannot read; the reader decides what happens to those
rows. pyarrow is imported on first use.
"""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.data.schema import FLOAT32_MAX, FeatureColumn, IdSource, NanRule
from megalith.errors import MissingDependencyError
from megalith.ops.ids import fid, hash_bytes
from megalith.ragged import Ragged
from megalith.table.table_data import MAX_TIME

Mask = NDArray[np.bool_]
NOT_AN_ID = "is not a 64-bit integer"
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_LISTS = (
    re.compile(r"\[.*\]"),
    re.compile(r"[+-]?[0-9]+(?:(?P<separator>[ ,;|\t])[+-]?[0-9]+)(?:(?P=separator)[+-]?[0-9]+)*"),
    re.compile(r"[^|]+(?:(?P<separator>\|)[^|]+)+"),
)
"""Texts that look like a list of ids: "[1, 2]", "1 2 3" and "a|b"."""
_HINT_ROWS, _HINT_SHARE, _HINT_LENGTH = 200, 0.1, 10_000


def arrow(module: str = "pyarrow") -> Any:
    """Import pyarrow or one of its modules."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        problem = f"{module} is required to read this file"
        raise MissingDependencyError.of_extra(problem, "data") from error


@dataclass(frozen=True)
class ColumnFault:
    """Rows whose value in a column cannot be used."""

    rows: Mask
    """Which rows, bool [n]."""
    column: str
    reason: str
    """Key of `Reader.skipped`."""
    what: str
    """The part of the error message that follows the value."""


def numbers(
    array: Any, column: str, *, nan: NanRule | None = None
) -> tuple[NDArray[np.float64], Mask, list[ColumnFault]]:
    # returns: float64 [n] with NaN for missing values, a mask of the missing values, and the rows that are
    # not finite numbers.
    pa, pc = arrow(), arrow("pyarrow.compute")
    array = _plain(array)
    missing = np.asarray(array.is_null())
    faults = []
    if _is_text(array.type):
        try:
            array = pc.cast(_as_text(array), pa.float64())
        except pa.ArrowInvalid:
            values = [_float(x) for x in _as_text(array).cast(pa.binary()).to_pylist()]
            bad = np.array([x is None for x in values], bool) & ~missing
            faults.append(ColumnFault(bad, column, "wrong type", "is not a number"))
            array = pa.array([math.nan if x is None else x for x in values], pa.float64())
    else:
        array = pc.cast(array, pa.float64(), safe=False)
    out = np.array(array.to_numpy(zero_copy_only=False), np.float64)
    out[missing] = np.nan
    infinite, not_numbers = np.abs(out) > FLOAT32_MAX, np.isnan(out) & ~missing
    for fault in faults:
        not_numbers &= ~fault.rows
    if nan == "missing":
        missing = missing | not_numbers
    elif not_numbers.any():
        hint = '; nan="missing" of the dense column treats it as a missing value' if nan == "error" else ""
        what = f"is not a finite number{hint}"
        faults.append(ColumnFault(not_numbers, column, "not finite", what))
    if infinite.any():
        faults.append(ColumnFault(infinite, column, "not finite", "is not a finite number"))
    return out, missing, faults


def seconds(array: Any, column: str) -> tuple[NDArray[np.int64], list[ColumnFault]]:
    # returns: int64 [n], and the rows that have no valid time.
    pa, pc = arrow(), arrow("pyarrow.compute")
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        array = pc.cast(pc.cast(array, pa.timestamp("s"), safe=False), pa.int64())
    values, missing, faults = numbers(array, column)
    if missing.any():
        faults.append(ColumnFault(missing, column, "no time", "is missing, but every row needs a time"))
    outside = (values < 0) | (values > MAX_TIME)
    if outside.any():
        what = f"is not a time in seconds between 0 and {MAX_TIME}"
        if float(np.nanmedian(values[outside])) > MAX_TIME:
            what += "; is the column in milliseconds? Divide it by 1000, or store timestamps"
        faults.append(ColumnFault(outside, column, "not a time", what))
    return np.nan_to_num(np.where(outside, 0.0, values)).astype(np.int64), faults


def ids(array: Any, feature: FeatureColumn) -> tuple[Ragged, list[ColumnFault]]:
    # A missing value is an empty row; a missing value in a list is left out.
    pa, pc = arrow(), arrow("pyarrow.compute")
    array = _plain(array)
    if feature.separator is not None and _is_text(array.type):
        array = pc.split_pattern(array, feature.separator)
    if _is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        array = _plain(array.flatten())
    else:
        lengths = np.ones(len(array), np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if feature.separator is not None and _is_text(array.type):  # "a||b" and "" hold no id in between
        array = pc.if_else(pc.equal(pc.binary_length(array), 0), pa.scalar(None, array.type), array)
    if array.null_count:
        rows = rows[np.asarray(array.is_valid())]
        array = array.drop_null()
    values, unread = _values(array, feature)
    faults = []
    if unread is not None:
        bad = np.zeros(len(lengths), bool)
        bad[rows[unread]] = True
        hint = list_hint(array.slice(int(np.flatnonzero(unread)[0]), 1), feature)
        what = NOT_AN_ID if hint is None else f"{NOT_AN_ID}; {hint}"
        faults.append(ColumnFault(bad, feature.column, "wrong type", what))
    if feature.slot is not None:
        values = fid(feature.slot, values)
    counts = np.bincount(rows, minlength=len(lengths))
    most = feature.max_length
    if most is not None and counts.size and counts.max() > most:
        ends, at = np.cumsum(counts), np.arange(len(rows))
        place = at - (ends - counts)[rows] if feature.keep == "first" else ends[rows] - 1 - at
        values, counts = values[torch.from_numpy(place < most)], np.minimum(counts, most)
    return Ragged.from_lengths(values, torch.from_numpy(counts)), faults


def why_not_ids(kind: Any) -> str | None:
    """Return why a column of an Arrow type cannot hold ids, or None if it can."""
    types = arrow().types
    kind = _inner(kind)
    if _is_list(kind):
        kind = _inner(kind.value_type)
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind):
        return None
    if not _is_text(kind):
        return f"holds {kind}; ids are integers or text"
    return None


def list_hint(array: Any, feature: FeatureColumn) -> str | None:
    """Return a hint if a column of texts looks like lists of ids, each of which would become one id."""
    array = _plain(array.slice(0, _HINT_ROWS))
    if feature.separator is not None or not _is_text(array.type):
        return None
    texts = [x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in array.to_pylist() if x]
    found = [(text, match) for text in texts for match in _list_matches(text)]
    if not found or len(found) < _HINT_SHARE * len(texts):
        return None
    text, match = found[0]
    separator = match.groupdict().get("separator")
    shown = repr(text if len(text) <= 40 else text[:37] + "...")
    if separator is None:
        return (
            f"{shown} looks like a list, but is read as one id; store a list column, or text with a separator"
        )
    return f"{shown} looks like several ids, but is read as one; separator={separator!r} splits it"


def _list_matches(text: str) -> list[re.Match[str]]:
    matches = (pattern.fullmatch(text) for pattern in _LISTS if len(text) <= _HINT_LENGTH)
    return [match for match in matches if match][:1]


def id_source(kind: Any, feature: FeatureColumn) -> IdSource | None:
    if feature.hash is not None:
        return "xxhash64" if feature.hash else "integer"
    kind = _inner(kind)
    if _is_list(kind):
        kind = _inner(kind.value_type)
    if arrow().types.is_null(kind):
        return None
    return "xxhash64" if _is_text(kind) else "integer"


def why_not_numbers(kind: Any, *, time: bool = False) -> str | None:
    """Return why a column of an Arrow type cannot hold numbers (or times), or None if it can."""
    types = arrow().types
    kind = _inner(kind)
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    if any(is_known(kind) for is_known in known) or _is_text(kind):
        return None
    if time and (types.is_timestamp(kind) or types.is_date(kind)):
        return None
    return f"holds {kind}, not {'times' if time else 'numbers'}"


# ---- column types


def _is_list(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    types = arrow().types
    views = (types.is_string_view, types.is_binary_view)
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, *views)
    return any(is_text(kind) for is_text in texts)


def _inner(kind: Any) -> Any:
    return kind.value_type if arrow().types.is_dictionary(kind) else kind


def _plain(array: Any) -> Any:
    """The array without dictionary, view or fixed-size encodings."""
    types = arrow().types
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        array = array.cast(arrow().large_binary())
    return array


def _as_text(array: Any) -> Any:
    """Views binary data as text without checking that it is UTF-8."""
    pa = arrow()
    if pa.types.is_binary(array.type):
        return array.view(pa.string())
    return array.view(pa.large_string()) if pa.types.is_large_binary(array.type) else array


# ---- single values


def _values(array: Any, feature: FeatureColumn) -> tuple[Tensor, Mask | None]:
    """int64 [n] of an array without nulls, and a mask of the values that are not valid ids."""
    pa, pc = arrow(), arrow("pyarrow.compute")
    if pa.types.is_null(array.type):
        return torch.empty(0, dtype=torch.int64, device="cpu"), None
    if not _is_text(array.type):
        if feature.hash:
            return _hashed(pc.cast(array, pa.string())), None
        if pa.types.is_uint64(array.type):
            return torch.from_numpy(array.to_numpy().view(np.int64).copy()), None
        integers = pc.cast(array, pa.int64())
        return torch.from_numpy(integers.to_numpy(zero_copy_only=False).astype(np.int64)), None
    if feature.hash is not False:
        return _hashed(array), None
    try:
        return torch.from_numpy(pc.cast(_as_text(array), pa.int64()).to_numpy().copy()), None
    except pa.ArrowInvalid:
        values = [_integer(x) for x in _as_text(array).cast(pa.binary()).to_pylist()]
        unread = np.array([x is None for x in values], bool)
        return torch.tensor(
            [x or 0 for x in values], dtype=torch.int64, device="cpu"
        ), unread if unread.any() else None


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


def _float(text: bytes | None) -> float | None:
    try:
        return None if text is None or b"_" in text else float(text)
    except ValueError:
        return None


def _integer(text: bytes) -> int | None:
    """The int64 with the bits of a signed or unsigned 64-bit integer, or None."""
    plain = text.decode("latin-1").strip(" \t")
    value = int(plain) if _INTEGER.fullmatch(plain) else None
    if value is None or not -(2**63) <= value < 2**64:
        return None
    return value - 2**64 if value >= 2**63 else value
