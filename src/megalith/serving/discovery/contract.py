"""The discovery contract: which servers serve which part of which model.

A service is one part of a model, named `model:part`: "movies:entry" or "movies:ps_0". Its replicas are the
servers that answer requests for it. Servers register themselves; trainers and clients read the replicas or
watch them change. Every `Discovery` is also a `SyncBackend`, the part of the interface that parameter sync
needs. `ReplicaRegistry` does the watching and waiting for all implementations.

An address that comes from a file or from ZooKeeper becomes a gRPC target. gRPC gives targets such as
`unix:...` or `dns:...` a special meaning, so `check_address` accepts only `host:port`.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.ops import checks

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})"
_ADDRESS = re.compile(rf"(?P<host>{_HOST}|\[[0-9A-Fa-f:.]{{2,45}}\]):(?P<port>[0-9]{{1,5}})", re.ASCII)
_GRPC_SCHEMES = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough"})


def check_address(address: object, what: str = "address") -> str:
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found["port"]) <= 65535 or found["host"].lower() in _GRPC_SCHEMES:
        shown = repr(address)[:100]
        raise InputError(f"{what}: {shown} is not an address; write host:port or [ipv6]:port")
    return found[0]


def is_wildcard(address: str) -> bool:
    """Return whether an address means "all interfaces": a server can bind to it, a client cannot call it."""
    return address.startswith(("0.0.0.0", "[::]"))


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


logger = logging.getLogger(__name__)

SyncTargets = tuple[str, Collection[str]]
"""The name a server knows the model by, and the addresses of the servers."""


def check_name(name: object, what: str) -> str:
    """Check a name that becomes part of a path or of `a:b:c`."""
    if not isinstance(name, str) or not 1 <= len(name) <= 255:
        raise InputError(f"{what} must be a string of 1 to 255 characters, got {repr(name)[:100]}")
    if name in (".", "..") or any(char in "/:" or not char.isprintable() for char in name):
        raise InputError(f"{what} {name!r} must not contain '/', ':' or unprintable characters")
    return name


@dataclass(frozen=True, order=True)
class ServiceName:
    """The name of a service: one part of a model.

    Args:
        model: The name of the model.
        part: The part: "standalone", "entry", or "ps_0" and so on.

    Raises:
        InputError: A name is malformed.
    """

    model: str
    part: str

    def __post_init__(self) -> None:
        check_name(self.model, "model name")
        check_name(self.part, "part of a model")

    def __str__(self) -> str:
        return f"{self.model}:{self.part}"

    @classmethod
    def parse(cls, name: str) -> ServiceName:
        """Parse a service name.

        Args:
            name: A name such as "movies:entry".

        Returns:
            The name in its parts.

        Raises:
            InputError: The name is malformed.
        """
        model, colon, part = checks.text(name, "service").partition(":")
        if not colon:
            raise InputError(f"service {name!r} must be model:part, for example 'movies:entry'")
        return cls(model, part)


@dataclass(frozen=True)
class Replica:
    """A server of a service.

    Args:
        address: Its address, `host:port` or `[ipv6]:port`.
        replica_id: Its number among the replicas; -1 if it has none.
        idc: The data centre it runs in, if known.
        cluster: The cluster it runs in, if known.
    """

    address: str
    replica_id: int = -1
    idc: str | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        check_address(self.address)
        number = isinstance(self.replica_id, int) and not isinstance(self.replica_id, bool)
        if not number or not -1 <= self.replica_id < 2**63:
            raise InputError(f"replica_id must be -1 or more, got {self.replica_id}")
        if self.idc is not None:
            check_name(self.idc, "idc")
        if self.cluster is not None:
            check_name(self.cluster, "cluster")


Replicas = tuple[Replica, ...]
OnChange = Callable[[Replicas], None]


class Watch:
    """A subscription to changes. After `cancel` its callback is not called again.

    Args:
        cancel: Ends the subscription.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """End the watch; a second call does nothing."""
        self._cancel()


