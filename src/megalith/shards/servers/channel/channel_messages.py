"""What workers and servers send each other without Ray: lookups and pushes.

    text of a request                                                       answer
    call "read": id, name, worker, session, after, counts, step, rows       id; the rows, in the payload if
                                                                            "rows" names no part of a segment
    call "push": id, name, worker, session, number, header                  id
    call "segment": number, size; with a file descriptor                    none
    call "forget": numbers of segments                                      none

    id          identifies the answer
    arrays      [name, dtype, number of elements, segment, offset] of each array of the request; segment -1:
                the payload, otherwise a segment of this connection
    rows        [segment, offset, bytes] to write the rows to; null: the answer has them
    error       in an answer, [class, message] in place of the result

The meaning of the fields is that of `TableSpace.read` and `TableSpace.write`. Everything that arrives is
checked here before it is used: types, counts, and that arrays lie within the payload or their segment.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalith import errors
from megalith.errors import InputError, MegalithError
from megalith.shards.servers.channel.channel_frames import WireFrame
from megalith.shards.servers.server_messages import Array, Failure, ServerWrite

INLINE = -1
_DTYPES = {name: np.dtype(name) for name in ("int64", "int32", "float32", "uint8")}
_ALIGNMENT = 8
_PUSH_FIELDS = {"counts", "step", "time", "scale", "clip_norm", "rates"}


@dataclass(frozen=True)
class TableRequest:
    """What a lookup and a push have in common."""

    id: int  # See the module
    name: str  # The name of the tables
    worker: int  # The number of the worker
    session: str  # See `TableSpace.join`.


@dataclass(frozen=True)
class ReadRequest(TableRequest):
    """A lookup."""

    after: int  # See `TableSpace.read`.
    ids: Array  # See `TableSpace.read`.
    counts: list[int]  # See `TableSpace.read`.
    step: int | None  # See `TableSpace.read`.
    out: Array | None  # uint8, memory of the worker for the rows; None: the answer has them


@dataclass(frozen=True)
class PushRequest(TableRequest):
    """A push."""

    number: int  # See `TableSpace.write`.
    write: ServerWrite  # See `TableSpace.write`.


# ---- arrays


def place_arrays(
    arrays: Mapping[str, Array], places: Mapping[str, tuple[int, int] | None]
) -> tuple[list[list[Any]], list[Array]]:
    """Describe the arrays of a request."""
    described: list[list[Any]] = []
    payload: list[Array] = []
    at = 0
    for name, array in arrays.items():
        segment, offset = places[name] or (INLINE, at)
        described.append([name, str(array.dtype), array.size, segment, offset])
        if segment == INLINE:
            padding = -array.nbytes % _ALIGNMENT
            payload += [array.reshape(-1).view(np.uint8), np.zeros(padding, np.uint8)]
            at += array.nbytes + padding
    return described, payload


def _arrays_of(frame: WireFrame, segments: Mapping[int, Array]) -> dict[str, Array]:
    described = frame.text.get("arrays")
    if not isinstance(described, list):
        raise InputError("a request without its arrays")
    found: dict[str, Array] = {}
    for entry in described:
        if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[0], str):
            raise InputError(f"a request describes an array as {entry!r}")
        name, kind, *numbers = entry
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None or name in found:
            raise InputError(f"a request has an array {name!r} of type {kind!r}")
        count, segment, offset = (_integer(number, f"array {name!r}", INLINE) for number in numbers)
        memory = frame.payload if segment == INLINE else _segment(segments, segment)
        found[name] = _part(memory, offset, count * dtype.itemsize, name).view(dtype)
    return found


def _segment(segments: Mapping[int, Array], number: int) -> Array:
    if number not in segments:
        raise InputError(f"a request names segment {number}, which this connection does not have")
    return segments[number]


def _part(memory: Array, offset: int, size: int, what: str) -> Array:
    if offset < 0 or size < 0 or offset + size > memory.size:
        raise InputError(f"a request: {what!r} is {size} bytes at {offset}, of {memory.size}")
    return memory[offset : offset + size]


# ---- requests


def decode_request(frame: WireFrame, segments: Mapping[int, Array]) -> ReadRequest | PushRequest:
    """Check a request."""
    text = frame.text
    call = text.get("call")
    if call not in ("read", "push"):
        raise InputError(f"a request for {call!r}; known are read and push")
    id, worker = _integer(text.get("id"), "id"), _integer(text.get("worker"), "worker", -1)
    name, session = (_text(text.get(field), field) for field in ("name", "session"))
    arrays = _arrays_of(frame, segments)
    ids = arrays.get("ids")
    if ids is None or ids.dtype != np.int64:
        raise InputError(f"a {call} without ids")
    if call == "read":
        counts = _counts(text.get("counts"), ids.size)
        step = text.get("step")
        return ReadRequest(
            id,
            name,
            worker,
            session,
            _integer(text.get("after"), "after"),
            ids,
            counts,
            None if step is None else _integer(step, "step"),
            _rows(text.get("rows"), segments),
        )
    header = _push_header(text.get("header"), arrays)
    write = ServerWrite("push", header, arrays)
    return PushRequest(id, name, worker, session, _integer(text.get("number"), "number", 1), write)


def _rows(place: Any, segments: Mapping[int, Array]) -> Array | None:
    if place is None:
        return None
    if not isinstance(place, list) or len(place) != 3:
        raise InputError(f"a read wants its rows at {place!r}")
    segment, offset, size = (_integer(number, "rows") for number in place)
    return _part(_segment(segments, segment), offset, size, "rows")


def _push_header(header: Any, arrays: Mapping[str, Array]) -> dict[str, Any]:
    if not isinstance(header, dict) or set(header) != _PUSH_FIELDS:
        raise InputError(f"a push has the fields {sorted(_PUSH_FIELDS)}")
    _counts(header["counts"], arrays["ids"].size)
    _integer(header["step"], "step")
    if header["time"] is not None:
        _integer(header["time"], "time", -(2**63))
    for field in ("scale", "clip_norm"):
        if field == "clip_norm" and header[field] is None:
            continue
        if isinstance(header[field], bool) or not isinstance(header[field], int | float):
            raise InputError(f"a push: {field} is {header[field]!r}")
    rates = header["rates"]
    if not isinstance(rates, dict) or not all(_are_rates(values) for values in rates.values()):
        raise InputError("a push: rates must be lists of numbers by table")
    if "grads" not in arrays or arrays["grads"].dtype != np.uint8:
        raise InputError("a push without gradients")
    extra = set(arrays) - {"ids", "grads", "seen"}
    if extra:
        raise InputError(f"a push with the arrays {sorted(extra)}")
    seen = arrays.get("seen")
    if seen is not None and (seen.dtype != np.int64 or seen.size != arrays["ids"].size):
        raise InputError("a push: 'seen' must be one int64 per id")
    return header


def _are_rates(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _counts(counts: Any, ids: int) -> list[int]:
    if not isinstance(counts, list):
        raise InputError("a request: counts must be one number per table")
    for count in counts:
        _integer(count, "counts")
    if sum(counts) != ids:
        raise InputError(f"a request has {ids} ids, but counts of {sum(counts)}")
    return counts


def _integer(value: Any, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise InputError(f"a request: {what} is {value!r}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"a request: {what} is {value!r}")
    return value


def segment_fields(text: Mapping[str, Any]) -> tuple[int, int]:
    """Check the text of a "segment"."""
    return _integer(text.get("number"), "segment"), _integer(text.get("size"), "size of a segment", 1)


def forgotten(text: Mapping[str, Any]) -> list[int]:
    """Check the text of a "forget"."""
    numbers = text.get("numbers")
    if not isinstance(numbers, list):
        raise InputError("a request: numbers of segments are missing")
    return [_integer(number, "segment") for number in numbers]


# ---- answers


def error_text(error: BaseException) -> list[str]:
    """Return the field "error" of an answer."""
    kind = type(error).__name__
    if _error_class(kind) is not None:
        return [kind, str(error)]
    if isinstance(error, OSError):
        return ["OSError", str(error)]
    return ["MegalithError", f"on a server: {kind}: {error}"]


def decode_error(value: Any) -> Failure:
    """Return the error of an answer."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise InputError(f"an answer with the error {value!r}")
    kind = _error_class(value[0])
    if kind is None:
        raise InputError(f"an answer with an error of the class {value[0]!r}")
    return Failure(kind(value[1]))


def _error_class(name: str) -> type[Exception] | None:
    if name == "OSError":
        return builtins.OSError
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, MegalithError) else None


def answer_id(text: Mapping[str, Any]) -> int:
    """Check the id of an answer."""
    return _integer(text.get("id"), "id of an answer")


def as_bytes(array: Array) -> Array:
    """Return an array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)
