"""Security: who may connect to a server, send requests, and write.

TLS controls who may connect: with a certificate authority, only clients that it signed. A token controls who
may send requests. Writes are refused unless they are allowed; beyond this machine they require a token or
client certificates.
"""

from __future__ import annotations

import hmac
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.errors import InputError, UsageError
from megalith.ops.checks import flag, path, text
from megalith.serving.client.credentials import grpc_module, read_secret
from megalith.serving.discovery.addresses import is_loopback

TOKEN_VARIABLE = "MEGALITH_SERVE_TOKEN"


@dataclass(frozen=True)
class Security:
    """What a server presents to its clients and requires of them.

    Raises:
        InputError: The token is malformed, or the files for TLS are incomplete.
    """

    token: str | None = field(default=None, repr=False)
    """Token that clients must send as `authorization: Bearer ...`."""
    certificate: Path | None = None
    """PEM file of the server's certificate chain; every port then uses TLS."""
    key: Path | None = None
    """PEM file of the certificate's private key."""
    client_ca: Path | None = None
    """PEM file of the authority that must have signed the certificates of clients."""

    def __post_init__(self) -> None:
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]{8,4096}", text(self.token, "token")):
            raise InputError("a token must be 8 to 4096 visible ASCII characters, without spaces")
        for name in ("certificate", "key", "client_ca"):
            if getattr(self, name) is not None:
                path(getattr(self, name), name)
        if (self.certificate is None) != (self.key is None):
            raise InputError("TLS needs both a certificate and its key: --tls-cert and --tls-key")
        if self.client_ca is not None and self.certificate is None:
            raise InputError("client certificates need TLS: give --tls-cert and --tls-key too")

    @property
    def secure(self) -> bool:
        """Whether ports use TLS."""
        return self.certificate is not None

    @property
    def authenticates(self) -> bool:
        """Whether clients must present a token or a certificate."""
        return self.token is not None or self.client_ca is not None

    def check_exposure(self, host: str, *, writes: bool) -> None:
        """Raise UsageError if anyone beyond this machine could write.

        Args:
            host: The address that the server listens on.
            writes: Whether the server accepts writes.
        """
        if flag(writes, "writes") and not is_loopback(text(host, "host")) and not self.authenticates:
            raise UsageError(
                f"anyone who can reach {host} could change the model: give a token (--token-file, or "
                f"{TOKEN_VARIABLE}), require client certificates (--tls-ca), or listen on 127.0.0.1"
            )

    def admits(self, authorization: str | bytes | None) -> bool:
        """Return whether a request carries the token; compare in constant time.

        Args:
            authorization: The value of the `authorization` header; None: there is none.

        Returns:
            True also if the server requires no token.
        """
        if self.token is None:
            return True
        given = b"" if authorization is None else authorization
        data = given if isinstance(given, bytes) else text(given, "authorization").encode("utf-8", "replace")
        scheme, _, token = data.partition(b" ")
        return hmac.compare_digest(token.strip(), self.token.encode()) and scheme.lower() == b"bearer"

    def grpc_credentials(self) -> Any:
        """Return the credentials of a gRPC port; None without TLS."""
        if self.certificate is None or self.key is None:
            return None
        self.ssl_context()  # its errors name the file; those of gRPC do not
        pair = (read_secret("key", self.key), read_secret("certificate", self.certificate))
        roots = None if self.client_ca is None else read_secret("client CA", self.client_ca)
        return grpc_module().ssl_server_credentials([pair], roots, self.client_ca is not None)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of an HTTP port; None without TLS."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"TLS: {self.certificate}, {self.key}: {error}") from None
        return context


def read_token(path: Path | None, environment: Mapping[str, str] | None = None) -> str | None:
    """Read the token of a server; it is not an option of the command line, which other users can see.

    Args:
        path: File of the token.
        environment: Where MEGALITH_SERVE_TOKEN is looked up without a file (None: os.environ).

    Returns:
        The token, or None if neither is given.

    Raises:
        InputError: The file cannot be read.
    """
    if path is not None:
        return read_secret("token", path).decode("ascii", "replace").strip()
    return (os.environ if environment is None else environment).get(TOKEN_VARIABLE) or None
