"""Discovery in a real ZooKeeper: what is written there, what is found, and what survives its failures."""

from __future__ import annotations

import json
import queue
import select
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.security import make_acl  # type: ignore[import-untyped]

from megalith.compat.monolith.sync_config import refresh_sync_config
from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.serving.discovery import (
    Container,
    ContainerServiceInfo,
    Replica,
    ReplicaMeta,
    SavedModel,
    SavedModelDeployConfig,
    TargetExtraInfo,
    ZooKeeperDiscovery,
)
from megalith.serving.model_state import ModelState
from megalith.serving.proto import ClientConfig
from tests.serving.zookeeper import Cable, ZooKeeper, zookeeper

__all__ = ["zookeeper"]
LIMIT = 30.0
IMPORT_SECONDS = 120.0
AVAILABLE = ModelState.AVAILABLE
Open = Callable[..., ZooKeeperDiscovery]


@pytest.fixture
def root() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def opened(zookeeper: ZooKeeper, root: str) -> Iterator[Open]:
    """Makes and starts discoveries of the test's root; stops them at the end."""
    made: list[ZooKeeperDiscovery] = []

    def make(hosts: str | None = None, **options: Any) -> ZooKeeperDiscovery:
        discovery = ZooKeeperDiscovery(hosts or zookeeper.hosts, root, **{"session_seconds": 2.0} | options)
        discovery.start(LIMIT)
        made.append(discovery)
        return discovery

    yield make
    for discovery in made:
        discovery.stop()


class Changes:
    """What a watch was told, one after the other."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __call__(self, value: Any) -> None:
        self.told.put(value)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """Reads on until something is as wanted."""
        last = None
        while True:
            try:
                last = self.told.get(timeout=LIMIT)
            except queue.Empty:
                raise AssertionError(f"not within {LIMIT} s; the last was {last}") from None
            if wanted(last):
                return last

    def until_addresses(self, *addresses: str) -> None:
        self.until(lambda replicas: [replica.address for replica in replicas] == list(addresses))


def watched(discovery: ZooKeeperDiscovery, service: str) -> Changes:
    changes = Changes()
    discovery.watch(service, changes)
    return changes


def node_changes(client: Any, path: str) -> Changes:
    """Each state of a node, None when it is not there."""
    changes = Changes()
    client.DataWatch(path, lambda data, stat: changes((data, stat) if stat else None))
    return changes


def within_limit(action: Callable[[], object]) -> None:
    """Does something that must not hang: far sooner than any poll of a minute."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive()


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


