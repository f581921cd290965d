"""Credentials: what a client presents to model servers, and the loading of grpc.

This module imports neither grpc nor protobuf, so that commands can read settings without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import InputError
from megalith.library import import_extra
from megalith.ops.checks import path as check_path

MAX_SECRET_BYTES = 1 << 20
"""The largest file of a token, a certificate or a key."""


def grpc_module() -> Any:
    """Return the module grpc; raise MissingDependencyError if it is not installed."""
    return import_extra("grpc", "serving needs grpcio", "serve")


@dataclass(frozen=True)
class Credentials:
    """What a client presents to servers and requires of them. Its repr does not show secrets.

    The connection uses TLS if certificates are given, or if `tls` is true (with the system's root
    certificates).

    Raises:
        InputError: The token or a PEM file is malformed, or only one of certificate and key is given.
    """

    token: str | None = field(default=None, repr=False)
    """Sent as `authorization: Bearer ...`."""
    root_certificates: bytes | None = field(default=None, repr=False)
    """PEM of the authorities that may sign a server's certificate."""
    certificate: bytes | None = field(default=None, repr=False)
    """PEM of the client's own certificate, for servers that require one."""
    key: bytes | None = field(default=None, repr=False)
    """PEM of the certificate's private key."""
    tls: bool = False
    """Use TLS even without certificates."""

    def __post_init__(self) -> None:
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]{1,4096}", str(self.token)):
            raise InputError("credentials: a token must be 1 to 4096 visible ASCII characters")
        for name in ("root_certificates", "certificate", "key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, bytes) or b"-----BEGIN " not in value):
                raise InputError(f"credentials: {name} must be the bytes of a PEM file")
        if (self.certificate is None) != (self.key is None):
            raise InputError("credentials: certificate and key belong together; give both")

    @classmethod
    def from_files(
        cls,
        *,
        token: str | Path | None = None,
        root_certificates: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        tls: bool = False,
    ) -> Credentials:
        """Read credentials from files.

        Args:
            token: File of the token; white space around it is removed.
            root_certificates: PEM file of authorities.
            certificate: PEM file of the client's certificate.
            key: PEM file of its private key.
            tls: Use TLS even without certificates.

        Returns:
            The credentials; what is None has no file.

        Raises:
            InputError: A file cannot be read, or its content is malformed.
        """
        secret = _read_optional("token", token)
        return cls(
            token=None if secret is None else secret.decode("ascii", "replace").strip(),
            root_certificates=_read_optional("root_certificates", root_certificates),
            certificate=_read_optional("certificate", certificate),
            key=_read_optional("key", key),
            tls=tls,
        )

    @property
    def secure(self) -> bool:
        """Whether connections use TLS."""
        return self.tls or self.root_certificates is not None or self.certificate is not None


def read_secret(what: str, path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_SECRET_BYTES:
            raise InputError(f"{what}: {path} has more than {MAX_SECRET_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{what}: cannot read {path}: {error.strerror}") from None


def _read_optional(name: str, path: str | Path | None) -> bytes | None:
    where = f"credentials: {name}"
    return None if path is None else read_secret(where, check_path(path, where))
