"""Discovery without ZooKeeper: names, addresses, lists of servers, files of servers."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.serving.discovery import (
    Discovery,
    FileDiscovery,
    Replica,
    ServiceName,
    StaticDiscovery,
    ZooKeeperDiscovery,
    open_discovery,
)
from megalith.serving.discovery.contract import check_address, is_wildcard
from megalith.serving.discovery.server_list import parse_services

LIMIT = 30.0

# ---- names and addresses


@pytest.mark.parametrize("address", ["localhost:8500", "10.0.0.1:1", "a-b.c_d:65535", "[::1]:8500"])
def test_addresses(address: str) -> None:
    assert check_address(address) == address


NO_ADDRESSES: list[Any] = ["", "host", "host:", ":1", "host:0", "host:65536", "host:1x", "host:\u0661"]
NO_ADDRESSES += ["a b:1", "::1:8500", "[::1]", "a:1/b", "a\n:1", "a" * 300 + ":1", "http://a:1", "dns:///a:1"]
NO_ADDRESSES += ["-x:1", "unix:8500", "unix:/tmp/x", "DNS:1", "xds:1", None, 8500, ["a:1"]]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_grpc_would_take_for_something_else_is_no_address(address: Any) -> None:
    with pytest.raises(InputError, match=r"target: .* is not an address; write host:port"):
        check_address(address, "target")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a:b", "a\nb", "\0", "x" * 256, None, 3])
def test_names_that_would_lead_elsewhere_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match="model name"):
        ServiceName(name, "entry")
    with pytest.raises(InputError, match="part of a model"):
        ServiceName("movies", name)


def test_wildcards() -> None:
    assert is_wildcard("0.0.0.0:8500")
    assert is_wildcard("[::]:8500")
    assert not is_wildcard("[::1]:8500")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


# ---- what every discovery does


@pytest.fixture(params=["static", "file"])
def discovery(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Discovery]:
    made: Discovery
    made = StaticDiscovery({}) if request.param == "static" else FileDiscovery(tmp_path / "servers.json")
    with made:
        yield made


def addresses(discovery: Discovery, service: str) -> list[str]:
    return [replica.address for replica in discovery.replicas(service)]


def test_servers_come_and_go(discovery: Discovery) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("a callback fails")

    seen: list[list[str]] = []
    discovery.watch("movies:ps_0", fails)
    watch = discovery.watch("movies:ps_0", lambda replicas: seen.append([each.address for each in replicas]))

    discovery.register("movies:ps_0", Replica("b:1", replica_id=1))
    discovery.register("movies:ps_0", Replica("c:1", replica_id=0))
    discovery.register("movies:ps_0", Replica("a:1", replica_id=1, idc="lf", cluster="blue"))
    discovery.register("movies:ps_1", Replica("d:1"))
    discovery.unregister("movies:ps_0", "b:1")
    discovery.unregister("movies:ps_0", "b:1")
    watch.cancel()
    watch.cancel()
    discovery.unregister("movies:ps_0", "c:1")

    assert seen == [[], ["b:1"], ["c:1", "b:1"], ["c:1", "a:1", "b:1"], ["c:1", "a:1"]]
    assert discovery.replicas("movies:ps_0") == (Replica("a:1", 1, "lf", "blue"),)
    assert addresses(discovery, "movies:ps_1") == ["d:1"]
    assert addresses(discovery, "books:ps_0") == []


def test_registering_again_replaces(discovery: Discovery) -> None:
    discovery.register("movies:entry", Replica("a:1", replica_id=1))
    discovery.register("movies:entry", Replica("a:1", replica_id=2))
    assert discovery.replicas("movies:entry") == (Replica("a:1", replica_id=2),)


def test_waiting_ends_when_there_are_enough(discovery: Discovery) -> None:
    waiting = threading.Event()
    found: queue.SimpleQueue[object] = queue.SimpleQueue()

    def wait() -> None:
        waiting.set()
        found.put(discovery.wait("movies:entry", count=2, timeout=LIMIT))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waiting.wait(LIMIT)
    discovery.register("movies:entry", Replica("a:1"))
    discovery.register("movies:entry", Replica("b:1"))
    assert found.get(timeout=LIMIT) == (Replica("a:1"), Replica("b:1"))
    with pytest.raises(DiscoveryError, match="movies:entry: 2 of 3 replicas after 0 seconds"):
        discovery.wait("movies:entry", count=3, timeout=0)


def test_sync_targets_are_the_addresses_of_a_part(discovery: Discovery) -> None:
    discovery.register("movies:ps_1", Replica("a:1"))
    with pytest.raises(UsageError, match="call subscribe_model first"):
        discovery.get_sync_targets("ps_1")
    discovery.subscribe_model("movies")
    discovery.subscribe_model("movies")
    assert discovery.get_sync_targets("ps_1") == ("movies:ps_1", ["a:1"])
    assert discovery.get_sync_targets("ps_2") == ("movies:ps_2", [])
    with pytest.raises(UsageError, match="subscribed to model 'movies' already, not to 'books'"):
        discovery.subscribe_model("books")


def test_names_of_services_are_checked(discovery: Discovery) -> None:
    for service in ("movies", "movies:", ":entry", "movies:a:b", "mo/vies:entry"):
        with pytest.raises(InputError):
            discovery.register(service, Replica("a:1"))
        with pytest.raises(InputError):
            discovery.replicas(service)


def test_replicas_are_checked() -> None:
    for fields in (
        {"address": "x"},
        {"idc": "a:b"},
        {"cluster": ""},
        {"replica_id": -2},
        {"replica_id": 2**63},
    ):
        with pytest.raises(InputError):
            Replica(**{"address": "a:1"} | fields)  # type: ignore[arg-type]


# ---- a list of servers


def test_a_plain_list_answers_for_every_service() -> None:
    discovery = StaticDiscovery(["b:1", Replica("a:1")])
    assert addresses(discovery, "movies:entry") == ["a:1", "b:1"]
    assert addresses(discovery, "books:ps_0") == ["a:1", "b:1"]
    discovery.register("books:ps_0", Replica("c:1"))
    assert addresses(discovery, "books:ps_0") == ["a:1", "b:1", "c:1"]
    assert addresses(discovery, "movies:entry") == ["a:1", "b:1"]


def test_lists_by_service_answer_for_theirs() -> None:
    discovery = StaticDiscovery({"movies:entry": ["a:1"], "movies:ps_0": ["b:1"]})
    assert addresses(discovery, "movies:entry") == ["a:1"]
    assert addresses(discovery, "movies:ps_0") == ["b:1"]


@pytest.mark.parametrize("servers", ["a:1", ["a"], [3], {"movies": ["a:1"]}, {"movies:entry": ["a"]}])
def test_lists_are_checked(servers: Any) -> None:
    with pytest.raises(InputError):
        StaticDiscovery(servers)


# ---- a file of servers


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    as_json, as_toml = tmp_path / "servers.json", tmp_path / "servers.toml"
    servers = ["b:1", {"address": "a:1", "replica_id": 3, "idc": "lf", "cluster": "blue"}]
    as_json.write_text(json.dumps({"services": {"movies:entry": servers}}))
    as_toml.write_text(
        '[services]\n"movies:entry" = ['
        '"b:1", {address = "a:1", replica_id = 3, idc = "lf", cluster = "blue"}]\n'
    )
    expected = (Replica("b:1"), Replica("a:1", 3, "lf", "blue"))
    assert FileDiscovery(as_json).replicas("movies:entry") == expected
    assert FileDiscovery(as_toml).replicas("movies:entry") == expected
    with pytest.raises(UsageError, match="TOML files are read-only"):
        FileDiscovery(as_toml).register("movies:entry", Replica("c:1"))


def write(path: Path, *servers: str) -> None:
    """Writes another file and renames it, as a program should."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"services": {"movies:entry": servers}}))
    part.replace(path)


