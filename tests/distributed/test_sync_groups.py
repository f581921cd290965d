"""Where rows lie under every routing mode, and SyncShards over some of the ranks: groups and meshes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megalith import (
    SGD,
    EmbeddingCollection,
    Feature,
    LocalShards,
    Ragged,
    Router,
    SyncShards,
    TableConfig,
    Zeros,
)
from megalith.errors import MegalithError
from tests.distributed.ranks import run_ranks
from tests.table.support import EXTREME_IDS, ints, whole

IDS = ints(*dict.fromkeys([*EXTREME_IDS, *range(40)]))


def table(name: str, **options: Any) -> TableConfig:
    return TableConfig(name, dim=2, optimizer=SGD(1.0), initializer=Zeros(), **options)


def error_of(work: Any) -> tuple[str, str] | None:
    try:
        work()
    except (MegalithError, KeyError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


# ---- routing


def routers(size: int) -> dict[str, str | Router]:
    return {
        "roundrobin": "roundrobin",
        "hash_roundrobin": "hash_roundrobin",
        "continuous": Router("continuous", size, block_size=10),
        "skip": Router("roundrobin", size, skip_first=size > 1),
        "skip hash": Router("hash_roundrobin", size, skip_first=size > 1),
        "skip continuous": Router("continuous", size, block_size=10, skip_first=size > 1),
    }


def placed() -> dict[str, Any]:
    """Every rank trains all ids; which of them each holds, by mode, one table at a time and all in one."""
    size = dist.get_world_size()
    found: dict[str, Any] = {}
    modes = routers(size)
    together = SyncShards([table(name) for name in modes], router=modes)
    grads = torch.ones(len(IDS), 2)
    together.apply_gradients(together.lookup(dict.fromkeys(modes, IDS)), dict.fromkeys(modes, grads), step=0)
    rows = together.lookup(dict.fromkeys(modes, IDS)).rows
    assert all(bool((rows[name] == -size).all()) for name in modes)
    for name, mode in modes.items():
        alone = SyncShards([table(name)], router=mode)
        alone.apply_gradients({name: IDS}, {name: grads}, step=0)
        found[name] = [sorted(whole(shards.local[name]).ids.tolist()) for shards in (alone, together)]
    own = SyncShards([table("a", dist_type="hash_roundrobin"), table("b")])
    found["own modes"] = [own.router(name).mode for name in ("a", "b")]
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_row_lies_with_its_owner(size: int) -> None:
    results = run_ranks(placed, world_size=size)
    for name, mode in routers(size).items():
        router = Router(mode, size) if isinstance(mode, str) else mode
        owners = router.owner(IDS)
        for rank, found in enumerate(results):
            expected = sorted(IDS[owners == rank].tolist())
            assert found[name] == [expected, expected]
            assert found["own modes"] == ["hash_roundrobin", "roundrobin"]
        if router.skip_first:
            assert results[0][name] == [[], []]


# ---- groups and meshes, 4 ranks


def trained(shards: Any, member: int, members: int, salt: int) -> dict[str, Any]:
    """Four steps on a share of data that the salt picks; what all rows are read as, and the ids held here."""
    collection = EmbeddingCollection(shards, [Feature("f", "t")], reduction="sum")
    weight = torch.nn.Parameter(torch.ones(2))
    for step in range(4):
        ids = (torch.arange(8) * (salt + 3) + step) % 11
        own = ids[member * 8 // members : (member + 1) * 8 // members]
        out = collection({"f": Ragged(own, torch.arange(len(own) + 1))})["f"]
        (out * weight).sum().backward()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(weight.grad)  # of all ranks, between the steps of the groups
    rows = shards.lookup({"t": torch.arange(11)}).rows["t"]
    return {"rows": rows, "held": whole(shards.local["t"]).ids.tolist()}


def in_groups() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, others = (odd, even) if rank % 2 else (even, odd)
    for transport in ("gloo", "auto"):
        shards = SyncShards([table("t")], group=mine, transport=transport)
        found[f"group, {transport}"] = (
            (shards.rank, shards.world_size),
            trained(shards, rank // 2, 2, rank % 2),
        )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner = SyncShards([table("t")], group=mesh["inner"])
    found["mesh, inner"] = (inner.rank, inner.world_size), trained(inner, rank % 2, 2, rank // 2)
    outer = SyncShards([table("t")], group=mesh["outer"])
    found["mesh, outer"] = (outer.rank, outer.world_size), trained(outer, rank // 2, 2, rank % 2)
    whole_mesh = SyncShards([table("t")], group=init_device_mesh("cpu", (4,)))
    found["mesh, all"] = (whole_mesh.rank, whole_mesh.world_size), trained(whole_mesh, rank, 4, 0)
    found["two dimensions"] = error_of(lambda: SyncShards([table("t")], group=mesh))
    found["outsider"] = error_of(lambda: SyncShards([table("t")], group=others))
    alone = SyncShards([table("t")], group=[dist.new_group([r]) for r in range(4)][rank])
    found["alone"] = (alone.rank, alone.world_size), trained(alone, 0, 1, rank)
    return found


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    return run_ranks(in_groups, world_size=4)


MEMBERS: dict[str, list[tuple[int, ...]]] = {
    "group, gloo": [(0, 2), (1, 3)],
    "group, auto": [(0, 2), (1, 3)],
    "mesh, inner": [(0, 1), (2, 3)],
    "mesh, outer": [(0, 2), (1, 3)],
    "mesh, all": [(0, 1, 2, 3)],
    "alone": [(0,), (1,), (2,), (3,)],
}


@pytest.mark.parametrize("name", MEMBERS)
def test_groups_train_at_the_same_time_each_its_own_tables(groups: list[dict[str, Any]], name: str) -> None:
    for salt, members in enumerate(MEMBERS[name]):
        expected = trained(LocalShards([table("t")]), 0, 1, salt)
        held = []
        for place, rank in enumerate(members):
            where, found = groups[rank][name]
            assert where == (place, len(members))
            torch.testing.assert_close(found["rows"], expected["rows"])
            assert all(i % len(members) == place for i in found["held"])
            held += found["held"]
        assert sorted(held) == expected["held"]


def test_what_is_no_group_of_this_rank_is_told(groups: list[dict[str, Any]]) -> None:
    for rank in groups:
        kind, said = rank["two dimensions"]
        assert kind == "InputError"
        assert "a device mesh must have one dimension, got 2" in said
        kind, said = rank["outsider"]
        assert kind == "UsageError"
        assert "not in the process group" in said


# ---- several in one model


def two_collections() -> list[list[float]]:
    """Two SyncShards in one model, with lookups of both in progress before either is used."""
    first, second = (SyncShards([table(name)]) for name in ("a", "b"))
    ids = torch.arange(3) + dist.get_rank()
    one, other = first.lookup({"a": ids}), second.lookup({"b": ids + 1})
    later = first.lookup({"a": ids + 2})
    other.fetch()
    later.fetch()
    grads = torch.ones(3, 2)
    first.apply_gradients(one, {"a": grads}, step=0)
    second.apply_gradients(other, {"b": grads}, step=0)
    first.apply_gradients(later, {"a": grads}, step=1)
    rows = [first.lookup({"a": torch.arange(6)}).rows["a"], second.lookup({"b": torch.arange(6)}).rows["b"]]
    return [x[:, 0].tolist() for x in rows]


def test_two_in_one_model_with_look_ups_under_way_at_the_same_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in run_ranks(two_collections):
            # Ids 0 to 2 and 1 to 3 once, then 2 to 4 and 3 to 5.
            assert found == [[-1, -2, -3, -3, -2, -1], [0, -1, -2, -2, -1, 0]]
