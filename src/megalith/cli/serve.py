"""megalith serve: answers requests from exported models, or from a run of `megalith train`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megalith.cli.config_options import config_options
from megalith.cli.output import console, exit_on_error, print_line
from megalith.errors import InputError
from megalith.serving.client.credentials import Credentials
from megalith.serving.server.security import Security, read_token
from megalith.serving.server.server_config import Batching, ServerConfig

CHECKPOINT = "checkpoint"
MANIFEST = "manifest.json"
_POLL_SECONDS = 0.5


@config_options(
    "server",
    ServerConfig,
    flags={"allow_writes": "--follow"},
    defaults={"port": 8500, "trial": "always"},
    omit=[
        "poll_seconds",
        "carry_seconds",
        "max_request_bytes",
        "freeze_gc",
        "security",
        "batching",
        "fetch_credentials",
    ],
)
@config_options(
    "security",
    Security,
    flags={"certificate": "--tls-cert", "key": "--tls-key", "client_ca": "--tls-ca"},
    omit=["token", "lookup_token", "write_token", "admin_token"],
)
@config_options(
    "batching",
    Batching,
    flags={"max_rows": "--max-batch-rows"},
    defaults={"threads": 1},
    omit=["max_bytes", "max_queue_bytes"],
)
def serve(
    directory: Annotated[
        Path, typer.Argument(help="An export, a directory of several exports, or the directory of a run.")
    ],
    server: dict[str, Any],
    security: dict[str, Any],
    batching: dict[str, Any],
    model_name: Annotated[
        str | None, typer.Option(help="Name of a run's model in requests. Default: the kind of model.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File of the token that clients must send, or set MEGALITH_SERVE_TOKEN."),
    ] = None,
    lookup_token_file: Annotated[
        Path | None, typer.Option(help="File of the token for rows of ids, such as an entry's fetches.")
    ] = None,
    write_token_file: Annotated[
        Path | None, typer.Option(help="File of the token with which training may push.")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="File of the token that permits everything.")
    ] = None,
    fetch_token_file: Annotated[
        Path | None, typer.Option(help="File of the token that an entry sends to the servers of its rows.")
    ] = None,
    fetch_ca: Annotated[
        Path | None,
        typer.Option(help="Fetch rows over TLS; PEM file of the authority of the servers' certificates."),
    ] = None,
) -> None:
    """Answer requests over gRPC and REST until SIGTERM or SIGINT.

    Example: megalith serve exports/movies --port 8500 --http-port 8501

    Example: megalith serve exports/movies --processes 4 --threads 1
    """
    with exit_on_error(), _stop_on_signal() as stop:
        tls = Security(**security)
        config = ServerConfig(
            **server,
            freeze_gc=True,
            batching=Batching(**batching),
            security=replace(
                tls,
                token=read_token(token_file),
                lookup_token=lookup_token_file,
                write_token=write_token_file,
                admin_token=admin_token_file,
            ),
            fetch_credentials=Credentials.from_files(
                token=fetch_token_file,
                root_certificates=fetch_ca,
                certificate=None if fetch_ca is None else tls.certificate,
                key=None if fetch_ca is None else tls.key,
            ),
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("kazoo").setLevel(logging.WARNING)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        models = _find_models(directory, model_name, config.allow_writes, stop)
        if models is None:
            return
        if models != directory and config.checkpoint is None:
            config = replace(config, checkpoint=directory)
        _serve(models, config, stop)


def _serve(models: Path, config: ServerConfig, stop: _StopEvent) -> None:
    from megalith.serving.server.model_server import ModelServer
    from megalith.serving.server.server_processes import ServerProcesses

    server = ModelServer(models, config) if config.processes == 1 else ServerProcesses(models, config)
    try:
        if stop.interrupt(server.start):
            _print_addresses(server)
            stop.wait()  # no limit: until the command is stopped
        console().print("shutting down", markup=False)
    finally:
        server.stop()


class _StopEvent(threading.Event):
    """Set by the first SIGTERM or SIGINT."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupts = False

    def interrupt(self, work: Callable[[], object]) -> bool:
        """Run long work that a signal interrupts; return whether no signal arrived."""
        try:
            self.interrupts = True
            if not self.is_set():
                work()
        except KeyboardInterrupt:
            pass
        finally:
            self.interrupts = False
        return not self.is_set()


@contextmanager
def _stop_on_signal() -> Iterator[_StopEvent]:
    """Give an event that SIGTERM and SIGINT set; a second signal has its usual effect."""
    stop = _StopEvent()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: Any) -> None:
        stop.set()
        restore()
        if stop.interrupts:
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


def _find_models(directory: Path, name: str | None, wait: bool, stop: threading.Event) -> Path | None:
    """Return the directory of the exports; the newest checkpoint of a run is exported first."""
    manifest = directory / CHECKPOINT / MANIFEST
    if not manifest.exists():
        if not wait or _has_versions(directory):
            if name is not None:
                raise InputError("--model-name applies to a run; an export already has a name")
            return directory
        console().print(f"waiting for the first checkpoint in {directory}", markup=False, soft_wrap=True)
        while not manifest.exists():
            if stop.wait(_POLL_SECONDS):
                return None
    from megalith.training.export import describe_dense, export_newest

    models = export_newest(directory, name)
    if note := describe_dense(directory):
        print_line(note)
    return models


def _has_versions(directory: Path) -> bool:
    from megalith.serving.server.versions import DEPTH, version_roots

    return any(True for _ in version_roots(directory, DEPTH))


def _print_addresses(server: Any) -> None:
    from megalith.serving.server.server_processes import ServerProcesses

    screen = console()
    group = isinstance(server, ServerProcesses)
    serving = server.models if group else [(m.name, m.newest.number) for m in server.models if m.available]
    for name, number in serving:
        screen.print(f"{name} version {number}", markup=False, soft_wrap=True)
    metrics = server.metrics_addresses if group else [server.metrics_address]
    own = [(f"process {k}", address) for k, address in enumerate(server.process_addresses)] if group else []
    for protocol, address in (
        ("gRPC", server.address),
        ("REST", server.http_address),
        *(("metrics", address) for address in metrics),
        *own,
    ):
        if address is not None:
            screen.print(f"{protocol} on {address}", markup=False, soft_wrap=True)