def watch_until(discovery: Discovery) -> Callable[[list[str]], None]:
    """Watches; returns a function that waits until the watch was called with these addresses."""
    changes: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    discovery.watch("movies:entry", lambda replicas: changes.put([each.address for each in replicas]))

    def until(expected: list[str]) -> None:
        while changes.get(timeout=LIMIT) != expected:
            pass

    return until


def test_a_rewritten_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    with FileDiscovery(path, interval=0.01) as discovery:
        until = watch_until(discovery)
        until([])
        write(path, "a:1")
        until(["a:1"])
        before = path.stat()
        write(path, "b:1")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        until(["b:1"])


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "servers.json"
    write(path, "a:1")
    discovery = FileDiscovery(path)
    assert addresses(discovery, "movies:entry") == ["a:1"]

    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING, "megalith.serving.discovery"):
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            assert addresses(discovery, "movies:entry") == ["a:1"]
        caplog.clear()
        for _ in range(3):
            path.write_bytes(b"{")
            assert addresses(discovery, "movies:entry") == ["a:1"]
    assert len([each for each in caplog.records if "keeping the previous list" in each.message]) <= 1
    path.unlink()
    assert addresses(discovery, "movies:entry") == ["a:1"]
    write(path)
    assert addresses(discovery, "movies:entry") == []


