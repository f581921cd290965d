"""Conformance: the same store code against an S3 server that is not ours (moto's, where it is installed)."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megalith.gather import (
    FetchOptions,
    GatherPlan,
    Label,
    ObjectStore,
    OuterUpdate,
    Status,
    catch_up,
    open_object_store,
    peek,
    publish,
    run_window,
)
from megalith.storage.object_store import UPLOAD_PART_BYTES, StoreRequestError
from megalith.storage.retries import run_async
from tests.gather.support import RUN, peer_update, small_schema, weights

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
LIMIT = 60.0


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        make_bucket(endpoint, process)
        yield open_object_store(
            "s3://gather", endpoint=endpoint, access_key_id="key", secret_access_key="secret"
        )
    finally:
        process.kill()
        process.wait(30)


def make_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """Creates the bucket as soon as the server answers."""
    request = urllib.request.Request(f"{endpoint}/gather", method="PUT")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            with suppress(subprocess.TimeoutExpired):
                raise RuntimeError(f"moto_server ended with {process.wait(0.05)}") from None
    raise RuntimeError("moto_server did not start")


def read(store: ObjectStore, key: str, etag: str | None = None) -> bytes:
    pieces: list[bytes] = []
    run_async(store.get(key, lambda piece: pieces.append(bytes(piece)), etag=etag, timeout=LIMIT))
    return b"".join(pieces)


def status_of(work: Any) -> Status:
    with pytest.raises(StoreRequestError) as caught:
        run_async(work)
    return Status(caught.value.failure)


def test_the_five_verbs(store: ObjectStore, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(100_000)
    assert run_async(store.put("a/b", data, timeout=LIMIT))
    info = run_async(store.head("a/b", timeout=LIMIT))
    assert (info.size, read(store, "a/b", info.etag)) == (len(data), data)
    assert run_async(store.get_range("a/b", 7, 9, etag=info.etag, timeout=LIMIT)) == data[7:16]
    assert not run_async(store.put("a/b", b"x", create=True, timeout=LIMIT))
    assert run_async(store.put("a/b", b"y", timeout=LIMIT))
    assert status_of(store.get("a/b", lambda piece: None, etag=info.etag, timeout=LIMIT)) is Status.CHANGED
    assert status_of(store.head("a/none", timeout=LIMIT)) is Status.NOT_FOUND
    large = random.Random(2).randbytes(2 * UPLOAD_PART_BYTES + 5)
    (tmp_path / "large").write_bytes(large)
    assert run_async(store.put("a/large", tmp_path / "large", create=True, timeout=LIMIT))
    assert read(store, "a/large") == large
    assert [each.key for each in run_async(store.list("a", timeout=LIMIT))] == ["a/b", "a/large"]


def test_a_window_and_catching_up(store: ObjectStore) -> None:
    schema = small_schema()
    for uid in (1, 2, 3):
        done = publish(store, peer_update(schema, uid), Label(RUN, 5, uid))
        assert peek(store, done.key).digest == done.digest
    plan = GatherPlan(run=RUN, window=5, schema=schema.digest, primary=(1, 2, 3, 4), deadline=2.0)
    tensors, update = weights(), OuterUpdate(schema)
    report = run_window(
        plan, tensors, update, {"default": store}, artifacts=store, options=FetchOptions(spool_from=1)
    )
    assert report.result.uids == (1, 2, 3)
    assert report.result.records[4].status is Status.NOT_FOUND
    late, other = weights(), OuterUpdate(schema)
    catch_up(store, late, other, run=RUN, windows=[5])
    assert other.fingerprint(late).hash == update.fingerprint(tensors).hash
