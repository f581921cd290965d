"""What the commands brought to light in saving and loading."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import SGD, EmbeddingCollection, Feature, TableConfig, checkpoint
from megalith.errors import CheckpointError


def test_progress_is_saved_as_it_was_when_the_save_began(tmp_path: Path) -> None:
    model = EmbeddingCollection([TableConfig("t", dim=1, optimizer=SGD(0.1))], [Feature("f", "t")])
    model.shards.assign({"t": (torch.tensor([1]), torch.ones(1, 1))})
    progress: dict[str, Any] = {"position": {"row": 7}}
    gate = threading.Event()

    def hold(rows: int) -> None:
        gate.wait(60)

    handle = checkpoint.async_save(model, tmp_path, progress=progress, on_rows=hold)
    progress["position"]["row"] = 8
    gate.set()

    assert handle.wait(60).progress == {"position": {"row": 7}}
    assert checkpoint.read_manifest(tmp_path).progress == {"position": {"row": 7}}


class _Empty(BaseHTTPRequestHandler):
    """An object store in which nothing is."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_without_tls_is_asked_where_the_environment_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "here",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            checkpoint.read_manifest("s3://bucket/model")
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
