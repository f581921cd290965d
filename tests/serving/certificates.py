"""Certificates for tests: an authority, a server and a client, made by openssl, valid for a day."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority's certificate, and certificates and keys it has signed."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Writes them into a folder; the server is localhost."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    authority = folder / "authority.pem"
    _openssl(["req", "-x509", *key, "-subj", "/CN=tests", "-keyout", f"{folder}/authority.key"], authority)
    for name in ("server", "client"):
        request, extra = folder / f"{name}.csr", folder / f"{name}.ext"
        extra.write_text("subjectAltName=DNS:localhost\n")
        _openssl(["req", *key[:-2], "-subj", f"/CN={name}", "-keyout", f"{folder}/{name}.key"], request)
        signed_by = ["-CA", f"{authority}", "-CAkey", f"{folder}/authority.key", "-CAcreateserial"]
        signing = ["x509", "-req", "-in", f"{request}", *signed_by, "-days", "1", "-extfile", f"{extra}"]
        _openssl(signing, folder / f"{name}.pem")
    return Certificates(
        authority, folder / "server.pem", folder / "server.key", folder / "client.pem", folder / "client.key"
    )


def _openssl(arguments: list[str], out: Path) -> None:
    command = ["openssl", *arguments, "-out", f"{out}"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
