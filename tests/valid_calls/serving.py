"""Calls of exports, servers, clients, parameter sync and discoveries.

Clients call a server in this process or a port on which nobody listens. ZooKeeper is never connected.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megalith import EmbeddingCollection, Feature, serving
from megalith.compat import monolith
from megalith.compat.monolith.sync_config import SyncConfig
from megalith.serving import discovery
from megalith.serving.server.security import Permission
from megalith.serving.wire_names import HASHTABLE_ASSIGN
from tests.valid_calls.core import local
from tests.valid_calls.sweep import Arguments, Call, config, count, ids, methods

CLOSED = "127.0.0.1:1"
"""An address on which nobody listens."""
PEM = b"-----BEGIN CERTIFICATE-----\n"


class Scorer(torch.nn.Module):
    """The smallest model that can be exported."""

    masks: Mapping[str, str] = MappingProxyType({})
    num_dense = 0

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([config()], [Feature("f", "a")])
        self.embeddings.shards.assign({"a": (ids(), torch.ones(3, 2))})

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return rows["f"].sum(1)


@cache
def exported() -> Path:
    """Returns a directory with version 1 of a model; `forget_exported` deletes it."""
    path = Path(tempfile.mkdtemp()) / "movies"
    serving.export_model(Scorer(), path, name="movies", version=1)
    return path


@cache
def server() -> monolith.DummySyncServer:
    """Returns a server in this process that answers every request."""
    return monolith.DummySyncServer()


def clean_up() -> None:
    """Deletes the export and stops the server."""
    if exported.cache_info().currsize:
        shutil.rmtree(exported().parent)
        exported.cache_clear()
    if server.cache_info().currsize:
        server().shutdown()
        server.cache_clear()


# ---- exports and servers


def servable() -> serving.Servable:
    return serving.Servable(exported() / "1")


def export_calls() -> Iterator[Call]:
    yield serving.export_model, {"model": Scorer(), "out": Path("out"), "name": "movies"}
    yield serving.ServingModule, {"module": Scorer()}
    yield serving.Servable, {"directory": exported() / "1"}
    rows = {"rows": {"a": (ids(), torch.ones(3, 2))}}
    yield from methods(
        servable,
        lambda made: {
            "predict": {"features": {"f": ids()}},
            "random_inputs": {"size": 2},
            "predict_plain": {"batch": [bytes(24)], "size": 3, "dense": None},
            "count_missing": {"features": {"f": ids()}},
            "check": rows,
            "apply": rows,
            "adopt": {"overlay": made.stage()},
            "inherit": {"overlay": made.overlay},
        },
    )
    yield serving.Subscriber, {"servable": servable()}
    push: Arguments = {
        "signature": HASHTABLE_ASSIGN,
        "inputs": {"a_id": ids(), "a_value": torch.ones(3, 2)},
        "metadata": {},
    }
    yield from methods(
        lambda: serving.Subscriber(servable()),
        {"handle": push, "move_to": {"servable": servable()}, "set_older": {"servables": [servable()]}},
    )


def server_calls() -> Iterator[Call]:
    yield serving.Batching, {}
    yield serving.ServerConfig, {}
    yield serving.Security, {"token": "secret-token"}
    yield from methods(
        lambda: serving.Security(write_token="secret-token"),
        {
            "check_exposure": {"host": "127.0.0.1", "writes": True},
            "admits": {"authorization": "Bearer x"},
            "permits": {"authorization": "Bearer x", "permission": Permission.WRITE},
        },
    )
    yield serving.VersionRules, {"labels": {"stable": 1}, "traffic": {"stable": 100}}
    yield from methods(
        lambda: serving.VersionRules({"stable": 1}, {"stable": 100}),
        {"read": {"directory": exported()}, "write": {"directory": exported().parent}},
    )
    yield serving.ModelServer, {"directory": exported()}
    yield from methods(lambda: serving.ModelServer(exported()))


# ---- clients


def registered() -> discovery.StaticDiscovery:
    return discovery.StaticDiscovery([server().address])


def client_calls() -> Iterator[Call]:
    yield serving.Credentials, {"token": "t", "root_certificates": PEM, "certificate": PEM, "key": PEM}
    Path("token").write_text("secret")
    yield serving.Credentials.from_files, {"token": Path("token")}
    yield serving.PredictClient, {"discovery": registered(), "model_name": "movies"}
    request: Arguments = {"inputs": {"a_id": ids()}, "timeout": 5.0}
    yield from methods(lambda: serving.PredictClient(registered(), "movies"), {"predict": request})
    nobody = discovery.StaticDiscovery([CLOSED])
    yield serving.PredictClient(nobody, "movies").predict, request | {"timeout": 0.01}
    asked: Arguments = {
        "input_tensor_alias": ["a_id"],
        "input_tensors": [ids()],
        "output_tensor_alias": ["a_result"],
        "model_name": "movies",
        "task": "entry",
        "discovery": registered(),
        "max_rpc_deadline_millis": 5000.0,
    }
    yield monolith.remote_predict, asked
    yield monolith.set_default_discovery, {"discovery": None}
    yield serving.ClientCache, {}
    yield from methods(lambda: serving.ClientCache(registered()), {"open": {"url": f"static:{CLOSED}"}})


def publisher_calls() -> Iterator[Call]:
    def publisher() -> serving.Publisher:
        return serving.Publisher(local(), discovery.StaticDiscovery([]), model_name="movies")

    yield serving.Publisher, {"model": local(), "targets": discovery.StaticDiscovery([CLOSED])}
    yield from methods(publisher, {"checkpoint_taken": {"save_id": "one"}})


def sync_client_calls() -> Iterator[Call]:
    sync = SyncConfig(model_name="movies", targets=(server().address, CLOSED), timeout_ms=1000).to_bytes()
    yield monolith.ParameterSyncClient, {"client": monolith.parameter_sync_client_from_config(sync)}
    for make in (monolith.parameter_sync_client_from_config, monolith.create_dummy_sync_client):
        yield from methods(make, {"attach": {"tables": local()}, "create_sync_op": {"config_str": sync}})
    yield monolith.parameter_sync_client_from_config, {"config": sync}
    yield monolith.create_parameter_sync_clients, {"ps_num": 2}
    yield monolith.create_dummy_sync_client, {}
    subscribed = registered()
    subscribed.subscribe_model("movies")
    yield monolith.refresh_sync_config, {"sync_backend": subscribed, "ps_index": 0}
    yield monolith.create_dummy_sync_server, {"address": "localhost:0"}
    yield monolith.DummySyncServer, {}
    yield from methods(
        monolith.DummySyncServer, {"wait": {"n": 0, "timeout": 0.01}, "delay": {"seconds": 0.0}}
    )


# ---- discoveries


def discovery_calls() -> Iterator[Call]:
    yield discovery.ServiceName, {"model": "movies", "part": "entry"}
    yield discovery.ServiceName.parse, {"name": "movies:entry"}
    yield discovery.Replica, {"address": CLOSED, "replica_id": 0, "idc": "a", "cluster": "b"}
    yield from methods(lambda: discovery.Watch(count))
    yield discovery.Watch, {}
    yield discovery.StaticDiscovery, {"servers": {"movies:entry": [CLOSED]}}
    yield discovery.FileDiscovery, {"path": Path("servers.json")}
    yield discovery.ZooKeeperDiscovery, {"hosts": CLOSED}
    yield discovery.DNSDiscovery, {"name": "localhost", "port": 8500}
    yield discovery.open_discovery, {"url": f"static:{CLOSED}"}
    given: dict[str, Arguments] = {
        "register": {"replica": discovery.Replica(CLOSED)},
        "unregister": {"address": CLOSED},
        "wait": {"count": 0, "timeout": 0.01},
        "start": {"timeout": 0.0},
    }
    yield from methods(partial(_subscribed, discovery.StaticDiscovery, []), given)
    yield from methods(partial(_subscribed, discovery.FileDiscovery, "servers.json"), given)
    yield from methods(partial(_subscribed, discovery.ZooKeeperDiscovery, CLOSED), given)
    yield from methods(partial(_subscribed, discovery.DNSDiscovery, "localhost", 8500), given)


def _subscribed(kind: type[discovery.Discovery], *arguments: object) -> discovery.Discovery:
    made = kind(*arguments)
    made.subscribe_model("movies")
    return made


def zk_backend() -> monolith.ZKBackend:
    made = monolith.ZKBackend("bzid", CLOSED, request_seconds=0.01)
    made.subscribe_model("movies")
    return made


def zookeeper_calls() -> Iterator[Call]:
    meta: Arguments = {
        "address": CLOSED,
        "model_name": "movies",
        "server_type": "ps",
        "task": 0,
        "replica": 0,
    }
    records: dict[type, Arguments] = {
        monolith.Container: {"ctx_cluster": "c", "ctx_id": "0"},
        monolith.ContainerServiceInfo: {"grpc": CLOSED},
        monolith.ReplicaMeta: meta,
        monolith.SavedModel: {"model_name": "movies", "sub_graph": "entry"},
        monolith.SavedModelDeployConfig: {"model_base_path": "/models"},
        monolith.TargetExtraInfo: {"idc": "a", "cluster": "b", "replica_id": 0},
    }
    for kind, arguments in records.items():
        yield kind, arguments
        yield from methods(
            partial(kind, **arguments), {"from_json": {"data": b"{}"}, "get_path": {"root": "r"}}
        )
    yield monolith.ZKBackend, {"bzid": "bzid", "zk_servers": CLOSED}
    saved = monolith.SavedModel("movies", "entry")
    container = {"container": monolith.Container("c", "0")}
    layout = {"layout": "l", "saved_model": saved}
    yield from methods(
        zk_backend,
        {
            "add_to_layout": layout,
            "decl_saved_model": {"saved_model": saved, "deploy_config": monolith.SavedModelDeployConfig()},
            "get_service_info": container,
            "register": {"replica": discovery.Replica(CLOSED)},
            "register_layout_callback": {"layout": "l"},
            "remove_from_layout": layout,
            "report_service_info": container | {"service_info": monolith.ContainerServiceInfo(grpc=CLOSED)},
            "start": {"timeout": 0.0},
            "sync_available_saved_models": container | {"saved_models": {saved}},
            "unregister": {"address": CLOSED},
            "wait": {"count": 0, "timeout": 0.01},
        },
    )
    backend = zk_backend()
    yield monolith.ReplicaWatcher, {"zk": backend, "base_name": "movies"}
    task = {"server_type": "ps", "task": 0}
    yield from methods(
        lambda: monolith.ReplicaWatcher(backend, "movies"),
        {
            "get_all_replicas": {"server_type": "ps"},
            "get_replica": task | {"replica": 0},
            "get_replicas": task,
            "get_replicas_with_extra_info": task,
        },
    )
