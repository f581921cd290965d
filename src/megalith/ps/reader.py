"""ServerReader: reads rows of running servers from any process, without joining their workers.

A serving process reads the rows of a model in training with it, for instance as the `fetch` of an entry. It
finds the servers by the name of their tables; they answer as they are, so a read may see part of an update.
"""

from __future__ import annotations

import time as clock
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.errors import MegalithError, RankTimeoutError, ServerLostError, UsageError
from megalith.ops import checks
from megalith.ps.channel_client import ChannelLostError, ChannelReply, ServerChannel, open_channel
from megalith.ps.launch import connect_ray, named_servers, ray_module
from megalith.ps.lookup import read_parts
from megalith.ps.messages import READER, Failure, SpaceSpec, array_of
from megalith.ps.shared_memory import SegmentPool
from megalith.shards.preparer import RoutingPreparer
from megalith.shards.row_encoding import make_wire

_PAUSE = 0.1


class ServerReader:
    def __init__(self, name: str, *, address: str | None = None, timeout: float = 30.0) -> None:
        self._name = checks.text(name, "ServerReader: name")
        self._timeout = checks.seconds(timeout, "ServerReader: timeout")
        self._pool = SegmentPool()
        self._channels: dict[int, ServerChannel] = {}
        self._connected = connect_ray(address)
        groups: dict[str, list[Any]] = {}
        for group, _, actor in named_servers():
            groups.setdefault(group, []).append(actor)
        for self._actors in groups.values():
            spec: SpaceSpec | None = self._result(self._actors[0].spec_of.remote(self._name))
            if spec is not None:
                break
        else:
            self.close()
            raise UsageError(f"ServerReader: no server has tables named {name!r}")
        self.configs = {config.name: config for config in spec.configs}
        self._prepare = RoutingPreparer(self.configs, spec.routers)
        self._wire = make_wire(spec.wire[0])
        self._dims = [config.dim for config in spec.configs]

    def lookup(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read rows as they are now. An id without a row reads as `TableConfig.missing` says."""
        # ids: int64 or int32 [n] per table; returns: float32 [n, dim] per table.
        routed = self._prepare(ids)
        received, parts = read_parts(routed, self._wire, self._dims, self._pool)
        calls = {server: self._read(server, *part) for server, part in enumerate(parts) if part[0].numel()}
        found_at = [self._wait(server, call, *parts[server]) for server, call in calls.items()]
        if any(out is not parts[server][2] for server, out in zip(calls, found_at, strict=True)):
            received = torch.cat(found_at)
        flat = self._wire.decode(received, routed.deduped.counts, self._dims)
        found = {}
        for name in routed.ids:
            columns = torch.arange(self.configs[name].dim, device="cpu")
            found[name] = flat[routed.offsets(name)[:, None] + columns]
        return found

    def _read(self, server: int, ids: Tensor, counts: list[int], out: Tensor) -> ChannelReply:
        channel = self._channels.get(server)
        if channel is None or channel.lost:
            node = ray_module().get_runtime_context().get_node_id()
            ask = self._actors[server].channel
            channel = self._channels[server] = open_channel(
                lambda node: self._result(ask.remote(node)), node, self._pool, self._timeout
            )
        text = {"name": self._name, "worker": READER, "session": "", "after": 0}
        return channel.read(text | {"counts": counts, "step": None}, array_of(ids), out)

    def _wait(self, server: int, call: ChannelReply, ids: Tensor, counts: list[int], out: Tensor) -> Tensor:
        """Wait for rows, and return where they are."""
        deadline = clock.monotonic() + self._timeout
        while True:
            left = max(0.0, deadline - clock.monotonic())
            if not call.channel.wait(call, left):
                raise RankTimeoutError(f"a server did not answer within {self._timeout:g} s")
            if not call.lost:
                break
            if not left:
                raise ServerLostError(f"a server has ended, or cannot be reached for {self._timeout:g} s")
            try:  # through another connection, if the server runs
                out = self._pool.new(out.numel())  # the server may still write to the first
                call = self._read(server, ids, counts, out)
            except ChannelLostError:
                clock.sleep(_PAUSE)
        if call.result is not None:
            raise call.result.error
        return out

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
        """Close the connections, and disconnect from Ray if this object has connected this process."""
        for channel in self._channels.values():
            channel.close()
        if self._connected:
            self._connected = False
            ray_module().shutdown()
