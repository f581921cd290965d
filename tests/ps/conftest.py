"""Two real servers for all tests of a file. Ray starts once per file, because a start takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megalith import Servers, ServerShards, TableConfig
from megalith.ps.launch import ray_module, stop_ray
from tests.ps.support import NAMES, Make


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    try:
        options: dict[str, Any] = {"restart": True, "ray_metrics": True, "timeout": 200.0}
        with Servers(2, object_store_bytes=128 << 20, **options) as started:
            yield started
    finally:
        stop_ray()


@pytest.fixture
def make(servers: Servers) -> Iterator[Make]:
    """Creates ServerShards on the servers of this file, under a new name by default."""
    made: list[ServerShards] = []

    def create(*tables: TableConfig, **options: Any) -> ServerShards:
        options = {"name": next(NAMES), "timeout": 60.0, **options}
        made.append(ServerShards(tables, servers=servers, **options))
        return made[-1]

    yield create
    for each in made:
        ray_module().get([actor.close.remote(each.name) for actor in servers.actors], timeout=60)
