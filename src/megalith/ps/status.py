"""Numbers about running servers: for `megalith servers status`, for Prometheus, and for Ray's dashboard.

Servers are named actors of the namespace "megalith", so another process finds them and asks for their
numbers (`server_status`); `prometheus_text` writes them in Prometheus's text format. `RayMetrics` runs in a
server and reports them to Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from megalith.errors import UsageError
from megalith.ps.launch import connect_ray, named_servers, ray_module
from megalith.ps.table_space import LATENCY_BOUNDS

_STATUS_GAUGES = {
    "rows": "Rows by table.",
    "bytes": "Memory by table.",
    "waiting": "Calls that wait for other workers or earlier writes.",
    "requests_per_second": "Calls per second, over 10 seconds.",
    "staleness": "Steps by which the fastest worker is ahead of the slowest.",
    "step": "The highest step that was pushed; -1: none.",
    "last_checkpoint": "When the last complete checkpoint was saved, in seconds since 1970.",
}
_STATUS_COUNTERS = {"reads": "Lookups.", "writes": "Writes."}


def server_status(address: str | None = None, *, timeout: float = 30.0) -> list[dict[str, Any]]:
    connected = connect_ray(address)
    ray = ray_module()
    try:
        calls = [(group, server, actor.describe_all.remote()) for group, server, actor in named_servers()]
        numbers: list[dict[str, Any]] = []
        for group, server, call in calls:
            try:
                numbers += [{"group": group, **each} for each in ray.get(call, timeout=timeout)]
            except ray.exceptions.RayError as error:
                text = str(error).strip().partition("\n")[0] or type(error).__name__
                numbers.append({"group": group, "server": server, "error": text})
        return numbers
    finally:
        if connected:
            ray.shutdown()


def prometheus_text(numbers: Sequence[Mapping[str, Any]]) -> str:
    try:
        return "".join(
            f"{line}\n" for line in _prometheus_lines([each for each in numbers if "error" not in each])
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"prometheus_text takes what server_status returned: {error!r}") from None


def _prometheus_lines(numbers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kind, metrics in (("gauge", _STATUS_GAUGES), ("counter", _STATUS_COUNTERS)):
        for key, text in metrics.items():
            name = f"megalith_server_{key}" + ("_total" if kind == "counter" else "")
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} {kind}"
            for each in numbers:
                if isinstance(each[key], Mapping):
                    for table, value in each[key].items():
                        yield f"{name}{{{_labels(each, table=table)}}} {value}"
                elif each[key] is not None:
                    yield f"{name}{{{_labels(each)}}} {each[key]}"
    name = "megalith_server_lookup_seconds"
    yield f"# HELP {name} Time of lookups on the server."
    yield f"# TYPE {name} histogram"
    for each in numbers:
        histogram, total = each["lookup_seconds"], 0
        for bound, count in zip([*histogram["bounds"], "+Inf"], histogram["counts"], strict=True):
            total += count
            yield f"{name}_bucket{{{_labels(each, le=bound)}}} {total}"
        yield f"{name}_sum{{{_labels(each)}}} {histogram['sum']}"
        yield f"{name}_count{{{_labels(each)}}} {total}"


def _labels(each: Mapping[str, Any], **more: Any) -> str:
    labels = {"group": each.get("group", ""), "server": each["server"], "name": each["name"], **more}
    return ",".join(f'{key}="{_escaped(str(value))}"' for key, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def quantile(histogram: dict[str, Any], part: float) -> float | None:
    """Return a bound below which a part of the lookups ended."""
    total, seen = sum(histogram["counts"]), 0
    for bound, count in zip([*histogram["bounds"], float("inf")], histogram["counts"], strict=True):
        seen += count
        if total and seen >= part * total:
            return float(bound)
    return None


_RAY_GAUGES = {
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
            boundaries=list(LATENCY_BOUNDS),
            tag_keys=("server", "name"),
        )
        self._gauges = {
            key: metrics.Gauge(f"megalith_{key}", text, tag_keys=("server", "name", "table"))
            for key, text in _RAY_GAUGES.items()
        }

    def add_lookup(self, name: str, seconds: float) -> None:
        self._latency.observe(seconds, tags=self._tags | {"name": name})

    def set(self, numbers: Mapping[str, Any]) -> None:
        tags = self._tags | {"name": numbers["name"]}
        for key, gauge in self._gauges.items():
            values = numbers[key] if isinstance(numbers[key], Mapping) else {"": numbers[key]}
            for table, value in values.items():
                gauge.set(value, tags=tags | {"table": table})