def test_a_bad_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_text('{"services": {"movies:entry": ["nowhere"]}}')
    with pytest.raises(
        InputError, match=r"servers.json: 'movies:entry': address: 'nowhere' is not an address"
    ):
        FileDiscovery(path).start()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[]", "must be a table with the key"),
        ("{}", "must be a table with the key"),
        ('{"services": []}', "must be a table with the key"),
        ('{"services": {"movies": []}}', "must be model:part"),
        ('{"services": {"movies:entry": "a:1"}}', "must be a list of servers"),
        ('{"services": {"movies:entry": [3]}}', "neither an address nor a table"),
        ('{"services": {"movies:entry": [{}]}}', "neither an address nor a table"),
        ('{"services": {"movies:entry": [{"address": "a:1", "weight": 1}]}}', "'weight' is unknown"),
        ('{"services": {"movies:entry": [{"address": "a:1", "replica_id": true}]}}', "replica_id is True"),
        ('{"services": {"movies:entry": [{"address": 3}]}}', "address is 3, not a str"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_files_say_what_is_wrong(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        parse_services(text.encode(), Path("servers.json"))


@given(st.binary(max_size=40) | JSON.map(lambda found: json.dumps({"services": found}).encode()))
def test_any_bytes_are_a_file_or_refused(data: bytes) -> None:
    for name in ("a.json", "a.toml"):
        try:
            listed = parse_services(data, Path(name))
        except InputError:
            continue
        assert all(isinstance(each, Replica) for servers in listed.values() for each in servers)


def test_a_file_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(b" " * (4 * 2**20 + 1))
    with pytest.raises(InputError, match="more than 4194304 bytes"):
        FileDiscovery(path).start()


def test_servers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_text('{"comment": "kept", "services": {"movies:entry": ["z:1"]}}')
    discoveries = [FileDiscovery(path) for _ in range(8)]
    threads = [
        threading.Thread(target=each.register, args=("movies:entry", Replica(f"a{k}:1")), daemon=True)
        for k, each in enumerate(discoveries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert addresses(discoveries[0], "movies:entry") == [*(f"a{k}:1" for k in range(8)), "z:1"]

    for each in discoveries:
        each.stop()

    assert json.loads(path.read_text()) == {"comment": "kept", "services": {"movies:entry": ["z:1"]}}


def test_another_writer_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.serving.discovery.server_list.LOCK_SECONDS", 0.05)
    with (tmp_path / ".servers.json.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DiscoveryError, match=r"servers.json.lock: another process has held the lock"):
            FileDiscovery(tmp_path / "servers.json").register("movies:entry", Replica("a:1"))


def test_a_read_that_hangs_delays_nothing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megalith.serving.discovery.server_list.LOCK_SECONDS", 0.05)
    path, pipe = tmp_path / "servers.json", tmp_path / "pipe"
    discovery = FileDiscovery(path, interval=0.01)
    discovery.start()
    discovery.register("movies:entry", Replica("a:1"))
    os.mkfifo(pipe)  # like a network mount that does not answer
    pipe.replace(path)
    writer = None
    end = time.monotonic() + LIMIT
    while writer is None:
        assert time.monotonic() < end
        with suppress(OSError):  # until the thread has opened it
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(DiscoveryError, match=r"servers.json: another thread has read it for 0.05 s"):
            discovery.replicas("movies:entry")
        discovery.stop()
        assert "a:1 is still listed" in caplog.text
        assert "a read has not ended 0.05 s after the stop" in caplog.text
    finally:
        os.close(writer)


def test_a_file_in_no_folder_is_an_error(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path / "missing" / "servers.json")
    assert addresses(discovery, "movies:entry") == []
    with pytest.raises(DiscoveryError, match="cannot be written: No such file"):
        discovery.register("movies:entry", Replica("a:1"))


def test_a_stopped_file_discovery_stays_stopped(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path / "servers.json", interval=60)
    discovery.start()
    discovery.start()
    thread = threading.Thread(target=discovery.stop, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()
    with pytest.raises(UsageError, match="create a new one"):
        discovery.start()


@pytest.mark.parametrize("interval", [0, -1, 61, float("nan")])
def test_the_interval_is_bounded(interval: float) -> None:
    with pytest.raises(InputError, match=r"interval must be 0.01 to 60 seconds"):
        FileDiscovery("servers.json", interval=interval)


# ---- addresses of discoveries


def test_discoveries_are_opened_by_address(tmp_path: Path) -> None:
    static = open_discovery("static:a:1, b:1,")
    assert addresses(static, "movies:entry") == ["a:1", "b:1"]
    for url in (f"file:{tmp_path}/s.json", f"file://{tmp_path}/s.json"):
        file = open_discovery(url, interval=5)
        assert isinstance(file, FileDiscovery)
        assert file.path == tmp_path / "s.json"
    for url, root in (("zk://h:1,[::1]:2/demo/x/", "demo/x"), ("zk://h:1", "megalith")):
        zookeeper = open_discovery(url, session_seconds=5)
        assert isinstance(zookeeper, ZooKeeperDiscovery)
        assert zookeeper.root == root
        zookeeper.stop()


NO_DISCOVERIES = ["", "a:1", "http://a:1", "static:", "static:a", "file:", "zk:a:1/demo", "zk:///demo"]
NO_DISCOVERIES += ["zk://a:1/de mo:x", "zk://a:x/demo", "zk://a:1//x", "zk://a:1/../x"]


@pytest.mark.parametrize("url", NO_DISCOVERIES)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InputError):
        open_discovery(url)


@pytest.mark.parametrize("option", ["session_seconds", "poll_seconds", "request_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("nan")])
def test_times_of_zookeeper_are_checked(option: str, seconds: float) -> None:
    with pytest.raises(InputError, match=f"{option} must be above 0"):
        ZooKeeperDiscovery("a:1", **{option: seconds})


def test_without_kazoo_the_error_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['kazoo'] = None\n"
        "from megalith.errors import MissingDependencyError\n"
        "from megalith.serving.discovery import open_discovery\n"
        "open_discovery('static:a:1')\n"
        "try:\n"
        "    open_discovery('zk://a:1/demo')\n"
        "except MissingDependencyError as error:\n"
        "    assert \"pip install '.[discovery]'\" in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
        "assert not any(name.startswith(('google.protobuf', 'grpc')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
