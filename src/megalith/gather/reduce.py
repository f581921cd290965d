"""Reduction: the values of many peers to one value per position, after clipping by norms.

Peers are added one at a time in canonical order, each operation rounds once, and the value of a position
depends only on what was sent for it: the bits are equal for any blocks and any number of ranks.

Rows of embedding tables are reduced by the same rules. Payloads have their ids sorted, so the rows of all
peers for a range of ids are read together.

`row_bytes` is the memory of a row of a block, the largest over the phases of a block:

    phase of a block          buffers that exist together, per row of a rank's own share
    count of common positions packed rows for and from other ranks; then one key per position of all peers
    exchange of codes         packed rows for other ranks, packed rows from other ranks
    reduction                 packed rows from other ranks, sums, counts, one peer's unpacked rows
    delivery and step         own tile, a tile from another rank; the step works in small pieces
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import floor
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megalith.gather.payload import PackedRows
from megalith.gather.payload_schema import ParameterSpec, TableSpec
from megalith.gather.plan import UpdateConfig
from megalith.ops.matrix_chunks import (
    add_chunk_rows,
    divide_by_counts,
    inverse_dct,
    unpack_codes,
    unpack_indices,
)
from megalith.storage.bodies import Ledger

EPSILON = 1e-8
TablePart = Literal["ids", "rows"]
BLOCK_BYTES = 32 << 20
"""Memory of a block at most, also with a larger budget: larger blocks are not faster."""
_RESERVE_BYTES = 3 << 20  # of a budget, for objects of the window and freed memory that the allocator keeps
_PEER_BYTES = 48  # one kept position of a peer, unpacked: index, place, code, value
_ENTRY_BYTES = 84  # one value of a robust rule: place and value, sorted, ranked
_GRAM_ENTRY_BYTES = 64  # one position in the count of common positions: key, place, peer, comparison


def clip_factors(norms: Tensor, config: UpdateConfig) -> Tensor:
    """Return the factor of each peer's values."""
    # norms: float64 [peers, n]; returns: float32 [peers, n], at most 1.
    if config.clip == "none" or norms.shape[0] == 0:
        return torch.ones_like(norms, dtype=torch.float32)
    middle = norms.median(dim=0).values  # the lower of two
    return (middle / (norms + EPSILON)).clamp(max=1.0).to(torch.float32)


def reduce_rows(
    spec: ParameterSpec,
    num_rows: int,
    peers: Iterable[PackedRows],
    num_peers: int,
    config: UpdateConfig,
    device: torch.device,
    total: Callable[[Tensor], object] = lambda sums: None,
) -> Tensor:
    """Return the decoded pseudo-gradient of a block."""
    # returns: float32 [num_rows, size], zero where no peer sent a value.
    if config.rule != "mean":
        tile = _trimmed_mean(list(_entries(spec, peers)), num_rows * spec.size, num_peers, config)
    else:
        tile, counts = torch.zeros(num_rows, spec.size, device=device), None
        if config.mean == "contributors":
            # A byte per position is enough for the counts of up to 255 peers.
            counts = torch.zeros_like(tile, dtype=torch.uint8 if num_peers < 256 else torch.int32)
        for peer in peers:
            add_chunk_rows(tile, counts, peer.indices, peer.codes, peer.lookup, spec.keep, spec.bits)
        total(tile)
        if counts is None:
            tile.div_(float(num_peers))
        else:
            total(counts)
            divide_by_counts(tile, counts)
    tile = tile.view(num_rows, spec.size)
    return inverse_dct(tile, spec.chunk) if spec.dct else tile


