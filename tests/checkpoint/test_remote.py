"""Checkpoints in an object store: the same calls, against a real S3 server and obstore's own stores."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith import checkpoint
from megalith.checkpoint import saved_rows
from megalith.errors import CheckpointError, InputError, MissingDependencyError, StoreError
from megalith.storage import object_store as remote_module
from megalith.storage.object_store import ObjectStore
from megalith.storage.store import LocalStore, open_store
from tests.checkpoint.support import Model, assert_same, state_of, train
from tests.gather.fault_server import FaultServer, ServerFault
from tests.storage.s3_server import KEYS, new_place, s3_server

pytest.importorskip("obstore")


def set_server(patch: pytest.MonkeyPatch, address: str) -> None:
    """Name a server in the environment."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true"}.items():
        patch.setenv(name, value)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL in that bucket."""
    set_server(monkeypatch, server)
    return new_place()


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """A store of each kind."""
    return ObjectStore(request.getfixturevalue("s3") if request.param == "s3" else "memory:///")


def loaded(place: Any) -> Model:
    model = Model(seed=8)
    checkpoint.load(model, place)
    return model


def test_save_delta_compact_reshard(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_rows, "PIECE_BYTES", 1000)
    model = Model()
    train(model, 1)
    checkpoint.save(model, store, progress={"step": 1})
    assert_same(state_of(loaded(store)), state_of(model))
    for seed in (2, 3):
        train(model, seed)
        checkpoint.save_delta(model, store)
        assert_same(state_of(loaded(store)), state_of(model))
    train(model, 4)
    checkpoint.async_save(model, store, delta=True).wait(60)
    assert len(store.folders()) == 4

    checkpoint.compact(store)
    assert len(store.folders()) == 1
    assert_same(state_of(loaded(store)), state_of(model))
    train(model, 5)
    checkpoint.save_delta(model, store)

    checkpoint.reshard(store, tmp_path / "here", num_shards=3)
    assert_same(state_of(loaded(tmp_path / "here")), state_of(model))
    back = store.inside("back")
    checkpoint.reshard(tmp_path / "here", back, num_shards=2, dist_type="hash_roundrobin")
    assert_same(state_of(loaded(back)), state_of(model))
    checkpoint.save(model, store)
    assert store.folders() == ["back", *(name for name in store.folders() if name.startswith("data-"))]
    assert len(store.folders()) == 2


def test_a_rotation(store: ObjectStore) -> None:
    rotation = checkpoint.Rotation(store, keep_last=2, keep_every=4)
    model = Model()
    assert rotation.latest() is None
    for step in range(7):
        train(model, step)
        (rotation.async_save(model, step).wait(60) if step % 2 else rotation.save(model, step))
    assert rotation.steps() == [0, 4, 5, 6]
    assert rotation.latest() == f"{store.where}/step-000000000006"
    assert_same(state_of(loaded(store.inside("step-000000000006"))), state_of(model))


def test_options_win_over_the_environment(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KEYS, "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    config = {key.lower().removeprefix("aws_"): value for key, value in KEYS.items()}
    options = {"config": {"endpoint": server, **config}, "client_options": {"allow_http": True}}
    store, model = ObjectStore("s3://bucket/options", **options), Model()  # type: ignore[arg-type]
    checkpoint.save(model, store)
    assert_same(state_of(loaded(store)), state_of(model))


def test_each_file_is_fetched_once(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    train(model, 1)
    manifest = checkpoint.save(model, s3)
    reads: list[str] = []
    real = ObjectStore.read

    def counted(self: ObjectStore, name: str, size: int, start: int = 0) -> Any:
        reads.append(name)
        return real(self, name, size, start)

    monkeypatch.setattr(ObjectStore, "read", counted)
    assert_same(state_of(loaded(s3 + "/")), state_of(model))
    assert sorted(reads) == sorted(file.path for file in manifest.all_files())


def test_large_files_are_uploaded_in_parts(s3: str, tmp_path: Path) -> None:
    store = ObjectStore(s3)
    content = bytes(range(256)) * (12 << 12)  # 12 MiB, more than one request
    entry = store.write("a", [content[:100], content[100:]])
    (tmp_path / "b").write_bytes(content)
    store.upload("b", tmp_path / "b")
    for name in "ab":
        assert store.size(name) == entry.bytes == len(content)
        assert bytes(store.read(name, len(content)).numpy()) == content
    assert bytes(store.read("a", 5, 1 << 20).numpy()) == content[1 << 20 :][:5]


# ---- errors


def test_missing_files_raise(store: ObjectStore) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoint.load(Model(), store)
    with pytest.raises(FileNotFoundError):
        store.size("x")
    with pytest.raises(FileNotFoundError):
        store.read("x", 1)
    store.remove("x")
    assert store.folders() == []


def test_damage_is_found_before_a_table_is_cleared_and_the_error_has_the_url(store: ObjectStore) -> None:
    model = Model()
    train(model, 1)
    manifest = checkpoint.save(model, store)
    file = manifest.tables()["embeddings.item"][0].pieces[0].file
    other = Model(seed=3)
    train(other, 2)
    before = state_of(other)
    content = bytes(store.read(file.path, file.bytes).numpy())
    for spoiled, words in (
        (content[:-1], "bytes, but its manifest states"),
        (content[:-1] + b"x", "is damaged"),
        (None, "cannot be read: the object does not exist"),
    ):
        store.remove(file.path)
        if spoiled is not None:
            store.write(file.path, [spoiled])
        with pytest.raises(CheckpointError, match=words) as caught:
            checkpoint.load(other, store)
        assert f"{store.where}/{file.path}" in str(caught.value)
        assert_same(state_of(other), before)


def test_a_prefix_is_not_a_part_of_a_name(store: ObjectStore) -> None:
    for name in ("data-a/x", "data-ab/x", "data-a/y/z", "data-a.json"):
        store.write(name, [b"1"])
    store.remove("data-a")
    assert store.folders() == ["data-ab"]
    assert store.size("data-a.json") == 1
    store.remove("data-a.json")
    with pytest.raises(FileNotFoundError):
        store.size("data-a.json")


def test_reading_past_the_end_raises(store: ObjectStore) -> None:
    store.write("x", [b"abc", b"", b"def"])
    assert bytes(store.read("x", 2, 3).numpy()) == b"de"
    assert store.read("x", 0).numel() == 0
    for size, start in ((7, 0), (1, 6)):
        with pytest.raises(OSError, match=r"."):
            store.read("x", size, start)
    with pytest.raises(StoreError, match="more than 5 bytes"):
        store.read_whole("x", 5)


def test_servers_that_do_not_answer_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "RETRY_SECONDS", 0.2)
    monkeypatch.setattr(remote_module, "READ_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections, and no more
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        set_server(monkeypatch, address)
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoint.load(Model(), "s3://bucket/silent")
    with pytest.raises(StoreError, match=r"s3://bucket/nobody: writing .* failed"):
        checkpoint.save(Model(), "s3://bucket/nobody")
    with pytest.raises(CheckpointError, match=r"nobody/manifest.json cannot be read"):
        checkpoint.load(Model(), "s3://bucket/nobody")


def test_a_failed_request_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer() as busy:
        set_server(monkeypatch, busy.endpoint)
        busy.fail("x/manifest.json", ServerFault("status", "*", times=2))
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            checkpoint.load(Model(), f"s3://{busy.bucket}/x")
        assert [request.status for request in busy.log][:3] == [503, 503, 404]


def test_addresses_that_cannot_be_opened_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not name an object store"):
        checkpoint.load(Model(), "nonsense://x")
    assert isinstance(open_store("file:///tmp"), LocalStore)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.\[remote\]'"):
        checkpoint.load(Model(), "s3://bucket/x")
