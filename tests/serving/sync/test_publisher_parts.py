"""The publisher: several ranks, models in parts, and servers of Monolith."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import SGD, LocalShards, TableConfig
from megalith.compat.monolith.dummy_server import DummySyncServer
from megalith.serving.discovery import Replica as Found
from megalith.serving.discovery import StaticDiscovery, SyncBackend
from tests.serving.sync_support import (
    LIMIT,
    Trainer,
    assert_equal,
    export_version,
    make_model,
    publisher_to,
    serve,
)

# ---- many ranks, many parts


def test_ranks_of_one_session_push_each_its_own_rows(stack: ExitStack, tmp_path: Path) -> None:
    model = make_model()
    (servable,) = export_version(model, tmp_path, base="one")
    server = serve(stack, servable)
    config = [TableConfig(name, dim=5, optimizer=SGD(0.1)) for name in ("user", "item")]
    ranks = [LocalShards(config) for _ in range(2)]
    publishers = [
        publisher_to(stack, shards, [server], base=base, session="a" * 32, index=index, count=2)
        # The second does not know the server's base: then all rows are replaced, the first one's too.
        for index, (shards, base) in enumerate(zip(ranks, ["one", "other"], strict=True))
    ]
    for turn in range(3):
        for index, shards in enumerate(ranks):
            ids = torch.arange(index, 100, 2)
            shards.assign({"user": (ids, torch.rand(50, 5) + turn)})
            publishers[index].publish()

    def flushed() -> bool:
        done = [publisher.flush(1.0) for publisher in publishers]
        return all(done)

    # A rank learns only with its next message that another rank is replacing all rows.
    assert any(flushed() for _ in range(50))
    assert not any(publisher.lagging() for publisher in publishers)
    for index, shards in enumerate(ranks):
        ids = torch.arange(index, 100, 2)
        assert torch.equal(servable.lookup("user", ids), shards.local["user"].lookup(ids))
    assert server.subscribers["movies"].staleness() is not None


class _Backend(SyncBackend):
    """Monolith's part of a discovery: no watches, and one part at a time."""

    def __init__(self, parts: list[tuple[str, str]]) -> None:
        self._addresses = dict(parts)

    def subscribe_model(self, model_name: str) -> None:
        assert model_name == "movies"

    def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
        return f"movies:{sub_graph}", [self._addresses[sub_graph]]


def by_part(parts: list[tuple[str, str]]) -> StaticDiscovery:
    return StaticDiscovery({f"movies:{part}": [address] for part, address in parts})


def one_list(parts: list[tuple[str, str]]) -> StaticDiscovery:
    return StaticDiscovery([address for _, address in parts])


@pytest.mark.parametrize(
    ("targets", "routing", "signature", "found"),
    [
        (by_part, "roundrobin", "hashtable_assign", {"entry", "ps_0", "ps_1"}),
        (by_part, "hash_roundrobin", "raw_assign", {"entry", "ps_0", "ps_1"}),
        (one_list, "roundrobin", "hashtable_assign", {"entry", "ps_0", "ps_1", None}),
        (_Backend, "roundrobin", "hashtable_assign", {"ps_0", "ps_1"}),
    ],
)
def test_parts_get_the_rows_that_serving_routes_to_them(
    stack: ExitStack, tmp_path: Path, targets: Any, routing: str, signature: str, found: set[str | None]
) -> None:
    """Whether each part has its list of servers, all parts have one, or a backend is asked for each."""
    model = make_model(dist_type=routing)
    trainer = Trainer(model)
    trainer.step(2)
    parts = [
        each
        for each in export_version(model, tmp_path, base="one", num_shards=2)
        if each.signature.part in found
    ]
    addresses = [(part.signature.part, serve(stack, part).address) for part in parts]
    publisher = publisher_to(stack, model, targets(addresses), signature=signature)
    for _ in range(3):
        trainer.step()
        # The parts are found when the first one has answered.
        assert publisher.flush(LIMIT), publisher.report()
    with publisher.lock:
        assert publisher.lock.wait_for(lambda: {each.part for each in publisher.report()} == found, LIMIT)

    assert publisher.flush(LIMIT), publisher.report()
    for servable in parts:
        assert_equal(servable, model)


def test_flush_waits_for_a_part_without_a_server(stack: ExitStack, tmp_path: Path) -> None:
    model = make_model()
    parts = export_version(model, tmp_path, base="one", num_shards=2)
    entry, ps_0, ps_1 = (serve(stack, part) for part in parts)
    targets = StaticDiscovery({"movies:entry": [entry.address], "movies:ps_0": [ps_0.address]})
    publisher = publisher_to(stack, model, targets)
    assert not publisher.flush(0.5)
    with publisher.lock:
        assert publisher.lock.wait_for(lambda: len(publisher.lagging()) == 1, LIMIT)
    assert [(report.model, report.address) for report in publisher.lagging()] == [("movies:ps_1", "nowhere")]

    targets.register("movies:ps_1", Found(ps_1.address))

    assert publisher.flush(LIMIT)


# ---- Monolith's protocol


def test_monolith_servers_get_rows_and_removals_without_metadata_and_retries_of_the_same(
    stack: ExitStack,
) -> None:
    server = stack.enter_context(DummySyncServer())
    shards = LocalShards([TableConfig("user", dim=2, optimizer=SGD(0.1))])
    publisher = publisher_to(stack, shards, [server], base=None, protocol="monolith")
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
