"""Channels: credentials, failures as RemoteErrors, limits, and connections shared by address."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from megalith.errors import InputError, MissingDependencyError, RemoteError, UsageError
from megalith.serving.client import channels as channels_module
from megalith.serving.client.channels import MAX_MESSAGE_BYTES, Channels, Connection
from megalith.serving.client.credentials import Credentials
from megalith.serving.proto.message_types import (
    PredictRequest,
)
from tests.serving.plain_server import LIMIT, Refused, Seen, plain_server


def empty(seen: Seen) -> dict[str, Tensor]:
    return {"y": torch.ones(1)}


def ask(address: str, credentials: Credentials | None = None) -> Any:
    with Connection(address, credentials) as connection:
        return connection.predict(PredictRequest(), timeout=LIMIT)


# ---- credentials


def test_a_token_travels_as_authorization() -> None:
    with plain_server(empty) as server:
        ask(server.address, Credentials(token="s3cret"))
        ask(server.address)
    assert server.seen[0].metadata["authorization"] == "Bearer s3cret"
    assert "authorization" not in server.seen[1].metadata


def test_secrets_stay_out_of_texts() -> None:
    credentials = Credentials("s3cret", b"-----BEGIN A", b"-----BEGIN B", b"-----BEGIN C")
    assert repr(credentials) == "Credentials(tls=False)"
    assert credentials.secure


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token": ""}, "a token must be"),
        ({"token": "a b"}, "a token must be"),
        ({"token": "a\n"}, "a token must be"),
        ({"token": "ü"}, "a token must be"),
        ({"token": "x" * 5000}, "a token must be"),
        ({"root_certificates": "-----BEGIN "}, "root_certificates must be the bytes of a PEM"),
        ({"root_certificates": b"no"}, "root_certificates must be the bytes of a PEM"),
        ({"certificate": b"-----BEGIN A"}, "certificate and key belong together"),
        ({"key": b"-----BEGIN A"}, "certificate and key belong together"),
    ],
)
def test_what_are_no_credentials(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Credentials(**settings)


def test_credentials_from_files(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("  s3cret\n")
    assert Credentials.from_files(token=token) == Credentials("s3cret")
    assert Credentials.from_files() == Credentials()
    with pytest.raises(InputError, match=r"key: cannot read .*nothing"):
        Credentials.from_files(key=tmp_path / "nothing")


def test_a_token_in_the_open_is_warned_of_except_on_loopback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megalith.serving"):
        for address in ("localhost:1", "127.0.0.1:1", "[::1]:1"):
            Connection(address, Credentials(token="s3cret")).close()
        assert caplog.messages == []
        Connection("10.0.0.1:1", Credentials(token="s3cret")).close()
    assert caplog.messages == ["10.0.0.1:1: the token is sent unencrypted; use TLS"]


# ---- calls


def test_a_failure_is_a_remote_error() -> None:
    def refuse(seen: Seen) -> dict[str, Tensor]:
        raise Refused("PERMISSION_DENIED")

    with plain_server(refuse) as server:
        with pytest.raises(RemoteError) as raised:
            ask(server.address)
        assert raised.value.code == "PERMISSION_DENIED"
        assert raised.value.targets == (server.address,)
        assert str(raised.value) == f"{server.address}: PERMISSION_DENIED: requested by the test"
        assert isinstance(raised.value, ConnectionError)


def test_bytes_are_sent_unchanged_with_metadata() -> None:
    request = PredictRequest()
    request.model_spec.name = "movies"
    with plain_server(empty) as server, Connection(server.address) as connection:
        metadata = [("megalith-sequence", "7")]
        connection.predict(request.SerializeToString(), timeout=LIMIT, metadata=metadata)
    assert server.seen[0].message == request
    assert server.seen[0].metadata["megalith-sequence"] == "7"


def test_calls_do_not_wait_for_each_other_and_can_be_cancelled() -> None:
    def hang(seen: Seen) -> dict[str, Tensor]:
        arrived.release()
        server.released.wait(LIMIT)
        return empty(seen)

    arrived = threading.Semaphore(0)
    with plain_server(hang) as server, Connection(server.address) as connection:
        calls = [connection.start_predict(PredictRequest(), timeout=LIMIT) for _ in range(3)]
        for _ in calls:
            assert arrived.acquire(timeout=LIMIT)
        calls[1].cancel()
        with pytest.raises(RemoteError) as raised:
            calls[1].result()
        assert raised.value.code == "CANCELLED"
        server.released.set()
        assert calls[0].result().outputs
        assert calls[2].result().outputs


def test_messages_of_several_megabytes_pass_and_larger_ones_are_refused() -> None:
    def big(seen: Seen) -> dict[str, Tensor]:
        return {"y": torch.zeros(8 * 2**20 // 4)}

    with plain_server(big) as server, Connection(server.address) as connection:
        answer = connection.predict(b"", timeout=LIMIT)
        assert len(answer.outputs["y"].tensor_content) == 8 * 2**20
        with pytest.raises(RemoteError) as raised:
            connection.predict(b"x" * (MAX_MESSAGE_BYTES + 1), timeout=LIMIT)
        assert raised.value.code == "RESOURCE_EXHAUSTED"


def test_a_closed_connection_fails_its_calls() -> None:
    connection = Connection("127.0.0.1:1")
    connection.close()
    connection.close()
    for start in (connection.predict, connection.start_predict):
        with pytest.raises(RemoteError) as raised:
            start(PredictRequest(), timeout=LIMIT)
        assert raised.value.code == "CANCELLED"


# ---- connections by address


def test_channels_close_together() -> None:
    channels = Channels()
    connections = [channels.get(f"127.0.0.1:{port}") for port in (1, 2)]
    channels.close()
    channels.close()
    with pytest.raises(UsageError, match="closed"):
        channels.get("127.0.0.1:1")
    for connection in connections:
        with pytest.raises(RemoteError, match="closed"):
            connection.predict(b"", timeout=LIMIT)


def test_work_runs_in_threads_that_are_kept() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Channels() as channels:
        seen = set()
        for _ in range(5):
            channels.submit(lambda: names.put(threading.current_thread().name))
            seen.add(names.get(timeout=LIMIT))
        assert all(name.startswith("megalith-channels") for name in seen)
    with pytest.raises(UsageError, match="closed"):
        channels.submit(lambda: None)


def test_the_least_recently_used_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_module, "MAX_CONNECTIONS", 2)
    with Channels() as channels:
        a, b = channels.get("127.0.0.1:1"), channels.get("127.0.0.1:2")
        channels.get("127.0.0.1:1")
        channels.get("127.0.0.1:3")
        assert channels.get("127.0.0.1:1") is a
        with pytest.raises(RemoteError, match="closed"):
            b.predict(b"", timeout=LIMIT)


def test_a_server_that_comes_back_is_found_again() -> None:
    with plain_server(empty) as server, Connection(server.address) as connection:
        connection.predict(b"", timeout=LIMIT)
        port = int(server.address.rpartition(":")[2])
        server.stop()
        with pytest.raises(RemoteError):
            connection.predict(b"", timeout=LIMIT)
        with plain_server(empty, port=port):
            grpc.channel_ready_future(connection.channel).result(timeout=LIMIT)
            assert connection.predict(b"", timeout=LIMIT).outputs


def test_without_grpcio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.\[serve\]'"):
        Connection("127.0.0.1:1")
