"""The model server: gRPC and REST in front of a directory of exported models.

Starts and ends the parts in their order: models before ports, so that who connects is answered; ports and
requests before models, so that who was accepted is too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megalith.errors import InputError, MegalithError, UsageError
from megalith.serving.client.channels import MAX_MESSAGE_BYTES
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.discovery import Discovery, Replica, open_discovery
from megalith.serving.discovery.addresses import is_loopback, is_wildcard
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import ENTRY, Signature
from megalith.serving.proto import MAX_BYTES
from megalith.serving.server.batching import Batching
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.health import MAX_CHECKS, MAX_STREAMS, Health, add_reflection, guard
from megalith.serving.server.oip_service import SERVICE as OIP_SERVICE
from megalith.serving.server.oip_service import OIPService
from megalith.serving.server.repository import Repository
from megalith.serving.server.rest import RestServer
from megalith.serving.server.security import Security
from megalith.serving.server.served_model import ServedModel, services_of
from megalith.serving.server.server_metrics import Metrics, MetricsServer
from megalith.serving.server.tf_service import MODEL_SERVICE, PREDICTION_SERVICE, TFService
from megalith.serving.sync.subscriber import Subscriber

log = logging.getLogger("megalith.serving")

SERVICES = (PREDICTION_SERVICE, MODEL_SERVICE, OIP_SERVICE)
LAST_SECONDS = 1.0
"""For answers to reach their clients, once all are computed."""
SPARE_THREADS = MAX_STREAMS + MAX_CHECKS + 16
"""Threads beside those of requests, so that a full server still says how it is."""
IDLE_SECONDS, MAX_AGE_SECONDS, GRACE_SECONDS = 300, 600, 300
"""Of a gRPC connection without calls; of any, lest calls that never send their message stay; for others."""


class ModelServer:
    """Serves the models below a directory until it is stopped; also a context manager.

    directory: an export, its parts, or a directory of several. port, http_port, metrics_port: 0 picks a free
    one; None leaves HTTP or metrics out. allow_writes: take pushes of training; checkpoint: where the run
    that pushes keeps its own, to catch up from. discovery: where to say what is served, and where an entry
    finds the parts of its model; an address opens one of its own. advertise: host:port told to discovery, if
    not the one listened on. fail_soft: an entry takes rows it cannot fetch for zeros. keep_versions: how many
    of the newest answer; None is 2 for ps parts, and 1 for the rest.
    Raises InputError or UsageError, at once or from `start`, for what cannot be served so.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        http_port: int | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        security: Security | None = None,
        batching: Batching | None = None,
        allow_writes: bool = False,
        checkpoint: str | Path | None = None,
        carry_seconds: float = 60.0,
        discovery: Discovery | str | None = None,
        advertise: str | None = None,
        replica_id: int = -1,
        fail_soft: bool = False,
        fetch_deadline_ms: float = 1000.0,
        fetch_credentials: Credentials | None = None,
        keep_versions: int | None = None,
        poll_seconds: float = 1.0,
        drain_seconds: float = 30.0,
        max_request_bytes: int = MAX_BYTES,
        max_concurrent: int = 128,
    ) -> None:
        self._security = security or Security()
        self._security.check_exposure(host, writes=allow_writes)
        for name, value in (("keep_versions", keep_versions), ("max_concurrent", max_concurrent)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be 1 or more, got {value}")
        if discovery is not None and advertise is None and is_wildcard(f"{_bracketed(host)}:"):
            raise InputError(f"nobody can call {host}: say with --advertise by which address others reach it")
        self._host, self._port = host, port
        self._http_port, self._metrics_port, self._metrics_host = http_port, metrics_port, metrics_host
        self._own_discovery = open_discovery(discovery) if isinstance(discovery, str) else None
        self._discovery = self._own_discovery or (None if isinstance(discovery, str) else discovery)
        self._advertise, self._replica_id = advertise, replica_id
        self._registered: dict[str, str] = {}
        self._telling = threading.Lock()
        self._fail_soft, self._fetch_deadline_ms = fail_soft, fetch_deadline_ms
        self._fetch_credentials = fetch_credentials
        self._drain_seconds = drain_seconds
        self._max_concurrent = max_concurrent
        self._max_bytes = max_request_bytes
        follows: Callable[[Servable], Subscriber] | None = None
        if allow_writes:
            path = None if checkpoint is None else Path(checkpoint)
            follows = lambda servable: Subscriber(  # noqa: E731
                servable, checkpoint=path, carry_seconds=carry_seconds
            )
        self._metrics = Metrics(lambda: self._repository.models)
        self._repository = Repository(
            Path(directory),
            self._open,
            self._metrics,
            batching=batching or Batching(),
            max_bytes=max_request_bytes,
            follows=follows,
            keep_versions=keep_versions,
            poll_seconds=poll_seconds,
            on_look=self._tell,
        )
        self._dispatcher = Dispatcher(
            self._repository,
            self._metrics,
            allow_writes=allow_writes,
            max_bytes=max_request_bytes,
            max_concurrent=max_concurrent,
        )
        self._health = Health()
        self._server: Any = None
        self._rest: RestServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._state = "new"

    # ---- life

    def start(self) -> Self:
        """Opens models, then ports. Raises InputError if nothing can be served, OSError for a port."""
        if self._state != "new":
            raise UsageError("a server is started once; make another")
        self._state = "started"
        try:
            if self._own_discovery is not None:
                self._own_discovery.start()
            self._repository.start()
            self._listen()
        except BaseException:
            self.stop()
            raise
        self._state = "serving"
        self._tell()
        if not is_loopback(self._host) and not self._security.secure:
            log.warning("%s: requests travel unencrypted; see --tls-cert", self.address)
        return self

    def stop(self) -> None:
        """Refuses what comes, answers what was accepted, then ends; stopping again is harmless.

        Takes at most about `drain_seconds`, after which requests under way are given up.
        """
        if self._state in ("new", "stopped"):
            self._state = "stopped"
            return
        self._state = "stopped"
        self._health.shut_down()
        self._unregister()
        end = time.monotonic() + self._drain_seconds
        if not self._dispatcher.close(self._drain_seconds):
            log.warning("some requests took longer than %g seconds and are given up", self._drain_seconds)
        if self._rest is not None:
            self._rest.stop(LAST_SECONDS)
        if self._server is not None:
            self._server.stop(LAST_SECONDS).wait()
        self._repository.stop(max(0.0, end - time.monotonic()))
        if self._metrics_server is not None:
            self._metrics_server.stop(LAST_SECONDS)
        if self._own_discovery is not None:
            self._own_discovery.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- what is there

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return f"{_bracketed(self._host)}:{self._port}"

    @property
    def http_address(self) -> str | None:
        """host:port of REST; None without it."""
        return None if self._rest is None else f"{_bracketed(self._host)}:{self._rest.port}"

    @property
    def metrics_address(self) -> str | None:
        """host:port of the metrics; None without them."""
        server = self._metrics_server
        return None if server is None else f"{_bracketed(self._metrics_host)}:{server.port}"

    @property
    def models(self) -> list[ServedModel]:
        """What is served, by name."""
        return self._repository.models

    @property
    def metrics(self) -> Metrics:
        """What has been counted."""
        return self._metrics

    def refresh(self) -> None:
        """Looks for new versions now, rather than at the next poll."""
        self._repository.refresh()

    # ---- parts

    def _open(self, directory: Path) -> tuple[Servable, RowFetcher | None]:
        signature = Signature.read(directory)
        if signature.part != ENTRY:
            return Servable(directory), None
        if self._discovery is None:
            raise UsageError(f"{signature.name} fetches its rows from other servers: give --discovery")
        fetcher = RowFetcher(
            self._discovery,
            signature,
            fail_soft=self._fail_soft,
            deadline_ms=self._fetch_deadline_ms,
            credentials=self._fetch_credentials,
        )
        try:
            return Servable(directory, fetch=fetcher), fetcher
        except BaseException:
            fetcher.close()
            raise

    def _listen(self) -> None:
        grpc = grpc_module()
        threads = self._max_concurrent + SPARE_THREADS
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="megalith-rpc"),
            handlers=[*TFService(self._dispatcher).handlers(), *OIPService(self._dispatcher).handlers()],
            interceptors=[guard(self._security)],
            options=(
                ("grpc.max_receive_message_length", self._max_bytes + MAX_MESSAGE_BYTES - MAX_BYTES),
                ("grpc.max_send_message_length", -1),
                # Two servers on one port would each get some of the requests.
                ("grpc.so_reuseport", 0),
                ("grpc.max_connection_idle_ms", 1000 * IDLE_SECONDS),
                ("grpc.max_connection_age_ms", 1000 * MAX_AGE_SECONDS),
                ("grpc.max_connection_age_grace_ms", 1000 * GRACE_SECONDS),
            ),
            maximum_concurrent_rpcs=threads,
        )
        self._health.add_to(self._server)
        add_reflection(self._server, SERVICES)
        credentials = self._security.grpc_credentials()
        try:
            if credentials is None:
                self._port = self._server.add_insecure_port(self.address)
            else:
                self._port = self._server.add_secure_port(self.address, credentials)
        except RuntimeError:
            raise OSError(f"{self.address} cannot be listened on; is another server there?") from None
        if self._http_port is not None:
            self._rest = RestServer(self._dispatcher, self._security, self._host, self._http_port)
        if self._metrics_port is not None:
            self._metrics_server = MetricsServer(
                self._metrics, self._security, self._metrics_host, self._metrics_port
            )
        self._server.start()
        for server in (self._rest, self._metrics_server):
            if server is not None:
                server.start()

    def _tell(self) -> None:
        """Tells health and discovery which models answer; discovery again, if it could not be told."""
        with self._telling:
            if self._state == "serving":
                self._tell_all()

    def _tell_all(self) -> None:
        available = [model for model in self._repository.models if model.available]
        self._health.set([*SERVICES, *(model.name for model in available)] if available else ())
        if self._discovery is None:
            return
        replica = Replica(self._advertise or self.address, replica_id=self._replica_id)
        for model in available:
            newest = model.newest
            for service in [] if newest is None else services_of(newest.signature):
                if service in self._registered:
                    continue
                try:
                    self._discovery.register(service, replica)
                    self._registered[service] = replica.address
                except MegalithError as error:
                    log.error("%s cannot be registered: %s", service, error)

    def _unregister(self) -> None:
        with self._telling:
            for service, address in self._registered.items():
                try:
                    if self._discovery is not None:
                        self._discovery.unregister(service, address)
                except MegalithError as error:
                    log.warning("%s cannot be unregistered: %s", service, error)
            self._registered = {}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
