"""Values of many peers to one value per position: mean, trimmed mean or median, after clipping by norms.

Peers are added one at a time in canonical order, each operation rounds once, and a position's value depends
on nothing but what was sent for it: the same bits in whatever blocks, on whatever number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import floor
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.gather.chunks import inverse_dct
from megalith.gather.packing import unpack_codes, unpack_indices
from megalith.gather.schema import ParameterSpec
from megalith.gather.settings import UpdateConfig

EPSILON = 1e-8
_PEER_BYTES = 48  # one peer's kept position, unpacked: index, place, code, value
_ENTRY_BYTES = 72  # one sent value of a robust rule: place and value, sorted, ranked


class PeerRows(NamedTuple):
    """A peer's part of a block. indices, codes: uint8 [n, .]. lookup: float32 [bins], clipped."""

    indices: Tensor
    codes: Tensor
    lookup: Tensor


def medians(norms: Tensor) -> Tensor:
    """The middle norm of each column, the lower of two: float64 [peers, n] to float64 [n]."""
    return norms.sort(dim=0).values[(norms.shape[0] - 1) // 2]


def clip_factors(norms: Tensor, config: UpdateConfig) -> Tensor:
    """What each peer's values are multiplied with: float64 [peers, n] to float32 [peers, n], at most 1."""
    if config.clip == "none" or norms.shape[0] == 0:
        return torch.ones_like(norms, dtype=torch.float32)
    return (medians(norms) / (norms + EPSILON)).clamp(max=1.0).to(torch.float32)


def reduce_bytes(spec: ParameterSpec, num_peers: int, config: UpdateConfig) -> int:
    """Memory that `reduce_rows` takes for one row, its result included."""
    if config.rule == "mean":
        return 8 * spec.size + _PEER_BYTES * spec.keep
    return 28 * spec.size + (_PEER_BYTES + _ENTRY_BYTES * num_peers) * spec.keep


def reduce_rows(
    spec: ParameterSpec, num_rows: int, peers: Iterable[PeerRows], num_peers: int, config: UpdateConfig
) -> Tensor:
    """The pseudo-gradient of a block, decoded: float32 [num_rows, size], zero where nobody sent anything.

    peers: in canonical order; read one at a time. num_peers: how many there are.
    """
    sent = ((_places(spec, peer.indices), _values(spec, peer)) for peer in peers)
    tile = reduce_entries(sent, num_rows * spec.size, num_peers, config).view(num_rows, spec.size)
    return inverse_dct(tile, spec) if spec.dct else tile


def reduce_entries(
    sent: Iterable[tuple[Tensor, Tensor]], size: int, num_peers: int, config: UpdateConfig
) -> Tensor:
    """The value of each of `size` positions: float32 [size].

    sent: by peer, positions int64 [m] without repetition and values float32 [m].
    """
    if config.rule != "mean":
        return _robust(list(sent), size, num_peers, config)
    total, count = None, None
    for places, values in sent:
        if total is None or count is None:
            total = torch.zeros(size, device=values.device)
            count = torch.zeros(size if config.mean == "contributors" else 0, device=values.device)
        total.scatter_add_(0, places, values)
        if config.mean == "contributors":
            count.scatter_add_(0, places, torch.ones_like(values))
    if total is None or count is None:
        return torch.zeros(size)
    return total.div_(count.clamp_(min=1.0) if config.mean == "contributors" else float(num_peers))


def _places(spec: ParameterSpec, packed: Tensor) -> Tensor:
    starts = torch.arange(packed.shape[0], device=packed.device) * spec.size
    return (unpack_indices(packed, spec.keep) + starts[:, None]).flatten()


def _values(spec: ParameterSpec, peer: PeerRows) -> Tensor:
    codes = unpack_codes(peer.codes, spec.keep, spec.bits)
    return peer.lookup[codes.to(torch.int64).flatten()]


def _robust(sent: list[tuple[Tensor, Tensor]], size: int, num_peers: int, config: UpdateConfig) -> Tensor:
    """Sorts all values of a position and takes the middle ones."""
    if not sent:
        return torch.zeros(size)
    places = torch.cat([each for each, _ in sent])
    values = torch.cat([each for _, each in sent])
    sent.clear()
    order = values.argsort(stable=True)
    order = order[places[order].argsort(stable=True)]
    places, values = places[order], values[order]
    del order
    count = torch.bincount(places, minlength=size)
    number = torch.arange(places.numel(), device=places.device) - (count.cumsum(0) - count)[places]
    if config.mean == "peers":
        # Peers that sent nothing sent zero: between the negative and the positive values.
        rank = number + (num_peers - count)[places] * (values > 0)
        count = torch.full_like(count, num_peers)
    else:
        rank = number
    if config.rule == "median":
        low, high = values.new_zeros(size), values.new_zeros(size)
        for out, middle in ((low, (count - 1) // 2), (high, count // 2)):
            chosen = rank == middle[places]
            out[places[chosen]] = values[chosen]
        return (low + high) * 0.5
    cuts = _cuts(config.trim, num_peers).to(places.device)[count]
    kept = (rank >= cuts[places]) & (rank < (count - cuts)[places])
    total = values.new_zeros(size)
    for turn in range(int(number.max()) + 1 if number.numel() else 0):
        chosen = kept & (number == turn)
        total.scatter_add_(0, places[chosen], values[chosen])
    return total.div_((count - 2 * cuts).clamp_(min=1).to(torch.float32))


def _cuts(trim: float, num_peers: int) -> Tensor:
    """How many values are left out at each end, by the number of values."""
    share = Fraction(str(trim))
    return torch.tensor([floor(share * n) for n in range(num_peers + 1)])
