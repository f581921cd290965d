"""Frames: how a worker and a server send each other messages over a socket, and how they prove who they are.

Ray starts servers and tells workers where a server listens, with a secret that only processes of the Ray
cluster can get. Lookups and pushes then travel over the socket without Ray. Numbers are little-endian.

    handshake                  worker -> server          server -> worker
    1                          MAGIC, random[32]
    2                                                    random[32], proof[32]
    3                          proof[32]

A proof is the HMAC-SHA256 of the name of its side and both random values under the secret, so the secret
itself is not sent, and each side knows that the other one has it. A peer with a wrong proof is disconnected
before anything else is read. After that, both sides send frames:

    "MCH1", size of the text (uint32), size of the payload (uint64), text (a JSON object), payload

`channel_messages.py` defines the texts. Sizes are limited; a frame that breaks a rule ends the connection.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from megalith.errors import InputError
from megalith.shards.servers.server_messages import Array
from megalith.storage.json_codec import parse_json

MAGIC = b"MEGACH01"
RANDOM_SIZE = PROOF_SIZE = 32
MAX_TEXT = 16 << 20
MAX_PAYLOAD = 1 << 33
_HEAD = struct.Struct("<4sIQ")
_FRAME = b"MCH1"


class WireFrame(NamedTuple):
    """A message."""

    text: dict[str, Any]  # The JSON object
    payload: Array  # uint8, the bytes after it; empty: none


_NOTHING: Array = np.empty(0, np.uint8)
Place = Callable[[dict[str, Any], int], Array]
"""Return the memory for a payload, uint8 of the given size, from the text before it."""


def new_payload(text: dict[str, Any], size: int) -> Array:
    """Return new memory for a payload."""
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
        """Note that bytes have arrived."""
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
    """Return a frame as pieces of bytes."""
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


def proof(secret: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof that a side knows the secret."""
    return hmac.digest(secret, side + first + second, "sha256")
