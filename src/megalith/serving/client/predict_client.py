"""PredictClient: requests predictions from the servers of a model, with one deadline.

It works with any server of TF Serving's PredictionService. Responses are untrusted until validated: an output
that is missing, malformed or too large raises RemoteError.

`ClientCache` holds the clients of many models and parts, which share discoveries and connections. Code that
calls many models, or that gets the model with every request, keeps one cache; whoever makes it closes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

import numpy as np
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UsageError
from megalith.ops.checks import kind, text
from megalith.ragged import Ragged
from megalith.serving.client.channels import INVALID_ARGUMENT, Attempt, Channels, Route, Targets, run
from megalith.serving.client.credentials import Credentials
from megalith.serving.discovery import open_discovery
from megalith.serving.discovery.contract import Discovery, ServiceName
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.message_types import DataType, Message, PredictRequest
from megalith.serving.proto.tf_tensors import (
    Strings,
    from_tensor_proto,
    strings_to_tensor_proto,
    to_tensor_proto,
)
from megalith.serving.wire_names import PREDICT

STANDALONE = "standalone"
DEFAULT_TIMEOUT = 0.03
Input = Tensor | Ragged | Strings | Sequence[str] | Sequence[bytes]


class PredictClient:
    """Requests predictions of one part of a model from its replicas. Thread-safe.

    Args:
        discovery: A started discovery, or a URL, which the client opens and `close` closes.
        model_name: The model.
        task: The part: "entry", "standalone", "ps_0" and so on, or a number i for ps_i.
        old_model_name: Requested if no server knows `model_name`; None: nothing. If it is the part itself,
            such as "ps_0", the servers of `model_name` are asked for it: Monolith's old names have no model.
        model_version: -1 is the newest.
        signature_name: The signature of requests.
        timeout: Seconds for all attempts of a call together.
        credentials: What the client presents to servers.
        channels: Connections to share with other clients; they have their own credentials.

    Raises:
        InputError: An argument is invalid.
        DiscoveryError: The discovery cannot be opened.
    """

    def __init__(
        self,
        discovery: Discovery | str,
        model_name: str,
        task: str | int = "entry",
        *,
        old_model_name: str | None = None,
        model_version: int = -1,
        signature_name: str = PREDICT,
        timeout: float = DEFAULT_TIMEOUT,
        credentials: Credentials | None = None,
        channels: Channels | None = None,
    ) -> None:
        check_settings(old_model_name, model_version, signature_name, credentials)
        service = service_of(model_name, task)
        asked = [(service, _wire_name(service))]
        if old_model_name == service.part:
            asked.append((service, service.part))
        elif old_model_name is not None:
            old = service_of(old_model_name, task)
            asked.append((old, _wire_name(old)))
        if channels is not None and not isinstance(channels, Channels):
            raise InputError(f"channels must be Channels, got {kind(channels)}")
        if channels is not None and credentials is not None:
            raise InputError("give either credentials or channels, which have their own credentials")
        self.timeout = check_timeout(timeout)
        self._owned = channels is None
        self._channels = Channels(credentials) if channels is None else channels
        self._opened = open_discovery(discovery) if isinstance(discovery, str) else None
        found = self._opened or discovery
        if not isinstance(found, Discovery):
            raise InputError(f"discovery must be a Discovery or its address, got {type(found).__name__}")
        try:
            if self._opened is not None:
                self._opened.start()
            self._targets = {service: Targets(found, str(service), self._channels) for service, _ in asked}
        except BaseException:
            if self._opened is not None:
                self._opened.stop()
            raise
        self._asked = [
            (self._targets[service], model_spec(name, signature_name, model_version))
            for service, name in asked
        ]

    def predict(
        self,
        inputs: Mapping[str, Input],
        *,
        outputs: Sequence[str] = (),
        timeout: float | None = None,
    ) -> dict[str, Tensor]:
        """Request a prediction.

        Args:
            inputs: Tensors, strings, or Ragged columns (sent as `name`, `name:row_splits`, `name:weights`).
            outputs: Names of the outputs (empty: all).
            timeout: Replaces the client's timeout, in seconds.

        Returns:
            Outputs by name.

        Raises:
            InputError: An input cannot be sent.
            RemoteError: No server answered in time, or the response is malformed.
            DiscoveryError: The discovery failed.
        """
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
            raise InputError(f"inputs must be a dict of tensors by name, got {kind(inputs)}")
        if not isinstance(outputs, list | tuple) or not all(isinstance(name, str) for name in outputs):
            raise InputError(f"outputs must be a list of names, got {repr(outputs)[:100]}")
        body = inputs_and_outputs(_protos(inputs), outputs)
        attempt = Attempt([Route(targets, spec + body) for targets, spec in self._asked])
        run([attempt], seconds)
        return read_outputs(attempt.result(), outputs, self._asked[0][0].service)  # no limit: it is done

    def close(self) -> None:
        """Close the client and cancel calls in progress; further calls do nothing."""
        for targets in self._targets.values():
            targets.close()
        if self._owned:
            self._channels.close()
        if self._opened is not None:
            self._opened.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_settings(
    old_model_name: object, model_version: object, signature_name: object, credentials: object
) -> None:
    """Check the types of a client's settings; see `PredictClient`."""
    if old_model_name is not None:
        text(old_model_name, "old_model_name")
    if (
        isinstance(model_version, bool)
        or not isinstance(model_version, int)
        or not -1 <= model_version < 2**63
    ):
        raise InputError(f"model_version must be -1 (the newest) or more, got {model_version!r}")
    text(signature_name, "signature_name")
    if not str(signature_name).isprintable():
        raise InputError(f"signature_name must be printable, got {repr(signature_name)[:100]}")
    if credentials is not None and not isinstance(credentials, Credentials):
        raise InputError(f"credentials must be Credentials, got {kind(credentials)}")


