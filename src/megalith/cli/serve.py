"""megalith serve: exported models, or a run of `megalith train`, answer requests."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from megalith.cli.console import exit_on_error
from megalith.cli.output import console
from megalith.errors import InputError

CHECKPOINT, EXPORTS = "checkpoint", "exports"
MANIFEST = "manifest.json"
_POLL_SECONDS = 0.5


def serve(
    directory: Annotated[
        Path,
        typer.Argument(help="What `megalith export` wrote, a directory of several, or a run's directory."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of gRPC; 0 picks a free one.")] = 8500,
    http_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Of REST; default: none.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of Prometheus metrics; default: none.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    metrics_host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    model_name: Annotated[
        str | None, typer.Option(help="What requests call a run's model; default: the kind of model.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Take rows that `megalith train --publish` pushes.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Of the run that pushes, to catch up from; default: the run's own.")
    ] = None,
    discovery: Annotated[
        str | None, typer.Option(help="Where to register: file:PATH, zk://HOST:PORT/ROOT or static:...")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="HOST:PORT that others reach this server by; default: as it listens.")
    ] = None,
    replica_id: Annotated[int, typer.Option(min=-1, help="Of this server among replicas.")] = -1,
    fail_soft: Annotated[
        bool, typer.Option("--fail-soft", help="An entry takes rows it cannot fetch for zeros.")
    ] = False,
    fetch_token_file: Annotated[
        Path | None, typer.Option(help="The token that an entry shows to the servers of its rows.")
    ] = None,
    fetch_ca: Annotated[
        Path | None, typer.Option(help="Fetch rows over TLS, from servers of this authority, PEM.")
    ] = None,
    fetch_deadline_ms: Annotated[float, typer.Option(min=1, help="For an entry to fetch rows.")] = 1000.0,
    token_file: Annotated[
        Path | None, typer.Option(help="Ask clients for this token; or set MEGALITH_SERVE_TOKEN.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Only clients with a certificate of this authority, PEM.")
    ] = None,
    max_batch_rows: Annotated[int, typer.Option(min=1, help="Rows computed at once.")] = 1024,
    max_wait_us: Annotated[int, typer.Option(min=0, help="Microseconds to wait for a fuller batch.")] = 0,
    max_queue_rows: Annotated[int, typer.Option(min=1, help="Rows that may wait.")] = 16384,
    workers: Annotated[int, typer.Option(min=1, help="Threads that compute, for each model.")] = 1,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests under way at once.")] = 128,
    keep_versions: Annotated[
        int | None, typer.Option(min=1, help="Newest versions that answer; 2 for ps parts, else 1.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long requests under way may take at the end.")
    ] = 30.0,
) -> None:
    """Answer requests over gRPC and REST until SIGTERM or SIGINT.

    Example: megalith serve exports/movies --port 8500 --http-port 8501
    """
    with exit_on_error(), _signalled() as stop:
        from megalith.serving.client.credentials import Credentials
        from megalith.serving.server.batching import Batching
        from megalith.serving.server.model_server import ModelServer
        from megalith.serving.server.security import Security, read_token

        security = Security(read_token(token_file), tls_cert, tls_key, tls_ca)
        security.check_exposure(host, writes=follow)
        fetch_credentials = Credentials.from_files(
            token=fetch_token_file,
            root_certificates=fetch_ca,
            certificate=None if fetch_ca is None else tls_cert,
            key=None if fetch_ca is None else tls_key,
        )
        batching = Batching(
            max_rows=max_batch_rows,
            max_wait_us=max_wait_us,
            max_queue_rows=max_queue_rows,
            workers=workers,
        )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        logging.getLogger("kazoo").setLevel(logging.WARNING)
        models = _models(directory, model_name, follow, stop)
        if models is None:
            return
        if models != directory and checkpoint is None:
            checkpoint = directory
        server = ModelServer(
            models,
            host=host,
            port=port,
            http_port=http_port,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            security=security,
            batching=batching,
            allow_writes=follow,
            checkpoint=checkpoint,
            discovery=discovery,
            advertise=advertise,
            replica_id=replica_id,
            fail_soft=fail_soft,
            fetch_deadline_ms=fetch_deadline_ms,
            fetch_credentials=fetch_credentials,
            keep_versions=keep_versions,
            drain_seconds=drain_seconds,
            max_concurrent=max_concurrent,
        )
        try:
            if stop.until(server.start):
                _say(server)
                stop.wait()
            console().print("shutting down", markup=False)
        finally:
            server.stop()


class _Stop(threading.Event):
    """Set by the first signal to end."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupts = False

    def until(self, work: Callable[[], object]) -> bool:
        """Does some work, which a signal ends: it may take long and asks no event. Whether none came."""
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
def _signalled() -> Iterator[_Stop]:
    """An event that SIGTERM and SIGINT set; a second signal does what it does without us."""
    stop = _Stop()
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


def _models(directory: Path, name: str | None, wait: bool, stop: threading.Event) -> Path | None:
    """The directory of exports: of a run, those made of its checkpoints, the newest included.

    wait: for a run's first checkpoint. None if the process is told to end meanwhile.
    """
    manifest = directory / CHECKPOINT / MANIFEST
    if not manifest.exists():
        if not wait or _has_versions(directory):
            if name is not None:
                raise InputError("--model-name is for a run; an export has its name already")
            return directory
        console().print(f"waiting for the first checkpoint in {directory}", markup=False, soft_wrap=True)
        while not manifest.exists():
            if stop.wait(_POLL_SECONDS):
                return None
    export_newest(directory, name)
    return directory / EXPORTS


def export_newest(run: Path, name: str | None) -> None:
    """Makes the newest checkpoint of a run the newest version of its exports, unless it is."""
    from megalith.checkpoint import read_manifest
    from megalith.serving.export.signature import Signature
    from megalith.serving.server.repository import versions_of
    from megalith.training.exporting import export_run

    out = run / EXPORTS
    newest = max(versions_of(out), default=None)
    version = None
    if newest is not None:
        signature = Signature.read(out / str(newest))
        manifest = read_manifest(run / CHECKPOINT)
        if signature.base == manifest.tip and name in (None, signature.model):
            return
        steps = [each.global_step for each in manifest.latest.collections.values()]
        version = max(newest + 1, *steps)
    export_run(run, out, name=name, version=version)


def _has_versions(directory: Path) -> bool:
    from megalith.serving.server.repository import DEPTH, version_roots

    return any(True for _ in version_roots(directory, DEPTH))


def _say(server: Any) -> None:
    screen = console()
    for model in server.models:
        if model.available:
            screen.print(f"{model.name} version {model.newest.number}", markup=False, soft_wrap=True)
    for what, address in (
        ("gRPC", server.address),
        ("REST", server.http_address),
        ("metrics", server.metrics_address),
    ):
        if address is not None:
            screen.print(f"{what} on {address}", markup=False, soft_wrap=True)
