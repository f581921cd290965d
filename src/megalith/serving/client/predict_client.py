"""The predict client: asks whoever serves a model, under one deadline.

`PredictClient` is what a program holds; `remote_predict` is Monolith's call over it, with a discovery and
channels that the whole process shares. Any server of TF Serving's PredictionService will do. Answers are
hostile until read: what is no tensor of the asked name, or too large, is a RemoteError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UsageError
from megalith.ragged import Ragged
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials
from megalith.serving.client.failover import Attempt, Route, Targets, run
from megalith.serving.discovery.contract import Discovery
from megalith.serving.discovery.urls import open_discovery
from megalith.serving.discovery.znode_records import SavedModel
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
DEADLINE_MS = 30.0
MAX_CLIENTS = 256
_LEAST_MS = 0.001

Made = TypeVar("Made")
Input = Tensor | Ragged | Strings | Sequence[str] | Sequence[bytes]


class PredictClient:
    """Predictions of one part of a model, from whichever replica answers. Threads may share one.

    discovery: started by the caller, or a URL (then opened, and closed by `close`). task: the part, "entry",
    "standalone" or "ps_0", or a number i for ps_i. old_model_name: asked for if nobody knows model_name.
    model_version: -1 is the newest. deadline_ms: for all tries of a call together.
    Raises InputError for names and numbers that make no sense.
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
        deadline_ms: float = DEADLINE_MS,
        credentials: Credentials | None = None,
        channels: Channels | None = None,
    ) -> None:
        names = [model_name] if old_model_name is None else [model_name, old_model_name]
        services = [_service(name, task) for name in names]
        if isinstance(model_version, bool) or not -1 <= model_version < 2**63:
            raise InputError(f"model_version must be -1 (the newest) or more, got {model_version!r}")
        if channels is not None and credentials is not None:
            raise InputError("give credentials or channels, which have their own; not both")
        self.deadline_ms = milliseconds(deadline_ms)
        self._version = model_version
        self._signature_name = signature_name
        self._owned = channels is None
        self._channels = Channels(credentials) if channels is None else channels
        self._opened = open_discovery(discovery) if isinstance(discovery, str) else None
        found = self._opened or discovery
        if not isinstance(found, Discovery):
            raise InputError(f"discovery must be a Discovery or its address, got {type(found).__name__}")
        try:
            if self._opened is not None:
                self._opened.start()
            self._targets = [Targets(found, str(service), self._channels) for service in services]
        except BaseException:
            if self._opened is not None:
                self._opened.stop()
            raise
        self._names = [_wire_name(service) for service in services]

    def predict(
        self,
        inputs: Mapping[str, Input],
        *,
        outputs: Sequence[str] = (),
        deadline_ms: float | None = None,
    ) -> dict[str, Tensor]:
        """The outputs named, or all of them.

        inputs: tensors, Ragged columns (sent as `name`, `name:row_splits` and `name:weights`), or strings.
        Raises InputError for what cannot be sent, RemoteError or DiscoveryError if no answer comes in time.
        """
        seconds = (self.deadline_ms if deadline_ms is None else milliseconds(deadline_ms)) / 1000
        body = inputs_and_outputs(_protos(inputs), outputs)
        routes = [
            Route(targets, model_spec(name, self._signature_name, self._version) + body)
            for name, targets in zip(self._names, self._targets, strict=True)
        ]
        attempt = Attempt(routes)
        run([attempt], seconds)
        return read_outputs(attempt.result(), outputs, self._targets[0].service)

    def close(self) -> None:
        """Ends it, calls under way included; closing again is harmless."""
        for targets in self._targets:
            targets.close()
        if self._owned:
            self._channels.close()
        if self._opened is not None:
            self._opened.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def model_spec(name: str, signature_name: str, version: int = -1) -> bytes:
    """The bytes of a PredictRequest without inputs; followed by those of the inputs they make a whole one."""
    request = PredictRequest()
    request.model_spec.name = name
    request.model_spec.signature_name = signature_name
    if version >= 0:
        request.model_spec.version.value = version
    data: bytes = request.SerializeToString()
    return data


