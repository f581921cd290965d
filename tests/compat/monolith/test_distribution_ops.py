"""Monolith's distribution ops: every vector of its own tests, and the decisions where ours differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalith import Ragged, Router
from megalith.compat import monolith

pytestmark = pytest.mark.usefixtures("implementation")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(*values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def gradients(loss: Tensor, *inputs: Tensor) -> list[list[list[float]]]:
    return [g.tolist() for g in torch.autograd.grad(loss, inputs)]


# ---- ids by shard


def test_split_by_indices_and_its_gradient() -> None:
    ids = ints(0, 1, 2, 2, 3)
    assert [s.tolist() for s in monolith.split_by_indices(ids % 3, ids, 3)] == [[0, 3], [1], [2, 2]]
    tensor = rows([0, 0], [1, 1], [2, 2]).requires_grad_()
    first, second, third = monolith.split_by_indices(ints(0, 1, 0), tensor, 3)
    assert (first.tolist(), second.tolist(), third.shape) == ([[0, 0], [2, 2]], [[1, 1]], (0, 2))
    assert gradients(first.sum() + second.sum() + third.sum(), tensor) == [[[1, 1], [1, 1], [1, 1]]]
    nothing = torch.empty(0, requires_grad=True)
    parts = monolith.split_by_indices(ints(), nothing, 3)
    assert [p.shape for p in parts] == [(0,)] * 3
    assert gradients(sum(p.sum() for p in parts), nothing) == [[]]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, *FLOATS])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3), (4, 0)])
def test_split_by_indices_takes_any_type_and_rank(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    parts = monolith.split_by_indices(torch.tensor([1, 0, 1, 1], dtype=torch.int32), tensor, 2)
    assert torch.equal(parts[0], tensor[[1]])
    assert torch.equal(parts[1], tensor[[0, 2, 3]])


def test_ragged_split_by_indices() -> None:
    num = Ragged.from_lists([[], [], [4, 3, 2], [1], [], []])

    values, positions = monolith.ragged_split_by_indices(ints(0, 1, 0, 1), num, 2)

    assert values[0].to_lists() == [[], [], [4, 2], [], [], []]
    assert values[1].to_lists() == [[], [], [3], [1], [], []]
    assert positions[0].to_lists() == [[], [], [0, 2], [], [], []]
    assert positions[1].to_lists() == [[], [], [1], [3], [], []]


def test_reorder_by_indices_reverses_each_shard_and_compares_first_columns() -> None:
    ids = ints(0, 1, 2, 2, 3, 5)
    output, sizes = monolith.reorder_by_indices(ids, (ids % 3).int(), 3)
    assert (output.tolist(), sizes.tolist(), sizes.dtype) == ([3, 0, 1, 5, 2], [2, 1, 2], torch.int32)
    table = rows([7, 1], [-0.0, 2], [7, 3], [0, 4], [8, 5])
    output, sizes = monolith.reorder_by_indices(table, ints(1, 0, 0, 1, 1), 2)
    assert output.tolist() == [[-0.0, 2], [8, 5], [7, 1]]  # -0 is 0; the first occurrence's shard counts
    assert sizes.tolist() == [1, 2]
    output, sizes = monolith.reorder_by_indices(ints(), ints(), 2)
    assert (output.tolist(), sizes.tolist()) == ([], [0, 0])


ONE = [0, 1, 2, 2, 3, 5]
MERGED = [[0, 1, 4, 5], [2, 3, 6, 7]]
REORDERS = {
    "one": ([ONE], 3, [2], [0, 3, 1, 2, 5], [2, 1, 2], [2, 1, 2], [0, 4, 6, 6, 2, 8]),
    "an empty one": (
        [ONE, []],
        3,
        [2, 2],
        [0, 3, 1, 2, 5],
        [2, 1, 2],
        [2, 0, 1, 0, 2, 0],
        [0, 4, 6, 6, 2, 8],
    ),
    "two": (
        [ONE, [6, 7, 8, 8, 9, 11]],
        3,
        [2, 2],
        [0, 3, 6, 9, 1, 7, 2, 5, 8, 11],
        [4, 2, 4],
        [2, 2, 1, 1, 2, 2],
        [0, 8, 12, 12, 2, 14, 4, 10, 16, 16, 6, 18],
    ),
    "nothing": ([[], []], 2, [2, 2], [], [0, 0], [0, 0, 0, 0], []),
    "two shards": (
        MERGED,
        2,
        [2, 2],
        [0, 4, 2, 6, 1, 5, 3, 7],
        [4, 4],
        [2, 2, 2, 2],
        [0, 8, 2, 10, 4, 12, 6, 14],
    ),
    "three dims": (
        [[0, 1, 0], [3, 2, 3], [5, 6, 7]],
        2,
        [1, 2, 3],
        [0, 2, 6, 1, 3, 5, 7],
        [3, 4],
        [1, 1, 1, 1, 1, 2],
        [0, 6, 0, 7, 1, 7, 9, 3, 12],
    ),
    "two dims": (  # the offsets of the fused gather below
        [[2, 3, 1, 2, 7, 2], [5, 8, 4, 4, 5, 11, 6]],
        3,
        [3, 2],
        [3, 6, 1, 7, 4, 2, 5, 8, 11],
        [2, 3, 4],
        [1, 1, 2, 1, 1, 3],
        [13, 0, 5, 13, 8, 13, 16, 18, 11, 11, 16, 20, 3],
    ),
}


@pytest.mark.parametrize("case", REORDERS.values(), ids=REORDERS.keys())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_fused_reorder_by_indices(case: tuple, dtype: torch.dtype) -> None:  # type: ignore[type-arg]
    inputs, shards, dims, output, shard_sizes, slot_sizes, offsets = case
    found = monolith.fused_reorder_by_indices(
        [torch.tensor(i, dtype=dtype) for i in inputs], num_of_shards=shards, dim_sizes=dims
    )
    assert found.output.tolist() == output
    assert found.shard_sizes.tolist() == shard_sizes
    assert found.sharded_slot_sizes.tolist() == slot_sizes
    assert found.emb_offset_sz.tolist() == [len(i) for i in inputs]
    assert found.fused_emb_offset.tolist() == offsets


def test_fused_reorder_of_the_values_of_ragged_columns() -> None:
    a, b, c, d = (Ragged.from_lists([[2 * n], [2 * n + 1]]) for n in range(4))
    merged = [torch.cat([a.values, c.values]), torch.cat([b.values, d.values])]
    assert [each.tolist() for each in merged] == MERGED
    found = monolith.fused_reorder_by_indices(merged, 2, [2, 2])
    assert found.output.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert (found.shard_sizes.tolist(), found.sharded_slot_sizes.tolist()) == ([4, 4], [2] * 4)


def reorder_model(inputs: list[list[int]], router: Router, dims: list[int]) -> tuple[list[int], ...]:
    """Reference 2.1 in plain Python."""
    buckets: dict[tuple[int, int], dict[int, int]] = {}
    for m, ids in enumerate(inputs):
        for v, n in zip(
            ids, router.owner_reference(torch.tensor(ids, dtype=torch.int64)).tolist(), strict=True
        ):
            bucket = buckets.setdefault((n, m), {})
            bucket.setdefault(v, len(bucket))
    output, slot_sizes, where, base = [], [], {}, 0
    for n in range(router.num_shards):
        for m, dim in enumerate(dims):
            bucket = buckets.get((n, m), {})
            output += list(bucket)
            slot_sizes.append(len(bucket))
            where.update({(m, v): base + dim * rank for v, rank in bucket.items()})
            base += dim * len(bucket)
    return output, slot_sizes, [where[m, v] for m, ids in enumerate(inputs) for v in ids]


@pytest.mark.parametrize(
    "router",
    [
        Router("roundrobin", 8),
        Router("roundrobin", 8, skip_first=True),
        Router("hash_roundrobin", 5),
        Router("continuous", 3, block_size=2**28),
    ],
    ids=repr,
)
def test_fused_reorder_smoke_run(router: Router) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    inputs = [torch.randint(0, 2**31, (512,), generator=generator) for _ in range(16)]
    inputs += [i // 2**24 - 64 for i in inputs]  # many repeats, some of them negative
    dims = [16] * 16 + list(range(1, 17))

    found = monolith.fused_reorder_by_indices(inputs, router, dims)

    output, slot_sizes, offsets = reorder_model([i.tolist() for i in inputs], router, dims)
    assert found.output.tolist() == output
    assert found.sharded_slot_sizes.tolist() == slot_sizes
    assert found.fused_emb_offset.tolist() == offsets
    assert not router.skip_first or found.shard_sizes[0] == 0


# ---- rows of ids


@pytest.mark.parametrize("use_multi_threads", [False, True])
def test_map_id_to_embedding_of_many_shards(use_multi_threads: bool) -> None:
    ids = torch.arange(1000)
    embeddings = torch.arange(16.0).repeat(1000, 1) + ids[:, None]
    parts = monolith.split_by_indices(ids % 10, ids, 10)
    tables = monolith.split_by_indices(ids % 10, embeddings, 10)
    assert torch.equal(monolith.map_id_to_embedding(parts, tables, ids, use_multi_threads), embeddings)


def test_map_id_to_embedding_and_its_gradient() -> None:
    ids, embeddings = [ints(1), ints(2)], [rows([1, 1]).requires_grad_(), rows([2, 2]).requires_grad_()]
    out = monolith.map_id_to_embedding(ids, embeddings, ints(1, 2).view(2, 1))
    assert out.tolist() == [[[1, 1]], [[2, 2]]]
    out = monolith.map_id_to_embedding(ids, embeddings, ints(1, 1, 2))
    assert gradients((torch.zeros(3, 2) - out).sum(), *embeddings) == [[[-2, -2]], [[-1, -1]]]
    by_hand = monolith.map_id_to_embedding_gradient_back_prop(ids, ints(1, 1, 2), -torch.ones(3, 2))
    assert [g.tolist() for g in by_hand] == [[[-2, -2]], [[-1, -1]]]


def test_an_id_in_two_pieces_is_read_and_learns_in_the_first() -> None:
    ids, embeddings = [ints(5, 5), ints(5)], [rows([1], [2]).requires_grad_(), rows([3]).requires_grad_()]
    out = monolith.map_id_to_embedding(ids, embeddings, ints(5, 5))
    assert out.tolist() == [[1], [1]]
    assert gradients(out.sum(), *embeddings) == [[[2], [0]], [[0]]]


def test_gather_embeddings_by_input_and_its_gradient() -> None:
    ids, embeddings = ints(1, 2, 3), rows([1, 1], [2, 2], [3, 3]).requires_grad_()
    out, mapping = monolith.gather_embeddings_by_input(ids, embeddings, ints(2, 1, 2).view(3, 1))
    assert out.tolist() == [[[2, 2]], [[1, 1]], [[2, 2]]]
    assert mapping.tolist() == [[1], [0], [1]]
    out, _ = monolith.gather_embeddings_by_input(ids, embeddings, ints(1, 2, 1).view(3, 1))
    assert gradients((torch.ones(3, 1, 2) - out).sum(), embeddings) == [[[-2, -2], [-1, -1], [0, 0]]]
    by_hand = monolith.gather_embeddings_by_ids_gradient_back_prop(
        ints(2, 3, 1), rows([1, 1], [2, 2], [4, 4], [8, 8]), ints(1, 0, 1, 2)
    )
    assert by_hand.tolist() == [[2, 2], [5, 5], [8, 8]]


FUSED = [1.1, 1.2, 1.3, 2.1, 2.2, 3.1, 3.2, 3.3, 4.1, 4.2, 4.3]
FUSED += [5.1, 5.2, 6.1, 6.2, 6.3, 7.1, 7.2, 8.1, 8.2, 9.1, 9.2]


def fused_offsets() -> list[Tensor]:
    return [ints(13, 0, 5, 13, 8, 13), ints(16, 18, 11, 11, 16, 20, 3)]


def test_fused_gather_embeddings_by_input() -> None:
    first, second = fused_offsets()
    offsets = [first.repeat(12345), second.repeat(11777).int()]

    wide, narrow = monolith.fused_gather_embeddings_by_input(torch.tensor(FUSED), offsets, [3, 2])

    firsts = [6, 1, 3, 6, 4, 6]
    expected = rows(*([k + 0.1, k + 0.2, k + 0.3] for k in firsts))
    assert torch.equal(wide, expected.repeat(12345, 1))
    expected = rows(*([k + 0.1, k + 0.2] for k in [7, 8, 5, 5, 7, 9, 2]))
    assert torch.equal(narrow, expected.repeat(11777, 1))


FUSED_GRADIENT = [2.1, 2.2, 2.3, 7.4, 7.5, 3.1, 3.2, 3.3, 5.1, 5.2, 5.3]
FUSED_GRADIENT += [7.8, 8.0, 11.3, 11.6, 11.9, 6.8, 7.0, 2.4, 2.5, 6.4, 6.5]


@pytest.mark.parametrize("scale", [1, 0.5])
def test_fused_gather_gradient(scale: float) -> None:
    grads = [
        rows(*([k + 0.1, k + 0.2, k + 0.3] for k in range(1, 7))).repeat(888, 1),
        rows(*([k + 0.4, k + 0.5] for k in range(1, 8))).repeat(888, 1),
    ]
    offsets = [o.repeat(888) for o in fused_offsets()]

    flat = monolith.fused_gather_embeddings_by_input_gradient(22, grads, offsets, [3, 2], scale)

    expected = 888 * torch.tensor(FUSED_GRADIENT) * scale
    torch.testing.assert_close(flat, expected, rtol=888e-7, atol=0)


def test_autograd_of_the_fused_gather_is_its_gradient_op() -> None:
    fused = torch.tensor(FUSED, requires_grad=True)
    outs = monolith.fused_gather_embeddings_by_input(fused, fused_offsets(), [3, 2])
    grads = [torch.randn_like(o) for o in outs]
    (actual,) = torch.autograd.grad(outs, fused, grads)
    size = torch.tensor(22, dtype=torch.int32)
    assert torch.equal(
        actual, monolith.fused_gather_embeddings_by_input_gradient(size, grads, fused_offsets(), [3, 2])
    )
