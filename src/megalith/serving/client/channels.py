"""Channels: connections to model servers, and failover among the replicas of a service.

A `Connection` is a channel to one address, with limits and credentials, and the Predict calls over it. Every
call has a deadline, and every failure raises RemoteError. `Channels` holds connections by address.

An `Attempt` sends one request to a replica, and to others if it fails or is slow:

    event                                     effect
    a server fails                            the next one is tried at once
    half of the remaining time has passed     the next one is tried too (hedging); the first response wins
    a server returns a code of FINAL          no other server is tried; those in progress may still answer
    every server fails, one with NOT_FOUND    the next route is tried, if there is one; if that fails too, the
                                              error names both
    the deadline passes, or no server is left RemoteError

One deadline applies to all tries together. A hedged try never cancels a response that would have arrived in
time. Requests must be idempotent: predictions and lookups are, writes are not. Several attempts can run at
once, each with its own servers. Needs grpcio, the extra `serve`.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from megalith.errors import DiscoveryError, RemoteError, UsageError
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.discovery.contract import Discovery, Replicas, check_address, is_loopback
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.message_types import Message, PredictResponse

logger = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]

PREDICT = "/tensorflow.serving.PredictionService/Predict"

MAX_MESSAGE_BYTES = MAX_BYTES + 2**20
"""The largest message: the tensors of a request, and space for their names."""
MAX_CONNECTIONS = 256
MAX_WORKERS = 256
"""Maximum number of calls in progress in worker threads of one set of channels."""
MAX_DETAILS = 500
"""Maximum number of characters of a server's error message that are shown."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Detects a host that vanished, but only during calls: servers reject pings on idle connections.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's default backoff grows to two minutes, which is too long for a server that restarts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one attempt to connect may take. TLS over a long distance takes a while.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # Addresses come from discovery, so a proxy in the environment does not apply to them.
    ("grpc.enable_http_proxy", 0),
    # Otherwise a new connection would inherit the backoff of a closed one to the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


class Call:
    def __init__(self, future: Any, address: str) -> None:
        self._future = future
        self.address = address

    def result(self) -> Message:
        """Wait for the response until the call's deadline; raise RemoteError."""
        try:
            return self._future.result()  # no limit: the call has one
        except Exception as error:
            raise _remote_error(self.address, error) from None

    def cancel(self) -> None:
        """Cancel the call; `result` then raises RemoteError with the code CANCELLED."""
        self._future.cancel()


