"""Dedup, match, bucketize and split equal a plain model and their references, for any ids and any router."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from megalith import Ragged, Router
from megalith.ops import bucketize, dedup, match, place_rows, split_rows
from megalith.ops.bucketing import (
    _bucketize_reference,
    _dedup_reference,
    _match_reference,
    _place_reference,
    _split_any,
)
from megalith.routing import MODES
from tests.fixed_examples import fixed_examples
from tests.ops.support import (
    FLOATS,
    HIGHEST,
    INTEGERS,
    LOWEST,
    assert_same,
    assert_threads_do_not_show,
    id_tensors,
    ints,
    randn,
    splits,
    strided,
)


@st.composite
def routers(draw: st.DrawFn) -> Router:
    mode, skip = draw(st.sampled_from(MODES)), draw(st.booleans())
    shards = draw(st.one_of(st.integers(1, 7), st.sampled_from([16, 129]))) + skip
    block = draw(st.sampled_from([1, 3, 2**40])) if mode == "continuous" else None
    return Router(mode, shards, block_size=block, skip_first=skip)


# ---- dedup


def test_dedup_keeps_first_occurrences() -> None:
    ids = ints(5, LOWEST, 5, 0, -1, HIGHEST, 0, 5)
    found = dedup(ids)
    assert found.ids.tolist() == [5, LOWEST, 0, -1, HIGHEST]
    assert found.first.tolist() == [0, 1, 3, 4, 5]
    assert found.counts.tolist() == [[5]]
    assert found.inverse.tolist() == [0, 1, 0, 2, 3, 4, 2, 0]
    assert found.offsets is None


def test_dedup_orders_by_shard_then_list_then_first_occurrence() -> None:
    ids = ints(4, 3, 4, 2, 3, 3, 8)  # lists [4, 3, 4, 2] and [3, 3, 8]
    found = dedup(ids, ints(0, 4, 7), Router("roundrobin", 2), widths=[10, 1])
    assert found.ids.tolist() == [4, 2, 8, 3, 3]
    assert found.counts.tolist() == [[2, 1], [1, 1]]
    assert found.inverse.tolist() == [0, 3, 0, 1, 4, 4, 2]
    assert found.offsets is not None
    assert found.offsets.tolist() == [0, 21, 0, 10, 31, 31, 20]


def test_dedup_by_given_owners_lets_the_first_occurrence_decide() -> None:
    found = dedup(ints(7, 7, 8), owners=ints(2, 0, 0).int(), num_shards=3)
    assert found.ids.tolist() == [8, 7]
    assert found.counts.tolist() == [[1], [0], [1]]


@fixed_examples(50)
@given(data=st.data(), ids=id_tensors(), distinct=st.booleans())
def test_dedup_is_its_reference_and_leads_back(data: st.DataObject, ids: Tensor, distinct: bool) -> None:
    cuts = data.draw(splits(ids.numel()))
    widths = [data.draw(st.integers(0, 5)) for _ in cuts[1:]]
    by = data.draw(st.one_of(routers(), st.integers(1, 5)))
    shards = by if isinstance(by, int) else by.num_shards
    rule: list[int] = []
    owners = None
    if isinstance(by, int):
        owners = torch.tensor([data.draw(st.integers(0, by - 1)) for _ in ids], dtype=torch.int32)
        found = dedup(ids, cuts, owners=owners, num_shards=shards, distinct=distinct, widths=widths)
    else:
        rule = list(by.rule)
        found = dedup(ids, cuts, by, distinct=distinct, widths=widths)

    reference = _dedup_reference(ids.long(), cuts, owners, rule, shards, distinct, widths, "owners")

    assert_same([found.ids, found.first, found.counts.flatten(), found.inverse, found.offsets], reference)
    assert torch.equal(found.ids[found.inverse], ids.long())
    assert torch.equal(ids.long()[found.first], found.ids)
    assert int(found.counts.sum()) == found.ids.numel()


# ---- match


@fixed_examples(50)
@given(keys=id_tensors(), queries=id_tensors())
def test_match_is_its_reference(keys: Tensor, queries: Tensor) -> None:
    found = match(keys, queries, missing_ok=True)
    assert_same(found, _match_reference(keys.long(), queries.long(), "queries", True))
    listed = keys.tolist()
    assert found.tolist() == [listed.index(q) if q in listed else -1 for q in queries.tolist()]


# ---- bucketize


@fixed_examples(50)
@given(data=st.data(), ids=id_tensors(), router=routers(), weighted=st.booleans())
def test_bucketize_is_a_plain_model_in_every_mode(
    data: st.DataObject, ids: Tensor, router: Router, weighted: bool
) -> None:
    cuts = data.draw(splits(ids.numel()))
    weights = randn(0, ids.numel(), dtype=data.draw(st.sampled_from(FLOATS))) if weighted else None
    column = Ragged(ids, cuts)

    found = bucketize(column, router, weights)

    values, owners = ids.tolist(), router.owner_reference(ids).tolist()
    lengths, indices, order = [], [], []
    for shard in range(router.num_shards):
        for begin, end in pairwise(cuts.tolist()):
            mine = [i for i in range(begin, end) if owners[i] == shard]
            lengths.append(len(mine))
            indices += [values[i] for i in mine]
            order += mine
    assert found.lengths.tolist() == lengths
    assert found.indices.tolist() == indices
    assert found.indices.dtype == ids.dtype
    assert torch.equal(found.indices[found.permute], ids)
    assert [order.index(i) for i in range(len(values))] == found.permute.tolist()
    if weights is None:
        assert found.weights is None
    else:
        assert_same(found.weights, weights[order])
    reference = _bucketize_reference(ids.long(), cuts, None, list(router.rule), router.num_shards, "owners")
    assert_same([found.lengths, found.permute], reference)


def test_weights_of_a_bucketized_column_take_gradients() -> None:
    column, router = Ragged.from_lists([[4, 1, 6], [3]]), Router("hash_roundrobin", 3)
    weights = randn(0, 4, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda w: bucketize(column, router, w).weights, weights)
    assert gradgradcheck(lambda w: bucketize(column, router, w).weights ** 2, weights)  # type: ignore[operator]


# ---- rows that move as a whole


@fixed_examples(50)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_split_and_place_are_their_references(data: st.DataObject, seed: int) -> None:
    n, parts = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 5))
    shape = data.draw(st.sampled_from([(n,), (n, 3), (n, 2, 4), (n, 0)]))
    rows = randn(seed, *shape, dtype=data.draw(st.sampled_from(FLOATS)))
    indices = torch.tensor([data.draw(st.integers(0, parts - 1)) for _ in range(n)], dtype=torch.int64)

    pieces = split_rows(rows, indices, parts)

    assert_same(pieces, [rows[indices == k] for k in range(parts)])
    assert_same(split_rows(strided(rows), strided(indices).int(), parts), pieces)
    lengths, place = _bucketize_reference(None, ints(0, n), indices, [], parts, "indices")
    assert_same(_split_any(rows, place, lengths), pieces)
    assert_same(place_rows(rows, place), _place_reference(rows, place))
    assert_same(place_rows(strided(rows), strided(place)), torch.cat(pieces))


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 2)])
def test_gradcheck_of_split_and_place(shape: tuple[int, ...]) -> None:
    rows = randn(0, *shape, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda r: split_rows(r, ints(2, 0, 2, 3, 0), 5), rows)
    assert gradgradcheck(lambda r: [p**2 for p in split_rows(r, ints(2, 0, 2, 3, 0), 5)], rows)
    assert gradcheck(lambda r: place_rows(r, ints(4, 2, 0, 1, 3)), rows)


def test_a_part_without_gradient_counts_as_zero() -> None:
    rows = torch.ones(3, 2, requires_grad=True)
    first, _ = split_rows(rows, ints(1, 0, 1), 2)
    first.sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0, 0], [1, 1], [0, 0]]


# ---- threads


@pytest.mark.parametrize("dtype", INTEGERS)
def test_threads_do_not_show(dtype: torch.dtype, restore_threads: None) -> None:
    n = 150_000  # tasks take 16384 queries or values, or a list each
    generator = torch.Generator().manual_seed(3)
    ids = ((torch.rand(n, generator=generator) ** 3 - 0.3) * 50_000).to(dtype)
    lengths = torch.randint(0, 9, (2 * n,), generator=generator).cumsum(0)
    column = Ragged(ids, torch.cat([ints(0), lengths[lengths < n], ints(n)]))
    lists = torch.arange(0, n + 1, n // 10)
    router = Router("hash_roundrobin", 7)

    assert_threads_do_not_show(lambda: dedup(ids, lists, router, widths=list(range(1, 11))))
    assert_threads_do_not_show(lambda: [match(ids[:20_000], ids, missing_ok=True)])
    assert_threads_do_not_show(lambda: bucketize(column, router, randn(0, n)))
    assert_threads_do_not_show(lambda: split_rows(randn(1, n, 3), router.owner(ids), 7))

    torch.set_num_threads(2)
    long = ids.long()
    reference = _dedup_reference(long, lists, None, list(router.rule), 7, True, list(range(1, 11)), "owners")
    found = dedup(ids, lists, router, widths=list(range(1, 11)))
    assert_same([found.ids, found.first, found.counts.flatten(), found.inverse, found.offsets], reference)
    buckets = bucketize(column, router)
    references = _bucketize_reference(long, column.row_splits, None, list(router.rule), 7, "owners")
    assert_same([buckets.lengths, buckets.permute], references)
