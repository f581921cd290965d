"""Discovery in a real ZooKeeper: what is written there, what is found, and what survives its failures."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import DiscoveryError, UsageError
from megalith.serving.discovery import Replica, ZooKeeperDiscovery
from tests.forked import Forked
from tests.serving.zookeeper import (
    LIMIT,
    Cable,
    Changes,
    ZooKeeper,
    node_changes,
    opening,
    root,
    within_limit,
    zookeeper,
)

__all__ = ["root", "zookeeper"]
Open = Callable[..., ZooKeeperDiscovery]


@pytest.fixture
def opened(zookeeper: ZooKeeper, root: str) -> Iterator[Open]:
    with opening(ZooKeeperDiscovery, hosts=zookeeper.hosts, root=root) as opened:
        yield opened


def watched(discovery: ZooKeeperDiscovery, service: str) -> Changes:
    changes = Changes()
    discovery.watch(service, changes)
    return changes


def watched_server(opened: Open, **options: Any) -> tuple[ZooKeeperDiscovery, ZooKeeperDiscovery, Changes]:
    """A registered server, a client, and what the client's watch has seen since."""
    server, client = opened(**options), opened(**options)
    server.register("movies:entry", Replica("10.0.0.1:8500"))
    changes = watched(client, "movies:entry")
    changes.until_addresses("10.0.0.1:8500")
    return server, client, changes


# ---- what is written


