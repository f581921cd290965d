"""What each token permits, how tokens and certificates are replaced, and how large requests may be."""

from __future__ import annotations

import json
import logging
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from megalith.errors import RemoteError
from megalith.serving.client.credentials import Credentials
from megalith.serving.server import dispatcher
from megalith.serving.server import security as secret_files
from megalith.serving.server.dispatcher import MallocTrimmer
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.security import Permission, Security
from megalith.serving.server.server_config import ServerConfig
from tests.serving.certificates import make_certificates
from tests.serving.exports import ServerClient, export_version, request_of, rows

FEATURES, DENSE = rows(2)
INPUTS = {**FEATURES, "dense": DENSE}
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
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports")
    export_version(out)
    return out


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


def code_of(server: ModelServer, token: str | None, call: str) -> str:
    inputs, signature = CALLS[call]
    with ServerClient(server.address, credentials=Credentials(token)) as ask:
        try:
            ask(inputs, signature=signature)
        except RemoteError as error:
            return error.code
    return "OK"


@pytest.mark.parametrize("owner", TOKENS)
def test_a_token_permits_its_own_calls(server: ModelServer, owner: str) -> None:
    found = {call: code_of(server, TOKENS[owner], call) for call in CALLS}
    assert found == {call: "OK" if owner in (call, "admin") else "PERMISSION_DENIED" for call in CALLS}


def test_rest_reads_with_the_token_for_reading(server: ModelServer) -> None:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [2], "data": ids.tolist()}
        for name, ids in FEATURES.items()
    ]
    dense = {
        "name": "dense",
        "datatype": "FP32",
        "shape": list(DENSE.shape),
        "data": DENSE.flatten().tolist(),
    }
    body = json.dumps({"inputs": [*inputs, dense]}).encode()

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
    monkeypatch.setattr(secret_files, "RELOAD_SECONDS", 0.0)
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
    monkeypatch.setattr(secret_files, "RELOAD_SECONDS", 0.0)
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
        with pytest.raises(RemoteError, match="send it in parts") as raised:
            ask(large)
        assert raised.value.code == "RESOURCE_EXHAUSTED"
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
