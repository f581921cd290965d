"""Pushing to servers that are found in a real ZooKeeper, which goes away meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from megalith.models import Model
from megalith.serving.discovery import ZooKeeperDiscovery
from megalith.serving.export.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.sync.publisher import Publisher
from tests.serving.sync_support import LIMIT, Trainer, assert_equal, export_version, make_model, publisher_to
from tests.serving.zookeeper import ZooKeeper, root, zookeeper

__all__ = ["root", "zookeeper"]


def serve(folder: Path, hosts: str, root: str, stack: ExitStack) -> ModelServer:
    discovery = stack.enter_context(ZooKeeperDiscovery(hosts, root, session_seconds=5.0))
    return stack.enter_context(ModelServer(folder, ServerConfig(allow_writes=True), discovery=discovery))


def servable_of(server: ModelServer) -> Servable:
    (model,) = server.models
    servable = model.subscriber.servable
    assert isinstance(servable, Servable)
    return servable


def pushed(publisher: Publisher, servers: list[ModelServer], model: Model) -> None:
    """Waits until the publisher has met all servers, then compares them."""
    with publisher.lock:
        found = publisher.lock.wait_for(lambda: len(publisher.report()) == len(servers), LIMIT)
    assert found
    assert publisher.flush(LIMIT), publisher.report()
    for server in servers:
        assert_equal(servable_of(server), model)


def test_zookeeper_restarts_in_the_middle_of_publishing(
    zookeeper: ZooKeeper, root: str, tmp_path: Path, stack: ExitStack
) -> None:
    model = make_model()
    trainer = Trainer(model)
    trainer.step(3)
    export_version(model, tmp_path, base="one")
    servers = [serve(tmp_path, zookeeper.hosts, root, stack)]
    url = f"zk://{zookeeper.hosts}/{root}"
    publisher = publisher_to(stack, model, url)
    trainer.step(2)
    pushed(publisher, servers, model)

    zookeeper.kill()
    try:
        trainer.step(2)
        pushed(publisher, servers, model)
    finally:
        zookeeper.start()
    trainer.step(2)
    servers.append(serve(tmp_path, zookeeper.hosts, root, stack))

    pushed(publisher, servers, model)


def test_training_starts_while_zookeeper_is_away(
    zookeeper: ZooKeeper, root: str, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.serving.sync.publisher.START_SECONDS", 0.05)
    model = make_model()
    trainer = Trainer(model)
    trainer.step(3)
    export_version(model, tmp_path, base="one")
    zookeeper.kill()
    try:
        url = f"zk://{zookeeper.hosts}/{root}"
        publisher = publisher_to(stack, model, url)
        trainer.step(2)
    finally:
        zookeeper.start()
    servers = [serve(tmp_path, zookeeper.hosts, root, stack)]
    pushed(publisher, servers, model)
