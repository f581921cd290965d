"""The message of gradients from one rank to another: a header, one bit per id, the values.

    part       content
    header     sequence number, flags (1 failed, 4 left), step, time, scale, clip_norm: int64, the last two
               the bits of float64
    bits       one per requested id (1: it has a gradient), padded to 8 bytes
    values     the gradients by table, in the precision of the wire, padded to 8 bytes
    counts     int32 per requested id: its occurrences, padded to 8 bytes; only if a table has an admission
               policy

A rank that fails the update sends a header and zeros, as the other ranks expect data of a known size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import torch
from torch import Tensor

from megalith.shards.block_order import begins_of, join_blocks
from megalith.shards.wire import Wire

NO_TIME = -1
"""Stands for no time in a header."""
_HEAD_WORDS = 6
_HEAD_BYTES = 8 * _HEAD_WORDS


@dataclass(frozen=True)
class GradientPush:
    """Gradients to send."""

    flat: Tensor  # float32, the summed gradients of all distinct ids
    mask: Tensor | None  # bool [u], which ids take part; None: all
    step: int  # See `Shards.apply_gradients`, as are the others.
    time: float | None
    scale: float
    clip_norm: float  # 0 for no limit
    # The learning rate of each segment, for the trainable tables with requested ids
    rates: Mapping[str, list[float]]
    # int64 [u], how often each distinct id occurred; None if no table has an admission policy
    occurrences: Tensor | None = None


@dataclass(frozen=True)
class ReceivedGradients:
    """The gradients that all ranks sent to an owner, by table. In each tensor they are in rank order."""

    values: list[Tensor]  # float32 [n, dim] per table, for all requested ids
    masks: list[Tensor] | None  # bool [n] per table: which ids have a gradient; None: all
    # int64 [n] per table: how often each id occurred at its rank; None if no table has an admission policy
    occurrences: list[Tensor] | None


class GradientMessage:
    """Encodes and decodes messages.

    In all methods `counts` is the number of ids, int64 [ranks, tables].
    """

    def __init__(
        self,
        wire: Wire,
        dims: Sequence[int],
        *,
        with_counts: bool = False,
        new_buffer: Callable[[int], Tensor],
    ) -> None:
        self._with_counts = with_counts
        self._wire = wire
        self._dims = dims
        self._row_bytes = torch.tensor([wire.row_bytes(dim) for dim in dims], dtype=torch.int64, device="cpu")
        self._new_buffer = new_buffer
        self._device = new_buffer(0).device

    def sizes(self, counts: Tensor) -> list[int]:
        """Return the size of the message for each rank."""
        values = self._wire.sizes(counts, self._dims)
        ids = counts.sum(1).tolist()
        extra = [_pad(4 * n) if self._with_counts else 0 for n in ids]
        bits = [_pad(-(-n // 8)) for n in ids]
        return [_HEAD_BYTES + b + _pad(v) + e for b, v, e in zip(bits, values, extra, strict=True)]

    def encode(self, head: Tensor, push: GradientPush | None, counts: Tensor, sizes: list[int]) -> Tensor:
        """Encode one message per rank."""
        # returns: uint8 [sum of sizes].
        head = head.to(self._device)
        if push is None:
            heads = [torch.nn.functional.pad(head, (0, size // 8 - _HEAD_WORDS)) for size in sizes]
            return torch.cat(heads).view(torch.uint8)
        ids = counts.sum(1).tolist()
        values = self._wire.encode(push.flat, counts, self._dims)
        parts = values.split_with_sizes(self._wire.sizes(counts, self._dims))
        masks: Sequence[Tensor | None] = [None] * len(ids)
        if push.mask is not None:
            masks = push.mask.split_with_sizes(ids)
        seen: Sequence[Tensor | None] = [None] * len(ids)
        if push.occurrences is not None:
            seen = push.occurrences.split_with_sizes(ids)
        pieces: list[Tensor] = []
        for n, mask, part, count in zip(ids, masks, parts, seen, strict=True):
            filler = torch.zeros(_pad(part.numel()) - part.numel(), dtype=torch.uint8, device=self._device)
            pieces += [head.view(torch.uint8), _bits(n, mask, self._device), part, filler]
            if self._with_counts:
                ones = torch.ones(n, dtype=torch.int32, device=self._device)
                words = ones if count is None else count.to(torch.int32)
                pieces.append(torch.nn.functional.pad(words, (0, n % 2)).view(torch.uint8))
        return torch.cat(pieces, out=self._new_buffer(sum(sizes)))

    def decode(self, data: Tensor, counts: Tensor, sizes: list[int]) -> ReceivedGradients:
        """Decode the messages of all ranks."""
        # data: uint8 [sum of sizes], the messages in the order of the ranks.
        ids = counts.sum(1).tolist()
        totals = counts.sum(0).tolist()
        begins = begins_of(sizes)
        values_at = [at + _HEAD_BYTES + _pad(-(-n // 8)) for at, n in zip(begins, ids, strict=True)]
        joined = self._new_buffer(sum(map(mul, totals, self._row_bytes.tolist())))
        join_blocks(data, values_at, counts, self._row_bytes, joined)
        # The wires of gradients encode each number by itself, so they can be decoded in another order.
        flat = self._wire.decode(joined, counts, self._dims)
        floats = flat.split_with_sizes([n * dim for n, dim in zip(totals, self._dims, strict=True)])
        values = [own.view(-1, dim) for own, dim in zip(floats, self._dims, strict=True)]
        bits = [data[at + _HEAD_BYTES : end] for at, end in zip(begins, values_at, strict=True)]
        masks = None
        if not all(bool((own == 255).all()) for own in bits):
            each = [_unpack_bits(own, n).view(torch.uint8) for own, n in zip(bits, ids, strict=True)]
            masks = [own.view(torch.bool) for own in self._by_table(torch.cat(each), begins_of(ids), counts)]
        seen = None
        if self._with_counts:
            values_of = self._wire.sizes(counts, self._dims)
            at = [begin + _pad(size) for begin, size in zip(values_at, values_of, strict=True)]
            words = self._by_table(data, at, counts, 4)
            seen = [own.view(torch.int32).to(torch.int64) for own in words]
        return ReceivedGradients(values, masks, seen)

    def _by_table(self, data: Tensor, begins: list[int], counts: Tensor, width: int = 1) -> Sequence[Tensor]:
        """Return the items of each table, of `width` bytes each, as bytes."""
        out = torch.empty(int(counts.sum()) * width, dtype=torch.uint8, device=data.device)
        join_blocks(data, begins, counts, torch.full_like(counts[0], width), out)
        return out.split_with_sizes([n * width for n in counts.sum(0).tolist()])


def push_head(number: int, flags: int, push: GradientPush | None) -> Tensor:
    """Make a header."""
    # returns: int64 [6].
    if push is None:
        return torch.tensor([number, flags, 0, NO_TIME, 0, 0], device="cpu")
    bits = struct.unpack("=2q", struct.pack("=2d", push.scale, push.clip_norm))
    return torch.tensor([number, flags, push.step, seconds_word(push.time), *bits], device="cpu")


def read_head(part: Tensor) -> list[int]:
    """Return the header of a message."""
    words: list[int] = part[:_HEAD_BYTES].view(torch.int64).tolist()
    return words


def seconds_word(time: float | None) -> int:
    """Return a time as a number of a header."""
    return NO_TIME if time is None else int(time)


def latest_time(times: Sequence[int]) -> int | None:
    """Return the latest time of all ranks."""
    latest = max(times)
    return None if latest == NO_TIME else latest


def _pad(size: int) -> int:
    return -(-size // 8) * 8


def _bits(n: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return one bit per id, padded to 8 bytes: those in the mask, or all."""
    if mask is None:
        return torch.full((_pad(-(-n // 8)),), 255, dtype=torch.uint8, device=device)
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -n % 64)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=device)).sum(1).to(torch.uint8)


def _unpack_bits(bits: Tensor, n: int) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> places) & 1).view(-1)[:n].bool()