def model_spec(name: str, signature_name: str, version: int = -1) -> bytes:
    """Return the bytes of a PredictRequest without inputs; append those of `inputs_and_outputs`."""
    request = PredictRequest()
    request.model_spec.name = name
    request.model_spec.signature_name = signature_name
    if version >= 0:
        request.model_spec.version.value = version
    data: bytes = request.SerializeToString()
    return data


def inputs_and_outputs(protos: Mapping[str, Message], outputs: Sequence[str] = ()) -> bytes:
    """Return the bytes of a PredictRequest without a model; append them to those of `model_spec`."""
    data: bytes = PredictRequest(inputs=protos, output_filter=outputs).SerializeToString()
    return data


def read_outputs(response: Message, names: Sequence[str], service: str) -> dict[str, Tensor]:
    left, read = MAX_BYTES, {}
    for name in names or sorted(response.outputs):
        label = f"{service}: output {name[:100]!r}"
        if name not in response.outputs:
            known = ", ".join(sorted(response.outputs))[:200]
            raise RemoteError(
                f"{label} is missing from the response; found {known or 'nothing'}", code=INVALID_ARGUMENT
            )
        proto = response.outputs[name]
        if proto.dtype == DataType.DT_STRING:
            raise RemoteError(f"{label} holds strings; request other outputs by name", code=INVALID_ARGUMENT)
        try:
            read[name] = from_tensor_proto(proto, name=label, max_bytes=left)
        except InputError as error:
            raise RemoteError(str(error), code="INTERNAL") from None
        left -= read[name].nbytes
    return read


def service_of(model_name: str, task: str | int) -> ServiceName:
    if isinstance(task, bool) or not isinstance(task, str | int) or (isinstance(task, int) and task < 0):
        raise InputError(f"task must be a part of the model, such as 'entry', or 0 for 'ps_0', got {task!r}")
    return ServiceName(model_name, f"ps_{task}" if isinstance(task, int) else task)


