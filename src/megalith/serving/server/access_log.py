"""Access log: a line of JSON for each call that a server answers or refuses.

    field                          meaning
    time                           when the call ended, UTC
    protocol, method, peer         "grpc" or "http"; the method and path; address of the client
    model, version, signature      what it asked for, as far as it is known
    code, status                   gRPC status; HTTP status of a call over REST
    seconds                        from the arrival of its message to its response
    request_bytes, response_bytes  sizes of its message and of the response
    trace_id, span_id              of the caller, if it sent a W3C `traceparent`, as OpenTelemetry does
    reason                         why a call ended before its message was read: over gRPC no token, no place,
                                   an unknown method, no message in time or before another call needed the
                                   place, or the client cancelled it; over HTTP an unknown verb or malformed
                                   headers

Health checks and reflection over gRPC are logged only if they are refused. The file is opened again if it was
renamed, so that tools may rotate it.
"""

from __future__ import annotations

import contextvars
import json
import logging
import logging.handlers
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from megalith.errors import InputError

Metadata = Iterable[tuple[str, str | bytes]]
STDOUT = "-"
TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?"
)
_MAX_TEXT = 200
_FIELDS: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("fields", default=None)
"""The line of the call that is being answered."""


class AccessLog:
    """Writes the access log of a server; `close` it. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._handler: logging.Handler
        if path == STDOUT:
            self._handler = logging.StreamHandler(sys.stdout)
            return
        try:
            self._handler = logging.handlers.WatchedFileHandler(path, encoding="utf-8")
        except OSError as error:
            raise InputError(f"access log: cannot write {path}: {error.strerror}") from None

    def close(self) -> None:
        self._handler.close()

    @contextmanager
    def call(
        self, protocol: str, method: str, peer: str, traceparent: str | None
    ) -> Iterator[dict[str, Any]]:
        """Log a call when it ends."""
        fields = _first_fields(protocol, method, peer, traceparent)
        token = _FIELDS.set(fields)
        started = time.perf_counter()
        try:
            yield fields
        finally:
            _FIELDS.reset(token)
            self._write(fields, started)

    def refused(
        self, method: str, peer: str, metadata: Metadata, *, code: str, reason: str, started: float
    ) -> None:
        """Log a call over gRPC that ends before its message is read."""
        fields = _first_fields("grpc", method, peer, traceparent_of(metadata))
        self._write(fields | {"code": code, "reason": reason, "request_bytes": 0}, started)

    def _write(self, fields: dict[str, Any], started: float) -> None:
        fields["seconds"] = round(time.perf_counter() - started, 6)
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        self._handler.handle(logging.makeLogRecord({"msg": json.dumps(line)}))

    def note(self, **fields: Any) -> None:
        """Add fields to the line of the call that is being answered."""
        found = _FIELDS.get(None)
        if found is not None:
            found.update(fields)


def _first_fields(protocol: str, method: str, peer: str, traceparent: str | None) -> dict[str, Any]:
    fields = {"protocol": protocol, "method": method[:_MAX_TEXT], "peer": peer[:_MAX_TEXT]}
    return fields | trace_of(traceparent)


def traceparent_of(metadata: Metadata) -> str | None:
    """Return the `traceparent` of a call over gRPC."""
    sent = [value for key, value in metadata if key == TRACEPARENT]
    return sent[0] if sent and isinstance(sent[0], str) else None


def trace_of(traceparent: str | None) -> dict[str, str]:
    """Return the ids of a trace."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
    return {} if found is None else {"trace_id": found[1], "span_id": found[2]}
