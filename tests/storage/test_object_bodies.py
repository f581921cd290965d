"""Bodies and objects: one version is downloaded or read, and memory is counted until it is released."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.storage.bodies import (
    FileBody,
    Ledger,
    MemoryBody,
    MemoryWriter,
    ObjectBody,
    SpoolWriter,
    download_body,
    put_body,
)
from megalith.storage.object_store import ObjectStore, RequestFailure, StoreRequestError, open_object_store
from megalith.storage.retries import run_async

pytest.importorskip("obstore")
DATA = bytes(range(256)) * 8


@pytest.fixture
def store() -> ObjectStore:
    made = open_object_store("memory://")
    assert run_async(put_body(made, "x", MemoryBody(DATA), deadline=5.0))
    return made


def test_an_object_is_read_by_ranges(store: ObjectStore) -> None:
    body = ObjectBody(store, "x", deadline=5.0)
    assert body.size == len(DATA)
    assert body.read(250, 10) == DATA[250:260]
    assert (body.read(3, 0), body.source()) == (b"", DATA)
    body.close()


def test_another_version_is_not_mixed_in(store: ObjectStore) -> None:
    body = ObjectBody(store, "x", deadline=5.0)
    run_async(put_body(store, "x", MemoryBody(DATA[::-1]), deadline=5.0))
    with pytest.raises(StoreRequestError) as caught:
        body.read(0, 10)
    assert caught.value.failure is RequestFailure.CHANGED
    with pytest.raises(StoreRequestError, match="does not exist"):
        ObjectBody(store, "none", deadline=5.0)


def test_a_spooled_body_is_uploaded_from_its_file(store: ObjectStore, tmp_path: Path) -> None:
    spool = SpoolWriter(tmp_path)
    spool.write(DATA)
    body = spool.finish()
    assert run_async(put_body(store, "y", body, create=True, deadline=5.0))
    assert not run_async(put_body(store, "y", body, create=True, deadline=5.0))
    assert ObjectBody(store, "y").source() == DATA
    body.close()


@pytest.mark.parametrize("ranges", [1, 3])
def test_a_download_ends_in_a_body_or_in_nothing(store: ObjectStore, tmp_path: Path, ranges: int) -> None:
    info = run_async(store.head("x", timeout=5.0))
    body = run_async(download_body(store, info, SpoolWriter(tmp_path), deadline=5.0, ranges=ranges))
    assert isinstance(body, FileBody)
    assert body.read(0, body.size) == DATA
    body.close()
    run_async(put_body(store, "x", MemoryBody(b"other"), deadline=5.0))
    ledger = Ledger(len(DATA), "test")
    for writer in (SpoolWriter(tmp_path), MemoryWriter(len(DATA), ledger)):
        with pytest.raises(StoreRequestError, match="replaced"):
            run_async(download_body(store, info, writer, deadline=5.0))
    assert (ledger.used, ledger.peak, list(tmp_path.iterdir())) == (0, len(DATA), [])


def test_memory_is_counted_until_a_body_is_closed(store: ObjectStore) -> None:
    info, ledger = run_async(store.head("x", timeout=5.0)), Ledger(1 << 20, "test")
    body = run_async(download_body(store, info, MemoryWriter(info.size, ledger), deadline=5.0))
    assert (body.read(0, body.size), ledger.used) == (DATA, len(DATA))
    body.close()
    body.close()
    assert ledger.used == 0
