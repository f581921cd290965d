"""Discovery: who serves what. The contract, and the board that implementations pin their findings to.

A service is a part of a model, named "movies:entry" or "movies:ps_0"; its replicas are servers that answer
for it. A server registers itself; trainers and clients ask for replicas or watch them change. Every discovery
is a `SyncBackend` too: the narrower view that parameter sync has of it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.serving.discovery.addresses import check_address
from megalith.serving.discovery.znode_records import SavedModel, TargetExtraInfo, check_name

log = logging.getLogger("megalith.discovery")

SyncTargets = tuple[str, list[str] | dict[str, TargetExtraInfo]]


@dataclass(frozen=True)
class Replica:
    """A server of a service. address: host:port. replica_id: -1 if it has none."""

    address: str
    replica_id: int = -1
    idc: str | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        check_address(self.address)
        if not -1 <= self.replica_id < 2**63:
            raise InputError(f"replica_id must be -1 or more, got {self.replica_id}")
        if self.idc is not None:
            check_name(self.idc, "idc")
        if self.cluster is not None:
            check_name(self.cluster, "cluster")


Replicas = tuple[Replica, ...]
OnChange = Callable[[Replicas], None]


class Watch:
    """Ends a watch: after `cancel` its callback is not called again."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Ends it; doing so again is harmless."""
        self._cancel()


class SyncBackend(ABC):
    """Where parameter sync finds its targets."""

    @abstractmethod
    def subscribe_model(self, model_name: str) -> None:
        """Says which model is trained; again with the same name is harmless, another raises UsageError."""

    @abstractmethod
    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        """The name to call a part of the model by, and the addresses of its replicas, perhaps none."""

    def start(self, timeout: float = 15.0) -> None:  # noqa: B027, most have nothing to start
        """Makes it ready; raises DiscoveryError if that takes more than `timeout` seconds."""

    def stop(self) -> None:  # noqa: B027
        """Ends it, at once; a stopped one is not started again."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Discovery(SyncBackend):
    """Who serves what. Threads may share one.

    Callbacks run one at a time, some in a thread of the discovery's, and must return soon.
    """

    def __init__(self) -> None:
        self._board = ReplicaRegistry()
        self._model: str | None = None

    @abstractmethod
    def register(self, service: str, replica: Replica) -> None:
        """Says that a server answers for a service; again with the same address replaces what was said.

        Raises InputError for a bad name, DiscoveryError if it cannot be said.
        """

    @abstractmethod
    def unregister(self, service: str, address: str) -> None:
        """Takes back what `register` said; harmless if nothing was."""

    @abstractmethod
    def replicas(self, service: str) -> Replicas:
        """The servers of a service now, by replica id, then address; each address once."""

    def watch(self, service: str, callback: OnChange) -> Watch:
        """Calls back with the replicas, at once and whenever they change."""
        self.replicas(service)
        return self._board.watch(service, callback)

    def wait(self, service: str, count: int = 1, timeout: float = 30.0) -> Replicas:
        """The replicas as soon as there are `count`; raises DiscoveryError after `timeout` seconds."""
        self.replicas(service)
        return self._board.wait(service, count, timeout)

    def subscribe_model(self, model_name: str) -> None:
        """See `SyncBackend.subscribe_model`."""
        check_name(model_name, "model name")
        if self._model not in (None, model_name):
            raise UsageError(
                f"subscribed to model {self._model!r} already, not to {model_name!r}: use another discovery"
            )
        self._model = model_name

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        """("model:sub_graph", its addresses); raises UsageError before `subscribe_model`."""
        if self._model is None:
            raise UsageError("no model is subscribed to: call subscribe_model first")
        name = str(SavedModel(self._model, sub_graph))
        return name, [replica.address for replica in self.replicas(name)]


class ReplicaRegistry:
    """The replicas of each service as last found, and who wants to hear of changes."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._found: dict[str, Replicas] = {}
        self._watches: dict[str, list[OnChange]] = {}

    def get(self, service: str) -> Replicas:
        """What was found last; none at first."""
        with self._changed:
            return self._found.get(service, ())

    def set(self, service: str, replicas: Iterable[Replica]) -> None:
        """Pins what was found, and calls back if that is new."""
        found = in_order(replicas)
        with self._changed:
            if found == self._found.get(service, ()):
                return
            self._found[service] = found
            self._changed.notify_all()
            for callback in list(self._watches.get(service, ())):
                call_back(callback, found, service)

    def watch(self, service: str, callback: OnChange) -> Watch:
        """Calls back at once and at every change."""
        with self._changed:
            # One object for each call: the same function may watch twice, and cancel one of them.
            entry: OnChange = lambda replicas: callback(replicas)  # noqa: E731
            self._watches.setdefault(service, []).append(entry)
            call_back(entry, self.get(service), service)

        def cancel() -> None:
            with self._changed:
                if entry in self._watches[service]:
                    self._watches[service].remove(entry)

        return Watch(cancel)

    def wait(self, service: str, count: int, timeout: float) -> Replicas:
        """Waits until a service has `count` replicas."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.get(service)) >= count, timeout):
                raise DiscoveryError(
                    f"{service}: {len(self.get(service))} of {count} replicas after {timeout:g} seconds"
                )
            return self.get(service)


def in_order(replicas: Iterable[Replica]) -> Replicas:
    """By replica id, then address; of two with one address the first."""
    first: dict[str, Replica] = {}
    for replica in sorted(replicas, key=lambda replica: (replica.replica_id, replica.address)):
        first.setdefault(replica.address, replica)
    return tuple(first.values())


def call_back(callback: Callable[..., object], value: object, about: str) -> None:
    """Calls a user's function; what it raises is logged, since no caller is there to hear of it."""
    try:
        callback(value)
    except Exception:
        log.exception("%s: a callback failed", about)


def replica_of(given: object, where: str) -> Replica:
    """A Replica from an address or a mapping of its fields; raises InputError, naming `where`."""
    if isinstance(given, Replica):
        return given
    if isinstance(given, str):
        given = {"address": given}
    if not isinstance(given, dict) or "address" not in given:
        raise InputError(f"{where}: {repr(given)[:100]} is neither an address nor a table with one")
    kinds = {"address": str, "replica_id": int, "idc": str, "cluster": str}
    for name, value in given.items():
        if name not in kinds:
            raise InputError(f"{where}: {name!r} is unknown; a replica has {', '.join(kinds)}")
        if isinstance(value, bool) or not isinstance(value, kinds[name]):
            raise InputError(f"{where}: {name} is {repr(value)[:100]}, not a {kinds[name].__name__}")
    try:
        return Replica(**given)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
