"""An S3 server that is not ours: moto's, on loopback with one bucket."""

from __future__ import annotations

import logging
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megalith.storage.object_store import ObjectStore, open_object_store

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """Run the server; yield its address. The test is skipped where moto is not installed."""
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    address = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=30)
    try:
        yield address
    finally:
        running.stop()


def new_place() -> str:
    """A URL in the bucket that no other test uses."""
    return f"s3://bucket/{uuid.uuid4().hex}"


def open_s3(address: str) -> ObjectStore:
    return open_object_store(new_place(), endpoint=address, access_key_id="test", secret_access_key="test")
