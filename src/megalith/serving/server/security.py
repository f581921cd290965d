"""Security: who may connect, who may ask, who may write.

TLS decides who may connect (with a certificate authority, only clients it vouches for); a token, who may
ask; and writes are refused unless allowed, and beyond this machine need one of the two.
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
from megalith.serving.client.credentials import grpc_module, read_secret
from megalith.serving.discovery.addresses import is_loopback

TOKEN_VARIABLE = "MEGALITH_SERVE_TOKEN"


@dataclass(frozen=True)
class Security:
    """What a server shows, and what it asks of its clients. Raises InputError for what does not fit."""

    token: str | None = field(default=None, repr=False)
    """Asked for as `authorization: Bearer ...`."""
    certificate: Path | None = None
    """The server's own chain, PEM; makes every port TLS."""
    key: Path | None = None
    """Of the certificate, PEM."""
    client_ca: Path | None = None
    """Clients must show a certificate that one of these vouches for."""

    def __post_init__(self) -> None:
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]{8,4096}", self.token):
            raise InputError("a token must be 8 to 4096 visible ASCII characters, without spaces")
        if (self.certificate is None) != (self.key is None):
            raise InputError("TLS needs both a certificate and its key: --tls-cert and --tls-key")
        if self.client_ca is not None and self.certificate is None:
            raise InputError("clients show certificates over TLS only: give --tls-cert and --tls-key too")

    @property
    def secure(self) -> bool:
        """Whether ports are TLS."""
        return self.certificate is not None

    @property
    def asks(self) -> bool:
        """Whether clients must show anything."""
        return self.token is not None or self.client_ca is not None

    def check_exposure(self, host: str, *, writes: bool) -> None:
        """Raises UsageError if anyone beyond this machine could write."""
        if writes and not is_loopback(host) and not self.asks:
            raise UsageError(
                f"whoever reaches {host} could change the model: give a token (--token-file, or "
                f"{TOKEN_VARIABLE}) or ask for client certificates (--tls-ca), or listen on 127.0.0.1"
            )

    def admits(self, authorization: str | bytes | None) -> bool:
        """Whether a request's `authorization` carries the token; the comparison's time tells nothing."""
        if self.token is None:
            return True
        given = authorization or ""
        data = given if isinstance(given, bytes) else given.encode("utf-8", "replace")
        scheme, _, shown = data.partition(b" ")
        return hmac.compare_digest(shown.strip(), self.token.encode()) and scheme.lower() == b"bearer"

    def grpc_credentials(self) -> Any:
        """Credentials of a gRPC port; None without TLS."""
        if self.certificate is None or self.key is None:
            return None
        self.ssl_context()  # says what is wrong with the files, which gRPC does not
        pair = (read_secret("key", self.key), read_secret("certificate", self.certificate))
        roots = None if self.client_ca is None else read_secret("client CA", self.client_ca)
        return grpc_module().ssl_server_credentials([pair], roots, self.client_ca is not None)

    def ssl_context(self) -> ssl.SSLContext | None:
        """The same for HTTP."""
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
    """The token of a file, else of the environment, else None; never of a command line, which others see.

    Raises InputError if the file cannot be read.
    """
    if path is not None:
        return read_secret("token", path).decode("ascii", "replace").strip()
    return (os.environ if environment is None else environment).get(TOKEN_VARIABLE) or None
