"""Weights & Biases, MLflow and OpenTelemetry get the metrics of `megalith train`, without any network."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ["--data", "synthetic", "--log-every", "2", "--batch-size", "64", "--threads", "1"]


def train(directory: Path, *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "megalith", "train", "--run", str(directory / "run"), *options]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=directory, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: LevelDB's log format after a header of 7 bytes."""
    at, record, block = 7, b"", 32768
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_weights_and_biases_and_mlflow_continue_a_resumed_run(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    wandb: Any = pytest.importorskip("wandb")
    store = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    settings = store | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    train(tmp_path, *OPTIONS, "--tracker", "wandb,mlflow", "--max-steps", "4", **settings)
    train(tmp_path, "--resume", "--max-steps", "8", **settings)

    ids = json.loads((tmp_path / "run" / "trackers.json").read_text())
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow.MlflowClient(store["MLFLOW_TRACKING_URI"])
        assert [line.step for line in client.get_metric_history(ids["mlflow"], "loss")] == [2, 4, 6, 8]
        run = client.get_run(ids["mlflow"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["rows/user"] > 0
    assert run.data.params["train.log_every"] == "2"

    from wandb.proto import wandb_internal_pb2

    found: list[tuple[int, float]] = []
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{ids['wandb']}.wandb"] * 2, wandb.__version__
    for file in files:
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            if "loss" in items:
                found.append((record.history.step.num, json.loads(items["loss"].value_json)))
    assert [step for step, _ in found] == [2, 4, 6, 8]
    assert all(0 < loss < 2 for _, loss in found)


def test_opentelemetry_has_a_gauge_per_metric_with_the_table_as_an_attribute() -> None:
    metrics: Any = pytest.importorskip("opentelemetry.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from megalith.integrations.trackers import OpenTelemetryTracker

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    tracker = OpenTelemetryTracker()
    for step, rows in ((2, 5.0), (4, 7.0)):
        tracker.log({"loss": 0.5, "rows/user": rows, "rows/item": 1.0}, step)
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {
        (metric.name, point.attributes.get("name")): point.value
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert found == {
        ("megalith.train.step", None): 4,
        ("megalith.train.loss", None): 0.5,
        ("megalith.train.rows", "user"): 7.0,
        ("megalith.train.rows", "item"): 1.0,
    }
