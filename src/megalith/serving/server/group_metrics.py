"""Metrics of several server processes: those of each, with the label `process`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from megalith.serving.server.server_metrics import prometheus


class MeasuredProcess(Protocol):
    """A process whose metrics are collected."""

    number: int
    restarts: int
    """How often it was started again."""
    up: bool

    def metrics(self) -> str | None:
        """Return its metrics in Prometheus's text format; None if it does not answer."""


class GroupMetrics:
    """The metrics of all processes."""

    def __init__(self, processes: Sequence[MeasuredProcess]) -> None:
        self._processes = processes

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        registry = prometheus().CollectorRegistry()
        registry.register(self)
        data: bytes = prometheus().generate_latest(registry)
        return data

    def describe(self) -> list[Any]:
        """Return no names, which are known only when the processes answer."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of all processes, and which of them answer."""
        core, parser = prometheus("prometheus_client.core"), prometheus("prometheus_client.parser")
        up = core.GaugeMetricFamily("megalith_process_up", "Whether a process serves.", labels=["process"])
        restarts = core.CounterMetricFamily(
            "megalith_process_restarts", "How often a process was started again.", labels=["process"]
        )
        families: dict[str, Any] = {}
        for process in self._processes:
            label = str(process.number)
            text = process.metrics()
            up.add_metric([label], float(text is not None))
            restarts.add_metric([label], float(process.restarts))
            for family in parser.text_string_to_metric_families(text or ""):
                known = families.setdefault(
                    family.name, core.Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, "process": label}))
        yield from (up, restarts, *families.values())