class Connection:
    """A channel to one server, and the calls over it. Thread-safe; connects at the first call.

    Requests are messages or their bytes. Timeouts are in seconds.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        credentials = credentials or Credentials()
        self.address = check_address(address)
        token = credentials.token
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        if credentials.secure:
            secrets = grpc_module().ssl_channel_credentials(
                credentials.root_certificates, credentials.key, credentials.certificate
            )
            self.channel = grpc_module().secure_channel(self.address, secrets, options=OPTIONS)
        else:
            if token is not None and not is_loopback(self.address.rpartition(":")[0]):
                logger.warning("%s: the token is sent unencrypted; use TLS", self.address)
            self.channel = grpc_module().insecure_channel(self.address, options=OPTIONS)
        self._predict = self.channel.unary_unary(PREDICT, response_deserializer=PredictResponse.FromString)

    def predict(self, request: Message | bytes, *, timeout: float, metadata: Metadata = ()) -> Message:
        """Send a PredictRequest; return the response, or raise RemoteError."""
        try:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            # Blocking calls of grpcio are faster than its futures.
            return self._predict(data, timeout=timeout, metadata=(*self._metadata, *metadata))
        except Exception as error:
            raise _remote_error(self.address, error) from None

    def start_predict(self, request: Message | bytes, *, timeout: float, metadata: Metadata = ()) -> Call:
        """Send a PredictRequest without waiting."""
        try:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            sent = (*self._metadata, *metadata)
            return Call(self._predict.future(data, timeout=timeout, metadata=sent), self.address)
        except Exception as error:
            raise _remote_error(self.address, error) from None

    def close(self) -> None:
        """Close the channel and cancel calls in progress; further calls do nothing."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Channels:
    """Connections by address, opened on first use and closed together. Thread-safe.

    Beyond MAX_CONNECTIONS the least recently used connection is closed.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Connection] = OrderedDict()
        self._workers: ThreadPoolExecutor | None = None
        self._closed = False

    def get(self, address: str) -> Connection:
        """Return the connection to an address; opened on first use."""
        with self._lock:
            if self._closed:
                raise UsageError("these channels are closed; open new ones")
            connection = self._open.get(address)
            if connection is None:
                connection = self._open[address] = Connection(address, self._credentials)
            self._open.move_to_end(address)
            oldest = self._open.popitem(last=False)[1] if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            oldest.close()
        return connection

    def submit(self, work: Callable[[], object]) -> None:
        """Run a call in a pooled thread; grpcio would start a thread for each of its futures."""
        with self._lock:
            if self._closed:
                raise UsageError("these channels are closed; open new ones")
            if self._workers is None:
                self._workers = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="megalith-channels")
            self._workers.submit(work)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._open.values())
            self._open.clear()
        for connection in connections:
            connection.close()
        if self._workers is not None:
            self._workers.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remote_error(address: str, error: Exception) -> Exception:
    """Return the RemoteError of an error of grpcio; other errors as they are."""
    grpc = grpc_module()
    if isinstance(error, grpc.FutureCancelledError):
        code, details = "CANCELLED", "the call was cancelled"
    elif isinstance(error, grpc.RpcError):
        code, details = error.code().name, error.details() or ""
    elif isinstance(error, ValueError):  # of a closed channel
        code, details = "CANCELLED", str(error)
    else:
        return error
    return RemoteError(f"{address}: {code}: {details[:MAX_DETAILS]}", code=code, targets=(address,))


INVALID_ARGUMENT = "INVALID_ARGUMENT"
FINAL = frozenset({INVALID_ARGUMENT, "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
"""Codes that are about the request; after any other code another replica may succeed."""
NOT_FOUND = "NOT_FOUND"
"""The replica works but lacks the model, which another replica may have."""
_NO_SERVER = "discovery knows no server of this service"
REST_SECONDS = 1.0
"""Seconds for which a replica that failed is tried last."""


class Targets:
    """The replicas of a service, in an order that balances the load. Thread-safe.

    Each call starts at the next replica, the first call at a random one, so that clients that start together
    do not all use the same replica. Replicas that failed recently come last.
    """

    def __init__(self, discovery: Discovery, service: str, channels: Channels) -> None:
        self.service = service
        self.channels = channels
        self._discovery = discovery
        self._turn = itertools.count(random.randrange(2**32))
        self._failed: dict[str, float] = {}
        self._replicas: Replicas = ()
        self._watch = discovery.watch(service, self._set)

    def in_turn(self) -> list[str]:
        """Return the addresses of all replicas, best first. Raise DiscoveryError."""
        replicas = self._replicas or self._discovery.replicas(self.service)
        start = next(self._turn) % max(len(replicas), 1)
        rested = time.monotonic() - REST_SECONDS
        addresses = [replica.address for replica in (*replicas[start:], *replicas[:start])]
        addresses.sort(key=lambda address: self._failed.get(address, rested) > rested)
        return addresses

    def failed(self, address: str) -> None:
        self._failed[address] = time.monotonic()

    def close(self) -> None:
        """Stop watching the discovery; the channels stay open."""
        self._watch.cancel()

    def _set(self, replicas: Replicas) -> None:
        self._replicas = replicas
        known = {replica.address for replica in replicas}
        # A copy: calls in other threads record failures at the same time.
        for address in [address for address in self._failed.copy() if address not in known]:
            self._failed.pop(address, None)


@dataclass(frozen=True)
class Route:
    """A serialized request and the replicas that can answer it."""

    targets: Targets
    request: bytes


@dataclass(frozen=True, eq=False)
class Try:
    """A request sent to one server."""

    attempt: Attempt
    address: str


Outcome = Message | RemoteError
Ended = queue.SimpleQueue[tuple[Try, Outcome]]


class Attempt:
    """A request in progress. It uses its first route, and the next one if a server lacks the model."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.done = False
        self.wakes_at = 0.0
        """When to call `wake`, unless a try ends before."""
        self._response: Message = None
        self._error: RemoteError | DiscoveryError | None = None
        self._routes = list(routes)
        self._waiting: list[str] = []
        self._in_progress: list[Try] = []
        self._tried: list[str] = []
        self._not_found: RemoteError | None = None
        """The error of a server of this route that lacks the model."""
        self._left: list[str] = []
        """Why each route before this one was left."""
        self._final: RemoteError | None = None
        """The error after which no other server is tried."""

    def result(self) -> Message:
        """Return the response; raise RemoteError or DiscoveryError."""
        if self._error is not None:
            raise self._error
        return self._response

    def begin(self, end: float, ended: Ended, *, alone: bool) -> None:
        """Send the request to the first server of the first route that has any."""
        self._end, self._ended, self._alone = end, ended, alone
        self._not_found = None
        try:
            while not (waiting := self._routes[0].targets.in_turn()) and len(self._routes) > 1:
                self._leave_route(_NO_SERVER)
        except DiscoveryError as error:
            self._error, self.done = error, True
            return
        if not waiting:
            self._fail(NOT_FOUND if self._tried else "UNAVAILABLE", _NO_SERVER)
            return
        self._waiting = waiting
        self._send()

    def take(self, ended: Try, outcome: Outcome) -> None:
        """Handle the end of a try: finish, or continue with the next server or route, or fail."""
        if ended not in self._in_progress:
            return
        slower = self._in_progress[: self._in_progress.index(ended)]
        self._in_progress.remove(ended)
        if isinstance(outcome, RemoteError):
            self._take_failure(outcome)
            return
        for other in slower:
            self._routes[0].targets.failed(other.address)
        self._in_progress = []  # they end by themselves, at the latest at the deadline
        self._response, self.done = outcome, True

    def wake(self, now: float) -> None:
        """Send the request to the next server too, or fail at the deadline."""
        if now >= self._end:
            for each in self._in_progress:
                self._routes[0].targets.failed(each.address)
            self._give_up("DEADLINE_EXCEEDED", "no response in time")
        elif now >= self.wakes_at and self._waiting:
            self._send()

    def _send(self) -> None:
        address = self._waiting.pop(0)
        connection = self._routes[0].targets.channels.get(address)
        self._tried.append(address)
        now = time.monotonic()
        left = max(self._end - now, 0.0)
        self.wakes_at = now + left / 2 if self._waiting else self._end
        sent, request, ended = Try(self, address), self._routes[0].request, self._ended
        self._in_progress.append(sent)
        # Nothing else can happen until this try ends, so it needs neither a thread nor the queue.
        if self._alone and not self._waiting and len(self._in_progress) == 1:
            self.take(sent, _predict(connection, request, left))
        else:
            self._routes[0].targets.channels.submit(
                lambda: ended.put((sent, _predict(connection, request, left)))
            )

    def _take_failure(self, error: RemoteError) -> None:
        if error.code in FINAL:
            self._final = error
            self._waiting, self.wakes_at = [], self._end
        elif error.code == NOT_FOUND:
            self._not_found = error
        else:
            self._routes[0].targets.failed(error.targets[0])
        if self._in_progress:
            return
        in_time = time.monotonic() < self._end
        if self._waiting and in_time:
            self._send()
        elif self._not_found is not None and len(self._routes) > 1 and self._final is None and in_time:
            self._leave_route(str(self._not_found))
            self.begin(self._end, self._ended, alone=self._alone)
        else:
            self._give_up(error.code, str(error))

    def _leave_route(self, reason: str) -> None:
        self._left.append(f"{self._routes.pop(0).targets.service}: {reason}")

    def _give_up(self, code: str, details: str) -> None:
        if self._final is not None:
            code, details = self._final.code, str(self._final)
        self._fail(code, details)

    def _fail(self, code: str, details: str) -> None:
        tried = f" (tried {', '.join(self._tried)})" if len(self._tried) > 1 else ""
        reasons = [*self._left, f"{self._routes[0].targets.service}: {details}"]
        message = "; ".join(dict.fromkeys(reasons)) + tried
        self._error = RemoteError(message, code=code, targets=tuple(self._tried))
        self._in_progress = []  # they end by themselves, at the latest at the deadline
        self.done = True


def run(attempts: Sequence[Attempt], seconds: float) -> None:
    """Run requests concurrently until each has a response or an error."""
    end = time.monotonic() + seconds
    ended: Ended = queue.SimpleQueue()
    for attempt in attempts:
        attempt.begin(end, ended, alone=len(attempts) == 1)
    while unfinished := [attempt for attempt in attempts if not attempt.done]:
        wait = min(attempt.wakes_at for attempt in unfinished) - time.monotonic()
        try:
            sent, outcome = ended.get(timeout=max(wait, 0.0))
        except queue.Empty:
            now = time.monotonic()
            for attempt in unfinished:
                attempt.wake(now)
        else:
            sent.attempt.take(sent, outcome)


def _predict(connection: Connection, request: bytes, seconds: float) -> Outcome:
    try:
        return connection.predict(request, timeout=seconds)
    except RemoteError as error:
        return error
