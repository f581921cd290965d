"""The encodings of the layout ops: version 4 (one tensor) and version 5 (several requests in one call)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.compat.monolith import ShardedFids
from megalith.compat.monolith import fused_embedding_to_layout as to_layout
from megalith.compat.monolith import fused_embedding_to_layout_grad as to_layout_grad
from megalith.compat.monolith import sharding_sparse_fids as shard
from megalith.compat.monolith.feature_configs import parse_message
from megalith.errors import InputError
from tests.compat.monolith.test_layout_ops import (
    EXAMPLE,
    MERGED,
    columns,
    random_configs,
    random_rows,
)

pytestmark = pytest.mark.usefixtures("implementation")
CFGS = random_configs(9, 3, 6)
PS = 3


def requests() -> list[ShardedFids]:
    """Three batches of different sizes; a shared feature has another row in each."""
    found = []
    for batch, seed in ((4, 1), (1, 2), (7, 3)):
        rows, shared = random_rows(CFGS, batch, seed=seed)
        found.append(shard(columns(rows), PS, CFGS, True, "example_batch", shared=shared))
    return found


OFFSETS = ("fid_offset", "feature_offset", "nfl_offset", "batch_size")


def flat_rows(found: ShardedFids, seed: int) -> list[Tensor]:
    assert found.emb_size is not None
    return random_like([torch.empty(n) for n in found.emb_size.tolist()], seed)


def random_like(tensors: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return [torch.randn(each.shape, generator=generator) for each in tensors]


def one_by_one(found: ShardedFids, rows: list[Tensor]) -> list[Tensor]:
    offsets = (getattr(found, name) for name in OFFSETS)
    return to_layout(rows, None, *offsets, "example_batch", CFGS, PS, version=3)


# ---- what the encodings contain


def test_version_3_has_no_sizes_and_its_lists_may_be_a_list() -> None:
    found = shard(columns(EXAMPLE), 2, MERGED, True, "instance", 0, True, 3)
    assert isinstance(found.fid_list, list)
    assert [ids.tolist() for ids in found.fid_list] == [ids.tolist() for ids in found.lists]
    assert found.batch_size.shape == ()
    assert found[5:9] == (None,) * 4
    assert found.fid_list_row_splits_size is None


def test_version_4_is_one_tensor_by_server_then_table() -> None:
    found = shard(columns(EXAMPLE), 2, MERGED, True, "example", version=4)
    five = shard(columns(EXAMPLE), 2, MERGED, True, "example", version=5)

    assert isinstance(found.fid_list, Tensor)
    assert found.fid_list.tolist() == [
        *[0, 6, 12, 2, 8, 14, 4, 10, 16],  # server 0: both tables
        *[3, 9, 15, 5, 11, 17, 1, 7, 13],
    ]
    assert isinstance(found.fid_list_row_splits, Tensor)
    assert found.fid_list_row_splits.tolist() == [0, 3, 0, 3, 6, 0, 3, 0, 3, 6]
    lengths = (found.fid_list_emb_row_lenth, found.fid_list_table_row_length, found.fid_list_shard_row_lenth)
    assert [t.tolist() for t in lengths if t is not None] == [[15, 78, 15, 78], [3, 6, 3, 6], [9, 9]]
    assert torch.equal(found.fid_offset, five.fid_offset)
    assert found.batch_size.tolist() == 6
    with pytest.raises(InputError, match="split it by fid_list_table_row_length"):
        found.lists  # noqa: B018


# ---- layouts


def server_major(lists: list[Tensor]) -> Tensor:
    tables = len(CFGS.table_names)
    return torch.cat([lists[t * PS + p] for p in range(PS) for t in range(tables)])


def test_version_4_gives_the_layouts_and_gradients_of_version_3() -> None:
    rows, shared = random_rows(CFGS, 5, seed=8)
    five = shard(columns(rows), PS, CFGS, shared=shared)
    four = shard(columns(rows), PS, CFGS, shared=shared, version=4)
    lists = [each.requires_grad_() for each in flat_rows(five, 4)]
    fused = server_major(lists).detach().requires_grad_()

    expected = one_by_one(five, lists)
    given: dict[str, Any] = {
        **{name: getattr(four, name) for name in OFFSETS},
        **{"embeddings_list": [fused], "fid_list_row_split": None, "variant_type": "example_batch"},
        **{"feature_cfgs": CFGS, "ps_num": PS, "version": 4},
        "fid_list_emb_row_lenth": four.fid_list_emb_row_lenth,
    }
    actual = to_layout(**given)

    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)
    grads = random_like(expected, 6)
    (grad,) = torch.autograd.grad(actual, fused, grads)
    assert torch.equal(grad, server_major(list(torch.autograd.grad(expected, lists, grads))))
    (by_hand,) = to_layout_grad(layout_tensors_grad=grads, **given)
    assert torch.equal(by_hand, grad)


def concatenated(found: list[ShardedFids]) -> dict[str, Any]:
    """The tensors of several requests, one after the other."""
    sizes = ("nfl_size", "feature_size", "fid_size", "emb_size")
    joined: dict[str, Any] = {n: torch.cat([getattr(each, n) for each in found]) for n in (*OFFSETS, *sizes)}
    return {**joined, "variant_type": "example_batch", "feature_cfgs": CFGS, "ps_num": PS, "version": 5}


def test_requests_of_version_5_are_laid_out_one_after_the_other() -> None:
    found = requests()
    each = [[x.requires_grad_() for x in flat_rows(f, seed)] for seed, f in enumerate(found)]
    lists = [torch.cat(parts).detach().requires_grad_() for parts in zip(*each, strict=True)]
    separate = [one_by_one(f, rows) for f, rows in zip(found, each, strict=True)]

    outputs = to_layout(lists, None, **concatenated(found))

    for out, parts in zip(outputs, zip(*separate, strict=True), strict=True):
        assert torch.equal(out, torch.cat(parts))
        assert out.shape[0] == 4 + 1 + 7
    given = concatenated(found)
    own_types = {k: v.int() if isinstance(v, Tensor) else v for k, v in given.items()}  # as Monolith has them
    own_types |= {"fid_offset": given["fid_offset"].to(torch.uint64)}
    own_types |= {"nfl_offset": given["nfl_offset"].to(torch.uint32)}
    for x, y in zip(to_layout(lists, None, **own_types), outputs, strict=True):
        assert torch.equal(x, y)
    grads = random_like(outputs, 7)
    actual = torch.autograd.grad(outputs, lists, grads)
    by_request = zip(*(g.split([4, 1, 7]) for g in grads), strict=True)
    parts = [
        torch.autograd.grad(o, rows, list(g)) for o, rows, g in zip(separate, each, by_request, strict=True)
    ]
    by_hand = to_layout_grad(
        embeddings_list=lists, fid_list_row_split=None, layout_tensors_grad=grads, **concatenated(found)
    )
    for grad, own, joined in zip(actual, by_hand, zip(*parts, strict=True), strict=True):
        assert torch.equal(grad, torch.cat(joined))
        assert torch.equal(own, grad)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nfl_size": None}, "nfl_size is missing"),
        ({"version": 3}, "nfl_size must not be given for version 3"),
        ({"version": 4}, "fid_list_emb_row_lenth must be given for version 4"),
        ({"fid_size": torch.tensor([1, 1, 1])}, "fid_size adds up to 3"),
        ({"feature_size": torch.tensor([1, 1])}, r"feature_size must have the shape \[3\]"),
        ({"nfl_size": torch.tensor([1, 1, 1])}, "nfl_size must be 10 for each request"),
        (
            {"emb_size": torch.zeros(3 * 6, dtype=torch.int64)},
            r"emb_size adds up to 0 for embeddings_list\[0\], which has",
        ),
        ({"batch_size": torch.zeros(0, dtype=torch.int64)}, "batch_size is empty"),
        ({"batch_size": torch.tensor([4, -1, 7])}, "batch_size must not be negative"),
    ],
)
def test_sizes_that_do_not_match(changed: dict[str, Any], message: str) -> None:
    found = requests()
    lists = [torch.cat(parts) for parts in zip(*(flat_rows(f, 0) for f in found), strict=True)]
    with pytest.raises(InputError, match=message):
        to_layout(lists, None, **{**concatenated(found), **changed})


def test_a_protobuf_message_is_a_config_too() -> None:
    message: Any = parse_message("monolith.io.proto.FeatureConfigs", MERGED.to_proto())
    found = shard(columns(EXAMPLE), 2, message, True, "example")
    same = shard(columns(EXAMPLE), 2, MERGED, True, "example")
    assert torch.equal(found.fid_offset, same.fid_offset)
    rows = flat_rows(found, 1)
    offsets = [getattr(found, name) for name in OFFSETS]
    one, two = (to_layout(rows, None, *offsets, "example", cfgs, 2) for cfgs in (message, MERGED))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