def inputs_and_outputs(protos: Mapping[str, Message], outputs: Sequence[str] = ()) -> bytes:
    """The bytes of a PredictRequest without a model; no outputs are all of them."""
    data: bytes = PredictRequest(inputs=protos, output_filter=outputs).SerializeToString()
    return data


def read_outputs(response: Message, names: Sequence[str], service: str) -> dict[str, Tensor]:
    """The tensors of a PredictResponse, in the order of the names; all of them if there are none.

    Raises RemoteError if one is missing, is no tensor, or all together are too large.
    """
    left, read = MAX_BYTES, {}
    for name in names or sorted(response.outputs):
        shown = f"{service}: output {name[:100]!r}"
        if name not in response.outputs:
            known = ", ".join(sorted(response.outputs))[:200]
            raise RemoteError(f"{shown} is not in the answer; found {known or 'nothing'}", code="INTERNAL")
        proto = response.outputs[name]
        if proto.dtype == DataType.DT_STRING:
            raise RemoteError(f"{shown} is strings; name the outputs you want", code="INTERNAL")
        try:
            read[name] = from_tensor_proto(proto, name=shown, max_bytes=left)
        except InputError as error:
            raise RemoteError(str(error), code="INTERNAL") from None
        left -= read[name].nbytes
    return read


# ---- Monolith's call, and what the process shares for it


