"""Serving: trained models answer requests, and rows trained a moment ago reach them.

    export/     a trained model as files that servers map into memory
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
    from megalith.serving.client.credentials import Credentials
    from megalith.serving.client.predict_client import PredictClient, remote_predict, set_default_discovery
    from megalith.serving.export.exporter import export_model
    from megalith.serving.export.servable import Servable
    from megalith.serving.server.batching import Batching
    from megalith.serving.server.model_server import ModelServer
    from megalith.serving.server.security import Security
    from megalith.serving.sync.publisher import Publisher
    from megalith.serving.sync.subscriber import Subscriber

_HOMES = {
    "Batching": "server.batching",
    "Credentials": "client.credentials",
    "ModelServer": "server.model_server",
    "PredictClient": "client.predict_client",
    "Publisher": "sync.publisher",
    "Security": "server.security",
    "Servable": "export.servable",
    "Subscriber": "sync.subscriber",
    "export_model": "export.exporter",
    "remote_predict": "client.predict_client",
    "set_default_discovery": "client.predict_client",
}

__all__ = [
    "Batching",
    "Credentials",
    "ModelServer",
    "PredictClient",
    "Publisher",
    "Security",
    "Servable",
    "Subscriber",
    "export_model",
    "remote_predict",
    "set_default_discovery",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