def block_bytes(left: int) -> int:
    """Return how large a block may be if some bytes of the budget are left."""
    return min(left - min(left // 2, _RESERVE_BYTES), BLOCK_BYTES)


def reduce_table(
    table: TableSpec,
    counts: Sequence[int],
    read: Callable[[TablePart, int, int, int], Tensor],
    factors: Tensor,
    config: UpdateConfig,
    ledger: Ledger,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reduce the rows of one table."""
    # read: reads the ids, int64 [n], or the rows, float32 [n, dim], that a peer sent, sorted by id; factors:
    # float32 [peers], the factor of each peer's rows; yields: ids int64 [n], ascending over all blocks, and
    # their reduced rows float32 [n, dim].
    each = table_row_bytes(table, config, len(counts))
    # The tables that take the rows need memory, too.
    most = max(1, block_bytes(ledger.budget - ledger.used) // 2 // max(1, each))
    at, peers = [0] * len(counts), range(len(counts))
    while any(at[peer] < counts[peer] for peer in peers):
        with ledger.hold(most * each, "rows of a table"):
            ids = [read("ids", peer, at[peer], min(at[peer] + most, counts[peer])) for peer in peers]
            # Up to the lowest last id of the peers that have more, the rows of every peer are here.
            lasts = [int(ids[peer][-1]) for peer in peers if at[peer] + len(ids[peer]) < counts[peer]]
            taken = [own[: int((own <= min(lasts)).sum())] if lasts else own for own in ids]
            found = torch.cat(taken).unique()
            sent = (
                (
                    torch.searchsorted(found, taken[peer]),
                    read("rows", peer, at[peer], at[peer] + len(taken[peer])) * factors[peer],
                )
                for peer in peers
            )
            yield found, _reduce_table_rows(sent, len(found), table.dim, len(peers), config)
            at = [at[peer] + len(taken[peer]) for peer in peers]


def table_row_bytes(table: TableSpec, config: UpdateConfig, num_peers: int) -> int:
    """Return the memory of one row of each peer, from ids to the step."""
    return num_peers * (48 + (24 if config.rule == "mean" else 36 + _ENTRY_BYTES) * table.dim)


class Travel(NamedTuple):
    """Rows of peers that a rank exchanges per row of its own share, on the rank where they are most."""

    sent: int
    received: int


def row_bytes(
    spec: ParameterSpec, config: UpdateConfig, num_peers: int, travel: Travel, *, counted: bool = False
) -> int:
    """Return the memory of one row of a rank's own share, from packed bytes to the step."""
    fast, moved = config.exchange == "fast", travel.sent + travel.received
    packed = spec.index_bytes + spec.code_bytes  # both travel together if indices were not spooled
    exchange = 0 if fast else moved * packed
    reduction = packed + (0 if fast else travel.received * packed)
    if config.rule == "mean":
        reduction += 8 * spec.size + _PEER_BYTES * spec.keep
    else:
        reduction += 36 * spec.size + (_PEER_BYTES + _ENTRY_BYTES * num_peers) * spec.keep
    decoding = 12 * spec.size if spec.dct else 0
    delivery = (12 if travel.received else 8) * spec.size  # the tile keeps its counts
    most = max(exchange, reduction, decoding, delivery)
    if counted:
        counting = num_peers * (spec.index_bytes + spec.keep * _GRAM_ENTRY_BYTES) + spec.keep * 16
        most = max(most, moved * spec.index_bytes, counting)
    return most


def _entries(spec: ParameterSpec, peers: Iterable[PackedRows]) -> Iterator[tuple[Tensor, Tensor]]:
    """By peer: positions int64 [m] without repetition, and values float32 [m]."""
    for peer in peers:
        starts = torch.arange(peer.indices.shape[0], device=peer.indices.device) * spec.size
        places = (unpack_indices(peer.indices, spec.keep) + starts[:, None]).flatten()
        codes = unpack_codes(peer.codes, spec.keep, spec.bits)
        yield places, peer.lookup[codes.to(torch.int32).flatten()]


def _reduce_table_rows(
    sent: Iterable[tuple[Tensor, Tensor]], count: int, dim: int, num_peers: int, config: UpdateConfig
) -> Tensor:
    """The rows of `count` ids, of the places and rows that each peer sent: float32 [count, dim]."""
    if config.rule != "mean":
        columns = torch.arange(dim, device="cpu")
        entries = [((places[:, None] * dim + columns).flatten(), rows.flatten()) for places, rows in sent]
        return _trimmed_mean(entries, count * dim, num_peers, config).view(count, dim)
    total, contributors = torch.zeros(count, dim, device="cpu"), torch.zeros(count, 1, device="cpu")
    for places, rows in sent:
        total.index_add_(0, places, rows)
        contributors[places] += 1
    return total.div_(contributors if config.mean == "contributors" else float(num_peers))


def _trimmed_mean(
    sent: list[tuple[Tensor, Tensor]], size: int, num_peers: int, config: UpdateConfig
) -> Tensor:
    total = num_peers if config.mean == "peers" else None
    return trimmed_mean(sent, size, trim=None if config.rule == "median" else config.trim, senders=total)


def trimmed_mean(
    sent: list[tuple[Tensor, Tensor]], size: int, *, trim: float | None, senders: int | None = None
) -> Tensor:
    """Reduce the values of each position to their median or trimmed mean, without a loop over positions."""
    # The result of a position depends only on its own values, and sums run in ascending order: the bits do
    # not depend on which positions are reduced together.
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
    count = torch.bincount(places, minlength=size).to(torch.int32)  # int64 would take most of the memory
    first = count.cumsum(0, dtype=torch.int32) - count
    number = torch.arange(places.numel(), dtype=torch.int32, device=places.device) - first[places]
    del first
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
    dropped = [floor(share * n) for n in range(most + 1)]
    cuts = torch.tensor(dropped, dtype=torch.int32, device=places.device)[count]
    kept = (rank >= cuts[places]) & (rank < (count - cuts)[places])
    total = values.new_zeros(size)
    for turn in range(int(number.max()) + 1 if number.numel() else 0):
        chosen = kept & (number == turn)
        total.scatter_add_(0, places[chosen], values[chosen])
    return total.div_((count - 2 * cuts).clamp_(min=1).to(torch.float32))