class SyncBackend(ABC):
    """Finds the targets of parameter sync."""

    @abstractmethod
    def subscribe_model(self, model_name: str) -> None:
        """Set the model in training.

        Args:
            model_name: The name of the model.

        Raises:
            UsageError: Another model was set before; the same name again is accepted.
        """

    @abstractmethod
    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        """Return the servers of a part of the model.

        Args:
            sub_graph: The part, for example "ps_0".

        Returns:
            The name of the part on its servers, and their addresses, possibly none.
        """

    def start(self, timeout: float = 15.0) -> None:  # noqa: B027, most have nothing to start
        """Make the backend ready.

        Args:
            timeout: Seconds to wait for it.

        Raises:
            DiscoveryError: It is not ready after `timeout` seconds.
        """

    @property
    def is_connected(self) -> bool:
        """Whether what it reads from can be reached; most have nothing to reach."""
        return True

    def stop(self) -> None:  # noqa: B027
        """Stop the backend without delay. A stopped backend cannot be started again."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Discovery(SyncBackend):
    """Finds the replicas of services. Safe to share between threads.

    Callbacks run one at a time, possibly in a thread of the discovery, and must return quickly. A subclass
    implements `register`, `unregister` and `replicas`, and stores the replicas it finds in `self._registry`.
    """

    def __init__(self) -> None:
        self._registry = ReplicaRegistry()
        self._model: str | None = None

    @abstractmethod
    def register(self, service: str, replica: Replica) -> None:
        """Announce a server of a service; a replica with the same address is replaced.

        Args:
            service: The service, "model:part".
            replica: The server.

        Raises:
            InputError: The name of the service is malformed.
            DiscoveryError: The replica cannot be announced.
        """

    @abstractmethod
    def unregister(self, service: str, address: str) -> None:
        """Withdraw a registered server; does nothing if it is not registered.

        Args:
            service: The service, "model:part".
            address: The address of the server.
        """

    @abstractmethod
    def replicas(self, service: str) -> Replicas:
        """Return the current servers of a service.

        Args:
            service: The service, "model:part".

        Returns:
            The replicas, sorted by replica id and address, each address once.
        """

    def watch(self, service: str, callback: OnChange) -> Watch:
        """Call back with the replicas of a service, immediately and after every change.

        Args:
            service: The service, "model:part".
            callback: Called with a tuple of `Replica`. An exception it raises is logged.

        Returns:
            The watch, to be cancelled.
        """
        checks.callback(callback, "watch: callback", required=True)
        self.replicas(service)
        return self._registry.watch(service, callback)

    def wait(self, service: str, count: int = 1, timeout: float = 30.0) -> Replicas:
        """Wait for the replicas of a service.

        Args:
            service: The service, "model:part".
            count: The number of replicas to wait for.
            timeout: Seconds to wait.

        Returns:
            The replicas, at least `count`.

        Raises:
            DiscoveryError: There are fewer replicas after `timeout` seconds.
        """
        checks.integer(count, "wait: count", least=0)
        checks.seconds(timeout, "wait: timeout", zero=True)
        self.replicas(service)
        return self._registry.wait(service, count, timeout)

    def subscribe_model(self, model_name: str) -> None:
        check_name(model_name, "model name")
        if self._model not in (None, model_name):
            raise UsageError(
                f"this discovery is subscribed to model {self._model!r} already, not to {model_name!r}: "
                "use another discovery"
            )
        self._model = model_name

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        if self._model is None:
            raise UsageError("no model is subscribed: call subscribe_model first")
        name = str(ServiceName(self._model, sub_graph))
        return name, [replica.address for replica in self.replicas(name)]


class PolledDiscovery(Discovery):
    """Base of discoveries that a thread reads again every `interval` seconds; errors have the label."""

    def __init__(self, label: str, interval: float) -> None:
        super().__init__()
        self._label = label
        self._interval = interval
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _poll(self) -> None:
        """Read the servers again."""

    def start(self, timeout: float = 15.0) -> None:
        # Nothing to wait for: the first read is that of the first `replicas`.
        if self._stopping.is_set():
            raise UsageError(f"{self._label}: a stopped discovery cannot be started again: create a new one")
        if self._thread is None:
            self._begin()
            self._thread = threading.Thread(target=self._run, name=f"watch {self._label}", daemon=True)
            self._thread.start()

    def _begin(self) -> None:
        """Do what must succeed before the thread starts."""

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._poll()

    def stop(self) -> None:
        self._stopping.set()


class ReplicaRegistry:
    """The replicas of each service as last found, and the watches on them."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._found: dict[str, Replicas] = {}
        self._watches: dict[str, list[OnChange]] = {}

    def get(self, service: str) -> Replicas:
        with self._changed:
            return self._found.get(service, ())

    def set(self, service: str, replicas: Iterable[Replica]) -> None:
        """Store the replicas found, and call the watches if they changed."""
        found = sort_replicas(replicas)
        with self._changed:
            if found == self._found.get(service, ()):
                return
            self._found[service] = found
            self._changed.notify_all()
            for callback in list(self._watches.get(service, ())):
                call_back(callback, found, service)

    def watch(self, service: str, callback: OnChange) -> Watch:
        """Call back immediately and after every change."""
        # A partial compares by identity: a function may watch twice and cancel one of the watches.
        entry = partial(callback)
        with self._changed:
            self._watches.setdefault(service, []).append(entry)
            call_back(entry, self.get(service), service)
        return Watch(partial(self._cancel, service, entry))

    def _cancel(self, service: str, entry: OnChange) -> None:
        with self._changed:
            if entry in self._watches[service]:
                self._watches[service].remove(entry)

    def wait(self, service: str, count: int, timeout: float) -> Replicas:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.get(service)) >= count, timeout):
                raise DiscoveryError(
                    f"{service}: {len(self.get(service))} of {count} replicas after {timeout:g} seconds"
                )
            return self.get(service)


def sort_replicas(replicas: Iterable[Replica]) -> Replicas:
    """Sort replicas and keep the first of each address."""
    first: dict[str, Replica] = {}
    for replica in sorted(replicas, key=lambda replica: (replica.replica_id, replica.address)):
        first.setdefault(replica.address, replica)
    return tuple(first.values())


def call_back(callback: Callable[..., object], value: object, about: str) -> None:
    """Call a user's function. An exception is logged, because there is no caller to raise it to."""
    try:
        callback(value)
    except Exception:
        logger.exception("%s: a callback failed", about)


def parse_replica(given: object, where: str) -> Replica:
    """Make a Replica from an address or from a mapping of its fields."""
    if isinstance(given, Replica):
        return given
    if isinstance(given, str):
        given = {"address": given}
    if not isinstance(given, dict) or "address" not in given:
        raise InputError(f"{where}: {repr(given)[:100]} is neither an address nor a table with an address")
    kinds = {"address": str, "replica_id": int, "idc": str, "cluster": str}
    for name, value in given.items():
        if name not in kinds:
            raise InputError(f"{where}: {name!r} is unknown; the fields of a replica are {', '.join(kinds)}")
        if isinstance(value, bool) or not isinstance(value, kinds[name]):
            raise InputError(f"{where}: {name} is {repr(value)[:100]}, not a {kinds[name].__name__}")
    try:
        return Replica(**given)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
