"""Monolith's backend in a real ZooKeeper: agents, controllers and replicas by task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kazoo.security import make_acl  # type: ignore[import-untyped]

from megalith.compat.monolith import (
    AgentConfig,
    Container,
    ContainerServiceInfo,
    ReplicaMeta,
    ReplicaWatcher,
    SavedModel,
    TargetExtraInfo,
    ZKBackend,
    refresh_sync_config,
)
from megalith.compat.monolith import SavedModelDeployConfig as DeployConfig
from megalith.errors import DiscoveryError, InputError, UsageError
from megalith.serving.discovery import Replica
from megalith.serving.proto.message_types import ClientConfig
from megalith.serving.wire_names import ModelState
from tests.serving.zookeeper import LIMIT, Changes, ZooKeeper, opening, root, within_limit, zookeeper

__all__ = ["root", "zookeeper"]
AVAILABLE = ModelState.AVAILABLE
CONTAINER = Container("default", "asdf")
INFO = ContainerServiceInfo("localhost:8888", "localhost:8889", "localhost:8890", "localhost:8891", "lf", "x")
PS_0 = SavedModel("movies", "ps_0")
Open = Callable[..., ZKBackend]


@pytest.fixture
def opened(zookeeper: ZooKeeper, root: str) -> Iterator[Open]:
    with opening(ZKBackend, zk_servers=zookeeper.hosts, bzid=root) as opened:
        yield opened


def watching(backend: ZKBackend, base_name: str, **options: Any) -> ReplicaWatcher:
    watcher = ReplicaWatcher(backend, AgentConfig(backend.root, base_name, **options))
    watcher.watch_data()
    watcher.watch_data()  # a second call has no effect
    return watcher


def test_declarations_and_layouts_last(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    discovery = opened()
    discovery.decl_saved_model(PS_0, DeployConfig("old", "latest"))
    discovery.decl_saved_model(PS_0, DeployConfig("/models/ps_0", "latest"))
    discovery.add_to_layout("main", PS_0)
    discovery.stop()

    with zookeeper.client() as client:
        data, stat = client.get(f"/{root}/saved_models/movies/ps_0")
        assert json.loads(data) == {"model_base_path": "/models/ps_0", "version_policy": "latest"}
        assert not stat.ephemeralOwner
        assert client.get_children(f"/{root}/layouts/main") == ["movies:ps_0"]


def test_service_info_goes_there_and_back(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    discovery = opened()
    assert discovery.get_service_info(CONTAINER) is None
    discovery.report_service_info(CONTAINER, INFO)
    assert discovery.get_service_info(CONTAINER) == INFO
    with zookeeper.client() as client:
        client.create(f"/{root}/container_service/default:bad", b"no json")
    assert discovery.get_service_info(Container("default", "bad")) is None


def test_layouts_are_told_with_their_configs(opened: Open) -> None:
    discovery = opened()
    parts = [SavedModel("movies", part) for part in ("entry", "ps_0", "ps_1", "ps_2")]
    for part in parts:
        discovery.decl_saved_model(part, DeployConfig(f"/m/{part.sub_graph}", "latest"))
        discovery.add_to_layout("main", part)
    discovery.add_to_layout("main", SavedModel("movies", "undeclared"))
    changes = Changes()
    watch = discovery.register_layout_callback("main", changes)

    assert changes.until(bool) == [(part, DeployConfig(f"/m/{part.sub_graph}", "latest")) for part in parts]
    discovery.remove_from_layout("main", parts[0])
    changes.until(lambda layout: [saved_model for saved_model, _ in layout] == parts[1:])
    watch.cancel()
    discovery.remove_from_layout("main", parts[0])


def test_a_callback_may_register(opened: Open) -> None:
    """As a server does that loads the models of a layout and then registers them."""
    server, client = opened(), opened()
    client.decl_saved_model(PS_0, DeployConfig())

    def load(layout: Any) -> None:
        for saved_model, _ in layout:
            server.register(str(saved_model), Replica("10.0.0.1:8500"))

    server.register_layout_callback("main", load)
    client.add_to_layout("main", PS_0)
    assert client.wait("movies:ps_0", timeout=LIMIT)


def test_sync_targets_of_bindings(opened: Open) -> None:
    backend = opened()
    backend.report_service_info(CONTAINER, INFO)
    parts = {SavedModel("test_ffm_model", f"ps_{k}") for k in range(3)}
    backend.sync_available_saved_models(CONTAINER, parts)
    backend.subscribe_model("test_ffm_model")
    backend.subscribe_model("test_ffm_model")
    backend.wait("test_ffm_model:ps_1", timeout=LIMIT)

    config = ClientConfig.FromString(refresh_sync_config(backend, 1))

    assert (config.model_name, list(config.targets)) == ("test_ffm_model:ps_1", ["localhost:8888"])
    assert (config.signature_name, config.timeout_in_ms) == ("hashtable_assign", 3000)
    assert not config.targets_extra_info
    assert backend.get_sync_targets("ps_7") == ("test_ffm_model:ps_7", [])
    with pytest.raises(UsageError, match="subscribed to model 'test_ffm_model'"):
        backend.subscribe_model("another")


def test_sync_targets_of_replicas(zookeeper: ZooKeeper, root: str, opened: Open) -> None:
    with zookeeper.client() as client:
        meta = ReplicaMeta("localhost:8500", stat=AVAILABLE)
        client.create(f"/{root}/service/test_ffm_model/ps:1/-1", meta.to_json(), makepath=True)
    backend = watching(opened(), "test_ffm_model").to_sync_wrapper()
    backend.subscribe_model("anything")

    assert refresh_sync_config(backend, 1) == (
        b"\x0a\x04ps_1\x12\x10hashtable_assign\x1a\x0elocalhost:8500\x20\xb8\x17"
        b"\x2a\x0b\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    )
    with pytest.raises(InputError, match="must be ps_0"):
        backend.get_sync_targets("entry")
    backend.stop()
    assert backend.get_sync_targets("ps_1") == ("ps_1", {})


def replica(task: int = 0, replica: int = 0, **fields: Any) -> ReplicaMeta:
    given = {"address": f"10.0.{task}.{replica}:8500", "stat": AVAILABLE, "server_type": "ps"} | fields
    return ReplicaMeta(model_name="movies", task=task, replica=replica, **given)


@pytest.fixture
def announce(zookeeper: ZooKeeper, root: str) -> Iterator[Callable[..., None]]:
    """Writes the node of a replica, or overwrites it, as Monolith's agents do."""
    with zookeeper.client() as client:

        def write(meta: ReplicaMeta, **place: str) -> None:
            path = meta.get_path(root, **place)
            if client.exists(path):
                client.set(path, meta.to_json())
            else:
                client.create(path, meta.to_json(), ephemeral=True, makepath=True)

        yield write


