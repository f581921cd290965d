"""Arrow tables to Samples by a Schema: ids, labels, dense values, weights and times, and rows that are bad.

The functions return what they read and the rows that they cannot read; a reader decides what happens to those
rows. `batch_from` reads a whole table or DataFrame and raises at the first bad row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.data.batch import Batch, Samples
from megalith.data.schema import FLOAT32_MAX, FeatureColumn, IdSource, NanRule, Schema
from megalith.errors import InputError
from megalith.ops import checks
from megalith.ops.ids import fid
from megalith.ragged import (
    NOT_AN_ID,
    Mask,
    Ragged,
    Texts,
    arrow,
    arrow_of,
    as_text,
    is_list,
    is_text,
    plain_array,
    read_ids,
    why_not_ids,
    without_encoding,
)
from megalith.table.table_data import MAX_TIME

_LISTS = (
    re.compile(r"\[.*\]"),
    re.compile(r"[+-]?[0-9]+(?:(?P<separator>[ ,;|\t])[+-]?[0-9]+)(?:(?P=separator)[+-]?[0-9]+)*"),
    re.compile(r"[^|]+(?:(?P<separator>\|)[^|]+)+"),
)
"""Texts that look like a list of ids: "[1, 2]", "1 2 3" and "a|b"."""
_HINT_ROWS, _HINT_SHARE, _HINT_LENGTH = 200, 0.1, 10_000
_ID_WORDS: Mapping[IdSource, str] = {"integer": "integers as they are", "xxhash64": "hashes of text"}


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


# ---- tables


def batch_from(
    table: Any,
    schema: Schema,
    *,
    binary_labels: bool = False,
    texts: dict[str, Texts] | None = None,
) -> Batch:
    """Make a batch of a whole table.

    Args:
        table: An Arrow Table or RecordBatch, a DataFrame of pandas or polars, a Dataset of Hugging Face, or a
            mapping of column names to arrays or lists.
        schema: The columns to read.
        binary_labels: Whether a label other than 0 and 1 raises. False: any number is a label.
        texts: A dict that gets, for each feature whose text was hashed, a dict of id -> text.

    Returns:
        A batch of all rows, on the CPU.

    Raises:
        InputError: A column is missing or has the wrong type, or a value cannot be read; the message names
            column and row.
    """
    checks.instance(schema, Schema, "batch_from: schema")
    checks.flag(binary_labels, "batch_from: binary_labels")
    if texts is not None:
        checks.mapping(texts, "batch_from: texts", '{"user": {}}')
    given = arrow_table(table, "batch_from: table")
    _, problem = check_columns(schema, schema.columns, kinds_of(given.schema), "batch_from")
    if problem is not None:
        raise InputError(problem[1])
    faults: list[ColumnFault] = []
    samples = read_samples(given, schema, faults, binary_labels=binary_labels, texts=texts)
    for fault in sorted(faults, key=lambda fault: int(np.argmax(fault.rows))):
        row = int(np.argmax(fault.rows))
        value = shown(given.column(fault.column)[row].as_py())
        raise InputError(f"batch_from: row {row}, column {fault.column!r}: {value} {fault.what}")
    return samples.to_batch({})


def is_table(value: Any) -> bool:
    """Return whether `arrow_table` reads a value, which is not a path then."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__arrow_c_stream__") or package in ("datasets", "pandas", "polars", "pyarrow")


def arrow_table(table: Any, what: str) -> Any:
    """Return any table as an Arrow Table with one chunk per column."""
    pa = arrow()
    try:
        if isinstance(table, Mapping):
            made = pa.table({str(name): arrow_of(column) for name, column in table.items()})
        elif type(table).__module__.partition(".")[0] == "datasets":
            made = table.with_format("arrow")[:]
        elif isinstance(table, pa.RecordBatch):
            made = pa.Table.from_batches([table])
        elif isinstance(table, pa.Table):
            made = table
        elif is_table(table):
            made = pa.table(table)
        else:
            raise InputError(
                f"{what} must be an Arrow Table or RecordBatch, a DataFrame, or a mapping of names to "
                f"arrays, got {type(table).__name__}"
            )
        return made.combine_chunks()
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{what} cannot be read as an Arrow table: {error}") from None


def kinds_of(schema: Any) -> dict[str, Any]:
    return {field.name: field.type for field in schema}


