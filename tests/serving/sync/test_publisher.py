"""The publisher: every target ends with the trainer's rows."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import SGD, FixedPoint, LocalShards, OneBit, TableConfig, checkpoint
from megalith.compat.monolith.distributed_serving_ops import DummySyncServer
from megalith.distributed.dense_parameters import dense_parameters
from megalith.errors import InputError
from megalith.serving.discovery import Replica as Found
from megalith.serving.discovery import StaticDiscovery, SyncBackend
from megalith.serving.sync.parameter_source import ParameterSource
from megalith.serving.sync.publisher import Publisher
from megalith.serving.sync.sender import Sender
from megalith.table import ServingPrecision
from tests.serving.sync_support import (
    HOUR,
    LIMIT,
    NAMES,
    Online,
    Trainer,
    assert_equal,
    export_version,
    make_model,
    make_start,
    publisher_to,
    serve,
)

# ---- several trainers


def test_the_older_of_two_trainers_is_refused_and_told(
    online: Online, caplog: pytest.LogCaptureFixture
) -> None:
    """Two live trainers of one model flipped what was served, and neither was told."""
    replica = online.replica()
    older = online.publisher([replica], session_number=1)
    online.trainer.step()
    online.assert_arrives(older, replica)
    newer = online.publisher([replica], session_number=2, base=None)
    online.trainer.step()
    online.assert_arrives(newer, replica)

    while "a newer training session" not in (older.report()[0].error or ""):
        assert not older.flush(0.02)

    online.trainer.step()
    online.assert_arrives(newer, replica)
    counts = replica.subscriber.counters
    assert (counts.sessions, counts.replaced_sessions) == (2, 1)
    assert counts.old_sessions >= 1
    assert "another trainer pushes to movies, so nothing of this one is served" in caplog.text
    assert "a newer training session" in str(older.lagging()[0].error)


# ---- targets that answer nothing


def test_a_server_that_cannot_be_reached_lags_and_one_without_the_model_does_not(online: Online) -> None:
    replica, other, gone = online.replica(), online.replica(), online.replica()
    other.server.subscribers.clear()  # it answers NOT_FOUND
    gone.server.stop()
    publisher = online.publisher([replica, other, gone])
    online.trainer.step()

    reports: dict[str, str] = {}
    while len(reports) < 2:  # each of the two has failed
        assert not publisher.flush(0.02)
        reports = {own.address: own.error for own in publisher.report() if own.error}
        reports.pop(replica.address, None)

    assert_equal(replica.servable, online.model)
    assert [own.address for own in publisher.lagging()] == [gone.address]


# ---- what arrives


def test_rows_of_16_bits_are_exported_and_pushed_exactly(tmp_path: Path, stack: ExitStack) -> None:
    options = {"precision": "bfloat16", "rounding": "stochastic"}
    online = Online(make_start(tmp_path, **options), stack, **options)
    replica = online.replica()
    assert_equal(replica.servable, online.model)
    publisher = online.publisher([replica])

    online.trainer.step(4)

    online.assert_arrives(publisher, replica)
    assert replica.subscriber.counters.begun == 1
    assert replica.subscriber.counters.removed > 0
    rows = online.model.embeddings.shards.local["user"].lookup(torch.arange(500))
    same = (rows == rows.bfloat16().float()).all(dim=0)
    assert sorted(same.tolist()) == [False, True, True, True, True]  # the first-order weight stays float32


@pytest.mark.parametrize(
    ("serving", "signature"),
    [(FixedPoint(0.125), "hashtable_assign"), (OneBit(0.05), "raw_assign")],
    ids=["fixed_point", "one_bit"],
)
def test_codes_are_pushed_and_served(
    tmp_path: Path, stack: ExitStack, serving: ServingPrecision, signature: str
) -> None:
    online = Online(make_start(tmp_path, serving=serving), stack, serving=serving)
    replica = online.replica()
    assert_equal(replica.servable, online.model)
    publisher = online.publisher([replica], signature=signature)

    online.trainer.step(4)

    online.assert_arrives(publisher, replica)
    code = {"hashtable_assign": "user_code", "raw_assign": "flat_code"}[signature]
    sent = {name for _, _, inputs, _ in replica.server.requests for name in inputs}
    assert code in sent
    assert "user_value" not in sent
    rows = online.model.embeddings.shards.local["user"].lookup(torch.arange(500))
    assert torch.equal(serving.served(rows[:, 1:]), rows[:, 1:])  # after the first-order weight


def test_another_serving_precision_than_that_of_the_server_is_refused(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, errors = threading.Event(), []

    def pause(sender: Sender, failures: int) -> None:
        errors.append(sender.report.error)
        failed.set()
        sender._closed.wait()

    monkeypatch.setattr(Sender, "_pause", pause)
    online = Online(make_start(tmp_path, serving=FixedPoint(1.0)), stack, serving=FixedPoint(2.0))
    online.publisher([online.replica()])

    assert failed.wait(LIMIT)
    assert "is served in another precision than that of its segments here" in str(errors[0])


def test_a_server_without_codes_gets_the_served_values_as_floats(tmp_path: Path, stack: ExitStack) -> None:
    online = Online(make_start(tmp_path), stack, serving=FixedPoint(0.125))
    replica = online.replica()
    publisher = online.publisher([replica])
    online.model.embeddings.shards.mark_touched(publisher._consumer, {n: torch.arange(500) for n in NAMES})

    online.trainer.step(4)

    online.assert_arrives(publisher, replica)


def test_two_publishers_of_one_model_both_push_everything(online: Online) -> None:
    replicas = [online.replica(), online.replica()]
    publishers = [online.publisher([replica]) for replica in replicas]
    online.trainer.step(2)

    for publisher, replica in zip(publishers, replicas, strict=True):
        online.assert_arrives(publisher, replica)


def test_a_step_publishes_once_the_interval_has_passed(online: Online) -> None:
    for interval, passed in ((HOUR, False), (1e-9, True)):
        publisher = online.publisher([], interval=interval)

        assert publisher.step() is passed

        assert publisher.interval.number == int(passed)
        publisher.close()


def test_only_changes_are_sent_to_a_server_at_a_known_save(online: Online) -> None:
    online.trainer.step(5)
    replica = online.replica()
    publisher = online.publisher([replica])
    assert publisher.flush(LIMIT)
    assert replica.subscriber.counters.rows == 0

    online.model.embeddings.shards.assign({"user": (torch.tensor([3, 4]), torch.ones(2, 5))})
    assert publisher.flush(LIMIT)

    assert replica.subscriber.counters.rows == 2


def test_an_interval_without_changes_is_a_heartbeat(online: Online) -> None:
    replica = online.replica()
    publisher = online.publisher([replica])
    assert publisher.flush(LIMIT)
    before = replica.subscriber.counters.messages

    assert publisher.flush(LIMIT)

    assert replica.subscriber.counters.messages == before + 1
    (report,) = publisher.report()
    assert (report.backlog, report.error, report.part) == (0, None, "standalone")
    assert report.staleness is not None


def test_a_later_export_starts_at_its_own_save(online: Online, stack: ExitStack, tmp_path: Path) -> None:
    discovery = StaticDiscovery([])
    publisher = online.publisher(discovery)
    online.trainer.step(3)
    save = checkpoint.save(online.model, tmp_path / "checkpoint")
    publisher.checkpoint_taken(save.tip)
    (servable,) = export_version(online.model, tmp_path / "export", base=save.tip)
    online.trainer.step(1, dense=False)
    server = serve(stack, servable)
    discovery.register("movies:standalone", Found(server.address))

    online.assert_arrives(publisher, servable)
    assert 0 < server.subscribers["movies"].counters.rows <= 64


def test_messages_stay_below_4_mib(stack: ExitStack, start: Path, tmp_path: Path) -> None:
    model = make_model()
    (servable,) = export_version(model, tmp_path, base="one")
    server = serve(stack, servable)
    publisher = publisher_to(stack, model, [server])
    ids = torch.arange(300_000)
    model.embeddings.shards.assign({"user": (ids, torch.rand(300_000, 5))})

    assert publisher.flush(LIMIT)

    sizes = [
        sum(tensor.nbytes for tensor in inputs.values())
        for _, signature, inputs, _ in server.requests
        if signature == "hashtable_assign"
    ]
    # In addition to the heartbeat with the first dense weights
    assert sum(size > 1000 for size in sizes) == 3
    assert max(sizes) < 4 << 20
    assert torch.equal(servable.lookup("user", ids), model.embeddings.shards.local["user"].lookup(ids))


@pytest.mark.parametrize("room", [None, 1 << 20])
def test_dense_weights_beyond_4_mib_change_with_the_last_message(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    if room is not None:  # every large weight is sent in parts
        monkeypatch.setattr("megalith.serving.sync.sender.MAX_CONTENT_BYTES", room)
    model = make_model(hidden=(900, 900, 900))
    (servable,) = export_version(model, tmp_path, base="one")
    server = serve(stack, servable)
    publisher = publisher_to(stack, model, [server])
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    seen: list[bool] = []
    name = next(name for name, shape in servable.dense_names.items() if shape == (900, 900))
    server.after = lambda *_: seen.append(torch.equal(servable.dense_weights[name], model.state_dict()[name]))

    assert publisher.flush(LIMIT)

    assert_equal(servable, model)
    assert seen[-1]
    assert seen.count(False) >= 2


def test_rows_that_are_not_finite_are_held_back_and_logged(
    online: Online, caplog: pytest.LogCaptureFixture
) -> None:
    replica = online.replica()
    publisher = online.publisher([replica])
    rows = torch.ones(2, 5)
    rows[1] = torch.finfo(torch.float32).max
    online.model.embeddings.shards.assign({"user": (torch.tensor([1, 2]), rows)})
    online.model.embeddings.shards.assign_add({"user": (torch.tensor([2]), rows[1:])})

    assert publisher.flush(LIMIT), publisher.report()

    assert publisher.source.held_back == 1
    assert "1 of table 'user' (ids 2)" in caplog.text
    assert replica.servable.lookup("user", torch.tensor([1]))[0, 0] == 1.0


def test_dense_weights_that_are_not_finite_are_held_back_and_logged(
    online: Online, caplog: pytest.LogCaptureFixture
) -> None:
    replica = online.replica()
    publisher = online.publisher([replica])
    name, weight = next(dense_parameters(online.model))
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.nan

    assert publisher.flush(LIMIT), publisher.report()

    assert torch.equal(replica.servable.dense_weights[name], before)
    assert f"not finite: {name}" in caplog.text


def test_an_error_in_publish_loses_no_ids(online: Online, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = online.replica()
    publisher = online.publisher([replica])
    online.trainer.step(2)

    def fail() -> None:
        raise MemoryError("no memory for the dense weights")

    with monkeypatch.context() as broken:
        broken.setattr(publisher.source, "copy_dense", fail)
        with pytest.raises(MemoryError):
            publisher.publish()

    online.assert_arrives(publisher, replica)


def test_an_error_in_the_tables_of_one_collection_loses_no_ids_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collections = {name: make_model().embeddings for name in ("first", "second")}
    source = ParameterSource(torch.nn.ModuleDict(collections))
    source.track("test")
    for collection in collections.values():
        collection.shards.assign({"user": (torch.tensor([1, 2]), torch.ones(2, 5))})

    def fail(consumer: str) -> None:
        raise MemoryError(f"no memory for the ids of {consumer}")

    with monkeypatch.context() as broken:
        broken.setattr(collections["second"].shards, "drain_touched", fail)
        with pytest.raises(MemoryError):
            source.drain("test")

    drained = {name: ids.tolist() for name, ids in source.drain("test").items() if ids.numel()}
    assert drained == {"first.user": [1, 2], "second.user": [1, 2]}


# ---- arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0.0},
        {"timeout": -1.0},
        {"protocol": "tensorflow"},
        {"signature": "serving_default"},
        {"session": "short"},
        {"index": 2, "count": 2},
        {"model_name": "a/b"},
        {"max_backlog": 0},
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    shards = LocalShards([TableConfig("user", dim=2, optimizer=SGD(0.1))])
    with pytest.raises(InputError):
        Publisher(shards, StaticDiscovery([]), **{"model_name": "movies", **wrong})


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(InputError, match="no EmbeddingCollection"):
        Publisher(torch.nn.Linear(1, 1), StaticDiscovery([]), model_name="movies")


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
