"""A client that finds its servers in a real ZooKeeper, while they come and go."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from megalith.errors import RemoteError
from megalith.serving.client.predict_client import PredictClient
from megalith.serving.discovery import open_discovery
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import export_version
from tests.serving.zookeeper import ZooKeeper, zookeeper

__all__ = ["zookeeper"]

LIMIT = 60.0
INPUTS = {"user": torch.tensor([1, 2]), "dense": torch.zeros(2, 3)}


@pytest.fixture
def url(zookeeper: ZooKeeper) -> str:
    return f"zk://{zookeeper.hosts}/test-{uuid.uuid4().hex[:8]}"


def test_servers_are_found_while_they_come_and_go(url: str, tmp_path: Path) -> None:
    export_version(tmp_path, version=1)
    with open_discovery(url) as found, PredictClient(found, "movies", timeout=LIMIT) as client:
        with pytest.raises(RemoteError, match="discovery knows no server"):
            client.predict(INPUTS)
        with ModelServer(tmp_path, ServerConfig(discovery=url)) as first:
            assert found.wait("movies:entry", 1, LIMIT)[0].address == first.address
            scores = client.predict(INPUTS)["logits"]
            with ModelServer(tmp_path, ServerConfig(discovery=url)):
                found.wait("movies:entry", 2, LIMIT)
                first.stop()
                for _ in range(10):
                    assert torch.equal(client.predict(INPUTS)["logits"], scores)
