"""Blocks of messages: data of all tables by rank, as it is exchanged, and by table, as engines take it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megalith.library import native_module


def begins_of(sizes: Sequence[int]) -> list[int]:
    """Compute where consecutive pieces begin."""
    return list(accumulate(sizes, initial=0))[:-1]


def join_blocks(data: Tensor, begins: Sequence[int], counts: Tensor, widths: Tensor, out: Tensor) -> None:
    """Copy blocks that are stored by rank, then table, in the order by table, then rank."""
    # counts: int64 [ranks, tables], the number of items of each block; widths: int64 [tables], the bytes of
    # an item.
    native = native_module()
    if native is not None and data.is_cpu:
        native.join_blocks(data, begins, counts, widths, out)
        return
    sizes = (counts * widths).tolist()
    blocks = [
        data[at:].split_with_sizes([*own, data.numel() - at - sum(own)])
        for at, own in zip(begins, sizes, strict=True)
    ]
    pieces = [blocks[rank][table] for table in range(len(widths)) for rank in range(len(sizes))]
    if pieces:
        torch.cat(pieces, out=out)
