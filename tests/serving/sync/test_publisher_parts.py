"""The publisher: several ranks, models in parts, and servers of Monolith."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from megalith import SGD, LocalShards, TableConfig
from megalith.compat.monolith.dummy_server import DummySyncServer
from megalith.serving.discovery import Replica as Found
from megalith.serving.discovery import StaticDiscovery, SyncBackend
from megalith.serving.export.servable import Servable
from megalith.serving.sync.publisher import Publisher
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync_support import (
    HOUR,
    LIMIT,
    Trainer,
    assert_equal,
    export_version,
    make_model,
    sync_server,
)

# ---- many ranks, many parts


def test_ranks_of_one_session_push_each_its_own_rows(stack: ExitStack, tmp_path: Path) -> None:
    model = make_model()
    (servable,) = export_version(model, tmp_path, base="one")
    subscriber = Subscriber(servable)
    server = stack.enter_context(sync_server({"movies": subscriber}))
    config = [TableConfig(name, dim=5, optimizer=SGD(0.1)) for name in ("user", "item")]
    ranks = [LocalShards(config) for _ in range(2)]
    publishers = [
        stack.enter_context(
            Publisher(
                shards,
                StaticDiscovery([server.address]),
                model_name="movies",
                interval=HOUR,
                base=base,
                session="a" * 32,
                index=index,
                count=2,
            )
        )
        # The second does not know the server's base: then all rows are replaced, the first one's too.
        for index, (shards, base) in enumerate(zip(ranks, ["one", "other"], strict=True))
    ]
    for turn in range(3):
        for index, shards in enumerate(ranks):
            ids = torch.arange(index, 100, 2)
            shards.assign({"user": (ids, torch.rand(50, 5) + turn)})
            publishers[index].publish()
    for _ in range(50):
        # A rank learns only with its next message that another rank is replacing all rows.
        done = [publisher.flush(1.0) for publisher in publishers]
        if all(done):
            break

    assert not any(publisher.lagging() for publisher in publishers)
    for index, shards in enumerate(ranks):
        ids = torch.arange(index, 100, 2)
        assert torch.equal(servable.lookup("user", ids), shards.local["user"].lookup(ids))
    assert subscriber.staleness() is not None


@pytest.mark.parametrize(
    ("routing", "signature"), [("roundrobin", "hashtable_assign"), ("hash_roundrobin", "raw_assign")]
)
def test_parts_get_the_rows_that_serving_routes_to_them(
    stack: ExitStack, tmp_path: Path, routing: str, signature: str
) -> None:
    model = make_model(dist_type=routing)
    trainer = Trainer(model)
    trainer.step(2)
    parts = export_version(model, tmp_path, base="one", num_shards=2)
    servers = {}
    for servable in parts:
        server = stack.enter_context(sync_server({_called(servable): Subscriber(servable)}))
        servers[servable.signature.part] = server
    targets = StaticDiscovery({f"movies:{part}": [server.address] for part, server in servers.items()})
    publisher = stack.enter_context(
        Publisher(model, targets, model_name="movies", interval=HOUR, base="one", signature=signature)
    )
    for _ in range(3):
        trainer.step()
        # The parts are found when the entry has answered.
        assert publisher.flush(LIMIT), publisher.report()
    with publisher.lock:
        assert publisher.lock.wait_for(lambda: len(publisher._senders) == 3, LIMIT)

    assert publisher.flush(LIMIT), publisher.report()
    for servable in parts:
        assert_equal(servable, model)
    assert {report.part for report in publisher.report()} == {"entry", "ps_0", "ps_1"}


class _Backend(SyncBackend):
    """Monolith's part of a discovery: no watches, and one part at a time."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses = addresses

    def subscribe_model(self, model_name: str) -> None:
        assert model_name == "movies"

    def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
        return f"movies:{sub_graph}", [self._addresses[sub_graph]]


def test_a_backend_without_watches_is_asked_for_every_part(stack: ExitStack, tmp_path: Path) -> None:
    model = make_model()
    parts = export_version(model, tmp_path, base="one", num_shards=2)[1:]
    servers = [stack.enter_context(sync_server({_called(part): Subscriber(part)})) for part in parts]
    backend = _Backend({f"ps_{number}": server.address for number, server in enumerate(servers)})
    publisher = stack.enter_context(Publisher(model, backend, model_name="movies", interval=HOUR, base="one"))
    Trainer(model).step(2)

    assert publisher.flush(LIMIT), publisher.report()

    for part in parts:
        assert_equal(part, model)


def test_flush_waits_for_a_part_without_a_server(stack: ExitStack, tmp_path: Path) -> None:
    model = make_model()
    parts = export_version(model, tmp_path, base="one", num_shards=2)
    entry, ps_0, ps_1 = (
        stack.enter_context(sync_server({_called(part): Subscriber(part)})) for part in parts
    )
    targets = StaticDiscovery({"movies:entry": [entry.address], "movies:ps_0": [ps_0.address]})
    publisher = stack.enter_context(Publisher(model, targets, model_name="movies", interval=HOUR, base="one"))
    assert not publisher.flush(0.5)
    with publisher.lock:
        assert publisher.lock.wait_for(lambda: len(publisher.lagging()) == 1, LIMIT)
    assert [(report.model, report.address) for report in publisher.lagging()] == [("movies:ps_1", "nowhere")]

    targets.register("movies:ps_1", Found(ps_1.address))

    assert publisher.flush(LIMIT)


def test_one_list_of_addresses_is_enough_for_all_parts(stack: ExitStack, tmp_path: Path) -> None:
    model = make_model()
    parts = export_version(model, tmp_path, base="one", num_shards=2)
    servers = [stack.enter_context(sync_server({_called(part): Subscriber(part)})) for part in parts]
    publisher = stack.enter_context(
        Publisher(
            model,
            StaticDiscovery([server.address for server in servers]),
            model_name="movies",
            interval=HOUR,
            base="one",
        )
    )
    Trainer(model).step(2)

    assert publisher.flush(LIMIT), publisher.report()

    for part in parts:
        assert_equal(part, model)


def _called(servable: Servable) -> str:
    return "movies" if servable.signature.part == "entry" else servable.signature.name


# ---- Monolith's protocol


def test_monolith_servers_get_rows_and_removals_without_metadata_and_retries_of_the_same(
    stack: ExitStack,
) -> None:
    server = stack.enter_context(DummySyncServer())
    shards = LocalShards([TableConfig("user", dim=2, optimizer=SGD(0.1))])
    publisher = stack.enter_context(
        Publisher(
            shards,
            StaticDiscovery([server.address]),
            model_name="movies",
            interval=HOUR,
            protocol="monolith",
        )
    )
    assert publisher.flush(LIMIT)
    assert server.requests == []  # nothing changed, nothing is sent
    server.fail_next(2)
    shards.assign({"user": (torch.tensor([1, 2]), torch.ones(2, 2))})
    shards.remove({"user": torch.tensor([2])})

    assert publisher.flush(LIMIT), publisher.report()

    (request,) = server.requests
    assert (request.model, request.signature) == ("movies:ps_0", "hashtable_assign")
    assert sorted(request.inputs) == ["user_id", "user_value"]
    assert request.inputs["user_id"].tolist() == [1, 2]
    assert request.inputs["user_value"].tolist() == [[1.0, 1.0], [0.0, 0.0]]  # a removed id reads as zeros
    assert not [key for key in request.metadata if key.startswith("megalith")]
    assert len(server.failed) == 2
