"""REST: the Open Inference Protocol as JSON, and its tensors as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import hash_strings
from megalith.models import Model
from megalith.serving.server import http as http_server
from megalith.serving.server.http import MAX_CONNECTIONS, HttpServer
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.open_inference import HEADER_LENGTH
from megalith.serving.server.security import Security
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import DENSE, FEATURES, NAMES, export_version, logits, wait_until

Made = tuple[Model, ModelServer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    out = tmp_path_factory.mktemp("exports")
    model = export_version(out, version=3)
    with ModelServer(out, ServerConfig(http_port=0, max_request_bytes=2**20)) as server:
        yield model, server


class Rest:
    """One connection, kept open."""

    def __init__(self, server: ModelServer) -> None:
        assert server.http_address is not None
        self.connection = http.client.HTTPConnection(server.http_address, timeout=20)

    def __call__(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, bytes]:
        self.connection.request(method, path, body, headers or {})
        answer = self.connection.getresponse()
        data = answer.read()
        length = int(answer.headers.get(HEADER_LENGTH, len(data)))
        return answer.status, json.loads(data[:length]), data[length:]

    def infer(self, request: Any, path: str = "/v2/models/movies/infer") -> tuple[int, Any, bytes]:
        return self("POST", path, json.dumps(request).encode())


@pytest.fixture
def rest(made: Made) -> Iterator[Rest]:
    client = Rest(made[1])
    yield client
    client.connection.close()


def inputs() -> list[dict[str, Any]]:
    features = [
        {"name": name, "datatype": "INT64", "shape": [2], "data": ids.tolist()}
        for name, ids in FEATURES.items()
    ]
    return [*features, {"name": "dense", "datatype": "FP32", "shape": [2, 3], "data": DENSE.tolist()}]


def test_live_ready_and_metadata(rest: Rest) -> None:
    assert rest("GET", "/v2/health/live")[:2] == (200, {"live": True})
    assert rest("GET", "/v2/health/ready")[:2] == (200, {"ready": True})
    assert rest("GET", "/v2/models/movies/ready")[0] == 200
    assert rest("GET", "/v2/models/movies/versions/3/ready")[0] == 200
    assert rest("GET", "/v2/models/movies/versions/4/ready")[0] == 503
    assert rest("GET", "/v2/models/films/ready")[0] == 503
    status, server, _ = rest("GET", "/v2")
    assert (status, server["name"]) == (200, "megalith")
    assert "binary_tensor_data" in server["extensions"]
    for path in ("/v2/models/movies", "/v2/models/movies%3Astandalone/versions/3"):
        status, model, _ = rest("GET", path)
        assert status == 200
        assert [given["name"] for given in model["inputs"]] == [*NAMES, "dense"]
        assert [given["name"] for given in model["outputs"]] == ["logits", "probabilities"]


@pytest.mark.parametrize("path", ["/v2/models/movies/infer", "/v2/models/movies/versions/3/infer"])
def test_json_in_and_out(made: Made, rest: Rest, path: str) -> None:
    status, answer, rest_of_it = rest.infer({"id": "7", "inputs": inputs()}, path)
    assert (status, answer["id"], answer["model_version"], rest_of_it) == (200, "7", "3", b"")
    by_name = {output["name"]: output for output in answer["outputs"]}
    expected = logits(made[0], FEATURES, DENSE)
    assert by_name["logits"]["shape"] == [2]
    torch.testing.assert_close(torch.tensor(by_name["logits"]["data"]), expected)
    torch.testing.assert_close(torch.tensor(by_name["probabilities"]["data"]), expected.sigmoid())


def test_bytes_in_and_out(made: Made, rest: Rest) -> None:
    tensors = [tensor.numpy().tobytes() for tensor in (*FEATURES.values(), DENSE)]
    described = [
        {key: value for key, value in given.items() if key != "data"}
        | {"parameters": {"binary_data_size": len(raw)}}
        for given, raw in zip(inputs(), tensors, strict=True)
    ]
    outputs = [{"name": "logits", "parameters": {"binary_data": True}}, {"name": "probabilities"}]
    text = json.dumps({"inputs": described, "outputs": outputs}).encode()
    headers = {HEADER_LENGTH: str(len(text))}
    status, answer, data = rest("POST", "/v2/models/movies/infer", text + b"".join(tensors), headers)
    assert status == 200
    assert [output.get("parameters") for output in answer["outputs"]] == [{"binary_data_size": 8}, None]
    expected = logits(made[0], FEATURES, DENSE)
    torch.testing.assert_close(torch.frombuffer(bytearray(data), dtype=torch.float32), expected)
    torch.testing.assert_close(torch.tensor(answer["outputs"][1]["data"]), expected.sigmoid())


def test_strings(made: Made, rest: Rest) -> None:
    words = {"name": "item", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]}
    ids = {"name": "item", "datatype": "INT64", "shape": [2], "data": hash_strings(["a", "ü"]).tolist()}
    others = [given for given in inputs() if given["name"] != "item"]
    answers = [rest.infer({"inputs": [*others, each]})[1]["outputs"] for each in (words, ids)]
    assert answers[0] == answers[1]


BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "no inputs": b"{}",
    "inputs no list": b'{"inputs": {}}',
    "input no object": b'{"inputs": [3]}',
    "input without a name": b'{"inputs": [{}]}',
    "no datatype": b'{"inputs": [{"name": "user", "shape": [1], "data": [1]}]}',
    "no shape": b'{"inputs": [{"name": "user", "datatype": "INT64", "data": [1]}]}',
    "no data": b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [1]}]}',
    "shape of floats": b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [1.0], "data": [1]}]}',
    "mixed": b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [2], "data": [1, [2]]}]}',
    "deep": b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [0], "data": '
    + b"[" * 40
    + b"]" * 40
    + b"}]}",
    "very deep": b"[" * 100_000,
    "many digits": b'{"inputs": [' + b"9" * 10_000 + b"]}",
    "not a number": b'{"inputs": [{"name": "dense", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
    "no UTF-8": b'{"inputs": "\xff"}',
    "binary that is not there": b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [1], '
    b'"parameters": {"binary_data_size": 8}}]}',
    "parameters no object": b'{"inputs": [], "parameters": 3}',
    "output without a name": b'{"inputs": [], "outputs": [{}]}',
    "unknown input": b'{"inputs": [{"name": "colour", "datatype": "INT64", "shape": [1], "data": [1]}]}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_bad_bodies_are_refused_and_the_connection_lives(rest: Rest, body: bytes) -> None:
    status, answer, _ = rest("POST", "/v2/models/movies/infer", body)
    assert status == 400
    assert answer["error"]
    assert rest.infer({"inputs": inputs()})[0] == 200


def test_other_paths_and_methods(rest: Rest) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", "/v2/models"),
        ("POST", "/v2"),
        ("GET", "/v2/models/movies/infer"),
    ):
        assert rest(method, path)[0] == 404
    assert rest.infer({"inputs": inputs()}, "/v2/models/films/infer")[0] == 404
    assert rest.infer({"inputs": inputs()}, "/v2/models/movies/versions/9/infer")[0] == 404
    assert rest.infer({"inputs": inputs()}, "/v2/models/movies/versions/new/infer")[0] == 400


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Content-Length: 99999999999", 413),
        ("Content-Length: -1", 400),
        ("Content-Length: 2\r\nContent-Length: 3", 400),
        ("Content-Length: 9x", 400),
        ("Content-Length: " + "9" * 30, 400),
        ("Transfer-Encoding: chunked", 400),
        ("Content-Length: 2\r\nContent-Encoding: gzip", 400),
        (f"Content-Length: 2\r\n{HEADER_LENGTH}: 3", 400),
        (f"Content-Length: 2\r\n{HEADER_LENGTH}: x", 400),
    ],
)
def test_bodies_that_are_not_read(made: Made, head: str, status: int) -> None:
    host, _, port = str(made[1].http_address).partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(f"POST /v2/models/movies/infer HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n{{}}".encode())
        assert sock.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_client_may_wait_before_it_sends_the_body(made: Made) -> None:
    """As curl does for a large body: it would wait for a second without the interim response."""
    host, _, port = str(made[1].http_address).partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        head = "POST /v2/models/movies/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue"
        sock.sendall(f"{head}\r\n\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"{}")
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v2", b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"]
)
def test_clients_that_are_idle_or_slow_keep_nobody_out(made: Made, sent: bytes) -> None:
    host, _, port = str(made[1].http_address).partition(":")
    idle = []
    try:
        for _ in range(MAX_CONNECTIONS + 8):
            idle.append(socket.create_connection((host, int(port)), timeout=20))
            idle[-1].sendall(sent)
        assert Rest(made[1])("GET", "/v2/health/ready")[0] == 200
        assert Rest(made[1]).infer({"inputs": inputs()})[0] == 200
        assert closed(idle[0]), "the connection that waited longest was not closed"
    finally:
        for sock in idle:
            sock.close()


def closed(sock: socket.socket) -> bool:
    """Whether the server closes a connection without an answer."""
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


def test_health_is_answered_while_requests_are_saturated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every connection is being answered, and the model computes; one more connection gets a 503."""
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(http_server, "SPARE_CONNECTIONS", 1)
    export_version(tmp_path)
    with ModelServer(tmp_path, ServerConfig(http_port=0, metrics_port=0)) as server:
        version: Any = server.models[0].newest
        go, entered = threading.Event(), threading.Semaphore(0)
        compute = version._compute

        def hold(batch: Any) -> Any:
            entered.release()
            assert go.wait(20)
            return compute(batch)

        version._batcher._compute = hold
        body = json.dumps({"inputs": inputs()}).encode()
        asked = [Rest(server) for _ in range(2)]
        try:
            for each in asked:
                each.connection.request("POST", "/v2/models/movies/infer", body)
            assert server._rest is not None
            wait_until(lambda: len(server._rest._answering) == 2)  # type: ignore[union-attr]
            assert entered.acquire(timeout=20)
            spare = Rest(server)
            assert spare("GET", "/v2/health/ready")[0] == 200
            assert spare("GET", "/v2/models/movies")[0] == 503
            metrics = f"http://{server.metrics_address}/metrics"
            assert b"megalith_queue_rows" in urllib.request.urlopen(metrics, timeout=20).read()
        finally:
            go.set()
        assert [each.connection.getresponse().status for each in asked] == [200, 200]
        for each in (*asked, spare):
            each.connection.close()


