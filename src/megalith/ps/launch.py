"""Servers: server processes that Ray starts, places and connects.

Ray is started on this machine if it is not running: bound to the loopback address, without its dashboard and
without usage statistics. With an address, an existing cluster is used.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from types import TracebackType
from typing import Any

from megalith.errors import InputError, MissingDependencyError, UsageError
from megalith.ops import checks
from megalith.ps.messages import Failure
from megalith.ps.table_server import TableServer

logger = logging.getLogger(__name__)

_LEAST_STORE = 80 << 20  # Ray refuses less
_CLOSE_SECONDS = 10.0
_REACH_SECONDS = 10.0
NAMESPACE = "megalith"  # The namespace of Ray in which servers are named actors
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Read by Ray at its import. 0: no cluster of several hosts, so Ray listens on the loopback address only."""

_NICENESS = "RAY_worker_niceness"
"""Read by the Ray that is started on this machine, for the processes of servers and training workers."""


def ray_module() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingDependencyError.of_extra("parameter servers need ray", "servers") from None
    return ray


def loopback_ray() -> Any:
    """Import Ray such that what it starts on this machine listens on the loopback address only."""
    os.environ.setdefault(_LOOPBACK, "0")
    # By default the processes of Ray's workers have niceness 15, so busy processes of the same session take
    # nearly all of the CPU: with four of them on two cores, a training worker was imported in 120 s, and with
    # niceness 0 in 16 s.
    os.environ.setdefault(_NICENESS, "0")
    return ray_module()


def start_ray(address: str | None = None, *, object_store_bytes: int | None = None) -> bool:
    if address is not None:
        return connect_ray(address)
    ray = loopback_ray()
    if ray.is_initialized():
        return False
    ray.init(
        address="local",  # otherwise Ray joins a cluster that another process has started on this machine
        num_cpus=os.cpu_count() or 1,
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        log_to_driver=False,
        logging_level="ERROR",
    )
    found = ray.util.get_node_ip_address()
    if not found.startswith("127."):
        ray.shutdown()
        raise UsageError(
            f"Ray would listen on {found} and not only on the loopback address, because it was imported "
            f"before Megalith started it: set {_LOOPBACK}=0 in the environment, or call ray.init yourself"
        )
    return True


def connect_ray(address: str | None = None) -> bool:
    """Connect this process to a Ray that runs, unless it is connected."""
    if address is not None and (not isinstance(address, str) or not address):
        raise InputError(f"address must be that of a Ray cluster, got {address!r}")
    loaded = sys.modules.get("ray")
    if loaded is not None and loaded.is_initialized():
        return False
    if address is not None:
        _check_reachable(address)  # before the import, which would decide where a Ray of this process listens
    ray = loopback_ray() if address is None else ray_module()
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, OSError, RuntimeError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise UsageError(f"no Ray runs {where}: {str(error).strip().splitlines()[0]}") from None
    return True