def test_available_replicas_are_found_by_type_and_task(opened: Open, announce: Callable[..., None]) -> None:
    for k, stat in enumerate(ModelState):
        announce(replica(task=2, replica=k, stat=stat))
    dense = replica(0, server_type="dense", address="10.9.9.9:1")
    for meta in (replica(0, 1), replica(0, 0), replica(1), dense):
        announce(meta)
    watcher = watching(opened(), "movies")

    available = [f"10.0.2.{list(ModelState).index(AVAILABLE)}:8500"]
    every = {"ps:0": ["10.0.0.0:8500", "10.0.0.1:8500"], "ps:1": ["10.0.1.0:8500"], "ps:2": available}
    assert watcher.get_all_replicas("ps") == every
    assert watcher.get_replicas("ps", 0) == every["ps:0"]
    assert watcher.get_replica("ps", 0, 1) == ["10.0.0.1:8500"]
    assert watcher.get_replica("ps", 0, 7) == []
    assert watcher.get_replicas("dense", 0) == ["10.9.9.9:1"]
    assert watcher.get_replicas("entry", 0) == []
    assert watcher.get_replicas_with_extra_info("ps", 1) == {"10.0.1.0:8500": TargetExtraInfo(replica_id=0)}


def test_replicas_know_their_data_centre(opened: Open, announce: Callable[..., None]) -> None:
    announce(replica(address="10.0.0.1:1"), idc="lf", cluster="blue")
    announce(replica(address="10.0.0.2:1"), idc="hl", cluster="blue")
    watcher = watching(opened(), "movies", dc_aware=True)

    places = {
        "10.0.0.1:1": TargetExtraInfo("lf", "blue", 0),
        "10.0.0.2:1": TargetExtraInfo("hl", "blue", 0),
    }
    assert watcher.get_replicas_with_extra_info("ps", 0) == places
    assert watcher.get_replicas("ps", 0, idc="hl") == ["10.0.0.2:1"]
    assert watcher.get_replicas("ps", 0, idc="hl", cluster="red") == []
    assert watcher.get_all_replicas("ps", idc="lf") == {"lf:blue/ps:0": ["10.0.0.1:1"]}
    assert sorted(watcher.get_replica("ps", 0, 0)) == [*places]


