"""Messages of gradients: what ranks encode, an owner decodes by table; blocks; memory that is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import library
from megalith.errors import InputError
from megalith.shards import rank_messages
from megalith.shards.gradients import Gradients
from megalith.shards.rank_messages import (
    GradientMessage,
    begins_of,
    join_blocks,
    push_head,
)
from megalith.shards.row_encoding import make_wire
from megalith.table.table_data import Update
from tests.fixed_examples import fixed_examples
from tests.table.support import assert_same_bits


def new_buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@st.composite
def pushes(draw: st.DrawFn) -> Any:
    """The gradients of two ranks for the tables of one owner: counts, dims, and what each rank sends."""
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    counts = torch.tensor([[draw(st.integers(0, 12)) for _ in dims] for _ in range(2)])
    ranks = []
    for own in counts:
        n = int(own.sum())
        flat = torch.randn(int((own * torch.tensor(dims)).sum()), generator=torch.Generator().manual_seed(n))
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
        seen = torch.tensor(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)), dtype=torch.int64)
        ranks.append((flat, draw(st.sampled_from([None, mask])), seen))
    return counts, dims, ranks


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float16"])
@fixed_examples(20, 60)
@given(given_pushes=pushes())
def test_an_owner_decodes_by_table_what_ranks_sent(precision: str, counting: bool, given_pushes: Any) -> None:
    counts, dims, ranks = given_pushes
    wire = make_wire(precision)
    message = GradientMessage(wire, dims, with_counts=counting, new_buffer=new_buffer)
    parts = []
    for rank, (flat, mask, seen) in enumerate(ranks):
        gradients = Gradients(torch.empty(0), flat, seen if counting else None, mask)
        own, head = counts[rank : rank + 1], push_head(3, 0, Update(7, None, 1.0, 0.0))
        parts.append(message.encode(head, gradients, own, message.sizes(own)))
        assert parts[-1][:24].view(torch.int64).tolist() == [3, 0, 7]
    ids = [torch.arange(n) for n in counts.sum(0).tolist()]
    received = message.decode(torch.cat(parts), ids, counts, message.sizes(counts))

    for t, dim in enumerate(dims):
        values, masks, occurrences = [], [], []
        for own, (flat, mask, seen) in zip(counts.tolist(), ranks, strict=True):
            first, n = sum(own[:t]), own[t]
            at = sum(k * d for k, d in zip(own[:t], dims[:t], strict=True))
            values.append(
                wire.decode(wire.encode(flat, torch.tensor([own]), dims), counts, dims)[at:][: n * dim]
            )
            masks.append(torch.ones(n, dtype=torch.bool) if mask is None else mask[first : first + n])
            occurrences.append(seen[first : first + n])
        assert received[t].ids is ids[t]
        assert_same_bits(received[t].values, torch.cat(values).view(-1, dim))
        mask = received[t].mask
        assert torch.cat(masks).all() if mask is None else torch.equal(mask, torch.cat(masks))
        if counting:
            assert torch.equal(received[t].counts, torch.cat(occurrences))


@fixed_examples(20, 60)
@given(data=st.data())
def test_blocks_are_joined_alike_with_and_without_native_code(data: Any) -> None:
    ranks, tables = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    counts = torch.tensor([[data.draw(st.integers(0, 5)) for _ in range(tables)] for _ in range(ranks)])
    counts = counts.view(ranks, tables).to(torch.int64)
    widths = torch.tensor([data.draw(st.integers(1, 9)) for _ in range(tables)], dtype=torch.int64)
    begins = begins_of([int((own * widths).sum()) + 3 for own in counts])
    source = torch.randint(256, (begins[-1] + int((counts[-1] * widths).sum()) + 5,), dtype=torch.uint8)
    found = []
    for native in (library.native_module, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_messages, "native_module", native)
            found.append(new_buffer(int((counts * widths).sum())))
            join_blocks(source, begins, counts, widths, found[-1])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("begins", "counts", "widths", "size"),
    [
        ([0, 4], [[1], [1]], [5], 10),  # beyond the data
        ([0, -1], [[1], [1]], [4], 8),
        ([0, 9], [[1], [1]], [4], 8),
        ([0], [[1], [1]], [4], 8),
        ([0, 4], [[1], [-1]], [4], 0),
        ([0, 4], [[1], [2**62]], [4], 8),
        ([0, 4], [[1], [1]], [0], 0),
        ([0, 4], [[1], [1]], [4], 7),
        ([0, 4], [[1], [1]], [4], 9),
        ([0, 4], [[1], [1]], [4, 4], 8),
    ],
)
def test_blocks_outside_the_memory_are_refused(begins: Any, counts: Any, widths: Any, size: int) -> None:
    native: Any = library.native_module()
    source, out = torch.zeros(8, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    with pytest.raises((InputError, ValueError)):
        native.join_blocks(source, begins, torch.tensor(counts), torch.tensor(widths), out)


def test_a_buffer_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    native: Any = library.native_module()
    buffers = native.Buffers()
    first = torch.from_dlpack(buffers.get(100_000))
    assert (first.dtype, first.shape) == (torch.uint8, (100_000,))
    address, view = first.data_ptr(), first[80:96].view(torch.int64)
    view.fill_(5)
    del first
    other = torch.from_dlpack(buffers.get(100_000))
    assert other.data_ptr() != address
    other.fill_(9)
    assert view.tolist() == [5, 5]
    del view
    assert buffers.num_free == 1
    again = torch.from_dlpack(buffers.get(90_000))
    assert again.data_ptr() == address
    buffers.get(50_000)  # a capsule that nobody takes
    assert buffers.num_free == 1
    del buffers  # a tensor may live longer
    assert again.fill_(1).sum() == 90_000
    with pytest.raises((InputError, ValueError)):
        native.Buffers().get(0)
