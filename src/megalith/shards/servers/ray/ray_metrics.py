"""RayMetrics: numbers of a server as custom metrics of Ray, for its dashboard and Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megalith.shards.servers.ray.ray_servers import ray_module
from megalith.shards.servers.server.call_counts import BOUNDS

_GAUGES = {
    "rows": "Rows by table.",
    "bytes": "Memory by table.",
    "waiting": "Calls that wait.",
    "requests_per_second": "Calls per second.",
    "staleness": "Steps between the fastest and the slowest worker.",
}


class RayMetrics:
    """The metrics of one server, named ray_megalith_..."""

    def __init__(self, server: int) -> None:
        ray_module()  # raises if it is not installed
        metrics = import_module("ray.util.metrics")
        self._tags = {"server": str(server)}
        self._latency = metrics.Histogram(
            "megalith_lookup_seconds",
            "Time of lookups on the server.",
            boundaries=list(BOUNDS),
            tag_keys=("server", "name"),
        )
        self._gauges = {
            key: metrics.Gauge(f"megalith_{key}", text, tag_keys=("server", "name", "table"))
            for key, text in _GAUGES.items()
        }

    def add_lookup(self, name: str, seconds: float) -> None:
        """Count the time of a lookup."""
        self._latency.observe(seconds, tags=self._tags | {"name": name})

    def set(self, numbers: Mapping[str, Any]) -> None:
        """Set the gauges."""
        tags = self._tags | {"name": numbers["name"]}
        for key, gauge in self._gauges.items():
            values = numbers[key] if isinstance(numbers[key], Mapping) else {"": numbers[key]}
            for table, value in values.items():
                gauge.set(value, tags=tags | {"table": table})
