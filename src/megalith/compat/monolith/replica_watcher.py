"""ReplicaWatcher: the replicas of each task of a service, read from ZooKeeper.

    node                                                                      | value
    --------------------------------------------------------------------------+------------
    /{bzid}/service/{model}[/{idc}:{cluster}]/{server_type}:{task}/{replica}  | ReplicaMeta

Monolith's agents write these nodes. A replica is returned only if it is AVAILABLE and has an address that can
be called. Malformed nodes are skipped and logged.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from megalith.compat.monolith.znode_records import AddressFamily, ReplicaMeta, ServerType, TargetExtraInfo
from megalith.errors import InputError
from megalith.serving.discovery.contract import SyncBackend, SyncTargets, check_name
from megalith.serving.discovery.zk_session import NodeReader
from megalith.serving.discovery.zookeeper import ZooKeeperDiscovery

logger = logging.getLogger(__name__)

_TASK = re.compile(r"(?P<server_type>[a-z]+):(?P<task>[0-9]{1,9})")
_REPLICA = re.compile(r"-?[0-9]{1,18}")
_PLACE = re.compile(r"(?P<idc>[^:]+):(?P<cluster>[^:]+)")
_SUB_GRAPH = re.compile(r"ps_(?P<task>[0-9]{1,9})")


@dataclass(frozen=True)
class _TaskReplica:
    """An AVAILABLE replica of a task such as "ps:1"."""

    server_type: str
    task: int
    replica_id: int
    address: str
    idc: str | None
    cluster: str | None


class ReplicaWatcher:
    """The replicas of a service, kept up to date until `stop`.

    The getters need no connection: while ZooKeeper is unavailable they return the replicas found last.

    Args:
        zk: A started backend, whose connection is used.
        base_name: The name of the service, below /{bzid}/service.
        dc_aware: Whether there is a level idc:cluster between the service and its tasks.
        use_archon: Return archon addresses.
        address_family: The preferred family of addresses.
    """

    def __init__(
        self,
        zk: ZooKeeperDiscovery,
        base_name: str,
        *,
        dc_aware: bool = False,
        use_archon: bool = False,
        address_family: AddressFamily = "ipv4",
    ) -> None:
        self._dc_aware = dc_aware
        self._use_archon = use_archon
        self._family: AddressFamily = address_family
        if not isinstance(zk, ZooKeeperDiscovery):
            raise InputError(f"ReplicaWatcher: zk must be a ZKBackend, got {type(zk).__name__}")
        self._prefix = f"/{zk.root}/service/{check_name(base_name, 'base name')}"
        self._found: tuple[_TaskReplica, ...] = ()
        self._is_stopped = False
        self._session = zk.session
        self._view = self._session.view(self._prefix, self._read, self._changed)
        self._session.wait(self._view)

    def stop(self) -> None:
        """Stop watching without delay; afterwards there are no replicas."""
        self._is_stopped = True
        self._session.drop(self._view)
        self._found = ()

    def get_replicas(
        self, server_type: ServerType, task: int, idc: str | None = None, cluster: str | None = None
    ) -> list[str]:
        """Return the addresses of the replicas of a task, sorted by replica id.

        Args:
            server_type: One of "ps", "entry" and "dense".
            task: The number of the task.
            idc: Only replicas in this data centre.
            cluster: Only replicas in this cluster.

        Returns:
            The addresses.
        """
        return list(self.get_replicas_with_extra_info(server_type, task, idc, cluster))

    def get_replica(
        self,
        server_type: ServerType,
        task: int,
        replica: int,
        idc: str | None = None,
        cluster: str | None = None,
    ) -> list[str]:
        """Return the addresses of one replica.

        Args:
            server_type: One of "ps", "entry" and "dense".
            task: The number of the task.
            replica: The number of the replica.
            idc: Only replicas in this data centre.
            cluster: Only replicas in this cluster.

        Returns:
            The addresses, at most one for each data centre and cluster.
        """
        found = self.get_replicas_with_extra_info(server_type, task, idc, cluster)
        return [address for address, info in found.items() if info.replica_id == replica]

    def get_all_replicas(
        self, server_type: ServerType, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, list[str]]:
        """Return the addresses of all tasks of a type.

        Args:
            server_type: One of "ps", "entry" and "dense".
            idc: Only replicas in this data centre.
            cluster: Only replicas in this cluster.

        Returns:
            The addresses by "ps:1", or by "idc:cluster/ps:1" if dc_aware.
        """
        result: dict[str, list[str]] = {}
        for each in self._matching(server_type, None, idc, cluster):
            place = f"{each.idc}:{each.cluster}/" if self._dc_aware else ""
            result.setdefault(f"{place}{each.server_type}:{each.task}", []).append(each.address)
        return result

    def get_replicas_with_extra_info(
        self, server_type: ServerType, task: int, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, TargetExtraInfo]:
        """Return the addresses of the replicas of a task, and where each of them runs.

        Args:
            server_type: One of "ps", "entry" and "dense".
            task: The number of the task.
            idc: Only replicas in this data centre.
            cluster: Only replicas in this cluster.

        Returns:
            The places by address, sorted by replica id.
        """
        found = self._matching(server_type, task, idc, cluster)
        return {each.address: TargetExtraInfo(each.idc, each.cluster, each.replica_id) for each in found}

    def to_sync_wrapper(self) -> SyncBackend:
        """Return the backend for parameter sync: the sub graph "ps_1" is task 1 of type ps."""
        return _SyncWrapper(self)

    def _matching(
        self, server_type: str, task: int | None, idc: str | None, cluster: str | None
    ) -> list[_TaskReplica]:
        return [
            each
            for each in self._found
            if each.server_type == server_type
            and task in (None, each.task)
            and idc in (None, each.idc)
            and cluster in (None, each.cluster)
        ]

    def _changed(self, found: tuple[_TaskReplica, ...]) -> None:
        if not self._is_stopped:
            self._found = found

    def _read(self, reader: NodeReader) -> tuple[_TaskReplica, ...]:
        places: dict[str, tuple[str | None, str | None]] = {self._prefix: (None, None)}
        if self._dc_aware:
            matches = map(_PLACE.fullmatch, reader.children(self._prefix))
            places = {
                f"{self._prefix}/{match[0]}": (match["idc"], match["cluster"]) for match in matches if match
            }
        found: list[_TaskReplica] = []
        for path, place in places.items():
            for name in reader.children(path):
                task = _TASK.fullmatch(name)
                if task is None:
                    logger.warning("%s/%s is not a task, which is named type:number", path, name)
                    continue
                owner = task["server_type"], int(task["task"])
                replicas = self._read_task(reader, f"{path}/{name}")
                found += [_TaskReplica(*owner, number, address, *place) for number, address in replicas]
        found.sort(key=lambda each: (each.server_type, each.task, each.replica_id, each.address))
        return tuple(found)

    def _read_task(self, reader: NodeReader, path: str) -> list[tuple[int, str]]:
        names = [name for name in reader.children(path) if _REPLICA.fullmatch(name)]
        usable: list[tuple[int, str]] = []
        for place, data in reader.data([f"{path}/{name}" for name in names]).items():
            try:
                meta = ReplicaMeta.from_json(data, where=place)
            except InputError as error:
                logger.warning("%s", error)
                continue
            address = meta.get_address(self._use_archon, self._family)
            if meta.is_available and address is not None:
                usable.append((int(place.rpartition("/")[2]), address))
        return usable


class _SyncWrapper(SyncBackend):
    """A ReplicaWatcher as the backend of parameter sync."""

    def __init__(self, watcher: ReplicaWatcher) -> None:
        self._watcher = watcher

    def subscribe_model(self, model_name: str) -> None: ...

    def get_sync_targets(self, sub_graph: str) -> SyncTargets:
        part = _SUB_GRAPH.fullmatch(sub_graph)
        if part is None:
            raise InputError(f"sub graph {sub_graph!r} must be ps_0, ps_1 and so on")
        return sub_graph, self._watcher.get_replicas_with_extra_info("ps", int(part["task"]))

    def stop(self) -> None:
        self._watcher.stop()
