"""Asynchronous requests: the verbs on every kind of store, time limits, and the kind of each failure."""

from __future__ import annotations

import asyncio
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import InputError, MissingDependencyError, StoreError
from megalith.storage import retries
from megalith.storage.object_store import (
    UPLOAD_PART_BYTES,
    ObjectStore,
    RequestFailure,
    StoreRequestError,
    open_object_store,
)
from megalith.storage.retries import backoff, persist, run_async
from tests.gather.fault_server import FaultServer, ServerFault
from tests.storage.s3_server import open_s3, s3_server

pytest.importorskip("obstore")
LIMIT = 20.0
DATA = bytes(range(256)) * 20


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as running:
        yield running


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["memory", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        return open_s3(request.getfixturevalue("s3"))
    return open_object_store("memory://" if request.param == "memory" else tmp_path / "new" / "store")


def status_of(work: Any) -> RequestFailure:
    with pytest.raises(StoreRequestError) as caught:
        run_async(work)
    return caught.value.failure


def got(store: ObjectStore, key: str, **options: Any) -> bytes:
    pieces: list[bytes] = []
    run_async(store.get(key, lambda piece: pieces.append(bytes(piece)), timeout=LIMIT, **options))
    return b"".join(pieces)


def test_objects_come_back(store: ObjectStore) -> None:
    assert run_async(store.put("a/b/c.bin", DATA, timeout=LIMIT))
    info = run_async(store.head("a/b/c.bin", timeout=LIMIT))
    assert (info.key, info.size) == ("a/b/c.bin", len(DATA))
    assert info.last_modified.tzinfo is UTC
    assert got(store, "a/b/c.bin") == DATA
    assert got(store, "a/b/c.bin", etag=info.etag) == DATA
    assert run_async(store.get_range("a/b/c.bin", 5, 7, timeout=LIMIT)) == DATA[5:12]
    assert run_async(store.put("a/b/c.bin", b"new", timeout=LIMIT))
    assert got(store, "a/b/c.bin") == b"new"


def test_a_missing_object_is_not_found(store: ObjectStore) -> None:
    assert status_of(store.head("a/none", timeout=LIMIT)) is RequestFailure.NOT_FOUND
    assert status_of(store.get("a/none", lambda piece: None, timeout=LIMIT)) is RequestFailure.NOT_FOUND
    assert status_of(store.get_range("a/none", 0, 1, timeout=LIMIT)) is RequestFailure.NOT_FOUND


def test_a_replaced_object_is_changed(store: ObjectStore) -> None:
    run_async(store.put("k", DATA, timeout=LIMIT))
    old = run_async(store.head("k", timeout=LIMIT)).etag
    run_async(store.put("k", DATA[:-1], timeout=LIMIT))
    assert status_of(store.get("k", lambda piece: None, etag=old, timeout=LIMIT)) is RequestFailure.CHANGED
    assert status_of(store.get_range("k", 0, 4, etag=old, timeout=LIMIT)) is RequestFailure.CHANGED


def test_a_range_past_the_end_is_no_range(store: ObjectStore) -> None:
    run_async(store.put("k", b"0123456789", timeout=LIMIT))
    assert status_of(store.get_range("k", 5, 10, timeout=LIMIT)) is RequestFailure.STORE_ERROR


def test_create_writes_once(store: ObjectStore) -> None:
    assert run_async(store.put("k", b"first", create=True, timeout=LIMIT))
    assert not run_async(store.put("k", b"second", create=True, timeout=LIMIT))
    assert got(store, "k") == b"first"


def test_a_file_is_uploaded_in_parts(store: ObjectStore, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(2 * UPLOAD_PART_BYTES + 17)
    path = tmp_path / "large"
    path.write_bytes(data)
    assert run_async(store.put("large", path, create=True, timeout=60))
    assert got(store, "large") == data
    assert not run_async(store.put("large", path, create=True, timeout=60))


def test_list_goes_by_path_parts(store: ObjectStore) -> None:
    for key in ("p/2", "p/1", "p/q/3", "pp/4"):
        run_async(store.put(key, key.encode(), timeout=LIMIT))
    found = run_async(store.list("p", timeout=LIMIT))
    assert [(each.key, each.size) for each in found] == [("p/1", 3), ("p/2", 3), ("p/q/3", 5)]
    assert run_async(store.list("none", timeout=LIMIT)) == []


def test_keys_that_are_no_paths_are_refused(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match=r"head of '\.\./x'"):
        run_async(store.head("../x", timeout=LIMIT))


# ---- faults


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (ServerFault("status", code=500), RequestFailure.STORE_ERROR),
        (ServerFault("status", code=503), RequestFailure.STORE_ERROR),
        (ServerFault("status", code=429), RequestFailure.STORE_ERROR),
        (ServerFault("status", code=401), RequestFailure.DENIED),
        (ServerFault("status", code=403), RequestFailure.DENIED),
        (ServerFault("status", code=404), RequestFailure.NOT_FOUND),
        (ServerFault("status", code=412), RequestFailure.CHANGED),
        (ServerFault("reset"), RequestFailure.STORE_ERROR),
        (ServerFault("truncate"), RequestFailure.STORE_ERROR),
    ],
    ids=lambda value: str(value),
)
def test_faults_have_a_status(server: FaultServer, fault: ServerFault, status: RequestFailure) -> None:
    store = server.open()
    server.put("k", DATA)
    server.fail("k", fault)
    assert status_of(store.get("k", lambda piece: None, timeout=LIMIT)) is status
    assert got(store, "k") == DATA
    assert [r.method for r in server.log] == ["GET", "GET"]
    assert server.downloads() == {"k": 1}


