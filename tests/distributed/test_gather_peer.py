"""A peer of several ranks: the rows of all ranks travel, and no rank loses what it has trained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from megalith import SGD, LocalShards, Shards, SyncShards, TableConfig
from megalith.errors import MegalithError, UsageError
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
from tests.distributed.ranks import run_ranks

CONFIGS = [TableConfig("users", dim=2, optimizer=SGD(0.1)), TableConfig("items", dim=3, optimizer=SGD(0.1))]
IDS = torch.arange(20, dtype=torch.int64) * 7 - 50
WEIGHTS = {"w": torch.zeros(4, 4)}
SCHEMA = PayloadSchema.of(WEIGHTS, tables={"users": 2, "items": 3})
Peer = tuple[bytes | None, dict[str, list[Any]]]


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
        plan = GatherPlan(
            run="r", window=window, schema=SCHEMA.digest, primary=(1,), update=UpdateConfig(clip="none")
        )
        before = rows(shared)
        run_window(plan, WEIGHTS, update, {"default": store}, ranks=ranks, tables=shared)
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


def raised(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(MegalithError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def refused() -> dict[str, Any]:
    """What each rank raises, and what compress does with copies of tables."""
    ranks, found = ElasticRanks.of_group(timeout=60.0), {}
    ids, ones = torch.tensor([9, 3]), torch.ones(2, 2)

    def made(rows: Any, **more: Any) -> Any:
        return compress(WEIGHTS, SCHEMA, tables=rows, ranks=ranks, **more)

    feedback = ErrorFeedback()
    wrong = {"users": (ids, ones if ranks.leads else ones * float("nan"))}
    found["wrong"] = raised(lambda: made(wrong, feedback=feedback))
    differing = {"users": (ids + ranks.place * 6, ones * (1 + ranks.place))}
    found["differing"] = raised(lambda: made(differing, feedback=feedback))
    found["type"] = raised(lambda: made(None if ranks.leads else 5, feedback=feedback))
    assert feedback.left == {}
    found["copies"] = lists_of_rows(made({"users": (ids, ones)}))
    found["first"] = lists_of_rows(made({"users": (ids, ones)} if ranks.leads else None))
    found["last"] = lists_of_rows(made(None if ranks.leads else {"users": (ids, ones)}))
    found["none"] = lists_of_rows(made(None))
    changes = PeerTables(sync(), sync()).changes()
    found["no ranks"] = raised(lambda: compress(WEIGHTS, SCHEMA, tables=changes))
    hashed = SyncShards(CONFIGS, seed=1, router="hash_roundrobin")
    found["router"] = raised(lambda: PeerTables(sync(), hashed))
    found["local"] = raised(lambda: PeerTables(alone(), sync()))
    return found


def lists_of_rows(made: Any) -> dict[str, Any]:
    return {name: (ids.tolist(), rows.tolist()) for name, (ids, rows) in made.tables.items()}


def test_an_error_of_one_rank_and_rows_that_differ_raise_on_all() -> None:
    first, second = run_ranks(refused, world_size=2)
    assert first["wrong"][0] == "RankFailedError"
    assert second["wrong"] == ("InputError", "table 'users' has rows with values that are not finite")
    assert "rank 1: InputError: table 'users' has rows" in first["wrong"][1]
    assert first["differing"][0] == "InputError"
    assert "rank 1 and a rank before it have different changes of id 9" in first["differing"][1]
    assert second["differing"][0] == "RankFailedError"
    assert (first["type"][0], second["type"][0]) == ("RankFailedError", "InputError")
    for each in (first, second):
        assert "one of 2 ranks, but 1 ranks compress" in each["no ranks"][1]
        assert "create both with the same router" in each["router"][1]
        assert "divided over ranks by Router" in each["local"][1]
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
        kind, _ = raised(tables.adopt)
    unchanged = all(torch.equal(before[name], each) for name, each in rows(local).items())
    tables.adopt()
    same = all(torch.equal(each, rows(shared)[name]) for name, each in rows(local).items())
    return kind, unchanged, same


def test_adopt_raises_on_all_ranks_and_can_be_repeated() -> None:
    said = run_ranks(interrupted, world_size=2)
    assert said == [("RankFailedError", True, True), ("UsageError", True, True)]
