"""The model server: gRPC and REST for a directory of exported models.

Starts and stops the components in order. On start, models are opened before ports, so that every client that
connects is answered. On stop, ports and requests end before models, so that every accepted request is
answered.

    state      meaning                                       next
    new        constructed; no port is open                  started, stopped
    started    models and ports are being opened             serving, stopped
    serving    requests are answered; health is SERVING      stopped
    stopped    health is NOT_SERVING; requests are answered  -
               for lame_duck_seconds, then refused

A server is used once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any, Self

from megalith.errors import InputError, MegalithError, RemoteError, UsageError
from megalith.library import import_extra, keep_freed_memory
from megalith.ops import checks
from megalith.serving.client.channels import MAX_MESSAGE_BYTES
from megalith.serving.client.row_fetcher import RowFetcher
from megalith.serving.discovery import Discovery, Replica, open_discovery
from megalith.serving.discovery.contract import is_loopback, is_wildcard
from megalith.serving.export.overlay import Compactor
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import ENTRY, Signature
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.grpc_calls import CallLimits, Calls, Health
from megalith.serving.server.http import event_loop, run_on_loop
from megalith.serving.server.open_inference import OIP_SERVICE, OIPService
from megalith.serving.server.repository import Repository
from megalith.serving.server.rest import RestServer
from megalith.serving.server.served_model import ServedModel, services_of
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.server_metrics import Metrics, MetricsServer
from megalith.serving.server.tf_serving import MODEL_SERVICE, PREDICTION_SERVICE, TFService
from megalith.serving.sync.subscriber import Subscriber

logger = logging.getLogger(__name__)

SERVICES = (PREDICTION_SERVICE, MODEL_SERVICE, OIP_SERVICE)
LAST_SECONDS = 1.0
"""Seconds in which computed responses may reach their clients when the server stops."""
CANCEL_SECONDS = 30.0
"""Seconds that gRPC may take to open its ports, and to cancel calls when the server stops."""
SPARE_REQUESTS = 16
"""Requests that are accepted beyond `max_concurrent`, to be refused with the number in progress."""
KEPT_BYTES = 64 << 20
"""Freed memory that a server to which training pushes keeps for the next messages."""
IDLE_SECONDS, MAX_AGE_SECONDS, GRACE_SECONDS = 300, 600, 300
"""Limits of a gRPC connection: without calls; in total; and the time that calls then have to end."""


class ModelServer:
    """Serves the models below a directory until it is stopped; also a context manager.

    Args:
        directory: An export, its parts, or a directory of several.
        config: The options (None: the defaults).
        discovery: A started discovery, instead of the one that `config.discovery` names.
        reuse_port: Share the ports with other processes (server_processes.py).
        shared_port: A second port of gRPC, which takes no writes.

    Raises:
        InputError: An option is invalid.
    """

    def __init__(
        self,
        directory: str | Path,
        config: ServerConfig | None = None,
        *,
        discovery: Discovery | None = None,
        reuse_port: bool = False,
        shared_port: int | None = None,
    ) -> None:
        directory = checks.path(directory, "directory")
        self._config = config = checks.instance(
            ServerConfig() if config is None else config, ServerConfig, "config"
        )
        self._reuse_port = checks.flag(reuse_port, "reuse_port")
        self._shared_port = None if shared_port is None else checks.integer(shared_port, "shared_port")
        if config.processes > 1:
            raise InputError(
                "a ModelServer is one process: use `megalith serve --processes`, in Python ServerProcesses"
            )
        if discovery is not None and not isinstance(discovery, Discovery):
            raise InputError(f"discovery must be a started Discovery, got {checks.kind(discovery)}")
        if discovery is None and config.discovery is not None:
            self._own_discovery: Discovery | None = open_discovery(config.discovery)
        else:
            self._own_discovery = None
        self._discovery = discovery or self._own_discovery
        if self._discovery is not None and config.advertise is None and is_wildcard(self._address(0)):
            raise InputError(
                f"other servers cannot connect to {config.host}: give the address that reaches this server "
                "(--advertise, in Python ServerConfig(advertise=...))"
            )
        self._port = config.port
        self._registered: dict[str, str] = {}
        self._announcing = threading.Lock()
        self._metrics = Metrics(lambda: self._repository.models)
        self._repository = Repository(
            directory,
            self._open,
            self._metrics,
            config,
            make_subscriber=self._subscribe if config.allow_writes else None,
            on_refresh=self._announce,
        )
        self._dispatcher = Dispatcher(self._repository, self._metrics, config)
        self._health = Health()
        self._servers: list[Any] = []
        self._limits = CallLimits(config.max_concurrent + SPARE_REQUESTS, config.read_seconds)
        self._rest: RestServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._state = "new"

    # ---- lifecycle

    def start(self) -> Self:
        """Open the models, then the ports.

        Raises:
            InputError: No model can be served.
            UsageError: The server was started before, or a model needs a discovery.
            OSError: A port cannot be opened.
        """
        if self._state != "new":
            raise UsageError("a server can be started only once; create another one")
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
        self._announce()
        if not is_loopback(self._config.host) and not self._config.security.secure:
            logger.warning("%s: requests are sent unencrypted; see Security (--tls-cert)", self.address)
        return self

    def stop(self) -> None:
        """Report NOT_SERVING, refuse new requests, answer the accepted ones, then end.

        Further calls do nothing. Takes at most about `lame_duck_seconds`, in which requests are accepted, and
        `drain_seconds`; requests that are in progress then are cancelled.
        """
        if self._state in ("new", "stopped"):
            self._state = "stopped"
            return
        serving = self._state == "serving"
        self._state = "stopped"
        self._dispatcher.leave()
        event_loop().call_soon_threadsafe(self._health.shut_down)
        self._unregister()
        if serving:
            linger(self._config.lame_duck_seconds)
        seconds = self._config.drain_seconds
        end = time.monotonic() + seconds
        try:
            if not run_on_loop(self._dispatcher.drain(seconds), seconds + CANCEL_SECONDS, "the drain"):
                logger.warning("some requests took longer than %g seconds and are cancelled", seconds)
        except RemoteError as error:
            logger.error("%s; the event loop is blocked", error)
        if self._rest is not None:
            self._rest.stop(LAST_SECONDS)
        try:
            run_on_loop(self._stop_grpc(), LAST_SECONDS + CANCEL_SECONDS, "the stop of gRPC")
        except RemoteError as error:
            logger.error("%s; its calls end with this process", error)
        self._repository.stop(max(0.0, end - time.monotonic()))
        if self._metrics_server is not None:
            self._metrics_server.stop(LAST_SECONDS)
        if self._own_discovery is not None:
            self._own_discovery.stop()
        self._dispatcher.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- status

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return self._address(self._port)

    @property
    def http_address(self) -> str | None:
        """host:port of REST; None without it."""
        return None if self._rest is None else self._address(self._rest.port)

    @property
    def metrics_address(self) -> str | None:
        """host:port of the metrics; None without them."""
        server = self._metrics_server
        return None if server is None else f"{bracketed(self._config.metrics_host)}:{server.port}"

    @property
    def models(self) -> list[ServedModel]:
        """The models of the directory, sorted by name."""
        return self._repository.models

    @property
    def metrics(self) -> Metrics:
        """The metrics of this server."""
        return self._metrics

    def refresh(self) -> None:
        """Check for new versions now instead of at the next poll."""
        self._repository.refresh()

    # ---- components

    def _address(self, port: int) -> str:
        return f"{bracketed(self._config.host)}:{port}"

    def _subscribe(self, servable: Servable) -> Subscriber:
        config = self._config
        path = None if config.checkpoint is None else Path(config.checkpoint)
        return Subscriber(servable, checkpoint=path, carry_seconds=config.carry_seconds)

    def _open(self, directory: Path) -> tuple[Servable, RowFetcher | None]:
        signature = Signature.read(directory)
        if signature.part != ENTRY:
            folder = None
            if self._config.allow_writes:
                config = self._config
                where = None if config.fold_directory is None else Path(config.fold_directory)
                folder = Compactor(where, rows=config.fold_rows, seconds=config.fold_seconds)
            config = self._config
            servable = Servable(
                directory, in_memory=config.in_memory, folder=folder, compiled=config.compiled
            )
            return servable, None
        if self._discovery is None:
            raise UsageError(
                f"{signature.name} fetches its rows from other servers: give a discovery "
                "(--discovery, in Python ServerConfig(discovery=...))"
            )
        fetcher = RowFetcher(
            self._discovery,
            signature,
            fail_soft=self._config.fail_soft,
            timeout=self._config.fetch_timeout,
            credentials=self._config.fetch_credentials,
        )
        try:
            return Servable(directory, fetch=fetcher, compiled=self._config.compiled), fetcher
        except BaseException:
            fetcher.close()
            raise

    def _listen(self) -> None:
        config = self._config
        if config.allow_writes:
            keep_freed_memory(KEPT_BYTES)
        self._port = run_on_loop(self._add_port(self._port, writes=True), CANCEL_SECONDS, "opening the port")
        if self._shared_port is not None:
            run_on_loop(
                self._add_port(self._shared_port, writes=False), CANCEL_SECONDS, "opening the shared port"
            )
        if config.http_port is not None:
            self._rest = RestServer(
                self._dispatcher,
                config.security,
                config.host,
                config.http_port,
                accept_compressed=config.accept_compressed,
                reuse_port=self._reuse_port,
            )
        if config.metrics_port is not None:
            self._metrics_server = MetricsServer(
                self._metrics, config.security, config.metrics_host, config.metrics_port
            )
        for grpc_server in self._servers:
            run_on_loop(grpc_server.start(), CANCEL_SECONDS, "the start of gRPC")
        for server in (self._rest, self._metrics_server):
            if server is not None:
                server.start()

    async def _stop_grpc(self) -> None:
        await asyncio.gather(*(server.stop(LAST_SECONDS) for server in self._servers))

    async def _add_port(self, port: int, *, writes: bool) -> int:
        """Make a gRPC server of a port; return the number of the port."""
        config = self._config
        refusal = "" if writes else f"this port is shared by several processes: push to {self.address}"
        calls = Calls(self._limits, config.security, self._dispatcher.access_log)
        TFService(self._dispatcher, write_refusal=refusal).add_to(calls)
        OIPService(self._dispatcher).add_to(calls)
        calls.add_health(self._health)
        calls.add_reflection(SERVICES)
        server = import_extra("grpc.aio", "serving needs grpcio", "serve").server(
            handlers=[calls],
            options=(
                ("grpc.max_receive_message_length", config.max_request_bytes + MAX_MESSAGE_BYTES - MAX_BYTES),
                ("grpc.max_send_message_length", -1),
                # A few compressed bytes can become a message of the largest size before it is admitted.
                ("grpc.compression_enabled_algorithms_bitset", 7 if config.accept_compressed else 1),
                # Otherwise two servers could share one port, and each would get some of the requests.
                ("grpc.so_reuseport", int(self._reuse_port)),
                ("grpc.max_connection_idle_ms", 1000 * IDLE_SECONDS),
                ("grpc.max_connection_age_ms", 1000 * MAX_AGE_SECONDS),
                ("grpc.max_connection_age_grace_ms", 1000 * GRACE_SECONDS),
            ),
        )
        credentials, address = config.security.grpc_credentials(), self._address(port)
        try:
            if credentials is None:
                found: int = server.add_insecure_port(address)
            else:
                found = server.add_secure_port(address, credentials)
        except RuntimeError:
            raise OSError(f"cannot listen on {address}; another server may use the port") from None
        self._servers.append(server)
        return found

    def _announce(self) -> None:
        """Report the available models to health and discovery; retry registrations that failed."""
        self._dispatcher.memory.release()
        with self._announcing:
            if self._state != "serving":
                return
            available = [model for model in self._repository.models if model.available]
            serving = [*SERVICES, *(model.name for model in available)] if available else []
            event_loop().call_soon_threadsafe(self._health.set, serving)
            if self._discovery is None:
                return
            replica = Replica(self._config.advertise or self.address, replica_id=self._config.replica_id)
            for model in available:
                newest = model.newest
                for service in [] if newest is None else services_of(newest.signature):
                    if service in self._registered:
                        continue
                    try:
                        self._discovery.register(service, replica)
                        self._registered[service] = replica.address
                    except MegalithError as error:
                        logger.error("cannot register %s: %s", service, error)

    def _unregister(self) -> None:
        with self._announcing:
            for service, address in self._registered.items():
                try:
                    if self._discovery is not None:
                        self._discovery.unregister(service, address)
                except MegalithError as error:
                    logger.warning("cannot unregister %s: %s", service, error)
            self._registered = {}


def linger(seconds: float) -> None:
    """Wait while requests are still answered, so that load balancers learn that the server leaves."""
    time.sleep(seconds)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