def test_a_registration_is_nodes_that_monolith_reads(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    opened(container_id="asdf").register("movies:ps_1", Replica("10.0.0.1:8500", idc="lf", cluster="blue"))

    with zookeeper.client() as client:
        data, stat = client.get(f"/{root}/container_service/blue:asdf")
        assert json.loads(data) == {
            "grpc": "10.0.0.1:8500",
            "http": None,
            "archon": None,
            "agent": None,
            "idc": "lf",
            "debug_info": None,
        }
        assert stat.ephemeralOwner
        data, stat = client.get(f"/{root}/binding/movies/ps_1:blue:asdf")
        assert data == b""
        assert stat.ephemeralOwner


# ---- what is found


def test_servers_come_and_go(opened: Open) -> None:
    server, client = opened(), opened()
    changes = watched(client, "movies:entry")
    changes.until_addresses()

    server.register("movies:entry", Replica("10.0.0.1:8500", idc="lf"))
    changes.until_addresses("10.0.0.1:8500")
    assert client.replicas("movies:entry") == (Replica("10.0.0.1:8500", idc="lf", cluster="default"),)
    server.register("movies:entry", Replica("10.0.0.2:8500"))
    changes.until_addresses("10.0.0.1:8500", "10.0.0.2:8500")
    server.unregister("movies:entry", "10.0.0.1:8500")
    changes.until_addresses("10.0.0.2:8500")
    server.stop()
    changes.until_addresses()


def test_services_do_not_see_each_other(opened: Open) -> None:
    server, client = opened(), opened()
    for service in ("movies:ps_0", "movies:ps_1", "books:ps_0"):
        server.register(service, Replica("10.0.0.1:8500"))
    server.unregister("movies:ps_1", "10.0.0.1:8500")

    assert client.wait("movies:ps_0", timeout=LIMIT)
    assert client.wait("books:ps_0", timeout=LIMIT)
    assert client.replicas("movies:ps_1") == ()
    assert client.replicas("books:ps_1") == ()
    with pytest.raises(DiscoveryError, match="books:ps_1: 0 of 1 replicas after"):
        client.wait("books:ps_1", timeout=0.01)


def test_a_container_may_say_later_where_it_listens(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    changes = watched(opened(), "movies:entry")
    info = f"/{root}/container_service/default:x"
    with zookeeper.client() as client:
        client.create(f"/{root}/binding/movies/entry:default:x", b"", makepath=True)
        client.create(info, b'{"grpc": "10.0.0.1:1", "added": "later"}', makepath=True)
        changes.until_addresses("10.0.0.1:1")
        client.set(info, b'{"grpc": "10.0.0.1:2"}')
        changes.until_addresses("10.0.0.1:2")
        client.delete(info)
        changes.until_addresses()


def test_nodes_that_cannot_be_read_are_passed_over(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    discovery = opened()
    with zookeeper.client() as client:
        bad: list[bytes] = [
            b"",
            b"no json",
            b"[]",
            b'{"grpc": 1}',
            b'{"grpc": "unix:/tmp/x"}',
            b"\xff",
            b"[" * 9999,
        ]
        bad += [b'{"grpc": "0.0.0.0:8500"}', b'{"grpc": null}', b'{"grpc": "%s:1"}' % (b"a" * 70000)]
        for k, data in enumerate(bad):
            client.create(f"/{root}/container_service/default:bad{k}", data, makepath=True)
            client.create(f"/{root}/binding/movies/entry:default:bad{k}", b"", makepath=True)
        client.create(f"/{root}/binding/movies/nonsense", b"")
        client.create(f"/{root}/binding/movies/too:many:parts:here", b"")
        client.create(f"/{root}/binding/movies/entry:default:nowhere", b"")

        discovery.register("movies:entry", Replica("10.0.0.1:8500"))
        found = discovery.wait("movies:entry", timeout=LIMIT)
        assert [replica.address for replica in found] == ["10.0.0.1:8500"]


def test_threads_may_register_at_once(opened: Open) -> None:
    server, services = opened(), [f"movies:ps_{k}" for k in range(8)]
    threads = [
        threading.Thread(target=server.register, args=(service, Replica("10.0.0.1:8500")), daemon=True)
        for service in services
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    client = opened()
    assert all(client.wait(service, timeout=LIMIT) for service in services)


# ---- failures


def test_a_killed_server_vanishes(zookeeper: ZooKeeper, root: str, opened: Open, tmp_path: Path) -> None:
    changes = watched(opened(), "movies:entry")
    with Forked(tmp_path / "output", registered, zookeeper.hosts, root) as server:
        changes.until_addresses("10.0.0.1:8500")
        server.end(signal.SIGKILL)
        changes.until_addresses()


def registered(hosts: str, root: str) -> None:
    discovery = ZooKeeperDiscovery(hosts, root, session_seconds=1.0)
    discovery.start()
    discovery.register("movies:entry", Replica("10.0.0.1:8500"))
    signal.pause()


def test_a_restart_of_zookeeper_is_survived(zookeeper: ZooKeeper, opened: Open) -> None:
    server, client, changes = watched_server(opened, session_seconds=5.0)

    zookeeper.kill()
    try:
        # Known replicas stay known, and registrations in the meantime are not lost.
        assert [each.address for each in client.replicas("movies:entry")] == ["10.0.0.1:8500"]
        server.register("movies:entry", Replica("10.0.0.2:8500"))
        server.unregister("movies:entry", "10.0.0.1:8500")
    finally:
        zookeeper.start()

    changes.until_addresses("10.0.0.2:8500")
    server.register("movies:entry", Replica("10.0.0.3:8500"))
    changes.until_addresses("10.0.0.2:8500", "10.0.0.3:8500")


def test_an_emptied_zookeeper_is_filled_again(zookeeper: ZooKeeper, opened: Open) -> None:
    """It knows neither our session nor as many transactions as we have seen, and refuses us as we were."""
    _, _, changes = watched_server(opened, session_seconds=1.0)

    zookeeper.kill()
    zookeeper.empty()
    zookeeper.start()

    changes.until_addresses()
    changes.until_addresses("10.0.0.1:8500")


def test_a_lost_session_registers_and_watches_again(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    cable = Cable(zookeeper.port)
    lost = opened(hosts=cable.hosts, container_id="asdf", session_seconds=1.0)
    lost.register("movies:entry", Replica("10.0.0.1:8500"))
    seen, other = watched(lost, "movies:entry"), opened(session_seconds=1.0)
    with zookeeper.client() as client:
        for path in ("container_service/default:asdf", "binding/movies/entry:default:asdf"):
            changes = node_changes(client, f"/{root}/{path}")
            before = changes.until(bool)[1].ephemeralOwner

            cable.cut()
            changes.until(lambda node: node is None)
            other.register("movies:entry", Replica("10.0.0.2:8500"))
            cable.repair()

            assert changes.until(bool)[1].ephemeralOwner != before
            seen.until_addresses("10.0.0.1:8500", "10.0.0.2:8500")
            other.unregister("movies:entry", "10.0.0.2:8500")
            seen.until_addresses("10.0.0.1:8500")
    cable.close()


def test_a_node_that_somebody_deletes_comes_back(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    opened(container_id="asdf").register("movies:entry", Replica("10.0.0.1:8500"))
    path = f"/{root}/container_service/default:asdf"
    with zookeeper.client() as client:
        changes = node_changes(client, path)
        changes.until(bool)
        client.delete(path)
        assert json.loads(changes.until(bool)[0])["grpc"] == "10.0.0.1:8500"
        client.set(path, b"scribble")
        changes.until(lambda node: node and node[0].startswith(b"{"))


def test_of_two_with_one_name_the_later_has_it(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    path = f"/{root}/container_service/default:asdf"
    first = opened(container_id="asdf")
    first.register("movies:entry", Replica("10.0.0.1:8500"))
    second = opened(container_id="asdf")
    second.register("movies:entry", Replica("10.0.0.2:8500"))

    with zookeeper.client() as client:
        changes = node_changes(client, path)
        assert json.loads(changes.until(bool)[0])["grpc"] == "10.0.0.2:8500"
        first.unregister("movies:entry", "10.0.0.1:8500")
        assert json.loads(client.get(path)[0])["grpc"] == "10.0.0.2:8500"
        first.register("movies:entry", Replica("10.0.0.1:8500"))
        changes.until(lambda node: node and json.loads(node[0])["grpc"] == "10.0.0.1:8500")
        first.stop()
        changes.until(lambda node: node and json.loads(node[0])["grpc"] == "10.0.0.2:8500")


# ---- beginning and end


def test_stop_takes_leave_at_once(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    discovery = opened(session_seconds=60.0, container_id="asdf")
    discovery.register("movies:entry", Replica("10.0.0.1:8500"))
    discovery.stop()
    with zookeeper.client() as client:
        assert not client.exists(f"/{root}/container_service/default:asdf")
    discovery.stop()
    with pytest.raises(UsageError, match="create a new one"):
        discovery.start()


def test_stop_does_not_wait_for_a_zookeeper_that_hangs(zookeeper: ZooKeeper, opened: Open) -> None:
    discovery = opened(session_seconds=60.0)
    with zookeeper.frozen():
        within_limit(discovery.stop)


def test_start_says_when_nobody_answers() -> None:
    cable = Cable(1)
    cable.cut()
    discovery = ZooKeeperDiscovery(cable.hosts, "demo")
    with pytest.raises(DiscoveryError, match=f"{cable.hosts} did not answer within 0.5 seconds"):
        discovery.start(timeout=0.5)
    cable.close()


def test_a_server_may_start_before_zookeeper(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    cable = Cable(zookeeper.port)
    cable.cut()
    server = ZooKeeperDiscovery(cable.hosts, root, session_seconds=1.0)
    server.start(timeout=0)
    server.register("movies:entry", Replica("10.0.0.1:8500"))
    assert not server.is_connected
    assert server.replicas("movies:entry") == ()

    cable.repair()

    assert opened().wait("movies:entry", timeout=LIMIT)
    assert server.wait("movies:entry", timeout=LIMIT)
    server.stop()
    cable.close()
