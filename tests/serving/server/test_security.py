"""Who may connect, what each token permits, how tokens are replaced, and how large requests may be."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import shutil
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from megalith.errors import InputError, RemoteError, UsageError
from megalith.serving.client.credentials import Credentials
from megalith.serving.discovery.contract import is_loopback
from megalith.serving.server import dispatcher
from megalith.serving.server import security as security_module
from megalith.serving.server.dispatcher import WRITE_THREADS, MallocTrimmer
from megalith.serving.server.grpc_calls import MAX_STREAMS
from megalith.serving.server.http import HttpServer
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.security import Permission, Security, read_token
from megalith.serving.server.server_config import ServerConfig
from tests.serving.certificates import Certificates, make_certificates
from tests.serving.exports import (
    FEATURES,
    INPUTS,
    ServerClient,
    fails,
    is_healthy,
    request_of,
    serving,
    silent,
    wait_until,
)
from tests.serving.server.test_rest import inputs as rest_inputs

TOKEN = "correct-horse"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(exported: Path) -> Iterator[ModelServer]:
    with ModelServer(exported, ServerConfig(http_port=0, security=Security(TOKEN))) as server:
        yield server


def code_of(ask: ServerClient, **options: str) -> str:
    with pytest.raises(RemoteError) as raised:
        ask(INPUTS, timeout=5.0, **options)
    return raised.value.code


# ---- the token


@pytest.mark.parametrize("token", [None, "wrong-token", TOKEN + "x", TOKEN[:-1]])
def test_others_are_not(guarded: ModelServer, token: str | None) -> None:
    with ServerClient(guarded.address, credentials=Credentials(token)) as ask:
        assert code_of(ask) == "UNAUTHENTICATED"
        with pytest.raises(RemoteError, match="requires a token"):
            ask.status()


def test_health_needs_no_token_but_reflection_does(guarded: ModelServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        assert is_healthy(guarded)
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.ServerReflectionInfo(iter([asked]), timeout=5))
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_rest_asks_for_it_too(guarded: ModelServer) -> None:
    url = f"http://{guarded.http_address}"
    assert urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5).status == 200
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"{url}/v2/models/movies", timeout=5)
    assert raised.value.code == 401
    request = urllib.request.Request(f"{url}/v2/models/movies", headers={"Authorization": f"Bearer {TOKEN}"})
    assert urllib.request.urlopen(request, timeout=5).status == 200


def test_rest_asks_for_it_before_it_reads_a_body(guarded: ModelServer) -> None:
    host, _, port = str(guarded.http_address).partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(b"POST /v2/models/movies/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 401 ")


def test_who_shows_none_is_refused_before_anything_is_read(guarded: ModelServer) -> None:
    with silent(guarded, "/tensorflow.serving.PredictionService/Predict", 200) as calls:
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_health_checks_have_a_deadline(
    guarded: ModelServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(guarded._limits, "read_seconds", 0.05)
    with silent(guarded, f"/grpc.health.v1.Health/{method}", 200) as calls:
        codes = {call.code() for call in calls}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
    # The client sees the end of a call before the server counts it as ended.
    with grpc.insecure_channel(guarded.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for _ in range(200):
            answer = health.Check.future(health_pb2.HealthCheckRequest(), timeout=20)
            if answer.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
        assert answer.result().status == 1


@pytest.mark.parametrize(
    "shown",
    [None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer  {TOKEN} x", "Bearer \udcff", b"\xff"],
)
def test_what_does_not_admit(shown: str | bytes | None) -> None:
    assert not Security(TOKEN).admits(shown)


def test_a_config_with_tokens_is_sent_to_other_processes(tmp_path: Path, certificates: Certificates) -> None:
    (tmp_path / "writer").write_text("battery-staple\n")
    files = {"certificate": certificates.server, "key": certificates.server_key}
    sent = Security(TOKEN, write_token=tmp_path / "writer", **files)
    assert sent.ssl_context() is not None
    received = pickle.loads(pickle.dumps(ServerConfig(security=sent))).security
    assert received == sent
    assert received.permits(f"Bearer {TOKEN}", Permission.READ)
    assert received.permits("Bearer battery-staple", Permission.WRITE)
    assert not received.permits(f"Bearer {TOKEN}", Permission.WRITE)
    assert received.ssl_context() is not None


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    found = read_token(path, {"MEGALITH_SERVE_TOKEN": "other"})
    assert Security(found).admits(f"Bearer {TOKEN}")
    assert read_token(None, {"MEGALITH_SERVE_TOKEN": TOKEN}) == TOKEN
    assert read_token(None, {}) is None
    with pytest.raises(InputError, match="cannot read"):
        Security(tmp_path / "absent")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InputError, match="is empty"):
        Security(tmp_path / "empty")
    for bad in ("short", "has a space", "ü" * 10):
        with pytest.raises(InputError, match="a token must be"):
            Security(bad)
    assert TOKEN not in repr(Security(TOKEN))


# ---- certificates


@pytest.mark.parametrize("state", ["handshake", "not begun"])
def test_stopping_closes_connections_in_their_tls_handshake(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    async def wait(connection: object, client: object) -> None:
        await asyncio.Event().wait()

    security = Security(certificate=certificates.server, key=certificates.server_key)
    server = HttpServer(app, security, "127.0.0.1", 0)
    if state == "not begun":
        monkeypatch.setattr(server, "_connect", wait)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        wait_until(lambda: len(server._waiting) == 1)
        (connection,) = server._waiting
        server.stop(0.1)
        assert connection._client.fileno() == -1
        assert client.recv(1) == b""


def test_tls(exported: Path, certificates: Certificates) -> None:
    security = Security(certificate=certificates.server, key=certificates.server_key)
    with ModelServer(
        exported,
        ServerConfig(
            host="localhost", http_port=0, metrics_host="localhost", metrics_port=0, security=security
        ),
    ) as server:
        trusting = Credentials.from_files(root_certificates=certificates.authority)
        with ServerClient(server.address, credentials=trusting) as ask:
            assert ask(INPUTS)["logits"].shape == (2,)
        for wrong in (Credentials(), Credentials(tls=True)):
            with ServerClient(server.address, credentials=wrong) as ask:
                assert code_of(ask) == "UNAVAILABLE"
        context = ssl.create_default_context(cafile=str(certificates.authority))
        url = f"https://{server.http_address}/v2/models/movies"
        assert urllib.request.urlopen(url, timeout=5, context=context).status == 200
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5)
        metrics = f"https://{server.metrics_address}/metrics"
        text = urllib.request.urlopen(metrics, timeout=5, context=context).read()
        assert b"megalith_request_seconds" in text


def test_clients_show_certificates_where_asked(exported: Path, certificates: Certificates) -> None:
    security = Security(
        certificate=certificates.server, key=certificates.server_key, client_ca=certificates.authority
    )
    with ModelServer(exported, ServerConfig(host="localhost", http_port=0, security=security)) as server:
        known = Credentials.from_files(
            root_certificates=certificates.authority,
            certificate=certificates.client,
            key=certificates.client_key,
        )
        with ServerClient(server.address, credentials=known) as ask:
            assert ask(INPUTS)["logits"].shape == (2,)
        unknown = Credentials.from_files(root_certificates=certificates.authority)
        with ServerClient(server.address, credentials=unknown) as ask:
            assert code_of(ask) == "UNAVAILABLE"
        context = ssl.create_default_context(cafile=str(certificates.authority))
        url = f"https://{server.http_address}/v2/health/live"
        with pytest.raises(OSError, match=r".*"):
            urllib.request.urlopen(url, timeout=5, context=context)
        context.load_cert_chain(certificates.client, certificates.client_key)
        assert urllib.request.urlopen(url, timeout=5, context=context).status == 200


def test_malformed_certificates(exported: Path, tmp_path: Path, certificates: Certificates) -> None:
    with pytest.raises(InputError, match="both a certificate and its key"):
        Security(certificate=certificates.server)
    with pytest.raises(InputError, match="client certificates need TLS"):
        Security(client_ca=certificates.authority)
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for security in (
        Security(certificate=bad, key=certificates.server_key),
        Security(certificate=tmp_path / "absent", key=certificates.server_key),
        Security(certificate=certificates.server, key=certificates.client_key),
    ):
        with pytest.raises(InputError, match="TLS: "):
            ModelServer(exported, ServerConfig(security=security)).start()


# ---- writes

PUSH = {"user_id": torch.tensor([1]), "user_value": torch.ones(1, 5)}
CONTROLS = ["hashtable_assign", "raw_assign", "any/raw_assign", "sync_position", "sync_begin", "sync_reload"]


@pytest.mark.parametrize("signature", CONTROLS)
def test_writes_are_refused_unless_allowed(exported: Path, guarded: ModelServer, signature: str) -> None:
    with (
        ServerClient(guarded.address, credentials=Credentials(TOKEN)) as ask,
        pytest.raises(RemoteError) as raised,
    ):
        ask(PUSH, signature=signature)
    assert raised.value.code == "PERMISSION_DENIED"


def test_a_write_shows_at_once(exported: Path) -> None:
    with serving(exported, allow_writes=True) as (server, ask):
        before = ask(INPUTS)
        ids = FEATURES["user"][:1]
        result = ask({"user_id": ids, "user_value": torch.full((1, 5), 2.0)}, signature="hashtable_assign")
        assert result["user_result"].tolist() == [1]
        rows = ask({"user": ids}, signature="lookup", model="movies:ps_0")["user"]
        assert rows.tolist() == [[2.0] * 5]
        after = ask(INPUTS)
        assert before["logits"][0] != after["logits"][0]
        metrics = server.metrics.text().decode()
        assert 'megalith_overlay_rows{model="movies"} 1.0' in metrics
        for event in ("begun", "refused", "replaced"):
            assert f'megalith_sessions_{event}_total{{model="movies"}} 0.0' in metrics
        with fails("INVALID_ARGUMENT"):
            ask({"user_id": ids, "user_value": torch.full((1, 4), 2.0)}, signature="hashtable_assign")


def test_writes_wait_for_one_another_and_nothing_else_for_them(exported: Path) -> None:
    with serving(exported, allow_writes=True) as (server, ask):
        subscriber: Any = server.models[0].subscriber
        handle, entered, go = subscriber.handle, threading.Semaphore(0), threading.Event()

        def hold(*arguments: Any) -> Any:
            entered.release()
            assert go.wait(20)
            return handle(*arguments)

        subscriber.handle = hold
        with ThreadPoolExecutor(WRITE_THREADS) as pool:
            held = [pool.submit(ask, PUSH, signature="hashtable_assign") for _ in range(WRITE_THREADS)]
            for _ in held:
                assert entered.acquire(timeout=20)
            with fails("DEADLINE_EXCEEDED"):
                ask(PUSH, signature="hashtable_assign", timeout=0.2)
            assert ask(INPUTS)["logits"].shape == (2,)
            assert ask({"user": torch.tensor([1])}, signature="lookup")["user"].shape == (1, 5)
            go.set()
            assert [each.result(20)["user_result"].tolist() for each in held] == [[1]] * WRITE_THREADS


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_writes_from_elsewhere_need_a_credential(exported: Path, host: str) -> None:
    with pytest.raises(UsageError, match=r"--write-token-file.*--tls-ca"):
        ModelServer(exported, ServerConfig(host=host, allow_writes=True))
    guarded = Security(write_token=TOKEN)
    ModelServer(exported, ServerConfig(host=host, allow_writes=True, security=guarded)).stop()
    ModelServer(exported, ServerConfig(host=host)).stop()


def test_the_token_that_reads_does_not_write(exported: Path) -> None:
    with pytest.raises(UsageError, match="needs a token for them: --write-token-file"):
        ServerConfig(allow_writes=True, security=Security(TOKEN))


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""]))


# ---- streams


def test_streams_are_bounded_and_release_their_slots(exported: Path) -> None:
    with ModelServer(exported) as server, grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        for _ in range(2):
            streams = [watch(health_pb2.HealthCheckRequest(), timeout=20) for _ in range(MAX_STREAMS)]
            assert all(next(stream).status == 1 for stream in streams)
            with pytest.raises(grpc.RpcError) as raised:
                next(watch(health_pb2.HealthCheckRequest(), timeout=20))
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            for stream in streams:
                stream.cancel()
            for _ in range(1000):  # the server hears of a cancelled stream a little later
                try:
                    probe = watch(health_pb2.HealthCheckRequest(), timeout=20)
                    next(probe)
                    probe.cancel()
                    break
                except grpc.RpcError:
                    continue
        with ServerClient(server.address) as ask:
            assert ask(INPUTS)["logits"].shape == (2,)


# ---- permissions

TOKENS = {
    "read": "token-to-read",
    "lookup": "token-to-look-up",
    "write": "token-to-write",
    "admin": "the-admin",
}
CALLS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "read": (INPUTS, ""),
    "lookup": ({"user": torch.tensor([1])}, "lookup"),
    "write": ({"user_id": torch.tensor([1]), "user_value": torch.ones(1, 5)}, "hashtable_assign"),
}
MAX_PREDICT_BYTES = 4096


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[ModelServer]:
    security = Security(
        TOKENS["read"],
        lookup_token=TOKENS["lookup"],
        write_token=TOKENS["write"],
        admin_token=TOKENS["admin"],
    )
    config = ServerConfig(
        http_port=0, allow_writes=True, security=security, max_predict_bytes=MAX_PREDICT_BYTES
    )
    with ModelServer(exported, config) as started:
        yield started


def code_with(server: ModelServer, token: str | None, call: str) -> str:
    inputs, signature = CALLS[call]
    with ServerClient(server.address, credentials=Credentials(token)) as ask:
        try:
            ask(inputs, signature=signature)
        except RemoteError as error:
            return error.code
    return "OK"


@pytest.mark.parametrize("owner", TOKENS)
def test_a_token_permits_its_own_calls(server: ModelServer, owner: str) -> None:
    found = {call: code_with(server, TOKENS[owner], call) for call in CALLS}
    assert found == {call: "OK" if owner in (call, "admin") else "PERMISSION_DENIED" for call in CALLS}


def test_rest_reads_with_the_token_for_reading(server: ModelServer) -> None:
    body = json.dumps({"inputs": rest_inputs()}).encode()

    def status(token: str, body: bytes = body) -> int:
        url = f"http://{server.http_address}/v2/models/movies/infer"
        request = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"})
        try:
            return int(urllib.request.urlopen(request, timeout=20).status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [status(TOKENS[owner]) for owner in TOKENS] == [200, 403, 403, 200]
    assert status("wrong-token") == 401
    assert status(TOKENS["read"], body + b" " * MAX_PREDICT_BYTES) == 413


def test_without_a_read_token_only_scores_are_for_everyone() -> None:
    security = Security(write_token=TOKENS["write"])
    permitted = {each: security.permits(None, each) for each in Permission}
    assert permitted == {
        Permission.READ: True,
        Permission.LOOKUP: False,
        Permission.WRITE: False,
        Permission.ADMIN: False,
    }
    assert all(Security().permits(None, each) for each in Permission)


# ---- replaced tokens and certificates


def test_tokens_are_replaced_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(security_module, "RELOAD_SECONDS", 0.0)
    path = tmp_path / "tokens"
    path.write_text("first-token\n")
    security = Security(path)

    def admitted() -> list[str]:
        tokens = ("first-token", "second-token")
        return [token for token in tokens if security.permits(f"Bearer {token}", Permission.READ)]

    assert admitted() == ["first-token"]
    path.write_text("first-token\nsecond-token\n")
    assert admitted() == ["first-token", "second-token"]
    path.write_text("second-token\n")
    assert admitted() == ["second-token"]
    with caplog.at_level(logging.ERROR):
        path.write_text("half")
        assert admitted() == ["second-token"]
        path.unlink()
        assert admitted() == ["second-token"]
    assert "what it held before stays in use" in caplog.text


def test_certificates_are_replaced_without_a_restart(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security_module, "RELOAD_SECONDS", 0.0)
    for name in ("old", "new", "used"):
        (tmp_path / name).mkdir()
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    used = {"certificate": tmp_path / "used" / "cert", "key": tmp_path / "used" / "key"}

    def install(certificates: Any) -> None:
        shutil.copy(certificates.server, used["certificate"])
        shutil.copy(certificates.server_key, used["key"])

    def answers(server: ModelServer, authority: Path) -> bool:
        trusting = Credentials.from_files(root_certificates=authority)
        with ServerClient(server.address, credentials=trusting) as ask:
            try:
                return bool(ask(INPUTS, timeout=5.0)["logits"].shape == (2,))
            except RemoteError:
                return False

    install(old)
    config = ServerConfig(host="localhost", http_port=0, security=Security(**used))
    with ModelServer(exported, config) as server:
        assert answers(server, old.authority)
        install(new)
        assert answers(server, new.authority)
        context = server._config.security.ssl_context()
        assert context is not None
        assert context is server._config.security.ssl_context()


# ---- sizes


def test_compressed_requests_are_refused(server: ModelServer) -> None:
    """61 KB of gzip were 60 MiB of memory before the request was admitted."""
    data = request_of({**INPUTS, "dense": torch.zeros(2000, 3)}).SerializeToString()
    metadata = [("authorization", f"Bearer {TOKENS['read']}")]
    with grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        with pytest.raises(grpc.RpcError) as raised:
            call(data, timeout=20, metadata=metadata)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_requests_for_scores_have_a_limit_of_their_own(server: ModelServer) -> None:
    large = {**INPUTS, "dense": torch.zeros(MAX_PREDICT_BYTES, 3)}
    with ServerClient(server.address, credentials=Credentials(TOKENS["admin"])) as ask:
        with fails("RESOURCE_EXHAUSTED", "send it in parts"):
            ask(large)
        ids = torch.arange(MAX_PREDICT_BYTES)
        assert ask({"user": ids}, signature="lookup")["user"].shape == (MAX_PREDICT_BYTES, 5)


@pytest.mark.parametrize("signature", ["lookup", "hashtable_assign"])
def test_many_small_fields_are_refused_before_they_are_parsed(server: ModelServer, signature: str) -> None:
    """Parsed, 24 MiB of them took 447 MiB."""
    data = request_of({}, signature=signature).SerializeToString() + b"\x1a\x00" * (1 << 17)
    metadata = [("authorization", f"Bearer {TOKENS['admin']}")]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        with pytest.raises(grpc.RpcError, match="send it in parts") as raised:
            call(data, timeout=20, metadata=metadata)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_memory_is_returned_after_a_burst() -> None:
    memory = MallocTrimmer()
    for _ in range(3):
        memory.received(dispatcher.LARGE_BYTES - 1)
    assert not memory.release()
    memory.received(dispatcher.BURST_BYTES)
    assert memory.release()
    assert not memory.release()
