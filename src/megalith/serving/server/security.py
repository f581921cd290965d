"""Security: who may connect to a server, and what each token permits.

TLS controls who may connect: with a certificate authority, only clients that it signed. Tokens control what a
client may do:

    permission   calls                                               token
    read         scores                                              token
    lookup       rows of ids: lookup, raw_lookup                     lookup_token
    write        pushes from training, and where they are            write_token
    admin        everything                                          admin_token

Status, metadata and reflection need any of the tokens. Without any token everything is permitted. Otherwise a
permission whose token is not set is for admin only, except that `read` without `token` is for everyone.

Files of tokens and of certificates are checked for changes at most once in RELOAD_SECONDS. If a changed file
cannot be read, or its content is malformed, the last content stays in use and the error is logged: a
half-written file does not lock out clients.
"""

from __future__ import annotations

import enum
import hmac
import logging
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from megalith.errors import InputError, UsageError
from megalith.ops.checks import flag, instance, path, text
from megalith.serving.client.credentials import grpc_module, read_secret
from megalith.serving.discovery.contract import is_loopback

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
        for file in self._files:
            try:
                status = file.stat()
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


TOKEN_VARIABLE = "MEGALITH_SERVE_TOKEN"


class Permission(enum.Enum):
    """What a call needs; the values are names of fields of Security."""

    READ = "token"
    LOOKUP = "lookup_token"
    WRITE = "write_token"
    ADMIN = "admin_token"


