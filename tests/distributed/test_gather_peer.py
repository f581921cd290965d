"""Tables in windows, over ranks: the rows of all ranks travel, each is added once, and none is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from megalith import SGD, LocalShards, Shards, SyncShards, TableConfig
from megalith.errors import InputError, UsageError
from megalith.gather import (
    ElasticRanks,
    ErrorFeedback,
    GatherPlan,
    Label,
    OuterUpdate,
    PayloadSchema,
    PeerTables,
    UpdateConfig,
    compress,
    open_object_store,
    publish,
    run_window,
)
from tests.distributed.ranks import error_of, run_ranks

CONFIGS = [TableConfig("users", dim=2, optimizer=SGD(0.1)), TableConfig("items", dim=3, optimizer=SGD(0.1))]
IDS = torch.arange(20, dtype=torch.int64) * 7 - 50
WEIGHTS = {"w": torch.zeros(4, 4)}
SCHEMA = PayloadSchema.of(WEIGHTS, tables={"users": 2, "items": 3})
Peer = tuple[bytes | None, dict[str, list[Any]]]


def plan(window: int, *uids: int) -> GatherPlan:
    update = UpdateConfig(clip="none")
    return GatherPlan(run="r", window=window, schema=SCHEMA.digest, primary=uids, update=update)


def gradients(width: int, scale: float) -> Tensor:
    return torch.arange(len(IDS) * width, dtype=torch.float32).view(-1, width) * scale


def train(shards: Shards, scale: float, share: slice) -> None:
    """One step of both tables, in which this rank has the gradients of a share of the ids."""
    ids = {"users": IDS[share], "items": IDS[share]}
    grads = {"users": gradients(2, scale)[share], "items": gradients(3, scale)[share]}
    shards.apply_gradients(ids, grads, step=0, wait=False)


def rows(shards: Shards) -> dict[str, Tensor]:
    found = shards.lookup({"users": IDS, "items": IDS}).rows
    return {name: found[name].clone() for name in ("users", "items")}


def lists(found: dict[str, Tensor]) -> dict[str, list[Any]]:
    return {name: each.tolist() for name, each in found.items()}


def peer(folder: str, make: Callable[[], Shards], ranks: ElasticRanks | None) -> list[Peer]:
    """The payload of each of two windows, and the rows of the peer after each."""
    place, size = (0, 1) if ranks is None else (ranks.place, ranks.size)
    local, shared = make(), make()
    tables, update = PeerTables(local, shared), OuterUpdate(SCHEMA)
    store = open_object_store(Path(folder) / f"peer-{type(local).__name__}-{size}")
    found = []
    for window in (1, 2):
        train(local, float(window), slice(place, None, size))
        made = compress(WEIGHTS, SCHEMA, tables=tables.changes(), ranks=ranks)
        data = None
        if place == 0:
            data = made.to_bytes(Label("r", window, 1))
            publish(store, made, Label("r", window, 1))
        else:
            assert made.tables == {}
        before = rows(shared)
        run_window(plan(window, 1), WEIGHTS, update, {"default": store}, ranks=ranks, tables=shared)
        trained = rows(local)
        tables.adopt()
        after = rows(local)
        for name in after:  # a window of this peer alone, with lr 1, gives what it has trained
            torch.testing.assert_close(after[name], trained[name])
            assert torch.equal(after[name], rows(shared)[name])
            assert not torch.equal(after[name], before[name])
        found.append((data, lists(after)))
        assert all(ids.numel() == 0 for ids, _ in tables.changes().values())
    return found


def sync() -> Shards:
    return SyncShards(CONFIGS, seed=1)


def alone() -> Shards:
    return LocalShards(CONFIGS, seed=1)


def work(folder: str, block_bytes: int | None) -> list[Peer]:
    if block_bytes is not None:
        sys.modules["megalith.gather.compress"].BLOCK_BYTES = block_bytes  # type: ignore[attr-defined]
    return peer(folder, sync, ElasticRanks.of_group(timeout=60.0))


@pytest.mark.parametrize(("size", "block_bytes"), [(2, None), (2, 1), (4, 40)])
def test_a_peer_of_several_ranks_sends_and_keeps_what_one_process_would(
    tmp_path: Path, size: int, block_bytes: int | None
) -> None:
    expected = peer(str(tmp_path), alone, None)
    said = run_ranks(work, str(tmp_path), block_bytes, world_size=size)
    for window, (data, found) in enumerate(expected):
        assert [each[window][0] for each in said] == [data] + [None] * (size - 1)
        for each in said:
            assert each[window][1] == found


def refused() -> dict[str, Any]:
    """What each rank raises, and what compress does with copies of tables."""
    ranks, found = ElasticRanks.of_group(timeout=60.0), {}
    ids, ones = torch.tensor([9, 3]), torch.ones(2, 2)

    def made(rows: Any, **more: Any) -> Any:
        return compress(WEIGHTS, SCHEMA, tables=rows, ranks=ranks, **more)

    feedback = ErrorFeedback()
    wrong = {"users": (ids, ones if ranks.leads else ones * float("nan"))}
    found["wrong"] = error_of(made, wrong, feedback=feedback)
    differing = {"users": (ids + ranks.place * 6, ones * (1 + ranks.place))}
    found["differing"] = error_of(made, differing, feedback=feedback)
    found["type"] = error_of(made, None if ranks.leads else 5, feedback=feedback)
    assert feedback.left == {}
    found["copies"] = lists_of_rows(made({"users": (ids, ones)}))
    found["first"] = lists_of_rows(made({"users": (ids, ones)} if ranks.leads else None))
    found["last"] = lists_of_rows(made(None if ranks.leads else {"users": (ids, ones)}))
    found["none"] = lists_of_rows(made(None))
    changes = PeerTables(sync(), sync()).changes()
    found["no ranks"] = error_of(compress, WEIGHTS, SCHEMA, tables=changes)
    hashed = SyncShards(CONFIGS, seed=1, router="hash_roundrobin")
    found["router"] = error_of(PeerTables, sync(), hashed)
    found["local"] = error_of(PeerTables, alone(), sync())
    return found


def lists_of_rows(made: Any) -> dict[str, Any]:
    return {name: (ids.tolist(), rows.tolist()) for name, (ids, rows) in made.tables.items()}


def test_an_error_of_one_rank_and_rows_that_differ_raise_on_all() -> None:
    first, second = run_ranks(refused, world_size=2)
    assert second["wrong"] == "InputError: table 'users' has rows with values that are not finite"
    for name, ours, theirs in (
        ("wrong", "RankFailedError", "InputError"),
        ("differing", "InputError", "RankFailedError"),
        ("type", "RankFailedError", "InputError"),
    ):
        assert first[name].startswith(f"{ours}: "), name
        assert second[name].startswith(f"{theirs}: "), name
    assert "rank 1: InputError: table 'users' has rows" in first["wrong"]
    assert "rank 1 and a rank before it have different changes of id 9" in first["differing"]
    for each in (first, second):
        assert "one of 2 ranks, but 1 ranks compress" in each["no ranks"]
        assert "create both with the same router" in each["router"]
        assert "divided over ranks by Router" in each["local"]
    for name in ("copies", "first", "last"):
        assert first[name] == {"users": ([3, 9], [[1.0, 1.0]] * 2)}
        assert second[name] == {}
    assert first["none"] == second["none"] == {}


def interrupted() -> tuple[str, bool, bool]:
    """An adopt that fails on the last rank, and the next one."""
    ranks = ElasticRanks.of_group(timeout=60.0)
    local, shared = sync(), sync()
    tables = PeerTables(local, shared)
    train(local, 1.0, slice(ranks.place, None, ranks.size))
    before = rows(local)
    made = compress(WEIGHTS, SCHEMA, tables=tables.changes(), ranks=ranks)
    assert len(made.tables.get("users", (IDS[:0],))[0]) == (len(IDS) if ranks.leads else 0)
    shared.assign_add({"users": (IDS[:2], torch.ones(2, 2))} if ranks.leads else {})

    def fail(consumer: str) -> NoReturn:
        raise UsageError("no ids")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.place == ranks.size - 1:
            patch.setattr(shared, "drain_touched", fail)
        kind = error_of(tables.adopt).partition(":")[0]
    unchanged = all(torch.equal(before[name], each) for name, each in rows(local).items())
    tables.adopt()
    same = all(torch.equal(each, rows(shared)[name]) for name, each in rows(local).items())
    return kind, unchanged, same


def test_adopt_raises_on_all_ranks_and_can_be_repeated() -> None:
    said = run_ranks(interrupted, world_size=2)
    assert said == [("RankFailedError", True, True), ("UsageError", True, True)]


# ---- each row of a window is added once, by its owner


def added(folder: str) -> dict[str, Any]:
    """How far rows move with tables that are divided over ranks, and with a copy on each rank."""
    ranks, found = ElasticRanks.of_group(timeout=60.0), {}
    stores = {"default": open_object_store(folder)}
    for name, shards in (("sync", sync()), ("local", alone())):
        before = rows(shards)["users"]
        given = plan(1, 1, 2) if ranks.leads else None
        run_window(given, WEIGHTS, OuterUpdate(SCHEMA), stores, ranks=ranks, tables=shards)
        found[name] = (rows(shards)["users"] - before).tolist()
        found[f"{name} rows"] = len(shards.local["users"])
    with pytest.raises(InputError, match="divided over 2 ranks, but 1 ranks gather"):
        run_window(plan(1, 1, 2), WEIGHTS, OuterUpdate(SCHEMA), stores, tables=sync())
    return found


def test_each_row_is_added_once_by_its_owner(tmp_path: Path) -> None:
    store = open_object_store(tmp_path)
    for uid in (1, 2):
        change = {"users": (IDS, torch.ones(len(IDS), 2))}
        publish(store, compress(WEIGHTS, SCHEMA, tables=change), Label("r", 1, uid))
    said = run_ranks(added, str(tmp_path), world_size=2)
    for each in said:
        for name in ("sync", "local"):
            torch.testing.assert_close(torch.tensor(each[name]), torch.full((len(IDS), 2), -1.0))
        assert each["local rows"] == len(IDS)
    assert sum(each["sync rows"] for each in said) == len(IDS)


def test_rows_stay_changes_until_they_are_adopted() -> None:
    """Rows that are trained after `changes` are neither overwritten nor forgotten."""
    local, shared = alone(), alone()
    tables = PeerTables(local, shared)

    def train(*ids: int) -> None:
        grads = torch.ones(len(ids), 2)
        local.apply_gradients({"users": torch.tensor(ids)}, {"users": grads}, step=0)

    train(3, 5)
    first = tables.changes()["users"]
    train(5, 7)
    found, change = tables.changes()["users"]
    assert (first[0].tolist(), found.tolist()) == ([3, 5], [3, 5, 7])
    torch.testing.assert_close(change, torch.tensor([[0.1], [0.2], [0.1]]).expand(3, 2))
    shared.assign_add({"users": (found, -change)})
    train(7, 9)
    tables.adopt()  # 7 was sent: its row becomes that of the window
    found, change = tables.changes()["users"]
    assert found.tolist() == [9]
    torch.testing.assert_close(change, torch.full((1, 2), 0.1))
    tables.adopt()
    assert tables.changes()["users"][0].tolist() == []
    assert lists(rows(local)) == lists(rows(shared))
    with pytest.raises(InputError, match="both must have the same"):
        PeerTables(local, LocalShards([TableConfig("other", dim=2, optimizer=SGD(0.1))]))


def test_tables_that_are_not_shards_are_refused() -> None:
    with pytest.raises(InputError, match="tables must have the method assign_add"):
        run_window(plan(1, 1), WEIGHTS, OuterUpdate(SCHEMA), {}, tables=object())  # type: ignore[arg-type]
