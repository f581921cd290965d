"""ServerOptions: the options of a `ServerShards`, checked, and what its servers need of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megalith.errors import InputError
from megalith.ops import checks
from megalith.routing import Router
from megalith.shards.contract import described
from megalith.shards.servers.log.recovery import Recovery
from megalith.shards.servers.server_messages import SpaceSpec
from megalith.shards.wire import check_wire
from megalith.table import TableConfig
from megalith.table.engines.registry import engine_class

MODES = ("async", "sync")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""Names of tables on servers are also names of folders."""


@dataclass
class ServerOptions:
    """See the module, and `ServerShards` for the meaning of each option."""

    name: str  # See `ServerShards`
    worker: int  # See `ServerShards`
    num_workers: int  # See `ServerShards`
    mode: str  # See `ServerShards`
    staleness: int | None  # See `ServerShards`
    window: int  # See `ServerShards`
    engine: str  # See `ServerShards`
    seed: int  # See `ServerShards`
    wire: str | dict[str, str]  # See `ServerShards`
    timeout: float  # See `ServerShards`
    recovery: Recovery | None  # See `ServerShards`
    observer: bool  # See `ServerShards`

    def __post_init__(self) -> None:
        self.mode = checks.one_of(self.mode, MODES, "ServerShards: mode")
        self.window = checks.integer(self.window, "ServerShards: window", 0)
        self.worker = checks.integer(self.worker, "ServerShards: worker", 0)
        self.num_workers = checks.integer(self.num_workers, "ServerShards: num_workers")
        self.name = checks.text(self.name, "ServerShards: name")
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"ServerShards: name must be letters, digits, '_', '-' and '.', got {self.name!r}"
            )
        self.timeout = checks.seconds(self.timeout, "ServerShards: timeout")
        if self.staleness is not None:
            self.staleness = checks.integer(self.staleness, "ServerShards: staleness", 0)
            if self.mode == "sync":
                raise InputError('ServerShards: staleness is for mode="async"')
        engine_class(self.engine)
        check_wire(self.wire)
        self.seed = checks.integer(self.seed, "ServerShards: seed", -(2**63))
        if self.recovery is not None:
            checks.instance(self.recovery, Recovery, "ServerShards: recovery")
        self.observer = checks.flag(self.observer, "ServerShards: observer")

    @property
    def wires(self) -> tuple[str, str]:
        """The precision of rows and of gradients."""
        return check_wire(self.wire)

    def spec(self, configs: Mapping[str, TableConfig], routers: Mapping[str, Router]) -> SpaceSpec:
        """Return what a server needs to make the tables."""
        tables, owners, sync = dict(configs), dict(routers), self.mode == "sync"
        modes = self.mode, self.staleness, self.num_workers if sync else None
        return SpaceSpec(
            list(tables.values()),
            self.engine,
            self.seed,
            self.wires,
            sync,
            self.staleness,
            self.num_workers,
            self.timeout,
            described(tables, owners, self.engine, self.seed, self.wires, *modes),
            self.recovery,
            owners,
        )