class _SharedChannels:
    """What calls of `remote_predict` share: the default discovery, opened ones, channels and clients.

    Discoveries are opened, and clients made, in threads of their own: a caller waits for them no longer than
    it likes, nobody waits for what another one opens, and what came too late for one call serves the next.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.default: Discovery | None = None
        self.opened: dict[str, Future[Discovery]] = {}
        self.channels: dict[Credentials | None, Channels] = {}
        self.clients: dict[tuple[Any, ...], Future[PredictClient]] = {}

    def client(
        self,
        discovery: Discovery | str | None,
        credentials: Credentials | None,
        *,
        seconds: float,
        **settings: Any,
    ) -> PredictClient:
        """A client of these settings, made when first asked for; raises DiscoveryError after `seconds`."""
        with self.lock:
            discovery = self.default if discovery is None else discovery
            if discovery is None:
                raise UsageError(
                    "no discovery: call set_default_discovery('static:host:port') first, or give one"
                )
            key = (discovery, credentials, *settings.items())
            client = self.clients.get(key)
            if client is None:
                channels = self.channels.setdefault(credentials, Channels(credentials))
                opening = self._opening(discovery) if isinstance(discovery, str) else _done(discovery)
                client = _started(lambda: PredictClient(opening.result(), channels=channels, **settings))
                if len(self.clients) >= MAX_CLIENTS:
                    # It owns neither channels nor discovery, so a call under way is not disturbed.
                    _when_made(self.clients.pop(next(iter(self.clients))), lambda made: made.close())
                self.clients[key] = client
        if not wait([client], seconds).done:
            shown = discovery if isinstance(discovery, str) else type(discovery).__name__
            raise DiscoveryError(
                f"{shown} did not answer within {seconds:g} seconds; the next call may find it"
            )
        try:
            return client.result()
        except BaseException:
            with self.lock:
                if self.clients.get(key) is client:
                    del self.clients[key]  # the next call tries again
            raise

    def clear(self) -> None:
        """Closes everything that was opened here; what is being opened, as soon as it is."""
        with self.lock:
            clients, channels, opened = self.clients, self.channels, self.opened
            self.default, self.clients, self.channels, self.opened = None, {}, {}, {}
        for client in clients.values():
            _when_made(client, lambda made: made.close())
        for each in channels.values():
            each.close()
        for discovery in opened.values():
            _when_made(discovery, lambda made: made.stop())

    def open(self, url: str) -> Discovery:
        """The discovery of a URL, started when first asked for; waits for it."""
        with self.lock:
            opening = self._opening(url)
        return opening.result()

    def _opening(self, url: str) -> Future[Discovery]:
        known = self.opened.get(url)
        if known is None or (known.done() and known.exception() is not None):
            known = self.opened[url] = _started(lambda: _open(url))
        return known


def _open(url: str) -> Discovery:
    discovery = open_discovery(url)
    discovery.start()
    return discovery


def _started(make: Callable[[], Made]) -> Future[Made]:
    """What a thread of its own makes; the process does not wait for it to end."""
    future: Future[Made] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="megalith-opening", daemon=True).start()
    return future


def _done(made: Made) -> Future[Made]:
    future: Future[Made] = Future()
    future.set_result(made)
    return future


def _when_made(future: Future[Made], end: Callable[[Made], object]) -> None:
    """Ends what was made, or will have been; nothing if that fails."""

    def ended(future: Future[Made]) -> None:
        if future.exception() is None:
            end(future.result())

    future.add_done_callback(ended)


_shared = _SharedChannels()


def set_default_discovery(discovery: Discovery | str | None) -> None:
    """Where `remote_predict` finds servers unless told: a started discovery, or a URL, opened at once.

    Connections and discoveries that earlier calls opened are closed. None leaves no default.
    Raises InputError for a URL of another kind, DiscoveryError if it cannot be opened.
    """
    _shared.clear()
    found = _shared.open(discovery) if isinstance(discovery, str) else discovery
    with _shared.lock:
        _shared.default = found


def remote_predict(
    input_tensor_alias: Sequence[str],
    input_tensors: Sequence[Input],
    output_tensor_alias: Sequence[str],
    model_name: str | None,
    task: str | int,
    old_model_name: str | None = None,
    model_version: int = -1,
    fail_op_on_rpc_error: bool = True,
    max_rpc_deadline_millis: float = DEADLINE_MS,
    signature_name: str = PREDICT,
    *,
    discovery: Discovery | str | None = None,
    credentials: Credentials | None = None,
) -> list[Tensor]:
    """Predictions of a served model: the output tensors, in the order of `output_tensor_alias`.

    task: "entry", "ps_0", "standalone" ..., or a number i for ps_i. The deadline holds for opening the
    discovery and for all tries together. fail_op_on_rpc_error: False gives empty outputs, float32 [0], where
    no answer comes. discovery: instead of the default; a URL is opened by the first call that names it, and
    kept.
    Raises InputError (a ValueError) for arguments, RemoteError or DiscoveryError if no answer comes.
    """
    if not model_name:
        raise InputError("remote_predict: model_name must name a model")
    inputs, outputs = list(input_tensor_alias), list(output_tensor_alias)
    if len(inputs) != len(input_tensors):
        raise InputError(f"remote_predict: {len(inputs)} input aliases for {len(input_tensors)} tensors")
    for aliases, what in ((inputs, "input_tensor_alias"), (outputs, "output_tensor_alias")):
        if len(set(aliases)) != len(aliases):
            raise InputError(f"remote_predict: {what} holds a name twice")
    if not outputs:
        raise InputError("remote_predict: output_tensor_alias must name an output")
    end = time.monotonic() + milliseconds(max_rpc_deadline_millis) / 1000
    try:
        client = _shared.client(
            discovery,
            credentials,
            seconds=max_rpc_deadline_millis / 1000,
            model_name=model_name,
            task=task,
            old_model_name=old_model_name,
            model_version=model_version,
            signature_name=signature_name,
        )
        given = dict(zip(inputs, input_tensors, strict=True))
        left = max(1000 * (end - time.monotonic()), _LEAST_MS)
        answer = client.predict(given, outputs=outputs, deadline_ms=left)
    except (RemoteError, DiscoveryError):
        if fail_op_on_rpc_error:
            raise
        return [torch.empty(0, dtype=torch.float32) for _ in outputs]
    return [answer[name] for name in outputs]


# ---- arguments


def _service(model_name: str, task: str | int) -> SavedModel:
    if isinstance(task, bool) or not isinstance(task, str | int) or (isinstance(task, int) and task < 0):
        raise InputError(f"task must be a part of the model, such as 'entry' or 0 for 'ps_0', got {task!r}")
    return SavedModel(model_name, f"ps_{task}" if isinstance(task, int) else task)


def _wire_name(service: SavedModel) -> str:
    # Servers other than ours know a model that stands alone by its plain name only.
    return service.model_name if service.sub_graph == STANDALONE else str(service)


def milliseconds(value: float) -> float:
    """A deadline, checked; raises InputError unless it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"a deadline must be a number of milliseconds above 0, got {value!r}")
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
            elif isinstance(value, np.ndarray) or (
                isinstance(value, Sequence) and not isinstance(value, str)
            ):
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
