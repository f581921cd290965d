"""Channels: connections to model servers, with limits and credentials.

A `Connection` is a channel to one address and the calls of TF Serving's Predict, GetModelMetadata and
GetModelStatus over it. Every call has a deadline, and every failure raises RemoteError. The caller chooses
the server, and decides what happens when it fails. Needs grpcio, the extra `serve`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

from megalith.errors import RemoteError, UsageError
from megalith.serving.client.credentials import Credentials, grpc_module
from megalith.serving.discovery.contract import check_address, is_loopback
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.message_types import (
    GetModelMetadataResponse,
    GetModelStatusResponse,
    Message,
    PredictResponse,
)

logger = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"

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
    """A call in progress."""

    def __init__(self, future: Any, address: str) -> None:
        self._future = future
        self.address = address

    def result(self) -> Message:
        """Wait for the response until the call's deadline; raise RemoteError."""
        with _failures(self.address):
            return self._future.result()

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
        self._predict = self._method(PREDICT, PredictResponse)
        self._get_model_metadata = self._method(GET_MODEL_METADATA, GetModelMetadataResponse)
        self._get_model_status = self._method(GET_MODEL_STATUS, GetModelStatusResponse)

    def predict(self, request: Message | bytes, *, timeout: float, metadata: Metadata = ()) -> Message:
        """Send a PredictRequest and wait for the response."""
        return self._call(self._predict, request, timeout, metadata)

    def start_predict(self, request: Message | bytes, *, timeout: float, metadata: Metadata = ()) -> Call:
        """Send a PredictRequest without waiting."""
        with _failures(self.address):
            sent = (*self._metadata, *metadata)
            future = self._predict.future(_to_bytes(request), timeout=timeout, metadata=sent)
            return Call(future, self.address)

    def get_model_metadata(self, request: Message | bytes, *, timeout: float) -> Message:
        """Request the signatures of a model."""
        return self._call(self._get_model_metadata, request, timeout)

    def get_model_status(self, request: Message | bytes, *, timeout: float) -> Message:
        """Request the states of the versions of a model."""
        return self._call(self._get_model_status, request, timeout)

    def close(self) -> None:
        """Close the channel and cancel calls in progress; further calls do nothing."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method(self, path: str, response: Any) -> Any:
        return self.channel.unary_unary(path, response_deserializer=response.FromString)

    def _call(
        self, method: Any, request: Message | bytes, timeout: float, metadata: Metadata = ()
    ) -> Message:
        with _failures(self.address):
            # Blocking calls of grpcio are faster than its futures.
            return method(_to_bytes(request), timeout=timeout, metadata=(*self._metadata, *metadata))


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
        """Close all connections; further calls do nothing."""
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


@contextmanager
def _failures(address: str) -> Iterator[None]:
    """Raise errors of grpcio as RemoteError."""
    grpc = grpc_module()
    try:
        yield
    except grpc.FutureCancelledError:
        raise _error(address, "CANCELLED", "the call was cancelled") from None
    except grpc.RpcError as error:
        raise _error(address, error.code().name, error.details() or "") from None
    except ValueError as error:
        # grpcio raises it for a closed channel.
        raise _error(address, "CANCELLED", str(error)) from None


def _to_bytes(request: Message | bytes) -> bytes:
    if isinstance(request, bytes):
        return request
    data: bytes = request.SerializeToString()
    return data


def _error(address: str, code: str, details: str) -> RemoteError:
    return RemoteError(f"{address}: {code}: {details[:MAX_DETAILS]}", code=code, targets=(address,))
