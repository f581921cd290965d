"""Messages: what Monolith's Example, ExampleBatch and Instance protobufs say, row by row.

Field numbers are those of Monolith's public protos (`monolith.io.proto`, `parser.proto`,
`idl.matrix.proto`). v1 fids come out in the v2 layout, lists of lists flattened. Raw features are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megalith.errors import InputError
from megalith.ops.ids import fid_v1_to_v2
from megalith.protowire import Field, fields

Value = NDArray[np.int64] | NDArray[np.float32] | list[bytes]
LABEL, LINE_ID, WEIGHT = "__LABEL__", "__LINE_ID__", "instance_weight"
MAX_BATCH_ROWS = 1 << 20


@dataclass
class ExampleRow:
    """What a record says of one sample. time: the line id's req_time, if there is one."""

    features: dict[str, Value] = field(default_factory=dict)
    labels: list[float] = field(default_factory=list)
    weight: float = 1.0
    time: int | None = None


def example(message: bytes, at: int, wanted: Collection[str]) -> list[ExampleRow]:
    """The one row of an Example. at: where the message stands in its file. wanted: the features to read.

    Raises InputError where the bytes are not such a message.
    """
    row = ExampleRow()
    for part in fields(message, at=at):
        if part.number == 1:
            name, values, _ = _named(part, wanted)
            for value in values[-1:]:
                _put(row, name, _feature(value))
        elif part.number == 100:
            row.time = _req_time(part.message())
        elif part.number == 101:
            row.labels += part.float32s().tolist()
        elif part.number == 102:
            row.weight = part.float32()
    return [row]


def example_batch(message: bytes, at: int, wanted: Collection[str]) -> list[ExampleRow]:
    """The rows of an ExampleBatch, which stands column by column. The rest is as for `example`."""
    columns: list[tuple[str, list[Field], bool]] = []
    num_rows = 0
    for part in fields(message, at=at):
        if part.number == 1:
            columns.append(_named(part, wanted))
        elif part.number == 3:
            num_rows = part.int32()
    if not 0 <= num_rows <= min(len(message), MAX_BATCH_ROWS):  # any honest row takes a byte
        raise InputError(f"batch_size is {num_rows} in a message of {len(message)} bytes")
    rows = [ExampleRow() for _ in range(num_rows)]
    for name, values, is_shared in columns:
        if name not in wanted and name not in _SPECIAL:
            continue
        if not values if is_shared else len(values) != num_rows:
            raise InputError(f"column {name!r} has {len(values)} values in a batch of {num_rows}")
        read = [_feature(values[0])] * num_rows if is_shared else map(_feature, values)
        for row, value in zip(rows, read, strict=True):
            _put(row, name, value)
    return rows


def instance(message: bytes, at: int, wanted: Collection[str]) -> list[ExampleRow]:
    """The one row of an Instance; its fids stand under fc_slot_<slot>. The rest is as for `example`."""
    row = ExampleRow()
    fids: list[Field] = []
    floats: list[Field] = []
    for part in fields(message, at=at):
        if part.number == 1:
            fids.append(part)
        elif part.number == 2:
            floats.append(part)
        elif part.number == 3:
            row.labels += part.float32s().tolist()
        elif part.number == 4:
            row.weight = part.float32()
        elif part.number == 5:
            row.time = _req_time(part.message())
        elif part.number == 9:
            name, value = _instance_feature(part, wanted)
            if value is not None:
                row.features[name] = value
    if floats:
        row.features["value"] = _floats(floats)
    old = _fids(fids)
    slots = old.view(np.uint64) >> np.uint64(54)
    for slot in np.unique(slots).tolist():
        row.features[f"fc_slot_{slot}"] = _to_v2(old[slots == slot])
    return [row]


# ---- numbers out of fields; each takes all fields of one repeated number


def _fids(parts: Iterable[Field]) -> NDArray[np.int64]:
    return _joined([part.fixed64s() for part in parts], np.uint64).view(np.int64)


def _fids_v1(parts: Iterable[Field]) -> NDArray[np.int64]:
    return _to_v2(_fids(parts))


def _to_v2(old: NDArray[np.int64]) -> NDArray[np.int64]:
    new: NDArray[np.int64] = fid_v1_to_v2(torch.from_numpy(old)).numpy()
    return new


def _ints(parts: Iterable[Field]) -> NDArray[np.int64]:
    return _joined([part.int64s() for part in parts], np.int64)


