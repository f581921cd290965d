"""Tables that move to another number of servers, touched ids, errors and ends, on real Ray servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor
from typer.testing import CliRunner

from megalith import (
    Adagrad,
    Adam,
    EmbeddingCollection,
    Feature,
    LocalShards,
    MinCount,
    Pipeline,
    Servers,
    ServerShards,
    Shards,
    TableConfig,
    checkpoint,
)
from megalith.cli.main import app
from megalith.compat import monolith
from megalith.compat.monolith import DummySyncServer
from megalith.errors import InputError, RankTimeoutError, UnknownNameError, UsageError
from megalith.ps import shards as ps_shards
from megalith.ps.channel_client import ChannelReply
from megalith.ps.launch import ray_module
from megalith.ps.link import LinkGroup
from megalith.ps.reader import ServerReader
from megalith.ps.status import prometheus_text, server_status
from megalith.ps.table_space import TableSpace
from megalith.serving import Publisher, Servable, ServerPublisher, Subscriber, export_model
from megalith.serving.discovery import StaticDiscovery
from tests.compat.monolith.test_distributed_ps import CASES, MULTI_CASES, VECTORS, made
from tests.ps.support import NAMES, Make, push, read, rows_of, table, where
from tests.serving.sync_support import Trainer, make_model, sync_server
from tests.table.support import ints

CONFIGS = [
    TableConfig("a", dim=3, optimizer=Adagrad(0.1)),
    TableConfig("b", dim=2, optimizer=Adam(0.05), admission=MinCount(2)),
]


@pytest.fixture(scope="module")
def one(servers: Servers) -> Iterator[Servers]:
    with Servers(1, restart=True) as started:
        yield started


def refuse(*args: Any) -> Any:
    raise UsageError("refused")


def train(shards: Any, steps: range) -> None:
    """The same updates for any shards; ids of b repeat over the steps, so that counts of MinCount matter."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = {"a": torch.randint(0, 40, (12,), generator=generator), "b": ints(step // 2, 100 + step)}
        grads = {"a": torch.randn(12, 3, generator=generator), "b": torch.randn(2, 2, generator=generator)}
        shards.apply_gradients(ids, grads, step=step, time=float(step))
    shards.remove({"a": ints(7)})
    shards.flush()


# ---- another number of servers


def test_tables_move_to_other_numbers_of_servers(servers: Servers, one: Servers, tmp_path: Path) -> None:
    recovery = checkpoint.recovery(tmp_path)
    options: dict[str, Any] = {"name": "moved", "recovery": recovery, "timeout": 60.0}
    shards = ServerShards(CONFIGS, servers=one, router="hash_roundrobin", **options)
    local = LocalShards(CONFIGS)
    for each in (shards, local):
        each.track("sync")
    for number, chosen in enumerate((servers, one)):
        steps = range(4 * number, 4 * number + 4)
        train(shards, steps)
        train(local, steps)
        before = shards.lookup({"a": ints(1)})
        prepared = shards.prepare({"a": ints(1)})
        assert shards.resize(chosen) is chosen is shards.servers
        assert (shards.router("a").num_shards, shards.seen_step) == (len(chosen), steps[-1])
        with pytest.raises(UsageError, match="look up again"):
            shards.apply_gradients(before, {"a": torch.ones(1, 3)}, step=99)
        again = shards.lookup(prepared).rows["a"]  # routed to the new servers
        assert torch.equal(again, shards.lookup({"a": ints(1)}).rows["a"])
        for name in ("a", "b"):
            assert rows_of(shards, name) == rows_of(local, name)
            assert shards.stats()[name].counters == local.stats()[name].counters
        assert shards.describe_servers()[0]["step"] == steps[-1]
        assert shards.stats()["b"].counters.pending == local.stats()["b"].counters.pending > number
        if chosen is one:  # what was touched before both moves, and not drained
            found, expected = shards.drain_touched("sync"), local.drain_touched("sync")
            for name in ("a", "b"):
                for mine, theirs in zip(found[name], expected[name], strict=True):
                    assert sorted(mine.tolist()) == sorted(theirs.tolist())
    found = sorted(folder.name for folder in (tmp_path / "moved").iterdir())
    assert found == ["layout.json", "server-0-of-1"]