@dataclass(frozen=True)
class Security:
    """What a server presents to its clients and requires of them.

    A token is a text, or a file with a token on each line. Files of tokens and of certificates are read again
    when they change.

    Raises:
        InputError: A token is malformed or cannot be read, or the files for TLS are incomplete.
    """

    token: str | Path | None = field(default=None, repr=False)
    """Token that clients must send as `authorization: Bearer ...` to get scores."""
    certificate: Path | None = None
    """PEM file of the server's certificate chain; every port then uses TLS."""
    key: Path | None = None
    """PEM file of the certificate's private key."""
    client_ca: Path | None = None
    """PEM file of the authority that must have signed the certificates of clients."""
    lookup_token: str | Path | None = field(default=None, repr=False)
    """Token for the rows of ids."""
    write_token: str | Path | None = field(default=None, repr=False)
    """Token of training, to push rows and dense weights."""
    admin_token: str | Path | None = field(default=None, repr=False)
    """Token that permits everything."""

    def __post_init__(self) -> None:
        for permission in Permission:
            token = getattr(self, permission.value)
            if token is not None and not isinstance(token, Path):
                text(token, permission.value)
        _ = self._readers
        for name in ("certificate", "key", "client_ca"):
            if getattr(self, name) is not None:
                path(getattr(self, name), name)
        if (self.certificate is None) != (self.key is None):
            raise InputError(
                "TLS needs both a certificate and its key: --tls-cert and --tls-key, in Python "
                "Security(certificate=..., key=...)"
            )
        if self.client_ca is not None and self.certificate is None:
            raise InputError(
                "client certificates need TLS: give --tls-cert and --tls-key too, in Python "
                "Security(certificate=..., key=..., client_ca=...)"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # not the readers of files

    # ---- tokens

    @cached_property
    def _readers(self) -> dict[Permission, Callable[[], tuple[bytes, ...]]]:
        tokens = {permission: getattr(self, permission.value) for permission in Permission}
        return {permission: token_reader(token) for permission, token in tokens.items() if token is not None}

    @property
    def requires_token(self) -> bool:
        """Whether there is any token."""
        return bool(self._readers)

    @property
    def guards_writes(self) -> bool:
        """Whether a client must present a token of its own, or a certificate, to write."""
        tokens = Permission.WRITE in self._readers or Permission.ADMIN in self._readers
        return tokens or (self.client_ca is not None and not self.requires_token)

    def check_exposure(self, host: str, *, writes: bool) -> None:
        """Raise UsageError if clients could write that should not.

        Args:
            host: The address that the server listens on.
            writes: Whether the server accepts writes.
        """
        text(host, "host")
        if not flag(writes, "writes") or self.guards_writes:
            return
        if self.requires_token:
            raise UsageError(
                "a server that has tokens and accepts writes needs a token for them: --write-token-file, "
                "in Python Security(write_token=...)"
            )
        if not is_loopback(host):
            raise UsageError(
                f"anyone who can reach {host} could change the model: give a token (--write-token-file, "
                "in Python Security(write_token=...)), require client certificates (--tls-ca, in Python "
                "Security(client_ca=...)), or listen on 127.0.0.1"
            )

    def admits(self, authorization: str | bytes | None) -> bool:
        """Return whether a request carries any of the tokens; compare in constant time.

        Args:
            authorization: The value of the `authorization` header; None: there is none.

        Returns:
            True also if the server requires no token.
        """
        sent = _header_bytes(authorization)
        return not self._readers or self._carries(sent, list(self._readers))

    def permits(self, authorization: str | bytes | None, permission: Permission) -> bool:
        """Return whether a request may do something; compare in constant time.

        Args:
            authorization: The value of the `authorization` header; None: there is none.
            permission: What it wants to do.

        Returns:
            True also if nothing is required for it.
        """
        sent = _header_bytes(authorization)
        instance(permission, Permission, "permission")
        if not self._readers or (permission is Permission.READ and permission not in self._readers):
            return True
        return self._carries(sent, [permission, Permission.ADMIN])

    def _carries(self, sent: bytes, permissions: list[Permission]) -> bool:
        scheme, _, token = sent.partition(b" ")
        token = token.strip()
        found = False
        for permission in permissions:
            for known in self._readers[permission]() if permission in self._readers else ():
                found |= hmac.compare_digest(token, known)
        return found and scheme.lower() == b"bearer"

    # ---- TLS

    @property
    def secure(self) -> bool:
        """Whether ports use TLS."""
        return self.certificate is not None

    def grpc_credentials(self) -> Any:
        """Return the credentials of a gRPC port, which follow changes of the files; None without TLS."""
        if self.certificate is None or self.key is None:
            return None
        grpc = grpc_module()
        certificate, key, client_ca = self.certificate, self.key, self.client_ca

        def read() -> Any:
            tls_context(certificate, key, client_ca)  # its errors name the file; those of gRPC do not
            pair = (read_secret("key", key), read_secret("certificate", certificate))
            roots = None if client_ca is None else read_secret("client CA", client_ca)
            return grpc.ssl_server_certificate_configuration([pair], roots)

        watched = WatchedFiles(self._tls_files, read)
        used = watched.current()

        def changed() -> Any:
            nonlocal used
            before, used = used, watched.current()
            return None if used is before else used

        return grpc.dynamic_ssl_server_credentials(used, changed, client_ca is not None)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the next connection of an HTTP port; None without TLS."""
        return None if self._context is None else self._context.current()

    @cached_property
    def _context(self) -> WatchedFiles[ssl.SSLContext] | None:
        if self.certificate is None or self.key is None:
            return None
        certificate, key, client_ca = self.certificate, self.key, self.client_ca
        return WatchedFiles(self._tls_files, lambda: tls_context(certificate, key, client_ca))

    @property
    def _tls_files(self) -> list[Path]:
        return [each for each in (self.certificate, self.key, self.client_ca) if each is not None]


def _header_bytes(authorization: str | bytes | None) -> bytes:
    if authorization is None or isinstance(authorization, bytes):
        return authorization or b""
    return text(authorization, "authorization").encode("utf-8", "replace")


def authorization_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | bytes | None:
    sent = [value for key, value in metadata if key == "authorization"]
    return sent[0] if len(sent) == 1 else None


def read_token(path: Path | None, environment: Mapping[str, str] | None = None) -> str | Path | None:
    """Find the token of a server; it is not an option of the command line, which other users can see."""
    if path is not None:
        return path
    return (os.environ if environment is None else environment).get(TOKEN_VARIABLE) or None