def check_columns(
    schema: Schema, columns: list[str], kinds: Mapping[str, Any], where: object
) -> tuple[Schema, tuple[str, str] | None]:
    """Return the schema with the sources of ids, and reason and message if columns do not match it."""
    for name in columns:
        if name not in kinds:
            have = ", ".join(list(kinds)[:20]) + (", ..." if len(kinds) > 20 else "")
            role = "label column" if name in schema.labels else "column"
            like = get_close_matches(name, kinds, 1)
            problem = f"{where}: {role} {name!r} is missing; the file has {have}"
            renamed = f"; is it {like[0]!r} now?" if like else ""
            return schema, ("missing column", f"{problem}{renamed}{_rename(schema, name)}")
    numeric = [*schema.labels, *([schema.weight] if schema.weight else ())]
    problems = [(name, why_not_numbers(kinds[name])) for name in numeric]
    problems += [(x.column, why_not_numbers(kinds[x.column])) for x in schema.dense_columns]
    problems += [(x.column, why_not_ids(kinds[x.column])) for x in schema.feature_columns.values()]
    if schema.time is not None:
        problems.append((schema.time, why_not_numbers(kinds[schema.time], time=True)))
    for name, why in problems:
        if why is not None:
            return schema, ("wrong type", f"{where}: column {name!r} {why}")
    found: dict[str, IdSource] = {}
    for name, feature in schema.feature_columns.items():
        source = id_source(kinds[feature.column], feature)
        if source is None or source == feature.ids:
            continue
        if feature.ids is not None:
            message = (
                f"{where}: column {feature.column!r} holds {kinds[feature.column]}, so that its ids would "
                f"be {_ID_WORDS[source]}, but feature {name!r} was read with {_ID_WORDS[feature.ids]} "
                "before; convert the column, or train with hash=True (config file: hash = true), "
                "which gives integers the ids of their text"
            )
            return schema, ("wrong type", message)
        found[name] = source
    return (schema.with_ids(found) if found else schema), None


def _rename(schema: Schema, name: str) -> str:
    """The remedy for a column that is missing."""
    roles = {schema.weight: "weight COLUMN", schema.time: "time COLUMN"}
    roles |= dict.fromkeys(schema.labels, "label COLUMN")
    roles |= {column.column: "dense COLUMN" for column in schema.dense_columns}
    roles |= {x.column: f"features {key}=COLUMN" for key, x in schema.feature_columns.items()}
    if name not in roles:
        return ""
    return f"; name its column in the schema (command line: --{roles[name]})"


def read_samples(
    table: Any,
    schema: Schema,
    faults: list[ColumnFault],
    *,
    binary_labels: bool = False,
    texts: dict[str, Texts] | None = None,
) -> Samples:
    """Read the rows of a table or record batch; bad rows are added to `faults`, and their values are any."""
    n = table.num_rows
    targets = np.full((n, max(len(schema.labels), 1)), np.nan)
    for i, name in enumerate(schema.labels):
        targets[:, i], unlabelled, found = numbers(_column(table, name), name, nan="missing")
        faults += found
        if unlabelled.any():
            faults.append(ColumnFault(unlabelled, name, "no label", "is not a label"))
        if binary_labels:
            wrong = (targets[:, i] != 0) & (targets[:, i] != 1) & ~np.isnan(targets[:, i])
            if wrong.any():
                faults.append(ColumnFault(wrong, name, "label not 0 or 1", "is not 0 or 1"))
    labels = targets if schema.has_several_labels else targets[:, 0]
    weights = None
    if schema.weight is not None:
        weights, missing, found = numbers(_column(table, schema.weight), schema.weight)
        faults += found
        wrong = missing | (weights < 0)
        if wrong.any():
            faults.append(ColumnFault(wrong, schema.weight, "no weight", "is not a weight of 0 or more"))
    times = None
    if schema.time is not None:
        times, found = seconds(_column(table, schema.time), schema.time, schema.time_format)
        faults += found
    dense = read_dense(table, schema, faults) if schema.dense_columns else None
    features = {}
    for name, feature in schema.feature_columns.items():
        side = None if texts is None else texts.setdefault(name, {})
        features[name], found = ids(_column(table, feature.column), feature, side)
        faults += found
    return Samples(
        features,
        torch.from_numpy(labels.astype(np.float32)),
        None if dense is None else schema.normalise(dense),
        None if weights is None else torch.from_numpy(weights.astype(np.float32)),
        None if times is None else torch.from_numpy(times),
    )


def read_dense(table: Any, schema: Schema, faults: list[ColumnFault]) -> NDArray[np.float64]:
    raw = np.empty((table.num_rows, len(schema.dense_columns)), np.float64)
    for i, column in enumerate(schema.dense_columns):
        raw[:, i], _, found = numbers(_column(table, column.column), column.column, nan=column.nan)
        faults += found
    return raw


def _column(table: Any, name: str) -> Any:
    """A column of a record batch, or of a table with one chunk per column, as an array."""
    column = table.column(name)
    if hasattr(column, "chunks"):
        return column.chunk(0) if column.num_chunks else arrow().array([], column.type)
    return column


