"""Reduction: the values of many peers to one value per position, after clipping by norms.

Peers are added one at a time in canonical order, each operation rounds once, and the value of a position
depends only on what was sent for it: the bits are equal for any blocks and any number of ranks.

Rows of embedding tables are reduced by the same rules. Payloads have their ids sorted, so the rows of all
peers for a range of ids are read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import floor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.errors import BudgetError
from megalith.gather.chunks import inverse_dct, unpack_codes, unpack_indices
from megalith.gather.memory_budget import Ledger
from megalith.gather.payload_schema import ParameterSpec, TableSpec
from megalith.gather.plan import UpdateConfig

EPSILON = 1e-8


class PeerRows(NamedTuple):
    """The part of a peer in a block.

    Attributes:
        indices: uint8 [n, index_bytes].
        codes: uint8 [n, code_bytes].
        lookup: float32 [bins], clipped.
    """

    indices: Tensor
    codes: Tensor
    lookup: Tensor


class PeerTable(Protocol):
    """The rows of one table that one peer sent, sorted by id."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""

    def ids(self, start: int, stop: int) -> Tensor:
        """Read ids.

        Args:
            start: The first row.
            stop: The row after the last one.

        Returns:
            int64 [n].
        """

    def rows(self, start: int, stop: int) -> Tensor:
        """Read rows.

        Args:
            start: The first row.
            stop: The row after the last one.

        Returns:
            float32 [n, dim].
        """