def test_declarations_and_layouts_last(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    discovery = opened()
    saved_model = SavedModel("movies", "ps_0")
    discovery.decl_saved_model(saved_model, SavedModelDeployConfig("old", "latest"))
    discovery.decl_saved_model(saved_model, SavedModelDeployConfig("/models/ps_0", "latest"))
    discovery.add_to_layout("main", saved_model)
    discovery.stop()

    with zookeeper.client() as client:
        data, stat = client.get(f"/{root}/saved_models/movies/ps_0")
        assert json.loads(data) == {"model_base_path": "/models/ps_0", "version_policy": "latest"}
        assert not stat.ephemeralOwner
        assert client.get_children(f"/{root}/layouts/main") == ["movies:ps_0"]


def test_a_replica_is_a_node_that_monolith_reads(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    meta = ReplicaMeta(
        "10.0.0.1:8500", stat=AVAILABLE, model_name="movies", server_type="ps", task=1, replica=2
    )
    opened().register_replica(meta, idc="lf", cluster="blue")

    with zookeeper.client() as client:
        data, stat = client.get(f"/{root}/service/movies/lf:blue/ps:1/2")
        assert stat.ephemeralOwner
        assert json.loads(data) == {
            "address": "10.0.0.1:8500",
            "address_ipv6": None,
            "stat": 30,
            "model_name": "movies",
            "server_type": "ps",
            "task": 1,
            "replica": 2,
            "archon_address": None,
            "archon_address_ipv6": None,
        }


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


def test_a_cancelled_watch_is_silent(opened: Open) -> None:
    discovery = opened()
    silent, heard = Changes(), Changes()
    discovery.watch("movies:entry", silent).cancel()
    discovery.watch("movies:entry", heard)
    assert silent.told.get(timeout=LIMIT) == ()

    discovery.register("movies:entry", Replica("10.0.0.1:8500"))

    heard.until_addresses("10.0.0.1:8500")
    assert silent.told.empty()


def test_a_failing_callback_harms_nobody(opened: Open) -> None:
    discovery = opened()

    def fails(_: object) -> None:
        raise RuntimeError("oh")

    discovery.watch("movies:entry", fails)
    changes = watched(discovery, "movies:entry")
    discovery.register("movies:entry", Replica("10.0.0.1:8500"))
    changes.until_addresses("10.0.0.1:8500")


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
        assert discovery.get_service_info(Container("default", "bad1")) is None


def test_service_info_goes_there_and_back(opened: Open) -> None:
    discovery = opened()
    container = Container("default", "asdf")
    info = ContainerServiceInfo(
        "localhost:8888", "localhost:8889", "localhost:8890", "localhost:8891", "lf", "x"
    )
    assert discovery.get_service_info(container) is None
    discovery.report_service_info(container, info)
    assert discovery.get_service_info(container) == info


def test_layouts_are_told_with_their_configs(opened: Open) -> None:
    discovery = opened()
    parts = ["entry", "ps_0", "ps_1", "ps_2"]
    for part in parts:
        discovery.decl_saved_model(SavedModel("movies", part), SavedModelDeployConfig(f"/m/{part}", "latest"))
        discovery.add_to_layout("main", SavedModel("movies", part))
    discovery.add_to_layout("main", SavedModel("movies", "undeclared"))
    changes = Changes()
    watch = discovery.register_layout_callback("main", changes)

    def names(layout: Any) -> list[str]:
        return [str(saved_model) for saved_model, _ in layout]

    first = changes.until(bool)
    assert names(first) == [f"movies:{part}" for part in parts]
    assert first[1] == (SavedModel("movies", "ps_0"), SavedModelDeployConfig("/m/ps_0", "latest"))
    discovery.remove_from_layout("main", SavedModel("movies", "entry"))
    changes.until(lambda layout: names(layout) == ["movies:ps_0", "movies:ps_1", "movies:ps_2"])
    assert discovery.list_saved_models("movies") == [SavedModel("movies", part) for part in parts]
    assert discovery.list_saved_models("books") == []
    watch.cancel()
    discovery.remove_from_layout("main", SavedModel("movies", "entry"))


def test_the_service_map_holds_the_models_of_a_layout(opened: Open) -> None:
    discovery = opened()
    discovery.decl_saved_model(SavedModel("movies", "ps_0"), SavedModelDeployConfig())
    discovery.add_to_layout("main", SavedModel("movies", "ps_0"))
    discovery.register_layout_callback("main", lambda _: None)
    discovery.register("movies:ps_0", Replica("10.0.0.1:8500"))

    discovery.wait("movies:ps_0", timeout=LIMIT)

    info = ContainerServiceInfo("10.0.0.1:8500")
    assert discovery.get_service_map() == {"movies": {"ps_0": [info]}}


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


def test_a_callback_may_register(opened: Open) -> None:
    """As a server does that loads what a layout tells it to, and then says so."""
    server, client = opened(), opened()
    client.decl_saved_model(SavedModel("movies", "ps_0"), SavedModelDeployConfig())

    def load(layout: Any) -> None:
        for saved_model, _ in layout:
            server.register(str(saved_model), Replica("10.0.0.1:8500"))

    server.register_layout_callback("main", load)
    client.add_to_layout("main", SavedModel("movies", "ps_0"))
    assert client.wait("movies:ps_0", timeout=LIMIT)


# ---- parameter sync


def test_sync_targets_of_bindings(opened: Open) -> None:
    backend = opened()
    container = Container("default", "asdf")
    info = ContainerServiceInfo("localhost:8888", "localhost:8889", "localhost:8890", "localhost:8891", "lf")
    backend.report_service_info(container, info)
    parts = {SavedModel("test_ffm_model", f"ps_{k}") for k in range(3)}
    backend.sync_available_saved_models(container, parts)
    backend.subscribe_model("test_ffm_model")
    backend.subscribe_model("test_ffm_model")
    backend.wait("test_ffm_model:ps_1", timeout=LIMIT)

    config = ClientConfig.FromString(refresh_sync_config(backend, 1))

    assert config.model_name == "test_ffm_model:ps_1"
    assert list(config.targets) == ["localhost:8888"]
    assert (config.signature_name, config.timeout_in_ms) == ("hashtable_assign", 3000)
    assert not config.targets_extra_info
    assert backend.get_sync_targets("ps_7") == ("test_ffm_model:ps_7", [])
    with pytest.raises(UsageError, match="subscribed to model 'test_ffm_model'"):
        backend.subscribe_model("another")


def test_sync_targets_of_replicas(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    with zookeeper.client() as client:
        meta = ReplicaMeta("localhost:8500", stat=AVAILABLE)
        client.create(f"/{root}/service/test_ffm_model/ps:1/-1", meta.to_json(), makepath=True)
    watcher = opened().watch_replicas("test_ffm_model")
    backend = watcher.to_sync_wrapper()
    backend.subscribe_model("anything")

    data = refresh_sync_config(backend, 1)

    config = ClientConfig.FromString(data)
    assert config.model_name == "ps_1"
    assert list(config.targets) == ["localhost:8500"]
    assert data == (
        b"\x0a\x04ps_1\x12\x10hashtable_assign\x1a\x0elocalhost:8500\x20\xb8\x17"
        b"\x2a\x0b\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    )
    with pytest.raises(InputError, match="must be ps_0"):
        backend.get_sync_targets("entry")
    backend.stop()
    assert backend.get_sync_targets("ps_1") == ("ps_1", {})


# ---- replicas by task


def replica(task: int = 0, replica: int = 0, **fields: Any) -> ReplicaMeta:
    given = {"address": f"10.0.{task}.{replica}:8500", "stat": AVAILABLE, "server_type": "ps"} | fields
    return ReplicaMeta(model_name="movies", task=task, replica=replica, **given)


def test_only_available_replicas_are_given_out(opened: Open) -> None:
    server, asking = opened(), opened()
    for k, stat in enumerate(ModelState):
        server.register_replica(replica(replica=k, stat=stat))
    watcher = asking.watch_replicas("movies")
    assert watcher.get_replicas("ps", 0) == [f"10.0.0.{list(ModelState).index(AVAILABLE)}:8500"]


def test_replicas_are_found_by_type_and_task(opened: Open) -> None:
    server = opened()
    for meta in (
        replica(0, 1),
        replica(0, 0),
        replica(1),
        replica(0, server_type="dense", address="10.9.9.9:1"),
    ):
        server.register_replica(meta)
    watcher = server.watch_replicas("movies")

    assert watcher.get_replicas("ps", 0) == ["10.0.0.0:8500", "10.0.0.1:8500"]
    assert watcher.get_replica("ps", 0, 1) == ["10.0.0.1:8500"]
    assert watcher.get_replica("ps", 0, 7) == []
    assert watcher.get_replicas("dense", 0) == ["10.9.9.9:1"]
    assert watcher.get_replicas("entry", 0) == []
    assert watcher.get_all_replicas("ps") == {
        "ps:0": ["10.0.0.0:8500", "10.0.0.1:8500"],
        "ps:1": ["10.0.1.0:8500"],
    }
    assert watcher.get_replicas_with_extra_info("ps", 1) == {"10.0.1.0:8500": TargetExtraInfo(replica_id=0)}


def test_replicas_know_their_data_centre(opened: Open) -> None:
    server = opened()
    server.register_replica(replica(address="10.0.0.1:1"), idc="lf", cluster="blue")
    server.register_replica(replica(address="10.0.0.2:1"), idc="hl", cluster="blue")
    watcher = server.watch_replicas("movies", dc_aware=True)

    assert watcher.get_replicas_with_extra_info("ps", 0) == {
        "10.0.0.1:1": TargetExtraInfo("lf", "blue", 0),
        "10.0.0.2:1": TargetExtraInfo("hl", "blue", 0),
    }
    assert watcher.get_replicas("ps", 0, idc="hl") == ["10.0.0.2:1"]
    assert watcher.get_replicas("ps", 0, idc="hl", cluster="red") == []
    assert watcher.get_all_replicas("ps", idc="lf") == {"lf:blue/ps:0": ["10.0.0.1:1"]}
    assert sorted(watcher.get_replica("ps", 0, 0)) == ["10.0.0.1:1", "10.0.0.2:1"]


def test_a_replica_follows_its_state(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    server = opened()
    watcher = server.watch_replicas("movies")
    with zookeeper.client() as client:
        changes = node_changes(client, f"/{root}/service/movies/ps:0/0")
        for stat in (ModelState.LOADING, AVAILABLE, ModelState.UNLOADING):
            server.register_replica(replica(stat=stat))
            changes.until(lambda node, stat=stat: node and json.loads(node[0])["stat"] == stat)
        server.unregister_replica(replica())
        changes.until(lambda node: node is None)
    assert watcher.get_replicas("ps", 0) == []


def test_replica_nodes_that_cannot_be_read_are_passed_over(
    zookeeper: ZooKeeper, root: str, opened: Open
) -> None:
    server = opened()
    server.register_replica(replica())
    with zookeeper.client() as client:
        bad: dict[str, bytes] = {
            "ps:0/1": b"no json",
            "ps:0/2": b'{"stat": "30"}',
            "ps:0/x": b"",
            "what": b"",
        }
        bad["ps:0/3"] = b'{"stat": 30, "address": "0.0.0.0:1"}'
        bad["ps:0/" + "9" * 40] = replica().to_json()
        for path, data in bad.items():
            client.create(f"/{root}/service/movies/{path}", data, makepath=True)
    assert server.watch_replicas("movies").get_all_replicas("ps") == {"ps:0": ["10.0.0.0:8500"]}


# ---- failures


def test_a_killed_server_vanishes(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    changes = watched(opened(), "movies:entry")
    code = (
        "import sys; from megalith.serving.discovery import Replica, ZooKeeperDiscovery\n"
        "discovery = ZooKeeperDiscovery(sys.argv[1], sys.argv[2], session_seconds=1.0)\n"
        "print('imported', flush=True); discovery.start()\n"
        "discovery.register('movies:entry', Replica('10.0.0.1:8500')); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, zookeeper.hosts, root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], IMPORT_SECONDS)[0], "importing torch took too long"
            changes.until_addresses("10.0.0.1:8500")
        finally:
            server.kill()
        changes.until_addresses()


def test_a_restart_of_zookeeper_is_survived(zookeeper: ZooKeeper, opened: Open) -> None:
    server, client = opened(session_seconds=5.0), opened(session_seconds=5.0)
    server.register("movies:entry", Replica("10.0.0.1:8500"))
    changes = watched(client, "movies:entry")
    changes.until_addresses("10.0.0.1:8500")

    zookeeper.kill()
    try:
        # What was known stays known, and what is said meanwhile is not lost.
        assert [each.address for each in client.replicas("movies:entry")] == ["10.0.0.1:8500"]
        server.register("movies:entry", Replica("10.0.0.2:8500"))
        server.unregister("movies:entry", "10.0.0.1:8500")
    finally:
        zookeeper.start()

    changes.until_addresses("10.0.0.2:8500")
    server.register("movies:entry", Replica("10.0.0.3:8500"))
    changes.until_addresses("10.0.0.2:8500", "10.0.0.3:8500")


def test_requests_say_that_zookeeper_is_away(zookeeper: ZooKeeper, opened: Open) -> None:
    discovery = opened()
    zookeeper.kill()
    try:
        with pytest.raises(DiscoveryError, match=zookeeper.hosts):
            discovery.decl_saved_model(SavedModel("movies", "entry"), SavedModelDeployConfig())
    finally:
        zookeeper.start()


def test_an_emptied_zookeeper_is_filled_again(zookeeper: ZooKeeper, opened: Open) -> None:
    """It knows neither our session nor as many transactions as we have seen, and refuses us as we were."""
    server, client = opened(session_seconds=1.0), opened(session_seconds=1.0)
    server.register("movies:entry", Replica("10.0.0.1:8500"))
    changes = watched(client, "movies:entry")
    changes.until_addresses("10.0.0.1:8500")

    zookeeper.kill()
    zookeeper.empty()
    zookeeper.start()

    changes.until_addresses()
    changes.until_addresses("10.0.0.1:8500")


def test_a_lost_session_registers_again(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    cable = Cable(zookeeper.port)
    server = opened(cable.hosts, container_id="asdf", session_seconds=1.0)
    server.register("movies:entry", Replica("10.0.0.1:8500"))
    with zookeeper.client() as client:
        for path in ("container_service/default:asdf", "binding/movies/entry:default:asdf"):
            changes = node_changes(client, f"/{root}/{path}")
            before = changes.until(bool)[1].ephemeralOwner

            cable.cut()
            changes.until(lambda node: node is None)
            cable.mend()

            assert changes.until(bool)[1].ephemeralOwner != before
    cable.close()


def test_a_lost_session_watches_again(zookeeper: ZooKeeper, opened: Open) -> None:
    cable = Cable(zookeeper.port)
    changes = watched(opened(cable.hosts, session_seconds=1.0), "movies:entry")
    server = opened(session_seconds=1.0)
    server.register("movies:entry", Replica("10.0.0.1:8500"))
    changes.until_addresses("10.0.0.1:8500")

    cable.cut()
    server.register("movies:entry", Replica("10.0.0.2:8500"))
    cable.mend()
    changes.until_addresses("10.0.0.1:8500", "10.0.0.2:8500")
    server.unregister("movies:entry", "10.0.0.2:8500")
    changes.until_addresses("10.0.0.1:8500")
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


def test_what_zookeeper_refuses_is_an_error_and_harms_nothing_else(
    zookeeper: ZooKeeper, root: str, opened: Open
) -> None:
    with zookeeper.client() as client:
        client.create(f"/{root}", b"")
        client.create(f"/{root}/container_service", b"", acl=[make_acl("world", "anyone", read=True)])
        discovery = opened()
        with pytest.raises(DiscoveryError, match=r"container_service.*NoAuth"):
            discovery.register("movies:entry", Replica("10.0.0.1:8500"))
        discovery.register_replica(replica())
        assert discovery.watch_replicas("movies").get_replicas("ps", 0) == ["10.0.0.0:8500"]


# ---- beginning and end


def test_stop_takes_leave_at_once(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    discovery = opened(session_seconds=60.0, container_id="asdf")
    discovery.register("movies:entry", Replica("10.0.0.1:8500"))
    discovery.stop()
    with zookeeper.client() as client:
        assert not client.exists(f"/{root}/container_service/default:asdf")
    discovery.stop()
    with pytest.raises(UsageError, match="make another"):
        discovery.start()
    with pytest.raises(UsageError, match="stopped"):
        discovery.list_saved_models("movies")


def test_stop_does_not_wait_for_a_zookeeper_that_is_away(zookeeper: ZooKeeper, opened: Open) -> None:
    discovery = opened(session_seconds=60.0)
    discovery.register("movies:entry", Replica("10.0.0.1:8500"))
    watcher = discovery.watch_replicas("movies")
    zookeeper.kill()
    try:
        within_limit(watcher.stop)
        within_limit(discovery.stop)
    finally:
        zookeeper.start()


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

    cable.mend()

    assert opened().wait("movies:entry", timeout=LIMIT)
    assert server.wait("movies:entry", timeout=LIMIT)
    server.stop()
    cable.close()
