"""fused_lookup and fused_apply_gradients: many tables' ids from many shards in one flat tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, Adagrad, LocalShards, OneBit, TableConfig, Zeros
from megalith.compat.monolith import fused_apply_gradients, fused_lookup
from megalith.errors import InputError, UsageError


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def zeros(name: str, dim: int) -> TableConfig:
    return TableConfig(name, dim=dim, optimizer=SGD(1.0), initializer=Zeros())


def filled(engine: str) -> LocalShards:
    shards = LocalShards([zeros("slot0", 1), zeros("slot1", 2), zeros("slot2", 2)], engine=engine)
    shards.assign_add(
        {
            "slot0": (ids(0), rows([1])),
            "slot1": (ids(1), rows([2, 2])),
            "slot2": (ids(2, 3), rows([4, 4], [8, 8])),
        }
    )
    return shards


@pytest.mark.parametrize(
    ("asked", "sizes", "expected"),
    [
        ([0, 1, 2, 3], [[1, 1, 2]], [[1, 2, 2, 4, 4, 8, 8], [7], [0, 1, 2, 4], [0, 1, 3, 7]]),
        (
            [0, 2, 1, 3],
            [[1, 0, 1], [0, 1, 1]],
            [[1, 4, 4, 2, 2, 8, 8], [3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 1, 3, 3, 5, 7]],
        ),
    ],
    ids=["one shard", "two shards"],
)
def test_fused_lookup(engine: str, asked: list[int], sizes: list[list[int]], expected: Any) -> None:
    found = fused_lookup(filled(engine), ids(*asked), torch.tensor(sizes).flatten(), len(sizes))
    assert [x.tolist() for x in found] == [*expected, asked]


def test_rows_of_one_bit_need_the_step_that_trains_them(engine: str) -> None:
    config = TableConfig("t", dim=1, optimizer=SGD(1.0), serving=OneBit(0.5))
    shards = LocalShards([config], engine=engine)
    shards.assign_add({"t": (ids(1), rows([0.25]))})
    sizes = torch.tensor([1])

    with pytest.raises(UsageError, match="pass global_step to fused_lookup"):
        fused_lookup(shards, ids(1), sizes, 1)
    found = fused_lookup(shards, ids(1), sizes, 1, global_step=torch.tensor(400))

    assert torch.equal(found.embeddings[None], shards.local["t"].lookup(ids(1), step=400))


def fused_apply(shards: LocalShards, of: Tensor, sizes: Tensor, grads: Tensor, num_of_shards: int) -> None:
    found = fused_lookup(shards, of, sizes, num_of_shards)
    fused_apply_gradients(
        shards, of, found.indices, sizes, grads, found.id_offsets, found.emb_offsets, 0, 0, num_of_shards
    )


def slots(engine: str = "cpu", first: TableConfig = zeros("slot0", 1)) -> LocalShards:  # noqa: B008
    return LocalShards([first, zeros("slot1", 2)], engine=engine)


def test_fused_apply(engine: str) -> None:
    shards, sizes = slots(engine), torch.tensor([1, 2])
    fused_apply(shards, ids(0, 1, 2), sizes, torch.tensor([2.0, 1, 3, 2, 4]), 1)
    assert fused_lookup(shards, ids(0, 1, 2), sizes, 1).embeddings.tolist() == [-2, -1, -3, -2, -4]


def test_fused_apply_makes_one_summed_step_for_an_id_of_two_shards(engine: str) -> None:
    # With SGD two steps give the same result, with Adagrad they do not: n = (1 + 2)^2 = 9, w = -lr * 3 / 3.
    # (Monolith makes two steps.)
    adagrad = TableConfig("slot0", dim=1, optimizer=Adagrad(1.0, eps=0.0), initializer=Zeros())
    for first, row in ((zeros("slot0", 1), -3), (adagrad, -1)):
        shards, sizes = slots(engine, first), torch.tensor([1, 0, 1, 0])
        fused_apply(shards, ids(1, 1), sizes, torch.tensor([1.0, 2.0]), 2)
        assert fused_lookup(shards, ids(1, 1), sizes, 2).embeddings.tolist() == [row, row]


@pytest.mark.parametrize(
    ("sizes", "num_of_shards", "message"),
    [([1, 1], 2, "2 shards x 2 tables"), ([1, 5], 1, "add up to 2"), ([-1, 3], 1, "negative")],
)
def test_fused_slot_sizes_must_match_the_ids(sizes: list[int], num_of_shards: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fused_lookup(slots(), ids(1, 2), torch.tensor(sizes), num_of_shards)


def test_fused_gradients_and_offsets_must_be_those_of_the_lookup() -> None:
    shards, sizes, of = slots(), torch.tensor([1, 1]), ids(1, 2)
    found = fused_lookup(shards, of, sizes, 1)
    with pytest.raises(InputError, match="id_grads"):
        fused_apply(shards, of, sizes, torch.ones(4), 1)
    offsets = found.id_offsets[:-1], found.emb_offsets
    with pytest.raises(InputError, match="id_offsets"):
        fused_apply_gradients(shards, of, found.indices, sizes, torch.ones(3), *offsets, 0, 0, 1)
    assert [len(shards.local[name]) for name in shards.configs] == [0, 0]