def named_servers() -> list[tuple[str, int, Any]]:
    """Return the actors of all servers of the cluster, with their group and number, in this order."""
    ray = ray_module()
    found = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE:
            group, _, server = entry["name"].rpartition("-")
            found.append((group, int(server), ray.get_actor(entry["name"], namespace=NAMESPACE)))
    return sorted(found, key=itemgetter(0, 1))


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at an address: Ray itself would try for minutes."""
    scheme, _, place = address.rpartition("://")
    if scheme not in ("", "ray") or place in ("auto", "local"):
        return  # Ray knows what they are
    host, _, port = place.partition("/")[0].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"the address of a Ray cluster is HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"no Ray runs at {address} ({error}): give the address that `ray start` has printed, or none to "
            "start Ray on this machine"
        ) from None


def stop_ray() -> None:
    ray_module().shutdown()


class Servers:
    """Server processes, for one or several `ServerShards`. Close it, or use it as a context manager.

    The object can be sent to other Ray processes, which then use the same servers.

    Args:
        num_servers: The number of processes.
        address: The address of a Ray cluster; None: the one this process is connected to, or a new one on
            this machine.
        gpus: GPUs of each server, for engine="cuda".
        restart: Whether Ray starts a server again that ended, for `ServerShards(recovery=...)`.
        object_store_bytes: Shared memory of a Ray that is started here, for arrays in transit; None: 30 % of
            the memory of the machine.
        ray_metrics: Whether servers report custom metrics to Ray, for its dashboard and Prometheus endpoint.
        timeout: Seconds that starting them may take.

    Attributes:
        actors: The actors of Ray; empty once closed.
        address: The address of the Ray cluster, for `megalith servers status`.

    Raises:
        InputError: An argument is wrong.
        UsageError: They did not start in time.
        MissingDependencyError: Ray is not installed.
    """

    def __init__(
        self,
        num_servers: int,
        *,
        address: str | None = None,
        gpus: float = 0,
        restart: bool = False,
        object_store_bytes: int | None = None,
        ray_metrics: bool = False,
        timeout: float = 120.0,
    ) -> None:
        count = checks.integer(num_servers, "Servers: num_servers")
        limit = checks.seconds(timeout, "Servers: timeout")
        if address is not None and not isinstance(address, str):
            raise InputError(f"Servers: address must be text, got {type(address).__name__}")
        self.gpus = checks.number(gpus, "Servers: gpus")
        if not self.gpus >= 0:
            raise InputError(f"Servers: gpus must be 0 or more, got {gpus!r}")
        self.restart = checks.flag(restart, "Servers: restart")
        self.ray_metrics = checks.flag(ray_metrics, "Servers: ray_metrics")
        if object_store_bytes is not None:
            checks.integer(object_store_bytes, "Servers: object_store_bytes", _LEAST_STORE)
        self._owns_ray = start_ray(address, object_store_bytes=object_store_bytes)
        ray = ray_module()
        self.address: str = ray.get_runtime_context().gcs_address
        remote = ray.remote(TableServer)
        # An asynchronous actor; it reserves no CPU, so that workers and servers fit on a small machine.
        options = {
            "num_cpus": 0,
            "num_gpus": self.gpus,
            "max_restarts": -1 if restart else 0,
            "max_concurrency": 1000,
        }
        group = uuid.uuid4().hex[:8]
        self.actors: list[Any] = []
        self._owner = True
        self._places, strategies = _spread(count, self.gpus)
        for i, place in enumerate(strategies):
            actor = remote.options(
                name=f"{group}-{i}", namespace=NAMESPACE, scheduling_strategy=place, **options
            )
            self.actors.append(actor.remote(i, count, ray_metrics))
        try:
            ray.get([actor.__ray_ready__.remote() for actor in self.actors], timeout=limit)
        except ray.exceptions.RayError as error:
            self.close()
            raise UsageError(f"{count} servers did not start within {limit:g} s: {error}") from None

    def __len__(self) -> int:
        return len(self.actors)

    def __repr__(self) -> str:
        return f"Servers({len(self.actors)})"

    def __getstate__(self) -> dict[str, Any]:
        own = {"_owner": False, "_owns_ray": False}
        options = {"restart": self.restart, "gpus": self.gpus, "ray_metrics": self.ray_metrics}
        return {"actors": self.actors, "address": self.address} | options | own

    def close(self) -> None:
        """End the processes, and Ray if it was started for them. A second call has no effect.

        Raises:
            OSError: The log of a server could not be written. The processes have ended all the same.
        """
        actors, self.actors = self.actors, []
        owner, self._owner = self._owner, False
        if not owner or not ray_module().is_initialized():
            return
        answers: list[Any] = []
        # A Ray that has ended, for instance by a signal to all processes, lets calls wait, and ends this
        # process after a minute.
        if not _within(_CLOSE_SECONDS, lambda: answers.extend(self._end(actors))):
            logger.warning("Ray does not answer, so servers may not have ended")
        if self._owns_ray:
            stop_ray()
        for answer in answers:
            if isinstance(answer, Failure):
                raise answer.error

    def _end(self, actors: list[Any]) -> list[Any]:
        """End the processes; return the answers of those that have closed their logs."""
        ray = ray_module()
        answers: list[Any] = []
        with suppress(ray.exceptions.RayError):  # writes what logs have buffered; some may have ended
            answers = ray.get([actor.close.remote() for actor in actors], timeout=_CLOSE_SECONDS / 2)
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(self._places)
        return answers

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _within(seconds: float, work: Callable[[], object]) -> bool:
    """Call a function in a thread that may be left behind; return whether it has ended in time."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="close servers", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def _spread(count: int, gpus: float) -> tuple[Any, list[Any]]:
    """Reserve places for servers, on different nodes if possible: Ray's placement group, and a
    scheduling strategy per server.
    """
    # Ray's strategies without a reservation ("SPREAD", the affinity to a node) put two servers on one of two
    # nodes in a third of all starts, because an actor that reserves nothing goes to a random node.
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    reserved = {"memory": 1, "GPU": gpus} if gpus else {"memory": 1}  # a byte: a place must reserve something
    places = ray_module().util.placement_group([reserved] * count, strategy="SPREAD")
    return places, [PlacementGroupSchedulingStrategy(places, i) for i in range(count)]


def pass_ray(ended: Servers, stay: Servers) -> None:
    """Let the second servers end Ray, if the first have started it."""
    stay._owns_ray, ended._owns_ray = ended._owns_ray or stay._owns_ray, False
