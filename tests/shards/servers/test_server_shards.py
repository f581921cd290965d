"""ServerShards on two real Ray servers.

Each test has tables of its own on the same servers. The guide of the servers and the sweep of wrong input of
`tests/test_wrong_input.py` run here too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Adam,
    Capacity,
    Constant,
    EmbeddingCollection,
    Feature,
    LocalShards,
    MinCount,
    OneBit,
    Pipeline,
    PolynomialDecay,
    Ragged,
    Router,
    Segment,
    Servers,
    ServerShards,
    Shards,
    TableConfig,
    checkpoint,
)
from megalith.errors import (
    InputError,
    RankTimeoutError,
    ServerLostError,
    TableFullError,
    UnknownNameError,
    UsageError,
)
from megalith.serving import export_model
from megalith.shards.gradient_sums import GradientSum, total
from megalith.shards.servers import server_link
from megalith.shards.servers.ray_servers import ray_module
from megalith.shards.servers.server_link import ServerLink
from megalith.shards.servers.server_lookup import ServerLookup
from tests.shards.servers.support import (
    NAMES,
    Make,
    nap,
    one_rate,
    push,
    read,
    rows_of,
    table,
    where,
    work,
)
from tests.table.support import ints
from tests.test_docs import ROOT, snippets
from tests.test_wrong_input import raw_errors
from tests.valid_calls import core
from tests.valid_calls.sweep import CANNOT_BE_CALLED, ON_SERVERS, Call, complete, names_of, public_names


def test_ray_listens_on_the_loopback_address(servers: Servers) -> None:
    assert [node["NodeManagerAddress"] for node in ray_module().nodes()] == ["127.0.0.1"]


# ---- Monolith's vectors (reference 1.5), on two servers


def test_one_table(make: Make) -> None:
    shards = make(table(dim=2))
    rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    shards.assign_add({"t": (ints(1, 2, 3), rows)})
    assert read(shards, "t", 1, 2, 3) == [[1, 1], [2, 2], [3, 3]]
    assert read(shards, "t", 1, 1, 3) == [[1, 1], [1, 1], [3, 3]]
    shards.assign({"t": (ints(2, 3, 4), rows)})
    assert read(shards, "t", 1, 2, 3, 4) == [[1, 1], [1, 1], [2, 2], [3, 3]]


def test_gradients_of_one_table(make: Make) -> None:
    shards = make(
        table("plain"), table("duplicates"), table("other"), table("lr", lr=PolynomialDecay(1.0, 10, 2.0))
    )
    push(shards, [0, 1], [[2.0], [2.0]], name="plain")
    assert read(shards, "plain", 0, 1) == [[-2], [-2]]
    push(shards, [0, 3, 0, 1], [[2.0]] * 4, name="duplicates")
    assert read(shards, "duplicates", 0, 3, 0, 1) == [[-4], [-2], [-4], [-2]]
    shards.apply_gradients({"other": ints(1, 1)}, {"other": torch.full((2, 1), -2.0)}, step=0)
    assert read(shards, "other", 1, 0) == [[4], [0]]
    push(shards, [0, 1], [[2.0], [2.0]], 0, "lr")
    assert read(shards, "lr", 0, 1) == [[-2], [-2]]
    push(shards, [0, 1], [[2.0], [2.0]], 1, "lr")
    assert read(shards, "lr", 0, 1) == [pytest.approx([-4.2]), pytest.approx([-4.2])]


def test_tables_of_two_dims(make: Make) -> None:
    shards = make(table("1", lr=PolynomialDecay(1.0, 10, 2.0)), table("2", 2, lr=one_rate))

    def both() -> list[Any]:
        rows = shards.lookup({"1": ints(1, 2), "2": ints(3)}).rows
        return [rows["1"].tolist(), rows["2"].tolist()]

    first = {"1": (ints(1, 2), torch.tensor([[-1.0], [-2.0]])), "2": (ints(3), torch.tensor([[-3.0, -3.0]]))}
    half = {name: values / 2 for name, (_, values) in first.items()}
    shards.assign_add(first)
    assert both() == [[[-1], [-2]], [[-3, -3]]]
    lookup = shards.lookup({"1": ints(1, 2), "2": ints(3)})
    shards.apply_gradients(lookup, half, step=0)
    assert both() == [[[-0.5], [-1]], [[-1.5, -1.5]]]
    shards.apply_gradients(shards.lookup({"1": ints(1, 2), "2": ints(3)}), half, step=1)
    found = both()
    assert found[0] == [pytest.approx([0.05]), pytest.approx([0.1])]
    assert found[1] == [[0, 0]]
    shards.assign({name: (ids, values / 2) for name, (ids, values) in first.items()})
    status = shards.reinitialize({"1": ints(1, 2, 3), "3": ints(1, 2, 3)}, missing_ok=True)
    assert {name: x.tolist() for name, x in status.items()} == {"1": [1, 1, 0], "3": [-1, -1, -1]}
    assert both() == [[[0], [0]], [[-1.5, -1.5]]]
    assert list(shards.lookup({"1": ints(1), "3": ints(1)}, missing_ok=True).rows) == ["1"]


def test_float16_on_the_wire(make: Make) -> None:
    shards = make(table("1"), table("2", 2), wire="float16")
    ids = {"1": ints(1, 2), "2": ints(3)}
    shards.apply_gradients(ids, {"1": torch.full((2, 1), 2.0), "2": torch.full((1, 2), 3.0)}, step=0)
    assert read(shards, "1", 1, 2) == [[-2], [-2]]
    assert read(shards, "2", 3) == [[-3, -3]]
    shards.assign({"1": (ints(9), torch.tensor([[1 / 3]]))})
    assert read(shards, "1", 9) == [[torch.tensor(1 / 3).half().item()]]  # rows are rounded on the way back
    assert rows_of(shards, "1")[9][0] == [torch.tensor(1 / 3).item()]


# ---- the contract, compared with one process

CONFIGS = [
    TableConfig("a", dim=3, optimizer=Adagrad(0.1)),
    TableConfig("b", dim=2, optimizer=Adam(0.05), admission=MinCount(2)),
]
few = st.lists(st.integers(-3, 6) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=6)
operations = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pool", "assign", "assign_add", "reinitialize", "remove", "evict"]),
        few,
        few,
    ),
    min_size=1,
    max_size=5,
)


def operate(shards: Shards, kind: str, ids: dict[str, Tensor], step: int) -> Any:
    """Makes one call; returns what it returned, as plain data."""
    dims = {"a": 3, "b": 2}
    values = {
        name: (torch.arange(x.numel() * dims[name]).view(-1, dims[name]) + step + 1) / 8
        for name, x in ids.items()
    }
    if kind == "push":
        lookup = shards.lookup(ids)
        rows = {name: lookup.rows[name].tolist() for name in ids}
        shards.apply_gradients(lookup, values, step=step, time=50.0 + step, scale=0.5, clip_norm=2.0)
        return rows
    if kind == "pool":
        shards.apply_gradients({"a": ids["a"]}, {"a": values["a"]}, step=step, time=9.0)
        return None
    if kind in ("assign", "assign_add"):
        return getattr(shards, kind)({name: (ids[name], values[name]) for name in ids}, time=60.0)
    if kind == "reinitialize":
        return {name: x.tolist() for name, x in shards.reinitialize(ids, time=70.0).items()}
    if kind == "remove":
        return shards.remove(ids)
    return {name: sorted(x.tolist()) for name, x in shards.evict(80.0).items()}


@pytest.fixture(scope="module")
def pair(servers: Servers) -> tuple[ServerShards, LocalShards]:
    return ServerShards(CONFIGS, servers=servers, name="pair", timeout=60.0), LocalShards(CONFIGS)


@settings(max_examples=20)
@given(work=operations)
def test_servers_do_what_one_process_does(
    pair: tuple[ServerShards, LocalShards], work: Sequence[Any]
) -> None:
    remote, local = pair
    remote.clear()
    local.clear()
    for step, (kind, a, b) in enumerate(work):
        ids = {"a": ints(*a), "b": ints(*b)}
        assert operate(remote, kind, ids, step) == operate(local, kind, ids, step)
    for name in ("a", "b"):
        assert rows_of(remote, name) == rows_of(local, name)
        assert remote.stats()[name].rows == local.stats()[name].rows
        assert remote.memory()[name].rows == local.memory()[name].rows


def test_rows_larger_than_a_message_come_through_shared_memory(make: Make) -> None:
    config = TableConfig("t", dim=16, optimizer=Adagrad(0.1))
    shards, local = make(config), LocalShards([config])
    ids = torch.randint(0, 10**12, (20_000,), generator=torch.Generator().manual_seed(1))
    grads = torch.randn(ids.numel(), 16, generator=torch.Generator().manual_seed(2))
    for step in range(2):
        for each in (shards, local):
            each.apply_gradients(each.lookup({"t": ids}), {"t": grads}, step=step, time=5.0)
    assert torch.equal(shards.lookup({"t": ids}).rows["t"], local.lookup({"t": ids}).rows["t"])


def test_touched_rows_of_all_servers(make: Make) -> None:
    shards = make(table())
    with pytest.raises(UnknownNameError, match="call track"):
        shards.drain_touched("sync")
    shards.track("sync")
    push(shards, [1, 2, 3], [[1.0]] * 3)
    shards.remove({"t": ints(2)})
    updated, removed = shards.drain_touched("sync")["t"]
    assert (sorted(updated.tolist()), removed.tolist()) == ([1, 3], [2])
    shards.mark_touched("sync", {"t": ints(3)})
    assert shards.drain_touched("sync")["t"][0].tolist() == [3]
    shards.untrack("sync")
    with pytest.raises(UnknownNameError):
        shards.mark_touched("sync", {"t": ints(3)})


def test_rows_move_with_scan_and_restore(make: Make) -> None:
    source, target = make(*CONFIGS), make(*CONFIGS, router="hash_roundrobin")
    for step in range(2):
        source.apply_gradients({"a": torch.arange(50)}, {"a": torch.ones(50, 3)}, step=step, time=4.0)
    for chunk in source.scan("a", 7):
        assert chunk.ids.numel() <= 7
        target.restore("a", chunk)
    assert rows_of(target, "a") == rows_of(source, "a")
    assert len(rows_of(target, "a")) == 50


def test_one_id_per_owner(make: Make) -> None:
    shards = make(table(), router=Router("continuous", 2, block_size=10))
    shards.assign({"t": (ints(3, 15), torch.ones(2, 1))})
    assert [server["rows"] for server in shards.describe_servers()] == [{"t": 1}, {"t": 1}]
    shards.reserve({"t": 1000})
    assert shards.stats()["t"].capacity >= 1000


def test_a_function_runswhere_the_rows_are(make: Make) -> None:
    shards = make(table())
    found = shards.each_part(where, 5)
    assert [part[:2] for part in found] == [(0, 5), (1, 5)]
    assert os.getpid() not in {pid for _, _, pid in found}
    assert LocalShards([table()]).each_part(where, 5) == [(0, 5, os.getpid())]


# ---- errors


def test_the_error_of_a_push_is_raised_by_the_next_call_or_flush(make: Make) -> None:
    shards = make(table(eviction=[Capacity(2)]), table("u"))
    push(shards, [0, 2, 4, 6], [[1.0]] * 4)
    with pytest.raises(TableFullError):
        shards.flush()
    shards.flush()  # it is raised once
    push(shards, [0], [[1.0]])
    assert read(shards, "t", 0) == [[-1]]


def test_other_tables_under_the_same_name_are_refused(make: Make) -> None:
    make(table(), name="same")
    with pytest.raises(InputError, match="other tables or options"):
        make(table(dim=2), name="same")


def test_wrong_options(servers: Servers) -> None:
    for message, options in {
        "mode": {"mode": "slow"},
        "staleness is for": {"mode": "sync", "staleness": 1},
        "num_servers is 3": {"num_servers": 3},
        "window": {"window": -1},
        "name must be": {"name": "../x"},
        "is for 3 ranks": {"router": Router("roundrobin", 3)},
    }.items():
        with pytest.raises(InputError, match=message):
            ServerShards([table()], servers=servers, **options)


# ---- modes

gradients = st.lists(st.tuples(st.integers(0, 5), st.floats(-1, 1, width=32)), max_size=6)


@settings(max_examples=6)
@given(steps=st.lists(st.tuples(*[gradients] * 4), min_size=1, max_size=3))
def test_synchronous_workers_have_the_bits_of_one_process(servers: Servers, steps: Any) -> None:
    """Four micro-batches a step, on 1, 2 and 4 workers, which sum those of their own by the tree."""
    config = TableConfig("t", dim=2, optimizer=Adagrad(0.1))

    def summed(parts: Sequence[Sequence[tuple[int, float]]]) -> GradientSum:
        sums = []
        for part in parts:
            ids, values = ints(*(id for id, _ in part)), torch.tensor([[x, x / 3] for _, x in part])
            own = ids.unique()
            grads = torch.zeros(own.numel(), 2)
            for id, value in zip(ids, values.view(-1, 2), strict=True):
                grads[own == id] += value
            sums.append(GradientSum(own, grads))
        return total(sums)

    expected = LocalShards([config])
    for step, batches in enumerate(steps):
        one = summed(batches)
        expected.apply_gradients({"t": one.ids}, {"t": one.grads}, step=step, time=7.0)
    for count in (1, 2, 4):
        options: Any = {"servers": servers, "name": next(NAMES), "mode": "sync", "num_workers": count}
        workers = [ServerShards([config], worker=w, timeout=60.0, **options) for w in range(count)]
        for step, batches in enumerate(steps):
            for w in reversed(range(count)):  # the order of arrival does not matter
                own = summed(batches[w * 4 // count : (w + 1) * 4 // count])
                workers[w].apply_gradients({"t": own.ids}, {"t": own.grads}, step=step, time=7.0)
        for each in workers:
            each.flush()
        assert rows_of(workers[0]) == rows_of(expected)
        ray_module().get([actor.close.remote(options["name"]) for actor in servers.actors])


def test_a_lookup_of_a_synchronous_worker_sees_the_gradients_of_all(make: Make) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    assert first.sources == 2
    for step in range(3):
        push(first, [1, 2], [[1.0], [1.0]], step)
        push(second, [1], [[2.0]], step)
        assert read(first, "t", 1, 2) == read(second, "t", 1, 2) == [[-3.0 * (step + 1)], [-1.0 * (step + 1)]]


def test_a_bad_gradient_of_one_worker_raises_on_all(make: Make) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    push(first, [1, 2], [[1.0], [1.0]])
    with pytest.raises(InputError, match="NaN or Inf"):
        push(second, [1], [[float("nan")]])
    with pytest.raises(Exception, match="worker 1 failed"):
        first.flush()
    push(first, [1], [[1.0]])
    push(second, [1], [[1.0]])
    assert read(first, "t", 1, 2) == [[-2.0], [0.0]]


def test_workers_learn_of_checks_that_fail_before_the_gradients(make: Make) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first, second = (make(table(), worker=worker, **options) for worker in (0, 1))
    push(first, [1], [[1.0]])
    with pytest.raises(InputError, match="another Shards"):
        second.apply_gradients(first.lookup({"t": ints(1)}), {"t": torch.ones(1, 1)}, step=0)
    with pytest.raises(Exception, match="worker 1 failed"):
        first.flush()


def test_a_write_that_cannot_be_sent_does_not_use_up_a_number(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = make(table())

    def refuse(*args: Any) -> None:
        raise OSError("not sent")

    with monkeypatch.context() as patch:
        patch.setattr(shards.links[1]._channel, "push", refuse)
        with pytest.raises(OSError, match="not sent"):
            push(shards, [2, 3], [[1.0], [1.0]])  # an id of each server
    push(shards, [2, 3], [[1.0], [1.0]])
    assert read(shards, "t", 2, 3) == [[-2], [-1]]


def test_functions_in_the_background_have_no_limit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_link, "GRACE", 0.0)
    shards = make(table(), timeout=0.2)
    assert shards.each_part(nap, 0.4, background=True) == [0.4, 0.4]


def test_close_raises_the_error_of_the_last_push_and_leaves(make: Make) -> None:
    name = next(NAMES)
    first, second = (make(table(eviction=[Capacity(2)]), worker=w, name=name) for w in (0, 1))
    push(first, [0, 2, 4, 6], [[1.0]] * 4)
    with pytest.raises(TableFullError):
        first.close()
    assert [server["workers"] for server in second.describe_servers()] == [[1], [1]]
    with pytest.raises(KeyError), second:
        raise KeyError  # and not an error of leaving
    assert [server["workers"] for server in second.describe_servers()] == [[], []]


def test_a_worker_that_cannot_join_one_server_is_a_member_of_none(
    make: Make, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(NAMES)
    first, join = make(table(), name=name), ServerLink.join

    def refuse(link: ServerLink, written: Any) -> Any:
        joined = join(link)
        if link is not links[0]:
            raise UsageError("refused")
        return joined

    links: list[ServerLink] = []
    open_link = ServerLink.open
    monkeypatch.setattr(ServerLink, "open", lambda link: (links.append(link), open_link(link))[1])
    monkeypatch.setattr(ServerLink, "join", refuse)
    with pytest.raises(UsageError, match="refused"):
        ServerShards([table()], servers=servers, name=name, worker=1, timeout=60.0)
    first.flush()
    assert [server["workers"] for server in first.describe_servers()] == [[0], [0]]


def test_a_worker_waits_for_the_slowest(make: Make) -> None:
    options: dict[str, Any] = {"staleness": 1, "num_workers": 2, "name": next(NAMES), "timeout": 0.2}
    fast, slow = (make(table(), worker=worker, **options) for worker in (0, 1))
    push(fast, [1], [[1.0]])
    push(fast, [1], [[1.0]])
    with pytest.raises(RankTimeoutError, match="worker 0 has made 2 steps"):
        read(fast, "t", 1)
    push(slow, [2], [[1.0]])
    slow.flush()
    assert read(fast, "t", 1) == [[-2]]
    assert {server["staleness"] for server in fast.describe_servers()} == {1}


def test_a_lookup_that_waits_when_its_channel_is_lost_is_made_again_in_other_memory(make: Make) -> None:
    options: dict[str, Any] = {"staleness": 0, "num_workers": 2, "name": next(NAMES)}
    fast, slow = (make(table(), worker=worker, **options) for worker in (0, 1))
    ids = list(range(10_000))
    push(fast, ids, [[1.0]] * len(ids))
    lookup = fast.lookup({"t": torch.tensor(ids)})
    lookup.fetch()
    deadline = time.monotonic() + 60
    while not all(server["waiting"] for server in fast.describe_servers()):  # for worker 1
        assert time.monotonic() < deadline
    assert isinstance(lookup, ServerLookup)
    first = lookup._received
    assert first is not None
    fast.links[0].disconnect()
    push(slow, ids, [[2.0]] * len(ids))
    slow.flush()
    assert lookup.rows["t"].unique().tolist() == [-3]
    assert lookup.source.data_ptr() != first.data_ptr()
    assert fast.links.pool.find(first.numpy()) is None  # it is not used again


def test_workers_in_other_processes(make: Make, servers: Servers) -> None:
    options: dict[str, Any] = {"mode": "sync", "num_workers": 2, "name": next(NAMES)}
    first = make(table(), worker=0, **options)
    options["timeout"] = 60.0
    other = ray_module().remote(work).options(num_cpus=0).remote(servers, options)
    for step in range(2):
        push(first, [1], [[1.0]], step)
    first.flush()
    assert ray_module().get(other, timeout=60.0) == [[[-3.0]], [[-6.0]]]


# ---- collections and checkpoints


def features() -> list[Feature]:
    return [Feature("clicks", "a"), Feature("user", "b")]


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 20, (5, 6, 2), generator=generator)
    return [{"clicks": Ragged.from_lists([x.tolist() for x in one]), "user": one[:, 0]} for one in ids]


def trained(collection: EmbeddingCollection, *, pipeline: bool = False) -> EmbeddingCollection:
    for batch in Pipeline(collection, batches(), push=True) if pipeline else batches():
        out = collection(batch, time=11.0)
        (out["clicks"].square().sum() + (out["user"] * 2).sum()).backward()
    collection.shards.flush()
    return collection


def everything(collection: EmbeddingCollection) -> list[dict[int, list[Any]]]:
    return [rows_of(collection.shards, name) for name in ("a", "b")]


def test_a_collection_trains_on_servers_as_in_one_process(make: Make) -> None:
    expected = trained(EmbeddingCollection(CONFIGS, features()))
    for pipeline in (False, True):
        found = trained(EmbeddingCollection(make(*CONFIGS), features()), pipeline=pipeline)
        assert everything(found) == everything(expected)
        assert found.global_step == expected.global_step == 5


def test_checkpoints_move_between_servers_and_one_process(make: Make, tmp_path: Path) -> None:
    remote = trained(EmbeddingCollection(make(*CONFIGS), features()))
    local = EmbeddingCollection(CONFIGS, features())
    saved = checkpoint.save(remote, tmp_path / "c")
    assert {piece.shard for entries in saved.tables().values() for e in entries for piece in e.pieces} == {
        0,
        1,
    }
    checkpoint.load(local, tmp_path / "c")
    assert everything(local) == everything(remote)
    trained(remote)
    checkpoint.save_delta(remote, tmp_path / "c")
    report = checkpoint.load(local, tmp_path / "c")
    assert everything(local) == everything(trained(trained(EmbeddingCollection(CONFIGS, features()))))
    assert local.global_step == 10
    again = EmbeddingCollection(make(*CONFIGS), features())
    assert checkpoint.load(again, tmp_path / "c").rows == report.rows
    assert everything(again) == everything(local)
    checkpoint.save(local, tmp_path / "d")
    trained(local)
    checkpoint.load(again, tmp_path / "d")  # from one process to servers
    assert everything(trained(again)) == everything(local)


def test_a_save_in_the_background_holds_the_rows_of_its_call(make: Make, tmp_path: Path) -> None:
    remote = trained(EmbeddingCollection(make(*CONFIGS), features()))
    before = everything(remote)
    handle = checkpoint.async_save(remote, tmp_path)
    trained(remote)
    handle.wait(60.0)
    local = EmbeddingCollection(CONFIGS, features())
    checkpoint.load(local, tmp_path)
    assert everything(local) == before != everything(remote)


def test_what_needs_rows_in_this_process_raises_with_the_remedy(make: Make) -> None:
    collection = EmbeddingCollection(make(*CONFIGS), features())
    with pytest.raises(UsageError, match=r"checkpoint\.save"):
        collection.state_dict()
    assert dict(collection.tables) == {}


def test_tables_on_servers_are_exported(make: Make, tmp_path: Path) -> None:
    shards = make(table(dim=2))
    shards.assign({"t": (ints(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))})
    assert export_model(shards, tmp_path / "model", name="m", version=1).exists()


def test_views_of_servers_precision_need_the_step(make: Make) -> None:
    config = TableConfig(
        "t",
        segments=[Segment(2, optimizer=SGD(1.0), initializer=Constant(0.3), serving=OneBit())],
    )
    shards, local = make(config), LocalShards([config])
    for each in (shards, local):
        each.apply_gradients(each.lookup({"t": ints(1)}, step=0), {"t": torch.ones(1, 2)}, step=0, time=1.0)
        with pytest.raises(UsageError, match="pass step="):
            each.apply_gradients(each.lookup({"t": ints(1)}), {"t": torch.ones(1, 2)}, step=1)
    for step in (None, 1):
        found = [each.lookup({"t": ints(1)}, step=step).rows["t"].tolist() for each in (shards, local)]
        assert found[0] == found[1]


# ---- the guide and wrong input


def test_the_guide_runs(servers: Servers) -> None:
    scope: dict[str, object] = {}
    for number, code in enumerate(snippets(ROOT / "docs" / "guides" / "servers.md"), start=1):
        exec(compile(code, f"servers.md snippet {number}", "exec"), scope)


def test_wrong_input_raises_a_megalith_error(servers: Servers) -> None:
    swept: set[str] = set()

    def calls() -> Iterator[Call]:
        for call, arguments in core.server_calls(servers):
            swept.update(names_of(call))
            yield call, complete(call, arguments)

    assert not (raw := raw_errors(calls())), "\n".join(raw)
    found = {name for name in public_names("megalith.shards") if name.partition(".")[0] in ON_SERVERS}
    assert found - swept - CANNOT_BE_CALLED.keys() == {"ServerShards"}  # called with its own signature


# ---- servers that end; last, because these servers lose the tables of other tests


def kill(shards: ServerShards, *numbers: int) -> None:
    for number in numbers:
        os.kill(shards.describe_servers()[number]["pid"], signal.SIGKILL)


def train_with_kills(
    servers: Servers, folder: Path, kills: dict[int, Sequence[int]], *, steps: int, save: int
) -> tuple[EmbeddingCollection, EmbeddingCollection]:
    """Trains on servers that are killed after some steps, and in one process; returns both."""
    config = TableConfig("a", dim=3, optimizer=Adagrad(0.1))
    recovery = checkpoint.recovery(folder / "log")
    shards = ServerShards([config], servers=servers, name=folder.name, recovery=recovery, timeout=120.0)
    pair = [EmbeddingCollection(x, [Feature("clicks", "a")]) for x in (shards, [config])]
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        ids = torch.randint(0, 40, (8,), generator=generator)
        for collection in pair:
            collection({"clicks": ids}, time=float(step))["clicks"].square().sum().backward()
        if step == save:
            checkpoint.save(pair[0], folder / "checkpoint")
        kill(shards, *kills.get(step, ()))
    shards.flush()
    assert shards.lost_writes == 0
    return pair[0], pair[1]


def test_killed_servers_lose_nothing_with_the_synchronous_log(servers: Servers, tmp_path: Path) -> None:
    without = ServerShards([table()], servers=servers, name="without")
    found, expected = train_with_kills(servers, tmp_path, {2: (0, 1), 8: (1,)}, steps=14, save=5)
    assert rows_of(found.shards, "a") == rows_of(expected.shards, "a")
    assert len(found.shards.each_part(where)) == 2
    with pytest.raises(ServerLostError, match="its rows are lost"):
        read(without, "t", 1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills(servers: Servers, tmp_path: Path) -> None:
    kills = {step: (step // 3 % 2,) for step in range(1, 150, 3)}
    found, expected = train_with_kills(servers, tmp_path, kills, steps=155, save=70)
    assert rows_of(found.shards, "a") == rows_of(expected.shards, "a")
