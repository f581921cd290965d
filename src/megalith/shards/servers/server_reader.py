"""ServerReader: reads rows of running servers from any process, without joining their workers.

A serving process reads the rows of a model in training with it, for instance as the `fetch` of an entry. It
finds the servers by the name of their tables; they answer as they are, so a read may see part of an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.errors import MegalithError, RankTimeoutError, ServerLostError, UsageError
from megalith.ops import checks
from megalith.shards.preparer import RoutingPreparer
from megalith.shards.servers.ray_servers import NAMESPACE, connect_ray, ray_module
from megalith.shards.servers.server_messages import READER, Failure, SpaceSpec, array_of, tensor_of
from megalith.shards.wire import make_wire


class ServerReader:
    """See the module.

    Args:
        name: The name of the tables, as given to `ServerShards`.
        address: The address of the Ray cluster (`Servers.address`); None: the one this process is connected
            to, or the one that runs on this machine.
        timeout: Seconds to wait for servers.

    Attributes:
        configs: The configuration of each table, by name.

    Raises:
        UsageError: No Ray runs there, or no server has these tables.
    """

    def __init__(self, name: str, *, address: str | None = None, timeout: float = 30.0) -> None:
        self._name = checks.text(name, "ServerReader: name")
        self._timeout = checks.seconds(timeout, "ServerReader: timeout")
        self._connected = connect_ray(address)
        ray = ray_module()
        named = [
            entry["name"].rpartition("-")
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE
        ]
        groups: dict[str, dict[int, Any]] = {}
        for group, _, server in named:
            actor = ray.get_actor(f"{group}-{server}", namespace=NAMESPACE)
            groups.setdefault(group, {})[int(server)] = actor
        for actors in groups.values():
            spec = self._result(actors[min(actors)].spec_of.remote(self._name))
            if spec is not None:
                self._use(spec, [actors[server] for server in sorted(actors)])
                return
        self.close()
        raise UsageError(f"ServerReader: no server has tables named {name!r}")

    def _use(self, spec: SpaceSpec, actors: list[Any]) -> None:
        self.configs = {config.name: config for config in spec.configs}
        self._actors = actors
        self._prepare = RoutingPreparer(self.configs, spec.routers)
        self._wire = make_wire(spec.wire[0])
        self._dims = [config.dim for config in spec.configs]

    def lookup(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read rows as they are now. An id without a row reads as `TableConfig.missing` says.

        Args:
            ids: int64 or int32 [n] per table.

        Returns:
            float32 [n, dim] per table.

        Raises:
            UnknownNameError: There is no such table.
            ServerLostError: A server has ended.
            RankTimeoutError: A server did not answer in time.
        """
        routed = self._prepare(ids)
        deduped = routed.deduped
        pieces = deduped.ids.split_with_sizes(deduped.counts.sum(1).tolist())
        calls = []
        for server, own in enumerate(pieces):
            if own.numel():
                counts = deduped.counts[server : server + 1]
                read = self._actors[server].read
                call = read.remote(self._name, READER, "", 0, array_of(own), counts[0].tolist(), None)
                calls.append((counts, call))
        parts = [
            self._wire.decode(tensor_of(self._result(call)), counts, self._dims) for counts, call in calls
        ]
        flat = torch.cat([torch.empty(0), *parts])
        found = {}
        for name in routed.ids:
            columns = torch.arange(self.configs[name].dim)
            found[name] = flat[routed.offsets(name)[:, None] + columns]
        return found

    def _result(self, call: Any) -> Any:
        ray = ray_module()
        try:
            result = ray.get(call, timeout=self._timeout)
        except ray.exceptions.GetTimeoutError:
            raise RankTimeoutError(f"a server did not answer within {self._timeout:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise ServerLostError(f"a server has ended: {str(error).strip().partition(chr(10))[0]}") from None
        if isinstance(result, Failure):
            assert isinstance(result.error, MegalithError | OSError)
            raise result.error
        return result

    def close(self) -> None:
        """Disconnect from Ray, if this object has connected this process."""
        if self._connected:
            self._connected = False
            ray_module().shutdown()
