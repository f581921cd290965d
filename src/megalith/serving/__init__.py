"""Serving: trained models answer requests, and rows trained a moment ago reach them.

    exported/   a trained model as files that servers map into memory
    server/     gRPC and REST in front of them
    client/     asking servers: `remote_predict`, `PredictClient`
    sync/       from training to serving: `Publisher`, and Monolith's `ParameterSyncClient`
    discovery/  who serves what
    proto/      the messages on the wire

They need the extras `serve` and `discovery`; `import megalith` imports none of it, and the names here are
imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.serving.client.channels import Credentials
    from megalith.serving.client.dummy import DummySyncServer
    from megalith.serving.client.predict import PredictClient, remote_predict, set_default_discovery
    from megalith.serving.exported.export import export
    from megalith.serving.exported.servable import Servable
    from megalith.serving.server.batching import Batching
    from megalith.serving.server.model_server import ModelServer
    from megalith.serving.server.security import Security
    from megalith.serving.sync.config import refresh_sync_config
    from megalith.serving.sync.monolith import (
        ParameterSyncClient,
        create_dummy_sync_client,
        create_parameter_sync_clients,
        parameter_sync_client_from_config,
    )
    from megalith.serving.sync.publisher import Publisher
    from megalith.serving.sync.subscriber import Subscriber

_HOMES = {
    "Batching": "server.batching",
    "Credentials": "client.channels",
    "DummySyncServer": "client.dummy",
    "ModelServer": "server.model_server",
    "ParameterSyncClient": "sync.monolith",
    "PredictClient": "client.predict",
    "Publisher": "sync.publisher",
    "Security": "server.security",
    "Servable": "exported.servable",
    "Subscriber": "sync.subscriber",
    "create_dummy_sync_client": "sync.monolith",
    "create_parameter_sync_clients": "sync.monolith",
    "export": "exported.export",
    "parameter_sync_client_from_config": "sync.monolith",
    "refresh_sync_config": "sync.config",
    "remote_predict": "client.predict",
    "set_default_discovery": "client.predict",
}

__all__ = [
    "Batching",
    "Credentials",
    "DummySyncServer",
    "ModelServer",
    "ParameterSyncClient",
    "PredictClient",
    "Publisher",
    "Security",
    "Servable",
    "Subscriber",
    "create_dummy_sync_client",
    "create_parameter_sync_clients",
    "export",
    "parameter_sync_client_from_config",
    "refresh_sync_config",
    "remote_predict",
    "set_default_discovery",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
