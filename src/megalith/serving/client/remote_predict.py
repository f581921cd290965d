"""remote_predict: Monolith's call for predictions, over a discovery and channels that the process shares.

`set_default_discovery` sets the discovery of calls that name none. What calls open is kept for later calls,
in the one object of this module, until `set_default_discovery` is called again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalith.errors import DiscoveryError, InputError, RemoteError, UsageError
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials
from megalith.serving.client.predict_client import DEFAULT_TIMEOUT, Input, PredictClient, check_timeout
from megalith.serving.discovery.contract import Discovery
from megalith.serving.discovery.urls import open_discovery
from megalith.serving.wire_names import PREDICT

MAX_CLIENTS = 256
_MIN_TIMEOUT = 1e-06

Made = TypeVar("Made")


class _SharedClients:
    """State that calls of `remote_predict` share: discoveries, channels and clients.

    Discoveries are opened, and clients are created, in separate threads. A call waits for them until its
    deadline, does not wait for those of other calls; a later result is used by the next call.
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
        """Returns the client of these settings; raises DiscoveryError if it is not ready in `seconds`."""
        with self.lock:
            discovery = self.default if discovery is None else discovery
            if discovery is None:
                raise UsageError(
                    "no discovery: call set_default_discovery('static:host:port') first, or pass one"
                )
            key = (discovery, credentials, *settings.items())
            client = self.clients.get(key)
            if client is None:
                channels = self.channels.setdefault(credentials, Channels(credentials))
                opening = self._opening(discovery) if isinstance(discovery, str) else _done(discovery)
                client = _in_thread(lambda: PredictClient(opening.result(), channels=channels, **settings))
                if len(self.clients) >= MAX_CLIENTS:
                    # It owns neither channels nor discovery, so calls in progress continue.
                    _when_ready(self.clients.pop(next(iter(self.clients))), PredictClient.close)
                self.clients[key] = client
        if not wait([client], seconds).done:
            label = discovery if isinstance(discovery, str) else type(discovery).__name__
            raise DiscoveryError(
                f"{label} did not answer within {seconds:g} seconds; the next call may succeed"
            )
        try:
            return client.result()
        except BaseException:
            with self.lock:
                if self.clients.get(key) is client:
                    del self.clients[key]  # the next call tries again
            raise

    def clear(self) -> None:
        """Closes everything that was opened here, and pending clients once they open."""
        with self.lock:
            clients, channels, opened = self.clients, self.channels, self.opened
            self.default, self.clients, self.channels, self.opened = None, {}, {}, {}
        for client in clients.values():
            _when_ready(client, PredictClient.close)
        for each in channels.values():
            each.close()
        for discovery in opened.values():
            _when_ready(discovery, lambda opened: opened.stop())

    def open(self, url: str) -> Discovery:
        """Returns the started discovery of a URL; waits for it on first use."""
        with self.lock:
            opening = self._opening(url)
        return opening.result()

    def _opening(self, url: str) -> Future[Discovery]:
        known = self.opened.get(url)
        if known is None or (known.done() and known.exception() is not None):
            known = self.opened[url] = _in_thread(lambda: _open(url))
        return known


def _open(url: str) -> Discovery:
    discovery = open_discovery(url)
    discovery.start()
    return discovery


def _in_thread(make: Callable[[], Made]) -> Future[Made]:
    """Calls a function in a daemon thread and returns its future."""
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


def _when_ready(future: Future[Made], call: Callable[[Made], object]) -> None:
    """Calls a function with the result of a future when it completes; does nothing if it failed."""

    def done(future: Future[Made]) -> None:
        if future.exception() is None:
            call(future.result())

    future.add_done_callback(done)


_shared = _SharedClients()


def set_default_discovery(discovery: Discovery | str | None) -> None:
    """Sets the discovery of `remote_predict`, and closes what earlier calls opened.

    Args:
        discovery: A started discovery, or a URL, which is opened at once; None removes the default.

    Raises:
        InputError: The URL is of an unknown kind.
        DiscoveryError: The discovery cannot be opened.
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
    max_rpc_deadline_millis: float = 1000 * DEFAULT_TIMEOUT,
    signature_name: str = PREDICT,
    *,
    discovery: Discovery | str | None = None,
    credentials: Credentials | None = None,
) -> list[Tensor]:
    """Requests predictions of a served model, with Monolith's arguments.

    Args:
        input_tensor_alias: Names of the inputs.
        input_tensors: Tensors, Ragged columns or strings, one for each name.
        output_tensor_alias: Names of the outputs.
        model_name: The model.
        task: "entry", "ps_0", "standalone" and so on, or a number i for ps_i.
        old_model_name: Requested if no server knows `model_name`.
        model_version: -1 is the newest.
        fail_op_on_rpc_error: False returns empty outputs, float32 [0], instead of raising.
        max_rpc_deadline_millis: Deadline for opening the discovery and for all attempts together.
        signature_name: The signature of the request.
        discovery: Used instead of the default; a URL is opened by the first call that names it, and kept.
        credentials: What the client presents to servers.

    Returns:
        The outputs, in the order of `output_tensor_alias`.

    Raises:
        InputError: An argument is invalid (a ValueError).
        RemoteError: No server answered in time.
        DiscoveryError: The discovery did not answer in time.
    """
    if not model_name:
        raise InputError("remote_predict: model_name must name a model")
    inputs, outputs = list(input_tensor_alias), list(output_tensor_alias)
    if len(inputs) != len(input_tensors):
        raise InputError(f"remote_predict: {len(inputs)} input aliases for {len(input_tensors)} tensors")
    for aliases, what in ((inputs, "input_tensor_alias"), (outputs, "output_tensor_alias")):
        if len(set(aliases)) != len(aliases):
            raise InputError(f"remote_predict: {what} contains a name twice")
    if not outputs:
        raise InputError("remote_predict: output_tensor_alias must name an output")
    end = time.monotonic() + check_timeout(max_rpc_deadline_millis / 1000)
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
        left = max(end - time.monotonic(), _MIN_TIMEOUT)
        answer = client.predict(given, outputs=outputs, timeout=left)
    except (RemoteError, DiscoveryError):
        if fail_op_on_rpc_error:
            raise
        return [torch.empty(0, dtype=torch.float32) for _ in outputs]
    return [answer[name] for name in outputs]
