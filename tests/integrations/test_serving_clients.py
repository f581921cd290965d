"""Clients that are not ours get the scores of the model, bit for bit.

They run in `build/clients`, which `make test-integrations` creates: TensorFlow Serving's API and Triton's
client need other versions of protobuf than the server.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.serving.export.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.versions import write_labels
from tests.serving.exports import NAMES, export_version, logits, rows

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
SCRIPT = Path(__file__).with_name("serving_clients.py")
FEATURES, DENSE = rows(5)
INPUTS = {**{name: ids.tolist() for name, ids in FEATURES.items()}, "dense": DENSE.tolist()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModelServer, list[float]]]:
    """A server, and the logits of the version that it serves."""
    out = tmp_path_factory.mktemp("exports")
    model = export_version(out, version=3)
    write_labels(out, {"stable": 3})
    expected = Servable(out / "3").predict(FEATURES, DENSE)["logits"]
    torch.testing.assert_close(expected, logits(model, FEATURES, DENSE))
    with ModelServer(out, ServerConfig(http_port=0, accept_compressed=True)) as server:
        yield server, expected.tolist()


def run(kind: str, server: ModelServer) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.fail("the clients are not installed: `make test-integrations` installs them")
    command = [str(PYTHON), str(SCRIPT), kind, server.address, str(server.http_address)]
    ended = subprocess.run(command, input=json.dumps(INPUTS), capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_tensorflow_serving_api(served: tuple[ModelServer, list[float]]) -> None:
    server, expected = served
    found = run("tensorflow_serving", server)
    assert found == {"logits": expected, "version": 3, "inputs": sorted([*NAMES, "dense"]), "state": 30}


@pytest.mark.parametrize("kind", ["triton_grpc", "triton_http"])
def test_tritonclient(served: tuple[ModelServer, list[float]], kind: str) -> None:
    server, expected = served
    found = run(kind, server)
    assert found.pop("count") >= 5
    assert found == {
        "logits": expected,
        "inputs": sorted([*NAMES, "dense"]),
        "index": [["movies", "3", "READY"]],
    }


def test_a_client_that_asks_for_the_messages(served: tuple[ModelServer, list[float]]) -> None:
    server, expected = served
    found = run("reflection", server)
    assert found["logits"] == expected
    assert "tensorflow.serving.PredictionService" in found["services"]


@pytest.mark.parametrize("path", ["/v1/models/movies:predict", "/v1/models/movies/labels/stable:predict"])
def test_curl(served: tuple[ModelServer, list[float]], path: str) -> None:
    server, expected = served
    curl = shutil.which("curl")
    assert curl is not None, "this test needs curl"
    url = f"http://{server.http_address}{path}"
    command = [curl, "--silent", "--fail", "--compressed", url, "--data", "@-"]
    body = json.dumps({"inputs": INPUTS})
    ended = subprocess.run(command, input=body, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["outputs"]["logits"] == expected
