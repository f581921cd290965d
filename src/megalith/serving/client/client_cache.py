"""ClientCache: clients of many models and parts that share discoveries and connections.

Code that calls many models, or that gets the model with every request, keeps one cache instead of a client
for each. Whoever makes a cache closes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.ops.checks import kind, text
from megalith.serving.client.channels import Channels
from megalith.serving.client.credentials import Credentials
from megalith.serving.client.predict_client import PredictClient, check_settings, check_timeout, service_of
from megalith.serving.discovery.contract import Discovery
from megalith.serving.discovery.urls import open_discovery
from megalith.serving.wire_names import PREDICT

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
                opening = self._opening(discovery) if isinstance(discovery, str) else _done(discovery)
                client = _in_thread(
                    lambda: PredictClient(
                        opening.result(),
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
            return client.result()
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
            DiscoveryError: The discovery cannot be opened.
        """
        text(url, "url")
        with self._lock:
            opening = self._opening(url)
        return opening.result()

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
            known = self._opened[url] = _in_thread(lambda: _open(url))
        return known


def _check_discovery(discovery: Discovery | str | None) -> Discovery | str | None:
    if discovery is not None and not isinstance(discovery, Discovery | str):
        raise InputError(f"discovery must be a Discovery or its URL, got {kind(discovery)}")
    return discovery


def _open(url: str) -> Discovery:
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


def _done(made: Made) -> Future[Made]:
    future: Future[Made] = Future()
    future.set_result(made)
    return future


def _when_ready(future: Future[Made], call: Callable[[Made], object]) -> None:
    """Call a function with the result of a future when it completes; do nothing if it failed."""

    def done(future: Future[Made]) -> None:
        if future.exception() is None:
            call(future.result())

    future.add_done_callback(done)
