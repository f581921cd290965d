"""Secret files: tokens, and certificates with their keys, that are read again when their files change.

A file is looked at again at most once in RELOAD_SECONDS. If it cannot be read then, or its content is
malformed, the last content stays in use and the error is logged: a half-written file locks nobody out.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from megalith.errors import InputError
from megalith.serving.client.credentials import read_secret

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """What some files hold, read again when one of them changes. Thread-safe."""

    def __init__(self, files: list[Path], read: Callable[[], Content]) -> None:
        self._files, self._read = files, read
        self._lock = threading.Lock()
        self._seen = self._state()
        self._content = read()
        self._look_at = time.monotonic() + RELOAD_SECONDS

    def current(self) -> Content:
        """Return the content; of a file that has changed, the new one."""
        if time.monotonic() >= self._look_at:
            with self._lock:
                self._reload()
        return self._content

    def _reload(self) -> None:
        self._look_at = time.monotonic() + RELOAD_SECONDS
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._content = self._read()
        except InputError as error:
            logger.error("%s; what it held before stays in use", error)
        else:
            logger.info("read again: %s", ", ".join(map(str, self._files)))

    def _state(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return found


def token_reader(token: str | Path) -> Callable[[], tuple[bytes, ...]]:
    """Return a function that gives the current tokens."""
    if isinstance(token, str):
        only = (check_token(token),)
        return lambda: only

    def read() -> tuple[bytes, ...]:
        lines = read_secret("token", token).decode("ascii", "replace").splitlines()
        found = tuple(check_token(line.strip()) for line in lines if line.strip())
        if not found:
            raise InputError(f"token: {token} is empty")
        return found

    return WatchedFiles([token], read).current


def check_token(token: str) -> bytes:
    if not re.fullmatch(r"[\x21-\x7e]{8,4096}", token):
        raise InputError("a token must be 8 to 4096 visible ASCII characters, without spaces")
    return token.encode()


def tls_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Make the TLS context of a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"TLS: {certificate}, {key}: {error}") from None
    return context
