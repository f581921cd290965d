"""The protocol of lookups and pushes, which travel between a worker and a server over a socket without Ray.

Ray starts servers and tells workers where a server listens, with a secret that only processes of the Ray
cluster can get. Numbers are little-endian.

    handshake                  worker -> server          server -> worker
    1                          MAGIC, random[32]
    2                                                    random[32], proof[32]
    3                          proof[32]

A proof is the HMAC-SHA256 of the name of its side and both random values under the secret, so the secret
itself is not sent, and each side knows that the other one has it. A peer with a wrong proof is disconnected
before anything else is read. After that, both sides send frames:

    "MCH1", size of the text (uint32), size of the payload (uint64), text (a JSON object), payload

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
validated here before it is used: sizes, types, counts, and that arrays lie within the payload or their
segment. A frame that breaks a rule ends the connection.
"""

from __future__ import annotations

import builtins
import hmac
import json
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megalith import errors
from megalith.errors import InputError, MegalithError
from megalith.ps.messages import Array, Failure, ServerWrite
from megalith.storage.json_codec import parse_json

MAGIC = b"MEGACH01"
RANDOM_SIZE = PROOF_SIZE = 32
MAX_TEXT = 16 << 20
MAX_PAYLOAD = 1 << 33
_HEAD = struct.Struct("<4sIQ")
_FRAME = b"MCH1"


class WireFrame(NamedTuple):
    text: dict[str, Any]  # The JSON object
    payload: Array  # uint8, the bytes after it; empty: none


_NOTHING: Array = np.empty(0, np.uint8)
Place = Callable[[dict[str, Any], int], Array]
"""Return the memory for a payload, uint8 of the given size, from the text before it."""


def new_payload(text: dict[str, Any], size: int) -> Array:
    # returns: uint8 [size], uninitialized.
    return np.empty(size, np.uint8)


class FrameReader:
    """Assembles frames from bytes as they arrive: fill `wanted()`, then call `advance`."""

    def __init__(self, place: Place = new_payload) -> None:
        self._place = place
        self._begin()

    def _begin(self) -> None:
        self._view = memoryview(bytearray(_HEAD.size))
        self._at = 0
        self._in_head = True
        self._text: dict[str, Any] | None = None
        self._payload = _NOTHING
        self._size = 0

    def wanted(self) -> memoryview:
        """Return the memory for the next bytes; it is never empty."""
        return self._view[self._at :]

    def advance(self, count: int) -> WireFrame | None:
        self._at += count
        if self._at < len(self._view):
            return None
        if self._in_head:
            self._read_head()
            return None
        if self._text is None:
            self._read_text()
            if self._size:
                return None
        assert self._text is not None
        frame = WireFrame(self._text, self._payload)
        self._begin()
        return frame

    def _read_head(self) -> None:
        magic, length, self._size = _HEAD.unpack(self._view)
        if magic != _FRAME:
            raise InputError(f"the connection sent {magic!r} where a frame begins with {_FRAME!r}")
        if not 2 <= length <= MAX_TEXT:
            raise InputError(f"a frame has a text of {length} bytes; allowed are 2 to {MAX_TEXT}")
        if self._size > MAX_PAYLOAD:
            raise InputError(f"a frame has a payload of {self._size} bytes; allowed are {MAX_PAYLOAD}")
        self._in_head = False
        self._view, self._at = memoryview(bytearray(length)), 0

    def _read_text(self) -> None:
        text = parse_json(self._view.tobytes(), lambda problem: InputError(f"the text of a frame {problem}"))
        if not isinstance(text, dict):
            raise InputError("the text of a frame is not a JSON object")
        self._text = text
        if self._size:
            self._payload = self._place(text, self._size)
            self._view, self._at = self._payload.data, 0


def frame_bytes(text: dict[str, Any], payload: list[Array]) -> list[memoryview]:
    try:
        encoded = json.dumps(text, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise InputError("a number for a server, such as a learning rate, is infinite or NaN") from None
    size = sum(piece.size for piece in payload)
    if len(encoded) > MAX_TEXT or size > MAX_PAYLOAD:
        raise InputError(
            f"a message of {len(encoded)} + {size} bytes is too large for a server (at most {MAX_TEXT} + "
            f"{MAX_PAYLOAD}): use smaller batches, or more servers"
        )
    head = _HEAD.pack(_FRAME, len(encoded), size)
    return [memoryview(head + encoded), *(piece.data for piece in payload if piece.size)]


def drop_sent(pieces: deque[memoryview], sent: int) -> None:
    """Remove what a socket has accepted, which may end within a piece."""
    while sent:
        first = pieces[0]
        if sent < len(first):
            pieces[0] = first[sent:]
            return
        sent -= len(pieces.popleft())


def proof(secret: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, side + first + second, "sha256")


HANDSHAKE_SECONDS = 20.0


@dataclass(frozen=True)
class ChannelAddress:
    unix: str  # The name of a Unix socket without a file; empty: use `host` and `port`
    host: str  # An address of the server's node
    port: int  # A TCP port there
    secret: bytes  # What both sides of the handshake know


INLINE = -1
_DTYPES = {name: np.dtype(name) for name in ("int64", "int32", "float32", "uint8")}
_ALIGNMENT = 8
_PUSH_FIELDS = {"counts", "step", "time", "scale", "clip_norm", "rates"}


@dataclass(frozen=True)
class TableRequest:
    """What a lookup and a push have in common."""

    id: int  # Identifies the answer
    name: str  # The name of the tables
    worker: int
    session: str  # That of `TableSpace.join`, with the incarnation of the server


@dataclass(frozen=True)
class ReadRequest(TableRequest):
    after: int  # The last write of the worker that the read must see
    ids: Array
    counts: list[int]
    step: int | None
    out: Array | None  # uint8, memory of the worker for the rows; None: the answer has them


@dataclass(frozen=True)
class PushRequest(TableRequest):
    number: int  # Counts the writes of the worker
    write: ServerWrite


# ---- arrays


def place_arrays(
    arrays: Mapping[str, Array], places: Mapping[str, tuple[int, int] | None]
) -> tuple[list[list[Any]], list[Array]]:
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
    return _integer(text.get("number"), "segment"), _integer(text.get("size"), "size of a segment", 1)


def forgotten(text: Mapping[str, Any]) -> list[int]:
    numbers = text.get("numbers")
    if not isinstance(numbers, list):
        raise InputError("a request: numbers of segments are missing")
    return [_integer(number, "segment") for number in numbers]


# ---- answers


def error_text(error: BaseException) -> list[str]:
    kind = type(error).__name__
    if _error_class(kind) is not None:
        return [kind, str(error)]
    if isinstance(error, OSError):
        return ["OSError", str(error)]
    return ["MegalithError", f"on a server: {kind}: {error}"]


def decode_error(value: Any) -> Failure:
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
    return _integer(text.get("id"), "id of an answer")


def as_bytes(array: Array) -> Array:
    """Return an array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)