def test_a_replica_follows_its_state(opened: Open, announce: Callable[..., None]) -> None:
    announce(replica(stat=ModelState.LOADING))
    watcher, changes = watching(opened(), "movies"), Changes()
    assert watcher.get_replicas("ps", 0) == []
    changed = watcher._view.on_change
    watcher._view.on_change = lambda found: changes((changed(found), watcher.get_replicas("ps", 0))[1])

    for stat, expected in ((AVAILABLE, ["10.0.0.0:8500"]), (ModelState.UNLOADING, [])):
        announce(replica(stat=stat))

        changes.until(lambda found, expected=expected: found == expected)


def test_replica_nodes_that_cannot_be_read_are_passed_over(
    zookeeper: ZooKeeper, root: str, opened: Open, announce: Callable[..., None]
) -> None:
    announce(replica())
    bad = {"ps:0/1": b"no json", "ps:0/2": b'{"stat": "30"}', "ps:0/x": b"", "what": b""}
    bad["ps:0/3"] = b'{"stat": 30, "address": "0.0.0.0:1"}'
    bad["ps:0/" + "9" * 40] = replica().to_json()
    with zookeeper.client() as client:
        for path, data in bad.items():
            client.create(f"/{root}/service/movies/{path}", data, makepath=True)
    assert watching(opened(), "movies").get_all_replicas("ps") == {"ps:0": ["10.0.0.0:8500"]}


def test_requests_need_a_started_backend(opened: Open) -> None:
    stopped = opened()
    stopped.stop()
    for backend in (ZKBackend("demo", "localhost:1"), stopped):
        with pytest.raises(UsageError, match="not started, or stopped"):
            backend.decl_saved_model(PS_0, DeployConfig())


def test_what_zookeeper_refuses_is_an_error_and_harms_nothing_else(
    zookeeper: ZooKeeper, root: str, opened: Open
) -> None:
    with zookeeper.client() as client:
        client.create(f"/{root}", b"")
        client.create(f"/{root}/container_service", b"", acl=[make_acl("world", "anyone", read=True)])
        discovery = opened()
        with pytest.raises(DiscoveryError, match=r"container_service.*NoAuth"):
            discovery.register("movies:entry", Replica("10.0.0.1:8500"))
        discovery.sync_available_saved_models(Container("default", "a"), {SavedModel("books", "entry")})
        assert client.get_children(f"/{root}/binding/books") == ["entry:default:a"]


def test_requests_say_that_zookeeper_is_away_and_stop_does_not_wait_for_it(
    zookeeper: ZooKeeper, opened: Open
) -> None:
    other, discovery = opened(), opened(session_seconds=60.0)
    discovery.register("movies:entry", Replica("10.0.0.1:8500"))
    watcher = watching(discovery, "movies")
    zookeeper.kill()
    try:
        with pytest.raises(DiscoveryError, match=zookeeper.hosts):
            other.decl_saved_model(PS_0, DeployConfig())
        within_limit(watcher.stop)
        within_limit(discovery.stop)
    finally:
        zookeeper.start()


# ---- Monolith's own tests of its serving ops, with a client of the user


class FakeClient:
    """A ZooKeeper in memory with kazoo's calls, as Monolith's tests have one; watches fire synchronously."""

    def __init__(self) -> None:
        self.nodes: dict[str, bytes] = {}
        self.watches: list[tuple[str, str, Callable[..., Any]]] = []
        self.started = False

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        self.started = False

    def create(self, path: str, value: bytes = b"", ephemeral: bool = False, makepath: bool = False) -> None:
        assert path not in self.nodes
        parent = path.rpartition("/")[0]
        if parent and parent not in self.nodes:
            self.create(parent, makepath=True)
        self.nodes[path] = value
        self._fire(path, parent)

    def ensure_path(self, path: str) -> None:
        self.create(path, makepath=True)

    def set(self, path: str, value: bytes) -> None:
        self.nodes[path] = value
        self._fire(path)

    def delete(self, path: str) -> None:
        del self.nodes[path]
        self._fire(path, path.rpartition("/")[0])

    def get(self, path: str) -> tuple[bytes, None]:
        return self.nodes[path], None

    def exists(self, path: str) -> bool:
        return path in self.nodes

    def get_children(self, path: str) -> list[str]:
        return [p.rpartition("/")[2] for p in self.nodes if p.rpartition("/")[0] == path]

    def DataWatch(self, path: str, call: Callable[..., Any]) -> None:
        self.watches.append(("data", path, call))
        call(self.nodes.get(path), None)

    def ChildrenWatch(self, path: str, call: Callable[..., Any]) -> None:
        self.watches.append(("children", path, call))
        call(self.get_children(path))

    def _fire(self, path: str, parent: str = "") -> None:
        for kind, watched, call in list(self.watches):
            if kind == "data" and watched == path:
                call(self.nodes.get(path), None)
            elif kind == "children" and watched == parent:
                call(self.get_children(parent))