def shown(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- columns


def numbers(
    array: Any, column: str, *, nan: NanRule | None = None
) -> tuple[NDArray[np.float64], Mask, list[ColumnFault]]:
    # returns: float64 [n] with NaN for missing values, a mask of the missing values, and the rows that are
    # not finite numbers.
    pa, pc = arrow(), arrow("pyarrow.compute")
    array = plain_array(array)
    missing = np.asarray(array.is_null()) if array.null_count else np.zeros(len(array), bool)
    faults = []
    if is_text(array.type):
        try:
            array = pc.cast(as_text(array), pa.float64())
        except pa.ArrowInvalid:
            values = [_float(x) for x in as_text(array).cast(pa.binary()).to_pylist()]
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


def seconds(array: Any, column: str, form: str | None = None) -> tuple[NDArray[np.int64], list[ColumnFault]]:
    # form: "ms", or the format of text; see Schema.time_format. returns: int64 [n], and the rows that have no
    # valid time.
    pa, pc = arrow(), arrow("pyarrow.compute")
    array = plain_array(array)
    if form not in (None, "ms"):
        text = as_text(array) if is_text(array.type) else pc.cast(array, pa.string())
        array = pc.strptime(text, format=form, unit="s", error_is_null=True)
        if array.null_count > text.null_count:
            unread = np.asarray(array.is_null()) & np.asarray(text.is_valid())
            what = f"is not a time of the form {form}"
            return np.zeros(len(array), np.int64), [ColumnFault(unread, column, "not a time", what)]
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        array = pc.cast(pc.cast(array, pa.timestamp("s"), safe=False), pa.int64())
    values, missing, faults = numbers(array, column)
    if form == "ms":
        values = np.floor(values / 1000)
    if missing.any():
        faults.append(ColumnFault(missing, column, "no time", "is missing, but every row needs a time"))
    outside = (values < 0) | (values > MAX_TIME)
    if outside.any():
        what = f"is not a time in seconds between 0 and {MAX_TIME}"
        if float(np.nanmedian(values[outside])) > MAX_TIME:
            what += '; is the column in milliseconds? Set time_format="ms" in the schema'
        faults.append(ColumnFault(outside, column, "not a time", what))
    return np.nan_to_num(np.where(outside, 0.0, values)).astype(np.int64), faults


def ids(array: Any, feature: FeatureColumn, texts: Texts | None = None) -> tuple[Ragged, list[ColumnFault]]:
    # A missing value is an empty row; a missing value in a list is left out.
    own: Texts | None = None if texts is None else {}
    found = read_ids(array, hash=feature.hash, separator=feature.separator, texts=own)
    faults = []
    if found.unread is not None:
        bad = np.zeros(len(found.ragged), bool)
        bad[found.rows[found.unread]] = True
        hint = list_hint(array.slice(int(np.argmax(bad)), 1), feature)
        what = NOT_AN_ID if hint is None else f"{NOT_AN_ID}; {hint}"
        faults.append(ColumnFault(bad, feature.column, "wrong type", what))
    ragged = found.ragged
    most = feature.max_length
    if most is not None and not ragged.single:
        counts, rows = ragged.lengths(), torch.from_numpy(found.rows)
        at = torch.arange(len(rows), device="cpu")
        first, last = ragged.row_splits[:-1][rows], ragged.row_splits[1:][rows] - 1
        place = at - first if feature.keep == "first" else last - at
        ragged = Ragged.from_lengths(ragged.values[place < most], counts.clamp(max=most))
    if feature.slot is not None:
        slotted = fid(feature.slot, ragged.values)
        if own:
            given = fid(feature.slot, torch.tensor(list(own), dtype=torch.int64, device="cpu")).tolist()
            own = dict(zip(given, own.values(), strict=True))
        ragged = Ragged.trusted(slotted, ragged.row_splits, single=ragged.single)
    if texts is not None and own:
        texts.update(own)
    return ragged, faults


def list_hint(array: Any, feature: FeatureColumn) -> str | None:
    """Return a hint if a column of texts looks like lists of ids, each of which would become one id."""
    array = plain_array(array.slice(0, _HINT_ROWS))
    if feature.separator is not None or not is_text(array.type):
        return None
    texts = [x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in array.to_pylist() if x]
    found = [(text, match) for text in texts for match in _list_matches(text)]
    if not found or len(found) < _HINT_SHARE * len(texts):
        return None
    text, match = found[0]
    separator = match.groupdict().get("separator")
    short = repr(text if len(text) <= 40 else text[:37] + "...")
    if separator is None:
        return (
            f"{short} looks like a list, but is read as one id; store a list column, or text with a separator"
        )
    return f"{short} looks like several ids, but is read as one; separator={separator!r} splits it"


def _list_matches(text: str) -> list[re.Match[str]]:
    matches = (pattern.fullmatch(text) for pattern in _LISTS if len(text) <= _HINT_LENGTH)
    return [match for match in matches if match][:1]


def id_source(kind: Any, feature: FeatureColumn) -> IdSource | None:
    if feature.hash is not None:
        return "xxhash64" if feature.hash else "integer"
    kind = without_encoding(kind)
    if is_list(kind):
        kind = without_encoding(kind.value_type)
    if arrow().types.is_null(kind):
        return None
    return "xxhash64" if is_text(kind) else "integer"


def why_not_numbers(kind: Any, *, time: bool = False) -> str | None:
    """Return why a column of an Arrow type cannot hold numbers (or times), or None if it can."""
    types = arrow().types
    kind = without_encoding(kind)
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    if any(is_known(kind) for is_known in known) or is_text(kind):
        return None
    if time and (types.is_timestamp(kind) or types.is_date(kind)):
        return None
    return f"holds {kind}, not {'times' if time else 'numbers'}"


def _float(text: bytes | None) -> float | None:
    try:
        return None if text is None or b"_" in text else float(text)
    except ValueError:
        return None