def test_who_finds_every_slot_answering_gets_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http_server, "SPARE_CONNECTIONS", 1)

    async def never(scope: Any, receive: Any, send: Any) -> None:
        assert scope["state"]["connection"].begin_answer()
        await asyncio.Event().wait()

    server = HttpServer(never, Security(), "127.0.0.1", 0)
    server.start()
    sockets = []
    try:
        for count in (1, 2):
            sockets.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            sockets[-1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until(lambda count=count: len(server._answering) == count)  # type: ignore[misc]
        sockets.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        assert sockets[-1].recv(100).startswith(b"HTTP/1.1 503 ")
    finally:
        server.stop(0.1)
        for each in sockets:
            each.close()


@pytest.mark.parametrize("begun", ["silent", "slow", "unread"])
def test_a_request_has_a_time_in_which_it_arrives_and_its_response_is_read(
    made: Made, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(http_server, "CHECK_SECONDS", 0.05)
    request = b"GET /v2/models/movies HTTP/1.1\r\nHost: x\r\n\r\n"
    with ModelServer(made[1]._repository.directory, ServerConfig(http_port=0)) as server:
        host, _, port = str(server.http_address).partition(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(20)
            sock.connect((host, int(port)))
            if begun == "slow":
                sock.sendall(
                    b"POST /v2/models/movies/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{"
                )
            if begun == "unread":  # it sends requests, and reads no response
                with contextlib.suppress(OSError):
                    while True:
                        sock.sendall(request * 100)
            assert server._rest is not None
            rest = server._rest
            wait_until(lambda: not rest._waiting and not rest._answering)
            assert begun == "unread" or closed(sock)
        assert Rest(server)("GET", "/v2/health/ready")[0] == 200


def test_json_is_short(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.serving.server.open_inference.MAX_JSON_BYTES", 100)
    status, answer, _ = rest.infer({"inputs": inputs()})
    assert (status, "send tensors as bytes" in answer["error"]) == (413, True)


def test_ids_without_a_row_are_reported_to_who_asks(rest: Rest) -> None:
    body = json.dumps({"inputs": [{**inputs()[0], "data": [1, 10**9]}, *inputs()[1:]]}).encode()
    path = "/v2/models/movies/infer"
    _, answer, _ = rest("POST", path, body, {"Megalith-Missing-Ids": "1"})
    assert answer["parameters"] == {"missing_ids": {"user": 1}}
    assert "parameters" not in rest("POST", path, body)[1]


def test_a_request_may_set_its_timeout(rest: Rest) -> None:
    assert rest.infer({"inputs": inputs(), "parameters": {"timeout": 20_000_000}})[0] == 200
    assert rest.infer({"inputs": inputs(), "parameters": {"timeout": 0}})[0] == 504
    for wrong in (-1, 1.5, "1", True):
        assert rest.infer({"inputs": inputs(), "parameters": {"timeout": wrong}})[0] == 400


def test_text_that_cannot_be_encoded(rest: Rest) -> None:
    user = {"name": "user", "datatype": "BYTES", "shape": [2], "data": ["a", "\ud800"]}
    status, answer, _ = rest.infer({"inputs": [user, *inputs()[1:]]})
    assert (status, "input 'user'" in answer["error"]) == (400, True)


def test_nothing_is_written_over_rest(tmp_path: Path) -> None:
    export_version(tmp_path)
    with ModelServer(tmp_path, ServerConfig(http_port=0, allow_writes=True)) as server:
        request = {"inputs": [{"name": "user_id", "datatype": "INT64", "shape": [1], "data": [1]}]}
        assert Rest(server).infer(request)[0] == 400