def test_replica_watcher_of_a_fake_client() -> None:
    client = FakeClient()
    client.start()
    config = AgentConfig(bzid="demo", base_name="test_ffm_model", deploy_type="ps", replica_id=0, num_ps=10)
    assert config.replica_id == -1  # there is no pod
    assert config.path_prefix == f"/{config.bzid}/service/{config.base_name}"
    client.ensure_path(path := f"{config.path_prefix}/ps:1/{config.replica_id}")
    meta = ReplicaMeta(address="localhost:8500", stat=AVAILABLE)
    client.set(path, meta.to_json())
    watcher = ReplicaWatcher(client, config, use_archon=False, zk_watch_address_family="ipv4")
    watcher.watch_data()

    found = ClientConfig.FromString(refresh_sync_config(watcher.to_sync_wrapper(), 1))
    assert (found.model_name, list(found.targets), found.timeout_in_ms) == ("ps_1", ["localhost:8500"], 3000)
    assert found.targets_extra_info[0].replica_id == -1

    client.set(
        f"{config.path_prefix}/ps:1/-1", ReplicaMeta("localhost:8500", stat=ModelState.UNLOADING).to_json()
    )
    assert watcher.get_replicas("ps", 1) == []
    client.create(f"{config.path_prefix}/ps:0/3", meta.to_json(), makepath=True)
    assert watcher.get_all_replicas("ps") == {"ps:0": ["localhost:8500"]}
    watcher.stop()
    client.delete(f"{config.path_prefix}/ps:0/3")
    assert watcher.get_replicas("ps", 0) == []
    with pytest.raises(InputError, match="must have kazoo's calls; object lacks create"):
        ReplicaWatcher(object(), config)


def test_zk_backend_of_a_fake_client(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ZKBackend("demo", zk_client=(client := FakeClient()))
    backend.start()
    info = ContainerServiceInfo(
        grpc="localhost:8888",
        http="localhost:8889",
        archon="localhost:8890",
        agent="localhost:8891",
        idc="lf",
    )
    backend.report_service_info(CONTAINER, info)
    backend.sync_available_saved_models(
        CONTAINER, {SavedModel("test_ffm_model", f"ps_{i}") for i in range(3)}
    )
    backend.subscribe_model("test_ffm_model")

    found = ClientConfig.FromString(refresh_sync_config(backend, 1))
    assert (found.model_name, list(found.targets)) == ("test_ffm_model:ps_1", ["localhost:8888"])
    assert not found.targets_extra_info
    assert backend.get_service_info(CONTAINER) == info
    layouts: list[Any] = []
    backend.register_layout_callback("main", layouts.append)
    backend.decl_saved_model(PS_0, DeployConfig("/models", "latest"))
    backend.add_to_layout("main", PS_0)
    assert layouts[-1] == [(PS_0, DeployConfig("/models", "latest"))]
    backend.remove_from_layout("main", PS_0)
    assert layouts[-1] == []
    backend.stop()
    assert not client.started
    monkeypatch.setenv("MY_POD_NAME", "pod-1")
    assert AgentConfig("demo", "m").replica_id == int("0014fbd572", 16)  # of the md5 of the name


class Backend:
    """Any object with get_sync_targets is a backend."""

    def get_sync_targets(self, sub_graph: str) -> tuple[str, Any]:
        return f"m:{sub_graph}", {"a:1": TargetExtraInfo("lf", None, 3)}


def test_any_object_with_targets_is_a_backend() -> None:
    found = ClientConfig.FromString(refresh_sync_config(Backend(), 0))  # type: ignore[arg-type]
    assert (found.model_name, found.targets_extra_info[0].replica_id) == ("m:ps_0", 3)
    with pytest.raises(InputError, match="refresh_sync_config: ps_index"):
        refresh_sync_config(Backend(), -1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sync_backend must have get_sync_targets, got int"):
        refresh_sync_config(3, 0)  # type: ignore[arg-type]
