"""The access log: a line for each call, with the ids of its trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from megalith.errors import InputError
from megalith.serving.server.access_log import AccessLog, trace_of
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import export_version, request_of, rows
from tests.serving.server.test_rest import Rest

FEATURES, DENSE = rows(2)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
PREDICT = "/tensorflow.serving.PredictionService/Predict"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModelServer, Path]]:
    out = tmp_path_factory.mktemp("exports")
    export_version(out, version=3)
    path = tmp_path_factory.mktemp("log") / "access.jsonl"
    with ModelServer(out, ServerConfig(http_port=0, access_log=str(path))) as server:
        yield server, path


def last(path: Path) -> dict[str, Any]:
    """The last line; a line is written before its response is sent."""
    line: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return line


def test_calls_over_grpc(served: tuple[ModelServer, Path]) -> None:
    server, path = served
    request = request_of({**FEATURES, "dense": DENSE}).SerializeToString()
    other = request_of({}, model="other").SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(PREDICT)
        response = call(request, metadata=[("traceparent", TRACEPARENT)], timeout=20)
        line = last(path)
        expected = {
            "protocol": "grpc",
            "method": PREDICT,
            "model": "movies",
            "version": 3,
            "signature": "serving_default",
            "code": "OK",
            "request_bytes": len(request),
            "response_bytes": len(response),
            "trace_id": TRACE,
            "span_id": SPAN,
        }
        assert line | expected == line
        assert line["seconds"] > 0
        assert line["peer"].startswith("ipv4:127.0.0.1:")
        with pytest.raises(grpc.RpcError):
            call(other, timeout=20)
        assert (last(path)["code"], last(path)["model"]) == ("NOT_FOUND", "unknown")
        assert "trace_id" not in last(path)


def test_calls_over_http(served: tuple[ModelServer, Path]) -> None:
    server, path = served
    client = Rest(server)
    body = {"inputs": {**{name: ids.tolist() for name, ids in FEATURES.items()}, "dense": DENSE.tolist()}}
    data = json.dumps(body).encode()
    for target, headers, expected in (
        ("/v1/models/movies:predict", {"traceparent": TRACEPARENT}, {"status": 200, "trace_id": TRACE}),
        ("/v1/models/other:predict", {}, {"status": 404, "code": "NOT_FOUND"}),
        ("/v3", {}, {"status": 404, "method": "POST /v3"}),
    ):
        client("POST", target, data, headers)
        line = last(path)
        assert line | expected == line
        assert line["request_bytes"] == len(data)
        assert line["response_bytes"] > 0
    client.connection.close()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        (TRACEPARENT, {"trace_id": TRACE, "span_id": SPAN}),
        (f"01-{TRACE}-{SPAN}-01-future", {"trace_id": TRACE, "span_id": SPAN}),
        (f"ff-{TRACE}-{SPAN}-01", {}),
        (f"00-{'0' * 32}-{SPAN}-01", {}),
        (f"00-{TRACE}-{'0' * 16}-01", {}),
        (f"00-{TRACE.upper()}-{SPAN}-01", {}),
        (f"00-{TRACE}-{SPAN}-01\nx", {}),
        ("", {}),
    ],
)
def test_traceparent(given: str | None, found: dict[str, str]) -> None:
    assert trace_of(given) == found


def test_a_file_that_is_renamed_is_opened_again(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "log"))
    for number in range(2):
        with log.call("grpc", f"/{number}\n", "peer", None) as fields:
            fields["code"] = "OK"
        (tmp_path / "log").rename(tmp_path / f"log.{number}")
    log.note(model="no call is in progress")
    log.close()
    for number in range(2):
        (line,) = (tmp_path / f"log.{number}").read_text().splitlines()
        assert json.loads(line)["method"] == f"/{number}\n"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="access log: cannot write"):
        ModelServer(tmp_path, ServerConfig(access_log=str(tmp_path / "absent" / "log")))
