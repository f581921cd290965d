"""SyncShards over some of the ranks: groups and meshes."""

from __future__ import annotations

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
    SyncShards,
    TableConfig,
    Zeros,
)
from tests.distributed.ranks import error_of, run_ranks
from tests.table.support import whole


def table(name: str, **options: Any) -> TableConfig:
    return TableConfig(name, dim=2, optimizer=SGD(1.0), initializer=Zeros(), **options)


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
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine, others = (odd, even) if rank % 2 else (even, odd)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    given: dict[str, tuple[int, dict[str, Any]]] = {  # the salt of the data, and where the tables are
        "group, gloo": (rank % 2, {"group": mine, "transport": "gloo"}),
        "group, auto": (rank % 2, {"group": mine, "transport": "auto"}),
        "mesh, inner": (rank // 2, {"group": mesh["inner"]}),
        "mesh, outer": (rank % 2, {"group": mesh["outer"]}),
        "mesh, all": (0, {"group": init_device_mesh("cpu", (4,))}),
        "alone": (rank, {"group": [dist.new_group([r]) for r in range(4)][rank]}),
    }
    found: dict[str, Any] = {}
    for name, (salt, options) in given.items():
        shards = SyncShards([table("t")], **options)
        place = shards.rank, shards.world_size
        found[name] = place, trained(shards, *place, salt)
    found["two dimensions"] = error_of(SyncShards, [table("t")], group=mesh)
    found["outsider"] = error_of(SyncShards, [table("t")], group=others)
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
        assert rank["two dimensions"].startswith("InputError: ")
        assert "a device mesh must have one dimension, got 2" in rank["two dimensions"]
        assert rank["outsider"].startswith("UsageError: ")
        assert "not in the process group" in rank["outsider"]


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
    # Ids 0 to 2 and 1 to 3 once, then 2 to 4 and 3 to 5.
    assert run_ranks(two_collections) == [[[-1, -2, -3, -3, -2, -1], [0, -1, -2, -2, -1, 0]]] * 2
