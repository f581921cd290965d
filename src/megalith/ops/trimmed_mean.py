"""Medians and trimmed means of the values of each position, without a loop over positions.

The result of a position depends only on its own values, and sums run in ascending order: the bits do not
depend on which positions are reduced together.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor

import torch
from torch import Tensor


def trimmed_mean(
    sent: list[tuple[Tensor, Tensor]], size: int, *, trim: float | None, senders: int | None = None
) -> Tensor:
    """Reduce the values of each position to their median or trimmed mean."""
    # sent: for each sender, positions int64 [m] without repetition, and values float32 [m]; returns: float32
    # [size], zero where no value was sent.
    if not sent:
        return torch.zeros(size, device="cpu")
    most = len(sent) if senders is None else senders
    places = torch.cat([each for each, _ in sent])
    values = torch.cat([each for _, each in sent])
    sent.clear()
    order = values.argsort(stable=True)
    order = order[places[order].argsort(stable=True)]
    places, values = places[order], values[order]
    del order
    count = torch.bincount(places, minlength=size)
    number = torch.arange(places.numel(), device=places.device) - (count.cumsum(0) - count)[places]
    rank = number
    if senders is not None:
        # Zeros that were not sent are between the negative and the positive values.
        rank = number + (senders - count)[places] * (values > 0)
        count = torch.full_like(count, senders)
    if trim is None:
        low, high = values.new_zeros(size), values.new_zeros(size)
        for out, middle in ((low, (count - 1) // 2), (high, count // 2)):
            chosen = rank == middle[places]
            out[places[chosen]] = values[chosen]
        return (low + high) * 0.5
    share = Fraction(str(trim))
    cuts = torch.tensor([floor(share * n) for n in range(most + 1)], device=places.device)[count]
    kept = (rank >= cuts[places]) & (rank < (count - cuts)[places])
    total = values.new_zeros(size)
    for turn in range(int(number.max()) + 1 if number.numel() else 0):
        chosen = kept & (number == turn)
        total.scatter_add_(0, places[chosen], values[chosen])
    return total.div_((count - 2 * cuts).clamp_(min=1).to(torch.float32))
