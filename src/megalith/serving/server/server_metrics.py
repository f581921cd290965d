"""Metrics of the server in Prometheus's format, on a separate HTTP port.

Counts and latencies are recorded when requests end. Queues, hit rates, staleness and versions are read from
the models when the metrics are requested. Only known names of models and signatures become labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from megalith.library import import_extra
from megalith.serving.server.batching import WorkerThreads
from megalith.serving.server.http import HttpConnection, HttpServer
from megalith.serving.server.request_errors import HTTP_STATUS, Code, RequestError
from megalith.serving.server.security import Security
from megalith.serving.server.served_model import ServedModel

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of latencies, in seconds."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
ANSWER_SECONDS = 60.0
"""Seconds in which metrics must be collected."""
UNKNOWN = "unknown"
_SESSIONS = {
    "begun": "Training sessions that pushed to the model.",
    "refused": "Messages refused because a newer session had begun.",
    "replaced": "Training sessions that were pushing when another one began.",
}


def prometheus(module: str = "prometheus_client") -> Any:
    return import_extra(module, "metrics need prometheus-client", "serve")


class Metrics:
    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        client = prometheus()
        self.registry = client.CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Any:
            return client.Counter(f"megalith_{name}", text, ["model", *labels], registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float]) -> Any:
            return client.Histogram(
                f"megalith_{name}", text, ["model", *labels], buckets=buckets, registry=self.registry
            )

        self._latency = histogram(
            "request_seconds",
            "Time from the arrival of a request to its response.",
            "signature",
            "code",
            buckets=BUCKETS,
        )
        self._batches = histogram("batch_rows", "Rows computed at once.", buckets=ROWS)
        self._refused = counter("refused", "Requests that were refused.", "code")
        self._missing = counter("missing_features", "Requests without a feature of the model.", "feature")
        self._failed_loads = counter("failed_versions", "Versions that failed to load.")
        self._changed = counter("changed_versions", "Versions whose files changed after they were loaded.")
        self.registry.register(_Models(models))
        self._children: dict[tuple[Any, ...], Any] = {}

    def request(self, model: str, signature: str, code: str, seconds: float) -> None:
        self._child(self._latency, model, signature, code).observe(seconds)
        if code not in ("OK", "INTERNAL"):
            self._child(self._refused, model, code).inc()

    def batch(self, model: str, rows: int) -> None:
        self._child(self._batches, model).observe(rows)

    def missing_feature(self, model: str, feature: str) -> None:
        self._child(self._missing, model, feature).inc()

    def load_failed(self, model: str) -> None:
        self._failed_loads.labels(model).inc()

    def version_changed(self, model: str) -> None:
        self._changed.labels(model).inc()

    def text(self) -> bytes:
        data: bytes = prometheus().generate_latest(self.registry)
        return data

    def _child(self, metric: Any, *labels: str) -> Any:
        """Return a child of a metric; cached, because the library's own lookup is slower than counting."""
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child


class _Models:
    """Metrics that are read from the models on request."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        core = prometheus("prometheus_client.core")

        def gauge(name: str, text: str, *labels: str) -> Any:
            return core.GaugeMetricFamily(f"megalith_{name}", text, labels=["model", *labels])

        def counter(name: str, text: str) -> Any:
            return core.CounterMetricFamily(f"megalith_{name}", text, labels=["model", "version"])

        queue = gauge("queue_rows", "Rows that wait to be computed.")
        state = gauge("version_state", "State of a version: 20 loading, 30 available, 50 ended.", "version")
        overlay = gauge("overlay_rows", "Rows written since the export.")
        folded = gauge("folded_rows", "Those of them that were moved to mapped files.")
        stale = gauge("staleness_seconds", "Age of the newest pushed parameters.")
        looked_up = counter("ids_looked_up", "Ids looked up by requests.")
        missing = counter("ids_missing", "Ids of requests without a row.")
        answered = counter("version_requests", "Requests for scores that a version answered.")
        errors = counter("version_failures", "Requests for scores that failed in a version.")
        seconds = counter("version_seconds", "Time of the requests that a version answered.")
        failed = counter("fetch_failures", "Parts that failed to return the rows of a request.")
        zeros = counter("fetch_missing_rows", "Ids that read as zeros because a part failed.")
        sessions = {
            event: core.CounterMetricFamily(f"megalith_sessions_{event}", text, labels=["model"])
            for event, text in _SESSIONS.items()
        }
        for model in self._models():
            for number, status in model.statuses.items():
                state.add_metric([model.name, str(number)], float(status.state))
            versions = model.versions
            queue.add_metric([model.name], float(sum(v.queued_rows for v in versions.values())))
            for number, version in versions.items():
                labels, counters = [model.name, str(number)], version.servable.counters
                looked_up.add_metric(labels, float(counters.ids_looked_up))
                missing.add_metric(labels, float(counters.ids_missing))
                sums = version.statistics.sums()
                for family, value in (
                    (answered, sums.successes),
                    (errors, sums.failures),
                    (seconds, sums.success_ns / 1e9),
                ):
                    family.add_metric(labels, float(value))
                if version.fetcher is not None:
                    failed.add_metric(labels, float(version.fetcher.failed_shards))
                    zeros.add_metric(labels, float(version.fetcher.rows_missing_by_failure))
            newest = model.newest
            if newest is not None:
                overlay.add_metric([model.name], float(len(newest.servable.overlay)))
                folded.add_metric([model.name], float(newest.servable.overlay.folded_rows))
            if model.subscriber is not None:
                counts = model.subscriber.counters
                for event, number in zip(
                    _SESSIONS, (counts.sessions, counts.old_sessions, counts.replaced_sessions), strict=True
                ):
                    sessions[event].add_metric([model.name], float(number))
            age = None if model.subscriber is None else model.subscriber.staleness()
            if age is not None:
                stale.add_metric([model.name], float(age))
        yield from (queue, state, overlay, folded, stale, looked_up, missing, answered, errors, seconds)
        yield from (failed, zeros, *sessions.values())


class MetricsText(Protocol):
    """Metrics of one process or of several."""

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""


class MetricsServer(HttpServer):
    """An HTTP server of the metrics, for any path; it uses TLS if the other ports do."""

    def __init__(self, metrics: MetricsText, security: Security, host: str, port: int) -> None:
        self._metrics = metrics
        self._thread = WorkerThreads(1, "metrics")  # metrics of several processes wait for each of them
        super().__init__(self._answer, security, host, port)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        connection: HttpConnection = scope["state"]["connection"]
        if not connection.begin_answer():
            return
        status, kind = 200, prometheus().CONTENT_TYPE_LATEST
        try:
            if scope["method"] not in ("GET", "HEAD"):
                raise RequestError(Code.UNIMPLEMENTED, "use GET")
            body = await self._thread.run(self._metrics.text, ANSWER_SECONDS)
        except RequestError as error:
            status, kind, body = HTTP_STATUS[error.code], "text/plain", str(error).encode()
        finally:
            connection.end_answer()
        headers = {"content-type": kind, "connection": "close"}
        response = import_extra("starlette.responses", "metrics need starlette", "serve").Response
        await response(body, status, headers)(scope, receive, send)

    def stop(self, timeout: float) -> None:
        super().stop(timeout)
        self._thread.close()
