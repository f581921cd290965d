"""Triton's extensions: model configuration, statistics and repository index, over gRPC and REST."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from megalith.serving.proto.message_types import (
    ModelConfigRequest,
    ModelConfigResponse,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
)
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.served_model import VersionStatistics
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import DENSE, INPUTS, ServerClient, export_version
from tests.serving.server.test_rest import Rest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    out = tmp_path_factory.mktemp("exports")
    export_version(out, version=3)
    (out / "4").mkdir()  # a version that cannot be opened
    with ModelServer(out, ServerConfig(http_port=0, poll_seconds=3600, trial="never")) as started:
        yield started


@pytest.fixture
def rest(server: ModelServer) -> Iterator[Rest]:
    client = Rest(server)
    yield client
    client.connection.close()


def call(server: ModelServer, method: str, request: Any) -> bytes:
    with grpc.insecure_channel(server.address) as channel:
        answer: bytes = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(
            request.SerializeToString(), timeout=20
        )
        return answer


def test_the_configuration(server: ModelServer, rest: Rest) -> None:
    status, found, _ = rest("GET", "/v2/models/movies/config")
    assert status == 200
    assert (found["name"], found["platform"], found["max_batch_size"]) == ("movies", "megalith", 0)
    assert found["version_policy"] == {"specific": {"versions": [3]}}
    user = {"name": "user", "data_type": "TYPE_INT64", "dims": [-1, -1], "optional": True}
    dense = {"name": "dense", "data_type": "TYPE_FP32", "dims": [-1, 3], "optional": False}
    assert found["input"][0] == user
    assert found["input"][-1] == dense
    assert found["output"][0] == {"name": "logits", "data_type": "TYPE_FP32", "dims": [-1]}
    answer = ModelConfigResponse.FromString(
        call(server, "ModelConfig", ModelConfigRequest(name="movies", version="3"))
    )
    assert [each.name for each in answer.config.input] == [each["name"] for each in found["input"]]


def test_statistics(server: ModelServer, rest: Rest) -> None:
    with ServerClient(server.address) as ask:
        before = rest("GET", "/v2/models/movies/versions/3/stats")[1]["model_stats"][0]
        ask(INPUTS)
        with pytest.raises(Exception, match="unknown"):
            ask({"other": DENSE})
    for path in ("/v2/models/movies/stats", "/v2/models/movies/versions/3/stats", "/v2/models/stats"):
        (found,) = rest("GET", path)[1]["model_stats"]
    answer = ModelStatisticsResponse.FromString(
        call(server, "ModelStatistics", ModelStatisticsRequest(name="movies"))
    )
    assert [each.version for each in answer.model_stats] == ["3"]
    assert found["inference_count"] == before["inference_count"] + 2  # rows
    assert found["execution_count"] == before["execution_count"] + 1
    spent = found["inference_stats"]
    for name in ("success", "fail"):
        assert spent[name]["count"] == before["inference_stats"][name]["count"] + 1
        assert spent[name]["ns"] > 0
    assert spent["compute_infer"]["ns"] > 0
    assert found["last_inference"] > 1_700_000_000_000
    text = server.metrics.text().decode()
    assert (
        f'megalith_version_requests_total{{model="movies",version="3"}} {spent["success"]["count"]}.0' in text
    )
    assert f'megalith_version_failures_total{{model="movies",version="3"}} {spent["fail"]["count"]}.0' in text


def test_times_add_up() -> None:
    statistics = VersionStatistics()
    statistics.computed(2, 100)
    for _ in range(2):
        statistics.succeeded(5, started=1000, read=1010, ended=1150)
    sums = statistics.sums()
    assert (sums.successes, sums.rows, sums.batches) == (2, 10, 1)
    assert (sums.success_ns, sums.input_ns, sums.infer_ns, sums.queue_ns) == (300, 20, 200, 80)


def test_the_index(server: ModelServer, rest: Rest) -> None:
    status, found, _ = rest("POST", "/v2/repository/index")
    assert status == 200
    ready = {"name": "movies", "version": "3", "state": "READY", "reason": ""}
    assert found[0] == ready
    assert (found[1]["version"], found[1]["state"]) == ("4", "UNAVAILABLE")
    assert "signature.json" in found[1]["reason"]
    assert rest("POST", "/v2/repository/index", b'{"ready": true}')[1] == [ready]
    answer = RepositoryIndexResponse.FromString(
        call(server, "RepositoryIndex", RepositoryIndexRequest(ready=True))
    )
    assert [(each.name, each.version) for each in answer.models] == [("movies", "3")]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v2/models/other/config", None, 404),
        ("GET", "/v2/models/movies/versions/9/stats", None, 404),
        ("GET", "/v2/models/movies/versions/x/config", None, 400),
        ("POST", "/v2/repository/index", b"{", 400),
        ("POST", "/v2/repository/models/movies/load", b"{}", 404),
    ],
)
def test_what_is_refused(rest: Rest, method: str, path: str, body: bytes | None, status: int) -> None:
    assert rest(method, path, body)[0] == status
