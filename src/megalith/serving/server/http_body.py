"""Bodies of HTTP requests and responses: their length, their encoding, and the limit of both.

A compressed body is a few bytes that may become any number of bytes, so by default none is accepted. If the
server accepts them, a body is decompressed up to the limit of a body that is not compressed, and not further.
Responses are compressed for clients that ask for it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from email.message import Message

from megalith.serving.server.request_errors import Code, RequestError

GZIP = "gzip"
MIN_GZIP_BYTES = 1024
"""Smaller responses are not compressed."""
_LEVEL = 1
_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_READ_BYTES, _PIECE_BYTES = 1 << 14, 1 << 18
"""Bytes that are decompressed at a time, and the most that become of them."""


def read_body(
    headers: Message, read: Callable[[int], bytes], limit: int, *, accept_compressed: bool
) -> bytes:
    """Read the body of a request."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if headers.get("transfer-encoding"):
        raise RequestError(Code.INVALID_ARGUMENT, "send the body with a Content-Length, not in chunks")
    if encoding != "identity" and not (accept_compressed and encoding == GZIP):
        raise RequestError(
            Code.INVALID_ARGUMENT,
            f"send the body unencoded: {encoding[:30]!r} is not accepted (gzip needs a server started with "
            "--accept-compressed, in Python ServerConfig(accept_compressed=True))",
        )
    lengths = headers.get_all("content-length", ["0"])
    given = lengths[0]
    if len(lengths) > 1 or not given.isascii() or not given.isdecimal() or len(given) > 18:
        raise RequestError(Code.INVALID_ARGUMENT, "Content-Length must be one decimal number")
    if int(given) > limit:
        raise RequestError(Code.OUT_OF_RANGE, f"the body has more than {limit} bytes")
    body = read(int(given))
    if len(body) != int(given):
        raise RequestError(Code.INVALID_ARGUMENT, "the body is shorter than its Content-Length")
    return body if encoding == "identity" or not body else _decompress(body, limit)


def _decompress(body: bytes, limit: int) -> bytes:
    """Decompress a body; its size is found first, so that one that becomes too large takes no memory."""
    try:
        size = _decompressed_size(body, limit)
        return zlib.decompress(body, _GZIP_FORMAT, bufsize=max(1, size))
    except zlib.error:
        raise RequestError(Code.INVALID_ARGUMENT, "the body is not valid gzip") from None


def _decompressed_size(body: bytes, limit: int) -> int:
    stream = zlib.decompressobj(_GZIP_FORMAT)
    size = end = 0
    while not stream.eof:
        data = stream.unconsumed_tail
        if not data:
            data, end = body[end : end + _READ_BYTES], end + _READ_BYTES
        piece = stream.decompress(data, _PIECE_BYTES)
        size += len(piece)
        if size > limit:
            raise RequestError(Code.OUT_OF_RANGE, f"the body has more than {limit} bytes once decompressed")
        if not piece and end >= len(body) and not stream.unconsumed_tail:
            break
    if not stream.eof or stream.unused_data or end < len(body):
        raise RequestError(Code.INVALID_ARGUMENT, "the body is not one complete gzip stream")
    return size


def compress_body(headers: Message, body: bytes) -> tuple[bytes, dict[str, str]]:
    """Compress the body of a response if the client accepts that and it is large enough."""
    if len(body) < MIN_GZIP_BYTES or not _accepts_gzip(headers):
        return body, {}
    return gzip.compress(body, _LEVEL, mtime=0), {"Content-Encoding": GZIP, "Vary": "Accept-Encoding"}


def _accepts_gzip(headers: Message) -> bool:
    accepted: dict[str, bool] = {}
    for part in ",".join(headers.get_all("accept-encoding", [])).lower().split(","):
        name, _, quality = part.partition(";")
        accepted[name.strip()] = quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return accepted.get(GZIP, accepted.get("*", False))  # "*" stands for what is not named