def test_silence_is_a_timeout(server: FaultServer) -> None:
    store = server.open()
    server.put("k", DATA)
    server.fail("k", ServerFault("stall", "*", times=2))
    assert status_of(store.head("k", timeout=0.05)) is RequestFailure.TIMEOUT
    assert status_of(store.get("k", lambda piece: None, timeout=0.05)) is RequestFailure.TIMEOUT


def test_a_slow_body_is_slow() -> None:
    with FaultServer(bytes_per_second=1000) as server:
        store = server.open()
        server.put("k", bytes(100_000))
        assert status_of(store.get("k", lambda piece: None, timeout=0.2)) is RequestFailure.SLOW


def test_nobody_listening_is_a_store_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        store = open_object_store("s3://gather", endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert status_of(store.head("k", timeout=LIMIT)) is RequestFailure.STORE_ERROR


def test_errors_of_the_sink_pass_through() -> None:
    store = open_object_store("memory://")
    run_async(store.put("k", DATA, timeout=LIMIT))

    def full(piece: memoryview) -> None:
        raise OSError(28, "no space left on device")

    with pytest.raises(OSError, match="no space"):
        run_async(store.get("k", full, timeout=LIMIT))


def test_persist_repeats_what_another_try_may_cure(server: FaultServer) -> None:
    store = server.open()
    server.put("k", DATA)
    server.fail("k", ServerFault("status", "HEAD", times=2), ServerFault("reset", "HEAD"))
    info = run_async(persist(lambda limit: store.head("k", timeout=limit), deadline=30, rng=random.Random(1)))
    assert info.size == len(DATA)
    assert [r.status for r in server.log] == [503, 503, 0, 200]
    missing = persist(lambda limit: store.head("none", timeout=limit), deadline=30)
    assert status_of(missing) is RequestFailure.NOT_FOUND


def test_persist_ends_at_its_deadline(server: FaultServer) -> None:
    store = server.open()
    server.fail("k", ServerFault("status", "HEAD", times=10_000))
    late = persist(lambda limit: store.head("k", timeout=limit), deadline=0.3, rng=random.Random(1))
    assert status_of(late) is RequestFailure.STORE_ERROR
    assert 1 <= len(server.log) <= 5


def test_pauses_grow_and_are_jittered() -> None:
    pauses = list(islice(backoff(random.Random(3), first=1.0, most=8.0), 6))
    for pause, base in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.5 * base <= pause <= 1.5 * base
    assert pauses == list(islice(backoff(random.Random(3), first=1.0, most=8.0), 6))


def test_wait_works_inside_a_running_loop() -> None:
    async def inner() -> int:
        return 7

    async def outer() -> int:
        return run_async(inner())

    assert asyncio.run(outer()) == 7


def test_urls(tmp_path: Path) -> None:
    store = open_object_store(f"file://{tmp_path}/s")
    run_async(store.put("a/b", b"x", timeout=LIMIT))
    assert (tmp_path / "s" / "a" / "b").read_bytes() == b"x"
    assert run_async(open_object_store("memory://").list("", timeout=LIMIT)) == []
    for url in ("http://x", "s3://", "file://", ""):
        with pytest.raises(InputError, match="store"):
            open_object_store(url)
    with pytest.raises(InputError, match="must be given together"):
        open_object_store("s3://bucket", access_key_id="a")


@pytest.mark.parametrize("prefix", ["peers/7", "run#1", "a?b", "a b", "50%25"])
def test_a_prefix_is_not_parsed_as_a_url(server: FaultServer, prefix: str) -> None:
    store = server.open(prefix)
    run_async(store.put("x", b"1", timeout=LIMIT))
    assert [request.key for request in server.log] == [f"{prefix}/x"]
    assert run_async(store.head("x", timeout=LIMIT)).size == 1


def test_the_environment_applies_and_options_win(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert run_async(open_object_store(f"s3://{server.bucket}").put("a", b"1", timeout=LIMIT))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert got(server.open(), "a") == b"1"


def test_requests_are_signed_if_there_are_keys(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(**options: str | bool) -> str:
        store = open_object_store("s3://bucket", endpoint=server.endpoint, **options)  # type: ignore[arg-type]
        assert status_of(store.head("k", timeout=LIMIT)) is RequestFailure.NOT_FOUND
        return server.log[-1].authorization.partition("Credential=")[2]

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert ask() == ""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert re.match(r"mine/\d+/us-east-1/s3/", ask())
    assert ask(anonymous=True) == ""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert re.match(r"mine/\d+/eu-west-1/s3/", ask())
    other = ask(access_key_id="other", secret_access_key="secret", region="us-west-2")
    assert re.match(r"other/\d+/us-west-2/s3/", other)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.\[remote\]'"):
        open_object_store("memory://")


def test_importing_gather_needs_no_obstore() -> None:
    code = "import sys; sys.modules['obstore'] = None; import megalith.gather; print('fine')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("notebook", [False, True])
def test_requests_that_do_not_end_are_an_error_with_their_name(
    notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "GRACE_SECONDS", 0.1)

    async def stuck() -> None:
        await asyncio.Event().wait()

    def call() -> None:
        with pytest.raises(StoreError, match=r"^listing 'x': not finished after 0\.2 s$"):
            run_async(stuck(), "listing 'x'", deadline=0.1)

    async def cell() -> None:
        call()

    asyncio.run(cell()) if notebook else call()
