"""Distinct ids of a call, in torch on any device. These calls wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def first_occurrences(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct ids in the order of their first occurrences."""
    # ids: int64 [n]; returns: the distinct ids, int64 [u], and for each id its position among them, int64
    # [n].
    distinct, inverse = torch.unique(ids, return_inverse=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(distinct, ids.numel()).scatter_reduce_(0, inverse, positions, "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=ids.device)
    return distinct[order], rank[inverse]


def last_occurrences(ids: Tensor) -> Tensor:
    """Find the position of the last occurrence of each distinct id."""
    # ids: int64 [n]; returns: int64 [u], ascending.
    distinct, inverse = torch.unique(ids, return_inverse=True)
    positions = torch.arange(ids.numel(), device=ids.device)
    last = torch.zeros_like(distinct).scatter_reduce_(0, inverse, positions, "amax")
    return last.sort().values