def test_a_collection_in_use_continues_to_train(make: Make, servers: Servers, one: Servers) -> None:
    """A resize between two steps, with lookups in progress, gives the bits of training without one."""

    def train(shards: Shards, resize: bool) -> dict[int, list[Any]]:
        made = EmbeddingCollection(shards, [Feature("x", "a"), Feature("y", "a")])
        generator = torch.Generator().manual_seed(0)
        ids = [torch.randint(50, (2, 8), generator=generator) for _ in range(12)]
        batches = [{"x": each[0], "y": each[1]} for each in ids]
        for batch in batches[:3]:
            made(batch, time=7)["x"].square().sum().backward()
        prepared = made.prepare(batches[3])
        if resize:
            shards.resize(one)  # type: ignore[attr-defined]
        for number, batch in enumerate(Pipeline(made, [prepared, *batches[4:]], mode="ids", depth=2)):
            (made(batch, time=7)["x"] * 0.5).sin().sum().backward()
            if number == 4 and resize:
                shards.resize(servers)  # type: ignore[attr-defined]
        shards.flush()
        return rows_of(shards, "a")

    options: dict[str, Any] = {"mode": "sync", "seed": 3}
    config = TableConfig("a", dim=3, optimizer=Adagrad(0.1))
    moved = train(make(config, **options), True)
    assert moved == train(make(config, **options), False)
    assert moved == train(LocalShards([config], seed=3), False)


def test_frozen_tables_and_unused_features_are_not_written(make: Make) -> None:
    shards = make(table("a"), table("b"), mode="sync")
    made = EmbeddingCollection(shards, [Feature(name, name) for name in "ab"])

    def step(*ids: int, use: str) -> None:
        out = made({"a": ints(*ids), "b": ints(*ids)})
        used = sum(out[name].sum() for name in use)
        if isinstance(used, Tensor) and used.requires_grad:
            used.backward()

    step(1, use="a")
    made.requires_grad_(False)
    step(1, 2, use="ab")
    made.requires_grad_(True)
    step(3, use="b")
    shards.flush()
    assert [{i: row[0] for i, row in rows_of(shards, name).items()} for name in "ab"] == [
        {1: [-1.0]},
        {3: [-1.0]},
    ]


def test_the_other_workers_reconnect(make: Make, one: Servers) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    for each in (first, second):
        push(each, [1, 2], [[1.0], [1.0]])
    first.flush()
    second.flush()
    moved = first.resize(one)
    push(first, [1], [[1.0]], 1)
    with pytest.raises(UsageError, match="call reconnect"):
        read(second, "t", 1)
    second.reconnect(moved)
    assert second.seen_step == 1
    push(second, [1], [[1.0]], 1)  # the step of the first worker has waited for it
    assert read(second, "t", 1, 2) == [[-4], [-2]]
    second.close()
    first.close()


def test_a_move_that_fails_leaves_the_tables_where_they_are(
    make: Make, servers: Servers, one: Servers
) -> None:
    shards = make(table())
    push(shards, [1], [[1.0]])
    with pytest.raises(UsageError, match="pass other servers"):
        shards.resize(servers)
    other = ServerShards([table()], servers=one, name=shards.name, worker=3)
    push(other, [5], [[1.0]])
    other.flush()
    with pytest.raises(UsageError, match="have tables under this name already"):
        shards.resize(one)
    assert read(other, "t", 5) == [[-1]]  # those tables stay too
    for wrong in (0, True, "x", None, 1.5):
        with pytest.raises(InputError):
            shards.resize(wrong)  # type: ignore[arg-type]
    for router in (3, "x", {"u": "roundrobin"}):
        with pytest.raises((InputError, UnknownNameError)):
            shards.resize(one, router=router)  # type: ignore[arg-type]
    assert read(shards, "t", 1) == [[-1]]


def test_ids_prepared_for_another_router_are_routed_again(make: Make, servers: Servers) -> None:
    shards = make(table())
    push(shards, [1, 2, 3], [[1.0], [2.0], [3.0]])
    prepared = make(table(), router="hash_roundrobin").prepare({"t": ints(1, 2, 3)})
    assert shards.lookup(prepared).rows["t"].tolist() == [[-1], [-2], [-3]]