def medians(norms: Tensor) -> Tensor:
    """Return the median norm of each column, the lower of two.

    Args:
        norms: float64 [peers, n].

    Returns:
        float64 [n].
    """
    return norms.sort(dim=0).values[(norms.shape[0] - 1) // 2]


def clip_factors(norms: Tensor, config: UpdateConfig) -> Tensor:
    """Return the factor of each peer's values.

    Args:
        norms: float64 [peers, n].
        config: The outer step.

    Returns:
        float32 [peers, n], at most 1.
    """
    if config.clip == "none" or norms.shape[0] == 0:
        return torch.ones_like(norms, dtype=torch.float32)
    return (medians(norms) / (norms + EPSILON)).clamp(max=1.0).to(torch.float32)


def reduce_rows(
    spec: ParameterSpec, num_rows: int, peers: Iterable[PeerRows], num_peers: int, config: UpdateConfig
) -> Tensor:
    """Return the decoded pseudo-gradient of a block.

    Args:
        spec: The parameter.
        num_rows: The number of rows of the block.
        peers: The parts of all peers in canonical order, read one at a time.
        num_peers: The number of peers.
        config: The outer step.

    Returns:
        float32 [num_rows, size], zero where no peer sent a value.
    """
    tile = _reduce_entries(_entries(spec, peers), num_rows * spec.size, num_peers, config)
    return decode(tile.view(num_rows, spec.size), spec)


def add_rows(spec: ParameterSpec, num_rows: int, peers: Iterable[PeerRows], config: UpdateConfig) -> Tensor:
    """Add the values of some peers; `finish_sums` makes a mean of the sums of all.

    Args:
        spec: The parameter.
        num_rows: The number of rows of the block.
        peers: The parts of these peers.
        config: The outer step.

    Returns:
        float32 [1 or 2, num_rows * size]: sums and, for a mean over contributors, counts.
    """
    sums = torch.zeros(2 if config.mean == "contributors" else 1, num_rows * spec.size)
    _add(_entries(spec, peers), sums[0], sums[1] if len(sums) > 1 else None)
    return sums


def finish_sums(sums: Tensor, num_peers: int) -> Tensor:
    """Divide sums.

    Args:
        sums: What `add_rows` returned, added over all peers; it changes.
        num_peers: The number of peers.

    Returns:
        float32 [n], in the memory of `sums`.
    """
    return sums[0].div_(sums[1].clamp_(min=1.0) if len(sums) > 1 else float(num_peers))


def decode(tile: Tensor, spec: ParameterSpec) -> Tensor:
    """Invert the transform of a block, if the parameter has one.

    Args:
        tile: float32 [rows, size].
        spec: The parameter.

    Returns:
        float32 [rows, size].
    """
    return inverse_dct(tile, spec) if spec.dct else tile


def reduce_table(
    table: TableSpec, peers: Sequence[PeerTable], factors: Tensor, config: UpdateConfig, ledger: Ledger
) -> Iterator[tuple[Tensor, Tensor]]:
    """Reduce the rows of one table.

    Args:
        table: The table.
        peers: What each peer sent, in canonical order.
        factors: float32 [peers], the factor of each peer's rows.
        config: The outer step.
        ledger: Memory is taken from it.

    Yields:
        Ids int64 [n], ascending over all blocks, and their reduced rows float32 [n, dim].

    Raises:
        BudgetError: Not even one row of each peer fits.
    """
    if not peers:
        return
    each = len(peers) * table_row_bytes(table, config)
    count = (ledger.budget - ledger.used) // each
    if count < 1:
        raise BudgetError(f"the update: one row of table {table.name!r} of each peer takes {each} bytes")
    at = [0] * len(peers)
    while any(start < peer.num_rows for start, peer in zip(at, peers, strict=True)):
        with ledger.hold(count * each, "rows of a table"):
            ids = [
                peer.ids(start, min(start + count, peer.num_rows))
                for peer, start in zip(peers, at, strict=True)
            ]
            # Up to the lowest last id of the peers that have more, the rows of every peer are here.
            lasts = [
                int(own[-1])
                for own, start, peer in zip(ids, at, peers, strict=True)
                if start + len(own) < peer.num_rows
            ]
            counts = [int((own <= min(lasts)).sum()) if lasts else len(own) for own in ids]
            taken = [own[:length] for own, length in zip(ids, counts, strict=True)]
            found = torch.cat(taken).unique()
            columns = torch.arange(table.dim)
            sent = (
                (
                    (torch.searchsorted(found, own)[:, None] * table.dim + columns).flatten(),
                    (peer.rows(start, start + len(own)) * factor).flatten(),
                )
                for peer, start, own, factor in zip(peers, at, taken, factors, strict=True)
            )
            rows = _reduce_entries(sent, found.numel() * table.dim, len(peers), config)
            yield found, rows.view(found.numel(), table.dim)
            at = [start + length for start, length in zip(at, counts, strict=True)]


def table_row_bytes(table: TableSpec, config: UpdateConfig) -> int:
    """Return the memory of one sent row of a table while it is reduced.

    Args:
        table: The table.
        config: The outer step.

    Returns:
        The number of bytes.
    """
    return 48 + (24 if config.rule == "mean" else 112) * table.dim


def _entries(spec: ParameterSpec, peers: Iterable[PeerRows]) -> Iterator[tuple[Tensor, Tensor]]:
    """By peer: positions int64 [m] without repetition, and values float32 [m]."""
    for peer in peers:
        starts = torch.arange(peer.indices.shape[0], device=peer.indices.device) * spec.size
        places = (unpack_indices(peer.indices, spec.keep) + starts[:, None]).flatten()
        codes = unpack_codes(peer.codes, spec.keep, spec.bits)
        yield places, peer.lookup[codes.to(torch.int32).flatten()]


def _add(sent: Iterable[tuple[Tensor, Tensor]], total: Tensor, count: Tensor | None) -> None:
    for places, values in sent:
        total.scatter_add_(0, places, values)
        if count is not None:
            count.scatter_add_(0, places, torch.ones_like(values))


def _reduce_entries(
    sent: Iterable[tuple[Tensor, Tensor]], size: int, num_peers: int, config: UpdateConfig
) -> Tensor:
    """The value of each of `size` positions: float32 [size]."""
    if config.rule != "mean":
        return _robust(list(sent), size, num_peers, config)
    total = count = None
    for places, values in sent:
        if total is None:
            total = torch.zeros(size, device=values.device)
            if config.mean == "contributors":
                # A byte per position is enough for the counts of up to 255 peers.
                kind = torch.uint8 if num_peers < 256 else torch.int32
                count = torch.zeros(size, dtype=kind, device=values.device)
        total.scatter_add_(0, places, values)
        if count is not None:
            count.scatter_add_(0, places, torch.ones_like(places, dtype=count.dtype))
    if total is None:
        return torch.zeros(size)
    return total.div_(float(num_peers) if count is None else count.clamp_(min=1))


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
