"""ServerShards on two real Ray servers; `test_on_servers.py` runs these tests.

The guide of the servers and the sweep of wrong input of
`tests/test_wrong_input.py` run here too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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
    TableFullError,
    UnknownNameError,
    UsageError,
)
from megalith.ps.launch import ray_module
from megalith.serving import export_model
from tests.ps.support import (
    Make,
    push,
    read,
    rows_of,
    table,
    where,
)
from tests.shards.vectors import VECTORS, float16_on_the_wire
from tests.table.support import ints
from tests.test_docs import ROOT, snippets
from tests.test_wrong_input import raw_errors
from tests.valid_calls import core
from tests.valid_calls.sweep import CANNOT_BE_CALLED, ON_SERVERS, Call, complete, names_of, public_names


def test_ray_listens_on_the_loopback_address(servers: Servers) -> None:
    assert [node["NodeManagerAddress"] for node in ray_module().nodes()] == ["127.0.0.1"]


# ---- Monolith's vectors (reference 1.5), on two servers


@pytest.mark.parametrize("vector", [*VECTORS, float16_on_the_wire], ids=lambda vector: vector.__name__)
def test_vectors(make: Make, vector: Callable[..., None]) -> None:
    vector(make)


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


def test_a_function_runs_where_the_rows_are(make: Make) -> None:
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
    found = {name for name in public_names("megalith.ps") if name.partition(".")[0] in ON_SERVERS}
    assert found - swept - CANNOT_BE_CALLED.keys() == {"ServerShards"}  # called with its own signature
