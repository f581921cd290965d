"""The access log: a line for each call, with the ids of its trace."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from megalith.errors import InputError
from megalith.serving.server import grpc_calls
from megalith.serving.server.access_log import AccessLog, trace_of
from megalith.serving.server.grpc_calls import MAX_CONTROLS, MAX_REFLECTIONS
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.security import Security
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import DENSE, FEATURES, INPUTS, request_of, silent, wait_until
from tests.serving.server.test_rest import Rest

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
TOKEN = "0123456789abcdef0123456789abcdef"
PASSED_ON = "another call needed the place of this one, which sent no message"
LIMIT = 60.0
PREDICT = "/tensorflow.serving.PredictionService/Predict"


@pytest.fixture(scope="module")
def served(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModelServer, Path]]:
    path = tmp_path_factory.mktemp("log") / "access.jsonl"
    with ModelServer(exported, ServerConfig(http_port=0, access_log=str(path), read_seconds=LIMIT)) as server:
        yield server, path


def last(path: Path) -> dict[str, Any]:
    """The last line; a line is written before its response is sent."""
    line: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return line


def test_calls_over_grpc(served: tuple[ModelServer, Path]) -> None:
    server, path = served
    request = request_of(INPUTS).SerializeToString()
    other = request_of({}, model="other").SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(PREDICT)
        response = call(request, metadata=[("traceparent", TRACEPARENT)], timeout=20)
        line = last(path)
        expected = {
            "protocol": "grpc",
            "method": PREDICT,
            "model": "movies",
            "version": 1,
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


def refused(path: Path, **wanted: Any) -> dict[str, Any]:
    """The line of a call that was refused, which may be written after the client has its status."""
    found: list[dict[str, Any]] = []

    def is_found() -> bool:
        lines = map(json.loads, path.read_text().splitlines())
        found.extend(line for line in lines if line | wanted == line)
        return bool(found)

    wait_until(is_found)
    assert found[0]["peer"].startswith("ipv4:127.0.0.1:")
    assert (found[0]["protocol"], found[0]["request_bytes"]) == ("grpc", 0)
    return found[0]


def test_calls_that_are_refused_before_their_message_is_read(
    served: tuple[ModelServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, path = served
    metadata = [("traceparent", TRACEPARENT)]
    with grpc.insecure_channel(server.address) as channel:
        for method in ("/tensorflow.serving.PredictionService/Regress", "/" + "x" * 300):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(method)(b"", metadata=metadata, timeout=LIMIT)
            assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
            assert raised.value.details() == "Method not found!"
            line = refused(path, method=method[:200], code="UNIMPLEMENTED", reason="Method not found!")
            assert (line["trace_id"], line["span_id"]) == (TRACE, SPAN)
        with pytest.raises(grpc.RpcError):
            channel.stream_unary(PREDICT)(iter(()), metadata=metadata, timeout=LIMIT)
        refused(
            path, method=PREDICT, code="INVALID_ARGUMENT", reason="the call has no message", trace_id=TRACE
        )
    with silent(server, REFLECTION, MAX_REFLECTIONS + 1) as calls:
        refused(path, method=REFLECTION, code="RESOURCE_EXHAUSTED")
        assert len(calls) > MAX_REFLECTIONS  # a call that is not referred to is cancelled
    control = server._limits.control
    wait_until(lambda: not control.calls)
    with silent(server, STATUS) as (call,):
        wait_until(lambda: bool(control.calls))
        call.cancel()
    refused(path, method=STATUS)
    monkeypatch.setattr(grpc_calls, "PATIENCE_SECONDS", 0.0)
    wait_until(lambda: not control.calls)
    with silent(server, STATUS, MAX_CONTROLS) as calls:
        wait_until(lambda: len(control.calls) == MAX_CONTROLS)
        with grpc.insecure_channel(server.address) as channel:
            channel.unary_unary(STATUS).future(b"", timeout=LIMIT).exception()
        refused(path, method=STATUS, code="CANCELLED", reason=PASSED_ON)
        assert len(calls) == MAX_CONTROLS
    monkeypatch.setattr(server._limits, "read_seconds", 0.1)
    with silent(server, PREDICT) as (call,):
        assert call.code() == grpc.StatusCode.CANCELLED
        line = refused(path, method=PREDICT, code="CANCELLED", reason="no message arrived in 0.1 s")
        assert line["seconds"] >= 0.09  # the clock of the event loop counts milliseconds
    assert "version" not in line


def test_calls_without_a_token(exported: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    config = ServerConfig(security=Security(TOKEN), access_log=str(path))
    with ModelServer(exported, config) as server, grpc.insecure_channel(server.address) as channel:
        for method in (PREDICT, "/none"):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(method)(b"", metadata=[("traceparent", TRACEPARENT)], timeout=LIMIT)
            line = refused(path, method=method, code="UNAUTHENTICATED", trace_id=TRACE)
            assert line["reason"].startswith("this server requires a token")
    assert TOKEN not in path.read_text()


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


def test_http_that_is_not_understood(served: tuple[ModelServer, Path]) -> None:
    server, path = served
    assert server.http_address is not None
    host, _, port = server.http_address.rpartition(":")
    for sent, method, status, trace in (
        (f"PUT /v2 HTTP/1.1\r\nHost: x\r\ntraceparent: {TRACEPARENT}\r\n\r\n", "PUT /v2", 501, TRACE),
        ("nonsense\r\n\r\n", "", 400, None),
    ):
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            connection.sendall(sent.encode())
            assert connection.recv(65536)
        line = last(path)
        assert (line["method"], line["status"], line.get("trace_id")) == (method, status, trace)
        assert line["reason"]
        assert line["peer"].startswith("127.0.0.1:")


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
