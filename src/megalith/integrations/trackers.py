"""Weights & Biases, MLflow, OpenTelemetry and Prometheus as trackers of a run.

Each reads its own settings from the environment, as its documentation describes. Weights & Biases and MLflow
give a run an id, which the directory of the run keeps, so that a resumed run continues there.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megalith.errors import InputError, MegalithError, UsageError
from megalith.ops import checks
from megalith.training.trackers import TRACKER_RUNS, Tracker

__all__ = ["MLflowTracker", "OpenTelemetryTracker", "PrometheusTracker", "WandbTracker"]

PROJECT = "megalith"
"""Project of Weights & Biases and experiment of MLflow, if the environment names none."""


class WandbTracker(Tracker):
    """Weights & Biases: `WANDB_PROJECT`, `WANDB_MODE=offline` and so on.

    Args:
        directory: Directory of the run; its name is the name of the run.
        config: Config of the run, as nested dicts.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None) -> None:
        folder = checks.path(directory, "directory")
        wandb = _package("wandb", "wandb")
        settings = wandb.Settings()
        self._run = wandb.init(
            project=settings.project or PROJECT,
            name=settings.run_name or folder.name,
            dir=str(folder),
            config=_config(config),
            id=_run_id(folder, "wandb", lambda: uuid.uuid4().hex[:12]),
            resume="allow",
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowTracker(Tracker):
    """MLflow: `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`.

    Args:
        directory: Directory of the run; its name is the name of the run.
        config: Config of the run, as nested dicts; its values become params.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None) -> None:
        folder, params = checks.path(directory, "directory"), _config(config)
        self._mlflow = _package("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

        def create() -> str:
            experiment = self._client.get_experiment_by_name(name)
            number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            made = str(self._client.create_run(number, run_name=folder.name).info.run_id)
            for key, value in _flat(params):
                self._client.log_param(made, key, value)
            return made

        self._id = _run_id(folder, "mlflow", create)
        self._client.update_run(self._id, status="RUNNING")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        entities = self._mlflow.entities
        lines = [entities.Metric(name, value, now, step) for name, value in metrics.items()]
        for start in range(0, len(lines), 1000):  # the most that its servers accept at once
            self._client.log_batch(self._id, lines[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class OpenTelemetryTracker(Tracker):
    """OpenTelemetry: gauges of the meter "megalith", of the provider that the process has set.

    `opentelemetry-instrument megalith train ...` sets one from the environment. The metric `rows/user` is the
    gauge `megalith.train.rows` with the attribute `name="user"`.
    """

    def __init__(self) -> None:
        self._meter = _package("opentelemetry.metrics", "opentelemetry-sdk").get_meter("megalith")
        self._gauges: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in {"step": step, **metrics}.items():
            kind, _, rest = name.partition("/")
            if kind not in self._gauges:
                self._gauges[kind] = self._meter.create_gauge(f"megalith.train.{kind}")
            self._gauges[kind].set(value, {"name": rest} if rest else {})


class PrometheusTracker(Tracker):
    """Prometheus: an HTTP endpoint `/metrics` of this process.

    The metric `rows/user` is the gauge `megalith_train_rows{name="user"}`.

    Args:
        address: HOST:PORT to listen at. Port 0: any free port.

    Attributes:
        port: The port in use.
    """

    def __init__(self, address: str = "127.0.0.1:9464") -> None:
        found = re.fullmatch(r"(.+):([0-9]{1,5})", checks.text(address, "address"))
        if found is None or int(found[2]) > 65535:
            raise InputError(f"PrometheusTracker: address must be HOST:PORT, got {address!r}")
        self._client = _package("prometheus_client", "prometheus-client")
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(
                int(found[2]), found[1], registry=self._registry
            )
        except OSError as error:
            raise UsageError(
                f"PrometheusTracker: cannot listen at {address}: {error}: choose another port"
            ) from error
        self.port: int = self._server.server_port

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in {"step": step, **metrics}.items():
            kind, _, rest = name.partition("/")
            if kind not in self._gauges:
                text, labels = f"{kind} of the training run", ["name"] if rest else []
                self._gauges[kind] = self._client.Gauge(
                    f"megalith_train_{kind}", text, labels, registry=self._registry
                )
            gauge = self._gauges[kind]
            (gauge.labels(rest) if rest else gauge).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


def open_tracker(name: str, option: str, directory: Path, config: Mapping[str, Any]) -> Tracker:
    """Open a tracker that train.tracker names; `option` is the text after the colon."""
    if option and name != "prometheus":
        raise InputError(
            f"config: train.tracker: {name} takes its settings from the environment, not {option!r}"
        )
    opens: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WandbTracker(directory, config),
        "mlflow": lambda: MLflowTracker(directory, config),
        "opentelemetry": OpenTelemetryTracker,
        "prometheus": lambda: PrometheusTracker(*filter(None, [option])),
    }
    try:
        return opens[name]()
    except MegalithError:
        raise
    except Exception as error:  # of the service, such as a login that is missing
        raise UsageError(f"config: train.tracker: {name} does not start: {error}") from error


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise UsageError(f"this tracker needs the package {package}: pip install {package}") from None


def _run_id(directory: Path, service: str, create: Callable[[], str]) -> str:
    """Return the id of a run in a service; create it if the directory of the run has none."""
    file = directory / TRACKER_RUNS
    known = json.loads(file.read_text()) if file.exists() else {}
    if service not in known:
        known[service] = create()
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known))
    return str(known[service])


def _config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if config is None else dict(checks.mapping(config, "config", "{'lr': 0.1}"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
