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
from megalith.serving import discovery
from megalith.serving.proto.message_types import ClientConfig
from megalith.serving.server.security import Permission
from megalith.serving.wire_names import HASHTABLE_ASSIGN
from tests.valid_calls.core import local
from tests.valid_calls.sweep import Arguments, Call, Given, calls, config, count, ids, methods

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
            "*": rows | {"features": {"f": ids()}},
            "adopt": {"overlay": made.stage()},
            "inherit": {"overlay": made.overlay},
        },
    )
    yield serving.Subscriber, {"servable": servable()}
    inputs = {"a_id": ids(), "a_value": torch.ones(3, 2)}
    push: Arguments = {"signature": HASHTABLE_ASSIGN, "inputs": inputs, "metadata": {}}
    others: Arguments = {"servable": servable(), "servables": [servable()]}
    yield from methods(lambda: serving.Subscriber(servable()), {"*": push | others})


def server_calls() -> Iterator[Call]:
    yield from calls(serving.Batching, serving.ServerConfig)
    yield serving.Security, {"token": "secret-token"}
    asked: Arguments = {"authorization": "Bearer x", "permission": Permission.WRITE}
    asked |= {"host": "127.0.0.1", "writes": True}
    yield from methods(lambda: serving.Security(write_token="secret-token"), {"*": asked})
    directory = {"directory": exported()}
    yield serving.read_labels, directory
    yield serving.write_labels, {"directory": exported().parent, "labels": {"stable": 1}}
    yield serving.ModelServer, directory
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
    names = {"input_tensor_alias": ["a_id"], "output_tensor_alias": ["a_result"], "model_name": "movies"}
    asked: Arguments = names | {"input_tensors": [ids()], "task": "entry", "discovery": registered()}
    yield monolith.remote_predict, asked | {"max_rpc_deadline_millis": 5000.0}
    yield monolith.set_default_discovery, {"discovery": None}
    yield serving.ClientCache, {}
    yield from methods(lambda: serving.ClientCache(registered()), {"open": {"url": f"static:{CLOSED}"}})


def publisher_calls() -> Iterator[Call]:
    def publisher() -> serving.Publisher:
        return serving.Publisher(local(), discovery.StaticDiscovery([]), model_name="movies")

    yield serving.Publisher, {"model": local(), "targets": discovery.StaticDiscovery([CLOSED])}
    yield from methods(publisher, {"checkpoint_taken": {"save_id": "one"}})


def sync_client_calls() -> Iterator[Call]:
    sync = ClientConfig(
        model_name="movies", targets=(server().address, CLOSED), timeout_in_ms=1000
    ).SerializeToString()
    yield monolith.ParameterSyncClient, {"client": monolith.parameter_sync_client_from_config(sync)}
    for make in (monolith.parameter_sync_client_from_config, monolith.create_dummy_sync_client):
        yield from methods(make, {"attach": {"tables": local()}, "create_sync_op": {"config_str": sync}})
    clients = [monolith.parameter_sync_client_from_config, monolith.create_parameter_sync_clients]
    yield from calls(*clients, monolith.create_dummy_sync_client, config=sync, ps_num=2)
    subscribed = registered()
    subscribed.subscribe_model("movies")
    yield monolith.refresh_sync_config, {"sync_backend": subscribed, "ps_index": 0}
    yield monolith.create_dummy_sync_server, {"address": "localhost:0"}
    yield monolith.DummySyncServer, {}
    waiting: Given = {"wait": {"n": 0, "timeout": 0.01}, "delay": {"seconds": 0.0}}
    yield from methods(monolith.DummySyncServer, waiting)


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
    closed = discovery.StaticDiscovery, discovery.FileDiscovery, discovery.ZooKeeperDiscovery
    for kind, first in zip(closed, ([], "servers.json", CLOSED), strict=True):
        yield from methods(partial(_subscribed, kind, first), given)
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
    task: Arguments = {"server_type": "ps", "task": 0, "replica": 0}
    records: dict[type, Arguments] = {
        monolith.Container: {"ctx_cluster": "c", "ctx_id": "0"},
        monolith.ContainerServiceInfo: {"grpc": CLOSED},
        monolith.ReplicaMeta: task | {"address": CLOSED, "model_name": "movies"},
        monolith.SavedModel: {"model_name": "movies", "sub_graph": "entry"},
        monolith.SavedModelDeployConfig: {"model_base_path": "/models"},
        monolith.TargetExtraInfo: {"idc": "a", "cluster": "b", "replica_id": 0},
    }
    for kind, arguments in records.items():
        yield kind, arguments
        yield from methods(partial(kind, **arguments), {"*": {"data": b"{}", "root": "r"}})
    yield monolith.ZKBackend, {"bzid": "bzid", "zk_servers": CLOSED}
    saved, info = monolith.SavedModel("movies", "entry"), monolith.ContainerServiceInfo(grpc=CLOSED)
    values: Arguments = {"container": monolith.Container("c", "0"), "service_info": info, "layout": "l"}
    values |= {"saved_model": saved, "saved_models": {saved}, "count": 0, "address": CLOSED}
    given: Given = {
        "*": values | {"deploy_config": monolith.SavedModelDeployConfig()},
        "register": {"replica": discovery.Replica(CLOSED)},
        "start": {"timeout": 0.0},
        "wait": {"timeout": 0.01},
    }
    yield from methods(zk_backend, given)
    backend = zk_backend()
    agent = monolith.AgentConfig("bzid", "movies")
    yield monolith.AgentConfig, {"bzid": "bzid", "base_name": "movies"}
    yield monolith.ReplicaWatcher, {"zk_client": backend, "config": agent}
    yield from methods(lambda: monolith.ReplicaWatcher(backend, agent), {"*": task})