def _wire_name(service: ServiceName) -> str:
    # Other servers know a standalone model only by its plain name.
    return service.model if service.part == STANDALONE else str(service)


def check_timeout(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"timeout must be a number of seconds above 0, got {value!r}")
    return value


def _protos(inputs: Mapping[str, Input]) -> dict[str, Message]:
    protos: dict[str, Message] = {}
    for name, value in inputs.items():
        try:
            if isinstance(value, Ragged):
                protos[name] = to_tensor_proto(value.values)
                protos[f"{name}:row_splits"] = to_tensor_proto(value.row_splits)
                if value.weights is not None:
                    protos[f"{name}:weights"] = to_tensor_proto(value.weights)
            elif isinstance(value, Tensor):
                protos[name] = to_tensor_proto(value)
            elif isinstance(value, np.ndarray | list | tuple):
                protos[name] = strings_to_tensor_proto(_encoded(value))
            else:
                raise InputError(
                    f"send a tensor, a Ragged or a list of strings, not a {type(value).__name__}"
                )
        except InputError as error:
            raise InputError(f"input {name!r}: {error}") from None
    return protos


def _encoded(strings: Strings | Sequence[str] | Sequence[bytes]) -> Strings:
    array = np.asarray(strings, dtype=object)
    flat = [value.encode() if isinstance(value, str) else value for value in array.reshape(-1).tolist()]
    encoded = np.empty(len(flat), dtype=object)
    encoded[:] = flat
    return encoded.reshape(array.shape)


OPEN_SECONDS = 60.0
"""How long `ClientCache.open` waits for a discovery."""
MAX_CLIENTS = 256
"""Maximum number of clients; beyond it the oldest one is closed."""

Made = TypeVar("Made")