def _floats(parts: Iterable[Field]) -> NDArray[np.float32]:
    return _joined([part.float32s() for part in parts], np.float32)


def _doubles(parts: Iterable[Field]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
        return _joined([part.float64s() for part in parts], np.float32)


def _joined(runs: list[Any], dtype: Any) -> NDArray[Any]:
    """Runs of numbers in one array of its own."""
    if len(runs) == 1:
        return np.array(runs[0], dtype)
    return np.concatenate([*runs, np.empty(0, dtype)]).astype(dtype)


def _bytes(parts: Iterable[Field]) -> list[bytes]:
    return [bytes(part.raw()) for part in parts]


_Read = Callable[[Iterable[Field]], Value]

_FEATURE: dict[int, tuple[_Read, int]] = {
    1: (_fids_v1, 1),
    2: (_fids, 1),
    3: (_floats, 1),
    4: (_doubles, 1),
    5: (_ints, 1),
    6: (_bytes, 1),
    7: (_fids, 2),
    8: (_floats, 2),
    9: (_doubles, 2),
    10: (_ints, 2),
    11: (_bytes, 2),
    12: (_ints, 0),
    13: (_floats, 0),
    14: (_doubles, 0),
    15: (_bytes, 0),
    16: (_fids_v1, 2),
}
"""How to read each member of Feature's oneof, and how many messages deep its values stand."""

_INSTANCE_FEATURE: dict[int, tuple[_Read, int]] = {
    2: (_fids, 0),
    3: (_floats, 0),
    4: (_ints, 0),
    5: (_bytes, 0),
    6: (_fids, 1),
    7: (_floats, 1),
    8: (_ints, 1),
    9: (_bytes, 1),
}
"""The same for the Feature of an Instance; the first of them that has values counts."""


def _deeper(parts: Iterable[Field], levels: int) -> Iterable[Field]:
    for _ in range(levels):
        parts = [inner for part in parts for inner in part.message() if inner.number == 1]
    return parts


def _feature(whole: Field) -> Value:
    last = None
    for part in whole.message():
        if part.number in _FEATURE:
            last = part
    if last is None:
        return np.empty(0, np.int64)
    read, levels = _FEATURE[last.number]
    return read(_deeper([last], levels))


def _named(whole: Field, wanted: Collection[str]) -> tuple[str, list[Field], bool]:
    """Name, values and whether all rows share one, of a NamedFeature or NamedFeatureList."""
    name, is_shared = "", False
    values: list[Field] = []
    for part in whole.message():
        if part.number == 1:
            name = part.text()
        elif part.number == 2:
            values.append(part)
        elif part.number == 3:
            is_shared = part.int64() == 1
    return name, values if name in wanted or name in _SPECIAL else [], is_shared


def _instance_feature(whole: Field, wanted: Collection[str]) -> tuple[str, Value | None]:
    name = ""
    found: dict[int, list[Field]] = {}
    for part in whole.message():
        if part.number == 1:
            name = part.text()
        elif part.number in _INSTANCE_FEATURE:
            found.setdefault(part.number, []).append(part)
    if name not in wanted or not found:
        return name, None
    read, levels = _INSTANCE_FEATURE[min(found)]
    return name, read(_deeper(found[min(found)], levels))


# ---- the columns that are no features


def _req_time(line_id: Iterator[Field]) -> int | None:
    time = None
    for part in line_id:
        if part.number == 3:
            time = part.int64()
    return time


def _put_label(row: ExampleRow, value: Value) -> None:
    row.labels += _numbers(LABEL, value)


def _put_weight(row: ExampleRow, value: Value) -> None:
    row.weight = next(iter(_numbers(WEIGHT, value)), 1.0)


def _put_line_id(row: ExampleRow, value: Value) -> None:
    if not isinstance(value, list):
        raise InputError(f"column {LINE_ID!r} holds no bytes")
    for line_id in value[:1]:
        row.time = _req_time(fields(line_id))


_SPECIAL: dict[str, Callable[[ExampleRow, Value], None]] = {
    LABEL: _put_label,
    WEIGHT: _put_weight,
    LINE_ID: _put_line_id,
}


def _put(row: ExampleRow, name: str, value: Value) -> None:
    if name in _SPECIAL:
        _SPECIAL[name](row, value)
    else:
        row.features[name] = value


def _numbers(name: str, value: Any) -> list[float]:
    if isinstance(value, list) or value.dtype != np.float32:
        raise InputError(f"column {name!r} holds no floats")
    numbers: list[float] = value.tolist()
    return numbers
