"""Serving: exports trained models, answers requests, and updates servers while training continues.

    export/     writes a trained model as files that servers map into memory
    server/     gRPC and REST: `ModelServer`
    client/     requests to servers: `PredictClient`, `ClientCache`
    sync/       sends rows from training to serving: `Publisher`, `Subscriber`
    discovery/  which server serves which model
    proto/      protobuf messages

Serving needs the extras `serve` and `discovery`. `import megalith` imports none of it, and the names of this
module are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalith.lazy import lazy_names

if TYPE_CHECKING:
    from megalith.serving.client.credentials import Credentials as Credentials
    from megalith.serving.client.predict_client import ClientCache as ClientCache
    from megalith.serving.client.predict_client import PredictClient as PredictClient
    from megalith.serving.export.exporter import export_model as export_model
    from megalith.serving.export.program_export import ServingModule as ServingModule
    from megalith.serving.export.servable import Servable as Servable
    from megalith.serving.server.model_server import ModelServer as ModelServer
    from megalith.serving.server.security import Security as Security
    from megalith.serving.server.server_config import Batching as Batching
    from megalith.serving.server.server_config import ServerConfig as ServerConfig
    from megalith.serving.server.versions import read_labels as read_labels
    from megalith.serving.server.versions import write_labels as write_labels
    from megalith.serving.sync.publisher import Publisher as Publisher
    from megalith.serving.sync.publisher import ServerPublisher as ServerPublisher
    from megalith.serving.sync.subscriber import Subscriber as Subscriber

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".client.credentials": "Credentials",
        ".client.predict_client": "ClientCache PredictClient",
        ".export.exporter": "export_model",
        ".export.program_export": "ServingModule",
        ".export.servable": "Servable",
        ".server.model_server": "ModelServer",
        ".server.security": "Security",
        ".server.server_config": "Batching ServerConfig",
        ".server.versions": "read_labels write_labels",
        ".sync.publisher": "Publisher ServerPublisher",
        ".sync.subscriber": "Subscriber",
    },
)