def test_a_move_that_ended_with_its_process_does_not_block_the_next_one(
    make: Make, servers: Servers, one: Servers, tmp_path: Path
) -> None:
    recovery = checkpoint.recovery(tmp_path)
    shards = make(table(), recovery=recovery)
    push(shards, [1, 2], [[1.0], [2.0]])
    shards.flush()
    lost = shards._elsewhere(one, None, move="lost")  # what a process has done that ended in the midst of it
    for chunk in shards.scan("t", 1):
        lost.restore("t", chunk)
        break
    ray_module().get([actor.close.remote(shards.name) for actor in one.actors])  # and so did the new servers
    with pytest.raises(UsageError, match="are on 2 servers, not on 1"):
        ServerShards([table()], servers=one, name=shards.name, recovery=recovery)
    shards.resize(one)
    assert rows_of(shards).keys() == {1, 2}
    with pytest.raises(
        UsageError, match="are on 1 servers, not on 2: call reconnect"
    ):  # old ones, started again
        ServerShards([table()], servers=servers, name=shards.name, recovery=recovery)


@pytest.mark.parametrize("log", ["none", "async"])
def test_moved_rows_are_in_the_new_log_before_the_old_one_is_deleted(
    make: Make, one: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    shards = make(table(), recovery=checkpoint.recovery(tmp_path / "logs", log=log))
    shards.track("sync")
    push(shards, [1, 2, 3], [[1.0], [2.0], [3.0]])
    with monkeypatch.context() as patch:
        patch.setattr(ps_shards, "_move_counts", refuse)
        with pytest.raises(UsageError, match="refused"):
            shards.resize(one)
    shards.resize(one)  # what failed has left no log that would be read now
    folder = tmp_path / "logs" / shards.name
    assert sorted(each.name for each in folder.iterdir()) == ["layout.json", "server-0-of-1"]
    copy = tmp_path / "copy"
    shutil.copytree(folder / "server-0-of-1", copy)  # what a server finds that starts again at this moment
    again = TableSpace(shards.links[0]._spec, 0, 1)
    again.recover(copy)
    assert again.part.shards.lookup({"t": ints(1, 2, 3)}).rows["t"].tolist() == [[-1], [-2], [-3]]
    assert sorted(again.part.shards.drain_touched("sync")["t"][0].tolist()) == [1, 2, 3]
    assert (again.step, again.members[0].pushes) == (0, 1)
    again.close()


# ---- touched ids


@pytest.mark.parametrize("failing", ["drain", "confirm"])
def test_no_touched_id_is_lost_when_one_server_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    shards = make(table())
    shards.track("sync")
    push(shards, [0, 1, 2, 3], [[1.0]] * 4)
    results = LinkGroup.results

    def fail(links: LinkGroup, calls: Any) -> list[Any]:
        found = results(links, calls)  # all servers have done it, but one answer does not arrive
        if calls[0][1].what == failing:
            raise RankTimeoutError("no answer")
        return found

    drained: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(LinkGroup, "results", fail)
        with nullcontext() if failing == "confirm" else pytest.raises(RankTimeoutError):
            drained += shards.drain_touched("sync")["t"][0].tolist()
    push(shards, [3, 5], [[1.0]] * 2)
    assert {*drained, *shards.drain_touched("sync")["t"][0].tolist()} == {0, 1, 2, 3, 5}
    assert shards.drain_touched("sync")["t"][0].tolist() == []


# ---- errors and ends


def test_a_server_out_of_reach_has_lost_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, ray = make(table()), ray_module()
    push(shards, [2], [[1.0]])
    push(shards, [2], [[1.0]], 1)
    get, calls = ray.get, []
    lost = shards.links[0]._channel
    assert lost is not None
    lost.close()

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise ray.exceptions.ActorUnavailableError("interrupted", None)
        return get(*args, **options)

    monkeypatch.setattr(ray, "get", interrupted)
    shards.flush()  # the pushes are sent again over another connection, and not applied twice
    assert shards.links[0]._channel is not lost
    assert len(calls) == 2  # the address of the server was asked for twice
    assert read(shards, "t", 2) == [[-2]]
    calls.clear()
    shards.assign({"t": (ints(2), torch.tensor([[5.0]]))})  # a write that goes through Ray
    assert len(calls) == 2
    assert read(shards, "t", 2) == [[5]]
    calls.clear()
    assert shards.stats()["t"].rows == 1  # what only reads is asked again
    calls.clear()
    with pytest.raises(RankTimeoutError, match="rows are not lost"):
        shards.each_part(where)


def test_a_synchronous_worker_that_cannot_send_reports_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    push(first, [2, 3], [[1.0], [1.0]])

    def refuse(*args: Any) -> Any:
        raise OSError("not sent")

    with monkeypatch.context() as patch:
        patch.setattr(second.links[1]._channel, "push", refuse)
        with pytest.raises(OSError, match="not sent"):
            push(second, [2, 3], [[1.0], [1.0]])
    with pytest.raises(Exception, match=r"worker 1 failed.*not sent"):
        first.flush()
    second.flush()
    assert read(first, "t", 2, 3) == [[-2], [0]]  # the first server had all gradients
    for each in (first, second):
        push(each, [3], [[1.0]], 1)
    assert read(first, "t", 3) == [[-2]]


def test_owned_servers_end_if_a_worker_cannot_join(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Servers] = []

    class Recorded(Servers):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            self.process = self.actors[0]

    monkeypatch.setattr(ps_shards, "Servers", Recorded)
    monkeypatch.setattr(LinkGroup, "join", refuse)
    with pytest.raises(UsageError, match="refused"):
        ServerShards([table()], num_servers=1)
    assert len(started[0]) == 0
    with pytest.raises(ray_module().exceptions.RayActorError):
        ray_module().get(started[0].process.describe.remote("tables"), timeout=60.0)


def test_tables_are_dropped_on_request(make: Make) -> None:
    name = next(NAMES)
    first = make(table(), name=name)
    push(first, [1], [[1.0]])
    first.close()
    second = make(table(), name=name)
    assert read(second, "t", 1) == [[-1]]  # they outlive their workers
    second.close(drop=True)
    assert read(make(table(dim=2), name=name), "t", 1) == [[0, 0]]


# ---- numbers


def test_numbers_of_servers(make: Make, servers: Servers, tmp_path: Path) -> None:
    shards = make(TableConfig("a", dim=3, optimizer=Adagrad(0.1)), name="numbers")
    push(shards, [1, 2, 3], [[1.0] * 3] * 3, 4, "a")
    for _ in range(3):
        read(shards, "a", 1, 2)
    checkpoint.save(EmbeddingCollection(shards, [Feature("f", "a")]), tmp_path)
    for server, each in enumerate(shards.describe_servers()):
        assert (each["name"], each["server"], each["reads"]) == ("numbers", server, 3)
        assert sum(each["lookup_seconds"]["counts"]) == 3
        assert each["requests_per_second"] > 0
        assert each["last_checkpoint"] > 1.6e9
        assert each["step"] == 4
    listed = [each for each in server_status() if each["name"] == "numbers"]
    assert [each["rows"] for each in listed] == [{"a": 1}, {"a": 2}]
    run = CliRunner().invoke(app, ["servers", "status", "--json"])
    assert [each["rows"] for each in json.loads(run.output) if each["name"] == "numbers"] == [
        {"a": 1},
        {"a": 2},
    ]
    shown = CliRunner().invoke(app, ["servers", "status"])
    assert "numbers" in shown.output
    assert "s ago" in shown.output
    text = CliRunner().invoke(app, ["servers", "status", "--prometheus"]).output
    families = {family.name: family for family in text_string_to_metric_families(text)}
    rows = [s for s in families["megalith_server_rows"].samples if s.labels["name"] == "numbers"]
    assert [(s.labels["server"], s.labels["table"], s.value) for s in rows] == [("0", "a", 1), ("1", "a", 2)]
    found = [s for s in families["megalith_server_lookup_seconds"].samples if s.labels["name"] == "numbers"]
    assert [s.value for s in found if s.name.endswith("_count")] == [3, 3]


def test_status_needs_a_cluster(servers: Servers) -> None:
    for wrong in ("", 3):
        with pytest.raises(InputError, match="address"):
            server_status(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="server_status"):
        prometheus_text([{"x": 1}])


# ---- parameter sync


class Towers(torch.nn.Module):
    """A model of one table and one dense layer."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, [Feature("f", "a")])
        self.dense = torch.nn.Linear(3, 1)


def test_servers_publish_their_own_rows(make: Make, tmp_path: Path) -> None:
    config = TableConfig("a", dim=3, optimizer=Adagrad(0.1), missing="zeros")
    shards, ids = make(config), torch.arange(40)
    push(shards, ids.tolist(), [[1.0] * 3] * 40, name="a")
    export_model(shards, tmp_path / "movies", name="movies", version=1)
    subscriber = Subscriber(served := Servable(tmp_path / "movies" / "1"))
    with sync_server({"movies": subscriber}) as server:
        target, options = f"static:{server.address}", {"model_name": "movies", "interval": 3600.0}
        with pytest.raises(UsageError, match="ServerPublisher"):
            Publisher(shards, target, **options)  # type: ignore[arg-type]
        with ServerPublisher(shards, target, **options) as publisher:  # type: ignore[arg-type]
            assert not publisher.step()
            for step in range(2):
                push(shards, ids[step::3].tolist(), [[2.0] * 3] * len(ids[step::3]), step + 1, "a")
                shards.remove({"a": ints(7)})
                assert publisher.flush(60.0), publisher.report()
                assert torch.equal(served.lookup("a", ids), shards.lookup({"a": ids}).rows["a"])
            assert (len(publisher.report()), publisher.lagging()) == (3, [])
            with pytest.raises(UsageError, match="has a publisher already"):
                ServerPublisher(shards, target, **options)  # type: ignore[arg-type]
        publisher.close()  # a second call has no effect
        assert shards.describe_servers()[0]["consumers"] == []
    model = Towers(shards)
    with ServerPublisher(model, "static:127.0.0.1:9", **options) as publisher:  # type: ignore[arg-type]
        assert publisher.dense.keys() == {"dense.weight", "dense.bias"}
        publisher.checkpoint_taken("x")
    for wrong, given in (
        ({"model": LocalShards([config])}, UsageError),
        ({"model": 3}, InputError),
        ({"targets": 3}, InputError),
        ({"interval": -1}, InputError),
        ({"index": 1}, InputError),
    ):
        with pytest.raises(given):
            ServerPublisher(**{"model": shards, "targets": "static:127.0.0.1:9", **options, **wrong})  # type: ignore[arg-type]


def sync_targets(servers: list[DummySyncServer]) -> StaticDiscovery:
    backend = StaticDiscovery({f"movies:ps_{i}": [each.address] for i, each in enumerate(servers)})
    backend.subscribe_model("movies")
    return backend


def test_one_sync_client_per_server_pushes_the_rows_of_that_server(make: Make) -> None:
    """The flow of a Monolith deployment: each parameter server pushes its own rows to its part."""
    shards = make(table("a", 2))
    with ExitStack() as stack:
        targets = [stack.enter_context(DummySyncServer()) for _ in range(2)]
        backend = sync_targets(targets)
        clients = [stack.enter_context(each) for each in monolith.create_parameter_sync_clients(2)]
        for client in clients:
            client.attach(shards)
            client.attach(shards)  # a second call has no effect

        def sync() -> list[dict[str, Any]]:
            found = []
            for i, client in enumerate(clients):
                config = monolith.refresh_sync_config(backend, i)
                found += json.loads(client.create_sync_op(config)).get("responses", [])
            return found

        push(shards, [1, 2, 3, 4], [[1.0, 2.0]] * 4, name="a")
        assert [(x["status_code"], x["update_num"]) for x in sync()] == [(0, 2), (0, 2)]
        for i, target in enumerate(targets):
            ids, rows = target.wait()[0].tables["a"]
            assert sorted(ids.tolist()) == [[2, 4], [1, 3]][i]
            assert rows.tolist() == [[-1.0, -2.0]] * 2
        assert [x["update_num"] for x in sync()] == [0, 0]
        targets[1].fail_next()
        push(shards, [1, 2], [[1.0, 1.0]] * 2, 1, "a")
        assert [(x["status_code"], x["update_num"]) for x in sync()] == [(0, 1), (14, 0)]
        assert [x["update_num"] for x in sync()] == [0, 1]  # what failed is kept and sent again
        (alone,) = monolith.create_parameter_sync_clients(0)
        with alone, pytest.raises(UsageError, match=r"create_parameter_sync_clients\(2\)"):
            alone.attach(shards)
        with pytest.raises(UsageError, match="has the tables of a parameter server"):
            clients[0].attach(LocalShards([table("b")]))
    assert [each["consumers"] for each in shards.describe_servers()] == [[], []]


def test_servers_publish_to_monoliths_servers(make: Make, tmp_path: Path) -> None:
    shards = make(table("a", 2))
    with DummySyncServer() as one, DummySyncServer() as two:
        services = {f"movies:ps_{i}": [each.address] for i, each in enumerate((one, two))}
        (path := tmp_path / "servers.json").write_text(json.dumps({"services": services}))
        options: dict[str, Any] = {"model_name": "movies", "interval": 3600.0, "protocol": "monolith"}
        with ServerPublisher(shards, f"file:{path}", **options) as publisher:
            push(shards, [1, 2, 3], [[1.0, 2.0]] * 3, name="a")
            assert publisher.flush(60.0), publisher.report()
            assert [each.model for each in publisher.report()] == ["movies:ps_0", "movies:ps_1"]
        for server, ids in ((one, [2]), (two, [1, 3])):
            (request,) = server.requests
            found, rows = request.tables["a"]
            assert (sorted(found.tolist()), rows.tolist()) == (ids, [[-1.0, -2.0]] * len(ids))


# ---- reading live rows


def test_an_entry_reads_live_rows(make: Make, tmp_path: Path) -> None:
    model = make_model()
    Trainer(model).step(2)
    export_model(model, tmp_path / "whole", name="movies", version=1)
    export_model(model, tmp_path / "parts", name="movies", version=1, num_shards=1)
    own = model.embeddings.shards
    shards = make(*own.configs.values(), name="live")
    for name in own.configs:
        for chunk in own.scan(name):
            shards.restore(name, chunk)
    reader = ServerReader("live")
    ids = {name: torch.arange(-3, 60) for name in own.configs}
    rows, expected = reader.lookup(ids), own.lookup(ids).rows
    assert all(torch.equal(rows[name], expected[name]) for name in ids)
    whole = Servable(tmp_path / "whole" / "1")
    entry = Servable(tmp_path / "parts" / "entry" / "1", fetch=reader.lookup)
    features = {name: next(iter(own.scan(name))).ids[:8] for name in ("user", "item")}
    expected = whole.predict(features)
    for key, scores in entry.predict(features).items():
        assert torch.equal(scores, expected[key])
    before = reader.lookup({"user": ints(1)})["user"]
    shards.assign_add({"user": (ints(1), torch.ones_like(before))})
    assert torch.equal(reader.lookup({"user": ints(1)})["user"], before + 1)
    with pytest.raises(UnknownNameError):
        reader.lookup({"x": ints(1)})
    with pytest.raises(UsageError, match="no server has tables named"):
        ServerReader("nowhere")
    for wrong in ({"name": 3}, {"name": "live", "timeout": -1.0}, {"name": "live", "address": 3}):
        with pytest.raises(InputError):
            ServerReader(**wrong)  # type: ignore[arg-type]
    reader.close()


class LosingReader(ServerReader):
    """Its first connection to each server is lost before it has received an answer."""

    def _read(self, server: int, ids: Tensor, counts: list[int], out: Tensor) -> ChannelReply:
        new = server not in self._channels
        call = super()._read(server, ids, counts, out)
        if new:
            self._channels[server].close()
            assert call.lost
        return call


def test_rows_whose_connection_is_lost_are_read_again(make: Make) -> None:
    shards, ids = make(table(), name="lost"), torch.arange(10_000)
    shards.assign_add({"t": (ids, ids[:, None].float())})
    reader = LosingReader("lost")
    for _ in range(2):
        assert torch.equal(reader.lookup({"t": ids})["t"], ids[:, None].float())
    reader.close()


# ---- the cases of Monolith's test of distributed_ps, on two servers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_monoliths_table_on_servers(make: Make, case: Any) -> None:
    case(make)


@pytest.mark.parametrize("native", [False, True], ids=["not native", "native"])
@pytest.mark.parametrize("case", MULTI_CASES, ids=lambda case: case.__name__)
def test_monoliths_slots_on_servers(make: Make, case: Any, native: bool) -> None:
    case(make, native)


@pytest.mark.parametrize("native", [False, True], ids=["merged", "native"])
@pytest.mark.parametrize("vector", VECTORS, ids=["assign", "lookup", "gradients"])
def test_partitioned_tables_on_servers(make: Make, vector: Any, native: bool) -> None:
    vector(made(lambda server, configs: make(*configs.values()), native))