class ClientCache:
    """Clients by their settings, made on first use and closed together. Thread-safe.

    Discoveries are opened, and clients are made, in separate threads. A call waits for its own until its
    deadline, and never for those of other calls; what is ready too late is used by the next call.

    Args:
        discovery: Used by calls that name none: a started discovery, or a URL, which the first call opens.

    Raises:
        InputError: The discovery is something else.
    """

    def __init__(self, discovery: Discovery | str | None = None) -> None:
        self._lock = threading.Lock()
        self._default = _check_discovery(discovery)
        self._opened: dict[str, Future[Discovery]] = {}
        self._channels: dict[Credentials | None, Channels] = {}
        self._clients: dict[tuple[Any, ...], Future[PredictClient]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def discovery(self) -> Discovery | str | None:
        """The discovery of calls that name none."""
        return self._default

    def client(
        self,
        model_name: str,
        task: str | int = "entry",
        *,
        discovery: Discovery | str | None = None,
        credentials: Credentials | None = None,
        timeout: float,
        old_model_name: str | None = None,
        model_version: int = -1,
        signature_name: str = PREDICT,
    ) -> PredictClient:
        """Return the client of these settings; the cache closes it.

        Args:
            model_name: The model.
            task: The part; see `PredictClient`.
            discovery: Used instead of the cache's own; a URL is opened by the first call that names it, and
                kept.
            credentials: What the client presents to servers.
            timeout: Seconds to wait until the client is made; it is not the client's own timeout.
            old_model_name: Requested if no server knows `model_name`; see `PredictClient`.
            model_version: -1 is the newest.
            signature_name: The signature of requests.

        Returns:
            The client, with `PredictClient`'s default timeout.

        Raises:
            UsageError: There is no discovery.
            InputError: A setting is invalid.
            DiscoveryError: The discovery cannot be opened, or not in time; the next call may succeed.
        """
        seconds = check_timeout(timeout)
        check_settings(old_model_name, model_version, signature_name, credentials)
        service = service_of(model_name, task)
        _check_discovery(discovery)
        with self._lock:
            discovery = self._default if discovery is None else discovery
            if discovery is None:
                raise UsageError(
                    "no discovery: pass one, such as 'static:host:port', to the call or to the ClientCache"
                )
            key = (discovery, credentials, service, old_model_name, model_version, signature_name)
            client = self._clients.get(key)
            if client is None:
                channels = self._channels.setdefault(credentials, Channels(credentials))
                opening = self._opening(discovery) if isinstance(discovery, str) else None
                client = _in_thread(
                    lambda: PredictClient(
                        discovery if opening is None else opening.result(),  # no limit: `client` has one
                        model_name,
                        task,
                        old_model_name=old_model_name,
                        model_version=model_version,
                        signature_name=signature_name,
                        channels=channels,
                    )
                )
                if len(self._clients) >= MAX_CLIENTS:
                    # It owns neither channels nor discovery, so calls in progress continue.
                    _when_ready(self._clients.pop(next(iter(self._clients))), PredictClient.close)
                self._clients[key] = client
        if not wait([client], seconds).done:
            label = discovery if isinstance(discovery, str) else type(discovery).__name__
            raise DiscoveryError(
                f"{label} did not answer within {seconds:g} seconds; the next call may succeed"
            )
        try:
            return client.result()  # no limit: it is done
        except BaseException:
            with self._lock:
                if self._clients.get(key) is client:
                    del self._clients[key]  # the next call tries again
            raise

    def open(self, url: str) -> Discovery:
        """Return the started discovery of a URL; the first call opens it and waits.

        Args:
            url: Such as "static:host:port".

        Returns:
            The discovery, which the cache stops.

        Raises:
            InputError: The URL is of an unknown kind.
            DiscoveryError: The discovery cannot be opened, or not in OPEN_SECONDS.
        """
        text(url, "url")
        with self._lock:
            opening = self._opening(url)
        if not wait([opening], OPEN_SECONDS).done:
            raise DiscoveryError(f"{url} did not answer within {OPEN_SECONDS:g} seconds")
        return opening.result()  # no limit: it is done

    def reset(self, discovery: Discovery | str | None = None) -> None:
        """Close everything that was opened, and set the discovery of calls that name none.

        Args:
            discovery: A started discovery, or a URL, which the next call opens; None: no discovery.

        Raises:
            InputError: The discovery is something else; nothing is closed.
        """
        _check_discovery(discovery)
        with self._lock:
            clients, channels, opened = self._clients, self._channels, self._opened
            self._default, self._clients, self._channels, self._opened = discovery, {}, {}, {}
        for client in clients.values():
            _when_ready(client, PredictClient.close)
        for each in channels.values():
            each.close()
        for future in opened.values():
            _when_ready(future, lambda opened: opened.stop())

    def close(self) -> None:
        """Close everything that was opened, and what is still being opened once it is ready."""
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opening(self, url: str) -> Future[Discovery]:
        known = self._opened.get(url)
        if known is None or (known.done() and known.exception() is not None):
            known = self._opened[url] = _in_thread(lambda: _start_discovery(url))
        return known


def _check_discovery(discovery: Discovery | str | None) -> Discovery | str | None:
    if discovery is not None and not isinstance(discovery, Discovery | str):
        raise InputError(f"discovery must be a Discovery or its URL, got {kind(discovery)}")
    return discovery


def _start_discovery(url: str) -> Discovery:
    discovery = open_discovery(url)
    discovery.start()
    return discovery


def _in_thread(make: Callable[[], Made]) -> Future[Made]:
    """Call a function in a daemon thread and return its future."""
    future: Future[Made] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="megalith-opening", daemon=True).start()
    return future


def _when_ready(future: Future[Made], call: Callable[[Made], object]) -> None:
    """Call a function with the result of a future when it completes; do nothing if it failed."""

    def done(future: Future[Made]) -> None:
        if future.exception() is None:
            call(future.result())  # no limit: it is done

    future.add_done_callback(done)
